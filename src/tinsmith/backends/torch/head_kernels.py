"""The softmax over a large vocabulary on CUDA, in Triton: logits are read once for log probabilities and once for their
gradient.

Owns the kernels and their tiles. A row's results depend on its own logits alone, bit by bit: sections have a fixed
length, sums a fixed order, and nothing is added atomically. Logits are finished (scaled and capped) as they are read,
as `BaseModel.finish_logits_` does, and stay unchanged. The host never waits, and launches can be captured in a CUDA
graph. Knows no model and no loss. Imported only where a tensor is on CUDA: CPU installations have no Triton.

Shapes: C rows, V vocabulary, S sections of a row, p pairs of (row, target).
"""

from __future__ import annotations

from typing import NamedTuple

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
def _tanh(x):  # noqa: ANN001, ANN202 - Triton has its own types
    size = tl.abs(x)
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    shrunk = tl.exp(-2 * size)
    ratio = (1 - shrunk) / (1 + shrunk)
    return tl.where(size < SMALL_TANH, series, tl.where(x < 0, -ratio, ratio))


@triton.jit
def _finish(raw, MULTIPLIER: tl.constexpr, SOFTCAP: tl.constexpr):  # noqa: ANN001, ANN202
    logits = raw * MULTIPLIER
    if SOFTCAP != 0:
        logits = _tanh(logits * (1 / SOFTCAP)) * SOFTCAP
    return logits


@triton.jit
def _log_sum(x, AXIS: tl.constexpr):  # noqa: ANN001, ANN202
    """log sum exp, which is -inf if all are."""
    most = tl.max(x, AXIS)
    most = tl.where(most == float("-inf"), 0.0, most)
    shift = most if AXIS == 0 else tl.expand_dims(most, 1)
    return most + tl.log(tl.sum(tl.exp(x - shift), AXIS))


@triton.jit
def _sum_kernel(  # noqa: ANN202
    raw_CV,  # noqa: ANN001
    sums_CS,  # noqa: ANN001
    V,  # noqa: ANN001
    S,  # noqa: ANN001
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


@triton.jit
def _logprob_kernel(  # noqa: ANN202
    raw_CV,  # noqa: ANN001
    sums_CS,  # noqa: ANN001
    cells_p,  # noqa: ANN001
    logprob_p,  # noqa: ANN001
    V,  # noqa: ANN001
    S,  # noqa: ANN001
    num_pairs,  # noqa: ANN001
    MULTIPLIER: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SECTIONS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    section = tl.arange(0, SECTIONS)
    cell = tl.load(cells_p + pair, pair < num_pairs, other=0)
    places = sums_CS + (cell // V * S)[:, None] + section[None, :]
    sums = tl.load(places, (section < S)[None, :], other=float("-inf"))
    logits = _finish(tl.load(raw_CV + cell), MULTIPLIER, SOFTCAP)
    tl.store(logprob_p + pair, logits - _log_sum(sums, 1), pair < num_pairs)


@triton.jit
def _gradient_kernel(  # noqa: ANN202
    raw_CV,  # noqa: ANN001
    sums_CS,  # noqa: ANN001
    cells_p,  # noqa: ANN001
    starts_C,  # noqa: ANN001
    grad_p,  # noqa: ANN001
    grad_CV,  # noqa: ANN001
    V,  # noqa: ANN001
    S,  # noqa: ANN001
    num_tiles,  # noqa: ANN001
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
        own = tl.load(grad_p + pair)
        total += own
        target = (tl.load(cells_p + pair) - start).to(tl.int32)
        if target >= first and target < first + TILE:
            onehot += tl.where(columns == target, own, 0.0)
        pair += 1
    # d logprob[target] / d logits = onehot(target) - softmax, summed over the row's pairs, and rounded once.
    grad = onehot - total * tl.exp(logits - log_sum)
    if SOFTCAP != 0:
        share = logits * (1 / SOFTCAP)
        grad *= 1 - share * share
    tl.store(grad_CV + start + columns, (grad * MULTIPLIER).to(grad_CV.dtype.element_ty), columns < V)


class Softmax(NamedTuple):
    """Raw float32 logits with the log sums of each row's sections."""

    raw_CV: Tensor
    sums_CS: Tensor
    multiplier: float
    softcap: float

    @classmethod
    def of(cls, raw_CV: Tensor, multiplier: float, softcap: float | None) -> Softmax:
        assert raw_CV.is_contiguous() and raw_CV.dtype == torch.float32
        num_rows, vocab = raw_CV.shape
        sums_CS = raw_CV.new_empty(num_rows, triton.cdiv(vocab, SECTION))
        own = cls(raw_CV, sums_CS, multiplier, softcap or 0.0)
        if sums_CS.numel():
            _sum_kernel[(sums_CS.numel(),)](
                raw_CV, sums_CS, vocab, sums_CS.shape[1], own.multiplier, own.softcap, SECTION, num_warps=WARPS
            )
        return own

    def logprobs(self, cells_p: Tensor) -> Tensor:
        """[p] Of each pair, whose cell is its index into the flattened logits."""
        logprob_p = self.raw_CV.new_empty(len(cells_p))
        if len(cells_p):
            _logprob_kernel[(triton.cdiv(len(cells_p), PAIRS),)](
                self.raw_CV, self.sums_CS, cells_p, logprob_p, *self._sizes, len(cells_p), *self._constants, PAIRS
            )
        return logprob_p

    def gradient(self, cells_p: Tensor, starts_C: Tensor, grad_p: Tensor, dtype: torch.dtype) -> Tensor:
        """[C, V] Of the raw logits, from those of the pairs' log probabilities. Row c's pairs are those from
        `starts_C[c]` to `starts_C[c + 1]`; it has one number more than there are rows.
        """
        grad_CV = torch.empty_like(self.raw_CV, dtype=dtype)
        num_tiles = triton.cdiv(grad_CV.shape[1], TILE)
        if grad_CV.numel():
            _gradient_kernel[(len(grad_CV) * num_tiles,)](
                self.raw_CV,
                self.sums_CS,
                cells_p,
                starts_C,
                grad_p,
                grad_CV,
                *self._sizes,
                num_tiles,
                *self._constants,
                TILE,
                num_warps=WARPS,
            )
        return grad_CV

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.raw_CV.shape[1], self.sums_CS.shape[1]

    @property
    def _constants(self) -> tuple[float, float, int]:
        return self.multiplier, self.softcap, triton.next_power_of_2(self.sums_CS.shape[1])
