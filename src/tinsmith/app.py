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

from tinsmith.routes import API, problems
from tinsmith.routes.call import Services
from tinsmith.tenants import LocalTenants

__all__ = ["Services", "create_app"]

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def create_app(services: Services, lifespan: Lifespan | None = None) -> Starlette:
    middleware = []
    if isinstance(services.tenants, LocalTenants):
        # Any key opens such a server, so no web page may reach it by pointing its own name at this machine.
        hosts = ["127.0.0.1", "localhost", "[::1]", services.settings.host]
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=hosts))
    app = Starlette(routes=API, middleware=middleware, exception_handlers=problems.HANDLERS, lifespan=lifespan)
    app.state.services = services
    return app
