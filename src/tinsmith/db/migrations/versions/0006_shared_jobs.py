"""Adds the members of bulk jobs, which run batches of a job that another process owns, and the types of its rows."""

import sqlalchemy as sa
from alembic import op

revision = "schema_0006"
down_revision = "schema_0005"


def upgrade() -> None:
    inspector = sa.inspect(op.get_bind())
    if "schemas" not in {column["name"] for column in inspector.get_columns("batch_job")}:
        op.add_column("batch_job", sa.Column("schemas", sa.JSON))
    op.create_table(
        "batch_member",
        sa.Column("job_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("token", sa.String(64), primary_key=True),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("lease_at", sa.Float, nullable=False),
        if_not_exists=True,
    )
