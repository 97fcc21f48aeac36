"""Attention over the paged cache: a step's rows, each against its own sequence's blocks.

`PagedPlan` is the AttentionPlan of one step. Each layer's call first writes the step's keys and values into the cache
and then attends in one of three ways:

- CUDA, where Triton is installed: one call reads the pages of all decoding rows and short continuations
  (`paged_kernel`).
- CPU: decoding rows of similar length attend to contiguous copies (`contiguous_kv`), of a beginning that many share to
  one for all of them (`shared_prefixes`).
- All other rows: keys and values are gathered, and SDPA attends to them in as few calls as the step allows: decoding
  rows of similar context length together, fresh prompts of similar length together without reading the cache, and
  chunks that continue a prompt together. This is the reference for the other two.

Every sequence has a batch row of its own in those calls, and padding is its own last row or the null block, so a NaN
stays with its sequence.

Letters: T rows of the step, N sequences, n sequences of a group, L rows of a sequence padded, K cached positions
padded, C blocks of a table, H query heads, G key heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinsmith.backends.torch.attention import (
    AttentionOptions,
    Mixer,
    Window,
    decode,
    prefill,
    visibility_mask,
)
from tinsmith.backends.torch.host import upload, upload_all
from tinsmith.backends.torch.model import BaseModel
from tinsmith.runtime.devices import kind_of
from tinsmith.samplers.local.contiguous_kv import ContiguousKV, ContiguousStep
from tinsmith.samplers.local.kv_cache import KVCache, page_kernels
from tinsmith.samplers.local.shared_prefixes import DecodeRow
from tinsmith.samplers.local.states import Recurrence

I64 = npt.NDArray[np.int64]

MAX_WASTE = 0.25  # padding allowed as a share of a group's longest member, or MIN_WASTE positions if more
MIN_WASTE = 64
ALL = slice(None)


def describe_kernels(base: BaseModel) -> str:
    """The names of the kernels that sample from a model, for the log."""
    if kind_of(base.device).is_host:
        return "SDPA on contiguous keys, else on gathered keys"
    if page_kernels(base.device) is None:
        return "SDPA on gathered keys"
    return f"Triton on pages{', in CUDA graphs' if base.can_capture else ''}; SDPA for prompts"


class SequenceRows(NamedTuple):
    """One sequence's part of a step: `stop - start` tokens after `start` cached ones. A decoding `owner` may have a
    contiguous slot. `visible_counts`: how many tokens of the sequence each row sees; None: those up to itself.
    """

    start: int
    stop: int
    blocks: Sequence[int]
    owner: Hashable = None
    visible_counts: I64 | None = None


@dataclass(slots=True)
class _Group:
    """Sequences that share a kernel call. `rows_nL` is a slice if their rows are adjacent in the step."""

    num: int
    num_rows: int  # L
    rows_nL: Tensor | slice  # flat; padded with the sequence's own last row
    real: tuple[Tensor, Tensor] | None  # (padded index, row of the step) of every row that is not padding
    blocks_nC: Tensor | None  # None: nothing is cached before these rows, so they see only each other
    positions_nL: Tensor  # flat
    visible_nL: Tensor | None  # how many positions each row sees; None: those up to its own
    masks: dict[Window | None, Tensor | None]


PAGED_ROWS = 16
"""On CUDA up to this many rows that continue a sequence attend each on its own, as decoding rows do: gathering keys
takes a dozen launches a layer. More rows would read the same keys too often.
"""


class _Pages(NamedTuple):
    """The rows of a step that attend to their pages; the table and the counts of keys are int32."""

    rows: Tensor | slice
    table_nC: Tensor
    keys_n: Tensor


class PagedPlan:
    """`positions_T` are the rows' positions; rows are in the order of `sequences`. The keys and values of the rows in
    `written_rows` are written to the cache. `recurrence` covers the same rows for layers that keep a state.
    """

    def __init__(
        self,
        cache: KVCache,
        sequences: Sequence[SequenceRows],
        device: torch.device,
        contiguous: ContiguousKV | None = None,
        *,
        written_rows: slice = ALL,
        recurrence: Recurrence | None = None,
    ) -> None:
        self._written_rows = written_rows
        self._recurrence = recurrence
        self._cache = cache
        self._device = device
        self._kernels = cache.kernels
        start_N = np.array([s.start for s in sequences], np.int64)
        size_N = np.array([s.stop for s in sequences], np.int64) - start_N
        first_N = np.cumsum(size_N) - size_N
        num_blocks_N = np.array([len(s.blocks) for s in sequences], np.int64)
        table_NC = np.zeros((len(sequences), num_blocks_N.max()), np.int64)
        for row, sequence in zip(table_NC, sequences, strict=True):
            row[: len(sequence.blocks)] = sequence.blocks

        owner_T = np.repeat(np.arange(len(sequences)), size_N)
        positions_T = np.arange(len(owner_T)) + (start_N - first_N)[owner_T]
        block_size = cache.block_size
        slots_T = table_NC[owner_T, positions_T // block_size] * block_size + positions_T % block_size
        self.positions_T, self._slots_T = upload_all([positions_T, slots_T], device)
        self._spans = first_N, size_N, start_N, table_NC
        self._visible_counts_N = [s.visible_counts for s in sequences]
        self._contiguous: list[ContiguousStep] = []
        is_decoding_N = (size_N == 1) & (start_N > 0)
        self._is_paged_N = np.zeros(len(sequences), np.bool_)
        if self._kernels is not None:
            self._is_paged_N = (
                (start_N > 0) & (size_N <= PAGED_ROWS) & np.array([s.visible_counts is None for s in sequences])
            )
        is_gathered_N = ~self._is_paged_N
        if contiguous is not None:
            decoding = np.flatnonzero(is_decoding_N).tolist()
            members = [
                DecodeRow(sequences[i].owner, int(first_N[i]), sequences[i].start, sequences[i].blocks)
                for i in decoding
            ]
            self._contiguous, rows = contiguous.assign_slots(members, len(owner_T))
            is_gathered_N[owner_T[rows]] = False
        self._is_gathered_N = is_gathered_N

    @cached_property
    def _groups(self) -> list[_Group]:
        _, size_N, start_N, _ = self._spans
        return [self._group(members, *self._spans) for members in _buckets(start_N, size_N, self._is_gathered_N)]

    @cached_property
    def _pages(self) -> _Pages | None:
        if not self._is_paged_N.any():
            return None
        first_N, size_N, start_N, table_NC = self._spans
        owner_T = np.repeat(np.arange(len(size_N)), size_N)
        row_n = np.flatnonzero(self._is_paged_N[owner_T])
        owner_n = owner_T[row_n]
        keys_n = start_N[owner_n] + row_n - first_N[owner_n] + 1
        table_nC = table_NC[owner_n, : -(-int(keys_n.max()) // self._cache.block_size)]
        keys, table = upload_all([x.astype(np.int32).ravel() for x in (keys_n, table_nC)], self._device)
        first, stop = int(row_n[0]), int(row_n[-1]) + 1
        rows = slice(first, stop) if stop - first == len(row_n) else upload(row_n, self._device)
        return _Pages(rows, table.view(table_nC.shape), keys)

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        self._cache.write(
            layer, self._slots_T[self._written_rows], k_TGD[self._written_rows], v_TGD[self._written_rows]
        )
        out_THD = None
        for rows, part in self._parts(layer, q_THD, k_TGD, v_TGD, **options):
            if rows is None:
                return part
            if out_THD is None:
                out_THD = part.new_empty(len(q_THD), *part.shape[1:])
            if isinstance(rows, slice):
                out_THD[rows] = part
            else:
                out_THD.index_copy_(0, rows, part)
        assert out_THD is not None
        return out_THD

    def _parts(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Iterator[tuple[Tensor | slice | None, Tensor]]:
        """Rows of the step, None for all of them in order, and their results."""
        for contiguous in self._contiguous:
            yield contiguous.row_n, contiguous.attend(layer, q_THD, k_TGD, v_TGD, **options)
        if self._kernels is not None and (pages := self._pages) is not None:
            rows, is_all = pages.rows, len(pages.keys_n) == len(q_THD)
            q_nHD = q_THD[rows] if isinstance(rows, slice) else q_THD.index_select(0, rows)
            kernel_inputs = q_nHD, self._cache.pages(layer), pages.table_nC, pages.keys_n
            key_dim = self._cache.shape(layer).key_dim
            yield None if is_all else rows, self._kernels.paged_attention(*kernel_inputs, key_dim=key_dim, **options)
        for group in self._groups:
            part = self._attend_group(group, layer, q_THD, k_TGD, v_TGD, **options)
            if group.real is None:
                yield None if len(part) == len(q_THD) else group.rows_nL, part
            else:
                cells, rows = group.real
                yield rows, part.index_select(0, cells)

    def mix(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        assert self._recurrence is not None
        return self._recurrence.mix(mixer, x_TD)

    def _attend_group(
        self, group: _Group, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor,
        **options: Unpack[AttentionOptions],
    ) -> Tensor:  # fmt: skip
        """[n * L, H, D]"""
        q_nLHD = self._gather_rows(group, q_THD)
        if group.blocks_nC is None:
            k_nGKD, v_nGKD = (self._gather_rows(group, x).transpose(1, 2) for x in (k_TGD, v_TGD))
        else:
            k_nGKD, v_nGKD = self._cache.read(layer, group.blocks_nC)
        mask = self._mask(group, options.get("window"), k_nGKD)
        if mask is not None and group.num_rows == 1:
            return decode(q_nLHD[:, 0], k_nGKD, v_nGKD, mask, **options)
        return prefill(q_nLHD.transpose(1, 2), k_nGKD, v_nGKD, mask, **options).transpose(1, 2).flatten(0, 1)

    def _group(self, members: I64, first_N: I64, size_N: I64, start_N: I64, table_NC: I64) -> _Group:
        num, length = len(members), int(size_N[members].max())
        cell_L = np.arange(length)
        offset_nL = np.minimum(cell_L, size_N[members, None] - 1)
        rows_nL = first_N[members, None] + offset_nL
        positions_nL = start_N[members, None] + offset_nL
        table = None
        if start_N[members].any():
            num_blocks = -(-int((start_N + size_N)[members].max()) // self._cache.block_size)
            table = upload(table_NC[members, :num_blocks], self._device)
        positions = upload(positions_nL.ravel(), self._device)
        visible_nL = self._visible_counts(members, positions_nL, offset_nL)
        first, last = int(rows_nL[0, 0]), int(rows_nL[-1, -1])
        if last - first + 1 == size_N[members].sum() == num * length:
            return _Group(num, length, slice(first, last + 1), None, table, positions, visible_nL, {})
        real_cells = np.flatnonzero(cell_L < size_N[members, None])
        rows, *real = upload_all([rows_nL.ravel(), real_cells, rows_nL.ravel()[real_cells]], self._device)
        return _Group(num, length, rows, (real[0], real[1]), table, positions, visible_nL, {})

    def _visible_counts(self, members: I64, positions_nL: I64, offset_nL: I64) -> Tensor | None:
        """[n, L]: how many positions each row of a group sees; None: those up to its own. Padding repeats a row."""
        if all(self._visible_counts_N[member] is None for member in members):
            return None
        visible_nL = positions_nL + 1
        for row, member in enumerate(members):
            if (counts := self._visible_counts_N[member]) is not None:
                visible_nL[row] = counts[offset_nL[row]]
        return upload(visible_nL, self._device)

    def _gather_rows(self, group: _Group, x_THD: Tensor) -> Tensor:
        """[n, L, H, D]"""
        group_rows = group.rows_nL
        rows = x_THD[group_rows] if isinstance(group_rows, slice) else x_THD.index_select(0, group_rows)
        return rows.view(group.num, group.num_rows, *x_THD.shape[1:])

    def _mask(self, group: _Group, window: Window | None, k_nGKD: Tensor) -> Tensor | None:
        """The mask that is added to a group's scores, the same for all layers; None if causal attention needs none."""
        num_keys = k_nGKD.shape[2]
        if window is not None and window.size >= num_keys:
            window = None
        if group.blocks_nC is None and window is None and group.visible_nL is None:
            return None
        if window not in group.masks:
            # Rows without a cache are numbered from 0, as their keys are; padding repeats the last row.
            position_nL = group.positions_nL.view(group.num, group.num_rows)
            group.masks[window] = visibility_mask(position_nL, num_keys, window, k_nGKD.dtype, group.visible_nL)
        return group.masks[window]


def _buckets(start_N: I64, size_N: I64, is_gathered_N: npt.NDArray[np.bool_]) -> list[I64]:
    """Indices of the sequences in `is_gathered_N`, grouped by kernel call: of one kind and of similar length."""
    keys_N = start_N + size_N
    # Decoding rows (one row after a cached context), fresh prompts, and continued prompts by the magnitude of their
    # size.
    kind_N = np.where(start_N == 0, 0, np.where(size_N == 1, 1, 1 + np.ceil(np.log2(size_N)).astype(np.int64)))
    buckets = []
    for kind in np.unique(kind_N[is_gathered_N]):
        members = np.flatnonzero((kind_N == kind) & is_gathered_N)
        order = members[np.argsort(-keys_N[members], kind="stable")]
        longest_first = keys_N[order]
        begin = 0
        while begin < len(order):
            longest = longest_first[begin]
            waste = max(MIN_WASTE, MAX_WASTE * longest)
            end = begin + int(np.searchsorted(longest - longest_first[begin:], waste, side="right"))
            buckets.append(np.sort(order[begin:end]))
            begin = end
    return buckets
