"""OpenAI's files: upload, list, read and delete. Batches read and write them.

An upload is a multipart form of one file and a few short fields. The server spools it to disk chunk by chunk, and
stores it once it is complete and valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, cast

import orjson
from pydantic import Field
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import Response

from tinsmith.api.openapi import FLAG, TEXT, fields, for_openai, integer, one_of, ref
from tinsmith.api.operation import (
    FORM_TYPE,
    Access,
    Call,
    JsonObject,
    Services,
    authenticate,
    call_of,
    run,
)
from tinsmith.api.routes.downloads import StoredFile, file_response
from tinsmith.api.routes.uploads import read_form
from tinsmith.auth.quotas import Reservation
from tinsmith.errors import NotFoundError, RequestError, TooLargeError
from tinsmith.store.files import BATCH, BATCH_OUTPUT, File, new_id
from tinsmith.wire.bodies import JSON_TYPE
from tinsmith.wire.fields import Body, ClosedBody, OneOf, Schema, show, validate

JSONL_TYPE = "application/jsonl"
CHUNK_BYTES = 1 << 20
MAX_NAME = 512
MAX_LIMIT = 10_000
DAY_S = 86400
RETENTION_S = 30 * DAY_S
MIN_RETENTION_S, MAX_RETENTION_S = 3600, 30 * DAY_S
EXTENSIONS = (".jsonl",)
UPLOAD = fields(
    {"file": {"type": "string", "format": "binary"}, "purpose": one_of(BATCH)},
    {
        "expires_after[anchor]": one_of("created_at"),
        "expires_after[seconds]": integer(MIN_RETENTION_S, MAX_RETENTION_S),
    },
)
FILES = fields({"data": {"type": "array", "items": ref("File")}, "has_more": FLAG})
FILES_QUERY: Mapping[str, Schema] = {
    "limit": integer(1, MAX_LIMIT),
    "after": TEXT,
    "order": one_of("asc", "desc"),
    "purpose": one_of(BATCH, BATCH_OUTPUT),
}


class Expiry(ClosedBody):
    anchor: Annotated[str, OneOf(("created_at",))]
    seconds: Annotated[int, Field(ge=MIN_RETENTION_S, le=MAX_RETENTION_S)]


class UploadForm(Body):
    """The short fields of the form."""

    purpose: Annotated[str, OneOf((BATCH,))]
    expires_after: Expiry | None = None


@for_openai(
    "POST",
    "/files",
    "Upload a file",
    body=UPLOAD,
    answer=ref("File"),
    errors=(429,),
    access=Access.NOTHING,
    takes=(FORM_TYPE,),
)
async def upload(request: Request) -> Response:
    services, tenant_id = await authenticate(request)
    with await run(services.quotas.reserve_file, tenant_id) as reservation:
        form = await read_form(request, services.settings.max_file_bytes, _too_large, reservation=reservation)
        try:
            stored = await run(_store, services, tenant_id, form, reservation, on=services.threads.transfers)
            return Response(stored, media_type=JSON_TYPE)
        finally:
            await form.close()  # deletes the spooled file


def _store(services: Services, tenant_id: str, form: FormData, reservation: Reservation) -> bytes:
    file, expires_after_s = _read_upload(form)
    size_bytes = file.size or 0
    if size_bytes > services.settings.max_file_bytes:
        raise _too_large(services.settings.max_file_bytes)
    reservation.cover(size_bytes)
    stored = services.files.store(new_id(), _read_chunks(file))
    return orjson.dumps(file_body(services.files.add(tenant_id, stored, file.filename or "", BATCH, expires_after_s)))


def _read_upload(form: FormData) -> tuple[UploadFile, int]:
    if unknown := sorted(set(form) - set(cast("Mapping[str, Schema]", UPLOAD["properties"]))):
        raise RequestError(show(unknown[0]), f"the form has a field {show(unknown[0])}, which is unknown; remove it")
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise RequestError("file", "the form has no file; send it as the part 'file', with a filename")
    name = file.filename or ""
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise RequestError("file", f"the filename is {show(name)}; it must have 1 to {MAX_NAME} printable characters")
    if not name.lower().endswith(EXTENSIONS):
        raise RequestError("file", f"the filename is {show(name)}; a batch's file is JSON Lines and ends with .jsonl")
    seconds = form.get("expires_after[seconds]")
    if isinstance(seconds, str) and seconds.isascii() and seconds.isdigit() and len(seconds) < 10:
        seconds = int(seconds)
    expiry = {"anchor": form.get("expires_after[anchor]"), "seconds": seconds}
    expires_after = None if expiry == dict.fromkeys(expiry) else expiry
    upload_form = validate(UploadForm, {"purpose": form.get("purpose"), "expires_after": expires_after})
    return file, upload_form.expires_after.seconds if upload_form.expires_after else RETENTION_S


def _read_chunks(file: UploadFile) -> Iterator[bytes]:
    while chunk := file.file.read(CHUNK_BYTES):
        yield chunk


def _too_large(limit_bytes: int) -> TooLargeError:
    return TooLargeError(
        f"the file is larger than {limit_bytes} bytes; split it, or raise the server's setting max_file_bytes"
    )


@for_openai(
    "GET",
    "/files",
    "List files, newest first",
    answer=FILES,
    errors=(404,),
    access=Access.LISTING,
    query=FILES_QUERY,
    filters=("?after={file_id}",),
)
def listing(call: Call) -> JsonObject:
    limit = page_limit(call, 1, MAX_LIMIT, MAX_LIMIT)
    order, purpose = call.query.get("order", "desc"), call.query.get("purpose")
    if order not in ("asc", "desc"):
        raise RequestError("order", f"order is {show(order)}; it must be 'asc' or 'desc'")
    if purpose not in (None, BATCH, BATCH_OUTPUT):
        raise RequestError("purpose", f"purpose is {show(purpose)}; it must be {BATCH!r} or {BATCH_OUTPUT!r}")
    files, has_more = call.services.files.page(
        call.tenant_id, limit, after=call.query.get("after"), ascending=order == "asc", purpose=purpose
    )
    return page([file_body(file) for file in files], has_more)


def page_limit(call: Call, low: int, high: int, default: int) -> int:
    text = call.query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and low <= int(text) <= high):
        raise RequestError("limit", f"limit is {show(text)}; it must be {low} to {high}")
    return int(text)


def page(data: list[JsonObject], has_more: bool) -> JsonObject:
    end_ids = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": end_ids[0], "last_id": end_ids[1], "has_more": has_more}


@for_openai("GET", "/files/{file_id}", "Get a file", answer=ref("File"))
def file(call: Call) -> JsonObject:
    return file_body(call.services.files.find(call.tenant_id, call.path["file_id"]))


@for_openai("DELETE", "/files/{file_id}", "Delete a file", answer=fields({"id": TEXT, "deleted": FLAG}))
def delete(call: Call) -> JsonObject:
    file_id = call.path["file_id"]
    call.services.files.delete(call.tenant_id, file_id)
    return {"id": file_id, "object": "file", "deleted": True}


@for_openai("GET", "/files/{file_id}/content", "Read a file's content", answer=JSONL_TYPE, errors=(206, 404, 416))
async def content(request: Request) -> Response:
    """Return a file's content, whole or by range."""
    services, tenant_id = await authenticate(request)
    call = call_of(request, services, tenant_id, b"")

    def work() -> Response:
        file = services.files.find(tenant_id, call.path["file_id"])
        store, file_id = services.files, file.file_id
        headers = {"etag": f'"{file.sha256}"'}  # the bytes never change
        stored = StoredFile(store.path(file_id), file.size_bytes, lambda: store.open(file_id))
        try:
            return file_response(request, stored, JSONL_TYPE, headers, file.filename)
        except FileNotFoundError:
            raise NotFoundError(f"file {file_id!r} was deleted during this request") from None

    return await run(work, on=services.threads.transfers)


def file_body(file: File) -> JsonObject:
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": int(file.created_at),
        "expires_at": None if file.expires_at is None else int(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }
