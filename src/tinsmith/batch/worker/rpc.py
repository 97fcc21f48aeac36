"""Messages between the coordinator, a worker and the worker's children: msgpack, each behind its length.

A frame is four bytes of length (big-endian) and so many bytes of msgpack. Between a worker and its child, frames go
over two pipes (`pack`, `read_frames`). Between the coordinator and a worker they go over a Unix socket, or over TCP if
the two are on different machines (`Server`, `Client`). An address is a socket's path or `tcp://HOST:PORT`.

A connection begins with a frame that holds the token. Then it carries one call at a time: the client sends
`{"call": name, ...}`; the server answers with frames `[MESSAGE, value]` and one `[DONE, value]` or
`[REFUSED, {"status", "error"}]`. A call may announce bytes (`size`); the client sends them after the first message.

The server looks at the token before it reads anything else: a caller without it gets neither memory nor time
(`TOKEN_S`, `MAX_STRANGERS`). After the token, no frame is longer than `MAX_FRAME_BYTES`, and memory grows only with
the bytes that have arrived. Statuses are HTTP's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import struct
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import IO, Any

import msgpack

Message = dict[str, Any]

MESSAGE, DONE, REFUSED = range(3)
LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 30
MAX_TOKEN_BYTES = 1024
PIECE_BYTES = 1 << 20
TOKEN_S = 10.0
"""How long a connection may take to bring its token."""
READ_S = 60.0
"""How long the next bytes of a frame may take."""
MAX_STRANGERS = 32
"""Connections that brought no token yet. The oldest one makes room for a new one."""
MAX_CONNECTIONS = 128
BIG_INTEGER = 1
"""The msgpack extension for integers of more than 64 bits: their decimal digits."""


class RefusedError(Exception):
    """The other side does not do what it was asked; `status` says why as HTTP would."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ConnectionLostError(Exception):
    """The other side cannot be reached, broke the connection, or was silent for too long."""


def pack(message: object) -> bytes:
    """A frame. Raises TypeError for what msgpack has no type for, ValueError for a frame that is too long."""
    body = msgpack.packb(message, default=_extended, unicode_errors="surrogatepass")
    assert body is not None
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message has {len(body)} bytes; it may have {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Any:  # noqa: ANN401
    """What is in a frame, without its length. Raises ValueError."""
    return msgpack.unpackb(body, ext_hook=_restored, strict_map_key=False, unicode_errors="surrogatepass")


def read_frames(source: IO[bytes]) -> Iterator[Message]:
    """The messages on a pipe, until it ends. A frame that is cut, as by the sender's death, is not given."""
    while len(head := source.read(LENGTH.size)) == LENGTH.size:
        (size,) = LENGTH.unpack(head)
        body = source.read(size)
        if len(body) < size:
            return
        yield unpack(body)


def _extended(value: object) -> msgpack.ExtType:
    if isinstance(value, int):  # msgpack asks for those beyond 64 bits
        return msgpack.ExtType(BIG_INTEGER, str(value).encode())
    raise TypeError(f"a {type(value).__name__} cannot be sent; it must be made of JSON's types")


def _restored(code: int, data: bytes) -> object:
    if code != BIG_INTEGER:
        raise ValueError(f"a message has an extension of type {code}; {BIG_INTEGER} is the only one")
    return int(data)


async def read_exactly(reader: asyncio.StreamReader, size: int) -> bytes:
    """Raises ConnectionLostError at the end of the stream, and if nothing comes for `READ_S`."""
    return b"".join([piece async for piece in read_pieces(reader, size)])


async def read_pieces(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    """So many bytes as they come. Raises as `read_exactly`."""
    while size:
        try:
            async with asyncio.timeout(READ_S):
                piece = await reader.read(min(size, PIECE_BYTES))
        except TimeoutError:
            raise ConnectionLostError(f"nothing came for {READ_S:g} s in the middle of a frame") from None
        if not piece:
            raise ConnectionLostError(f"the connection ended {size} bytes before the end of a frame")
        size -= len(piece)
        yield piece


Answer = Message | AsyncGenerator[Message, None]
Call = Callable[[Message, asyncio.StreamReader], Awaitable[Answer]]
"""What a server does for a request: one result, or a stream of messages. Raises RefusedError."""


class Server:
    """Answers calls on any number of connections."""

    def __init__(self, token: str, calls: Mapping[str, Call]) -> None:
        self._token = token
        self._calls = calls
        self._strangers: OrderedDict[asyncio.StreamWriter, None] = OrderedDict()
        self._open = 0
        self.answering = 0
        """Calls that are being answered."""

    async def listen(self, path: str | None, host: str = "127.0.0.1", port: int = 0) -> tuple[asyncio.Server, str]:
        """On a Unix socket at `path`, which its owner alone may use, or on a TCP port; and the address."""
        limits: dict[str, Any] = {"limit": PIECE_BYTES, "backlog": 128}
        if path is not None:
            server = await asyncio.start_unix_server(self._serve, path, **limits)
            os.chmod(path, 0o600)
            return server, path
        server = await asyncio.start_server(self._serve, host, port, **limits)
        return server, f"tcp://{host}:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        self._admit(writer)
        try:
            with contextlib.suppress(ConnectionLostError, OSError):
                await self._converse(reader, writer)
        finally:
            self._open -= 1
            self._strangers.pop(writer, None)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._authenticate(reader, writer)
            while (request := await self._request(reader)) is not None:
                self.answering += 1
                try:
                    await self._answer(request, reader, writer)
                finally:
                    self.answering -= 1
        except RefusedError as error:  # what follows cannot be told from the next request: the connection ends
            writer.write(_refusal(error))
            await writer.drain()

    def _admit(self, writer: asyncio.StreamWriter) -> None:
        """A new connection takes the place of the oldest that has brought no token."""
        self._strangers[writer] = None
        excess = max(len(self._strangers) - MAX_STRANGERS, 1 if self._open > MAX_CONNECTIONS else 0)
        for each in list(self._strangers)[:excess]:
            del self._strangers[each]
            each.transport.abort()

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Raises RefusedError, and ConnectionLostError for a connection that says nothing in time."""
        try:
            async with asyncio.timeout(TOKEN_S):
                (size,) = LENGTH.unpack(await read_exactly(reader, LENGTH.size))
                given = await read_exactly(reader, size) if size <= MAX_TOKEN_BYTES else b""
        except TimeoutError:
            raise ConnectionLostError("no token came in time") from None
        if not hmac.compare_digest(given, pack({"token": self._token})[LENGTH.size :]):
            raise RefusedError(409, "the token is not that of this worker's coordinator")
        self._strangers.pop(writer, None)

    async def _request(self, reader: asyncio.StreamReader) -> Message | None:
        """The next request, however late; None at the end of the connection. Raises RefusedError."""
        try:
            (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        except asyncio.IncompleteReadError:
            return None
        if size > MAX_FRAME_BYTES:
            raise RefusedError(413, f"the request has {size} bytes; it may have {MAX_FRAME_BYTES}")
        body = await read_exactly(reader, size)
        try:
            request = unpack(body)
        except ValueError as error:
            raise RefusedError(400, f"the request is no msgpack: {error}") from None
        if not isinstance(request, dict) or not isinstance(request.get("call"), str):
            raise RefusedError(400, "a request must be a map with a 'call'")
        return request

    async def _answer(self, request: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            call = self._calls.get(request["call"])
            if call is None:
                raise RefusedError(404, f"there is no call {request['call']!r}; there are {sorted(self._calls)}")
            answer = await call(request, reader)
            if isinstance(answer, dict):
                writer.write(pack([DONE, answer]))
            else:
                await self._stream(answer, writer)
        except (KeyError, TypeError, ValueError) as error:
            refused = RefusedError(400, f"the request is not as it must be: {error!r}")
            writer.write(_refusal(refused))
        except RefusedError as error:
            writer.write(_refusal(error))
        await writer.drain()

    async def _stream(self, messages: AsyncGenerator[Message, None], writer: asyncio.StreamWriter) -> None:
        async with contextlib.aclosing(messages) as stream:
            held = b""
            async for message in stream:
                writer.write(held)
                held = pack([MESSAGE, message])
                if not message.get("last"):  # the end is sent with it
                    writer.write(held)
                    await writer.drain()
                    held = b""
            writer.write(held + pack([DONE, {}]))


def _refusal(error: RefusedError) -> bytes:
    return pack([REFUSED, {"status": error.status, "error": str(error)}])


class Client:
    """Calls to one server. Each call has a connection to itself; connections are kept for the next ones."""

    def __init__(self, address: str, token: str, *, connect_s: float, silence_s: float) -> None:
        """`silence_s`: how long an answer may take to go on."""
        self._address = address
        self._token = token
        self._connect_s = connect_s
        self._silence_s = silence_s
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._all: set[asyncio.StreamWriter] = set()

    async def call(self, name: str, **request: object) -> Message:
        """The result of a call. Raises RefusedError, ConnectionLostError."""
        result: Message = {}
        async with contextlib.aclosing(self.stream(name, request)) as answer:
            async for kind, value in answer:
                if kind == DONE:
                    result = value
        return result

    async def stream(
        self, name: str, request: Mapping[str, object], file: IO[bytes] | None = None
    ) -> AsyncGenerator[tuple[int, Message], None]:
        """The messages of a call, each with its kind, `DONE` last. `file` is sent once the first message has come.

        Raises RefusedError, ConnectionLostError. A call that is not read to its end takes its connection with it."""
        frame = pack({"call": name, **request})
        reader = writer = None
        ended = False
        try:
            reader, writer = await self._connection()
            await self._send(writer, frame)
            while not ended:
                kind, value = await self._read(reader)
                if kind == MESSAGE and file is not None:
                    while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                        await self._send(writer, piece)
                    file = None
                ended = kind == DONE
                if kind == REFUSED:
                    raise RefusedError(value["status"], value["error"])
                yield kind, value
        except OSError as error:
            raise ConnectionLostError(repr(error)) from error
        finally:
            if writer is not None and reader is not None:
                if ended and not writer.is_closing():
                    self._idle.append((reader, writer))
                else:
                    self._drop(writer)

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not writer.is_closing() and not reader.at_eof():
                return reader, writer
            self._drop(writer)
        try:
            async with asyncio.timeout(self._connect_s):
                reader, writer = await self._open()
        except TimeoutError:
            raise ConnectionLostError(f"no connection within {self._connect_s:g} s") from None
        self._all.add(writer)
        writer.write(pack({"token": self._token}))
        return reader, writer

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not self._address.startswith("tcp://"):
            return await asyncio.open_unix_connection(self._address, limit=PIECE_BYTES)
        host, _, port = self._address.removeprefix("tcp://").rpartition(":")
        return await asyncio.open_connection(host, int(port), limit=PIECE_BYTES)

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        try:
            async with asyncio.timeout(self._connect_s):
                await writer.drain()
        except TimeoutError:
            raise ConnectionLostError(f"it took nothing for {self._connect_s:g} s") from None

    async def _read(self, reader: asyncio.StreamReader) -> tuple[int, Message]:
        try:
            async with asyncio.timeout(self._silence_s):
                head = await reader.readexactly(LENGTH.size)
        except TimeoutError:
            raise ConnectionLostError(f"it was silent for {self._silence_s:g} s") from None
        except asyncio.IncompleteReadError:
            raise ConnectionLostError("the connection ended before the answer did") from None
        kind, value = unpack(await read_exactly(reader, LENGTH.unpack(head)[0]))
        return kind, value

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._all.discard(writer)
        writer.close()

    async def close(self) -> None:
        """Calls that are under way end with ConnectionLostError."""
        self._idle.clear()
        for writer in list(self._all):
            writer.transport.abort()
            self._all.discard(writer)
