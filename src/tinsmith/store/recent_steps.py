"""The last MAX_RECENT_STEPS steps of each base model's engine, with the tokens of each tenant, for the dashboard.

An engine writes its steps about once a second, best effort: up to 1 s may be lost in a crash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tinsmith.db.database import Database
from tinsmith.db.schema import RECENT_STEPS

MAX_RECENT_STEPS = 200
"""Steps of a base model, snapshots included."""

Shares = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class RecentStep:
    """`shares` are the tokens of its passes: tenant_id -> model_id -> tokens. An entry without passes, optimizer steps
    and singles is a snapshot that was written in the background: its shares name the run, with 0 tokens.
    """

    ended_at: float
    duration_s: float
    num_passes: int
    num_optim_steps: int
    num_singles: int
    num_tokens: int
    shares: Shares


_FIELDS = tuple(RecentStep.__dataclass_fields__)
_COLUMNS = [RECENT_STEPS.c[name] for name in _FIELDS]


class RecentSteps:
    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, base_model: str, steps: Sequence[RecentStep]) -> None:
        """Add steps, and delete all but the newest MAX_RECENT_STEPS of the base model."""
        # asdict would make deep copies.
        rows = [{"base_model": base_model, **{name: getattr(step, name) for name in _FIELDS}} for step in steps]
        of_base = RECENT_STEPS.c.base_model == base_model
        all_steps = RECENT_STEPS.alias("others")
        newest = sa.select(all_steps.c.position).where(all_steps.c.base_model == base_model)
        newest = newest.order_by(all_steps.c.position.desc())
        oldest_position = newest.offset(MAX_RECENT_STEPS - 1).limit(1).scalar_subquery()
        with self._db.write() as connection:
            connection.execute(RECENT_STEPS.insert(), rows)
            connection.execute(RECENT_STEPS.delete().where(of_base, RECENT_STEPS.c.position < oldest_position))

    def newest(
        self, base_model: str, limit: int = MAX_RECENT_STEPS, *, snapshots: bool = False
    ) -> list[tuple[int, RecentStep]]:
        """The newest steps, or snapshots, of a base model with their positions, newest first."""
        num_operations = RECENT_STEPS.c.num_passes + RECENT_STEPS.c.num_optim_steps + RECENT_STEPS.c.num_singles
        condition = (RECENT_STEPS.c.base_model == base_model) & (
            num_operations == 0 if snapshots else num_operations > 0
        )
        query = sa.select(RECENT_STEPS.c.position, *_COLUMNS).where(condition)
        query = query.order_by(RECENT_STEPS.c.position.desc()).limit(limit)
        return [(position, RecentStep(*values)) for position, *values in self._db.rows(query)]
