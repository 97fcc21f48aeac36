"""Several batches of a worker at a time: which, how many, and what stays of each batch alone."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.mapper_run import MapperRun, Rows
from support.payloads import serialize_function
from tinsmith import batch
from tinsmith.batch import operations
from tinsmith.batch.client.dataset import Dataset
from tinsmith.batch.operations import payload_of
from tinsmith.batch.operations.sample import Sample
from tinsmith.batch.types import AttemptFailure, FailureCause, JobSpec, Limits
from tinsmith.batch.worker import concurrency, runtime
from tinsmith.batch.worker.concurrency import estimate_bytes
from tinsmith.batch.worker.mapper_process import Attempt, MapperProcess

PATIENCE_S = 60.0


def data_set(count: int = 30) -> Dataset:
    data = batch.from_items([{"n": index} for index in range(count)])
    data._forgotten = False
    return data


class Meeting:
    """Counts the batches that are in it; the first waits until `size` batches have come."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.current: set[int] = set()
        self.most = 0
        self.is_full = asyncio.Event()

    async def __call__(self, rows: Rows) -> Rows:
        first = rows[0]["n"]
        self.current.add(first)
        self.most = max(self.most, len(self.current))
        if len(self.current) >= self.size:
            self.is_full.set()
        async with asyncio.timeout(PATIENCE_S):
            await self.is_full.wait()
        await asyncio.sleep(0.01)
        self.current.discard(first)
        return [{"n": row["n"], "most": self.most} for row in rows]


def meet(tmp_path: Path, size: int, **options: Any) -> int:  # noqa: ANN401
    """The most batches that were at work at a time."""
    directory = tmp_path / f"{size}-{len(options)}"
    directory.mkdir()
    run = MapperRun(
        directory, Meeting, kind="batch", serializer="cloudpickle", kwargs={"size": size},
        rows=[{"n": index, "text": "x" * 1000} for index in range(36)], **options,
    )  # fmt: skip
    assert [row["n"] for row in run.output()] == list(range(36)) and not run.failed_rows
    return max(row["most"] for row in run.output())


def test_as_many_batches_run_at_a_time_as_the_job_says(tmp_path: Path) -> None:
    for max_batches in (1, 2, 5):
        assert meet(tmp_path, max_batches, max_concurrent_batches=max_batches) == max_batches
    assert meet(tmp_path, 8) == 8


@pytest.mark.parametrize(
    ("bound", "value", "most"),
    [("MAX_ROWS", 9, 3), ("MAX_ROWS", 8, 3), ("MAX_ROWS", 2, 1), ("MAX_BYTES", 9000, 3), ("MAX_BYTES", 100, 1)],
)
def test_batches_at_a_time_are_bounded_in_rows_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int, most: int
) -> None:
    monkeypatch.setattr(concurrency, bound, value)
    assert meet(tmp_path, 1) == most


def test_the_bytes_of_rows_are_those_of_texts_and_arrays() -> None:
    rows = [{"text": "x" * 1000, "nested": {"list": [b"y" * 500, "z"]}}, {"array": np.zeros((10, 10))}]
    assert 2300 < estimate_bytes(rows) < 2700
    assert estimate_bytes([]) == 0


async def slow_first(row: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(0.3 if row["n"] < 3 else 0)
    return {"done": row["n"]}


def test_a_batch_ends_although_an_earlier_one_takes_long(tmp_path: Path) -> None:
    run = MapperRun(tmp_path, data_set().map(slow_first))
    assert run.order[-1] == 0 and sorted(run.order) == list(range(4))
    assert [row["done"] for row in run.output()] == list(range(10))


async def fail_batch(rows: Rows) -> Rows:
    await asyncio.sleep(0.01)
    if rows[0]["n"] == 3:
        raise RuntimeError("three")
    return rows


def test_an_error_fails_its_batch_alone(tmp_path: Path) -> None:
    run = MapperRun(tmp_path, data_set().map_batches(fail_batch))
    assert ["three" in outcome.error for outcome in run.outcomes] == [False, True, False, False]
    assert [row["n"] for row in run.output()] == [0, 1, 2, 6, 7, 8, 9]


async def name_batch(row: dict[str, Any]) -> dict[str, Any]:
    names = []
    for _ in range(3):
        assignment = runtime.current_batch()
        assert assignment is not None
        names.append(assignment.batch_idx)
        await asyncio.sleep(0.001)
    return {"names": names}


def name_batch_and_thread(row: dict[str, Any]) -> dict[str, Any]:
    assignment = runtime.current_batch()
    assert assignment is not None
    return {"names": [*row["names"], assignment.batch_idx], "thread": threading.get_ident()}


def test_a_function_prints_in_the_name_of_its_own_batch(tmp_path: Path) -> None:
    rows = MapperRun(tmp_path, data_set().map(name_batch).map(name_batch_and_thread)).output()
    assert [row["names"] for row in rows] == [[index // 3] * 4 for index in range(10)]
    assert len({row["thread"] for row in rows} | {threading.get_ident()}) == 2


async def pass_batch(rows: Rows) -> Rows:
    return rows


class NotReentrant:
    """A function that is not asynchronous, and breaks if two batches are in it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.lock = threading.Lock()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        assert self.lock.acquire(blocking=False) and threading.get_ident() == self.thread
        time.sleep(0.001)
        self.lock.release()
        return {"loop": asyncio.run(asyncio.sleep(0, "its own"))}


def test_functions_that_are_not_asynchronous_run_one_batch_at_a_time(tmp_path: Path) -> None:
    run = MapperRun(tmp_path, data_set().map_batches(pass_batch).map(NotReentrant))
    assert [row["loop"] for row in run.output()] == ["its own"] * 10 and not run.failed_rows


def as_coroutine(row: dict[str, Any]) -> Any:  # noqa: ANN401
    return slow_first(row)


def test_a_coroutine_of_a_function_that_is_not_asynchronous_is_awaited(tmp_path: Path) -> None:
    for name, data in {"alone": data_set(), "chain": data_set().map_batches(pass_batch)}.items():
        (tmp_path / name).mkdir()
        rows = MapperRun(tmp_path / name, data.map(as_coroutine)).output()
        assert [row["done"] for row in rows] == list(range(10))


def job_of(payload: str, **options: Any) -> JobSpec:  # noqa: ANN401
    return JobSpec(payload, {"format": "json", "path": "i"}, [{"format": "json", "path": "o"}], 4, **options)


def test_only_asynchronous_steps_run_several_batches_at_a_time() -> None:
    def loop() -> None:
        """Loops over batches."""

    async def async_loop() -> None:
        """Loops over batches, too."""

    def describe(**options: Any) -> int:  # noqa: ANN401
        return operations.max_concurrent_batches(job_of(**options))

    pickled = {"serializer": "cloudpickle"}
    assert describe(payload=serialize_function(slow_first, kind="row", **pickled)) == 8
    assert describe(payload=serialize_function(slow_first, kind="row", **pickled), max_concurrent_batches=3) == 3
    assert describe(payload=serialize_function(name_batch_and_thread, kind="row", **pickled)) == 1
    assert describe(payload=serialize_function(loop, **pickled)) == 1
    assert describe(payload=serialize_function(async_loop, **pickled)) == 1
    assert describe(payload=payload_of([Sample("m", "{n}")])) == 8
    chain = data_set().map(name_batch).map(name_batch_and_thread)
    chain._forgotten = False
    assert describe(payload=chain._payload()) == 8
    assert describe(payload="not a payload") == 1


# Processes.


@batch.remote_function
async def answer(row: dict[str, Any], directory: str) -> dict[str, Any]:
    """Waits for a while; batches 1 and 4 end the process, or never end, as the files say."""
    import asyncio
    import os
    import sys
    from pathlib import Path

    await asyncio.sleep(0.2)
    batch_idx = row["n"] // 2
    if Path(directory, f"exit-{batch_idx}").exists():
        os._exit(3)
    if Path(directory, f"system-exit-{batch_idx}").exists():
        sys.exit(4)
    if Path(directory, f"hang-{batch_idx}").exists():
        await asyncio.sleep(1000)
    return {"n": row["n"]}


@contextlib.contextmanager
def child_of(directory: Path, num_batches: int, **limits: float) -> Iterator[dict[int, dict[str, Any]]]:
    """The results of batches of two rows in a child, by batch."""
    (directory / "in.jsonl").write_text("".join(f'{{"n": {index}}}\n' for index in range(2 * num_batches)))
    spec = JobSpec(
        serialize_function(answer, kind="row", kwargs={"directory": str(directory)}),
        batch.JsonReader(str(directory / "in.jsonl")).to_dict(),
        [batch.JsonWriter(str(directory / "out.jsonl")).to_dict()],
        2,
        limits=Limits(**limits),
    )
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    mapper = MapperProcess(spec.to_dict(), directory / "log")
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            mapper.watch()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        mapper.feed([
            Attempt(
                {"batch_idx": batch_idx, "start_idx": 2 * batch_idx, "end_idx": 2 * batch_idx + 1, "attempt_id": 1,
                 "part_bases": [f"{directory}/parts-{batch_idx}"]},
                events.put,
            )
            for batch_idx in range(num_batches)
        ])  # fmt: skip
        attempts = [events.get(timeout=PATIENCE_S) for _ in range(num_batches)]
        yield {attempt.key[0]: attempt.result for attempt in attempts}
    finally:
        ended.set()
        watcher.join()
        mapper.close(0)


def causes_of(results: dict[int, dict[str, Any]]) -> dict[int, tuple[str, bool]]:
    """The error class of each lost batch, and whether it is to blame."""
    failures = {
        index: AttemptFailure.from_dict(result["lost"]) for index, result in results.items() if "lost" in result
    }
    return {
        index: (failure.error_class, failure.cause in FailureCause.of_batch()) for index, failure in failures.items()
    }


def test_of_several_batches_only_the_one_that_kills_the_process_is_blamed(tmp_path: Path) -> None:
    for name in ("exit-1", "system-exit-4"):
        (tmp_path / name).touch()
    with child_of(tmp_path, 12) as results:
        assert causes_of(results) == {1: ("MapperDied", True), 4: ("MapperDied", True)}
    assert {index for index, result in results.items() if "outcome" in result} == {*range(12)} - {1, 4}


def test_of_several_batches_only_the_late_one_has_timed_out(tmp_path: Path) -> None:
    (tmp_path / "hang-2").touch()
    with child_of(tmp_path, 12, batch_timeout_s=2.0, startup_timeout_s=30.0) as results:
        assert causes_of(results) == {2: ("TimeoutError", True)}
    assert {index for index, result in results.items() if "outcome" in result} == {*range(12)} - {2}
