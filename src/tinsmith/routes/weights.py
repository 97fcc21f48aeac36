"""Saving a model's weights and loading a checkpoint into a model."""

from __future__ import annotations

from dataclasses import replace

from starlette.routing import Route

from tinsmith.admission import check_position, check_ttl
from tinsmith.checkpoints import Checkpoint, check_name, parse_path
from tinsmith.errors import UserError
from tinsmith.models import Model
from tinsmith.routes.call import Call, JsonObject, endpoint
from tinsmith.routes.submission import submit_json_operation
from tinsmith.wire.bodies import JSON_TYPE
from tinsmith.wire.fields import Fields
from tinsmith.wire.weights import LoadWeights, load_of, save_of


def save_weights(call: Call) -> JsonObject:
    return submit_json_operation(call, "save_weights", _check_save)


def _check_save(_model: Model, fields: Fields) -> None:
    asked = save_of(fields)
    if asked.name is None:
        raise UserError("path is missing; it names the checkpoint")
    check_name(asked.name)
    check_ttl(asked.ttl_s)


def save_weights_for_sampler(call: Call) -> JsonObject:
    """With a path: a checkpoint of that name. Without: a sampling session, and nothing is listed."""
    return submit_json_operation(call, "save_weights_for_sampler", _check_sampler_save)


def _check_sampler_save(_model: Model, fields: Fields) -> None:
    asked = save_of(fields)
    if asked.name is not None:
        check_name(asked.name)
    elif asked.sampling_session_seq_id is None:
        raise UserError("path and sampling_session_seq_id are both missing; one of them is needed")
    else:
        check_position("sampling_session_seq_id", asked.sampling_session_seq_id)
    check_ttl(asked.ttl_s)


def load_into_model(call: Call) -> JsonObject:
    """A load as an operation of an existing model: the adapter's form must be the checkpoint's."""

    def check(model: Model, fields: Fields) -> None:
        checkpoint = loadable(call, load_of(fields))
        if checkpoint.base_model != model.base_model or checkpoint.lora != replace(model.lora, seed=None):
            raise UserError(
                f"checkpoint {checkpoint.ref.path!r} has base model {checkpoint.base_model!r} and "
                f"{checkpoint.lora}, the model has {model.base_model!r} and {model.lora}; create the model "
                "from the checkpoint instead (create_training_client_from_state)"
            )

    return submit_json_operation(call, "load_weights", check)


def loadable(call: Call, asked: LoadWeights) -> Checkpoint:
    """The checkpoint that a load asks for, if it may be read and holds what the load needs."""
    checkpoint = call.services.checkpoints.get(call.tenant_id, parse_path(asked.path))
    if checkpoint.kind == "external_weights":
        raise UserError(f"path {asked.path!r} is an export; load a 'weights' checkpoint")
    if asked.optimizer and checkpoint.kind != "weights":
        raise UserError(
            f"path {asked.path!r} holds no optimizer state; load a 'weights' checkpoint, or load without the optimizer"
        )
    return checkpoint


ROUTES = [
    Route("/save_weights", endpoint(save_weights, JSON_TYPE), methods=["POST"]),
    Route("/save_weights_for_sampler", endpoint(save_weights_for_sampler, JSON_TYPE), methods=["POST"]),
]
