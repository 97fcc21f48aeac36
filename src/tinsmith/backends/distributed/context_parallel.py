"""Context parallelism: the rows of a micro-batch spread over ranks, each with the whole model or its tensor shard.

A rank computes n of a micro-batch's T rows; the last ranks' rows may be padding. Everything but attention treats rows
separately and runs on a rank's own. For attention, ranks exchange rows for heads (an all-to-all, as in DeepSpeed
Ulysses): each gets all rows of its share of the heads, attends with the plan that one process would use, and gets its
own rows of all heads back. So documents, windows, caps and sinks need no second implementation, and the causal work is
the same on every rank. Keys and values are repeated to a number of heads that the degree divides; where it does not
divide the query heads, padding heads are added.

Backward exchanges gradients the same way, on every rank alike, with or without adapters on its rows.

Shapes: T rows of a micro-batch, n rows of a rank, C context ranks, H query heads, G key heads, h and g those of one
rank, D head dim, W numbers of a row that one rank gets, P pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Unpack, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tinsmith.backends.distributed.ranks import Ranks
from tinsmith.backends.torch.attention import AttentionOptions, AttentionPlan, Mixer, PackedCausal
from tinsmith.backends.torch.batch import MicroBatch
from tinsmith.backends.torch.lora import Routing, Segment, anchor
from tinsmith.types import F32, I64


@dataclass(frozen=True)
class RowShare(MicroBatch):
    """Rows start..stop of a micro-batch, padded to `num_rows`; `examples` and `lengths` are those of the whole."""

    source: MicroBatch
    start: int
    num_rows: int

    @classmethod
    def of(cls, batch: MicroBatch, ranks: Ranks) -> RowShare:
        """This rank's share."""
        num_rows = -(-len(batch.tokens_T) // ranks.degrees.context)
        return cls(batch.examples, batch, ranks.context_index * num_rows, num_rows)

    def cut(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """[n, ...] of [T, ...]; zeros pad it."""
        own = x[self.start : self.start + self.num_rows]
        return np.concatenate([own, np.zeros((self.num_rows - len(own), *x.shape[1:]), x.dtype)])

    def joined(self, x: Tensor, ranks: Ranks) -> Tensor:
        """[T, ...] float32 of every rank's [n, ...]."""
        all_rows = torch.zeros(ranks.degrees.context * self.num_rows, *x.shape[1:], device=x.device)
        all_rows[self.start : self.start + self.num_rows] = x
        return ranks.sum_context(all_rows)[: len(self.source.tokens_T)]

    @property
    def whole(self) -> MicroBatch:
        return self.source

    @cached_property
    def pairs(self) -> slice:
        return slice(*np.searchsorted(self.source.row_P, [self.start, self.start + self.num_rows]).tolist())

    @cached_property
    def tokens_T(self) -> I64:
        return self.cut(self.source.tokens_T)

    @cached_property
    def positions_T(self) -> I64:
        return self.cut(self.source.positions_T)

    @cached_property
    def routing(self) -> Routing:
        stop = min(self.start + self.num_rows, len(self.source.tokens_T))
        segments = self.source.routing.slice(self.start, stop).segments if stop > self.start else ()
        num_own = max(0, stop - self.start)
        return Routing([*segments, *([Segment(num_own, self.num_rows, None)] if num_own < self.num_rows else [])])

    @cached_property
    def targets_P(self) -> I64:
        return self.source.targets_P[self.pairs]

    @cached_property
    def row_P(self) -> I64:
        return self.source.row_P[self.pairs] - self.start

    @cached_property
    def example_P(self) -> I64:
        return self.source.example_P[self.pairs]

    def column_P(self, name: str) -> F32:
        return self.source.column_P(name)[self.pairs]


class ContextParallel:
    """An AttentionPlan of the rows of a `RowShare`."""

    def __init__(self, share: RowShare, ranks: Ranks) -> None:
        self._ranks = ranks
        padding = ranks.degrees.context * share.num_rows - sum(share.lengths)
        self._plan: AttentionPlan = PackedCausal([*share.lengths, *([padding] if padding else [])], ranks.device)

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        """[n, H, D] for this rank's n rows."""
        degree, num_heads = self._ranks.degrees.context, q_THD.shape[1]
        num_keys = k_TGD.shape[1]
        key_heads = num_heads if num_heads % degree else math.lcm(num_keys, degree)
        parts = [_heads(q_THD, 1, degree), *(_heads(x, key_heads // num_keys, degree) for x in (k_TGD, v_TGD))]
        received = _exchanged(torch.cat([part.flatten(2) for part in parts], -1), self._ranks)
        q, k, v = (
            rows.unflatten(-1, part.shape[2:])
            for rows, part in zip(received.flatten(0, 1).split([part[0, 0].numel() for part in parts], -1), parts,
                                  strict=True)
        )  # fmt: skip
        if (sinks_H := options.get("sinks_H")) is not None:
            options["sinks_H"] = _heads(sinks_H[None, :, None], 1, degree)[self._ranks.context_index].flatten()
        out = self._plan.attend(layer, q, k, v, **options)
        returned = _exchanged(out.unflatten(0, (degree, -1)).flatten(2), self._ranks)
        return returned.unflatten(-1, out.shape[1:]).transpose(0, 1).flatten(1, 2)[:, :num_heads]

    def mix(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        raise NotImplementedError("models with such layers are refused at load")


def _heads(x_THD: Tensor, repeat: int, degree: int) -> Tensor:
    """[C, n, h, D]: the heads of each rank, repeated and padded with zeros."""
    if repeat > 1:
        x_THD = x_THD.repeat_interleave(repeat, 1)
    if missing := -x_THD.shape[1] % degree:
        x_THD = nn.functional.pad(x_THD, (0, 0, 0, missing))
    return x_THD.unflatten(1, (degree, -1)).transpose(0, 1)


def _exchanged(x_CnW: Tensor, ranks: Ranks) -> Tensor:
    return cast(Tensor, _Exchange.apply(x_CnW, anchor(x_CnW.device), ranks))


class _Exchange(torch.autograd.Function):
    """With the anchor the result requires a gradient on every rank, also on one whose rows have no adapters so far:
    otherwise the others would wait for it in backward.
    """

    @staticmethod
    def forward(ctx, x_CnW: Tensor, anchor: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.exchange_context(x_CnW.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.ranks.exchange_context(grad.contiguous()), None, None
