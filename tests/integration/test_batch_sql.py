"""Tables as inputs and outputs of bulk jobs, on SQLite and Postgres: ordered, atomic, exactly once, without leaked
passwords."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from support import databases
from support.live import API_KEY, LiveServer, serving
from tinsmith import batch
from tinsmith.batch.client.http import Client
from tinsmith.batch.formats import sql
from tinsmith.batch.formats.sql import split_url
from tinsmith.batch.types import OutputInfo, PartInfo, Row, RowRange, part_base, staging_of
from tinsmith.batch.worker import io_operations
from tinsmith.errors import CorruptFilesError, NotSupportedError, UserError


@pytest.fixture
def url(database_kind: str, tmp_path: Path) -> str:
    return databases.bare_url(tmp_path, database_kind)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.batch.formats.sql.cache_directory", lambda: tmp_path)


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


def test_an_empty_table_has_no_rows(url: str) -> None:
    execute(url, "CREATE TABLE items (id BIGINT PRIMARY KEY)")
    assert len(batch.SqlReader(url, table="items")) == 0


@pytest.mark.parametrize("change", ["DELETE FROM items WHERE id = -20", "INSERT INTO items VALUES (-49, 'new')"])
def test_a_table_that_changes_under_a_job_fails_the_batch_and_shifts_nothing(url: str, change: str) -> None:
    rows = make(url, 150)
    reader = batch.SqlReader(url, table="items").of_job(["out.jsonl"])
    assert len(reader) == 150
    execute(url, "INSERT INTO items VALUES (9999, 'behind the last')", change)
    in_job = batch.InputReader.from_dict(reader.to_dict())
    with pytest.raises(RuntimeError, match="has changed since its rows were counted"):
        in_job.download_batch(0, 9, "")
    assert in_job.download_batch(64, 149, "") == rows[64:], "the rest is where it was"
    assert len(batch.SqlReader(url, table="items").of_job(["other.jsonl"])) == (150 if "DELETE" in change else 152)
    assert batch.InputReader.from_dict(reader.to_dict()).download_batch(100, 101, "") == rows[100:102]


def test_a_job_does_not_count_again_what_it_has_counted(url: str, tmp_path: Path) -> None:
    make(url, 10)
    reader = batch.SqlReader(url, table="items").of_job(["out.jsonl"])
    with pytest.raises(RuntimeError, match="is lost; submit the job again"):
        reader.download_batch(0, 1, "")
    assert len(reader) == 10
    for file in tmp_path.glob("sql-*"):
        file.unlink()
    with pytest.raises(RuntimeError, match="is lost; submit the job again"):
        batch.InputReader.from_dict(reader.to_dict()).download_batch(0, 1, "")


@pytest.mark.parametrize(
    ("statement", "options", "says"),
    [
        ("CREATE TABLE t (a INT)", {"table": "t"}, "no primary key"),
        ("CREATE TABLE t (a INT)", {"table": "missing"}, "no table 'missing'"),
        ("CREATE TABLE t (a INT)", {"table": "t", "key": "b"}, "no column 'b'"),
        ("INSERT INTO u VALUES (1, 1), (1, 2)", {"table": "u", "key": "a"}, r"two rows have the key \[1\]"),
        ("INSERT INTO u VALUES (NULL, 1)", {"table": "u", "key": "a"}, "must be whole numbers or text"),
    ],
)
def test_keys_that_do_not_order_rows_are_refused(url: str, statement: str, options: dict[str, str], says: str) -> None:
    execute(url, "CREATE TABLE u (a INT, b INT)", statement)
    with pytest.raises(UserError, match=says):
        len(batch.SqlReader(url, **options))  # type: ignore[arg-type]


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
    with pytest.raises(OperationalError) as failed:
        len(batch.SqlReader("postgresql://me:s3cr3t@127.0.0.1:9/db", table="t"))
    assert "s3cr3t" not in str(failed.value)


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
            os.kill(os.getppid(), signal.SIGKILL)
        batch.save_results([{"id": row["id"], "text": row["name"].upper()} for row in rows])


@pytest.mark.extended
def test_from_table_to_table_with_a_worker_that_is_killed(server: LiveServer, url: str, tmp_path: Path) -> None:
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
