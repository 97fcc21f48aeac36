"""Adds the sizes of stored responses, the machines that a bulk job has set aside, and indexes.

Each step is skipped where its result exists: a database of the last schema before the first one is newer than it.
"""

import sqlalchemy as sa
from alembic import op

revision = "schema_0002"
down_revision = "schema_0001"

COLUMNS = (
    ("responses", sa.Column("size_bytes", sa.BigInteger(), server_default="0", nullable=False)),
    ("batch_job", sa.Column("machines_set_aside", sa.JSON(), nullable=True)),
)
INDEXES = (
    ("ix_futures_ran_samples", "futures", ["settled_at"], "kind = 'sample' AND started_at IS NOT NULL"),
    ("ix_checkpoints_pending", "checkpoints", ["base_model"], "state = 'pending'"),
    ("ix_responses_tenant", "responses", ["tenant_id", "size_bytes"], None),
    ("ix_responses_unanswered", "responses", ["created_at"], "NOT answered"),
)


def upgrade() -> None:
    inspector = sa.inspect(op.get_bind())
    for table, column in COLUMNS:
        if column.name not in {existing["name"] for existing in inspector.get_columns(table)}:
            op.add_column(table, column)
    lengths = (f"coalesce(length(CAST({name} AS TEXT)), 0)" for name in ("request", '"before"', "answer"))
    op.execute(f"UPDATE responses SET size_bytes = {' + '.join(lengths)} WHERE size_bytes = 0")
    for name, table, columns, condition in INDEXES:
        predicate = None if condition is None else sa.text(condition)
        op.create_index(name, table, columns, if_not_exists=True, sqlite_where=predicate, postgresql_where=predicate)
