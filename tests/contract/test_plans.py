"""No statement of a page, of the hot path or of the janitor scans a table that grows.

The statements are those that every route, an engine and a sweep execute: a hook on the driver records them, so a new
one is checked without being listed here. SQLite explains them by its fixed rules, Postgres without statistics of the
few rows and with sequential scans disabled, so that it chooses one only where no index helps. A scan of a whole index
counts too, unless a limit ends it.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import event

from support import databases
from support.databases import POSTGRES, SQLITE
from support.engine_bench import Bench
from support.every_route import (
    BODIES,
    FILTERS,
    LISTING_QUERIES,
    QUERIES,
    RouteObjects,
    create_objects,
    fill_ids,
    url_of,
)
from support.http_harness import ALICE, BASE, Harness, close, make_harness, sample_request
from tinsmith.api.app import OPERATIONS
from tinsmith.cluster.engines import Engines, Seat, fence
from tinsmith.cluster.ownership import Ownership
from tinsmith.db.database import Database
from tinsmith.db.factory import open_database
from tinsmith.db.schema import CHECKPOINT_JOBS, KEYS, METADATA
from tinsmith.db.sqlite_database import SQLiteDatabase
from tinsmith.server.janitor import Janitor
from tinsmith.storage.directories import Directories
from tinsmith.store.checkpoint_jobs import FAILED, QUEUED
from tinsmith.store.database_counts import DatabaseCounts
from tinsmith.wire.bodies import PROTO_TYPE

SMALL = {"engines", "tenants", "keys", "batch_worker", "profiles"}
"""Tables with a row for each process, tenant or key."""

GROWING = set(METADATA.tables) - SMALL

PARTIAL = {
    str(index.name)
    for table in METADATA.tables.values()
    for index in table.indexes
    if index.dialect_options["sqlite"]["where"] is not None
}
"""Indexes of the few rows that satisfy a condition, which may be scanned."""


@dataclass
class Recorder:
    """The statements that a database executes, each with the values of one execution."""

    url: str
    statements: dict[str, Any] = field(default_factory=dict)

    def watch(self, database: Database) -> None:
        event.listen(database.engine, "connect", self._on_connect)
        database.close()  # its next connections are watched

    def _on_connect(self, connection: sqlite3.Connection | psycopg.Connection, _record: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.set_trace_callback(self._on_sqlite)
        else:
            connection.cursor_factory = self._cursor_factory()

    def _on_sqlite(self, statement: str) -> None:
        self.statements.setdefault(re.sub(r"'(?:[^']|'')*'|\b\d+(?:\.\d+)?\b", "?", statement), statement)

    def _cursor_factory(self) -> type[psycopg.Cursor[Any]]:
        statements = self.statements

        class RecordingCursor(psycopg.Cursor[Any]):
            def execute(self, query: Any, params: Any = None, **options: Any) -> Any:  # noqa: ANN401  psycopg's own
                statements.setdefault(query if isinstance(query, str) else str(query), params)
                return super().execute(query, params, **options)

        return RecordingCursor

    def weak(self) -> dict[str, list[str]]:
        """The statements that scan a growing table, with the lines or nodes of their plans."""
        checked = {text: values for text, values in self.statements.items() if _reads(text)}
        assert len(checked) > 20, "statements were recorded"
        explain = _plans_of_sqlite if self.url.startswith("sqlite") else _plans_of_postgres
        return {text: lines for text, lines in explain(self.url, checked) if lines}


def _reads(statement: str) -> bool:
    return statement.lstrip().upper().startswith(("SELECT", "UPDATE", "DELETE", "WITH")) and any(
        re.search(rf"\b{table}\b", statement) for table in GROWING
    )


def _plans_of_sqlite(url: str, statements: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    connection = sqlite3.connect(str(sa.make_url(url).database))
    for text, statement in statements.items():
        lines = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}")]
        scans = [line for line in lines if (match := re.match(r"SCAN (\w+)", line)) and match[1] in GROWING]
        scans = [line for line in scans if PARTIAL.isdisjoint(line.split())]
        is_short = " LIMIT " in statement and " WHERE " not in statement
        is_short = is_short and not any("TEMP B-TREE FOR ORDER" in line for line in lines)
        yield text, [] if is_short else scans
    connection.close()


def _plans_of_postgres(url: str, statements: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    with psycopg.connect(url, autocommit=True) as connection:
        _forget_statistics(connection)
        connection.execute("SET enable_seqscan = off")
        for text, values in statements.items():
            row = connection.execute(f"EXPLAIN (FORMAT JSON) {text}".encode(), values).fetchone()
            assert row is not None
            yield text, list(_scans(row[0][0]["Plan"], limited=False))


def _forget_statistics(connection: psycopg.Connection) -> None:
    """Make the planner assume its default size of a table, whether or not autovacuum has analyzed the few rows."""
    tables = {"tables": sorted(METADATA.tables)}
    for table in METADATA.tables:
        connection.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)".encode())
    connection.execute(
        "UPDATE pg_class SET relpages = 0, reltuples = -1 WHERE oid = ANY (%(tables)s::regclass[])", tables
    )
    connection.execute("DELETE FROM pg_statistic WHERE starelid = ANY (%(tables)s::regclass[])", tables)


def _scans(node: dict[str, Any], *, limited: bool) -> Iterator[str]:
    kind, table = node["Node Type"], node.get("Relation Name")
    if table in GROWING:
        whole_index = kind in ("Index Scan", "Index Only Scan") and "Index Cond" not in node and not limited
        whole_index = whole_index and node["Index Name"] not in PARTIAL
        if kind == "Seq Scan" or whole_index:
            yield f"{kind} of {table} {node.get('Index Name', '')} {node.get('Filter', '')}"
    limited = (limited or kind == "Limit") and kind not in ("Sort", "Aggregate", "Hash")
    for child in node.get("Plans", ()):
        yield from _scans(child, limited=limited)


@pytest.fixture(params=[SQLITE, pytest.param(POSTGRES, marks=pytest.mark.extended)])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(databases, "chosen", request.param)
    return request.param


@pytest.fixture
def harness(kind: str, tmp_path: Path) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path, batch_tenants=("alice",), operator_tenants=("alice",), hold_s=0.01)
    yield new_harness
    close(new_harness)


@pytest.mark.extended
def test_no_route_and_no_sweep_scans_a_growing_table(harness: Harness, tmp_path: Path) -> None:
    database = harness.services.models._db
    recorder = Recorder(_url_of(database, tmp_path))
    recorder.watch(database)
    for operation in OPERATIONS:
        ask_everything(harness, operation.method, operation.path, create_objects(harness))
        database.execute(KEYS.update().values(revoked_at=None))  # one route revokes the key
        # Nothing runs the merges, and a tenant may have eight.
        database.execute(CHECKPOINT_JOBS.update().where(CHECKPOINT_JOBS.c.state == QUEUED).values(state=FAILED))
        harness.services.tenants._refusals.clear()
    services = harness.services
    for path in (
        "dashboard/queue",
        "dashboard/checkpoints?search=a+b",
        "dashboard/timeline?minutes=60",
        "dashboard/machine",
        "dashboard/overview",
        "dashboard/warnings",
    ):
        assert harness.get(path).status_code == 200, path
    for sort in ("created_at", "last_request_at", "base_model", "lora_rank", "state", "model_id"):
        assert harness.get(f"dashboard/runs?sort={sort}&search=a+b&outlines=true").status_code == 200
    assert harness.get("dashboard/runs?filter=lr<1&sort=loss&group=seed&columns=loss&names=true").status_code == 200
    sampler = harness.sampler()
    request_id = harness.ok("asample", sample_request(sampler, 0))["request_id"]
    harness.post("retrieve_future", {"request_id": request_id})
    services.futures.filter_settled([request_id])
    services.sampling_sessions.last_orders([sampler])
    list(DatabaseCounts(database, "here").counts())
    run_engines(database)
    directories = [Directories(tmp_path / name) for name in ("versions", "snapshots")]
    janitor = Janitor(services, Engines(database, "here"), directories[0], directories[1])
    for part in janitor.parts:
        if not part.period_s:  # the sweeps of directories read all rows, once an hour
            part.run()
    janitor._acknowledged.run()
    weak = recorder.weak()
    assert weak == {}, "\n".join(f"WEAK {' '.join(text.split())}: {lines}" for text, lines in weak.items())


def ask_everything(harness: Harness, method: str, path: str, ids: RouteObjects) -> None:
    """Send a request with its own objects, and with each filter."""
    body, headers = BODIES.get(path, lambda _ids: {})(ids), {"X-API-Key": ALICE}
    query = QUERIES.get(path, "") or LISTING_QUERIES.get(path, "")
    url = url_of(ids.fill(path.replace("{sampler}", "sampler-0-x") + query))
    if isinstance(body, bytes):
        harness.client.request(method, url, content=body, headers=headers | {"Content-Type": PROTO_TYPE})
    else:
        harness.client.request(method, url, json=body, headers=headers, follow_redirects=False)
    for filtered, filter_ in FILTERS:
        if filtered == path:
            value = fill_ids(filter_, ids)
            if isinstance(value, dict):
                harness.client.post(url_of(path), json=value, headers=headers)
            else:
                harness.client.get(url_of(path) + str(value), headers=headers)


def run_engines(database: Database) -> None:
    """Lease, heartbeat and expiry of an engine."""
    engines, seat = Engines(database, "here"), Seat(BASE)
    lease = engines.take(seat, 60.0)
    assert engines.renew(lease, 60.0)
    with database.write() as connection:
        fence(lease)(connection)
    ownership = Ownership(database, BASE, lease.engine_id, 1.0)
    ownership.incoming(0)
    ownership.pending_ids()
    engines.queue_state(BASE)
    engines.cannot_start(BASE)
    engines.release(seat, "stopped")


def test_no_statement_of_an_engine_scans_a_growing_table(kind: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path, tmp_path / "sockets")
    recorder = Recorder(_url_of(bench.db, tmp_path))
    recorder.watch(bench.db)
    model = bench.model()
    steps: list[Callable[[], object]] = [
        lambda: bench.train(model, 1),
        lambda: bench.step(model, 2),
        lambda: bench.submit(model, 3, "save_weights", {"path": "one"}),
        lambda: bench.sample(bench.publish(model, 4, 0)),
        lambda: bench.submit(model, 5, "load_weights", {"path": f"tinker://{model}/weights/one"}),
        lambda: bench.submit(model, None, "unload_model", {}),
    ]
    for step in steps:
        step()
        bench.run_until_idle()
    bench.restart()
    bench.run_until_idle()
    bench.close()
    weak = recorder.weak()
    assert weak == {}, "\n".join(f"WEAK {' '.join(text.split())}: {lines}" for text, lines in weak.items())


def test_a_scan_is_found(kind: str, tmp_path: Path) -> None:
    database = open_database(databases.fresh_url(tmp_path))
    recorder = Recorder(_url_of(database, tmp_path))
    recorder.watch(database)
    scan = "SELECT count(*) FROM futures WHERE tenant_id <> 'a' AND kind = 'sample' AND num_tokens > 3"
    whole_index = "SELECT request_id FROM futures ORDER BY arrival"
    with database.read() as connection:
        for index in range(21):
            connection.exec_driver_sql(f"SELECT arrival AS a{'x' * index} FROM futures WHERE request_id = 'x'")
        connection.exec_driver_sql(scan)
        connection.exec_driver_sql(whole_index)
        connection.exec_driver_sql(f"{whole_index} LIMIT 10")
    database.close()
    weak = recorder.weak()
    assert len(weak) == 2 and not any("LIMIT" in text for text in weak)


def _url_of(database: Database, tmp_path: Path) -> str:
    """The URL of a database, for this test's own connections."""
    if isinstance(database, SQLiteDatabase):
        return database.url
    with database.read() as connection:
        return databases.postgres.shared_server().url(str(connection.scalar(sa.text("SELECT current_database()"))))
