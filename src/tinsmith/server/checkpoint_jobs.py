"""Runs checkpoint jobs of this server, one after another, each in a child process (`exchange.checkpoint_job`).

One thread starts a job's child, stores what it reports, and ends it when the job is cancelled or the server stops. The
result of a merge is a directory below `root` with the job's id as its name. Whatever else is there, such as what a
killed server left behind, is deleted at the start.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.api.services import Services
from tinsmith.errors import CorruptFilesError, TinsmithError
from tinsmith.settings.environment import hub_environment, hub_token
from tinsmith.storage.stores import make_private
from tinsmith.store.checkpoint_jobs import (
    CANCELLED,
    CANCELLING,
    FAILED,
    INTERRUPTED,
    LOST_TOKEN,
    RESTARTED,
    UPLOAD,
    CheckpointJob,
    JobProgress,
    JobResult,
)
from tinsmith.store.checkpoints import Checkpoint, parse_path

MODULE = "tinsmith.exchange.checkpoint_job"
LOG_FILE = "checkpoint_jobs.log"
POLL_S = 1.0
"""The interval of reports of a running job, and of looks whether it was cancelled."""

IDLE_POLL_S = 30.0
"""How long a queued job waits at most if its wake-up was lost."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Messages:
    """What a child has reported last."""

    progress: JobProgress = field(default_factory=lambda: JobProgress("reading"))
    result: JobResult | None = None
    error: str | None = None

    def read(self, lines: IO[str], wake: Callable[[], None]) -> None:
        for line in lines:
            message = json.loads(line)
            if "phase" in message:
                self.progress = JobProgress(**message)
            elif "result" in message:
                self.result = JobResult(**message["result"])
            else:
                self.error = message["error"]
        wake()


class CheckpointJobRunner:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._jobs = services.checkpoint_jobs
        self._root = services.settings.merged_directory
        self._log_path = services.settings.resolved_data_dir / LOG_FILE
        self._woken, self._stopping = threading.Event(), threading.Event()

    async def run(self) -> None:
        """Run jobs on a thread until cancelled, which ends the running one."""
        self._stopping.clear()
        self._jobs.on_change(self._woken.set)
        thread = ThreadPoolExecutor(1, "checkpoint_jobs")
        try:
            await asyncio.get_running_loop().run_in_executor(thread, self._run_jobs)
        finally:
            self._stopping.set()
            self._woken.set()
            await asyncio.to_thread(thread.shutdown)

    def _run_jobs(self) -> None:
        self._jobs.recover()
        self._delete_leftovers()
        while not self._stopping.is_set():
            self._woken.clear()
            job = self._jobs.begin_next()
            if job is None:
                self._woken.wait(IDLE_POLL_S)
                continue
            log.info("checkpoint job started", job_id=job.job_id, kind=job.kind, path=job.tinker_path)
            self._run_job(job)

    def _delete_leftovers(self) -> None:
        """Delete directories that no job offers. Those of other servers that share the root may be in the making."""
        paths = list(self._root.iterdir()) if self._root.is_dir() else []  # before the rows are read
        referenced = self._jobs.list_results() | self._jobs.list_running_elsewhere()
        for path in paths:
            if path.name.lstrip(".").partition(".")[0] not in referenced:
                log.info("what an interrupted checkpoint job left is deleted", directory=str(path))
                shutil.rmtree(path, ignore_errors=True)

    def _run_job(self, job: CheckpointJob) -> None:
        """Run one job to its end, whatever happens to it."""
        output = self._root / (f".{job.job_id}" if job.kind == UPLOAD else job.job_id)
        is_done = False
        try:
            token = self._find_token(job)
            checkpoint = self._find_checkpoint(job)
            with self._services.checkpoints.reading(checkpoint) as adapter:
                base = self._services.bases.get(job.base_model).path
                spec = {
                    **{name: getattr(job, name) for name in ("kind", "form", "dtype", "base_model", "tinker_path")},
                    **{"base": base, "adapter": str(adapter), "output": str(output)},
                    **{"repository": job.repository or "", "private": job.private, "token": token},
                }
                is_done = self._supervise(job, json.dumps(spec))
        except (_InterruptedJobError, TinsmithError, OSError) as error:
            state = INTERRUPTED if isinstance(error, _InterruptedJobError) else FAILED
            if isinstance(error, CorruptFilesError):
                log.error("a checkpoint job read damaged files", job_id=job.job_id, error=str(error))
            self._jobs.end(job, state, str(error))
        finally:
            if job.kind == UPLOAD or not is_done:
                self._discard(output)

    def _find_token(self, job: CheckpointJob) -> str:
        if job.kind != UPLOAD:
            return ""
        token = self._jobs.tokens.take(job.job_id)
        if token is None and job.has_token:
            raise _InterruptedJobError(LOST_TOKEN)
        return token or hub_token()

    def _find_checkpoint(self, job: CheckpointJob) -> Checkpoint:
        return self._services.checkpoints.get(job.tenant_id, parse_path(job.tinker_path))

    def _supervise(self, job: CheckpointJob, spec: str) -> bool:
        """Run the job's process; returns whether its result is offered, False if it was cancelled. Raises
        _InterruptedJobError and _FailedJobError.
        """
        make_private(self._root)
        with self._log_path.open("a") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=hub_environment(),
                text=True,
                start_new_session=True,
            )
        assert process.stdin is not None and process.stdout is not None
        messages = _Messages()
        reader = threading.Thread(target=messages.read, args=(process.stdout, self._woken.set), daemon=True)
        try:
            reader.start()
            with suppress(BrokenPipeError):  # it has ended already, which is seen below
                process.stdin.write(spec + "\n")
                process.stdin.flush()
            if not self._follow(job, messages, reader):
                return False
        finally:
            process.kill()
            process.wait()
            reader.join()
            process.stdin.close()
            process.stdout.close()
        if messages.result is not None:
            if self._jobs.finish(job, messages.result):
                return True
            self._jobs.end(job, CANCELLED)
            return False
        raise _FailedJobError(messages.error or _explain_end(process.returncode, self._log_path))

    def _follow(self, job: CheckpointJob, messages: _Messages, reader: threading.Thread) -> bool:
        """Store the reports of a process until it ends; False if the job was cancelled or taken over."""
        while reader.is_alive():
            self._woken.wait(POLL_S)
            self._woken.clear()
            if self._stopping.is_set():
                raise _InterruptedJobError(RESTARTED)
            try:
                state = self._jobs.report(job, messages.progress)
            except SQLAlchemyError as error:
                log.warning("the progress of a checkpoint job was not stored; trying again", error=repr(error))
                continue
            if state == CANCELLING:
                self._jobs.end(job, CANCELLED)
            if state in (CANCELLING, None):
                return False
        return True

    def _discard(self, output: Path) -> None:
        """Delete what a job wrote, also under the hidden name that a merge has until its last step."""
        for path in (output, *self._root.glob(f".{output.name}.*")):
            shutil.rmtree(path, ignore_errors=True)


class _InterruptedJobError(Exception):
    """The job did not fail by itself, and may be started again."""


class _FailedJobError(TinsmithError):
    """The job's process ended without a result."""


def _explain_end(status: int, log_path: Path) -> str:
    if status == -signal.SIGKILL:
        return "the job's process was killed, probably because the host ran out of memory; try again when it does less"
    return f"the job's process ended with status {status}; the server's {log_path.name} says why"
