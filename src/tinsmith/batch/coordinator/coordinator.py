"""The coordinator of bulk jobs: takes those that nobody owns, and lends the slots of the pools to them.

It runs on the server's event loop, one `JobRun` for each job that it owns and one task for each slot of each pool. It
never runs a user's code, and loads no library of any format: workers do. A server that dies leaves rows; the next one
on its data directory takes its jobs at once, any other when their leases have expired.

No job can stop the others. What goes wrong with a job is noted against that job: it is taken up again after a growing
pause, and fails with the last error after `MAX_TROUBLES`. An error of the database counts against no job, since it says
nothing about one. A job whose specification cannot be read fails at once.

Whose turn it is: jobs that share the slots of a pool, each by its weight. Pure, but for the clock it is given.

Each job has a virtual time: the seconds that slots worked for it, over its weight. A free slot goes to the job with
the least (of those with the highest priority). A new job begins with the least virtual time of those that are there, so
that it is owed nothing for the time before it came.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.batch import permissions
from tinsmith.batch.coordinator.job_run import JobRun, clean
from tinsmith.batch.coordinator.model_gateway import ModelGateway
from tinsmith.batch.coordinator.state import BatchJobs, Job, is_passing
from tinsmith.batch.coordinator.workers import RemoteWorker
from tinsmith.batch.pools.local import LocalPool
from tinsmith.batch.pools.specs import LOCAL, RAY, Pool, PoolSpec, pool_from_yaml
from tinsmith.batch.types import DEFAULT_POOL, JobSpec
from tinsmith.batch.worker.logs import JobLogs
from tinsmith.db.database import now
from tinsmith.errors import NotFoundError, SettingsError
from tinsmith.runtime.background import Background
from tinsmith.settings import Settings

if TYPE_CHECKING:
    from tinsmith.batch.pools.ray import Driver


@dataclass(slots=True)
class Share:
    weight: float
    priority: int
    virtual: float = 0.0
    holding: dict[int, float] = field(default_factory=dict)  # slot -> since when

    def at(self, now: float, quantum_s: float) -> float:
        """Its virtual time, counting what slots do for it at this moment; a slot that it holds counts at once."""
        held = sum(max(now - since, 0.0) + quantum_s for since in self.holding.values())
        return self.virtual + held / self.weight


class FairShare:
    def __init__(self, clock: Callable[[], float], quantum_s: float) -> None:
        self._clock = clock
        self._quantum_s = quantum_s
        self._shares: dict[int, Share] = {}

    def join(self, job_id: int, weight: float, priority: int) -> None:
        now = self._clock()
        least = min((share.at(now, 0.0) for share in self._shares.values()), default=0.0)
        self._shares[job_id] = Share(weight, priority, least)

    def leave(self, job_id: int) -> None:
        self._shares.pop(job_id, None)

    def hold(self, job_id: int, slot: int) -> None:
        self._shares[job_id].holding[slot] = self._clock()

    def give_back(self, job_id: int, slot: int) -> None:
        share = self._shares.get(job_id)
        if share is not None and slot in share.holding:
            share.virtual += (self._clock() - share.holding.pop(slot)) / share.weight

    def choose(self, runnable: Iterable[int]) -> int | None:
        """The job that the next free slot goes to."""
        now = self._clock()
        shares = [(job_id, self._shares[job_id]) for job_id in runnable]
        if not shares:
            return None
        return min(shares, key=lambda one: (-one[1].priority, one[1].at(now, self._quantum_s), one[0]))[0]

    def should_yield(self, job_id: int, slot: int, others: Iterable[int]) -> bool:
        """Whether a slot that works for a job should go to another one now: one that is a quantum behind it."""
        mine = self._shares.get(job_id)
        if mine is None or slot not in mine.holding:
            return True
        now = self._clock()
        if now - mine.holding[slot] < self._quantum_s:
            return False
        for other_id in others:
            other = self._shares[other_id]
            if other.priority > mine.priority:
                return True
            behind = mine.at(now, self._quantum_s) - other.at(now, self._quantum_s)
            if other.priority == mine.priority and behind * min(mine.weight, other.weight) > self._quantum_s:
                return True
        return False


POLL_S = 1.0
"""How often jobs are looked for that came, or were cancelled, without a word."""
HAND_ON_S = 1.5
"""How long a process that only runs bulk jobs leaves one to others, for each that it has already."""
MOST_HAND_ONS = 10
SWEEP_S = 60.0
QUANTUM_S = 0.2
EXCLUSIVE_QUANTUM_S = 30.0
"""How long a slot works for one job before another may have it: with accelerators, a model is loaded each time."""
FIRST_LEASE_S = 60.0
DAY_S = 86400
MAX_TROUBLES = 5
"""A job that stopped its coordinator so often fails."""
MAX_PAUSE_S = 60.0
CLEAN_AGAIN_S = 600.0
"""How long parts that could not be deleted are left alone."""

log = structlog.get_logger()


def pools_of(settings: Settings) -> list[PoolSpec]:
    """Raises SettingsError."""
    pools = {DEFAULT_POOL: PoolSpec(DEFAULT_POOL, settings.batch_workers)}
    if settings.ray_address:
        pools[RAY] = PoolSpec(RAY, settings.ray_workers, infra=RAY)
    for given in settings.batch_pools:
        name, equals, path = given.partition("=")
        if not (name and equals and path):
            raise SettingsError(f"batch_pools has {given!r}; use NAME=FILE.yaml")
        pools[name] = pool_from_yaml(name, Path(path).expanduser())
        if pools[name].infra == RAY and not settings.ray_address:
            raise SettingsError(f"the pool {name!r} in {path} has infra: ray; set TINSMITH_RAY_ADDRESS, too")
    return list(pools.values())


class _Pool:
    """The slots of one pool, and the jobs that want them."""

    def __init__(self, pool: Pool, background: Background) -> None:
        self.pool = pool
        self._background = background
        self.runs: dict[int, JobRun] = {}
        self.slots: dict[int, asyncio.Task[None]] = {}
        self.changed = asyncio.Event()
        self.quantum_s = EXCLUSIVE_QUANTUM_S if pool.spec.exclusive else QUANTUM_S
        self.share = FairShare(time.monotonic, self.quantum_s)

    def resize(self, spec: PoolSpec) -> None:
        """Slots that are too many end after what they are doing."""
        self.pool.spec = spec
        for slot in range(spec.workers):
            if slot not in self.slots:
                work = partial(self._serve, slot)
                self.slots[slot] = self._background.start("batch_slot", work, pool=spec.name, slot=slot)
        self.wake()

    def wake(self) -> None:
        self.changed.set()

    def join(self, run: JobRun) -> None:
        self.runs[run.job.job_id] = run
        self.share.join(run.job.job_id, run.job.weight, run.job.priority)

    def leave(self, run: JobRun) -> None:
        self.runs.pop(run.job.job_id, None)
        self.share.leave(run.job.job_id)

    def _runnable(self) -> list[int]:
        at = time.monotonic()
        return [job_id for job_id, run in self.runs.items() if run.runnable(at)]

    async def _serve(self, slot: int) -> None:
        while slot < self.pool.spec.workers:
            job_id = self.share.choose(self._runnable())
            if job_id is None:
                await self._wait()
                continue
            self.share.hold(job_id, slot)
            try:
                await self.runs[job_id].serve(slot, lambda job_id=job_id: self._should_yield(job_id, slot))
            except Exception as error:
                log.error("a slot could not work for a bulk job", job_id=job_id, exc_info=error)
                await asyncio.sleep(POLL_S)
            finally:
                self.share.give_back(job_id, slot)
            await asyncio.sleep(0)  # a turn for the others, however soon the job was done with the slot
        self.slots.pop(slot, None)

    def _should_yield(self, job_id: int, slot: int) -> bool:
        if slot >= self.pool.spec.workers:
            return True
        others = [other for other in self._runnable() if other != job_id]
        return bool(others) and self.share.should_yield(job_id, slot, others)

    async def _wait(self) -> None:
        """Until something has changed, or a batch may be tried again."""
        self.changed.clear()
        due = min((run.runnable_at() for run in self.runs.values()), default=float("inf"))
        wait_s = max(0.01, min(due - time.monotonic(), POLL_S))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self.changed.wait()


@dataclass(slots=True)
class _Trouble:
    """What went wrong with a job here, and until when the job is left alone."""

    count: int = 0
    until: float = 0.0


class Coordinator:
    def __init__(self, settings: Settings, jobs: BatchJobs, holder: str, gateway: ModelGateway | None = None) -> None:
        self._settings = settings
        self._jobs = jobs
        self._gateway = gateway
        self._holder = holder
        self._token = uuid.uuid4().hex
        self._specs = pools_of(settings)
        self._driver: Driver | None = None
        self.logs = JobLogs(settings.resolved_data_dir / "logs")
        self._pools: dict[str, _Pool] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._runs: dict[int, JobRun] = {}
        self._due = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._next_sweep = 0.0
        self._troubles: dict[int, _Trouble] = {}
        self._not_cleaned: dict[int, float] = {}  # jobs whose parts could not be deleted, and when that is tried again
        self._seen: dict[int, float] = {}  # jobs that nobody had, and since when

    def start(self, background: Background | None = None) -> None:
        """Call on the running event loop."""
        background = background or Background()
        self._loop = asyncio.get_running_loop()
        for spec in self._specs:
            self._pools[spec.name] = _Pool(self._make(spec), background)
            self._pools[spec.name].resize(spec)
        self._main = background.start("batch_coordinator", self._run)

    def _make(self, spec: PoolSpec) -> Pool:
        if spec.infra == LOCAL:
            return LocalPool(spec, self.logs)
        from tinsmith.batch.pools.ray import Driver, RayPool

        self._driver = self._driver or Driver(self._settings.ray_address)
        return RayPool(spec, self.logs, self._driver)

    async def stop(self) -> None:
        """Let go of all jobs and end all workers."""
        slots = [task for pool in self._pools.values() for task in pool.slots.values()]
        tasks = [*([self._main] if self._main else []), *self._tasks.values(), *slots]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(pool.pool.close() for pool in self._pools.values()))

    # For the routes, on any thread.

    def wake(self, job_id: int | None = None) -> None:
        """There is a new job, or this one was cancelled."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, job_id)

    def sweep_soon(self) -> None:
        """A user wants parts deleted. Another process's coordinator learns of it at its next sweep."""
        self._next_sweep = 0.0
        self.wake()

    def _wake(self, job_id: int | None) -> None:
        run = self._runs.get(job_id) if job_id is not None else None
        if run is None:
            self._due.set()
        else:
            run.cancel()

    def pools(self, tenant_id: str) -> list[dict[str, object]]:
        """With the jobs of this tenant's that they run."""
        mine = {job_id: run.job.pool for job_id, run in list(self._runs.items()) if run.job.tenant_id == tenant_id}
        return [
            {
                "name": spec.name,
                "workers": spec.workers,
                "accelerators_per_worker": spec.devices_per_worker,
                "jobs": sorted(job_id for job_id, pool in mine.items() if pool == spec.name),
            }
            for spec in self._specs
        ]

    def has_pool(self, name: str) -> bool:
        return any(spec.name == name for spec in self._specs)

    def pool_names(self) -> Iterable[str]:
        return [spec.name for spec in self._specs]

    def resize(self, name: str, workers: object) -> None:
        """From now on, and until the server ends. Raises NotFoundError, UserError."""
        for index, spec in enumerate(self._specs):
            if spec.name == name:
                self._specs[index] = resized = spec.resized(workers)
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._pools[name].resize, resized)
                return
        raise NotFoundError(f"there is no pool {name!r}; there are {list(self.pool_names())}")

    # The loop.

    async def _run(self) -> None:
        while True:
            self._due.clear()
            await self._look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._due.wait()

    async def _look(self) -> None:
        """The error of one part keeps none of the others from being done. Raises one that is not the database's."""
        parts = [self._take_jobs, self._see_cancelled]
        if time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + SWEEP_S
            parts.append(self._sweep)
        unexpected: Exception | None = None
        for part in parts:
            try:
                await part()
            except SQLAlchemyError as error:
                log.error("bulk jobs cannot be looked for; the next look may", error=repr(error))
            except Exception as error:  # noqa: BLE001  raised when the other parts are done
                unexpected = unexpected or error
        if unexpected is not None:
            raise unexpected

    async def _see_cancelled(self) -> None:
        for job_id in await asyncio.to_thread(self._jobs.being_cancelled, list(self._runs)):
            self._wake(job_id)

    async def _take_jobs(self) -> None:
        waiting = await asyncio.to_thread(self._jobs.waiting, self._holder)
        self._seen = {job_id: self._seen.get(job_id, time.monotonic()) for job_id in waiting}
        at = time.monotonic()
        for job_id in waiting:
            trouble = self._troubles.get(job_id)
            if job_id in self._tasks or (trouble is not None and at < trouble.until) or not self._is_ours(job_id):
                continue
            try:
                await self._take(job_id)
            except Exception as error:
                if is_passing(error):
                    raise  # the other jobs need the database, too
                await self._trouble(job_id, error)

    async def _take(self, job_id: int) -> None:
        take = self._jobs.acquire_batch_coordinator
        job = await asyncio.to_thread(take, job_id, self._token, self._holder, FIRST_LEASE_S)
        if job is None:
            return
        try:
            spec = await asyncio.to_thread(self._jobs.spec, job_id)
        except SQLAlchemyError:
            raise
        except Exception as error:  # noqa: BLE001  whatever is wrong with what is stored
            why = f"the stored specification cannot be read by this version of Tinsmith: {error or repr(error)}"
            await self._fail(job_id, f"{why}. Submit the job again, or run the version that stored it")
            return
        pool = self._pools.get(job.pool)
        if why := self._refusal(job, spec):
            await self._fail(job_id, why)
            return
        assert pool is not None
        run = JobRun(self._jobs, job, spec, self._token, pool.pool, pool.wake, self._gateway)
        pool.join(run)
        self._runs[job_id] = run
        self._tasks[job_id] = asyncio.create_task(self._keep(run, pool))

    async def _fail(self, job_id: int, why: str) -> None:
        """A job of ours that is not run. One that is being cancelled ends as that."""
        if not await asyncio.to_thread(self._jobs.set_status, job_id, self._token, "FAILED", why):
            await asyncio.to_thread(self._jobs.set_status, job_id, self._token, "CANCELLED")
        self._troubles.pop(job_id, None)
        log.error("a bulk job is not run", job_id=job_id, error=why)

    async def _trouble(self, job_id: int, error: Exception) -> None:
        """The job is left alone for a while; after too much of the same, for ever."""
        trouble = self._troubles.setdefault(job_id, _Trouble())
        trouble.count += not is_passing(error)
        trouble.until = time.monotonic() + min(POLL_S * 2 ** max(trouble.count - 1, 0), MAX_PAUSE_S)
        log.error("a bulk job stopped; it is taken up again", job_id=job_id, exc_info=error)
        if trouble.count >= MAX_TROUBLES:
            why = f"the coordinator cannot run this job: {type(error).__name__}: {error}"
            try:
                take = self._jobs.acquire_batch_coordinator
                if await asyncio.to_thread(take, job_id, self._token, self._holder, FIRST_LEASE_S):
                    await self._fail(job_id, why)
            except Exception as another:  # noqa: BLE001  it is tried again after the pause
                log.error("that a bulk job failed cannot be noted", job_id=job_id, error=repr(another))

    def _is_ours(self, job_id: int) -> bool:
        """Where others do nothing else either, whoever has few jobs takes the next one first."""
        if self._settings.role != "batch-worker":
            return True
        return time.monotonic() - self._seen[job_id] >= HAND_ON_S * min(len(self._runs), MOST_HAND_ONS)

    def _refusal(self, job: Job, spec: JobSpec) -> str:
        """Why a job that was stored, perhaps under other settings, is not run now; empty if it is."""
        if job.pool not in self._pools:
            return f"there is no pool {job.pool!r}; there are {list(self.pool_names())}"
        code = "" if self._settings.batch_user_code else permissions.code_of(spec)
        return code and f"this server runs no code of its users (TINSMITH_BATCH_USER_CODE), and {code}"

    async def _keep(self, run: JobRun, pool: _Pool) -> None:
        job_id = run.job.job_id
        try:
            await run.run()
            self._troubles.pop(job_id, None)
            await run.tell_ended()
        except Exception as error:  # noqa: BLE001  the job's own
            await self._trouble(job_id, error)
        finally:
            pool.leave(run)
            self._runs.pop(job_id, None)
            self._tasks.pop(job_id, None)
            self._due.set()

    async def _sweep(self) -> None:
        """Delete the parts that nobody needs: a job's own end does that, unless it was cut short."""
        keep_since = now() - self._settings.batch_retention_days * DAY_S
        await asyncio.to_thread(self.logs.sweep, keep_since)
        await asyncio.to_thread(self._jobs.forget_ended_workers)
        at = time.monotonic()
        self._not_cleaned = {job_id: until for job_id, until in self._not_cleaned.items() if at < until}
        for job_id in await asyncio.to_thread(self._jobs.uncleaned, keep_since, list(self._not_cleaned)):
            if job_id not in self._tasks:
                self._tasks[job_id] = asyncio.create_task(self._clean(job_id))

    async def _clean(self, job_id: int) -> None:
        try:
            spec = await asyncio.to_thread(self._jobs.spec, job_id)
            pool = self._pools.get(spec.batch_pool_name, self._pools[DEFAULT_POOL])

            async def operating(operation):
                worker_id = f"{job_id}-{uuid.uuid4().hex[:8]}"
                started = await pool.pool.start(worker_id, None)
                worker = RemoteWorker(worker_id, started, job_id, spec.limits, None)
                try:
                    await worker.call("configure", spec=spec.to_dict(), start_mapper=False)
                    return await operation(worker)
                finally:
                    await worker.close()

            cleaned = await clean(self._jobs, job_id, operating)
        except Exception as error:  # noqa: BLE001  nothing else must suffer from it
            log.warning("the parts of a bulk job could not be deleted", job_id=job_id, error=repr(error))
            cleaned = False
        finally:
            self._tasks.pop(job_id, None)
        if not cleaned:
            self._not_cleaned[job_id] = time.monotonic() + CLEAN_AGAIN_S
