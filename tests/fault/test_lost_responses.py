"""The real SDK when responses are lost: it sends the same request again, and nothing happens twice or fails."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from support.live import API_KEY, LiveServer
from support.random_data import random_data

NANO = "tinsmith/nano"
ID = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27,}(:[a-z]+:\d+)*|run-[^/]+|mine-\w+")


@dataclass
class Losing:
    """A transport that drops the first response of each route."""

    lost: Counter[str] = field(default_factory=Counter)
    enabled: bool = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        send = httpx.AsyncClient.send

        async def send_and_lose(client: httpx.AsyncClient, request: httpx.Request, **options: object) -> httpx.Response:
            response = await send(client, request, **options)  # type: ignore[arg-type]
            route = f"{request.method} {ID.sub('{id}', request.url.path)}"
            if not self.enabled or self.lost[route]:
                return response
            self.lost[route] += 1
            await response.aclose()
            raise httpx.ReadTimeout("the response is lost", request=request)

        monkeypatch.setattr(httpx.AsyncClient, "send", send_and_lose)


def journey(url: str, name: str) -> dict[str, object]:
    """Results of a training loop: losses, samples of both kinds of sampler weights, a reloaded checkpoint."""
    service, rest_client = (kind(base_url=url, api_key=API_KEY) for kind in (tinker.ServiceClient, tinker.RestClient))
    data = random_data(np.random.default_rng(3), [12] * 3)
    prompt, adam = data[0].model_input, types.AdamParams(learning_rate=1e-2)
    params = types.SamplingParams(max_tokens=6, seed=5)
    client = service.create_lora_training_client(NANO, rank=4, seed=1).result()
    results: dict[str, object] = {}
    for step in range(2):
        passed, stepped = client.forward_backward(data, "cross_entropy"), client.optim_step(adam)
        results[f"loss {step}"] = passed.result().metrics["loss:sum"]
        stepped.result()
        sampler = client.save_weights_and_get_sampling_client().result()
        results[f"tokens {step}"] = sampler.sample(prompt, 1, params).result().sequences[0].tokens
        results[f"logprobs {step}"] = sampler.compute_logprobs(prompt).result()
    saved = client.save_weights_for_sampler(name).result().path
    checkpoint_sampler = service.create_sampling_client(model_path=saved).result()
    results["tokens of a checkpoint"] = checkpoint_sampler.sample(prompt, 1, params).result().sequences[0].tokens
    state = client.save_state(name).result().path
    loaded = service.create_training_client_from_state_with_optimizer(state).result()
    loaded.forward_backward(data, "cross_entropy").result()
    loaded.optim_step(adam).result()
    results["loss of the loaded"] = loaded.forward(data, "cross_entropy").result().metrics["loss:sum"]
    results["checkpoints"] = len(rest_client.list_checkpoints(client.model_id).result().checkpoints)
    return results


def test_every_lost_response_is_a_delay_and_nothing_else(
    nano_server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    losing = Losing()
    losing.install(monkeypatch)
    journeys = []
    for losing.enabled in (False, True):
        journeys.append(journey(nano_server.url, f"mine-{losing.enabled}"))
    assert journeys[0] == journeys[1]
    submitted = {"forward_backward", "optim_step", "asample", "save_weights", "save_weights_for_sampler"}
    assert submitted | {"create_model", "create_sampling_session", "retrieve_future"} <= {
        route.rpartition("/")[2] for route in losing.lost
    }, losing.lost
