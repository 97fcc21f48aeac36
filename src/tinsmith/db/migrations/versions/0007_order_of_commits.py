"""Adds the order in which the batches of a job were committed; those that already are, are numbered by their time."""

import sqlalchemy as sa
from alembic import op

revision = "schema_0007"
down_revision = "schema_0006"


def upgrade() -> None:
    inspector = sa.inspect(op.get_bind())
    if "commit_number" not in {column["name"] for column in inspector.get_columns("batch_state")}:
        op.add_column("batch_state", sa.Column("commit_number", sa.BigInteger))
    op.execute("""
        UPDATE batch_state SET commit_number = numbered.number
        FROM (
            SELECT job_id, batch_idx,
                   row_number() OVER (PARTITION BY job_id ORDER BY updated_at, batch_idx) AS number
            FROM batch_state WHERE status = 'COMPLETED'
        ) AS numbered
        WHERE batch_state.job_id = numbered.job_id AND batch_state.batch_idx = numbered.batch_idx
            AND batch_state.commit_number IS NULL
    """)
    is_committed = sa.text("commit_number IS NOT NULL")
    op.create_index(
        "ix_batch_state_commits",
        "batch_state",
        ["job_id", "commit_number"],
        if_not_exists=True,
        sqlite_where=is_committed,
        postgresql_where=is_committed,
    )
