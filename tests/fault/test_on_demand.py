"""Base models on demand: engines start at the first request, end when idle, and never leave a request waiting."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from support.databases import database_url
from support.live import API_KEY, LiveServer, serving
from support.raw_client import RawClient, connect
from tinsmith.base_models import nano
from tinsmith.cluster.engines import Engines, Seat, holder_of
from tinsmith.db.factory import open_database
from tinsmith.errors import SettingsError
from tinsmith.server.process import build
from tinsmith.settings import load
from tinsmith.storage.directories import claim

GIBIBYTE = 2**30
SETTINGS = {"HOLD_S": "0.2", "ENGINES": "1"}
DEADLINE_S = 60.0


def write_model(root: Path, name: str, num_bytes: int = GIBIBYTE) -> None:
    """A directory that takes `num_bytes` of memory with the backend `fake`, and none on disk."""
    directory = root / name
    directory.mkdir(parents=True)
    for file in nano.path().glob("*.json"):
        shutil.copy(file, directory)
    with (directory / "model.safetensors").open("wb") as file:
        file.truncate(num_bytes)


def write_models(tmp_path: Path) -> tuple[str, ...]:
    """Three models of a gibibyte in a directory, and one that is none; returns the options of a server of them."""
    for name in ("plain", "org/one", "org/two"):
        write_model(tmp_path / "models", name)
    (tmp_path / "models" / "tower").mkdir()
    (tmp_path / "models" / "tower" / "config.json").write_text("{}")
    return "--models-from", str(tmp_path / "models"), "--backend", "fake"


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def create(client: RawClient, base_model: str, **fields: object) -> dict:
    body = {"session_id": client.session(), "model_seq_id": 0, "base_model": base_model, **fields}
    return client.ok("create_model", body | {"lora_config": {"rank": 4}})


def sample(client: RawClient, base_model: str) -> str:
    """Submit a sample of a base model; returns its request_id."""
    body = {"session_id": client.session(), "sampling_session_seq_id": 0, "base_model": base_model}
    sampler = client.ok("create_sampling_session", body)["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
    fields = {"sampling_session_id": sampler, "seq_id": 1, "num_samples": 1, "prompt": prompt}
    return client.ok("asample", fields | {"sampling_params": {"max_tokens": 2}})["request_id"]


def complete(server: LiveServer, base_model: str) -> httpx.Response:
    """Ask for a completion in OpenAI's protocol."""
    body = {"model": base_model, "prompt": [1], "max_tokens": 1}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers={"X-API-Key": API_KEY}, timeout=60)


def failure(client: RawClient, request_id: str) -> str:
    answer = client.poll(request_id).json()
    assert "error" in answer, answer
    return answer["error"]


def test_engines_start_at_the_first_request_of_each_base_model(tmp_path: Path) -> None:
    with serving(tmp_path / "data", *write_models(tmp_path), settings=SETTINGS) as server:
        client = connect(server)
        models = server.get("get_server_capabilities").json()["supported_models"]
        assert {model["model_name"] for model in models} == {"plain", "org/one", "org/two"}
        assert server.engine_pids() == []
        refusal = client.post("create_model", {"session_id": client.session(), "model_seq_id": 0, "base_model": "no"})
        assert "is not served here" in failure(client, refusal.json()["request_id"])
        assert server.engine_pids() == [], "a name that is not listed starts nothing"
        overview = server.get("dashboard/overview").json()
        assert {engine["state"] for engine in overview["engines"]} == {"on_demand"}
        created = create(client, "org/one")
        client.result(created["request_id"])
        assert client.steps_taken(client.step(created["model_id"], 1)) == 1
        assert len(server.engine_pids()) == 1
        client.result(sample(client, "plain"))
        said = complete(server, "plain")
        assert said.status_code == 200, said.text
        assert len(server.engine_pids()) == 2
        rows = {seat["base_model"]: seat["state"] for seat in server.get("dashboard/overview").json()["seats"]}
        assert rows == {"org/one": "ready", "plain": "ready"}


def has_no_engine(server: LiveServer) -> Callable[[], bool]:
    return lambda: server.engine_pids() == [] and server.count("engines WHERE state = 'stopped'") > 0


@pytest.mark.extended
def test_idle_engines_make_room_and_a_full_machine_says_what_runs(tmp_path: Path) -> None:
    memory = ("--on-demand-bytes", str(3 * GIBIBYTE // 2))
    with serving(tmp_path / "data", *write_models(tmp_path), *memory, settings=SETTINGS) as server:
        client = connect(server)
        client.result(sample(client, "plain"))
        created = create(client, "org/one")
        client.result(created["request_id"])
        rows = {seat["base_model"]: seat["state"] for seat in server.get("dashboard/overview").json()["seats"]}
        assert rows == {"plain": "stopped", "org/one": "ready"}, "no model in training was loaded in the other"
        reason = failure(client, sample(client, "org/two"))
        assert "'org/two' cannot be loaded now: it needs 1.0 GiB of memory, and 512.0 MiB is free" in reason
        assert "'org/one' with 1.0 GiB (1 loaded models, used " in reason
        assert "it can be loaded when 'org/one' is idle" in reason
        said = complete(server, "org/two")
        assert said.status_code == 500 and "'org/two' cannot be loaded now" in said.json()["error"]["message"]
        refused = create(client, "plain")
        assert "'plain' cannot be loaded now" in failure(client, refused["request_id"])
        again = client.post("optim_step", {"model_id": refused["model_id"], "seq_id": 1, "adam_params": {}}).json()
        assert "could not be created" in failure(client, again["request_id"])
        assert client.steps_taken(client.step(created["model_id"], 1)) == 1, "the loaded model was not disturbed"
        client.result(client.ok("unload_model", {"model_id": created["model_id"]})["request_id"])
        client.result(sample(client, "org/two"))
        assert len(server.engine_pids()) == 1


@pytest.mark.extended
def test_an_idle_engine_ends_and_its_runs_continue_with_the_next(tmp_path: Path) -> None:
    idle = ("--idle-minutes", "0.02")
    with serving(tmp_path / "data", *write_models(tmp_path), *idle, settings=SETTINGS) as server:
        client = connect(server)
        model, other = create(client, "plain"), create(client, "plain")
        for created in (model, other):
            client.result(created["request_id"])
        assert client.steps_taken(client.step(model["model_id"], 1)) == 1
        wait_until(has_no_engine(server), "the engine did not end")
        client.result(client.ok("unload_model", {"model_id": other["model_id"]})["request_id"])
        assert server.engine_pids() == [], "an engine need not start to unload a model"
        assert server.count("models WHERE state = 'unloaded'") == 1
        assert client.steps_taken(client.step(model["model_id"], 2)) == 2


@pytest.mark.extended
def test_a_model_that_cannot_be_loaded_ends_its_requests_and_the_next_tries_again(tmp_path: Path) -> None:
    with serving(tmp_path / "data", *write_models(tmp_path), settings=SETTINGS) as server:
        client = connect(server)
        created = create(client, "plain")
        client.result(created["request_id"])
        config = tmp_path / "models" / "plain" / "config.json"
        config.rename(tmp_path / "away")
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        reason = failure(client, client.step(created["model_id"], 1))
        assert reason.startswith("base model 'plain' could not be loaded: it ended with status 1 (")
        assert "has no config.json" in reason
        assert server.get("healthz").status_code == 200
        (tmp_path / "away").rename(config)
        assert client.steps_taken(client.step(created["model_id"], 2)) == 1, "the number 1 is skipped"


def lock_path(server: LiveServer, base_model: str) -> Path:
    """The file whose lock an engine waits for before it loads its model."""
    database = open_database(database_url(server.data_dir) or f"sqlite:///{server.data_dir / 'tinsmith.db'}")
    engine_id = Engines(database, holder_of(server.data_dir)).id_of(Seat(base_model))
    database.close()
    return server.data_dir / f"{engine_id}.lock"


@pytest.mark.extended
def test_requests_survive_kills_of_the_engine_and_the_server_while_a_model_is_loaded(tmp_path: Path) -> None:
    options = write_models(tmp_path)
    with serving(tmp_path / "data", *options, settings=SETTINGS) as first:
        client = connect(first)
        lock = claim(lock_path(first, "plain"), wait=False)
        assert lock is not None
        created = create(client, "plain")
        wait_until(first.engine_pids, "no engine started")
        answer = client.post("retrieve_future", {"request_id": created["request_id"]})
        assert (answer.status_code, answer.json()["queue_state"]) == (408, "paused_capacity")
        assert answer.json()["queue_state_reason"] == "the engine of plain is starting"
        killed = first.engine_pids()
        os.kill(killed[0], signal.SIGKILL)
        wait_until(lambda: first.engine_pids() not in ([], killed), "no other engine started")
        first.stop(signal.SIGKILL)
    with serving(tmp_path / "data", *options, settings=SETTINGS) as second:
        client = connect(second)
        wait_until(second.engine_pids, "the pending request did not start an engine")
        lock.close()
        client.result(created["request_id"])
        assert client.steps_taken(client.step(created["model_id"], 1)) == 1


@pytest.mark.extended
def test_a_new_engine_follows_the_degrees_of_its_first_request_and_refuses_others(tmp_path: Path) -> None:
    with serving(tmp_path / "data", *write_models(tmp_path), settings=SETTINGS) as server:
        client = connect(server)
        config = {"tensor_parallel_size": 2, "num_gpus": 4}
        client.result(create(client, "plain", parallelism_config=config)["request_id"])
        client.result(create(client, "plain", parallelism_config=config)["request_id"])
        client.result(create(client, "plain")["request_id"])
        other = create(client, "plain", parallelism_config={"tensor_parallel_size": 1})
        reason = failure(client, other["request_id"])
        assert "asks for tensor_parallel 1" in reason
        assert "runs with data_parallel 2, tensor_parallel 2, context_parallel 1" in reason


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--models-from", "/no/such/directory"), "the directory /no/such/directory does not exist"),
        (("--models-from", "{empty}"), "has no base model"),
        (("--models-from", "{models}", "--role", "sampler"), "role 'sampler' runs no engines"),
        (("--models-from", "{models}", "--sampler", "vllm"), "sampler 'vllm'"),
    ],
)
def test_settings_that_cannot_load_on_demand_are_refused(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    write_model(tmp_path / "models", "plain")
    (tmp_path / "empty").mkdir()
    values = {"empty": tmp_path / "empty", "models": tmp_path / "models"}
    flags = dict(zip(arguments[::2], arguments[1::2], strict=True))
    overrides: dict[str, object] = {"models_from": (flags.pop("--models-from").format(**values),)}
    overrides |= {flag.lstrip("-"): value for flag, value in flags.items()}
    settings = load(overrides | {"data_dir": tmp_path / "data", "port": 0})
    with pytest.raises(SettingsError, match=words):
        build(settings)
