"""The thread pools of a server. Work waits only for threads of its own pool, so a full pool does not delay the others.

- quick: authentication, heartbeats and capabilities, on which every client depends
- strangers: lookups of keys that this server has not seen before, so that they do not delay other requests
- handlers: all other requests; the event loop's default executor
- transfers: copying, hashing and checking uploads, and reading downloads; as many threads of Starlette spool forms and
  read what is streamed
- results: reading large results from the database
- sweeps: the janitor's sweeps
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

QUICK = 4
STRANGERS = 2
HANDLERS = 16
"""More than the cores: handlers mostly wait for the database, which has one writer at a time on SQLite."""
TRANSFERS = 4
"""Concurrent uploads and downloads; they share disk and processors with all other work."""
RESULTS = 2
SWEEPS = 2


def sizes_of(handlers: int, transfers: int) -> dict[str, int]:
    """The number of threads of each pool."""
    fixed = {"quick": QUICK, "strangers": STRANGERS, "results": RESULTS, "sweeps": SWEEPS}
    return fixed | {"handlers": handlers, "transfers": transfers}


def bound_starlette_threads(transfers: int) -> None:
    """Bound the threads in which Starlette spools forms and reads what it streams; by default they are 40. Must be
    called on the event loop.
    """
    from anyio.to_thread import current_default_thread_limiter

    current_default_thread_limiter().total_tokens = transfers


def num_threads(handlers: int, transfers: int) -> int:
    """The number of threads of all pools, and of Starlette."""
    return sum(sizes_of(handlers, transfers).values()) + transfers


@dataclass(frozen=True, slots=True)
class ThreadPools:
    quick: ThreadPoolExecutor
    strangers: ThreadPoolExecutor
    handlers: ThreadPoolExecutor
    transfers: ThreadPoolExecutor
    results: ThreadPoolExecutor
    sweeps: ThreadPoolExecutor

    @classmethod
    def start(cls, handlers: int = HANDLERS, transfers: int = TRANSFERS) -> ThreadPools:
        """Create the pools; each thread starts when it is first needed."""
        sizes = sizes_of(handlers, transfers)
        return cls(**{name: ThreadPoolExecutor(size, thread_name_prefix=name) for name, size in sizes.items()})

    def close(self) -> None:
        """Drop waiting work without waiting for running work."""
        for pool in (self.sweeps, self.results, self.transfers, self.handlers, self.strangers, self.quick):
            pool.shutdown(wait=False, cancel_futures=True)
