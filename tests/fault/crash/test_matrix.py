"""Every failpoint, with server, engine or both dying: clients see only a delay, and no request is lost or repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from fault.crash.restarted_server import RestartedServer, keep_server_running
from fault.crash.runs import DEPRECATED, Books, Record, books, run_all
from tinsmith.runtime.failpoints import POINTS, VICTIMS

pytestmark = pytest.mark.filterwarnings(DEPRECATED)

NTH = {
    "submit.before": 40,
    "submit.stored": 50,
    "poll.answering": 30,
    "engine.fetched": 9,
    "engine.planned": 12,
    "engine.running": 15,
    "engine.computing": 16,
    "engine.ran": 20,
    "settle.uncommitted": 18,
    "settle.committed": 22,
    "model.created": 2,
    "model.published": 2,
    "sample.admitted": 4,
    "checkpoints.writing": 2,
    "checkpoints.sealed": 2,
    "checkpoints.placed": 2,
}
"""The hit at which to die, for failpoints whose first hit comes before any work."""

BEFORE = {"model.replaying": "engine.ran:25,", "engine.claimed": "engine.ran:20,"}
"""Preconditions of failpoints."""

FIRST_START = "migration.uncommitted"

POINTS_HERE = [point for point in POINTS if not point.startswith(("batch.", "openai.", "run."))]
"""Failpoints that training and sampling do not reach: those of bulk jobs are covered by test_batch_jobs,
test_batch_kill and test_openai_batches, those of migrations by test_moving."""

Seen = tuple[dict[str, Record], Books]


def run_until(died: Callable[[], bool], server: RestartedServer, expected: Seen) -> None:
    """Run all loops and compare them, again if the processes did not die yet: an engine with a full writer of files
    leaves a version to the next snapshot, before which its model may be unloaded.
    """
    for runs in range(1, 4):
        assert run_all(server) == expected[0]
        assert books(server) == expected[1].times(runs)
        if died():
            return
    raise AssertionError("not every process died")


@pytest.fixture(scope="module")
def undisturbed(fake_undisturbed: Seen) -> Seen:
    return fake_undisturbed


def check(data_dir: Path, specs: str, points: set[str], undisturbed: Seen) -> None:
    migrated = FIRST_START not in points
    with keep_server_running(data_dir, "--backend", "fake", migrated=migrated, failpoints=specs) as server:
        run_until(lambda: points <= server.markers, server, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("point", POINTS_HERE)
def test_a_crash_at_any_point_is_a_delay_and_nothing_else(
    tmp_path: Path, undisturbed: Seen, point: str, victim: str
) -> None:
    spec = f"{BEFORE.get(point, '')}{point}:{NTH.get(point, 1)}@{victim}"
    check(tmp_path / "data", spec, {point}, undisturbed)


CHAINS = (
    "migration.uncommitted,engine.fetched:4,checkpoints.writing@both,snapshots.sealed,model.unloading@server,"
    "submit.before:9@engine",
    "submit.stored:9,model.created:2@engine,engine.planned:5@both,versions.writing,checkpoints.sealed:2@server,"
    "snapshots.recorded",
    "poll.answering:9@both,engine.running:7,versions.sealed@server,checkpoints.placed,model.loading,"
    "snapshots.writing@both",
    "engine.ran:9,engine.claimed,sample.admitted:2@both,model.replaying,versions.placed,model.unloaded@server,"
    "engine.computing:16",
    "settle.uncommitted:9@both,settle.committed:5,model.loaded@server,model.published:2,snapshots.placed@both",
)
"""All failpoints in few runs. Those of one kind of request are in different runs, since a request that ends two engines
fails."""


@pytest.mark.smoke
def test_the_chains_have_every_point() -> None:
    assert set().union(*map(points_of, CHAINS)) == set(POINTS_HERE)


@pytest.fixture(scope="module")
def chain_runs(tmp_path_factory: pytest.TempPathFactory, undisturbed: Seen) -> Iterator[dict[str, Future[None]]]:
    """Run all chains, several at a time, since most of the time clients wait before a retry."""
    with ThreadPoolExecutor(3) as pool:
        directory = tmp_path_factory.mktemp("chained")
        yield {
            chain: pool.submit(check, directory / str(index), chain, points_of(chain), undisturbed)
            for index, chain in enumerate(CHAINS)
        }


@pytest.mark.parametrize("chain", CHAINS, ids=range(len(CHAINS)))
def test_many_crashes_in_one_run_are_a_delay_and_nothing_else(chain_runs: dict[str, Future[None]], chain: str) -> None:
    chain_runs[chain].result()


def points_of(specs: str) -> set[str]:
    return {spec.partition("@")[0].partition(":")[0] for spec in specs.split(",") if spec}
