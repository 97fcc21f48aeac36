"""Publishing of parts as outputs: one file with all of them, or a directory with a manifest.

Publishing is a pure function of the list of parts. It may be interrupted anywhere and repeated: the bytes are the same.
An existing output is replaced only on request, unless it is this very one. A file appears whole, in one step. The files
of a directory appear one by one, and are valid once its `_manifest.json` exists.

A publisher of a job issues a fencing token for its output (`issue_token`), after which its coordinator checks that it
still owns the job, and publishes within `use_token`. A publisher that goes on although its coordinator has lost the job
finds the token of a later publisher, and replaces nothing (StaleWriterError).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import sqlite3
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from itertools import chain, islice, tee
from typing import IO, Any

import orjson

from tinsmith.batch.formats.part_lists import FilledParts, NumberedFiles, PublishedFile, sum_parts
from tinsmith.batch.types import TEMPORARY_DIRECTORY, OutputInfo, PartInfo, RowRange, part_name, temporary_directory
from tinsmith.storage.fencing import FencingToken, read_token
from tinsmith.storage.locations import open_object, open_store
from tinsmith.storage.stores import READS, Guard, Source, Store, Writer, join, read_ahead, stream_verified

MANIFEST = "_manifest.json"
SUCCESS = "_SUCCESS"
MAX_GROWTH = 16
"""How many times the bytes of its parts a file that is computed from them may have."""
DELETED_KEYS = 1000
"""Keys of other files that are deleted at a time."""
PAGE_FILES = 256
"""Files of a directory that are handed to threads at a time."""
SEGMENT_BYTES = 8 * 1024 * 1024
"""The maximum bytes of a segment. A larger part is a separate object."""


class _Segment:
    """The parts of several batches in one object, one after the other. The object is named after the first."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.size = 0
        self.chunks: list[bytes] = []


class _Segments:
    def __init__(self) -> None:
        self.all: list[_Segment] = []
        self._latest: dict[tuple[str, str], _Segment] = {}

    def add(self, part_base: str, location: str, extension: str, data: bytes) -> tuple[str, int]:
        """The object that will hold the part, and where in it."""
        segment = self._latest.get((part_base, extension))
        if segment is None or segment.size + len(data) > SEGMENT_BYTES:
            segment = self._latest[part_base, extension] = _Segment(location)
            self.all.append(segment)
        offset = segment.size
        segment.size += len(data)
        segment.chunks.append(data)
        return segment.location, offset


_segments: ContextVar[_Segments | None] = ContextVar("segments", default=None)


@contextlib.contextmanager
def in_segments() -> Iterator[None]:
    """The parts that are stored in this block share objects, which are durable once it has ended without an error: many
    small batches cost one write and one fsync."""
    segments = _Segments()
    token = _segments.set(segments)
    try:
        yield
    finally:
        _segments.reset(token)
    for segment in segments.all:
        store, key = open_store(segment.location)
        store.put_create(key, b"".join(segment.chunks))


def store_part(
    part_base: str, span: RowRange, extension: str, data: bytes, rows: int, *, separate: bool = False
) -> PartInfo:
    """Stores the part of a span; `separate` as its own object, also within `in_segments`. Storing equal bytes again is
    allowed; other bytes raise FileExistsError."""
    location, digest = join(part_base, part_name(span, extension)), hashlib.sha256(data).hexdigest()
    segments = _segments.get()
    if segments is None or separate or len(data) > SEGMENT_BYTES:
        store, key = open_store(location)
        return PartInfo(location, rows, len(data), digest, store.put_create(key, data))
    segment_location, offset = segments.add(part_base, location, extension, data)
    return PartInfo(segment_location, rows, len(data), digest, offset=offset)


def source_of(part: PartInfo, skip: int = 0) -> Source:
    store, key = open_store(part.path)
    if part.offset is None:
        return Source(store, key, part.sha256, skip, expected_bytes=part.bytes)
    return Source(store, key, part.sha256, skip, part.offset, part.bytes, part.bytes)


def open_part(part: PartInfo) -> IO[bytes]:
    """A part for reading and seeking."""
    if part.offset is None:
        return open_object(part.path)
    store, key = open_store(part.path)
    return io.BytesIO(store.get_range(key, part.offset, part.offset + part.bytes))


def read_verified(part: PartInfo) -> bytes:
    return b"".join(stream_verified(source_of(part)))


def check_part(part: PartInfo) -> None:
    """Reads a part whole, before any of its rows is used. Raises CorruptFilesError if it was changed."""
    for _ in stream_verified(source_of(part)):
        continue


def open_verified_parts(parts: Iterable[PartInfo]) -> Iterator[tuple[PartInfo, IO[bytes]]]:
    """Each part, in order, and its bytes for reading and seeking; small parts in a bucket are read ahead. Raises
    CorruptFilesError before any byte of a changed part is given."""
    first, second = tee(parts)
    for part, chunks in zip(first, read_ahead(map(source_of, second)), strict=True):
        if isinstance(chunks, list):
            yield part, io.BytesIO(b"".join(chunks))
            continue
        for _ in chunks:
            continue
        with open_part(part) as file:
            yield part, file


_token: ContextVar[FencingToken | None] = ContextVar("token", default=None)


def issue_token(path: str, job_id: str | int) -> FencingToken:
    """Issue the fencing token of a publisher of this job for an output."""
    token = FencingToken(_token_location(path), f"{job_id} {uuid.uuid4().hex}")
    token.issue()
    return token


def delete_token(path: str, job_id: str | int) -> None:
    """Delete the token for an output if a publisher of this job has issued it."""
    token = read_token(_token_location(path))
    if token is not None and token.value.startswith(f"{job_id} "):
        token.release()


def _token_location(path: str) -> str:
    name = "" if path.endswith("/") else path.rpartition("/")[2]
    return join(temporary_directory(path), f"{name}.publisher")


@contextlib.contextmanager
def use_token(token: FencingToken | None) -> Iterator[None]:
    """Publications in this block replace nothing once the token is stale: they raise StaleWriterError."""
    reset = _token.set(token)
    try:
        yield
    finally:
        _token.reset(reset)


def _guard() -> Guard:
    token = _token.get()
    return contextlib.nullcontext if token is None else token.enforce


def publish_file(
    path: str,
    parts: Iterable[PartInfo],
    staging: str,
    if_exists: str,
    *,
    head: bytes = b"",
    skip: int = 0,
) -> OutputInfo:
    """`head`, then the parts one after the other, each without its first `skip` bytes. `parts` is iterated several
    times, so not an iterator."""
    store, key = open_store(path)

    def sources() -> Iterator[Source]:
        return (source_of(part, skip) for part in parts)

    rows, num_bytes = sum_parts(parts)
    local, exclusive = _local(staging), if_exists == "error"
    try:
        size, digest = store.concat(
            sources(),
            key,
            head=head,
            staging=local,
            exclusive=exclusive,
            max_bytes=len(head) + num_bytes,
            guard=_guard(),
        )
    except FileExistsError:
        size, digest = _measure([head], chain.from_iterable(read_ahead(sources())))
        if store.digest(key) != digest:
            raise FileExistsError(exists_already(path)) from None
    return OutputInfo(path, rows, size, digest, store.head(key).etag)


def publish_stream(
    path: str, chunks: Iterable[bytes], parts: Iterable[PartInfo], staging: str, if_exists: str
) -> OutputInfo:
    """An output computed from the parts instead of concatenated. `chunks` must be deterministic."""
    return publish_file(path, [stage_file(staging, "published", chunks, parts).part], staging, if_exists)


def stage_file(
    staging: str, name: str, chunks: Iterable[bytes], parts: Iterable[PartInfo] = (), *, parts_bytes: int = 0
) -> PublishedFile:
    """Write a file that is computed from parts to the staging directory, to be published under its name in a directory.
    A caller that writes several files from the same parts gives the bytes of these as `parts_bytes` instead."""
    rows, num_bytes = sum_parts(parts)
    num_bytes += parts_bytes
    location = join(staging, name)
    store, key = open_store(location)
    with store.open_writer(key, max_bytes=MAX_GROWTH * num_bytes) as writer:
        size, digest = _measure(_write_through(chunks, writer))
    return PublishedFile(name, PartInfo(location, rows, size, digest))


def publish_directory(path: str, files: Iterable[PublishedFile], rows: int, staging: str, if_exists: str) -> OutputInfo:
    """The files under their names, then the manifest. `files` is iterated several times, so not an iterator."""
    store, root = open_store(path)
    root = root.rstrip("/")
    manifest_key, guard = join(root, MANIFEST), _guard()
    _, manifest_digest = _measure(_manifest(files, rows))
    if store.exists(manifest_key) and store.digest(manifest_key) == manifest_digest:
        with guard():
            store.put(join(root, SUCCESS), b"")
        return OutputInfo(
            path, rows, sum(part.bytes for _, part in files), manifest_digest, store.head(manifest_key).etag
        )
    if if_exists == "error":
        if next(_foreign_keys(store, root, files), None):  # other files than those of an interrupted publication
            raise FileExistsError(exists_already(path))
    else:
        with guard():
            store.delete_many([manifest_key, join(root, SUCCESS)])

    def publish_one(file: PublishedFile) -> int:
        target, num_bytes = join(root, file.name), file.part.bytes
        local, exclusive = _local(staging), if_exists == "error"
        try:
            store.concat(
                [source_of(file.part)], target, staging=local, exclusive=exclusive, max_bytes=num_bytes, guard=guard
            )
        except FileExistsError:
            if store.digest(target) != file.part.sha256:
                raise FileExistsError(exists_already(path)) from None
        return num_bytes

    total, remaining = 0, iter(files)
    with ThreadPoolExecutor(READS if store.is_remote else 1) as pool:
        while page := list(islice(remaining, PAGE_FILES)):
            total += sum(pool.map(publish_one, page))
    if if_exists == "overwrite":
        foreign_keys = _foreign_keys(store, root, files)
        while page := list(islice(foreign_keys, DELETED_KEYS)):
            with guard():
                store.delete_many(page)
    with store.open_writer(manifest_key, staging=_local(staging), guard=guard) as writer:
        for line in _manifest(files, rows):
            writer.write(line)
    with guard():
        store.put(join(root, SUCCESS), b"")
    return OutputInfo(path, rows, total, manifest_digest, store.head(manifest_key).etag)


def number_format(count: int, ending: str, stem: str = "part", width: int = 5) -> str:
    """The format of the names of so many files, which sort in the order of their numbers."""
    return f"{stem}-{{:0{max(width, len(str(max(0, count - 1))))}d}}{ending}"


def publish_parts(
    path: str, parts: Iterable[PartInfo], stem: str, ending: str, staging: str, if_exists: str
) -> OutputInfo:
    """A directory of the parts that have rows, as they are: `shard-000000.tar` and so on."""
    filled = FilledParts(parts)
    count = rows = 0
    for part in filled:
        count, rows = count + 1, rows + part.rows
    names = number_format(count, ending, stem, 6)
    return publish_directory(path, NumberedFiles(filled, names), rows, staging, if_exists)


def iter_published_files(output: OutputInfo, is_directory: bool) -> Iterator[PartInfo]:
    """The files of an output in the order of their rows, as parts whose rows are not counted."""
    if not is_directory:
        yield PartInfo(output.path, output.rows, output.bytes, output.sha256, output.etag)
        return
    for file in _read_manifest(output.path):
        yield PartInfo(join(output.path, file["name"]), 0, file["bytes"], file["sha256"])


def _read_manifest(path: str) -> Iterator[dict[str, Any]]:
    """The files in the manifest of a directory, which has a line for each (`_manifest`)."""
    with open_object(join(path, MANIFEST)) as lines:
        next(lines)
        for line in lines:
            if line.startswith(b"{"):
                yield orjson.loads(line.rstrip(b",\n"))


def is_published(path: str) -> bool:
    """Whether a path is a directory, with a final slash, that holds the whole output of a job."""
    if not path.endswith("/"):
        return False
    store, key = open_store(join(path, MANIFEST))
    return store.exists(key)


def check_output(path: str, if_exists: str) -> None:
    """Raises FileExistsError if publishing would, before any work is done."""
    if if_exists != "error":
        return
    store, key = open_store(path)
    if path.endswith("/"):
        existing_key = next((name for name in store.list(key) if TEMPORARY_DIRECTORY not in name), None)
    else:
        existing_key = key if store.exists(key) else None
    if existing_key is not None:
        raise FileExistsError(exists_already(path))


def exists_already(path: str) -> str:
    return (
        f"the output {path} exists already; pass if_exists='overwrite' (in the shell: --if-exists overwrite), or "
        "choose another path"
    )


def _measure(*chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    for chunk in chain.from_iterable(chunks):
        digest.update(chunk)
        size += len(chunk)
    return size, digest.hexdigest()


def _write_through(chunks: Iterable[bytes], target: Writer) -> Iterator[bytes]:
    for chunk in chunks:
        target.write(chunk)
        yield chunk


def _manifest(files: Iterable[PublishedFile], rows: int) -> Iterator[bytes]:
    """A JSON document with one line for each file, generated while it is written."""
    yield b'{"rows":%d,"files":[' % rows
    comma = b"\n"
    for name, part in files:
        yield comma + orjson.dumps({"name": name, "bytes": part.bytes, "sha256": part.sha256})
        comma = b",\n"
    yield b"\n]}\n"


def _foreign_keys(store: Store, root: str, files: Iterable[PublishedFile]) -> Iterator[str]:
    """The keys below a directory that are neither among these files nor parts of a job. Usually none. The names of the
    files are in a temporary database, however many there are."""
    keys = (name for name in store.list(root) if TEMPORARY_DIRECTORY not in name)
    first = next(keys, None)
    if first is None:
        return
    with contextlib.closing(sqlite3.connect("")) as names:
        names.execute("CREATE TABLE files (key TEXT PRIMARY KEY) WITHOUT ROWID")
        names.executemany("INSERT OR IGNORE INTO files VALUES (?)", ((join(root, file.name),) for file in files))
        for key in chain([first], keys):
            if names.execute("SELECT 1 FROM files WHERE key = ?", (key,)).fetchone() is None:
                yield key


def _local(staging: str) -> str:
    return open_store(staging)[1]
