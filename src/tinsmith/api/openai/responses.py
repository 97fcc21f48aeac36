"""OpenAI's responses: create, stream, retrieve, cancel, delete, and continue from an earlier one.

A stored response names its samples, which are durable futures. A background response therefore needs no task in the
server that created it. While it is unanswered, `server/pending_responses.py` keeps its samples alive, and stores its
output once they have settled; a retrieve does both as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from starlette.responses import Response as HttpResponse

from tinsmith.api.openai.generation import (
    cancel_samples,
    prepare_plan,
    read_and_prepare,
    sample_outcome,
    submit_all,
)
from tinsmith.api.openai.streaming import respond
from tinsmith.api.openapi import ANYTHING, FLAG, GENERATION, LIST, TEXT, fields, for_openai
from tinsmith.api.request import Call, JsonObject, capture_session, json_response, run
from tinsmith.api.services import Services
from tinsmith.chat.responses import ResponseAnswer, ResponseRequest, items_after
from tinsmith.errors import GoneError, NotFoundError, RequestError, TinsmithError, not_supported
from tinsmith.store.responses import StoredResponse
from tinsmith.store.server_sessions import SampleId, session_of
from tinsmith.wire.fields import IgnoredFields, validate

RESPONSE = fields({"id": TEXT, "status": TEXT, "model": TEXT, "output": LIST}, {"usage": ANYTHING, "error": ANYTHING})
PENDING_STATUSES = ("queued", "in_progress")


class PreparedResponse:
    """A validated request for a response, with the items of the conversation before it."""

    def __init__(
        self,
        services: Services,
        tenant_id: str,
        values: JsonObject,
        ignored: IgnoredFields,
        capture: str | None = None,
    ) -> None:
        """Call it on a worker thread. Raises UserError."""
        self.values = values
        self.request = validate(ResponseRequest, values, ignored)
        self.earlier_items: list[JsonObject] = []
        if previous_id := self.request.previous_response_id:
            self.earlier_items = _conversation_items(services, tenant_id, previous_id)
        find_recording = None if capture is None else partial(services.exchanges.find_answered, tenant_id, capture)
        plan = partial(self.request.plan, earlier_items=self.earlier_items, find_recording=find_recording)
        if self.request.store:
            services.quotas.admit_response(tenant_id)
        self._responses = services.responses
        self.prepared = prepare_plan(services, tenant_id, self.request.model, plan, ignored, capture)
        self.answer = ResponseAnswer(
            self.request, self.prepared.plan, self.prepared.tokenizer, on_end=self._store_answer
        )

    def store(self, sample_ids: list[SampleId]) -> None:
        if self.request.store:
            request_ids = [sample_id.request_id for sample_id in sample_ids]
            self._responses.add(
                self.prepared.tenant_id, self.answer.response_id, self.values, self.earlier_items, request_ids
            )

    def _store_answer(self, body: JsonObject) -> JsonObject:
        if self.request.store and not self._responses.end(self.prepared.tenant_id, self.answer.response_id, body):
            stored = self._responses.find(self.prepared.tenant_id, self.answer.response_id)  # it was cancelled
            return stored.answer or body
        return body

    def submit(self) -> JsonObject:
        """Start a background response and return it."""
        sample_ids: list[SampleId] = []
        try:
            submit_all(self.prepared, sample_ids)
            self.store(sample_ids)
        except BaseException:
            cancel_samples(self.prepared.services, sample_ids)
            raise
        return self.answer.body("queued")


def _conversation_items(services: Services, tenant_id: str, response_id: str) -> list[JsonObject]:
    """Return the conversation up to and including a response. Raises RequestError if the response is not complete."""
    try:
        stored = services.responses.find(tenant_id, response_id)
    except NotFoundError as error:
        raise RequestError("previous_response_id", str(error), "previous_response_not_found") from None
    body = stored.answer or complete_response(services, stored)
    if body["status"] not in ("completed", "incomplete"):
        raise RequestError(
            "previous_response_id", f"previous_response_id names a response that is {body['status']}; wait for it"
        )
    return items_after(validate(ResponseRequest, stored.request, IgnoredFields()), stored.before, body)


@for_openai(
    "POST",
    "/responses",
    "Create a response, whole or streamed",
    body=ResponseRequest,
    answer=RESPONSE,
    example={"model": "{model}", "input": "hi"},
    errors=GENERATION,
)
async def create(call: Call) -> HttpResponse:
    capture = capture_session(call.request)
    prepared = await read_and_prepare(
        call, lambda values: PreparedResponse(call.services, call.tenant_id, values, call.ignored, capture)
    )
    if prepared.request.background and prepared.prepared.capture is not None:
        raise not_supported("background", "in a capture session; wait for the response, or stream it")
    if prepared.request.background:
        return json_response(await run(prepared.submit), headers=prepared.prepared.headers)
    return await respond(call.request, prepared.prepared, prepared.answer, prepared.store)


@for_openai("GET", "/responses/{response_id}", "Retrieve a stored response", answer=RESPONSE)
def retrieve(call: Call) -> JsonObject:
    stored = call.services.responses.find(call.tenant_id, call.path["response_id"])
    return stored.answer or complete_response(call.services, stored)


@for_openai("POST", "/responses/{response_id}/cancel", "Cancel a response", answer=RESPONSE)
def cancel(call: Call) -> JsonObject:
    """Cancel a response; a complete one does not change."""
    services = call.services
    stored = services.responses.find(call.tenant_id, call.path["response_id"])
    body = stored.answer or complete_response(services, stored)
    if body["status"] not in PENDING_STATUSES:
        return body
    cancelled_body = {**body, "status": "cancelled"}
    services.responses.end(call.tenant_id, stored.response_id, cancelled_body)
    _cancel_samples(services, stored, "its response was cancelled")
    return services.responses.find(call.tenant_id, stored.response_id).answer or cancelled_body


@for_openai("DELETE", "/responses/{response_id}", "Delete a response", answer=fields({"id": TEXT, "deleted": FLAG}))
def delete(call: Call) -> JsonObject:
    """Delete a response, and cancel it if it is not complete."""
    stored = call.services.responses.find(call.tenant_id, call.path["response_id"])
    call.services.responses.delete(call.tenant_id, stored.response_id)
    if stored.answer is None:
        _cancel_samples(call.services, stored, "its response was deleted")
    return {"id": stored.response_id, "object": "response", "deleted": True}


def _cancel_samples(services: Services, stored: StoredResponse, reason: str) -> None:
    for request_id in stored.request_ids:
        with suppress(NotFoundError):
            services.futures.cancel(stored.tenant_id, request_id, reason)


def keep_samples_alive(services: Services, tenant_id: str, request_ids: Sequence[str]) -> None:
    """Keep the sessions of pending samples alive."""
    for session_id in {session_of(request_id) for request_id in request_ids}:
        with suppress(GoneError, NotFoundError):  # its samples are cancelled, which completes the response
            services.implicit_sessions.keep(tenant_id, session_id)


def complete_response(services: Services, stored: StoredResponse) -> JsonObject:
    """Return a response without a stored answer: with its output, which is stored, if its samples have settled, else
    with its status.
    """
    request = validate(ResponseRequest, stored.request, IgnoredFields())
    plan = partial(request.plan, earlier_items=stored.before)
    prepared = prepare_plan(services, stored.tenant_id, request.model, plan, IgnoredFields())
    response = ResponseAnswer(request, prepared.plan, prepared.tokenizer, stored.response_id, stored.created_at)
    try:
        result = sample_outcome(services, stored.tenant_id, stored.request_ids[0])
        body = response.body("in_progress") if result is None else response.build_response([result])
    except TinsmithError as error:
        body = response.build_failure(error)
    if body["status"] in PENDING_STATUSES:
        keep_samples_alive(services, stored.tenant_id, stored.request_ids)
        return body
    services.responses.end(stored.tenant_id, stored.response_id, body)
    return services.responses.find(stored.tenant_id, stored.response_id).answer or body
