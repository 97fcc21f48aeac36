"""Keys and values of decoding sequences side by side, so that a step attends to them without gathering their blocks.

Blocks are the truth: prefixes are shared by them, and whoever leaves a strip finds everything there. A strip is a copy
of one sequence's blocks in tensors of a fixed number of cells, which every decode step extends by one. Sequences of a
similar length share a group of strips, whose attention is two batched products, each sequence a batch of its own: none
are mixed, and shapes stay the same from step to step. Keys are float32: scores are not rounded before their softmax.

A strip is its sequence's as long as every step computes it. Few sequences of a length, and more than there is room for,
stay with their blocks. Used on CPUs, where the fused kernel is slow for one row a sequence.

Letters: n rows, N strips of a group, C cells of a strip, K those that a step sees, H query heads, G key heads,
R = H / G, D head dim, b = N * G.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from tinsmith.backends.torch.attention import AttentionOptions
from tinsmith.samplers.local.kv_cache import KVCache, LayerShape
from tinsmith.types import I64

FEWEST = 4
"""Sequences of one length class that are worth a group; below, blocks are as fast."""

CELLS = 64
"""Strips have this many cells, or a multiple: 1, 2, 3, 4, 6, 8, 12 ... times."""

SEEN = 32
"""Values are multiplied of as many cells as a step's longest sequence fills, rounded up to a multiple of this. Keys are
of all cells: torch copies float32 matrices whose stack has gaps, which takes longer than what is left out.
"""

SWAPPED_DIM = 64
"""Numbers of a key from which on the product of keys and queries is faster than that of queries and keys, the scores'
transposition included: 64 sequences of 128 positions with 4 key heads and 2 queries each, 450 us against 627; with 32
numbers 39 against 24 for 16 sequences.
"""

SIZES = (8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Strips of a group; beyond, multiples of the last."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """A sequence whose token at `position` is computed in this step, behind what its blocks hold."""

    owner: Hashable
    row: int
    position: int
    blocks: Sequence[int]


def capacity_for(length: int, block_size: int) -> int:
    """The cells of the strip of a sequence of this length."""
    units = -(-length // CELLS)
    power = 1 << (units.bit_length() - 1)
    if units > power:
        power = power * 3 // 2 if power > 1 and units <= power * 3 // 2 else 2 * power
    return -(-power * CELLS // block_size) * block_size


class Strips:
    """One group: sequences of at most `capacity` tokens. Strips in use are the first `num_used` or fewer."""

    def __init__(self, shapes: Mapping[LayerShape, Sequence[int]], capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.num_strips = 0
        self.num_used = 0
        self._shapes = shapes
        self._device = device
        self._owners: dict[Hashable, int] = {}
        self._free: list[int] = []  # a heap: the first free strip comes first
        self._lengths: I64 = np.zeros(0, np.int64)
        self._stores: dict[LayerShape, tuple[Tensor, Tensor]] = {}
        self._layers: dict[int, tuple[Tensor, Tensor, LayerShape]] = {}
        self._views: dict[int, LayerViews] = {}
        self._viewed = (0, 0)

    @property
    def is_empty(self) -> bool:
        return not self._owners

    @property
    def num_bytes(self) -> int:
        return self.num_strips * self.capacity * cell_bytes(self._shapes)

    def length_of(self, owner: Hashable) -> int:
        """How many tokens the owner's strip holds; -1 without a strip."""
        strip = self._owners.get(owner)
        return -1 if strip is None else int(self._lengths[strip])

    def keep(self, owners: Iterable[Hashable]) -> None:
        """Free the strips of all others."""
        for owner in self._owners.keys() - set(owners):
            heapq.heappush(self._free, self._owners.pop(owner))

    def grow(self, num_strips: int) -> None:
        """What is in strips stays there. New strips hold anything until they are filled."""
        for shape, layers in self._shapes.items():
            size = (len(layers), num_strips, shape.num_heads, self.capacity)
            keys = torch.empty(*size, shape.key_dim, device=self._device)
            values = torch.empty(*size, shape.value_dim, dtype=shape.dtype, device=self._device)
            if self._owners:
                old_keys, old_values = self._stores[shape]
                keys[:, : self.num_used] = old_keys[:, : self.num_used]
                values[:, : self.num_used] = old_values[:, : self.num_used]
            self._stores[shape] = keys, values
            for place, layer in enumerate(layers):
                self._layers[layer] = keys[place], values[place], shape
        self._viewed = (0, 0)
        self._lengths = np.append(self._lengths, np.zeros(num_strips - self.num_strips, np.int64))
        self._free += range(self.num_strips, num_strips)
        heapq.heapify(self._free)
        self.num_strips = num_strips

    def close_up(self) -> None:
        """Where fewer than half of the strips that are computed are somebody's, the last ones move to the front."""
        wanted = _size(len(self._owners))
        last = max(self._owners.values(), default=-1)
        if 2 * wanted <= _size(last + 1):
            for owner, strip in self._owners.items():
                if strip >= wanted:
                    target = self._owners[owner] = heapq.heappop(self._free)
                    heapq.heappush(self._free, strip)
                    self._lengths[target] = self._lengths[strip]
                    for keys, values in self._stores.values():
                        keys[:, target] = keys[:, strip]
                        values[:, target] = values[:, strip]
            last = max(self._owners.values(), default=-1)
        self.num_used = min(_size(last + 1), self.num_strips)

    def fill(self, members: Sequence[Decoding], cache: KVCache) -> None:
        """Copy what the blocks of these hold into strips, which are cleared behind it."""
        strips = []
        for member in members:
            if member.owner not in self._owners:
                self._owners[member.owner] = heapq.heappop(self._free)
            strips.append(self._owners[member.owner])
            self._lengths[strips[-1]] = member.position
        table_nC = np.zeros((len(members), self.capacity // cache.block_size), np.int64)  # block 0 holds zeros
        for row, member in zip(table_nC, members, strict=True):
            used = -(-member.position // cache.block_size)
            row[:used] = member.blocks[:used]
        blocks_nC = torch.from_numpy(table_nC).to(self._device)
        strips_n = torch.tensor(strips, device=self._device)
        for shape, (keys, values) in self._stores.items():
            cells = cache.gather(shape, blocks_nC).transpose(2, 3)  # [layers, n, G, K, D]
            keys.index_copy_(1, strips_n, cells[..., : shape.key_dim].float())
            values.index_copy_(1, strips_n, cells[..., shape.key_dim :])

    def step(self, members: Sequence[Decoding], num_rows: int) -> StripStep:
        """What the attention of every layer needs; the members' strips count their tokens as there from now on."""
        strip_n = np.array([self._owners[member.owner] for member in members])
        row_n = np.array([member.row for member in members])
        position_n = np.array([member.position for member in members])
        row_N = np.full(self.num_used, row_n[0])  # a strip that is not used computes something for nobody
        row_N[strip_n] = row_n
        position_N = np.zeros(self.num_used, np.int64)
        position_N[strip_n] = position_n
        self._lengths[strip_n] = position_n + 1
        in_order = num_rows == self.num_used and np.array_equal(row_N, np.arange(num_rows))
        return StripStep(
            self._seen(int(position_n.max()) + 1),
            self.num_used,
            self.capacity,
            self._viewed[1],
            None if num_rows == len(members) else self._tensor(row_n),
            self._tensor(strip_n),
            None if in_order else self._tensor(row_N),
            self._tensor(position_n),
            self._tensor(position_N),
            {},
            {},
        )

    def _seen(self, length: int) -> Mapping[int, LayerViews]:
        """Each layer's tensors as a step sees them whose longest sequence has this length; kept while it stays so."""
        cells = min(-(-length // SEEN) * SEEN, self.capacity)
        if self._viewed != (self.num_used, cells):
            self._viewed = self.num_used, cells
            for layer, (keys, values, shape) in self._layers.items():
                num = self.num_used * shape.num_heads
                self._views[layer] = LayerViews(
                    keys.view(-1, shape.key_dim),
                    values.view(-1, shape.value_dim),
                    keys.flatten(0, 1)[:num],
                    values.flatten(0, 1)[:num, :cells],
                )
        return self._views

    def _tensor(self, array: I64) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class LayerViews(NamedTuple):
    """One layer's strips: all cells below each other, and those that a step multiplies, by strip and head."""

    keys: Tensor  # [cells, D]
    values: Tensor
    keys_bCD: Tensor
    values_bKD: Tensor


@dataclass(slots=True)
class StripStep:
    """A step's attention over one group."""

    layers: Mapping[int, LayerViews]
    num_strips: int
    capacity: int
    num_seen: int
    row_n: Tensor | None  # the step's rows that are the members'; None: all, in their order
    strip_n: Tensor
    row_N: Tensor | None  # of each strip; None: all, in their order
    position_n: Tensor
    position_N: Tensor
    cells: dict[int, Tensor]  # by key heads
    masks: dict[int | None, Tensor]

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        """[n, H, D]"""
        keys, values, keys_bCD, values_bKD = self.layers[layer]
        num, groups = self.num_strips, len(keys_bCD) // self.num_strips
        at = self._cells(groups)
        if self.row_n is not None:
            k_TGD, v_TGD = k_TGD.index_select(0, self.row_n), v_TGD.index_select(0, self.row_n)
        keys.index_copy_(0, at, k_TGD.float().reshape(-1, keys.shape[1]))
        values.index_copy_(0, at, v_TGD.reshape(-1, values.shape[1]))

        q_NHD = q_THD if self.row_N is None else q_THD.index_select(0, self.row_N)
        repeat = q_NHD.shape[1] // groups
        products_bRC = _products(q_NHD.float().reshape(num * groups, repeat, -1), keys_bCD)
        products_NGRK = products_bRC.view(num, groups, repeat, -1)[..., : self.num_seen]
        scale = options["scale"]
        if (softcap := options.get("softcap")) is not None:
            products_NGRK, scale = softcap * torch.tanh(products_NGRK * (scale / softcap)), 1.0
        scores_NGRK = torch.empty(products_NGRK.shape, device=keys.device)
        torch.add(self._mask(options.get("window")), products_NGRK, alpha=scale, out=scores_NGRK)
        if (sinks_H := options.get("sinks_H")) is not None:
            sinks = sinks_H.float().view(1, groups, repeat, 1).expand(num, -1, -1, -1)
            probs_NGRK = torch.softmax(torch.cat([scores_NGRK, sinks], -1), -1)[..., :-1]
        else:
            probs_NGRK = torch.softmax(scores_NGRK, -1)
        probs_bRK = probs_NGRK.reshape(num * groups, repeat, self.num_seen).to(values.dtype)
        out_NHD = torch.bmm(probs_bRK, values_bKD).view(num, groups * repeat, -1)
        return out_NHD if self.row_N is None else out_NHD.index_select(0, self.strip_n)

    def _cells(self, groups: int) -> Tensor:
        """[n * G]: where the step's keys and values go."""
        if groups not in self.cells:
            heads_G = torch.arange(groups, device=self.strip_n.device)
            at_nG = (self.strip_n[:, None] * groups + heads_G) * self.capacity + self.position_n[:, None]
            self.cells[groups] = at_nG.flatten()
        return self.cells[groups]

    def _mask(self, window: int | None) -> Tensor:
        """[N, 1, 1, K]: 0 where a strip's row sees a cell, else -inf. Made once for all layers."""
        if window is not None and window >= self.num_seen:
            window = None
        if window not in self.masks:
            key_K = torch.arange(self.num_seen, device=self.position_N.device)
            hidden_NK = key_K > self.position_N[:, None]
            if window is not None:
                hidden_NK |= key_K <= self.position_N[:, None] - window
            mask_NK = torch.zeros(hidden_NK.shape, device=key_K.device).masked_fill_(hidden_NK, float("-inf"))
            self.masks[window] = mask_NK[:, None, None]
        return self.masks[window]


def _products(q_bRD: Tensor, keys_bCD: Tensor) -> Tensor:
    """[b, R, C], in whatever order in memory."""
    if q_bRD.shape[-1] < SWAPPED_DIM or not q_bRD.is_cpu:
        return torch.bmm(q_bRD, keys_bCD.mT)
    return torch.bmm(keys_bCD, q_bRD.mT).mT


class StripCache:
    """All groups of one KVCache, in at most `max_bytes`."""

    def __init__(self, cache: KVCache, max_bytes: int, device: torch.device) -> None:
        self._cache = cache
        self._max_bytes = max_bytes
        self._device = device
        self._groups: dict[int, Strips] = {}

    @property
    def num_bytes(self) -> int:
        return sum(group.num_bytes for group in self._groups.values())

    def limit(self, max_bytes: int) -> None:
        """Hold at most so much from now on; what is held beyond it is dropped, since blocks have it all."""
        self._max_bytes = max_bytes
        if self.num_bytes > max_bytes:
            self._groups.clear()

    def clear(self) -> None:
        """Hold nothing, until the next step: a step was cut off, and strips may say that they have what they lack."""
        self._groups.clear()

    def place(self, decoding: Sequence[Decoding], num_rows: int) -> tuple[list[StripStep], list[int]]:
        """A step's groups, and the rows that have their place in one."""
        classes: dict[int, list[Decoding]] = {}
        for one in decoding:
            classes.setdefault(capacity_for(one.position + 1, self._cache.block_size), []).append(one)
        classes = {capacity: members for capacity, members in classes.items() if len(members) >= FEWEST}
        for capacity, group in self._groups.items():
            group.keep(one.owner for one in classes.get(capacity, ()))
        steps: list[StripStep] = []
        rows: list[int] = []
        for capacity, members in classes.items():
            group = self._group(capacity, members)
            if group is None:
                continue
            if new := [one for one in members if group.length_of(one.owner) != one.position]:
                group.fill(new, self._cache)
            group.close_up()
            steps.append(group.step(members, num_rows))
            rows += [one.row for one in members]
        return steps, rows

    def _group(self, capacity: int, members: Sequence[Decoding]) -> Strips | None:
        """The group, with a strip for each of these; None if there is no room for it."""
        group = self._groups.get(capacity)
        if group is None:
            group = Strips(self._cache.members, capacity, self._device)
        if group.num_strips < len(members):
            wanted = _size(len(members))
            added = wanted * capacity * cell_bytes(self._cache.members) - group.num_bytes
            self._drop_unused(added, group)
            if self.num_bytes + added > self._max_bytes:
                return None
            group.grow(wanted)
        self._groups[capacity] = group
        return group

    def _drop_unused(self, num_bytes: int, but: Strips) -> None:
        for capacity, group in list(self._groups.items()):
            if self.num_bytes + num_bytes > self._max_bytes and group.is_empty and group is not but:
                del self._groups[capacity]


def cell_bytes(members: Mapping[LayerShape, Sequence[int]]) -> int:
    """What one token takes in a strip, all layers together."""
    return sum(
        len(layers) * shape.num_heads * (4 * shape.key_dim + shape.dtype.itemsize * shape.value_dim)
        for shape, layers in members.items()
    )


def _size(num: int) -> int:
    return next((size for size in SIZES if size >= num), -(-num // SIZES[-1]) * SIZES[-1])
