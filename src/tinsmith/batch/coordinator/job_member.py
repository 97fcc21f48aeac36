"""One bulk job that another process owns and whose batches this one runs, too.

A `JobMember` gives the job the slots of its machine. It has no plan and no output: it claims batches and commits their
results until none is pending or the job does not run any more. Whatever goes wrong here ends this member alone: its
batches go back to the others, and the owner decides about the job.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from tinsmith.batch.coordinator.job_run import JobRun
from tinsmith.batch.coordinator.rows import JobRecord
from tinsmith.batch.coordinator.workers import FatalJobError
from tinsmith.batch.types import JobSpec

log = structlog.get_logger()


def is_shareable(spec: JobSpec) -> bool:
    """Whether several machines may run a job together. The rate limits of a job are kept by one process."""
    return spec.requests_per_minute is None and spec.tokens_per_minute is None


class JobMember(JobRun):
    gave_up = False
    """Whether this machine could not set the job's function up, or failed in another way that the job survives."""

    async def _run(self) -> None:
        self._dispatching = True
        self._on_change()
        await self._dispatch_ended.wait()
        await self._stop_serving()
        if isinstance(self._reason, FatalJobError):
            self.gave_up = True
            log.warning("this machine leaves a bulk job to others", job_id=self.job.job_id, reason=str(self._reason))
        elif self._reason is not None:
            raise self._reason

    def _check_row(self) -> None:
        if self.job.status != "RUNNING":
            self.end()
        super()._check_row()

    def _renew_leases(self, batches: Sequence[int]) -> JobRecord:
        return self._jobs.members.renew(self.job.job_id, self._token, self._limits.lease_s, batches)

    def _release(self) -> None:
        self._jobs.members.leave(self.job.job_id, self._token)

    async def _store_hosts(self) -> None:
        """Nothing: the row lists the owner's machines, and a member whose machines all fail leaves the job."""
