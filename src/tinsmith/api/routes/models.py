"""Models: creation (fresh or from a checkpoint), information, unloading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from starlette.routing import Route

from tinsmith.api.admission import check_lora, check_position
from tinsmith.api.operation import Call, JsonObject, endpoint, owned_model, stored
from tinsmith.api.routes.weights import exchange_token, load_into_model, loadable
from tinsmith.errors import LateLoadError, TooManyRequestsError, UserError
from tinsmith.store.checkpoints import Checkpoint
from tinsmith.store.futures import NewFuture
from tinsmith.store.models import NewModel
from tinsmith.types import LoraSpec, ModelShape
from tinsmith.wire.bodies import JSON_TYPE
from tinsmith.wire.fields import Fields, text_values
from tinsmith.wire.weights import CREATE_FIELDS, LOAD_FIELDS, LoadWeights, create_model_of, load_of, optimizer_config

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


def create_model(call: Call) -> JsonObject:
    fields = call.fields()

    def plan(model_id: str, session_id: str) -> NewModel:
        fields.refuse_unknown(CREATE_FIELDS)
        asked = create_model_of(fields)
        call.services.bases.get(asked.base_model)
        check_lora(asked.lora)
        return NewModel(
            model_id=model_id,
            session_id=session_id,
            tenant_id=call.tenant_id,
            base_model=asked.base_model,
            lora=_trained_part(call, asked.lora),
            optimizer_type=asked.optimizer_type,
            user_metadata=text_values(asked.user_metadata),
        )

    return _submit_creation(call, fields, "create_model", plan)


def _trained_part(call: Call, asked: LoraSpec) -> LoraSpec:
    """The adapter that is asked for; of rank 0, which none has, where all weights are trained."""
    if call.services.settings.backend != "full":
        return asked
    for name in ("train_attn", "train_mlp", "train_unembed"):
        if not getattr(asked, name):
            raise UserError(f"lora_config.{name} is False; this server trains all weights (backend 'full')")
    return replace(asked, rank=0)


def load_weights(call: Call) -> JsonObject:
    """With a session, the load creates the model (its number 0); with a model, it is an operation of it."""
    call, wrong_token = exchange_token(call)
    fields = call.fields()
    if fields.has("model_id"):
        judged = load_into_model(call, wrong_token)
        answer = stored(call.services, judged)  # its number counts as used, whatever comes of it
        if isinstance(judged.refusal, LateLoadError):
            raise judged.refusal
        return answer

    def plan(model_id: str, session_id: str) -> NewModel:
        if wrong_token:
            raise wrong_token
        fields.refuse_unknown(LOAD_FIELDS)
        asked = load_of(fields)
        checkpoint = loadable(call, asked)
        return NewModel(
            model_id=model_id,
            session_id=session_id,
            tenant_id=call.tenant_id,
            base_model=_base_for(call, checkpoint, asked.base_model),
            lora=checkpoint.lora,
            optimizer_type=_optimizer_for(checkpoint, asked),
            user_metadata=text_values(asked.user_metadata),
        )

    return _submit_creation(call, fields, "load_model", plan)


def _optimizer_for(checkpoint: Checkpoint, asked: LoadWeights) -> str:
    """Restored optimizer state decides the family; without it, the request does."""
    if not asked.optimizer:
        return asked.optimizer_type or "adamw"
    if asked.optimizer_type not in (None, checkpoint.optimizer_type):
        raise UserError(
            f"optimizer_config.type is {asked.optimizer_type!r}, but {asked.path!r} holds the optimizer state of "
            f"{checkpoint.optimizer_type!r}; leave optimizer_config out, or load without the optimizer"
        )
    return checkpoint.optimizer_type


def _base_for(call: Call, checkpoint: Checkpoint, asked: str | None) -> str:
    """The base model of a run that begins with a checkpoint: its own, or another name for the same weights."""
    if asked in (None, checkpoint.base_model):
        return call.services.bases.get(checkpoint.base_model).name
    other = call.services.bases.get(asked)
    own = next((shape for shape in call.services.bases if shape.name == checkpoint.base_model), None)
    if own is None or own.path != other.path:
        raise UserError(
            f"base_model is {asked!r}, but {checkpoint.ref.path!r} was trained on {checkpoint.base_model!r}; only "
            "another name that this server serves from the same directory can take its place"
        )
    return other.name


def _submit_creation(call: Call, fields: Fields, kind: str, plan: Callable[[str, str], NewModel]) -> JsonObject:
    services = call.services
    session = services.sessions.require_active(call.tenant_id, fields.text("session_id"))
    number = check_position("model_seq_id", fields.integer("model_seq_id"))
    model_id = f"{session.session_id}:train:{number}"
    new = NewFuture(
        request_id=f"{model_id}:0",
        tenant_id=call.tenant_id,
        session_id=session.session_id,
        base_model="",  # a refused model waits in no queue
        kind=kind,
        body=call.body,
        model_id=model_id,
        seq_id=0,
    )
    refusal = None
    try:
        planned = plan(model_id, session.session_id)
        planned = replace(planned, engine_id=services.engine_for_run(planned.base_model))
        services.quotas.admit(new)
        model = services.models.create(planned, services.quotas.admission_of_models(call.tenant_id))
        if model.state == "copied":
            raise UserError(f"model_seq_id {number} is taken by a copied checkpoint ({model.reason}); use another one")
        new = replace(new, base_model=model.base_model, engine_id=model.engine_id)
    except TooManyRequestsError:
        raise
    except UserError as error:
        refusal = error
    return {"request_id": services.futures.submit(new, refusal), "model_id": model_id}


def get_info(call: Call) -> JsonObject:
    model = call.services.models.get(call.tenant_id, call.fields().text("model_id"))
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
        "optimizer_config": optimizer_config(model.optimizer_type),
    }


def _tokenizer_id(shape: ModelShape, host: str) -> str:
    # Clients on this machine can load the very directory; others must know the name. The SDK cuts ids at ':'.
    return shape.path if host in LOOPBACK_HOSTS and ":" not in shape.path else shape.name


def unload_model(call: Call) -> JsonObject:
    model = owned_model(call, call.fields().text("model_id"))
    new = NewFuture(
        request_id=f"{model.model_id}:unload",
        tenant_id=call.tenant_id,
        session_id=model.session_id,
        base_model=model.base_model,
        kind="unload_model",
        body=call.body,
        model_id=model.model_id,
        engine_id=model.engine_id,
    )
    return {"request_id": call.services.futures.submit(new), "model_id": model.model_id}


ROUTES = [
    Route("/create_model", endpoint(create_model, JSON_TYPE), methods=["POST"]),
    Route("/load_weights", endpoint(load_weights, JSON_TYPE), methods=["POST"]),
    Route("/get_info", endpoint(get_info, JSON_TYPE), methods=["POST"]),
    Route("/unload_model", endpoint(unload_model, JSON_TYPE), methods=["POST"]),
]
