"""Every public parameter of readers, writers, operations and `Dataset` methods has an effect, or is refused by name.

Each table has one entry for each parameter, and a test fails for a parameter that no table has.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import re
import sqlite3
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from support.payloads import spans_of
from tinsmith import batch
from tinsmith.batch.client import habits
from tinsmith.batch.client.dataset import Dataset
from tinsmith.batch.client.options import JobOptions, StepOptions
from tinsmith.batch.formats import registry
from tinsmith.batch.formats.registry import InputReader, OutputWriter
from tinsmith.batch.operations.base import Answer, RowOperation, SampleResponse
from tinsmith.batch.types import Assignment, AttemptOutcome, JobSpec, RowRange, part_base, unpack_payload
from tinsmith.batch.worker import io_operations, runtime
from tinsmith.errors import NotSupportedError, UserError

Rows = list[dict[str, Any]]
Fields = dict[str, Any]


def observe(call: Callable[[], object]) -> str:
    """What a call gives, as text; for a refusal, its message."""
    try:
        return repr(call())
    except (ValueError, TypeError, KeyError, OSError, RuntimeError, UserError) as error:
        return f"{type(error).__name__}: {error}"


# Readers.


def make_inputs(root: Path) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    (root / "in.csv").write_text("a;b,c\n1;2,3\n")
    (root / "in.jsonl").write_text('{"a": 1}\n')
    (root / "in.txt").write_text("line\n")
    pyarrow.parquet.write_table(pyarrow.table({"a": [1], "b": [2]}), root / "in.parquet")
    (root / "images").mkdir()
    Image.new("L", (1, 1)).save(root / "images/a.png")
    with tarfile.open(root / "in.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    datasets.DatasetDict({name: datasets.Dataset.from_list([{"v": name}]) for name in "ab"}).save_to_disk(root / "hf")
    with sqlite3.connect(root / "in.db") as database:
        database.execute("CREATE TABLE t (k INTEGER PRIMARY KEY, u INTEGER UNIQUE, v TEXT)")
        database.execute("CREATE TABLE w (k INTEGER PRIMARY KEY)")
        database.execute("INSERT INTO w VALUES (7)")
        database.executemany("INSERT INTO t VALUES (?, ?, ?)", [(1, 2, "x"), (2, 1, "y")])
    database.close()


READERS: dict[tuple[str, str], tuple[Fields, Fields]] = {
    ("csv", "delimiter"): ({"path": "in.csv"}, {"path": "in.csv", "delimiter": ";"}),
    ("parquet", "columns"): ({"path": "in.parquet"}, {"path": "in.parquet", "columns": ["b"]}),
    ("text", "column"): ({"path": "in.txt"}, {"path": "in.txt", "column": "line"}),
    ("images", "column"): ({"path": "images/"}, {"path": "images/", "column": "picture"}),
    ("images", "decode"): ({"path": "images/"}, {"path": "images/", "decode": True}),
    ("items", "items"): ({"items": []}, {"items": [{"a": 1}]}),
    ("huggingface", "split"): ({"path": "hf", "split": "a"}, {"path": "hf", "split": "b"}),
    ("huggingface", "name"): ({"path": "hf", "split": "a"}, {"path": "hf", "split": "a", "name": "n"}),
    ("huggingface", "revision"): ({"path": "hf", "split": "a"}, {"path": "hf", "split": "a", "revision": "r"}),
    ("sql", "table"): ({"path": "sqlite:///in.db", "table": "t"}, {"path": "sqlite:///in.db", "table": "w"}),
    ("sql", "query"): (
        {"path": "sqlite:///in.db", "table": "t"},
        {"path": "sqlite:///in.db", "query": "SELECT k FROM t", "key": "k"},
    ),
    ("sql", "key"): (
        {"path": "sqlite:///in.db", "table": "t"},
        {"path": "sqlite:///in.db", "table": "t", "key": "u"},
    ),
    ("sql", "columns"): (
        {"path": "sqlite:///in.db", "table": "t"},
        {"path": "sqlite:///in.db", "table": "t", "columns": ["v"]},
    ),
}
ELSEWHERE = {
    ("sql", "password"): "tests/integration/test_batch_sql.py, which has a Postgres with passwords",
    ("items", "path"): "the name that is shown",
}


def parameters_of(classes: registry.Registry[Any]) -> set[tuple[str, str]]:
    names = [name for name in registry.FORMATS if name in classes.names()]
    return {(name, field.name) for name in names for field in fields(classes.find(name)) if field.init}


def test_every_field_of_a_reader_has_a_probe() -> None:
    paths = {(name, "path") for name in registry.FORMATS}
    assert parameters_of(registry.INPUT_READER_REGISTRY) - paths == READERS.keys() | (ELSEWHERE.keys() - paths)


@pytest.mark.parametrize(("format", "field"), READERS)
def test_a_field_of_a_reader_changes_the_rows_or_is_refused(
    format: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)

    def rows_with(values: Fields) -> object:
        reader = InputReader.from_dict({"format": format, **values})
        return [str(row) for row in reader.download_batch(0, len(reader) - 1, "")]

    without, with_it = READERS[format, field]
    assert observe(lambda: rows_with(without)) != observe(lambda: rows_with(with_it))


# Writers.

WRITERS: dict[tuple[str, str], tuple[Fields, Fields]] = {
    ("json", "column"): ({}, {"column": "a"}),
    ("csv", "column"): ({}, {"column": "a"}),
    ("csv", "delimiter"): ({}, {"delimiter": ";"}),
    **{(name, "rows_per_file"): ({}, {"rows_per_file": 1}) for name in ("json", "csv", "parquet", "openai_batch")},
    ("parquet", "column"): ({}, {"column": "a"}),
    ("parquet", "compression"): ({}, {"compression": "none"}),
    ("huggingface", "column"): ({}, {"column": "a"}),
    ("text", "column"): ({}, {"column": "c"}),
    ("webdataset", "key"): ({}, {"key": None}),
    ("images", "column"): ({}, {"column": "other"}),
    ("images", "kind"): ({}, {"kind": "webp"}),
    ("openai_batch", "column"): ({}, {"column": "custom_id"}),
    ("openai_batch", "keep"): ({}, {"keep": "failed"}),
    ("sql", "table"): ({"table": "t"}, {"table": "w"}),
    ("sql", "column"): ({"table": "t"}, {"table": "t", "column": "a"}),
    ("sql", "append"): ({"table": "old"}, {"table": "old", "append": True}),
}
WRITTEN: dict[str, Fields] = {
    "text": {"text": "x", "c": "y"},
    "webdataset": {"__key__": "k", "txt": "x"},
    "images": {},
    "openai_batch": {"custom_id": "a", "response": {"status_code": 200, "body": {}}},
}
PATHS = {"sql": "sqlite:///{root}/out.db", "huggingface": "{root}/out/", "webdataset": "{root}/out/"}


def test_every_field_of_a_writer_has_a_probe() -> None:
    paths = {(name, "path") for name in registry.FORMATS}
    assert parameters_of(registry.OUTPUT_WRITER_REGISTRY) - paths == WRITERS.keys() | {("sql", "password")}


def output_of(format: str, values: Fields, root: Path) -> object:
    """The names and bytes of the files that a writer publishes for one row, or the tables."""
    from PIL import Image

    root.mkdir()
    row = WRITTEN.get(format, {"a": 1, "b": "x"})
    if format == "images":
        row = {"image": Image.new("L", (1, 1)), "other": Image.new("L", (2, 2))}
    if format == "sql":
        with sqlite3.connect(root / "out.db") as database:
            database.execute("CREATE TABLE old (a INTEGER, b TEXT)")
        database.close()
    path = PATHS.get(format, "{root}/out" + ("/" if format == "images" else "")).format(root=root)
    writer = OutputWriter.from_dict({"format": format, "path": path, **values})
    part = writer.write_part([row], RowRange(0, 0), f"{root}/staging/attempt-1")
    writer.publish([part], f"{root}/staging", "error")
    if format == "sql":
        with sqlite3.connect(root / "out.db") as database:
            tables = [
                name
                for (name,) in database.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'tin%'"
                )
            ]
            rows = {name: database.execute(f"SELECT * FROM {name}").fetchall() for name in tables}
        database.close()
        return rows
    files = [file for file in sorted(root.rglob("*")) if file.is_file() and "staging" not in file.parts]
    return [(str(file.relative_to(root)), file.read_bytes()) for file in files if file.name != "_manifest.json"]


@pytest.mark.parametrize(("format", "field"), WRITERS)
def test_a_field_of_a_writer_changes_the_output_or_is_refused(format: str, field: str, tmp_path: Path) -> None:
    without, with_it = WRITERS[format, field]
    before = observe(lambda: output_of(format, without, tmp_path / "a"))
    after = observe(lambda: output_of(format, with_it, tmp_path / "b"))
    assert before.replace(f"{tmp_path}/a", "") != after.replace(f"{tmp_path}/b", "")


def test_paths_and_delimiters_that_no_file_can_have_are_refused() -> None:
    for delimiter in ("", ";;", '"', "\n"):
        with pytest.raises(ValueError, match="delimiter is"):
            batch.CsvWriter("out.csv", delimiter=delimiter)
        if delimiter:
            with pytest.raises(ValueError, match="delimiter is"):
                batch.CsvReader("in.csv", delimiter=delimiter)
    with pytest.raises(ValueError, match="compressed inside"):
        batch.ParquetWriter("out.parquet.gz")


@pytest.mark.parametrize("late", [False, True])
def test_a_compressed_csv_file_is_compressed(late: bool, tmp_path: Path) -> None:
    writer = batch.CsvWriter(f"{tmp_path}/out.csv.gz")
    batches: list[Rows] = [[{"a": 1}], [{"a": 2, "b": 3} if late else {"a": 2}]]
    parts = [writer.write_part(rows, RowRange(index, index), f"{tmp_path}/parts") for index, rows in enumerate(batches)]
    info = writer.publish(parts, f"{tmp_path}/staging", "error")
    assert (
        gzip.decompress((tmp_path / "out.csv.gz").read_bytes()).decode().startswith("a,b\n1,\n" if late else "a\n1\n")
    )
    assert [row["a"] for row in writer.read_published(info)] == ["1", "2"]
    assert [row["a"] for row in batch.CsvReader(writer.path).download_batch(0, 1, "")] == ["1", "2"]


def test_csv_files_that_would_lose_a_column_or_a_row_are_refused(tmp_path: Path) -> None:
    (tmp_path / "twice.csv").write_text("a,b,a\n1,2,3\n")
    with pytest.raises(UserError, match=r"has the columns \['a'\] more than once"):
        len(batch.CsvReader(f"{tmp_path}/twice.csv"))
    writer = batch.CsvWriter(f"{tmp_path}/out.csv")
    parts = [writer.write_part([{}], RowRange(index, index), f"{tmp_path}/parts") for index in range(2)]
    with pytest.raises(UserError, match="have no columns"):
        writer.publish(parts, f"{tmp_path}/staging", "error")


def test_data_sets_in_memory_take_no_option_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dataset = datasets.Dataset.from_list([{"v": 1}])
    chosen = batch.from_huggingface(datasets.DatasetDict({"a": dataset}), split="a")
    assert chosen.reader.download_batch(0, 0, "") == [{"v": 1}]
    with pytest.raises(UserError, match=r"split is 'a'; the splits of this data set are none"):
        batch.from_huggingface(dataset, split="a")
    with pytest.raises(UserError, match=r"\['revision'\] are of data sets on the hub"):
        Dataset.from_hf(dataset, revision="r")
    dataset.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UserError, match=r"split is 'test', and .* has one split"):
        len(Dataset.from_hf(str(tmp_path / "saved"), "test"))


# Steps.


def run_steps(data: Dataset, directory: Path, batch_size: int = 3) -> Rows:
    """The output rows of a data set's steps, run in this process."""
    writers: list[OutputWriter] = [batch.JsonWriter(f"{directory}/out.jsonl")]
    data._forgotten = False
    spec = data._spec(writers)
    spec = JobSpec.from_dict({**spec.to_dict(), "batch_size": batch_size})
    outcomes: list[AttemptOutcome] = []
    bases = (part_base(writers[0].path, 1, 0, 0),)
    runtime.run(
        spec,
        [Assignment(index, *span, 0, bases) for index, span in enumerate(spans_of(spec))],
        outcomes.extend,
    )
    errors = [outcome.error for outcome in outcomes if outcome.error]
    errors += [failure.message for outcome in outcomes for failure in outcome.row_failures]
    if errors:
        raise ValueError(errors[0])
    parts = [outcome.parts[0] for outcome in sorted(outcomes, key=lambda outcome: outcome.batch_idx)]
    path = io_operations.publish_output(spec, 0, 1, parts).path
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


INPUT: Rows = [{"n": index, "x": "x"} for index in range(5)]


def probe(*args: Any, **options: Any) -> Any:  # noqa: ANN401
    """Returns what it was called with, in a form that every method accepts as a result."""
    subject = args[0]
    text = repr([type(subject).__name__, args[1:], sorted(options)])
    if isinstance(subject, dict) and "n" in subject and isinstance(subject["n"], int):
        return {"seen": text}
    return [{"seen": text} for _ in range(len(subject))]


def probe_many(*args: Any, **options: Any) -> Any:  # noqa: ANN401
    return [{"seen": repr([type(args[0]).__name__, args[1:], sorted(options)])}]


def probe_filter(*args: Any, **options: Any) -> Any:  # noqa: ANN401
    subject, parameters = args[0], (*args[1:], *options.values())
    if isinstance(subject, dict) and isinstance(subject.get("n"), int):
        return not parameters or subject["n"] > 2
    names = subject if isinstance(subject, list) else list(subject["n"])
    return [index == 1 or (bool(parameters) and index == 2) for index in range(len(names))]


class Constructed:
    def __init__(self, by: int = 0) -> None:
        self.by = by

    def __call__(self, row: dict[str, Any]) -> Any:  # noqa: ANN401
        return [{"by": self.by}] if self.by == 2 else {"by": self.by}


def make_class(method: str) -> Callable[..., object]:
    class ConstructedMapper(Constructed):
        def __call__(self, subject: Any) -> Any:  # noqa: ANN401
            if method == "filter":
                return self.by > 0
            return (
                {"by": self.by}
                if method == "map"
                else [{"by": self.by}] * (1 if method == "flat_map" else len(subject))
            )

    return ConstructedMapper


def make_named(method: str) -> Callable[..., object]:
    def named(subject: Any, k: int = 0) -> object:  # noqa: ANN401
        return METHODS[method](subject, k=k) if k else METHODS[method](subject)

    return named


METHODS: dict[str, Callable[..., object]] = {
    "map": probe,
    "map_batches": probe,
    "filter": probe_filter,
    "flat_map": probe_many,
}
STEP_VALUES: dict[str, object] = {
    "batched": True,
    "batch_format": "columns",
    "with_indices": True,
    "remove_columns": "x",
    "rows": "any",
    "fn_args": [1],
    "fn_kwargs": {"k": 1},
    "fn_constructor_args": [3],
    "fn_constructor_kwargs": {"by": 3},
    "serializer": "source",
}


def test_every_option_of_a_step_has_a_probe() -> None:
    assert STEP_VALUES.keys() == StepOptions.__annotations__.keys()


@pytest.mark.filterwarnings("ignore:this data set was mapped")
@pytest.mark.parametrize("option", STEP_VALUES)
@pytest.mark.parametrize("method", METHODS)
def test_an_option_of_a_step_changes_the_rows_or_is_refused(method: str, option: str, tmp_path: Path) -> None:
    makers = {"fn_args": make_named, "fn_constructor_args": make_class, "fn_constructor_kwargs": make_class}
    function = makers[option](method) if option in makers else METHODS[method]
    if option == "rows" and method in ("map", "map_batches"):
        function = no_rows if method == "map" else one_row
    if option == "serializer":  # a lambda travels only as a pickle
        function = lambda subject, function=METHODS[method]: function(subject)  # noqa: E731
    data = batch.from_items(INPUT)
    value = STEP_VALUES[option]

    def outcome(directory: str, **options: Any) -> object:  # noqa: ANN401
        step = getattr(data, method)(function, **options)
        step._forgotten = False
        return run_steps(step, tmp_path / directory)

    before, after = (observe(lambda: outcome("a")), observe(lambda: outcome("b", **{option: value})))
    if method == "map_batches" and option == "batched":
        assert before == after, "it is what the method does"
        with pytest.raises(ValueError, match="batched is False"):
            data.map_batches(probe, batched=False)
        return
    assert before != after
    refused = {
        "filter": {"remove_columns", "rows"},
        "flat_map": {"batched", "batch_format", "remove_columns", "rows"},
        "map_batches": {"remove_columns"},
    }
    if option in refused.get(method, set()):
        assert after.startswith("NotSupportedError") and f"{method} has no option ['{option}']" in after


def no_rows(row: dict[str, Any]) -> None:
    return None


def one_row(rows: Rows) -> Rows:
    return rows[:1]


def test_filter_takes_batches_in_any_form(tmp_path: Path) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute

    def rows_over(rows: Rows) -> list[bool]:
        return [row["n"] > 2 for row in rows]

    def columns_over(columns: Mapping[str, list[int]]) -> list[bool]:
        return [n > 2 for n in columns["n"]]

    def numpy_over(columns: Mapping[str, np.ndarray]) -> np.ndarray:
        return columns["n"] > 2

    def pandas_over(frame: Any) -> Any:  # noqa: ANN401
        return frame["n"] > 2

    def arrow_over(table: pa.Table) -> Any:  # noqa: ANN401
        return pyarrow.compute.call_function("greater", [table["n"], pa.scalar(2)])

    def index_over(rows: Rows, indices: list[int]) -> list[bool]:
        return [index > 2 for index in indices]

    steps = {
        "rows": (rows_over, {"batched": True}),
        "columns": (columns_over, {"batch_format": "columns"}),
        "numpy": (numpy_over, {"batch_format": "numpy"}),
        "pandas": (pandas_over, {"batched": True, "batch_format": "pandas"}),
        "pyarrow": (arrow_over, {"batch_format": "pyarrow"}),
        "indices": (index_over, {"batched": True, "with_indices": True}),
    }
    for name, (function, options) in steps.items():
        assert run_steps(batch.from_items(INPUT).filter(function, **options), tmp_path / name) == INPUT[3:]

    def nothing(rows: Rows) -> list[bool]:
        return [False] * len(rows)

    def few(rows: Rows) -> list[bool]:
        return [True]

    def text(rows: Rows) -> str:
        return "yes"

    assert run_steps(batch.from_items(INPUT).filter(nothing, batched=True), tmp_path / "none") == []
    for function, message in ((few, "returned 1 values for a batch of 3 rows"), (text, "returned a str")):
        with pytest.raises(ValueError, match=message):
            run_steps(batch.from_items(INPUT).filter(function, batched=True), tmp_path / "bad")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"fn_kwargs": 5}, "fn_kwargs is 5; it must be a dict"),
        ({"remove_columns": 5}, "remove_columns is 5; it must be the name of a column"),
        ({"retry_on": [1]}, r"retry_on\[0\] is 1; it must be a string"),
        ({"retry_on": 1}, "retry_on is 1; it must be a list"),
        ({"resume_from": [1]}, r"resume_from is \[1\]; it must be an integer"),
        ({"resume_from": "x"}, "resume_from is 'x'; it must be an integer"),
        ({"output": 5}, "an output is 5; it must be a writer"),
        ({"output": "o.jsonl"}, "an output is 'o.jsonl'; it must be a writer"),
        ({"limits": {"lease_s": 0}}, "limits.lease_s is 0; it must lie between 1 and"),
        ({"limits": {"heartbeat_timeout_s": 1}}, "limits.heartbeat_timeout_s is 1; it must lie between 2 and"),
    ],
)
def test_an_option_of_a_wrong_kind_is_refused_by_its_name(
    options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    def row_of(row: dict[str, Any]) -> dict[str, Any]:
        return row

    output = batch.JsonWriter(f"{tmp_path}/o.jsonl")
    with pytest.raises(ValueError, match=sentence):
        batch.from_items(INPUT).map(
            row_of, **{"output": output, "client": batch.Client("http://127.0.0.1:1"), **options}
        )


@pytest.mark.filterwarnings("ignore:this data set was mapped")
def test_options_that_contradict_each_other_are_refused() -> None:
    data = batch.from_items(INPUT)

    @batch.remote_function
    def loop() -> None: ...

    def row_of(row: dict[str, Any]) -> dict[str, Any]:
        return row

    refused: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: data.map(row_of, batched=False, batch_format="numpy"), ValueError, "batched is False, but"),
        (
            lambda: data.map(row_of, fn_constructor_kwargs={"by": 1}),
            ValueError,
            "are for a class, and this is a function",
        ),
        (lambda: data.map(Constructed, fn_args=[1]), ValueError, "this is a class.*use fn_constructor_args"),
        (lambda: data.map(probe, fn_args=[1]), ValueError, "'probe' has no names for all of them; use fn_kwargs"),
        (lambda: data.map(make_named("map"), fn_args=1), ValueError, "fn_args is 1; it must be a list"),  # type: ignore[arg-type]
        (lambda: data.map(make_named("map"), fn_args=[1], fn_kwargs={"k": 2}), ValueError, r"both have \['k'\]"),
        (lambda: data.map(row_of, num_proc=2, concurrency=3), ValueError, "num_proc is 2 and concurrency is 3"),
        (lambda: data.map(row_of, num_proc=2, concurrency=(1, 3)), ValueError, "they are one option: give one"),
        (lambda: data.map(row_of, concurrency=(2, 3), min_concurrency=1), ValueError, "give the minimum once"),
        (
            lambda: data.map(Constructed, fn_kwargs={"by": 1}, fn_constructor_kwargs={"by": 2}),
            ValueError,
            "either fn_kwargs or fn_constructor_kwargs",
        ),
        *(
            (
                lambda option=option: data.map(loop, **{option: STEP_VALUES[option]}),  # type: ignore[misc]
                NotSupportedError,
                rf"loops over load\(\) has no option \['{option}'\]",
            )
            for option in ("batch_format", "with_indices", "remove_columns", "fn_constructor_args")
        ),
    ]
    for call, kind, message in refused:
        with pytest.raises(kind, match=message):
            call()


# Jobs.

JOB_VALUES: dict[str, object] = {
    "batch_tokens": 5,
    "concurrency": 1,
    "min_concurrency": 2,
    "num_proc": 4,
    "env": {"A": "b"},
    "secrets": ["KEY"],
    "limits": {"backoff_s": 9.0},
    "max_concurrent_batches": 3,
    "max_failed_rows": 1,
    "memory": 1,
    "name": "n",
    "num_cpus": 2,
    "num_gpus": 1,
    "priority": 1,
    "python": "python3",
    "requests_per_minute": 600,
    "resources": {"r": 1},
    "tokens_per_minute": 9,
    "weight": 2.0,
    "pool": "p",
    "errors": batch.JsonWriter("errors.jsonl"),
    "retry_on": [OSError],
    "resume_from": 3,
    "batch_size": 2,
    "activate_env": "/venv",
    "if_exists": "overwrite",
}
"""Options that change the specification of the job, whose fields have tests of their own."""
OF_THE_CALL = {"client", "stream", "output"}
"""Options of the call: the server, whether it waits, and whether it submits at all."""


def test_every_option_of_a_job_changes_its_specification() -> None:
    assert JOB_VALUES.keys() | OF_THE_CALL | STEP_VALUES.keys() == JobOptions.__annotations__.keys()
    plain = batch.from_items(INPUT).map(no_rows, rows="any")
    plain._forgotten = False
    outputs: list[OutputWriter] = [batch.JsonWriter("nowhere/out.jsonl")]
    for name, value in JOB_VALUES.items():
        data = batch.from_items(INPUT).map(no_rows, rows="any", **{name: value})  # type: ignore[call-overload]
        data._forgotten = False
        assert data._spec(outputs) != plain._spec(outputs), name
        assert unpack_payload(data._payload()) == unpack_payload(plain._payload())


def spec_with(**options: Any) -> JobSpec:  # noqa: ANN401
    data = batch.from_items(INPUT).map(no_rows, rows="any", **options)
    data._forgotten = False
    return data._spec([batch.JsonWriter("nowhere/out.jsonl")])


def test_the_habits_of_ray_data_and_datasets_mean_what_they_mean_there() -> None:
    for options, expected in {
        "num_proc=3": ({"num_proc": 3}, (3, None)),
        "equal": ({"num_proc": 3, "concurrency": 3}, (3, None)),
        "none": ({"num_proc": None}, (None, None)),
        "pair": ({"concurrency": (2, 8)}, (8, 2)),
        "list": ({"concurrency": [1, 8]}, (8, None)),
        "both": ({"concurrency": (2, 8), "num_proc": 8, "min_concurrency": 2}, (8, 2)),
    }.values():
        spec = spec_with(**options)
        assert (spec.concurrency, spec.min_concurrency) == expected, options
    for pair in ((3, 2), (0, 2), (1, 2, 3), (True, 2), ("1", 2), ()):
        with pytest.raises(ValueError, match=r"it must be MOST, or \(LEAST, MOST\)"):
            spec_with(concurrency=pair)
    with pytest.raises(ValueError, match="min_concurrency is 4 and concurrency, the most workers, is 2"):
        spec_with(concurrency=2, min_concurrency=4)
    with pytest.raises(ValueError, match="concurrency is 0"):
        spec_with(num_proc=0)

    def add(row: dict[str, Any], index: int, by: int, to: int) -> dict[str, Any]:
        return {"sum": index + by + to}

    named = batch.from_items(INPUT).map(add, with_indices=True, fn_args=[1], fn_kwargs={"to": 2})
    named._forgotten = False
    assert unpack_payload(named._payload())["kwargs"] == {"by": 1, "to": 2}


@pytest.mark.parametrize("name", habits.ADVICE)
def test_an_option_of_others_is_refused_with_what_to_use_here(name: str) -> None:
    assert name not in JobOptions.__annotations__
    with pytest.raises(NotSupportedError, match=f"map has no option .'{name}'.*In place of {name}: "):
        spec_with(**{name: 1})
    ours = set(re.findall(r"(\w+)=", habits.ADVICE[name])) - {"rows_per_file", "order"}
    assert ours <= JobOptions.__annotations__.keys()


# Operations.


class Recorder:
    """A service that records the requests of a row and gives answers that depend on them."""

    row_idx = 3

    def __init__(self, said: str) -> None:
        self.requests: list[object] = []
        self._said = said

    async def sample(self, model: str, request: Mapping[str, Any], key: str = "") -> SampleResponse:
        self.requests.append((model, request))
        answer = Answer([ord(letter) for letter in self._said], [-0.5] * len(self._said), "stop")
        return SampleResponse([answer] * request["num_samples"], [None], [[]])

    async def text(self, model: str) -> Recorder:
        return self

    async def context(self, model: str) -> int:
        return 10_000

    def encode(self, text: str, special: bool = False) -> list[int]:
        return list(map(ord, text))

    def chat(self, messages: object) -> list[int]:
        return list(map(ord, json.dumps(messages)))

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


ROW = {
    "p": "hello", "q": "other", "m": [{"role": "user", "content": "hi"}], "t": [1, 2], "output": "the Answer is 7.5",
    "second": "B", "many": ["7", "8"], "r": "7", "r2": "the answer is 7.5", "turns": ["again"], "turns2": [],
    "json": '{"a": 1}',
}  # fmt: skip
SAMPLE = {"model": "m", "prompt": "p"}
BY_MODEL = {"by": "model", "model": "m", "template": "{output}?"}
GRADE = {"by": "numeric", "reference": "r"}
RETRY = {"kind": "retry", "grade": {**GRADE, "output": "text"}, "feedback": "again"}
ROLLOUT = {"model": "m", "messages": "m", "environment": {"kind": "turns", "column": "turns"}}
OPERATIONS: dict[tuple[str, str], tuple[Fields, Fields]] = {
    **{
        ("sample", name): (SAMPLE, {**SAMPLE, name: value})
        for name, value in {
            "model": "n", "prompt": "q", "messages": "m", "tokens_column": "t", "max_tokens": 5, "temperature": 0.5,
            "top_p": 0.5, "top_k": 3, "stop": "x", "seed": 7, "num_samples": 2, "image": "i", "tokens": True,
            "logprobs": True, "prompt_logprobs": True, "topk_prompt_logprobs": 2, "into": "o",
        }.items()
    },
    **{
        ("rollout", name): (ROLLOUT, {**ROLLOUT, name: value})
        for name, value in {
            "model": "n", "messages": "p", "environment": RETRY, "grade": GRADE, "num_rollouts": 2, "max_turns": 1,
            "max_tokens": 5, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "stop": "x", "seed": 7, "into": "o",
        }.items()
    },
    ("grade", "by"): ({"by": "exact", "reference": "r"}, {"by": "contains", "reference": "r"}),
    ("grade", "reference"): (GRADE, {**GRADE, "reference": "p"}),
    ("grade", "output"): (GRADE, {**GRADE, "output": "r"}),
    ("grade", "score"): (GRADE, {**GRADE, "score": "s"}),
    ("grade", "tolerance"): (GRADE, {**GRADE, "tolerance": 1.0}),
    ("grade", "extract"): ({"by": "exact", "reference": "r"}, {"by": "exact", "reference": "r", "extract": "(7)"}),
    ("grade", "ignore_case"): (
        {"by": "exact", "reference": "r2"},
        {"by": "exact", "reference": "r2", "ignore_case": True},
    ),
    ("grade", "pattern"): ({"by": "regex", "pattern": "Answer"}, {"by": "regex", "pattern": "nothing"}),
    ("grade", "schema"): (
        {"by": "json_schema", "output": "json", "schema": {"type": "object"}},
        {"by": "json_schema", "output": "json", "schema": {"type": "array"}},
    ),
    ("grade", "pass_at"): ({**GRADE, "output": "many"}, {**GRADE, "output": "many", "pass_at": [1]}),
    ("grade", "passing"): (
        {**GRADE, "output": "many", "pass_at": [1]},
        {**GRADE, "output": "many", "pass_at": [1], "passing": 0.0},
    ),
    ("grade", "model"): (BY_MODEL, {**BY_MODEL, "model": "n"}),
    ("grade", "template"): (BY_MODEL, {**BY_MODEL, "template": "{p}?"}),
    ("grade", "scores"): (BY_MODEL, {**BY_MODEL, "scores": {"7": 3}}),
    ("grade", "max_tokens"): (BY_MODEL, {**BY_MODEL, "max_tokens": 3}),
    ("grade", "temperature"): (BY_MODEL, {**BY_MODEL, "temperature": 0.5}),
    ("grade", "seed"): (BY_MODEL, {**BY_MODEL, "seed": 7}),
}  # fmt: skip


def operation_class(name: str) -> type[RowOperation]:
    from tinsmith.batch.operations import OPERATION_REGISTRY

    return OPERATION_REGISTRY.find(name)


def test_every_field_of_an_operation_has_a_probe() -> None:
    probed_fields = {
        (name, field.name) for name in ("sample", "grade", "rollout") for field in fields(operation_class(name))
    }
    assert probed_fields == OPERATIONS.keys()


def answer_of(operation: RowOperation, said: str = "7") -> object:
    operation.check()
    service = Recorder(said)
    return asyncio.run(operation.answer(ROW, service)), service.requests  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "field"), OPERATIONS)
def test_a_field_of_an_operation_changes_requests_or_results_or_is_refused(name: str, field: str) -> None:
    without, with_it = OPERATIONS[name, field]
    before = observe(lambda: answer_of(operation_class(name)(**without)))
    after = observe(lambda: answer_of(operation_class(name)(**with_it)))
    assert not before.startswith(("ValueError", "TypeError", "KeyError", "UserError")) and before != after


@pytest.mark.parametrize(
    "by", ["exact", "contains", "numeric", "choice", "json_equal", "f1", "rouge_l", "edit", "regex"]
)
def test_a_grade_refuses_what_its_kind_does_not_use(by: str) -> None:
    required = {"pattern": "a"} if by == "regex" else {"reference": "r"}
    uses = {"exact": "ignore_case", "contains": "ignore_case", "regex": "ignore_case", "numeric": "tolerance"}.get(by)
    for name, value in {"ignore_case": True, "tolerance": 1.0, "temperature": 0.5, "seed": 7}.items():
        grade = batch.Grade(by=by, **required, **{name: value})  # type: ignore[arg-type]
        if name == uses:
            grade.check()
        else:
            with pytest.raises(UserError, match=f"by '{by}' does not use '{name}'"):
                grade.check()
    with pytest.raises(UserError, match="by 'model' does not use 'reference'"):
        batch.Grade(by="model", model="m", template="{output}", reference="r").check()


def test_the_fields_of_environments_change_a_rollout() -> None:
    def rollout(**environment: Any) -> str:  # noqa: ANN401
        values = {**ROLLOUT, "environment": environment}
        return observe(lambda: answer_of(operation_class("rollout")(**values), said="8"))

    assert rollout(kind="turns", column="turns") != rollout(kind="turns", column="turns2")
    assert (
        rollout(**RETRY)
        != rollout(**{**RETRY, "feedback": "no"})
        != rollout(**{**RETRY, "grade": {**GRADE, "output": "text", "tolerance": 2.0}})
    )
