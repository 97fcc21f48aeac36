"""What a sampler keeps of versions: least recently used first out beyond a budget of bytes, and never one in use.

Versions are called by keys. There is always room for one, whatever its size. Pure: knows no device and no clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict


class Shelf:
    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._users: Counter[str] = Counter()
        self._largest_bytes = 0

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    def has_room(self, num_coming: int) -> bool:
        """Whether one more may be sent for while some are on their way: what is not in use would go."""
        in_use = sum(size for key, size in self._sizes.items() if self._users[key])
        coming = num_coming * (self._largest_bytes or max(1, self._budget_bytes // 4))  # a guess, for the first
        return in_use + coming < self._budget_bytes or (in_use == 0 and num_coming == 0)

    def evict(self, coming_bytes: int) -> list[str]:
        """Take off what has to go so that this much fits; returns the keys. What is in use stays, whatever fits."""
        gone: list[str] = []
        excess = self.num_bytes + coming_bytes - self._budget_bytes
        for key, size in list(self._sizes.items()):
            if excess <= 0:
                break
            if not self._users[key]:
                del self._sizes[key]
                excess -= size
                gone.append(key)
        return gone

    def add(self, key: str, num_bytes: int) -> None:
        self._sizes[key] = num_bytes
        self._largest_bytes = max(self._largest_bytes, num_bytes)

    def use(self, key: str) -> None:
        """One more request needs this version until it is released."""
        self._users[key] += 1
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def release(self, key: str) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
