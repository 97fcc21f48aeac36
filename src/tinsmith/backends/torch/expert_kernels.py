"""Triton kernels between the grouped products of a mixture's experts, with the deltas of many adapters: what
`expert_pairs` describes, without a wait for the device.

Each reads a large tensor once. Sums are in float32, in a fixed order, and rounded at the end. Tiles of rows belong to
one group, an expert and an adapter: `_RowBlocks` divides the groups into tiles on the device, and as many programs are
launched as any groups of these pairs could need. A tile's rows are rows of products, so no number of one reaches
another; only gradients of matrices sum over rows, and these are of one adapter. Adapters' matrices and gradients are
read and written where they are, by address, whatever the ranks; ranks are padded in registers, by zeros.

A tensor of pairs can have more than 2^31 elements: row indices are 64-bit numbers.

Importing this module imports Triton, which comes with every CUDA build of torch. `moe` imports it where kernels suit.

Shapes: as in `expert_pairs`; I inner size, G = 2 * I, B blocks, P projections.
"""

# What launches a kernel is typed as the kernel itself.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

from tinsmith.backends.torch.adapters import Adapter
from tinsmith.backends.torch.expert_pairs import ExpertPairs, Factors, GateGradients, count_ranks, rank_slices
from tinsmith.backends.torch.frozen_weights import ExpertWeights
from tinsmith.backends.torch.host import upload

ROWS, COLUMNS = 64, 64
"""Pairs and columns of a tile: the pairs are those of one instruction of Hopper's tensor cores."""

GATE_COLUMNS = 32
"""Columns of a tile between gate and down: fewer, because several tensors are in registers at once."""

ROW_ELEMENTS = 2048
"""The most elements of a row that one program copies or sums."""

WARP_ELEMENTS = 512
"""Elements of a row for each warp."""


@triton.jit
def _repeat_kernel(x_ptr, sorted_ptr, y_ptr, CHOICES: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """y[sorted pair] = x[row] for each pair of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * C + column, column < C)
    for choice in tl.static_range(CHOICES):
        at = tl.load(sorted_ptr + row * CHOICES + choice)
        tl.store(y_ptr + at * C + column, x, column < C)


@triton.jit
def _combine_kernel(
    x_ptr, sorted_ptr, weights_ptr, y_ptr, CHOICES: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """y[row] = the sum of weight * x[sorted pair] over the row's pairs."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        at = tl.load(sorted_ptr + row * CHOICES + choice)
        x = tl.load(x_ptr + at * C + column, column < C, 0.0).to(tl.float32)
        if weights_ptr is not None:
            x *= tl.load(weights_ptr + row * CHOICES + choice).to(tl.float32)
        sums += x
    tl.store(y_ptr + row * C + column, sums.to(y_ptr.dtype.element_ty), column < C)


@triton.jit
def _load_block(ends_ptr, block_ends_ptr, group, block, ROWS: tl.constexpr):
    """The sorted pairs of a block, and which of them belong to its group."""
    first = tl.load(ends_ptr + group - 1, group > 0, 0)
    first_block = tl.load(block_ends_ptr + group - 1, group > 0, 0)
    at = first + (block - first_block) * ROWS + tl.arange(0, ROWS)
    return at.to(tl.int64), at < tl.load(ends_ptr + group)


@triton.jit
def _load_part(table_ptr, slot, part, PARTS: tl.constexpr, UNIT: tl.constexpr):
    """Address, rank and first low-rank value of a projection of an adapter."""
    entry = table_ptr + (slot * PARTS + part) * 3
    rank = tl.multiple_of(tl.load(entry + 1), UNIT)
    start = tl.multiple_of(tl.load(entry + 2), UNIT)
    return tl.load(entry), rank, start


@triton.jit
def _load_factors(ptr, expert, column, rank, C: tl.constexpr, PADDED: tl.constexpr, IS_B: tl.constexpr):
    """[columns, ranks] of one expert's B [C, r] or A [r, C]; zeros beyond."""
    ranks = tl.arange(0, PADDED)
    if IS_B:
        at = (expert * C + column)[:, None] * rank + ranks[None]
        factors = tl.load(ptr + at, (column < C)[:, None] & (ranks < rank)[None], 0.0)
    else:
        at = (expert * rank + ranks)[:, None] * C + column[None]
        factors = tl.trans(tl.load(ptr + at, (ranks < rank)[:, None] & (column < C)[None], 0.0))
    return factors


@triton.jit
def _load_values(ptr, row, is_row, start, rank, STRIDE: tl.constexpr, PADDED: tl.constexpr):
    """[rows, ranks]: low-rank values of one projection; zeros beyond."""
    ranks = tl.arange(0, PADDED)
    at = row[:, None] * STRIDE + start + ranks[None]
    return tl.load(ptr + at, is_row[:, None] & (ranks < rank)[None], 0.0)


@triton.jit
def _store_values(ptr, values, row, is_row, start, rank, STRIDE: tl.constexpr, PADDED: tl.constexpr):
    ranks = tl.arange(0, PADDED)
    at = row[:, None] * STRIDE + start + ranks[None]
    tl.store(ptr + at, values.to(ptr.dtype.element_ty), is_row[:, None] & (ranks < rank)[None])


@triton.jit(do_not_specialize=["num_groups", "num_slots"])
def _expand_kernel(  # noqa: PLR0913 - one launch
    out_ptr, u_ptr, pairs_ptr, ends_ptr, block_ends_ptr, groups_ptr, table_ptr, num_groups, num_slots,
    CHOICES: tl.constexpr, C: tl.constexpr, STRIDE: tl.constexpr, STEP: tl.constexpr, PART_STEP: tl.constexpr,
    U_STRIDE: tl.constexpr, PARTS: tl.constexpr, IS_B: tl.constexpr, UNIT: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[pair, columns of the projection] += u[row] F^T."""
    tiles: tl.constexpr = tl.cdiv(C, COLUMNS)
    block, part = tl.program_id(0), tl.program_id(1) // tiles
    group = tl.load(groups_ptr + block)
    if group >= num_groups:
        return
    expert, slot = (group // num_slots).to(tl.int64), group % num_slots
    address, rank, start = _load_part(table_ptr, slot, part, PARTS, UNIT)
    if address == 0:
        return
    at, is_row = _load_block(ends_ptr, block_ends_ptr, group, block, ROWS)
    row = tl.load(pairs_ptr + at, is_row, 0) // CHOICES
    column = tl.program_id(1) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    u = _load_values(u_ptr, row, is_row, start, rank, U_STRIDE, PADDED)
    factors_ptr = tl.multiple_of(address.to(tl.pointer_type(u_ptr.dtype.element_ty)), 16)
    factors = _load_factors(factors_ptr, expert, column, rank, C, PADDED, IS_B)
    out = out_ptr + at[:, None] * STRIDE + (part * PART_STEP + column * STEP)[None]
    mask = is_row[:, None] & (column < C)[None]
    sums = tl.load(out, mask, 0.0).to(tl.float32)
    sums = tl.dot(u, tl.trans(factors), sums, input_precision="ieee")
    tl.store(out, sums.to(out_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["num_groups", "num_slots"])
def _shrink_kernel(  # noqa: PLR0913 - one launch
    x_ptr, v_ptr, ends_ptr, block_ends_ptr, groups_ptr, table_ptr, num_groups, num_slots,
    C: tl.constexpr, STRIDE: tl.constexpr, STEP: tl.constexpr, PART_STEP: tl.constexpr,
    V_STRIDE: tl.constexpr, PARTS: tl.constexpr, IS_B: tl.constexpr, UNIT: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """v[pair] = x[pair, columns of the projection] F."""
    block, part = tl.program_id(0), tl.program_id(1)
    group = tl.load(groups_ptr + block)
    if group >= num_groups:
        return
    expert, slot = (group // num_slots).to(tl.int64), group % num_slots
    address, rank, start = _load_part(table_ptr, slot, part, PARTS, UNIT)
    if address == 0:
        return
    at, is_row = _load_block(ends_ptr, block_ends_ptr, group, block, ROWS)
    factors_ptr = tl.multiple_of(address.to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
    sums = tl.zeros((ROWS, PADDED), tl.float32)
    for begin in range(0, C, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        x = x_ptr + at[:, None] * STRIDE + (part * PART_STEP + column * STEP)[None]
        factors = _load_factors(factors_ptr, expert, column, rank, C, PADDED, IS_B)
        x_tile = tl.load(x, is_row[:, None] & (column < C)[None], 0.0)
        sums = tl.dot(x_tile, factors, sums, input_precision="ieee")
    _store_values(v_ptr, sums, at, is_row, start, rank, V_STRIDE, PADDED)


@triton.jit(do_not_specialize=["num_slots"])
def _outer_kernel(  # noqa: PLR0913 - one launch
    x_ptr, u_ptr, weights_ptr, pairs_ptr, ends_ptr, table_ptr, num_slots,
    CHOICES: tl.constexpr, C: tl.constexpr, STRIDE: tl.constexpr, STEP: tl.constexpr, PART_STEP: tl.constexpr,
    U_STRIDE: tl.constexpr, PARTS: tl.constexpr, IS_B: tl.constexpr, UNIT: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The float32 gradient of a group's F += the sum of x[pair, columns]^T weight * u[row]. One program writes it."""
    tiles: tl.constexpr = tl.cdiv(C, COLUMNS)
    group, part = tl.program_id(0), tl.program_id(1) // tiles
    expert, slot = (group // num_slots).to(tl.int64), group % num_slots
    address, rank, start = _load_part(table_ptr, slot, part, PARTS, UNIT)
    begin, end = tl.load(ends_ptr + group - 1, group > 0, 0), tl.load(ends_ptr + group)
    if (address == 0) | (begin == end):
        return
    column = tl.program_id(1) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((COLUMNS, PADDED), tl.float32)
    for first_pair in range(begin, end, ROWS):
        at = first_pair + tl.arange(0, ROWS)
        is_row = at < end
        pair = tl.load(pairs_ptr + at, is_row, 0)
        u = _load_values(u_ptr, pair // CHOICES, is_row, start, rank, U_STRIDE, PADDED)
        if weights_ptr is not None:
            weight = tl.load(weights_ptr + pair, is_row, 0.0).to(tl.float32)
            u = (u.to(tl.float32) * weight[:, None]).to(u.dtype)
        x = x_ptr + at.to(tl.int64)[:, None] * STRIDE + (part * PART_STEP + column * STEP)[None]
        x_tile = tl.load(x, is_row[:, None] & (column < C)[None], 0.0)
        sums = tl.dot(tl.trans(x_tile), u, sums, input_precision="ieee")
    ranks = tl.arange(0, PADDED)
    if IS_B:
        gradient_at = (expert * C + column)[:, None] * rank + ranks[None]
    else:
        gradient_at = (expert * rank + ranks)[None] * C + column[:, None]
    gradient = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16) + gradient_at
    mask = (column < C)[:, None] & (ranks < rank)[None]
    tl.store(gradient, tl.load(gradient, mask, 0.0) + sums, mask)


@triton.jit(do_not_specialize=["num_groups", "num_slots"])
def _gate_kernel(  # noqa: PLR0913 - one launch
    gate_up_ptr, u_ptr, inner_ptr, v_ptr, pairs_ptr, ends_ptr, block_ends_ptr, groups_ptr, outer_ptr, down_ptr,
    num_groups, num_slots,
    CHOICES: tl.constexpr, C: tl.constexpr, U_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    UNIT: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """inner = silu(gate) * up of gate and up with their deltas, and v[pair] = inner A^T of down."""
    block = tl.program_id(0)
    group = tl.load(groups_ptr + block)
    if group >= num_groups:
        return
    expert, slot = (group // num_slots).to(tl.int64), group % num_slots
    at, is_row = _load_block(ends_ptr, block_ends_ptr, group, block, ROWS)
    row = tl.load(pairs_ptr + at, is_row, 0) // CHOICES
    dtype = gate_up_ptr.dtype.element_ty
    gate_address, gate_rank, gate_start = _load_part(outer_ptr, slot, 0, 2, UNIT)
    up_address, up_rank, up_start = _load_part(outer_ptr, slot, 1, 2, UNIT)
    down_address, down_rank, down_start = _load_part(down_ptr, slot, 0, 1, UNIT)
    gate_factors = tl.multiple_of(gate_address.to(tl.pointer_type(dtype)), 16)
    up_factors = tl.multiple_of(up_address.to(tl.pointer_type(dtype)), 16)
    down_factors = tl.multiple_of(down_address.to(tl.pointer_type(dtype)), 16)
    u_gate = _load_values(u_ptr, row, is_row, gate_start, gate_rank, U_STRIDE, PADDED)
    u_up = _load_values(u_ptr, row, is_row, up_start, up_rank, U_STRIDE, PADDED)
    sums = tl.zeros((ROWS, PADDED), tl.float32)
    for begin in range(0, C, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        mask = is_row[:, None] & (column < C)[None]
        outer = gate_up_ptr + at[:, None] * (2 * C) + column[None]
        gate, up = tl.load(outer, mask, 0.0).to(tl.float32), tl.load(outer + C, mask, 0.0).to(tl.float32)
        b_gate = _load_factors(gate_factors, expert, column, gate_rank, C, PADDED, True)
        b_up = _load_factors(up_factors, expert, column, up_rank, C, PADDED, True)
        gate = tl.dot(u_gate, tl.trans(b_gate), gate, input_precision="ieee")
        up = tl.dot(u_up, tl.trans(b_up), up, input_precision="ieee")
        inner = (gate * tl.sigmoid(gate) * up).to(dtype)
        tl.store(inner_ptr + at[:, None] * C + column[None], inner, mask)
        a_down = _load_factors(down_factors, expert, column, down_rank, C, PADDED, False)
        sums = tl.dot(inner, a_down, sums, input_precision="ieee")
    _store_values(v_ptr, sums, at, is_row, down_start, down_rank, V_STRIDE, PADDED)


@triton.jit(do_not_specialize=["num_groups", "num_slots"])
def _gate_gradient_kernel(  # noqa: PLR0913 - one launch
    grad_ptr, gate_up_ptr, u_ptr, z_ptr, weights_ptr, grad_gate_up_ptr, grad_u_ptr, grad_weights_ptr,
    pairs_ptr, ends_ptr, block_ends_ptr, groups_ptr, outer_ptr, down_ptr, num_groups, num_slots,
    CHOICES: tl.constexpr, C: tl.constexpr, U_STRIDE: tl.constexpr, Z_STRIDE: tl.constexpr,
    UNIT: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """With g = grad + z A of down: the gradients of the weights, g inner; of gate and up, from weight * g; and of the
    low-rank values, these times B. Writes inner over grad.
    """
    block = tl.program_id(0)
    group = tl.load(groups_ptr + block)
    if group >= num_groups:
        return
    expert, slot = (group // num_slots).to(tl.int64), group % num_slots
    at, is_row = _load_block(ends_ptr, block_ends_ptr, group, block, ROWS)
    pair = tl.load(pairs_ptr + at, is_row, 0)
    row = pair // CHOICES
    dtype = gate_up_ptr.dtype.element_ty
    gate_address, gate_rank, gate_start = _load_part(outer_ptr, slot, 0, 2, UNIT)
    up_address, up_rank, up_start = _load_part(outer_ptr, slot, 1, 2, UNIT)
    down_address, down_rank, down_start = _load_part(down_ptr, slot, 0, 1, UNIT)
    gate_factors = tl.multiple_of(gate_address.to(tl.pointer_type(dtype)), 16)
    up_factors = tl.multiple_of(up_address.to(tl.pointer_type(dtype)), 16)
    down_factors = tl.multiple_of(down_address.to(tl.pointer_type(dtype)), 16)
    u_gate = _load_values(u_ptr, row, is_row, gate_start, gate_rank, U_STRIDE, PADDED)
    u_up = _load_values(u_ptr, row, is_row, up_start, up_rank, U_STRIDE, PADDED)
    z = _load_values(z_ptr, row, is_row, down_start, down_rank, Z_STRIDE, PADDED)
    weight = tl.load(weights_ptr + pair, is_row, 0.0).to(tl.float32)
    grad_weight = tl.zeros((ROWS,), tl.float32)
    grad_u_gate = tl.zeros((ROWS, PADDED), tl.float32)
    grad_u_up = tl.zeros((ROWS, PADDED), tl.float32)
    for begin in range(0, C, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        mask = is_row[:, None] & (column < C)[None]
        outer = at[:, None] * (2 * C) + column[None]
        gate = tl.load(gate_up_ptr + outer, mask, 0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + outer + C, mask, 0.0).to(tl.float32)
        b_gate = _load_factors(gate_factors, expert, column, gate_rank, C, PADDED, True)
        b_up = _load_factors(up_factors, expert, column, up_rank, C, PADDED, True)
        gate = tl.dot(u_gate, tl.trans(b_gate), gate, input_precision="ieee")
        up = tl.dot(u_up, tl.trans(b_up), up, input_precision="ieee")
        grad_at = grad_ptr + at[:, None] * C + column[None]
        grad = tl.load(grad_at, mask, 0.0).to(tl.float32)
        a_down = _load_factors(down_factors, expert, column, down_rank, C, PADDED, False)
        grad = tl.dot(z, tl.trans(a_down), grad, input_precision="ieee")
        sigmoid = tl.sigmoid(gate)
        inner = gate * sigmoid * up
        grad_weight += tl.sum(grad * inner, 1)
        tl.store(grad_at, inner.to(dtype), mask)
        grad *= weight[:, None]
        grad_gate = (grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(dtype)
        grad_up = (grad * gate * sigmoid).to(dtype)
        tl.store(grad_gate_up_ptr + outer, grad_gate, mask)
        tl.store(grad_gate_up_ptr + outer + C, grad_up, mask)
        grad_u_gate = tl.dot(grad_gate, b_gate, grad_u_gate, input_precision="ieee")
        grad_u_up = tl.dot(grad_up, b_up, grad_u_up, input_precision="ieee")
    _store_values(grad_u_ptr, grad_u_gate, at, is_row, gate_start, gate_rank, U_STRIDE, PADDED)
    _store_values(grad_u_ptr, grad_u_up, at, is_row, up_start, up_rank, U_STRIDE, PADDED)
    tl.store(grad_weights_ptr + pair, grad_weight, is_row)


def _launch(kernel: JITFunction, grid: tuple[int, ...], *args: object, **constants: object) -> None:
    kernel[grid](*args, **constants)


def _launch_rows(kernel: JITFunction, num_rows: int, num_choices: int, size: int, *args: object) -> None:
    block = min(triton.next_power_of_2(size), ROW_ELEMENTS)
    _launch(
        kernel, (num_rows, triton.cdiv(size, block)), *args,
        CHOICES=num_choices, C=size, BLOCK=block, num_warps=max(block // WARP_ELEMENTS, 1),
    )  # fmt: skip


def repeat_rows(x_TC: Tensor, sorted_N: Tensor, num_choices: int) -> Tensor:
    """[N, C]: the row of each pair, at the pair's sorted index."""
    x_TC = x_TC.contiguous()
    y_NC = x_TC.new_empty(len(sorted_N), x_TC.shape[1])
    _launch_rows(_repeat_kernel, len(x_TC), num_choices, x_TC.shape[1], x_TC, sorted_N, y_NC)
    return y_NC


def combine_pairs(x_NC: Tensor, sorted_N: Tensor, num_choices: int, weights_Tk: Tensor | None) -> Tensor:
    """[T, C]: the sum, weighted if there are weights, over each row's pairs in the order of its choices."""
    out_TC = x_NC.new_empty(len(sorted_N) // num_choices, x_NC.shape[1])
    weights_Tk = None if weights_Tk is None else weights_Tk.contiguous()
    _launch_rows(_combine_kernel, len(out_TC), num_choices, x_NC.shape[1], x_NC, sorted_N, weights_Tk, out_TC)
    return out_TC


class _RowBlocks(NamedTuple):
    """The tiles of all groups: the group of each, or a number beyond the groups, and how many end with each group."""

    group_B: Tensor
    block_ends_V: Tensor


class GroupedPairs(ExpertPairs):
    """Products by kernels; sizes of groups stay on the device."""

    @cached_property
    def _expert_ends_E(self) -> Tensor:
        num_slots = len(self.adapters)
        return self.ends_V if num_slots == 1 else self.ends_V[num_slots - 1 :: num_slots].contiguous()

    @cached_property
    def _blocks(self) -> _RowBlocks:
        ends_V = self.ends_V
        counts_V = torch.diff(ends_V, prepend=ends_V.new_zeros(1))
        block_ends_V = ((counts_V + (ROWS - 1)) // ROWS).cumsum(0, dtype=torch.int32)
        num_blocks = self._num_pairs // ROWS + min(len(ends_V), self._num_pairs)
        numbers_B = torch.arange(num_blocks, device=ends_V.device, dtype=torch.int32)
        return _RowBlocks(torch.searchsorted(block_ends_V, numbers_B, right=True, out_int32=True), block_ends_V)

    @property
    def _num_pairs(self) -> int:
        return len(self.order.pair_N)

    def repeat_rows(self, x_TC: Tensor) -> Tensor:
        return repeat_rows(x_TC, self.order.sorted_N, self.num_choices)

    def combine(self, x_NC: Tensor, weights_Tk: Tensor | None = None) -> Tensor:
        return combine_pairs(x_NC, self.order.sorted_N, self.num_choices, weights_Tk)

    def matmul(self, x_NC: Tensor, weights: ExpertWeights, *, back: bool = False) -> Tensor:
        return weights.multiply_groups(x_NC, self._expert_ends_E, back=back)

    def expand_(self, out_NC: Tensor, u_TR: Tensor, projections: Sequence[Factors]) -> None:
        if (ranks := self._count_ranks(projections)) == 0:
            return
        assert out_NC.is_contiguous()
        constants = self._factor_constants(out_NC, projections)
        num_tiles = len(projections) * triton.cdiv(constants["C"], COLUMNS)
        _launch(
            _expand_kernel, (len(self._blocks.group_B), num_tiles),
            out_NC, u_TR, self.order.pair_N, *self._block_tables, self._matrices(projections), *self._group_counts,
            CHOICES=self.num_choices, U_STRIDE=u_TR.shape[1], **constants, **self._tile(ranks, u_TR.dtype),
        )  # fmt: skip

    def shrink(self, x_NC: Tensor, projections: Sequence[Factors]) -> Tensor:
        v_NR = x_NC.new_empty(self._num_pairs, count_ranks(self.adapters, projections))
        if (ranks := self._count_ranks(projections)) == 0:
            return v_NR
        _launch(
            _shrink_kernel, (len(self._blocks.group_B), len(projections)),
            x_NC.contiguous(), v_NR, *self._block_tables, self._matrices(projections), *self._group_counts,
            V_STRIDE=v_NR.shape[1], **self._factor_constants(x_NC, projections), **self._tile(ranks, x_NC.dtype),
        )  # fmt: skip
        return v_NR

    def add_outer_(
        self, x_NC: Tensor, u_TR: Tensor, projections: Sequence[Factors], weights_Tk: Tensor | None = None
    ) -> None:
        ranks = self._count_ranks(projections)
        if ranks == 0 or all(adapter is None or adapter.gradients is None for adapter in self.adapters):
            return
        weights_Tk = None if weights_Tk is None else weights_Tk.contiguous()
        constants = self._factor_constants(x_NC, projections)
        num_tiles = len(projections) * triton.cdiv(constants["C"], COLUMNS)
        table_SP3 = self._upload_table(projections, _gradients_of)
        _launch(
            _outer_kernel, (len(self.ends_V), num_tiles),
            x_NC.contiguous(), u_TR, weights_Tk, self.order.pair_N, self.ends_V, table_SP3, len(self.adapters),
            CHOICES=self.num_choices, U_STRIDE=u_TR.shape[1], **constants, **self._tile(ranks, u_TR.dtype),
        )  # fmt: skip

    def gate(
        self, gate_up_NG: Tensor, u_TR: Tensor, outer: Sequence[Factors], down: Sequence[Factors]
    ) -> tuple[Tensor, Tensor]:
        inner_NI = gate_up_NG.new_empty(self._num_pairs, gate_up_NG.shape[1] // 2)
        v_NR = gate_up_NG.new_empty(self._num_pairs, count_ranks(self.adapters, down))
        _launch(
            _gate_kernel, (len(self._blocks.group_B),),
            gate_up_NG, u_TR, inner_NI, v_NR, self.order.pair_N, *self._block_tables,
            self._matrices(outer), self._matrices(down), *self._group_counts,
            CHOICES=self.num_choices, C=inner_NI.shape[1], U_STRIDE=u_TR.shape[1], V_STRIDE=v_NR.shape[1],
            **self._tile(self._count_ranks([*outer, *down]), u_TR.dtype, COLUMNS=GATE_COLUMNS),
        )  # fmt: skip
        return inner_NI, v_NR

    def gate_gradient_(
        self,
        grad_NI: Tensor,
        gate_up_NG: Tensor,
        low_rank: tuple[Tensor, Tensor],
        weights_Tk: Tensor,
        outer: Sequence[Factors],
        down: Sequence[Factors],
    ) -> GateGradients:
        u_TR, z_TR = low_rank
        grad_gate_up_NG = torch.empty_like(gate_up_NG)
        grad_u_NR = u_TR.new_empty(self._num_pairs, u_TR.shape[1])
        grad_weights_Tk = weights_Tk.new_empty(weights_Tk.shape, dtype=torch.float32)
        ranks = self._count_ranks([*outer, *down])
        _launch(
            _gate_gradient_kernel, (len(self._blocks.group_B),),
            grad_NI, gate_up_NG, u_TR, z_TR, weights_Tk.contiguous(), grad_gate_up_NG, grad_u_NR, grad_weights_Tk,
            self.order.pair_N, *self._block_tables, self._matrices(outer), self._matrices(down), *self._group_counts,
            CHOICES=self.num_choices, C=grad_NI.shape[1], U_STRIDE=u_TR.shape[1], Z_STRIDE=z_TR.shape[1],
            **self._tile(ranks, u_TR.dtype, COLUMNS=GATE_COLUMNS, num_warps=8),
        )  # fmt: skip
        return GateGradients(grad_gate_up_NG, grad_u_NR, grad_weights_Tk)

    @property
    def _block_tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.ends_V, self._blocks.block_ends_V, self._blocks.group_B

    @property
    def _group_counts(self) -> tuple[int, int]:
        return len(self.ends_V), len(self.adapters)

    def _tile(self, ranks: int, dtype: torch.dtype, **overrides: int) -> dict[str, int]:
        """Sizes of a tile for products with so many ranks."""
        padded = max(16, triton.next_power_of_2(ranks))
        # A power of two that divides all ranks, up to the elements that one instruction loads.
        unit = math.gcd(8, *(adapter.layout.rank for adapter in self.adapters if adapter is not None))
        # Tiles that are loaded ahead must fit into a multiprocessor's shared memory.
        num_stages = 2 if padded * dtype.itemsize <= 128 else 1
        num_warps = 4 if padded <= 32 else 8
        sizes = {"UNIT": unit, "PADDED": padded, "ROWS": ROWS, "COLUMNS": COLUMNS}
        return {**sizes, "num_stages": num_stages, "num_warps": num_warps, **overrides}

    def _count_ranks(self, projections: Sequence[Factors]) -> int:
        """The highest rank of an adapter's projection; 0 if no adapter has one."""
        parts = [part for adapter in self.adapters for part in rank_slices(adapter, projections)]
        return max((part.ranks.stop - part.ranks.start for part in parts), default=0)

    @staticmethod
    def _factor_constants(x_NC: Tensor, projections: Sequence[Factors]) -> dict[str, int]:
        columns, width = [factors.columns for factors in projections], x_NC.shape[1]
        return {
            "C": len(range(*columns[0].indices(width))),
            "STRIDE": width,
            "STEP": columns[0].step or 1,
            "PART_STEP": columns[-1].start,  # there are at most two, and the first begins at 0
            "PARTS": len(projections),
            "IS_B": projections[0].matrix == 1,
        }

    def _matrices(self, projections: Sequence[Factors]) -> Tensor:
        if (table_SP3 := self._tables.get(projections[0].name)) is None:
            table_SP3 = self._tables[projections[0].name] = self._upload_table(projections, _matrices_of)
        return table_SP3

    @cached_property
    def _tables(self) -> dict[str, Tensor]:
        """Of the adapters' matrices, by the first projection."""
        return {}

    def _upload_table(
        self, projections: Sequence[Factors], tensor_of: Callable[[Adapter, Factors], Tensor | None]
    ) -> Tensor:
        """[S, P, 3]: see `_load_part`; zeros where there is no tensor."""
        table_SP3 = np.zeros((len(self.adapters), len(projections), 3), np.int64)
        for slot, adapter in enumerate(self.adapters):
            for index, factors, ranks in rank_slices(adapter, projections):
                if adapter is not None and (tensor := tensor_of(adapter, factors)) is not None:
                    table_SP3[slot, index] = tensor.data_ptr(), ranks.stop - ranks.start, ranks.start
        return upload(table_SP3, self.ends_V.device)


def _matrices_of(adapter: Adapter, factors: Factors) -> Tensor:
    return adapter.compute[factors.name][factors.matrix]


def _gradients_of(adapter: Adapter, factors: Factors) -> Tensor | None:
    return None if adapter.gradients is None else adapter.gradients[factors.name][factors.matrix]
