"""Signed links, which need no API key and expire after an hour.

A link carries a token, whose signature covers the purpose, the path and the expiry. The host is the one that the client
used, or `public_url`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import quote

from starlette.requests import Request

from tinsmith.api.request import PREFIX, Call
from tinsmith.api.services import Services
from tinsmith.errors import ForbiddenError, GoneError, UserError
from tinsmith.settings.groups import AddressSettings
from tinsmith.wire.fields import show

LINK_S = 3600
"""The SDK requests new links when less than 5 minutes are left."""

HOST = re.compile(r"[A-Za-z0-9._-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")
PATH_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)*")


class SignedLink(NamedTuple):
    url: str
    expires_s: int


def sign_link(call: Call, purpose: str, path: str) -> SignedLink:
    """Make a signed link to `path`, a path of the API."""
    expires_s = int(time.time()) + LINK_S
    token = call.services.signer.sign(purpose, {"path": PREFIX + path, "exp": expires_s})
    base = base_url(call.services.settings, call.scheme, call.headers)
    return SignedLink(f"{base}{quote(PREFIX + path, safe='/:')}?token={token}", expires_s)


def verify_link(request: Request, purpose: str) -> None:
    """Check the link by which a request came. Raises ForbiddenError (signature) and GoneError (expiry)."""
    services: Services = request.app.state.services
    claims = services.signer.read(purpose, request.query_params.get("token", ""), ("path", "exp"))
    if claims is None or claims["path"] != request.scope["path"]:
        raise ForbiddenError("the link's signature is wrong for this server; request a new link")
    if time.time() >= claims["exp"]:
        raise GoneError("this link has expired; request a new one")


def base_url(settings: AddressSettings, scheme: str, headers: Mapping[str, str]) -> str:
    """Return the URL by which the client reached this server, without a trailing slash."""
    if settings.public_url:
        return settings.public_url.rstrip("/")
    host, prefix = headers.get("host", ""), ""
    if settings.trust_forwarded_headers:
        host = _nearest(headers, "x-forwarded-host") or host
        scheme = _nearest(headers, "x-forwarded-proto") or scheme
        prefix = _nearest(headers, "x-forwarded-prefix").rstrip("/")
    if scheme not in ("http", "https") or not HOST.fullmatch(host) or not PATH_PREFIX.fullmatch(prefix):
        raise UserError(
            f"the request's scheme {show(scheme)}, host {show(host)} and prefix {show(prefix)} form no valid URL; set "
            "the server's public_url"
        )
    return f"{scheme}://{host}{prefix}"


def _nearest(headers: Mapping[str, str], name: str) -> str:
    """Return the last entry of a list, which the nearest proxy added."""
    return headers.get(name, "").rpartition(",")[2].strip()
