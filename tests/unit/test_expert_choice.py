"""Mixtures of experts: sampling and training choose the same experts and compute the same logprobs. Both use the same
weights and modules, so only rounding differs, by the shape of batches. `measure_differences` computes the figures of
docs/numerics.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from support.families import FAMILIES, make
from support.local_sampling import HOT, make_prompt, make_sample, run
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.moe import MultiLoRAExperts
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions
from tinsmith.types import Datum, LoraSpec, Pass, PassResult
from unit.test_families import train

torch.set_num_threads(1)

MIXTURES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next")


class Measurement(NamedTuple):
    """`quantile_95` is the 95th percentile of the differences."""

    num_tokens: int
    quantile_95: float
    worst: float
    share_of_other_experts: float


def measure_differences(family: str, dtype: str, directory: Path) -> Measurement:
    """Answers of an adapter, sampled together in pieces of 9 rows, and scored by training in one packed row."""
    (chosen_family,) = (candidate for candidate in FAMILIES if candidate.model_type == family)
    backend = TorchBackend(make(directory, chosen_family), device="cpu", dtype=dtype)
    backend.create_model("m", LoraSpec(3, seed=1))
    backend.create_model("n", LoraSpec(5, seed=2))
    train(backend, "m", "n")
    backend.publish("m", "v")
    sampler = LocalSampler(backend.base, backend._versions, options=SamplerOptions(block_size=4, max_tokens_per_step=9))
    prompts = {str(length): make_prompt(length) for length in (5, 11, 17, 23)}
    samples = [make_sample(name, prompt, HOT, version_id="v", num_samples=4) for name, prompt in prompts.items()]
    answers = [
        (prompts[name], sequence) for name, result in run(sampler, *samples).items() for sequence in result.sequences
    ]
    data, chosen = [], []
    for prompt, answer in answers:
        tokens = np.concatenate([prompt, answer.tokens_T])
        targets = {"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(len(tokens) - 1, np.float32)}
        data.append(Datum(tokens[:-1], targets))
        chosen.append(choices(backend, tokens[:-1]))
    (scored,) = run_to_end(backend.run_passes([Pass("r", "m", tuple(data), "cross_entropy", {}, True)]))
    assert isinstance(scored, PassResult)
    differences = [
        np.abs(logprobs[len(prompt) - 1 :] - answer.logprobs_T)
        for (prompt, answer), logprobs in zip(answers, scored.logprobs, strict=True)
    ]
    changed_choices = np.concatenate([(in_one != in_pieces).ravel() for in_one, in_pieces in chosen])
    all_differences = np.concatenate(differences)
    quantile_95 = float(np.quantile(all_differences, 0.95))
    return Measurement(len(all_differences), quantile_95, float(all_differences.max()), float(changed_choices.mean()))


def choices(backend: TorchBackend, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[layers, T, k] The experts of every token: of training's packed row, and of a sampler's prompt in pieces."""
    calls: list[tuple[str, np.ndarray]] = []

    def note(module: MultiLoRAExperts, inputs: tuple[torch.Tensor, ...]) -> None:
        calls.append((module.name, inputs[1].sort(-1).values.numpy()))

    handles = [module.register_forward_pre_hook(note) for module in backend.base.experts]
    experts_by_run = []
    try:
        score = {"target_tokens": tokens.astype(np.int64), "weights": np.ones(len(tokens), np.float32)}
        run_to_end(backend.run_passes([Pass("r", "m", (Datum(tokens, score),), "cross_entropy", {}, True)]))
        experts_by_run.append(stack_layers(calls))
        calls.clear()
        options = SamplerOptions(block_size=4, max_tokens_per_step=7)
        sampler = LocalSampler(backend.base, backend._versions, options=options)
        calls.clear()  # the sampler's probes before the first request
        run(sampler, make_sample("s", tokens, HOT, version_id="v"))
        experts_by_run.append(stack_layers(calls)[:, : len(tokens)])
    finally:
        for handle in handles:
            handle.remove()
    return experts_by_run[0], experts_by_run[1]


def stack_layers(calls: list[tuple[str, np.ndarray]]) -> np.ndarray:
    layers: dict[str, list[np.ndarray]] = {}
    for name, index_Tk in calls:
        layers.setdefault(name, []).append(index_Tk)
    return np.stack([np.concatenate(parts) for parts in layers.values()])


@pytest.mark.extended
@pytest.mark.parametrize("family", MIXTURES)
def test_sampling_and_training_choose_the_same_experts(family: str, tmp_path: Path) -> None:
    measurement = measure_differences(family, "float32", tmp_path)
    assert measurement.num_tokens > 150
    assert measurement.share_of_other_experts == 0.0
    assert measurement.worst < 1e-4


@pytest.mark.extended
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_in_bfloat16_few_rows_choose_others(family: str, tmp_path: Path) -> None:
    """Rounding changes the choice between experts with nearly equal scores, and with it the logprobs of few tokens by
    any amount: the worst difference depends on the processor.
    """
    measurement = measure_differences(family, "bfloat16", tmp_path)
    assert measurement.share_of_other_experts < 0.05
    assert measurement.quantile_95 < 0.1
