"""Matmuls in the sizes of models and adapters, each by the fastest kernel that torch has for it.

Knows no model and no adapter. `HAS_ONEDNN` says whether oneDNN's matmul can be called directly.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from tinsmith.runtime.devices import has_packed_matmuls, is_on_host, runs_kernels

ONEDNN_MIN_ROWS = 16
"""From this many rows on a float32 matmul on a CPU that is not Intel's uses oneDNN: torch's default, MKL, is slower
there, also for the narrow matmuls of adapters.
"""

ONEDNN_MIN_MULTIPLICATIONS = 1 << 19
"""Multiplications in a matmul from which on oneDNN's higher call overhead pays."""

ONEDNN_MIN_TRANSPOSED_ROWS = 256
"""Rows from which on computing a weight's gradient by its transpose with oneDNN pays."""

HAS_ONEDNN = has_packed_matmuls()

HAS_AMX = torch.cpu._is_amx_tile_supported()

BLOCK_COLUMNS, BLOCK_MIN_ELEMENTS = 256, 3 << 19
"""Columns at once of a matmul that oneDNN would compute with one of two threads, which pays if the left operand has
that many elements.
"""

_CPU = Path("/proc/cpuinfo")
SUITS_MKL = torch.backends.mkl.is_available() and _CPU.exists() and "GenuineIntel" in _CPU.read_text()
"""On Intel's processors MKL is faster than oneDNN, above all with few rows."""

MKL_MAX_ELEMENTS = 1 << 17
"""Elements of a float32 weight up to which MKL beats packed weights there."""

# The overload itself: resolving it takes time in each call, and a decode step has a hundred calls.
_linear_pointwise = cast("Callable[..., Tensor]", torch.ops.mkldnn._linear_pointwise.default if HAS_ONEDNN else None)


def set_precision() -> None:
    """Make float32 matmuls exact to float32 (no TF32) and sum bfloat16 matmuls in float32 on every device, so that
    results on a GPU equal those on a CPU except for the order of sums. SDPA must not choose cuDNN on CUDA: see
    `attention.CUDNN_MIN_ROWS`.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def matmul(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a @ b in `out_dtype`, without first rounding to the operands' dtype where the device supports it."""
    if out_dtype == a.dtype:
        if _suits_onednn(a, b):
            return _onednn_matmul(a, b)
        return _matmul_by_columns(a, b) if _uses_one_thread(a, b) else a @ b
    if runs_kernels(a):
        return torch.mm(a, b, out_dtype=out_dtype)
    return (a @ b).to(out_dtype)


def gradient_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matmul that gives a weight's gradient: float32 where the device supports it."""
    return torch.float32 if runs_kernels(x) else x.dtype


def transpose_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a^T @ b with a narrow b: the gradient of a weight."""
    if runs_kernels(a):
        return matmul(a.t(), b, torch.float32)
    if len(a) >= ONEDNN_MIN_TRANSPOSED_ROWS and _suits_onednn(b.t(), a):
        return _onednn_matmul(b.t(), a).t()
    return a.t() @ b


def transpose_bmm(a: Tensor, b: Tensor) -> Tensor:
    """a^T @ b of each pair of stacked matrices."""
    if runs_kernels(a) and a.dtype != torch.float32:
        return torch.bmm(a.mT, b, out_dtype=torch.float32)
    return torch.bmm(a.mT, b)


def add_matmul_(out: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """out += scale * a @ b; `out` may have a wider dtype than the operands."""
    if out.dtype == a.dtype:
        if _suits_onednn(a, b):
            out.add_(_onednn_matmul(a, b), alpha=scale)
        elif runs_kernels(a) and a.shape[1] == 1:
            # torch 2.11 takes the stride of a transposed column for that of a row, which cuBLAS refuses.
            out.addcmul_(a, b, value=scale)
        else:
            out.addmm_(a, b, alpha=scale)
    elif runs_kernels(a):
        torch.addmm(out, a, b, out_dtype=out.dtype, alpha=scale, out=out)
    else:
        # Widened operands would multiply several times slower; the matmul is rounded once, the sum is not.
        out.add_(a @ b, alpha=scale)


def add_bmm_(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b for stacked matrices; keeps a wider dtype of `out`, as `add_matmul_` does."""
    if out.dtype == a.dtype:
        out.baddbmm_(a, b)
    elif runs_kernels(a):
        torch.baddbmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.add_(torch.bmm(a, b))


def is_launch_bound(x: Tensor) -> bool:
    """Whether a matmul takes less time than its launch, so that few operations matter more than which."""
    return runs_kernels(x)


def write_matmul_(out: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """out = scale * a @ b, a matrix or stacked ones, in one operation. `out` may be columns of a wider matrix."""
    (out.addmm_ if out.dim() == 2 else out.baddbmm_)(a, b, beta=0.0, alpha=scale)  # at 0 it is not read


def has_onednn(weight: Tensor) -> bool:
    """Whether `pack_weight` and `onednn_linear` take this weight's device and dtype."""
    dtype = str(weight.dtype).removeprefix("torch.")
    return is_on_host(weight) and dtype in ("float32", "bfloat16") and has_packed_matmuls(dtype)


def suits_mkl(weight: Tensor) -> bool:
    """Whether torch's own matmul with this weight is the fastest for few rows too."""
    return SUITS_MKL and weight.dtype == torch.float32 and weight.numel() <= MKL_MAX_ELEMENTS


def pack_weight(weight: Tensor) -> Tensor:
    """A copy in oneDNN's layout, for `onednn_linear` only."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def linear_of_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight^T + bias of few rows, computed as (weight @ x^T)^T: oneDNN reads a left operand as it is stored, and
    copies a right one into blocks.
    """
    y_TO = onednn_linear(weight, x).t().contiguous()
    return y_TO if bias is None else y_TO.add_(bias)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias; the weight may be packed."""
    return _linear_pointwise(x, weight, bias, "none", [], "")


def _uses_one_thread(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN uses one of two threads for a matmul in AMX, which it does if that is about 1,024 x 512."""
    if not HAS_AMX or a.dtype != torch.bfloat16 or not is_on_host(a) or torch.get_num_threads() != 2:
        return False
    rows, (inner, columns) = a.shape[0], b.shape
    return 512 <= rows <= 1024 and 512 <= columns <= 640 and rows * inner >= BLOCK_MIN_ELEMENTS


def _matmul_by_columns(a: Tensor, b: Tensor) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1])
    for block, columns in zip(out.split(BLOCK_COLUMNS, 1), b.split(BLOCK_COLUMNS, 1), strict=True):
        torch.mm(a, columns, out=block)
    return out


def _suits_onednn(a: Tensor, b: Tensor) -> bool:
    if SUITS_MKL or not HAS_ONEDNN or a.dtype != torch.float32 or not is_on_host(a):
        return False
    rows, (inner, columns) = a.shape[0], b.shape
    if rows < ONEDNN_MIN_ROWS or rows * inner * columns < ONEDNN_MIN_MULTIPLICATIONS:
        return False
    # oneDNN is slower by orders of magnitude on a matrix with gaps.
    return b.is_contiguous() or b.stride() == (1, inner)


def _onednn_matmul(a: Tensor, b: Tensor) -> Tensor:
    return onednn_linear(a, b.t())
