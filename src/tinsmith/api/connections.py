"""Limits unauthenticated connections: the protocol of one HTTP connection, with bounds on size and time.

The protocol bounds the size of a request's head and of chunk framing, the time for receiving a head, and the idle time
of a client that sends or receives. It drops trailers, because a proxy validates only the head, and refuses WebSockets.
uvicorn does everything else. This module knows no paths and no keys.
"""

from __future__ import annotations

import asyncio
import json
import math

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together; the SDK's have about 1 KiB."""

MAX_FRAMING = 8
"""Bytes of framing per byte of a chunked body. Chunks of one byte have five."""

HEAD_TIMEOUT_S = 20.0
"""Seconds from the first byte of a head (or the start of the connection) to its last byte."""

IDLE_TIMEOUT_S = 60.0
"""Idle timeout: seconds without a byte from a client that sends a body, or to a client that receives a response."""

LINGER_S = 300.0
"""Seconds for reading the rest of a body after an early response, such as a 401 or a 415. Many clients send the whole
body before they read the response.
"""


class _HeadTooLargeError(Exception):
    """Stops the parser."""


class Connection(HttpToolsProtocol):
    """One connection. It numbers its requests, since one segment may contain parts of several requests."""

    _request_number = 0
    _in_head = True  # or between requests
    _head_bytes = 0  # of the parsed request line and headers
    _body_bytes = 0
    _other_bytes = 0  # received bytes that are not part of a body
    _read_deadline = math.inf  # deadline on the loop's clock
    _receive_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_receive_timer(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_receive_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        request_number, body_bytes = self._request_number, self._body_bytes
        super().data_received(data)
        if self._request_number != request_number or self.transport.is_closing():
            return
        self._other_bytes += len(data) - (self._body_bytes - body_bytes)
        if self._other_bytes > MAX_HEAD_BYTES + MAX_FRAMING * self._body_bytes:
            self._head_bytes = MAX_HEAD_BYTES + 1
            self.send_400_response("")
        elif self._receive_timer is None:
            self._start_head_timer_if_idle()
        elif not self._in_head:
            self._start_receive_timer(IDLE_TIMEOUT_S)

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._request_number += 1
        self._in_head = True
        self._read_deadline = math.inf
        self._head_bytes = self._body_bytes = self._other_bytes = 0
        self._start_receive_timer(HEAD_TIMEOUT_S)

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _HeadTooLargeError
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Written without helper calls, since a request has about twenty headers.
        self._head_bytes += len(name) + len(value) + 4  # the separator and the line end
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _HeadTooLargeError
        if self._in_head:
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._start_receive_timer(IDLE_TIMEOUT_S)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._stop_receive_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_head:
            self._read_deadline = self.loop.time() + LINGER_S

    def send_400_response(self, msg: str) -> None:
        """Refuse a malformed request with the usual error body. uvicorn calls this when its parser fails."""
        self._stop_receive_timer()
        status, detail = 400, "malformed HTTP/1.1 request"
        if self._head_bytes > MAX_HEAD_BYTES:
            status, detail = 431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes; send shorter headers"
        content = json.dumps({"detail": detail}).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(content)
        self.transport.write(STATUS_LINE[status] + head + content)
        self.transport.close()

    # Timeouts.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer = self.loop.call_later(IDLE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._send_timer:
            self._send_timer.cancel()
            self._send_timer = None
        super().resume_writing()

    def _start_receive_timer(self, seconds: float) -> None:
        self._stop_receive_timer()
        self._receive_timer = self.loop.call_at(min(self.loop.time() + seconds, self._read_deadline), self._on_timeout)

    def _start_head_timer_if_idle(self) -> None:
        # Empty lines before a head start no request, but they end uvicorn's keep-alive timeout.
        if self.timeout_keep_alive_task is None and (self.cycle is None or self.cycle.response_complete):
            self._start_receive_timer(HEAD_TIMEOUT_S)

    def _stop_receive_timer(self) -> None:
        if self._receive_timer:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _on_timeout(self) -> None:
        if self.flow.read_paused:  # the server, not the client, has paused
            self._start_receive_timer(IDLE_TIMEOUT_S)
        else:
            self.transport.abort()
