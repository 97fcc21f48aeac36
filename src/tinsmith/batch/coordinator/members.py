"""The members of bulk jobs as rows: processes that run batches of a job which another process owns. SQL only.

Machines of one pool take the batches of a job together, each as fast as its slots are free. The owner plans, publishes
and ends the job. A member claims batches and commits their results under its token while the job is RUNNING. Its lease
covers itself, its batches and its workers: a member whose lease has expired is gone, and the owner's next renewal makes
its batches pending again. A member joins as soon as it sees the job, and its end loses no row. When the owner is
gone, a member becomes the owner as any coordinator does; the other members' batches stay dispatched.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tinsmith.batch.coordinator.rows import (
    DISPATCHED,
    JOB_COLUMNS,
    JobRecord,
    SupersededError,
    delete_workers,
    fence_attempts,
    read_job,
    release_batches,
)
from tinsmith.db.database import Database, now
from tinsmith.db.schema import BATCH_JOBS as JOBS
from tinsmith.db.schema import BATCH_MEMBERS as MEMBERS
from tinsmith.db.schema import BATCH_STATES as STATES
from tinsmith.db.schema import BATCH_WORKERS as WORKERS

LEASE_CHUNK = 500
"""Batches whose lease is extended in one statement."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A job as its row is now. `has_due_batch`: a pending batch may be claimed."""

    job: JobRecord
    has_due_batch: bool
    num_members: int


def are_living(job_id: int | sa.ColumnElement[int], clock: sa.ColumnElement[float]) -> sa.ColumnElement[bool]:
    """Of which rows of MEMBERS the members of a job are whose lease has not expired."""
    return sa.and_(MEMBERS.c.job_id == job_id, MEMBERS.c.lease_at > clock)


def delete_lost_members(connection: Connection, job_id: int, clock: sa.ColumnElement[float]) -> None:
    """Delete the members of a job whose lease has expired, and their workers."""
    is_lost = sa.and_(MEMBERS.c.job_id == job_id, MEMBERS.c.lease_at <= clock)
    tokens = connection.execute(MEMBERS.delete().where(is_lost).returning(MEMBERS.c.token)).scalars().all()
    if tokens:
        delete_workers(connection, now(), WORKERS.c.job_id == job_id, WORKERS.c.owner_token.in_(tokens))


def extend_leases(
    connection: Connection, job_id: int, token: str, until: sa.ColumnElement[float], batches: Sequence[int]
) -> None:
    """Extend the leases of those of these batches that are dispatched to the token's process."""
    is_dispatched = sa.and_(STATES.c.job_id == job_id, STATES.c.status == DISPATCHED)
    dispatched = STATES.update().where(is_dispatched, STATES.c.attempt_owner_token == token)
    for first in range(0, len(batches), LEASE_CHUNK):
        of_chunk = dispatched.where(STATES.c.batch_idx.in_(batches[first : first + LEASE_CHUNK]))
        connection.execute(of_chunk.values(lease_expires_at=until))


class JobMembers:
    def __init__(self, db: Database) -> None:
        self._db = db

    def joinable_jobs(self, token: str, pools: Collection[str]) -> list[int]:
        """The jobs of these pools that another process owns and runs, and that have a batch which may be claimed."""
        is_running = sa.and_(JOBS.c.status == "RUNNING", JOBS.c.sealed, JOBS.c.pool.in_(pools))
        is_owned = sa.and_(JOBS.c.owner_token != token, JOBS.c.owner_lease_at > self._db.clock())
        is_member = sa.exists().where(MEMBERS.c.job_id == JOBS.c.job_id, MEMBERS.c.token == token)
        query = sa.select(JOBS.c.job_id).where(is_running, is_owned, ~is_member, self._has_due_batch())
        return self._db.scalars(query.order_by(JOBS.c.job_id))

    def join(self, job_id: int, token: str, holder: str, lease_s: float) -> JobRecord | None:
        """Become a member of a job that another process runs; None if it does not run any more."""
        with self._db.write() as connection:
            is_running = sa.and_(JOBS.c.job_id == job_id, JOBS.c.status == "RUNNING", JOBS.c.owner_token != token)
            if connection.execute(JOBS.update().where(is_running).values(updated_at=now())).rowcount == 0:
                return None
            row = {"job_id": job_id, "token": token, "holder": holder, "lease_at": self._db.clock() + lease_s}
            connection.execute(MEMBERS.insert().values(row))
            return read_job(connection, job_id)

    def renew(self, job_id: int, token: str, lease_s: float, batches: Sequence[int]) -> JobRecord:
        """Extend the lease of a member and of these batches. Raises SupersededError."""
        until = self._db.clock() + lease_s
        with self._db.write() as connection:
            fence_attempts(connection, job_id, token)
            is_this = sa.and_(MEMBERS.c.job_id == job_id, MEMBERS.c.token == token)
            if connection.execute(MEMBERS.update().where(is_this).values(lease_at=until)).rowcount == 0:
                raise SupersededError(f"the lease of a member of bulk job {job_id} has expired")
            extend_leases(connection, job_id, token, until, batches)
            return read_job(connection, job_id)

    def leave(self, job_id: int, token: str) -> None:
        """Make a member's batches pending again, and delete its workers' rows and its own."""
        with self._db.write() as connection:
            is_this = sa.and_(MEMBERS.c.job_id == job_id, MEMBERS.c.token == token)
            if connection.execute(MEMBERS.delete().where(is_this)).rowcount == 0:
                return
            release_batches(connection, job_id, STATES.c.attempt_owner_token == token)
            delete_workers(connection, now(), WORKERS.c.job_id == job_id, WORKERS.c.owner_token == token)

    def observe(self, job_ids: Sequence[int]) -> list[Observation]:
        """These jobs as other processes may have changed them."""
        if not job_ids:
            return []
        members = sa.select(sa.func.count()).where(are_living(JOBS.c.job_id, self._db.clock())).scalar_subquery()
        query = sa.select(*JOB_COLUMNS, self._has_due_batch().label("is_due"), members.label("num_members"))
        return [
            Observation(JobRecord(*row[:-2]), bool(row[-2]), int(row[-1]))
            for row in self._db.rows(query.where(JOBS.c.job_id.in_(job_ids)))
        ]

    def _has_due_batch(self) -> sa.ColumnElement[bool]:
        is_due = sa.or_(STATES.c.next_retry_at.is_(None), STATES.c.next_retry_at <= self._db.clock())
        is_pending = STATES.c.status == sa.literal_column("'PENDING'")
        return sa.exists().where(STATES.c.job_id == JOBS.c.job_id, is_pending, is_due)
