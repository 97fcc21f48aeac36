"""Connections to SQLite that are kept open between transactions, and transactions by the driver's own words.

Taking a connection from SQLAlchemy's pool, beginning and committing by it take 0.1 ms of a processor, and SQLite 0.01.
A kept connection is SQLAlchemy's all the same: a statement of its own finds a transaction that was begun here, and
joins it. Each has one user at a time, of whatever thread. A connection on which something failed is given back to
SQLAlchemy, which takes back what was not committed. Knows no table, and nothing of whose turn it is (`turns`).

Writers of SQLite take turns: those of one process on a lock, and the one whose turn it is with other processes.

A writer waits for as long as its patience, then gets an error, with nothing done. While another process does not let
go of the database, those who come later are told at once: each of them would wait on a thread of its own.
"""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, OperationalError, TimeoutError

MOST = 5
"""Connections that wait for their next user; more are closed."""


class Kept:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._free: deque[Connection] = deque()
        self.used: Callable[[float], None] | None = None
        """Told how long each connection was out."""

    @contextmanager
    def one(self) -> Iterator[Connection]:
        """A connection, outside of any transaction."""
        since = time.perf_counter()
        try:
            connection = self._free.pop()
        except IndexError:
            connection = self._engine.connect()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        else:
            if len(self._free) < MOST:
                self._free.append(connection)
            else:
                connection.close()
        finally:
            if self.used:
                self.used(time.perf_counter() - since)

    def close(self) -> None:
        while self._free:
            self._free.pop().close()


def begin(connection: Connection) -> None:
    """A writing transaction, which locks at once, since upgrading a reader can fail without waiting. Raises
    OperationalError.
    """
    _execute(connection, "BEGIN IMMEDIATE")


def joined(connection: Connection) -> None:
    """What SQLAlchemy begins for a statement of its own: nothing, where a transaction is open."""
    if not _driver(connection).in_transaction:
        _execute(connection, "BEGIN")


def commit(connection: Connection) -> None:
    """What was done, if anything was begun. Raises DBAPIError."""
    if connection.in_transaction():  # as SQLAlchemy sees it
        connection.commit()
    else:
        _execute(connection, "COMMIT")


def end_reading(connection: Connection) -> None:
    """What SQLAlchemy began for statements of its own."""
    if connection.in_transaction():
        connection.rollback()


def _execute(connection: Connection, statement: str) -> None:
    try:
        _driver(connection).execute(statement)
    except sqlite3.Error as error:
        raise DBAPIError.instance(statement, None, error, sqlite3.Error, dialect=connection.dialect) from error


def _driver(connection: Connection) -> sqlite3.Connection:
    driver = connection.connection.dbapi_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


MOST_IN_SQLITE_S = 30.0
"""The longest wait that is left to SQLite itself; whoever is more patient asks again."""

STUCK_S = 1.0
"""After somebody waited in vain, others do not begin to wait as long as this."""

TICK_S = 0.1
"""SQLite's own clock of such a wait is not exact."""

log = structlog.get_logger()


class Turns:
    def __init__(self, patience_s: float = MOST_IN_SQLITE_S) -> None:
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._stuck_until = 0.0

    @property
    def timeout_s(self) -> float:
        """How long SQLite is to wait by itself."""
        return min(self._patience_s, MOST_IN_SQLITE_S)

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Among the writers of this process. Raises TimeoutError."""
        patience_s = 0.0 if time.monotonic() < self._stuck_until else self._patience_s
        if not self._lock.acquire(timeout=-1 if math.isinf(patience_s) else patience_s):
            raise TimeoutError("another writer has held the database for too long")
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def mine_at_once(self) -> Iterator[bool]:
        """Whether it is our turn without waiting for the other writers of this process."""
        mine = self._lock.acquire(blocking=False)
        try:
            yield mine
        finally:
            if mine:
                self._lock.release()

    def begin_at_once(self, begin: Callable[[], None]) -> bool:
        """Begin a writing transaction on a connection that does not wait; False if another process has one."""
        try:
            begin()
        except OperationalError as error:
            if not _is_locked(error):
                raise
            return False
        return True

    def begin(self, begin: Callable[[], None]) -> None:
        """Begin a writing transaction, once other processes are done with theirs. Raises OperationalError."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return begin()
            except OperationalError as error:
                if not _is_locked(error):
                    raise
                if time.monotonic() >= deadline - TICK_S:
                    self._stuck_until = time.monotonic() + STUCK_S
                    raise
                log.warning("another process does not let go of the database; waiting for it")


def _is_locked(error: OperationalError) -> bool:
    return "locked" in str(error.orig)
