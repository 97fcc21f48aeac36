"""Merges and uploads of checkpoints by the server: started, followed, cancelled, repeated, downloaded and deleted.

Only the tenant of a checkpoint starts jobs of it, also if it is published. The operator's HF_TOKEN is used for the
tenants of TINSMITH_OPERATOR_TENANTS (on a server without keys: for everyone); others send a token with the job, which
stays in memory until the job ends. The files of a result are named by its row, never by the client.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field
from starlette.responses import Response, StreamingResponse

from tinsmith.api.access import Access
from tinsmith.api.declaration import ThreadPool, operation
from tinsmith.api.links import sign_link
from tinsmith.api.openapi import (
    COUNT,
    FILE_TYPE,
    FLAG,
    LINKED,
    LIST,
    NUMBER,
    TAR_TYPE,
    TEXT,
    fields,
    linked,
    one_of,
    ref,
)
from tinsmith.api.queries import Limit, PageQuery
from tinsmith.api.request import Call, JsonObject
from tinsmith.api.routes.checkpoints import CHECKPOINT, ref_of
from tinsmith.api.routes.downloads import StoredFile, file_response, pack_tar, tar_bytes
from tinsmith.errors import GoneError, NotFoundError, RequestError, UserError
from tinsmith.settings.environment import hub_token
from tinsmith.store.checkpoint_jobs import (
    CANCELLED,
    DONE,
    FAILED,
    FORMS,
    INTERRUPTED,
    MERGE,
    UNFINISHED,
    UPLOAD,
    CheckpointJob,
    NewCheckpointJob,
)
from tinsmith.store.checkpoints import Checkpoint
from tinsmith.wire.fields import NO_NUL, ClosedBody, OneOf, iso

DTYPES = ("auto", "float32", "bfloat16", "float16")
REPOSITORY = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}$"
TOKEN = r"^[\x21-\x7e]+$"
JOB = "/checkpoint_jobs/{checkpoint_job_id}"
PURPOSE = "checkpoint_job"
DOWNLOAD = "/merged/{checkpoint_job_id}"

JOB_SCHEMA = fields(
    {
        "job_id": TEXT,
        "tinker_path": TEXT,
        "base_model": TEXT,
        "kind": one_of(MERGE, UPLOAD),
        "form": one_of(*FORMS),
        "dtype": one_of(*DTYPES),
        "state": one_of(*UNFINISHED, DONE, FAILED, CANCELLED, INTERRUPTED),
        "phase": TEXT,
        "done": COUNT,
        "total": COUNT,
        "done_bytes": COUNT,
        "total_bytes": COUNT,
        "created_at": TEXT,
        "private": FLAG,
        "needs_token": FLAG,
    },
    {
        "reason": TEXT,
        "repository": TEXT,
        "bytes_per_s": NUMBER,
        "remaining_s": NUMBER,
        "started_at": TEXT,
        "ended_at": TEXT,
        "directory": TEXT,
        "files": LIST,
        "size_bytes": COUNT,
        "url": TEXT,
    },
)
JOBS = {"type": "array", "items": JOB_SCHEMA}

_of_job = partial(operation, answer=JOB_SCHEMA, errors=(404,))
_download = partial(linked, "GET", purpose=PURPOSE, threads=ThreadPool.TRANSFERS)

Dtype = Annotated[str, OneOf(DTYPES)]
Token = Annotated[str, Field(max_length=512, pattern=TOKEN)]


class MergeCheckpointRequest(ClosedBody):
    """`dtype` auto keeps the base model's."""

    dtype: Dtype = "auto"


class UploadCheckpointRequest(ClosedBody):
    """`form` is the merged model, or the adapter alone. Without `token`, the server's HF_TOKEN is used."""

    repository: Annotated[str, Field(pattern=REPOSITORY)]
    form: Annotated[str, OneOf(FORMS)] = "model"
    dtype: Dtype = "auto"
    private: bool = True
    token: Token | None = None


class RestartCheckpointJobRequest(ClosedBody):
    """`token` is that of an upload, which the server has not stored."""

    token: Token | None = None


@operation(
    "POST",
    CHECKPOINT + "/merge",
    "Merge a checkpoint",
    body=MergeCheckpointRequest,
    answer=JOB_SCHEMA,
    errors=(404, 410, 429),
)
def merge(call: Call, request: MergeCheckpointRequest) -> JsonObject:
    checkpoint = _find_owned(call)
    new = NewCheckpointJob(
        call.tenant_id, checkpoint.ref.path, checkpoint.base_model, MERGE, "model", request.dtype, private=True
    )
    return describe_job(call.services.checkpoint_jobs.add(new))


@operation(
    "POST",
    CHECKPOINT + "/upload",
    "Upload a checkpoint to a hub",
    body=UploadCheckpointRequest,
    answer=JOB_SCHEMA,
    errors=(404, 410, 429),
    example={"repository": "someone/model", "token": "hf_of_someone"},
)
def upload(call: Call, request: UploadCheckpointRequest) -> JsonObject:
    checkpoint = _find_owned(call)
    _require_token(call, request.token)
    new = NewCheckpointJob(
        call.tenant_id,
        checkpoint.ref.path,
        checkpoint.base_model,
        UPLOAD,
        request.form,
        request.dtype,
        request.repository,
        request.private,
        request.token is not None,
    )
    return describe_job(call.services.checkpoint_jobs.add(new, request.token))


class CheckpointJobsQuery(PageQuery):
    """`tinker_path` is a checkpoint."""

    limit: Limit = 50
    tinker_path: Annotated[str, Field(max_length=512, pattern=NO_NUL)] | None = None


@operation(
    "GET",
    "/checkpoint_jobs",
    "List merges and uploads",
    answer=fields(
        {
            "checkpoint_jobs": JOBS,
            "cursor": ref("Cursor"),
            "result_bytes": COUNT,
            "has_server_token": FLAG,
        }
    ),
    query=CheckpointJobsQuery,
    access=Access.LISTING,
    filters=("?tinker_path={tinker_path}",),
)
def list_jobs(call: Call, query: CheckpointJobsQuery) -> JsonObject:
    """`result_bytes` is the size of all the tenant's merged models."""
    jobs, total = call.services.checkpoint_jobs.page(call.tenant_id, query.limit, query.offset, query.tinker_path)
    return {
        "checkpoint_jobs": [describe_job(job) for job in jobs],
        "cursor": {"offset": query.offset, "limit": query.limit, "total_count": total},
        "result_bytes": call.services.checkpoint_jobs.result_bytes(call.tenant_id),
        "has_server_token": _may_use_server_token(call),
    }


@_of_job("GET", JOB, "Read a merge or an upload")
def read_job(call: Call) -> JsonObject:
    return describe_job(_find_job(call))


@_of_job("POST", JOB + "/cancel", "Cancel a merge or an upload")
def cancel(call: Call) -> JsonObject:
    return describe_job(call.services.checkpoint_jobs.cancel(call.tenant_id, call.path["checkpoint_job_id"]))


@_of_job(
    "POST", JOB + "/restart", "Start a merge or an upload again", body=RestartCheckpointJobRequest, errors=(404, 429)
)
def restart(call: Call, request: RestartCheckpointJobRequest) -> JsonObject:
    job = _find_job(call)
    if job.kind == UPLOAD:
        _require_token(call, request.token)
    elif request.token is not None:
        raise RequestError("token", "token is that of an upload, and the job is a merge; leave it out")
    return describe_job(call.services.checkpoint_jobs.restart(call.tenant_id, job.job_id, request.token))


@_of_job("DELETE", JOB, "Delete a merge or an upload", answer={"type": "object"})
def delete(call: Call) -> JsonObject:
    job = call.services.checkpoint_jobs.delete(call.tenant_id, call.path["checkpoint_job_id"])
    if job.directory is not None:  # a leftover of a failed deletion ends with the server's next start
        shutil.rmtree(job.directory, ignore_errors=True)
    return {}


@_of_job(
    "GET",
    JOB + "/links",
    "Get links to the files of a merged model",
    answer=fields({"archive": TEXT, "files": {"type": "object", "additionalProperties": TEXT}, "expires": TEXT}),
    errors=(404, 410),
)
def links(call: Call) -> JsonObject:
    job = _find_job(call)
    root = f"/merged/{job.job_id}"
    archive = sign_link(call, PURPOSE, f"{root}/archive")
    names = sorted(_open_result(job)[1])
    return {
        "archive": archive.url,
        "files": {name: sign_link(call, PURPOSE, f"{root}/files/{name}").url for name in names},
        "expires": iso(archive.expires_s),
    }


@_download(DOWNLOAD + "/archive", "Download a merged model", answer=TAR_TYPE)
def download_archive(call: Call) -> Response:
    """Send a tar that is built while it is sent."""
    job, (directory, sizes) = _find_linked(call)
    run = job.tinker_path.removeprefix("tinker://").replace("/", "_").replace(":", "_")
    headers = {
        "content-length": str(tar_bytes(sizes)),
        "content-disposition": f'attachment; filename="{run}_merged.tar"',
    }
    # All files are open from the start, so that a deletion meanwhile changes nothing.
    is_head = call.request.method == "HEAD"
    content = () if is_head else pack_tar({name: (directory / name).open("rb") for name in sizes}, sizes)
    return StreamingResponse(content, headers=headers, media_type=TAR_TYPE)


@_download(
    DOWNLOAD + "/files/{file:path}",
    "Download a file of a merged model",
    answer=FILE_TYPE,
    errors=(206, 416, *LINKED),
)
def download_file(call: Call) -> Response:
    """Send one file, whole or by range."""
    _, (directory, sizes) = _find_linked(call)
    name = call.path["file"]
    if name not in sizes:
        raise NotFoundError(f"the merged model has no file {name[:200]!a}")
    path = directory / name
    stored = StoredFile(path, sizes[name], lambda: path.open("rb"))
    return file_response(call.request, stored, FILE_TYPE, filename=path.name)


def describe_job(job: CheckpointJob) -> JsonObject:
    descriptions = (
        "job_id",
        "tinker_path",
        "base_model",
        "kind",
        "form",
        "dtype",
        "state",
        "phase",
        "reason",
        "repository",
    )
    figures = ("done", "total", "done_bytes", "total_bytes", "bytes_per_s", "remaining_s", "size_bytes", "url")
    return {
        **{name: getattr(job, name) for name in (*descriptions, *figures, "private", "directory")},
        "needs_token": job.has_token,
        "files": [{"name": name, "size_bytes": size} for name, size in sorted((job.files or {}).items())] or None,
        "created_at": iso(job.created_at),
        "started_at": None if job.started_at is None else iso(job.started_at),
        "ended_at": None if job.ended_at is None else iso(job.ended_at),
    }


def _find_owned(call: Call) -> Checkpoint:
    """The caller's own checkpoint with an adapter. Raises NotFoundError, also for one that another tenant published."""
    checkpoint = call.services.checkpoints.get(call.tenant_id, ref_of(call))
    if checkpoint.tenant_id != call.tenant_id:
        raise NotFoundError(f"checkpoint {checkpoint.ref.path!r} belongs to another tenant")
    if checkpoint.lora_rank == 0:
        raise UserError(f"{checkpoint.ref.path} holds whole weights, which need no merge; download them")
    call.services.bases.get(checkpoint.base_model)
    return checkpoint


def _find_job(call: Call) -> CheckpointJob:
    return call.services.checkpoint_jobs.get(call.tenant_id, call.path["checkpoint_job_id"])


def _require_token(call: Call, token: str | None) -> None:
    if token is None and not _may_use_server_token(call):
        raise RequestError(
            "token", "token is missing: send one that may write to the hub; it is used for this job and not stored"
        )


def _may_use_server_token(call: Call) -> bool:
    """Whether uploads of the caller may use HF_TOKEN, with which they act as the operator."""
    is_operator = call.tenant_id in call.services.settings.operator_tenants
    return bool(hub_token()) and (is_operator or call.services.tenants.accepts_anyone())


def _find_linked(call: Call) -> tuple[CheckpointJob, tuple[Path, dict[str, int]]]:
    job = call.services.checkpoint_jobs.find_done(call.path["checkpoint_job_id"])
    if job is None:
        raise GoneError("the merged model was deleted")
    return job, _open_result(job)


def _open_result(job: CheckpointJob) -> tuple[Path, dict[str, int]]:
    """The directory of a result and its files. Raises GoneError if they are not on this server."""
    if job.directory is None or job.state != DONE:
        raise GoneError(f"the job is {job.state} and has no files; only a merge that is done has some")
    directory, sizes = Path(job.directory), dict(job.files or {})
    for name, size in sizes.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != size:
            raise GoneError(
                f"{name} is not in {job.directory}; the merge ran on the server {job.holder.partition(':')[0]!r}: "
                "download it there, or delete the result and merge again"
            )
    return directory, sizes
