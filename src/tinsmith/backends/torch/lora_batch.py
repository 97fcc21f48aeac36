"""Which rows of a packed batch have which adapter, and which neighbours share batched matmuls.

Shapes: T rows of a packed batch, n rows of a segment, S segments of a group, I inputs, O outputs, R rows of A in a
LoRADelta.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from tinsmith.backends.torch.adapters import Adapter, AdapterStack, Layout, LinearB, StackedA
from tinsmith.backends.torch.host import upload
from tinsmith.backends.torch.matmul import add_bmm_, add_matmul_

MAX_PADDING = 0.25
"""The most rows of padding in a group of segments, as a share of its own rows, in bfloat16. Groups are not padded in
float32, where it gains nothing.
"""

BLOCK_ROWS = 16
"""Rows of a `DeviceLoRABatch`'s block: the fewest that a tensor core multiplies."""


Stacks = tuple[list[tuple[StackedA, Tensor]], list[tuple[LinearB, Tensor]]]


class PackedMatrices(NamedTuple):
    """An adapter's matrices of a LoRADelta in oneDNN's layout: all A's, and all B's with zeros between them, scaled."""

    a_RI: Tensor
    b_OR: Tensor


class Segment(NamedTuple):
    """Rows start..stop of a packed batch and their adapter; None is the base model."""

    start: int
    stop: int
    adapter: Adapter | None

    @property
    def layout(self) -> Layout | None:
        return None if self.adapter is None else self.adapter.layout


class AdapterGroup:
    """Adjacent segments, from row `start` on, with adapters of one layout and scale. The longest has `length` rows, to
    which the others are padded in batched matmuls.

    `stacks` caches the matrices of each LoRADelta for the duration of the micro-batch.
    """

    __slots__ = ("_cells_T", "_rows_C", "_stack", "adapters", "length", "lengths", "stacks", "start", "stop")

    def __init__(self, start: int, length: int, adapter: Adapter) -> None:
        self.start = start
        self.stop = start + length
        self.length = length
        self.lengths = [length]
        self.adapters = [adapter]
        self.stacks: dict[object, Stacks | PackedMatrices] = {}  # by LoRADelta
        self._cells_T: Tensor | None = None
        self._rows_C: Tensor | None = None
        self._stack: tuple[AdapterStack, slice] | None = None

    @property
    def num_bytes(self) -> int:
        return sum(adapter.compute_P.nbytes for adapter in self.adapters)

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions of the adapters' weights."""
        return tuple(adapter.version for adapter in self.adapters)

    def can_join(self, start: int, length: int, adapter: Adapter) -> bool:
        """Whether a segment can join, without or with little padding."""
        first = self.adapters[0]
        if start != self.stop or adapter.layout is not first.layout or adapter.scale != first.scale:
            return False
        pads = adapter.compute_P.dtype == torch.bfloat16
        num_rows, num_cells = self.stop - self.start + length, max(self.length, length) * (len(self.adapters) + 1)
        return num_cells <= (1 + MAX_PADDING * pads) * num_rows

    def add(self, length: int, adapter: Adapter) -> None:
        self.stop += length
        self.length = max(self.length, length)
        self.lengths.append(length)
        self.adapters.append(adapter)

    @property
    def stack(self) -> tuple[AdapterStack, slice] | None:
        """The stack that has its adapters as neighbours, and their rows there; None if there is none."""
        stack_slots = [adapter.stack_slot for adapter in self.adapters]
        if self._stack is None and len(stack_slots) > 1 and stack_slots[0] is not None:
            stack, start = stack_slots[0]
            if stack_slots == [(stack, start + i) for i in range(len(stack_slots))]:
                self._stack = stack, slice(start, start + len(stack_slots))
        return self._stack

    def batch_rows(self, x_TI: Tensor, *, repeats: bool = False) -> Tensor:
        """[S, n, I], with zeros for padding; [n, I] of a single segment. `repeats`: padding repeats a segment's last
        row, which takes one operation; for matmuls with zeros there.
        """
        rows_nI = self.select_rows(x_TI)
        if len(self.adapters) == 1:
            return rows_nI
        if self.is_padded and repeats:
            rows_nI = rows_nI.index_select(0, self._sources(x_TI.device))
        elif self.is_padded:
            padded = rows_nI.new_zeros(self._num_cells, rows_nI.shape[1])
            rows_nI = padded.index_copy_(0, self._cells(x_TI.device), rows_nI)
        return rows_nI.view(len(self.adapters), self.length, -1)

    def add_bmm_(self, out_TO: Tensor, a_SnR: Tensor, b_SRO: Tensor) -> None:
        """Add the rows of a @ b to these rows of `out`."""
        out_nO = self.select_rows(out_TO)
        if a_SnR.dim() == 2:
            add_matmul_(out_nO, a_SnR, b_SRO, 1.0)
        elif self.is_padded:
            out_nO.add_(torch.bmm(a_SnR, b_SRO).flatten(0, 1).index_select(0, self._cells(out_TO.device)))
        else:
            add_bmm_(out_nO.view(len(self.adapters), self.length, -1), a_SnR, b_SRO)

    def split(self) -> list[AdapterGroup]:
        starts = accumulate(self.lengths, initial=self.start)
        return [AdapterGroup(*segment) for segment in zip(starts, self.lengths, self.adapters, strict=False)]

    @property
    def _num_cells(self) -> int:
        return self.length * len(self.adapters)

    @property
    def is_padded(self) -> bool:
        return self._num_cells > self.stop - self.start

    def select_rows(self, x_TI: Tensor) -> Tensor:
        return x_TI if self.stop - self.start == x_TI.shape[0] else x_TI[self.start : self.stop]

    def _cells(self, device: torch.device) -> Tensor:
        """The cell of each row in the padded stack."""
        if self._cells_T is None:
            cells = [np.arange(length) + i * self.length for i, length in enumerate(self.lengths)]
            self._cells_T = upload(np.concatenate(cells), device)
        return self._cells_T

    def _sources(self, device: torch.device) -> Tensor:
        """The row of each cell of the padded stack."""
        if self._rows_C is None:
            starts = accumulate(self.lengths, initial=0)
            cells = np.arange(self.length)
            rows = [start + np.minimum(cells, length - 1) for start, length in zip(starts, self.lengths, strict=False)]
            self._rows_C = upload(np.concatenate(rows), device)
        return self._rows_C


class LoRABatch:
    """Contiguous segments that cover the rows [0, T) of a packed batch. Immutable.

    `adapter_groups` are the segments with an adapter, joined with similar neighbours; `groups_by_delta` caches those of
    each LoRADelta. `repeats`: it is used for several steps of sampling, so that copies of an adapter in another form
    pay.
    """

    __slots__ = ("_adapter_groups", "_by_sequence", "_slots", "groups_by_delta", "num_rows", "repeats", "segments")

    def __init__(self, segments: Sequence[Segment], *, repeats: bool = False) -> None:
        self.repeats = repeats
        end = 0
        for segment in segments:
            if segment.start != end or segment.stop <= segment.start:
                raise ValueError(f"segment {segment.start}..{segment.stop} does not continue at row {end}")
            end = segment.stop
        self.segments = tuple(segments)
        self._adapter_groups: list[AdapterGroup] | None = None
        self._by_sequence: dict[tuple[tuple[int, ...], int], LoRABatch] = {}
        self._slots: tuple[tuple[Adapter | None, ...], Tensor | None] | None = None
        self.groups_by_delta: dict[object, list[AdapterGroup]] = {}  # by LoRADelta
        self.num_rows = end

    @property
    def adapter_groups(self) -> list[AdapterGroup]:
        if self._adapter_groups is None:
            self._adapter_groups = _group_segments(self.segments)
        return self._adapter_groups

    @classmethod
    def of(cls, adapters: Iterable[Adapter | None], lengths: Iterable[int], *, repeats: bool = False) -> Self:
        """Rows of consecutive sequences; neighbours with the same adapter become one segment."""
        segments: list[Segment] = []
        end = 0
        for adapter, length in zip(adapters, lengths, strict=True):
            if segments and segments[-1].adapter is adapter:
                segments[-1] = Segment(segments[-1].start, end + length, adapter)
            else:
                segments.append(Segment(end, end + length, adapter))
            end += length
        return cls(segments, repeats=repeats)

    @classmethod
    def of_base(cls, num_rows: int) -> Self:
        """Rows without an adapter."""
        return cls([Segment(0, num_rows, None)])

    def slots(self, device: torch.device) -> tuple[tuple[Adapter | None, ...], Tensor | None]:
        """The distinct adapters, None among them if rows have none, and the index there of each row's [T]; None instead
        of the indices if there is one.
        """
        if self._slots is None:
            slot_by_id = {id(segment.adapter): segment.adapter for segment in self.segments}
            index_by_id = {key: index for index, key in enumerate(slot_by_id)}
            slot_T = None
            if len(slot_by_id) > 1:
                indices = np.array([index_by_id[id(segment.adapter)] for segment in self.segments])
                slot_T = upload(np.repeat(indices, [stop - start for start, stop, _ in self.segments]), device)
            self._slots = tuple(slot_by_id.values()), slot_T
        return self._slots

    def select(self, rows: Sequence[int]) -> LoRABatch:
        """The LoRA batch of these rows only, in ascending order, numbered from 0."""
        bounds = [bisect_left(rows, segment.stop) for segment in self.segments]
        counts = [stop - start for start, stop in zip([0, *bounds], bounds, strict=False)]
        selected = [(segment.adapter, count) for segment, count in zip(self.segments, counts, strict=True) if count]
        return self.of((adapter for adapter, _ in selected), (count for _, count in selected))

    def for_sequences(self, starts: tuple[int, ...], length: int) -> LoRABatch:
        """The LoRA batch of concatenated sequences of `length` rows each, which begin at these rows."""
        if length == 1 and starts == tuple(range(self.num_rows)):
            return self
        if (lora_batch := self._by_sequence.get((starts, length))) is None:
            stops = [segment.stop for segment in self.segments]
            adapters = [self.segments[bisect_right(stops, start)].adapter for start in starts]
            lora_batch = self._by_sequence[starts, length] = self.of(adapters, [length] * len(starts))
        return lora_batch

    def slice(self, start: int, stop: int) -> LoRABatch:
        """The LoRA batch of rows start..stop only, numbered from 0."""
        return LoRABatch(
            [
                Segment(max(segment.start, start) - start, min(segment.stop, stop) - start, segment.adapter)
                for segment in self.segments
                if segment.start < stop and segment.stop > start
            ]
        )


def _group_segments(segments: Iterable[Segment]) -> list[AdapterGroup]:
    """Join neighbours of similar length, and equal layout and scale."""
    groups: list[AdapterGroup] = []
    for start, stop, adapter in segments:
        if adapter is None:
            continue
        if groups and groups[-1].can_join(start, stop - start, adapter):
            groups[-1].add(stop - start, adapter)
        else:
            groups.append(AdapterGroup(start, stop - start, adapter))
    return groups


def list_row_blocks(segment: Segment) -> list[tuple[int, int, int, int]]:
    """Address, first row, number of rows and bits of the scale of each block of a segment's rows."""
    start, stop, adapter = segment
    if adapter is None:
        return []
    address, scale = adapter.compute_P.data_ptr(), int(np.float32(adapter.scale).view(np.int32))
    return [(address, row, min(BLOCK_ROWS, stop - row), scale) for row in range(start, stop, BLOCK_ROWS)]
