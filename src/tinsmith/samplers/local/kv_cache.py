"""The paged KV cache: its tensors, and the allocation of its blocks.

`KVCache` holds blocks of `block_size` tokens for every layer. On a CPU the tensors follow `BlockPool.num_blocks`, which
grows with the work and shrinks when memory is needed elsewhere. On CUDA all blocks are allocated when the sampler is
created (`BlockPool.fill`), because growing copies the cache and needs twice its memory meanwhile. What a layer
caches is determined by running one token through the model, because configurations do not state it for every family.

`BlockPool` keeps counts, a free list and a prefix index, no tensors. A block holds the keys and values of `block_size`
consecutive tokens. It is in exactly one state: free; live (referenced by one or more sequences); or cached
(unreferenced, but found by its key for a later prompt). Block 0 is the null block: always zero, never allocated, the
padding of every block table. A key is a digest of everything that the block depends on (`chain_key`): the weights,
named by a namespace, all tokens up to the block's end, and the scope within which prompts are shared. The pool grows
only for live blocks and otherwise evicts the least recently used cached block. Blocks in `take_fresh()` must be zeroed
before use, because a stale NaN under a mask is still a NaN.

Letters: T rows of a step, n sequences, C blocks of a table, K = C * S positions, S slots of a block, H query heads, G
key heads, D head dim.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith.backends.torch.attention import AttentionProbe
from tinsmith.backends.torch.host import upload_all
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.backends.torch.model import BaseModel
from tinsmith.runtime.devices import kind_of, read_memory, runs_triton

MIN_CACHE_BYTES = 512 * 2**20

CUDA_SHARE = 0.3
"""Share of the free memory of a CUDA device when the sampler is created; adapters and activations use the rest."""


class LayerShape(NamedTuple):
    """The cache of one layer per token."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.count_bytes(self.dtype)

    def count_bytes(self, key_dtype: torch.dtype) -> int:
        """Bytes of a token whose keys are stored in another dtype."""
        return self.num_heads * (key_dtype.itemsize * self.key_dim + self.dtype.itemsize * self.value_dim)


class KVCache:
    """Keys and values side by side in the last dimension; layers of one shape share one tensor."""

    def __init__(self, layers: Mapping[int, LayerShape], block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self._shapes = layers
        self.members: dict[LayerShape, list[int]] = {}
        for layer, shape in layers.items():
            self.members.setdefault(shape, []).append(layer)
        self.device = device
        self._stores: dict[LayerShape, Tensor] = {}  # [layers, blocks, S, G, D]
        self._layers: dict[int, Tensor] = {}  # [blocks, S, G, D]
        self.num_blocks = 0
        self.kernels = page_kernels(device)

    @property
    def token_bytes(self) -> int:
        return sum(shape.num_bytes for shape in self._shapes.values())

    def resize(self, num_blocks: int) -> None:
        """Grow; existing blocks stay, new ones are zero. If memory runs out, existing blocks stay, and a later
        call with at least as many blocks completes the growth.
        """
        for shape, layers in self.members.items():
            size = (
                len(layers),
                num_blocks,
                self.block_size,
                shape.num_heads,
                shape.key_dim + shape.value_dim,
            )
            store = _zeros(size, shape.dtype, self.device)
            if (old := self._stores.get(shape)) is not None:
                num_old = min(old.shape[1], num_blocks)
                store[:, :num_old] = old[:, :num_old]
            self._stores[shape] = store
            self._layers.update(zip(layers, store, strict=True))
        self.num_blocks = num_blocks

    @property
    def num_bytes(self) -> int:
        return sum(store.nbytes for store in self._stores.values())

    def shrink(self, num_blocks: int, moves: Mapping[int, int]) -> None:
        """Keep the first blocks, after moving blocks by `moves` (old index -> new)."""
        sources = list(range(num_blocks))
        for source, target in moves.items():
            sources[target] = source
        index = torch.tensor(sources, device=self.device)
        for shape, layers in self.members.items():
            store = self._stores[shape] = self._stores.pop(shape).index_select(1, index)
            self._layers.update(zip(layers, store, strict=True))
        self.num_blocks = num_blocks

    def clear(self) -> None:
        """Free all tensors until the next `resize`."""
        self._stores.clear()
        self._layers.clear()
        self.num_blocks = 0

    def prepare(self, copies: Sequence[tuple[int, int]], fresh: Sequence[int]) -> None:
        """Copy blocks (source, target), then zero the fresh ones, in all layers."""
        if not (copies or fresh):
            return
        block_lists = [np.array(part, np.int64) for part in ([s for s, _ in copies], [t for _, t in copies], fresh)]
        sources, targets, cleared = upload_all(block_lists, self.device)
        for store in self._stores.values():
            if copies:
                store.index_copy_(1, targets, store.index_select(1, sources))
            if fresh:
                store.index_fill_(1, cleared, 0)

    def write(self, layer: int, slots_T: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """A GPU's kernels write nothing for slots of -1."""
        if self.kernels is not None:
            self.kernels.write_rows(self._layers[layer], slots_T, k_TGD, v_TGD)
        else:
            self._layers[layer].flatten(0, 1).index_copy_(0, slots_T, torch.cat((k_TGD, v_TGD), -1))

    def read(self, layer: int, blocks_nC: Tensor) -> tuple[Tensor, Tensor]:
        """k and v, [n, G, K, D] each."""
        store = self._layers[layer]
        rows = store.index_select(0, blocks_nC.flatten()).view(len(blocks_nC), -1, *store.shape[2:])
        key_dim = self._shapes[layer].key_dim
        rows = rows.transpose(1, 2)
        return rows[..., :key_dim], rows[..., key_dim:]

    def shape(self, layer: int) -> LayerShape:
        return self._shapes[layer]

    def pages(self, layer: int) -> Tensor:
        """All blocks, [blocks, S, G, D]; D holds the key, then the value."""
        return self._layers[layer]

    def gather(self, shape: LayerShape, blocks_nC: Tensor) -> Tensor:
        """Keys and values of all layers of one shape, [layers, n, K, G, D]; D holds the key, then the value."""
        store = self._stores[shape]
        rows = store.index_select(1, blocks_nC.flatten())
        return rows.view(len(store), len(blocks_nC), -1, *store.shape[3:])


def page_kernels(device: torch.device) -> ModuleType | None:
    """The module `paged_kernel`; None where it cannot run."""
    if not runs_triton(device):
        return None
    from tinsmith.samplers.local import paged_kernel

    return paged_kernel


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU in new pages, which the system fills when they are first used, so that samples need not wait."""
    if not kind_of(device).is_host:
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, np.uint8)).view(dtype).view(size)


def probe_layers(base: BaseModel) -> AttentionProbe:
    """Records what the layers cache and store for one token."""
    probe = AttentionProbe()
    token_T = torch.zeros(1, dtype=torch.int64, device=base.device)
    with torch.inference_mode():
        base.hidden(token_T, token_T, probe, LoRABatch.of_base(1))
    return probe


def layer_shapes(base: BaseModel) -> dict[int, LayerShape]:
    return {layer: LayerShape(*calls[-1][:4]) for layer, calls in probe_layers(base).calls.items()}


def default_bytes(base: BaseModel, token_bytes: int) -> int:
    """On CUDA, CUDA_SHARE of the free memory, allocated at once. Elsewhere a ceiling for growth: one whole context but
    at least 512 MiB, and at most a quarter of memory.
    """
    free, total = read_memory(base.device)
    if kind_of(base.device).has_kernels:
        return int(CUDA_SHARE * free)
    quarter = total // 4
    return max(MIN_CACHE_BYTES, min(base.max_context_length * token_bytes, quarter))


def chain_key(parent: bytes, tokens: bytes) -> bytes:
    """The key of a block whose predecessor has the key `parent` (for the first block, the root of its namespace)."""
    return hashlib.blake2b(tokens, key=parent, digest_size=16).digest()


def root_key(namespace: int, scope: str = "") -> bytes:
    return chain_key(namespace.to_bytes(16, "little"), scope.encode())


class BlockPool:
    """Allocates, shares and evicts blocks. Not thread-safe; every method is O(number of its blocks)."""

    def __init__(self, *, max_blocks: int, initial_blocks: int = 64) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks is {max_blocks}; it must be at least 1")
        self.max_blocks = max_blocks
        self.limit: int | None = None
        """A temporary limit below `max_blocks`, set when there was no memory for more."""
        self.num_blocks = 1  # the null block counts towards the tensors, not towards max_blocks
        self._initial_blocks = initial_blocks
        self._free: list[int] = []
        self._refs: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, tuple[int, bytes]] = {}
        self._namespaces: dict[int, set[int]] = {}
        self._fresh: list[int] = []

    @property
    def num_live(self) -> int:
        return len(self._refs)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now, growing and evicting as needed."""
        return max(0, self._block_limit - len(self._refs))

    @property
    def _block_limit(self) -> int:
        return self.max_blocks if self.limit is None else min(self.max_blocks, self.limit)

    def fill(self) -> None:
        """Allocate all blocks from the start, so that the pool never grows."""
        self._grow(self.max_blocks)

    def refs(self, block: int) -> int:
        return self._refs.get(block, 0)

    def allocate(self, num: int) -> list[int] | None:
        """`num` blocks with one reference each, or None (and no change) if fewer are available."""
        if num > self.num_available:
            return None
        self._make_room(num)
        blocks = [self._free.pop() for _ in range(num)]
        for block in blocks:
            self._refs[block] = 1
        self._fresh.extend(blocks)
        return blocks

    def take_fresh(self) -> list[int]:
        """Blocks allocated since the last call, each once."""
        fresh, self._fresh = list(dict.fromkeys(self._fresh)), []
        return fresh

    def acquire(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._cached.pop(block, None)
            self._refs[block] = self._refs.get(block, 0) + 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each. The end of a chain becomes evictable before its start."""
        for block in reversed(blocks):
            num_refs = self._refs[block] - 1
            if num_refs:
                self._refs[block] = num_refs
                continue
            del self._refs[block]
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest registered prefix of `keys`, not yet acquired."""
        blocks = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register(self, block: int, key: bytes, namespace: int) -> None:
        """Let later prompts find a live, full block. A key keeps its first block; later ones stay private."""
        if key in self._by_key or block in self._key_of:
            return
        self._by_key[key] = block
        self._key_of[block] = (namespace, key)
        self._namespaces.setdefault(namespace, set()).add(block)

    def forget(self, namespace: int) -> None:
        """Unregister this namespace's blocks and free those that are unreferenced."""
        for block in list(self._namespaces.get(namespace, ())):
            self._forget_block(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def shrink(self, size: int) -> dict[int, int]:
        """Keep at most `size` blocks, including all live ones; evicts the least recently used cached blocks first. The
        remaining blocks get indices from 1 to `size`; returns old index -> new for those that move.
        """
        if len(self._refs) > size:
            raise ValueError(f"{len(self._refs)} blocks are live, more than {size}")
        size = min(size, self.num_blocks - 1)
        while len(self._refs) + len(self._cached) > size:
            self._evict()
        used_blocks = self._refs.keys() | self._cached.keys()
        free_blocks = [block for block in range(size, 0, -1) if block not in used_blocks]
        moves = {block: free_blocks.pop() for block in sorted(used_blocks) if block > size}
        self._refs = {moves.get(block, block): refs for block, refs in self._refs.items()}
        self._cached = OrderedDict((moves.get(block, block), None) for block in self._cached)
        self._key_of = {moves.get(block, block): key for block, key in self._key_of.items()}
        self._by_key = {key: moves.get(block, block) for key, block in self._by_key.items()}
        for namespace, blocks in self._namespaces.items():
            self._namespaces[namespace] = {moves.get(block, block) for block in blocks}
        self._fresh = [moves.get(block, block) for block in self._fresh if block in used_blocks]
        self._free = free_blocks
        self.num_blocks = size + 1
        return moves

    def _evict(self) -> None:
        """Free the least recently used cached block."""
        block, _ = self._cached.popitem(last=False)
        self._forget_block(block)
        self._free.append(block)

    def _forget_block(self, block: int) -> None:
        namespace, key = self._key_of.pop(block)
        del self._by_key[key]
        members = self._namespaces[namespace]
        members.discard(block)
        if not members:
            del self._namespaces[namespace]

    def _make_room(self, num: int) -> None:
        doubled = 2 * (len(self._refs) + num)
        size = self.num_blocks - 1
        if len(self._free) < num and size < min(doubled, self._block_limit):
            self._grow(max(doubled, self._initial_blocks))
        while len(self._free) < num:
            self._evict()

    def _grow(self, size: int) -> None:
        # At least doubling keeps the copying of tensors linear in the final size.
        size = min(max(size, 2 * (self.num_blocks - 1)), self._block_limit)
        self._free = list(range(size, self.num_blocks - 1, -1)) + self._free
        self.num_blocks = size + 1
