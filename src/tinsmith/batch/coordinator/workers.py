"""The workers of one bulk job: started, lent to slots and operations, kept while idle, and ended.

`RemoteWorker` makes the calls. A worker that refuses a call, has ended, or is silent for longer than its heartbeats
allow is lost (WorkerLostError). No batch is to blame, and the worker is never called again.

`WorkerSet` holds the workers of a job. The row of a worker is written before its process starts and deleted after it
has ended, so that the next coordinator of the job knows which workers to end. An unusable worker (lost, or its mapper
does not start) is never lent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from tinsmith.batch.coordinator.hosts import UNKNOWN, HostHealth
from tinsmith.batch.coordinator.model_gateway import MAX_CONCURRENT_REQUESTS, RequestRouter
from tinsmith.batch.coordinator.rows import SupersededError
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.pools.specs import Pool, WorkerHandle, WorkerLostError, WorkerStartError
from tinsmith.batch.types import AttemptFailure, AttemptOutcome, FailureCause, JobSpec, Limits, MapperStartError
from tinsmith.batch.worker.frames import Message
from tinsmith.batch.worker.worker import CallRefusedError
from tinsmith.errors import UserError
from tinsmith.runtime.background import within

MAX_OPERATION_TRIES = 3
MAX_SETUP_FAILURES = 2
"""After this many failed starts of the mapper in one worker, another worker is tried."""
MAX_INFRA_FAILURES = 3
AVOIDANCE_S = 120.0
"""How long a start may wait for room on other machines than those that are set aside."""

Result = tuple[tuple[int, int], AttemptOutcome | AttemptFailure]
"""An attempt by (batch_idx, attempt_id), and its result."""
T = TypeVar("T")


class MachineSetAsideError(Exception):
    """The pool has started a worker on a machine that is set aside; it was ended."""


class JobFullError(Exception):
    """Other machines have all the workers that the job may have."""


class OperationError(Exception):
    """An operation raised an error in the worker; `trace` is its text."""

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.trace = trace


class FatalJobError(Exception):
    """The job has failed; the message says why."""


async def run_until(end_event: asyncio.Event, awaitable: Awaitable[T]) -> T | None:
    """The result of an awaitable; None if `end_event` is set first, which cancels it."""
    task = asyncio.ensure_future(awaitable)
    waiter = asyncio.ensure_future(end_event.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        waiter.cancel()
        await asyncio.wait({task, waiter})


@dataclass(eq=False)
class RemoteWorker:
    """A worker and the calls to it. `router` handles the requests of operations to the service; a user's function has
    none."""

    worker_id: str
    handle: WorkerHandle
    job_id: int
    limits: Limits
    slot: int | None
    router: RequestRouter | None = None
    setup_failures: int = 0
    infra_failures: int = 0
    lost: bool = False
    has_io_process: bool = False
    """Whether it has a child for operations."""

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

    @property
    def unusable(self) -> bool:
        is_worn_out = self.setup_failures >= MAX_SETUP_FAILURES or self.infra_failures >= MAX_INFRA_FAILURES
        return self.lost or is_worn_out or self.handle.has_ended

    async def call(self, name: str, **request: object) -> None:
        """Make a call whose result is not needed. Raises WorkerLostError."""
        async for _ in self._call(name, request):
            pass

    async def feed(self, assignments: Sequence[Mapping[str, object]]) -> AsyncGenerator[list[Result], None]:
        """The results of attempts as they arrive. Raises WorkerLostError, MapperStartError if some have none."""
        num_unsettled = len(assignments)
        setup_failure: AttemptFailure | None = None
        async with contextlib.AsyncExitStack() as stack:
            accept_requests = None
            if self.router is not None:
                serving = self.router.serve_requests(lambda answers: self.call("answer", answers=answers), self._room)
                accept_requests = await stack.enter_async_context(serving)
            stream = self._call("feed_batch", {"assignments": assignments})
            async for message in await stack.enter_async_context(contextlib.aclosing(stream)):
                if accept_requests is not None:
                    accept_requests(message.get("asks", ()))
                results: list[Result] = []
                for key, result in map(_parse_result, message.get("settled", ())):
                    num_unsettled -= 1
                    if isinstance(result, AttemptFailure) and result.cause in FailureCause.of_setup():
                        setup_failure = result
                        continue
                    results.append((key, result))
                    if isinstance(result, AttemptOutcome):
                        self.infra_failures = self.setup_failures = 0
                    else:
                        self.infra_failures += result.cause is FailureCause.WORKER
                if results:
                    yield results
        if setup_failure is not None:
            self.setup_failures += 1
            raise MapperStartError(setup_failure.error, setup_failure.cause)
        if num_unsettled:
            raise self._mark_lost("the reply is incomplete")

    async def operate(self, op: str, **request: object) -> AsyncGenerator[Message, None]:
        """The messages of an operation, the last with its result as `end`. Raises OperationError, WorkerLostError."""
        message: Message = {}
        async with contextlib.aclosing(self._call("operate", {"op": op, **request})) as messages:
            async for message in messages:
                if "error" in message:
                    raise OperationError(message["message"], message["error"])
                if "lost" in message:
                    raise WorkerLostError(message["lost"]["error"])
                if "alive" not in message:
                    yield message
        if "end" not in message:
            raise self._mark_lost("the reply is incomplete")

    async def result_of(self, op: str, **request: object) -> Message:
        """The `end` of an operation. Raises OperationError, WorkerLostError."""
        messages = [message async for message in self.operate(op, **request)]
        return messages[-1]["end"]

    async def send(self, path: Path) -> str:
        """Send a file of this machine; returns its path where the worker is. Raises WorkerLostError."""
        messages = [message async for message in self._receive("a file", self.handle.send_file(path))]
        return str(messages[-1]["path"])

    def _call(self, name: str, request: Mapping[str, object]) -> AsyncGenerator[Message, None]:
        return self._receive(name, self.handle.call(name, {"job_id": self.job_id, **request}))

    async def _receive(self, name: str, messages: AsyncGenerator[Message, None]) -> AsyncGenerator[Message, None]:
        """Yields messages of the worker. Raises WorkerLostError, also if none arrives for the heartbeat's timeout."""
        silence_s = self.limits.heartbeat_timeout_s
        try:
            async with contextlib.aclosing(messages):
                while True:
                    async with asyncio.timeout(silence_s):
                        message = await anext(messages)
                    yield message
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise self._mark_lost(f"it was silent for {silence_s:g} s") from None
        except CallRefusedError as error:
            raise WorkerLostError(f"the worker refused {name}: {str(error)[:500]}", self.handle.host) from None
        except WorkerLostError as error:
            raise self._mark_lost(error) from error

    def _mark_lost(self, cause: object) -> WorkerLostError:
        self.lost = True
        return WorkerLostError(f"worker {self.worker_id} was lost: {cause}", self.handle.host)

    async def close(self) -> None:
        """End the worker and all that it started, at once."""
        self.lost = True
        await self.handle.kill()


def _parse_result(message: Message) -> Result:
    batch_idx, attempt_id = message["key"]
    if "outcome" in message:
        return (batch_idx, attempt_id), AttemptOutcome.from_dict(message["outcome"])
    return (batch_idx, attempt_id), AttemptFailure.from_dict(message["lost"])


@contextlib.asynccontextmanager
async def temporary_worker(
    pool: Pool, job_id: int, spec: JobSpec, secrets: Mapping[str, str]
) -> AsyncIterator[RemoteWorker]:
    """A worker for an operation on a job that has ended. Raises WorkerStartError, WorkerLostError."""
    worker_id = _new_id(job_id)
    worker = RemoteWorker(worker_id, await pool.start(worker_id, None), job_id, spec.limits, None)
    try:
        await worker.call("configure", secrets=secrets, spec=spec.to_dict(), start_mapper=False)
        yield worker
    finally:
        await worker.close()


def _new_id(job_id: int) -> str:
    return f"{job_id}-{uuid.uuid4().hex[:8]}"


@dataclass(eq=False)
class WorkerSet:
    jobs: BatchJobs
    job_id: int
    token: str
    spec: JobSpec
    pool: Pool
    router: RequestRouter | None
    hosts: HostHealth
    read_secrets: Callable[[], Mapping[str, str]]
    """The values of the job's secrets now. Raises UserError."""

    def __post_init__(self) -> None:
        self._idle: list[RemoteWorker] = []
        self._workers: set[RemoteWorker] = set()

    async def take(self, slot: int, end_event: asyncio.Event, max_others: int | None = None) -> RemoteWorker | None:
        """An idle worker or a new one; in an exclusive pool, the slot's own. A new one only if other processes have at
        most `max_others`. None if the job ends first, since on a full cluster a start may take longer than the job.
        Raises WorkerStartError, WorkerLostError, MachineSetAsideError, JobFullError, SupersededError."""
        bound_slot = slot if self.pool.spec.exclusive else None
        for worker in self._idle:
            if worker.slot == bound_slot and not worker.unusable:
                self._idle.remove(worker)
                return worker
        starting = self._start(bound_slot, with_mapper=True, max_others=max_others)
        if self._hosts_to_avoid():  # where the other machines are full, this one may be free again before they are
            starting = within(AVOIDANCE_S, starting)
        return await run_until(end_event, starting)

    def has_idle(self) -> bool:
        """Whether a worker that has started waits for any slot."""
        return not self.pool.spec.exclusive and any(not worker.unusable for worker in self._idle)

    def free_at(self, slot: int) -> float:
        """When a worker may start for a slot, as far as its machine decides."""
        host = self.pool.host_of(slot)
        if host is not None:
            return self.hosts.free_at(host)
        soonest = 0.0
        if set_aside := self.hosts.set_aside():
            existing = self.pool.hosts(self.spec)
            if existing and all(host in set_aside for host in existing):
                soonest = min(set_aside[host] for host in existing)
        return max(soonest, self.hosts.free_at(UNKNOWN))

    def _hosts_to_avoid(self) -> Mapping[str, float]:
        """The machines that are set aside, unless there are no others."""
        set_aside = self.hosts.set_aside()
        are_others = set_aside and any(host not in set_aside for host in self.pool.hosts(self.spec))
        return set_aside if are_others else {}

    async def put_back(self, worker: RemoteWorker) -> None:
        if not worker.unusable and not self.pool.spec.exclusive:
            self._idle.append(worker)
            return
        if not worker.unusable:
            await self._stop(worker)
        await self.end(worker)

    async def end(self, worker: RemoteWorker) -> None:
        self._workers.discard(worker)
        self.hosts.remove_worker(worker.worker_id)
        if worker in self._idle:
            self._idle.remove(worker)
        try:
            await worker.close()
        finally:
            await self._delete_row(worker.worker_id)

    async def end_all(self) -> None:
        await asyncio.gather(*(self.end(worker) for worker in list(self._workers)), return_exceptions=True)

    async def stop_all(self) -> None:
        """Have every worker give up its attempts and end, within the job's grace period."""
        await asyncio.gather(*(self._stop(worker) for worker in list(self._workers)))

    async def operate(self, operation: Callable[[RemoteWorker], Awaitable[T]], *, with_mapper: bool) -> T:
        """Run an operation on a worker, and on another one if that is lost. `with_mapper`: a new worker starts its
        mapper at once. Raises FailedError, SupersededError."""
        last_error: Exception | None = None
        for attempt_idx in range(MAX_OPERATION_TRIES):
            if isinstance(last_error, WorkerStartError):
                await asyncio.sleep(self.spec.limits.backoff_s * 2**attempt_idx)
            try:
                idle = [candidate for candidate in self._idle if not candidate.unusable]
                worker = max(idle, key=lambda candidate: candidate.has_io_process, default=None)
                if worker is None:
                    worker = await self._start(None, with_mapper=with_mapper and not self.pool.spec.exclusive)
                    self._idle.append(worker)
                worker.has_io_process = True
                return await operation(worker)
            except MachineSetAsideError as error:
                last_error = error
            except (WorkerLostError, WorkerStartError) as error:
                last_error = error
                if isinstance(error, WorkerStartError):
                    self.hosts.record_failure(error.host, str(error))
            except OperationError as error:
                raise FatalJobError(error.trace) from error
        raise FatalJobError(f"no worker is usable: {last_error}") from last_error

    async def _start(self, slot: int | None, *, with_mapper: bool, max_others: int | None = None) -> RemoteWorker:
        worker_id, name = _new_id(self.job_id), self.pool.spec.name
        worker: RemoteWorker | None = None
        try:
            secrets = await asyncio.to_thread(self.read_secrets)
        except UserError as error:
            raise FatalJobError(f"setup_failed: {error}") from None
        try:
            launch = name, worker_id, self.job_id, self.token, self.pool.kind, max_others
            if not await asyncio.to_thread(self.jobs.record_launch, *launch):
                raise JobFullError
            handle = await self.pool.start(worker_id, slot, self.spec, self._hosts_to_avoid())
            worker = RemoteWorker(worker_id, handle, self.job_id, self.spec.limits, slot, self.router)
            self._workers.add(worker)
            self.hosts.add_worker(worker_id, handle.host)
            if handle.host in self._hosts_to_avoid() and (slot is None or self.pool.host_of(slot) is None):
                raise MachineSetAsideError(f"a worker has started on {handle.host}, which is set aside")
            await worker.call("configure", secrets=secrets, spec=self.spec.to_dict(), start_mapper=with_mapper)
            await asyncio.to_thread(self.jobs.record_worker, worker_id, handle.process_name)
        except BaseException as error:
            await asyncio.shield(self.end(worker) if worker is not None else self._delete_row(worker_id))
            refusals = MachineSetAsideError | JobFullError | SupersededError
            expected = WorkerStartError | WorkerLostError | refusals | SQLAlchemyError
            if isinstance(error, Exception) and not isinstance(error, expected):
                host = self.pool.host_of(slot) if slot is not None else None
                raise WorkerStartError(f"a worker cannot be started: {error!r}", host or UNKNOWN) from error
            raise
        return worker

    async def _delete_row(self, worker_id: str) -> None:
        with contextlib.suppress(SQLAlchemyError):
            await asyncio.to_thread(self.jobs.delete_worker, worker_id)

    async def _stop(self, worker: RemoteWorker) -> None:
        grace_s = self.spec.limits.grace_s
        with contextlib.suppress(WorkerLostError, TimeoutError):
            await worker.call("shutdown", grace_s=grace_s)
            worker.lost = True
            async with asyncio.timeout(grace_s + 1):
                await worker.handle.wait()
        await worker.close()
