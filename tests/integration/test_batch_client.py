"""The client's data sets and jobs against a live server, and arguments that the client refuses."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.payloads import load_mapper
from tinsmith import batch
from tinsmith.batch import permissions
from tinsmith.batch.client.dataset import Dataset, JobRefusedError
from tinsmith.batch.client.http import Client, read_lines
from tinsmith.batch.client.job import JobFailedError, progress_of
from tinsmith.errors import ForbiddenError, NotSupportedError, TinsmithError, UserError
from tinsmith.settings import Settings

Rows = list[dict[str, Any]]
MARK = "."


@batch.remote_function
def shout() -> None:
    from tinsmith import batch

    for rows in batch.load():
        batch.save_results([{"text": row["text"], "output": row["text"] * 2} for row in rows], tokens_out=len(rows))


def items(count: int) -> Rows:
    return [{"text": f"t{index}"} for index in range(count)]


def all_rows(path: str) -> Rows:
    reader = batch.load(path).reader
    return reader.download_batch(0, len(reader) - 1, "")


def test_a_job_from_data_set_to_file(client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.jsonl"
    batch_rows = items(50)
    path.write_text("\n".join(f'{{"text":"{row["text"]}"}}' for row in batch_rows))
    outputs = [batch.JsonWriter(f"{tmp_path}/full.jsonl"), batch.JsonWriter(f"{tmp_path}/text.jsonl", column="text")]
    job = batch.Dataset(batch.JsonReader(str(path))).map(shout, batch_size=2, output=outputs, client=client)
    assert isinstance(job, batch.Job) and int(job) == job.job_id
    assert all_rows(f"{tmp_path}/full.jsonl") == [{**row, "output": row["text"] * 2} for row in batch_rows]
    assert all_rows(f"{tmp_path}/text.jsonl") == batch_rows
    assert [output.rows for output in job.outputs] == [50, 50]
    progress = job.progress
    assert (progress.status, progress.batches, progress.batches_done) == ("SUCCEEDED", 25, 25)
    assert (progress.rows_ok, progress.rows_failed, progress.rows) == (50, 0, 50)
    assert progress.rows_per_second > 0 and progress.tokens_per_second > 0
    assert capsys.readouterr().err == "", "progress is for a terminal or a notebook"
    card = job._repr_html_()
    assert f"{client.base_url}/#/jobs/{int(job)}" in card and "25 of 25" in card and "rows/s" in card
    assert list(job.errors()) == []
    assert int(job) in [listed_job["job_id"] for listed_job in client.jobs()]
    with pytest.raises(FileExistsError, match="if_exists"):
        batch.load(str(path)).map(shout, output=outputs, client=client)


def test_lazy_functions_of_rows_in_the_ways_of_others(client: Client, tmp_path: Path) -> None:
    def length(row: dict[str, Any], index: int, offset: int) -> dict[str, Any]:
        return {"length": len(row["text"]) + offset, "index": index}

    mapped = batch.from_items(items(5)).map(
        length, with_indices=True, remove_columns="text", fn_kwargs={"offset": 10}, stream=False, client=client
    )
    assert isinstance(mapped, Dataset)
    job = mapped.write_csv(f"{tmp_path}/o.csv")
    assert job.wait()["status"] == "SUCCEEDED"
    assert all_rows(f"{tmp_path}/o.csv") == [{"length": "12", "index": str(index)} for index in range(5)]

    class Upper:
        def __init__(self, mark: str) -> None:
            self.mark = mark

        def __call__(self, columns: dict[str, list[str]]) -> dict[str, list[str]]:
            return {"text": [text.upper() + self.mark for text in columns["text"]]}

    batch.from_items(items(5)).map_batches(
        Upper, batch_size=2, batch_format="columns", fn_constructor_kwargs={"mark": "!"}, client=client
    ).write_parquet(f"{tmp_path}/o/")
    assert all_rows(f"{tmp_path}/o/*.parquet") == [{"text": f"T{index}!"} for index in range(5)]


@pytest.mark.extended
def test_outputs_that_datasets_loads(client: Client, tmp_path: Path) -> None:
    import datasets

    data = batch.from_items([{"n": n, "tags": [str(n)] * (n % 3)} for n in range(50)])
    job = data.map(lambda row: {"half": row["n"] / 2}, batch_size=8, client=client).write_huggingface(f"{tmp_path}/hf")
    loaded = datasets.load_from_disk(f"{tmp_path}/hf")
    expected_rows = [{"n": n, "tags": [str(n)] * (n % 3), "half": n / 2} for n in range(50)]
    assert list(loaded) == expected_rows == list(job.stream()), "the rows, from the output and from the job"
    again = batch.Dataset.from_hf(f"{tmp_path}/hf").filter(lambda row: row["n"] > 40, batch_size=4, client=client)
    again.write_parquet(f"{tmp_path}/parquet/")
    options: dict[str, Any] = {"split": "train", "cache_dir": f"{tmp_path}/cache"}
    assert list(datasets.load_dataset(f"{tmp_path}/parquet", **options)) == expected_rows[41:]

    report = job.report(per_million_in=1.0, per_million_out=2.0)
    assert (report.rows_ok, report.rows_failed, report.batches, report.tries) == (50, 0, 7, 7)
    assert report.seconds > 0 and report.cost == 0 == report.tokens_out
    assert report.worker_hours > 0
    assert job.report(per_worker_hour=2.0).cost == pytest.approx(2.0 * job.report().worker_hours, rel=1e-3)


def test_a_job_that_no_worker_can_run_is_refused_when_it_is_submitted(client: Client, tmp_path: Path) -> None:
    data, output = batch.from_items(items(2)), batch.JsonWriter(f"{tmp_path}/o.jsonl")
    for needs, said in {"num_gpus": (4, "num_gpus = 4"), "resources": ({"fpga": 1}, "fpga = 1")}.items():
        with pytest.raises(JobRefusedError, match=said[1] + ", but a worker of pool 'local' can have at most 0"):
            data.map(lambda row: row, output=output, client=client, **{needs: said[0]})


def test_a_job_has_the_requested_workers_and_shows_their_work(client: Client, tmp_path: Path) -> None:
    @batch.remote_function
    def wait_at_gate(gate: str) -> None:
        import os
        import time

        from tinsmith import batch

        for rows in batch.load():
            while not os.path.exists(gate):
                time.sleep(0.02)
            batch.save_results([{**row, "pid": os.getpid()} for row in rows])

    gate, output = tmp_path / "gate", batch.JsonWriter(f"{tmp_path}/o.jsonl")
    options: dict[str, Any] = {"fn_kwargs": {"gate": str(gate)}, "stream": False, "client": client}
    job = batch.from_items(items(40)).map(wait_at_gate, batch_size=2, output=output, concurrency=1, **options)
    for status in client.statuses(int(job)):
        if any(worker["batches"] for worker in status["workers"]):
            break
    (worker,) = [worker for worker in job.status()["workers"] if worker["batches"]]
    assert worker["first_row"] == 0 and worker["rows"] == 2 * worker["batches"] and worker["retried"] == 0
    assert "RUNNING" in str(job.progress) and "worker" in str(job.progress)
    gate.touch()
    job.wait()
    assert len({row["pid"] for row in all_rows(output.path)}) == 1 and len(all_rows(output.path)) == 40


def test_a_short_job_has_its_batches_in_work_together(client: Client, tmp_path: Path) -> None:
    """Each of the two workers has several, although the pool could have more workers than the job has batches."""

    async def meet(row: dict[str, Any], place: str) -> None:
        import asyncio
        import os

        open(f"{place}/{row['text']}", "w").close()
        for _ in range(1500):
            if len(os.listdir(place)) >= 6:
                return
            await asyncio.sleep(0.02)
        raise TimeoutError(f"only {os.listdir(place)} are in work")

    place = tmp_path / "place"
    place.mkdir()
    options: dict[str, Any] = {"fn_kwargs": {"place": str(place)}, "batch_size": 1, "stream": False, "client": client}
    job = batch.from_items(items(8)).map(meet, rows="any", output=batch.JsonWriter(f"{tmp_path}/o.jsonl"), **options)
    assert isinstance(job, batch.Job) and job.wait(check=False)["rows_failed"] == 0


@pytest.mark.extended
def test_a_job_gets_its_minimum_of_workers_from_jobs_of_any_weight(client: Client, tmp_path: Path) -> None:
    def count_until(row: dict[str, Any], gate: str) -> None:
        import os
        import time

        time.sleep(0 if os.path.exists(gate) else 0.02)

    def meet(rows: Rows, directory: str) -> Rows:
        import os
        import time

        open(f"{directory}/{os.getpid()}.pid", "w").close()
        while sum(name.endswith(".pid") for name in os.listdir(directory)) < 2:
            time.sleep(0.02)
        return [{"pid": os.getpid()} for _ in rows]

    gate, data = tmp_path / "gate", batch.from_items(items(3000))
    options: dict[str, Any] = {"batch_size": 1, "client": client}
    meeting = {**options, "fn_kwargs": {"directory": str(tmp_path)}}
    heavy = data.map(
        count_until, output=batch.JsonWriter(f"{tmp_path}/heavy.jsonl"), rows="any", weight=1e6, stream=False,
        fn_kwargs={"gate": str(gate)}, **options,
    )  # fmt: skip
    next(status for status in client.statuses(int(heavy)) if status["batch_completed_batches"])
    output = batch.JsonWriter(f"{tmp_path}/o.jsonl")
    with pytest.raises(JobRefusedError, match="the minimum of concurrency is 3, and the pool 'local' has 2 workers"):
        batch.from_items(items(6)).map_batches(meet, output=output, concurrency=(3, 4), **meeting)
    batch.from_items(items(6)).map_batches(meet, output=output, concurrency=(2, 2), **meeting)
    assert len({row["pid"] for row in all_rows(output.path)}) == 2
    heavy.cancel()
    gate.touch()


def test_failed_rows_are_listed_and_the_rest_can_be_read_and_resumed(client: Client, tmp_path: Path) -> None:
    def picky(row: dict[str, Any]) -> dict[str, Any]:
        if row["text"] == "t3":
            raise ValueError("not this one")
        return row

    data = batch.from_items(items(6))
    job = data.map(picky, batch_size=2, output=batch.JsonWriter(f"{tmp_path}/o.jsonl"), stream=False, client=client)
    with pytest.raises(JobFailedError, match="FAILED") as failure:
        job.wait()
    assert f"resume_from={int(job)}" in str(failure.value)
    [error] = job.errors()
    assert (error["idx"], error["error_type"], error["message"]) == (3, "ValueError", "not this one")
    partial_rows = list(job.partial())
    assert {"text": "t3"} not in partial_rows and partial_rows == [row for row in items(6) if row in partial_rows]
    assert list(job.stream()) == partial_rows

    def kind(row: dict[str, Any]) -> dict[str, Any]:
        return row

    again = data.map(kind, batch_size=2, output=batch.JsonWriter(f"{tmp_path}/o.jsonl"), resume_from=job, client=client)
    assert again.progress.status == "SUCCEEDED" and all_rows(f"{tmp_path}/o.jsonl") == items(6)


def test_failed_rows_within_the_budget_go_to_their_own_file(client: Client, tmp_path: Path) -> None:
    def picky(row: dict[str, Any]) -> dict[str, Any]:
        if row["text"] == "t3":
            raise ValueError("not this one")
        return row

    job = batch.from_items(items(6)).map(
        picky,
        batch_size=2,
        output=batch.JsonWriter(f"{tmp_path}/o.jsonl"),
        errors=batch.JsonWriter(f"{tmp_path}/err.jsonl"),
        max_failed_rows=1,
        client=client,
    )
    assert job.progress.rows_failed == 1
    assert all_rows(f"{tmp_path}/o.jsonl") == [row for row in items(6) if row["text"] != "t3"]
    [line] = all_rows(f"{tmp_path}/err.jsonl")
    assert (line["idx"], line["error_type"], line["row"]) == (3, "ValueError", {"text": "t3"})


def test_a_cancelled_job_streams_what_it_has_and_is_resumed(client: Client, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    @batch.remote_function
    def slow(gate: str) -> None:
        import os
        import time

        from tinsmith import batch

        for rows in batch.load():
            while rows[0]["text"] == "t4" and not os.path.exists(gate):
                time.sleep(0.01)
            batch.save_results(rows)

    job = batch.from_items(items(8)).map(
        slow,
        batch_size=2,
        output=batch.JsonWriter(f"{tmp_path}/o.jsonl"),
        fn_kwargs={"gate": str(gate)},
        stream=False,
        client=client,
    )
    streamed = job.stream()
    assert [next(streamed) for _ in range(4)] == items(4)
    job.cancel()
    assert job.wait(check=False)["status"] == "CANCELLED"
    assert list(job.partial())[:4] == items(4)
    gate.touch()
    again = batch.resume(int(job), client)
    again.wait()
    assert int(again) != int(job) and all_rows(f"{tmp_path}/o.jsonl") == items(8)
    assert len(again.batches()) == 4


def test_a_refusal_of_the_server_is_an_error_with_its_message(client: Client, tmp_path: Path) -> None:
    data, output = batch.from_items(items(2)), batch.JsonWriter(f"{tmp_path}/o.jsonl")
    with pytest.raises(RuntimeError, match=r"no pool 'nowhere'.*'local'") as refusal:
        data.map(shout, "nowhere", output=output, client=client)
    assert isinstance(refusal.value, JobRefusedError)
    with pytest.raises(UserError, match="bulk job"):
        batch.Job(10**6, client).status()
    with pytest.raises(UserError, match="bulk job"):
        batch.Job(10**6, client).wait()


@pytest.mark.filterwarnings("ignore:this data set was mapped")
def test_invalid_arguments_are_refused_by_the_client(tmp_path: Path) -> None:
    data, output = batch.from_items(items(2)), batch.JsonWriter(f"{tmp_path}/o.jsonl")

    def nothing() -> None: ...

    def row_of(row: dict[str, Any]) -> dict[str, Any]:
        return row

    def yielding(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield row

    refused: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: data.map(nothing, output=output), ValueError, "Mapper function must be decorated"),
        (lambda: data.map(shout, output=output, batch_size=0), ValueError, "batch_size is 0"),
        (lambda: data.map(shout, output=[]), ValueError, "batch_output_formats is empty"),
        (lambda: data.map(shout, output=[output, output]), ValueError, "two outputs"),
        (lambda: data.map(shout, output=output, if_exists="ask"), ValueError, "if_exists is 'ask'"),
        (lambda: data.map(shout, output=output, limits={"x": 1}), ValueError, "limits.x is not supported"),
        (lambda: data.map(shout, output="o.jsonl"), ValueError, "must be a writer"),  # type: ignore[arg-type]
        (lambda: data.map(shout, "a", pool="b", output=output), ValueError, "they are one option"),
        (
            lambda: data.map(row_of, batch_format="list"),
            ValueError,
            "batch_format is 'list'; it must be one of .'rows'",
        ),
        (lambda: data.map(shout, colour=1), NotSupportedError, "no option .'colour'."),  # type: ignore[call-arg]
        (lambda: data.map(shout).map(row_of), ValueError, "must be the only step"),
        (lambda: data.map(row_of, batch_size=2).map(row_of, batch_size=3), ValueError, "batch_size is 2 at one step"),
        (lambda: data.flat_map(row_of).sample("m", prompt="p"), ValueError, "put the operation first"),
        (lambda: data.sample("m", prompt="p", batched=True), NotSupportedError, ".'batched'. are options of functions"),
        (lambda: data.map(yielding, output=output), ValueError, "a row has one result; flat_map takes one"),
        (lambda: data.write_json("o.jsonl"), ValueError, "this data set has no step"),
        (lambda: data.map(row_of, fn_kwargs={"n": 1}), ValueError, "fn_kwargs"),
        (lambda: batch.Dataset("in.xml"), UserError, "extension of 'in.xml' is not that of a format"),
        (lambda: batch.Dataset(5), UserError, "is a int; give a reader"),  # type: ignore[arg-type]
        (lambda: batch.Dataset([5]), ValueError, "row 0 is a int"),  # type: ignore[list-item]
        (lambda: batch.JsonWriter(""), ValueError, "must name a file"),
    ]
    for call, kind, message in refused:
        with pytest.raises(kind, match=message):
            call()


def test_a_data_set_has_a_path_format_and_repr(tmp_path: Path) -> None:
    data = batch.Dataset(f"{tmp_path}/in.csv.gz")
    assert (data.path, data.input_format) == (f"{tmp_path}/in.csv.gz", "csv")
    assert "CsvReader" in repr(data)
    assert len(batch.Dataset({"n": index} for index in range(3))) == 3
    assert all(getattr(batch, name) is not None for name in batch.__all__)
    mapped = batch.from_items([]).map(shout)
    assert isinstance(mapped, Dataset) and load_mapper(mapped._payload()).kind == "loop"
    with pytest.warns(UserWarning, match="mapped but has no output"):
        del mapped


def test_a_data_set_without_an_output_is_no_job() -> None:
    mapped = batch.from_items(items(2)).map(lambda row: row)
    message = r"has no output: pass output=.*\.write_json\(PATH\)"
    for name in ("wait", "progress", "stream", "errors"):
        with pytest.raises(AttributeError, match=message):
            getattr(mapped, name)
    with pytest.raises(TypeError, match=message):
        int(mapped)
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = mapped.colour
    with pytest.warns(UserWarning, match="No job was started"):
        del mapped


def test_steps_with_helpers_of_their_module_are_one_job(client: Client, tmp_path: Path) -> None:
    loud = {"t1": "!"}

    def words(row: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"word": row["upper"] + mark} for mark in (loud.get(row["text"], "?"), MARK)]

    job = (
        batch.from_items(items(5))
        .map(lambda row: {"upper": row["text"].upper()}, batch_size=2, client=client)
        .filter(lambda row: row["text"] != "t3")
        .flat_map(words)
        .map_batches(lambda table: table.append_column("n", [list(range(len(table)))]), batch_format="pyarrow")
        .write_json(f"{tmp_path}/o.jsonl")
    )
    assert [row["word"] for row in all_rows(f"{tmp_path}/o.jsonl")] == [
        "T0?", "T0.", "T1!", "T1.", "T2?", "T2.", "T4?", "T4.",
    ]  # fmt: skip
    assert [row["n"] for row in all_rows(f"{tmp_path}/o.jsonl")] == [0, 1, 2, 3, 0, 1, 0, 1]
    assert (job.progress.rows_ok, job.outputs[0].rows) == (5, 8)


LINE_ENDS = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\rj"


def test_a_line_ends_with_a_line_feed_only() -> None:
    text = f"{LINE_ENDS}\n\nnext{LINE_ENDS}".encode()
    for size in (1, 2, 3, 7, len(text)):
        chunks = [text[start : start + size] for start in range(0, len(text), size)]
        assert [line.decode() for line in read_lines(chunks)] == [LINE_ENDS, "", f"next{LINE_ENDS}"]
    assert list(read_lines([b"a\n", b"", b"b\n"])) == [b"a", b"b"]


def test_text_with_every_end_of_a_line_comes_through_errors_logs_and_rows(client: Client, tmp_path: Path) -> None:
    def fail(row: dict[str, Any]) -> dict[str, Any]:
        print(row["text"])  # noqa: T201
        if row["bad"]:
            raise ValueError(row["text"])
        return {"text": row["text"]}

    rows = [{"text": LINE_ENDS, "bad": bad} for bad in (True, False)]
    job = batch.from_items(rows).map(
        fail, output=batch.JsonWriter(f"{tmp_path}/o.jsonl"), max_failed_rows=1, client=client, stream=False
    )
    status = job.wait()
    assert status["first_error"]["message"] == LINE_ENDS
    assert [error["message"] for error in job.errors()] == [LINE_ENDS]
    assert [line["text"] for line in job.logs()].count(LINE_ENDS) == 2
    assert [row["text"] for row in all_rows(f"{tmp_path}/o.jsonl")] == [LINE_ENDS]


def test_a_function_closes_what_it_opened_when_its_job_is_done(client: Client, tmp_path: Path) -> None:
    @batch.remote_function
    async def gen(path: str) -> None:
        import asyncio
        from pathlib import Path

        from tinsmith import batch

        try:
            async for rows in batch.load():
                batch.save_results(rows)
        finally:
            await asyncio.sleep(0.1)
            Path(path).write_text("closed")

    mark = tmp_path / "mark"
    batch.from_items(items(3)).map(
        gen, fn_kwargs={"path": str(mark)}, output=batch.JsonWriter(f"{tmp_path}/o.jsonl"), client=client
    )
    until = time.monotonic() + 20
    while not (mark.exists() and mark.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    assert mark.read_text() == "closed"


def test_progress_tells_rates_and_what_is_left() -> None:
    status = {
        "status": "RUNNING",
        "batch_total_batches": 10,
        "batch_completed_batches": 4,
        "rows_ok": 30,
        "rows_failed": 10,
        "tokens_in": 100,
        "tokens_out": 300,
        "started_at": 1000.0,
        "ended_at": 1020.0,
    }
    progress = progress_of(status)
    assert (progress.rows_per_second, progress.tokens_per_second, progress.seconds_left) == (2.0, 20.0, 30.0)
    assert progress_of({"status": "PENDING"}).seconds_left is None


def test_lost_connections_are_made_again_and_say_that_a_job_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    keys: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        calls.append(request.method)
        keys.append(request.headers.get("Idempotency-Key"))
        if len(calls) < 3:
            raise httpx.ConnectError("down")
        if request.url.path.endswith("/events"):
            return httpx.Response(200, text='event: status\ndata: {"status":"SUCCEEDED"}\n\n')
        return httpx.Response(200, json={"status": "RUNNING", "job_id": 1})

    monkeypatch.setattr("tinsmith.batch.client.http.PAUSE_S", 0.0)
    client = Client("http://127.0.0.1:1", "tml-x")
    client._http = httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))
    assert client.status(1)["status"] == "RUNNING" and len(calls) == 3
    calls.clear()
    assert [status["status"] for status in client.statuses(1)] == ["SUCCEEDED"] and len(calls) == 3
    assert set(keys) == {None}
    for create in (lambda: client.submit({}), lambda: client.resume(1)):
        calls.clear()
        keys.clear()
        assert create() == 1 and calls == ["POST"] * 3
        assert len(set(keys)) == 1 and keys[0]
    used_key = keys[0]
    client.resume(1)
    assert keys[-1] != used_key, "another call asks for another job"
    client.resume(1, idempotency_key="mine")
    assert keys[-1] == "mine"
    calls.clear()
    client.patience_s = -1.0
    with pytest.raises(TinsmithError, match="no connection") as failure:
        client.submit({})
    assert failure.value.__suppress_context__, "the layers of the HTTP client say nothing that the line does not"


@pytest.mark.filterwarnings("ignore:this data set was mapped")
def test_a_relative_path_is_below_the_clients_directory_or_the_tenants_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(data_dir=tmp_path / "data")
    mapped = batch.read_json("in/a.jsonl").map(batch.Sample("m", prompt="p"))
    spec = mapped._spec([batch.JsonWriter("o.jsonl")])
    assert spec.batch_dataset_path == f"{tmp_path}/in/a.jsonl" and spec.batch_output_path == [f"{tmp_path}/o.jsonl"]
    trusted = permissions.authorize_job(spec, settings, "alice", keyless=True)
    assert trusted.batch_dataset_path == spec.batch_dataset_path
    confined = permissions.authorize_job(spec, settings, "alice", keyless=False)
    alice_directory = settings.resolved_data_dir / "batch" / "alice"
    assert confined.batch_dataset_path == f"{alice_directory}/in/a.jsonl" and confined.batch_output_path == [
        f"{alice_directory}/o.jsonl"
    ]
    away = dataclasses.replace(spec, batch_input_format={"format": "json", "path": "/elsewhere/a.jsonl"})
    with pytest.raises(ForbiddenError, match=r"may not read or write '/elsewhere/a\.jsonl'"):
        permissions.authorize_job(away, settings, "alice", keyless=False)


def test_a_limited_job_reads_the_first_rows_and_is_resumed_with_the_same_limit(client: Client, tmp_path: Path) -> None:
    def fragile(row: dict[str, Any]) -> dict[str, Any]:
        if row["text"] == "t4":
            raise ValueError("no t4")
        return row

    data, path = batch.from_items(items(50)).limit(7), f"{tmp_path}/o.jsonl"
    options: dict[str, Any] = {"batch_size": 2, "stream": False, "client": client}
    job = data.map(fragile, output=batch.JsonWriter(path), **options)
    assert job.wait(check=False)["status"] == "FAILED"
    with pytest.raises(JobRefusedError, match="its limit differs"):
        batch.from_items(items(50)).map(shout, output=batch.JsonWriter(path), resume_from=job, **options)
    again = data.map(lambda row: row, output=batch.JsonWriter(path), resume_from=job, **options)
    assert again.wait()["total_rows"] == 7 and all_rows(path) == items(7)
    assert again.take(3) == items(3) and again.take() == items(7)


@dataclasses.dataclass
class TracingWriter(batch.OutputWriter):
    """Records the processes that run its code."""

    trace: str = ""

    def __post_init__(self) -> None:
        self.note()

    def note(self) -> None:
        import os

        with open(self.trace, "a") as pids:
            pids.write(f"{os.getpid()}\n")

    def upload_batch(self, results, start_idx, end_idx, job_id):  # type: ignore[no-untyped-def]
        import json
        import os

        self.note()
        os.makedirs(self.path, exist_ok=True)
        with open(f"{self.path}/{start_idx}", "w") as file:
            json.dump([row["text"] for row in results], file)


def breaks_at_the_end(row: dict[str, Any]) -> dict[str, Any]:
    import datetime
    from decimal import Decimal

    if row["text"] == "t5":
        raise ValueError("no t5")
    values = {"day": datetime.date(2026, 1, 2), "at": datetime.datetime(2026, 1, 2, 3), "price": Decimal("1.50")}
    return {**values, "bytes": b"\xff", "took": datetime.timedelta(seconds=1.5)}


def test_a_client_reads_and_exports_a_users_output_without_running_its_code(client: Client, tmp_path: Path) -> None:
    import os

    trace = tmp_path / "pids"
    writer = TracingWriter(f"{tmp_path}/out/", trace=str(trace))
    job = batch.from_items(items(6)).map(
        breaks_at_the_end, output=writer, batch_size=2, concurrency=1, stream=False, client=client,
        limits={"max_retries": 0},
    )  # fmt: skip
    assert isinstance(job, batch.Job) and job.wait(check=False)["status"] == "FAILED"
    trace.write_text("")
    rows = job.take(3)
    assert [row["text"] for row in rows] == ["t0", "t1", "t2"]
    assert {name: value for name, value in rows[0].items() if name != "text"} == breaks_at_the_end({"text": ""})
    assert next(iter(job.partial()))["text"] == "t0" and len(list(job.partial())) == 5
    info = job.export(f"{tmp_path}/copy/")
    assert info.rows == 5 and (tmp_path / "copy" / "0").read_text() == '["t0", "t1"]'
    pids = set(trace.read_text().split())
    assert pids and str(os.getpid()) not in pids
    again = job.resume(output=batch.JsonWriter(f"{tmp_path}/o.jsonl"))
    assert again.wait(check=False)["status"] == "FAILED"
    assert [row["text"] for row in again.partial()][:4] == ["t0", "t1", "t2", "t3"]
    assert str(os.getpid()) not in trace.read_text().split()


def test_rows_that_are_no_plain_values_are_not_unpickled_by_a_client(client: Client, tmp_path: Path) -> None:
    writer = TracingWriter(f"{tmp_path}/out/", trace=str(tmp_path / "pids"))
    job = batch.from_items(items(2)).map(
        lambda row: {"text": complex(1, 2)} if row["text"] == "t0" else 1 / 0,
        output=writer, batch_size=1, stream=False, client=client,
    )  # fmt: skip
    assert isinstance(job, batch.Job) and job.wait(check=False)["status"] == "FAILED"
    with pytest.raises(UserError, match="a client cannot read: a complex cannot be sent"):
        list(job.partial())
