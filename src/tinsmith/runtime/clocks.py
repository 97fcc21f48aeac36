"""Detects jumps of the wall clock.

Rows hold wall-clock times, and the clock can be set, or jump when the machine wakes up. Code that expires rows by age
calls `WatchedClock.jump_s` first, and postpones expiry after a jump.
"""

from __future__ import annotations

import time
from collections.abc import Callable

TOLERANCE_S = 5.0
"""Smaller differences are ordinary clock corrections, or delays between the two readings on a busy machine."""


class WatchedClock:
    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._steady = steady
        self._offset = wall() - steady()

    def jump_s(self) -> float:
        """Seconds by which the clock jumped forward (negative: back) since the last call, or 0."""
        offset = self._wall() - self._steady()
        jump_s = offset - self._offset
        self._offset = offset
        return jump_s if abs(jump_s) > TOLERANCE_S else 0.0
