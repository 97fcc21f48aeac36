"""kill -9 at each of the seven steps of a job, of the server and a worker's children (the mapper's, and the one for
operations): the output is the same.

The steps are those of `failpoints.POINTS` below `batch.`. `pytest -s` prints what each kill cost. The servers here are
only coordinators, in separate processes; `test_batch_jobs.py` starts full servers (slow).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import tinsmith.batch.coordinator.job_run
from support.coordinating import LIMITS, PATIENCE_S, CoordinatorSetup, coordinate, start_process, submit
from support.databases import fresh_url
from support.live import freeze
from tinsmith import batch
from tinsmith.batch.coordinator.coordinator import Coordinator
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.types import TEMPORARY_DIRECTORY
from tinsmith.batch.worker.children import Child
from tinsmith.db.factory import open_database
from tinsmith.db.schema import BATCH_JOBS
from tinsmith.settings import Settings

STEPS = {
    "batch.claimed": 3,
    "batch.reported": 3,
    "batch.committed": 2,
    "batch.winding": 1,
    "batch.fenced": 1,
    "batch.published": 1,
    "batch.recorded": 1,
    "batch.cleaned": 1,
}
"""The hit at which to kill."""
VICTIMS = ("server", "mapper", "io")
"""The coordinator's process, which holds the workers, and the children of these by role."""
AT_A_TIME = 3


@batch.remote_function
def double() -> None:
    from tinsmith import batch

    for rows in batch.load():
        batch.save_results([{"text": row["text"], "output": row["text"] * 2} for row in rows])


EXPECTED = "".join(
    json.dumps({"text": f"t{index}", "output": f"t{index}" * 2}, separators=(",", ":")) + "\n" for index in range(20)
).encode()


def new_database(directory: Path, kind: str | None = None) -> str:
    directory.mkdir(parents=True)
    return fresh_url(directory, kind)


@contextlib.contextmanager
def open_jobs(url: str) -> Iterator[BatchJobs]:
    with contextlib.closing(open_database(url)) as database:
        yield BatchJobs(database)


@dataclass(frozen=True, slots=True)
class Cost:
    """The state after a kill, and the number of repeated batches."""

    output: bytes
    leftovers: list[str]
    status: str
    attempts_more: int
    retries: int
    killed: bool


def cost_of(jobs: BatchJobs, job_id: int, directory: Path, killed: bool) -> Cost:
    states = jobs.get_batch_states(job_id)
    return Cost(
        output=(directory / "out.jsonl").read_bytes(),
        leftovers=[str(path) for path in directory.glob(f"**/{TEMPORARY_DIRECTORY}/**/*") if path.is_file()],
        status=jobs.find("local", job_id).status,
        attempts_more=sum(state["attempt_id"] for state in states) - len(states),
        retries=sum(state["retry_count"] for state in states),
        killed=killed,
    )


def kill_server(directory: Path, url: str, step: str) -> Cost:
    with open_jobs(url) as jobs:
        setup = CoordinatorSetup(url, str(directory), submit(jobs, directory, double))
        for status in (-signal.SIGKILL, 0):
            process = start_process(setup, f"{step}:{STEPS[step]}")
            assert process.wait(PATIENCE_S) == status, (directory / "here.log").read_text()[-3000:]
        return cost_of(jobs, setup.job_id, directory, killed=True)


# The case of each thread: every coordinator below has its own thread and database.
_case = threading.local()


_begun: list[tuple[Path, str, Child]] = []
"""The children that have begun: the directory of their log, their role, and the child."""
begin_child = Child.begin


def record_begin(child: Child, first: dict[str, Any], log_path: Path) -> None:
    """Replaces `Child.begin`."""
    begin_child(child, first, log_path)
    _begun.append((log_path.parent, first["role"], child))


def hit_or_kill(point: str) -> None:
    """Replaces `failpoints.hit`: at the step, kill a worker's child."""
    if point != getattr(_case, "step", ""):
        return
    _case.reached += 1
    if _case.reached == STEPS[point]:
        _case.kill()


def kill_below(directory: Path, url: str, step: str, victim: str) -> Cost:
    with open_jobs(url) as jobs:
        setup = CoordinatorSetup(url, str(directory), submit(jobs, directory, double))
        killed: list[int] = []

        def kill() -> None:
            for log_directory, role, child in list(_begun):
                if log_directory.parent == directory and role == victim and child.process.poll() is None:
                    killed.append(child.process.pid)
                    os.kill(child.process.pid, signal.SIGKILL)

        _case.step, _case.reached, _case.kill = step, 0, kill
        asyncio.run(coordinate(setup, jobs))
        return cost_of(jobs, setup.job_id, directory, killed=bool(killed))


def test_any_kill_at_any_step_leaves_the_output_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinsmith.batch.coordinator.job_run, "hit", hit_or_kill)
    monkeypatch.setattr(Child, "begin", record_begin)
    costs: dict[tuple[str, str], Future[Cost]] = {}
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for step in STEPS:
            for victim in VICTIMS:
                directory = tmp_path / f"{step}-{victim}"
                url = new_database(directory)
                if victim == "server":
                    costs[step, victim] = pool.submit(kill_server, directory, url, step)
                else:
                    costs[step, victim] = pool.submit(kill_below, directory, url, step, victim)
    lines = [f"| killed at | {' | '.join(VICTIMS)} |", "|---" * 4 + "|"]
    for step in STEPS:
        cells = []
        for victim in VICTIMS:
            cost = costs[step, victim].result()
            assert cost.killed, (step, victim)
            assert cost.output == EXPECTED, (step, victim)
            assert (cost.status, cost.leftovers, cost.retries) == ("SUCCEEDED", [], 0), (step, victim)
            assert 0 <= cost.attempts_more <= 8, "what was committed is not done again"
            cells.append(f"same bytes, {cost.attempts_more} batches again")
        lines.append(f"| {step} | {' | '.join(cells)} |")
    print("\n" + "\n".join(lines))  # noqa: T201


@batch.remote_function
def late(marker: str, gate: str) -> None:
    """The first attempt at a row waits for the gate; later ones do not."""
    import os
    import time
    from pathlib import Path

    from tinsmith import batch

    for rows in batch.load():
        if any(row["text"] == "t4" for row in rows) and not Path(marker).exists():
            Path(marker).write_text(str(os.getpid()))
            while not Path(gate).exists():
                time.sleep(0.02)
        batch.save_results([{"text": row["text"], "output": row["text"] * 2} for row in rows])


def until(condition: Callable[[], Any], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def test_a_server_that_lost_its_lease_changes_nothing(tmp_path: Path, database_kind: str) -> None:
    """Two servers share a database. The first hangs during a batch for longer than its lease, and the second completes
    the job. Then the first server's worker finishes its batch, and the first server continues."""
    directory = tmp_path / "one"
    url = new_database(directory, database_kind)
    limits = replace(LIMITS, lease_s=1.0)
    with open_jobs(url) as jobs:
        marker, gate = tmp_path / "marker", tmp_path / "gate"
        options = {"marker": str(marker), "gate": str(gate)}
        job_id = submit(jobs, directory, late, limits, fn_kwargs=options)
        first = start_process(CoordinatorSetup(url, str(directory), job_id, "first", linger_s=2.0))
        try:
            until(marker.exists, first)
            # From here its lease is as long as the job's limit.
            until(lambda: lease_s(jobs, job_id) < 2, first)
            freeze(first.pid, directory)
            second = start_process(CoordinatorSetup(url, str(directory), job_id, "second"))
            assert second.wait(PATIENCE_S) == 0, (directory / "second.log").read_text()[-3000:]
            before = cost_of(jobs, job_id, directory, killed=True), jobs.find("local", job_id)
            assert (before[0].output, before[0].status, before[0].leftovers) == (EXPECTED, "SUCCEEDED", [])
            assert before[0].attempts_more >= 1, "the batch of the first was begun again"
            gate.touch()
            until(lambda: list(directory.glob(f"{TEMPORARY_DIRECTORY}/*/out-0/attempt-*/batch_00000004-*")), first)
            first.send_signal(signal.SIGCONT)
            assert first.wait(PATIENCE_S) == 0
            after = cost_of(jobs, job_id, directory, killed=True), jobs.find("local", job_id)
            assert replace(after[0], leftovers=[]) == before[0] and after[1] == before[1]
            assert all("/attempt-1/" in path for path in after[0].leftovers), "what nothing refers to"
        finally:
            gate.touch()
            first.kill()
            first.wait()


def lease_s(jobs: BatchJobs, job_id: int) -> float:
    """Return the remaining time of the lease of the job's owner."""
    with jobs._db.read() as connection:
        remaining_s = sa.select(BATCH_JOBS.c.owner_lease_at - jobs._db.clock()).where(BATCH_JOBS.c.job_id == job_id)
        return float(connection.scalar(remaining_s) or 0)


def test_a_killed_servers_job_is_taken_over_by_another_server(tmp_path: Path, database_kind: str) -> None:
    """The servers share only the database and the output location, not a data directory."""
    directory, elsewhere = tmp_path / "one", tmp_path / "two"
    url = new_database(directory, database_kind)
    elsewhere.mkdir()
    with open_jobs(url) as jobs:
        limits = replace(LIMITS, lease_s=1.0)
        options = {"marker": str(tmp_path / "marker"), "gate": str(tmp_path / "gate")}
        job_id = submit(jobs, directory, late, limits, fn_kwargs=options)
        first = start_process(CoordinatorSetup(url, str(directory), job_id, "first"))
        until((tmp_path / "marker").exists, first)
        until(lambda: lease_s(jobs, job_id) < 2, first)
        first.kill()
        first.wait()
        num_completed = jobs.find("local", job_id).completed_batches
        asyncio.run(coordinate(CoordinatorSetup(url, str(elsewhere), job_id, "second"), jobs))
        cost = cost_of(jobs, job_id, directory, killed=True)
        assert (cost.output, cost.status, cost.leftovers, cost.retries) == (EXPECTED, "SUCCEEDED", [], 0)
        assert 0 < num_completed < 10 and 1 <= cost.attempts_more <= 10 - num_completed, (
            "what was committed is not done again"
        )


def test_a_coordinator_stops_at_any_moment(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, backend="fake", batch_workers=2)
    url = new_database(tmp_path / "database")

    async def stop_after(turns: int, jobs: BatchJobs) -> None:
        coordinator = Coordinator(settings, jobs, "here")
        coordinator.start()
        await asyncio.sleep(0.2)
        for pool in coordinator._pools.values():
            pool.wake()
        coordinator.wake()
        for _ in range(turns):  # of the event loop, in which the message is sent
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await coordinator.stop()

    with open_jobs(url) as jobs:
        for turns in range(5):
            asyncio.run(stop_after(turns, jobs))
