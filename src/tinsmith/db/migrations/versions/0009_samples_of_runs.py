"""Adds the run and the prompt of stored samples, and the advantages of the tokens of answers that were trained on."""

import sqlalchemy as sa
from alembic import op

revision = "schema_0009"
down_revision = "schema_0008"


def upgrade() -> None:
    inspector = sa.inspect(op.get_bind())
    existing_names = {column["name"] for column in inspector.get_columns("kept_samples")}
    for name, length in (("model_id", 128), ("prompt_digest", 32)):
        if name not in existing_names:
            op.add_column("kept_samples", sa.Column(name, sa.String(length), nullable=False, server_default=""))
    if "advantages" not in {column["name"] for column in inspector.get_columns("kept_answers")}:
        op.add_column("kept_answers", sa.Column("advantages", sa.LargeBinary()))
    columns = ["tenant_id", "model_id", "position", "weights", "prompt_digest"]
    op.create_index("ix_kept_samples_run", "kept_samples", columns, if_not_exists=True)
    op.create_index("ix_kept_answers_run", "kept_answers", ["tenant_id", "model_id"], if_not_exists=True)
