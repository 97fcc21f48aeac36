"""The databases that tests run on: SQLite, or Postgres with `pytest --database postgres`.

`fresh_url` returns a migrated, empty database. Tests of the database itself use the fixture `database_kind` and always
run on both kinds.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from support import postgres
from tinsmith.db.factory import open_database

SQLITE, POSTGRES = "sqlite", "postgres"
KINDS = (SQLITE, POSTGRES)
TEMPLATE = "migrated"

chosen = SQLITE
"""The kind of this test run; set once, from the command line."""


@functools.cache
def sqlite_template() -> bytes:
    """A template of an empty SQLite database, since the migrations take longer than most tests."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "test.db"
        _migrate(f"sqlite:///{path}")
        return path.read_bytes()


@functools.cache
def _postgres_template() -> str:
    server = postgres.shared_server()
    server.run(f"CREATE DATABASE {TEMPLATE}")
    _migrate(server.url(TEMPLATE))
    return TEMPLATE


def _migrate(url: str) -> None:
    database = open_database(url)
    database.migrate()
    database.close()


def fresh_url(directory: Path, kind: str | None = None) -> str:
    """A new database, migrated and empty; a SQLite file lies in `directory`."""
    if (kind or chosen) == POSTGRES:
        return postgres.shared_server().fresh(_postgres_template())
    path = directory / "tinsmith.db"
    path.write_bytes(sqlite_template())
    return f"sqlite:///{path}"


@functools.cache
def database_url(data_dir: Path) -> str:
    """The database URL for a server on this data directory, the same at every start."""
    return "" if chosen == SQLITE else bare_url(data_dir)


def bare_url(directory: Path, kind: str | None = None) -> str:
    """A new database without any table."""
    if (kind or chosen) == POSTGRES:
        return postgres.shared_server().fresh()
    return f"sqlite:///{directory / 'tinsmith.db'}"
