"""Triton kernels between the matmuls of a decoder layer: norms, gated activations, and RoPE of queries and keys with
their norms, each with its gradient.

Each reads its inputs once and writes its outputs once, computes in float32 and rounds at the end. Every row is computed
on its own, in a fixed order, so results do not depend on the other rows. Weights are frozen and get no gradient.
Launches wait for nothing and use this thread's current device and stream, so a CUDA graph can capture them. Tile sizes
follow from shapes: a thread holds 8 or 16 elements, so that it loads 16 bytes of bfloat16 at once and enough bytes are
under way on each multiprocessor; the number of rows is no argument, so it compiles nothing anew.

Imports triton, which only CUDA builds of torch bring along: import this where a CUDA tensor is met. Knows no model,
adapter or attention; `transformer` computes the same in plain torch, for CPUs.

Shapes: T rows, D hidden size, F inner size, N = H + 2 G heads: H of queries, G of keys and G of values, E head dim.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.runtime import JITFunction

NORM_ELEMENTS = 512
"""Elements of a row for each warp of a norm."""

GATED_ELEMENTS = 1024
"""Elements of a row for each program of a gated activation, of four warps."""

HEAD_ELEMENTS = 1024
"""Elements of a row's heads for each program of RoPE, of two warps."""


@triton.jit
def _norm_kernel(x, weight, y, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * D
    at = tl.arange(0, BLOCK)
    values = tl.load(x + start + at, at < D, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(values * values) / D + eps)
    scale = tl.load(weight + at, at < D, other=0.0).to(tl.float32)
    tl.store(y + start + at, values * rstd * scale, at < D)


@triton.jit
def _norm_gradient_kernel(grad, x, weight, grad_x, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * D
    at = tl.arange(0, BLOCK)
    values = tl.load(x + start + at, at < D, other=0.0).to(tl.float32)
    scaled = tl.load(grad + start + at, at < D, other=0.0).to(tl.float32)
    scaled *= tl.load(weight + at, at < D, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(values * values) / D + eps)
    projection = tl.sum(scaled * values) / D * rstd * rstd
    tl.store(grad_x + start + at, (scaled - values * projection) * rstd, at < D)


@triton.jit
def _swiglu_kernel(gate_up, y, F: tl.constexpr, BLOCK: tl.constexpr):
    blocks: tl.constexpr = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * (2 * F) + at, at < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * F) + F + at, at < F, other=0.0).to(tl.float32)
    tl.store(y + row * F + at, gate * tl.sigmoid(gate) * up, at < F)


@triton.jit
def _swiglu_gradient_kernel(grad, gate_up, grad_gate_up, F: tl.constexpr, BLOCK: tl.constexpr):
    blocks: tl.constexpr = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    grad_y = tl.load(grad + row * F + at, at < F, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + row * (2 * F) + at, at < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * F) + F + at, at < F, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    tl.store(grad_gate_up + row * (2 * F) + at, grad_y * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), at < F)
    tl.store(grad_gate_up + row * (2 * F) + F + at, grad_y * gate * sigmoid, at < F)


@triton.jit
def _load_halves(x, at, mask, half):
    """Both halves of heads, in float32."""
    first = tl.load(x + at, mask, other=0.0).to(tl.float32)
    return first, tl.load(x + at + half, mask, other=0.0).to(tl.float32)


@triton.jit
def _qk_norm_rope_kernel(  # noqa: PLR0913
    qkv, cos, sine, weight, queries, keys, eps,
    H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = tl.cdiv(H + G, BLOCK)
    half: tl.constexpr = E // 2
    row = (tl.program_id(0) // blocks).to(tl.int64)
    head = (tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK))[:, None]
    column = tl.broadcast_to(tl.arange(0, HALF)[None, :], BLOCK, HALF)
    at, mask = head * E + column, (head < H + G) & (column < half)
    a, b = _load_halves(qkv + row * ((H + 2 * G) * E), at, mask, half)
    if weight is not None:
        rstd = tl.rsqrt((tl.sum(a * a, 1, keep_dims=True) + tl.sum(b * b, 1, keep_dims=True)) / E + eps)
        scale_a, scale_b = _load_halves(weight, at, mask, half)
        a, b = a * rstd * scale_a, b * rstd * scale_b
    cos_a, cos_b = _load_halves(cos + row * E, column, column < half, half)
    sine_a, sine_b = _load_halves(sine + row * E, column, column < half, half)
    rotated_a, rotated_b = a * cos_a + b * sine_a, b * cos_b + a * sine_b
    query = queries + row * (H * E) + at
    tl.store(query, rotated_a, mask & (head < H))
    tl.store(query + half, rotated_b, mask & (head < H))
    key = keys + row * (G * E) + at - H * E
    tl.store(key, rotated_a, mask & (head >= H))
    tl.store(key + half, rotated_b, mask & (head >= H))


@triton.jit
def _qk_norm_rope_gradient_kernel(  # noqa: PLR0913
    grad_q, grad_k, grad_v, q_row, q_head, k_row, k_head, v_row, v_head,
    qkv, cos, sine, weight, grad_qkv, eps,
    H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = tl.cdiv(H + 2 * G, BLOCK)
    half: tl.constexpr = E // 2
    row = (tl.program_id(0) // blocks).to(tl.int64)
    head = (tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK))[:, None]
    column = tl.broadcast_to(tl.arange(0, HALF)[None, :], BLOCK, HALF)
    inside, is_rotated = column < half, head < H + G
    # A program's heads can be of two kinds; each is loaded from its own tensor, and the others are zeros.
    q_a, q_b = _load_halves(grad_q + row * q_row, head * q_head + column, inside & (head < H), half)
    k_a, k_b = _load_halves(grad_k + row * k_row, (head - H) * k_head + column, inside & (head >= H) & is_rotated, half)
    is_value = (head >= H + G) & (head < H + 2 * G)
    v_a, v_b = _load_halves(grad_v + row * v_row, (head - H - G) * v_head + column, inside & is_value, half)
    cos_a, cos_b = _load_halves(cos + row * E, column, inside, half)
    sine_a, sine_b = _load_halves(sine + row * E, column, inside, half)
    rotated_a, rotated_b = q_a + k_a, q_b + k_b
    a, b = rotated_a * cos_a + rotated_b * sine_b, rotated_b * cos_b + rotated_a * sine_a
    at, start = head * E + column, row * ((H + 2 * G) * E)
    if weight is not None:
        x_a, x_b = _load_halves(qkv + start, at, inside & is_rotated, half)
        scale_a, scale_b = _load_halves(weight, at, inside & is_rotated, half)
        a, b = a * scale_a, b * scale_b
        rstd = tl.rsqrt((tl.sum(x_a * x_a, 1, keep_dims=True) + tl.sum(x_b * x_b, 1, keep_dims=True)) / E + eps)
        projection = tl.sum(a * x_a, 1, keep_dims=True) + tl.sum(b * x_b, 1, keep_dims=True)
        projection = projection / E * rstd * rstd
        a, b = (a - x_a * projection) * rstd, (b - x_b * projection) * rstd
    mask = inside & (head < H + 2 * G)
    tl.store(grad_qkv + start + at, tl.where(is_rotated, a, v_a), mask)
    tl.store(grad_qkv + start + at + half, tl.where(is_rotated, b, v_b), mask)


def _launch(kernel: JITFunction, num_programs: int, *args: object, **constants: object) -> None:
    kernel[(num_programs,)](*args, **constants)


def _next_power_of_two(size: int) -> int:
    """The next power of two, as tiles need."""
    return 1 << (size - 1).bit_length()


def _count_blocks(size: int, block: int) -> int:
    return -(-size // block)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension."""
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(_norm_kernel, _count_rows(x), x, weight_D, y, eps, **_row_tile(x.shape[-1]))
    return y


def rms_norm_gradient(grad: Tensor, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The gradient of x."""
    grad, x = grad.contiguous(), x.contiguous()
    grad_x = torch.empty_like(x)
    _launch(_norm_gradient_kernel, _count_rows(x), grad, x, weight_D, grad_x, eps, **_row_tile(x.shape[-1]))
    return grad_x


def _count_rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _row_tile(size: int) -> dict[str, int]:
    block = _next_power_of_two(size)
    return {"D": size, "BLOCK": block, "num_warps": min(max(block // NORM_ELEMENTS, 1), 16)}


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [.., F] of both [.., 2F]."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], size)
    block = _choose_gated_block(size)
    _launch(_swiglu_kernel, _count_rows(y) * _count_blocks(size, block), gate_up, y, F=size, BLOCK=block, num_warps=4)
    return y


def swiglu_gradient(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of both, [.., 2F]."""
    grad, gate_up = grad.contiguous(), gate_up.contiguous()
    size, grad_gate_up = grad.shape[-1], torch.empty_like(gate_up)
    block = _choose_gated_block(size)
    num_programs = _count_rows(grad) * _count_blocks(size, block)
    _launch(_swiglu_gradient_kernel, num_programs, grad, gate_up, grad_gate_up, F=size, BLOCK=block, num_warps=4)
    return grad_gate_up


def _choose_gated_block(size: int) -> int:
    return min(_next_power_of_two(size), GATED_ELEMENTS)


class Rotation(NamedTuple):
    """How a layer's queries and keys are rotated, after their norms where the family has them."""

    num_heads: int
    num_keys: int
    cos_T1E: Tensor
    signed_T1E: Tensor
    """The sine, whose first half is negated: a head becomes x cos + (x2, x1) signed."""
    weight: Tensor | None  # [H + G, E]
    eps: float

    def tile(self, num_heads: int) -> dict[str, int]:
        size = self.cos_T1E.shape[-1]
        half = _next_power_of_two(size // 2)
        block = min(max(HEAD_ELEMENTS // (2 * half), 1), _next_power_of_two(num_heads))
        return {"H": self.num_heads, "G": self.num_keys, "E": size, "BLOCK": block, "HALF": half, "num_warps": 2}


def apply_qk_norm_rope(qkv_TNE: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [T, H, E] and keys [T, G, E], and a view of the values [T, G, E]. Backward writes the gradient of
    all heads as one tensor.
    """
    if torch.is_grad_enabled():
        return cast("tuple[Tensor, Tensor, Tensor]", _QKNormRopeFunction.apply(qkv_TNE, rotation))
    return _launch_qk_norm_rope(qkv_TNE, rotation)


class _QKNormRopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv_TNE: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(None if rotation.weight is None else qkv_TNE)
        ctx.rotation = rotation
        return _launch_qk_norm_rope(qkv_TNE, rotation)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _launch_qk_norm_rope_gradient(grads, ctx.saved_tensors[0], ctx.rotation), None


def _launch_qk_norm_rope(qkv_TNE: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    (num_rows, _, size), num_rotated = qkv_TNE.shape, rotation.num_heads + rotation.num_keys
    queries = qkv_TNE.new_empty(num_rows, rotation.num_heads, size)
    keys = qkv_TNE.new_empty(num_rows, rotation.num_keys, size)
    tile = rotation.tile(num_rotated)
    num_programs = num_rows * _count_blocks(num_rotated, tile["BLOCK"])
    inputs = qkv_TNE, rotation.cos_T1E, rotation.signed_T1E, rotation.weight
    _launch(_qk_norm_rope_kernel, num_programs, *inputs, queries, keys, rotation.eps, **tile)
    return queries, keys, qkv_TNE[:, num_rotated:]


def _launch_qk_norm_rope_gradient(grads: tuple[Tensor, ...], qkv_TNE: Tensor | None, rotation: Rotation) -> Tensor:
    """`qkv` is needed with norms only."""
    grads = tuple(grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
    num_rows, num_all, size = len(grads[0]), rotation.num_heads + 2 * rotation.num_keys, grads[0].shape[-1]
    grad_qkv = grads[0].new_empty(num_rows, num_all, size)
    tile, strides = rotation.tile(num_all), [grad.stride(i) for grad in grads for i in (0, 1)]
    num_programs = num_rows * _count_blocks(num_all, tile["BLOCK"])
    inputs = qkv_TNE, rotation.cos_T1E, rotation.signed_T1E, rotation.weight
    _launch(_qk_norm_rope_gradient_kernel, num_programs, *grads, *strides, *inputs, grad_qkv, rotation.eps, **tile)
    return grad_qkv
