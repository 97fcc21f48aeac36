"""Adapters of many rows at once: what each adds to the linears of the decoder that is written out.

A `Bank` holds the fused matrices of adapters of like rank in slots, side by side, so that a step with rows of many
adapters multiplies them all in two batched products a linear. The adapter that was not seen for longest gives its slot
to the next; the bank holds no adapter and keeps none alive. `Work` is a step's plan. Rows go segment by segment, which
is the same in more calls, if one adapter has them all, ranks differ, they are spread too unevenly, or an adapter is
seen for the first time since its weights changed, as in training: copying it would cost more than it saves.

A row only meets its own adapter's matrices: elements of a batched product never mix, and what pads one is dropped.

Letters: T rows, S slots, n rows of a slot, I inputs and O outputs of a linear, R inner rows of its fused adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from tinsmith.backends.torch.adapters import Adapter
from tinsmith.backends.torch.lora_ops import Routing
from tinsmith.backends.torch.products import add_linear, add_product_, add_products_, linear_product, product

if TYPE_CHECKING:
    from tinsmith.backends.torch.fused_linear import Fused, FusedLinear

P = ParamSpec("P")
R = TypeVar("R")

MARK = "a bank's slot"
"""Where an adapter keeps the token of its slot, until its weights change."""

MOST_SLOTS = 64

MOST_BYTES = 2**28
"""Of the matrices of one bank."""

MOST_WASTE = 2.0
"""Rows that a batched product computes, as a multiple of those that are wanted."""

MANY_ROWS = 256
"""Of one adapter, from which on each linear's own B in place is faster than the B's among zeros: 512 rows on gate and
up of m50 467 us against 911, on queries, keys and values 192 against 293; 128 rows on two threads 120 and 92 against
161 and 58.
"""


def _lasting(method: Callable[P, R]) -> Callable[P, R]:
    """Tensors that are made or written in inference mode could not be written outside of it."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return run


class Added(NamedTuple):
    """What a piece of a fused linear is added from."""

    outputs: slice
    inner: slice
    b_SRO: Tensor


Views = tuple[Tensor, tuple[Added, ...]]
"""Of a fused linear: the A's of some slots [S, I, R], and its pieces."""


class Bank:
    """`stacks[name]` are a fused linear's A's [S, R, I] and its pieces' B's [S, O, R], scaled; what an adapter lacks is
    zero.
    """

    def __init__(self, linears: Sequence[FusedLinear], rank: int) -> None:
        self._linears = linears
        sizes = (matrix.nbytes for linear in linears for matrix in linear.empty(rank))
        self._most_slots = min(MOST_BYTES // sum(sizes), MOST_SLOTS)
        self._tokens: list[Fused | None] = []
        self._seen: list[int] = []
        self._clock = 0
        self.rank = rank
        self.stacks: dict[str, Fused] = {}
        self._views: dict[str, Views] = {}
        self._viewed = slice(0, 0)

    def slots_of(self, adapters: Sequence[Adapter]) -> list[int] | None:
        """A slot for each of these different adapters; None if they are too many."""
        if len(adapters) > self._most_slots:
            return None
        self._clock += 1
        slots = [self._slot(adapter) for adapter in adapters]
        for slot in slots:
            if slot is not None:
                self._seen[slot] = self._clock
        missing = slots.count(None)
        free = sorted((slot for slot, seen in enumerate(self._seen) if seen < self._clock), key=self._seen.__getitem__)
        if missing > len(free):
            free += self._grow(len(adapters))
        found = []
        for adapter, slot in zip(adapters, slots, strict=True):
            if slot is None:
                slot = free.pop(0)
                self._fill(slot, adapter)
            found.append(slot)
        return found

    def views(self, slots: slice) -> dict[str, Views]:
        """The matrices of these slots, by linear; kept for the next step."""
        if slots != self._viewed:
            self._viewed = slots
            for linear in self._linears:
                a_SRI, *bs = (stack[slots] for stack in self.stacks[linear.name])
                pieces = zip(linear.pieces(self.rank), bs, strict=True)
                added = tuple(Added(*piece, b_SOR.mT) for piece, b_SOR in pieces)
                self._views[linear.name] = a_SRI.mT, added
        return self._views

    def _slot(self, adapter: Adapter) -> int | None:
        token = adapter.fused.get(MARK)
        if token is None:
            return None
        return next((slot for slot, own in enumerate(self._tokens) if own is token), None)

    @_lasting
    def _grow(self, wanted: int) -> range:
        """The new slots."""
        before = len(self._tokens)
        size = min(1 << (wanted - 1).bit_length(), self._most_slots)
        for linear in self._linears:
            grown = tuple(matrix.new_zeros(size, *matrix.shape) for matrix in linear.empty(self.rank))
            for new, old in zip(grown, self.stacks.get(linear.name, ()), strict=False):
                new[:before] = old
            self.stacks[linear.name] = grown
        self._viewed = slice(0, 0)
        self._tokens += [None] * (size - before)
        self._seen += [0] * (size - before)
        return range(before, size)

    @_lasting
    def _fill(self, slot: int, adapter: Adapter) -> None:
        for linear in self._linears:
            linear.fuse_into(adapter, tuple(stack[slot].zero_() for stack in self.stacks[linear.name]))
        self._tokens[slot] = adapter.fused[MARK] = tuple(stack[slot] for stack in self.stacks[self._linears[0].name])
        self._seen[slot] = self._clock


class Work:
    """What the adapters of one step add, linear by linear. `num_rows` may be more than the routing's: the last segment
    is longer then.
    """

    def __init__(self, routing: Routing, num_rows: int, banks: dict[int, Bank], linears: Sequence[FusedLinear]) -> None:
        segments = [*routing.segments[:-1], routing.segments[-1]._replace(stop=num_rows)]
        self._segments = [segment for segment in segments if segment.adapter is not None]
        self._num_rows = num_rows
        self._bank: Bank | None = None
        adapters = [segment.adapter for segment in self._segments if segment.adapter is not None]
        ranks = {_rank_class(adapter) for adapter in adapters}
        # One adapter's segments are apart when rows of others, or of none, lie in between: each is a call of its own.
        if len(adapters) < 2 or len(ranks) > 1 or len(set(map(id, adapters))) < len(adapters):
            return
        if not all(adapter.fused for adapter in adapters):
            return
        (rank,) = ranks
        bank = banks.setdefault(rank, Bank(linears, rank))
        if (slots := bank.slots_of(adapters)) is not None:
            self._batch(bank, slots)

    def _batch(self, bank: Bank, slots: Sequence[int]) -> None:
        first, last = min(slots), max(slots)
        sizes = [segment.stop - segment.start for segment in self._segments]
        most = max(sizes)
        num_slots = last - first + 1
        if num_slots * most > MOST_WASTE * sum(sizes):
            return
        self._bank, self._views = bank, bank.views(slice(first, last + 1))
        self._shape = num_slots, most
        self._rows: Tensor | None = None
        in_order = all(slot == first + place for place, slot in enumerate(slots))
        if in_order and min(sizes) == most and sum(sizes) == self._num_rows:
            return
        rows_Sn = np.zeros((num_slots, most), np.int64)  # a slot without rows computes something for nobody
        cells_T = np.zeros(self._num_rows, np.int64)
        for slot, (start, stop, _) in zip(slots, self._segments, strict=True):
            rows_Sn[slot - first] = np.minimum(np.arange(start, start + most), stop - 1)
            cells_T[start:stop] = (slot - first) * most + np.arange(stop - start)
        device = next(iter(bank.stacks.values()))[0].device
        self._rows, self._cells = (torch.from_numpy(x).to(device) for x in (rows_Sn.ravel(), cells_T))
        bounds = [0, *(bound for start, stop, _ in self._segments for bound in (start, stop)), self._num_rows]
        self._without = [slice(*gap) for gap in zip(bounds[::2], bounds[1::2], strict=True) if gap[0] < gap[1]]

    def add_(self, y_TO: Tensor, x_TI: Tensor, linear: FusedLinear) -> Tensor:
        if self._bank is None:
            return self._add_apart_(y_TO, x_TI, linear)
        a_SIR, pieces = self._views[linear.name]
        if self._rows is None:
            inner_SnR, y_SnO = torch.bmm(x_TI.view(*self._shape, -1), a_SIR), y_TO.view(*self._shape, -1)
            for outputs, inner, b_SRO in pieces:
                add_products_(y_SnO[..., outputs], inner_SnR[..., inner], b_SRO)
            return y_TO
        inner_SnR = torch.bmm(x_TI.index_select(0, self._rows).view(*self._shape, -1), a_SIR)
        for outputs, inner, b_SRO in pieces:
            added_TO = torch.bmm(inner_SnR[..., inner], b_SRO).flatten(0, 1).index_select(0, self._cells)
            for gap in self._without:
                added_TO[gap] = 0.0
            y_TO[:, outputs] += added_TO
        return y_TO

    def _add_apart_(self, y_TO: Tensor, x_TI: Tensor, linear: FusedLinear) -> Tensor:
        """Segment by segment."""
        for start, stop, adapter in self._segments:
            if adapter is None or (fused := linear.fused(adapter)) is None:
                continue
            a_RI, *bs = fused
            if not bs or (linear.suits and stop - start >= MANY_ROWS and y_TO.dtype == x_TI.dtype):
                linear.add_each_(y_TO[start:stop], linear_product(x_TI[start:stop], a_RI), adapter)
                continue
            if linear.suits and len(bs) == 1 and y_TO.dtype == x_TI.dtype:
                if stop - start == len(x_TI):
                    return add_linear(y_TO, linear_product(x_TI, a_RI), bs[0])
                inner_nR = linear_product(x_TI[start:stop], a_RI)
                y_TO[start:stop] = add_linear(y_TO[start:stop], inner_nR, bs[0])
                continue
            if linear.suits and len(bs) == 1:
                y_TO[start:stop].add_(linear_product(linear_product(x_TI[start:stop], a_RI), bs[0]))
                continue
            inner_nR = product(x_TI[start:stop], a_RI.t(), x_TI.dtype)
            pieces = linear.pieces(adapter.layout.rank, of_one=True)
            for (outputs, inner), b_OR in zip(pieces, bs, strict=True):
                add_product_(y_TO[start:stop, outputs], inner_nR[:, inner], b_OR.t(), 1.0)
        return y_TO


def _rank_class(adapter: Adapter) -> int:
    """Adapters of one class share a bank, whose matrices have room for this rank."""
    return max(8, 1 << (adapter.layout.rank - 1).bit_length())
