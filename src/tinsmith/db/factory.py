"""What a database_url opens: the database, and this process's endpoint for its wake-ups.

`sqlite:` is a file for the processes of one machine, with wake-ups by sockets. Every other URL must be one of Postgres,
with wake-ups by notifications.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa

from tinsmith.db.database import Database, Fence
from tinsmith.db.pg_notify import PostgresMailbox
from tinsmith.db.postgres import DEFAULT_TIMEOUTS, MAX_CONNECTIONS, PostgresTimeouts
from tinsmith.db.postgres_database import PostgresDatabase
from tinsmith.db.sqlite import MAX_BUSY_TIMEOUT_S
from tinsmith.db.sqlite_database import SQLiteDatabase
from tinsmith.db.wakeups import Mailbox, WakeUps, socket_dir
from tinsmith.runtime.background import ignore


def open_database(
    url: str,
    fence: Fence | None = None,
    *,
    patience_s: float = MAX_BUSY_TIMEOUT_S,
    exists: bool = False,
    connections: int = MAX_CONNECTIONS,
    timeouts: PostgresTimeouts = DEFAULT_TIMEOUTS,
) -> Database:
    """Open a database. On SQLite, writers wait up to `patience_s`, and with `exists`, a missing file raises
    DatabaseMovedError. `connections` and `timeouts` are limits on Postgres. Raises SettingsError for any other URL.
    """
    if _is_sqlite(url):
        return SQLiteDatabase(url, fence, patience_s=patience_s, exists=exists)
    return PostgresDatabase(url, fence, connections=connections, timeouts=timeouts)


def open_mailbox(
    database_url: str,
    name: str,
    on_failure: Callable[[str], None] = ignore,
    timeouts: PostgresTimeouts = DEFAULT_TIMEOUTS,
) -> WakeUps:
    """Open this process's endpoint for the wake-ups of a database. `on_failure` is called when its thread fails."""
    if _is_sqlite(database_url):
        return Mailbox(socket_dir(_shared_path(database_url)), name)
    return PostgresMailbox(database_url, name, on_failure, timeouts)


def _is_sqlite(url: str) -> bool:
    return url.startswith("sqlite")


def _shared_path(database_url: str) -> Path:
    """The path that identifies a SQLite database to all its processes: tinsmith.db's directory, or another file."""
    path = Path(sa.make_url(database_url).database or "").resolve()
    return path.parent if path.name == "tinsmith.db" else path
