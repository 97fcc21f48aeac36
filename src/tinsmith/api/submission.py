"""Requests that become futures: validation, and storage before the response is sent.

Without a known model, an open session and a sequence number a request is an HTTP error. Any other request is stored. An
invalid one becomes a future that has already failed, so that its number counts as used and the client reads the reason
where it waits for the result; its handler gets a `Draft` of the body (`late`). The request_id consists of the model and
the number, so a repeated request finds the existing future. A different request with the same number is an HTTP error.

JSON operations of older clients have no number and take the model's next one on arrival. Repeating such a request
creates a second one, and the client must wait for each response before it sends the next request. If clients of both
kinds share a model, they may use the same number, which is the same error.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from structlog.contextvars import bind_contextvars

from tinsmith.api.request import Call, Draft, JsonObject
from tinsmith.api.services import Services
from tinsmith.errors import NotFoundError, SeqIdTakenError, TooManyRequestsError, UserError
from tinsmith.store.futures import Futures, NewFuture
from tinsmith.store.models import Model
from tinsmith.store.sessions import session_has_ended
from tinsmith.wire.fields import Body, Integer, Text, show

B = TypeVar("B", bound=Body)

MAX_ID_LENGTH = 128
MAX_SEQ_ID = 2**62
SAVE_KINDS = ("save_weights", "save_weights_for_sampler", "save_weights_external")
"""With a path, these save a checkpoint."""


class TokenCount(NamedTuple):
    """The tokens of a request; `shared`: those that its data share with earlier ones, which cost nothing."""

    total: int = 0
    shared: int = 0


Check = Callable[[Model, str], TokenCount]
"""Validates a request for (model, request_id). Returns its number of tokens, or raises UserError."""


class ModelRequest(Body):
    """The required fields of every JSON operation on a model."""

    model_id: Text
    seq_id: Integer | None = None


def accept(services: Services, new: NewFuture, refusal: UserError | None = None) -> str:
    """Store a request, as failed if it is refused, and return its request_id. Without a seq_id it takes the model's
    next one.
    """
    submit = services.futures.submit if new.seq_id is not None else partial(_submit_next, services.futures)
    request_id = submit(new, refusal)
    if refusal is not None:  # a poll of the whole session may already be waiting for it
        services.waiters.wake_from_thread([request_id])
    return request_id


def _submit_next(futures: Futures, new: NewFuture, refusal: UserError | None) -> str:
    """Store a request under the model's next number. Its id is unique, so that a collision is detected."""
    assert new.model_id is not None
    while True:
        seq_id = futures.next_seq_id(new.model_id)
        request_id = f"{new.model_id}:{seq_id}:{secrets.token_hex(4)}"
        with suppress(SeqIdTakenError):  # a concurrent request took the number
            return futures.submit(replace(new, request_id=request_id, seq_id=seq_id), refusal)


def check_seq_id(seq_id: int) -> int:
    """Validate the sequence number of a training request; they start at 1, because the model's creation is 0."""
    if not 1 <= seq_id <= MAX_SEQ_ID:
        raise UserError(f"seq_id is {seq_id}; it must lie between 1 and {MAX_SEQ_ID}")
    return seq_id


def submit_operation(call: Call, kind: str, model_id: str, seq_id: int | None, check: Check) -> JsonObject:
    """Validate and store one operation on a model. Without a seq_id it takes the model's next one."""
    if seq_id is not None:
        check_seq_id(seq_id)
    model = get_trainable_model(call, model_id)
    request_id = f"{model.model_id}:{seq_id}"
    bind_contextvars(model_id=model.model_id, request_id=request_id)
    tokens, refusal = TokenCount(), None
    try:
        model.require_usable()
        tokens = check(model, request_id)
    except TooManyRequestsError:
        raise  # nothing is stored; the client retries
    except UserError as error:
        refusal = error
    new = NewFuture(
        request_id=request_id,
        tenant_id=call.tenant_id,
        session_id=model.session_id,
        base_model=model.base_model,
        kind=kind,
        body=call.body,
        num_tokens=tokens.total,
        shared_tokens=tokens.shared,
        model_id=model.model_id,
        seq_id=seq_id,
        engine_id=model.engine_id,
    )
    if refusal is None:
        call.services.quotas.admit(new)
    return {"request_id": accept(call.services, new, refusal), "model_id": model.model_id}


def submit_json_operation(
    call: Call, kind: str, draft: Draft[B], check: Callable[[Model, B], object], refusal: UserError | None = None
) -> JsonObject:
    """Validate and store an operation with a JSON body. `refusal` is an error known before."""
    ids = draft.read_required(ModelRequest)

    def check_body(model: Model, request_id: str) -> TokenCount:
        if refusal is not None:
            raise refusal
        check(model, draft.read())
        if kind in SAVE_KINDS and draft.values.get("path") is not None:
            call.services.quotas.admit_checkpoint(call.tenant_id, request_id)
        return TokenCount()

    return submit_operation(call, kind, ids.model_id, ids.seq_id, check_body)


def get_trainable_model(call: Call, model_id: str) -> Model:
    """Return a model of the tenant whose session has not ended. Raises UserError otherwise."""
    if len(model_id) > MAX_ID_LENGTH or "\x00" in model_id:  # protobuf does not bound it
        raise NotFoundError(f"model_id {show(model_id)} is unknown")
    model, end_reason = call.services.models.get_with_session(call.tenant_id, model_id)
    if model.state == "copied":
        raise UserError(
            f"training run {model_id!r} holds a copied checkpoint ({model.reason}) and cannot be trained; "
            "create a model from its checkpoint (create_training_client_from_state)"
        )
    if end_reason is not None:
        raise session_has_ended(model.session_id, end_reason)
    return model
