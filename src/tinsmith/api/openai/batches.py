"""OpenAI's batches: made, looked at, listed and cancelled. `batch/openai/reconciler.py` does the rest.

The file of a batch is read after it was made, as OpenAI does it: what is wrong with it is told by a batch that failed.
"""

from __future__ import annotations

import asyncio
import hashlib
from http import HTTPStatus

from tinsmith.api.openai.files import EXPIRY, MAX_KEPT_S, MIN_KEPT_S, page, page_limit
from tinsmith.api.openai.generation import answer
from tinsmith.api.openapi import FLAG, SHORT_TEXT, TEXT, fields, integer, one_of, ref
from tinsmith.api.operation import OPENAI, Access, Call, JsonObject, Services, operation
from tinsmith.batch.coordinator.model_gateway import Question
from tinsmith.batch.openai import ENDPOINTS, WINDOW
from tinsmith.batch.openai.rows import Batch, NewBatch
from tinsmith.chat.refusals import RequestError, not_supported
from tinsmith.errors import UserError
from tinsmith.store.files import BATCH
from tinsmith.wire.fields import Fields, show

FIELDS = frozenset(("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"))
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512
MAX_LISTED, LISTED = 100, 20
WAIT = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
RETRY_S = 1.0
BATCH_BODY = fields(
    {"input_file_id": SHORT_TEXT, "endpoint": one_of(*ENDPOINTS), "completion_window": one_of(WINDOW)},
    {
        "metadata": {"type": "object", "additionalProperties": {"type": "string", "maxLength": MAX_VALUE}},
        "output_expires_after": fields({"anchor": one_of("created_at"), "seconds": EXPIRY}),
    },
)
BATCHES = fields({"data": {"type": "array", "items": ref("Batch")}, "has_more": FLAG})
MAX_RETRIES = 3


@operation(
    "POST",
    "/batches",
    "Have the requests of a file answered",
    body=BATCH_BODY,
    answer=ref("Batch"),
    example={"input_file_id": "{file_id}", "endpoint": "/v1/completions", "completion_window": "24h"},
    prefixes=OPENAI,
)
def create(call: Call) -> JsonObject:
    fields = call.fields()
    for name in sorted(fields.values.keys() - FIELDS):
        if fields.values[name] is not None:
            raise not_supported(fields.path(name), f"leave it out (known: {', '.join(sorted(FIELDS))})")
    asked = NewBatch(
        endpoint=_endpoint(fields),
        input_file_id=_input_file(call, fields),
        completion_window=_window(fields),
        labels=_metadata(fields),
        output_expires_s=_expiry(fields),
    )
    services = call.services
    made = services.openai_batches.create(call.tenant_id, asked, services.settings.openai_batch_window_s)
    services.batch_reconciler.wake()
    return shown(made)


def _endpoint(fields: Fields) -> str:
    asked = _text(fields, "endpoint")
    if asked not in ENDPOINTS:
        raise not_supported("endpoint", f"{show(asked)}; use one of {list(ENDPOINTS)}")
    return asked


def _input_file(call: Call, fields: Fields) -> str:
    file = call.services.files.find(call.tenant_id, _text(fields, "input_file_id"))
    if file.purpose != BATCH:
        raise RequestError(
            "input_file_id", f"file {file.file_id!r} has the purpose {file.purpose!r}; a batch needs one of 'batch'"
        )
    return file.file_id


def _window(fields: Fields) -> str:
    asked = _text(fields, "completion_window")
    if asked != WINDOW:
        raise RequestError("completion_window", f"completion_window is {show(asked)}; it must be {WINDOW!r}")
    return asked


def _metadata(fields: Fields) -> dict[str, str] | None:
    given = fields.fields_or("metadata", None)
    if given is None:
        return None
    if len(given.values) > MAX_PAIRS:
        raise RequestError("metadata", f"metadata has {len(given.values)} pairs; at most {MAX_PAIRS} are kept")
    found: dict[str, str] = {}
    for name, value in given.values.items():
        if len(name) > MAX_KEY:
            raise RequestError("metadata", f"metadata has the key {show(name)}; keys have at most {MAX_KEY} characters")
        if not isinstance(value, str) or len(value) > MAX_VALUE or "\x00" in name + value:
            message = (
                f"{given.path(name)} is {show(value)}; it must be a text of at most {MAX_VALUE} characters without NUL"
            )
            raise RequestError(given.path(name), message)
        found[name] = value
    return found


def _expiry(fields: Fields) -> int | None:
    given = fields.fields_or("output_expires_after", None)
    if given is None:
        return None
    given.refuse_unknown(frozenset({"anchor", "seconds"}))
    path = given.path("anchor")
    if (anchor := given.text("anchor")) != "created_at":
        raise RequestError(path, f"{path} is {show(anchor)}; it must be 'created_at'")
    path, seconds = given.path("seconds"), given.integer("seconds")
    if not MIN_KEPT_S <= seconds <= MAX_KEPT_S:
        raise RequestError(path, f"{path} is {seconds}; it must be {MIN_KEPT_S} to {MAX_KEPT_S}")
    return seconds


def _text(fields: Fields, name: str) -> str:
    if not fields.has(name):
        raise RequestError(name, f"{name} is missing", "missing_required_parameter")
    return fields.text(name)


async def answer_request(services: Services, question: Question) -> dict[str, object]:
    """A line of a batch's file, as its route would answer it; what only time can change is tried until it has."""
    url, body = question.payload.get("url"), question.payload.get("body")
    if not isinstance(url, str) or not isinstance(body, dict):
        raise UserError("the question must have a url, and a body that is an object")
    tries = 0
    while True:
        status, answered = await answer(services, question.tenant_id, url, body)
        if status in WAIT:
            await asyncio.sleep(RETRY_S)
        elif status >= HTTPStatus.INTERNAL_SERVER_ERROR and tries < MAX_RETRIES:
            tries += 1
            await asyncio.sleep(RETRY_S * 2**tries)
        else:
            name = f"{question.job_id}:{question.row_idx}".encode()
            request_id = f"req_{hashlib.sha256(name).hexdigest()[:32]}"
            return {"status_code": status, "request_id": request_id, "body": answered}


@operation("GET", "/batches/{batch_id}", "A batch", answer=ref("Batch"), prefixes=OPENAI)
def batch(call: Call) -> JsonObject:
    return shown(call.services.openai_batches.find(call.tenant_id, call.path["batch_id"]))


@operation(
    "GET",
    "/batches",
    "Batches, newest first",
    answer=BATCHES,
    errors=(404,),
    access=Access.LISTING,
    query={"limit": integer(1, MAX_LISTED), "after": TEXT},
    filters=("?after={batch_id}",),
    prefixes=OPENAI,
)
def listing(call: Call) -> JsonObject:
    limit = page_limit(call, 1, MAX_LISTED, LISTED)
    found, more = call.services.openai_batches.listing(call.tenant_id, limit, call.query.get("after"))
    return page([shown(each) for each in found], more)


@operation("POST", "/batches/{batch_id}/cancel", "End it", answer=ref("Batch"), prefixes=OPENAI)
def cancel(call: Call) -> JsonObject:
    found = call.services.openai_batches.cancel(call.tenant_id, call.path["batch_id"])
    call.services.batch_reconciler.wake()
    return shown(found)


def shown(batch: Batch) -> JsonObject:
    status = "finalizing" if batch.status == "expiring" else batch.status
    moments = {
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        "in_progress_at": batch.in_progress_at,
        "finalizing_at": batch.finalizing_at,
        "cancelling_at": batch.cancelling_at,
        **{f"{ended}_at": batch.ended_at if status == ended else None for ended in _ENDED},
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
        **{name: None if moment is None else int(moment) for name, moment in moments.items()},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": batch.usage,
        "metadata": batch.labels,
    }


_ENDED = ("completed", "failed", "expired", "cancelled")
