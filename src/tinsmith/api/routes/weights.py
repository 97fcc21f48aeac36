"""Saving a model's weights and loading a checkpoint into a model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import orjson

from tinsmith.api.declaration import operation
from tinsmith.api.request import Call, Draft, JsonObject
from tinsmith.api.submission import submit_json_operation
from tinsmith.errors import LateLoadError, NotAuthenticatedError, UserError
from tinsmith.storage.encryption import read_recipients
from tinsmith.store.checkpoints import Checkpoint, check_name, parse_path
from tinsmith.store.models import Model
from tinsmith.types import LORA_ALPHA
from tinsmith.wire.weights import (
    GRANTED_BY,
    TOKEN,
    LoadWeights,
    SaveRequest,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
)

_save = partial(operation, "POST", example={"model_id": "{model_id}", "seq_id": 5, "path": "mine"}, late=True)


@_save("/save_weights", "Save a training checkpoint", body=SaveWeights)
def save_weights(call: Call, draft: Draft[SaveWeights]) -> JsonObject:
    return submit_json_operation(call, "save_weights", draft, _check_save)


def _check_save(_model: Model, request: SaveRequest) -> None:
    _check_has_name(request)
    _refuse_recipients(request)


def _check_has_name(request: SaveRequest) -> None:
    if request.path is None:
        raise UserError("path is missing; send the checkpoint's name")
    check_name(request.path)


def _refuse_recipients(request: SaveRequest) -> None:
    if request.age_encryption_recipients:
        raise UserError(
            "age_encryption_recipients is valid only for save_weights_external; other checkpoints are not encrypted"
        )


@_save("/save_weights_external", "Export an adapter", body=SaveWeightsExternal)
def save_weights_external(call: Call, draft: Draft[SaveWeightsExternal]) -> JsonObject:
    """Save an export in PEFT's format for download."""
    return submit_json_operation(call, "save_weights_external", draft, _check_export)


def _check_export(_model: Model, request: SaveRequest) -> None:
    _check_has_name(request)
    read_recipients(request.age_encryption_recipients)


@_save("/save_weights_for_sampler", "Save weights for sampling", body=SaveWeightsForSampler)
def save_weights_for_sampler(call: Call, draft: Draft[SaveWeightsForSampler]) -> JsonObject:
    """Save a listed checkpoint if the body has a path; open a sampling session if it has none."""
    return submit_json_operation(call, "save_weights_for_sampler", draft, _check_sampler_save)


def _check_sampler_save(_model: Model, request: SaveRequest) -> None:
    if request.path is not None:
        check_name(request.path)
    elif request.sampling_session_seq_id is None:
        raise UserError("path and sampling_session_seq_id are both missing; send one of them")
    _refuse_recipients(request)


def load_into_model(call: Call, draft: Draft[LoadWeights], wrong_token: UserError | None) -> JsonObject:
    """Load into a model, whose adapter must have the checkpoint's shape. Raises LateLoadError if the server refuses
    late loads; it is stored as well, since a refused load also uses up its seq_id.
    """
    late_errors: list[LateLoadError] = []

    def check(model: Model, request: LoadWeights) -> None:
        checkpoint = find_loadable_checkpoint(call, request)
        if call.services.settings.refuse_late_loads:
            try:
                _check_first(call, model, request)
            except LateLoadError as error:
                late_errors.append(error)
                raise
        if request.optimizer_type not in (None, model.optimizer_type):
            raise UserError(
                f"optimizer_config.type is {request.optimizer_type!r}, but the model was created with "
                f"{model.optimizer_type!r}; leave optimizer_config out"
            )
        if request.optimizer and checkpoint.optimizer_type != model.optimizer_type:
            raise UserError(
                f"checkpoint {checkpoint.ref.path!r} holds the optimizer state of {checkpoint.optimizer_type!r}, but "
                f"the model was created with {model.optimizer_type!r}; load it without the optimizer"
            )
        # Clients that create a model and then load a checkpoint cannot send its alpha, so the checkpoint's replaces the
        # default.
        alpha = checkpoint.lora_alpha if model.lora_alpha == LORA_ALPHA else model.lora_alpha
        promised = replace(model.lora, seed=None, alpha=alpha)
        if checkpoint.base_model != model.base_model or checkpoint.lora != promised:
            raise UserError(
                f"checkpoint {checkpoint.ref.path!r} has base model {checkpoint.base_model!r} and "
                f"{checkpoint.lora}, the model has {model.base_model!r} and {model.lora}; create the model "
                "from the checkpoint instead (create_training_client_from_state)"
            )

    answer = submit_json_operation(call, "load_weights", draft, check, refusal=wrong_token)
    if late_errors:
        raise late_errors[0]
    return answer


def _check_first(call: Call, model: Model, request: LoadWeights) -> None:
    """Raise LateLoadError unless this is the model's first request. Clients match on the start of the message."""
    seq_id = request.seq_id or call.services.futures.next_seq_id(model.model_id)
    if seq_id > 1:
        raise LateLoadError(
            f"LoadWeights is not permitted with seq_id {seq_id}: on this server (refuse_late_loads) it must be a "
            "model's first request, and this one has others. Nothing was loaded. Create a new model from the "
            "checkpoint (ServiceClient.create_training_client_from_state)"
        )


def exchange_token(call: Call, draft: Draft[LoadWeights]) -> tuple[Call, Draft[LoadWeights], UserError | None]:
    """Replace the access token of a load by the tenant that it authenticates, since secrets must not be stored. Also
    returns the error of an invalid token.
    """
    values = dict(draft.values)
    values.pop(GRANTED_BY, None)
    token, token_error = values.pop(TOKEN, None), None
    if token is not None:
        try:
            values[GRANTED_BY] = granting_tenant(call, token)
        except UserError as error:
            token_error = error
    return replace(call, body=orjson.dumps(values)), replace(draft, values=values), token_error


def granting_tenant(call: Call, token: object) -> str:
    """Return the tenant whose key is the access token of a load. Raises UserError."""
    try:
        return call.services.tenants.authenticate(token if isinstance(token, str) else None).tenant_id
    except NotAuthenticatedError:
        # Not a 401, because that means that the caller's own key is wrong.
        raise UserError(
            f"{TOKEN} is not a valid key of this server; use an API key of the checkpoint's owner"
        ) from None


def find_loadable_checkpoint(call: Call, request: LoadWeights) -> Checkpoint:
    """Return the readable checkpoint that a load names. Raises UserError if it does not fit the load."""
    ref = parse_path(request.path)
    checkpoint = call.services.checkpoints.get(call.tenant_id, ref, granted_by=request.granted_by)
    if checkpoint.kind == "external_weights":
        raise UserError(f"path {request.path!r} is an export; load a 'weights' checkpoint")
    if request.optimizer and checkpoint.kind != "weights":
        raise UserError(
            f"path {request.path!r} holds no optimizer state; load a 'weights' checkpoint, or load without the "
            "optimizer"
        )
    return checkpoint
