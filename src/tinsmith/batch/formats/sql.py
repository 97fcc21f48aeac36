"""Databases that bulk jobs read from and write to: SQLite files and Postgres, by URL. In workers only.

A password never stays in a path, which is shown and stored in many places: `split_url` takes it out, and only `connect`
puts it back. What a driver says of a connection or a statement is passed on without the values of parameters.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from tinsmith.errors import NotSupportedError, UserError

if TYPE_CHECKING:
    import sqlalchemy as sa
    from sqlalchemy.engine import Connection, Engine

BUSY_S = 60.0
"""How long one writer of a SQLite file waits for another."""
KINDS = "use sqlite:////DIR/FILE or postgresql://USER@HOST/NAME"


class Address(NamedTuple):
    """`url` has no password; `table` is what follows a `#`, if anything does."""

    url: str
    table: str
    password: str


def split_url(given: str) -> Address:
    """Raises UserError, which shows nothing of a URL that cannot be understood: it may hold a password."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    base, table = given, ""
    head, mark, tail = given.rpartition("#")
    if mark and not set(tail) & set("@/?"):
        base, table = head, tail
    try:
        url = make_url(base)
    except ArgumentError:
        raise UserError(f"the path of a table is no URL; {KINDS}") from None
    kind = url.drivername.partition("+")[0]
    if kind not in ("sqlite", "postgresql", "postgres"):
        raise NotSupportedError(f"a database of the kind {url.drivername!r} is not supported; {KINDS}")
    if "password" in url.query:
        raise UserError(
            "the URL has its password in the query; put it before the host (USER:PASSWORD@HOST) or leave it"
        )
    password = url.password or ""
    if kind == "sqlite":
        if not url.database or url.database == ":memory:":
            raise UserError(f"the SQLite URL names no file; {KINDS}")
        url = url.set(drivername="sqlite", database=os.path.join(os.getcwd(), url.database))
    else:
        url = url._replace(drivername="postgresql", password=None)  # `set` would keep it
    return Address(url.render_as_string(hide_password=False), table, password)


@lru_cache(maxsize=8)
def _engine(url: str, password: str) -> Engine:
    import sqlalchemy as sa
    from sqlalchemy import event
    from sqlalchemy.engine import make_url
    from sqlalchemy.pool import NullPool

    made = make_url(url)
    if made.drivername == "sqlite":
        engine = sa.create_engine(made, hide_parameters=True, poolclass=NullPool, connect_args={"timeout": BUSY_S})
        event.listen(engine, "connect", _no_transactions_of_the_driver)
        event.listen(engine, "begin", _begin)
        return engine
    made = made.set(drivername="postgresql+psycopg", password=password or None)
    try:
        return sa.create_engine(made, hide_parameters=True, poolclass=NullPool)
    except ModuleNotFoundError:
        raise UserError("Postgres needs the package psycopg on workers: pip install 'tinsmith[postgres]'") from None


def _no_transactions_of_the_driver(connection: object, _record: object) -> None:
    connection.isolation_level = None  # type: ignore[attr-defined]  it would leave statements that make tables outside


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("tinsmith_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def connect(url: str, password: str, *, writes: bool) -> Iterator[Connection]:
    """One transaction: committed at the end of the block, and rolled back by any error in it."""
    if not writes and url.startswith("sqlite:///") and not os.path.exists(path := url.removeprefix("sqlite:///")):
        raise FileNotFoundError(f"there is no SQLite file {path}")
    engine = _engine(url, password)
    with engine.connect().execution_options(tinsmith_write=writes) as connection, connection.begin():
        yield connection


def existing_table(connection: Connection, name: str) -> sa.Table | None:
    """The table as it is; `name` may begin with a schema."""
    import sqlalchemy as sa
    from sqlalchemy.exc import NoSuchTableError

    schema, _, bare = name.rpartition(".")
    try:
        return sa.Table(bare, sa.MetaData(), schema=schema or None, autoload_with=connection)
    except NoSuchTableError:
        return None


def check_name(name: str) -> None:
    if not name or not all(part.isidentifier() for part in name.split(".")) or name.count(".") > 1:
        raise ValueError(f"table is {name!r}; it must be a name, or SCHEMA.NAME")
