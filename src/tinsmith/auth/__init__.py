"""Authentication: a credential (an API key, or a token exchanged for one) identifies the tenant of a request.

Routes use `tenants.StoredTenants`. Until the first key is created, every well-formed credential is the tenant `local`,
and the server listens on loopback only. Keys are never stored, logged or repeated in messages; `keys` stores their
digests.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith.errors import MissingKeyError, NotAuthenticatedError

ANY_KEY = "tml-any"
"""A well-formed key for servers that accept any key."""

LOCAL_TENANT = "local"
KEY_PREFIX, TOKEN_PREFIX = "tml-", "eyJ"  # what the SDK sends as a key, and as a token
MAX_CREDENTIAL_LENGTH = 8192
NO_MAIL_DOMAIN = "tinsmith.invalid"
"""Its top-level domain is reserved for names that do not exist (RFC 2606)."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant of a credential. On a server that accepts any key, `key_id` is 0 and `name` is the tenant's;
    `expires_at` (seconds since the epoch) is set for tokens only.
    """

    tenant_id: str
    key_id: int = 0
    name: str = LOCAL_TENANT
    expires_at: float | None = None


def user_urn(tenant_id: str) -> str:
    """Return the tenant's URN as a user of the API: in tokens, and as the owner of sessions, runs and usage."""
    return f"tml:organization_user:{tenant_id}"


def user_email(tenant_id: str) -> str:
    """Return an undeliverable address, since the API has one for every user."""
    return f"{tenant_id}@{NO_MAIL_DOMAIN}"


def check_form(credential: str | None, prefixes: tuple[str, ...] = (KEY_PREFIX,)) -> str:
    """Return the credential if it is a token or a key that starts with one of these. Raises NotAuthenticatedError."""
    if not credential:
        raise MissingKeyError(f"the header X-API-Key is missing; set TINKER_API_KEY to a key like '{prefixes[0]}...'")
    if not credential.startswith((*prefixes, TOKEN_PREFIX)) or len(credential) > MAX_CREDENTIAL_LENGTH:
        begins = " or ".join(map(repr, prefixes))
        raise NotAuthenticatedError(f"the API key is malformed; a key starts with {begins}")
    return credential
