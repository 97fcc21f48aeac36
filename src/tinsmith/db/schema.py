"""Every table of the service, the same on SQLite and on Postgres.

Each table is a module constant. Times are float seconds since the epoch (UTC). Large values are in separate tables, so
that reading or updating a row's metadata does not touch them. A change needs a migration (`migrations/versions`).
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

METADATA = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _where(condition: str) -> dict[str, Any]:
    """Options of a partial index, for conditions that few rows satisfy."""
    return {"sqlite_where": sa.text(condition), "postgresql_where": sa.text(condition)}


def _serial(name: str) -> sa.Column[int]:
    """An autoincrementing primary key; SQLite requires the type INTEGER for it."""
    return sa.Column(name, sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True)


RAN_SAMPLE = "kind = 'sample' AND started_at IS NOT NULL"
PENDING_SAVE = "state = 'pending'"
"""Conditions of partial indexes; queries repeat them literally, since planners do not see through parameters."""

# Sessions, models and requests.

SESSIONS = sa.Table(
    "sessions",
    METADATA,
    sa.Column("session_id", sa.String(64), primary_key=True),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),  # active | finished | expired
    sa.Column("reason", sa.Text),  # why it ended
    sa.Column("finish_type", sa.String(16)),  # success | errored | interrupted, as the client reported
    sa.Column("tags", sa.JSON, nullable=False),
    sa.Column("user_metadata", sa.JSON),
    sa.Column("sdk_version", sa.String(64)),
    sa.Column("project_id", sa.String(128)),
    sa.Column("display_name", sa.Text),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("last_heartbeat_at", sa.Float, nullable=False),
    sa.Column("ended_at", sa.Float),  # when it finished or expired
    sa.Column("closed_at", sa.Float),  # when the unloading of its models was requested
    sa.Column("forgotten_at", sa.Float),  # when the last of its futures was deleted
    sa.Column("sampling_paused_at", sa.Float),  # while its samples are paused
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
    sa.Column("lora_alpha", sa.Float, nullable=False),
    sa.Column("optimizer_type", sa.String(16), nullable=False),
    sa.Column("user_metadata", sa.JSON),
    sa.Column("project_id", sa.String(128)),  # of a copy, which has no session; else null
    sa.Column("engine_id", sa.String(64)),  # the only engine that may work on it; null: any engine may claim it
    sa.Column("applied_seq_id", sa.BigInteger, nullable=False),  # every seq_id up to it took effect or was refused
    sa.Column("snapshot_seq_id", sa.BigInteger),  # the newest snapshot covers seq_ids up to this one
    sa.Column("snapshot_directory", sa.String(64)),
    sa.Column("previous_snapshot_seq_id", sa.BigInteger),  # used if the newest snapshot is damaged
    sa.Column("previous_snapshot_directory", sa.String(64)),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("last_request_at", sa.Float, nullable=False),
    sa.Index("ix_models_session", "session_id"),
    sa.Index("ix_models_tenant_created", "tenant_id", "created_at"),
    sa.Index("ix_models_state_tenant", "state", "tenant_id"),
    sa.Index("ix_models_engine", "engine_id"),
)

FUTURES = sa.Table(
    "futures",
    METADATA,
    _serial("arrival"),
    sa.Column("request_id", sa.String(192), nullable=False, unique=True),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("session_id", sa.String(64), nullable=False),
    sa.Column("base_model", sa.String(512), nullable=False),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),  # pending | done | failed | refused
    sa.Column("model_id", sa.String(128)),
    sa.Column("sampling_session_id", sa.String(128)),
    sa.Column("seq_id", sa.BigInteger),
    sa.Column("num_tokens", sa.Integer, nullable=False),  # upper bound of its cost, for the scheduler
    sa.Column("shared_tokens", sa.Integer, nullable=False, server_default="0"),  # of a pass: beginnings of other data
    sa.Column("body_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("prefill_tokens", sa.Integer),  # cost of a settled sample: prompt tokens,
    sa.Column("cached_tokens", sa.Integer),  # the part of them in the prefix cache,
    sa.Column("sampled_tokens", sa.Integer),  # and generated tokens
    sa.Column("settle_order", sa.BigInteger),  # position among the settled samples of its sampling session
    sa.Column("error", sa.Text),
    sa.Column("category", sa.String(16)),
    sa.Column("result_type", sa.String(8)),  # proto | json
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("started_at", sa.Float),  # when an engine began it
    sa.Column("ran_at", sa.Float),  # when the engine had its result
    sa.Column("settled_at", sa.Float),
    sa.Column("step", sa.Integer),  # number of the engine's step that ran it
    sa.Column("traceparent", sa.String(64)),  # W3C trace context of the request
    sa.Column("executor", sa.String(64)),  # the engine or sampler of a request without a run
    sa.UniqueConstraint("model_id", "seq_id"),
    sa.UniqueConstraint("sampling_session_id", "seq_id"),
    sa.Index("ix_futures_work", "base_model", "state", "arrival"),
    sa.Index("ix_futures_session", "session_id"),
    sa.Index("ix_futures_tenant_settled", "tenant_id", "state", "settled_at"),
    sa.Index("ix_futures_settle_order", "sampling_session_id", "settle_order"),
    sa.Index("ix_futures_executor", "executor", "state", "arrival", **_where("executor IS NOT NULL")),
    sa.Index("ix_futures_ran_samples", "settled_at", **_where(RAN_SAMPLE)),
    sqlite_autoincrement=True,
)

BODIES = sa.Table(
    "future_bodies",
    METADATA,
    sa.Column("request_id", sa.String(192), primary_key=True),
    sa.Column("body", sa.LargeBinary, nullable=False),  # the request body, zstd
)

RESULTS = sa.Table(
    "future_results",
    METADATA,
    sa.Column("request_id", sa.String(192), primary_key=True),
    sa.Column("body", sa.LargeBinary, nullable=False),  # the response body
)

SAMPLERS = sa.Table(
    "samplers",
    METADATA,
    sa.Column("sampling_session_id", sa.String(128), primary_key=True),
    sa.Column("session_id", sa.String(64), nullable=False),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("base_model", sa.String(512), nullable=False),
    sa.Column("model_path", sa.String(512)),  # the checkpoint it samples from, if any
    sa.Column("version_id", sa.String(512)),  # the weight version it samples from; null: base model
    sa.Column("model_id", sa.String(128)),  # the run of an ephemeral version
    sa.Column("directory", sa.String(64)),  # the files of an ephemeral version, once written
    sa.Column("num_clones", sa.Integer, nullable=False, server_default="0"),  # clients that joined after the first
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Index("ix_samplers_session", "session_id"),
    sa.Index("ix_samplers_version", "version_id"),
    sa.Index("ix_samplers_model", "model_id", "created_at", **_where("model_id IS NOT NULL")),
    sa.Index("ix_samplers_directory", "directory", **_where("directory IS NOT NULL")),
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
    sa.Column("lora_alpha", sa.Float, nullable=False),
    sa.Column("optimizer_type", sa.String(16), nullable=False),
    sa.Column("public", sa.Boolean, nullable=False),
    sa.Column("user_metadata", sa.JSON),
    sa.Column("step", sa.BigInteger),  # the optimizer steps before it was saved; null if there were none
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float),
    sa.Index("ix_checkpoints_tenant_created", "tenant_id", "created_at"),
    sa.Index("ix_checkpoints_expires", "expires_at"),
    sa.Index("ix_checkpoints_pending", "base_model", **_where(PENDING_SAVE)),
)

# Merges and uploads of checkpoints: store/checkpoint_jobs.py.
CHECKPOINT_JOBS = sa.Table(
    "checkpoint_jobs",
    METADATA,
    sa.Column("job_id", sa.String(32), primary_key=True),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("tinker_path", sa.String(512), nullable=False),
    sa.Column("base_model", sa.String(512), nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),  # merge | upload
    sa.Column("form", sa.String(16), nullable=False),  # model | adapter
    sa.Column("dtype", sa.String(16), nullable=False),
    sa.Column("repository", sa.String(256)),  # of an upload
    sa.Column("private", sa.Boolean, nullable=False),
    sa.Column("has_token", sa.Boolean, nullable=False),  # whether the tenant typed a token, which is not stored
    sa.Column("state", sa.String(16), nullable=False),  # see store/checkpoint_jobs.py
    sa.Column("reason", sa.Text),  # why it failed or was interrupted
    sa.Column("holder", sa.Text, nullable=False),  # the host and data directory of its server
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("phase", sa.String(16), nullable=False),
    sa.Column("phase_began_at", sa.Float, nullable=False),
    sa.Column("done", sa.BigInteger, nullable=False),  # tensors or files
    sa.Column("total", sa.BigInteger, nullable=False),
    sa.Column("done_bytes", sa.BigInteger, nullable=False),
    sa.Column("total_bytes", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("started_at", sa.Float),
    sa.Column("reported_at", sa.Float, nullable=False),  # the last sign of life
    sa.Column("ended_at", sa.Float),
    sa.Column("directory", sa.Text),  # of the result of a merge
    sa.Column("files", sa.JSON),  # names and sizes of the result
    sa.Column("size_bytes", sa.BigInteger),
    sa.Column("url", sa.Text),  # of an upload
    sa.Index("ix_checkpoint_jobs_tenant_created", "tenant_id", "created_at"),
    sa.Index("ix_checkpoint_jobs_state", "state", "created_at"),
)

CUSTOM_LOSSES = sa.Table(
    "custom_losses",
    METADATA,
    sa.Column("loss_id", sa.String(128), primary_key=True),
    sa.Column("session_id", sa.String(64), nullable=False),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("definition", sa.LargeBinary, nullable=False),  # inputs and graph: JSON, zstd
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Index("ix_custom_losses_session", "session_id"),
)

EXCHANGES = sa.Table(
    "exchanges",
    METADATA,
    _serial("exchange_id"),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("session", sa.String(128), nullable=False),
    sa.Column("version", sa.Text, nullable=False),  # the name of the weights that sampled
    sa.Column("prompt", sa.LargeBinary, nullable=False),  # int32, zstd
    sa.Column("tokens", sa.LargeBinary, nullable=False),  # int32, zstd
    sa.Column("logprobs", sa.LargeBinary, nullable=False),  # float32, zstd
    sa.Column("stop_reason", sa.String(16), nullable=False),
    sa.Column("digest", sa.String(64)),  # of the chat that the answer ends (chat/splicing.py)
    sa.Column("reward", sa.Float),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("images", sa.Text),  # of the prompt: JSON of their positions and digests
    sa.Index("ix_exchanges_session", "tenant_id", "session", "exchange_id"),
    sa.Index("ix_exchanges_created", "created_at"),
    sa.Index("ix_exchanges_digest", "tenant_id", "session", "digest"),
)

PROFILES = sa.Table(
    "profiles",
    METADATA,
    sa.Column("base_model", sa.String(512), primary_key=True),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("seconds", sa.Float, nullable=False),
    sa.Column("requested_at", sa.Float, nullable=False),
    sa.Column("engine_id", sa.String(64)),  # the engine that has begun
    sa.Column("host", sa.String(255)),
    sa.Column("files", sa.JSON, nullable=False),
    sa.Column("reason", sa.Text),
)

EXCHANGE_IMAGES = sa.Table(
    "exchange_images",
    METADATA,
    sa.Column("tenant_id", sa.String(64), primary_key=True),
    sa.Column("session", sa.String(128), primary_key=True),
    sa.Column("digest", sa.String(64), primary_key=True),  # of the file
    sa.Column("data", sa.LargeBinary, nullable=False),
)

RESPONSES = sa.Table(
    "responses",
    METADATA,
    sa.Column("response_id", sa.String(64), primary_key=True),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("request", sa.JSON, nullable=False),
    sa.Column("before", sa.JSON, nullable=False),  # the items of earlier responses
    sa.Column("request_ids", sa.JSON, nullable=False),  # of its samples
    sa.Column("answered", sa.Boolean, nullable=False, default=False),
    sa.Column("answer", sa.JSON),
    sa.Column("size_bytes", sa.BigInteger, nullable=False, server_default="0"),  # of request, before and answer
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Index("ix_responses_created", "created_at"),
    sa.Index("ix_responses_tenant", "tenant_id", "size_bytes"),
    sa.Index("ix_responses_unanswered", "created_at", **_where("NOT answered")),
)

SEQUENCES = sa.Table(
    "sequences",
    METADATA,
    sa.Column("sequence_id", sa.String(224), primary_key=True),
    sa.Column("session_id", sa.String(64), nullable=False),
    sa.Column("prompt_tokens", sa.Integer, nullable=False),
    sa.Column("sampled_tokens", sa.Integer, nullable=False),
    sa.Column("valid_until", sa.Float, nullable=False),  # training may not refer to it later
    sa.Index("ix_sequences_session", "session_id"),
    sa.Index("ix_sequences_valid_until", "valid_until"),
)

# Engines.

ENGINES = sa.Table(
    "engines",
    METADATA,
    sa.Column("engine_id", sa.String(64), primary_key=True),  # survives restarts of the engine process
    sa.Column("base_model", sa.String(512), nullable=False),
    sa.Column("kind", sa.String(16), nullable=False, server_default="engine"),  # engine | sampler
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),  # starting | loading | ready | failed | restarting | ...
    sa.Column("reason", sa.Text),
    sa.Column("started_at", sa.Float, nullable=False),
    sa.Column("holder", sa.Text, nullable=False, server_default=""),  # its supervisor: host:id:directory
    sa.Column("epoch", sa.BigInteger, nullable=False, server_default="0"),  # fencing token; every start increases it
    sa.Column("lease_expires_at", sa.Float, nullable=False, server_default="0"),  # the engine may be fenced afterwards
    sa.Column("address", sa.Text),  # its address for direct connections
    sa.Column("suspects", sa.Text),  # in-flight journal of a crashed engine, for its successor
    sa.Column("facts", sa.JSON),  # what a dedicated sampler reports of itself: `executors.Executors.report`
    sa.Index("ix_engines_base_model", "base_model"),
)

# Tenants.

TENANTS = sa.Table(
    "tenants",
    METADATA,
    sa.Column("tenant_id", sa.String(64), primary_key=True),
    sa.Column("quotas", sa.JSON, nullable=False),  # name -> limit that overrides the settings
    sa.Column("created_at", sa.Float, nullable=False),
)

KEYS = sa.Table(
    "keys",
    METADATA,
    sa.Column("key_id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("name", sa.String(128), nullable=False),  # chosen by the user
    sa.Column("digest", sa.String(64), nullable=False, unique=True),  # SHA-256; the key itself is not stored
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("revoked_at", sa.Float),
    sa.Index("ix_keys_tenant", "tenant_id"),
    sqlite_autoincrement=True,
)

AUDIT = sa.Table(
    "audit",
    METADATA,
    _serial("entry_id"),
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
    sa.Column("quantity", sa.BigInteger, nullable=False),  # tokens or checkpoints
    sa.Index("ix_usage_tenant_bucket", "tenant_id", "bucket_start"),
)

# Bounded history for the dashboard: points per run, steps per base model, samples per tenant.

CURVE_POINTS = sa.Table(
    "curve_points",
    METADATA,
    sa.Column("model_id", sa.String(128), primary_key=True),
    sa.Column("source", sa.String(8), primary_key=True),  # server | client
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("metrics", sa.JSON, nullable=False),  # name -> number; null if not finite
    sa.Column("recorded_at", sa.Float, nullable=False),
)

RECENT_STEPS = sa.Table(
    "recent_steps",
    METADATA,
    _serial("position"),
    sa.Column("base_model", sa.String(512), nullable=False),
    sa.Column("ended_at", sa.Float, nullable=False),
    sa.Column("duration_s", sa.Float, nullable=False),
    sa.Column("num_passes", sa.Integer, nullable=False),
    sa.Column("num_optim_steps", sa.Integer, nullable=False),
    sa.Column("num_singles", sa.Integer, nullable=False),
    sa.Column("num_tokens", sa.BigInteger, nullable=False),
    sa.Column("shares", sa.JSON, nullable=False),  # tenant_id -> model_id -> tokens
    sa.Index("ix_recent_steps_base", "base_model", "position"),
    sqlite_autoincrement=True,
)

# What a machine did in a period: store/machine_history.py. The machine itself is the row without a base model.
MACHINE_HISTORY = sa.Table(
    "machine_history",
    METADATA,
    sa.Column("step_s", sa.Integer, primary_key=True, autoincrement=False),  # length of the period
    sa.Column("began_at", sa.Float, primary_key=True),
    sa.Column("holder", sa.String(512), primary_key=True),  # the server: host:id:directory
    sa.Column("base_model", sa.String(512), primary_key=True),
    *(
        sa.Column(name, sa.Float, nullable=False, server_default="0")
        for name in (
            "observed_s",
            "engine_s",  # of all its engines together
            "training_s",
            "sampling_s",
            "loading_s",
            "trained_tokens",
            "sampled_tokens",
            "memory_byte_s",  # bytes times seconds
            "budget_byte_s",
            "device_s",  # in which the utilisation was known
            "device_busy_s",
        )
    ),
    sa.Column("tenants", sa.JSON, nullable=False),  # tenant_id -> [trained tokens, sampled tokens]
)

# The tables of samples and answers keep the names of the first release, whose processes use them during an upgrade.

STORED_SAMPLES = sa.Table(
    "kept_samples",
    METADATA,
    _serial("position"),
    sa.Column("request_id", sa.String(192), nullable=False),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("session_id", sa.String(64), nullable=False),
    sa.Column("base_model", sa.String(512), nullable=False),
    sa.Column("weights", sa.String(512)),  # the sampled version; null: base model
    sa.Column("prompt_tokens", sa.Integer, nullable=False),
    sa.Column("sampled_tokens", sa.Integer, nullable=False),
    sa.Column("num_sequences", sa.Integer, nullable=False),
    sa.Column("content", sa.LargeBinary, nullable=False),  # tokens, logprobs and parameters: JSON, zstd
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("model_id", sa.String(128), nullable=False, server_default=""),  # the run of the weights; empty: none
    sa.Column("prompt_digest", sa.String(32), nullable=False, server_default=""),  # of all its tokens and images
    sa.Index("ix_kept_samples_tenant", "tenant_id", "position"),
    sa.Index("ix_kept_samples_request", "request_id"),
    sa.Index("ix_kept_samples_created", "created_at"),
    # Of all that decides which samples stay, so that their content is not read for it.
    sa.Index("ix_kept_samples_run", "tenant_id", "model_id", "position", "weights", "prompt_digest"),
    sqlite_autoincrement=True,
)

STORED_ANSWERS = sa.Table(
    "kept_answers",
    METADATA,
    _serial("position"),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("request_id", sa.String(192), nullable=False),  # of the stored sample
    sa.Column("number", sa.Integer, nullable=False),  # among the sample's sequences
    sa.Column("digest", sa.String(32), nullable=False),  # of all tokens, prompt and answer
    sa.Column("num_tokens", sa.Integer, nullable=False),  # of the answer, before it was cut
    sa.Column("reward", sa.Float),  # as the client reported it
    sa.Column("model_id", sa.String(128)),  # the run that trained on it
    sa.Column("step", sa.BigInteger),  # the optimizer step of that training
    sa.Column("advantage", sa.Float),  # mean over the trained tokens
    sa.Column("logprobs", sa.LargeBinary),  # of the last tokens, in training: float32, zstd
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("advantages", sa.LargeBinary),  # of the same tokens: float32, zstd
    sa.Index("ix_kept_answers_digest", "tenant_id", "digest"),
    sa.Index("ix_kept_answers_request", "request_id"),
    sa.Index("ix_kept_answers_tenant", "tenant_id", "created_at"),
    sa.Index("ix_kept_answers_created", "created_at"),
    sa.Index("ix_kept_answers_run", "tenant_id", "model_id"),
    sqlite_autoincrement=True,
)

# Uploaded files and batches of the OpenAI interface. Lists are in the order of `position`, which is never reused.

UPLOADS = sa.Table(
    "files",
    METADATA,
    _serial("position"),
    sa.Column("file_id", sa.String(64), nullable=False, unique=True),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("filename", sa.Text, nullable=False),
    sa.Column("purpose", sa.String(32), nullable=False),  # batch | batch_output | external_upload
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("sha256", sa.String(64), nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float),
    sa.Index("ix_files_tenant", "tenant_id", "position"),
    sa.Index("ix_files_expires_at", "expires_at"),
    sqlite_autoincrement=True,
)

OPENAI_BATCHES = sa.Table(
    "openai_batches",
    METADATA,
    _serial("position"),
    sa.Column("batch_id", sa.String(64), nullable=False, unique=True),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("status", sa.String(16), nullable=False),  # see batch/openai/rows.py
    sa.Column("endpoint", sa.String(64), nullable=False),
    sa.Column("input_file_id", sa.String(64), nullable=False),
    sa.Column("completion_window", sa.String(16), nullable=False),
    sa.Column("labels", sa.JSON),  # OpenAI's `metadata`: name -> text
    sa.Column("output_expires_s", sa.Integer),
    sa.Column("job_id", sa.BigInteger),  # the bulk job that does the work
    sa.Column("model", sa.Text),
    sa.Column("errors", sa.JSON),  # list of {code, line, message, param}
    sa.Column("total", sa.Integer, nullable=False, server_default="0"),
    sa.Column("completed", sa.Integer, nullable=False, server_default="0"),
    sa.Column("failed", sa.Integer, nullable=False, server_default="0"),
    sa.Column("usage", sa.JSON),
    sa.Column("output_file_id", sa.String(64)),
    sa.Column("error_file_id", sa.String(64)),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
    sa.Column("in_progress_at", sa.Float),
    sa.Column("finalizing_at", sa.Float),
    sa.Column("cancelling_at", sa.Float),
    sa.Column("ended_at", sa.Float),
    sa.Index("ix_openai_batches_tenant", "tenant_id", "position"),
    sa.Index("ix_openai_batches_active", "position", **_where("ended_at IS NULL")),
    sqlite_autoincrement=True,
)

# Bulk jobs. The first eight columns of `batch_state` (job_id to updated_at) are those of Sky Batch; the others are for
# attempts, leases and results.

BATCH_JOBS = sa.Table(
    "batch_job",
    METADATA,
    _serial("job_id"),
    sa.Column("tenant_id", sa.String(64), nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("pool", sa.String(128), nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("weight", sa.Float, nullable=False),
    sa.Column("status", sa.String(16), nullable=False),  # see batch/coordinator/state.py
    sa.Column("spec", sa.JSON, nullable=False),
    sa.Column("owner_token", sa.String(64)),  # fencing token of its coordinator
    sa.Column("owner_holder", sa.Text),  # the coordinator's server: host and directory
    sa.Column("owner_lease_at", sa.Float, nullable=False, server_default="0"),  # another may take over afterwards
    sa.Column("sealed", sa.Boolean, nullable=False),  # whether all its batches have rows
    sa.Column("total_rows", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("total_batches", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("completed_batches", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("rows_ok", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("rows_failed", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("tokens_in", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("tokens_out", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("max_failed_rows", sa.Float, nullable=False),
    sa.Column("worker_seconds", sa.Float, nullable=False, server_default="0"),  # of its workers that have ended
    sa.Column("paid_until", sa.JSON),  # the state of its rate limits: see RateLimits in batch/coordinator/job_run.py
    sa.Column("machines_set_aside", sa.JSON),  # where its function could not be set up: batch/coordinator/hosts.py
    sa.Column("stage_figures", sa.JSON),  # what each stage did: batch/coordinator/stage_figures.py
    sa.Column("schemas", sa.JSON),  # the types of the committed rows of each output: batch/formats/schemas.py
    sa.Column("resume_from", sa.BigInteger),
    sa.Column("root_job_id", sa.BigInteger),  # the first job of a chain of resumed jobs
    sa.Column("error", sa.Text),
    sa.Column("cleaned", sa.Boolean, nullable=False),  # whether its parts are deleted
    sa.Column("idempotency_key", sa.String(256)),  # of the request that created it
    sa.Column("request_digest", sa.String(64)),  # SHA-256 of what that request asked for
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("started_at", sa.Float),
    sa.Column("ended_at", sa.Float),
    sa.Column("updated_at", sa.Float, nullable=False),
    sa.Index("ix_batch_job_tenant_id", "tenant_id", "job_id"),
    sa.Index("ix_batch_job_status", "status"),
    sa.Index("ix_batch_job_root", "root_job_id"),
    sa.Index(
        "ix_batch_job_idempotency_key",
        "tenant_id",
        "idempotency_key",
        unique=True,
        **_where("idempotency_key IS NOT NULL"),
    ),
    sqlite_autoincrement=True,
)

ACTIVE_JOB = ("PENDING", "RUNNING", "WINDING_DOWN", "CANCELLING")
TERMINAL_JOB = ("SUCCEEDED", "FAILED", "CANCELLED")
"""All statuses of a bulk job."""

BATCH_STATES = sa.Table(
    "batch_state",
    METADATA,
    sa.Column("job_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("batch_idx", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("start_idx", sa.BigInteger, nullable=False),
    sa.Column("end_idx", sa.BigInteger, nullable=False),  # inclusive
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
    sa.Column("commit_number", sa.BigInteger),  # 1 for the first batch of the job that was committed, and so on
    sa.Column("rows_ok", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("rows_failed", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("tokens_in", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("tokens_out", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("error_class", sa.String(128)),
    sa.Column("error", sa.Text),
    sa.Index("ix_batch_state_rows", "job_id", "start_idx"),
    sa.Index("ix_batch_state_pending", "job_id", "start_idx", **_where("status = 'PENDING'")),
    sa.Index("ix_batch_state_dispatched", "lease_expires_at", **_where("status = 'DISPATCHED'")),
    sa.Index("ix_batch_state_commits", "job_id", "commit_number", **_where("commit_number IS NOT NULL")),
)

BATCH_WORKERS = sa.Table(
    "batch_worker",
    METADATA,
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
    sa.Column("launch_intent", sa.String(64), nullable=False),  # stored before the process is started
    sa.Index("ix_batch_worker_job", "job_id"),
)

# Processes that run batches of a job which another one owns: batch/coordinator/members.py.
BATCH_MEMBERS = sa.Table(
    "batch_member",
    METADATA,
    sa.Column("job_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("token", sa.String(64), primary_key=True),  # fencing token of the process
    sa.Column("holder", sa.Text, nullable=False),  # its host and directory
    sa.Column("lease_at", sa.Float, nullable=False),  # it is gone afterwards
)

BATCH_ROW_ERRORS = sa.Table(
    "batch_row_error",
    METADATA,
    sa.Column("job_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("row_idx", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("attempt_id", sa.Integer, nullable=False),
    sa.Column("error_class", sa.String(128), nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("details", sa.JSON, nullable=False),  # the row itself, traceback, attempts, worker
)

BATCH_OUTPUTS = sa.Table(
    "batch_output",
    METADATA,
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
