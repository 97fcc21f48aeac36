"""Two engines with separate data directories: one dies at a failpoint, alone or with its machine, and the other
continues its work with the same results.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fault.crash.restarted_server import RestartedServer, keep_server_running, markers_in
from fault.crash.runs import DEPRECATED, Books, Record
from fault.crash.test_matrix import NTH, POINTS_HERE, points_of, run_until
from support import databases
from support.live import LiveServer, free_port, serving
from tinsmith.cluster.engines import Engines
from tinsmith.db.factory import open_database

pytestmark = pytest.mark.filterwarnings(DEPRECATED)

NANO = "tinsmith/nano"
Seen = tuple[dict[str, Record], Books]

OF_SERVERS = ("submit.", "poll.", "migration.")
OF_SUCCESSORS = ("model.replaying", "engine.claimed")
"""Failpoints that only the other engine reaches, because the dead one has nothing to restore."""
POINTS = [point for point in POINTS_HERE if not point.startswith(OF_SERVERS) and point not in OF_SUCCESSORS]


@contextlib.contextmanager
def engine(server: RestartedServer, name: str, failpoints: str, **changes: str) -> Iterator[LiveServer]:
    """A process with the role engine and its own data directory."""
    port = free_port()
    settings = {
        "DATABASE_URL": server.database_url,
        "STORAGE_DIR": str(server.data_dir),
        "ENGINE_LEASE_S": "2",
        "FAILPOINTS": failpoints,
        **changes,
    }
    arguments = ("--role", "engine", "--backend", "fake", "--health-port", str(port))
    with serving(server.data_dir.parent / name, *arguments, port=port, settings=settings) as engine_process:
        yield engine_process


def check(directory: Path, undisturbed: Seen, first_points: str, second_points: str = "") -> None:
    with keep_server_running(directory / "server", "--backend", "fake", "--role", "server") as server:
        with engine(server, "one", first_points) as first, engine(server, "two", second_points) as second:
            await_both(server)
            points = ((first, points_of(first_points)), (second, points_of(second_points)))
            run_until(
                lambda: all(points_of_process <= markers_in(process.data_dir) for process, points_of_process in points),
                server,
                undisturbed,
            )
        assert server.deaths == 0


def await_both(server: RestartedServer) -> None:
    """Wait for both engines, so that each gets a share of the runs."""
    database = open_database(server.database_url)
    deadline = time.monotonic() + 90
    while [row.state for row in Engines(database, "").of_base(NANO)] != ["ready"] * 2:
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.05)
    database.close()


def test_a_machine_is_lost_and_the_engine_that_takes_over_dies_too(tmp_path: Path, fake_undisturbed: Seen) -> None:
    check(tmp_path, fake_undisturbed, "settle.uncommitted:12@both", "model.replaying,settle.committed:25")


@pytest.mark.slow
def test_the_same_on_postgres(tmp_path: Path, fake_undisturbed: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "chosen", databases.POSTGRES)
    databases.database_url.cache_clear()
    try:
        check(tmp_path, fake_undisturbed, "engine.ran:9@both", "engine.claimed,settle.committed:25")
    finally:
        databases.database_url.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["engine", "both"])
@pytest.mark.parametrize("point", POINTS)
def test_a_crash_at_any_point_is_survived_on_the_other_engine(
    tmp_path: Path, fake_undisturbed: Seen, point: str, victim: str
) -> None:
    check(tmp_path, fake_undisturbed, f"{point}:{max(1, NTH.get(point, 1) // 2)}@{victim}")
