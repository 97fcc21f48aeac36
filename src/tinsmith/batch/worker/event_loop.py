"""The one event loop of a worker's process.

A function may keep objects that belong to an event loop: a connection pool, a semaphore, a task. So everything of a job
that is asynchronous on a worker runs on this loop: the constructors of classes with an asynchronous `__call__`, every
batch, operations, and loops over `load()`, which are called again after an error. It also runs while the function waits
for the next batch. Functions that are not asynchronous run beside it, so they may have event loops of their own.

The loop starts when it is first used. `close` cancels what is still pending, reports it to the job's log, and shuts
down asynchronous generators and the loop's threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_S = 2.0
"""How long cancelled tasks may take to end before they are reported as still running."""
MAX_NAMED = 5
"""The most tasks that a report names."""

log = logging.getLogger("tinsmith.batch")


class EventLoop:
    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._is_used = False

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        self._is_used = True
        return self._runner.run(coroutine)

    def cancel_tasks(self) -> None:
        """Cancel and report what is pending; the loop can be used again."""
        if self._is_used:
            self._runner.run(_cancel_tasks())

    def close(self) -> None:
        self.cancel_tasks()
        self._runner.close()


async def _cancel_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if not tasks:
        return
    log.warning("the function ended with %d pending asyncio tasks, which are cancelled: %s", len(tasks), _names(tasks))
    for task in tasks:
        task.cancel()
    ended_tasks, running = await asyncio.wait(tasks, timeout=CANCEL_S)
    if running:
        log.warning("%d asyncio tasks ignore their cancellation: %s", len(running), _names(running))
    for task in ended_tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("the asyncio task %s raised an error when it was cancelled", _name(task), exc_info=error)


def _names(tasks: set[asyncio.Task[Any]]) -> str:
    names = sorted(map(_name, tasks))
    return ", ".join(names[:MAX_NAMED]) + ", ..." * (len(names) > MAX_NAMED)


def _name(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    return f"{task.get_name()} ({getattr(coroutine, '__qualname__', type(coroutine).__name__)})"
