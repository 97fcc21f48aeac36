"""The database: connections, transactions, migrations.

Owns how a transaction is opened; `tables` has the schema. Knows nothing of what rows mean. SQLite (in WAL) and Postgres
hold the same tables. On SQLite there is one writer at a time: those of one process take turns on a lock, so that they
never meet SQLite's sleeping busy handler; writers of different processes meet only there. On Postgres writers run
beside each other (READ COMMITTED): whoever checks before it writes must lock the row (`with_for_update`), or write
with a condition and count the rows, or leave it to a unique constraint (`insert_once`).

A fenced database begins every writing transaction with the fence, which raises if this process may not write any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import ArgumentError, OperationalError, SQLAlchemyError

from tinsmith.db import sqlite as sqlite_pool
from tinsmith.db.sqlite import MOST_IN_SQLITE_S, Turns
from tinsmith.db.wakeups import payloads
from tinsmith.errors import SettingsError
from tinsmith.runtime.failpoints import hit

if TYPE_CHECKING:
    from alembic.config import Config as AlembicConfig
    from alembic.script import ScriptDirectory

MAX_NOTIFY_BYTES = 7_900
"""Postgres takes less than 8,000 bytes in one NOTIFY."""

IDLE_IN_TRANSACTION_S = 10
"""Postgres ends a transaction of which nothing was heard for this long: a process that is stopped in the middle of one
must not hold its locks for ever."""

FILES_POLL_S = 1.0
"""How often a process looks whether the files of its database are still there."""

_MIGRATION_LOCK = 0x74696E73  # any number that all servers share

_LAST_BEFORE_RELEASE, _FIRST_RELEASE = "0010", "schema_0001"
"""Two names of one schema: the last revision of the chain before the first release, and the first release's."""


Fence = Callable[[Connection], None]


class DatabaseMovedError(SQLAlchemyError):
    """The files of a SQLite database are no longer those that this process has open: what it writes is lost."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} was moved, deleted or replaced while Tinsmith had it open, so what is written is lost. Stop all "
            "Tinsmith processes, put the file back with the -wal file beside it (or a backup), and start them again; "
            "to begin anew, choose an empty --data-dir"
        )


class _Files:
    """The identity of the files of a SQLite database, as this process opened them.

    SQLite does not look at the names of its files again: a process goes on with files that nobody else can see. As long
    as it has a connection, none of the three is replaced by SQLite itself.
    """

    def __init__(self, path: str) -> None:
        self._known = {path: _identity(path), f"{path}-wal": None, f"{path}-shm": None}

    def closed(self) -> None:
        """This process has no connection any more: the last one of all processes takes the log and its index along."""
        path = next(iter(self._known))
        self._known |= {f"{path}-wal": None, f"{path}-shm": None}

    def check(self) -> None:
        """Raises DatabaseMovedError."""
        for path, known in self._known.items():
            found = _identity(path)
            if known is None:
                self._known[path] = found
            elif found != known:
                raise DatabaseMovedError(path)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Database:
    """Connections to one database. `write` and `read` each give one transaction."""

    def __init__(
        self, url: str, fence: Fence | None = None, *, patience_s: float = MOST_IN_SQLITE_S, exists: bool = False
    ) -> None:
        """On SQLite, a writer waits for others for `patience_s` (see `turns`). `exists`: another process has made the
        database, and this one makes none. Raises DatabaseMovedError if its file is missing then.
        """
        self.url = sqlalchemy_url(url)
        self._fence = fence
        self._turns = Turns(patience_s)
        self.is_sqlite = self.url.startswith("sqlite")
        # hide_parameters: an error's text must not carry request bodies into the log.
        self._files: _Files | None = None
        if self.is_sqlite:
            path = sa.make_url(self.url).database
            if path and path != ":memory:":
                if exists and not os.path.exists(path):
                    raise DatabaseMovedError(path)
                _make_private_file(path)
                self._files = _Files(path)
            self.engine: Engine = self._sqlite_engine(self._turns.timeout_s, _configure_sqlite)
            self._hurried = self._of_hurried_writers()
            self._kept, self._kept_hurried = sqlite_pool.Kept(self.engine), sqlite_pool.Kept(self._hurried)
        else:
            self.engine = _postgres_engine(self.url)
            event.listen(self.engine, "connect", _configure_postgres)

    def time_use(self, used: Callable[[float], None]) -> None:
        """Tell `used` for how many seconds each connection was out."""
        if self.is_sqlite:
            self._kept.used = self._kept_hurried.used = used
        else:
            _time_pool(self.engine, used)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        if self.is_sqlite:
            with self._turns.mine(), self._kept.one() as connection:
                self._turns.begin(partial(sqlite_pool.begin, connection))
                if self._fence:
                    self._fence(connection)
                yield connection
                sqlite_pool.commit(connection)
                self.check_files()
        else:
            with self.engine.begin() as connection:
                if self._fence:
                    self._fence(connection)
                yield connection

    @contextmanager
    def write_at_once(self) -> Iterator[Connection | None]:
        """The same, if that waits for nobody: neither for another writer nor for the disk. Otherwise None."""
        if not self.is_sqlite:
            yield None
            return
        with self._turns.mine_at_once() as mine:
            if not mine:
                yield None
                return
            with self._kept_hurried.one() as connection:
                if not self._turns.begin_at_once(partial(sqlite_pool.begin, connection)):
                    yield None
                    return
                if self._fence:
                    self._fence(connection)
                yield connection
                sqlite_pool.commit(connection)
                self.check_files()

    def check_files(self) -> None:
        """On SQLite, whether its files are still those that were opened. Raises DatabaseMovedError.

        Every writing transaction ends with it, so that nothing is acknowledged that nobody will read.
        """
        if self._files:
            self._files.check()

    def _of_hurried_writers(self) -> Engine:
        """Connections that never wait for a lock, and leave it to all others to move the log to the file."""
        return self._sqlite_engine(0.0, _configure_hurried)

    def _sqlite_engine(self, timeout_s: float, configure: Callable[..., None]) -> Engine:
        path = sa.make_url(self.url).database or ":memory:"

        def connect() -> sqlite3.Connection:
            if self._files is None:
                return sqlite3.connect(path, timeout_s, check_same_thread=False)
            self._files.check()
            # Where the file is missing, SQLite would make an empty one.
            return sqlite3.connect(f"file:{quote(path)}?mode=rw", timeout_s, check_same_thread=False, uri=True)

        engine = sa.create_engine(self.url, creator=connect, hide_parameters=True)
        event.listen(engine, "connect", configure)
        event.listen(engine, "begin", sqlite_pool.joined)
        return engine

    @contextmanager
    def read(self) -> Iterator[Connection]:
        if self.is_sqlite:
            # A prepared statement is a transaction by itself; SQLAlchemy begins one for all of its own.
            with self._kept.one() as connection:
                yield connection
                sqlite_pool.end_reading(connection)
        else:
            # Each statement sees what is committed then, as it would in a transaction, but without BEGIN and ROLLBACK.
            with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                yield connection

    def insert_once(self, table: sa.Table) -> sa.Insert:
        """An INSERT that changes nothing, and counts no row, where a row of the same key exists or is being made."""
        dialect = sqlite if self.is_sqlite else postgresql
        statement = dialect.insert(table).on_conflict_do_nothing().inline()
        return statement.execution_options(preserve_rowcount=True)

    def clock(self) -> sa.ColumnElement[float]:
        """The time as the database has it: the processes of several machines agree on it."""
        if self.is_sqlite:
            return sa.literal(now())
        return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Float)

    def checkpoint(self) -> None:
        """On SQLite, move what has been written from its log to its file, while others go on writing: whoever commits
        with a full log does that while they wait. For those who write much."""
        if self.is_sqlite:
            with contextlib.closing(self.engine.raw_connection()) as connection:
                connection.cursor().execute("PRAGMA wal_checkpoint(PASSIVE)")

    def notify(self, connection: Connection, channel: str, ids: Iterable[str]) -> None:
        """Wake whoever listens on `channel`, if and when this transaction commits. SQLite has no such thing."""
        if self.is_sqlite:
            return
        for payload in payloads(ids, MAX_NOTIFY_BYTES):
            connection.execute(_NOTIFY, {"channel": channel, "payload": payload})

    @contextmanager
    def alone(self, name: str) -> Iterator[bool]:
        """Whether this process is the only one that does `name` now; others are told no until the block ends.

        The claim ends with the process: on Postgres it is the connection's, on SQLite a lock on a file beside its own.
        """
        if self.is_sqlite:
            with _claimed(f"{sa.make_url(self.url).database}.{name}.lock") as claimed:
                yield claimed
            return
        key = {"name": name}
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            claimed = bool(connection.scalar(_CLAIM, key))
            try:
                yield claimed
            finally:
                if claimed:
                    connection.execute(_DISCLAIM, key)

    def lock(self, connection: Connection, name: str) -> None:
        """Within a writing transaction, until it ends: others that lock the same name wait. On SQLite they wait in
        any case, since there is one writer at a time.
        """
        if not self.is_sqlite:
            connection.execute(_LOCK, {"name": name})

    def migrate(self) -> None:
        """Bring the schema to the newest version; several processes may call it at once. Raises SettingsError."""
        from alembic import command

        try:
            with self.migrations() as config:
                command.upgrade(config, "head")
                hit("migration.uncommitted")
        except OperationalError as error:
            raise SettingsError(f"the database cannot be reached or written: {error.orig}") from None

    @contextmanager
    def migrations(self) -> Iterator[AlembicConfig]:
        """One transaction for Alembic's commands, which nobody else's migrations can enter."""
        from alembic.config import Config as AlembicConfig
        from alembic.script import ScriptDirectory

        config = AlembicConfig()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
        # The lock first: two processes that both find an empty schema would both create it.
        with self.engine.connect() as connection:
            if self.is_sqlite:
                sqlite_pool.begin(connection)
            else:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            _check_version(connection, ScriptDirectory.from_config(config))
            config.attributes["connection"] = connection
            yield config
            connection.commit()

    def close(self) -> None:
        if self.is_sqlite:
            self._kept.close()
            self._kept_hurried.close()
            self._hurried.dispose()
        self.engine.dispose()
        if self._files:
            self._files.closed()


_NOTIFY = sa.select(sa.func.pg_notify(sa.bindparam("channel"), sa.bindparam("payload")))
_LOCKED_NAMES = 1  # the first of two keys; claims have one
_LOCK = sa.select(sa.func.pg_advisory_xact_lock(_LOCKED_NAMES, sa.func.hashtext(sa.bindparam("name"))))
_CLAIM = sa.select(sa.func.pg_try_advisory_lock(sa.func.hashtext(sa.bindparam("name"))))
_DISCLAIM = sa.select(sa.func.pg_advisory_unlock(sa.func.hashtext(sa.bindparam("name"))))


@contextmanager
def _claimed(path: str) -> Iterator[bool]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def sqlalchemy_url(url: str) -> str:
    """The URL as SQLAlchemy takes it: Postgres is reached by psycopg 3, whatever the URL calls it."""
    scheme, separator, rest = url.partition("://")
    return f"postgresql+psycopg{separator}{rest}" if scheme in ("postgres", "postgresql") else url


def _postgres_engine(url: str) -> Engine:
    scheme = url.partition("://")[0]
    if scheme != "postgresql+psycopg":
        raise SettingsError(f"database_url begins with {f'{scheme[:20]}://'!r}; use sqlite:/// or postgresql://")
    try:
        # Every worker thread of a server may hold one; a connection that broke is replaced before it is used.
        return sa.create_engine(url, pool_size=8, max_overflow=32, pool_pre_ping=True, hide_parameters=True)
    except ModuleNotFoundError:
        raise SettingsError("database_url is of a Postgres: pip install 'tinsmith[postgres]'") from None
    except (ArgumentError, ValueError):
        raise SettingsError("database_url is no URL; use postgresql://USER:PASSWORD@HOST/NAME") from None


def _make_private_file(path: str) -> None:
    """SQLite would let everyone read what it makes. Its other files have the mode of this one."""
    with contextlib.suppress(OSError):  # it is there already, or SQLite will say what is wrong
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def _check_version(connection: Connection, scripts: ScriptDirectory) -> None:
    """Accepts a database without tables or of a known schema version. Raises SettingsError for any other."""
    from alembic.migration import MigrationContext

    found = set(MigrationContext.configure(connection).get_current_heads())
    if found == {_LAST_BEFORE_RELEASE}:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = :to"), {"to": _FIRST_RELEASE})
        return
    unknown = found - {script.revision for script in scripts.walk_revisions()}
    if unknown:
        raise SettingsError(
            f"the database has schema version {', '.join(sorted(unknown))}, which this Tinsmith does not know; its own "
            f"is {scripts.get_current_head()}. If a newer Tinsmith made it, upgrade this one. If it is older than the "
            "first release, choose another database_url or an empty --data-dir"
        )


def _time_pool(pool: Engine, used: Callable[[float], None]) -> None:
    def checkout(_connection: object, record: sa.pool.ConnectionPoolEntry, _proxy: object) -> None:
        record.info["since"] = time.perf_counter()

    def checkin(_connection: object, record: sa.pool.ConnectionPoolEntry) -> None:
        since = record.info.pop("since", None)
        if since is not None:
            used(time.perf_counter() - since)

    event.listen(pool, "checkout", checkout)
    event.listen(pool, "checkin", checkin)


def _configure_postgres(dbapi_connection: sa.engine.interfaces.DBAPIConnection, _record: object) -> None:
    with contextlib.closing(dbapi_connection.cursor()) as cursor:
        cursor.execute(f"SET idle_in_transaction_session_timeout = '{IDLE_IN_TRANSACTION_S}s'")
    dbapi_connection.commit()


def _configure_sqlite(dbapi_connection: sa.engine.interfaces.DBAPIConnection, _record: object) -> None:
    # pysqlite must not open transactions by itself: `kept` says which kind to open.
    dbapi_connection.isolation_level = None  # type: ignore[attr-defined]
    cursor = dbapi_connection.cursor()
    _use_wal(cursor)
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    # KiB of each connection, of which a server keeps five; the system's own cache holds the file for all of them.
    cursor.execute("PRAGMA cache_size=-16384")
    cursor.close()


def _configure_hurried(dbapi_connection: sa.engine.interfaces.DBAPIConnection, record: object) -> None:
    _configure_sqlite(dbapi_connection, record)
    with contextlib.closing(dbapi_connection.cursor()) as cursor:
        cursor.execute("PRAGMA wal_autocheckpoint=0")


def _use_wal(cursor: sa.engine.interfaces.DBAPICursor) -> None:
    # Two processes that change a new file's mode at once would each wait for the other's lock: SQLite tells one of them
    # at once that the file is locked, however patient the connection is.
    deadline = time.monotonic() + MOST_IN_SQLITE_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.005)


def now() -> float:
    """Seconds since the epoch, for rows."""
    return time.time()
