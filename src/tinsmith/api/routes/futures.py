"""Results: the long polls for one future, or for all samples of a sampling session.

A poll is held until a result exists, `hold_s` have passed, or its client disconnects. After `hold_s` a poll for one
future returns 408, and a poll for a session returns 200 with an empty list; the client polls again at once. While no
engine of the base model can be started, both report the request as failed, although it stays pending. A failed future
is a 200 with `error` and `category`, because the client retries any other status. A result can be fetched repeatedly
until the client acknowledges it. On request, a large result is first announced with its size. A protobuf result is
converted to JSON for a client whose Accept header prefers JSON: SDKs before 0.16 read nothing else, and those before
0.19 read only samples as protobuf.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, TypeVar

from pydantic import Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinsmith.api.declaration import operation
from tinsmith.api.openapi import ANYTHING, COUNT, LIST, PROTO_RESULT, fields, ref
from tinsmith.api.request import INLINE_BODY_BYTES, Call, JsonObject, json_response, read_json, run
from tinsmith.api.services import Services
from tinsmith.errors import EngineFailedError
from tinsmith.runtime.failpoints import hit
from tinsmith.store.futures import UNBOUNDED, FutureOutcome
from tinsmith.store.sampling_sessions import Completion
from tinsmith.wire.bodies import JSON_TYPE, PROTO_TYPE, choose_type
from tinsmith.wire.fields import INT64_MAX, Body, OneOf, Position, Text
from tinsmith.wire.json_results import CONVERSIONS, JSON_GROWTH, dump

T = TypeVar("T")

RESULT_TYPES = {"proto": PROTO_TYPE, "json": JSON_TYPE}

UNANNOUNCED_BYTES = 256 * 1024
"""Results up to this size are never announced first, because a second request costs more."""

DISCONNECT_WATCH_DELAY_S = 0.5
"""Seconds before a long poll watches its connection for a disconnect. Most polls end earlier."""

MAX_ACKNOWLEDGED = 1_000_000

EVENT_LOOP_READ_BYTES = 1 << 20
"""Larger results are read by a thread, so that they do not block the event loop."""

CHUNK_BYTES = 1 << 18
"""A large result is sent in chunks of this size. Other connections are served between chunks."""

SLOW_S = 10.0
"""After this time a large result no longer occupies one of the MAX_LARGE_RESULTS slots."""


class RetrieveFutureRequest(Body):
    request_id: Text
    allow_metadata_only: bool = False


@operation(
    "POST",
    "/retrieve_future",
    "Poll for a result: JSON, or " + PROTO_RESULT,
    body=RetrieveFutureRequest,
    answer={"anyOf": [ref("Failure"), ANYTHING]},
    errors=(404, 408, 410),
)
async def retrieve_future(call: Call) -> Response:
    services, tenant_id = call.services, call.tenant_id
    poll = await read_json(call.request, RetrieveFutureRequest)
    request_id = poll.request_id
    inline_bytes = UNANNOUNCED_BYTES if poll.allow_metadata_only else UNBOUNDED
    await note_poll(call, request_id)
    outcome = await long_poll(
        call.request,
        services.waiters.watch(request_id),
        lambda: read_outcome(services, tenant_id, request_id, min(inline_bytes, EVENT_LOOP_READ_BYTES)),
        services.settings.hold_s,
    )
    if outcome is None:
        return await _respond_pending(services, request_id)
    hit("poll.answering")
    if outcome.error is not None:
        return json_response({"error": outcome.error, "category": outcome.category})
    assert outcome.result_type is not None and outcome.body_bytes is not None
    media_type = RESULT_TYPES[outcome.result_type]
    is_converted = media_type == PROTO_TYPE and _prefers_json(call.request)
    if outcome.body is not None and not is_converted:
        return Response(outcome.body, media_type=media_type)
    if outcome.body is None and outcome.body_bytes > inline_bytes:
        size = outcome.body_bytes * (JSON_GROWTH if is_converted else 1)
        return json_response({"status": "complete_metadata", "response_payload_size": size})
    if not is_converted:
        return await _respond_large(services, tenant_id, request_id, media_type)
    convert = CONVERSIONS[await run_query(services, services.futures.kind_of, tenant_id, request_id) or ""]
    if outcome.body is not None and len(outcome.body) <= INLINE_BODY_BYTES:
        return Response(dump(convert(outcome.body)), media_type=JSON_TYPE)
    return await _respond_large(services, tenant_id, request_id, JSON_TYPE, lambda body: dump(convert(body)))


def _prefers_json(request: Request) -> bool:
    accept = ",".join(request.headers.getlist("accept")) or None
    return choose_type(accept, (PROTO_TYPE, JSON_TYPE)) == JSON_TYPE


async def read_outcome(
    services: Services, tenant_id: str, request_id: str, inline_bytes: int = UNBOUNDED
) -> FutureOutcome | None:
    """Read a future's outcome, a large body on a thread. Returns None while the future is pending."""
    small_bytes = min(inline_bytes, EVENT_LOOP_READ_BYTES)
    outcome = await run_query(services, services.futures.outcome, tenant_id, request_id, small_bytes)
    if outcome is None or outcome.error is not None or outcome.body is not None or inline_bytes <= small_bytes:
        return outcome
    executor = services.threads.results
    return await run(services.futures.outcome, tenant_id, request_id, inline_bytes, on=executor)


async def _respond_large(
    services: Services,
    tenant_id: str,
    request_id: str,
    media_type: str,
    convert: Callable[[bytes], bytes] | None = None,
) -> Response:
    slot = _Slot(services.large_results)
    await slot.take()
    try:
        outcome = await read_outcome(services, tenant_id, request_id)
        assert outcome is not None and outcome.body is not None
        body = outcome.body
        if convert is not None:
            body = await run(convert, body, on=services.threads.results)
    except BaseException:
        slot.give_back()
        raise
    return _ChunkedResponse(body, media_type, slot)


class _Slot:
    """A slot for a large result in memory. It is released once, after `SLOW_S` at the latest."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._timer: asyncio.TimerHandle | None = None

    async def take(self) -> None:
        await self._slots.acquire()
        self._timer = asyncio.get_running_loop().call_later(SLOW_S, self.give_back)

    def give_back(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._slots.release()


class _ChunkedResponse(Response):
    """A body that is sent in chunks. Each chunk is sent after the previous one has left the buffer."""

    def __init__(self, content: bytes, media_type: str, slot: _Slot) -> None:
        super().__init__(content, media_type=media_type)
        self._slot = slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            body = memoryview(self.body)
            for start in range(0, len(body), CHUNK_BYTES):
                chunk = bytes(body[start : start + CHUNK_BYTES])
                has_more = start + CHUNK_BYTES < len(body)
                await send({"type": "http.response.body", "body": chunk, "more_body": has_more})
                await asyncio.sleep(0)  # with free buffer space, the next chunk would follow at once
        finally:
            self._slot.give_back()


class SamplingSessionTargetBody(Body):
    sampling_session_id: Text
    type: Annotated[str, OneOf(("sampling_session",))] = "sampling_session"
    cloned_sampler_id: Position = 0


class RetrieveFuturesRequest(Body):
    """`timeout` is in seconds; the default is the server's hold_s."""

    target: SamplingSessionTargetBody
    prev_cursor: Annotated[int, Field(ge=0, le=INT64_MAX)] = 0
    timeout: Annotated[float, Field(ge=0)] | None = None
    retrieved_request_ids: Annotated[list[Text], Field(max_length=MAX_ACKNOWLEDGED, fail_fast=True)] = Field(
        default_factory=list
    )


@operation(
    "POST",
    "/retrieve_futures",
    "Poll for the settled samples of a sampling session",
    body=RetrieveFuturesRequest,
    answer=fields({"completions": LIST, "cursor": COUNT}),
    errors=(404, 410),
    example={"target": {"type": "sampling_session", "sampling_session_id": "{sampling_session_id}"}, "timeout": 0},
)
async def retrieve_futures(call: Call) -> Response:
    services, tenant_id = call.services, call.tenant_id
    poll = await read_json(call.request, RetrieveFuturesRequest)
    sampling_session_id, samplers = poll.target.sampling_session_id, services.sampling_sessions
    await run_query(services, samplers.get, tenant_id, sampling_session_id)
    samplers.acknowledge(sampling_session_id, poll.retrieved_request_ids)
    await note_poll(call, sampling_session_id)

    async def read_completions() -> list[Completion] | None:
        clone = poll.target.cloned_sampler_id
        return await run_query(services, samplers.completions, sampling_session_id, clone, poll.prev_cursor) or None

    hold_s = services.settings.hold_s if poll.timeout is None else min(poll.timeout, services.settings.hold_s)
    completions = (
        await long_poll(call.request, services.waiters.watch_session(sampling_session_id), read_completions, hold_s)
        or []
    )
    if not completions and (
        failures := await run(_list_unservable, services, tenant_id, poll.target, on=services.threads.quick)
    ):
        return json_response({"completions": failures, "cursor": poll.prev_cursor})
    cursor = completions[-1].settle_order if completions else poll.prev_cursor
    return json_response({"completions": [_completion(completion) for completion in completions], "cursor": cursor})


def _list_unservable(services: Services, tenant_id: str, target: SamplingSessionTargetBody) -> list[JsonObject]:
    """Return the pending samples of a session as failed, if no engine of its base model can be started."""
    name = target.sampling_session_id
    if not services.engines.cannot_start(services.sampling_sessions.get(tenant_id, name).base_model):
        return []
    pending_ids = services.sampling_sessions.pending(name, target.cloned_sampler_id)
    return [{"state": "failed", "request_id": request_id} for request_id in pending_ids]


class CancelFutureRequest(Body):
    request_id: Text


@operation("POST", "/cancel_future", "Cancel a sample", body=CancelFutureRequest, answer=ANYTHING)
def cancel_future(call: Call, request: CancelFutureRequest) -> JsonObject:
    """Cancel a sample. Other requests are not affected."""
    call.services.futures.cancel(call.tenant_id, request.request_id, "cancelled by the client")
    return {}


def _completion(completion: Completion) -> JsonObject:
    if completion.state != "done":
        return {"state": "failed", "request_id": completion.request_id}
    return {
        "state": "finished",
        "request_id": completion.request_id,
        "response_payload_uncompressed_size": completion.body_bytes,
    }


async def long_poll(
    request: Request,
    watched: AbstractContextManager[asyncio.Event],
    read_result: Callable[[], Awaitable[T | None]],
    hold_s: float,
) -> T | None:
    """Return the result of `read_result`, or None if there is none within `hold_s`. A wake-up of `watched` is only a
    hint to read again. Raises ClientDisconnect.
    """
    services: Services = request.app.state.services
    loop = asyncio.get_running_loop()
    deadline = loop.time() + hold_s
    with watched as wake_event:
        result = await read_result()
        if result is not None or services.waiters.closed or hold_s <= 0:
            return result
        with _watch_disconnect(request, wake_event) as client_is_gone:
            try:
                async with asyncio.timeout_at(deadline):
                    while True:
                        await wake_event.wait()
                        wake_event.clear()
                        if client_is_gone():
                            raise ClientDisconnect
                        result = await read_result()
                        if result is not None or services.waiters.closed:
                            return result
            except TimeoutError:
                return None


@contextmanager
def _watch_disconnect(request: Request, wake_event: asyncio.Event) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether the client has disconnected; a disconnect also sets `wake_event`. The watch
    starts after DISCONNECT_WATCH_DELAY_S, since most polls end earlier.
    """
    disconnect_tasks: list[asyncio.Task[None]] = []

    async def wait() -> None:
        while (await request.receive())["type"] != "http.disconnect":  # the body was read earlier
            pass

    def watch() -> None:
        disconnect_tasks.append(asyncio.create_task(wait()))
        disconnect_tasks[0].add_done_callback(lambda _: wake_event.set())

    timer = asyncio.get_running_loop().call_later(DISCONNECT_WATCH_DELAY_S, watch)
    try:
        yield lambda: any(task.done() for task in disconnect_tasks)
    finally:
        timer.cancel()
        for task in disconnect_tasks:
            task.cancel()


async def note_poll(call: Call, name: str) -> None:
    """Count a poll as a heartbeat of the session whose id is the prefix of `name`."""
    session_id, sessions = name.partition(":")[0], call.services.sessions
    if sessions.is_poll_heartbeat_due(session_id):
        await run(sessions.record_poll, call.tenant_id, session_id, on=call.services.threads.quick)


async def run_query(services: Services, query: Callable[..., T], *args: object) -> T:
    """Call `query`. With SQLite it runs on the event loop, where it never waits and costs less than a thread switch."""
    if services.reads_wait:
        return await run(query, *args, on=services.threads.quick)
    return query(*args)


async def _respond_pending(services: Services, request_id: str) -> Response:
    quick = services.threads.quick
    base_model = await run(services.futures.base_model_of, request_id, on=quick)
    if failure_reason := await run(services.engines.cannot_start, base_model or "", on=quick):
        return json_response({"error": failure_reason, "category": EngineFailedError.category})
    state, queue_reason = await run(services.engines.queue_state, base_model or "", on=quick)
    pending: JsonObject = {"type": "try_again", "request_id": request_id, "queue_state": state}
    return json_response(pending if queue_reason is None else pending | {"queue_state_reason": queue_reason}, 408)
