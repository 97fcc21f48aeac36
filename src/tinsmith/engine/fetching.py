"""Fetching: the files of versions, on their way from wherever they are to a dedicated sampler's memory.

A checkpoint's files are in the storage. An ephemeral version is asked of the engine that owns its run, which has it in
memory (`handover`); if that cannot be reached or has it no more, the storage has it, now or soon: where there are
dedicated samplers, engines write what they publish at once. Some threads do the waiting; the sampler's own collects.
What cannot be had from here within a few seconds is told as such: the run's engine can always make it again.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.cluster.executors import Executors
from tinsmith.engine.transfer import NotHereError, fetch
from tinsmith.errors import CorruptFilesError
from tinsmith.storage.directories import Directories
from tinsmith.store.checkpoints import Checkpoint, Checkpoints
from tinsmith.store.sampling_sessions import SamplingSession, SamplingSessions

PATIENCE_S = 10.0
"""How long a version that nobody can give is looked for."""

PAUSE_S = 0.1
"""Between two looks."""

MOST_AT_ONCE = 4

MOST_VERSION_BYTES = 64 << 30

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Wanted:
    """A version by its key, and where it comes from: a checkpoint as it was found, or a run's ephemeral version."""

    key: str
    sampler: SamplingSession
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """Files that may be read until `close` is called; or why there are none."""

    key: str
    path: Path | None
    num_bytes: int
    error: Exception | None
    close: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Places:
    """Where versions may be: rows say it, the storage has the files, and `key` opens the engines' outboxes."""

    executors: Executors
    samplers: SamplingSessions
    checkpoints: Checkpoints
    versions: Directories
    key: bytes


class Fetcher:
    def __init__(self, places: Places, directory: Path) -> None:
        """`directory` is for files on their way; what an earlier process left there is deleted."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, parents=True)
        self._places = places
        self._directory = directory
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="fetch")
        self._finished: deque[Fetched] = deque()
        self._closed = False
        self.num_running = 0

    def begin(self, wanted: Wanted) -> None:
        self.num_running += 1
        self._threads.submit(self._fetch, wanted)

    def collect(self) -> list[Fetched]:
        """What has come, or will not, since the last time."""
        found = [self._finished.popleft() for _ in range(len(self._finished))]
        self.num_running -= len(found)
        return found

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        for fetched in self.collect():
            fetched.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _fetch(self, wanted: Wanted) -> None:
        stack = ExitStack()
        try:
            path = self._checkpoint(wanted.checkpoint, stack) if wanted.checkpoint else self._version(wanted, stack)
            num_bytes = sum(file.stat().st_size for file in path.iterdir())
            self._finished.append(Fetched(wanted.key, path, num_bytes, None, stack.close))
        except Exception as error:  # noqa: BLE001  told to whoever wanted it
            stack.close()
            self._finished.append(Fetched(wanted.key, None, 0, error, stack.close))

    def _checkpoint(self, checkpoint: Checkpoint, stack: ExitStack) -> Path:
        return stack.enter_context(self._places.checkpoints.reading(checkpoint))

    def _version(self, wanted: Wanted, stack: ExitStack) -> Path:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            if (path := self._from_owner(wanted, stack) or self._from_storage(wanted, stack)) is not None:
                return path
            if self._closed or time.monotonic() > deadline:
                raise NotHereError(f"version {wanted.key!r} is nowhere to be had")
            time.sleep(PAUSE_S)

    def _from_owner(self, wanted: Wanted, stack: ExitStack) -> Path | None:
        model_id = wanted.sampler.model_id
        try:
            address = model_id and self._places.executors.owner_address(model_id)
            if not address:
                return None
            into = Path(tempfile.mkdtemp(dir=self._directory))
            stack.callback(shutil.rmtree, into, ignore_errors=True)
            fetch(address, wanted.key, self._places.key, into, MOST_VERSION_BYTES)
        except (NotHereError, CorruptFilesError, SQLAlchemyError) as error:
            log.info("a version did not come from its engine", version_id=wanted.key, error=str(error))
            return None
        return into

    def _from_storage(self, wanted: Wanted, stack: ExitStack) -> Path | None:
        try:
            name = self._places.samplers.directory_of(wanted.key)
            return None if name is None else stack.enter_context(self._places.versions.reading(name))
        except (CorruptFilesError, OSError, SQLAlchemyError) as error:
            log.warning("a version did not come from the storage", version_id=wanted.key, error=str(error))
            return None
