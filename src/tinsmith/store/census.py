"""How many of everything there are now, for operators: counted in the rows at each scrape, across all tenants.

Every query is answered by an index over what is unfinished, so that its cost does not grow with the past. The memory of
this server's own engines is asked of the system.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from tinsmith.db.database import Database, now
from tinsmith.db.schema import BATCH, ENGINES, FUTURES, MODELS, SESSIONS

LOADED = ("creating", "ready")
ENDED_JOB = ("SUCCEEDED", "FAILED", "CANCELLED")
ACTIVE_SESSION = SESSIONS.c.closed_at.is_(None) & (SESSIONS.c.state == "active")
"""The client's heartbeats come. One that said farewell is kept open for its last requests, and is no longer active."""


@dataclass(frozen=True, slots=True)
class Counted:
    meter: str
    labels: tuple[str, ...]
    value: float


class Census:
    def __init__(self, db: Database, holder: str) -> None:
        self._db = db
        self._holder = holder

    def counts(self) -> Iterator[Counted]:
        with self._db.read() as connection:
            yield from self._queues(connection)
            yield from self._engines(connection)
            yield from _models(connection)
            opened = sa.select(sa.func.count()).select_from(SESSIONS).where(ACTIVE_SESSION)
            yield Counted("tinsmith_sessions_open", (), float(connection.scalar(opened) or 0))
            jobs = BATCH.jobs.c.status
            for status, count in connection.execute(
                sa.select(jobs, sa.func.count()).where(jobs.not_in(ENDED_JOB)).group_by(jobs)
            ):
                yield Counted("tinsmith_batch_jobs", (status,), float(count))

    def _queues(self, connection: sa.Connection) -> Iterator[Counted]:
        # By the index of the engines' queues: the settled requests are many.
        query = (
            sa.select(FUTURES.c.base_model, FUTURES.c.kind, sa.func.count(), sa.func.min(FUTURES.c.created_at))
            .where(FUTURES.c.base_model.in_(sa.select(ENGINES.c.base_model)), FUTURES.c.state == "pending")
            .group_by(FUTURES.c.base_model, FUTURES.c.kind)
        )
        moment = now()
        for base_model, kind, count, oldest in connection.execute(query):
            yield Counted("tinsmith_queue_requests", (base_model, kind), float(count))
            yield Counted("tinsmith_queue_oldest_seconds", (base_model, kind), max(0.0, moment - oldest))

    def _engines(self, connection: sa.Connection) -> Iterator[Counted]:
        alive = (ENGINES.c.lease_expires_at > self._db.clock()).label("alive")
        columns = (ENGINES.c.base_model, ENGINES.c.engine_id, ENGINES.c.state, ENGINES.c.holder, ENGINES.c.pid, alive)
        for row in connection.execute(sa.select(*columns)):
            ready = row.state == "ready" and bool(row.alive)
            yield Counted("tinsmith_engine_ready", (row.base_model, row.engine_id), float(ready))
            if row.alive and row.holder == self._holder and (size := resident_bytes(row.pid)):
                yield Counted("tinsmith_engine_resident_bytes", (row.base_model, row.engine_id), float(size))


def _models(connection: sa.Connection) -> Iterator[Counted]:
    lag = sa.func.max(MODELS.c.applied_seq_id - sa.func.coalesce(MODELS.c.snapshot_seq_id, 0))
    query = (
        sa.select(MODELS.c.base_model, MODELS.c.state, sa.func.count(), lag)
        .where(MODELS.c.state.in_(LOADED))
        .group_by(MODELS.c.base_model, MODELS.c.state)
    )
    for base_model, state, count, most in connection.execute(query):
        yield Counted("tinsmith_models", (base_model, state), float(count))
        if state == "ready":
            yield Counted("tinsmith_snapshot_lag_operations", (base_model,), float(most))


def resident_bytes(pid: int) -> int:
    """The memory of a process; 0 where the system does not say."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
