"""The engine with its files in a bucket: only requests whose files are in transfer wait for the network."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from support import buckets
from support.buckets import Bucket
from support.engine_bench import Bench
from tinsmith.db.schema import CHECKPOINTS, MODELS
from tinsmith.engine import snapshots
from tinsmith.engine.versions import VERSIONS_IN_MEMORY
from tinsmith.errors import NotFoundError
from tinsmith.storage.buckets import BucketDirectories
from tinsmith.storage.cache import Cache
from tinsmith.storage.directories import Directories, Staged
from tinsmith.storage.stores import UnreachableError
from tinsmith.store.checkpoints import parse_path

ONE, TWO = "s:train:0", "s:train:1"
PATH = f"tinker://{ONE}/weights/one"


class Gate:
    """Placing a directory waits while the gate is closed, and fails while it is set to."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.fails: Exception | None = None
        self.unreachable = False


class GatedDirectories(BucketDirectories):
    gate: Gate

    def place(self, staged: Staged) -> tuple[str, int]:
        assert self.gate.open.wait(60)
        if self.gate.fails is not None:
            raise self.gate.fails
        return super().place(staged)

    def _fetch(self, name: str) -> None:
        if self.gate.unreachable:
            raise UnreachableError("the object store does not answer")
        super()._fetch(name)


class FarBench(Bench):
    def __init__(self, directory: Path, sockets: Path, bucket: Bucket) -> None:
        self.bucket = bucket
        self.gate = Gate()
        super().__init__(directory, sockets)

    def directories(self, kind: str) -> Directories:
        location = f"{self.bucket.url}/{self.directory.name}/{kind}"
        gated = GatedDirectories(location, Cache(self.directory / "cache", 1 << 30))
        gated.gate = self.gate
        return gated

    def lose_the_disk(self) -> None:
        shutil.rmtree(self.directory / "cache")

    def until(self, happened: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not happened():
            assert time.monotonic() < deadline
            self.engine.run_once(0.01)


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with buckets.bucket() as new_bucket:
        yield new_bucket


@pytest.fixture
def bench(tmp_path: Path, bucket: Bucket) -> Iterator[FarBench]:
    with tempfile.TemporaryDirectory(prefix="tn-") as sockets:
        new_bench = FarBench(tmp_path, Path(sockets), bucket)
        yield new_bench
        new_bench.gate.open.set()
        new_bench.engine.flush()
        new_bench.close()


def test_a_save_on_its_way_holds_up_its_own_model_only(bench: FarBench) -> None:
    bench.model(ONE)
    bench.model(TWO)
    bench.gate.open.clear()
    saved = bench.submit(ONE, 1, "save_weights", {"path": "one"})
    behind, other_step = bench.step(ONE, 2), bench.step(TWO, 1)
    bench.until(lambda: bench.outcome(other_step))
    for _ in range(3):
        bench.engine.run_once(0.0)
    assert bench.outcome(saved) is None and bench.outcome(behind) is None
    assert len(bench.engine._uploads) == 1, "it is sent once"
    with pytest.raises(NotFoundError):
        bench.checkpoints.get("alice", parse_path(PATH))
    bench.gate.open.set()
    bench.until(lambda: bench.outcome(behind))
    assert bench.result(saved)["path"] == PATH
    with bench.checkpoints.reading(bench.checkpoints.get("alice", parse_path(PATH))) as directory:
        assert b'"step": 0' in (directory / "fake_adapter.json").read_bytes(), "as it was when it was saved"


def test_a_save_that_cannot_be_sent_fails_and_the_run_goes_on(bench: FarBench) -> None:
    bench.model(ONE)
    bench.gate.fails = UnreachableError("the object store does not answer as it should")
    saved, after = bench.submit(ONE, 1, "save_weights", {"path": "one"}), bench.step(ONE, 2)
    bench.until(lambda: bench.outcome(after))
    assert "object store does not answer" in bench.error(saved)
    assert bench.optimizer_step(after) == 1
    assert bench.scalar(sa.select(CHECKPOINTS.c.state)) == "failed"
    bench.gate.fails = None
    again = bench.submit(ONE, 3, "save_weights", {"path": "one"})
    bench.until(lambda: bench.outcome(again))
    assert bench.result(again)["path"] == PATH


def test_a_save_that_an_engine_died_over_is_made_by_the_next(bench: FarBench) -> None:
    bench.model(ONE)
    step = bench.step(ONE, 1)
    bench.until(lambda: bench.outcome(step))
    bench.gate.open.clear()
    saved = bench.submit(ONE, 2, "save_weights", {"path": "one"})
    bench.until(lambda: len(bench.engine._uploads))
    first = bench.engine
    bench.restart()  # the first engine is dead, with its unfinished upload
    bench.lose_the_disk()
    bench.gate.open.set()
    bench.until(lambda: bench.outcome(saved))
    assert bench.result(saved)["path"] == PATH
    with bench.checkpoints.reading(bench.checkpoints.get("alice", parse_path(PATH))) as directory:
        assert b'"step": 1' in (directory / "fake_adapter.json").read_bytes()
    first._uploads.wait()


def test_a_model_that_is_unloaded_while_it_is_saved_is_unloaded(bench: FarBench) -> None:
    bench.model(ONE)
    bench.gate.open.clear()
    saved = bench.submit(ONE, 1, "save_weights", {"path": "one"})
    bench.until(lambda: len(bench.engine._uploads))
    unloaded = bench.submit(ONE, None, "unload_model", {})
    bench.until(lambda: bench.outcome(unloaded))
    bench.gate.open.set()
    bench.until(lambda: not bench.engine._uploads)
    assert "was unloaded" in bench.error(saved)


def test_a_load_is_answered_when_its_snapshot_is_in_the_bucket(bench: FarBench) -> None:
    bench.model(ONE)
    bench.train(ONE, 1)
    step = bench.step(ONE, 2)
    saved = bench.submit(ONE, 3, "save_weights", {"path": "one"})
    bench.until(lambda: bench.outcome(saved))
    weight = bench.weight(ONE)
    bench.gate.open.clear()
    loaded = bench.submit(ONE, 4, "load_weights", {"path": PATH, "optimizer": True})
    bench.train(ONE, 5)
    behind = bench.step(ONE, 6)
    bench.until(lambda: len(bench.engine._uploads))
    bench.engine.run_once(0.0)
    assert bench.outcome(loaded) is None
    bench.gate.open.set()
    bench.until(lambda: bench.outcome(behind))
    assert bench.result(loaded)["path"] == PATH
    bench.checkpoints.delete("alice", parse_path(PATH))
    bench.restart()
    bench.lose_the_disk()
    after = bench.step(ONE, 7)
    bench.until(lambda: bench.outcome(after))
    assert bench.optimizer_step(after) == bench.optimizer_step(behind) + 1 == bench.optimizer_step(step) + 2
    assert bench.weight(ONE) != weight


def test_a_load_whose_snapshot_cannot_be_sent_is_replayed(bench: FarBench) -> None:
    bench.model(ONE)
    saved = bench.submit(ONE, 1, "save_weights", {"path": "one"})
    bench.until(lambda: bench.outcome(saved))
    bench.gate.fails = OSError(28, "No space left on device")
    loaded = bench.submit(ONE, 2, "load_weights", {"path": PATH, "optimizer": True})
    step = bench.step(ONE, 3)
    bench.until(lambda: bench.outcome(step))
    assert bench.result(loaded)["path"] == PATH
    assert bench.scalar(sa.select(MODELS.c.snapshot_directory)) is None
    bench.gate.fails = None
    bench.restart()
    after = bench.step(ONE, 4)
    bench.until(lambda: bench.outcome(after))
    assert bench.optimizer_step(after) == 2


def train_past_a_snapshot(bench: FarBench) -> int:
    """Train past a snapshot; return the last seq_id."""
    bench.model(ONE)
    for seq_id in range(1, 2 * snapshots.SNAPSHOT_OPTIM_STEPS + 4, 2):
        bench.train(ONE, seq_id)
        step = bench.step(ONE, seq_id + 1)
    bench.until(lambda: bench.outcome(step))
    bench.engine.flush()
    assert bench.scalar(sa.select(MODELS.c.snapshot_seq_id).where(MODELS.c.model_id == ONE)) is not None
    return seq_id + 1


def test_an_engine_with_an_empty_disk_goes_on_from_the_snapshot(bench: FarBench) -> None:
    last_seq_id = train_past_a_snapshot(bench)
    weight = bench.weight(ONE)
    bench.restart()
    bench.lose_the_disk()
    after = bench.forward(ONE, last_seq_id + 1)
    bench.until(lambda: bench.outcome(after))
    assert bench.weight(ONE) == weight


def test_a_model_waits_for_a_bucket_that_does_not_answer(bench: FarBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.model(TWO)
    last_seq_id = train_past_a_snapshot(bench)
    weight = bench.weight(ONE)
    bench.restart()
    bench.lose_the_disk()
    bench.gate.unreachable = True
    monkeypatch.setattr("tinsmith.engine.loop.RETRY_S", 0.2)
    waits = bench.train(ONE, last_seq_id + 1)
    bench.step(ONE, last_seq_id + 2)
    saves = bench.submit(ONE, last_seq_id + 3, "save_weights", {"path": "one"})
    other_step = bench.step(TWO, 1)
    bench.until(lambda: bench.outcome(other_step))
    for _ in range(5):
        bench.engine.run_once(0.1)
    assert bench.outcome(waits) is None, "an outage is no reason to fail"
    bench.gate.unreachable = False
    bench.until(lambda: bench.outcome(saves))
    assert bench.outcome(waits)
    assert bench.result(saves)["path"] == PATH
    assert bench.weight(ONE) != weight


def test_publishing_waits_for_no_network(bench: FarBench) -> None:
    bench.model(ONE)
    bench.gate.open.clear()
    samples, seq_id = [], 1
    for index in range(VERSIONS_IN_MEMORY + 4):
        bench.step(ONE, seq_id)
        samples.append(bench.sample(bench.publish(ONE, seq_id + 1, index)))
        seq_id += 2
        bench.until(lambda: bench.outcome(samples[-1]))
    while bench.engine._tidy():
        pass
    bench.gate.open.set()
    assert all(bench.outcome(sample) for sample in samples)
