"""Training operations: forward, forward_backward, optim_step."""

from __future__ import annotations

from dataclasses import replace

from starlette.routing import Route

from tinsmith.admission import check_optimizer
from tinsmith.losses import check_pass
from tinsmith.models import Model
from tinsmith.routes.call import Call, JsonObject, endpoint
from tinsmith.routes.submission import submit_json_operation, submit_operation
from tinsmith.wire.bodies import JSON_TYPE, PROTO_TYPE
from tinsmith.wire.fields import Fields
from tinsmith.wire.training import optim_step_of, parse_pass, pass_of


def forward_backward(call: Call) -> JsonObject:
    """Both passes: the SDK sends forward here, too, with `forward_only` set."""
    message = parse_pass(call.body)

    def judge(model: Model, request_id: str) -> int:
        pass_ = pass_of(message, request_id)
        check_pass(pass_, call.services.bases.get(model.base_model))
        return pass_.num_tokens

    kind = "forward" if message.forward_only else "forward_backward"
    return submit_operation(call, kind, message.model_id, message.seq_id, judge)


def forward(call: Call) -> JsonObject:
    """The path of its own that older clients know. The stored body says itself that it is forward only."""
    message = parse_pass(call.body)
    message.forward_only = True
    return forward_backward(replace(call, body=message.SerializeToString()))


def optim_step(call: Call) -> JsonObject:
    return submit_json_operation(call, "optim_step", _check_optim_step)


def _check_optim_step(model: Model, fields: Fields) -> None:
    check_optimizer(model.optimizer_type, optim_step_of(fields, "").params)


ROUTES = [
    Route("/forward_backward", endpoint(forward_backward, PROTO_TYPE), methods=["POST"]),
    Route("/optim_step", endpoint(optim_step, JSON_TYPE), methods=["POST"]),
    Route("/forward", endpoint(forward, PROTO_TYPE), methods=["POST"]),
]
