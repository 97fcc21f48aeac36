"""Tokens: JWTs signed by this server, valid for an hour, for which the SDK exchanges its key.

A token names its key, and `tenants` rejects it once the key is revoked. A token issued in exchange for another token
expires no later than that token. The SDK reads the claims exp, iat, sub, org_id, email and iss.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tinsmith.auth import Caller, user_email, user_urn
from tinsmith.auth.signing import Signer
from tinsmith.errors import InvalidTokenError

LIFETIME_S = 3600
ISSUER = "passport-tinsmith"  # the SDK recognizes tokens by the issuer's prefix "passport"
PURPOSE = "token"
CLAIMS = ["exp", "iat", "sub", "org_id", "iss", "key_id", "key_name"]


class Tokens:
    def __init__(self, signer: Signer, clock: Callable[[], float] = time.time) -> None:
        self._signer = signer
        self._clock = clock

    def issue(self, caller: Caller) -> str:
        issued_at = int(self._clock())
        claims = {
            "iat": issued_at,
            "exp": int(min(issued_at + LIFETIME_S, caller.expires_at or float("inf"))),
            "iss": ISSUER,
            "sub": user_urn(caller.tenant_id),
            "org_id": caller.tenant_id,
            "email": user_email(caller.tenant_id),
            "key_id": caller.key_id,
            "key_name": caller.name,
        }
        return self._signer.sign(PURPOSE, claims)

    def read(self, token: str) -> Caller:
        """Return the caller that the token names. Raises InvalidTokenError."""
        claims = self._signer.read(PURPOSE, token, CLAIMS)
        if claims is None or claims["iss"] != ISSUER:
            raise InvalidTokenError("the token was not issued by this server; exchange the key again")
        if self._clock() >= claims["exp"]:
            raise InvalidTokenError("the token has expired; exchange the key again")
        return Caller(claims["org_id"], claims["key_id"], claims["key_name"], float(claims["exp"]))
