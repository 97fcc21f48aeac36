"""Draws cut by top_p and top_k, trained on: their logprobs are those of training, so no set of tokens is replayed.

The counterpart are renormalised logprobs, those of the truncated distribution, whose divergence is the mass cut off.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from support import tiny_models
from support.local_sampling import finish
from support.tolerances import rounding_of_model
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.losses.divergence import summarize_divergence
from tinsmith.types import AdamParams, Datum, LoraSpec, OptimStep, Pass, PassResult, Sample, SamplingParams

TOP_K, TOP_P = 20, 0.9
NUM_TOKENS = 40
F32 = np.float32


def train(backend: TorchBackend, rng: np.random.Generator) -> None:
    """Train on sequences of few tokens, so that the distribution is neither flat nor certain, and publish."""
    backend.create_model("m", LoraSpec(8))
    for _ in range(12):
        tokens = rng.integers(0, 60, 65)
        datum = Datum(tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:].astype(np.int64)})
        run_to_end(backend.run_passes([Pass("r", "m", (datum,), "cross_entropy", {}, False)]))
        backend.optim_step([OptimStep("o", "m", AdamParams(1e-2))])
    backend.publish("m", "v")


def draw(backend: TorchBackend, rng: np.random.Generator, params: SamplingParams) -> list[Datum]:
    """The data that a recipe makes of samples."""
    prompts = [rng.integers(0, 60, 12).astype(np.int32) for _ in range(8)]
    for index, prompt in enumerate(prompts):
        backend.sampler.submit(Sample(str(index), "v", prompt, 2, params, topk_sample_logprobs=TOP_K))
    data = []
    for index, result in finish(backend.sampler).items():
        for sequence in result.sequences:
            tokens = np.concatenate([prompts[int(index)], sequence.tokens_T])
            old, advantages = np.zeros(len(tokens) - 1, F32), np.zeros(len(tokens) - 1, F32)
            old[-len(sequence.tokens_T) :], advantages[-len(sequence.tokens_T) :] = sequence.logprobs_T, 1
            inputs = {"target_tokens": tokens[1:].astype(np.int64), "logprobs": old, "advantages": advantages}
            assert sequence.topk is not None
            top_Tk = np.sort(sequence.topk.logprobs_Tk.astype(np.float64), 1)[:, ::-1]
            before_Tk = np.cumsum(np.exp(top_Tk), 1) - np.exp(top_Tk)
            mass_T = np.where(before_Tk < params.top_p * np.exp(top_Tk).sum(1, keepdims=True), np.exp(top_Tk), 0).sum(1)
            renormalised = old.copy()
            renormalised[-len(sequence.tokens_T) :] -= np.log(mass_T).astype(F32)
            data.append(Datum(tokens[:-1].astype(np.int32), {**inputs, "renormalised": renormalised}))
    return data


def divergence(backend: TorchBackend, data: list[Datum], name: str) -> dict[str, float]:
    changed = [Datum(item.tokens_N, {**item.inputs, "logprobs": item.inputs[name]}) for item in data]
    (result,) = run_to_end(backend.run_passes([Pass("r", "m", tuple(changed), "ppo", {}, True)]))
    assert isinstance(result, PassResult)
    return summarize_divergence(result.metrics)


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.extended)])
@pytest.mark.parametrize("arch", ["qwen3", "gpt_oss"])
def test_logprobs_of_draws_are_those_of_training_however_they_are_cut(
    tmp_path: Path, arch: str, dtype: str, truncated: bool
) -> None:
    rng, shape = np.random.default_rng(0), tiny_models.make(tmp_path, arch)
    backend = TorchBackend(shape, device="cpu", dtype=dtype)
    train(backend, rng)
    cut = {"top_p": TOP_P, "top_k": TOP_K} if truncated else {}
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=1, temperature=1.0, **cut)  # pyright: ignore[reportArgumentType]
    data = draw(backend, rng, params)
    measured = divergence(backend, data, "logprobs")
    renormalised = divergence(backend, data, "renormalised")
    assert renormalised["kl_sample_train_v1"] > 0.1, "the cut takes a share of the mass that shows"
    if dtype == "float32":
        tolerance = rounding_of_model(AutoConfig.from_pretrained(shape.path), torch.float32, scale=4)
        assert abs(measured["kl_sample_train_v1"]) < tolerance
        assert 0 <= measured["kl_sample_train_v3"] < tolerance**2
        assert measured["effective_sample_share"] > 1 - tolerance**2
    for name in ("kl_sample_train_v1", "kl_sample_train_v3"):  # in bfloat16, with experts of close choices
        assert abs(measured[name]) < renormalised[name] / 20
