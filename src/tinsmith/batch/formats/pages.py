"""Pages of rows by column, in which an input that is copied is read (`snapshots.py`).

Values are plain: those that a column of Parquet holds, or the text of a JSON value, which a column of Parquet would not
hold exactly. Nothing here knows of files or databases.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tinsmith.batch.types import Row
from tinsmith.errors import UserError

SCALAR_BYTES = 8


class Page(NamedTuple):
    """Some rows by column. Values of the columns `json_names` are JSON texts."""

    columns: Mapping[str, list[Any]]
    json_names: frozenset[str] = frozenset()

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def head(self, rows: int) -> Page:
        """The first rows of the page."""
        return self._replace(columns={name: values[:rows] for name, values in self.columns.items()})

    def to_rows(self) -> list[Row]:
        rows = [dict(zip(self.columns, values, strict=True)) for values in zip(*self.columns.values(), strict=True)]
        return [parse_json(row, self.json_names) for row in rows]

    def estimate_bytes(self) -> int:
        """The size of the values in memory, roughly."""
        return sum(
            len(value) if isinstance(value, str | bytes) else SCALAR_BYTES
            for values in self.columns.values()
            for value in values
        )


def parse_json(row: Row, names: Iterable[str]) -> Row:
    for name in names:
        if row[name] is not None:
            row[name] = json.loads(row[name])
    return row


def refuse_value(source: str, row_idx: int, column: str, value: object, reason: str) -> UserError:
    """The error for a value of a table that has no exact form in a snapshot."""
    return UserError(
        f"{source}: row {row_idx}, column {column!r} is {reprlib.repr(value)}: {reason}. Convert it in the database, "
        f"with query='SELECT CAST({column} AS TEXT) AS {column}, ...'"
    )
