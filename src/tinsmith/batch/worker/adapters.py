"""Turns the steps of a job into one loop over `load()`, so that a batch goes through all of them in one pass.

A function of rows is called with one row (kinds `row`, `filter`, `flat`), a function of batches (`batch`) with all that
are left, in its `batch_format`; a class is made once and then called in the same way. An exception of a function of
rows fails that row alone; one of a function of batches fails the batch. The user's method determines the output
columns: `map` puts results over the columns of the row (`merge`), `filter` keeps rows as they are, and `flat_map` and
`map_batches` give the new rows whole.

Each result knows the input row that it comes from, so that a later failure is that row's, until a function of batches
changes the number of rows.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tinsmith.batch import operations
from tinsmith.batch.client.functions import Mapper, mapper_of
from tinsmith.batch.operations import runtime as operations_runtime
from tinsmith.batch.operations.base import RowOperation
from tinsmith.batch.operations.runtime import Channel
from tinsmith.batch.types import CHAIN, JobSpec, ProgramError, Row, is_retried, unpack_payload
from tinsmith.batch.worker.children import NO_ROW
from tinsmith.batch.worker.event_loop import EventLoop
from tinsmith.batch.worker.feed import BatchRows, Feed, row_count_error

T = TypeVar("T")


def steps_of(payload: str) -> list[Mapper | list[RowOperation]]:
    """The functions and operations of a payload. Runs its source, so only in workers. Raises ValueError, UserError."""
    data = unpack_payload(payload)
    steps = data["steps"] if data.get("type") == CHAIN else [data]
    return [
        operations.operations_of(step) if step.get("type") == operations.TYPE else mapper_of(step) for step in steps
    ]


def loop_of(
    steps: Sequence[Mapper | list[RowOperation]],
    spec: JobSpec,
    feed: Feed,
    channel: Channel | None,
    event_loop: EventLoop,
) -> Callable[[], object]:
    """A function without arguments that maps all batches of a feed; it may return a coroutine for the event loop."""
    first = steps[0]
    if isinstance(first, Mapper) and first.kind == "loop":
        return lambda: first.call(**first.kwargs)
    is_async = any(isinstance(step, Mapper) and step.is_async for step in steps)

    def next_batch() -> BatchRows | None:
        # A function's own tasks run while it waits.
        return event_loop.run(asyncio.to_thread(feed.next_batch)) if is_async else feed.next_batch()

    def loop() -> None:
        functions = [_build_step(steps, index, spec, feed, channel, event_loop) for index in range(len(steps))]
        while (batch := next_batch()) is not None:
            try:
                for function in functions:
                    function(batch)
                feed.mark_saved(batch)
            except Exception as error:  # noqa: BLE001  a user's function raises what it likes
                feed.fail_current(error)

    return loop


def _build_step(
    steps: Sequence[Mapper | list[RowOperation]],
    index: int,
    spec: JobSpec,
    feed: Feed,
    channel: Channel | None,
    event_loop: EventLoop,
) -> Callable[[BatchRows], None]:
    step = steps[index]
    if isinstance(step, Mapper):
        is_batch = step.kind == "batch" or step.options.get("batched", False)
        return (_BatchStep if is_batch else _RowStep)(step, spec, feed, event_loop)
    operations_before = sum(len(step) for step in steps[:index] if isinstance(step, list))

    def operate(batch: BatchRows) -> None:
        assert channel is not None, "a worker gives operations a channel"
        answers = operations_runtime.answer_rows(
            step, batch.results, batch.result_indices, batch.assignment, channel, operations_before
        )
        results, tokens = event_loop.run(answers)
        batch.tokens = (batch.tokens[0] + tokens[0], batch.tokens[1] + tokens[1])
        batch.set_results(results, any_number=False)

    return operate


async def _construct(mapper: Mapper) -> Callable[..., Any]:
    """Make the function's instance on the event loop, since a constructor may need the running one."""
    return mapper.instance()


class _FunctionStep:
    """A step that calls a user's function, of rows or batches."""

    def __init__(self, mapper: Mapper, spec: JobSpec, feed: Feed, event_loop: EventLoop) -> None:
        options = mapper.options
        self._kind = mapper.kind
        self._event_loop = event_loop
        self._call = event_loop.run(_construct(mapper)) if mapper.is_async else mapper.instance()
        self._is_async = mapper.is_async
        self._spec = spec
        self._feed = feed
        self._allows_any_number = mapper.kind in ("filter", "flat") or options.get("rows", spec.rows) == "any"
        self._with_indices = bool(options.get("with_indices"))
        self._removed_columns = frozenset(options.get("remove_columns") or ())
        self._merge = bool(options.get("merge"))
        self._batch_format = str(options.get("batch_format", "rows"))

    def _collect(self, result: object) -> object:
        """The result of a function, awaited if need be; for a generator, all values that it yields."""
        if inspect.isgenerator(result):
            return _YieldedValues(result)
        if inspect.isasyncgen(result):
            return self._event_loop.run(_collect_async(result))
        return self._event_loop.run(result) if inspect.iscoroutine(result) else result

    def _merge_into_row(self, row: Row, result: object) -> object:
        """Merge a result, or each result of a list, over its row without the removed columns; errors stay unchanged."""
        if isinstance(result, list):
            return [self._merge_into_row(row, element) for element in result]
        if not isinstance(result, dict):
            return result
        columns = row
        if self._removed_columns:
            columns = {name: value for name, value in row.items() if name not in self._removed_columns}
        return {**columns, **result}


class _RowStep(_FunctionStep):
    """A function that is called with each row. Errors of the classes in `retry_on` are tried again here, since they do
    not concern the other rows of the batch."""

    def __call__(self, batch: BatchRows) -> None:
        rows, indices = batch.results, batch.result_indices
        calls = [
            (dict(row), index) if self._with_indices else (dict(row),) for row, index in zip(rows, indices, strict=True)
        ]
        if self._is_async:
            results = self._event_loop.run(_gather([self._try_row_async(arguments) for arguments in calls]))
        else:
            results = []
            for index, arguments in zip(indices, calls, strict=True):
                self._feed.marker.row(index)
                results.append(self._try_row(arguments))
            self._feed.marker.row(NO_ROW)
        batch.set_results(
            [self._result(row, result) for row, result in zip(rows, results, strict=True)], self._allows_any_number
        )

    def _try_row(self, arguments: tuple[Any, ...]) -> object:
        tries = 0
        while True:
            try:
                return self._collect(self._call(*arguments))
            except Exception as error:  # noqa: BLE001  a user's function raises what it likes
                tries += 1
                if (pause_s := self._pause_s(tries, error)) is None:
                    return error
            time.sleep(pause_s)

    async def _try_row_async(self, arguments: tuple[Any, ...]) -> object:
        tries = 0
        while True:
            try:
                output = self._call(*arguments)
                return [value async for value in output] if inspect.isasyncgen(output) else await output
            except Exception as error:  # noqa: BLE001  a user's function raises what it likes
                tries += 1
                if (pause_s := self._pause_s(tries, error)) is None:
                    return error
            await asyncio.sleep(pause_s)

    def _pause_s(self, tries: int, error: Exception) -> float | None:
        """How long to wait before the row is tried again; None if it is not."""
        limits = self._spec.limits
        if not self._spec.retry_on or tries > limits.max_retries or not is_retried(error, self._spec.retry_on):
            return None
        return limits.backoff_s * 2**tries

    def _result(self, row: Row, result: object) -> object:
        if isinstance(result, BaseException):
            return result
        if self._kind == "filter":
            return row if result else None
        if self._kind == "row":
            return self._merge_into_row(row, result)
        if isinstance(result, Iterable) and not isinstance(result, Mapping | str | bytes):
            return list(result)
        return TypeError(f"the function of flat_map returned a {type(result).__name__}; it must return a list of rows")


class _BatchStep(_FunctionStep):
    def __call__(self, batch: BatchRows) -> None:
        rows = batch.results
        if not rows:
            batch.set_results([], self._allows_any_number)
            return
        arguments: list[Any] = [convert_batch([dict(row) for row in rows], self._batch_format)]
        if self._with_indices:
            arguments.append(batch.result_indices)
        returned = self._collect(self._call(*arguments))
        if self._kind == "filter":
            batch.set_results(filter_rows(rows, returned), self._allows_any_number)
            return
        parts = returned if isinstance(returned, _YieldedValues) else [returned]
        results = [row for part in parts for row in rows_of(part)]
        if len(results) != len(rows):
            if self._merge:
                raise ProgramError(
                    f"the function returned {len(results)} {'row' if len(results) == 1 else 'rows'} for a batch of "
                    f"{len(rows)}; map(batched=True) merges each result into its row, so return one for each "
                    'row. map_batches with rows="any" takes any number of rows'
                )
            if not self._allows_any_number:
                raise row_count_error(len(results), len(rows))
        if self._merge:
            results = [self._merge_into_row(row, result) for row, result in zip(rows, results, strict=True)]
        batch.set_results(results, self._allows_any_number)


class _YieldedValues(list[Any]):
    """The values that a generator yielded."""


async def _collect_async(generator: AsyncIterable[object]) -> _YieldedValues:
    return _YieldedValues([value async for value in generator])


async def _gather(attempts: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    return list(await asyncio.gather(*attempts))


def convert_batch(rows: list[Row], batch_format: str) -> object:
    if batch_format == "rows":
        return rows
    if batch_format == "pandas":
        import pandas

        return pandas.DataFrame(rows)
    if batch_format == "pyarrow":
        import pyarrow

        return pyarrow.Table.from_pylist(rows)
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    return {name: _array(values) for name, values in columns.items()} if batch_format == "numpy" else columns


def _array(values: list[Any]) -> Any:  # noqa: ANN401
    """An array of the values; of objects, if they have no common shape."""
    import numpy as np

    try:
        return np.asarray(values)
    except ValueError:
        array = np.empty(len(values), object)
        array[:] = values
        return array


def filter_rows(rows: Sequence[Row], answers: object) -> list[Row | None]:
    """The rows for which a function of a batch answered with something true; None for the others. Raises
    ProgramError."""
    to_list = getattr(answers, "tolist", None) or getattr(answers, "to_pylist", None)
    values = to_list() if to_list is not None else answers
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise ProgramError(f"the function of filter returned a {type(answers).__name__}; it must return one bool a row")
    if len(values) != len(rows):
        raise ProgramError(
            f"the function of filter returned {len(values)} values for a batch of {len(rows)} rows; it must return one "
            "bool for each row, in the same order"
        )
    return [row if value else None for row, value in zip(rows, values, strict=True)]


def rows_of(output: object) -> list[Any]:
    """The rows that a function of a batch returned. Raises ProgramError for another type."""
    if isinstance(output, Mapping):
        columns = {name: list(values) for name, values in output.items()}
        if len({len(values) for values in columns.values()}) > 1:
            lengths = {name: len(values) for name, values in columns.items()}
            raise ProgramError(f"the function returned columns of unequal length: {lengths}")
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if (to_pylist := getattr(output, "to_pylist", None)) is not None:
        return to_pylist()
    if hasattr(output, "columns") and (to_dict := getattr(output, "to_dict", None)) is not None:
        return to_dict("records")
    if isinstance(output, Sequence) and not isinstance(output, str | bytes):
        return list(output)
    raise ProgramError(
        f"the function returned a {type(output).__name__}; it must return a list of dicts, a dict of columns or a table"
    )
