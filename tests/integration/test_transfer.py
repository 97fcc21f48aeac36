"""Versions from an engine to a sampler: complete, only to who knows the key, never from an impostor."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tinsmith.backends import Capture
from tinsmith.engine import transfer
from tinsmith.engine.transfer import KEPT_FILES, NotHereError, TransferServer, fetch
from tinsmith.errors import CorruptFilesError

KEY = b"k" * 32
MOST = 1 << 20


def capture(text: str, written: list[str] | None = None) -> Capture:
    def write(directory: Path) -> None:
        (directory / "adapter.safetensors").write_text(text * 1000)
        (directory / "adapter_config.json").write_text("{}")
        if written is not None:
            written.append(text)

    return Capture(len(text), write)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TransferServer]:
    server = TransferServer(KEY, "127.0.0.1", tmp_path / "outbox")
    yield server
    server.close()


def take_files(
    server: TransferServer, version_id: str, into: Path, key: bytes = KEY, max_bytes: int = MOST
) -> dict[str, str]:
    into.mkdir(parents=True)
    num_bytes = fetch(server.address, version_id, key, into, max_bytes)
    files = {path.name: path.read_text() for path in into.iterdir()}
    assert num_bytes == sum(map(len, files.values()))
    return files


def test_a_version_arrives_as_it_was_offered(server: TransferServer, tmp_path: Path) -> None:
    version_id = "session:1:sample:7/with a slash"
    server.offer(version_id, capture("first"))
    assert take_files(server, version_id, tmp_path / "a") == {
        "adapter.safetensors": "first" * 1000,
        "adapter_config.json": "{}",
    }


def test_it_is_written_once_for_all_samplers_and_again_once_replaced(server: TransferServer, tmp_path: Path) -> None:
    written: list[str] = []
    server.offer("v", capture("old", written))
    take_files(server, "v", tmp_path / "a")
    take_files(server, "v", tmp_path / "b")
    assert written == ["old"]
    server.offer("v", capture("new", written))
    assert take_files(server, "v", tmp_path / "c")["adapter.safetensors"].startswith("new")
    assert written == ["old", "new"]


def test_the_files_of_only_a_few_versions_are_kept(server: TransferServer, tmp_path: Path) -> None:
    for index in range(KEPT_FILES + 3):
        server.offer(f"v{index}", capture("x"))
        take_files(server, f"v{index}", tmp_path / f"{index}")
    assert len(list((tmp_path / "outbox").iterdir())) == KEPT_FILES
    assert take_files(server, "v0", tmp_path / "again")["adapter.safetensors"] == "x" * 1000


def test_withdrawn_and_unknown_versions_are_not_found(server: TransferServer, tmp_path: Path) -> None:
    server.offer("v", capture("x"))
    server.withdraw("v")
    for version_id in ("v", "never", "../../etc"):
        with pytest.raises(NotHereError, match="404"):
            take_files(server, version_id, tmp_path / version_id.replace("/", "-"))


def test_a_transfer_needs_the_key(server: TransferServer, tmp_path: Path) -> None:
    server.offer("v", capture("x"))
    with pytest.raises(NotHereError, match="403"):
        take_files(server, "v", tmp_path / "a", key=b"other" * 8)
    host, _, port = server.address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.request("GET", "/versions/v")
    assert connection.getresponse().status == 403
    connection.close()


def test_a_signature_is_good_for_one_version_and_for_a_while(server: TransferServer) -> None:
    path, nonce = "/versions/v", "n" * 32

    def allows(path: str, expires: str, signature: str) -> bool:
        return server.allows(path, nonce, expires, signature)

    def sign(expires: int) -> tuple[str, str]:
        return str(expires), transfer._request_signature(KEY, path, nonce, str(expires))

    now_s = int(time.time())
    assert allows(path, *sign(now_s + 60))
    assert not allows("/versions/w", *sign(now_s + 60))
    assert not allows(path, *sign(now_s - 1))
    assert not allows(path, *sign(now_s + 10**6))


def test_more_than_is_allowed_is_refused(server: TransferServer, tmp_path: Path) -> None:
    server.offer("v", capture("x" * 10))
    with pytest.raises(CorruptFilesError, match="more than the 100 allowed"):
        take_files(server, "v", tmp_path / "a", max_bytes=100)


def test_a_missing_peer_is_reported(tmp_path: Path) -> None:
    with socket.socket() as taken_port:
        taken_port.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken_port.getsockname()[1]}"
    with pytest.raises(NotHereError, match="fetching version"):
        fetch(address, "v", KEY, tmp_path, MOST)


def test_a_version_that_cannot_be_written_fails_this_transfer_only(server: TransferServer, tmp_path: Path) -> None:
    def full(_directory: Path) -> None:
        raise OSError("no space")

    server.offer("bad", Capture(1, full))
    server.offer("good", capture("x"))
    with pytest.raises(NotHereError):
        take_files(server, "bad", tmp_path / "a")
    assert take_files(server, "good", tmp_path / "b")


class _Impostor(BaseHTTPRequestHandler):
    """Answers with what the test says: a manifest, the key that signs it, and a body."""

    def __init__(self, key: bytes, manifest: object, body: bytes, *args: object) -> None:
        self.key, self.manifest, self.answer = key, json.dumps(manifest).encode(), body
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.manifest) + len(self.answer)))
        self.send_header(transfer.MANIFEST_BYTES, str(len(self.manifest)))
        nonce = self.headers[transfer.NONCE]
        self.send_header(transfer.SIGNATURE, transfer._answer_signature(self.key, self.manifest, nonce))
        self.end_headers()
        self.wfile.write(self.manifest + self.answer)

    def log_message(self, *_args: object) -> None:
        pass


DIGEST = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"  # of b"x"
FILE = {"name": "weights", "size_bytes": 1, "sha256": DIGEST}


@pytest.mark.parametrize(
    ("key", "manifest", "body", "message"),
    [
        (b"other" * 8, [FILE], b"x", "not signed with our key"),
        (KEY, [FILE], b"y", "truncated or changed"),
        (KEY, [FILE], b"", "truncated or changed"),
        (KEY, [FILE | {"name": "../weights"}], b"x", "not a valid file name"),
        (KEY, [FILE | {"name": ""}], b"x", "not a valid file name"),
        (KEY, [FILE | {"name": f"{index}"} for index in range(100)], b"x" * 100, "more than"),
    ],
)
def test_an_impostors_answer_is_rejected(key, manifest, body, message, tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), partial(_Impostor, key, manifest, body))
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    into = tmp_path / "into"
    into.mkdir()
    try:
        with pytest.raises(CorruptFilesError, match=message):
            fetch(f"127.0.0.1:{server.server_port}", "v", KEY, into, MOST)
    finally:
        thread.join()
        server.server_close()
    assert not (tmp_path / "weights").exists()


def test_the_same_answer_without_a_fault_is_taken(tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), partial(_Impostor, KEY, [FILE], b"x"))
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    assert fetch(f"127.0.0.1:{server.server_port}", "v", KEY, tmp_path, MOST) == 1
    thread.join()
    server.server_close()
    assert (tmp_path / "weights").read_bytes() == b"x"
