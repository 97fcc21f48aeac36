"""Files that tenants upload or the server produces. Each has a row, and its bytes below one directory or prefix.

Invariants:
- Bytes are durable before their row exists, and never change afterwards. Bytes without a row are swept.
- A file is visible only to its tenant, until it expires.
- The id of a produced file is derived, so producing it again after a crash gives the same file.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tinsmith.db.database import Database, now
from tinsmith.db.schema import UPLOADS
from tinsmith.errors import NotFoundError
from tinsmith.storage.locations import open_store
from tinsmith.storage.stores import LocalStore, join, make_private

BATCH, BATCH_OUTPUT = "batch", "batch_output"
EXTERNAL_UPLOAD = "external_upload"
"""The purpose of bytes that will become a checkpoint. No tenant sees them as files."""
PAGE = 1000


@dataclass(frozen=True, slots=True)
class File:
    position: int
    file_id: str
    tenant_id: str
    filename: str
    purpose: str
    size_bytes: int
    sha256: str
    created_at: float
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """Stored bytes without a row."""

    file_id: str
    size_bytes: int
    sha256: str


_COLUMNS = [UPLOADS.c[name] for name in File.__dataclass_fields__]
_ID = UPLOADS.c.file_id


def new_id() -> str:
    return f"file-{uuid.uuid4().hex}"


def derive_id(owner: str, name: str) -> str:
    """Derive the id of a file that the server produces: the same for the same owner and name."""
    return f"file-{hashlib.sha256(f'{owner}:{name}'.encode()).hexdigest()[:32]}"


class Files:
    def __init__(self, db: Database, location: str) -> None:
        self._db = db
        self._store, self._root = open_store(location)
        self._is_local = isinstance(self._store, LocalStore)

    def _key(self, file_id: str) -> str:
        return join(self._root, file_id)

    def path(self, file_id: str) -> Path | None:
        """The path of a file on this disk; None in a bucket. `file_id` must be one that this server generated."""
        return Path(self._key(file_id)) if self._is_local else None

    def open(self, file_id: str) -> IO[bytes]:
        """The bytes, for reading and seeking. Raises FileNotFoundError."""
        return self._store.open(self._key(file_id))

    def store(self, file_id: str, chunks: Iterable[bytes]) -> StoredBytes:
        """Write bytes durably, replacing earlier ones of this id."""
        if self._is_local:
            make_private(Path(self._root))
        digest, size_bytes = hashlib.sha256(), 0
        with self._store.open_writer(self._key(file_id)) as writer:
            for chunk in chunks:
                digest.update(chunk)
                size_bytes += len(chunk)
                writer.write(chunk)
        return StoredBytes(file_id, size_bytes, digest.hexdigest())

    def share(self, file_id: str, location: str) -> None:
        """Give the bytes a second name in the same store, which outlives the first. Raises FileNotFoundError."""
        self._store.share(self._key(file_id), open_store(location)[1])

    def add(
        self, tenant_id: str, stored: StoredBytes, filename: str, purpose: str, expires_after_s: float | None
    ) -> File:
        """Add the row of stored bytes."""
        with self._db.write() as connection:
            add_row(connection, self._db, tenant_id, stored, filename, purpose, expires_after_s)
        return self.find(tenant_id, stored.file_id)

    def find(self, tenant_id: str, file_id: str) -> File:
        """Raises NotFoundError."""
        query = sa.select(*_COLUMNS).where(UPLOADS.c.file_id == file_id, UPLOADS.c.tenant_id == tenant_id, _alive())
        row = self._db.first(query)
        if row is None:
            raise NotFoundError(f"file {file_id[:80]!a} does not exist; it may have been deleted, or have expired")
        return File(*row)

    def page(
        self, tenant_id: str, limit: int, *, after: str | None, ascending: bool, purpose: str | None
    ) -> tuple[list[File], bool]:
        """A page, newest first unless `ascending`, and whether more follow. Raises NotFoundError for `after`."""
        query = sa.select(*_COLUMNS).where(UPLOADS.c.tenant_id == tenant_id, _alive())
        if purpose is not None:
            query = query.where(UPLOADS.c.purpose == purpose)
        if after is not None:
            position = self.find(tenant_id, after).position
            query = query.where(UPLOADS.c.position > position if ascending else UPLOADS.c.position < position)
        order = UPLOADS.c.position.asc() if ascending else UPLOADS.c.position.desc()
        rows = self._db.rows(query.order_by(order).limit(limit + 1))
        return [File(*row) for row in rows[:limit]], len(rows) > limit

    def begin_upload(self, tenant_id: str, file_ids: Iterable[str], expires_at: float) -> None:
        """Add rows for files that clients will send, of 0 bytes until then. They are swept when they expire."""
        row = {"tenant_id": tenant_id, "purpose": EXTERNAL_UPLOAD, "size_bytes": 0, "sha256": ""}
        row |= {"created_at": now(), "expires_at": expires_at}
        with self._db.write() as connection:
            connection.execute(UPLOADS.insert(), [row | {"file_id": name, "filename": name} for name in file_ids])

    def uploader(self, file_id: str) -> tuple[str, int] | None:
        """The tenant of a file of an upload, and its bytes so far; None if the upload has ended or expired."""
        row = self._db.first(sa.select(UPLOADS.c.tenant_id, UPLOADS.c.size_bytes).where(_is_upload(file_id)))
        return None if row is None else (row.tenant_id, row.size_bytes)

    def record_upload(self, stored: StoredBytes) -> bool:
        """Record the bytes of a file of an upload; False, after deleting them, if the upload has ended."""
        values = {"size_bytes": stored.size_bytes, "sha256": stored.sha256}
        if self._db.execute(UPLOADS.update().where(_is_upload(stored.file_id)).values(**values)):
            return True
        self.discard(stored.file_id)
        return False

    def end_upload(self, file_ids: Sequence[str]) -> None:
        """Delete the files of an upload and their rows."""
        self._db.execute(UPLOADS.delete().where(_ID.in_(file_ids), UPLOADS.c.purpose == EXTERNAL_UPLOAD))
        for file_id in file_ids:
            self.discard(file_id)

    def delete(self, tenant_id: str, file_id: str) -> None:
        """Raises NotFoundError."""
        self.find(tenant_id, file_id)
        self._db.execute(UPLOADS.delete().where(UPLOADS.c.file_id == file_id, UPLOADS.c.tenant_id == tenant_id))
        self.discard(file_id)

    def discard(self, file_id: str) -> None:
        """Delete bytes without a row."""
        self._store.delete_many([self._key(file_id)])

    def sweep_expired(self) -> list[str]:
        """Delete expired files; returns their ids."""
        query = sa.select(_ID).where(UPLOADS.c.expires_at <= now()).limit(PAGE)
        with self._db.write() as connection:
            expired = list(connection.scalars(query))
            if expired:
                connection.execute(UPLOADS.delete().where(_ID.in_(expired)))
        for file_id in expired:
            self.discard(file_id)
        return expired

    def sweep_unreferenced(self, age_s: float) -> list[str]:
        """Delete bytes without a row and without writes for `age_s` seconds; returns their ids."""
        before = time.time() - age_s
        # Before the rows are read: rows added later name newer bytes.
        entries = [entry for entry in self._store.entries(self._root) if entry.modified_at < before]
        old = [entry.key[len(self._root) + 1 :] for entry in entries]
        swept: list[str] = []
        for start in range(0, len(old), PAGE):
            names = old[start : start + PAGE]
            referenced = set(self._db.scalars(sa.select(_ID).where(_ID.in_(names))))
            for name in names:
                if name not in referenced:
                    self.discard(name)
                    swept.append(name)
        return swept


def add_row(
    connection: Connection,
    db: Database,
    tenant_id: str,
    stored: StoredBytes,
    filename: str,
    purpose: str,
    expires_after_s: float | None,
) -> None:
    """Add the row in the caller's transaction, unless it exists."""
    created_at = now()
    row = {
        "file_id": stored.file_id,
        "tenant_id": tenant_id,
        "filename": filename,
        "purpose": purpose,
        "size_bytes": stored.size_bytes,
        "sha256": stored.sha256,
        "created_at": created_at,
        "expires_at": None if expires_after_s is None else created_at + expires_after_s,
    }
    connection.execute(db.insert_once(UPLOADS), row)


def _is_upload(file_id: str) -> sa.ColumnElement[bool]:
    return (UPLOADS.c.file_id == file_id) & (UPLOADS.c.purpose == EXTERNAL_UPLOAD) & (UPLOADS.c.expires_at > now())


def _alive() -> sa.ColumnElement[bool]:
    unexpired = sa.or_(UPLOADS.c.expires_at.is_(None), UPLOADS.c.expires_at > now())
    return unexpired & (UPLOADS.c.purpose != EXTERNAL_UPLOAD)
