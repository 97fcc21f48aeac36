"""Adapters at addresses that stay: what decode steps that are captured multiply with.

`AdapterSlots` holds the fused matrices of adapters, padded with zeros to one rank, in slots of one tensor for each
fused linear; a step's rows say which slot is theirs. So a step with other adapters, or with a version that was
published a moment ago, runs the same kernels at the same addresses: only slots are filled and numbers change. The last
slot is never filled; rows of the base model and rows that pad have it, and are given zeros. The adapter that was not
seen for longest gives its slot to the next; nothing here holds an adapter or keeps one alive.

Where more adapters meet in a step than there are slots, the tensors grow, and move: `generation` says so. Steps that
are not captured, with segments of any lengths, use the same slots (`SegmentWork`).

Letters: T rows, S slots, I inputs and O outputs of a fused linear, R inner rows of its adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinsmith.backends.torch import grouped
from tinsmith.backends.torch.adapters import Adapter
from tinsmith.backends.torch.grouped import can_be_graphed_on, grouped_product, suits
from tinsmith.backends.torch.lora_ops import Routing, Stretch

if TYPE_CHECKING:
    from tinsmith.backends.torch.fused_linear import Fused, FusedLinear

LEAST_RANK = 8
"""Also what 16 bytes hold in bfloat16."""

FIRST_SLOTS = 8

SLOTS_BYTES = 1 << 30
"""Of the slots of one rank, at most."""

_numbers = count()


def rank_class(adapter: Adapter) -> int:
    """Adapters of one class have room in the same slots."""
    return max(LEAST_RANK, 1 << (adapter.layout.rank - 1).bit_length())


class AdapterSlots:
    """`stacks[name]` are a fused linear's A's [S, R, I] and its pieces' B's [S, O, R], these times the scale."""

    def __init__(self, linears: Sequence[FusedLinear], rank: int, max_bytes: int) -> None:
        self._linears = linears
        self._mark = f"slot {next(_numbers)}"
        """Under which an adapter keeps the token of its slot here, until its weights change."""
        self._tokens: list[Fused | None] = []
        self._seen: list[int] = []
        self._clock = 0
        self.slot_bytes = sum(matrix.nbytes for linear in linears for matrix in linear.empty(rank))
        self._most_slots = max_bytes // self.slot_bytes - 1
        self.rank = rank
        self.generation = 0
        self.stacks: dict[str, Fused] = {}

    @property
    def num_slots(self) -> int:
        """Without the last."""
        return len(self._tokens)

    @property
    def num_bytes(self) -> int:
        return sum(matrix.nbytes for stack in self.stacks.values() for matrix in stack)

    def place(self, adapters: Sequence[Adapter]) -> list[int] | None:
        """A slot for each of these different adapters; None if they are too many."""
        if len(adapters) > self._most_slots:
            return None
        # Tensors that are made in inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            return self._place(adapters)

    def _place(self, adapters: Sequence[Adapter]) -> list[int]:
        self._clock += 1
        if len(adapters) > self.num_slots:
            self._grow(len(adapters))
        slots = [self._slot_of(adapter) for adapter in adapters]
        for slot in slots:
            if slot is not None:
                self._seen[slot] = self._clock
        free = sorted(set(range(self.num_slots)).difference(slots), key=self._seen.__getitem__)
        for place, adapter in enumerate(adapters):
            if slots[place] is None:
                slots[place] = free.pop(0)
                self._fill(slots[place], adapter)
        return [slot for slot in slots if slot is not None]

    def _slot_of(self, adapter: Adapter) -> int | None:
        token = adapter.fused.get(self._mark)
        return next((slot for slot, own in enumerate(self._tokens) if own is not None and own is token), None)

    def _grow(self, wanted: int) -> None:
        """What is in slots is filled in again by those who come."""
        size = min(max(FIRST_SLOTS, 1 << (wanted - 1).bit_length()), self._most_slots)
        self.stacks = {
            linear.name: tuple(matrix.new_zeros(size + 1, *matrix.shape) for matrix in linear.empty(self.rank))
            for linear in self._linears
        }
        self._tokens, self._seen = [None] * size, [0] * size
        self.generation = next(_numbers)

    def _fill(self, slot: int | None, adapter: Adapter) -> None:
        assert slot is not None
        for linear in self._linears:
            linear.fuse_into(adapter, tuple(stack[slot].zero_() for stack in self.stacks[linear.name]))
        token = (self.stacks[self._linears[0].name][0][slot],)
        self._tokens[slot] = adapter.fused[self._mark] = token
        self._seen[slot] = self._clock


class Slots:
    """Those of a model's adapters, by rank, each made when it is first wanted."""

    def __init__(self, linears: Sequence[FusedLinear], max_bytes: int = SLOTS_BYTES) -> None:
        self._linears = linears
        self._of_rank: dict[int, AdapterSlots] = {}
        self.max_bytes = max_bytes

    @property
    def num_bytes(self) -> int:
        return sum(slots.num_bytes for slots in self._of_rank.values())

    def of(self, rank: int) -> AdapterSlots:
        if rank not in self._of_rank:
            self._of_rank[rank] = AdapterSlots(self._linears, rank, self.max_bytes)
        return self._of_rank[rank]

    def drop(self) -> None:
        self._of_rank.clear()


class SegmentWork:
    """What the adapters of segments of any lengths add, each fused linear in two grouped products for all of them."""

    def __init__(self, slots: AdapterSlots, slot_of_each: Tensor, sizes: list[int]) -> None:
        self._slots = slots
        self._slot_of_each = slot_of_each
        self._stretch = Stretch(0, sizes, [])

    @classmethod
    def of(cls, slots: Slots, routing: Routing, device: torch.device) -> SegmentWork | None:
        """None where products one by one are as good, or adapters are too many."""
        adapters = {id(a): a for _, _, a in routing.segments if a is not None}
        if len(adapters) < 2 or not grouped.is_used_on(device):
            return None
        own = slots.of(max(map(rank_class, adapters.values())))
        placed = own.place(list(adapters.values()))
        if placed is None:
            return None
        slot_of = dict(zip(adapters, placed, strict=True))
        chosen = [slot_of.get(id(segment.adapter), own.num_slots) for segment in routing.segments]
        sizes = [segment.stop - segment.start for segment in routing.segments]
        return cls(own, torch.tensor(chosen).to(device), sizes)

    def add_(self, y_TO: Tensor, x_TI: Tensor, linear: FusedLinear) -> Tensor:
        a_SRI, *bs = (stack.index_select(0, self._slot_of_each) for stack in self._slots.stacks[linear.name])
        inner_TR = self._stretch.products(x_TI, a_SRI.mT)
        for (outputs, inner), b_SOR in zip(linear.pieces(self._slots.rank), bs, strict=True):
            y_TO[:, outputs] += self._stretch.products(inner_TR[:, inner], b_SOR.mT)
        return y_TO


class SlotWork:
    """What the adapters of a step's rows add, by slots that the device knows: `slot_T` of each row, and `ends_S`, where
    the rows of each slot end, if rows lie in the order of their slots and the grouped kernel is to be used.
    """

    def __init__(self, slots: AdapterSlots, slot_T: Tensor, ends_S: Tensor | None) -> None:
        self._slots = slots
        self._slot_T = slot_T
        self._ends_S = ends_S

    def add_(self, y_TO: Tensor, x_TI: Tensor, linear: FusedLinear) -> Tensor:
        a_SRI, *bs = self._slots.stacks[linear.name]
        inner_TR = self._product(x_TI, a_SRI)
        for (outputs, inner), b_SOR in zip(linear.pieces(self._slots.rank), bs, strict=True):
            y_TO[:, outputs] += self._product(inner_TR[:, inner], b_SOR)
        return y_TO

    def _product(self, x_TI: Tensor, matrices_SOI: Tensor) -> Tensor:
        """[T, O]: each row with the transpose of its slot's matrix."""
        if self._ends_S is not None and suits(x_TI, matrices_SOI.mT):
            return grouped_product(x_TI, matrices_SOI.mT, self._ends_S)
        return torch.bmm(x_TI[:, None], matrices_SOI.index_select(0, self._slot_T).mT)[:, 0]


class NoWork:
    """Of rows that all are the base model's."""

    def add_(self, y_TO: Tensor, x_TI: Tensor, linear: FusedLinear) -> Tensor:
        return y_TO


def is_grouped_on(device: torch.device) -> bool:
    """Whether rows meet their slots in the grouped kernel, rather than in matrices that are gathered for each row."""
    return device.type == "cuda" and can_be_graphed_on(device)
