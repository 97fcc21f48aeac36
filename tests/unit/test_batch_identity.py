"""What tells cached files and resumed jobs apart: all fields of a reader, and the input's version. `~` in paths."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import pytest

from tinsmith import batch
from tinsmith.batch.client.dataset import Dataset, JobRefusedError
from tinsmith.batch.client.http import Client
from tinsmith.batch.client.job import Job
from tinsmith.batch.formats import offset_cache, publishing, registry
from tinsmith.batch.formats.registry import InputReader, OutputWriter, request_dict
from tinsmith.batch.job_identity import describe_job
from tinsmith.batch.types import JobSpec
from tinsmith.batch.worker.children import interpreter

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def all_rows(reader: InputReader) -> list[Row]:
    return reader.download_batch(0, len(reader) - 1, "")


@pytest.mark.parametrize("packing", ["", ".gz"])
def test_readers_of_one_file_with_other_fields_do_not_share_a_cached_file(packing: str, tmp_path: Path) -> None:
    import gzip

    path = tmp_path / f"in.csv{packing}"
    path.write_bytes((gzip.compress if packing else bytes)(b"a;b,c\n1;2,3\n"))
    expected = {",": [{"a;b": "1;2", "c": "3"}], ";": [{"a": "1", "b,c": "2,3"}]}
    for delimiter in (",", ";", ",", "", ";"):
        reader = batch.CsvReader(str(path), delimiter=delimiter)
        assert all_rows(reader) == expected[delimiter or ","], delimiter


def test_a_field_of_a_subclass_is_part_of_the_cached_files_name(tmp_path: Path) -> None:
    @registry.INPUT_READER_REGISTRY.type_register(name="repeated")
    @dataclass
    class RepeatedReader(batch.JsonReader):
        times: int = 1

        def unroll(self, location: str) -> Iterator[bytes]:
            yield from [b"{}"] * self.times

        def to_dict(self) -> Row:
            return {"format": "repeated", "path": self.path, "times": self.times}

    (tmp_path / "in.jsonl").write_text("{}\n")
    assert [len(RepeatedReader(f"{tmp_path}/in.jsonl", times=times)) for times in (1, 3, 2, 3)] == [1, 3, 2, 3]


def test_a_changed_file_is_another_cached_file(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    for text in ("a\n1\n", "a\n2\n"):
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").replace(path)
        assert all_rows(batch.CsvReader(str(path))) == [{"a": text[2]}]


def test_old_files_of_the_cache_go_and_a_sweep_is_not_made_for_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    directory = offset_cache.cache_directory()
    (directory / "old").touch()
    os.utime(directory / "old", (0, 0))
    offset_cache.cached(lambda path: path.touch(), "one")
    assert not (directory / "old").exists()
    listed: list[Path] = []
    original = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: listed.append(path) or original(path))
    for index in range(5):
        offset_cache.cached(lambda path: path.touch(), index)
    assert not listed


CHANGED: dict[str, object] = {"str": "other", "bool": True, "int": 7, "list": ["other"]}


@pytest.mark.parametrize("kind", [registry.INPUT_READER_REGISTRY, registry.OUTPUT_WRITER_REGISTRY])
def test_every_field_of_every_format_is_part_of_its_identity(kind: registry.Registry[Any]) -> None:
    required = {"sql": {"table": "t"}}
    for name in registry.FORMATS:
        if name not in kind.names():
            continue
        path = "sqlite:///in.db" if name == "sql" else "dir/path"
        endpoint = kind.find(name)(path=path, **required.get(name, {}))
        for field in fields(endpoint):
            if not field.init:
                continue
            other = copy.copy(endpoint)
            other.__dict__[field.name] = next(
                value
                for typed, value in CHANGED.items()
                if typed in str(field.type) and value != getattr(other, field.name)
            )
            assert other.identity != endpoint.identity, f"{name} {field.name}"


# Resuming.


class StoredJobs:
    """A server with one job, as its client sees it."""

    def __init__(self, status: str = "SUCCEEDED", rows_failed: int = 0) -> None:
        self.specs: list[JobSpec] = []
        self.input_versions: list[Any] = []
        self._status = {"status": status, "rows_ok": 3, "rows_failed": rows_failed, "job_id": 0}

    def jobs(self) -> list[Row]:
        return [{"job_id": index} for index in reversed(range(len(self.specs)))]

    def partial(self, job_id: int, limit: int) -> Row:
        spec = self.specs[job_id]
        stored = {
            "outputs": spec.batch_output_formats,
            **describe_job(spec),
            "input_version": self.input_versions[job_id],
        }
        return json.loads(json.dumps(stored))

    def has_output(self, job_id: int, output: int) -> bool:
        return True

    def status(self, job_id: int) -> Row:
        return {**self._status, "job_id": job_id}

    def submit(self, data: Row) -> int:
        self.specs.append(JobSpec.from_dict(json.loads(json.dumps(data))))
        self.input_versions.append(InputReader.from_dict(self.specs[-1].batch_input_format).version())
        return len(self.specs) - 1


def shout(row: Row) -> Row:
    return {"loud": row["a"]}


def whisper(row: Row) -> Row:
    return {"quiet": row["a"]}


def submit(jobs: StoredJobs, source: object, function: object = shout, **options: Any) -> int:  # noqa: ANN401
    data = Dataset(cast(InputReader, source))
    writer = batch.JsonWriter("nowhere/out.jsonl")
    client = cast(Client, jobs)
    if isinstance(function, str):
        job = data.sample(function, **{"prompt": "a", **options}, output=writer, stream=False, client=client)
    else:
        job = data.map(function, output=writer, stream=False, client=client, **options)  # type: ignore[call-overload]
    assert isinstance(job, Job)
    return int(job)


Make = Callable[[Path], tuple[object, object, dict[str, Any]]]
"""The source, the function and the options of a script."""
FIRST: dict[str, Make] = {
    "columns": lambda root: (batch.ParquetReader(f"{root}/in.parquet", columns=["a"]), shout, {}),
    "delimiter": lambda root: (batch.CsvReader(f"{root}/in.csv"), shout, {}),
    "items": lambda root: (batch.from_items([{"a": 1}]).reader, shout, {}),
    "many items": lambda root: (batch.from_items([{"a": "x" * 500}]).reader, shout, {}),
    "function": lambda root: (batch.JsonReader(f"{root}/in.jsonl"), shout, {}),
    "operation": lambda root: (batch.JsonReader(f"{root}/in.jsonl"), "m", {}),
    "sampling parameter": lambda root: (batch.JsonReader(f"{root}/in.jsonl"), "m", {"temperature": 0.5}),
    "batch_size": lambda root: (batch.JsonReader(f"{root}/in.jsonl"), shout, {"batch_size": 8}),
    "batch_tokens": lambda root: (batch.JsonReader(f"{root}/in.jsonl"), shout, {}),
    "rows": lambda root: (batch.JsonReader(f"{root}/in.jsonl"), shout, {}),
    "errors": lambda root: (batch.JsonReader(f"{root}/in.jsonl"), shout, {}),
    "errors' columns": lambda root: (
        batch.JsonReader(f"{root}/in.jsonl"), shout, {"errors": batch.JsonWriter("nowhere/e.jsonl")},
    ),
    "remove_columns": lambda root: (batch.JsonReader(f"{root}/in.jsonl"), shout, {}),
}  # fmt: skip
SECOND: dict[str, tuple[Make, str]] = {
    "columns": (
        lambda root: (batch.ParquetReader(f"{root}/in.parquet", columns=["b"]), shout, {}),
        r"its input columns is \['a'\] and this job's is \['b'\]",
    ),
    "delimiter": (
        lambda root: (batch.CsvReader(f"{root}/in.csv", delimiter=";"), shout, {}),
        "its input delimiter is  and this job's is ;",
    ),
    "items": (lambda root: (batch.from_items([{"a": 2}]).reader, shout, {}), "its input items is"),
    "many items": (lambda root: (batch.from_items([{"a": "x" * 501}]).reader, shout, {}), "its input items is sha256"),
    "function": (lambda root: (batch.JsonReader(f"{root}/in.jsonl"), whisper, {}), "its function is"),
    "operation": (lambda root: (batch.JsonReader(f"{root}/in.jsonl"), "n", {}), "its function is"),
    "sampling parameter": (
        lambda root: (batch.JsonReader(f"{root}/in.jsonl"), "m", {"temperature": 0.7}),
        "its function is",
    ),
    "batch_size": (
        lambda root: (batch.JsonReader(f"{root}/in.jsonl"), shout, {"batch_size": 4}),
        "its batch_size is 8 and this job's is 4",
    ),
    "batch_tokens": (
        lambda root: (batch.JsonReader(f"{root}/in.jsonl"), shout, {"batch_tokens": 4}),
        "its batch_tokens is None and this job's is 4",
    ),
    "rows": (
        lambda root: (batch.JsonReader(f"{root}/in.jsonl"), shout, {"rows": "any"}),
        "its (function|rows) is",
    ),
    "errors": (
        lambda root: (batch.JsonReader(f"{root}/in.jsonl"), shout, {"errors": batch.JsonWriter("nowhere/e.jsonl")}),
        "its errors is None",
    ),
    "errors' columns": (
        lambda root: (
            batch.JsonReader(f"{root}/in.jsonl"), shout, {"errors": batch.JsonWriter("nowhere/e.jsonl", column="idx")},
        ),
        "its errors column is None and this job's is idx",
    ),
    "remove_columns": (
        lambda root: (batch.JsonReader(f"{root}/in.jsonl"), shout, {"remove_columns": "a"}),
        "its function is",
    ),
}  # fmt: skip


def make_inputs(root: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"a": [1], "b": [2]}), root / "in.parquet")
    (root / "in.csv").write_text("a;b,c\n1;2,3\n")
    (root / "in.jsonl").write_text('{"a": "x"}\n')


@pytest.mark.parametrize("status", ["SUCCEEDED", "RUNNING", "FAILED", "CANCELLED"])
@pytest.mark.parametrize("case", FIRST)
def test_a_script_finds_its_own_job_and_no_other(case: str, status: str, tmp_path: Path) -> None:
    make_inputs(tmp_path)
    jobs = StoredJobs(status)
    source, function, options = FIRST[case](tmp_path)
    submit(jobs, source, function, **options)
    make, message = SECOND[case]
    source, function, options = make(tmp_path)
    with pytest.raises(JobRefusedError, match=message) as refusal:
        submit(jobs, source, function, if_exists="resume", **options)
    assert "pass if_exists='overwrite'" in str(refusal.value)
    assert ("pass resume_from=0" in str(refusal.value)) == (status in ("FAILED", "CANCELLED"))
    source, function, options = FIRST[case](tmp_path)
    again = submit(jobs, source, function, if_exists="resume", **options)
    assert again == (1 if status in ("FAILED", "CANCELLED") else 0)
    assert [spec.resume_from for spec in jobs.specs] == [None, 0][: again + 1]


def test_how_a_job_runs_does_not_tell_it_apart(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    source = batch.JsonReader(f"{tmp_path}/in.jsonl")
    for status, job_id in (("SUCCEEDED", 0), ("FAILED", 1)):
        jobs = StoredJobs(status, rows_failed=0 if status == "SUCCEEDED" else 2)
        submit(jobs, source)
        options = {"concurrency": 1, "priority": 3, "weight": 2.0, "name": "again", "python": "python3"}
        limits = {"max_retries": 1}
        assert (
            submit(jobs, source, if_exists="resume", max_failed_rows=0.5, limits=limits, retry_on=[OSError], **options)
            == job_id
        )


def test_a_job_that_allowed_more_failed_rows_is_not_this_one(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    jobs = StoredJobs("SUCCEEDED", rows_failed=1)
    source = batch.JsonReader(f"{tmp_path}/in.jsonl")
    submit(jobs, source, max_failed_rows=0.5)
    with pytest.raises(JobRefusedError, match=r"its max_failed_rows is 0.5 and this job's is 0"):
        submit(jobs, source, if_exists="resume")


def test_an_input_that_changed_after_a_job_succeeded_is_another_input(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    jobs = StoredJobs("SUCCEEDED")
    source = batch.JsonReader(f"{tmp_path}/in.jsonl")
    submit(jobs, source)
    assert submit(jobs, source, if_exists="resume") == 0
    (tmp_path / "in.jsonl").write_text('{"a": "y"}\n')
    with pytest.raises(JobRefusedError, match=r"but the input has changed since the job began: .*in.jsonl was"):
        submit(jobs, source, if_exists="resume")
    (tmp_path / "in.jsonl").unlink()  # the server's file, perhaps, and not the client's
    assert submit(jobs, source, if_exists="resume") == 0


def test_a_field_that_a_later_release_adds_is_no_difference_while_it_has_its_default(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    jobs = StoredJobs("SUCCEEDED")
    submit(jobs, batch.CsvReader(f"{tmp_path}/in.csv"))
    del jobs.specs[0].batch_input_format["delimiter"]
    assert submit(jobs, batch.CsvReader(f"{tmp_path}/in.csv"), if_exists="resume") == 0
    with pytest.raises(JobRefusedError, match="its input delimiter is"):
        submit(jobs, batch.CsvReader(f"{tmp_path}/in.csv", delimiter=";"), if_exists="resume")


def test_passwords_are_in_no_description(tmp_path: Path) -> None:
    spec = JobSpec(
        batch_serialized_fn="",
        batch_input_format=batch.SqlReader("postgresql://me:secret@host/db", table="t").to_dict(),
        batch_output_formats=[],
        batch_size=1,
        batch_error_format=batch.SqlWriter("postgresql://me:secret@host/db", table="e").to_dict(),
    )
    assert "secret" not in json.dumps(describe_job(spec)) and spec.batch_input_format["password"] == "secret"


def test_a_data_set_is_written_twice_and_the_second_job_resumes_nothing(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    jobs = StoredJobs("FAILED")
    mapped = batch.read_json(f"{tmp_path}/in.jsonl").map(
        shout, client=cast(Client, jobs), if_exists="resume", stream=False
    )
    assert isinstance(mapped, Dataset)
    for name in ("a", "a", "b"):
        mapped.write_json(f"nowhere/{name}.jsonl")
    assert [spec.resume_from for spec in jobs.specs] == [None, 0, None]
    with pytest.raises(ValueError, match="leave resume_from out"):
        submit(jobs, batch.JsonReader(f"{tmp_path}/in.jsonl"), if_exists="resume", resume_from=1)


# The user's home.


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def test_a_tilde_is_the_home_of_whoever_submits_in_every_reader_and_writer(home: Path) -> None:
    for classes in (registry.INPUT_READER_REGISTRY, registry.OUTPUT_WRITER_REGISTRY):
        for name, format in registry.FORMATS.items():
            if name not in classes.names() or not format.has_location:
                continue
            if name == "sql":
                request = request_dict(classes.find(name)(path="sqlite:///~/x.db#t"))
                assert request["path"] == f"sqlite:///{home}/x.db#t"
                continue
            (home / "x").mkdir(exist_ok=True)
            for path in ("~/x", "~/x/"):
                try:
                    endpoint = classes.find(name)(path=path)
                except ValueError:
                    continue  # it must be a file
                assert request_dict(endpoint)["path"].rstrip("/") == f"{home}/x", name
    assert request_dict(batch.JsonReader("~/in/*.jsonl"))["path"] == f"{home}/in/*.jsonl"
    assert request_dict(batch.JsonReader("s3://b/~/x"))["path"] == "s3://b/~/x"
    assert request_dict(batch.JsonReader("sub/x.jsonl"))["path"] == f"{home.parent}/sub/x.jsonl"


def test_a_tilde_is_read_and_checked_where_the_script_runs(home: Path) -> None:
    import datasets

    (home / "in.jsonl").write_text('{"a": 1}\n')
    assert all_rows(batch.read_json("~/in.jsonl").reader) == all_rows(batch.Dataset("~/*.jsonl").reader) == [{"a": 1}]
    datasets.Dataset.from_list([{"v": 1}]).save_to_disk(str(home / "saved"))
    for path in ("~/saved", "home/saved"):  # a worker has another working directory
        assert request_dict(batch.from_huggingface(path).reader)["path"] == str(home / "saved")
    assert all_rows(batch.from_huggingface("~/saved").reader) == [{"v": 1}]
    with pytest.raises(FileExistsError):
        publishing.check_output("~/in.jsonl", "error")
    writer: OutputWriter = batch.JsonWriter("~/out.jsonl")
    from tinsmith.batch.types import RowRange

    part = writer.write_part([{"a": 1}], RowRange(0, 0), "~/parts")
    writer.publish([part], "~/staging", "error")
    assert (home / "out.jsonl").read_text() == '{"a":1}\n'


def test_a_tilde_in_the_other_paths_of_a_job(home: Path) -> None:
    outputs: list[OutputWriter] = [batch.JsonWriter("~/out.jsonl")]
    data = batch.from_items([]).map(shout, errors=batch.JsonWriter("~/errors.jsonl"), python="~/bin/python")
    data._forgotten = False
    spec = data._spec(outputs)
    assert spec.batch_output_path == [f"{home}/out.jsonl"] and spec.python == f"{home}/bin/python"
    assert spec.batch_error_format is not None and spec.batch_error_format["path"] == f"{home}/errors.jsonl"
    activated = batch.from_items([]).map(shout, activate_env="~/venv")
    activated._forgotten = False
    assert interpreter(activated._spec(outputs).to_dict()) == f"{home}/venv/bin/python"


def test_a_tilde_in_the_file_of_a_pool_or_a_function(home: Path) -> None:
    from typer.testing import CliRunner

    from tinsmith.batch.coordinator.coordinator import pools_of
    from tinsmith.cli.batch import _load_function, app

    (home / "gpu.yaml").write_text("pool:\n  workers: 1\n")
    (home / "functions.py").write_text("def shout(row):\n    return row\n")
    assert _load_function("~/functions.py:shout").__name__ == "shout"
    from tinsmith.settings import load

    assert "gpu" in pools_of(load({"batch_pools": ["gpu=~/gpu.yaml"]}))
    (home / "sky.yaml").write_text("pool:\n  workers: 1\nresources:\n  infra: aws\n")
    ran = CliRunner().invoke(app, ["task", "sky=~/sky.yaml"])
    assert ran.exit_code == 0 and "num_nodes" in ran.output, ran.output
