"""Shared by tests of several ranks: random passes, and a comparison with a single process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from support import tiny_models
from tinsmith.backends import run_to_end
from tinsmith.backends.distributed import Degrees, Group, ShardedBackend
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.adapters import TrainedModel
from tinsmith.losses import LOSSES
from tinsmith.types import (
    AdamParams,
    Datum,
    DimuonParams,
    LoraSpec,
    ModelShape,
    OptimStep,
    Pass,
    PassResult,
    Sample,
    SampleResult,
    SamplingParams,
)

NAMED_LOSSES = [name for name in LOSSES if name != "custom"]
TOLERANCE = 1e-4

SPECS = [LoraSpec(4, seed=0), LoraSpec(8, seed=1, train_unembed=False), LoraSpec(2, seed=2, train_attn=False),
         LoraSpec(3, seed=3, train_attn=False, train_mlp=False)]  # fmt: skip

WIDE = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4}
CONFIGS = {"ppo": WIDE, "cispo": WIDE, "gspo": WIDE, "dro": {"beta": 0.3}, "stable_reinforce": {"kl_coeff": 0.2}}

AnyBackend = TorchBackend | ShardedBackend


def datum(rng: np.random.Generator, length: int, loss_fn: str) -> Datum:
    tokens = rng.integers(0, tiny_models.VOCAB, length).astype(np.int32)
    inputs = {"target_tokens": rng.integers(0, tiny_models.VOCAB, length)}
    weights = (rng.normal(size=length) * (rng.random(length) < 0.8)).astype(np.float32)
    if loss_fn == "cross_entropy":
        return Datum(tokens, {**inputs, "weights": weights})
    logprobs = (rng.normal(size=length) * 0.3 - 6).astype(np.float32)
    return Datum(tokens, {**inputs, "logprobs": logprobs, "advantages": weights})


def pass_of(
    rng: np.random.Generator,
    model: int,
    lengths: Sequence[int] | np.ndarray,
    loss_fn: str = "cross_entropy",
    *,
    forward_only: bool = False,
) -> Pass:
    data = tuple(datum(rng, int(length), loss_fn) for length in lengths)
    return Pass(f"r{model}", f"m{model}", data, loss_fn, CONFIGS.get(loss_fn, {}), forward_only)


def create(backend: AnyBackend) -> None:
    for model, spec in enumerate(SPECS):
        backend.unload_model(f"m{model}")
        backend.create_model(f"m{model}", spec, "dimuon" if model == 3 else "adamw")


def local_backend(backend: AnyBackend) -> TorchBackend:
    """The backend that holds rank 0's adapters."""
    return backend.local if isinstance(backend, ShardedBackend) else backend


def whole_model(backend: AnyBackend, model: int) -> TrainedModel:
    """The model with what all ranks hold of it."""
    if isinstance(backend, ShardedBackend):
        backend._call("collect_model", f"m{model}", True)
        return backend.local._whole_model(f"m{model}")
    return backend._models[f"m{model}"]


def weights(backend: AnyBackend, model: int) -> torch.Tensor:
    return whole_model(backend, model).adapter.flat_P


def gradient(backend: AnyBackend, model: int) -> torch.Tensor | None:
    return whole_model(backend, model).gradient_P


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-12))


def agree_on(single: AnyBackend, sharded: AnyBackend, passes: Sequence[Pass]) -> None:
    """Run the same passes on both, and compare the results."""
    for index, (theirs, ours) in enumerate(
        zip(run_to_end(single.run_passes(passes)), run_to_end(sharded.run_passes(passes)), strict=True)
    ):
        assert isinstance(theirs, PassResult) and isinstance(ours, PassResult), (theirs, ours)
        for expected, actual in zip(theirs.logprobs, ours.logprobs, strict=True):
            assert actual.shape == expected.shape and actual.dtype == expected.dtype
            assert np.abs(actual - expected).max() < TOLERANCE, passes[index].loss_fn
        for expected, actual in zip(theirs.elementwise_loss, ours.elementwise_loss, strict=True):
            assert actual.shape == expected.shape and np.abs(actual - expected).max() < 10 * TOLERANCE
        assert theirs.metrics.keys() == ours.metrics.keys()
        for key, value in theirs.metrics.items():
            assert abs(ours.metrics[key] - value) < TOLERANCE * max(1.0, abs(value)), (passes[index].loss_fn, key)
    for model in range(len(SPECS)):
        expected, actual = gradient(single, model), gradient(sharded, model)
        assert (expected is None) == (actual is None), model
        if expected is not None and actual is not None:
            assert relative_error(actual, expected) < TOLERANCE, model


def step(backend: AnyBackend, *, learning_rate: float = 1e-3) -> list[dict[str, float]]:
    # With a smaller eps, a weight whose gradient is only rounding would take a full step in a random direction.
    params = [AdamParams(learning_rate, eps=1e-6, grad_clip_norm=float(model)) for model in range(len(SPECS) - 1)]
    steps = [
        OptimStep(f"s{model}", f"m{model}", params_of_model)
        for model, params_of_model in enumerate([*params, DimuonParams(learning_rate)])
    ]
    results = backend.optim_step(steps)
    assert all(isinstance(result, dict) for result in results), results
    return [result for result in results if isinstance(result, dict)]


def step_both(single: AnyBackend, sharded: AnyBackend) -> None:
    for theirs, ours in zip(step(single), step(sharded), strict=True):
        assert abs(ours["grad_norm"] - theirs["grad_norm"]) < TOLERANCE * max(1.0, theirs["grad_norm"])


def publish(backend: AnyBackend) -> None:
    for model in (0, 1):
        backend.publish(f"m{model}", f"v{model}")


def train_both(single: AnyBackend, sharded: AnyBackend, num_steps: int, *, seed: int = 0) -> None:
    """Train several tenants with ragged data and every loss; the weights stay equal."""
    rng = np.random.default_rng(seed)
    for step_index in range(num_steps):
        loss_fn = NAMED_LOSSES[step_index % len(NAMED_LOSSES)]
        passes = [
            pass_of(rng, model, rng.integers(2, 40, int(rng.integers(1, 6))), loss_fn) for model in range(len(SPECS))
        ]
        passes.append(pass_of(rng, 0, [9, 3], loss_fn, forward_only=True))
        agree_on(single, sharded, passes)
        step_both(single, sharded)
    for model in range(len(SPECS)):
        assert relative_error(weights(sharded, model), weights(single, model)) < TOLERANCE, model
        if isinstance(sharded, ShardedBackend):
            sharded._call("digest", f"m{model}")  # raises unless all ranks have the same bits


def samples() -> list[Sample]:
    versions = [None, "v0", "v1"]
    params = [
        SamplingParams(10, seed=1),
        SamplingParams(6, seed=2, temperature=0.0),
        SamplingParams(8, seed=3, top_k=9),
    ]
    return [
        Sample(
            f"q{index}", versions[index % 3], np.arange(3 + 4 * index, dtype=np.int32), 1 + index % 3,
            params[index % 3], prompt_logprobs=index % 2 == 0, topk_sample_logprobs=index % 4, stream=index == 1,
        )
        for index in range(7)
    ]  # fmt: skip


def finish(backend: AnyBackend) -> dict[str, SampleResult]:
    outcomes: dict[str, SampleResult] = {}
    while backend.sampler.has_work:
        for request_id, outcome in backend.sampler.step():
            assert isinstance(outcome, SampleResult), outcome
            outcomes[request_id] = outcome
    return outcomes


def sample_both(single: AnyBackend, sharded: AnyBackend) -> None:
    """Publish versions; both sample the same tokens, with nearly the same logprobs, from them and from the base."""
    for backend in (single, sharded):
        publish(backend)
        for sample in samples():
            backend.sampler.submit(sample)
    expected, actual = finish(single), finish(sharded)
    assert actual.keys() == expected.keys() == {sample.request_id for sample in samples()}
    for request_id, theirs in expected.items():
        ours = actual[request_id]
        for first, second in zip(theirs.sequences, ours.sequences, strict=True):
            assert second.tokens_T.tolist() == first.tokens_T.tolist() and second.stop_reason == first.stop_reason
            assert np.abs(second.logprobs_T - first.logprobs_T).max() < TOLERANCE
        if theirs.prompt_logprobs_T is not None:
            assert ours.prompt_logprobs_T is not None
            assert np.nanmax(np.abs(ours.prompt_logprobs_T - theirs.prompt_logprobs_T)) < TOLERANCE


def load(shape: ModelShape, group: Group, degrees: Degrees, **options: str) -> ShardedBackend:
    backend = ShardedBackend(shape, degrees, group, **{"max_tokens_per_microbatch": "48", **options})
    create(backend)
    return backend
