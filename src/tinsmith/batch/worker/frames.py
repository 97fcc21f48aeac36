"""Messages between a worker and its children, and between a coordinator and its Ray driver: length-prefixed msgpack.

A frame is its length in four bytes (big-endian), then that many bytes of msgpack, at most `MAX_FRAME_BYTES`. Frames
travel over pipes. `pack` and `read_frames` are for threads, `read_frame` for an event loop; `encode` and `decode` are
for a message that travels as a value of another one, or through Ray.
"""

from __future__ import annotations

import asyncio
import datetime
import struct
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import IO, Any

import msgpack

Message = dict[str, Any]

LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 30
BIG_INTEGER = 1
"""The msgpack extension for integers beyond 64 bits: their decimal digits."""
DURATION = BIG_INTEGER + 1
TEXT_TYPES: dict[int, tuple[type, Callable[[Any], str], Callable[[str], object]]] = {
    BIG_INTEGER + 2: (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    BIG_INTEGER + 3: (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    BIG_INTEGER + 4: (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    BIG_INTEGER + 5: (Decimal, str, Decimal),
}
"""Types that are sent as texts, by the code of their extension."""


class FrameError(Exception):
    """A frame that is too long or not msgpack. The rest of its stream cannot be read."""


def encode(message: object) -> bytes:
    """A message without its length. Raises TypeError for a type that msgpack lacks."""
    body = msgpack.packb(message, default=_pack_extension, unicode_errors="surrogatepass")
    assert body is not None
    return body


def pack(message: object) -> bytes:
    """A frame. Raises TypeError for a type that msgpack lacks, ValueError for a frame that is too long."""
    body = encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"the message has {len(body)} bytes; the maximum is {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Any:  # noqa: ANN401
    """The message in a frame without its length. Raises FrameError."""
    try:
        return msgpack.unpackb(body, ext_hook=_unpack_extension, strict_map_key=False, unicode_errors="surrogatepass")
    except ValueError as error:
        raise FrameError(f"the frame is not msgpack: {error}") from None


def _length(head: bytes) -> int:
    (size,) = LENGTH.unpack(head)
    if size > MAX_FRAME_BYTES:
        raise FrameError(f"the frame has {size} bytes; the maximum is {MAX_FRAME_BYTES}")
    return size


def read_frames(source: IO[bytes]) -> Iterator[Message]:
    """The messages on a pipe, to its end. An incomplete frame, left by a sender that died, is dropped.

    Raises FrameError."""
    while len(head := source.read(LENGTH.size)) == LENGTH.size:
        size = _length(head)
        body = source.read(size)
        if len(body) < size:
            return
        yield decode(body)


async def read_frame(reader: asyncio.StreamReader) -> Any | None:  # noqa: ANN401
    """The next message; None at the end of the pipe, where an incomplete frame is dropped. Raises FrameError."""
    try:
        head = await reader.readexactly(LENGTH.size)
        return decode(await reader.readexactly(_length(head)))
    except asyncio.IncompleteReadError:
        return None


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
