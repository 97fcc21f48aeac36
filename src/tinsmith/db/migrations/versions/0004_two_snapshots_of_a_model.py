"""two snapshots of a model, and whose weights a sampler has"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    with op.batch_alter_table("models", schema=None) as batch_op:
        batch_op.add_column(sa.Column("previous_snapshot_seq_id", sa.BigInteger(), nullable=True))
        batch_op.add_column(sa.Column("previous_snapshot_directory", sa.String(length=64), nullable=True))
    with op.batch_alter_table("samplers", schema=None) as batch_op:
        batch_op.add_column(sa.Column("model_id", sa.String(length=128), nullable=True))
        batch_op.create_index("ix_samplers_version", ["version_id"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("samplers", schema=None) as batch_op:
        batch_op.drop_index("ix_samplers_version")
        batch_op.drop_column("model_id")
    with op.batch_alter_table("models", schema=None) as batch_op:
        batch_op.drop_column("previous_snapshot_directory")
        batch_op.drop_column("previous_snapshot_seq_id")
