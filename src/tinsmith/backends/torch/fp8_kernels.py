"""A Triton kernel that rounds rows to 8-bit floats, each with a scale of its own.

A row is read twice, the second time from the cache, and written once. Only `fp8` uses it. Importing this module imports
Triton, which comes with every CUDA build of torch.

Shapes: T rows, I inputs.
"""

# What launches a kernel is typed as the kernel itself.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Elements of a row that a program reads at once."""


@triton.jit
def _quantise_kernel(  # noqa: PLR0913 - one launch
    x_ptr, factor_ptr, expert_ptr, codes_ptr, scale_ptr, x_stride,
    LARGEST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if expert_ptr is not None:
        factor_ptr += tl.load(expert_ptr + row) * SIZE
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, SIZE, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + column, column < SIZE, 0.0).to(tl.float32)
        if factor_ptr is not None:
            x *= tl.load(factor_ptr + column, column < SIZE, 0.0)
        largest = tl.maximum(largest, tl.abs(x))
    scale = tl.max(largest, 0) / LARGEST
    divisor = tl.where(scale == 0, 1.0, scale)
    for start in range(0, SIZE, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + column, column < SIZE, 0.0).to(tl.float32)
        if factor_ptr is not None:
            x *= tl.load(factor_ptr + column, column < SIZE, 0.0)
        tl.store(codes_ptr + row * SIZE + column, (x / divisor).to(codes_ptr.dtype.element_ty), column < SIZE)
    tl.store(scale_ptr + row, scale)


def quantise_rows(
    x_TI: Tensor, factors_EI: Tensor | None, expert_T: Tensor | None, dtype: torch.dtype, largest: float
) -> tuple[Tensor, Tensor]:
    """Codes [T, I] in `dtype` and scales [T, 1] of the rows times their factors, as `fp8.quantise_rows` defines
    them.
    """
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    num_rows, size = x_TI.shape
    codes_TI = torch.empty(num_rows, size, dtype=dtype, device=x_TI.device)
    scale_T1 = torch.empty(num_rows, 1, dtype=torch.float32, device=x_TI.device)
    _quantise_kernel[(num_rows,)](
        x_TI, factors_EI, expert_T, codes_TI, scale_T1, x_TI.stride(0),
        LARGEST=largest, SIZE=size, BLOCK=min(BLOCK, triton.next_power_of_2(size)), num_warps=8,
    )  # fmt: skip
    return codes_TI, scale_T1
