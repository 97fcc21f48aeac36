"""Snapshots, which bound what a restart replays; recovery from them; and the migration of idle runs to other engines.

A snapshot is a model's adapter, moments, step and gradient after the operation with some seq_id; it may be taken
between any two operations. The engine's thread only copies; `SnapshotWriter` writes the files in the background,
versions first, and then the database records the snapshot. Two are kept: a body is freed when the older one covers it.
A snapshot that cannot be written is retried later; until then the log of bodies takes its place. A fault of the device
ends the engine.

One is due after 16 optimizer steps if earlier ones are paid for: the engine reserves one two-hundredth of its training
time, and a snapshot costs the processor time that it took. So models with short steps have fewer, and models do not
take theirs all at once. After 64 steps, or 32 MiB of bodies, one is due at any cost. Models beyond the memory budget
are evicted, the least recently used first, once a snapshot covers everything; the next request restores them.

`SnapshotWriter` has one thread. A task has `write`, which runs on that thread and must not touch the engine thread's
state, and `finish`, which runs on the engine's thread at its next `collect`, with the error if there was one. Tasks run
in order. The thread ends when none is left; a device fault, or a BaseException that is no Exception (a lost lease),
ends it immediately and is raised on the engine's thread.

`Recovery` restores a model when a request names it: from its newest snapshot and the acknowledged operations after it,
whose bodies are still stored. If a snapshot's files are damaged, the replay starts at the one before it, or at the
creation. Ephemeral versions without files are published again.

`RunMigration` moves at most one idle run a second to an engine that has at least two fewer, so the difference shrinks
and no run returns. A run is idle if no request of it waits and nothing took effect for a while; the other engine must
have existed for that long, too. First everything of the run is written (a snapshot with optimizer and gradient, its
versions), unless the run becomes active; then one transaction changes the owner, and the run is dropped here. The new
owner restores it from its files at its next request, as after a restart, bit for bit.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.backends import Backend
from tinsmith.cluster.ownership import Ownership
from tinsmith.db.database import now
from tinsmith.db.wakeups import EVERYTHING, WakeUps, engine_mailbox
from tinsmith.engine.faults import EngineFaultError, Fault, classify
from tinsmith.engine.operations import Operations
from tinsmith.engine.passes import PassReader
from tinsmith.engine.queues import Queues
from tinsmith.engine.telemetry import Recorder
from tinsmith.engine.versions import Versions
from tinsmith.errors import LostStateError, TinsmithError, UserError
from tinsmith.runtime import malloc
from tinsmith.runtime.failpoints import hit
from tinsmith.storage.directories import Directories
from tinsmith.storage.stores import UnreachableError
from tinsmith.store.futures import Futures
from tinsmith.store.models import Model, Models
from tinsmith.types import Pending
from tinsmith.wire.training import read_optim_step
from tinsmith.wire.weights import read_load

MAX_CAPTURED_BYTES = 2**30
"""With this many bytes captured, nothing more is captured until something was written; one capture may be larger."""

TRIM_BYTES = 2**26
"""Freed memory is returned to the system after this many bytes of models were evicted. It lies in holes between other
blocks, which glibc does not return by itself."""

MAPPED_BYTES = 2**27
"""Models of this size are not counted: each of their four buffers is a mapping of its own (`settings.MALLOC_TUNABLES`).
"""


@dataclass(frozen=True, slots=True)
class WriteTask:
    num_bytes: int
    write: Callable[[], None]
    finish: Callable[[Exception | None], None]


class SnapshotWriter:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: deque[WriteTask] = deque()
        self._finished: deque[tuple[WriteTask, Exception | None]] = deque()
        self._thread: threading.Thread | None = None
        self._captured_bytes = 0
        self._end: BaseException | None = None

    @property
    def is_full(self) -> bool:
        return self._captured_bytes >= MAX_CAPTURED_BYTES

    def submit(self, task: WriteTask) -> None:
        self._captured_bytes += task.num_bytes
        with self._lock:
            if self._end is not None:
                return  # `collect` raises it
            self._tasks.append(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
                self._thread.start()

    def collect(self) -> None:
        """Call `finish` of each task that ended since the last call."""
        if self._end is not None:
            raise self._end
        while self._finished:
            task, error = self._finished.popleft()
            self._captured_bytes -= task.num_bytes
            task.finish(error)

    def flush(self) -> None:
        """Wait until all tasks have ended."""
        while thread := self._thread:
            thread.join()
        self.collect()

    def _run(self) -> None:
        while task := self._pop_task():
            try:
                task.write()
            except Exception as error:  # noqa: BLE001  given to `finish`
                if classify(error) is Fault.DEVICE:
                    return self._end_with(EngineFaultError.of(error))
                self._finished.append((task, error))
            except BaseException as end:  # noqa: BLE001  raised on the engine's thread
                return self._end_with(end)
            else:
                self._finished.append((task, None))

    def _end_with(self, end: BaseException) -> None:
        with self._lock:
            self._end, self._thread = end, None
            self._tasks.clear()

    def _pop_task(self) -> WriteTask | None:
        with self._lock:
            if self._tasks:
                return self._tasks.popleft()
            self._thread = None
            return None


SNAPSHOT_OPTIM_STEPS = 16
"""Fewest optimizer steps between snapshots."""

MAX_OPTIM_STEPS = 64
"""Most optimizer steps between snapshots, which bounds what a restart replays."""

SNAPSHOT_SHARE = 0.005
"""The share of training time spent on snapshots, between the fewest and the most steps."""

SNAPSHOT_BODY_BYTES = 32 * 1024 * 1024
"""Request bytes between snapshots, which bounds a model's log on disk."""

STOP_SNAPSHOT_S = 5.0
"""For how long a stopping engine begins snapshots."""

RETRY_S = 10.0
"""Pause before another attempt; a full disk may have space by then."""

log = structlog.get_logger()

CleanUp = Callable[[], None]


@dataclass(slots=True)
class _ResidentModel:
    """A model in memory: the work that a restart would replay, and the seq_ids of the last change and the last covered
    one."""

    num_bytes: int
    changed_seq_id: int
    covered_seq_id: int
    steps: int = 0
    body_bytes: int = 0
    cost_s: float = 0.0  # processor time of its last snapshot
    writing: bool = False
    retry_at: float = 0.0

    @property
    def is_covered(self) -> bool:
        return self.changed_seq_id <= self.covered_seq_id


class LoadedSnapshot:
    """The snapshot of a checkpoint that was just loaded: captured, not yet written."""

    def __init__(
        self, write: Callable[[], str], mark_written: Callable[[str, Exception | None], CleanUp | None]
    ) -> None:
        self._write = write
        self._mark_written = mark_written
        self._failure: Exception | None = None

    def run(self) -> tuple[str, int]:
        """Thread-safe. Returns the directory, empty if it could not be written, and 0: no tenant is charged for it."""
        try:
            return self._write(), 0
        except Exception as error:  # a backend may raise anything when it cannot write
            if classify(error) is Fault.DEVICE:
                raise
            self._failure = error
            return "", 0

    def clean_up(self, directory: str) -> CleanUp | None:
        """A callable that records the snapshot after the load was settled; None if there is no snapshot."""
        return self._mark_written(directory, self._failure)


@dataclass(eq=False)
class Snapshots:
    backend: Backend
    models: Models
    directories: Directories
    versions: Versions
    recorder: Recorder
    budget_bytes: int

    def __post_init__(self) -> None:
        self._writer = SnapshotWriter()
        self._resident: dict[str, _ResidentModel] = {}  # least recently used first
        self._resident_bytes = 0
        self._evicted_bytes = 0  # since the last trim
        self._share = SNAPSHOT_SHARE
        self._paid_s = 0.0  # at most 0: unused time is not saved up

    def add_training_time(self, seconds: float) -> None:
        """Add the duration of a training step, a share of which snapshots may use."""
        self._paid_s = min(0.0, self._paid_s + self._share * seconds)

    def add_model(self, model_id: str, *, covered_seq_id: int = 0, changed_seq_id: int = 0) -> None:
        """Track a model in memory. A newly created one counts as covered, since it can be created again."""
        self.remove_model(model_id)
        num_bytes = self.backend.model_bytes(model_id)
        self._resident[model_id] = _ResidentModel(num_bytes, changed_seq_id, covered_seq_id)
        self._resident_bytes += num_bytes

    def remove_model(self, model_id: str) -> None:
        """Stop tracking a model that left memory."""
        if resident := self._resident.pop(model_id, None):
            self._resident_bytes -= resident.num_bytes

    def add_replay_work(self, model_id: str, *, steps: int = 0, body_bytes: int = 0) -> None:
        """Add to the work that a restart would replay."""
        resident = self._resident[model_id]
        resident.steps += steps
        resident.body_bytes += body_bytes

    def note_settled(self, model_id: str, seq_id: int, *, changed: bool) -> None:
        """Note that everything up to `seq_id` is settled, and take a snapshot if one is due."""
        resident = self._resident.pop(model_id, None)
        if resident is None:
            return  # its creation failed
        self._resident[model_id] = resident  # the most recently used is last
        if changed:
            resident.changed_seq_id = seq_id
        if self._is_due(resident):
            self._start_snapshot(model_id, resident)

    def _is_due(self, resident: _ResidentModel) -> bool:
        if resident.steps >= MAX_OPTIM_STEPS or resident.body_bytes >= SNAPSHOT_BODY_BYTES:
            return True
        return resident.steps >= SNAPSHOT_OPTIM_STEPS and self._paid_s >= 0.0

    @property
    def is_remote(self) -> bool:
        """Whether snapshots are written to remote storage."""
        return self.directories.is_remote

    def save_loaded(self, model_id: str, seq_id: int) -> LoadedSnapshot:
        """Make the snapshot of a load. It is written before the client may delete the loaded checkpoint."""
        self.add_model(model_id, changed_seq_id=seq_id, covered_seq_id=-1)
        resident = self._resident[model_id]
        captured = self.versions.capture(model_id)
        try:
            fill = self.backend.capture(model_id).write
        except Exception as error:  # treated as a failed write
            if classify(error) is Fault.DEVICE:
                raise
            fill = partial(_raise, error)

        def write() -> str:
            self.versions.write(captured)
            return self.directories.write(fill)[0]

        def mark_written(directory: str, failure: Exception | None) -> CleanUp | None:
            self.versions.mark_written(model_id, captured, failure)
            if failure is not None:
                log.error("a snapshot could not be written", model_id=model_id, exc_info=failure)
                return None

            def record() -> None:
                self._record(model_id, seq_id, directory)
                resident.covered_seq_id = seq_id

            return record

        return LoadedSnapshot(write, mark_written)

    def _start_snapshot(self, model_id: str, resident: _ResidentModel) -> None:
        if resident.writing or self._writer.is_full or time.monotonic() < resident.retry_at:
            return
        seq_id, steps, body_bytes = resident.changed_seq_id, resident.steps, resident.body_bytes
        expected_s, began_s = resident.cost_s, time.thread_time()
        try:
            model = self.backend.capture(model_id)
        except MemoryError as error:
            log.error("out of memory for a snapshot", model_id=model_id, error=str(error))
            resident.retry_at = time.monotonic() + RETRY_S
            return
        versions = self.versions.capture(model_id)
        captured_s = time.thread_time() - began_s
        cost_s, began_at = expected_s, now()
        span: tuple[str, float, float] | None = None  # tenant, end, duration
        self._paid_s -= expected_s  # the rest is subtracted when it is known

        def write() -> None:
            nonlocal cost_s, span
            started_s = time.thread_time()
            self.versions.write(versions)
            directory, _ = self.directories.write(model.write)
            self._record(model_id, seq_id, directory)
            cost_s = captured_s + time.thread_time() - started_s
            if stored := self.models.find(model_id):
                span = stored.tenant_id, now(), now() - began_at

        def finish(error: Exception | None) -> None:
            self.versions.mark_written(model_id, versions, error)
            resident.writing = False
            resident.cost_s = cost_s
            self._paid_s -= cost_s - expected_s
            if error is not None:
                log.error("a snapshot could not be written", model_id=model_id, exc_info=error)
                resident.retry_at = time.monotonic() + RETRY_S
                return
            if span is not None:
                tenant_id, *times = span
                self.recorder.record_snapshot(tenant_id, model_id, *times)
            resident.covered_seq_id = seq_id
            resident.steps -= steps
            resident.body_bytes -= body_bytes

        resident.writing = True
        num_bytes = model.num_bytes + sum(version.capture.num_bytes for version in versions)
        self._writer.submit(WriteTask(num_bytes, write, finish))

    def _record(self, model_id: str, seq_id: int, directory: str) -> None:
        replaced = self.models.record_snapshot(model_id, seq_id, directory)
        hit("snapshots.recorded")
        self.directories.discard(replaced)

    def collect(self) -> None:
        """Process snapshots that were written since the last call."""
        self._writer.collect()

    def write_versions(self, model_id: str) -> None:
        """Write a model's versions without files in the background; the next snapshot writes the rest."""
        if self._writer.is_full or not (captured := self.versions.capture(model_id)):
            return

        def finish(error: Exception | None) -> None:
            self.versions.mark_written(model_id, captured, error)
            if error is not None:
                log.error("a version could not be written", model_id=model_id, exc_info=error)

        num_bytes = sum(version.capture.num_bytes for version in captured)
        self._writer.submit(WriteTask(num_bytes, partial(self.versions.write, captured), finish))

    def is_durable(self, model_id: str) -> bool:
        """Whether all state of a model is in files, so that any engine can continue it; starts writing the rest.
        Returns False until the writing has finished.
        """
        resident = self._resident.get(model_id)
        if resident is not None and (resident.writing or not resident.is_covered):
            self._start_snapshot(model_id, resident)
            return False
        if self.versions.are_written(model_id):
            return True
        if not self.versions.are_being_written(model_id):
            self.write_versions(model_id)
        return False

    def snapshot_all(self) -> None:
        """Take snapshots of all models within STOP_SNAPSHOT_S before the engine stops, which spares a replay."""
        until = time.monotonic() + STOP_SNAPSHOT_S
        for model_id, resident in self._resident.items():
            if not resident.is_covered and time.monotonic() < until:
                self._start_snapshot(model_id, resident)
                self.flush()

    def flush(self) -> None:
        """Wait for snapshots that are being written."""
        self._writer.flush()

    def evict(self, busy: Collection[str]) -> None:
        """Evict models beyond the memory budget, except `busy` ones."""
        # A backend's budget for models may change with its work.
        excess = self._resident_bytes - (self.budget_bytes or self.backend.model_budget_bytes)
        if excess <= 0:
            return
        for model_id, resident in list(self._resident.items())[:-1]:  # not the most recently used one
            if excess <= 0 or self._writer.is_full:
                return
            if model_id in busy:
                continue
            if resident.is_covered and not resident.writing:
                self.backend.unload_model(model_id)
                self.remove_model(model_id)
                log.debug("a model left memory", model_id=model_id)
                excess -= resident.num_bytes
                self._count_evicted(resident.num_bytes)
            else:
                self._start_snapshot(model_id, resident)
                excess -= resident.num_bytes if resident.writing else 0

    def _count_evicted(self, num_bytes: int) -> None:
        self._evicted_bytes += num_bytes if num_bytes < MAPPED_BYTES else 0
        if self._evicted_bytes >= TRIM_BYTES:
            self._evicted_bytes = 0
            malloc.trim()

    def forget(self, model: Model) -> None:
        """A model was unloaded: discard its snapshots."""
        self.remove_model(model.model_id)
        self.directories.discard(model.snapshot_directory)
        self.directories.discard(model.previous_snapshot_directory)


def _raise(error: Exception, _directory: Path) -> None:
    raise error


@dataclass(eq=False)
class Recovery:
    backend: Backend
    futures: Futures
    models: Models
    operations: Operations
    directories: Directories
    snapshots: Snapshots
    passes: PassReader

    def restore(self, model: Model) -> Generator[None, None, None]:
        """Restore a model to its acknowledged state. Pauses now and then, so that samples can be decoded meanwhile.

        Raises LostStateError if that is impossible. Then, or if it is closed early, the model is not in memory.
        """
        failures: list[str] = []
        for seq_id, directory in _replay_starts(model):
            try:
                self._begin(model, directory)
            except UnreachableError:  # says nothing about the snapshot
                raise
            except (TinsmithError, OSError) as error:
                log.error("a snapshot cannot be used", model_id=model.model_id, seq_id=seq_id, error=str(error))
                failures.append(f"its snapshot after seq_id {seq_id}: {error}")
                continue
            try:
                num_replayed = yield from self._replay_after(model, seq_id)
            except BaseException as error:
                self.backend.unload_model(model.model_id)
                self.snapshots.remove_model(model.model_id)
                if failures and isinstance(error, LostStateError):
                    raise LostStateError(_restore_error(model, [*failures, str(error)])) from error
                raise
            if failures and model.snapshot_directory:
                self.models.forget_snapshot(model.model_id, model.snapshot_directory)
            log.info("model restored", model_id=model.model_id, snapshot_seq_id=seq_id, replayed=num_replayed)
            return
        raise LostStateError(_restore_error(model, failures))

    def _begin(self, model: Model, directory: str | None) -> None:
        if directory is None:
            self.backend.create_model(model.model_id, model.lora, model.optimizer_type)
            return
        with self.directories.reading(directory) as path:
            self.backend.load(model.model_id, model.lora, path, optimizer=True, optimizer_type=model.optimizer_type)

    def _replay_after(self, model: Model, seq_id: int) -> Generator[None, None, int]:
        replayed = self.futures.log_of(model.model_id, seq_id, model.applied_seq_id)
        # These are not covered yet: an engine that dies repeatedly must not replay more every time.
        changed_seq_id = model.applied_seq_id if replayed else seq_id
        self.snapshots.add_model(model.model_id, covered_seq_id=seq_id, changed_seq_id=changed_seq_id)
        for request in replayed:
            body = self.futures.bodies([request.request_id]).get(request.request_id)
            if body is not None:
                yield from self._replay(model, request, body)
                steps = int(request.kind == "optim_step")
                self.snapshots.add_replay_work(model.model_id, steps=steps, body_bytes=len(body))
            elif request.state == "done" and request.kind != "save_weights_for_sampler":
                # Failed requests changed nothing (except a refused optim_step, which keeps its body), and neither does
                # a named save.
                raise LostStateError(f"request {request.request_id!r} cannot be replayed: its body is gone")
            yield
        return len(replayed)

    def _replay(self, model: Model, request: Pending, body: bytes) -> Generator[None, None, None]:
        hit("model.replaying")
        if request.kind == "forward_backward":
            yield from self._replay_pass(request, body)
        elif request.kind == "optim_step":
            (outcome,) = self.backend.optim_step([read_optim_step(body, request.request_id)])
            _check_outcome(request, outcome if isinstance(outcome, UserError) else None)
        elif request.state == "done" and request.kind == "save_weights_for_sampler":
            self.operations.publish_again(model, body)
        elif request.state == "done":
            try:
                as_of = self.futures.settlement_time(request.request_id)
                self.operations.load_into(model, read_load(body), as_of=as_of)
            except TinsmithError as error:
                raise LostStateError(_restore_error(model, [str(error)])) from error

    def _replay_pass(self, request: Pending, body: bytes) -> Generator[None, None, None]:
        try:
            (outcome,) = yield from self.backend.run_passes([self.passes.read(body, request, replayed=True)])
        except UserError as error:
            outcome = error
        _check_outcome(request, outcome if isinstance(outcome, UserError) else None)


def _check_outcome(request: Pending, error: UserError | None) -> None:
    if error is not None and request.state == "done":
        raise LostStateError(f"request {request.request_id!r} cannot be replayed: {error}") from error


def _replay_starts(model: Model) -> Iterator[tuple[int, str | None]]:
    """Where a replay may start, the shortest replay first: snapshots, or the creation."""
    if model.snapshot_seq_id is not None:
        yield model.snapshot_seq_id, model.snapshot_directory
    if model.previous_snapshot_seq_id is not None:
        yield model.previous_snapshot_seq_id, model.previous_snapshot_directory
    else:
        yield -1, None


def _restore_error(model: Model, reasons: list[str]) -> str:
    return f"model {model.model_id!r} could not be restored: {'; '.join(reasons)}"


MAX_POLLS = 30
"""Polls of a run that is still not written before another run is tried: a disk may be full."""


@dataclass(eq=False)
class RunMigration:
    ownership: Ownership
    queues: Queues
    snapshots: Snapshots
    recorder: Recorder
    operations: Operations
    mailbox: WakeUps

    def __post_init__(self) -> None:
        self._chosen: str | None = None
        self._polls = 0
        self._tried: set[str] = set()

    def poll(self) -> None:
        """Once a second: migrate one run, or prepare it, if another engine has far fewer."""
        target = self.ownership.migration_target()
        self._choose(self._idle() if target else [])
        if target is None or self._chosen is None or not self.snapshots.is_durable(self._chosen):
            return
        hit("run.parked")
        model_id, self._chosen = self._chosen, None
        try:
            if not self.ownership.migrate(model_id, target):
                return
        except SQLAlchemyError:
            # It may have been committed. The run is completely in files, so it can be dropped in either case; state
            # left in memory would be outdated if the run came back.
            self._forget(model_id)
            raise
        hit("run.moved")
        self._forget(model_id)
        self.mailbox.wake(engine_mailbox(self.ownership.base_model, target), [EVERYTHING])
        log.info("an idle run was migrated", model_id=model_id, engine_id=target)

    def _forget(self, model_id: str) -> None:
        self.queues.forget_lane(model_id)
        self.recorder.forget(model_id)
        self.operations.unload(model_id)
        self.snapshots.remove_model(model_id)

    def _idle(self) -> list[str]:
        lanes = self.queues.lanes
        runs = self.ownership.idle_runs()
        return [run for run in runs if run not in lanes or not lanes[run].waiting]

    def _choose(self, idle: list[str]) -> None:
        """Keep the chosen run as long as it is idle, until MAX_POLLS."""
        self._polls += 1
        if self._chosen in idle and self._polls < MAX_POLLS:
            return
        if self._chosen in idle:
            self._tried.add(self._chosen)
        untried = [run for run in idle if run not in self._tried]
        if not untried:
            self._tried.clear()
        self._chosen = next(iter(untried or idle), None)
        self._polls = 0
