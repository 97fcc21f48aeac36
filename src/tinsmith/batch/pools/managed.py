"""Machines of managed pools: each bulk job of such a pool has a managed job of SkyPilot that runs it and ends with it.

The server stores nothing about them. A managed job bears the name of its bulk job (`ManagedMachines.name_of`), and
SkyPilot's queue has its status; `reconcile` compares both sides and changes what differs.

- A bulk job without a managed job gets one. Without jobs there are no machines.
- SkyPilot replaces a machine that it loses. The job continues from its rows there, and no row fails by it.
- The end of a bulk job ends its managed job. A managed job that was cancelled in SkyPilot cancels its bulk job, and one
  that failed fails it.

One process at a time reconciles (a lock in the database). A launch that was repeated after a crash starts a second
machine, which finds the job taken or ended and ends with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from tinsmith.batch.coordinator.rows import JobRecord
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.pools.specs import skypilot_task
from tinsmith.errors import SettingsError
from tinsmith.settings import Settings

RECONCILE_S = 5.0
MAX_STARTS = 4
"""Machines that a job may have had that ended by themselves before it did."""
GRACE_S = 60.0
"""How long a machine may take to end by itself once its job has ended."""
LEASE_S = 60.0
FIELDS = ["job_id", "job_name", "status", "failure_reason"]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ManagedJob:
    """A managed job in SkyPilot's queue, with the `reason` if it failed."""

    job_id: int
    name: str
    status: str
    has_ended: bool
    reason: str


class SkyPilot:
    """The used calls of SkyPilot's Python API (0.14.1). They block until SkyPilot has done what they ask."""

    def __init__(self) -> None:
        try:
            self._sky = importlib.import_module("sky")
        except ImportError:
            raise SettingsError("a managed pool needs SkyPilot; pip install skypilot where the server runs") from None

    def list_jobs(self, prefix: str) -> list[ManagedJob]:
        """The managed jobs whose names begin with a prefix, oldest first."""
        sky = self._sky
        try:
            records = sky.get(sky.jobs.queue_v2(refresh=True, fields=FIELDS, name_match=prefix))[0]
        except sky.exceptions.ClusterNotUpError:  # nothing was ever launched
            return []
        jobs = [
            ManagedJob(
                record.job_id,
                record.job_name,
                record.status.value,
                record.status.is_terminal(),
                record.failure_reason or "",
            )
            for record in records
            if record.status is not None and (record.job_name or "").startswith(prefix)
        ]
        return sorted(jobs, key=lambda job: job.job_id)

    def launch(self, name: str, task: Mapping[str, object], secrets: Mapping[str, str]) -> None:
        sky_task = self._sky.Task.from_yaml_config(dict(task), secrets_overrides=list(secrets.items()))
        self._sky.get(self._sky.jobs.launch(sky_task, name=name))

    def cancel(self, job_ids: Sequence[int]) -> None:
        self._sky.get(self._sky.jobs.cancel(job_ids=list(job_ids)))


class ManagedMachines:
    """`pools` are the files of the managed pools by name."""

    def __init__(self, pools: Mapping[str, Path], jobs: BatchJobs, settings: Settings, holder: str) -> None:
        if settings.resolved_database_url.startswith("sqlite") or not settings.has_bucket:
            raise SettingsError(
                f"the machines of the managed pools {sorted(pools)} need the server's Postgres and bucket; set "
                "TINSMITH_DATABASE_URL and TINSMITH_STORAGE_DIR"
            )
        secret = settings.signing_secret.get_secret_value()
        if not secret:
            raise SettingsError(f"the machines of the managed pools {sorted(pools)} need TINSMITH_SIGNING_SECRET")
        self._pools = pools
        self._jobs = jobs
        self._envs = task_envs(settings)
        self._secrets = {"TINSMITH_DATABASE_URL": settings.database_url, "TINSMITH_SIGNING_SECRET": secret}
        # Of other servers' managed jobs in the same account, nothing is read or cancelled.
        self._prefix = f"tinsmith-{hashlib.sha256(secret.encode()).hexdigest()[:8]}-"
        self._holder = holder
        self._token = uuid.uuid4().hex
        self._sky = SkyPilot()
        self._unneeded: dict[int, float] = {}  # managed jobs whose bulk jobs have ended, and since when

    async def run(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self.reconcile)
            except Exception as error:  # noqa: BLE001  SkyPilot's own; tried again
                log.error("the machines of managed pools cannot be looked after; trying again", error=repr(error))
            await asyncio.sleep(RECONCILE_S)

    def name_of(self, job: JobRecord) -> str:
        """The name of a bulk job's managed job, unique also among databases that begin to count again."""
        return f"{self._prefix}{job.job_id}-{int(job.created_at):x}"

    def reconcile(self) -> None:
        with self._jobs.hold_machines_lock() as is_locked:
            if not is_locked:
                return
            jobs = {self.name_of(job): job for job in self._jobs.active_in(list(self._pools))}
            managed = self._sky.list_jobs(self._prefix)
            for name, job in jobs.items():
                self._reconcile_job(job, name, [managed_job for managed_job in managed if managed_job.name == name])
            self._end_unneeded(
                [managed_job for managed_job in managed if managed_job.name not in jobs and not managed_job.has_ended]
            )

    def _reconcile_job(self, job: JobRecord, name: str, managed: Sequence[ManagedJob]) -> None:
        if job.status == "CANCELLING" or any(not managed_job.has_ended for managed_job in managed):
            return
        last = managed[-1] if managed else None
        if last is not None and last.status == "CANCELLED":
            log.info("a bulk job is cancelled, as its managed job was", job_id=job.job_id, managed_job=last.job_id)
            self._jobs.cancel(job.tenant_id, job.job_id)
        elif last is not None and (last.status != "SUCCEEDED" or len(managed) >= MAX_STARTS):
            outcome = f"ended {last.status}{f': {last.reason}' if last.reason else ''}"
            self._fail(job, f"SkyPilot's managed job {last.job_id} {outcome}; see `sky jobs logs {last.job_id}`")
        else:
            log.info("starting machines for a bulk job", job_id=job.job_id, managed_job=name)
            task = skypilot_task(job.pool, self._pools[job.pool], None, {**self._envs, "BATCH_JOB": str(job.job_id)})
            self._sky.launch(name, {**task, "name": name}, self._secrets)

    def _fail(self, job: JobRecord, reason: str) -> None:
        """Fail a bulk job, once the lease of its machine's coordinator has ended."""
        if self._jobs.acquire_batch_coordinator(job.job_id, self._token, self._holder, LEASE_S):
            log.error("a bulk job failed with its machine", job_id=job.job_id, error=reason)
            self._jobs.set_status(job.job_id, self._token, "FAILED", reason)

    def _end_unneeded(self, managed: Sequence[ManagedJob]) -> None:
        at = time.monotonic()
        self._unneeded = {managed_job.job_id: self._unneeded.get(managed_job.job_id, at) for managed_job in managed}
        ending = [
            managed_job.job_id
            for managed_job in managed
            if managed_job.status != "CANCELLING"
            and (managed_job.status != "RUNNING" or at - self._unneeded[managed_job.job_id] >= GRACE_S)
        ]
        if ending:
            self._sky.cancel(ending)


def task_envs(settings: Settings) -> dict[str, str]:
    """The settings that a rented machine shares with the server, apart from secrets."""
    envs = {"MODELS": json.dumps(settings.models)} if settings.models else {}
    return envs | ({"STORAGE_DIR": settings.storage_dir} if settings.has_bucket else {})
