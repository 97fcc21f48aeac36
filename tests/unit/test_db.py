"""The migrations create the schema that the code uses; transactions are atomic and isolated."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext

from support.databases import POSTGRES, bare_url
from tinsmith.db import database
from tinsmith.db.database import Database
from tinsmith.db.factory import open_database
from tinsmith.db.postgres import IDLE_IN_TRANSACTION_S, sqlalchemy_url
from tinsmith.db.postgres_database import PostgresDatabase
from tinsmith.db.schema import BATCH_STATES, ENGINES, FUTURES, METADATA, RESPONSES
from tinsmith.db.sqlite_database import SQLiteDatabase
from tinsmith.errors import SettingsError

MIGRATIONS = Path(database.__file__).parent / "migrations"
ROW = {"base_model": "a", "engine_id": "b", "pid": 1, "state": "ready", "reason": None, "started_at": 0.0}


@pytest.fixture
def db(tmp_path: Path, database_kind: str) -> Iterator[Database]:
    database = open_database(bare_url(tmp_path, database_kind))
    database.migrate()
    yield database
    database.close()


def schema(db: Database) -> dict[str, object]:
    """The database's own description of its tables."""
    inspector = sa.inspect(db.engine)
    return {
        table: (
            {column["name"]: (str(column["type"]), column["nullable"]) for column in inspector.get_columns(table)},
            inspector.get_pk_constraint(table)["constrained_columns"],
            sorted(unique["column_names"] for unique in inspector.get_unique_constraints(table)),
            sorted(str(index["column_names"]) for index in inspector.get_indexes(table)),
        )
        for table in sorted(set(inspector.get_table_names()) - {"alembic_version"})
    }


def test_migrations_make_exactly_the_tables_of_the_code(db: Database) -> None:
    with db.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []


def test_migrations_make_the_same_schema_as_the_code(db: Database, tmp_path: Path, database_kind: str) -> None:
    (tmp_path / "code").mkdir()
    by_code = open_database(bare_url(tmp_path / "code", database_kind))
    METADATA.create_all(by_code.engine)
    assert schema(db) == schema(by_code)
    by_code.close()


def test_arrivals_are_never_used_again(db: Database) -> None:
    # The engine would skip a rowid that was reused after a deletion, as already read.
    rows = {"tenant_id": "a", "session_id": "s", "base_model": "b", "kind": "sample", "state": "pending"}
    arrivals = []
    for name in "ab":
        with db.write() as connection:
            added = FUTURES.insert().values(request_id=name, num_tokens=0, body_bytes=0, created_at=0.0, **rows)
            arrivals.append(connection.execute(added.returning(FUTURES.c.arrival)).scalar_one())
            connection.execute(FUTURES.delete())
    assert arrivals[1] > arrivals[0]


def test_migrating_again_changes_nothing(db: Database) -> None:
    with db.write() as connection:
        connection.execute(ENGINES.insert(), ROW)
    before = schema(db)
    db.migrate()
    assert schema(db) == before
    with db.read() as connection:
        assert connection.scalar(sa.select(ENGINES.c.pid)) == 1


MIGRATE = """
import sys
from tinsmith.db.factory import open_database
db = open_database(sys.argv[1])
sys.stdout.write("ready")
sys.stdout.flush()
sys.stdin.read(1)
db.migrate()
db.close()
"""


def test_processes_may_migrate_at_once(tmp_path: Path, database_kind: str) -> None:
    url = bare_url(tmp_path, database_kind)
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
    db = open_database(url)
    with db.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    db.close()


def test_a_new_file_whose_writer_is_not_done_is_waited_for(tmp_path: Path) -> None:
    # SQLite does not wait here despite its timeout, when two processes open a new database.
    path = tmp_path / "new.sqlite"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    other.execute("CREATE TABLE early (x)")
    release = threading.Timer(0.3, other.execute, ["COMMIT"])
    release.start()
    db = open_database(f"sqlite:///{path}")
    with db.read() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert sa.inspect(connection).get_table_names() == ["early"]
    release.join()
    other.close()
    db.close()


def test_a_failed_write_leaves_nothing(db: Database) -> None:
    with pytest.raises(RuntimeError), db.write() as connection:
        connection.execute(ENGINES.insert(), ROW)
        raise RuntimeError
    with db.read() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(ENGINES)) == 0


def test_writers_take_turns_where_they_must_and_readers_do_not_wait(db: Database) -> None:
    with db.write() as connection:
        connection.execute(ENGINES.insert(), ROW | {"pid": 0})
    # On Postgres a row that is read for an update must be locked; SQLite ignores this.
    to_change = sa.select(ENGINES.c.pid).with_for_update()

    def add() -> None:
        for _ in range(50):
            with db.write() as connection:
                pid = connection.scalar(to_change)
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


def test_an_error_does_not_contain_the_sent_values(db: Database) -> None:
    with db.write() as connection:
        connection.execute(ENGINES.insert(), ROW)
    with pytest.raises(sa.exc.IntegrityError) as caught, db.write() as connection:
        connection.execute(ENGINES.insert(), ROW | {"reason": "a-secret-body"})
    assert "a-secret-body" not in str(caught.value)


# Schema versions.


def set_version(db: Database, revision: str) -> None:
    with db.write() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})


def version(db: Database) -> str | None:
    with db.read() as connection:
        return connection.scalar(sa.text("SELECT version_num FROM alembic_version"))


def test_the_last_schema_before_the_first_release_is_accepted_with_its_rows(db: Database) -> None:
    with db.write() as connection:
        connection.execute(ENGINES.insert(), ROW)
    before, newest = schema(db), version(db)
    set_version(db, "0010")
    for _ in range(2):
        db.migrate()
        assert version(db) == newest
    assert schema(db) == before
    with db.read() as connection:
        assert connection.scalar(sa.select(ENGINES.c.engine_id)) == "b"


def test_a_database_of_the_first_schema_is_migrated_with_its_rows(tmp_path: Path, database_kind: str) -> None:
    url = bare_url(tmp_path, database_kind)
    engine = sa.create_engine(sqlalchemy_url(url))
    with engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        config.attributes["connection"] = connection
        command.upgrade(config, "schema_0001")
        row = {"response_id": "r", "tenant_id": "a", "answered": False, "created_at": 1.0}
        content = {"request": '{"model": "m"}', "before": "[]", "request_ids": "[]"}
        names = [*row, *content]
        quoted = ", ".join(f'"{name}"' for name in names)
        values = ", ".join(f":{name}" for name in names)
        connection.execute(sa.text(f"INSERT INTO responses ({quoted}) VALUES ({values})"), row | content)
        insert = "INSERT INTO batch_state (job_id, batch_idx, start_idx, end_idx, status, updated_at) VALUES "
        batches = ["1, 0, 0, 0, 'COMPLETED', 9", "1, 1, 1, 1, 'PENDING', 5", "1, 2, 2, 2, 'COMPLETED', 7"]
        connection.execute(sa.text(insert + ", ".join(f"({batch})" for batch in batches)))
    engine.dispose()
    (tmp_path / "fresh").mkdir()
    migrated, fresh = open_database(url), open_database(bare_url(tmp_path / "fresh", database_kind))
    migrated.migrate()
    fresh.migrate()
    assert schema(migrated) == schema(fresh) and version(migrated) == version(fresh)
    with migrated.read() as connection:
        assert connection.scalar(sa.select(RESPONSES.c.size_bytes)) == len('{"model": "m"}') + len("[]")
        numbers = sa.select(BATCH_STATES.c.commit_number).order_by(BATCH_STATES.c.batch_idx)
        assert connection.execute(numbers).scalars().all() == [2, None, 1]
    migrated.close()
    fresh.close()


@pytest.mark.matrix(3)
@pytest.mark.parametrize("revision", ["9999", "schema_9999", "0001", "0009"])
def test_a_schema_of_an_unknown_version_is_refused_and_left_alone(db: Database, revision: str) -> None:
    set_version(db, revision)
    before = schema(db)
    words = rf"schema version {revision}, .*a newer Tinsmith created the database, .*an empty --data-dir"
    with pytest.raises(SettingsError, match=words):
        db.migrate()
    assert schema(db) == before and version(db) == revision


# Differences between the databases.


@pytest.mark.parametrize(
    ("url", "implementation"),
    [
        ("sqlite://", SQLiteDatabase),
        ("postgres://user@127.0.0.1:1/name", PostgresDatabase),
        ("postgresql+psycopg://user@127.0.0.1:1/name", PostgresDatabase),
    ],
)
def test_the_url_decides_which_database_is_opened(url: str, implementation: type[Database]) -> None:
    database = open_database(url)
    assert type(database) is implementation
    database.close()


def test_reads_wait_and_transactions_notify_on_postgres_only(db: Database, database_kind: str) -> None:
    assert db.reads_wait == db.notifies == (database_kind == POSTGRES)


def test_floors_are_integers_and_never_rounded_up(db: Database) -> None:
    for value in (0.0, 0.5, 0.999, 1.0, 1.5, 2.5, 1e9 + 0.75):
        assert db.scalar(sa.select(db.floor(sa.literal(value)))) == int(value)


def test_locked_rows_are_skipped_until_the_transaction_ends_or_there_is_one_writer(
    db: Database, database_kind: str
) -> None:
    with db.write() as connection:
        connection.execute(ENGINES.insert(), ROW)
    names = sa.select(ENGINES.c.engine_id).where(ENGINES.c.engine_id == sa.bindparam("name"))
    executed: list[str] = []
    sa.event.listen(db.engine, "before_cursor_execute", lambda _connection, _cursor, text, *_: executed.append(text))
    with db.write() as connection:
        executed.clear()
        db.lock_rows(connection, names.with_for_update(), {"name": "b"})
        if database_kind == POSTGRES:
            with db.write() as other:
                assert other.scalar(names.with_for_update(skip_locked=True), {"name": "b"}) is None
        else:
            assert executed == []
    with db.write() as connection:
        assert connection.scalar(names.with_for_update(skip_locked=True), {"name": "b"}) == "b"


# Addresses.


def test_postgres_urls_of_any_driver_use_the_same_driver() -> None:
    for scheme in ("postgres", "postgresql", "postgresql+psycopg"):
        assert sqlalchemy_url(f"{scheme}://user:pass@host/name?x=y") == "postgresql+psycopg://user:pass@host/name?x=y"
    assert sqlalchemy_url("sqlite:///a.db") == "sqlite:///a.db"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://host/name", "database_url begins with 'mysql://'"),
        ("nothing", "database_url"),
        ("postgresql://nobody:a-password@127.0.0.1:1/none", "cannot be reached"),
        ("postgresql://host:port/name", "database_url"),
    ],
)
def test_a_database_that_cannot_be_is_refused_without_its_password(url: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        open_database(url).migrate()
    assert "a-password" not in str(caught.value)


def test_a_named_lock_has_one_holder(tmp_path: Path) -> None:
    url = bare_url(tmp_path, POSTGRES)
    first_db, second_db = open_database(url), open_database(url)
    with (
        first_db.try_lock("janitor") as first,
        second_db.try_lock("janitor") as second,
        second_db.try_lock("other") as other,
    ):
        assert (first, second, other) == (True, False, True)
    with second_db.try_lock("janitor") as second:
        assert second
    first_db.close()
    second_db.close()


def test_a_process_that_is_stopped_in_a_transaction_does_not_hold_its_locks_for_ever(tmp_path: Path) -> None:
    db = open_database(bare_url(tmp_path, POSTGRES))
    with db.read() as connection:
        assert connection.scalar(sa.text("SHOW idle_in_transaction_session_timeout")) == f"{IDLE_IN_TRANSACTION_S}s"
    db.close()


def test_a_connection_that_was_cut_is_replaced(tmp_path: Path) -> None:
    db = open_database(bare_url(tmp_path, POSTGRES))
    me = sa.text("SELECT pg_backend_pid()")
    with db.read() as connection:
        cut = connection.scalar(me)
    other = open_database(db.url)
    with other.read() as connection:
        connection.execute(sa.text(f"SELECT pg_terminate_backend({cut})"))
    with db.write() as connection:
        assert connection.scalar(me) != cut
    other.close()
    db.close()
