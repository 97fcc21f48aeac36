"""bulk jobs"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "batch_job",
        sa.Column("job_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("pool", sa.String(length=128), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("owner_token", sa.String(length=64), nullable=True),
        sa.Column("owner_holder", sa.Text(), nullable=True),
        sa.Column("owner_lease_at", sa.Float(), server_default="0", nullable=False),
        sa.Column("sealed", sa.Boolean(), nullable=False),
        sa.Column("total_rows", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("total_batches", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("completed_batches", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("rows_ok", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("rows_failed", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("tokens_in", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("tokens_out", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("max_failed_rows", sa.Float(), nullable=False),
        sa.Column("resume_from", sa.BigInteger(), nullable=True),
        sa.Column("root_job_id", sa.BigInteger(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("cleaned", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_batch_job")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_batch_job_root", "batch_job", ["root_job_id"], unique=False)
    op.create_index("ix_batch_job_status", "batch_job", ["status"], unique=False)
    op.create_index("ix_batch_job_tenant_id", "batch_job", ["tenant_id", "job_id"], unique=False)
    op.create_table(
        "batch_output",
        sa.Column("job_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("output_idx", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("format", sa.String(length=64), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("etag", sa.Text(), nullable=True),
        sa.Column("published_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "output_idx", name=op.f("pk_batch_output")),
    )
    op.create_table(
        "batch_row_error",
        sa.Column("job_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("row_idx", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt_id", sa.Integer(), nullable=False),
        sa.Column("error_class", sa.String(length=128), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "row_idx", name=op.f("pk_batch_row_error")),
    )
    op.create_table(
        "batch_state",
        sa.Column("job_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("batch_idx", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("start_idx", sa.BigInteger(), nullable=False),
        sa.Column("end_idx", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("worker_cluster", sa.String(length=128), nullable=True),
        sa.Column("retry_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.Column("parent_idx", sa.BigInteger(), nullable=True),
        sa.Column("attempt_id", sa.Integer(), server_default="0", nullable=False),
        sa.Column("attempt_owner_token", sa.String(length=64), nullable=True),
        sa.Column("lease_expires_at", sa.Float(), nullable=True),
        sa.Column("next_retry_at", sa.Float(), nullable=True),
        sa.Column("infra_retries", sa.Integer(), server_default="0", nullable=False),
        sa.Column("parts", sa.JSON(), nullable=True),
        sa.Column("rows_ok", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("rows_failed", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("tokens_in", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("tokens_out", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("error_class", sa.String(length=128), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "batch_idx", name=op.f("pk_batch_state")),
    )
    op.create_index("ix_batch_state_rows", "batch_state", ["job_id", "start_idx"], unique=False)
    op.create_index(
        "ix_batch_state_dispatched",
        "batch_state",
        ["lease_expires_at"],
        unique=False,
        postgresql_where=sa.text("status = 'DISPATCHED'"),
        sqlite_where=sa.text("status = 'DISPATCHED'"),
    )
    op.create_index(
        "ix_batch_state_pending",
        "batch_state",
        ["job_id", "start_idx"],
        unique=False,
        postgresql_where=sa.text("status = 'PENDING'"),
        sqlite_where=sa.text("status = 'PENDING'"),
    )
    op.create_table(
        "batch_worker",
        sa.Column("pool", sa.String(length=128), nullable=False),
        sa.Column("worker_id", sa.String(length=128), nullable=False),
        sa.Column("job_id", sa.BigInteger(), nullable=False),
        sa.Column("owner_token", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("address", sa.Text(), nullable=True),
        sa.Column("pid_or_actor", sa.String(length=128), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("last_seen_at", sa.Float(), nullable=False),
        sa.Column("launch_intent", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("pool", "worker_id", name=op.f("pk_batch_worker")),
    )
    op.create_index("ix_batch_worker_job", "batch_worker", ["job_id"], unique=False)


def downgrade() -> None:
    op.drop_index("ix_batch_worker_job", table_name="batch_worker")
    op.drop_table("batch_worker")
    op.drop_index(
        "ix_batch_state_pending",
        table_name="batch_state",
        postgresql_where=sa.text("status = 'PENDING'"),
        sqlite_where=sa.text("status = 'PENDING'"),
    )
    op.drop_index(
        "ix_batch_state_dispatched",
        table_name="batch_state",
        postgresql_where=sa.text("status = 'DISPATCHED'"),
        sqlite_where=sa.text("status = 'DISPATCHED'"),
    )
    op.drop_index("ix_batch_state_rows", table_name="batch_state")
    op.drop_table("batch_state")
    op.drop_table("batch_row_error")
    op.drop_table("batch_output")
    op.drop_index("ix_batch_job_tenant_id", table_name="batch_job")
    op.drop_index("ix_batch_job_status", table_name="batch_job")
    op.drop_index("ix_batch_job_root", table_name="batch_job")
    op.drop_table("batch_job")
