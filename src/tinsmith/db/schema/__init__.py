"""The schema: every table, SQLite's and Postgres's alike.

Times are float seconds since the epoch (UTC). Large values live in tables of their own, so that reading or changing a
row's metadata never touches them. What changes here needs a migration (`migrations/versions`).
"""

from __future__ import annotations

from tinsmith.db.schema import batch as batch_tables
from tinsmith.db.schema import engines as engine_tables
from tinsmith.db.schema import files as file_tables
from tinsmith.db.schema import records as record_tables
from tinsmith.db.schema.service import (
    AUDIT,
    BODIES,
    CHECKPOINTS,
    CUSTOM_LOSSES,
    FUTURES,
    KEYS,
    METADATA,
    MODELS,
    RESULTS,
    SAMPLERS,
    SEQUENCES,
    SESSIONS,
    TENANTS,
    USAGE,
)

ENGINES = engine_tables.define(METADATA)
BATCH = batch_tables.define(METADATA)
UPLOADS, OPENAI_BATCHES = file_tables.define(METADATA)
CURVE_POINTS, RECENT_STEPS, KEPT_SAMPLES = record_tables.define(METADATA)

__all__ = [
    "AUDIT",
    "BATCH",
    "BODIES",
    "CHECKPOINTS",
    "CURVE_POINTS",
    "CUSTOM_LOSSES",
    "ENGINES",
    "FUTURES",
    "KEPT_SAMPLES",
    "KEYS",
    "METADATA",
    "MODELS",
    "OPENAI_BATCHES",
    "RECENT_STEPS",
    "RESULTS",
    "SAMPLERS",
    "SEQUENCES",
    "SESSIONS",
    "TENANTS",
    "UPLOADS",
    "USAGE",
]
