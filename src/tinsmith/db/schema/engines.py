"""The table of the engines and dedicated samplers, made into the schema that `db` owns; knows not what rows mean."""

from __future__ import annotations

import sqlalchemy as sa


def define(metadata: sa.MetaData) -> sa.Table:
    return sa.Table(
        "engines",
        metadata,
        sa.Column("engine_id", sa.String(64), primary_key=True),  # a seat: engines sit on it one after the other
        sa.Column("base_model", sa.String(512), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False, server_default="engine"),  # engine | sampler
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),  # starting | loading | ready | failed | restarting | ...
        sa.Column("reason", sa.Text),
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("holder", sa.Text, nullable=False, server_default=""),  # whose supervisor runs it: host:id:directory
        sa.Column("epoch", sa.BigInteger, nullable=False, server_default="0"),  # each fences off the one before
        sa.Column("lease_expires_at", sa.Float, nullable=False, server_default="0"),  # from then on it may be fenced
        sa.Column("address", sa.Text),  # where other processes may speak to it directly
        sa.Column("suspects", sa.Text),  # what it was working on when it died, for whoever goes on with it
        sa.Index("ix_engines_base_model", "base_model"),
    )
