"""Signs that a training run needs a person, read from its newest points: what is wrong, in one sentence.

| warning | sign |
|---|---|
| diverged, failed | its status (`run_status`) |
| reward collapsed | the mean of the last `WINDOW` rewards is far below the best mean of as many |
| equal rewards | in the last `WINDOW` steps no group had different rewards, so the gradient is 0 |
| stalled | a request waits, or its client is there and asks for nothing, far longer than a step takes |
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from tinsmith.store.curves import Point
from tinsmith.store.run_status import RunStatus

WINDOW = 5
NUM_POINTS = 100
"""Points of each source that the signs are read from."""
STALLED_S = 600.0
STALLED_STEPS = 10.0
"""A run is stalled after both this long and as long as this many of its steps."""
LOST_SHARE = 0.3
LOST_CHANGES = 3.0
"""A reward has collapsed if it lost this share of its best, and this many times its usual change between steps."""
REWARDS = ("reward", "reward/mean", "mean_reward", "env/all/reward/total", "reward/total")
"""The usual names of a reward, in the order in which every page and warning looks for them."""
MIXED_GROUPS = "env/all/by_group/frac_mixed"
"""The cookbook's share of groups with different rewards."""


class RunWarning(NamedTuple):
    kind: str
    text: str


def list_run_warnings(
    status: RunStatus,
    logged: Sequence[Point],
    trained: Sequence[Point],
    last_request_at: float,
    oldest_waiting_at: float | None,
    at: float,
) -> list[RunWarning]:
    """The warnings of a run at a moment, from its newest points by source in the order of steps."""
    warnings: list[RunWarning] = []
    if status.name in ("diverged", "failed"):
        warnings.append(RunWarning(status.name, status.reason or "no reason is known"))
    reward = describe_collapse(_newest_rewards(logged))
    if reward is not None:
        warnings.append(RunWarning("reward collapsed", reward))
    if _has_equal_rewards(logged, trained):
        text = f"no group had different rewards in the last {WINDOW} steps, which therefore taught nothing"
        warnings.append(RunWarning("equal rewards", text))
    since = last_request_at if oldest_waiting_at is None else oldest_waiting_at
    waited_s = at - max([since, *(point.recorded_at for point in trained[-1:])])
    if status.name in ("running", "idle") and trained and waited_s > max(STALLED_S, STALLED_STEPS * _step_s(trained)):
        stall = "its client asked for nothing" if oldest_waiting_at is None else "a request has waited"
        warnings.append(RunWarning("stalled", f"{stall} for {waited_s / 60:.0f} min, and no step has ended since"))
    return warnings


def describe_collapse(rewards: Sequence[float]) -> str | None:
    """Why the rewards, oldest first, have collapsed; None if they have not."""
    if len(rewards) < 2 * WINDOW:
        return None
    means = [statistics.fmean(rewards[start : start + WINDOW]) for start in range(len(rewards) - WINDOW + 1)]
    best, last = max(means[: 1 - WINDOW]), means[-1]
    earlier = rewards[:-WINDOW]
    changes = [abs(after - before) for before, after in pairwise(earlier)]
    lost = best - last
    if lost > LOST_SHARE * abs(best) and lost > LOST_CHANGES * statistics.median(changes):
        return f"the mean of the last {WINDOW} rewards is {last:.3g}, and was {best:.3g}"
    return None


def _newest_rewards(logged: Sequence[Point]) -> list[float]:
    name = next((name for name in REWARDS if any(name in point.metrics for point in logged)), None)
    return [] if name is None else _values(logged, name)


def _values(points: Sequence[Point], name: str) -> list[float]:
    return [value for point in points if (value := point.metrics.get(name)) is not None]


def _has_equal_rewards(logged: Sequence[Point], trained: Sequence[Point]) -> bool:
    shares = _values(logged, MIXED_GROUPS)[-WINDOW:]
    if len(shares) == WINDOW and not any(shares):
        return True
    newest = trained[-WINDOW:]
    return len(newest) == WINDOW and all(_teaches_nothing(point.metrics) for point in newest)


def _teaches_nothing(metrics: Mapping[str, float | None]) -> bool:
    """Whether a step had only advantages of 0. Its gradient tells of the few outside of the percentiles."""
    return all(metrics.get(name) == 0.0 for name in ("advantage:p10", "advantage:p90", "grad_norm"))


def _step_s(trained: Sequence[Point]) -> float:
    """The median time between steps, in seconds."""
    times = [point.recorded_at for point in trained]
    return statistics.median([after - before for before, after in pairwise(times)] or [0.0])
