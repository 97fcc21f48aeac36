"""Linears with 8-bit floats, compared with float64 products of the dequantised values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpu.device import DEVICE, NAMED, ON_CUDA

if not (NAMED and ON_CUDA):
    from support import interpreted  # noqa: F401 - before the kernels

from support import tiny_models
from support.local_sampling import finish, make_prompt, make_sample
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.fp8 import (
    E4M3,
    LARGEST,
    Fp8Codes,
    has_fp8_kernel,
    quantise_rows,
)
from tinsmith.backends.torch.frozen_weights import find_experts
from tinsmith.backends.torch.lora import ForwardContext, MultiLoRALinear
from tinsmith.types import AdamParams, Datum, LoraSpec, ModelShape, OptimStep, Pass, PassResult

WHERE = DEVICE if NAMED else "cpu"
DTYPE = torch.bfloat16


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(WHERE, DTYPE)


def relative(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def build_linear(inputs: int, outputs: int, *, bias: bool = False) -> tuple[MultiLoRALinear, nn.Linear]:
    plain = nn.Linear(inputs, outputs, bias=bias).to(WHERE, DTYPE).requires_grad_(False)
    codes = Fp8Codes(plain.weight.detach()[None])
    return MultiLoRALinear("layer", "mlp", plain, ForwardContext(), codes), plain


def test_codes_are_within_a_sixteenth_of_their_numbers_and_zeros_stay() -> None:
    x_TI = draw(9, 300)
    x_TI[3] = 0
    x_TI[4] *= 1e4
    codes_TI, scale_T1 = quantise_rows(x_TI)
    assert codes_TI.dtype == E4M3 and not codes_TI[3].float().any()
    values_TI = codes_TI.double() * scale_T1
    # Three bits after the leading one; below the smallest normal number steps are equal.
    bound_TI = (x_TI.double().abs() / 16).clamp_min(scale_T1.double() * 2.0**-10)
    assert bool(((values_TI - x_TI.double()).abs() <= bound_TI * 1.001).all())
    assert torch.equal(codes_TI.float().abs().amax(1)[[0, 4]].cpu(), torch.full((2,), LARGEST))


def test_rows_that_are_not_finite_stay_alone() -> None:
    linear, _ = build_linear(64, 32)
    x_TI = draw(4, 64)
    x_TI[1, 5], x_TI[2, 7] = float("nan"), float("inf")
    is_finite_T = linear(x_TI).isfinite().all(1)
    assert is_finite_T.tolist() == [True, False, False, True]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (40, 24)])
def test_products_and_gradients_are_those_of_the_codes(inputs: int, outputs: int, bias: bool) -> None:
    linear, plain = build_linear(inputs, outputs, bias=bias)
    x_TI, grad_TO = draw(7, inputs, seed=1), draw(7, outputs, seed=2)
    weight_OI = linear.weight.double()
    assert relative(linear.weight, plain.weight) < 0.04
    codes_TI, scale_T1 = quantise_rows(x_TI)
    codes = linear.codes
    assert codes is not None
    expected_TO = (codes_TI.double() * scale_T1) @ (codes.codes[0].double() * codes.scales[0, :, None]).t()
    if bias:
        expected_TO += plain.bias.double()
    x_TI.requires_grad_()
    actual_TO = linear(x_TI)
    assert relative(actual_TO, expected_TO) < 4e-3
    assert relative(actual_TO, plain(x_TI)) < 0.06
    actual_TO.backward(grad_TO)
    assert x_TI.grad is not None
    assert relative(x_TI.grad, grad_TO.double() @ weight_OI) < 0.05


@pytest.mark.parametrize("factors", ["none", "of one", "of each row's"])
def test_the_kernel_rounds_rows_as_plain_operations_do(factors: str) -> None:
    """Triton's interpreter rounds to 8 bits in its own way, and so gets float32 to write."""
    x_TI, factors_EI = draw(9, 300), draw(4, 300, seed=1).abs().float()
    x_TI[3] = 0
    expert_T = torch.tensor([0, 0, 0, 2, 2, 2, 2, 2, 3], dtype=torch.int32, device=WHERE)
    arguments = {"none": (None, None), "of one": (factors_EI[:1], None), "of each row's": (factors_EI, expert_T)}
    kernels = pytest.importorskip("tinsmith.backends.torch.fp8_kernels")
    dtype = E4M3 if NAMED and ON_CUDA else torch.float32
    codes_TI, scale_T1 = kernels.quantise_rows(x_TI, *arguments[factors], dtype, LARGEST)
    wide_TI = x_TI.float()
    if factors != "none":
        wide_TI *= factors_EI[0] if factors == "of one" else factors_EI[expert_T.long()]
    assert torch.equal(scale_T1, wide_TI.abs().amax(1, keepdim=True) / LARGEST)
    expected_TI = (wide_TI / torch.where(scale_T1 == 0, 1.0, scale_T1)).to(dtype)
    torch.testing.assert_close(codes_TI.float(), expected_TI.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("back", [False, True])
def test_experts_products_are_those_of_each_experts_linear(back: bool) -> None:
    """Of one expert, and of all where the device has the grouped kernel."""
    codes = Fp8Codes(draw(4, 32, 48))
    ends_E = torch.tensor([3, 3, 8, 9], dtype=torch.int32, device=WHERE)
    x_NC = draw(9, 32 if back else 48, seed=1)
    experts = [0, 0, 0, 2, 2, 2, 2, 2, 3]
    assert find_experts(ends_E, 9).tolist() == experts
    expected_NK = torch.cat(
        [codes.multiply(row_1C, expert, back=back) for row_1C, expert in zip(x_NC.split(1), experts, strict=True)]
    )
    for expert in (0, 2, 3):
        rows = [row for row, owner in enumerate(experts) if owner == expert]
        assert relative(codes.multiply(x_NC[rows], expert, back=back), expected_NK[rows]) < 1e-2
    if back:
        codes_NC, scale_N1 = quantise_rows(x_NC, codes.scales, find_experts(ends_E, 9))
        for row, expert in enumerate(experts):
            alone = quantise_rows(x_NC[row : row + 1], codes.scales[expert : expert + 1])
            assert torch.equal(codes_NC[row].float(), alone[0][0].float()) and torch.equal(scale_N1[row], alone[1][0])
    if has_fp8_kernel(x_NC.device):
        assert relative(codes.multiply_groups(x_NC, ends_E, back=back), expected_NK) < 1e-2


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("fp8"), "llama")


def make_datum(tokens: np.ndarray) -> Datum:
    inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(len(tokens) - 1, np.float32)}
    return Datum(tokens[:-1].astype(np.int32), inputs)


def run_pass(backend: TorchBackend, *data: Datum, forward_only: bool = False) -> PassResult:
    (result,) = run_to_end(backend.run_passes([Pass("r", "m", data, "cross_entropy", {}, forward_only)]))
    assert isinstance(result, PassResult), result
    return result


def test_training_over_fp8_learns_and_samples_with_the_logprobs_of_training(shape: ModelShape, tmp_path: Path) -> None:
    backend = TorchBackend(shape, device=WHERE, dtype="bfloat16", quantize="fp8")
    assert any(isinstance(codes, Fp8Codes) for codes in backend.base.list_codes())
    backend.create_model("m", LoraSpec(8, seed=1))
    tokens = np.arange(40) * 5 % 290
    losses = []
    for _ in range(12):
        losses.append(-float(np.mean(run_pass(backend, make_datum(tokens)).logprobs[0])))
        (outcome,) = backend.optim_step([OptimStep("o", "m", AdamParams(1e-2))])
        assert isinstance(outcome, dict), outcome
    assert losses[-1] < 0.5 * losses[0]
    backend.publish("m", "v")
    backend.sampler.submit(make_sample("s", make_prompt(20), version_id="v"))
    answer = finish(backend.sampler)["s"].sequences[0]
    scored = run_pass(backend, make_datum(np.concatenate([make_prompt(20), answer.tokens_T])), forward_only=True)
    # A last bit of bfloat16 may become another code, which is a sixteenth away.
    distance_T = np.abs(scored.logprobs[0][-len(answer.tokens_T) :] - answer.logprobs_T)
    assert distance_T.mean() < 0.1 and distance_T.max() < 0.5


def test_fp8_is_near_the_unquantised_model(shape: ModelShape) -> None:
    logprobs = []
    for quantize in ("off", "fp8"):
        backend = TorchBackend(shape, device=WHERE, dtype="bfloat16", quantize=quantize)
        backend.create_model("m", LoraSpec(8, seed=1))
        logprobs.append(run_pass(backend, make_datum(np.arange(60) * 7 % 290), forward_only=True).logprobs[0])
    distance = float(np.abs(logprobs[0] - logprobs[1]).mean())
    assert 1e-4 < distance < 0.3
