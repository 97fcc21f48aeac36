"""Beginnings that decoding sequences share, whose keys and values a decode step reads once for all of them.

Samples of one prompt have its blocks in common. A `Prefix` is a copy of the keys and values of such blocks; the rows of
all sequences that begin with it are the rows of one matmul. The rest of each sequence is in its slot (`contiguous_kv`),
and both parts are joined by the log sums of their exponentials. Rows of different sequences stay apart, as rows of a
matmul are.

Letters: N slots, m rows of a prefix, P its positions, H query heads, G key heads, R = H / G, D head dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Unpack

import torch
from torch import Tensor

from tinsmith.backends.torch.attention import AttentionOptions, Window
from tinsmith.samplers.local.kv_cache import KVCache, LayerShape

MIN_SAVED_BYTES = 1 << 20
"""The fewest bytes of a layer that a step must save by reading a prefix once: its own operations take as long as
reading half of that.
"""

HIDDEN = -1e30
"""What is added to the score of a key outside of a row's window. It is finite, since a row may see no key of a prefix,
whose part then has no weight beside the keys of its slot.
"""


class Prefix:
    """The keys [G, P, D], in float32 so that scores are not rounded, and values of blocks, for each layer."""

    def __init__(self, blocks: Sequence[int], cache: KVCache) -> None:
        self.num_blocks = len(blocks)
        self.num_tokens = len(blocks) * cache.block_size
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        blocks_1C = torch.tensor([blocks], device=cache.device)
        for shape, layers in cache.members.items():
            gathered = cache.gather(shape, blocks_1C)[:, 0].transpose(1, 2)  # [layers, G, P, D]
            keys = gathered[..., : shape.key_dim].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            values = gathered[..., shape.key_dim :].contiguous()
            self._layers |= {layer: (keys[index], values[index]) for index, layer in enumerate(layers)}

    @property
    def num_bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers.values())

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._layers[layer]


def count_bytes(shapes: Mapping[LayerShape, Sequence[int]], num_tokens: int) -> int:
    """The bytes of a `Prefix` of so many tokens."""
    return num_tokens * sum(len(layers) * shape.count_bytes(torch.float32) for shape, layers in shapes.items())


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A sequence whose token at `position` is computed in this step; its blocks hold the positions before. Its slot
    holds those after `prefix`.
    """

    owner: Hashable
    row: int
    position: int
    blocks: Sequence[int]
    prefix: Prefix | None = None

    @property
    def base(self) -> int:
        """The first position in the slot."""
        return 0 if self.prefix is None else self.prefix.num_tokens


class SharedPrefixes:
    """The prefixes of the sequences that decode. A sequence keeps its prefix, or none, while every step decodes it, so
    that its slot stays valid.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._prefix_of: dict[Hashable, Prefix | None] = {}

    @property
    def num_bytes(self) -> int:
        return sum(prefix.num_bytes for prefix in {*self._prefix_of.values()} if prefix is not None)

    def clear(self) -> None:
        self._prefix_of.clear()

    def assign(self, decoding: Sequence[DecodeRow], max_bytes: int) -> list[DecodeRow]:
        """The rows with their prefixes. New prefixes take at most `max_bytes`."""
        self._prefix_of = {row.owner: self._prefix_of[row.owner] for row in decoding if row.owner in self._prefix_of}
        if new_rows := [row for row in decoding if row.owner not in self._prefix_of]:
            self._prefix_of |= dict.fromkeys((row.owner for row in new_rows), None)
            self._join_prefixes(decoding, new_rows)
            self._open_prefixes([row for row in new_rows if self._prefix_of[row.owner] is None], max_bytes)
        return [replace(row, prefix=self._prefix_of[row.owner]) for row in decoding]

    def _join_prefixes(self, decoding: Sequence[DecodeRow], new_rows: Sequence[DecodeRow]) -> None:
        """Give new rows the longest prefix of others that they begin with, too."""
        examples = {prefix: row for row in decoding if (prefix := self._prefix_of[row.owner]) is not None}
        for prefix, example in sorted(examples.items(), key=lambda item: item[0].num_blocks):
            num_blocks = prefix.num_blocks
            for row in new_rows:
                if num_blocks <= row.position // self._cache.block_size and (
                    row.blocks[:num_blocks] == example.blocks[:num_blocks]
                ):
                    self._prefix_of[row.owner] = prefix

    def _open_prefixes(self, rows: Sequence[DecodeRow], max_bytes: int) -> None:
        layer_bytes = max((shape.num_bytes for shape in self._cache.members), default=0)
        if not layer_bytes:  # no layer attends
            return
        for num_blocks, members in find_prefixes(rows, self._cache.block_size, MIN_SAVED_BYTES // layer_bytes):
            max_bytes -= count_bytes(self._cache.members, num_blocks * self._cache.block_size)
            if max_bytes < 0:
                return
            prefix = Prefix(members[0].blocks[:num_blocks], self._cache)
            self._prefix_of |= dict.fromkeys((member.owner for member in members), prefix)


def find_prefixes(rows: Sequence[DecodeRow], block_size: int, min_saved: int) -> list[tuple[int, list[DecodeRow]]]:
    """Rows whose sequences begin with the same blocks, and their number, where reading these once saves more than
    `min_saved` positions. A block is shared only by sequences that are equal up to its end.
    """
    num_full = [row.position // block_size for row in rows]
    counts = Counter(at for row, num in zip(rows, num_full, strict=True) for at in enumerate(row.blocks[:num]))
    groups: dict[tuple[int, int], list[DecodeRow]] = {}
    for row, num in zip(rows, num_full, strict=True):
        saved = [(counts[at] - 1) * (at[0] + 1) for at in enumerate(row.blocks[:num])]
        if any(saved):
            num_blocks = saved.index(max(saved)) + 1
            groups.setdefault((num_blocks, row.blocks[num_blocks - 1]), []).append(row)
    return [
        (num_blocks, members)
        for (num_blocks, _), members in groups.items()
        if (len(members) - 1) * num_blocks * block_size > min_saved
    ]


@dataclass(slots=True)
class PrefixRows:
    """What slots of a group read of a prefix in one step. `position_m`: the rows' positions."""

    prefix: Prefix
    slot_m: Tensor
    position_m: Tensor
    _masks: dict[Window, Tensor | None] = field(default_factory=dict)

    def attend(self, layer: int, q_mGRD: Tensor, **options: Unpack[AttentionOptions]) -> tuple[Tensor, Tensor] | None:
        """Outputs [m, G, R, D] in float32, and log sums [m, G, R]; None if no row sees a key."""
        keys_GPD, values_GPD = self.prefix.layer(layer)
        num, groups, repeat, _ = q_mGRD.shape
        scores_GrP = torch.bmm(q_mGRD.float().transpose(0, 1).flatten(1, 2), keys_GPD.mT).mul_(options["scale"])
        if (softcap := options.get("softcap")) is not None:
            scores_GrP.div_(softcap).tanh_().mul_(softcap)
        if (window := options.get("window")) is not None:
            if (mask_m1P := self._mask(window)) is None:
                return None
            scores_GrP.view(groups, num, repeat, -1).add_(mask_m1P)
        log_sum_Gr = scores_GrP.logsumexp(-1)
        probs_GrP = scores_GrP.sub_(log_sum_Gr[..., None]).exp_().to(values_GPD.dtype)
        out_GrD = torch.bmm(probs_GrP, values_GPD)
        return (
            out_GrD.view(groups, num, repeat, -1).transpose(0, 1),
            log_sum_Gr.view(groups, num, repeat).transpose(0, 1),
        )

    def _mask(self, window: Window) -> Tensor | None:
        """[m, 1, P], the same in all layers with this window; None if no row sees a key."""
        if window not in self._masks:
            first_m = window.first(self.position_m)
            hidden_mP = torch.arange(self.prefix.num_tokens, device=first_m.device) < first_m[:, None]
            mask_mP = torch.zeros(hidden_mP.shape, device=first_m.device).masked_fill_(hidden_mP, HIDDEN)
            self._masks[window] = None if bool(hidden_mP.all()) else mask_mP[:, None]
        return self._masks[window]


def attend_prefixes(
    prefix_rows: Sequence[PrefixRows], layer: int, q_NGRD: Tensor, value_dim: int, **options: Unpack[AttentionOptions]
) -> tuple[Tensor, Tensor]:
    """Outputs [N, G, R, D] in float32 and log sums [N, G, R] of what the slots read of prefixes: 0 and -inf for the
    others.
    """
    out_NGRD = q_NGRD.new_zeros(*q_NGRD.shape[:3], value_dim, dtype=torch.float32)
    log_sum_NGR = out_NGRD.new_full(out_NGRD.shape[:3], float("-inf"))
    for part in prefix_rows:
        if (outcome := part.attend(layer, q_NGRD.index_select(0, part.slot_m), **options)) is not None:
            out_mGRD, log_sum_mGR = outcome
            out_NGRD.index_copy_(0, part.slot_m, out_mGRD.float())
            log_sum_NGR.index_copy_(0, part.slot_m, log_sum_mGR)
    return out_NGRD, log_sum_NGR
