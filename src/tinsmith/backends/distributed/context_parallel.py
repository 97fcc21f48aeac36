"""Context parallelism: the rows of a micro-batch distributed over ranks, each with all layers or its tensor shard of
them.

A rank computes n of a micro-batch's T rows; the last ranks' rows may be padding. Everything except attention and layers
with a state treats rows separately and runs on the rank's local rows. For attention, ranks exchange rows for heads (an
all-to-all, as in DeepSpeed Ulysses): each receives all rows of its heads, attends with the plan that one process would
use, and receives its local rows of all heads back. So documents, windows, caps and sinks need no second implementation,
and the causal work is the same on every rank. Keys and values are repeated to a number of heads that the degree
divides; where it does not divide the query heads, padding heads are added.

A layer with a state runs on a rank's local rows. Where a sequence continues on the next rank, its state (the
convolution's last inputs and the recurrent state) is sent there, and the state's gradient comes back. A rank computes
first the sequence that continues on the next rank, then complete sequences, then the one from the previous rank, so it
waits only for states of sequences longer than its rows, and only with the recurrence, not with projections. Layers that
continue from a state one row at a time (`plan.mixers.is_whole`) process all rows of their sequences up to the rank's
last one: hidden states are gathered, and every rank keeps the outputs of its local rows.

Backward exchanges gradients the same way, on every rank alike, with or without adapters on its rows.

Shapes: T rows of a micro-batch, n rows of a rank, C context ranks, H query heads, G key heads, h and g those of one
rank, D head dim, W elements of a row for one rank, L rows of one sequence, P pairs.
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

from tinsmith.backends.distributed.collectives import Ranks
from tinsmith.backends.torch.attention import AttentionOptions, AttentionPlan, Mixer, MixerState, PackedCausal
from tinsmith.backends.torch.batch import MicroBatch
from tinsmith.backends.torch.lora import anchor
from tinsmith.backends.torch.lora_batch import LoRABatch, Segment
from tinsmith.backends.torch.recurrent import LayerCache, SequenceMixer
from tinsmith.types import F32, I64


@dataclass(frozen=True)
class RowShard(MicroBatch):
    """Rows from `start` of a micro-batch, padded to `shard_rows`; `examples` and `lengths` are of all its rows."""

    source: MicroBatch
    start: int
    shard_rows: int

    @classmethod
    def of(cls, batch: MicroBatch, ranks: Ranks) -> RowShard:
        """The rows of this context rank."""
        # A single row with a state would be decoded, which changes the state in place.
        num_rows = max(-(-len(batch.tokens_T) // ranks.degrees.context), 2)
        return cls(batch.examples, batch, ranks.context_index * num_rows, num_rows)

    def slice_rows(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The local rows [n, ...] of x [T, ...], padded with zeros."""
        local_rows = x[self.start : self.start + self.shard_rows]
        return np.concatenate([local_rows, np.zeros((self.shard_rows - len(local_rows), *x.shape[1:]), x.dtype)])

    def gather_rows(self, x: Tensor, ranks: Ranks) -> Tensor:
        """The rows of all context ranks, [T, ...] in float32, from each rank's x [n, ...]."""
        all_rows = torch.zeros(ranks.degrees.context * self.shard_rows, *x.shape[1:], device=x.device)
        all_rows[self.start : self.start + self.shard_rows] = x
        return ranks.sum_context(all_rows)[: len(self.source.tokens_T)]

    @property
    def full_batch(self) -> MicroBatch:
        return self.source

    @cached_property
    def pairs(self) -> slice:
        return slice(*np.searchsorted(self.source.row_P, [self.start, self.start + self.shard_rows]).tolist())

    @cached_property
    def tokens_T(self) -> I64:
        return self.slice_rows(self.source.tokens_T)

    @cached_property
    def positions_T(self) -> I64:
        return self.slice_rows(self.source.positions_T)

    @cached_property
    def lora_batch(self) -> LoRABatch:
        stop = min(self.start + self.shard_rows, len(self.source.tokens_T))
        segments = self.source.lora_batch.slice(self.start, stop).segments if stop > self.start else ()
        num_local = max(0, stop - self.start)
        return LoRABatch(
            [*segments, *([Segment(num_local, self.shard_rows, None)] if num_local < self.shard_rows else [])]
        )

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
    """An AttentionPlan of the rows of a `RowShard`."""

    def __init__(self, shard: RowShard, ranks: Ranks) -> None:
        self._ranks = ranks
        padding = ranks.degrees.context * shard.shard_rows - sum(shard.lengths)
        self._plan: AttentionPlan = PackedCausal([*shard.lengths, *([padding] if padding else [])], ranks.device)
        self._shard = shard

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        """[n, H, D] for this rank's n rows."""
        degree, num_heads = self._ranks.degrees.context, q_THD.shape[1]
        num_keys = k_TGD.shape[1]
        key_heads = num_heads if num_heads % degree else math.lcm(num_keys, degree)
        keys_and_values = (_split_heads(x, key_heads // num_keys, degree) for x in (k_TGD, v_TGD))
        parts = [_split_heads(q_THD, 1, degree), *keys_and_values]
        received = _exchange_rows(torch.cat([part.flatten(2) for part in parts], -1), self._ranks)
        q, k, v = (
            rows.unflatten(-1, part.shape[2:])
            for rows, part in zip(received.flatten(0, 1).split([part[0, 0].numel() for part in parts], -1), parts,
                                  strict=True)
        )  # fmt: skip
        if (sinks_H := options.get("sinks_H")) is not None:
            options["sinks_H"] = _split_heads(sinks_H[None, :, None], 1, degree)[self._ranks.context_index].flatten()
        out = self._plan.attend(layer, q, k, v, **options)
        returned = _exchange_rows(out.unflatten(0, (degree, -1)).flatten(2), self._ranks)
        return returned.unflatten(-1, out.shape[1:]).transpose(0, 1).flatten(1, 2)[:, :num_heads]

    def mix(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        """[n, D] for this rank's n rows."""
        assert isinstance(mixer, SequenceMixer)
        if mixer.is_whole:
            return self._mix_gathered(mixer, x_TD)
        split = self._row_split
        head_TD, complete_TD, tail_TD = x_TD.split([split.num_head, split.num_complete, split.num_tail])
        outputs = []
        if split.num_tail:
            tail_start = len(x_TD) - split.num_tail
            outputs.append(self._mix_partial(mixer, tail_TD, tail_start, receives_state=False, sends_state=True))
        if split.plan is not None:
            outputs.insert(0, split.plan.mix(_shift_starts(mixer, split.num_head), complete_TD))
        if split.num_head:
            head_output = self._mix_partial(mixer, head_TD, 0, receives_state=True, sends_state=split.spans_rank)
            outputs.insert(0, head_output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _mix_partial(
        self, mixer: SequenceMixer, x_LD: Tensor, start: int, *, receives_state: bool, sends_state: bool
    ) -> Tensor:
        """[L, D] for the local rows of a sequence that is on several ranks."""
        # A single row with a state would be decoded, which changes the state in place.
        rows_LD = x_LD.expand(2, -1) if receives_state and len(x_LD) == 1 else x_LD
        transfer = _StateTransfer(self._ranks, mixer.state_like, receives_state=receives_state, sends_state=sends_state)
        y_LD = mixer(rows_LD[None], (start,), transfer)[0][0, : len(x_LD)]
        if not sends_state:
            return y_LD
        arguments = y_LD, anchor(y_LD.device), self._ranks, transfer.pending_gradients, *transfer.sent_states
        return cast(Tensor, _PostGradientReceives.apply(*arguments))

    def _mix_gathered(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        shard, ends = self._shard, [0, *accumulate(self._shard.lengths)]
        first = shard.start if shard.start >= ends[-1] else max(end for end in ends if end <= shard.start)
        stop = shard.start + shard.shard_rows
        all_TD = _exchange_rows(x_TD.expand(self._ranks.degrees.context, *x_TD.shape), self._ranks).flatten(0, 1)
        plan = PackedCausal(_split_lengths(first, stop, ends), x_TD.device)
        return plan.mix(_shift_starts(mixer, first - shard.start), all_TD[first:stop])[shard.start - first :]

    @cached_property
    def _row_split(self) -> _RowSplit:
        shard, ends = self._shard, [*accumulate(self._shard.lengths)]
        start, stop = shard.start, shard.start + shard.shard_rows
        sizes = _split_lengths(start, stop, ends)
        num_head = sizes.pop(0) if 0 < start < ends[-1] and start not in ends else 0
        sends_state = stop < ends[-1] and stop not in ends
        num_tail = sizes.pop() if sends_state and sizes else 0
        plan = PackedCausal(sizes, self._ranks.device) if sizes else None
        return _RowSplit(num_head, sum(sizes), num_tail, sends_state and not num_tail, plan)


class _RowSplit(NamedTuple):
    """Numbers of a rank's rows, in their order: of the sequence that continues from the previous rank (the head), of
    complete sequences and padding, with their `plan`, and of the sequence that continues on the next rank (the tail).
    `spans_rank`: the head continues on the next rank.
    """

    num_head: int
    num_complete: int
    num_tail: int
    spans_rank: bool
    plan: PackedCausal | None


def _split_lengths(start: int, stop: int, ends: Sequence[int]) -> list[int]:
    """The lengths of the spans into which `ends` divide the rows start..stop."""
    return [after - before for before, after in pairwise([start, *(e for e in ends if start < e < stop), stop])]


def _shift_starts(mixer: Mixer, offset: int) -> Mixer:
    """The mixer with sequence starts shifted by `offset`, to index the rank's local rows. A sequence that starts on an
    earlier rank has the adapter of the first local row.
    """
    return cast(Mixer, lambda x_nLD, starts: mixer(x_nLD, tuple(max(0, start + offset) for start in starts)))


def _split_heads(x_THD: Tensor, repeat: int, degree: int) -> Tensor:
    """[C, n, h, D]: the heads of each rank, repeated and padded with zeros."""
    if repeat > 1:
        x_THD = x_THD.repeat_interleave(repeat, 1)
    if missing := -x_THD.shape[1] % degree:
        x_THD = nn.functional.pad(x_THD, (0, 0, 0, missing))
    return x_THD.unflatten(1, (degree, -1)).transpose(0, 1)


def _exchange_rows(x_CnW: Tensor, ranks: Ranks) -> Tensor:
    return cast(Tensor, _ExchangeRows.apply(x_CnW, anchor(x_CnW.device), ranks))


class _ExchangeRows(torch.autograd.Function):
    """Because of the anchor the result requires a gradient on every rank, even on one whose rows have no adapters so
    far: otherwise the other ranks would wait for it in backward.
    """

    @staticmethod
    def forward(ctx, x_CnW: Tensor, anchor: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.exchange_context(x_CnW.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.ranks.exchange_context(grad.contiguous()), None, None


PendingGradients = list[tuple[dist.Work, Tensor]]
"""Handles and buffers of the gradients of sent states, once their receives are posted."""


class _StateTransfer(LayerCache):
    """The state of a sequence that continues from the previous rank or on the next one. A layer reads its states before
    its projections and uses them afterwards, so it gets empty tensors, which are filled when it updates the convolution
    state; states are sent before its last projection. So only the recurrence waits for other ranks, in backward too:
    autograd first runs what was recorded last.
    """

    def __init__(self, ranks: Ranks, like: MixerState, *, receives_state: bool, sends_state: bool) -> None:
        empty = (None if x is None or not receives_state else torch.empty_like(x, device=ranks.device) for x in like)
        super().__init__(MixerState(*empty))
        self.ranks = ranks
        self.sent_states: list[Tensor] = []
        self.pending_gradients: PendingGradients = []
        self._like, self._receives_state, self._sends_state = like, receives_state, sends_state

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        if self._receives_state:
            empty = [x for x in self.state if x is not None]
            received = _ReceiveState.apply(anchor(self.ranks.device), self.ranks, *empty)
            for x, values in zip(empty, cast("tuple[Tensor, ...]", received), strict=True):
                x.copy_(values)
        inputs_nCL = super().update_conv_state(conv_states, layer_idx, state_idx, conv_kernel_size=conv_kernel_size)
        if self._like.recurrent is None:
            self._send()
        return inputs_nCL

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        super().update_recurrent_state(recurrent_states, layer_idx, state_idx)
        self._send()
        return recurrent_states

    def _send(self) -> None:
        if not self._sends_state:
            return
        for x, like in zip(self.state, self._like, strict=True):
            if x is not None and like is not None:
                state, index = x.to(like.dtype), len(self.sent_states)
                arguments = state, anchor(x.device), self.ranks, self.pending_gradients, index
                self.sent_states.append(cast(Tensor, _AwaitGradient.apply(*arguments)))
                self.ranks.send_context(self.sent_states[-1].detach(), 1)


class _ReceiveState(torch.autograd.Function):
    """A sequence's states from the previous rank; backward returns their gradients. The anchor is saved, so that a
    layer whose activations are recomputed repeats this message on both ranks, whatever other tensors they save.
    """

    @staticmethod
    def forward(ctx, anchor: Tensor, ranks: Ranks, *like: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        ctx.save_for_backward(anchor)
        states = [torch.empty_like(x) for x in like]
        for x in states:
            ranks.finish(ranks.receive_context(x, -1))
        return tuple(states)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _ = ctx.saved_tensors
        for grad in grads:
            ctx.ranks.send_context(grad, -1)
        return None, None, *(None for _ in grads)


class _AwaitGradient(torch.autograd.Function):
    """A state that is sent. Backward waits for its gradient, whose receive `_PostGradientReceives` has posted."""

    @staticmethod
    def forward(
        ctx, x: Tensor, anchor: Tensor, ranks: Ranks, pending_gradients: PendingGradients, index: int
    ) -> Tensor:
        ctx.ranks, ctx.pending_gradients, ctx.index = ranks, pending_gradients, index
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        handle, gradient = ctx.pending_gradients[ctx.index]
        ctx.ranks.finish(handle)
        return gradient, None, None, None, None


class _PostGradientReceives(torch.autograd.Function):
    """The rows of a sequence that continues on the next rank: backward posts receives for gradients of sent states."""

    @staticmethod
    def forward(
        ctx, y_LD: Tensor, anchor: Tensor, ranks: Ranks, pending_gradients: PendingGradients, *sent_states: Tensor
    ) -> Tensor:
        ctx.ranks, ctx.pending_gradients = ranks, pending_gradients
        ctx.likes = [torch.empty_like(x, device="meta") for x in sent_states]
        ctx.save_for_backward(anchor)
        return y_LD.view_as(y_LD)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_LD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _ = ctx.saved_tensors
        gradients = [torch.empty_like(like, device=grad_LD.device) for like in ctx.likes]
        ctx.pending_gradients[:] = [(ctx.ranks.receive_context(x, 1), x) for x in gradients]
        return grad_LD, None, None, None, *gradients
