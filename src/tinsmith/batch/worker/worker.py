"""A worker: a small service that runs the batches of one job in a child, and outlives that child.

`python -m tinsmith.batch.worker.worker` reads one line of JSON from standard input (token, where to listen, log, a
directory for the files that it receives, a directory to delete at its end) and writes one (its address). It ends, with
its children, when standard input closes, which happens when the process that started it ends.

The calls (`rpc.py`): `configure` once, then `feed_batch` with the `assignments` of a group. Its answer is a heartbeat a
second while no attempt ends, the results of attempts, and the questions of operations, which `answer` answers. An
attempt that is fed twice runs once, and both callers get its result. Two groups are in flight at a time, and few
attempts of them with the mapper; when no attempt has ended for a second, those that have not begun are given back. The
token is that of one coordinator of one job, so a coordinator that was superseded can no longer use the worker. A worker
on another machine than its coordinator is sent the files that it reads (`receive`), and asked for its log (`log`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import sys
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

from tinsmith.batch.worker.children import Attempt, ChildError, Mapper, Utility, lost
from tinsmith.batch.worker.rpc import CHUNK_BYTES, Handler, Message, RefusedError, Server, read_chunks

T = TypeVar("T")

HEARTBEAT_S = 1.0
MAX_IN_FLIGHT = 2
"""Groups."""
MAX_GROUP = 32
GATHER_S = 0.02
"""How long an attempt's end waits for that of others of its group, to be sent in one message."""
REMEMBERED = 128
"""Attempts whose result is kept for a caller that asks again."""
LAST_WORDS_S = 1.0
"""How long a worker that was shut down takes to send the results that its callers still wait for."""
MAX_THREADS = 64
"""Calls that wait for a child at a time."""
OPERATIONS = ("plan", "publish", "delete", "give_up")
ASSIGNMENT = ("batch_idx", "start_idx", "end_idx", "attempt_id", "part_bases", "schemas")


class LoopQueue(Generic[T]):
    """A queue that any thread puts into and the event loop takes from."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[T] = asyncio.Queue()

    def put(self, item: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nothing takes any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def get(self, timeout_s: float) -> T | None:
        """None if nothing comes in time."""
        if not self._queue.empty():
            return self._queue.get_nowait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._queue.get()
        return None


class Worker:
    """The calls of a worker's service. Whatever may wait for a child runs on a thread."""

    def __init__(self, log_path: Path, directory: Path | None = None) -> None:
        self._log_path = log_path
        self._directory = directory
        self._lock = threading.Lock()
        self._attempts: OrderedDict[tuple[int, int], Attempt] = OrderedDict()
        self._started = time.monotonic()
        self._rows = self._tokens = self._batches = 0
        self.job_id: int | None = None
        self._mapper: Mapper | None = None
        self._utility: Utility | None = None
        self.draining = False

    def configure(self, request: Message) -> Message:
        with self._lock:
            if self.job_id is not None:
                raise RefusedError(409, f"this worker is configured for job {self.job_id}")
            self.job_id = int(request["job_id"])
            self._mapper = Mapper(request["spec"], self._log_path, self._count)
            self._utility = Utility(request["spec"], self.job_id, self._log_path)
        threading.Thread(target=self._watch, daemon=True).start()
        if request.get("start_mapper"):
            self._mapper.start()
        return {}

    def _watch(self) -> None:
        while not self.draining:
            time.sleep(0.2)
            if self._mapper:
                self._mapper.watch()

    async def feed(self, request: Message) -> AsyncGenerator[Message, None]:
        """The results of a group's attempts, those that end at about the same time together; or a heartbeat."""
        mapper = self._configured(request)[0]
        events: LoopQueue[Attempt | list[Message]] = LoopQueue()
        given = [
            Attempt({name: each[name] for name in ASSIGNMENT if name in each}, events)
            for each in request["assignments"]
        ]
        if not 0 < len(given) <= MAX_GROUP:
            raise RefusedError(400, f"assignments has {len(given)}; it must have from 1 to {MAX_GROUP}")
        with self._lock:
            new = [attempt for attempt in given if attempt.key not in self._attempts]
            groups = {id(other.group) for other in self._attempts.values() if not other.settled.is_set()}
            if new and len(groups) >= MAX_IN_FLIGHT:
                raise RefusedError(429, f"{MAX_IN_FLIGHT} groups of batches are in flight")
            known = [self._attempts[attempt.key] for attempt in given if attempt.key in self._attempts]
            self._attempts.update({attempt.key: attempt for attempt in new})
            self._forget()
        for attempt in known:
            attempt.follow(events)
        await asyncio.to_thread(mapper.feed, new)
        attempts = known + new
        left = len(attempts)
        while left:
            got = await _next_events(events, left)
            settled = [each for each in got if isinstance(each, Attempt)]
            asks = [ask for each in got if isinstance(each, list) for ask in each]
            left -= len(settled)
            if not got:
                await asyncio.to_thread(mapper.take_back, attempts)
                yield {"alive": True}
            if asks:
                yield {"asks": asks}
            if settled:
                yield {"settled": [{"key": attempt.key, **attempt.result} for attempt in settled]}

    def _forget(self) -> None:
        for key, attempt in list(self._attempts.items())[: len(self._attempts) - REMEMBERED]:
            if attempt.settled.is_set():
                del self._attempts[key]

    async def operate(self, request: Message) -> AsyncGenerator[Message, None]:
        """The messages of an operation of the utility child, with heartbeats while there are none."""
        utility = self._configured(request)[1]
        if request.get("op") not in OPERATIONS:
            raise RefusedError(400, f"op is {request.get('op')!r}; it must be one of {list(OPERATIONS)}")
        messages: LoopQueue[Message] = LoopQueue()

        def run() -> None:
            try:
                for message in utility.run(request):
                    messages.put(message)
            except (ChildError, OSError) as error:
                messages.put(lost("ChildError", str(error), infra=True))

        threading.Thread(target=run, daemon=True).start()
        while True:
            message = await messages.get(HEARTBEAT_S)
            yield message or {"alive": True}
            if message is not None and ("end" in message or "error" in message or "lost" in message):
                return

    def _configured(self, request: Message) -> tuple[Mapper, Utility]:
        if self.draining:
            raise RefusedError(409, "this worker is shutting down")
        if self._mapper is None or self._utility is None:
            raise RefusedError(409, "this worker is not configured")
        if request.get("job_id") != self.job_id:
            raise RefusedError(409, f"this worker is configured for job {self.job_id}")
        return self._mapper, self._utility

    def _count(self, attempt: Attempt) -> None:
        outcome = attempt.result.get("outcome")
        if outcome:
            self._batches += 1
            self._rows += outcome["rows_ok"] + outcome["rows_failed"]
            self._tokens += outcome["tokens_in"] + outcome["tokens_out"]

    def answer(self, request: Message) -> Message:
        self._configured(request)[0].answer(request["answers"])
        return {}

    async def receive(self, request: Message, reader: asyncio.StreamReader) -> AsyncGenerator[Message, None]:
        """A file of the coordinator's, for a worker that cannot see it: its `size` bytes follow the first message."""
        size = request["size"]
        if not isinstance(size, int) or size < 0:
            raise RefusedError(400, f"size is {size!r}; it must be a whole number of bytes")
        if self._directory is None:
            raise RefusedError(404, "this worker sees its coordinator's files")
        if size > (free := shutil.disk_usage(self._directory).free):
            raise RefusedError(413, f"the file has {size} bytes, and the disk has room for {free}")
        path = self._directory / uuid.uuid4().hex
        yield {"path": str(path)}
        with path.open("wb") as file:
            async for piece in read_chunks(reader, size):
                await asyncio.to_thread(file.write, piece)

    def log(self, request: Message) -> Message:
        """The whole lines of the log after so many bytes."""
        with self._log_path.open("rb") as log:
            log.seek(request["after"])
            page = log.read(CHUNK_BYTES)
        end = page.rfind(b"\n") + 1
        if not end and len(page) == CHUNK_BYTES:
            end = len(page)  # a line that no page can hold comes in pieces
        return {"text": page[:end].decode(errors="replace"), "end": request["after"] + end}

    def abort(self, request: Message) -> Message:
        self._configured(request)[0].abort((request["batch_idx"], request["attempt_id"]))
        return {}

    def shutdown(self, grace_s: float) -> None:
        self.draining = True
        if self._mapper:
            self._mapper.close(grace_s)
        if self._utility:
            self._utility.close()

    def health(self) -> Message:
        if self.draining:
            return {"state": "draining"}
        if self._mapper is not None and self._mapper.start_error:
            return {"state": "failed", "traceback": self._mapper.start_error}
        return {"state": "ready" if self._mapper is not None and self._mapper.ready else "starting"}

    def metrics(self) -> Message:
        elapsed_s = time.monotonic() - self._started
        waiting = sum(not attempt.settled.is_set() for attempt in self._attempts.values())
        return {
            "batches": self._batches,
            "rows": self._rows,
            "rows_per_s": self._rows / elapsed_s,
            "tokens_per_s": self._tokens / elapsed_s,
            "queue": waiting,
            "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "children_rss_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        }


async def _next_events(events: LoopQueue[Attempt | list[Message]], attempts_left: int) -> list[Attempt | list[Message]]:
    """Nothing within a heartbeat; or what has come, after a moment in which more ends of attempts may come."""
    first = await events.get(HEARTBEAT_S)
    got = [] if first is None else [first]
    until = time.monotonic() + GATHER_S
    while got and isinstance(got[-1], Attempt) and len(got) < attempts_left:
        another = await events.get(max(0.0, until - time.monotonic()))
        if another is None:
            break
        got.append(another)
    return got


class Service:
    """A worker's calls by name, on one address, until it is stopped."""

    def __init__(self, worker: Worker, token: str) -> None:
        self.worker = worker
        self._stopped = asyncio.Event()
        self._stopping: set[asyncio.Task[None]] = set()
        self.server = Server(
            token,
            {
                "health": _on_thread(lambda _: worker.health()),
                "metrics": _on_thread(lambda _: worker.metrics()),
                "configure": _on_thread(worker.configure),
                "answer": _on_thread(worker.answer),
                "abort": _on_thread(worker.abort),
                "log": _on_thread(worker.log),
                "feed_batch": lambda request, _: worker.feed(request),
                "operate": lambda request, _: worker.operate(request),
                "receive": worker.receive,
                "shutdown": self._shut_down,
            },
        )

    async def run(self, given: Message, ready: Callable[[str], None]) -> None:
        """Until a caller shuts the worker down. `ready` is called with the address."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MAX_THREADS))
        where = {"host": given.get("host", "127.0.0.1"), "port": int(given.get("port", 0))}
        ready(await self.server.listen(given.get("socket"), **where))
        await self._stopped.wait()
        await self.server.close()

    async def _shut_down(self, request: Message, _: asyncio.StreamReader) -> Message:
        """Answers at once; the process ends when the mapper has, or the grace is over."""
        task = asyncio.create_task(self._end(float(request.get("grace_s", 0))))
        self._stopping.add(task)
        return {}

    async def _end(self, grace_s: float) -> None:
        await asyncio.to_thread(self.worker.shutdown, grace_s)
        until = time.monotonic() + LAST_WORDS_S
        while self.server.num_active_calls and time.monotonic() < until:
            await asyncio.sleep(0.01)
        self._stopped.set()


def _on_thread(work: Callable[[Message], Message]) -> Handler:
    async def handle(request: Message, _: asyncio.StreamReader) -> Message:
        return await asyncio.to_thread(work, request)

    return handle


def main() -> None:
    given = json.loads(sys.stdin.readline())
    directory = given.get("directory")
    worker = Worker(Path(given["log_path"]), Path(directory) if directory else None)
    threading.Thread(target=_end_with_input, args=(worker, given.get("scratch")), daemon=True).start()

    def ready(address: str) -> None:
        sys.stdout.write(json.dumps({"address": address}) + "\n")
        sys.stdout.flush()

    async def serve() -> None:
        await Service(worker, given["token"]).run(given, ready)
        worker.shutdown(0)
        os._exit(0)  # whatever its threads still wait for

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


def _end_with_input(worker: Worker, scratch: str | None) -> None:
    sys.stdin.read()
    worker.shutdown(0)
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
