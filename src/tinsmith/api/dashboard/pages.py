"""The dashboard's own files, without a key: they hold no data. What they show they ask the API for, with a key.

Nothing of another origin is loaded, nothing inline runs, no other page can frame it, and no cookie is set.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinsmith.api.dashboard import assets
from tinsmith.errors import NotFoundError

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again each time, and sent if it has changed
}


async def page(request: Request) -> Response:
    return _answer(request, "index.html")


async def file(request: Request) -> Response:
    return _answer(request, request.path_params["file"])


def _answer(request: Request, name: str) -> Response:
    found = assets.files().get(name)
    if found is None:
        raise NotFoundError("the dashboard has no such file")
    headers = HEADERS | {"etag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.media_type)


ROUTES = [Route("/", page, methods=["GET"]), Route("/dashboard/{file}", file, methods=["GET"])]
