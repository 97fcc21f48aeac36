"""Bulk jobs under failures: unreadable specifications, and errors of coordinators and workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
import structlog
from sqlalchemy.exc import OperationalError

from support.coordinating import PATIENCE_S, is_over, submit
from support.databases import fresh_url
from tinsmith import batch
from tinsmith.batch.client.functions import describe_function
from tinsmith.batch.coordinator import coordinator as coordinators
from tinsmith.batch.coordinator import hosts
from tinsmith.batch.coordinator import job_run as runs
from tinsmith.batch.coordinator import workers as worker_sets
from tinsmith.batch.coordinator.coordinator import Coordinator
from tinsmith.batch.coordinator.state import TERMINAL, BatchJobs
from tinsmith.batch.coordinator.workers import RemoteWorker
from tinsmith.batch.pools import local
from tinsmith.batch.pools.local import LocalPool
from tinsmith.batch.pools.specs import PoolSpec
from tinsmith.batch.types import AttemptOutcome, JobSpec, Limits, OutputInfo, PartInfo, pack_payload
from tinsmith.batch.worker import mapper_process
from tinsmith.batch.worker.logs import JobLogs
from tinsmith.db.factory import open_database
from tinsmith.db.schema import BATCH_JOBS
from tinsmith.db.sqlite_database import SQLiteDatabase
from tinsmith.settings import Settings


@batch.remote_function
def keep() -> None:
    from tinsmith import batch

    for rows in batch.load():
        batch.save_results(rows)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[BatchJobs]:
    with contextlib.closing(open_database(fresh_url(tmp_path))) as database:
        yield BatchJobs(database)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(coordinators, "POLL_S", 0.05)
    monkeypatch.setattr(coordinators, "SWEEP_S", 0.2)
    monkeypatch.setattr(coordinators, "CLEAN_AGAIN_S", 0.1)
    with structlog.testing.capture_logs():  # tracebacks take seconds to print
        yield


Until = Callable[[Callable[[], bool]], Awaitable[None]]


@contextlib.asynccontextmanager
async def coordinating(jobs: BatchJobs, directory: Path, **options: Any) -> AsyncIterator[Until]:  # noqa: ANN401
    """Start a coordinator with one slot. Yields a function that waits for a condition."""
    settings = Settings(data_dir=directory, backend="fake", batch_workers=1, **options)
    coordinator = Coordinator(settings, jobs, "here")

    async def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, jobs.page("local", 9, 0)
            await asyncio.sleep(0.02)

    coordinator.start()
    try:
        yield until
    finally:
        await coordinator.stop()


def coordinate(jobs: BatchJobs, directory: Path, condition: Callable[[], bool], **options: Any) -> None:  # noqa: ANN401
    async def run() -> None:
        async with coordinating(jobs, directory, **options) as until:
            await until(condition)

    asyncio.run(run())


def submit_named(jobs: BatchJobs, directory: Path, name: str) -> int:
    output = {"format": "json", "path": str(directory / f"{name}.jsonl")}
    return submit(jobs, directory, keep, rows=4, name=name, batch_output_formats=[output])


def change(jobs: BatchJobs, job_id: int, **values: object) -> None:
    with jobs._db.write() as connection:
        connection.execute(BATCH_JOBS.update().where(BATCH_JOBS.c.job_id == job_id).values(**values))


def has_ended(jobs: BatchJobs, job_id: int) -> bool:
    return jobs.find("local", job_id).status in TERMINAL


def test_jobs_that_cannot_be_read_fail_alone_and_say_why(jobs: BatchJobs, tmp_path: Path) -> None:
    # Postgres does not store invalid JSON.
    broken = sa.text("'{no json'") if isinstance(jobs._db, SQLiteDatabase) else "{no json"
    specs = {"of another version": {"shuffled": True}, "no object": ["no"], "no JSON": broken}
    bad = {name: submit_named(jobs, tmp_path, name) for name in specs}
    cancelled, old = submit_named(jobs, tmp_path, "cancelled"), submit_named(jobs, tmp_path, "old")
    jobs.cancel("local", cancelled)
    change(jobs, old, status="FAILED", ended_at=1.0)  # its parts are due to be deleted
    good = submit_named(jobs, tmp_path, "good")
    specs["of another version"] = {**jobs.spec(good).to_dict(), "shuffled": True}
    for name, job_id in bad.items():
        change(jobs, job_id, spec=specs[name])
    for job_id in (cancelled, old):
        change(jobs, job_id, spec=specs["of another version"])
    ending = [*bad.values(), cancelled]
    coordinate(jobs, tmp_path, lambda: is_over(jobs, good) and all(has_ended(jobs, job_id) for job_id in ending))
    assert jobs.find("local", good).status == "SUCCEEDED"
    assert jobs.find("local", cancelled).status == "CANCELLED"
    for name, job_id in bad.items():
        job_row = jobs.find("local", job_id)
        assert job_row.status == "FAILED" and "specification cannot be read" in str(job_row.error), (name, job_row)
    assert "shuffled" in str(jobs.find("local", bad["of another version"]).error)
    later = submit_named(jobs, tmp_path, "later")  # after a restart, too
    coordinate(jobs, tmp_path, lambda: is_over(jobs, later))
    assert jobs.find("local", later).status == "SUCCEEDED"


class Failing:
    """Wraps functions so that their first calls fail, `times` in total; `failed` counts them."""

    def __init__(self, times: float, error: Exception, only: Callable[..., bool] = lambda *_arguments: True) -> None:
        self.times, self.error, self.only = times, error, only
        self.failed = 0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call_or_fail(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            if self.failed < self.times and self.only(*arguments):
                self.failed += 1
                raise self.error
            return function(*arguments, **options)

        return call_or_fail


class Worker:
    """Replaces a worker; it completes every batch at once."""

    unusable = False
    infra_failures = 0

    def __init__(
        self, worker_id: str, started: object, _job_id: int, _limits: object, slot: int | None, *_: object
    ) -> None:
        self.worker_id, self.handle, self.slot = worker_id, started, slot

    async def call(self, path: str, **body: object) -> None: ...

    async def feed(self, assignments: list[dict[str, Any]]) -> AsyncIterator[list[Any]]:
        for assignment in assignments:
            key = assignment["batch_idx"], assignment["attempt_id"]
            yield [(key, AttemptOutcome(*key, parts=(PartInfo("part", 2, 1, "digest"),), rows_ok=2))]

    async def operate(self, op: str) -> AsyncIterator[dict[str, Any]]:
        yield {"end": {"total_rows": 4, "batch_size": 2}}

    async def result_of(self, op: str, **_: object) -> dict[str, Any]:
        results = {"issue_token": {"token": None}, "publish": {"output": OutputInfo("out", 4, 1, "digest").to_dict()}}
        return results.get(op, {})

    async def send(self, path: Path) -> str:
        return str(path)

    async def close(self) -> None: ...


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(_pool: LocalPool, worker_id: str, _slot: int | None, *_: object) -> SimpleNamespace:
        async def wait() -> None: ...

        return SimpleNamespace(process_name="nowhere", host="nowhere", has_ended=False, wait=wait)

    monkeypatch.setattr(LocalPool, "start", start)
    monkeypatch.setattr(local, "MAX_SPARES", 0)
    monkeypatch.setattr(worker_sets, "RemoteWorker", Worker)


PHASES = (
    "acquirable_jobs", "acquire_batch_coordinator", "cleanable_jobs", "save_batch_states", "failure",
    "settle_and_claim",
    "next_retry_in", "renew", "set_status", "iter_committed_batches", "row_errors", "finish", "resume_chain",
    "record_cleaned", "release",
    "record_launch", "record_worker", "delete_worker",
)  # fmt: skip
"""The calls of a coordinator to the database during a job, and those about members of jobs."""
MEMBER_PHASES = ("joinable_jobs", "observe")
ERRORS = [OperationalError("a statement", {}, Exception("the disk is full")), ValueError("odd")]


@pytest.mark.usefixtures("instant")
@pytest.mark.parametrize("error", ERRORS)
def test_errors_in_all_phases_of_a_coordinator_end_nothing(
    jobs: BatchJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Each call fails once; the job succeeds nevertheless."""
    monkeypatch.setattr(coordinators, "MAX_FAILURES", 99)
    monkeypatch.setattr(coordinators, "MAX_PAUSE_S", 0.1)
    monkeypatch.setattr(worker_sets, "MAX_OPERATION_TRIES", 9)
    phases = [*PHASES, *(["spec"] if isinstance(error, OperationalError) else [])]
    fails = {name: Failing(1, error) for name in (*phases, *MEMBER_PHASES)}
    for name, wrap in fails.items():
        calls = jobs.members if name in MEMBER_PHASES else jobs
        monkeypatch.setattr(calls, name, wrap(getattr(calls, name)))
    job_id = submit_named(jobs, tmp_path, "out")
    coordinate(jobs, tmp_path, lambda: is_over(jobs, job_id))
    assert jobs.find("local", job_id).status == "SUCCEEDED"
    seldom = {"next_retry_in", "row_errors"}
    assert {name for name, wrap in fails.items() if not wrap.failed} <= seldom


@pytest.mark.usefixtures("instant")
def test_a_job_that_stops_its_coordinator_each_time_fails_with_the_reason(
    jobs: BatchJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = submit_named(jobs, tmp_path, "bad")
    fails = Failing(float("inf"), ValueError("this list cannot be read"), lambda job_id, *_: job_id == bad)
    monkeypatch.setattr(jobs, "save_batch_states", fails(jobs.save_batch_states))
    good = submit_named(jobs, tmp_path, "good")
    coordinate(jobs, tmp_path, lambda: has_ended(jobs, bad) and is_over(jobs, good))
    job_row = jobs.find("local", bad)
    assert job_row.status == "FAILED" and "this list cannot be read" in str(job_row.error), job_row
    assert jobs.find("local", good).status == "SUCCEEDED"


@pytest.mark.usefixtures("instant")
@pytest.mark.parametrize("num_stale", [2, runs.PUBLISH_TRIES])
def test_an_output_that_another_job_publishes_to_is_published_again(
    jobs: BatchJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_stale: int
) -> None:
    job_id = submit_named(jobs, tmp_path, "out")
    calls: list[str] = []
    result_of = Worker.result_of

    async def note(worker: Worker, op: str, **request: object) -> dict[str, Any]:
        calls.append(op)
        is_stale = op == "publish" and calls.count("publish") <= num_stale
        return {"stale": "a later writer"} if is_stale else await result_of(worker, op, **request)

    monkeypatch.setattr(Worker, "result_of", note)
    monkeypatch.setattr(runs, "PUBLISH_PAUSE_S", 0.001)
    coordinate(jobs, tmp_path, lambda: has_ended(jobs, job_id))
    job = jobs.find("local", job_id)
    assert calls[:4] == ["issue_token", "publish"] * 2, "each try has a token of its own"
    if num_stale == 2:
        assert job.status == "SUCCEEDED" and calls.count("publish") == 3
    else:
        assert job.status == "FAILED" and "another job published to" in str(job.error)


@pytest.mark.usefixtures("instant")
def test_a_rate_limit_outlives_the_coordinator(
    jobs: BatchJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the limit's clock stands still, one batch begins; another coordinator continues to wait."""
    clock = [1000.0]
    monkeypatch.setattr(runs, "now", lambda: clock[0])
    waits_s: list[float] = []

    class Spied(runs.RateLimits):
        def wait_s(self) -> float:
            waits_s.append(super().wait_s())
            return waits_s[-1]

    monkeypatch.setattr(runs, "RateLimits", Spied)
    output = {"format": "json", "path": str(tmp_path / "out.jsonl")}
    job_id = submit(jobs, tmp_path, keep, rows=4, batch_output_formats=[output], requests_per_minute=60)

    def waits() -> bool:
        has_waited = len(waits_s) > 5 and all(wait_s == 1.0 for wait_s in waits_s[-5:])
        return has_waited and jobs.find("local", job_id).completed_batches == 1

    for _ in range(2):
        waits_s.clear()
        coordinate(jobs, tmp_path, waits)
        assert jobs.find("local", job_id).completed_batches == 1
    clock[0] += 1.0
    coordinate(jobs, tmp_path, lambda: is_over(jobs, job_id))
    assert jobs.find("local", job_id).status == "SUCCEEDED"


@pytest.mark.usefixtures("instant")
def test_a_new_job_without_a_worker_in_time_fails_and_one_with_results_waits(
    jobs: BatchJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a cluster with room for a job's operations, which reserve nothing, but not for its workers."""
    clock, start_now, room = [1000.0], LocalPool.start, [False]
    waits: list[float] = []

    async def start(pool: LocalPool, worker_id: str, slot: int | None, *arguments: Any) -> Any:  # noqa: ANN401
        if slot is not None:
            waits.append(time.monotonic())
            while not room[0]:
                await asyncio.sleep(0.01)
        return await start_now(pool, worker_id, slot, *arguments)

    monkeypatch.setattr(LocalPool, "start", start)
    monkeypatch.setattr(PoolSpec, "exclusive", property(lambda _pool: True))  # no worker of operations takes batches
    monkeypatch.setattr(runs, "now", lambda: clock[0])

    impatient = Limits(discovery_timeout_s=0.3)

    def job(name: str, limits: Limits) -> int:
        output = {"format": "json", "path": str(tmp_path / name)}
        return submit(jobs, tmp_path, keep, limits, rows=4, batch_output_formats=[output], requests_per_minute=60)

    new = job("new.jsonl", impatient)
    coordinate(jobs, tmp_path, lambda: is_over(jobs, new))
    assert jobs.find("local", new).status == "FAILED"
    assert "within 0.3 s (limits.discovery_timeout_s)" in str(jobs.find("local", new).error)

    room[0] = True
    begun_job = job("begun.jsonl", Limits())
    coordinate(jobs, tmp_path, lambda: jobs.find("local", begun_job).completed_batches == 1)
    change(jobs, begun_job, spec=replace(jobs.spec(begun_job), limits=impatient).to_dict())
    room[0] = False
    waits.clear()
    clock[0] += 60.0
    coordinate(jobs, tmp_path, lambda: bool(waits) and time.monotonic() > waits[0] + 1.0)
    assert jobs.find("local", begun_job).status == "RUNNING" and len(waits) == 1
    room[0] = True
    coordinate(jobs, tmp_path, lambda: is_over(jobs, begun_job))
    assert jobs.find("local", begun_job).status == "SUCCEEDED"


STARTING: dict[str, Callable[[BatchJobs], tuple[Any, str]]] = {
    "noting the intent": lambda jobs: (jobs, "record_launch"),
    "making the directory of logs": lambda _: (Path, "mkdir"),
    "opening its log": lambda _: (JobLogs, "path"),
    "configuring it": lambda _: (RemoteWorker, "call"),
    "starting its process": lambda _: (mapper_process, "start_child"),
    "noting its process": lambda jobs: (jobs, "record_worker"),
}
"""The steps of a worker's start, and the function of each."""


def submit_planned(jobs: BatchJobs, directory: Path, name: str) -> int:
    """A job whose rows are counted, so that its first worker starts for a slot."""
    job_id = submit_named(jobs, directory, name)
    assert jobs.acquire_batch_coordinator(job_id, "planner", "here", 60)
    jobs.save_batch_states(job_id, "planner", range(0, 4, 2), 4)
    jobs.release(job_id, "planner")
    return job_id


def test_a_worker_that_cannot_be_started_gives_its_slot_back(
    jobs: BatchJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a step always fails, the job fails with the reason, its files are deleted, and the only slot is free for the
    next job. If it fails once, the job continues."""
    error = OSError(28, "no space left on device")
    monkeypatch.setattr(local, "MAX_SPARES", 0)  # every worker is started anew

    def spoil(patched: pytest.MonkeyPatch, step: str, times: float) -> None:
        owner, name = STARTING[step](jobs)
        only = (lambda path, *_: path.name == "logs") if owner is Path else lambda *_: True
        patched.setattr(owner, name, Failing(times, error, only)(getattr(owner, name)))

    async def run() -> None:
        async with coordinating(jobs, tmp_path) as until:
            for step in STARTING:
                for make in (submit_planned, submit_named) if step == "opening its log" else (submit_planned,):
                    with monkeypatch.context() as patched:
                        spoil(patched, step, float("inf"))
                        job_id = make(jobs, tmp_path, f"{step} {make.__name__}")
                        await until(lambda job_id=job_id: has_ended(jobs, job_id) and not jobs.workers(job_id))
                    job_row = jobs.find("local", job_id)
                    assert job_row.status == "FAILED" and "no space left on device" in str(job_row.error), (
                        step,
                        job_row,
                    )
            monkeypatch.setattr(hosts, "MAX_SETUP_FAILURES", 99)
            with monkeypatch.context() as patched:
                for step in STARTING:
                    spoil(patched, step, 1)
                job_id = submit_planned(jobs, tmp_path, "out")
                await until(lambda: is_over(jobs, job_id))
            assert jobs.find("local", job_id).status == "SUCCEEDED"

    asyncio.run(run())


class NeedsGoodGpu:
    """Fails on a GPU that is out of order; elsewhere, waits until it has failed a few times."""

    def __init__(self, bad: list[str], failures: str) -> None:
        import os
        from pathlib import Path

        self.gpu, self.failures = os.environ["CUDA_VISIBLE_DEVICES"], Path(failures)
        if self.gpu in bad:
            with self.failures.open("a") as file:
                file.write("x")
            raise RuntimeError(f"CUDA error on {self.gpu}")

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        import time

        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (not self.failures.exists() or self.failures.stat().st_size < 6):
            time.sleep(0.02)
        return {"gpu": self.gpu}


def gpu_job(jobs: BatchJobs, directory: Path, bad: list[str]) -> int:
    (directory / "gpu.yaml").write_text("pool: {workers: 2}\nresources: {accelerators: H100}\n")
    payload = describe_function(
        NeedsGoodGpu, kwargs={"bad": bad, "failures": f"{directory}/failures"}, kind="row", options={"merge": True}
    )
    spec = JobSpec(
        batch_serialized_fn=pack_payload(payload),
        batch_input_format={"format": "items", "path": "items", "items": [{"n": index} for index in range(20)]},
        batch_output_formats=[{"format": "json", "path": str(directory / "gpus.jsonl")}],
        batch_size=1,
        batch_pool_name="gpu",
        limits=Limits(backoff_s=0.05, grace_s=1.0),
    )
    return jobs.create("local", spec)


def test_a_machine_that_cannot_set_up_is_set_aside_and_the_job_goes_on_without_it(
    jobs: BatchJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-good,GPU-bad")
    job_id, set_aside = gpu_job(jobs, tmp_path, ["GPU-bad"]), []

    def is_done() -> bool:
        set_aside.extend(jobs.find("local", job_id).machines_set_aside or [])
        return is_over(jobs, job_id)

    coordinate(jobs, tmp_path, is_done, batch_pools=(f"gpu={tmp_path}/gpu.yaml",))
    job_row = jobs.find("local", job_id)
    assert (job_row.status, job_row.rows_ok) == ("SUCCEEDED", 20)
    rows = [json.loads(line) for line in (tmp_path / "gpus.jsonl").read_text().splitlines()]
    assert [(row["n"], row["gpu"]) for row in rows] == [(index, "GPU-good") for index in range(20)]
    assert {machine["machine"].rpartition(", ")[2] for machine in set_aside} == {"GPU GPU-bad"}
    assert max(machine["failures"] for machine in set_aside) > 4, "more than end a job of one machine"
    assert "CUDA error on GPU-bad" in set_aside[-1]["error"]


def test_a_job_that_no_machine_can_set_up_fails_with_the_workers_error(
    jobs: BatchJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-x,GPU-y")
    job_id = gpu_job(jobs, tmp_path, ["GPU-x", "GPU-y"])
    coordinate(jobs, tmp_path, lambda: is_over(jobs, job_id), batch_pools=(f"gpu={tmp_path}/gpu.yaml",))
    job_row = jobs.find("local", job_id)
    assert job_row.status == "FAILED" and job_row.completed_batches == 0
    assert "setup_failed on all of 2 machines" in str(job_row.error) and "CUDA error on GPU-" in str(job_row.error)
    assert {batch["infra_retries"] for batch in jobs.get_batch_states(job_id)} == {0}
