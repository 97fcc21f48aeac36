"""Who is asking: a credential (an API key, or a token exchanged for one) names a tenant; all else belongs to a tenant.

`stored.StoredTenants` is what the routes ask. As long as no key was ever made, every
well-formed credential is the one tenant of this machine (such a server listens on loopback only; `server` sees to
that). Keys are never stored, logged or repeated in a message; `keys` holds their digests.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith.errors import MissingKeyError, NotAuthenticatedError

ANY_KEY = "tml-any"
"""A key of the right form, for a server that takes any."""

LOCAL_TENANT = "local"
KEY_PREFIX, TOKEN_PREFIX = "tml-", "eyJ"  # what the SDK accepts as a key, and as a token
MAX_CREDENTIAL_LENGTH = 8192
NO_MAIL_DOMAIN = "tinsmith.invalid"
"""Under a top-level domain that is reserved for names that do not exist (RFC 2606)."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a credential names. `key_id` is 0 and `name` the tenant's where the server takes any key; `expires_at` is
    that of a token.
    """

    tenant_id: str
    key_id: int = 0
    name: str = LOCAL_TENANT
    expires_at: float | None = None


def user_urn(tenant_id: str) -> str:
    """The tenant as the wire names a user: in tokens, and as the owner of sessions, runs and usage."""
    return f"tml:organization_user:{tenant_id}"


def user_email(tenant_id: str) -> str:
    """A tenant has no mailbox, but the wire gives every user an address: one that can never be delivered to."""
    return f"{tenant_id}@{NO_MAIL_DOMAIN}"


def check_form(credential: str | None) -> str:
    """The credential, if it could be one."""
    if not credential:
        raise MissingKeyError("the header X-API-Key is missing; set TINKER_API_KEY to a key like 'tml-...'")
    if not credential.startswith((KEY_PREFIX, TOKEN_PREFIX)) or len(credential) > MAX_CREDENTIAL_LENGTH:
        raise NotAuthenticatedError("the API key has not the form of one; a key starts with 'tml-'")
    return credential
