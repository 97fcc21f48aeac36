"""Bulk jobs on nodes of a Ray cluster that are lost, and `tinsmith up --ray local` from start to end. Run by `make
test-ray`; it takes minutes. Coordinators run in this process, or in a separate one that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

pytest.importorskip("ray")

from support.coordinating import LIMITS, is_over, submit
from support.databases import fresh_url
from support.live import environment
from support.raw_client import wait_until_gone
from support.ray_cluster import Nodes, ray_nodes
from tinsmith import batch
from tinsmith.batch.coordinator.coordinator import Coordinator
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.pools.ray import Driver, RayPool
from tinsmith.batch.pools.specs import PoolSpec
from tinsmith.batch.types import TEMPORARY_DIRECTORY
from tinsmith.batch.worker.logs import JobLogs
from tinsmith.db.database import Database, now
from tinsmith.db.factory import open_database
from tinsmith.db.schema import ENGINES, FUTURES
from tinsmith.settings import Settings

# Only slow machines need this long.
PATIENCE_S = 180.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes(2) as new_nodes:
        yield new_nodes


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[BatchJobs]:
    with contextlib.closing(open_database(fresh_url(tmp_path, "sqlite"))) as database:
        yield BatchJobs(database)


def settings_of(directory: Path, nodes: Nodes, workers: int) -> Settings:
    return Settings(data_dir=directory, backend="fake", ray_address=nodes.address, ray_workers=workers)


async def run_to_the_end(
    settings: Settings, jobs: BatchJobs, job_id: int, meanwhile: Callable[[], object] = lambda: None
) -> None:
    coordinator = Coordinator(settings, jobs, "here")
    coordinator.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not is_over(jobs, job_id):
            assert time.monotonic() < deadline, jobs.find("local", job_id)
            await asyncio.to_thread(meanwhile)
            await asyncio.sleep(0.1)
    finally:
        await coordinator.stop()


@batch.remote_function
def slow_double(directory: str) -> None:
    import os
    import time
    from pathlib import Path

    from tinsmith import batch

    # Once, since a child of an actor that is killed has another parent.
    (Path(directory) / f"pid-{os.getppid()}").touch()
    for rows in batch.load():
        time.sleep(0.2)
        batch.save_results([{"text": row["text"], "output": row["text"] * 2} for row in rows])


def expected_rows(rows: int) -> list[dict[str, str]]:
    return [{"text": f"t{index}", "output": f"t{index}" * 2} for index in range(rows)]


def read_output(directory: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (directory / "out.jsonl").read_text().splitlines()]


def worker_pids(directory: Path) -> list[int]:
    """The actors."""
    return [int(path.name.removeprefix("pid-")) for path in directory.glob("pid-*")]


def leftovers(directory: Path) -> list[Path]:
    return [path for path in directory.glob(f"**/{TEMPORARY_DIRECTORY}/**/*") if path.is_file()]


def test_a_node_that_is_lost_changes_nothing_in_the_output(nodes: Nodes, jobs: BatchJobs, tmp_path: Path) -> None:
    doomed = nodes.add(2)
    job_id = submit(
        jobs, tmp_path, slow_double, fn_kwargs={"directory": str(tmp_path)}, batch_pool_name="ray", rows=160
    )
    lost: list[list[int]] = []

    def lose() -> None:
        if not lost and jobs.find("local", job_id).completed_batches >= 10 and len(worker_pids(tmp_path)) == 4:
            lost.append(worker_pids(tmp_path))
            nodes.lose(doomed)

    asyncio.run(run_to_the_end(settings_of(tmp_path, nodes, 4), jobs, job_id, lose))
    assert jobs.find("local", job_id).status == "SUCCEEDED"
    assert lost and read_output(tmp_path) == expected_rows(160) and leftovers(tmp_path) == []
    states = jobs.get_batch_states(job_id)
    again = [state for state in states if state["attempt_id"] > 1]
    assert 0 < len(again) < 20, "what was in flight on that node, and nothing else"
    assert not any(state["retry_count"] for state in states), "and nobody's function is to blame"
    for pid in worker_pids(tmp_path):
        assert wait_until_gone(pid)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_actor_that_dies_or_is_silent_is_replaced(
    nodes: Nodes, jobs: BatchJobs, tmp_path: Path, how: signal.Signals
) -> None:
    job_id = submit(
        jobs,
        tmp_path,
        slow_double,
        replace(LIMITS, heartbeat_timeout_s=3.0),
        fn_kwargs={"directory": str(tmp_path)},
        batch_pool_name="ray",
        rows=80,
    )
    struck: list[int] = []

    def strike() -> None:
        if not struck and jobs.find("local", job_id).completed_batches >= 6:
            struck.extend(worker_pids(tmp_path)[:1])
            os.kill(struck[0], how)

    asyncio.run(run_to_the_end(settings_of(tmp_path, nodes, 2), jobs, job_id, strike))
    assert jobs.find("local", job_id).status == "SUCCEEDED"
    assert struck and read_output(tmp_path) == expected_rows(80) and leftovers(tmp_path) == []
    assert not any(state["retry_count"] for state in jobs.get_batch_states(job_id)), "no function is to blame"
    assert any(state["infra_retries"] for state in jobs.get_batch_states(job_id))
    for pid in worker_pids(tmp_path):
        assert wait_until_gone(pid)


def test_slots_without_resources_do_not_block_others(nodes: Nodes, jobs: BatchJobs, tmp_path: Path) -> None:
    job_id = submit(jobs, tmp_path, slow_double, fn_kwargs={"directory": str(tmp_path)}, batch_pool_name="ray", rows=20)
    asyncio.run(run_to_the_end(settings_of(tmp_path, nodes, 9), jobs, job_id))
    assert read_output(tmp_path) == expected_rows(20)
    assert len(worker_pids(tmp_path)) == 2, "the cluster has two CPUs left"


def test_a_coordinator_that_is_killed_takes_its_workers_along(nodes: Nodes, jobs: BatchJobs, tmp_path: Path) -> None:
    job_id = submit(jobs, tmp_path, slow_double, fn_kwargs={"directory": str(tmp_path)}, batch_pool_name="ray", rows=80)
    code = """
        import asyncio, sys
        from pathlib import Path
        from tinsmith.batch.coordinator.coordinator import Coordinator
        from tinsmith.batch.coordinator.state import BatchJobs
        from tinsmith.db.factory import open_database
        from tinsmith.settings import Settings
        async def main():
            settings = Settings(data_dir=Path(sys.argv[1]), backend="fake", ray_address=sys.argv[2], ray_workers=2)
            Coordinator(settings, BatchJobs(open_database(settings.resolved_database_url)), "here").start()
            await asyncio.sleep(600)
        asyncio.run(main())
    """
    unindented = "\n".join(line[8:] for line in code.splitlines())
    with subprocess.Popen([sys.executable, "-c", unindented, str(tmp_path), nodes.address]) as first:
        until(lambda: jobs.find("local", job_id).completed_batches >= 6)
        first.kill()
    for pid in worker_pids(tmp_path):
        assert wait_until_gone(pid)
    num_completed = jobs.find("local", job_id).completed_batches
    asyncio.run(run_to_the_end(settings_of(tmp_path, nodes, 2), jobs, job_id))
    assert read_output(tmp_path) == expected_rows(80) and leftovers(tmp_path) == []
    assert sum(state["attempt_id"] == 1 for state in jobs.get_batch_states(job_id)) >= num_completed


def test_a_failing_setup_fails_the_job_with_its_output(nodes: Nodes, jobs: BatchJobs, tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text("pool: {workers: 2}\nresources: {infra: ray, cpus: 0.5}\nsetup: echo no such driver; exit 7\n")
    options = {"data_dir": tmp_path, "backend": "fake", "ray_address": nodes.address, "batch_pools": (f"mine={pool}",)}
    job_id = submit(jobs, tmp_path, slow_double, fn_kwargs={"directory": str(tmp_path)}, batch_pool_name="mine")
    asyncio.run(run_to_the_end(Settings.model_validate(options), jobs, job_id))
    job = jobs.find("local", job_id)
    assert job.status == "FAILED" and "no such driver" in (job.error or "")


def test_a_worker_starts_on_no_node_that_is_set_aside(nodes: Nodes, jobs: BatchJobs, tmp_path: Path) -> None:
    other = nodes.add(2)

    async def run() -> None:
        driver = Driver(nodes.address)
        pool = RayPool(PoolSpec("ray", 2, infra="ray"), JobLogs(tmp_path), driver)
        job = jobs.spec(submit(jobs, tmp_path, slow_double, fn_kwargs={"directory": str(tmp_path)}))
        try:
            first = await pool.start("1-a", 0, job)
            assert first.host in pool.hosts(job) and len(pool.hosts(job)) == 2, "the head has no CPU"
            for worker_index in range(3):
                worker = await pool.start(f"1-{worker_index}", 1, job, [first.host])
                assert worker.host in pool.hosts(job) and worker.host != first.host
                await worker.kill()
            await first.kill()
        finally:
            await pool.close()

    try:
        asyncio.run(run())
    finally:
        nodes.lose(other)


# `tinsmith up --ray local`


def until(holds: Callable[[], Any]) -> Any:  # noqa: ANN401
    deadline = time.monotonic() + PATIENCE_S
    while not (value := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return value


def command(data_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    arguments_of_python = [sys.executable, "-m", "tinsmith.cli", *arguments, "--data-dir", str(data_dir)]
    return subprocess.run(
        arguments_of_python, capture_output=True, text=True, env=environment(data_dir), timeout=PATIENCE_S, check=False
    )


@contextlib.contextmanager
def database_of(data_dir: Path) -> Iterator[Database]:
    with contextlib.closing(open_database(f"sqlite:///{data_dir / 'tinsmith.db'}")) as database:
        yield database


def engines(data_dir: Path) -> list[int]:
    """The processes that hold a lease; none before the database exists."""
    with contextlib.suppress(OperationalError), database_of(data_dir) as database, database.read() as connection:
        ready_pids = sa.select(ENGINES.c.pid).where(ENGINES.c.lease_expires_at > now(), ENGINES.c.state == "ready")
        return list(connection.scalars(ready_pids))
    return []


def add_work(data_dir: Path, tokens: int) -> None:
    """Add a request of a run without an engine; it stays pending until the test settles it."""
    row = {"request_id": "r", "tenant_id": "t", "session_id": "s", "base_model": "tinsmith/nano", "kind": "forward"}
    extra_columns = {"state": "pending", "num_tokens": tokens, "created_at": now(), "model_id": "m", "seq_id": 5}
    with database_of(data_dir) as database, database.write() as connection:
        connection.execute(FUTURES.insert(), {**row, **extra_columns})


def remove_work(data_dir: Path) -> None:
    with database_of(data_dir) as database, database.write() as connection:
        connection.execute(FUTURES.delete())


def test_a_cluster_of_one_machine_grows_shrinks_and_goes(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    refused = command(data_dir, "status")
    assert refused.returncode == 2 and "no `tinsmith up --ray local` runs" in " ".join(refused.stderr.split())
    arguments = ["up", "--engines", "1:2", "--tokens-per-engine", "100", "--up-after", "1", "--down-after", "2"]
    arguments += ["--backend", "fake", "--json", "--data-dir", str(data_dir)]
    full_command = [sys.executable, "-m", "tinsmith.cli", *arguments]
    with subprocess.Popen(full_command, stdout=subprocess.PIPE, env=environment(data_dir)) as keeper:
        assert keeper.stdout is not None
        announcement = json.loads(keeper.stdout.readline())
        assert announcement["roles"] == {"engine": [1, 2], "sampler": [0, 0], "batch-worker": [0, 0]}
        (first,) = until(lambda: engines(data_dir))
        add_work(data_dir, tokens=150)
        pids = until(lambda: ready if len(ready := engines(data_dir)) == 2 else None)
        assert first in pids
        status = json.loads(command(data_dir, "status", "--json").stdout)
        assert status["wanted"]["engine"] == 2 and status["waiting"]["engine"] == {"tinsmith/nano": 150.0}
        remove_work(data_dir)
        until(lambda: engines(data_dir) == [first])
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(PATIENCE_S) == 0
    for pid in pids:
        wait_until_gone(pid)
    assert list(data_dir.glob("ray.*")) == []
    assert not any(announcement["ray"].encode() in _command(pid) for pid in _pids()), (
        "no process of the cluster is left"
    )


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
