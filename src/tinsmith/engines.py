"""Engines as the server sees them: one row per base model saying how its engine is.

States: loading -> ready; failed when the engine refused its model. The engine writes its own row; the supervisor
writes that it is gone.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import asdict, dataclass

import sqlalchemy as sa

from tinsmith.db import ENGINES, Database, now

EXIT_UNUSABLE_MODEL = 3
"""How an engine process ends that cannot serve its model: a restart would not help, so nobody tries."""


@dataclass(frozen=True, slots=True)
class EngineRow:
    base_model: str
    engine_id: str
    pid: int
    state: str
    reason: str | None
    started_at: float


class Engines:
    def __init__(self, db: Database) -> None:
        self._db = db

    def starting(self, base_model: str) -> None:
        """The calling process is now the engine of this base model, and loads it."""
        row = EngineRow(base_model, uuid.uuid4().hex, os.getpid(), "loading", None, now())
        with self._db.write() as connection:
            connection.execute(ENGINES.delete().where(ENGINES.c.base_model == base_model))
            connection.execute(ENGINES.insert(), asdict(row))

    def set_state(self, base_model: str, state: str, reason: str | None = None) -> None:
        with self._db.write() as connection:
            mine = ENGINES.update().where(ENGINES.c.base_model == base_model)
            connection.execute(mine.values(state=state, reason=reason))

    def find(self, base_model: str) -> EngineRow | None:
        with self._db.read() as connection:
            row = connection.execute(sa.select(ENGINES).where(ENGINES.c.base_model == base_model)).one_or_none()
        return None if row is None else EngineRow(**row._mapping)

    def queue_state(self, base_model: str) -> tuple[str, str | None]:
        """The wire's queue_state and its reason: paused_capacity as long as the engine cannot work."""
        row = self.find(base_model)
        if row is not None and row.state == "ready":
            return "active", None
        state = "starting" if row is None else row.state
        detail = f": {row.reason}" if row is not None and row.reason else ""
        return "paused_capacity", f"the engine of {base_model} is {state}{detail}"
