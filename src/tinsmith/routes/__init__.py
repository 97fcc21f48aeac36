"""The HTTP routes, one file per noun, all below /api/v1 but those of other services' clients.

Routes know the durable nouns, the wire format and admission; they never meet a device. `call` is what they
share, `submission` is how a request becomes a future, `problems` is how an error becomes an answer.
"""

from __future__ import annotations

from starlette.routing import Route

from tinsmith.routes import (
    anthropic,
    audit,
    auth,
    batch,
    checkpoints,
    copies,
    curves,
    dialect,
    downloads,
    futures,
    hub,
    losses,
    metrics,
    models,
    openai,
    openai_batches,
    openai_files,
    openapi,
    overview,
    samples,
    sampling,
    search,
    served,
    service,
    sessions,
    telemetry,
    traces,
    training,
    uploads,
    usage,
    weights,
)
from tinsmith.routes.call import PREFIX

__all__ = ["API", "PREFIX"]

# Routes are matched in order, so those that a client calls all the time come first. A flat list, since a Mount would
# have every request matched twice.
API = [
    Route(PREFIX + route.path, route.endpoint, methods=route.methods)
    for noun in (
        futures,
        sampling,
        training,
        weights,
        sessions,
        search,
        models,
        losses,
        checkpoints,
        copies,
        downloads,
        uploads,
        auth,
        usage,
        audit,
        traces,
        curves,
        overview,
        samples,
        batch,
        telemetry,
        service,
        metrics,
        openapi,
        dialect,
    )
    for route in noun.ROUTES
] + [*dialect.ROOT_ROUTES, *openapi.ROOT_ROUTES, *metrics.ROOT_ROUTES]
API += [*openai.ROOT_ROUTES, *anthropic.ROOT_ROUTES, *openai_files.ROOT_ROUTES, *openai_batches.ROOT_ROUTES]
API += [*served.ROOT_ROUTES, *hub.ROOT_ROUTES]
