"""OpenAI's batches: create, get, list and cancel. `batch.openai.reconciler` runs them.

As at OpenAI, the server reads the input file after it has created the batch, so an invalid file fails the batch.
"""

from __future__ import annotations

import asyncio
import hashlib
from http import HTTPStatus
from typing import Annotated

from pydantic import AfterValidator, Field

from tinsmith.api.access import Access
from tinsmith.api.openai.files import Expiry, page
from tinsmith.api.openai.generation import serve_request
from tinsmith.api.openapi import FLAG, fields, for_openai, ref
from tinsmith.api.request import Call, JsonObject
from tinsmith.api.services import Services
from tinsmith.batch.coordinator.model_gateway import RowRequest
from tinsmith.batch.openai import ENDPOINTS, WINDOW
from tinsmith.batch.openai.rows import Batch, NewBatch
from tinsmith.errors import RequestError, UserError
from tinsmith.store.files import BATCH
from tinsmith.wire.fields import NO_NUL, ClosedBody, OneOf, Query, Supported, Text, show, validation_error

MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512
MAX_LIMIT, DEFAULT_LIMIT = 100, 20
BUSY_STATUSES = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
RETRY_S = 1.0
BATCHES = fields({"data": {"type": "array", "items": ref("Batch")}, "has_more": FLAG})
MAX_RETRIES = 3


def _check_pairs(pairs: dict[str, str]) -> dict[str, str]:
    if len(pairs) > MAX_PAIRS:
        raise validation_error(f"has {len(pairs)} pairs; use at most {MAX_PAIRS}")
    for name in pairs:
        if len(name) > MAX_KEY or "\x00" in name:
            raise validation_error(f"has the key {show(name)}; keys have at most {MAX_KEY} characters without NUL")
    return pairs


Value = Annotated[str, Field(max_length=MAX_VALUE, pattern=NO_NUL)]


class CreateBatchRequest(ClosedBody):
    missing_code = "missing_required_parameter"

    input_file_id: Text
    endpoint: Annotated[Text, Supported(ENDPOINTS, f"use one of {list(ENDPOINTS)}")]
    completion_window: Annotated[str, OneOf((WINDOW,))]
    metadata: Annotated[dict[str, Value], AfterValidator(_check_pairs)] | None = None
    output_expires_after: Expiry | None = None


@for_openai(
    "POST",
    "/batches",
    "Create a batch of the requests in a file",
    body=CreateBatchRequest,
    answer=ref("Batch"),
    example={"input_file_id": "{file_id}", "endpoint": "/v1/completions", "completion_window": "24h"},
)
def create(call: Call, request: CreateBatchRequest) -> JsonObject:
    services = call.services
    file = services.files.find(call.tenant_id, request.input_file_id)
    if file.purpose != BATCH:
        message = f"file {file.file_id!r} has the purpose {file.purpose!r}; a batch needs a file of purpose 'batch'"
        raise RequestError("input_file_id", message)
    new = NewBatch(
        endpoint=request.endpoint,
        input_file_id=file.file_id,
        completion_window=request.completion_window,
        labels=request.metadata,
        output_expires_s=request.output_expires_after and request.output_expires_after.seconds,
    )
    batch = services.openai_batches.create(call.tenant_id, new, services.settings.openai_batch_window_s)
    services.batch_reconciler.wake()
    return batch_body(batch)


async def answer_request(services: Services, request: RowRequest) -> dict[str, object]:
    """Serve one line of a batch's file as its route would. Waits for quotas and capacity, and retries server errors."""
    url, body = request.payload.get("url"), request.payload.get("body")
    if not isinstance(url, str) or not isinstance(body, dict):
        raise UserError("the line must have a url, and a body that is an object")
    tries = 0
    while True:
        status, response_body = await serve_request(services, request.tenant_id, url, body)
        if status in BUSY_STATUSES:
            await asyncio.sleep(RETRY_S)
        elif status >= HTTPStatus.INTERNAL_SERVER_ERROR and tries < MAX_RETRIES:
            tries += 1
            await asyncio.sleep(RETRY_S * 2**tries)
        else:
            name = f"{request.job_id}:{request.row_idx}".encode()
            request_id = f"req_{hashlib.sha256(name).hexdigest()[:32]}"
            return {"status_code": status, "request_id": request_id, "body": response_body}


@for_openai("GET", "/batches/{batch_id}", "Get a batch", answer=ref("Batch"))
def batch(call: Call) -> JsonObject:
    return batch_body(call.services.openai_batches.find(call.tenant_id, call.path["batch_id"]))


class BatchesQuery(Query):
    limit: Annotated[int, Field(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT
    after: Text | None = None


@for_openai(
    "GET",
    "/batches",
    "List batches, newest first",
    answer=BATCHES,
    errors=(404,),
    access=Access.LISTING,
    query=BatchesQuery,
    filters=("?after={batch_id}",),
)
def listing(call: Call, query: BatchesQuery) -> JsonObject:
    batches, has_more = call.services.openai_batches.page(call.tenant_id, query.limit, query.after)
    return page([batch_body(batch) for batch in batches], has_more)


@for_openai("POST", "/batches/{batch_id}/cancel", "Cancel a batch", answer=ref("Batch"))
def cancel(call: Call) -> JsonObject:
    batch = call.services.openai_batches.cancel(call.tenant_id, call.path["batch_id"])
    call.services.batch_reconciler.wake()
    return batch_body(batch)


def batch_body(batch: Batch) -> JsonObject:
    status = "finalizing" if batch.status == "expiring" else batch.status
    times = {
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        "in_progress_at": batch.in_progress_at,
        "finalizing_at": batch.finalizing_at,
        "cancelling_at": batch.cancelling_at,
        **{f"{end_status}_at": batch.ended_at if status == end_status else None for end_status in _END_STATUSES},
    }
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": None if batch.errors is None else {"object": "list", "data": batch.errors},
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        **{name: None if time_s is None else int(time_s) for name, time_s in times.items()},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": batch.usage,
        "metadata": batch.labels,
    }


_END_STATUSES = ("completed", "failed", "expired", "cancelled")
