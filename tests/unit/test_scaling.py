"""The autoscaling rule, for any queue depths and times of measurement."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tinsmith.cluster.ray.scaling import Past, PlannedCounts, Rule, plan_counts

RULE = Rule(minimum=1, maximum=4, work_per_process=100, up_after_s=10, down_after_s=60)

rules = st.builds(
    lambda minimum, extra, load, up, down: Rule(minimum, minimum + extra, load, up, down),
    st.integers(0, 3), st.integers(0, 5), st.floats(1, 1e6), st.floats(0, 30), st.floats(0, 300),
)  # fmt: skip
looks = st.lists(st.tuples(st.floats(0.1, 50), st.floats(0, 1e7)), min_size=1, max_size=60)


def play(rule: Rule, steps: list[tuple[float, float]], before: Past | None = None) -> list[tuple[float, int]]:
    """(time, count) after each step of (seconds since the last one, queue depth)."""
    past = {"engine": before} if before else {}
    now, counts = 0.0, []
    for seconds, waiting in steps:
        now += seconds
        planned: PlannedCounts = plan_counts({"engine": {"base": waiting}}, {"engine": rule}, past, now)
        past = planned.past
        counts.append((now, planned.counts["engine"]))
    return counts


@given(rules, looks)
def test_there_are_never_fewer_than_the_minimum_or_more_than_the_maximum(rule, steps) -> None:
    assert all(rule.minimum <= count <= rule.maximum for _, count in play(rule, steps))


@given(rules, st.floats(0, 1e7), st.integers(0, 8))
def test_a_lasting_queue_gets_the_processes_it_needs_and_stays_stable(rule, waiting, start) -> None:
    needed_count = rule.clamp(math.ceil(waiting / rule.work_per_process))
    patience_s = max(rule.up_after_s, rule.down_after_s) + 1
    counts = [count for _, count in play(rule, [(1, waiting), (patience_s, waiting)] + [(1, waiting)] * 5, Past(start))]
    assert set(counts[1:]) == {needed_count}


@given(rules, looks)
def test_a_change_matches_some_need_in_its_window(rule, steps) -> None:
    history: list[tuple[float, int]] = []
    now, last = 0.0, rule.minimum
    for (at, count), (seconds, waiting) in zip(play(rule, steps), steps, strict=True):
        now += seconds
        history.append((now, rule.count_for({"base": waiting})))
        if count > last:
            assert all(need >= count for when, need in history if when >= at - rule.up_after_s)
        if count < last:
            assert all(need <= count for when, need in history if when >= at - rule.down_after_s)
        last = count


@given(rules, looks, st.floats(1, 4))
def test_more_work_never_means_fewer_processes(rule, steps, factor) -> None:
    less = play(rule, steps)
    scaled_counts = play(rule, [(seconds, waiting * factor) for seconds, waiting in steps])
    assert all(count <= scaled_count for (_, count), (_, scaled_count) in zip(less, scaled_counts, strict=True))


def test_a_burst_starts_nothing_and_a_pause_ends_nothing() -> None:
    burst = [(1, 0.0)] * 20 + [(1, 1000.0)] * 9 + [(1, 0.0)] * 20
    assert {count for _, count in play(RULE, burst)} == {1}
    pause = [(1, 1000.0)] * 20 + [(1, 0.0)] * 59 + [(1, 1000.0)] * 5
    assert [count for _, count in play(RULE, pause)][15:] == [4] * (len(pause) - 15)


def test_a_role_grows_after_its_delay_and_shrinks_after_its_own() -> None:
    steps = [(1, 250.0)] * 15 + [(1, 0.0)] * 70
    counts = dict(play(RULE, steps))
    assert counts[10.0] == 1 and counts[11.0] == 3, "ten seconds of more than enough for three"
    assert counts[15.0 + 60] == 3 and counts[15.0 + 61] == 1


def test_a_role_shrinks_to_the_most_that_was_needed() -> None:
    steps = [(1, 400.0)] * 15 + [(1, 200.0)] * 30 + [(1, 0.0)] * 100
    counts = dict(play(RULE, steps))
    assert counts[15.0 + 61] == 2 and counts[15.0 + 30 + 61] == 1


def test_a_new_controller_changes_nothing_at_first() -> None:
    assert play(RULE, [(1, 0.0)] * 30, Past(3))[-1][1] == 3
    assert play(RULE, [(1, 1e6)] * 9, Past(1))[-1][1] == 1


def test_more_than_the_maximum_of_new_rules_is_taken_back_at_once() -> None:
    assert play(RULE, [(1, 1e6)], Past(9)) == [(1, 4)]


def test_the_base_model_for_which_most_waits_decides() -> None:
    planned = plan_counts({"engine": {"a": 150.0, "b": 350.0}}, {"engine": RULE}, {"engine": Past(1, ((-20, 4),))}, 0.0)
    assert planned.counts == {"engine": 4}, "not the sum: one process serves both side by side"


@given(rules, looks)
def test_the_past_does_not_grow_with_time(rule, steps) -> None:
    past: dict[str, Past] = {}
    now = 0.0
    for seconds, waiting in steps:
        now += seconds
        past = dict(plan_counts({"engine": {"base": waiting}}, {"engine": rule}, past, now).past)
        horizon = now - max(rule.up_after_s, rule.down_after_s)
        assert sum(at <= horizon for at, _ in past["engine"].samples) <= 1
