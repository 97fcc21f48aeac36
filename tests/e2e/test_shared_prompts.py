"""A group of answers through the service: the numbers of separate data, and what is shown of the tokens they share."""

from __future__ import annotations

import time

import httpx
import numpy as np
import tinker

from support.live import API_KEY, LiveServer

PROMPT, ANSWER, GROUP = 40, 6, 4


def make_group(rng: np.random.Generator) -> list[tinker.Datum]:
    prompt = rng.integers(1, 200, PROMPT)
    data = []
    for _ in range(GROUP):
        tokens = np.concatenate([prompt, rng.integers(1, 200, ANSWER)])
        advantages = np.zeros(len(tokens) - 1, np.float32)
        advantages[PROMPT - 1 :] = rng.normal()
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": np.full(len(tokens) - 1, -5.0, np.float32),
            "advantages": advantages,
        }
        model_input = tinker.ModelInput.from_ints(tokens[:-1].tolist())
        data.append(tinker.Datum(model_input=model_input, loss_fn_inputs=inputs))
    return data


def test_a_group_is_trained_as_its_answers_would_be_alone(nano_server: LiveServer) -> None:
    group = make_group(np.random.default_rng(3))
    shared_before = count_shared(nano_server)
    with tinker.ServiceClient(base_url=nano_server.url, api_key=API_KEY) as service:
        together, apart = (
            service.create_lora_training_client("tinsmith/nano", rank=4, seed=1).result() for _ in range(2)
        )
        passed = together.forward_backward(group, "importance_sampling").result()
        together.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        alone = [apart.forward_backward([datum], "importance_sampling").result() for datum in group]
        apart.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        for output, single in zip(passed.loss_fn_outputs, alone, strict=True):
            expected = single.loss_fn_outputs[0]["logprobs"].data
            np.testing.assert_allclose(output["logprobs"].data, expected, atol=1e-4)
        sent = GROUP * (PROMPT + ANSWER - 1)
        assert passed.metrics["tokens:sum"] == sent
        points = [
            nano_server.get(f"training_runs/{client.model_id}/metrics").json()["points"][0]["metrics"]
            for client in (together, apart)
        ]
        again = [client.forward(group, "cross_entropy").result() for client in (together, apart)]
    assert [point["tokens:sum"] for point in points] == [sent, sent]
    # The passes of the second run may have shared a step, or not.
    assert points[0]["rows:sum"] == PROMPT + GROUP * (ANSWER - 1) <= points[1]["rows:sum"] <= sent
    assert abs(points[0]["grad_norm"] / points[1]["grad_norm"] - 1) < 1e-3
    for a, b in zip(again[0].loss_fn_outputs, again[1].loss_fn_outputs, strict=True):
        np.testing.assert_allclose(a["logprobs"].data, b["logprobs"].data, atol=1e-3)
    deadline = time.monotonic() + 30  # an engine counts beside its work
    while count_shared(nano_server) - shared_before < (GROUP - 1) * PROMPT:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def count_shared(server: LiveServer) -> float:
    """The tokens that the engines did not compute, from the metrics page."""
    page = httpx.get(f"{server.url}/metrics", timeout=60).text
    lines = [line for line in page.splitlines() if "engine_tokens_total{" in line and 'kind="shared"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
