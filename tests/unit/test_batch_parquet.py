"""Parquet and Hugging Face outputs of one schema, read by the libraries of others; row groups that are decoded once."""

from __future__ import annotations

import datetime
import itertools
import subprocess
import sys
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.properties import examples
from tinsmith import batch
from tinsmith.batch.formats import arrow_schemas, registry, row_groups, schemas
from tinsmith.batch.formats.input_versions import InputChangedError
from tinsmith.batch.formats.registry import OutputWriter
from tinsmith.batch.types import OutputInfo, PartInfo, RowRange
from tinsmith.errors import UserError

Rows = list[dict[str, Any]]
BEYOND = 2**53 + 1


def write_parts(writer: OutputWriter, batches: Sequence[Rows], tmp_path: Path) -> list[PartInfo]:
    """A part for each batch, as a job without failed rows has them."""
    parts, start = [], 0
    for rows in batches:
        parts.append(writer.write_part(rows, RowRange(start, start + len(rows) - 1), f"{tmp_path}/parts/{start}"))
        start += len(rows)
    return parts


def publish(writer: OutputWriter, batches: Sequence[Rows], tmp_path: Path) -> OutputInfo:
    return writer.publish(write_parts(writer, batches, tmp_path), f"{tmp_path}/staging", "error")


UTC = datetime.datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=datetime.UTC)
LATE: dict[str, tuple[list[Rows], Rows]] = {
    "text after null": ([[{"v": None}], [{"v": "bad"}]], [{"v": None}, {"v": "bad"}]),
    "null after text": ([[{"v": "bad"}], [{"v": None}]], [{"v": "bad"}, {"v": None}]),
    "a late column": ([[{"i": 0}], [{"i": 1, "v": "late"}]], [{"i": 0, "v": None}, {"i": 1, "v": "late"}]),
    "an early column": ([[{"v": "early", "i": 0}], [{"i": 1}]], [{"v": "early", "i": 0}, {"v": None, "i": 1}]),
    "floats after integers": ([[{"v": 1}], [{"v": 1.5}]], [{"v": 1.0}, {"v": 1.5}]),
    "integers after floats": ([[{"v": 0.5}], [{"v": 2**53}]], [{"v": 0.5}, {"v": 2.0**53}]),
    "large integers": ([[{"v": 1}], [{"v": BEYOND}]], [{"v": 1}, {"v": BEYOND}]),
    "decimals": (
        [[{"v": None}], [{"v": Decimal("1.25")}], [{"v": Decimal("1000.5")}]],
        [{"v": None}, {"v": Decimal("1.25")}, {"v": Decimal("1000.50")}],
    ),
    "empty lists": ([[{"v": []}], [{"v": [1]}], [{"v": [None, 0.5]}]], [{"v": []}, {"v": [1.0]}, {"v": [None, 0.5]}]),
    "objects that grow": (
        [[{"v": {"a": 1}}], [{"v": None}], [{"v": {"b": "x", "a": 0.5}}]],
        [{"v": {"a": 1.0, "b": None}}, {"v": None}, {"v": {"a": 0.5, "b": "x"}}],
    ),
    "lists of objects that grow": (
        [[{"v": [{"a": 1}, None]}], [{"v": None}], [{"v": [{"b": [True]}]}]],
        [{"v": [{"a": 1, "b": None}, None]}, {"v": None}, {"v": [{"a": None, "b": [True]}]}],
    ),
    "times": ([[{"v": None}], [{"v": UTC}]], [{"v": None}, {"v": UTC}]),
    "rows without a column": ([[{}, {}], [{"v": 1}]], [{"v": None}, {"v": None}, {"v": 1}]),
}


@pytest.mark.parametrize("case", LATE)
def test_a_directory_of_parquet_files_has_one_schema_for_every_reader(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    import pandas

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    batches, expected = LATE[case]
    info = publish(batch.ParquetWriter(f"{tmp_path}/out/"), batches, tmp_path)
    assert info.rows == len(expected)
    assert pyarrow.dataset.dataset(f"{tmp_path}/out").to_table().to_pylist() == expected
    assert pq.read_table(f"{tmp_path}/out").to_pylist() == expected
    frame = pandas.read_parquet(f"{tmp_path}/out", dtype_backend="pyarrow")
    assert pa.Table.from_pandas(frame, preserve_index=False).to_pylist() == expected
    loaded = datasets.load_dataset("parquet", data_files=f"{tmp_path}/out/*.parquet", split="train")
    assert loaded.to_list() == expected
    reader = batch.ParquetReader(f"{tmp_path}/out/")
    assert reader.download_batch(0, len(expected) - 1, "") == expected


@pytest.mark.parametrize("case", LATE)
def test_one_file_has_that_schema_too(case: str, tmp_path: Path) -> None:
    import datasets

    batches, expected = LATE[case]
    publish(batch.ParquetWriter(f"{tmp_path}/out.parquet"), batches, tmp_path / "a")
    assert pq.read_table(f"{tmp_path}/out.parquet").to_pylist() == expected
    writer = batch.OutputWriter.from_dict({"format": "huggingface", "path": f"{tmp_path}/hf"})
    info = publish(writer, batches, tmp_path / "b")
    assert list(datasets.load_from_disk(f"{tmp_path}/hf")) == expected == list(writer.read_published(info))


def test_only_the_parts_of_another_schema_are_written_again(tmp_path: Path) -> None:
    writer = batch.ParquetWriter(f"{tmp_path}/out/")
    parts = write_parts(writer, [[{"v": 0.5}], [{"v": 1}], [{"v": 2.5}]], tmp_path)
    info = writer.publish(parts, f"{tmp_path}/staging", "error")
    files = [Path(f"{tmp_path}/out/part-{index:05d}.parquet").read_bytes() for index in range(3)]
    stored = [Path(part.path).read_bytes() for part in parts]
    assert files[0] == stored[0] and files[2] == stored[2] and files[1] != stored[1]
    assert writer.publish(parts, f"{tmp_path}/staging", "error") == info, "publishing again finds the same"


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (1, "x", r"column 'v' is int64 in some rows and string in others"),
        ([1], ["x"], r"column 'v', its elements, is int64 in some rows and string"),
        ({"a": 1}, {"a": True}, r"column 'v', field 'a', is int64 in some rows and bool"),
        ("x", b"x", r"column 'v' is string in some rows and binary"),
        (0.5, Decimal("0.1"), r"column 'v' is double in some rows and decimal128\(1, 1\)"),
        (5, Decimal("0.1"), r"column 'v' is int64 in some rows and decimal128\(1, 1\)"),
        (BEYOND, 0.5, rf"column 'v' is int64 in some rows and double in others.*{BEYOND}.*Write such integers as str"),
        ([[BEYOND]], [[0.5]], rf"column 'v' is list.*int64.* and list.*double.*{BEYOND}"),
    ],
)
def test_types_that_no_schema_holds_are_refused_and_nothing_is_lost(
    first: object, second: object, message: str, tmp_path: Path
) -> None:
    batches: list[Rows] = [[{"v": first}], [{"v": second}]]
    for path, directory in ((f"{tmp_path}/out/", "a"), (f"{tmp_path}/out.parquet", "b")):
        writer = batch.ParquetWriter(path)
        parts = write_parts(writer, batches, tmp_path / directory)
        with pytest.raises(UserError, match=message) as refusal:
            writer.publish(parts, f"{tmp_path}/{directory}/staging", "error")
        assert "resume the job with format='jsonl'" in str(refusal.value)
        assert not Path(path).is_file() and not list(Path(tmp_path).glob("out/*.parquet"))
        lines = registry.in_format(writer, "jsonl")
        again = write_parts(lines, [list(writer.read_part(part)) for part in parts], tmp_path / directory / "again")
        assert lines.publish(again, f"{tmp_path}/{directory}/again", "overwrite").rows == 2


def test_rows_without_any_column_are_refused(tmp_path: Path) -> None:
    for name in ("parquet", "huggingface"):
        writer = batch.OutputWriter.from_dict({"format": name, "path": f"{tmp_path}/{name}.out"})
        with pytest.raises(UserError, match="have no columns"):
            publish(writer, [[{}], [{}]], tmp_path / name)
        part = writer.write_part([{}, {}], RowRange(0, 1), f"{tmp_path}/{name}/part")
        assert list(writer.read_part(part)) == [{}, {}]


def test_a_part_that_does_not_say_its_types_is_asked_for_them(tmp_path: Path) -> None:
    writer = batch.ParquetWriter(f"{tmp_path}/out/")
    parts = [
        PartInfo(part.path, part.rows, part.bytes, part.sha256)
        for part in write_parts(writer, [[{"v": 1}], [{"v": 0.5, "w": "x"}]], tmp_path)
    ]
    writer.publish(parts, f"{tmp_path}/staging", "error")
    assert pq.read_table(f"{tmp_path}/out").to_pylist() == [{"v": 1.0, "w": None}, {"v": 0.5, "w": "x"}]


def test_columns_that_a_function_gives_as_dictionaries_are_texts(tmp_path: Path) -> None:
    table = pa.table({"v": pa.array(["a", "b", "a"]).dictionary_encode()})
    publish(batch.ParquetWriter(f"{tmp_path}/out/"), [table.to_pylist(), [{"v": "c"}]], tmp_path)
    assert pq.read_table(f"{tmp_path}/out").column("v").to_pylist() == ["a", "b", "a", "c"]
    fields = [pa.schema([("v", kind)]) for kind in (pa.dictionary(pa.int32(), pa.string()), pa.string())]
    assert arrow_schemas.unify(fields) == arrow_schemas.unify(reversed(fields)) == fields[1]


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 5),
        st.sampled_from([BEYOND, -BEYOND, 2**63 - 1]),
        st.sampled_from([0.5, 1e300]),
        st.sampled_from(["", "x"]),
        st.sampled_from([b"", b"x"]),
        st.sampled_from([Decimal("1.5"), Decimal("123456789012345678901"), Decimal("0." + "1" * 60)]),
        st.sampled_from([UTC, UTC.replace(tzinfo=None), UTC.date(), UTC.time(), datetime.timedelta(1)]),
    ),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, min_size=1, max_size=2),
    max_leaves=4,
)


@examples(400)
@given(VALUES, VALUES)
def test_the_rules_of_a_running_job_are_those_of_arrow(first: object, second: object) -> None:
    try:
        types = [schemas.schema_of({"v": value}) for value in (first, second)]
    except TypeError:
        return  # a list of types that do not merge
    fields = [arrow_schemas.schema_of_types(schema_types) for schema_types in types]
    try:
        merged = schemas.merge_schemas(types[0], types[1], values={"v": second})
    except schemas.SchemaConflictError as conflict:
        assert "column 'v'" in str(conflict)
        if "2**53" not in str(conflict):  # only the values tell an integer of 54 bits from one of 53
            with pytest.raises(UserError):
                arrow_schemas.unify(fields)
        return
    assert arrow_schemas.unify(fields).equals(arrow_schemas.schema_of_types(merged))
    table = pa.Table.from_pylist([{"v": first}], fields[0])
    conformed = arrow_schemas.conform(table, arrow_schemas.schema_of_types(merged))
    assert conformed.num_rows == 1 and conformed.schema.names == ["v"]


def test_a_conflict_while_a_job_runs_names_the_value() -> None:
    committed, row = schemas.schema_of({"v": 0.5}), {"v": BEYOND}
    with pytest.raises(
        schemas.SchemaConflictError,
        match=rf"column 'v' is int64 here and float64 in other rows.* is {BEYOND}.*beyond 2\*\*53: write .* as str",
    ):
        schemas.merge_schemas(committed, schemas.schema_of(row), values=row)


@pytest.mark.extended
def test_publishing_a_directory_of_other_schemas_takes_the_memory_of_some_rows(tmp_path: Path) -> None:
    script = f"""
import hashlib, os, pyarrow, sys
from tinsmith.batch.types import RowRange
from tinsmith.batch.formats.parquet import ParquetWriter
writer = ParquetWriter({str(tmp_path)!r} + "/out/", compression="none")
text = lambda number: hashlib.sha256(str(number).encode()).hexdigest() * 32
rows = [{{"n": n, "text": text(n)}} for n in range(20_000)]
parts = [writer.write_part(rows, RowRange(n * 20_000, n * 20_000 + 19_999), {str(tmp_path)!r} + "/p") for n in range(3)]
parts.append(writer.write_part([{{"n": 0.5}}], RowRange(60_000, 60_000), {str(tmp_path)!r} + "/p"))
del rows
pool, before = pyarrow.default_memory_pool(), pyarrow.default_memory_pool().bytes_allocated()
pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # whose maximum starts here
writer.publish(parts, {str(tmp_path)!r} + "/s", "error")
print(pyarrow.default_memory_pool().max_memory(), parts[0].bytes)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    peak_bytes, size = map(int, ran.stdout.split())
    assert size > 40_000_000 and peak_bytes < size * 1.5, "one row group and what is made of it, not all parts"
    assert pq.read_table(f"{tmp_path}/out", columns=["n"]).num_rows == 60_001


# Reading.


def make_file(path: Path, rows: int, group_rows: int) -> pa.Table:
    table = pa.table({"i": list(range(rows)), "t": [f"text {index}" for index in range(rows)]})
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path, row_group_size=group_rows)
    return table


class Decodes:
    """Counts the rows that pyarrow decodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        original = pq.ParquetFile.iter_batches

        def counting(file: pq.ParquetFile, *args: Any, **options: Any) -> Any:  # noqa: ANN401
            for record_batch in original(file, *args, **options):
                self.rows += record_batch.num_rows
                yield record_batch

        monkeypatch.setattr(pq.ParquetFile, "iter_batches", counting)


def test_the_batches_of_a_row_group_decode_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_file(tmp_path / "in.parquet", 20_000, 20_000)
    decodes = Decodes(monkeypatch)
    reader = batch.ParquetReader(f"{tmp_path}/in.parquet")
    for start in range(0, 20_000, 32):
        rows = reader.download_batch(start, start + 31, "")
        assert [row["i"] for row in rows] == list(range(start, start + 32))
    assert decodes.rows == 20_000
    assert reader.download_batch(8, 8, "") == [{"i": 8, "t": "text 8"}] and decodes.rows == 20_000


def test_a_row_group_beyond_the_bound_is_decoded_in_order_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_groups, "DECODED_BYTES", 10_000)
    monkeypatch.setattr(row_groups, "CHUNK_ROWS", 100)
    make_file(tmp_path / "in.parquet", 5000, 5000)
    decodes = Decodes(monkeypatch)
    reader = batch.ParquetReader(f"{tmp_path}/in.parquet")
    for start in range(0, 5000, 50):
        assert reader.download_batch(start, start + 49, "")[0]["i"] == start
        decoded = reader._decoder._decoded
        assert sum(table.nbytes for table in decoded.values()) == reader._decoder._decoded_bytes <= 10_000
    assert decodes.rows == 5000
    assert reader.download_batch(0, 0, "")[0]["i"] == 0 and decodes.rows == 5100, "a late batch decodes again"


@examples(60)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.integers(1, 20),
    st.integers(1, 7),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=6),
)
def test_any_span_of_any_files_is_read(
    sizes: list[int], group_rows: int, chunk_rows: int, spans: list[tuple[int, int]]
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_groups, "CHUNK_ROWS", chunk_rows)
        patch.setattr(row_groups, "DECODED_BYTES", 200)
        patch.setattr(row_groups, "MAX_OPEN", 1)
        expected: Rows = []
        for index, size in enumerate(sizes):
            table = make_file(Path(directory) / f"{index}.parquet", size, group_rows)
            expected += table.to_pylist()
        reader = batch.ParquetReader(f"{directory}/")
        assert len(reader) == len(expected)
        for first, length in spans:
            if (last := min(first + length, len(expected) - 1)) >= first:
                assert reader.download_batch(first, last, "") == expected[first : last + 1]


def test_a_column_that_some_files_lack_is_null_there(tmp_path: Path) -> None:
    for name, table in {"a": {"v": ["x", "y"]}, "b": {"w": [1]}, "c": {"w": [2], "v": [None]}}.items():
        (tmp_path / "in").mkdir(exist_ok=True)
        pq.write_table(pa.table(table), tmp_path / f"in/{name}.parquet")
    reader = batch.ParquetReader(f"{tmp_path}/in/", columns=["v"])
    assert reader.download_batch(0, 3, "") == [{"v": value} for value in ("x", "y", None, None)]
    with pytest.raises(UserError, match=r"columns has \['z'\], and the files have only \['v', 'w'\]"):
        len(batch.ParquetReader(f"{tmp_path}/in/", columns=["v", "z"]))


def test_a_file_that_changes_before_it_is_opened_again_gives_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_groups, "MAX_OPEN", 1)
    for name in "ab":
        make_file(tmp_path / f"in/{name}.parquet", 5, 5)
    reader = batch.ParquetReader(f"{tmp_path}/in/")
    assert reader.download_batch(0, 9, "")[5]["i"] == 0
    make_file(tmp_path / "in/new.parquet", 5, 2)
    (tmp_path / "in/new.parquet").replace(tmp_path / "in/a.parquet")
    reader._decoder._decoded.clear()
    with pytest.raises(InputChangedError, match="changed while the job ran"):
        reader.download_batch(0, 1, "")


def test_every_pair_of_parts_is_decided_alike_in_either_order() -> None:
    kinds = ["null", "bool", "int", "float", "string", "binary", "date", "timestamp", {"decimal": [3, 2]}]
    for first, second in itertools.combinations(kinds, 2):
        fields = [arrow_schemas.schema_of_types({"v": kind}) for kind in (first, second)]
        outcomes = []
        for pair in (fields, fields[::-1]):
            try:
                outcomes.append(arrow_schemas.unify(pair))
            except UserError:
                outcomes.append(None)
        assert outcomes[0] == outcomes[1]
