"""The wall clock, watched: rows hold its time, and it can be set, or stand still while the machine sleeps.

Whoever decides by the age of a row asks here first whether the clock has moved by itself since the last look.
"""

from __future__ import annotations

import time
from collections.abc import Callable

TOLERANCE_S = 5.0
"""What a clock may be corrected by in passing, and what a busy machine may take between two readings."""


class WatchedClock:
    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._steady = steady
        self._offset = wall() - steady()

    def jump_s(self) -> float:
        """By how much the clock was set forward (or back, if negative) since the last look; 0 if it was not."""
        offset = self._wall() - self._steady()
        jump_s = offset - self._offset
        self._offset = offset
        return jump_s if abs(jump_s) > TOLERANCE_S else 0.0
