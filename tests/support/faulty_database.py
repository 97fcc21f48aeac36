"""A database with injected errors: once at a chosen point of a chosen transaction, or for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from sqlalchemy import exc
from sqlalchemy.engine import Connection

from tinsmith.db.database import Database

TransactionPoint = Literal["read", "begin", "uncommitted", "committed"]
"""A reader, or a writer at its beginning, before its commit, or after a commit without confirmation."""

WRITING: tuple[TransactionPoint, ...] = ("begin", "uncommitted", "committed")


Fails = Callable[[TransactionPoint, int], BaseException | None]
"""The error of a transaction, by the moment and the number of earlier transactions at it."""


def never(_point: TransactionPoint, _count: int) -> None:
    return None


def connection_error() -> exc.OperationalError:
    return exc.OperationalError("UPDATE futures SET state = ?", {}, Exception("server closed the connection"))


class FaultyDatabase(Database):
    """Counts its transactions by moment, and raises the error that `fails` returns for (moment, number)."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._lock = threading.Lock()
        self.reset()

    def reset(self, fails: Fails = never, counts: dict[TransactionPoint, int] | None = None) -> None:
        """Set the counts, or start from zero."""
        self.fails = fails
        self.counts: dict[TransactionPoint, int] = counts or dict.fromkeys(("read", *WRITING), 0)
        self.raised = 0

    def fail_once(self, point: TransactionPoint, nth: int = 0, error: BaseException | None = None) -> None:
        """Fail at the `nth` transaction from now."""
        self.reset(lambda at, count: (error or connection_error()) if (at, count) == (point, nth) else None)

    def _reach(self, point: TransactionPoint) -> None:
        with self._lock:
            count = self.counts[point]
            self.counts[point] += 1
            error = self.fails(point, count)
            self.raised += error is not None
        if error is not None:
            raise error

    @contextmanager
    def read(self) -> Iterator[Connection]:
        self._reach("read")
        with super().read() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        self._reach("begin")
        with super().write() as connection:
            yield connection
            self._reach("uncommitted")
        self._reach("committed")
