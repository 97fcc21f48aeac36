"""The number of device reads per step: each read of a tensor by the host is a wait, and most steps need one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from support import tiny_models
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend, trainer
from tinsmith.backends.torch.batch import Example
from tinsmith.backends.torch.loss import LossSpec
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions
from tinsmith.types import F32, AdamParams, Datum, LoraSpec, OptimStep, Pass, Sample, SamplingParams

READS = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"}


class HostReads(TorchFunctionMode):
    """Counts operations that make the host wait for a device; a `numpy` after a `cpu` is the same read."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.operations[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def reads(self) -> int:
        return sum(self.operations.values()) - min(self.operations["cpu"], self.operations["numpy"])


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> TorchBackend:
    new_backend = TorchBackend(tiny_models.make(tmp_path_factory.mktemp("qwen"), "qwen3"), device="cpu")
    for name in ("a", "b"):
        new_backend.create_model(name, LoraSpec(4, seed=1))
        new_backend.publish(name, f"{name}/1")
    return new_backend


def test_the_guard_counts_reads() -> None:
    x = torch.arange(3)
    with HostReads() as guard:
        assert x.sum().item() == 3 and x.tolist() and bool(x[0] == 0) and x.cpu().numpy().sum() == 3
    assert guard.reads == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("as_on_a_device", [False, True])
def test_a_decode_step_of_many_adapters_reads_once(
    backend: TorchBackend, temperature: float, as_on_a_device: bool
) -> None:
    sampler = LocalSampler(backend.base, backend._versions, options=SamplerOptions(reads_late=as_on_a_device))
    if as_on_a_device:
        sampler._contiguous = None
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=1)
    for index in range(5):
        prompt_T = np.arange(3 + index, dtype=np.int32) + 1
        sampler.submit(Sample(f"s{index}", ("a/1", "b/1", None)[index % 3], prompt_T, 1, params))
    for _ in range(3):  # prompts, then contiguous slots fill
        sampler.step()
    for _ in range(3):
        with HostReads() as guard:
            sampler.step()
        assert guard.reads == 1, guard.operations


def test_a_training_step_reads_log_probabilities_once_and_an_optimizer_step_norms_once(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, measure = np.random.default_rng(0), trainer.compute_metrics

    def measure_unguarded(spec: LossSpec, examples: Sequence[Example], logprobs: Sequence[F32]) -> dict[str, float]:
        with torch._C.DisableTorchFunction():  # metrics are computed from what has been read
            return measure(spec, examples, logprobs)

    monkeypatch.setattr(trainer, "compute_metrics", measure_unguarded)

    def data() -> tuple[Datum, ...]:
        tokens = rng.integers(1, tiny_models.VOCAB, 10)
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(9, np.float32)}
        return (Datum(tokens[:-1].astype(np.int32), inputs),) * 2

    passes = [Pass(f"r{name}", name, data(), "cross_entropy", {}, False) for name in ("a", "b")]
    with HostReads() as guard:
        run_to_end(backend.run_passes(passes))
    assert guard.reads == 1, guard.operations
    for _ in range(2):
        with HostReads() as guard:
            backend.optim_step([OptimStep(name, name, AdamParams(1e-3, grad_clip_norm=1.0)) for name in ("a", "b")])
        assert guard.reads == 1, guard.operations
        run_to_end(backend.run_passes(passes))
