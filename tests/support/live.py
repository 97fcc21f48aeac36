"""A live server in a separate process, for tests with the real SDK."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import sqlalchemy as sa

from support.databases import database_url
from tinsmith.db.factory import open_database

API_KEY = "tml-test"
START_S = 300.0
SERVER_PORTS = range(20_000, 30_000)
"""Below the ports that Linux and macOS give to outgoing connections: one of those could take the port of a server that
has not started yet, or of one that restarts."""
_reservations: list[socket.socket] = []
"""UDP sockets on the ports that this process was given: the system lets no other process bind them, and TCP servers
are not affected."""


@dataclass(frozen=True, slots=True)
class LiveServer:
    url: str
    data_dir: Path
    process: subprocess.Popen[bytes]

    def post(self, path: str, json: object) -> httpx.Response:
        return httpx.post(f"{self.url}/api/v1/{path}", json=json, headers={"X-API-Key": API_KEY}, timeout=60)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}/api/v1/{path}", headers={"X-API-Key": API_KEY}, timeout=60)

    def count(self, table: str) -> int:
        """Count the rows of a table, or of `TABLE WHERE ...`, in the server's database."""
        database = open_database(database_url(self.data_dir) or f"sqlite:///{self.data_dir / 'tinsmith.db'}")
        with database.read() as connection:
            count = connection.scalar(sa.text(f"SELECT count(*) FROM {table}"))
        database.close()
        return int(count or 0)

    def engine_pids(self) -> list[int]:
        return self.child_pids("tinsmith.engine")

    def child_pids(self, module: str) -> list[int]:
        """The server's children that run a module."""
        children = " ".join(path.read_text() for path in Path(f"/proc/{self.process.pid}/task").glob("*/children"))
        return sorted(int(pid) for pid in children.split() if module.encode() in _command_line(pid))

    def stop(self, how: signal.Signals = signal.SIGTERM, timeout_s: float = 30) -> int:
        self.process.send_signal(how)
        return self.process.wait(timeout_s)


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def freeze(pid: int, data_dir: Path) -> None:
    """Stop a process (SIGSTOP), but not while it holds the write lock of the SQLite file in `data_dir`, since that
    would block all other writers."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        if not (path := data_dir / "tinsmith.db").exists():
            return
        with contextlib.closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as probe:
            try:
                probe.execute("BEGIN IMMEDIATE")
                probe.execute("ROLLBACK")
                return
            except sqlite3.OperationalError:
                os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)


@contextlib.contextmanager
def serving(
    data_dir: Path,
    *arguments: str,
    port: int | None = None,
    settings: Mapping[str, str] | None = None,
    before: str = "",
) -> Iterator[LiveServer]:
    """`tinsmith serve` on a free port, until the end of the block. `settings` are TINSMITH_* variables; `before` is
    code that its process runs first.
    """
    port = port or free_port()
    data_dir.mkdir(parents=True, exist_ok=True)
    module = ["-c", f"{before}\nfrom tinsmith.cli.main import main\nmain()"] if before else ["-m", "tinsmith.cli"]
    command = [sys.executable, *module, "serve", "--port", str(port), "--data-dir", str(data_dir)]
    log_path = data_dir / "server.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen([*command, *arguments], stdout=log, stderr=log, env=environment(data_dir, settings))
    server = LiveServer(f"http://127.0.0.1:{port}", data_dir, process)
    try:
        _await_answer(server, log_path)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


def environment(data_dir: Path, settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a server on this data directory, and of commands that use its database."""
    all_settings = {"DATABASE_URL": database_url(data_dir), **(settings or {})}
    return {**os.environ, **{f"TINSMITH_{name}": value for name, value in all_settings.items()}}


def free_port() -> int:
    """A TCP port that nothing listens on, and that no other process of the tests receives while this one runs."""
    # The generator of the module is seeded in tests, and two runs of a test would try the same ports.
    for port in random.SystemRandom().sample(SERVER_PORTS, 1_000):
        reservation = socket.socket(type=socket.SOCK_DGRAM)
        try:
            reservation.bind(("127.0.0.1", port))
            with socket.create_server(("127.0.0.1", port)):
                _reservations.append(reservation)
                return port
        except OSError:  # another process has reserved it, or listens on it
            reservation.close()
    raise AssertionError("every port that was tried is taken")


def _await_answer(server: LiveServer, log_path: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if server.get("healthz").status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError(f"the server did not start:\n{log_path.read_text()[-4000:]}")
