"""Request bodies: how large they may be, how they are encoded, and what they claim to be.

Everything is bounded before it is allocated: a body that declares or reaches more than the limit is refused
while at most the limit is in memory. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import zstandard

from tinsmith.errors import TooLargeError, UnsupportedMediaError, UserError

JSON_TYPE = "application/json"
PROTO_TYPE = "application/x-protobuf"

MIN_WINDOW_BYTES = 8 << 20  # every zstd decoder must accept this much (RFC 8878, section 3.1.1.1.2)


def check_length(content_length: str | None, limit_bytes: int) -> None:
    """Refuse a body by its Content-Length header, before it is read."""
    if content_length is None:
        return
    if not (content_length.isascii() and content_length.isdigit()):
        raise UserError(f"the header Content-Length is {content_length[:32]!r}, which is not a number")
    if len(content_length) > 20 or int(content_length) > limit_bytes:
        raise too_large(limit_bytes)


def check_content_type(content_type: str | None, expected: str) -> None:
    got = (content_type or "").partition(";")[0].strip().lower()
    if got != expected:
        raise UnsupportedMediaError(f"the header Content-Type is {got!r}; this path takes {expected!r}")


def decode(body: bytes, encoding: str | None, limit_bytes: int) -> bytes:
    """Undo the body's Content-Encoding."""
    if len(body) > limit_bytes:
        raise too_large(limit_bytes)
    encoding = (encoding or "identity").strip().lower()
    if encoding == "identity":
        return body
    if encoding == "zstd":
        return _decompress(body, limit_bytes)
    raise UnsupportedMediaError(f"the header Content-Encoding is {encoding[:32]!r}; send 'zstd' or no encoding at all")


def too_large(limit_bytes: int) -> TooLargeError:
    return TooLargeError(
        f"the request body is larger than {limit_bytes} bytes (after decompression); send less data per "
        "request or raise the server's setting max_body_bytes"
    )


def _decompress(body: bytes, limit_bytes: int) -> bytes:
    try:
        declared = zstandard.frame_content_size(body)
        if declared < 0:
            # Without a declared size, neither the bound nor a body cut short could be checked before the end.
            raise UserError("the zstd frame does not declare its content size; compress the body in one call")
        if declared > limit_bytes:
            raise too_large(limit_bytes)
        decompressor = zstandard.ZstdDecompressor(max_window_size=max(MIN_WINDOW_BYTES, limit_bytes))
        return decompressor.decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise UserError(f"the body is not one whole zstd frame: {error}") from error
