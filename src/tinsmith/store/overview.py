"""A tenant's overview for the dashboard: its runs, its queue, the engines, and its counts.

All queries are limited to one tenant and use indexes, except for the engines and for the intervals in which others were
sampled. Queue lengths are for display only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tinsmith.db.database import Database
from tinsmith.db.schema import (
    AUDIT,
    BATCH_JOBS,
    CHECKPOINTS,
    ENGINES,
    FUTURES,
    MODELS,
    RAN_SAMPLE,
    RESPONSES,
    SESSIONS,
    TERMINAL_JOB,
    UPLOADS,
)
from tinsmith.errors import NotFoundError
from tinsmith.store.checkpoints import visible
from tinsmith.store.files import EXTERNAL_UPLOAD
from tinsmith.store.models import LOADED
from tinsmith.store.sessions import IS_ACTIVE

Row = dict[str, Any]
"""A row of a summary; its keys are those of the dashboard's JSON."""

_PROJECT = sa.func.coalesce(MODELS.c.project_id, SESSIONS.c.project_id).label("project_id")
_RUN_COLUMNS = [
    *(MODELS.c.model_id, MODELS.c.session_id, MODELS.c.tenant_id.label("owner"), MODELS.c.base_model, MODELS.c.state),
    *(MODELS.c.reason, MODELS.c.lora_rank, MODELS.c.optimizer_type, MODELS.c.applied_seq_id, MODELS.c.created_at),
    *(MODELS.c.last_request_at, SESSIONS.c.display_name, _PROJECT, MODELS.c.user_metadata),
    *(SESSIONS.c.state.label("session_state"), SESSIONS.c.reason.label("session_reason"), SESSIONS.c.finish_type),
    SESSIONS.c.ended_at.label("session_ended_at"),
]
_LANE = sa.func.coalesce(FUTURES.c.model_id, FUTURES.c.sampling_session_id, FUTURES.c.session_id).label("lane")
_RUNS = MODELS.outerjoin(SESSIONS, SESSIONS.c.session_id == MODELS.c.session_id)
_RUN_NAMES = (
    *(MODELS.c.model_id, MODELS.c.base_model, MODELS.c.state, SESSIONS.c.display_name, _PROJECT),
    sa.cast(MODELS.c.user_metadata, sa.Text),
)
"""The columns in which a run is searched."""

SORTS: Mapping[str, sa.ColumnElement[object]] = {
    name: MODELS.c[name] for name in ("created_at", "last_request_at", "base_model", "lora_rank", "state", "model_id")
}

MAX_LOADS = 10_000
"""The newest loads of a tenant from which a lineage is computed."""


@dataclass(frozen=True, slots=True)
class CheckpointLoad:
    """A load of a checkpoint's weights, by its path, into a run."""

    path: str
    model_id: str
    loaded_at: float

    @property
    def parent(self) -> str:
        """The run that saved the checkpoint."""
        return self.path.removeprefix("tinker://").partition("/")[0]


class Overview:
    def __init__(self, db: Database) -> None:
        self._db = db

    def runs(
        self, tenant_id: str, search: str, sort: str, descending: bool, limit: int, offset: int
    ) -> tuple[list[Row], int]:
        """A page of the tenant's runs and their total; each word of `search` must be part of one of the run's names."""
        condition = sa.and_(MODELS.c.tenant_id == tenant_id, *(_contains(word) for word in search.lower().split()))
        key, tie_breaker = SORTS[sort], MODELS.c.model_id
        order = (key.desc(), tie_breaker.desc()) if descending else (key.asc(), tie_breaker.asc())
        query = sa.select(*_RUN_COLUMNS).select_from(_RUNS).where(condition).order_by(*order)
        rows, total = self._db.page(query, limit, offset)
        return [_row_dict(row) for row in rows], total

    def list_training_tenants(self) -> list[str]:
        """The tenants that have loaded runs."""
        query = sa.select(MODELS.c.tenant_id).where(MODELS.c.state.in_(LOADED)).distinct()
        return sorted(self._db.scalars(query))

    def run(self, tenant_id: str, model_id: str) -> Row:
        row = self._db.first(sa.select(*_RUN_COLUMNS).select_from(_RUNS).where(_is_run(tenant_id, model_id)))
        if row is None:
            raise NotFoundError(f"model_id {model_id!r} is unknown")
        return _row_dict(row)

    def busy_runs(self, tenant_id: str, model_ids: Sequence[str]) -> set[str]:
        """Those of the runs that have unfinished requests."""
        pending = (FUTURES.c.tenant_id == tenant_id) & (FUTURES.c.state == "pending")
        query = sa.select(FUTURES.c.model_id).where(pending, FUTURES.c.model_id.in_(model_ids)).distinct()
        return set(self._db.scalars(query))

    def describe(self, tenant_id: str, model_id: str, changes: Mapping[str, str]) -> None:
        """Change entries of a run's user_metadata; an empty value removes one. Raises NotFoundError."""
        is_run = _is_run(tenant_id, model_id)
        with self._db.write() as connection:
            row = connection.execute(sa.select(MODELS.c.user_metadata).where(is_run).with_for_update()).first()
            if row is None:
                raise NotFoundError(f"model_id {model_id!r} is unknown")
            metadata = {name: value for name, value in {**(row[0] or {}), **changes}.items() if value != ""}
            connection.execute(MODELS.update().where(is_run).values(user_metadata=metadata))

    def lineage(self, tenant_id: str, model_id: str, limit: int) -> list[CheckpointLoad]:
        """The loads among a run's ancestors, then among its descendants, each nearest first; at most `limit`.

        Loads are read from the audit log, until its entries expire.
        """
        query = (
            sa.select(AUDIT.c.details, AUDIT.c.created_at)
            .where(AUDIT.c.tenant_id == tenant_id, AUDIT.c.event == "checkpoint_loaded")
            .order_by(AUDIT.c.entry_id.desc())
            .limit(MAX_LOADS)
        )
        rows = self._db.rows(query)
        loads = [CheckpointLoad(row.details["tinker_path"], row.details["model_id"], row.created_at) for row in rows]
        return _trace_lineage(loads, model_id)[:limit]

    def list_waiting(self, tenant_id: str) -> list[Row]:
        """The tenant's unfinished requests by base model, kind and lane (model or sampling session), oldest first."""
        oldest = sa.func.min(FUTURES.c.created_at).label("oldest_at")
        tokens = sa.cast(sa.func.sum(FUTURES.c.num_tokens), sa.BigInteger).label("tokens")
        columns = FUTURES.c.base_model, FUTURES.c.kind, _LANE
        query = (
            sa.select(*columns, sa.func.count().label("requests"), tokens, oldest)
            .where(FUTURES.c.tenant_id == tenant_id, FUTURES.c.state == "pending")
            .group_by(*columns)
            .order_by(oldest)
        )
        return [_row_dict(row) for row in self._db.rows(query)]

    def list_settled(self, tenant_id: str, since: float, limit: int) -> list[Row]:
        """The tenant's newest requests settled since `since`, with their times."""
        times = (FUTURES.c[name] for name in ("created_at", "started_at", "ran_at", "settled_at"))
        columns = (FUTURES.c.base_model, FUTURES.c.kind, FUTURES.c.state, FUTURES.c.num_tokens, _LANE, *times)
        of_tenant = (FUTURES.c.tenant_id == tenant_id) & FUTURES.c.state.in_(("done", "failed"))
        query = sa.select(*columns).where(of_tenant, FUTURES.c.settled_at >= since)
        return [_row_dict(row) for row in self._db.rows(query.order_by(FUTURES.c.settled_at.desc()).limit(limit))]

    def sampling_of_others(self, tenant_id: str, since: float, limit: int) -> list[tuple[float, float]]:
        """Merged intervals, in order, in which samples of other tenants ran since a moment; of the `limit` newest."""
        of_others = (FUTURES.c.tenant_id != tenant_id) & (FUTURES.c.settled_at >= since)
        times = (FUTURES.c.started_at, sa.func.coalesce(FUTURES.c.ran_at, FUTURES.c.settled_at))
        query = sa.select(*times).where(of_others, sa.text(RAN_SAMPLE))
        rows = self._db.rows(query.order_by(FUTURES.c.settled_at.desc()).limit(limit))
        return _merge_intervals((start, end) for start, end in rows)

    def count_sampled_tokens(self, tenant_id: str, since: float) -> int:
        """The sampled tokens of the tenant's samples settled since `since`."""
        of_tenant = (FUTURES.c.tenant_id == tenant_id) & (FUTURES.c.state == "done") & (FUTURES.c.settled_at >= since)
        return int(self._db.scalar(sa.select(sa.func.sum(FUTURES.c.sampled_tokens)).where(of_tenant)) or 0)

    def list_seats(self, tenant_id: str) -> list[Row]:
        """The engines and samplers of all base models, with the numbers of the tenant's runs and waiting requests on
        each. The state is `silent` once the lease has expired.
        """
        alive = ENGINES.c.lease_expires_at > self._db.clock()
        silent = sa.and_(~alive, ENGINES.c.state.in_(("ready", "loading")))
        state = sa.case((silent, "silent"), else_=ENGINES.c.state).label("state")
        of_tenant = (MODELS.c.tenant_id == tenant_id) & MODELS.c.state.in_(LOADED)
        runs = sa.select(sa.func.count()).where(MODELS.c.engine_id == ENGINES.c.engine_id, of_tenant)
        pending = (FUTURES.c.tenant_id == tenant_id) & (FUTURES.c.state == "pending")
        waiting = sa.select(sa.func.count()).where(FUTURES.c.executor == ENGINES.c.engine_id, pending)
        columns = (ENGINES.c.base_model, ENGINES.c.engine_id.label("name"), ENGINES.c.kind, state, ENGINES.c.reason)
        counts = runs.label("runs"), waiting.label("waiting_requests")
        query = sa.select(*columns, ENGINES.c.started_at, *counts)
        query = query.order_by(ENGINES.c.base_model, ENGINES.c.kind, ENGINES.c.engine_id)
        return [_row_dict(row) for row in self._db.rows(query)]

    def counts(self, tenant_id: str) -> dict[str, int]:
        """The tenant's numbers of runs, sessions, checkpoints, requests and jobs, and its stored and waiting bytes."""
        stored = (CHECKPOINTS.c.tenant_id == tenant_id) & visible()
        waiting = (FUTURES.c.tenant_id == tenant_id) & (FUTURES.c.state == "pending")
        uploads = UPLOADS.c.tenant_id == tenant_id
        sessions, jobs = SESSIONS.c.tenant_id == tenant_id, BATCH_JOBS.c.tenant_id == tenant_id
        queries = {
            "runs": _count(MODELS, MODELS.c.tenant_id == tenant_id),
            "loaded_runs": _count(MODELS, (MODELS.c.tenant_id == tenant_id) & MODELS.c.state.in_(LOADED)),
            "sessions": _count(SESSIONS, sessions),
            "active_sessions": _count(SESSIONS, sessions & IS_ACTIVE),
            "checkpoints": _count(CHECKPOINTS, stored),
            "checkpoint_bytes": _sum(CHECKPOINTS.c.size_bytes, stored),
            "upload_bytes": _sum(UPLOADS.c.size_bytes, uploads & (UPLOADS.c.purpose == EXTERNAL_UPLOAD)),
            "waiting_requests": _count(FUTURES, waiting),
            "waiting_bytes": _sum(FUTURES.c.body_bytes, waiting),
            "file_bytes": _sum(UPLOADS.c.size_bytes, uploads & (UPLOADS.c.purpose != EXTERNAL_UPLOAD)),
            "response_bytes": _sum(RESPONSES.c.size_bytes, RESPONSES.c.tenant_id == tenant_id),
            "jobs": _count(BATCH_JOBS, jobs),
            "unfinished_jobs": _count(BATCH_JOBS, jobs & BATCH_JOBS.c.status.not_in(TERMINAL_JOB)),
        }
        with self._db.read() as connection:
            return {name: int(connection.scalar(query) or 0) for name, query in queries.items()}


def _is_run(tenant_id: str, model_id: str) -> sa.ColumnElement[bool]:
    return (MODELS.c.tenant_id == tenant_id) & (MODELS.c.model_id == model_id)


def _contains(word: str) -> sa.ColumnElement[bool]:
    """The condition that a word is part of one of a run's names."""
    return sa.or_(*(sa.func.lower(sa.func.coalesce(name, "")).contains(word, autoescape=True) for name in _RUN_NAMES))


def _trace_lineage(loads: Sequence[CheckpointLoad], model_id: str) -> list[CheckpointLoad]:
    """The loads among a run's ancestors, then among its descendants, each nearest first; `loads` are newest first. Of
    the loads of a checkpoint into the same run only the newest counts; a run that was set back loads from itself.
    """
    newest_loads: dict[tuple[str, str], CheckpointLoad] = {}
    for load in loads:
        newest_loads.setdefault((load.path, load.model_id), load)
    links: dict[tuple[str, str], CheckpointLoad] = {}
    for near, far in (("model_id", "parent"), ("parent", "model_id")):
        level, visited = {model_id}, {model_id}
        while level:
            step = [load for load in newest_loads.values() if getattr(load, near) in level]
            links |= {(load.path, load.model_id): load for load in step}
            level = {getattr(load, far) for load in step} - visited
            visited |= level
    return list(links.values())


def _merge_intervals(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, in order and without overlaps."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _count(table: sa.Table, condition: sa.ColumnElement[bool]) -> sa.Select:
    return sa.select(sa.func.count()).select_from(table).where(condition)


def _sum(column: sa.Column[int], condition: sa.ColumnElement[bool]) -> sa.Select:
    return sa.select(sa.func.coalesce(sa.func.sum(column), 0)).where(condition)


def _row_dict(row: sa.Row) -> Row:
    return {str(name): value for name, value in row._mapping.items()}  # plain str: orjson refuses SQLAlchemy's subclass
