"""API keys: rows that are found by the digest of the secret. `create` returns the secret, which is never stored.

Keys are revoked but never deleted, so that a server that has had keys never accepts anonymous clients again.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from tinsmith.auth import KEY_PREFIX
from tinsmith.db.database import Database, now
from tinsmith.db.schema import KEYS, TENANTS
from tinsmith.errors import NotFoundError, UserError
from tinsmith.store.audit import entry

KEY_BYTES = 32
MAX_NAME_LENGTH = 128
TENANT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Key:
    """A key's row, without the secret."""

    key_id: int
    tenant_id: str
    name: str
    created_at: float
    revoked_at: float | None


_COLUMNS = [KEYS.c[name] for name in Key.__dataclass_fields__]
_BY_DIGEST = sa.select(*_COLUMNS, KEYS.c.digest).where(KEYS.c.digest == sa.bindparam("digest"))
_BY_ID = sa.select(*_COLUMNS).where(KEYS.c.key_id == sa.bindparam("key_id"))


class Keys:
    def __init__(self, db: Database) -> None:
        self._db = db

    def create(
        self, tenant_id: str, name: str = "", quotas: Mapping[str, int] | None = None, prefix: str = KEY_PREFIX
    ) -> tuple[Key, str]:
        """Create a key and return it with its secret, which starts with `prefix`. The first key of a tenant creates the
        tenant; `quotas` update the tenant's quotas. Raises UserError.
        """
        check_tenant_id(tenant_id)
        if len(name) > MAX_NAME_LENGTH or not name.isprintable():
            raise UserError(f"the name {name!r} must have at most {MAX_NAME_LENGTH} characters, all printable")
        secret = prefix + secrets.token_urlsafe(KEY_BYTES)
        created_at = now()
        row = {"tenant_id": tenant_id, "name": name, "digest": digest_of(secret), "created_at": created_at}
        is_tenant = TENANTS.c.tenant_id == tenant_id
        with self._db.write() as connection:
            tenant_row = connection.execute(sa.select(TENANTS.c.quotas).where(is_tenant)).one_or_none()
            if tenant_row is None:
                values = {"tenant_id": tenant_id, "quotas": dict(quotas or {}), "created_at": created_at}
                connection.execute(TENANTS.insert(), values)
            elif quotas:
                connection.execute(TENANTS.update().where(is_tenant).values(quotas={**tenant_row.quotas, **quotas}))
            key_id = connection.execute(KEYS.insert().returning(KEYS.c.key_id), row).scalar_one()
            connection.execute(entry(tenant_id, "key_created", {"key_id": key_id, "name": name}))
        return Key(key_id, tenant_id, name, created_at, None), secret

    def list_all(self) -> list[Key]:
        """Return all keys, revoked ones included, oldest first."""
        return [Key(**row._mapping) for row in self._db.rows(sa.select(*_COLUMNS).order_by(KEYS.c.key_id))]

    def of_tenant(self, tenant_id: str) -> list[Key]:
        query = sa.select(*_COLUMNS).where(KEYS.c.tenant_id == tenant_id).order_by(KEYS.c.key_id)
        return [Key(**row._mapping) for row in self._db.rows(query)]

    def revoke(self, key_id: int) -> Key:
        """Revoke a key; a second revocation changes nothing. Raises NotFoundError."""
        is_key = KEYS.c.key_id == key_id
        with self._db.write() as connection:
            active = KEYS.update().where(is_key, KEYS.c.revoked_at.is_(None))
            changed = connection.execute(active.values(revoked_at=now())).rowcount
            row = connection.execute(_BY_ID, {"key_id": key_id}).one_or_none()
            if row is None:
                raise NotFoundError(f"key {key_id} does not exist; `tinsmith keys list` lists the keys")
            if changed:
                connection.execute(entry(row.tenant_id, "key_revoked", {"key_id": key_id, "name": row.name}))
        return Key(**row._mapping)

    def find(self, secret: str) -> Key | None:
        """Return the key with this secret, revoked or not."""
        digest = digest_of(secret)
        row = self._db.first(_BY_DIGEST, {"digest": digest})
        # The timing of the lookup reveals at most digests, which a caller cannot choose.
        if row is None or not hmac.compare_digest(row.digest, digest):
            return None
        return Key(row.key_id, row.tenant_id, row.name, row.created_at, row.revoked_at)

    def get(self, key_id: int) -> Key | None:
        row = self._db.first(_BY_ID, {"key_id": key_id})
        return None if row is None else Key(**row._mapping)

    def any(self) -> bool:
        """Whether a key was ever created."""
        return self._db.scalar(sa.select(KEYS.c.key_id).limit(1)) is not None


def digest_of(secret: str) -> str:
    """Return the SHA-256 of the secret. A key has 256 random bits, so one round is enough."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def check_tenant_id(tenant_id: str) -> str:
    if not TENANT_ID.fullmatch(tenant_id):
        raise UserError(
            f"tenant {tenant_id!r} is not allowed; use 1 to 64 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit"
        )
    return tenant_id
