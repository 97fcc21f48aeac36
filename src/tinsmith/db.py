"""The database: tables, connections, migrations.

Owns the schema and how a transaction is opened; knows nothing of what the rows mean. SQLite (in WAL mode) and Postgres
hold the same tables. On SQLite there is one writer at a time: those of one process take turns on a lock, so that they
never meet SQLite's sleeping busy handler; writers of different processes meet only there. On Postgres writers run
beside each other (READ COMMITTED): whoever checks before it writes must lock the row (`with_for_update`), or write
with a condition and count the rows, or leave it to a unique constraint (`insert_once`).

A fenced database begins every writing transaction with the fence, which raises if this process may not write any more.

Times are float seconds since the epoch (UTC). Large values live in tables of their own, so that reading or
changing a row's metadata never touches them.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config as AlembicConfig
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import ArgumentError, OperationalError

from tinsmith import batch_tables, file_tables, record_tables
from tinsmith.crashpoints import reach
from tinsmith.errors import SettingsError
from tinsmith.notify import payloads
from tinsmith.turns import MOST_IN_SQLITE_S, Turns

MAX_NOTIFY_BYTES = 7_900
"""Postgres takes less than 8,000 bytes in one NOTIFY."""

IDLE_IN_TRANSACTION_S = 10
"""Postgres ends a transaction of which nothing was heard for this long: a process that is stopped in the middle of one
must not hold its locks for ever."""

_MIGRATION_LOCK = 0x74696E73  # any number that all servers share

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
)

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
    sa.UniqueConstraint("model_id", "seq_id"),
    sa.UniqueConstraint("sampling_session_id", "seq_id"),
    sa.Index("ix_futures_work", "base_model", "state", "arrival"),
    sa.Index("ix_futures_session", "session_id"),
    sa.Index("ix_futures_tenant_settled", "tenant_id", "state", "settled_at"),
    sa.Index("ix_futures_settle_order", "sampling_session_id", "settle_order"),
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

ENGINES = sa.Table(
    "engines",
    METADATA,
    sa.Column("base_model", sa.String(512), primary_key=True),
    sa.Column("engine_id", sa.String(64), nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),  # loading | ready | failed
    sa.Column("reason", sa.Text),
    sa.Column("started_at", sa.Float, nullable=False),
    sa.Column("holder", sa.Text, nullable=False, server_default=""),  # whose supervisor runs it: host and directory
    sa.Column("epoch", sa.BigInteger, nullable=False, server_default="0"),  # grows with each engine that takes over
    sa.Column("lease_expires_at", sa.Float, nullable=False, server_default="0"),  # from then on another one may
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

BATCH = batch_tables.define(METADATA)
UPLOADS, OPENAI_BATCHES = file_tables.define(METADATA)
CURVE_POINTS, RECENT_STEPS, KEPT_SAMPLES = record_tables.define(METADATA)


Fence = Callable[[Connection], None]


class Database:
    """Connections to one database. `write` and `read` each give one transaction."""

    def __init__(self, url: str, fence: Fence | None = None, *, patience_s: float = MOST_IN_SQLITE_S) -> None:
        """On SQLite, a writer waits for others for `patience_s` (see `turns`)."""
        self.url = sqlalchemy_url(url)
        self._fence = fence
        self._turns = Turns(patience_s)
        self.is_sqlite = self.url.startswith("sqlite")
        # hide_parameters: an error's text must not carry request bodies into the log.
        if self.is_sqlite:
            _make_private_file(sa.make_url(self.url).database)
            connect_args: dict[str, object] = {"timeout": self._turns.timeout_s, "check_same_thread": False}
            self.engine: Engine = sa.create_engine(self.url, connect_args=connect_args, hide_parameters=True)
            event.listen(self.engine, "connect", _configure_sqlite)
            event.listen(self.engine, "begin", _begin_sqlite)
            self._writers = self.engine.execution_options(tinsmith_write=True)
        else:
            self.engine = _postgres_engine(self.url)
            event.listen(self.engine, "connect", _configure_postgres)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        if self.is_sqlite:
            with self._turns.mine(), self._writers.connect() as connection, self._turns.begin(connection):
                if self._fence:
                    self._fence(connection)
                yield connection
        else:
            with self.engine.begin() as connection:
                if self._fence:
                    self._fence(connection)
                yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        if self.is_sqlite:
            with self.engine.connect() as connection, connection.begin():
                yield connection
        else:
            # Each statement sees what is committed then, as it would in a transaction, but without BEGIN and ROLLBACK.
            with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                yield connection

    def insert_once(self, table: sa.Table) -> sa.Insert:
        """An INSERT that changes nothing, and counts no row, where a row of the same key exists or is being made."""
        dialect = sqlite if self.is_sqlite else postgresql
        statement = dialect.insert(table).on_conflict_do_nothing().inline()
        return statement.execution_options(preserve_rowcount=True)

    def clock(self) -> sa.ColumnElement[float]:
        """The time as the database has it: the processes of several machines agree on it."""
        if self.is_sqlite:
            return sa.literal(now())
        return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Float)

    def checkpoint(self) -> None:
        """On SQLite, move what has been written from its log to its file, while others go on writing: whoever commits
        with a full log does that while they wait. For those who write much."""
        if self.is_sqlite:
            with contextlib.closing(self.engine.raw_connection()) as connection:
                connection.cursor().execute("PRAGMA wal_checkpoint(PASSIVE)")

    def notify(self, connection: Connection, channel: str, ids: Iterable[str]) -> None:
        """Wake whoever listens on `channel`, if and when this transaction commits. SQLite has no such thing."""
        if self.is_sqlite:
            return
        for payload in payloads(ids, MAX_NOTIFY_BYTES):
            connection.execute(_NOTIFY, {"channel": channel, "payload": payload})

    @contextmanager
    def alone(self, name: str) -> Iterator[bool]:
        """Whether this process is the only one that does `name` now; others are told no until the block ends.

        On SQLite there is only one server. On Postgres the claim ends with the connection, however that ends.
        """
        if self.is_sqlite:
            yield True
            return
        key = {"name": name}
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            claimed = bool(connection.scalar(_CLAIM, key))
            try:
                yield claimed
            finally:
                if claimed:
                    connection.execute(_DISCLAIM, key)

    def migrate(self) -> None:
        """Bring the schema to the newest version; several processes may call it at once. Raises SettingsError."""
        try:
            with self.migrations() as config:
                command.upgrade(config, "head")
                reach("migration.uncommitted")
        except OperationalError as error:
            raise SettingsError(f"the database cannot be reached or written: {error.orig}") from None

    @contextmanager
    def migrations(self) -> Iterator[AlembicConfig]:
        """One transaction for Alembic's commands, which nobody else's migrations can enter."""
        config = AlembicConfig()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
        # The lock first: two processes that both find an empty schema would both create it.
        with self.engine.connect().execution_options(tinsmith_write=True) as connection:
            if not self.is_sqlite:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            _refuse_newer(connection, ScriptDirectory.from_config(config))
            config.attributes["connection"] = connection
            yield config
            connection.commit()

    def close(self) -> None:
        self.engine.dispose()


_NOTIFY = sa.select(sa.func.pg_notify(sa.bindparam("channel"), sa.bindparam("payload")))
_CLAIM = sa.select(sa.func.pg_try_advisory_lock(sa.func.hashtext(sa.bindparam("name"))))
_DISCLAIM = sa.select(sa.func.pg_advisory_unlock(sa.func.hashtext(sa.bindparam("name"))))


def sqlalchemy_url(url: str) -> str:
    """The URL as SQLAlchemy takes it: Postgres is reached by psycopg 3, whatever the URL calls it."""
    scheme, separator, rest = url.partition("://")
    return f"postgresql+psycopg{separator}{rest}" if scheme in ("postgres", "postgresql") else url


def _postgres_engine(url: str) -> Engine:
    scheme = url.partition("://")[0]
    if scheme != "postgresql+psycopg":
        raise SettingsError(f"database_url begins with {f'{scheme[:20]}://'!r}; use sqlite:/// or postgresql://")
    try:
        # Every worker thread of a server may hold one; a connection that broke is replaced before it is used.
        return sa.create_engine(url, pool_size=8, max_overflow=32, pool_pre_ping=True, hide_parameters=True)
    except ModuleNotFoundError:
        raise SettingsError("database_url is of a Postgres: pip install 'tinsmith[postgres]'") from None
    except (ArgumentError, ValueError):
        raise SettingsError("database_url is no URL; use postgresql://USER:PASSWORD@HOST/NAME") from None


def _make_private_file(path: str | None) -> None:
    """SQLite would let everyone read what it makes. Its other files have the mode of this one."""
    if path and path != ":memory:":
        with contextlib.suppress(OSError):  # it is there already, or SQLite will say what is wrong
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def _refuse_newer(connection: Connection, scripts: ScriptDirectory) -> None:
    known = {script.revision for script in scripts.walk_revisions()}
    unknown = set(MigrationContext.configure(connection).get_current_heads()) - known
    if unknown:
        raise SettingsError(
            f"the database has schema version {', '.join(sorted(unknown))}, and this Tinsmith knows none after "
            f"{scripts.get_current_head()}: a newer Tinsmith made it; upgrade this one, or choose another database"
        )


def _configure_postgres(dbapi_connection: sa.engine.interfaces.DBAPIConnection, _record: object) -> None:
    with contextlib.closing(dbapi_connection.cursor()) as cursor:
        cursor.execute(f"SET idle_in_transaction_session_timeout = '{IDLE_IN_TRANSACTION_S}s'")
    dbapi_connection.commit()


def _configure_sqlite(dbapi_connection: sa.engine.interfaces.DBAPIConnection, _record: object) -> None:
    # pysqlite must not open transactions by itself: _begin_sqlite says which kind to open.
    dbapi_connection.isolation_level = None  # type: ignore[attr-defined]
    cursor = dbapi_connection.cursor()
    _use_wal(cursor)
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    # KiB of each connection, of which a server keeps five; the system's own cache holds the file for all of them.
    cursor.execute("PRAGMA cache_size=-16384")
    cursor.close()


def _use_wal(cursor: sa.engine.interfaces.DBAPICursor) -> None:
    # Two processes that change a new file's mode at once would each wait for the other's lock: SQLite tells one of them
    # at once that the file is locked, however patient the connection is.
    deadline = time.monotonic() + MOST_IN_SQLITE_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.005)


def _begin_sqlite(connection: Connection) -> None:
    # A writer locks at once, since upgrading a reader can fail without waiting. By the driver, which is quicker.
    statement = "BEGIN IMMEDIATE" if connection.get_execution_options().get("tinsmith_write", False) else "BEGIN"
    try:
        connection.connection.cursor().execute(statement)
    except sqlite3.Error as error:
        raise OperationalError(statement, None, error) from error


def now() -> float:
    """Seconds since the epoch, for rows."""
    return time.time()
