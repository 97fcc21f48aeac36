"""Requests that are refused before they are stored, and the messages."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.api.submission import check_seq_id
from tinsmith.auth import check_form
from tinsmith.cluster.sample_admission import check_sample
from tinsmith.errors import NotAuthenticatedError, UserError
from tinsmith.types import AdamParams, DimuonParams, LoraSpec, ModelShape, Sample, SamplingParams, SparseRows
from tinsmith.wire.fields import validate
from tinsmith.wire.sampling import MAX_NUM_SAMPLES, MAX_TEMPERATURE, SampleRequest
from tinsmith.wire.training import OptimStepRequest, optim_step_of
from tinsmith.wire.weights import CreateModel, SaveRequest

SHAPE = ModelShape(name="local/tiny", path="/x", vocab_size=50, max_context_length=16, arch="Tiny")


def sample(*, tokens: list[int] | None = None, num_samples: int = 1, k: int = 0, **params: object) -> Sample:
    return Sample(
        request_id="r",
        version_id=None,
        prompt_T=np.array([1, 2, 3] if tokens is None else tokens, np.int32),
        num_samples=num_samples,
        params=SamplingParams(**params),  # type: ignore[arg-type]
        topk_prompt_logprobs=k,
    )


def asking(**options: object) -> Sample:
    """A request for a prompt of three tokens, with options."""
    return replace(sample(), **options)  # type: ignore[arg-type]


def sparse(values: list[int], crow: list[int], col: list[int], width: int = 2) -> SparseRows:
    return SparseRows(np.array(values), np.array(crow), np.array(col), (2, width))


@pytest.mark.parametrize(
    "good",
    [
        sample(),
        sample(tokens=[49], max_tokens=15),
        sample(tokens=list(range(15)), max_tokens=1),
        sample(tokens=list(range(15))),
        sample(num_samples=MAX_NUM_SAMPLES),
        sample(temperature=0.0, top_p=1.0, top_k=1, seed=-5),
        sample(stop_strings=("x",) * 64, stop_tokens=(0, 49)),
        sample(k=50),
        sample(temperature=MAX_TEMPERATURE),
        asking(prompt_logprobs=True, prompt_logprobs_last_n=1),
        asking(prompt_logprobs=True, prompt_logprobs_last_n=2),
        asking(prompt_alt_tokens_k=1024),
        asking(target_prompt_logprobs=np.array([[-1], [49]])),
        asking(target_prompt_logprobs=sparse([0, 49], [0, 1, 2], [1, 0])),
        replace(sample(tokens=[1]), prompt_alt_tokens_k=1),
        sample(tokens=[1] * 16, k=2),
        sample(tokens=[1] * 16, k=2, max_tokens=1),
        replace(sample(tokens=[1] * 16, max_tokens=1), prompt_logprobs=True),
        replace(sample(tokens=[1] * 16, max_tokens=1), prompt_logprobs=True, prompt_logprobs_last_n=1),
        replace(sample(tokens=[1] * 16, max_tokens=1), prompt_alt_tokens_k=3),
        replace(sample(tokens=[1] * 16), target_prompt_logprobs=np.full((15, 1), 3)),
    ],
)
def test_a_sample_at_its_limits_is_admitted(good: Sample) -> None:
    check_sample(good, SHAPE)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (sample(tokens=[]), "prompt is empty"),
        (sample(tokens=[0, 50]), "prompt token 1 is 50"),
        (sample(tokens=[1] * 10, max_tokens=7), "prompt of 10 tokens and max_tokens 7 exceed the context of 16"),
        (sample(tokens=[1] * 16), "prompt of 16 tokens and one generated token exceed the context of 16"),
        (sample(tokens=[1] * 16, max_tokens=1), "prompt of 16 tokens and max_tokens 1 exceed the context of 16"),
        (sample(tokens=[1] * 16, k=2, max_tokens=2), "prompt of 16 tokens and max_tokens 2 exceed the context of 16"),
        (sample(tokens=[1] * 17, k=2, max_tokens=1), "prompt of 17 tokens and max_tokens 1 exceed the context of 16"),
        (sample(stop_strings=("",)), "a string of 0 characters"),
        (sample(stop_strings=("x" * 257,)), "a string of 257 characters"),
        (sample(stop_strings=("x",) * 65), "65 entries"),
        (sample(stop_tokens=(1,) * 65), "65 entries"),
        (sample(stop_tokens=(50,)), "stop token is 50"),
        (sample(stop_tokens=(-1,)), "stop token is -1"),
        (sample(k=51), "topk_prompt_logprobs is 51"),
        (sample(k=-1), "topk_prompt_logprobs is -1"),
        (replace(sample(), topk_sample_logprobs=51), "topk_sample_logprobs is 51"),
        (asking(prompt_logprobs_last_n=1), "prompt_logprobs_last_n is 1, but prompt_logprobs is not set"),
        (asking(prompt_logprobs=True, prompt_logprobs_last_n=3), "prompt_logprobs_last_n is 3; it must lie between 1"),
        (
            replace(sample(tokens=[1]), prompt_logprobs=True, prompt_logprobs_last_n=1),
            "the prompt's only token has no logprob",
        ),
        (
            asking(target_prompt_logprobs=np.array([[1], [2], [3]])),
            "shape is [3, 1]; a prompt of 3 tokens needs 2 rows",
        ),
        (asking(target_prompt_logprobs=np.array([[1], [50]])), "holds the id 50; token ids of 'local/tiny'"),
        (asking(target_prompt_logprobs=np.array([[1], [-2]])), "holds the id -2"),
        (asking(target_prompt_logprobs=np.full((2, 3), -1)), "target_prompt_logprobs names no token"),
        (asking(target_prompt_logprobs=np.zeros((2, 0), np.int64)), "names no token"),
        (asking(target_prompt_logprobs=np.zeros((2, 2**22 + 1), np.int64)), "at most 8388608 cells"),
        (asking(target_prompt_logprobs=sparse([1], [0, 0, 1], [2**61], width=2**62)), "at most 8388608 cells"),
        (asking(target_prompt_logprobs=sparse([1], [0, 1], [0])), "target_prompt_logprobs.crow_indices"),
        (asking(target_prompt_logprobs=sparse([1], [0, 0, 1], [2])), "target_prompt_logprobs.col_indices reach"),
        (asking(target_prompt_logprobs=sparse([1, 2], [0, 0, 2], [0, 0])), "lists a cell twice"),
        (asking(target_prompt_logprobs=sparse([50], [0, 0, 1], [0])), "holds the id 50"),
    ],
)
def test_a_sample_beyond_its_limits_is_refused_with_the_reason(bad: Sample, words: str) -> None:
    with pytest.raises(UserError) as refusal:
        check_sample(bad, SHAPE)
    assert words in str(refusal.value)


PROMPT = {"chunks": [{"tokens": [1, 2, 3]}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens is 0"),
        ({"sampling_params": {"max_tokens": -3}}, "max_tokens is -3"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"num_samples": MAX_NUM_SAMPLES + 1}, "num_samples is 1025"),
        ({"sampling_params": {"temperature": -0.1}}, "temperature is -0.1"),
        ({"sampling_params": {"temperature": math.inf}}, "temperature is inf"),
        ({"sampling_params": {"temperature": math.nan}}, "temperature is nan"),
        ({"sampling_params": {"top_p": 0.0}}, "top_p is 0.0"),
        ({"sampling_params": {"top_p": 1.01}}, "top_p is 1.01"),
        ({"sampling_params": {"top_p": math.nan}}, "top_p is nan"),
        ({"sampling_params": {"top_k": 0}}, "top_k is 0; it must lie between 1 and 2147483647; -1 turns it off"),
        ({"sampling_params": {"top_k": -2}}, "top_k is -2"),
        ({"sampling_params": {"temperature": 1e31}}, "temperature is 1e+31; it must lie between 0 and 1e+30"),
        ({"prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k is -1; it must lie between 0 and 1024"),
        ({"prompt_alt_tokens_k": 1025}, "prompt_alt_tokens_k is 1025"),
        ({"prompt_logprobs_last_n": 0}, "prompt_logprobs_last_n is 0; it must lie between 1"),
    ],
)
def test_a_field_of_a_sample_out_of_its_range_is_refused_by_name(fields: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as refusal:
        validate(SampleRequest, {"prompt": PROMPT, **fields})
    assert words in str(refusal.value)


def test_fields_of_a_sample_at_their_limits_are_taken() -> None:
    params = {"max_tokens": 1, "temperature": MAX_TEMPERATURE, "top_p": 1.0, "top_k": 1}
    validate(SampleRequest, {"prompt": PROMPT, "num_samples": MAX_NUM_SAMPLES, "sampling_params": params})
    validate(SampleRequest, {"prompt": PROMPT, "sampling_params": {"temperature": 0, "top_k": -1}})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topk_prompt_logprobs": 900}, "topk_prompt_logprobs is 900; for 10000 prompt tokens that is more than"),
        ({"prompt_alt_tokens_k": 900}, "use at most 838, or ask for fewer tokens"),
        ({"topk_sample_logprobs": 900, "num_samples": 2}, "for 2 answers of up to 6384 tokens"),
    ],
)
def test_answers_beyond_memory_are_refused_before_they_begin(options: dict[str, int], words: str) -> None:
    shape = replace(SHAPE, vocab_size=2000, max_context_length=16384)
    big = replace(sample(tokens=[1] * 10_000), **options)
    with pytest.raises(UserError) as refusal:
        check_sample(big, shape)
    assert words in str(refusal.value)
    name = next(iter(options))
    check_sample(replace(big, **{name: 600}), shape)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1e-9),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("beta1", 1.0),
        ("beta1", -0.1),
        ("beta2", math.nan),
        ("eps", 0.0),
        ("eps", -1.0),
        ("eps", math.inf),
        ("weight_decay", -0.1),
        ("grad_clip_norm", math.nan),
    ],
)
def test_an_adam_parameter_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    for field, extra in (("adam_params", {}), ("optimizer_params", {"type": "adamw"})):
        with pytest.raises(UserError, match=rf"{field}\.{name} is "):
            adam(field, **{name: value}, **extra)


def adam(field: str = "adam_params", **params: object) -> AdamParams:
    request = validate(OptimStepRequest, {"model_id": "m", field: params})
    adam_params = optim_step_of(request, "r").params
    assert isinstance(adam_params, AdamParams)
    return adam_params


def test_the_default_and_the_extreme_adam_parameters_are_admitted() -> None:
    assert adam() == AdamParams()
    extreme = {"learning_rate": 0.0, "beta1": 0.0, "beta2": 0.0, "eps": 1.0}
    assert adam(**extreme) == AdamParams(**extreme)


def test_a_dimuon_step_has_ranges_of_its_own() -> None:
    good = {"type": "dimuon", "learning_rate": 0.1, "grad_clip_norm": -1}
    request = validate(OptimStepRequest, {"model_id": "m", "optimizer_params": good})
    assert optim_step_of(request, "r").params == DimuonParams(0.1, 0.9, -1)
    for change in ({"learning_rate": -1}, {"learning_rate": None}, {"beta1": 1}, {"grad_clip_norm": math.inf}):
        with pytest.raises(UserError, match=rf"optimizer_params\.{next(iter(change))} is "):
            validate(OptimStepRequest, {"model_id": "m", "optimizer_params": good | change})


@given(st.floats(), st.floats(), st.floats())
def test_admitted_adam_parameters_are_finite(learning_rate: float, beta1: float, eps: float) -> None:
    try:
        adam(learning_rate=learning_rate, beta1=beta1, eps=eps)
    except UserError:
        return
    assert math.isfinite(learning_rate) and learning_rate >= 0
    assert 0 <= beta1 < 1
    assert 0 < eps < math.inf


def create_model(**lora: object) -> CreateModel:
    return validate(CreateModel, {"session_id": "s", "model_seq_id": 0, "base_model": "b", "lora_config": lora})


@pytest.mark.parametrize("rank", [0, -1, 257])
def test_a_rank_out_of_range_is_refused(rank: int) -> None:
    with pytest.raises(UserError, match=f"rank is {rank}; it must lie between 1 and 256"):
        create_model(rank=rank)


def test_an_adapter_that_trains_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="lora_config trains nothing"):
        create_model(rank=8, train_attn=False, train_mlp=False, train_unembed=False)
    assert create_model(rank=256, train_attn=False, train_mlp=False).lora == LoraSpec(256, None, False, False, True)


def test_a_ttl_lies_between_an_hour_and_ten_years() -> None:
    for good in (None, 3600, 315_360_000):
        validate(SaveRequest, {"model_id": "m", "ttl_seconds": good})
    for bad in (0, 3599, -1, 315_360_001):
        with pytest.raises(UserError, match=f"ttl_seconds is {bad}"):
            validate(SaveRequest, {"model_id": "m", "ttl_seconds": bad})


def test_a_number_that_cannot_be_a_seq_id_is_refused() -> None:
    assert check_seq_id(1) == 1
    for bad in (0, -1, 2**63):
        with pytest.raises(UserError, match=f"seq_id is {bad}"):
            check_seq_id(bad)


@pytest.mark.parametrize("key", ["tml-abc", "eyJhbGciOi"])
def test_any_well_formed_key_is_the_local_tenant(key: str) -> None:
    assert check_form(key) == key


@pytest.mark.parametrize("key", ["slime-dev-key", "tml-abc", "eyJhbGciOi"])
def test_a_key_may_start_as_a_setting_says(key: str) -> None:
    assert check_form(key, ("slime-", "tml-")) == key
    with pytest.raises(NotAuthenticatedError, match="a key starts with 'slime-' or 'tml-'"):
        check_form("sk-abc", ("slime-", "tml-"))


@pytest.mark.parametrize("key", [None, "", "sk-abc", " tml-abc", "tml-" + "x" * 9000])
def test_a_missing_or_malformed_key_is_refused_without_repeating_it(key: str | None) -> None:
    with pytest.raises(NotAuthenticatedError) as refusal:
        check_form(key)
    assert "tml-" in str(refusal.value)
    assert "abc" not in str(refusal.value)
