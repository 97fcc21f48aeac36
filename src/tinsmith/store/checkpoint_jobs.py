"""Checkpoint jobs: merges of a checkpoint into its base model, and uploads to a hub, which a server's child runs.

A job belongs to one tenant and to the server (`holder`) that accepted it, which runs its jobs one after another.
States: queued -> running -> done | failed; a cancelled job is `cancelling` while it still runs. A job whose server
stopped or no longer reports is `interrupted`. It is not repeated by itself, since it may be what stopped the server,
and since the token of an upload is not stored. An ended job without a result can be queued again as the next `attempt`;
reports of an earlier attempt change nothing. Only a job that is done has a result.

`UploadTokens` are the tokens that tenants typed, in memory only. Knows no files and no processes.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tinsmith.db.database import Database, now
from tinsmith.db.schema import CHECKPOINT_JOBS
from tinsmith.errors import NotFoundError, TooManyRequestsError, UserError
from tinsmith.store.audit import entry

MERGE, UPLOAD = "merge", "upload"
FORMS = ("model", "adapter")
QUEUED, RUNNING, CANCELLING = "queued", "running", "cancelling"
DONE, FAILED, CANCELLED, INTERRUPTED = "done", "failed", "cancelled", "interrupted"
UNFINISHED = (QUEUED, RUNNING, CANCELLING)
REPEATABLE = (FAILED, CANCELLED, INTERRUPTED)

MAX_UNFINISHED = 8
"""Most jobs of a tenant that wait or run."""

SILENCE_S = 60.0
"""A running job without a report for so long is interrupted: its server has stopped."""

RESTARTED = "the server stopped while the job ran, and nothing of it was kept; start it again"
LOST_TOKEN = "the server was restarted, and it never stores a typed token; start the job again with the token"

_FIGURES = {"done": 0, "total": 0, "done_bytes": 0, "total_bytes": 0}


@dataclass(frozen=True, slots=True)
class NewCheckpointJob:
    """`form` is the merged model or the adapter; `dtype` is that of a merged model, or auto (the base's)."""

    tenant_id: str
    tinker_path: str
    base_model: str
    kind: str
    form: str = "model"
    dtype: str = "auto"
    repository: str | None = None
    private: bool = True
    has_token: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointJob:
    job_id: str
    tenant_id: str
    tinker_path: str
    base_model: str
    kind: str
    form: str
    dtype: str
    repository: str | None
    private: bool
    has_token: bool
    state: str
    reason: str | None
    holder: str
    attempt: int
    phase: str
    phase_began_at: float
    done: int
    total: int
    done_bytes: int
    total_bytes: int
    created_at: float
    started_at: float | None
    reported_at: float
    ended_at: float | None
    directory: str | None
    files: Mapping[str, int] | None
    size_bytes: int | None
    url: str | None

    @property
    def bytes_per_s(self) -> float | None:
        """The mean rate of the current phase; None without a figure."""
        elapsed_s = self.reported_at - self.phase_began_at
        is_moving = self.state == RUNNING and self.done_bytes > 0 and elapsed_s > 0
        return self.done_bytes / elapsed_s if is_moving else None

    @property
    def remaining_s(self) -> float | None:
        """The time that the rest of the current phase takes at its mean rate; None without a figure."""
        rate = self.bytes_per_s
        return None if rate is None else max(0, self.total_bytes - self.done_bytes) / rate


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The figures of a phase: tensors or files, and their bytes."""

    phase: str
    done: int = 0
    total: int = 0
    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class JobResult:
    """What a job has made: a directory with its files by name and size, or the address of a repository."""

    directory: str | None = None
    files: Mapping[str, int] | None = None
    size_bytes: int | None = None
    url: str | None = None


class UploadTokens:
    """Tokens of a hub that tenants typed for one job each. They are never stored, and end with the job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: dict[str, str] = {}

    def put(self, job_id: str, token: str) -> None:
        with self._lock:
            self._tokens[job_id] = token

    def take(self, job_id: str) -> str | None:
        with self._lock:
            return self._tokens.pop(job_id, None)


class CheckpointJobs:
    def __init__(self, db: Database, holder: str) -> None:
        """`holder` names this server's host and data directory."""
        self._db = db
        self.holder = holder
        self.tokens = UploadTokens()
        self._wake: Callable[[], None] = lambda: None

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` when a job was queued or cancelled here."""
        self._wake = wake

    # For tenants.

    def add(self, new: NewCheckpointJob, token: str | None = None) -> CheckpointJob:
        """Queue a job on this server. Raises TooManyRequestsError."""
        job_id, created_at = uuid.uuid4().hex, now()
        columns = {name: getattr(new, name) for name in NewCheckpointJob.__dataclass_fields__}
        row = columns | _queue_columns(created_at) | {"job_id": job_id, "holder": self.holder, "attempt": 1}
        with self._holding_token(job_id, token), self._db.write() as connection:
            self._admit(connection, new.tenant_id)
            connection.execute(CHECKPOINT_JOBS.insert(), row)
            details = {"job_id": job_id, "tinker_path": new.tinker_path, "repository": new.repository}
            connection.execute(entry(new.tenant_id, f"checkpoint_{new.kind}_started", details))
        self._wake()
        return self.get(new.tenant_id, job_id)

    def _admit(self, connection: Connection, tenant_id: str) -> None:
        """Raise TooManyRequestsError if the tenant has as many unfinished jobs as it may have."""
        self._db.lock(connection, f"checkpoint_jobs:{tenant_id}")
        count = sa.select(sa.func.count()).select_from(CHECKPOINT_JOBS)
        unfinished = count.where(CHECKPOINT_JOBS.c.tenant_id == tenant_id, CHECKPOINT_JOBS.c.state.in_(UNFINISHED))
        if int(connection.scalar(unfinished) or 0) >= MAX_UNFINISHED:
            raise TooManyRequestsError(
                f"{MAX_UNFINISHED} merges and uploads of your checkpoints wait or run, which is the limit; wait for "
                "one, or cancel one"
            )

    @contextmanager
    def _holding_token(self, job_id: str, token: str | None) -> Iterator[None]:
        """Keep a typed token for a job, unless the block raises."""
        if token is not None:
            self.tokens.put(job_id, token)
        try:
            yield
        except BaseException:
            self.tokens.take(job_id)
            raise

    def get(self, tenant_id: str, job_id: str) -> CheckpointJob:
        """Raises NotFoundError."""
        row = self._db.first(sa.select(CHECKPOINT_JOBS).where(_is(tenant_id, job_id)))
        if row is None:
            raise NotFoundError(f"checkpoint job {job_id[:80]!a} does not exist")
        return _read(row)

    def page(
        self, tenant_id: str, limit: int, offset: int, tinker_path: str | None = None
    ) -> tuple[list[CheckpointJob], int]:
        """A page of the tenant's jobs (of one checkpoint), newest first, and their total."""
        condition = CHECKPOINT_JOBS.c.tenant_id == tenant_id
        if tinker_path is not None:
            condition &= CHECKPOINT_JOBS.c.tinker_path == tinker_path
        query = sa.select(CHECKPOINT_JOBS).where(condition)
        query = query.order_by(CHECKPOINT_JOBS.c.created_at.desc(), CHECKPOINT_JOBS.c.job_id)
        rows, total = self._db.page(query, limit, offset)
        return [_read(row) for row in rows], total

    def result_bytes(self, tenant_id: str) -> int:
        """The size of all results of merges of the tenant."""
        total = sa.select(sa.func.sum(CHECKPOINT_JOBS.c.size_bytes)).where(
            CHECKPOINT_JOBS.c.tenant_id == tenant_id, CHECKPOINT_JOBS.c.directory.is_not(None)
        )
        return int(self._db.scalar(total) or 0)

    def find_done(self, job_id: str) -> CheckpointJob | None:
        """A job of any tenant with a result, for a signed link."""
        is_done = (CHECKPOINT_JOBS.c.job_id == job_id) & (CHECKPOINT_JOBS.c.state == DONE)
        row = self._db.first(sa.select(CHECKPOINT_JOBS).where(is_done))
        return None if row is None else _read(row)

    def cancel(self, tenant_id: str, job_id: str) -> CheckpointJob:
        """Cancel a job that waits or runs; one that has ended stays as it is."""
        is_job = _is(tenant_id, job_id)
        with self._db.write() as connection:
            cancellation = {"state": CANCELLED, "ended_at": now()}
            is_queued = is_job & (CHECKPOINT_JOBS.c.state == QUEUED)
            connection.execute(CHECKPOINT_JOBS.update().where(is_queued).values(cancellation))
            is_running = is_job & (CHECKPOINT_JOBS.c.state == RUNNING)
            connection.execute(CHECKPOINT_JOBS.update().where(is_running).values(state=CANCELLING))
        job = self.get(tenant_id, job_id)
        if job.state == CANCELLED:
            self.tokens.take(job_id)
        self._wake()
        return job

    def restart(self, tenant_id: str, job_id: str, token: str | None = None) -> CheckpointJob:
        """Queue an ended job without a result again, on this server. Raises UserError for another state."""
        job = self.get(tenant_id, job_id)
        if job.state not in REPEATABLE:
            raise UserError(
                f"the job is {job.state}; only one that failed, was cancelled or was interrupted starts again"
            )
        values = _queue_columns(now()) | {
            "holder": self.holder,
            "attempt": job.attempt + 1,
            "has_token": token is not None,
        }
        del values["created_at"]
        is_attempt = _is(tenant_id, job_id) & (CHECKPOINT_JOBS.c.attempt == job.attempt)
        with self._holding_token(job_id, token), self._db.write() as connection:
            self._admit(connection, tenant_id)
            if not connection.execute(CHECKPOINT_JOBS.update().where(is_attempt).values(**values)).rowcount:
                raise UserError("the job was started again meanwhile")
        self._wake()
        return self.get(tenant_id, job_id)

    def delete(self, tenant_id: str, job_id: str) -> CheckpointJob:
        """Delete the row of an ended job and return it; the caller deletes its files. Raises UserError."""
        job = self.get(tenant_id, job_id)
        if job.state in UNFINISHED:
            raise UserError(f"the job is {job.state}; cancel it before you delete it")
        is_attempt = _is(tenant_id, job_id) & (CHECKPOINT_JOBS.c.attempt == job.attempt)
        with self._db.write() as connection:
            connection.execute(CHECKPOINT_JOBS.delete().where(is_attempt))
            details = {"job_id": job_id, "tinker_path": job.tinker_path}
            connection.execute(entry(tenant_id, f"checkpoint_{job.kind}_deleted", details))
        return job

    # For the server that runs them.

    def recover(self) -> None:
        """Mark this server's jobs that ran when it stopped: a server runs none when it starts."""
        at = now()
        of_server = CHECKPOINT_JOBS.c.holder == self.holder
        update = CHECKPOINT_JOBS.update()
        with self._db.write() as connection:
            for state, ending in (
                (RUNNING, {"state": INTERRUPTED, "reason": RESTARTED}),
                (CANCELLING, {"state": CANCELLED}),
            ):
                connection.execute(
                    update.where(of_server, CHECKPOINT_JOBS.c.state == state).values(**ending, ended_at=at)
                )

    def begin_next(self) -> CheckpointJob | None:
        """Start this server's oldest job that waits; None if none waits."""
        waiting = (CHECKPOINT_JOBS.c.holder == self.holder) & (CHECKPOINT_JOBS.c.state == QUEUED)
        oldest = sa.select(CHECKPOINT_JOBS).where(waiting).order_by(CHECKPOINT_JOBS.c.created_at).limit(1)
        at = now()
        started = {"state": RUNNING, "started_at": at, "reported_at": at, "phase": "reading", "phase_began_at": at}
        with self._db.write() as connection:
            row = connection.execute(oldest.with_for_update()).first()
            if row is None:
                return None
            connection.execute(CHECKPOINT_JOBS.update().where(CHECKPOINT_JOBS.c.job_id == row.job_id).values(**started))
        return CheckpointJob(**{**row._mapping, **started})

    def report(self, job: CheckpointJob, progress: JobProgress) -> str | None:
        """Store the progress of a running job, or of one that is cancelled meanwhile; returns its state, None if this
        attempt is no longer this server's.
        """
        at = now()
        figures = {name: getattr(progress, name) for name in JobProgress.__dataclass_fields__}
        began_at = sa.case((CHECKPOINT_JOBS.c.phase == progress.phase, CHECKPOINT_JOBS.c.phase_began_at), else_=at)
        with self._db.write() as connection:
            connection.execute(
                CHECKPOINT_JOBS.update()
                .where(self._is_attempt(job))
                .values(phase_began_at=began_at, reported_at=at, **figures)
            )
            return connection.scalar(sa.select(CHECKPOINT_JOBS.c.state).where(self._is_attempt(job)))

    def finish(self, job: CheckpointJob, result: JobResult) -> bool:
        """Offer the result of a job; False if it was cancelled before, or is no longer this server's."""
        values = {name: getattr(result, name) for name in JobResult.__dataclass_fields__}
        is_running = self._is_attempt(job) & (CHECKPOINT_JOBS.c.state == RUNNING)
        update = CHECKPOINT_JOBS.update().where(is_running)
        return bool(self._db.execute(update.values(state=DONE, ended_at=now(), reason=None, **values)))

    def end(self, job: CheckpointJob, state: str, reason: str | None = None) -> None:
        """End a job without a result."""
        update = CHECKPOINT_JOBS.update().where(self._is_attempt(job))
        self._db.execute(update.values(state=state, reason=reason, ended_at=now()))

    def list_results(self) -> set[str]:
        """The ids of all jobs whose results are offered, by any server."""
        is_result = (CHECKPOINT_JOBS.c.state == DONE) & CHECKPOINT_JOBS.c.directory.is_not(None)
        return set(self._db.scalars(sa.select(CHECKPOINT_JOBS.c.job_id).where(is_result)))

    def list_running_elsewhere(self) -> set[str]:
        """The ids of unfinished jobs of other servers."""
        is_elsewhere = (CHECKPOINT_JOBS.c.holder != self.holder) & CHECKPOINT_JOBS.c.state.in_(UNFINISHED)
        return set(self._db.scalars(sa.select(CHECKPOINT_JOBS.c.job_id).where(is_elsewhere)))

    def _is_attempt(self, job: CheckpointJob) -> sa.ColumnElement[bool]:
        return (
            (CHECKPOINT_JOBS.c.job_id == job.job_id)
            & (CHECKPOINT_JOBS.c.holder == self.holder)
            & (CHECKPOINT_JOBS.c.attempt == job.attempt)
            & CHECKPOINT_JOBS.c.state.in_((RUNNING, CANCELLING))
        )


def _queue_columns(at: float) -> dict[str, Any]:
    """The columns of a job that waits from now on."""
    times = {"created_at": at, "reported_at": at, "phase_began_at": at, "started_at": None, "ended_at": None}
    empty = {"reason": None, "directory": None, "files": None, "size_bytes": None, "url": None}
    return {"state": QUEUED, "phase": "waiting", **_FIGURES, **times, **empty}


def _is(tenant_id: str, job_id: str) -> sa.ColumnElement[bool]:
    return (CHECKPOINT_JOBS.c.tenant_id == tenant_id) & (CHECKPOINT_JOBS.c.job_id == job_id)


def _read(row: Any) -> CheckpointJob:  # noqa: ANN401  a row of the table
    """The job of a row. One that runs without reports counts as ended: its server may never come back."""
    columns = dict(row._mapping)
    if columns["state"] in (RUNNING, CANCELLING) and now() - columns["reported_at"] > SILENCE_S:
        is_running = columns["state"] == RUNNING
        columns |= {"state": INTERRUPTED, "reason": RESTARTED} if is_running else {"state": CANCELLED}
    return CheckpointJob(**columns)
