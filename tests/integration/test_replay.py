"""Replays on the real backend restore the state bit by bit, from any beginning of the log."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support import tiny_models
from support.engine_bench import BASE, ENGINE, Bench
from tinsmith.backends.torch import TorchBackend
from tinsmith.cluster.ownership import Ownership
from tinsmith.engine import snapshots
from tinsmith.engine.loop import Engine, Stores
from tinsmith.runtime import malloc
from tinsmith.storage.directories import Directories
from tinsmith.store.custom_losses import CustomLosses
from tinsmith.store.models import NewModel
from tinsmith.types import LoraSpec
from unit.test_captures import same, state

MODEL = "s:train:0"
FAMILIES: dict[str, dict[str, object]] = {
    "adamw": {"adam_params": {"learning_rate": 5e-3, "weight_decay": 0.01, "grad_clip_norm": 0.5}},
    "dimuon": {"optimizer_params": {"type": "dimuon", "learning_rate": 5e-3, "grad_clip_norm": 0.5}},
}


class TorchBench(Bench):
    """A Bench with the torch backend and a tiny model."""

    def restart(self) -> None:
        if not hasattr(self, "shape"):
            self.shape = replace(tiny_models.make(self.directory / "tiny"), name=BASE)
        torch_backend = TorchBackend(self.shape, device="cpu")
        self.backend = torch_backend  # type: ignore[assignment]
        directories = Directories(self.directory / "versions"), Directories(self.directory / "snapshots")
        durable = (self.futures, self.models, self.samplers, self.checkpoints)
        stores = Stores(*durable, *directories, CustomLosses(self.db), Ownership(self.db, BASE, ENGINE))
        self.engine = Engine(self.shape, torch_backend, stores, self.mailbox, self.settings)
        self.engine.start()

    @property
    def torch_backend(self) -> TorchBackend:
        assert isinstance(self.backend, TorchBackend)
        return self.backend


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[TorchBench]:
    with tempfile.TemporaryDirectory(prefix="tn-") as sockets:
        new_bench = TorchBench(tmp_path, Path(sockets))
        yield new_bench
        new_bench.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_comes_back_bit_by_bit_from_a_snapshot_a_gradient_and_a_log(
    bench: TorchBench, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith.engine.snapshots.SNAPSHOT_OPTIM_STEPS", 3)
    bench.models.create(NewModel(MODEL, "s", "alice", BASE, LoraSpec(4, seed=1), family))
    bench.submit(MODEL, 0, "create_model", {})
    bench.run_until_idle()
    seq_id = 1
    for _ in range(5):
        for tokens in ((1, 2, 3, 4), (5, 6, 7)):
            bench.train(MODEL, seq_id, tokens)
            bench.run_until_idle()
            seq_id += 1
        bench.submit(MODEL, seq_id, "optim_step", FAMILIES[family])
        bench.run_until_idle()
        seq_id += 1
    sampler = bench.publish(MODEL, seq_id, 0)
    bench.train(MODEL, seq_id + 1, (9, 8, 7))
    bench.run_until_idle()
    before, version = state(bench.torch_backend, MODEL), bench.torch_backend._versions[sampler].flat_P.clone()
    for damaged in (False, True):
        if damaged:
            newest = bench.models.find(MODEL)
            assert newest is not None and newest.snapshot_seq_id == 9
            (bench.directory / "snapshots" / str(newest.snapshot_directory) / "optimizer.safetensors").unlink()
        bench.restart()
        sampled = bench.sample(sampler, int(damaged))
        bench.run_until_idle()
        outcome = bench.outcome(sampled)
        assert outcome is not None and outcome.error is None
        assert same(state(bench.torch_backend, MODEL), before)
        assert torch.equal(bench.torch_backend._versions[sampler].flat_P, version)


def test_a_model_that_left_memory_comes_back_bit_by_bit(bench: TorchBench, monkeypatch: pytest.MonkeyPatch) -> None:
    other = bench.model("t:train:0")
    bench.models.create(NewModel(MODEL, "s", "alice", BASE, LoraSpec(4, seed=1)))
    bench.submit(MODEL, 0, "create_model", {})
    for seq_id, tokens in ((1, (1, 2, 3, 4)), (3, (5, 6))):
        bench.train(MODEL, seq_id, tokens)
        bench.step(MODEL, seq_id + 1, rate=0.01)
    bench.train(MODEL, 5, (9, 8, 7))
    bench.run_until_idle()
    before = state(bench.torch_backend, MODEL)
    trims: list[None] = []
    monkeypatch.setattr(malloc, "trim", lambda: trims.append(None))
    monkeypatch.setattr(snapshots, "TRIM_BYTES", 2 * bench.torch_backend.model_bytes(MODEL))
    bench.engine._snapshots.budget_bytes = 1
    bench.forward(other, 1)
    bench.run_until_idle()
    assert not bench.torch_backend.has_model(MODEL)
    assert len(trims) == 1  # each of the two was evicted once
    bench.forward(MODEL, 6)
    bench.run_until_idle()
    assert same(state(bench.torch_backend, MODEL), before)
    mapped = Path("/proc/self/maps").read_text()
    assert str(bench.directory / "snapshots") not in mapped, "a deleted file would stay on the disk"
