"""A pool on the nodes of a Ray cluster: each worker is an actor, which Ray places with its reservation.

Ray chooses the node, and ends a worker when its node or its coordinator is lost. The coordinator's process does not
load Ray, since a broken Ray must not end it: a child process does (`ray_driver`), and ends with it. Calls, heartbeats,
files and logs go through that process as frames on its pipes. A slot for which the cluster has no room waits, which the
cluster's autoscaler sees; other slots work meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from tinsmith.batch.pools.ray_actor import MESSAGE, REFUSED
from tinsmith.batch.pools.specs import RAY, PoolSpec, WorkerLostError, WorkerStartError
from tinsmith.batch.types import JobSpec
from tinsmith.batch.worker.frames import FrameError, Message, decode, encode, pack, read_frame
from tinsmith.batch.worker.logs import JobLogs
from tinsmith.batch.worker.worker import CallRefusedError
from tinsmith.runtime.background import within
from tinsmith.settings.environment import ray_variables, role_environment

END_S = 5.0
"""How long the pool waits for a stopping worker."""
CHUNK_BYTES = 1 << 20
"""The bytes of a file that one call carries."""
RESOURCE_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}
"""Ray's names of a node's resources, by those of an actor's options."""

log = structlog.get_logger()


@dataclass(eq=False, slots=True)
class _Actor:
    """The driver's state of one worker."""

    log_path: Path
    started: asyncio.Future[Message] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    exit_event: asyncio.Event = field(default_factory=asyncio.Event)
    calls: dict[int, asyncio.Queue[Message]] = field(default_factory=dict)
    """The replies to its calls, by number."""


class Driver:
    """The process that speaks to Ray, for all pools of a coordinator. It starts with the first worker. If it ends, its
    workers end too, and the next worker starts it again."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self.nodes: dict[str, dict[str, float]] = {}
        """The resources of each node of the cluster, by its name, when a worker last started or ended."""
        self._actors: dict[str, _Actor] = {}
        self._replies: dict[int, asyncio.Queue[Message]] = {}
        self._call_ids = itertools.count()

    async def start(self, worker_id: str, log_path: Path, request: Message) -> RayWorker:
        """Start a worker. Waits for room. Raises WorkerStartError."""
        async with self._lock:
            if self._process is None:
                await self._open()
            actor = self._actors[worker_id] = _Actor(log_path)
            self._send({"start": worker_id, **request})
        try:
            reply = await actor.started
        except BaseException:
            self.kill(worker_id)
            raise
        return RayWorker(worker_id, reply["host"], reply["process"], self, actor.exit_event)

    def kill(self, worker_id: str) -> None:
        self._send({"kill": worker_id})

    async def call(self, worker_id: str, name: str, request: Message) -> AsyncGenerator[Message, None]:
        """The messages of a call to a worker. Raises CallRefusedError, WorkerLostError."""
        actor = self._actors.get(worker_id)
        if actor is None or self._process is None or self._process.stdin is None:
            raise WorkerLostError("the worker has ended")
        call_id, replies = next(self._call_ids), asyncio.Queue[Message]()
        actor.calls[call_id] = self._replies[call_id] = replies
        is_complete = False
        try:
            self._send({"call": call_id, "worker": worker_id, "name": name, "request": encode(request)})
            with contextlib.suppress(ConnectionError):  # the end of the process is reported to all calls
                await self._process.stdin.drain()
            while True:
                reply = await replies.get()
                is_complete = "lost" in reply
                if is_complete:
                    raise WorkerLostError(reply["lost"])
                kind, value = decode(reply["part"])
                is_complete = kind != MESSAGE
                if kind == REFUSED:
                    raise CallRefusedError(value)
                if is_complete:
                    return
                yield value
        finally:
            del actor.calls[call_id], self._replies[call_id]
            if not is_complete:
                self._send({"cancel": call_id})

    async def close(self) -> None:
        if self._reader is None:
            return
        if (process := self._process) is not None and process.stdin is not None:
            process.stdin.close()
            await asyncio.wait({self._reader}, timeout=END_S)
            if not self._reader.done():
                _kill(process)
        await self._reader

    async def _open(self) -> None:
        if self._reader is not None:
            await self._reader  # until the last process is gone
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tinsmith.batch.pools.ray_driver",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=role_environment() | ray_variables(),
            start_new_session=True,
        )
        self._process = process
        self._send({"address": self._address})
        self._reader = asyncio.create_task(self._read(process))

    def _send(self, message: Message) -> None:
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(pack(message))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Read the process's messages to its end, after which all its workers are gone."""
        assert process.stdout is not None
        reason = "the Ray driver process has ended"
        try:
            while (message := await read_frame(process.stdout)) is not None:
                if "refused" in message:
                    reason = message["refused"]
                else:
                    self._handle(message)
        except (FrameError, AttributeError, KeyError, TypeError, ValueError) as error:  # not a message of its protocol
            reason = f"the Ray driver process sent an invalid message: {error!r}"
            _kill(process)
        finally:
            self._process = None
            for worker_id in list(self._actors):
                self._record_end(worker_id, reason)
        if await within(END_S, process.wait()) is None:
            _kill(process)
            await process.wait()

    def _handle(self, message: Message) -> None:
        self.nodes = message.get("nodes") or self.nodes
        if "reply" in message:
            if message["reply"] in self._replies:
                self._replies[message["reply"]].put_nowait(message)
        elif "log" in message:
            if message["log"] in self._actors:
                _append(self._actors[message["log"]].log_path, message["text"])
        elif "started" in message:
            actor = self._actors.get(message["started"])
            if actor is not None and not actor.started.done():
                actor.started.set_result(message)
        else:
            self._record_end(message["gone"], message["why"], message["host"])

    def _record_end(self, worker_id: str, reason: str, host: str = "") -> None:
        actor = self._actors.pop(worker_id, None)
        if actor is None:
            return
        actor.exit_event.set()
        for replies in actor.calls.values():
            replies.put_nowait({"lost": reason})
        if not actor.started.done():
            actor.started.set_exception(WorkerStartError(reason, host))


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _append(log_path: Path, text: str) -> None:
    try:
        with log_path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        log.warning("a worker's log cannot be written", path=str(log_path), error=repr(error))


@dataclass(slots=True)
class RayWorker:
    """A worker on a node of the cluster."""

    worker_id: str
    host: str
    process_name: str
    driver: Driver
    exit_event: asyncio.Event

    @property
    def has_ended(self) -> bool:
        return self.exit_event.is_set()

    def call(self, name: str, request: Message) -> AsyncGenerator[Message, None]:
        return self.driver.call(self.worker_id, name, request)

    async def send_file(self, path: Path) -> AsyncGenerator[Message, None]:
        with path.open("rb") as file:
            request: Message = {"size": path.stat().st_size, "is_first": True}
            while (data := await asyncio.to_thread(file.read, CHUNK_BYTES)) or request["is_first"]:
                async for message in self.call("receive", request | {"data": data}):
                    yield message
                request["is_first"] = False

    async def wait(self) -> None:
        await self.exit_event.wait()

    async def kill(self) -> None:
        self.driver.kill(self.worker_id)
        await within(END_S, self.exit_event.wait())


def reservation(pool: PoolSpec, job: JobSpec | None) -> dict[str, Any]:
    """The resources of the actor: the job's, or else the pool's."""
    reserved: dict[str, Any] = {"num_cpus": pool.cpus, "num_gpus": pool.devices_per_worker}
    for name in ("num_cpus", "num_gpus", "memory", "resources"):
        if (amount := getattr(job, name, None)) is not None:
            reserved[name] = amount
    return reserved


class RayPool:
    """Starts the workers of one pool."""

    kind = RAY

    def __init__(self, spec: PoolSpec, logs: JobLogs, driver: Driver) -> None:
        self.spec = spec
        self._logs = logs
        self._driver = driver

    def host_of(self, slot: int) -> None:
        """Ray chooses the node."""

    def hosts(self, job: JobSpec) -> Collection[str]:
        """The nodes that are large enough for a worker of the job."""
        reserved = reservation(self.spec, job)
        demands = {RESOURCE_NAMES.get(name, name): amount for name, amount in reserved.items() if name != "resources"}
        demands |= reserved.get("resources") or {}
        return [
            name
            for name, resources in self._driver.nodes.items()
            if all(resources.get(resource, 0) >= amount for resource, amount in demands.items())
        ]

    async def start(
        self, worker_id: str, slot: int | None, job: JobSpec | None = None, avoid: Collection[str] = ()
    ) -> RayWorker:
        """Start a worker. A worker for an operation reserves nothing, since the workers whose job it finishes may hold
        all resources."""
        reserved = reservation(self.spec, job) if slot is not None else {"num_cpus": 0, "num_gpus": 0}
        request = {"setup": self.spec.setup, "reserved": reserved, "avoid": sorted(avoid)}
        self._logs.directory.mkdir(parents=True, exist_ok=True)
        worker = await self._driver.start(worker_id, self._logs.path(worker_id), request)
        log.info("a worker of bulk jobs is on a node", worker_id=worker_id, where=worker.process_name)
        return worker

    async def warm_up(self) -> None:
        """Nothing to do: an idle worker would hold resources of the cluster."""

    async def close(self) -> None:
        await self._driver.close()
