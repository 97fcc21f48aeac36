"""The caller's own key: whose it is, a token in exchange for it, and its revocation."""

from __future__ import annotations

from tinsmith.api.openapi import ANYTHING, COUNT, TEXT, fields
from tinsmith.api.operation import Access, Call, JsonObject, operation
from tinsmith.auth import Caller, user_email


@operation(
    "GET", "/auth/apikey/me", "Whose the key is", answer=fields({"key_id": COUNT, "name": TEXT}), access=Access.NOTHING
)
def apikey_me(call: Call) -> JsonObject:
    caller = _caller(call)
    details = {"org_details": {"name": caller.tenant_id}, "user_details": {"email": user_email(caller.tenant_id)}}
    return {"key_id": caller.key_id, "name": caller.name or caller.tenant_id, "note": caller.name, "details": details}


@operation("DELETE", "/auth/apikey/me", "Revoke the key", answer=ANYTHING, access=Access.NOTHING)
def delete_apikey_me(call: Call) -> JsonObject:
    call.services.tenants.revoke(_caller(call))
    return {}


@operation(
    "POST",
    "/auth/token",
    "A token in exchange for the key",
    body=ANYTHING,
    answer=fields({"jwt": TEXT}),
    access=Access.NOTHING,
    quick=True,
)
def auth_token(call: Call) -> JsonObject:
    return {"jwt": call.services.tenants.issue_token(_caller(call))}


def _caller(call: Call) -> Caller:
    return call.services.tenants.authenticate(call.headers.get("x-api-key"))
