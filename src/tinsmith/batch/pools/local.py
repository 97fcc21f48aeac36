"""A pool on this machine: what it may run at a time, and how a worker is started there.

A worker is a process group of its own on a Unix-domain socket, and ends when this process does. A pool has slots; a
slot runs the batches of one job at a time. With accelerators, each slot has devices of its own, and only the workers
of the job that has the slot may hold them (`exclusive`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinsmith.batch.printed import JobLogs
from tinsmith.errors import SettingsError, UserError
from tinsmith.settings import worker_environment

START_S = 60.0
"""How long a worker's service may take to listen; its mapper starts later."""
END_S = 2.0
"""How long a worker may take to end its children and itself."""
MAX_SLOTS = 1024
POOL_KEYS = {
    "workers",
    "min_workers",
    "max_workers",
    "queue_length_threshold",
    "upscale_delay_seconds",
    "downscale_delay_seconds",
}


class WorkerStartError(Exception):
    """The process of a worker did not come to listen."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """What a pool is. Workers start with the first batch for them and end with their job: between jobs it is empty."""

    name: str
    workers: int
    devices_per_worker: int = 0
    setup: str = ""

    @property
    def exclusive(self) -> bool:
        return self.devices_per_worker > 0

    def resized(self, workers: object) -> PoolSpec:
        return replace(self, workers=_count("workers", workers))


def pool_from_yaml(name: str, path: Path) -> PoolSpec:
    """A pool from SkyPilot's keys. Raises SettingsError."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text())
        return pool_from(name, data)
    except (OSError, yaml.YAMLError, UserError) as error:
        raise SettingsError(f"the pool {name!r} in {path}: {error}") from None


def pool_from(name: str, data: object) -> PoolSpec:
    """Raises UserError naming the key. The keys of scaling by a queue's length are read; a pool that starts a worker
    for the first batch, and ends it after the last one, has no delays to keep."""
    if not isinstance(data, Mapping) or not isinstance(data.get("pool"), Mapping):
        raise UserError("it has no 'pool' with 'workers'")
    if unknown := sorted(set(data) - {"name", "pool", "resources", "setup"}):
        raise UserError(f"it has {unknown}, which is not supported; there are name, pool, resources and setup")
    pool: Mapping[str, Any] = data["pool"]
    if unknown := sorted(set(pool) - POOL_KEYS):
        raise UserError(f"pool has {unknown}, which is not supported; it has {sorted(POOL_KEYS)}")
    resources = data.get("resources") or {}
    if not isinstance(resources, Mapping) or set(resources) - {"accelerators"}:
        raise UserError(f"resources is {resources!r}; a pool on this machine knows accelerators only")
    setup = data.get("setup") or ""
    if not isinstance(setup, str):
        raise UserError(f"setup is {setup!r}; it must be a shell command")
    workers = pool.get("max_workers", pool.get("workers"))
    return PoolSpec(name, _count("workers", workers), _devices(resources.get("accelerators")), setup)


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SLOTS:
        raise UserError(f"{name} is {value!r}; it must be a whole number from 0 to {MAX_SLOTS}")
    return value


def _devices(accelerators: object) -> int:
    """`H100`, `H100:2` or `{H100: 2}`: how many; which kind this machine has is not asked."""
    if accelerators is None:
        return 0
    if isinstance(accelerators, Mapping) and len(accelerators) == 1:
        return _count("resources.accelerators", next(iter(accelerators.values())))
    if isinstance(accelerators, str):
        _, colon, count = accelerators.partition(":")
        if not colon:
            return 1
        if count.isdecimal():
            return _count("resources.accelerators", int(count))
    raise UserError(f"resources.accelerators is {accelerators!r}; use NAME:COUNT")


@dataclass(slots=True)
class Started:
    """A worker's process, and how to reach it."""

    process: asyncio.subprocess.Process
    address: str
    token: str
    directory: Path

    async def kill(self) -> None:
        """The worker, which kills its children; those of one that cannot any more see that it is gone, and go."""
        if self.process.stdin:
            self.process.stdin.close()  # the worker kills its children, then itself
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await self.process.wait()
        finally:  # also where the wait is cancelled
            if self.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            shutil.rmtree(self.directory, ignore_errors=True)
            await self.process.wait()


class LocalPool:
    """Starts workers of one pool."""

    kind = "local"

    def __init__(self, spec: PoolSpec, logs: JobLogs) -> None:
        self.spec = spec
        self._logs = logs
        self._set_up = asyncio.Lock()
        self._setup_done = False

    async def start(self, worker_id: str, slot: int | None) -> Started:
        """Raises WorkerStartError."""
        await self._prepare()
        self._logs.directory.mkdir(parents=True, exist_ok=True)
        # A socket's path may have a hundred characters, which the data directory may have by itself.
        directory = Path(tempfile.mkdtemp(prefix="tinsmith-worker-"))
        token = secrets.token_urlsafe(32)
        log_path = self._logs.path(worker_id)
        try:
            with log_path.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "tinsmith.batch.worker",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env={**worker_environment(), **self._devices(slot)},
                    start_new_session=True,
                )
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise WorkerStartError(f"a worker cannot be started: {error}") from error
        started = Started(process, "", token, directory)
        assert process.stdin is not None and process.stdout is not None
        first = {"token": token, "socket": str(directory / "worker"), "log_path": str(log_path)}
        process.stdin.write(json.dumps(first).encode() + b"\n")
        try:
            async with asyncio.timeout(START_S):
                line = await process.stdout.readline()
        except TimeoutError:
            line = b""
        except asyncio.CancelledError:
            await started.kill()
            raise
        if not line:
            await started.kill()
            raise WorkerStartError(f"a worker did not come to listen; see {log_path}")
        started.address = json.loads(line)["address"]
        return started

    def _devices(self, slot: int | None) -> dict[str, str]:
        count = self.spec.devices_per_worker
        if not count or slot is None:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(str(slot * count + index) for index in range(count))}

    async def _prepare(self) -> None:
        """The pool's own command, once before its first worker."""
        async with self._set_up:
            if self._setup_done or not self.spec.setup:
                return
            process = await asyncio.create_subprocess_shell(
                self.spec.setup, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            output, _ = await process.communicate()
            if process.returncode:
                tail = output.decode(errors="replace")[-2000:]
                raise WorkerStartError(f"the setup of pool {self.spec.name!r} failed: {tail}")
            self._setup_done = True
