"""The row of a bulk job and of what belongs to it, for all modules that write them: SQL only.

Every write is fenced in its own transaction, which also locks the job's row: by the owner's token (`fence`), or by that
of the owner or a member (`fence_attempts`), for what members write, too. A process whose token is neither changes
nothing (SupersededError).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DataError, IntegrityError, ProgrammingError, SQLAlchemyError, StatementError

from tinsmith.batch.formats.schemas import Schema
from tinsmith.db.database import now
from tinsmith.db.schema import BATCH_JOBS as JOBS
from tinsmith.db.schema import BATCH_MEMBERS as MEMBERS
from tinsmith.db.schema import BATCH_STATES as STATES
from tinsmith.db.schema import BATCH_WORKERS as WORKERS
from tinsmith.db.statements import Statement


class SupersededError(Exception):
    """Another coordinator has taken over the job, or its rows are gone."""


def is_transient(error: BaseException) -> bool:
    """Whether an error is the database's own, and not one of the data that was read or written."""
    is_of_data = isinstance(error, DataError | IntegrityError | ProgrammingError) or type(error) is StatementError
    return isinstance(error, SQLAlchemyError) and not is_of_data


@dataclass(frozen=True, slots=True)
class JobRecord:
    job_id: int
    tenant_id: str
    name: str
    pool: str
    priority: int
    weight: float
    status: str
    owner_token: str | None
    sealed: bool
    """Whether all batches of the job are planned and stored."""
    total_rows: int
    total_batches: int
    completed_batches: int
    rows_ok: int
    rows_failed: int
    tokens_in: int
    tokens_out: int
    max_failed_rows: float
    worker_seconds: float
    paid_until: dict[str, float] | None
    machines_set_aside: list[dict[str, Any]] | None
    stage_figures: list[dict[str, float]] | None
    """The sums of `StageWork` of each stage over the committed batches."""
    schemas: list[Schema | None] | None
    """The types of the committed rows of each output; None until a coordinator has read them."""
    resume_from: int | None
    root_job_id: int | None
    error: str | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    updated_at: float

    @property
    def done(self) -> bool:
        return self.sealed and self.completed_batches >= self.total_batches

    @property
    def failed_too_many(self) -> bool:
        allowed = self.max_failed_rows
        return self.rows_failed > (allowed * self.total_rows if allowed < 1 else allowed)


JOB_COLUMNS = [JOBS.c[name] for name in JobRecord.__dataclass_fields__]
DISPATCHED = sa.literal_column("'DISPATCHED'")
IS_JOB = JOBS.c.job_id == sa.bindparam("job")
FIND = Statement(sa.select(*JOB_COLUMNS).where(IS_JOB))
_IS_OWNER = JOBS.c.owner_token == sa.bindparam("token")
_IS_MEMBER = sa.and_(
    JOBS.c.status == "RUNNING",
    sa.exists().where(MEMBERS.c.job_id == sa.bindparam("job"), MEMBERS.c.token == sa.bindparam("token")),
)
_TOUCH = JOBS.update().where(IS_JOB).values(updated_at=sa.bindparam("at"))
FENCE_OWNER = Statement(_TOUCH.where(_IS_OWNER))
FENCE_ATTEMPTS = Statement(_TOUCH.where(sa.or_(_IS_OWNER, _IS_MEMBER)))


def fence(connection: Connection, job_id: int, token: str) -> None:
    """Lock the job's row. Raises SupersededError unless the token's coordinator owns the job."""
    if FENCE_OWNER.count(connection, {"job": job_id, "token": token, "at": now()}) == 0:
        raise SupersededError(f"another coordinator has taken over bulk job {job_id}")


def read_job(connection: Connection, job_id: int) -> JobRecord:
    row = FIND.first(connection, {"job": job_id})
    assert row is not None
    return JobRecord(*row)


def update_job(connection: Connection, job_id: int, **values: object) -> None:
    """Set columns of a job."""
    connection.execute(JOBS.update().where(JOBS.c.job_id == job_id).values(**values))


def delete_workers(connection: Connection, until: float, *conditions: sa.ColumnElement[bool]) -> None:
    """Delete workers, and count their time until `until` for their job."""
    deleted = connection.execute(
        WORKERS.delete().where(*conditions).returning(WORKERS.c.job_id, WORKERS.c.started_at)
    ).all()
    for job_id, started_at in deleted:
        update_job(connection, job_id, worker_seconds=JOBS.c.worker_seconds + max(0.0, until - started_at))


def fence_attempts(connection: Connection, job_id: int, token: str) -> None:
    """Lock the job's row. Raises SupersededError unless the token's process owns the job, or is a member while it
    runs."""
    if FENCE_ATTEMPTS.count(connection, {"job": job_id, "token": token, "at": now()}) == 0:
        raise SupersededError(f"bulk job {job_id} has another coordinator, or has ended")


def release_batches(connection: Connection, job_id: int, condition: sa.ColumnElement[bool]) -> None:
    """Make those dispatched batches of a job pending again for which the condition holds, at no cost to them."""
    released = {"status": "PENDING", "lease_expires_at": None, "attempt_owner_token": None}
    connection.execute(update_dispatched(job_id).where(condition).values(**released))


def update_dispatched(job_id: int) -> sa.Update:
    """An UPDATE of the dispatched batches of a job, which are few, by their index: `+ 0` hides `job_id` from the
    planner, which would read all batches of the job otherwise, and a parameter for the status would hide that the
    partial index fits."""
    return STATES.update().where(STATES.c.status == DISPATCHED, STATES.c.job_id + 0 == job_id)
