"""Statements of every request: written out once for each kind of database, then given to the driver as they are.

What SQLAlchemy does anew for each execution takes longer than SQLite takes for the statement. A prepared one runs in a
transaction that `db` opened, on its connection, and errors leave as SQLAlchemy's. Rows are plain tuples in the order of
the statement's columns. Values are named as the statement's parameters, each execution names the same, and lists of any
length (`IN`) cannot be written out once. Knows nothing of what rows mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Dialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.compiler import SQLCompiler

Converter = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Form:
    """A statement as one kind of database takes it. `order` is that of its parameters where they have no names."""

    text: str
    order: Sequence[str] | None
    fixed: Mapping[str, object]
    to_driver: Mapping[str, Converter]
    types: Sequence[sa.types.TypeEngine[Any]]

    def arguments(self, values: Mapping[str, object]) -> Sequence[object] | Mapping[str, object]:
        given = {**self.fixed, **values}
        for name, convert in self.to_driver.items():
            given[name] = convert(given[name])
        return given if self.order is None else [given[name] for name in self.order]

    def reader(self, dialect: Dialect, description: Sequence[Sequence[Any]] | None) -> Converter | None:
        """What makes a row of the driver's; None if that is one already."""
        converters: dict[int, Converter] = {}
        for index, (kind, column) in enumerate(zip(self.types, description or (), strict=False)):
            if convert := kind.dialect_impl(dialect).result_processor(dialect, column[1]):
                converters[index] = convert

        def read(found: Sequence[Any]) -> Sequence[Any]:
            row = list(found)
            for index, convert in converters.items():
                row[index] = convert(row[index])
            return row

        return read if converters else None


class Prepared:
    """One statement, for any connection."""

    def __init__(self, statement: sa.Executable) -> None:
        self._statement = statement
        self._forms: dict[str, _Form] = {}
        self._readers: dict[str, Converter | None] = {}

    def count(self, connection: Connection, values: Mapping[str, object]) -> int:
        """Execute it; how many rows it changed."""
        return self._run(connection, values).rowcount

    def rows(self, connection: Connection, values: Mapping[str, object]) -> list[Sequence[Any]]:
        cursor = self._run(connection, values)
        read = self._reader(connection, cursor)
        return [read(found) for found in cursor.fetchall()] if read else cursor.fetchall()

    def one_or_none(self, connection: Connection, values: Mapping[str, object]) -> Sequence[Any] | None:
        """The first row."""
        cursor = self._run(connection, values)
        found = cursor.fetchone()
        read = self._reader(connection, cursor)
        cursor.close()  # or SQLite goes on reading
        return read(found) if read and found is not None else found

    def _reader(self, connection: Connection, cursor: Any) -> Converter | None:  # noqa: ANN401  any driver's
        dialect = connection.dialect
        if dialect.name not in self._readers:
            self._readers[dialect.name] = self._forms[dialect.name].reader(dialect, cursor.description)
        return self._readers[dialect.name]

    def _run(self, connection: Connection, values: Mapping[str, object]) -> Any:  # noqa: ANN401  any driver's cursor
        dialect = connection.dialect
        form = self._forms.get(dialect.name)
        if form is None:
            form = self._forms[dialect.name] = _written_out(self._statement, dialect, values)
        cursor = connection.connection.cursor()
        try:
            cursor.execute(form.text, form.arguments(values))
        except Exception as error:
            raise _as_sqlalchemys(error, connection, form.text) from error
        return cursor


@dataclass(frozen=True, slots=True)
class Bound:
    """A prepared statement with its values, to be executed in a transaction of somebody else's."""

    statement: Prepared
    values: Mapping[str, object]


Effect = sa.Executable | Bound
"""What goes into a transaction beside what it is for."""

Effects = Sequence[Effect]


def execute(connection: Connection, effect: Effect) -> None:
    if isinstance(effect, Bound):
        effect.statement.count(connection, effect.values)
    else:
        connection.execute(effect)


def _written_out(statement: sa.Executable, dialect: Dialect, values: Mapping[str, object]) -> _Form:
    compiled = statement.compile(dialect=dialect, column_keys=list(values))  # type: ignore[attr-defined]
    assert isinstance(compiled, SQLCompiler)
    assert not compiled.post_compile_params, "a list of any length cannot be written out once"
    to_driver: dict[str, Converter] = {}
    for parameter, name in compiled.bind_names.items():
        if convert := parameter.type.dialect_impl(dialect).bind_processor(dialect):
            to_driver[name] = convert
    fixed = {name: value for name, value in compiled.params.items() if name not in values}
    order = list(compiled.positiontup or ()) if compiled.positional else None
    types = [column.type for column in getattr(statement, "selected_columns", ())]
    return _Form(str(compiled), order, fixed, to_driver, types)


def _as_sqlalchemys(error: Exception, connection: Connection, text: str) -> BaseException:
    dialect = connection.dialect
    dbapi: Any = dialect.loaded_dbapi
    if not isinstance(error, dbapi.Error):
        return error
    driver: Any = connection.connection
    broken = dialect.is_disconnect(cast(Any, error), driver, None)
    if broken:
        connection.invalidate(error)
    return DBAPIError.instance(
        text, {}, error, dbapi.Error, hide_parameters=True, connection_invalidated=broken, dialect=dialect
    )
