"""A worker's children: processes of their own group that can be killed at any time, and what becomes of their work.

`Child` is one process and its two pipes of messages (`rpc.py`). `Mapper` gives assignments to a child that runs the
mapper and starts another one when it dies. A batch is to blame for a death only if the child's marker says that it was
worked on; if the marker names several, the next child has them one at a time. Attempts that only waited are given to
the next child. An attempt is settled once: with an outcome, or with a loss that says whether the batch is to blame
(`infra` false), the machine, or a mapper that does not start (`setup`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from tinsmith import __version__
from tinsmith.batch.worker.logs import untagged
from tinsmith.batch.worker.markers import Marker, marker_file
from tinsmith.batch.worker.rpc import FrameError, Message, pack, read_frames

TAIL_BYTES = 4000
AHEAD = 3
"""Attempts that the child has: one's rows are read, one is mapped, one's results are stored."""


MIN_PYTHON = (3, 11)
PROBE = """
import sys
print("%d.%d" % sys.version_info[:2], end=" ", flush=True)
import tinsmith, tinsmith.batch.worker.runtime
print(tinsmith.__version__)
"""
PROBE_S = 60.0


class ChildError(Exception):
    """The child is gone."""


class Child:
    """One process. Its output, and its children's, goes to the log."""

    def __init__(self, python: str, first: Message, log_path: Path) -> None:
        child_reads, we_write = os.pipe()
        we_read, child_writes = os.pipe()
        self._log_path = log_path
        try:
            with log_path.open("ab") as log, marker_file() as shared:
                inherited = (child_reads, child_writes, shared.fileno())
                self.marker = Marker(shared.fileno())
                self._log_start = log.tell()
                self.process = subprocess.Popen(
                    [python, "-m", "tinsmith.batch.worker.child", *map(str, inherited)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=inherited, start_new_session=True,
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
        self.send(first)

    def send(self, message: Message) -> None:
        """A child that is gone takes nothing; its reader notices."""
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._input.write(pack(message))
            self._input.flush()

    def messages(self) -> Iterator[Message]:
        """To the end of the child. A child that sends no valid frame is killed."""
        try:
            yield from read_frames(self._output)
        except FrameError:
            self.kill()

    def end(self) -> None:
        """No more input: a mapper's `load()` ends."""
        with self._lock, contextlib.suppress(BrokenPipeError, OSError):
            self._input.close()

    def kill(self) -> None:
        """With everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def wait(self) -> int:
        return self.process.wait()

    def tail(self) -> str:
        """The end of what it printed."""
        with self._log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - TAIL_BYTES))
            return untagged(log.read().decode(errors="replace"))


def interpreter(spec: Message) -> str:
    if spec.get("python"):
        return str(spec["python"])
    if spec.get("batch_activate_env"):
        return str(Path(spec["batch_activate_env"]).expanduser() / "bin" / "python")
    return sys.executable


def interpreter_problem(python: str) -> str:
    """Why this interpreter cannot run a mapper, and what to do; empty if it can."""
    try:
        told = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{python} did not start within {PROBE_S:g} s"
    except OSError as error:
        return f"{python} cannot be started ({error.strerror}); it must be on the machine of the worker"
    version, _, found = told.stdout.strip().partition(" ")
    if not version:
        return f"{python} is no Python interpreter: it ended with status {told.returncode}\n{told.stderr[-TAIL_BYTES:]}"
    if tuple(map(int, version.split("."))) < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        return f"{python} is Python {version}; a mapper needs {wanted} or newer"
    if told.returncode:
        why = told.stderr.strip().rpartition("\n")[2]
        return f"{python} cannot import tinsmith ({why}). Install it there: {python} -m pip install tinsmith"
    if found != __version__:
        return (
            f"{python} has tinsmith {found}, and this server is {__version__}. Install the same there: "
            f"{python} -m pip install tinsmith=={__version__}"
        )
    return ""


class Attempt:
    """One assignment in a worker, what it asks of the server, and, once it is `settled`, what it came to."""

    def __init__(self, assignment: Message, group: Events) -> None:
        self.assignment = assignment
        self.group = group
        self.since = time.monotonic()
        self.begun = False  # whether it is with the child
        self._times_given = 0
        self.settled = threading.Event()
        self.result: Message = {}
        self._followers = [group]
        self._lock = threading.Lock()

    @property
    def key(self) -> tuple[int, int]:
        return self.assignment["batch_idx"], self.assignment["attempt_id"]

    def given(self) -> Message:
        """The assignment for a child. Where an earlier child may have stored parts of it, the next one stores its own
        elsewhere: a mapper need not give the same results twice."""
        bases, again = self.assignment["part_bases"], self._times_given
        self._times_given += 1
        return self.assignment | ({"part_bases": [f"{base}-{again}" for base in bases]} if again else {})

    def follow(self, events: Events) -> None:
        """The attempt's end goes there, as the attempt itself, and what it asks before that: as to its own group."""
        with self._lock:
            if self.settled.is_set():
                events.put(self)
            else:
                self._followers.append(events)

    def settle(self, result: Message) -> None:
        with self._lock:
            self.result = result
            self.settled.set()
            for events in self._followers:
                events.put(self)

    def ask(self, asks: list[Message]) -> None:
        """Of whoever came last: the others may be gone."""
        with self._lock:
            for events in self._followers[-1:]:
                events.put(asks)


class Events(Protocol):
    """A queue that takes an attempt that has ended, or what an attempt asks, from any thread."""

    def put(self, item: Attempt | list[Message], /) -> None: ...


def lost(
    error_class: str,
    error: str,
    *,
    infra: bool = False,
    setup: bool = False,
    begun: bool = True,
    final: bool = False,
    died: bool = False,
    row: int | None = None,
) -> Message:
    told = {"error_class": error_class, "error": error, "died": died, "row": row}
    return {"lost": {**told, "infra": infra, "setup": setup, "begun": begun, "final": final}}


class Mapper:
    """The mapper's child, and the attempts that are with it, oldest first."""

    def __init__(self, spec: Message, log_path: Path, on_settled: Callable[[Attempt], None]) -> None:
        self._first = {"role": "mapper", "spec": spec}
        self._python = interpreter(spec)
        self._problem: str | None = "" if self._python == sys.executable else None  # None: not looked for yet
        self._limits: Message = spec["limits"]
        self._log_path = log_path
        self._on_settled = on_settled
        self._lock = threading.RLock()
        self._waiting: list[Attempt] = []
        self._child: Child | None = None
        self._answered = False
        self._told_to_die: tuple[Attempt, Message] | None = None
        self._suspects: set[tuple[int, int]] = set()
        """Attempts one of which a child died of. They run alone."""
        self._deaths_alone = 0
        """Children in a row that died, and worked on nothing."""
        self._closed = False
        self.start_error = ""
        self._start_is_final = False

    @property
    def ready(self) -> bool:
        return self._child is not None and self._answered

    def start(self) -> None:
        with self._lock:
            if self._child is None and not self._closed:
                self._begin()

    def feed(self, attempts: list[Attempt]) -> None:
        with self._lock:
            self._waiting += attempts
            if self._child is None:
                self._begin()
            else:
                self._give()

    def _give(self) -> None:
        """The child never has more than it can do something with: the others can still be taken back."""
        for attempt in self._waiting[: 1 if self._suspects else AHEAD]:
            if not attempt.begun and self._child is not None:
                attempt.begun = True
                self._child.send(attempt.given())

    def take_back(self, attempts: list[Attempt]) -> None:
        """Those that have not begun are not begun here any more."""
        with self._lock:
            for attempt in attempts:
                if attempt in self._waiting and not attempt.begun:
                    self._drop(attempt)
                    attempt.settle(lost("GivenBack", "other batches took too long", infra=True, begun=False))

    def _begin(self) -> None:
        if self._problem is None:
            self._problem = interpreter_problem(self._python)
        if self._problem:
            self.start_error = self._problem
            self._fail_all(lost("InterpreterError", self._problem, setup=True, final=True))
            return
        try:
            child = Child(self._python, self._first | {"careful": bool(self._suspects)}, self._log_path)
        except OSError as error:
            self._fail_all(lost("OSError", f"{self._python} cannot be started: {error}", setup=True))
            return
        self._child, self._answered, self._told_to_die = child, False, None
        now = time.monotonic()
        for attempt in self._waiting:
            attempt.since, attempt.begun = now, False
        self._give()
        threading.Thread(target=self._follow, args=(child,), daemon=True).start()

    def _follow(self, child: Child) -> None:
        start_error = None
        for message in child.messages():
            if "start_error" in message:
                start_error, self._start_is_final = message["start_error"], bool(message.get("final"))
                break
            with self._lock:
                self._answered, self.start_error = True, ""
                if "asks" in message:
                    self._ask(message["asks"])
                else:
                    self._settle(message["outcome"])
        if start_error is not None:
            child.end()
        status = child.wait()
        child.kill()  # what it started may have outlived it
        with self._lock:
            self._child = None
            if not self._closed:
                self._on_death(status, start_error, child)

    def _ask(self, asks: list[Message]) -> None:
        for attempt in self._waiting:
            if mine := [ask for ask in asks if (ask["batch_idx"], ask["attempt_id"]) == attempt.key]:
                attempt.ask(mine)

    def answer(self, answers: list[Message]) -> None:
        """What the server says to operations that asked."""
        with self._lock:
            if self._child is not None:
                self._child.send({"answers": answers})

    def _settle(self, outcome: Message) -> None:
        key = outcome["batch_idx"], outcome["attempt_id"]
        for attempt in self._waiting:
            if attempt.key == key:
                self._deaths_alone = 0
                self._drop(attempt)
                for next_one in self._waiting[:1]:
                    next_one.since = time.monotonic()  # it begins now
                self._give()
                attempt.settle(_result(outcome))
                self._on_settled(attempt)
                return

    def _on_death(self, status: int, start_error: str | None, child: Child) -> None:
        told, self._told_to_die = self._told_to_die, None
        if start_error is not None and not self._answered:
            self.start_error = start_error
            self._fail_all(lost("MapperStartError", start_error, setup=True, final=self._start_is_final))
        elif told is not None:
            attempt, result = told
            if result["lost"]["setup"]:
                self._fail_all(result)
            elif attempt in self._waiting:
                self._blame(attempt, result)
        elif start_error is None and self._waiting:
            self._accuse(status, child)
        if self._waiting:
            self._begin()

    def _accuse(self, status: int, child: Child) -> None:
        """Find out what a child died of."""
        marked, starting = child.marker.busy(), child.marker.starting
        suspects = [attempt for attempt in self._waiting if attempt.key in marked]
        kind = "MapperKilled" if status == -signal.SIGKILL else "MapperDied"
        if suspects and (len(suspects) > 1 or starting):
            self._suspects = {attempt.key for attempt in suspects}
            self._waiting.sort(key=lambda attempt: attempt.key not in self._suspects)
        elif suspects:
            attempt, row = suspects[0], marked[suspects[0].key]
            row = row if row in range(attempt.assignment["start_idx"], attempt.assignment["end_idx"] + 1) else None
            where = "this batch" if row is None else f"row {row}"
            self._blame(attempt, lost(kind, _death(status, f"while it worked on {where}", child), died=True, row=row))
        else:
            self._deaths_alone += 1
            accident = self._deaths_alone == 1 and (status == -signal.SIGKILL or not starting)
            if starting and not accident:
                self.start_error = _death(status, "before it asked for a batch", child)
                self._fail_all(lost(kind, self.start_error, setup=True))
            elif not accident:
                self._fail_all(lost(kind, _death(status, "while it worked on no batch", child), infra=True))

    def _drop(self, attempt: Attempt) -> None:
        self._waiting.remove(attempt)
        self._suspects.discard(attempt.key)

    def _blame(self, attempt: Attempt, result: Message) -> None:
        self._drop(attempt)
        attempt.settle(result)
        self._on_settled(attempt)

    def _fail_all(self, result: Message) -> None:
        while self._waiting:
            self._blame(self._waiting[0], result)

    def abort(self, key: tuple[int, int]) -> None:
        """End one attempt, with the child if it has begun."""
        result = lost("Aborted", "the attempt was aborted", infra=True)
        with self._lock:
            for attempt in [attempt for attempt in self._waiting if attempt.key == key]:
                if attempt.begun:
                    self._kill(attempt, result)
                else:
                    self._blame(attempt, result)

    def watch(self) -> None:
        """Kill a child that takes too long."""
        with self._lock:
            if self._child is None or not self._waiting or self._told_to_die:
                return
            oldest, starting = self._waiting[0], self._child.marker.starting
            limit_s = self._limits["batch_timeout_s"] + (0 if self._answered else self._limits["startup_timeout_s"])
            if time.monotonic() - oldest.since > limit_s:
                late = "the mapper did not ask for a batch within" if starting else "the batch took longer than"
                self._kill(oldest, lost("TimeoutError", f"{late} {limit_s:g} s", setup=starting))

    def _kill(self, attempt: Attempt, result: Message) -> None:
        self._told_to_die = attempt, result
        if self._child:
            self._child.kill()

    def close(self, grace_s: float) -> None:
        """No more work: the mapper may end by itself until the grace is over."""
        with self._lock:
            self._closed = True
            child = self._child
            self._fail_all(lost("Shutdown", "the worker was shut down", infra=True))
        if child is not None:
            child.end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(grace_s)
            child.kill()


def _death(status: int, when: str, child: Child) -> str:
    """How a child ended, in one line, and what it printed before that."""
    if status == -signal.SIGKILL:
        how = "was killed (signal 9; out of memory?)"
    elif status < 0:
        how = f"died of signal {-status} ({signal.Signals(-status).name})"
    else:
        how = f"ended with status {status}"
    tail = child.tail().strip()
    return f"the mapper's process {how} {when}" + (f"\nThe end of what it printed:\n{tail}" if tail else "")


def _result(outcome: Message) -> Message:
    if outcome["error"]:
        return lost(outcome["error_type"] or "Error", outcome["error"], final=outcome["final"])
    return {"outcome": outcome}


class Utility:
    """A child that plans, publishes and deletes, one operation at a time; started when it is first needed."""

    def __init__(self, spec: Message, job_id: int, log_path: Path) -> None:
        self._first = {"role": "utility", "spec": spec, "job_id": job_id}
        self._log_path = log_path
        self._lock = threading.Lock()
        self._child: Child | None = None

    def run(self, request: Message) -> Iterator[Message]:
        """The messages of an operation's answer, the last one an `end` or an `error`. Raises ChildError."""
        with self._lock:
            if self._child is None:
                self._child = Child(sys.executable, self._first, self._log_path)
            child = self._child
            child.send(request)
            for message in child.messages():
                yield message
                if "end" in message or "error" in message:
                    return
            self._child = None
            raise ChildError(f"the process of {request['op']!r} ended with status {child.wait()}\n{child.tail()}")

    def close(self) -> None:
        child = self._child
        if child is not None:
            child.end()
            child.kill()
