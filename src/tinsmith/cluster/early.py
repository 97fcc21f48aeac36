"""Starts the first engine process before the server imports its own modules, since both imports take seconds.

Like every engine, the process imports torch, reads its settings from standard input, and ends when that closes. The
supervisor uses the process for the first seat that needs an engine; `close` ends it if it was not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading

from tinsmith.settings import Settings, engine_environment
from tinsmith.telemetry.metrics import metrics_directory

EARLY = "--early"
"""The flag of an engine process that is started early."""


class EarlyEngine:
    def __init__(self, settings: Settings) -> None:
        command = [sys.executable, "-m", "tinsmith.engine", EARLY]
        metrics = metrics_directory(settings.resolved_data_dir)
        environment = engine_environment(metrics, bucket=settings.has_bucket, peer=settings.rank_peer)
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
            start_new_session=True,
        )

    @classmethod
    def begin(cls, settings: Settings) -> EarlyEngine | None:
        """Start the process; None if this server runs no torch engine, or if the process cannot be started."""
        if settings.backend != "torch" or not settings.num_engines:
            return None
        with contextlib.suppress(OSError):
            return cls(settings)
        return None

    def take(self, spec: bytes) -> AdoptedProcess | None:
        """Send the settings to the process and return it; None if it was taken already or has ended. Must be called on
        the running event loop.
        """
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return None
        assert process.stdin is not None
        try:
            process.stdin.write(spec)
        except OSError:  # it has just ended
            process.kill()
            return None
        return AdoptedProcess(process)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


class AdoptedProcess:
    """A process that was started without an event loop, with the methods of asyncio's Process that the supervisor uses.
    Keeps the process's standard input open.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, signal: int) -> None:
        self._process.send_signal(signal)

    def kill(self) -> None:
        self._process.kill()

    def _watch(self) -> None:
        status = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._note, status)

    def _note(self, status: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if not self._ended.done():
            self._ended.set_result(status)
