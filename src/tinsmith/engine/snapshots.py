"""Snapshots, and with them how much a restart has to replay and which models are in memory.

A snapshot is a model's adapter, moments, step and gradient after the operation with some seq_id; it may be taken
between any two operations. The engine's thread only copies; the files are written behind (`writer`), versions first,
and then the database is told. Two are kept: a body is freed when the older one covers it. A snapshot that cannot be
written is tried again later, and the log stands in.

One is due after 16 optimizer steps, if those that were taken so far have been paid for: the engine sets aside a
two-hundredth of the time that it trains, and a snapshot costs the processor time that went into it. So short steps have
fewer of them, and models do not take theirs all at once. After 64 steps, or 32 MiB of bodies, one is due whatever it
costs.

Models beyond the room for them leave memory, the least recently used first, once a snapshot covers everything; the
next request brings them back (`recovery`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from tinsmith.backends import Backend
from tinsmith.engine.versions import Versions
from tinsmith.engine.writer import Job, Writer
from tinsmith.runtime.failpoints import hit
from tinsmith.storage.directories import Directories
from tinsmith.store.models import Model, Models

SNAPSHOT_OPTIM_STEPS = 16
"""Fewest optimizer steps between snapshots."""

MOST_OPTIM_STEPS = 64
"""Most optimizer steps between snapshots: bounds what a restart replays."""

SNAPSHOT_SHARE = 0.005
"""How much of the time that it trains the engine spends on snapshots, as far as it may choose."""

SNAPSHOT_BODY_BYTES = 32 * 1024 * 1024
"""Request bytes between snapshots: bounds what a model's log takes on disk."""

COVER_S = 5.0
"""How long an engine that was told to stop begins to write snapshots."""

RETRY_S = 10.0
"""A disk that is full now may have room by then."""

log = structlog.get_logger()

CleanUp = Callable[[], None]


@dataclass(slots=True)
class _Resident:
    """A model in memory: what a restart would replay, and the last operations that changed it and that are covered."""

    num_bytes: int
    changed_seq_id: int
    covered_seq_id: int
    steps: int = 0
    body_bytes: int = 0
    cost_s: float = 0.0  # what its last snapshot took of a processor
    writing: bool = False
    retry_at: float = 0.0

    @property
    def is_covered(self) -> bool:
        return self.changed_seq_id <= self.covered_seq_id


class Loaded:
    """The snapshot of a checkpoint that was just loaded: captured, not yet written."""

    def __init__(self, write: Callable[[], str], noted: Callable[[str, Exception | None], CleanUp | None]) -> None:
        self._write = write
        self._noted = noted
        self._failure: Exception | None = None

    def send(self) -> tuple[str, int]:
        """On any thread. Returns the directory, empty if it could not be written, and 0: no tenant pays for it."""
        try:
            return self._write(), 0
        except Exception as error:  # noqa: BLE001  what a backend raises when it cannot write is its own affair
            self._failure = error
            return "", 0

    def clean_up(self, directory: str) -> CleanUp | None:
        """What records the snapshot, once the load has been settled; None if there is none."""
        return self._noted(directory, self._failure)


class Snapshots:
    def __init__(
        self, backend: Backend, models: Models, directories: Directories, versions: Versions, room_bytes: int
    ) -> None:
        self._backend = backend
        self._models = models
        self._directories = directories
        self._versions = versions
        self._room_bytes = room_bytes
        self._writer = Writer()
        self._resident: dict[str, _Resident] = {}  # the least recently used first
        self._resident_bytes = 0
        self._share = SNAPSHOT_SHARE
        self._paid_s = 0.0  # never more than nothing: what is not needed is not saved up

    def worked(self, seconds: float) -> None:
        """So long a step of training was."""
        self._paid_s = min(0.0, self._paid_s + self._share * seconds)

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
        if self._is_due(entry):
            self._take(model_id, entry)

    def _is_due(self, entry: _Resident) -> bool:
        if entry.steps >= MOST_OPTIM_STEPS or entry.body_bytes >= SNAPSHOT_BODY_BYTES:
            return True
        return entry.steps >= SNAPSHOT_OPTIM_STEPS and self._paid_s >= 0.0

    @property
    def is_far(self) -> bool:
        """Whether snapshots are sent somewhere, which takes its time."""
        return self._directories.is_far

    def loaded(self, model_id: str, seq_id: int) -> Loaded:
        """A checkpoint was loaded, which may be deleted as soon as the client knows: its snapshot is written first."""
        self.entered(model_id, changed_seq_id=seq_id, covered_seq_id=-1)
        entry = self._resident[model_id]
        captured = self._versions.capture(model_id)
        try:
            fill = self._backend.capture(model_id, optimizer=True, gradient=True).write
        except Exception as error:  # noqa: BLE001  as if it could not be written
            fill = partial(_fail, error)

        def write() -> str:
            self._versions.write(captured)
            return self._directories.write(fill)[0]

        def noted(directory: str, failure: Exception | None) -> CleanUp | None:
            self._versions.noted(model_id, captured, failure)
            if failure is not None:
                log.error("a snapshot could not be written", model_id=model_id, exc_info=failure)
                return None

            def record() -> None:
                self._record(model_id, seq_id, directory)
                entry.covered_seq_id = seq_id

            return record

        return Loaded(write, noted)

    def _take(self, model_id: str, entry: _Resident) -> None:
        if entry.writing or self._writer.is_full or time.monotonic() < entry.retry_at:
            return
        seq_id, steps, body_bytes = entry.changed_seq_id, entry.steps, entry.body_bytes
        expected_s, began_s = entry.cost_s, time.thread_time()
        try:
            model = self._backend.capture(model_id, optimizer=True, gradient=True)
        except MemoryError as error:
            log.error("there is no memory for a snapshot", model_id=model_id, error=str(error))
            entry.retry_at = time.monotonic() + RETRY_S
            return
        versions = self._versions.capture(model_id)
        captured_s = time.thread_time() - began_s
        cost_s = expected_s
        self._paid_s -= expected_s  # and the rest when it is known

        def work() -> None:
            nonlocal cost_s
            begun_s = time.thread_time()
            self._versions.write(versions)
            directory, _ = self._directories.write(model.write)
            self._record(model_id, seq_id, directory)
            cost_s = captured_s + time.thread_time() - begun_s

        def done(error: Exception | None) -> None:
            self._versions.noted(model_id, versions, error)
            entry.writing = False
            entry.cost_s = cost_s
            self._paid_s -= cost_s - expected_s
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
        replaced = self._models.covered(model_id, seq_id, directory)
        hit("snapshots.recorded")
        self._directories.discard(replaced)

    def collect(self) -> None:
        """Take note of what was written meanwhile."""
        self._writer.collect()

    def write_versions(self, model_id: str) -> None:
        """What of a model's versions is in memory only, behind; what cannot be written now is with a snapshot."""
        if self._writer.is_full or not (captured := self._versions.capture(model_id)):
            return

        def done(error: Exception | None) -> None:
            self._versions.noted(model_id, captured, error)
            if error is not None:
                log.error("a version could not be written", model_id=model_id, exc_info=error)

        num_bytes = sum(one.capture.num_bytes for one in captured)
        self._writer.submit(Job(num_bytes, partial(self._versions.write, captured), done))

    def is_parked(self, model_id: str) -> bool:
        """Whether everything of a model is in files, so that any engine can go on with it; begins to write what is not.

        What is being written is not there yet: ask again.
        """
        entry = self._resident.get(model_id)
        if entry is not None and (entry.writing or not entry.is_covered):
            self._take(model_id, entry)
            return False
        if self._versions.are_written(model_id):
            return True
        if not self._versions.are_being_written(model_id):
            self.write_versions(model_id)
        return False

    def cover_all(self) -> None:
        """The engine stops in good order: its models' next engines are spared a replay, as far as there is time."""
        until = time.monotonic() + COVER_S
        for model_id, entry in self._resident.items():
            if not entry.is_covered and time.monotonic() < until:
                self._take(model_id, entry)
                self.flush()

    def flush(self) -> None:
        """Wait for what is being written."""
        self._writer.flush()

    def make_room(self, busy: Collection[str]) -> None:
        """Let models beyond the room for them leave memory, none of the `busy` ones."""
        # What a backend has room for may change with what it is asked to do.
        excess = self._resident_bytes - (self._room_bytes or self._backend.room_bytes)
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


def _fail(error: Exception, _directory: Path) -> None:
    raise error
