"""Several batches of a worker at a time, so that a long answer in one does not keep the others waiting.

`map_concurrently` runs each batch through all steps in a task of its own, on the worker's event loop. Steps that are
not asynchronous run one batch at a time, on one thread beside the loop (`CallingThread`), so they may block and have
event loops of their own. Each batch is finished as soon as it is through.

The batches in work are bounded in number, and together in rows (`MAX_ROWS`) and bytes (`MAX_BYTES`); a larger one runs
alone.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tinsmith.batch.worker.feed import BatchRows, BatchSource, task_assignment

MAX_ROWS = 512
MAX_BYTES = 256 << 20
"""Of the input rows, as far as `estimate_bytes` knows them."""

T = TypeVar("T")
AsyncStep = Callable[[BatchRows], Awaitable[None]]


class CallingThread:
    """One thread for all calls of functions that are not asynchronous."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "functions")
        self._loop = asyncio.get_running_loop()

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        """The result of a function, which sees the context of the calling task."""
        call = partial(contextvars.copy_context().run, function, *arguments)
        return await self._loop.run_in_executor(self._executor, call)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the event loop, for a function on this thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


async def map_concurrently(steps: Sequence[AsyncStep], feed: BatchSource, max_batches: int, min_rows: int = 0) -> None:
    """Run all batches of a feed through the steps. An error fails its batch alone. Batches of together `min_rows` may
    be in work in any case."""
    max_rows = max(MAX_ROWS, min_rows)
    sizes: dict[asyncio.Task[None], tuple[int, int]] = {}

    def has_room() -> bool:
        num_rows, num_bytes = (sum(amounts) for amounts in zip(*sizes.values(), strict=True)) if sizes else (0, 0)
        return len(sizes) < max_batches and num_rows < max_rows and num_bytes < MAX_BYTES

    async def end_tasks() -> None:
        for task in (await asyncio.wait(sizes, return_when=asyncio.FIRST_COMPLETED))[0]:
            del sizes[task]
            task.result()

    try:
        while (batch := await asyncio.to_thread(feed.take_batch)) is not None:
            size = len(batch.rows), estimate_bytes(batch.rows)
            while sizes and (size[0] > max_rows or size[1] > MAX_BYTES):
                await end_tasks()
            sizes[asyncio.create_task(_map_batch(steps, batch, feed))] = size
            while not has_room():
                await end_tasks()
        while sizes:
            await end_tasks()
    except asyncio.CancelledError:
        feed.stop_taking()  # the thread that takes a batch would keep the process
        raise


async def _map_batch(steps: Sequence[AsyncStep], batch: BatchRows, feed: BatchSource) -> None:
    task_assignment.set(batch.assignment)
    failure: Exception | None = None
    try:
        for step in steps:
            await step(batch)
    except Exception as error:  # noqa: BLE001  a user's function raises what it likes
        failure = error
    await asyncio.to_thread(feed.finish_batch, batch, failure)


def estimate_bytes(value: object) -> int:
    """About how much memory a value of a row takes: its texts, bytes and arrays."""
    if isinstance(value, Mapping):
        return sum(map(estimate_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(estimate_bytes, value))
    num_bytes = getattr(value, "nbytes", None)
    return num_bytes if isinstance(num_bytes, int) else sys.getsizeof(value)
