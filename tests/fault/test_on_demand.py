"""Base models on demand: engines start at the first request, end when idle, and never leave a request waiting."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from support.live import API_KEY, LiveServer, serving
from support.raw_client import RawClient, connect, is_alive

GIBIBYTE = 2**30
SETTINGS = {"HOLD_S": "0.2", "ENGINES": "1"}
DEADLINE_S = 60.0


def write_model(root: Path, name: str, num_bytes: int = GIBIBYTE) -> None:
    """A directory that takes `num_bytes` of memory with the backend `fake`, and none on disk."""
    directory = root / name
    directory.mkdir(parents=True)
    config = {"vocab_size": 300, "max_position_embeddings": 256, "architectures": ["Tiny"], "model_type": "qwen3"}
    (directory / "config.json").write_text(json.dumps(config))
    with (directory / "model.safetensors").open("wb") as file:
        file.truncate(num_bytes)


def write_models(tmp_path: Path) -> tuple[str, ...]:
    """Three models of a gibibyte in a directory; returns the options of a server of them."""
    for name in ("plain", "org/one", "org/two"):
        write_model(tmp_path / "models", name)
    (tmp_path / "models" / "broken").mkdir()
    (tmp_path / "models" / "broken" / "config.json").write_text("{}")
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
        chat = {"model": "plain", "prompt": [1], "max_tokens": 1}
        said = httpx.post(f"{server.url}/v1/completions", json=chat, headers={"X-API-Key": API_KEY}, timeout=60)
        assert said.status_code == 200, said.text
        assert len(server.engine_pids()) == 2
        rows = {seat["base_model"]: seat["state"] for seat in server.get("dashboard/overview").json()["seats"]}
        assert rows == {"org/one": "ready", "plain": "ready"}
