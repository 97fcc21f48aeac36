"""A worker's children: processes in groups of their own, which can be killed at any time, and their attempts.

`Child` is one process with two pipes of messages (`frames.py`). `MapperProcess` sends attempts to a child that runs the
mapper and starts another child when that one dies. `IoProcess` runs operations, in the role `io`.

A death is blamed on a batch only if the child's `Marker` says that the child worked on it. The marker is memory that
both processes map, so it survives a sudden death. If it names several batches, the next child runs these one at a time.
Attempts that only waited go to the next child. Each attempt is settled once: with an outcome, or with an
`AttemptFailure` that says whether the batch is to blame, the machine (`infra`), or a mapper that does not start
(`setup`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO

from tinsmith import __version__
from tinsmith.batch import operations
from tinsmith.batch.types import MAX_CONCURRENT_BATCHES, Assignment, AttemptFailure, FailureCause, JobSpec
from tinsmith.batch.worker.activation import ActivationError, activate, is_command
from tinsmith.batch.worker.frames import FrameError, Message, pack, read_frames
from tinsmith.batch.worker.logs import strip_tags

TAIL_BYTES = 4000
READ_AND_STORED = 2
"""The attempts that a child may have beside those that it maps: it reads one and stores one."""

MODULES = {
    "mapper": ("tinsmith.batch.worker.runtime", "tinsmith.batch.formats.lines"),
    "io": ("tinsmith.batch.worker.io_operations", "tinsmith.batch.formats.lines", "numpy"),
}
"""The imports of a spare child, by role."""
MIN_PYTHON = (3, 11)
PROBE = """
import sys
print("%d.%d" % sys.version_info[:2], end=" ", flush=True)
import tinsmith, tinsmith.batch.worker.runtime
print(tinsmith.__version__)
"""
PROBE_S = 60.0


# The marker: whether the mapper has asked for a batch yet, then a slot for each batch in work: state, batch_idx,
# attempt_id, row_idx. One batch is read at a time, one stored, and `MAX_CONCURRENT_BATCHES` are mapped at most.

READ, STORE, MAP = range(3)
"""Slots. `MAP` is the first of those of the mapper."""
NO_ROW = -1
_IDLE, _BUSY = range(2)
_WIDTH = 4
_NUM_SLOTS = MAP + MAX_CONCURRENT_BATCHES
MARKER_BYTES = (1 + _NUM_SLOTS * _WIDTH) * 8


def marker_file() -> IO[bytes]:
    """An unnamed file for a marker, in the state in which nothing has begun. A child inherits its descriptor."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  its owner closes it
    file.truncate(MARKER_BYTES)
    return file


class Marker:
    """The slots, in a shared file of `MARKER_BYTES`; without a file, in the memory of this process."""

    def __init__(self, descriptor: int | None = None) -> None:
        cells = memoryview(bytearray(MARKER_BYTES) if descriptor is None else mmap.mmap(descriptor, MARKER_BYTES)).cast(
            "q"
        )
        self._has_asked, self._slots = cells[:1], cells[1:]

    def set_starting(self, is_starting: bool) -> None:
        """Set whether the function is called, perhaps again, and has not asked for a batch."""
        self._has_asked[0] = not is_starting

    def begin(self, slot: int, assignment: Assignment) -> None:
        """Set a slot to work on an attempt. The state is written last: a process that dies before has not begun."""
        offset = slot * _WIDTH
        for cell, value in enumerate((assignment.batch_idx, assignment.attempt_id, NO_ROW), offset + 1):
            self._slots[cell] = value
        self._slots[offset] = _BUSY

    def set_row(self, slot: int, row_idx: int) -> None:
        """Set the row of a slot's batch that is mapped from now on; `NO_ROW` after the last."""
        self._slots[slot * _WIDTH + 3] = row_idx

    def end(self, slot: int) -> None:
        self._slots[slot * _WIDTH] = _IDLE

    @property
    def starting(self) -> bool:
        return not self._has_asked[0]

    def busy(self) -> dict[tuple[int, int], int]:
        """The attempts (batch_idx, attempt_id) in work, with the row of each or `NO_ROW`."""
        slots = [self._slots[slot * _WIDTH : (slot + 1) * _WIDTH] for slot in range(_NUM_SLOTS)]
        return {(batch_idx, attempt_id): row for state, batch_idx, attempt_id, row in slots if state == _BUSY}


class ChildError(Exception):
    """The child has died."""


class Child:
    """One process. `begin` gives it its role. Its output and that of its own children goes to the log."""

    def __init__(
        self, python: str, log_path: Path, modules: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        """Starts the process, which imports `modules` before it waits for `begin`. Without an environment, it has that
        of this process."""
        child_reads, we_write = os.pipe()
        we_read, child_writes = os.pipe()
        try:
            with log_path.open("ab") as log, marker_file() as shared:
                inherited = (child_reads, child_writes, shared.fileno())
                self.marker = Marker(shared.fileno())
                self.process = subprocess.Popen(
                    [python, "-m", "tinsmith.batch.worker.child", *map(str, inherited), *modules],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=inherited, start_new_session=True,
                    env=environment,
                )  # fmt: skip
        except BaseException:
            os.close(we_write)
            os.close(we_read)
            raise
        finally:
            os.close(child_reads)
            os.close(child_writes)
        self._input = os.fdopen(we_write, "wb")
        self._output = os.fdopen(we_read, "rb")
        self._lock = threading.Lock()

    def begin(self, first: Message, log_path: Path) -> None:
        self._log_path = log_path
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        self.send({**first, "log_path": str(log_path)})

    def send(self, message: Message) -> None:
        """Send a message. A dead child is ignored here; the reader of its messages notices its death."""
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._input.write(pack(message))
            self._input.flush()

    def messages(self) -> Iterator[Message]:
        """The child's messages, to its end. A child that sends anything else is killed."""
        try:
            for message in read_frames(self._output):
                if not isinstance(message, dict):
                    raise FrameError(f"a message is a {type(message).__name__}; it must be a map")
                yield message
        except FrameError:
            self.kill()

    def end(self) -> None:
        """Close its input: a mapper's `load()` ends."""
        with self._lock, contextlib.suppress(BrokenPipeError, OSError):
            self._input.close()

    def kill(self) -> None:
        """Kill the child and all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Kill the child, wait for its end, and close its pipes. No other thread may read its messages."""
        self.end()
        self.kill()
        self.process.wait()
        self._output.close()

    def tail(self) -> str:
        """The last `TAIL_BYTES` of the child's output."""
        with self._log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - TAIL_BYTES))
            return strip_tags(log.read().decode(errors="replace"))


def start_spare(role: str, environment: Mapping[str, str] | None) -> Child:
    """A child of this interpreter that has imported what the role needs before a job is known."""
    return Child(sys.executable, Path(os.devnull), MODULES[role], environment)


def start_child(
    python: str, spare: Child | None, log_path: Path, environment: Mapping[str, str] | None = None
) -> Child:
    """Return the spare if it is alive and of this interpreter, or else start a child. Raises OSError."""
    if spare is not None:
        if python == sys.executable and spare.process.poll() is None:
            return spare
        spare.reap()
    return Child(python, log_path, environment=environment)


def interpreter(spec: Message) -> str:
    if spec.get("python"):
        return str(spec["python"])
    if spec.get("batch_activate_env") and not is_command(spec["batch_activate_env"]):
        return str(Path(spec["batch_activate_env"]).expanduser() / "bin" / "python")
    return sys.executable


def interpreter_problem(python: str, environment: Mapping[str, str] | None = None) -> str:
    """Why this interpreter cannot run a mapper, and the fix; empty if it can."""
    try:
        probe = subprocess.run(
            [python, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_S, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"{python} did not start within {PROBE_S:g} s"
    except OSError as error:
        return f"{python} cannot be started ({error.strerror}); it must be on the machine of the worker"
    version, _, tinsmith_version = probe.stdout.strip().partition(" ")
    if not version:
        tail = probe.stderr[-TAIL_BYTES:]
        return f"{python} is not a Python interpreter: it ended with status {probe.returncode}\n{tail}"
    if tuple(map(int, version.split("."))) < MIN_PYTHON:
        required = ".".join(map(str, MIN_PYTHON))
        return f"{python} is Python {version}; a mapper needs {required} or newer"
    if probe.returncode:
        import_error = probe.stderr.strip().rpartition("\n")[2]
        return f"{python} cannot import tinsmith ({import_error}). Install it there: {python} -m pip install tinsmith"
    if tinsmith_version != __version__:
        return (
            f"{python} has tinsmith {tinsmith_version}, and this server is {__version__}. Install the same there: "
            f"{python} -m pip install tinsmith=={__version__}"
        )
    return ""


RETURNED_ATTEMPT = AttemptFailure("GivenBack", "other batches took too long", FailureCause.NOT_BEGUN)
SHUTDOWN = AttemptFailure("Shutdown", "the worker was shut down", FailureCause.WORKER)


def assignment_of(message: Message) -> Assignment:
    lists = {name: tuple(message.get(name, ())) for name in ("part_bases", "schemas")}
    return Assignment(**{**message, **lists})


@dataclass(eq=False)
class Attempt:
    """One assignment on a worker. `put`, on any thread, takes its requests to the server, then the attempt itself once
    settled."""

    assignment: Message
    put: Callable[[Attempt | list[Message]], None]
    began_at: float | None = None
    """When its turn came, as far as is known without the child: among the first ones, as many as are mapped at once."""
    is_sent: bool = False
    """Whether the child has it."""
    result: Message = field(default_factory=dict)
    """`{"outcome": ...}` or `{"lost": ...}`."""
    times_sent: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.assignment["batch_idx"], self.assignment["attempt_id"]

    def to_send(self) -> Message:
        """The assignment for a child. An earlier child may have stored some of its parts, and a mapper need not be
        deterministic, so each child stores parts in a separate directory."""
        bases, times_sent = self.assignment["part_bases"], self.times_sent
        self.times_sent += 1
        return self.assignment | ({"part_bases": [f"{base}-{times_sent}" for base in bases]} if times_sent else {})

    def settle(self, outcome: Message | AttemptFailure) -> None:
        self.result = {"lost": asdict(outcome)} if isinstance(outcome, AttemptFailure) else {"outcome": outcome}
        self.put(self)


class MapperProcess:
    """The mapper's child, and the attempts that are not settled, oldest first."""

    def __init__(
        self,
        spec: Message,
        log_path: Path,
        spare: Child | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._first = {"role": "mapper", "spec": spec}
        self._environment = environment
        self._python = interpreter(spec)
        self._spare = spare
        activate_env = spec.get("batch_activate_env") or ""
        self._activation = activate_env if not spec.get("python") and is_command(activate_env) else ""
        is_ready = self._python == sys.executable and not self._activation
        self._problem: str | None = "" if is_ready else None  # None: not probed yet
        self._limits: Message = spec["limits"]
        self._max_concurrent = operations.max_concurrent_batches(JobSpec.from_dict(spec))
        self._min_prefetch = self._max_concurrent + READ_AND_STORED
        """The fewest attempts that the child may have. It may have as many as the last group had."""
        self._log_path = log_path
        self._lock = threading.RLock()
        self._waiting: dict[tuple[int, int], Attempt] = {}
        self._prefetch = self._min_prefetch
        self._child: Child | None = None
        self._answered = False
        self._timed_out: tuple[Attempt, AttemptFailure] | None = None
        """The attempt for which the child was killed, and its result."""
        self._quarantined: set[tuple[int, int]] = set()
        """Attempts one of which killed a child. They run alone."""
        self._deaths_alone = 0
        """Successive children that died while they worked on nothing."""
        self._closed = False
        self._start_error: Message | None = None

    @property
    def pid(self) -> int | None:
        child = self._child
        return child.process.pid if child is not None else None

    @property
    def state(self) -> Message:
        if self._start_error is not None:
            return {"state": "failed", "traceback": self._start_error["start_error"]}
        return {"state": "ready" if self._child is not None and self._answered else "starting"}

    def start(self) -> None:
        with self._lock:
            if self._child is None and not self._closed:
                self._start_child()

    def feed(self, attempts: list[Attempt]) -> None:
        with self._lock:
            self._waiting |= {attempt.key: attempt for attempt in attempts}
            self._prefetch = max(self._min_prefetch, len(attempts))
            if self._child is None:
                self._start_child()
            else:
                self._start_clocks()
                self._send()

    def _send(self) -> None:
        """Send the child the attempts that it works on soon; the others can be returned at once when batches become
        slow."""
        next_ones = islice(self._waiting.values(), 1 if self._quarantined else self._prefetch)
        to_send = [attempt for attempt in next_ones if not attempt.is_sent]
        if to_send and self._child is not None:
            for attempt in to_send:
                attempt.is_sent = True
            self._child.send({"assignments": [attempt.to_send() for attempt in to_send]})

    def give_back(self, attempts: list[Attempt]) -> None:
        """Settle those that have not begun, so that another worker can run them. The child is asked for those that it
        has beyond the first `_min_prefetch`."""
        keys = {attempt.key for attempt in attempts}
        with self._lock:
            in_child = list(self._waiting)[self._min_prefetch :]
            for attempt in list(self._waiting.values()):
                if attempt.key in keys and not attempt.is_sent:
                    self._settle(attempt, RETURNED_ATTEMPT)
            keys_in_child = [key for key in in_child if key in keys and key in self._waiting]
            if keys_in_child and self._child is not None:
                self._child.send({"take_back": keys_in_child})

    def _start_child(self) -> None:
        if self._closed:
            self._settle_all(SHUTDOWN)
            return
        if self._problem is None:
            self._problem = self._prepare_interpreter()
        if self._problem:
            self._start_failed("InterpreterError", self._problem, FailureCause.SETUP_OF_MACHINE)
            return
        try:
            child = start_child(self._python, self._spare, self._log_path, self._environment)
        except OSError as error:
            self._settle_all(
                AttemptFailure("OSError", f"{self._python} cannot be started: {error}", FailureCause.SETUP)
            )
            return
        self._spare = None
        self._child, self._answered, self._timed_out = child, False, None
        if self._closed:  # meanwhile, by `kill`
            child.kill()
        child.begin(self._first | {"careful": bool(self._quarantined)}, self._log_path)
        for attempt in self._waiting.values():
            attempt.began_at, attempt.is_sent = None, False
        self._start_clocks()
        self._send()
        threading.Thread(target=self._follow, args=(child,), daemon=True).start()

    def _prepare_interpreter(self) -> str:
        """Activate the job's environment; returns why its interpreter cannot run a mapper, or an empty text."""
        if self._activation:
            try:
                self._python, self._environment = activate(self._activation, self._environment)
            except ActivationError as error:
                return str(error)
            if self._spare is not None:  # it lacks the environment
                self._spare.reap()
                self._spare = None
        return interpreter_problem(self._python, self._environment)

    def _follow(self, child: Child) -> None:
        """Read the child's messages to its end."""
        start_error: Message | None = None
        for message in child.messages():
            if "start_error" in message:
                start_error = message
                child.end()
                break
            try:
                self._handle(message)
            except (AttributeError, KeyError, TypeError, ValueError):  # not a message of its protocol
                child.kill()
        status = child.process.wait()
        child.reap()  # its own children may have outlived it
        with self._lock:
            self._child = None
            if not self._closed:
                self._on_death(status, start_error, child)

    def _handle(self, message: Message) -> None:
        with self._lock:
            self._answered, self._start_error = True, None
            if "asks" in message:
                self._ask(message["asks"])
            elif "taken_back" in message:
                for key in map(tuple, message["taken_back"]):
                    if key in self._waiting:
                        self._settle(self._waiting[key], RETURNED_ATTEMPT)
            else:
                self._complete(message["outcomes"])

    def _ask(self, asks: list[Message]) -> None:
        asks_by_key: dict[tuple[int, int], list[Message]] = {}
        for ask in asks:
            asks_by_key.setdefault((ask["batch_idx"], ask["attempt_id"]), []).append(ask)
        for key, attempt_asks in asks_by_key.items():
            if key in self._waiting:
                self._waiting[key].put(attempt_asks)

    def answer(self, answers: list[Message]) -> None:
        """Pass the server's answers to the operations that asked."""
        with self._lock:
            if self._child is not None:
                self._child.send({"answers": answers})

    def _complete(self, outcomes: list[Message]) -> None:
        for outcome in outcomes:
            attempt = self._waiting.get((outcome["batch_idx"], outcome["attempt_id"]))
            if attempt is not None:
                self._deaths_alone = 0
                self._settle(attempt, _failure_of(outcome) if outcome["error"] else outcome)
        self._start_clocks()
        self._send()

    def _start_clocks(self) -> None:
        now = time.monotonic()
        for attempt in islice(self._waiting.values(), self._max_concurrent):
            if attempt.began_at is None:
                attempt.began_at = now

    def _on_death(self, status: int, start_error: Message | None, child: Child) -> None:
        if start_error is not None and not self._answered:
            cause = FailureCause(start_error.get("cause", FailureCause.SETUP))
            self._start_failed("MapperStartError", start_error["start_error"], cause)
        elif self._timed_out is not None:
            attempt, failure = self._timed_out
            if failure.cause is FailureCause.SETUP:
                self._settle_all(failure)
            elif attempt.key in self._waiting:
                self._settle(attempt, failure)
        elif start_error is None and self._waiting:
            self._blame(status, child)
        if self._waiting:
            self._start_child()

    def _blame(self, status: int, child: Child) -> None:
        """Settle the attempt that killed a child, or find it with the next child."""
        busy, starting = child.marker.busy(), child.marker.starting
        suspects = [attempt for key, attempt in self._waiting.items() if key in busy]
        kind = "MapperKilled" if status == -signal.SIGKILL else "MapperDied"
        if suspects and (len(suspects) > 1 or starting):
            self._quarantined = {attempt.key for attempt in suspects}
            self._waiting = {attempt.key: attempt for attempt in suspects} | self._waiting
        elif suspects:
            attempt, row = suspects[0], busy[suspects[0].key]
            row = row if row in range(attempt.assignment["start_idx"], attempt.assignment["end_idx"] + 1) else None
            location = "this batch" if row is None else f"row {row}"
            text = _describe_death(status, f"while it worked on {location}", child)
            self._settle(attempt, AttemptFailure(kind, text, FailureCause.DEATH, row))
        else:
            self._deaths_alone += 1
            if self._deaths_alone == 1 and (status == -signal.SIGKILL or not starting):
                return  # the first time, perhaps an accident of the machine
            if starting:
                self._start_failed(kind, _describe_death(status, "before it asked for a batch", child))
            else:
                text = _describe_death(status, "while it worked on no batch", child)
                self._settle_all(AttemptFailure(kind, text, FailureCause.WORKER))

    def _start_failed(self, error_class: str, error: str, cause: FailureCause = FailureCause.SETUP) -> None:
        self._start_error = {"start_error": error}
        self._settle_all(AttemptFailure(error_class, error, cause))

    def _settle(self, attempt: Attempt, outcome: Message | AttemptFailure) -> None:
        del self._waiting[attempt.key]
        self._quarantined.discard(attempt.key)
        attempt.settle(outcome)

    def _settle_all(self, failure: AttemptFailure) -> None:
        for attempt in list(self._waiting.values()):
            self._settle(attempt, failure)

    def watch(self) -> None:
        """Kill the child if an attempt takes too long."""
        with self._lock:
            if self._child is None or self._timed_out:
                return
            timed_attempts = [attempt for attempt in self._waiting.values() if attempt.began_at is not None]
            oldest = min(timed_attempts, key=lambda attempt: attempt.began_at or 0.0, default=None)
            limit_s = self._limits["batch_timeout_s"] + (0 if self._answered else self._limits["startup_timeout_s"])
            if oldest is not None and time.monotonic() - (oldest.began_at or 0.0) > limit_s:
                starting = self._child.marker.starting
                late = "the mapper did not ask for a batch within" if starting else "the batch took longer than"
                cause = FailureCause.SETUP if starting else FailureCause.ERROR
                self._timed_out = oldest, AttemptFailure("TimeoutError", f"{late} {limit_s:g} s", cause)
                self._child.kill()

    def kill(self) -> None:
        """Kill the child at once. Takes no lock: a thread that writes to a child that reads nothing holds it."""
        self._closed = True
        if (child := self._child) is not None:
            child.kill()

    def close(self, grace_s: float) -> None:
        """Settle all attempts; the mapper may end by itself within the grace period."""
        with self._lock:
            self._closed = True
            child = self._child
            self._settle_all(SHUTDOWN)
        if self._spare is not None:
            self._spare.reap()
        if child is not None:
            child.end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(grace_s)
            child.kill()
            child.process.wait()


def _failure_of(outcome: Message) -> AttemptFailure:
    cause = FailureCause.ERROR if outcome["retry"] else FailureCause.SAME_ERROR
    cause = FailureCause.PROGRAM if outcome["final"] else cause
    return AttemptFailure(outcome["error_type"] or "Error", outcome["error"], cause)


def _describe_death(status: int, when: str, child: Child) -> str:
    """Describe how a child ended in one line, then the end of its output."""
    if status == -signal.SIGKILL:
        how = "was killed (signal 9; out of memory?)"
    elif status < 0:
        how = f"died of signal {-status} ({signal.Signals(-status).name})"
    else:
        how = f"ended with status {status}"
    tail = child.tail().strip()
    return f"the mapper's process {how} {when}" + (f"\nThe end of what it printed:\n{tail}" if tail else "")


class IoProcess:
    """The child that plans, publishes and deletes, one operation at a time; it starts with the first operation."""

    def __init__(
        self,
        spec: Message,
        job_id: int | str,
        log_path: Path,
        spare: Child | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._environment = environment
        self._first = {"role": "io", "spec": spec, "job_id": job_id}
        self._log_path = log_path
        self._spare = spare
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._closed = False

    def run(self, request: Message) -> Iterator[Message]:
        """The messages of an operation, the last with `end` or `error`. Raises ChildError."""
        with self._lock:
            if self._child is None:
                self._child = start_child(sys.executable, self._spare, self._log_path, self._environment)
                self._child.begin(self._first, self._log_path)
                self._spare = None
            child = self._child
            if self._closed:
                child.kill()
            child.send(request)
            for message in child.messages():
                yield message
                if "end" in message or "error" in message:
                    return
            self._child = None
            status = child.process.wait()
            child.reap()
            raise ChildError(f"the process of {request['op']!r} ended with status {status}\n{child.tail()}")

    def kill(self) -> None:
        """Kill the child at once, which ends an operation in progress, and start no other."""
        self._closed = True
        if (child := self._child) is not None:
            child.kill()

    def close(self) -> None:
        self.kill()
        with self._lock:  # until the operation in progress has seen the child's end
            self.reap()

    def reap(self) -> None:
        """End the child and release all that it has here. Nothing reads its messages any more."""
        for child in filter(None, (self._child, self._spare)):
            child.reap()
        self._child = self._spare = None
