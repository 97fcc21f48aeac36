"""The Ray actor that is a worker on its node: the same `Worker` as on the coordinator's machine.

Its methods are for the coordinator's driver (`ray_driver.py`), which owns it. Ray ends the actor when the driver has
ended, and the worker's children end with the actor's process. Requests and replies are msgpack (`frames.py`), so that
no value of a job is pickled.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path

from tinsmith.batch.worker.frames import Message, decode, encode
from tinsmith.batch.worker.logs import read_page
from tinsmith.batch.worker.worker import CallRefusedError, Worker
from tinsmith.runtime.background import within
from tinsmith.settings.environment import worker_environment

MESSAGE, DONE, REFUSED = range(3)
"""The kinds of the parts of a reply, which are `[kind, value]`. The last one is DONE or REFUSED."""
LOG_S = 0.5
"""Interval of reading on in the worker's log."""
TAIL = 2000
PREFIX = "tinsmith-worker-ray-"


def host_name(address: str, node_id: str) -> str:
    """A node's name for users: its address, and the beginning of Ray's id, since one machine may be several nodes."""
    return f"{address} (node {node_id[:12]})"


def sweep() -> None:
    """Delete the directories on this node whose actor was killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = directory.name.removeprefix(PREFIX).partition("-")[0]
        if not (owner.isdigit() and Path(f"/proc/{owner}").exists()):
            shutil.rmtree(directory, ignore_errors=True)


class WorkerActor:
    def __init__(self) -> None:
        if Path("/proc/self").exists():
            sweep()
        self._directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self._log_path = self._directory / "log"
        self._log_path.touch()
        self._received: Path | None = None
        """The file that was received last."""
        self._worker: Worker | None = None

    async def start(self, setup: str) -> dict[str, str]:
        """Run the pool's setup command, since the node may be new, and start the worker. Returns its host and process,
        or else its host and, as `failed`, why it did not start."""
        import ray

        address, context = ray.util.get_node_ip_address(), ray.get_runtime_context()
        host, environment = host_name(address, context.get_node_id()), worker_environment()
        if setup and (output := await asyncio.to_thread(_run_setup, setup, environment)) is not None:
            return {"host": host, "failed": f"the pool's setup failed: {output[-TAIL:]}"}
        self._worker = Worker(self._log_path, environment, host)
        return {"host": host, "process": f"{address}:{os.getpid()}"}

    async def call(self, name: str, *request: bytes) -> AsyncGenerator[bytes, None]:
        """The parts of the reply to a call of `Worker.call`, or to `receive`; `request` is its message in slices."""
        assert self._worker is not None
        message = decode(b"".join(request))
        try:
            if name == "receive":
                yield encode([MESSAGE, await asyncio.to_thread(self._receive, message)])
            else:
                async for reply in self._worker.call(name, message):
                    yield encode([MESSAGE, reply])
            yield encode([DONE, None])
        except CallRefusedError as error:
            yield encode([REFUSED, str(error)])

    def _receive(self, message: Message) -> Message:
        """Append `data` to the file that is being received, or to a new one, which replaces the last one."""
        if message["is_first"]:
            if self._received is not None:
                self._received.unlink()
            size, free = message["size"], shutil.disk_usage(self._directory).free
            if size > free:
                raise CallRefusedError(f"the file has {size} bytes, and the disk has {free} free")
            self._received = self._directory / uuid.uuid4().hex
        assert self._received is not None
        with self._received.open("ab") as file:
            file.write(message["data"])
        return {"path": str(self._received)}

    async def follow_log(self) -> AsyncGenerator[str, None]:
        """The worker's log, until the worker has ended. Its files are deleted then."""
        assert self._worker is not None
        end, is_last = 0, False
        while not is_last:
            is_last = self._worker.has_ended
            while (page := await asyncio.to_thread(read_page, self._log_path, end))[1] > end:
                end = page[1]
                yield page[0]
            await within(LOG_S, self._worker.wait())
        shutil.rmtree(self._directory, ignore_errors=True)

    async def kill(self) -> None:
        """End the worker's children at once."""
        if self._worker is not None:
            await self._worker.kill()


def _run_setup(setup: str, environment: dict[str, str]) -> str | None:
    """Run a pool's setup command; returns its output if it fails."""
    try:
        process = subprocess.run(
            ["/bin/sh", "-c", setup], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
    except OSError as error:
        return str(error)
    return process.stdout.decode(errors="replace") if process.returncode else None
