"""Adds images of captured exchanges, an index for the newest weights of a run, profiles, and pauses of sampling."""

import sqlalchemy as sa
from alembic import op

revision = "schema_0004"
down_revision = "schema_0003"


def upgrade() -> None:
    inspector = sa.inspect(op.get_bind())
    if "images" not in {column["name"] for column in inspector.get_columns("exchanges")}:
        op.add_column("exchanges", sa.Column("images", sa.Text()))
    if "sampling_paused_at" not in {column["name"] for column in inspector.get_columns("sessions")}:
        op.add_column("sessions", sa.Column("sampling_paused_at", sa.Float()))
    if "exchange_images" not in inspector.get_table_names():
        op.create_table(
            "exchange_images",
            sa.Column("tenant_id", sa.String(64), primary_key=True),
            sa.Column("session", sa.String(128), primary_key=True),
            sa.Column("digest", sa.String(64), primary_key=True),
            sa.Column("data", sa.LargeBinary(), nullable=False),
        )
    if "profiles" not in inspector.get_table_names():
        op.create_table(
            "profiles",
            sa.Column("base_model", sa.String(512), primary_key=True),
            sa.Column("state", sa.String(16), nullable=False),
            sa.Column("seconds", sa.Float(), nullable=False),
            sa.Column("requested_at", sa.Float(), nullable=False),
            sa.Column("engine_id", sa.String(64)),
            sa.Column("host", sa.String(255)),
            sa.Column("files", sa.JSON(), nullable=False),
            sa.Column("reason", sa.Text()),
        )
    predicate = sa.text("model_id IS NOT NULL")
    columns = ["model_id", "created_at"]
    op.create_index(
        "ix_samplers_model",
        "samplers",
        columns,
        if_not_exists=True,
        sqlite_where=predicate,
        postgresql_where=predicate,
    )
