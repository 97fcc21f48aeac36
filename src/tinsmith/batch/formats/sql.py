"""Tables of SQLite files and of Postgres, named by URL. In workers only.

Reading: counting goes through the keys once, in order, and keeps every `STRIDE`-th of them in a file of this machine's
cache. A batch is one range of keys, without OFFSET, and must hold as many rows as were counted, or it fails: rows added
behind the last one are not seen, and any other change is an error. The count belongs to the job (`snapshot`); another
job counts again.

Writing: the parts of a job are rows of a table of their own in the same database, `tinsmith_parts_...`: each has its
rows as lines of JSON and the kinds of its columns. Publishing fills the target table from the winning parts in one
transaction, which also stores a note. Publishing again finds the note, so the target is complete or absent, and
appended rows are added once. A column has the type that all its values fit: whole numbers, numbers, text, booleans,
bytes, times, dates, or else JSON.

A path is shown and stored in many places and never holds a password: `split_url` takes it out, and only `connect` puts
it back. Errors of a driver are passed on without the values of parameters.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import orjson

from tinsmith.batch.formats.encoding import encode, select_columns
from tinsmith.batch.formats.offset_cache import cache_directory
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


BUSY_S = 60.0
"""How long a writer of a SQLite file waits for another."""
KINDS = "use sqlite:////DIR/FILE or postgresql://USER@HOST/NAME"


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


STRIDE = 64
PAGE_ROWS = 10_000
Key = list[Any]


@dataclass
class _KeyIndex:
    """The number of rows, and the keys of the first of each `STRIDE` rows and of the last row."""

    rows: int
    firsts: list[Key]
    last: Key


@INPUT_READER_REGISTRY.type_register(name="sql")
@dataclass
class SqlReader(InputReader):
    """`path` is `sqlite:////DIR/FILE` or `postgresql://USER@HOST/NAME`, with the table as `#TABLE` or in `table`.

    With `query`, a SELECT, `key` names the column or columns that order it; a table's default is its primary key. A key
    is unique, and its columns hold whole numbers or text. `columns` are the ones to read. Without a `password`, the
    worker's Postgres client looks for one (`~/.pgpass`).
    """

    table: str = ""
    query: str = ""
    key: str | list[str] | None = None
    columns: list[str] | None = None
    password: str = field(default="", repr=False)
    snapshot: str = ""
    _key_index: _KeyIndex | None = field(default=None, init=False, repr=False, compare=False)
    _rows: tuple[Any, list[Any]] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        address = split_url(self.path)
        self.table = self.table or address.table
        self.password = self.password or address.password
        self.path = f"{address.url}#{self.table}" if self.table else address.url
        self._url = address.url
        if bool(self.table) == bool(self.query):
            raise ValueError("an SqlReader needs either table or query; give one of them")
        if self.query and not self.key:
            raise ValueError("key is missing; name the unique column or columns of the query")
        if self.table:
            check_name(self.table)

    def of_job(self, output_paths: Sequence[str]) -> SqlReader:
        digest = hashlib.sha256("\0".join(output_paths).encode()).hexdigest()[:16]
        return replace(self, snapshot=self.snapshot or digest)

    def __len__(self) -> int:
        with connect(self._url, self.password, writes=False) as connection:
            self._key_index = self._build_index(connection)
        if self.snapshot:
            self._save_index(self._key_index)
        return self._key_index.rows

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[Row]:
        with connect(self._url, self.password, writes=False) as connection:
            index = self._key_index = self._key_index or self._load_index() or self._build_index(connection)
            if not 0 <= start_idx <= end_idx < index.rows:
                raise IndexError(f"rows {start_idx} to {end_idx} of {self.path}: it has {index.rows} rows")
            first, after = start_idx // STRIDE, end_idx // STRIDE + 1
            source, keys = self._rows = self._rows or self._source(connection)
            key = _tuple(keys)
            query = source.where(key >= _literals(index.firsts[first]))
            if after < len(index.firsts):
                query = query.where(key < _literals(index.firsts[after]))
            else:
                query = query.where(key <= _literals(index.last))
            rows = [_row(mapping) for mapping in connection.execute(query.order_by(*keys)).mappings()]
        expected = min(after * STRIDE, index.rows) - first * STRIDE
        if len(rows) != expected:
            raise RuntimeError(
                f"{self.path} has changed since its rows were counted: {len(rows)} rows instead of {expected}. "
                "Submit the job again while its input does not change"
            )
        return rows[start_idx - first * STRIDE : end_idx + 1 - first * STRIDE]

    def _source(self, connection: Connection, keys_only: bool = False) -> tuple[sa.Select[Any], list[Any]]:
        """The SELECT of the rows, and the columns of the key."""
        import sqlalchemy as sa

        names = [self.key] if isinstance(self.key, str) else list(self.key or [])
        if self.query:
            text = self.query.strip().rstrip(";")
            keys: list[Any] = [sa.column(name) for name in names]
            columns = keys if keys_only else [sa.column(name) for name in self.columns or ()] or [sa.text("*")]
            source = sa.text(f"({_without_parameters(text)}) AS tinsmith_rows")
            return sa.select(*columns).select_from(source), keys
        table = existing_table(connection, self.table)
        if table is None:
            raise UserError(f"{self.path}: there is no table {self.table!r}")
        names = names or [column.name for column in table.primary_key.columns]
        if not names:
            raise UserError(f"table {self.table!r} has no primary key: name a unique column, or columns, as key")
        for name in [*names, *(self.columns or ())]:
            if name not in table.c:
                raise UserError(f"table {self.table!r} has no column {name!r}; it has {sorted(table.c.keys())}")
        keys = [table.c[name] for name in names]
        columns = keys if keys_only else [table.c[name] for name in self.columns or table.c.keys()]
        return sa.select(*columns), keys

    def _build_index(self, connection: Connection) -> _KeyIndex:
        source, keys = self._source(connection, keys_only=True)
        streamed = {"stream_results": True, "yield_per": PAGE_ROWS}
        index = _KeyIndex(0, [], [])
        with connection.execute(source.order_by(*keys), execution_options=streamed) as key_rows:
            for row in key_rows:
                self._add(index, list(row))
        return index

    def _add(self, index: _KeyIndex, key: Key) -> None:
        if any(isinstance(part, bool) or not isinstance(part, int | str) for part in key):
            raise UserError(f"{self.path}: the key of row {index.rows} is {key}; it must be whole numbers or text")
        if key == index.last:
            raise UserError(f"{self.path}: two rows have the key {key}; a key must be unique")
        if index.rows % STRIDE == 0:
            index.firsts.append(key)
        index.rows += 1
        index.last = key

    def _index_path(self) -> Path:
        return cache_directory() / f"sql-{hashlib.sha256(self.identity.encode()).hexdigest()}"

    def _save_index(self, index: _KeyIndex) -> None:
        path = self._index_path()
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps([index.rows, index.firsts, index.last]))
        os.replace(unfinished, path)

    def _load_index(self) -> _KeyIndex | None:
        """The index that the job stored. Rows are not counted twice, since the second count could differ."""
        if not self.snapshot:
            return None
        try:
            os.utime(self._index_path())
            return _KeyIndex(*json.loads(self._index_path().read_text()))
        except FileNotFoundError:
            raise RuntimeError(
                f"the row count of {self.path} from the start of this job is lost; submit the job again"
            ) from None


def _row(mapping: Any) -> Row:  # noqa: ANN401
    return {str(name): bytes(value) if isinstance(value, memoryview) else value for name, value in mapping.items()}


def _tuple(keys: list[Any]) -> Any:  # noqa: ANN401
    import sqlalchemy as sa

    return keys[0] if len(keys) == 1 else sa.tuple_(*keys)


def _literals(key: Key) -> Any:  # noqa: ANN401
    import sqlalchemy as sa

    # Postgres needs the type of a parameter, and SQLAlchemy's default for an integer has 32 bits.
    return _tuple([sa.literal(part, sa.BigInteger() if isinstance(part, int) else sa.Text()) for part in key])


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
class SqlWriter(OutputWriter):
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
        address = split_url(self.path)
        self.table = self.table or address.table
        check_name(self.table)
        self.password = self.password or address.password
        self._url = address.url
        self.path = f"{address.url}#{self.table}"

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
            with connect(self._url, self.password, writes=True) as connection:
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
        with connect(self._url, self.password, writes=True) as connection:
            if (stored_head := _read_head(connection, path)) is None:
                connection.execute(parts.insert(), {"part": path, "head": head, "lines": data.decode()})
            elif stored_head["sha256"] != part.sha256:
                raise FileExistsError(f"the part {path} exists already, with other rows")
        return part

    def read_part(self, part: PartInfo) -> Iterator[Row]:
        with connect(self._url, self.password, writes=False) as connection:
            if existing_table(connection, _parts_table(part.path).name) is None:
                raise FileNotFoundError(f"the part {part.path} does not exist")
            lines = _read_lines(connection, part)
        yield from map(orjson.loads, lines)

    def read_published(self, output: OutputInfo) -> Iterator[Row]:
        raise UserError(f"the output {output.path} is a table, whose rows have no order; query it there")

    def publish(self, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
        winners = hashlib.sha256(orjson.dumps([part.to_dict() for part in parts])).hexdigest()
        notes = _parts_table(staging)
        self._create_table(notes)
        with connect(self._url, self.password, writes=True) as connection:
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
        with connect(self._url, self.password, writes=True) as connection:
            _parts_table(staging).drop(connection, checkfirst=True)

    def _create_table(self, table: sa.Table) -> None:
        """Create a table. Of two transactions that create it at once on Postgres, one fails in spite of IF NOT
        EXISTS."""
        from sqlalchemy.exc import IntegrityError, ProgrammingError
        from sqlalchemy.schema import CreateTable

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
                raise UserError(f"table {self.table!r} has no columns {unknown}; it has {sorted(existing.c.keys())}")
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
    import sqlalchemy as sa

    staging = location.partition("/attempt-")[0]
    name = f"tinsmith_parts_{hashlib.sha256(staging.encode()).hexdigest()[:20]}"
    return sa.Table(
        name,
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
