"""Batches as rows.

A change of status is conditional on the status before it, so that of two servers, or a client and a server, one makes
it. A batch that has ended never changes.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tinsmith.batch.openai import MESSAGES
from tinsmith.db.database import Database, now
from tinsmith.db.schema import BATCH_JOBS, OPENAI_BATCHES
from tinsmith.errors import NotFoundError, UserError
from tinsmith.store.files import BATCH_OUTPUT, StoredBytes, add_row

CANCELLABLE = ("validating", "in_progress")
ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True, slots=True)
class NewBatch:
    endpoint: str
    input_file_id: str
    completion_window: str
    labels: Mapping[str, str] | None
    output_expires_s: int | None
    total: int = 0  # where it is known before the file is read


@dataclass(frozen=True, slots=True)
class Batch:
    position: int
    batch_id: str
    tenant_id: str
    status: str
    endpoint: str
    input_file_id: str
    completion_window: str
    labels: dict[str, str] | None
    output_expires_s: int | None
    job_id: int | None
    model: str | None
    errors: list[dict[str, Any]] | None
    total: int
    completed: int
    failed: int
    usage: dict[str, Any] | None
    output_file_id: str | None
    error_file_id: str | None
    created_at: float
    expires_at: float
    in_progress_at: float | None
    finalizing_at: float | None
    cancelling_at: float | None
    ended_at: float | None


@dataclass(frozen=True, slots=True)
class ResultsFile:
    """A file of a batch's results."""

    stored: StoredBytes
    filename: str
    expires_after_s: float


_COLUMNS = [OPENAI_BATCHES.c[name] for name in Batch.__dataclass_fields__]


class OpenAIBatches:
    def __init__(self, db: Database) -> None:
        self._db = db

    # For clients.

    def create(self, tenant_id: str, new: NewBatch, window_s: float) -> Batch:
        at = now()
        messages = new.endpoint == MESSAGES
        row = {
            "batch_id": f"{'msgbatch' if messages else 'batch'}_{uuid.uuid4().hex}",
            "tenant_id": tenant_id,
            "status": "validating",
            **{name: getattr(new, name) for name in NewBatch.__dataclass_fields__},
            "created_at": at,
            "expires_at": at + window_s,
        }
        with self._db.write() as connection:
            connection.execute(OPENAI_BATCHES.insert(), row)
        return self.find(tenant_id, str(row["batch_id"]), messages=messages)

    def find(self, tenant_id: str, batch_id: str, *, messages: bool = False) -> Batch:
        """A tenant's batch. Raises NotFoundError."""
        query = sa.select(*_COLUMNS).where(*_visible_to(tenant_id, messages), OPENAI_BATCHES.c.batch_id == batch_id)
        with self._db.read() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            raise NotFoundError(f"there is no batch {batch_id[:80]!a}")
        return Batch(*row)

    def page(
        self, tenant_id: str, limit: int, after: str | None, before: str | None = None, *, messages: bool = False
    ) -> tuple[list[Batch], bool]:
        """A page, newest first: those after `after`, or right before `before`, and whether there are more. Raises
        NotFoundError for either.
        """
        position = OPENAI_BATCHES.c.position
        query = sa.select(*_COLUMNS).where(*_visible_to(tenant_id, messages))
        if after is not None:
            query = query.where(position < self.find(tenant_id, after, messages=messages).position)
        if before is not None:
            query = query.where(position > self.find(tenant_id, before, messages=messages).position)
        order = position.desc() if before is None else position.asc()
        with self._db.read() as connection:
            rows = connection.execute(query.order_by(order).limit(limit + 1)).all()
        page = [Batch(*row) for row in rows[:limit]]
        return page if before is None else page[::-1], len(rows) > limit

    def cancel(self, tenant_id: str, batch_id: str, *, messages: bool = False) -> Batch:
        """Cancel a batch; no effect if it is cancelled already. Raises NotFoundError, UserError."""
        batch = self.find(tenant_id, batch_id, messages=messages)
        if not self.move(batch, CANCELLABLE, status="cancelling", cancelling_at=now()):
            batch = self.find(tenant_id, batch_id, messages=messages)
            if batch.status not in ("cancelling", "cancelled"):
                raise UserError(f"batch {batch_id!a} is {batch.status} and can no longer be cancelled")
        return self.find(tenant_id, batch_id, messages=messages)

    def delete(self, batch: Batch) -> None:
        """Delete the row of a batch that has ended."""
        is_ended_batch = (OPENAI_BATCHES.c.batch_id == batch.batch_id) & OPENAI_BATCHES.c.ended_at.is_not(None)
        self._db.execute(OPENAI_BATCHES.delete().where(is_ended_batch))

    # For the reconciler.

    def active(self) -> list[Batch]:
        """All batches that have not ended, oldest first."""
        query = sa.select(*_COLUMNS).where(OPENAI_BATCHES.c.ended_at.is_(None)).order_by(OPENAI_BATCHES.c.position)
        with self._db.read() as connection:
            return [Batch(*row) for row in connection.execute(query)]

    def move(self, batch: Batch, when: Collection[str], **values: object) -> bool:
        """Change a batch whose status is one of `when`; False if it has another status now."""
        with self._db.write() as connection:
            return _move(connection, batch, when, values)

    def end(self, batch: Batch, files: Sequence[ResultsFile], **values: object) -> bool:
        """End a batch and add its files in one transaction; False if it had ended before."""
        with self._db.write() as connection:
            if not _move(connection, batch, (batch.status,), {"ended_at": now(), **values}):
                return False
            for file in files:
                tenant_id, after_s = batch.tenant_id, file.expires_after_s
                add_row(connection, self._db, tenant_id, file.stored, file.filename, BATCH_OUTPUT, after_s)
        return True

    def job_of(self, batch: Batch) -> int | None:
        """The bulk job of a batch, which is named after it."""
        jobs = BATCH_JOBS
        query = sa.select(jobs.c.job_id).where(jobs.c.tenant_id == batch.tenant_id, jobs.c.name == batch.batch_id)
        with self._db.read() as connection:
            return connection.scalar(query.order_by(jobs.c.job_id).limit(1))


def _visible_to(tenant_id: str, messages: bool) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    """The conditions for a tenant's batches of OpenAI's routes or, with `messages`, of Anthropic's."""
    endpoint = OPENAI_BATCHES.c.endpoint
    return OPENAI_BATCHES.c.tenant_id == tenant_id, endpoint == MESSAGES if messages else endpoint != MESSAGES


def _move(connection: Connection, batch: Batch, when: Collection[str], values: Mapping[str, object]) -> bool:
    update = OPENAI_BATCHES.update().where(OPENAI_BATCHES.c.batch_id == batch.batch_id)
    update = update.where(OPENAI_BATCHES.c.status.in_(when), OPENAI_BATCHES.c.ended_at.is_(None))
    return connection.execute(update.values(**values)).rowcount == 1
