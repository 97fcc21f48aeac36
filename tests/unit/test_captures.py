"""Captures of the torch backend, which are written later, and its behaviour when memory runs out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support import tiny_models
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend, optim
from tinsmith.backends.torch.trainer import GROW_AFTER, Trainer
from tinsmith.errors import UserError
from tinsmith.types import (
    AdamParams,
    Datum,
    DimuonParams,
    LoraSpec,
    ModelShape,
    OptimParams,
    OptimStep,
    Pass,
    PassResult,
)

SPEC = LoraSpec(4, seed=1)
FAMILIES: dict[str, OptimParams] = {
    "adamw": AdamParams(5e-3, weight_decay=0.01, grad_clip_norm=0.5),
    "dimuon": DimuonParams(5e-3, grad_clip_norm=0.5),
}
OUT_OF_MEMORY = [
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
]


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("captures"))


@pytest.fixture
def backend(shape: ModelShape) -> TorchBackend:
    return TorchBackend(shape, device="cpu")


def a_pass(model_id: str, seed: int = 0, lengths: tuple[int, ...] = (9, 5)) -> Pass:
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        tokens = rng.integers(0, tiny_models.VOCAB, length)
        inputs = {"target_tokens": np.roll(tokens, -1), "weights": np.ones(length, np.float32)}
        data.append(Datum(tokens.astype(np.int32), inputs))
    return Pass(f"{model_id}:{seed}", model_id, tuple(data), "cross_entropy", {}, False)


def accumulate(backend: TorchBackend, model_id: str, seed: int = 0) -> float:
    (result,) = run_to_end(backend.run_passes([a_pass(model_id, seed)]))
    assert isinstance(result, PassResult)
    return result.metrics["loss:sum"]


def step(backend: TorchBackend, model_id: str, params: OptimParams) -> dict[str, float]:
    (result,) = backend.optim_step([OptimStep("o", model_id, params)])
    assert isinstance(result, dict), result
    return result


def state(backend: TorchBackend, model_id: str) -> list[torch.Tensor | None]:
    """A copy of all state that training changes."""
    trained = backend._models[model_id]
    tensors = (trained.adapter.flat_P, trained.adapter.compute_P, trained.gradient_P, trained.step)
    return [None if tensor is None else tensor.clone() for tensor in (*tensors, *(trained.moments or ()))]


def are_equal(first: list[torch.Tensor | None], second: list[torch.Tensor | None]) -> bool:
    return all(
        a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pending", [False, True])
def test_a_capture_continues_bit_for_bit_whatever_happened_to_the_model_since(
    backend: TorchBackend, shape: ModelShape, tmp_path: Path, family: str, pending: bool
) -> None:
    params = FAMILIES[family]
    backend.create_model("m", SPEC, family)
    for seed in range(3):
        accumulate(backend, "m", seed)
        step(backend, "m", params)
    if pending:
        accumulate(backend, "m", 3)
    captured = backend.capture("m")
    before = state(backend, "m")
    straight = [accumulate(backend, "m", 4), step(backend, "m", params), accumulate(backend, "m", 5)]
    captured.write(tmp_path)
    other = TorchBackend(shape, device="cpu")
    other.load("m", SPEC, tmp_path, optimizer=True, optimizer_type=family)
    assert are_equal(state(other, "m"), before)
    assert (other._models["m"].gradient_P is not None) == pending
    assert [accumulate(other, "m", 4), step(other, "m", params), accumulate(other, "m", 5)] == straight
    assert are_equal(state(other, "m"), state(backend, "m"))


def test_a_captured_version_outlives_its_being_dropped(backend: TorchBackend, tmp_path: Path) -> None:
    backend.create_model("m", SPEC)
    accumulate(backend, "m")
    step(backend, "m", FAMILIES["adamw"])
    backend.publish("m", "v")
    weights = backend._versions["v"].flat_P.clone()
    captured = backend.capture_version("v")
    backend.drop_version("v")
    captured.write(tmp_path)
    backend.load_version("again", tmp_path)
    assert torch.equal(backend._versions["again"].flat_P, weights)


def test_a_models_size_includes_its_training_state(backend: TorchBackend) -> None:
    backend.create_model("m", SPEC)
    before = backend.model_bytes("m")
    accumulate(backend, "m")
    step(backend, "m", FAMILIES["adamw"])
    assert backend.model_bytes("m") == before == 4 * backend._models["m"].adapter.flat_P.nbytes
    assert backend.model_budget_bytes > before


def test_a_merged_step_that_fails_changes_no_model(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, family in (("a", "adamw"), ("d", "dimuon")):
        backend.create_model(name, SPEC, family)
        accumulate(backend, name)
        step(backend, name, FAMILIES[family])
        accumulate(backend, name)
    before = [state(backend, name) for name in "ad"]
    steps = [OptimStep("oa", "a", FAMILIES["adamw"]), OptimStep("od", "d", FAMILIES["dimuon"])]
    orthogonalise, calls = optim.orthogonalise, []

    def fail(matrices: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 2:  # in the middle of a model
            raise OUT_OF_MEMORY[0]
        return orthogonalise(matrices)

    monkeypatch.setattr(optim, "orthogonalise", fail)
    with pytest.raises(MemoryError, match="GiB free"):
        backend.optim_step(steps)
    assert all(are_equal(state(backend, name), old) for name, old in zip("ad", before, strict=True))
    monkeypatch.undo()
    assert [outcome["step"] for outcome in backend.optim_step(steps) if isinstance(outcome, dict)] == [2, 2]


# Memory that runs out.


def limit_tokens(
    monkeypatch: pytest.MonkeyPatch, max_tokens: int, error: Exception, *, late: bool = False
) -> list[int]:
    """Simulate memory for `max_tokens`; return the attempted sizes. With `late`, fail after the backward pass."""
    sizes: list[int] = []
    run_one = Trainer._run_micro_batch

    def run_limited(self: Trainer, batch, *args, **kwargs):
        sizes.append(sum(batch.lengths))
        if sizes[-1] > max_tokens:
            if late:
                run_one(self, batch, *args, **kwargs)
            raise error
        return run_one(self, batch, *args, **kwargs)

    monkeypatch.setattr(Trainer, "_run_micro_batch", run_limited)
    return sizes


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_does_not_fit_is_split_until_it_does(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch, error: Exception, late: bool
) -> None:
    for name in "ab":
        backend.create_model(name, SPEC)
    passes = [a_pass("a", 1, (9, 8, 7)), a_pass("b", 2, (6, 9))]
    expected = run_to_end(backend.run_passes(passes))
    gradients = [backend._models[name].gradient_P for name in "ab"]
    for name in "ab":
        backend._models[name].gradient_P = None
    sizes = limit_tokens(monkeypatch, 12, error, late=late)
    results = run_to_end(backend.run_passes(passes))
    assert sizes[0] == 39 and max(sizes[-5:]) <= 12, sizes
    for result, unsplit, name, gradient in zip(results, expected, "ab", gradients, strict=True):
        assert isinstance(result, PassResult) and isinstance(unsplit, PassResult)
        for ours, theirs in zip(result.logprobs, unsplit.logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(backend._models[name].gradient_P, gradient, rtol=1e-4, atol=1e-5)


def test_a_sequence_that_does_not_fit_alone_fails_its_pass_with_the_numbers(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        backend.create_model(name, SPEC)
    limit_tokens(monkeypatch, 12, OUT_OF_MEMORY[0])
    fits, too_long, also_fits = run_to_end(
        backend.run_passes([a_pass("a", 1, (9, 8)), a_pass("b", 2, (5, 20)), a_pass("b", 3, (12,))])
    )
    assert isinstance(fits, PassResult) and isinstance(also_fits, PassResult)
    assert isinstance(too_long, UserError)
    assert "a sequence of 20 tokens does not fit" in str(too_long) and "GiB free" in str(too_long)
    monkeypatch.undo()
    separate = TorchBackend(backend.base.shape, device="cpu")
    separate.create_model("b", SPEC)
    separate._models["b"].adapter.flat_P.copy_(backend._models["b"].adapter.flat_P)
    run_to_end(separate.run_passes([a_pass("b", 3, (12,))]))
    torch.testing.assert_close(backend._models["b"].gradient_P, separate._models["b"].gradient_P, rtol=1e-4, atol=1e-6)


def test_micro_batches_grow_again_when_there_was_no_trouble_for_a_while(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.create_model("a", SPEC)
    limit_tokens(monkeypatch, 12, OUT_OF_MEMORY[0])
    run_to_end(backend.run_passes([a_pass("a", 1, (9, 8, 7))]))
    monkeypatch.undo()
    trainer, max_tokens = backend._trainer, backend._trainer._max_tokens
    assert trainer._limit == 12
    for _ in range(GROW_AFTER):
        run_to_end(backend.run_passes([a_pass("a", 1, (2,))]))
    assert trainer._limit == 24
    trainer._limit, trainer._steps_at_limit = max_tokens - 1, GROW_AFTER
    run_to_end(backend.run_passes([a_pass("a", 1, (2,))]))
    assert trainer._limit == max_tokens


def test_errors_other_than_out_of_memory_are_unchanged(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.create_model("a", SPEC)
    sizes = limit_tokens(monkeypatch, 0, RuntimeError("device-side assert"))
    with pytest.raises(RuntimeError, match="device-side assert"):
        run_to_end(backend.run_passes([a_pass("a")]))
    assert len(sizes) == 1


def test_no_memory_for_the_gradient_is_for_the_engine_to_tell(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.create_model("a", SPEC)

    def fail(*_args: object, **_kwargs: object) -> None:
        raise OUT_OF_MEMORY[0]

    monkeypatch.setattr("tinsmith.backends.torch.adapters.Adapter.open_gradients", fail)
    with pytest.raises(MemoryError):
        run_to_end(backend.run_passes([a_pass("a")]))
