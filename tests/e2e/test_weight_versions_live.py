"""Every answer names the weights that gave it, and a training run's name follows what the run publishes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
import tinker
from tinker import types

from support.live import API_KEY, LiveServer, serving
from tinsmith.exchange.trajectories import Trajectories, session_key

NANO = "tinsmith/nano"
PROMPT = "12 + 7"
CHAT: list[Any] = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("versions") / "data", "--model", NANO) as new_server:
        yield new_server


@pytest.fixture(scope="module")
def service(server: LiveServer) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as client:
        yield client


@pytest.fixture(scope="module")
def run(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(NANO, rank=4, seed=1).result()


def train_step(run: tinker.TrainingClient, seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(16, 500, 24)
    datum = types.Datum(
        types.ModelInput.from_ints(tokens[:-1].tolist()),
        {"target_tokens": tokens[1:], "weights": np.ones(23, np.float32)},
    )
    run.forward_backward([datum], "cross_entropy").result()
    run.optim_step(types.AdamParams(learning_rate=0.05)).result()


def publish(run: tinker.TrainingClient) -> tuple[tinker.SamplingClient, str]:
    """A sampling client of the run's weights, and the name of their version."""
    client = run.save_weights_and_get_sampling_client().result()
    return client, client._sampling_session_id


def ask_every_door(server: LiveServer, model: str) -> dict[str, str]:
    """The weight version that each door names for an answer of this model."""
    common: dict[str, Any] = {"model": model, "temperature": 0}
    versions: dict[str, Any] = {}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0) as client:
        versions["chat"] = client.chat.completions.create(messages=CHAT, max_tokens=3, **common).weight_version  # type: ignore[attr-defined]
        chunks = list(client.chat.completions.create(messages=CHAT, max_tokens=3, stream=True, **common))
        versions["chat stream"] = chunks[-1].weight_version
        texts = client.completions.create(prompt=["a", "b"], max_tokens=2, **common).choices
        versions["completions"] = "+".join(sorted({choice.weight_version for choice in texts}))  # type: ignore[attr-defined]
        for chunk in client.completions.create(prompt="a", max_tokens=2, stream=True, **common):
            if chunk.choices[0].finish_reason:
                versions["completions stream"] = chunk.choices[0].weight_version
        response = client.responses.create(input=PROMPT, max_output_tokens=3, **common)
        versions["responses"] = response.weight_version  # type: ignore[attr-defined]
        versions["responses again"] = client.responses.retrieve(response.id).weight_version  # type: ignore[attr-defined]
        events: Any = list(client.responses.create(input=PROMPT, max_output_tokens=3, stream=True, **common))
        versions["responses stream"] = events[-1].response.weight_version
    with anthropic.Anthropic(base_url=server.url, api_key=API_KEY, max_retries=0) as claude:
        versions["messages"] = claude.messages.create(messages=CHAT, max_tokens=3, model=model).weight_version  # type: ignore[attr-defined]
        for event in claude.messages.create(messages=CHAT, max_tokens=3, model=model, stream=True):
            if event.type == "message_delta":
                versions["messages stream"] = event.weight_version  # type: ignore[attr-defined]
    body = {"model": model, "token_ids": [20, 21], "sampling_params": {"max_tokens": 2}}
    generated = httpx.post(f"{server.url}/inference/v1/generate", json=body, headers={"X-API-Key": API_KEY})
    versions["generate"] = generated.json()["weight_version"]
    return versions


def test_every_door_names_the_base_model_and_a_checkpoint(server: LiveServer, run: tinker.TrainingClient) -> None:
    assert set(ask_every_door(server, NANO).values()) == {NANO}
    path = run.save_weights_for_sampler("answers").result().path
    assert set(ask_every_door(server, path).values()) == {path}


def test_a_runs_name_follows_what_it_publishes(server: LiveServer, run: tinker.TrainingClient) -> None:
    name = f"tinker://{run.model_id}"
    versions: list[str] = []
    for seed in range(2):
        train_step(run, seed)
        client, version = publish(run)
        doors = ask_every_door(server, name)
        assert len(doors) == 10 and set(doors.values()) == {version}
        versions.append(version)
        # The answer is that of these weights: the SDK's own client of them draws the same tokens and logprobs.
        prompt = types.ModelInput.from_ints([20, 21, 22])
        params = types.SamplingParams(max_tokens=6, temperature=0)
        (expected,) = client.sample(prompt, 1, params).result().sequences
        sampling_params = {"max_tokens": 6, "temperature": 0, "logprobs": 0}
        body = {"model": name, "token_ids": [20, 21, 22], "sampling_params": sampling_params}
        answer = httpx.post(f"{server.url}/inference/v1/generate", json=body, headers={"X-API-Key": API_KEY}).json()
        (choice,) = answer["choices"]
        assert choice["token_ids"] == expected.tokens
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        np.testing.assert_allclose(logprobs, expected.logprobs, atol=1e-5)
    assert versions[0] != versions[1]
    path = run.save_weights_for_sampler("newer").result().path
    assert set(ask_every_door(server, name).values()) == {path}
    assert set(ask_every_door(server, f"{NANO};{name}").values()) == {path}


def test_a_captured_trajectory_says_which_weights_sampled_which_tokens(
    server: LiveServer, run: tinker.TrainingClient
) -> None:
    chat, versions = list(CHAT), []
    key = session_key(API_KEY, "over a publish")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        for seed in (3, 4):
            train_step(run, seed)
            versions.append(publish(run)[1])
            answer = client.chat.completions.create(
                model=f"tinker://{run.model_id}", messages=chat, max_tokens=5, temperature=0
            )
            chat += [answer.choices[0].message, {"role": "user", "content": "and then?"}]
    with Trajectories(server.url, API_KEY) as captured:
        (trajectory,) = captured.of("over a publish")
    assert trajectory.versions == versions
    assert [span["version"] for span in trajectory.version_spans] == versions
    in_spans = np.zeros(len(trajectory.tokens), bool)
    for span in trajectory.version_spans:
        assert span["stop"] - span["start"] == 5
        in_spans[span["start"] : span["stop"]] = True
    assert in_spans.tolist() == trajectory.sampled


def test_a_run_without_published_weights_and_one_of_another_key_are_refused_by_name(
    server: LiveServer, service: tinker.ServiceClient
) -> None:
    run = service.create_lora_training_client(NANO, rank=1).result()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="has no published weights; call save_weights_for_sampler"):
            client.chat.completions.create(model=f"tinker://{run.model_id}", messages=CHAT)
        publish(run)
        assert client.models.retrieve(f"tinker://{run.model_id}").id == f"tinker://{run.model_id}"
        with pytest.raises(openai.BadRequestError, match="trained on 'tinsmith/nano'"):
            client.chat.completions.create(model=f"other/base;tinker://{run.model_id}", messages=CHAT)


def test_the_name_of_an_unloaded_run_falls_back_to_its_checkpoint(
    server: LiveServer, service: tinker.ServiceClient
) -> None:
    run = service.create_lora_training_client(NANO, rank=4, seed=2).result()
    path = run.save_weights_for_sampler("c0").result().path
    _, version = publish(run)
    model_id = run.get_info().model_id
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0) as client:

        def ask() -> str:
            answer: Any = client.chat.completions.create(model=f"tinker://{model_id}", messages=CHAT, max_tokens=2)
            return answer.weight_version

        assert ask() == version
        body = {"model_id": model_id, "seq_id": 3}
        unloaded = httpx.post(f"{server.url}/api/v1/unload_model", json=body, headers={"X-API-Key": API_KEY})
        assert unloaded.status_code == 200
        deadline = time.monotonic() + 30
        while version != path:
            assert time.monotonic() < deadline, version
            with contextlib.suppress(openai.BadRequestError):  # a request that the unloading overtakes
                version = ask()
