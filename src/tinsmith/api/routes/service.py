"""What a client asks of the server itself: flags, health, capabilities."""

from __future__ import annotations

import ipaddress
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinsmith.api.operation import Call, JsonObject, Services, answer, endpoint
from tinsmith.wire.bodies import JSON_TYPE

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
"""Headers by which a proxy says that it speaks for somebody else."""

DYNAMIC_FLAGS: JsonObject = {"refresh_interval_sec": 300, "sample_cancel_enabled": True}


async def healthz(request: Request) -> Response:
    services: Services = request.app.state.services
    if why := services.failing():
        return answer({"status": "failing", "reason": why}, HTTPStatus.SERVICE_UNAVAILABLE)
    return answer({"status": "ok"})


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


def dynamic_config(_call: Call) -> JsonObject:
    return DYNAMIC_FLAGS


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


ROUTES = [
    Route("/healthz", healthz, methods=["GET"]),
    Route("/client/config", endpoint(client_config, JSON_TYPE, quick=True), methods=["POST"]),
    Route("/client/dynamic_config", endpoint(dynamic_config, JSON_TYPE, quick=True), methods=["POST"]),
    Route("/get_server_capabilities", endpoint(get_server_capabilities, quick=True), methods=["GET"]),
]
