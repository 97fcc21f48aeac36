"""Bulk jobs and their batches as rows: claims, leases, fencing, retries, progress. SQL only.

A job: PENDING -> RUNNING -> WINDING_DOWN -> SUCCEEDED, or FAILED, or CANCELLING -> CANCELLED. A batch: PENDING ->
DISPATCHED -> COMPLETED, or back to PENDING, or SPLIT into smaller batches, or FAILED, and with it the job.

Invariants:
- One coordinator owns a job until its lease expires or the next coordinator of the same holder takes it. Everything
  that it writes is conditional on its token, in the same transaction: a superseded one changes nothing
  (SupersededError).
- Attempts at a batch are numbered. A result counts only while the batch is DISPATCHED to that attempt of that
  coordinator; the update is the commit of the batch, and later results are rejected.
- The counters of a job change in the transaction of the batch that they count.
- Clocks are the database's. Batches are claimed, and published, in the order of their rows.
- Jobs that resume each other share a root. At most one job of a root is active, and after one has succeeded or parts
  were deleted, none can be resumed: a job that resumes another finds every part that its rows name.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from tinsmith.batch.coordinator.error_kinds import ErrorKind, list_error_kinds
from tinsmith.batch.coordinator.failures import BatchAction, choose_action
from tinsmith.batch.coordinator.members import JobMembers, are_living, delete_lost_members, extend_leases
from tinsmith.batch.coordinator.resumption import RESULTS, copy_chunk, find_source, is_of_root, lock_resumed_job
from tinsmith.batch.coordinator.rows import (
    DISPATCHED,
    FIND,
    IS_JOB,
    JOB_COLUMNS,
    JobRecord,
    delete_workers,
    fence,
    fence_attempts,
    read_job,
    release_batches,
    update_dispatched,
    update_job,
)
from tinsmith.batch.coordinator.stage_figures import add_stage_work, outline_stages
from tinsmith.batch.formats.input_versions import InputChangedError
from tinsmith.batch.formats.schemas import Schema, SchemaConflictError, merge_schemas
from tinsmith.batch.stages import JobStage
from tinsmith.batch.types import (
    MAX_RETRIES,
    PROCESS_DEATHS,
    AttemptFailure,
    AttemptOutcome,
    JobSpec,
    OutputInfo,
    ProgramError,
    RowRange,
    StageWork,
)
from tinsmith.db.database import Database, now
from tinsmith.db.schema import ACTIVE_JOB as ACTIVE
from tinsmith.db.schema import BATCH_JOBS as JOBS
from tinsmith.db.schema import BATCH_MEMBERS as MEMBERS
from tinsmith.db.schema import BATCH_OUTPUTS as OUTPUTS
from tinsmith.db.schema import BATCH_ROW_ERRORS as ROW_ERRORS
from tinsmith.db.schema import BATCH_STATES as STATES
from tinsmith.db.schema import BATCH_WORKERS as WORKERS
from tinsmith.db.schema import TERMINAL_JOB as TERMINAL
from tinsmith.db.statements import Statement
from tinsmith.db.wakeups import SERVER, job_line
from tinsmith.errors import NotFoundError, UserError

PAGE = 10_000
ERRORS_BYTES = 4 << 20
"""The most bytes of a page of failed rows, counting their rows and tracebacks."""
INSERT_CHUNK = 2000
"""Rows in one transaction, which keeps other writers waiting."""
CHECKPOINT_CHUNKS = 8
"""Chunks between two checkpoints, so that SQLite's log stays below the size at which a commit must empty it."""
PAUSE_S = 0.0002
"""The pause between two chunks, so that other writers get SQLite's lock."""
COMPLETE_MESSAGES = (ProgramError.__name__, InputChangedError.__name__, UserError.__name__)
"""Errors whose message needs no class before it."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One attempt at one batch, with the results of earlier attempts."""

    batch_idx: int
    start_idx: int
    end_idx: int
    attempt_id: int
    retry_count: int
    infra_retries: int
    error_class: str | None
    error: str | None
    worker_cluster: str
    parent_idx: int | None = None
    """The batch that this one was split from."""

    @property
    def span(self) -> RowRange:
        return RowRange(self.start_idx, self.end_idx)


class CommittedBatch(NamedTuple):
    """A batch with the parts of its outputs, and its place in the order of the job's commits."""

    span: RowRange
    parts: list[dict[str, Any]]
    commit_number: int


@dataclass(frozen=True, slots=True)
class IdempotentRequest:
    """A request that creates one job, however often it is sent: its idempotency key, and a digest of its content."""

    key: str
    digest: str


SettledAttempt = tuple[Claim, AttemptOutcome | AttemptFailure]


@dataclass(frozen=True, slots=True)
class Transition:
    """The result of one transaction of a coordinator."""

    job: JobRecord
    claims: Mapping[str, list[Claim]]
    rejected: list[Claim]
    """Attempts whose batch was no longer theirs."""
    failed: bool
    """Whether a batch has failed, which fails the job."""


MAX_OUTLINED_JOBS = 256
"""Jobs whose stages are in memory, for their status."""
WORK_FIELDS = ("batches", "rows", "first_row", "retried")
_COUNTERS = ("total_batches", "completed_batches", *RESULTS)
_PENDING = sa.literal_column("'PENDING'")
_COUNT = Statement(
    JOBS.update().where(IS_JOB).values({name: JOBS.c[name] + sa.bindparam(f"more_{name}") for name in _COUNTERS})
)
_IS_CURRENT_ATTEMPT = sa.and_(
    STATES.c.job_id == sa.bindparam("job"),
    STATES.c.batch_idx == sa.bindparam("batch"),
    STATES.c.attempt_id == sa.bindparam("attempt"),
    STATES.c.attempt_owner_token == sa.bindparam("token"),
    STATES.c.status == DISPATCHED,
)
_COMPLETE = Statement(
    STATES.update()
    .where(_IS_CURRENT_ATTEMPT)
    .values({name: sa.bindparam(name) for name in ("parts", *RESULTS, "updated_at")})
    .values(status="COMPLETED", error_class=None, error=None, lease_expires_at=None)
    .values(commit_number=sa.select(JOBS.c.completed_batches).where(IS_JOB).scalar_subquery() + sa.bindparam("nth"))
)
# As a plain subquery, Postgres may run `first` once for each row.
_CLAIM_TEXT = """
    WITH first AS (
        SELECT batch_idx FROM batch_state
        WHERE job_id = :job AND status = 'PENDING' AND (next_retry_at IS NULL OR next_retry_at <= {clock})
        ORDER BY start_idx LIMIT :count {lock}
    )
    UPDATE batch_state
    SET status = 'DISPATCHED', worker_cluster = :worker, attempt_id = attempt_id + 1, attempt_owner_token = :token,
        lease_expires_at = {clock} + :lease_s, updated_at = :at
    WHERE job_id = :job AND batch_idx IN (SELECT batch_idx FROM first)
    RETURNING """ + ", ".join(Claim.__dataclass_fields__)
_CLOCK_POSTGRES = "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"
_CLAIM = Statement(
    sa.text(_CLAIM_TEXT.format(clock=":at", lock="")),
    postgresql=sa.text(_CLAIM_TEXT.format(clock=_CLOCK_POSTGRES, lock="FOR UPDATE SKIP LOCKED")),
)
# One statement makes the rows of a chunk from an array of the first row of each batch.
_INSERT_TEXT = """
    INSERT INTO batch_state (job_id, batch_idx, start_idx, end_idx, status, updated_at)
    SELECT :job, CAST(:first AS bigint) + idx, start,
           lead(start, 1, CAST(:after AS bigint)) OVER (ORDER BY idx) - 1, 'PENDING', :at
    FROM ({starts}) AS numbered_starts
"""
_STARTS_SQLITE = "SELECT key AS idx, value AS start FROM json_each(:starts)"
_STARTS_POSTGRES = """
    SELECT number - 1 AS idx, start
    FROM unnest(CAST(:starts AS bigint[])) WITH ORDINALITY AS numbered(start, number)
"""
_INSERT = Statement(
    sa.text(_INSERT_TEXT.format(starts=_STARTS_SQLITE)),
    postgresql=sa.text(_INSERT_TEXT.format(starts=_STARTS_POSTGRES)),
)


class BatchJobs:
    def __init__(self, db: Database) -> None:
        self.members = JobMembers(db)
        self._db = db
        self._changed: Callable[[int], None] | None = None
        self._stages: dict[int, Sequence[JobStage]] = {}

    def on_change(self, callback: Callable[[int], None]) -> None:
        """Call `callback` with the id of every job that has changed, after the commit, on any thread."""
        self._changed = callback

    @contextmanager
    def _write_and_notify(self, job_id: int) -> Iterator[Connection]:
        """A transaction that notifies the followers of the job."""
        with self._db.write() as connection:
            yield connection
            self._db.notify(connection, SERVER, [job_line(job_id)])
        if self._changed:
            self._changed(job_id)

    # For the API.

    def find_repeated(self, tenant_id: str, request: IdempotentRequest | None) -> int | None:
        """The job of an earlier request with this key; None if there is none. Raises UserError if that request was
        another."""
        if request is None:
            return None
        query = sa.select(JOBS.c.job_id, JOBS.c.request_digest)
        of_key = query.where(JOBS.c.tenant_id == tenant_id, JOBS.c.idempotency_key == request.key)
        row = self._db.first(of_key)
        if row is None:
            return None
        if row.request_digest != request.digest:
            raise UserError(
                f"the header Idempotency-Key is {request.key!r}, with which another request created bulk job "
                f"{row.job_id}; send the same request, or use another key"
            )
        return int(row.job_id)

    def create(
        self,
        tenant_id: str,
        spec: JobSpec,
        *,
        other_outputs: bool = False,
        request: IdempotentRequest | None = None,
    ) -> int:
        """Store a job. With `resume_from`, its coordinator copies what that job completed; `other_outputs` lets it
        write to as many other outputs. A `request` that was stored before gives the job of that time. Raises UserError,
        NotFoundError."""
        try:
            return self._create(tenant_id, spec, other_outputs, request)
        except (IntegrityError, UserError):
            # The same request may have been stored by another thread since it was looked for.
            if (job_id := self.find_repeated(tenant_id, request)) is None:
                raise
            return job_id

    def _create(self, tenant_id: str, spec: JobSpec, other_outputs: bool, request: IdempotentRequest | None) -> int:
        values: dict[str, Any] = {
            "tenant_id": tenant_id,
            "name": spec.name,
            "pool": spec.batch_pool_name,
            "priority": spec.priority,
            "weight": spec.weight,
            "status": "PENDING",
            "spec": replace(spec, input_version=None, input_snapshot=None, part_formats={}, purge=False).to_dict(),
            "sealed": False,
            "cleaned": False,
            "max_failed_rows": spec.max_failed_rows,
            "resume_from": spec.resume_from,
            "idempotency_key": request.key if request else None,
            "request_digest": request.digest if request else None,
            "created_at": now(),
            "updated_at": now(),
        }
        with self._db.write() as connection:
            if spec.resume_from is not None:
                columns = lock_resumed_job(connection, tenant_id, spec, other_outputs)
                values |= {**columns, "spec": values["spec"] | columns.get("spec", {})}
            return int(connection.scalar(JOBS.insert().returning(JOBS.c.job_id), values) or 0)

    def find(self, tenant_id: str, job_id: int) -> JobRecord:
        """A tenant's job. Raises NotFoundError."""
        with self._db.read() as connection:
            row = FIND.first(connection, {"job": job_id})
        if row is None or (job := JobRecord(*row)).tenant_id != tenant_id:
            raise NotFoundError(f"there is no bulk job {job_id}")
        return job

    def page(self, tenant_id: str, limit: int, offset: int) -> tuple[list[JobRecord], int]:
        """A page of the tenant's jobs, newest first, and the number of all."""
        of_tenant = JOBS.c.tenant_id == tenant_id
        query = sa.select(*JOB_COLUMNS).where(of_tenant).order_by(JOBS.c.job_id.desc()).limit(limit).offset(offset)
        count = self._db.scalar(sa.select(sa.func.count()).select_from(JOBS).where(of_tenant))
        return [JobRecord(*row) for row in self._db.rows(query)], int(count or 0)

    def spec(self, job_id: int) -> JobSpec:
        """The specification of a job. Raises NotFoundError, UserError."""
        return JobSpec.from_dict(self._column(job_id, JOBS.c.spec))

    def stages(self, job_id: int) -> Sequence[JobStage]:
        """The stages of a job, without their functions; of recent jobs from memory. Raises NotFoundError."""
        stages = self._stages.pop(job_id, None)
        if stages is None:
            stages = outline_stages(self.spec(job_id))
            if len(self._stages) >= MAX_OUTLINED_JOBS:
                self._stages.pop(next(iter(self._stages)), None)
        self._stages[job_id] = stages
        return stages

    def tenant_of(self, job_id: int) -> str:
        """The tenant of a job. Raises NotFoundError."""
        return self._column(job_id, JOBS.c.tenant_id)

    def _column(self, job_id: int, column: sa.ColumnElement[Any]) -> Any:  # noqa: ANN401  as the column
        value = self._db.scalar(sa.select(column).where(JOBS.c.job_id == job_id))
        if value is None:
            raise NotFoundError(f"there is no bulk job {job_id}")
        return value

    def cancel(self, tenant_id: str, job_id: int) -> JobRecord:
        """Request the end of a job; no effect on one that has ended. Raises NotFoundError."""
        self.find(tenant_id, job_id)
        cancel = JOBS.update().where(JOBS.c.job_id == job_id, JOBS.c.status.in_(ACTIVE))
        with self._write_and_notify(job_id) as connection:
            connection.execute(cancel.values(status="CANCELLING", updated_at=now()))
        return self.find(tenant_id, job_id)

    def purge(self, tenant_id: str, job_id: int) -> JobRecord:
        """Have the next sweep delete the parts of a job that failed or was cancelled, which cannot be resumed then. No
        effect on a job that succeeded, whose parts are deleted in any case. Raises NotFoundError, UserError."""
        self.find(tenant_id, job_id)
        with self._write_and_notify(job_id) as connection:
            job = connection.execute(sa.select(JOBS).where(JOBS.c.job_id == job_id).with_for_update()).one()
            if job.status in ACTIVE:
                raise UserError(f"bulk job {job_id} is {job.status}; cancel it before its parts are purged")
            if job.status != "SUCCEEDED":
                update_job(connection, job_id, spec={**job.spec, "purge": True}, updated_at=now())
        return self.find(tenant_id, job_id)

    def get_batch_states(self, job_id: int, limit: int = PAGE, offset: int = 0) -> list[dict[str, Any]]:
        """The batches of a job, in the order of their rows."""
        query = sa.select(STATES).where(STATES.c.job_id == job_id).order_by(STATES.c.start_idx, STATES.c.batch_idx)
        return _row_dicts(self._db.rows(query.limit(limit).offset(offset)))

    def row_errors(self, job_id: int, limit: int = PAGE, after: int = -1) -> list[dict[str, Any]]:
        """The failed rows after row `after`: at most `limit`, and no more than `ERRORS_BYTES`, but at least one."""
        idx, text = ROW_ERRORS.c.row_idx, sa.cast(ROW_ERRORS.c.details, sa.Text)
        is_later = sa.and_(ROW_ERRORS.c.job_id == job_id, idx > after)
        sizes = sa.select(idx, sa.func.length(text).label("size")).where(is_later).order_by(idx).limit(limit)
        last, num_bytes = after, 0
        for row in self._db.rows(sizes):
            num_bytes += row.size
            if last != after and num_bytes > ERRORS_BYTES:
                break
            last = row.row_idx
        return _row_dicts(self._db.rows(sa.select(ROW_ERRORS).where(is_later, idx <= last).order_by(idx)))

    def row_errors_page(self, job_id: int, limit: int, after: int) -> tuple[list[dict[str, Any]], int | None]:
        """As `row_errors`, with the `after` of the next page; None after the last one."""
        page = self.row_errors(job_id, limit, after)
        if not page:
            return page, None
        last = page[-1]["row_idx"]
        query = sa.select(ROW_ERRORS.c.row_idx).where(ROW_ERRORS.c.job_id == job_id, ROW_ERRORS.c.row_idx > last)
        return page, None if self._db.first(query.limit(1)) is None else last

    def error_kinds(self, job_id: int) -> list[ErrorKind]:
        return list_error_kinds(self._db, job_id)

    def outputs(self, job_id: int) -> list[dict[str, Any]]:
        return _row_dicts(
            self._db.rows(sa.select(OUTPUTS).where(OUTPUTS.c.job_id == job_id).order_by(OUTPUTS.c.output_idx))
        )

    def work_by_worker(self, job_id: int) -> dict[str, dict[str, int]]:
        """The `WORK_FIELDS` of each worker with dispatched batches: the numbers of batches, rows and retries, and the
        first row."""
        retried = sa.case((STATES.c.retry_count + STATES.c.infra_retries > 0, 1), else_=0)
        rows = sa.func.sum(STATES.c.end_idx - STATES.c.start_idx + 1)
        query = sa.select(
            STATES.c.worker_cluster,
            sa.func.count().label("batches"),
            rows.label("rows"),
            sa.func.min(STATES.c.start_idx).label("first_row"),
            sa.func.sum(retried).label("retried"),
        )
        query = query.where(STATES.c.status == DISPATCHED, STATES.c.job_id + 0 == job_id)
        worker_rows = self._db.rows(query.group_by(STATES.c.worker_cluster))
        return {
            worker: {name: int(row._mapping[name]) for name in WORK_FIELDS} for row in worker_rows if (worker := row[0])
        }

    def list_commits(self, job_id: int, after: int, limit: int, order: str = "rows") -> list[CommittedBatch]:
        """The committed batches after a row, in the order of their rows, or after a number of a commit, in the order
        of commits. A number that was read has no lower one after it: the job's row is locked while it is given."""
        position = STATES.c.commit_number if order == "commits" else STATES.c.start_idx
        query = sa.select(STATES.c.start_idx, STATES.c.end_idx, STATES.c.parts, STATES.c.commit_number)
        is_later = sa.and_(STATES.c.job_id == job_id, STATES.c.status == "COMPLETED", position > after)
        rows = self._db.rows(query.where(is_later).order_by(position).limit(limit))
        return [CommittedBatch(RowRange(row.start_idx, row.end_idx), row.parts, row.commit_number) for row in rows]

    def iter_committed_batches(self, job_id: int) -> Iterator[CommittedBatch]:
        """Yield all committed batches, in the order of their rows."""
        after = -1
        while page := self.list_commits(job_id, after, PAGE):
            yield from page
            after = page[-1].span.start_idx

    def schemas(self, job_id: int, output: int) -> list[Schema]:
        """The distinct schemas of the committed parts of an output."""
        schema = STATES.c.parts[(output, "schema")].as_string()
        query = sa.select(schema).where(STATES.c.job_id == job_id, STATES.c.status == "COMPLETED").distinct()
        return [json.loads(text) for text in self._db.scalars(query) if text is not None]

    # For coordinators.

    def _is_free(self, holder: str) -> sa.ColumnElement[bool]:
        free = sa.or_(JOBS.c.owner_lease_at <= self._db.clock(), JOBS.c.owner_holder == holder)
        return sa.and_(JOBS.c.status.in_(ACTIVE), free)

    def acquirable_jobs(self, holder: str, leaves_pool: Callable[[str], bool] = lambda _pool: False) -> list[int]:
        """The jobs that a coordinator of this holder could take now. Of pools that it leaves to others, only the
        jobs that are being cancelled.
        """
        query = sa.select(JOBS.c.job_id, JOBS.c.pool, JOBS.c.status).where(self._is_free(holder))
        rows = self._db.rows(query.order_by(JOBS.c.job_id))
        return [row.job_id for row in rows if row.status == "CANCELLING" or not leaves_pool(row.pool)]

    def active_in(self, pools: Sequence[str]) -> list[JobRecord]:
        """The jobs of these pools that have not ended, oldest first."""
        query = sa.select(*JOB_COLUMNS).where(JOBS.c.pool.in_(pools), JOBS.c.status.in_(ACTIVE))
        return [JobRecord(*row) for row in self._db.rows(query.order_by(JOBS.c.job_id))]

    def has_ended(self, job_id: int) -> bool:
        """Whether a job has ended or does not exist."""
        status = self._db.scalar(sa.select(JOBS.c.status).where(JOBS.c.job_id == job_id))
        return status is None or status in TERMINAL

    def hold_machines_lock(self) -> AbstractContextManager[bool]:
        """Yields whether this process is the only one that manages the machines of managed pools in the block."""
        return self._db.try_lock("managed machines")

    def acquire_batch_coordinator(self, job_id: int, token: str, holder: str, lease_s: float) -> JobRecord | None:
        """Become the owner of a job; None if another coordinator owns it. Dispatched batches become pending again, but
        for those of living members."""
        acquire = JOBS.update().where(JOBS.c.job_id == job_id, self._is_free(holder))
        lease = {"owner_token": token, "owner_holder": holder, "owner_lease_at": self._db.clock() + lease_s}
        last_seen = sa.select(JOBS.c.updated_at).where(JOBS.c.job_id == job_id)
        with self._db.write() as connection:
            seen_at = connection.scalar(last_seen)
            if connection.execute(acquire.values(**lease, updated_at=now())).rowcount == 0:
                return None
            delete_lost_members(connection, job_id, self._db.clock())
            members = sa.select(MEMBERS.c.token).where(MEMBERS.c.job_id == job_id)
            release_batches(connection, job_id, STATES.c.attempt_owner_token.not_in(members))
            is_left_over = sa.and_(WORKERS.c.job_id == job_id, WORKERS.c.owner_token.not_in(members))
            delete_workers(connection, seen_at or 0.0, is_left_over)
            return read_job(connection, job_id)

    def renew(self, job_id: int, token: str, lease_s: float, batches: Sequence[int] = ()) -> JobRecord:
        """Extend the lease of the job and of these batches; other dispatched batches whose lease has expired become
        pending again. Raises SupersededError."""
        until = self._db.clock() + lease_s
        with self._db.write() as connection:
            fence(connection, job_id, token)
            update_job(connection, job_id, owner_lease_at=until)
            extend_leases(connection, job_id, token, until, batches)
            delete_lost_members(connection, job_id, self._db.clock())
            expired = update_dispatched(job_id).where(STATES.c.lease_expires_at <= self._db.clock())
            retries = STATES.c.infra_retries + 1
            connection.execute(expired.values(status="PENDING", lease_expires_at=None, infra_retries=retries))
            return read_job(connection, job_id)

    def release(self, job_id: int, token: str) -> None:
        """Let any coordinator take the job at once. The rows of this coordinator's workers are deleted."""
        of_owner = JOBS.update().where(JOBS.c.job_id == job_id, JOBS.c.owner_token == token)
        with self._db.write() as connection:
            connection.execute(of_owner.values(owner_token=None, owner_lease_at=0))
            delete_workers(connection, now(), WORKERS.c.job_id == job_id, WORKERS.c.owner_token == token)

    def save_batch_states(
        self, job_id: int, token: str, starts: Sequence[int], total_rows: int, source: Mapping[str, Any] | None = None
    ) -> JobRecord:
        """Store all batches of a job, which is then planned. `starts` has the first row of each batch, ascending; a
        batch ends where the next begins. `source` has the fields of the specification that say what was counted.
        Rows that a crash left are deleted first. Many short transactions let others write."""
        is_of_job = STATES.c.job_id == job_id
        last = self._db.scalar(sa.select(sa.func.max(STATES.c.batch_idx)).where(is_of_job))
        for first in range(0, -1 if last is None else last + 1, INSERT_CHUNK):
            chunk = STATES.c.batch_idx.between(first, first + INSERT_CHUNK - 1)
            with self._chunk(job_id, token, first) as connection:
                connection.execute(STATES.delete().where(is_of_job, chunk))
        for first in range(0, len(starts), INSERT_CHUNK):
            chunk = self._db.array(starts[first : first + INSERT_CHUNK])
            after = starts[first + INSERT_CHUNK] if first + INSERT_CHUNK < len(starts) else total_rows
            parameters = {"job": job_id, "first": first, "after": after, "starts": chunk, "at": now()}
            with self._chunk(job_id, token, first) as connection:
                _INSERT.count(connection, parameters)
        with self._write_and_notify(job_id) as connection:
            fence(connection, job_id, token)
            values: dict[str, Any] = {"sealed": True, "total_rows": total_rows, "total_batches": len(starts)}
            if source:
                stored = connection.scalar(sa.select(JOBS.c.spec).where(JOBS.c.job_id == job_id))
                values["spec"] = {**(stored or {}), **source}
            update_job(connection, job_id, **values)
            return read_job(connection, job_id)

    def copy_resumed_batches(
        self, job_id: int, token: str, should_stop: Callable[[], bool] = lambda: False
    ) -> JobRecord | None:
        """Copy the batches of the job that this one resumes, which is then planned; None if that one has none, so that
        this one has to be planned. Many short transactions let others write. Stops early, to be continued, if
        `should_stop`. Raises SupersededError."""
        with self._db.read() as connection:
            source_id = find_source(connection, job_id)
        if source_id is None:
            return None
        for chunk_idx in count():
            with self._chunk(job_id, token, chunk_idx * INSERT_CHUNK) as connection:
                if should_stop():
                    return read_job(connection, job_id)
                if copy_chunk(connection, source_id, job_id, INSERT_CHUNK) < INSERT_CHUNK:
                    break
        with self._write_and_notify(job_id) as connection:
            fence(connection, job_id, token)
            update_job(connection, job_id, sealed=True)
            return read_job(connection, job_id)

    @contextmanager
    def _chunk(self, job_id: int, token: str, first: int) -> Iterator[Connection]:
        with self._db.write() as connection:
            fence(connection, job_id, token)
            yield connection
        if (first // INSERT_CHUNK + 1) % CHECKPOINT_CHUNKS == 0:
            self._db.checkpoint()
        time.sleep(PAUSE_S)

    def set_status(self, job_id: int, token: str, status: str, error: str | None = None) -> bool:
        """Set the status of a job. False if it is being cancelled: it can only become CANCELLED. Raises
        SupersededError."""
        with self._write_and_notify(job_id) as connection:
            return _set_status(connection, job_id, token, status, error)

    def finish(self, job_id: int, token: str, outputs: Sequence[tuple[str, OutputInfo]]) -> bool:
        """Record the published outputs and the success of the job in one transaction. False if it is being cancelled.
        Raises SupersededError."""
        with self._write_and_notify(job_id) as connection:
            if not _set_status(connection, job_id, token, "SUCCEEDED"):
                return False
            connection.execute(OUTPUTS.delete().where(OUTPUTS.c.job_id == job_id))
            for index, (kind, output) in enumerate(outputs):
                row = {"job_id": job_id, "output_idx": index, "format": kind, "published_at": now()}
                connection.execute(OUTPUTS.insert(), {**row, **output.to_dict()})
        return True

    def settle_and_claim(
        self,
        job_id: int,
        token: str,
        settled: Sequence[SettledAttempt],
        claim_counts: Mapping[str, int],
        lease_s: float,
        max_retries: int = MAX_RETRIES,
        backoff_s: float = 1.0,
        paid_until: Mapping[str, float] | None = None,
    ) -> Transition:
        """One transaction of the owner or of a member: the results of attempts, then claims, as many as each worker
        wants, and the state of the job's rate limits. A result whose rows' types conflict with those of committed rows
        is a failed attempt. Raises SupersededError."""
        with self._write_and_notify(job_id) if settled else self._db.write() as connection:
            fence_attempts(connection, job_id, token)
            attempts = _Attempts(connection, job_id, token, self._db, max_retries, backoff_s)
            rejected = [claim for claim, outcome in settled if not attempts.settle(claim, outcome)]
            if attempts.counts:
                increments = {f"more_{name}": attempts.counts[name] for name in _COUNTERS}
                _COUNT.count(connection, {"job": job_id, **increments})
            claims = {worker: attempts.claim(worker, count, lease_s) for worker, count in claim_counts.items()}
            if changes := attempts.job_changes() | ({"paid_until": paid_until} if paid_until else {}):
                update_job(connection, job_id, **changes)
            return Transition(read_job(connection, job_id), claims, rejected, attempts.failed)

    def set_machines_aside(self, job_id: int, token: str, machines: Sequence[Mapping[str, Any]]) -> None:
        """Store the machines on which the job's function could not be set up. Raises SupersededError."""
        with self._write_and_notify(job_id) as connection:
            fence(connection, job_id, token)
            update_job(connection, job_id, machines_set_aside=[dict(machine) for machine in machines] or None)

    def next_retry_in(self, job_id: int) -> float | None:
        """Seconds until a pending batch may be retried; None if there is none."""
        wait_s = sa.select(sa.func.min(STATES.c.next_retry_at) - self._db.clock())
        return self._db.scalar(wait_s.where(STATES.c.job_id == job_id, STATES.c.status == _PENDING))

    def save_schemas(self, job_id: int, token: str, schemas: Sequence[Schema | None]) -> JobRecord:
        """Store the types of the committed rows of each output. Raises SupersededError."""
        with self._db.write() as connection:
            fence(connection, job_id, token)
            update_job(connection, job_id, schemas=list(schemas))
            return read_job(connection, job_id)

    def failure(self, job_id: int) -> str | None:
        """The error of the first failed batch, with its rows; None if no batch has failed."""
        query = sa.select(STATES.c.start_idx, STATES.c.end_idx, STATES.c.error_class, STATES.c.error)
        failed = query.where(STATES.c.job_id == job_id, STATES.c.status == "FAILED").order_by(STATES.c.start_idx)
        row = self._db.first(failed.limit(1))
        if row is None:
            return None
        return _describe_failure(RowRange(row.start_idx, row.end_idx), row.error_class, row.error)

    # Workers.

    def record_launch(
        self, pool: str, worker_id: str, job_id: int, token: str, kind: str, max_others: int | None = None
    ) -> bool:
        """Record a worker before its process is started, so that an abandoned one can be found. False, without a
        record, if other processes have more than `max_others` workers of the job. Raises SupersededError."""
        at = now()
        row = {"pool": pool, "worker_id": worker_id, "job_id": job_id, "owner_token": token, "kind": kind}
        times = {"started_at": at, "last_seen_at": at, "state": "starting", "launch_intent": worker_id}
        is_other = sa.and_(WORKERS.c.job_id == job_id, WORKERS.c.owner_token != token)
        with self._db.write() as connection:
            fence_attempts(connection, job_id, token)
            if max_others is not None:
                num_others = connection.scalar(sa.select(sa.func.count()).select_from(WORKERS).where(is_other)) or 0
                if num_others > max_others:
                    return False
            connection.execute(WORKERS.insert(), {**row, **times})
            return True

    def record_worker(self, worker_id: str, process: str) -> None:
        """Record that a worker is ready. `process` names it for users."""
        values = {"state": "ready", "pid_or_actor": process, "last_seen_at": now()}
        with self._db.write() as connection:
            connection.execute(WORKERS.update().where(WORKERS.c.worker_id == worker_id).values(**values))

    def delete_worker(self, worker_id: str) -> None:
        with self._db.write() as connection:
            delete_workers(connection, now(), WORKERS.c.worker_id == worker_id)

    def delete_ended_workers(self) -> None:
        """Delete the workers of ended jobs whose coordinator was killed before it could."""
        ended_jobs = sa.select(JOBS.c.job_id).where(
            JOBS.c.status.in_(TERMINAL), JOBS.c.owner_lease_at <= self._db.clock()
        )
        with self._db.write() as connection:
            connection.execute(WORKERS.delete().where(WORKERS.c.job_id.in_(ended_jobs)))

    def workers(self, job_id: int) -> list[dict[str, Any]]:
        return _row_dicts(
            self._db.rows(sa.select(WORKERS).where(WORKERS.c.job_id == job_id).order_by(WORKERS.c.started_at))
        )

    def count_jobs_with_workers(self, pool: str) -> int:
        """How many jobs have workers of a pool that have started."""
        in_pool = (WORKERS.c.pool == pool) & (WORKERS.c.state == "ready")
        return self._db.scalar(sa.select(sa.func.count(WORKERS.c.job_id.distinct())).where(in_pool)) or 0

    # Deleting parts.

    def resume_chain(self, job_id: int) -> list[int]:
        """The jobs that share a root with this one, itself included: it may refer to their parts."""
        query = sa.select(sa.func.coalesce(JOBS.c.root_job_id, JOBS.c.job_id)).where(JOBS.c.job_id == job_id)
        root = query.scalar_subquery()
        return self._db.scalars(sa.select(JOBS.c.job_id).where(is_of_root(root)).order_by(JOBS.c.job_id))

    def record_cleaned(self, job_ids: Sequence[int]) -> None:
        with self._db.write() as connection:
            connection.execute(JOBS.update().where(JOBS.c.job_id.in_(job_ids)).values(cleaned=True))

    def cleanable_jobs(self, ended_before: float, excluded: Sequence[int] = ()) -> list[int]:
        """The jobs whose parts may be deleted: those that succeeded, and those that failed or were cancelled before
        `ended_before` or are to be purged, unless an active job resumes them."""
        is_due = sa.or_(JOBS.c.ended_at < ended_before, JOBS.c.spec["purge"].as_boolean())
        is_abandoned = sa.and_(JOBS.c.status.in_(("FAILED", "CANCELLED")), is_due)
        query = sa.select(JOBS.c.job_id).where(~JOBS.c.cleaned, sa.or_(JOBS.c.status == "SUCCEEDED", is_abandoned))
        resuming = JOBS.alias()
        root = sa.func.coalesce(JOBS.c.root_job_id, JOBS.c.job_id)
        in_use = sa.exists().where(resuming.c.root_job_id == root, resuming.c.status.in_(ACTIVE))
        has_member = sa.exists().where(are_living(JOBS.c.job_id, self._db.clock()))  # which may still write a part
        return self._db.scalars(query.where(~in_use, ~has_member, JOBS.c.job_id.not_in(excluded)).limit(100))


def _describe_failure(span: RowRange, error_class: str, error: str) -> str:
    location = f"row {span.start_idx}" if span.rows == 1 else f"rows {span.start_idx} to {span.end_idx}"
    return f"{location}: {'' if error_class in COMPLETE_MESSAGES else f'{error_class}: '}{error}"


def _set_status(connection: Connection, job_id: int, token: str, status: str, error: str | None = None) -> bool:
    values: dict[str, Any] = {"status": status}
    if status == "RUNNING":
        values["started_at"] = sa.func.coalesce(JOBS.c.started_at, now())
    if status in TERMINAL:
        values |= {"ended_at": now(), "error": error, "owner_lease_at": 0}
    fence(connection, job_id, token)
    update = JOBS.update().where(JOBS.c.job_id == job_id)
    if status != "CANCELLED":
        update = update.where(JOBS.c.status != "CANCELLING")
    return connection.execute(update.values(**values)).rowcount == 1


def _row_dicts(rows: Sequence[sa.Row[Any]]) -> list[dict[str, Any]]:
    """Rows as dictionaries with plain strings as keys: orjson does not know SQLAlchemy's."""
    return [{str(name): value for name, value in row._mapping.items()} for row in rows]


@dataclass
class _Attempts:
    """The changes of one job's batches within one transaction."""

    connection: Connection
    job_id: int
    token: str
    db: Database
    max_retries: int
    backoff_s: float
    counts: Counter[str] = field(default_factory=Counter)
    failed: bool = False
    _schemas: list[Schema | None] | None = None
    """The types of the rows of each output, merged; None if nothing has changed them."""
    _first_error: str = ""
    _stage_work: list[StageWork] = field(default_factory=list)

    def settle(self, claim: Claim, outcome: AttemptOutcome | AttemptFailure) -> bool:
        """Store the result of an attempt. False if the batch is no longer this attempt's."""
        if isinstance(outcome, AttemptFailure):
            return self._record_failure(claim, outcome)
        try:
            schemas = self._merge_schemas(outcome)
        except SchemaConflictError as error:
            return self._record_failure(claim, AttemptFailure(type(error).__name__, str(error)))
        if not self._complete(claim, outcome):
            return False
        self._schemas = schemas
        return True

    def job_changes(self) -> dict[str, object]:
        """The changed columns of the job, apart from its counters."""
        changes: dict[str, object] = {} if self._schemas is None else {"schemas": self._schemas}
        if self._stage_work:
            stored = self.connection.scalar(sa.select(JOBS.c.stage_figures).where(JOBS.c.job_id == self.job_id))
            changes["stage_figures"] = add_stage_work(stored or [], self._stage_work)
        error = sa.func.coalesce(JOBS.c.error, self._first_error)  # by which the owner sees a member's failure
        return changes | ({"error": error} if self.failed else {})

    def _merge_schemas(self, outcome: AttemptOutcome) -> list[Schema | None] | None:
        """The types of each output's rows with those of an outcome; None if it has none. Raises SchemaConflictError."""
        if not any(part.schema for part in outcome.parts):
            return self._schemas
        schemas = self._schemas
        if schemas is None:
            stored = self.connection.scalar(sa.select(JOBS.c.schemas).where(JOBS.c.job_id == self.job_id))
            schemas = stored or [None] * len(outcome.parts)
        return [
            schema if part.schema is None else merge_schemas(schema or {}, part.schema)
            for schema, part in zip(schemas, outcome.parts, strict=True)
        ]

    def _attempt_parameters(self, claim: Claim) -> dict[str, object]:
        batch = {"batch": claim.batch_idx, "attempt": claim.attempt_id}
        return {"job": self.job_id, "token": self.token, **batch}

    def _complete(self, claim: Claim, outcome: AttemptOutcome) -> bool:
        """Commit a batch. False if it is no longer this attempt's."""
        counts = {name: getattr(outcome, name) for name in RESULTS}
        parts = json.dumps([part.to_dict() for part in outcome.parts])
        parameters = {**self._attempt_parameters(claim), "parts": parts, **counts, "updated_at": now()}
        parameters["nth"] = self.counts["completed_batches"] + 1  # the job's own count is changed after all of them
        if _COMPLETE.count(self.connection, parameters) != 1:
            return False
        self.counts.update(completed_batches=1, **counts)
        self._stage_work.extend(outcome.stage_work)
        if outcome.row_failures:
            gave_up = claim.retry_count > self.max_retries  # this attempt only recorded the failure of earlier ones
            attempts = claim.attempt_id - 1 if gave_up else claim.retry_count + 1
            rows = [
                {
                    "job_id": self.job_id,
                    "row_idx": failure.idx,
                    "attempt_id": claim.attempt_id,
                    "error_class": failure.error_type[:128],
                    "message": failure.message[:2000],
                    "details": {
                        "row": failure.row,
                        "traceback": failure.traceback[-20_000:],
                        "attempts": attempts,
                        "worker": claim.worker_cluster,
                    },
                }
                for failure in outcome.row_failures
            ]
            self.connection.execute(self.db.insert_once(ROW_ERRORS), rows)
        return True

    def _record_failure(self, claim: Claim, failure: AttemptFailure) -> bool:
        """Do what follows a failed attempt (`failures.py`). False if the batch is no longer this attempt's."""
        error: dict[str, object] = {"error_class": failure.error_class[:128], "error": failure.error[-20_000:]}
        died_before = claim.error_class in PROCESS_DEATHS
        num_tries, num_losses = claim.retry_count + 1, claim.infra_retries + 1
        action = choose_action(
            failure.cause,
            retries=claim.retry_count,
            infra_retries=claim.infra_retries,
            max_retries=self.max_retries,
            num_rows=claim.span.rows,
            is_part=claim.parent_idx is not None,
            died_before=died_before,
        )
        match action:
            case BatchAction.RETURN:
                return self._set(claim, "PENDING")
            case BatchAction.RETRY_ELSEWHERE:
                stored_error = {} if died_before else error  # the first death's error shows that the next is the second
                return self._set(claim, "PENDING", infra_retries=num_losses, **stored_error)
            case BatchAction.FAIL_ELSEWHERE:
                return self._set(claim, "FAILED", infra_retries=num_losses, **error)
            case BatchAction.FAIL:
                return self._set(claim, "FAILED", retry_count=num_tries, **error)
            case BatchAction.BACK_OFF:
                next_retry_at = self.db.clock() + self.backoff_s * 2**num_tries
                return self._set(claim, "PENDING", retry_count=num_tries, next_retry_at=next_retry_at, **error)
            case BatchAction.RETRY:
                return self._set(claim, "PENDING", retry_count=num_tries, **error)
            case BatchAction.SPLIT:
                return self._split(claim, failure.row, error)
            case BatchAction.GIVE_UP:
                return self._set(claim, "PENDING", retry_count=self.max_retries + 1, **error)

    def _set(self, claim: Claim, status: str, **values: object) -> bool:
        changes = {"status": status, "next_retry_at": None, "lease_expires_at": None, "updated_at": now(), **values}
        update = STATES.update().where(_IS_CURRENT_ATTEMPT).values(**changes)
        accepted = self.connection.execute(update, self._attempt_parameters(claim)).rowcount == 1
        if accepted and status == "FAILED":
            self.failed = True
            error_class, error = str(values["error_class"]), str(values["error"])
            self._first_error = self._first_error or _describe_failure(claim.span, error_class, error)
        return accepted

    def _split(self, claim: Claim, row: int | None, error: Mapping[str, object]) -> bool:
        """Split a batch into halves or, if the failed row is known, into that row and those on either side of it."""
        if not self._set(claim, "SPLIT", retry_count=claim.retry_count + 1, **error):
            return False
        last = sa.select(sa.func.max(STATES.c.batch_idx)).where(STATES.c.job_id == self.job_id)
        last_idx = self.connection.scalar(last) or 0
        start, end = claim.span
        if row is not None and start <= row <= end:
            spans = [RowRange(start, row - 1), RowRange(row, row), RowRange(row + 1, end)]
        else:
            middle = (start + end) // 2
            spans = [RowRange(start, middle), RowRange(middle + 1, end)]
        common = {"job_id": self.job_id, "status": "PENDING", "parent_idx": claim.batch_idx, "updated_at": now()}
        rows = [
            {**common, "batch_idx": last_idx + 1 + index, "start_idx": part.start_idx, "end_idx": part.end_idx}
            for index, part in enumerate(span for span in spans if span.rows > 0)
        ]
        self.connection.execute(STATES.insert(), rows)
        self.counts.update(total_batches=len(rows) - 1)
        return True

    def claim(self, worker: str, count: int, lease_s: float) -> list[Claim]:
        parameters = {"job": self.job_id, "worker": worker, "count": count, "token": self.token}
        claimed = _CLAIM.rows(self.connection, {**parameters, "lease_s": lease_s, "at": now()})
        return sorted((Claim(*row) for row in claimed), key=lambda claim: claim.start_idx)
