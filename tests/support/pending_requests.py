"""The pending requests that an engine would read."""

from __future__ import annotations

from tinsmith.cluster.ownership import Ownership
from tinsmith.db.database import Database
from tinsmith.types import Pending


def incoming(db: Database, base_model: str, after_arrival: int = 0) -> list[Pending]:
    """Unclaimed requests after an arrival number, including refused ones, which engines skip."""
    return [row.request for row in Ownership(db, base_model, "engine-without-runs").incoming(after_arrival)]


def pending_ids(db: Database, base_model: str) -> set[str]:
    return Ownership(db, base_model, "engine-without-runs").pending_ids()
