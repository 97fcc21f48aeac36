"""With `deterministic`, results do not depend on other requests, bit by bit; without it, the same workloads differ."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from support import tiny_models
from support.live import API_KEY, serving
from support.local_sampling import finish, make_prompt, make_sample
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.threads import Threads
from tinsmith.errors import SettingsError, UserError
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions
from tinsmith.samplers.local.kv_cache import probe_layers
from tinsmith.samplers.local.states import state_bytes
from tinsmith.types import (
    AdamParams,
    Datum,
    DimuonParams,
    LoraSpec,
    ModelShape,
    OptimStep,
    Pass,
    PassResult,
    Sample,
    SampleResult,
    SamplingParams,
)

ARCHS = ("qwen3", "llama", "gemma2", "gpt_oss", "qwen3_5")
NUM_DATA = 3

torch.set_num_threads(1)

SPECS = [
    LoraSpec(1, seed=1),
    LoraSpec(3, seed=2, train_mlp=False),
    LoraSpec(8, seed=3, train_attn=False, train_mlp=False),
    LoraSpec(16, seed=4, train_unembed=False),
    LoraSpec(5, seed=5, train_attn=False, train_unembed=False),
    LoraSpec(32, seed=6),
    LoraSpec(2, seed=7, train_attn=False),
    LoraSpec(7, seed=8, train_mlp=False, train_unembed=False),
]
LOSSES = ["cross_entropy", "ppo", "gspo", "importance_sampling", "cispo", "dro", "cross_entropy", "gspo"]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelShape]:
    return {arch: tiny_models.make(tmp_path_factory.mktemp(arch), arch) for arch in ARCHS}


def backend_of(shape: ModelShape, dtype: str = "float32", deterministic: str = "on") -> TorchBackend:
    backend = TorchBackend(shape, device="cpu", dtype=dtype, deterministic=deterministic)
    for i, spec in enumerate(SPECS):
        backend.create_model(f"m{i}", spec, "dimuon" if i == 3 else "adamw")
    return backend


def data_of(tenant: int, step: int) -> list[Datum]:
    """Ragged sequences; some positions, and the last sequence, have no weight."""
    rng = np.random.default_rng([tenant, step])
    data = []
    for index, length in enumerate(rng.integers(1, 70, NUM_DATA)):
        tokens, targets = rng.integers(0, tiny_models.VOCAB, (2, length))
        weights = rng.normal(size=length).astype(np.float32) * (rng.random(length) < 0.7) * (index != 2)
        inputs = {"target_tokens": targets}
        if LOSSES[tenant] == "cross_entropy":
            inputs["weights"] = weights
        else:
            inputs["advantages"], inputs["logprobs"] = weights, rng.normal(size=length).astype(np.float32) * 0.3 - 5
        data.append(Datum(tokens.astype(np.int32), inputs))
    return data


def request(tenant: int, data: list[Datum], *, forward_only: bool = False) -> Pass:
    return Pass("r", f"m{tenant}", tuple(data), LOSSES[tenant], {}, forward_only)


def step_of(tenant: int) -> OptimStep:
    params = DimuonParams(1e-2) if tenant == 3 else AdamParams(1e-3, grad_clip_norm=1.0)
    return OptimStep("o", f"m{tenant}", params)


def run(backend: TorchBackend, passes: list[Pass]) -> list[PassResult]:
    results = run_to_end(backend.run_passes(passes))
    assert all(isinstance(result, PassResult) for result in results), results
    return results  # pyright: ignore[reportReturnType]


StepLogprobs = list[list[np.ndarray]]


def train(backend: TorchBackend, groups: list[list[int]], cut: int, steps: int) -> dict[int, StepLogprobs]:
    """Each tenant's logprobs, step by step. `groups` of tenants share a step; `cut` sequences make a request."""
    logprobs: dict[int, StepLogprobs] = {tenant: [] for group in groups for tenant in group}
    for step in range(steps):
        for group in groups:
            passes = [
                request(tenant, data_of(tenant, step)[start : start + cut])
                for tenant in group
                for start in range(0, NUM_DATA, cut)
            ]
            results = run(backend, passes)
            for tenant in group:
                tenant_results = [r for p, r in zip(passes, results, strict=True) if p.model_id == f"m{tenant}"]
                logprobs[tenant].append([array for result in tenant_results for array in result.logprobs])
        for group in groups:
            outcomes = backend.optim_step([step_of(tenant) for tenant in group])
            assert all(isinstance(outcome, dict) for outcome in outcomes), outcomes
    return logprobs


def differences(
    first: tuple[TorchBackend, dict[int, StepLogprobs]], second: tuple[TorchBackend, dict[int, StepLogprobs]]
) -> int:
    """The number of differing bits in arrays of logprobs, weights and moments."""
    count = 0
    for tenant, logprobs in first[1].items():
        for ours, theirs in zip(logprobs, second[1][tenant], strict=True):
            count += sum(a.tobytes() != b.tobytes() for a, b in zip(ours, theirs, strict=True))
        models = [backend._models[f"m{tenant}"] for backend, _ in (first, second)]
        tensors = [[model.adapter.flat_P, *(model.moments or ())] for model in models]
        count += sum(not torch.equal(a, b) for a, b in zip(*tensors, strict=True))
    return count


TENANTS = list(range(len(SPECS)))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("arch", "dtype", "steps"),
    [("qwen3", "float32", 10), ("qwen3", "bfloat16", 1), ("gemma2", "float32", 1), ("qwen3_5", "float32", 1)],
)
def test_steps_have_the_same_bits_in_any_batch(
    shapes: dict[str, ModelShape], arch: str, dtype: str, steps: int
) -> None:
    ways = [([TENANTS], 3), ([[t] for t in TENANTS], 2), ([[7, 3, 5, 0], [6, 1, 4, 2]], 1)]
    runs = []
    for groups, cut in ways:
        backend = backend_of(shapes[arch], dtype)
        runs.append((backend, train(backend, groups, cut, steps)))
    assert [differences(runs[0], other) for other in runs[1:]] == [0, 0]


def test_without_it_the_same_steps_differ(shapes: dict[str, ModelShape]) -> None:
    runs = []
    for groups in ([TENANTS], [[t] for t in TENANTS]):
        backend = backend_of(shapes["qwen3"], deterministic="off")
        runs.append((backend, train(backend, groups, 3, steps=1)))
    assert differences(*runs) > 0


@pytest.mark.parametrize("arch", ["llama", "gpt_oss"])
def test_gradients_do_not_depend_on_requests_and_their_number(shapes: dict[str, ModelShape], arch: str) -> None:
    backend = backend_of(shapes[arch])
    gradients = []
    for cut, together in ((3, True), (1, True), (1, False)):
        for tenant in (0, 5):
            backend.create_model(f"m{tenant}", SPECS[tenant])
        passes = [request(t, data_of(t, 0)[at : at + cut]) for t in (0, 5) for at in range(0, NUM_DATA, cut)]
        for group in [passes] if together else [[pass_] for pass_ in passes]:
            run(backend, group)
        gradients.append([backend._models[f"m{t}"].gradient_P for t in (0, 5)])
    for repeated in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], repeated, strict=True))
    assert all(float(gradient.abs().max()) > 0 for gradient in gradients[0])


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("qwen3", "float32"),
        ("qwen3", "bfloat16"),
        ("gemma2", "float32"),
        ("gpt_oss", "float32"),
        ("qwen3_5", "float32"),
    ],
)
def test_a_forward_has_the_bits_of_a_forward_backward(shapes: dict[str, ModelShape], arch: str, dtype: str) -> None:
    backend = backend_of(shapes[arch], dtype)
    for tenant in (0, 1):
        data = data_of(tenant, 0)
        # So short that its weighted rows alone would use other kernels than all rows.
        data.append(Datum(data[0].tokens_N[:1].repeat(20), {n: a[:1].repeat(20) for n, a in data[0].inputs.items()}))
        weights = data[-1].inputs["weights" if tenant == 0 else "advantages"]
        weights[:] = np.arange(20) < 9
        (trained,) = run(backend, [request(tenant, data)])
        (scored,) = run(backend, [request(tenant, data, forward_only=True)])
        for ours, theirs in zip(trained.logprobs, scored.logprobs, strict=True):
            assert ours.tobytes() == theirs.tobytes()
        assert trained.metrics == scored.metrics


def test_an_exception_leaves_the_gradient_as_it_was(shapes: dict[str, ModelShape]) -> None:
    backend = backend_of(shapes["qwen3"])
    run(backend, [request(0, data_of(0, 0))])
    gradient = backend._models["m0"].gradient_P
    assert gradient is not None
    before = gradient.clone()

    def fail() -> None:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        run_to_end(backend.run_passes([request(0, data_of(0, 1))]), fail)
    after = backend._models["m0"].gradient_P
    assert after is not None and torch.equal(after, before)


# Sampling


def publish_versions(backend: TorchBackend) -> None:
    """Versions with weights that matter."""
    for i in range(len(SPECS)):
        generator = torch.Generator().manual_seed(i)
        adapter = backend._models[f"m{i}"].adapter
        for _, b_Or in adapter.weights.values():
            b_Or.normal_(0, 0.05, generator=generator)
        adapter.refresh()
        backend.publish(f"m{i}", f"v{i}")


HOT = SamplingParams(max_tokens=20, temperature=1.0, stop_eos=False, seed=3)
COMPARED_SAMPLES = [
    make_sample("a", make_prompt(37, 1), HOT, version_id="v0", num_samples=3, topk_sample_logprobs=4),
    make_sample("b", make_prompt(5, 2), replace(HOT, temperature=0.7, top_k=30), version_id="v5", prompt_logprobs=True),
    make_sample("c", make_prompt(64, 3), replace(HOT, temperature=0.0), prompt_logprobs=True, topk_prompt_logprobs=3),
    make_sample("d", make_prompt(1, 4), replace(HOT, top_p=0.8), version_id="v7"),
    make_sample("e", make_prompt(90, 5), HOT, version_id="v3", prompt_alt_tokens_k=2),
]
NOISE = [
    make_sample(f"n{i}", make_prompt(3 + 5 * i, 9), replace(HOT, temperature=0.5 + i / 9), version_id=f"v{i % 8}")
    for i in range(10)
]


def sampler_of(backend: TorchBackend, **options: int) -> LocalSampler:
    chosen = SamplerOptions(deterministic=backend._deterministic, **options)
    return LocalSampler(backend.base, backend._versions, options=chosen)


def outcomes(sampler: LocalSampler, samples: list[Sample], at_once: int = 100) -> dict[str, bytes]:
    """Each request's result as bytes; `at_once` requests are submitted per step."""
    waiting, results = list(samples), {}
    while waiting:
        for sample in waiting[:at_once]:
            sampler.submit(sample)
        waiting = waiting[at_once:]
        if waiting:
            results |= dict(sampler.step())
    results |= finish(sampler)
    return {name: as_bytes(result) for name, result in results.items()}


def as_bytes(result: SampleResult | UserError) -> bytes:
    assert isinstance(result, SampleResult), result
    arrays = []
    for sequence in result.sequences:
        arrays += [sequence.tokens_T, sequence.logprobs_T]
        arrays += [sequence.topk.token_ids_Tk, sequence.topk.logprobs_Tk] if sequence.topk else []
    arrays += [] if result.prompt_logprobs_T is None else [result.prompt_logprobs_T]
    arrays += [] if result.topk_prompt is None else [result.topk_prompt.logprobs_Tk]
    arrays += [] if result.alt_tokens is None else [result.alt_tokens.token_ids_Tk, result.alt_tokens.logprobs_Tk]
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


def sample_alone(backend: TorchBackend, samples: list[Sample] = COMPARED_SAMPLES) -> dict[str, bytes]:
    results = {}
    for sample in samples:
        results |= outcomes(sampler_of(backend), [sample])
    return results


def drop_noise(answers: dict[str, bytes]) -> dict[str, bytes]:
    return {name: text for name, text in answers.items() if not name.startswith("n")}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [("qwen3", "float32"), ("qwen3", "bfloat16"), ("llama", "float32"), ("gemma2", "bfloat16"), ("qwen3_5", "float32")],
)
def test_samples_have_the_same_bits_in_any_batch(shapes: dict[str, ModelShape], arch: str, dtype: str) -> None:
    backend = backend_of(shapes[arch], dtype)
    publish_versions(backend)
    expected = sample_alone(backend)
    assert drop_noise(outcomes(sampler_of(backend), [*NOISE[:5], *COMPARED_SAMPLES, *NOISE[5:]])) == expected
    chunked = sampler_of(backend, max_tokens_per_step=7, block_size=4)
    assert drop_noise(outcomes(chunked, [*COMPARED_SAMPLES[::-1], *NOISE], at_once=2)) == expected
    # So few blocks that sequences are preempted and computed again.
    token_bytes, states = chunked._cache.token_bytes, 20 * state_bytes(probe_layers(backend.base))
    tight = sampler_of(backend, kv_cache_bytes=token_bytes * 160 + states, max_sequences=5)
    assert drop_noise(outcomes(tight, [*NOISE[:3], *COMPARED_SAMPLES])) == expected


def test_samples_of_experts_have_the_same_bits_in_any_batch(shapes: dict[str, ModelShape]) -> None:
    backend = backend_of(shapes["gpt_oss"])
    publish_versions(backend)
    short_samples = [replace(sample, prompt_T=sample.prompt_T[:9]) for sample in COMPARED_SAMPLES[:3]]
    assert drop_noise(outcomes(sampler_of(backend), [*NOISE[:2], *short_samples])) == sample_alone(
        backend, short_samples
    )


@pytest.mark.parametrize(("arch", "num_answer", "hits"), [("qwen3", 50, 64), ("qwen3_5", 60, 80), ("qwen3_5", 50, 16)])
def test_a_prefix_that_an_answer_has_cached_gives_the_bits_of_a_prompt(
    shapes: dict[str, ModelShape], arch: str, num_answer: int, hits: int
) -> None:
    """Blocks may be of prompts or answers, in pieces of any size."""
    backend = backend_of(shapes[arch])
    publish_versions(backend)
    warm = sampler_of(backend)
    first = make_sample("first", make_prompt(21), replace(HOT, max_tokens=60), version_id="v5")
    warm.submit(first)
    answer = finish(warm)["first"].sequences[0].tokens_T
    second = make_sample("second", np.concatenate([make_prompt(21), answer[:num_answer]]), HOT, version_id="v5")
    fresh = sampler_of(backend)
    for sampler in (warm, fresh):
        sampler.submit(second)
    ours, theirs = (finish(sampler)["second"] for sampler in (warm, fresh))
    assert ours.prompt_cache_hit_tokens == hits and theirs.prompt_cache_hit_tokens == 0
    assert as_bytes(ours) == as_bytes(theirs)


def test_without_it_the_same_samples_differ(shapes: dict[str, ModelShape]) -> None:
    backend = backend_of(shapes["qwen3"], "bfloat16", deterministic="off")
    publish_versions(backend)
    assert drop_noise(outcomes(sampler_of(backend), [*NOISE, *COMPARED_SAMPLES])) != sample_alone(backend)


# The check of the kernels


def test_a_machine_whose_bits_change_from_call_to_call_is_refused(
    shapes: dict[str, ModelShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = backend_of(shapes["qwen3"]).base
    hidden, rng = base.hidden, np.random.default_rng(0)
    monkeypatch.setattr(base, "hidden", lambda *args, **kwargs: hidden(*args, **kwargs) * (1 + 1e-6 * rng.random()))
    with pytest.raises(SettingsError, match="repeating a forward gives different bits"):
        LocalSampler(base, {}, options=SamplerOptions(deterministic=True))


def test_it_is_on_or_off_and_of_the_cpu(shapes: dict[str, ModelShape]) -> None:
    with pytest.raises(SettingsError, match="deterministic is 'yes'"):
        TorchBackend(shapes["qwen3"], device="cpu", deterministic="yes")


def test_pinned_threads_are_as_many_for_one_row_as_for_many() -> None:
    torch.set_num_threads(2)
    try:
        threads = Threads(1000, torch.device("cpu"))
        threads.fit(1)
        assert torch.get_num_threads() == 1
        threads.pin()
        threads.fit(1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


# Through the whole service


def datum(seed: int, length: int) -> types.Datum:
    tokens = np.random.default_rng(seed).integers(0, 400, length + 1)
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


DATA = [datum(seed, length) for seed, length in enumerate((40, 7, 90))]


def journey(service: tinker.ServiceClient, cut: int) -> list[object]:
    """A client's results of two steps, with `cut` datums per request, and of samples after them."""
    client = service.create_lora_training_client("tinsmith/nano", rank=8, seed=5).result()
    results: list[object] = []
    for _ in range(2):
        passes = [client.forward_backward(DATA[at : at + cut], "cross_entropy") for at in range(0, len(DATA), cut)]
        stepped = client.optim_step(types.AdamParams(learning_rate=1e-3))
        for passed in passes:
            results += [output["logprobs"].tolist() for output in passed.result().loss_fn_outputs]
        results.append(stepped.result().metrics["grad_norm"])
    sampler = client.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=10, seed=3, stop=[])
    for prompt in (DATA[0].model_input, DATA[2].model_input):
        sampled = sampler.sample(prompt, 2, params, include_prompt_logprobs=True).result()
        results += [sampled.prompt_logprobs, [(list(s.tokens), list(s.logprobs or ())) for s in sampled.sequences]]
    return results


def make_noise(url: str, seed: int, stop: threading.Event) -> None:
    """Another tenant sends requests until it is stopped."""
    with tinker.ServiceClient(base_url=url, api_key=f"tml-noise-{seed}") as service:
        client = service.create_lora_training_client("tinsmith/nano", rank=4 + seed).result()
        sampler = service.create_sampling_client(base_model="tinsmith/nano").result()
        while not stop.is_set():
            waiting = [sampler.sample(DATA[i].model_input, 1, types.SamplingParams(max_tokens=9)) for i in range(3)]
            client.forward_backward([datum(seed, 15)], "cross_entropy").result()
            client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            for future in waiting:
                future.result()


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_a_server_gives_the_same_bits_beside_busy_tenants(tmp_path: Path) -> None:
    with serving(tmp_path / "data", "--deterministic") as server:
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            quiet_results = journey(service, len(DATA))
            stop = threading.Event()
            noise = [threading.Thread(target=make_noise, args=(server.url, seed, stop)) for seed in (1, 2)]
            for thread in noise:
                thread.start()
            try:
                busy_results = journey(service, 1)
            finally:
                stop.set()
                for thread in noise:
                    thread.join()
    assert busy_results == quiet_results
