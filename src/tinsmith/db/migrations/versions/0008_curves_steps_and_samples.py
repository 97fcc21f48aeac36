"""curves of runs, recent steps of engines, recent samples of tenants"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "curve_points",
        sa.Column("model_id", sa.String(length=128), nullable=False),
        sa.Column("source", sa.String(length=8), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("recorded_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", "source", "step", name=op.f("pk_curve_points")),
    )
    op.create_table(
        "recent_steps",
        sa.Column("position", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("base_model", sa.String(length=512), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=False),
        sa.Column("duration_s", sa.Float(), nullable=False),
        sa.Column("num_passes", sa.Integer(), nullable=False),
        sa.Column("num_optim_steps", sa.Integer(), nullable=False),
        sa.Column("num_singles", sa.Integer(), nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("shares", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_recent_steps")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_recent_steps_base", "recent_steps", ["base_model", "position"], unique=False)
    op.create_table(
        "kept_samples",
        sa.Column("position", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("request_id", sa.String(length=192), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("base_model", sa.String(length=512), nullable=False),
        sa.Column("weights", sa.String(length=512), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("sampled_tokens", sa.Integer(), nullable=False),
        sa.Column("num_sequences", sa.Integer(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_kept_samples")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_kept_samples_tenant", "kept_samples", ["tenant_id", "position"], unique=False)
    op.create_index("ix_kept_samples_request", "kept_samples", ["request_id"], unique=False)
    op.create_index("ix_kept_samples_created", "kept_samples", ["created_at"], unique=False)


def downgrade() -> None:
    op.drop_index("ix_kept_samples_created", table_name="kept_samples")
    op.drop_index("ix_kept_samples_request", table_name="kept_samples")
    op.drop_index("ix_kept_samples_tenant", table_name="kept_samples")
    op.drop_table("kept_samples")
    op.drop_index("ix_recent_steps_base", table_name="recent_steps")
    op.drop_table("recent_steps")
    op.drop_table("curve_points")
