"""Stored responses of `/v1/responses`: the request, the samples that answer it, and the answer once they are settled.

A row is written with its samples, so that every server can read, complete and cancel a response while it is sampled.
Its samples live as long as it is unanswered, and it lives `RETENTION_S` from its creation. It is visible only to its
tenant. Contents are opaque to this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import sqlalchemy as sa

from tinsmith.db.database import Database, now
from tinsmith.db.schema import FUTURES, RESPONSES
from tinsmith.errors import NotFoundError

RETENTION_S = 30 * 86400.0
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`before` holds the items of earlier responses; `answer` is None until the samples are settled."""

    response_id: str
    tenant_id: str
    request: Mapping[str, Any]
    before: list[dict[str, Any]]
    request_ids: list[str]
    answer: dict[str, Any] | None
    created_at: float


@dataclass(frozen=True, slots=True)
class UnansweredResponse:
    """`pending` are the request_ids of its samples that are pending; without any, the response can be completed."""

    response_id: str
    tenant_id: str
    pending: tuple[str, ...]


class Responses:
    def __init__(self, db: Database) -> None:
        self._db = db

    def add(
        self,
        tenant_id: str,
        response_id: str,
        request: Mapping[str, object],
        before: Sequence[Mapping[str, object]],
        request_ids: Sequence[str],
    ) -> None:
        row = {"response_id": response_id, "tenant_id": tenant_id, "request": request, "before": list(before)}
        row |= {"request_ids": list(request_ids), "created_at": now(), "size_bytes": _size([request, list(before)])}
        self._db.execute(RESPONSES.insert().values(**row))

    def end(self, tenant_id: str, response_id: str, answer: Mapping[str, object]) -> bool:
        """Store the answer; returns False, without a change, if one is stored already."""
        unanswered = RESPONSES.update().where(_is(tenant_id, response_id), RESPONSES.c.answered.is_(False))
        values = {"answer": answer, "answered": True, "size_bytes": RESPONSES.c.size_bytes + _size(answer)}
        return self._db.execute(unanswered.values(**values)) == 1

    def list_unanswered(self) -> list[UnansweredResponse]:
        """Return the responses without an answer, of all tenants, the oldest first."""
        columns = RESPONSES.c.response_id, RESPONSES.c.tenant_id, RESPONSES.c.request_ids
        query = sa.select(*columns).where(sa.text("NOT answered")).order_by(RESPONSES.c.created_at)
        rows = self._db.rows(query)
        request_ids = [request_id for row in rows for request_id in row.request_ids]
        pending: set[str] = set()
        for start in range(0, len(request_ids), _PAGE):
            in_page = FUTURES.c.request_id.in_(request_ids[start : start + _PAGE])
            pending.update(
                self._db.scalars(sa.select(FUTURES.c.request_id).where(in_page, FUTURES.c.state == "pending"))
            )
        return [
            UnansweredResponse(
                row.response_id, row.tenant_id, tuple(name for name in row.request_ids if name in pending)
            )
            for row in rows
        ]

    def find(self, tenant_id: str, response_id: str) -> StoredResponse:
        """Raises NotFoundError."""
        columns = [RESPONSES.c[name] for name in StoredResponse.__dataclass_fields__]
        row = self._db.first(sa.select(*columns).where(_is(tenant_id, response_id)))
        if row is None:
            raise NotFoundError(f"response {response_id[:80]!a} does not exist; it was deleted, or never stored")
        return StoredResponse(*row)

    def delete(self, tenant_id: str, response_id: str) -> None:
        self._db.execute(RESPONSES.delete().where(_is(tenant_id, response_id)))

    def sweep(self) -> int:
        """Delete the responses whose time is over; the session of an unanswered one then expires with its samples."""
        return self._db.execute(RESPONSES.delete().where(RESPONSES.c.created_at < now() - RETENTION_S))


def _is(tenant_id: str, response_id: str) -> sa.ColumnElement[bool]:
    return (RESPONSES.c.response_id == response_id) & (RESPONSES.c.tenant_id == tenant_id)


def _size(content: object) -> int:
    return len(orjson.dumps(content))
