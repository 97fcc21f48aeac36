"""Thousands of broken requests of every route to a live server, while another tenant trains on it.

Each is a valid request with one thing changed (`mutations`). The server answers each with a message, without a server
error or a secret. Neither the server nor its engine dies, and the other tenant's results are bit-identical to those of
an idle server.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from attack.given import REQUESTS, SEED
from attack.judging import LEAKS, Judge, names_in
from attack.mutations import Broken, broken
from attack.sending import Answer, Request, send
from attack.valid import ENDS, NEVER_200, World, new_world, request_of
from fault.crash.killing import processes_below
from fault.crash.restarted_server import RestartedServer, keep_server_running
from fault.crash.runs import DEPRECATED, Plan, Record, run_all
from support.raw_client import resident_bytes
from tinsmith.auth.keys import Keys
from tinsmith.db.factory import open_database

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(DEPRECATED), pytest.mark.timeout(0)]

MIB = 1 << 20
NEIGHBOUR = (Plan("ann", 4, "cross_entropy", 1, rate=1e-3, patience_s=600.0),)
ATTACKER = "bob"
ROUND = 250
"""Requests between two renewals of the attacker's objects, which some requests delete."""
HANGS_S = 60.0
GROWS_AT_MOST = 400 * MIB
METRICS_TOKEN = "token-of-the-operator"
SETTINGS = {
    "metrics_token": METRICS_TOKEN,
    "hold_s": "1",
    "batch_tenants": '["bob"]',
    "operator_tenants": '["bob"]',
    "max_body_bytes": str(32 * MIB),
}


def say(text: str) -> None:
    print(text, flush=True)


class Neighbour:
    """Train repeatedly and compare the results."""

    def __init__(self, server: RestartedServer, undisturbed: dict[str, Record]) -> None:
        self.runs, self.different = 0, 0
        self.failure: Exception | None = None
        self._server, self._undisturbed = server, undisturbed
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set() and self.failure is None:
            try:
                self.different += run_all(self._server, NEIGHBOUR) != self._undisturbed
                self.runs += 1
            except Exception as error:  # noqa: BLE001 - the test fails with it
                self.failure = error


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestartedServer]:
    with keep_server_running(tmp_path_factory.mktemp("requests") / "data", "--deterministic", **SETTINGS) as new_server:
        yield new_server


@pytest.fixture(scope="module")
def document(server: RestartedServer) -> dict:
    return httpx.get(f"{server.url}/openapi.json", timeout=30).json()


def routes_of(document: dict) -> dict[str, list[str]]:
    """The content types that each route takes."""
    return {
        f"{method.upper()} {path}": list(operation.get("requestBody", {}).get("content", {}))
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }


def judge_of(document: dict, secrets: list[str]) -> Judge:
    operations = {
        f"{method.upper()} {path}": operation
        for path, of_path in document["paths"].items()
        for method, operation in of_path.items()
    }
    declared = {label: {int(status) for status in spec["responses"]} for label, spec in operations.items()}
    fields = {label: names_in(spec.get("requestBody"), document) for label, spec in operations.items()}
    return Judge(declared, fields, secrets)


def make_key(server: RestartedServer) -> str:
    database = open_database(server.database_url)
    try:
        return Keys(database).create(ATTACKER)[1]
    finally:
        database.close()


def world_of(server: RestartedServer) -> World:
    return new_world(server.url, server.keys[ATTACKER], lambda: make_key(server), METRICS_TOKEN)


def ask(server: RestartedServer, request: Request) -> Answer:
    parts = urlsplit(server.url)
    return send((str(parts.hostname), int(parts.port or 0)), request, HANGS_S)


def in_order(labels: list[str]) -> list[str]:
    """Order the routes so that those that delete objects come last."""
    return sorted(labels, key=lambda label: bool(ENDS.search(label)))


def test_a_valid_request_of_every_route_is_answered(server: RestartedServer, document: dict) -> None:
    """Every request is valid before its mutation."""
    world, routes = world_of(server), routes_of(document)
    wrong = []
    for label in in_order(list(routes)):
        answer = ask(server, request_of(label, routes[label], world))
        expected = range(400, 500) if label in NEVER_200 else range(200, 400)
        if answer.status not in expected:
            wrong.append(f"{label}: {answer.status} {answer.body[:300]!r}")
    assert not wrong, "\n".join(wrong)


def attack(server: RestartedServer, document: dict, judge: Judge) -> Counter[tuple[int, str]]:
    """Count the answers by kind of request and status."""
    rng = random.Random(SEED)
    routes = routes_of(document)
    answers: Counter[tuple[int, str]] = Counter()
    waiting: list[str] = []
    num_sent = num_shown = 0
    while num_sent < REQUESTS:
        world = world_of(server)
        while len(waiting) < ROUND:
            waiting += rng.sample(list(routes), len(routes))
        labels, waiting = waiting[:ROUND], waiting[ROUND:]
        for label in in_order(labels)[: REQUESTS - num_sent]:
            num_sent += 1
            tried = broken(request_of(label, routes[label], world), rng)
            answers[one(server, judge, tried).status, tried.kind] += 1
        say("\n".join([f"  {num_sent} requests, {len(judge.faults)} faults", *judge.faults[num_shown:]]))
        num_shown = len(judge.faults)
    return answers


def one(server: RestartedServer, judge: Judge, tried: Broken) -> Answer:
    try:
        answer = ask(server, tried.request)
    except TimeoutError:
        answer = Answer(0, b"", HANGS_S)
    judge.look(tried, answer)
    return answer


def test_no_broken_request_breaks_a_server(server: RestartedServer, document: dict) -> None:
    say(f"\nseed {SEED}, {REQUESTS} requests")
    undisturbed = run_all(server, NEIGHBOUR)
    before = processes_below(os.getpid())
    main = [pid for pid, kind in before.items() if kind in ("server", "engine")]
    judge = judge_of(document, [*server.keys.values(), METRICS_TOKEN, str(server.data_dir)])
    neighbour = Neighbour(server, undisturbed)
    started, sizes = time.monotonic(), [resident_bytes(pid) for pid in main]
    try:
        answers = attack(server, document, judge)
    finally:
        neighbour.stop()
    grown = [after - was for after, was in zip((resident_bytes(pid) for pid in main), sizes, strict=True)]
    statuses: Counter[int] = Counter()
    for (status, _), count in answers.items():
        statuses[status] += count
    say(f"{sum(statuses.values())} answers in {time.monotonic() - started:.0f} s: {dict(sorted(statuses.items()))}")
    say(f"the other tenant: {neighbour.runs} runs, {neighbour.different} different; grown by {grown} bytes")
    assert len(judge.faults) == 0, "they are printed above"
    assert neighbour.failure is None and not neighbour.different, neighbour.failure
    assert server.deaths == 0
    assert set(main) <= set(processes_below(os.getpid())), "a process ended"
    assert max(grown) < GROWS_AT_MOST
    assert "unexpected error" not in server.log()
    assert "Traceback" not in server.log()


def test_stored_broken_requests_failed_as_user_errors(server: RestartedServer) -> None:
    """After the last test: no accepted request made an engine fail."""
    failed = server.rows(
        f"SELECT request_id, category, error FROM futures WHERE tenant_id = '{ATTACKER}' "
        "AND state IN ('failed', 'refused')"
    )
    say(f"\n{len(failed)} stored requests failed: {dict(Counter(category for _, category, _ in failed))}")
    assert not [row for row in failed if row[1] != "user" or LEAKS.search(row[2])]


def test_no_log_holds_a_key(server: RestartedServer) -> None:
    for path in [server.data_dir / "server.log", *(server.data_dir / "logs").rglob("*")]:
        if Path(path).is_file():
            text = path.read_text(errors="replace")
            assert not [tenant for tenant, key in server.keys.items() if key in text], path.name
