"""Triton kernels for the low-rank matmuls of decode steps: rows of many adapters in two launches for each linear.

Rows of one adapter are adjacent. A step divides them into blocks of at most `block_rows` rows of one adapter, given as
a table on the device, so that a CUDA graph of these launches serves every choice of adapters of one layout. Blocks
without rows do nothing. A sum over inputs is divided among programs whose partial sums the second kernel adds in a
fixed order: results are the same bits every time. Each row meets only its own adapter's matrices.

Only `lora.DeviceLoRABatch` uses it. Importing this module imports Triton, which comes with every CUDA build of torch.

Shapes: n rows, B blocks, I inputs, O outputs, r rank, P parts (linears of a LoRADelta), S splits of a sum.
"""

# What launches a kernel is typed as the kernel itself.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT_INPUTS, MAX_SPLITS = 512, 16
"""Inputs that one program sums: a few rows must still occupy the whole chip."""

OUTPUTS = 128
"""Outputs of one program of the second kernel."""


@triton.jit(do_not_specialize=["num_rows"])  # which would compile another variant while samples wait
def _shrink_kernel(  # noqa: PLR0913 - one launch
    x_ptr, u_ptr, blocks_ptr, parts_ptr, x_stride, num_rows, num_inputs,
    RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """u[part, split, row] = this split's part of x[row] A^T, float32."""
    block, split, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(blocks_ptr + block * 4 + 2)
    if count == 0:
        return
    a_ptr = tl.load(blocks_ptr + block * 4).to(tl.pointer_type(x_ptr.dtype.element_ty))
    a_ptr = tl.multiple_of(a_ptr + tl.load(parts_ptr + part * WIDTH), 16)
    row = tl.load(blocks_ptr + block * 4 + 1) + tl.arange(0, ROWS)
    is_row = tl.arange(0, ROWS) < count
    rank = tl.arange(0, PADDED)
    sums = tl.zeros((ROWS, PADDED), tl.float32)
    for start in range(0, SPLIT, INPUTS):
        column = split * SPLIT + start + tl.arange(0, INPUTS)
        is_input = column < num_inputs
        x = tl.load(x_ptr + row[:, None] * x_stride + column[None], is_row[:, None] & is_input[None], 0.0)
        a = tl.load(a_ptr + rank[None] * num_inputs + column[:, None], (rank < RANK)[None] & is_input[:, None], 0.0)
        sums = tl.dot(x, a, sums, input_precision="ieee")
    splits = tl.num_programs(1)
    u_row = (part * splits + split) * num_rows + row
    tl.store(u_ptr + u_row[:, None] * PADDED + rank[None], sums, is_row[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(  # noqa: PLR0913 - one launch
    y_ptr, u_ptr, blocks_ptr, parts_ptr, tiles_ptr, y_stride, num_rows, dtype_ptr,
    RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """y[row, columns of the tile] += scale * (sum of u over splits) B^T."""
    block, tile = tl.program_id(0), tl.program_id(1)
    count = tl.load(blocks_ptr + block * 4 + 2)
    if count == 0:
        return
    dtype = dtype_ptr.dtype.element_ty
    part, first = tl.load(tiles_ptr + tile * 2), tl.load(tiles_ptr + tile * 2 + 1)
    scale = tl.load(blocks_ptr + block * 4 + 3).to(tl.int32).to(tl.float32, bitcast=True)
    row = tl.load(blocks_ptr + block * 4 + 1) + tl.arange(0, ROWS)
    is_row = tl.arange(0, ROWS) < count
    rank = tl.arange(0, PADDED)
    u = tl.zeros((ROWS, PADDED), tl.float32)
    for split in range(SPLITS):
        u_row = (part * SPLITS + split) * num_rows + row
        u += tl.load(u_ptr + u_row[:, None] * PADDED + rank[None], is_row[:, None], 0.0)
    b_ptr = tl.load(blocks_ptr + block * 4).to(tl.pointer_type(dtype))
    b_ptr = tl.multiple_of(b_ptr + tl.load(parts_ptr + part * 4 + 1), 16)
    out = first + tl.arange(0, OUT)
    is_out = out < tl.load(parts_ptr + part * 4 + 3)
    b = tl.load(b_ptr + out[None] * RANK + rank[:, None], is_out[None] & (rank < RANK)[:, None], 0.0)
    delta = tl.dot((u * scale).to(dtype), b, input_precision="ieee")
    y = y_ptr + row[:, None] * y_stride + (tl.load(parts_ptr + part * 4 + 2) + out)[None]
    mask = is_row[:, None] & is_out[None]
    tl.store(y, (tl.load(y, mask, 0.0).to(tl.float32) + delta).to(y_ptr.dtype.element_ty), mask)


def add_deltas_(
    y_nO: Tensor, x_nI: Tensor, blocks_B4: Tensor, parts_P4: Tensor, tiles_C2: Tensor, rank: int, block_rows: int
) -> None:
    """Add the deltas of one LoRADelta's parts to y.

    `blocks_B4` (int64): the address of the adapter's matrices in x's dtype, the first row, the number of rows, and the
    scale's float32 bits. `parts_P4` (int64) of each part: where its A [r, I] and B [O, r] begin behind that address,
    in elements, its first column of y, and O. `tiles_C2`: part and first output of each tile, see `list_tiles`.
    """
    u_PSnr = shrink(x_nI, blocks_B4, parts_P4, rank, block_rows)
    expand_(y_nO, u_PSnr, blocks_B4, parts_P4, tiles_C2, rank, block_rows, x_nI)


def shrink(x_nI: Tensor, blocks_B4: Tensor, parts_PX: Tensor, rank: int, block_rows: int) -> Tensor:
    """[P, S, n, r padded], float32: the parts' x A^T, whose splits `expand_` adds. Rows without an adapter are not
    written. The first column of `parts_PX` is that of `add_deltas_`.
    """
    num_rows, num_inputs = x_nI.shape
    padded = padded_rank(rank)
    splits = min(MAX_SPLITS, -(-num_inputs // SPLIT_INPUTS))
    inputs = 64 if padded > 64 else 128
    split = -(-num_inputs // (splits * inputs)) * inputs
    num_parts, width = parts_PX.shape
    u_PSnr = torch.empty(num_parts, splits, num_rows, padded, device=x_nI.device)
    _shrink_kernel[len(blocks_B4), splits, num_parts](
        x_nI, u_PSnr, blocks_B4, parts_PX, x_nI.stride(0), num_rows, num_inputs,
        RANK=rank, PADDED=padded, ROWS=block_rows, INPUTS=inputs, SPLIT=split, WIDTH=width,
    )  # fmt: skip
    return u_PSnr


def expand_(
    y_nO: Tensor, u_PSnr: Tensor, blocks_B4: Tensor, parts_P4: Tensor, tiles_C2: Tensor, rank: int, block_rows: int,
    like: Tensor,
) -> None:  # fmt: skip
    """Add scale * (sum of u over splits) B^T of all parts to y. The matrices are in the dtype of `like`."""
    _, splits, num_rows, padded = u_PSnr.shape
    _expand_kernel[len(blocks_B4), len(tiles_C2)](
        y_nO, u_PSnr, blocks_B4, parts_P4, tiles_C2, y_nO.stride(0), num_rows, like,
        RANK=rank, PADDED=padded, ROWS=block_rows, OUT=_outputs_per_tile(padded), SPLITS=splits,
    )  # fmt: skip


def list_tiles(outputs: list[int], rank: int) -> list[tuple[int, int]]:
    """Part and first output of each tile of parts with so many outputs."""
    step = _outputs_per_tile(padded_rank(rank))
    return [(part, first) for part, count in enumerate(outputs) for first in range(0, count, step)]


def padded_rank(rank: int) -> int:
    """The rank rounded up to a size that tensor cores multiply."""
    return max(16, 1 << (rank - 1).bit_length())


def _outputs_per_tile(padded: int) -> int:
    return OUTPUTS if padded <= 64 else OUTPUTS // 2
