"""The tables of uploaded files and of OpenAI's batches, made into the schema that `db` owns; knows not what rows mean.

`position` grows with each row and is never used again: lists are in its order, and pages begin after one.
"""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa


class FileTables(NamedTuple):
    files: sa.Table
    openai_batches: sa.Table


def define(metadata: sa.MetaData) -> FileTables:
    return FileTables(_files(metadata), _openai_batches(metadata))


def _position() -> sa.Column[int]:
    return sa.Column("position", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True)


def _files(metadata: sa.MetaData) -> sa.Table:
    return sa.Table(
        "files",
        metadata,
        _position(),
        sa.Column("file_id", sa.String(64), nullable=False, unique=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),  # batch | batch_output
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float),
        sa.Index("ix_files_tenant", "tenant_id", "position"),
        sa.Index("ix_files_expires_at", "expires_at"),
        sqlite_autoincrement=True,
    )


def _openai_batches(metadata: sa.MetaData) -> sa.Table:
    active = sa.text("ended_at IS NULL")
    moments = ("in_progress_at", "finalizing_at", "cancelling_at", "ended_at")
    return sa.Table(
        "openai_batches",
        metadata,
        _position(),
        sa.Column("batch_id", sa.String(64), nullable=False, unique=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),  # see batch/openai/rows.py
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("input_file_id", sa.String(64), nullable=False),
        sa.Column("completion_window", sa.String(16), nullable=False),
        sa.Column("labels", sa.JSON),  # the client's own: name -> text
        sa.Column("output_expires_s", sa.Integer),
        sa.Column("job_id", sa.BigInteger),  # the bulk job that does the work
        sa.Column("model", sa.Text),
        sa.Column("errors", sa.JSON),  # why it failed: a list of code, line, message, param
        sa.Column("total", sa.Integer, nullable=False, server_default="0"),
        sa.Column("completed", sa.Integer, nullable=False, server_default="0"),
        sa.Column("failed", sa.Integer, nullable=False, server_default="0"),
        sa.Column("usage", sa.JSON),
        sa.Column("output_file_id", sa.String(64)),
        sa.Column("error_file_id", sa.String(64)),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
        *(sa.Column(name, sa.Float) for name in moments),
        sa.Index("ix_openai_batches_tenant", "tenant_id", "position"),
        sa.Index("ix_openai_batches_active", "position", postgresql_where=active, sqlite_where=active),
        sqlite_autoincrement=True,
    )
