"""Checkpoints and training runs: listing, facts, TTL, publishing, deletion."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.routing import Route

from tinsmith.api.admission import check_ttl
from tinsmith.api.operation import Call, JsonObject, endpoint
from tinsmith.api.routes.sessions import check_scope
from tinsmith.auth import user_urn
from tinsmith.errors import UserError
from tinsmith.store.checkpoints import KINDS, Checkpoint, CheckpointRef, parse_path
from tinsmith.store.models import Model
from tinsmith.wire.bodies import JSON_TYPE
from tinsmith.wire.fields import show
from tinsmith.wire.weights import optimizer_config

# A path's middle segment -> the type that the SDK shows.
CHECKPOINT_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}

RUN = "/training_runs/{run_id}"
CHECKPOINT = RUN + "/checkpoints/{kind}/{name}"
BARE_CHECKPOINT = RUN + "/checkpoints/{checkpoint_id}"


def list_training_runs(call: Call) -> JsonObject:
    check_scope(call)
    limit, offset = call.page(default_limit=20)
    models, total = call.services.models.page(call.tenant_id, limit, offset, call.query.get("project_id"))
    return {
        "training_runs": [_run(call, model) for model in models],
        "cursor": {"offset": offset, "limit": limit, "total_count": total},
    }


def get_training_run(call: Call) -> JsonObject:
    check_scope(call)
    return _run(call, call.services.models.get(call.tenant_id, call.path["run_id"]))


def list_run_checkpoints(call: Call) -> JsonObject:
    model = call.services.models.get(call.tenant_id, call.path["run_id"])
    found = call.services.checkpoints.of_run(call.tenant_id, model.model_id)
    return {"checkpoints": [_checkpoint(checkpoint) for checkpoint in found]}


def list_checkpoints(call: Call) -> JsonObject:
    limit, offset = call.page(default_limit=100)
    found, total = call.services.checkpoints.page(call.tenant_id, limit, offset, call.query.get("project_id"))
    return {
        "checkpoints": [_checkpoint(checkpoint) for checkpoint in found],
        "cursor": {"offset": offset, "limit": limit, "total_count": total},
    }


def weights_info(call: Call) -> JsonObject:
    found = call.services.checkpoints.get(call.tenant_id, parse_path(call.fields().text("tinker_path"), "tinker_path"))
    return {
        "base_model": found.base_model,
        "is_lora": found.lora_rank > 0,
        "optimizer_config": optimizer_config(found.optimizer_type),
        "lora_rank": found.lora_rank or None,
        "train_unembed": found.train_unembed,
        "train_mlp": found.train_mlp,
        "train_attn": found.train_attn,
    }


def delete(call: Call) -> JsonObject:
    call.services.checkpoints.delete(call.tenant_id, ref_of(call))
    record(call, "checkpoint_deleted", ref_of(call))
    return {}


def without_kind(call: Call) -> JsonObject:
    """A checkpoint's name does not say which of a run's checkpoints of that name is meant."""
    call.services.models.get(call.tenant_id, call.path["run_id"])
    bare = call.path["checkpoint_id"]
    raise UserError(
        f"checkpoint_id is {show(bare)}; it must be KIND/NAME, KIND being one of {', '.join(KINDS)}: for example "
        f"'weights/{bare[:40]}'"
    )


def publish(call: Call) -> JsonObject:
    if call.services.checkpoints.set_public(call.tenant_id, ref_of(call), True):
        record(call, "checkpoint_published", ref_of(call))
    return {}


def unpublish(call: Call) -> JsonObject:
    if call.services.checkpoints.set_public(call.tenant_id, ref_of(call), False):
        record(call, "checkpoint_unpublished", ref_of(call))
    return {}


def set_ttl(call: Call) -> JsonObject:
    ttl_s = call.fields().integer_or("ttl_seconds", None)
    check_ttl(ttl_s)
    call.services.checkpoints.set_ttl(call.tenant_id, ref_of(call), ttl_s)
    record(call, "checkpoint_ttl_set", ref_of(call), ttl_seconds=ttl_s)
    return {}


def record(call: Call, event: str, ref: CheckpointRef, **details: object) -> None:
    """Note in the audit log what was done to a checkpoint."""
    whose = {"model_id": ref.training_run_id, "tinker_path": ref.path}
    call.services.audit.record(call.tenant_id, event, whose | details)


def ref_of(call: Call) -> CheckpointRef:
    """The checkpoint that the path names."""
    return parse_path("tinker://{run_id}/{kind}/{name}".format(**call.path))


def _run(call: Call, model: Model) -> JsonObject:
    newest: dict[str, JsonObject] = {}
    for checkpoint in call.services.checkpoints.of_run(call.tenant_id, model.model_id):  # newest first
        newest.setdefault(checkpoint.kind, _checkpoint(checkpoint))
    return {
        "training_run_id": model.model_id,
        "base_model": model.base_model,
        "model_owner": user_urn(model.tenant_id),
        "is_lora": model.lora_rank > 0,
        "corrupted": model.state == "failed",
        "lora_rank": model.lora_rank or None,
        "last_request_time": _iso(model.last_request_at),
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": model.user_metadata,
    }


def _checkpoint(checkpoint: Checkpoint) -> JsonObject:
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": CHECKPOINT_TYPES[checkpoint.kind],
        "time": _iso(checkpoint.created_at),
        "tinker_path": checkpoint.ref.path,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if checkpoint.expires_at is None else _iso(checkpoint.expires_at),
    }


def _iso(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s, UTC).isoformat().replace("+00:00", "Z")


ROUTES = [
    Route("/training_runs", endpoint(list_training_runs), methods=["GET"]),
    Route(RUN, endpoint(get_training_run), methods=["GET"]),
    Route(RUN + "/checkpoints", endpoint(list_run_checkpoints), methods=["GET"]),
    Route(CHECKPOINT, endpoint(delete), methods=["DELETE"]),
    Route(BARE_CHECKPOINT, endpoint(without_kind), methods=["DELETE"]),
    Route(BARE_CHECKPOINT + "/archive", endpoint(without_kind), methods=["GET"]),
    Route(CHECKPOINT + "/publish", endpoint(publish), methods=["POST"]),
    Route(CHECKPOINT + "/publish", endpoint(unpublish), methods=["DELETE"]),
    Route(CHECKPOINT + "/ttl", endpoint(set_ttl, JSON_TYPE), methods=["PUT"]),
    Route("/checkpoints", endpoint(list_checkpoints), methods=["GET"]),
    Route("/weights_info", endpoint(weights_info, JSON_TYPE), methods=["POST"]),
]
