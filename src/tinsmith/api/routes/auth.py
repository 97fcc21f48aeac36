"""What a client asks about its own key: whose it is, a token in exchange for it, its end."""

from __future__ import annotations

from starlette.routing import Route

from tinsmith.api.operation import Call, JsonObject, endpoint
from tinsmith.auth import Caller, user_email
from tinsmith.wire.bodies import JSON_TYPE


def apikey_me(call: Call) -> JsonObject:
    caller = _caller(call)
    details = {"org_details": {"name": caller.tenant_id}, "user_details": {"email": user_email(caller.tenant_id)}}
    return {"key_id": caller.key_id, "name": caller.name or caller.tenant_id, "note": caller.name, "details": details}


def delete_apikey_me(call: Call) -> JsonObject:
    call.services.tenants.revoke(_caller(call))
    return {}


def auth_token(call: Call) -> JsonObject:
    return {"jwt": call.services.tenants.issue_token(_caller(call))}


def _caller(call: Call) -> Caller:
    return call.services.tenants.authenticate(call.headers.get("x-api-key"))


ROUTES = [
    Route("/auth/token", endpoint(auth_token, JSON_TYPE), methods=["POST"]),
    Route("/auth/apikey/me", endpoint(apikey_me), methods=["GET"]),
    Route("/auth/apikey/me", endpoint(delete_apikey_me), methods=["DELETE"]),
]
