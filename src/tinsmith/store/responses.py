"""Stored responses of `/v1/responses`: the request, the samples that answer it, and the answer once they are settled.

A row is written with its samples, so that every server can read and cancel a response while it is sampled. A response
is visible only to its tenant, and is deleted `RETENTION_S` after its creation. Contents are opaque to this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tinsmith.db.database import Database, now
from tinsmith.db.schema import RESPONSES
from tinsmith.errors import NotFoundError

RETENTION_S = 30 * 86400.0


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
        self._db.execute(RESPONSES.insert().values(**row, request_ids=list(request_ids), created_at=now()))

    def end(self, tenant_id: str, response_id: str, answer: Mapping[str, object]) -> bool:
        """Store the answer; returns False, without a change, if one is stored already."""
        mine = (RESPONSES.c.response_id == response_id) & (RESPONSES.c.tenant_id == tenant_id)
        unanswered = RESPONSES.c.answered.is_(False)
        return self._db.execute(RESPONSES.update().where(mine, unanswered).values(answer=answer, answered=True)) == 1

    def find(self, tenant_id: str, response_id: str) -> StoredResponse:
        """Raises NotFoundError."""
        columns = [RESPONSES.c[name] for name in StoredResponse.__dataclass_fields__]
        mine = (RESPONSES.c.response_id == response_id) & (RESPONSES.c.tenant_id == tenant_id)
        row = self._db.first(sa.select(*columns).where(mine))
        if row is None:
            raise NotFoundError(f"response {response_id[:80]!a} does not exist; it was deleted, or never stored")
        return StoredResponse(*row)

    def delete(self, tenant_id: str, response_id: str) -> None:
        """Raises NotFoundError."""
        self.find(tenant_id, response_id)
        mine = (RESPONSES.c.response_id == response_id) & (RESPONSES.c.tenant_id == tenant_id)
        self._db.execute(RESPONSES.delete().where(mine))

    def sweep(self) -> int:
        return self._db.execute(RESPONSES.delete().where(RESPONSES.c.created_at < now() - RETENTION_S))
