"""Turns functions of a row or a batch, and classes, into loops over `load()`, the one form that workers run.

A function of a row (kind `row`) takes one row, or a row and its index, and returns one. The result is the row with the
returned columns over its own, without `remove_columns`; an exception fails that row alone. A function of a batch (kind
`batch`), or an object of a class (kind `class`), takes all rows in the job's `batch_format`; an exception fails the
batch. `merge` says whether the results of a batch go over its rows or replace them.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from tinsmith.batch.client.functions import Mapper
from tinsmith.batch.types import ProgramError, Row
from tinsmith.batch.worker.markers import NO_ROW

BATCH_FORMATS = ("list", "columns", "pandas", "arrow")


class Batches(Protocol):
    """The part of the worker's feed that adapters use."""

    def next_rows(self) -> list[Row] | None: ...
    def save(self, results: Sequence[object], tokens_in: int, tokens_out: int) -> None: ...
    def fail_current(self, error: BaseException) -> bool: ...
    def at_row(self, row_idx: int) -> None: ...
    @property
    def indices(self) -> Sequence[int]: ...


def loop_of(mapper: Mapper, feed: Batches) -> Callable[[], object]:
    """A function without arguments that maps all batches of a feed; it may return a coroutine."""
    if mapper.kind == "loop":
        return lambda: mapper.call(**mapper.kwargs)
    if mapper.kind == "row":
        return lambda: _rows(mapper, feed)
    return lambda: _batches(mapper, feed)


def _rows(mapper: Mapper, feed: Batches) -> None:
    with_indices = bool(mapper.options.get("with_indices"))
    while (rows := feed.next_rows()) is not None:
        numbered = zip(rows, feed.indices, strict=True)
        arguments = [(dict(row), index) if with_indices else (dict(row),) for row, index in numbered]
        if mapper.is_async:
            results = asyncio.run(_all([_attempt_async(mapper, each) for each in arguments]))
        else:
            results = []
            for index, each in zip(feed.indices, arguments, strict=True):
                feed.at_row(index)
                results.append(_attempt(mapper, each))
            feed.at_row(NO_ROW)
        feed.save([_over(row, result, mapper.options) for row, result in zip(rows, results, strict=True)], 0, 0)


def _batches(mapper: Mapper, feed: Batches) -> None:
    call, kwargs = (mapper.call(**mapper.kwargs), {}) if mapper.kind == "class" else (mapper.call, mapper.kwargs)
    shape = str(mapper.options.get("batch_format", "list"))
    while (rows := feed.next_rows()) is not None:
        arguments: list[Any] = [shaped([dict(row) for row in rows], shape)]
        if mapper.options.get("with_indices"):
            arguments.append(list(feed.indices))
        try:
            made = call(*arguments, **kwargs)
            results = rows_of(asyncio.run(_all([made]))[0] if inspect.isawaitable(made) else made)
            if mapper.options.get("merge"):
                if len(results) != len(rows):
                    raise ProgramError(
                        f"the function gave {len(results)} {'row' if len(results) == 1 else 'rows'} for a batch of "
                        f"{len(rows)}; map(batched=True) puts each result over the columns of its row, so there must "
                        'be one for each. map_batches with rows="any" takes any number of rows'
                    )
                results = [_over(row, result, mapper.options) for row, result in zip(rows, results, strict=True)]
        except Exception as error:  # noqa: BLE001 (a user's function raises what it likes)
            feed.fail_current(error)
        else:
            feed.save(results, 0, 0)


def shaped(rows: list[Row], shape: str) -> object:
    if shape == "columns":
        return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    if shape == "pandas":
        import pandas

        return pandas.DataFrame(rows)
    if shape == "arrow":
        import pyarrow

        return pyarrow.Table.from_pylist(rows)
    return rows


def rows_of(made: object) -> list[Any]:
    """The rows that a function of a batch returned. Raises ProgramError for another type."""
    if isinstance(made, Mapping):
        columns = {name: list(values) for name, values in made.items()}
        if len({len(values) for values in columns.values()}) > 1:
            lengths = {name: len(values) for name, values in columns.items()}
            raise ProgramError(f"the function returned columns of unequal length: {lengths}")
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if (to_pylist := getattr(made, "to_pylist", None)) is not None:
        return to_pylist()
    if hasattr(made, "columns") and (to_dict := getattr(made, "to_dict", None)) is not None:
        return to_dict("records")
    if isinstance(made, Sequence) and not isinstance(made, str | bytes):
        return list(made)
    raise ProgramError(
        f"the function returned a {type(made).__name__}; it must return a list of dicts, a dict of columns or a table"
    )


def _attempt(mapper: Mapper, arguments: tuple[Any, ...]) -> object:
    try:
        return mapper.call(*arguments, **mapper.kwargs)
    except Exception as error:  # noqa: BLE001 (a user's function raises what it likes)
        return error


async def _attempt_async(mapper: Mapper, arguments: tuple[Any, ...]) -> object:
    try:
        return await mapper.call(*arguments, **mapper.kwargs)
    except Exception as error:  # noqa: BLE001 (a user's function raises what it likes)
        return error


async def _all(attempts: Sequence[Awaitable[Any]]) -> list[Any]:
    return list(await asyncio.gather(*attempts))


def _over(row: Row, result: object, options: Mapping[str, Any]) -> object:
    """The row with its result over it, without the removed columns; each of a list of results; errors unchanged."""
    if isinstance(result, list):
        return [_over(row, each, options) for each in result]
    if not isinstance(result, dict):
        return result
    kept = {name: value for name, value in row.items() if name not in (options.get("remove_columns") or ())}
    return {**kept, **result}
