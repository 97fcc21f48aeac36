"""The signs that a run needs a person."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import pytest

from tinsmith.api.dashboard.routes import OUTLINE_METRICS
from tinsmith.api.dashboard.run_table import ALIASES
from tinsmith.store.curves import Point
from tinsmith.store.run_health import MIXED_GROUPS, REWARDS, describe_collapse, list_run_warnings
from tinsmith.store.run_status import RunStatus

NOW = 100_000.0
RISING = [0.1, 0.15, 0.2, 0.22, 0.3, 0.34, 0.4, 0.42, 0.5, 0.52, 0.6, 0.62]


def points(name: str, values: list[float], source: str = "client", ends_at: float = NOW - 5) -> list[Point]:
    first_at = ends_at - 10.0 * (len(values) - 1)
    return [Point(source, step, {name: value}, first_at + 10.0 * step) for step, value in enumerate(values)]


def kinds(
    status: str = "running",
    logged: list[Point] | None = None,
    trained: list[Point] | None = None,
    last_request_at: float = NOW - 5,
    oldest_waiting_at: float | None = None,
) -> list[str]:
    run_status = RunStatus(status, None, 1.0)
    found = list_run_warnings(run_status, logged or [], trained or [], last_request_at, oldest_waiting_at, NOW)
    return [warning.kind for warning in found]


@pytest.mark.parametrize(
    ("rewards", "collapsed"),
    [
        (RISING, False),
        ([*RISING, 0.1, 0.05, 0.1, 0.0, 0.1], True),
        ([*RISING, 0.1], False),  # one bad step
        (RISING[:9], False),  # too few to tell
        ([0.0] * 30, False),
        ([-1.0, -0.9, -0.8, -0.7, -0.6, -0.5, -0.5, -2.0, -2.1, -2.0, -2.0, -2.1], True),
        ([0.5, 0.1, 0.6, 0.2, 0.5, 0.1, 0.6, 0.2, 0.5, 0.1, 0.3, 0.1, 0.2, 0.4], False),  # as noisy as before
    ],
)
def test_a_reward_has_collapsed_if_it_lost_much_and_more_than_it_usually_changes(
    rewards: list[float], collapsed: bool
) -> None:
    assert (describe_collapse(rewards) is not None) == collapsed
    assert kinds(logged=points("env/all/reward/total", rewards)) == ["reward collapsed"] * collapsed


def test_groups_of_equal_rewards_are_seen_in_the_clients_and_in_the_servers_metrics() -> None:
    assert kinds(logged=points(MIXED_GROUPS, [0.5, 0.0, 0.0, 0.0, 0.0, 0.0])) == ["equal rewards"]
    assert kinds(logged=points(MIXED_GROUPS, [0.0, 0.0, 0.0, 0.0, 0.1])) == []
    assert kinds(logged=points(MIXED_GROUPS, [0.0] * 4)) == [], "too few"
    zeros = {"advantage": 0.0, "advantage:p10": 0.0, "advantage:p90": 0.0, "grad_norm": 0.0}
    trained = [Point("server", step, zeros, NOW - 5) for step in range(5)]
    assert kinds(trained=trained) == ["equal rewards"]
    trained[2] = Point("server", 2, zeros | {"grad_norm": 0.3}, NOW - 5)
    assert kinds(trained=trained) == []


def test_a_run_is_stalled_after_far_longer_than_a_step() -> None:
    silent = points("loss", [1.0] * 5, "server", NOW - 700)
    assert kinds("idle", trained=silent, last_request_at=NOW - 690) == ["stalled"]
    assert kinds("idle", trained=silent, last_request_at=NOW - 500) == []
    assert kinds("finished", trained=silent, last_request_at=NOW - 690) == []
    assert kinds("idle", last_request_at=NOW - 690) == [], "it has not begun"
    slow = [Point("server", step, {}, NOW - 700 - 100 * (4 - step)) for step in range(5)]
    assert kinds("idle", trained=slow, last_request_at=NOW - 690) == [], "ten of its steps take longer"
    assert kinds("running", trained=silent, oldest_waiting_at=NOW - 650) == ["stalled"], "the server does not answer"


def test_a_status_that_is_a_failure_is_a_warning_with_its_reason() -> None:
    (warning,) = list_run_warnings(RunStatus("diverged", "grad_norm is not finite", 1.0), [], [], NOW, None, NOW)
    assert warning == ("diverged", "grad_norm is not finite")


def test_pages_and_filters_look_for_the_names_of_a_reward_in_one_order() -> None:
    script = (files("tinsmith.api.dashboard") / "static" / "metrics.js").read_text()
    listed = re.search(r"const REWARDS = (\[.*?\]);", script)
    assert listed is not None and tuple(json.loads(listed[1])) == REWARDS
    assert (*ALIASES["reward"],) == REWARDS[1:] and OUTLINE_METRICS[: len(REWARDS)] == REWARDS
