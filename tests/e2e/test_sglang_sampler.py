"""A real SGLang samples: `make test-sglang`.

SGLANG_PYTHON is an interpreter that has SGLang. On a CPU its CUDA kernels are replaced by a module that refuses to be
called (support/sglang_on_cpu), and it runs its attention and adapters in torch. Held against the sampler of the torch
backend on the same weights. SGLang has deterministic inference, and so seeds, on GPUs only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from support.live import API_KEY, free_port, serving
from support.real_engines import (
    BOUND,
    DRAWN,
    PATIENCE_S,
    PROMPT,
    Pair,
    answers,
    check_alternating_versions,
    compare_answers,
    list_greedy_samples,
    logprobs_of,
    make_sample,
    train_versions,
)
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.with_remote_sampler import with_remote_sampler
from tinsmith.base_models import eos_token_ids, nano, read_shape
from tinsmith.errors import NotSupportedError, UserError
from tinsmith.samplers.remote.client import RemoteEngine
from tinsmith.samplers.remote.sglang import SglangDialect
from tinsmith.types import Adjustments, Sample

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

KERNELS = Path(__file__).parents[1] / "support" / "sglang_on_cpu"
OPTIONS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--lora-backend", "torch_native"),
    *("--mem-fraction-static", "0.1", "--max-total-tokens", "8192", "--disable-cuda-graph", "--skip-server-warmup"),
    *("--max-lora-rank", "32", "--disable-overlap-schedule"),
)
GPU_ONLY = "--enable-deterministic-inference"
VERSIONS = [None, "layers", "other"]


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an SGLang that serves nano, started as Tinsmith starts one but for what needs a GPU."""
    python = os.environ.get("SGLANG_PYTHON")
    assert python, "set SGLANG_PYTHON to an interpreter that has SGLang"
    shape = read_shape(nano.MODEL_NAME, nano.path())
    port = free_port()
    dialect = SglangDialect(eos_token_ids(shape), shape.vocab_size)
    command = dialect.command(python, shape.path, port, OPTIONS, shares_device=False)
    environment = {**os.environ, "PYTHONPATH": str(KERNELS), "SGLANG_USE_CPU_ENGINE": "1"}
    log_path = tmp_path_factory.mktemp("sglang") / "log"
    with log_path.open("wb") as log:
        child = subprocess.Popen(
            [word for word in command if word != GPU_ONLY],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not _is_up(url):
            assert child.poll() is None and time.monotonic() < deadline, log_path.read_text()[-3000:]
            time.sleep(1)
        yield url
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def pair(engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    shape = read_shape(nano.MODEL_NAME, nano.path())
    trainer = TorchBackend(shape, dtype="float32")
    engine = RemoteEngine(directory / "adapters", directory / "none", url=engine_url)
    backend = with_remote_sampler(trainer, "sglang", engine, shape, eos_token_ids(shape))
    try:
        train_versions(backend)
        yield Pair(backend, trainer.sampler, backend.sampler)
    finally:
        backend.sampler.close()


def test_greedy_answers_and_all_logprobs_are_ours(pair: Pair) -> None:
    adjustments = Adjustments(presence_penalty=0.5, frequency_penalty=0.3, logit_bias=((34, -3.0),))
    compare_answers(pair, list_greedy_samples(VERSIONS, adjustments))


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_answers_have_our_logprobs(pair: Pair, name: str) -> None:
    (result,) = answers(pair.external, make_sample(name, "layers", 3, **DRAWN[name]))
    for sequence in result.sequences:
        our_logprobs = logprobs_of(pair, "layers", sequence.tokens_T, cast(float, DRAWN[name]["temperature"]))
        np.testing.assert_allclose(sequence.logprobs_T, our_logprobs, atol=BOUND, rtol=0)


def test_versions_alternate_and_never_mix(pair: Pair) -> None:
    check_alternating_versions(pair, VERSIONS)


def refuse(pair: Pair, sample: Sample) -> str:
    """The error with which a sample is refused, when it is submitted or later."""
    try:
        pair.external.submit(sample)
    except NotSupportedError as error:
        return str(error)
    outcome: object = None
    deadline = time.monotonic() + PATIENCE_S
    while outcome is None and time.monotonic() < deadline:
        outcome = dict(pair.external.step()).get(sample.request_id)
    assert isinstance(outcome, UserError | NotSupportedError), outcome
    return str(outcome)


def test_adapters_of_the_unembedding_are_refused_where_torch_computes_them(pair: Pair) -> None:
    """Their answers would begin with the tokens of other requests' adapters."""
    assert "train_unembed=False" in refuse(pair, make_sample("everything", "everything"))


def test_seeds_are_refused_without_deterministic_inference(pair: Pair) -> None:
    assert GPU_ONLY in refuse(pair, make_sample("seeded", "layers", seed=5, temperature=1.0))


def test_the_sdk_trains_here_and_samples_there(engine_url: str, tmp_path: Path) -> None:
    tokens = PROMPT.tolist()
    inputs = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)}
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: types.TensorData.from_numpy(values) for name, values in inputs.items()},
    )
    settings = {"SAMPLER": "sglang", "SAMPLER_URL": engine_url}
    with (
        serving(tmp_path / "data", "--model", nano.MODEL_NAME, settings=settings) as live,
        tinker.ServiceClient(base_url=live.url, api_key=API_KEY) as service,
    ):
        client = service.create_lora_training_client(nano.MODEL_NAME, rank=8, train_unembed=False).result()
        for _ in range(2):
            client.forward_backward([datum], "cross_entropy").result()
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            expected = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
            sampler = client.save_weights_and_get_sampling_client().result()
            scores = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
            np.testing.assert_allclose(np.array(scores[1:], float), expected, atol=1e-3)
            params = types.SamplingParams(max_tokens=12)
            for sequence in sampler.sample(types.ModelInput.from_ints(tokens), 2, params).result().sequences:
                assert len(sequence.tokens) == 12 or sequence.stop_reason == "stop"
