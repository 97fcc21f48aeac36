"""Request bodies: size, encoding, content type, and the number of messages in a protobuf body; and the content type of
a response.

Limits are enforced before memory is allocated: a body that declares or reaches more than the limit is refused while at
most the limit is in memory. Messages are counted before they are parsed, because an empty one takes 2 bytes of a body
and 60 of memory. The parser reports malformed protobuf.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

import orjson
import zstandard
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from tinsmith.errors import TooLargeError, UnsupportedMediaError, UserError
from tinsmith.wire.fields import show

JSON_TYPE = "application/json"
PROTO_TYPE = "application/x-protobuf"

_WEIGHT = re.compile(r"0(\.[0-9]{0,3})?|1(\.0{0,3})?")

WINDOW_BYTES = 8 << 20
"""Window limit for zstd frames without a declared size: the minimum for decoders (RFC 8878, section 3.1.1.1.2)."""

INPUT_CHUNK_BYTES = 512
"""Such a frame is decoded in chunks, each of at most 16 MiB when decoded: four bytes can encode a block of 128 KiB."""


_LINE_ENDS = {"\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029", "\u0085".encode(): b"\\u0085"}
"""Characters that JSON allows in strings and that Unicode counts as line ends, and their escapes."""


def write_json_line(value: object) -> bytes:
    """Write JSON that is one line for every client, also for those that split text at Unicode's line ends."""
    line = orjson.dumps(value)
    for character, escape in _LINE_ENDS.items():
        if character in line:
            line = line.replace(character, escape)
    return line


def check_length(content_length: str | None, limit_bytes: int) -> None:
    """Refuse a body by its Content-Length header, before it is read."""
    if content_length is None:
        return
    if not (content_length.isascii() and content_length.isdigit()):
        raise UserError(f"the header Content-Length is {content_length[:32]!r}, which is not a number")
    if len(content_length) > 20 or int(content_length) > limit_bytes:
        raise too_large(limit_bytes)


def read_media_type(content_type: str | None) -> str:
    """Return the media type of a Content-Type header, without its parameters; "" without the header."""
    return (content_type or "").partition(";")[0].strip().lower()


def check_content_type(content_type: str | None, takes: Sequence[str]) -> None:
    media_type = read_media_type(content_type)
    if media_type not in takes:
        expected = " or ".join(map(repr, takes))
        raise UnsupportedMediaError(f"the header Content-Type is {show(media_type)}; this path takes {expected}")


def choose_type(accept: str | None, offers: Sequence[str]) -> str:
    """Return the offer that a client prefers by its Accept header (RFC 9110, section 12.5.1).

    Of offers with the same weight, the client that names one gets it before those of a wildcard; otherwise the first
    offer is taken, also if none is acceptable.
    """
    if accept is None or accept.strip().lower() == offers[0]:
        return offers[0]
    ranges = [_media_range(part) for part in accept.split(",")]

    def rank(offer: str) -> tuple[float, int]:
        patterns = (offer, f"{offer.partition('/')[0]}/*", "*/*")
        for specificity, pattern in zip((2, 1, 0), patterns, strict=True):
            weights = [weight for media_range, weight in ranges if media_range == pattern]
            if weights:
                return (max(weights), specificity) if any(weights) else (0.0, 0)
        return 0.0, 0

    return max(offers, key=rank)


def _media_range(part: str) -> tuple[str, float]:
    """Split one element of Accept into its media range and its weight; a malformed weight is 0."""
    media_range, *parameters = (field.strip().lower() for field in part.split(";"))
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            return media_range, float(value) if _WEIGHT.fullmatch(value.strip()) else 0.0
    return media_range, 1.0


def decode(body: bytes, encoding: str | None, limit_bytes: int) -> bytes:
    """Decode the body's Content-Encoding."""
    if len(body) > limit_bytes:
        raise too_large(limit_bytes)
    encoding = (encoding or "identity").strip().lower()
    if encoding == "identity":
        return body
    if encoding == "zstd":
        return _decompress(body, limit_bytes)
    raise UnsupportedMediaError(f"the header Content-Encoding is {encoding[:32]!r}; send 'zstd' or no encoding")


def too_large(limit_bytes: int) -> TooLargeError:
    return TooLargeError(
        f"the request body is larger than {limit_bytes} bytes (after decompression); send less data per "
        "request or raise the server's setting max_body_bytes"
    )


def _decompress(body: bytes, limit_bytes: int) -> bytes:
    try:
        declared = zstandard.frame_content_size(body)
        if declared > limit_bytes:
            raise too_large(limit_bytes)
        if declared < 0:
            return _decompress_chunks(body, limit_bytes)
        decompressor = zstandard.ZstdDecompressor(max_window_size=max(WINDOW_BYTES, limit_bytes))
        return decompressor.decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise UserError(f"the body is not one whole zstd frame: {error}") from error


def _decompress_chunks(body: bytes, limit_bytes: int) -> bytes:
    """Decompress a frame without a declared size."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES).decompressobj()
    parts: list[bytes] = []
    size = 0
    for start in range(0, len(body), INPUT_CHUNK_BYTES):
        part = decompressor.decompress(body[start : start + INPUT_CHUNK_BYTES])
        size += len(part)
        if size > limit_bytes:
            raise too_large(limit_bytes)
        parts.append(part)
    if not decompressor.eof or decompressor.unused_data:
        raise UserError("the body is not one whole zstd frame: it ends too early, or more follows")
    return b"".join(parts)


MAX_MESSAGES = 2**18
UNCOUNTED_BYTES = 6 << 20
"""Messages in bodies up to this size are not counted: their memory is acceptable, and the SDK's bodies are smaller."""

MAX_VARINT_BYTES = 10
VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5


def check_messages(body: bytes, kind: type[Message]) -> None:
    """Raise UserError if a body of this message type holds more than MAX_MESSAGES messages."""
    if len(body) <= UNCOUNTED_BYTES:
        return
    if _count(body, cast(Descriptor, kind.DESCRIPTOR), MAX_MESSAGES) > MAX_MESSAGES:
        raise UserError(f"the body holds more than {MAX_MESSAGES} protobuf messages; send fewer data per request")


def _count(body: bytes, kind: Descriptor, limit: int) -> int:
    """The number of messages in `body` before the first malformed byte; stops above `limit`."""
    count = 0
    pending = [(kind, 0, len(body))]
    while pending and count <= limit:
        kind, at, end = pending.pop()
        inner = {field.number: field.message_type for field in kind.fields if field.message_type is not None}
        while at < end and count <= limit:
            tag, at = _varint(body, at)
            wire_type = tag & 7
            if wire_type == VARINT:
                _, at = _varint(body, at)
            elif wire_type == DELIMITED:
                size, at = _varint(body, at)
                if (message_type := inner.get(tag >> 3)) is not None:
                    count += 1
                    pending.append((message_type, at, min(at + size, end)))
                at += size
            elif wire_type in (FIXED32, FIXED64):
                at += 4 if wire_type == FIXED32 else 8
            else:
                return count
    return count


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """The varint at a position, and the next position; that is the end of the body for an unterminated varint."""
    value = 0
    for index, byte in enumerate(body[at : at + MAX_VARINT_BYTES]):
        if byte < 128:
            return value | byte << (7 * index), at + index + 1
        value |= (byte & 127) << (7 * index)
    return 0, len(body)
