"""Outputs of real jobs that were hard to read: schemas that come late, keys that occur twice, paths in a home."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tinsmith import batch
from tinsmith.batch.client.dataset import JobRefusedError
from tinsmith.batch.client.http import Client
from tinsmith.batch.client.job import Job, JobFailedError

Rows = list[dict[str, Any]]


def late_text(row: dict[str, Any]) -> dict[str, Any]:
    return {"v": None if row["i"] < 30 else "bad"}


def late_column(row: dict[str, Any]) -> dict[str, Any]:
    return {} if row["i"] < 30 else {"v": "late"}


def late_float(row: dict[str, Any]) -> dict[str, Any]:
    return {"v": 1 if row["i"] < 30 else 1.5}


@pytest.mark.extended
@pytest.mark.parametrize("function", [late_text, late_column, late_float])
def test_types_that_come_late_are_in_every_file(function: Any, client: Client, tmp_path: Path) -> None:  # noqa: ANN401
    rows = [{"i": index} for index in range(40)]
    job = batch.from_items(rows).map(
        function, output=batch.ParquetWriter(f"{tmp_path}/out/"), batch_size=10, client=client
    )
    assert isinstance(job, Job) and job.outputs[0].rows == 40
    expected = [{"v": None, **row, **function(row)} for row in rows]
    assert pyarrow.parquet.read_table(f"{tmp_path}/out").to_pylist() == expected
    assert list(job.partial()) == expected
    schemas = {str(pyarrow.parquet.read_schema(path)) for path in Path(f"{tmp_path}/out").glob("*.parquet")}
    assert len(schemas) == 1 and len(list(Path(f"{tmp_path}/out").glob("*.parquet"))) == 4


def add_key(row: dict[str, Any], log: str) -> dict[str, Any]:
    with open(log, "a") as lines:
        lines.write("x")
    return {"__key__": "same" if row["i"] in (1, 7) else f"k{row['i']}", "txt": str(row["i"])}


@pytest.mark.extended
def test_equal_keys_fail_the_publication_and_are_numbered_without_computing_again(
    client: Client, tmp_path: Path
) -> None:
    job = batch.from_items([{"i": index} for index in range(8)]).map(
        add_key, fn_kwargs={"log": f"{tmp_path}/log"}, remove_columns="i", batch_size=4,
        output=batch.WebdatasetWriter(f"{tmp_path}/out"), stream=False, client=client,
    )  # fmt: skip
    assert isinstance(job, Job)
    with pytest.raises(JobFailedError, match="two rows have the key 'same', in rows 0 to 3 and rows 4 to 7"):
        job.wait()
    assert [row["txt"] for row in job.partial()] == [str(index) for index in range(8)]
    job.resume(output=batch.WebdatasetWriter(f"{tmp_path}/out", key=None)).wait()
    reader = batch.WebdatasetReader(f"{tmp_path}/out/")
    assert reader.download_batch(0, 7, "") == [{"__key__": f"{i:08d}", "txt": str(i)} for i in range(8)]
    assert (tmp_path / "log").read_text() == "x" * 8


@pytest.mark.extended
def test_a_script_that_reads_other_columns_is_not_told_that_it_is_done(client: Client, tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"a": [1, 2], "b": [3, 4]}), tmp_path / "in.parquet")

    def run(columns: list[str]) -> Job:
        data = batch.Dataset(batch.ParquetReader(f"{tmp_path}/in.parquet", columns=columns))
        job = data.filter(
            lambda rows: [True] * len(rows), batched=True, output=batch.JsonWriter(f"{tmp_path}/out.jsonl"),
            if_exists="resume", client=client,
        )  # fmt: skip
        assert isinstance(job, Job)
        return job

    first = run(["a"])
    assert int(run(["a"])) == int(first)
    with pytest.raises(JobRefusedError, match=r"its input columns is \['a'\] and this job's is \['b'\]"):
        run(["b"])


def test_a_home_is_that_of_the_user_who_exports(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "in.jsonl").write_text('{"a": 1}\n')
    job = batch.read_json("~/in.jsonl").map(lambda row: {"b": 2}, output=batch.JsonWriter("~/out.jsonl"), client=client)
    assert isinstance(job, Job)
    job.export("~/copy.jsonl")
    for name in ("out", "copy"):
        assert json.loads((tmp_path / f"{name}.jsonl").read_text()) == {"a": 1, "b": 2}
