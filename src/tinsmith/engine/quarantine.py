"""Requests that end the engine's process: found out, and not tried for ever.

Before the engine works on requests it notes them in a small file, which outlives the process (though not the machine:
nothing is synchronised). An engine that finds a note knows what was being worked on when its predecessor died. These
requests are suspects: from then on they share their work with an eighth of the company at most, alone in the end, and
in the order in which they would have run. One that is settled is none any more; one that ended MOST_DEATHS engines
while it was alone is settled as failed. An engine that is told to stop, or that fails for reasons of its own, leaves
an empty note.

The note of an engine that died goes with its runs (`running_notes`): whoever claims what it had heeds it. Knows nothing
of what requests do.
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

MOST_DEATHS = 5
"""An engine that is killed from outside looks the same, so the innocent get the benefit of a few more tries."""

log = structlog.get_logger()


class Suspects:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._quiet = False
        self._running: Sequence[str] = ()
        self._written = b""
        self._suspects = after_death(path)

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def keep(self, pending: Collection[str]) -> None:
        """Forget those that were settled before the end; called once, with everything that waits."""
        self.forget(self._suspects.keys() - pending)
        if self._suspects:
            log.warning("an engine died; what it was working on runs apart", request_ids=sorted(self._suspects)[:20])
        self._write()

    def heed(self, left_behind: Iterable[str], waiting: Collection[str]) -> None:
        """What other engines left behind counts for the requests that wait here now."""
        for text in left_behind:
            for request_id, other in Note.parse(text).suspects.items():
                if request_id in waiting:
                    mine = self._suspects.get(request_id, other)
                    worst = Suspect(min(mine.company, other.company), max(mine.deaths, other.deaths))
                    self._suspects[request_id] = worst
        self._write()

    def forget(self, request_ids: Iterable[str]) -> None:
        """These are settled."""
        if self._suspects:
            for request_id in request_ids:
                self._suspects.pop(request_id, None)

    @contextlib.contextmanager
    def running(self, request_ids: Sequence[str]) -> Iterator[None]:
        """Note that these are being worked on, until the end of the block; within another block, instead of its own."""
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
        """The requests in their order, cut so that suspects are apart from the others and in as small a company as
        they may have.
        """
        if not self._suspects:
            return [list(requests)] if requests else []
        groups: list[list[Pending]] = []
        last_company: int | None = None
        for request in requests:
            company = self.company(request.request_id)
            if groups and company == last_company and (company == 0 or len(groups[-1]) < company):
                groups[-1].append(request)
            else:
                groups.append([request])
            last_company = company
        return groups

    def company(self, request_id: str) -> int:
        """How many may share a suspect's work, itself included; 0 for everyone else."""
        suspect = self._suspects.get(request_id)
        return suspect.company if suspect else 0

    def verdict(self, request_id: str) -> EngineFailedError | None:
        """Why a request is not tried any more; None if it is."""
        suspect = self._suspects.get(request_id)
        if suspect is None or suspect.deaths < MOST_DEATHS:
            return None
        return EngineFailedError(
            f"request {request_id!r} ended the engine's process {suspect.deaths} times while nothing else ran (out of "
            "memory, or a crash below Python); it is not tried again"
        )

    def pardon(self) -> None:
        """Whatever ends this process from now on, no request is to blame; from any thread."""
        with self._lock:
            self._quiet = True
            self._store(b"")

    def _write(self) -> None:
        note = Note(list(self._running), self._suspects).text()
        with self._lock:
            if note != self._written and not self._quiet:
                self._store(note)
                self._written = note

    def _store(self, note: bytes) -> None:
        # In place and in one call, without truncating: what lies behind the end of the line is not read.
        with contextlib.suppress(OSError):  # a full disk: the next engine suspects nobody
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(descriptor, note + b"\n", 0)
            finally:
                os.close(descriptor)
