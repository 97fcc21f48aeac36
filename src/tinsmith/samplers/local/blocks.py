"""Which blocks of the key/value cache belong to whom: counts, a free list and a prefix index, no tensors.

A block holds the keys and values of `block_size` consecutive tokens. It is in exactly one state: free; live
(one or more sequences refer to it); or cached (nobody refers to it, but a later prompt may find it by its
key). Block 0 is the null block: always zero, never handed out, the padding of every block table. A key is a
digest of everything the block depends on (`chain_key`): the weights, named by a namespace, all tokens up to the
block's end, and the scope within which prompts are shared. The pool grows only when live blocks need the room and
otherwise drops the cached block that was used longest ago, so memory follows the work and not the traffic. It shrinks
when its owner needs the memory for something else. The
cache's tensors follow `num_blocks`; blocks in `take_fresh()` must be zeroed before use, because a stale NaN under
a mask is still a NaN.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def chain_key(parent: bytes, tokens: bytes) -> bytes:
    """The key of a block whose predecessor has the key `parent` (at first its namespace's root)."""
    return hashlib.blake2b(tokens, key=parent, digest_size=16).digest()


def root_key(namespace: int, scope: str = "") -> bytes:
    return chain_key(namespace.to_bytes(16, "little"), scope.encode())


class BlockPool:
    """Not thread-safe; every method is O(blocks it is given)."""

    def __init__(self, *, max_blocks: int, initial_blocks: int = 64) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks is {max_blocks}; it must be at least 1")
        self.max_blocks = max_blocks
        self.limit: int | None = None
        """For a while, fewer than `max_blocks`: there was no memory for more."""
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
        return max(0, self._most - len(self._refs))

    @property
    def _most(self) -> int:
        return self.max_blocks if self.limit is None else min(self.max_blocks, self.limit)

    def refs(self, block: int) -> int:
        return self._refs.get(block, 0)

    def allocate(self, num: int) -> list[int] | None:
        """`num` blocks with one reference each, or None (and no change) if there are not so many."""
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
        """Drop one reference to each. The end of a chain becomes evictable before its beginning."""
        for block in reversed(blocks):
            left = self._refs[block] - 1
            if left:
                self._refs[block] = left
                continue
            del self._refs[block]
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known run of keys, not yet acquired."""
        blocks = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register(self, block: int, key: bytes, namespace: int) -> None:
        """Let later prompts find a live, full block. A key's first block wins; others stay private."""
        if key in self._by_key or block in self._key_of:
            return
        self._by_key[key] = block
        self._key_of[block] = (namespace, key)
        self._namespaces.setdefault(namespace, set()).add(block)

    def forget(self, namespace: int) -> None:
        """Nobody finds this namespace's blocks any more; those that nobody refers to are free."""
        for block in list(self._namespaces.get(namespace, ())):
            self._forget_block(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def shrink(self, size: int) -> dict[int, int]:
        """Keep no more than `size` blocks, live ones among them all; cached ones go, the least recently used first. The
        others get numbers from 1 to `size`: returns old number -> new, of those that move.
        """
        if len(self._refs) > size:
            raise ValueError(f"{len(self._refs)} blocks are live, more than {size}")
        size = min(size, self.num_blocks - 1)
        while len(self._refs) + len(self._cached) > size:
            self._evict()
        kept = self._refs.keys() | self._cached.keys()
        places = [block for block in range(size, 0, -1) if block not in kept]
        moves = {block: places.pop() for block in sorted(kept) if block > size}
        self._refs = {moves.get(block, block): refs for block, refs in self._refs.items()}
        self._cached = OrderedDict((moves.get(block, block), None) for block in self._cached)
        self._key_of = {moves.get(block, block): key for block, key in self._key_of.items()}
        self._by_key = {key: moves.get(block, block) for key, block in self._by_key.items()}
        for namespace, blocks in self._namespaces.items():
            self._namespaces[namespace] = {moves.get(block, block) for block in blocks}
        self._fresh = [moves.get(block, block) for block in self._fresh if block in kept]
        self._free = places
        self.num_blocks = size + 1
        return moves

    def _evict(self) -> None:
        """Free the cached block that was used longest ago."""
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
        wanted = 2 * (len(self._refs) + num)
        size = self.num_blocks - 1
        if len(self._free) < num and size < min(wanted, self._most):
            self._grow(max(wanted, self._initial_blocks))
        while len(self._free) < num:
            self._evict()

    def _grow(self, size: int) -> None:
        # At least doubling keeps the copying of tensors linear in the final size.
        size = min(max(size, 2 * (self.num_blocks - 1)), self._most)
        self._free = list(range(size, self.num_blocks - 1, -1)) + self._free
        self.num_blocks = size + 1
