"""Mappers whose process ends in the middle of a batch: the rows that end it are recorded, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import payloads
from support.coordinating import LIMITS, PATIENCE_S, CoordinatorSetup, coordinate, submit, text_rows
from support.databases import fresh_url
from tinsmith import batch
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.types import Assignment, AttemptFailure, FailureCause, JobSpec, Limits
from tinsmith.batch.worker.mapper_process import Attempt, MapperProcess
from tinsmith.batch.worker.marker import MAP, NO_STEP, READ, Marker, marker_file
from tinsmith.db.factory import open_database

ROWS = 5000
KINDS = {333: "exit", 1000: "null", 2222: "kill", 4999: "quit"}
"""Rows that end the process, and how they do so."""
CLASSES = {"exit": "MapperDied", "null": "MapperDied", "kill": "MapperKilled", "quit": "MapperDied"}
WORDS = {
    "exit": "ended with status 3",
    "null": "died of signal 11",
    "kill": "killed (signal 9; out of memory?)",
    "quit": "status 0",
}


def double(row: dict[str, Any], kinds: dict[str, str]) -> dict[str, Any]:
    import ctypes
    import os
    import signal

    kind = kinds.get(row["text"][1:])
    if kind == "exit":
        os._exit(3)
    if kind == "quit":
        os._exit(0)
    if kind == "null":
        ctypes.string_at(0)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"output": row["text"] * 2}


@batch.remote_function
def doubling(kinds: dict[str, str]) -> None:
    import ctypes
    import os
    import signal

    from tinsmith import batch

    for rows in batch.load():
        for row in rows:
            kind = kinds.get(row["text"][1:])
            if kind == "exit":
                os._exit(3)
            if kind == "quit":
                os._exit(0)
            if kind == "null":
                ctypes.string_at(0)
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        batch.save_results([{**row, "output": row["text"] * 2} for row in rows])


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[BatchJobs]:
    with contextlib.closing(open_database(fresh_url(tmp_path))) as database:
        yield BatchJobs(database)


@pytest.mark.parametrize(("kind", "batch_size"), [("row", 100), pytest.param("loop", 4, marks=pytest.mark.slow)])
def test_exactly_the_rows_that_end_the_process_are_recorded(
    jobs: BatchJobs, tmp_path: Path, kind: str, batch_size: int
) -> None:
    kinds = {str(row): how for row, how in KINDS.items()}
    function = double if kind == "row" else doubling
    spec = JobSpec(
        payloads.serialize_function(function, kwargs={"kinds": kinds}, kind=kind),
        {"format": "items", "path": "items", "items": text_rows(ROWS)},
        [{"format": "json", "path": str(tmp_path / "out.jsonl")}],
        batch_size,
        max_failed_rows=len(KINDS),
        limits=LIMITS,
    )
    job_id = jobs.create("local", spec)
    asyncio.run(coordinate(CoordinatorSetup("", str(tmp_path), job_id), jobs, workers=2))
    job = jobs.find("local", job_id)
    errors = {error["row_idx"]: error for error in jobs.row_errors(job_id)}
    assert (job.status, sorted(errors), job.rows_ok) == ("SUCCEEDED", sorted(KINDS), ROWS - len(KINDS)), job
    for row, how in KINDS.items():
        error_row = errors[row]
        assert error_row["error_class"] == CLASSES[how] and WORDS[how] in error_row["message"], error_row
        assert error_row["details"]["row"] == {"text": f"t{row}"} and error_row["details"]["attempts"] >= 2
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert written == [{"text": f"t{row}", "output": f"t{row}" * 2} for row in range(ROWS) if row not in KINDS]
    other_batches = [state for state in jobs.get_batch_states(job_id) if state["status"] == "COMPLETED"]
    assert all(
        state["error_class"] is None and state["retry_count"] == 0
        for state in other_batches
        if not set(range(state["start_idx"], state["end_idx"] + 1)) & set(KINDS)
    ), "no other batch is blamed for anything"


# Outcomes of a batch whose mapper dies.


def attempt(jobs: BatchJobs, job_id: int, lost: AttemptFailure) -> list[tuple[int, int, str, int, int]]:
    """Settle the first due batch with an outcome; return all batches with rows, status and retries."""
    claim = jobs.settle_and_claim(job_id, "token", [], {"w": 1}, 60).claims["w"][0]
    jobs.settle_and_claim(job_id, "token", [(claim, lost)], {}, 60, LIMITS.max_retries, 0.0)
    names = ("start_idx", "end_idx", "status", "retry_count", "infra_retries")
    return [tuple(state[name] for name in names) for state in jobs.get_batch_states(job_id)]


def died(row: int | None = None) -> AttemptFailure:
    return AttemptFailure("MapperKilled", "killed", FailureCause.DEATH, row)


def test_two_deaths_split_a_batch_and_its_parts_have_retries_of_their_own(jobs: BatchJobs, tmp_path: Path) -> None:
    job_id = submit(jobs, tmp_path, doubling, fn_kwargs={"kinds": {}})
    assert jobs.acquire_batch_coordinator(job_id, "token", "here", 60)
    jobs.save_batch_states(job_id, "token", [0], 8)
    lost_worker = AttemptFailure("WorkerLostError", "gone", FailureCause.WORKER)
    raised = AttemptFailure("ValueError", "odd")
    assert attempt(jobs, job_id, died()) == [(0, 7, "PENDING", 0, 1)], "the first time, no retry is spent"
    assert attempt(jobs, job_id, lost_worker) == [(0, 7, "PENDING", 0, 2)], "a lost worker says nothing of the batch"
    parts = [(0, 2), (3, 3), (4, 7)]
    split = attempt(jobs, job_id, died(row=3))
    assert split[0][2] == "SPLIT" and [batch_state[:2] for batch_state in split[1:]] == parts
    assert {batch_state[2:] for batch_state in split[1:]} == {("PENDING", 0, 0)}
    assert attempt(jobs, job_id, raised)[1] == (0, 2, "PENDING", 1, 0), "a retry of its own"
    assert [batch_state[:3] for batch_state in attempt(jobs, job_id, raised)][1:4] == [
        (0, 2, "SPLIT"), (0, 1, "PENDING"), (2, 2, "PENDING")
    ]  # fmt: skip


# Attribution of a mapper's death to a batch.


@batch.remote_function
def waiting(marker: str) -> None:
    """Reports when it begins a batch, and works on it until the file is deleted."""
    import time
    from pathlib import Path

    from tinsmith import batch

    for rows in batch.load():
        Path(marker).touch()
        while Path(marker).exists():
            time.sleep(0.01)
        batch.save_results(rows)


class Running:
    """A worker's MapperProcess in this process, with a real child."""

    def __init__(self, directory: Path) -> None:
        self.marker = directory / "at-work"
        (directory / "in.jsonl").write_text("".join(f'{{"n": {index}}}\n' for index in range(80)))
        spec = JobSpec(
            payloads.serialize_function(waiting, kwargs={"marker": str(self.marker)}),
            batch.JsonReader(str(directory / "in.jsonl")).to_dict(),
            [batch.JsonWriter(str(directory / "out.jsonl")).to_dict()],
            2,
            limits=Limits(),
        )
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.directory = directory
        self.mapper = MapperProcess(spec.to_dict(), directory / "log")

    def feed(self, *batches: int) -> None:
        base = str(self.directory / "parts")
        self.mapper.feed([
            Attempt(
                {"batch_idx": batch_idx, "start_idx": 2 * batch_idx, "end_idx": 2 * batch_idx + 1, "attempt_id": 1,
                 "part_bases": [f"{base}-{batch_idx}"]},
                self.events.put,
            )
            for batch_idx in batches
        ])  # fmt: skip

    def kill(self) -> None:
        assert self.mapper._child is not None
        os.kill(self.mapper._child.process.pid, signal.SIGKILL)

    def next_outcome(self) -> tuple[int, dict[str, Any]]:
        attempt_event = self.events.get(timeout=PATIENCE_S)
        assert isinstance(attempt_event, Attempt)
        return attempt_event.assignment["batch_idx"], attempt_event.result

    def until(self, exists: bool) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.marker.exists() != exists:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    new_running = Running(tmp_path)
    yield new_running
    new_running.mapper.close(0)


def test_a_mappers_death_is_attributed_only_to_its_current_batch(running: Running) -> None:
    running.feed(0)
    running.until(True)
    running.marker.unlink()
    assert "outcome" in running.next_outcome()[1]
    running.kill()  # idle
    running.feed(1, 2)
    running.until(True)
    running.kill()  # at batch 1
    batch_idx, result = running.next_outcome()
    lost = result["lost"]
    assert (batch_idx, lost["error_class"], lost["cause"]) == (1, "MapperKilled", FailureCause.DEATH)
    assert "killed (signal 9; out of memory?) while it worked on this batch" in lost["error"]
    running.marker.unlink()
    running.until(True)
    running.marker.unlink()
    assert running.next_outcome()[0] == 2


def test_the_next_child_stores_parts_under_other_names() -> None:
    attempt_of_batch = Attempt({"batch_idx": 0, "attempt_id": 1, "part_bases": ["a/attempt-1"]}, print)
    assert [attempt_of_batch.to_send()["part_bases"] for _ in range(3)] == [
        ["a/attempt-1"],
        ["a/attempt-1-1"],
        ["a/attempt-1-2"],
    ]


def rows_of(marker: Marker) -> dict[tuple[int, int], int]:
    return {key: work.row for key, work in marker.busy().items()}


@pytest.mark.smoke
def test_a_marker_is_shared_by_mappings_of_one_file() -> None:
    with marker_file() as file:
        written, reader = Marker(file.fileno()), Marker(file.fileno())
    assert reader.starting and reader.busy() == {}
    written.begin(READ, Assignment(7, 0, 9, 2, ()))
    assert reader.starting and rows_of(reader) == {(7, 2): -1}
    written.begin(MAP, Assignment(6, 0, 9, 3, ()))
    written.begin(MAP + 1, Assignment(5, 0, 9, 1, ()))
    written.set_row(MAP, 5)
    written.begin_wait(MAP + 1)
    time.sleep(0.01)
    written.end_wait(MAP + 1, 2)
    works = reader.busy()
    assert works[5, 1].step == 2 and works[5, 1].waited_s >= 0.01 and works[6, 3][1:] == (NO_STEP, 0)
    assert reader.starting and rows_of(reader) == {(7, 2): -1, (6, 3): 5, (5, 1): -1}
    written.set_starting(False)
    written.end(READ)
    written.end(MAP)
    written.end(MAP + 1)
    assert reader.busy() == {} and not reader.starting
