"""The kernels of decoder layers against float64; without a GPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from gpu.device import DEVICE, ON_CUDA
from tinsmith.backends.torch import layer_kernels as kernels

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5

pytestmark = [
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, in the interpreter
]

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8 if ON_CUDA else 2**-7}
"""The interpreter cuts off where a GPU rounds."""


def near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within one rounding of the largest numbers of a row, but for float32's order of sums."""
    assert actual.dtype == dtype
    error = (actual.double().cpu() - expected).abs().amax(-1)
    bound = ROUNDING[dtype] * (1 + expected.abs().amax(-1))
    assert (error <= bound).all(), (error / bound).max()


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """On the device, and the same in float64."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return values.to(DEVICE), values.double().requires_grad_()


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


@pytest.mark.parametrize(("rows", "size"), [(1, 1024), (3, 96), (5, 1), (2, 4096), (7, 1030)])
def test_norms(dtype: torch.dtype, rows: int, size: int) -> None:
    (x, wide), (weight, wide_weight) = random(rows, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    grad, wide_grad = random(rows, size, dtype=dtype, seed=2)
    expected = rms_norm(wide, wide_weight)
    expected.backward(wide_grad)
    assert wide.grad is not None
    near(kernels.rms_norm(x, weight, EPS), expected, dtype)
    near(kernels.rms_norm_gradient(grad, x, weight, EPS), wide.grad, dtype)


@pytest.mark.parametrize(("rows", "size"), [(1, 3072), (3, 100), (2, 1), (5, 1025)])
def test_gated_activations(dtype: torch.dtype, rows: int, size: int) -> None:
    (x, wide), (grad, wide_grad) = random(rows, 2 * size, dtype=dtype), random(rows, size, dtype=dtype, seed=2)
    expected = silu(wide[:, :size]) * wide[:, size:]
    expected.backward(wide_grad)
    assert wide.grad is not None
    near(kernels.swiglu(x), expected, dtype)
    near(kernels.swiglu_gradient(grad, x), wide.grad, dtype)


def test_large_gates_have_finite_results(dtype: torch.dtype) -> None:
    x = torch.tensor([[-1e4, 1e4, -1e30, 0.0, 1.0, 2.0, 3.0, 4.0]], dtype=dtype, device=DEVICE)
    y, grad = kernels.swiglu(x), kernels.swiglu_gradient(torch.ones_like(x[:, :4]), x)
    near(y, torch.tensor([[0.0, 2e4, 0.0, 0.0]]), dtype)
    near(grad, torch.tensor([[0.0, 2.0, 0.0, 2.0, 0.0, 1e4, 0.0, 0.0]]), dtype)


HEADS = [(1, 16, 8, 128, True), (3, 5, 1, 12, True), (4, 4, 4, 64, False), (2, 14, 2, 2, True), (5, 3, 2, 80, False)]


def rotation(rows: int, heads: int, keys: int, size: int, weight: Tensor | None) -> kernels.Rotation:
    dtype = torch.float32 if weight is None else weight.dtype
    angles = random(rows, 1, size // 2, dtype=torch.float32, seed=3)[0]
    cos, sine = (torch.cat([x, x], -1) for x in (angles.cos(), angles.sin()))
    sine[..., : size // 2] *= -1
    return kernels.Rotation(heads, keys, cos.to(dtype), sine.to(dtype), weight, EPS)


@pytest.mark.parametrize(("rows", "heads", "keys", "size", "has_norm"), HEADS)
def test_rotations(dtype: torch.dtype, rows: int, heads: int, keys: int, size: int, has_norm: bool) -> None:
    x, wide = random(rows, heads + 2 * keys, size, dtype=dtype)
    weight, wide_weight = random(heads + keys, size, dtype=dtype, seed=1)
    applied_rotation = rotation(rows, heads, keys, size, weight if has_norm else None)
    turned, values = wide[:, : heads + keys], wide[:, heads + keys :]
    if has_norm:
        turned = rms_norm(turned, wide_weight)
    cos, signed = applied_rotation.cos_T1E.double().cpu(), applied_rotation.signed_T1E.double().cpu()
    turned = turned * cos + turned.roll(size // 2, -1) * signed
    expected = *turned.split([heads, keys], 1), values
    grads = [random(len(part[0]), rows, size, dtype=dtype, seed=4 + i) for i, part in enumerate(expected)]
    torch.autograd.backward(expected, [grad.transpose(0, 1) for _, grad in grads])
    outputs = kernels.apply_qk_norm_rope(x.requires_grad_(), applied_rotation)
    for ours, theirs in zip(outputs, expected, strict=True):
        near(ours, theirs, dtype)
    with torch.no_grad():
        assert all(
            torch.equal(a, b) for a, b in zip(kernels.apply_qk_norm_rope(x, applied_rotation), outputs, strict=True)
        )
    torch.autograd.backward(outputs, [grad.transpose(0, 1) for grad, _ in grads])
    assert x.grad is not None and wide.grad is not None
    near(x.grad, wide.grad, dtype)


def test_a_row_that_is_not_finite_changes_no_other(dtype: torch.dtype) -> None:
    def results(x: Tensor) -> list[Tensor]:
        weight = random(3, 16, dtype=dtype, seed=1)[0]
        x = x.detach().requires_grad_()
        turned = kernels.apply_qk_norm_rope(x.view(4, 4, 16), rotation(4, 2, 1, 16, weight))
        torch.autograd.backward(turned, [torch.ones_like(part) for part in turned])
        x, grad = x.detach(), x.grad
        assert grad is not None
        flat = weight.flatten()[:32].repeat(2)
        norms = kernels.rms_norm(x, flat, EPS), kernels.rms_norm_gradient(grad, x, flat, EPS)
        return [grad, *norms, *turned, kernels.swiglu(x), kernels.swiglu_gradient(x[:, :32], x)]

    x = random(4, 64, dtype=dtype)[0]
    spoilt = x.clone()
    spoilt[1], spoilt[2, 5] = float("nan"), float("inf")
    for ours, expected in zip(results(spoilt), results(x), strict=True):
        assert torch.equal(ours[[0, 3]], expected[[0, 3]])
        assert not torch.equal(ours[1], expected[1])
