"""The rest of the API: paths that the SDK knows and this server does not serve yet, answered 501 by name."""

from __future__ import annotations

from starlette.routing import Route

from tinsmith.errors import NotSupportedError
from tinsmith.routes.call import Call, Endpoint, JsonObject, endpoint
from tinsmith.routes.checkpoints import CHECKPOINT

FEATURES = (
    ("POST", "/auth/token", "exchanging a key for a token"),
    ("DELETE", "/auth/apikey/me", "revoking an API key"),
    ("GET", "/sessions/{session_id}/trace_export", "exporting a session's trace"),
    ("POST", "/sessions/search", "searching sessions"),
    ("POST", "/save_weights_external", "saving weights for download"),
    ("GET", CHECKPOINT + "/external_weights_urls", "downloading weights"),
    ("GET", CHECKPOINT + "/archive", "downloading a checkpoint as an archive"),
    ("POST", "/copy_weights", "copying checkpoints"),
    ("POST", "/join_sampling_session", "joining a sampling session"),
    ("POST", "/retrieve_futures", "polling many futures at once"),
    ("POST", "/cancel_future", "cancelling a request"),
    ("POST", "/create_custom_loss", "running custom losses on the server (use forward_backward_custom)"),
    ("GET", "/audit", "the audit log"),
    ("GET", "/billing/usage/events", "usage billing"),
    ("GET", "/billing/usage/checkpoints/current", "checkpoint billing"),
)


def _refuse(feature: str) -> Endpoint:
    def handler(_call: Call) -> JsonObject:
        raise NotSupportedError(f"{feature} is not supported yet")

    return endpoint(handler)


ROUTES = [Route(path, _refuse(feature), methods=[method]) for method, path, feature in FEATURES]
