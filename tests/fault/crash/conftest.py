"""Results of undisturbed runs, computed once for all comparisons."""

from __future__ import annotations

import pytest

from fault.crash.restarted_server import keep_server_running
from fault.crash.runs import Books, Record, books, run_all


@pytest.fixture(scope="session")
def fake_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Record], Books]:
    """On the fake backend, everything in one process group."""
    with keep_server_running(tmp_path_factory.mktemp("undisturbed") / "data", "--backend", "fake") as server:
        results = run_all(server), books(server)
        assert server.deaths == 0 and not server.markers
    return results
