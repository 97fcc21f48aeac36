"""The workers of one bulk job: started, lent to slots and to operations, kept while they are idle, and ended.

`RemoteWorker` is one worker as the coordinator sees it: calls, and the streamed answers of those that take long. A
worker that refuses, breaks the connection, or is silent for longer than its heartbeats allow is lost
(`WorkerLostError`): no batch is to blame for that, and the worker is not called again.

`WorkerSet` holds the workers of a job. A worker's row is written before it is started and deleted when it is gone, so
that the coordinator that takes the job over knows which workers to end. One that is useless (lost, or its mapper does
not start) is never lent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from tinsmith.batch.coordinator.attempts import Lost
from tinsmith.batch.coordinator.model_gateway import RequestRouter
from tinsmith.batch.coordinator.state import BatchJobs, SupersededError
from tinsmith.batch.pools.specs import Pool, Started, WorkerStartError
from tinsmith.batch.types import JobSpec, Limits, Outcome
from tinsmith.batch.worker.rpc import Client, ConnectionLostError, Message, RefusedError

MAX_OPERATION_TRIES = 3

CALL_S = 10.0
"""How long a worker may take to accept a connection or the next bytes of a request."""
MAX_SETUP_FAILURES = 2
"""A mapper that did not start so often in one worker is tried in another one."""
MAX_INFRA_FAILURES = 3

Told = tuple[tuple[int, int], Outcome | Lost]
"""An attempt by (batch_idx, attempt_id), and what it came to."""
T = TypeVar("T")


class WorkerLostError(Exception):
    """The worker cannot be reached any more."""


class OperationError(Exception):
    """An operation failed in the worker: what it raised there."""

    def __init__(self, error_type: str, message: str, trace: str) -> None:
        super().__init__(message)
        self.error_type = error_type
        self.trace = trace


class SetupFailedError(Exception):
    """The mapper does not start; the message is its traceback. `final`: it does not start on any other worker."""

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class RemoteWorker:
    """`router` answers what operations ask; a user's function has none."""

    def __init__(
        self,
        worker_id: str,
        started: Started,
        job_id: int,
        limits: Limits,
        slot: int | None,
        router: RequestRouter | None = None,
    ) -> None:
        self._router = router
        self.worker_id = worker_id
        self.started = started
        self.slot = slot
        self.setup_failures = 0
        self.infra_failures = 0
        self.lost = False
        self._job_id = job_id
        silence_s = limits.heartbeat_timeout_s
        self._client = Client(started.address, started.token, connect_s=CALL_S, silence_s=silence_s)

    @property
    def useless(self) -> bool:
        worn = self.setup_failures >= MAX_SETUP_FAILURES or self.infra_failures >= MAX_INFRA_FAILURES
        return self.lost or worn or self.started.gone

    async def call(self, name: str, **request: object) -> None:
        """Raises WorkerLostError."""
        async for _ in self._stream(name, request):
            pass

    async def feed(self, assignments: Sequence[Mapping[str, object]]) -> AsyncIterator[list[Told]]:
        """The results of attempts as they arrive. Raises WorkerLostError, SetupFailedError if some have none."""
        left = len(assignments)
        setup_error: SetupFailedError | None = None
        async for told in self._fed(assignments):
            left -= len(told)
            settled: list[Told] = []
            for each in told:
                result = self._result(each)
                if isinstance(result, SetupFailedError):
                    setup_error = result
                else:
                    settled.append(((each["key"][0], each["key"][1]), result))
            if settled:
                yield settled
        if setup_error is not None:
            self.setup_failures += 1
            raise setup_error
        if left:
            raise self._gone("the answer has no end")

    async def _fed(self, assignments: Sequence[Mapping[str, object]]) -> AsyncIterator[list[Message]]:
        stream = self._stream("feed_batch", {"assignments": assignments})
        if self._router is None:
            async for message in stream:
                if told := message.get("settled"):
                    yield told
        else:
            async with self._router.answering(lambda answers: self.call("answer", answers=answers)) as take:
                async for message in stream:
                    take(message.get("asks", ()))
                    if told := message.get("settled"):
                        yield told

    def _result(self, told: Message) -> Outcome | Lost | SetupFailedError:
        if "outcome" in told:
            self.infra_failures = self.setup_failures = 0
            return Outcome.from_dict(told["outcome"])
        lost = told["lost"]
        if lost["setup"]:
            return SetupFailedError(lost["error"], lost["final"])
        self.infra_failures += bool(lost["infra"] and lost["begun"])
        told = {name: lost[name] for name in ("infra", "begun", "final", "died", "row")}
        return Lost(lost["error_class"], lost["error"], **told)

    async def operate(self, op: str, **request: object) -> AsyncIterator[Message]:
        """The messages of an operation; the last one has its result, as `end`.

        Raises OperationError, WorkerLostError."""
        ended = False
        async for message in self._stream("operate", {"op": op, **request}):
            if "error" in message:
                raise OperationError(message["error_type"], message["message"], message["error"])
            if "lost" in message:
                raise WorkerLostError(message["lost"]["error"])
            if "alive" not in message:
                yield message
            ended = "end" in message
        if not ended:
            raise self._gone("the answer has no end")

    async def place(self, path: Path) -> str:
        """Where the worker finds a file of ours: there, or a copy that it is sent. Raises WorkerLostError."""
        if self.started.shares_files:
            return str(path)
        placed = ""
        with path.open("rb") as file:
            async for message in self._stream("receive", {"size": path.stat().st_size}, file):
                placed = str(message["path"])
        return placed

    async def result_of(self, op: str, **request: object) -> Message:
        """The result alone."""
        result: Message = {}
        async for message in self.operate(op, **request):
            result = message.get("end", {})
        return result

    async def _stream(
        self, name: str, request: Mapping[str, object], file: IO[bytes] | None = None
    ) -> AsyncIterator[Message]:
        try:
            async with contextlib.aclosing(
                self._client.stream(name, {"job_id": self._job_id, **request}, file)
            ) as answer:
                async for message in answer:
                    yield message
        except RefusedError as error:
            why = f"the worker answered {name} with {error.status}: {str(error)[:500]}"
            raise WorkerLostError(why) from None
        except ConnectionLostError as error:
            raise self._gone(error) from error

    def _gone(self, why: object) -> WorkerLostError:
        self.lost = True
        return WorkerLostError(f"worker {self.worker_id} was lost: {why!r}")

    async def close(self) -> None:
        """End the process and all that it started, now."""
        self.lost = True
        await self._client.close()
        await self.started.kill()


KNOWN = (WorkerStartError, WorkerLostError, SupersededError, SQLAlchemyError)
"""The errors of starting a worker that callers distinguish; any other becomes a WorkerStartError."""


class FailedError(Exception):
    """The job cannot go on; the message says why."""


class WorkerSet:
    def __init__(
        self, jobs: BatchJobs, job_id: int, token: str, spec: JobSpec, pool: Pool, router: RequestRouter | None
    ) -> None:
        self._jobs = jobs
        self._job_id = job_id
        self._token = token
        self.spec = spec
        self._pool = pool
        self._router = router
        self._idle: list[RemoteWorker] = []
        self._workers: set[RemoteWorker] = set()

    async def take(self, slot: int, ended: asyncio.Event) -> RemoteWorker | None:
        """One that is free, or a new one; in an exclusive pool, that of the slot. None if the job ends before there is
        one. Raises WorkerStartError, WorkerLostError, SetupFailedError, SupersededError.
        """
        bound = slot if self._pool.spec.exclusive else None
        for worker in self._idle:
            if worker.slot == bound and not worker.useless:
                self._idle.remove(worker)
                return worker
        starting = asyncio.ensure_future(self._start(bound, with_mapper=True))
        ending = asyncio.ensure_future(ended.wait())
        try:  # on a cluster without room, that may take longer than the job
            await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
            return starting.result() if starting.done() else None
        finally:
            starting.cancel()
            ending.cancel()

    async def put_back(self, worker: RemoteWorker) -> None:
        """A slot is done with it."""
        if worker.useless or self._pool.spec.exclusive:
            await self.end(worker)
        else:
            self._idle.append(worker)

    async def end(self, worker: RemoteWorker) -> None:
        self._workers.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        try:
            await worker.close()
        finally:
            await self._forget(worker.worker_id)

    async def _forget(self, worker_id: str) -> None:
        with contextlib.suppress(SQLAlchemyError):
            await asyncio.to_thread(self._jobs.forget_worker, self._pool.spec.name, worker_id)

    async def end_all(self) -> None:
        await asyncio.gather(*(self.end(worker) for worker in list(self._workers)), return_exceptions=True)

    async def stop_all(self) -> None:
        """Have every worker give up what it is at."""
        await asyncio.gather(*(self._stop(worker) for worker in list(self._workers)))

    async def operate(self, operation: Callable[[RemoteWorker], Awaitable[T]], *, with_mapper: bool) -> T:
        """Run it on a worker, on another one if that is lost; a new one gets its mapper at once if that is needed next.

        Raises FailedError with what it raised, or why no worker could be used.
        """
        last: Exception | None = None
        for tried in range(MAX_OPERATION_TRIES):
            if isinstance(last, WorkerStartError):
                await asyncio.sleep(self.spec.limits.backoff_s * 2**tried)
            try:
                worker = next((one for one in self._idle if not one.useless), None)
                if worker is None:
                    worker = await self._start(None, with_mapper=with_mapper and not self._pool.spec.exclusive)
                    self._idle.append(worker)
                return await operation(worker)
            except (WorkerLostError, WorkerStartError) as error:
                last = error
            except OperationError as error:
                raise FailedError(error.trace) from error
        raise FailedError(f"no worker could be used: {last}") from last

    async def _start(self, slot: int | None, *, with_mapper: bool) -> RemoteWorker:
        worker_id = f"{self._job_id}-{uuid.uuid4().hex[:8]}"
        name, kind = self._pool.spec.name, self._pool.kind
        worker: RemoteWorker | None = None
        try:
            await asyncio.to_thread(self._jobs.intend_worker, name, worker_id, self._job_id, self._token, kind)
            started = await self._pool.start(worker_id, slot)
            worker = RemoteWorker(worker_id, started, self._job_id, self.spec.limits, slot, self._router)
            self._workers.add(worker)
            await worker.call("configure", spec=self.spec.to_dict(), start_mapper=with_mapper)
            await asyncio.to_thread(self._jobs.note_worker, name, worker_id, "ready", started.address, started.where)
        except BaseException as error:
            await asyncio.shield(self._give_up(worker_id, worker))
            if isinstance(error, Exception) and not isinstance(error, KNOWN):
                raise WorkerStartError(f"a worker cannot be started: {error!r}") from error
            raise
        return worker

    async def _give_up(self, worker_id: str, worker: RemoteWorker | None) -> None:
        """A worker that did not come to work: its process and its row go."""
        if worker is not None:
            await self.end(worker)
        else:
            await self._forget(worker_id)

    async def _stop(self, worker: RemoteWorker) -> None:
        grace_s = self.spec.limits.grace_s
        with contextlib.suppress(WorkerLostError):
            await worker.call("shutdown", grace_s=grace_s)
            worker.lost = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s + 1):
                    await worker.started.wait()
        await worker.close()
