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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tinsmith.batch.protocols import MAX_RETRIES, JobSpec, Outcome, OutputInfo, Span
from tinsmith.db import BATCH, Database, now
from tinsmith.errors import NotFoundError, UserError

JOBS, STATES, WORKERS, ROW_ERRORS, OUTPUTS = BATCH

ACTIVE = ("PENDING", "RUNNING", "WINDING_DOWN", "CANCELLING")
TERMINAL = ("SUCCEEDED", "FAILED", "CANCELLED")
MAX_INFRA_RETRIES = 20
"""A batch that was lost this often with its worker is no accident any more."""
CHUNK = 10_000
"""Rows in one INSERT, or one page of a listing."""


class SupersededError(Exception):
    """Another coordinator has taken over the job, or its rows are gone."""


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
class Claim:
    """One attempt at one batch, and what is known of those before."""

    batch_idx: int
    start_idx: int
    end_idx: int
    attempt_id: int
    retry_count: int
    infra_retries: int
    error_class: str | None
    error: str | None

    @property
    def span(self) -> Span:
        return Span(self.start_idx, self.end_idx)


@dataclass(frozen=True, slots=True)
class Lost:
    """An attempt that ended without a result. `infra`: its worker is to blame, and not the batch."""

    error_class: str
    error: str
    infra: bool


Settled = tuple[Claim, Outcome | Lost]


@dataclass(frozen=True, slots=True)
class Turn:
    """What one transaction of a coordinator did. `rejected` are attempts whose batch was no longer theirs."""

    job: Job
    claims: Mapping[str, list[Claim]]
    rejected: list[Claim]


_JOB_COLUMNS = [JOBS.c[name] for name in Job.__dataclass_fields__]
_CLAIM_COLUMNS = [STATES.c[name] for name in Claim.__dataclass_fields__]


class BatchJobs:
    def __init__(self, db: Database) -> None:
        self._db = db

    # Whoever asks for jobs.

    def create(self, tenant_id: str, spec: JobSpec) -> int:
        """Store a job. With `resume_from`, it begins with what that one completed. Raises UserError, NotFoundError."""
        values: dict[str, Any] = {
            "tenant_id": tenant_id,
            "name": spec.name,
            "pool": spec.batch_pool_name,
            "priority": spec.priority,
            "weight": spec.weight,
            "status": "PENDING",
            "spec": spec.to_dict(),
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
            old = _resumable(connection, tenant_id, spec)
            values |= {"root_job_id": old.root_job_id or old.job_id, "sealed": old.sealed, "total_rows": old.total_rows}
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

    def list(self, tenant_id: str, limit: int, offset: int) -> tuple[list[Job], int]:
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
        with self._db.write() as connection:
            connection.execute(cancel.values(status="CANCELLING", updated_at=now()))
        return self.find(tenant_id, job_id)

    def is_batch_job(self, job_id: int) -> bool:
        with self._db.read() as connection:
            return connection.scalar(sa.select(JOBS.c.job_id).where(JOBS.c.job_id == job_id)) is not None

    def get_batch_states(self, job_id: int, limit: int = CHUNK, offset: int = 0) -> list[dict[str, Any]]:
        """The batches of a job, by their rows."""
        query = sa.select(STATES).where(STATES.c.job_id == job_id).order_by(STATES.c.start_idx, STATES.c.batch_idx)
        with self._db.read() as connection:
            return [dict(row._mapping) for row in connection.execute(query.limit(limit).offset(offset))]

    def row_errors(self, job_id: int, limit: int = CHUNK, offset: int = 0) -> list[dict[str, Any]]:
        query = sa.select(ROW_ERRORS).where(ROW_ERRORS.c.job_id == job_id).order_by(ROW_ERRORS.c.row_idx)
        with self._db.read() as connection:
            return [dict(row._mapping) for row in connection.execute(query.limit(limit).offset(offset))]

    def outputs(self, job_id: int) -> list[dict[str, Any]]:
        query = sa.select(OUTPUTS).where(OUTPUTS.c.job_id == job_id).order_by(OUTPUTS.c.output_idx)
        with self._db.read() as connection:
            return [dict(row._mapping) for row in connection.execute(query)]

    def winners(self, job_id: int) -> Iterator[tuple[Span, list[dict[str, Any]]]]:
        """The committed batches in the order of their rows, each with its parts."""
        after = -1
        while True:
            query = (
                sa.select(STATES.c.start_idx, STATES.c.end_idx, STATES.c.parts)
                .where(STATES.c.job_id == job_id, STATES.c.status == "COMPLETED", STATES.c.start_idx > after)
                .order_by(STATES.c.start_idx)
                .limit(CHUNK)
            )
            with self._db.read() as connection:
                rows = connection.execute(query).all()
            if not rows:
                return
            for start_idx, end_idx, parts in rows:
                yield Span(start_idx, end_idx), parts
            after = rows[-1].start_idx

    # The coordinator's side.

    def waiting(self, holder: str) -> list[int]:
        """Jobs that a coordinator of this holder could take now."""
        free = sa.or_(JOBS.c.owner_lease_at <= self._db.clock(), JOBS.c.owner_holder == holder)
        query = sa.select(JOBS.c.job_id).where(JOBS.c.status.in_(ACTIVE), free).order_by(JOBS.c.job_id)
        with self._db.read() as connection:
            return list(connection.scalars(query))

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
        """Any coordinator may take the job at once."""
        mine = JOBS.update().where(JOBS.c.job_id == job_id, JOBS.c.owner_token == token)
        with self._db.write() as connection:
            connection.execute(mine.values(owner_token=None, owner_lease_at=0))

    def save_batch_states(self, job_id: int, token: str, spans: Iterator[Span], total_rows: int) -> Job:
        """Store all batches of a job, and seal it. A chunk at a time: what a crash left is begun anew."""
        with self._db.write() as connection:
            _fence(connection, job_id, token)
            connection.execute(STATES.delete().where(STATES.c.job_id == job_id))
        batch_idx = 0
        while chunk := list(islice(spans, CHUNK)):
            rows = [
                {
                    "job_id": job_id,
                    "batch_idx": batch_idx + index,
                    "start_idx": span.start_idx,
                    "end_idx": span.end_idx,
                    "status": "PENDING",
                    "updated_at": now(),
                }
                for index, span in enumerate(chunk)
            ]
            with self._db.write() as connection:
                _fence(connection, job_id, token)
                connection.execute(STATES.insert(), rows)
            batch_idx += len(chunk)
        with self._db.write() as connection:
            _fence(connection, job_id, token, sealed=True, total_rows=total_rows, total_batches=batch_idx)
            return _job(connection, job_id)

    def set_status(self, job_id: int, token: str, status: str, error: str | None = None) -> bool:
        """False if the job is being cancelled, which only its end can follow. Raises SupersededError."""
        values: dict[str, Any] = {"status": status}
        if status == "RUNNING":
            values["started_at"] = sa.func.coalesce(JOBS.c.started_at, now())
        if status in TERMINAL:
            values |= {"ended_at": now(), "error": error, "owner_lease_at": 0}
        with self._db.write() as connection:
            _fence(connection, job_id, token)
            move = JOBS.update().where(JOBS.c.job_id == job_id)
            if status != "CANCELLED":
                move = move.where(JOBS.c.status != "CANCELLING")
            return connection.execute(move.values(**values)).rowcount == 1

    def finish(self, job_id: int, token: str, outputs: Sequence[tuple[str, OutputInfo]]) -> bool:
        """The outputs are published: the job has succeeded, in one transaction. False if it is being cancelled."""
        with self._db.write() as connection:
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
        with self._db.write() as connection:
            _fence(connection, job_id, token)
            attempts = _Attempts(connection, job_id, token, self._db, max_retries, backoff_s)
            for claim, outcome in settled:
                if isinstance(outcome, Lost):
                    accepted = attempts.lose(claim, outcome, counts)
                else:
                    accepted = attempts.complete(claim, outcome, counts)
                if not accepted:
                    rejected.append(claim)
            if counts:
                added = {name: JOBS.c[name] + count for name, count in counts.items()}
                connection.execute(JOBS.update().where(JOBS.c.job_id == job_id).values(**added))
            claims = {worker: attempts.claim(worker, count, lease_s) for worker, count in wanted.items()}
            return Turn(_job(connection, job_id), claims, rejected)

    def next_retry_in(self, job_id: int) -> float | None:
        """Seconds until a batch that waits may be tried again; None if none waits."""
        waits = sa.select(sa.func.min(STATES.c.next_retry_at) - self._db.clock())
        with self._db.read() as connection:
            return connection.scalar(waits.where(STATES.c.job_id == job_id, STATES.c.status == "PENDING"))

    def failure(self, job_id: int) -> str | None:
        """The first batch that has failed for good, in words."""
        query = sa.select(STATES.c.start_idx, STATES.c.end_idx, STATES.c.error_class, STATES.c.error)
        failed = query.where(STATES.c.job_id == job_id, STATES.c.status == "FAILED").order_by(STATES.c.start_idx)
        with self._db.read() as connection:
            row = connection.execute(failed.limit(1)).one_or_none()
        if row is None:
            return None
        return f"rows {row.start_idx} to {row.end_idx}: {row.error_class}: {row.error}"

    # Workers.

    def intend_worker(self, pool: str, worker_id: str, job_id: int, token: str, kind: str) -> None:
        """Noted before the process is asked for, so that one that nobody waits for can be found."""
        at = now()
        row = {"pool": pool, "worker_id": worker_id, "job_id": job_id, "owner_token": token, "kind": kind}
        times = {"started_at": at, "last_seen_at": at, "state": "starting", "launch_intent": worker_id}
        with self._db.write() as connection:
            _fence(connection, job_id, token)
            connection.execute(WORKERS.insert(), {**row, **times})

    def note_worker(self, pool: str, worker_id: str, state: str, address: str | None, pid: int | None) -> None:
        mine = WORKERS.update().where(WORKERS.c.pool == pool, WORKERS.c.worker_id == worker_id)
        values = {"state": state, "address": address, "pid_or_actor": None if pid is None else str(pid)}
        with self._db.write() as connection:
            connection.execute(mine.values(**values, last_seen_at=now()))

    def forget_worker(self, pool: str, worker_id: str) -> None:
        with self._db.write() as connection:
            connection.execute(WORKERS.delete().where(WORKERS.c.pool == pool, WORKERS.c.worker_id == worker_id))

    def workers(self, job_id: int) -> list[dict[str, Any]]:
        query = sa.select(WORKERS).where(WORKERS.c.job_id == job_id).order_by(WORKERS.c.started_at)
        with self._db.read() as connection:
            return [dict(row._mapping) for row in connection.execute(query)]

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

    def uncleaned(self, ended_before: float) -> list[int]:
        """Jobs whose parts may go: those that succeeded, and others that ended so long ago and were not resumed."""
        old = sa.and_(JOBS.c.status.in_(("FAILED", "CANCELLED")), JOBS.c.ended_at < ended_before)
        query = sa.select(JOBS.c.job_id).where(~JOBS.c.cleaned, sa.or_(JOBS.c.status == "SUCCEEDED", old))
        later = JOBS.alias()
        root = sa.func.coalesce(JOBS.c.root_job_id, JOBS.c.job_id)
        in_use = sa.exists().where(later.c.root_job_id == root, later.c.status.in_(ACTIVE))
        with self._db.read() as connection:
            return list(connection.scalars(query.where(~in_use).limit(100)))


class _Attempts:
    """The changes of one job's batches within one transaction."""

    def __init__(
        self, connection: Connection, job_id: int, token: str, db: Database, max_retries: int, backoff_s: float
    ) -> None:
        self._connection = connection
        self._job_id = job_id
        self._token = token
        self._db = db
        self._max_retries = max_retries
        self._backoff_s = backoff_s

    def _held(self, claim: Claim) -> sa.Update:
        return STATES.update().where(
            STATES.c.job_id == self._job_id,
            STATES.c.batch_idx == claim.batch_idx,
            STATES.c.attempt_id == claim.attempt_id,
            STATES.c.attempt_owner_token == self._token,
            STATES.c.status == "DISPATCHED",
        )

    def _set(self, claim: Claim, **values: object) -> bool:
        change = self._held(claim).values(**values, updated_at=now(), lease_expires_at=None)
        return self._connection.execute(change).rowcount == 1

    def complete(self, claim: Claim, outcome: Outcome, counts: dict[str, int]) -> bool:
        """The commit of a batch."""
        numbers = {name: getattr(outcome, name) for name in ("rows_ok", "rows_failed", "tokens_in", "tokens_out")}
        parts = [part.to_dict() for part in outcome.parts]
        if not self._set(claim, status="COMPLETED", parts=parts, error_class=None, error=None, **numbers):
            return False
        for name, number in {"completed_batches": 1, **numbers}.items():
            counts[name] = counts.get(name, 0) + number
        if outcome.row_failures:
            rows = [
                {
                    "job_id": self._job_id,
                    "row_idx": failure.idx,
                    "attempt_id": claim.attempt_id,
                    "error_class": failure.error_type[:128],
                    "message": failure.message[:2000],
                }
                for failure in outcome.row_failures
            ]
            self._connection.execute(self._db.insert_once(ROW_ERRORS), rows)
        return True

    def lose(self, claim: Claim, lost: Lost, counts: dict[str, int]) -> bool:
        """Once more, later; or in halves; or, for a row that failed often enough, as a failed row; or never."""
        told = {"error_class": lost.error_class[:128], "error": lost.error[-20_000:]}
        if lost.infra:
            tries = claim.infra_retries + 1
            status = "PENDING" if tries <= MAX_INFRA_RETRIES else "FAILED"
            return self._set(claim, status=status, infra_retries=tries, next_retry_at=None, **told)
        tries = claim.retry_count + 1
        if tries <= self._max_retries:
            later = self._db.clock() + self._backoff_s * 2**tries
            return self._set(claim, status="PENDING", retry_count=tries, next_retry_at=later, **told)
        if claim.span.rows > 1:
            return self._split(claim, told, counts)
        # The attempt after the last one only records the row as failed; if even that fails, the batch has.
        status = "PENDING" if tries == self._max_retries + 1 else "FAILED"
        return self._set(claim, status=status, retry_count=tries, next_retry_at=None, **told)

    def _split(self, claim: Claim, told: dict[str, str], counts: dict[str, int]) -> bool:
        if not self._set(claim, status="SPLIT", retry_count=claim.retry_count + 1, **told):
            return False
        last = sa.select(sa.func.max(STATES.c.batch_idx)).where(STATES.c.job_id == self._job_id)
        last_idx = self._connection.scalar(last) or 0
        middle = (claim.start_idx + claim.end_idx) // 2
        halves = (Span(claim.start_idx, middle), Span(middle + 1, claim.end_idx))
        common = {"job_id": self._job_id, "status": "PENDING", "parent_idx": claim.batch_idx, "updated_at": now()}
        rows = [
            # Their parent has spent the retries: a half that fails is halved at once.
            {**common, "batch_idx": last_idx + 1 + index, "start_idx": half.start_idx, "end_idx": half.end_idx,
             "retry_count": self._max_retries}
            for index, half in enumerate(halves)
        ]  # fmt: skip
        self._connection.execute(STATES.insert(), rows)
        counts["total_batches"] = counts.get("total_batches", 0) + 1
        return True

    def claim(self, worker: str, count: int, lease_s: float) -> list[Claim]:
        due = sa.or_(STATES.c.next_retry_at.is_(None), STATES.c.next_retry_at <= self._db.clock())
        first = (
            sa.select(STATES.c.batch_idx)
            .where(STATES.c.job_id == self._job_id, STATES.c.status == "PENDING", due)
            .order_by(STATES.c.start_idx)
            .limit(count)
            .with_for_update(skip_locked=True)
        )
        chosen = STATES.update().where(STATES.c.job_id == self._job_id, STATES.c.batch_idx.in_(first))
        taken = chosen.values(
            status="DISPATCHED",
            worker_cluster=worker,
            attempt_id=STATES.c.attempt_id + 1,
            attempt_owner_token=self._token,
            lease_expires_at=self._db.clock() + lease_s,
            updated_at=now(),
        ).returning(*_CLAIM_COLUMNS)
        claims = [Claim(*row) for row in self._connection.execute(taken)]
        return sorted(claims, key=lambda claim: claim.start_idx)


def _fence(connection: Connection, job_id: int, token: str, **values: object) -> None:
    """Locks the job's row, too. Raises SupersededError."""
    mine = JOBS.update().where(JOBS.c.job_id == job_id, JOBS.c.owner_token == token)
    if connection.execute(mine.values(updated_at=now(), **values)).rowcount == 0:
        raise SupersededError(f"another coordinator has taken over bulk job {job_id}")


def _job(connection: Connection, job_id: int) -> Job:
    return Job(*connection.execute(sa.select(*_JOB_COLUMNS).where(JOBS.c.job_id == job_id)).one())


def _inserted(connection: Connection, values: dict[str, Any]) -> int:
    return int(connection.execute(JOBS.insert().returning(JOBS.c.job_id), values).scalar_one())


def _reset_dispatched(connection: Connection, job_id: int) -> None:
    held = STATES.update().where(STATES.c.job_id == job_id, STATES.c.status == "DISPATCHED")
    connection.execute(held.values(status="PENDING", lease_expires_at=None, attempt_owner_token=None))


def _requeue_expired(connection: Connection, job_id: int, clock: sa.ColumnElement[float]) -> None:
    held = STATES.update().where(STATES.c.job_id == job_id, STATES.c.status == "DISPATCHED")
    expired = held.where(STATES.c.lease_expires_at <= clock)
    retries = STATES.c.infra_retries + 1
    connection.execute(expired.values(status="PENDING", lease_expires_at=None, infra_retries=retries))


def _resumable(connection: Connection, tenant_id: str, spec: JobSpec) -> Job:
    """The job to go on with, its row locked. Raises NotFoundError, UserError."""
    wanted = sa.select(JOBS.c.job_id, JOBS.c.spec).where(
        JOBS.c.job_id == spec.resume_from, JOBS.c.tenant_id == tenant_id
    )
    row = connection.execute(wanted.with_for_update()).one_or_none()
    if row is None:
        raise NotFoundError(f"resume_from is {spec.resume_from}, and there is no such bulk job")
    old = _job(connection, row.job_id)
    root = old.root_job_id or old.job_id
    same = sa.select(JOBS.c.job_id, JOBS.c.status, JOBS.c.cleaned)
    for other in connection.execute(same.where(sa.or_(JOBS.c.root_job_id == root, JOBS.c.job_id == root))):
        if other.status not in ("FAILED", "CANCELLED"):
            what = "has succeeded" if other.status == "SUCCEEDED" else f"is {other.status}: cancel it first"
            raise UserError(f"bulk job {old.job_id} cannot be resumed: job {other.job_id} {what}")
        if other.cleaned:
            raise UserError(f"bulk job {old.job_id} cannot be resumed: the parts of job {other.job_id} were deleted")
    for name in ("batch_input_format", "batch_output_formats", "rows"):
        before, after = row.spec.get(name), getattr(spec, name)
        if before != after:
            raise UserError(f"bulk job {old.job_id} has another {name} ({before!r}) than the one that resumes it")
    return old


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


def _chunks(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
