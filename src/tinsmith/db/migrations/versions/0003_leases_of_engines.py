"""leases of engines"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    with op.batch_alter_table("engines", schema=None) as batch_op:
        batch_op.add_column(sa.Column("holder", sa.Text(), server_default="", nullable=False))
        batch_op.add_column(sa.Column("epoch", sa.BigInteger(), server_default="0", nullable=False))
        batch_op.add_column(sa.Column("lease_expires_at", sa.Float(), server_default="0", nullable=False))


def downgrade() -> None:
    with op.batch_alter_table("engines", schema=None) as batch_op:
        batch_op.drop_column("lease_expires_at")
        batch_op.drop_column("epoch")
        batch_op.drop_column("holder")
