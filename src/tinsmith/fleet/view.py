"""Fleet: the engines of a base model as a server sees them, for giving new work away as it is stored.

A new run goes to the engine that has the fewest; a sample that is bound to no run goes to any of them, by its name.
Who there is and what they have is asked at most twice a second; in between, what was given away is added. A view that
is a moment old does no harm: what was given to an engine that is gone is freed by the others (`ownership`), and what
nobody was there for is nobody's, and claimed by whoever comes. Called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa
import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.db import Database
from tinsmith.fleet.ownership import preferred
from tinsmith.tables import ENGINES, MODELS

FRESH_S = 0.5
"""How long a view is good for."""

log = structlog.get_logger()


@dataclass(slots=True)
class _View:
    looked_at: float
    runs: dict[str, int]  # of each engine


class Fleet:
    def __init__(self, db: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._db = db
        self._clock = clock
        self._lock = threading.Lock()
        self._views: dict[str, _View] = {}

    def for_run(self, base_model: str) -> str | None:
        """The engine of a new run; None if there is none now."""
        view = self._view(base_model)
        with self._lock:
            if not view.runs:
                return None
            engine_id = min(view.runs, key=lambda one: (view.runs[one], one))
            view.runs[engine_id] += 1
            return engine_id

    def for_sample(self, base_model: str, request_id: str) -> str | None:
        """The engine of a sample of a base model or a checkpoint; None if there is none now."""
        view = self._view(base_model)
        with self._lock:
            return preferred(request_id, list(view.runs)) if view.runs else None

    def _view(self, base_model: str) -> _View:
        moment = self._clock()
        with self._lock:
            view = self._views.get(base_model)
            if view is not None:
                if moment - view.looked_at < FRESH_S:
                    return view
                view.looked_at = moment  # the others go on with what there is, while this thread looks
        try:
            runs = self._look(base_model)
        except SQLAlchemyError as error:  # an engine claims it; the request itself will say what is wrong
            log.warning("the engines could not be looked up", base_model=base_model, error=repr(error))
            runs = {}
        fresh = _View(moment, runs)
        with self._lock:
            self._views[base_model] = fresh
        return fresh

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
