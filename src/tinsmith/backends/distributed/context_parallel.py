"""Context parallelism: the rows of a micro-batch spread over ranks, each with the whole model or its tensor shard.

A rank computes n of a micro-batch's T rows; the last ranks' rows may be padding. Everything but attention and layers
with a state treats rows separately and runs on a rank's own. For attention, ranks exchange rows for heads (an all-to-all, as in DeepSpeed
Ulysses): each gets all rows of its share of the heads, attends with the plan that one process would use, and gets its
own rows of all heads back. So documents, windows, caps and sinks need no second implementation, and the causal work is
the same on every rank. Keys and values are repeated to a number of heads that the degree divides; where it does not
divide the query heads, padding heads are added.

A layer with a state runs on a rank's own rows. Where a sequence goes on at the next rank, its state (the convolution's
last inputs and the recurrent state) is sent there, and the state's gradient comes back. A rank first computes the
sequence that goes on, then those that are whole, then the one that continues, so it waits only for states of sequences
longer than its rows. Layers that continue from a state one row at a time see all rows of their sequences up to the
rank's last (`plan.mixers.WHOLE`): hidden states are gathered, and every rank keeps the outputs of its own rows.

Backward exchanges gradients the same way, on every rank alike, with or without adapters on its rows.

Shapes: T rows of a micro-batch, n rows of a rank, C context ranks, H query heads, G key heads, h and g those of one
rank, D head dim, W numbers of a row that one rank gets, P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Unpack, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tinsmith.backends.distributed.ranks import Ranks
from tinsmith.backends.torch.attention import AttentionOptions, AttentionPlan, Mixer, MixerState, PackedCausal
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
        # A single row with a state would be decoded, which changes the state in place.
        num_rows = max(-(-len(batch.tokens_T) // ranks.degrees.context), 2)
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
        self._share = share

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
        """[n, D] for this rank's n rows."""
        if mixer.is_whole:
            return self._mix_whole(mixer, x_TD)
        pieces = self._pieces
        continued, whole, begun = x_TD.split([pieces.continued, sum(pieces.whole), pieces.begun])
        outputs = []
        if pieces.begun:
            outputs.append(self._mix_piece(mixer, begun, len(x_TD) - pieces.begun, None, goes_on=True))
        if pieces.whole:
            outputs.insert(0, self._inside.mix(_Renumbered(mixer, pieces.continued), whole))
        if pieces.continued:
            received = iter(_Received.apply(anchor(x_TD.device), self._ranks, mixer.state_like))
            state = MixerState(*(None if like is None else next(received) for like in mixer.state_like))
            outputs.insert(0, self._mix_piece(mixer, continued, 0, state, goes_on=pieces.passes))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _mix_piece(self, mixer: Mixer, x_LD: Tensor, start: int, state: MixerState | None, *, goes_on: bool) -> Tensor:
        """[L, D] for some rows of one sequence, after which the next rank goes on."""
        rows = x_LD if state is None or len(x_LD) > 1 else x_LD.expand(2, -1)
        y_1LD, after = mixer(rows[None], (start,), state, keep=goes_on)
        y_LD = y_1LD[0, : len(x_LD)]
        if not goes_on:
            return y_LD
        assert after is not None
        states = (x.to(like.dtype) for x, like in zip(after, mixer.state_like, strict=True) if x is not None)
        return cast(Tensor, _Sent.apply(y_LD, anchor(y_LD.device), self._ranks, *states))

    def _mix_whole(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        share, ends = self._share, [0, *accumulate(self._share.lengths)]
        first = share.start if share.start >= ends[-1] else max(end for end in ends if end <= share.start)
        stop = share.start + share.num_rows
        all_TD = _exchanged(x_TD.expand(self._ranks.degrees.context, *x_TD.shape), self._ranks).flatten(0, 1)
        plan = PackedCausal(_cut(first, stop, ends), x_TD.device)
        return plan.mix(_Renumbered(mixer, first - share.start), all_TD[first:stop])[share.start - first :]

    @cached_property
    def _inside(self) -> PackedCausal:
        return PackedCausal(self._pieces.whole, self._ranks.device)

    @cached_property
    def _pieces(self) -> _Pieces:
        return _Pieces.of(self._share)


class _Pieces(NamedTuple):
    """A rank's rows: `continued` of a sequence that began on an earlier rank, `whole` sequences (and padding), and
    `begun` of one that goes on at the next rank. `passes`: the continued one goes on, too.
    """

    continued: int
    whole: tuple[int, ...]
    begun: int
    passes: bool

    @classmethod
    def of(cls, share: RowShare) -> _Pieces:
        start, stop, ends = share.start, share.start + share.num_rows, [*accumulate(share.lengths)]
        sizes = _cut(start, stop, ends)
        continued = sizes.pop(0) if 0 < start < ends[-1] and start not in ends else 0
        goes_on = stop < ends[-1] and stop not in ends
        begun = sizes.pop() if goes_on and sizes else 0
        return cls(continued, tuple(sizes), begun, goes_on and not begun)


def _cut(start: int, stop: int, ends: Sequence[int]) -> list[int]:
    """Lengths of the parts of rows start..stop that end at these rows."""
    return [after - before for before, after in pairwise([start, *(e for e in ends if start < e < stop), stop])]


class _Renumbered:
    """A mixer for sequences whose first row here is `offset` in the rank's own rows. One that began on an earlier rank
    has the adapter of the first own row.
    """

    def __init__(self, mixer: Mixer, offset: int) -> None:
        self.layer, self.is_whole, self.state_like = mixer.layer, mixer.is_whole, mixer.state_like
        self._mixer, self._offset = mixer, offset

    def __call__(
        self, x_nLD: Tensor, starts: tuple[int, ...], state: MixerState | None = None, *, keep: bool = False
    ) -> tuple[Tensor, MixerState | None]:
        return self._mixer(x_nLD, tuple(max(0, start + self._offset) for start in starts), state, keep=keep)


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


class _Received(torch.autograd.Function):
    """A sequence's state from the rank before; its gradient goes back. The anchor is kept, so that a layer whose
    activations are recomputed repeats this message on both ranks, whatever else they keep.
    """

    @staticmethod
    def forward(ctx, anchor: Tensor, ranks: Ranks, like: MixerState) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        ctx.save_for_backward(anchor)
        wanted = (torch.empty_like(x, device=ranks.device) for x in like if x is not None)
        return tuple(ranks.receive_context(x, -1) for x in wanted)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _ = ctx.saved_tensors
        for grad in grads:
            ctx.ranks.send_context(grad, -1)
        return None, None, None


class _Sent(torch.autograd.Function):
    """Rows whose sequence goes on at the next rank: its state is sent, and the state's gradient arrives in backward."""

    @staticmethod
    def forward(ctx, y_LD: Tensor, anchor: Tensor, ranks: Ranks, *states: Tensor) -> Tensor:
        ctx.ranks = ranks
        ctx.likes = [torch.empty_like(state, device="meta") for state in states]
        ctx.save_for_backward(anchor)
        for state in states:
            ranks.send_context(state, 1)
        return y_LD.view_as(y_LD)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_LD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _ = ctx.saved_tensors
        wanted = (torch.empty_like(like, device=ctx.ranks.device) for like in ctx.likes)
        return grad_LD, None, None, *(ctx.ranks.receive_context(grad, 1) for grad in wanted)
