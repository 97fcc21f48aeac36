"""Client for downloading checkpoints from a server and uploading adapters to one, and archives of adapters.

A download is complete or absent, and no archive member is written outside its directory. An archive is a tar, with gzip
if it is a file; members whose names begin with a dot are skipped. The key is sent only to the server, not to the
addresses that its links name. Knows HTTP and files; `wire.adapter_files` knows their contents.
"""

from __future__ import annotations

import gzip
import os
import tarfile
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, cast

import httpx
from tqdm.utils import CallbackIOWrapper

from tinsmith.errors import TinsmithError, UserError, refusal
from tinsmith.storage.directories import atomic_directory
from tinsmith.storage.stores import fsync, read_chunks
from tinsmith.wire.adapter_files import UPLOAD_FILES

TIMEOUT_S = 60.0
UPLOAD_TIMEOUT_S = 3600.0
"""How long a server may take to check and store an upload."""

CHUNK_BYTES = 1 << 20

ARCHIVES = (".tar.gz", ".tgz", ".tar")
"""How the names of archives end."""

MAX_MEMBERS = 1000
MAX_UNPACKED_BYTES = 64 << 30
MAX_READ_BYTES = 1 << 25
"""Maximum bytes of one read of an archive. tarfile reads extended headers whole, at any declared size."""

Progress = Callable[[int, int], None]
"""Called with the bytes done and in all (0: unknown)."""


class TinkerServer:
    """A connection to one server with one key."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._url = base_url.rstrip("/")
        self._http = httpx.Client(base_url=f"{self._url}/api/v1/", headers={"X-API-Key": api_key}, timeout=TIMEOUT_S)
        self._keyless = httpx.Client(timeout=TIMEOUT_S, follow_redirects=True)

    def close(self) -> None:
        self._http.close()
        self._keyless.close()

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer to GET /api/v1/`path`. Raises UserError."""
        return self._request(lambda: self._http.get(path, params=dict(query or {}))).json()

    def pull(self, path: str, directory: Path, progress: Progress) -> dict[str, int]:
        """Fetch all files of a checkpoint; returns their sizes by name. Raises UserError."""
        run_id, kind, name = _parse_path(path)
        answer = self._request(lambda: self._http.get(f"training_runs/{run_id}/checkpoints/{kind}/{name}/archive"))
        link = answer.headers.get("location", "")
        if not answer.is_redirect or not link.startswith(("http://", "https://")):
            raise TinsmithError(f"{self._url} answered {answer.status_code} instead of a link to the files")
        try:
            with self._keyless.stream("GET", link) as response:
                if response.is_error:
                    response.read()
                    raise refusal(response.status_code, response.text)
                total = int(response.headers.get("content-length", 0))
                with atomic_directory(directory) as hidden:
                    stream = _Stream(response.iter_bytes(CHUNK_BYTES), total, progress)
                    with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[arg-type]
                        return _extract(archive, hidden)
        except (httpx.TransportError, tarfile.TarError, EOFError) as error:
            raise TinsmithError(f"the download failed: {error!r}; nothing was kept, try again") from None

    def push(self, directory: Path, fields: Mapping[str, str], progress: Progress) -> dict[str, Any]:
        """Upload an adapter as a training checkpoint; returns the response. Raises UserError."""
        present = [directory / name for name in UPLOAD_FILES if (directory / name).is_file()]
        total = sum(path.stat().st_size for path in present)
        # A retried request carries the same key, so it creates only one checkpoint.
        headers = {"X-Idempotency-Key": uuid.uuid4().hex}
        num_sent = 0

        def read(num_bytes: int) -> None:
            nonlocal num_sent
            num_sent += num_bytes
            progress(num_sent, total)

        with ExitStack() as stack:
            opened = {path.name: stack.enter_context(path.open("rb")) for path in present}
            files = {
                name: (name, cast(IO[bytes], CallbackIOWrapper(read, file, "read"))) for name, file in opened.items()
            }
            answer = self._request(
                lambda: self._http.post(
                    "upload_weights", data=dict(fields), files=files, headers=headers, timeout=UPLOAD_TIMEOUT_S
                )
            )
        return answer.json()

    def _request(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        try:
            answer = send()
        except httpx.TransportError as error:
            raise TinsmithError(
                f"no answer from {self._url}: {error!r}; is `tinsmith serve` running? Its address "
                "goes into TINKER_BASE_URL"
            ) from None
        if answer.is_error:
            raise refusal(answer.status_code, answer.text)
        return answer


class _Stream:
    """A response's bytes as a file that is read once, in order."""

    def __init__(self, chunks: Iterator[bytes], total: int, progress: Progress) -> None:
        self._chunks = chunks
        self._total = total
        self._progress = progress
        self._num_read = 0
        self._buffer = b""

    def read(self, size: int) -> bytes:
        while len(self._buffer) < size and (chunk := next(self._chunks, b"")):
            self._buffer += chunk
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        self._num_read += len(data)
        self._progress(self._num_read, self._total)
        return data


class _Bounded:
    """A file of which no more than MAX_READ_BYTES are read at once. Raises UserError."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_READ_BYTES:
            raise UserError(f"the archive has a header of {size} bytes; at most {MAX_READ_BYTES} are read")
        return self._file.read(size)


@contextmanager
def adapter_directory(path: Path, scratch: Path) -> Iterator[Path]:
    """The directory of an adapter: `path` itself or, if it is an archive, a new one below `scratch` with its files.
    Raises UserError.
    """
    yield unpack(path, scratch / "unpacked") if path.is_file() else path


def unpack(archive: Path, directory: Path) -> Path:
    """Write the files of an archive to a new directory, which is returned. Raises UserError."""
    with archive.open("rb") as file, gzip.open(file) as inflated:
        source = inflated if file.peek(2)[:2] == b"\x1f\x8b" else file
        try:
            with tarfile.open(fileobj=_Bounded(source), mode="r:") as members:  # type: ignore[arg-type]
                with atomic_directory(directory) as hidden:
                    _extract(members, hidden)
        except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(f"{archive} is not a whole archive: {error}") from None
    return directory


def pack(directory: Path, archive: Path) -> None:
    """Write the files of a directory as an archive, without compression: weights do not get smaller. Raises UserError
    if there is something of its name.
    """
    if archive.exists():
        raise UserError(f"{archive} exists already; choose another file, or delete it")
    hidden = archive.with_name(f".{archive.name}.{uuid.uuid4().hex}")
    plain = archive.name.endswith(".tar")
    try:
        with tarfile.open(hidden, "x:") if plain else tarfile.open(hidden, "x:gz", compresslevel=0) as tar:
            for path in sorted(directory.iterdir()):
                member = tarfile.TarInfo(path.name)
                member.size = path.stat().st_size
                with path.open("rb") as file:
                    tar.addfile(member, file)
        fsync(hidden)
        hidden.rename(archive)
    finally:
        hidden.unlink(missing_ok=True)


def _extract(archive: tarfile.TarFile, directory: Path) -> dict[str, int]:
    """Write the files of an archive durably. Raises UserError for a member that is not a plain file, and beyond
    MAX_MEMBERS and MAX_UNPACKED_BYTES.
    """
    files: dict[str, int] = {}
    num_bytes = 0
    for count, member in enumerate(archive, 1):
        num_bytes += member.size
        if count > MAX_MEMBERS or num_bytes > MAX_UNPACKED_BYTES:
            raise UserError(f"the archive holds over {MAX_MEMBERS} members or over {MAX_UNPACKED_BYTES} bytes")
        name = member.name.removeprefix("./")
        if member.isdir() and name in ("", "."):
            continue
        if not member.isreg() or name != os.path.basename(name) or name in ("", ".", "..") or name in files:
            raise UserError(f"the archive holds {member.name!a}, which is not a plain file of the directory")
        if name.startswith("."):
            continue
        source = archive.extractfile(member)
        assert source is not None
        with (directory / name).open("xb") as target:
            for chunk in read_chunks(source):
                target.write(chunk)
        fsync(directory / name)
        files[name] = member.size
    if not files:
        raise UserError("the archive holds no files")
    return files


def _parse_path(path: str) -> tuple[str, str, str]:
    prefix, _, address = path.partition("://")
    parts = address.split("/")
    if prefix != "tinker" or len(parts) != 3 or not all(parts):
        raise UserError(f"{path!r} is not a checkpoint path; the form is tinker://TRAINING_RUN_ID/KIND/NAME")
    return parts[0], parts[1], parts[2]
