"""Bulk jobs and their batches as rows: claims, leases, fencing, progress. SQL only; it runs nothing.

A job: PENDING -> RUNNING -> WINDING_DOWN -> SUCCEEDED, or FAILED, or CANCELLING -> CANCELLED. A batch: PENDING ->
DISPATCHED -> COMPLETED, or FAILED, or SPLIT into two smaller ones.

Invariants:
- One coordinator owns a job until its lease expires, or the next one of the same holder takes it. Everything that it
  writes is conditional on its token, in the same transaction: one that was superseded changes nothing (`Superseded`).
- An attempt at a batch is numbered. Its result counts if the batch is still DISPATCHED to that attempt; that update is
  the commit of the batch. Whoever comes later is told no.
- The counters of a job change in the transaction of the batch that they count.
- Clocks are the database's. Batches are claimed, and published, in the order of their rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DataError, IntegrityError, ProgrammingError, SQLAlchemyError, StatementError

from tinsmith.batch.coordinator.attempts import PENDING, Attempts, Claim, Lost, Settled
from tinsmith.batch.formats.input_versions import InputChangedError, Version
from tinsmith.batch.formats.schemas import Schema
from tinsmith.batch.types import MAX_RETRIES, JobSpec, OutputInfo, ProgramError, Span, staging_of
from tinsmith.db.database import Database, now
from tinsmith.db.schema import BATCH_JOBS, BATCH_OUTPUTS, BATCH_ROW_ERRORS, BATCH_STATES, BATCH_WORKERS
from tinsmith.db.wakeups import SERVER, job_line
from tinsmith.errors import NotFoundError, UserError

JOBS, STATES, WORKERS = BATCH_JOBS, BATCH_STATES, BATCH_WORKERS
ROW_ERRORS, OUTPUTS = BATCH_ROW_ERRORS, BATCH_OUTPUTS

ACTIVE = ("PENDING", "RUNNING", "WINDING_DOWN", "CANCELLING")
TERMINAL = ("SUCCEEDED", "FAILED", "CANCELLED")
CHUNK = 10_000
"""Rows in one page of a listing."""
INSERT_CHUNK = 2000
"""Rows in one transaction: some milliseconds."""
CHECKPOINT_CHUNKS = 8
"""So many chunks stay below SQLite's limit of its log, at which whoever commits must empty it while all others wait."""
PAUSE_S = 0.0002
"""For those who wait: on SQLite a lock that is taken again at once would be taken past them."""
_NUMBER = sa.BigInteger
SAID_ALONE = (ProgramError.__name__, InputChangedError.__name__)
"""Errors whose text says all: which rule was broken."""
DISPATCHED = sa.literal_column("'DISPATCHED'")


class SupersededError(Exception):
    """Another coordinator has taken over the job, or its rows are gone."""


def is_passing(error: BaseException) -> bool:
    """Whether an error is the database's own, which may pass, and not that of what was to be read or written."""
    own = isinstance(error, DataError | IntegrityError | ProgrammingError) or type(error) is StatementError
    return isinstance(error, SQLAlchemyError) and not own


@dataclass(frozen=True, slots=True)
class Job:
    job_id: int
    tenant_id: str
    name: str
    pool: str
    priority: int
    weight: float
    status: str
    owner_token: str | None
    sealed: bool
    total_rows: int
    total_batches: int
    completed_batches: int
    rows_ok: int
    rows_failed: int
    tokens_in: int
    tokens_out: int
    max_failed_rows: float
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


@dataclass(frozen=True, slots=True)
class Turn:
    """What one transaction of a coordinator did. `rejected` are attempts whose batch was no longer theirs."""

    job: Job
    claims: Mapping[str, list[Claim]]
    rejected: list[Claim]
    failed: bool
    """Whether a batch has failed for good."""


_JOB_COLUMNS = [JOBS.c[name] for name in Job.__dataclass_fields__]
_COUNTERS = ("total_batches", "completed_batches", "rows_ok", "rows_failed", "tokens_in", "tokens_out")
# Statements of every turn: made once, as making one takes longer than it takes the database to carry it out.
_IS_JOB = JOBS.c.job_id == sa.bindparam("job")
_FIND = sa.select(*_JOB_COLUMNS).where(_IS_JOB)
_TOUCH = JOBS.update().where(_IS_JOB, JOBS.c.owner_token == sa.bindparam("token"))
_TOUCH = _TOUCH.values(updated_at=sa.bindparam("at", type_=sa.Float))
_COUNT = JOBS.update().where(_IS_JOB).values(**{name: JOBS.c[name] + sa.bindparam(f"add_{name}") for name in _COUNTERS})


class BatchJobs:
    def __init__(self, db: Database) -> None:
        self._db = db
        self._changed: Callable[[int], None] | None = None

    def tell(self, changed: Callable[[int], None]) -> None:
        """Call `changed` for every job that is not as it was, once that is committed; on any thread."""
        self._changed = changed

    @contextmanager
    def _changing(self, job_id: int) -> Iterator[Connection]:
        """A transaction that changes what is told of a job to whoever follows it."""
        with self._db.write() as connection:
            yield connection
            self._db.notify(connection, SERVER, [job_line(job_id)])
        if self._changed:
            self._changed(job_id)

    # Whoever asks for jobs.

    def create(self, tenant_id: str, spec: JobSpec, *, other_outputs: bool = False) -> int:
        """Store a job. With `resume_from`, it begins with what that one completed; with `other_outputs`, into as many
        others. Raises UserError, NotFoundError."""
        values: dict[str, Any] = {
            "tenant_id": tenant_id,
            "name": spec.name,
            "pool": spec.batch_pool_name,
            "priority": spec.priority,
            "weight": spec.weight,
            "status": "PENDING",
            "spec": replace(spec, input_version=None, part_formats={}, purge=False).to_dict(),
            "sealed": False,
            "cleaned": False,
            "max_failed_rows": spec.max_failed_rows,
            "resume_from": spec.resume_from,
            "created_at": now(),
            "updated_at": now(),
        }
        with self._db.write() as connection:
            if spec.resume_from is None:
                return _inserted(connection, values)
            old = _resumable(connection, tenant_id, spec, other_outputs)
            values |= {"root_job_id": old.root_job_id, "sealed": old.sealed, "total_rows": old.total_rows}
            if old.sealed:
                values["spec"] |= {"input_version": old.input_version, "part_formats": old.part_formats}
            job_id = _inserted(connection, values)
            if old.sealed:
                _copy_batches(connection, old.job_id, job_id)
            return job_id

    def find(self, tenant_id: str, job_id: int) -> Job:
        """Raises NotFoundError."""
        query = sa.select(*_JOB_COLUMNS).where(JOBS.c.job_id == job_id, JOBS.c.tenant_id == tenant_id)
        with self._db.read() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            raise NotFoundError(f"there is no bulk job {job_id}")
        return Job(*row)

    def listing(self, tenant_id: str, limit: int, offset: int) -> tuple[list[Job], int]:
        """Newest first, and how many there are."""
        mine = JOBS.c.tenant_id == tenant_id
        query = sa.select(*_JOB_COLUMNS).where(mine).order_by(JOBS.c.job_id.desc()).limit(limit).offset(offset)
        with self._db.read() as connection:
            rows = connection.execute(query).all()
            count = connection.scalar(sa.select(sa.func.count()).select_from(JOBS).where(mine))
        return [Job(*row) for row in rows], int(count or 0)

    def spec(self, job_id: int) -> JobSpec:
        with self._db.read() as connection:
            stored = connection.scalar(sa.select(JOBS.c.spec).where(JOBS.c.job_id == job_id))
        if stored is None:
            raise NotFoundError(f"there is no bulk job {job_id}")
        return JobSpec.from_dict(stored)

    def cancel(self, tenant_id: str, job_id: int) -> Job:
        """Ask for a job's end; nothing if it has ended. Raises NotFoundError."""
        self.find(tenant_id, job_id)
        cancel = JOBS.update().where(JOBS.c.job_id == job_id, JOBS.c.status.in_(ACTIVE))
        with self._changing(job_id) as connection:
            connection.execute(cancel.values(status="CANCELLING", updated_at=now()))
        return self.find(tenant_id, job_id)

    def purge(self, tenant_id: str, job_id: int) -> Job:
        """Have the parts of a job that failed or was cancelled deleted by the next sweep; it cannot be resumed after
        that. Nothing for a job that succeeded, whose parts are deleted anyway. Raises NotFoundError, UserError.
        """
        self.find(tenant_id, job_id)
        with self._changing(job_id) as connection:
            job = connection.execute(sa.select(JOBS).where(JOBS.c.job_id == job_id).with_for_update()).one()
            if job.status in ACTIVE:
                raise UserError(f"bulk job {job_id} is {job.status}; cancel it before its parts are purged")
            if job.status != "SUCCEEDED":
                spec = {**job.spec, "purge": True}
                connection.execute(JOBS.update().where(JOBS.c.job_id == job_id).values(spec=spec, updated_at=now()))
        return self.find(tenant_id, job_id)

    def get_batch_states(self, job_id: int, limit: int = CHUNK, offset: int = 0) -> list[dict[str, Any]]:
        """The batches of a job, by their rows."""
        query = sa.select(STATES).where(STATES.c.job_id == job_id).order_by(STATES.c.start_idx, STATES.c.batch_idx)
        with self._db.read() as connection:
            found = connection.execute(query.limit(limit).offset(offset))
            return [{str(name): value for name, value in row._mapping.items()} for row in found]

    def row_errors(self, job_id: int, limit: int = CHUNK, after: int = -1) -> list[dict[str, Any]]:
        """The failed rows after one, by their index."""
        mine = sa.select(ROW_ERRORS).where(ROW_ERRORS.c.job_id == job_id, ROW_ERRORS.c.row_idx > after)
        with self._db.read() as connection:
            return [_plain(row) for row in connection.execute(mine.order_by(ROW_ERRORS.c.row_idx).limit(limit))]

    def outputs(self, job_id: int) -> list[dict[str, Any]]:
        query = sa.select(OUTPUTS).where(OUTPUTS.c.job_id == job_id).order_by(OUTPUTS.c.output_idx)
        with self._db.read() as connection:
            return [_plain(row) for row in connection.execute(query)]

    def committed(self, job_id: int, after: int, limit: int) -> list[tuple[Span, list[dict[str, Any]]]]:
        """The committed batches that begin after a row, in the order of their rows, each with its parts."""
        query = (
            sa.select(STATES.c.start_idx, STATES.c.end_idx, STATES.c.parts)
            .where(STATES.c.job_id == job_id, STATES.c.status == "COMPLETED", STATES.c.start_idx > after)
            .order_by(STATES.c.start_idx)
            .limit(limit)
        )
        with self._db.read() as connection:
            return [(Span(row.start_idx, row.end_idx), row.parts) for row in connection.execute(query)]

    def schemas(self, job_id: int, output: int) -> list[Schema]:
        """Those that parts of an output have, each once."""
        stored = STATES.c.parts[(output, "schema")].as_string()
        mine = sa.select(stored).where(STATES.c.job_id == job_id, STATES.c.status == "COMPLETED").distinct()
        with self._db.read() as connection:
            return [json.loads(text) for text in connection.scalars(mine) if text is not None]

    def winners(self, job_id: int) -> Iterator[tuple[Span, list[dict[str, Any]]]]:
        """All of them."""
        after = -1
        while page := self.committed(job_id, after, CHUNK):
            yield from page
            after = page[-1][0].start_idx

    # The coordinator's side.

    def waiting(self, holder: str) -> list[int]:
        """Jobs that a coordinator of this holder could take now."""
        free = sa.or_(JOBS.c.owner_lease_at <= self._db.clock(), JOBS.c.owner_holder == holder)
        query = sa.select(JOBS.c.job_id).where(JOBS.c.status.in_(ACTIVE), free).order_by(JOBS.c.job_id)
        with self._db.read() as connection:
            return list(connection.scalars(query))

    def being_cancelled(self, job_ids: Sequence[int]) -> list[int]:
        """Those among them that somebody wants to end."""
        query = sa.select(JOBS.c.job_id).where(JOBS.c.job_id.in_(job_ids), JOBS.c.status == "CANCELLING")
        with self._db.read() as connection:
            return list(connection.scalars(query)) if job_ids else []

    def acquire_batch_coordinator(self, job_id: int, token: str, holder: str, lease_s: float) -> Job | None:
        """Become the owner of a job; None if another has it. What was dispatched before is dispatched again."""
        free = sa.or_(JOBS.c.owner_lease_at <= self._db.clock(), JOBS.c.owner_holder == holder)
        take = JOBS.update().where(JOBS.c.job_id == job_id, JOBS.c.status.in_(ACTIVE), free)
        lease = {"owner_token": token, "owner_holder": holder, "owner_lease_at": self._db.clock() + lease_s}
        with self._db.write() as connection:
            if connection.execute(take.values(**lease, updated_at=now())).rowcount == 0:
                return None
            _reset_dispatched(connection, job_id)
            connection.execute(WORKERS.delete().where(WORKERS.c.job_id == job_id))
            return _job(connection, job_id)

    def renew(self, job_id: int, token: str, lease_s: float, batches: Sequence[int] = ()) -> Job:
        """Keep the job, and these of its batches. Raises SupersededError."""
        until = self._db.clock() + lease_s
        with self._db.write() as connection:
            _fence(connection, job_id, token, owner_lease_at=until)
            for chunk in _chunks(batches, 500):
                mine = STATES.update().where(STATES.c.job_id == job_id, STATES.c.batch_idx.in_(chunk))
                held = mine.where(STATES.c.status == "DISPATCHED", STATES.c.attempt_owner_token == token)
                connection.execute(held.values(lease_expires_at=until))
            _requeue_expired(connection, job_id, self._db.clock())
            return _job(connection, job_id)

    def release(self, job_id: int, token: str) -> None:
        """Any coordinator may take the job at once. The workers of this one are ended: their rows go with it."""
        mine = JOBS.update().where(JOBS.c.job_id == job_id, JOBS.c.owner_token == token)
        with self._db.write() as connection:
            connection.execute(mine.values(owner_token=None, owner_lease_at=0))
            connection.execute(WORKERS.delete().where(WORKERS.c.job_id == job_id, WORKERS.c.owner_token == token))

    def save_batch_states(
        self, job_id: int, token: str, starts: Sequence[int], total_rows: int, input_version: Version | None = None
    ) -> Job:
        """Store all batches of a job, given the first row of each, and seal it. What a crash left is begun anew."""

        def fence(connection: Connection) -> None:
            _fence(connection, job_id, token)

        _delete_batches(self._db, job_id, fence)
        _insert_batches(self._db, job_id, starts, total_rows, fence)
        with self._changing(job_id) as connection:
            planned: dict[str, Any] = {"total_rows": total_rows, "total_batches": len(starts)}
            if input_version is not None:
                stored = connection.scalar(sa.select(JOBS.c.spec).where(JOBS.c.job_id == job_id))
                planned["spec"] = {**(stored or {}), "input_version": input_version}
            _fence(connection, job_id, token, sealed=True, **planned)
            return _job(connection, job_id)

    def set_status(self, job_id: int, token: str, status: str, error: str | None = None) -> bool:
        """False if the job is being cancelled, which only its end can follow. Raises SupersededError."""
        values: dict[str, Any] = {"status": status}
        if status == "RUNNING":
            values["started_at"] = sa.func.coalesce(JOBS.c.started_at, now())
        if status in TERMINAL:
            values |= {"ended_at": now(), "error": error, "owner_lease_at": 0}
        with self._changing(job_id) as connection:
            _fence(connection, job_id, token)
            move = JOBS.update().where(JOBS.c.job_id == job_id)
            if status != "CANCELLED":
                move = move.where(JOBS.c.status != "CANCELLING")
            return connection.execute(move.values(**values)).rowcount == 1

    def finish(self, job_id: int, token: str, outputs: Sequence[tuple[str, OutputInfo]]) -> bool:
        """The outputs are published: the job has succeeded, in one transaction. False if it is being cancelled."""
        with self._changing(job_id) as connection:
            _fence(connection, job_id, token)
            done = JOBS.update().where(JOBS.c.job_id == job_id, JOBS.c.status != "CANCELLING")
            ended = {"status": "SUCCEEDED", "ended_at": now(), "owner_lease_at": 0, "error": None}
            if connection.execute(done.values(**ended)).rowcount == 0:
                return False
            connection.execute(OUTPUTS.delete().where(OUTPUTS.c.job_id == job_id))
            for index, (kind, output) in enumerate(outputs):
                row = {"job_id": job_id, "output_idx": index, "format": kind, "published_at": now()}
                connection.execute(OUTPUTS.insert(), {**row, **output.to_dict()})
        return True

    def turn(
        self,
        job_id: int,
        token: str,
        settled: Sequence[Settled],
        wanted: Mapping[str, int],
        lease_s: float,
        max_retries: int = MAX_RETRIES,
        backoff_s: float = 1.0,
    ) -> Turn:
        """One transaction: what attempts came to, then claims for each worker that has room. Raises SupersededError."""
        rejected: list[Claim] = []
        counts: dict[str, int] = {}
        with self._changing(job_id) if settled else self._db.write() as connection:
            _fence(connection, job_id, token)
            attempts = Attempts(connection, job_id, token, self._db, max_retries, backoff_s)
            for claim, outcome in settled:
                if isinstance(outcome, Lost):
                    accepted = attempts.lose(claim, outcome, counts)
                else:
                    accepted = attempts.complete(claim, outcome, counts)
                if not accepted:
                    rejected.append(claim)
            if counts:
                added = {f"add_{name}": counts.get(name, 0) for name in _COUNTERS}
                connection.execute(_COUNT, {"job": job_id, **added})
            claims = {worker: attempts.claim(worker, count, lease_s) for worker, count in wanted.items()}
            return Turn(_job(connection, job_id), claims, rejected, attempts.failed)

    def next_retry_in(self, job_id: int) -> float | None:
        """Seconds until a batch that waits may be tried again; None if none waits."""
        waits = sa.select(sa.func.min(STATES.c.next_retry_at) - self._db.clock())
        with self._db.read() as connection:
            return connection.scalar(waits.where(STATES.c.job_id == job_id, STATES.c.status == PENDING))

    def failure(self, job_id: int) -> str | None:
        """The first batch that has failed for good, in words."""
        query = sa.select(STATES.c.start_idx, STATES.c.end_idx, STATES.c.error_class, STATES.c.error)
        failed = query.where(STATES.c.job_id == job_id, STATES.c.status == "FAILED").order_by(STATES.c.start_idx)
        with self._db.read() as connection:
            row = connection.execute(failed.limit(1)).one_or_none()
        if row is None:
            return None
        where = f"row {row.start_idx}" if row.start_idx == row.end_idx else f"rows {row.start_idx} to {row.end_idx}"
        if row.error_class in SAID_ALONE:
            return f"{where}: {row.error}"
        return f"{where}: {row.error_class}: {row.error}"

    # Workers.

    def intend_worker(self, pool: str, worker_id: str, job_id: int, token: str, kind: str) -> None:
        """Noted before the process is asked for, so that one that nobody waits for can be found."""
        at = now()
        row = {"pool": pool, "worker_id": worker_id, "job_id": job_id, "owner_token": token, "kind": kind}
        times = {"started_at": at, "last_seen_at": at, "state": "starting", "launch_intent": worker_id}
        with self._db.write() as connection:
            _fence(connection, job_id, token)
            connection.execute(WORKERS.insert(), {**row, **times})

    def note_worker(self, pool: str, worker_id: str, state: str, address: str | None, where: str) -> None:
        mine = WORKERS.update().where(WORKERS.c.pool == pool, WORKERS.c.worker_id == worker_id)
        values = {"state": state, "address": address, "pid_or_actor": where}
        with self._db.write() as connection:
            connection.execute(mine.values(**values, last_seen_at=now()))

    def forget_worker(self, pool: str, worker_id: str) -> None:
        with self._db.write() as connection:
            connection.execute(WORKERS.delete().where(WORKERS.c.pool == pool, WORKERS.c.worker_id == worker_id))

    def forget_ended_workers(self) -> None:
        """Those of jobs that have ended, whose coordinator was killed before it could say that they have, too."""
        ended = sa.select(JOBS.c.job_id).where(JOBS.c.status.in_(TERMINAL), JOBS.c.owner_lease_at <= self._db.clock())
        with self._db.write() as connection:
            connection.execute(WORKERS.delete().where(WORKERS.c.job_id.in_(ended)))

    def workers(self, job_id: int) -> list[dict[str, Any]]:
        query = sa.select(WORKERS).where(WORKERS.c.job_id == job_id).order_by(WORKERS.c.started_at)
        with self._db.read() as connection:
            return [_plain(row) for row in connection.execute(query)]

    # What is left behind.

    def chain(self, job_id: int) -> list[int]:
        """The jobs whose parts this one may refer to, itself included."""
        root = sa.select(sa.func.coalesce(JOBS.c.root_job_id, JOBS.c.job_id)).where(JOBS.c.job_id == job_id)
        same = sa.or_(JOBS.c.root_job_id == root.scalar_subquery(), JOBS.c.job_id == root.scalar_subquery())
        with self._db.read() as connection:
            return list(connection.scalars(sa.select(JOBS.c.job_id).where(same).order_by(JOBS.c.job_id)))

    def note_cleaned(self, job_ids: Sequence[int]) -> None:
        with self._db.write() as connection:
            connection.execute(JOBS.update().where(JOBS.c.job_id.in_(job_ids)).values(cleaned=True))

    def uncleaned(self, ended_before: float, but: Sequence[int] = ()) -> list[int]:
        """Jobs whose parts may be deleted: those that succeeded, and those that failed or were cancelled before
        `ended_before` or are to be purged, unless an active job resumes them.
        """
        due = sa.or_(JOBS.c.ended_at < ended_before, JOBS.c.spec["purge"].as_boolean())
        old = sa.and_(JOBS.c.status.in_(("FAILED", "CANCELLED")), due)
        query = sa.select(JOBS.c.job_id).where(~JOBS.c.cleaned, sa.or_(JOBS.c.status == "SUCCEEDED", old))
        later = JOBS.alias()
        root = sa.func.coalesce(JOBS.c.root_job_id, JOBS.c.job_id)
        in_use = sa.exists().where(later.c.root_job_id == root, later.c.status.in_(ACTIVE))
        with self._db.read() as connection:
            return list(connection.scalars(query.where(~in_use, JOBS.c.job_id.not_in(but)).limit(100)))


def _fence(connection: Connection, job_id: int, token: str, **values: object) -> None:
    """Locks the job's row, too. Raises SupersededError."""
    mine = _TOUCH.values(**values) if values else _TOUCH
    if connection.execute(mine, {"job": job_id, "token": token, "at": now()}).rowcount == 0:
        raise SupersededError(f"another coordinator has taken over bulk job {job_id}")


def _job(connection: Connection, job_id: int) -> Job:
    return Job(*connection.execute(_FIND, {"job": job_id}).one())


def _inserted(connection: Connection, values: dict[str, Any]) -> int:
    return int(connection.execute(JOBS.insert().returning(JOBS.c.job_id), values).scalar_one())


def _dispatched(job_id: int) -> sa.Update:
    """By the index of dispatched batches, which are few. By `job_id` alone, which is taken out of the choice here, a
    planner that knows no better would go through all batches of the job; a parameter would hide that the index fits."""
    return STATES.update().where(STATES.c.status == DISPATCHED, STATES.c.job_id + 0 == job_id)


def _reset_dispatched(connection: Connection, job_id: int) -> None:
    held = _dispatched(job_id)
    connection.execute(held.values(status="PENDING", lease_expires_at=None, attempt_owner_token=None))


def _requeue_expired(connection: Connection, job_id: int, clock: sa.ColumnElement[float]) -> None:
    expired = _dispatched(job_id).where(STATES.c.lease_expires_at <= clock)
    retries = STATES.c.infra_retries + 1
    connection.execute(expired.values(status="PENDING", lease_expires_at=None, infra_retries=retries))


def _chunks(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _plain(row: sa.Row[Any]) -> dict[str, Any]:
    """With keys that are plain strings, and not the names of columns, which orjson does not know."""
    return {str(name): value for name, value in row._mapping.items()}


# Jobs that resume one another. Of the jobs of one root at most one is active. Once one has succeeded, or parts were
# deleted, none can be resumed: a job that resumes another finds every part that its rows name. It reads the same rows:
# input, outputs and `rows` must be the same, and mappers refuse an input that has changed since.


class Resumed(NamedTuple):
    job_id: int
    root_job_id: int
    sealed: bool
    total_rows: int
    input_version: Version | None
    part_formats: dict[str, dict[str, Any]]
    """`JobSpec.part_formats` of the job that resumes it."""


def _resumable(connection: Connection, tenant_id: str, spec: JobSpec, other_outputs: bool = False) -> Resumed:
    """The job to go on with, its row locked. Raises NotFoundError, UserError."""
    wanted = sa.select(JOBS.c.job_id, JOBS.c.root_job_id, JOBS.c.sealed, JOBS.c.total_rows, JOBS.c.spec).where(
        JOBS.c.job_id == spec.resume_from, JOBS.c.tenant_id == tenant_id
    )
    row = connection.execute(wanted.with_for_update()).one_or_none()
    if row is None:
        raise NotFoundError(f"resume_from is {spec.resume_from}, and there is no such bulk job")
    root = row.root_job_id or row.job_id
    same = sa.select(JOBS.c.job_id, JOBS.c.status, JOBS.c.cleaned, JOBS.c.spec)
    chain = connection.execute(same.where(sa.or_(JOBS.c.root_job_id == root, JOBS.c.job_id == root))).all()
    for other in chain:
        if other.status not in ("FAILED", "CANCELLED"):
            what = "has succeeded" if other.status == "SUCCEEDED" else f"is {other.status}: cancel it first"
            raise UserError(f"bulk job {row.job_id} cannot be resumed: job {other.job_id} {what}")
    for other in chain:
        if other.cleaned or other.spec.get("purge"):
            raise UserError(f"bulk job {row.job_id} cannot be resumed: the parts of job {other.job_id} were deleted")
    for name in ("batch_input_format", "rows", *(() if other_outputs else ("batch_output_formats",))):
        before, after = row.spec.get(name), getattr(spec, name)
        if before != after:
            raise UserError(f"bulk job {row.job_id} has another {name} than the one that resumes it")
    written = dict(row.spec.get("part_formats") or {})
    before = row.spec["batch_output_formats"]
    if len(before) != len(spec.batch_output_formats):
        count = len(spec.batch_output_formats)
        raise UserError(f"bulk job {row.job_id} has {len(before)} outputs, and the one that resumes it has {count}")
    for index, (old, new) in enumerate(zip(before, spec.batch_output_formats, strict=True)):
        if old != new:
            written = {staging_of(old["path"], each.job_id, index): old for each in chain} | written
    return Resumed(row.job_id, root, row.sealed, row.total_rows, row.spec.get("input_version"), written)


def _copy_batches(connection: Connection, old_id: int, job_id: int) -> None:
    """What was completed without a failed row stays completed; all else is done again."""
    kept = sa.and_(STATES.c.status == "COMPLETED", STATES.c.rows_failed == 0)
    copied = {
        "job_id": sa.literal(job_id),
        "status": sa.case((kept, "COMPLETED"), else_="PENDING"),
        "updated_at": sa.literal(now()),
        "parts": STATES.c.parts,
        "rows_ok": sa.case((kept, STATES.c.rows_ok), else_=0),
        "tokens_in": sa.case((kept, STATES.c.tokens_in), else_=0),
        "tokens_out": sa.case((kept, STATES.c.tokens_out), else_=0),
        **{name: STATES.c[name] for name in ("batch_idx", "start_idx", "end_idx", "attempt_id", "worker_cluster")},
    }
    source = sa.select(*copied.values()).where(STATES.c.job_id == old_id, STATES.c.status != "SPLIT")
    connection.execute(STATES.insert().from_select(list(copied), source))
    done = STATES.c.status == "COMPLETED"
    sums = sa.select(
        sa.func.count().label("total_batches"),
        sa.func.coalesce(sa.func.sum(sa.case((done, 1), else_=0)), 0).label("completed_batches"),
        *(
            sa.func.coalesce(sa.func.sum(STATES.c[name]), 0).label(name)
            for name in ("rows_ok", "tokens_in", "tokens_out")
        ),
    ).where(STATES.c.job_id == job_id)
    totals = {name: int(total) for name, total in connection.execute(sums).one()._mapping.items()}
    connection.execute(JOBS.update().where(JOBS.c.job_id == job_id).values(**totals))


# All batches of one job made into rows, or such rows deleted: a million of them, in transactions that are short. The
# database makes the rows itself, of one array for each chunk: one statement, whatever the number of its rows. After
# each chunk other writers have their turn. The caller's `begin` checks, in every transaction, that it may write.


Begin = Callable[[Connection], None]


def _insert_batches(db: Database, job_id: int, starts: Sequence[int], total_rows: int, begin: Begin) -> None:
    """`starts` has the first row of each batch, ascending; a batch ends where the next one begins."""
    for count, first in enumerate(range(0, len(starts), INSERT_CHUNK), 1):
        chunk = list(starts[first : first + INSERT_CHUNK])
        after = starts[first + INSERT_CHUNK] if first + INSERT_CHUNK < len(starts) else total_rows
        given = {"job": job_id, "first": first, "after": after, "at": now()}
        with db.write() as connection:
            begin(connection)
            if db.is_sqlite:
                connection.execute(_INSERT_SQLITE, {**given, "starts": json.dumps(chunk)})
            else:
                connection.execute(_INSERT_POSTGRES, {**given, "starts": chunk})
        _let_others(db, count)


def _delete_batches(db: Database, job_id: int, begin: Begin) -> None:
    mine = STATES.c.job_id == job_id
    with db.read() as connection:
        last = connection.scalar(sa.select(sa.func.max(STATES.c.batch_idx)).where(mine))
    for count, first in enumerate(range(0, -1 if last is None else last + 1, INSERT_CHUNK), 1):
        with db.write() as connection:
            begin(connection)
            connection.execute(STATES.delete().where(mine, STATES.c.batch_idx.between(first, first + INSERT_CHUNK - 1)))
        _let_others(db, count)


def _let_others(db: Database, chunks_done: int) -> None:
    if chunks_done % CHECKPOINT_CHUNKS == 0:
        db.checkpoint()
    time.sleep(PAUSE_S)


def _insert(offset: sa.ColumnElement[int], start: sa.ColumnElement[int]) -> sa.Insert:
    next_start = sa.func.lead(start, 1, sa.bindparam("after", type_=_NUMBER)).over(order_by=offset)
    columns = {
        "job_id": sa.bindparam("job", type_=_NUMBER),
        "batch_idx": sa.bindparam("first", type_=_NUMBER) + offset,
        "start_idx": start,
        "end_idx": next_start - 1,
        "status": PENDING,
        "updated_at": sa.bindparam("at", type_=sa.Float),
    }
    return STATES.insert().from_select(list(columns), sa.select(*columns.values()))


def _of_json() -> sa.Insert:
    """SQLite has no arrays."""
    columns = [sa.column("key", _NUMBER), sa.column("value", _NUMBER)]
    each = sa.func.json_each(sa.bindparam("starts", type_=sa.String)).table_valued(*columns, name="each_start")
    return _insert(each.c.key, each.c.value)


def _of_array() -> sa.Insert:
    starts = sa.bindparam("starts", type_=postgresql.ARRAY(_NUMBER))
    each = sa.func.unnest(starts).table_valued(sa.column("start", _NUMBER), with_ordinality="number", name="each_start")
    each = each.render_derived()
    return _insert(each.c.number - 1, each.c.start)


_INSERT_SQLITE, _INSERT_POSTGRES = _of_json(), _of_array()
