"""What a mapper's process works on: memory that it shares with its worker, so that it survives a sudden death.

The cells are whether the mapper has asked for a batch yet, then a slot for each batch in work. One batch is read at a
time, one stored, and `MAX_CONCURRENT_BATCHES` are mapped at most. In a job with stages, a slot also says which step
works on the batch, and how long it has waited for processes of its stages, in microseconds of the monotonic clock.
"""

from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Collection
from typing import IO, NamedTuple

from tinsmith.batch.types import MAX_CONCURRENT_BATCHES, Assignment

READ, STORE, MAP = range(3)
"""Slots. `MAP` is the first of those of the mapper."""
NO_ROW = NO_STEP = -1
_IDLE, _BUSY = range(2)
_STATE, _BATCH, _ATTEMPT, _ROW, _STEP, _WAITED, _WAITS_SINCE, _WIDTH = range(8)
_NUM_SLOTS = MAP + MAX_CONCURRENT_BATCHES
MARKER_BYTES = (1 + _NUM_SLOTS * _WIDTH) * 8


def marker_file() -> IO[bytes]:
    """An unnamed file for a marker, in the state in which nothing has begun. A child inherits its descriptor."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  its owner closes it
    file.truncate(MARKER_BYTES)
    return file


def _now() -> int:
    return int(time.monotonic() * 1e6)


class Work(NamedTuple):
    """An attempt in work: the row that is mapped or `NO_ROW`, the first of the steps that work on it or `NO_STEP`, and
    the seconds that it has waited for processes."""

    row: int
    step: int
    waited_s: float


class Marker:
    """The slots, in a shared file of `MARKER_BYTES`; without a file, in the memory of this process."""

    def __init__(self, descriptor: int | None = None) -> None:
        cells = memoryview(bytearray(MARKER_BYTES) if descriptor is None else mmap.mmap(descriptor, MARKER_BYTES)).cast(
            "q"
        )
        self._has_asked, self._slots = cells[:1], cells[1:]

    def set_starting(self, is_starting: bool) -> None:
        """Set whether the function is called, perhaps again, and has not asked for a batch."""
        self._has_asked[0] = not is_starting

    def begin(self, slot: int, assignment: Assignment) -> None:
        """Set a slot to work on an attempt. The state is written last: a process that dies before has not begun."""
        offset = slot * _WIDTH
        values = assignment.batch_idx, assignment.attempt_id, NO_ROW, NO_STEP, 0, 0
        for cell, value in enumerate(values, offset + 1):
            self._slots[cell] = value
        self._slots[offset] = _BUSY

    def set_row(self, slot: int, row_idx: int) -> None:
        """Set the row of a slot's batch that is mapped from now on; `NO_ROW` after the last."""
        self._slots[slot * _WIDTH + _ROW] = row_idx

    def begin_wait(self, slot: int) -> None:
        """Set that no step works on a slot's batch, which waits for a process."""
        self._slots[slot * _WIDTH + _STEP] = NO_STEP
        self._slots[slot * _WIDTH + _WAITS_SINCE] = _now()

    def end_wait(self, slot: int, step: int) -> None:
        """Set the step that works on a slot's batch from now on."""
        offset = slot * _WIDTH
        self._slots[offset + _WAITED] += _now() - self._slots[offset + _WAITS_SINCE]
        self._slots[offset + _WAITS_SINCE] = 0
        self._slots[offset + _STEP] = step

    def end(self, slot: int) -> None:
        self._slots[slot * _WIDTH] = _IDLE

    def end_others(self, slots: Collection[int]) -> None:
        """Set that nothing is in work except for the batches in these slots."""
        for slot in set(range(_NUM_SLOTS)).difference(slots):
            self.end(slot)

    @property
    def starting(self) -> bool:
        return not self._has_asked[0]

    def busy(self) -> dict[tuple[int, int], Work]:
        """The attempts (batch_idx, attempt_id) in work."""
        works: dict[tuple[int, int], Work] = {}
        for slot in range(_NUM_SLOTS):
            cells = self._slots[slot * _WIDTH : (slot + 1) * _WIDTH].tolist()
            if cells[_STATE] == _BUSY:
                waits_us = _now() - cells[_WAITS_SINCE] if cells[_WAITS_SINCE] else 0
                waited_s = (cells[_WAITED] + waits_us) / 1e6
                works[cells[_BATCH], cells[_ATTEMPT]] = Work(cells[_ROW], cells[_STEP], waited_s)
        return works
