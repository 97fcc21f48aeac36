"""Dedicated samplers in processes with separate data directories return the same answers, also after deaths."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from support import external_engines
from support.cluster import BASE, Cluster, start_cluster
from support.databases import POSTGRES, SQLITE
from support.live import API_KEY, LiveServer, freeze, serving
from support.raw_client import RawClient, connect, pass_body
from tinsmith.samplers.fake import FakeSampler
from tinsmith.types import ModelShape, Sample, SamplingParams
from tinsmith.wire.sampling import read_sample_result

SAMPLERS = ("alpha", "beta")
STEP = 0.01


@pytest.fixture(scope="module", params=[SQLITE, pytest.param(POSTGRES, marks=pytest.mark.slow)])
def cluster(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with start_cluster(tmp_path_factory.mktemp("samplers"), request.param) as new_cluster:
        yield new_cluster


@pytest.fixture(scope="module")
def processes(cluster: Cluster) -> Iterator[dict[str, LiveServer]]:
    with contextlib.ExitStack() as stack:
        servers = {
            "server": stack.enter_context(cluster.process("server", "server")),
            "engine": stack.enter_context(cluster.process("engine", "engine")),
            # Memory for one version: sampling two versions evicts and fetches them in turn.
            "alpha": stack.enter_context(cluster.process("alpha", "sampler", settings={"SAMPLER_VERSION_BYTES": "1"})),
            "beta": stack.enter_context(cluster.process("beta", "sampler")),
        }
        cluster.await_ready("engine", *SAMPLERS)
        yield servers


@pytest.fixture
def client(cluster: Cluster, processes: dict[str, LiveServer]) -> Iterator[RawClient]:
    cluster.await_ready("engine", *SAMPLERS)  # processes that an earlier test killed
    cluster.wait(lambda: cluster.engines()["engine"].address)
    raw_client = connect(processes["server"])
    yield raw_client
    raw_client.http.close()


def send(client: RawClient, sampler: str, seq_id: int, prompt: Sequence[int], seed: int = 7) -> str:
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
        "sampling_params": {"max_tokens": 5, "seed": seed},
    }
    return client.ok("asample", body)["request_id"]


def tokens_of(client: RawClient, request_id: str) -> list[list[int]]:
    result = read_sample_result(client.result(request_id).content, request_id)
    return [sequence.tokens_T.tolist() for sequence in result.sequences]


def expected_tokens(weight: float, prompt: Sequence[int], seed: int = 7) -> list[list[int]]:
    """Return the result of an engine's own sampler."""
    sampler = FakeSampler(ModelShape(BASE, "", 512, 2048, "fake"), {"v": weight})
    sampler.submit(Sample("r", "v", np.array(prompt, np.int32), 2, SamplingParams(max_tokens=5, seed=seed)))
    ((_, result),) = sampler.step()
    return [sequence.tokens_T.tolist() for sequence in result.sequences]  # type: ignore[union-attr]


class Run:
    """A run whose weight decreases with every step, so that answers identify their version."""

    def __init__(self, client: RawClient) -> None:
        self.client = client
        self.session_id = client.session()
        self.model_id = client.model(self.session_id)
        self.seq_id = 0
        self.weight = 0.0
        self.num_published = 0

    def next(self) -> int:
        self.seq_id += 1
        return self.seq_id

    def step(self) -> None:
        assert self.client.send_pass(pass_body(self.model_id, self.next())).status_code == 200
        self.client.result(self.client.step(self.model_id, self.next(), learning_rate=STEP))
        self.weight -= STEP

    def publish(self) -> tuple[str, float]:
        self.num_published += 1
        body = {"model_id": self.model_id, "seq_id": self.next(), "sampling_session_seq_id": self.num_published}
        answer = self.client.result(self.client.ok("save_weights_for_sampler", body)["request_id"])
        return answer.json()["sampling_session_id"], self.weight

    def save(self, name: str) -> str:
        body = {"model_id": self.model_id, "seq_id": self.next(), "path": name, "overwrite": True}
        return self.client.result(self.client.ok("save_weights_for_sampler", body)["request_id"]).json()["path"]


def executors(cluster: Cluster, request_ids: Sequence[str]) -> list[str | None]:
    names = {row.engine_id: name for name, row in cluster.engines().items()}
    executor_ids = dict(cluster.rows("request_id, executor", "futures"))
    return [names.get(executor_ids[request_id] or "") for request_id in request_ids]


def crash_in(cluster: Cluster) -> str:
    """Describe how a process ended unexpectedly."""
    _, mark, text = cluster.log().partition("Traceback")
    return mark + text[:3000]


def test_samples_are_spread_over_the_samplers_and_answered_as_ever(cluster: Cluster, client: RawClient) -> None:
    sampler = client.sampler()
    prompts = [[index, index + 1] for index in range(30)]
    ids = [send(client, sampler, index, prompt) for index, prompt in enumerate(prompts)]
    assert [tokens_of(client, request_id) for request_id in ids] == [expected_tokens(0.0, prompt) for prompt in prompts]
    assert set(executors(cluster, ids)) == set(SAMPLERS)


def test_turns_of_a_conversation_go_to_one_sampler(cluster: Cluster, client: RawClient) -> None:
    sampler = client.sampler()
    prompt = list(range(1, 80))
    ids = [send(client, sampler, index, [*prompt, *[index] * 40 * index]) for index in range(2)]
    ids += [send(client, sampler, 2, [*prompt, *[1] * 40, *[2] * 40]), send(client, sampler, 3, prompt)]
    for request_id in ids:
        client.result(request_id)
    assert len(set(executors(cluster, ids))) == 1


def test_every_answer_is_of_its_own_version(cluster: Cluster, client: RawClient) -> None:
    run, requests = Run(client), []
    for _ in range(6):
        run.step()
        sampler, weight = run.publish()
        for index in range(3):
            prompt = [run.num_published, index]
            requests.append((send(client, sampler, index, prompt), weight, prompt))
    for request_id, weight, prompt in requests:
        assert tokens_of(client, request_id) == expected_tokens(weight, prompt)
    assert set(executors(cluster, [request_id for request_id, *_ in requests])) <= set(SAMPLERS)
    first = f"{run.session_id}:sample:1"
    prompt = [50, 51]
    again = [send(client, first, 10 + index, [*prompt, index]) for index in range(6)]
    for index, request_id in enumerate(again):
        assert tokens_of(client, request_id) == expected_tokens(-STEP, [*prompt, index]), (
            "an old version is loaded again"
        )
    assert "goes to the engines" not in cluster.log()


def test_a_checkpoint_that_was_overwritten_is_not_served_any_more(client: RawClient) -> None:
    run = Run(client)
    run.step()
    path = run.save("newest")
    body = {"session_id": run.session_id, "sampling_session_seq_id": 90, "model_path": path}
    sampler = client.ok("create_sampling_session", body)["sampling_session_id"]
    prompts = [[60, index] for index in range(6)]
    ids = [send(client, sampler, index, prompt) for index, prompt in enumerate(prompts)]
    assert [tokens_of(client, request_id) for request_id in ids] == [
        expected_tokens(-STEP, prompt) for prompt in prompts
    ]
    run.step()
    assert run.save("newest") == path
    ids = [send(client, sampler, 10 + index, prompt) for index, prompt in enumerate(prompts)]
    assert [tokens_of(client, request_id) for request_id in ids] == [
        expected_tokens(-2 * STEP, prompt) for prompt in prompts
    ]


def test_an_inflight_version_is_sampled_by_its_engine_which_alone_knows_the_newest(
    cluster: Cluster, client: RawClient
) -> None:
    run = Run(client)
    for step_index in (1, 2):
        run.step()
        body = {"model_id": run.model_id, "seq_id": run.next(), "sampling_session_seq_id": step_index}
        request = client.ok("save_weights_for_sampler", body | {"kind": "inflight"})["request_id"]
        sampler = client.result(request).json()["sampling_session_id"]
        request_id = send(client, sampler, 0, [70])
        assert tokens_of(client, request_id) == expected_tokens(-STEP * step_index, [70])
        assert executors(cluster, [request_id]) == [None]


def test_an_unknown_version_fails_as_in_an_engine(client: RawClient) -> None:
    run = Run(client)
    path = run.save("gone")
    body = {"session_id": run.session_id, "sampling_session_seq_id": 91, "model_path": path}
    sampler = client.ok("create_sampling_session", body)["sampling_session_id"]
    training_run_id, name = path.removeprefix("tinker://").split("/", 1)
    deleted = client.http.delete(f"training_runs/{training_run_id}/checkpoints/{name}")
    assert deleted.status_code in (200, 204), deleted.text
    assert "gone" in client.error(send(client, sampler, 0, [1, 2]))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_operators_have_a_sampler_sleep_and_wake_over_http(cluster: Cluster, client: RawClient, kind: str) -> None:
    """Sleep releases the device once no sample runs, and wake-up takes it back, as the engines' documentation says."""
    fake = external_engines.Engine(vocab_size=512, context=2048)
    release, resume = {
        "vllm": ("/sleep?level=1", "/wake_up?tags=kv_cache"),
        "sglang": ("/release_memory_occupation", "/resume_memory_occupation"),
    }[kind]
    outside = {"SAMPLER": kind, "SAMPLER_SHARES_DEVICE": "true"}
    root = "operator/samplers"
    other_ids = [cluster.engines()[name].engine_id for name in SAMPLERS]
    for other in other_ids:
        assert client.http.post(f"{root}/{other}/drain").json()["state"] == "draining"
    with (
        external_engines.running(kind, fake),
        cluster.process(kind, "sampler", settings=outside | {"SAMPLER_URL": fake.url}),
    ):
        cluster.await_ready(kind)
        name = cluster.engines()[kind].engine_id
        seq_ids = itertools.count()

        def status() -> dict:
            return client.http.get(f"{root}/{name}").json()

        def sampler_name() -> str | None:
            client.result(request_id := send(client, version, next(seq_ids), [7]))
            return executors(cluster, [request_id])[0]

        run = Run(client)
        run.step()
        version, _ = run.publish()
        cluster.wait(lambda: sampler_name() == kind)
        cluster.wait(lambda: [version_row["version"] for version_row in status()["versions"]] == [version])
        assert (
            status()["address"] == fake.url and status()["engine"].lower() == kind and status()["versions"][0]["bytes"]
        )
        assert client.http.post(f"{root}/{name}/sleep").json()["state"] == "sleeping"
        cluster.wait(lambda: status()["state"] == "asleep")
        assert fake.paths()[-1] == release
        cluster.wait(lambda: sampler_name() is None)
        assert fake.paths()[-1] == release
        assert client.http.post(f"{root}/{name}/wake").json()["state"] == "waking"
        cluster.wait(lambda: status()["state"] == "ready")
        assert fake.paths()[-1] == resume
        cluster.wait(lambda: sampler_name() == kind)
    for other in other_ids:
        refused = client.http.post(f"{root}/{other}/sleep")
        assert refused.status_code == 400 and "own sampler has no sleep mode" in refused.json()["detail"]
        assert client.http.post(f"{root}/{other}/wake").json()["state"] == "ready"
    assert crash_in(cluster) == ""


@pytest.mark.parametrize("how", ["killed", "frozen", "stopped"])
def test_a_sampler_that_is_lost_loses_nothing(cluster: Cluster, client: RawClient, how: str) -> None:
    run = Run(client)
    run.step()
    sampler, weight = run.publish()
    prompts = [[index % 500, 3] for index in range(120)]
    ids = []
    pid = cluster.engines()["alpha"].pid
    for index, prompt in enumerate(prompts):
        ids.append(send(client, sampler, index, prompt))
        if index == 60:
            if how == "killed":
                os.kill(pid, signal.SIGKILL)
            elif how == "frozen":
                freeze(pid, cluster.directory)
            else:
                os.kill(pid, signal.SIGTERM)
    try:
        answers = [tokens_of(client, request_id) for request_id in ids]
    finally:
        if how == "frozen":
            os.kill(pid, signal.SIGCONT)
    assert answers == [expected_tokens(weight, prompt) for prompt in prompts]
    assert cluster.rows("count(*)", f"future_results WHERE request_id LIKE '{sampler}:%'") == [(len(ids),)]
    cluster.wait(lambda: (row := cluster.engines()["alpha"]).pid != pid and row.state == "ready")
    assert crash_in(cluster) == ""


def test_without_any_sampler_the_engine_samples(cluster: Cluster, processes: dict[str, LiveServer]) -> None:
    cluster.await_ready("engine", *SAMPLERS)
    client = connect(processes["server"])
    run = Run(client)
    run.step()
    sampler, weight = run.publish()
    ids = [send(client, sampler, index, [index]) for index in range(10)]
    for name in SAMPLERS:
        # The supervisor dies first, so that the sampler's death is not announced.
        pid = cluster.engines()[name].pid
        processes[name].process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    ids += [send(client, sampler, index, [index]) for index in range(10, 20)]
    assert [tokens_of(client, request_id) for request_id in ids] == [expected_tokens(weight, [n]) for n in range(20)]
    client.http.close()


def test_a_training_loop_samples_its_newest_weights_from_a_dedicated_sampler(tmp_path: Path) -> None:
    """With the real SDK and the embedded model, samples have the logprobs of their own version."""
    with (
        serving(tmp_path / "data", "--samplers", "1") as server,
        tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service,
    ):
        deadline = time.monotonic() + 90
        while not server.count("engines WHERE kind = 'sampler' AND state = 'ready'"):
            assert time.monotonic() < deadline, "the sampler does not come"
            time.sleep(0.1)
        model = service.create_lora_training_client("tinsmith/nano", rank=8, seed=1).result()
        prompt = [5, 17, 42, 9]
        for step in range(3):
            sampler = model.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=step)
            answer = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=2, sampling_params=params).result()
            data = []
            for sequence in answer.sequences:
                tokens = [*prompt, *sequence.tokens]
                inputs = {
                    "target_tokens": np.array(tokens[1:]),
                    "weights": np.array([0.0] * (len(prompt) - 1) + [1.0] * len(sequence.tokens), np.float32),
                }
                data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
            passed = model.forward_backward(data, "cross_entropy").result()
            for sequence, outputs in zip(answer.sequences, passed.loss_fn_outputs, strict=True):
                trained = outputs["logprobs"].to_numpy()[len(prompt) - 1 :]
                np.testing.assert_allclose(sequence.logprobs, trained, atol=2e-4)
            model.optim_step(types.AdamParams(learning_rate=0.05)).result()
        # It also answers OpenAI's clients, whole and streamed.
        chat = {"model": BASE, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 12}
        headers = {"authorization": f"Bearer {API_KEY}"}
        url = f"{server.url}/v1/chat/completions"
        completion = httpx.post(url, json=chat | {"temperature": 0}, headers=headers, timeout=60).json()
        text = httpx.post(url, json=chat | {"temperature": 0, "stream": True}, headers=headers, timeout=60).text
        parts = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
        streamed_text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
        assert streamed_text == completion["choices"][0]["message"]["content"] != ""
        assert server.count("futures WHERE kind = 'sample' AND executor LIKE 'sampler%' AND state = 'done'") == 5
