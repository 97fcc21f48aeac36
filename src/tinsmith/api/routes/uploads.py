"""Uploads an adapter as a training checkpoint.

The request is a multipart form of PEFT's two files, optional optimizer state and a few short fields. It is spooled to
disk as it arrives. The metadata is validated before the upload becomes a checkpoint, the tensors by the engine that
loads it. Like a copy, the checkpoint belongs to a training run that is created for it and cannot be trained. The run's
id is derived from `X-Idempotency-Key`, so a repeated request finds the existing upload.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import IO, cast

import orjson
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response

from tinsmith.api.access import Access
from tinsmith.api.declaration import FORM_TYPE, operation
from tinsmith.api.openapi import COUNT, TEXT, fields
from tinsmith.api.request import Call, run
from tinsmith.api.routes.checkpoints import already_exists, idempotent_session
from tinsmith.api.routes.sessions import ProjectId
from tinsmith.auth.quotas import Reservation
from tinsmith.errors import RequestError, TooLargeError, UnsupportedMediaError, UserError
from tinsmith.storage.stores import CHUNK_BYTES
from tinsmith.store.audit import entry
from tinsmith.store.checkpoints import Checkpoint, CheckpointRef, NewCheckpoint, check_name
from tinsmith.store.models import copy_insertion
from tinsmith.store.usage import usage_increments
from tinsmith.types import LORA_ALPHA, LoraSpec, ModelShape
from tinsmith.wire.adapter_files import (
    CONFIG_FILE,
    UPLOAD_FILES,
    WEIGHTS_FILE,
    AdapterInfo,
    check_fits,
    optimizer_type,
    read_adapter,
)
from tinsmith.wire.bodies import JSON_TYPE, check_length, read_media_type
from tinsmith.wire.fields import (
    MAX_METADATA_BYTES,
    Body,
    Schema,
    Text,
    TextMetadata,
    json_schemas,
    read_object,
    show,
    validate,
)
from tinsmith.wire.weights import LoraConfigBody, Ttl

MAX_FIELDS = 8
OVERHEAD_BYTES = 64 << 10
"""Most bytes of a form in addition to its files."""


async def read_form(
    request: Request,
    limit_bytes: int,
    too_large: Callable[[int], TooLargeError],
    *,
    max_files: int = 1,
    max_field_bytes: int = 4096,
    reservation: Reservation | None = None,
) -> FormData:
    """Read a form, which the caller must close. Raises UserError; `too_large` makes that for an oversized form.
    `reservation` covers the bytes as they arrive.
    """
    content_type = request.headers.get("content-type") or ""
    if read_media_type(content_type) != FORM_TYPE:
        raise UnsupportedMediaError(f"the header Content-Type is {content_type[:80]!a}; send {FORM_TYPE!r}")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaError("the form has a Content-Encoding; send it uncompressed")
    overhead_bytes = OVERHEAD_BYTES + MAX_FIELDS * max_field_bytes
    try:
        check_length(request.headers.get("content-length"), limit_bytes + overhead_bytes)
    except TooLargeError:
        raise too_large(limit_bytes) from None

    if reservation is not None:
        reservation.cover(int(request.headers.get("content-length") or 0) - overhead_bytes)

    async def limit_stream() -> AsyncGenerator[bytes, None]:
        size_bytes = 0
        async for chunk in request.stream():
            size_bytes += len(chunk)
            if size_bytes > limit_bytes + overhead_bytes:
                raise too_large(limit_bytes)
            if reservation is not None:
                reservation.cover(size_bytes - overhead_bytes)
            yield chunk

    parser = MultiPartParser(
        request.headers, limit_stream(), max_files=max_files, max_fields=MAX_FIELDS, max_part_size=max_field_bytes
    )
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise RequestError("file", f"the body is not a readable form: {error.message}") from None


UPLOAD_IDS = uuid.UUID("0d2c0a1c-54a1-5b8f-8f0e-9a4d4b6f7e20")  # the namespace of the ids of uploads


class UploadRequest(Body):
    """The short fields of the form."""

    base_model: Text
    name: Text
    project_id: ProjectId | None = None
    ttl_seconds: Ttl | None = None
    user_metadata: TextMetadata | None = None


Opener = Callable[[], AbstractContextManager[IO[bytes]]]

_FILE: Schema = {"type": "string", "format": "binary"}
_TEXTS = cast("dict[str, Schema]", json_schemas(UploadRequest)["UploadRequest"]["properties"])
FORM: Schema = {
    "type": "object",
    "required": [CONFIG_FILE, WEIGHTS_FILE, "base_model", "name"],
    "properties": {**dict.fromkeys(UPLOAD_FILES, _FILE), **_TEXTS, "user_metadata": TEXT},
}


@operation(
    "POST",
    "/upload_weights",
    "Store an adapter as a checkpoint",
    body=FORM,
    takes=(FORM_TYPE,),
    answer=fields({"tinker_path": TEXT, "base_model": TEXT, "lora_rank": COUNT, "size_bytes": COUNT}),
    errors=(404, 429),
    access=Access.NOTHING,
)
async def upload(call: Call) -> Response:
    services, request = call.services, call.request
    limit_bytes = services.settings.max_upload_bytes
    with await run(services.quotas.reserve_checkpoint, call.tenant_id) as reservation:
        limits = {"max_files": len(UPLOAD_FILES), "max_field_bytes": MAX_METADATA_BYTES}
        form = await read_form(request, limit_bytes, _too_large, **limits, reservation=reservation)
        try:
            stored = await run(_store_form, call, form, reservation, on=services.threads.transfers)
            return Response(stored, media_type=JSON_TYPE)
        finally:
            await form.close()  # deletes the spooled files


def _store_form(call: Call, form: FormData, reservation: Reservation) -> bytes:
    request, files = _read(form)
    reservation.cover(sum(file.size or 0 for file in files.values()))
    openers = {name: (lambda file=file: nullcontext(file.file)) for name, file in files.items()}
    checkpoint = store_adapter(call, request, idempotent_session(call, UPLOAD_IDS), openers)
    return orjson.dumps(
        {
            "tinker_path": checkpoint.ref.path,
            "base_model": checkpoint.base_model,
            "lora_rank": checkpoint.lora_rank,
            "size_bytes": checkpoint.size_bytes,
        }
    )


def store_adapter(
    call: Call,
    request: UploadRequest,
    session_id: str,
    files: Mapping[str, Opener],
    lora_config: LoraConfigBody | None = None,
) -> Checkpoint:
    """Store an adapter, whose bytes are reserved, as the checkpoint of a new run. The same `session_id` returns the
    same checkpoint. Raises UserError if the files are not an adapter of the base model, or not that of `lora_config`.
    """
    services = call.services
    shape = services.bases.get(request.base_model)
    ref = CheckpointRef(f"{session_id}:train:0", "weights", request.name)
    reason = f"uploaded as {request.name}"
    if not already_exists(services.models.find(ref.training_run_id), reason):
        directory, size_bytes, adapter, optimizer_type = _write_adapter(call, files, shape, lora_config)
        save_fields = optimizer_type or "adamw", request.user_metadata, request.ttl_seconds
        new = NewCheckpoint(ref, call.tenant_id, shape.name, adapter.spec, *save_fields)
        effects = [
            *usage_increments(call.tenant_id, session_id, shape.name, "checkpoint", 1),
            entry(call.tenant_id, "checkpoint_uploaded", {"tinker_path": ref.path, "size_bytes": size_bytes}),
        ]
        new_run = copy_insertion(new.run(session_id), request.project_id, reason)
        if not services.checkpoints.add(new, directory, size_bytes, new_run, *effects):
            already_exists(services.models.find(ref.training_run_id), reason)
    return services.checkpoints.get(call.tenant_id, ref)


def _write_adapter(
    call: Call, files: Mapping[str, Opener], shape: ModelShape, lora_config: LoraConfigBody | None
) -> tuple[str, int, AdapterInfo, str | None]:
    """Validate and write the files. Returns name, size, adapter and optimizer type. Raises UserError."""
    adapters_read: list[tuple[AdapterInfo, str | None]] = []

    def fill(directory: Path) -> None:
        for name, opener in files.items():
            with (directory / name).open("xb") as target, opener() as source:
                shutil.copyfileobj(source, target, CHUNK_BYTES)
        adapter = read_adapter(directory, plain=True)
        if (
            lora_config is not None
            and (requested_spec := replace(lora_config.spec(adapter.alpha), seed=None)) != adapter.spec
        ):
            raise UserError(
                f"lora_config is {_describe_lora(requested_spec)}, but the files hold {_describe_lora(adapter.spec)}"
            )
        check_fits(adapter, Path(shape.path))
        adapters_read.append((adapter, optimizer_type(directory)))

    directory, size_bytes = call.services.checkpoints.files.write(fill)
    return directory, size_bytes, *adapters_read[0]


def _describe_lora(spec: LoraSpec) -> str:
    groups = [name for name in ("attn", "mlp", "unembed") if getattr(spec, f"train_{name}")]
    alpha = "" if spec.alpha == LORA_ALPHA else f" with alpha {spec.alpha:g}"
    return f"rank {spec.rank} of {', '.join(groups)}{alpha}"


def _read(form: FormData) -> tuple[UploadRequest, Mapping[str, UploadFile]]:
    """Return the fields and files of the form. Raises UserError, which names the missing, unknown or wrong part."""
    names = {*UPLOAD_FILES, *UploadRequest.model_fields}
    if unknown := sorted(set(form) - names):
        raise UserError(f"the form has an unknown field {show(unknown[0])}; use {', '.join(sorted(names))}")
    texts: dict[str, object] = {}
    files: dict[str, UploadFile] = {}
    for name, value in form.multi_items():
        if name in texts or name in files:
            raise UserError(f"the form has {name} twice")
        if isinstance(value, UploadFile) != (name in UPLOAD_FILES):
            raise UserError(f"{name} must be a {'file' if name in UPLOAD_FILES else 'text'} part of the form")
        if isinstance(value, UploadFile):
            files[name] = value
        else:
            texts[name] = value
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if name not in files:
            raise UserError(
                f"the form has no file {name!r}; an adapter in PEFT's format has {CONFIG_FILE} and {WEIGHTS_FILE}"
            )
    if (seconds := texts.get("ttl_seconds")) is not None:
        if not (isinstance(seconds, str) and seconds.isascii() and seconds.isdigit() and len(seconds) < 12):
            raise UserError(f"ttl_seconds is {show(seconds)}; it must be a number of seconds")
        texts["ttl_seconds"] = int(seconds)
    if (metadata := texts.get("user_metadata")) is not None:
        try:
            texts["user_metadata"] = read_object(str(metadata).encode(errors="replace"))
        except UserError as error:
            raise UserError(f"user_metadata: {error}") from None
    request = validate(UploadRequest, texts)
    check_name(request.name)
    return request, files


def _too_large(limit_bytes: int) -> TooLargeError:
    return TooLargeError(
        f"the adapter is larger than {limit_bytes} bytes; leave the optimizer's state out, or raise the server's "
        "setting max_upload_bytes"
    )
