"""A database with injected errors: once at a chosen point of a chosen transaction, or for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection

from tinsmith.db.database import Database, Values
from tinsmith.db.factory import open_database

TransactionPoint = Literal["read", "begin", "uncommitted", "committed"]
"""A reader, or a writer at its beginning, before its commit, or after a commit without confirmation."""

WRITING: tuple[TransactionPoint, ...] = ("begin", "uncommitted", "committed")


Fails = Callable[[TransactionPoint, int], BaseException | None]
"""The error of a transaction, by the point and the number of earlier transactions at it."""


def never(_point: TransactionPoint, _count: int) -> None:
    return None


def connection_error() -> exc.OperationalError:
    return exc.OperationalError("UPDATE futures SET state = ?", {}, Exception("server closed the connection"))


class FaultyDatabase(Database):
    """A database of either kind that counts its transactions by point, and raises the error that `fails` returns for
    (point, number).
    """

    def __init__(self, url: str) -> None:
        self._database = open_database(url)
        super().__init__(self._database.url, self._database.engine)
        self.reads_wait, self.notifies = self._database.reads_wait, self._database.notifies
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
        with self._database.read() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        self._reach("begin")
        with self._database.write() as connection:
            yield connection
            self._reach("uncommitted")
        self._reach("committed")

    # Without faults.

    def observe_use(self, on_use: Callable[[float], None]) -> None:
        self._database.observe_use(on_use)

    def close(self) -> None:
        self._database.close()

    def insert_once(self, table: sa.Table) -> sa.Insert:
        return self._database.insert_once(table)

    def clock(self) -> sa.ColumnElement[float]:
        return self._database.clock()

    def floor(self, expression: sa.ColumnElement[float]) -> sa.ColumnElement[Any]:
        return self._database.floor(expression)

    def array(self, elements: Sequence[int]) -> object:
        return self._database.array(elements)

    def lock(self, connection: Connection, name: str) -> None:
        self._database.lock(connection, name)

    def lock_rows(self, connection: Connection, query: sa.Select, values: Values = None) -> None:
        self._database.lock_rows(connection, query, values)

    def try_lock(self, name: str) -> AbstractContextManager[bool]:
        return self._database.try_lock(name)

    def notify(self, connection: Connection, channel: str, ids: Iterable[str]) -> None:
        self._database.notify(connection, channel, ids)

    def check_files(self) -> None:
        self._database.check_files()

    def checkpoint(self) -> None:
        self._database.checkpoint()

    def lock_schema(self) -> AbstractContextManager[Connection]:
        return self._database.lock_schema()
