"""The tensors of the paged key/value cache, and what a model's layers keep in them.

`KVCache` holds blocks of `block_size` tokens for every layer; which block belongs to whom is the
`BlockPool`'s affair, whose `num_blocks` the tensors follow. Nothing is allocated before the first `resize`.
What a layer caches is learned by running one token through the model, because configurations do not say it
for every family.

Letters: T rows of a step, n sequences, C blocks of a table, K = C * S positions, S slots of a block, H query
heads, G key heads, D head dim.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.backends.torch.attention import NotingPlan
from tinsmith.backends.torch.lora import Routing, Segment
from tinsmith.backends.torch.model import BaseModel

MIN_CACHE_BYTES = 512 * 2**20


class LayerShape(NamedTuple):
    """What one layer keeps per token."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class KVCache:
    """Keys and values side by side in the last dimension; layers of one shape share one tensor."""

    def __init__(self, layers: Mapping[int, LayerShape], block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self._shapes = layers
        self.members: dict[LayerShape, list[int]] = {}
        for layer, shape in layers.items():
            self.members.setdefault(shape, []).append(layer)
        self._device = device
        self._stores: dict[LayerShape, Tensor] = {}  # [layers, blocks, S, G, D]
        self._layers: dict[int, Tensor] = {}  # [blocks, S, G, D]
        self.num_blocks = 0
        self.generation = 0
        """Another number whenever the tensors lie elsewhere."""

    @property
    def token_bytes(self) -> int:
        return sum(shape.num_bytes for shape in self._shapes.values())

    def resize(self, num_blocks: int) -> None:
        """Grow; what was cached stays, what is new is zero. If memory runs out, what was cached stays, and another
        call, for as many or more, goes on.
        """
        for shape, layers in self.members.items():
            size = (
                len(layers),
                num_blocks,
                self.block_size,
                shape.num_heads,
                shape.key_dim + shape.value_dim,
            )
            store = torch.zeros(size, dtype=shape.dtype, device=self._device)
            if (old := self._stores.get(shape)) is not None:
                num_old = min(old.shape[1], num_blocks)
                store[:, :num_old] = old[:, :num_old]
            self._stores[shape] = store
            self._layers.update(zip(layers, store, strict=True))
        self.num_blocks = num_blocks
        self.generation += 1

    @property
    def num_bytes(self) -> int:
        return sum(store.nbytes for store in self._stores.values())

    def shrink(self, num_blocks: int, moves: Mapping[int, int]) -> None:
        """Keep the first blocks, in which those that moved (old number -> new) lie by then."""
        sources = list(range(num_blocks))
        for source, target in moves.items():
            sources[target] = source
        index = torch.tensor(sources, device=self._device)
        for shape, layers in self.members.items():
            store = self._stores[shape] = self._stores.pop(shape).index_select(1, index)
            self._layers.update(zip(layers, store, strict=True))
        self.num_blocks = num_blocks
        self.generation += 1

    def clear(self) -> None:
        """Hold nothing, until the next `resize`."""
        self._stores.clear()
        self._layers.clear()
        self.num_blocks = 0
        self.generation += 1

    def prepare(self, copies: Sequence[tuple[int, int]], fresh: Sequence[int]) -> None:
        """Copy blocks (source, target), then zero the fresh ones, in all layers."""
        for store in self._stores.values():
            if copies:
                source, target = torch.tensor(copies, device=self._device).unbind(1)
                store[:, target] = store[:, source]
            if fresh:
                store.index_fill_(1, torch.tensor(fresh, device=self._device), 0)

    def write(self, layer: int, slots_T: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> None:
        self._layers[layer].flatten(0, 1).index_copy_(0, slots_T, torch.cat((k_TGD, v_TGD), -1))

    def read(self, layer: int, blocks_nC: Tensor) -> tuple[Tensor, Tensor]:
        """k and v, [n, G, K, D] each."""
        store = self._layers[layer]
        rows = store.index_select(0, blocks_nC.flatten()).view(len(blocks_nC), -1, *store.shape[2:])
        key_dim = self._shapes[layer].key_dim
        rows = rows.transpose(1, 2)
        return rows[..., :key_dim], rows[..., key_dim:]

    def gather(self, shape: LayerShape, blocks_nC: Tensor) -> Tensor:
        """Keys and values of all layers of one shape, [layers, n, K, G, D] with values behind keys."""
        store = self._stores[shape]
        rows = store.index_select(1, blocks_nC.flatten())
        return rows.view(len(store), len(blocks_nC), -1, *store.shape[3:])


def layer_shapes(base: BaseModel) -> dict[int, LayerShape]:
    noting = NotingPlan()
    token_T = torch.zeros(1, dtype=torch.int64, device=base.device)
    with torch.inference_mode():
        base.hidden(token_T, token_T, noting, Routing([Segment(0, 1, None)]))
    return {layer: LayerShape(*asked[-1][:4]) for layer, asked in noting.asked.items()}


def default_bytes(base: BaseModel, token_bytes: int) -> int:
    """Room for one whole context but at least 512 MiB, and at most a quarter of memory (on CUDA: half of what
    is free).

    It is a ceiling: a cache grows only as live sequences need it.
    """
    if base.device.type == "cuda":
        return int(torch.cuda.mem_get_info(base.device)[0] // 2)
    quarter = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    return max(MIN_CACHE_BYTES, min(base.max_context_length * token_bytes, quarter))
