"""The local sampler on tiny random models, against transformers' forward and against unbatched sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import tiny_models
from support.local_sampling import (
    HOT,
    assert_same,
    finish,
    make_adapter,
    make_prompt,
    make_sample,
    reference_logprobs,
    reference_model,
    run,
    sample_alone,
)
from support.properties import examples
from tinsmith.backends.torch.adapters import Adapter
from tinsmith.backends.torch.attention import PackedCausal
from tinsmith.backends.torch.lora_batch import LoRABatch, Segment
from tinsmith.backends.torch.model import BaseModel
from tinsmith.errors import NotFoundError, UserError
from tinsmith.samplers.local import prompt_logprobs
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions
from tinsmith.samplers.local.kv_cache import probe_layers
from tinsmith.samplers.local.states import state_bytes
from tinsmith.types import Sample, SampleResult, SamplingParams

ARCHS = ("qwen3", "llama", "gemma2", "gpt_oss", "qwen3_5")
BOUNDS = dict.fromkeys(ARCHS, 2e-5) | {"qwen3_5": 6e-4}
"""Bounds on logprobs by batch composition. A delta net divides keys, queries and outputs by their norm, which may be
small: its float32 logprobs differ from float64 by up to 3e-4 in one of 3,600 positions here, and from each
other by twice as much.
"""
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, stop_eos=False)


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {arch: tmp_path_factory.mktemp(arch) for arch in ARCHS}


@pytest.fixture(scope="module")
def bases(model_dirs: dict[str, Path]) -> dict[str, BaseModel]:
    return {
        arch: BaseModel.load(tiny_models.make(path, arch), device="cpu", dtype="float32")
        for arch, path in model_dirs.items()
    }


@pytest.fixture
def base(bases: dict[str, BaseModel]) -> BaseModel:
    return bases["qwen3"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("adapted", [False, True])
def test_greedy_answers_and_their_logprobs_are_those_of_transformers(
    bases: dict[str, BaseModel], model_dirs: dict[str, Path], arch: str, adapted: bool
):
    adapter = make_adapter(bases[arch], 5) if adapted else None
    model = reference_model(model_dirs[arch], adapter)
    sampler = LocalSampler(
        bases[arch],
        {"v": adapter} if adapter else {},
        options=SamplerOptions(block_size=4, max_tokens_per_step=9),
    )
    prompts = {f"{length}": make_prompt(length) for length in (1, 4, 7, 30, 31)}
    samples = [
        make_sample(name, prompt, GREEDY, version_id="v" if adapter else None, prompt_logprobs=len(prompt) % 2 == 1)
        for name, prompt in prompts.items()
    ]
    for name, result in run(sampler, *samples).items():
        prompt, answer = prompts[name], result.sequences[0]
        logprobs = reference_logprobs(model, np.concatenate([prompt, answer.tokens_T]))
        answer_logprobs = logprobs[len(prompt) - 1 : -1]
        assert answer.tokens_T.tolist() == answer_logprobs.argmax(-1).tolist()
        np.testing.assert_allclose(answer.logprobs_T, answer_logprobs.max(-1).values, atol=1e-4)
        if result.prompt_logprobs_T is not None:
            expected = logprobs[np.arange(len(prompt) - 1), prompt[1:].astype(np.int64)]
            np.testing.assert_allclose(result.prompt_logprobs_T[1:], expected, atol=1e-4)
            assert np.isnan(result.prompt_logprobs_T[0])


def test_greedy_answers_equal_generate(base: BaseModel, model_dirs: dict[str, Path]):
    prompt = make_prompt(17)
    model = reference_model(model_dirs["qwen3"])
    tokens = torch.from_numpy(prompt.astype(np.int64))[None]
    generated = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=20, do_sample=False, pad_token_id=0
    )
    result = sample_alone(base, make_sample("a", prompt, replace(GREEDY, max_tokens=20, stop_eos=True)))
    assert result.sequences[0].tokens_T.tolist() == generated[0, 17:].tolist()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_sampled_logprobs_are_of_the_whole_distribution_at_the_temperature(
    base: BaseModel, model_dirs: dict[str, Path], temperature: float
):
    prompt = make_prompt(9)
    params = replace(HOT, temperature=temperature, top_k=20, top_p=0.9)
    answer = sample_alone(base, make_sample("a", prompt, params, topk_sample_logprobs=5)).sequences[0]
    logprobs = reference_logprobs(
        reference_model(model_dirs["qwen3"]), np.concatenate([prompt, answer.tokens_T]), temperature
    )[8:-1]
    expected = logprobs[np.arange(12), answer.tokens_T.astype(np.int64)]
    np.testing.assert_allclose(answer.logprobs_T, expected, atol=1e-4)
    assert answer.topk is not None
    np.testing.assert_allclose(answer.topk.logprobs_Tk, logprobs.topk(5).values, atol=1e-4)
    assert answer.topk.token_ids_Tk.tolist() == logprobs.topk(5).indices.tolist()


def test_sampler_and_trainer_agree_on_an_adapters_logprobs(base: BaseModel):
    adapter, prompt = make_adapter(base, 3), make_prompt(20)
    answer = sample_alone(base, make_sample("a", prompt, version_id="v"), {"v": adapter}).sequences[0]
    tokens = torch.from_numpy(np.concatenate([prompt, answer.tokens_T]).astype(np.int64))
    lora_batch = LoRABatch([Segment(0, len(tokens), adapter)])
    with torch.no_grad():
        hidden = base.hidden(tokens, torch.arange(len(tokens)), PackedCausal([len(tokens)]), lora_batch)
        logprobs = torch.log_softmax(base.logits(hidden, lora_batch), -1)[19:-1]
    expected = logprobs.gather(1, tokens[20:, None])[:, 0]
    np.testing.assert_allclose(answer.logprobs_T, expected, atol=1e-5)


def _crowd(rng: np.random.Generator, num: int, versions: list[str | None]) -> list[Sample]:
    """Requests of all kinds; several share a prompt prefix."""
    samples = []
    for index in range(num):
        prompt = np.concatenate([make_prompt(int(rng.integers(1, 20))), make_prompt(int(rng.integers(1, 12)), index)])
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 12)),
            seed=int(rng.integers(1000)),
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=int(rng.choice([-1, 5])),
            top_p=float(rng.choice([1.0, 0.8])),
        )
        samples.append(
            make_sample(
                str(index),
                prompt,
                params,
                version_id=versions[rng.integers(len(versions))],
                num_samples=int(rng.integers(1, 4)),
                prompt_logprobs=bool(rng.integers(2)),
                topk_sample_logprobs=int(rng.choice([0, 3, 7])),
            )
        )
    return samples


@pytest.mark.matrix(1)
@pytest.mark.parametrize("arch", ["qwen3", "gemma2", "qwen3_5"])
def test_adapters_of_all_ranks_in_one_step_answer_as_each_alone(bases: dict[str, BaseModel], arch: str):
    base = bases[arch]
    versions = {f"v{seed}": make_adapter(base, seed, rank=seed, train_unembed=seed != 2) for seed in (1, 2, 8, 16)}
    samples = _crowd(np.random.default_rng(0), 24, [None, *versions])
    together = run(LocalSampler(base, versions), *samples)
    for sample in samples:
        assert_same(together[sample.request_id], sample_alone(base, sample, versions), BOUNDS[arch])


@pytest.mark.parametrize("arch", ["qwen3", pytest.param("qwen3_5", marks=pytest.mark.extended)])
@examples(8)
@given(
    seed=st.integers(0, 10_000),
    block_size=st.sampled_from([1, 4, 16]),
    max_tokens=st.sampled_from([3, 17, 512]),
    max_sequences=st.sampled_from([1, 3, 64]),
    num_blocks=st.sampled_from([None, 60]),
)
def test_batches_chunks_and_memory_do_not_change_an_answer(
    bases: dict[str, BaseModel],
    arch: str,
    seed: int,
    block_size: int,
    max_tokens: int,
    max_sequences: int,
    num_blocks: int | None,
):
    base, rng = bases[arch], np.random.default_rng(seed)
    versions = {"v1": make_adapter(base, 1), "v2": make_adapter(base, 2)}
    token_bytes, states = LocalSampler(base, {})._cache.token_bytes, 16 * state_bytes(probe_layers(base))
    options = SamplerOptions(
        block_size=block_size,
        max_sequences=max_sequences,
        max_tokens_per_step=max_tokens,
        # 60 tokens, less than two of the crowd, and states of two that run with one snapshot.
        kv_cache_bytes=num_blocks and num_blocks * token_bytes + states,
    )
    sampler = LocalSampler(base, versions, options=options)
    samples, results = _crowd(rng, 8, [None, "v1", "v2"]), {}
    for sample in samples:
        sampler.submit(sample)
        for _ in range(rng.integers(0, 3)):
            results.update(sampler.step())
    results.update(finish(sampler))
    for sample in samples:
        assert_same(results[sample.request_id], sample_alone(base, sample, versions), BOUNDS[arch])


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(base: BaseModel):
    sampler, prompt = LocalSampler(base, {}), make_prompt(6)
    results = run(
        sampler, *(make_sample(str(i), prompt, replace(HOT, seed=seed)) for i, seed in enumerate([1, 1, 2, None, None]))
    )
    tokens = [results[str(i)].sequences[0].tokens_T.tolist() for i in range(5)]
    assert tokens[0] == tokens[1]
    assert len({tuple(row) for row in tokens[1:]}) == 4


def test_samples_differ_and_the_first_is_the_only_one_of_a_smaller_request(base: BaseModel):
    eight = sample_alone(base, make_sample("a", make_prompt(6), num_samples=8))
    assert len({tuple(sequence.tokens_T.tolist()) for sequence in eight.sequences}) == 8
    assert_same(sample_alone(base, make_sample("a", make_prompt(6))), replace(eight, sequences=eight.sequences[:1]))
    few_at_once = LocalSampler(base, {}, options=SamplerOptions(max_sequences=3, block_size=4))
    assert_same(run(few_at_once, make_sample("a", make_prompt(6), num_samples=8))["a"], eight)


def _free_run(base: BaseModel, **changes: float) -> np.ndarray:
    params = SamplingParams(**{"max_tokens": 60, "temperature": 1.5, "stop_eos": False, "seed": 3, **changes})
    return sample_alone(base, make_sample("a", make_prompt(5), params)).sequences[0].tokens_T


def _sample_until(base: BaseModel, **changes: object) -> SampleResult:
    params = SamplingParams(**{"max_tokens": 60, "temperature": 1.5, "stop_eos": False, "seed": 3, **changes})
    return sample_alone(base, make_sample("a", make_prompt(5), params))


def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(base: BaseModel):
    free = _free_run(base)
    text = base.tokenizer.decode(free)
    start = next(i for i in range(8, 50) if "\ufffd" not in text[i : i + 3] and text.index(text[i : i + 3]) == i)
    stop = text[start : start + 3]
    answer = _sample_until(base, stop_strings=("never there", stop)).sequences[0]
    assert answer.stop_reason == "stop"
    assert answer.tokens_T.tolist() == free[: len(answer.tokens_T)].tolist()
    assert stop in base.tokenizer.decode(answer.tokens_T)
    assert stop not in base.tokenizer.decode(answer.tokens_T[:-1])


def test_a_stop_token_ends_the_answer_and_is_part_of_it(base: BaseModel):
    free = _free_run(base).tolist()
    token = free[20]
    answer = _sample_until(base, stop_tokens=(token,)).sequences[0]
    assert answer.tokens_T.tolist() == free[: free.index(token) + 1]
    assert answer.stop_reason == "stop"


def test_the_end_of_text_stops_unless_nothing_may_and_beside_a_users_own_stop(base: BaseModel):
    params = SamplingParams(max_tokens=60, temperature=3.0, stop_eos=False, seed=3)
    free = sample_alone(base, make_sample("a", make_prompt(5), params, num_samples=32))
    rows = [sequence.tokens_T.tolist() for sequence in free.sequences]
    assert {len(row) for row in rows} == {60}, "stop_eos=False goes on after the end of text"
    index, row = next((i, row) for i, row in enumerate(rows) if tiny_models.EOS in row[:-1])
    expected = row[: row.index(tiny_models.EOS) + 1]
    unused = next(token for token in range(300) if token not in row)
    for changes in ({}, {"stop_strings": ("never there",)}, {"stop_tokens": (unused,)}):
        stopping = replace(params, stop_eos=True, **changes)
        answer = sample_alone(base, make_sample("a", make_prompt(5), stopping, num_samples=32)).sequences[index]
        assert answer.tokens_T.tolist() == expected
        assert answer.stop_reason == "stop"


def test_an_answer_that_stops_on_its_last_allowed_token_stopped(base: BaseModel):
    free = _free_run(base, max_tokens=6)
    assert _sample_until(base, max_tokens=6).sequences[0].stop_reason == "length"
    first = free.tolist().index(free[-1]) + 1
    answer = _sample_until(base, max_tokens=first, stop_tokens=(int(free[-1]),)).sequences[0]
    assert (len(answer.tokens_T), answer.stop_reason) == (first, "stop")


def test_prompt_logprobs_and_likeliest_tokens_are_exact_and_computed_in_pieces(
    base: BaseModel, model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prompt_logprobs, "MAX_LOGIT_ELEMENTS", 5 * base.vocab_size)
    rows: list[int] = []
    logits = base.logits

    def counting(hidden_TD: torch.Tensor, lora_batch: LoRABatch) -> torch.Tensor:
        rows.append(len(hidden_TD))
        return logits(hidden_TD, lora_batch)

    monkeypatch.setattr(base, "logits", counting)
    monkeypatch.setattr(base, "next_logits", counting)
    prompt = make_prompt(50)
    sampler = LocalSampler(base, {}, options=SamplerOptions(max_tokens_per_step=23))
    sample = make_sample("a", prompt, replace(HOT, max_tokens=1), prompt_logprobs=True, topk_prompt_logprobs=4)
    result = run(sampler, sample)["a"]
    assert sum(rows) == 49 + 1
    assert max(rows) == 5

    logprobs = reference_logprobs(reference_model(model_dirs["qwen3"]), prompt)
    assert result.prompt_logprobs_T is not None
    assert result.prompt_logprobs_T.dtype == np.float32
    assert np.isnan(result.prompt_logprobs_T[0])
    np.testing.assert_allclose(
        result.prompt_logprobs_T[1:], logprobs[np.arange(49), prompt[1:].astype(np.int64)], atol=1e-4
    )
    assert result.topk_prompt is not None
    assert result.topk_prompt.token_ids_Tk.shape == (50, 4)
    assert result.topk_prompt.token_ids_Tk[0].tolist() == [0] * 4
    assert result.topk_prompt.logprobs_Tk[0].tolist() == [-99999.0] * 4
    np.testing.assert_allclose(result.topk_prompt.logprobs_Tk[1:], logprobs[:-1].topk(4).values, atol=1e-4)
    assert result.topk_prompt.token_ids_Tk[1:].tolist() == logprobs[:-1].topk(4).indices.tolist()


def test_a_prompt_of_one_token_has_the_logprobs_of_nothing(base: BaseModel):
    result = sample_alone(base, make_sample("a", make_prompt(1), HOT, prompt_logprobs=True, topk_prompt_logprobs=2))
    assert result.prompt_logprobs_T is not None
    assert np.isnan(result.prompt_logprobs_T).tolist() == [True]
    assert result.topk_prompt is not None
    assert result.topk_prompt.token_ids_Tk.tolist() == [[0, 0]]


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_5"])
def test_a_prompt_that_was_seen_is_not_computed_again_and_answers_the_same(bases: dict[str, BaseModel], arch: str):
    base = bases[arch]
    sampler = LocalSampler(base, {}, options=SamplerOptions(block_size=4))
    prompt = make_prompt(30)
    first = run(sampler, make_sample("a", prompt, prompt_logprobs=True))["a"]
    again = run(sampler, make_sample("b", prompt))["b"]
    scored = run(sampler, make_sample("c", prompt, prompt_logprobs=True))["c"]
    turn = np.concatenate([prompt, first.sequences[0].tokens_T, make_prompt(3)])
    second_turn = run(sampler, make_sample("d", turn))["d"]
    hits = [r.prompt_cache_hit_tokens for r in (first, again, scored, second_turn)]
    assert hits == [0, 28, 0, 40]
    assert_same(again, replace(first, prompt_logprobs_T=None), BOUNDS[arch])
    assert_same(scored, first, BOUNDS[arch])
    assert_same(second_turn, sample_alone(base, make_sample("d", turn)), BOUNDS[arch])


def test_layers_with_a_state_share_a_beginning_from_the_third_prompt_on(bases: dict[str, BaseModel]):
    """The second prompt finds the end of the common prefix, and stores a state there."""
    base = bases["qwen3_5"]
    sampler, shared = LocalSampler(base, {}, options=SamplerOptions(block_size=4)), make_prompt(22)
    prompts = [np.concatenate([shared, make_prompt(9, seed)]) for seed in range(4)]
    results = [run(sampler, make_sample("a", prompt, num_samples=3))["a"] for prompt in prompts]
    assert [result.prompt_cache_hit_tokens for result in results] == [0, 0, 20, 20]
    for prompt, result in zip(prompts, results, strict=True):
        assert_same(result, sample_alone(base, make_sample("a", prompt, num_samples=3)), BOUNDS["qwen3_5"])


def test_a_cached_prompt_is_found_in_its_own_scope_only(base: BaseModel):
    sampler = LocalSampler(base, {}, options=SamplerOptions(block_size=4))
    prompt = make_prompt(30)
    hits = [
        run(sampler, make_sample(scope, prompt, cache_scope=scope[0]))[scope].prompt_cache_hit_tokens
        for scope in ("alice", "bob", "ann")
    ]
    hits += [run(sampler, make_sample("bob", prompt, cache_scope="b"))["bob"].prompt_cache_hit_tokens]
    assert hits == [0, 0, 28, 28]


def test_a_request_keeps_the_weights_that_it_started_with(base: BaseModel):
    old, new = make_adapter(base, 1), make_adapter(base, 2)
    versions = {"v": old}
    sampler = LocalSampler(base, versions, options=SamplerOptions(block_size=4))
    sample = make_sample("a", make_prompt(14), version_id="v")
    sampler.submit(sample)
    sampler.step()
    sampler.submit(replace(sample, request_id="waiting"))
    versions["v"] = new
    sampler.submit(replace(sample, request_id="new"))
    sampler.step()
    del versions["v"]
    results = finish(sampler)
    for request_id, adapter in (("a", old), ("waiting", old), ("new", new)):
        assert_same(results[request_id], sample_alone(base, sample, {"v": adapter}))
    assert results["new"].prompt_cache_hit_tokens == 0
    assert results["a"].sequences[0].tokens_T.tolist() != results["new"].sequences[0].tokens_T.tolist()
    sampler.collect()
    assert sampler._batcher.pool.num_cached == 0
    assert not sampler._lora_batches, "they hold the adapter"
    with pytest.raises(NotFoundError, match="'v'"):
        sampler.submit(sample)
    assert not sampler.has_work


def _make_broken_adapter(base: BaseModel, value: float) -> Adapter:
    adapter = make_adapter(base, 9)
    adapter.flat_P.fill_(value)
    adapter.refresh()
    return adapter


@pytest.mark.matrix(3)
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30])
@pytest.mark.parametrize("arch", ["qwen3", "gemma2", "qwen3_5"])
def test_weights_that_are_not_finite_fail_their_own_requests_only(bases: dict[str, BaseModel], arch: str, value: float):
    base = bases[arch]
    versions = {"good": make_adapter(base, 1), "bad": _make_broken_adapter(base, value)}
    # 20 blocks: the other requests reuse the poisoned blocks.
    num_bytes = 80 * LocalSampler(base, {})._cache.token_bytes + 16 * state_bytes(probe_layers(base))
    options = SamplerOptions(block_size=4, kv_cache_bytes=num_bytes, max_tokens_per_step=16)
    sampler = LocalSampler(base, versions, options=options)
    samples = [
        make_sample(
            f"{version_id}{i}",
            make_prompt(6 + i, seed=i),
            version_id=version_id,
            num_samples=1 + i % 2,
            prompt_logprobs=i == 3,
        )
        for i in range(5)
        for version_id in ("good", "bad", None)
    ]
    results = run(sampler, *samples)
    for sample in samples:
        outcome = results[sample.request_id]
        if sample.version_id == "bad":
            assert isinstance(outcome, UserError)
            assert "not finite" in str(outcome)
        else:
            assert_same(outcome, sample_alone(base, sample, versions), BOUNDS[arch])


def test_a_prompt_row_that_is_not_finite_fails_the_request_even_if_the_next_token_could_be_drawn(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
):
    logits = base.logits

    def spoil_logits(hidden_TD: torch.Tensor, lora_batch: LoRABatch) -> torch.Tensor:
        logits_TV = logits(hidden_TD, lora_batch)
        if len(logits_TV) > 1:
            logits_TV[3, 5] = torch.nan
        return logits_TV

    monkeypatch.setattr(base, "logits", spoil_logits)
    sampler = LocalSampler(base, {})
    scored = run(sampler, make_sample("a", make_prompt(9), prompt_logprobs=True))["a"]
    assert isinstance(scored, UserError)
    assert isinstance(run(sampler, make_sample("b", make_prompt(9)))["b"], SampleResult)


def test_an_answer_runs_to_the_end_of_the_context_if_nothing_else_is_said(base: BaseModel):
    params = SamplingParams(stop_eos=False, seed=1)
    answer = sample_alone(base, make_sample("a", make_prompt(250), params)).sequences[0]
    assert (len(answer.tokens_T), answer.stop_reason) == (6, "length")


@pytest.mark.parametrize(
    ("length", "max_tokens", "words"),
    [(250, 7, ["250", "7", "256"]), (256, 1, ["256", "1"]), (256, None, ["256"]), (300, None, ["300", "256"])],
)
def test_a_request_beyond_the_context_is_refused_with_its_numbers(
    base: BaseModel, length: int, max_tokens: int | None, words: list[str]
):
    sampler = LocalSampler(base, {})
    with pytest.raises(UserError) as error:
        sampler.submit(make_sample("a", make_prompt(length), SamplingParams(max_tokens=max_tokens)))
    assert all(word in str(error.value) for word in words)
    assert not sampler.has_work


def test_a_request_that_the_cache_can_never_hold_is_refused_and_the_largest_that_it_can_is_not(base: BaseModel):
    token_bytes = LocalSampler(base, {})._cache.token_bytes
    options = SamplerOptions(block_size=8, kv_cache_bytes=40 * token_bytes + 5)
    sampler = LocalSampler(base, {}, options=options)
    with pytest.raises(UserError, match=r"prompt \(30 tokens\) \+ max_tokens \(12\).*256.*can hold 41"):
        sampler.submit(make_sample("a", make_prompt(30), replace(HOT, max_tokens=12)))
    fits = run(
        sampler,
        make_sample("b", make_prompt(30), replace(HOT, max_tokens=11)),
        make_sample("c", make_prompt(35, 1)[:29]),
    )
    assert len(fits["b"].sequences[0].tokens_T) == 11
    assert_same(fits["c"], sample_alone(base, make_sample("c", make_prompt(35, 1)[:29])))


@pytest.mark.parametrize("prompt", [[], [5, 300], [-1]])
def test_a_prompt_without_tokens_or_with_unknown_ones_is_refused(base: BaseModel, prompt: list[int]):
    with pytest.raises(UserError):
        LocalSampler(base, {}).submit(make_sample("a", np.array(prompt, np.int32)))


def test_cancelling_frees_the_blocks_at_once_and_leaves_the_others_alone(base: BaseModel):
    sampler = LocalSampler(base, {}, options=SamplerOptions(block_size=4, max_sequences=4))
    survivor = make_sample("kept", make_prompt(9))
    sampler.submit(survivor)
    sampler.step()
    num_live = sampler._batcher.pool.num_live
    sampler.submit(make_sample("running", make_prompt(20), num_samples=3))
    sampler.submit(make_sample("waiting", make_prompt(21, 1), num_samples=3))
    for _ in range(2):
        sampler.step()
    assert sampler._batcher.pool.num_live > num_live + 4
    assert sampler.cancel("running")
    assert sampler.cancel("waiting")
    assert sampler._batcher.pool.num_live == num_live
    assert not sampler.cancel("running")
    assert not sampler.cancel("unknown")
    results = finish(sampler)
    assert list(results) == ["kept"]
    assert_same(results["kept"], sample_alone(base, survivor))
    assert not sampler.cancel("kept")


def test_a_paused_request_holds_no_blocks_and_is_no_work(base: BaseModel):
    sampler = LocalSampler(base, {}, options=SamplerOptions(block_size=4, max_sequences=4))
    paused = make_sample("paused", make_prompt(20), num_samples=3, prompt_logprobs=True)
    sampler.submit(paused)
    for _ in range(4):
        sampler.step()
    sampler.pause({"paused", "later", "unknown"})
    assert not sampler.has_work and sampler._batcher.pool.num_live == 0
    sampler.submit(make_sample("later", make_prompt(3)))
    others = [make_sample(str(index), make_prompt(9, index), num_samples=4) for index in range(2)]
    results = run(sampler, *others)
    assert set(results) == {"0", "1"} and sampler.cancel("later")
    sampler.pause(())
    results |= finish(sampler)
    for sample in (paused, *others):
        assert_same(results[sample.request_id], sample_alone(base, sample))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("arch", ["qwen3", "qwen3_5"])
@given(st.data())
@examples(12)
def test_pauses_at_any_step_change_no_token(bases: dict[str, BaseModel], arch: str, data: st.DataObject):
    base = bases[arch]
    options = SamplerOptions(block_size=4, max_sequences=3, max_tokens_per_step=7)
    sampler = LocalSampler(base, {}, options=options)
    samples = [make_sample(str(index), make_prompt(5 + 6 * index, index), num_samples=2) for index in range(3)]
    for sample in samples:
        sampler.submit(sample)
    results: dict[str, SampleResult] = {}
    names = st.sets(st.sampled_from(["0", "1", "2"]))
    for _ in range(data.draw(st.integers(1, 8))):
        sampler.pause(data.draw(names))
        for _ in range(data.draw(st.integers(0, 6))):
            if sampler.has_work:
                results |= dict(sampler.step())  # type: ignore[arg-type]
    sampler.pause(())
    results |= finish(sampler)
    for sample in samples:
        assert_same(results[sample.request_id], sample_alone(base, sample), BOUNDS[arch])


def test_nothing_is_allocated_before_there_is_work_and_memory_follows_the_work(base: BaseModel):
    sampler = LocalSampler(base, {})
    assert sampler._cache.num_blocks == 0
    assert sampler.step() == []
    for turn in range(12):
        run(sampler, make_sample(str(turn), make_prompt(100, turn)))
    assert sampler._cache.num_blocks <= 65


def test_a_bfloat16_base_scores_its_own_samples_as_it_drew_them(
    model_dirs: dict[str, Path], bases: dict[str, BaseModel]
):
    base = BaseModel.load(bases["qwen3"].shape, device="cpu", dtype="bfloat16")
    versions = {"v": make_adapter(base, 4)}
    for version_id in (None, "v"):
        drawn = sample_alone(base, make_sample("a", make_prompt(20), version_id=version_id), versions).sequences[0]
        tokens = np.concatenate([make_prompt(20), drawn.tokens_T])
        scored = sample_alone(base, make_sample("b", tokens, version_id=version_id, prompt_logprobs=True), versions)
        assert scored.prompt_logprobs_T is not None
        np.testing.assert_allclose(scored.prompt_logprobs_T[20:], drawn.logprobs_T, atol=0.15)


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_5"])
def test_a_failing_step_leaves_a_sampler_that_can_go_on(
    bases: dict[str, BaseModel], arch: str, monkeypatch: pytest.MonkeyPatch
):
    base = bases[arch]
    sampler = LocalSampler(base, {}, options=SamplerOptions(block_size=4))
    sampler.submit(make_sample("a", make_prompt(12), num_samples=2))
    sampler.step()
    hidden: Callable[..., torch.Tensor] = base.hidden
    with monkeypatch.context() as patch:
        patch.setattr(base, "hidden", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sampler.step()
    assert base.hidden == hidden
    assert sampler.cancel("a")
    assert sampler._batcher.pool.num_live == 0
    assert_same(
        run(sampler, make_sample("b", make_prompt(12)))["b"], sample_alone(base, make_sample("b", make_prompt(12)))
    )
