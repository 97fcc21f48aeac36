"""Quarantine: requests that may have ended an engine's process run apart from the others for a limited number of tries.

Before the engine works on requests it writes them into its in-flight journal, a small file that survives the process
(but not the machine: it is not synced). An engine that finds a journal knows what its predecessor was working on when
it died. These requests are suspects: from then on they run in batches of at most an eighth of that size, finally alone,
in their original order. A settled request leaves quarantine; one that ended MAX_DEATHS engines while it ran alone is
settled as failed, and after MAX_BUGS if each time the same process reported a bug. An engine that is asked to stop, or
fails for its own reasons, clears its journal.

A fault (`faults`) of what runs under the journal becomes an EngineFaultError here: from then on the journal names the
requests that ran, with the reason, until the process ends.

The journal of a dead engine goes with its runs (`cluster.in_flight_journal`): the engine that claims them adopts it.
Knows nothing about what requests do.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import structlog

from tinsmith.cluster.engines import LeaseLostError
from tinsmith.cluster.in_flight_journal import JournalNote, read_suspects
from tinsmith.engine.faults import EngineFaultError, Fault, classify
from tinsmith.engine.settling import IterationFailedError
from tinsmith.errors import EngineFailedError
from tinsmith.runtime.failpoints import hit
from tinsmith.types import Pending

MAX_DEATHS = 5
"""An engine killed from outside looks the same, and a fault of the device may pass, so a request gets a few more tries.
"""

MAX_BUGS = 2
"""A bug of ours that ends the engine while one request runs alone is that request's, unless it does not recur."""

log = structlog.get_logger()


class Quarantine:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._is_final = False
        self._running: Sequence[str] = ()
        self._restoring = ""
        self._unrestorable: dict[str, str] = {}
        self.on_fault: Callable[[EngineFaultError], None] = lambda _fault: None
        """Called once, when the journal names the cause of the engine's end."""
        self._written = b""
        self._suspects = read_suspects(path)

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
            for request_id, other in JournalNote.parse(text).suspects.items():
                if request_id in waiting:
                    self._suspects[request_id] = self._suspects.get(request_id, other).merge(other)
        self._write()

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests were settled."""
        if self._suspects:
            for request_id in request_ids:
                self._suspects.pop(request_id, None)

    @contextlib.contextmanager
    def running(self, request_ids: Sequence[str]) -> Iterator[None]:
        """The journal names these requests within the block; an inner block replaces an outer one. Raises
        EngineFaultError as `blaming` does.
        """
        with self._journal(request_ids, ""):
            hit("engine.running")
            with self.blaming(request_ids):
                hit("engine.computing", request_ids)
                yield

    @contextlib.contextmanager
    def clearing(self) -> Iterator[None]:
        """Clear the journal if the block ends by an exception that is no fault, which is no request's either."""
        try:
            yield
        except (LeaseLostError, IterationFailedError):
            self.clear()
            raise
        except Exception as error:
            if not classify(error).is_fatal:
                self.clear()
            raise

    @contextlib.contextmanager
    def restoring(self, model_id: str) -> Iterator[None]:
        """A model is restored within the block for the requests that are running."""
        with self._journal(self._running, model_id), self.blaming(self._running):
            yield

    @contextlib.contextmanager
    def _journal(self, request_ids: Sequence[str], restoring: str) -> Iterator[None]:
        outer = self._running, self._restoring
        self._running, self._restoring = request_ids, restoring
        self._write()
        try:
            yield
        finally:
            self._running, self._restoring = outer
            if self._running:
                self._write()

    @contextlib.contextmanager
    def blaming(self, request_ids: Sequence[str]) -> Iterator[None]:
        """Turns a fault within the block into EngineFaultError; from then on the journal names these requests."""
        try:
            yield
        except EngineFaultError as fault:
            self._blame(request_ids, fault)
            raise
        except Exception as error:
            if not classify(error).is_fatal:
                raise
            fault = EngineFaultError.of(error)
            self._blame(request_ids, fault)
            raise fault from error

    def _blame(self, request_ids: Sequence[str], fault: EngineFaultError) -> None:
        """Write the last note, unless there is one."""
        with self._lock:
            if self._is_final:
                return
            self._is_final = True
            is_bug = fault.fault is Fault.BUG
            note = JournalNote(list(request_ids), self._suspects, fault.reason, is_bug, self._restoring)
            self._store(note.text())
        log.error("a fault ends this engine", request_ids=list(request_ids)[:20], exc_info=fault.__cause__ or fault)
        self.on_fault(fault)

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
        if suspect is None or (suspect.deaths < MAX_DEATHS and suspect.bugs < MAX_BUGS):
            return None
        error = EngineFailedError(
            f"request {request_id!r} ended the engine's process {suspect.deaths} times while nothing else ran "
            f"({suspect.reason or 'out of memory, or a crash below Python'}); it is not tried again"
        )
        if suspect.restoring:
            self._unrestorable[suspect.restoring] = str(error)
        return error

    def unrestorable(self, model_id: str) -> str:
        """Why this engine does not restore a model: doing so ended engines for a request that is not tried again. Empty
        if it does; the next engine tries once more.
        """
        return self._unrestorable.get(model_id, "")

    def clear(self) -> None:
        """Clear the journal for good: the end of this process is no request's fault. Thread-safe."""
        with self._lock:
            self._is_final = True
            self._store(b"")

    def _write(self) -> None:
        note = JournalNote(list(self._running), self._suspects, restoring=self._restoring).text()
        with self._lock:
            if note != self._written and not self._is_final:
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
