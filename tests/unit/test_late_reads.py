"""A sampler that reads tokens while the next step runs gives the same answers, bit by bit, as one that reads at once.
Its batches may have one more row. The model computes in float64, so that the shape of a batch changes no bit of a
float32; only transformers' delta net always computes in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from support import tiny_models
from support.local_sampling import assert_same, make_adapter, make_prompt, make_sample, run
from support.properties import examples
from tinsmith.backends.torch.attention import ATTENTION_NAME, register_attention
from tinsmith.backends.torch.host import Readback
from tinsmith.backends.torch.model import BaseModel
from tinsmith.errors import UserError
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions
from tinsmith.samplers.local.kv_cache import probe_layers
from tinsmith.samplers.local.states import state_bytes
from tinsmith.types import Adjustments, Grammar, Partial, Sample, SampleResult, SamplingParams

ARCHS = ("qwen3", "qwen3_5")
"""With keys and values only, and with states."""

torch.set_num_threads(1)

NEEDY = (
    Adjustments(repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.2),
    Adjustments(bad_words=((3, 4), (7,)), min_tokens=4),
    Adjustments(grammar=Grammar("regex", "[a-z]{3,6}")),
)
"""Draws that depend on the values of earlier tokens."""

FREE = (Adjustments(logit_bias=((5, 4.0),), min_p=0.05), Adjustments(allowed_token_ids=tuple(range(60)), min_tokens=3))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BaseModel]:
    register_attention()
    loaded = {}
    for arch in ARCHS:
        shape = tiny_models.make(tmp_path_factory.mktemp(arch), arch)
        model = AutoModelForCausalLM.from_pretrained(
            Path(shape.path), dtype=torch.float64, attn_implementation=ATTENTION_NAME, experts_implementation="eager"
        )
        base = loaded[arch] = BaseModel(model, tiny_models.tokenizer(), shape)
        if base._fused is not None:
            base._fused.prepare()
    return loaded


@dataclass
class RunRecord:
    """A sampler's outcomes by request, its streamed tokens in order, and the requests cancelled in time."""

    outcomes: dict[str, SampleResult | UserError] = field(default_factory=dict)
    partials: list[Partial] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)

    def step(self, sampler: LocalSampler) -> None:
        for request_id, outcome in sampler.step():
            assert request_id not in self.outcomes
            self.outcomes[request_id] = outcome
        self.partials += sampler.partials()


def crowd(rng: np.random.Generator, num: int, versions: list[str | None], *, needy: bool) -> list[Sample]:
    """Requests that end at different steps, by length, token or text; several share a prompt prefix."""
    samples = []
    for index in range(num):
        prompt = np.concatenate([make_prompt(int(rng.integers(1, 20))), make_prompt(int(rng.integers(1, 12)), index)])
        adjustments = (None, None, *FREE, *(NEEDY if needy else ()))
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 16)),
            seed=int(rng.integers(1000)),
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_p=float(rng.choice([1.0, 0.8])),
            stop_eos=False,
            stop_tokens=tuple(rng.integers(0, 256, int(rng.choice([0, 30]))).tolist()),
            stop_strings=tuple("aeiou") if rng.integers(4) == 0 else (),
            adjustments=adjustments[rng.integers(len(adjustments))],
        )
        samples.append(
            make_sample(
                str(index), prompt, params, version_id=versions[rng.integers(len(versions))],
                num_samples=int(rng.integers(1, 4)), prompt_logprobs=bool(rng.integers(2)), stream=True,
                topk_sample_logprobs=int(rng.choice([0, 3])), cache_scope=str(rng.integers(2)),
            )
        )  # fmt: skip
    return samples


def drive(sampler: LocalSampler, samples: list[Sample], seed: int) -> RunRecord:
    """Submit between steps, cancel some, and run to the end."""
    sampler._contiguous = None  # its keys are float32
    rng, record = np.random.default_rng(seed), RunRecord()
    for index, sample in enumerate(samples):
        sampler.submit(sample)
        for _ in range(rng.integers(0, 4)):
            record.step(sampler)
        if rng.integers(4) == 0 and sampler.cancel(name := str(rng.integers(index + 1))):
            record.cancelled.add(name)
    for _ in range(3000):
        if not sampler.has_work:
            assert sampler._batcher.pool.num_live == 0
            return record
        record.step(sampler)
    raise AssertionError("the sampler does not finish")


def bits(result: SampleResult) -> list[bytes]:
    rows = [result.prompt_logprobs_T, *(sequence.logprobs_T for sequence in result.sequences)]
    rows += [sequence.topk.logprobs_Tk for sequence in result.sequences if sequence.topk is not None]
    return [row.tobytes() for row in rows if row is not None]


def assert_streams_are_answers(record: RunRecord) -> None:
    streams: dict[tuple[str, int], list[int]] = {}
    for partial in record.partials:
        streamed = streams.setdefault((partial.request_id, partial.index), [])
        assert partial.start == len(streamed)
        streamed.extend(partial.tokens)
    for request_id, outcome in record.outcomes.items():
        assert isinstance(outcome, SampleResult)
        for index, sequence in enumerate(outcome.sequences):
            assert streams[request_id, index] == sequence.tokens_T.tolist()


@pytest.mark.parametrize("arch", [ARCHS[0], *(pytest.param(arch, marks=pytest.mark.extended) for arch in ARCHS[1:])])
@examples(7)
@given(
    seed=st.integers(0, 10_000),
    options=st.builds(
        SamplerOptions,
        block_size=st.sampled_from([1, 4, 16]),
        max_sequences=st.sampled_from([1, 3, 64]),
        max_tokens_per_step=st.sampled_from([3, 17, 512]),
    ),
    num_tokens=st.sampled_from([None, 60]),
    needy=st.booleans(),
)
def test_answers_and_streams_are_those_of_a_sampler_that_reads_at_once(
    bases: dict[str, BaseModel], arch: str, seed: int, options: SamplerOptions, num_tokens: int | None, needy: bool
) -> None:
    base = bases[arch]
    versions = {f"v{adapter_seed}": make_adapter(base, adapter_seed) for adapter_seed in (1, 2)}
    samples = crowd(np.random.default_rng(seed), 8, [None, *versions], needy=needy)
    if num_tokens is not None:  # less than two requests need: some are preempted
        token_bytes = LocalSampler(base, {})._cache.token_bytes
        room = num_tokens * token_bytes + 16 * state_bytes(probe_layers(base))
        options = replace(options, kv_cache_bytes=room)
    at_once, late = (
        drive(LocalSampler(base, versions, options=replace(options, reads_late=reads_late)), samples, seed)
        for reads_late in (False, True)
    )
    names = {sample.request_id for sample in samples}
    for record in (at_once, late):
        assert record.outcomes.keys() | record.cancelled == names and not record.outcomes.keys() & record.cancelled
        assert_streams_are_answers(record)
    for name in at_once.outcomes.keys() & late.outcomes.keys():
        ours, theirs = late.outcomes[name], at_once.outcomes[name]
        assert isinstance(ours, SampleResult) and isinstance(theirs, SampleResult)
        assert_same(ours, theirs, 2e-5)
        if arch == "qwen3":
            assert bits(ours) == bits(theirs)


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_read(
    bases: dict[str, BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, order = bases["qwen3"], []
    hidden, values = base.hidden, Readback.values
    monkeypatch.setattr(base, "hidden", lambda *args: (order.append("launched"), hidden(*args))[1])
    monkeypatch.setattr(Readback, "values", lambda self: (order.append("read"), values(self))[1])
    params = SamplingParams(max_tokens=3, stop_eos=False, seed=1)
    for reads_late, expected in ((False, "launched read " * 3), (True, "launched launched read launched read read ")):
        sampler = LocalSampler(base, {}, options=SamplerOptions(reads_late=reads_late))
        order.clear()
        run(sampler, make_sample("a", make_prompt(5), params))
        assert order == expected.split()


def test_a_sequence_whose_last_token_was_drawn_makes_place_before_it_is_read(bases: dict[str, BaseModel]) -> None:
    options = SamplerOptions(block_size=4, max_sequences=1, reads_late=True)
    sampler = LocalSampler(bases["qwen3"], {}, options=options)
    params = SamplingParams(max_tokens=2, stop_eos=False, seed=1)
    for name in ("a", "b"):
        sampler.submit(make_sample(name, make_prompt(5), params))
    finished = [[request_id for request_id, _ in sampler.step()] for _ in range(5)]
    assert finished == [[], [], ["a"], [], ["b"]], "the second prompt runs in the third step"


def test_a_discarded_token_is_in_no_answer_and_holds_nothing(bases: dict[str, BaseModel]) -> None:
    sampler = LocalSampler(bases["qwen3"], {}, options=SamplerOptions(block_size=4, reads_late=True))
    params = SamplingParams(max_tokens=50, stop_eos=False, seed=1, stop_tokens=tuple(range(256)))
    sampler.submit(make_sample("a", make_prompt(5), params))
    assert sampler.step() == []
    ((_, result),) = sampler.step()  # which also computes the token after the end
    assert isinstance(result, SampleResult) and len(result.sequences[0].tokens_T) == 1
    assert not sampler.has_work and sampler._batcher.pool.num_live == 0
    again = run(sampler, make_sample("b", make_prompt(5), params))["b"]
    assert again.sequences[0].tokens_T.tolist() == result.sequences[0].tokens_T.tolist()
