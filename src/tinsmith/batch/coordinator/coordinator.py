"""The coordinator of bulk jobs: takes jobs without an owner and lends them the slots of the pools.

It runs on the server's event loop, with one `JobRun` for each job that it owns, one `JobMember` for each job of another
coordinator in whose work it shares, and one task for each slot of each pool.
It runs no user code and loads no format library: workers do. A server that dies leaves rows. The next server on its
data directory takes its jobs at once; another server takes them when their leases have expired.

A job cannot stop other jobs. An unexpected error of this coordinator while it runs a job counts against that job: the
coordinator takes the job again after a growing pause, and fails it after `MAX_FAILURES` errors. Errors of the database
count against no job.
A job whose specification cannot be read fails at once.

Jobs share a pool by weight. Each has a virtual time: the seconds that slots worked for it, divided by its weight. A
free slot goes to the job with the least virtual time among those of the highest priority, but first to one that has
fewer slots than its minimum, and no job of its priority takes these from it. A new job begins with the least virtual
time present, so that it has no claim on the time before it came.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.batch import permissions
from tinsmith.batch.coordinator.job_member import JobMember, is_shareable
from tinsmith.batch.coordinator.job_run import JobRun, JobServices, clean
from tinsmith.batch.coordinator.model_gateway import ModelGateway
from tinsmith.batch.coordinator.rows import JobRecord, is_transient
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.coordinator.workers import RemoteWorker, temporary_worker
from tinsmith.batch.pools.devices import devices_of, engine_positions
from tinsmith.batch.pools.local import LocalPool
from tinsmith.batch.pools.specs import LOCAL, RAY, Pool, PoolSpec, max_job_workers, read_pool
from tinsmith.batch.secrets import SecretFiles
from tinsmith.batch.types import DEFAULT_POOL, JobSpec
from tinsmith.batch.worker.logs import JobLogs
from tinsmith.db.database import now
from tinsmith.errors import NotFoundError, SettingsError, UserError
from tinsmith.runtime.background import Background, within
from tinsmith.settings import Settings

if TYPE_CHECKING:
    from tinsmith.batch.pools.managed import ManagedMachines
    from tinsmith.batch.pools.ray import Driver

POLL_S = 1.0
"""Interval of looking for jobs that other processes stored or cancelled."""
REJOIN_S = 60.0
"""How long a machine that has left a running job to others stays away from it."""
SWEEP_S = 60.0
QUANTUM_S = 0.2
EXCLUSIVE_QUANTUM_S = 30.0
"""How long a slot works for one job before another may have it. With accelerators, each change loads a model."""
FIRST_LEASE_S = 60.0
DAY_S = 86400
MAX_FAILURES = 5
MAX_PAUSE_S = 60.0
CLEAN_AGAIN_S = 600.0
"""The pause after a failed deletion of a job's parts."""

log = structlog.get_logger()


@dataclass(slots=True)
class JobShare:
    """The share of one job in the slots of a pool."""

    weight: float
    priority: int
    min_slots: int = 0
    virtual_s: float = 0.0
    slot_starts: dict[int, float] = field(default_factory=dict)
    """When each slot that the job holds began to work for it."""

    @property
    def lacks_slots(self) -> bool:
        return len(self.slot_starts) < self.min_slots

    def virtual_time(self, now: float, quantum_s: float) -> float:
        """The virtual time with that of the slots that the job holds; a slot counts as a quantum from its start."""
        slot_s = sum(max(now - since, 0.0) + quantum_s for since in self.slot_starts.values())
        return self.virtual_s + slot_s / self.weight


class FairShare:
    """Decides which job a slot works for. Without I/O."""

    def __init__(self, clock: Callable[[], float], quantum_s: float) -> None:
        self._clock = clock
        self._quantum_s = quantum_s
        self._shares: dict[int, JobShare] = {}

    def join(self, job_id: int, weight: float, priority: int, min_slots: int = 0) -> None:
        now = self._clock()
        least = min((share.virtual_time(now, 0.0) for share in self._shares.values()), default=0.0)
        self._shares[job_id] = JobShare(weight, priority, min_slots, least)

    def leave(self, job_id: int) -> None:
        self._shares.pop(job_id, None)

    def acquire(self, job_id: int, slot: int) -> None:
        self._shares[job_id].slot_starts[slot] = self._clock()

    def release(self, job_id: int, slot: int) -> None:
        share = self._shares.get(job_id)
        if share is not None and slot in share.slot_starts:
            share.virtual_s += (self._clock() - share.slot_starts.pop(slot)) / share.weight

    def choose(self, runnable: Iterable[int]) -> int | None:
        """The job that the next free slot works for."""
        now = self._clock()

        def order(job_id: int) -> tuple[float, bool, float, int]:
            share = self._shares[job_id]
            return -share.priority, not share.lacks_slots, share.virtual_time(now, self._quantum_s), job_id

        return min(runnable, key=order, default=None)

    def should_yield(self, job_id: int, slot: int, rival_ids: Iterable[int]) -> bool:
        """Whether a slot should leave a job for a rival, which has a higher priority, or lacks slots or is a quantum
        behind a job that has more than its minimum."""
        share = self._shares.get(job_id)
        if share is None or slot not in share.slot_starts:
            return True
        now = self._clock()
        if now - share.slot_starts[slot] < self._quantum_s:
            return False
        for rival in (self._shares[rival_id] for rival_id in rival_ids):
            if rival.priority > share.priority:
                return True
            if len(share.slot_starts) <= share.min_slots:
                continue
            if rival.priority == share.priority and rival.lacks_slots:
                return True
            lead_s = share.virtual_time(now, self._quantum_s) - rival.virtual_time(now, self._quantum_s)
            if rival.priority == share.priority and lead_s * min(share.weight, rival.weight) > self._quantum_s:
                return True
        return False


class _PoolSlots:
    """The slots of one pool, and the jobs that want them."""

    def __init__(self, pool: Pool, background: Background) -> None:
        self.pool = pool
        self.runs: dict[int, JobRun] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._background = background
        self._changed = asyncio.Event()
        self._fair_share = FairShare(time.monotonic, EXCLUSIVE_QUANTUM_S if pool.spec.exclusive else QUANTUM_S)

    def resize(self, spec: PoolSpec) -> None:
        """Set the number of slots; excess slots end after their current batches."""
        self.pool.spec = spec
        for slot in range(spec.slots):
            if slot not in self.tasks:
                serve_slot = partial(self._serve, slot)
                self.tasks[slot] = self._background.start("batch_slot", serve_slot, pool=spec.name, slot=slot)
        self.wake()

    def wake(self) -> None:
        self._changed.set()

    def join(self, run: JobRun) -> None:
        self.runs[run.job.job_id] = run
        self._fair_share.join(run.job.job_id, run.job.weight, run.job.priority, run.min_workers)

    def leave(self, run: JobRun) -> None:
        self.runs.pop(run.job.job_id, None)
        self._fair_share.leave(run.job.job_id)

    def _runnable(self, slot: int) -> list[int]:
        at = time.monotonic()
        return [job_id for job_id, run in self.runs.items() if run.runnable_at(slot) <= at]

    async def _serve(self, slot: int) -> None:
        while slot < self.pool.spec.slots:
            job_id = self._fair_share.choose(self._runnable(slot))
            if job_id is None:
                await self._wait(slot)
                continue
            self._fair_share.acquire(job_id, slot)
            try:
                await self.runs[job_id].serve(slot, partial(self._should_yield, job_id, slot))
            except Exception as error:
                log.error("a worker slot failed on a bulk job", job_id=job_id, exc_info=error)
                await asyncio.sleep(POLL_S)
            finally:
                self._fair_share.release(job_id, slot)
            await asyncio.sleep(0)  # let other tasks run, however soon the job returned the slot
        self.tasks.pop(slot, None)

    def _should_yield(self, job_id: int, slot: int) -> bool:
        if slot >= self.pool.spec.slots:
            return True
        rivals = [rival for rival in self._runnable(slot) if rival != job_id]
        return bool(rivals) and self._fair_share.should_yield(job_id, slot, rivals)

    async def _wait(self, slot: int) -> None:
        """Wait until something has changed, or a batch may be retried."""
        self._changed.clear()
        due = min((run.runnable_at(slot) for run in self.runs.values()), default=float("inf"))
        await within(max(0.01, min(due - time.monotonic(), POLL_S)), self._changed.wait())


def pools_of(settings: Settings) -> dict[str, PoolSpec]:
    """The pools by name. Raises SettingsError."""
    pools = {DEFAULT_POOL: PoolSpec(DEFAULT_POOL, settings.batch_workers)}
    if settings.ray_address:
        pools[RAY] = PoolSpec(RAY, settings.ray_workers, infra=RAY)
    for definition in settings.batch_pools:
        name, equals, path = definition.partition("=")
        if not (name and equals and path):
            raise SettingsError(f"batch_pools has {definition!r}; use NAME=FILE.yaml")
        pools[name] = read_pool(name, Path(path).expanduser())
        if pools[name].infra == RAY and not settings.ray_address:
            raise SettingsError(f"the pool {name!r} in {path} has infra: ray; set TINSMITH_RAY_ADDRESS, too")
    have_gpus = engine_positions(settings, 1) or any(pool.devices_per_worker for pool in pools.values())
    if not settings.runs_bulk_jobs or not have_gpus:
        return pools
    devices = devices_of(settings)
    return {name: replace(pool, devices=devices) if pool.infra == LOCAL else pool for name, pool in pools.items()}


@dataclass(slots=True)
class _Failures:
    """The errors of this coordinator in one job, and until when it does not take the job again."""

    count: int = 0
    until: float = 0.0


class Coordinator:
    def __init__(self, settings: Settings, jobs: BatchJobs, holder: str, gateway: ModelGateway | None = None) -> None:
        self.logs = JobLogs(settings.resolved_data_dir / "logs")
        self._settings = settings
        self._jobs = jobs
        directory = settings.batch_secrets_dir
        self.secrets = SecretFiles(directory.expanduser() if directory is not None else None)
        self._services = JobServices(gateway, self.secrets)
        self._holder = holder
        self._token = uuid.uuid4().hex
        self._specs = pools_of(settings)
        self._driver: Driver | None = None
        self._pools: dict[str, _PoolSlots] = {}
        self._runs: dict[int, JobRun] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}  # of runs and of deletions
        self._due = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._renting: asyncio.Task[None] | None = None
        self._next_sweep = 0.0
        self._failures: dict[int, _Failures] = {}
        self._clean_at: dict[int, float] = {}  # jobs whose parts could not be deleted, and when to try again
        self._joinable_at: dict[int, float] = {}  # jobs of others that this machine does not join before
        self._machines = self._build_managed_machines()

    def _build_managed_machines(self) -> ManagedMachines | None:
        """The machines of managed pools, or None if this process has none. Raises SettingsError."""
        managed = {name: spec.file for name, spec in self._specs.items() if spec.managed and spec.file is not None}
        if not managed or not self._settings.runs_bulk_jobs:
            return None
        from tinsmith.batch.pools.managed import ManagedMachines

        return ManagedMachines(managed, self._jobs, self._settings, self._holder)

    def start(self, background: Background | None = None) -> None:
        """Start the coordinator's tasks. Call on the running event loop."""
        background = background or Background()
        self._loop = asyncio.get_running_loop()
        for name, spec in self._specs.items():
            if not spec.rented:
                self._pools[name] = _PoolSlots(self._pool_of(spec), background)
                self._pools[name].resize(spec)
        self._main = background.start("batch_coordinator", self._run)
        if self._machines is not None:
            self._renting = background.start("managed_machines", self._machines.run)

    def _pool_of(self, spec: PoolSpec) -> Pool:
        if spec.infra == LOCAL:
            return LocalPool(spec, self.logs)
        from tinsmith.batch.pools.ray import Driver, RayPool

        self._driver = self._driver or Driver(self._settings.ray_address)
        return RayPool(spec, self.logs, self._driver)

    async def stop(self) -> None:
        """Release all jobs and end all workers."""
        slots = [task for pool in self._pools.values() for task in pool.tasks.values()]
        loops = [task for task in (self._main, self._renting) if task is not None]
        tasks = [*loops, *self._tasks.values(), *slots]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(pool.pool.close() for pool in self._pools.values()))

    # For the routes, on any thread.

    def wake(self, job_id: int | None = None) -> None:
        """Take in a new job or, with its id, the cancellation of one."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, job_id)

    def _wake(self, job_id: int | None) -> None:
        run = self._runs.get(job_id) if job_id is not None else None
        if run is None:
            self._due.set()
        else:
            run.end()

    def sweep_soon(self) -> None:
        """Sweep at once, since parts are to be deleted. Other processes see that at their next sweep."""
        self._next_sweep = 0.0
        self.wake()

    def pools(self, tenant_id: str) -> list[dict[str, object]]:
        """All pools, each with the running jobs of this tenant."""
        runs = [run for run in list(self._runs.values()) if run.job.tenant_id == tenant_id]
        return [
            {
                "name": spec.name,
                "workers": spec.slots,
                "accelerators_per_worker": spec.devices_per_worker,
                "jobs": sorted(run.job.job_id for run in runs if run.job.pool == spec.name),
            }
            for spec in self._specs.values()
        ]

    def check_pool(self, job: JobSpec) -> None:
        """Raises UserError if the job's pool does not exist or has no worker of its size."""
        pool = self._specs.get(job.batch_pool_name)
        if pool is None:
            raise UserError(
                f"there is no pool {job.batch_pool_name!r}; the pools are {self.pool_names()}. Use {DEFAULT_POOL!r} "
                "or add the pool to the server's TINSMITH_BATCH_POOLS"
            )
        max_job_workers(pool, job)

    def check_minimum(self, job: JobSpec) -> None:
        """Raises UserError if the job's pool cannot give it its minimum of workers. A pool without slots here is served
        by other machines, of which this server does not know."""
        pool, least = self._specs[job.batch_pool_name], job.min_concurrency or 1
        num_workers = min(pool.slots * pool.machines, max_job_workers(pool, job))
        if pool.slots and least > num_workers:
            raise UserError(
                f"the minimum of concurrency is {least}, and the pool {pool.name!r} has {num_workers} workers for such "
                "a job; give a smaller minimum, or use a larger pool"
            )

    def pool_names(self) -> list[str]:
        return list(self._specs)

    def resize(self, name: str, workers: object) -> None:
        """Set the number of workers of a pool until the server ends. Raises NotFoundError, UserError."""
        spec = self._specs.get(name)
        if spec is None:
            raise NotFoundError(f"there is no pool {name!r}; the pools are {self.pool_names()}")
        if spec.rented:
            raise UserError(f"SkyPilot manages the machines of pool {name!r}; change num_nodes of its task")
        self._specs[name] = resized = spec.with_workers(workers)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._pools[name].resize, resized)

    # The loop.

    async def _run(self) -> None:
        while True:
            self._due.clear()
            await self._poll()
            await within(POLL_S, self._due.wait())

    async def _poll(self) -> None:
        """Run all steps, also after an error of one. Raises an error that is not the database's."""
        steps = [self._take_jobs, self._join_jobs, self._observe_jobs]
        if self._settings.batch_job:
            steps.append(self._end_with_job)
        if time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + SWEEP_S
            steps.append(self._sweep)
        unexpected: Exception | None = None
        for step in steps:
            try:
                await step()
            except SQLAlchemyError as error:
                log.error("bulk jobs cannot be read; trying again", error=repr(error))
            except Exception as error:  # noqa: BLE001  raised after the other steps
                unexpected = unexpected or error
        if unexpected is not None:
            raise unexpected

    async def _end_with_job(self) -> None:
        """End this machine of a managed pool when its job has ended: SIGTERM drains this process."""
        if not self._tasks and await asyncio.to_thread(self._jobs.has_ended, self._settings.batch_job):
            os.kill(os.getpid(), signal.SIGTERM)

    async def _observe_jobs(self) -> None:
        """Show the jobs that run here what other processes have done."""
        for observation in await asyncio.to_thread(self._jobs.members.observe, list(self._runs)):
            if (run := self._runs.get(observation.job.job_id)) is not None:
                run.observe(observation)

    async def _take_jobs(self) -> None:
        job_ids = await asyncio.to_thread(self._jobs.acquirable_jobs, self._holder, self._leaves_pool)
        for job_id in self._select_startable(job_ids):
            is_member = isinstance(self._runs.get(job_id), JobMember)
            if job_id in self._tasks and not is_member:
                continue
            try:
                await (self._take_over(job_id) if is_member else self._take(job_id))
            except Exception as error:
                if is_transient(error):
                    raise  # the other jobs need the database, too
                await self._note_failure(job_id, error)

    def _select_startable(self, job_ids: Sequence[int]) -> list[int]:
        """Those that may start here: not paused after an error, and on a machine that runs one job, that one."""
        at, only = time.monotonic(), self._settings.batch_job
        paused = {job_id for job_id, failures in self._failures.items() if at < failures.until}
        return [job_id for job_id in job_ids if job_id not in paused and (not only or job_id == only)]

    async def _take_over(self, job_id: int) -> None:
        """Reserve a job whose owner is gone and of which this process is a member. Once the member has left, the next
        poll takes it: a job of the same holder is free."""
        if await self._acquire(job_id) is not None:
            self._runs[job_id].end()

    async def _join_jobs(self) -> None:
        """Take part in the jobs of other machines' coordinators, with the slots of this machine."""
        pools = [slots.pool.spec for slots in self._pools.values() if slots.pool.spec.infra == LOCAL]
        names = [pool.name for pool in pools if pool.slots and not self._leaves_pool(pool.name)]
        job_ids = await asyncio.to_thread(self._jobs.members.joinable_jobs, self._token, names) if names else []
        at = time.monotonic()
        self._joinable_at = {
            job_id: until for job_id, until in self._joinable_at.items() if job_id in job_ids or at < until < math.inf
        }
        for job_id in self._select_startable(job_ids):
            if job_id not in self._tasks and at >= self._joinable_at.get(job_id, 0.0):
                await self._join(job_id)

    async def _join(self, job_id: int) -> None:
        spec = await asyncio.to_thread(self._jobs.spec, job_id)
        if not is_shareable(spec) or self._refusal(spec):
            self._joinable_at[job_id] = math.inf
            return
        join = self._jobs.members.join
        job = await asyncio.to_thread(join, job_id, self._token, self._holder, FIRST_LEASE_S)
        if job is not None:
            log.info("this machine takes part in a bulk job", job_id=job_id)
            self._start_run(JobMember, job, spec)

    def _leaves_pool(self, pool: str) -> bool:
        """Whether other processes run the jobs of a pool. One that only runs bulk jobs serves the pools in which it has
        slots; a process that answers clients also takes, and fails, jobs of pools that no longer exist.
        """
        spec = self._specs.get(pool)
        if self._settings.role == "batch-worker":
            return spec is None or spec.rented or not spec.workers
        return spec is not None and spec.rented

    async def _acquire(self, job_id: int) -> JobRecord | None:
        acquire = self._jobs.acquire_batch_coordinator
        return await asyncio.to_thread(acquire, job_id, self._token, self._holder, FIRST_LEASE_S)

    async def _take(self, job_id: int) -> None:
        job = await self._acquire(job_id)
        if job is None:
            return
        if self._leaves_pool(job.pool):  # it is being cancelled
            await self._fail(job_id, "the job is cancelled")
            return
        try:
            spec = await asyncio.to_thread(self._jobs.spec, job_id)
        except SQLAlchemyError:
            raise
        except Exception as error:  # noqa: BLE001  of any kind of invalid data
            refusal = f"the stored specification cannot be read by this version of Tinsmith: {error or repr(error)}"
            await self._fail(job_id, f"{refusal}. Submit the job again, or run the version that stored it")
            return
        if refusal := self._refusal(spec):
            await self._fail(job_id, refusal)
            return
        self._start_run(JobRun, job, spec)

    def _start_run(self, kind: type[JobRun], job: JobRecord, spec: JobSpec) -> None:
        pool = self._pools[job.pool]
        run = kind(self._jobs, job, spec, self._token, pool.pool, pool.wake, self._services)
        pool.join(run)
        self._runs[job.job_id] = run
        self._tasks[job.job_id] = asyncio.create_task(self._run_job(run, pool))

    def _refusal(self, spec: JobSpec) -> str:
        """Why a stored job may not run under today's settings; empty if it may."""
        try:
            self.check_pool(spec)
        except UserError as error:
            return str(error)
        code = "" if self._settings.batch_user_code else permissions.describe_code(spec)
        return code and f"this server does not run users' code (TINSMITH_BATCH_USER_CODE=false), and {code}"

    async def _fail(self, job_id: int, reason: str) -> None:
        """Fail a job that is not run; one that is being cancelled becomes CANCELLED."""
        if not await asyncio.to_thread(self._jobs.set_status, job_id, self._token, "FAILED", reason):
            await asyncio.to_thread(self._jobs.set_status, job_id, self._token, "CANCELLED")
        self._failures.pop(job_id, None)
        log.error("a bulk job cannot run", job_id=job_id, error=reason)

    async def _note_failure(self, job_id: int, error: Exception) -> None:
        """Pause the job, or fail it after too many errors."""
        failures = self._failures.setdefault(job_id, _Failures())
        failures.count += not is_transient(error)
        failures.until = time.monotonic() + min(POLL_S * 2 ** max(failures.count - 1, 0), MAX_PAUSE_S)
        log.error("a bulk job stopped and will be acquired again", job_id=job_id, exc_info=error)
        if failures.count >= MAX_FAILURES:
            try:
                if await self._acquire(job_id):
                    reason = f"the coordinator cannot run this job: {type(error).__name__}: {error}"
                    await self._fail(job_id, reason)
            except Exception as storage_error:  # noqa: BLE001  tried again after the pause
                log.error("the failure of a bulk job cannot be stored", job_id=job_id, error=repr(storage_error))

    async def _run_job(self, run: JobRun, pool: _PoolSlots) -> None:
        job_id = run.job.job_id
        try:
            await run.run()
            self._failures.pop(job_id, None)
            if isinstance(run, JobMember) and run.gave_up:
                self._joinable_at[job_id] = time.monotonic() + REJOIN_S
            await run.notify_gateway()
            with contextlib.suppress(OSError):  # only the next job would have gained
                await pool.pool.warm_up()
        except Exception as error:  # noqa: BLE001  counts against the job
            await self._note_failure(job_id, error)
        finally:
            pool.leave(run)
            self._runs.pop(job_id, None)
            self._tasks.pop(job_id, None)
            self._due.set()

    async def _sweep(self) -> None:
        """Delete the files of jobs whose end was interrupted, and those past the retention."""
        keep_since = now() - self._settings.batch_retention_days * DAY_S
        await asyncio.to_thread(self.logs.sweep, keep_since)
        await asyncio.to_thread(self._jobs.delete_ended_workers)
        at = time.monotonic()
        self._clean_at = {job_id: until for job_id, until in self._clean_at.items() if at < until}
        for job_id in await asyncio.to_thread(self._jobs.cleanable_jobs, keep_since, list(self._clean_at)):
            if job_id in self._tasks:  # its workers are ending: a purge must not wait for the sweep after that
                self._next_sweep = at + POLL_S
            else:
                self._tasks[job_id] = asyncio.create_task(self._clean(job_id))

    async def _clean(self, job_id: int) -> None:
        cleaned = False
        try:
            spec = await asyncio.to_thread(self._jobs.spec, job_id)
            pool = self._pools.get(spec.batch_pool_name, self._pools[DEFAULT_POOL]).pool
            tenant_id = await asyncio.to_thread(self._jobs.tenant_of, job_id)
            secrets = await asyncio.to_thread(self.secrets.read, tenant_id, spec.secrets)

            async def operate(operation: Callable[[RemoteWorker], Any]) -> object:
                async with temporary_worker(pool, job_id, spec, secrets) as worker:
                    return await operation(worker)

            cleaned = await clean(self._jobs, job_id, operate)
        except Exception as error:  # noqa: BLE001  does not affect other jobs
            log.warning("the parts of a bulk job could not be deleted", job_id=job_id, error=repr(error))
        finally:
            self._tasks.pop(job_id, None)
        if not cleaned:
            self._clean_at[job_id] = time.monotonic() + CLEAN_AGAIN_S
