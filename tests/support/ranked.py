"""Shared by tests of several ranks: random passes, and a comparison with a single process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from support import tiny_models
from tinsmith.backends import run_to_end
from tinsmith.backends.distributed import Degrees, Group, ShardedBackend
from tinsmith.backends.torch import TorchBackend
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

Either = TorchBackend | ShardedBackend


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


def create(backend: Either) -> None:
    for number, spec in enumerate(SPECS):
        backend.unload_model(f"m{number}")
        backend.create_model(f"m{number}", spec, "dimuon" if number == 3 else "adamw")


def own(backend: Either) -> TorchBackend:
    """The backend that holds rank 0's adapters."""
    return backend.own if isinstance(backend, ShardedBackend) else backend


def weights(backend: Either, model: int) -> torch.Tensor:
    return own(backend)._models[f"m{model}"].adapter.flat_P


def gradient(backend: Either, model: int) -> torch.Tensor | None:
    return own(backend)._models[f"m{model}"].gradient_P


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-12))


def agree_on(one: Either, many: Either, passes: Sequence[Pass]) -> None:
    """Run the same passes on both, and compare the results."""
    for number, (theirs, ours) in enumerate(
        zip(run_to_end(one.run_passes(passes)), run_to_end(many.run_passes(passes)), strict=True)
    ):
        assert isinstance(theirs, PassResult) and isinstance(ours, PassResult), (theirs, ours)
        for expected, found in zip(theirs.logprobs, ours.logprobs, strict=True):
            assert found.shape == expected.shape and found.dtype == expected.dtype
            assert np.abs(found - expected).max() < TOLERANCE, passes[number].loss_fn
        for expected, found in zip(theirs.elementwise_loss, ours.elementwise_loss, strict=True):
            assert found.shape == expected.shape and np.abs(found - expected).max() < 10 * TOLERANCE
        assert theirs.metrics.keys() == ours.metrics.keys()
        for key, value in theirs.metrics.items():
            assert abs(ours.metrics[key] - value) < TOLERANCE * max(1.0, abs(value)), (passes[number].loss_fn, key)
    for model in range(len(SPECS)):
        expected, found = gradient(one, model), gradient(many, model)
        assert (expected is None) == (found is None), model
        if expected is not None and found is not None:
            assert relative(found, expected) < TOLERANCE, model


def step(backend: Either, *, learning_rate: float = 1e-3) -> list[dict[str, float]]:
    # With a smaller eps, a weight whose gradient is only rounding would take a full step in a random direction.
    params = [AdamParams(learning_rate, eps=1e-6, grad_clip_norm=float(model)) for model in range(len(SPECS) - 1)]
    steps = [
        OptimStep(f"s{model}", f"m{model}", given) for model, given in enumerate([*params, DimuonParams(learning_rate)])
    ]
    results = backend.optim_step(steps)
    assert all(isinstance(result, dict) for result in results), results
    return [result for result in results if isinstance(result, dict)]


def step_both(one: Either, many: Either) -> None:
    for theirs, ours in zip(step(one), step(many), strict=True):
        assert abs(ours["grad_norm"] - theirs["grad_norm"]) < TOLERANCE * max(1.0, theirs["grad_norm"])


def publish(backend: Either) -> None:
    for model in (0, 1):
        backend.publish(f"m{model}", f"v{model}")


def train_alike(one: Either, many: Either, num_steps: int, *, seed: int = 0) -> None:
    """Train several tenants with ragged data and every loss; the weights stay equal."""
    rng = np.random.default_rng(seed)
    for number in range(num_steps):
        loss_fn = NAMED_LOSSES[number % len(NAMED_LOSSES)]
        passes = [
            pass_of(rng, model, rng.integers(2, 40, int(rng.integers(1, 6))), loss_fn) for model in range(len(SPECS))
        ]
        passes.append(pass_of(rng, 0, [9, 3], loss_fn, forward_only=True))
        agree_on(one, many, passes)
        step_both(one, many)
    for model in range(len(SPECS)):
        assert relative(weights(many, model), weights(one, model)) < TOLERANCE, model
        if isinstance(many, ShardedBackend):
            many._call("digest", f"m{model}")  # raises unless all ranks have the same bits


def samples() -> list[Sample]:
    versions = [None, "v0", "v1"]
    params = [
        SamplingParams(10, seed=1),
        SamplingParams(6, seed=2, temperature=0.0),
        SamplingParams(8, seed=3, top_k=9),
    ]
    return [
        Sample(
            f"q{number}", versions[number % 3], np.arange(3 + 4 * number, dtype=np.int32), 1 + number % 3,
            params[number % 3], prompt_logprobs=number % 2 == 0, topk_sample_logprobs=number % 4, stream=number == 1,
        )
        for number in range(7)
    ]  # fmt: skip


def finish(backend: Either) -> dict[str, SampleResult]:
    found: dict[str, SampleResult] = {}
    while backend.sampler.has_work:
        for request_id, outcome in backend.sampler.step():
            assert isinstance(outcome, SampleResult), outcome
            found[request_id] = outcome
    return found


def sample_alike(one: Either, many: Either) -> None:
    """Publish versions; both sample the same tokens, with nearly the same logprobs, from them and from the base."""
    for backend in (one, many):
        publish(backend)
        for sample in samples():
            backend.sampler.submit(sample)
    expected, found = finish(one), finish(many)
    assert found.keys() == expected.keys() == {sample.request_id for sample in samples()}
    for request_id, theirs in expected.items():
        ours = found[request_id]
        for left, right in zip(theirs.sequences, ours.sequences, strict=True):
            assert right.tokens_T.tolist() == left.tokens_T.tolist() and right.stop_reason == left.stop_reason
            assert np.abs(right.logprobs_T - left.logprobs_T).max() < TOLERANCE
        if theirs.prompt_logprobs_T is not None:
            assert ours.prompt_logprobs_T is not None
            assert np.nanmax(np.abs(ours.prompt_logprobs_T - theirs.prompt_logprobs_T)) < TOLERANCE


def load(shape: ModelShape, group: Group, degrees: Degrees, **options: str) -> ShardedBackend:
    backend = ShardedBackend(shape, degrees, group, **{"max_tokens_per_microbatch": "48", **options})
    create(backend)
    return backend
