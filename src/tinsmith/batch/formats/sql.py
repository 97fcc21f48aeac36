"""Tables of SQLite files and of Postgres, named by URL. In workers only.

Reading: a job that is planned copies the rows once, in one transaction, to its snapshot (`snapshots.py`), from which
its batches read. Values are those of the driver; the columns of a SQLite table that are declared as booleans, dates,
times or JSON become these, or are refused.

Writing: the parts of a job are rows of a table of their own in the same database, `tinsmith_parts_...`: each has its
rows as lines of JSON and the kinds of its columns. Publishing fills the target table from the winning parts in one
transaction, which also stores a note. Publishing again finds the note, so the target is complete or absent, and
appended rows are added once. A column has the type that all its values fit: whole numbers, numbers, text, booleans,
bytes, times, dates, or else JSON.

A path is shown and stored in many places and never holds a password: `split_url` takes it out, and only `connect` puts
it back. An error of a driver becomes one sentence, a UserError with the query, table or database, the reason, and what
to do; it has no values of parameters.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import json
import os
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import orjson

from tinsmith.batch.formats.encoding import encode, select_columns
from tinsmith.batch.formats.pages import Page, refuse_value
from tinsmith.batch.formats.publishing import exists_already
from tinsmith.batch.formats.registry import (
    INPUT_READER_REGISTRY,
    OUTPUT_WRITER_REGISTRY,
    InputReader,
    OutputWriter,
    absolute_path,
)
from tinsmith.batch.types import OutputInfo, PartInfo, Row, RowRange, part_name
from tinsmith.errors import CorruptFilesError, NotSupportedError, UserError
from tinsmith.storage.stores import join

if TYPE_CHECKING:
    import sqlalchemy as sa
    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.exc import StatementError


BUSY_S = 60.0
"""How long a writer of a SQLite file waits for another."""
KINDS = "use sqlite:////DIR/FILE or postgresql://USER@HOST/NAME"
SHOWN_CHARACTERS = 200
"""Of a query in an error."""
SQLITE_REFUSALS = (
    "syntax error", "no such ", "incomplete input", "ambiguous column", "wrong number of arguments",
    "unknown database", "readonly database",
)  # fmt: skip
"""SQLite calls these refusals of a statement, as it does a lock, an OperationalError."""
SQLITE_ADVICE = {
    "locked": "end the program that holds its lock, and resume the job",
    "unable to open": "check that its directory exists, and your rights",
    "not a database": "give the path of a SQLite file",
}


class Address(NamedTuple):
    """`url` is without the password; `table` is the part after `#`."""

    url: str
    table: str
    password: str


def split_url(text: str) -> Address:
    """Split a URL into database, table and password. Raises UserError, which never shows a URL that cannot be parsed,
    since it may hold a password."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    base, table = text, ""
    head, mark, tail = text.rpartition("#")
    if mark and not set(tail) & set("@/?"):
        base, table = head, tail
    try:
        url = make_url(base)
    except ArgumentError:
        raise UserError(f"path is not a URL; {KINDS}") from None
    kind = url.drivername.partition("+")[0]
    if kind not in ("sqlite", "postgresql", "postgres"):
        raise NotSupportedError(f"a database of the kind {url.drivername!r} is not supported; {KINDS}")
    if "password" in url.query:
        raise UserError(
            "the URL has a password in its query; put it before the host (USER:PASSWORD@HOST) or leave it out"
        )
    password = url.password or ""
    if kind == "sqlite":
        if not url.database or url.database == ":memory:":
            raise UserError(f"the SQLite URL names no file; {KINDS}")
        url = url.set(drivername="sqlite", database=absolute_path(url.database))
    else:
        url = url._replace(drivername="postgresql", password=None)  # `set` would keep it
    return Address(url.render_as_string(hide_password=False), table, password)


@lru_cache(maxsize=8)
def _engine(url: str, password: str) -> Engine:
    import sqlalchemy as sa
    from sqlalchemy import event
    from sqlalchemy.engine import make_url
    from sqlalchemy.pool import NullPool

    address = make_url(url)
    if address.drivername == "sqlite":
        engine = sa.create_engine(address, hide_parameters=True, poolclass=NullPool, connect_args={"timeout": BUSY_S})
        event.listen(engine, "connect", _disable_driver_transactions)
        event.listen(engine, "begin", _begin)
        return engine
    address = address.set(drivername="postgresql+psycopg", password=password or None)
    try:
        return sa.create_engine(address, hide_parameters=True, poolclass=NullPool)
    except ModuleNotFoundError:
        raise UserError("Postgres needs the package psycopg on workers: pip install 'tinsmith[postgres]'") from None


def _disable_driver_transactions(connection: object, _record: object) -> None:
    connection.isolation_level = None  # type: ignore[attr-defined]  its transactions do not cover CREATE TABLE


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("tinsmith_write", False)
    if not writes:
        connection.exec_driver_sql("PRAGMA query_only = ON")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def connect(url: str, password: str, *, writes: bool) -> Iterator[Connection]:
    """One transaction: committed at the end of the block, and rolled back by any error in it. One that does not write
    sees one state of the database, and refuses statements that write."""
    if not writes and url.startswith("sqlite:///") and not os.path.exists(path := url.removeprefix("sqlite:///")):
        raise FileNotFoundError(f"there is no SQLite file {path}; give the path of an existing one")
    engine = _engine(url, password)
    options: dict[str, Any] = {"tinsmith_write": writes}
    if not writes and engine.dialect.name == "postgresql":
        options |= {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
    with engine.connect().execution_options(**options) as connection, connection.begin():
        yield connection


class SqlEndpoint:
    """The database of a reader or writer. `_url` is without the password and the table."""

    path: str
    table: str
    query: str = ""
    password: str
    _url: str

    def _split_path(self) -> None:
        """Take the password out of the path, and the table out of it or into it. Raises UserError."""
        address = split_url(self.path)
        self.table, self.password = self.table or address.table, self.password or address.password
        self.path, self._url = f"{address.url}#{self.table}" if self.table else address.url, address.url

    @contextmanager
    def _connect(self, *, writes: bool) -> Iterator[Connection]:
        """One transaction (`connect`). Raises UserError for every error of the driver in it."""
        with self._explain_errors(writes=writes), connect(self._url, self.password, writes=writes) as connection:
            yield connection

    @contextmanager
    def _explain_errors(self, *, writes: bool) -> Iterator[None]:
        from sqlalchemy.exc import StatementError

        try:
            yield
        except StatementError as error:
            raise UserError(self._explain(error, writes)) from None

    def _explain(self, error: StatementError, writes: bool) -> str:
        from sqlalchemy.exc import InterfaceError, OperationalError, ProgrammingError

        text, verb, is_sqlite = str(error.orig).strip(), "written" if writes else "read", self._url.startswith("sqlite")
        first_line = text.partition("\n")[0]
        reason = (" ".join(text.split()) if first_line.endswith(":") else first_line).rstrip(".")
        is_refused = any(words in text for words in SQLITE_REFUSALS)
        advice = next((advice for words, advice in SQLITE_ADVICE.items() if is_sqlite and words in text), "")
        if error.statement is None and not is_sqlite:  # there is no connection
            advice = "check its host, port, name, user, password and options, and that it runs"
        elif not advice and not is_refused and isinstance(error, OperationalError | InterfaceError):
            advice = "resume the job once it has recovered"
        if advice:
            return f"the database {self._url} cannot be {verb}: {reason}; {advice}"
        if self.query:
            query = self.query if len(self.query) <= SHOWN_CHARACTERS else f"{self.query[:SHOWN_CHARACTERS]}..."
            return f"query is {query!r}, which {self._url} refuses: {reason}; give a SELECT that it accepts"
        is_of_rows = writes and not is_refused and not isinstance(error, ProgrammingError)
        advice = "change the rows or the table" if is_of_rows else "check its name and columns, and your rights"
        return f"table {self.table!r} of {self._url} cannot be {verb}: {reason}; {advice}, and resume the job"


def existing_table(connection: Connection, name: str) -> sa.Table | None:
    """The table as it exists, or None; `name` may begin with a schema."""
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


PAGE_ROWS = 10_000
PAGE_BYTES = 4 * 1024 * 1024
"""A page of a table that is read has about this size, and at least one row."""
PAGE_GROWTH = 4
JSON_TYPE_CODES = frozenset((114, 3802, 199, 3807))
"""Postgres: json, jsonb, and arrays of these."""
TEXT_TYPES = (uuid.UUID, ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Interface,
              ipaddress.IPv6Interface, ipaddress.IPv4Network, ipaddress.IPv6Network)  # fmt: skip
"""Values of Postgres that are read as their text."""


@INPUT_READER_REGISTRY.type_register(name="sql")
@dataclass
class SqlReader(SqlEndpoint, InputReader):
    """`path` is `sqlite:////DIR/FILE` or `postgresql://USER@HOST/NAME`, with the table as `#TABLE` or in `table`;
    `query`, a SELECT, takes the place of a table.

    `key` names the column or columns that order the rows; a table's default is its primary key. `columns` are the ones
    to read. Without a `password`, the worker's Postgres client looks for one (`~/.pgpass`).
    """

    table: str = ""
    query: str = ""
    key: str | list[str] | None = None
    columns: list[str] | None = None
    password: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        self._split_path()
        if bool(self.table) == bool(self.query):
            raise ValueError("an SqlReader needs either table or query; give one of them")
        if self.table:
            check_name(self.table)

    def __len__(self) -> int:
        import sqlalchemy as sa

        with self._connect(writes=False) as connection:
            source = self._source(connection).subquery("tinsmith_rows")
            return int(connection.scalar(sa.select(sa.func.count()).select_from(source)) or 0)

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[Row]:
        rows: list[Row] = []
        first = 0
        with closing(self.snapshot_pages()) as pages:
            for page in pages:
                if first + page.rows > start_idx:
                    rows += page.to_rows()[max(0, start_idx - first) : end_idx + 1 - first]
                first += page.rows
                if first > end_idx:
                    break
        if not 0 <= start_idx <= end_idx < first:
            raise IndexError(f"rows {start_idx} to {end_idx} of {self.path}: it has {first} rows")
        return rows

    def snapshot_pages(self) -> Generator[Page, None, None]:
        """Reads in one transaction, which sees one state of the database and ends with the generator."""
        with self._connect(writes=False) as connection:
            is_postgres = connection.dialect.name == "postgresql"
            if is_postgres:
                _read_exactly(connection)
            source = self._source(connection)
            converters = {} if is_postgres or self.query else _sqlite_converters(connection, self.table)
            with connection.execute(source, execution_options={"stream_results": True, "max_row_buffer": 1}) as result:
                description = result.cursor.description if result.cursor is not None else ()
                names = [str(column[0]) for column in description]
                if repeated := sorted({name for name in names if names.count(name) > 1}):
                    raise UserError(f"{self.path}: the query has two columns {repeated}; name them apart with AS")
                json_names = {str(column[0]) for column in description if column[1] in JSON_TYPE_CODES}
                json_names |= {name for name, convert in converters.items() if convert is _check_json}
                yield from self._pages(result, names, converters, frozenset(json_names))

    def _pages(
        self,
        result: sa.CursorResult[Any],
        names: list[str],
        converters: Mapping[str, Callable[[Any], Any]],
        json_names: frozenset[str],
    ) -> Iterator[Page]:
        first, fetch_rows = 0, 1
        while rows := result.fetchmany(fetch_rows):
            columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
            for name, values in columns.items():
                convert = converters.get(name) or (_join_json if name in json_names else _to_plain)
                columns[name] = [
                    value if value is None else self._convert(convert, name, value, first + offset)
                    for offset, value in enumerate(values)
                ]
            page = Page(columns, json_names)
            yield page
            first += len(rows)
            fitting = PAGE_BYTES * len(rows) // max(1, page.estimate_bytes())
            fetch_rows = max(1, min(fitting, PAGE_GROWTH * len(rows), PAGE_ROWS))

    def _convert(self, convert: Callable[[Any], Any], name: str, value: object, row_idx: int) -> object:
        try:
            return convert(value)
        except (ValueError, TypeError) as error:
            raise refuse_value(self.path, row_idx, name, value, str(error)) from None

    def _source(self, connection: Connection) -> sa.Select[Any] | sa.TextualSelect:
        """The SELECT of the rows. Values are those of the driver, which SQLAlchemy does not convert."""
        import sqlalchemy as sa

        names = [self.key] if isinstance(self.key, str) else list(self.key or [])
        if self.query:
            text = _without_parameters(self.query.strip().rstrip(";"))
            if not names and not self.columns:
                return sa.text(text).columns()
            columns = [sa.column(name) for name in self.columns or ()] or [sa.text("*")]
            source = sa.text(f"({text}) AS tinsmith_rows")
            return sa.select(*columns).select_from(source).order_by(*map(sa.column, names))
        table = existing_table(connection, self.table)
        if table is None:
            raise UserError(f"table {self.table!r} is not in {self._url}; create it, or name another")
        names = names or [column.name for column in table.primary_key.columns]
        for name in [*names, *(self.columns or ())]:
            if name not in table.c:
                raise UserError(
                    f"table {self.table!r} of {self._url} has no column {name!r}; it has {sorted(table.c.keys())}"
                )
        columns = [sa.column(name) for name in self.columns or table.c.keys()]
        return sa.select(*columns).select_from(table).order_by(*map(sa.column, names))


def _read_exactly(connection: Connection) -> None:
    """Have psycopg leave JSON as text, whose numbers have any number of digits, and refuse what it would round."""
    from psycopg.types.datetime import IntervalLoader
    from psycopg.types.json import set_json_loads

    class ExactIntervalLoader(IntervalLoader):
        def load(self, data: Any) -> datetime.timedelta:  # noqa: ANN401
            text = bytes(data).decode()
            if "mon" in text or "year" in text:
                raise UserError(
                    f"the interval {text!r} has months or years, which have no fixed length; convert it in the "
                    "database, with query='SELECT CAST(... AS TEXT)' or EXTRACT"
                )
            return super().load(data)

    driver: Any = connection.connection.driver_connection
    set_json_loads(lambda data: data if isinstance(data, str) else bytes(data).decode(), context=driver)
    driver.adapters.register_loader("interval", ExactIntervalLoader)


def _join_json(value: Any) -> str:  # noqa: ANN401  a JSON text, or an array of these
    if isinstance(value, str):
        return value
    return "null" if value is None else f"[{','.join(map(_join_json, value))}]"


def _to_plain(value: object) -> object:
    if isinstance(value, TEXT_TYPES):
        return str(value)
    if isinstance(value, tuple):
        raise TypeError("it is a composite value, whose fields have no types here")
    return bytes(value) if isinstance(value, memoryview) else value


def _sqlite_converters(connection: Connection, table_name: str) -> dict[str, Callable[[Any], Any]]:
    """How the stored values of a SQLite table become those of its declared types, which SQLite does not know."""
    import sqlalchemy as sa

    kinds: tuple[tuple[type, Callable[[Any], Any]], ...] = (
        (sa.Boolean, _to_bool),
        (sa.DateTime, datetime.datetime.fromisoformat),
        (sa.Date, datetime.date.fromisoformat),
        (sa.Time, datetime.time.fromisoformat),
        (sa.JSON, _check_json),
    )
    table = existing_table(connection, table_name)
    columns = {column.name: column.type for column in table.columns} if table is not None else {}
    return {
        name: convert
        for name, column_type in columns.items()
        for kind, convert in kinds
        if isinstance(column_type, kind)
    }


def _to_bool(value: object) -> bool:
    if value not in (0, 1):
        raise ValueError("a BOOLEAN is 0 or 1")
    return bool(value)


def _check_json(value: Any) -> str:  # noqa: ANN401
    json.loads(value)
    return value if isinstance(value, str) else json.dumps(value)


def _without_parameters(query: str) -> str:
    r"""The query as SQLAlchemy's text, in which `:name` would be a parameter and `\:name` is not."""
    import re

    return re.sub(r"(?<![:\\]):(?=\w)", r"\\:", query)


PUBLISHED_ROW = "published"
"""The row of a parts table which says that the target was filled, and from which parts."""
CREATE_TRIES = 5
Kinds = dict[str, str]


@OUTPUT_WRITER_REGISTRY.type_register(name="sql")
@dataclass
class SqlWriter(SqlEndpoint, OutputWriter):
    """`path` is a database's URL as in `SqlReader`, with the table as `#TABLE` or in `table`. `column` names the
    columns to write, all where it is None. With `append`, rows are added to an existing table, which must have all of
    their columns; else `if_exists` applies to it."""

    table: str = ""
    column: str | list[str] | None = None
    append: bool = False
    password: str = field(default="", repr=False)
    extension: ClassVar[str] = "sql"
    in_store: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._split_path()
        check_name(self.table)

    def check(self, row: Row) -> None:
        selected = select_columns(row, self.column)
        encode(selected)
        for name, value in selected.items():
            if not isinstance(name, str) or not name or "\0" in name:
                raise TypeError(f"{name!r} is not a column name; use a str that is not empty")
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ValueError(f"column {name!r} is {value}, which is outside 64 bits; use a str")
            if isinstance(value, str) and "\0" in value:
                raise ValueError(f"column {name!r} has a NUL character, which databases do not take")

    def check_output(self, if_exists: str) -> None:
        if if_exists == "error" and not self.append:
            with self._connect(writes=True) as connection:
                if existing_table(connection, self.table) is not None:
                    raise FileExistsError(exists_already(self.path))

    def write_part(self, rows: Sequence[Row | None], span: RowRange, part_base: str) -> PartInfo:
        selected = [select_columns(row, self.column) for row in rows if row is not None]
        data = b"".join(encode(row) + b"\n" for row in selected)
        path = join(part_base, part_name(span, self.extension))
        part = PartInfo(path, len(selected), len(data), hashlib.sha256(data).hexdigest())
        kinds: Kinds = {}
        for row in selected:
            kinds = _merge_kinds(kinds, {name: _kind_of(value) for name, value in row.items()})
        head = {"kinds": kinds, "sha256": part.sha256}
        parts = _parts_table(path)
        self._create_table(parts)
        with self._connect(writes=True) as connection:
            if (stored_head := _read_head(connection, path)) is None:
                connection.execute(parts.insert(), {"part": path, "head": head, "lines": data.decode()})
            elif stored_head["sha256"] != part.sha256:
                raise FileExistsError(f"the part {path} exists already, with other rows")
        return part

    def read_part(self, part: PartInfo) -> Iterator[Row]:
        with self._connect(writes=False) as connection:
            if existing_table(connection, _parts_table(part.path).name) is None:
                raise FileNotFoundError(f"the part {part.path} does not exist")
            lines = _read_lines(connection, part)
        yield from map(orjson.loads, lines)

    def read_published(self, output: OutputInfo) -> Iterator[Row]:
        raise UserError(f"the output {output.path} is a table, whose rows have no order; query it there")

    def publish(self, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
        winners = _digest_parts(parts)
        notes = _parts_table(staging)
        self._create_table(notes)
        with self._connect(writes=True) as connection:
            note = _read_head(connection, staging, PUBLISHED_ROW)
            if note is not None and note["winners"] == winners:
                return OutputInfo.from_dict(note["output"])
            columns, table = self._open_target(connection, parts, if_exists)
            digest = hashlib.sha256()
            for part in parts:
                kinds, lines = _read_kinds(connection, part), _read_lines(connection, part)
                digest.update(b"".join(line + b"\n" for line in lines))
                if lines and table is not None:
                    values = [_to_database_row({**columns, **orjson.loads(line)}, kinds, table) for line in lines]
                    connection.execute(table.insert(), values)
            rows, size = sum(part.rows for part in parts), sum(part.bytes for part in parts)
            info = OutputInfo(self.path, rows, size, digest.hexdigest())
            head = {"winners": winners, "output": info.to_dict()}
            connection.execute(notes.insert(), {"part": PUBLISHED_ROW, "head": head, "lines": ""})
        return info

    def delete_staging(self, staging: str) -> None:
        with self._connect(writes=True) as connection:
            _parts_table(staging).drop(connection, checkfirst=True)

    def _create_table(self, table: sa.Table) -> None:
        """Create a table. Of two transactions that create it at once on Postgres, one fails in spite of IF NOT
        EXISTS."""
        from sqlalchemy.exc import IntegrityError, ProgrammingError
        from sqlalchemy.schema import CreateTable

        with self._explain_errors(writes=True):
            for attempt_idx in range(CREATE_TRIES):
                try:
                    with connect(self._url, self.password, writes=True) as connection:
                        connection.execute(CreateTable(table, if_not_exists=True))
                    return
                except (IntegrityError, ProgrammingError):
                    if attempt_idx == CREATE_TRIES - 1:
                        raise

    def _open_target(
        self, connection: Connection, parts: Sequence[PartInfo], if_exists: str
    ) -> tuple[Row, sa.Table | None]:
        """A row of nulls in all columns of the rows, and the table to fill; None if no row has a column."""
        existing = existing_table(connection, self.table)
        kinds: Kinds = {}
        for part in parts:
            kinds = _merge_kinds(kinds, _read_kinds(connection, part))
        if existing is not None and self.append:
            if unknown := sorted(set(kinds) - set(existing.c.keys())):
                raise UserError(
                    f"table {self.table!r} of {self._url} has no columns {unknown}; it has "
                    f"{sorted(existing.c.keys())}. Add them and resume the job, or choose others with column="
                )
            return dict.fromkeys(kinds), existing
        if existing is not None:
            if if_exists == "error":
                raise FileExistsError(exists_already(self.path))
            existing.drop(connection)
        if not kinds:
            return {}, None
        table = _new_table(self.table, kinds, connection.dialect.name)
        table.create(connection)
        return dict.fromkeys(kinds), table


def _digest_parts(parts: Iterable[PartInfo]) -> str:
    """The SHA-256 of the JSON list of the parts."""
    digest, separator = hashlib.sha256(b"["), b""
    for part in parts:
        digest.update(separator + orjson.dumps(part.to_dict()))
        separator = b","
    digest.update(b"]")
    return digest.hexdigest()


def _new_table(name: str, kinds: Kinds, dialect: str) -> sa.Table:
    import sqlalchemy as sa

    zoned = sa.DateTime(timezone=True) if dialect == "postgresql" else sa.Text()  # SQLite would forget the zone
    types: dict[str, sa.types.TypeEngine[Any]] = {
        "bool": sa.Boolean(),
        "int": sa.BigInteger(),
        "float": sa.Double(),
        "str": sa.Text(),
        "bytes": sa.LargeBinary(),
        "date": sa.Date(),
        "datetime": sa.DateTime(),
        "zoned": zoned,
        "none": sa.Text(),
        "json": sa.JSON(none_as_null=True),
    }
    schema, _, bare = name.rpartition(".")
    columns = [sa.Column(column, types[kind]) for column, kind in kinds.items()]
    return sa.Table(bare, sa.MetaData(), *columns, schema=schema or None)


def _parts_table(location: str) -> sa.Table:
    """The table of a job's output, from the location of a part or of the staging directory."""
    return _parts_table_in(location.partition("/attempt-")[0])


@lru_cache(maxsize=64)
def _parts_table_in(staging: str) -> sa.Table:
    """The same object each time, so that statements of each part are compiled once."""
    import sqlalchemy as sa

    return sa.Table(
        f"tinsmith_parts_{hashlib.sha256(staging.encode()).hexdigest()[:20]}",
        sa.MetaData(),
        sa.Column("part", sa.String(1024), primary_key=True),
        sa.Column("head", sa.JSON, nullable=False),
        sa.Column("lines", sa.Text, nullable=False),
    )


def _read_head(connection: Connection, location: str, part: str = "") -> dict[str, Any] | None:
    """The head of the part at a location, or of another `part` of the same table."""
    import sqlalchemy as sa

    table = _parts_table(location)
    return connection.scalar(sa.select(table.c.head).where(table.c.part == (part or location)))


def _read_lines(connection: Connection, part: PartInfo) -> list[bytes]:
    """The rows of a part. Raises CorruptFilesError if it has changed."""
    import sqlalchemy as sa

    table = _parts_table(part.path)
    data = (connection.scalar(sa.select(table.c.lines).where(table.c.part == part.path)) or "").encode()
    if hashlib.sha256(data).hexdigest() != part.sha256:
        raise CorruptFilesError(f"the part {part.path} is not as it was written")
    return data.split(b"\n")[:-1]


def _read_kinds(connection: Connection, part: PartInfo) -> Kinds:
    head = _read_head(connection, part.path)
    if head is None:
        raise CorruptFilesError(f"the part {part.path} does not exist")
    return head["kinds"]


def _kind_of(value: object) -> str:
    if hasattr(value, "item") and not getattr(value, "shape", None):
        value = value.item()  # type: ignore[attr-defined]  a scalar of numpy or torch
    if isinstance(value, datetime.datetime):
        return "zoned" if value.tzinfo else "datetime"
    for kind, types in _KINDS:
        if isinstance(value, types):
            return kind
    return "json"


_KINDS: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("none", (type(None),)),
    ("bool", (bool,)),
    ("int", (int,)),
    ("float", (float,)),
    ("str", (str,)),
    ("bytes", (bytes, bytearray, memoryview)),
    ("date", (datetime.date,)),
)


def _merge_kinds(first: Kinds, other: Kinds) -> Kinds:
    """The columns of both, each with the kind that holds the values of both."""
    return {name: _merge_kind(first.get(name, "none"), other.get(name, "none")) for name in {**first, **other}}


def _merge_kind(first: str, other: str) -> str:
    if first == other or other == "none":
        return first
    if first == "none":
        return other
    return "float" if {first, other} == {"int", "float"} else "json"


def _to_database_row(row: Row, kinds: Kinds, table: sa.Table) -> Row:
    """Convert the values of a part's row to those of the table's columns."""
    import sqlalchemy as sa

    values: Row = {}
    for name, value in row.items():
        kind = table.c[name].type
        if value is not None and not isinstance(kind, sa.JSON):
            if kinds[name] == "bytes":
                value = base64.b64decode(value)
            elif kinds[name] == "date" and isinstance(kind, sa.Date):
                value = datetime.date.fromisoformat(value)
            elif kinds[name] in ("datetime", "zoned") and isinstance(kind, sa.DateTime):
                value = datetime.datetime.fromisoformat(value)
            elif isinstance(value, list | dict):
                value = orjson.dumps(value).decode()
        values[name] = value
    return values
