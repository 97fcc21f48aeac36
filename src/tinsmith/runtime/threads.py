"""The thread pools of a server. Work waits only for threads of its own pool, so a full pool does not delay the others.

- quick: authentication, heartbeats and capabilities, on which every client depends
- handlers: all other requests; the event loop's default executor
- transfers: copying, hashing and checking uploads, and reading downloads
- results: reading large results from the database
- sweeps: the janitor's sweeps
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

QUICK = 4
HANDLERS = 16
"""More than the cores: handlers mostly wait for the database, which has one writer at a time on SQLite."""
TRANSFERS = 4
"""Concurrent uploads and downloads; they share disk and processors with all other work."""
RESULTS = 2
SWEEPS = 2


@dataclass(frozen=True, slots=True)
class ThreadPools:
    quick: ThreadPoolExecutor
    handlers: ThreadPoolExecutor
    transfers: ThreadPoolExecutor
    results: ThreadPoolExecutor
    sweeps: ThreadPoolExecutor

    @classmethod
    def start(cls, handlers: int = HANDLERS, transfers: int = TRANSFERS) -> ThreadPools:
        """Create the pools; each thread starts when it is first needed."""
        sizes = {"quick": QUICK, "handlers": handlers, "transfers": transfers, "results": RESULTS, "sweeps": SWEEPS}
        return cls(**{name: ThreadPoolExecutor(size, thread_name_prefix=name) for name, size in sizes.items()})

    def close(self) -> None:
        """Drop waiting work without waiting for running work."""
        for pool in (self.sweeps, self.results, self.transfers, self.handlers, self.quick):
            pool.shutdown(wait=False, cancel_futures=True)
