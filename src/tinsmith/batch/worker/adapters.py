"""Turns the steps of a job into one loop over its batches, so that a batch goes through all of them in one pass.

A function of rows is called with one row (kinds `row`, `filter`, `flat`), a function of batches (`batch`) with all that
are left, in its `batch_format`; a class is made once and then called in the same way. An exception of a function of
rows fails that row alone; one of a function of batches fails the batch. The user's method determines the output
columns: `map` puts results over the columns of the row (`merge`), `filter` keeps rows as they are, and `flat_map` and
`map_batches` give the new rows whole.

A job with an asynchronous function or an operation runs several batches at a time (`concurrency.py`), any other one
batch after the other in the calling thread.

Each result knows the input row that it comes from, so that a later failure is that row's, until a function of batches
changes the number of rows.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from tinsmith.batch import operations
from tinsmith.batch.client.functions import Mapper, mapper_of
from tinsmith.batch.operations import runtime as operations_runtime
from tinsmith.batch.operations.base import RowOperation
from tinsmith.batch.operations.runtime import Channel
from tinsmith.batch.types import CHAIN, JobSpec, ProgramError, Row, is_retried, unpack_payload
from tinsmith.batch.worker.concurrency import AsyncStep, CallingThread, map_concurrently
from tinsmith.batch.worker.event_loop import EventLoop
from tinsmith.batch.worker.feed import BatchRows, BatchSource, row_count_error
from tinsmith.batch.worker.marker import NO_ROW

Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Waits for a coroutine, outside of the event loop."""


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
    feed: BatchSource,
    channel: Channel | None,
    event_loop: EventLoop,
) -> Callable[[], object]:
    """A function without arguments that maps all batches of a feed; it may return a coroutine for the event loop."""
    first = steps[0]
    if isinstance(first, Mapper) and first.kind == "loop":
        return lambda: first.call(**first.kwargs)
    functions = [step for step in steps if isinstance(step, Mapper) and not step.is_async]
    if len(functions) < len(steps):
        return lambda: _run_concurrently(steps, spec, feed, channel)

    def loop() -> None:
        function_steps = [_build_step(function, spec, feed, event_loop.run) for function in functions]
        while (batch := feed.next_batch()) is not None:
            try:
                with batch.measure():
                    for function_step in function_steps:
                        function_step(batch)
                batch.saved = True
            except Exception as error:  # noqa: BLE001  a user's function raises what it likes
                feed.fail_current(error)

    return loop


async def _run_concurrently(
    steps: Sequence[Mapper | list[RowOperation]], spec: JobSpec, feed: BatchSource, channel: Channel | None
) -> None:
    async_steps: list[AsyncStep] = []
    with closing(CallingThread()) as thread:
        for index, step in enumerate(steps):
            if not isinstance(step, Mapper):
                assert channel is not None, "a worker gives operations a channel"
                operations_before = sum(len(earlier) for earlier in steps[:index] if isinstance(earlier, list))
                async_steps.append(partial(operate, step, channel, operations_before))
            elif step.is_async:  # made on the event loop, since a constructor may need the running one
                async_steps.append(_build_step(step, spec, feed, thread.run).call_async)
            else:
                function_step = await thread.call(_build_step, step, spec, feed, thread.run)
                async_steps.append(partial(thread.call, function_step))
        await map_concurrently([measure_stage(0, async_steps)], feed, operations.max_concurrent_batches(spec))


def measure_stage(stage: int, steps: Sequence[AsyncStep]) -> AsyncStep:
    """The steps of a stage as one step, whose work is recorded in the batch."""

    async def run_steps(batch: BatchRows) -> None:
        with batch.measure(stage):
            for step in steps:
                await step(batch)

    return run_steps


async def operate(step: list[RowOperation], channel: Channel, operations_before: int, batch: BatchRows) -> None:
    results, tokens = await operations_runtime.answer_rows(
        step, batch.results, batch.result_indices, batch.assignment, channel, operations_before
    )
    batch.tokens = (batch.tokens[0] + tokens[0], batch.tokens[1] + tokens[1])
    batch.set_results(results, any_number=False)


def _build_step(step: Mapper, spec: JobSpec, feed: BatchSource, run: Run) -> _RowStep | _BatchStep:
    is_batch = step.kind == "batch" or step.options.get("batched", False)
    return (_BatchStep if is_batch else _RowStep)(step, spec, feed, run)


class _FunctionStep:
    """A step that calls a user's function, of rows or batches."""

    def __init__(self, mapper: Mapper, spec: JobSpec, feed: BatchSource, run: Run) -> None:
        options = mapper.options
        self._kind = mapper.kind
        self._run = run
        self._call = _in_this_process(mapper.instance())
        self._spec = spec
        self._feed = feed
        self._allows_any_number = mapper.kind in ("filter", "flat") or options.get("rows", spec.rows) == "any"
        self._with_indices = bool(options.get("with_indices"))
        self._removed_columns = frozenset(options.get("remove_columns") or ())
        self._merge = bool(options.get("merge"))
        self._batch_format = str(options.get("batch_format", "rows"))

    def _collect(self, result: object) -> object:
        """The result of a function, awaited if need be; for a generator, all values that it yields."""
        is_async = inspect.isasyncgen(result) or inspect.iscoroutine(result)
        return self._run(_collect_async(result)) if is_async else _collect_values(result)

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


def _in_this_process(call: Callable[..., Any]) -> Callable[..., Any]:
    """The function; a process that it forks ends with it, since the rest of the batch is this process's work."""
    pid = os.getpid()

    def call_here(*arguments: Any) -> Any:  # noqa: ANN401  what the user's function takes and returns
        try:
            return call(*arguments)
        finally:
            if os.getpid() != pid:
                sys.stdout.flush()
                os._exit(1)

    return call_here


class _RowStep(_FunctionStep):
    """A function that is called with each row. Errors of the classes in `retry_on` are tried again here, since they do
    not concern the other rows of the batch."""

    def __call__(self, batch: BatchRows) -> None:
        results: list[object] = []
        for index, arguments in zip(batch.result_indices, self._calls(batch), strict=True):
            self._feed.marker.set_row(batch.slot, index)
            results.append(self._try_row(arguments))
        self._feed.marker.set_row(batch.slot, NO_ROW)
        self._set_results(batch, results)

    async def call_async(self, batch: BatchRows) -> None:
        self._set_results(batch, await asyncio.gather(*map(self._try_row_async, self._calls(batch))))

    def _calls(self, batch: BatchRows) -> list[tuple[Any, ...]]:
        """The arguments of the call for each row."""
        rows, indices = batch.results, batch.result_indices
        return [
            (dict(row), index) if self._with_indices else (dict(row),) for row, index in zip(rows, indices, strict=True)
        ]

    def _set_results(self, batch: BatchRows, results: Sequence[object]) -> None:
        batch.set_results(
            [self._result(row, result) for row, result in zip(batch.results, results, strict=True)],
            self._allows_any_number,
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
                return await _collect_async(self._call(*arguments))
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
        self._set_results(batch, self._collect(self._call(*self._arguments(batch))) if batch.results else [])

    async def call_async(self, batch: BatchRows) -> None:
        self._set_results(batch, await _collect_async(self._call(*self._arguments(batch))) if batch.results else [])

    def _arguments(self, batch: BatchRows) -> list[Any]:
        arguments: list[Any] = [convert_batch([dict(row) for row in batch.results], self._batch_format)]
        return [*arguments, batch.result_indices] if self._with_indices else arguments

    def _set_results(self, batch: BatchRows, returned: object) -> None:
        rows = batch.results
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


def _collect_values(result: object) -> object:
    return _YieldedValues(result) if inspect.isgenerator(result) else result


async def _collect_async(result: object) -> object:
    """The result of a function on the event loop, awaited if need be; for a generator, all values that it yields."""
    if inspect.isasyncgen(result):
        return _YieldedValues([value async for value in result])
    return _collect_values(await result if inspect.isawaitable(result) else result)


def convert_batch(rows: list[Row], batch_format: str) -> object:
    if batch_format == "rows":
        return rows
    if batch_format == "pandas":
        import pandas

        return pandas.DataFrame(rows)
    if batch_format == "pyarrow":
        import pyarrow

        # Without names, the table has the columns of the first row alone.
        return pyarrow.Table.from_pylist([dict.fromkeys(_columns_of(rows)) | row for row in rows])
    columns = {name: [row.get(name) for row in rows] for name in _columns_of(rows)}
    return {name: _array(values) for name, values in columns.items()} if batch_format == "numpy" else columns


def _columns_of(rows: list[Row]) -> list[str]:
    """The columns of all rows, in the order in which they first appear."""
    return list(dict.fromkeys(name for row in rows for name in row))


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
