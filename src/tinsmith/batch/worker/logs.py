"""What a job's function prints: one file for each worker, in which each line says which batch it was printed for.

A mapper's process writes through `Tagged`: a line is a record separator and an object {at, stream, batch_idx,
attempt_id, text}. What went past it (a library in C, a process that the mapper started) lies between as plain lines.
A line is in the file when it ends, or when it is flushed, so that a process that is killed has said what it said.

`JobLogs` reads the files of one server's workers. Files that nobody wrote to for as long as jobs are kept are deleted.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from tinsmith.batch.types import Assignment
from tinsmith.errors import NotFoundError

SEPARATOR = "\x1e"
PAGE_BYTES = 1 << 20
LONGEST_LINE = 8192
FIELDS = ("at", "stream", "batch_idx", "attempt_id", "text")

Line = dict[str, Any]


class Tagged(io.TextIOBase):
    """Standard output or error of a mapper's process."""

    def __init__(self, target: IO[str], stream: str, batch: Callable[[], Assignment | None]) -> None:
        super().__init__()
        self._target = target
        self._stream = stream
        self._batch = batch
        self._begun = threading.local()  # print() writes a line and its end apart: another thread must not come between

    @property
    def buffer(self) -> object:
        return self._target.buffer  # type: ignore[attr-defined]  whoever writes bytes goes past the tags

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "utf-8"

    def fileno(self) -> int:
        return self._target.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        *whole, rest = (getattr(self._begun, "text", "") + text).split("\n")
        self._begun.text = rest
        for line in whole:
            self._say(line)
        if len(rest) > LONGEST_LINE:
            self.flush()
        return len(text)

    def flush(self) -> None:
        begun = getattr(self._begun, "text", "")
        self._begun.text = ""
        if begun:
            self._say(begun)

    def _say(self, line: str) -> None:
        batch = self._batch()
        values = (
            round(time.time(), 3),
            self._stream,
            batch.batch_idx if batch else None,
            batch.attempt_id if batch else None,
            line,
        )
        # One write each: lines of several threads, and of the worker's other processes, do not mix.
        self._target.write(f"{SEPARATOR}{json.dumps(dict(zip(FIELDS, values, strict=True)))}\n")
        self._target.flush()


def tag_output(batch: Callable[[], Assignment | None]) -> None:
    """From now on, this process says which batch it prints for."""
    for name in ("stdout", "stderr"):
        setattr(sys, name, Tagged(getattr(sys, f"__{name}__"), name, batch))


def untagged(text: str) -> str:
    """The lines as they were printed."""
    return "\n".join(_line(line)["text"] for line in text.split("\n"))


def _line(text: str) -> Line:
    if text.startswith(SEPARATOR):
        with contextlib.suppress(ValueError):
            found = json.loads(text[1:])
            if isinstance(found, dict) and set(found) == set(FIELDS):
                return found
    return {**dict.fromkeys(FIELDS), "text": text}


class JobLogs:
    """The files of all workers that this server has started."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, worker_id: str) -> Path:
        return self.directory / f"batch-{worker_id}.log"

    def workers(self, job_id: int) -> list[tuple[str, int]]:
        """Who wrote something for a job, and how many bytes; first come first."""
        found = []
        for path in self.directory.glob(f"batch-{job_id}-*.log"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if status.st_size:
                    found.append((status.st_ctime, path.stem.removeprefix("batch-"), status.st_size))
        return [(worker_id, size) for _, worker_id, size in sorted(found)]

    def read(self, job_id: int, worker_id: str, after: int) -> tuple[list[Line], int]:
        """The whole lines of a file after so many bytes, about a MiB of them, and where they end.

        Raises NotFoundError."""
        if not re.fullmatch(rf"{job_id}-[0-9a-f]+", worker_id):
            raise NotFoundError(f"bulk job {job_id} has no worker of that name; its logs list them")
        try:
            with self.path(worker_id).open("rb") as log:
                log.seek(after)
                page = log.read(PAGE_BYTES)
        except FileNotFoundError:
            raise NotFoundError(f"bulk job {job_id} has no worker {worker_id!r} with a log on this server") from None
        end = page.rfind(b"\n") + 1
        if not end and len(page) == PAGE_BYTES:
            end = len(page)  # a line that no page can hold comes in pieces
        text = page[:end].decode(errors="replace").removesuffix("\n")
        return [_line(line) for line in text.split("\n")] if end else [], after + end

    def sweep(self, before: float) -> None:
        """Delete what was not written to since then."""
        for path in self._all():
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < before:
                    path.unlink()

    def _all(self) -> Iterator[Path]:
        return self.directory.glob("batch-*.log")
