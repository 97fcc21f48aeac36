"""A contiguous KV cache for decoding sequences, so that a decode step attends to them without gathering their blocks.

The paged cache stays authoritative: it holds every token and shares prefixes between sequences. A slot is a copy of one
sequence's blocks, or of those after its `shared_prefixes.Prefix`, with a fixed capacity; each decode step appends one
position to it. Sequences of similar length share a `SlotGroup`. Rows of different sequences are never mixed, and shapes
stay the same from step to step.

On Intel's processors a bfloat16 group's attention is SDPA, whose scores are float32. Otherwise it is two batched
matmuls with one entry per sequence and key head, of float32 keys, so that scores are not rounded before their
softmax.

A sequence keeps its slot while every step decodes it. Sequences stay with their blocks if a length class has too few of
them, or if there is no memory for the group. Used on CPUs.

Letters: n rows, N slots of a group, C positions of a slot, K positions that a step attends to, H query heads, G key
heads, R = H / G, D head dim, b = N * G.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tinsmith.backends.torch.attention import AttentionOptions, Window, has_plain_scores
from tinsmith.backends.torch.matmul import SUITS_MKL
from tinsmith.runtime.devices import is_on_host
from tinsmith.samplers.local.kv_cache import KVCache, LayerShape
from tinsmith.samplers.local.shared_prefixes import DecodeRow, Prefix, PrefixRows, SharedPrefixes, attend_prefixes
from tinsmith.types import I64

MIN_GROUP_SIZE = 4
"""Fewest sequences of a length class that get a group; with fewer, blocks are as fast."""

CAPACITY_STEP = 64
"""The capacity of a slot is this number of positions times 1, 2, 3, 4, 6, 8, 12 ..."""

LENGTH_STEP = 32
"""The matmul with values covers the step's longest sequence, rounded up to a multiple of this many positions. The
matmul with keys covers all, except on Intel's processors: elsewhere torch takes longer for a stack of float32 matrices
with gaps.
"""

MIN_SWAPPED_DIM = 64
"""Head dim from which keys @ queries plus a transposition of the scores is faster than queries @ keys, except on
Intel's processors.
"""

GROUP_SIZES = (8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Slots of a group; larger groups have multiples of the last number."""


def capacity_for(length: int, block_size: int) -> int:
    """The capacity of the slot for a sequence of this length, a multiple of the block size."""
    units = -(-length // CAPACITY_STEP)
    power = 1 << (units.bit_length() - 1)
    if units > power:
        power = power * 3 // 2 if power > 1 and units <= power * 3 // 2 else 2 * power
    return -(-power * CAPACITY_STEP // block_size) * block_size


class SlotGroup:
    """Slots for sequences of at most `capacity` tokens. Slots in use are among the first `num_used`."""

    def __init__(self, shapes: Mapping[LayerShape, Sequence[int]], capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.num_slots = 0
        self.num_used = 0
        self._shapes = shapes
        self._device = device
        self._owners: dict[Hashable, int] = {}
        self._free: list[int] = []  # a heap: the lowest slot is taken first
        self._lengths: I64 = np.zeros(0, np.int64)
        self._stores: dict[LayerShape, tuple[Tensor, Tensor]] = {}
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._owners

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.capacity * position_bytes(self._shapes)

    def length_of(self, owner: Hashable) -> int:
        """How many tokens the owner's slot holds; -1 without a slot."""
        slot = self._owners.get(owner)
        return -1 if slot is None else int(self._lengths[slot])

    def retain(self, owners: Iterable[Hashable]) -> None:
        """Free the slots of all other owners."""
        for owner in self._owners.keys() - set(owners):
            heapq.heappush(self._free, self._owners.pop(owner))

    def grow(self, num_slots: int) -> None:
        """Keeps the contents of slots in use. New slots are uninitialised until they are filled."""
        for shape, layers in self._shapes.items():
            size = (len(layers), num_slots, shape.num_heads, self.capacity)
            keys = torch.empty(*size, shape.key_dim, dtype=key_dtype(shape), device=self._device)
            values = torch.empty(*size, shape.value_dim, dtype=shape.dtype, device=self._device)
            if self._owners:
                old_keys, old_values = self._stores[shape]
                keys[:, : self.num_used] = old_keys[:, : self.num_used]
                values[:, : self.num_used] = old_values[:, : self.num_used]
            self._stores[shape] = keys, values
            for index, layer in enumerate(layers):
                self._layers[layer] = keys[index], values[index]
        self._lengths = np.append(self._lengths, np.zeros(num_slots - self.num_slots, np.int64))
        self._free += range(self.num_slots, num_slots)
        heapq.heapify(self._free)
        self.num_slots = num_slots

    def compact(self) -> None:
        """Move the last slots to the front if fewer than half of the computed slots are in use."""
        compact_size = _group_size(len(self._owners))
        last = max(self._owners.values(), default=-1)
        if 2 * compact_size <= _group_size(last + 1):
            for owner, slot in self._owners.items():
                if slot >= compact_size:
                    target = self._owners[owner] = heapq.heappop(self._free)
                    heapq.heappush(self._free, slot)
                    self._lengths[target] = self._lengths[slot]
                    for keys, values in self._stores.values():
                        keys[:, target] = keys[:, slot]
                        values[:, target] = values[:, slot]
            last = max(self._owners.values(), default=-1)
        self.num_used = min(_group_size(last + 1), self.num_slots)

    def fill(self, members: Sequence[DecodeRow], cache: KVCache) -> None:
        """Copy the members' blocks into their slots and zero the rest of each slot."""
        size = cache.block_size
        for member in members:
            if member.owner not in self._owners:
                self._owners[member.owner] = heapq.heappop(self._free)
            slot = self._owners[member.owner]
            self._lengths[slot] = member.position
            blocks = member.blocks[member.base // size : -(-member.position // size)]
            stop = len(blocks) * size
            blocks_1C = torch.tensor([blocks], dtype=torch.int64, device=self._device)
            for shape, (keys, values) in self._stores.items():
                keys[:, slot, :, stop:] = values[:, slot, :, stop:] = 0.0
                if blocks:
                    gathered = cache.gather(shape, blocks_1C)[:, 0].transpose(1, 2)  # [layers, G, K, D]
                    keys[:, slot, :, :stop] = gathered[..., : shape.key_dim]
                    values[:, slot, :, :stop] = gathered[..., shape.key_dim :]

    def step(self, members: Sequence[DecodeRow], num_rows: int) -> ContiguousStep:
        """The inputs of every layer's attention. From now on the members' slots count this step's token."""
        slot_n = np.array([self._owners[member.owner] for member in members])
        row_n = np.array([member.row for member in members])
        position_n = np.array([member.position for member in members])
        base_n = np.array([member.base for member in members])
        row_N = np.full(self.num_used, row_n[0])  # the result of an unused slot is discarded
        row_N[slot_n] = row_n
        at_N, base_N = np.zeros((2, self.num_used), np.int64)
        at_N[slot_n], base_N[slot_n] = position_n - base_n, base_n
        self._lengths[slot_n] = position_n + 1
        in_order = num_rows == self.num_used and np.array_equal(row_N, np.arange(num_rows))
        num_attended = -(-(int(at_N.max()) + 1) // LENGTH_STEP) * LENGTH_STEP
        return ContiguousStep(
            self._layers,
            self.num_used,
            self.capacity,
            min(num_attended, self.capacity),
            None if num_rows == len(members) else self._tensor(row_n),
            self._tensor(slot_n),
            None if in_order else self._tensor(row_N),
            self._tensor(position_n - base_n),
            self._tensor(at_N),
            self._tensor(base_N),
            self._list_prefix_rows(members, slot_n, position_n),
            {},
            {},
        )

    def _list_prefix_rows(self, members: Sequence[DecodeRow], slot_n: I64, position_n: I64) -> list[PrefixRows]:
        indices_of: dict[Prefix, list[int]] = {}
        for index, member in enumerate(members):
            if member.prefix is not None:
                indices_of.setdefault(member.prefix, []).append(index)
        return [
            PrefixRows(prefix, self._tensor(slot_n[indices]), self._tensor(position_n[indices]))
            for prefix, indices in indices_of.items()
        ]

    def _tensor(self, array: I64) -> Tensor:
        return torch.from_numpy(array).to(self._device)


@dataclass(slots=True)
class ContiguousStep:
    """A step's attention over one group."""

    layers: Mapping[int, tuple[Tensor, Tensor]]  # keys and values, [slots, G, C, D]
    num_slots: int
    capacity: int
    num_attended: int
    row_n: Tensor | None  # the members' rows of the step; None: all rows, in order
    slot_n: Tensor
    row_N: Tensor | None  # the row of each slot; None: all rows, in order
    at_n: Tensor  # the members' positions in their slots
    at_N: Tensor
    base_N: Tensor  # the position of the first token in each slot
    prefix_rows: Sequence[PrefixRows]
    write_index: dict[int, Tensor]  # by number of key heads
    masks: dict[Window | None, Tensor]

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        """[n, H, D]"""
        keys, values = self.layers[layer]
        num = self.num_slots
        write_index = self._write_index(keys.shape[1])
        if self.row_n is not None:
            k_TGD, v_TGD = k_TGD.index_select(0, self.row_n), v_TGD.index_select(0, self.row_n)
        keys.view(-1, keys.shape[-1]).index_copy_(0, write_index, k_TGD.to(keys.dtype).flatten(0, 1))
        values.view(-1, values.shape[-1]).index_copy_(0, write_index, v_TGD.flatten(0, 1))

        q_NHD = q_THD if self.row_N is None else q_THD.index_select(0, self.row_N)
        is_plain = has_plain_scores(options) and not self.prefix_rows
        if keys.dtype == torch.float32 or not is_plain:
            out_NHD = self._attend_by_matmul(layer, q_NHD, keys[:num], values[:num], **options)
        else:
            keys_NGKD, values_NGKD = (x[:num, :, : self.num_attended] for x in (keys, values))
            out_NHD = scaled_dot_product_attention(
                q_NHD[:, :, None], keys_NGKD, values_NGKD, self._mask(options.get("window")), scale=options["scale"],
                enable_gqa=True,
            )[:, :, 0]  # fmt: skip
        return out_NHD if self.row_N is None else out_NHD.index_select(0, self.slot_n)

    def _attend_by_matmul(
        self,
        layer: int,
        q_NHD: Tensor,
        keys_NGCD: Tensor,
        values_NGCD: Tensor,
        **options: Unpack[AttentionOptions],
    ) -> Tensor:
        """[N, H, D]"""
        num, groups = keys_NGCD.shape[:2]
        repeat = q_NHD.shape[1] // groups
        q_bRD = q_NHD.float().reshape(num * groups, repeat, -1)
        raw_scores_bRC = _key_matmul(q_bRD, keys_NGCD.flatten(0, 1), self.num_attended)
        raw_scores_NGRK = raw_scores_bRC.view(num, groups, repeat, -1)[..., : self.num_attended]
        scale = options["scale"]
        if (softcap := options.get("softcap")) is not None:
            raw_scores_NGRK, scale = softcap * torch.tanh(raw_scores_NGRK * (scale / softcap)), 1.0
        scores_NGRK = torch.empty(raw_scores_NGRK.shape, device=q_bRD.device)
        torch.add(self._mask(options.get("window")), raw_scores_NGRK, alpha=scale, out=scores_NGRK)
        more_logits, prefix_out_NGRD = [], None
        if (sinks_H := options.get("sinks_H")) is not None:
            more_logits.append(sinks_H.float().view(1, groups, repeat, 1).expand(num, -1, -1, -1))
        if self.prefix_rows:
            q_NGRD = q_bRD.view(num, groups, repeat, -1)
            prefix_out_NGRD, log_sum_NGR = attend_prefixes(
                self.prefix_rows, layer, q_NGRD, values_NGCD.shape[-1], **options
            )
            more_logits.append(log_sum_NGR[..., None])
        # A prefix is one more key, whose logit is its log sum and whose value is its output. A sink has no value.
        all_probs = torch.softmax(torch.cat([scores_NGRK, *more_logits], -1) if more_logits else scores_NGRK, -1)
        probs_NGRK = all_probs[..., : self.num_attended]
        probs_bRK = probs_NGRK.reshape(num * groups, repeat, self.num_attended).to(values_NGCD.dtype)
        out_bRD = torch.bmm(probs_bRK, values_NGCD.flatten(0, 1)[:, : self.num_attended])
        if prefix_out_NGRD is not None:
            out_NGRD = out_bRD.view(num, groups, repeat, -1)
            out_bRD = torch.addcmul(out_NGRD.float(), all_probs[..., -1:], prefix_out_NGRD).to(out_bRD.dtype)
        return out_bRD.view(num, groups * repeat, -1)

    def _write_index(self, groups: int) -> Tensor:
        """[n * G]: where the step's keys and values are written."""
        if groups not in self.write_index:
            heads_G = torch.arange(groups, device=self.slot_n.device)
            at_nG = (self.slot_n[:, None] * groups + heads_G) * self.capacity + self.at_n[:, None]
            self.write_index[groups] = at_nG.flatten()
        return self.write_index[groups]

    def _mask(self, window: Window | None) -> Tensor:
        """[N, 1, 1, K]: 0 where a slot's row sees a position, else -inf. Computed once for all layers."""
        if window is not None and window.size >= self.num_attended and not self.prefix_rows:
            window = None
        if window not in self.masks:
            key_K, at_N1 = torch.arange(self.num_attended, device=self.at_N.device), self.at_N[:, None]
            hidden_NK = key_K > at_N1
            if window is not None:
                base_N1 = self.base_N[:, None]
                hidden_NK |= key_K < window.first(at_N1 + base_N1) - base_N1
            mask_NK = torch.zeros(hidden_NK.shape, device=key_K.device).masked_fill_(hidden_NK, float("-inf"))
            self.masks[window] = mask_NK[:, None, None]
        return self.masks[window]


def _key_matmul(q_bRD: Tensor, keys_bCD: Tensor, num_attended: int) -> Tensor:
    """[b, R, C] or [b, R, K], in any memory order."""
    if SUITS_MKL:
        return torch.bmm(q_bRD, keys_bCD[:, :num_attended].mT.float())
    if q_bRD.shape[-1] < MIN_SWAPPED_DIM or not is_on_host(q_bRD):
        return torch.bmm(q_bRD, keys_bCD.mT)
    return torch.bmm(keys_bCD, q_bRD.mT).mT


class ContiguousKV:
    """All groups for one KVCache, in at most `max_bytes`."""

    def __init__(self, cache: KVCache, max_bytes: int, device: torch.device) -> None:
        self._cache = cache
        self._max_bytes = max_bytes
        self._device = device
        self._groups: dict[int, SlotGroup] = {}
        self._prefixes = SharedPrefixes(cache)

    @property
    def num_bytes(self) -> int:
        return sum(group.num_bytes for group in self._groups.values()) + self._prefixes.num_bytes

    def limit(self, max_bytes: int) -> None:
        """Hold at most `max_bytes` from now on; drops everything if that is more, since blocks have it, too."""
        self._max_bytes = max_bytes
        if self.num_bytes > max_bytes:
            self.clear()

    def clear(self) -> None:
        """Drop everything. Called when a step was interrupted: slots may count a token that was not written."""
        self._groups.clear()
        self._prefixes.clear()

    def assign_slots(self, decoding: Sequence[DecodeRow], num_rows: int) -> tuple[list[ContiguousStep], list[int]]:
        """Give the decoding rows slots; returns the step of each group, and the rows that have a slot."""
        classes: dict[int, list[DecodeRow]] = {}
        for member in self._prefixes.assign(decoding, self._max_bytes - self.num_bytes):
            length = member.position + 1 - member.base
            classes.setdefault(capacity_for(length, self._cache.block_size), []).append(member)
        classes = {capacity: members for capacity, members in classes.items() if len(members) >= MIN_GROUP_SIZE}
        for capacity, group in self._groups.items():
            group.retain(member.owner for member in classes.get(capacity, ()))
        steps: list[ContiguousStep] = []
        rows: list[int] = []
        for capacity, members in classes.items():
            group = self._group(capacity, members)
            if group is None:
                continue
            if unfilled := [member for member in members if group.length_of(member.owner) != member.position]:
                group.fill(unfilled, self._cache)
            group.compact()
            steps.append(group.step(members, num_rows))
            rows += [member.row for member in members]
        return steps, rows

    def _group(self, capacity: int, members: Sequence[DecodeRow]) -> SlotGroup | None:
        """The group, with a slot for each member; None if there is no memory for it."""
        group = self._groups.get(capacity)
        if group is None:
            group = SlotGroup(self._cache.members, capacity, self._device)
        if group.num_slots < len(members):
            num_slots = _group_size(len(members))
            added = num_slots * capacity * position_bytes(self._cache.members) - group.num_bytes
            self._drop_empty(added, group)
            if self.num_bytes + added > self._max_bytes:
                return None
            group.grow(num_slots)
        self._groups[capacity] = group
        return group

    def _drop_empty(self, num_bytes: int, keep: SlotGroup) -> None:
        for capacity, group in list(self._groups.items()):
            if self.num_bytes + num_bytes > self._max_bytes and group.is_empty and group is not keep:
                del self._groups[capacity]


def key_dtype(shape: LayerShape) -> torch.dtype:
    return shape.dtype if SUITS_MKL else torch.float32


def position_bytes(members: Mapping[LayerShape, Sequence[int]]) -> int:
    """Bytes of one position of a slot over all layers."""
    return sum(len(layers) * shape.count_bytes(key_dtype(shape)) for shape, layers in members.items())


def _group_size(num: int) -> int:
    return next((size for size in GROUP_SIZES if size >= num), -(-num // GROUP_SIZES[-1]) * GROUP_SIZES[-1])
