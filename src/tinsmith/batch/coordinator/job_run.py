"""One bulk job that this coordinator owns, from counting its rows to deleting its parts.

`JobRun` is the life of the job: plan, run, and one end. It ends for the first reason that occurs: its batches are done,
it fails (FailedError), it is cancelled, another coordinator has it (SupersededError), or an error of this coordinator.
Slots of the pool call `serve` to run batches on one worker. The results of attempts and the claims of slots are
collected for one transaction at a time (`_settle_loop`), so that a commit and the next claim share it. Everything in
memory may be lost at any moment: the next owner starts from the rows.

After the last batch each step is durable before the next: every batch committed; WINDING_DOWN; outputs published from
the committed parts; outputs recorded and SUCCEEDED; parts deleted; the deletion recorded.

`Dispatcher` sends groups of attempts to workers and reports each attempt once. A group has as many batches as the
worker recently did in `GROUP_S`: short batches share the cost of a request and a transaction, and long batches do not
wait for each other. A worker has two groups at a time, or more if it runs several batches at once (`IN_FLIGHT`). It
returns batches that it has not begun in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.batch import operations
from tinsmith.batch.coordinator.hosts import MAX_ERROR, HostHealth
from tinsmith.batch.coordinator.members import Observation
from tinsmith.batch.coordinator.model_gateway import ModelGateway, RequestRouter
from tinsmith.batch.coordinator.rows import JobRecord, SupersededError, is_transient
from tinsmith.batch.coordinator.state import TERMINAL, BatchJobs, Claim, SettledAttempt
from tinsmith.batch.coordinator.workers import (
    FatalJobError,
    JobFullError,
    MachineSetAsideError,
    OperationError,
    RemoteWorker,
    Result,
    WorkerSet,
    run_until,
)
from tinsmith.batch.formats.registry import has_snapshot
from tinsmith.batch.formats.schemas import Schema, merge_schemas
from tinsmith.batch.pools.specs import MAX_SLOTS, Pool, WorkerError, max_job_workers
from tinsmith.batch.secrets import SecretFiles
from tinsmith.batch.types import (
    SOURCE_FIELDS,
    Assignment,
    AttemptFailure,
    AttemptOutcome,
    FailureCause,
    JobSpec,
    MapperStartError,
    OutputInfo,
    part_base,
)
from tinsmith.batch.worker.frames import Message
from tinsmith.batch.worker.worker import MAX_GROUP
from tinsmith.db.database import now
from tinsmith.runtime.background import within
from tinsmith.runtime.failpoints import hit

GROUP_S = 0.05
"""The work of a group of batches, in seconds of its worker."""
BURST_S = 1.0
"""How far ahead of its rate a job may begin batches, in seconds of the rate."""
FAILED_ROWS_PAGE = 1000
"""Failed rows that are read at a time."""
PAUSE_S = 0.2
"""How long a slot that waits for a rate limit sleeps until it looks whether another job is due."""
FULL_PAUSE_S = 1.0
"""How long a slot waits if other machines have all the workers that the job may have."""
PUBLISH_PAUSE_S = 1.0
"""The pause before an output is published again; it doubles with each try."""
PUBLISH_TRIES = 6
"""How often an output is published again because another job has published to it at the same time."""
IN_FLIGHT = 2
"""Groups with one worker: it works on the second while the first is committed. If a worker runs several batches at a
time, at least as many batches, and one more."""

T = TypeVar("T")
log = structlog.get_logger()


class DispatchWindow:
    """How many batches are sent to a worker in one group: as many as it recently did in `GROUP_S`."""

    def __init__(self) -> None:
        self.size = 1
        self._last_end = 0.0

    def record(self, began_at: float, ended_at: float, num_batches: int) -> None:
        """Take in a group of batches. One that waited behind another group began when that one ended."""
        elapsed_s = ended_at - max(began_at, self._last_end)
        self._last_end = ended_at
        fitting = int(GROUP_S * num_batches / elapsed_s) if elapsed_s > 0 else MAX_GROUP
        self.size = max(1, min(fitting, 2 * self.size, MAX_GROUP))


class Grant(NamedTuple):
    """Batches that may begin, and the tokens that were charged for each of their rows."""

    batches: int
    tokens_per_row: float


class RateLimits:
    """How many batches of a job may begin under its requests and tokens per minute. No I/O.

    Each limit is a token bucket, stored as the time until which all charges are paid at its rate. A batch may begin
    while that time is at most `BURST_S` ahead, so in any minute begin at most the limit, its share of `BURST_S`, and
    one batch. A batch is charged with its rows, and with the tokens that as many rows of the job took on average; what
    it took more or less is charged at its end. Until some rows have ended, one batch runs at a time.
    """

    def __init__(self, spec: JobSpec, paid_until: Mapping[str, float] | None, clock: Callable[[], float]) -> None:
        limits = {"requests": spec.requests_per_minute, "tokens": spec.tokens_per_minute}
        self._seconds_each = {name: 60 / limit for name, limit in limits.items() if limit is not None}
        self.paid_until = {name: (paid_until or {}).get(name, 0.0) for name in self._seconds_each}
        self._clock = clock
        self._batch_size = spec.batch_size
        self._num_begun = 0
        self._tokens_charged: dict[tuple[int, int], float] = {}  # of attempts that have not ended
        self._tokens_per_row: float | None = None

    def learn(self, job: JobRecord) -> None:
        if rows := job.rows_ok + job.rows_failed:
            self._tokens_per_row = (job.tokens_in + job.tokens_out) / rows

    def wait_s(self) -> float:
        """Seconds until a batch may begin; infinite until one has ended."""
        if "tokens" in self.paid_until and self._tokens_per_row is None and self._num_begun:
            return float("inf")
        return max([0.0, *(until - BURST_S - self._clock() for until in self.paid_until.values())])

    def take(self, count: int) -> Grant:
        """Allow some of `count` batches to begin, and charge them."""
        if not self.paid_until:
            return Grant(count, 0.0)
        tokens_per_row, num_granted = self._tokens_per_row or 0.0, 0
        while num_granted < count and self.wait_s() == 0:
            self._charge(self._batch_size, tokens_per_row)
            self._num_begun += 1
            num_granted += 1
        return Grant(num_granted, tokens_per_row)

    def record_claims(self, grant: Grant, claims: Sequence[Claim]) -> None:
        """Correct the charge of a grant: only these batches were pending, perhaps with fewer rows."""
        if not self.paid_until:
            return
        rows = sum(claim.span.rows for claim in claims)
        self._charge(rows - grant.batches * self._batch_size, grant.tokens_per_row)
        self._num_begun -= grant.batches - len(claims)
        for claim in claims:
            self._tokens_charged[claim.batch_idx, claim.attempt_id] = claim.span.rows * grant.tokens_per_row

    def record_end(self, claim: Claim, tokens: int | None) -> None:
        """Charge the tokens of an attempt that has ended; None if their number is unknown."""
        self._num_begun -= 1
        charged = self._tokens_charged.pop((claim.batch_idx, claim.attempt_id), 0.0)
        if tokens is not None:
            self._add("tokens", tokens - charged)

    def _charge(self, rows: int, tokens_per_row: float) -> None:
        self._add("requests", rows)
        self._add("tokens", rows * tokens_per_row)

    def _add(self, name: str, amount: float) -> None:
        if name in self.paid_until:
            since = max(self.paid_until[name], self._clock()) if amount > 0 else self.paid_until[name]
            self.paid_until[name] = since + amount * self._seconds_each[name]


@dataclass(eq=False)
class Dispatcher:
    """Sends groups of attempts to workers. `report` gets each attempt with its result, and whether its group has ended.

    Every attempt is sent the schemas of the committed rows. Two workers that begin at the same time may be sent none,
    and write parts that conflict: then the later one is not committed, and its next attempt is sent the schemas."""

    job_id: int
    spec: JobSpec
    schemas: Callable[[], Sequence[Schema | None]]
    report: Callable[[Sequence[SettledAttempt], bool], None]
    on_setup_failure: Callable[[RemoteWorker, MapperStartError], None]

    def __post_init__(self) -> None:
        self.in_flight: set[int] = set()
        self._windows: WeakKeyDictionary[RemoteWorker, DispatchWindow] = WeakKeyDictionary()

    def window(self, worker: RemoteWorker) -> DispatchWindow:
        return self._windows.setdefault(worker, DispatchWindow())

    def groups(self, claims: Sequence[Claim], size: int) -> list[list[Claim]]:
        """The claims in groups for a worker; a row that is only recorded as failed is a group by itself."""
        to_map = [claim for claim in claims if not self._gives_up(claim)]
        groups = [to_map[first : first + size] for first in range(0, len(to_map), size)]
        return groups + [[claim] for claim in claims if self._gives_up(claim)]

    async def attempt(self, worker: RemoteWorker, claims: Sequence[Claim]) -> None:
        """One attempt at each of these batches. Each is reported, also after an error."""
        unsettled = {(claim.batch_idx, claim.attempt_id): claim for claim in claims}
        in_group = {claim.batch_idx for claim in claims}
        self.in_flight |= in_group
        began_at = time.monotonic()
        try:
            if self._gives_up(claims[0]):
                outcome = await self._give_up(worker, claims[0])
                self._settle(unsettled, [(key, outcome) for key in unsettled])
            else:
                async with contextlib.aclosing(worker.feed([self._assignment(claim) for claim in claims])) as results:
                    async for arrived in results:
                        self._settle(unsettled, arrived)
                self.window(worker).record(began_at, time.monotonic(), len(claims))
        except MapperStartError as error:
            self._fail_all(unsettled, "SetupFailed", error, FailureCause.NOT_BEGUN)
            self.on_setup_failure(worker, error)
        except Exception as error:  # noqa: BLE001  an invalid reply says nothing about the batches
            worker.infra_failures += 1
            cause = FailureCause.ERROR if isinstance(error, OperationError) else FailureCause.WORKER
            self._fail_all(unsettled, type(error).__name__, error, cause)
        finally:
            self.in_flight -= in_group

    def _fail_all(
        self, unsettled: dict[tuple[int, int], Claim], error_class: str, error: Exception, cause: FailureCause
    ) -> None:
        failure = AttemptFailure(error_class, str(error), cause)
        self._settle(unsettled, [(key, failure) for key in unsettled])

    def _settle(self, unsettled: dict[tuple[int, int], Claim], results: Sequence[Result]) -> None:
        settled = [(unsettled.pop(key), result) for key, result in results if key in unsettled]
        self.report(settled, not unsettled)

    def _gives_up(self, claim: Claim) -> bool:
        """Whether this attempt only records its row as failed."""
        return claim.retry_count > self.spec.limits.max_retries and claim.span.rows == 1

    async def _give_up(self, worker: RemoteWorker, claim: Claim) -> AttemptOutcome:
        error = {"error_type": claim.error_class or "Error", "error": claim.error or ""}
        return AttemptOutcome.from_dict(await worker.result_of("give_up", assignment=self._assignment(claim), **error))

    def _assignment(self, claim: Claim) -> dict[str, Any]:
        outputs, schemas = enumerate(self.spec.batch_output_path), self.schemas()
        bases = tuple(part_base(path, self.job_id, index, claim.attempt_id) for index, path in outputs)
        sent_schemas = tuple(schemas) if any(schemas) else ()
        return vars(Assignment(claim.batch_idx, *claim.span, claim.attempt_id, bases, sent_schemas))


class JobServices(NamedTuple):
    """What jobs get from their server: answers of its models, and secrets."""

    gateway: ModelGateway | None = None
    secrets: SecretFiles = SecretFiles()


class JobRun:
    def __init__(
        self,
        jobs: BatchJobs,
        job: JobRecord,
        spec: JobSpec,
        token: str,
        pool: Pool,
        on_change: Callable[[], None],
        services: JobServices,
    ) -> None:
        """`on_change` is called when `runnable_at` may have changed."""
        self.job = job
        self._jobs = jobs
        self._token = token
        self._on_change = on_change
        self._spec = spec
        self._limits = spec.limits
        self._router: RequestRouter | None = None
        if services.gateway is not None and operations.asks_service(spec.batch_serialized_fn):
            self._router = RequestRouter(services.gateway, job.job_id, job.tenant_id, job.name)
        self._dispatcher = Dispatcher(
            job.job_id, spec, lambda: self.job.schemas or [], self._collect_results, self._note_failed_mapper
        )
        self._rates = RateLimits(spec, job.paid_until, now)
        self._rates.learn(job)
        self._max_workers = min(spec.concurrency or MAX_SLOTS, max_job_workers(pool.spec, spec))
        self.min_workers = min(spec.min_concurrency or 0, self._max_workers)
        self._max_concurrent = operations.max_concurrent_batches(spec)
        self._hosts = HostHealth(spec.limits, time.monotonic)
        self._hosts.is_changed = bool(job.machines_set_aside)  # by an earlier coordinator
        self._pool = pool
        read_secrets = partial(services.secrets.read, job.tenant_id, spec.secrets)
        self._workers = WorkerSet(jobs, job.job_id, token, spec, pool, self._router, self._hosts, read_secrets)
        self._dispatching = False
        self._worker_requested = asyncio.Event()
        self._worker_acquired = asyncio.Event()
        self._dispatch_ended = asyncio.Event()
        self._reason: Exception | None = None  # why it ended; None if its row says so
        self._settled: list[SettledAttempt] = []
        self._claim_requests: list[tuple[str, int, asyncio.Future[list[Claim]]]] = []
        self._settle_due = asyncio.Event()
        self._settle_lock = asyncio.Lock()
        self._due_at = 0.0  # when a batch may be pending
        self._slot_free_at: dict[int, float] = {}
        self._num_serving = 0
        self._num_members = 0  # other processes that run batches of the job

    def observe(self, observation: Observation) -> None:
        """Take in the row as another process may have changed it, unless it was read before this one's last change."""
        job = observation.job
        self._num_members = observation.num_members
        if job.completed_batches < self.job.completed_batches:
            return
        if job.status == "CANCELLING":
            self.end()
        elif self._dispatching and not self._dispatch_ended.is_set():
            self.job = job
            self._check_row()
            if observation.has_due_batch:
                self._due_at = 0.0
            self._on_change()

    def end(self, reason: Exception | None = None) -> None:
        """Dispatch no more. The first reason counts; without one, the row says whether the job is done, cancelled, or
        left for another coordinator."""
        if not self._dispatch_ended.is_set() or self._reason is None:
            self._reason = reason
        self._dispatch_ended.set()

    # For the slots of the pool.

    def runnable_at(self, slot: int) -> float:
        """When this slot may find a batch, on the monotonic clock."""
        full = self._num_serving >= self._max_workers
        if not self._dispatching or full or self._dispatch_ended.is_set():
            return float("inf")
        due_at = self._due_at
        if not self._workers.has_idle():
            due_at = max(due_at, self._slot_free_at.get(slot, 0.0), self._workers.free_at(slot))
        wait_s = self._rates.wait_s()
        return max(due_at, time.monotonic() + wait_s) if wait_s else due_at

    async def serve(self, slot: int, should_yield: Callable[[], bool]) -> None:
        """Run batches on a slot until there are none, or another job is due."""
        self._num_serving += 1
        worker: RemoteWorker | None = None
        try:
            self._worker_requested.set()
            concurrency = self._spec.concurrency
            max_others = None if concurrency is None else concurrency - self._num_serving
            worker = await self._workers.take(slot, self._dispatch_ended, max_others)
            if worker is not None:
                self._worker_acquired.set()
                await self._dispatch(worker, should_yield)
        except WorkerError as error:
            self._note_failed_setup(error.host, str(error))
        except MachineSetAsideError:
            self._slot_free_at[slot] = min(self._hosts.set_aside().values(), default=0.0)
        except JobFullError:
            self._slot_free_at[slot] = time.monotonic() + FULL_PAUSE_S
        except Exception as error:
            if is_transient(error):
                raise
            self.end(error)
        finally:
            self._num_serving -= 1
            self._on_change()
            if worker is not None:
                superseded = isinstance(self._reason, SupersededError)
                await (self._workers.end(worker) if superseded else self._workers.put_back(worker))

    async def _dispatch(self, worker: RemoteWorker, should_yield: Callable[[], bool]) -> None:
        dispatched: dict[asyncio.Task[None], int] = {}  # groups, and how many batches each has
        try:
            while True:
                size = self._dispatcher.window(worker).size
                room = self._room(size, list(dispatched.values()))
                if room > 0 and not worker.unusable and not self._dispatch_ended.is_set() and not should_yield():
                    for group in self._dispatcher.groups(await self._claim(worker.worker_id, room), size):
                        dispatched[asyncio.create_task(self._dispatcher.attempt(worker, group))] = len(group)
                if not dispatched:
                    pause_s = self._rates.wait_s()
                    if pause_s == 0 or self._dispatch_ended.is_set() or worker.unusable or should_yield():
                        return
                    await asyncio.sleep(min(pause_s, PAUSE_S))  # an exclusive pool would end the worker
                    continue
                done_tasks, _ = await asyncio.wait(dispatched, return_when=asyncio.FIRST_COMPLETED)
                for task in done_tasks:
                    del dispatched[task]
                self._settle_due.set()  # here, so that the end of a group and the next claim share a transaction
        finally:
            for task in dispatched:
                task.cancel()

    def _room(self, group_size: int, dispatched: Sequence[int]) -> int:
        """How many more batches a worker may have that has groups of so many batches."""
        if self._max_concurrent == 1:
            return (IN_FLIGHT - len(dispatched)) * group_size
        num_pending = self.job.total_batches - self.job.completed_batches - len(self._dispatcher.in_flight)
        num_workers = max(1, self._num_serving) * (1 + self._num_members)
        share = max(1, -(-num_pending // num_workers))  # all workers have some of the last batches
        return min(max(IN_FLIGHT * group_size, self._max_concurrent + 1) - sum(dispatched), share)

    def _collect_results(self, settled: Sequence[SettledAttempt], is_end: bool) -> None:
        hit("batch.reported")
        for claim, result in settled:
            is_outcome = isinstance(result, AttemptOutcome)
            self._rates.record_end(claim, result.tokens_in + result.tokens_out if is_outcome else None)
            if is_outcome or result.cause in FailureCause.of_batch():
                self._hosts.record_success(claim.worker_cluster)
            if not is_outcome and self._dispatch_ended.is_set():
                continue  # it was stopped on purpose, and the next owner of the job finds it dispatched
            self._settled.append((claim, result))
        if not is_end:
            self._settle_due.set()

    def _note_failed_mapper(self, worker: RemoteWorker, error: MapperStartError) -> None:
        if error.cause is FailureCause.SETUP_OF_PROGRAM:
            self.end(FatalJobError(f"setup_failed: {error}"))
        self._note_failed_setup(worker.handle.host, str(error), is_final=error.cause is not FailureCause.SETUP)

    def _note_failed_setup(self, host: str, error: str, *, is_final: bool = False) -> None:
        """Count a failed set-up on a machine, and end the job if no other machine can set it up."""
        self._hosts.record_failure(host, error, is_final=is_final)
        log.warning("a set-up has failed", job_id=self.job.job_id, machine=host, error=error[:MAX_ERROR])
        problem = self._hosts.problem(self._pool.hosts(self._spec))
        if problem and not self._num_members:  # a member's machine may have what this one lacks
            self.end(FatalJobError(problem))
        self._settle_due.set()

    # Settling and claiming.

    async def _claim(self, worker_id: str, count: int) -> list[Claim]:
        grant = self._rates.take(0 if self._dispatch_ended.is_set() else count)
        if not grant.batches:
            return []
        future: asyncio.Future[list[Claim]] = asyncio.get_running_loop().create_future()
        self._claim_requests.append((worker_id, grant.batches, future))
        self._settle_due.set()
        claims = await future
        self._rates.record_claims(grant, claims)
        return claims

    async def _settle_loop(self) -> None:
        """One transaction after another, each with all that has been collected since the last one."""
        try:
            while True:
                await self._settle_due.wait()
                await asyncio.sleep(0)  # results that are ready now share the transaction
                await self._settle_and_claim()
        finally:
            for _, _, future in self._claim_requests:
                if not future.done():
                    future.set_result([])

    async def _settle_and_claim(self) -> None:
        async with self._settle_lock:
            self._settle_due.clear()
            settled, requests = self._settled, self._claim_requests
            self._settled, self._claim_requests = [], []
            await self._store_hosts()
            if not settled and not requests:
                return
            claims: dict[str, list[Claim]] = {}
            try:
                claims = await self._exchange(settled, {worker_id: count for worker_id, count, _ in requests})
            except SQLAlchemyError as error:
                if not is_transient(error):
                    raise
                log.error("a bulk job's rows cannot be written; trying again", job_id=self.job.job_id, exc_info=error)
                self._settled[:0] = settled
                self._settle_due.set()
                await asyncio.sleep(1)
            finally:
                for worker_id, _, future in requests:
                    if not future.done():
                        future.set_result(claims.get(worker_id, []))
        self._check_row()
        self._on_change()

    async def _store_hosts(self) -> None:
        if self._hosts.is_changed:
            self._hosts.is_changed = False
            machines = self._hosts.listing(now())
            await asyncio.to_thread(self._jobs.set_machines_aside, self.job.job_id, self._token, machines)

    async def _exchange(self, settled: list[SettledAttempt], counts: dict[str, int]) -> dict[str, list[Claim]]:
        """Store results and claim batches, for each worker as many as its count."""
        if self._dispatch_ended.is_set():
            counts = {}
        limits, job_id = self._limits, self.job.job_id
        options = limits.lease_s, limits.max_retries, limits.backoff_s, dict(self._rates.paid_until)
        settle = self._jobs.settle_and_claim
        transition = await asyncio.to_thread(settle, job_id, self._token, settled, counts, *options)
        self.job, claims = transition.job, dict(transition.claims)
        self._rates.learn(self.job)
        if claims:
            hit("batch.claimed")
        if settled:
            hit("batch.committed")
            self._due_at = 0.0
        for claim in transition.rejected:
            log.warning("a late result was rejected", job_id=job_id, batch_idx=claim.batch_idx)
        if transition.failed:
            await self._check_failed()
        elif counts and not any(claims.values()):
            wait_s = await asyncio.to_thread(self._jobs.next_retry_in, job_id)
            self._due_at = float("inf") if wait_s is None else time.monotonic() + max(wait_s, 0.01)
        return claims

    def _check_row(self) -> None:
        """End if the job's row says so."""
        if self.job.error is not None:
            self.end(FatalJobError(self.job.error))
        elif self.job.failed_too_many:
            failed = self.job.rows_failed
            rows = "row" if failed == 1 else "rows"
            self.end(FatalJobError(f"{failed} {rows} failed, and max_failed_rows is {self.job.max_failed_rows:g}"))
        elif self.job.status == "CANCELLING" or self.job.done:
            self.end()

    async def _check_failed(self) -> None:
        if failure := await asyncio.to_thread(self._jobs.failure, self.job.job_id):
            self.end(FatalJobError(failure))

    # The whole job.

    async def run(self) -> None:
        """Run the job until it ends or another coordinator has it. If cancelled, release the job."""
        coroutines = self._settle_loop(), self._renew(), self._watch_first_start()
        helpers = [asyncio.create_task(self._supervise(coroutine)) for coroutine in coroutines]
        try:
            await self._run()
        except SupersededError:
            log.warning("other coordinators have the job", job_id=self.job.job_id)
        finally:
            self._dispatch_ended.set()
            closing = asyncio.create_task(self._close(helpers))
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError:
                await closing  # otherwise workers would be left behind
                raise

    async def _close(self, helpers: Sequence[asyncio.Task[None]]) -> None:
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        try:
            if self.job.done:
                await self._workers.stop_all()  # functions end by themselves: they may close what they opened
        finally:
            await self._workers.end_all()
        with contextlib.suppress(SQLAlchemyError):
            await asyncio.to_thread(self._release)

    async def _supervise(self, coroutine: Awaitable[None]) -> None:
        """Await a helper of the job. The job cannot go on without it, so an error of the helper ends the job."""
        try:
            await coroutine
        except Exception as error:  # noqa: BLE001  `run` raises it
            self.end(error)

    async def _run(self) -> None:
        failure: str | None = None
        try:
            await self._prepare()
            if not self._dispatch_ended.is_set() and await self._set_status("RUNNING"):
                self._dispatching = True
                self._on_change()
            await self._dispatch_ended.wait()
            await self._stop_serving()
            if self._reason is not None:
                raise self._reason
            self.job = await asyncio.to_thread(self._jobs.renew, self.job.job_id, self._token, self._limits.lease_s)
            if self.job.status != "CANCELLING" and (not self.job.done or await self._wind_down()):
                return  # not done: the server stops
        except FatalJobError as error:
            failure = str(error)
        if failure is None or not await self._set_status("FAILED", failure):
            await self._set_status("CANCELLED")

    async def _prepare(self) -> None:
        """Split the input, or copy the batches of the job that this one resumes, unless that is done. Then read the
        schemas and failures that earlier coordinators stored."""
        job_id = self.job.job_id
        if not self.job.sealed and not self._dispatch_ended.is_set() and self.job.status != "CANCELLING":
            should_stop = self._dispatch_ended.is_set
            copied = await asyncio.to_thread(self._jobs.copy_resumed_batches, job_id, self._token, should_stop)
            if copied is None:
                await self._plan()
            else:
                self.job = copied
        if self.job.completed_batches and self.job.schemas is None:
            await self._read_schemas()
        await self._check_failed()
        self._check_row()

    async def _read_schemas(self) -> None:
        """Store the types of batches that were copied, or that an earlier version committed."""
        schemas: list[Schema | None] = []
        for output in range(len(self._spec.batch_output_formats)):
            of_parts = await asyncio.to_thread(self._jobs.schemas, self.job.job_id, output)
            schemas.append(reduce(merge_schemas, of_parts, {}) if of_parts else None)
        self.job = await asyncio.to_thread(self._jobs.save_schemas, self.job.job_id, self._token, schemas)

    async def _stop_serving(self) -> None:
        """Wait until no slot runs the job, and store the results of its attempts."""
        self._on_change()
        if not self.job.done:
            await self._workers.stop_all()
        while self._num_serving:
            await asyncio.sleep(0.01)
        if self._reason is None or isinstance(self._reason, FatalJobError):
            await self._settle_and_claim()

    async def _set_status(self, status: str, error: str | None = None) -> bool:
        is_stored = await asyncio.to_thread(self._jobs.set_status, self.job.job_id, self._token, status, error)
        log.info("bulk job", job_id=self.job.job_id, status=status, error=error)
        return is_stored

    async def _renew(self) -> None:
        """Keep the lease, and see a cancellation by another process."""
        while True:
            await asyncio.sleep(self._limits.lease_s / 3)
            try:
                self.job = await asyncio.to_thread(self._renew_leases, list(self._dispatcher.in_flight))
                self._check_row()
            except SQLAlchemyError as error:
                log.warning("the lease of a bulk job could not be renewed", job_id=self.job.job_id, error=repr(error))

    def _renew_leases(self, batches: Sequence[int]) -> JobRecord:
        """Extend the leases of the job and of these batches. Raises SupersededError."""
        return self._jobs.renew(self.job.job_id, self._token, self._limits.lease_s, batches)

    def _release(self) -> None:
        """Leave the job to other processes at once."""
        self._jobs.release(self.job.job_id, self._token)

    async def _watch_first_start(self) -> None:
        """End the job if its first worker does not start in time: it may want more than any machine has, which a
        cluster does not say. A job with results waits, since the cluster may be full."""
        await self._worker_requested.wait()
        limit_s = self._limits.discovery_timeout_s
        if not await within(limit_s, self._worker_acquired.wait()) and not self.job.completed_batches:
            reason = (
                f"no worker of the pool {self._spec.batch_pool_name!r} has started within {limit_s:g} s "
                "(limits.discovery_timeout_s): it has no room, or no machine has what the job or the pool asks for"
            )
            self.end(FatalJobError(f"setup_failed: {reason}"))

    async def notify_gateway(self) -> None:
        """Tell the model gateway that a job of operations has ended."""
        if self._router is not None:
            job = await asyncio.to_thread(self._jobs.find, self.job.tenant_id, self.job.job_id)
            if job.status in TERMINAL:
                await self._router.gateway.close_job(job.job_id, job.tenant_id, job.status)

    # Operations.

    async def _operate(self, operation: Callable[[RemoteWorker], Awaitable[T]]) -> T:
        # A mapper that starts before the input was copied would read the input itself.
        copies_input = not self.job.sealed and has_snapshot(self._spec.batch_input_format)
        return await self._workers.operate(operation, with_mapper=not self.job.done and not copies_input)

    async def _plan(self) -> None:
        async def plan(worker: RemoteWorker) -> tuple[Sequence[int], int, Message]:
            starts, end = array("q"), {}
            async with contextlib.aclosing(worker.operate("plan")) as messages:
                async for message in messages:
                    starts.extend(span[0] for span in message.get("spans", ()))
                    end = message.get("end", {})
            total_rows = end.get("total_rows", 0)
            first_rows = range(0, total_rows, end["batch_size"]) if "batch_size" in end else starts
            return first_rows, total_rows, {name: end[name] for name in SOURCE_FIELDS if end.get(name) is not None}

        planned = await run_until(self._dispatch_ended, self._operate(plan))
        if planned is None:
            return  # the job is cancelled
        self.job = await asyncio.to_thread(self._jobs.save_batch_states, self.job.job_id, self._token, *planned)
        self._workers.spec = replace(self._workers.spec, **planned[2])  # for workers that start later
        if self._workers.spec.input_snapshot is not None:
            await self._workers.end_all()  # they would read the input itself

    async def _wind_down(self) -> bool:
        """Publish the outputs and delete the parts. False if the job is cancelled first."""
        job_id = self.job.job_id
        if not await self._set_status("WINDING_DOWN"):
            return False
        hit("batch.winding")
        published = await self._publish()
        hit("batch.published")
        if not await asyncio.to_thread(self._jobs.finish, job_id, self._token, published):
            return False
        log.info("bulk job", job_id=job_id, status="SUCCEEDED")
        hit("batch.recorded")
        self._on_change()
        await clean(self._jobs, job_id, self._operate)
        return True

    async def _publish(self) -> list[tuple[str, OutputInfo]]:
        formats = [str(output["format"]) for output in self._spec.all_output_formats]
        published: list[tuple[str, OutputInfo]] = []
        with tempfile.TemporaryDirectory(prefix="tinsmith-batch-") as directory:
            winners, failures = Path(directory) / "winners", Path(directory) / "failures"
            batches = self._jobs.iter_committed_batches(self.job.job_id)
            await asyncio.to_thread(_write_lines, winners, (batch.parts for batch in batches))
            await asyncio.to_thread(_write_lines, failures, _iter_failed_rows(self._jobs, self.job.job_id))
            for index, kind in enumerate(formats):
                path = winners if index < len(self._spec.batch_output_formats) else failures
                published.append((kind, await self._operate(partial(self._publish_output, index, path))))
        return published

    async def _publish_output(self, output_idx: int, path: Path, worker: RemoteWorker) -> OutputInfo:
        """Publish one output from the file of its parts. Its token is issued before the job's ownership is checked, so
        that a later owner's token is newer. Raises SupersededError, FatalJobError."""
        for try_idx in range(PUBLISH_TRIES):
            token = (await worker.result_of("issue_token", output_idx=output_idx))["token"]
            self.job = await asyncio.to_thread(self._jobs.renew, self.job.job_id, self._token, self._limits.lease_s)
            hit("batch.fenced")
            remote_path = await worker.send(path)
            result = await worker.result_of("publish", output_idx=output_idx, path=remote_path, token=token)
            if "output" in result:
                return OutputInfo.from_dict(result["output"])
            log.warning("another job publishes to the same output", job_id=self.job.job_id, reason=result["stale"])
            await asyncio.sleep(PUBLISH_PAUSE_S * 2**try_idx)
        output = self._spec.all_output_formats[output_idx]
        raise FatalJobError(
            f"another job published to {output['path']} at the same time, {PUBLISH_TRIES} times; resume the job once "
            "the other one has ended, or with another output"
        )


Operate = Callable[[Callable[[RemoteWorker], Awaitable[Any]]], Awaitable[Any]]


async def clean(jobs: BatchJobs, job_id: int, operate: Operate) -> bool:
    """Delete the parts of a job and of those that it resumed. False if that fails, which does not change the job."""
    chain = await asyncio.to_thread(jobs.resume_chain, job_id)
    try:
        await operate(lambda worker: worker.result_of("delete", job_ids=chain))
    except (FatalJobError, WorkerError, SupersededError) as error:
        log.warning("the parts of a bulk job could not be deleted", job_id=job_id, error=str(error))
        return False
    hit("batch.cleaned")
    await asyncio.to_thread(jobs.record_cleaned, chain)
    return True


def _write_lines(path: Path, items: Iterable[object]) -> None:
    with path.open("w") as lines:
        for item in items:
            lines.write(json.dumps(item) + "\n")


def _iter_failed_rows(jobs: BatchJobs, job_id: int) -> Iterable[dict[str, object]]:
    after = -1
    while errors := jobs.row_errors(job_id, FAILED_ROWS_PAGE, after):
        after = errors[-1]["row_idx"]
        yield from map(error_row, errors)


def error_row(error: dict[str, object]) -> dict[str, object]:
    """A failed row as the output of errors has it."""
    details = error["details"]
    assert isinstance(details, dict)
    return {
        "idx": error["row_idx"],
        "row": details["row"],
        "error_type": error["error_class"],
        "message": error["message"],
        "traceback": details["traceback"],
        "attempts": details["attempts"],
        "worker": details["worker"],
    }
