"""Adds the history of machines, and the figures of the stages of bulk jobs."""

import sqlalchemy as sa
from alembic import op

revision = "schema_0010"
down_revision = "schema_0009"


def upgrade() -> None:
    inspector = sa.inspect(op.get_bind())
    if "machine_history" not in inspector.get_table_names():
        op.create_table(
            "machine_history",
            sa.Column("step_s", sa.Integer(), primary_key=True, autoincrement=False),
            sa.Column("began_at", sa.Float(), primary_key=True),
            sa.Column("holder", sa.String(512), primary_key=True),
            sa.Column("base_model", sa.String(512), primary_key=True),
            *(
                sa.Column(name, sa.Float(), nullable=False, server_default="0")
                for name in (
                    "observed_s",
                    "engine_s",
                    "training_s",
                    "sampling_s",
                    "loading_s",
                    "trained_tokens",
                    "sampled_tokens",
                    "memory_byte_s",
                    "budget_byte_s",
                    "device_s",
                    "device_busy_s",
                )
            ),
            sa.Column("tenants", sa.JSON(), nullable=False),
        )
    if "stage_figures" not in {column["name"] for column in inspector.get_columns("batch_job")}:
        op.add_column("batch_job", sa.Column("stage_figures", sa.JSON()))
