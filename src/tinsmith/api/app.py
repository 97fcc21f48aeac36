"""Builds the ASGI application from the routes and their services.

A route finds its `Services` in `request.app.state.services`. There are no globals, so one process can hold several
applications. Background tasks belong to the caller's `lifespan`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import cast

from sqlalchemy.exc import SQLAlchemyError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinsmith.api import errors, legacy, openapi
from tinsmith.api.dashboard import checkpoints as dashboard_checkpoints
from tinsmith.api.dashboard import machine, machine_history
from tinsmith.api.dashboard import routes as dashboard
from tinsmith.api.dashboard import samples as dashboard_samples
from tinsmith.api.dashboard import warnings as dashboard_warnings
from tinsmith.api.declaration import Endpoint, Operation, endpoint_of, operations_in
from tinsmith.api.openai import batches, chat, files, message_batches, responses
from tinsmith.api.openai import models as openai_models
from tinsmith.api.openai.batches import answer_request
from tinsmith.api.request import json_response, run
from tinsmith.api.routes import (
    account,
    batch,
    batch_outputs,
    checkpoint_jobs,
    checkpoints,
    downloads,
    external_uploads,
    futures,
    hub,
    metrics,
    models,
    profiles,
    sampling,
    service,
    sessions,
    training,
    trajectories,
    uploads,
    weights,
)
from tinsmith.api.services import Services
from tinsmith.batch.operations.sample import VERB
from tinsmith.wire.fields import show

HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]+)(?::[0-9]{1,5})?")

# Routes are matched in order, so the most frequent requests come first.
OPERATIONS = tuple(
    operations_in(
        futures,
        sampling,
        training,
        weights,
        sessions,
        models,
        checkpoints,
        checkpoint_jobs,
        downloads,
        uploads,
        external_uploads,
        account,
        trajectories,
        metrics,
        dashboard,
        machine,
        dashboard_checkpoints,
        machine_history,
        dashboard_samples,
        dashboard_warnings,
        batch,
        batch_outputs,
        service,
        profiles,
        openapi,
        legacy,
        chat,
        responses,
        message_batches,
        files,
        batches,
        openai_models,
        hub,
    )
)


def _routes(operations: Sequence[Operation]) -> list[Route]:
    """Return a flat list of routes; with a Mount the router would match every request twice."""
    methods: dict[tuple[str, Endpoint], list[str]] = {}
    for op in operations:
        methods.setdefault((op.route, op.endpoint), []).append(op.method)
        if op.at_root:
            methods.setdefault((op.path, op.endpoint), []).append(op.method)
    return [Route(path, endpoint, methods=path_methods) for (path, endpoint), path_methods in methods.items()]


API = _routes(OPERATIONS)

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


class LocalOriginGuard:
    """Refuses requests of web pages from other origins while the server has no API keys.

    Such a server accepts any key, and its bulk jobs run code. The check of Host prevents DNS rebinding, and the check
    of Origin prevents cross-origin requests. Clients that are not browsers send no Origin.
    """

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._tenants, self._threads = services.tenants, services.threads
        self._app = app
        self._create_key = services.settings.create_key_command("DIRECTORY")
        bound_host = services.settings.host.lower()
        self._names = {"127.0.0.1", "localhost", "[::1]", f"[{bound_host}]" if ":" in bound_host else bound_host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            accepts_anyone = self._tenants.cached_accepts_anyone()
            if accepts_anyone is None:  # at most every other second, and not at all once a key exists
                accepts_anyone = await self._accepts_anyone()
            refusal = self._refusal_reason(Headers(scope=scope)) if accepts_anyone else ""
        except Exception as error:
            if (response := _error_response(Request(scope), error)) is None:
                raise
            await response(scope, receive, send)
            return
        if refusal:
            await json_response({"detail": refusal}, 403)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _accepts_anyone(self) -> bool:
        """Whether the server has no keys; True, which refuses more, while the database does not answer."""
        try:
            return await run(self._tenants.accepts_anyone, on=self._threads.quick)
        except SQLAlchemyError:
            return True

    def _refusal_reason(self, headers: Headers) -> str:
        """Return the reason to refuse a request, or "" if it is allowed."""
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        host_match = HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if host_match is None or host_match[1].lower() not in self._names:
            return (
                f"the header Host is {show(', '.join(hosts))}; a server without API keys accepts only its own names "
                f"({', '.join(sorted(self._names))}). Use one, or make a key: {self._create_key}"
            )
        if any(origin.lower().partition("://")[2] != hosts[0].lower() for origin in origins):
            return (
                f"the header Origin is {show(', '.join(origins))}, not {hosts[0]}; a server without API "
                f"keys refuses web pages of other origins. Make a key: {self._create_key}"
            )
        return ""


def _error_response(request: Request, error: Exception) -> Response | None:
    """Return the response to an expected error, or None for any other exception."""
    for kind in type(error).__mro__:
        if kind is not Exception and (handler := errors.HANDLERS.get(kind)):
            return cast("Callable[[Request, Exception], Response]", handler)(request, error)
    return None


class _ResponseCounter:
    """Counts responses by status."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._count_response = services.meters.count_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count_response(message["status"])
            await send(message)

        await self._app(scope, receive, send_counted)


def create_app(services: Services, lifespan: Lifespan | None = None) -> Starlette:
    middleware = [Middleware(_ResponseCounter, services=services), Middleware(LocalOriginGuard, services=services)]
    routes = [*API, Route("/healthz", endpoint_of(service.healthz), methods=["GET"]), *dashboard.ROUTES]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=errors.HANDLERS, lifespan=lifespan)
    # The router would redirect a path with a trailing slash to the client's own Host header.
    app.router.redirect_slashes = False
    app.state.services = services
    app.state.operations = OPERATIONS
    services.model_gateway.register(VERB, partial(answer_request, services))
    return app


def create_probe_app(services: Services, lifespan: Lifespan | None = None) -> Starlette:
    """Build the application of a process that serves no clients: only health probes and metrics."""
    probes = [Route(path, endpoint_of(service.healthz), methods=["GET"]) for path in ("/healthz", "/api/v1/healthz")]
    probes += [Route("/readyz", service.readyz, methods=["GET"])]
    routes = [*probes, Route("/metrics", endpoint_of(service.metrics), methods=["GET"])]
    app = Starlette(routes=routes, exception_handlers=errors.HANDLERS, lifespan=lifespan)
    app.state.services = services
    services.model_gateway.register(VERB, partial(answer_request, services))
    return app
