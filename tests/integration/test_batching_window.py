"""The batching window: the rule over random arrivals, and an engine that follows it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engine_bench import Bench
from tinsmith.engine.queues import LATE_S, LATE_SHARE, MAX_HOLD_S, MAX_HOLD_SHARE, BatchingWindow, Lane, Rhythm
from tinsmith.types import Pending

SECONDS = st.floats(0.0, 1.0, allow_nan=False)
DUES = st.lists(SECONDS)


def pending(seq_id: int, kind: str, created_at: float = 0.0) -> Pending:
    return Pending(
        arrival=seq_id,
        request_id=f"m:{seq_id}",
        tenant_id="t",
        session_id="s",
        kind=kind,
        state="pending",
        model_id="m",
        sampling_session_id=None,
        seq_id=seq_id,
        num_tokens=1,
        created_at=created_at,
    )


def quick(pause_s: float, answered_at: float = 0.0) -> Rhythm:
    """The rhythm of a client that took this long twice."""
    rhythm = Rhythm()
    for _ in range(2):
        rhythm.answered(0.0)
        rhythm.came(pause_s)
    rhythm.answered(answered_at)
    return rhythm


@given(st.lists(SECONDS, min_size=1), st.lists(st.tuples(SECONDS, DUES, DUES), max_size=40))
def test_passes_are_never_held_for_longer_than_a_share_of_a_short_step(
    steps_s: list[float], turns: list[tuple[float, list[float], list[float]]]
) -> None:
    gathering = BatchingWindow()
    for seconds in steps_s:
        gathering.ran(seconds)
    most_s = min(MAX_HOLD_S, MAX_HOLD_SHARE * min(steps_s[-9:]))
    now_s, began = 0.0, None
    for elapsed_s, beside_s, quick_s in turns:
        now_s += elapsed_s
        began = now_s if began is None else began
        wait_s = gathering.wait_s(beside_s, quick_s, now_s)
        assert now_s + wait_s <= began + most_s + 1e-9 or not wait_s
        assert wait_s in (0.0, *beside_s, *quick_s)
        if not wait_s:
            gathering.ran(steps_s[0])  # held requests run now
            most_s, began = gathering.most_s(), None


def test_there_is_no_wait_before_a_timed_step_or_without_expected_passes() -> None:
    gathering = BatchingWindow()
    assert gathering.wait_s([0.0001], [0.0001], 0.0) == 0.0 and gathering.late_s() == LATE_S
    gathering.ran(1.0)
    assert gathering.late_s() == LATE_SHARE
    assert gathering.wait_s([], [], 0.0) == 0.0
    assert gathering.wait_s([], [0.001, 0.002, 7.0], 0.0) == 0.002
    assert gathering.wait_s([], [0.6 * MAX_HOLD_S], 0.0) == 0.0
    assert gathering.wait_s([0.6 * MAX_HOLD_S], [], 0.0) == 0.6 * MAX_HOLD_S


def test_of_those_who_came_together_before_all_are_waited_for_or_none() -> None:
    gathering = BatchingWindow()
    gathering.ran(1.0)
    assert gathering.wait_s([0.003, 7.0], [], 0.0) == 0.0
    assert gathering.wait_s([0.003, 7.0], [0.001], 0.0) == 0.001
    assert gathering.wait_s([0.003, 0.004], [0.001], 0.0) == 0.004


@given(st.floats(0.0, 10.0), st.floats(0.0, 10.0), st.floats(0.0, 30.0))
def test_a_pass_is_expected_for_half_as_long_again_as_the_longer_of_two_pauses(
    first_s: float, second_s: float, waited_s: float
) -> None:
    rhythm = Rhythm()
    for pause_s in (first_s, second_s):
        assert rhythm.due_in_s(0.0) is None
        rhythm.answered(0.0)
        rhythm.came(pause_s)
    assert rhythm.due_in_s(0.0) is None  # it is there
    rhythm.answered(0.0)
    due_at = 1.5 * max(first_s, second_s) + LATE_S
    if waited_s < due_at:
        assert rhythm.due_in_s(waited_s) == pytest.approx(due_at - waited_s)
    else:
        assert rhythm.due_in_s(waited_s) is None


def test_who_came_late_once_is_expected_again_after_two_quick_passes() -> None:
    rhythm = quick(0.01)
    rhythm.came(5.0)
    pauses = []
    for _ in range(3):
        pauses.append(rhythm.pause_s)
        rhythm.answered(0.0)
        rhythm.came(0.01)
    assert pauses == [5.0, 5.0, 0.01]


def came(*moments: float) -> Rhythm:
    rhythm = Rhythm()
    for now_s in moments:
        rhythm.came(now_s)
    return rhythm


LAGS = st.lists(st.floats(0.0, 0.99 * MAX_HOLD_S), min_size=2, max_size=2)
"""Clearly of the same moment: what a sum rounds to never decides."""


@given(
    LAGS,
    LAGS,
    st.floats(1.0, 1000.0),
    st.floats(0.0, 0.2),
    st.floats(LATE_S, 0.1),
)
def test_who_came_with_another_twice_is_expected_as_long_after_it_again(
    first_lags: list[float], second_lags: list[float], pause_s: float, waited_s: float, late_s: float
) -> None:
    first = came(*(turn * pause_s + lag for turn, lag in enumerate(first_lags)), again := 2 * pause_s)
    second = came(*(turn * pause_s + lag for turn, lag in enumerate(second_lags)))
    lag_s = max(0.0, *(second_lag - first_lag for second_lag, first_lag in zip(second_lags, first_lags, strict=True)))
    remaining_s = 1.5 * lag_s + late_s - waited_s
    due_s = second.due_beside_s(first, again + waited_s, late_s)
    if abs(remaining_s) > 1e-9:
        assert due_s == (pytest.approx(remaining_s, abs=1e-9) if remaining_s > 0 else None)
    second.came(again)  # and then nobody is waited for
    third = came(*(now_s + 3 * MAX_HOLD_S for now_s in (0.0, pause_s)))
    assert third.due_beside_s(first, again) is None
    assert came(pause_s).due_beside_s(first, again) is None
    assert second.due_beside_s(came(0.0, again), again) is None


def test_a_client_that_has_gone_is_waited_for_once_only() -> None:
    first, departed = came(0.0, 10.0, 20.0), came(0.01, 10.01)
    assert departed.due_beside_s(first, 20.0) is not None
    first.came(30.0)
    assert departed.due_beside_s(first, 30.0) is None


def test_a_lane_expects_a_pass_when_it_is_empty_or_ready_for_an_optimizer_step() -> None:
    lane = Lane("m", "t", 1)
    lane.rhythm = quick(0.01, answered_at=100.0)
    assert lane.pass_due_in_s(100.0) == pytest.approx(0.015 + LATE_S)
    assert lane.pass_due_in_s(101.0) is None
    lane.add(pending(1, "forward_backward", created_at=100.01))
    assert lane.pass_due_in_s(100.01) is None  # it is there
    lane.done(1)
    lane.add(pending(3, "forward"))
    assert lane.pass_due_in_s(0.0) is None  # behind a gap
    lane.add(pending(2, "optim_step"))
    assert lane.pass_due_in_s(0.0) == LATE_S
    lane.waiting.pop(3)
    assert lane.pass_due_in_s(0.0) == pytest.approx(0.01)
    lane.waiting[3] = pending(3, "save_weights")
    assert lane.pass_due_in_s(0.0) is None


def test_a_lane_is_expected_beside_another_when_it_is_empty_or_has_only_an_optimizer_step_left() -> None:
    first, lane = Lane("first", "t", 1), Lane("m", "t", 1)
    first.rhythm, lane.rhythm = came(0.0, 10.0, 20.0), came(0.0, 10.0)
    assert lane.pass_due_beside_s(first, 20.0) == pytest.approx(LATE_S)
    lane.add(pending(1, "optim_step"))
    assert lane.pass_due_beside_s(first, 20.0) == pytest.approx(LATE_S)
    lane.add(pending(2, "forward"))
    assert lane.pass_due_beside_s(first, 20.0) is None
    assert lane.pass_due_in_s(20.0) == LATE_S
    lane.done(1)
    assert lane.pass_due_beside_s(first, 20.0) is None and lane.pass_due_in_s(20.0) is None


def test_a_lane_notes_a_pass_that_could_run_at_once_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals: list[float] = []
    monkeypatch.setattr(Rhythm, "came", lambda self, now_s: arrivals.append(now_s))
    lane = Lane("m", "t", 1)
    lane.add(pending(2, "optim_step"))
    lane.add(pending(1, "forward_backward", created_at=7.0))
    lane.add(pending(3, "forward_backward", created_at=8.0))
    assert arrivals == [7.0]


def test_a_lane_that_never_repeated_itself_is_not_waited_for() -> None:
    lane = Lane("m", "t", 1)
    lane.add(pending(1, "optim_step"))
    assert lane.pass_due_in_s(0.0) is None
    lane.done(1)
    assert lane.pass_due_in_s(0.0) is None


def test_an_engine_waits_for_who_is_expected_and_then_runs_all_passes_in_one_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = bench.model("s:train:0"), bench.model("s:train:1")
    monkeypatch.setattr(BatchingWindow, "most_s", lambda self: math.inf)
    monkeypatch.setattr(Rhythm, "due_in_s", lambda self, now_s: 5.0)
    first = bench.train(alice, 1)
    bench.run_until_idle()
    assert bench.backend.steps == [] and bench.outcome(first) is None
    second = bench.train(bob, 1)
    bench.run_until_idle()
    assert [sorted(step) for step in bench.backend.steps] == [sorted([first, second])]


def test_an_engine_waits_for_who_came_with_another_before(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    alice, bob = bench.model("s:train:0"), bench.model("s:train:1")
    monkeypatch.setattr(BatchingWindow, "most_s", lambda self: math.inf)
    monkeypatch.setattr("tinsmith.engine.queues.MAX_HOLD_S", 1000.0)  # however slow this machine is
    monkeypatch.setattr("tinsmith.engine.queues.LATE_S", 1000.0)
    monkeypatch.setattr(Rhythm, "due_in_s", lambda self, now_s: None)
    for seq_id in (1, 2):
        bench.train(alice, seq_id)
        bench.train(bob, seq_id)
        bench.run_until_idle()
    bench.train(alice, 3)
    bench.run_until_idle()
    assert [len(step) for step in bench.backend.steps] == [2, 2]
    bench.train(bob, 3)
    bench.run_until_idle()
    assert [len(step) for step in bench.backend.steps] == [2, 2, 2]


def test_an_engine_does_not_wait_for_a_model_whose_client_has_gone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = bench.model("s:train:0"), bench.model("s:train:1")
    monkeypatch.setattr(BatchingWindow, "most_s", lambda self: math.inf)
    bench.engine._queues.lanes[bob].rhythm = quick(0.01, answered_at=0.0)  # long ago
    request_id = bench.train(alice, 1)
    bench.run_until_idle()
    assert bench.backend.steps == [[request_id]]


def test_optimizer_steps_run_first_where_they_free_passes_that_others_can_share(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = bench.model("s:train:0"), bench.model("s:train:1")
    bench.step(bob, 1)
    passes = [bench.train(alice, 1), bench.train(bob, 2)]
    monkeypatch.setattr(BatchingWindow, "most_s", lambda self: math.inf)
    bench.run_until_idle()
    assert [sorted(step) for step in bench.backend.steps] == [sorted(passes)]


def test_without_the_time_of_a_short_step_to_spare_nothing_waits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    alice, bob = bench.model("s:train:0"), bench.model("s:train:1")
    monkeypatch.setattr(BatchingWindow, "most_s", lambda self: 0.0)
    monkeypatch.setattr(Rhythm, "due_in_s", lambda self, now_s: 5.0)
    bench.step(bob, 1)
    bench.train(bob, 2)
    request_id = bench.train(alice, 1)
    bench.engine.run_once(0.0)
    assert bench.backend.steps == [] or bench.backend.steps[0] == [request_id]
    bench.run_until_idle()
    assert len(bench.backend.steps) == 2


def test_a_step_that_is_full_already_does_not_wait(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    alice = bench.model("s:train:0")
    bench.model("s:train:1")
    monkeypatch.setattr(BatchingWindow, "most_s", lambda self: math.inf)
    monkeypatch.setattr(Rhythm, "due_in_s", lambda self, now_s: 5.0)
    monkeypatch.setattr(bench.engine, "_settings", bench.settings.model_copy(update={"step_token_budget": 6}))
    request_id = bench.train(alice, 1, tokens=(1, 2, 3, 4))
    bench.run_until_idle()
    assert bench.backend.steps == [[request_id]]
