"""Multipart forms, spooled to disk as they come: nothing but a piece of them is in memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from tinsmith.chat.refusals import RequestError
from tinsmith.errors import TooLargeError, UnsupportedMediaError
from tinsmith.wire.bodies import check_length

FORM_TYPE = "multipart/form-data"
MAX_FIELDS = 8
OVERHEAD_BYTES = 64 << 10
"""Of a form, beside its files."""


async def read_form(
    request: Request,
    limit_bytes: int,
    too_large: Callable[[int], TooLargeError],
    *,
    max_files: int = 1,
    max_field_bytes: int = 4096,
) -> FormData:
    """The form, for the caller to close. Raises UserError; `too_large` says what its files may have."""
    content_type = request.headers.get("content-type") or ""
    if content_type.partition(";")[0].strip().lower() != FORM_TYPE:
        raise UnsupportedMediaError(f"the header Content-Type is {content_type[:80]!a}; this path takes {FORM_TYPE!r}")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaError("the form has a Content-Encoding; send it plain")
    overhead_bytes = OVERHEAD_BYTES + MAX_FIELDS * max_field_bytes
    try:
        check_length(request.headers.get("content-length"), limit_bytes + overhead_bytes)
    except TooLargeError:
        raise too_large(limit_bytes) from None

    async def limited() -> AsyncGenerator[bytes, None]:
        size_bytes = 0
        async for piece in request.stream():
            size_bytes += len(piece)
            if size_bytes > limit_bytes + overhead_bytes:
                raise too_large(limit_bytes)
            yield piece

    parser = MultiPartParser(
        request.headers, limited(), max_files=max_files, max_fields=MAX_FIELDS, max_part_size=max_field_bytes
    )
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise RequestError("file", f"the body is no form that can be read: {error.message}") from None
