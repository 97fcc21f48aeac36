"""Stored responses of `/v1/responses`: the request, the samples that answer it, and the answer once there is one.

A row is written with its samples, so that a response can be read and cancelled from every server while it is sampled.
A response is visible to its tenant only, and is deleted `KEPT_S` after its creation. Knows nothing of their contents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tinsmith.db.database import Database, now
from tinsmith.db.schema import RESPONSES
from tinsmith.errors import NotFoundError

KEPT_S = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`before` are the items of earlier responses; `answer` is None until the samples are settled."""

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
        """Store the answer; False, and nothing changes, if there is one."""
        mine = (RESPONSES.c.response_id == response_id) & (RESPONSES.c.tenant_id == tenant_id)
        unanswered = RESPONSES.c.answered.is_(False)
        return self._db.execute(RESPONSES.update().where(mine, unanswered).values(answer=answer, answered=True)) == 1

    def find(self, tenant_id: str, response_id: str) -> StoredResponse:
        """Raises NotFoundError."""
        columns = [RESPONSES.c[name] for name in StoredResponse.__dataclass_fields__]
        mine = (RESPONSES.c.response_id == response_id) & (RESPONSES.c.tenant_id == tenant_id)
        row = self._db.first(sa.select(*columns).where(mine))
        if row is None:
            raise NotFoundError(f"there is no response {response_id[:80]!a}; it may have been deleted, or not stored")
        return StoredResponse(*row)

    def delete(self, tenant_id: str, response_id: str) -> None:
        """Raises NotFoundError."""
        self.find(tenant_id, response_id)
        mine = (RESPONSES.c.response_id == response_id) & (RESPONSES.c.tenant_id == tenant_id)
        self._db.execute(RESPONSES.delete().where(mine))

    def sweep(self) -> int:
        return self._db.execute(RESPONSES.delete().where(RESPONSES.c.created_at < now() - KEPT_S))
