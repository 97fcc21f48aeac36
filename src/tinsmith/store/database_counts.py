"""Counts of rows for Prometheus, over all tenants.

Each scrape reads them through indexes over unfinished work, so that their cost does not grow with history. The resident
memory of this server's engines comes from the operating system.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

from tinsmith.db.database import Database, now
from tinsmith.db.schema import ACTIVE_JOB, BATCH_JOBS, ENGINES, FUTURES, MODELS, SESSIONS
from tinsmith.store.models import LOADED
from tinsmith.store.sessions import IS_ACTIVE
from tinsmith.telemetry.metrics import RowCount


class DatabaseCounts:
    def __init__(self, db: Database, holder: str) -> None:
        self._db = db
        self._holder = holder

    def counts(self) -> Iterator[RowCount]:
        with self._db.read() as connection:
            yield from self._count_queues(connection)
            yield from self._count_engines(connection)
            yield from _count_models(connection)
            opened = sa.select(sa.func.count()).select_from(SESSIONS).where(IS_ACTIVE)
            yield RowCount("tinsmith_sessions_open", (), float(connection.scalar(opened) or 0))
            jobs = BATCH_JOBS.c.status
            for status, count in connection.execute(
                sa.select(jobs, sa.func.count()).where(jobs.in_(ACTIVE_JOB)).group_by(jobs)
            ):
                yield RowCount("tinsmith_batch_jobs", (status,), float(count))

    def _count_queues(self, connection: sa.Connection) -> Iterator[RowCount]:
        # For the index of the engines' queues, since most requests are settled.
        query = (
            sa.select(FUTURES.c.base_model, FUTURES.c.kind, sa.func.count(), sa.func.min(FUTURES.c.created_at))
            .where(FUTURES.c.base_model.in_(sa.select(ENGINES.c.base_model)), FUTURES.c.state == "pending")
            .group_by(FUTURES.c.base_model, FUTURES.c.kind)
        )
        now_s = now()
        for base_model, kind, count, oldest in connection.execute(query):
            yield RowCount("tinsmith_queue_requests", (base_model, kind), float(count))
            yield RowCount("tinsmith_queue_oldest_seconds", (base_model, kind), max(0.0, now_s - oldest))

    def _count_engines(self, connection: sa.Connection) -> Iterator[RowCount]:
        alive = (ENGINES.c.lease_expires_at > self._db.clock()).label("alive")
        columns = (ENGINES.c.base_model, ENGINES.c.engine_id, ENGINES.c.state, ENGINES.c.holder, ENGINES.c.pid, alive)
        for row in connection.execute(sa.select(*columns)):
            ready = row.state == "ready" and bool(row.alive)
            yield RowCount("tinsmith_engine_ready", (row.base_model, row.engine_id), float(ready))
            if row.alive and row.holder == self._holder and (size := _read_resident_bytes(row.pid)):
                yield RowCount("tinsmith_engine_resident_bytes", (row.base_model, row.engine_id), float(size))


def _count_models(connection: sa.Connection) -> Iterator[RowCount]:
    lag = sa.func.max(MODELS.c.applied_seq_id - sa.func.coalesce(MODELS.c.snapshot_seq_id, 0))
    query = (
        sa.select(MODELS.c.base_model, MODELS.c.state, sa.func.count(), lag)
        .where(MODELS.c.state.in_(LOADED))
        .group_by(MODELS.c.base_model, MODELS.c.state)
    )
    for base_model, state, count, max_lag in connection.execute(query):
        yield RowCount("tinsmith_models", (base_model, state), float(count))
        if state == "ready":
            yield RowCount("tinsmith_snapshot_lag_operations", (base_model,), float(max_lag))


def _read_resident_bytes(pid: int) -> int:
    """The resident memory of a process; 0 where the system does not report it."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
