"""Fleet: the engines of a base model as a server sees them, for giving new work away as it is stored.

A new run goes to the engine that has the fewest; a sample that is bound to no run goes to any of them, by its name.
Who there is and what they have is asked at most twice a second; in between, what was given away is added. A view that
is a moment old does no harm: what was given to an engine that is gone is freed by the others (`ownership`), and what
nobody was there for is nobody's, and claimed by whoever comes. Called from any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import sqlalchemy as sa

from tinsmith.cluster.loads import Loads
from tinsmith.cluster.ownership import preferred
from tinsmith.db.database import Database
from tinsmith.db.schema import ENGINES, MODELS


class Fleet:
    def __init__(self, db: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._db = db
        self._runs = Loads(self._look, clock)

    def for_run(self, base_model: str) -> str | None:
        """The engine of a new run; None if there is none now."""
        runs = self._runs.of(base_model)
        with self._runs.lock:
            if not runs:
                return None
            engine_id = min(runs, key=lambda one: (runs[one], one))
            runs[engine_id] += 1
            return engine_id

    def for_sample(self, base_model: str, request_id: str) -> str | None:
        """The engine of a sample of a base model or a checkpoint; None if there is none now."""
        runs = self._runs.of(base_model)
        with self._runs.lock:
            return preferred(request_id, list(runs)) if runs else None

    def _look(self, base_model: str) -> dict[str, int]:
        # One that is loading will be there; if all others are, they are quicker.
        alive = ENGINES.c.lease_expires_at > self._db.clock()
        mine = (ENGINES.c.base_model == base_model) & (ENGINES.c.kind == "engine") & alive
        runs = sa.select(sa.func.count()).where(MODELS.c.engine_id == ENGINES.c.engine_id).scalar_subquery()
        query = sa.select(ENGINES.c.engine_id, ENGINES.c.state, runs.label("runs")).where(mine)
        with self._db.read() as connection:
            rows = connection.execute(query).all()
        ready = [row for row in rows if row.state == "ready"]
        return {row.engine_id: int(row.runs) for row in ready or rows if row.state in ("ready", "loading")}
