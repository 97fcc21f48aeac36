"""Triton kernels for the experts of decode steps: a few rows, each with its own adapter and its own choice of experts.

Launches depend on shapes alone, and nothing is read by the host, so that a CUDA graph can hold them. Pairs are sorted
by expert in one launch, which compares every pair with every other: decode steps have few. A pair meets the matrices of
its row's adapter and its own expert and no others. A program computes one pair; sums are in float32 and in a fixed
order.

An adapter's shared matrices (A of the outer projections, B of the inner one) are those of any linear: `lora_kernels`
applies them to rows. Only `moe.MultiLoRAExperts` uses this module. Importing it imports Triton.

Shapes: n rows, k experts of each, N = n * k pairs, E experts, I inputs, O outputs, r rank, P parts, S splits of a sum.
"""

# What launches a kernel is typed as the kernel itself.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.backends.torch.lora_kernels import padded_rank

SORTED = 64
"""Pairs, or ends of groups, that one program sorts."""

OUTPUTS, INPUTS = 128, 128
"""Outputs of a program that expands, and inputs that a program which shrinks reads at once."""


class SortedPairs(NamedTuple):
    """Pairs sorted by expert, those of one expert in ascending order."""

    index_nk: Tensor  # the experts that each row chose
    pair_N: Tensor  # the pair (row * k + choice) at each position
    sorted_N: Tensor  # the position of each pair
    ends_E: Tensor  # where each expert's pairs end; int32


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(
    expert_ptr, pair_ptr, sorted_ptr, ends_ptr, num_pairs,
    EXPERTS: tl.constexpr, SORTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs first sort pairs, then count the pairs up to each expert."""
    program, num_placing = tl.program_id(0), tl.cdiv(num_pairs, SORTED)
    before = tl.zeros((SORTED,), tl.int32)
    if program < num_placing:
        pair = program * SORTED + tl.arange(0, SORTED)
        expert = tl.load(expert_ptr + pair, pair < num_pairs, 0).to(tl.int32)
        for start in range(0, num_pairs, BLOCK):
            other = start + tl.arange(0, BLOCK)
            other_expert = tl.load(expert_ptr + other, other < num_pairs, EXPERTS)
            is_equal = (other_expert[None] == expert[:, None]) & (other[None] < pair[:, None])
            before += tl.sum(((other_expert[None] < expert[:, None]) | is_equal).to(tl.int32), 1)
        tl.store(sorted_ptr + pair, before.to(tl.int64), pair < num_pairs)
        tl.store(pair_ptr + before, pair.to(tl.int64), pair < num_pairs)
    else:
        expert = (program - num_placing) * SORTED + tl.arange(0, SORTED)
        for start in range(0, num_pairs, BLOCK):
            other = start + tl.arange(0, BLOCK)
            other_expert = tl.load(expert_ptr + other, other < num_pairs, EXPERTS)
            before += tl.sum((other_expert[None] <= expert[:, None]).to(tl.int32), 1)
        tl.store(ends_ptr + expert, before, expert < EXPERTS)


def sort_pairs(index_nk: Tensor, num_experts: int) -> SortedPairs:
    """The pairs of rows with these experts, in N^2 comparisons."""
    index_nk = index_nk.contiguous()
    expert_N = index_nk.view(-1)
    num, device = len(expert_N), index_nk.device
    pair_N, sorted_N = torch.empty_like(expert_N, dtype=torch.int64), torch.empty_like(expert_N, dtype=torch.int64)
    ends_E = torch.empty(num_experts, dtype=torch.int32, device=device)
    programs = triton.cdiv(num, SORTED) + triton.cdiv(num_experts, SORTED)
    _sort_kernel[(programs,)](
        expert_N, pair_N, sorted_N, ends_E, num, EXPERTS=num_experts, SORTED=SORTED, BLOCK=64, num_warps=4
    )
    return SortedPairs(index_nk, pair_N, sorted_N, ends_E)


@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(  # noqa: PLR0913 - one launch
    y_ptr, u_ptr, rows_ptr, expert_ptr, pair_ptr, parts_ptr, y_stride, num_rows, dtype_ptr,
    RANK: tl.constexpr, PADDED: tl.constexpr, OUT: tl.constexpr, SPLITS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """y[position, columns of the part] += scale * (sum of u[row] over splits) B[expert]^T."""
    position, tile, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    pair = tl.load(pair_ptr + position)
    row = pair // CHOICES
    address = tl.load(rows_ptr + row * 2)
    if address == 0:
        return
    dtype = dtype_ptr.dtype.element_ty
    scale = tl.load(rows_ptr + row * 2 + 1).to(tl.int32).to(tl.float32, bitcast=True)
    rank = tl.arange(0, PADDED)
    u = tl.zeros((PADDED,), tl.float32)
    for split in range(SPLITS):
        u += tl.load(u_ptr + ((part * SPLITS + split) * num_rows + row) * PADDED + rank)
    num_out = tl.load(parts_ptr + part * 5 + 3)
    out = tile * OUT + tl.arange(0, OUT)
    is_out = out < num_out
    b_ptr = address.to(tl.pointer_type(dtype))
    b_ptr = tl.multiple_of(b_ptr + tl.load(parts_ptr + part * 5 + 1), 16)
    b_ptr += tl.load(expert_ptr + pair).to(tl.int64) * num_out * RANK
    b = tl.load(b_ptr + out[:, None] * RANK + rank[None], is_out[:, None] & (rank < RANK)[None], 0.0)
    delta = tl.sum(b.to(tl.float32) * (u * scale)[None], 1)
    column = tl.load(parts_ptr + part * 5 + 2) + out * tl.load(parts_ptr + part * 5 + 4)
    y = y_ptr + position * y_stride + column
    tl.store(y, (tl.load(y, is_out, 0.0).to(tl.float32) + delta).to(y_ptr.dtype.element_ty), is_out)


def expand_pairs_(
    y_NO: Tensor, u_PSnr: Tensor, rows_n2: Tensor, pairs: SortedPairs, parts_P5: Tensor,
    outputs: int, rank: int, like: Tensor,
) -> None:  # fmt: skip
    """Add each pair's deltas of all parts to y, whose rows are sorted by expert.

    `u_PSnr`: what `lora_kernels.shrink` makes of the rows. `rows_n2` (int64) of each row: the address of its adapter's
    matrices in the dtype of `like` and the scale's float32 bits; 0 without an adapter. `parts_P5` (int64) of each part:
    where its A and its B [E, O, r] begin behind that address, its first column of y, O, and the step between columns.
    `outputs`: the largest O.
    """
    num_parts, splits, num_rows, padded = u_PSnr.shape
    _expand_kernel[len(pairs.pair_N), triton.cdiv(outputs, OUTPUTS), num_parts](
        y_NO, u_PSnr, rows_n2, pairs.index_nk, pairs.pair_N, parts_P5, y_NO.stride(0), num_rows, like,
        RANK=rank, PADDED=padded, OUT=OUTPUTS, SPLITS=splits, CHOICES=pairs.index_nk.shape[1], num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(  # noqa: PLR0913 - one launch
    x_ptr, u_ptr, rows_ptr, expert_ptr, pair_ptr, weight_ptr, parts_ptr, x_stride, num_rows, num_inputs,
    RANK: tl.constexpr, PADDED: tl.constexpr, INPUTS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """u[choice, row] = weight * x[position] A[expert]^T, float32."""
    position = tl.program_id(0).to(tl.int64)
    pair = tl.load(pair_ptr + position)
    row, choice = pair // CHOICES, pair % CHOICES
    address = tl.load(rows_ptr + row * 2)
    if address == 0:
        return
    a_ptr = address.to(tl.pointer_type(x_ptr.dtype.element_ty))
    a_ptr = tl.multiple_of(a_ptr + tl.load(parts_ptr), 16)
    a_ptr += tl.load(expert_ptr + pair).to(tl.int64) * RANK * num_inputs
    rank = tl.arange(0, PADDED)
    sums = tl.zeros((PADDED,), tl.float32)
    for start in range(0, num_inputs, INPUTS):
        column = start + tl.arange(0, INPUTS)
        is_input = column < num_inputs
        x = tl.load(x_ptr + position * x_stride + column, is_input, 0.0).to(tl.float32)
        a = tl.load(a_ptr + rank[:, None] * num_inputs + column[None], (rank < RANK)[:, None] & is_input[None], 0.0)
        sums += tl.sum(a.to(tl.float32) * x[None], 1)
    sums *= tl.load(weight_ptr + pair).to(tl.float32)
    tl.store(u_ptr + (choice * num_rows + row) * PADDED + rank, sums)


def shrink_pairs(
    x_NI: Tensor, rows_n2: Tensor, pairs: SortedPairs, weights_nk: Tensor, parts_15: Tensor, rank: int
) -> Tensor:
    """u [1, k, n, r padded], float32: the router's weight times x A^T of each pair, where the sum over choices takes
    the place of the sum over splits. Rows without an adapter are not written. `parts_15`: as
    above, of one part with A [E, r, I].
    """
    num_rows, num_choices = pairs.index_nk.shape
    u_1knr = torch.empty(1, num_choices, num_rows, padded_rank(rank), device=x_NI.device)
    _shrink_kernel[(len(pairs.pair_N),)](
        x_NI, u_1knr, rows_n2, pairs.index_nk, pairs.pair_N, weights_nk.contiguous(), parts_15,
        x_NI.stride(0), num_rows, x_NI.shape[1],
        RANK=rank, PADDED=u_1knr.shape[-1], INPUTS=INPUTS, CHOICES=num_choices, num_warps=4,
    )  # fmt: skip
    return u_1knr
