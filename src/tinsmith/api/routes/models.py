"""Models: creation (fresh or from a checkpoint), information, unloading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import structlog

from tinsmith.api.declaration import operation
from tinsmith.api.openapi import ANYTHING, TEXT, fields
from tinsmith.api.request import Call, Draft, JsonObject
from tinsmith.api.routes.weights import exchange_token, find_loadable_checkpoint, load_into_model
from tinsmith.api.submission import B, get_trainable_model
from tinsmith.db.database import now
from tinsmith.errors import TooManyRequestsError, UserError
from tinsmith.exchange.console_urls import run_url
from tinsmith.store.checkpoints import Checkpoint
from tinsmith.store.futures import NewFuture
from tinsmith.store.models import NewModel, unload_request
from tinsmith.types import LoraSpec, ModelShape
from tinsmith.wire.fields import Body, Position, Text, text_values
from tinsmith.wire.weights import CreateModel, LoadWeights, optimizer_config

log = structlog.get_logger()

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


class CreationRequest(Body):
    """The required fields of every request that creates a model."""

    session_id: Text
    model_seq_id: Position


@operation(
    "POST",
    "/create_model",
    "Create a model",
    body=CreateModel,
    example={"session_id": "{session_id}", "model_seq_id": 5, "base_model": "{base_model}"},
    late=True,
)
def create_model(call: Call, draft: Draft[CreateModel]) -> JsonObject:
    def plan(model_id: str, session_id: str) -> NewModel:
        request = draft.read()
        call.services.bases.get(request.base_model)
        return NewModel(
            model_id=model_id,
            session_id=session_id,
            tenant_id=call.tenant_id,
            base_model=request.base_model,
            lora=_lora_of_backend(call, request.lora),
            optimizer_type=request.optimizer_config.type,
            user_metadata=text_values(request.user_metadata),
        )

    return _submit_creation(call, draft, "create_model", plan)


def _lora_of_backend(call: Call, request: LoraSpec) -> LoraSpec:
    """Return the requested adapter. Rank is 0 if the backend trains all weights, since there is no adapter."""
    if call.services.settings.backend != "full":
        return request
    for name in ("train_attn", "train_mlp", "train_unembed"):
        if not getattr(request, name):
            raise UserError(f"lora_config.{name} is False; this server trains all weights (backend 'full')")
    return replace(request, rank=0)


@operation(
    "POST",
    "/load_weights",
    "Create a model from a checkpoint, or load one into a model",
    body=LoadWeights,
    example={"model_id": "{model_id}", "seq_id": 5, "path": "{tinker_path}", "optimizer": False},
    late=True,
)
def load_weights(call: Call, draft: Draft[LoadWeights]) -> JsonObject:
    """Create a model from a checkpoint if the body names a session; load into a model if it names a model."""
    call, draft, wrong_token = exchange_token(call, draft)
    if draft.values.get("model_id") is not None:
        return load_into_model(call, draft, wrong_token)

    def plan(model_id: str, session_id: str) -> NewModel:
        if wrong_token:
            raise wrong_token
        request = draft.read()
        checkpoint = find_loadable_checkpoint(call, request)
        return NewModel(
            model_id=model_id,
            session_id=session_id,
            tenant_id=call.tenant_id,
            base_model=_base_for(call, checkpoint, request.base_model),
            lora=checkpoint.lora,
            optimizer_type=_optimizer_for(checkpoint, request),
            user_metadata=text_values(request.user_metadata),
        )

    return _submit_creation(call, draft, "load_model", plan)


def _optimizer_for(checkpoint: Checkpoint, request: LoadWeights) -> str:
    """Return the optimizer family of the restored state, or the request's if none is restored."""
    if not request.optimizer:
        return request.optimizer_type or "adamw"
    if request.optimizer_type not in (None, checkpoint.optimizer_type):
        raise UserError(
            f"optimizer_config.type is {request.optimizer_type!r}, but {request.path!r} holds the optimizer state of "
            f"{checkpoint.optimizer_type!r}; leave optimizer_config out, or load without the optimizer"
        )
    return checkpoint.optimizer_type


def _base_for(call: Call, checkpoint: Checkpoint, request: str | None) -> str:
    """Return the base model of a run that starts from a checkpoint, which may be another name of the same weights."""
    if request in (None, checkpoint.base_model):
        return call.services.bases.get(checkpoint.base_model).name
    requested_base = call.services.bases.get(request)
    trained_base = next((shape for shape in call.services.bases if shape.name == checkpoint.base_model), None)
    if trained_base is None or trained_base.path != requested_base.path:
        raise UserError(
            f"base_model is {request!r}, but {checkpoint.ref.path!r} was trained on {checkpoint.base_model!r}; use "
            "that name, or another name that this server serves from the same directory"
        )
    return requested_base.name


def _submit_creation(call: Call, draft: Draft[B], kind: str, plan: Callable[[str, str], NewModel]) -> JsonObject:
    services, ids = call.services, draft.read_required(CreationRequest)
    session = services.sessions.require_active(call.tenant_id, ids.session_id)
    model_seq_id = ids.model_seq_id
    model_id = f"{session.session_id}:train:{model_seq_id}"
    new = NewFuture(
        request_id=f"{model_id}:0",
        tenant_id=call.tenant_id,
        session_id=session.session_id,
        base_model="",  # a refused creation is not queued
        kind=kind,
        body=call.body,
        model_id=model_id,
        seq_id=0,
    )
    refusal = None
    try:
        planned = plan(model_id, session.session_id)
        planned = replace(planned, engine_id=services.engines.engine_for_run(planned.base_model))
        services.quotas.admit(new)
        began_at = now()
        model = services.models.create(planned, services.quotas.admission_of_models(call.tenant_id))
        if model.state == "copied":
            raise UserError(
                f"model_seq_id {model_seq_id} is taken by a copied checkpoint ({model.reason}); use another one"
            )
        new = replace(new, base_model=model.base_model, engine_id=model.engine_id)
        if model.created_at >= began_at:  # a repeated request gets the model of the first one
            log.info("run created", base_model=model.base_model, page=run_url(str(call.request.base_url), model_id))
    except TooManyRequestsError:
        raise
    except UserError as error:
        refusal = error
    return {"request_id": services.futures.submit(new, refusal), "model_id": model_id}


class GetInfoRequest(Body):
    model_id: Text


@operation(
    "POST",
    "/get_info",
    "Describe a model",
    body=GetInfoRequest,
    answer=fields({"model_id": TEXT, "model_data": ANYTHING}),
)
def get_info(call: Call, request: GetInfoRequest) -> JsonObject:
    model = call.services.models.get(call.tenant_id, request.model_id)
    shape = call.services.bases.get(model.base_model)
    return {
        "type": "get_info",
        "model_id": model.model_id,
        "model_name": shape.name,
        "model_data": {
            "arch": shape.arch,
            "model_name": shape.name,
            "tokenizer_id": _tokenizer_id(shape, call.services.settings.host),
        },
        "is_lora": model.lora_rank > 0,
        "lora_rank": model.lora_rank or None,
        "lora_alpha": model.lora_alpha if model.lora_rank else None,
        "optimizer_config": optimizer_config(model.optimizer_type),
    }


def _tokenizer_id(shape: ModelShape, host: str) -> str:
    # Only clients on this machine can load the directory; others need the name. The SDK truncates ids at ':'.
    return shape.path if host in LOOPBACK_HOSTS and ":" not in shape.path else shape.name


class UnloadModelRequest(Body):
    model_id: Text


@operation("POST", "/unload_model", "Unload a model", body=UnloadModelRequest)
def unload_model(call: Call, request: UnloadModelRequest) -> JsonObject:
    model = get_trainable_model(call, request.model_id)
    new = unload_request(model, call.body)
    return {"request_id": call.services.futures.submit(new), "model_id": model.model_id}
