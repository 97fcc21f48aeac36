"""Recent steps of engines, with snapshots among them: order and number."""

from __future__ import annotations

from tinsmith.db.database import Database
from tinsmith.store.recent_steps import MAX_RECENT_STEPS, RecentStep, RecentSteps

RUN = "s:train:0"


def step(index: int) -> RecentStep:
    return RecentStep(float(index), 0.5, 1, 0, 0, index, {"alice": {RUN: index}})


def test_the_last_steps_of_a_base_model_are_kept(db: Database) -> None:
    steps = RecentSteps(db)
    steps.add("other", [step(1)])
    steps.add("base", [step(index) for index in range(MAX_RECENT_STEPS)])
    steps.add("base", [step(index) for index in range(MAX_RECENT_STEPS, MAX_RECENT_STEPS + 3)])
    recent_steps = [recent for _, recent in steps.newest("base", 10 * MAX_RECENT_STEPS)]
    assert [recent.num_tokens for recent in recent_steps] == list(range(MAX_RECENT_STEPS + 2, 2, -1))
    assert recent_steps[0] == step(MAX_RECENT_STEPS + 2)
    assert len(steps.newest("other")) == 1


def test_snapshots_are_among_the_steps_and_not_shown_as_such(db: Database) -> None:
    steps = RecentSteps(db)
    snapshot = RecentStep(3.0, 0.25, 0, 0, 0, 0, {"alice": {RUN: 0}})
    steps.add("base", [step(1), snapshot, step(2)])
    assert [recent for _, recent in steps.newest("base")] == [step(2), step(1)]
    assert [recent for _, recent in steps.newest("base", snapshots=True)] == [snapshot]
