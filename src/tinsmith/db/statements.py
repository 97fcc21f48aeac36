"""Statements of the hot path: SQL that is compiled once per database dialect and executed on the driver.

SQLAlchemy's overhead for each execution exceeds SQLite's time for the statement. A `Statement` runs in a transaction
that `Database` opened, on its connection, and raises SQLAlchemy's errors. Its parameters are named, and every execution
passes all of them: JSON as text, other types as the driver takes them. Rows are tuples in the order of the statement's
columns. `IN` with a list of variable length is not supported, since the SQL depends on the length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Dialect
from sqlalchemy.exc import DBAPIError

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Compiled:
    """The SQL for one dialect, the values of its literals, and decoders of columns, by index."""

    text: str
    fixed: Mapping[str, object]
    decoders: Mapping[int, Callable[[Any], Any]]

    def decode_row(self, row: Sequence[Any]) -> Row:
        if not self.decoders:
            return tuple(row)
        values = list(row)
        for index, decode in self.decoders.items():
            values[index] = decode(values[index])
        return tuple(values)


class Statement:
    """A statement for connections of any dialect; on Postgres, `postgresql` takes its place."""

    def __init__(self, statement: sa.ClauseElement, *, postgresql: sa.ClauseElement | None = None) -> None:
        self._statement = statement
        self._variants = {} if postgresql is None else {"postgresql": postgresql}
        self._compiled: dict[str, _Compiled] = {}

    def count(self, connection: Connection, values: Mapping[str, object]) -> int:
        """Execute the statement; returns the number of changed rows."""
        return self._execute(connection, values)[1].rowcount

    def rows(self, connection: Connection, values: Mapping[str, object]) -> list[Row]:
        compiled, cursor = self._execute(connection, values)
        return [compiled.decode_row(row) for row in cursor.fetchall()]

    def first(self, connection: Connection, values: Mapping[str, object]) -> Row | None:
        compiled, cursor = self._execute(connection, values)
        row = cursor.fetchone()
        cursor.close()  # an open cursor would keep SQLite's read transaction open
        return None if row is None else compiled.decode_row(row)

    def _execute(self, connection: Connection, values: Mapping[str, object]) -> tuple[_Compiled, Any]:
        dialect = connection.dialect
        compiled = self._compiled.get(dialect.name)
        if compiled is None:
            statement = self._variants.get(dialect.name, self._statement)
            compiled = self._compiled[dialect.name] = _compile(statement, dialect, list(values))
        cursor = connection.connection.cursor()
        try:
            cursor.execute(compiled.text, {**compiled.fixed, **values})
        except Exception as error:
            raise _translate_error(error, connection, compiled.text) from error
        return compiled, cursor


@dataclass(frozen=True, slots=True)
class Bound:
    """A statement with its values, for a transaction that another module opens."""

    statement: Statement
    values: Mapping[str, object]


Effect = sa.Executable | Bound
"""A further statement for a transaction of another module."""

Effects = Sequence[Effect]


def execute(connection: Connection, effect: Effect) -> None:
    if isinstance(effect, Bound):
        effect.statement.count(connection, effect.values)
    else:
        connection.execute(effect)


def _compile(statement: sa.ClauseElement, dialect: Dialect, names: list[str]) -> _Compiled:
    compiled = statement.compile(dialect=dialect, column_keys=names)
    text = str(compiled)
    assert "[POSTCOMPILE_" not in text, "a list of any length cannot be compiled once"
    fixed = {name: value for name, value in (compiled.params or {}).items() if name not in names}
    decoders: dict[int, Callable[[Any], Any]] = {}
    for index, column in enumerate(getattr(statement, "selected_columns", ())):
        if isinstance(column.type, sa.JSON | sa.Boolean):
            decode = column.type.dialect_impl(dialect).result_processor(dialect, None)
            if decode is not None:
                decoders[index] = decode
    return _Compiled(text, fixed, decoders)


def _translate_error(error: Exception, connection: Connection, text: str) -> BaseException:
    """Translate a driver's error into SQLAlchemy's, without parameters; a broken connection is invalidated."""
    dialect = connection.dialect
    dbapi: Any = dialect.loaded_dbapi
    if not isinstance(error, dbapi.Error):
        return error
    driver: Any = connection.connection
    broken = dialect.is_disconnect(error, driver, None)  # pyright: ignore[reportArgumentType]  typed as a Protocol
    if broken:
        connection.invalidate(error)
    return DBAPIError.instance(
        text, {}, error, dbapi.Error, hide_parameters=True, connection_invalidated=broken, dialect=dialect
    )
