"""The tables of sessions, models, requests, checkpoints, engines and tenants; knows nothing of what their rows mean."""

from __future__ import annotations

import sqlalchemy as sa

METADATA = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

SESSIONS = sa.Table(
    "sessions",
    METADATA,
    sa.Column("session_id", sa.String(64), primary_key=True),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),  # active | finished | expired
    sa.Column("reason", sa.Text),  # why it ended
    sa.Column("finish_type", sa.String(16)),  # success | errored | interrupted: the client's own word, if it came
    sa.Column("tags", sa.JSON, nullable=False),
    sa.Column("user_metadata", sa.JSON),
    sa.Column("sdk_version", sa.String(64)),
    sa.Column("project_id", sa.String(128)),
    sa.Column("display_name", sa.Text),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("last_heartbeat_at", sa.Float, nullable=False),
    sa.Column("ended_at", sa.Float),  # when it finished or expired
    sa.Column("closed_at", sa.Float),  # when its models were told to unload
    sa.Column("forgotten_at", sa.Float),  # when the last of its futures was deleted
    sa.Index("ix_sessions_tenant_created", "tenant_id", "created_at"),
    sa.Index("ix_sessions_closed_heartbeat", "closed_at", "last_heartbeat_at"),
    sa.Index("ix_sessions_forgotten_closed", "forgotten_at", "closed_at"),
)

MODELS = sa.Table(
    "models",
    METADATA,
    sa.Column("model_id", sa.String(128), primary_key=True),
    sa.Column("session_id", sa.String(64), nullable=False),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("base_model", sa.String(512), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),  # creating | ready | failed | unloaded | copied
    sa.Column("reason", sa.Text),  # why it failed or was unloaded
    sa.Column("lora_rank", sa.Integer, nullable=False),
    sa.Column("lora_seed", sa.BigInteger),
    sa.Column("train_attn", sa.Boolean, nullable=False),
    sa.Column("train_mlp", sa.Boolean, nullable=False),
    sa.Column("train_unembed", sa.Boolean, nullable=False),
    sa.Column("optimizer_type", sa.String(16), nullable=False),
    sa.Column("user_metadata", sa.JSON),
    sa.Column("project_id", sa.String(128)),  # of a copy, which has no session; otherwise the session's counts
    sa.Column("engine_id", sa.String(64)),  # the engine that works on it, and alone may; null: whoever claims it
    sa.Column("applied_seq_id", sa.BigInteger, nullable=False),  # every seq_id up to it took effect or was refused
    sa.Column("snapshot_seq_id", sa.BigInteger),  # the newest snapshot covers seq_ids up to it
    sa.Column("snapshot_directory", sa.String(64)),
    sa.Column("previous_snapshot_seq_id", sa.BigInteger),  # the one before, for when the newest cannot be read
    sa.Column("previous_snapshot_directory", sa.String(64)),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("last_request_at", sa.Float, nullable=False),
    sa.Index("ix_models_session", "session_id"),
    sa.Index("ix_models_tenant_created", "tenant_id", "created_at"),
    sa.Index("ix_models_state_tenant", "state", "tenant_id"),
    sa.Index("ix_models_engine", "engine_id"),
)

_GIVEN = sa.text("executor IS NOT NULL")  # few of many

FUTURES = sa.Table(
    "futures",
    METADATA,
    sa.Column("arrival", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("request_id", sa.String(192), nullable=False, unique=True),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("session_id", sa.String(64), nullable=False),
    sa.Column("base_model", sa.String(512), nullable=False),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),  # pending | done | failed | refused
    sa.Column("model_id", sa.String(128)),
    sa.Column("sampling_session_id", sa.String(128)),
    sa.Column("seq_id", sa.BigInteger),
    sa.Column("num_tokens", sa.Integer, nullable=False),  # what it may cost at most; the scheduler's measure
    sa.Column("body_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("prefill_tokens", sa.Integer),  # what a sample did cost, once settled
    sa.Column("cached_tokens", sa.Integer),  # ... of its prompt, found in the cache
    sa.Column("sampled_tokens", sa.Integer),
    sa.Column("settle_order", sa.BigInteger),  # a sampling session's results in the order of their settlement
    sa.Column("error", sa.Text),
    sa.Column("category", sa.String(16)),
    sa.Column("result_type", sa.String(8)),  # proto | json
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("started_at", sa.Float),  # when an engine began to work on it ...
    sa.Column("ran_at", sa.Float),  # ... and had its result
    sa.Column("settled_at", sa.Float),
    sa.Column("step", sa.Integer),  # which of that engine's steps it was part of
    sa.Column("traceparent", sa.String(64)),  # the span that it came with (see tracing)
    sa.Column("executor", sa.String(64)),  # the engine or sampler that it is given to, if its run does not say so
    sa.UniqueConstraint("model_id", "seq_id"),
    sa.UniqueConstraint("sampling_session_id", "seq_id"),
    sa.Index("ix_futures_work", "base_model", "state", "arrival"),
    sa.Index("ix_futures_session", "session_id"),
    sa.Index("ix_futures_tenant_settled", "tenant_id", "state", "settled_at"),
    sa.Index("ix_futures_settle_order", "sampling_session_id", "settle_order"),
    sa.Index("ix_futures_executor", "executor", "state", "arrival", sqlite_where=_GIVEN, postgresql_where=_GIVEN),
    sqlite_autoincrement=True,
)

BODIES = sa.Table(
    "future_bodies",
    METADATA,
    sa.Column("request_id", sa.String(192), primary_key=True),
    sa.Column("body", sa.LargeBinary, nullable=False),  # the request as received, zstd
)

RESULTS = sa.Table(
    "future_results",
    METADATA,
    sa.Column("request_id", sa.String(192), primary_key=True),
    sa.Column("body", sa.LargeBinary, nullable=False),  # the answer, byte for byte
)

_WRITTEN = sa.text("directory IS NOT NULL")  # few of many

SAMPLERS = sa.Table(
    "samplers",
    METADATA,
    sa.Column("sampling_session_id", sa.String(128), primary_key=True),
    sa.Column("session_id", sa.String(64), nullable=False),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("base_model", sa.String(512), nullable=False),
    sa.Column("model_path", sa.String(512)),  # the checkpoint it samples from, if it is one
    sa.Column("version_id", sa.String(512)),  # the frozen weights it samples from; null is the base model
    sa.Column("model_id", sa.String(128)),  # whose weights they are, of an ephemeral version
    sa.Column("directory", sa.String(64)),  # the files of an ephemeral version, once it has any
    sa.Column("num_clones", sa.Integer, nullable=False, server_default="0"),  # clients that joined it
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Index("ix_samplers_session", "session_id"),
    sa.Index("ix_samplers_version", "version_id"),
    sa.Index("ix_samplers_directory", "directory", sqlite_where=_WRITTEN, postgresql_where=_WRITTEN),
)

CHECKPOINTS = sa.Table(
    "checkpoints",
    METADATA,
    sa.Column("training_run_id", sa.String(128), primary_key=True),
    sa.Column("kind", sa.String(24), primary_key=True),  # weights | sampler_weights | external_weights
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),  # pending | completed | failed
    sa.Column("error", sa.Text),
    sa.Column("directory", sa.String(256)),  # below the checkpoint root; null until completed
    sa.Column("size_bytes", sa.BigInteger),
    sa.Column("base_model", sa.String(512), nullable=False),
    sa.Column("lora_rank", sa.Integer, nullable=False),
    sa.Column("train_attn", sa.Boolean, nullable=False),
    sa.Column("train_mlp", sa.Boolean, nullable=False),
    sa.Column("train_unembed", sa.Boolean, nullable=False),
    sa.Column("optimizer_type", sa.String(16), nullable=False),
    sa.Column("public", sa.Boolean, nullable=False),
    sa.Column("user_metadata", sa.JSON),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float),
    sa.Index("ix_checkpoints_tenant_created", "tenant_id", "created_at"),
    sa.Index("ix_checkpoints_expires", "expires_at"),
)

# Tenants, and what is known of them.

TENANTS = sa.Table(
    "tenants",
    METADATA,
    sa.Column("tenant_id", sa.String(64), primary_key=True),
    sa.Column("quotas", sa.JSON, nullable=False),  # name -> limit, where it differs from the settings
    sa.Column("created_at", sa.Float, nullable=False),
)

KEYS = sa.Table(
    "keys",
    METADATA,
    sa.Column("key_id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("name", sa.String(128), nullable=False),  # the user's own note of what it is for
    sa.Column("digest", sa.String(64), nullable=False, unique=True),  # SHA-256; the key itself is nowhere
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("revoked_at", sa.Float),
    sa.Index("ix_keys_tenant", "tenant_id"),
    sqlite_autoincrement=True,
)

AUDIT = sa.Table(
    "audit",
    METADATA,
    sa.Column("entry_id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("event", sa.String(64), nullable=False),
    sa.Column("details", sa.JSON, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Index("ix_audit_tenant_created", "tenant_id", "created_at"),
    sa.Index("ix_audit_created", "created_at"),
)

USAGE = sa.Table(
    "usage",
    METADATA,
    sa.Column("bucket_start", sa.Float, primary_key=True),  # the hour
    sa.Column("session_id", sa.String(64), primary_key=True),
    sa.Column("base_model", sa.String(512), primary_key=True),
    sa.Column("type", sa.String(24), primary_key=True),  # training | sampling_prefill | sampling_cached | ...
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("quantity", sa.BigInteger, nullable=False),  # tokens, or how many
    sa.Index("ix_usage_tenant_bucket", "tenant_id", "bucket_start"),
)

# What requests refer to.

CUSTOM_LOSSES = sa.Table(
    "custom_losses",
    METADATA,
    sa.Column("loss_id", sa.String(128), primary_key=True),
    sa.Column("session_id", sa.String(64), nullable=False),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("definition", sa.LargeBinary, nullable=False),  # inputs and graph, JSON, zstd
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Index("ix_custom_losses_session", "session_id"),
)

SEQUENCES = sa.Table(
    "sequences",
    METADATA,
    sa.Column("sequence_id", sa.String(224), primary_key=True),
    sa.Column("session_id", sa.String(64), nullable=False),
    sa.Column("prompt_tokens", sa.Integer, nullable=False),
    sa.Column("sampled_tokens", sa.Integer, nullable=False),
    sa.Column("valid_until", sa.Float, nullable=False),  # what was recorded of it may be trained on until then
    sa.Index("ix_sequences_session", "session_id"),
    sa.Index("ix_sequences_valid_until", "valid_until"),
)
