"""The KV cache under a memory budget that others share: how far it may grow, and what is evicted of it.

The `MemoryManager` says how much the cache may hold now. Half of it may be blocks, since growing copies them, and
strips take what is left. When training needs memory, strips go first (blocks have what they hold), then blocks that
only a later prompt might find, then those of running sequences, the youngest first: these wait, and what they had is
computed again, to the same tokens. Between steps the oldest sequence always has the room that it needs, whatever
others hold; so everything that was let in comes to its end. States of sequences, where a model keeps some, have their
room set aside; of these, snapshots go after strips.
"""

from __future__ import annotations

import math

from tinsmith.backends.torch.memory import KV_CACHE, Evictable, MemoryManager
from tinsmith.plan.memory import BLOCKS_SHARE
from tinsmith.samplers.local.contiguous_kv import StripCache
from tinsmith.samplers.local.kv_cache import KVCache
from tinsmith.samplers.local.scheduler import Batcher
from tinsmith.samplers.local.states import StateRoom


class CacheBudget:
    """`state_bytes` are those of one sequence; `states` is the room of all."""

    def __init__(
        self,
        memory: MemoryManager,
        batcher: Batcher,
        cache: KVCache,
        strips: StripCache | None,
        state_bytes: int,
        states: StateRoom,
    ) -> None:
        self._memory = memory
        self._batcher = batcher
        self._cache = cache
        self._strips = strips
        self._state_bytes = state_bytes
        self._states = states
        self._block_bytes = max(cache.token_bytes, 1) * cache.block_size
        if memory.is_limited:
            batcher.pool.max_blocks = min(batcher.pool.max_blocks, self._blocks_in(memory.steady_limit()))
        self._most_blocks = batcher.pool.max_blocks
        memory.register(KV_CACHE, self.held, Evictable(self.idle, self.held, self.evict))

    @property
    def capacity(self) -> int:
        """Tokens that one sequence may have cached."""
        most = self._most_blocks if self._memory.is_limited else self._batcher.pool.max_blocks
        return most * self._cache.block_size

    def held(self) -> int:
        return self._cache.num_bytes + (self._strips.num_bytes if self._strips else 0) + self._held_states()

    def _held_states(self) -> int:
        snapshots = self._batcher.snapshots
        return self._live_states() + (len(snapshots) * self._state_bytes if snapshots is not None else 0)

    def _live_states(self) -> int:
        held = [(own.state is not None) + (own.tail is not None) for own in self._batcher.running]
        return self._state_bytes * sum(held)

    def idle(self) -> int:
        """What could go without anything being computed again now."""
        live = (self._batcher.pool.num_live + 1) * self._block_bytes + self._live_states()
        return max(0, self.held() - live)

    def fit(self) -> None:
        """Before a step: as much as there is room for."""
        if not self._memory.is_limited:
            return
        room = self._memory.limit_of(KV_CACHE)
        blocks = min(self._blocks_in(room), self._most_blocks)
        if not self._memory.is_reserved:
            blocks = max(blocks, self._least_blocks())
        if blocks < self._batcher.pool.num_blocks - 1:
            self._shrink(blocks)
        self._batcher.pool.max_blocks = blocks
        self._limit_strips()

    def grow(self) -> None:
        """Have the tensors follow the pool."""
        num_blocks = self._batcher.pool.num_blocks
        if num_blocks <= self._cache.num_blocks:
            return
        if self._memory.is_limited and self._strips:
            room = self._memory.limit_of(KV_CACHE)
            self._strips.limit(int(max(0, room - (self._cache.num_blocks + num_blocks) * self._block_bytes)))
        self._cache.resize(num_blocks)
        self._limit_strips()

    def give_up_growth(self) -> None:
        """There was no memory for what the pool wanted to grow to: nothing runs, and it is to grow by less."""
        pool, had = self._batcher.pool, max(0, self._cache.num_blocks - 1)
        wanted = pool.num_blocks - 1
        self._batcher.preempt_all()
        self._batcher.shrink(had)
        if wanted > had:
            pool.limit = max(had, wanted // 2, self._least_blocks())

    def relax(self) -> None:
        """The pool may grow again, as far as the oldest sequence needs at least."""
        pool = self._batcher.pool
        if pool.limit is not None:
            limit = max(2 * pool.limit, self._least_blocks())
            pool.limit = limit if limit < pool.max_blocks else None

    def evict(self, num_bytes: int) -> None:
        """Make room for others: so many bytes, or all that there is."""
        if self._strips:
            held = self._strips.num_bytes
            self._strips.limit(max(0, held - num_bytes))
            num_bytes -= held - self._strips.num_bytes
        if num_bytes > 0 and (snapshots := self._batcher.snapshots):
            num_gone = min(len(snapshots), math.ceil(num_bytes / self._state_bytes))
            snapshots.shrink(len(snapshots) - num_gone)
            num_bytes -= num_gone * self._state_bytes
        if num_bytes <= 0 or not self._cache.num_bytes:
            return
        # What stays is copied, and for a moment there twice.
        stays = min(self._cache.num_bytes - num_bytes, self._memory.free())
        self._shrink(int(max(0, stays) // self._block_bytes) - 1)

    def _shrink(self, num_blocks: int) -> None:
        if num_blocks < 1 or self._batcher.pool.num_blocks != self._cache.num_blocks:
            self._batcher.shrink(0)
            self._cache.clear()
        elif num_blocks < self._batcher.pool.num_blocks - 1:
            moves = self._batcher.shrink(num_blocks)
            try:
                self._cache.shrink(num_blocks + 1, moves)
            except (MemoryError, RuntimeError):  # no memory for the copy: all of it is computed again
                self._batcher.shrink(0)
                self._cache.clear()

    def _blocks_in(self, room: float) -> int:
        """Without the null block, and without the room of states."""
        return max(0, int(BLOCKS_SHARE * (room - self._states.num_bytes) // self._block_bytes) - 1)

    def _least_blocks(self) -> int:
        """What the oldest sequence needs for its next token, siblings that share its blocks included."""
        oldest = next(iter(self._batcher.running or self._batcher.waiting), None)
        return 0 if oldest is None else oldest.length // self._cache.block_size + 2

    def _limit_strips(self) -> None:
        if self._memory.is_limited and self._strips:
            blocks_bytes = self._cache.num_blocks * self._block_bytes
            self._strips.limit(int(max(0, self._memory.limit_of(KV_CACHE) - blocks_bytes)))
