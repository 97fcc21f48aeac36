"""A pool of workers on this machine: objects of this process, whose children run the jobs (`worker.py`).

With accelerators, each slot has its own devices; no worker sees one that an engine of this server may use
(`devices.py`).

Starting Python takes longer than many jobs. So when a job has ended, a pool without accelerators starts children for
the workers of the next one (`warm_up`): they have imported their modules and wait for their first message. They end
after `SPARE_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections import deque
from collections.abc import Collection, Sequence

from tinsmith.batch.pools.specs import LOCAL, PoolSpec, WorkerStartError
from tinsmith.batch.types import JobSpec
from tinsmith.batch.worker.children import Child, start_spare
from tinsmith.batch.worker.logs import JobLogs
from tinsmith.batch.worker.worker import Worker
from tinsmith.settings.environment import worker_environment

SPARE_S = 300.0
MAX_SPARES = 4


class LocalPool:
    """Starts workers of one pool."""

    kind = LOCAL

    def __init__(self, spec: PoolSpec, logs: JobLogs) -> None:
        self.spec = spec
        self._logs = logs
        self._setup_lock = asyncio.Lock()
        self._setup_done = False
        self._spares: dict[str, deque[Child]] = {"mapper": deque(), "io": deque()}
        self._warming = asyncio.Lock()
        self._expiry: asyncio.TimerHandle | None = None
        self._closed = False

    def host_of(self, slot: int) -> str:
        """The name of this machine and, with accelerators, of the slot's GPUs: one GPU may be out of order, and others
        not."""
        devices = self._devices_of(slot)
        return f"{socket.gethostname()}, GPU {', '.join(devices)}" if devices else socket.gethostname()

    def hosts(self, job: JobSpec) -> Collection[str]:
        del job
        return {self.host_of(slot) for slot in range(max(1, self.spec.slots))}

    async def start(
        self, worker_id: str, slot: int | None, job: JobSpec | None = None, avoid: Collection[str] = ()
    ) -> Worker:
        """Start a worker. A job with variables has no use for spare children, which have imported their modules without
        them."""
        del avoid
        host = socket.gethostname() if slot is None else self.host_of(slot)
        try:
            await self._prepare(host)
            self._logs.directory.mkdir(parents=True, exist_ok=True)
            log_path = self._logs.path(worker_id)
        except OSError as error:
            raise WorkerStartError(f"a worker cannot be started: {error!r}", host) from error
        has_variables = job is not None and bool(job.env or job.secrets)
        spares = {} if has_variables else {role: queue.popleft() for role, queue in self._spares.items() if queue}
        return Worker(log_path, {**worker_environment(), **self._environment(slot)}, host, spares)

    async def warm_up(self) -> None:
        """Start the children of the next workers. Only the first worker, which plans and publishes, needs one for
        IO."""
        num_mappers = 0 if self.spec.devices_per_worker else min(self.spec.workers, MAX_SPARES)
        async with self._warming:
            for role, count in {"mapper": num_mappers, "io": min(num_mappers, 1)}.items():
                while len(self._spares[role]) < count and not self._closed:
                    await asyncio.to_thread(self._add_spare, role)
        if self._expiry is not None:
            self._expiry.cancel()
        loop = asyncio.get_running_loop()
        self._expiry = loop.call_later(SPARE_S, loop.run_in_executor, None, self._end_spares)

    def _add_spare(self, role: str) -> None:
        self._spares[role].append(start_spare(role, {**worker_environment(), **self._environment(None)}))
        if self._closed:  # meanwhile
            self._end_spares()

    def _end_spares(self) -> None:
        for queue in self._spares.values():
            with contextlib.suppress(IndexError):
                while True:
                    queue.popleft().reap()

    async def close(self) -> None:
        """End the spare children. Those of workers end with their workers."""
        self._closed = True
        if self._expiry is not None:
            self._expiry.cancel()
        await asyncio.to_thread(self._end_spares)

    def _devices_of(self, slot: int) -> Sequence[str]:
        devices, count = self.spec.devices, self.spec.devices_per_worker
        return devices.of_slot(slot, count) if devices is not None and count else ()

    def _environment(self, slot: int | None) -> dict[str, str]:
        """The mask of a worker: its slot's GPUs, or else those that no engine uses."""
        devices = self.spec.devices
        if devices is None:
            return {}
        if self.spec.devices_per_worker and slot is not None:
            return {"CUDA_VISIBLE_DEVICES": ",".join(self._devices_of(slot))}
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices.free)} if devices.engines else {}

    async def _prepare(self, host: str) -> None:
        """Run the pool's setup command once, before its first worker."""
        async with self._setup_lock:
            if self._setup_done or not self.spec.setup:
                return
            process = await asyncio.create_subprocess_shell(
                self.spec.setup,
                executable=shutil.which("bash"),  # as SkyPilot's setup
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            try:
                output, _ = await process.communicate()
            finally:  # also if the start was cancelled
                if process.returncode is None:
                    process.kill()
            if process.returncode:
                tail = output.decode(errors="replace")[-2000:]
                raise WorkerStartError(f"the setup of pool {self.spec.name!r} failed: {tail}", host)
            self._setup_done = True
