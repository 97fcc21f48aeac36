"""Results: the long poll for a future.

A poll is held until the future settles, at most `hold_s`; then it is answered 408, and the client asks again
at once. A failed future is a 200 with `error` and `category`: any other status would have the client retry or
misread it. A result can be fetched any number of times, since an answer may be lost on its way.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinsmith.futures import Outcome
from tinsmith.routes.call import Call, JsonObject, Services, answer, authenticate, endpoint, read_body, run
from tinsmith.wire.bodies import JSON_TYPE, PROTO_TYPE
from tinsmith.wire.fields import read_object

RESULT_TYPES = {"proto": PROTO_TYPE, "json": JSON_TYPE}


async def retrieve_future(request: Request) -> Response:
    services, tenant_id = await authenticate(request)
    request_id = read_object(await read_body(request, JSON_TYPE)).text("request_id")
    outcome = await _wait(services, tenant_id, request_id)
    if outcome is None:
        return await _try_again(services, request_id)
    if outcome.error is not None:
        return answer({"error": outcome.error, "category": outcome.category})
    assert outcome.result_type is not None
    return Response(outcome.body, media_type=RESULT_TYPES[outcome.result_type])


async def _wait(services: Services, tenant_id: str, request_id: str) -> Outcome | None:
    """The outcome, or None if there is none within `hold_s`. A wake-up is only a hint to look again."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + services.settings.hold_s
    with services.waiters.watch(request_id) as woken:
        while True:
            woken.clear()
            outcome = await _look(services, tenant_id, request_id)
            if outcome is not None or services.waiters.closed:
                return outcome
            try:
                async with asyncio.timeout_at(deadline):
                    await woken.wait()
            except TimeoutError:
                return None


async def _look(services: Services, tenant_id: str, request_id: str) -> Outcome | None:
    """A read of SQLite in WAL mode waits for nobody and takes 0.1 ms, less than the way to a worker thread."""
    if services.reads_wait:
        return await run(services.futures.outcome, tenant_id, request_id)
    return services.futures.outcome(tenant_id, request_id)


async def _try_again(services: Services, request_id: str) -> Response:
    base_model = await run(services.futures.base_model_of, request_id)
    state, reason = await run(services.queue_state, base_model or "")
    pending: JsonObject = {"type": "try_again", "request_id": request_id, "queue_state": state}
    return answer(pending if reason is None else pending | {"queue_state_reason": reason}, 408)


def cancel_future(call: Call) -> JsonObject:
    """Only samples can be cancelled; for everything else this is an answer without an effect."""
    call.services.futures.cancel(call.tenant_id, call.fields().text("request_id"), "cancelled by the client")
    return {}


ROUTES = [
    Route("/retrieve_future", retrieve_future, methods=["POST"]),
    Route("/cancel_future", endpoint(cancel_future, JSON_TYPE), methods=["POST"]),
]
