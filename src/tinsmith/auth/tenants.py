"""Authenticates keys and tokens against the database.

Results are cached for `CACHE_S`, so that most requests need no query; a revocation takes effect on all servers
within that time. Refusals are cached for `REFUSAL_S`, so a new key that was used too early is accepted that much later.
A credential that this server has never accepted is a stranger: `admit_stranger` bounds how many are looked up. Until
the first key is created, any well-formed credential is the tenant `local`; this ends for good within `CACHE_S` after
that. The caches are keyed by digests and hold no credentials.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tinsmith.auth import KEY_PREFIX, LOCAL_TENANT, TOKEN_PREFIX, Caller, check_form
from tinsmith.auth.keys import Key, Keys, digest_of
from tinsmith.auth.tokens import Tokens
from tinsmith.errors import InvalidTokenError, NotAuthenticatedError, TooManyRequestsError, UserError

CACHE_S = 2.0
REFUSAL_S = 1.0
MAX_CACHED = 10_000
MAX_STRANGERS = 128
"""Most strangers that are looked up or wait for it; with two threads, the last one waits for well under a second."""


class StoredTenants:
    def __init__(
        self,
        keys: Keys,
        tokens: Tokens,
        clock: Callable[[], float] = time.monotonic,
        prefixes: tuple[str, ...] = (KEY_PREFIX,),
        create_key: str = "tinsmith keys create TENANT",
    ) -> None:
        """`create_key` is the command that errors name."""
        self._keys = keys
        self._create_key = create_key
        self._prefixes = prefixes
        self._tokens = tokens
        self._clock = clock
        self._cache: dict[str, tuple[float, Caller]] = {}
        self._refusals: dict[str, tuple[float, str]] = {}
        self._num_strangers = 0
        self._open_until = 0.0
        self._has_keys = False

    def find_cached(self, credential: str | None) -> Caller | None:
        """Return the caller if it is cached; makes no query. Raises NotAuthenticatedError."""
        digest = digest_of(check_form(credential, self._prefixes))
        refused_until, reason = self._refusals.get(digest, (0.0, ""))
        if self._clock() < refused_until:
            raise NotAuthenticatedError(reason)
        until, caller = self._cache.get(digest, (0.0, None))
        return caller if caller is not None and self._clock() < until else None

    def is_stranger(self, credential: str | None) -> bool:
        """Whether the lookup of the credential may need a query although this server has not accepted it before."""
        text = check_form(credential, self._prefixes)
        return not self.cached_accepts_anyone() and digest_of(text) not in self._cache

    @contextmanager
    def admit_stranger(self) -> Iterator[None]:
        """Admit the lookup of a stranger in a `with` block, from one thread only. Raises TooManyRequestsError."""
        if self._num_strangers >= MAX_STRANGERS:
            raise TooManyRequestsError("too many unknown API keys are being checked; send the request again", 1.0)
        self._num_strangers += 1
        try:
            yield
        finally:
            self._num_strangers -= 1

    def authenticate(self, credential: str | None) -> Caller:
        """Return the caller that the credential names. Raises NotAuthenticatedError."""
        text = check_form(credential, self._prefixes)
        if self.accepts_anyone():
            caller = Caller(LOCAL_TENANT)
        elif text.startswith(TOKEN_PREFIX):
            caller = self._caller_of_token(text)
        else:
            caller = self._caller_of_key(text)
        self._refusals.pop(digest_of(text), None)
        self._add_to_cache(digest_of(text), caller)
        return caller

    def cached_accepts_anyone(self) -> bool | None:
        """Return `accepts_anyone` from the cache; None if it needs a query."""
        return not self._has_keys if self._has_keys or self._clock() < self._open_until else None

    def accepts_anyone(self) -> bool:
        """Whether every well-formed credential is accepted, so that the server must listen on loopback only."""
        if (cached := self.cached_accepts_anyone()) is not None:
            return cached
        self._has_keys = self._keys.any()
        self._open_until = self._clock() + CACHE_S
        return not self._has_keys

    def keys_of(self, tenant_id: str) -> list[Key]:
        """Return the tenant's keys, revoked ones included, oldest first."""
        return self._keys.of_tenant(tenant_id)

    def issue_token(self, caller: Caller) -> str:
        """Return a token for the same caller."""
        return self._tokens.issue(caller)

    def revoke(self, caller: Caller) -> None:
        """Revoke the caller's key. Raises UserError if the server has no keys."""
        if caller.key_id == 0:
            raise UserError(f"this server accepts any key; `{self._create_key}` creates the first one")
        self._keys.revoke(caller.key_id)
        self._cache = {}  # takes effect on this server at once

    def _caller_of_key(self, secret: str) -> Caller:
        key = self._keys.find(secret)
        if key is None:
            raise self._refuse(secret, f"this server does not know the API key; `{self._create_key}` makes one")
        if key.revoked_at is not None:
            raise self._refuse(secret, f"key {key.key_id} of tenant {key.tenant_id!r} has been revoked")
        return Caller(key.tenant_id, key.key_id, key.name)

    def _refuse(self, secret: str, reason: str) -> NotAuthenticatedError:
        """Cache a refusal, and return its error."""
        if len(self._refusals) >= MAX_CACHED:
            self._refusals = {}
        digest = digest_of(secret)
        self._cache.pop(digest, None)  # a revoked key is a stranger
        self._refusals[digest] = self._clock() + REFUSAL_S, reason
        return NotAuthenticatedError(reason)

    def _caller_of_token(self, token: str) -> Caller:
        caller = self._tokens.read(token)
        key = self._keys.get(caller.key_id)
        if key is None:
            raise InvalidTokenError("the token was issued before this server had keys; exchange a key for a new one")
        if key.revoked_at is not None:
            raise InvalidTokenError(f"key {key.key_id}, for which the token was issued, has been revoked")
        return caller

    def _add_to_cache(self, digest: str, caller: Caller) -> None:
        now_s = self._clock()
        if len(self._cache) >= MAX_CACHED:
            # Without keys every well-formed credential is accepted, so the cache must be bounded.
            self._cache = {key: cached for key, cached in self._cache.copy().items() if cached[0] > now_s}
            if len(self._cache) >= MAX_CACHED:
                self._cache = {}
        until = now_s + CACHE_S
        if caller.key_id == 0:
            until = min(until, self._open_until)
        self._cache[digest] = (until, caller)
