"""How a request becomes a future, whatever it asks for.

What cannot be attributed (no such model, an ended session, no sequence number) is an HTTP error. Everything
else is stored, valid or not: an invalid request is a future that is refused at birth, so that its number
counts as used and the client reads the reason where it waits for the result. The request_id is made of the
model and the number: a request that is sent twice finds the future that it made before.

JSON operations of older clients come without a number and take the model's next one as they arrive. Such a request
that is sent twice is two requests, and their client must not send one before it has the last one's answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

from structlog.contextvars import bind_contextvars

from tinsmith.admission import check_seq_id
from tinsmith.errors import NotFoundError, TooManyRequestsError, UserError
from tinsmith.futures import NewFuture
from tinsmith.models import Model
from tinsmith.routes.call import Call, JsonObject
from tinsmith.sessions import session_has_ended
from tinsmith.wire.fields import Fields, show

MAX_ID_LENGTH = 128
SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")  # with a path, to a checkpoint

Judge = Callable[[Model, str], int]
"""Checks a request for (model, request_id); answers its tokens, or raises UserError."""


def submit_operation(call: Call, kind: str, model_id: str, seq_id: int | None, judge: Judge) -> JsonObject:
    """Store one operation on a model; without a seq_id it takes the next."""
    if seq_id is not None:
        check_seq_id(seq_id, first=1)
    model = owned_model(call, model_id)
    request_id = f"{model.model_id}:{seq_id}"
    bind_contextvars(model_id=model.model_id, request_id=request_id)
    num_tokens, refusal = 0, None
    try:
        model.require_usable()
        num_tokens = judge(model, request_id)
    except TooManyRequestsError:
        raise  # nothing is stored, and the client sends it again
    except UserError as error:
        refusal = error
    new = NewFuture(
        request_id=request_id,
        tenant_id=call.tenant_id,
        session_id=model.session_id,
        base_model=model.base_model,
        kind=kind,
        body=call.body,
        num_tokens=num_tokens,
        model_id=model.model_id,
        seq_id=seq_id,
        engine_id=model.engine_id,
    )
    if refusal is None:
        call.services.quotas.admit(new)
    if seq_id is None:
        request_id = _submit_next(call, new, refusal)
    else:
        call.services.futures.submit(new, refusal)
    return {"request_id": request_id, "model_id": model.model_id}


def _submit_next(call: Call, new: NewFuture, refusal: UserError | None) -> str:
    """Store a request under the next number of its model. The id is its own, so that it shows whose the number is."""
    futures = call.services.futures
    assert new.model_id is not None
    while True:
        seq_id = futures.next_seq_id(new.model_id)
        request_id = f"{new.model_id}:{seq_id}:{secrets.token_hex(4)}"
        futures.submit(replace(new, request_id=request_id, seq_id=seq_id), refusal)
        if futures.kind_of(new.tenant_id, request_id) is not None:
            return request_id


def submit_json_operation(call: Call, kind: str, check: Callable[[Model, Fields], object]) -> JsonObject:
    """The same for a JSON body, which names its model and number itself."""
    fields = call.fields()

    def judge(model: Model, request_id: str) -> int:
        check(model, fields)
        if kind in SAVES and fields.has("path"):
            call.services.quotas.admit_checkpoint(call.tenant_id, request_id)
        return 0

    return submit_operation(call, kind, fields.text("model_id"), fields.integer_or("seq_id", None), judge)


def owned_model(call: Call, model_id: str) -> Model:
    """The tenant's own model in a session that has not ended."""
    if len(model_id) > MAX_ID_LENGTH or "\x00" in model_id:  # from protobuf it comes unbounded
        raise NotFoundError(f"model_id {show(model_id)} is unknown")
    model, ended = call.services.models.get_with_session(call.tenant_id, model_id)
    if model.state == "copied":
        raise UserError(
            f"training run {model_id!r} holds a copied checkpoint ({model.reason}) and cannot be trained; "
            "create a model from its checkpoint (create_training_client_from_state)"
        )
    if ended is not None:
        raise session_has_ended(model.session_id, ended)
    return model
