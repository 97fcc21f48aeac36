"""A live server that is restarted on its port whenever it is killed, as a service manager does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import sqlalchemy as sa

from support import databases
from support.live import free_port
from tinsmith.auth.keys import Keys
from tinsmith.db.factory import open_database

START_S = 300.0
TENANTS = ("ann", "bob", "cal")


def markers_in(data_dir: Path) -> set[str]:
    """The failpoints at which a process with this data directory died."""
    return {path.name.removeprefix("crashed.") for path in data_dir.glob("crashed.*")}


class RestartedServer:
    """The successive processes of one server."""

    def __init__(self, data_dir: Path, arguments: Sequence[str], settings: Mapping[str, str]) -> None:
        self.data_dir = data_dir
        self.keys: dict[str, str] = {}
        self.deaths = 0
        self.failure = ""
        self._port = free_port()
        self._settings = settings
        self._arguments = arguments
        self._ending = False
        self._process = self._spawn()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def database_url(self) -> str:
        return databases.database_url(self.data_dir) or f"sqlite:///{self.data_dir / 'tinsmith.db'}"

    @property
    def markers(self) -> set[str]:
        return markers_in(self.data_dir)

    def rows(self, query: str) -> list[tuple]:
        """The rows of a query of the server's database."""
        database = open_database(self.database_url)
        with database.read() as connection:
            fetched_rows = [tuple(row) for row in connection.execute(sa.text(query))]
        database.close()
        return fetched_rows

    def await_answer(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and not self.failure:
            if self.answers():
                return
            time.sleep(0.05)
        raise AssertionError(f"the server does not answer; {self.failure}\n{self.log()[-4000:]}")

    def answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/api/v1/healthz", timeout=5).status_code == 200
        return False

    def make_keys(self) -> None:
        """Create keys for all tenants; from then on the server refuses other keys."""
        database = open_database(self.database_url)
        self.keys = {tenant: Keys(database).create(tenant)[1] for tenant in TENANTS}
        database.close()
        strange = {"X-API-Key": "tml-strange"}
        deadline = time.monotonic() + START_S
        while httpx.get(f"{self.url}/api/v1/get_server_capabilities", headers=strange, timeout=5).status_code != 401:
            assert time.monotonic() < deadline, "the server goes on without keys"
            time.sleep(0.1)

    def log(self) -> str:
        """Return the logs of the server and its engines."""
        paths = [self.data_dir / "server.log", *(self.data_dir / "logs").glob("*.log")]
        return "\n".join(path.read_text() for path in paths if path.exists())

    def close(self) -> None:
        """Stop it gracefully."""
        self._ending = True
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        self._keeper.join(40)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            raise AssertionError("the server did not stop when it was told to")

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tinsmith.cli", "serve", "--port", str(self._port)]
        command += ["--data-dir", str(self.data_dir), *self._arguments]
        all_settings = {"DATABASE_URL": databases.database_url(self.data_dir), **self._settings}
        environment = {**os.environ, **{f"TINSMITH_{name}": value for name, value in all_settings.items()}}
        with (self.data_dir / "server.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def _keep(self) -> None:
        while True:
            status = self._process.wait()
            if self._ending:
                return
            if status != -signal.SIGKILL:
                self.failure = f"the server ended by itself with status {status}"
                return
            self.deaths += 1
            self._process = self._spawn()


@contextlib.contextmanager
def keep_server_running(
    data_dir: Path, *arguments: str, migrated: bool = True, **settings: str
) -> Iterator[RestartedServer]:
    """A running server with keys for three tenants. Unless `migrated`, its first start creates the database."""
    data_dir.mkdir(parents=True)
    if migrated and databases.chosen == databases.SQLITE:
        databases.fresh_url(data_dir)
    all_settings = {"SESSION_SWEEP_S": "1", **{name.upper(): value for name, value in settings.items()}}
    server = RestartedServer(data_dir, arguments, all_settings)
    try:
        server.await_answer()
        server.make_keys()
        yield server
    finally:
        server.close()
