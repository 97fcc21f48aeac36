"""Downloads of checkpoints. Signed links are issued to authenticated callers; the files behind them need no key.

A link names the directory it was made for, so it expires with an overwrite instead of mixing old and new files. File
names come from the directory's manifest, never from the client. A file is sent whole or by range. A file in a bucket is
streamed without a copy in memory or on disk.
"""

from __future__ import annotations

import email.utils
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import IO

from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse

from tinsmith.api.declaration import ThreadPool, operation
from tinsmith.api.links import SignedLink, sign_link
from tinsmith.api.openapi import ANYTHING, FILE_TYPE, LINKED, TAR_TYPE, TEXT, fields, linked
from tinsmith.api.request import Call, JsonObject
from tinsmith.api.routes.checkpoints import CHECKPOINT, ref_of
from tinsmith.errors import GoneError, NotFoundError, UserError
from tinsmith.storage.directories import Directories
from tinsmith.storage.stores import read_chunks
from tinsmith.store.checkpoints import Checkpoint, CheckpointRef, parse_path
from tinsmith.wire.fields import iso

_RANGE = re.compile(r"bytes=(?P<first>[0-9]{0,18})-(?P<last>[0-9]{0,18})")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """`path` is None for a file in a bucket. `open` opens the file for reading in either place."""

    path: Path | None
    size_bytes: int
    open: Callable[[], IO[bytes]]


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
    response_headers = {"accept-ranges": "bytes", **(headers or {})}
    if filename is not None:
        response_headers["content-disposition"] = f'attachment; filename="{email.utils.quote(filename)}"'
    byte_range = _range_of(request, file.size_bytes, response_headers.get("etag"))
    if byte_range is None:
        start, end, status = 0, file.size_bytes, HTTPStatus.OK
    else:
        start, end = byte_range
        if start >= end:
            return Response(None, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, _content_range("*", file.size_bytes))
        status = HTTPStatus.PARTIAL_CONTENT
        response_headers |= _content_range(f"{start}-{end - 1}", file.size_bytes)
    response_headers["content-length"] = str(end - start)
    content = iter(()) if request.method == "HEAD" else _read_range(file.open(), start, end)
    return StreamingResponse(content, status, response_headers, media_type)


def _content_range(range_text: str, size_bytes: int) -> dict[str, str]:
    return {"content-range": f"bytes {range_text}/{size_bytes}"}


def _range_of(request: Request, size_bytes: int, etag: str | None) -> tuple[int, int] | None:
    """Return start and end of the requested range. Returns None (the whole file) for several ranges, a malformed range,
    or a range of another version of the file.
    """
    match = _RANGE.fullmatch(request.headers.get("range", "").replace(" ", "").lower())
    if match is None or request.headers.get("if-range", etag) != etag:
        return None
    first, last = match["first"], match["last"]
    if not first:
        return (max(0, size_bytes - int(last)), size_bytes) if last else None
    end = min(int(last) + 1, size_bytes) if last else size_bytes
    return (int(first), end) if not last or int(first) <= int(last) else None


def _drop_broken_range(request: Request) -> None:
    """Ignore a malformed Range (RFC 9110, section 14.2), which FileResponse would refuse."""
    range_header = request.headers.get("range")
    if range_header is None:
        return
    unit, _, ranges = range_header.replace(" ", "").lower().partition("=")
    matches = [_RANGE.fullmatch(f"{unit}={range_text}") for range_text in ranges.split(",")]
    if not all(match and _is_forward(match["first"], match["last"]) for match in matches):
        request.scope["headers"] = [(name, value) for name, value in request.scope["headers"] if name != b"range"]


def _is_forward(first: str, last: str) -> bool:
    return int(first) <= int(last) if first and last else bool(first or last)


def _read_range(file: IO[bytes], start: int, end: int) -> Iterator[bytes]:
    with file:
        file.seek(start)
        yield from read_chunks(file, end - start)


PURPOSE = "download"
DOWNLOAD = "/downloads/{directory}/{run_id}/{kind}/{name}"

BLOCK_BYTES = 512  # the block size of tar archives


@operation(
    "GET",
    CHECKPOINT + "/external_weights_urls",
    "Get links to the files of an export",
    answer=fields({"urls": {"type": "object", "additionalProperties": TEXT}, "expires": TEXT}),
    errors=(404, 410),
)
def external_weights_urls(call: Call) -> JsonObject:
    checkpoint = _find_readable(call)
    if checkpoint.kind != "external_weights":
        raise UserError(
            f"{checkpoint.ref.path!r} is not an export; only 'external_weights' checkpoints have links to their files "
            "(save_weights_external makes one)"
        )
    files = call.services.checkpoints.files.files(checkpoint.directory or "")
    links = {file: sign_link(call, PURPOSE, f"{_path(checkpoint)}/files/{file}") for file in sorted(files)}
    expires_s = min(link.expires_s for link in links.values())
    record_link(call, checkpoint.ref, "files")
    return {"urls": {file: link.url for file, link in links.items()}, "expires": iso(expires_s)}


@operation(
    "GET",
    CHECKPOINT + "/archive_link",
    "Get a link to a tar of all files",
    answer=fields({"url": TEXT, "expires": TEXT}),
    errors=(404, 410),
)
def archive_url(call: Call) -> JsonObject:
    """Return a link to a tar of all files, for a checkpoint of any kind."""
    link = _link_to_archive(call)
    return {"url": link.url, "expires": iso(link.expires_s)}


def record_link(call: Call, ref: CheckpointRef, purpose: str) -> None:
    """Add an entry about an issued link, which changes no row, to the audit log."""
    details = {"model_id": ref.training_run_id, "tinker_path": ref.path, "purpose": purpose}
    call.services.audit.record(call.tenant_id, "checkpoint_download_url_issued", details)


def _link_to_archive(call: Call) -> SignedLink:
    checkpoint = _find_readable(call)
    link = sign_link(call, PURPOSE, f"{_path(checkpoint)}/archive")
    record_link(call, checkpoint.ref, "archive")
    return link


@operation("GET", CHECKPOINT + "/archive", "Redirect to a tar of all files", answer=ANYTHING, errors=(302, 404, 410))
def archive_link(call: Call) -> Response:
    """Redirect to the archive."""
    link = _link_to_archive(call)
    return RedirectResponse(link.url, 302, {"expires": email.utils.formatdate(link.expires_s, usegmt=True)})


_download = partial(linked, "GET", purpose=PURPOSE, threads=ThreadPool.TRANSFERS)


@_download(DOWNLOAD + "/files/{file}", "Download one file", answer=FILE_TYPE, errors=(206, 416, *LINKED))
def download_file(call: Call) -> Response:
    """Send one file, whole or by range."""
    file = call.path["file"]
    files, directory = _open_linked(call)
    if file not in (sizes := files.files(directory)):
        raise NotFoundError(f"the checkpoint has no file {file!r}")
    stored = StoredFile(files.file_path(directory, file), sizes[file], lambda: files.open(directory, file))
    return file_response(call.request, stored, FILE_TYPE, filename=file)


@_download(DOWNLOAD + "/archive", "Download all files", answer=TAR_TYPE)
def download_archive(call: Call) -> Response:
    """Send a tar that is built while it is sent."""
    files, directory = _open_linked(call)
    sizes = files.files(directory)
    name = "{run_id}_{kind}_{name}.tar".format(**call.path).replace(":", "_")
    headers = {
        "content-length": str(tar_bytes(sizes)),
        "content-disposition": f'attachment; filename="{name}"',
    }
    content = () if call.request.method == "HEAD" else stream_tar(files, directory, sizes)
    return StreamingResponse(content, headers=headers, media_type=TAR_TYPE)


def _find_readable(call: Call) -> Checkpoint:
    checkpoint = call.services.checkpoints.get(call.tenant_id, ref_of(call))
    call.services.checkpoints.files.check_sizes(checkpoint.directory or "")
    return checkpoint


def _path(checkpoint: Checkpoint) -> str:
    ref = checkpoint.ref
    return f"/downloads/{checkpoint.directory}/{ref.training_run_id}/{ref.kind}/{ref.name}"


def _open_linked(call: Call) -> tuple[Directories, str]:
    """Return the store and the directory that a link names. Raises GoneError."""
    ref = parse_path("tinker://{run_id}/{kind}/{name}".format(**call.path))
    checkpoint = call.services.checkpoints.find(ref)
    directory = call.path["directory"]
    if checkpoint is None or checkpoint.directory != directory:
        raise GoneError(f"checkpoint {ref.path!r} was deleted or overwritten, or has expired")
    call.services.checkpoints.files.check_sizes(directory)
    return call.services.checkpoints.files, directory


def stream_tar(files: Directories, directory: str, sizes: Mapping[str, int]) -> Iterator[bytes]:
    """Yield the archive in chunks. If the directory is deleted meanwhile, an archive from disk is still complete,
    because all files are open; an archive from a bucket ends before its announced length.
    """
    return pack_tar({file: files.open(directory, file) for file in sizes}, sizes)


def pack_tar(open_files: Mapping[str, IO[bytes]], sizes: Mapping[str, int]) -> Iterator[bytes]:
    """Yield a tar of open files in chunks, closing each."""
    for file, size in sizes.items():
        member = tarfile.TarInfo(file)
        member.size = size
        yield member.tobuf(tarfile.GNU_FORMAT)
        with open_files[file]:
            yield from read_chunks(open_files[file])
        yield bytes(_pad_size(size) - size)
    yield bytes(2 * BLOCK_BYTES)


def tar_bytes(sizes: Mapping[str, int]) -> int:
    """The length of `pack_tar`."""
    return sum(_pad_size(BLOCK_BYTES + size) for size in sizes.values()) + 2 * BLOCK_BYTES


def _pad_size(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES
