"""Adds the optimizer step after which a checkpoint was saved."""

import sqlalchemy as sa
from alembic import op

revision = "schema_0008"
down_revision = "schema_0007"


def upgrade() -> None:
    columns = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("checkpoints")}
    if "step" not in columns:
        op.add_column("checkpoints", sa.Column("step", sa.BigInteger()))
