"""The memory of a job's coordinator, publisher and client does not grow with its batches and failed rows."""

from __future__ import annotations

import contextlib
import gc
import json
import shutil
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from support.databases import fresh_url
from tinsmith import batch
from tinsmith.api.routes.batch import MAX_SHOWN_ROW, shorten_error
from tinsmith.batch.client import job as jobs_of_clients
from tinsmith.batch.client.http import Client
from tinsmith.batch.client.job import Job
from tinsmith.batch.coordinator import job_run
from tinsmith.batch.coordinator import state as states
from tinsmith.batch.coordinator.state import ERRORS_BYTES, BatchJobs
from tinsmith.batch.formats.lines import JsonWriter
from tinsmith.batch.formats.part_lists import CommittedParts
from tinsmith.batch.types import JobSpec, OutputInfo, PartInfo
from tinsmith.batch.worker import io_operations
from tinsmith.db.factory import open_database
from tinsmith.db.schema import BATCH_JOBS, BATCH_ROW_ERRORS, BATCH_STATES

FEW, MANY, PAGE = 1_000, 3_000, 200
ALLOWED = 250_000
"""Bytes by which the peak for the many may be higher; each batch alone has a part of 400 bytes."""
PATH = "/data/.tinsmith_batch_tmp/1/out-0/attempt-1/batch_00000000-00000031.jsonl"
PART = PartInfo(PATH, 32, 4096, "0" * 64, "e" * 32)


def spec_in(directory: Path) -> JobSpec:
    output = JsonWriter(f"{directory}/o.jsonl").to_dict()
    errors = JsonWriter(f"{directory}/e.jsonl").to_dict()
    source = {"format": "items", "path": "items", "items": []}
    return JobSpec("", source, [output], 32, batch_error_format=errors, max_failed_rows=1e9)


def simulate(jobs: BatchJobs, directory: Path, batches: int) -> int:
    """A job whose batches are all committed, each with one failed row."""
    job_id = jobs.create("local", spec_in(directory))
    assert jobs.acquire_batch_coordinator(job_id, "token", "here", 3600)
    jobs.save_batch_states(job_id, "token", range(0, batches * 32, 32), batches * 32)
    with jobs._db.write() as connection:
        completed = {"status": "COMPLETED", "parts": json.dumps([PART.to_dict()]), "rows_ok": 31, "rows_failed": 1}
        connection.execute(
            sa.text(
                "UPDATE batch_state SET status = :status, parts = :parts, rows_ok = :rows_ok, "
                "rows_failed = :rows_failed, attempt_id = 1 WHERE job_id = :job"
            ),
            {**completed, "job": job_id},
        )
        totals = {"completed_batches": batches, "rows_ok": 31 * batches, "rows_failed": batches}
        connection.execute(BATCH_JOBS.update().where(BATCH_JOBS.c.job_id == job_id).values(status="FAILED", **totals))
        details = {"row": {"text": "x" * 100}, "traceback": "t" * 300, "attempts": 1, "worker": "w"}
        error = {"job_id": job_id, "attempt_id": 1, "error_class": "ValueError", "message": "bad", "details": details}
        for first in range(0, batches, 5000):
            rows = [{**error, "row_idx": 32 * index} for index in range(first, min(batches, first + 5000))]
            connection.execute(BATCH_ROW_ERRORS.insert(), rows)
    return job_id


class LocalClient(Client):
    """The routes of bulk jobs without a server between."""

    def __init__(self, jobs: BatchJobs) -> None:
        super().__init__("http://nowhere", "tml-test")
        self._jobs = jobs

    def _call(self, method: str, path: str, *, query: Any = None, **_: object) -> Any:  # noqa: ANN401
        job_id, _, resource = path.removeprefix("/api/v1/batch/jobs/").partition("/")
        query = query or {}
        if resource == "batches":
            return {"batches": self._jobs.get_batch_states(int(job_id), PAGE, query["offset"])}
        if resource == "errors":
            rows, after = self._jobs.row_errors_page(int(job_id), PAGE, query["after"])
            return {"errors": list(map(job_run.error_row, rows))[: query["limit"]], "next": after}
        spec = self._jobs.spec(int(job_id))
        if resource == "partial":
            committed = self._jobs.list_commits(int(job_id), query["after"], PAGE)
            committed_batches = [{**batch.span._asdict(), "parts": batch.parts} for batch in committed]
            return {
                "outputs": spec.batch_output_formats,
                "part_formats": spec.part_formats,
                "batches": committed_batches,
            }
        job = self._jobs.find("local", int(job_id))
        names = ("created_at", "started_at", "ended_at", "tokens_in", "tokens_out", "rows_ok", "rows_failed")
        status = {name: getattr(job, name) for name in names}
        return {**status, "status": job.status, "worker_seconds": 0, "workers": []}


@contextlib.contextmanager
def peak_of() -> Iterator[Callable[[], int]]:
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield lambda: tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def publish_nothing(_writer: object, parts: Sequence[PartInfo], *_: object) -> OutputInfo:
    """Reads every part, as publishing does."""
    rows = sum(part.rows for part in parts)
    return OutputInfo("out", rows, 0, "digest")


def _write_files(jobs: BatchJobs, job_id: int, directory: Path) -> None:
    """What the coordinator sends to the worker that publishes."""
    job_run._write_lines(directory / "winners", (batch.parts for batch in jobs.iter_committed_batches(job_id)))
    job_run._write_lines(directory / "failures", job_run._iter_failed_rows(jobs, job_id))


def _publish(jobs: BatchJobs, job_id: int, directory: Path) -> None:
    spec = jobs.spec(job_id)
    winners = CommittedParts(str(directory / "winners"), 0)
    assert io_operations.publish_output(spec, 0, job_id, winners).rows == 32 * len(winners)
    for name, index in (("failures", 1), ("winners", 0)):
        shutil.copyfile(directory / name, directory / "copy")
        io_operations._publish(spec, job_id, {"output_idx": index, "path": str(directory / "copy"), "token": None})


def _export(jobs: BatchJobs, job_id: int, directory: Path) -> None:
    assert Job(job_id, LocalClient(jobs)).export(f"{directory}/copy.jsonl").rows > 0


def _report(jobs: BatchJobs, job_id: int, _: Path) -> None:
    job = Job(job_id, LocalClient(jobs))
    report = job.report()
    assert report.batches == report.tries == sum(1 for _ in job.errors())


STEPS = (_write_files, _publish, _export, _report)


def measure(directory: Path, batches: int) -> dict[str, int]:
    """The peak of each step, in bytes."""
    peaks = {}
    with contextlib.closing(open_database(fresh_url(directory, "sqlite"))) as database:
        jobs = BatchJobs(database)
        job_id = simulate(jobs, directory, batches)
        for step in STEPS:
            with peak_of() as peak:
                step(jobs, job_id, directory)
                peaks[step.__name__] = peak()
    return peaks


@pytest.mark.extended
@pytest.mark.parametrize("index", range(len(STEPS)), ids=[step.__name__ for step in STEPS])
def test_memory_does_not_grow_with_batches_and_failed_rows(index: int, peak_measurements: list[dict[str, int]]) -> None:
    small, large = ([*peaks.values()][index] for peaks in peak_measurements)
    assert large < small + ALLOWED, (small, large)


@pytest.fixture(scope="module")
def peak_measurements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, int]]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(JsonWriter, "publish", publish_nothing)
        patched.setattr(jobs_of_clients, "delete_staging", lambda *_: None)
        patched.setattr(states, "PAGE", PAGE)
        patched.setattr(job_run, "FAILED_ROWS_PAGE", PAGE)
        patched.setattr(io_operations, "FAILURES_IN_A_PART", PAGE)
        measurements = [measure(tmp_path_factory.mktemp(str(count)), count) for count in (FEW, MANY)]
    yield measurements


def test_failed_rows_come_in_pages_that_are_bounded_in_bytes(tmp_path: Path) -> None:
    with contextlib.closing(open_database(fresh_url(tmp_path))) as database:
        jobs = BatchJobs(database)
        job_id = simulate(jobs, tmp_path, 3)
        large = {"row": {"image": "i" * (ERRORS_BYTES // 2)}, "traceback": "", "attempts": 1, "worker": "w"}
        with database.write() as connection:
            connection.execute(BATCH_ROW_ERRORS.update().values(details=large))
        assert [len(jobs.row_errors(job_id, 10, after)) for after in (-1, 0, 32, 64)] == [1, 1, 1, 0]
        job = Job(job_id, LocalClient(jobs))
        assert [error["idx"] for error in job.errors()] == [0, 32, 64]
        assert [error["idx"] for error in job.errors(after=0)] == [32, 64]
        assert [error["idx"] for error in job.errors(limit=2)] == [0, 32]
        assert [error["idx"] for error in job.errors(after=32, limit=5)] == [64]
        assert list(job.errors(limit=0)) == list(job.errors(after=64)) == []
        with database.read() as connection:
            assert connection.scalar(sa.select(sa.func.count()).select_from(BATCH_STATES)) == 3


def test_a_status_has_the_start_of_a_large_row() -> None:
    small = {"idx": 1, "row": {"text": "x" * 1000}}
    assert shorten_error(small) == small
    row = {"image": "i" * 10**6, "tokens": list(range(10**5)), "n": 1} | {f"c{index}": 0 for index in range(1000)}
    short = shorten_error({"idx": 1, "row": row})["row"]
    assert isinstance(short, dict) and len(json.dumps(short)) < MAX_SHOWN_ROW
    assert short["n"] == 1 and str(short["image"]).endswith("... (1000000 characters)")
    assert shorten_error({"idx": 1, "row": None}) == {"idx": 1, "row": None}


def test_failed_rows_are_published_in_their_order_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_operations, "FAILURES_IN_A_PART", 3)
    rows = [{"idx": index, "row": {"text": "t"}} for index in range(10)]
    for count in (0, 1, 3, 10):
        spec = spec_in(tmp_path / str(count))
        published = io_operations.publish_errors(spec, 1, iter(rows[:count]))
        assert published.rows == count
        reader = batch.JsonReader(published.path)
        assert (reader.download_batch(0, count - 1, "") if count else []) == rows[:count]
