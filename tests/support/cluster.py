"""Processes of several roles on one database and one storage, each with its own data directory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from support import databases
from support.live import LiveServer, free_port, serving
from tinsmith.cluster.engines import EngineRow, Engines
from tinsmith.db.factory import open_database

BASE = "tinsmith/nano"
LEASE_S = 2.0
READY_S = 90.0


class Cluster:
    """A directory for all of them; `url` is their database."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.directory = directory
        self.url = databases.fresh_url(directory, kind)
        self._shared = {
            "DATABASE_URL": self.url,
            "STORAGE_DIR": str(directory / "storage"),
            "ENGINE_LEASE_S": str(LEASE_S),
            "SIGNING_SECRET": "a-secret-that-all-processes-share",
            "SESSION_SWEEP_S": "1",
            "REBALANCE_IDLE_S": "0",
        }
        self._db = open_database(self.url)

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def process(
        self, name: str, role: str, *arguments: str, settings: Mapping[str, str] | None = None
    ) -> Iterator[LiveServer]:
        """Start `tinsmith serve` in a role and wait until it answers; on the fake backend unless `arguments` say
        otherwise."""
        port = free_port()
        options = ("--backend", "fake", "--role", role, "--health-port", str(port), *arguments)
        shared = {**self._shared, **(settings or {})}
        with serving(self.directory / name, *options, port=port, settings=shared) as server:
            yield server

    def engines(self) -> dict[str, EngineRow]:
        """By the name of their process: `NAME`, or `NAME-NUMBER` from its second engine on."""
        engines_by_name: dict[str, EngineRow] = {}
        for row in Engines(self._db, "").of_base(BASE):
            engine_index = row.engine_id.split("-")[1]
            engines_by_name[Path(row.holder).name + (f"-{engine_index}" if engine_index != "0" else "")] = row
        return engines_by_name

    def await_ready(self, *names: str) -> None:
        self.wait(lambda: all((row := self.engines().get(name)) and row.state == "ready" for name in names))

    def owners(self) -> dict[str, str | None]:
        """The process that owns each run."""
        names = {row.engine_id: name for name, row in self.engines().items()}
        return {model_id: names.get(engine_id or "") for model_id, engine_id in self.rows("model_id, engine_id")}

    def rows(self, columns: str, table: str = "models") -> list[tuple]:
        import sqlalchemy as sa

        with self._db.read() as connection:
            return [tuple(row) for row in connection.execute(sa.text(f"SELECT {columns} FROM {table}"))]

    def wait(self, reached: Callable[[], object]) -> None:
        deadline = time.monotonic() + READY_S
        while not reached():
            assert time.monotonic() < deadline, f"it does not come; {self.engines()}\n{self.log()[-4000:]}"
            time.sleep(0.05)

    def log(self) -> str:
        """The output of all processes."""
        paths = [*self.directory.glob("*/server.log"), *self.directory.glob("*/logs/*.log")]
        return "\n".join(f"== {path}\n{path.read_text()}" for path in paths)


@contextlib.contextmanager
def start_cluster(directory: Path, kind: str) -> Iterator[Cluster]:
    cluster = Cluster(directory, kind)
    try:
        yield cluster
    finally:
        cluster.close()
