"""Rows of a table or a query, numbered by a key.

Counting goes through the keys once, in order, and keeps every `STRIDE`-th of them in a file of this machine's cache. A
batch is then one range of keys, wherever it lies in the table: no OFFSET. The range must hold as many rows as were
counted, or the batch fails: what is added behind the last row is not seen, and any other change is an error, never rows
that are taken twice or left out. A job's count is its own (`snapshot`); another job counts again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.batch.formats.offset_cache import cache_directory
from tinsmith.batch.formats.protocols import InputReader, Row
from tinsmith.batch.formats.registry import INPUT_READER_REGISTRY
from tinsmith.batch.formats.sql import check_name, connect, existing_table, split_url
from tinsmith.errors import UserError

if TYPE_CHECKING:
    import sqlalchemy as sa
    from sqlalchemy.engine import Connection

STRIDE = 64
PAGE_ROWS = 10_000
Key = list[Any]


@dataclass
class _Count:
    """How many rows there are, and the keys of the first of each `STRIDE` of them and of the last."""

    rows: int
    firsts: list[Key]
    last: Key


@INPUT_READER_REGISTRY.type_register(name="sql")
@dataclass
class SqlReader(InputReader):
    """`path` is `sqlite:////DIR/FILE` or `postgresql://USER@HOST/NAME`, with the table as `#TABLE` or in `table`.

    Or `query` is a SELECT, and `key` the column, or columns, that order it; a table's is its primary key. A key is
    unique, and each of its columns whole numbers or text. `columns` are the ones to read. Without a `password`,
    Postgres's own ways to find one apply on the worker (`~/.pgpass`).
    """

    table: str = ""
    query: str = ""
    key: str | list[str] | None = None
    columns: list[str] | None = None
    password: str = field(default="", repr=False)
    snapshot: str = ""
    _counted: _Count | None = field(default=None, init=False, repr=False, compare=False)
    _rows: tuple[Any, list[Any]] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        address = split_url(self.path)
        self.table = self.table or address.table
        self.password = self.password or address.password
        self.path = f"{address.url}#{self.table}" if self.table else address.url
        self._url = address.url
        if bool(self.table) == bool(self.query):
            raise ValueError("an SqlReader reads a table or a query: give it one of the two")
        if self.query and not self.key:
            raise ValueError("a query has no order of its own: name its unique column, or columns, as key")
        if self.table:
            check_name(self.table)

    def of_job(self, output_paths: Sequence[str]) -> SqlReader:
        digest = hashlib.sha256("\0".join(output_paths).encode()).hexdigest()[:16]
        return replace(self, snapshot=self.snapshot or digest)

    def __len__(self) -> int:
        with connect(self._url, self.password, writes=False) as connection:
            self._counted = self._count(connection)
        if self.snapshot:
            self._keep(self._counted)
        return self._counted.rows

    def download_batch(self, start_idx: int, end_idx: int, cache_dir: str) -> list[Row]:
        with connect(self._url, self.password, writes=False) as connection:
            counted = self._counted = self._counted or self._kept() or self._count(connection)
            if not 0 <= start_idx <= end_idx < counted.rows:
                raise IndexError(f"rows {start_idx} to {end_idx} of {self.path}, which has {counted.rows}")
            first, after = start_idx // STRIDE, end_idx // STRIDE + 1
            source, keys = self._rows = self._rows or self._source(connection)
            low, high = _tuple(keys), _literals(counted.firsts[first])
            wanted = source.where(low >= high)
            if after < len(counted.firsts):
                wanted = wanted.where(low < _literals(counted.firsts[after]))
            else:
                wanted = wanted.where(low <= _literals(counted.last))
            rows = [_row(each) for each in connection.execute(wanted.order_by(*keys)).mappings()]
        expected = min(after * STRIDE, counted.rows) - first * STRIDE
        if len(rows) != expected:
            raise RuntimeError(
                f"{self.path} has changed since its rows were counted: {len(rows)} rows are where {expected} were. "
                "Submit the job again, when nobody changes what it reads"
            )
        return rows[start_idx - first * STRIDE : end_idx + 1 - first * STRIDE]

    def _source(self, connection: Connection, keys_only: bool = False) -> tuple[sa.Select[Any], list[Any]]:
        """What selects the rows, and the columns of the key."""
        import sqlalchemy as sa

        names = [self.key] if isinstance(self.key, str) else list(self.key or [])
        if self.query:
            text = self.query.strip().rstrip(";")
            keys: list[Any] = [sa.column(name) for name in names]
            wanted = keys if keys_only else [sa.column(name) for name in self.columns or ()] or [sa.text("*")]
            source = sa.text(f"({_without_parameters(text)}) AS tinsmith_rows")
            return sa.select(*wanted).select_from(source), keys
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

    def _count(self, connection: Connection) -> _Count:
        source, keys = self._source(connection, keys_only=True)
        streamed = {"stream_results": True, "yield_per": PAGE_ROWS}
        counted = _Count(0, [], [])
        with connection.execute(source.order_by(*keys), execution_options=streamed) as found:
            for row in found:
                self._add(counted, list(row))
        return counted

    def _add(self, counted: _Count, key: Key) -> None:
        if any(isinstance(part, bool) or not isinstance(part, int | str) for part in key):
            raise UserError(f"{self.path}: the key of row {counted.rows} is {key}; it must be whole numbers or text")
        if key == counted.last:
            raise UserError(f"{self.path}: two rows have the key {key}; a key must be unique")
        if counted.rows % STRIDE == 0:
            counted.firsts.append(key)
        counted.rows += 1
        counted.last = key

    def _file(self) -> Path:
        what = [self.path, self.query, self.key, self.snapshot]
        return cache_directory() / f"sql-{hashlib.sha256(json.dumps(what).encode()).hexdigest()}"

    def _keep(self, counted: _Count) -> None:
        path = self._file()
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps([counted.rows, counted.firsts, counted.last]))
        os.replace(unfinished, path)

    def _kept(self) -> _Count | None:
        """What the job counted. A job's rows are not counted twice: they could come out differently."""
        if not self.snapshot:
            return None
        try:
            os.utime(self._file())
            return _Count(*json.loads(self._file().read_text()))
        except FileNotFoundError:
            raise RuntimeError(
                f"the count of {self.path} that this job began with is not on this machine any more; submit it again"
            ) from None


def _row(found: Any) -> Row:  # noqa: ANN401
    return {str(name): bytes(value) if isinstance(value, memoryview) else value for name, value in found.items()}


def _tuple(keys: list[Any]) -> Any:  # noqa: ANN401
    import sqlalchemy as sa

    return keys[0] if len(keys) == 1 else sa.tuple_(*keys)


def _literals(key: Key) -> Any:  # noqa: ANN401
    import sqlalchemy as sa

    # Postgres is told the type of a parameter, and SQLAlchemy's own guess for a whole number is one of 32 bits.
    literals = [sa.literal(part, sa.BigInteger() if isinstance(part, int) else sa.Text()) for part in key]
    return literals[0] if len(literals) == 1 else sa.tuple_(*literals)


def _without_parameters(query: str) -> str:
    r"""The query as SQLAlchemy's text, in which `:name` would be a parameter and `\:name` is not."""
    import re

    return re.sub(r"(?<![:\\]):(?=\w)", r"\\:", query)
