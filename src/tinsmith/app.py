"""The web application: the routes, wired to the services that they need.

There are no globals: a route finds its `Services` in `request.app.state.services`, and two applications can
live in one process. Background tasks belong to the caller's `lifespan`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from tinsmith.routes import API, problems
from tinsmith.routes.call import Services

__all__ = ["Services", "create_app"]

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


class _OwnNames:
    """Any key opens a server without keys, so no web page may reach it by pointing its own name at this machine."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._tenants = services.tenants
        self._app = app
        hosts = ["127.0.0.1", "localhost", "[::1]", services.settings.host]
        self._guarded = TrustedHostMiddleware(app, allowed_hosts=hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Asks the database every other second, and never again once there is a key.
        guarded = scope["type"] == "http" and self._tenants.accepts_anyone()
        await (self._guarded if guarded else self._app)(scope, receive, send)


def create_app(services: Services, lifespan: Lifespan | None = None) -> Starlette:
    middleware = [Middleware(_OwnNames, services=services)]
    app = Starlette(routes=API, middleware=middleware, exception_handlers=problems.HANDLERS, lifespan=lifespan)
    # A path with a slash too many is not found. The router would send its client to whatever host it had named.
    app.router.redirect_slashes = False
    app.state.services = services
    return app
