"""Rows to and from Ray Data as far as they need no Ray; `tests/cluster/test_ray_data.py` has Ray itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from tinsmith import batch
from tinsmith.batch.client import ray_data
from tinsmith.batch.client.dataset import Dataset
from tinsmith.batch.formats.registry import canonical_json, request_dict
from tinsmith.errors import NotSupportedError, UserError

ROWS: list[dict[str, Any]] = [{"n": index, "text": f"t{index}"} for index in range(300)]


class FakeDataset:
    """A data set of Ray with the used part of its interface, which counts its runs."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.context = SimpleNamespace(execution_options=SimpleNamespace(preserve_order=False))
        self.runs = 0
        self._rows = rows

    def iter_batches(self, *, batch_size: int, batch_format: str, prefetch_batches: int) -> Iterator[pa.Table]:
        assert self.context.execution_options.preserve_order and batch_format == "pyarrow" and prefetch_batches == 0
        self.runs += 1
        for first in range(0, len(self._rows), batch_size):
            yield pa.Table.from_pylist(self._rows[first : first + batch_size])


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_data_set_is_run_once_when_its_rows_are_needed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_data, "PART_ROWS", 64)
    source = FakeDataset(ROWS)
    data = Dataset.from_ray(source)
    mapped = data.map(lambda row: {"twice": row["n"] * 2})
    assert source.runs == 0 and "RayReader" in repr(data)
    assert mapped.take(2) == [{**ROWS[0], "twice": 0}, {**ROWS[1], "twice": 2}]
    assert len(data) == 300 and data.take(300) == ROWS
    spec = mapped._spec([batch.JsonWriter(f"{directory}/o.jsonl")])
    reader = batch.InputReader.from_dict(spec.batch_input_format)
    assert type(reader) is batch.ParquetReader and reader.download_batch(0, 299, "") == ROWS
    assert source.runs == 1 and not source.context.execution_options.preserve_order
    (file,) = [path for path in directory.rglob("*") if path.is_file() and path.name != ".swept"]
    assert file.parent.name.startswith("tinsmith-batch-") and file.name.startswith("ray-"), "where the cache is swept"


def test_rows_are_put_where_the_user_says_but_over_nothing(directory: Path) -> None:
    path = f"{directory}/rows.parquet"
    Dataset.from_ray(FakeDataset(ROWS), path).take(1)
    assert batch.load(path).take(300) == ROWS
    with pytest.raises(FileExistsError, match=r"rows\.parquet"):
        Dataset.from_ray(FakeDataset(ROWS), path).take(1)
    with pytest.raises(UserError, match=r"must be a file that ends in \.parquet"):
        Dataset.from_ray(FakeDataset(ROWS), f"{directory}/rows/")
    with pytest.raises(UserError, match="is a list; from_ray takes a data set of Ray Data"):
        Dataset.from_ray(ROWS)


def test_a_range_is_read_as_a_job_reads_it(directory: Path) -> None:
    lines = directory / "rows.jsonl"
    lines.write_text("".join(f'{{"n": {index}}}\n' for index in range(300)))
    reader = canonical_json(request_dict(batch.JsonReader(str(lines))))
    spans = [ray_data.read_span({"id": span}, reader, 290) for span in range(3)]
    assert [len(span) for span in spans] == [ray_data.SPAN_ROWS, ray_data.SPAN_ROWS, 290 - 2 * ray_data.SPAN_ROWS]
    assert [row["n"] for span in spans for row in span] == list(range(290))


@pytest.mark.filterwarnings("ignore:this data set was mapped")
def test_what_ray_does_not_read_is_refused_by_name(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shout(row: dict[str, Any]) -> dict[str, Any]:
        return row

    with pytest.raises(NotSupportedError, match=r"has the steps \['shout'\], which jobs run; write it to a file"):
        batch.from_items(ROWS).map(shout).to_ray()
    with pytest.raises(NotSupportedError, match="may change while Ray reads them"):
        batch.read_sql(f"sqlite:///{directory}/a.db", "t").to_ray()
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(UserError, match=r"pip install 'ray\[data\]'"):
        batch.from_items(ROWS).to_ray()
