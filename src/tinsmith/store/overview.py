"""Read-only summaries over several tables: a tenant's overview for the dashboard, and counts for Prometheus.

The overview's queries are limited to one tenant and use indexes; its queue lengths are for display only. The counts
cover all tenants and are read at each scrape, by indexes over unfinished work, so that their cost does not grow with
history. The resident memory of this server's engines comes from the operating system.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tinsmith.db.database import Database, now
from tinsmith.db.schema import BATCH_JOBS, CHECKPOINTS, ENGINES, FUTURES, MODELS, SESSIONS, UPLOADS
from tinsmith.errors import NotFoundError
from tinsmith.store.checkpoints import visible
from tinsmith.store.models import LOADED
from tinsmith.telemetry.metrics import Counted

ENDED_JOB = ("SUCCEEDED", "FAILED", "CANCELLED")
ACTIVE_SESSION = SESSIONS.c.closed_at.is_(None) & (SESSIONS.c.state == "active")
"""The client's heartbeats come. One that said farewell is kept open for its last requests, and is no longer active."""


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
            jobs = BATCH_JOBS.c.status
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


Row = dict[str, Any]
"""One entry of a summary, by the names under which the dashboard shows its values."""

_PROJECT = sa.func.coalesce(MODELS.c.project_id, SESSIONS.c.project_id).label("project_id")
_RUN_COLUMNS = [
    *(MODELS.c.model_id, MODELS.c.session_id, MODELS.c.tenant_id.label("owner"), MODELS.c.base_model, MODELS.c.state),
    *(MODELS.c.reason, MODELS.c.lora_rank, MODELS.c.optimizer_type, MODELS.c.applied_seq_id, MODELS.c.created_at),
    *(MODELS.c.last_request_at, SESSIONS.c.display_name, _PROJECT, MODELS.c.user_metadata),
]
_RUNS = MODELS.outerjoin(SESSIONS, SESSIONS.c.session_id == MODELS.c.session_id)
SORTS: Mapping[str, sa.ColumnElement[object]] = {
    name: MODELS.c[name] for name in ("created_at", "last_request_at", "base_model", "lora_rank", "state", "model_id")
}


class Overview:
    def __init__(self, db: Database) -> None:
        self._db = db

    def runs(
        self, tenant_id: str, search: str, sort: str, descending: bool, limit: int, offset: int
    ) -> tuple[list[Row], int]:
        """A page of the tenant's runs and how many there are; each word of `search` is part of a name of the run."""
        where = MODELS.c.tenant_id == tenant_id
        named = (MODELS.c.model_id, MODELS.c.base_model, MODELS.c.state, SESSIONS.c.display_name, _PROJECT)
        for word in search.lower().split():
            where &= sa.or_(
                *(sa.func.lower(sa.func.coalesce(name, "")).contains(word, autoescape=True) for name in named)
            )
        key, same = SORTS[sort], MODELS.c.model_id
        order = (key.desc(), same.desc()) if descending else (key.asc(), same.asc())
        query = sa.select(*_RUN_COLUMNS).select_from(_RUNS).where(where).order_by(*order)
        rows, total = self._db.page(query, limit, offset)
        return [_named(row) for row in rows], total

    def run(self, tenant_id: str, model_id: str) -> Row:
        mine = (MODELS.c.tenant_id == tenant_id) & (MODELS.c.model_id == model_id)
        row = self._db.first(sa.select(*_RUN_COLUMNS).select_from(_RUNS).where(mine))
        if row is None:
            raise NotFoundError(f"model_id {model_id!r} is unknown")
        return _named(row)

    def waiting(self, tenant_id: str) -> list[Row]:
        """The tenant's unfinished requests by base model, kind and lane (model or sampling session), oldest first."""
        lane = sa.func.coalesce(FUTURES.c.model_id, FUTURES.c.sampling_session_id, FUTURES.c.session_id).label("lane")
        oldest = sa.func.min(FUTURES.c.created_at).label("oldest_at")
        tokens = sa.cast(sa.func.sum(FUTURES.c.num_tokens), sa.BigInteger).label("tokens")
        columns = FUTURES.c.base_model, FUTURES.c.kind, lane
        query = (
            sa.select(*columns, sa.func.count().label("requests"), tokens, oldest)
            .where(FUTURES.c.tenant_id == tenant_id, FUTURES.c.state == "pending")
            .group_by(*columns)
            .order_by(oldest)
        )
        return [_named(row) for row in self._db.rows(query)]

    def seats(self, tenant_id: str) -> list[Row]:
        """The engines and samplers of all base models, with the tenant's runs on each and the tenant's requests that
        wait for it. The state is `silent` once the lease has expired.
        """
        alive = ENGINES.c.lease_expires_at > self._db.clock()
        silent = sa.and_(~alive, ENGINES.c.state.in_(("ready", "loading")))
        state = sa.case((silent, "silent"), else_=ENGINES.c.state).label("state")
        mine = (MODELS.c.tenant_id == tenant_id) & MODELS.c.state.in_(LOADED)
        runs = sa.select(sa.func.count()).where(MODELS.c.engine_id == ENGINES.c.engine_id, mine)
        given = (FUTURES.c.tenant_id == tenant_id) & (FUTURES.c.state == "pending")
        waiting = sa.select(sa.func.count()).where(FUTURES.c.executor == ENGINES.c.engine_id, given)
        columns = (ENGINES.c.base_model, ENGINES.c.engine_id.label("name"), ENGINES.c.kind, state, ENGINES.c.reason)
        counts = runs.label("runs"), waiting.label("waiting_requests")
        query = sa.select(*columns, ENGINES.c.started_at, *counts)
        query = query.order_by(ENGINES.c.base_model, ENGINES.c.kind, ENGINES.c.engine_id)
        return [_named(row) for row in self._db.rows(query)]

    def counts(self, tenant_id: str) -> dict[str, int]:
        """How many of everything the tenant has now."""
        stored = (CHECKPOINTS.c.tenant_id == tenant_id) & visible()
        waiting = (FUTURES.c.tenant_id == tenant_id) & (FUTURES.c.state == "pending")
        sessions, jobs = SESSIONS.c.tenant_id == tenant_id, BATCH_JOBS.c.tenant_id == tenant_id
        queries = {
            "runs": _count(MODELS, MODELS.c.tenant_id == tenant_id),
            "loaded_runs": _count(MODELS, (MODELS.c.tenant_id == tenant_id) & MODELS.c.state.in_(LOADED)),
            "sessions": _count(SESSIONS, sessions),
            "active_sessions": _count(SESSIONS, sessions & ACTIVE_SESSION),
            "checkpoints": _count(CHECKPOINTS, stored),
            "checkpoint_bytes": _sum(CHECKPOINTS.c.size_bytes, stored),
            "waiting_requests": _count(FUTURES, waiting),
            "waiting_bytes": _sum(FUTURES.c.body_bytes, waiting),
            "file_bytes": _sum(UPLOADS.c.size_bytes, UPLOADS.c.tenant_id == tenant_id),
            "jobs": _count(BATCH_JOBS, jobs),
            "unfinished_jobs": _count(BATCH_JOBS, jobs & BATCH_JOBS.c.status.not_in(ENDED_JOB)),
        }
        with self._db.read() as connection:
            return {name: int(connection.scalar(query) or 0) for name, query in queries.items()}


def _count(table: sa.Table, where: sa.ColumnElement[bool]) -> sa.Select:
    return sa.select(sa.func.count()).select_from(table).where(where)


def _sum(column: sa.Column[int], where: sa.ColumnElement[bool]) -> sa.Select:
    return sa.select(sa.func.coalesce(sa.func.sum(column), 0)).where(where)


def _named(row: sa.Row) -> Row:
    return {str(name): value for name, value in row._mapping.items()}  # plain str: orjson refuses SQLAlchemy's subclass
