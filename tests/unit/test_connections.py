"""Limits of unauthenticated connections: size of the head, and time."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from tinsmith.api import connections
from tinsmith.api.connections import LINGER_S, MAX_HEAD_BYTES, Connection

HEAD_S, SILENCE_S, LITTLE_S = 0.3, 0.4, 0.05
LONG_S = 10.0  # for slow machines; nothing here takes as long
BIG = 4 << 20


async def app(scope: dict, receive, send) -> None:
    """`/read` answers with the length of its body and its header fields, `/big` with much, others do not read."""
    if scope["type"] != "http":
        return
    content = b"no"
    if scope["path"] == "/read":
        size, has_more = 0, True
        while has_more:
            message = await receive()
            size, has_more = size + len(message.get("body", b"")), message.get("more_body", False)
        content = b"%d %s" % (size, b" ".join(name for name, _ in scope["headers"]))
    if scope["path"] == "/big":
        content = bytes(BIG)
    if scope["path"] == "/slow":
        await asyncio.sleep(2 * max(HEAD_S, SILENCE_S))
    headers = [(b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A server in this process with short timeouts of connections."""
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", HEAD_S)
    monkeypatch.setattr(connections, "IDLE_TIMEOUT_S", SILENCE_S)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=Connection, ws="none", lifespan="off", log_level="critical", timeout_keep_alive=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.fixture
def client(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=LONG_S) as connected:
        yield connected


def read_all(client: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    parts: list[bytes] = []
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def read_answer(client: socket.socket) -> bytes:
    """Read one answer, whose head and body may come apart; return its body."""
    with contextlib.closing(http.client.HTTPResponse(client)) as answer:
        answer.begin()
        return answer.read()


def drip(client: socket.socket, chunk: bytes, seconds: float) -> bool:
    """Send one piece after another; return whether the server accepted all."""
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            client.sendall(chunk)
            time.sleep(LITTLE_S)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


@pytest.mark.parametrize(
    "start", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n", b"\r\n"], ids=["nothing", "half", "empty line"]
)
def test_a_head_that_does_not_come_ends_the_connection(client: socket.socket, start: bytes) -> None:
    client.sendall(start)
    began = time.monotonic()
    assert read_all(client) == b""
    assert time.monotonic() - began < LONG_S / 2


@pytest.mark.parametrize("chunk", [b"X: y\r\n", b"\r\n"], ids=["fields", "empty lines"])
@pytest.mark.parametrize("before", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["first", "second"])
def test_a_head_that_comes_by_the_drop_ends_the_connection(client: socket.socket, before: bytes, chunk: bytes) -> None:
    if before:
        client.sendall(before)
        assert read_answer(client) == b"no"
    assert not drip(client, (b"GET / HTTP/1.1\r\n" if chunk != b"\r\n" else b"") + chunk, 8 * HEAD_S)


def test_a_body_that_stops_coming_ends_the_connection(client: socket.socket) -> None:
    client.sendall(b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc")
    assert read_all(client) == b""


def test_a_body_that_comes_slowly_is_read(client: socket.socket) -> None:
    client.sendall(b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n")
    for _ in range(20):
        client.sendall(b"x")
        time.sleep(LITTLE_S)
    assert read_answer(client).startswith(b"20 ")


def test_an_answer_may_take_its_time(client: socket.socket) -> None:
    client.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
    assert read_answer(client) == b"no"


def test_the_rest_of_a_body_that_was_answered_early_is_taken_in_and_not_for_ever(
    client: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LINGER_S >= 60, "a client that sends a large body in good faith reads the answer only afterwards"
    monkeypatch.setattr(connections, "LINGER_S", 3 * SILENCE_S)
    client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
    assert read_answer(client) == b"no"
    assert drip(client, b"x", 2 * SILENCE_S)
    assert not drip(client, b"x", 8 * SILENCE_S)


def test_a_client_that_does_not_read_its_answer_is_left(address: tuple[str, int]) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(LONG_S)
        client.connect(address)
        client.sendall(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n" * 4)
        time.sleep(3 * SILENCE_S)
        assert len(read_all(client)) < BIG


def test_a_client_that_reads_slowly_gets_everything(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=LONG_S) as client:
        client.sendall(b"GET /big HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        time.sleep(SILENCE_S / 2)
        assert len(read_all(client)) > BIG


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: yyyy\r\n" * (MAX_HEAD_BYTES // 5) + b"\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * (3 * MAX_HEAD_BYTES),
    ],
    ids=["line", "field", "fields", "a field without end"],
)
def test_a_large_head_is_refused(client: socket.socket, head: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        client.sendall(head)
        client.sendall(b"x" * 10 * MAX_HEAD_BYTES)
    assert read_all(client)[:13] in (b"HTTP/1.1 431 ", b"")  # the kernel may drop it when more has come


def test_a_head_within_the_limit_is_read(client: socket.socket) -> None:
    client.sendall(b"GET /read HTTP/1.1\r\nX: " + b"x" * (MAX_HEAD_BYTES - 100) + b"\r\n\r\n")
    assert read_answer(client).endswith(b"0 x")


CHUNKED = b"POST /read HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_chunks_of_one_byte_are_read(client: socket.socket) -> None:
    client.sendall(CHUNKED + b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n")
    assert read_answer(client).startswith(b"50000 ")


@pytest.mark.parametrize("framing", [b"1;", b"1\r\nx\r\n0\r\nX: "], ids=["extension", "trailer"])
def test_framing_without_end_is_refused(client: socket.socket, framing: bytes) -> None:
    """Chunk extensions and trailer fields are not part of the body, so the body limit does not cover them."""
    client.sendall(CHUNKED)
    sent_bytes = 0
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        client.sendall(framing)
        while sent_bytes < 64 * MAX_HEAD_BYTES:
            client.sendall(b"x" * 10_000)
            sent_bytes += 10_000
            time.sleep(0.001)
    assert sent_bytes < 64 * MAX_HEAD_BYTES


def test_a_field_behind_the_body_is_no_header(client: socket.socket) -> None:
    client.sendall(CHUNKED + b"1\r\nx\r\n0\r\nX-API-Key: tml-late\r\n\r\n")
    assert read_answer(client).endswith(b"1 host transfer-encoding")
