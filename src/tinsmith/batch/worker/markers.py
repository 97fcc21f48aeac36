"""What a mapper's process is at, in memory that it shares with its worker: known however suddenly the process ends.

Three threads of the process work on batches: one reads rows, one maps them, one stores results. Each has a slot, which
it writes before it begins and after it has ended; nothing is sent, so nothing is lost with the process. The slot of the
thread that maps says, too, whether the mapper has asked for a batch at all, and at which row it is where rows are
mapped one by one.
"""

from __future__ import annotations

import mmap
import struct
import tempfile
from typing import IO

from tinsmith.batch.types import Assignment

READ, MAP, STORE = range(3)
_STARTING, _IDLE, _BUSY = range(3)
_STATE = struct.Struct("q")
_PLACE = struct.Struct("qqq")  # batch_idx, attempt_id, row_idx
_ROW = struct.Struct("q")
_SLOT = _STATE.size + _PLACE.size
_ROW_AT = _STATE.size + _PLACE.size - _ROW.size
SIZE = 3 * _SLOT
NO_ROW = -1


def marker_file() -> IO[bytes]:
    """A file without a name whose descriptor a child inherits. All of its slots say that nothing was begun."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  its owner closes it
    file.truncate(SIZE)
    return file


class Marker:
    """The slots, in a file of `SIZE` bytes that another process maps, too; without one, in memory of this process."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(SIZE) if descriptor is None else mmap.mmap(descriptor, SIZE)

    # The mapper's process.

    def begin(self, stage: int, assignment: Assignment) -> None:
        """The state is written last: a process that ends in between has not begun."""
        at = stage * _SLOT
        _PLACE.pack_into(self._memory, at + _STATE.size, assignment.batch_idx, assignment.attempt_id, NO_ROW)
        _STATE.pack_into(self._memory, at, _BUSY)

    def row(self, row_idx: int) -> None:
        """The row that is mapped now."""
        _ROW.pack_into(self._memory, MAP * _SLOT + _ROW_AT, row_idx)

    def end(self, stage: int) -> None:
        _STATE.pack_into(self._memory, stage * _SLOT, _IDLE)

    def start(self) -> None:
        """The mapper begins, and has not asked for a batch."""
        _STATE.pack_into(self._memory, MAP * _SLOT, _STARTING)

    # The worker.

    @property
    def starting(self) -> bool:
        return _STATE.unpack_from(self._memory, MAP * _SLOT)[0] == _STARTING

    def busy(self) -> dict[tuple[int, int], int]:
        """Attempts (batch_idx, attempt_id) that are worked on, and the row of each; `NO_ROW` if it is not known."""
        found: dict[tuple[int, int], int] = {}
        for stage in (READ, STORE, MAP):
            if _STATE.unpack_from(self._memory, stage * _SLOT)[0] == _BUSY:
                batch_idx, attempt_id, row_idx = _PLACE.unpack_from(self._memory, stage * _SLOT + _STATE.size)
                found[batch_idx, attempt_id] = row_idx
        return found
