"""Infinities of one tenant in a shared step do not affect others, and the tenant receives an error."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from support import tiny_models
from support.float64_reference import Reference
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.errors import NonFiniteGradientError, UserError
from tinsmith.types import AdamParams, Datum, DimuonParams, LoraSpec, ModelShape, OptimStep, Pass, PassResult
from unit.test_torch_backend import RL_LOSSES, fb, rl, sft, warm, weights

NEIGHBOURS = ("left", "right")
LENGTHS = (12, 12, 5, 30)
HUGE = np.float32(3e38)
STEP = AdamParams(1e-2)


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("qwen"), "qwen3")


@pytest.fixture(scope="module")
def oracle(shape: ModelShape) -> Reference:
    return Reference(Path(shape.path))


def backend_of(shape: ModelShape, optimizer_type: str = "adamw") -> TorchBackend:
    backend = TorchBackend(shape, device="cpu", max_tokens_per_microbatch=64, logits_chunk=16)
    for seed, name in enumerate(("left", "culprit", "right")):
        backend.create_model(name, LoraSpec(4, seed=seed), optimizer_type if name == "culprit" else "adamw")
        warm(backend, name, seed)
    return backend


def passes_of(oracle: Reference, loss_fn: str) -> dict[str, Pass]:
    """The passes of three tenants, with equal lengths, so that rows of different tenants share every product."""
    rng = np.random.default_rng(3)
    data = {name: [sft(rng, length) for length in LENGTHS] for name in NEIGHBOURS}
    culprit = [sft(rng, length) if loss_fn == "cross_entropy" else rl(rng, length, oracle) for length in LENGTHS]
    return {
        "left": fb("left", data["left"]),
        "culprit": fb("culprit", culprit, loss_fn),
        "right": fb("right", data["right"]),
    }


def poison_input(pass_: Pass, name: str, value: float) -> Pass:
    """The passes with one input of the last datum changed."""
    last = pass_.data[-1]
    array = np.array(last.inputs[name])
    array[-4:] = value
    return replace(pass_, data=(*pass_.data[:-1], Datum(last.tokens_N, {**last.inputs, name: array})))


def state(backend: TorchBackend, name: str) -> list[Tensor]:
    trained = backend._models[name]
    tensors = [trained.adapter.flat_P, *(trained.moments or ()), trained.step]
    return [tensor.clone() for tensor in [*tensors, *([] if trained.gradient_P is None else [trained.gradient_P])]]


def run_beside_neighbours(
    backend: TorchBackend, passes: dict[str, Pass], steps: dict[str, AdamParams | DimuonParams]
) -> tuple[list[Tensor], PassResult | UserError | None, object]:
    """Two packed steps of all tenants: the neighbours' results and state, and the poisoned tenant's results."""
    observed: list[Tensor] = []
    culprit_result: PassResult | UserError | None = None
    stepped: object = None
    for _ in range(2):
        results = dict(zip(passes, run_to_end(backend.run_passes(list(passes.values()))), strict=True))
        for name in NEIGHBOURS:
            result = results[name]
            assert isinstance(result, PassResult)
            observed += [torch.from_numpy(array) for array in result.logprobs]
            observed.append(torch.tensor(list(result.metrics.values()), dtype=torch.float64))
            observed += state(backend, name)
        outcomes = dict(
            zip(
                steps,
                backend.optim_step([OptimStep("o", *named_params) for named_params in steps.items()]),
                strict=True,
            )
        )
        for name in NEIGHBOURS:
            assert isinstance(outcomes[name], dict), outcomes[name]
            observed += state(backend, name)
        if culprit_result is None:
            culprit_result, stepped = results.get("culprit"), outcomes.get("culprit")
    return observed, culprit_result, stepped


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), "bit by bit"


OVERFLOWS = [("cross_entropy", "weights", HUGE), *((loss_fn, "advantages", HUGE) for loss_fn in RL_LOSSES)]
OVERFLOWS += [(loss_fn, "logprobs", -1e30) for loss_fn in RL_LOSSES if loss_fn not in ("ppo", "cispo", "gspo")]


@pytest.mark.parametrize(("loss_fn", "name", "value"), OVERFLOWS)
def test_a_loss_that_overflows_stays_with_its_tenant(
    shape: ModelShape, oracle: Reference, loss_fn: str, name: str, value: float
) -> None:
    passes = passes_of(oracle, loss_fn)
    steps: dict[str, AdamParams | DimuonParams] = dict.fromkeys(passes, STEP)
    expected, _, fine = run_beside_neighbours(backend_of(shape), passes, steps)
    assert isinstance(fine, dict)
    backend = backend_of(shape)
    before = weights(backend, "culprit").clone()
    sick = {**passes, "culprit": poison_input(passes["culprit"], name, value)}
    observed, culprit_result, stepped = run_beside_neighbours(backend, sick, steps)
    assert_same(observed, expected)
    assert isinstance(culprit_result, PassResult) and all(np.isfinite(array).all() for array in culprit_result.logprobs)
    assert not abs(culprit_result.metrics["loss:sum"]) < 1e25, "what it is told is no number that looks healthy"
    assert isinstance(stepped, NonFiniteGradientError)
    trained = backend._models["culprit"]
    assert torch.equal(weights(backend, "culprit"), before) and trained.gradient_P is None and not trained.step
    run_to_end(backend.run_passes([passes["culprit"]]))
    (outcome,) = backend.optim_step([OptimStep("o", "culprit", STEP)])
    assert isinstance(outcome, dict) and outcome["step"] == 1, "it goes on as if nothing had been"
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state(backend, "culprit"))


@pytest.mark.parametrize(
    ("loss_fn", "name", "value"),
    [
        ("cross_entropy", "weights", math.nan),
        ("importance_sampling", "advantages", math.inf),
        ("ppo", "logprobs", math.nan),
        ("dro", "logprobs", -math.inf),
    ],
)
def test_inputs_that_are_not_finite_are_refused_as_if_they_had_not_come(
    shape: ModelShape, oracle: Reference, loss_fn: str, name: str, value: float
) -> None:
    passes = passes_of(oracle, loss_fn)
    without = {key: pass_ for key, pass_ in passes.items() if key in NEIGHBOURS}
    expected, _, _ = run_beside_neighbours(backend_of(shape), without, dict.fromkeys(without, STEP))
    backend = backend_of(shape)
    before = state(backend, "culprit")
    sick = {**passes, "culprit": poison_input(passes["culprit"], name, value)}
    observed, culprit_result, _ = run_beside_neighbours(backend, sick, dict.fromkeys(without, STEP))
    assert_same(observed, expected)
    assert isinstance(culprit_result, UserError) and f"loss_fn_inputs[{name!r}] holds" in str(culprit_result)
    assert_same(state(backend, "culprit"), before)


@pytest.mark.parametrize("rate", [math.inf, math.nan])
def test_a_rate_that_is_not_finite_is_refused_and_keeps_the_gradient(
    shape: ModelShape, oracle: Reference, rate: float
) -> None:
    passes = passes_of(oracle, "cross_entropy")
    expected, _, _ = run_beside_neighbours(backend_of(shape), passes, dict.fromkeys(NEIGHBOURS, STEP))
    backend = backend_of(shape)
    before = weights(backend, "culprit").clone()
    steps: dict[str, AdamParams | DimuonParams] = {"left": STEP, "culprit": AdamParams(rate), "right": STEP}
    observed, _, stepped = run_beside_neighbours(backend, passes, steps)
    assert_same(observed, expected)
    assert isinstance(stepped, UserError) and "learning_rate" in str(stepped)
    assert torch.equal(weights(backend, "culprit"), before) and backend._models["culprit"].gradient_P is not None


def test_an_overflowing_learning_rate_affects_only_its_own_model(shape: ModelShape, oracle: Reference) -> None:
    passes = passes_of(oracle, "cross_entropy")
    steps: dict[str, AdamParams | DimuonParams] = dict.fromkeys(passes, STEP)
    expected, _, _ = run_beside_neighbours(backend_of(shape), passes, steps)
    backend = backend_of(shape)
    observed, _, _ = run_beside_neighbours(backend, passes, {**steps, "culprit": AdamParams(float(HUGE))})
    assert_same(observed, expected)
    (culprit_result,) = run_to_end(backend.run_passes([passes["culprit"]]))
    assert isinstance(culprit_result, PassResult) and math.isnan(culprit_result.metrics["loss:sum"])
    (stepped,) = backend.optim_step([OptimStep("o", "culprit", STEP)])
    assert isinstance(stepped, NonFiniteGradientError)


@pytest.mark.parametrize("optimizer_type", ["adamw", "dimuon"])
def test_a_gradient_whose_square_overflows_is_refused(
    shape: ModelShape, oracle: Reference, optimizer_type: str
) -> None:
    """Otherwise Adam's second moment would stay infinite, and the weight would not change any more."""
    params = STEP if optimizer_type == "adamw" else DimuonParams(1e-2)
    passes = passes_of(oracle, "cross_entropy")
    steps: dict[str, AdamParams | DimuonParams] = {"left": STEP, "culprit": params, "right": STEP}
    expected, _, _ = run_beside_neighbours(backend_of(shape, optimizer_type), passes, steps)
    backend = backend_of(shape, optimizer_type)
    before = weights(backend, "culprit").clone()
    sick = {**passes, "culprit": poison_input(passes["culprit"], "weights", 1e25)}
    observed, culprit_result, stepped = run_beside_neighbours(backend, sick, steps)
    assert_same(observed, expected)
    assert isinstance(culprit_result, PassResult) and 1e24 < abs(culprit_result.metrics["loss:sum"]) < math.inf
    assert isinstance(stepped, NonFiniteGradientError) and "norm" in str(stepped)
    assert torch.equal(weights(backend, "culprit"), before)
    run_to_end(backend.run_passes([sick["culprit"]]))
    (clipped,) = backend.optim_step([OptimStep("o", "culprit", replace(params, grad_clip_norm=1.0))])
    assert isinstance(clipped, dict), "what is clipped is small enough"
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state(backend, "culprit"))
