"""Matrix products of the model's and the adapters' sizes, each by the fastest kernel that torch has for it.

Knows no model and no adapter. `HAS_ONEDNN` says whether oneDNN's products can be called directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

ONEDNN_ROWS = 16
"""From here on a float32 product on a CPU goes to oneDNN: torch's own choice, MKL, is 1.6 (32 rows) to 2.5 times
(2,048 rows) slower on processors that are not Intel's. That holds for an adapter's narrow products too.
"""

ONEDNN_NUMBERS = 1 << 19
"""Multiplications in a product from which on oneDNN's longer way to its kernel pays: at 400,000 it takes 1.5 times as
long as MKL, at 1.5 million less.
"""

ONEDNN_COLUMN = 256
"""Rows from which on oneDNN's way to a weight's gradient, by its transpose, pays (twice as fast at 1,024)."""

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")

# The overload itself: to choose it by its arguments takes 3 us a call, of which a decode step has a hundred.
_linear = cast("Callable[..., Tensor]", torch.ops.mkldnn._linear_pointwise.default if HAS_ONEDNN else None)


def product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a @ b in `out_dtype`, without rounding the result to the operands' dtype where the device can."""
    if out_dtype == a.dtype:
        return _onednn(a, b) if _suits_onednn(a, b) else a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out_dtype)
    return (a @ b).to(out_dtype)


def column_product(a: Tensor, b: Tensor) -> Tensor:
    """a^T @ b, where b is narrow: the gradient of a weight, in float32 where the device can."""
    if a.is_cuda:
        return torch.mm(a.t(), b, out_dtype=torch.float32) if a.dtype != torch.float32 else a.t() @ b
    if len(a) >= ONEDNN_COLUMN and _suits_onednn(b.t(), a):
        return _onednn(b.t(), a).t()
    return a.t() @ b


def column_products(a: Tensor, b: Tensor) -> Tensor:
    """The same of stacked matrices."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a.mT, b, out_dtype=torch.float32)
    return torch.bmm(a.mT, b)


def add_product_(out: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """out += scale * a @ b, where `out` may be of a wider dtype than the operands."""
    if out.dtype == a.dtype:
        if _suits_onednn(a, b):
            out.add_(_onednn(a, b), alpha=scale)
        else:
            out.addmm_(a, b, alpha=scale)
    elif a.is_cuda:
        out.add_(torch.mm(a, b, out_dtype=out.dtype), alpha=scale)
    else:
        # Widened operands would be multiplied several times slower; the product is rounded once, the sum is not.
        out.add_(a @ b, alpha=scale)


def add_products_(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b of stacked matrices; a wider dtype of `out` is kept, as in `add_product_`."""
    if out.dtype == a.dtype:
        out.baddbmm_(a, b)
    else:
        out.add_(torch.bmm(a, b))


def packed(weight: Tensor) -> Tensor:
    """Laid out for oneDNN, for `linear_product` alone: a copy."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias; the weight may be packed."""
    return _linear(x, weight, bias, "none", [], "")


def _suits_onednn(a: Tensor, b: Tensor) -> bool:
    if not HAS_ONEDNN or a.dtype != torch.float32 or not a.is_cpu:
        return False
    rows, (inner, columns) = a.shape[0], b.shape
    if rows < ONEDNN_ROWS or rows * inner * columns < ONEDNN_NUMBERS:
        return False
    # Of a matrix with gaps oneDNN makes sense a thousand times slower.
    return b.is_contiguous() or b.stride() == (1, inner)


def _onednn(a: Tensor, b: Tensor) -> Tensor:
    return linear_product(a, b.t())
