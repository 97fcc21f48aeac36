"""Anthropic's message batches: create, get, list, results, cancel and delete.

A message batch is a batch of `batch.openai` whose endpoint is `/v1/messages`. Its requests are stored as an input file
of the tenant, and its results are read from the two files that the reconciler writes. Its requests may name different
models. OpenAI's routes do not list message batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

import orjson
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from tinsmith.api.access import Access
from tinsmith.api.declaration import ThreadPool
from tinsmith.api.links import base_url
from tinsmith.api.openai.files import RETENTION_S
from tinsmith.api.openapi import ANYTHING, FLAG, TEXT, fields, for_anthropic, one_of
from tinsmith.api.queries import AnthropicPageQuery
from tinsmith.api.request import Call, JsonObject
from tinsmith.api.services import Services
from tinsmith.batch.openai import MAX_REQUESTS, MESSAGES, WINDOW
from tinsmith.batch.openai.requests import check_requests
from tinsmith.batch.openai.rows import Batch, NewBatch
from tinsmith.chat.messages import anthropic_error
from tinsmith.errors import NotFoundError, RequestError, UserError
from tinsmith.store.files import BATCH, new_id
from tinsmith.wire.bodies import write_json_line
from tinsmith.wire.fields import ClosedBody, iso

MAX_LIMIT, DEFAULT_LIMIT = 1000, 20
JSONL_TYPE = "application/x-jsonl"
RESULTS = "/v1/messages/batches/{}/results"
ENDED = "ended"
PROCESSING_STATUSES = {
    "cancelling": "canceling",
    "completed": ENDED,
    "failed": ENDED,
    "cancelled": ENDED,
    "expired": ENDED,
}
UNFINISHED_RESULT_TYPES = {"batch_cancelled": "canceled", "batch_expired": "expired"}
"""The result type of a request that never ran, by the code of its line in the error file."""

MESSAGE_BATCH = fields(
    {
        "id": TEXT,
        "type": one_of("message_batch"),
        "processing_status": one_of("in_progress", "canceling", ENDED),
        "request_counts": ANYTHING,
        "created_at": TEXT,
        "expires_at": TEXT,
    },
    {"ended_at": TEXT, "cancel_initiated_at": TEXT, "archived_at": TEXT, "results_url": TEXT},
)


class BatchedRequest(ClosedBody):
    custom_id: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]


class CreateMessageBatchRequest(ClosedBody):
    """A request's `params` are validated when it runs; an invalid one has an errored result."""

    requests: Annotated[list[BatchedRequest], Field(min_length=1, max_length=MAX_REQUESTS)]

    def lines(self) -> Iterator[bytes]:
        for request in self.requests:
            line = {"custom_id": request.custom_id, "method": "POST", "url": MESSAGES, "body": request.params}
            yield write_json_line(line) + b"\n"


@for_anthropic(
    "POST",
    "/messages/batches",
    "Create a batch of messages",
    body=CreateMessageBatchRequest,
    answer=MESSAGE_BATCH,
    errors=(429,),
    access=Access.NOTHING,
)
def create(call: Call, request: CreateMessageBatchRequest) -> JsonObject:
    services = call.services
    with services.quotas.reserve_file(call.tenant_id) as reservation:
        lines = list(request.lines())
        checked = check_requests(enumerate(lines), (MESSAGES,), services.settings.max_body_bytes)
        if checked.problems:
            problem = checked.problems[0]
            raise RequestError("requests", f"requests[{problem.line}]: {problem.message}", problem.code)
        reservation.cover(sum(map(len, lines)))
        stored = services.files.store(new_id(), lines)
        file = services.files.add(call.tenant_id, stored, "message_batch.jsonl", BATCH, RETENTION_S)
    new = NewBatch(MESSAGES, file.file_id, WINDOW, None, None, checked.total)
    batch = services.openai_batches.create(call.tenant_id, new, services.settings.openai_batch_window_s)
    services.batch_reconciler.wake()
    return _batch_body(call, batch)


@for_anthropic("GET", "/messages/batches/{message_batch_id}", "Get a batch", answer=MESSAGE_BATCH)
def retrieve(call: Call) -> JsonObject:
    return _batch_body(call, _find_batch(call))


class MessageBatchesQuery(AnthropicPageQuery):
    limit: Annotated[int, Field(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT


@for_anthropic(
    "GET",
    "/messages/batches",
    "List batches, newest first",
    answer=fields({"data": {"type": "array", "items": MESSAGE_BATCH}, "has_more": FLAG}),
    errors=(404,),
    access=Access.LISTING,
    query=MessageBatchesQuery,
    filters=("?after_id={message_batch_id}", "?before_id={message_batch_id}"),
)
def listing(call: Call, query: MessageBatchesQuery) -> JsonObject:
    batches, has_more = call.services.openai_batches.page(
        call.tenant_id, query.limit, query.after_id, query.before_id, messages=True
    )
    end_ids = (batches[0].batch_id, batches[-1].batch_id) if batches else (None, None)
    data = [_batch_body(call, batch) for batch in batches]
    return {"data": data, "has_more": has_more, "first_id": end_ids[0], "last_id": end_ids[1]}


@for_anthropic("POST", "/messages/batches/{message_batch_id}/cancel", "Cancel a batch", answer=MESSAGE_BATCH)
def cancel(call: Call) -> JsonObject:
    cancelled = call.services.openai_batches.cancel(call.tenant_id, call.path["message_batch_id"], messages=True)
    call.services.batch_reconciler.wake()
    return _batch_body(call, cancelled)


@for_anthropic(
    "DELETE",
    "/messages/batches/{message_batch_id}",
    "Delete a batch and its files",
    answer=fields({"id": TEXT, "type": one_of("message_batch_deleted")}),
)
def delete(call: Call) -> JsonObject:
    batch = _require_ended(_find_batch(call), "deleted")
    call.services.openai_batches.delete(batch)
    for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        if file_id is not None:
            with contextlib.suppress(NotFoundError):
                call.services.files.delete(call.tenant_id, file_id)
    return {"id": batch.batch_id, "type": "message_batch_deleted"}


@for_anthropic(
    "GET",
    "/messages/batches/{message_batch_id}/results",
    "Read the results, one line per request",
    answer=JSONL_TYPE,
    threads=ThreadPool.TRANSFERS,
)
def results(call: Call) -> Response:
    batch = _require_ended(_find_batch(call), "read")
    file_ids = [file_id for file_id in (batch.output_file_id, batch.error_file_id) if file_id is not None]
    if not file_ids:
        reason = "; ".join(str(error["message"]) for error in batch.errors or ()) or f"it is {batch.status}"
        raise NotFoundError(f"batch {batch.batch_id!a} has no results: {reason}")
    for file_id in file_ids:
        call.services.files.find(call.tenant_id, file_id)
    return StreamingResponse(_results(call.services, file_ids), media_type=JSONL_TYPE)


def _find_batch(call: Call) -> Batch:
    return call.services.openai_batches.find(call.tenant_id, call.path["message_batch_id"], messages=True)


def _require_ended(batch: Batch, action: str) -> Batch:
    if batch.ended_at is None:
        raise UserError(f"batch {batch.batch_id!a} is {_status(batch)}; it can be {action} when it has ended")
    return batch


def _results(services: Services, file_ids: list[str]) -> Iterator[bytes]:
    for file_id in file_ids:
        with services.files.open(file_id) as file:
            for line in file:
                yield write_json_line(_result(orjson.loads(line))) + b"\n"


def _result(line: dict[str, Any]) -> JsonObject:
    """Convert a line of the output or error file to Anthropic's result."""
    response, error = line["response"], line["error"]
    if response is not None and response["status_code"] == 200:
        result: JsonObject = {"type": "succeeded", "message": response["body"]}
    elif response is not None:
        result = {"type": "errored", "error": response["body"]}
    elif error["code"] in UNFINISHED_RESULT_TYPES:
        result = {"type": UNFINISHED_RESULT_TYPES[error["code"]]}
    else:
        result = {"type": "errored", "error": anthropic_error(error["message"], 500)}
    return {"custom_id": line["custom_id"], "result": result}


def _status(batch: Batch) -> str:
    return PROCESSING_STATUSES.get(batch.status, "in_progress")


def _batch_body(call: Call, batch: Batch) -> JsonObject:
    has_ended = batch.ended_at is not None
    base = base_url(call.services.settings, call.scheme, call.headers)
    return {
        "id": batch.batch_id,
        "type": "message_batch",
        "processing_status": _status(batch),
        "request_counts": _counts(call.services, batch),
        "created_at": iso(batch.created_at),
        "expires_at": iso(batch.expires_at),
        "ended_at": _iso_or_none(batch.ended_at),
        "cancel_initiated_at": _iso_or_none(batch.cancelling_at),
        "archived_at": None,
        "results_url": base + RESULTS.format(batch.batch_id) if has_ended else None,
    }


def _iso_or_none(time_s: float | None) -> str | None:
    return None if time_s is None else iso(time_s)


def _counts(services: Services, batch: Batch) -> dict[str, int]:
    """Count requests by result. Until the batch has ended, every request counts as processing."""
    counts: dict[str, int] = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if batch.ended_at is None:
        return counts | {"processing": batch.total}
    unfinished_type = {"cancelled": "canceled", "expired": "expired"}.get(batch.status)
    if unfinished_type is not None and batch.error_file_id is not None:
        with contextlib.suppress(FileNotFoundError), services.files.open(batch.error_file_id) as file:
            counts[unfinished_type] = sum(orjson.loads(line)["response"] is None for line in file)
    num_errored = batch.total - batch.completed - sum(counts.values())
    return counts | {"succeeded": batch.completed, "errored": num_errored}
