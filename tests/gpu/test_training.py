"""Training on the device against training on the CPU: every loss, optimizer and kind of model, alone and batched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gpu.device import DEVICE, create, pair
from support import tiny_models
from support.float64_reference import Reference
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.memory import memory_errors
from tinsmith.errors import NonFiniteGradientError
from tinsmith.types import AdamParams, Datum, LoraSpec, ModelShape, OptimStep, Pass
from unit.test_torch_backend import OUR_LOSSES, SPECS, fb, make_passes, relative, rl, run, sft, weights

ARCHS = ("qwen3", "llama", "gemma2", "gpt_oss")


@pytest.fixture(scope="module", params=ARCHS)
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("qwen"), "qwen3")


def gradient_of(backend: TorchBackend, model_id: str) -> torch.Tensor:
    gradient_P = backend._models[model_id].gradient_P
    assert gradient_P is not None
    return gradient_P.cpu()


def test_every_loss_has_the_values_and_gradients_of_the_cpu(shape: ModelShape) -> None:
    rng = np.random.default_rng(1)
    cpu, gpu = pair(shape)
    oracle = Reference(str(shape.path)) if shape.name != "tiny/gpt_oss" else None
    for index, loss_fn in enumerate(OUR_LOSSES):
        if oracle is None and loss_fn != "cross_entropy":
            continue  # the families' test trains models that the reference cannot merge
        model_id = f"m{index}"
        data = [sft(rng, n) if loss_fn == "cross_entropy" or oracle is None else rl(rng, n, oracle) for n in (9, 1, 33)]
        runs = []
        for backend in (cpu, gpu):
            create(backend, model_id, LoraSpec(4, seed=index))
            runs.append((run(backend, fb(model_id, data, loss_fn))[0], gradient_of(backend, model_id)))
        (expected, expected_P), (ours, ours_P) = runs
        for a, b in zip(ours.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-4, err_msg=loss_fn)
        assert ours.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-3, abs=1e-3)
        assert relative(ours_P, expected_P.double()) < 1e-3, loss_fn


@pytest.mark.parametrize("optimizer", ["adamw", "dimuon"])
@pytest.mark.parametrize("recompute", ["off", "on"])
def test_steps_of_many_tenants_move_weights_as_on_the_cpu(qwen: ModelShape, optimizer: str, recompute: str) -> None:
    passes = make_passes(np.random.default_rng(5), Reference(str(qwen.path)))
    results = []
    for backend in pair(qwen, recompute=recompute, max_tokens_per_microbatch=64, logits_chunk=32):
        for index, spec in enumerate(SPECS):
            backend.create_model(f"m{index}", spec, optimizer)
        for _ in range(3):
            run(backend, *passes)
            outcomes = backend.optim_step([OptimStep("o", pass_.model_id, _params(optimizer)) for pass_ in passes])
            assert not any(isinstance(outcome, Exception) for outcome in outcomes), outcomes
        results.append([weights(backend, f"m{i}").cpu() for i in range(len(SPECS))])
    for expected, ours in zip(*results, strict=True):
        assert relative(ours, expected.double()) < 1e-3


def _params(optimizer: str) -> AdamParams:
    if optimizer == "dimuon":
        from tinsmith.types import DimuonParams

        return DimuonParams(1e-3)  # pyright: ignore[reportReturnType]
    return AdamParams(1e-3, eps=1e-8, weight_decay=0.01, grad_clip_norm=0.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_is_as_alone(shape: ModelShape, dtype: str) -> None:
    rng = np.random.default_rng(3)
    backend = TorchBackend(shape, device=DEVICE, dtype=dtype)
    passes: list[Pass] = []
    for index in range(5):
        create(backend, f"m{index}", LoraSpec(8 if index < 4 else 5, seed=index))
        passes.append(fb(f"m{index}", [sft(rng, int(n)) for n in rng.integers(1, 90, 4)]))
    runs = []
    for groups in ([passes], [[pass_] for pass_ in passes]):
        results = [result for group in groups for result in run(backend, *group)]
        runs.append((results, [gradient_of(backend, pass_.model_id) for pass_ in passes]))
        for pass_ in passes:
            backend._models[pass_.model_id].gradient_P = None
    (packed, packed_P), (separate, separate_P) = runs
    logprobs, gradients = (1e-4, 1e-4) if dtype == "float32" else (0.2, 0.05)
    for a, b in zip(packed, separate, strict=True):
        for ours, theirs in zip(a.logprobs, b.logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=logprobs)
    for ours_P, theirs_P in zip(packed_P, separate_P, strict=True):
        assert relative(ours_P, theirs_P.double()) < gradients


def test_in_bfloat16_it_stays_near_the_cpus_float32(qwen: ModelShape) -> None:
    rng = np.random.default_rng(4)
    data = [sft(rng, int(n)) for n in rng.integers(1, 90, 6)]
    runs = []
    for device, dtype in (("cpu", "float32"), (DEVICE, "bfloat16")):
        backend = TorchBackend(qwen, device=device, dtype=dtype)
        create(backend, "m", LoraSpec(8, seed=1))
        runs.append((run(backend, fb("m", data))[0], gradient_of(backend, "m")))
    (expected, expected_P), (ours, ours_P) = runs
    errors = [np.abs(a - b) for a, b in zip(ours.logprobs, expected.logprobs, strict=True)]
    assert float(np.mean(np.concatenate([error.ravel() for error in errors]))) < 0.05
    assert relative(ours_P, expected_P.double()) < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tenant_that_is_not_finite_does_not_reach_its_neighbours(shape: ModelShape, dtype: str, value: float) -> None:
    rng = np.random.default_rng(7)
    backend = TorchBackend(shape, device=DEVICE, dtype=dtype)
    passes = []
    for index in range(3):
        create(backend, f"m{index}", LoraSpec(8, seed=index))
        passes.append(fb(f"m{index}", [sft(rng, n) for n in (12, 12, 5, 40, 5)]))
    healthy = run(backend, *passes)
    expected = [gradient_of(backend, f"m{i}") for i in (0, 2)]
    for index in range(3):
        backend._models[f"m{index}"].gradient_P = None
    weights(backend, "m1").fill_(value)
    backend._models["m1"].adapter.refresh()
    sick = run(backend, *passes)
    assert not np.isfinite(sick[1].logprobs[0]).all()
    for i in (0, 2):
        for a, b in zip(healthy[i].logprobs, sick[i].logprobs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    for i, before_P in zip((0, 2), expected, strict=True):
        assert relative(gradient_of(backend, f"m{i}"), before_P.double()) < 1e-3  # sums in another order at most
    outcomes = backend.optim_step([OptimStep("o", f"m{i}", AdamParams(1e-2)) for i in range(3)])
    assert isinstance(outcomes[1], NonFiniteGradientError) and isinstance(outcomes[0], dict)


def test_saved_state_loads_bit_for_bit(qwen: ModelShape, tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    backend = TorchBackend(qwen, device=DEVICE, dtype="float32")
    spec = LoraSpec(6, seed=1)
    create(backend, "m", spec)
    run(backend, fb("m", [sft(rng, 30)]))
    backend.optim_step([OptimStep("o", "m", AdamParams(1e-2))])
    run(backend, fb("m", [sft(rng, 20)]))
    backend.capture("m").write(tmp_path / "snapshot")
    backend.load("again", spec, tmp_path / "snapshot", optimizer=True)
    for model_id in ("m", "again"):
        backend.optim_step([OptimStep("o", model_id, AdamParams(1e-2))])
    assert torch.equal(weights(backend, "m"), weights(backend, "again"))


def test_a_device_that_is_full_is_a_memory_error() -> None:
    with pytest.raises(MemoryError), memory_errors(torch.device(DEVICE)):
        torch.empty(1 << 50, device=DEVICE)


@pytest.mark.parametrize(("dtype", "atol", "bound"), [("float32", 1e-4, 1e-3), ("bfloat16", 0.2, 0.1)])
def test_data_that_begin_alike_are_those_trained_apart(
    shape: ModelShape, dtype: str, atol: float, bound: float
) -> None:
    """In 16 bits, attention is FlashAttention in parts, with the joined log sums in backward."""
    rng = np.random.default_rng(11)
    prompt = rng.integers(0, tiny_models.VOCAB, 40).astype(np.int32)
    data = []
    for length, beginning in ((50, prompt), (61, prompt), (45, prompt), (40, prompt), (33, prompt[:20])):
        datum = sft(rng, length)
        tokens_N = np.concatenate([beginning, datum.tokens_N[len(beginning) :]])
        data.append(Datum(tokens_N, datum.inputs))
    backend = TorchBackend(shape, device=DEVICE, dtype=dtype)
    outcomes = []
    for min_rows in (0, 8):
        backend._trainer._min_shared_rows = min_rows
        create(backend, "m", LoraSpec(4, seed=1))
        outcomes.append((run(backend, fb("m", data))[0], gradient_of(backend, "m")))
        backend.unload_model("m")
    (apart, expected_P), (together, ours_P) = outcomes
    assert apart.num_rows == 229 and together.num_rows == 20 + 20 + 10 + 21 + 5 + 13
    for a, b in zip(together.logprobs, apart.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=atol)
    assert relative(ours_P, expected_P.double()) < bound
