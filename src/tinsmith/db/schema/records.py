"""The tables of what is kept for people to look at, made into the schema that `db` owns; knows not what rows mean.

All three are bounded: the points of a run, the steps of a base model, the samples of a tenant.
"""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa


class RecordTables(NamedTuple):
    curve_points: sa.Table
    recent_steps: sa.Table
    kept_samples: sa.Table


def define(metadata: sa.MetaData) -> RecordTables:
    return RecordTables(_curve_points(metadata), _recent_steps(metadata), _kept_samples(metadata))


def _position() -> sa.Column[int]:
    return sa.Column("position", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True)


def _curve_points(metadata: sa.MetaData) -> sa.Table:
    return sa.Table(
        "curve_points",
        metadata,
        sa.Column("model_id", sa.String(128), primary_key=True),
        sa.Column("source", sa.String(8), primary_key=True),  # server | client: who says so
        sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("metrics", sa.JSON, nullable=False),  # name -> number, or null where it is not finite
        sa.Column("recorded_at", sa.Float, nullable=False),
    )


def _recent_steps(metadata: sa.MetaData) -> sa.Table:
    return sa.Table(
        "recent_steps",
        metadata,
        _position(),
        sa.Column("base_model", sa.String(512), nullable=False),
        sa.Column("ended_at", sa.Float, nullable=False),
        sa.Column("duration_s", sa.Float, nullable=False),
        sa.Column("num_passes", sa.Integer, nullable=False),
        sa.Column("num_optim_steps", sa.Integer, nullable=False),
        sa.Column("num_singles", sa.Integer, nullable=False),
        sa.Column("num_tokens", sa.BigInteger, nullable=False),
        sa.Column("shares", sa.JSON, nullable=False),  # tenant_id -> model_id -> tokens of its passes
        sa.Index("ix_recent_steps_base", "base_model", "position"),
        sqlite_autoincrement=True,
    )


def _kept_samples(metadata: sa.MetaData) -> sa.Table:
    return sa.Table(
        "kept_samples",
        metadata,
        _position(),
        sa.Column("request_id", sa.String(192), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("base_model", sa.String(512), nullable=False),
        sa.Column("weights", sa.String(512)),  # the version that was sampled; null is the base model
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("sampled_tokens", sa.Integer, nullable=False),
        sa.Column("num_sequences", sa.Integer, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),  # tokens, logprobs and parameters: JSON, zstd
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Index("ix_kept_samples_tenant", "tenant_id", "position"),
        sa.Index("ix_kept_samples_request", "request_id"),
        sa.Index("ix_kept_samples_created", "created_at"),
        sqlite_autoincrement=True,
    )
