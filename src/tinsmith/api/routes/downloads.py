"""Downloading a checkpoint's files: signed links, which need the key, and what they lead to, which does not.

A link names the directory that it was made for: after an overwrite it is gone, rather than half old and half new.
File names come from the directory's manifest; nothing that a client sends becomes a path.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from email.utils import format_datetime

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from tinsmith.api.operation import Call, JsonObject, Services, authenticate, call_of, endpoint, run
from tinsmith.api.routes.checkpoints import CHECKPOINT, record, ref_of
from tinsmith.api.routes.links import Link, follow_link, sign_link
from tinsmith.api.routes.stored import StoredFile, file_response
from tinsmith.errors import GoneError, NotFoundError, UserError
from tinsmith.storage.directories import Directories
from tinsmith.store.checkpoints import Checkpoint, parse_path

PURPOSE = "download"
DOWNLOAD = "/downloads/{directory}/{run_id}/{kind}/{name}"

BLOCK_BYTES = 512  # of a tar archive
CHUNK_BYTES = 1 << 20


def external_weights_urls(call: Call) -> JsonObject:
    checkpoint = _readable(call)
    if checkpoint.kind != "external_weights":
        raise UserError(
            f"{checkpoint.ref.path!r} is no export; only 'external_weights' checkpoints have links to their files "
            "(save_weights_external makes one)"
        )
    files = call.services.checkpoints.files.files(checkpoint.directory or "")
    links = {file: sign_link(call, PURPOSE, f"{_path(checkpoint)}/files/{file}") for file in sorted(files)}
    expires = min(link.expires for link in links.values())
    record(call, "checkpoint_download_url_issued", checkpoint.ref, purpose="files")
    return {
        "urls": {file: link.url for file, link in links.items()},
        "expires": expires.isoformat().replace("+00:00", "Z"),
    }


def archive_url(call: Call) -> JsonObject:
    """A link to one tar of all files, for a checkpoint of any kind."""
    link = _link_to_archive(call)
    return {"url": link.url, "expires": link.expires.isoformat().replace("+00:00", "Z")}


def _link_to_archive(call: Call) -> Link:
    checkpoint = _readable(call)
    link = sign_link(call, PURPOSE, f"{_path(checkpoint)}/archive")
    record(call, "checkpoint_download_url_issued", checkpoint.ref, purpose="archive")
    return link


async def archive_link(request: Request) -> Response:
    """302 to the same."""
    services, tenant_id = await authenticate(request)
    call = call_of(request, services, tenant_id, b"")

    def work() -> Response:
        link = _link_to_archive(call)
        return RedirectResponse(link.url, 302, {"expires": format_datetime(link.expires, usegmt=True)})

    return await run(work)


async def download_file(request: Request) -> Response:
    """One file, whole or in ranges."""
    file = request.path_params["file"]

    def work() -> Response:
        files, directory = _opened(request)
        if file not in (sizes := files.files(directory)):
            raise NotFoundError(f"the checkpoint has no file {file!r}")
        stored = StoredFile(files.file_path(directory, file), sizes[file], lambda: files.open(directory, file))
        return file_response(request, stored, "application/octet-stream", filename=file)

    return await run(work, on=transfers_of(request))


async def download_archive(request: Request) -> Response:
    """A tar, made while it is sent."""

    def work() -> Response:
        files, directory = _opened(request)
        sizes = files.files(directory)
        name = "{run_id}_{kind}_{name}.tar".format(**request.path_params).replace(":", "_")
        headers = {
            "content-length": str(sum(_padded(BLOCK_BYTES + size) for size in sizes.values()) + 2 * BLOCK_BYTES),
            "content-disposition": f'attachment; filename="{name}"',
        }
        content = () if request.method == "HEAD" else tar_of(files, directory, sizes)
        return StreamingResponse(content, headers=headers, media_type="application/x-tar")

    return await run(work, on=transfers_of(request))


def transfers_of(request: Request) -> Executor:
    services: Services = request.app.state.services
    return services.threads.transfers


def _readable(call: Call) -> Checkpoint:
    checkpoint = call.services.checkpoints.get(call.tenant_id, ref_of(call))
    call.services.checkpoints.files.check_sizes(checkpoint.directory or "")
    return checkpoint


def _path(checkpoint: Checkpoint) -> str:
    ref = checkpoint.ref
    return f"/downloads/{checkpoint.directory}/{ref.training_run_id}/{ref.kind}/{ref.name}"


def _opened(request: Request) -> tuple[Directories, str]:
    """The directory that a link leads to, and where it is."""
    services = follow_link(request, PURPOSE)
    ref = parse_path("tinker://{run_id}/{kind}/{name}".format(**request.path_params))
    checkpoint = services.checkpoints.find(ref)
    directory: str = request.path_params["directory"]
    if checkpoint is None or checkpoint.directory != directory:
        raise GoneError(f"checkpoint {ref.path!r} was deleted or overwritten, or has expired")
    services.checkpoints.files.check_sizes(directory)
    return services.checkpoints.files, directory


def tar_of(files: Directories, directory: str, sizes: Mapping[str, int]) -> Iterator[bytes]:
    """The archive in chunks. On a disk it ends whole even if the directory is deleted before it does; from a bucket it
    is cut off, short of the length that was announced.
    """
    opened = {file: files.open(directory, file) for file in sizes}

    def chunks() -> Iterator[bytes]:
        for file, size in sizes.items():
            member = tarfile.TarInfo(file)
            member.size = size
            yield member.tobuf(tarfile.GNU_FORMAT)
            with opened[file]:
                while chunk := opened[file].read(CHUNK_BYTES):
                    yield chunk
            yield bytes(_padded(size) - size)
        yield bytes(2 * BLOCK_BYTES)

    return chunks()


def _padded(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


ROUTES = [
    Route(CHECKPOINT + "/external_weights_urls", endpoint(external_weights_urls), methods=["GET"]),
    Route(CHECKPOINT + "/archive", archive_link, methods=["GET"]),
    Route(CHECKPOINT + "/archive_link", endpoint(archive_url), methods=["GET"]),
    Route(DOWNLOAD + "/files/{file}", download_file, methods=["GET"]),
    Route(DOWNLOAD + "/archive", download_archive, methods=["GET"]),
]
