"""tenants and their limits"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("entry_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("event", sa.String(length=64), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("entry_id", name=op.f("pk_audit")),
    )
    with op.batch_alter_table("audit", schema=None) as batch_op:
        batch_op.create_index("ix_audit_tenant_created", ["tenant_id", "created_at"], unique=False)

    op.create_table(
        "custom_losses",
        sa.Column("loss_id", sa.String(length=128), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("definition", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("loss_id", name=op.f("pk_custom_losses")),
    )
    with op.batch_alter_table("custom_losses", schema=None) as batch_op:
        batch_op.create_index("ix_custom_losses_session", ["session_id"], unique=False)

    op.create_table(
        "keys",
        sa.Column("key_id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("revoked_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_keys")),
        sa.UniqueConstraint("digest", name=op.f("uq_keys_digest")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("keys", schema=None) as batch_op:
        batch_op.create_index("ix_keys_tenant", ["tenant_id"], unique=False)

    op.create_table(
        "sequences",
        sa.Column("sequence_id", sa.String(length=224), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("sampled_tokens", sa.Integer(), nullable=False),
        sa.Column("valid_until", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("sequence_id", name=op.f("pk_sequences")),
    )
    with op.batch_alter_table("sequences", schema=None) as batch_op:
        batch_op.create_index("ix_sequences_session", ["session_id"], unique=False)
        batch_op.create_index("ix_sequences_valid_until", ["valid_until"], unique=False)

    op.create_table(
        "tenants",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("quotas", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_tenants")),
    )
    op.create_table(
        "usage",
        sa.Column("bucket_start", sa.Float(), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("base_model", sa.String(length=512), nullable=False),
        sa.Column("type", sa.String(length=24), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("quantity", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("bucket_start", "session_id", "base_model", "type", name=op.f("pk_usage")),
    )
    with op.batch_alter_table("usage", schema=None) as batch_op:
        batch_op.create_index("ix_usage_tenant_bucket", ["tenant_id", "bucket_start"], unique=False)

    with op.batch_alter_table("futures", schema=None) as batch_op:
        batch_op.add_column(sa.Column("body_bytes", sa.BigInteger(), server_default="0", nullable=False))
        batch_op.add_column(sa.Column("prefill_tokens", sa.Integer(), nullable=True))
        batch_op.add_column(sa.Column("cached_tokens", sa.Integer(), nullable=True))
        batch_op.add_column(sa.Column("sampled_tokens", sa.Integer(), nullable=True))
        batch_op.add_column(sa.Column("settle_order", sa.BigInteger(), nullable=True))
        batch_op.create_index("ix_futures_settle_order", ["sampling_session_id", "settle_order"], unique=False)
        batch_op.create_index("ix_futures_tenant", ["tenant_id", "state"], unique=False)

    with op.batch_alter_table("models", schema=None) as batch_op:
        batch_op.add_column(sa.Column("project_id", sa.String(length=128), nullable=True))

    with op.batch_alter_table("samplers", schema=None) as batch_op:
        batch_op.add_column(sa.Column("num_clones", sa.Integer(), server_default="0", nullable=False))

    with op.batch_alter_table("sessions", schema=None) as batch_op:
        batch_op.add_column(sa.Column("finish_type", sa.String(length=16), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("sessions", schema=None) as batch_op:
        batch_op.drop_column("finish_type")

    with op.batch_alter_table("samplers", schema=None) as batch_op:
        batch_op.drop_column("num_clones")

    with op.batch_alter_table("models", schema=None) as batch_op:
        batch_op.drop_column("project_id")

    with op.batch_alter_table("futures", schema=None) as batch_op:
        batch_op.drop_index("ix_futures_tenant")
        batch_op.drop_index("ix_futures_settle_order")
        batch_op.drop_column("settle_order")
        batch_op.drop_column("sampled_tokens")
        batch_op.drop_column("cached_tokens")
        batch_op.drop_column("prefill_tokens")
        batch_op.drop_column("body_bytes")

    with op.batch_alter_table("usage", schema=None) as batch_op:
        batch_op.drop_index("ix_usage_tenant_bucket")

    op.drop_table("usage")
    op.drop_table("tenants")
    with op.batch_alter_table("sequences", schema=None) as batch_op:
        batch_op.drop_index("ix_sequences_valid_until")
        batch_op.drop_index("ix_sequences_session")

    op.drop_table("sequences")
    with op.batch_alter_table("keys", schema=None) as batch_op:
        batch_op.drop_index("ix_keys_tenant")

    op.drop_table("keys")
    with op.batch_alter_table("custom_losses", schema=None) as batch_op:
        batch_op.drop_index("ix_custom_losses_session")

    op.drop_table("custom_losses")
    with op.batch_alter_table("audit", schema=None) as batch_op:
        batch_op.drop_index("ix_audit_tenant_created")

    op.drop_table("audit")
