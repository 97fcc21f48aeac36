"""Adds the idempotency keys of the requests that created bulk jobs."""

import sqlalchemy as sa
from alembic import op

revision = "schema_0005"
down_revision = "schema_0004"


def upgrade() -> None:
    existing_names = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("batch_job")}
    for name, length in (("idempotency_key", 256), ("request_digest", 64)):
        if name not in existing_names:
            op.add_column("batch_job", sa.Column(name, sa.String(length)))
    predicate = sa.text("idempotency_key IS NOT NULL")
    op.create_index(
        "ix_batch_job_idempotency_key",
        "batch_job",
        ["tenant_id", "idempotency_key"],
        unique=True,
        if_not_exists=True,
        sqlite_where=predicate,
        postgresql_where=predicate,
    )
