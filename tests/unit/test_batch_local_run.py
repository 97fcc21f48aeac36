"""`Dataset.limit`, `take` and `dry_run`: the first rows, and the steps over them in this process without a server."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tinsmith import batch
from tinsmith.batch.client.dataset import Dataset
from tinsmith.batch.types import RowRange
from tinsmith.batch.worker import io_operations
from tinsmith.errors import NotSupportedError, UserError

ROWS = [{"n": index} for index in range(25)]


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a server was asked")

    monkeypatch.setattr("tinsmith.batch.client.http.Client.__init__", refuse)


def double(row: dict[str, Any]) -> dict[str, Any]:
    return {"twice": 2 * row["n"]}


def fragile(row: dict[str, Any]) -> dict[str, Any]:
    if row["n"] % 4 == 3:
        raise ValueError(f"no {row['n']}")
    return row


def fragile_batch(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if any(row["n"] == 5 for row in rows):
        raise RuntimeError("five")
    return rows


@batch.remote_function
def loop() -> None:
    for rows in batch.load():
        batch.save_results([{"m": row["n"] + 1} for row in rows])


class Counter:
    def __init__(self, start: int) -> None:
        self.start = start

    async def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"sum": self.start + row["n"]}


def spec_of(data: Dataset, directory: Path, **options: object) -> Any:  # noqa: ANN401
    mapped = data.map(double, **options)  # type: ignore[call-overload]
    mapped._forgotten = False
    return mapped._spec([batch.JsonWriter(str(directory / "out.jsonl"))], mapped._options)


def test_take_of_rows_without_steps_reads_them() -> None:
    data = batch.from_items(ROWS)
    assert data.take(3) == ROWS[:3] and data.take() == ROWS[:20] and data.take(100) == ROWS
    assert data.take(0) == [] and batch.from_items([]).take(3) == []


def test_take_runs_the_steps_until_there_are_as_many_results() -> None:
    data = batch.from_items(ROWS)
    assert data.map(double, batch_size=4).take(3) == [{"n": n, "twice": 2 * n} for n in range(3)]
    assert data.filter(lambda row: row["n"] > 20, batch_size=2).take(2) == [{"n": 21}, {"n": 22}]
    assert data.flat_map(lambda row: [row] * 3).take(4) == [{"n": 0}, {"n": 0}, {"n": 0}, {"n": 1}]
    assert data.map(loop).take(2) == [{"m": 1}, {"m": 2}]
    assert data.map(Counter, fn_constructor_kwargs={"start": 7}).take(1) == [{"n": 0, "sum": 7}]


def test_take_reads_no_more_than_it_needs() -> None:
    def note(row: dict[str, Any]) -> dict[str, Any]:
        with open(row["log"], "a") as log:
            log.write("x")
        return row

    with tempfile.NamedTemporaryFile() as log:
        rows = [{"log": log.name} for _ in range(5000)]
        assert len(batch.from_items(rows).map(note, batch_size=100).take(5)) == 5
        assert 5 <= len(log.read()) <= 1000


def test_take_raises_the_error_of_a_row_before_the_end() -> None:
    data = batch.from_items(ROWS).map(fragile, batch_size=2)
    assert data.take(2) == ROWS[:2]
    with pytest.raises(batch.RowFailedError, match=r"row 3 failed: (?s:.*)ValueError: no 3"):
        data.take(5)


def test_a_dry_run_gives_results_and_failures_as_a_job_does() -> None:
    result = batch.from_items(ROWS).map(fragile).dry_run()
    assert result.rows == [{"n": n} for n in (0, 1, 2, 4, 5, 6, 8, 9)]
    assert [(error.idx, error.error_type, error.message, error.row) for error in result.errors] == [
        (3, "ValueError", "no 3", {"n": 3}), (7, "ValueError", "no 7", {"n": 7})
    ]  # fmt: skip
    with pytest.raises(batch.RowFailedError, match="row 3 failed"):
        result.check()
    alone = batch.from_items(ROWS).map_batches(fragile_batch, batch_size=8).dry_run(9)
    assert alone.rows == [{"n": n} for n in range(9) if n != 5]
    assert [(error.idx, error.error_type) for error in alone.errors] == [(5, "RuntimeError")]


def test_a_dry_run_checks_what_an_output_can_hold(tmp_path: Path) -> None:
    data = batch.from_items(ROWS).map(lambda row: {"v": "text" if row["n"] else 1})
    assert len(data.dry_run(output=batch.JsonWriter(str(tmp_path / "o.jsonl"))).rows) == 10
    with pytest.raises(UserError, match=r"o.parquet cannot hold the row .*column 'v'"):
        data.dry_run(output=batch.ParquetWriter(str(tmp_path / "o.parquet")))
    assert list(tmp_path.iterdir()) == []


def test_what_needs_a_server_or_does_not_start_is_refused() -> None:
    with pytest.raises(NotSupportedError, match=r"ask a server's models.*limit\(10\)"):
        batch.from_items(ROWS).sample("m", prompt="n").dry_run()

    class Broken:
        def __init__(self) -> None:
            raise OSError("no model here")

        def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            return row

    with pytest.raises(UserError, match=r"does not start(?s:.*)no model here"):
        batch.from_items(ROWS).map(Broken).take(1)
    with pytest.raises(ValueError, match="has no step"):
        batch.from_items(ROWS).dry_run()


def test_a_notebook_with_a_running_event_loop_takes_rows() -> None:
    async def cell() -> list[dict[str, Any]]:
        return batch.from_items(ROWS).map(Counter, fn_constructor_kwargs={"start": 1}).take(1)

    assert asyncio.run(cell()) == [{"n": 0, "sum": 1}]


def test_a_limit_counts_input_rows_and_the_smaller_one_counts() -> None:
    data = batch.from_items(ROWS).limit(12)
    assert len(data) == 12 and len(data.limit(20)) == 12 and len(data.limit(3)) == 3
    assert data.take() == ROWS[:12]
    assert len(data.limit(4).map(double).dry_run().rows) == 4
    mapped = batch.from_items(ROWS).map(double).limit(2)
    assert isinstance(mapped, Dataset) and mapped.take() == [{"n": 0, "twice": 0}, {"n": 1, "twice": 2}]
    filtered = batch.from_items(ROWS).filter(lambda row: True)
    with pytest.raises(ValueError, match="call limit first"):
        filtered.limit(2)
    assert len(filtered.take()) == 20
    for wrong in (0, -1, 1.5, True, "3"):
        with pytest.raises(ValueError, match="limit takes a whole number from 1"):
            data.limit(wrong)  # type: ignore[arg-type]


def test_a_plan_splits_the_first_rows_only(tmp_path: Path) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps({"text": "word " * 10}) + "\n" for _ in range(30)))
    with sqlite3.connect(tmp_path / "in.db") as database:
        database.execute("CREATE TABLE t (k INTEGER PRIMARY KEY)")
        database.executemany("INSERT INTO t VALUES (?)", [(k,) for k in range(30)])
    database.close()
    for data in (batch.read_json(str(lines)), batch.read_sql(f"sqlite:///{tmp_path}/in.db", "t")):
        for limit, rows in [(7, 7), (30, 30), (99, 30)]:
            (planned,) = io_operations.plan(spec_of(data.limit(limit), tmp_path), 1)
            assert planned["end"]["total_rows"] == rows
    spec = spec_of(batch.read_json(str(lines)).limit(5), tmp_path, batch_tokens=30, batch_size=32)
    *pages, last = io_operations.plan(spec, 1)
    spans = [RowRange(*span) for page in pages for span in page["spans"]]
    assert last["end"]["total_rows"] == 5 == sum(span.rows for span in spans) and len(spans) > 1


def test_a_second_write_does_not_resume_the_job_of_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Submitting:
        specs: list[dict[str, Any]]

        def __init__(self) -> None:
            self.specs = []

        def submit(self, spec: dict[str, Any]) -> int:
            self.specs.append(spec)
            return len(self.specs)

    client: Any = Submitting()
    data = batch.from_items(ROWS).map(double, resume_from=7, client=client, stream=False)
    data.write_json(str(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match="resume_from=7 belongs to the first output"):
        data.write_json(str(tmp_path / "b.jsonl"))
    assert [spec["resume_from"] for spec in client.specs] == [7]
    for derived in (data.limit(2), data.map(double)):
        assert isinstance(derived, batch.Dataset)
        with pytest.raises(ValueError, match="resume_from=7 belongs to the first output"):
            derived.write_json(str(tmp_path / "c.jsonl"))
    again = batch.from_items(ROWS).map(double, resume_from=7, client=client, stream=False)
    assert isinstance(again, batch.Dataset)
    again.write_json(str(tmp_path / "d.jsonl"))
    assert client.specs[-1]["resume_from"] == 7


def test_what_is_changed_after_a_call_does_not_reach_the_options_of_a_data_set(tmp_path: Path) -> None:
    env, limits, errors = {"A": "1"}, {"max_retries": 1}, batch.JsonWriter(str(tmp_path / "errors.jsonl"))
    data = batch.from_items(ROWS).map(double, env=env, limits=limits, errors=errors, retry_on=(names := ["OSError"]))
    assert isinstance(data, batch.Dataset)
    output = [batch.JsonWriter(str(tmp_path / "out.jsonl"))]
    before = data._spec(output).to_dict()
    env["A"], limits["max_retries"], errors.path = "2", 9, "elsewhere.jsonl"
    names.append("ValueError")
    assert data._spec(output).to_dict() == before
    with pytest.raises(TypeError):
        data._options["weight"] = 2.0  # type: ignore[index]
    data._forgotten = False


@pytest.mark.parametrize("batch_size", [1, 32, 100])
def test_take_calls_functions_of_rows_for_no_more_rows_than_it_needs(tmp_path: Path, batch_size: int) -> None:
    calls = tmp_path / "calls"

    def note(row: dict[str, Any], path: str) -> dict[str, Any]:
        with open(path, "a") as file:
            file.write("x")
        return {"n": row["n"]}

    def is_even(row: dict[str, Any]) -> bool:
        return row["n"] % 2 == 0

    data = batch.from_items([{"n": index} for index in range(1000)])
    rows = data.map(note, batch_size=batch_size, fn_kwargs={"path": str(calls)})
    assert rows.take(1) == [{"n": 0}] and calls.read_text() == "x"
    assert len(rows.take(20)) == 20 and len(calls.read_text()) == 21
    assert [row["n"] for row in rows.filter(is_even).take(3)] == [0, 2, 4]
    assert 21 + 5 <= len(calls.read_text()) <= 21 + 6
    calls.unlink()
    assert len(rows.dry_run().rows) == 10 and len(calls.read_text()) == 10


def test_take_raises_only_for_rows_that_it_needs() -> None:
    data = batch.from_items(ROWS).map(fragile)
    assert data.take(3) == ROWS[:3]
    with pytest.raises(batch.RowFailedError, match="row 3 failed"):
        data.take(4)
    with pytest.raises(batch.RowFailedError, match="row 3 failed"):
        batch.from_items(ROWS).map_batches(fragile_first, batch_size=4).take(1)


def fragile_first(rows: list[dict[str, Any]]) -> list[Any]:
    return [ValueError("no") if row["n"] == 3 else row for row in rows]
