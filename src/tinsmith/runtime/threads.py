"""The worker threads of a server, in lanes of their own: what fills one lane does not hold up the others.

Quick is what every client needs in time: to be known, to say that it is alive, to learn what the server can do.
Handlers are all other requests, and whatever asks for no lane (the event loop's default). Transfers copy, hash and
check what was uploaded, and read what is downloaded. Results reads large results from the database. Sweeps are the
server's own rounds. What finds its lane full waits there for its turn.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

QUICK = 4
HANDLERS = 16
"""More than there are cores: most of the time they wait for the database, whose writers take turns."""
TRANSFERS = 4
"""Uploads and downloads that are worked on at once; they share the disk and the processors with everything else."""
RESULTS = 2
SWEEPS = 2


@dataclass(frozen=True, slots=True)
class Threads:
    quick: ThreadPoolExecutor
    handlers: ThreadPoolExecutor
    transfers: ThreadPoolExecutor
    results: ThreadPoolExecutor
    sweeps: ThreadPoolExecutor

    @classmethod
    def start(cls, handlers: int = HANDLERS, transfers: int = TRANSFERS) -> Threads:
        """Threads are started when they are first needed."""
        sizes = {"quick": QUICK, "handlers": handlers, "transfers": transfers, "results": RESULTS}
        sizes["sweeps"] = SWEEPS
        return cls(**{lane: ThreadPoolExecutor(size, thread_name_prefix=lane) for lane, size in sizes.items()})

    def close(self) -> None:
        """Drop what waits; what runs ends by itself."""
        for lane in (self.sweeps, self.results, self.transfers, self.handlers, self.quick):
            lane.shutdown(wait=False, cancel_futures=True)
