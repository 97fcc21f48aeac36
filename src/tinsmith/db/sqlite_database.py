"""`Database` on SQLite: a file in WAL mode, with readers beside one writer at a time.

Writers of one process queue on a lock; `sqlite` has the lock, the connection pool and the checks of the files. A
writing transaction is the only one, so locks of rows and names have nothing to do. SQLite sends no notifications: a
writer wakes the processes of its machine by a `Mailbox`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import Connection

from tinsmith.db.database import Database, Fence, Values, now
from tinsmith.db.sqlite import (
    MAX_BUSY_TIMEOUT_S,
    ConnectionPool,
    DatabaseFiles,
    WriteLock,
    begin,
    commit,
    end_reading,
    file_lock,
    make_engine,
)


class SQLiteDatabase(Database):
    reads_wait = False
    notifies = False

    def __init__(
        self,
        url: str,
        fence: Fence | None = None,
        *,
        patience_s: float = MAX_BUSY_TIMEOUT_S,
        exists: bool = False,
    ) -> None:
        """A writer waits up to `patience_s` for other writers. With `exists`, raises DatabaseMovedError if the
        database's file is missing.
        """
        path = sa.make_url(url).database
        self._files = DatabaseFiles(path, exists=exists) if path and path != ":memory:" else None
        self._write_lock = WriteLock(patience_s)
        super().__init__(url, make_engine(url, self._files, self._write_lock.busy_timeout_s), fence)
        self._pool = ConnectionPool(self.engine)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        with self._write_lock.acquire(), self._pool.connection() as connection:
            self._write_lock.begin(connection)
            if self._fence:
                self._fence(connection)
            yield connection
            commit(connection)
            self.check_files()  # so that a write to a deleted file is not acknowledged

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self._pool.connection() as connection:
            yield connection
            end_reading(connection)

    def observe_use(self, on_use: Callable[[float], None]) -> None:
        self._pool.on_use = on_use

    def close(self) -> None:
        self._pool.close()
        if self._files:
            self._files.mark_closed()

    def insert_once(self, table: sa.Table) -> sa.Insert:
        statement = sqlite.insert(table).on_conflict_do_nothing().inline()
        return statement.execution_options(preserve_rowcount=True)

    def clock(self) -> sa.ColumnElement[float]:
        return sa.literal(now())

    def floor(self, expression: sa.ColumnElement[float]) -> sa.ColumnElement[Any]:
        return sa.cast(expression, sa.Integer)  # truncates; not every SQLite has floor

    def array(self, elements: Sequence[int]) -> object:
        return json.dumps(list(elements))

    def lock(self, connection: Connection, name: str) -> None:
        """Does nothing: there is one writer at a time."""

    def lock_rows(self, connection: Connection, query: sa.Select, values: Values = None) -> None:
        """Does nothing: there is one writer at a time."""

    def try_lock(self, name: str) -> AbstractContextManager[bool]:
        return file_lock(f"{sa.make_url(self.url).database}.{name}.lock")

    def notify(self, connection: Connection, channel: str, ids: Iterable[str]) -> None:
        """Does nothing: the writer wakes the readers by a `Mailbox`."""

    def check_files(self) -> None:
        if self._files:
            self._files.check()

    def checkpoint(self) -> None:
        with contextlib.closing(self.engine.raw_connection()) as connection:
            connection.cursor().execute("PRAGMA wal_checkpoint(PASSIVE)")

    @contextmanager
    def lock_schema(self) -> Iterator[Connection]:
        with self.engine.connect() as connection:
            # Locked first, or two processes that find an empty schema would both create it.
            begin(connection)
            yield connection
