"""Numerical checks after those of the cookbook: training and sampling agree on every served model, and each step of a
long sample is drawn from the distribution that scoring reports. test_sampling_live.py checks that temperature divides
log-probabilities.
"""

from __future__ import annotations

import inspect
import json.decoder

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker_cookbook.supervised.common import datum_from_model_input_weights

from support.live import API_KEY, LiveServer

NANO = "tinsmith/nano"
PROMPT = list(range(100, 116))
VOCAB = 512


def document(client: tinker.TrainingClient, length: int = 600) -> types.ModelInput:
    """A text outside of the training data: a module of the standard library."""
    tokens = client.get_tokenizer().encode(inspect.getsource(json.decoder)[: 4 * length])
    return types.ModelInput.from_ints(tokens[:length])


def score(client: tinker.SamplingClient, text: types.ModelInput) -> np.ndarray:
    scored = client.compute_logprobs(text).result()
    assert scored[0] is None
    return np.array(scored[1:], np.float32)


def distribution(client: tinker.SamplingClient, tokens: list[int]) -> np.ndarray:
    """Log-probabilities [N - 1, V] of every token at every position, at temperature 1."""
    text = types.ModelInput.from_ints(tokens)
    scored = client.sample(
        text, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True, topk_prompt_logprobs=VOCAB
    ).result()
    assert scored.topk_prompt_logprobs is not None
    logprobs = np.full((len(tokens) - 1, VOCAB), -np.inf)
    for position, entries in enumerate(scored.topk_prompt_logprobs[1:]):
        assert entries is not None and len(entries) == VOCAB
        for token, logprob in entries:
            logprobs[position, token] = logprob
    return logprobs


@pytest.fixture
def trained_model(nano_service: tinker.ServiceClient) -> tinker.TrainingClient:
    client = nano_service.create_lora_training_client(NANO, rank=8, seed=5).result()
    text = document(client)
    weights = torch.ones(text.length)
    weights[0] = 0.0
    datum = datum_from_model_input_weights(text, weights)
    for _ in range(3):
        client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    return client


def test_every_served_model_trains_and_samples_the_same_numbers(
    nano_server: LiveServer, nano_service: tinker.ServiceClient, trained_model: tinker.TrainingClient
) -> None:
    rest_client = tinker.RestClient(base_url=nano_server.url, api_key=API_KEY)
    served = rest_client.get_server_capabilities().result().supported_models
    assert [model.model_name for model in served] == [NANO]
    text = document(trained_model)
    datum = datum_from_model_input_weights(text, torch.ones(text.length))

    def of_training(client: tinker.TrainingClient) -> np.ndarray:
        (output,) = client.forward([datum], "cross_entropy").result().loss_fn_outputs
        return output["logprobs"].to_numpy()

    before = score(nano_service.create_sampling_client(base_model=NANO).result(), text)
    state = trained_model.save_state("numbers", ttl_seconds=3600).result().path
    checkpoint_path = trained_model.save_weights_for_sampler("numbers", ttl_seconds=3600).result().path
    training_logprobs = of_training(trained_model)
    resumed = nano_service.create_training_client_from_state(state).result()
    np.testing.assert_array_equal(of_training(resumed), training_logprobs)
    for sampler in (
        trained_model.save_weights_and_get_sampling_client().result(),
        nano_service.create_sampling_client(model_path=checkpoint_path).result(),
        resumed.save_weights_and_get_sampling_client().result(),
    ):
        sampler_logprobs = score(sampler, text)
        assert np.mean((sampler_logprobs - training_logprobs) ** 2) < 1e-8
        assert np.mean((sampler_logprobs - before) ** 2) > 1e-3


def test_every_token_of_a_long_sample_has_the_logprob_of_its_own_step(trained_model: tinker.TrainingClient) -> None:
    sampler = trained_model.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=20, temperature=0.5, seed=42, stop=[])
    (sequence,) = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params).result().sequences
    assert len(sequence.tokens) == 20 and sequence.logprobs is not None
    scaled = distribution(sampler, [*PROMPT, *sequence.tokens])[len(PROMPT) - 1 :] / 0.5
    expected_logprobs = scaled - np.logaddexp.reduce(scaled, axis=-1, keepdims=True)
    np.testing.assert_allclose(sequence.logprobs, expected_logprobs[np.arange(20), sequence.tokens], atol=2e-4)
