"""Points of curves: logging, merging and thinning."""

from __future__ import annotations

import itertools
import math

import pytest

from tinsmith.db.database import Database
from tinsmith.db.schema import CURVE_POINTS, MODELS
from tinsmith.db.statements import execute
from tinsmith.errors import UserError
from tinsmith.store.curves import MAX_NAMES, MAX_POINTS, THINNED_POINTS, Curves, thin_points

RUN, OTHER = "s:train:0", "s:train:1"


def record(db: Database, run: str, step: int, **metrics: float) -> None:
    with db.write() as connection:
        execute(connection, Curves(db).step_statement(run, step, metrics))


def model_row(model_id: str) -> dict[str, object]:
    names = {"model_id": model_id, "session_id": "s", "tenant_id": "a", "base_model": "b", "optimizer_type": "adamw"}
    numbers = {"lora_rank": 4, "lora_alpha": 8.0, "applied_seq_id": 0, "created_at": 1.0, "last_request_at": 1.0}
    return {**names, "state": "ready", **numbers, "train_attn": True, "train_mlp": True, "train_unembed": True}


def read_logged_metrics(db: Database, run: str = RUN) -> dict[int, dict[str, float | None]]:
    return {point.step: dict(point.metrics) for point in Curves(db).points(run) if point.source == "client"}


def test_points_of_one_step_are_merged(db: Database) -> None:
    curves = Curves(db)
    assert curves.log(RUN, 3, {"reward": 1.0, "length": 5.0}) == 3
    assert curves.log(RUN, 3, {"reward": 2.0, "entropy": 0.5}) == 3
    curves.log(OTHER, 3, {"reward": 9.0})
    assert read_logged_metrics(db) == {3: {"reward": 2.0, "length": 5.0, "entropy": 0.5}}


def test_without_a_step_the_newest_optimizer_step_is_meant(db: Database) -> None:
    curves = Curves(db)
    assert curves.log(RUN, None, {"a": 1.0}) == 0
    record(db, RUN, 1, loss=1.0)
    record(db, RUN, 2, loss=0.5)
    record(db, OTHER, 7, loss=0.5)
    assert curves.log(RUN, None, {"a": 2.0}) == 2
    assert read_logged_metrics(db) == {0: {"a": 1.0}, 2: {"a": 2.0}}


def test_a_step_has_a_bounded_number_of_metrics(db: Database) -> None:
    curves = Curves(db)
    curves.log(RUN, 0, {f"n{index}": 1.0 for index in range(MAX_NAMES)})
    with pytest.raises(UserError, match=f"step 0 would have {MAX_NAMES + 1} metrics"):
        curves.log(RUN, 0, {"one": 1.0, "n0": 2.0})
    assert read_logged_metrics(db)[0]["n0"] == 1.0, "nothing of what is refused is kept"


def test_non_finite_values_are_null_and_a_step_is_recorded_once(db: Database) -> None:
    record(db, RUN, 1, loss=math.nan, norm=math.inf, rate=0.1)
    record(db, RUN, 1, loss=5.0)
    (point,) = Curves(db).points(RUN)
    assert (point.source, point.step, point.metrics) == ("server", 1, {"loss": None, "norm": None, "rate": 0.1})


def test_points_are_thinned_evenly_and_unchanged(db: Database) -> None:
    rows = [
        {"model_id": run, "source": "client", "step": 10 * step, "metrics": {"a": step}, "recorded_at": float(step)}
        for run in (RUN, OTHER)
        for step in range(MAX_POINTS)
    ]
    with db.write() as connection:
        connection.execute(CURVE_POINTS.insert(), rows)
    record(db, RUN, 5, loss=1.0)
    last = 10 * MAX_POINTS
    assert Curves(db).log(RUN, last, {"a": 1.0}) == last
    metrics_by_step = read_logged_metrics(db)
    steps = sorted(metrics_by_step)
    assert THINNED_POINTS / 2 < len(steps) <= THINNED_POINTS + 1
    assert steps[-1] == last and metrics_by_step[last] == {"a": 1.0}
    assert all(metrics_by_step[step] == {"a": step / 10} for step in steps[:-1])
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert max(gaps) <= 40 and steps[0] <= 40, "no stretch of the run is lost"
    assert len(read_logged_metrics(db, OTHER)) == MAX_POINTS
    assert [point.step for point in Curves(db).points(RUN) if point.source == "server"] == [5]


def test_thinning_leaves_few_points_as_they_are(db: Database) -> None:
    for step in (1, 2, 3):
        record(db, RUN, step, loss=1.0)
    with db.write() as connection:
        connection.execute(thin_points(RUN, "server", 0, 3))
    assert [point.step for point in Curves(db).points(RUN)] == [1, 2, 3]


def test_a_cursor_returns_new_points(db: Database) -> None:
    rows = [
        {"model_id": RUN, "source": "server", "step": step, "metrics": {}, "recorded_at": 1000.0 * step}
        for step in range(1, 6)
    ]
    with db.write() as connection:
        connection.execute(CURVE_POINTS.insert(), rows)
        connection.execute(MODELS.insert(), [model_row(RUN), model_row(OTHER)])
    assert [point.step for point in Curves(db).points(RUN, 4000.0)] == [4, 5]
    assert [point.step for point in Curves(db).points(RUN, 4500.0)] == [5]
    assert Curves(db).newest([RUN, OTHER])[RUN].step == 5
    Curves(db).log(RUN, 2, {"reward": 1.0})
    assert Curves(db).newest([RUN], "client")[RUN].step == 2
    assert list(Curves(db).newest([OTHER])) == []
