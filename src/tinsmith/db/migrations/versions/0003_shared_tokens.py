"""Adds how many tokens of a pass its data share with others of the same pass."""

import sqlalchemy as sa
from alembic import op

revision = "schema_0003"
down_revision = "schema_0002"


def upgrade() -> None:
    columns = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("futures")}
    if "shared_tokens" not in columns:
        op.add_column("futures", sa.Column("shared_tokens", sa.Integer(), nullable=False, server_default="0"))
