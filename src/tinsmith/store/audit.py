"""The audit log: which changes were made to a tenant's resources, and when.

Append-only until entries expire. An entry is written in the transaction of its change, or right after it, so failed and
repeated requests leave none. Details are ids, paths and names of operations, never keys, bodies or metadata. Training
and sampling are not logged; `usage` counts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from tinsmith.db.database import Database, now
from tinsmith.db.schema import AUDIT

MAX_ENTRIES = 10_000
"""Most entries in one answer; the newest ones are returned."""

# The SDK's name of a category -> the prefixes of its events.
PREFIXES: Mapping[str, tuple[str, ...]] = {
    "all": ("",),
    "checkpoints": ("checkpoint_",),
    "projects": ("project_",),
    "teams": ("team_",),
    "organizations": ("key_",),
}


@dataclass(frozen=True, slots=True)
class AuditEntry:
    event: str
    details: Mapping[str, object]
    created_at: float


class Audit:
    def __init__(self, db: Database) -> None:
        self._db = db

    def record(self, tenant_id: str, event: str, details: Mapping[str, object]) -> None:
        self._db.execute(entry(tenant_id, event, details))

    def entries(self, tenant_id: str, event_type: str, start: float, end: float) -> list[AuditEntry]:
        """The tenant's entries of a span of time, oldest first."""
        is_of_type = sa.or_(*(AUDIT.c.event.startswith(prefix, autoescape=True) for prefix in PREFIXES[event_type]))
        query = (
            sa.select(AUDIT.c.event, AUDIT.c.details, AUDIT.c.created_at)
            .where(AUDIT.c.tenant_id == tenant_id, AUDIT.c.created_at >= start, AUDIT.c.created_at < end, is_of_type)
            .order_by(AUDIT.c.created_at.desc(), AUDIT.c.entry_id.desc())
            .limit(MAX_ENTRIES)
        )
        return [AuditEntry(**row._mapping) for row in self._db.rows(query)][::-1]

    def sweep(self, before: float) -> int:
        """Delete entries before `before` (epoch seconds); returns how many."""
        return self._db.execute(AUDIT.delete().where(AUDIT.c.created_at < before))


def entry(tenant_id: str, event: str, details: Mapping[str, object]) -> sa.Executable:
    """A statement for the transaction of the change. An event is named `{noun}_{past participle}`."""
    return AUDIT.insert().values(tenant_id=tenant_id, event=event, details=dict(details), created_at=now())
