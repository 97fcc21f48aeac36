"""Requests as bytes on a socket, so that nothing between a test and the server repairs what is broken on purpose."""

from __future__ import annotations

import http.client
import io
import socket
import time
from dataclasses import dataclass, field

MAX_BYTES = 16 << 20
PIECE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Request:
    """`label` is the route by the OpenAPI document's words: "POST /api/v1/asample"."""

    label: str
    method: str
    target: str  # path and query, as sent
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes = b""
    framing: str = "length"  # length | chunked | none: the given headers declare the length
    halts: bool = False  # the client closes its sending half

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key.lower() == name.lower()), b"")

    def with_header(self, name: bytes, value: bytes) -> tuple[tuple[bytes, bytes], ...]:
        """The headers with one of them replaced, or added."""
        return (*(header for header in self.headers if header[0].lower() != name.lower()), (name, value))

    def head(self) -> bytes:
        lines = [f"{self.method} {self.target} HTTP/1.1".encode("latin-1", "replace")]
        lines += [name + b": " + value for name, value in self.headers]
        if self.framing == "length" and (self.body or self.method in ("POST", "PUT")):
            lines.append(b"Content-Length: %d" % len(self.body))
        if self.framing == "chunked":
            lines.append(b"Transfer-Encoding: chunked")
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def wire(self) -> bytes:
        if self.framing != "chunked":
            return self.head() + self.body
        parts = [self.body[start : start + 1000] for start in range(0, len(self.body), 1000)]
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
        return self.head() + chunks + b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """`status` 0 means that the server closed the connection without an answer."""

    status: int
    body: bytes
    seconds: float
    headers: list[tuple[str, str]] = field(default_factory=list)


class _Read(io.BytesIO):
    """Bytes read from a socket, in the form that http.client expects."""

    def makefile(self, _mode: str) -> io.BytesIO:
        return self


def send(address: tuple[str, int], request: Request, timeout_s: float) -> Answer:
    """Raises TimeoutError if the whole answer takes longer."""
    started = time.monotonic()
    until = started + timeout_s
    received: list[bytes] = []
    with socket.create_connection(address, timeout=timeout_s) as connection:
        try:
            connection.sendall(request.wire())
            if request.halts:
                connection.shutdown(socket.SHUT_WR)
        except TimeoutError:
            raise
        except OSError:
            pass  # closed by the server before the whole request was sent; the answer may have arrived
        size = 0
        while size < MAX_BYTES:
            connection.settimeout(max(0.01, until - time.monotonic()))
            try:
                chunk = connection.recv(PIECE_BYTES)
            except ConnectionResetError:
                break
            if not chunk:
                break
            received.append(chunk)
            size += len(chunk)
    return _parse_answer(b"".join(received), request.method, time.monotonic() - started)


def _parse_answer(received: bytes, method: str, seconds: float) -> Answer:
    while received.startswith(b"HTTP/1.1 100"):
        received = received.partition(b"\r\n\r\n")[2]
    if not received:
        return Answer(0, b"", seconds)
    response = http.client.HTTPResponse(_Read(received), method=method)  # type: ignore[arg-type]
    response.begin()
    try:
        body = response.read()
    except http.client.IncompleteRead as error:
        body = error.partial
    return Answer(response.status, body, seconds, response.getheaders())
