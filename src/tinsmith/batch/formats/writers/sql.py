"""Rows as rows of a table.

The parts of a job lie in a table of their own in the same database, `tinsmith_parts_...`: its rows as lines of JSON,
and for each part the kinds of its columns. Publishing makes the table of the winners' parts in one transaction, in
which it also notes that it did: whoever publishes again finds the note. So the table is there whole or not at all, and
rows that are added to a table (`append`) are added once.

A column has the type that all its values fit: whole numbers, numbers, text, truth, bytes, times, dates, and else JSON.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from tinsmith.batch.formats.encoding import encode, selected
from tinsmith.batch.formats.protocols import OutputInfo, OutputWriter, PartInfo, Row, Span, part_name
from tinsmith.batch.formats.publishing import exists_already
from tinsmith.batch.formats.registry import OUTPUT_WRITER_REGISTRY
from tinsmith.batch.formats.sql import check_name, connect, existing_table, split_url
from tinsmith.errors import CorruptFilesError, UserError
from tinsmith.storage.stores import join

if TYPE_CHECKING:
    import sqlalchemy as sa
    from sqlalchemy.engine import Connection

HEAD = -1
"""The index of the line that describes a part."""
NOTE = "published"
"""The part that says that the table was made, and of what."""
MADE_TRIES = 5
Kinds = dict[str, str]


@OUTPUT_WRITER_REGISTRY.type_register(name="sql")
@dataclass
class SqlWriter(OutputWriter):
    """`path` is a database's URL, as of `SqlReader`, with the table as `#TABLE` or in `table`. `column` names the
    columns to write, all where it is None. With `append`, rows are added to a table that exists and must have all of
    their columns; else `if_exists` says what becomes of it."""

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
        kept = selected(row, self.column)
        encode(kept)
        for name, value in kept.items():
            if not isinstance(name, str) or not name or "\0" in name:
                raise TypeError(f"{name!r} is no name of a column")
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ValueError(f"column {name!r} is {value}, which is beyond 64 bits")
            if isinstance(value, str) and "\0" in value:
                raise ValueError(f"column {name!r} has a NUL character, which databases do not take")

    def check_output(self, if_exists: str) -> None:
        if if_exists == "error" and not self.append:
            with connect(self._url, self.password, writes=True) as connection:
                if existing_table(connection, self.table) is not None:
                    raise FileExistsError(exists_already(self.path))

    def write_part(self, rows: Sequence[Row | None], span: Span, part_base: str) -> PartInfo:
        kept = [selected(row, self.column) for row in rows if row is not None]
        lines = [encode(row) for row in kept]
        digest, size = hashlib.sha256(), 0
        for line in lines:
            digest.update(line + b"\n")
            size += len(line) + 1
        made = PartInfo(join(part_base, part_name(span, self.extension)), len(lines), size, digest.hexdigest())
        kinds: Kinds = {}
        for row in kept:
            kinds = _wider(kinds, {name: _kind(value) for name, value in row.items()})
        head = orjson.dumps({"kinds": kinds, "sha256": made.sha256}).decode()
        values = [{"part": made.path, "idx": HEAD, "line": head}]
        values += [{"part": made.path, "idx": index, "line": line.decode()} for index, line in enumerate(lines)]
        parts = _parts_table(made.path)
        self._make(parts)
        with connect(self._url, self.password, writes=True) as connection:
            found = _line(connection, parts, made.path, HEAD)
            if found is None:
                connection.execute(parts.insert(), values)
            elif found["sha256"] != made.sha256:
                raise FileExistsError(f"the part {made.path} is there already, with other rows")
        return made

    def read_part(self, part: PartInfo) -> Iterator[Row]:
        with connect(self._url, self.password, writes=False) as connection:
            if existing_table(connection, _parts_table(part.path).name) is None:
                raise FileNotFoundError(f"the part {part.path} is not there")
            rows = [orjson.loads(line) for line in _lines(connection, part)]
        yield from rows

    def read_published(self, output: OutputInfo) -> Iterator[Row]:
        raise UserError(f"the output is {output.path}, a table, whose rows have no order: read them there")

    def publish(self, parts: Sequence[PartInfo], staging: str, if_exists: str) -> OutputInfo:
        winners = hashlib.sha256(orjson.dumps([part.to_dict() for part in parts])).hexdigest()
        notes = _parts_table(staging)
        self._make(notes)
        with connect(self._url, self.password, writes=True) as connection:
            note = _line(connection, notes, NOTE, HEAD)
            if note is not None and note["winners"] == winners:
                return OutputInfo.from_dict(note["output"])
            columns, table = self._table(connection, parts, if_exists)
            digest, size, rows = hashlib.sha256(), 0, 0
            for part in parts:
                lines = list(_lines(connection, part))
                for line in lines:
                    digest.update(line + b"\n")
                    size += len(line) + 1
                rows += len(lines)
                kinds = _kinds(connection, part)
                if lines and table is not None:
                    values = [_values({**columns, **orjson.loads(line)}, kinds, table) for line in lines]
                    connection.execute(table.insert(), values)
            info = OutputInfo(self.path, rows, size, digest.hexdigest())
            line = orjson.dumps({"winners": winners, "output": info.to_dict()}).decode()
            connection.execute(notes.insert(), {"part": NOTE, "idx": HEAD, "line": line})
        return info

    def delete_staging(self, staging: str) -> None:
        with connect(self._url, self.password, writes=True) as connection:
            _parts_table(staging).drop(connection, checkfirst=True)

    def _make(self, table: sa.Table) -> None:
        """Two who make a table at once on Postgres: one of them is told that it exists, whatever was asked."""
        from sqlalchemy.exc import IntegrityError, ProgrammingError
        from sqlalchemy.schema import CreateTable

        for tried in range(MADE_TRIES):
            try:
                with connect(self._url, self.password, writes=True) as connection:
                    connection.execute(CreateTable(table, if_not_exists=True))
                return
            except (IntegrityError, ProgrammingError):
                if tried == MADE_TRIES - 1:
                    raise

    def _table(self, connection: Connection, parts: Sequence[PartInfo], if_exists: str) -> tuple[Row, sa.Table | None]:
        """A row of nulls in all columns that rows have, and the table to fill: none where no row has a column."""
        found = existing_table(connection, self.table)
        kinds: Kinds = {}
        for part in parts:
            kinds = _wider(kinds, _kinds(connection, part))
        if found is not None and self.append:
            if unknown := sorted(set(kinds) - set(found.c.keys())):
                raise UserError(f"table {self.table!r} has no columns {unknown}; it has {sorted(found.c.keys())}")
            return dict.fromkeys(kinds), found
        if found is not None:
            if if_exists == "error":
                raise FileExistsError(exists_already(self.path))
            found.drop(connection)
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
    """Of the job and output that a part, or a staging directory, is of."""
    import sqlalchemy as sa

    staging = location.partition("/attempt-")[0]
    name = f"tinsmith_parts_{hashlib.sha256(staging.encode()).hexdigest()[:20]}"
    return sa.Table(
        name,
        sa.MetaData(),
        sa.Column("part", sa.String(1024), primary_key=True),
        sa.Column("idx", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("line", sa.Text, nullable=False),
    )


def _line(connection: Connection, table: sa.Table, part: str, index: int) -> dict[str, Any] | None:
    import sqlalchemy as sa

    query = sa.select(table.c.line).where(table.c.part == part, table.c.idx == index)
    found = connection.scalar(query)
    return None if found is None else orjson.loads(found)


def _kinds(connection: Connection, part: PartInfo) -> Kinds:
    head = _line(connection, _parts_table(part.path), part.path, HEAD)
    if head is None:
        raise CorruptFilesError(f"the part {part.path} is not there")
    return head["kinds"]


def _lines(connection: Connection, part: PartInfo) -> Iterator[bytes]:
    """The rows of a part as they were written. Raises CorruptFilesError before the first of them."""
    import sqlalchemy as sa

    table = _parts_table(part.path)
    mine = sa.select(table.c.line).where(table.c.part == part.path, table.c.idx > HEAD).order_by(table.c.idx)
    lines = [line.encode() for line in connection.scalars(mine)]
    digest = hashlib.sha256(b"".join(line + b"\n" for line in lines)).hexdigest()
    if digest != part.sha256:
        raise CorruptFilesError(f"the part {part.path} is not as it was written")
    yield from lines


def _kind(value: object) -> str:
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


def _wider(one: Kinds, other: Kinds) -> Kinds:
    """The columns of both, each of the kind that takes the values of both."""
    return {name: _widest(one.get(name, "none"), other.get(name, "none")) for name in {**one, **other}}


def _widest(one: str, other: str) -> str:
    if one == other or other == "none":
        return one
    if one == "none":
        return other
    return "float" if {one, other} == {"int", "float"} else "json"


def _values(row: Row, kinds: Kinds, table: sa.Table) -> Row:
    """A row of a part as the table takes it."""
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
