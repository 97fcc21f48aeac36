"""OpenAI's files: upload, list, read and delete. Batches read and write them.

An upload is a multipart form of one file and a few short fields. The server spools it to disk chunk by chunk, and
stores it once it is complete and valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, cast

import orjson
from pydantic import Field
from starlette.datastructures import FormData, UploadFile
from starlette.responses import Response

from tinsmith.api.access import Access
from tinsmith.api.declaration import FORM_TYPE, ThreadPool
from tinsmith.api.openapi import FLAG, TEXT, fields, for_openai, integer, one_of, ref
from tinsmith.api.queries import Order
from tinsmith.api.request import Call, JsonObject, run
from tinsmith.api.routes.downloads import StoredFile, file_response
from tinsmith.api.routes.uploads import read_form
from tinsmith.api.services import Services
from tinsmith.auth.quotas import Reservation
from tinsmith.batch.openai.requests import check_file
from tinsmith.errors import NotFoundError, RequestError, TooLargeError
from tinsmith.storage.stores import read_chunks
from tinsmith.store.files import BATCH, BATCH_OUTPUT, File, new_id
from tinsmith.wire.bodies import JSON_TYPE
from tinsmith.wire.fields import Body, ClosedBody, OneOf, Query, Schema, Text, show, validate

JSONL_TYPE = "application/jsonl"
MAX_NAME = 512
MAX_LIMIT = 10_000
DAY_S = 86400
RETENTION_S = 30 * DAY_S
MIN_RETENTION_S, MAX_RETENTION_S = 3600, 30 * DAY_S
EXTENSIONS = (".jsonl",)
MAX_SHOWN = 5
"""The most lines of a refused upload that are named."""
UPLOAD = fields(
    {"file": {"type": "string", "format": "binary"}, "purpose": one_of(BATCH)},
    {
        "expires_after[anchor]": one_of("created_at"),
        "expires_after[seconds]": integer(MIN_RETENTION_S, MAX_RETENTION_S),
    },
)
FILES = fields({"data": {"type": "array", "items": ref("File")}, "has_more": FLAG})


class FilesQuery(Query):
    limit: Annotated[int, Field(ge=1, le=MAX_LIMIT)] = MAX_LIMIT
    after: Text | None = None
    order: Order = "desc"
    purpose: Annotated[str, OneOf((BATCH, BATCH_OUTPUT))] | None = None


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
async def upload(call: Call) -> Response:
    services, tenant_id, request = call.services, call.tenant_id, call.request
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
    _check_requests(file, services.settings.max_body_bytes)
    reservation.cover(size_bytes)
    stored = services.files.store(new_id(), read_chunks(file.file))
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


def _check_requests(file: UploadFile, max_line_bytes: int) -> None:
    """Raises RequestError for a file that no batch would take."""
    checked = check_file(file.file, file.size or 0, max_line_bytes)
    file.file.seek(0)
    if checked.problems:
        message = f"the file is no batch's: {'; '.join(map(str, checked.problems[:MAX_SHOWN]))}"
        raise RequestError("file", message, checked.problems[0].code)


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
    query=FilesQuery,
    filters=("?after={file_id}",),
)
def listing(call: Call, query: FilesQuery) -> JsonObject:
    is_ascending = query.order == "asc"
    files, has_more = call.services.files.page(
        call.tenant_id, query.limit, after=query.after, ascending=is_ascending, purpose=query.purpose
    )
    return page([file_body(file) for file in files], has_more)


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


@for_openai(
    "GET",
    "/files/{file_id}/content",
    "Read a file's content",
    answer=JSONL_TYPE,
    errors=(206, 404, 416),
    threads=ThreadPool.TRANSFERS,
)
def content(call: Call) -> Response:
    """Return a file's content, whole or by range."""
    store = call.services.files
    file = store.find(call.tenant_id, call.path["file_id"])
    file_id, headers = file.file_id, {"etag": f'"{file.sha256}"'}  # the bytes never change
    stored = StoredFile(store.path(file_id), file.size_bytes, lambda: store.open(file_id))
    try:
        return file_response(call.request, stored, JSONL_TYPE, headers, file.filename)
    except FileNotFoundError:
        raise NotFoundError(f"file {file_id!r} was deleted during this request") from None


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
