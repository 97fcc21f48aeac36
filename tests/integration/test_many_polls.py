"""Many concurrent long polls: their cost, and that those of disconnected clients are released."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from sqlalchemy import event

from support.databases import fresh_url
from support.http_harness import ALICE, Harness, close, make_harness, sample_request
from support.live import API_KEY, LiveServer, serving
from support.raw_client import RawClient, connect
from tinsmith.db.database import Database
from tinsmith.db.factory import open_database
from tinsmith.db.wakeups import Waiters
from tinsmith.errors import UserError
from tinsmith.server.process import MIN_OPEN_FILES, wake_missed
from tinsmith.store.futures import Futures, NewFuture, Settlement
from tinsmith.store.sampling_sessions import NewSamplingSession, SamplingSessions

SAMPLER = "s:sample:0"
POLLS = 1000


def new(seq_id: int, sampler: str = SAMPLER) -> NewFuture:
    return NewFuture(f"{sampler}:{seq_id}", "alice", "s", "base", "sample", b"{}", 0, None, sampler, seq_id)


# Wake-ups that were lost.


def test_a_lost_wake_up_is_repaired_for_settled_requests_only(db: Database) -> None:
    futures, samplers, waiters = Futures(db), SamplingSessions(db), Waiters()
    names = [f"s:sample:{index}" for index in range(3)]
    for name in names:
        samplers.create(NewSamplingSession(name, "s", "alice", "base"))
        futures.submit(new(0, name))
        futures.submit(new(1, name))

    async def run() -> None:
        with contextlib.ExitStack() as polls:
            single = {name: polls.enter_context(waiters.watch(f"{name}:0")) for name in names}
            session_events = {name: polls.enter_context(waiters.watch_session(name)) for name in names}

            async def woken() -> list[str]:
                nonlocal orders
                orders = await wake_missed(waiters, futures, samplers, orders)
                woken_names = [name for name in names if single[name].is_set()]
                woken_names += [f"all of {name}" for name in names if session_events[name].is_set()]
                for event in (*single.values(), *session_events.values()):
                    event.clear()
                return woken_names

            orders: dict[str, int | None] = {}
            assert await woken() == []
            futures.settle([Settlement(f"{names[0]}:0", b""), Settlement(f"{names[1]}:1", b"")], {})
            assert await woken() == [names[0], f"all of {names[0]}", f"all of {names[1]}"]
            assert await woken() == [names[0], f"all of {names[0]}"], "again, who has not gone to look"
            futures.submit(new(2, names[2]), UserError("no"))
            assert f"all of {names[2]}" in await woken()

    asyncio.run(run())


def test_ten_thousand_held_polls_are_looked_after_with_a_few_questions(tmp_path: Path) -> None:
    database = open_database(fresh_url(tmp_path))
    futures, samplers, waiters = Futures(database), SamplingSessions(database), Waiters()
    statements: list[str] = []
    event.listen(database.engine, "before_cursor_execute", lambda *args: statements.append(args[2]))

    async def run() -> float:
        with contextlib.ExitStack() as polls:
            for index in range(10_000):
                polls.enter_context(waiters.watch(f"{SAMPLER}:{index}"))
            started = time.process_time()
            await wake_missed(waiters, futures, samplers, {})
            return time.process_time() - started

    spent_s = asyncio.run(run())
    assert len([statement for statement in statements if statement.startswith("SELECT")]) <= 20
    assert spent_s < 0.5
    database.close()


# Clients that disconnect.


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    new_harness = make_harness(tmp_path, hold_s=20)
    yield new_harness
    close(new_harness)


@pytest.mark.parametrize("path", ["retrieve_future", "retrieve_futures"])
def test_a_poll_ends_when_its_client_goes(harness: Harness, path: str) -> None:
    sampler = harness.sampler()
    request_id = harness.ok("asample", sample_request(sampler))["request_id"]
    body = json.dumps({"request_id": request_id, "target": {"sampling_session_id": sampler}}).encode()
    statuses: list[int] = []

    async def run() -> float:
        received = asyncio.Queue[dict[str, object]]()
        received.put_nowait({"type": "http.request", "body": body, "more_body": False})

        async def send(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])  # type: ignore[arg-type]

        headers = [(b"x-api-key", ALICE.encode()), (b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
        scope = {"type": "http", "method": "POST", "path": f"/api/v1/{path}", "headers": headers, "query_string": b""}
        scope |= {"raw_path": b"", "root_path": "", "scheme": "http", "http_version": "1.1", "app": harness.app}
        polling = asyncio.create_task(harness.app(scope, received.get, send))  # type: ignore[arg-type]
        while len(harness.services.waiters) == 0:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        started = time.monotonic()
        received.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(polling, 10)
        return time.monotonic() - started

    assert asyncio.run(run()) < 5
    assert statuses == [499] and len(harness.services.waiters) == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (POLLS // 4, hard))  # the server inherits the limit and must raise it
    with serving(tmp_path_factory.mktemp("polls") / "data", "--backend", "fake") as live:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * POLLS)), hard))
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[RawClient]:
    raw_client = connect(server)
    yield raw_client
    raw_client.http.close()


def hold(server: LiveServer, path: str, body: object) -> socket.socket:
    """Open a connection with a pending poll."""
    address = urlsplit(server.url)
    content = json.dumps(body).encode()
    head = (
        f"POST /api/v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {API_KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection = socket.create_connection((str(address.hostname), int(address.port or 0)))
    connection.sendall(head.encode() + content)
    return connection


def open_files(server: LiveServer) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return met


@pytest.mark.extended
def test_a_thousand_clients_that_vanish_leave_nothing_and_the_next_is_answered_at_once(
    server: LiveServer, client: RawClient
) -> None:
    model = client.model()
    waiting = client.step(model, 2)  # for its predecessor, which has not arrived
    before = open_files(server)
    connections = [hold(server, "retrieve_future", {"request_id": waiting}) for _ in range(POLLS)]
    half_sent = [socket.create_connection(connections[0].getpeername()) for _ in range(50)]
    for connection in half_sent:
        connection.sendall(b"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-")
    assert client.steps_taken(client.step(client.model(), 1)) == 1, "the server answers beside them"
    assert within(20, lambda: open_files(server) >= before + POLLS)
    for connection in (*connections, *half_sent):
        connection.close()
    assert within(20, lambda: open_files(server) <= before + 10), "long before the polls would have ended"
    client.step(model, 1)
    assert client.steps_taken(waiting) == 2


@pytest.mark.extended
def test_a_server_that_may_open_few_files_says_so() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, {limits}); "
    code += "from tinsmith.server.process import raise_file_limit; raise_file_limit(); "
    code += "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    for hard, is_warned in ((MIN_OPEN_FILES - 1, True), (MIN_OPEN_FILES, False)):
        completed = subprocess.run(
            [sys.executable, "-c", code.format(limits=(100, min(hard, limits[1])))],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert ("raise the limit of open files" in completed.stdout + completed.stderr) is is_warned
        assert f"({hard}, {hard})" in completed.stdout


@pytest.mark.extended
def test_every_poll_for_one_future_is_answered_when_it_settles(server: LiveServer, client: RawClient) -> None:
    model = client.model()
    waiting = client.step(model, 2)
    connections = [hold(server, "retrieve_future", {"request_id": waiting}) for _ in range(200)]
    client.step(model, 1)
    for connection in connections:
        connection.settimeout(20)
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
        connection.close()
