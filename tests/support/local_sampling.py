"""Helpers for tests of the local sampler: adapters, prompts, requests, and transformers as the reference."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tinsmith.backends.torch.adapters import Adapter, initialise_weights, layout_for
from tinsmith.backends.torch.model import BaseModel
from tinsmith.samplers.local.engine import LocalSampler
from tinsmith.types import LoraSpec, Sample, SampleResult, SamplingParams

HOT = SamplingParams(max_tokens=12, temperature=1.0, stop_eos=False, seed=7)


def make_adapter(base: BaseModel, seed: int, *, rank: int = 4, train_unembed: bool = True) -> Adapter:
    spec = LoraSpec(rank=rank, seed=seed, train_unembed=train_unembed)
    layout = layout_for(spec, base.adaptable_targets())
    adapter = Adapter(spec, layout, initialise_weights(layout, seed, base.device), base.dtype)
    generator = torch.Generator().manual_seed(seed)
    for _, b_Or in adapter.weights.values():
        b_Or.normal_(0, 0.05, generator=generator)
    adapter.refresh()
    return adapter


def reference_model(path: Path, adapter: Adapter | None = None) -> PreTrainedModel:
    """transformers' own model, with the adapter added into its weights."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    if adapter is None:
        return model
    parts = {target.name: target.part for target in adapter.layout.targets if target.part}
    for name, (a_rI, b_Or) in adapter.weights.items():
        if (part := parts.get(name)) is not None:
            weight = cast(torch.Tensor, model.get_submodule(part.linear_name).weight).data
            weight[part.start : part.start + len(b_Or)] += adapter.scale * b_Or @ a_rI
            continue
        if a_rI.dim() == 3:
            _add_to_experts(model, name, adapter.scale * b_Or @ a_rI)
            continue
        module = model.get_submodule(name)
        # A new parameter, so that a tied embedding does not change.
        weight = cast(torch.Tensor, module.weight).detach()
        module.weight = torch.nn.Parameter(weight + adapter.scale * b_Or @ a_rI)
    return model


def _add_to_experts(model: PreTrainedModel, name: str, delta_EOI: torch.Tensor) -> None:
    """gpt-oss stores [E, I, O], with gate and up interleaved."""
    path, _, last = name.rpartition(".")
    experts = model.get_submodule(path)
    columns = {"w1": slice(0, None, 2), "w3": slice(1, None, 2), "w2": slice(None)}[last]
    weight = cast(torch.Tensor, experts.down_proj if last == "w2" else experts.gate_up_proj)
    weight.data[:, :, columns] += delta_EOI.mT


def reference_logprobs(model: PreTrainedModel, tokens: np.ndarray, temperature: float = 1.0) -> torch.Tensor:
    """[T, V], row t is of the token after t."""
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]
    return torch.log_softmax(logits.double() / temperature, -1)


def make_prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, length]).integers(0, 256, length).astype(np.int32)


def make_sample(
    request_id: str,
    prompt: np.ndarray,
    params: SamplingParams = HOT,
    *,
    version_id: str | None = None,
    num_samples: int = 1,
    **options: object,
) -> Sample:
    return Sample(request_id, version_id, prompt, num_samples, params, **options)  # pyright: ignore[reportArgumentType]


def run(sampler: LocalSampler, *samples: Sample) -> dict[str, SampleResult]:
    for sample in samples:
        sampler.submit(sample)
    return finish(sampler)


def finish(sampler: LocalSampler, max_steps: int = 3000) -> dict[str, SampleResult]:
    outcomes: dict[str, SampleResult] = {}
    for _ in range(max_steps):
        if not sampler.has_work:
            assert sampler._batcher.pool.num_live == 0
            return outcomes
        for request_id, outcome in sampler.step():
            assert request_id not in outcomes
            outcomes[request_id] = cast(SampleResult, outcome)  # tests of refusals look at its class
    raise AssertionError("the sampler does not finish")


def sample_alone(base: BaseModel, sample: Sample, versions: Mapping[str, Adapter] | None = None) -> SampleResult:
    return run(LocalSampler(base, versions or {}), sample)[sample.request_id]


def assert_same(result: SampleResult, expected: SampleResult, atol: float = 2e-5) -> None:
    assert len(result.sequences) == len(expected.sequences)
    for ours, theirs in zip(result.sequences, expected.sequences, strict=True):
        assert ours.tokens_T.tolist() == theirs.tokens_T.tolist()
        assert ours.stop_reason == theirs.stop_reason
        np.testing.assert_allclose(ours.logprobs_T, theirs.logprobs_T, atol=atol)
        assert (ours.topk is None) == (theirs.topk is None)
        if ours.topk is not None and theirs.topk is not None:
            np.testing.assert_allclose(ours.topk.logprobs_Tk, theirs.topk.logprobs_Tk, atol=atol)
    if expected.prompt_logprobs_T is not None:
        assert result.prompt_logprobs_T is not None
        np.testing.assert_allclose(result.prompt_logprobs_T, expected.prompt_logprobs_T, atol=atol)
    if expected.topk_prompt is not None:
        assert result.topk_prompt is not None
        np.testing.assert_allclose(result.topk_prompt.logprobs_Tk, expected.topk_prompt.logprobs_Tk, atol=atol)
    if isinstance(expected.target_prompt, np.ndarray):
        assert isinstance(result.target_prompt, np.ndarray)
        np.testing.assert_allclose(result.target_prompt, expected.target_prompt, atol=atol)
    if expected.alt_tokens is not None:
        assert result.alt_tokens is not None
        assert result.alt_tokens.token_ids_Tk.tolist() == expected.alt_tokens.token_ids_Tk.tolist()
        np.testing.assert_allclose(result.alt_tokens.logprobs_Tk, expected.alt_tokens.logprobs_Tk, atol=atol)
