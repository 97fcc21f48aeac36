"""Saving a model's weights and loading a checkpoint into a model."""

from __future__ import annotations

from dataclasses import replace

import orjson

from tinsmith.api.operation import Call, Draft, Submission, operation, submit_json_operation
from tinsmith.errors import LateLoadError, NotAuthenticatedError, UserError
from tinsmith.storage.encryption import read_recipients
from tinsmith.store.checkpoints import Checkpoint, check_name, parse_path
from tinsmith.store.models import Model
from tinsmith.wire.weights import (
    GRANTED_BY,
    TOKEN,
    LoadWeights,
    SaveRequest,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
)


@operation(
    "POST",
    "/save_weights",
    "Save a training checkpoint",
    body=SaveWeights,
    example={"model_id": "{model_id}", "seq_id": 5, "path": "mine"},
    submits=True,
)
def save_weights(call: Call, draft: Draft[SaveWeights]) -> Submission:
    return submit_json_operation(call, "save_weights", draft, _check_save)


def _check_save(_model: Model, asked: SaveRequest) -> None:
    _check_named(asked)
    _refuse_recipients(asked)


def _check_named(asked: SaveRequest) -> None:
    if asked.path is None:
        raise UserError("path is missing; it names the checkpoint")
    check_name(asked.path)


def _refuse_recipients(asked: SaveRequest) -> None:
    if asked.age_encryption_recipients:
        raise UserError(
            "age_encryption_recipients goes with save_weights_external; other checkpoints stay readable here"
        )


@operation(
    "POST",
    "/save_weights_external",
    "Export the adapter",
    body=SaveWeightsExternal,
    example={"model_id": "{model_id}", "seq_id": 5, "path": "mine"},
    submits=True,
)
def save_weights_external(call: Call, draft: Draft[SaveWeightsExternal]) -> Submission:
    """An export in PEFT's format, to be downloaded."""
    return submit_json_operation(call, "save_weights_external", draft, _check_export)


def _check_export(_model: Model, asked: SaveRequest) -> None:
    _check_named(asked)
    read_recipients(asked.age_encryption_recipients)


@operation(
    "POST",
    "/save_weights_for_sampler",
    "Save weights to sample from",
    body=SaveWeightsForSampler,
    example={"model_id": "{model_id}", "seq_id": 5, "path": "mine"},
    submits=True,
)
def save_weights_for_sampler(call: Call, draft: Draft[SaveWeightsForSampler]) -> Submission:
    """With a path: a checkpoint of that name. Without: a sampling session, and nothing is listed."""
    return submit_json_operation(call, "save_weights_for_sampler", draft, _check_sampler_save)


def _check_sampler_save(_model: Model, asked: SaveRequest) -> None:
    if asked.path is not None:
        check_name(asked.path)
    elif asked.sampling_session_seq_id is None:
        raise UserError("path and sampling_session_seq_id are both missing; one of them is needed")
    _refuse_recipients(asked)


def load_into_model(call: Call, draft: Draft[LoadWeights], wrong_token: UserError | None) -> Submission:
    """A load as an operation of a model that is new: the adapter's form must be the checkpoint's."""

    def check(model: Model, asked: LoadWeights) -> None:
        checkpoint = loadable(call, asked)
        _check_first(call, model, asked)
        if asked.optimizer_type not in (None, model.optimizer_type):
            raise UserError(
                f"optimizer_config.type is {asked.optimizer_type!r}, but the model was created with "
                f"{model.optimizer_type!r}; leave optimizer_config out"
            )
        if asked.optimizer and checkpoint.optimizer_type != model.optimizer_type:
            raise UserError(
                f"checkpoint {checkpoint.ref.path!r} holds the optimizer state of {checkpoint.optimizer_type!r}, and "
                f"the model was created with {model.optimizer_type!r}; load it without the optimizer"
            )
        if checkpoint.base_model != model.base_model or checkpoint.lora != replace(model.lora, seed=None):
            raise UserError(
                f"checkpoint {checkpoint.ref.path!r} has base model {checkpoint.base_model!r} and "
                f"{checkpoint.lora}, the model has {model.base_model!r} and {model.lora}; create the model "
                "from the checkpoint instead (create_training_client_from_state)"
            )

    return submit_json_operation(call, "load_weights", draft, check, refusal=wrong_token)


def _check_first(call: Call, model: Model, asked: LoadWeights) -> None:
    """Clients match on the first words, which are those of the hosted service. A failed request counts, too."""
    number = asked.seq_id or call.services.futures.next_seq_id(model.model_id)
    if number > 1:
        raise LateLoadError(
            f"LoadWeights is not permitted with seq_id {number}: it must be a model's first request, and this one has "
            "others. Nothing was loaded. Make a new model of the checkpoint "
            "(ServiceClient.create_training_client_from_state)"
        )


def exchange_token(call: Call, draft: Draft[LoadWeights]) -> tuple[Call, Draft[LoadWeights], UserError | None]:
    """A load with its access token replaced by the tenant who granted it: what is stored must hold no secret.

    Also returns what is wrong with the token, for the answer.
    """
    values = dict(draft.values)
    values.pop(GRANTED_BY, None)
    token, wrong = values.pop(TOKEN, None), None
    if token is not None:
        try:
            values[GRANTED_BY] = granting_tenant(call, token)
        except UserError as error:
            wrong = error
    return replace(call, body=orjson.dumps(values)), replace(draft, values=values), wrong


def granting_tenant(call: Call, token: object) -> str:
    """Whose checkpoints an access token opens: it is a key of theirs. Raises UserError."""
    try:
        return call.services.tenants.authenticate(token if isinstance(token, str) else None).tenant_id
    except NotAuthenticatedError:
        # Not as it is: a 401 would say that the caller's own key is wrong.
        raise UserError(f"{TOKEN} is no valid key of this server; use an API key of the checkpoint's owner") from None


def loadable(call: Call, asked: LoadWeights) -> Checkpoint:
    """The checkpoint that a load asks for, if it may be read and holds what the load needs."""
    ref = parse_path(asked.path)
    checkpoint = call.services.checkpoints.get(call.tenant_id, ref, granted_by=asked.granted_by)
    if checkpoint.kind == "external_weights":
        raise UserError(f"path {asked.path!r} is an export; load a 'weights' checkpoint")
    if asked.optimizer and checkpoint.kind != "weights":
        raise UserError(
            f"path {asked.path!r} holds no optimizer state; load a 'weights' checkpoint, or load without the optimizer"
        )
    return checkpoint
