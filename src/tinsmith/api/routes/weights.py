"""Saving a model's weights and loading a checkpoint into a model."""

from __future__ import annotations

from dataclasses import replace

import orjson
from starlette.routing import Route

from tinsmith.api.admission import check_position, check_ttl
from tinsmith.api.operation import Call, Submission, submission, submit_json_operation
from tinsmith.errors import LateLoadError, NotAuthenticatedError, UserError
from tinsmith.storage.encryption import read_recipients
from tinsmith.store.checkpoints import Checkpoint, check_name, parse_path
from tinsmith.store.models import Model
from tinsmith.wire.bodies import JSON_TYPE
from tinsmith.wire.fields import Fields
from tinsmith.wire.weights import (
    GRANTED_BY,
    LOAD_FIELDS,
    SAVE_FIELDS,
    TOKEN,
    LoadWeights,
    SaveWeights,
    load_of,
    save_of,
)


def save_weights(call: Call) -> Submission:
    return submit_json_operation(call, "save_weights", _check_save)


def _check_save(_model: Model, fields: Fields) -> None:
    _refuse_recipients(_named(_read_save(fields)))


def _read_save(fields: Fields) -> SaveWeights:
    fields.refuse_unknown(SAVE_FIELDS)
    return save_of(fields)


def _named(asked: SaveWeights) -> SaveWeights:
    if asked.name is None:
        raise UserError("path is missing; it names the checkpoint")
    check_name(asked.name)
    check_ttl(asked.ttl_s)
    return asked


def _refuse_recipients(asked: SaveWeights) -> None:
    if asked.recipients:
        raise UserError(
            "age_encryption_recipients goes with save_weights_external; other checkpoints stay readable here"
        )


def save_weights_external(call: Call) -> Submission:
    """An export in PEFT's format, to be downloaded."""
    return submit_json_operation(call, "save_weights_external", _check_export)


def _check_export(_model: Model, fields: Fields) -> None:
    read_recipients(_named(_read_save(fields)).recipients)


def save_weights_for_sampler(call: Call) -> Submission:
    """With a path: a checkpoint of that name. Without: a sampling session, and nothing is listed."""
    return submit_json_operation(call, "save_weights_for_sampler", _check_sampler_save)


def _check_sampler_save(_model: Model, fields: Fields) -> None:
    asked = _read_save(fields)
    if asked.name is not None:
        check_name(asked.name)
    elif asked.sampling_session_seq_id is None:
        raise UserError("path and sampling_session_seq_id are both missing; one of them is needed")
    else:
        check_position("sampling_session_seq_id", asked.sampling_session_seq_id)
    check_ttl(asked.ttl_s)
    _refuse_recipients(asked)


def load_into_model(call: Call, wrong_token: UserError | None) -> Submission:
    """A load as an operation of a model that is new: the adapter's form must be the checkpoint's."""

    def check(model: Model, fields: Fields) -> None:
        if wrong_token:
            raise wrong_token
        fields.refuse_unknown(LOAD_FIELDS)
        asked = load_of(fields)
        checkpoint = loadable(call, asked)
        _check_first(call, model, fields)
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

    return submit_json_operation(call, "load_weights", check)


def _check_first(call: Call, model: Model, fields: Fields) -> None:
    """Clients match on the first words, which are those of the hosted service. A failed request counts, too."""
    number = fields.integer_or("seq_id", None) or call.services.futures.next_seq_id(model.model_id)
    if number > 1:
        raise LateLoadError(
            f"LoadWeights is not permitted with seq_id {number}: it must be a model's first request, and this one has "
            "others. Nothing was loaded. Make a new model of the checkpoint "
            "(ServiceClient.create_training_client_from_state)"
        )


def exchange_token(call: Call) -> tuple[Call, UserError | None]:
    """A load with its access token replaced by the tenant who granted it: what is stored must hold no secret.

    Also returns why the token is worth nothing, for whoever answers the request.
    """
    values = dict(call.fields().values)
    values.pop(GRANTED_BY, None)
    token, wrong = values.pop(TOKEN, None), None
    if token is not None:
        try:
            values[GRANTED_BY] = granting_tenant(call, token)
        except UserError as error:
            wrong = error
    return replace(call, body=orjson.dumps(values)), wrong


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


ROUTES = [
    Route("/save_weights", submission(save_weights, JSON_TYPE), methods=["POST"]),
    Route("/save_weights_for_sampler", submission(save_weights_for_sampler, JSON_TYPE), methods=["POST"]),
    Route("/save_weights_external", submission(save_weights_external, JSON_TYPE), methods=["POST"]),
]
