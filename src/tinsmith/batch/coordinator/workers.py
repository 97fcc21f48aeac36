"""The workers of one bulk job: started, lent to slots and to operations, kept while they are idle, and ended.

A worker's row is written before it is started and deleted when it is gone, so that whoever takes the job over knows
whom to end. One that is useless (lost, or its mapper does not start) is never lent again. Knows no batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from tinsmith.batch.coordinator.model_gateway import Desk
from tinsmith.batch.coordinator.state import BatchJobs, SupersededError
from tinsmith.batch.pools.specs import Pool, WorkerStartError
from tinsmith.batch.types import JobSpec
from tinsmith.batch.worker.rpc import OperationError, RemoteWorker, WorkerLostError

MAX_OPERATION_TRIES = 3

KNOWN = (WorkerStartError, WorkerLostError, SupersededError, SQLAlchemyError)
"""What those who ask for a worker tell apart; anything else that goes wrong on the way is a WorkerStartError."""

T = TypeVar("T")


class FailedError(Exception):
    """The job cannot go on; the message says why."""


class Crew:
    def __init__(self, jobs: BatchJobs, job_id: int, token: str, spec: JobSpec, pool: Pool, desk: Desk | None) -> None:
        self._jobs = jobs
        self._job_id = job_id
        self._token = token
        self.spec = spec
        self._pool = pool
        self._desk = desk
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
            worker = RemoteWorker(worker_id, started, self._job_id, self.spec.limits, slot, self._desk)
            self._workers.add(worker)
            await worker.call("/configure", spec=self.spec.to_dict(), start_mapper=with_mapper)
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
            await worker.call("/shutdown", grace_s=grace_s)
            worker.lost = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s + 1):
                    await worker.started.wait()
        await worker.close()
