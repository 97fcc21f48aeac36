"""A database that is moved, deleted or replaced below a running process: the process acknowledges no further request
and stops."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from support.http_harness import Harness, close, make_harness
from support.live import serving
from support.raw_client import engine_of
from tinsmith.db.database import Database, DatabaseMovedError
from tinsmith.db.factory import open_database
from tinsmith.db.sqlite_database import SQLiteDatabase

TABLE = sa.table("notes", sa.column("text"))


def rename(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))


def delete(path: Path) -> None:
    path.unlink()


def replace_by_copy(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    shutil.copy(path.with_suffix(".moved"), path)


def directory_replaced(path: Path) -> None:
    path.parent.rename(path.parent.with_suffix(".moved"))
    path.parent.mkdir()


def log_deleted(path: Path) -> None:
    Path(f"{path}-wal").unlink()


def index_deleted(path: Path) -> None:
    Path(f"{path}-shm").unlink()


WAYS = [rename, delete, replace_by_copy, directory_replaced, log_deleted, index_deleted]


def write_row(database: Database, text: str) -> None:
    with database.write() as connection:
        connection.execute(TABLE.insert().values(text=text))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    (tmp_path / "data").mkdir()
    new_database = open_database(f"sqlite:///{tmp_path / 'data' / 'tinsmith.db'}")
    with new_database.write() as connection:
        connection.execute(sa.text("CREATE TABLE notes (text TEXT)"))
    write_row(new_database, "one")
    yield new_database
    new_database.close()


@pytest.mark.parametrize("change", WAYS)
def test_nothing_is_written_to_files_that_have_lost_their_names(
    database: Database, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    database.check_files()
    write_row(database, "two")
    change(tmp_path / "data" / "tinsmith.db")
    for _ in range(2):
        with pytest.raises(
            DatabaseMovedError, match=r"tinsmith\.db.* was moved, deleted or replaced.*put the file back"
        ):
            write_row(database, "three")
    with pytest.raises(DatabaseMovedError):
        database.check_files()


def test_files_that_are_not_replaced_cause_no_stop(database: Database, tmp_path: Path) -> None:
    """Other processes start and end, checkpoints truncate the log, and backups run."""
    for index in range(20):
        write_row(database, f"{index}")
        other = open_database(f"sqlite:///{tmp_path / 'data' / 'tinsmith.db'}", exists=True)
        write_row(other, "theirs")
        other.checkpoint()
        other.close()
        database.checkpoint()
        shutil.copy(tmp_path / "data" / "tinsmith.db", tmp_path / "backup.db")
        database.check_files()


def test_who_does_not_make_the_database_makes_no_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "tinsmith.db"
    with pytest.raises(DatabaseMovedError, match="was moved"):
        open_database(f"sqlite:///{path}", exists=True)
    assert not path.exists()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path)
    if not isinstance(new_harness.services.models._db, SQLiteDatabase):
        close(new_harness)
        pytest.skip("of files")
    yield new_harness
    close(new_harness)


def test_a_request_is_not_acknowledged_once_the_file_is_gone(harness: Harness, tmp_path: Path) -> None:
    model_id = harness.model()
    path = Path(sa.make_url(harness.services.models._db.url).database or "")
    path.rename(tmp_path / "elsewhere.db")
    for body in (
        {"model_id": model_id, "seq_id": 1, "adam_params": {}},  # stored on the event loop
        {"model_id": model_id, "adam_params": {}},  # and by a thread
    ):
        answer = harness.post("optim_step", body)
        assert answer.status_code == 503, answer.text
        assert "was moved or deleted" in answer.json()["detail"]
        assert str(tmp_path) not in answer.text


@pytest.mark.extended
def test_a_server_whose_database_is_deleted_stops_and_says_so(tmp_path: Path) -> None:
    with serving(tmp_path / "data", "--backend", "fake") as server:
        if not (tmp_path / "data" / "tinsmith.db").exists():
            pytest.skip("of files")
        engine = engine_of(server)
        (tmp_path / "data" / "tinsmith.db").unlink()
        assert server.process.wait(30) != 0
        assert not Path(f"/proc/{engine}").exists()
        log = (tmp_path / "data" / "server.log").read_text()
        assert f"{tmp_path / 'data' / 'tinsmith.db'} was moved, deleted or replaced" in log
        assert "put the file back" in log
        assert not (tmp_path / "data" / "tinsmith.db").exists()
