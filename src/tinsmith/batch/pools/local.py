"""A pool of worker processes on this machine.

A worker is a process group that listens on a Unix-domain socket and ends when this process ends. Whichever process ends
last deletes the socket's directory. If both are killed, the next server on the same data directory deletes it. With
accelerators, each slot has its own devices; no worker sees one that an engine of this server may use (`devices.py`).

Starting Python takes longer than many jobs. So when a job has ended, a pool without accelerators starts processes for
the next one (`warm_up`): they have imported the worker's modules and wait for the line that makes them workers. They
end after `SPARE_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinsmith.batch.pools.specs import LOCAL, PoolSpec, WorkerStartError
from tinsmith.batch.types import JobSpec
from tinsmith.batch.worker.logs import JobLogs
from tinsmith.runtime.background import within
from tinsmith.settings.environment import worker_environment

START_S = 60.0
"""How long a worker's service may take to listen; its mapper starts later."""
SPARE_S = 300.0
MAX_SPARES = 4
END_S = 2.0
"""How long a worker may take to end its children and itself."""


@dataclass(slots=True)
class LocalWorker:
    """A worker's process, and how to reach it."""

    process: asyncio.subprocess.Process
    address: str
    token: str
    directory: Path
    host: str

    @property
    def process_name(self) -> str:
        return str(self.process.pid)

    @property
    def has_ended(self) -> bool:
        return self.process.returncode is not None

    async def wait(self) -> None:
        await self.process.wait()

    async def kill(self) -> None:
        """End the worker, which kills its children. Children of a killed worker notice its end and exit."""
        if self.process.stdin:
            self.process.stdin.close()  # the worker kills its children, then itself
        try:
            await within(END_S, self.process.wait())
        finally:  # also if the wait is cancelled
            if self.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            shutil.rmtree(self.directory, ignore_errors=True)
            await self.process.wait()


def sweep(logs: JobLogs) -> None:
    """Delete directories left by workers of an earlier server on the same data directory, before the first start."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_prefix(logs)}*"):
        shutil.rmtree(directory, ignore_errors=True)


def _prefix(logs: JobLogs) -> str:
    return f"tinsmith-worker-{hashlib.sha256(str(logs.directory).encode()).hexdigest()[:12]}-"


class LocalPool:
    """Starts workers of one pool."""

    kind = LOCAL

    def __init__(self, spec: PoolSpec, logs: JobLogs) -> None:
        self.spec = spec
        self._logs = logs
        self._setup_lock = asyncio.Lock()
        self._setup_done = False
        self._spares: deque[asyncio.subprocess.Process] = deque()
        self._warming = asyncio.Lock()
        self._expiry: asyncio.TimerHandle | None = None

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
    ) -> LocalWorker:
        """Start a worker; an error leaves nothing behind."""
        host = socket.gethostname() if slot is None else self.host_of(slot)
        try:
            return await self._start(worker_id, slot, host)
        except WorkerStartError as error:
            raise WorkerStartError(str(error), host) from error
        except OSError as error:
            raise WorkerStartError(f"a worker cannot be started: {error!r}", host) from error

    async def _start(self, worker_id: str, slot: int | None, host: str) -> LocalWorker:
        await self._prepare()
        self._logs.directory.mkdir(parents=True, exist_ok=True)
        token = secrets.token_urlsafe(32)
        log_path = self._logs.path(worker_id)
        async with contextlib.AsyncExitStack() as cleanup:
            # The path of a socket has at most about a hundred characters, which the data directory may exceed.
            directory = Path(tempfile.mkdtemp(prefix=_prefix(self._logs)))
            cleanup.callback(shutil.rmtree, directory, ignore_errors=True)
            process = None
            while process is None and self._spares:
                spare = self._spares.popleft()
                process = spare if spare.returncode is None else None
            if process is None:
                process = await self._launch(log_path, self._environment(slot))
            started = LocalWorker(process, "", token, directory, host)
            cleanup.push_async_callback(started.kill)
            assert process.stdin is not None and process.stdout is not None
            first = {"token": token, "socket": f"{directory}/worker", "log_path": str(log_path)}
            process.stdin.write(json.dumps(first | {"directory": str(directory)}).encode() + b"\n")
            line = await within(START_S, process.stdout.readline()) or b""
            if not line:
                raise WorkerStartError(f"a worker did not start to listen; see {log_path}")
            started.address = json.loads(line)["address"]
            cleanup.pop_all()
            return started

    async def _launch(
        self, log_path: Path, environment: Mapping[str, str], roles: Sequence[str] = ()
    ) -> asyncio.subprocess.Process:
        with log_path.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tinsmith.batch.worker.worker",
                *roles,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**worker_environment(), **environment},
                start_new_session=True,
            )

    async def warm_up(self) -> None:
        """Start the processes of the next workers. Only the first, which plans and publishes, has a child for IO."""
        num_spares = 0 if self.spec.devices_per_worker else min(self.spec.workers, MAX_SPARES)
        async with self._warming:
            while len(self._spares) < num_spares:
                roles = ("mapper",) if self._spares else ("mapper", "io")
                self._spares.append(await self._launch(Path(os.devnull), self._environment(None), roles))
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(SPARE_S, self._end_spares)

    def _end_spares(self) -> None:
        while self._spares:
            spare = self._spares.popleft()
            if spare.stdin is not None:
                spare.stdin.close()

    async def close(self) -> None:
        """End the spare processes. Workers end with the process that started them."""
        if self._expiry is not None:
            self._expiry.cancel()
        spares = list(self._spares)
        self._end_spares()
        await asyncio.gather(*(spare.wait() for spare in spares))

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

    async def _prepare(self) -> None:
        """Run the pool's setup command once, before its first worker."""
        async with self._setup_lock:
            if self._setup_done or not self.spec.setup:
                return
            process = await asyncio.create_subprocess_shell(
                self.spec.setup, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            try:
                output, _ = await process.communicate()
            finally:  # also if the start was cancelled
                if process.returncode is None:
                    process.kill()
            if process.returncode:
                tail = output.decode(errors="replace")[-2000:]
                raise WorkerStartError(f"the setup of pool {self.spec.name!r} failed: {tail}")
            self._setup_done = True
