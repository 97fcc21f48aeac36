"""A prompt that fills the context is scored at every door, with the logprobs of a training forward."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from support.live import API_KEY, LiveServer
from tinsmith import batch
from tinsmith.batch.client.http import Client
from tinsmith.batch.client.job import Job

pytestmark = pytest.mark.smoke

NANO = "tinsmith/nano"
CONTEXT = 2048
PROMPT = np.random.default_rng(11).integers(3, 500, CONTEXT)


@pytest.fixture(scope="module")
def service(nano_server: LiveServer) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=nano_server.url, api_key=API_KEY) as client:
        yield client


@pytest.fixture(scope="module")
def sampler(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=NANO).result()


@pytest.fixture(scope="module")
def expected_logprobs(service: tinker.ServiceClient) -> np.ndarray:
    """The logprob of each token of PROMPT but the first."""
    client = service.create_lora_training_client(NANO, rank=4, seed=1).result()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(PROMPT[:-1].tolist()),
        loss_fn_inputs={"target_tokens": PROMPT[1:], "weights": np.ones(CONTEXT - 1, np.float32)},
    )
    return np.array(client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)


@pytest.mark.extended
def test_compute_logprobs(sampler: tinker.SamplingClient, expected_logprobs: np.ndarray) -> None:
    prompt = types.ModelInput.from_ints(PROMPT.tolist())
    scores = sampler.compute_logprobs(prompt).result()
    assert len(scores) == CONTEXT and scores[0] is None
    np.testing.assert_allclose(np.array(scores[1:], float), expected_logprobs, atol=1e-4)
    end = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=5).result()
    assert end[:-5] == [None] * (CONTEXT - 5)
    np.testing.assert_allclose(np.array(end[-5:], float), expected_logprobs[-5:], atol=1e-4)


def test_a_sample_with_logprobs_of_its_prompt(sampler: tinker.SamplingClient, expected_logprobs: np.ndarray) -> None:
    result = sampler.sample(
        types.ModelInput.from_ints(PROMPT.tolist()),
        2,
        types.SamplingParams(max_tokens=1, seed=3),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
    ).result()
    assert result.prompt_logprobs is not None
    np.testing.assert_allclose(np.array(result.prompt_logprobs[1:], float), expected_logprobs, atol=1e-4)
    assert [len(sequence.tokens) for sequence in result.sequences] == [1, 1]


@pytest.mark.parametrize(
    ("max_tokens", "scores", "length", "words"),
    [(2, True, CONTEXT, "max_tokens 2"), (1, False, CONTEXT, "max_tokens 1"), (1, True, CONTEXT + 1, "2049 tokens")],
)
def test_more_than_that_is_refused(
    sampler: tinker.SamplingClient, max_tokens: int, scores: bool, length: int, words: str
) -> None:
    prompt = types.ModelInput.from_ints(np.resize(PROMPT, length).tolist())
    with pytest.raises(tinker.TinkerError, match=f"{words}.* exceed the context of 2048"):
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=max_tokens), include_prompt_logprobs=scores).result()


@pytest.mark.parametrize("logprobs", [1, None])
def test_a_completion_that_only_echoes(
    nano_server: LiveServer, expected_logprobs: np.ndarray, logprobs: int | None
) -> None:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    body = {"model": NANO, "prompt": PROMPT.tolist(), "echo": True, "max_tokens": 0, "logprobs": logprobs}
    answer = httpx.post(f"{nano_server.url}/v1/completions", headers=headers, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 0
    if logprobs:
        scored = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
        np.testing.assert_allclose(np.array(scored[1:], float), expected_logprobs, atol=1e-4)
    again = httpx.post(
        f"{nano_server.url}/v1/completions", headers=headers, json=body | {"max_tokens": 1, "echo": False}
    )
    assert again.status_code == 400 and "maximum context length is 2048" in again.text


def test_a_row_of_a_bulk_job(nano_server: LiveServer, expected_logprobs: np.ndarray, tmp_path: Path) -> None:
    client, out = Client(nano_server.url, API_KEY), tmp_path / "out.jsonl"
    step = batch.Sample(NANO, tokens_column="ids", max_tokens=1, prompt_logprobs=True)
    rows = [{"ids": PROMPT.tolist()}]
    try:
        job = batch.Dataset(rows).map(step, output=batch.JsonWriter(str(out)), stream=False, client=client)
        assert isinstance(job, Job)
        job.wait()
    finally:
        client.close()
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    (scores,) = [value for name, value in row.items() if name.endswith("prompt_logprobs")]
    np.testing.assert_allclose(np.array(scores[1:], float), expected_logprobs, atol=1e-4)
