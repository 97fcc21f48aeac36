"""Usage of a tenant by the hour: tokens, checkpoints and stored bytes.

A successful request counts in the hour in which it was settled. Usage is computed from the rows of futures, and from
hourly rows: the transaction that deletes futures executes `fold_usage`, which adds their sums to these, so each request
is counted exactly once. The transaction that creates a checkpoint executes `usage_increments`. Stored bytes are
computed from the existing checkpoints alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tinsmith.db.database import Database, now
from tinsmith.db.schema import CHECKPOINTS, FUTURES, MODELS, SESSIONS, USAGE
from tinsmith.store.checkpoints import visible
from tinsmith.store.futures import FutureUsage

HOUR_S = 3600
TRAINING_KINDS = ("forward", "forward_backward")
TYPES = ("training", "sampling_prefill", "sampling_cached", "sampling_sample", "checkpoint")


@dataclass(frozen=True, slots=True)
class UsageRow:
    """`quantity` counts tokens, or checkpoints. `sampling_prefill` excludes cached tokens."""

    bucket_start: float
    session_id: str
    base_model: str
    type: str
    quantity: int


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """An existing checkpoint, and the project whose storage it counts toward."""

    project_id: str | None
    base_model: str
    size_bytes: int
    created_at: float


@dataclass(frozen=True, slots=True)
class StorageRow:
    bucket_start: float
    project_id: str | None
    base_model: str
    byte_seconds: float


class Usage:
    def __init__(self, db: Database) -> None:
        self._db = db

    def rows(self, tenant_id: str, start: float, end: float) -> list[UsageRow]:
        """The tenant's usage from `start` until before `end`, both full hours; by hour, then by quantity."""
        # One statement, so that a row which is folded concurrently is counted exactly once.
        combined = sa.union_all(self._live(tenant_id, start, end), _select_folded(tenant_id, start, end)).subquery()
        keys = [combined.c.bucket_start, combined.c.session_id, combined.c.base_model]
        query = sa.select(*keys, *(sa.func.sum(combined.c[name]).label(name) for name in TYPES)).group_by(*keys)
        with self._db.read() as connection:
            usage_rows = [
                UsageRow(float(row.bucket_start), row.session_id, row.base_model, name, int(row._mapping[name]))
                for row in connection.execute(query)
                for name in TYPES
                if row._mapping[name]
            ]
        return sorted(usage_rows, key=lambda row: (row.bucket_start, -row.quantity, row.session_id, row.type))

    def _live(self, tenant_id: str, start: float, end: float) -> sa.Select:
        passed = FUTURES.c.kind.in_(TRAINING_KINDS)
        cached = sa.func.coalesce(FUTURES.c.cached_tokens, 0)
        measures = {
            "training": sa.case((passed, FUTURES.c.num_tokens), else_=0),
            "sampling_prefill": sa.func.coalesce(FUTURES.c.prefill_tokens, 0) - cached,
            "sampling_cached": cached,
            "sampling_sample": sa.func.coalesce(FUTURES.c.sampled_tokens, 0),
            "checkpoint": sa.literal(0),
        }
        bucket = self._hour_of(FUTURES.c.settled_at)
        return (
            sa.select(bucket.label("bucket_start"), FUTURES.c.session_id, FUTURES.c.base_model)
            .add_columns(*(sa.func.sum(measures[name]).label(name) for name in TYPES))
            .where(FUTURES.c.tenant_id == tenant_id, FUTURES.c.state == "done")
            .where(FUTURES.c.settled_at >= start, FUTURES.c.settled_at < end)
            .group_by(bucket, FUTURES.c.session_id, FUTURES.c.base_model)
        )

    def _hour_of(self, timestamp: sa.ColumnElement[float]) -> sa.ColumnElement:
        return self._db.floor(timestamp / float(HOUR_S)) * float(HOUR_S)

    def list_stored(self, tenant_id: str, project_id: str | None = None) -> list[StoredCheckpoint]:
        """The tenant's existing checkpoints, or those of one project."""
        project = sa.func.coalesce(MODELS.c.project_id, SESSIONS.c.project_id)
        query = (
            sa.select(
                project.label("project_id"),
                CHECKPOINTS.c.base_model,
                sa.func.coalesce(CHECKPOINTS.c.size_bytes, 0).label("size_bytes"),
                CHECKPOINTS.c.created_at,
            )
            .select_from(CHECKPOINTS)
            .outerjoin(MODELS, MODELS.c.model_id == CHECKPOINTS.c.training_run_id)
            .outerjoin(SESSIONS, SESSIONS.c.session_id == MODELS.c.session_id)
            .where(CHECKPOINTS.c.tenant_id == tenant_id, visible())
        )
        if project_id is not None:
            query = query.where(project == project_id)
        return [StoredCheckpoint(**row._mapping) for row in self._db.rows(query)]

    def sum_stored_by_session(self, session_ids: Sequence[str]) -> dict[str, tuple[int, int]]:
        """The number and bytes of each session's existing checkpoints; sessions without checkpoints have no entry."""
        query = (
            sa.select(MODELS.c.session_id, sa.func.count(), sa.func.coalesce(sa.func.sum(CHECKPOINTS.c.size_bytes), 0))
            .select_from(CHECKPOINTS)
            .join(MODELS, MODELS.c.model_id == CHECKPOINTS.c.training_run_id)
            .where(MODELS.c.session_id.in_(session_ids), visible())
            .group_by(MODELS.c.session_id)
        )
        return {session_id: (count, int(size)) for session_id, count, size in self._db.rows(query)}

    def storage_rows(self, tenant_id: str, start: float, end: float) -> list[StorageRow]:
        """The byte-seconds of the existing checkpoints in each hour."""
        totals: Counter[tuple[float, str | None, str]] = Counter()
        end = min(end, now())
        for checkpoint in self.list_stored(tenant_id):
            since = max(start, checkpoint.created_at)
            bucket = since // HOUR_S * HOUR_S
            while bucket < end:
                held_s = min(bucket + HOUR_S, end) - max(bucket, since)
                totals[bucket, checkpoint.project_id, checkpoint.base_model] += checkpoint.size_bytes * held_s  # type: ignore[assignment]
                bucket += HOUR_S
        rows = [StorageRow(*key, byte_seconds) for key, byte_seconds in totals.items()]
        return sorted(rows, key=lambda row: (row.bucket_start, row.project_id or "", row.base_model))


def _select_folded(tenant_id: str, start: float, end: float) -> sa.Select:
    keys = [USAGE.c.bucket_start, USAGE.c.session_id, USAGE.c.base_model]
    of_type = (sa.func.sum(sa.case((USAGE.c.type == name, USAGE.c.quantity), else_=0)).label(name) for name in TYPES)
    return (
        sa.select(*keys, *of_type)
        .where(USAGE.c.tenant_id == tenant_id, USAGE.c.bucket_start >= start, USAGE.c.bucket_start < end)
        .group_by(*keys)
    )


def fold_usage(usage: Iterable[FutureUsage]) -> list[sa.Executable]:
    """Statements that add the usage of futures to hourly rows, for the transaction that deletes the futures."""
    totals: Counter[tuple[str, float, str, str, str]] = Counter()
    for record in usage:
        if record.state != "done" or record.settled_at is None:
            continue
        key = (record.tenant_id, record.settled_at // HOUR_S * HOUR_S, record.session_id, record.base_model)
        if record.kind in TRAINING_KINDS:
            totals[*key, "training"] += record.num_tokens
        cached = record.cached_tokens or 0
        totals[*key, "sampling_prefill"] += (record.prefill_tokens or 0) - cached
        totals[*key, "sampling_cached"] += cached
        totals[*key, "sampling_sample"] += record.sampled_tokens or 0
    statements = [
        usage_increments(tenant_id, session_id, base_model, type_, quantity, bucket)
        for (tenant_id, bucket, session_id, base_model, type_), quantity in totals.items()
        if quantity
    ]
    return [statement for pair in statements for statement in pair]


def usage_increments(
    tenant_id: str, session_id: str, base_model: str, type_: str, quantity: int, at: float | None = None
) -> list[sa.Executable]:
    """Statements that add `quantity` to the hour of `at` (default: now)."""
    bucket_start = (now() if at is None else at) // HOUR_S * HOUR_S
    keys = {"bucket_start": bucket_start, "session_id": session_id, "base_model": base_model, "type": type_}
    key = sa.and_(*(USAGE.c[name] == value for name, value in keys.items()))
    values = {**keys, "tenant_id": tenant_id, "quantity": 0}
    literals = [sa.literal(value, USAGE.c[name].type) for name, value in values.items()]
    missing = sa.select(*literals).where(~sa.exists().where(key))
    return [
        USAGE.insert().from_select(list(values), missing),
        USAGE.update().where(key).values(quantity=USAGE.c.quantity + quantity),
    ]
