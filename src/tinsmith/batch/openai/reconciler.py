"""Moves every OpenAI batch from one status to the next, by its input file, its bulk job and its result files.

A task on the server's event loop takes one step with each batch that has not ended, once a second or when it is woken,
on a worker thread; tenants alternate, and so do servers that share a database. It runs no requests itself, and a step
that a crash interrupted is repeated.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.batch.coordinator.rows import JobRecord
from tinsmith.batch.coordinator.state import ACTIVE, BatchJobs
from tinsmith.batch.formats.openai import OpenAIBatchReader, OpenAIBatchWriter
from tinsmith.batch.openai import MAX_REQUESTS
from tinsmith.batch.openai.requests import Problem, check_file
from tinsmith.batch.openai.results import Tally, error_lines, results_of, success_lines, tally_lines
from tinsmith.batch.openai.rows import Batch, OpenAIBatches, ResultsFile
from tinsmith.batch.operations import payload_of
from tinsmith.batch.operations.sample import OpenAIRequest
from tinsmith.batch.types import JobSpec, Limits
from tinsmith.db.database import now
from tinsmith.errors import CorruptFilesError, NotFoundError
from tinsmith.runtime.background import Background, within
from tinsmith.runtime.failpoints import hit
from tinsmith.settings import Settings
from tinsmith.storage.locations import open_store
from tinsmith.storage.stores import LocalStore, join, make_private
from tinsmith.store.files import Files, StoredBytes, derive_id

POLL_S = 1.0
SWEEP_S = 3600.0
RETENTION_S = 30 * 86400
MAX_BATCH_SIZE = 32
"""Requests in one batch of the bulk job, which are repeated if its worker dies."""
CONCURRENT_BATCHES = 16
"""Batches of the bulk job that each worker runs at a time."""
GRACE_S = 0.5
"""The time in which a worker of a cancelled job may end by itself; an operation has nothing to clean up."""
MIN_BATCHES = 8
"""The least number of batches of the bulk job, given enough requests, so that all workers get some."""

UNDONE_ERRORS = {
    "expired": {"code": "batch_expired", "message": "the batch's window ended before this request was done"},
    "cancelled": {"code": "batch_cancelled", "message": "the batch was cancelled before this request was done"},
    "failed": {"code": "batch_failed", "message": "the batch failed before this request was done"},
    "completed": {"code": "request_failed", "message": "this request has no result"},
}

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ReconcilerParts:
    """A reconciler's dependencies. `wake_job` notifies the coordinator of a new or cancelled bulk job."""

    batches: OpenAIBatches
    files: Files
    jobs: BatchJobs
    wake_job: Callable[[int | None], None]
    try_lock: Callable[[], AbstractContextManager[bool]] = lambda: nullcontext(True)
    """Yields whether this process is the only one that reconciles batches in the block."""


class Reconciler:
    def __init__(self, settings: Settings, parts: ReconcilerParts) -> None:
        self._settings = settings
        self._parts = parts
        self._root = settings.storage_location("openai_batches")
        self._due = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._threads: Executor | None = None
        self._stopping = threading.Event()
        self._next_sweep = 0.0

    def start(self, background: Background, threads: Executor | None = None) -> None:
        """Start the reconciler's task. Call on the running event loop; steps run on `threads`."""
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._task = background.start("openai_batches", self._run)

    async def stop(self) -> None:
        """End the task after its current step."""
        self._stopping.set()
        self._due.set()
        if self._task is not None:
            await self._task

    def wake(self) -> None:
        """Take the next steps soon: a batch is new or was cancelled. On any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._due.set)

    async def _run(self) -> None:
        while not self._stopping.is_set():
            self._due.clear()
            try:
                await asyncio.get_running_loop().run_in_executor(self._threads, self.reconcile)
            except SQLAlchemyError as error:
                log.error("OpenAI batches cannot be read; the next step tries again", error=repr(error))
            await within(POLL_S, self._due.wait())

    def reconcile(self) -> None:
        """Take one step with every batch."""
        active = self._parts.batches.active()
        if not active and time.monotonic() < self._next_sweep:
            return
        with self._parts.try_lock() as is_locked:
            if not is_locked:
                return
            for batch in round_robin(active):
                if self._stopping.is_set():
                    return
                try:
                    self._step(batch)
                except Exception as error:
                    log.error("a step of an OpenAI batch failed", batch_id=batch.batch_id, exc_info=error)
            if time.monotonic() >= self._next_sweep:
                self._next_sweep = time.monotonic() + SWEEP_S
                self._sweep()

    def _step(self, batch: Batch) -> None:
        if batch.status == "validating":
            self._validate(batch)
            return
        # A crash may have come between the creation of the bulk job and the update of the batch.
        job_id = batch.job_id if batch.job_id is not None else self._parts.batches.job_of(batch)
        job = None if job_id is None else self._parts.jobs.find(batch.tenant_id, job_id)
        if job is None or job.status not in ACTIVE:
            self._end(batch, job)
        else:
            self._follow(batch, job)

    # Start.

    def _validate(self, batch: Batch) -> None:
        if now() >= batch.expires_at:
            self._parts.batches.move(batch, ("validating",), status="expiring", finalizing_at=now())
            return
        try:
            path = self._input(batch)
        except NotFoundError as error:
            self._refuse(batch, [Problem("file_not_found", "input_file_id", str(error))])
            return
        store, key = open_store(path)
        with store.open(key) as file:
            checked = check_file(file, store.head(key).size, self._settings.max_body_bytes, (batch.endpoint,))
        if checked.problems:
            self._refuse(batch, checked.problems)
            return
        hit("openai.validated")
        job_id = self._parts.batches.job_of(batch)
        if job_id is None:
            job_id = self._parts.jobs.create(batch.tenant_id, self._spec(batch, checked.total))
        hit("openai.submitted")
        start = {"status": "in_progress", "in_progress_at": now()}
        job_values = {"job_id": job_id, "total": checked.total, "model": checked.model}
        if not self._parts.batches.move(batch, ("validating",), **start, **job_values):
            # It was cancelled meanwhile: the next step ends the job.
            self._parts.batches.move(batch, ("cancelling",), **job_values)
        self._parts.wake_job(None)

    def _input(self, batch: Batch) -> str:
        """Link the input under a name of the batch's own, so that its file may be deleted. Raises NotFoundError."""
        location = join(self._directory(batch), "input.jsonl")
        store, key = open_store(location)
        if not store.exists(key):
            file = self._parts.files.find(batch.tenant_id, batch.input_file_id)
            if isinstance(store, LocalStore):
                make_private(Path(self._directory(batch)))
            try:
                self._parts.files.share(file.file_id, location)
            except FileNotFoundError:
                raise NotFoundError(f"file {file.file_id!a} was deleted") from None
        return location

    def _refuse(self, batch: Batch, problems: Sequence[Problem]) -> None:
        errors = [problem._asdict() for problem in problems]
        self._parts.batches.end(batch, [], status="failed", errors=errors)
        log.info("OpenAI batch", batch_id=batch.batch_id, status="failed", problems=len(problems))
        self._discard(batch)

    def _spec(self, batch: Batch, total: int) -> JobSpec:
        directory = self._directory(batch)
        outputs = [
            OpenAIBatchWriter(join(directory, "output.jsonl"), keep="succeeded"),
            OpenAIBatchWriter(join(directory, "failed.jsonl"), keep="failed"),
        ]
        return JobSpec(
            batch_serialized_fn=payload_of([OpenAIRequest()]),
            batch_input_format=OpenAIBatchReader(join(directory, "input.jsonl")).to_dict(),
            batch_output_formats=[output.to_dict() for output in outputs],
            batch_size=min(MAX_BATCH_SIZE, max(1, total // MIN_BATCHES)),
            name=batch.batch_id,
            max_concurrent_batches=CONCURRENT_BATCHES,
            max_failed_rows=MAX_REQUESTS,
            if_exists="overwrite",
            roots=[directory],
            limits=Limits(batch_timeout_s=max(batch.expires_at - now(), 0.0) + 3600, grace_s=GRACE_S),
        )

    # Progress.

    def _follow(self, batch: Batch, job: JobRecord) -> None:
        batches, jobs = self._parts.batches, self._parts.jobs
        if batch.status in ("cancelling", "expiring"):
            if job.status != "CANCELLING":
                jobs.cancel(batch.tenant_id, job.job_id)
                self._parts.wake_job(job.job_id)
            return
        if job.rows_ok + job.rows_failed != batch.completed + batch.failed:
            part_lists = (committed.parts for committed in jobs.iter_committed_batches(job.job_id))
            completed = sum(parts[0]["rows"] for parts in part_lists if parts)
            failed = max(job.rows_ok + job.rows_failed - completed, 0)
            batches.move(batch, (batch.status,), completed=completed, failed=failed)
        if job.status == "CANCELLING":  # cancelled as a bulk job
            batches.move(batch, (batch.status,), status="cancelling", cancelling_at=now())
        elif job.status == "WINDING_DOWN":
            batches.move(batch, ("in_progress",), status="finalizing", finalizing_at=now())
        elif now() >= batch.expires_at:
            batches.move(batch, ("in_progress",), status="expiring", finalizing_at=now())

    # End.

    def _end(self, batch: Batch, job: JobRecord | None) -> None:
        status = final_status(batch, job)
        if status == "completed" and batch.status == "in_progress":
            if not self._parts.batches.move(batch, ("in_progress",), status="finalizing", finalizing_at=now()):
                return  # it was cancelled meanwhile
            batch = replace(batch, status="finalizing")
        values: dict[str, object] = {"status": status}
        if status == "failed" and job is not None:
            values["errors"] = [{"code": "batch_failed", "line": None, "message": job.error, "param": None}]
        succeeded, failed = Tally(), Tally()
        try:
            files = self._files(batch, job, status, succeeded, failed)
        except (CorruptFilesError, NotFoundError) as error:
            problem = {"code": "server_error", "line": None, "message": str(error), "param": None}
            values |= {"status": "failed", "errors": [problem]}
            files = {}
        hit("openai.written")
        values |= {f"{name}_file_id": file.stored.file_id for name, file in files.items()}
        values |= {"completed": succeeded.lines, "failed": failed.lines, "usage": succeeded.usage()}
        if self._parts.batches.end(batch, list(files.values()), **values):
            log.info("OpenAI batch", batch_id=batch.batch_id, status=values["status"])
        hit("openai.ended")
        self._discard(batch)

    def _files(
        self, batch: Batch, job: JobRecord | None, status: str, succeeded: Tally, failed: Tally
    ) -> dict[str, ResultsFile]:
        """Write the output and the error file; returns those that are not empty. Raises CorruptFilesError,
        NotFoundError."""
        results = results_of(self._parts.jobs, job, batch.total)
        path = self._input(batch) if results.missing else join(self._directory(batch), "input.jsonl")
        max_line_bytes, undone_error = self._settings.max_body_bytes, UNDONE_ERRORS[status]
        sources = {
            "output": (success_lines(results), succeeded),
            "error": (error_lines(results, batch.batch_id, path, max_line_bytes, undone_error), failed),
        }
        retention_s = RETENTION_S if batch.output_expires_s is None else batch.output_expires_s
        files: dict[str, ResultsFile] = {}
        for name, (lines, tally) in sources.items():
            stored: StoredBytes = self._parts.files.store(derive_id(batch.batch_id, name), tally_lines(lines, tally))
            if stored.size_bytes:
                files[name] = ResultsFile(stored, f"{batch.batch_id}_{name}.jsonl", retention_s)
            else:
                self._parts.files.discard(stored.file_id)
        return files

    def _directory(self, batch: Batch) -> str:
        return join(self._root, batch.batch_id)

    def _discard(self, batch: Batch) -> None:
        store, key = open_store(self._directory(batch))
        store.delete_below(key)

    def _sweep(self) -> None:
        """Delete directories of batches that ended right before a crash."""
        store, root = open_store(self._root)
        directories = {key[len(root) + 1 :].partition("/")[0] for key in store.list(root)}
        active = {batch.batch_id for batch in self._parts.batches.active()}  # read after the directories were listed
        for name in directories - active:
            store.delete_below(join(root, name))


def final_status(batch: Batch, job: JobRecord | None) -> str:
    """The final status of a batch whose bulk job has ended, or was never created."""
    if batch.status == "cancelling":
        return "cancelled"
    if batch.status == "expiring" and (job is None or job.status != "SUCCEEDED"):
        return "expired"
    if job is None:
        return "failed"
    return {"SUCCEEDED": "completed", "CANCELLED": "cancelled"}.get(job.status, "failed")


def round_robin(batches: Sequence[Batch]) -> Iterator[Batch]:
    """The batches in the order of their steps: the first of every tenant, then the second of every tenant, and so
    on."""
    by_tenant: dict[str, list[Batch]] = {}
    for batch in batches:
        by_tenant.setdefault(batch.tenant_id, []).append(batch)
    for turn in zip_longest(*by_tenant.values()):
        yield from (batch for batch in turn if batch is not None)
