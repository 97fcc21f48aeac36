"""The process of a job's mapper on one worker, and the attempts that it is given.

`MapperProcess` sends attempts to a child that runs the mapper, and starts another child when that one ends before all
are settled. Each attempt is settled once: with an outcome, or with an `AttemptFailure` that says whether the batch is
to blame, the machine, or a mapper that does not start.

`State` and `TRANSITIONS` say in which order things happen. All happens under one lock, except for `kill`: a thread that
writes to a child that reads nothing holds the lock, so `kill` takes none, and any other transition may find the process
closed.

A death is blamed on a batch only if the child's `Marker` says that the child worked on it. If it names several batches,
the next child runs these one at a time. Attempts that only waited go to the next child.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from itertools import islice
from pathlib import Path

from tinsmith.batch import operations
from tinsmith.batch.stages import stages_of
from tinsmith.batch.types import AttemptFailure, FailureCause, JobSpec
from tinsmith.batch.worker.children import Child, InterpreterError, prepare_interpreter, start_child
from tinsmith.batch.worker.frames import Message
from tinsmith.batch.worker.marker import Work

READ_AND_STORED = 2
"""The attempts that a child may have beside those that it maps: it reads one and stores one."""
START_ERROR_S = 1.0
"""How long a child may take to end after it has said why the mapper does not start; its threads may go on for ever."""
RETURNED_ATTEMPT = AttemptFailure("GivenBack", "other batches took too long", FailureCause.NOT_BEGUN)
SHUTDOWN = AttemptFailure("Shutdown", "the worker was shut down", FailureCause.WORKER)

log = logging.getLogger("tinsmith.batch")


class State(Enum):
    ABSENT = auto()
    """There is no child. The next attempt starts one."""
    BROKEN = auto()
    """There is no child, since the last one did not start. The next attempt tries it again."""
    STARTING = auto()
    """The child has sent nothing yet."""
    RUNNING = auto()
    """The child has asked for something, or answered."""
    LATE = auto()
    """The child was killed for an attempt that took too long. What it sent before still counts."""
    CLOSED = auto()
    """Every attempt is settled as shut down, and no child starts."""


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.ABSENT: frozenset({State.STARTING, State.BROKEN, State.CLOSED}),
    State.BROKEN: frozenset({State.STARTING, State.CLOSED}),
    State.STARTING: frozenset({State.RUNNING, State.LATE, State.ABSENT, State.CLOSED}),
    State.RUNNING: frozenset({State.LATE, State.ABSENT, State.CLOSED}),
    State.LATE: frozenset({State.ABSENT, State.CLOSED}),
    State.CLOSED: frozenset(),
}


@dataclass(eq=False)
class Attempt:
    """One assignment on a worker. `put`, on any thread, takes its requests to the server, then the attempt itself once
    settled."""

    assignment: Message
    put: Callable[[Attempt | list[Message]], None]
    began_at: float | None = None
    """When its turn came, as far as is known without the child: among the first ones, as many as are mapped at once."""
    waited_s: float = 0.0
    """How long since then it has waited for processes of its stages."""
    is_sent: bool = False
    """Whether the child has it."""
    result: Message = field(default_factory=dict)
    """`{"outcome": ...}` or `{"lost": ...}`."""
    times_sent: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.assignment["batch_idx"], self.assignment["attempt_id"]

    @property
    def work_s(self) -> float:
        """How long it has been in work, without waiting."""
        return time.monotonic() - (self.began_at or 0.0) - self.waited_s

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
        self._first = {"role": "mapper", "spec": spec, "devices": (environment or {}).get("CUDA_VISIBLE_DEVICES")}
        self._options, self._environment = spec, environment
        self._python = ""  # not prepared yet
        self._spare = spare
        self._limits: Message = spec["limits"]
        self._stages = stages_of(spec["batch_serialized_fn"])
        self._max_concurrent = operations.max_concurrent_batches(JobSpec.from_dict(spec))
        self._min_prefetch = self._max_concurrent + READ_AND_STORED
        """The fewest attempts that the child may have. It may have as many as the last group had."""
        self._log_path = log_path
        self._lock = threading.RLock()
        self._waiting: dict[tuple[int, int], Attempt] = {}
        self._prefetch = self._min_prefetch
        self._state = State.ABSENT
        self._state_lock = threading.Lock()  # held for a transition only
        self._child: Child | None = None
        self._has_asked = False
        """Whether the child's mapper was seen to have asked for a batch."""
        self._timed_out: tuple[Attempt, AttemptFailure] | None = None
        """In the state `LATE`: the attempt that took too long, and its result."""
        self._quarantined: set[tuple[int, int]] = set()
        """Attempts one of which killed a child. They run alone."""
        self._deaths_alone = 0
        """Successive children that died while they worked on nothing."""
        self._start_error = ""
        """In the state `BROKEN`: why the mapper does not start."""

    @property
    def pid(self) -> int | None:
        child = self._child
        return child.process.pid if child is not None else None

    @property
    def state(self) -> Message:
        if self._state is State.BROKEN:
            return {"state": "failed", "traceback": self._start_error}
        return {"state": "ready" if self._state is State.RUNNING else "starting"}

    def _move(self, state: State) -> None:
        """Make a transition. A closed process stays closed, and any other move that the table lacks is a defect, which
        raises RuntimeError."""
        with self._state_lock:
            before = self._state
            if before in (state, State.CLOSED):
                return
            if state not in TRANSITIONS[before]:
                raise RuntimeError(f"a mapper's process that is {before.name} cannot become {state.name}")
            self._state = state
        log.debug("the process of a mapper (%s) was %s and is %s", self.pid, before.name, state.name)

    def start(self) -> None:
        with self._lock:
            if self._child is None and self._state is not State.CLOSED:
                self._start_child()

    def feed(self, attempts: list[Attempt]) -> None:
        with self._lock:
            self._waiting |= {attempt.key: attempt for attempt in attempts}
            self._prefetch = max(self._min_prefetch, len(attempts))
            if self._state is State.CLOSED:
                self._settle_all(SHUTDOWN)
            elif self._child is None:
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
        if not self._python:
            try:
                self._prepare_interpreter()
            except InterpreterError as error:
                self._start_failed("InterpreterError", str(error), FailureCause.SETUP_OF_MACHINE)
                return
        try:
            child = start_child(self._python, self._spare, self._log_path, self._environment)
        except OSError as error:
            self._start_failed("OSError", f"{self._python} cannot be started: {error}")
            return
        self._spare = None
        self._child, self._timed_out, self._has_asked = child, None, False
        self._move(State.STARTING)
        if self._state is State.CLOSED:  # meanwhile, by `kill`
            child.kill()
        child.begin(self._first | {"careful": bool(self._quarantined)}, self._log_path)
        for attempt in self._waiting.values():
            attempt.began_at, attempt.waited_s, attempt.is_sent = None, 0.0, False
        self._start_clocks()
        self._send()
        threading.Thread(target=self._follow, args=(child,), daemon=True).start()

    def _prepare_interpreter(self) -> None:
        """Raises InterpreterError."""
        python, environment = prepare_interpreter(self._options, self._environment)
        if self._spare is not None and (python != sys.executable or environment is not self._environment):
            self._spare.reap()
            self._spare = None
        self._python, self._environment = python, environment

    def _follow(self, child: Child) -> None:
        """Read the child's messages to its end."""
        start_error: Message | None = None
        for message in child.messages():
            if "start_error" in message:
                start_error = message
                child.end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(START_ERROR_S)
                child.kill()
                break
            try:
                self._handle(message)
            except (AttributeError, KeyError, TypeError, ValueError):  # not a message of its protocol
                child.kill()
        status = child.process.wait()
        child.reap()  # its own children may have outlived it
        with self._lock:
            self._child, ended_in = None, self._state
            self._move(State.ABSENT)
            if self._state is not State.CLOSED:
                self._on_end(ended_in, status, start_error, child)

    def _handle(self, message: Message) -> None:
        with self._lock:
            if self._state is State.STARTING:
                self._move(State.RUNNING)
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

    def _start_clocks(self, *, restart: bool = False) -> None:
        now = time.monotonic()
        for attempt in islice(self._waiting.values(), self._max_concurrent):
            if restart or attempt.began_at is None:
                attempt.began_at = now

    def _on_end(self, ended_in: State, status: int, start_error: Message | None, child: Child) -> None:
        """Settle what the end of a child settles, and run the other attempts on another one."""
        if self._timed_out is not None:
            attempt, failure = self._timed_out
            if failure.cause is FailureCause.SETUP:
                self._settle_all(failure)
            elif attempt.key in self._waiting:
                self._settle(attempt, failure)
        elif start_error is None and self._waiting:
            self._blame(status, child)
        elif start_error is not None and ended_in is State.STARTING:
            cause = FailureCause(start_error.get("cause", FailureCause.SETUP))
            self._start_failed("MapperStartError", start_error["start_error"], cause)
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
            attempt, last_work = suspects[0], busy[suspects[0].key]
            indices = range(attempt.assignment["start_idx"], attempt.assignment["end_idx"] + 1)
            row = last_work.row if last_work.row in indices else None
            location = ("this batch" if row is None else f"row {row}") + self._name_step(last_work)
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
        self._start_error = error
        self._move(State.BROKEN)
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
            if self._child is None or self._state not in (State.STARTING, State.RUNNING):
                return
            if not self._has_asked and not self._child.marker.starting:
                self._has_asked = True
                self._start_clocks(restart=True)  # the set-up is no part of a batch
            busy = self._child.marker.busy()
            for key in busy.keys() & self._waiting.keys():
                self._waiting[key].waited_s = busy[key].waited_s
            ages = {attempt: attempt.work_s for attempt in self._waiting.values() if attempt.began_at is not None}
            oldest = max(ages, key=lambda attempt: ages[attempt], default=None)
            limit_s = self._limits["batch_timeout_s"] + (0 if self._has_asked else self._limits["startup_timeout_s"])
            if oldest is None or ages[oldest] <= limit_s:
                return
            if self._child.marker.starting:
                text, cause = f"the mapper did not ask for a batch within {limit_s:g} s", FailureCause.SETUP
            else:
                step = self._name_step(busy.get(oldest.key))
                text, cause = f"the batch took longer than {limit_s:g} s{step}", FailureCause.ERROR
            self._timed_out = oldest, AttemptFailure("TimeoutError", text, cause)
            self._move(State.LATE)
            self._child.kill()

    def _name_step(self, attempt_work: Work | None) -> str:
        """Where the work on a batch of a job with stages is: `` in step 2 (embed)``, or nothing."""
        names = {stage.first: f" in {stage.name}" for stage in self._stages}
        return names.get(attempt_work.step, "") if attempt_work is not None else ""

    def kill(self) -> None:
        """Kill the child at once. Takes no lock that is held for long."""
        self._move(State.CLOSED)
        if (child := self._child) is not None:
            child.kill()

    def close(self, grace_s: float) -> None:
        """Settle all attempts; the mapper may end by itself within the grace period."""
        with self._lock:
            self._move(State.CLOSED)
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
