"""A session's samples are paused and go on with the same tokens, while others are sampled."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest
import tinker
from tinker import types

from support.live import API_KEY, LiveServer, serving
from support.raw_client import send_heartbeats

NANO = "tinsmith/nano"
HEADERS = {"X-API-Key": API_KEY}
PROMPT = types.ModelInput.from_ints([20, 21, 22])
LONG = types.SamplingParams(max_tokens=1500, temperature=1.0, seed=7, stop=["\x00never"])
SHORT = types.SamplingParams(max_tokens=4, seed=1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("pause") / "data", "--model", NANO) as new_server:
        yield new_server


def change(server: LiveServer, session_id: str, action: str) -> httpx.Response:
    return httpx.post(f"{server.url}/api/v1/sessions/{session_id}/{action}_sampling", headers=HEADERS)


def test_paused_samples_keep_their_tokens_and_others_go_on(server: LiveServer) -> None:
    with (
        tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service,
        tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as other_service,
    ):
        sampler = service.create_sampling_client(base_model=NANO).result()
        other = other_service.create_sampling_client(base_model=NANO).result()
        session_id = sampler._sampling_session_id.split(":")[0]
        expected = [sequence.tokens for sequence in sampler.sample(PROMPT, 4, LONG).result().sequences]
        running = sampler.sample(PROMPT, 4, LONG)
        time.sleep(0.3)
        assert change(server, session_id, "pause").json() == {"session_id": session_id, "sampling": "paused"}
        assert change(server, session_id, "pause").status_code == 200, "a repetition changes nothing"
        time.sleep(1.5)
        waiting = sampler.sample(PROMPT, 1, SHORT)
        assert len(other.sample(PROMPT, 1, SHORT).result().sequences[0].tokens) == 4
        time.sleep(1.0)
        assert not waiting.future().done()
        status = httpx.get(f"{server.url}/api/v1/sessions/{session_id}", headers=HEADERS).json()
        assert status["sampling"] == "paused"
        assert change(server, session_id, "continue").json()["sampling"] == "running"
        assert [sequence.tokens for sequence in running.result().sequences] == expected
        assert len(waiting.result().sequences[0].tokens) == 4


def test_a_sample_of_a_paused_session_is_cancelled_and_an_unknown_session_is_refused(server: LiveServer) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
        sampler = service.create_sampling_client(base_model=NANO).result()
        session_id = sampler._sampling_session_id.split(":")[0]
        change(server, session_id, "pause")
        time.sleep(1.2)
        body = {
            "sampling_session_id": sampler._sampling_session_id,
            "seq_id": 900,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [20, 21]}]},
            "sampling_params": {"max_tokens": 4},
        }
        root = f"{server.url}/api/v1"
        request_id = httpx.post(f"{root}/asample", json=body, headers=HEADERS).json()["request_id"]
        cancelled = httpx.post(f"{root}/cancel_future", json={"request_id": request_id}, headers=HEADERS)
        assert cancelled.status_code == 200, cancelled.text
        result = httpx.post(f"{root}/retrieve_future", json={"request_id": request_id}, headers=HEADERS, timeout=60)
        assert "cancel" in result.json()["error"]
    assert change(server, "no-such-session", "pause").status_code == 404


def test_a_paused_session_ends_with_its_client_however_many_agents_wait(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    arguments = "--model", NANO, "--session-timeout-s", "8", "--session-sweep-s", "0.5"
    with serving(tmp_path_factory.mktemp("dead") / "data", *arguments) as server:
        session = httpx.post(
            f"{server.url}/api/v1/create_session", json={"tags": [], "sdk_version": "0.38.0"}, headers=HEADERS
        ).json()["session_id"]
        with send_heartbeats(server, session):
            created = httpx.post(
                f"{server.url}/api/v1/create_model",
                json={"session_id": session, "model_seq_id": 0, "base_model": NANO, "lora_config": {"rank": 4}},
                headers=HEADERS,
            ).json()
            result = post_until_done(server, created["request_id"])
            assert "model_id" in result, result
            model_id = result["model_id"]
            saved = httpx.post(
                f"{server.url}/api/v1/save_weights_for_sampler",
                json={"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 0},
                headers=HEADERS,
            ).json()
            post_until_done(server, saved["request_id"])
            assert change(server, session, "pause").status_code == 200
        began = time.monotonic()
        body = {"model": f"tinker://{model_id}", "messages": [{"role": "user", "content": "1 + 1"}], "max_tokens": 4}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=HEADERS, timeout=60)
        assert answer.status_code >= 400 and "session" in answer.text, answer.text
        assert time.monotonic() - began < 30


def post_until_done(server: LiveServer, request_id: str) -> dict[str, object]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        answer = httpx.post(
            f"{server.url}/api/v1/retrieve_future", json={"request_id": request_id}, headers=HEADERS, timeout=90
        )
        if answer.status_code == 200 and answer.json().get("type") != "try_again":
            return answer.json()
    raise TimeoutError(request_id)
