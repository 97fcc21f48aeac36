"""Tables as inputs and outputs of bulk jobs, on SQLite and Postgres: ordered, atomic, exactly once, without leaked
passwords."""

from __future__ import annotations

import datetime
import json
import os
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from support import buckets, databases
from support.live import API_KEY, LiveServer, serving
from tinsmith import batch
from tinsmith.batch.client.http import Client
from tinsmith.batch.formats import sql
from tinsmith.batch.formats.pages import Page
from tinsmith.batch.formats.snapshots import SnapshotReader, open_input, write_snapshot
from tinsmith.batch.formats.sql import split_url
from tinsmith.batch.types import (
    Assignment,
    AttemptOutcome,
    JobSpec,
    OutputInfo,
    PartInfo,
    Row,
    RowRange,
    part_base,
    staging_of,
)
from tinsmith.batch.worker import io_operations
from tinsmith.batch.worker.feed import Feed
from tinsmith.errors import CorruptFilesError, NotSupportedError, UserError


@pytest.fixture
def url(database_kind: str, tmp_path: Path) -> str:
    return databases.bare_url(tmp_path, database_kind)


def execute(url: str, *statements: str, rows: Sequence[Row] = ()) -> list[Row]:
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    result_rows: list[Row] = []
    with engine.begin() as connection:
        for statement in statements:
            result = (
                connection.execute(sa.text(statement), list(rows)) if rows else connection.execute(sa.text(statement))
            )
            if result.returns_rows:
                result_rows = [dict(row) for row in result.mappings()]
    engine.dispose()
    return result_rows


def make(url: str, count: int, spacing: int = 3) -> list[Row]:
    """Create a table whose keys have gaps and whose rows are stored in another order."""
    rows = [{"id": index * spacing - 50, "name": f"r{index}"} for index in range(count)]
    execute(url, "CREATE TABLE items (id BIGINT PRIMARY KEY, name TEXT)")
    execute(url, "INSERT INTO items VALUES (:id, :name)", rows=rows[::-1])
    return rows


def table(url: str, name: str = "results") -> list[Row]:
    return execute(url, f"SELECT * FROM {name}")


def write(writer: batch.SqlWriter, rows: Sequence[Row | None], job_id: int = 1, size: int = 3) -> list[PartInfo]:
    parts = []
    for attempt, start in enumerate(range(0, len(rows), size)):
        chunk = rows[start : start + size]
        span = RowRange(start, start + len(chunk) - 1)
        parts.append(writer.write_part(chunk, span, part_base(writer.path, job_id, 0, attempt)))
    return parts


def publish(writer: batch.SqlWriter, parts: list[PartInfo], job_id: int = 1, if_exists: str = "error") -> OutputInfo:
    return writer.publish(parts, staging_of(writer.path, job_id, 0), if_exists)


def names(url: str) -> set[str]:
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    table_names = set(sa.inspect(engine).get_table_names())
    engine.dispose()
    return table_names


def test_rows_come_in_the_order_of_their_key_wherever_a_batch_begins(url: str) -> None:
    rows = make(url, 200)
    reader = batch.SqlReader(url, table="items")
    assert len(reader) == 200
    for start, end in [(0, 199), (0, 0), (63, 64), (64, 127), (128, 130), (199, 199), (10, 190)]:
        assert reader.download_batch(start, end, "") == rows[start : end + 1]
    with pytest.raises(IndexError):
        reader.download_batch(199, 200, "")
    again = batch.InputReader.from_dict(reader.to_dict())
    assert again.download_batch(70, 72, "") == rows[70:73]
    assert batch.SqlReader(url, table="items", columns=["name"]).download_batch(1, 1, "") == [{"name": "r1"}]


def test_a_query_is_ordered_by_the_columns_that_it_names(url: str) -> None:
    execute(url, "CREATE TABLE pairs (a TEXT, b INT, note TEXT)")
    rows = [{"a": f"{index // 70}", "b": index % 70, "note": "12:30"} for index in range(150)]
    execute(url, "INSERT INTO pairs VALUES (:a, :b, :note)", rows=rows[::-1])
    query = "SELECT a, b, '12:30 is :noon, 5% off' AS note FROM pairs WHERE note LIKE '12%';"
    reader = batch.SqlReader(url, query=query, key=["a", "b"])
    expected_rows = [{**row, "note": "12:30 is :noon, 5% off"} for row in rows]
    assert len(reader) == 150
    assert (
        reader.download_batch(0, 149, "") == expected_rows
        and reader.download_batch(66, 129, "") == expected_rows[66:130]
    )


def snapshot_of(reader: batch.SqlReader, directory: Path) -> SnapshotReader:
    path, num_rows = write_snapshot(reader.snapshot_pages(), str(directory), reader.path)
    snapshot = SnapshotReader(path)
    assert len(snapshot) == num_rows
    return snapshot


def rows_of(reader: batch.InputReader) -> list[Row]:
    return reader.download_batch(0, len(reader) - 1, "")


def test_a_snapshot_has_the_rows_of_one_state_of_the_table(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "PAGE_ROWS", 16)
    rows = make(url, 200)
    if url.startswith("sqlite"):
        execute(url, "PRAGMA journal_mode = WAL")
    reader = batch.SqlReader(url, table="items")

    def pages() -> Generator[Page, None, None]:
        for index, page in enumerate(reader.snapshot_pages()):
            if index == 0:
                execute(url, "DELETE FROM items WHERE id > 0", "INSERT INTO items VALUES (-49, 'new')")
            yield page

    path, num_rows = write_snapshot(pages(), str(tmp_path / "job"), reader.path)
    assert num_rows == 200 and rows_of(SnapshotReader(path)) == rows
    assert len(reader) != 200


def test_a_read_that_ends_early_ends_its_transaction(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "PAGE_ROWS", 4)
    rows = make(url, 40)
    reader = batch.SqlReader(url, table="items")
    pages = reader.snapshot_pages()
    path, num_rows = write_snapshot(pages, str(tmp_path / "job"), reader.path, 3)
    assert num_rows == 3 and rows_of(SnapshotReader(path)) == rows[:3]
    assert pages.gi_frame is None, "it is not left to the collector, which may close the connection first"
    opened: list[Any] = []
    read_pages = batch.SqlReader.snapshot_pages

    def keep(self: batch.SqlReader) -> Generator[Page, None, None]:
        opened.append(read_pages(self))
        return opened[-1]

    monkeypatch.setattr(batch.SqlReader, "snapshot_pages", keep)
    assert reader.download_batch(0, 1, str(tmp_path)) == rows[:2]
    assert [pages.gi_frame for pages in opened] == [None]


def test_an_empty_table_has_an_empty_snapshot(url: str, tmp_path: Path) -> None:
    execute(url, "CREATE TABLE items (id BIGINT PRIMARY KEY)")
    assert len(snapshot_of(batch.SqlReader(url, table="items"), tmp_path)) == 0


def test_a_table_without_a_key_and_a_query_without_an_order_are_read(url: str, tmp_path: Path) -> None:
    execute(url, "CREATE TABLE plain (name TEXT)", "INSERT INTO plain VALUES ('a'), ('a'), (NULL)")
    for reader in (batch.SqlReader(url, table="plain"), batch.SqlReader(url, query="SELECT name FROM plain")):
        names_read = [row["name"] for row in rows_of(snapshot_of(reader, tmp_path))]
        assert sorted(map(str, names_read)) == ["None", "a", "a"]
    ordered = batch.SqlReader(
        url, query="SELECT 'x' AS a, name FROM plain ORDER BY name DESC LIMIT 2", columns=["name"]
    )
    assert list(rows_of(ordered)[0]) == ["name"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"table": "missing"}, "table 'missing' is not in .*; create it"),
        ({"table": "u", "key": "z"}, "no column 'z'"),
        ({"table": "u", "columns": ["z"]}, "no column 'z'"),
        ({"query": "SELECT a, b AS a FROM u"}, r"two columns \['a'\]; name them apart with AS"),
        ({"query": "SELEC 1"}, "query is 'SELEC 1', which .* refuses: .*syntax error.*; give a SELECT"),
        ({"query": "SELECT z FROM u"}, 'refuses: .*(no such column: z|"z" does not exist); give a SELECT'),
        ({"query": "SELECT 1 FROM missing"}, 'refuses: .*(no such table: missing|"missing" does not exist); give'),
        ({"query": "SELECT a FROM u", "columns": ["z"]}, 'refuses: .*(no such column: z|"z" does not exist); give'),
        ({"query": "DELETE FROM u RETURNING a"}, "query is 'DELETE FROM u .*refuses: .*; give a SELECT"),
    ],
)
def test_what_cannot_be_read_is_refused(url: str, options: dict[str, Any], says: str) -> None:
    execute(url, "CREATE TABLE u (a INT, b INT)", "INSERT INTO u VALUES (1, 1)")
    with pytest.raises(UserError, match=says) as refused:
        list(batch.SqlReader(url, **options).snapshot_pages())
    assert "\n" not in str(refused.value)
    if "query" in options and "AS a" not in options["query"]:
        with pytest.raises(UserError, match=says):
            len(batch.SqlReader(url, **options))


def test_a_query_cannot_write(url: str) -> None:
    execute(url, "CREATE TABLE u (a INT)", "INSERT INTO u VALUES (1)")
    with pytest.raises(UserError):
        list(batch.SqlReader(url, query="DELETE FROM u RETURNING a").snapshot_pages())
    assert len(execute(url, "SELECT * FROM u")) == 1


POSTGRES_VALUES: list[tuple[str, str, object]] = [
    ("BIGINT", "9223372036854775807", 2**63 - 1),
    ("NUMERIC", "123456789012345678901234567890.123", Decimal("123456789012345678901234567890.123")),
    ("DOUBLE PRECISION", "'0.1'", 0.1),
    ("BOOLEAN", "TRUE", True),
    ("BYTEA", "'\\x00ff'", b"\x00\xff"),
    ("DATE", "'2026-01-02'", datetime.date(2026, 1, 2)),
    ("TIME", "'01:02:03.000004'", datetime.time(1, 2, 3, 4)),
    ("TIMESTAMP", "'2026-01-02 03:04:05.000006'", datetime.datetime(2026, 1, 2, 3, 4, 5, 6)),
    ("TIMESTAMPTZ", "'2026-01-02 03:04:05+02'", datetime.datetime(2026, 1, 2, 1, 4, 5, tzinfo=datetime.UTC)),
    ("INTERVAL", "'3 days 00:00:01'", datetime.timedelta(days=3, seconds=1)),
    ("UUID", "'00000000-0000-0000-0000-00000000000a'", "00000000-0000-0000-0000-00000000000a"),
    ("INET", "'10.0.0.1'", "10.0.0.1"),
    ("JSONB", """'{"a": [1, null], "b": 123456789012345678901}'""", {"a": [1, None], "b": 123456789012345678901}),
    ("JSON[]", """ARRAY['{"a": 1}'::json, NULL, '[2]'::json]""", [{"a": 1}, None, [2]]),
    ("TEXT[]", "ARRAY['x', NULL]", ["x", None]),
    ("INT[][]", "ARRAY[[1, 2], [3, 4]]", [[1, 2], [3, 4]]),
    ("TEXT", "NULL", None),
]


def postgres_url(tmp_path: Path) -> str:
    if "postgres" not in databases.KINDS:
        pytest.skip("no Postgres here")
    return databases.bare_url(tmp_path, "postgres")


def test_values_of_postgres_are_exact(tmp_path: Path) -> None:
    url = postgres_url(tmp_path)
    columns = ", ".join(f"c{index} {kind}" for index, (kind, _, _) in enumerate(POSTGRES_VALUES))
    nulls = ", ".join("NULL" for _ in POSTGRES_VALUES)
    values = ", ".join(value for _, value, _ in POSTGRES_VALUES).replace(":", r"\:")
    execute(url, f"CREATE TABLE t (k INT PRIMARY KEY, {columns})")
    execute(url, f"INSERT INTO t VALUES (1, {nulls}), (2, {values}), (3, {nulls})")
    reader = batch.SqlReader(url, table="t")
    for rows in (rows_of(snapshot_of(reader, tmp_path)), rows_of(reader)):
        assert [row["k"] for row in rows] == [1, 2, 3]
        assert list(rows[1].values())[1:] == [expected for _, _, expected in POSTGRES_VALUES]
        assert set(list(rows[0].values())[1:] + list(rows[2].values())[1:]) == {None}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("(repeat('9', 77))::numeric", "row 0, column 'v' is .*a number of 77 digits is too long"),
        ("'NaN'::numeric", "row 0, column 'v' is .*NaN"),
        ("'1 month'::interval", "'1 mon' has months or years"),
        ("'10:00+02'::timetz", "column 'v' is .*a time with a time zone"),
        ("int4range(1, 5)", "column 'v' is .*Range is not a supported column type"),
        ("ROW(1, 'a')", "column 'v' is .*composite"),
        ("ARRAY[gen_random_uuid()]", "column 'v' is .*UUID"),
    ],
)
def test_values_of_postgres_without_an_exact_form_are_refused_by_name(tmp_path: Path, value: str, says: str) -> None:
    reader = batch.SqlReader(postgres_url(tmp_path), query=f"SELECT {value} AS v")
    with pytest.raises(UserError, match=says):
        snapshot_of(reader, tmp_path)


def test_values_of_sqlite_are_those_that_are_stored_or_those_of_the_declared_type(tmp_path: Path) -> None:
    url = databases.bare_url(tmp_path, "sqlite")
    execute(
        url,
        "CREATE TABLE t (k INTEGER PRIMARY KEY, n NUMERIC(10, 2), r REAL, b BLOB, f BOOLEAN, d DATE, m DATETIME,"
        " j JSON, x ANYTHING)",
        "INSERT INTO t VALUES (1, '123456789.25', 1, x'00ff', 1, '2026-01-02', '2026-01-02 03\\:04\\:05',"
        " '{\"a\"\\: 1}', NULL), (2, 3, 0.5, NULL, 0, NULL, NULL, '[2]', NULL)",
    )
    first, second = rows_of(snapshot_of(batch.SqlReader(url, table="t"), tmp_path))
    at = datetime.datetime(2026, 1, 2, 3, 4, 5)
    assert list(first.values()) == [
        1, 123456789.25, 1.0, b"\x00\xff", True, datetime.date(2026, 1, 2), at, {"a": 1}, None
    ]  # fmt: skip
    assert list(second.values()) == [2, 3.0, 0.5, None, False, None, None, [2], None]


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        ("ANYTHING", "(1, 7), (2, 'text')", "row 1, column 'v' is 'text': it is string here and int64 before"),
        ("ANYTHING", "(1, NULL), (2, 'text'), (3, x'00')", "row 2, .*it is binary here and string before"),
        ("REAL", "(1, 0.5), (2, 'abc')", "row 1, .*it is string here and float64 before"),
        ("ANYTHING", "(1, 9007199254740993), (2, 0.5)", "row 1, .*it is float64 here and int64 before"),
        ("BOOLEAN", "(1, 1), (2, 5)", "row 1, column 'v' is 5: a BOOLEAN is 0 or 1"),
        ("DATE", "(1, '2026-01-02'), (2, 'soon')", "row 1, column 'v' is 'soon'"),
        ("DATETIME", "(1, 1700000000)", "row 0, column 'v' is 1700000000"),
        ("JSON", "(1, '{}'), (2, '{a}')", "row 1, column 'v' is '{a}'"),
    ],
)
def test_values_of_sqlite_of_two_types_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, values: str, says: str
) -> None:
    url = databases.bare_url(tmp_path, "sqlite")
    execute(url, f"CREATE TABLE t (k INTEGER PRIMARY KEY, v {kind})", f"INSERT INTO t VALUES {values}")
    for page_rows in (1, 1000):  # the values are in one page, or in several
        monkeypatch.setattr(sql, "PAGE_ROWS", page_rows)
        with pytest.raises(UserError, match=says):
            snapshot_of(batch.SqlReader(url, table="t"), tmp_path)


def test_a_column_whose_type_shows_late_has_it_in_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "PAGE_ROWS", 2)
    url = databases.bare_url(tmp_path, "sqlite")
    execute(url, "CREATE TABLE t (k INTEGER PRIMARY KEY, v)", "INSERT INTO t VALUES (1, NULL), (2, 2), (3, NULL)")
    execute(url, "INSERT INTO t VALUES (4, 4), (5, 0.5)")
    values = [row["v"] for row in rows_of(snapshot_of(batch.SqlReader(url, table="t"), tmp_path))]
    assert values == [None, 2.0, None, 4.0, 0.5] and isinstance(values[1], float)


def test_large_rows_are_read_a_few_at_a_time(url: str, tmp_path: Path) -> None:
    size = 300_000
    execute(url, "CREATE TABLE t (k INT PRIMARY KEY, v TEXT)")
    execute(url, "INSERT INTO t VALUES (:k, :v)", rows=[{"k": index, "v": f"{index}" * size} for index in range(60)])
    reader = batch.SqlReader(url, table="t")
    assert max(page.estimate_bytes() for page in reader.snapshot_pages()) < 2 * sql.PAGE_BYTES
    assert [len(row["v"]) // size for row in rows_of(snapshot_of(reader, tmp_path))] == [1] * 10 + [2] * 50


VALUES: list[Row] = [
    {"n": 1, "x": 1, "s": "a", "t": True, "y": b"\x00\xff", "d": datetime.date(2026, 1, 2), "j": [1], "v": None},
    {"n": np.int64(2), "x": np.float32(0.5), "s": "\u00e4", "t": False, "y": b"", "d": None, "j": {"k": "v"}},
    {"n": -(2**62), "x": float("nan"), "m": datetime.datetime(2026, 1, 2, 3, 4, 5), "j": "text"},
    {"z": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), "j": 7},
]


def test_columns_have_the_type_that_all_their_values_fit(url: str) -> None:
    writer = batch.SqlWriter(url, table="results")
    info = publish(writer, write(writer, [*VALUES[:1], None, *VALUES[1:]], size=2))
    assert info.rows == 4 and info.path.endswith("#results")
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    reflected = sa.Table("results", sa.MetaData(), autoload_with=engine)
    with engine.connect() as connection:
        rows = [dict(row) for row in connection.execute(sa.select(reflected)).mappings()]
    engine.dispose()
    assert [row["n"] for row in rows] == [1, 2, -(2**62), None]
    assert [row["x"] for row in rows] == [1.0, 0.5, None, None]
    assert [row["s"] for row in rows] == ["a", "\u00e4", None, None]
    assert [row["t"] for row in rows] == [True, False, None, None]
    assert [row["y"] for row in rows] == [b"\x00\xff", b"", None, None]
    assert [row["d"] for row in rows] == [datetime.date(2026, 1, 2), None, None, None]
    assert [row["j"] for row in rows] == [[1], {"k": "v"}, "text", 7]
    assert rows[2]["m"] == datetime.datetime(2026, 1, 2, 3, 4, 5) and rows[0]["v"] is None
    zoned = rows[3]["z"]
    zoned = datetime.datetime.fromisoformat(zoned) if isinstance(zoned, str) else zoned
    assert zoned == VALUES[3]["z"]


def test_rows_that_no_table_takes_fail_alone() -> None:
    writer = batch.SqlWriter("sqlite:////tmp/x.db", table="t")
    for row in ({"n": 2**63}, {"s": "a\0b"}, {"": 1}, {"o": object()}):
        with pytest.raises((TypeError, ValueError)):
            writer.check(row)
    writer.check({"n": 2**63 - 1, "s": "a"})


def test_a_publication_that_is_cut_short_leaves_nothing_and_comes_out_the_same(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = batch.SqlWriter(url, table="results")
    rows = [{"n": index} for index in range(10)]
    lost = writer.write_part([{"n": -1}], RowRange(0, 0), part_base(writer.path, 1, 0, 99))
    parts = write(writer, rows)
    assert write(writer, rows) == parts, "the same part again is the same part"
    with pytest.raises(FileExistsError):
        writer.write_part([{"n": 7}], RowRange(0, 0), lost.path.rpartition("/")[0])

    values = sql._to_database_row
    remaining = iter(range(6))

    def die(*arguments: Any) -> Row:  # noqa: ANN401
        if next(remaining, None) is None:
            raise KeyboardInterrupt
        return values(*arguments)

    monkeypatch.setattr(sql, "_to_database_row", die)
    with pytest.raises(KeyboardInterrupt):
        publish(writer, parts)
    assert "results" not in names(url)
    monkeypatch.undo()
    info = publish(writer, parts)
    assert publish(writer, parts) == info, "again, after the job's row was not written"
    assert table(url) == rows
    assert list(writer.read_part(parts[1])) == rows[3:6]
    with pytest.raises(FileExistsError, match="exists already"):
        writer.check_output("error")

    other = batch.SqlWriter(url, table="results")
    replaced = write(other, [{"m": "x"}], job_id=2)
    with pytest.raises(FileExistsError, match="exists already"):
        publish(other, replaced, job_id=2)
    publish(other, replaced, job_id=2, if_exists="overwrite")
    assert table(url) == [{"m": "x"}]
    for job_id in (1, 2, 3):
        io_operations.delete_parts(writer.to_dict(), 0, job_id)
    assert names(url) == {"results"}


def test_rows_are_added_to_a_table_once(url: str) -> None:
    execute(
        url,
        "CREATE TABLE results (n BIGINT, note TEXT DEFAULT 'none', j TEXT)",
        "INSERT INTO results VALUES (0, 'a', '')",
    )
    writer = batch.SqlWriter(url, table="results", append=True)
    writer.check_output("error")
    parts = write(writer, [{"n": 1}, {"n": 2, "j": [1]}])
    publish(writer, parts)
    publish(writer, parts)
    assert [row["n"] for row in table(url)] == [0, 1, 2]
    assert table(url)[2] == {"n": 2, "note": "none", "j": "[1]"}
    bad = write(writer, [{"other": 1}], job_id=2)
    with pytest.raises(UserError, match=r"no columns \['other'\]"):
        publish(writer, bad, job_id=2)
    assert len(table(url)) == 3


def test_a_part_that_was_changed_is_found(url: str) -> None:
    writer = batch.SqlWriter(url, table="results")
    parts = write(writer, [{"n": 1}])
    (staged,) = names(url)
    execute(url, f"UPDATE {staged} SET lines = 'changed'")
    with pytest.raises(CorruptFilesError):
        publish(writer, parts)
    assert names(url) == {staged}


def test_a_password_is_in_no_path_and_no_text() -> None:
    url_with_password = "postgres://me:s3cr3t%23@host:5433/db?sslmode=require#public.results"
    for endpoint in (batch.SqlWriter(url_with_password), batch.SqlReader(url_with_password)):
        assert endpoint.path == "postgresql://me@host:5433/db?sslmode=require#public.results"
        assert endpoint.password == "s3cr3t#" and endpoint.table == "public.results"
        assert "s3cr3t" not in repr(endpoint)
        again = type(endpoint)(**{name: value for name, value in endpoint.to_dict().items() if name != "format"})
        assert again == endpoint
    assert split_url("sqlite:///a.db#t").url == f"sqlite:///{os.getcwd()}/a.db"
    for bad, error in [
        ("mysql://me:s3cr3t@host/db", NotSupportedError),
        ("s3cr3t", UserError),
        ("sqlite://", UserError),
        ("postgresql://host/db?password=s3cr3t", UserError),
    ]:
        with pytest.raises(error) as refused:
            split_url(bad)
        assert "s3cr3t" not in str(refused.value)


def error_of(operation: Row, source: Row, output: Row) -> str:
    """What a job says that fails in a worker's operation: one line without a traceback."""
    (message,) = io_operations.run(JobSpec("", source, [output]), 1, operation)
    assert "\n" not in message["error"] and "Traceback" not in message["error"]
    return message["error"]


def test_a_database_that_does_not_answer_is_a_sentence_with_its_address(tmp_path: Path) -> None:
    address = "postgresql://me:s3cr3t@127.0.0.1:9/db"
    (tmp_path / "no.db").write_text("no database" * 100)
    source, output = batch.JsonReader(f"{tmp_path}/in.jsonl").to_dict(), batch.JsonWriter(f"{tmp_path}/o").to_dict()
    (tmp_path / "in.jsonl").write_text('{"a":1}\n')
    for reader in (batch.SqlReader(address, table="t"), batch.SqlReader(address, query="SELECT 1")):
        error = error_of({"op": "plan"}, reader.to_dict(), output)
        assert error.startswith("the database postgresql://me@127.0.0.1:9/db cannot be read: ")
        assert "refused" in error and "; check its host, port," in error and "s3cr3t" not in error
    plan: Row = {"op": "plan"}
    error = error_of(plan, source, batch.SqlWriter(address, table="t").to_dict())
    assert error.startswith("the database postgresql://me@127.0.0.1:9/db cannot be written: ")
    error = error_of(plan, source, batch.SqlWriter(f"sqlite:///{tmp_path}/none/a.db", table="t").to_dict())
    assert error.endswith("none/a.db cannot be written: unable to open database file; "
                          "check that its directory exists, and your rights")  # fmt: skip
    error = error_of(plan, batch.SqlReader(f"sqlite:///{tmp_path}/no.db", table="t").to_dict(), output)
    assert error.endswith("no.db cannot be read: file is not a database; give the path of a SQLite file")
    outcomes: list[AttemptOutcome] = []
    spec = JobSpec("", source, [batch.SqlWriter(address, table="t").to_dict()])
    feed = Feed(spec, [Assignment(0, 0, 0, 1, (str(tmp_path),))], outcomes.extend)
    rows = feed.take_batch()
    assert rows is not None
    feed.finish_batch(rows)
    feed.finish()
    assert outcomes[0].retry and outcomes[0].error.startswith("the database postgresql://me@127.0.0.1:9/db cannot be w")
    assert "\n" not in outcomes[0].error


def test_a_table_that_refuses_rows_is_named_with_the_reason_and_what_to_do(url: str) -> None:
    execute(url, "CREATE TABLE results (n BIGINT PRIMARY KEY, t TEXT NOT NULL)", "INSERT INTO results VALUES (1, 's3')")
    bad_rows: list[Row] = [{"n": 1, "t": "a"}, {"n": 2}, {"n": 2, "t": "a", "z": 1}]
    reasons = ["constraint", "(NOT NULL|not-null)", r"no columns \['z'\]; it has \['n', 't'\]"]
    for job_id, (row, reason) in enumerate(zip(bad_rows, reasons, strict=True)):
        writer = batch.SqlWriter(url, table="results", append=True)
        parts = write(writer, [row], job_id)
        with pytest.raises(UserError, match=f"^table 'results' of .*{reason}.*resume the job") as refused:
            publish(writer, parts, job_id)
        assert "\n" not in str(refused.value) and "s3" not in str(refused.value)
    assert len(table(url)) == 1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("sql") / "data", "--backend", "fake") as new_server:
        yield new_server


@batch.remote_function
def shout(marker: str) -> None:
    import os
    import signal
    from pathlib import Path

    for rows in batch.load():
        if any(row["name"] == "r40" for row in rows) and not Path(marker).exists():
            Path(marker).write_text("once")
            os.kill(os.getpid(), signal.SIGKILL)
        batch.save_results([{"id": row["id"], "text": row["name"].upper()} for row in rows])


@pytest.mark.extended
def test_from_table_to_table_with_a_function_that_is_killed(server: LiveServer, url: str, tmp_path: Path) -> None:
    make(url, 90)
    data = batch.read_sql(url, "items")
    outputs = [batch.SqlWriter(url, table="results"), batch.SqlWriter(url, table="ids", column="id")]
    options: dict[str, Any] = {"stream": False, "batch_size": 4, "client": Client(server.url, API_KEY)}
    job = data.map(shout, fn_kwargs={"marker": str(tmp_path / "died")}, output=outputs, **options)
    assert isinstance(job, batch.Job)
    job.wait()
    assert (tmp_path / "died").exists()
    expected_rows = [{"id": index * 3 - 50, "text": f"R{index}"} for index in range(90)]
    assert table(url) == expected_rows and table(url, "ids") == [{"id": row["id"]} for row in expected_rows]
    assert [output.rows for output in job.outputs] == [90, 90]
    while names(url) != {"items", "results", "ids"}:
        pass
    assert not list(server.data_dir.glob("batch_inputs/**/*.parquet")), "the snapshot was deleted with the parts"
    with pytest.raises(UserError, match="is not a file"):
        job.export(str(tmp_path / "o.jsonl"))


@batch.remote_function
def breaks() -> None:
    for rows in batch.load():
        if rows[0]["name"] == "r8":
            raise ValueError("enough")
        batch.save_results(rows)


@pytest.mark.extended
def test_what_a_failed_job_has_for_a_table_is_exported_as_lines(server: LiveServer, url: str, tmp_path: Path) -> None:
    rows = make(url, 12)
    job = batch.read_sql(url, "items").map(
        breaks, output=batch.SqlWriter(url, table="results"), batch_size=4, stream=False,
        client=Client(server.url, API_KEY), limits={"max_retries": 0, "backoff_s": 0.01},
    )  # fmt: skip
    assert isinstance(job, batch.Job) and job.wait(check=False)["status"] == "FAILED"
    assert "results" not in names(url)
    job.export(str(tmp_path / "o.jsonl"))
    partial_rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert rows[:8] == partial_rows[:8] and all(row in rows for row in partial_rows)
    assert list(job.partial()) == partial_rows


@pytest.mark.extended
def test_a_resumed_job_reads_the_rows_of_its_beginning(server: LiveServer, url: str, tmp_path: Path) -> None:
    rows = make(url, 12)
    client = Client(server.url, API_KEY)
    data, output = batch.read_sql(url, "items"), tmp_path / "out.jsonl"
    options: dict[str, Any] = {
        "output": batch.JsonWriter(str(output)), "batch_size": 4, "stream": False, "client": client
    }  # fmt: skip
    job = data.map(breaks, limits={"max_retries": 0}, **options)
    assert job.wait(check=False)["status"] == "FAILED"
    (snapshot,) = tmp_path.glob(f"**/{job.job_id}/input-*/rows.parquet")
    execute(url, "DELETE FROM items WHERE id < 0", "UPDATE items SET name = 'changed'")
    other = data.map(lambda row: {}, resume_from=job, **options)
    other.wait()
    assert [json.loads(line) for line in output.read_text().splitlines()] == rows
    while snapshot.exists():
        time.sleep(0.01)


@pytest.mark.extended
def test_a_snapshot_is_deleted_with_the_parts_of_a_purged_job(server: LiveServer, url: str, tmp_path: Path) -> None:
    make(url, 12)
    client = Client(server.url, API_KEY)
    for index, output in enumerate(
        [batch.JsonWriter(str(tmp_path / "out.jsonl")), batch.SqlWriter(url, table="results")]
    ):
        job = batch.read_sql(url, "items").map(
            breaks, output=output, batch_size=4, stream=False, client=client, limits={"max_retries": 0}
        )
        assert job.wait(check=False)["status"] == "FAILED"
        directory = tmp_path if index == 0 else server.data_dir / "batch_inputs"
        (snapshot,) = directory.glob(f"**/{job.job_id}/input-*/rows.parquet")
        job.purge()
        while snapshot.exists():
            time.sleep(0.01)


def test_a_snapshot_in_a_bucket_is_read_by_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = databases.bare_url(tmp_path, "sqlite")
    rows = make(url, 50)
    reader = batch.SqlReader(url, table="items")
    with buckets.bucket() as bucket:
        outputs = [batch.SqlWriter(url, table="t").to_dict(), batch.JsonWriter(f"{bucket.url}/out.jsonl").to_dict()]
        spec = JobSpec("", reader.to_dict(), outputs, 8, storage=str(tmp_path))
        (planned,) = io_operations.plan(spec, 7)
        path = planned["end"]["input_snapshot"]
        assert path.startswith(f"{bucket.url}/.tinsmith_batch_tmp/7/input-") and planned["end"]["total_rows"] == 50
        (tmp_path / "tinsmith.db").unlink()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "another machine"))
        assert open_input(replace(spec, input_snapshot=path)).download_batch(0, 49, "") == rows
        io_operations.delete_parts(outputs[1], 1, 7)
        assert bucket.keys() == []
