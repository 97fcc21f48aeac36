"""The softmax over a large vocabulary on CUDA, in Triton: logits are read once for log probabilities and once for their
gradient.

Owns the kernels and their tiles. A row's results depend on its own logits alone, bit by bit: sections have a fixed
length, sums a fixed order, and nothing is added atomically. A kernel is compiled once for a model: no sizes or
addresses of a micro-batch lead to another variant. Logits are finished (scaled and capped) as they are read, as
`BaseModel.finish_logits_` does, and stay unchanged. The host never waits, and launches can be captured in a CUDA graph.
Knows no model and no loss. Imported only where a tensor is on CUDA: CPU installations have no Triton.

Shapes: C rows, V vocabulary, S sections of a row, p pairs of (row, target).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SECTION = 8192
"""Logits of a program that sums: at 256 threads, 128 bytes each in flight. Four programs on each of an H100's 132
multiprocessors, which their registers allow, request five times what its memory delivers within its latency.
"""

TILE = 4096
"""Logits of a program that differentiates: half as many, because it also holds the one-hot terms."""

PAIRS = 32
"""Pairs of a program: their rows' section sums are one small tile."""

WARPS = 8

SMALL_TANH = tl.constexpr(0.25)
"""Where exponentials would cancel; there six terms of the series are exact to float32."""


@triton.jit
def _tanh(x):
    size = tl.abs(x)
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    shrunk = tl.exp(-2 * size)
    ratio = (1 - shrunk) / (1 + shrunk)
    return tl.where(size < SMALL_TANH, series, tl.where(x < 0, -ratio, ratio))


@triton.jit
def _finish(raw, MULTIPLIER: tl.constexpr, SOFTCAP: tl.constexpr):
    logits = raw * MULTIPLIER
    if SOFTCAP != 0:
        logits = _tanh(logits * (1 / SOFTCAP)) * SOFTCAP
    return logits


@triton.jit
def _log_sum(x, AXIS: tl.constexpr):
    """log sum exp, which is -inf if all are."""
    largest = tl.max(x, AXIS)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    shift = largest if AXIS == 0 else tl.expand_dims(largest, 1)
    return largest + tl.log(tl.sum(tl.exp(x - shift), AXIS))


@triton.jit
def _sum_kernel(
    raw_CV,
    sums_CS,
    V,
    S,
    MULTIPLIER: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SECTION: tl.constexpr,
):
    program = tl.program_id(0)
    row = program // S
    columns = program % S * SECTION + tl.arange(0, SECTION)
    # Beyond 2^31 logits from 14,000 rows of 152,000 on.
    raw = tl.load(raw_CV + row.to(tl.int64) * V + columns, columns < V, other=0.0)
    logits = tl.where(columns < V, _finish(raw, MULTIPLIER, SOFTCAP), float("-inf"))
    tl.store(sums_CS + program, _log_sum(logits, 0))


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["cells_p"])
def _logprob_kernel(  # noqa: PLR0913 - one parameter per argument of a launch
    raw_CV,
    sums_CS,
    V,
    S,
    cells_p,
    logprob_p,
    num_pairs,
    MULTIPLIER: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SECTIONS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    section = tl.arange(0, SECTIONS)
    cells = tl.load(cells_p + pair, pair < num_pairs, other=-1)
    cell = tl.maximum(cells, 0)
    sum_addresses = sums_CS + (cell // V * S)[:, None] + section[None, :]
    sums = tl.load(sum_addresses, (section < S)[None, :], other=float("-inf"))
    logits = _finish(tl.load(raw_CV + cell), MULTIPLIER, SOFTCAP)
    tl.store(logprob_p + pair, tl.where(cells < 0, 0.0, logits - _log_sum(sums, 1)), pair < num_pairs)


@triton.jit(do_not_specialize_on_alignment=["cells_p", "starts_C"])
def _gradient_kernel(  # noqa: PLR0913 - one parameter per argument of a launch
    raw_CV,
    sums_CS,
    V,
    S,
    cells_p,
    starts_C,
    grad_p,
    grad_CV,
    num_tiles,
    MULTIPLIER: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SECTIONS: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    row = program // num_tiles
    first = program % num_tiles * TILE
    columns = first + tl.arange(0, TILE)
    start = row.to(tl.int64) * V
    logits = _finish(tl.load(raw_CV + start + columns, columns < V, other=0.0), MULTIPLIER, SOFTCAP)
    section = tl.arange(0, SECTIONS)
    log_sum = _log_sum(tl.load(sums_CS + row * S + section, section < S, other=float("-inf")), 0)
    total = 0.0
    onehot = tl.zeros([TILE], tl.float32)
    pair, stop = tl.load(starts_C + row), tl.load(starts_C + row + 1)
    while pair < stop:
        pair_gradient = tl.load(grad_p + pair)
        total += pair_gradient
        target = (tl.load(cells_p + pair) - start).to(tl.int32)
        if target >= first and target < first + TILE:
            onehot += tl.where(columns == target, pair_gradient, 0.0)
        pair += 1
    # d logprob[target] / d logits = onehot(target) - softmax, summed over the row's pairs, and rounded once.
    grad = onehot - total * tl.exp(logits - log_sum)
    if SOFTCAP != 0:
        share = logits * (1 / SOFTCAP)
        grad *= 1 - share * share
    tl.store(grad_CV + start + columns, (grad * MULTIPLIER).to(grad_CV.dtype.element_ty), columns < V)


class Softmax(NamedTuple):
    """Raw float32 logits, and the log sums of each row's sections. The logits may be a part of the vocabulary: with the
    sums of all parts, log probabilities and gradients are those of whole rows, and a pair whose target is in another
    part has cell -1.
    """

    raw_CV: Tensor
    sums_CS: Tensor
    multiplier: float
    softcap: float

    @classmethod
    def of(cls, raw_CV: Tensor, multiplier: float, softcap: float | None) -> Softmax:
        assert raw_CV.is_contiguous() and raw_CV.dtype == torch.float32
        num_rows, vocab = raw_CV.shape
        softmax = cls(raw_CV, raw_CV.new_empty(num_rows, -(-vocab // SECTION)), multiplier, softcap or 0.0)
        _launch(
            _sum_kernel, softmax.sums_CS.numel(), *softmax._raw_arguments, softmax.multiplier, softmax.softcap, SECTION
        )
        return softmax

    def logprobs(self, cells_p: Tensor) -> Tensor:
        """[p] Of each pair, whose cell is its index into the flattened logits; 0 for cell -1."""
        logprob_p = self.raw_CV.new_empty(len(cells_p))
        sizes = len(cells_p), *self._constants, PAIRS
        _launch(_logprob_kernel, -(-len(cells_p) // PAIRS), *self._raw_arguments, cells_p, logprob_p, *sizes)
        return logprob_p

    def gradient(self, cells_p: Tensor, starts_C: Tensor, grad_p: Tensor, dtype: torch.dtype) -> Tensor:
        """[C, V] Of the raw logits, from those of the pairs' log probabilities. Row c's pairs are those from
        `starts_C[c]` to `starts_C[c + 1]`; it has one element more than there are rows.
        """
        grad_CV = torch.empty_like(self.raw_CV, dtype=dtype)
        num_rows, vocab = grad_CV.shape
        num_tiles = -(-vocab // TILE)
        arguments = *self._raw_arguments, cells_p, starts_C, grad_p, grad_CV, num_tiles, *self._constants, TILE
        _launch(_gradient_kernel, num_rows * num_tiles, *arguments)
        return grad_CV

    @property
    def _raw_arguments(self) -> tuple[Tensor, Tensor, int, int]:
        return self.raw_CV, self.sums_CS, self.raw_CV.shape[1], self.sums_CS.shape[1]

    @property
    def _constants(self) -> tuple[float, float, int]:
        return self.multiplier, self.softcap, 1 << (self.sums_CS.shape[1] - 1).bit_length()


def _launch(kernel: Any, num_programs: int, raw_CV: Tensor, *arguments: Tensor | float) -> None:  # noqa: ANN401
    if num_programs:
        with torch.cuda.device_of(raw_CV):  # Triton launches on the current device
            kernel[(num_programs,)](raw_CV, *arguments, num_warps=WARPS)
