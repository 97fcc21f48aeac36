"""SQLite's connection pool: a connection keeps no state between transactions."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from tinsmith.db.database import Database
from tinsmith.db.factory import open_database
from tinsmith.db.sqlite import POOL_SIZE
from tinsmith.db.statements import Statement

THINGS = sa.Table("things", sa.MetaData(), sa.Column("name", sa.String, primary_key=True))
PARTS = sa.Table(
    "parts",
    THINGS.metadata,
    sa.Column("name", sa.ForeignKey("things.name", deferrable=True, initially="DEFERRED")),
)
ADD = Statement(THINGS.insert())
NAMES = Statement(sa.select(THINGS.c.name).order_by(THINGS.c.name))


@pytest.fixture
def lite(tmp_path: Path) -> Database:
    database = open_database(f"sqlite:///{tmp_path}/things.db")
    with database.write() as connection:
        THINGS.metadata.create_all(connection)
    return database


def names(db: Database) -> list[str]:
    with db.read() as connection:
        return [name for (name,) in NAMES.rows(connection, {})]


def test_statements_of_both_kinds_are_one_transaction(lite: Database) -> None:
    with pytest.raises(RuntimeError), lite.write() as connection:
        ADD.count(connection, {"name": "by the driver"})
        connection.execute(THINGS.insert(), {"name": "by SQLAlchemy"})
        ADD.count(connection, {"name": "by the driver again"})
        raise RuntimeError
    assert names(lite) == []
    with lite.write() as connection:
        connection.execute(THINGS.insert(), {"name": "a"})
        ADD.count(connection, {"name": "b"})
    assert names(lite) == ["a", "b"]


def test_an_unfinished_transaction_is_rolled_back_before_the_next(lite: Database) -> None:
    with pytest.raises(RuntimeError), lite.write() as connection:
        ADD.count(connection, {"name": "lost"})
        raise RuntimeError
    with lite.write() as connection:
        ADD.count(connection, {"name": "written"})
    assert names(lite) == ["written"]


def test_a_read_sees_one_state_of_all_that_sqlalchemy_asks_and_holds_nothing_afterwards(lite: Database) -> None:
    count = sa.select(sa.func.count()).select_from(THINGS)
    with lite.read() as connection:
        assert connection.scalar(count) == 0
        with lite.write() as writing:
            ADD.count(writing, {"name": "meanwhile"})
        assert connection.scalar(count) == 0
    with lite.read() as connection:
        assert NAMES.first(connection, {}) == ("meanwhile",)
        assert connection.scalar(count) == 1
    # An open reader would prevent the truncation of the log.
    with sqlite3.connect(lite.url.removeprefix("sqlite:///")) as other:
        assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0


def test_a_commit_that_is_refused_is_sqlalchemys_error_and_changes_nothing(lite: Database) -> None:
    orphan = Statement(PARTS.insert())
    with pytest.raises(IntegrityError), lite.write() as connection:
        ADD.count(connection, {"name": "beside it"})
        orphan.count(connection, {"name": "nothing"})
    assert names(lite) == []


def test_no_more_connections_stay_open_than_were_used_together(lite: Database) -> None:
    def read_nested(depth: int) -> None:
        with lite.read() as connection:
            NAMES.rows(connection, {})
            if depth:
                read_nested(depth - 1)

    assert len(lite._pool._idle) == 1, "the one that made the tables"
    read_nested(1)
    assert len(lite._pool._idle) == 2
    read_nested(2 * POOL_SIZE)
    assert len(lite._pool._idle) == POOL_SIZE
    lite.close()
    assert not lite._pool._idle


def test_the_duration_of_each_use_is_reported(lite: Database) -> None:
    used: list[float] = []
    lite.observe_use(used.append)
    names(lite)
    with pytest.raises(RuntimeError), lite.write():
        raise RuntimeError
    assert len(used) == 2 and all(seconds > 0 for seconds in used)
