"""Messages between the coordinator, a worker and the worker's children: length-prefixed msgpack.

A frame is its length in four bytes (big-endian), then that many bytes of msgpack, at most `MAX_FRAME_BYTES`. Between
a worker and its child, frames travel over two pipes (`pack`, `read_frames`). Between the coordinator and a worker
they travel over a Unix socket, or over TCP if the two run on different machines (`RpcServer`, `RpcClient`). An
address is the path of a socket or `tcp://HOST:PORT`.

The first frame of a connection holds the token. Then the connection carries one call at a time. The client sends
`{"call": name, ...}`. The server replies with any number of frames `[MESSAGE, value]`, then with `[DONE, value]` or
`[REFUSED, {"status", "error"}]`; statuses are HTTP's. After the first message of a reply, a client may send a file.

Invariants:
- The server checks the token before it reads anything else, and bounds the connections that have not sent one in number
  (`MAX_UNAUTHENTICATED`) and time (`TOKEN_S`).
- Memory grows with the bytes that have arrived, not with an announced length.
- Every connection is closed on every path. A peer that disappears, also within a frame, gives one ConnectionLostError.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hmac
import inspect
import logging
import os
import struct
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from decimal import Decimal
from typing import IO, Any

import msgpack

Message = dict[str, Any]

MESSAGE, DONE, REFUSED = range(3)
LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 30
MAX_TOKEN_BYTES = 1024
CHUNK_BYTES = 1 << 20
TOKEN_S = 10.0
READ_S = 60.0
"""Longest pause within a frame."""
CLOSE_S = 1.0
"""Time to flush a connection that is being closed."""
MAX_UNAUTHENTICATED = 32
"""Connections without a token. A new one replaces the oldest."""
MAX_CONNECTIONS = 128
BIG_INTEGER = 1
DURATION = BIG_INTEGER + 1
TEXT_TYPES: dict[int, tuple[type, Callable[[Any], str], Callable[[str], object]]] = {
    BIG_INTEGER + 2: (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    BIG_INTEGER + 3: (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    BIG_INTEGER + 4: (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    BIG_INTEGER + 5: (Decimal, str, Decimal),
}
"""Types that are sent as texts, by the code of their extension."""
"""The msgpack extension for integers beyond 64 bits: their decimal digits."""

log = logging.getLogger(__name__)  # a worker's standard output is not for logs


class CallRefusedError(Exception):
    """The server refused a call; `status` is the HTTP status for the reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ConnectionLostError(Exception):
    """The peer cannot be reached, closed the connection, or sent nothing for too long."""


class FrameError(ConnectionLostError):
    """A frame that is too long or not msgpack. The rest of its stream cannot be read."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def pack(message: object) -> bytes:
    """A frame. Raises TypeError for a type that msgpack lacks, ValueError for a frame that is too long."""
    body = msgpack.packb(message, default=_pack_extension, unicode_errors="surrogatepass")
    assert body is not None
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"the message has {len(body)} bytes; the maximum is {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Any:  # noqa: ANN401
    """The message in a frame without its length. Raises FrameError."""
    try:
        return msgpack.unpackb(body, ext_hook=_unpack_extension, strict_map_key=False, unicode_errors="surrogatepass")
    except ValueError as error:
        raise FrameError(400, f"the frame is not msgpack: {error}") from None


def _length(head: bytes) -> int:
    (size,) = LENGTH.unpack(head)
    if size > MAX_FRAME_BYTES:
        raise FrameError(413, f"the frame has {size} bytes; the maximum is {MAX_FRAME_BYTES}")
    return size


def read_frames(source: IO[bytes]) -> Iterator[Message]:
    """The messages on a pipe, to its end. An incomplete frame, left by a sender that died, is dropped.

    Raises FrameError."""
    while len(head := source.read(LENGTH.size)) == LENGTH.size:
        size = _length(head)
        body = source.read(size)
        if len(body) < size:
            return
        yield unpack(body)


def _pack_extension(value: object) -> msgpack.ExtType:
    if isinstance(value, int):  # beyond 64 bits
        return msgpack.ExtType(BIG_INTEGER, str(value).encode())
    if isinstance(value, datetime.timedelta):
        return msgpack.ExtType(DURATION, str(value // datetime.timedelta(microseconds=1)).encode())
    for code, (kind, encode, _) in TEXT_TYPES.items():
        if type(value) is kind:
            return msgpack.ExtType(code, encode(value).encode())
    raise TypeError(f"a {type(value).__name__} cannot be sent; use the types of JSON, bytes, dates, times or decimals")


def _unpack_extension(code: int, data: bytes) -> object:
    text = data.decode()
    if code == BIG_INTEGER:
        return int(text)
    if code == DURATION:
        return datetime.timedelta(microseconds=int(text))
    if code not in TEXT_TYPES:
        raise ValueError(f"extension type {code} is unknown")
    return TEXT_TYPES[code][2](text)


async def read_chunks(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    """`size` bytes in chunks as they arrive. Raises ConnectionLostError."""
    while size:
        try:
            async with asyncio.timeout(READ_S):
                chunk = await reader.read(min(size, CHUNK_BYTES))
        except TimeoutError:
            raise ConnectionLostError(f"nothing arrived for {READ_S:g} s within a frame") from None
        if not chunk:
            raise ConnectionLostError(f"the connection ended {size} bytes before the end of a frame")
        size -= len(chunk)
        yield chunk


async def read_body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    """The rest of a frame. Raises ConnectionLostError, FrameError."""
    return b"".join([chunk async for chunk in read_chunks(reader, _length(head))])


async def close(writer: asyncio.StreamWriter) -> None:
    """Flush and close a connection; abort it if the peer does not take the rest."""
    writer.close()
    try:
        async with asyncio.timeout(CLOSE_S):
            await writer.wait_closed()
    except OSError:  # with TimeoutError; the peer may have reset the connection
        writer.transport.abort()


Handler = Callable[[Message, asyncio.StreamReader], Awaitable[Message] | AsyncGenerator[Message, None]]
"""Handles a request by one result or by a stream of messages. Raises CallRefusedError."""


class RpcServer:
    """Handles calls on any number of connections."""

    def __init__(self, token: str, handlers: Mapping[str, Handler]) -> None:
        self._token = token
        self._handlers = handlers
        self._unauthenticated: OrderedDict[asyncio.StreamWriter, None] = OrderedDict()
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None
        self.num_active_calls = 0

    async def listen(self, path: str | None, host: str = "127.0.0.1") -> str:
        """Listen on a Unix socket at `path`, which only its owner may use, or on a TCP port; returns the address."""
        if path is not None:
            self._server = await asyncio.start_unix_server(self._accept, path, limit=CHUNK_BYTES, backlog=128)
            os.chmod(path, 0o600)
            return path
        self._server = await asyncio.start_server(self._accept, host, 0, limit=CHUNK_BYTES, backlog=128)
        return f"tcp://{host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._server is not None:
            self._server.close()
        connections = dict(self._connections)
        for task, writer in connections.items():
            task.cancel()
            writer.transport.abort()  # the task may never have started
        await asyncio.gather(*connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections[task] = writer
        task.add_done_callback(self._connections.pop)
        self._unauthenticated[writer] = None
        excess = len(self._unauthenticated) - MAX_UNAUTHENTICATED
        if len(self._connections) > MAX_CONNECTIONS:
            excess = max(excess, 1)
        for oldest in list(self._unauthenticated)[: max(excess, 0)]:
            oldest.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._authenticate(reader, writer)
            while (request := await self._request(reader)) is not None:
                self.num_active_calls += 1
                try:
                    async with contextlib.aclosing(self._reply(request, reader)) as frames:
                        async for frame in frames:
                            writer.write(frame)
                            await writer.drain()
                finally:
                    self.num_active_calls -= 1
        except (CallRefusedError, FrameError) as error:  # the start of the next request is unknown: the connection ends
            writer.write(_refusal(error.status, str(error)))
        except (ConnectionLostError, OSError) as error:
            log.debug("a connection was lost: %s", error)
        except Exception:
            log.exception("a connection failed")
        finally:
            self._unauthenticated.pop(writer, None)
            await close(writer)

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Check the token of a new connection. Raises CallRefusedError, ConnectionLostError."""
        try:
            async with asyncio.timeout(TOKEN_S):
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                token_frame = await reader.readexactly(size) if size <= MAX_TOKEN_BYTES else b""
        except (TimeoutError, asyncio.IncompleteReadError):
            raise ConnectionLostError(f"no token arrived within {TOKEN_S:g} s") from None
        if not hmac.compare_digest(token_frame, pack({"token": self._token})[LENGTH.size :]):
            raise CallRefusedError(409, "the token is not the one of this worker's coordinator")
        del self._unauthenticated[writer]

    async def _request(self, reader: asyncio.StreamReader) -> Message | None:
        """The next request, however late; None at the end of the connection."""
        try:
            head = await reader.readexactly(LENGTH.size)
        except asyncio.IncompleteReadError:
            return None
        request = unpack(await read_body(reader, head))
        if not isinstance(request, dict) or not isinstance(request.get("call"), str):
            raise CallRefusedError(400, "a request must be a map with a 'call'")
        return request

    async def _reply(self, request: Message, reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
        """The frames of a reply. An exception of the handler refuses the call, except for a lost connection."""
        try:
            handler = self._handlers.get(request["call"])
            if handler is None:
                raise CallRefusedError(404, f"unknown call {request['call']!r}; the calls are {sorted(self._handlers)}")
            reply = handler(request, reader)
            result: Message = {}
            if inspect.isawaitable(reply):
                result = await reply
            else:
                async with contextlib.aclosing(reply) as messages:
                    async for message in messages:
                        yield pack([MESSAGE, message])
            yield pack([DONE, result])
        except ConnectionLostError:
            raise
        except CallRefusedError as error:
            yield _refusal(error.status, str(error))
        except (KeyError, TypeError, ValueError) as error:
            yield _refusal(400, f"the request is not valid: {error!r}")
        except Exception as error:
            log.exception("a call failed")
            yield _refusal(500, f"the call failed: {error!r}")


def _refusal(status: int, error: str) -> bytes:
    return pack([REFUSED, {"status": status, "error": error}])


class RpcClient:
    """Calls to one server. Concurrent calls use a connection each; connections are reused."""

    def __init__(self, address: str, token: str, *, connect_s: float, silence_s: float) -> None:
        """`silence_s` is the longest pause within a reply."""
        self._address = address
        self._token = token
        self._connect_s = connect_s
        self._silence_s = silence_s
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._writers: set[asyncio.StreamWriter] = set()

    async def call(self, name: str, **request: object) -> Message:
        """The result of a call. Raises CallRefusedError, ConnectionLostError."""
        result: Message = {}
        async with contextlib.aclosing(self.stream(name, request)) as messages:
            async for message in messages:
                result = message
        return result

    async def stream(
        self, name: str, request: Mapping[str, object], file: IO[bytes] | None = None
    ) -> AsyncGenerator[Message, None]:
        """The messages of a call, then its result if that is not empty. `file` is sent after the first message.

        Raises CallRefusedError, ConnectionLostError. A reply that is not read to its end costs the connection."""
        frame = pack({"call": name, **request})
        try:
            reader, writer = await self._connection()
        except OSError as error:
            raise ConnectionLostError(repr(error)) from error
        is_complete = False
        try:
            await self._send(writer, frame)
            while not is_complete:
                kind, value = await self._read(reader)
                if kind == REFUSED:
                    raise CallRefusedError(value["status"], value["error"])
                is_complete = kind == DONE
                if value or not is_complete:
                    yield value
                while file is not None and (chunk := await asyncio.to_thread(file.read, CHUNK_BYTES)):
                    await self._send(writer, chunk)
                file = None
        except OSError as error:
            raise ConnectionLostError(repr(error)) from error
        finally:
            if is_complete and not writer.is_closing():
                self._idle.append((reader, writer))
            else:
                self._writers.discard(writer)
                await close(writer)

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not writer.is_closing() and not reader.at_eof():
                return reader, writer
            self._writers.discard(writer)
            await close(writer)
        try:
            async with asyncio.timeout(self._connect_s):
                reader, writer = await self._open()
        except TimeoutError:
            raise ConnectionLostError(f"no connection within {self._connect_s:g} s") from None
        self._writers.add(writer)
        writer.write(pack({"token": self._token}))
        return reader, writer

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not self._address.startswith("tcp://"):
            return await asyncio.open_unix_connection(self._address, limit=CHUNK_BYTES)
        host, _, port = self._address.removeprefix("tcp://").rpartition(":")
        return await asyncio.open_connection(host, int(port), limit=CHUNK_BYTES)

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        try:
            async with asyncio.timeout(self._connect_s):
                await writer.drain()
        except TimeoutError:
            raise ConnectionLostError(f"the peer read nothing for {self._connect_s:g} s") from None

    async def _read(self, reader: asyncio.StreamReader) -> tuple[int, Message]:
        try:
            async with asyncio.timeout(self._silence_s):
                head = await reader.readexactly(LENGTH.size)
        except TimeoutError:
            raise ConnectionLostError(f"the peer sent nothing for {self._silence_s:g} s") from None
        except asyncio.IncompleteReadError:
            raise ConnectionLostError("the connection ended before the reply did") from None
        kind, value = unpack(await read_body(reader, head))
        return kind, value

    async def close(self) -> None:
        """Close all connections; calls in progress end with ConnectionLostError."""
        writers, self._writers = self._writers, set()
        self._idle.clear()
        for writer in writers:
            writer.transport.abort()
        for writer in writers:
            await close(writer)
