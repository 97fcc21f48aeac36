"""The database as the other packages use it: transactions, queries and migrations, on SQLite or Postgres.

`Database` is the interface, `SQLiteDatabase` and `PostgresDatabase` are its implementations, and `factory` chooses by
URL. Only these know which database it is. `schema` has the tables; other modules interpret the rows.

On SQLite there is one writer at a time; on Postgres writers run concurrently (READ COMMITTED). So a transaction that
checks a row before it writes must lock that row (`with_for_update`), or write with a condition and count the rows, or
rely on a unique constraint (`insert_once`).

A fence runs at the beginning of every writing transaction, and raises if this process may no longer write.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from tinsmith.db.schema_versions import migrate_schema, read_schema_version, refuse_other_version
from tinsmith.db.statements import Statement
from tinsmith.errors import SettingsError
from tinsmith.runtime.failpoints import hit

FILES_POLL_S = 1.0
"""Interval of the checks that the database's files were not moved or deleted."""

Fence = Callable[[Connection], None]
Query = sa.Select | Statement
Values = Mapping[str, object] | None


class DatabaseMovedError(SQLAlchemyError):
    """The files of a SQLite database are no longer those that this process has open, so its writes are lost."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} was moved, deleted or replaced while Tinsmith had it open, so writes are lost. Stop all Tinsmith "
            "processes, put the file back with the -wal file beside it (or a backup), and start them again; "
            "to start over, choose an empty --data-dir"
        )


class Database(ABC):
    """Connections to one database. `write` opens a transaction, `read` a connection for reading."""

    reads_wait: bool
    """Whether a read waits for another process, and so may not run on the event loop."""

    notifies: bool
    """Whether `notify` wakes the listeners; otherwise the writer wakes them after its commit."""

    def __init__(self, url: str, engine: Engine, fence: Fence | None = None) -> None:
        self.url = url
        self.engine = engine
        self._fence = fence

    # Transactions.

    @abstractmethod
    def write(self) -> AbstractContextManager[Connection]:
        """A writing transaction, which commits at the end of the block."""

    @abstractmethod
    def read(self) -> AbstractContextManager[Connection]:
        """A connection for reading. On SQLite, all statements of SQLAlchemy share one transaction, and each `Statement`
        is its own transaction; on Postgres each statement is its own transaction.
        """

    @abstractmethod
    def observe_use(self, on_use: Callable[[float], None]) -> None:
        """Call `on_use` with the duration in seconds of each use of a connection."""

    @abstractmethod
    def close(self) -> None: ...

    # Queries in a transaction of their own.

    def execute(self, statement: sa.Executable, values: Values = None) -> int:
        """Execute one statement in its own transaction; returns the number of changed rows."""
        with self.write() as connection:
            return connection.execute(statement, values).rowcount

    def rows(self, query: Query, values: Values = None) -> Sequence[Any]:
        with self.read() as connection:
            if isinstance(query, Statement):
                return query.rows(connection, values or {})
            return connection.execute(query, values).all()

    def first(self, query: Query, values: Values = None) -> Any:  # noqa: ANN401  a row of the query's columns
        """The first row, or None."""
        with self.read() as connection:
            if isinstance(query, Statement):
                return query.first(connection, values or {})
            return connection.execute(query, values).first()

    def scalars(self, query: sa.Select, values: Values = None) -> list[Any]:
        """The first column of every row."""
        with self.read() as connection:
            return list(connection.scalars(query, values))

    def scalar(self, query: sa.Select, values: Values = None) -> Any:  # noqa: ANN401  of the column's type
        """The first column of the first row, or None."""
        with self.read() as connection:
            return connection.scalar(query, values)

    def page(self, query: sa.Select, limit: int | None, offset: int) -> tuple[Sequence[Any], int]:
        """A page of a query's rows, and the total number of rows. The query has one table or join."""
        count = query.with_only_columns(sa.func.count(), maintain_column_froms=True).order_by(None)
        with self.read() as connection:
            rows = connection.execute(query.limit(limit).offset(offset)).all()
            return rows, connection.scalar(count) or 0

    # Parts of statements.

    @abstractmethod
    def insert_once(self, table: sa.Table) -> sa.Insert:
        """An INSERT that does nothing, with row count 0, if a row with the same key exists or is being inserted."""

    @abstractmethod
    def clock(self) -> sa.ColumnElement[float]:
        """The time by the database's clock, which is the same for processes on several machines."""

    @abstractmethod
    def floor(self, expression: sa.ColumnElement[float]) -> sa.ColumnElement[Any]:
        """The largest integer that is not above `expression`, which is not negative."""

    @abstractmethod
    def array(self, elements: Sequence[int]) -> object:
        """The value of an array parameter of a `Statement`: JSON on SQLite, bigint[] on Postgres."""

    # Locks and wake-ups.

    @abstractmethod
    def lock(self, connection: Connection, name: str) -> None:
        """Lock a name until the end of a writing transaction. SQLite, with one writer at a time, needs no lock."""

    @abstractmethod
    def lock_rows(self, connection: Connection, query: sa.Select, values: Values = None) -> None:
        """Lock the rows of a query with FOR UPDATE until the end of a writing transaction. SQLite needs no lock."""

    @abstractmethod
    def try_lock(self, name: str) -> AbstractContextManager[bool]:
        """Try to lock a name until the end of the block; yields whether this process holds the lock.

        The lock ends with the process: on Postgres with its connection; on SQLite it is a file beside the database.
        """

    @abstractmethod
    def notify(self, connection: Connection, channel: str, ids: Iterable[str]) -> None:
        """On Postgres, NOTIFY the listeners of `channel` when this transaction commits."""

    # Files.

    @abstractmethod
    def check_files(self) -> None:
        """On SQLite, raise DatabaseMovedError if the database's files are not those that were opened."""

    @abstractmethod
    def checkpoint(self) -> None:
        """On SQLite, copy the write-ahead log into the database file without blocking writers. Otherwise the commit
        that fills the log would do so while other writers wait.
        """

    # The schema.

    @abstractmethod
    def lock_schema(self) -> AbstractContextManager[Connection]:
        """A connection in a writing transaction without limit of time, during which no other process migrates."""

    def migrate(self) -> None:
        """Migrate the schema to the newest version; processes may call it concurrently. Raises SettingsError."""
        try:
            with self.lock_schema() as connection:
                migrate_schema(connection)
                hit("migration.uncommitted")
                connection.commit()
        except OperationalError as error:
            raise SettingsError(f"the database cannot be reached or written: {error.orig}") from None

    def require_schema(self, fix: str) -> None:
        """Raise SettingsError, which ends with `fix`, unless the schema has this Tinsmith's version."""
        try:
            version = self.schema_version()
        except OperationalError as error:
            raise SettingsError(f"the database cannot be reached: {error.orig}") from None
        refuse_other_version(version, fix)

    def schema_version(self) -> str | None:
        """The version of the schema; None for a database without tables."""
        with self.engine.connect() as connection:
            return read_schema_version(connection)


def chunks(values: Sequence[str], size: int = 500) -> Iterator[Sequence[str]]:
    """Slices of a list, each short enough for one IN (...) clause."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


def now() -> float:
    """The time for rows: seconds since the epoch."""
    return time.time()
