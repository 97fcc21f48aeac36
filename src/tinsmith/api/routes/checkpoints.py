"""Checkpoints and training runs: listing, metadata, TTL, publishing, deletion, and copies.

A copy is stored in a project, or in a run of the caller's session. It belongs to a training run that is created for it
and cannot be trained. The run's id is derived from the request (the session's model_seq_id, or the idempotency key), so
a repeated request finds the existing copy.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from pydantic import Field

from tinsmith.api.access import Access
from tinsmith.api.declaration import operation
from tinsmith.api.openapi import ANYTHING, FLAG, TEXT, fields, listing, ref
from tinsmith.api.queries import Limit, PageQuery, ProjectQuery, RunsQuery, ScopeQuery
from tinsmith.api.request import Call, JsonObject, idempotency_key
from tinsmith.api.routes.sessions import MAX_PAGE as MAX_SEARCHED
from tinsmith.api.routes.sessions import MAX_PROJECTS, ProjectId, SearchOwnerBody, includes_caller
from tinsmith.api.routes.weights import granting_tenant
from tinsmith.auth import user_urn
from tinsmith.errors import NotFoundError, UserError
from tinsmith.store.audit import entry
from tinsmith.store.checkpoints import KINDS, Checkpoint, CheckpointRef, CheckpointSearch, NewCheckpoint, parse_path
from tinsmith.store.models import Model, copy_insertion
from tinsmith.store.usage import usage_increments
from tinsmith.wire.fields import Body, ClosedBody, OneOf, Position, Text, TextMetadata, iso, parse_time, show
from tinsmith.wire.weights import Ttl, optimizer_config

# Maps the middle segment of a path to the type that the SDK shows.
CHECKPOINT_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}

RUN = "/training_runs/{run_id}"
CHECKPOINT = RUN + "/checkpoints/{kind}/{name}"
BARE_CHECKPOINT = RUN + "/checkpoints/{checkpoint_id}"
CHECKPOINTS = {"type": "array", "items": ref("Checkpoint")}


@listing(
    "/training_runs",
    "List training runs, newest first",
    answer=fields({"training_runs": {"type": "array", "items": ref("TrainingRun")}, "cursor": ref("Cursor")}),
    query=RunsQuery,
)
def list_training_runs(call: Call, query: RunsQuery) -> JsonObject:
    models, total = call.services.models.page(call.tenant_id, query.limit, query.offset, query.project_id)
    return {
        "training_runs": [_run(call, model) for model in models],
        "cursor": {"offset": query.offset, "limit": query.limit, "total_count": total},
    }


@operation("GET", RUN, "Read a training run", answer=ref("TrainingRun"), query=ScopeQuery)
def get_training_run(call: Call, _query: ScopeQuery) -> JsonObject:
    return _run(call, call.services.models.get(call.tenant_id, call.path["run_id"]))


@operation("GET", RUN + "/checkpoints", "List a run's checkpoints", answer=fields({"checkpoints": CHECKPOINTS}))
def list_run_checkpoints(call: Call) -> JsonObject:
    model = call.services.models.get(call.tenant_id, call.path["run_id"])
    checkpoints = call.services.checkpoints.of_run(call.tenant_id, model.model_id)
    return {"checkpoints": [describe_checkpoint(checkpoint) for checkpoint in checkpoints]}


class CheckpointsQuery(PageQuery, ProjectQuery):
    limit: Limit = 100


@listing(
    "/checkpoints",
    "List checkpoints, newest first",
    answer=fields({"checkpoints": CHECKPOINTS, "cursor": ref("Cursor")}),
    query=CheckpointsQuery,
)
def list_checkpoints(call: Call, query: CheckpointsQuery) -> JsonObject:
    checkpoints, total = call.services.checkpoints.page(call.tenant_id, query.limit, query.offset, query.project_id)
    return {
        "checkpoints": [describe_checkpoint(checkpoint) for checkpoint in checkpoints],
        "cursor": {"offset": query.offset, "limit": query.limit, "total_count": total},
    }


SEARCH = "/checkpoints/search"
"""The path of SDK 0.39's `search_checkpoints`, chosen by analogy with the session search."""


class CheckpointCursorBody(Body):
    last_created_at: Annotated[Text, Field(json_schema_extra={"format": "date-time"})]
    last_checkpoint_uuid: Annotated[Text, Field(json_schema_extra={"format": "uuid"})]


class SearchCheckpointsRequest(ClosedBody):
    """Every filter narrows the search; an empty list of `base_models` or `project_ids` finds nothing."""

    project_ids: Annotated[list[Text], Field(max_length=MAX_PROJECTS, fail_fast=True)] | None = None
    base_models: Annotated[list[Text], Field(max_length=MAX_PROJECTS, fail_fast=True)] | None = None
    user_metadata: TextMetadata | None = None
    checkpoint_type: Annotated[str, OneOf(tuple(CHECKPOINT_TYPES.values()))] | None = None
    owner: SearchOwnerBody = SearchOwnerBody()
    limit: Annotated[int, Field(ge=1, le=MAX_SEARCHED)] = 50
    cursor: CheckpointCursorBody | None = None


@operation(
    "POST",
    SEARCH,
    "Search checkpoints",
    body=SearchCheckpointsRequest,
    answer=fields({"checkpoints": CHECKPOINTS}, {"next_cursor": ANYTHING}),
    errors=(404,),
    access=Access.LISTING,
    filters=({"user_metadata": {}},),
)
def search_checkpoints(call: Call, request: SearchCheckpointsRequest) -> JsonObject:
    project_ids = set(call.services.sessions.projects(call.tenant_id)) if request.project_ids else set()
    if unknown := [project_id for project_id in request.project_ids or () if project_id not in project_ids]:
        raise NotFoundError(f"project_ids has {show(unknown[0])}, which is not one of your projects")
    kinds = [kind for kind, sdk_type in CHECKPOINT_TYPES.items() if request.checkpoint_type in (None, sdk_type)]
    search = CheckpointSearch(
        kinds=kinds,
        base_models=request.base_models,
        project_ids=request.project_ids,
        user_metadata=request.user_metadata or {},
        limit=request.limit,
        after=_cursor(call, request.cursor),
    )
    if not includes_caller(request.owner, call.tenant_id):
        return {"checkpoints": [], "next_cursor": None}
    checkpoints, has_more = call.services.checkpoints.search(call.tenant_id, search)
    last = checkpoints[-1] if has_more else None
    cursor = last and {"last_created_at": iso(last.created_at), "last_checkpoint_uuid": str(uuid.UUID(last.directory))}
    return {"checkpoints": [describe_checkpoint(checkpoint) for checkpoint in checkpoints], "next_cursor": cursor}


def _cursor(call: Call, cursor: CheckpointCursorBody | None) -> tuple[float, str] | None:
    """Return the position after the last checkpoint of a page. The exact time comes from the checkpoint's row, if it
    still exists, because the wire has only microseconds.
    """
    if cursor is None:
        return None
    created_at = parse_time("cursor.last_created_at", cursor.last_created_at)
    try:
        directory = uuid.UUID(cursor.last_checkpoint_uuid).hex
    except ValueError:
        uuid_text = show(cursor.last_checkpoint_uuid)
        raise UserError(f"cursor.last_checkpoint_uuid is {uuid_text}; send the next_cursor of a page") from None
    exact = call.services.checkpoints.creation_time(call.tenant_id, directory)
    return (created_at if exact is None else exact), directory


class WeightsInfoRequest(Body):
    tinker_path: Text


@operation(
    "POST",
    "/weights_info",
    "Describe an adapter",
    body=WeightsInfoRequest,
    answer=fields({"base_model": TEXT, "is_lora": FLAG}),
    errors=(404, 410),
)
def weights_info(call: Call, request: WeightsInfoRequest) -> JsonObject:
    checkpoint = call.services.checkpoints.get(call.tenant_id, parse_path(request.tinker_path, "tinker_path"))
    return {
        "base_model": checkpoint.base_model,
        "is_lora": checkpoint.lora_rank > 0,
        "optimizer_config": optimizer_config(checkpoint.optimizer_type),
        "lora_rank": checkpoint.lora_rank or None,
        "lora_alpha": checkpoint.lora_alpha if checkpoint.lora_rank else None,
        "train_unembed": checkpoint.train_unembed,
        "train_mlp": checkpoint.train_mlp,
        "train_attn": checkpoint.train_attn,
    }


_of_checkpoint = partial(operation, answer=ANYTHING, errors=(404, 410))


@_of_checkpoint("DELETE", CHECKPOINT, "Delete a checkpoint")
def delete(call: Call) -> JsonObject:
    call.services.checkpoints.delete(call.tenant_id, ref_of(call))
    return {}


@operation("DELETE", BARE_CHECKPOINT, "Refused: the id lacks its kind", answer=ANYTHING)
@operation("GET", BARE_CHECKPOINT + "/archive", "Refused: the id lacks its kind", answer=ANYTHING)
def without_kind(call: Call) -> JsonObject:
    """Refuse the request, since a run can have checkpoints of several kinds with the same name."""
    call.services.models.get(call.tenant_id, call.path["run_id"])
    bare = call.path["checkpoint_id"]
    raise UserError(
        f"checkpoint_id is {show(bare)}; it must be KIND/NAME, where KIND is one of {', '.join(KINDS)}, for example "
        f"'weights/{bare[:40]}'"
    )


@_of_checkpoint("POST", CHECKPOINT + "/publish", "Publish a checkpoint")
def publish(call: Call) -> JsonObject:
    call.services.checkpoints.set_public(call.tenant_id, ref_of(call), True)
    return {}


@_of_checkpoint("DELETE", CHECKPOINT + "/publish", "Unpublish a checkpoint")
def unpublish(call: Call) -> JsonObject:
    call.services.checkpoints.set_public(call.tenant_id, ref_of(call), False)
    return {}


class SetTtlRequest(Body):
    """Without `ttl_seconds`, the checkpoint never expires."""

    ttl_seconds: Ttl | None = None


@_of_checkpoint(
    "PUT", CHECKPOINT + "/ttl", "Set a checkpoint's expiry", body=SetTtlRequest, example={"ttl_seconds": 3600}
)
def set_ttl(call: Call, request: SetTtlRequest) -> JsonObject:
    call.services.checkpoints.set_ttl(call.tenant_id, ref_of(call), request.ttl_seconds)
    return {}


def ref_of(call: Call) -> CheckpointRef:
    """Return the checkpoint that the path names."""
    return parse_path("tinker://{run_id}/{kind}/{name}".format(**call.path))


def _run(call: Call, model: Model) -> JsonObject:
    newest: dict[str, JsonObject] = {}
    for checkpoint in call.services.checkpoints.of_run(call.tenant_id, model.model_id):  # newest first
        newest.setdefault(checkpoint.kind, describe_checkpoint(checkpoint))
    return {
        "training_run_id": model.model_id,
        "base_model": model.base_model,
        "model_owner": user_urn(model.tenant_id),
        "is_lora": model.lora_rank > 0,
        "corrupted": model.state == "failed",
        "lora_rank": model.lora_rank or None,
        "last_request_time": iso(model.last_request_at),
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": model.user_metadata,
    }


def describe_checkpoint(checkpoint: Checkpoint) -> JsonObject:
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": CHECKPOINT_TYPES[checkpoint.kind],
        "time": iso(checkpoint.created_at),
        "tinker_path": checkpoint.ref.path,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "base_model": checkpoint.base_model,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if checkpoint.expires_at is None else iso(checkpoint.expires_at),
    }


TOKEN_HEADER = "x-tinker-weights-access-token"
COPY_IDS = uuid.UUID("6b1f7f5e-3e0a-5c7e-9a53-5d0f7d1c2b11")  # the namespace of the ids of copies


@dataclass(frozen=True, slots=True)
class Destination:
    model_id: str
    session_id: str
    project_id: str | None


class CopyWeightsRequest(Body):
    """The destination is a project, or a run of a session."""

    source_path: Text
    session_id: Text | None = None
    model_seq_id: Position | None = None
    destination_project_id: ProjectId | None = None
    ttl_seconds: Ttl | None = None


@operation(
    "POST",
    "/copy_weights",
    "Copy a checkpoint",
    body=CopyWeightsRequest,
    answer=fields({"tinker_path": TEXT}),
    errors=(404, 410, 429),
    example={"source_path": "{tinker_path}", "destination_project_id": "p"},
)
def copy_weights(call: Call, request: CopyWeightsRequest) -> JsonObject:
    services, ttl_s = call.services, request.ttl_seconds
    source_ref = parse_path(request.source_path, "source_path")
    destination = _destination(call, request)
    reason = f"copied from {source_ref.path}"
    copy_ref = CheckpointRef(destination.model_id, source_ref.kind, source_ref.name)
    if not already_exists(services.models.find(destination.model_id), reason):
        token = call.headers.get(TOKEN_HEADER)
        granted_by = None if token is None else granting_tenant(call, token)
        source = services.checkpoints.get(call.tenant_id, source_ref, granted_by=granted_by)
        new = NewCheckpoint(
            ref=copy_ref,
            tenant_id=call.tenant_id,
            base_model=source.base_model,
            lora=source.lora,
            optimizer_type=source.optimizer_type,
            user_metadata=source.user_metadata,
            ttl_s=ttl_s,
            step=source.step,
        )
        # Its run has the source run's metadata (such as its renderer) if that run is readable.
        is_readable = source.tenant_id in (call.tenant_id, granted_by)
        source_run = services.models.find(source.training_run_id) if is_readable else None
        metadata = None if source_run is None else source_run.user_metadata
        run = replace(new.run(destination.session_id), user_metadata=metadata)
        effects = [
            *usage_increments(call.tenant_id, run.session_id, run.base_model, "checkpoint", 1),
            entry(call.tenant_id, "checkpoint_copied", {"tinker_path": copy_ref.path, "source_path": source_ref.path}),
        ]
        new_run = copy_insertion(run, destination.project_id, reason)
        with services.quotas.reserve_checkpoint(call.tenant_id, source.size_bytes or 0):
            if not services.checkpoints.copy(source, new, new_run, *effects):
                already_exists(services.models.find(destination.model_id), reason)
    return {"tinker_path": copy_ref.path}


def _destination(call: Call, request: CopyWeightsRequest) -> Destination:
    project_id = request.destination_project_id
    if (request.session_id is not None) == (project_id is not None):
        raise UserError("send either destination_project_id, or session_id with model_seq_id")
    if request.session_id is not None:
        session = call.services.sessions.require_active(call.tenant_id, request.session_id)
        if request.model_seq_id is None:
            raise UserError("model_seq_id is missing")
        return Destination(f"{session.session_id}:train:{request.model_seq_id}", session.session_id, None)
    if request.model_seq_id is not None:
        raise UserError("model_seq_id cannot be combined with destination_project_id; send session_id")
    session_id = idempotent_session(call, COPY_IDS)
    return Destination(f"{session_id}:train:0", session_id, project_id)


def idempotent_session(call: Call, ids: uuid.UUID) -> str:
    """Return the session id of a copy or upload outside any session. Repeated requests get the same id."""
    key = idempotency_key(call) or uuid.uuid4().hex
    return str(uuid.uuid5(ids, f"{call.tenant_id}\n{key}"))


def already_exists(model: Model | None, reason: str) -> bool:
    """Whether this copy or upload already exists. Raises UserError if the run has a different origin."""
    if model is None:
        return False
    if model.state != "copied" or model.reason != reason:
        raise UserError(
            f"training run {model.model_id!r} exists already and was not {reason}; use another model_seq_id "
            "(or another X-Idempotency-Key)"
        )
    return True
