"""Who is asking: an API key names a tenant, and everything else belongs to a tenant.

`Tenants` is what the routes ask. `LocalTenants` is the answer of a server without configured keys: every
well-formed key is the one tenant of this machine (such a server listens on loopback only; `cli` sees to
that). Keys are never stored, logged or repeated in a message.
"""

from __future__ import annotations

from typing import Protocol

from tinsmith.errors import NotAuthenticatedError

LOCAL_TENANT = "local"
KEY_PREFIXES = ("tml-", "eyJ")  # what the SDK accepts as a key, and as a token
MAX_KEY_LENGTH = 8192


class Tenants(Protocol):
    def authenticate(self, key: str | None) -> str:
        """The tenant_id of a key. Raises NotAuthenticatedError."""
        ...


class LocalTenants:
    def authenticate(self, key: str | None) -> str:
        check_form(key)
        return LOCAL_TENANT


def check_form(key: str | None) -> str:
    """The key, if it could be one."""
    if not key:
        raise NotAuthenticatedError("the header X-API-Key is missing; set TINKER_API_KEY to a key like 'tml-...'")
    if not key.startswith(KEY_PREFIXES) or len(key) > MAX_KEY_LENGTH:
        raise NotAuthenticatedError("the header X-API-Key holds no key; a key starts with 'tml-'")
    return key
