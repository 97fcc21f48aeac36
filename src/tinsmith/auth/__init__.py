"""Authentication: a credential (an API key, or a token exchanged for one) names a tenant, and everything has a tenant.

Routes use `tenants.StoredTenants`. Until the first key is made, every well-formed credential is the tenant `local`, and
`server` makes such a server listen on loopback only. Keys are never stored, logged or repeated in messages; `keys`
stores their digests.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith.errors import MissingKeyError, NotAuthenticatedError

ANY_KEY = "tml-any"
"""A well-formed key, for a server that accepts any."""

LOCAL_TENANT = "local"
KEY_PREFIX, TOKEN_PREFIX = "tml-", "eyJ"  # what the SDK accepts as a key, and as a token
MAX_CREDENTIAL_LENGTH = 8192
NO_MAIL_DOMAIN = "tinsmith.invalid"
"""Under a top-level domain that is reserved for names that do not exist (RFC 2606)."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant that a credential names. `key_id` is 0 and `name` the tenant's where the server accepts any key;
    `expires_at` (epoch seconds) is set for tokens only.
    """

    tenant_id: str
    key_id: int = 0
    name: str = LOCAL_TENANT
    expires_at: float | None = None


def user_urn(tenant_id: str) -> str:
    """The tenant's URN as a user of the API: in tokens, and as the owner of sessions, runs and usage."""
    return f"tml:organization_user:{tenant_id}"


def user_email(tenant_id: str) -> str:
    """An undeliverable address: the API gives every user one, and tenants have no mailbox."""
    return f"{tenant_id}@{NO_MAIL_DOMAIN}"


def check_form(credential: str | None) -> str:
    """The credential, if it is well-formed. Raises NotAuthenticatedError."""
    if not credential:
        raise MissingKeyError("the header X-API-Key is missing; set TINKER_API_KEY to a key like 'tml-...'")
    if not credential.startswith((KEY_PREFIX, TOKEN_PREFIX)) or len(credential) > MAX_CREDENTIAL_LENGTH:
        raise NotAuthenticatedError("the API key has not the form of one; a key starts with 'tml-'")
    return credential
