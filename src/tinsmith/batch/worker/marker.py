"""What a mapper's process works on: memory that it shares with its worker, so that it survives a sudden death.

The cells are whether the mapper has asked for a batch yet, then a slot for each batch in work: state, batch_idx,
attempt_id, row_idx. One batch is read at a time, one stored, and `MAX_CONCURRENT_BATCHES` are mapped at most.
"""

from __future__ import annotations

import mmap
import tempfile
from typing import IO

from tinsmith.batch.types import MAX_CONCURRENT_BATCHES, Assignment

READ, STORE, MAP = range(3)
"""Slots. `MAP` is the first of those of the mapper."""
NO_ROW = -1
_IDLE, _BUSY = range(2)
_WIDTH = 4
_NUM_SLOTS = MAP + MAX_CONCURRENT_BATCHES
MARKER_BYTES = (1 + _NUM_SLOTS * _WIDTH) * 8


def marker_file() -> IO[bytes]:
    """An unnamed file for a marker, in the state in which nothing has begun. A child inherits its descriptor."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  its owner closes it
    file.truncate(MARKER_BYTES)
    return file


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
        for cell, value in enumerate((assignment.batch_idx, assignment.attempt_id, NO_ROW), offset + 1):
            self._slots[cell] = value
        self._slots[offset] = _BUSY

    def set_row(self, slot: int, row_idx: int) -> None:
        """Set the row of a slot's batch that is mapped from now on; `NO_ROW` after the last."""
        self._slots[slot * _WIDTH + 3] = row_idx

    def end(self, slot: int) -> None:
        self._slots[slot * _WIDTH] = _IDLE

    @property
    def starting(self) -> bool:
        return not self._has_asked[0]

    def busy(self) -> dict[tuple[int, int], int]:
        """The attempts (batch_idx, attempt_id) in work, with the row of each or `NO_ROW`."""
        slots = [self._slots[slot * _WIDTH : (slot + 1) * _WIDTH] for slot in range(_NUM_SLOTS)]
        return {(batch_idx, attempt_id): row for state, batch_idx, attempt_id, row in slots if state == _BUSY}
