"""Attention over the paged cache: a step's rows, each against its own sequence's blocks.

`PagedPlan` is the AttentionPlan of one step. Each layer's call first writes the step's keys and values into
the cache and then attends, in as few kernel calls as the step allows: all decoding rows of similar context
length together (in `strips`, if they have some), fresh prompts of similar length together without reading the
cache, and chunks that continue a prompt together. Every sequence has a batch row of its own in those calls, and
padding is its own last row or the null block, so a NaN stays with its sequence.

Letters: T rows of the step, N sequences, n sequences of a group, L rows of a sequence padded, K cached
positions padded, C blocks of a table, H query heads, G key heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinsmith.backends.torch.attention import AttentionOptions, Mixer, decode, prefill
from tinsmith.samplers.local.contiguous_kv import Decoding, StripCache, StripStep
from tinsmith.samplers.local.kv_cache import KVCache
from tinsmith.samplers.local.states import Recurrence

I64 = npt.NDArray[np.int64]

MAX_WASTE = 0.25  # of a group's longest member; below MIN_WASTE positions nobody minds
MIN_WASTE = 64
ALL = slice(None)


class Rows(NamedTuple):
    """A sequence's part of a step: `stop - start` tokens behind `start` cached ones. An `owner` that decodes may have a
    strip.
    """

    start: int
    stop: int
    blocks: Sequence[int]
    owner: Hashable = None


@dataclass(slots=True)
class _Group:
    """Sequences that share a kernel call. `rows_nL` a slice: the step's rows as they lie there."""

    num: int
    num_rows: int  # L
    rows_nL: Tensor | slice  # flat; padded with the sequence's own last row
    real: tuple[Tensor, Tensor] | None  # (padded cell, row of the step) of every row that is not padding
    blocks_nC: Tensor | None  # None: nothing is cached before these rows, so they only see each other
    positions_nL: Tensor  # flat
    masks: dict[int | None, Tensor | None]


class PagedPlan:
    """`positions_T` are the rows' positions; rows follow each other in the order of `sequences`. Keys and values of the
    rows in `written` go into the cache. `recurrence` is the same rows' for layers that keep a state.
    """

    def __init__(
        self,
        cache: KVCache,
        sequences: Sequence[Rows],
        device: torch.device,
        strips: StripCache | None = None,
        *,
        written: slice = ALL,
        recurrence: Recurrence | None = None,
    ) -> None:
        self._written = written
        self._recurrence = recurrence
        self._cache = cache
        self._device = device
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
        self.positions_T = self._tensor(positions_T)
        self._slots_T = self._tensor(slots_T)
        self._strips: list[StripStep] = []
        kept_N = np.ones(len(sequences), np.bool_)
        if strips is not None:
            decoding = np.flatnonzero((size_N == 1) & (start_N > 0)).tolist()
            members = [
                Decoding(sequences[i].owner, int(first_N[i]), sequences[i].start, sequences[i].blocks) for i in decoding
            ]
            self._strips, rows = strips.place(members, len(owner_T))
            kept_N[owner_T[rows]] = False
        self._groups = [
            self._group(members, first_N, size_N, start_N, table_NC) for members in _buckets(start_N, size_N, kept_N)
        ]

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        self._cache.write(layer, self._slots_T[self._written], k_TGD[self._written], v_TGD[self._written])
        out_THD = None
        for strips in self._strips:
            part = strips.attend(layer, q_THD, k_TGD, v_TGD, **options)
            if strips.row_n is None:
                return part
            if out_THD is None:
                out_THD = part.new_empty(len(q_THD), *part.shape[1:])
            out_THD.index_copy_(0, strips.row_n, part)
        for group in self._groups:
            part = self._attend_group(group, layer, q_THD, k_TGD, v_TGD, **options)
            if len(part) == len(q_THD) and group.real is None:
                return part
            if out_THD is None:
                out_THD = part.new_empty(len(q_THD), *part.shape[1:])
            if group.real is None:
                out_THD[group.rows_nL] = part
            else:
                cells, rows = group.real
                out_THD.index_copy_(0, rows, part.index_select(0, cells))
        assert out_THD is not None
        return out_THD

    def mix(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        assert self._recurrence is not None
        return self._recurrence.mix(mixer, x_TD)

    def _attend_group(
        self, group: _Group, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor,
        **options: Unpack[AttentionOptions],
    ) -> Tensor:  # fmt: skip
        """[n * L, H, D]"""
        q_nLHD = self._own(group, q_THD)
        if group.blocks_nC is None:
            k_nGKD, v_nGKD = (self._own(group, x).transpose(1, 2) for x in (k_TGD, v_TGD))
        else:
            k_nGKD, v_nGKD = self._cache.read(layer, group.blocks_nC)
        mask = self._mask(group, options.get("window"), k_nGKD)
        if mask is not None and group.num_rows == 1:
            return decode(q_nLHD[:, 0], k_nGKD, v_nGKD, mask, **options)
        return prefill(q_nLHD.transpose(1, 2), k_nGKD, v_nGKD, mask, **options).transpose(1, 2).flatten(0, 1)

    def _tensor(self, array: I64) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _group(self, members: I64, first_N: I64, size_N: I64, start_N: I64, table_NC: I64) -> _Group:
        num, length = len(members), int(size_N[members].max())
        cell_L = np.arange(length)
        own_nL = np.minimum(cell_L, size_N[members, None] - 1)
        rows_nL = first_N[members, None] + own_nL
        positions_nL = start_N[members, None] + own_nL
        table = None
        if start_N[members].any():
            num_blocks = -(-int((start_N + size_N)[members].max()) // self._cache.block_size)
            table = self._tensor(table_NC[members, :num_blocks])
        positions = self._tensor(positions_nL.ravel())
        first, last = int(rows_nL[0, 0]), int(rows_nL[-1, -1])
        if last - first + 1 == size_N[members].sum() == num * length:
            return _Group(num, length, slice(first, last + 1), None, table, positions, {})
        kept = np.flatnonzero(cell_L < size_N[members, None])
        real = (self._tensor(kept), self._tensor(rows_nL.ravel()[kept]))
        return _Group(num, length, self._tensor(rows_nL.ravel()), real, table, positions, {})

    def _own(self, group: _Group, x_THD: Tensor) -> Tensor:
        """[n, L, H, D]"""
        at = group.rows_nL
        rows = x_THD[at] if isinstance(at, slice) else x_THD.index_select(0, at)
        return rows.view(group.num, group.num_rows, *x_THD.shape[1:])

    def _mask(self, group: _Group, window: int | None, k_nGKD: Tensor) -> Tensor | None:
        """What a group adds to its scores; None if being causal says it all. Made once for all layers."""
        num_keys = k_nGKD.shape[2]
        if window is not None and window >= num_keys:
            window = None
        if group.blocks_nC is None and window is None:
            return None
        if window not in group.masks:
            group.masks[window] = self._visible(group, num_keys, window, k_nGKD.dtype)
        return group.masks[window]

    def _visible(self, group: _Group, num_keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
        # Rows without a cache are numbered from 0 as their keys are, and padding repeats the last row.
        return visible(group.positions_nL.view(group.num, group.num_rows), num_keys, window, dtype)


def visible(position_nL: Tensor, num_keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """[n, 1, L, K]: 0 where a row at its position sees one of K positions, else -inf."""
    key_K = torch.arange(num_keys, device=position_nL.device)
    row_nL1 = position_nL[..., None]
    hidden_nLK = key_K > row_nL1
    if window is not None:
        hidden_nLK |= key_K <= row_nL1 - window
    mask_nLK = torch.zeros(hidden_nLK.shape, dtype=dtype, device=position_nL.device)
    return mask_nLK.masked_fill_(hidden_nLK, float("-inf"))[:, None]


def _buckets(start_N: I64, size_N: I64, kept_N: npt.NDArray[np.bool_]) -> list[I64]:
    """Indices of those to be kept that share a kernel call: of one kind, and of similar length."""
    keys_N = start_N + size_N
    # Decoding rows (one row, something cached), fresh prompts, and continued prompts by the magnitude of
    # their size.
    kind_N = np.where(start_N == 0, 0, np.where(size_N == 1, 1, 1 + np.ceil(np.log2(size_N)).astype(np.int64)))
    buckets = []
    for kind in np.unique(kind_N[kept_N]):
        members = np.flatnonzero((kind_N == kind) & kept_N)
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
