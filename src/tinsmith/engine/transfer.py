"""Versions over the network: an engine hands what it published to samplers, before any file of it is durable.

`Outbox` is the giving end: a small HTTP listener on threads of its own, which asks nothing of the engine's thread. It
has the captures of the versions that live in the engine's memory, writes one out when somebody asks for it, and keeps
the files of the last few. `fetch` is the taking end. Both prove to each other that they know one key, derived from the
signing secret: the request is signed with a nonce, and the answer's manifest, which holds every file's SHA-256, with
the same nonce. So nobody else can ask, and what somebody else answers is not believed. Nothing is encrypted: this is
for one machine, or a private network. Knows no SQL and no device; a version that is not here may be in the storage.
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
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedReader
from pathlib import Path
from socket import socket
from urllib.parse import quote, unquote

import structlog

from tinsmith.backends import Capture
from tinsmith.errors import CorruptFilesError
from tinsmith.runtime.background import kept_thread

PREFIX = "/versions/"
NONCE, EXPIRES, SIGNATURE, MANIFEST_BYTES = "X-Nonce", "X-Expires", "X-Signature", "X-Manifest-Bytes"

SIGNED_FOR_S = 300
"""How long a request is good for: as much as the clocks of two machines may differ."""

SILENCE_S = 10.0
"""A peer that neither reads nor writes for this long is given up."""

MOST_AT_ONCE = 8
"""Transfers that run at a time; more wait."""

MOST_MANIFEST_BYTES = 1 << 20
MOST_FILES = 64

KEPT_FILES = 4
"""Versions whose files are kept for the next sampler that asks."""

CLOSING_S = 0.1
"""How soon the listener notices that it is to close."""

_CHUNK = 1 << 20

log = structlog.get_logger()


class NotHereError(Exception):
    """The peer cannot be reached, or has no such version."""


class Outbox:
    """What this engine gives away, and the listener that does; closed with the engine."""

    def __init__(self, key: bytes, host: str, directory: Path) -> None:
        """`directory` is for files on their way; what an earlier process left there is deleted."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, parents=True)
        self._key = key
        self._directory = directory
        self._captures: dict[str, Capture] = {}
        self._lock = threading.Lock()  # of the files only: the engine's thread never waits for one to be written
        self._written: OrderedDict[str, tuple[Capture, Path]] = OrderedDict()
        self._listener = _Listener((host, 0), self)
        self.address = f"{host}:{self._listener.server_address[1]}"
        self._closing = threading.Event()
        serve = partial(self._listener.serve_forever, CLOSING_S)
        self._thread = kept_thread("outbox", serve, self._closing.wait)

    def offer(self, version_id: str, capture: Capture) -> None:
        """From the engine's thread: whoever asks for this version gets it; the newest, if it is offered again."""
        self._captures[version_id] = capture

    def withdraw(self, version_id: str) -> None:
        """It left memory, or is no more."""
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
        return expires.isascii() and expires.isdigit() and time.time() < int(expires) <= time.time() + 2 * SIGNED_FOR_S

    def answer(self, manifest: bytes, nonce: str) -> str:
        return _answer_signature(self._key, manifest, nonce)

    @contextlib.contextmanager
    def opened(self, version_id: str) -> Iterator[dict[str, BufferedReader] | None]:
        """A version's files, open: they stay readable when another version takes their place."""
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
        while len(self._written) > KEPT_FILES:
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

    def __init__(self, address: tuple[str, int], outbox: Outbox) -> None:
        self.outbox = outbox
        self._room = threading.BoundedSemaphore(MOST_AT_ONCE)
        super().__init__(address, _Handler)

    def process_request_thread(self, request: socket | tuple[bytes, socket], client_address: object) -> None:
        with self._room:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]

    def handle_error(self, request: object, client_address: object) -> None:
        log.info("a transfer of a version broke off", error=repr(sys.exception()))


class _Handler(BaseHTTPRequestHandler):
    timeout = SILENCE_S
    disable_nagle_algorithm = True  # the end of a short answer would wait 40 ms

    def do_GET(self) -> None:
        assert isinstance(self.server, _Listener)
        outbox, nonce = self.server.outbox, self.headers.get(NONCE, "")
        given = self.headers.get(EXPIRES, ""), self.headers.get(SIGNATURE, "")
        if not outbox.allows(self.path, nonce, *given):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        with outbox.opened(unquote(self.path.removeprefix(PREFIX))) as files:
            if files is None:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            manifest = json.dumps([_facts(name, file) for name, file in files.items()]).encode()
            size_bytes = sum(os.fstat(file.fileno()).st_size for file in files.values())
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(len(manifest) + size_bytes))
            self.send_header(MANIFEST_BYTES, str(len(manifest)))
            self.send_header(SIGNATURE, outbox.answer(manifest, nonce))
            self.end_headers()
            self.wfile.write(manifest)
            for file in files.values():
                file.seek(0)
                shutil.copyfileobj(file, self.wfile, _CHUNK)

    def log_message(self, format: str, *args: object) -> None:
        """Quietly: what goes wrong is told to whoever asked."""


def fetch(address: str, version_id: str, key: bytes, into: Path, most_bytes: int) -> int:
    """Write a version's files into an empty directory; returns their bytes. Raises NotHereError; CorruptFilesError if
    what came is not what was signed, or more than `most_bytes`.
    """
    path, nonce = PREFIX + quote(version_id, safe=""), secrets.token_hex(16)
    expires = str(int(time.time()) + SIGNED_FOR_S)
    headers = {NONCE: nonce, EXPIRES: expires, SIGNATURE: _request_signature(key, path, nonce, expires)}
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=SILENCE_S)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        if response.status != HTTPStatus.OK:
            raise NotHereError(f"{address} has no version {version_id!r} for us (status {response.status})")
        return _receive(response, key, nonce, into, most_bytes)
    except (OSError, http.client.HTTPException) as error:
        raise NotHereError(f"{address} could not give version {version_id!r}: {error!r}") from error
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    size_bytes: int
    sha256: str


def _receive(response: http.client.HTTPResponse, key: bytes, nonce: str, into: Path, most_bytes: int) -> int:
    told = response.headers.get(MANIFEST_BYTES, "")
    if not (told.isascii() and told.isdigit() and len(told) < 9 and int(told) <= MOST_MANIFEST_BYTES):
        raise CorruptFilesError("the answer has no manifest")
    manifest = response.read(int(told))
    if not hmac.compare_digest(_answer_signature(key, manifest, nonce), response.headers.get(SIGNATURE, "")):
        raise CorruptFilesError("the manifest is not signed with our key: another signing secret, or another program")
    files = [_File(**facts) for facts in json.loads(manifest)]
    total_bytes = sum(file.size_bytes for file in files)
    if len(files) > MOST_FILES or total_bytes > most_bytes:
        raise CorruptFilesError(f"{len(files)} files of {total_bytes} bytes are more than the {most_bytes} allowed")
    for file in files:
        if file.name != os.path.basename(file.name) or file.name in ("", ".", ".."):
            raise CorruptFilesError(f"{file.name!r} is no name of a file")
        _receive_file(response, file, into / file.name)
    return total_bytes


def _receive_file(response: http.client.HTTPResponse, file: _File, path: Path) -> None:
    digest, left = hashlib.sha256(), file.size_bytes
    with path.open("xb") as target:
        while left and (part := response.read(min(left, _CHUNK))):
            digest.update(part)
            target.write(part)
            left -= len(part)
    if left or digest.hexdigest() != file.sha256:
        raise CorruptFilesError(f"{file.name} was cut short or changed on its way")


def _facts(name: str, file: BufferedReader) -> dict[str, str | int]:
    size_bytes = os.fstat(file.fileno()).st_size
    return {"name": name, "size_bytes": size_bytes, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _request_signature(key: bytes, path: str, nonce: str, expires: str) -> str:
    return hmac.digest(key, f"fetch\n{path}\n{nonce}\n{expires}".encode(), hashlib.sha256).hex()


def _answer_signature(key: bytes, manifest: bytes, nonce: str) -> str:
    return hmac.digest(key, f"files\n{nonce}\n".encode() + manifest, hashlib.sha256).hex()
