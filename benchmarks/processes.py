"""Processes of several roles on one database and one storage, for benchmarks; each has its cores and its directory."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

START_S = 180.0


@dataclass(frozen=True, slots=True)
class Service:
    """One directory for all processes; `database_url` is a SQLite file there, or a Postgres."""

    directory: Path
    database_url: str

    @contextlib.contextmanager
    def process(
        self, name: str, *arguments: str, cores: Sequence[int] = (), settings: Mapping[str, str] | None = None
    ) -> Iterator[tuple[subprocess.Popen[str], str]]:
        """`tinsmith serve` with some flags, once it is ready; and its address, if it answers clients."""
        shared = {"DATABASE_URL": self.database_url, "STORAGE_DIR": str(self.directory / "storage")}
        shared |= {"SIGNING_SECRET": "of-this-benchmark-alone-0123456789", **(settings or {})}
        environment = {**os.environ, **{f"TINSMITH_{key}": value for key, value in shared.items()}}
        data_dir = self.directory / name
        data_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tinsmith.cli", "serve", "--json", "--port", "0", "--data-dir", str(data_dir)]
        with (data_dir / "process.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, *arguments], stdout=subprocess.PIPE, stderr=log, env=environment, text=True
            )
        if cores:
            os.sched_setaffinity(process.pid, cores)  # and with it what it starts
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], START_S)
            line = process.stdout.readline() if ready else ""
            if not line:
                raise SystemExit(f"{name} did not start: {(data_dir / 'process.log').read_text()[-2000:]}")
            yield process, json.loads(line)["url"]
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()

    def rows(self, query: str) -> list[tuple]:
        engine = sa.create_engine(self.database_url)
        with engine.connect() as connection:
            result_rows = [tuple(row) for row in connection.execute(sa.text(query))]
        engine.dispose()
        return result_rows

    def await_engines(self, count: int) -> None:
        deadline = time.monotonic() + START_S
        while self.rows("SELECT count(*) FROM engines WHERE state = 'ready'")[0][0] < count:
            if time.monotonic() > deadline:
                raise SystemExit(f"{count} engines are not ready: {self.rows('SELECT * FROM engines')}")
            time.sleep(0.1)


def service(directory: Path, database_url: str = "") -> Service:
    return Service(directory, database_url or f"sqlite:///{directory / 'tinsmith.db'}")
