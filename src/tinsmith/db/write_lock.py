"""Writers of SQLite take turns: those of one process on a lock, and the one whose turn it is with other processes.

A writer waits for as long as its patience, then gets an error, with nothing done. While another process does not let
go of the database, those who come later are told at once: each of them would wait on a thread of its own.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
from sqlalchemy.exc import OperationalError, TimeoutError

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
