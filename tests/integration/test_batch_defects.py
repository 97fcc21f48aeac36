"""Defects of another bulk-job engine, such as lost rows and hangs, do not occur here; docs/batch.md lists them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.coordinating import LIMITS, PATIENCE_S, CoordinatorSetup, coordinate, start_process, submit
from support.databases import fresh_url
from support.payloads import serialize_function
from tinsmith import batch
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.types import TEMPORARY_DIRECTORY, JobSpec
from tinsmith.db.factory import open_database


@batch.remote_function
def double() -> None:
    from tinsmith import batch

    for rows in batch.load():
        if any("FAIL" in row["text"] for row in rows):
            raise ValueError("this row is poison")
        batch.save_results([{"text": row["text"], "score": len(row["text"])} for row in rows])


@pytest.fixture
def jobs_and_url(tmp_path: Path) -> Iterator[tuple[BatchJobs, str]]:
    url = fresh_url(tmp_path)
    with contextlib.closing(open_database(url)) as database:
        yield BatchJobs(database), url


def job(directory: Path, batch_size: int = 2, **changes: Any) -> JobSpec:  # noqa: ANN401
    """A job that maps `in.jsonl` to `out.jsonl`."""
    outputs = [{"format": "json", "path": str(directory / "out.jsonl")}]
    rows = {"format": "json", "path": str(directory / "in.jsonl")}
    formats: dict[str, Any] = {"batch_input_format": rows, "batch_output_formats": outputs, "limits": LIMITS, **changes}
    return JobSpec(batch_serialized_fn=serialize_function(double, kind="loop"), batch_size=batch_size, **formats)


def run(jobs: BatchJobs, url: str, directory: Path, spec: JobSpec) -> int:
    """Run a job to its end with one worker."""
    job_id = jobs.create("local", spec)
    asyncio.run(coordinate(CoordinatorSetup(url, str(directory), job_id), jobs, workers=1))
    return job_id


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_record_of_a_file_is_in_the_output(jobs_and_url: tuple[BatchJobs, str], tmp_path: Path) -> None:
    """Blank lines are skipped, and the last record needs no line end."""
    texts = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff"]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines[:3], "", "  ", *lines[3:]]))
    jobs, url = jobs_and_url
    job_id = run(jobs, url, tmp_path, job(tmp_path, batch_size=4))
    job_row = jobs.find("local", job_id)
    assert (job_row.status, job_row.total_rows, job_row.rows_failed) == ("SUCCEEDED", 6, 0)
    assert rows_of(tmp_path / "out.jsonl") == [{"text": text, "score": len(text)} for text in texts]


def test_two_outputs_in_one_directory(jobs_and_url: tuple[BatchJobs, str], tmp_path: Path) -> None:
    texts = ["a", "bb", "ccc"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    full = {"format": "json", "path": str(tmp_path / "full.jsonl")}
    meta = {"format": "json", "path": str(tmp_path / "meta.jsonl"), "column": "score"}
    jobs, url = jobs_and_url
    run(jobs, url, tmp_path, job(tmp_path, batch_output_formats=[full, meta]))
    assert rows_of(tmp_path / "full.jsonl") == [{"text": text, "score": len(text)} for text in texts]
    assert rows_of(tmp_path / "meta.jsonl") == [{"score": len(text)} for text in texts]


@pytest.mark.extended
def test_a_kill_in_the_middle_of_deleting_parts(jobs_and_url: tuple[BatchJobs, str], tmp_path: Path) -> None:
    """The output was recorded before the first part was deleted; it is not published again from the rest."""
    jobs, url = jobs_and_url
    job_id = submit(jobs, tmp_path, double)
    process = start_process(CoordinatorSetup(url, str(tmp_path), job_id), "batch.recorded")
    assert process.wait(PATIENCE_S) == -signal.SIGKILL, (tmp_path / "here.log").read_text()[-3000:]
    output_bytes = (tmp_path / "out.jsonl").read_bytes()
    parts = sorted(path for path in (tmp_path / TEMPORARY_DIRECTORY).rglob("*") if path.is_file())
    assert len(parts) >= 2 and len(rows_of(tmp_path / "out.jsonl")) == 20
    for path in parts[::2]:
        path.unlink()
    asyncio.run(coordinate(CoordinatorSetup(url, str(tmp_path), job_id), jobs, workers=1))
    assert (tmp_path / "out.jsonl").read_bytes() == output_bytes
    assert jobs.find("local", job_id).status == "SUCCEEDED"
    assert not [path for path in parts if path.exists()]


def test_a_bad_row_costs_no_other_batch_anything(jobs_and_url: tuple[BatchJobs, str], tmp_path: Path) -> None:
    """Five batches run on one worker, and one row of the third fails: committed rows can be read, and the other batches
    run."""
    texts = [f"FAIL{index}" if index == 5 else f"t{index}" for index in range(10)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    jobs, url = jobs_and_url
    errors = {"format": "json", "path": str(tmp_path / "err.jsonl")}
    job_id = run(jobs, url, tmp_path, job(tmp_path, max_failed_rows=1, batch_error_format=errors))
    assert jobs.find("local", job_id).status == "SUCCEEDED"
    states = jobs.get_batch_states(job_id)
    assert {state["start_idx"] for state in states if state["retry_count"]} == {4, 5}
    assert [row["text"] for row in rows_of(tmp_path / "out.jsonl")] == [text for text in texts if "FAIL" not in text]
    assert [(row["idx"], row["error_type"]) for row in rows_of(tmp_path / "err.jsonl")] == [(5, "ValueError")]


def test_every_test_that_the_table_names_is_there() -> None:
    tests = Path(__file__).parents[1]
    section = (tests.parent / "docs" / "batch.md").read_text().partition("## How it is tested")[2].partition("\n## ")[0]
    rows = re.findall(r"^(\d+)\. .+:\s+`test_\w+\.py::test_\w+`$", section, re.MULTILINE)
    assert [int(row) for row in rows] == list(range(1, 14))
    tests_named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", section)
    assert len(tests_named) >= 13
    for file, test in tests_named:
        (path,) = tests.rglob(file)
        assert f"\ndef {test}(" in path.read_text(), (file, test)
