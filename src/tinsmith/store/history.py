"""Curves: what a run's metrics were, step by step, for people to look at.

A point belongs to a model, a source and a step. The server's own points are written by the transaction that settles an
optimizer step, and their step is the number of that optimizer step in the run; a client's are whatever it logs, under a
step of its own, and what it logs twice for one step is merged. Each source has at most MOST_POINTS points of a run: one
more, and KEPT_POINTS remain, evenly over the steps. A point that remains is as it was measured, never an average.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tinsmith.db.database import Database, now
from tinsmith.db.schema import CURVE_POINTS, FUTURES
from tinsmith.db.statements import Bound, Prepared
from tinsmith.errors import UserError

MOST_POINTS = 2048
KEPT_POINTS = 1024
MOST_NAMES = 64
"""Metrics of one point."""

OVERLAP_S = 5.0
"""What was recorded so much earlier than the last look may have been committed after it."""

SERVER, CLIENT = "server", "client"


@dataclass(frozen=True, slots=True)
class Point:
    source: str
    step: int
    metrics: Mapping[str, float | None]
    recorded_at: float


class Curves:
    def __init__(self, db: Database) -> None:
        self._db = db
        self._add = Prepared(db.insert_once(CURVE_POINTS))

    # The engine's side.

    def known(self, model_id: str) -> tuple[int, int]:
        """How many optimizer steps of a model were done, and how many points the server has of it."""
        steps = sa.select(sa.func.count()).where(
            FUTURES.c.model_id == model_id, FUTURES.c.kind == "optim_step", FUTURES.c.state == "done"
        )
        with self._db.read() as connection:
            return connection.scalar(steps) or 0, connection.scalar(_count(model_id, SERVER)) or 0

    def recording(self, model_id: str, step: int, metrics: Mapping[str, float]) -> Bound:
        """A statement for the transaction that settles an optimizer step."""
        return Bound(self._add, _row(model_id, SERVER, step, metrics))

    # The server's side.

    def log(self, model_id: str, step: int | None, metrics: Mapping[str, float]) -> int:
        """Record a client's metrics at a step; None is the run's newest optimizer step. Returns the step.

        Raises UserError if the step would have too many metrics.
        """
        with self._db.write() as connection:
            newest = sa.select(sa.func.max(CURVE_POINTS.c.step)).where(_of(model_id, SERVER))
            step = int(connection.scalar(newest) or 0) if step is None else step
            mine = _of(model_id, CLIENT) & (CURVE_POINTS.c.step == step)
            self._add.count(connection, _row(model_id, CLIENT, step, {}))
            found = connection.scalar(sa.select(CURVE_POINTS.c.metrics).where(mine).with_for_update())
            merged = {**(found or {}), **metrics}
            if len(merged) > MOST_NAMES:
                raise UserError(f"step {step} would have {len(merged)} metrics; at most {MOST_NAMES} are kept")
            connection.execute(CURVE_POINTS.update().where(mine).values(metrics=merged, recorded_at=now()))
            if (connection.scalar(_count(model_id, CLIENT)) or 0) > MOST_POINTS:
                ends = sa.select(sa.func.min(CURVE_POINTS.c.step), sa.func.max(CURVE_POINTS.c.step))
                low, high = connection.execute(ends.where(_of(model_id, CLIENT))).one()
                connection.execute(thinning(model_id, CLIENT, low, high))
        return step

    def points(self, model_id: str, after: float = 0.0) -> list[Point]:
        """A run's points in the order of steps; only those recorded after a moment, and some from just before it."""
        columns = [CURVE_POINTS.c[name] for name in Point.__dataclass_fields__]
        query = sa.select(*columns).where(CURVE_POINTS.c.model_id == model_id)
        query = query.where(CURVE_POINTS.c.recorded_at >= after - OVERLAP_S)
        with self._db.read() as connection:
            rows = connection.execute(query.order_by(CURVE_POINTS.c.source, CURVE_POINTS.c.step))
            return [Point(**row._mapping) for row in rows]

    def newest(self, model_ids: Sequence[str]) -> dict[str, Point]:
        """The server's last point of each of these runs that has one."""
        newest = (
            sa.select(CURVE_POINTS.c.model_id, sa.func.max(CURVE_POINTS.c.step).label("step"))
            .where(CURVE_POINTS.c.model_id.in_(model_ids), CURVE_POINTS.c.source == SERVER)
            .group_by(CURVE_POINTS.c.model_id)
            .subquery()
        )
        same = (CURVE_POINTS.c.model_id == newest.c.model_id) & (CURVE_POINTS.c.step == newest.c.step)
        query = sa.select(CURVE_POINTS).join(newest, same).where(CURVE_POINTS.c.source == SERVER)
        with self._db.read() as connection:
            return {
                row.model_id: Point(row.source, row.step, row.metrics, row.recorded_at)
                for row in connection.execute(query)
            }


def thinning(model_id: str, source: str, low: int, high: int) -> sa.Executable:
    """A statement that leaves about KEPT_POINTS of a run's points, the last of each stretch of steps."""
    width = max(1, math.ceil((high - low + 1) / KEPT_POINTS))
    all_points = CURVE_POINTS.alias("all_points")
    mine = (all_points.c.model_id == model_id) & (all_points.c.source == source)
    stretch = (all_points.c.step - low) // sa.literal(width, sa.BigInteger)
    kept = sa.select(sa.func.max(all_points.c.step)).where(mine).group_by(stretch)
    return CURVE_POINTS.delete().where(_of(model_id, source), CURVE_POINTS.c.step.not_in(kept))


def _of(model_id: str, source: str) -> sa.ColumnElement[bool]:
    return (CURVE_POINTS.c.model_id == model_id) & (CURVE_POINTS.c.source == source)


def _count(model_id: str, source: str) -> sa.Select:
    return sa.select(sa.func.count()).select_from(CURVE_POINTS).where(_of(model_id, source))


def _row(model_id: str, source: str, step: int, metrics: Mapping[str, float]) -> dict[str, object]:
    # JSON has no infinity: what is not finite is there, and is null.
    shown = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return {"model_id": model_id, "source": source, "step": step, "metrics": shown, "recorded_at": now()}
