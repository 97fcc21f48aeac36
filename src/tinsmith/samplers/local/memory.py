"""The KV cache under a shared memory budget: how far it may grow, and what is evicted first.

The `MemoryManager` says how much the cache may hold now. At most half of that may be blocks, since growing copies them;
contiguous copies use the rest. When training needs memory, contiguous copies are dropped first (blocks hold the same
tokens), then blocks that only a later prompt could reuse, then blocks of running sequences, the youngest first: these
sequences wait and are computed again, to the same tokens. Between steps the oldest sequence always has the memory that
it needs, whatever others hold, so every admitted request finishes. Memory for sequence states, in models that keep
some, is set aside; snapshots of states are dropped after the contiguous copies, and the slots of states that nothing
uses are freed.

On CUDA the cache is `fixed`: all blocks and slots are allocated at the start, within the memory that activations and
the cache may rely on at any time, and are never freed.
"""

from __future__ import annotations

import math

from tinsmith.backends.torch.memory import KV_CACHE, Evictable, MemoryManager, memory_errors
from tinsmith.plan.memory import BLOCKS_SHARE
from tinsmith.samplers.local.contiguous_kv import ContiguousKV
from tinsmith.samplers.local.kv_cache import KVCache
from tinsmith.samplers.local.scheduler import Batcher
from tinsmith.samplers.local.state_pool import StatePool
from tinsmith.samplers.local.states import StateBudget, StateSnapshots


class CacheBudget:
    """`slots` hold states of `state_bytes` each. `states`: the memory set aside for all states."""

    def __init__(
        self,
        memory: MemoryManager,
        batcher: Batcher,
        cache: KVCache,
        contiguous: ContiguousKV | None,
        slots: StatePool,
        state_bytes: int,
        states: StateBudget,
        *,
        fixed: bool,
    ) -> None:
        self._memory = memory
        self._batcher = batcher
        self._cache = cache
        self._contiguous = contiguous
        self._slots = slots
        self._state_bytes = state_bytes
        self._states = states
        self._fixed = fixed
        self._block_bytes = max(cache.token_bytes, 1) * cache.block_size
        if memory.is_limited:
            batcher.pool.max_blocks = min(batcher.pool.max_blocks, self._blocks_in(memory.steady_limit()))
        self._max_blocks = batcher.pool.max_blocks
        evictable = None if fixed else Evictable(self.idle_bytes, self.num_bytes, self.evict)
        memory.register(KV_CACHE, self.num_bytes, evictable)
        if fixed:
            batcher.pool.fill()
            cache.resize(batcher.pool.num_blocks)

    @property
    def capacity(self) -> int:
        """Tokens that one sequence may have cached."""
        max_blocks = self._max_blocks if self._memory.is_limited else self._batcher.pool.max_blocks
        return max_blocks * self._cache.block_size

    def num_bytes(self) -> int:
        """Bytes of blocks, contiguous copies and slots of states."""
        contiguous_bytes = self._contiguous.num_bytes if self._contiguous else 0
        return self._cache.num_bytes + contiguous_bytes + self._slots.num_slots * self._state_bytes

    def _live_state_bytes(self) -> int:
        """Bytes of slots that running sequences use, with slot 0."""
        states = [state for s in self._batcher.running for state in (s.state, s.tail and s.tail[1]) if state]
        return self._state_bytes * len({0, *(state.slot for state in states)}) if states else 0

    def idle_bytes(self) -> int:
        """Bytes that can be evicted without recomputing anything for running sequences."""
        live = (self._batcher.pool.num_live + 1) * self._block_bytes + self._live_state_bytes()
        return max(0, self.num_bytes() - live)

    def fit(self) -> None:
        """Before a step: adapt the cache to the current budget."""
        if not self._memory.is_limited or self._fixed:
            return
        room = self._memory.limit_of(KV_CACHE)
        blocks = min(self._blocks_in(room), self._max_blocks)
        if not self._memory.is_reserved:
            blocks = max(blocks, self._min_blocks())
        if blocks < self._batcher.pool.num_blocks - 1:
            self._shrink(blocks)
        self._batcher.pool.max_blocks = blocks
        self._limit_contiguous()

    def grow(self) -> None:
        """Resize the tensors to the pool's number of blocks."""
        num_blocks = self._batcher.pool.num_blocks
        if num_blocks <= self._cache.num_blocks:
            return
        if self._memory.is_limited and self._contiguous:
            room = self._memory.limit_of(KV_CACHE)
            self._contiguous.limit(int(max(0, room - (self._cache.num_blocks + num_blocks) * self._block_bytes)))
        self._cache.resize(num_blocks)
        self._limit_contiguous()

    def abandon_growth(self) -> None:
        """The pool could not grow for lack of memory: preempt everything and lower the pool's limit."""
        pool, num_allocated = self._batcher.pool, max(0, self._cache.num_blocks - 1)
        num_requested = pool.num_blocks - 1
        self._batcher.preempt_all()
        self._batcher.shrink(num_allocated)
        if num_requested > num_allocated:
            pool.limit = max(num_allocated, num_requested // 2, self._min_blocks())

    def relax(self) -> None:
        """Double the pool's limit, at least to what the oldest sequence needs."""
        pool = self._batcher.pool
        if pool.limit is not None:
            limit = max(2 * pool.limit, self._min_blocks())
            pool.limit = limit if limit < pool.max_blocks else None

    def evict(self, num_bytes: int) -> None:
        """Free `num_bytes`, or everything if the cache holds less."""
        if self._contiguous:
            contiguous_bytes = self._contiguous.num_bytes
            self._contiguous.limit(max(0, contiguous_bytes - num_bytes))
            num_bytes -= contiguous_bytes - self._contiguous.num_bytes
        if num_bytes > 0 and self._batcher.snapshots is not None:
            num_bytes -= self._evict_states(self._batcher.snapshots, num_bytes)
        if num_bytes <= 0 or not self._cache.num_bytes:
            return
        # Blocks that stay are copied, so they need twice their memory while they are copied.
        remaining_bytes = min(self._cache.num_bytes - num_bytes, self._memory.free())
        self._shrink(int(max(0, remaining_bytes) // self._block_bytes) - 1)

    def _evict_states(self, snapshots: StateSnapshots, num_bytes: int) -> int:
        """Free slots, and snapshots as far as that is needed; returns the bytes."""
        num_slots = self._slots.num_slots
        target = max(0, num_slots - math.ceil(num_bytes / self._state_bytes))
        while self._slots.num_taken >= target and snapshots.drop_oldest():
            pass
        self._slots.shrink(target)
        return (num_slots - self._slots.num_slots) * self._state_bytes

    def _shrink(self, num_blocks: int) -> None:
        if num_blocks < 1 or self._batcher.pool.num_blocks != self._cache.num_blocks:
            self._batcher.shrink(0)
            self._cache.clear()
        elif num_blocks < self._batcher.pool.num_blocks - 1:
            moves = self._batcher.shrink(num_blocks)
            try:
                with memory_errors(self._cache.device):
                    self._cache.shrink(num_blocks + 1, moves)
            except MemoryError:  # no memory for the copy: recompute everything
                self._batcher.shrink(0)
                self._cache.clear()

    def _blocks_in(self, room: float) -> int:
        """Blocks that fit, without the null block and the memory of states."""
        share = 1.0 if self._fixed else BLOCKS_SHARE
        return max(0, int(share * (room - self._states.num_bytes) // self._block_bytes) - 1)

    def _min_blocks(self) -> int:
        """Blocks that the oldest sequence needs for its next token, including those it shares with siblings."""
        oldest = next(iter(self._batcher.running or self._batcher.waiting), None)
        return 0 if oldest is None else oldest.length // self._cache.block_size + 2

    def _limit_contiguous(self) -> None:
        if self._memory.is_limited and self._contiguous:
            blocks_bytes = self._cache.num_blocks * self._block_bytes
            self._contiguous.limit(int(max(0, self._memory.limit_of(KV_CACHE) - blocks_bytes)))
