"""The states of a mapper's process: whatever happens in whatever order, every attempt is settled once."""

from __future__ import annotations

import logging
import queue
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support import payloads
from tinsmith.batch.types import Assignment, FailureCause, JobSpec, Limits
from tinsmith.batch.worker import mapper_process
from tinsmith.batch.worker.frames import Message
from tinsmith.batch.worker.mapper_process import TRANSITIONS, Attempt, MapperProcess, State
from tinsmith.batch.worker.marker import MAP, Marker

PATIENCE_S = 20.0


def identity(row: dict[str, Any]) -> dict[str, Any]:
    return row


def spec_of(directory: Path, function: object = identity, **limits: float) -> Message:
    payload = payloads.serialize_function(function, kind="row")  # type: ignore[arg-type]
    source = {"format": "items", "path": "items", "items": [{"n": 0}]}
    output = {"format": "json", "path": str(directory / "out.jsonl")}
    return JobSpec(payload, source, [output], 1, limits=Limits(batch_timeout_s=10.0, **limits)).to_dict()


class FakeChild:
    """A child that does what a test says. It is its own `process`."""

    def __init__(self) -> None:
        self.marker = Marker()
        self.marker.set_starting(True)
        self.process = self
        self.pid = id(self)
        self.sent: list[tuple[int, int]] = []
        self.status: int | None = None
        self.is_reaped = False
        self._arriving: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._exit_event = threading.Event()

    # As the mapper's process sees it.

    def begin(self, first: Message, log_path: Path) -> None:
        assert first["role"] == "mapper" and log_path

    def send(self, message: Message) -> None:
        self.sent += [(a["batch_idx"], a["attempt_id"]) for a in message.get("assignments", ())]
        if self.status is None:
            for key in message.get("take_back", ()):
                self.say({"taken_back": [key]})

    def messages(self) -> Iterator[Message]:
        while (message := self._arriving.get(timeout=PATIENCE_S)) is not None:
            yield message

    def wait(self, timeout: float | None = None) -> int:
        if not self._exit_event.wait(PATIENCE_S if timeout is None else 0):
            assert timeout is not None, "the wait for this child would never end"
            raise subprocess.TimeoutExpired("fake", timeout)
        assert self.status is not None
        return self.status

    def poll(self) -> int | None:
        return self.status

    def end(self) -> None: ...

    def kill(self) -> None:
        self.die(-signal.SIGKILL)

    def reap(self) -> None:
        self.kill()
        self.is_reaped = True

    def tail(self) -> str:
        return "its last words"

    # As the test sees it.

    def say(self, message: Message) -> None:
        self._arriving.put(message)

    def die(self, status: int) -> None:
        if self.status is None:
            self.status = status
            self._exit_event.set()
            self._arriving.put(None)


class Events(RuleBasedStateMachine):
    """Everything that may happen to a mapper's process, in any order."""

    @initialize()
    def begin(self) -> None:
        self.children: list[FakeChild] = []
        self.fails_to_start = False
        self.settled: Counter[tuple[int, int]] = Counter()
        self.attempts: dict[tuple[int, int], Attempt] = {}
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(mapper_process, "start_child", self.start_child)
        self.thread_errors: list[object] = []
        self.patch.setattr(threading, "excepthook", lambda hook: self.thread_errors.append(hook.exc_value))
        self.now = 0.0
        self.patch.setattr(mapper_process.time, "monotonic", lambda: self.now)
        self.mapper = MapperProcess(spec_of(Path()), Path("log"))

    def start_child(self, *_: object) -> FakeChild:
        if self.fails_to_start:
            self.fails_to_start = False
            raise OSError("no memory")
        assert all(child.status is not None for child in self.children), "two children at a time"
        self.children.append(FakeChild())
        return self.children[-1]

    @property
    def child(self) -> FakeChild | None:
        """The living child."""
        return self.children[-1] if self.children and self.children[-1].status is None else None

    def settle_down(self) -> None:
        """Wait until what the children have sent is taken in."""
        deadline = real_time() + PATIENCE_S
        while True:
            with self.mapper._lock:
                current = self.mapper._child
                is_quiet = current is None or (current.status is None and current._arriving.empty())  # type: ignore[attr-defined]
                is_quiet &= all(child.is_reaped for child in self.children if child.status is not None)
            if is_quiet and self.heard():
                return
            assert real_time() < deadline
            pause(0.0005)

    def heard(self) -> bool:
        """Whether the living child's last message was handled: one more that has no effect was."""
        if (child := self.child) is None:
            return True
        if not child.marker.starting or self.mapper._state is State.RUNNING:
            done = threading.Event()
            probe = Attempt({"batch_idx": -1, "attempt_id": -1, "part_bases": []}, lambda _: done.set())
            with self.mapper._lock:
                if self.mapper._child is not child:
                    return False
                self.mapper._waiting[probe.key] = probe
            child.say({"taken_back": [probe.key]})
            return done.wait(PATIENCE_S)
        return True

    def record(self, event: Attempt | list[Message]) -> None:
        if isinstance(event, Attempt):
            self.settled[event.key] += 1

    @rule(count=st.integers(1, 5))
    def feed(self, count: int) -> None:
        first = len(self.attempts)
        new = [
            Attempt(
                {"batch_idx": idx, "attempt_id": 1, "start_idx": idx, "end_idx": idx, "part_bases": ["p"]}, self.record
            )
            for idx in range(first, first + count)
        ]
        self.attempts |= {attempt.key: attempt for attempt in new}
        is_closed, before = self.mapper._state is State.CLOSED, len(self.children)
        had_child, will_fail = self.mapper._child is not None, self.fails_to_start
        self.mapper.feed(new)
        if is_closed:
            assert len(self.children) == before and all(self.settled[attempt.key] == 1 for attempt in new)
        elif not had_child and not will_fail:
            assert len(self.children) == before + 1 and self.children[-1].sent, "the next batch gets a fresh child"
        self.settle_down()

    @rule()
    def start(self) -> None:
        self.mapper.start()

    @rule()
    def let_the_next_start_fail(self) -> None:
        self.fails_to_start = True

    def live(self) -> FakeChild:
        assert self.child is not None
        return self.child

    @precondition(lambda self: self.child and self.child.sent)
    @rule(data=st.data(), error=st.sampled_from(["", "ValueError"]))
    def answer(self, data: st.DataObject, error: str) -> None:
        """For any attempt that the child was ever sent, so perhaps for the second time."""
        child = self.live()
        batch_idx, attempt_id = data.draw(st.sampled_from(child.sent))
        child.marker.set_starting(False)
        outcome = {"batch_idx": batch_idx, "attempt_id": attempt_id, "error": error, "error_type": error}
        child.say({"outcomes": [outcome | {"retry": True, "final": False}]})
        self.settle_down()

    @precondition(lambda self: self.child)
    @rule()
    def fail_to_set_up(self) -> None:
        self.live().say({"start_error": "no GPU", "cause": FailureCause.SETUP})
        self.settle_down()

    @precondition(lambda self: self.child)
    @rule(message=st.sampled_from([{}, {"outcomes": 5}, {"outcomes": [{}]}, {"taken_back": [0]}, {"asks": [{}]}]))
    def speak_nonsense(self, message: Message) -> None:
        self.live().say(message)
        self.settle_down()

    @precondition(lambda self: self.child)
    @rule(data=st.data(), status=st.sampled_from([0, 1, -signal.SIGKILL, -signal.SIGSEGV]), starting=st.booleans())
    def die(self, data: st.DataObject, status: int, starting: bool) -> None:
        """While it works on some of its batches, or on none."""
        child = self.live()
        child.marker.set_starting(starting)
        busy = data.draw(st.lists(st.sampled_from(child.sent), unique=True, max_size=3)) if child.sent else []
        for slot, (batch_idx, attempt_id) in enumerate(busy, MAP):
            child.marker.begin(slot, Assignment(batch_idx, batch_idx, batch_idx, attempt_id, ()))  # type: ignore[attr-defined]
        child.die(status)
        self.settle_down()

    @rule(seconds=st.sampled_from([0.1, 11.0, 700.0]))
    def watch(self, seconds: float) -> None:
        self.now += seconds
        self.mapper.watch()
        self.settle_down()

    @precondition(lambda self: self.child and self.child.sent)
    @rule(data=st.data())
    def answer_late(self, data: st.DataObject) -> None:
        """What the child sent before it was killed for being late arrives after that."""
        child = self.live()
        batch_idx, attempt_id = data.draw(st.sampled_from(child.sent))
        with self.mapper._lock:
            child.say({"outcomes": [{"batch_idx": batch_idx, "attempt_id": attempt_id, "error": "", "error_type": ""}]})
            self.now += 700.0
            self.mapper.watch()
        self.settle_down()

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.attempts:
            self.mapper.give_back(data.draw(st.lists(st.sampled_from(list(self.attempts.values())))))
            self.settle_down()

    @rule()
    def kill(self) -> None:
        self.mapper.kill()
        self.settle_down()

    @precondition(lambda self: len(self.attempts) > 6)
    @rule()
    def close(self) -> None:
        self.mapper.close(0.0)
        self.settle_down()

    @invariant()
    def nothing_is_settled_twice(self) -> None:
        assert all(count == 1 for count in self.settled.values()) and not self.thread_errors

    @invariant()
    def unsettled_attempts_are_known(self) -> None:
        with self.mapper._lock:
            assert {key for key in self.attempts if not self.settled[key]} == set(self.mapper._waiting) - {(-1, -1)}
            if self.mapper._state is not State.CLOSED:
                assert not self.mapper._waiting or self.mapper._child is not None, "attempts wait for nothing"
                assert (self.mapper._child is None) == (self.mapper._state in (State.ABSENT, State.BROKEN))

    def teardown(self) -> None:
        if not hasattr(self, "mapper"):
            return
        self.mapper.close(0.0)
        self.settle_down()
        self.patch.undo()
        assert set(self.settled) == set(self.attempts) and set(self.settled.values()) <= {1}
        assert all(child.status is not None and child.is_reaped for child in self.children), "a process is left"


real_time, pause = time.monotonic, time.sleep
TestEvents = Events.TestCase
TestEvents.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_transition_that_the_table_lacks_raises_and_the_others_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mapper = MapperProcess(spec_of(Path()), Path("log"))
    with pytest.raises(RuntimeError, match="ABSENT cannot become RUNNING"):
        mapper._move(State.RUNNING)
    with caplog.at_level(logging.DEBUG, "tinsmith.batch"):
        mapper._move(State.STARTING)
        mapper._move(State.CLOSED)
        for state in State:
            mapper._move(state)  # `kill` may come before any other transition
    assert [record.args[1:] for record in caplog.records if isinstance(record.args, tuple)] == [
        ("ABSENT", "STARTING"),
        ("STARTING", "CLOSED"),
    ]
    assert mapper._state is State.CLOSED and set(TRANSITIONS) == set(State)


class Unready:
    """Does not start, and leaves a thread that goes on."""

    def __init__(self) -> None:
        import threading
        import time

        threading.Thread(target=time.sleep, args=(600,)).start()
        raise RuntimeError("no weights")

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return row


def test_a_set_up_that_fails_ends_its_process_although_a_thread_goes_on(tmp_path: Path) -> None:
    mapper = MapperProcess(spec_of(tmp_path, Unready), tmp_path / "log")
    settled: queue.SimpleQueue[Attempt | list[Message]] = queue.SimpleQueue()
    assignment = {"batch_idx": 0, "attempt_id": 1, "start_idx": 0, "end_idx": 0, "part_bases": [str(tmp_path)]}
    mapper.feed([Attempt(assignment, settled.put)])
    attempt = settled.get(timeout=PATIENCE_S)
    assert isinstance(attempt, Attempt) and attempt.result["lost"]["cause"] == FailureCause.SETUP
    assert "no weights" in attempt.result["lost"]["error"]
    mapper.close(0.0)


def test_the_set_up_is_no_part_of_the_time_of_batches_that_begin_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now, child = [0.0], FakeChild()
    monkeypatch.setattr(mapper_process, "start_child", lambda *_: child)
    monkeypatch.setattr(mapper_process.time, "monotonic", lambda: now[0])
    mapper = MapperProcess(spec_of(Path()), Path("log"))
    mapper._max_concurrent = 3
    answered: queue.SimpleQueue[object] = queue.SimpleQueue()
    mapper.feed([Attempt({"batch_idx": idx, "attempt_id": 1, "part_bases": []}, answered.put) for idx in range(3)])
    now[0] = 50.0
    child.marker.set_starting(False)
    mapper.watch()
    child.say({"outcomes": [{"batch_idx": 0, "attempt_id": 1, "error": "", "error_type": ""}]})
    answered.get(timeout=PATIENCE_S)
    now[0] = 59.0
    mapper.watch()
    assert child.status is None and mapper.state == {"state": "ready"}
    now[0] = 61.0
    mapper.watch()
    assert child.status == -signal.SIGKILL
    mapper.close(0.0)
