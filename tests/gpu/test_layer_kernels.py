"""The kernels of decoder layers against float64; without a GPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

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


def near(actual: Tensor, expected: Tensor, dtype: torch.dtype, roundings: int = 1) -> None:
    """Within one rounding of the largest numbers of a row, but for float32's order of sums."""
    assert actual.dtype == dtype
    error = (actual.double().cpu() - expected).abs().amax(-1)
    bound = roundings * ROUNDING[dtype] * (1 + expected.abs().amax(-1))
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


FORMS = {
    "plain": kernels.NormForm(),
    "rounded": kernels.NormForm(rounds=True),
    "offset": kernels.NormForm(has_offset=True),
    "gated": kernels.NormForm(rounds=True, activation="silu"),
    "sigmoid": kernels.NormForm(activation="sigmoid"),
    "gated first": kernels.NormForm(rounds=True, activation="silu", gates_first=True),
    "in groups": kernels.NormForm(rounds=True, activation="silu", gates_first=True, groups=3),
}
SIZES = [(1, 2, 1026), (1, 5, 96), (9, 3, 129), (33, 1, 48), (2, 17, 255)]


def norm_of_form(x: Tensor, weight: Tensor | None, gate: Tensor | None, form: kernels.NormForm) -> Tensor:
    factor = 1.0 if gate is None else silu(gate) if form.activation == "silu" else gate.sigmoid()
    inner = (x * factor if form.gates_first else x).unflatten(-1, (form.groups, -1))
    y = (inner * (inner.square().mean(-1, keepdim=True) + EPS).rsqrt()).flatten(-2)
    y = y if weight is None else y * (weight + form.has_offset)
    return y if form.gates_first else y * factor


@pytest.mark.parametrize(("rows", "heads", "size"), SIZES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_forms_of_norms(dtype: torch.dtype, form: kernels.NormForm, rows: int, heads: int, size: int) -> None:
    """Rows are parts of longer ones, as where one linear computes queries and gates."""
    (x, wide), (gates, wide_gate) = (random(rows, heads, size, dtype=dtype, seed=seed) for seed in (0, 3))
    weight, wide_weight = random(size, dtype=dtype, seed=1)
    both = torch.cat([gates, x], -1).requires_grad_()
    gate, part = both.chunk(2, -1)
    is_gated = form.activation is not None
    expected = norm_of_form(wide, wide_weight, wide_gate if is_gated else None, form)
    grad, wide_grad = random(rows, heads, size, dtype=dtype, seed=2)
    expected.backward(wide_grad)
    actual = kernels.apply_norm(part, weight, EPS, form, gate if is_gated else None)
    near(actual, expected.detach(), dtype, roundings=4 if form.rounds else 1)
    assert actual.is_contiguous()
    actual.backward(grad.transpose(0, 1).contiguous().transpose(0, 1))
    assert both.grad is not None and wide.grad is not None
    near(both.grad[..., size:], wide.grad, dtype, roundings=2)
    if is_gated:
        assert wide_gate.grad is not None
        near(both.grad[..., :size], wide_gate.grad, dtype, roundings=2)
    with torch.no_grad():
        assert torch.equal(kernels.apply_norm(part, weight, EPS, form, gate if is_gated else None), actual)


@pytest.mark.parametrize("size", [16, 1500])
def test_norms_without_a_weight(dtype: torch.dtype, size: int) -> None:
    x, wide = random(7, size, dtype=dtype)
    grad, wide_grad = random(7, size, dtype=dtype, seed=2)
    expected = norm_of_form(wide, None, None, kernels.NormForm())
    expected.backward(wide_grad)
    actual = kernels.apply_norm(x.requires_grad_(), None, EPS, kernels.NormForm())
    actual.backward(grad)
    assert x.grad is not None and wide.grad is not None
    near(actual, expected.detach(), dtype)
    near(x.grad, wide.grad, dtype)


def test_a_norm_rounds_where_its_form_says_so(dtype: torch.dtype) -> None:
    x, _ = random(5, 64, dtype=dtype)
    weight = random(64, dtype=dtype, seed=1)[0]
    once, thrice = (kernels.apply_norm(x, weight, EPS, kernels.NormForm(rounds=rounds)) for rounds in (False, True))
    assert torch.equal(once, thrice) == (dtype == torch.float32)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("rows", "size"), [(1, 3072), (3, 100), (2, 1), (5, 1025)])
def test_gated_activations_of_two_tensors(dtype: torch.dtype, rows: int, size: int, activation: str) -> None:
    (gate, wide_gate), (up, wide_up) = (random(1, rows, size, dtype=dtype, seed=seed) for seed in range(2))
    grad, wide_grad = random(1, rows, size, dtype=dtype, seed=2)
    expected = (silu(wide_gate) if activation == "silu" else gelu(wide_gate, approximate="tanh")) * wide_up
    expected.backward(wide_grad)
    actual = kernels.apply_gate(gate.requires_grad_(), up.requires_grad_(), activation)
    actual.backward(grad)
    joined = torch.cat([gate, up], -1).detach().requires_grad_()
    both = kernels.apply_joined_gate(joined, activation)
    both.backward(grad)
    assert gate.grad is not None and up.grad is not None and joined.grad is not None
    assert wide_gate.grad is not None and wide_up.grad is not None
    near(actual, expected.detach(), dtype)
    near(gate.grad, wide_gate.grad, dtype)
    near(up.grad, wide_up.grad, dtype)
    assert torch.equal(both, actual) and torch.equal(joined.grad, torch.cat([gate.grad, up.grad], -1))


ROTATIONS = [
    # rows, heads of queries and of keys, columns, rotated columns
    (1, 16, 8, 128, 128),
    (3, 5, 1, 12, 12),
    (4, 4, 4, 64, 16),
    (5, 14, 2, 256, 64),
    (2, 3, 2, 80, 40),
    (7, 40, 1, 6, 2),
]


@pytest.mark.parametrize("has_heads_first", [True, False])
@pytest.mark.parametrize("shares_halves", [True, False])
@pytest.mark.parametrize(("rows", "heads", "keys", "size", "rotated"), ROTATIONS)
def test_rotations_of_halves(
    dtype: torch.dtype, rows: int, heads: int, keys: int, size: int, rotated: int, shares_halves: bool,
    has_heads_first: bool,
) -> None:  # fmt: skip
    if shares_halves:
        rotated = size
    width = size // 2 if shares_halves else rotated
    layout = kernels.RotaryLayout(has_heads_first, shares_halves)
    (cos, wide_cos), (sine, wide_sine) = (random(1, rows, width, dtype=dtype, seed=seed) for seed in (5, 6))
    if shares_halves:
        wide_cos, wide_sine = (torch.cat([x, x], -1) for x in (wide_cos, wide_sine))
    # Queries are parts of longer rows, keys are heads in one piece.
    (padded, wide_padded), (flat, wide_flat) = (
        random(*shape, dtype=dtype, seed=seed)
        for seed, shape in enumerate([(1, rows, heads, 2 * size), (1, keys, rows, size)])
    )
    q, k = padded[..., :size].detach(), flat.transpose(1, 2)
    wide_q, wide_k = wide_padded[..., :size].detach().requires_grad_(), wide_flat.transpose(1, 2).detach()
    wide_k.requires_grad_()
    if has_heads_first:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    q, k = q.requires_grad_(), k.detach().requires_grad_()

    def rotate(x_1TNE: Tensor) -> Tensor:
        turned, rest = x_1TNE[..., :rotated], x_1TNE[..., rotated:]
        swapped = torch.cat([-turned[..., rotated // 2 :], turned[..., : rotated // 2]], -1)
        return torch.cat([turned * wide_cos[:, :, None] + swapped * wide_sine[:, :, None], rest], -1)

    outputs, expected = kernels.rotate_halves(q, k, cos, sine, layout), (rotate(wide_q), rotate(wide_k))
    for x, output, expected_1TNE, wide in zip((q, k), outputs, expected, (wide_q, wide_k), strict=True):
        assert output.shape == x.shape
        by_row = output.transpose(1, 2) if has_heads_first else output
        assert by_row.is_contiguous(), "as attention reads rows"
        near(by_row, expected_1TNE.detach(), dtype)
        grad, wide_grad = random(*by_row.shape, dtype=dtype, seed=8)
        expected_1TNE.backward(wide_grad)
        by_row.backward(grad, retain_graph=True)
        assert x.grad is not None and wide.grad is not None
        near(x.grad.transpose(1, 2) if has_heads_first else x.grad, wide.grad, dtype)
        x.grad = None
    with torch.no_grad():
        again = kernels.rotate_halves(q, k, cos, sine, layout)
        assert all(torch.equal(a, b) for a, b in zip(again, outputs, strict=True))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_large_gates_have_finite_results(dtype: torch.dtype, activation: str) -> None:
    x = torch.tensor([[-1e4, 1e4, -1e30, 0.0, 1.0, 2.0, 3.0, 4.0]], dtype=dtype, device=DEVICE)
    y = kernels.swiglu(x, activation)
    grad = kernels.swiglu_gradient(torch.ones_like(x[:, :4]), x, activation)
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
        gated = [y for form in FORMS.values() for y in both_ways(x[:, :24], x[:, 24:48], form)]
        angles = random(2, 1, 4, 8, dtype=dtype, seed=3)[0]
        heads = x.view(1, 4, 4, 16)
        layout = kernels.RotaryLayout(has_heads_first=False)
        halves = [y[0] for y in kernels.rotate_halves(heads[:, :, :3], heads[:, :, 3:], *angles, layout)]
        others = (
            kernels.swiglu(x),
            kernels.swiglu_gradient(x[:, :32], x),
            kernels.apply_gate(x[:, :32], x[:, 32:], "gelu"),
        )
        return [grad, *norms, *turned, *gated, *halves, *others]

    def both_ways(x: Tensor, gate: Tensor, form: kernels.NormForm) -> list[Tensor]:
        weight = random(24, dtype=dtype, seed=1)[0]
        x, gate = (part.detach().requires_grad_() for part in (x, gate))
        y = kernels.apply_norm(x, weight, EPS, form, gate if form.activation else None)
        y.backward(torch.ones_like(y))
        return [part for part in (y.detach(), x.grad, gate.grad) if part is not None]

    x = random(4, 64, dtype=dtype)[0]
    spoilt = x.clone()
    spoilt[1], spoilt[2, 5] = float("nan"), float("inf")
    for ours, expected in zip(results(spoilt), results(x), strict=True):
        assert torch.equal(ours[[0, 3]], expected[[0, 3]])
        assert not torch.equal(ours[1], expected[1])
