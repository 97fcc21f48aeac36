"""`GET /metrics`: everything that is counted and timed, in Prometheus' text format.

It speaks of all tenants, so no tenant's key opens it. The setting `metrics_token` does, as a bearer token; without that
setting, a server that takes any key, and so listens on this machine only, answers whoever asks, and one that has keys
answers nobody.
"""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinsmith.api.operation import Services, run
from tinsmith.errors import NotAuthenticatedError
from tinsmith.telemetry.metrics import CONTENT_TYPE


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


ROUTES = [Route("/metrics", metrics, methods=["GET"])]
ROOT_ROUTES = ROUTES  # where Prometheus looks, without the prefix
