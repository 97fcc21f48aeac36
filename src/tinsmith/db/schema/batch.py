"""The tables of bulk jobs, made into the schema that `db` owns; knows nothing of what their rows mean.

`batch_state` has the eight columns that Sky Batch names (job_id to updated_at), and what attempts, leases and results
add to them.
"""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa


class BatchTables(NamedTuple):
    jobs: sa.Table
    states: sa.Table
    workers: sa.Table
    row_errors: sa.Table
    outputs: sa.Table


def define(metadata: sa.MetaData) -> BatchTables:
    return BatchTables(_jobs(metadata), _states(metadata), _workers(metadata), *_results(metadata))


def _jobs(metadata: sa.MetaData) -> sa.Table:
    return sa.Table(
        "batch_job",
        metadata,
        sa.Column("job_id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("pool", sa.String(128), nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("weight", sa.Float, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),  # see batch/coordinator/state.py
        sa.Column("spec", sa.JSON, nullable=False),
        sa.Column("owner_token", sa.String(64)),  # the coordinator that may write for it
        sa.Column("owner_holder", sa.Text),  # whose server that is: host and directory
        sa.Column("owner_lease_at", sa.Float, nullable=False, server_default="0"),  # from then on another one may
        sa.Column("sealed", sa.Boolean, nullable=False),  # whether all of its batches are rows
        sa.Column("total_rows", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("total_batches", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("completed_batches", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("rows_ok", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("rows_failed", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("tokens_in", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("tokens_out", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("max_failed_rows", sa.Float, nullable=False),
        sa.Column("resume_from", sa.BigInteger),
        sa.Column("root_job_id", sa.BigInteger),  # the first of those that resumed one another
        sa.Column("error", sa.Text),
        sa.Column("cleaned", sa.Boolean, nullable=False),  # whether its parts are deleted
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("started_at", sa.Float),
        sa.Column("ended_at", sa.Float),
        sa.Column("updated_at", sa.Float, nullable=False),
        sa.Index("ix_batch_job_tenant_id", "tenant_id", "job_id"),
        sa.Index("ix_batch_job_status", "status"),
        sa.Index("ix_batch_job_root", "root_job_id"),
        sqlite_autoincrement=True,
    )


def _states(metadata: sa.MetaData) -> sa.Table:
    pending, dispatched = sa.text("status = 'PENDING'"), sa.text("status = 'DISPATCHED'")
    return sa.Table(
        "batch_state",
        metadata,
        sa.Column("job_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("batch_idx", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("start_idx", sa.BigInteger, nullable=False),
        sa.Column("end_idx", sa.BigInteger, nullable=False),  # included
        sa.Column("status", sa.String(16), nullable=False),  # see batch/coordinator/state.py
        sa.Column("worker_cluster", sa.String(128)),  # the worker of the last attempt
        sa.Column("retry_count", sa.Integer, nullable=False, server_default="0"),
        sa.Column("updated_at", sa.Float, nullable=False),
        sa.Column("parent_idx", sa.BigInteger),  # the batch that was split into this one and another
        sa.Column("attempt_id", sa.Integer, nullable=False, server_default="0"),
        sa.Column("attempt_owner_token", sa.String(64)),
        sa.Column("lease_expires_at", sa.Float),
        sa.Column("next_retry_at", sa.Float),
        sa.Column("infra_retries", sa.Integer, nullable=False, server_default="0"),
        sa.Column("parts", sa.JSON),
        sa.Column("rows_ok", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("rows_failed", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("tokens_in", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("tokens_out", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("error_class", sa.String(128)),
        sa.Column("error", sa.Text),
        sa.Index("ix_batch_state_rows", "job_id", "start_idx"),
        sa.Index("ix_batch_state_pending", "job_id", "start_idx", postgresql_where=pending, sqlite_where=pending),
        sa.Index("ix_batch_state_dispatched", "lease_expires_at", postgresql_where=dispatched, sqlite_where=dispatched),
    )


def _workers(metadata: sa.MetaData) -> sa.Table:
    return sa.Table(
        "batch_worker",
        metadata,
        sa.Column("pool", sa.String(128), primary_key=True),
        sa.Column("worker_id", sa.String(128), primary_key=True),
        sa.Column("job_id", sa.BigInteger, nullable=False),
        sa.Column("owner_token", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),  # local
        sa.Column("address", sa.Text),
        sa.Column("pid_or_actor", sa.String(128)),
        sa.Column("state", sa.String(16), nullable=False),  # starting | ready | gone
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("last_seen_at", sa.Float, nullable=False),
        sa.Column("launch_intent", sa.String(64), nullable=False),  # stored before the process is asked for
        sa.Index("ix_batch_worker_job", "job_id"),
    )


def _results(metadata: sa.MetaData) -> tuple[sa.Table, sa.Table]:
    row_errors = sa.Table(
        "batch_row_error",
        metadata,
        sa.Column("job_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("row_idx", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("attempt_id", sa.Integer, nullable=False),
        sa.Column("error_class", sa.String(128), nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("details", sa.JSON, nullable=False),  # the row itself, traceback, attempts, worker
    )
    outputs = sa.Table(
        "batch_output",
        metadata,
        sa.Column("job_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("output_idx", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("format", sa.String(64), nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("rows", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("etag", sa.Text),
        sa.Column("published_at", sa.Float, nullable=False),
    )
    return row_errors, outputs
