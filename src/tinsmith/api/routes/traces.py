"""Exporting a session's timeline: a signed link, and the trace behind it, made while it is downloaded."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tinsmith.api.operation import Call, JsonObject, endpoint
from tinsmith.api.routes.links import follow_link, sign_link
from tinsmith.wire.bodies import JSON_TYPE

PURPOSE = "trace"


def trace_export(call: Call) -> JsonObject:
    """Ready at once: there is nothing to prepare. The wire's 'pending' and 'failed' are never answered."""
    session = call.services.sessions.get(call.tenant_id, call.path["session_id"])
    return {"status": "ready", "url": sign_link(call, PURPOSE, f"/sessions/{session.session_id}/trace").url}


async def trace(request: Request) -> Response:
    """No key: the link was made for a tenant that may see the session."""
    services = follow_link(request, PURPOSE)
    session_id = request.path_params["session_id"]
    headers = {"content-disposition": f'attachment; filename="{session_id}.pftrace"'}
    return StreamingResponse(services.traces.write(session_id), media_type=JSON_TYPE, headers=headers)


ROUTES = [
    Route("/sessions/{session_id}/trace_export", endpoint(trace_export), methods=["GET"]),
    Route("/sessions/{session_id}/trace", trace, methods=["GET"]),
]
