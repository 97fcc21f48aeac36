"""Prompt logprobs against transformers in float64, and that only requested rows are computed."""

from __future__ import annotations

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
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.backends.torch.model import BaseModel
from tinsmith.errors import UserError
from tinsmith.samplers.local import prompt_logprobs
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions
from tinsmith.samplers.local.prompt_logprobs import PromptScores
from tinsmith.samplers.local.sampling import draw_alternatives, uniform, uniforms
from tinsmith.types import AltTokens, SampleResult, SparseRows

ARCHS = ("qwen3", "gemma2")
GOLDEN_SAMPLE = 0.24860825086171157
GOLDEN_ALTERNATIVES = [0.5330842868314912, 0.49992668245203264, 0.9774167588754007]


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {arch: tmp_path_factory.mktemp(arch) for arch in ARCHS}


@pytest.fixture(scope="module")
def bases(model_dirs: dict[str, Path]) -> dict[str, BaseModel]:
    return {
        arch: BaseModel.load(tiny_models.make(path, arch), device="cpu", dtype="float32")
        for arch, path in model_dirs.items()
    }


@pytest.fixture(scope="module")
def base(bases: dict[str, BaseModel]) -> BaseModel:
    return bases["qwen3"]


def _ids(rng: np.random.Generator, num_rows: int, width: int) -> np.ndarray:
    """Target ids, about half of them empty, at least one not."""
    ids = np.where(rng.random((num_rows, width)) < 0.5, -1, rng.integers(0, 256, (num_rows, width)))
    ids[-1, 0] = 5
    return ids


def _csr(ids_TK: np.ndarray, *, listed_nothings: int = 0) -> SparseRows:
    """The cells with a token, and the first `listed_nothings` of the empty ones."""
    nothings = np.flatnonzero(ids_TK.ravel() < 0)[:listed_nothings]
    listed = ids_TK >= 0
    listed.ravel()[nothings] = True
    rows, columns = np.nonzero(listed)
    crow = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(ids_TK)))]).astype(np.int64)
    return SparseRows(ids_TK[rows, columns], crow, columns.astype(np.int64), (ids_TK.shape[0], ids_TK.shape[1]))


def _check_targets(actual: object, ids_TK: np.ndarray, logprobs_TV: torch.Tensor) -> None:
    expected = np.where(ids_TK < 0, 0.0, np.take_along_axis(logprobs_TV.numpy(), np.maximum(ids_TK, 0), 1))
    if isinstance(actual, SparseRows):
        rows = np.repeat(np.arange(actual.shape[0]), np.diff(actual.crow_indices))
        expected = expected[rows, actual.col_indices]
        actual = actual.values
    assert isinstance(actual, np.ndarray)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    assert np.all(actual[expected == 0.0] == 0.0)


def _check_alternatives(
    alternatives: AltTokens | None, seed: int, tempered_TV: torch.Tensor, logprobs_TV: torch.Tensor
):
    """Each draw matches its uniform in the reference's cumulative distribution, within rounding."""
    assert alternatives is not None
    num_rows, k = alternatives.token_ids_Tk.shape
    assert (alternatives.token_ids_Tk.dtype, alternatives.logprobs_Tk.dtype) == (np.int64, np.float32)
    sums_TV = np.concatenate([np.zeros((num_rows, 1)), np.cumsum(tempered_TV.exp().numpy(), -1)], -1)
    below = np.take_along_axis(sums_TV, alternatives.token_ids_Tk, 1)
    above = np.take_along_axis(sums_TV, alternatives.token_ids_Tk + 1, 1)
    drawn = uniforms(seed, num_rows * k).reshape(num_rows, k)
    assert np.all((below - 1e-4 <= drawn) & (drawn <= above + 1e-4))
    expected = np.take_along_axis(logprobs_TV.numpy(), alternatives.token_ids_Tk, 1)
    np.testing.assert_allclose(alternatives.logprobs_Tk, expected, atol=1e-4)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_all_prompt_results_at_once_match_transformers(
    bases: dict[str, BaseModel], model_dirs: dict[str, Path], arch: str, adapted: bool, sparse: bool, monkeypatch
):
    monkeypatch.setattr(prompt_logprobs, "MAX_LOGIT_ELEMENTS", 5 * bases[arch].vocab_size)
    adapter = make_adapter(bases[arch], 5) if adapted else None
    model, rng = reference_model(model_dirs[arch], adapter), np.random.default_rng(int(adapted) + 2 * int(sparse))
    sampler = LocalSampler(
        bases[arch], {"v": adapter} if adapter else {}, options=SamplerOptions(block_size=4, max_tokens_per_step=9)
    )
    for index, (length, last_n, temperature) in enumerate([(2, 1, 1.0), (19, None, 0.6), (31, 6, 1.7), (31, 30, 1.0)]):
        prompt = make_prompt(length)
        ids = _ids(rng, length - 1, 3)
        sample = make_sample(
            str(index),
            prompt,
            replace(HOT, max_tokens=3, temperature=temperature, seed=index, top_k=4, top_p=0.5),
            version_id="v" if adapter else None,
            num_samples=3,
            prompt_logprobs=True,
            topk_prompt_logprobs=4,
            topk_sample_logprobs=2,
            prompt_logprobs_last_n=last_n,
            target_prompt_logprobs=_csr(ids, listed_nothings=2) if sparse else ids,
            prompt_alt_tokens_k=5,
        )
        result = run(sampler, sample)[str(index)]
        logprobs = reference_logprobs(model, prompt)[:-1]
        first = 1 if last_n is None else length - last_n
        assert result.prompt_logprobs_T is not None and result.topk_prompt is not None
        assert np.isnan(result.prompt_logprobs_T).tolist() == [position < first for position in range(length)]
        token_logprobs = logprobs.gather(1, torch.from_numpy(prompt[1:, None].astype(np.int64)))[:, 0]
        np.testing.assert_allclose(result.prompt_logprobs_T[first:], token_logprobs[first - 1 :], atol=1e-4)
        assert np.all(result.topk_prompt.logprobs_Tk[:first] == -99999.0)
        assert np.all(result.topk_prompt.token_ids_Tk[:first] == 0)
        likeliest = logprobs[first - 1 :].topk(4)
        np.testing.assert_allclose(result.topk_prompt.logprobs_Tk[first:], likeliest.values, atol=1e-4)
        assert result.topk_prompt.token_ids_Tk[first:].tolist() == likeliest.indices.tolist()
        assert isinstance(result.target_prompt, SparseRows) == sparse
        _check_targets(result.target_prompt, ids, logprobs)
        tempered = torch.log_softmax(logprobs / temperature, -1)
        _check_alternatives(result.alt_tokens, index, tempered, logprobs)
        for answer in result.sequences:
            answer_logprobs = reference_logprobs(model, np.concatenate([prompt, answer.tokens_T]), temperature)[
                length - 1 : -1
            ]
            assert answer.topk is not None
            np.testing.assert_allclose(answer.topk.logprobs_Tk, answer_logprobs.topk(2).values, atol=1e-4)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("adapted", [False, True])
def test_a_prompt_that_fills_the_context_is_scored(
    bases: dict[str, BaseModel], model_dirs: dict[str, Path], arch: str, adapted: bool
):
    base = bases[arch]
    adapter = make_adapter(base, 5) if adapted else None
    sampler = LocalSampler(base, {"v": adapter} if adapter else {}, options=SamplerOptions(block_size=4))
    model, prompt = reference_model(model_dirs[arch], adapter), make_prompt(base.max_context_length)
    logprobs = reference_logprobs(model, prompt)
    token_logprobs = logprobs[:-1].gather(1, torch.from_numpy(prompt[1:, None].astype(np.int64)))[:, 0]
    version = "v" if adapter else None
    for index, (last_n, max_tokens) in enumerate([(None, 1), (None, None), (7, 1), (1, 1)]):
        params = replace(HOT, max_tokens=max_tokens)
        name = str(index)
        result = run(
            sampler,
            make_sample(
                name,
                prompt,
                params,
                version_id=version,
                num_samples=2,
                prompt_logprobs=True,
                prompt_logprobs_last_n=last_n,
                topk_prompt_logprobs=3,
            ),
        )[name]
        first = 1 if last_n is None else len(prompt) - last_n
        assert result.prompt_logprobs_T is not None and result.topk_prompt is not None
        np.testing.assert_allclose(result.prompt_logprobs_T[first:], token_logprobs[first - 1 :], atol=1e-4)
        np.testing.assert_allclose(
            result.topk_prompt.logprobs_Tk[first:], logprobs[first - 1 : -1].topk(3)[0], atol=1e-4
        )
        assert (result.prompt_cache_hit_tokens > 0) == (last_n is not None)
        for answer in result.sequences:
            (token,) = answer.tokens_T
            np.testing.assert_allclose(answer.logprobs_T, [float(logprobs[-1, int(token)])], atol=1e-4)
    for wrong in (
        make_sample("more", prompt, replace(HOT, max_tokens=2), version_id=version, prompt_logprobs=True),
        make_sample("plain", prompt, replace(HOT, max_tokens=1), version_id=version),
    ):
        with pytest.raises(UserError, match="exceed the context length"):
            sampler.submit(wrong)


def test_a_sparse_answer_has_the_cells_of_its_question(base: BaseModel):
    ids = _ids(np.random.default_rng(0), 8, 4)
    targets = _csr(ids, listed_nothings=3)
    result = sample_alone(base, make_sample("a", make_prompt(9), target_prompt_logprobs=targets)).target_prompt
    assert isinstance(result, SparseRows)
    assert result.shape == (8, 4)
    assert result.crow_indices.tolist() == targets.crow_indices.tolist()
    assert result.col_indices.tolist() == targets.col_indices.tolist()
    dense = sample_alone(base, make_sample("a", make_prompt(9), target_prompt_logprobs=ids)).target_prompt
    assert isinstance(dense, np.ndarray)
    rows = np.repeat(np.arange(8), np.diff(targets.crow_indices))
    np.testing.assert_allclose(result.values, dense[rows, targets.col_indices], atol=1e-6)


class _Rows:
    """Counts the rows that go through the base's layers and through its unembedding."""

    def __init__(self, base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_hidden = self.num_logits = 0
        hidden, logits = base.hidden, base.logits

        def count_hidden(token_ids_T: torch.Tensor, *args: object) -> torch.Tensor:
            self.num_hidden += len(token_ids_T)
            return hidden(token_ids_T, *args)  # pyright: ignore[reportArgumentType]

        def count_logits(hidden_TD: torch.Tensor, lora_batch: LoRABatch) -> torch.Tensor:
            self.num_logits += len(hidden_TD)
            return logits(hidden_TD, lora_batch)

        monkeypatch.setattr(base, "hidden", count_hidden)
        monkeypatch.setattr(base, "logits", count_logits)
        monkeypatch.setattr(base, "next_logits", count_logits)


def test_scoring_the_end_of_a_cached_prompt_costs_only_its_end(base: BaseModel, monkeypatch: pytest.MonkeyPatch):
    sampler = LocalSampler(base, {}, options=SamplerOptions(block_size=4))
    prompt, once = make_prompt(40), replace(HOT, max_tokens=1)
    full = run(sampler, make_sample("whole", prompt, once, prompt_logprobs=True, topk_prompt_logprobs=3))["whole"]
    rows = _Rows(base, monkeypatch)
    ids = np.full((39, 1), -1)
    ids[36:, 0] = prompt[37:]
    end = run(
        sampler,
        make_sample(
            "end",
            prompt,
            once,
            prompt_logprobs=True,
            topk_prompt_logprobs=3,
            prompt_logprobs_last_n=5,
            target_prompt_logprobs=ids,
        ),
    )["end"]
    assert full.prompt_cache_hit_tokens == 0
    assert end.prompt_cache_hit_tokens == 32
    assert rows.num_hidden == 8
    assert rows.num_logits == 5 + 1
    assert full.prompt_logprobs_T is not None and end.prompt_logprobs_T is not None
    assert full.topk_prompt is not None and end.topk_prompt is not None
    np.testing.assert_allclose(end.prompt_logprobs_T[35:], full.prompt_logprobs_T[35:], atol=2e-5)
    np.testing.assert_allclose(end.topk_prompt.logprobs_Tk[35:], full.topk_prompt.logprobs_Tk[35:], atol=2e-5)
    assert isinstance(end.target_prompt, np.ndarray)
    np.testing.assert_allclose(end.target_prompt[36:, 0], full.prompt_logprobs_T[37:], atol=2e-5)


@pytest.mark.parametrize(
    ("options", "hits", "num_logits"),
    [
        ({}, 36, 1),
        ({"prompt_logprobs": True}, 0, 40),
        ({"topk_prompt_logprobs": 2}, 0, 40),
        ({"prompt_alt_tokens_k": 2}, 0, 40),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3, "prompt_alt_tokens_k": 2}, 0, 40),
        ({"target_prompt_logprobs": (20, 30)}, 20, 3),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3, "target_prompt_logprobs": (20,)}, 20, 5),
    ],
)
def test_only_rows_that_are_asked_for_are_computed(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch, options: dict, hits: int, num_logits: int
):
    sampler = LocalSampler(base, {}, options=SamplerOptions(block_size=4))
    prompt = make_prompt(40)
    run(sampler, make_sample("first", prompt, replace(HOT, max_tokens=1)))
    if rows := options.get("target_prompt_logprobs"):
        ids = np.full((39, 2), -1)
        ids[list(rows), 1] = 9
        options = options | {"target_prompt_logprobs": ids}
    counted = _Rows(base, monkeypatch)
    result = run(sampler, make_sample("again", prompt, replace(HOT, max_tokens=1), **options))["again"]
    assert result.prompt_cache_hit_tokens == hits
    assert counted.num_hidden == 40 - hits
    assert counted.num_logits == num_logits


@pytest.mark.extended
@examples(6)
@given(seed=st.integers(0, 10_000), max_tokens=st.sampled_from([3, 17, 512]), num_blocks=st.sampled_from([None, 60]))
def test_batches_chunks_and_memory_do_not_change_prompt_logprobs(
    bases: dict[str, BaseModel], seed: int, max_tokens: int, num_blocks: int | None
):
    base, rng = bases["qwen3"], np.random.default_rng(seed)
    versions = {"v": make_adapter(base, 1)}
    token_bytes = LocalSampler(base, {})._cache.token_bytes
    options = SamplerOptions(
        block_size=4, max_tokens_per_step=max_tokens, kv_cache_bytes=num_blocks and num_blocks * token_bytes
    )
    samples = []
    for index in range(8):
        prompt = np.concatenate([make_prompt(int(rng.integers(1, 20))), make_prompt(int(rng.integers(1, 12)), index)])
        wants_own = bool(rng.integers(2))
        samples.append(
            make_sample(
                str(index),
                prompt,
                replace(HOT, max_tokens=int(rng.integers(1, 12)), seed=int(rng.integers(100)), top_k=3),
                version_id=("v", None)[rng.integers(2)],
                num_samples=int(rng.integers(1, 4)),
                prompt_logprobs=wants_own,
                prompt_logprobs_last_n=int(rng.integers(1, len(prompt))) if wants_own else None,
                topk_prompt_logprobs=int(rng.integers(0, 3)),
                target_prompt_logprobs=_ids(rng, len(prompt) - 1, 2) if rng.integers(2) else None,
                prompt_alt_tokens_k=int(rng.choice([0, 0, 3])),
            )
        )
    sampler, results = LocalSampler(base, versions, options=options), {}
    for sample in samples:
        sampler.submit(sample)
        for _ in range(rng.integers(0, 3)):
            results.update(sampler.step())
    results.update(finish(sampler))
    for sample in samples:
        assert_same(results[sample.request_id], sample_alone(base, sample, versions))


def _alternatives(result: SampleResult) -> list[list[int]]:
    assert result.alt_tokens is not None
    return result.alt_tokens.token_ids_Tk.tolist()


def test_alternatives_follow_the_seed_and_differ_without_one(base: BaseModel):
    prompt = make_prompt(12)
    seeds = [7, 7, 8, None, None]
    drawn = [
        _alternatives(sample_alone(base, make_sample("a", prompt, replace(HOT, seed=seed), prompt_alt_tokens_k=6)))
        for seed in seeds
    ]
    assert drawn[0] == drawn[1]
    assert len({str(rows) for rows in drawn[1:]}) == 4
    assert len({tuple(row) for row in drawn[0]}) > 1


def test_at_temperature_zero_all_alternatives_are_the_likeliest_token(base: BaseModel, model_dirs: dict[str, Path]):
    prompt = make_prompt(12)
    result = sample_alone(base, make_sample("a", prompt, replace(HOT, temperature=0.0), prompt_alt_tokens_k=3))
    logprobs = reference_logprobs(reference_model(model_dirs["qwen3"]), prompt)[:-1]
    assert _alternatives(result) == [[token] * 3 for token in logprobs.argmax(-1).tolist()]
    assert result.alt_tokens is not None
    np.testing.assert_allclose(result.alt_tokens.logprobs_Tk[:, 2], logprobs.max(-1).values, atol=1e-4)


def test_a_prompt_of_one_token_has_no_alternatives(base: BaseModel):
    result = sample_alone(base, make_sample("a", make_prompt(1), prompt_alt_tokens_k=3))
    assert result.alt_tokens is not None
    assert result.alt_tokens.token_ids_Tk.shape == result.alt_tokens.logprobs_Tk.shape == (0, 3)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_have_the_frequencies_of_the_whole_distribution(temperature: float):
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(1)) * 3
    logits[1, 40:] = -torch.inf
    num = 40_000
    grid = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    drawn = draw_alternatives(logits, temperature, grid.expand(2, -1))
    for row in range(2):
        counts = np.bincount(drawn[row].numpy(), minlength=300) / num
        expected = torch.softmax(logits[row].double() / temperature, -1).numpy()
        np.testing.assert_allclose(counts, expected, atol=2 / num + 1e-5)
        assert not counts[expected == 0].any()


def test_a_uniform_next_to_one_draws_a_token_that_has_weight():
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    ends = torch.tensor([[0.0, 1.0, np.nextafter(1.0, 0.0)]], dtype=torch.float64)
    assert draw_alternatives(logits, 1.0, ends).tolist() == [[0, 1, 1]]


def test_the_randomness_of_a_seed_is_the_same_in_every_process_and_version():
    assert uniform(7, 0, 0) == GOLDEN_SAMPLE
    assert uniforms(7, 3).tolist() == GOLDEN_ALTERNATIVES
    assert uniforms(7, 5)[:3].tolist() == GOLDEN_ALTERNATIVES
    assert uniforms(-(2**63), 1).tolist() != uniforms(2**63 - 1, 1).tolist()


def test_targets_beyond_the_vocabulary_never_reach_a_step(base: BaseModel):
    sampler = LocalSampler(base, {})
    sample = make_sample("a", make_prompt(3), target_prompt_logprobs=np.array([[1], [base.vocab_size]]))
    with pytest.raises(UserError, match="target_prompt_logprobs holds ids outside"):
        sampler.submit(sample)
    assert not sampler.has_work


def test_a_target_row_that_is_not_finite_fails_the_request(base: BaseModel, monkeypatch: pytest.MonkeyPatch):
    logits = base.logits
    monkeypatch.setattr(base, "logits", lambda hidden, lora_batch: logits(hidden, lora_batch).fill_(torch.nan))
    outcome = run(LocalSampler(base, {}), make_sample("a", make_prompt(4), prompt_alt_tokens_k=1))["a"]
    assert isinstance(outcome, UserError)


def test_a_plain_sample_wants_no_row():
    assert PromptScores(make_sample("a", make_prompt(9)), 0).next_row is None
