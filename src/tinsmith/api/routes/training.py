"""Training operations: forward, forward_backward, optim_step.

Passes are protobuf. Older clients send them as JSON, which becomes the same message before anything looks at it.
"""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinsmith.api.admission import check_optimizer
from tinsmith.api.operation import Call, Endpoint
from tinsmith.api.submission import Submission, Submit, submission, submit_json_operation, submit_operation
from tinsmith.errors import UserError
from tinsmith.losses import check_pass, loss_id_of
from tinsmith.store.models import Model
from tinsmith.wire import tinker_public_pb2 as pb
from tinsmith.wire.bodies import JSON_TYPE, PROTO_TYPE
from tinsmith.wire.custom_loss import read_definition
from tinsmith.wire.fields import Fields
from tinsmith.wire.legacy import pass_message
from tinsmith.wire.training import optim_step_of, parse_pass, pass_of, spans_of


def forward_backward(call: Call) -> Submission:
    """Both passes: the SDK sends forward here, too, with `forward_only` set."""
    message = parse_pass(call.body)
    return _submit_pass(call, message, message.seq_id)


def _submit_pass(call: Call, message: pb.ForwardBackwardRequest, seq_id: int | None) -> Submission:
    def judge(model: Model, request_id: str) -> int:
        pass_ = pass_of(message, request_id)
        if (loss_id := loss_id_of(pass_)) is not None:
            call.wait()
            definition = call.services.custom_losses.get(model.session_id, loss_id)
            pass_ = replace(pass_, custom_loss=read_definition(definition))
        check_pass(pass_, call.services.bases.get(model.base_model))
        if pass_.loss_fn == "stable_reinforce":
            call.wait()
            call.services.sequences.admit(model.session_id, pass_, spans_of(message))
        return pass_.num_tokens

    kind = "forward" if message.forward_only else "forward_backward"
    return submit_operation(call, kind, message.model_id, seq_id, judge)


def forward(call: Call) -> Submission:
    """The path of its own that older clients know. The stored body says itself that it is forward only."""
    message = parse_pass(call.body)
    message.forward_only = True
    return forward_backward(replace(call, body=message.SerializeToString(deterministic=True)))


def json_forward_backward(call: Call) -> Submission:
    return _submit_json_pass(call, forward_only=call.fields().flag_or("forward_only", False))


def json_forward(call: Call) -> Submission:
    return _submit_json_pass(call, forward_only=True)


def _submit_json_pass(call: Call, *, forward_only: bool) -> Submission:
    fields = call.fields()
    model_id, seq_id = fields.text("model_id"), fields.integer_or("seq_id", None)
    try:
        message = pass_message(fields, forward_only=forward_only)
    except UserError as error:
        return _refuse(call, "forward" if forward_only else "forward_backward", model_id, seq_id, error)
    return _submit_pass(replace(call, body=message.SerializeToString(deterministic=True)), message, seq_id)


def _refuse(call: Call, kind: str, model_id: str, seq_id: int | None, error: UserError) -> Submission:
    def judge(_model: Model, _request_id: str) -> int:
        raise error

    return submit_operation(call, kind, model_id, seq_id, judge)


def optim_step(call: Call) -> Submission:
    return submit_json_operation(call, "optim_step", _check_optim_step)


def _check_optim_step(model: Model, fields: Fields) -> None:
    check_optimizer(model.optimizer_type, optim_step_of(fields, "").params)


def by_content_type(proto: Submit, json: Submit) -> Endpoint:
    from_proto, from_json = submission(proto, PROTO_TYPE), submission(json, JSON_TYPE)

    async def respond(request: Request) -> Response:
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        return await (from_json if content_type == JSON_TYPE else from_proto)(request)

    return respond


ROUTES = [
    Route("/forward_backward", by_content_type(forward_backward, json_forward_backward), methods=["POST"]),
    Route("/optim_step", submission(optim_step, JSON_TYPE), methods=["POST"]),
    Route("/forward", by_content_type(forward, json_forward), methods=["POST"]),
]
