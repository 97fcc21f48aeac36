"""Adds indexes: of the samples that ran, by the time when they were settled, and of unfinished saves."""

import sqlalchemy as sa
from alembic import op

revision = "schema_0002"
down_revision = "schema_0001"


def upgrade() -> None:
    for name, table, column, condition in (
        ("ix_futures_ran_samples", "futures", "settled_at", "kind = 'sample' AND started_at IS NOT NULL"),
        ("ix_checkpoints_pending", "checkpoints", "base_model", "state = 'pending'"),
    ):
        predicate = sa.text(condition)
        op.create_index(name, table, [column], if_not_exists=True, sqlite_where=predicate, postgresql_where=predicate)
