"""Connections to Postgres, and the limits of time on everything that waits for it.

A primary can vanish without closing its connections. Each wait then has its own limit:
- connecting: `connect_timeout`, for each host of the URL;
- a statement: the server's `statement_timeout`. If the server's answer does not arrive `GRACE_S` later either, this
  process closes the connection and raises OperationalError;
- a connection whose peer acknowledges nothing: `tcp_user_timeout` and TCP keepalives.

While Postgres is unreachable, `ConnectionGate` lets one thread at a time try to connect, and the others fail at once,
so that threads stay free. `long_statements` raises the limit of statements for maintenance, such as migrations and
retention. Parameters in the URL override these defaults. psycopg is imported only where a connection is opened.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import ArgumentError

from tinsmith.errors import SettingsError

if TYPE_CHECKING:
    import psycopg

DRIVER = "postgresql+psycopg"

MAX_CONNECTIONS, IDLE_CONNECTIONS = 40, 8
"""Limits of the connections of one `PostgresDatabase`: in total, unless it states its own, and idle."""

LEASE_CONNECTIONS, ENGINE_CONNECTIONS = 2, 8
"""An engine's connections: for its lease, and for all else. It has two more for wake-ups (`pg_notify`)."""

MAX_NOTIFY_BYTES = 7_900
"""The payload of a NOTIFY must be shorter than 8,000 bytes."""

IDLE_IN_TRANSACTION_S = 10
"""Postgres ends a transaction that is idle for this long, since a suspended process would hold its locks for ever."""

GRACE_S = 1.0
"""How long after `statement_timeout` the server's error may arrive."""

MAINTENANCE_S = 600.0
"""The limit of a statement of the janitor."""

RETRY_S = 1.0
"""After a failed attempt to connect, all other threads fail at once for this long."""

KEEPALIVES = {"keepalives": 1, "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3}
"""TCP keepalives find a lost peer of an idle connection after 11 s."""

Parameters = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PostgresTimeouts:
    """Limits in seconds: of an attempt to connect to one host, and of a statement."""

    connect_s: int = 3
    statement_s: float = 5.0


DEFAULT_TIMEOUTS = PostgresTimeouts()

_limit_s: ContextVar[float | None] = ContextVar("limit_s", default=None)


def statement_limit_s() -> float | None:
    """The limit that `long_statements` set in this context, if any."""
    return _limit_s.get()


@contextlib.contextmanager
def long_statements(limit_s: float = math.inf) -> Iterator[None]:
    """Within the block, statements of this context may take up to `limit_s`."""
    token = _limit_s.set(limit_s)
    try:
        yield
    finally:
        _limit_s.reset(token)


def sqlalchemy_url(url: str) -> str:
    """The URL for SQLAlchemy, with psycopg 3 as the driver for Postgres."""
    scheme, separator, address = url.partition("://")
    return f"{DRIVER}{separator}{address}" if scheme in ("postgres", "postgresql") else url


def connection_parameters(url: str, timeouts: PostgresTimeouts) -> Parameters:
    """libpq's parameters for a URL, including those of several hosts in libpq's form and in SQLAlchemy's. Raises
    SettingsError.
    """
    scheme, _, address = sqlalchemy_url(url).partition("://")
    if scheme != DRIVER:
        raise SettingsError(f"database_url begins with {f'{scheme[:20]}://'!r}; use sqlite:/// or postgresql://")
    try:
        parameters = _parse_url(address)
    except ModuleNotFoundError:
        raise SettingsError("database_url needs the Postgres driver: pip install 'tinsmith[postgres]'") from None
    except (ArgumentError, ValueError):
        raise SettingsError("database_url is not a URL; use postgresql://USER:PASSWORD@HOST/NAME") from None
    defaults: Parameters = {
        **KEEPALIVES,
        "connect_timeout": timeouts.connect_s,
        "tcp_user_timeout": math.ceil((timeouts.statement_s + GRACE_S) * 1000),
        "application_name": "tinsmith",
    }
    return defaults | parameters


def _parse_url(address: str) -> Parameters:
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    if address.partition("?")[2].count("host=") > 1:  # SQLAlchemy's form, of which libpq would use the last host only
        url = sa.make_url(f"{DRIVER}://{address}")
        return dict(url.get_dialect()().create_connect_args(url)[1])
    try:
        parameters = dict(conninfo_to_dict(f"postgresql://{address}"))
    except ProgrammingError as error:
        raise ValueError(str(error)) from None
    if not all(port.isdecimal() for port in str(parameters.get("port") or "0").split(",") if port):
        raise ValueError("a port is not a number")
    return parameters


@cache
def connection_class() -> type[psycopg.Connection[Any]]:
    """psycopg's connection with a limit of time on each wait for the server."""
    import psycopg

    class LimitedConnection(psycopg.Connection[Any]):
        statement_s: float = math.inf

        def wait(self, gen: Generator[Any, Any, Any], *args: Any, **options: Any) -> Any:  # noqa: ANN401  psycopg's own
            limit_s = _limit_s.get() or self.statement_s
            return super().wait(self._limit(gen, limit_s + GRACE_S), *args, **options)

        def _limit(self, gen: Generator[Any, Any, Any], seconds: float) -> Generator[Any, Any, Any]:
            """`gen`, which psycopg resumes several times a second, until the time is over."""
            deadline = time.monotonic() + seconds
            try:
                state = next(gen)
                while True:
                    ready = yield state
                    if not ready and time.monotonic() > deadline:
                        self.pgconn.finish()  # its answer may never arrive; nothing else may be sent on it
                        raise psycopg.OperationalError(f"Postgres did not answer within {seconds:g} s")
                    state = gen.send(ready)
            except StopIteration as end:
                return end.value

    return LimitedConnection


def connect(
    parameters: Parameters, statement_s: float, *, autocommit: bool = False, gate: ConnectionGate | None = None
) -> psycopg.Connection[Any]:
    """Open a connection whose statements have this limit. Raises psycopg.OperationalError."""
    attempt = gate.attempt() if gate else contextlib.nullcontext()
    with attempt:
        connection = connection_class().connect(autocommit=True, **parameters)
        connection.statement_s = statement_s  # type: ignore[attr-defined]
        connection.execute(
            f"SET idle_in_transaction_session_timeout = '{IDLE_IN_TRANSACTION_S}s'; "
            f"SET statement_timeout = {math.ceil(statement_s * 1000)}".encode()
        )
    connection.autocommit = autocommit
    return connection


class ConnectionGate:
    """After a failed attempt to connect, lets one thread try again every RETRY_S, and lets the others fail at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed_at = -math.inf
        self._is_open = True
        self._is_tried = False

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Surrounds an attempt. Raises psycopg.OperationalError if this thread must not try now."""
        import psycopg

        with self._lock:
            if not self._is_open:
                if self._is_tried or time.monotonic() < self._failed_at + RETRY_S:
                    raise psycopg.OperationalError("Postgres could not be reached a moment ago")
                self._is_tried = True
        try:
            yield
        except BaseException:
            self._end(is_open=False)
            raise
        self._end(is_open=True)

    def _end(self, *, is_open: bool) -> None:
        with self._lock:
            self._is_open, self._is_tried = is_open, False
            self._failed_at = -math.inf if is_open else time.monotonic()


def make_postgres_engine(url: str, timeouts: PostgresTimeouts, connections: int, idle: int) -> Engine:
    """An engine with at most `connections`, of which `idle` stay open. Raises SettingsError."""
    parameters, gate = connection_parameters(url, timeouts), ConnectionGate()
    return sa.create_engine(
        f"{DRIVER}://",
        creator=lambda: connect(parameters, timeouts.statement_s, gate=gate),
        pool_size=min(idle, connections),
        max_overflow=max(0, connections - idle),
        pool_timeout=timeouts.statement_s,
        pool_pre_ping=True,  # replaces a broken connection before it is used
        hide_parameters=True,
    )


def time_pool(pool: Engine, used: Callable[[float], None]) -> None:
    """Call `used` with the duration in seconds of each use of a connection."""

    def checkout(_connection: object, record: sa.pool.ConnectionPoolEntry, _proxy: object) -> None:
        record.info["since"] = time.perf_counter()

    def checkin(_connection: object, record: sa.pool.ConnectionPoolEntry) -> None:
        since = record.info.pop("since", None)
        if since is not None:
            used(time.perf_counter() - since)

    event.listen(pool, "checkout", checkout)
    event.listen(pool, "checkin", checkin)
