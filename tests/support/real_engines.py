"""A real external engine and the torch backend's sampler with the same versions, compared on greedy and drawn answers.

The bound on logprobs is 1e-4 nats in float32; on a CPU some 1e-5 were seen. Used by tests that are given an interpreter
with vLLM or SGLang.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from tinsmith.backends import Backend, run_to_end
from tinsmith.samplers import Sampler
from tinsmith.samplers.remote.client import ExternalSampler
from tinsmith.types import (
    AdamParams,
    Adjustments,
    Datum,
    LoraSpec,
    OptimStep,
    Pass,
    Sample,
    SampleResult,
    SamplingParams,
)

BOUND = 1e-4
PATIENCE_S = 600.0
PROMPT = np.random.default_rng(0).integers(3, 500, 24).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Pair:
    """The same versions in both samplers: `layers` without and `everything` with an adapter of the unembedding."""

    backend: Backend
    local: Sampler
    external: ExternalSampler


def train(backend: Backend, name: str, spec: LoraSpec) -> None:
    tokens = np.random.default_rng(spec.seed).integers(3, 500, 40).astype(np.int32)
    inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(39, np.float32)}
    backend.create_model(name, spec)
    for _ in range(3):
        run_to_end(backend.run_passes([Pass("p", name, (Datum(tokens[:-1], inputs),), "cross_entropy", {}, False)]))
        backend.optim_step([OptimStep("o", name, AdamParams(1e-2))])
    backend.publish(name, name)


def answers(sampler: Sampler, *samples: Sample, submitted: int = 0) -> list[SampleResult]:
    """Of these samples, of which the last `submitted` already are."""
    outcomes: dict[str, object] = {}
    for sample in samples[: len(samples) - submitted]:
        sampler.submit(sample)
    deadline = time.monotonic() + PATIENCE_S
    while sampler.has_work and time.monotonic() < deadline:
        outcomes.update(sampler.step())
    results = [outcomes[sample.request_id] for sample in samples]
    assert all(isinstance(result, SampleResult) for result in results), results
    return cast("list[SampleResult]", results)


def make_sample(name: str, version: str | None, n: int = 1, prompt: np.ndarray = PROMPT, **options: object) -> Sample:
    fields = set(SamplingParams.__dataclass_fields__)
    params = {"max_tokens": 8, "temperature": 0.0} | {key: value for key, value in options.items() if key in fields}
    sample_options = {key: value for key, value in options.items() if key not in fields}
    return Sample(name, version, prompt, n, SamplingParams(**params), **sample_options)  # pyright: ignore[reportArgumentType]


VERSIONS = [None, "layers", "other", "everything"]


def list_greedy_samples(versions: Sequence[str | None], adjustments: Adjustments, **options: object) -> list[Sample]:
    """Greedy samples of each version, with all kinds of logprobs, penalties (`options` are of these) and stops."""
    targets = np.random.default_rng(1).integers(0, 512, (len(PROMPT) - 1, 3)).astype(np.int64)
    targets[0, 0] = -1
    everything = {"prompt_logprobs": True, "topk_prompt_logprobs": 4, "topk_sample_logprobs": 5}
    last = {"prompt_logprobs": True, "prompt_logprobs_last_n": 3, "topk_prompt_logprobs": 2}
    kinds: dict[str, dict[str, Any]] = {
        "all": {**everything, "target_prompt_logprobs": targets},
        "long": {"max_tokens": 32, "stop_eos": False},
        "penalties": {"adjustments": adjustments, **options},
        "text": {"max_tokens": 24, "stop_strings": ("e", "th")},
        "tokens": {"max_tokens": 24, "stop_tokens": (34, 77, 81)},
        "last": {**last},
    }
    return [make_sample(f"{kind}-{v}", v, **fields) for kind, fields in kinds.items() for v in versions]


def check_alternating_versions(pair: Pair, versions: Sequence[str | None]) -> None:
    """Versions that are sampled at once do not mix, and a version that is published again has its new weights."""
    samples = [make_sample(f"{i}-{v}", v, max_tokens=8) for i in range(3) for v in versions]
    ours = {version: answers(pair.local, make_sample("one", version, max_tokens=8))[0] for version in versions}
    for sample, theirs in zip(samples, answers(pair.external, *samples), strict=True):
        agree(sample.request_id, ours[sample.version_id], theirs)
    pair.backend.publish("other", "layers")
    compare_answers(pair, [make_sample("replaced", "layers", max_tokens=8)])
    pair.backend.publish("layers", "layers")


def train_versions(backend: Backend) -> None:
    """Publish `layers` and `other` without, and `everything` with an adapter of the unembedding."""
    for name, unembed, seed in (("layers", False, 1), ("other", False, 2), ("everything", True, 3)):
        train(backend, name, LoraSpec(rank=8, seed=seed, train_unembed=unembed))


def compare_answers(pair: Pair, samples: Sequence[Sample]) -> None:
    local, external = answers(pair.local, *samples), answers(pair.external, *samples)
    for sample, ours, theirs in zip(samples, local, external, strict=True):
        agree(sample.request_id, ours, theirs)


def agree(name: str, ours: SampleResult, theirs: SampleResult) -> None:
    (our_sequence,), (their_sequence,) = ours.sequences, theirs.sequences
    assert their_sequence.tokens_T.tolist() == our_sequence.tokens_T.tolist(), name
    assert their_sequence.stop_reason == our_sequence.stop_reason, name
    pairs = [(our_sequence.logprobs_T, their_sequence.logprobs_T), (ours.prompt_logprobs_T, theirs.prompt_logprobs_T)]
    pairs.append((ours.target_prompt, theirs.target_prompt))  # pyright: ignore[reportArgumentType]
    for our_values, their_values in ((our_sequence.topk, their_sequence.topk), (ours.topk_prompt, theirs.topk_prompt)):
        if our_values is not None and their_values is not None:
            np.testing.assert_array_equal(their_values.token_ids_Tk, our_values.token_ids_Tk, err_msg=name)
            pairs.append((our_values.logprobs_Tk, their_values.logprobs_Tk))
    for our_values, their_values in pairs:
        assert (our_values is None) == (their_values is None), name
        if our_values is not None and their_values is not None:
            np.testing.assert_allclose(their_values, our_values, atol=BOUND, rtol=0, err_msg=name)


DRAWN = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 2": {"temperature": 2.0},
    "top_p": {"temperature": 1.0, "top_p": 0.5},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "min_p": {"temperature": 1.0, "adjustments": Adjustments(min_p=0.2)},
}


def logprobs_of(pair: Pair, version: str | None, tokens_T: np.ndarray, temperature: float) -> Sequence[float]:
    """By the torch backend's sampler, from the whole vocabulary."""
    all_tokens = np.concatenate([PROMPT, tokens_T]).astype(np.int32)
    (result,) = answers(
        pair.local, make_sample("whole", version, prompt=all_tokens, max_tokens=1, topk_prompt_logprobs=512)
    )
    assert result.topk_prompt is not None
    ids, logprobs = result.topk_prompt.token_ids_Tk[len(PROMPT) :], result.topk_prompt.logprobs_Tk[len(PROMPT) :]
    scaled = logprobs.astype(np.float64) / temperature
    total = np.log(np.exp(scaled).sum(1))
    return [float(scaled[at][ids[at] == token][0] - total[at]) for at, token in enumerate(tokens_T)]
