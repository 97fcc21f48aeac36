"""Connections to SQLite that are kept open between transactions, and transactions by the driver's own words.

Taking a connection from SQLAlchemy's pool, beginning and committing by it take 0.1 ms of a processor, and SQLite 0.01.
A kept connection is SQLAlchemy's all the same: a statement of its own finds a transaction that was begun here, and
joins it. Each has one user at a time, of whatever thread. A connection on which something failed is given back to
SQLAlchemy, which takes back what was not committed. Knows no table, and nothing of whose turn it is (`turns`).
"""

from __future__ import annotations

import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

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
