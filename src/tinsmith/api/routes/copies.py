"""Copying a checkpoint into a project, or into a run of one's own session.

A copy belongs to a training run that is made for it and cannot be trained. That run's id follows from what the
client sends (the session's slot, or the idempotency key that it keeps over all retries), so that a request which is
sent again finds the copy that it made before.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from starlette.routing import Route

from tinsmith.api.admission import check_position, check_ttl
from tinsmith.api.operation import Call, JsonObject, endpoint
from tinsmith.api.routes.weights import granting_tenant
from tinsmith.errors import UserError
from tinsmith.store.audit import entry
from tinsmith.store.checkpoints import Checkpoint, CheckpointRef, NewCheckpoint, parse_path
from tinsmith.store.models import Model, NewModel, copied_run
from tinsmith.store.usage import added
from tinsmith.wire.bodies import JSON_TYPE
from tinsmith.wire.fields import Fields, show

TOKEN_HEADER = "x-tinker-weights-access-token"
IDEMPOTENCY_HEADER = "x-idempotency-key"
MAX_KEY_LENGTH = 256
MAX_PROJECT_LENGTH = 128
COPY_IDS = uuid.UUID("6b1f7f5e-3e0a-5c7e-9a53-5d0f7d1c2b11")  # the name space of the ids of copies


@dataclass(frozen=True, slots=True)
class Destination:
    model_id: str
    session_id: str
    project_id: str | None


def copy_weights(call: Call) -> JsonObject:
    services, fields = call.services, call.fields()
    ref = parse_path(fields.text("source_path"), "source_path")
    ttl_s = fields.integer_or("ttl_seconds", None)
    check_ttl(ttl_s)
    destination = _destination(call, fields)
    reason = f"copied from {ref.path}"
    copied = CheckpointRef(destination.model_id, ref.kind, ref.name)
    if not made_before(services.models.find(destination.model_id), reason):
        services.quotas.admit_checkpoint(call.tenant_id)
        token = call.headers.get(TOKEN_HEADER)
        granted_by = None if token is None else granting_tenant(call, token)
        source = services.checkpoints.get(call.tenant_id, ref, granted_by=granted_by)
        new = NewCheckpoint(
            ref=copied,
            tenant_id=call.tenant_id,
            base_model=source.base_model,
            lora=source.lora,
            optimizer_type=source.optimizer_type,
            user_metadata=source.user_metadata,
            ttl_s=ttl_s,
        )
        run = _run(call, destination, source, readable=source.tenant_id in (call.tenant_id, granted_by))
        effects = [
            *added(call.tenant_id, run.session_id, run.base_model, "checkpoint", 1),
            entry(call.tenant_id, "checkpoint_copied", {"tinker_path": copied.path, "source_path": ref.path}),
        ]
        if not services.checkpoints.copy(source, new, copied_run(run, destination.project_id, reason), *effects):
            made_before(services.models.find(destination.model_id), reason)
    return {"tinker_path": copied.path}


def _destination(call: Call, fields: Fields) -> Destination:
    project_id = fields.text_or("destination_project_id", None, max_length=MAX_PROJECT_LENGTH)
    if fields.has("session_id") == (project_id is not None):
        raise UserError("give either destination_project_id, or session_id with model_seq_id")
    if project_id is None:
        session = call.services.sessions.require_active(call.tenant_id, fields.text("session_id"))
        number = check_position("model_seq_id", fields.integer("model_seq_id"))
        return Destination(f"{session.session_id}:train:{number}", session.session_id, None)
    if fields.has("model_seq_id"):
        raise UserError("model_seq_id goes with session_id, not with destination_project_id")
    session_id = idempotent_session(call, COPY_IDS)
    return Destination(f"{session_id}:train:0", session_id, project_id)


def idempotent_session(call: Call, ids: uuid.UUID) -> str:
    """The id of a session that nobody opened: the same for every time that a request is sent."""
    key = call.headers.get(IDEMPOTENCY_HEADER) or uuid.uuid4().hex
    if len(key) > MAX_KEY_LENGTH:
        raise UserError(f"the header X-Idempotency-Key is {show(key)}; use at most {MAX_KEY_LENGTH} characters")
    return str(uuid.uuid5(ids, f"{call.tenant_id}\n{key}"))


def made_before(model: Model | None, reason: str) -> bool:
    """Whether this very copy (or upload) exists. Raises UserError if the place is taken by something else."""
    if model is None:
        return False
    if model.state != "copied" or model.reason != reason:
        raise UserError(
            f"training run {model.model_id!r} exists already and was not {reason}; use another model_seq_id "
            "(or another X-Idempotency-Key)"
        )
    return True


def _run(call: Call, destination: Destination, source: Checkpoint, *, readable: bool) -> NewModel:
    """The run of the copy. Its metadata (the renderer above all) is the source's, if that run may be read."""
    origin = call.services.models.find(source.training_run_id) if readable else None
    return NewModel(
        model_id=destination.model_id,
        session_id=destination.session_id,
        tenant_id=call.tenant_id,
        base_model=source.base_model,
        lora=source.lora,
        optimizer_type=source.optimizer_type,
        user_metadata=None if origin is None else origin.user_metadata,
    )


ROUTES = [Route("/copy_weights", endpoint(copy_weights, JSON_TYPE), methods=["POST"])]
