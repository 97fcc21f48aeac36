"""Sampling on the device against sampling on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu.device import DEVICE, adapter_on
from support import tiny_models
from support.local_sampling import HOT, assert_same, finish, make_prompt, make_sample, run
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.adapters import Adapter
from tinsmith.backends.torch.model import BaseModel
from tinsmith.samplers.local.engine import LocalSampler
from tinsmith.types import Adjustments, Datum, LoraSpec, ModelShape, Pass, PassResult, SamplingParams
from unit.test_local_sampler import _crowd

SEEDS = {"a": (1, 4), "b": (2, 16), "c": (3, 5), "d": (4, 8)}
"""Versions: seed and rank."""


@pytest.fixture(scope="module", params=["qwen3", "llama", "gemma2", "gpt_oss"])
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("llama"), "llama")


def sampler_on(
    shape: ModelShape, device: str = DEVICE, dtype: str = "float32"
) -> tuple[LocalSampler, dict[str, Adapter]]:
    base = BaseModel.load(shape, device=device, dtype=dtype)
    versions = {name: adapter_on(base, seed, rank=rank) for name, (seed, rank) in SEEDS.items()}
    return LocalSampler(base, versions), versions


def test_answers_of_all_kinds_are_the_cpus(shape: ModelShape) -> None:
    samples = _crowd(np.random.default_rng(2), 30, [None, *SEEDS])
    expected = run(sampler_on(shape, "cpu")[0], *samples)
    results = run(sampler_on(shape)[0], *samples)
    for sample in samples:
        assert_same(results[sample.request_id], expected[sample.request_id], atol=3e-4)


def test_scores_of_prompts_are_the_cpus(shape: ModelShape) -> None:
    prompt = make_prompt(60)
    targets = np.stack([prompt[1:], prompt[:-1]], 1).astype(np.int64)
    params = replace(HOT, max_tokens=3)
    options_by_name: dict[str, dict[str, object]] = {
        "all": {"prompt_logprobs": True, "topk_prompt_logprobs": 5, "topk_sample_logprobs": 4},
        "targets": {"target_prompt_logprobs": targets},
        "others": {"prompt_alt_tokens_k": 3},
    }
    samples = [
        make_sample(name, prompt, params, version_id="a", **options) for name, options in options_by_name.items()
    ]
    expected, results = (run(sampler_on(shape, device)[0], *samples) for device in ("cpu", DEVICE))
    for sample in samples:
        assert_same(results[sample.request_id], expected[sample.request_id], atol=3e-4)


ADJUSTED = {
    "min_p": Adjustments(min_p=0.02),
    "penalties": Adjustments(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2),
    "bias": Adjustments(logit_bias=((5, 4.0), (17, -100.0))),
}


def test_adjusted_draws_are_the_cpus(llama: ModelShape) -> None:
    samples = [
        make_sample(name, make_prompt(20), replace(HOT, top_p=0.9, adjustments=adjustments), num_samples=2)
        for name, adjustments in ADJUSTED.items()
    ]
    expected, results = (run(sampler_on(llama, device)[0], *samples) for device in ("cpu", DEVICE))
    for sample in samples:
        assert_same(results[sample.request_id], expected[sample.request_id], atol=3e-4)


def test_a_cached_prompt_and_a_stop_are_what_they_are_on_the_cpu(llama: ModelShape) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0, stop_eos=False)
    free = run(sampler_on(llama, "cpu")[0], make_sample("free", make_prompt(40), params))["free"]
    stop = tiny_models.tokenizer().decode(free.sequences[0].tokens_T[5:8].tolist())
    stopping = replace(params, stop_strings=(stop,))
    runs = []
    for device in ("cpu", DEVICE):
        sampler, _ = sampler_on(llama, device)
        first = run(sampler, make_sample("first", make_prompt(40), params))["first"]
        second = run(sampler, make_sample("second", make_prompt(40), stopping))["second"]
        runs.append((first, second))
    for expected, ours in zip(*runs, strict=True):
        assert_same(ours, expected, atol=3e-4)
        assert ours.prompt_cache_hit_tokens == expected.prompt_cache_hit_tokens
    assert runs[1][1].prompt_cache_hit_tokens and runs[1][1].sequences[0].stop_reason == "stop"


def test_in_bfloat16_a_trainer_finds_what_was_drawn(llama: ModelShape) -> None:
    backend = TorchBackend(llama, device=DEVICE, dtype="bfloat16")
    backend._sampler = sampler = LocalSampler(backend.base, backend._versions)
    for index, rank in enumerate((8, 8, 16)):
        backend.create_model(f"m{index}", LoraSpec(rank, seed=index))
        backend._models[f"m{index}"].adapter.flat_P.copy_(adapter_on(backend.base, index, rank=rank).flat_P)
        backend._models[f"m{index}"].adapter.refresh()
        backend.publish(f"m{index}", f"v{index}")
    params = SamplingParams(max_tokens=40, temperature=1.0, stop_eos=False, seed=5)
    samples = [make_sample(f"s{i}", make_prompt(20 + i, i), params, version_id=f"v{i % 3}") for i in range(12)]
    answers = run(sampler, *samples)
    errors = []
    for index, sample in enumerate(samples):
        answer = answers[sample.request_id].sequences[0]
        tokens = np.concatenate([sample.prompt_T, answer.tokens_T])
        inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(len(tokens) - 1, np.float32)}
        datum = Datum(tokens[:-1], inputs)
        (result,) = run_to_end(backend.run_passes([Pass("r", f"m{index % 3}", (datum,), "cross_entropy", {}, True)]))
        assert isinstance(result, PassResult)
        errors.append(np.abs(result.logprobs[0][-len(answer.tokens_T) :] - answer.logprobs_T))
    assert float(np.mean(np.concatenate(errors))) < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_rows_and_non_finite_weights_affect_no_other_row(llama: ModelShape, dtype: str) -> None:
    params = SamplingParams(max_tokens=25, temperature=0.0, stop_eos=False)
    samples = [
        make_sample(
            f"s{i}", (make_prompt(20 + i, i) % 255 + 1).astype(np.int32), params, version_id=[None, "a", "d"][i % 3]
        )
        for i in range(9)
    ]
    sampler, versions = sampler_on(llama, dtype=dtype)
    expected = run(sampler, *samples)
    sampler, versions = sampler_on(llama, dtype=dtype)
    for sample in samples:
        sampler.submit(sample)
    for _ in range(5):
        sampler.step()
    versions["d"].flat_P.fill_(float("nan"))
    versions["d"].refresh()
    with torch.no_grad():  # the token of padding rows
        sampler._base.model.get_input_embeddings().weight[0] = float("nan")
    results = finish(sampler)
    for i, sample in enumerate(samples):
        if i % 3 == 2:
            assert "not finite" in str(results[sample.request_id])
        elif 0 not in expected[sample.request_id].sequences[0].tokens_T:
            if dtype == "float32":
                assert_same(results[sample.request_id], expected[sample.request_id], atol=3e-4)
            else:  # fewer rows are other products, whose rounding may decide between two tokens
                assert np.isfinite(results[sample.request_id].sequences[0].logprobs_T).all()
    for store in sampler._cache._stores.values():
        assert not store[:, 0].any(), "the null block is zero"


def test_files_of_a_version_made_on_the_device_are_read_on_the_cpu(llama: ModelShape, tmp_path: Path) -> None:
    gpu = TorchBackend(llama, device=DEVICE, dtype="float32")
    gpu.create_model("m", LoraSpec(4, seed=1))
    gpu.publish("m", "v")
    gpu.capture_version("v").write(tmp_path / "v")
    cpu = TorchBackend(llama, device="cpu", dtype="float32")
    cpu.load_version("v", tmp_path / "v")
    assert torch.equal(cpu._versions["v"].flat_P, gpu._versions["v"].flat_P.cpu())
