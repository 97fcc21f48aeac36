"""Keeps one process of a role running: starts it, restarts it when it dies, and drains it on request.

A shell is the actor that Ray places. It sends its process the settings as one line on standard input, which stays open.
When the shell dies, the input closes and the process ends at once, since a replacement may be starting. A process that
refuses its settings is not restarted. The ranks of an engine on another machine have a shell there, which asks the
engine's shell (`leader`) for the address before each start. States: starting -> running -> restarting -> running;
refused; draining -> ended. Calls return at once; a thread does the work.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinsmith.runtime.background import Backoff, start_supervised_thread
from tinsmith.settings import RANK_ADDRESS_FILE
from tinsmith.settings.environment import role_environment
from tinsmith.settings.groups import DEGREES

EXIT_REFUSED = 2
"""Exit status of `tinsmith serve` when it refuses its settings."""
FIRST_PAUSE_S = 0.5
DRAIN_S = 120.0
"""How long a process may take to drain before it is killed, which loses only time."""
TAIL_BYTES = 2000

ALONE: dict[str, object] = {"engines": 1, "samplers": None, "health_port": None, "rank_port": 0}
"""Each shell has one process, without ports that could conflict with others on the same node."""

WITHOUT_RANKS: dict[str, object] = {
    "machines": 1,
    **dict.fromkeys(DEGREES, 0),
    "shard_base": False,
}
"""Other roles have no ranks on other machines: their processes use the devices of their node."""

LEADER_S = 0.5
"""How often ranks ask where their engine accepts them."""

COMMAND = (sys.executable, "-m", "tinsmith.cli.serve_role")


class Shell:
    def __init__(
        self,
        name: str,
        role: str,
        fingerprint: str,
        settings: Mapping[str, object],
        signing_key: bytes = b"",
        address: Callable[[], str] | None = None,
        command: Sequence[str] = COMMAND,
        leader: Callable[[], str] | None = None,
    ) -> None:
        """The process has its own data directory on this node: `name` below that of `settings`. `address` returns the
        node's address in the cluster. With `leader`, which returns where its engine accepts ranks, or "", the process
        runs ranks.
        """
        self._command = command
        self._leader = leader
        self._fixed = {"name": name, "role": role, "fingerprint": fingerprint, "host": socket.gethostname()}
        directory = Path(str(settings["data_dir"])).expanduser().absolute() / name
        overrides: dict[str, object] = {"role": role, "data_dir": str(directory), **ALONE}
        if role != "engine" and settings.get("machines", 1) != 1:
            overrides |= WITHOUT_RANKS
        self._join_path = directory / RANK_ADDRESS_FILE
        if address is not None:
            overrides["peer_host"] = address()
        self._first = {"settings": {**settings, **overrides}, "signing_key": signing_key.hex()}
        self._log_path = directory / "process.log"
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._state, self._detail, self._restarts = "starting", "", 0
        self._stopping = threading.Event()
        self._thread = start_supervised_thread("shell", self._supervise, self._stopping.wait)

    def state(self) -> dict[str, Any]:
        with self._lock:
            pid = self._process.pid if self._process else None
            process_state = {"state": self._state, "detail": self._detail, "restarts": self._restarts, "pid": pid}
        return {**self._fixed, **process_state, "shell_pid": os.getpid(), "join": self._join_address()}

    def _join_address(self) -> str:
        try:
            return self._join_path.read_text().strip()
        except OSError:
            return ""

    def _join_leader(self) -> dict[str, str]:
        """Wait until the engine accepts ranks; empty for an engine, and when this shell stops."""
        while self._leader is not None and not self._stopping.is_set():
            if address := self._leader():
                return {"join": address}
            self._stopping.wait(LEADER_S)
        return {}

    def drain(self, patience_s: float = DRAIN_S) -> None:
        """Let the process finish its step and release its work. A second call does nothing."""
        with self._lock:
            if self._stopping.is_set():
                return
            self._stopping.set()
            if self._state != "ended":
                self._state = "draining"
            if self._process is not None:
                threading.Thread(target=_end, args=(self._process, patience_s), daemon=True).start()

    def _supervise(self) -> None:
        backoff = Backoff(FIRST_PAUSE_S)
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                code = self._run_once()
            except OSError as error:  # out of memory, or no space for the log: temporary
                code, reason = -1, str(error)
            else:
                reason = self._tail()
            if self._stopping.is_set():
                break
            if code == EXIT_REFUSED:
                self._set_state("refused", reason)
                self._stopping.wait()
                break
            self._set_state("restarting", f"it ended with status {code}: {reason}", restarts=1)
            self._stopping.wait(backoff.after(time.monotonic() - began))
        self._set_state("ended", "")

    def _run_once(self) -> int:
        self._log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        first = {**self._first, **self._join_leader()}
        with self._log_path.open("ab") as log, self._lock:
            if self._stopping.is_set():
                return 0
            process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=role_environment(),
                start_new_session=True,
            )  # fmt: skip
            self._process = process
            self._state, self._detail = "running", ""
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(first).encode() + b"\n")
                process.stdin.flush()
            return process.wait()
        finally:
            with self._lock:
                self._process = None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def _set_state(self, state: str, detail: str, restarts: int = 0) -> None:
        with self._lock:
            self._state, self._detail = state, detail
            self._restarts += restarts
            if self._stopping.is_set() and state != "ended":
                self._state = "draining"

    def _tail(self) -> str:
        """The last line of the process's output."""
        try:
            with self._log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(0, size - TAIL_BYTES))
                return log.read().decode(errors="replace").strip().rpartition("\n")[2]
        except OSError:
            return ""


def _end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + patience_s
        while process.poll() is None:
            if time.monotonic() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
                return
            time.sleep(0.05)
