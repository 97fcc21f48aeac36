"""What clients report of themselves: accepted, counted at log level DEBUG, and dropped.

A client's report of a failed request contains that request's headers, the key among them, and an error's text may
hold anything. So nothing of a report is kept or logged: only how many events of each known kind and severity it
held, in the words listed here.
"""

from __future__ import annotations

from collections import Counter

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinsmith.api.operation import answer, authenticate, read_body, run
from tinsmith.wire import bodies
from tinsmith.wire.fields import read_object

MAX_BODY_BYTES = 1 << 20  # the SDK sends at most 100 events at once
KINDS = frozenset(("SESSION_START", "SESSION_END", "UNHANDLED_EXCEPTION", "GENERIC_EVENT"))
SEVERITIES = frozenset(("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"))
OTHER = "other"

log = structlog.get_logger()


async def telemetry(request: Request) -> Response:
    await authenticate(request)
    body = await read_body(request, bodies.JSON_TYPE, MAX_BODY_BYTES)
    await run(_count, body, request.headers.get("content-encoding"))
    return answer({"status": "accepted"})


def _count(body: bytes, encoding: str | None) -> None:
    events = read_object(bodies.decode(body, encoding, MAX_BODY_BYTES)).values.get("events")
    if not isinstance(events, list):
        return
    found = [event for event in events if isinstance(event, dict)]
    kinds = Counter(_known(event.get("event"), KINDS) for event in found)
    severities = Counter(_known(event.get("severity"), SEVERITIES) for event in found)
    log.debug("telemetry", kinds=dict(kinds), severities=dict(severities))


def _known(word: object, words: frozenset[str]) -> str:
    return word if isinstance(word, str) and word in words else OTHER


ROUTES = [Route("/telemetry", telemetry, methods=["POST"])]
