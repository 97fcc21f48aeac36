"""One bulk job on several machines without a cluster: who takes part, and what follows when a machine is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.coordinating import LIMITS, PATIENCE_S, CoordinatorSetup, is_over, start_process, submit
from support.databases import fresh_url
from tinsmith import batch
from tinsmith.batch.coordinator import coordinator as coordinators
from tinsmith.batch.coordinator.coordinator import Coordinator
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.db.factory import open_database
from tinsmith.settings import Settings

NUM_ROWS = 24
SHORT_LEASE = replace(LIMITS, lease_s=1.0)


@batch.remote_function
def name_process(directory: str, gate: str) -> None:
    """Each row is done once by some process, which leaves its name; no row ends before the gate is open."""
    import os
    import time
    from pathlib import Path

    from tinsmith import batch

    for rows in batch.load():
        Path(directory, str(os.getppid())).touch()
        while not Path(gate).exists():
            time.sleep(0.01)
        time.sleep(0.05)
        batch.save_results([{"text": row["text"], "machine": os.getppid()} for row in rows])


class Machines:
    """Processes with a coordinator each, on one database."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = fresh_url(directory)
        self.began, self.gate = directory / "began", directory / "gate"
        self.began.mkdir()
        self.database = open_database(self.url)
        self.jobs = BatchJobs(self.database)
        self._processes: list[subprocess.Popen[bytes]] = []

    def submit(self, **options: object) -> int:
        paths = {"directory": str(self.began), "gate": str(self.gate)}
        options = {"rows": NUM_ROWS, "fn_kwargs": paths, "limits": SHORT_LEASE} | options
        return submit(self.jobs, self.directory, name_process, **options)  # type: ignore[arg-type]

    def start(self, name: str, job_id: int) -> subprocess.Popen[bytes]:
        data_dir = self.directory / name
        data_dir.mkdir()
        process = start_process(CoordinatorSetup(self.url, str(data_dir), job_id, name))
        self._processes.append(process)
        return process

    @property
    def pids(self) -> set[int]:
        """The coordinators whose workers have begun a row."""
        return {int(path.name) for path in self.began.iterdir()}

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, [path.read_text()[-3000:] for path in self.directory.glob("*/*.log")]
            time.sleep(0.02)

    def output(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.directory / "out.jsonl").read_text().splitlines()]

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
        self.database.close()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with contextlib.closing(Machines(tmp_path)) as started:
        yield started


def check_output(machines: Machines, job_id: int) -> None:
    machines.wait(lambda: is_over(machines.jobs, job_id))
    assert machines.jobs.find("local", job_id).status == "SUCCEEDED"
    assert [row["text"] for row in machines.output()] == [f"t{index}" for index in range(NUM_ROWS)]


def test_two_machines_run_one_job_and_one_that_comes_late_takes_part(machines: Machines) -> None:
    job_id = machines.submit()
    first = machines.start("first", job_id)
    machines.wait(lambda: len(machines.pids) == 1)
    second = machines.start("second", job_id)
    machines.wait(lambda: len(machines.pids) == 2)
    machines.gate.touch()
    check_output(machines, job_id)
    assert {row["machine"] for row in machines.output()} == machines.pids
    machines.wait(lambda: machines.jobs.members.observe([job_id])[0].num_members == 0)
    assert [process.wait(PATIENCE_S) for process in (first, second)] == [0, 0]


@pytest.mark.parametrize("lost", ["owner", "member"])
def test_a_lost_machine_is_a_lease_that_expires(machines: Machines, lost: str) -> None:
    job_id = machines.submit()
    owner = machines.start("owner", job_id)
    machines.wait(lambda: len(machines.pids) == 1)
    member = machines.start("member", job_id)
    machines.wait(lambda: len(machines.pids) == 2)
    victim = owner if lost == "owner" else member
    victim.kill()
    victim.wait()
    machines.gate.touch()
    check_output(machines, job_id)
    assert len({row["machine"] for row in machines.output()} - {victim.pid}) == 1


@pytest.mark.parametrize("options", [{"concurrency": 1}, {"requests_per_minute": 6000.0}])
def test_a_job_of_one_worker_or_with_a_rate_stays_on_one_machine(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    """Three polls of the second machine pass while the first one works."""
    monkeypatch.setattr(coordinators, "POLL_S", 0.05)
    job_id = machines.submit(**options)
    data_dirs = [machines.directory / name for name in ("one", "two")]
    settings = [Settings(data_dir=data_dir, backend="fake", batch_workers=1) for data_dir in data_dirs]

    async def run() -> None:
        first, second = (Coordinator(setting, machines.jobs, setting.data_dir.name) for setting in settings)
        first.start()
        try:
            while not machines.pids:
                await asyncio.sleep(0.02)
            second.start()
            await asyncio.sleep(1.5)
            assert len(machines.jobs.workers(job_id)) == 1
            machines.gate.touch()
            while not is_over(machines.jobs, job_id):
                await asyncio.sleep(0.02)
        finally:
            await second.stop()
            await first.stop()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    check_output(machines, job_id)
