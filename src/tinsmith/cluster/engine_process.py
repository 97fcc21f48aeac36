"""The process of an engine, or of a dedicated sampler.

It reads its settings from standard input, because a command line is visible to other users, and ends when that closes.
`prestart` starts the first one before the server imports its own modules, since both imports take seconds: it imports
torch and waits for its settings. The supervisor configures it for the first seat that needs an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tinsmith.settings import Settings
from tinsmith.settings.environment import engine_environment
from tinsmith.telemetry.metrics import metrics_directory

PRESTARTED = "--prestarted"
"""The flag of a process that is started before its settings are known."""


class EngineProcess:
    def __init__(self, settings: Settings, log_path: Path | None = None, gpus: Sequence[int] = ()) -> None:
        """Without a log the process is prestarted: it writes to the log that its settings name. With `gpus` it sees
        only these of the server's. Raises OSError.
        """
        command = [sys.executable, "-m", "tinsmith.engine", *([] if log_path else [PRESTARTED])]
        with open(log_path or os.devnull, "ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output if log_path else None,
                env=engine_environment(
                    metrics_directory(settings.resolved_data_dir),
                    bucket=settings.has_bucket,
                    peer=settings.rank_peer,
                    computes_alone=settings.computes_alone,
                    gpus=gpus,
                ),
                bufsize=0,
                start_new_session=True,  # so that Ctrl-C in the server's terminal does not interrupt a step
            )
        self._is_configured = False

    @classmethod
    def prestart(cls, settings: Settings) -> EngineProcess | None:
        """None if this server runs no torch engine, or if the process cannot be started."""
        if settings.backend != "torch" or not settings.num_engines * settings.num_resident_models:
            return None
        with contextlib.suppress(OSError):
            return cls(settings)
        return None

    def configure(self, spec: bytes) -> bool:
        """Send the settings; False if that was done before, or if the process has ended."""
        if self._is_configured or self._process.poll() is not None:
            return False
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(spec)
        except OSError:  # it has just ended
            self._process.kill()
            return False
        self._is_configured = True
        return True

    def discard(self) -> None:
        """End a process that was not configured."""
        if not self._is_configured:
            self._process.kill()
            self._process.communicate()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """The exit status. A thread waits: the process may have been started without an event loop."""
        loop = asyncio.get_running_loop()
        exit_status: asyncio.Future[int] = loop.create_future()

        def note(status: int) -> None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            if not exit_status.done():
                exit_status.set_result(status)

        def watch() -> None:
            status = self._process.wait()
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(note, status)

        threading.Thread(target=watch, daemon=True).start()
        return await exit_status

    def send_signal(self, signal: int) -> None:
        self._process.send_signal(signal)

    def kill(self) -> None:
        self._process.kill()
