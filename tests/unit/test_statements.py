"""A `Statement` returns what SQLAlchemy would return, on both databases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from support.databases import SQLITE, bare_url
from tinsmith.db.database import Database
from tinsmith.db.factory import open_database
from tinsmith.db.statements import Statement

THINGS = sa.Table(
    "things",
    sa.MetaData(),
    sa.Column("name", sa.String(100), primary_key=True),
    sa.Column("size", sa.Float),
    sa.Column("facts", sa.JSON),
    sa.Column("flag", sa.Boolean),
    sa.Column("body", sa.LargeBinary),
    sa.Column("number", sa.BigInteger),
)
ROW = {"name": "a", "size": 3, "facts": {"b": [1, None]}, "flag": True, "body": b"\0\xff", "number": 2**62}
GIVEN = ROW | {"facts": json.dumps(ROW["facts"])}
ADD = THINGS.insert()
FIND = (
    sa.select(THINGS, sa.func.coalesce(THINGS.c.number, 7).label("number_or_7"))
    .where(THINGS.c.name >= sa.bindparam("first"), THINGS.c.name < "z")
    .order_by(THINGS.c.name)
)
RENAME = THINGS.update().where(THINGS.c.name == sa.bindparam("old")).values(name=sa.bindparam("new"), size=0)


@pytest.fixture
def db(tmp_path: Path, database_kind: str) -> Iterator[Database]:
    database = open_database(bare_url(tmp_path, database_kind))
    with database.write() as connection:
        THINGS.create(connection)
    yield database
    database.close()


def test_rows_are_the_same_as_sqlalchemys(db: Database) -> None:
    add, find = Statement(ADD), Statement(FIND)
    with db.write() as connection:
        assert add.count(connection, GIVEN) == 1
        nothing = {**dict.fromkeys(ROW), "name": "b"}
        assert add.count(connection, nothing) == 1
    with db.read() as connection:
        for first in ("a", "b", "c"):
            expected = [tuple(row) for row in connection.execute(FIND, {"first": first})]
            actual = [tuple(row) for row in find.rows(connection, {"first": first})]
            assert actual == expected
            first_row = find.first(connection, {"first": first})
            assert (None if first_row is None else tuple(first_row)) == (expected[0] if expected else None)
        assert tuple(find.rows(connection, {"first": "a"})[0]) == (*ROW.values(), 2**62)


def test_changes_are_counted_and_roll_back_with_their_transaction(db: Database) -> None:
    rename = Statement(RENAME)
    with db.write() as connection:
        Statement(ADD).count(connection, GIVEN)
    with pytest.raises(ZeroDivisionError), db.write() as connection:
        assert rename.count(connection, {"old": "a", "new": "b"}) == 1
        assert rename.count(connection, {"old": "a", "new": "b"}) == 0
        raise ZeroDivisionError
    with db.read() as connection:
        assert connection.execute(sa.select(THINGS.c.name, THINGS.c.size)).all() == [("a", 3.0)]


def test_errors_are_sqlalchemys_without_the_sent_values(db: Database) -> None:
    add = Statement(ADD)
    secret = GIVEN | {"body": b"not for the log"}
    with pytest.raises(IntegrityError) as caught, db.write() as connection:
        add.count(connection, secret)
        add.count(connection, secret)
    assert "not for the log" not in str(caught.value)
    with pytest.raises(DBAPIError), db.write() as connection:
        Statement(sa.select(sa.table("nowhere", sa.column("x")))).rows(connection, {})
    with pytest.raises((KeyError, DBAPIError)), db.write() as connection:
        add.count(connection, {"name": "c"} | dict.fromkeys(("size", "facts", "flag", "body")))
    with db.read() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(THINGS)) == 0


def test_a_statement_may_have_another_text_on_postgres_and_take_an_array(db: Database, database_kind: str) -> None:
    by_database = Statement(
        sa.text("SELECT 'sqlite', value FROM json_each(:elements) WHERE value > :least ORDER BY value"),
        postgresql=sa.text(
            "SELECT 'postgres', value FROM unnest(CAST(:elements AS bigint[])) AS element(value) "
            "WHERE value > :least ORDER BY value"
        ),
    )
    values = {"elements": db.array((3, 2**40, 1)), "least": 1}
    assert db.rows(by_database, values) == [(database_kind, 3), (database_kind, 2**40)]


def test_a_list_of_any_length_is_refused() -> None:
    listed = sa.select(THINGS).where(THINGS.c.name.in_(sa.bindparam("names", expanding=True)))
    db = open_database("sqlite://")
    with pytest.raises(AssertionError, match="any length"), db.read() as connection:
        Statement(listed).rows(connection, {"names": ["a"]})
    db.close()


def test_a_lock_timeout_is_an_operational_error(tmp_path: Path) -> None:
    writer, reader = (open_database(bare_url(tmp_path, SQLITE), patience_s=0) for _ in range(2))
    with writer.write() as connection:
        THINGS.create(connection)
    with writer.write() as connection, reader.read() as reading:
        Statement(ADD).count(connection, GIVEN)
        with pytest.raises(OperationalError):
            Statement(ADD).count(reading, GIVEN)
    for database in (writer, reader):
        database.close()
