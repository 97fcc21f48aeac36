"""The database: connections, transactions, migrations, and the differences between SQLite and Postgres.

`schema` has the tables; other modules interpret the rows. SQLite runs in WAL mode and has one writer at a time: writers
of one process queue on a lock (`sqlite`). On Postgres writers run concurrently (READ COMMITTED). A transaction that
checks a row before it writes must lock that row (`with_for_update`), or write with a condition and count the rows, or
rely on a unique constraint (`insert_once`).

A fence runs at the beginning of every writing transaction, and raises if this process may no longer write.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import OperationalError

from tinsmith.db.postgres import (
    DEFAULT_TIMEOUTS,
    PostgresTimeouts,
    long_statements,
    make_postgres_engine,
    sqlalchemy_url,
    statement_limit_s,
    time_pool,
)
from tinsmith.db.sqlite import (
    MAX_BUSY_TIMEOUT_S,
    ConnectionPool,
    DatabaseFiles,
    DatabaseMovedError,
    WriteLock,
    begin,
    commit,
    end_reading,
    file_lock,
    make_engine,
)
from tinsmith.db.statements import Statement
from tinsmith.db.wakeups import payloads
from tinsmith.errors import SettingsError
from tinsmith.runtime.failpoints import hit

if TYPE_CHECKING:
    from alembic.config import Config as AlembicConfig
    from alembic.script import ScriptDirectory

MAX_NOTIFY_BYTES = 7_900
"""The payload of a Postgres NOTIFY must be shorter than 8,000 bytes."""

MAX_CONNECTIONS, IDLE_CONNECTIONS = 40, 8
"""Limits of one `Database`'s connections to Postgres: in total, unless it states its own, and idle."""

LEASE_CONNECTIONS, ENGINE_CONNECTIONS = 2, 8
"""An engine's connections: for its lease, and for all else. It has two more for wake-ups (`pg_notify`)."""

FILES_POLL_S = 1.0
"""Interval of the checks that the database's files were not moved or deleted."""

_MIGRATION_LOCK = 0x74696E73  # arbitrary, the same for all servers

_LAST_BEFORE_RELEASE, _FIRST_RELEASE = "0010", "schema_0001"
"""Two revisions with the same schema: the last before the first release, and that of the first release."""

Fence = Callable[[Connection], None]
Query = sa.Select | Statement
Values = Mapping[str, object] | None

__all__ = ["Database", "DatabaseMovedError", "Fence", "now", "sqlalchemy_url"]


class Database:
    """Connections to one database. `write` opens a transaction, `read` a connection for reading."""

    def __init__(
        self,
        url: str,
        fence: Fence | None = None,
        *,
        patience_s: float = MAX_BUSY_TIMEOUT_S,
        exists: bool = False,
        connections: int = MAX_CONNECTIONS,
        timeouts: PostgresTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        """On SQLite, a writer waits up to `patience_s` for other writers. With `exists`, raises DatabaseMovedError if
        the database's file is missing. `connections` is the limit on Postgres; with one for each thread, threads never
        wait for a connection.
        """
        self.url = sqlalchemy_url(url)
        self._fence = fence
        self._timeouts = timeouts
        self.is_sqlite = self.url.startswith("sqlite")
        self._files: DatabaseFiles | None = None
        if self.is_sqlite:
            path = sa.make_url(self.url).database
            if path and path != ":memory:":
                self._files = DatabaseFiles(path, exists=exists)
            self._write_lock = WriteLock(patience_s)
            self.engine: Engine = make_engine(self.url, self._files, self._write_lock.busy_timeout_s)
            self._pool = ConnectionPool(self.engine)
        else:
            self.engine = make_postgres_engine(url, timeouts, connections, IDLE_CONNECTIONS)

    def observe_use(self, on_use: Callable[[float], None]) -> None:
        """Call `on_use` with the duration in seconds of each use of a connection."""
        if self.is_sqlite:
            self._pool.on_use = on_use
        else:
            time_pool(self.engine, on_use)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        if self.is_sqlite:
            with self._write_lock.acquire(), self._pool.connection() as connection:
                self._write_lock.begin(connection)
                if self._fence:
                    self._fence(connection)
                yield connection
                commit(connection)
                self.check_files()  # so that a write to a deleted file is not acknowledged
        else:
            with self.engine.begin() as connection:
                if (limit_s := statement_limit_s()) is not None:
                    connection.exec_driver_sql(f"SET LOCAL statement_timeout = {_milliseconds(limit_s)}")
                if self._fence:
                    self._fence(connection)
                yield connection

    def check_files(self) -> None:
        """On SQLite, raise DatabaseMovedError if the database's files are not those that were opened."""
        if self._files:
            self._files.check()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection for reading. On SQLite, all statements of SQLAlchemy share one transaction, and each `Statement`
        is its own transaction; on Postgres each statement is its own transaction.
        """
        if self.is_sqlite:
            with self._pool.connection() as connection:
                yield connection
                end_reading(connection)
        else:
            with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                if (limit_s := statement_limit_s()) is None:
                    yield connection
                    return
                connection.exec_driver_sql(f"SET statement_timeout = {_milliseconds(limit_s)}")
                yield connection
                usual_ms = _milliseconds(self._timeouts.statement_s)
                connection.exec_driver_sql(f"SET statement_timeout = {usual_ms}")

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

    def insert_once(self, table: sa.Table) -> sa.Insert:
        """An INSERT that does nothing, with row count 0, if a row with the same key exists or is being inserted."""
        dialect = sqlite if self.is_sqlite else postgresql
        statement = dialect.insert(table).on_conflict_do_nothing().inline()
        return statement.execution_options(preserve_rowcount=True)

    def clock(self) -> sa.ColumnElement[float]:
        """The time by the database's clock, which is the same for processes on several machines."""
        if self.is_sqlite:
            return sa.literal(now())
        return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Float)

    def checkpoint(self) -> None:
        """On SQLite, copy the write-ahead log into the database file without blocking writers. Otherwise the commit
        that fills the log would do so while other writers wait.
        """
        if self.is_sqlite:
            with contextlib.closing(self.engine.raw_connection()) as connection:
                connection.cursor().execute("PRAGMA wal_checkpoint(PASSIVE)")

    def notify(self, connection: Connection, channel: str, ids: Iterable[str]) -> None:
        """On Postgres, NOTIFY the listeners of `channel` when this transaction commits."""
        if not self.is_sqlite:
            for payload in payloads(ids, MAX_NOTIFY_BYTES):
                _NOTIFY.count(connection, {"channel": channel, "payload": payload})

    @contextmanager
    def try_lock(self, name: str) -> Iterator[bool]:
        """Try to lock a name until the end of the block; yields whether this process holds the lock.

        The lock ends with the process: on Postgres with its connection; on SQLite it is a file beside the database.
        """
        if self.is_sqlite:
            with file_lock(f"{sa.make_url(self.url).database}.{name}.lock") as acquired:
                yield acquired
            return
        key = {"name": name}
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            acquired = bool(connection.scalar(_TRY_LOCK, key))
            try:
                yield acquired
            finally:
                if acquired:
                    connection.execute(_UNLOCK, key)

    def lock(self, connection: Connection, name: str) -> None:
        """Lock a name until the end of a writing transaction. SQLite, with one writer at a time, needs no lock."""
        if not self.is_sqlite:
            connection.execute(_LOCK, {"name": name})

    def migrate(self) -> None:
        """Migrate the schema to the newest version; processes may call it concurrently. Raises SettingsError."""
        from alembic import command

        config, scripts = _migrations()
        try:
            with long_statements(), self.engine.connect() as connection:
                # Locked first, or two processes that find an empty schema would both create it.
                if self.is_sqlite:
                    begin(connection)
                else:
                    connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
                    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
                _check_version(connection, scripts)
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
                hit("migration.uncommitted")
                connection.commit()
        except OperationalError as error:
            raise SettingsError(f"the database cannot be reached or written: {error.orig}") from None

    def require_schema(self, fix: str) -> None:
        """Raise SettingsError, which ends with `fix`, unless the schema has this Tinsmith's version."""
        scripts = _migrations()[1]
        try:
            version = self.schema_version()
        except OperationalError as error:
            raise SettingsError(f"the database cannot be reached: {error.orig}") from None
        if version == scripts.get_current_head():
            return
        if version is None:
            raise SettingsError(f"the database has no tables of Tinsmith yet: {fix}")
        _refuse_unknown_version({version} - {_LAST_BEFORE_RELEASE}, scripts)
        raise SettingsError(
            f"the database has schema version {version}, older than this Tinsmith's {scripts.get_current_head()}: {fix}"
        )

    def schema_version(self) -> str | None:
        """The version of the schema; None for a database without tables."""
        from alembic.migration import MigrationContext

        with self.engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()

    def close(self) -> None:
        if self.is_sqlite:
            self._pool.close()
        else:
            self.engine.dispose()
        if self._files:
            self._files.mark_closed()


_NOTIFY = Statement(sa.select(sa.func.pg_notify(sa.bindparam("channel"), sa.bindparam("payload"))))
_LOCKED_NAMES = 1  # the first of two keys; `try_lock` uses one key
_LOCK = sa.select(sa.func.pg_advisory_xact_lock(_LOCKED_NAMES, sa.func.hashtext(sa.bindparam("name"))))
_TRY_LOCK = sa.select(sa.func.pg_try_advisory_lock(sa.func.hashtext(sa.bindparam("name"))))
_UNLOCK = sa.select(sa.func.pg_advisory_unlock(sa.func.hashtext(sa.bindparam("name"))))


def _milliseconds(seconds: float) -> int:
    """A timeout as Postgres takes it; 0 means none."""
    return 0 if math.isinf(seconds) else math.ceil(seconds * 1000)


def _migrations() -> tuple[AlembicConfig, ScriptDirectory]:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config, ScriptDirectory.from_config(config)


def _check_version(connection: Connection, scripts: ScriptDirectory) -> None:
    """Raise SettingsError unless the database is empty or has a known schema version."""
    from alembic.migration import MigrationContext

    versions = set(MigrationContext.configure(connection).get_current_heads())
    if versions == {_LAST_BEFORE_RELEASE}:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = :to"), {"to": _FIRST_RELEASE})
        return
    _refuse_unknown_version(versions, scripts)


def _refuse_unknown_version(versions: set[str], scripts: ScriptDirectory) -> None:
    unknown = versions - {script.revision for script in scripts.walk_revisions()}
    if unknown:
        raise SettingsError(
            f"the database has schema version {', '.join(sorted(unknown))}, which this Tinsmith does not know; its own "
            f"is {scripts.get_current_head()}. If a newer Tinsmith created the database, upgrade this one. If it is "
            "older than the first release, choose another database_url or an empty --data-dir"
        )


def chunks(values: Sequence[str], size: int = 500) -> Iterator[Sequence[str]]:
    """Slices of a list, each short enough for one IN (...) clause."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


def now() -> float:
    """The time for rows: seconds since the epoch."""
    return time.time()
