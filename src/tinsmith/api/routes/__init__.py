"""The HTTP routes, one file per noun, all below /api/v1 but those of other services' clients.

Routes know the durable nouns, the wire format and admission; they never meet a device. `call` is what they
share, `submission` is how a request becomes a future, `problems` is how an error becomes an answer.
"""

from __future__ import annotations

from starlette.routing import Route

from tinsmith.api import legacy, openapi
from tinsmith.api.dashboard import curves, overview, samples
from tinsmith.api.openai import anthropic, batches, chat, files
from tinsmith.api.openai import models as openai_models
from tinsmith.api.operation import PREFIX
from tinsmith.api.routes import (
    audit,
    auth,
    batch,
    checkpoints,
    copies,
    downloads,
    futures,
    hub,
    losses,
    metrics,
    models,
    sampling,
    search,
    service,
    sessions,
    telemetry,
    traces,
    training,
    uploads,
    usage,
    weights,
)

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
        legacy,
    )
    for route in noun.ROUTES
] + [*legacy.ROOT_ROUTES, *openapi.ROOT_ROUTES, *metrics.ROOT_ROUTES]
API += [*chat.ROOT_ROUTES, *anthropic.ROOT_ROUTES, *files.ROOT_ROUTES, *batches.ROOT_ROUTES]
API += [*openai_models.ROOT_ROUTES, *hub.ROOT_ROUTES]
