"""Writing behind: one thread that does what waits for a disk, while the engine goes on.

A job is `work`, which runs on that thread and must not touch what lives on the engine's, and `done`, which runs on the
engine's thread at its next `collect`, with the error if there was one. Jobs are done in order, one at a time. The
thread ends when nothing is left to do; what is no Exception (the engine was taken for dead) ends it at once, and is
raised where the engine's thread looks next. Knows nothing of what is written.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

MAX_CAPTURED_BYTES = 2**30
"""From here on no more is captured until something was written; one capture may be larger."""


@dataclass(frozen=True, slots=True)
class Job:
    num_bytes: int
    work: Callable[[], None]
    done: Callable[[Exception | None], None]


class Writer:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._finished: deque[tuple[Job, Exception | None]] = deque()
        self._thread: threading.Thread | None = None
        self._captured_bytes = 0
        self._end: BaseException | None = None

    @property
    def is_full(self) -> bool:
        return self._captured_bytes >= MAX_CAPTURED_BYTES

    def submit(self, job: Job) -> None:
        self._captured_bytes += job.num_bytes
        with self._lock:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
                self._thread.start()

    def collect(self) -> None:
        """Call `done` of what was finished since the last time."""
        if self._end is not None:
            raise self._end
        while self._finished:
            job, error = self._finished.popleft()
            self._captured_bytes -= job.num_bytes
            job.done(error)

    def flush(self) -> None:
        """Wait until nothing is left to write."""
        while thread := self._thread:
            thread.join()
        self.collect()

    def _run(self) -> None:
        while job := self._next():
            try:
                job.work()
            except Exception as error:  # noqa: BLE001  reported to whoever wanted it written
                self._finished.append((job, error))
            except BaseException as end:  # noqa: BLE001  raised on the engine's thread
                with self._lock:
                    self._end, self._thread = end, None
                    self._jobs.clear()
                return
            else:
                self._finished.append((job, None))

    def _next(self) -> Job | None:
        with self._lock:
            if self._jobs:
                return self._jobs.popleft()
            self._thread = None
            return None
