"""Quarantine: requests that may have ended an engine's process run apart from the others for a limited number of tries.

Before the engine works on requests it writes them into its in-flight journal, a small file that survives the process
(but not the machine: it is not synced). An engine that finds a journal knows what its predecessor was working on when
it died. These requests are suspects: from then on they run in batches of at most an eighth of that size, finally alone,
in their original order. A settled request leaves quarantine; one that ended MAX_DEATHS engines while it ran alone is
settled as failed. An engine that is asked to stop, or fails for its own reasons, clears its journal.

The journal of a dead engine goes with its runs (`cluster.in_flight_journal`): the engine that claims them adopts it.
Knows nothing about what requests do.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import structlog

from tinsmith.cluster.in_flight_journal import Note, Suspect, after_death
from tinsmith.errors import EngineFailedError
from tinsmith.runtime.failpoints import hit
from tinsmith.types import Pending

MAX_DEATHS = 5
"""An engine killed from outside looks the same, so a request gets a few more tries."""

log = structlog.get_logger()


class Quarantine:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._cleared = False
        self._running: Sequence[str] = ()
        self._written = b""
        self._suspects = after_death(path)

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def keep(self, pending: Collection[str]) -> None:
        """Drop suspects that were settled before the death; called once, with everything that waits."""
        self.forget(self._suspects.keys() - pending)
        if self._suspects:
            log.warning("an engine died; its running requests are quarantined", request_ids=sorted(self._suspects)[:20])
        self._write()

    def adopt(self, notes: Iterable[str], waiting: Collection[str]) -> None:
        """Take over suspects among the requests that wait here from the journals of dead engines."""
        for text in notes:
            for request_id, other in Note.parse(text).suspects.items():
                if request_id in waiting:
                    known = self._suspects.get(request_id, other)
                    worst = Suspect(min(known.batch_size, other.batch_size), max(known.deaths, other.deaths))
                    self._suspects[request_id] = worst
        self._write()

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests were settled."""
        if self._suspects:
            for request_id in request_ids:
                self._suspects.pop(request_id, None)

    @contextlib.contextmanager
    def running(self, request_ids: Sequence[str]) -> Iterator[None]:
        """The journal names these requests within the block; an inner block replaces an outer one."""
        outer, self._running = self._running, request_ids
        self._write()
        hit("engine.running")
        try:
            yield
        finally:
            self._running = outer
            if outer:
                self._write()

    def groups(self, requests: Sequence[Pending]) -> list[list[Pending]]:
        """The requests in order, split so that suspects run apart from the others, in batches of at most their batch
        size.
        """
        if not self._suspects:
            return [list(requests)] if requests else []
        groups: list[list[Pending]] = []
        last_size: int | None = None
        for request in requests:
            size = self.batch_size(request.request_id)
            if groups and size == last_size and (size == 0 or len(groups[-1]) < size):
                groups[-1].append(request)
            else:
                groups.append([request])
            last_size = size
        return groups

    def batch_size(self, request_id: str) -> int:
        """The largest batch for a suspect; 0 if the request is not a suspect."""
        suspect = self._suspects.get(request_id)
        return suspect.batch_size if suspect else 0

    def verdict(self, request_id: str) -> EngineFailedError | None:
        """Why a request is not tried again; None if it is."""
        suspect = self._suspects.get(request_id)
        if suspect is None or suspect.deaths < MAX_DEATHS:
            return None
        return EngineFailedError(
            f"request {request_id!r} ended the engine's process {suspect.deaths} times while nothing else ran (out of "
            "memory, or a crash below Python); it is not tried again"
        )

    def clear(self) -> None:
        """Clear the journal for good: the end of this process is no request's fault. Thread-safe."""
        with self._lock:
            self._cleared = True
            self._store(b"")

    def _write(self) -> None:
        note = Note(list(self._running), self._suspects).text()
        with self._lock:
            if note != self._written and not self._cleared:
                self._store(note)
                self._written = note

    def _store(self, note: bytes) -> None:
        # In place, in one call and without truncating: readers stop at the end of the line.
        with contextlib.suppress(OSError):  # a full disk: the next engine has no suspects
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(descriptor, note + b"\n", 0)
            finally:
                os.close(descriptor)
