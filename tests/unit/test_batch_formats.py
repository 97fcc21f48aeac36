"""Readers and writers: round trips of every format, unusual files and values, and bounds of memory and work."""

from __future__ import annotations

import datetime
import gc
import gzip
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import zstandard

from support.batch_files import REQUEST
from support.payloads import spans_of
from tinsmith import batch
from tinsmith.batch.formats import publishing, registry, row_sizes
from tinsmith.batch.formats.encoding import encode
from tinsmith.batch.formats.part_lists import CommittedParts
from tinsmith.batch.formats.registry import InputReader, OutputWriter
from tinsmith.batch.types import JobSpec, OutputInfo, PartInfo, RowRange, part_base, part_name
from tinsmith.batch.worker import io_operations
from tinsmith.errors import CorruptFilesError, UserError
from tinsmith.storage.stores import LocalStore

Rows = list[dict[str, Any]]


def publish_rows(
    writer: OutputWriter, rows: Sequence[dict[str, Any] | None], tmp_path: Path, batch_size: int = 3
) -> OutputInfo:
    """Publish rows as a job with this batch size would."""
    parts = [
        writer.write_part(
            rows[start : start + batch_size], RowRange(start, min(start + batch_size, len(rows)) - 1), base
        )
        for start in range(0, len(rows), batch_size)
        if (base := f"{tmp_path}/staging/attempt-{start}")
    ]
    return writer.publish(parts, f"{tmp_path}/staging", "error")


def all_rows(reader: InputReader) -> Rows:
    return reader.download_batch(0, len(reader) - 1, "")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (b'{"a":1}\n{"a":2}\n{"a":3}\n', 3),
        (b'{"a":1}\n{"a":2}\n{"a":3}', 3),
        (b'{"a":1}', 1),
        (b"", 0),
        (b"\n \r\n\n", 0),
        (b'\n{"a":1}\n\n  \t\n{"a":2}\n\n', 2),
        (b'{"a":1}\r\n{"a":2}\r\n', 2),
        (b'\xef\xbb\xbf{"a":1}\n{"a":2}\n', 2),
        (b'\xef\xbb\xbf\n\n{"a":1}', 1),
        (b'  {"a":1}\n\t{"a":2}', 2),
        (b'[{"a":1},\n {"a":2}\n]\n', 2),
        (b" [ ]", 0),
        (b'{"a":"\xc2\x85\xe2\x80\xa8"}\n', 1),
        (b"".join(b'{"a":%d}\n' % index for index in range(10_000)), 10_000),
    ],
)
@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_every_record_is_a_row_with_any_end_of_the_file(text: bytes, count: int, packing: str, tmp_path: Path) -> None:
    name = tmp_path / f"in.json{packing}"
    name.write_bytes({"": lambda data: data, ".gz": gzip.compress, ".zst": zstandard.compress}[packing](text))
    reader = batch.JsonReader(str(name))
    assert len(reader) == count
    if count:
        rows = all_rows(reader)
        assert len(rows) == count
        assert [reader.download_batch(index, index, "") for index in (0, count - 1)] == [rows[:1], rows[-1:]]


def test_lines_across_pieces_of_a_large_file_are_found(tmp_path: Path) -> None:
    rows = [{"n": index, "text": "x" * (index * 7919 % 300_000)} for index in range(80)]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert path.stat().st_size > 8_000_000
    reader = batch.JsonReader(str(path))
    assert len(reader) == 80 and all_rows(reader) == rows
    assert reader.download_batch(20, 45, "") == rows[20:46]


def test_a_batch_reads_its_own_bytes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"n":1{index:06d}}}\n' for index in range(100_000)))
    assert len(batch.JsonReader(str(path))) == 100_000
    read: list[int] = []
    ranges = LocalStore.get_ranges

    def count_bytes(store: LocalStore, key: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        chunks = ranges(store, key, spans)
        read.append(sum(map(len, chunks)))
        return chunks

    monkeypatch.setattr(LocalStore, "get_ranges", count_bytes)
    monkeypatch.setattr(LocalStore, "chunks", None)  # a second reader does not index the file again
    reader = batch.JsonReader(str(path))
    for start in (0, 50_000, 99_990):
        reader.download_batch(start, start + 9, "")
    assert max(read) <= 200


def test_a_bad_line_is_named_and_the_others_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"a":1}\n{"a":\n[1]\n{"a":4}')
    reader = batch.JsonReader(str(path))
    assert len(reader) == 4
    for row, message in [(1, "row 1 of .*in.jsonl is not JSON"), (2, "row 2 of .* is not an object")]:
        with pytest.raises(ValueError, match=message):
            reader.download_batch(row, row, "")
    assert reader.download_batch(3, 3, "") == [{"a": 4}]
    with pytest.raises(IndexError):
        reader.download_batch(3, 4, "")


def test_many_files_are_one_input_in_order_of_their_names(tmp_path: Path) -> None:
    for name, text in {"b": '{"n":3}\n{"n":4}', "a": '{"n":1}\n\n{"n":2}\n', "c": "", "d": '{"n":5}'}.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    for path in (f"{tmp_path}/*.jsonl", f"{tmp_path}/"):
        reader = batch.JsonReader(path)
        assert [row["n"] for row in all_rows(reader)] == [1, 2, 3, 4, 5]
        assert [row["n"] for row in reader.download_batch(1, 3, "")] == [2, 3, 4]
    with pytest.raises(FileNotFoundError):
        len(batch.JsonReader(f"{tmp_path}/*.parquet"))


def test_two_outputs_in_one_directory_stay_apart(tmp_path: Path) -> None:
    full, meta = batch.JsonWriter(f"{tmp_path}/full.jsonl"), batch.JsonWriter(f"{tmp_path}/meta.jsonl", column="score")
    rows = [{"text": f"t{index}", "score": index} for index in range(4)]
    bases = [part_base(writer.path, 1, index, 0) for index, writer in enumerate((full, meta))]
    parts = [writer.write_part(rows, RowRange(0, 3), base) for writer, base in zip((full, meta), bases, strict=True)]
    for writer, part in zip((full, meta), parts, strict=True):
        writer.publish([part], f"{tmp_path}/staging", "error")
    assert all_rows(batch.JsonReader(full.path)) == rows
    assert all_rows(batch.JsonReader(meta.path)) == [{"score": index} for index in range(4)]


def test_json_holds_what_real_rows_hold(tmp_path: Path) -> None:
    row = {
        "text": "\u00e4 \u2028 \U0001f600",
        "array": np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::2],
        "scalar": np.int64(7),
        "half": np.float16(0.5),
        "nan": float("nan"),
        "date": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
        "bytes": b"\x00\xff",
        "large": 2**70,
        "path": Path("/a"),
    }
    publish_rows(batch.JsonWriter(f"{tmp_path}/o.jsonl"), [{**row, "large": 1}, {"large": 2**70}], tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    assert lines[0] == {
        "text": row["text"],
        "array": [[0.0, 2.0], [3.0, 5.0]],
        "scalar": 7,
        "half": 0.5,
        "nan": None,
        "date": "2026-01-02T03:04:05+00:00",
        "bytes": "AP8=",
        "large": 1,
        "path": "/a",
    }
    assert lines[1] == {"large": 2**70}
    with pytest.raises(TypeError, match="column 'bad'"):
        batch.JsonWriter("o.jsonl").check({"good": 1, "bad": object()})
    with pytest.raises(KeyError, match="no column 'score'"):
        batch.JsonWriter("o.jsonl", column=["score"]).check({"text": 1})


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "csv", "parquet", "txt", "text.gz"])
def test_rows_come_back_as_they_went(ending: str, tmp_path: Path) -> None:
    rows: Rows = [{"text": f'{index}, "a" \u00e4'} for index in range(10)]
    format = {"csv": "csv", "parquet": "parquet", "txt": "text", "text.gz": "text"}.get(ending, "json")
    path = f"{tmp_path}/o.{ending}"
    writer = batch.OutputWriter.from_dict({"format": format, "path": path})
    info = publish_rows(writer, [*rows[:5], None, *rows[5:]], tmp_path)
    assert (info.rows, info.bytes) == (10, Path(path).stat().st_size)
    reader = batch.InputReader.from_dict({"format": format, "path": path})
    assert all_rows(reader) == rows
    assert reader.download_batch(4, 6, "") == rows[4:7]
    assert batch.InputReader.from_dict(reader.to_dict()) == reader


def test_integers_of_json_have_any_size(tmp_path: Path) -> None:
    rows: Rows = [{"n": 2**70, "in": [{"m": -(2**63) - 1}, 2**64]}, {"n": 1e300, "in": 2**53 + 1}]
    publish_rows(batch.JsonWriter(f"{tmp_path}/o.jsonl"), rows, tmp_path)
    assert all_rows(batch.JsonReader(f"{tmp_path}/o.jsonl")) == rows
    (tmp_path / "array.json").write_text(json.dumps(rows))
    assert all_rows(batch.JsonReader(f"{tmp_path}/array.json")) == rows
    writer = batch.JsonWriter(f"{tmp_path}/parts.jsonl")
    read = list(writer.read_part(writer.write_part(rows, RowRange(0, 1), f"{tmp_path}/parts")))
    assert read == rows and [type(row["n"]) for row in read] == [int, float]


def test_a_timestamp_of_pandas_is_a_date_in_json() -> None:
    import pandas as pd

    row = {"at": pd.Timestamp("2020-01-02 03:04"), "missing": pd.NaT}
    assert json.loads(encode(row)) == {"at": "2020-01-02T03:04:00", "missing": None}


def test_a_long_value_of_a_csv_part_is_read_in_a_new_process(tmp_path: Path) -> None:
    code = f"""
from tinsmith import batch
from tinsmith.batch.types import RowRange
writer = batch.CsvWriter({f"{tmp_path}/o.csv.gz"!r})
rows = [{{"a": "x" * 200_000}}]
part = writer.write_part(rows, RowRange(0, 0), {f"{tmp_path}/part"!r})
output = writer.publish([part], {f"{tmp_path}/staging"!r}, "error")
assert list(writer.read_part(part)) == list(writer.read_published(output)) == rows
"""
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.csv", b'a\n"open\n'),
        ("a.csv", b"a\n\xe9\n"),
        ("a.parquet", b"no"),
        ("a.jsonl.gz", b"no"),
        ("a.jsonl.gz", gzip.compress(b'{"a":1}\n' * 100, mtime=0)[:-9]),
        ("a.jsonl.zst", b"no"),
    ],
)
def test_a_file_that_is_not_of_its_format_is_a_sentence_with_its_name(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    reader = batch.Dataset(f"{tmp_path}/{name}").reader
    spec = JobSpec("", reader.to_dict(), [batch.JsonWriter(f"{tmp_path}/o.jsonl").to_dict()])
    (message,) = io_operations.run(spec, 1, {"op": "plan"})
    assert message["error"].startswith(f"{tmp_path}/{name} cannot be read: ") and "\n" not in message["error"]


def test_the_parts_of_a_running_job_are_read_as_rows(tmp_path: Path) -> None:
    rows: Rows = [{"text": f"{index}"} for index in range(3)]
    for format in ("json", "csv", "parquet", "text"):
        writer = batch.OutputWriter.from_dict({"format": format, "path": f"{tmp_path}/o.{format}"})
        part = writer.write_part(rows, RowRange(0, 2), f"{tmp_path}/{format}")
        assert list(writer.read_part(part)) == rows


def test_no_rows_are_an_output_without_rows(tmp_path: Path) -> None:
    for ending in ("jsonl", "jsonl.gz", "csv", "parquet", "txt"):
        writer = batch.OutputWriter.from_dict(
            {
                "format": {"txt": "text"}.get(ending, ending.removesuffix(".gz").replace("jsonl", "json")),
                "path": f"{tmp_path}/o.{ending}",
            }
        )
        assert writer.publish([], f"{tmp_path}/staging", "error").rows == 0
        assert len(batch.Dataset(f"{tmp_path}/o.{ending}")) == 0


def test_csv_takes_the_columns_of_all_rows(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": 'x,\n"y'}, {"a": None}, {"a": [1, 2], "c": True}, {"c": 0.5, "b": b"\0"}]
    publish_rows(batch.CsvWriter(f"{tmp_path}/o.csv"), rows, tmp_path, batch_size=2)
    assert all_rows(batch.CsvReader(f"{tmp_path}/o.csv")) == [
        {"a": "1", "b": 'x,\n"y', "c": ""},
        {"a": "", "b": "", "c": ""},
        {"a": "[1,2]", "b": "", "c": "true"},
        {"a": "", "b": "AA==", "c": "0.5"},
    ]


@pytest.mark.parametrize("ending", ["csv", "csv.gz"])
def test_a_csv_line_with_too_many_or_too_few_values_fails_its_row(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"in.{ending}"
    data = b'\na,b\n1\n\n"x\ny",2\n1,2,3\n4,5\n'
    path.write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
    result = batch.read_csv(str(path)).map(lambda row: {"c": "d"}).dry_run()
    assert result.rows == [{"a": "x\ny", "b": "2", "c": "d"}, {"a": "4", "b": "5", "c": "d"}]
    assert [(error.idx, error.error_type, error.message) for error in result.errors] == [
        (0, "ValueError", f"line 3 of {path} has 1 values for 2 columns"),
        (2, "ValueError", f"line 7 of {path} has 3 values for 2 columns"),
    ]


def test_parquet_takes_the_wider_type_and_reads_row_groups(tmp_path: Path) -> None:
    rows = [{"n": 1, "v": None}, {"n": 2, "v": None}, {"n": 0.5, "v": [1, 2]}, {"v": [3], "w": np.float32(2)}]
    publish_rows(batch.ParquetWriter(f"{tmp_path}/o.parquet"), rows, tmp_path, batch_size=2)
    assert all_rows(batch.ParquetReader(f"{tmp_path}/o.parquet")) == [
        {"n": 1.0, "v": None, "w": None},
        {"n": 2.0, "v": None, "w": None},
        {"n": 0.5, "v": [1, 2], "w": None},
        {"n": None, "v": [3], "w": 2.0},
    ]
    info = publish_rows(batch.ParquetWriter(f"{tmp_path}/dir/"), [{"n": index} for index in range(7)], tmp_path / "d")
    reader = batch.ParquetReader(f"{tmp_path}/dir/", columns=["n"])
    assert info.rows == len(reader) == 7 and reader.download_batch(2, 6, "") == [{"n": index} for index in range(2, 7)]


def test_images_are_named_after_their_rows_and_come_back(tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    rows: list[dict[str, Any] | None] = [{"image": pixels}, None, {"image": Image.fromarray(pixels)}]
    publish_rows(batch.ImageWriter(f"{tmp_path}/out"), rows, tmp_path)
    assert sorted(path.name for path in (tmp_path / "out").glob("*.png")) == ["00000000.png", "00000002.png"]
    read_rows = all_rows(batch.ImageReader(f"{tmp_path}/out/", decode=True))
    assert len(read_rows) == 2 and all(np.array_equal(np.asarray(row["image"]), pixels) for row in read_rows)
    encoded = all_rows(batch.ImageReader(f"{tmp_path}/out/"))[0]
    batch.ImageWriter("x", kind="webp").check(encoded)
    for bad in ({"image": "text"}, {"image": b"no image"}, {"image": np.zeros(3)}, {}):
        with pytest.raises((ValueError, TypeError, KeyError), match="image"):
            batch.ImageWriter("x").check(bad)


def test_webdataset_samples_come_back(tmp_path: Path) -> None:
    rows: Rows = [
        {"txt": f"t{index}", "cls": index, "json": {"a": [index]}, "seg.bin": bytes([index])} for index in range(5)
    ]
    publish_rows(batch.WebdatasetWriter(f"{tmp_path}/out"), rows, tmp_path, batch_size=2)
    read_rows = all_rows(batch.WebdatasetReader(f"{tmp_path}/out/*.tar"))
    assert read_rows == [{"__key__": f"{index:08d}", **row} for index, row in enumerate(rows)]
    with pytest.raises(TypeError, match="column 'text'"):
        batch.WebdatasetWriter("x").check({"text": "belongs in txt"})


def test_huggingface_data_sets_from_memory_and_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rows: Rows = [{"text": f"t{index}", "n": index} for index in range(5)]
    dataset = datasets.Dataset.from_list(rows)
    assert all_rows(batch.from_huggingface(dataset).reader) == rows
    datasets.DatasetDict({"train": dataset}).save_to_disk(str(tmp_path / "saved"))
    reader = batch.HuggingFaceReader(str(tmp_path / "saved"), split="train")
    assert len(reader) == 5 and reader.download_batch(1, 2, "") == rows[1:3]
    with pytest.raises(UserError, match="splits"):
        len(batch.HuggingFaceReader(str(tmp_path / "saved"), split="test"))


def test_openai_batch_files_are_checked_whole_and_answered_by_custom_id(tmp_path: Path) -> None:
    good = {**REQUEST, "custom_id": "a"}
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(good))
    assert all_rows(batch.OpenAIBatchReader(str(path))) == [good]
    path.write_text("\n".join(map(json.dumps, [good, good])))
    with pytest.raises(UserError, match="earlier request"):
        len(batch.OpenAIBatchReader(str(path)))
    publish_rows(
        batch.OpenAIBatchWriter(f"{tmp_path}/o.jsonl"), [{"custom_id": "a", "response": {"status_code": 200}}], tmp_path
    )
    [line] = all_rows(batch.JsonReader(f"{tmp_path}/o.jsonl"))
    assert line["id"].startswith("batch_req_") and line["error"] is None and line["custom_id"] == "a"
    result = {"custom_id": "a", "response": {"status_code": 200}}
    again, other = (json.loads(batch.OpenAIBatchWriter(f"{tmp_path}/{name}.jsonl").line(result)) for name in "op")
    assert again["id"] == line["id"] != other["id"], "an id is of one request of one output"
    with pytest.raises(ValueError, match="either"):
        batch.OpenAIBatchWriter("o.jsonl").check({"custom_id": "a"})


# Custom formats: a reader, and a writer with the older methods.


@registry.INPUT_READER_REGISTRY.type_register(name="range")
@dataclass
class RangeReader(InputReader):
    count: int = 10

    def __len__(self) -> int:
        return self.count

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[dict[str, Any]]:
        return [{"id": index} for index in range(start_idx, end_idx + 1)]


@registry.OUTPUT_WRITER_REGISTRY.type_register(name="merged")
@dataclass
class MergedWriter(OutputWriter):
    def upload_batch(self, results: list[dict[str, Any]], start_idx: int, end_idx: int, job_id: str) -> None:
        directory = Path(self.path + ".parts")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{start_idx:08d}").write_text("".join(f"{row['id']}\n" for row in results))

    def reduce_results(self, job_id: str) -> None:
        parts = sorted(Path(self.path + ".parts").iterdir())
        Path(self.path).write_text("".join(part.read_text() for part in parts))

    def cleanup(self, job_id: str) -> None:
        import shutil

        shutil.rmtree(self.path + ".parts")


def test_custom_formats_travel_as_source(tmp_path: Path) -> None:
    data = RangeReader("numbers", count=4).to_dict()
    assert data["format"] == "range" and "class RangeReader" in data["_class_source"]
    assert "MergedWriter" not in data["_class_source"], "only the class, not its file"
    with pytest.raises(UserError, match="changed after it was sent"):
        batch.InputReader.from_dict({**data, "_class_source": data["_class_source"] + "#"})
    script = (
        "import json, sys; from tinsmith import batch\n"
        "r = batch.InputReader.from_dict(json.loads(sys.argv[1])); print(len(r), r.download_batch(1, 2, ''))"
    )
    ran = subprocess.run([sys.executable, "-c", script, json.dumps(data)], capture_output=True, text=True, check=True)
    assert ran.stdout == "4 [{'id': 1}, {'id': 2}]\n"


def test_a_writer_of_the_older_form_never_touches_the_output_before_it_is_whole(tmp_path: Path) -> None:
    data = MergedWriter(f"{tmp_path}/out/numbers.txt").to_dict()
    writer = batch.OutputWriter.from_dict(data)
    rows: list[dict[str, Any] | None] = [{"id": index} for index in range(5)]
    staging = f"{tmp_path}/out/staging"
    parts = [
        writer.write_part(rows[:2], RowRange(0, 1), f"{staging}/a"),
        writer.write_part([rows[2], None, rows[4]], RowRange(2, 4), f"{staging}/a"),
    ]
    assert not (tmp_path / "out" / "numbers.txt").exists()
    info = writer.publish(parts, staging, "error")
    assert (tmp_path / "out" / "numbers.txt").read_text() == "0\n1\n2\n4\n"
    assert writer.publish(parts, staging, "error").sha256 == info.sha256
    with pytest.raises(FileExistsError):
        writer.publish(parts[:1], staging, "error")


def test_readers_and_writers_that_do_not_exist_are_refused_by_name() -> None:
    for data, message in [
        ({"format": "xml", "path": "a"}, "no reader 'xml'"),
        ({"format": "json", "path": "a", "colour": 1}, "no field .'colour'."),
        ({"format": "json"}, "needs the fields .'path'."),
    ]:
        with pytest.raises(UserError, match=message):
            batch.InputReader.from_dict(data)
    with pytest.raises(ValueError, match="must name a file"):
        batch.JsonWriter("out/")


def spec_of(tmp_path: Path, **fields: object) -> JobSpec:
    reader = batch.ItemsReader(items=[{"text": "x" * 4 * index} for index in range(7)])
    return JobSpec.from_dict(
        {
            "batch_serialized_fn": "",
            "batch_input_format": reader.to_dict(),
            "batch_output_formats": [batch.JsonWriter(f"{tmp_path}/o.jsonl").to_dict()],
            "batch_size": 3,
            **fields,
        }
    )


def test_batches_cover_each_row_once(tmp_path: Path) -> None:
    assert spans_of(spec_of(tmp_path)) == [(0, 2), (3, 5), (6, 6)]
    assert spans_of(spec_of(tmp_path, batch_size=100)) == [(0, 6)]
    empty = batch.ItemsReader(items=[]).to_dict()
    assert spans_of(spec_of(tmp_path, batch_input_format=empty)) == []
    (tmp_path / "images").mkdir()
    images = batch.ImageReader(f"{tmp_path}/images/").to_dict()
    with pytest.raises(UserError, match="a ImageReader does not know the sizes of its rows; leave batch_tokens out"):
        spans_of(spec_of(tmp_path, batch_input_format=images, batch_tokens=10))
    (tmp_path / "o.jsonl").write_text("")
    with pytest.raises(FileExistsError, match="if_exists"):
        spans_of(spec_of(tmp_path))


def test_batches_by_tokens_hold_no_more_than_they_may(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    sizes = [10, 10, 30, 400, 10, 10, 10, 10]
    path.write_text("".join(json.dumps({"t": "x" * size}) + "\n" for size in sizes))
    reader = batch.JsonReader(str(path))
    tokens = list(reader.row_sizes())
    spans = spans_of(spec_of(tmp_path, batch_input_format=reader.to_dict(), batch_tokens=20))
    assert [index for start, end in spans for index in range(start, end + 1)] == list(range(8))
    assert all(end == start or sum(tokens[start : end + 1]) <= 20 for start, end in spans)
    assert (3, 3) in spans and all(end - start < 3 for start, end in spans) and len(spans) < 8


def test_rows_in_memory_have_the_sizes_of_a_file_with_them(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"t": "x" * size, "é": [size, None]} for size in (0, 3, 10, 400, 4, 7)]
    (tmp_path / "in.jsonl").write_bytes(b"".join(encode(row) + b"\n" for row in rows))
    file, items = batch.JsonReader(f"{tmp_path}/in.jsonl"), batch.ItemsReader(items=rows)
    assert list(items.row_sizes()) == list(file.row_sizes())
    spans = [
        spans_of(spec_of(tmp_path, batch_input_format=reader.to_dict(), batch_tokens=20)) for reader in (file, items)
    ]
    assert spans[0] == spans[1] and len(spans[0]) == 4


def test_sizes_of_tables_and_archives_follow_their_values(tmp_path: Path) -> None:
    import datasets

    texts = ["x" * size for size in (0, 40, 4000, 400)]
    nested = [{"a": [text], "b": None, "c": [[1.5], []], "d": {"e": text, "f": 1}} for text in texts]
    datasets.Dataset.from_list(nested).save_to_disk(f"{tmp_path}/hf")
    table_sizes = list(batch.HuggingFaceReader(f"{tmp_path}/hf").row_sizes())
    assert [size - table_sizes[0] for size in table_sizes] == [0, 20, 2000, 200], "each text is there twice"
    writer = batch.WebdatasetWriter(f"{tmp_path}/tars/")
    rows = [{"txt": text, "cls": 3} for text in texts]
    part = writer.write_part(rows, RowRange(0, 3), f"{tmp_path}/parts")
    writer.publish([part], f"{tmp_path}/staging", "error")
    assert list(batch.WebdatasetReader(f"{tmp_path}/tars/").row_sizes()) == [1 + (len(text) + 1) // 4 for text in texts]


@pytest.mark.parametrize(
    ("values", "num_bytes"),
    [
        (["ab", None, "é"], [2, 0, 2]),
        ([b"abc", b"", None], [3, 0, 0]),
        ([1, 2, None], [8, 8, 8]),
        ([["a", "bcd"], [], None], [4, 0, 0]),
        ([[[1], [2, 3]], [[]], None], [24, 0, 0]),
        ([{"a": "xy", "b": 1}, {"a": None, "b": 2}], [10, 8]),
        ([None, None], [0, 0]),
        ([True, False], [1, 1]),
    ],
)
def test_the_bytes_of_values_are_those_of_their_buffers(values: list[Any], num_bytes: list[int]) -> None:
    import pyarrow as pa

    sliced = pa.concat_arrays([pa.array(values), pa.array(values)]).slice(1)
    assert row_sizes._bytes_of(sliced).tolist() == [*num_bytes[1:], *num_bytes]
    fixed = pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2))
    assert row_sizes._bytes_of(fixed).tolist() == [4, 4]
    assert row_sizes._bytes_of(pa.array(["aa", "b", "aa"]).dictionary_encode()).tolist() == [2, 1, 2]


def test_a_part_that_changed_is_not_published(tmp_path: Path) -> None:
    for format in ("json", "csv", "parquet"):
        writer = batch.OutputWriter.from_dict({"format": format, "path": f"{tmp_path}/o.{format}"})
        part = writer.write_part([{"a": 1}], RowRange(0, 0), f"{tmp_path}/{format}")
        with pytest.raises(CorruptFilesError):
            writer.publish([PartInfo(part.path, 1, part.bytes, "0" * 64)], f"{tmp_path}/staging", "error")
        assert not Path(writer.path).exists()


def test_errors_are_an_output_of_their_own_and_staging_goes(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, batch_error_format=batch.JsonWriter(f"{tmp_path}/err.jsonl").to_dict())
    writer = batch.OutputWriter.from_dict(spec.batch_output_formats[0])
    part = writer.write_part([{"a": 1}], RowRange(0, 0), part_base(writer.path, 7, 0, 1))
    assert io_operations.publish_output(spec, 0, 7, [part]).rows == 1
    info = io_operations.publish_errors(spec, 7, [{"idx": 3, "message": "bad"}])
    assert info and info.rows == 1
    for path in (writer.path, info.path):
        io_operations.delete_staging(path, 7)
        io_operations.delete_staging(path, 7)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["err.jsonl", "o.jsonl"]


def test_names_of_parts_grow_beyond_eight_digits() -> None:
    assert part_name(RowRange(0, 31), "jsonl") == "batch_00000000-00000031.jsonl"
    assert part_name(RowRange(123456789, 123456790), "x") == "batch_123456789-123456790.x"


def test_publishing_a_hundred_megabytes_takes_no_memory_to_speak_of(tmp_path: Path) -> None:
    script = f"""
import hashlib, json, os, resource
from tinsmith.batch.types import PartInfo, RowRange
from tinsmith.batch.formats.part_lists import CommittedParts
from tinsmith.batch.formats.lines import JsonWriter
writer = JsonWriter({str(tmp_path)!r} + "/o.jsonl")
row = [{{"text": "x" * 1000}}] * 1024
parts = [writer.write_part(row, RowRange(n * 1024, n * 1024 + 1023), {str(tmp_path)!r} + "/p") for n in range(100)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
info = writer.publish(parts, {str(tmp_path)!r} + "/s", "error")
print(json.dumps([info.rows, info.bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before]))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    rows, size, kibibytes = json.loads(ran.stdout)
    assert rows == 102_400 and size == (tmp_path / "o.jsonl").stat().st_size > 100_000_000
    assert kibibytes < 64 * 1024


def test_the_winners_of_a_large_job_are_read_as_they_are_needed(tmp_path: Path) -> None:
    parts = [[PartInfo(f"/parts/{output}/{index}", index, 7, "a" * 64) for output in (0, 1)] for index in range(500)]
    lines = "".join(json.dumps([part.to_dict() for part in batch]) + "\n" for batch in parts)
    (tmp_path / "winners").write_text(lines)
    winners = CommittedParts(str(tmp_path / "winners"), 1)
    second_parts = [second for _, second in parts]
    assert len(winners) == 500 and list(winners) == second_parts == list(winners)
    assert winners[0] == second_parts[0] and winners[-1] == second_parts[-1] and winners[7:9] == second_parts[7:9]
    with pytest.raises(IndexError):
        winners[500]
    (tmp_path / "winners").write_text("")
    assert list(CommittedParts(str(tmp_path / "winners"), 0)) == []


@pytest.mark.extended
def test_publishing_many_parts_takes_the_memory_of_few(tmp_path: Path) -> None:
    writer = batch.JsonWriter(str(tmp_path / "out.jsonl"))
    part = writer.write_part([{"n": 1}], RowRange(0, 0), str(tmp_path / "attempt-1"))
    (tmp_path / "winners").write_text((json.dumps([part.to_dict()]) + "\n") * 20_000)
    spec = spec_of(tmp_path, batch_output_formats=[writer.to_dict()])
    tracemalloc.start()
    try:
        published = io_operations.publish_output(spec, 0, 1, CommittedParts(str(tmp_path / "winners"), 0))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert published.rows == 20_000 and peak_bytes < 4 * 2**20


WRITERS = [
    batch.JsonWriter("o.jsonl"),
    batch.CsvWriter("o.csv"),
    batch.ParquetWriter("o.parquet"),
    batch.WebdatasetWriter("w/", key=None),
]
MORE_WRITERS = [
    batch.CsvWriter("o.csv.gz"),
    batch.ParquetWriter("o/"),
    batch.ImageWriter("i/"),
    batch.HuggingFaceWriter("h/"),
    batch.SqlWriter("sqlite:///t.db", table="t"),
]


@pytest.mark.extended
@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "writer",
    [*WRITERS, *(pytest.param(writer, marks=pytest.mark.extended) for writer in MORE_WRITERS)],
    ids=[f"{type(writer).__name__}-{writer.path}" for writer in (*WRITERS, *MORE_WRITERS)],
)
def test_publishing_takes_no_memory_for_each_part(
    writer: batch.OutputWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStore, "concat", _skip_writing if writer.is_directory else LocalStore.concat)
    is_table = isinstance(writer, batch.SqlWriter)
    writer = replace(writer, path=f"sqlite:///{tmp_path}/t.db" if is_table else f"{tmp_path}/{writer.path}")
    row = {"image": PIL.Image.new("L", (1, 1))} if isinstance(writer, batch.ImageWriter) else {"txt": "a"}
    part = writer.write_part([row], RowRange(0, 0), f"{tmp_path}/attempt-1")

    def measure_peak(count: int) -> int:
        listing, staging = tmp_path / f"list-{count}", f"{tmp_path}/staging-{count}"
        listing.write_text((json.dumps([part.to_dict()]) + "\n") * count)
        gc.collect()
        tracemalloc.start()
        try:
            assert writer.publish(CommittedParts(str(listing), 0), staging, "overwrite").rows == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    measure_peak(300)
    few = measure_peak(1000)
    many = min(measure_peak(3000) for _ in range(2))  # parts that are read ahead come and go as threads run
    assert many - few < 2000 * 100, f"{(many - few) / 2000} bytes for each part"


def _skip_writing(*_: object, **__: object) -> tuple[int, str]:
    return 0, "0" * 64


def test_the_files_of_a_manifest_are_read_one_by_one(tmp_path: Path) -> None:
    writer = batch.ParquetWriter(f"{tmp_path}/o/")
    parts = [writer.write_part([{"n": index}], RowRange(index, index), f"{tmp_path}/a") for index in range(3)]
    for count in (3, 0):
        output = writer.publish(parts[:count], f"{tmp_path}/s", "overwrite")
        assert [file.path.rpartition("/")[2] for file in publishing.iter_published_files(output, True)] == [
            f"part-{index:05d}.parquet" for index in range(count)
        ]
        assert sorted(path.name for path in (tmp_path / "o").glob("*.parquet")) == [
            f"part-{index:05d}.parquet" for index in range(count)
        ], "files of the former output are deleted"
