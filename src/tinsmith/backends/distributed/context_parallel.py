"""Context parallelism: the rows of a micro-batch spread over ranks, each with the whole model or its tensor shard.

A rank computes n of a micro-batch's T rows; the last ranks' rows may be padding. Everything but attention and layers
with a state treats rows separately and runs on a rank's own. For attention, ranks exchange rows for heads (an
all-to-all, as in DeepSpeed Ulysses): each gets all rows of its share of the heads, attends with the plan that one
process would use, and gets its own rows of all heads back. So documents, windows, caps and sinks need no second
implementation, and the causal work is the same on every rank. Keys and values are repeated to a number of heads that
the degree divides; where it does not divide the query heads, padding heads are added.

A layer with a state runs on a rank's own rows. Where a sequence goes on at the next rank, its state (the convolution's
last inputs and the recurrent state) is sent there, and the state's gradient comes back. A rank first computes the
sequence that goes on, then those that are whole, then the one that continues, so it waits only for states of sequences
longer than its rows, and only with the recurrence, not with projections. Layers that continue from a state one row at a
time (`plan.mixers.is_whole`) see all rows of their sequences up to the rank's last: hidden states are gathered, and
every rank keeps the outputs of its own rows.

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
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tinsmith.backends.distributed.ranks import Ranks
from tinsmith.backends.torch.attention import AttentionOptions, AttentionPlan, Mixer, MixerState, PackedCausal
from tinsmith.backends.torch.batch import MicroBatch
from tinsmith.backends.torch.lora import anchor
from tinsmith.backends.torch.lora_batch import LoRABatch, Segment
from tinsmith.backends.torch.recurrent import LayerCache, SequenceMixer
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
    def full_batch(self) -> MicroBatch:
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
    def lora_batch(self) -> LoRABatch:
        stop = min(self.start + self.num_rows, len(self.source.tokens_T))
        segments = self.source.lora_batch.slice(self.start, stop).segments if stop > self.start else ()
        num_own = max(0, stop - self.start)
        return LoRABatch([*segments, *([Segment(num_own, self.num_rows, None)] if num_own < self.num_rows else [])])

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
        assert isinstance(mixer, SequenceMixer)
        if mixer.is_whole:
            return self._mix_whole(mixer, x_TD)
        pieces = self._pieces
        continued, whole, begun = x_TD.split([pieces.continued, pieces.whole, pieces.begun])
        outputs = []
        if pieces.begun:
            outputs.append(self._mix_piece(mixer, begun, len(x_TD) - pieces.begun, continued=False, goes_on=True))
        if pieces.plan is not None:
            outputs.insert(0, pieces.plan.mix(_renumbered(mixer, pieces.continued), whole))
        if pieces.continued:
            outputs.insert(0, self._mix_piece(mixer, continued, 0, continued=True, goes_on=pieces.passes))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _mix_piece(self, mixer: SequenceMixer, x_LD: Tensor, start: int, *, continued: bool, goes_on: bool) -> Tensor:
        """[L, D] for some rows of a sequence of several ranks."""
        # A single row with a state would be decoded, which changes the state in place.
        rows_LD = x_LD.expand(2, -1) if continued and len(x_LD) == 1 else x_LD
        passed = _PassedState(self._ranks, mixer.state_like, continued=continued, goes_on=goes_on)
        y_LD = mixer(rows_LD[None], (start,), passed)[0][0, : len(x_LD)]
        if not goes_on:
            return y_LD
        given = y_LD, anchor(y_LD.device), self._ranks, passed.returning, *passed.leaving
        return cast(Tensor, _Sent.apply(*given))

    def _mix_whole(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        share, ends = self._share, [0, *accumulate(self._share.lengths)]
        first = share.start if share.start >= ends[-1] else max(end for end in ends if end <= share.start)
        stop = share.start + share.num_rows
        all_TD = _exchanged(x_TD.expand(self._ranks.degrees.context, *x_TD.shape), self._ranks).flatten(0, 1)
        plan = PackedCausal(_cut(first, stop, ends), x_TD.device)
        return plan.mix(_renumbered(mixer, first - share.start), all_TD[first:stop])[share.start - first :]

    @cached_property
    def _pieces(self) -> _Pieces:
        share, ends = self._share, [*accumulate(self._share.lengths)]
        start, stop = share.start, share.start + share.num_rows
        sizes = _cut(start, stop, ends)
        continued = sizes.pop(0) if 0 < start < ends[-1] and start not in ends else 0
        goes_on = stop < ends[-1] and stop not in ends
        begun = sizes.pop() if goes_on and sizes else 0
        plan = PackedCausal(sizes, self._ranks.device) if sizes else None
        return _Pieces(continued, sum(sizes), begun, goes_on and not begun, plan)


class _Pieces(NamedTuple):
    """A rank's rows: of a sequence that began on an earlier rank, of whole sequences (and padding) with their `plan`,
    and of one that goes on at the next rank. `passes`: the continued one goes on, too.
    """

    continued: int
    whole: int
    begun: int
    passes: bool
    plan: PackedCausal | None


def _cut(start: int, stop: int, ends: Sequence[int]) -> list[int]:
    """Lengths of the parts of rows start..stop that end at these rows."""
    return [after - before for before, after in pairwise([start, *(e for e in ends if start < e < stop), stop])]


def _renumbered(mixer: Mixer, offset: int) -> Mixer:
    """The mixer for sequences whose first row here is `offset` in the rank's own rows. One that began on an earlier
    rank has the adapter of the first own row.
    """
    return cast(Mixer, lambda x_nLD, starts: mixer(x_nLD, tuple(max(0, start + offset) for start in starts)))


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


Returning = list[tuple[dist.Work, Tensor]]
"""The gradients of states that left, once they are on their way."""


class _PassedState(LayerCache):
    """The state of a sequence that began on the rank before or goes on at the next one. A layer asks for its states
    before its projections and uses them after, so it gets empty tensors, which are filled when it updates the
    convolution's; and they leave before its last projection. So only the recurrence itself waits for other ranks, in
    backward, too: autograd first runs what was recorded last.
    """

    def __init__(self, ranks: Ranks, like: MixerState, *, continued: bool, goes_on: bool) -> None:
        empty = (None if x is None or not continued else torch.empty_like(x, device=ranks.device) for x in like)
        super().__init__(MixerState(*empty))
        self.ranks = ranks
        self.leaving: list[Tensor] = []
        self.returning: Returning = []
        self._like, self._continued, self._goes_on = like, continued, goes_on

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        if self._continued:
            empty = [x for x in self.state if x is not None]
            received = _Received.apply(anchor(self.ranks.device), self.ranks, *empty)
            for x, values in zip(empty, cast("tuple[Tensor, ...]", received), strict=True):
                x.copy_(values)
        seen_nCL = super().update_conv_state(conv_states, layer_idx, state_idx, conv_kernel_size=conv_kernel_size)
        if self._like.recurrent is None:
            self._send()
        return seen_nCL

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        super().update_recurrent_state(recurrent_states, layer_idx, state_idx)
        self._send()
        return recurrent_states

    def _send(self) -> None:
        if not self._goes_on:
            return
        for x, like in zip(self.state, self._like, strict=True):
            if x is not None and like is not None:
                given = x.to(like.dtype), anchor(x.device), self.ranks, self.returning, len(self.leaving)
                self.leaving.append(cast(Tensor, _Awaited.apply(*given)))
                self.ranks.send_context(self.leaving[-1].detach(), 1)


class _Received(torch.autograd.Function):
    """A sequence's states from the rank before; their gradients go back. The anchor is kept, so that a layer whose
    activations are recomputed repeats this message on both ranks, whatever else they keep.
    """

    @staticmethod
    def forward(ctx, anchor: Tensor, ranks: Ranks, *like: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        ctx.save_for_backward(anchor)
        found = [torch.empty_like(x) for x in like]
        for x in found:
            ranks.finish(ranks.receive_context(x, -1))
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _ = ctx.saved_tensors
        for grad in grads:
            ctx.ranks.send_context(grad, -1)
        return None, None, *(None for _ in grads)


class _Awaited(torch.autograd.Function):
    """A state that leaves. In backward, waits for its gradient, which `_Sent` has asked for."""

    @staticmethod
    def forward(ctx, x: Tensor, anchor: Tensor, ranks: Ranks, returning: Returning, index: int) -> Tensor:
        ctx.ranks, ctx.returning, ctx.index = ranks, returning, index
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        work, found = ctx.returning[ctx.index]
        ctx.ranks.finish(work)
        return found, None, None, None, None


class _Sent(torch.autograd.Function):
    """The rows whose sequence goes on: their backward begins to receive the gradients of the states that left."""

    @staticmethod
    def forward(ctx, y_LD: Tensor, anchor: Tensor, ranks: Ranks, returning: Returning, *leaving: Tensor) -> Tensor:
        ctx.ranks, ctx.returning = ranks, returning
        ctx.likes = [torch.empty_like(x, device="meta") for x in leaving]
        ctx.save_for_backward(anchor)
        return y_LD.view_as(y_LD)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_LD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _ = ctx.saved_tensors
        found = [torch.empty_like(like, device=grad_LD.device) for like in ctx.likes]
        ctx.returning[:] = [(ctx.ranks.receive_context(x, 1), x) for x in found]
        return grad_LD, None, None, None, *found
