"""The schema that migrations make is the one that the code uses; transactions do what they are for."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from tinsmith.db import ENGINES, METADATA, Database

ROW = {"base_model": "a", "engine_id": "b", "pid": 1, "state": "ready", "reason": None, "started_at": 0.0}


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    made = Database(f"sqlite:///{tmp_path / 'test.db'}")
    made.migrate()
    yield made
    made.close()


def schema(db: Database) -> dict[str, str]:
    """What SQLite itself says of every table and index."""
    with db.read() as connection:
        rows = connection.execute(sa.text("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))
        return {row.name: row.sql for row in rows}


def test_migrations_make_exactly_the_tables_of_the_code(db: Database) -> None:
    with db.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []


def test_migrations_make_the_same_uniqueness_as_the_code(db: Database, tmp_path: Path) -> None:
    by_code = Database(f"sqlite:///{tmp_path / 'code.db'}")
    METADATA.create_all(by_code.engine)
    inspected = []
    for database in (db, by_code):
        inspector = sa.inspect(database.engine)
        tables = sorted(set(inspector.get_table_names()) - {"alembic_version"})
        inspected.append(
            {
                table: (
                    inspector.get_pk_constraint(table)["constrained_columns"],
                    sorted(unique["column_names"] for unique in inspector.get_unique_constraints(table)),
                    sorted(str(index["column_names"]) for index in inspector.get_indexes(table)),
                )
                for table in tables
            }
        )
    by_code.close()
    assert inspected[0] == inspected[1]


def test_arrivals_are_never_used_again(db: Database) -> None:
    # A rowid that came back after a deletion would be taken for one that the engine has read already.
    assert "AUTOINCREMENT" in schema(db)["futures"]


def test_migrating_again_changes_nothing(db: Database) -> None:
    with db.write() as connection:
        connection.execute(ENGINES.insert(), ROW)
    before = schema(db)
    db.migrate()
    assert schema(db) == before
    with db.read() as connection:
        assert connection.scalar(sa.select(ENGINES.c.pid)) == 1


MIGRATE = """
import pathlib, sys, time
from tinsmith.db import Database
db = Database(sys.argv[1])
sys.stdout.write("ready")
sys.stdout.flush()
sys.stdin.read(1)
db.migrate()
db.close()
"""


def test_processes_may_migrate_at_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    command = [sys.executable, "-c", MIGRATE, url]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen(command, **pipes) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None and process.stdout.read(5) == b"ready"
    for process in processes:  # all at one moment
        assert process.stdin is not None
        process.stdin.write(b"x")
        process.stdin.flush()
    complaints = [process.communicate(timeout=60)[1].decode()[-1000:] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], complaints
    db = Database(url)
    with db.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    db.close()


def test_a_failed_write_leaves_nothing(db: Database) -> None:
    with pytest.raises(RuntimeError), db.write() as connection:
        connection.execute(ENGINES.insert(), ROW)
        raise RuntimeError
    with db.read() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(ENGINES)) == 0


def test_writers_take_turns_and_readers_do_not_wait(db: Database) -> None:
    with db.write() as connection:
        connection.execute(ENGINES.insert(), ROW | {"pid": 0})

    def add() -> None:
        for _ in range(50):
            with db.write() as connection:
                pid = connection.scalar(sa.select(ENGINES.c.pid))
                connection.execute(ENGINES.update().values(pid=(pid or 0) + 1))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with db.write() as writing:
        writing.execute(ENGINES.update().values(pid=-1))
        with db.read() as reading:
            assert reading.scalar(sa.select(ENGINES.c.pid)) == 200, "no increment was lost, none uncommitted is seen"


def test_an_error_does_not_repeat_what_was_sent(db: Database) -> None:
    with db.write() as connection:
        connection.execute(ENGINES.insert(), ROW)
    with pytest.raises(sa.exc.IntegrityError) as caught, db.write() as connection:
        connection.execute(ENGINES.insert(), ROW | {"reason": "a-secret-body"})
    assert "a-secret-body" not in str(caught.value)
