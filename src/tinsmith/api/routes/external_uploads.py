"""Uploads of an adapter by signed links: start, one PUT per file, finish.

The files are those of an export. An upload's id is a signed text with its parameters. Its files have rows from the
start, so that their bytes count against the tenant's quota of checkpoint bytes, and the janitor deletes those of an
abandoned upload. The id and the links expire after an hour. A repeated finish finds the existing checkpoint.
"""

from __future__ import annotations

import tempfile
import time
import uuid

from starlette.responses import Response

from tinsmith.api.access import Access
from tinsmith.api.declaration import operation
from tinsmith.api.links import LINK_S, sign_link
from tinsmith.api.openapi import ANYTHING, FILE_TYPE, TEXT, fields, linked
from tinsmith.api.request import Call, JsonObject, json_response, run
from tinsmith.api.routes.checkpoints import already_exists
from tinsmith.api.routes.sessions import ProjectId
from tinsmith.api.routes.uploads import UploadRequest, store_adapter
from tinsmith.errors import GoneError, NotFoundError, TooLargeError, UserError
from tinsmith.storage.stores import read_chunks
from tinsmith.wire.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from tinsmith.wire.bodies import check_length
from tinsmith.wire.fields import Body, ClosedBody, Text, iso
from tinsmith.wire.weights import LoraConfigBody

FILES = (CONFIG_FILE, WEIGHTS_FILE)
NAME = "uploaded"
PURPOSE, ID_PURPOSE = "upload", "upload-id"
UPLOAD_IDS = uuid.UUID("5e0c3f8a-2f59-5a0e-8d0b-3b6f7f0f9d51")  # the namespace of the runs of these uploads


class StartUploadRequest(ClosedBody):
    base_model: Text
    lora_config: LoraConfigBody
    destination_project_id: ProjectId | None = None


class ExternalUpload(Body):
    """The parameters inside an upload's id."""

    tenant_id: Text
    number: Text
    expires_s: int
    base_model: Text
    lora_config: LoraConfigBody
    project_id: Text | None = None


@operation(
    "POST",
    "/external_weights_upload_start",
    "Start an upload and get its links",
    body=StartUploadRequest,
    answer=fields({"upload_id": TEXT, "urls": {"type": "object", "additionalProperties": TEXT}, "expires": TEXT}),
    errors=(404, 429),
    access=Access.NOTHING,
)
def start(call: Call, request: StartUploadRequest) -> JsonObject:
    call.services.bases.get(request.base_model)
    upload = ExternalUpload(
        tenant_id=call.tenant_id,
        number=uuid.uuid4().hex,
        expires_s=int(time.time()) + LINK_S,
        base_model=request.base_model,
        lora_config=request.lora_config,
        project_id=request.destination_project_id,
    )
    call.services.quotas.admit_checkpoint(call.tenant_id)
    call.services.files.begin_upload(
        call.tenant_id, [_file_key(upload.number, name) for name in FILES], upload.expires_s
    )
    links = {name: sign_link(call, PURPOSE, f"/external_weights_uploads/{upload.number}/{name}") for name in FILES}
    return {
        "upload_id": call.services.signer.sign(ID_PURPOSE, upload.model_dump()),
        "urls": {name: link.url for name, link in links.items()},
        "expires": iso(upload.expires_s),
    }


@linked(
    "PUT",
    "/external_weights_uploads/{number}/{file}",
    "Upload one file",
    body=ANYTHING,
    takes=(FILE_TYPE,),
    answer=ANYTHING,
    purpose=PURPOSE,
)
async def put(call: Call) -> Response:
    """Store one file of an upload atomically. A repeated PUT replaces it."""
    services, request = call.services, call.request
    limit_bytes = services.settings.max_upload_bytes
    try:
        check_length(request.headers.get("content-length"), limit_bytes)
    except TooLargeError:
        raise _too_large(limit_bytes) from None
    key = _file_key(call.path["number"], call.path["file"])
    uploader = await run(services.files.uploader, key)
    if uploader is None:
        raise GoneError("this upload has ended or expired; start another one")
    tenant_id, earlier_bytes = uploader
    reservation = await run(services.quotas.reserve_checkpoint, tenant_id)
    with reservation, tempfile.TemporaryFile() as spool:
        # A repeated PUT replaces bytes that are counted already.
        reservation.cover(int(request.headers.get("content-length") or 0) - earlier_bytes)
        size_bytes = 0
        async for chunk in request.stream():
            size_bytes += len(chunk)
            if size_bytes > limit_bytes:
                raise _too_large(limit_bytes)
            reservation.cover(size_bytes - earlier_bytes)
            await run(spool.write, chunk, on=services.threads.transfers)
        spool.seek(0)
        stored = await run(services.files.store, key, read_chunks(spool), on=services.threads.transfers)
        if not await run(services.files.record_upload, stored):
            raise GoneError("this upload has ended or expired; start another one")
    return json_response({})


class FinishUploadRequest(ClosedBody):
    upload_id: Text


@operation(
    "POST",
    "/external_weights_upload_finish",
    "Finish an upload",
    body=FinishUploadRequest,
    answer=fields({"tinker_path": TEXT}),
    errors=(404, 410, 429),
    example={"upload_id": "{upload_id}"},
)
def finish(call: Call, request: FinishUploadRequest) -> JsonObject:
    upload = _read(call, request.upload_id)
    session_id = str(uuid.uuid5(UPLOAD_IDS, upload.number))
    files = call.services.files
    if not already_exists(call.services.models.find(f"{session_id}:train:0"), f"uploaded as {NAME}"):
        if time.time() >= upload.expires_s:
            raise GoneError("this upload has expired; start another one")
        for name in FILES:
            try:
                files.open(_file_key(upload.number, name)).close()
            except FileNotFoundError:
                raise UserError(f"{name} was not uploaded; PUT it to its link before you finish the upload") from None
    openers = {name: (lambda name=name: files.open(_file_key(upload.number, name))) for name in FILES}
    upload_request = UploadRequest(base_model=upload.base_model, name=NAME, project_id=upload.project_id)
    checkpoint = store_adapter(call, upload_request, session_id, openers, upload.lora_config)
    files.end_upload([_file_key(upload.number, name) for name in FILES])
    return {"tinker_path": checkpoint.ref.path}


def _read(call: Call, upload_id: str) -> ExternalUpload:
    claims = call.services.signer.read(ID_PURPOSE, upload_id, ("tenant_id", "number", "expires_s"))
    if claims is not None:
        upload = ExternalUpload.model_validate(claims)
        if upload.tenant_id == call.tenant_id:
            return upload
    raise NotFoundError("this upload_id does not exist; external_weights_upload_start makes one")


def _file_key(upload_number: str, file: str) -> str:
    return f"upload-{upload_number}-{file.partition('.')[0]}"  # at most 64 characters


def _too_large(limit_bytes: int) -> TooLargeError:
    return TooLargeError(f"the file is larger than {limit_bytes} bytes; raise the server's setting max_upload_bytes")
