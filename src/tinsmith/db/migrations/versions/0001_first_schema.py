"""first schema"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("training_run_id", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=24), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("directory", sa.String(length=256), nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=True),
        sa.Column("base_model", sa.String(length=512), nullable=False),
        sa.Column("lora_rank", sa.Integer(), nullable=False),
        sa.Column("train_attn", sa.Boolean(), nullable=False),
        sa.Column("train_mlp", sa.Boolean(), nullable=False),
        sa.Column("train_unembed", sa.Boolean(), nullable=False),
        sa.Column("optimizer_type", sa.String(length=16), nullable=False),
        sa.Column("public", sa.Boolean(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("training_run_id", "kind", "name", name=op.f("pk_checkpoints")),
    )
    with op.batch_alter_table("checkpoints", schema=None) as batch_op:
        batch_op.create_index("ix_checkpoints_tenant_created", ["tenant_id", "created_at"], unique=False)

    op.create_table(
        "engines",
        sa.Column("base_model", sa.String(length=512), nullable=False),
        sa.Column("engine_id", sa.String(length=64), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("base_model", name=op.f("pk_engines")),
    )
    op.create_table(
        "future_bodies",
        sa.Column("request_id", sa.String(length=192), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_future_bodies")),
    )
    op.create_table(
        "future_results",
        sa.Column("request_id", sa.String(length=192), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_future_results")),
    )
    op.create_table(
        "futures",
        sa.Column("arrival", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("request_id", sa.String(length=192), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("base_model", sa.String(length=512), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("model_id", sa.String(length=128), nullable=True),
        sa.Column("sampling_session_id", sa.String(length=128), nullable=True),
        sa.Column("seq_id", sa.BigInteger(), nullable=True),
        sa.Column("num_tokens", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("category", sa.String(length=16), nullable=True),
        sa.Column("result_type", sa.String(length=8), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("settled_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("arrival", name=op.f("pk_futures")),
        sa.UniqueConstraint("model_id", "seq_id", name=op.f("uq_futures_model_id_seq_id")),
        sa.UniqueConstraint("request_id", name=op.f("uq_futures_request_id")),
        sa.UniqueConstraint("sampling_session_id", "seq_id", name=op.f("uq_futures_sampling_session_id_seq_id")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("futures", schema=None) as batch_op:
        batch_op.create_index("ix_futures_session", ["session_id"], unique=False)
        batch_op.create_index("ix_futures_work", ["base_model", "state", "arrival"], unique=False)

    op.create_table(
        "models",
        sa.Column("model_id", sa.String(length=128), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("base_model", sa.String(length=512), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("lora_rank", sa.Integer(), nullable=False),
        sa.Column("lora_seed", sa.BigInteger(), nullable=True),
        sa.Column("train_attn", sa.Boolean(), nullable=False),
        sa.Column("train_mlp", sa.Boolean(), nullable=False),
        sa.Column("train_unembed", sa.Boolean(), nullable=False),
        sa.Column("optimizer_type", sa.String(length=16), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("applied_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("snapshot_seq_id", sa.BigInteger(), nullable=True),
        sa.Column("snapshot_directory", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("last_request_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", name=op.f("pk_models")),
    )
    with op.batch_alter_table("models", schema=None) as batch_op:
        batch_op.create_index("ix_models_session", ["session_id"], unique=False)
        batch_op.create_index("ix_models_tenant_created", ["tenant_id", "created_at"], unique=False)

    op.create_table(
        "samplers",
        sa.Column("sampling_session_id", sa.String(length=128), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("base_model", sa.String(length=512), nullable=False),
        sa.Column("model_path", sa.String(length=512), nullable=True),
        sa.Column("version_id", sa.String(length=512), nullable=True),
        sa.Column("directory", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("sampling_session_id", name=op.f("pk_samplers")),
    )
    with op.batch_alter_table("samplers", schema=None) as batch_op:
        batch_op.create_index("ix_samplers_session", ["session_id"], unique=False)

    op.create_table(
        "sessions",
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("sdk_version", sa.String(length=64), nullable=True),
        sa.Column("project_id", sa.String(length=128), nullable=True),
        sa.Column("display_name", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("last_heartbeat_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("closed_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("session_id", name=op.f("pk_sessions")),
    )
    with op.batch_alter_table("sessions", schema=None) as batch_op:
        batch_op.create_index("ix_sessions_state_heartbeat", ["state", "last_heartbeat_at"], unique=False)
        batch_op.create_index("ix_sessions_tenant_created", ["tenant_id", "created_at"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("sessions", schema=None) as batch_op:
        batch_op.drop_index("ix_sessions_tenant_created")
        batch_op.drop_index("ix_sessions_state_heartbeat")

    op.drop_table("sessions")
    with op.batch_alter_table("samplers", schema=None) as batch_op:
        batch_op.drop_index("ix_samplers_session")

    op.drop_table("samplers")
    with op.batch_alter_table("models", schema=None) as batch_op:
        batch_op.drop_index("ix_models_tenant_created")
        batch_op.drop_index("ix_models_session")

    op.drop_table("models")
    with op.batch_alter_table("futures", schema=None) as batch_op:
        batch_op.drop_index("ix_futures_work")
        batch_op.drop_index("ix_futures_session")

    op.drop_table("futures")
    op.drop_table("future_results")
    op.drop_table("future_bodies")
    op.drop_table("engines")
    with op.batch_alter_table("checkpoints", schema=None) as batch_op:
        batch_op.drop_index("ix_checkpoints_tenant_created")

    op.drop_table("checkpoints")
