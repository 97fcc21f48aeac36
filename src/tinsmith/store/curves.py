"""Metric curves of runs. A point belongs to a model, a source and a step.

The transaction that settles an optimizer step writes the server's point with the number of that step. A client logs
points at its own steps; metrics of the same step are merged. A run has at most MAX_POINTS points per source. Beyond
that, THINNED_POINTS of them, evenly spaced, stay unaveraged: the engine thins the server's, `log_points` a client's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tinsmith.db.database import Database, now
from tinsmith.db.schema import CURVE_POINTS, FUTURES, MODELS
from tinsmith.db.statements import Bound, Statement
from tinsmith.errors import UserError

MAX_POINTS = 2048
THINNED_POINTS = 1024
MAX_NAMES = 128
"""Most metrics of one point."""

OVERLAP_S = 5.0
"""A point may be committed up to this long after its recorded time, so each read goes back this far."""

SERVER, CLIENT = "server", "client"


@dataclass(frozen=True, slots=True)
class Point:
    source: str
    step: int
    metrics: Mapping[str, float | None]
    recorded_at: float


@dataclass(frozen=True, slots=True)
class Outline:
    """A few values of one metric of a run."""

    name: str
    values: Sequence[float]


class Curves:
    def __init__(self, db: Database) -> None:
        self._db = db
        self._add = Statement(db.insert_once(CURVE_POINTS))

    # Methods for the engine.

    def count_steps_and_points(self, model_id: str) -> tuple[int, int]:
        """Count a model's completed optimizer steps and its points from the server."""
        steps = sa.select(sa.func.count()).where(
            FUTURES.c.model_id == model_id, FUTURES.c.kind == "optim_step", FUTURES.c.state == "done"
        )
        return self._db.scalar(steps) or 0, self._db.scalar(_count(model_id, SERVER)) or 0

    def step_statement(self, model_id: str, step: int, metrics: Mapping[str, float]) -> Bound:
        """A statement for the transaction that settles an optimizer step."""
        return Bound(self._add, _row(model_id, SERVER, step, metrics))

    # Methods for the server.

    def log(self, model_id: str, step: int | None, metrics: Mapping[str, float]) -> int:
        """Record a client's metrics at one step, as `log_points` does. Returns the step."""
        return self.log_points(model_id, [(step, metrics)])

    def log_points(self, model_id: str, points: Sequence[tuple[int | None, Mapping[str, float]]]) -> int:
        """Record a client's metrics by step; None is the run's newest optimizer step. Returns the last point's step.

        Atomic and idempotent. Raises UserError if a step would have too many metrics.
        """
        with self._db.write() as connection:
            newest = sa.select(sa.func.max(CURVE_POINTS.c.step)).where(_is_of(model_id, SERVER))
            default = int(connection.scalar(newest) or 0) if any(step is None for step, _ in points) else 0
            merged: dict[int, dict[str, float]] = {}
            for point_step, metrics in points:
                merged.setdefault(default if point_step is None else point_step, {}).update(metrics)
            for step, metrics in sorted(merged.items()):
                self._merge_point(connection, model_id, step, metrics)
            if (connection.scalar(_count(model_id, CLIENT)) or 0) > MAX_POINTS:
                ends = sa.select(sa.func.min(CURVE_POINTS.c.step), sa.func.max(CURVE_POINTS.c.step))
                low, high = connection.execute(ends.where(_is_of(model_id, CLIENT))).one()
                connection.execute(thin_points(model_id, CLIENT, low, high))
        last = points[-1][0]
        return default if last is None else last

    def _merge_point(self, connection: sa.Connection, model_id: str, step: int, metrics: Mapping[str, float]) -> None:
        at_step = _is_of(model_id, CLIENT) & (CURVE_POINTS.c.step == step)
        self._add.count(connection, _row(model_id, CLIENT, step, {}))
        stored = connection.scalar(sa.select(CURVE_POINTS.c.metrics).where(at_step).with_for_update())
        merged = {**(stored or {}), **metrics}
        if len(merged) > MAX_NAMES:
            raise UserError(f"step {step} would have {len(merged)} metrics; at most {MAX_NAMES} are kept")
        connection.execute(CURVE_POINTS.update().where(at_step).values(metrics=merged, recorded_at=now()))

    def points(self, model_id: str, after: float = 0.0) -> list[Point]:
        """A run's points in the order of steps: those recorded after `after`, and up to OVERLAP_S before it."""
        columns = [CURVE_POINTS.c[name] for name in Point.__dataclass_fields__]
        query = sa.select(*columns).where(CURVE_POINTS.c.model_id == model_id)
        query = query.where(CURVE_POINTS.c.recorded_at >= after - OVERLAP_S)
        return [Point(*row) for row in self._db.rows(query.order_by(CURVE_POINTS.c.source, CURVE_POINTS.c.step))]

    def newest(self, model_ids: Sequence[str], source: str = SERVER) -> dict[str, Point]:
        """The last point from a source of each run that has one, found without reading the others."""
        points = CURVE_POINTS.alias("points")
        of_run = (points.c.model_id == MODELS.c.model_id) & (points.c.source == source)
        last = sa.select(sa.func.max(points.c.step)).where(of_run).scalar_subquery()
        query = (
            sa.select(CURVE_POINTS)
            .join(MODELS, MODELS.c.model_id == CURVE_POINTS.c.model_id)
            .where(MODELS.c.model_id.in_(model_ids), CURVE_POINTS.c.source == source, CURVE_POINTS.c.step == last)
        )
        return {row.model_id: Point(row.source, row.step, row.metrics, row.recorded_at) for row in self._db.rows(query)}

    def newest_points(self, model_ids: Sequence[str], limit: int) -> dict[tuple[str, str], list[Point]]:
        """The last `limit` points of each run by (model_id, source), in the order of steps."""
        points_of: dict[tuple[str, str], list[Point]] = {}
        columns = [CURVE_POINTS.c[name] for name in Point.__dataclass_fields__]
        with self._db.read() as connection:
            for model_id in model_ids:
                for source in (CLIENT, SERVER):
                    query = sa.select(*columns).where(_is_of(model_id, source))
                    rows = connection.execute(query.order_by(CURVE_POINTS.c.step.desc()).limit(limit)).all()
                    if rows:
                        points_of[model_id, source] = [Point(*row) for row in reversed(rows)]
        return points_of

    def points_of_saves(self, saves: Sequence[tuple[str, int | None, float]]) -> list[list[Point]]:
        """For each save, given by run, step and time, the newest point of each source at its step or before. A save
        without a step has those that were recorded by its time.
        """
        columns = [CURVE_POINTS.c[name] for name in Point.__dataclass_fields__]
        points: list[list[Point]] = []
        with self._db.read() as connection:
            for model_id, step, saved_at in saves:
                is_before = CURVE_POINTS.c.recorded_at <= saved_at if step is None else CURVE_POINTS.c.step <= step
                queries = [
                    sa.select(*columns).where(_is_of(model_id, source), is_before) for source in (CLIENT, SERVER)
                ]
                rows = [
                    connection.execute(query.order_by(CURVE_POINTS.c.step.desc()).limit(1)).first() for query in queries
                ]
                points.append([Point(*row) for row in rows if row is not None])
        return points

    def outlines(self, model_ids: Sequence[str], names: Sequence[str], max_points: int) -> dict[str, Outline]:
        """For each run, the first of `names` that it has, at up to `max_points` evenly spaced steps with the last."""
        outline_of: dict[str, Outline] = {}
        with self._db.read() as connection:
            for model_id in model_ids:
                for source in (CLIENT, SERVER):
                    of_source = _is_of(model_id, source)
                    steps = list(connection.scalars(sa.select(CURVE_POINTS.c.step).where(of_source).order_by("step")))
                    width = max(1, -(-len(steps) // max_points))
                    at_steps = of_source & CURVE_POINTS.c.step.in_(steps[::-1][::width])
                    points = sa.select(CURVE_POINTS.c.step, CURVE_POINTS.c.metrics).where(at_steps).order_by("step")
                    rows = connection.execute(points).all() if steps else ()
                    name = next((name for name in names if any(name in row.metrics for row in rows)), None)
                    if name is not None:
                        values = [row.metrics[name] for row in rows if row.metrics.get(name) is not None]
                        outline_of[model_id] = Outline(name, values)
                        break
        return outline_of


def thin_points(model_id: str, source: str, low: int, high: int) -> sa.Executable:
    """A statement that keeps about THINNED_POINTS of a run's points, the last of each interval of steps."""
    width = max(1, math.ceil((high - low + 1) / THINNED_POINTS))
    all_points = CURVE_POINTS.alias("all_points")
    of_source = (all_points.c.model_id == model_id) & (all_points.c.source == source)
    interval = (all_points.c.step - low) // sa.literal(width, sa.BigInteger)
    last_of_intervals = sa.select(sa.func.max(all_points.c.step)).where(of_source).group_by(interval)
    return CURVE_POINTS.delete().where(_is_of(model_id, source), CURVE_POINTS.c.step.not_in(last_of_intervals))


def _is_of(model_id: str, source: str) -> sa.ColumnElement[bool]:
    return (CURVE_POINTS.c.model_id == model_id) & (CURVE_POINTS.c.source == source)


def _count(model_id: str, source: str) -> sa.Select:
    return sa.select(sa.func.count()).select_from(CURVE_POINTS).where(_is_of(model_id, source))


def _row(model_id: str, source: str, step: int, metrics: Mapping[str, float]) -> dict[str, object]:
    # JSON has no infinity or NaN: such values are stored as null.
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return {"model_id": model_id, "source": source, "step": step, "metrics": json.dumps(finite), "recorded_at": now()}
