"""A stored file as an answer, whole or a range of it, wherever it is: on this disk, or in a bucket.

What is in a bucket passes through in pieces: neither the whole file nor a copy on the disk is made for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import quote
from http import HTTPStatus
from pathlib import Path
from typing import IO

from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

CHUNK_BYTES = 1 << 20

_RANGE = re.compile(r"bytes=(?P<first>[0-9]{0,18})-(?P<last>[0-9]{0,18})")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """`path` is where it is on this disk, if it is there; `opened` gives it for reading wherever it is."""

    path: Path | None
    size_bytes: int
    opened: Callable[[], IO[bytes]]


def file_response(
    request: Request,
    file: StoredFile,
    media_type: str,
    headers: Mapping[str, str] | None = None,
    filename: str | None = None,
) -> Response:
    if file.path is not None:
        _drop_broken_range(request)
        return FileResponse(file.path, 200, headers, media_type, filename=filename, stat_result=file.path.stat())
    given = {"accept-ranges": "bytes", **(headers or {})}
    if filename is not None:
        given["content-disposition"] = f'attachment; filename="{quote(filename)}"'
    wanted = _range_of(request, file.size_bytes, given.get("etag"))
    if wanted is None:
        start, end, status = 0, file.size_bytes, HTTPStatus.OK
    else:
        start, end = wanted
        if start >= end:
            return Response(None, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, _content_range("*", file.size_bytes))
        status = HTTPStatus.PARTIAL_CONTENT
        given |= _content_range(f"{start}-{end - 1}", file.size_bytes)
    given["content-length"] = str(end - start)
    content = iter(()) if request.method == "HEAD" else _pieces(file.opened(), start, end)
    return StreamingResponse(content, status, given, media_type)


def _content_range(what: str, size_bytes: int) -> dict[str, str]:
    return {"content-range": f"bytes {what}/{size_bytes}"}


def _range_of(request: Request, size_bytes: int, etag: str | None) -> tuple[int, int] | None:
    """Start and end of the one range that is asked for. Whoever asks for several, or for what means nothing, gets the
    whole; so does who has a range of another file of this name.
    """
    found = _RANGE.fullmatch(request.headers.get("range", "").replace(" ", "").lower())
    if found is None or request.headers.get("if-range", etag) != etag:
        return None
    first, last = found["first"], found["last"]
    if not first:
        return (max(0, size_bytes - int(last)), size_bytes) if last else None
    end = min(int(last) + 1, size_bytes) if last else size_bytes
    return (int(first), end) if not last or int(first) <= int(last) else None


def _drop_broken_range(request: Request) -> None:
    """A Range that means nothing is ignored (RFC 9110, section 14.2), where FileResponse would refuse it."""
    given = request.headers.get("range")
    if given is None:
        return
    unit, _, ranges = given.replace(" ", "").lower().partition("=")
    found = [_RANGE.fullmatch(f"{unit}={each}") for each in ranges.split(",")]
    if not all(one and _is_forward(one["first"], one["last"]) for one in found):
        request.scope["headers"] = [(name, value) for name, value in request.scope["headers"] if name != b"range"]


def _is_forward(first: str, last: str) -> bool:
    return int(first) <= int(last) if first and last else bool(first or last)


def _pieces(file: IO[bytes], start: int, end: int) -> Iterator[bytes]:
    with file:
        file.seek(start)
        while start < end and (piece := file.read(min(CHUNK_BYTES, end - start))):
            start += len(piece)
            yield piece
