"""indices for what sweeps look for, and which sessions they are done with"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    with op.batch_alter_table("sessions", schema=None) as batch_op:
        batch_op.add_column(sa.Column("forgotten_at", sa.Float(), nullable=True))
        batch_op.drop_index("ix_sessions_state_heartbeat")
        batch_op.create_index("ix_sessions_closed_heartbeat", ["closed_at", "last_heartbeat_at"], unique=False)
        batch_op.create_index("ix_sessions_forgotten_closed", ["forgotten_at", "closed_at"], unique=False)
    with op.batch_alter_table("models", schema=None) as batch_op:
        batch_op.create_index("ix_models_state_tenant", ["state", "tenant_id"], unique=False)
    with op.batch_alter_table("futures", schema=None) as batch_op:
        batch_op.drop_index("ix_futures_tenant")
        batch_op.create_index("ix_futures_tenant_settled", ["tenant_id", "state", "settled_at"], unique=False)
    with op.batch_alter_table("samplers", schema=None) as batch_op:
        written = sa.text("directory IS NOT NULL")
        batch_op.create_index(
            "ix_samplers_directory", ["directory"], unique=False, sqlite_where=written, postgresql_where=written
        )
    with op.batch_alter_table("checkpoints", schema=None) as batch_op:
        batch_op.create_index("ix_checkpoints_expires", ["expires_at"], unique=False)
    with op.batch_alter_table("audit", schema=None) as batch_op:
        batch_op.create_index("ix_audit_created", ["created_at"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("audit", schema=None) as batch_op:
        batch_op.drop_index("ix_audit_created")
    with op.batch_alter_table("checkpoints", schema=None) as batch_op:
        batch_op.drop_index("ix_checkpoints_expires")
    with op.batch_alter_table("samplers", schema=None) as batch_op:
        batch_op.drop_index("ix_samplers_directory")
    with op.batch_alter_table("futures", schema=None) as batch_op:
        batch_op.drop_index("ix_futures_tenant_settled")
        batch_op.create_index("ix_futures_tenant", ["tenant_id", "state"], unique=False)
    with op.batch_alter_table("models", schema=None) as batch_op:
        batch_op.drop_index("ix_models_state_tenant")
    with op.batch_alter_table("sessions", schema=None) as batch_op:
        batch_op.drop_index("ix_sessions_forgotten_closed")
        batch_op.drop_index("ix_sessions_closed_heartbeat")
        batch_op.create_index("ix_sessions_state_heartbeat", ["state", "last_heartbeat_at"], unique=False)
        batch_op.drop_column("forgotten_at")
