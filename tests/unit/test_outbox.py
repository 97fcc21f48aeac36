"""Settlements on their way into the database: what is retried, after which pause, and what ends the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from sqlalchemy import exc

from tinsmith.engine import settling
from tinsmith.engine.faults import EngineFaultError, Fault
from tinsmith.engine.settling import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    DatabaseRetry,
    IterationFailedError,
    Outbox,
    is_transient,
)
from tinsmith.store.futures import Settlement

LOST = exc.OperationalError("UPDATE", None, Exception("the connection was lost"))
BROKEN = exc.ProgrammingError("UPDATE", None, Exception("no such column"))


@dataclass
class Clock:
    """A clock that advances only by calls of its `sleep`."""

    now_s: float = 100.0
    pauses_s: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.pauses_s.append(pause_s)
        self.now_s += pause_s


@dataclass
class FailingFutures:
    """Raises `errors` one after the other, then stores what is settled."""

    errors: list[BaseException] = field(default_factory=list)
    commits: list[tuple[list[str], dict[str, int]]] = field(default_factory=list)

    def settle(self, settlements: Sequence[Settlement], applied: Mapping[str, int]) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.commits.append(([settlement.request_id for settlement in settlements], dict(applied)))


class Timings:
    def add_work_times(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        return list(settlements)


@dataclass
class Bench:
    futures: FailingFutures
    retry: DatabaseRetry
    outbox: Outbox
    committed: list[str]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    new_clock = Clock()
    monkeypatch.setattr(settling, "time", new_clock)
    return new_clock


@pytest.fixture
def bench(clock: Clock) -> Bench:
    futures, retry, committed = FailingFutures(), DatabaseRetry(), list[str]()

    def record(settlements: Sequence[Settlement]) -> None:
        committed.extend(settlement.request_id for settlement in settlements)

    outbox = Outbox(futures, Timings(), retry, record)  # type: ignore[arg-type]
    return Bench(futures, retry, outbox, committed)


def lose_connection() -> exc.DBAPIError:
    """An error of a kind that is permanent, on a connection that is gone."""
    return exc.DBAPIError("UPDATE", None, Exception("terminating connection"), connection_invalidated=True)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (LOST, True),
        (exc.InterfaceError("UPDATE", None, Exception("closed")), True),
        (exc.InternalError("UPDATE", None, Exception("deadlock")), True),
        (exc.TimeoutError("the pool is empty"), True),
        (lose_connection(), True),
        (BROKEN, False),
        (exc.IntegrityError("INSERT", None, Exception("unique")), False),
        (exc.ArgumentError("a bug of ours"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_of_the_connection_are_transient_and_those_of_statements_are_not(
    error: exc.SQLAlchemyError, expected: bool
) -> None:
    assert is_transient(error) is expected


def test_pauses_double_up_to_the_longest(clock: Clock) -> None:
    errors: list[exc.SQLAlchemyError] = [LOST] * 7

    def act() -> str:
        if errors:
            raise errors.pop()
        return "done"

    assert DatabaseRetry().run(act) == "done"
    expected = [min(FIRST_PAUSE_S * 2**index, LONGEST_PAUSE_S) for index in range(7)]
    assert clock.pauses_s == expected and expected[-1] == LONGEST_PAUSE_S


@pytest.mark.parametrize(("error", "is_stopping"), [(BROKEN, False), (LOST, True), (ValueError("a bug"), False)])
def test_a_permanent_error_and_a_stopping_engine_end_the_attempts(
    clock: Clock, error: Exception, is_stopping: bool
) -> None:
    retry, calls = DatabaseRetry(), list[int]()
    retry.stopping = lambda: is_stopping

    def act() -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error)):
        retry.run(act)
    assert (len(calls), clock.pauses_s) == (1, [])


def test_what_could_not_be_settled_goes_with_the_next_settlement_once(bench: Bench, clock: Clock) -> None:
    bench.futures.errors = [LOST]
    bench.outbox.try_settle([Settlement("a")])
    assert bench.committed == [] and clock.pauses_s == [], "it does not wait"
    bench.outbox.settle([Settlement("b")], {"m": 3})
    bench.outbox.settle([Settlement("c")])
    bench.outbox.flush()
    assert bench.futures.commits == [(["a", "b"], {"m": 3}), (["c"], {})]
    assert bench.committed == ["a", "b", "c"]


def test_a_flush_commits_what_waits_and_nothing_else(bench: Bench) -> None:
    bench.outbox.flush()
    bench.futures.errors = [LOST, LOST]
    bench.outbox.try_settle([Settlement("a")])
    bench.outbox.flush()
    bench.outbox.flush()
    assert bench.futures.commits == [(["a"], {})] and bench.committed == ["a"]


def test_the_pause_between_attempts_doubles_and_starts_anew_after_a_commit(bench: Bench, clock: Clock) -> None:
    def attempts_within(pause_s: float) -> list[bool]:
        """Whether an attempt is made just before and just after a pause."""
        results = []
        for now_s in (clock.now_s + 0.99 * pause_s, clock.now_s + pause_s):
            bench.futures.errors = [LOST]
            clock.now_s = now_s
            bench.outbox.try_settle([])
            results.append(not bench.futures.errors)
        return results

    bench.futures.errors = [LOST]
    bench.outbox.try_settle([Settlement("a")])
    pauses_s = [min(FIRST_PAUSE_S * 2**index, LONGEST_PAUSE_S) for index in range(7)]
    for pause_s in pauses_s:
        assert attempts_within(pause_s) == [False, True]
    bench.futures.errors = []
    bench.outbox.settle([])
    assert bench.committed == ["a"]
    bench.futures.errors = [LOST]
    bench.outbox.try_settle([Settlement("b")])
    assert bench.futures.errors == [], "after a commit it does not wait"
    assert attempts_within(FIRST_PAUSE_S) == [False, True]


@pytest.mark.parametrize("method", ["settle", "try_settle", "flush"])
@pytest.mark.parametrize(
    ("error", "expected"),
    [(BROKEN, IterationFailedError), (ValueError("a bug"), EngineFaultError)],
    ids=["the statement is wrong", "the code is wrong"],
)
def test_a_settlement_that_cannot_succeed_ends_the_engine_and_keeps_its_cause(
    bench: Bench, method: str, error: Exception, expected: type[BaseException]
) -> None:
    if method == "flush":
        bench.futures.errors = [LOST]
        bench.outbox.try_settle([Settlement("a")])
    bench.futures.errors = [error]
    calls: dict[str, Callable[[], None]] = {
        "settle": lambda: bench.outbox.settle([Settlement("a")]),
        "try_settle": lambda: bench.outbox.try_settle([Settlement("a")]),
        "flush": bench.outbox.flush,
    }
    with pytest.raises(expected) as caught:
        calls[method]()
    assert caught.value.__cause__ is error and bench.committed == []
    if isinstance(caught.value, EngineFaultError):
        assert caught.value.fault is Fault.BUG


def test_a_clean_up_follows_the_commit_and_its_failure_fails_nothing(bench: Bench) -> None:
    done: list[str] = []
    lost_once = [LOST]

    def clean_up() -> None:
        done.append(f"after {bench.committed}")
        if lost_once:
            raise lost_once.pop()

    def fail() -> None:
        raise OSError("the disk is gone")

    def fail_permanently() -> None:
        raise BROKEN

    bench.outbox.settle(
        [
            Settlement("a", clean_up=fail),
            Settlement("b", clean_up=fail_permanently),
            Settlement("c", clean_up=clean_up),
            Settlement("d"),
        ]
    )
    assert done == ["after ['a', 'b', 'c', 'd']"] * 2, "it is tried again after a transient error"
    assert bench.committed == ["a", "b", "c", "d"]
