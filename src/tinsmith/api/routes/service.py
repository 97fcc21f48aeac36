"""The server itself: client flags, health, capabilities, metrics, clients' telemetry, and dedicated samplers.

`/metrics` covers all tenants, so it requires the bearer token `metrics_token`. Without that setting, a server with keys
refuses the request, and a server without keys, which listens only on this machine, serves it to everyone.

Telemetry is accepted and dropped, because a client's report of a failed request contains its headers, including the
key. Only the number of events of each known kind and severity is logged, at DEBUG.

Health checks need no key, so they name states and base models only; `/operator/health` has the errors.

Operators list, locate and change samplers; `tinsmith samplers` does the same in the database. Both use
`cluster.executors.DedicatedSamplers`, which has the states. A sampler reaches a state that takes time within seconds.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from dataclasses import asdict
from functools import partial
from http import HTTPStatus

import structlog
from starlette.requests import Request
from starlette.responses import Response

from tinsmith.api.access import Access
from tinsmith.api.declaration import ThreadPool, operation
from tinsmith.api.openapi import ANYTHING, COUNT, LIST, NUMBER, TEXT, fields, one_of
from tinsmith.api.request import Call, JsonObject, json_response, read_body, run
from tinsmith.api.services import Services
from tinsmith.telemetry.metrics import CONTENT_TYPE
from tinsmith.wire import bodies
from tinsmith.wire.fields import Schema, read_object

# The SDK's defaults (types/client_config_response.py), with two exceptions: bodies from other machines are compressed,
# and the client uses its plain httpx transport, which takes less CPU per call and does not time out before the
# response to a held poll. A flag is on only if this server supports it.
CLIENT_FLAGS: JsonObject = {
    "pjwt_auth_enabled": True,
    "parallel_fwdbwd_chunks": True,
    "use_pyqwest_transport": False,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": True,
}
PROXY_HEADERS = ("x-forwarded-for", "forwarded", "via")
"""Headers with which a proxy names the client of a forwarded request."""

DYNAMIC_FLAGS: JsonObject = {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


@operation(
    "GET",
    "/healthz",
    "Check health",
    answer=fields({"status": one_of("ok", "failing")}, {"reason": TEXT}),
    errors=(503,),
    access=Access.PUBLIC,
)
async def healthz(call: Call) -> Response:
    if reason := call.services.engines.failing():
        return json_response({"status": "failing", "reason": reason}, HTTPStatus.SERVICE_UNAVAILABLE)
    return json_response({"status": "ok"})


@operation(
    "GET",
    "/operator/health",
    "Say why engines fail",
    answer=fields({"status": one_of("ok", "failing"), "engines": LIST}),
    access=Access.OPERATOR,
)
def operator_health(call: Call) -> JsonObject:
    """Return what the public health check leaves out: the last error of each engine that keeps dying."""
    return {
        "status": "failing" if call.services.engines.failing() else "ok",
        "engines": [asdict(failure) for failure in call.services.engines.failures()],
    }


async def readyz(request: Request) -> Response:
    """Whether the engines of a process that serves no clients are ready: a rolling update waits for it."""
    services: Services = request.app.state.services
    if reason := services.engines.failing() or await asyncio.to_thread(services.engines.loading):
        return json_response({"status": "loading", "reason": reason}, HTTPStatus.SERVICE_UNAVAILABLE)
    return json_response({"status": "ok"})


_about_server = partial(operation, access=Access.NOTHING, threads=ThreadPool.QUICK)


@_about_server(
    "POST", "/client/config", "Get the client's flags", body=fields({}, {"sdk_version": TEXT}), answer=ANYTHING
)
def client_config(call: Call) -> JsonObject:
    settings = call.services.settings
    return CLIENT_FLAGS | {
        "proto_compress_fwdbwd": settings.tunnelled or not _is_local_client(call),
        "sample_use_retrieve_futures": settings.session_polls,
    }


def _is_local_client(call: Call) -> bool:
    """Whether the client connects from this machine, without a proxy."""
    try:
        return ipaddress.ip_address(call.peer).is_loopback and not any(name in call.headers for name in PROXY_HEADERS)
    except ValueError:
        return False


@_about_server(
    "POST", "/client/dynamic_config", "Get the flags that a client refreshes", body=ANYTHING, answer=ANYTHING
)
def dynamic_config(_call: Call) -> JsonObject:
    return DYNAMIC_FLAGS


@_about_server(
    "GET", "/get_server_capabilities", "List the served base models", answer=fields({"supported_models": LIST})
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
    "Get metrics for Prometheus; the bearer token is metrics_token",
    answer=CONTENT_TYPE,
    errors=(401,),
    access=Access.METRICS,
    at_root=True,
)
def metrics(call: Call) -> Response:
    return Response(call.services.meters.text(), media_type=CONTENT_TYPE)


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
    "Accept and drop telemetry",
    body=TELEMETRY,
    answer=fields({"status": one_of("accepted")}),
    access=Access.NOTHING,
)
async def telemetry(call: Call) -> Response:
    body = await read_body(call.request, (bodies.JSON_TYPE,), MAX_BODY_BYTES)
    await run(_count, body, call.headers.get("content-encoding"))
    return json_response({"status": "accepted"})


def _count(body: bytes, encoding: str | None) -> None:
    events = read_object(bodies.decode(body, encoding, MAX_BODY_BYTES)).get("events")
    if not isinstance(events, list):
        return
    event_objects = [event for event in events if isinstance(event, dict)]
    kinds = Counter(_classify(event.get("event"), KINDS) for event in event_objects)
    severities = Counter(_classify(event.get("severity"), SEVERITIES) for event in event_objects)
    log.debug("telemetry", kinds=dict(kinds), severities=dict(severities))


def _classify(word: object, words: frozenset[str]) -> str:
    return word if isinstance(word, str) and word in words else OTHER


SAMPLER: Schema = fields(
    {"sampler": TEXT, "base_model": TEXT, "state": TEXT, "holder": TEXT, "pid": COUNT, "samples": COUNT}
    | {"started_at": NUMBER, "versions": LIST},
    {"reason": TEXT, "engine": TEXT, "address": TEXT, "cannot_sleep": TEXT},
)
_ROOT = "/operator/samplers"
_for_operators = partial(operation, access=Access.OPERATOR)
_for_one = partial(_for_operators, answer=SAMPLER, errors=(403, 404))


@_for_operators("GET", _ROOT, "Dedicated samplers", answer=fields({"samplers": LIST}))
def samplers(call: Call) -> JsonObject:
    return {"samplers": call.services.dedicated_samplers.all()}


@_for_one("GET", _ROOT + "/{sampler}", "One dedicated sampler: address, process, state, versions")
def sampler(call: Call) -> JsonObject:
    return call.services.dedicated_samplers.find(call.path["sampler"])


@_for_one("POST", _ROOT + "/{sampler}/drain", "Give a sampler no new samples")
def drain_sampler(call: Call) -> JsonObject:
    return call.services.dedicated_samplers.change(call.path["sampler"], "drain")


@_for_one("POST", _ROOT + "/{sampler}/sleep", "Have a sampler's inference server release its device")
def sleep_sampler(call: Call) -> JsonObject:
    return call.services.dedicated_samplers.change(call.path["sampler"], "sleep")


@_for_one("POST", _ROOT + "/{sampler}/wake", "Give a drained or sleeping sampler samples again")
def wake_sampler(call: Call) -> JsonObject:
    return call.services.dedicated_samplers.change(call.path["sampler"], "wake")
