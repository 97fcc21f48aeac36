"""Version transfer: an engine serves the versions in its memory to dedicated samplers before their files are durable.

`TransferServer` is a small HTTP listener on its own threads, independent of the engine's thread. It has captures of the
versions in the engine's memory, writes one to files when a sampler requests it, and keeps the files of the last few.
`fetch` is the client. Both prove to each other that they know a key derived from the signing secret: the request is
signed with a nonce, and so is the answer's manifest, which holds every file's SHA-256. Nothing is encrypted: this is
for one machine, or a private network. Knows no SQL and no device.

`VersionTransfer` is the engine's side. Once a second it checks for samplers of its base model. With the first one it
starts the server and announces its address; from then on it offers every version in memory, and versions are written to
the storage as soon as their publish is settled instead of with the next snapshot. Called from the engine's thread.

`VersionFetcher` is the sampler's side. A checkpoint's files are in the storage. An ephemeral version is fetched from
the engine that owns its run; if that is unreachable or has dropped it, the storage has it, now or soon. Threads wait;
the sampler's thread collects. A version that cannot be fetched within a few seconds is an error: the run's engine can
always recreate it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import json
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedReader
from pathlib import Path
from socket import socket
from urllib.parse import quote, unquote

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.backends import Capture
from tinsmith.cluster.executors import Executors
from tinsmith.errors import CorruptFilesError
from tinsmith.runtime.background import start_supervised_thread
from tinsmith.storage.directories import Directories
from tinsmith.store.checkpoints import Checkpoint, Checkpoints
from tinsmith.store.sampling_sessions import SamplingSession, SamplingSessions

PREFIX = "/versions/"
NONCE, EXPIRES, SIGNATURE, MANIFEST_BYTES = "X-Nonce", "X-Expires", "X-Signature", "X-Manifest-Bytes"

SIGNATURE_VALIDITY_S = 300
"""Validity of a request's signature, and the largest difference between the clocks of two machines."""

SILENCE_S = 10.0
"""A connection is closed if the peer neither reads nor writes for this long."""

MAX_TRANSFERS = 8
"""Concurrent transfers; more wait."""

MAX_MANIFEST_BYTES = 1 << 20
MAX_FILES = 64

CACHED_VERSIONS = 4
"""Versions whose files are kept for the next sampler."""

CLOSING_S = 0.1
"""Poll interval of the listener for its shutdown."""

_CHUNK = 1 << 20

log = structlog.get_logger()


class VersionUnavailableError(Exception):
    """The peer cannot be reached, or does not have the version."""


class TransferServer:
    """Serves the versions of this engine; closed with the engine."""

    def __init__(self, key: bytes, host: str, directory: Path) -> None:
        """`directory` is for files in transfer; files of an earlier process are deleted."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, parents=True)
        self._key = key
        self._directory = directory
        self._captures: dict[str, Capture] = {}
        self._lock = threading.Lock()  # for the files only: the engine's thread never waits for writes
        self._written: OrderedDict[str, tuple[Capture, Path]] = OrderedDict()
        self._listener = _Listener((host, 0), self)
        self.address = f"{host}:{self._listener.server_address[1]}"
        self._closing = threading.Event()
        serve = partial(self._listener.serve_forever, CLOSING_S)
        self._thread = start_supervised_thread("server", serve, self._closing.wait)

    def offer(self, version_id: str, capture: Capture) -> None:
        """Serve this version from now on, replacing an earlier offer. Called from the engine's thread."""
        self._captures[version_id] = capture

    def withdraw(self, version_id: str) -> None:
        """Stop serving a version that left memory."""
        self._captures.pop(version_id, None)

    def close(self) -> None:
        self._closing.set()
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()
        shutil.rmtree(self._directory, ignore_errors=True)

    def allows(self, path: str, nonce: str, expires: str, signature: str) -> bool:
        if not hmac.compare_digest(_request_signature(self._key, path, nonce, expires), signature):
            return False
        return (
            expires.isascii()
            and expires.isdigit()
            and time.time() < int(expires) <= time.time() + 2 * SIGNATURE_VALIDITY_S
        )

    def answer(self, manifest: bytes, nonce: str) -> str:
        return _answer_signature(self._key, manifest, nonce)

    @contextlib.contextmanager
    def open_files(self, version_id: str) -> Iterator[dict[str, BufferedReader] | None]:
        """A version's open files, which stay readable when another version replaces them."""
        with contextlib.ExitStack() as stack:
            with self._lock:
                directory = self._files_of(version_id)
                files = None
                if directory is not None:
                    paths = sorted(directory.iterdir())
                    files = {path.name: stack.enter_context(path.open("rb")) for path in paths}
            yield files

    def _files_of(self, version_id: str) -> Path | None:
        capture = self._captures.get(version_id)
        if capture is None:
            return None
        before, written = self._written.get(version_id, (None, None))
        if before is capture:
            self._written.move_to_end(version_id)
            return written
        self._discard(version_id)
        directory = Path(tempfile.mkdtemp(dir=self._directory))
        try:
            capture.write(directory)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._written[version_id] = capture, directory
        while len(self._written) > CACHED_VERSIONS:
            self._discard(next(iter(self._written)))
        return directory

    def _discard(self, version_id: str) -> None:
        _, directory = self._written.pop(version_id, (None, None))
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = False

    def __init__(self, address: tuple[str, int], server: TransferServer) -> None:
        self.server = server
        self._room = threading.BoundedSemaphore(MAX_TRANSFERS)
        super().__init__(address, _Handler)

    def process_request_thread(self, request: socket | tuple[bytes, socket], client_address: object) -> None:
        with self._room:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]

    def handle_error(self, request: object, client_address: object) -> None:
        log.info("the transfer of a version failed", error=repr(sys.exception()))


class _Handler(BaseHTTPRequestHandler):
    timeout = SILENCE_S
    disable_nagle_algorithm = True  # otherwise the end of a short answer is delayed by 40 ms

    def do_GET(self) -> None:
        assert isinstance(self.server, _Listener)
        server, nonce = self.server.server, self.headers.get(NONCE, "")
        credentials = self.headers.get(EXPIRES, ""), self.headers.get(SIGNATURE, "")
        if not server.allows(self.path, nonce, *credentials):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        with server.open_files(unquote(self.path.removeprefix(PREFIX))) as files:
            if files is None:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            manifest = json.dumps([_describe(name, file) for name, file in files.items()]).encode()
            size_bytes = sum(os.fstat(file.fileno()).st_size for file in files.values())
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(len(manifest) + size_bytes))
            self.send_header(MANIFEST_BYTES, str(len(manifest)))
            self.send_header(SIGNATURE, server.answer(manifest, nonce))
            self.end_headers()
            self.wfile.write(manifest)
            for file in files.values():
                file.seek(0)
                shutil.copyfileobj(file, self.wfile, _CHUNK)

    def log_message(self, format: str, *args: object) -> None:
        """No access log: the client reports errors."""


def fetch(address: str, version_id: str, key: bytes, into: Path, max_bytes: int) -> int:
    """Write a version's files into an empty directory; returns their bytes. Raises VersionUnavailableError, or
    CorruptFilesError if the content differs from what was signed or exceeds `max_bytes`.
    """
    path, nonce = PREFIX + quote(version_id, safe=""), secrets.token_hex(16)
    expires = str(int(time.time()) + SIGNATURE_VALIDITY_S)
    headers = {NONCE: nonce, EXPIRES: expires, SIGNATURE: _request_signature(key, path, nonce, expires)}
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=SILENCE_S)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        if response.status != HTTPStatus.OK:
            raise VersionUnavailableError(f"{address} does not serve version {version_id!r} (status {response.status})")
        return _receive(response, key, nonce, into, max_bytes)
    except (OSError, http.client.HTTPException) as error:
        raise VersionUnavailableError(f"fetching version {version_id!r} from {address} failed: {error!r}") from error
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    size_bytes: int
    sha256: str


def _receive(response: http.client.HTTPResponse, key: bytes, nonce: str, into: Path, max_bytes: int) -> int:
    size = response.headers.get(MANIFEST_BYTES, "")
    if not (size.isascii() and size.isdigit() and len(size) < 9 and int(size) <= MAX_MANIFEST_BYTES):
        raise CorruptFilesError("the answer has no manifest")
    manifest = response.read(int(size))
    if not hmac.compare_digest(_answer_signature(key, manifest, nonce), response.headers.get(SIGNATURE, "")):
        raise CorruptFilesError("the manifest is not signed with our key: another signing secret, or another program")
    files = [_File(**entry) for entry in json.loads(manifest)]
    total_bytes = sum(file.size_bytes for file in files)
    if len(files) > MAX_FILES or total_bytes > max_bytes:
        raise CorruptFilesError(f"{len(files)} files of {total_bytes} bytes are more than the {max_bytes} allowed")
    for file in files:
        if file.name != os.path.basename(file.name) or file.name in ("", ".", ".."):
            raise CorruptFilesError(f"{file.name!r} is not a valid file name")
        _receive_file(response, file, into / file.name)
    return total_bytes


def _receive_file(response: http.client.HTTPResponse, file: _File, path: Path) -> None:
    digest, remaining = hashlib.sha256(), file.size_bytes
    with path.open("xb") as target:
        while remaining and (part := response.read(min(remaining, _CHUNK))):
            digest.update(part)
            target.write(part)
            remaining -= len(part)
    if remaining or digest.hexdigest() != file.sha256:
        raise CorruptFilesError(f"{file.name} was truncated or changed in transfer")


def _describe(name: str, file: BufferedReader) -> dict[str, str | int]:
    size_bytes = os.fstat(file.fileno()).st_size
    return {"name": name, "size_bytes": size_bytes, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _request_signature(key: bytes, path: str, nonce: str, expires: str) -> str:
    return hmac.digest(key, f"fetch\n{path}\n{nonce}\n{expires}".encode(), hashlib.sha256).hex()


def _answer_signature(key: bytes, manifest: bytes, nonce: str) -> str:
    return hmac.digest(key, f"files\n{nonce}\n".encode() + manifest, hashlib.sha256).hex()


@dataclass(frozen=True, slots=True)
class Peering:
    """How other processes reach this one: the shared `key`, the host, a directory for files in transfer, and
    `announce`, which publishes the address.
    """

    key: bytes
    host: str
    directory: Path
    announce: Callable[[str], None]


class VersionTransfer:
    def __init__(self, executors: Executors, base_model: str, peering: Peering) -> None:
        self._executors = executors
        self._base_model = base_model
        self._peering = peering
        self._server: TransferServer | None = None
        self._tried = False
        self.is_wanted = False

    def poll_samplers(self, in_memory: Iterable[str], capture: Callable[[str], Capture]) -> None:
        """Check for samplers; `in_memory` are the versions to offer to the first one."""
        self.is_wanted = bool(self._executors.live(self._base_model))
        if not self.is_wanted or self._tried:
            return
        self._tried = True
        try:
            self._server = TransferServer(self._peering.key, self._peering.host, self._peering.directory)
        except OSError as error:  # samplers use the storage instead
            log.error(
                "versions cannot be transferred directly; peer_host is not an address of this machine", error=error
            )
            return
        for version_id in in_memory:
            self._server.offer(version_id, capture(version_id))
        self._peering.announce(self._server.address)

    def offer(self, version_id: str, capture: Callable[[str], Capture]) -> None:
        """A version was published in memory."""
        if self._server is not None:
            self._server.offer(version_id, capture(version_id))

    def withdraw(self, version_id: str) -> None:
        """Stop serving a version that left memory."""
        if self._server is not None:
            self._server.withdraw(version_id)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


PATIENCE_S = 10.0
"""How long to look for a version that is not yet in an engine or in the storage."""

PAUSE_S = 0.1
"""Pause between two attempts."""

FETCHES_AT_ONCE = 4

MAX_VERSION_BYTES = 64 << 30


@dataclass(frozen=True, slots=True)
class VersionRef:
    """A version's key and its source: a checkpoint, or an ephemeral version of a run."""

    key: str
    sampler: SamplingSession
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class FetchedVersion:
    """Files that may be read until `close` is called, or an error instead."""

    key: str
    path: Path | None
    num_bytes: int
    error: Exception | None
    close: Callable[[], None]


@dataclass(frozen=True, slots=True)
class VersionSources:
    """Where to look for versions; `key` authenticates to the engines' transfer servers."""

    executors: Executors
    samplers: SamplingSessions
    checkpoints: Checkpoints
    versions: Directories
    key: bytes


class VersionFetcher:
    def __init__(self, sources: VersionSources, directory: Path) -> None:
        """`directory` is for files in transfer; files of an earlier process are deleted."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, parents=True)
        self._sources = sources
        self._directory = directory
        self._threads = ThreadPoolExecutor(FETCHES_AT_ONCE, thread_name_prefix="fetch")
        self._finished: deque[FetchedVersion] = deque()
        self._closed = False
        self.num_running = 0

    def begin(self, version: VersionRef) -> None:
        self.num_running += 1
        self._threads.submit(self._fetch, version)

    def collect(self) -> list[FetchedVersion]:
        """Versions that arrived or failed since the last call."""
        fetched = [self._finished.popleft() for _ in range(len(self._finished))]
        self.num_running -= len(fetched)
        return fetched

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        for fetched in self.collect():
            fetched.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _fetch(self, version: VersionRef) -> None:
        stack = ExitStack()
        try:
            path = (
                self._open_checkpoint(version.checkpoint, stack)
                if version.checkpoint
                else self._await_version(version, stack)
            )
            num_bytes = sum(file.stat().st_size for file in path.iterdir())
            self._finished.append(FetchedVersion(version.key, path, num_bytes, None, stack.close))
        except Exception as error:  # noqa: BLE001  reported to the sampler
            stack.close()
            self._finished.append(FetchedVersion(version.key, None, 0, error, stack.close))

    def _open_checkpoint(self, checkpoint: Checkpoint, stack: ExitStack) -> Path:
        return stack.enter_context(self._sources.checkpoints.reading(checkpoint))

    def _await_version(self, version: VersionRef, stack: ExitStack) -> Path:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            if (path := self._fetch_from_owner(version, stack) or self._open_in_storage(version, stack)) is not None:
                return path
            if self._closed or time.monotonic() > deadline:
                raise VersionUnavailableError(f"version {version.key!r} is neither in an engine nor in the storage")
            time.sleep(PAUSE_S)

    def _fetch_from_owner(self, version: VersionRef, stack: ExitStack) -> Path | None:
        model_id = version.sampler.model_id
        try:
            address = model_id and self._sources.executors.owner_address(model_id)
            if not address:
                return None
            into = Path(tempfile.mkdtemp(dir=self._directory))
            stack.callback(shutil.rmtree, into, ignore_errors=True)
            fetch(address, version.key, self._sources.key, into, MAX_VERSION_BYTES)
        except (VersionUnavailableError, CorruptFilesError, SQLAlchemyError) as error:
            log.info("a version could not be fetched from its engine", version_id=version.key, error=str(error))
            return None
        return into

    def _open_in_storage(self, version: VersionRef, stack: ExitStack) -> Path | None:
        try:
            name = self._sources.samplers.directory_of(version.key)
            return None if name is None else stack.enter_context(self._sources.versions.reading(name))
        except (CorruptFilesError, OSError, SQLAlchemyError) as error:
            log.warning("a version could not be read from the storage", version_id=version.key, error=str(error))
            return None
