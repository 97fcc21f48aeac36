"""The cost of an operation does not depend on the history: no statement scans it. SQLite reports its query plan
(EXPLAIN QUERY PLAN) and the virtual-machine steps of a statement. Steps are counted instead of time, so busy machines
do not matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from support import databases
from support.http_harness import BASE, BOB, Harness, close, make_harness, pass_bytes, sample_request, send_pass
from tinsmith.auth.quotas import QuotaLimits
from tinsmith.cluster.engines import Engines
from tinsmith.cluster.ownership import Ownership
from tinsmith.db.database import Database, now
from tinsmith.db.schema import AUDIT, CHECKPOINTS, ENGINES, FUTURES, MODELS, RESULTS, SAMPLERS, SESSIONS, USAGE
from tinsmith.server.janitor import Janitor
from tinsmith.storage.directories import Directories
from tinsmith.store import usage
from tinsmith.store.audit import PREFIXES
from tinsmith.store.futures import SampleCost, Settlement

LONG_AGO = now() - 30 * 86400
HISTORY = 3000
STEPS = 10  # of the virtual machine, between two looks

# Tables that grow with history, and columns that alone are too unselective for a search.
GROWING = ("futures", "future_bodies", "future_results", "sessions", "models", "samplers", "checkpoints", "audit")
TOO_MANY = {
    "futures": ("base_model=?", "tenant_id=?"),
    "sessions": ("state=?", "closed_at<?"),
}


@dataclass
class StatementWatch:
    """Records the statements sent to SQLite, and their steps."""

    statements: dict[str, object] = field(default_factory=dict)
    steps: int = 0

    def step(self) -> int:
        self.steps += STEPS
        return 0

    def on_connect(self, dbapi_connection: sa.engine.interfaces.DBAPIConnection, _record: object) -> None:
        dbapi_connection.set_progress_handler(self.step, STEPS)  # type: ignore[attr-defined]

    def on_statement(self, *arguments: object) -> None:
        self.statements.setdefault(str(arguments[2]), arguments[3])


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    if databases.chosen != databases.SQLITE:
        pytest.skip("steps and plans are SQLite's")
    limits = QuotaLimits(queued_requests=100_000, models=1000, checkpoint_bytes=10**9, tokens_per_minute=10**9)
    new_harness = make_harness(tmp_path, hold_s=0.01, limits=limits)
    yield new_harness
    close(new_harness)


@pytest.fixture
def statement_watch(harness: Harness) -> StatementWatch:
    watch = StatementWatch()
    engine = database(harness).engine
    event.listen(engine, "connect", watch.on_connect)
    event.listen(engine, "before_cursor_execute", watch.on_statement)
    engine.dispose()  # so that every connection is a new one
    return watch


def database(harness: Harness) -> Database:
    return harness.services.models._db


class Workload:
    """One client's requests, and the work of the engine and the janitor; each can be repeated."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.session = harness.session()
        self.model = harness.model(self.session)
        self.sampler = harness.sampler(self.session)
        self.seq_id = 0
        services = harness.services
        versions, snapshots = (Directories(services.settings.data_dir / name) for name in ("versions", "snapshots"))
        self.janitor = Janitor(services, Engines(database(harness), "here"), versions, snapshots)
        for part in self.janitor.parts:
            if part.period_s:  # once an hour, over the checkpoints that exist
                part.next_at = float("inf")
        with database(harness).write() as connection:
            row = {"pid": 0, "state": "ready", "started_at": 0.0}
            names = (BASE, "local/other")
            connection.execute(ENGINES.insert(), [{"base_model": name, "engine_id": name} | row for name in names])

    def train(self) -> None:
        self.seq_id += 1
        request_id = send_pass(self.harness, pass_bytes(self.model, self.seq_id)).json()["request_id"]
        self.harness.post("retrieve_future", {"request_id": request_id})
        self._work(Settlement(request_id, body=b"{}", keep_body=True))
        self.harness.result(request_id)

    def sample(self) -> None:
        self.seq_id += 1
        request_id = self.harness.ok("asample", sample_request(self.sampler, self.seq_id))["request_id"]
        self._work(Settlement(request_id, body=b"{}", cost=SampleCost(2, 0, 6)))
        self.harness.result(request_id)

    def _work(self, settlement: Settlement) -> None:
        futures = self.harness.services.futures
        ownership = Ownership(database(self.harness), BASE, "engine-0")
        (arrived,) = ownership.named([settlement.request_id])
        incoming = ownership.incoming(arrived.request.arrival - 1)
        assert [arrival.request.request_id for arrival in incoming] == [settlement.request_id]
        assert ownership.pending_ids() == {settlement.request_id}
        futures.bodies([settlement.request_id])
        applied = {self.model: self.seq_id} if settlement.keep_body else {}
        futures.settle([settlement], applied)

    def poll_for_lost(self) -> None:
        self.harness.services.futures.settled_among([f"{self.sampler}:{seq_id}" for seq_id in range(50)])
        self.harness.services.sampling_sessions.last_orders([self.sampler])

    def follow(self) -> None:
        target = {"type": "sampling_session", "sampling_session_id": self.sampler}
        (last,) = self.harness.services.sampling_sessions.last_orders([self.sampler]).values()
        self.harness.ok("retrieve_futures", {"target": target, "prev_cursor": (last or 1) - 1})

    def connect(self) -> None:
        session_id = self.harness.session()
        self.harness.ok("session_heartbeat", {"session_id": session_id})
        self.harness.model(session_id)
        self.harness.sampler(session_id)

    def snapshot(self) -> None:
        self.harness.services.futures.log_of(self.model, self.seq_id - 1, self.seq_id)
        self.harness.services.models.record_snapshot(self.model, self.seq_id, f"snapshot-{self.seq_id}")

    def sweep(self) -> None:
        self.janitor.sweep()

    def clean_up(self) -> None:
        self.harness.ok("cleanup_futures", {"max_age_hours": 2})

    def late(self) -> None:
        """The reads of an engine, once a second."""
        self.harness.services.futures.refused_of(self.model, self.seq_id)

    def ask_usage(self) -> None:
        hour = now() // usage.HOUR_S * usage.HOUR_S
        self.harness.services.usage.rows("alice", hour, hour + usage.HOUR_S)
        self.harness.services.audit.entries("alice", sorted(PREFIXES)[0], now() - 60, now())

    def list_pages(self) -> None:
        assert self.harness.get("sessions?limit=20").status_code == 200
        for path in ("training_runs", "checkpoints"):  # these return a total, so they count the tenant's rows
            assert self.harness.get(f"{path}?limit=20", BOB).status_code == 200
        self.harness.ok("sessions/search", {"limit": 20})

    def all(self) -> dict[str, Callable[[], None]]:
        actions = (self.train, self.sample, self.poll_for_lost, self.follow, self.connect, self.snapshot, self.sweep)
        actions += (self.clean_up, self.late, self.ask_usage, self.list_pages)
        return {action.__name__: action for action in actions}


def add_history(harness: Harness, workload: Workload, first: int) -> None:
    """Add ended sessions, and results of the open session."""
    indices = range(first, first + HISTORY)
    rows: dict[sa.Table, list[dict[str, object]]] = {table: [] for table in (SESSIONS, MODELS, SAMPLERS, CHECKPOINTS)}
    rows |= {FUTURES: [], RESULTS: [], AUDIT: [], USAGE: []}
    for index in indices:
        tenant = {"tenant_id": "alice"}
        session_id = f"old-{index}"
        whose = tenant | {"session_id": session_id, "created_at": LONG_AGO + index}
        ending = {"ended_at": LONG_AGO, "closed_at": LONG_AGO, "forgotten_at": LONG_AGO}
        rows[SESSIONS].append(
            whose | ending | {"state": "expired", "reason": "gone", "tags": [], "last_heartbeat_at": LONG_AGO}
        )
        lora = {
            "base_model": BASE,
            "lora_rank": 4,
            "train_attn": True,
            "train_mlp": True,
            "train_unembed": True,
            "lora_alpha": 32.0,
        }
        lora |= {"optimizer_type": "adamw"}
        model = {"model_id": f"{session_id}:train:0", "applied_seq_id": 7, "last_request_at": LONG_AGO}
        rows[MODELS].append(whose | lora | model | {"state": "unloaded", "reason": "gone"})
        rows[SAMPLERS].append(whose | {"sampling_session_id": f"{session_id}:sample:0", "base_model": BASE})
        checkpoint = {"training_run_id": f"{session_id}:train:0", "kind": "weights", "name": "a", "public": False}
        checkpoint |= {"state": "completed", "directory": session_id, "size_bytes": 1, "created_at": LONG_AGO}
        rows[CHECKPOINTS].append(
            lora | checkpoint | {"tenant_id": "carol", "expires_at": now() + 86400 if index % 2 else None}
        )
        rows[AUDIT].append(tenant | {"event": "session_expired", "details": {}, "created_at": now() - 3600})
        rows[USAGE].append({"bucket_start": LONG_AGO, "session_id": session_id, "base_model": BASE, "type": "training"})
        rows[USAGE][-1] |= {"tenant_id": "alice", "quantity": 1}
        rows[FUTURES] += _futures(workload, index)
        rows[RESULTS].append({"request_id": f"{workload.sampler}:{10**6 + index}", "body": b"{}"})
    with database(harness).write() as connection:
        for table, table_rows in rows.items():
            connection.execute(table.insert(), table_rows)


def _futures(workload: Workload, index: int) -> Iterator[dict[str, object]]:
    shared = {"tenant_id": "alice", "session_id": workload.session, "base_model": BASE, "num_tokens": 3}
    shared |= {"created_at": LONG_AGO, "settled_at": LONG_AGO, "model_id": None, "sampling_session_id": None}
    seq_id = 10**6 + index
    sampled = {"sampling_session_id": workload.sampler, "seq_id": seq_id, "settle_order": -index, "state": "done"}
    yield shared | sampled | {"kind": "sample", "request_id": f"{workload.sampler}:{seq_id}"}
    for state, seq_id in (("done", -2 * index), ("refused", -2 * index - 1)):
        trained = {"model_id": workload.model, "seq_id": seq_id, "kind": "forward_backward", "state": state}
        yield shared | trained | {"request_id": f"{workload.model}:{seq_id}", "settle_order": None}


def test_the_cost_of_a_request_does_not_grow_with_history(harness: Harness, statement_watch: StatementWatch) -> None:
    workload = Workload(harness)
    costs: list[dict[str, int]] = []
    for round_ in range(2):
        add_history(harness, workload, 1 + round_ * HISTORY)
        for operation in workload.all().values():  # values that are cached for some seconds are not read again
            operation()
        costs.append({})
        for name, operation in workload.all().items():
            statement_watch.steps = 0
            operation()
            costs[-1][name] = statement_watch.steps
    grown = {name: (cost, costs[1][name]) for name, cost in costs[0].items() if costs[1][name] > cost + HISTORY / 4}
    assert grown == {}, "steps of SQLite with some history, and with twice as much"


def test_every_statement_finds_its_rows_by_an_index(harness: Harness, statement_watch: StatementWatch) -> None:
    workload = Workload(harness)
    for operation in (*workload.all().values(), *workload.all().values()):
        operation()
    checked = {
        statement: parameters for statement, parameters in statement_watch.statements.items() if _reads(statement)
    }
    assert len(checked) > 30
    weak = {
        statement: details
        for statement, parameters in checked.items()
        if (details := [line for line in plan_of(harness, statement, parameters) if _is_weak(line)])
    }
    assert weak == {}


def _reads(statement: str) -> bool:
    return statement.startswith(("SELECT", "UPDATE", "DELETE", "WITH"))


def plan_of(harness: Harness, statement: str, parameters: object) -> Sequence[str]:
    with database(harness).engine.connect() as connection:
        return [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]  # type: ignore[arg-type]


def _is_weak(line: str) -> bool:
    """Whether a line of a plan is a scan of all rows, or of all rows of a tenant or a base model."""
    match = re.match(r"(SCAN|SEARCH) (\w+)(?:.*\((.*)\))?", line)
    if match is None:
        return False
    how, table, condition = match.groups()
    if table not in GROWING:
        return False
    return how == "SCAN" or condition in TOO_MANY.get(table, ())
