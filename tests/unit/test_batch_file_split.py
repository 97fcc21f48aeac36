"""Outputs as directories of files with `rows_per_file` rows, on every store, which are one data set again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.buckets import bucket
from tinsmith import batch
from tinsmith.batch.formats import publishing
from tinsmith.batch.types import RowRange
from tinsmith.errors import UserError
from tinsmith.storage.locations import open_store

WRITERS = {"jsonl": batch.JsonWriter, "csv": batch.CsvWriter, "parquet": batch.ParquetWriter}


@pytest.fixture(params=["file", "s3"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield str(tmp_path)
        return
    with bucket() as objects:
        yield f"{objects.url}/d"


def text_of(index: int) -> str:
    return f"t{index}\u2028\r\n" if index % 3 == 0 else f"t{index}"


def publish_rows(writer: batch.OutputWriter, rows: int, batch_size: int, base: str) -> batch.OutputInfo:
    parts = []
    for first in range(0, rows, batch_size):
        end = min(first + batch_size, rows)
        batch_rows = [{"text": text_of(index)} for index in range(first, end)]
        parts.append(writer.write_part(batch_rows, RowRange(first, end - 1), f"{base}/.tinsmith_batch_tmp/1/a"))
    return writer.publish(parts, f"{base}/.tinsmith_batch_tmp/1/out-0", "error")


@pytest.mark.matrix(6)
@pytest.mark.parametrize("ending", WRITERS)
@pytest.mark.parametrize(("rows", "batch_size", "rows_per_file"), [(10, 3, 4), (10, 10, 1), (8, 3, 4), (3, 2, 100)])
def test_a_directory_of_numbered_files_is_read_as_one_data_set(
    ending: str, rows: int, batch_size: int, rows_per_file: int, base: str
) -> None:
    writer = WRITERS[ending](f"{base}/o/", rows_per_file=rows_per_file)
    output = publish_rows(writer, rows, batch_size, base)
    files = -(-rows // rows_per_file)
    store, key = open_store(f"{base}/o/")
    names = sorted(name.rpartition("/")[2] for name in store.list(key))
    assert names == ["_SUCCESS", "_manifest.json", *(f"part-{index:05d}.{ending}" for index in range(files))]
    expected = [{"text": text_of(index)} for index in range(rows)]
    assert output.rows == rows and list(writer.read_published(output)) == expected
    assert publish_rows(writer, rows, batch_size, base) == output, "publishing again changes nothing"
    data = batch.load(f"{base}/o/")
    assert len(data) == rows and data.reader.download_batch(0, rows - 1, "") == expected
    sizes = [len(batch.load(f"{base}/o/part-{index:05d}.{ending}")) for index in range(files)]
    assert sizes == [rows_per_file] * (rows // rows_per_file) + [rows % rows_per_file] * bool(rows % rows_per_file)


def test_a_directory_without_a_slash_and_one_of_no_format(tmp_path: Path) -> None:
    publish_rows(batch.JsonWriter(f"{tmp_path}/o/", rows_per_file=2), 3, 2, str(tmp_path))
    assert len(batch.load(f"{tmp_path}/o")) == 3
    (tmp_path / "o" / "a.csv").write_text("a\n1\n")
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"files of the formats \['csv', 'json'\]; use batch\.read_json"):
        batch.load(f"{tmp_path}/o")
    with pytest.raises(UserError, match="no file of a format"):
        batch.load(f"{tmp_path}/none/")


@pytest.mark.parametrize("writer_class", WRITERS.values())
def test_rows_per_file_is_a_number_with_a_directory(writer_class: type[batch.JsonWriter]) -> None:
    for rows_per_file in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match=r"rows_per_file is .* must be a whole number from 1"):
            writer_class("o/", rows_per_file=rows_per_file)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rows_per_file is 2 and the path is 'o\.x'; end it with a slash"):
        writer_class("o.x", rows_per_file=2)
    assert writer_class("o/", rows_per_file=2).to_dict()["rows_per_file"] == 2
    assert "rows_per_file" not in replace(writer_class("o/", rows_per_file=2), path="o.x", rows_per_file=None).to_dict()


def test_names_of_more_than_a_hundred_thousand_files_sort_in_their_order() -> None:
    assert publishing.number_format(100_000, ".csv").format(99_999) == "part-99999.csv"
    names = publishing.number_format(100_001, ".csv")
    assert names.format(99_999) == "part-099999.csv" < names.format(100_000) == "part-100000.csv"


def test_no_rows_are_a_directory_without_files(tmp_path: Path) -> None:
    for ending, writer_class in WRITERS.items():
        writer = writer_class(f"{tmp_path}/{ending}/", rows_per_file=2)
        output = writer.publish([], f"{tmp_path}/s-{ending}", "error")
        assert output.rows == 0 and list(writer.read_published(output)) == []
        assert json.loads((tmp_path / ending / "_manifest.json").read_text())["files"] == []
