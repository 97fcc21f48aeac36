"""Dimuon against its definition in float64, properties of its steps, models with both optimizers, and a run through the
SDK."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support import tiny_models
from support.properties import examples
from support.tolerances import rounding
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.adapters import Adapter, Layout, Target, TrainedModel, initialise_weights
from tinsmith.backends.torch.optim import RMS, orthogonalise, prepare_step
from tinsmith.errors import NonFiniteGradientError, UserError
from tinsmith.types import AdamParams, Datum, DimuonParams, LoraSpec, ModelShape, OptimParams, OptimStep, Pass

NANO = "tinsmith/nano"
SIZES = (Target("a", "mlp", 24, 40), Target("b", "attn", 40, 24), Target("c", "attn", 3, 2))
RANK = 4


def make_trained(seed: int, optimizer_type: str = "dimuon") -> TrainedModel:
    layout = Layout.of(RANK, SIZES)
    flat_P = initialise_weights(layout, seed, torch.device("cpu"))
    for _, b in layout.views(flat_P).values():
        b.normal_(generator=torch.Generator().manual_seed(seed))
    return TrainedModel(Adapter(LoraSpec(RANK), layout, flat_P, torch.float32), optimizer_type=optimizer_type)


def gradient_of(tuned: TrainedModel, seed: int, scale: float = 1.0) -> Tensor:
    flat_P = torch.zeros_like(tuned.adapter.flat_P)
    generator = torch.Generator().manual_seed(seed)
    for pair in tuned.adapter.layout.views(flat_P).values():
        for matrix in pair:
            matrix.copy_(torch.randn(matrix.shape, generator=generator) * scale)
    return flat_P


def reference(weight: np.ndarray, gradients: list[np.ndarray], rate: float, beta1: float) -> np.ndarray:
    """docs/optimizers.md, in float64."""
    momentum = np.zeros_like(weight)
    for gradient in gradients:
        momentum = beta1 * momentum + (1 - beta1) * gradient
        x = momentum / np.linalg.norm(momentum)
        wide = x.shape[0] <= x.shape[1]
        x = x if wide else x.T
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        weight = weight - rate * 0.2 * math.sqrt(max(weight.shape)) * (x if wide else x.T)
    return weight


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_steps_equal_float64(beta1: float) -> None:
    tuned = make_trained(0)
    before = {name: [m.double().numpy().copy() for m in pair] for name, pair in tuned.adapter.weights.items()}
    gradients = [gradient_of(tuned, seed) for seed in range(3)]
    for gradient in gradients:
        tuned.gradient_P = gradient.clone()
        prepare_step([(tuned, DimuonParams(0.01, beta1))]).apply()
    assert float(tuned.step) == 3
    for name, pair in tuned.adapter.weights.items():
        for side, matrix in enumerate(pair):
            matrix_gradients = [tuned.adapter.layout.views(g)[name][side].double().numpy() for g in gradients]
            expected = reference(before[name][side], matrix_gradients, 0.01, beta1)
            np.testing.assert_allclose(matrix.numpy(), expected, atol=1e-5)


def test_steps_equal_torchs_muon() -> None:
    matrix = torch.nn.Parameter(torch.randn(4, 24, generator=torch.Generator().manual_seed(0)))
    muon = torch.optim.Muon(
        [matrix], lr=0.01, momentum=0.9, nesterov=False, weight_decay=0, adjust_lr_fn="match_rms_adamw"
    )
    layout = Layout.of(4, [Target("x", "mlp", 24, 24)])
    tuned = TrainedModel(
        Adapter(LoraSpec(4), layout, torch.zeros(layout.numel), torch.float32), optimizer_type="dimuon"
    )
    ours = tuned.adapter.weights["x"][0]
    ours.copy_(matrix.detach())
    for seed in range(3):
        gradient = torch.randn(4, 24, generator=torch.Generator().manual_seed(seed))
        matrix.grad = gradient
        muon.step()
        tuned.gradient_P = torch.zeros(layout.numel)
        layout.views(tuned.gradient_P)["x"][0].copy_(gradient)
        prepare_step([(tuned, DimuonParams(0.01))]).apply()
    # torch's own works in bfloat16; each of three steps adds the rate times its rounding.
    tolerance = 3 * 0.01 * 0.2 * math.sqrt(24) * rounding(torch.bfloat16, sums=1, length=1)
    torch.testing.assert_close(ours, matrix.detach(), atol=tolerance, rtol=0)


@examples(40)
@given(st.integers(1, 20), st.integers(1, 60), st.integers(-30, 30), st.integers(0, 1000))
def test_an_update_keeps_directions_bounds_its_size_and_ignores_the_gradients_scale(
    rows: int, columns: int, exponent: int, seed: int
) -> None:
    matrix = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(seed))
    update = orthogonalise(matrix)
    values = torch.linalg.svdvals(update.double())
    assert values.max() < 1.21
    # The update keeps the singular vectors: U^T update V is diagonal and positive.
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    inner = u.mT @ update.double() @ vh.mT
    assert (inner.diagonal(dim1=-2, dim2=-1) > 0).all()
    off = inner - torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-3
    assert (inner.diagonal(dim1=-2, dim2=-1)[s > 0.02 * s.norm(dim=-1, keepdim=True)] > 0.3).all()
    torch.testing.assert_close(orthogonalise(matrix * 10.0**exponent), update, atol=1e-4, rtol=0)
    torch.testing.assert_close(orthogonalise(matrix.mT), update.mT, atol=1e-4, rtol=0)


def test_a_step_is_about_as_large_as_one_of_adamw() -> None:
    tuned = make_trained(1)
    before = tuned.adapter.flat_P.clone()
    tuned.gradient_P = gradient_of(tuned, 2)
    prepare_step([(tuned, DimuonParams(0.01))]).apply()
    for a, b in tuned.adapter.layout.views(tuned.adapter.flat_P - before).values():
        for change in (a, b):
            assert 0.5 * RMS < float(change.norm() / change.numel() ** 0.5) / 0.01 < 1.3 * RMS


def test_a_matrix_without_a_gradient_does_not_move_and_a_step_without_one_coasts() -> None:
    tuned = make_trained(1)
    before = tuned.adapter.flat_P.clone()
    (metrics,) = prepare_step([(tuned, DimuonParams(0.1))]).apply()
    assert metrics == {"grad_norm": 0.0, "learning_rate": 0.1, "step": 1.0}
    assert torch.equal(tuned.adapter.flat_P, before)
    tuned.gradient_P = gradient_of(tuned, 0)
    prepare_step([(tuned, DimuonParams(0.1))]).apply()
    moved = tuned.adapter.flat_P.clone()
    prepare_step([(tuned, DimuonParams(0.1))]).apply()
    assert not torch.equal(tuned.adapter.flat_P, moved), "momentum goes on"


def test_both_families_step_in_one_call_and_each_as_if_alone() -> None:
    kinds: list[tuple[str, OptimParams]] = [
        ("adamw", AdamParams(0.01)), ("dimuon", DimuonParams(0.01)), ("dimuon", DimuonParams(0.02, 0.5, 0.1)),
        ("adamw", AdamParams(0.02)),
    ]  # fmt: skip
    together = [make_trained(i, kind) for i, (kind, _) in enumerate(kinds)]
    separate = [make_trained(i, kind) for i, (kind, _) in enumerate(kinds)]
    for _ in range(3):
        for i, (tuned, other) in enumerate(zip(together, separate, strict=True)):
            tuned.gradient_P, other.gradient_P = gradient_of(tuned, i), gradient_of(tuned, i)
            prepare_step([(other, kinds[i][1])]).apply()
        prepare_step([(tuned, params) for tuned, (_, params) in zip(together, kinds, strict=True)]).apply()
    for tuned, other in zip(together, separate, strict=True):
        assert torch.equal(tuned.adapter.flat_P, other.adapter.flat_P)
        assert torch.equal(tuned.adapter.compute_P, tuned.adapter.flat_P)


def test_a_gradient_that_is_not_finite_is_dropped_and_nothing_else_changes() -> None:
    tuned, other = make_trained(0), make_trained(1)
    tuned.gradient_P, other.gradient_P = gradient_of(tuned, 0), gradient_of(other, 1)
    prepare_step([(tuned, DimuonParams(0.1))]).apply()
    assert tuned.moments is not None
    before = [tuned.adapter.flat_P.clone(), tuned.moments[0].clone()]
    tuned.gradient_P = torch.full_like(tuned.adapter.flat_P, float("nan"))
    first, second = prepare_step([(tuned, DimuonParams(0.1)), (other, DimuonParams(0.1))]).apply()
    assert isinstance(first, NonFiniteGradientError) and isinstance(second, dict)
    assert tuned.gradient_P is None and float(tuned.step) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, [tuned.adapter.flat_P, tuned.moments[0]], strict=True))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("qwen"), "qwen3")


def one_pass(model_id: str) -> Pass:
    rng = np.random.default_rng(0)
    inputs = {"target_tokens": rng.integers(0, tiny_models.VOCAB, 8), "weights": np.ones(8, np.float32)}
    datum = Datum(rng.integers(0, tiny_models.VOCAB, 8).astype(np.int32), inputs)
    return Pass("r", model_id, (datum,), "cross_entropy", {}, False)


def test_a_checkpoint_carries_the_momentum_and_refuses_the_other_family(qwen: ModelShape, tmp_path: Path) -> None:
    backend, spec = TorchBackend(qwen, device="cpu"), LoraSpec(4, seed=1)
    backend.create_model("m", spec, "dimuon")
    backend.create_model("adam", spec)
    for _ in range(2):
        run_to_end(backend.run_passes([one_pass("m")]))
        backend.optim_step([OptimStep("s", "m", DimuonParams(0.01))])
    for name in ("m", "adam"):
        (tmp_path / name).mkdir()
        backend.save(name, tmp_path / name, optimizer=True)
    backend.load("n", spec, tmp_path / "m", optimizer=True, optimizer_type="dimuon")
    for name in ("m", "n"):
        run_to_end(backend.run_passes([one_pass(name)]))
        backend.optim_step([OptimStep("s", name, DimuonParams(0.01))])
    assert torch.equal(backend._models["m"].adapter.flat_P, backend._models["n"].adapter.flat_P)
    assert float(backend._models["n"].step) == 3
    with pytest.raises(UserError, match="momentum, which is not that of 'adamw'"):
        backend.load("x", spec, tmp_path / "m", optimizer=True)
    with pytest.raises(UserError, match="which is not that of 'dimuon'"):
        backend.load("x", spec, tmp_path / "adam", optimizer=True, optimizer_type="dimuon")
    backend.load("x", spec, tmp_path / "m", optimizer=False)
    (refused,) = backend.optim_step([OptimStep("s", "x", DimuonParams(0.01))])
    assert "created with 'adamw', and the step has 'dimuon' parameters" in str(refused)
    for params, words in (
        (DimuonParams(-1.0), "learning_rate is -1.0"), (DimuonParams(0.1, 1.0), "beta1 is 1.0"),
        (DimuonParams(0.1, 0.9, float("nan")), "grad_clip_norm is nan"),
    ):  # fmt: skip
        (refused,) = backend.optim_step([OptimStep("s", "m", params)])
        assert words in str(refused)
    with pytest.raises(UserError, match="must be one of adamw, dimuon"):
        backend.create_model("y", spec, "sgd")


# Through the SDK.


def datum() -> tinker.Datum:
    tokens = list(range(20, 32))
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": np.ones(11, np.float32)},
    )


@pytest.mark.extended
def test_a_run_learns_is_named_everywhere_and_continues_from_its_state(
    nano_service: tinker.ServiceClient,
) -> None:
    config = tinker.types.DimuonOptimizerConfig()
    model = nano_service.create_lora_training_client(NANO, rank=8, seed=3, optimizer=config).result()
    params = tinker.types.DimuonParams(learning_rate=2e-3)
    losses = []
    for _ in range(6):
        passed = model.forward_backward([datum()], "cross_entropy")
        stepped = model.optim_step(params).result()
        losses.append(passed.result().metrics["loss:sum"])
    assert losses[-1] < 0.7 * losses[0] and losses[-1] < losses[2] < losses[0]
    assert stepped.metrics is not None and stepped.metrics["step"] == 6
    info = model.get_info()
    assert info.optimizer_config is not None
    assert info.optimizer_config.model_dump() == {"type": "dimuon", "version": 1}
    with pytest.raises(tinker.RequestFailedError, match="created with optimizer 'dimuon'"):
        model.optim_step(tinker.AdamParams()).result()
    path = model.save_state("dimuon").result().path
    restored = nano_service.create_training_client_from_state_with_optimizer(path).result()
    assert restored.get_info().optimizer_config == info.optimizer_config
    after = []
    for client in (model, restored):
        client.forward_backward([datum()], "cross_entropy").result()
        client.optim_step(params).result()
        after.append(client.forward([datum()], "cross_entropy").result().metrics["loss:sum"])
    assert after[0] == after[1]
    fresh = nano_service.create_training_client_from_state(path).result()
    fresh.optim_step(tinker.AdamParams()).result()
    chosen = nano_service.create_training_client_from_state(path, optimizer=config).result()
    chosen.optim_step(params).result()


def test_parameters_of_another_family_are_refused(fake_service: tinker.ServiceClient) -> None:
    model = fake_service.create_lora_training_client(NANO, rank=8).result()
    with pytest.raises(tinker.RequestFailedError, match=r"created with optimizer 'adamw'.*send adam_params"):
        model.optim_step(tinker.types.DimuonParams(learning_rate=1e-3)).result()
