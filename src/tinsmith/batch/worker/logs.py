"""Logs of bulk jobs: one file for each worker, in which each line names the batch that printed it.

A mapper's process writes through `TaggedOutput`. Such a line is a record separator and an object {at, stream,
batch_idx, attempt_id, text}, and is in the file as soon as it ends or is flushed, so that a process that is killed
leaves it. Output that bypasses `TaggedOutput` (of a C library or of a process that the mapper started) is stored as
plain lines.

`JobLogs` reads the files of one server's workers and deletes them after the retention of jobs.

A file takes at most `WORKER_LOG_BYTES` on the disk, and the files of a job `JOB_LOG_BYTES`: the oldest bytes are
dropped, and a line says so where they were. They become a hole in the file, so that its writers go on and the positions
of readers stay valid. On a file system without holes, nothing is dropped.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from tinsmith.batch.types import Assignment
from tinsmith.errors import NotFoundError

SEPARATOR = "\x1e"
PAGE_BYTES = 1 << 20
LONGEST_LINE = 8192
BLOCK_BYTES = 4096
WORKER_LOG_BYTES = 64 << 20
JOB_LOG_BYTES = 1 << 30
JOB_WORKER_BYTES = 64 << 10
"""What the workers that wrote least recently may have once their job is beyond its limit."""
PUNCH_HOLE = 0x01 | 0x02
"""Of fallocate(2): free the blocks of a range, and leave the size of the file."""
FIELDS = ("at", "stream", "batch_idx", "attempt_id", "text")

Line = dict[str, Any]


class TaggedOutput(io.TextIOBase):
    """Standard output or error of a mapper's process."""

    def __init__(self, target: IO[str], stream: str, batch: Callable[[], Assignment | None]) -> None:
        super().__init__()
        self._target = target
        self._stream = stream
        self._batch = batch
        self._partial = threading.local()  # print() writes a line and its end apart; threads must not mix
        self._num_unchecked = 0

    @property
    def buffer(self) -> object:
        return self._target.buffer  # type: ignore[attr-defined]  bytes bypass the tags

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "utf-8"

    def fileno(self) -> int:
        return self._target.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        *lines, partial = (getattr(self._partial, "text", "") + text).split("\n")
        self._partial.text = partial
        for line in lines:
            self._write_line(line)
        if len(partial) > LONGEST_LINE:
            self.flush()
        return len(text)

    def flush(self) -> None:
        partial = getattr(self._partial, "text", "")
        self._partial.text = ""
        if partial:
            self._write_line(partial)

    def _write_line(self, text: str) -> None:
        batch = self._batch()
        batch_idx, attempt_id = (batch.batch_idx, batch.attempt_id) if batch else (None, None)
        values = round(time.time(), 3), self._stream, batch_idx, attempt_id, text
        # One write, so that lines of several threads and processes do not mix.
        line = f"{SEPARATOR}{json.dumps(dict(zip(FIELDS, values, strict=True)))}\n"
        self._target.write(line)
        self._target.flush()
        self._num_unchecked += len(line)
        if self._num_unchecked > WORKER_LOG_BYTES // 4:
            self._num_unchecked = 0
            drop_oldest(Path(f"/proc/self/fd/{self._target.fileno()}"), WORKER_LOG_BYTES)


def write_to(path: str, *descriptors: int) -> None:
    """Write what this process and its children write to these descriptors from now on to the end of a file."""
    with open(path, "ab") as log:
        for descriptor in descriptors:
            os.dup2(log.fileno(), descriptor)


def tag_output(batch: Callable[[], Assignment | None]) -> None:
    """Tag what this process prints from now on with the batch that `batch` returns."""
    for name in ("stdout", "stderr"):
        setattr(sys, name, TaggedOutput(getattr(sys, f"__{name}__"), name, batch))


def drop_oldest(path: Path, max_bytes: int) -> None:
    """Free the oldest bytes of a log that takes more than `max_bytes` on the disk, so that it takes half of them. A
    line that says so replaces the first lines that stay."""
    with contextlib.suppress(FileNotFoundError), path.open("r+b", buffering=0) as log:
        status = os.fstat(log.fileno())
        if status.st_blocks * 512 <= max_bytes + BLOCK_BYTES:
            return
        end = (status.st_size - max_bytes // 2) // BLOCK_BYTES * BLOCK_BYTES
        if end <= 0 or not _punch_hole(log.fileno(), end):
            return
        note = f"{end} bytes of older output were dropped: the limit of a log is {max_bytes} bytes".encode()
        length = os.pread(log.fileno(), PAGE_BYTES, end).find(b"\n", len(note))
        if length > 0:
            os.pwrite(log.fileno(), note.ljust(length), end)


def _punch_hole(descriptor: int, end: int) -> bool:
    """False where the system or the file system frees no blocks: a log has no limit there."""
    allocate = getattr(_libc(), "fallocate", None)  # only Linux has it
    return allocate is not None and allocate(descriptor, PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(end)) == 0


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def strip_tags(text: str) -> str:
    """The lines of a log as they were printed, without tags."""
    return "\n".join(_parse_line(line)["text"] for line in text.split("\n"))


def _parse_line(text: str) -> Line:
    if text.startswith(SEPARATOR):
        with contextlib.suppress(ValueError):
            line = json.loads(text[1:])
            if isinstance(line, dict) and set(line) == set(FIELDS):
                return line
    return {**dict.fromkeys(FIELDS), "text": text}


def read_page(path: Path, after: int) -> tuple[str, int]:
    """The whole lines of a file after byte `after`, at most `PAGE_BYTES`, and the byte where they end. Bytes that were
    dropped are skipped."""
    with path.open("rb") as log:
        with contextlib.suppress(OSError):  # at the end of the file
            after = os.lseek(log.fileno(), after, os.SEEK_DATA)
        log.seek(after)
        page = log.read(PAGE_BYTES)
    end = page.rfind(b"\n") + 1
    if not end and len(page) == PAGE_BYTES:
        end = len(page)  # a line that is longer than a page comes in pieces
    return page[:end].decode(errors="replace"), after + end


class JobLogs:
    """The log files of all workers that this server has started."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, worker_id: str) -> Path:
        return self.directory / f"batch-{worker_id}.log"

    def workers(self, job_id: int) -> list[tuple[str, int]]:
        """The workers with output for a job and the bytes of each, oldest first."""
        logs = []
        for path in self.directory.glob(f"batch-{job_id}-*.log"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if status.st_size:
                    logs.append((status.st_ctime, path.stem.removeprefix("batch-"), status.st_size))
        return [(worker_id, size) for _, worker_id, size in sorted(logs)]

    def read(self, job_id: int, worker_id: str, after: int) -> tuple[list[Line], int]:
        """The next page of a worker's lines, and the byte where it ends. Raises NotFoundError."""
        if not re.fullmatch(rf"{job_id}-[0-9a-f]+", worker_id):
            raise NotFoundError(f"bulk job {job_id} has no worker of that name; its logs list them")
        try:
            text, end = read_page(self.path(worker_id), after)
        except FileNotFoundError:
            raise NotFoundError(f"bulk job {job_id} has no worker {worker_id!r} with a log on this server") from None
        return [_parse_line(line) for line in text.removesuffix("\n").split("\n")] if end > after else [], end

    def sweep(self, before: float) -> None:
        """Delete the files that were last written before this time, and drop the oldest output of the others beyond
        their limits."""
        sizes: dict[str, list[tuple[float, int, Path]]] = {}
        for path in self.directory.glob("batch-*.log"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < before:
                    path.unlink()
                    continue
                drop_oldest(path, WORKER_LOG_BYTES)
                status = path.stat()
                job_id = path.name.split("-")[1]
                sizes.setdefault(job_id, []).append((status.st_mtime, status.st_blocks * 512, path))
        for job_files in sizes.values():
            excess = sum(size for _, size, _ in job_files) - JOB_LOG_BYTES
            for _, size, path in sorted(job_files):
                if excess <= 0:
                    break
                drop_oldest(path, JOB_WORKER_BYTES)
                excess -= max(0, size - JOB_WORKER_BYTES)
