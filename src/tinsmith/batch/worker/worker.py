"""A worker: a small service that runs the batches of one job in a child and survives the child's death.

`python -m tinsmith.batch.worker.worker [ROLE...]` starts a spare child for each role, reads one line of JSON from
standard input (token, where to listen, log, a directory for received files, which it deletes at its end) and writes one
(its address). The worker and its children end when standard input closes, which happens when the process that started
the worker ends.

The calls (`rpc.py`):
- `configure`, once, before the others: the specification, and the values of its secrets, which stay in memory.
- `feed_batch` with the `assignments` of a group. It streams results of attempts, requests of operations to the server
  (`asks`), and a heartbeat a second while there is neither. `answer` brings the server's answers. At most
  `MAX_IN_FLIGHT` groups are in flight at a time. If no attempt ends for a second, those that the mapper has not begun
  are given back.
- `operate`: plan, issue_token, publish, delete, give_up; streams messages and heartbeats.
- `receive`: a file that the worker reads. `log` for a coordinator on another machine: the worker's log.
- `health`, `shutdown`.

The token belongs to one coordinator of one job, so a superseded coordinator cannot use the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Generic, TypeVar

from tinsmith.batch.types import MAX_CONCURRENT_BATCHES, AttemptFailure
from tinsmith.batch.worker.children import Attempt, Child, ChildError, IoProcess, MapperProcess, spare
from tinsmith.batch.worker.logs import read_page, write_to
from tinsmith.batch.worker.rpc import CallRefusedError, Message, RpcServer, read_chunks
from tinsmith.runtime.background import within

T = TypeVar("T")

HEARTBEAT_S = 1.0
WATCH_S = 0.2
MAX_IN_FLIGHT = MAX_CONCURRENT_BATCHES + 1
"""The most groups of attempts with a worker."""
MAX_GROUP = 256
GATHER_S = 0.02
"""How long a settled attempt waits for others, to be sent in one message."""
FLUSH_S = 5.0
"""How long a worker waits at its shutdown for its replies and the rest of its log to be sent."""
MAX_THREADS = 64
OPERATIONS = ("plan", "issue_token", "publish", "delete", "give_up")
ASSIGNMENT = ("batch_idx", "start_idx", "end_idx", "attempt_id", "part_bases", "schemas")


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
    """The calls of one worker. Calls that may block on a child run on a thread."""

    def __init__(self, token: str, log_path: Path, directory: Path, spares: Mapping[str, Child] | None = None) -> None:
        self._log_path = log_path
        self._spares = dict(spares or {})
        self._directory = directory
        self._job_id: int | None = None
        self._mapper: MapperProcess | None = None
        self._io_process: IoProcess | None = None
        self._num_groups = 0
        self._draining = False
        self._children_ended = asyncio.Event()
        self._stopped = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._server = RpcServer(
            token,
            {
                "configure": self._configure,
                "feed_batch": self._feed,
                "answer": self._answer,
                "operate": self._operate,
                "receive": self._receive,
                "log": self._log,
                "health": self._health,
                "shutdown": self._shut_down,
            },
        )

    async def listen(self, path: str | None, host: str) -> str:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MAX_THREADS))
        return await self._server.listen(path, host)

    async def serve(self) -> None:
        """Serve calls until one of them shuts the worker down."""
        await self._stopped.wait()
        await self._server.close()

    def close(self, grace_s: float = 0) -> None:
        """End the children."""
        self._draining = True
        if self._mapper is not None:
            self._mapper.close(grace_s)
        if self._io_process is not None:
            self._io_process.close()
        for child in self._spares.values():
            child.kill()

    # The calls.

    async def _configure(self, request: Message, _: asyncio.StreamReader) -> Message:
        if self._job_id is not None:
            raise CallRefusedError(409, f"this worker is configured for job {self._job_id}")
        self._job_id = int(request["job_id"])
        spec = request["spec"]
        variables = {**spec.get("env", {}), **request.get("secrets", {})}
        self._mapper = MapperProcess(spec, self._log_path, self._spares.pop("mapper", None), variables)
        self._io_process = IoProcess(spec, self._job_id, self._log_path, self._spares.pop("io", None), variables)
        threading.Thread(target=self._watch, args=(self._mapper,), daemon=True).start()
        if request.get("start_mapper"):
            await asyncio.to_thread(self._mapper.start)
        return {}

    def _watch(self, mapper: MapperProcess) -> None:
        while not self._draining:
            time.sleep(WATCH_S)
            mapper.watch()

    async def _feed(self, request: Message, _: asyncio.StreamReader) -> AsyncGenerator[Message, None]:
        mapper, _io_process = self._require_job(request)
        events: LoopQueue[Attempt | list[Message]] = LoopQueue()
        attempts = [
            Attempt({name: assignment[name] for name in ASSIGNMENT if name in assignment}, events.put)
            for assignment in request["assignments"]
        ]
        if not 0 < len(attempts) <= MAX_GROUP:
            raise CallRefusedError(400, f"assignments has {len(attempts)} items; it must have from 1 to {MAX_GROUP}")
        if self._num_groups >= MAX_IN_FLIGHT:
            raise CallRefusedError(429, f"{MAX_IN_FLIGHT} groups of batches are in flight")
        self._num_groups += 1
        try:
            await asyncio.to_thread(mapper.feed, attempts)
            num_unsettled = len(attempts)
            while num_unsettled:
                new_events = await _next_events(events, num_unsettled)
                if not new_events:
                    await asyncio.to_thread(mapper.give_back, attempts)
                    yield {"alive": True}
                if asks := [ask for event in new_events if isinstance(event, list) for ask in event]:
                    yield {"asks": asks}
                if settled := [event for event in new_events if isinstance(event, Attempt)]:
                    num_unsettled -= len(settled)
                    yield {"settled": [{"key": attempt.key, **attempt.result} for attempt in settled]}
        finally:
            self._num_groups -= 1

    async def _answer(self, request: Message, _: asyncio.StreamReader) -> Message:
        mapper, _io_process = self._require_job(request)
        await asyncio.to_thread(mapper.answer, request["answers"])
        return {}

    async def _operate(self, request: Message, _: asyncio.StreamReader) -> AsyncGenerator[Message, None]:
        _mapper, io_process = self._require_job(request)
        if request.get("op") not in OPERATIONS:
            raise CallRefusedError(400, f"op is {request.get('op')!r}; it must be one of {list(OPERATIONS)}")
        messages: LoopQueue[Message] = LoopQueue()

        def run() -> None:
            try:
                for message in io_process.run(request):
                    messages.put(message)
            except (ChildError, OSError) as error:
                messages.put({"lost": asdict(AttemptFailure("ChildError", str(error), infra=True))})

        threading.Thread(target=run, daemon=True).start()
        while True:
            message = await messages.get(HEARTBEAT_S)
            yield message or {"alive": True}
            if message is not None and not message.keys().isdisjoint(("end", "error", "lost")):
                return

    def _require_job(self, request: Message) -> tuple[MapperProcess, IoProcess]:
        if self._draining:
            raise CallRefusedError(409, "this worker is shutting down")
        if self._mapper is None or self._io_process is None:
            raise CallRefusedError(409, "this worker is not configured")
        if request.get("job_id") != self._job_id:
            raise CallRefusedError(409, f"this worker is configured for job {self._job_id}")
        return self._mapper, self._io_process

    async def _receive(self, request: Message, reader: asyncio.StreamReader) -> AsyncGenerator[Message, None]:
        """Receive a file of `size` bytes, which the caller sends after the first message."""
        size = request["size"]
        if not isinstance(size, int) or size < 0:
            raise CallRefusedError(400, f"size is {size!r}; it must be a whole number of bytes")
        if size > (free := shutil.disk_usage(self._directory).free):
            raise CallRefusedError(413, f"the file has {size} bytes, and the disk has {free} free")
        path = self._directory / uuid.uuid4().hex
        yield {"path": str(path)}
        with path.open("wb") as file:
            async for chunk in read_chunks(reader, size):
                await asyncio.to_thread(file.write, chunk)

    async def _log(self, request: Message, _: asyncio.StreamReader) -> AsyncGenerator[Message, None]:
        """Yields the pages of the log from the byte `after`. With `follow`, until the children have ended."""
        end = request["after"]
        is_last = not request["follow"]
        while True:
            is_last = is_last or self._children_ended.is_set()
            while (page := await asyncio.to_thread(read_page, self._log_path, end))[1] > end:
                end = page[1]
                yield {"text": page[0], "end": end}
            if is_last:
                return
            yield {"text": "", "end": end}  # the caller sees that the worker is alive
            await within(HEARTBEAT_S, self._children_ended.wait())

    async def _health(self, _request: Message, _: asyncio.StreamReader) -> Message:
        if self._draining:
            return {"state": "draining"}
        return {"state": "starting"} if self._mapper is None else self._mapper.state

    async def _shut_down(self, request: Message, _: asyncio.StreamReader) -> Message:
        """Replies at once; the process ends when the mapper has ended or the grace period is over."""
        self._stopping = asyncio.create_task(self._end(float(request.get("grace_s", 0))))
        return {}

    async def _end(self, grace_s: float) -> None:
        await asyncio.to_thread(self.close, grace_s)
        self._children_ended.set()
        until = time.monotonic() + FLUSH_S
        while self._server.num_active_calls and time.monotonic() < until:
            await asyncio.sleep(0.01)
        self._stopped.set()


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


def main() -> None:
    spares = {role: spare(role) for role in sys.argv[1:]}
    line = sys.stdin.readline()
    if not line:
        for child in spares.values():
            child.kill()
        return
    config = json.loads(line)
    write_to(config["log_path"], 2)

    async def serve() -> None:
        directory = Path(config["directory"])
        worker = Worker(config["token"], Path(config["log_path"]), directory, spares)
        threading.Thread(target=_end_with_input, args=(worker, directory), daemon=True).start()
        address = await worker.listen(config.get("socket"), config.get("host", "127.0.0.1"))
        sys.stdout.write(json.dumps({"address": address}) + "\n")
        sys.stdout.flush()
        await worker.serve()
        worker.close()
        os._exit(0)  # threads may still wait for children

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


def _end_with_input(worker: Worker, directory: Path) -> None:
    sys.stdin.read()
    worker.close()
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
