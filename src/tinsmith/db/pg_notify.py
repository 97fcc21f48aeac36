"""Wake-ups between machines by Postgres' LISTEN and NOTIFY.

`Database.notify` sends in the transaction that writes the rows, so that rows are never committed without their
notification. This module receives: a thread with its own connection collects ids. It replaces a broken connection, and
one on which Postgres does not answer a probe in time. Notifications sent meanwhile are lost, so it wakes the reader
with an empty id, which means: read all rows. Slow polls cover the rest (`wakeups`). It sends only token streams, which
have no rows, on a second connection.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import structlog

from tinsmith.db.postgres import DEFAULT_TIMEOUTS, MAX_NOTIFY_BYTES, PostgresTimeouts, connect, connection_parameters
from tinsmith.db.wakeups import payloads
from tinsmith.runtime.background import ignore, start_supervised_thread

if TYPE_CHECKING:
    import psycopg

RECONNECT_S = 0.5
"""Pause between attempts to connect."""

QUIET_S = 3.0
"""A connection without notifications for this long is tested with a query."""

STREAM_S = 1.0
"""The limit of a statement that sends tokens, during which an engine waits."""

STREAM_PAUSE_S = 5.0
"""After Postgres took no tokens, further ones are lost for this long, so that the engine is not slowed down."""

log = structlog.get_logger()


class PostgresMailbox:
    """Reads one channel and its group's channel. `wake` does nothing, since `Database.notify` sends."""

    def __init__(
        self,
        url: str,
        channel: str,
        on_failure: Callable[[str], None] = ignore,
        timeouts: PostgresTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        self._parameters = connection_parameters(url, timeouts)
        self._statement_s = timeouts.statement_s
        self._channels = sorted({channel, channel.partition(".")[0]})
        self._lock = threading.Lock()
        self._ids: set[str] = set()
        self._sender: psycopg.Connection[Any] | None = None
        self._streams_at = 0.0
        self._woken, self._wake = os.pipe()
        self._ending, self._end = os.pipe()
        os.set_blocking(self._woken, False)
        self._thread = start_supervised_thread(f"listen-{channel}", self._run, self._ends_within, on_failure)

    def fileno(self) -> int:
        return self._woken

    def wake(self, name: str, ids: Iterable[str] = ()) -> None:
        """Does nothing: `Database.notify` was part of the transaction."""

    def stream(self, name: str, lines: Iterable[str]) -> None:
        """Send lines of token streams; lines that are too long or meet a broken connection are lost. One thread."""
        import psycopg

        if time.monotonic() < self._streams_at:
            return
        try:
            if self._sender is None or self._sender.closed:
                self._sender = connect(self._parameters | {"connect_timeout": 2}, STREAM_S, autocommit=True)
            short = (line for line in lines if len(line.encode()) < MAX_NOTIFY_BYTES)
            for text in filter(None, payloads(short, MAX_NOTIFY_BYTES)):  # an empty one means: read all rows
                self._sender.execute("SELECT pg_notify(%s, %s)", (name, text))
        except psycopg.Error as error:
            log.warning("tokens of a stream are late: Postgres did not take them", error=str(error))
            self._streams_at = time.monotonic() + STREAM_PAUSE_S

    def drain(self) -> set[str]:
        """All ids that arrived; an empty id means that others may have been missed."""
        with self._lock:
            ids, self._ids = self._ids, set()
            if ids:
                os.read(self._woken, 1)
        return ids

    def wait(self, timeout_s: float) -> bool:
        """Block until an id arrives; returns False after the timeout."""
        readable, _, _ = select.select([self._woken], [], [], timeout_s)
        return bool(readable)

    def close(self) -> None:
        os.write(self._end, b"x")
        self._thread.join()
        if self._sender is not None:
            self._sender.close()
        for descriptor in (self._woken, self._wake, self._ending, self._end):
            os.close(descriptor)

    def _add_ids(self, ids: Iterable[str]) -> None:
        with self._lock:
            # The pipe holds one byte while there are ids, so it cannot fill up.
            if not self._ids:
                os.write(self._wake, b"x")
            self._ids.update(ids)

    def _run(self) -> None:
        import psycopg

        while not self._ends_within(0.0):
            try:
                with connect(self._parameters, self._statement_s, autocommit=True) as connection:
                    self._listen(connection)
            except psycopg.Error as error:
                log.warning("the connection for wake-ups broke; reconnecting", error=str(error))
                self._ends_within(RECONNECT_S)

    def _listen(self, connection: psycopg.Connection[Any]) -> None:
        for channel in self._channels:
            connection.execute(f'LISTEN "{channel}"'.encode())
        self._add_ids([""])
        while True:
            readable, _, _ = select.select([connection, self._ending], [], [], QUIET_S)
            if self._ending in readable:
                return
            if not readable:
                connection.execute("SELECT 1")
            for notice in connection.notifies(timeout=0):
                self._add_ids(notice.payload.split("\n"))

    def _ends_within(self, timeout_s: float) -> bool:
        readable, _, _ = select.select([self._ending], [], [], timeout_s)
        return bool(readable)
