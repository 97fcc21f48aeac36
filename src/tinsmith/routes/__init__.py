"""The HTTP routes, one file per noun, all below /api/v1 but those of OpenAI's clients.

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
    dialect,
    downloads,
    futures,
    losses,
    models,
    openai,
    openai_batches,
    openai_files,
    openapi,
    sampling,
    search,
    service,
    sessions,
    telemetry,
    traces,
    training,
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
        auth,
        usage,
        audit,
        traces,
        batch,
        telemetry,
        service,
        openapi,
        dialect,
    )
    for route in noun.ROUTES
] + [*dialect.ROOT_ROUTES, *openapi.ROOT_ROUTES]
API += [*openai.ROOT_ROUTES, *anthropic.ROOT_ROUTES, *openai_files.ROOT_ROUTES, *openai_batches.ROOT_ROUTES]
