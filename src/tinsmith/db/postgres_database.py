"""`Database` on Postgres: concurrent writers (READ COMMITTED), advisory locks and notifications.

`postgres` has the connections and their limits of time. Reading connections are in autocommit mode, so that a reader
holds no transaction open. Named locks are advisory locks: in a writing transaction with two keys, otherwise with one,
which is held by a connection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import Connection

from tinsmith.db.database import Database, Fence, Values
from tinsmith.db.postgres import (
    DEFAULT_TIMEOUTS,
    IDLE_CONNECTIONS,
    MAX_CONNECTIONS,
    MAX_NOTIFY_BYTES,
    PostgresTimeouts,
    long_statements,
    make_postgres_engine,
    sqlalchemy_url,
    statement_limit_s,
    time_pool,
)
from tinsmith.db.statements import Statement
from tinsmith.db.wakeups import payloads

_MIGRATION_LOCK = 0x74696E73  # arbitrary, the same for all servers
_NAMED_LOCKS = 1  # the first of two keys; `try_lock` uses one key
_LOCK = sa.select(sa.func.pg_advisory_xact_lock(_NAMED_LOCKS, sa.func.hashtext(sa.bindparam("name"))))
_TRY_LOCK = sa.select(sa.func.pg_try_advisory_lock(sa.func.hashtext(sa.bindparam("name"))))
_UNLOCK = sa.select(sa.func.pg_advisory_unlock(sa.func.hashtext(sa.bindparam("name"))))
_NOTIFY = Statement(sa.select(sa.func.pg_notify(sa.bindparam("channel"), sa.bindparam("payload"))))


class PostgresDatabase(Database):
    reads_wait = True
    notifies = True

    def __init__(
        self,
        url: str,
        fence: Fence | None = None,
        *,
        connections: int = MAX_CONNECTIONS,
        timeouts: PostgresTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        """Opens at most `connections`; with one for each thread, threads never wait for a connection. Raises
        SettingsError for a URL of another database.
        """
        super().__init__(sqlalchemy_url(url), make_postgres_engine(url, timeouts, connections, IDLE_CONNECTIONS), fence)
        self._timeouts = timeouts

    @contextmanager
    def write(self) -> Iterator[Connection]:
        with self.engine.begin() as connection:
            if (limit_s := statement_limit_s()) is not None:
                connection.exec_driver_sql(f"SET LOCAL statement_timeout = {_milliseconds(limit_s)}")
            if self._fence:
                self._fence(connection)
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            if (limit_s := statement_limit_s()) is None:
                yield connection
                return
            connection.exec_driver_sql(f"SET statement_timeout = {_milliseconds(limit_s)}")
            yield connection
            usual_ms = _milliseconds(self._timeouts.statement_s)
            connection.exec_driver_sql(f"SET statement_timeout = {usual_ms}")

    def observe_use(self, on_use: Callable[[float], None]) -> None:
        time_pool(self.engine, on_use)

    def close(self) -> None:
        self.engine.dispose()

    def insert_once(self, table: sa.Table) -> sa.Insert:
        statement = postgresql.insert(table).on_conflict_do_nothing().inline()
        return statement.execution_options(preserve_rowcount=True)

    def clock(self) -> sa.ColumnElement[float]:
        return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Float)

    def floor(self, expression: sa.ColumnElement[float]) -> sa.ColumnElement[Any]:
        return sa.func.floor(expression)  # a cast would round

    def array(self, elements: Sequence[int]) -> object:
        return list(elements)

    def lock(self, connection: Connection, name: str) -> None:
        connection.execute(_LOCK, {"name": name})

    def lock_rows(self, connection: Connection, query: sa.Select, values: Values = None) -> None:
        connection.execute(query, values)

    @contextmanager
    def try_lock(self, name: str) -> Iterator[bool]:
        key = {"name": name}
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            acquired = bool(connection.scalar(_TRY_LOCK, key))
            try:
                yield acquired
            finally:
                if acquired:
                    connection.execute(_UNLOCK, key)

    def notify(self, connection: Connection, channel: str, ids: Iterable[str]) -> None:
        for payload in payloads(ids, MAX_NOTIFY_BYTES):
            _NOTIFY.count(connection, {"channel": channel, "payload": payload})

    def check_files(self) -> None:
        """Does nothing: the files are the server's."""

    def checkpoint(self) -> None:
        """Does nothing: Postgres has a process for it."""

    @contextmanager
    def lock_schema(self) -> Iterator[Connection]:
        with long_statements(), self.engine.connect() as connection:
            connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
            # Locked first, or two processes that find an empty schema would both create it.
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            yield connection


def _milliseconds(seconds: float) -> int:
    """A timeout as Postgres takes it; 0 means none."""
    return 0 if math.isinf(seconds) else math.ceil(seconds * 1000)
