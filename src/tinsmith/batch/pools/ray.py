"""A pool on the nodes of a Ray cluster: Ray places each worker with its reservation, and the coordinator calls it.

Ray chooses the node, and ends a worker when its node or its coordinator is lost. Calls go over TCP. Rows, results and
logs do not pass through Ray. The coordinator's process does not load Ray: a child process does (`ray_driver`), and
ends with it. A slot for which the cluster has no room waits, which the cluster's autoscaler sees; other slots work
meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from tinsmith.batch.pools.specs import RAY, PoolSpec, WorkerStartError
from tinsmith.batch.types import JobSpec
from tinsmith.batch.worker.logs import JobLogs
from tinsmith.batch.worker.rpc import CallRefusedError, ConnectionLostError, RpcClient
from tinsmith.runtime.background import within
from tinsmith.settings.environment import ray_variables, role_environment

RETRY_S = 1.0
"""The pause before a log whose connection was lost is read on."""
END_S = 5.0
"""How long the pool waits for a stopping worker."""
LINE_BYTES = 1 << 20
RESOURCE_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}
"""Ray's names of a node's resources, by those of an actor's options."""

log = structlog.get_logger()


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
        self._starting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._exit_events: dict[str, asyncio.Event] = {}

    async def start(self, worker_id: str, request: dict[str, Any]) -> tuple[dict[str, Any], asyncio.Event]:
        """Start a worker; returns its address and an event that is set when it has ended. Waits for room."""
        started: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        exit_event = asyncio.Event()
        async with self._lock:
            if self._process is None:
                await self._open()
            self._starting[worker_id] = started
            self._exit_events[worker_id] = exit_event
            self._send({"start": worker_id, **request})
        try:
            return await started, exit_event
        except BaseException:
            self.kill(worker_id)
            raise
        finally:
            self._starting.pop(worker_id, None)

    def kill(self, worker_id: str) -> None:
        self._send({"kill": worker_id})

    async def close(self) -> None:
        process, reader = self._process, self._reader
        if process is None or reader is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        await reader

    async def _open(self) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tinsmith.batch.pools.ray_driver",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=role_environment() | ray_variables(),
            start_new_session=True,
            limit=LINE_BYTES,
        )
        self._process = process
        self._send({"address": self._address})
        self._reader = asyncio.create_task(self._read(process))

    def _send(self, message: dict[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Read the process's messages to its end, after which all its workers are gone."""
        assert process.stdout is not None
        reason = "the Ray driver process has ended"
        try:
            async for line in process.stdout:
                message = json.loads(line)
                self.nodes = message.get("nodes") or self.nodes
                if "refused" in message:
                    reason = message["refused"]
                elif "started" in message:
                    starting = self._starting.get(message["started"])
                    if starting is not None and not starting.done():
                        starting.set_result(message)
                else:
                    self._report_end(message["gone"], message["why"], message["host"])
        except (ValueError, KeyError, TypeError) as error:  # not a line of its protocol
            reason = f"the Ray driver process sent an invalid message: {error!r}"
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        finally:
            self._process = None
            for worker_id in list(self._exit_events):
                self._report_end(worker_id, reason)
        await process.wait()

    def _report_end(self, worker_id: str, reason: str, host: str = "") -> None:
        if worker_id in self._exit_events:
            self._exit_events.pop(worker_id).set()
        starting = self._starting.get(worker_id)
        if starting is not None and not starting.done():
            starting.set_exception(WorkerStartError(reason, host))


@dataclass(slots=True)
class RayWorker:
    """A worker on a node of the cluster."""

    worker_id: str
    address: str
    token: str
    host: str
    process_name: str
    driver: Driver
    exit_event: asyncio.Event
    log_path: Path
    following: asyncio.Task[None] | None = field(default=None)
    log_end: int = 0
    """The byte up to which its log is copied."""

    @property
    def has_ended(self) -> bool:
        return self.exit_event.is_set()

    async def wait(self) -> None:
        await self.exit_event.wait()

    async def kill(self) -> None:
        if self.following is not None:
            if not self.has_ended:
                self.following.cancel()
            await within(END_S, asyncio.gather(self.following, return_exceptions=True))
        self.driver.kill(self.worker_id)
        await within(END_S, self.exit_event.wait())

    async def follow(self) -> None:
        """Copy its output to the log of this server until it ends."""
        client = RpcClient(self.address, self.token, connect_s=END_S, silence_s=END_S)
        try:
            while not self.has_ended:
                await self._copy(client, follow=True)
                await within(RETRY_S, self.exit_event.wait())
        except asyncio.CancelledError:
            if not self.has_ended:
                await self._copy(client, follow=False)
            raise
        finally:
            await client.close()

    async def _copy(self, client: RpcClient, *, follow: bool) -> None:
        """Write the pages of the worker's log that are not copied yet; with `follow`, until its children have ended."""
        with contextlib.suppress(CallRefusedError, ConnectionLostError, OSError):
            async with contextlib.aclosing(client.stream("log", {"after": self.log_end, "follow": follow})) as pages:
                async for page in pages:
                    if page["text"]:
                        with self.log_path.open("a", encoding="utf-8") as file:
                            file.write(page["text"])
                    self.log_end = page["end"]


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
        token = secrets.token_urlsafe(32)
        reserved = reservation(self.spec, job) if slot is not None else {"num_cpus": 0, "num_gpus": 0}
        request = {"token": token, "setup": self.spec.setup, "reserved": reserved, "avoid": sorted(avoid)}
        self._logs.directory.mkdir(parents=True, exist_ok=True)
        path = self._logs.path(worker_id)
        reply, exit_event = await self._driver.start(worker_id, request)
        address, host, process = reply["address"], reply["host"], reply["where"]
        worker = RayWorker(worker_id, address, token, host, process, self._driver, exit_event, path)
        worker.following = asyncio.create_task(worker.follow())
        log.info("a worker of bulk jobs is on a node", worker_id=worker_id, where=worker.process_name)
        return worker

    async def warm_up(self) -> None:
        """Nothing to do: an idle worker would hold resources of the cluster."""

    async def close(self) -> None:
        await self._driver.close()
