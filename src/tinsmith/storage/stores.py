"""`Store`: one interface to objects on the local disk, in S3, in Google Cloud Storage and in memory.

Invariants:
- An object is complete or absent, also after a crash.
- A write is durable when it returns; on the local disk the file and its directory are fsynced.
- `put_create` and an exclusive writer never replace an object. Exception: for a multipart upload, an exclusive writer
  checks again before it completes; of two writers that check at the same moment, the later one wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import sys
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import IO, ClassVar, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from tinsmith.errors import CorruptFilesError, UserError

CHUNK_BYTES = 1024 * 1024
# Larger objects are uploaded in parts of at least this size, one part in memory at a time.
PART_BYTES = 8 * CHUNK_BYTES
MAX_PARTS = 10_000
"""The most parts of an upload to S3; Google Cloud Storage has the same limit."""
MAX_OBJECT_BYTES = 5 * 2**40
"""The largest object of S3 and Google Cloud Storage."""
READS = 16
"""The most sources that are read from a bucket at the same time."""
READ_AHEAD_BYTES = 64 * CHUNK_BYTES
"""About the most bytes of sources in memory that were read before they are written."""
SCHEMES = ("file", "s3", "gs", "memory")
RETRIES = {"max_retries": 8, "retry_timeout": timedelta(seconds=60)}
"""Retries of a request to a bucket, with back-off: about ten seconds in total."""


class ObjectInfo(NamedTuple):
    size: int
    etag: str | None


class Entry(NamedTuple):
    """One object of a listing; `modified_at` is in seconds since the epoch by the store's clock."""

    key: str
    size: int
    modified_at: float


Guard = Callable[[], AbstractContextManager[None]]
"""A block around the step that makes an object visible; it raises an error if the object must not be replaced."""


class Writer(Protocol):
    def write(self, data: bytes | memoryview, /) -> object: ...


class Source(NamedTuple):
    """A source of a `concat`: an object, or `size` bytes of it from `start` on, and their expected digest."""

    store: Store
    key: str
    sha256: str
    skip: int = 0
    """Bytes at the beginning of the source that are omitted from the result."""
    start: int = 0
    size: int | None = None
    """None: the whole object. A part of an object is read at once."""
    expected_bytes: int | None = None
    """The number of bytes that are read, if it is known."""


class Store(ABC):
    is_remote: ClassVar[bool] = False
    """Whether a read waits for a network, so that several at the same time are faster."""

    @abstractmethod
    def put_create(self, key: str, data: bytes) -> str | None:
        """Store a new object and return its etag. Raises FileExistsError if the key has other contents already."""

    @abstractmethod
    def put(self, key: str, data: bytes) -> str | None: ...

    @abstractmethod
    def get(self, key: str) -> bytes: ...

    @abstractmethod
    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of each `(start, end)`; `end` is exclusive."""

    @abstractmethod
    def chunks(self, key: str) -> Iterator[bytes]:
        """Read the object in chunks, from its beginning."""

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Raises FileNotFoundError."""

    @abstractmethod
    def open(self, key: str, buffer_bytes: int = PART_BYTES) -> IO[bytes]:
        """Open an object for reading and seeking, with a buffer of `buffer_bytes`. Raises FileNotFoundError."""

    @abstractmethod
    def entries(self, prefix: str) -> Iterator[Entry]:
        """All objects below a directory, unordered."""

    def list(self, prefix: str) -> Iterator[str]:
        """The keys of all objects below a directory, unordered."""
        return (entry.key for entry in self.entries(prefix))

    @abstractmethod
    def delete_many(self, keys: Iterable[str]) -> None:
        """Delete the objects; missing ones are ignored."""

    @abstractmethod
    def open_writer(
        self,
        key: str,
        *,
        staging: str | None = None,
        exclusive: bool = False,
        max_bytes: int = 0,
        guard: Guard = contextlib.nullcontext,
    ) -> AbstractContextManager[Writer]:
        """Write an object in chunks; it becomes visible when the block ends without an error. `staging` is a directory
        of this store in which a crash may leave an unfinished object. With `exclusive`, raises FileExistsError instead
        of replacing an object. An object of more than `MAX_PARTS` parts needs `max_bytes`, the most that it may have:
        the size of its parts follows. `guard` is entered when all bytes are written, for the step that makes them
        visible."""

    @abstractmethod
    def copy(self, source: str, target: str) -> None: ...

    def share(self, source: str, target: str) -> None:
        """Copy an object that never changes under either name; by a hard link where possible."""
        self.copy(source, target)

    def get_range(self, key: str, start: int, end: int) -> bytes:
        return self.get_ranges(key, [(start, end)])[0]

    def digest(self, key: str) -> str:
        """The SHA-256 of an object, in hexadecimal digits."""
        digest = hashlib.sha256()
        for chunk in self.chunks(key):
            digest.update(chunk)
        return digest.hexdigest()

    def exists(self, key: str) -> bool:
        try:
            self.head(key)
        except FileNotFoundError:
            return False
        return True

    def delete_below(self, prefix: str) -> None:
        """Delete everything below a directory, page by page."""
        page: list[str] = []
        for key in self.list(prefix):
            page.append(key)
            if len(page) == 1000:
                self.delete_many(page)
                page.clear()
        self.delete_many(page)

    def concat(
        self,
        sources: Iterable[Source],
        key: str,
        *,
        head: bytes = b"",
        staging: str | None = None,
        exclusive: bool,
        max_bytes: int = 0,
        guard: Guard = contextlib.nullcontext,
    ) -> tuple[int, str]:
        """Write `head` and then the sources; returns the size and SHA-256 of the whole. `max_bytes` and `guard` as in
        `open_writer`.

        Raises CorruptFilesError, without writing the object, if a source differs from its digest."""
        digest, size = hashlib.sha256(head), len(head)
        with self.open_writer(key, staging=staging, exclusive=exclusive, max_bytes=max_bytes, guard=guard) as writer:
            writer.write(head)
            for chunks in read_ahead(sources):
                for chunk in chunks:
                    digest.update(chunk)
                    size += len(chunk)
                    writer.write(chunk)
        return size, digest.hexdigest()


def read_chunks(file: IO[bytes], num_bytes: int | None = None) -> Iterator[bytes]:
    """Yield the next `num_bytes` of a file, or the remaining ones, in chunks of CHUNK_BYTES."""
    remaining = sys.maxsize if num_bytes is None else num_bytes
    while remaining > 0 and (chunk := file.read(min(CHUNK_BYTES, remaining))):
        remaining -= len(chunk)
        yield chunk


def stream_verified(source: Source) -> Iterator[memoryview]:
    """Read a source in chunks. Raises CorruptFilesError at its end if they differ from its digest."""
    digest, skip = hashlib.sha256(), source.skip
    if source.size is None:
        chunks = source.store.chunks(source.key)
    else:
        chunks = iter([source.store.get_range(source.key, source.start, source.start + source.size)])
    for chunk in chunks:
        digest.update(chunk)
        data = memoryview(chunk)[skip:]
        skip = max(0, skip - len(chunk))
        if data:
            yield data
    if digest.hexdigest() != source.sha256:
        raise CorruptFilesError(
            f"{source.key} differs from what was written: its SHA-256 is {digest.hexdigest()}, not {source.sha256}"
        )


def read_ahead(sources: Iterable[Source]) -> Iterator[Iterable[memoryview]]:
    """The chunks of each source, in order, as `stream_verified` gives them. Small sources in a bucket are read at the
    same time and ahead, up to `READS` and `READ_AHEAD_BYTES`."""
    remaining = iter(sources)
    waiting: deque[tuple[Source, Future[list[memoryview]] | None]] = deque()
    waiting_bytes = 0
    pool = ThreadPoolExecutor(READS, thread_name_prefix="read")
    try:
        while True:
            while len(waiting) < READS and waiting_bytes < READ_AHEAD_BYTES:
                source = next(remaining, None)
                if source is None:
                    break
                is_small = source.expected_bytes is not None and source.expected_bytes <= PART_BYTES
                is_ahead = source.store.is_remote and is_small
                waiting.append((source, pool.submit(_read_verified, source) if is_ahead else None))
                waiting_bytes += source.expected_bytes or 0 if is_ahead else 0
            if not waiting:
                return
            source, read = waiting.popleft()
            if read is None:
                yield stream_verified(source)
            else:
                waiting_bytes -= source.expected_bytes or 0
                yield read.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _read_verified(source: Source) -> list[memoryview]:
    return list(stream_verified(source))


def part_bytes(max_bytes: int) -> int:
    """The size of the parts of an upload of at most `max_bytes`."""
    chunks = -(-min(max_bytes, MAX_OBJECT_BYTES) // (MAX_PARTS * CHUNK_BYTES))
    return max(PART_BYTES, chunks * CHUNK_BYTES)


class LocalStore(Store):
    """Files; keys are absolute paths."""

    def put_create(self, key: str, data: bytes) -> str | None:
        try:
            self._write(key, data, exclusive=True)
        except FileExistsError:
            if Path(key).read_bytes() != data:
                raise
            fsync(os.path.dirname(key))  # the process that wrote it may have died before its fsync
        return None

    def put(self, key: str, data: bytes) -> str | None:
        self._write(key, data, exclusive=False)
        return None

    def _write(self, key: str, data: bytes, exclusive: bool) -> None:
        with self.open_writer(key, exclusive=exclusive) as writer:
            writer.write(data)

    def get(self, key: str) -> bytes:
        return Path(key).read_bytes()

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        with open(key, "rb") as file:
            return [os.pread(file.fileno(), end - start, start) for start, end in ranges]

    def chunks(self, key: str) -> Iterator[bytes]:
        with open(key, "rb", buffering=0) as file:
            yield from read_chunks(file)

    def head(self, key: str) -> ObjectInfo:
        status = os.stat(key)
        if not Path(key).is_file():
            raise FileNotFoundError(f"{key} is not a file")
        return ObjectInfo(status.st_size, f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}")

    def open(self, key: str, buffer_bytes: int = PART_BYTES) -> IO[bytes]:
        return open(key, "rb")

    def entries(self, prefix: str) -> Iterator[Entry]:
        for path in self.list(prefix):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(path, follow_symlinks=False)
                yield Entry(path, status.st_size, status.st_mtime)

    def list(self, prefix: str) -> Iterator[str]:
        for directory, _, names in os.walk(prefix):
            yield from (os.path.join(directory, name) for name in names)

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(key)

    def delete_below(self, prefix: str) -> None:
        shutil.rmtree(prefix, ignore_errors=True)

    @contextlib.contextmanager
    def open_writer(
        self,
        key: str,
        *,
        staging: str | None = None,
        exclusive: bool = False,
        max_bytes: int = 0,
        guard: Guard = contextlib.nullcontext,
    ) -> Iterator[Writer]:
        directory, name = os.path.split(key)
        unfinished = f"{staging or directory}/.{name}.{_PROCESS}-{os.getpid()}-{next(_counter)}.unfinished"
        for parent in {directory, os.path.dirname(unfinished)}:
            _make_directory(parent)
        if exclusive and os.path.exists(key):
            raise FileExistsError(f"{key} exists already")
        try:
            with open(unfinished, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            with guard():
                if exclusive:
                    os.link(unfinished, key)
                else:
                    os.replace(unfinished, key)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished)
        fsync(directory)

    def copy(self, source: str, target: str) -> None:
        with open(source, "rb") as file, self.open_writer(target) as writer:
            for chunk in read_chunks(file):
                writer.write(chunk)

    def share(self, source: str, target: str) -> None:
        _make_directory(os.path.dirname(target))
        hidden = f"{target}.{_PROCESS}-{next(_counter)}.unfinished"
        try:
            os.link(source, hidden)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without hard links
            self.copy(source, target)
        else:
            os.replace(hidden, target)
            fsync(os.path.dirname(target))


def split(location: str) -> tuple[str, str, str]:
    """(scheme, bucket, key): `s3://b/k` -> s3, b, k; a path -> file, "", its absolute form."""
    if "://" not in location:
        return "file", "", os.path.abspath(os.path.expanduser(location))
    parts = urlsplit(location, allow_fragments=False)
    if parts.scheme not in SCHEMES:
        raise UserError(
            f"{location!r} has the scheme {parts.scheme!r}; supported are a path and {[f'{s}://' for s in SCHEMES]}"
        )
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise UserError(f"{location!r} names the host {parts.netloc!r}; a file:// URL has none: file:///DIRECTORY")
        return "file", "", os.path.abspath(unquote(parts.path))
    if not parts.netloc:
        raise UserError(f"{location!r} names no bucket; it must be {parts.scheme}://BUCKET/KEY")
    key = parts.path.lstrip("/") + (f"?{parts.query}" if parts.query else "")
    return parts.scheme, parts.netloc, key


def join(directory: str, name: str) -> str:
    return f"{directory.rstrip('/')}/{name}"


# Random per process, since a system call for each file of a short batch would be measurable.
_PROCESS = uuid.uuid4().hex
_counter = itertools.count()


def _make_directory(directory: str) -> None:
    """Create a directory durably: its entry in the parent is fsynced."""
    if os.path.isdir(directory):
        return
    parent = os.path.dirname(directory)
    _make_directory(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory)
    fsync(parent)


def fsync(path: str | Path) -> None:
    """fsync a file, or the entries of a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class UnreachableError(OSError):
    """The bucket does not answer or refuses; its contents may be intact."""


class StaleWriterError(Exception):
    """A later writer has replaced the object, or has issued a newer fencing token for it (`fencing.py`)."""


def make_private(directory: Path) -> None:
    """Create a directory that only this user can enter. The mode of an existing one is not changed."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
