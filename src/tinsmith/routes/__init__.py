"""The HTTP routes, one file per noun, all below /api/v1.

Routes know the durable nouns, the wire format and admission; they never meet a device. `call` is what they
share, `submission` is how a request becomes a future, `problems` is how an error becomes an answer.
"""

from __future__ import annotations

from starlette.routing import Mount

from tinsmith.routes import (
    checkpoints,
    futures,
    models,
    sampling,
    service,
    sessions,
    training,
    unsupported,
    weights,
)

# Routes are matched in order: those that a client calls all the time come first.
API = Mount(
    "/api/v1",
    routes=[
        *futures.ROUTES,
        *sampling.ROUTES,
        *training.ROUTES,
        *weights.ROUTES,
        *sessions.ROUTES,
        *models.ROUTES,
        *checkpoints.ROUTES,
        *service.ROUTES,
        *unsupported.ROUTES,
    ],
)
