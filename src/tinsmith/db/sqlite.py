"""SQLite beside SQLAlchemy: the checks of its files, a connection pool and a write lock.

SQLAlchemy's pool, BEGIN and COMMIT take much longer than SQLite's own work for a transaction. So connections stay open
between transactions, and BEGIN and COMMIT go to the driver. SQLAlchemy's statements join the open transaction.

SQLite has one writer at a time. The writers of one process queue on a lock, and only the holder waits for other
processes. A writer that has waited for `patience_s` fails without a write. Then further writers fail at once for a
while, since each of them would block a thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote

import sqlalchemy as sa
import structlog
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import OperationalError, TimeoutError

from tinsmith.db.database import DatabaseMovedError
from tinsmith.db.statements import Statement

if TYPE_CHECKING:
    from sqlalchemy.engine.interfaces import DBAPIConnection, DBAPICursor

POOL_SIZE = 5
"""Idle connections that stay open."""

MAX_BUSY_TIMEOUT_S = 30.0
"""The longest wait inside SQLite; a writer with a longer timeout tries again."""

STUCK_S = 1.0
"""After a writer timed out, other writers fail at once for this long."""

TICK_S = 0.1
"""Margin for the inexact timing of SQLite's waits."""

log = structlog.get_logger()


class DatabaseFiles:
    """The database file, its log and the log's index, as this process opened them.

    SQLite keeps using open files that were moved or deleted, which other processes cannot see. SQLite itself never
    replaces the three files while this process has a connection.
    """

    def __init__(self, path: str, *, exists: bool) -> None:
        """Create the database file unless it `exists`. Raises DatabaseMovedError if it should exist and does not."""
        if exists and not os.path.exists(path):
            raise DatabaseMovedError(path)
        # SQLite would create a file that all users can read; its log and index take the mode of this file.
        with contextlib.suppress(OSError):  # the file exists, or SQLite reports the error
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        self.path = path
        self._identities: dict[str, tuple[int, int] | None] = {path: _identity(path)}
        self.mark_closed()

    def mark_closed(self) -> None:
        """Forget log and index, which the last process to close the database deletes; no connection may be open."""
        self._identities |= {f"{self.path}-wal": None, f"{self.path}-shm": None}

    def check(self) -> None:
        """Raise DatabaseMovedError if a file was replaced."""
        for path, expected in self._identities.items():
            identity = _identity(path)
            if expected is None:
                self._identities[path] = identity
            elif identity != expected:
                raise DatabaseMovedError(path)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def make_engine(url: str, files: DatabaseFiles | None, timeout_s: float) -> Engine:
    """An engine whose connections wait up to `timeout_s` for a lock. `files` is None for a database in memory."""

    def connect() -> sqlite3.Connection:
        if files is None:
            return sqlite3.connect(":memory:", timeout_s, check_same_thread=False)
        files.check()
        # mode=rw, because SQLite would create a missing file.
        return sqlite3.connect(f"file:{quote(files.path)}?mode=rw", timeout_s, check_same_thread=False, uri=True)

    def configure(connection: DBAPIConnection, _record: object) -> None:
        connection.isolation_level = None  # type: ignore[attr-defined]  the driver starts no transactions
        with contextlib.closing(connection.cursor()) as cursor:
            _use_wal(cursor)
            cursor.execute("PRAGMA synchronous=NORMAL")
            cursor.execute("PRAGMA foreign_keys=ON")
            # KiB per connection; all share the file in the system's page cache.
            cursor.execute("PRAGMA cache_size=-16384")

    # Named parameters, as on Postgres. hide_parameters keeps request bodies out of the log.
    engine = sa.create_engine(url, creator=connect, paramstyle="named", hide_parameters=True)
    event.listen(engine, "connect", configure)
    event.listen(engine, "begin", _begin_or_join)
    return engine


def _use_wal(cursor: DBAPICursor) -> None:
    # When two processes set the mode of a new file concurrently, each waits for the other's lock, and SQLite reports to
    # one of them that the file is locked, without waiting for its timeout.
    deadline = time.monotonic() + MAX_BUSY_TIMEOUT_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.005)


class ConnectionPool:
    """Connections that stay open between transactions. Each has one user at a time, on any thread.

    A connection on which an operation failed is returned to SQLAlchemy, which rolls its transaction back.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._idle: deque[Connection] = deque()
        self.on_use: Callable[[float], None] | None = None
        """Called with the seconds of each use."""

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """A connection, outside of any transaction."""
        since = time.perf_counter()
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._engine.connect()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        else:
            if len(self._idle) < POOL_SIZE:
                self._idle.append(connection)
            else:
                connection.close()
        finally:
            if self.on_use:
                self.on_use(time.perf_counter() - since)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
        self._engine.dispose()


_BEGIN, _BEGIN_WRITE, _COMMIT = (Statement(sa.text(text)) for text in ("BEGIN", "BEGIN IMMEDIATE", "COMMIT"))


def begin(connection: Connection) -> None:
    """Begin a writing transaction, which locks the database at once: upgrading a reading transaction can fail without
    waiting. Raises OperationalError.
    """
    _BEGIN_WRITE.count(connection, {})


def _begin_or_join(connection: Connection) -> None:
    """SQLAlchemy calls this before its first statement in a transaction."""
    driver = connection.connection.dbapi_connection
    assert isinstance(driver, sqlite3.Connection)
    if not driver.in_transaction:
        _BEGIN.count(connection, {})


def commit(connection: Connection) -> None:
    """Commit the writing transaction. Raises DBAPIError."""
    if connection.in_transaction():  # of SQLAlchemy
        connection.commit()
    else:
        _COMMIT.count(connection, {})


def end_reading(connection: Connection) -> None:
    """End the transaction that SQLAlchemy began for its own statements, if any."""
    if connection.in_transaction():
        connection.rollback()


class WriteLock:
    """Held by one writer of this process at a time."""

    def __init__(self, patience_s: float = MAX_BUSY_TIMEOUT_S) -> None:
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._stuck_until = 0.0

    @property
    def busy_timeout_s(self) -> float:
        """How long SQLite waits for a lock."""
        return min(self._patience_s, MAX_BUSY_TIMEOUT_S)

    @contextmanager
    def acquire(self) -> Iterator[None]:
        """Wait for the other writers of this process. Raises TimeoutError."""
        patience_s = 0.0 if time.monotonic() < self._stuck_until else self._patience_s
        if not self._lock.acquire(timeout=-1 if math.isinf(patience_s) else patience_s):
            raise TimeoutError("another writer has held the database for too long")
        try:
            yield
        finally:
            self._lock.release()

    def begin(self, connection: Connection) -> None:
        """Begin a writing transaction once no other process writes. Raises OperationalError."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return begin(connection)
            except OperationalError as error:
                if not _is_locked(error):
                    raise
                if time.monotonic() >= deadline - TICK_S:
                    self._stuck_until = time.monotonic() + STUCK_S
                    raise
                log.warning("another process keeps the database locked; waiting for it")


def _is_locked(error: OperationalError) -> bool:
    return "locked" in str(error.orig)


@contextmanager
def file_lock(path: str) -> Iterator[bool]:
    """Try to lock a file until the end of the block or of the process; yields whether this process holds the lock."""
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
