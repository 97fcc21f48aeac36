"""A worker: runs the batches of one job in a child and survives the child's death.

A worker is an object of the process that is the parent of its children: the coordinator's for a pool on this machine
(`pools/local.py`), an actor for a pool on a Ray cluster (`pools/ray_actor.py`). The children end with that process.
Only the owner of the object makes calls, so a superseded coordinator has no way to another one's workers.

The calls (`Worker.call`):
- `configure`, once, before the others: the specification, and the values of its secrets, which stay in memory.
- `feed_batch` with the `assignments` of a group. It streams results of attempts, requests of operations to the server
  (`asks`), and a heartbeat a second while there is neither. `answer` brings the server's answers. At most
  `MAX_IN_FLIGHT` groups are in flight at a time. If no attempt ends for a second, those that the mapper has not begun
  are given back.
- `operate`: plan, issue_token, publish, delete, give_up; streams messages and heartbeats.
- `shutdown`: returns at once; the worker ends when its mapper has ended or the grace period is over.
- `health`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from tinsmith.batch.types import MAX_CONCURRENT_BATCHES, Assignment, AttemptFailure, FailureCause
from tinsmith.batch.worker.children import Child, ChildError, IoProcess
from tinsmith.batch.worker.frames import Message
from tinsmith.batch.worker.mapper_process import Attempt, MapperProcess

T = TypeVar("T")

HEARTBEAT_S = 1.0
WATCH_S = 0.2
MAX_IN_FLIGHT = MAX_CONCURRENT_BATCHES + 1
"""The most groups of attempts with a worker."""
MAX_GROUP = 256
"""The most attempts in one group."""
GATHER_S = 0.02
"""How long a settled attempt waits for others, to be sent in one message."""
MAX_THREADS = 8
"""The most calls of one worker that block on its children at a time."""
OPERATIONS = ("plan", "issue_token", "publish", "delete", "give_up")
ASSIGNMENT = tuple(Assignment.__dataclass_fields__)

log = structlog.get_logger()


class CallRefusedError(Exception):
    """The worker refused a call; the message says why."""


class LoopQueue(Generic[T]):
    """A queue that any thread puts into and the event loop takes from."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[T] = asyncio.Queue()

    def put(self, item: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def get(self, timeout_s: float) -> T | None:
        if not self._queue.empty():
            return self._queue.get_nowait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._queue.get()
        return None


class Worker:
    """One worker. Calls that may block on a child run on threads of its own."""

    def __init__(
        self, log_path: Path, environment: Mapping[str, str], host: str, spares: Mapping[str, Child] | None = None
    ) -> None:
        """`environment` is that of its children, without the job's variables; `host` names the machine."""
        self.host = host
        self._log_path = log_path
        self._environment = environment
        self._spares = dict(spares or {})
        self._job_id: int | None = None
        self._mapper: MapperProcess | None = None
        self._io_process: IoProcess | None = None
        self._num_groups = 0
        self._threads = ThreadPoolExecutor(MAX_THREADS, "batch-worker")
        self._ending: asyncio.Task[None] | None = None
        self._end_event = asyncio.Event()
        self._handlers: Mapping[str, Callable[[Message], Awaitable[Message] | AsyncGenerator[Message, None]]] = {
            "configure": self._configure,
            "feed_batch": self._feed_batch,
            "answer": self._answer,
            "operate": self._operate,
            "health": self._read_health,
            "shutdown": self._shut_down,
        }

    @property
    def process_name(self) -> str:
        """The process of its function or, before there is one, this process."""
        pid = self._mapper.pid if self._mapper is not None else None
        return str(pid or os.getpid())

    @property
    def has_ended(self) -> bool:
        return self._end_event.is_set()

    async def wait(self) -> None:
        """Wait until it has ended."""
        await self._end_event.wait()

    async def kill(self) -> None:
        """End the children at once, also within a grace period."""
        for process in filter(None, (self._mapper, self._io_process)):
            process.kill()
        await asyncio.shield(self._begin_end(0.0))

    async def send_file(self, path: Path) -> AsyncGenerator[Message, None]:
        """The last message has the path of the file for this worker's children, which are on the caller's machine."""
        yield {"path": str(path)}

    async def call(self, name: str, request: Message) -> AsyncGenerator[Message, None]:
        """The messages of a call. Raises CallRefusedError, also for an exception of the call."""
        try:
            if name not in self._handlers:
                raise CallRefusedError(f"unknown call {name!r}; the calls are {sorted(self._handlers)}")
            reply = self._handlers[name](request)
            if isinstance(reply, AsyncGenerator):
                async with contextlib.aclosing(reply) as messages:
                    async for message in messages:
                        yield message
            elif message := await reply:
                yield message
        except CallRefusedError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise CallRefusedError(f"the request is not valid: {error!r}") from error
        except Exception as error:
            log.exception("a call to a worker of bulk jobs failed", call=name, job_id=self._job_id)
            raise CallRefusedError(f"the call failed: {error!r}") from error

    # The calls.

    async def _configure(self, request: Message) -> Message:
        if self._job_id is not None:
            raise CallRefusedError(f"this worker is configured for job {self._job_id}")
        self._job_id = int(request["job_id"])
        spec = request["spec"]
        variables = {**spec.get("env", {}), **request.get("secrets", {})}
        environment = {**self._environment, **variables}
        # Libraries may read variables when they are imported, which spares have done.
        mapper_spare, io_spare = (None if variables else self._spares.pop(role, None) for role in ("mapper", "io"))
        self._mapper = MapperProcess(spec, self._log_path, mapper_spare, environment)
        self._io_process = IoProcess(spec, self._job_id, self._log_path, io_spare, environment)
        threading.Thread(target=self._watch, args=(self._mapper,), daemon=True).start()
        if request.get("start_mapper"):
            await self._run_on_thread(self._mapper.start)
        return {}

    def _watch(self, mapper: MapperProcess) -> None:
        while self._ending is None:
            time.sleep(WATCH_S)
            mapper.watch()

    async def _feed_batch(self, request: Message) -> AsyncGenerator[Message, None]:
        mapper, _io_process = self._require_job(request)
        events: LoopQueue[Attempt | list[Message]] = LoopQueue()
        attempts = [
            Attempt({name: assignment[name] for name in ASSIGNMENT if name in assignment}, events.put)
            for assignment in request["assignments"]
        ]
        if not 0 < len(attempts) <= MAX_GROUP:
            raise CallRefusedError(f"assignments has {len(attempts)} items; it must have from 1 to {MAX_GROUP}")
        if self._num_groups >= MAX_IN_FLIGHT:
            raise CallRefusedError(f"{MAX_IN_FLIGHT} groups of batches are in flight")
        self._num_groups += 1
        try:
            await self._run_on_thread(mapper.feed, attempts)
            num_unsettled = len(attempts)
            while num_unsettled:
                new_events = await _next_events(events, num_unsettled)
                if not new_events:
                    await self._run_on_thread(mapper.give_back, attempts)
                    yield {"alive": True}
                if asks := [ask for event in new_events if isinstance(event, list) for ask in event]:
                    yield {"asks": asks}
                if settled := [event for event in new_events if isinstance(event, Attempt)]:
                    num_unsettled -= len(settled)
                    yield {"settled": [{"key": attempt.key, **attempt.result} for attempt in settled]}
        finally:
            self._num_groups -= 1

    async def _answer(self, request: Message) -> Message:
        mapper, _io_process = self._require_job(request)
        await self._run_on_thread(mapper.answer, request["answers"])
        return {}

    async def _operate(self, request: Message) -> AsyncGenerator[Message, None]:
        _mapper, io_process = self._require_job(request)
        if request.get("op") not in OPERATIONS:
            raise CallRefusedError(f"op is {request.get('op')!r}; it must be one of {list(OPERATIONS)}")
        messages: LoopQueue[Message] = LoopQueue()

        def run() -> None:
            try:
                for message in io_process.run(request):
                    messages.put(message)
            except (ChildError, OSError) as error:
                messages.put({"lost": asdict(AttemptFailure("ChildError", str(error), FailureCause.WORKER))})

        threading.Thread(target=run, daemon=True).start()
        while True:
            message = await messages.get(HEARTBEAT_S)
            yield message or {"alive": True}
            if message is not None and not message.keys().isdisjoint(("end", "error", "lost")):
                return

    def _require_job(self, request: Message) -> tuple[MapperProcess, IoProcess]:
        if self._ending is not None:
            raise CallRefusedError("this worker is shutting down")
        if self._mapper is None or self._io_process is None:
            raise CallRefusedError("this worker is not configured")
        if request.get("job_id") != self._job_id:
            raise CallRefusedError(f"this worker is configured for job {self._job_id}")
        return self._mapper, self._io_process

    async def _read_health(self, _request: Message) -> Message:
        if self._ending is not None:
            return {"state": "draining"}
        return {"state": "starting"} if self._mapper is None else self._mapper.state

    async def _shut_down(self, request: Message) -> Message:
        self._begin_end(float(request.get("grace_s", 0)))
        return {}

    def _begin_end(self, grace_s: float) -> asyncio.Task[None]:
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(grace_s))
        return self._ending

    async def _end(self, grace_s: float) -> None:
        try:
            await self._run_on_thread(self._close_children, grace_s)
        finally:
            self._threads.shutdown(wait=False)
            self._end_event.set()

    def _close_children(self, grace_s: float) -> None:
        if self._mapper is not None:
            self._mapper.close(grace_s)
        if self._io_process is not None:
            self._io_process.close()
        for child in self._spares.values():
            child.reap()

    async def _run_on_thread(self, function: Callable[..., T], *arguments: Any) -> T:  # noqa: ANN401
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


async def _next_events(events: LoopQueue[Attempt | list[Message]], attempts_left: int) -> list[Attempt | list[Message]]:
    """The next events; empty if none comes within a heartbeat. Waits up to `GATHER_S` for more attempts to settle."""
    first = await events.get(HEARTBEAT_S)
    collected = [] if first is None else [first]
    until = time.monotonic() + GATHER_S
    while collected and isinstance(collected[-1], Attempt) and len(collected) < attempts_left:
        another = await events.get(max(0.0, until - time.monotonic()))
        if another is None:
            break
        collected.append(another)
    return collected
