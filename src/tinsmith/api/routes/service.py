"""What a client asks of the server itself: flags, health, capabilities.

`GET /metrics`: everything that is counted and timed, in Prometheus' text format.

It speaks of all tenants, so no tenant's key opens it. The setting `metrics_token` does, as a bearer token; without that
setting, a server that takes any key, and so listens on this machine only, answers whoever asks, and one that has keys
answers nobody.

What clients report of themselves: accepted, counted at log level DEBUG, and dropped.

A client's report of a failed request contains that request's headers, the key among them, and an error's text may
hold anything. So nothing of a report is kept or logged: only how many events of each known kind and severity it
held, in the words listed here.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections import Counter
from http import HTTPStatus

import structlog
from starlette.requests import Request
from starlette.responses import Response

from tinsmith.api.openapi import ANYTHING, LIST, TEXT, fields, one_of
from tinsmith.api.operation import Access, Call, JsonObject, Services, answer, authenticate, operation, read_body, run
from tinsmith.errors import NotAuthenticatedError
from tinsmith.telemetry.metrics import CONTENT_TYPE
from tinsmith.wire import bodies
from tinsmith.wire.fields import read_object

# The SDK's own defaults (types/client_config_response.py), except for two: bodies from elsewhere are compressed, and
# the client uses its plain httpx transport, which takes a fifth less of its own CPU per call than the default one and
# does not time out sooner than a poll is held. A flag is on only if this server has what it calls for.
CLIENT_FLAGS: JsonObject = {
    "pjwt_auth_enabled": True,
    "parallel_fwdbwd_chunks": True,
    "use_pyqwest_transport": False,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": True,
}
FORWARDED = ("x-forwarded-for", "forwarded", "via")
"""Headers that a proxy adds to name the client that it forwards for."""

DYNAMIC_FLAGS: JsonObject = {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


@operation(
    "GET",
    "/healthz",
    "Whether the server answers",
    answer=fields({"status": one_of("ok", "failing")}, {"reason": TEXT}),
    errors=(503,),
    access=Access.NOTHING,
    keyed=False,
)
async def healthz(request: Request) -> Response:
    services: Services = request.app.state.services
    if why := services.failing():
        return answer({"status": "failing", "reason": why}, HTTPStatus.SERVICE_UNAVAILABLE)
    return answer({"status": "ok"})


@operation(
    "POST",
    "/client/config",
    "Flags of a client",
    body=fields({}, {"sdk_version": TEXT}),
    answer=ANYTHING,
    access=Access.NOTHING,
    quick=True,
)
def client_config(call: Call) -> JsonObject:
    settings = call.services.settings
    return CLIENT_FLAGS | {
        "proto_compress_fwdbwd": settings.tunnelled or not _is_here(call),
        "sample_use_retrieve_futures": settings.session_polls,
    }


def _is_here(call: Call) -> bool:
    """Whether a client runs on this machine, as far as it can be known."""
    try:
        return ipaddress.ip_address(call.peer).is_loopback and not any(name in call.headers for name in FORWARDED)
    except ValueError:
        return False


@operation(
    "POST",
    "/client/dynamic_config",
    "Flags that a client fetches again",
    body=ANYTHING,
    answer=ANYTHING,
    access=Access.NOTHING,
    quick=True,
)
def dynamic_config(_call: Call) -> JsonObject:
    return DYNAMIC_FLAGS


@operation(
    "GET",
    "/get_server_capabilities",
    "The served base models",
    answer=fields({"supported_models": LIST}),
    access=Access.NOTHING,
    quick=True,
)
def get_server_capabilities(call: Call) -> JsonObject:
    models = [
        {
            "model_name": shape.name,
            "max_context_length": shape.max_context_length,
            "trainable": True,
            "sampleable": True,
        }
        for shape in call.services.bases
    ]
    return {"supported_models": models}


@operation(
    "GET",
    "/metrics",
    "Figures for Prometheus; the bearer is metrics_token",
    answer=CONTENT_TYPE,
    access=Access.NOTHING,
    at_root=True,
)
async def metrics(request: Request) -> Response:
    services: Services = request.app.state.services
    await _admit(request, services)
    return Response(await run(services.meters.text), media_type=CONTENT_TYPE)


async def _admit(request: Request, services: Services) -> None:
    """Raises NotAuthenticatedError."""
    wanted = services.settings.metrics_token.get_secret_value()
    if wanted:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and secrets.compare_digest(given.strip().encode(), wanted.encode()):
            return
        raise NotAuthenticatedError("send the server's metrics_token: `Authorization: Bearer TOKEN`")
    if not await run(services.tenants.accepts_anyone):
        raise NotAuthenticatedError(
            "figures of all tenants are for operators: set TINSMITH_METRICS_TOKEN and send it as a bearer token"
        )


MAX_BODY_BYTES = 1 << 20  # the SDK sends at most 100 events at once
KINDS = frozenset(("SESSION_START", "SESSION_END", "UNHANDLED_EXCEPTION", "GENERIC_EVENT"))
SEVERITIES = frozenset(("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"))
OTHER = "other"
TELEMETRY = fields(
    {}, {"events": {"type": "array"}, "platform": TEXT, "sdk_version": TEXT, "session_id": TEXT, "process_uuid": TEXT}
)

log = structlog.get_logger()


@operation(
    "POST",
    "/telemetry",
    "Accepted and dropped",
    body=TELEMETRY,
    answer=fields({"status": one_of("accepted")}),
    access=Access.NOTHING,
)
async def telemetry(request: Request) -> Response:
    await authenticate(request)
    body = await read_body(request, bodies.JSON_TYPE, MAX_BODY_BYTES)
    await run(_count, body, request.headers.get("content-encoding"))
    return answer({"status": "accepted"})


def _count(body: bytes, encoding: str | None) -> None:
    events = read_object(bodies.decode(body, encoding, MAX_BODY_BYTES)).get("events")
    if not isinstance(events, list):
        return
    found = [event for event in events if isinstance(event, dict)]
    kinds = Counter(_known(event.get("event"), KINDS) for event in found)
    severities = Counter(_known(event.get("severity"), SEVERITIES) for event in found)
    log.debug("telemetry", kinds=dict(kinds), severities=dict(severities))


def _known(word: object, words: frozenset[str]) -> str:
    return word if isinstance(word, str) and word in words else OTHER
