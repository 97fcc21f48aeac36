"""when an engine worked on a request, and the span that it came with"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("futures", sa.Column("started_at", sa.Float(), nullable=True))
    op.add_column("futures", sa.Column("ran_at", sa.Float(), nullable=True))
    op.add_column("futures", sa.Column("step", sa.Integer(), nullable=True))
    op.add_column("futures", sa.Column("traceparent", sa.String(length=64), nullable=True))


def downgrade() -> None:
    for name in ("traceparent", "step", "ran_at", "started_at"):
        op.drop_column("futures", name)
