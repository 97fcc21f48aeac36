"""Resumed jobs: changed inputs, functions and formats; and readers while a job ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from support.live import API_KEY, LiveServer
from tinsmith import batch
from tinsmith.batch.client.dataset import JobRefusedError
from tinsmith.batch.client.http import Client
from tinsmith.batch.client.job import Job, JobFailedError
from tinsmith.batch.formats import input_versions, schemas
from tinsmith.batch.formats.lines import JsonReader
from tinsmith.batch.types import TEMPORARY_DIRECTORY
from tinsmith.errors import NotFoundError, UserError
from tinsmith.storage.locations import open_store

QUICK = {"backoff_s": 0.01, "grace_s": 1.0}
Rows = list[dict[str, Any]]


def lines(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def careful(row: dict[str, Any], gate: str) -> dict[str, Any]:
    """Fails for one row until the gate file exists."""
    from pathlib import Path

    if row["text"] == "bad" and not Path(gate).exists():
        raise ValueError("not yet")
    return {"length": len(row["text"])}


def make_stopped_job(client: Client, directory: Path, source: str, **options: Any) -> Job:  # noqa: ANN401
    """A job whose second batch of two rows has failed, and which would succeed now."""
    defaults: dict[str, Any] = {"output": batch.JsonWriter(f"{directory}/out.jsonl"), "batch_size": 2, "limits": QUICK}
    kwargs = {"gate": f"{directory}/gate"}
    data = batch.read_json(source)
    job = data.map(careful, fn_kwargs=kwargs, stream=False, client=client, **{**defaults, **options})
    assert isinstance(job, Job)
    assert job.wait(check=False)["status"] == "FAILED" and job.progress.rows_ok >= 1
    (directory / "gate").touch()
    return job


TEXTS = ["a", "bb", "bad", "dddd", "eeeee"]


@pytest.mark.extended
def test_an_input_that_has_changed_is_not_resumed_and_one_that_is_restored_is(client: Client, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_rows(source, TEXTS)
    job = make_stopped_job(client, tmp_path, str(source))
    before = source.read_bytes()
    write_rows(source, ["new", *TEXTS])
    resumed = job.resume()
    with pytest.raises(JobFailedError, match="the input has changed since the job began") as failure:
        resumed.wait()
    said = str(failure.value)
    assert f"{source} was (size {len(before)}, etag " in said
    assert f", and is (size {source.stat().st_size}, etag " in said
    assert "Traceback" not in said and not (tmp_path / "out.jsonl").exists()

    source.write_bytes(before)  # at another time, in another file: the same bytes
    again = resumed.resume()
    again.wait()
    assert lines(tmp_path / "out.jsonl") == [{"text": text, "length": len(text)} for text in TEXTS]


@pytest.mark.parametrize("change", ["added", "removed", "renamed"])
def test_the_files_of_a_directory_are_part_of_the_input(change: str, tmp_path: Path) -> None:
    for name, texts in (("a", TEXTS[:3]), ("b", TEXTS[3:])):
        write_rows(tmp_path / f"in/{name}.jsonl", texts)
    reader = JsonReader(f"{tmp_path}/in/*.jsonl")
    before = reader.version()
    assert before is not None
    input_versions.check(before, reader.version())
    os.utime(tmp_path / "in/a.jsonl", (1, 1))
    input_versions.check(before, reader.version())  # its bytes are the same
    if change == "added":
        write_rows(tmp_path / "in/c.jsonl", ["c"])
        says = "in/c.jsonl was not there, and is (size "
    elif change == "removed":
        (tmp_path / "in/b.jsonl").unlink()
        says = r"in/b.jsonl was \(size .*\), and is not there"
    else:
        (tmp_path / "in/a.jsonl").rename(tmp_path / "in/z.jsonl")
        says = r"in/a.jsonl was \(size .*\), and is not there"
    with pytest.raises(input_versions.InputChangedError, match=says.replace("is (", r"is \(")):
        input_versions.check(before, reader.version())


def test_of_many_files_and_of_objects_in_buckets_a_change_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_versions, "MAX_FILES", 2)
    for name in "abc":
        write_rows(tmp_path / f"in/{name}.jsonl", [name])
    reader = JsonReader(f"{tmp_path}/in/")
    before = reader.version()
    assert (
        before is not None
        and list(before) == [input_versions.ALL_FILES]
        and before[input_versions.ALL_FILES]["files"] == 3
    )
    write_rows(tmp_path / "in/b.jsonl", ["bbb"])
    with pytest.raises(
        input_versions.InputChangedError, match=r"all files was \(files 3, size 42, digest .* size 44, digest"
    ):
        input_versions.check(before, reader.version())

    store, key = open_store("memory://versions/in.jsonl")
    store.put(key, b'{"text":"a"}\n')
    remote = JsonReader("memory://versions/in.jsonl")
    before = remote.version()
    assert before is not None
    input_versions.check(before, remote.version())
    store.put(key, b'{"text":"b"}\n')  # as long as before
    with pytest.raises(input_versions.InputChangedError, match="etag"):
        input_versions.check(before, remote.version())


def test_a_file_that_changes_under_a_reader_gives_no_rows(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_rows(source, TEXTS)
    reader = JsonReader(str(source))
    assert len(reader) == 5
    write_rows(source, ["new", *TEXTS])
    with pytest.raises(input_versions.InputChangedError, match="changed while the job ran"):
        reader.download_batch(0, 1, "")


@pytest.mark.extended
def test_a_script_with_another_function_does_not_go_on_with_the_rows_of_the_old_one(
    client: Client, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    write_rows(source, TEXTS)
    job = make_stopped_job(client, tmp_path, str(source))

    def other(row: dict[str, Any]) -> dict[str, Any]:
        return {"length": -1}

    output = batch.JsonWriter(f"{tmp_path}/out.jsonl")
    data = batch.read_json(str(source))
    with pytest.raises(JobRefusedError, match=rf"bulk job {int(job)} .* its function is .*resume_from="):
        data.map(other, output=output, batch_size=2, if_exists="resume", client=client)
    kwargs = {"gate": f"{tmp_path}/gate"}
    resumed = data.map(careful, fn_kwargs=kwargs, output=output, batch_size=2, if_exists="resume", client=client)
    assert isinstance(resumed, Job) and resumed.status()["resume_from"] == int(job)
    assert [row["length"] for row in lines(tmp_path / "out.jsonl")] == [1, 2, 3, 4, 5]
    finished = data.map(careful, fn_kwargs=kwargs, output=output, batch_size=2, if_exists="resume", client=client)
    assert isinstance(finished, Job) and int(finished) == int(resumed), "it finds its job done"
    with pytest.raises(JobRefusedError, match=r"SUCCEEDED, .* its function is"):
        data.map(careful, fn_kwargs={"gate": "x"}, output=output, if_exists="resume", client=client)


def test_a_finished_job_whose_input_has_a_relative_path_is_found_again(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "in.jsonl", TEXTS[:2])

    def run() -> Job:
        return batch.read_json("in.jsonl").map(
            careful,
            fn_kwargs={"gate": "none"},
            output=batch.JsonWriter("out.jsonl"),
            if_exists="resume",
            client=client,
        )

    job = run()
    assert int(run()) == int(job)
    write_rows(tmp_path / "in.jsonl", TEXTS[:1])
    with pytest.raises(JobRefusedError, match="the input has changed since the job began"):
        run()


@pytest.mark.parametrize(
    "writer", [batch.JsonWriter("out.jsonl"), batch.ParquetWriter("out/")], ids=["file", "directory"]
)
def test_a_finished_job_whose_output_was_deleted_is_run_again(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: batch.OutputWriter
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "in.jsonl", TEXTS[:2])

    def run() -> Job:
        outputs = [writer, batch.JsonWriter("other.jsonl")]
        kwargs, options = {"gate": "none"}, {"if_exists": "resume", "client": client}
        return batch.read_json("in.jsonl").map(careful, fn_kwargs=kwargs, output=outputs, **options)

    first = run()
    expected_rows = list(first.partial())
    path = tmp_path / writer.path
    path.rename(tmp_path / "moved")
    with pytest.raises(FileExistsError, match=r"other\.jsonl exists already"):
        run()
    (tmp_path / "other.jsonl").unlink()
    with pytest.warns(UserWarning, match=rf"the output out.* of bulk job {int(first)} was deleted"):
        second = run()
    assert int(second) != int(first) and list(second.partial()) == expected_rows and path.exists()
    assert int(run()) == int(second), "the newest job with these outputs is found"


SCRIPT = """
import sys
from tinsmith import batch

STOP = {"a", "bad", "the", "of", "zebra"}
def stop(row): return {"stop": row["w"] in STOP}

output = batch.JsonWriter(sys.argv[1])
job = batch.from_items([{"w": "a"}]).map(stop, output=output, if_exists="resume", stream=False)
job.wait()
print(int(job))
"""


@pytest.mark.extended
def test_a_script_that_is_run_again_finds_its_job_whatever_the_order_of_its_sets(
    server: LiveServer, tmp_path: Path
) -> None:
    def run(seed: str, text: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(text)
        environment = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY, "PYTHONHASHSEED": seed}
        command = [sys.executable, str(script), f"{tmp_path}/out.jsonl"]
        return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)

    commented = SCRIPT.replace("def stop", "# whether a word is left out\ndef stop")
    runs = [run("1", SCRIPT), run("2", SCRIPT), run("3", commented)]
    assert [completed.returncode for completed in runs] == [0, 0, 0], runs[-1].stderr
    assert len({completed.stdout for completed in runs}) == 1
    changed = run("1", SCRIPT.replace("zebra", "lion"))
    assert changed.returncode == 1 and "its function is" in changed.stderr


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def temporary_directories(path: Path) -> list[str]:
    """Unlike `rglob`, goes on when a directory is deleted meanwhile."""
    return [parent for parent, names, _ in os.walk(path) if TEMPORARY_DIRECTORY in names]


@batch.remote_function
def wait_at_gate(gate: str) -> None:
    """A job whose batch of row 4 waits for the gate."""
    import time
    from pathlib import Path

    from tinsmith import batch

    for rows in batch.load():
        while rows[0]["n"] == 4 and not Path(gate).exists():
            time.sleep(0.02)
        batch.save_results(rows)


class Racing(Client):
    """A client that calls a function after it received the first status."""

    def __init__(self, url: str, then: Callable[[], None]) -> None:
        super().__init__(url, API_KEY)
        self._then: Callable[[], None] | None = then

    def status(self, job_id: int) -> dict[str, Any]:
        job_status = super().status(job_id)
        then, self._then = self._then, None
        if then is not None:
            then()
        return job_status


@pytest.mark.extended
def test_a_reader_gives_each_row_once_though_the_job_publishes_and_deletes_its_parts_meanwhile(
    client: Client, server: LiveServer, tmp_path: Path
) -> None:
    writers = [
        *(batch.JsonWriter(f"{tmp_path}/o.jsonl{packed}") for packed in ("", ".gz", ".zst")),
        batch.CsvWriter(f"{tmp_path}/o.csv"),
        batch.ParquetWriter(f"{tmp_path}/o.parquet"),
        batch.ParquetWriter(f"{tmp_path}/parts/"),
        batch.TextWriter(f"{tmp_path}/o.txt", column="text"),
    ]
    gate = tmp_path / "gate"
    texts = [f"t{n}" for n in range(16)]
    data = batch.from_items([{"n": n, "text": text} for n, text in enumerate(texts)])
    job = data.map(
        wait_at_gate, fn_kwargs={"gate": str(gate)}, batch_size=2, output=writers, stream=False, client=client
    )
    assert isinstance(job, Job)

    def read_committed() -> list[int]:
        return [batch_range["start_idx"] for batch_range in client.partial(int(job))["batches"]]

    # Another batch may wait behind the one of row 4, on the same worker.
    until(lambda: read_committed()[:1] == [0] and read_committed()[-1] > 4)
    committed_texts = {texts[start + offset] for start in read_committed() for offset in (0, 1)}
    readers = [(job.stream(output), job.partial(output)) for output in range(len(writers))]
    firsts = [[next(stream), next(partial)] for stream, partial in readers]

    def finish() -> None:
        gate.touch()
        job.wait()
        until(lambda: not temporary_directories(tmp_path))  # the parts are deleted

    Job(int(job), Racing(server.url, finish)).export(f"{tmp_path}/copy.jsonl")
    assert lines(tmp_path / "copy.jsonl") == lines(tmp_path / "o.jsonl")
    for output, ((stream, partial), (first, second)) in enumerate(zip(readers, firsts, strict=True)):
        assert [row["text"] for row in [first, *stream]] == texts, writers[output]
        streamed_texts = [row["text"] for row in [second, *partial]]
        assert streamed_texts == [text for text in texts if text in streamed_texts], (
            f"{writers[output]}: each once, in order"
        )
        assert committed_texts <= set(streamed_texts) <= set(texts) - {"t4", "t5"}, (
            f"{writers[output]}: what was committed"
        )
        assert [row["text"] for row in job.stream(output)] == texts, "long after"
        assert list(job.partial(output)) == list(job.stream(output))

    (tmp_path / "o.jsonl").write_text('{"text": "another"}\n' * 16)
    with pytest.raises(NotFoundError, match="was deleted or replaced after it was published"):
        list(job.stream())


@pytest.mark.extended
def test_the_rows_of_a_job_that_was_resumed_are_said_to_be_gone_once_its_successor_has_succeeded(
    client: Client, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    write_rows(source, TEXTS)
    job = make_stopped_job(client, tmp_path, str(source))
    assert list(job.partial())
    job.resume().wait()
    until(lambda: not temporary_directories(tmp_path))
    with pytest.raises(NotFoundError, match="a job that resumed it has succeeded"):
        list(job.partial())


BIG = 2**60


@pytest.mark.parametrize(
    ("first_value", "second_value", "together"),
    [
        (None, "x", "string"),
        (1, 2.5, "float"),
        (1, BIG, "int64"),
        ([], [1], {"list": "int"}),
        ([1], [None, 0.5], {"list": "float"}),
        ({"a": 1}, {"a": None, "b": True}, {"struct": {"a": "int", "b": "bool"}}),
        (Decimal("1.5"), Decimal("123.25"), {"decimal": [3, 2]}),
        (1, "x", None),
        (BIG, 0.5, None),  # a float would be another number
        (True, 1, None),
        ([1], ["x"], None),
        ({"a": 1}, {"a": "x"}, None),
        ({"a": 1}, [1], None),
        (b"x", "x", None),
    ],
)
def test_types_go_together_by_rules_that_are_written_down(
    first_value: object, second_value: object, together: object
) -> None:
    first, second = schemas.schema_of({"v": first_value}), schemas.schema_of({"v": second_value})
    for pair in ((first, second), (second, first)):
        if together is None:
            with pytest.raises(schemas.SchemaConflictError, match=r"column 'v'.* is .* here and .* in other rows"):
                schemas.merge_schemas(*pair)
        else:
            assert schemas.merge_schemas(*pair) == {"v": together}


@batch.remote_function
def yield_mixed(gate: str) -> None:
    """Numbers and strings in one column. The batch of row 2 waits for the gate, so that it is read before it has
    results."""
    import time
    from pathlib import Path

    from tinsmith import batch

    for rows in batch.load():
        while rows[0]["n"] == 4 and not Path(gate).exists():
            time.sleep(0.02)
        batch.save_results([{"v": "text" if row["n"] in (3, 5) else row["n"], "o": {"x": row["n"]}} for row in rows])


@pytest.mark.parametrize("allowed", [0, 2])
def test_a_row_whose_types_do_not_go_with_the_others_fails_when_it_comes(
    allowed: int, client: Client, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    data = batch.from_items([{"n": n} for n in range(6)])
    output, errors = batch.ParquetWriter(f"{tmp_path}/o.parquet"), batch.JsonWriter(f"{tmp_path}/e.jsonl")
    job = data.map(
        yield_mixed, fn_kwargs={"gate": str(gate)}, batch_size=2, output=output, errors=errors, max_failed_rows=allowed,
        stream=False, client=client, limits=QUICK,
    )  # fmt: skip
    assert isinstance(job, Job)
    until(lambda: [batch_range["start_idx"] for batch_range in client.partial(int(job))["batches"]][:1] == [0])
    gate.touch()
    status = job.wait(check=False)
    assert status["first_error"]["error_type"] == "SchemaConflictError"
    assert "column 'v' is string here and int64 in other rows" in status["first_error"]["message"]
    if allowed:
        assert status["status"] == "SUCCEEDED" and [error["idx"] for error in job.errors()] == [3, 5]
        rows = batch.ParquetReader(f"{tmp_path}/o.parquet").download_batch(0, 3, "")
        assert rows == [{"v": n, "o": {"x": n}} for n in (0, 1, 2, 4)]
    else:
        assert status["status"] == "FAILED" and "row failed, and max_failed_rows is 0" in status["error"]


@batch.remote_function
def record_batches(log: str, blocker: str) -> None:
    """Records each batch, and creates a file at the output's path."""
    from pathlib import Path

    from tinsmith import batch

    for rows in batch.load():
        with open(log, "a") as log_file:
            log_file.write("x")
        if blocker:
            Path(blocker).write_text("in the way")
        batch.save_results([{"n": row["n"], "half": row["n"] / 2} for row in rows])


@pytest.mark.extended
def test_a_publication_that_failed_is_made_in_another_format_and_nothing_is_computed_again(
    client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "o.parquet"
    data = batch.from_items([{"n": n} for n in range(6)])
    kwargs = {"log": f"{tmp_path}/log", "blocker": str(path)}
    writer = batch.ParquetWriter(str(path))
    job = data.map(record_batches, fn_kwargs=kwargs, batch_size=2, output=writer, stream=False, client=client)
    assert isinstance(job, Job)
    with pytest.raises(JobFailedError, match="exists already"):
        job.wait()
    again = job.resume(format="jsonl")
    again.wait()
    rows = [{"n": n, "half": n / 2} for n in range(6)]
    assert lines(tmp_path / "o.jsonl") == rows == list(again.partial()) == list(again.stream())
    assert (tmp_path / "log").read_text() == "xxx" and path.read_text() == "in the way"
    until(lambda: not temporary_directories(tmp_path))


@pytest.mark.extended
def test_a_job_that_is_resumed_into_another_format_does_the_rest_in_it(client: Client, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_rows(source, TEXTS)
    job = make_stopped_job(client, tmp_path, str(source), output=batch.ParquetWriter(f"{tmp_path}/out/"))
    with pytest.raises(UserError, match="format is 'xml'; it must be one of"):
        job.resume(format="xml")
    with pytest.raises(UserError, match="it has 1 outputs and the new job has 2"):
        job.resume(output=[batch.JsonWriter(f"{tmp_path}/{name}.jsonl") for name in "ab"])
    again = job.resume(output=batch.CsvWriter(f"{tmp_path}/out.csv", column=["length"]))
    again.wait()
    assert (tmp_path / "out.csv").read_text() == "length\n1\n2\n3\n4\n5\n"
