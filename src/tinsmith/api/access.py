"""Who may call an endpoint: keys and tokens, signed links, operators, and the token of the metrics.

`authorize` runs before every declared handler, so that no handler can forget it.
"""

from __future__ import annotations

import secrets
from enum import Enum

from starlette.requests import Request
from structlog.contextvars import bind_contextvars

from tinsmith.api.links import verify_link
from tinsmith.api.request import CAPTURE_SEPARATOR, is_anthropic, is_hub, is_openai, run
from tinsmith.api.services import Services
from tinsmith.auth import ANY_KEY, Caller
from tinsmith.errors import ForbiddenError, NotAuthenticatedError, NotFoundError, UserError

MAX_PATH = 2000
"""Most characters of a path. The longest valid path names a file of a checkpoint."""


class Access(Enum):
    """Who may call an endpoint, and which tenants' objects it shows, which selects its case in the isolation test."""

    IDS = "takes ids of a tenant's objects; those of another tenant are 404"
    LISTING = "lists or counts the caller's own objects"
    NOTHING = "needs a key, and shows no tenant's objects"
    OPERATOR = "for the tenants of TINSMITH_OPERATOR_TENANTS; 403 for others"
    LINK = "needs a signed link instead of a key"
    METRICS = "needs the setting metrics_token as bearer token"
    PUBLIC = "for everyone; shows no tenant's objects"

    @property
    def needs_key(self) -> bool:
        """Whether the caller is a tenant."""
        return self not in (Access.LINK, Access.METRICS, Access.PUBLIC)


async def authorize(request: Request, access: Access, purpose: str = "") -> str:
    """Check that the request may have `access`, by a link for `purpose` if it needs one. Return the caller's tenant, or
    "" for an endpoint that needs no key. Raises TinsmithError.
    """
    services: Services = request.app.state.services
    if access.needs_key:
        tenant_id = await _authenticate(request, services)
        if access is Access.OPERATOR and tenant_id not in services.settings.operator_tenants:
            await _require_no_keys(services, tenant_id)
        return tenant_id
    if access is Access.LINK:
        verify_link(request, purpose)
    elif access is Access.METRICS:
        await _check_metrics_token(request, services)
    return ""


async def _authenticate(request: Request, services: Services) -> str:
    """Return the tenant of a request's key or token."""
    _check_target(request)
    credential = request.headers.get("x-api-key")
    if credential is None and (is_openai(request) or is_anthropic(request) or is_hub(request)):
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        credential = token.strip() if scheme.lower() == "bearer" else None
    if credential is not None and (is_openai(request) or is_anthropic(request)):
        credential = credential.partition(CAPTURE_SEPARATOR)[0]
    if is_hub(request) and await _accepts_anyone(services):
        credential = ANY_KEY  # these clients send no key, or a token of the hub
    caller = services.tenants.find_cached(credential) or await _authenticate_uncached(services, credential)
    bind_contextvars(tenant_id=caller.tenant_id)  # each request has its own context
    return caller.tenant_id


def _check_target(request: Request) -> None:
    """Refuse a path or query that no store can hold."""
    if "\x00" in request.scope["path"]:
        raise NotFoundError("the id contains a NUL character")  # Postgres cannot compare it
    if len(request.scope["path"]) > MAX_PATH:
        raise NotFoundError(f"the path has {len(request.scope['path'])} characters; a path has at most {MAX_PATH}")
    if b"%00" in request.scope["query_string"]:
        raise UserError("the query contains a NUL character; leave it out")


async def _authenticate_uncached(services: Services, credential: str | None) -> Caller:
    """Return the caller of a credential that is not cached. Unknown keys are looked up on separate threads."""
    tenants, threads = services.tenants, services.threads
    if not tenants.is_stranger(credential):
        return await run(tenants.authenticate, credential, on=threads.quick)
    with tenants.admit_stranger():
        return await run(tenants.authenticate, credential, on=threads.strangers)


async def _accepts_anyone(services: Services) -> bool:
    return await run(services.tenants.accepts_anyone, on=services.threads.quick)


async def _require_no_keys(services: Services, tenant_id: str) -> None:
    """On a server without keys everyone is an operator. Raises ForbiddenError on others."""
    if not await _accepts_anyone(services):
        raise ForbiddenError(
            f"tenant {tenant_id!r} is no operator; the server allows it with TINSMITH_OPERATOR_TENANTS"
        )


async def _check_metrics_token(request: Request, services: Services) -> None:
    """Raises NotAuthenticatedError."""
    metrics_token = services.settings.metrics_token.get_secret_value()
    if metrics_token:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and secrets.compare_digest(token.strip().encode(), metrics_token.encode()):
            return
        raise NotAuthenticatedError("send the server's metrics_token: `Authorization: Bearer TOKEN`")
    if not await _accepts_anyone(services):
        raise NotAuthenticatedError(
            "metrics of all tenants are for operators; set TINSMITH_METRICS_TOKEN and send it as a bearer token"
        )
