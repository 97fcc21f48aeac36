"""several engines of a base model: which of them works on a run, and takes a sample"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

LOADED = ("creating", "ready")


def upgrade() -> None:
    before = _rows()
    op.drop_table("engines")
    op.create_table(
        "engines",
        sa.Column("engine_id", sa.String(length=64), nullable=False),
        sa.Column("base_model", sa.String(length=512), nullable=False),
        sa.Column("kind", sa.String(length=16), server_default="engine", nullable=False),
        *_common(),
        sa.Column("address", sa.Text(), nullable=True),
        sa.Column("suspects", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("engine_id", name=op.f("pk_engines")),
    )
    op.create_index("ix_engines_base_model", "engines", ["base_model"])
    op.add_column("models", sa.Column("engine_id", sa.String(length=64), nullable=True))
    op.create_index("ix_models_engine", "models", ["engine_id"])
    op.add_column("futures", sa.Column("executor", sa.String(length=64), nullable=True))
    given = sa.text("executor IS NOT NULL")
    columns = ["executor", "state", "arrival"]
    op.create_index("ix_futures_executor", "futures", columns, sqlite_where=given, postgresql_where=given)
    engines, models = sa.table("engines", *map(sa.column, _KEPT)), sa.table("models", *map(sa.column, _RUN))
    for row in before:
        if row["engine_id"]:  # one that never ran has none
            op.execute(engines.insert().values(**row))
            mine = (models.c.base_model == row["base_model"]) & models.c.state.in_(LOADED)
            op.execute(models.update().where(mine).values(engine_id=row["engine_id"]))


def downgrade() -> None:
    newest = {row["base_model"]: row for row in sorted(_rows(), key=lambda row: row["lease_expires_at"])}
    op.drop_index("ix_futures_executor", "futures")
    op.drop_column("futures", "executor")
    op.drop_index("ix_models_engine", "models")
    op.drop_column("models", "engine_id")
    op.drop_table("engines")
    op.create_table(
        "engines",
        sa.Column("base_model", sa.String(length=512), nullable=False),
        sa.Column("engine_id", sa.String(length=64), nullable=False),
        *_common(),
        sa.PrimaryKeyConstraint("base_model", name=op.f("pk_engines")),
    )
    engines = sa.table("engines", *map(sa.column, _KEPT))
    for row in newest.values():
        op.execute(engines.insert().values(**row))


_RUN = ("model_id", "base_model", "state", "engine_id")
_KEPT = ("engine_id", "base_model", "pid", "state", "reason", "started_at", "holder", "epoch", "lease_expires_at")


def _common() -> list[sa.Column]:
    return [
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("holder", sa.Text(), server_default="", nullable=False),
        sa.Column("epoch", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("lease_expires_at", sa.Float(), server_default="0", nullable=False),
    ]


def _rows() -> list[dict]:
    found = op.get_bind().execute(sa.text(f"SELECT {', '.join(_KEPT)} FROM engines"))
    return [dict(row._mapping) for row in found]
