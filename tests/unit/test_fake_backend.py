"""The contract of backends and samplers, for the fake and for the real one with a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tinsmith.backends import Backend, run_to_end
from tinsmith.engine.__main__ import load_backend
from tinsmith.errors import SettingsError, UserError
from tinsmith.types import (
    EMPTY_LOGPROB,
    AdamParams,
    Datum,
    LoraSpec,
    ModelShape,
    OptimStep,
    Pass,
    PassResult,
    Sample,
    SampleResult,
    SamplingParams,
    SparseRows,
)

SPEC = LoraSpec(4, seed=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    from support import tiny_models

    return tiny_models.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["fake", "torch"])
def make(request: pytest.FixtureRequest, tiny: ModelShape) -> Callable[[], Backend]:
    options = {"device": "cpu", "dtype": "float32"} if request.param == "torch" else {}
    return lambda: load_backend(request.param, tiny, **options)


@pytest.fixture
def backend(make: Callable[[], Backend]) -> Backend:
    return make()


def a_pass(model_id: str, tokens: tuple[int, ...] = (5, 6, 7), *, forward_only: bool = False) -> Pass:
    array = np.array(tokens, np.int32)
    inputs = {"target_tokens": array.astype(np.int64), "weights": np.ones(len(tokens), np.float32)}
    return Pass(f"{model_id}:{tokens}", model_id, (Datum(array, inputs),), "cross_entropy", {}, forward_only)


def logprobs(backend: Backend, model_id: str, tokens: tuple[int, ...] = (5, 6, 7)) -> list[float]:
    (result,) = run_to_end(backend.run_passes([a_pass(model_id, tokens, forward_only=True)]))
    assert isinstance(result, PassResult)
    return result.logprobs[0].tolist()


def step(backend: Backend, *model_ids: str, rate: float = 0.05) -> list[dict[str, float]]:
    steps = [OptimStep(f"{model_id}:step", model_id, AdamParams(learning_rate=rate)) for model_id in model_ids]
    results = backend.optim_step(steps)
    assert all(isinstance(result, dict) for result in results), results
    return [result for result in results if isinstance(result, dict)]


def train(backend: Backend, model_id: str, steps: int = 1) -> None:
    for _ in range(steps):
        run_to_end(backend.run_passes([a_pass(model_id)]))
        step(backend, model_id)


def sample_seeded(backend: Backend, version_id: str | None) -> list[int]:
    """A seeded sample: the same for the same weights."""
    params = SamplingParams(max_tokens=8, seed=3, stop_eos=False)
    sampler = backend.sampler
    sampler.submit(Sample("r", version_id, np.array([5, 6], np.int32), 1, params))
    finished = []
    while sampler.has_work:
        finished += sampler.step()
    ((request_id, result),) = finished
    assert request_id == "r" and not isinstance(result, UserError)
    return result.sequences[0].tokens_T.tolist()


def test_an_unknown_backend_is_refused_by_name(tiny: ModelShape) -> None:
    with pytest.raises(SettingsError, match="jax"):
        load_backend("jax", tiny)


def test_a_model_is_there_from_its_creation_to_its_unloading(backend: Backend) -> None:
    assert not backend.has_model("a")
    backend.create_model("a", SPEC)
    assert backend.has_model("a") and not backend.has_model("b")
    backend.unload_model("a")
    backend.unload_model("a")
    assert not backend.has_model("a")


def test_results_come_in_the_order_of_the_passes(backend: Backend) -> None:
    backend.create_model("a", SPEC)
    backend.create_model("b", SPEC)
    passes = [a_pass("a", (1, 2)), a_pass("b", (1, 2, 3, 4)), a_pass("a", (9,), forward_only=True)]
    results = run_to_end(backend.run_passes(passes))
    assert [len(result.logprobs[0]) for result in results if isinstance(result, PassResult)] == [2, 4, 1]
    assert all(result.logprobs[0].dtype == np.float32 for result in results if isinstance(result, PassResult))


def test_forward_leaves_no_gradient_and_forward_backward_adds_one(backend: Backend) -> None:
    backend.create_model("a", SPEC)
    before = logprobs(backend, "a")
    assert step(backend, "a")[0]["grad_norm"] == 0.0
    run_to_end(backend.run_passes([a_pass("a")]))
    run_to_end(backend.run_passes([a_pass("a")]))
    assert logprobs(backend, "a") == before, "only a step changes the weights"
    twice = step(backend, "a")[0]["grad_norm"]
    backend.create_model("b", SPEC)
    run_to_end(backend.run_passes([a_pass("b")]))
    once = step(backend, "b")[0]["grad_norm"]
    assert twice == pytest.approx(2 * once, rel=1e-4) and once > 0
    assert logprobs(backend, "a") != before


def test_cross_entropy_says_what_each_target_costs(backend: Backend) -> None:
    backend.create_model("m", SPEC)
    tokens = np.array([5, 6, 7], np.int32)
    targets = tokens.astype(np.int64)
    pairs = SparseRows(np.array([5, 6]), np.array([0, 1, 2, 2]), np.array([0, 1]), (3, 2))
    weights = SparseRows(np.ones(2, np.float32), pairs.crow_indices, pairs.col_indices, (3, 2))
    data = (
        Datum(tokens, {"target_tokens": targets, "weights": np.array([0.0, 0.5, -2.0], np.float32)}),
        Datum(tokens, {"target_tokens": targets}),
        Datum(tokens, {"target_tokens": pairs, "weights": weights}),
    )
    (result,) = run_to_end(backend.run_passes([Pass("r", "m", data, "cross_entropy", {}, forward_only=True)]))
    assert isinstance(result, PassResult)
    weighted, unweighted, sparse = zip(result.elementwise_loss, result.logprobs, strict=True)
    assert weighted[0].tolist() == [0.0, -0.5 * weighted[1][1], 2.0 * weighted[1][2]]
    assert unweighted[0].tolist() == (-unweighted[1]).tolist()
    assert sparse[0].tolist() == [[-sparse[1][0, 0], 0.0], [0.0, -sparse[1][1, 1]], [0.0, 0.0]]
    total = sum(float(array.sum(dtype=np.float64)) for array in result.elementwise_loss)
    assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-6)


def test_a_step_uses_its_gradient_up(backend: Backend) -> None:
    backend.create_model("a", SPEC)
    train(backend, "a")
    assert step(backend, "a")[0]["grad_norm"] == 0.0


def test_training_one_model_leaves_the_others(backend: Backend) -> None:
    for model_id in ("a", "b"):
        backend.create_model(model_id, SPEC)
    before = logprobs(backend, "b")
    train(backend, "a", 2)
    assert logprobs(backend, "b") == before
    assert step(backend, "b")[0]["grad_norm"] == 0.0


def test_a_saved_model_continues_as_if_it_had_not_been_saved(backend: Backend, tmp_path: Path) -> None:
    backend.create_model("a", SPEC)
    train(backend, "a", 3)
    backend.save("a", tmp_path, optimizer=True)
    backend.load("b", SPEC, tmp_path, optimizer=True)
    for _ in range(2):
        assert logprobs(backend, "b") == logprobs(backend, "a")
        for model_id in ("a", "b"):
            train(backend, model_id)


def test_a_saved_model_has_its_pending_gradient(backend: Backend, tmp_path: Path) -> None:
    backend.create_model("a", SPEC)
    train(backend, "a", 2)
    run_to_end(backend.run_passes([a_pass("a")]))
    for name in ("whole", "weights"):
        (tmp_path / name).mkdir()
        backend.save("a", tmp_path / name, optimizer=name == "whole")
    backend.load("b", SPEC, tmp_path / "whole", optimizer=True)
    backend.load("c", SPEC, tmp_path / "whole", optimizer=False)
    backend.load("d", SPEC, tmp_path / "weights", optimizer=False)
    (original,), (restored,), *without = (step(backend, model_id) for model_id in "abcd")
    assert restored == original and original["grad_norm"] > 0.0
    assert logprobs(backend, "b") == logprobs(backend, "a")
    assert [metrics["grad_norm"] for (metrics,) in without] == [0.0, 0.0]


def test_another_process_reads_what_one_saved(make: Callable[[], Backend], tmp_path: Path) -> None:
    first, second = make(), make()
    first.create_model("a", SPEC)
    train(first, "a", 2)
    first.save("a", tmp_path, optimizer=True)
    second.load("a", SPEC, tmp_path, optimizer=True)
    assert logprobs(second, "a") == logprobs(first, "a")


def test_optimizer_state_that_is_not_there_is_refused(backend: Backend, tmp_path: Path) -> None:
    backend.create_model("a", SPEC)
    backend.save("a", tmp_path, optimizer=False)
    with pytest.raises(UserError, match="optimizer"):
        backend.load("b", SPEC, tmp_path, optimizer=True)
    assert not backend.has_model("b")
    backend.load("b", SPEC, tmp_path, optimizer=False)
    assert logprobs(backend, "b") == logprobs(backend, "a")


def test_a_load_replaces_weights_and_gradient(backend: Backend, tmp_path: Path) -> None:
    backend.create_model("a", SPEC)
    backend.save("a", tmp_path, optimizer=True)
    before = logprobs(backend, "a")
    train(backend, "a", 2)
    run_to_end(backend.run_passes([a_pass("a")]))
    backend.load("a", SPEC, tmp_path, optimizer=True)
    assert logprobs(backend, "a") == before
    assert step(backend, "a")[0]["grad_norm"] == 0.0


def test_a_version_is_frozen_and_survives_its_model(backend: Backend) -> None:
    backend.create_model("a", SPEC)
    train(backend, "a", 2)
    backend.publish("a", "v")
    before = sample_seeded(backend, "v")
    train(backend, "a", 3)
    assert sample_seeded(backend, "v") == before
    backend.unload_model("a")
    assert sample_seeded(backend, "v") == before
    assert backend.has_version("v")
    backend.drop_version("v")
    backend.drop_version("v")
    assert not backend.has_version("v")


def test_publishing_again_replaces_the_version(backend: Backend) -> None:
    backend.create_model("a", SPEC)
    backend.publish("a", "v")
    before = sample_seeded(backend, "v")
    train(backend, "a", 6)
    backend.publish("a", "v")
    backend.publish("a", "w")
    assert sample_seeded(backend, "v") == sample_seeded(backend, "w") != before


def test_a_version_comes_back_from_disk(backend: Backend, tmp_path: Path) -> None:
    backend.create_model("a", SPEC)
    train(backend, "a", 6)
    backend.publish("a", "v")
    backend.capture_version("v").write(tmp_path)
    expected = sample_seeded(backend, "v")
    backend.drop_version("v")
    backend.load_version("v", tmp_path)
    assert sample_seeded(backend, "v") == expected != sample_seeded(backend, None)


def test_a_version_can_be_made_from_a_saved_model(backend: Backend, tmp_path: Path) -> None:
    backend.create_model("a", SPEC)
    train(backend, "a", 6)
    backend.save("a", tmp_path, optimizer=True)
    backend.publish("a", "v")
    backend.load_version("w", tmp_path)
    assert sample_seeded(backend, "w") == sample_seeded(backend, "v")


def test_a_cancelled_sample_is_not_finished(backend: Backend) -> None:
    sampler = backend.sampler
    params = SamplingParams(max_tokens=4, seed=1, stop_eos=False)
    for request_id in ("a", "b"):
        sampler.submit(Sample(request_id, None, np.array([5], np.int32), 1, params))
    assert sampler.cancel("a")
    assert not sampler.cancel("a") and not sampler.cancel("unknown")
    finished = []
    while sampler.has_work:
        finished += sampler.step()
    assert [request_id for request_id, _ in finished] == ["b"]
    assert not sampler.cancel("b")


def test_between_is_called_while_passes_run(backend: Backend) -> None:
    backend.create_model("a", SPEC)
    calls: list[None] = []
    run_to_end(backend.run_passes([a_pass("a", tuple(range(1, 60))) for _ in range(4)]), lambda: calls.append(None))
    assert calls or type(backend).__name__ == "TorchBackend"  # a small step may be one micro-batch


@pytest.mark.parametrize("sparse", [False, True])
def test_a_sample_has_the_requested_prompt_logprobs(backend: Backend, sparse: bool) -> None:
    dense = np.array([[5, -1], [-1, -1], [6, 7]])
    csr = SparseRows(np.array([5, 6, -1]), np.array([0, 1, 1, 3]), np.array([0, 1, 0]), (3, 2))
    sample = Sample(
        "r",
        None,
        np.array([5, 6, 7, 8], np.int32),
        2,
        SamplingParams(max_tokens=2, seed=1, stop_eos=False),
        prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        prompt_logprobs_last_n=2,
        target_prompt_logprobs=csr if sparse else dense,
        prompt_alt_tokens_k=4,
    )
    backend.sampler.submit(sample)
    finished = []
    while backend.sampler.has_work:
        finished += backend.sampler.step()
    ((_, result),) = finished
    assert isinstance(result, SampleResult)
    assert [sequence.topk.token_ids_Tk.shape for sequence in result.sequences if sequence.topk] == [(2, 2), (2, 2)]
    assert result.prompt_logprobs_T is not None and result.topk_prompt is not None
    assert np.isnan(result.prompt_logprobs_T).tolist() == [True, True, False, False]
    assert (result.topk_prompt.logprobs_Tk == EMPTY_LOGPROB).all(-1).tolist() == [True, True, False, False]
    if sparse:
        assert isinstance(result.target_prompt, SparseRows)
        assert (result.target_prompt.shape, result.target_prompt.col_indices.tolist()) == ((3, 2), [0, 1, 0])
        assert (result.target_prompt.values < 0).tolist() == [True, True, False]
    else:
        assert isinstance(result.target_prompt, np.ndarray)
        assert (result.target_prompt < 0).tolist() == (dense >= 0).tolist()
    assert result.alt_tokens is not None
    tokens, logprobs = result.alt_tokens.token_ids_Tk, result.alt_tokens.logprobs_Tk
    assert (tokens.shape, tokens.dtype, logprobs.shape, logprobs.dtype) == ((3, 4), np.int64, (3, 4), np.float32)
    assert (logprobs < 0).all()
