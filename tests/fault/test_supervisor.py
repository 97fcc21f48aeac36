"""Processes that are stopped, killed or cannot start: what clients see, and that no process remains."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from support.databases import fresh_url
from support.live import API_KEY, LiveServer, free_port, freeze, serving
from support.raw_client import BASE, RawClient, connect, engine_of, is_alive, wait_until_gone
from tinsmith.base_models import Bases
from tinsmith.cluster.engines import Engines, Seat, holder_of
from tinsmith.cluster.supervisor import Supervisor, last_error
from tinsmith.db.factory import open_database
from tinsmith.settings import Settings
from tinsmith.types import ModelShape

SHAPE = ModelShape("local/tiny", "/no/such/model", 50, 16, "Tiny")
AT_ONCE_S = 15.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(
        tmp_path_factory.mktemp("supervised") / "data", "--backend", "fake", settings={"HOLD_S": "0.2"}
    ) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[RawClient]:
    raw_client = connect(server)
    yield raw_client
    raw_client.http.close()


# Polls, and an engine that dies.


def test_a_poll_ends_in_time_and_says_that_the_engine_is_down(server: LiveServer, client: RawClient) -> None:
    model = client.model()
    engine = engine_of(server)
    freeze(engine, server.data_dir)  # a request that is still pending
    request_id = client.step(model, 1)
    started = time.monotonic()
    answer = client.post("retrieve_future", {"request_id": request_id})
    assert 0.2 <= time.monotonic() - started < AT_ONCE_S
    expected = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    assert (answer.status_code, answer.json()) == (408, expected)
    os.kill(engine, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while (answer := client.post("retrieve_future", {"request_id": request_id})).status_code == 408:
        if answer.json()["queue_state"] == "paused_capacity":
            assert "the engine of tinsmith/nano is" in answer.json()["queue_state_reason"]
            break
        assert time.monotonic() < deadline
    else:  # the pause before a restart is twice the duration of a poll
        raise AssertionError("the engine was back before it was missed")
    assert client.steps_taken(request_id) == 1, "the same request succeeds once the engine is back"


def test_requests_are_taken_while_the_engine_is_down(server: LiveServer, client: RawClient) -> None:
    model = client.model()
    engine = engine_of(server)
    os.kill(engine, signal.SIGKILL)
    started = time.monotonic()
    ids = [client.step(model, seq_id) for seq_id in range(1, 21)]
    assert time.monotonic() - started < AT_ONCE_S
    assert client.steps_taken(ids[-1]) == 20


# The end of a server.


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_stopping_server_answers_its_polls_and_leaves_no_process(tmp_path: Path, how: signal.Signals) -> None:
    with serving(tmp_path / "data", "--backend", "fake") as server:
        client = connect(server)
        request_id = client.step(client.model(), 2)  # waits for its predecessor
        engine = engine_of(server)
        answers: list[httpx.Response] = []
        polls = [
            threading.Thread(
                target=lambda: answers.append(connect(server).post("retrieve_future", {"request_id": request_id}))
            )
            for _ in range(4)
        ]
        for poll in polls:
            poll.start()
        deadline = time.monotonic() + 20
        while "tinsmith_held_polls 4.0" not in httpx.get(f"{server.url}/metrics", timeout=20).text:
            assert time.monotonic() < deadline, "the polls are not held"
            time.sleep(0.05)
        started = time.monotonic()
        assert server.stop(how) == 0
        assert time.monotonic() - started < AT_ONCE_S
        for poll in polls:
            poll.join()
        assert [answer.status_code for answer in answers] == [408] * 4
        assert not is_alive(engine)
    log = next((tmp_path / "data" / "logs").glob("engine-*.log")).read_text()
    assert "Fatal Python error" not in log and "Traceback" not in log, log


def test_an_engine_does_not_outlive_a_server_that_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path / "data", "--backend", "fake") as server:
        engine = engine_of(server)
        server.stop(signal.SIGKILL)
        has_ended = wait_until_gone(engine)
        if not has_ended:
            os.kill(engine, signal.SIGKILL)
        assert has_ended


def test_a_new_engine_waits_until_the_one_of_a_killed_server_is_gone(tmp_path: Path) -> None:
    settings = {"HOLD_S": "1"}
    with serving(tmp_path / "data", "--backend", "fake", settings=settings) as first:
        client = connect(first)
        model = client.model()
        old = engine_of(first)
        freeze(old, first.data_dir)  # as if in the middle of a long step
        request_id = client.step(model, 1)
        first.stop(signal.SIGKILL)
    try:
        with serving(tmp_path / "data", "--backend", "fake", settings=settings) as second:
            client = connect(second)
            time.sleep(1.5)  # an engine that did not wait would have started by now
            answer = client.post("retrieve_future", {"request_id": request_id})
            assert (answer.status_code, answer.json()["queue_state"]) == (408, "paused_capacity")
            os.kill(old, signal.SIGCONT)
            assert client.steps_taken(request_id) == 1
            assert client.steps_taken(client.step(model, 2)) == 2, "the two engines took the first step once"
            assert wait_until_gone(old)
    finally:
        if is_alive(old):
            os.kill(old, signal.SIGKILL)


@pytest.mark.timeout(400)
def test_requests_of_an_engine_that_cannot_be_started_fail_with_the_reason(tmp_path: Path) -> None:
    """The model's code raises at import, so every restart fails; clients receive the error and do not wait for ever."""
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    secret = "postgresql://someone:hunter2@127.0.0.1/x"
    (broken / "__init__.py").write_text(f"raise ImportError('no libcudart.so at {secret}')\n")
    path = os.pathsep.join(filter(None, (str(broken.parent), os.environ.get("PYTHONPATH"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        with serving(tmp_path / "data", "--backend", "torch", settings={"HOLD_S": "0.5"}) as server:
            client = connect(server)
            session_id = client.session()
            sampler = client.sampler(session_id)
            body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
            created = client.ok("create_model", body)["request_id"]
            sample = {"sampling_session_id": sampler, "seq_id": 1, "num_samples": 1}
            sample |= {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}, "sampling_params": {}}
            request_id = client.ok("asample", sample)["request_id"]
            answer = client.post("retrieve_future", {"request_id": created})
            deadline = time.monotonic() + 150  # five starts
            while answer.status_code == 408:
                assert time.monotonic() < deadline, answer.text
                answer = client.post("retrieve_future", {"request_id": created})
            answer = answer.json()
            assert answer["category"] == "server" and "it cannot be started" in answer["error"]
            assert "ImportError: no libcudart.so at postgresql://***127.0.0.1/x" in answer["error"]
            assert "hunter2" not in answer["error"] and "Traceback" not in answer["error"]
            target = {"type": "sampling_session", "sampling_session_id": sampler}
            polled = client.ok("retrieve_futures", {"target": target, "timeout": 0.2})["completions"]
            assert polled == [{"state": "failed", "request_id": request_id}]
            chat = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
            said = httpx.post(
                f"{server.url}/v1/chat/completions", json=chat, headers={"X-API-Key": API_KEY}, timeout=90
            )
            assert said.status_code >= 500 and "ImportError" in said.json()["error"]["message"]
            health = httpx.get(f"{server.url}/healthz", timeout=20)
            assert health.status_code == 503 and BASE in health.json()["reason"]
            assert "ImportError" not in health.text and "postgresql" not in health.text, "everyone may read it"
            details = httpx.get(f"{server.url}/api/v1/operator/health", headers={"X-API-Key": API_KEY}, timeout=20)
            assert "ImportError" in details.json()["engines"][0]["reason"] and "hunter2" not in details.text
            broken.rename(tmp_path / "away")  # after the repair the same requests are served
            deadline = time.monotonic() + 150  # the next start, which loads torch
            while "model_id" not in (said := client.post("retrieve_future", {"request_id": created})).json():
                assert time.monotonic() < deadline, said.text
                time.sleep(0.5)
            client.result(request_id)


def test_the_error_that_is_shown_of_a_log_is_its_last_one(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    assert last_error(path) == ""
    path.write_text("Traceback (most recent call last):\n  File x\nValueError: one\n2026 ready\n")
    assert last_error(path) == "ValueError: one"
    lines = ["a.b.OperationalError: (x) token=abc; password=p at s3://key:pw@host/x", "  raise KeyError: no"]
    path.write_text("\n".join(lines))
    assert last_error(path) == "a.b.OperationalError: (x) ***; *** at s3://***host/x"
    path.write_text("RuntimeError: " + "x" * 1000)
    assert len(last_error(path)) == 300


# A server that cannot start.


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tinsmith.cli", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--port", "{taken}"), "cannot listen on"),
        (("--model", "/no/such/directory"), "/no/such/directory"),
        (("--model", "a=b=c"), "'b=c'"),
        (("--host", "0.0.0.0"), "0.0.0.0"),
        (("--data-dir", "/proc/none"), "/proc/none"),
        (("--backend", "jax"), "jax"),
    ],
)
def test_a_server_that_cannot_start_says_why_in_one_line(
    server: LiveServer, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    busy_port = str(urlsplit(server.url).port)
    usual = {"--port": str(free_port()), "--data-dir": str(tmp_path / "data")}
    option_values = {arguments[0]: arguments[1].replace("{taken}", busy_port)}
    completed = _command(*itertools.chain(*(usual | option_values).items()))
    assert completed.returncode == 2, completed.stderr
    errors = [line for line in completed.stderr.splitlines() if not line.startswith("timestamp=")]
    assert len(errors) == 1 and words in errors[0], completed.stderr


def test_a_second_server_on_the_same_directory_is_refused_and_the_first_is_as_fast(
    server: LiveServer, client: RawClient
) -> None:
    completed = _command("--port", str(free_port()), "--data-dir", str(server.data_dir), "--backend", "fake")
    assert (completed.returncode, "another server uses" in completed.stderr) == (2, True), completed.stderr
    model = client.model()
    started = time.monotonic()
    for seq_id in range(1, 11):
        client.result(client.step(model, seq_id))
    assert time.monotonic() - started < AT_ONCE_S, "wake-ups still arrive; without them each takes a second"


# The supervisor alone.


@pytest.fixture
def url(tmp_path: Path) -> str:
    return fresh_url(tmp_path)


@pytest.fixture
def engines(url: str, tmp_path: Path) -> Iterator[Engines]:
    db = open_database(url)
    yield Engines(db, holder_of(tmp_path))
    db.close()


@pytest.mark.smoke
def test_an_engine_that_refuses_its_model_is_not_tried_again(tmp_path: Path, url: str, engines: Engines) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 50, "max_position_embeddings": 16}')
    shape = ModelShape("local/tiny", str(tmp_path), 50, 16, "Tiny")
    supervisor = Supervisor(Settings(data_dir=tmp_path, database_url=url, backend="jax"), Bases((shape,)), engines)

    async def run() -> None:
        supervisor.start()
        await asyncio.wait_for(supervisor.must_stop.wait(), 30)
        await supervisor.stop()

    asyncio.run(run())
    assert "'jax' is unknown" in supervisor.refusal
    state, reason = engines.queue_state("local/tiny")
    assert (state, "'jax' is unknown" in (reason or "")) == ("paused_capacity", True)


def test_an_engine_that_keeps_dying_is_tried_ever_more_rarely(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith.cluster.supervisor.FIRST_PAUSE_S", 0.001)
    supervisor = Supervisor(Settings(data_dir=tmp_path), Bases((SHAPE,)), engines)
    starts: list[float] = []

    async def die(_shape: ModelShape, _seat: Seat, _ending: asyncio.Event) -> int:
        starts.append(time.monotonic())
        if len(starts) == 1:
            raise OSError(12, "Cannot allocate memory")
        return 1

    monkeypatch.setattr(supervisor, "run_once", die)

    async def run() -> None:
        supervisor.start()
        while len(starts) < 8:
            await asyncio.sleep(0.005)
        await supervisor.stop()

    assert supervisor.failing() == ""
    assert supervisor.loading() == f"{engines.id_of(Seat('local/tiny'))} of local/tiny is starting"
    asyncio.run(run())
    assert supervisor.failing() == "the engine of local/tiny ended 3 or more times in a row"
    (failure,) = supervisor.failures()
    assert failure.engine == engines.id_of(Seat("local/tiny")) and failure.deaths >= 3
    assert failure.reason.startswith("it ended with status 1")
    with monkeypatch.context() as later:  # when the current one has run long enough to count as stable
        later.setattr("tinsmith.cluster.supervisor.STEADY_S", 0.0)
        assert supervisor.failing() == ""
    pauses = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert all(pause >= 0.001 * 2**index for index, pause in enumerate(pauses))
    assert engines.take(Seat("local/tiny"), 60)
    assert supervisor.loading().endswith(" is loading")
    engines.set_state(Seat("local/tiny"), "ready")
    assert supervisor.loading() == ""
    engines.set_state(Seat("local/tiny"), "restarting", "it ended with status 1")
    assert engines.queue_state("local/tiny") == (
        "paused_capacity",
        "the engine of local/tiny is restarting: it ended with status 1",
    )


def test_base_models_whose_names_look_alike_have_logs_of_their_own(tmp_path: Path, engines: Engines) -> None:
    supervisor = Supervisor(Settings(data_dir=tmp_path), Bases(()), engines)
    names = ["a/b", "a-b", "../../a/b", "x" * 300 + "a/b"]
    paths = {supervisor.log_path(Seat(name)) for name in names}
    assert len(paths) == 4
    assert {path.parent for path in paths} == {tmp_path / "logs"}
