"""Settlements on their way into the database, and what an engine does while the database is unavailable.

A database error is never the failure of a request. The engine waits out transient errors (a lost connection, a
deadlock, a full disk): a finished request stays here until its settlement is committed, and nothing is computed again.
A settlement whose commit was not confirmed is sent again, which changes nothing if it did commit. Any other error ends
the engine, and its successor recomputes from the log what was not committed: IterationFailedError, which blames no
request, or EngineFaultError, if it is a bug (`faults`).

`settle` returns after the commit. `try_settle` tries once and never waits, so it can be called during a training step;
the next `flush` or `settle` commits the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import structlog
from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError, SQLAlchemyError, TimeoutError

from tinsmith.engine.faults import EngineFaultError, classify
from tinsmith.engine.telemetry import RequestTimings
from tinsmith.runtime.failpoints import hit
from tinsmith.store.futures import Futures, Settlement

FIRST_PAUSE_S = 0.05
"""Pause before the second attempt; each later pause is twice as long."""

LONGEST_PAUSE_S = 1.0
"""Also the longest delay before a stopping engine reacts."""

log = structlog.get_logger()
T = TypeVar("T")


class IterationFailedError(BaseException):
    """The engine's own work failed, not a request. Not an Exception, so handlers of request errors do not catch it. It
    ends the engine; `__cause__` says why.
    """


def is_transient(error: SQLAlchemyError) -> bool:
    """Whether the same transaction may succeed later."""
    if isinstance(error, OperationalError | InterfaceError | InternalError | TimeoutError):
        return True
    return isinstance(error, DBAPIError) and error.connection_invalidated


class DatabaseRetry:
    """Retries while the database is unavailable, with growing pauses, until the engine is to stop.

    It retries without a limit, since a restarted engine would wait for the same database with less in memory. If
    another engine takes over meanwhile, it raises this engine's epoch, and the next write fails with LeaseLostError.
    """

    def __init__(self) -> None:
        self.stopping: Callable[[], bool] = lambda: False

    def run(self, action: Callable[[], T]) -> T:
        """Repeat `action` until it succeeds. Raises the SQLAlchemyError if it is not transient, or if the engine is to
        stop.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return action()
            except SQLAlchemyError as error:
                if not is_transient(error) or self.stopping():
                    raise
                log.warning("the database failed; trying again", error=repr(error))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class Outbox:
    def __init__(
        self,
        futures: Futures,
        timings: RequestTimings,
        database_retry: DatabaseRetry,
        committed: Callable[[Sequence[Settlement]], None],
    ) -> None:
        """`committed` is called once for each committed settlement."""
        self._futures = futures
        self._timings = timings
        self._database_retry = database_retry
        self._committed = committed
        self._uncommitted: list[Settlement] = []
        self._retry_at = 0.0
        self._pause_s = FIRST_PAUSE_S

    def settle(self, settlements: Sequence[Settlement], applied: Mapping[str, int] | None = None) -> None:
        """Commit these and earlier uncommitted settlements, however long it takes. `applied` is the progress of models.

        Raises IterationFailedError if that is impossible, or if the engine is to stop first.
        """
        hit("engine.ran")
        batch = [*self._uncommitted, *self._timings.add_work_times(settlements)]
        self._run_guarded(lambda: self._database_retry.run(lambda: self._commit(batch, applied or {})))

    def try_settle(self, settlements: Sequence[Settlement]) -> None:
        """Commit these now if the database permits, otherwise keep them for later. Raises IterationFailedError."""
        hit("engine.ran")
        self._uncommitted += self._timings.add_work_times(settlements)
        if time.monotonic() >= self._retry_at:
            self._run_guarded(self._try_once)

    def flush(self) -> None:
        """Commit uncommitted settlements, however long it takes. Raises IterationFailedError."""
        if self._uncommitted:
            batch = list(self._uncommitted)
            self._run_guarded(lambda: self._database_retry.run(lambda: self._commit(batch, {})))

    def _try_once(self) -> None:
        try:
            self._commit(list(self._uncommitted), {})
        except SQLAlchemyError as error:
            if not is_transient(error):
                raise
            log.warning("finished requests wait for the database", waiting=len(self._uncommitted), error=repr(error))
            self._retry_at = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _commit(self, batch: Sequence[Settlement], applied: Mapping[str, int]) -> None:
        self._futures.settle(batch, applied)
        hit("settle.committed")
        self._uncommitted.clear()
        self._retry_at, self._pause_s = 0.0, FIRST_PAUSE_S
        self._committed(batch)
        for settlement in batch:
            if settlement.clean_up:
                self._clean_up(settlement.clean_up)

    def _clean_up(self, clean_up: Callable[[], None]) -> None:
        """An error here fails no request: the request is settled, and unreferenced files are swept."""
        try:
            self._database_retry.run(clean_up)
        except (SQLAlchemyError, OSError) as error:
            log.error("cleaning up after a settled request failed", exc_info=error)

    def _run_guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if classify(error).is_fatal:
                raise EngineFaultError.of(error) from error
            raise IterationFailedError(f"finished requests could not be settled: {type(error).__name__}") from error
