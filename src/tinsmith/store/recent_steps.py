"""Recent steps: what each engine ran lately, and whose it was. The last KEPT_STEPS of a base model are kept.

An engine writes what it ran about once a second, in a transaction of its own: losing some to a crash harms nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tinsmith.db.database import Database
from tinsmith.db.schema import RECENT_STEPS

KEPT_STEPS = 200

Shares = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class RecentStep:
    """`shares` are the tokens of its passes: tenant_id -> model_id -> tokens."""

    ended_at: float
    duration_s: float
    num_passes: int
    num_optim_steps: int
    num_singles: int
    num_tokens: int
    shares: Shares


_COLUMNS = [RECENT_STEPS.c[name] for name in RecentStep.__dataclass_fields__]


def _values(step: RecentStep) -> dict[str, object]:
    return {name: getattr(step, name) for name in RecentStep.__dataclass_fields__}  # asdict copies all that is in it


class RecentSteps:
    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, base_model: str, steps: Sequence[RecentStep]) -> None:
        mine = RECENT_STEPS.c.base_model == base_model
        others = RECENT_STEPS.alias("others")
        oldest_kept = (
            sa.select(others.c.position)
            .where(others.c.base_model == base_model)
            .order_by(others.c.position.desc())
            .offset(KEPT_STEPS - 1)
            .limit(1)
        ).scalar_subquery()
        with self._db.write() as connection:
            connection.execute(RECENT_STEPS.insert(), [{"base_model": base_model, **_values(step)} for step in steps])
            connection.execute(RECENT_STEPS.delete().where(mine, RECENT_STEPS.c.position < oldest_kept))

    def newest(self, base_model: str, limit: int = KEPT_STEPS) -> list[tuple[int, RecentStep]]:
        """The newest steps of a base model with their positions, newest first."""
        query = sa.select(RECENT_STEPS.c.position, *_COLUMNS).where(RECENT_STEPS.c.base_model == base_model)
        query = query.order_by(RECENT_STEPS.c.position.desc()).limit(limit)
        with self._db.read() as connection:
            return [(position, RecentStep(*values)) for position, *values in connection.execute(query)]
