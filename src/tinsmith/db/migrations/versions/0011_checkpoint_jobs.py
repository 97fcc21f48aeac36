"""Adds merges and uploads of checkpoints."""

import sqlalchemy as sa
from alembic import op

revision = "schema_0011"
down_revision = "schema_0010"


def upgrade() -> None:
    if "checkpoint_jobs" in sa.inspect(op.get_bind()).get_table_names():
        return
    op.create_table(
        "checkpoint_jobs",
        sa.Column("job_id", sa.String(32), primary_key=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("tinker_path", sa.String(512), nullable=False),
        sa.Column("base_model", sa.String(512), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("form", sa.String(16), nullable=False),
        sa.Column("dtype", sa.String(16), nullable=False),
        sa.Column("repository", sa.String(256)),
        sa.Column("private", sa.Boolean(), nullable=False),
        sa.Column("has_token", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.Column("phase_began_at", sa.Float(), nullable=False),
        sa.Column("done", sa.BigInteger(), nullable=False),
        sa.Column("total", sa.BigInteger(), nullable=False),
        sa.Column("done_bytes", sa.BigInteger(), nullable=False),
        sa.Column("total_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float()),
        sa.Column("reported_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float()),
        sa.Column("directory", sa.Text()),
        sa.Column("files", sa.JSON()),
        sa.Column("size_bytes", sa.BigInteger()),
        sa.Column("url", sa.Text()),
    )
    op.create_index("ix_checkpoint_jobs_tenant_created", "checkpoint_jobs", ["tenant_id", "created_at"])
    op.create_index("ix_checkpoint_jobs_state", "checkpoint_jobs", ["state", "created_at"])
