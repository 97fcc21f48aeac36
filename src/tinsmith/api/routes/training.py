"""Training operations (forward, forward_backward, optim_step) and custom losses.

Passes are protobuf messages, to which JSON of older clients is converted first. A traced custom loss is validated and
stored, and a later forward_backward names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import orjson

from tinsmith.api.declaration import operation
from tinsmith.api.legacy import JsonPassBody, pass_message
from tinsmith.api.request import Call, Draft, JsonObject
from tinsmith.api.submission import ModelRequest, TokenCount, submit_json_operation, submit_operation
from tinsmith.errors import NotFoundError, SeqIdTakenError, UserError
from tinsmith.losses import check_pass, loss_id_of, loss_registry
from tinsmith.losses.graphs import check_graph
from tinsmith.plan.prefix_tree import count_shared_tokens
from tinsmith.store.custom_losses import MAX_DEFINITION_BYTES, MAX_LOSSES, NewCustomLoss, insertion
from tinsmith.store.futures import NewFuture
from tinsmith.store.models import Model
from tinsmith.types import OPTIMIZERS, OptimParams
from tinsmith.wire import tinker_public_pb2 as pb
from tinsmith.wire.bodies import JSON_TYPE, PROTO_TYPE
from tinsmith.wire.custom_loss import (
    CreateCustomLossRequest,
    NewCustomLossRequest,
    create_custom_loss_of,
    read_definition,
)
from tinsmith.wire.fields import Body, validate
from tinsmith.wire.training import OptimStepRequest, optim_step_of, parse_pass, pass_of, spans_of

PASS_TYPES = (JSON_TYPE, PROTO_TYPE)


class PassMode(Body):
    forward_only: bool = False


def _submit_message(call: Call, message: pb.ForwardBackwardRequest) -> JsonObject:
    """Submit either pass. The SDK also sends forward passes to /forward_backward, with `forward_only` set."""
    return _submit_pass(call, message, message.seq_id)


def _submit_pass(call: Call, message: pb.ForwardBackwardRequest, seq_id: int | None) -> JsonObject:
    def check(model: Model, request_id: str) -> TokenCount:
        shape = call.services.bases.get(model.base_model)
        pass_ = pass_of(message, request_id, shape.vision)
        if (loss_id := loss_id_of(pass_)) is not None:
            definition = call.services.custom_losses.get(model.session_id, loss_id)
            pass_ = replace(pass_, custom_loss=read_definition(definition))
        check_pass(pass_, shape)
        if loss_registry()[pass_.loss_fn].recorded_sequences:
            call.services.sequences.admit(model.session_id, pass_, spans_of(message))
        return TokenCount(pass_.num_tokens, count_shared_tokens(pass_.data))

    kind = "forward" if message.forward_only else "forward_backward"
    return submit_operation(call, kind, message.model_id, seq_id, check)


def _submit_json_pass(call: Call, values: Mapping[str, object], *, forward_only: bool) -> JsonObject:
    ids = validate(ModelRequest, values)
    try:
        message = pass_message(values, forward_only=forward_only)
    except UserError as error:
        return _refuse(call, "forward" if forward_only else "forward_backward", ids, error)
    return _submit_pass(replace(call, body=message.SerializeToString(deterministic=True)), message, ids.seq_id)


def _refuse(call: Call, kind: str, ids: ModelRequest, error: UserError) -> JsonObject:
    def check(_model: Model, _request_id: str) -> TokenCount:
        raise error

    return submit_operation(call, kind, ids.model_id, ids.seq_id, check)


@operation(
    "POST",
    "/optim_step",
    "Take an optimizer step",
    body=OptimStepRequest,
    example={"model_id": "{model_id}", "seq_id": 5, "adam_params": {"learning_rate": 0.1}},
    late=True,
)
def optim_step(call: Call, draft: Draft[OptimStepRequest]) -> JsonObject:
    return submit_json_operation(call, "optim_step", draft, _check_optim_step)


def check_optimizer(optimizer_type: str, params: OptimParams) -> None:
    """Raise UserError unless the parameters belong to the model's optimizer family."""
    if params.family != optimizer_type:
        raise UserError(
            f"the model was created with optimizer {optimizer_type!r}, and this step has parameters of "
            f"{params.family!r}; send {OPTIMIZERS[optimizer_type].wire_field}"
        )


def _check_optim_step(model: Model, request: OptimStepRequest) -> None:
    check_optimizer(model.optimizer_type, optim_step_of(request, "").params)


@operation(
    "POST",
    "/forward_backward",
    "Run a forward or forward-backward pass",
    body=JsonPassBody,
    takes=PASS_TYPES,
    example={"model_id": "{model_id}", "seq_id": 5, "loss_fn": "cross_entropy", "data": []},
    late=True,
)
def forward_backward(call: Call, draft: Draft[JsonPassBody]) -> JsonObject:
    if call.media_type == PROTO_TYPE:
        return _submit_message(call, parse_pass(call.body))
    return _submit_json_pass(call, draft.values, forward_only=draft.read_required(PassMode).forward_only)


@operation(
    "POST",
    "/forward",
    "Run a forward pass",
    body=JsonPassBody,
    takes=PASS_TYPES,
    example={"model_id": "{model_id}", "seq_id": 5, "loss_fn": "cross_entropy", "data": []},
    late=True,
)
def forward(call: Call, draft: Draft[JsonPassBody]) -> JsonObject:
    """Submit a forward pass of an older client. The stored body has `forward_only` set."""
    if call.media_type != PROTO_TYPE:
        return _submit_json_pass(call, draft.values, forward_only=True)
    message = parse_pass(call.body)
    message.forward_only = True
    return _submit_message(replace(call, body=message.SerializeToString(deterministic=True)), message)


@operation(
    "POST",
    "/create_custom_loss",
    "Store a traced custom loss",
    body=CreateCustomLossRequest,
    example={
        "session_id": "{session_id}",
        "custom_loss_seq_id": 0,
        "name": "x",
        "inputs": [],
        "graph": {"format": 1, "nodes": [{"op": "output", "name": "output", "target": "output"}]},
    },
    late=True,
)
def create_custom_loss(call: Call, draft: Draft[CreateCustomLossRequest]) -> JsonObject:
    """Store a traced loss. No engine takes part, so the future is stored as completed or failed."""
    services, ids = call.services, draft.read_required(NewCustomLossRequest)
    session = services.sessions.require_active(call.tenant_id, ids.session_id)
    loss_seq_id = ids.custom_loss_seq_id
    loss_id = f"{session.session_id}:loss:{loss_seq_id}"
    new = NewFuture(
        request_id=loss_id,
        tenant_id=call.tenant_id,
        session_id=session.session_id,
        base_model="",  # not for an engine
        kind="create_custom_loss",
        body=call.body,
    )
    try:
        if loss_seq_id >= MAX_LOSSES:
            raise UserError(
                f"custom_loss_seq_id is {loss_seq_id}; a session may create at most {MAX_LOSSES} custom losses"
            )
        request = create_custom_loss_of(draft.values)
        if len(request.definition) > MAX_DEFINITION_BYTES:
            raise UserError(f"graph and inputs are {len(request.definition)} bytes; at most {MAX_DEFINITION_BYTES}")
        check_graph(request.loss)
    except UserError as error:
        return {"request_id": services.futures.submit(new, error)}
    stored = NewCustomLoss(loss_id, session.session_id, call.tenant_id, request.loss.name, request.definition)
    answer = orjson.dumps({"loss_id": loss_id, "type": "create_custom_loss"})
    request_id = services.futures.record(new, answer, [insertion(stored)])
    with suppress(NotFoundError):  # a refused loss had this number; its future has the reason
        if services.custom_losses.get(session.session_id, loss_id) != request.definition:
            raise SeqIdTakenError(
                f"custom_loss_seq_id {loss_seq_id} belongs to another loss; only the identical loss may repeat a "
                "number, so use the next one"
            )
    return {"request_id": request_id}
