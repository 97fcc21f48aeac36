"""The rest of the API: paths that the SDK knows and this server does not serve yet, answered 501 by name."""

from __future__ import annotations

from starlette.routing import Route

from tinsmith.errors import NotSupportedError
from tinsmith.routes.call import Call, Endpoint, JsonObject, endpoint

FEATURES = (
    ("POST", "/create_custom_loss", "running custom losses on the server (use forward_backward_custom)"),
)


def _refuse(feature: str) -> Endpoint:
    def handler(_call: Call) -> JsonObject:
        raise NotSupportedError(f"{feature} is not supported yet")

    return endpoint(handler)


ROUTES = [Route(path, _refuse(feature), methods=[method]) for method, path, feature in FEATURES]
