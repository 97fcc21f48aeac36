"""A base model on demand with the real SDK and a real model: planned, loaded, trained, sampled, ended and continued."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import tinker
from tinker import types

from support import tiny_models
from support.live import API_KEY, serving


def losses(client: tinker.TrainingClient, steps: int) -> list[float]:
    """Train a few steps on one datum; returns the loss of each."""
    tokens = types.ModelInput.from_ints([1, 2, 3, 4])
    inputs: dict = {"target_tokens": [2, 3, 4, 5], "weights": [1.0] * 4}
    datum = types.Datum(model_input=tokens, loss_fn_inputs=inputs)
    sums = []
    for _ in range(steps):
        result = client.forward_backward([datum], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        sums.append(float(result.result().metrics["loss:sum"]))
    return sums


@pytest.mark.timeout(600)
def test_the_sdk_trains_and_samples_a_base_model_that_its_request_loads(tmp_path: Path) -> None:
    tiny_models.make(tmp_path / "models" / "org" / "one")
    options = ("--models-from", str(tmp_path / "models"), "--idle-minutes", "0.05", "--device", "cpu")
    with serving(tmp_path / "data", *options) as server:
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            rest_client = tinker.RestClient(base_url=server.url, api_key=API_KEY)
            names = {model.model_name for model in rest_client.get_server_capabilities().result().supported_models}
            assert names == {"org/one"}
            assert server.engine_pids() == []
            client = service.create_lora_training_client("org/one", rank=4).result()
            first = losses(client, 3)
            assert first[2] < first[0]
            sampler = service.create_sampling_client(base_model="org/one").result()
            prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=3)
            assert sampler.sample(prompt, 1, params).result().sequences[0].tokens
            deadline = time.monotonic() + 120
            while server.engine_pids():
                assert time.monotonic() < deadline, "the engine did not end"
                time.sleep(0.2)
            second = losses(client, 1)
            assert second[0] < first[2], "the run goes on with what it had learned"
