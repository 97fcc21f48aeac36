"""Triton kernels between the matmuls of a decoder layer: norms, gated norms and activations, and RoPE of queries and
keys, with or without their norms, each with its gradient.

Each reads its inputs once and writes its outputs once, computes in float32 and rounds at the end; a norm also rounds in
between where its form says so, and gradients never do. Every row is computed
on its own, in a fixed order, so results do not depend on the other rows. Weights are frozen and get no gradient.
Launches wait for nothing and use this thread's current device and stream, so a CUDA graph can capture them. Tile sizes
follow from shapes: a thread holds 8 or 16 elements, so that it loads 16 bytes of bfloat16 at once and enough bytes are
under way on each multiprocessor; the number of rows is no argument, so it compiles nothing anew.

Imports triton, which only CUDA builds of torch bring along: import this where a CUDA tensor is met. Knows no model,
adapter or attention. `transformer` computes the same in plain torch, for CPUs; `module_kernels` puts these kernels in
place of transformers' own operations.

Shapes: T rows, D hidden size, F inner size, N = H + 2 G heads: H of queries, G of keys and G of values, E head dim.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.runtime import JITFunction

NORM_ELEMENTS = 512
"""Elements of a row for each warp of a norm."""

ROW_ELEMENTS = 1024
"""Elements of the rows for each program of a norm; longer rows have a program each."""

GATED_ELEMENTS = 1024
"""Elements of a row for each program of a gated activation, of four warps."""

HEAD_ELEMENTS = 1024
"""Elements of a row's heads for each program of RoPE, of two warps."""


@triton.jit
def _load_rows(x, row, at, mask, x_row, D: tl.constexpr, GROUPS: tl.constexpr):
    """Rows of D elements, in float32; `x_row` apart, or so far apart for each GROUPS adjacent ones."""
    start = row * x_row
    if GROUPS > 1:
        start = row // GROUPS * x_row + row % GROUPS * D
    return tl.load(x + start + at, mask, other=0.0).to(tl.float32)


@triton.jit
def _load_scale(weight, row, at, D: tl.constexpr, GROUPS: tl.constexpr, OFFSET: tl.constexpr):
    column = at
    if GROUPS > 1:
        column = row % GROUPS * D + at
    scale = tl.load(weight + column, at < D, other=0.0).to(tl.float32)
    if OFFSET:
        scale += 1.0
    return scale


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(  # noqa: PLR0913
    x, gate, weight, y, x_row, gate_row, num_rows, eps,
    D: tl.constexpr, GROUPS: tl.constexpr, OFFSET: tl.constexpr, ROUNDS: tl.constexpr, GATES_FIRST: tl.constexpr,
    IS_SILU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (at < D)
    values = _load_rows(x, row, at, mask, x_row, D, GROUPS)
    if gate is not None:
        gates = _load_rows(gate, row, at, mask, gate_row, D, GROUPS)
        factor = tl.sigmoid(gates)
        if IS_SILU:
            factor *= gates
        if GATES_FIRST:
            values *= factor
    out = values * tl.rsqrt(tl.sum(values * values, 1, keep_dims=True) / D + eps)
    if ROUNDS:
        out = out.to(y.dtype.element_ty).to(tl.float32)
    if weight is not None:
        out *= _load_scale(weight, row, at, D, GROUPS, OFFSET)
        if ROUNDS:
            out = out.to(y.dtype.element_ty).to(tl.float32)
    if gate is not None and not GATES_FIRST:
        out *= factor
    tl.store(y + row * D + at, out, mask)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_gradient_kernel(  # noqa: PLR0913
    grad, x, gate, weight, grad_x, grad_gate, grad_row, x_row, gate_row, num_rows, eps,
    D: tl.constexpr, GROUPS: tl.constexpr, OFFSET: tl.constexpr, ROUNDS: tl.constexpr, GATES_FIRST: tl.constexpr,
    IS_SILU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (at < D)
    values = _load_rows(x, row, at, mask, x_row, D, GROUPS)
    scaled = _load_rows(grad, row, at, mask, grad_row, D, GROUPS)
    if weight is not None:
        scaled *= _load_scale(weight, row, at, D, GROUPS, OFFSET)
    inner = values
    if gate is not None:
        gates = _load_rows(gate, row, at, mask, gate_row, D, GROUPS)
        sigmoid = tl.sigmoid(gates)
        factor, slope = sigmoid, sigmoid * (1.0 - sigmoid)
        if IS_SILU:
            factor, slope = gates * sigmoid, sigmoid * (1.0 + gates * (1.0 - sigmoid))
        if GATES_FIRST:
            inner = values * factor
    rstd = tl.rsqrt(tl.sum(inner * inner, 1, keep_dims=True) / D + eps)
    if gate is not None and not GATES_FIRST:
        tl.store(grad_gate + row * D + at, scaled * inner * rstd * slope, mask)
        scaled *= factor
    projection = tl.sum(scaled * inner, 1, keep_dims=True) / D * rstd * rstd
    out = (scaled - inner * projection) * rstd
    if gate is not None and GATES_FIRST:
        tl.store(grad_gate + row * D + at, out * values * slope, mask)
        out *= factor
    tl.store(grad_x + row * D + at, out, mask)


@triton.jit
def _activate(gates, IS_SILU: tl.constexpr):
    """What the activation multiplies its argument by, and its slope: silu, or gelu by its tanh, which is a sigmoid."""
    if IS_SILU:
        sigmoid = tl.sigmoid(gates)
        slope = sigmoid * (1.0 + gates * (1.0 - sigmoid))
    else:
        # Beyond these bounds the sigmoid is 0 or 1, and a cube could become infinite.
        near = tl.minimum(tl.maximum(gates, -16.0), 16.0)
        sigmoid = tl.sigmoid(1.5957691216057308 * (near + 0.044715 * near * near * near))
        slope = sigmoid * (1.0 + near * (1.0 - sigmoid) * 1.5957691216057308 * (1.0 + 0.134145 * near * near))
    return sigmoid, slope


@triton.jit
def _gate_kernel(gate, up, y, gate_row, up_row, F: tl.constexpr, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    blocks: tl.constexpr = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    gates = tl.load(gate + row * gate_row + at, at < F, other=0.0).to(tl.float32)
    ups = tl.load(up + row * up_row + at, at < F, other=0.0).to(tl.float32)
    sigmoid, _ = _activate(gates, IS_SILU)
    tl.store(y + row * F + at, gates * sigmoid * ups, at < F)


@triton.jit
def _gate_gradient_kernel(  # noqa: PLR0913
    grad, gate, up, grad_gate, grad_up, grad_row, gate_row, up_row, out_row,
    F: tl.constexpr, IS_SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    grad_y = tl.load(grad + row * grad_row + at, at < F, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_row + at, at < F, other=0.0).to(tl.float32)
    ups = tl.load(up + row * up_row + at, at < F, other=0.0).to(tl.float32)
    sigmoid, slope = _activate(gates, IS_SILU)
    tl.store(grad_gate + row * out_row + at, grad_y * ups * slope, at < F)
    tl.store(grad_up + row * out_row + at, grad_y * gates * sigmoid, at < F)


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


@triton.jit
def _rotate_kernel(  # noqa: PLR0913
    q, k, cos, sine, out_q, out_k, q_row, q_head, k_row, k_head, cos_row, sine_row,
    H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, R: tl.constexpr, SECOND: tl.constexpr, INVERSE: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = tl.cdiv(H + G, BLOCK)
    half: tl.constexpr = R // 2
    row = (tl.program_id(0) // blocks).to(tl.int64)
    head = (tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK))[:, None].to(tl.int64)
    column = tl.broadcast_to(tl.arange(0, HALF)[None, :], BLOCK, HALF)
    inside, is_query, is_key = column < half, head < H, (head >= H) & (head < H + G)
    query, key = q + row * q_row + head * q_head, k + row * k_row + (head - H) * k_head
    out_query, out_key = out_q + row * (H * E) + head * E, out_k + row * (G * E) + (head - H) * E
    # A program's heads can be of two kinds; each is loaded from its own tensor, and the others are zeros.
    q_a, q_b = _load_halves(query, column, inside & is_query, half)
    k_a, k_b = _load_halves(key, column, inside & is_key, half)
    a, b = q_a + k_a, q_b + k_b
    cos_a, cos_b = _load_halves(cos + row * cos_row, column, inside, SECOND)
    sine_a, sine_b = _load_halves(sine + row * sine_row, column, inside, SECOND)
    if INVERSE:
        rotated_a, rotated_b = a * cos_a + b * sine_b, b * cos_b - a * sine_a
    else:
        rotated_a, rotated_b = a * cos_a - b * sine_a, b * cos_b + a * sine_b
    tl.store(out_query + column, rotated_a, inside & is_query)
    tl.store(out_query + column + half, rotated_b, inside & is_query)
    tl.store(out_key + column, rotated_a, inside & is_key)
    tl.store(out_key + column + half, rotated_b, inside & is_key)
    if R < E:
        unrotated = R + tl.broadcast_to(tl.arange(0, REST)[None, :], BLOCK, REST)
        of_query, of_key = is_query & (unrotated < E), is_key & (unrotated < E)
        tl.store(out_query + unrotated, tl.load(query + unrotated, of_query), of_query)
        tl.store(out_key + unrotated, tl.load(key + unrotated, of_key), of_key)


def _launch(kernel: JITFunction, num_programs: int, *args: object, **constants: object) -> None:
    kernel[(num_programs,)](*args, **constants)


def _next_power_of_two(size: int) -> int:
    """The next power of two, as tiles need."""
    return 1 << (size - 1).bit_length()


def _count_blocks(size: int, block: int) -> int:
    return -(-size // block)


class NormForm(NamedTuple):
    """What a norm computes: x / rms(x) * weight over the last dimension, or over each of its `groups`."""

    has_offset: bool = False
    """The weight is one more than what is stored."""
    rounds: bool = False
    """Rounds to the dtype of x before and after the product with the weight, instead of once at the end."""
    activation: str | None = None
    """Of the gate, 'silu' or 'sigmoid'; None without a gate."""
    gates_first: bool = False
    """Normalises the product with the activated gate, instead of multiplying it afterwards."""
    groups: int = 1

    @cache  # noqa: B019 - few forms, and no state
    def tile(self, size: int) -> dict[str, int | bool]:
        """Of rows with so many elements."""
        group = size // self.groups
        block = _next_power_of_two(group)
        rows = max(ROW_ELEMENTS // block, 1)
        num_warps = min(max(rows * block // NORM_ELEMENTS, 1), 16)
        return {
            "D": group, "GROUPS": self.groups, "OFFSET": self.has_offset, "ROUNDS": self.rounds,
            "GATES_FIRST": self.gates_first, "IS_SILU": self.activation == "silu", "ROWS": rows, "BLOCK": block,
            "num_warps": num_warps,
        }  # fmt: skip


PLAIN = NormForm()


def rms_norm(
    x: Tensor, weight_D: Tensor | None, eps: float, form: NormForm = PLAIN, gate: Tensor | None = None
) -> Tensor:
    """The norm of each row, with the gate's shape that of x."""
    size = x.shape[-1]
    y, x_ND, gate_ND = _empty_like(x), _as_rows(x, size), None if gate is None else _as_rows(gate, size)
    tile, num_rows = form.tile(size), len(x_ND) * form.groups
    strides = x_ND.stride(0), 0 if gate_ND is None else gate_ND.stride(0)
    num_programs = _count_blocks(num_rows, int(tile["ROWS"]))
    _launch(_norm_kernel, num_programs, x_ND, gate_ND, weight_D, y, *strides, num_rows, eps, **tile)
    return y


def rms_norm_gradient(grad: Tensor, x: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    """The gradient of x."""
    return _launch_norm_gradient(grad, x, None, weight_D, eps, PLAIN)[0]


def _launch_norm_gradient(
    grad: Tensor, x: Tensor, gate: Tensor | None, weight_D: Tensor | None, eps: float, form: NormForm
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x and of the gate."""
    size, grad_x, grad_gate = x.shape[-1], _empty_like(x), None if gate is None else _empty_like(gate)
    grad_ND, x_ND, gate_ND = _as_rows(grad, size), _as_rows(x, size), None if gate is None else _as_rows(gate, size)
    tile, num_rows = form.tile(size), len(x_ND) * form.groups
    tensors = grad_ND, x_ND, gate_ND, weight_D, grad_x, grad_gate
    strides = grad_ND.stride(0), x_ND.stride(0), 0 if gate_ND is None else gate_ND.stride(0)
    num_programs = _count_blocks(num_rows, int(tile["ROWS"]))
    _launch(_norm_gradient_kernel, num_programs, *tensors, *strides, num_rows, eps, **tile)
    return grad_x, grad_gate


def apply_norm(x: Tensor, weight_D: Tensor | None, eps: float, form: NormForm, gate: Tensor | None = None) -> Tensor:
    """`rms_norm` as one node, which keeps its inputs: the gradient computes the sums of squares again."""
    if torch.is_grad_enabled():
        return cast(Tensor, _NormFunction.apply(x, gate, weight_D, eps, form))
    return rms_norm(x, weight_D, eps, form, gate)


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor | None, weight_D: Tensor | None, eps: float, form: NormForm) -> Tensor:
        ctx.save_for_backward(x, gate, weight_D)
        ctx.eps, ctx.form = eps, form
        return rms_norm(x, weight_D, eps, form, gate)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, gate, weight_D = ctx.saved_tensors
        return *_launch_norm_gradient(grad, x, gate, weight_D, ctx.eps, ctx.form), None, None, None


def _count_rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _as_rows(x: Tensor, size: int) -> Tensor:
    """[N, size], each row in one piece: a view where strides allow it, such as of a part of each row."""
    x_NC = x.reshape(-1, size)
    return x_NC if x_NC.stride(1) == 1 else x_NC.contiguous()


def swiglu(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """silu(gate) * up [.., F] of both [.., 2F], or with 'gelu', by its tanh."""
    gate, up = gate_up.contiguous().chunk(2, -1)
    return _launch_gated(gate, up, activation)


def swiglu_gradient(grad: Tensor, gate_up: Tensor, activation: str = "silu") -> Tensor:
    """The gradient of both, [.., 2F]."""
    gate_up = gate_up.contiguous()
    grad_gate_up = torch.empty_like(gate_up)
    (gate, up), (grad_gate, grad_up) = gate_up.chunk(2, -1), grad_gate_up.chunk(2, -1)
    _launch_gated_gradient(grad, gate, up, grad_gate, grad_up, activation)
    return grad_gate_up


def apply_gate(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up as one node, which keeps both."""
    if torch.is_grad_enabled():
        return cast(Tensor, _GatedFunction.apply(gate, up, activation))
    return _launch_gated(gate, up, activation)


class _GatedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _launch_gated(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = _empty_like(gate), _empty_like(up)
        _launch_gated_gradient(grad, gate, up, grad_gate, grad_up, ctx.activation)
        return grad_gate, grad_up, None


def apply_joined_gate(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """`swiglu` as one node, which keeps both."""
    if torch.is_grad_enabled():
        return cast(Tensor, _JoinedGateFunction.apply(gate_up, activation))
    return swiglu(gate_up, activation)


class _JoinedGateFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        return swiglu(gate_up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gate_up,) = ctx.saved_tensors
        return swiglu_gradient(grad, gate_up, ctx.activation), None


def _launch_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    size, y = gate.shape[-1], _empty_like(gate)
    tensors, block = [_as_rows(x, size) for x in (gate, up)], _choose_gated_block(size)
    num_programs, strides = len(tensors[0]) * _count_blocks(size, block), [x.stride(0) for x in tensors]
    tile = {"F": size, "IS_SILU": activation == "silu", "BLOCK": block, "num_warps": 4}
    _launch(_gate_kernel, num_programs, *tensors, y, *strides, **tile)
    return y


def _launch_gated_gradient(
    grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor, activation: str
) -> None:
    """Both gradients have rows with the same stride."""
    size = gate.shape[-1]
    tensors, block = [_as_rows(x, size) for x in (grad, gate, up, grad_gate, grad_up)], _choose_gated_block(size)
    num_programs, strides = len(tensors[0]) * _count_blocks(size, block), [x.stride(0) for x in tensors[:4]]
    tile = {"F": size, "IS_SILU": activation == "silu", "BLOCK": block, "num_warps": 4}
    _launch(_gate_gradient_kernel, num_programs, *tensors, *strides, **tile)


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


class RotaryLayout(NamedTuple):
    """How queries and keys [1, H, T, E] and [1, G, T, E], or with rows before heads, meet their cosines."""

    has_heads_first: bool = True
    shares_halves: bool = False
    """Both halves of a head have the same cosines, which are half as many. Otherwise columns after as many as there are
    cosines are not rotated.
    """


def rotate_halves(
    q: Tensor, k: Tensor, cos_1TR: Tensor, sine_1TR: Tensor, layout: RotaryLayout
) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated, both in one launch: x cos + (-x2, x1) sin of each head's halves. Results have the
    shapes of q and k and the storage of [T, H, E], as attention reads rows.
    """
    if torch.is_grad_enabled():
        return cast("tuple[Tensor, Tensor]", _RotateFunction.apply(q, k, cos_1TR, sine_1TR, layout))
    return _launch_rotate(q, k, cos_1TR, sine_1TR, layout, inverse=False)


class _RotateFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, cos_1TR: Tensor, sine_1TR: Tensor, layout: RotaryLayout
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_1TR, sine_1TR)
        ctx.layout = layout
        return _launch_rotate(q, k, cos_1TR, sine_1TR, layout, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos_1TR, sine_1TR = ctx.saved_tensors
        return *_launch_rotate(grad_q, grad_k, cos_1TR, sine_1TR, ctx.layout, inverse=True), None, None, None


def _launch_rotate(
    q: Tensor, k: Tensor, cos_1TR: Tensor, sine_1TR: Tensor, layout: RotaryLayout, *, inverse: bool
) -> tuple[Tensor, Tensor]:
    """The transposed rotation if `inverse`."""
    q, k, cos_1TR, sine_1TR = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos_1TR, sine_1TR))
    row, head = (2, 1) if layout.has_heads_first else (1, 2)
    num_heads, num_keys, size = q.shape[head], k.shape[head], q.shape[-1]
    rotated = cos_1TR.shape[-1] * (2 if layout.shares_halves else 1)
    out_q, out_k = (_empty_rows(x, layout) for x in (q, k))
    half, unrotated = _next_power_of_two(rotated // 2), _next_power_of_two(max(size - rotated, 1))
    block = min(max(HEAD_ELEMENTS // (2 * half), 1), _next_power_of_two(num_heads + num_keys))
    tile = {
        "H": num_heads, "G": num_keys, "E": size, "R": rotated, "SECOND": 0 if layout.shares_halves else rotated // 2,
        "INVERSE": inverse, "BLOCK": block, "HALF": half, "REST": unrotated, "num_warps": 2,
    }  # fmt: skip
    strides = [*(x.stride(i) for x in (q, k) for i in (row, head)), cos_1TR.stride(1), sine_1TR.stride(1)]
    num_programs = q.shape[row] * _count_blocks(num_heads + num_keys, block)
    _launch(_rotate_kernel, num_programs, q, k, cos_1TR, sine_1TR, out_q, out_k, *strides, **tile)
    return out_q, out_k


def _empty_rows(x: Tensor, layout: RotaryLayout) -> Tensor:
    """Of the shape of x, in one piece with rows before heads."""
    if not layout.has_heads_first:
        return _empty_like(x)
    _, num_heads, num_rows, size = x.shape
    return x.new_empty_strided(x.shape, (num_heads * num_rows * size, size, num_heads * size, 1))
