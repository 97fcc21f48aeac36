"""Prompts with images: sampled and prompt logprobs match transformers and training, with any chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from support import vision_models
from support.local_sampling import run
from support.tolerances import rounding_of_model
from support.vision_models import IMAGE, picture
from tinsmith.backends.torch import TorchBackend
from tinsmith.errors import UserError
from tinsmith.plan.architecture import read_config
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions
from tinsmith.samplers.local.request import Sequence
from tinsmith.types import EMPTY_LOGPROB, Datum, Sample, SampleResult, SamplingParams
from unit.test_vision import MODELS, corrupt_image, load_reference_model, logits, text, train_backend
from unit.test_vision import run as run_pass

torch.set_num_threads(1)

GREEDY = SamplingParams(max_tokens=9, temperature=0.0, stop_eos=False)
HOT = SamplingParams(max_tokens=9, temperature=1.0, stop_eos=False, seed=7)
ONE, OTHER = picture(61, 22, 1), picture(61, 22, 2)
PROMPTS: dict[str, tuple[list[int] | bytes, ...]] = {
    "begin": (ONE, text(7, 1)),
    "middle": (text(9, 2), OTHER, text(6, 3)),
    "two": (text(5, 4), ONE, text(3, 5), picture(20, 75, 2, "jpeg"), text(2, 6)),
    "end": (text(6, 7), ONE),
    "text": (text(11, 8),),
}


@pytest.fixture(scope="module", params=MODELS)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchBackend:
    directory = tmp_path_factory.mktemp(request.param)
    trained_backend = train_backend(vision_models.make(directory / "base", request.param), directory / "adapter")
    trained_backend.publish("m", "v")
    return trained_backend


@pytest.fixture(scope="module")
def reference(backend: TorchBackend) -> nn.Module:
    path = Path(backend.base.shape.path)
    return load_reference_model(path, path.parent / "adapter")


def sampler(backend: TorchBackend, **options: int) -> LocalSampler:
    return LocalSampler(backend.base, backend._versions, options=SamplerOptions(**{"block_size": 4} | options))


def ask(name: str, params: SamplingParams = GREEDY, num_samples: int = 1, **options: object) -> Sample:
    tokens, images = vision_models.model_input(*PROMPTS[name.partition("/")[0]])
    return Sample(name, "v", tokens, num_samples, params, images=images, **options)  # pyright: ignore[reportArgumentType]


def check(
    result: SampleResult, sample: Sample, model: nn.Module, logits_of: Callable[[nn.Module, Datum], Tensor] = logits
) -> None:
    """Compare every sequence and the prompt's logprobs with the model's forward over prompt and answer. Image positions
    have finite logprobs of the image token, since the cookbook's SamplerNLLEvaluator multiplies them by 0.
    """
    num_prompt = len(sample.prompt_T)
    tolerance = rounding_of_model(model.config)  # type: ignore[arg-type]
    for sequence in result.sequences:
        # transformers would treat a sampled image token as an image, so the answer is compared up to it.
        drawn = np.append(sequence.tokens_T, IMAGE)
        num_compared = min(int(np.flatnonzero(drawn == IMAGE)[0]) + 1, len(sequence.tokens_T))
        answer_T, logprobs_T = sequence.tokens_T[:num_compared], sequence.logprobs_T[:num_compared]
        answered = Datum(np.concatenate([sample.prompt_T, answer_T[:-1]]), {}, sample.images)
        with torch.no_grad():
            expected = torch.log_softmax(logits_of(model, answered).double(), -1)
        rows = torch.arange(num_prompt - 1, len(answered.tokens_N))
        chosen = torch.from_numpy(answer_T.astype(np.int64))
        np.testing.assert_allclose(logprobs_T, expected[rows, chosen], atol=tolerance)
        if sample.params.temperature == 0:
            assert chosen.tolist() == expected[rows].argmax(-1).tolist()
    if result.prompt_logprobs_T is not None:
        prompt_expected = expected[
            torch.arange(num_prompt - 1), torch.from_numpy(sample.prompt_T[1:].astype(np.int64))
        ].numpy()
        prompt_logprobs = result.prompt_logprobs_T
        assert np.isnan(prompt_logprobs[0])
        np.testing.assert_allclose(prompt_logprobs[1:], prompt_expected, atol=tolerance)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("rows", [5, 512])
def test_answers_match_transformers_in_chunks_and_in_batches(
    backend: TorchBackend, reference: nn.Module, rows: int
) -> None:
    samples = [ask(name, prompt_logprobs=True, topk_prompt_logprobs=2) for name in PROMPTS]
    samples += [ask(f"{name}/hot", HOT, num_samples=3) for name in PROMPTS]
    results = run(sampler(backend, max_tokens_per_step=rows), *samples)
    for sample in samples:
        check(results[sample.request_id], sample, reference)
        topk = results[sample.request_id].topk_prompt
        if topk is not None:
            assert np.flatnonzero(topk.logprobs_Tk[:, 0] == EMPTY_LOGPROB).tolist() == [0]
    for name in PROMPTS:
        assert len({tuple(sequence.tokens_T) for sequence in results[f"{name}/hot"].sequences}) > 1


def test_sampled_logprobs_are_those_of_training(backend: TorchBackend) -> None:
    tolerance = rounding_of_model(read_config(Path(backend.base.shape.path) / "config.json"))
    for name in ("middle", "two"):
        sample = ask(name, HOT)
        answer = run(sampler(backend), sample)[name].sequences[0]
        tokens = np.concatenate([sample.prompt_T, answer.tokens_T])
        inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(len(tokens) - 1, np.float32)}
        datum = Datum(tokens[:-1], inputs, sample.images)
        scored = run_pass(backend, "m", datum, forward_only=True).logprobs[0]
        np.testing.assert_allclose(scored[len(sample.prompt_T) - 1 :], answer.logprobs_T, atol=tolerance)


def same_but_for_the_image(name: str, data: bytes) -> Sample:
    tokens, images = vision_models.model_input(text(9, 2), data, text(6, 3))
    return Sample(name, "v", tokens, 1, GREEDY, images=images, prompt_logprobs=False)


def test_two_images_with_the_same_tokens_never_share_blocks(backend: TorchBackend, reference: nn.Module) -> None:
    shared = sampler(backend)
    samples = [same_but_for_the_image(name, OTHER if name in "bd" else ONE) for name in "abcd"]
    assert samples[0].prompt_T.tolist() == samples[1].prompt_T.tolist()
    for sample in samples:  # one after another, so that the cache fills
        check(run(shared, sample)[sample.request_id], sample, reference)
    again = [run(shared, sample)[sample.request_id] for sample in samples]
    # 9 tokens of text before the image are two blocks; the prompt has (39 - 1) // 4 whole ones.
    assert len(samples[0].prompt_T) == 39
    assert [result.prompt_cache_hit_tokens for result in again] == [36] * 4
    fresh = sampler(backend)
    hits = [run(fresh, sample)[sample.request_id].prompt_cache_hit_tokens for sample in samples]
    # States are stored at the ends of prompts, and not before an image.
    assert hits == [0, 0 if fresh._keeps_states else 8, 36, 36]


def test_blocks_would_be_shared_if_keys_knew_no_images(
    backend: TorchBackend, reference: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows that the previous test can fail: without the image digest in the keys, another image's KV blocks match."""
    monkeypatch.setattr(Sequence, "_image_marks", lambda *_: b"")
    shared = sampler(backend)
    run(shared, same_but_for_the_image("a", ONE))
    sample = same_but_for_the_image("b", OTHER)
    leaked = run(shared, sample)["b"]
    assert leaked.prompt_cache_hit_tokens == 36
    with pytest.raises(AssertionError):
        check(leaked, sample, reference)


def test_the_same_image_elsewhere_in_a_block_shares_nothing(backend: TorchBackend, reference: nn.Module) -> None:
    """All tokens of an image have the same id; only their offset in the image distinguishes them."""
    shared = sampler(backend, block_size=2)
    for name, parts in (("a", (ONE, text(5, 1))), ("b", (ONE, ONE)), ("c", (text(2, 1), ONE, text(5, 1)))):
        tokens, images = vision_models.model_input(*parts)
        if name == "b":  # transformers cannot distinguish adjacent images
            run(shared, Sample(name, "v", tokens, 1, GREEDY, images=images))
            continue
        sample = Sample(name, "v", tokens, 1, GREEDY, images=images)
        check(run(shared, sample)[name], sample, reference)


def test_preempted_sequences_come_to_the_same_answers(backend: TorchBackend, reference: nn.Module) -> None:
    samples = [ask(f"{name}/{n}", HOT) for name in ("middle", "two", "end") for n in range(2)]
    token_bytes = sampler(backend)._cache.token_bytes
    if backend.base.shape.arch.startswith("Qwen3_5"):
        pytest.skip("states take most of so small a cache")
    small = sampler(backend, kv_cache_bytes=100 * token_bytes)
    vision = backend.base.vision
    assert vision is not None
    results = run(small, *samples)
    vision.evict_to(0)
    for sample in samples:
        check(results[sample.request_id], sample, reference)


@pytest.mark.matrix(1)
def test_a_deterministic_sampler_takes_images(backend: TorchBackend, reference: nn.Module) -> None:
    pinned = LocalSampler(backend.base, backend._versions, options=SamplerOptions(block_size=4, deterministic=True))
    samples = [ask("two", prompt_logprobs=True), ask("begin"), ask("text")]
    results = run(pinned, *samples)
    for sample in samples:
        check(results[sample.request_id], sample, reference)


def test_a_broken_image_is_refused_and_nothing_of_it_stays(backend: TorchBackend) -> None:
    own_sampler = sampler(backend)
    tokens, images = vision_models.model_input(text(3, 1), corrupt_image("cut"))
    with pytest.raises(UserError, match=r"chunks\[1\]\.data is not a valid jpeg image"):
        own_sampler.submit(Sample("bad", "v", tokens, 1, GREEDY, images=images))
    assert not own_sampler.has_work
    assert run(own_sampler, ask("text")).keys() == {"text"}
