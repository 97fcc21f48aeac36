"""Snapshots, and with them how much a restart has to replay and which models are in memory.

A snapshot is a model's adapter, moments, step and gradient after the operation with some seq_id; it may be taken
between any two operations. The engine's thread only copies; the files are written behind (`writer`), versions first,
and then the database is told. One is due after so many optimizer steps or bytes of bodies. Two are kept: a body is
freed when the older one covers it. A snapshot that cannot be written is tried again later, and the log stands in.

Models beyond the room for them leave memory, the least recently used first, once a snapshot covers everything; the
next request brings them back (`recovery`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import structlog

from tinsmith.backends import Backend
from tinsmith.crashpoints import reach
from tinsmith.engine.versions import Versions
from tinsmith.engine.writer import Job, Writer
from tinsmith.futures import Futures
from tinsmith.models import Model
from tinsmith.storage import Directories

SNAPSHOT_OPTIM_STEPS = 16
"""Optimizer steps between snapshots: bounds what a restart replays."""

SNAPSHOT_BODY_BYTES = 32 * 1024 * 1024
"""Request bytes between snapshots: bounds what a model's log takes on disk."""

RETRY_S = 10.0
"""A disk that is full now may have room by then."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Resident:
    """A model in memory: what a restart would replay, and the last operations that changed it and that are covered."""

    num_bytes: int
    changed_seq_id: int
    covered_seq_id: int
    steps: int = 0
    body_bytes: int = 0
    writing: bool = False
    retry_at: float = 0.0

    @property
    def is_covered(self) -> bool:
        return self.changed_seq_id <= self.covered_seq_id


class Snapshots:
    def __init__(
        self, backend: Backend, futures: Futures, directories: Directories, versions: Versions, room_bytes: int
    ) -> None:
        self._backend = backend
        self._futures = futures
        self._directories = directories
        self._versions = versions
        self._room_bytes = room_bytes or backend.room_bytes
        self._writer = Writer()
        self._resident: dict[str, _Resident] = {}  # the least recently used first
        self._resident_bytes = 0

    def entered(self, model_id: str, *, covered_seq_id: int = 0, changed_seq_id: int = 0) -> None:
        """A model is in memory now. One that was only created is covered: it can be created again."""
        self.left(model_id)
        num_bytes = self._backend.model_bytes(model_id)
        self._resident[model_id] = _Resident(num_bytes, changed_seq_id, covered_seq_id)
        self._resident_bytes += num_bytes

    def left(self, model_id: str) -> None:
        """A model is in memory no more."""
        if entry := self._resident.pop(model_id, None):
            self._resident_bytes -= entry.num_bytes

    def count(self, model_id: str, *, steps: int = 0, body_bytes: int = 0) -> None:
        """Note what a restart would replay."""
        entry = self._resident[model_id]
        entry.steps += steps
        entry.body_bytes += body_bytes

    def applied(self, model_id: str, seq_id: int, *, changed: bool) -> None:
        """Everything up to `seq_id` has been settled; take a snapshot if one is due."""
        entry = self._resident.pop(model_id, None)
        if entry is None:
            return  # its creation failed
        self._resident[model_id] = entry  # the most recently used is last
        if changed:
            entry.changed_seq_id = seq_id
        if entry.steps >= SNAPSHOT_OPTIM_STEPS or entry.body_bytes >= SNAPSHOT_BODY_BYTES:
            self._take(model_id, entry)

    def loaded(self, model_id: str, seq_id: int) -> Callable[[], None] | None:
        """A checkpoint was loaded, which may be deleted as soon as the client knows: write a snapshot now. The result
        records it, once the load has been settled.
        """
        self.entered(model_id, changed_seq_id=seq_id, covered_seq_id=-1)
        entry = self._resident[model_id]
        captured = self._versions.capture(model_id)
        failure: Exception | None = None
        directory = ""
        try:
            self._versions.write(captured)
            directory, _ = self._directories.write(self._backend.capture(model_id, optimizer=True, gradient=True).write)
        except Exception as error:  # what a backend raises when it cannot write is its own affair
            log.error("a snapshot could not be written", model_id=model_id, exc_info=error)
            failure = error
        self._versions.noted(model_id, captured, failure)
        if failure is not None:
            return None

        def record() -> None:
            self._record(model_id, seq_id, directory)
            entry.covered_seq_id = seq_id

        return record

    def _take(self, model_id: str, entry: _Resident) -> None:
        if entry.writing or self._writer.is_full or time.monotonic() < entry.retry_at:
            return
        seq_id, steps, body_bytes = entry.changed_seq_id, entry.steps, entry.body_bytes
        try:
            model = self._backend.capture(model_id, optimizer=True, gradient=True)
        except MemoryError as error:
            log.error("there is no memory for a snapshot", model_id=model_id, error=str(error))
            entry.retry_at = time.monotonic() + RETRY_S
            return
        versions = self._versions.capture(model_id)

        def work() -> None:
            self._versions.write(versions)
            directory, _ = self._directories.write(model.write)
            self._record(model_id, seq_id, directory)

        def done(error: Exception | None) -> None:
            self._versions.noted(model_id, versions, error)
            entry.writing = False
            if error is not None:
                log.error("a snapshot could not be written", model_id=model_id, exc_info=error)
                entry.retry_at = time.monotonic() + RETRY_S
                return
            entry.covered_seq_id = seq_id
            entry.steps -= steps
            entry.body_bytes -= body_bytes

        entry.writing = True
        num_bytes = model.num_bytes + sum(one.capture.num_bytes for one in versions)
        self._writer.submit(Job(num_bytes, work, done))

    def _record(self, model_id: str, seq_id: int, directory: str) -> None:
        replaced = self._futures.covered(model_id, seq_id, directory)
        reach("snapshots.recorded")
        self._directories.discard(replaced)

    def collect(self) -> None:
        """Take note of what was written meanwhile."""
        self._writer.collect()

    def flush(self) -> None:
        """Wait for what is being written."""
        self._writer.flush()

    def make_room(self, busy: Collection[str]) -> None:
        """Let models beyond the room for them leave memory, none of the `busy` ones."""
        excess = self._resident_bytes - self._room_bytes
        if excess <= 0:
            return
        for model_id, entry in list(self._resident.items())[:-1]:  # not the one that was just used
            if excess <= 0 or self._writer.is_full:
                return
            if model_id in busy:
                continue
            if entry.is_covered and not entry.writing:
                self._backend.unload_model(model_id)
                self.left(model_id)
                log.debug("a model left memory", model_id=model_id)
                excess -= entry.num_bytes
            else:
                self._take(model_id, entry)
                excess -= entry.num_bytes if entry.writing else 0

    def forget(self, model: Model) -> None:
        """A model was unloaded: its snapshots are of no more use."""
        self.left(model.model_id)
        self._directories.discard(model.snapshot_directory)
        self._directories.discard(model.previous_snapshot_directory)
