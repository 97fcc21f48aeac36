"""A `Store` over a bucket (S3, Google Cloud Storage, or memory), implemented with obstore.

Credentials, region and endpoint come from the standard AWS_* and GOOGLE_* variables. obstore retries requests with
back-off. A missing object raises FileNotFoundError, any other error of the bucket UnreachableError.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tinsmith.storage.stores import (
    CHUNK_BYTES,
    PART_BYTES,
    Entry,
    Guard,
    ObjectInfo,
    StaleWriterError,
    Store,
    UnreachableError,
    Writer,
    part_bytes,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Bucket

MAX_COPY_BYTES = 5 * 2**30
"""The largest object that S3 copies in one request."""


NO_BUCKET = ("NoSuchBucket", "bucket does not exist")
"""Parts of the stores' messages when the bucket is missing, rather than the object."""


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Translate the bucket's errors into UnreachableError, except for a missing object's FileNotFoundError."""
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError as error:
        if any(words in str(error) for words in NO_BUCKET):
            raise UnreachableError(f"the bucket does not exist: {_first_line(error)}") from error
        raise
    except BaseError as error:
        raise UnreachableError(f"the object store failed: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:500]


class BucketStore(Store):
    """A bucket; keys have no leading slash."""

    is_remote = True

    def __init__(self, bucket: Bucket) -> None:
        self._bucket: Any = bucket

    @translate_errors()
    def put_create(self, key: str, data: bytes) -> str | None:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            return self._bucket.put(key, data, mode="create", use_multipart=False)["e_tag"]
        except (AlreadyExistsError, PreconditionError, FileExistsError):
            if self.get(key) != data:
                raise FileExistsError(f"{key} exists already") from None
            return self.head(key).etag

    @translate_errors()
    def put(self, key: str, data: bytes) -> str | None:
        return self._bucket.put(key, data, use_multipart=len(data) > PART_BYTES)["e_tag"]

    @translate_errors()
    def get(self, key: str) -> bytes:
        return bytes(self._bucket.get(key).bytes())

    @translate_errors()
    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        requests = [(start, end) for start, end in ranges if end > start]
        answers = iter(
            self._bucket.get_ranges(key, starts=[start for start, _ in requests], ends=[end for _, end in requests])
            if requests
            else ()
        )
        return [bytes(next(answers)) if end > start else b"" for start, end in ranges]

    def chunks(self, key: str) -> Iterator[bytes]:
        with translate_errors():
            for chunk in self._bucket.get(key).stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(chunk)

    @translate_errors()
    def head(self, key: str) -> ObjectInfo:
        info = self._bucket.head(key)
        return ObjectInfo(info["size"], info["e_tag"])

    @translate_errors()
    def open(self, key: str, buffer_bytes: int = PART_BYTES) -> IO[bytes]:
        return io.BufferedReader(_Ranged(self, key, self.head(key).size), buffer_bytes)

    def entries(self, prefix: str) -> Iterator[Entry]:
        with translate_errors():
            for page in self._bucket.list(prefix.rstrip("/") or None):
                for entry in page:
                    yield Entry(entry["path"], entry["size"], entry["last_modified"].timestamp())

    @translate_errors()
    def delete_many(self, keys: Iterable[str]) -> None:
        if names := list(keys):
            with contextlib.suppress(FileNotFoundError):
                self._bucket.delete(names)

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
        with translate_errors():
            upload = _Upload(self._bucket, key, part_bytes(max_bytes))
            yield upload
            if upload.stream is None and exclusive:
                from obstore.exceptions import AlreadyExistsError, PreconditionError

                try:
                    with guard():
                        self._bucket.put(key, bytes(upload.buffer), mode="create", use_multipart=False)
                except (AlreadyExistsError, PreconditionError, FileExistsError):
                    raise FileExistsError(f"{key} exists already") from None
            elif exclusive and self.exists(key):
                raise FileExistsError(f"{key} exists already")
            elif upload.stream is None and guard is not contextlib.nullcontext:
                self._put_unchanged(key, bytes(upload.buffer), guard)
            else:
                with guard():
                    upload.finish()

    def _put_unchanged(self, key: str, data: bytes, guard: Guard) -> None:
        """Replace an object on the condition that it does not change after `guard` has been entered. Raises
        StaleWriterError."""
        from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError

        mode: Any = "create"
        with contextlib.suppress(FileNotFoundError):
            info = self._bucket.head(key)
            mode = {name: info[name] for name in ("e_tag", "version") if info[name] is not None}
        with guard():
            try:
                self._bucket.put(key, data, mode=mode, use_multipart=False)
            except (AlreadyExistsError, PreconditionError, FileExistsError, FileNotFoundError):
                raise StaleWriterError(f"{key} was replaced while it was being written") from None
            except (NotSupportedError, NotImplementedError):  # a store without conditional requests
                self._bucket.put(key, data, use_multipart=False)

    @translate_errors()
    def copy(self, source: str, target: str) -> None:
        size = self.head(source).size
        if size <= MAX_COPY_BYTES:
            self._bucket.copy(source, target)
            return
        with self.open(source) as file, self.open_writer(target, max_bytes=size) as writer:
            while chunk := file.read(PART_BYTES):
                writer.write(chunk)

    @translate_errors()
    def upload(self, path: Path, key: str) -> None:
        """Upload a local file as an object."""
        size = path.stat().st_size
        self._bucket.put(key, path, use_multipart=size > PART_BYTES, chunk_size=part_bytes(size))


class _Ranged(io.RawIOBase):
    """An object as a seekable file. Each read is a separate request, since one for gigabytes would time out."""

    def __init__(self, store: BucketStore, key: str, size: int) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401  any buffer, as in the base class
        end = min(self._position + min(len(buffer), PART_BYTES), self._size)
        if end <= self._position:
            return 0
        chunk = self._store.get_range(self._key, self._position, end)
        buffer[: len(chunk)] = chunk
        self._position += len(chunk)
        return len(chunk)


class _Upload:
    """Buffers an object of up to one part, and streams a larger one in parts."""

    def __init__(self, bucket: Bucket, key: str, part_bytes: int) -> None:
        self._bucket: Any = bucket
        self._key = key
        self._part_bytes = part_bytes
        self.buffer = bytearray()
        self.stream: Any = None

    def write(self, data: bytes | memoryview) -> None:
        if self.stream is None and len(self.buffer) + len(data) <= PART_BYTES:
            self.buffer += data
            return
        if self.stream is None:
            import obstore

            self.stream = obstore.open_writer(self._bucket, self._key, buffer_size=self._part_bytes, max_concurrency=1)
            self.stream.write(bytes(self.buffer))
            self.buffer.clear()
        self.stream.write(bytes(data))

    def finish(self) -> None:
        if self.stream is None:
            self._bucket.put(self._key, bytes(self.buffer), use_multipart=False)
        else:
            self.stream.close()
