"""Supervised background work of a process.

`Background` owns the tasks of one event loop. Work that raises is logged, counted under its name and restarted after a
pause that doubles with each failure. Work that returns has ended. `start_supervised_thread` does the same for a thread.
Work handles expected errors (a busy database) itself.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import structlog

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0
"""After work has run this long, the pause after its next failure is the first one again."""

T = TypeVar("T")
log = structlog.get_logger()


async def within(seconds: float, awaitable: Awaitable[T]) -> T | None:
    """The result of `awaitable`; None if it takes longer, which cancels it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await awaitable
    return None


@dataclass(slots=True)
class Backoff:
    """Pauses between failures and restarts, each twice as long as the previous one."""

    first_s: float = FIRST_PAUSE_S
    longest_s: float = LONGEST_PAUSE_S
    _next_s: float = 0.0

    def after(self, ran_s: float = 0.0) -> float:
        """The pause after a failure of work that had run for `ran_s`; the first one again after steady work."""
        pause_s = self.first_s if ran_s >= STEADY_S or not self._next_s else self._next_s
        self._next_s = min(2 * pause_s, self.longest_s)
        return pause_s


def ignore(_name: str) -> None:
    """The default for processes that do not count failures."""


class Background:
    """The background tasks of one event loop. `on_failure` is called with the name of work that raised."""

    def __init__(
        self,
        on_failure: Callable[[str], None] = ignore,
        first_pause_s: float = FIRST_PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
    ) -> None:
        self._on_failure = on_failure
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = asyncio.Event()

    def start(
        self, name: str, run: Callable[[], Coroutine[object, object, None]], **log_fields: object
    ) -> asyncio.Task[None]:
        """Call `run` until it returns. Must be called on the running event loop. Failures are logged with `log_fields`.

        The returned task ends with the work; cancelling it cancels the work.
        """
        task = asyncio.create_task(self._run_supervised(name, run, log_fields), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def end(self) -> None:
        """Stop restarting work. Running work continues."""
        self._ending.set()

    async def stop(self) -> None:
        """Cancel the running work and wait until it has ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_supervised(
        self, name: str, run: Callable[[], Coroutine[object, object, None]], log_fields: dict[str, object]
    ) -> None:
        backoff = Backoff(self._first_pause_s, self._longest_pause_s)
        while True:
            began = time.monotonic()
            try:
                return await run()
            except Exception as error:  # noqa: BLE001  logged and counted, whatever it is
                pause_s = backoff.after(time.monotonic() - began)
                _report(name, error, pause_s, log_fields, self._on_failure)
            if await within(pause_s, self._ending.wait()):
                return


def start_supervised_thread(
    name: str,
    run: Callable[[], None],
    wait_for_end: Callable[[float], bool],
    on_failure: Callable[[str], None] = ignore,
) -> threading.Thread:
    """Start a daemon thread that calls `run` until it returns. `wait_for_end` is called for each pause: it waits up to
    the given number of seconds and returns whether the process is ending.
    """

    def run_supervised() -> None:
        backoff = Backoff()
        while True:
            began = time.monotonic()
            try:
                return run()
            except Exception as error:  # noqa: BLE001  logged and counted, whatever it is
                pause_s = backoff.after(time.monotonic() - began)
                _report(name, error, pause_s, {}, on_failure)
            if wait_for_end(pause_s):
                return

    thread = threading.Thread(target=run_supervised, name=name, daemon=True)
    thread.start()
    return thread


def _report(
    name: str, error: Exception, pause_s: float, log_fields: dict[str, object], on_failure: Callable[[str], None]
) -> None:
    log.error("background work failed; restarting it", task=name, pause_s=pause_s, exc_info=error, **log_fields)
    on_failure(name)
