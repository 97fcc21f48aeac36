"""How a request becomes a future, whatever it asks for.

What cannot be attributed (no such model, an ended session, no sequence number) is an HTTP error. Everything
else is stored, valid or not: an invalid request is a future that is refused at birth, so that its number
counts as used and the client reads the reason where it waits for the result. The request_id is made of the
model and the number: a request that is sent twice finds the future that it made before. Another request under the
same number is an HTTP error: what is not stored is not acknowledged.

JSON operations of older clients come without a number and take the model's next one as they arrive. Such a request
that is sent twice is two requests, and their client must not send one before it has the last one's answer. If clients
of both kinds share a model, a number may be taken when the client that counts comes to it: that is the same error.

A function that judges a request answers a `Submission`; `submission` makes a route of it. A short body is judged, and
stored if nobody else is writing, on the event loop: the way to a worker thread and back would take longer.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace

import orjson
from starlette.requests import Request
from starlette.responses import Response
from structlog.contextvars import bind_contextvars

from tinsmith.api.admission import check_seq_id
from tinsmith.api.operation import (
    SHORT_BYTES,
    Call,
    Endpoint,
    JsonObject,
    Services,
    WouldWaitError,
    authenticate,
    call_of,
    read_body,
    run,
    traced,
)
from tinsmith.errors import NotFoundError, SeqIdTakenError, TooManyRequestsError, UserError
from tinsmith.store.futures import NewFuture
from tinsmith.store.models import Model
from tinsmith.store.sessions import session_has_ended
from tinsmith.wire import bodies
from tinsmith.wire.fields import Fields, show

MAX_ID_LENGTH = 128
SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")  # with a path, to a checkpoint

Judge = Callable[[Model, str], int]
"""Checks a request for (model, request_id); answers its tokens, or raises UserError."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that was judged, to be stored before it is answered. An operation without a seq_id takes its model's
    next; `more` is what the answer says beside the request_id.
    """

    new: NewFuture
    refusal: UserError | None = None
    more: JsonObject = field(default_factory=dict)


Submit = Callable[[Call], Submission]


def submission(submit: Submit, takes: str) -> Endpoint:
    """The route of a function that judges a request; `takes` is the content type of its body."""

    async def respond(request: Request) -> Response:
        services, tenant_id = await authenticate(request)
        body = await read_body(request, takes)
        encoding = request.headers.get("content-encoding")

        def judge(*, may_wait: bool) -> Submission:
            decoded = bodies.decode(body, encoding, services.settings.max_body_bytes)
            return submit(replace(call_of(request, services, tenant_id, decoded), may_wait=may_wait))

        def work() -> JsonObject:
            return stored(services, judge(may_wait=True))

        with traced(request, services, tenant_id, submit.__name__) if services.tracing.on else nullcontext():
            if services.reads_wait or not bodies.is_within(body, encoding, SHORT_BYTES):
                content = await run(work)
            else:
                try:
                    judged = judge(may_wait=False)
                except WouldWaitError:
                    content = await run(work)
                else:
                    content = _stored_at_once(services, judged) or await run(stored, services, judged)
        return Response(orjson.dumps(content), media_type=bodies.JSON_TYPE)

    return respond


def stored(services: Services, judged: Submission) -> JsonObject:
    """Store a request that was judged, for its answer. May wait for others who write."""
    if judged.new.seq_id is None:
        return _answer(services, judged, _submit_next(services, judged))
    return _answer(services, judged, services.futures.submit(judged.new, judged.refusal))


def _stored_at_once(services: Services, judged: Submission) -> JsonObject | None:
    if judged.new.seq_id is None or not services.futures.submit_at_once(judged.new, judged.refusal):
        return None
    return _answer(services, judged, judged.new.request_id)


def _answer(services: Services, judged: Submission, request_id: str) -> JsonObject:
    if judged.refusal is not None:  # whoever follows a whole session may wait for it already
        services.waiters.settled_from_thread([request_id])
    return {"request_id": request_id, **judged.more}


def submit_operation(call: Call, kind: str, model_id: str, seq_id: int | None, judge: Judge) -> Submission:
    """One operation on a model, to be stored; without a seq_id it takes the next."""
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
    return Submission(new, refusal, {"model_id": model.model_id})


def _submit_next(services: Services, judged: Submission) -> str:
    """Store a request under the next number of its model. The id is its own, so that it shows whose the number is."""
    new, futures = judged.new, services.futures
    assert new.model_id is not None
    while True:
        seq_id = futures.next_seq_id(new.model_id)
        request_id = f"{new.model_id}:{seq_id}:{secrets.token_hex(4)}"
        with suppress(SeqIdTakenError):  # by a request that came in between
            return futures.submit(replace(new, request_id=request_id, seq_id=seq_id), judged.refusal)


def submit_json_operation(call: Call, kind: str, check: Callable[[Model, Fields], object]) -> Submission:
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
