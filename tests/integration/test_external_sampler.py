"""vLLM and SGLang as samplers, against engines that keep their HTTP contracts (external_engines.py)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
import tinker
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from safetensors.numpy import save_file
from tinker import types

from support import external_engines
from support.external_engines import DEADLY, NEVER_ENDING, log_softmax
from support.external_sampling import (
    EOS,
    PATIENCE_S,
    PROMPT,
    SHAPE,
    ExternalSetup,
    Fake,
    Outcome,
    interpreter,
    sample,
    until,
)
from support.live import API_KEY, free_port, serving
from tinsmith.backends import Capture
from tinsmith.backends.fake import FakeBackend
from tinsmith.backends.with_remote_sampler import VersionFiles, open_remote_sampler, split_options, with_remote_sampler
from tinsmith.base_models import nano
from tinsmith.errors import EngineFailedError, NotFoundError, NotSupportedError, SettingsError, UserError
from tinsmith.samplers.remote import process_guard
from tinsmith.samplers.remote.client import ExternalSampler, RemoteEngine
from tinsmith.samplers.remote.connection import EngineAccess
from tinsmith.samplers.remote.dialect import derive_seed
from tinsmith.samplers.remote.links import AdapterLinks
from tinsmith.samplers.remote.sglang import SglangDialect
from tinsmith.samplers.remote.vllm import VllmDialect
from tinsmith.types import (
    EMPTY_LOGPROB,
    AdamParams,
    Adjustments,
    Grammar,
    LoraSpec,
    OptimStep,
    Partial,
    ReasoningSpan,
    Sample,
    SampleResult,
    SamplingParams,
    SparseRows,
)


@pytest.fixture(params=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


Open = Callable[..., ExternalSetup]


@pytest.fixture
def open_setup(tmp_path: Path) -> Iterator[Open]:
    with contextlib.ExitStack() as entered:

        def open_(kind: str, fake: Fake | None = None, **engine: object) -> ExternalSetup:
            setup = ExternalSetup(
                kind, entered.enter_context(external_engines.running(kind, fake or Fake())), tmp_path, **engine
            )
            entered.callback(setup.sampler.close)
            return setup

        yield open_


def expected_logprobs(
    fake: Fake, tokens: Sequence[int], start: int, weight: float, temperature: float = 1.0
) -> np.ndarray:
    """[T - start, V] float64 logprobs of what follows."""
    return np.array(
        [log_softmax(fake.logits(list(tokens[:at]), weight) / temperature) for at in range(start, len(tokens))]
    )


ADJUSTED = Adjustments(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, logit_bias=((4, -2.0),))
MAPPED = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 3": {"temperature": 3.0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.4},
    "min_p": {"adjustments": Adjustments(min_p=0.4)},
    "greedy, truncated": {"temperature": 0.0, "top_k": 2, "top_p": 0.1},
    "penalties": {"adjustments": replace(ADJUSTED, repetition_penalty=1.0)},
    "greedy, penalties": {"temperature": 0.0, "adjustments": replace(ADJUSTED, repetition_penalty=1.0)},
}


@pytest.mark.matrix(8)
@pytest.mark.parametrize("case", MAPPED)
def test_logprobs_are_those_of_the_whole_distribution_at_the_sampling_temperature(
    case: str, kind: str, open_setup: Open
) -> None:
    setup = open_setup(kind)
    setup.publish("v", 0.25)
    options = MAPPED[case]
    result = setup.answer(sample(version="v", n=3, topk_sample_logprobs=4, stop_eos=True, **options))
    temperature = cast(float, options.get("temperature", 1.0)) or 1.0
    for sequence in result.sequences:
        tokens = [*PROMPT.tolist(), *sequence.tokens_T.tolist()]
        full_logprobs = expected_logprobs(setup.fake, tokens, len(PROMPT), 0.25, temperature)
        token_logprobs = full_logprobs[np.arange(len(full_logprobs)), sequence.tokens_T]
        np.testing.assert_allclose(sequence.logprobs_T, token_logprobs, atol=1e-5)
        assert sequence.topk is not None
        np.testing.assert_array_equal(sequence.topk.token_ids_Tk, np.argsort(-full_logprobs, axis=1)[:, :4])
        np.testing.assert_allclose(sequence.topk.logprobs_Tk, -np.sort(-full_logprobs, axis=1)[:, :4], atol=1e-5)


def test_a_penalty_changes_what_is_drawn(open_setup: Open) -> None:
    setup = open_setup("vllm")
    plain = setup.answer(sample("a", temperature=0.0, max_tokens=12))
    bias = ((int(plain.sequences[0].tokens_T[0]), -100.0),)
    other = setup.answer(sample("b", temperature=0.0, max_tokens=12, adjustments=Adjustments(logit_bias=bias)))
    assert plain.sequences[0].tokens_T[0] != other.sequences[0].tokens_T[0]
    repeated = setup.answer(sample("c", temperature=0.0, adjustments=ADJUSTED))
    assert repeated.sequences[0].stop_reason in ("stop", "length")


def test_penalties_are_refused_where_sglang_applies_them_a_token_late(open_setup: Open) -> None:
    setup = open_setup("sglang", Fake(counts_newest_token=False))
    penalised = sample("late", temperature=0.0, adjustments=Adjustments(presence_penalty=0.5))
    biased = sample("biased", temperature=0.0, adjustments=Adjustments(logit_bias=((3, 1.0),)))
    outcomes = setup.run(penalised, biased)
    assert isinstance(outcomes["late"], NotSupportedError) and "--disable-overlap-schedule" in str(outcomes["late"])
    assert isinstance(outcomes["biased"], SampleResult)


@pytest.mark.parametrize("dialect", [VllmDialect, SglangDialect])
def test_a_logprob_that_is_equal_by_chance_is_not_taken_for_the_mode(
    dialect: type[VllmDialect] | type[SglangDialect],
) -> None:
    mode = dialect(frozenset(), 300)
    mode.learn_mode([-1.0, -0.4], [-1.0, -0.7])
    mode.check(SamplingParams(temperature=0.5), alternatives=0)
    with pytest.raises((NotSupportedError, SettingsError), match=r"raw_logprobs|ORIGINAL_LOGPROB"):
        mode.learn_mode([-1.0, -0.4], [-1.0, -0.4])
        mode.check(SamplingParams(temperature=0.5), alternatives=0)


@pytest.mark.parametrize("raw", [False, True])
def test_vllm_is_asked_which_logprobs_it_reports(raw: bool, open_setup: Open) -> None:
    setup = open_setup("vllm", Fake(processed=not raw))
    setup.run(sample("first"))  # it is up
    outcome = None
    try:
        result = setup.answer(sample("warm", temperature=0.5))
    except NotSupportedError as error:
        outcome = str(error)
    assert (outcome is not None and "raw_logprobs" in outcome) == raw
    before = len(setup.fake.requests)
    result = setup.answer(sample("cut", top_p=0.5))
    assert len(setup.fake.requests) - before == (1 if raw else 2)  # raw needs no second request
    tokens = [*PROMPT.tolist(), *result.sequences[0].tokens_T.tolist()]
    full_logprobs = expected_logprobs(setup.fake, tokens, len(PROMPT), 0.0)
    token_logprobs = full_logprobs[np.arange(len(full_logprobs)), result.sequences[0].tokens_T]
    np.testing.assert_allclose(result.sequences[0].logprobs_T, token_logprobs, atol=1e-5)


def test_prompts_are_scored(kind: str, open_setup: Open) -> None:
    setup = open_setup(kind)
    setup.publish("v", 0.5)
    full_logprobs = expected_logprobs(setup.fake, PROMPT.tolist(), 1, 0.5)
    token_logprobs = full_logprobs[np.arange(4), PROMPT[1:]]

    scored = setup.answer(sample(version="v", prompt_logprobs=True, topk_prompt_logprobs=3))
    assert scored.prompt_logprobs_T is not None and scored.topk_prompt is not None
    assert np.isnan(scored.prompt_logprobs_T[0])
    np.testing.assert_allclose(scored.prompt_logprobs_T[1:], token_logprobs, atol=1e-5)
    np.testing.assert_array_equal(scored.topk_prompt.token_ids_Tk[1:], np.argsort(-full_logprobs, axis=1)[:, :3])
    np.testing.assert_array_equal(scored.topk_prompt.logprobs_Tk[0], [EMPTY_LOGPROB] * 3)

    last = setup.answer(sample(version="v", prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=2))
    assert last.prompt_logprobs_T is not None and last.topk_prompt is not None
    assert np.isnan(last.prompt_logprobs_T[:3]).all()
    np.testing.assert_allclose(last.prompt_logprobs_T[3:], token_logprobs[2:], atol=1e-5)
    assert (last.topk_prompt.logprobs_Tk[:3] == EMPTY_LOGPROB).all()

    targets = np.array([[1, 2], [60, -1], [-1, -1], [7, 7]])
    dense = setup.answer(sample(version="v", target_prompt_logprobs=targets)).target_prompt
    assert isinstance(dense, np.ndarray)
    rows = np.arange(4)[:, None]
    np.testing.assert_allclose(dense, np.where(targets < 0, 0.0, full_logprobs[rows, targets]), atol=1e-5)

    sparse = SparseRows(np.array([3, 4, 5]), np.array([0, 1, 1, 3, 3]), np.array([0, 0, 1]), (4, 2))
    sparse_rows = setup.answer(sample(version="v", target_prompt_logprobs=sparse)).target_prompt
    assert isinstance(sparse_rows, SparseRows)
    np.testing.assert_allclose(
        sparse_rows.values, [full_logprobs[0, 3], full_logprobs[2, 4], full_logprobs[2, 5]], atol=1e-5
    )


def test_a_seed_gives_the_same_answers_and_every_sample_its_own(kind: str, open_setup: Open) -> None:
    setup = open_setup(kind)
    requests = [sample(f"{seed}-{again}", n=4, seed=seed) for seed in (1, 2) for again in (0, 1)]
    outcomes = setup.run(*requests)

    def tokens(request_id: str) -> list[list[int]]:
        outcome = outcomes[request_id]
        assert isinstance(outcome, SampleResult)
        return [sequence.tokens_T.tolist() for sequence in outcome.sequences]

    assert tokens("1-0") == tokens("1-1")
    # No answer of one seed is one of the next: engines count seeds up.
    everything = [tuple(sequence_tokens) for request_id in ("1-0", "2-0") for sequence_tokens in tokens(request_id)]
    assert len(set(everything)) == 8
    assert len({derive_seed(seed, index, 31) for seed in range(8) for index in range(8)}) == 64


def test_requests_without_a_seed_differ(kind: str, open_setup: Open) -> None:
    setup = open_setup(kind)
    results = [setup.answer(sample(f"r{i}", seed=None, n=2)) for i in range(3)]
    assert len({tuple(s.tokens_T.tolist()) for result in results for s in result.sequences}) > 1


def test_stops(kind: str, open_setup: Open) -> None:
    setup = open_setup(kind)
    free = setup.answer(sample("free", max_tokens=30, stop_eos=kind == "sglang")).sequences[0].tokens_T.tolist()
    at = next(i for i in range(3, 30) if free[i] not in free[:i] and chr(97 + free[i] % 26) not in
              {chr(97 + token % 26) for token in free[:i]})  # fmt: skip
    by_token = setup.answer(sample("token", max_tokens=30, stop_tokens=(free[at],), stop_eos=kind == "sglang"))
    by_text = setup.answer(
        sample("text", max_tokens=30, stop_strings=(chr(97 + free[at] % 26),), stop_eos=kind == "sglang")
    )
    for result in (by_token, by_text):
        assert result.sequences[0].tokens_T.tolist() == free[: at + 1]
        assert result.sequences[0].stop_reason == "stop"


def test_end_tokens_stop_where_they_should(open_setup: Open) -> None:
    setup = open_setup("vllm")
    free = setup.answer(sample("free", max_tokens=8, stop_eos=False)).sequences[0]
    assert free.stop_reason == "length"
    stops = [body["stop_token_ids"] for path, body in setup.fake.requests if path == "/v1/completions"]
    assert stops[-1] == []
    setup.answer(sample("ends"))
    assert setup.fake.requests[-1][1]["stop_token_ids"] == sorted(EOS)


REFUSED = {
    ("vllm", "top_p"): {"temperature": 0.7, "top_p": 0.5},
    ("vllm", "penalty"): {"temperature": 0.7, "adjustments": Adjustments(presence_penalty=1.0)},
    ("sglang", "penalty"): {"temperature": 0.7, "adjustments": Adjustments(presence_penalty=1.0)},
    ("vllm", "grammar"): {"adjustments": Adjustments(grammar=Grammar("regex", "a+"))},
    ("sglang", "grammar"): {"adjustments": Adjustments(grammar=Grammar("regex", "a+"))},
    ("vllm", "budget of reasoning"): {"adjustments": Adjustments(reasoning=ReasoningSpan(1, 2, max_tokens=3))},
    ("sglang", "budget of reasoning"): {"adjustments": Adjustments(reasoning=ReasoningSpan(1, 2, max_tokens=3))},
    ("sglang", "repetition_penalty"): {"adjustments": Adjustments(repetition_penalty=1.5)},
    ("sglang", "frequency_penalty"): {"adjustments": Adjustments(frequency_penalty=3.0)},
    ("sglang", "ignore_eos"): {"stop_eos": False, "stop_tokens": (5,)},
    ("vllm", "prompt_alt_tokens_k"): {"prompt_alt_tokens_k": 2},
    ("sglang", "prompt_alt_tokens_k"): {"prompt_alt_tokens_k": 2},
}


@pytest.mark.parametrize("case", REFUSED, ids="-".join)
def test_what_an_engine_cannot_do_is_refused_by_name(case: tuple[str, str], open_setup: Open) -> None:
    setup = open_setup(case[0])
    with pytest.raises(NotSupportedError, match=case[1]):
        setup.sampler.submit(sample(**REFUSED[case]))
    assert not setup.sampler.has_work


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_budget_that_is_a_target_is_ignored(kind: str, open_setup: Open) -> None:
    setup = open_setup(kind)
    span = ReasoningSpan(1, 2, max_tokens=3, is_advisory=True)
    setup.sampler.submit(sample(adjustments=Adjustments(reasoning=span)))
    assert setup.sampler.has_work


def test_a_seed_is_refused_where_none_is_known(open_setup: Open) -> None:
    setup = open_setup("sglang", Fake(deterministic=False))
    early = setup.run(sample("early"))["early"]  # submitted before the engine was up
    assert isinstance(early, NotSupportedError) and "enable-deterministic-inference" in str(early)
    setup.answer(sample("up", seed=None))
    with pytest.raises(NotSupportedError, match="enable-deterministic-inference"):
        setup.sampler.submit(sample("seeded"))


def test_a_prompt_and_its_answer_must_fit(kind: str, open_setup: Open) -> None:
    setup = open_setup(kind, Fake(context=16))
    setup.answer(sample("up"))  # from here on the engine's own bound is known
    with pytest.raises(UserError, match="16 tokens"):
        setup.sampler.submit(sample(max_tokens=12))
    assert len(setup.answer(sample("rest", max_tokens=None, stop_eos=True)).sequences[0].tokens_T) <= 11
    with pytest.raises(UserError, match="vocabulary"):
        setup.sampler.submit(sample(prompt=np.array([64], np.int32)))
    with pytest.raises(NotFoundError, match="no weights"):
        setup.sampler.submit(sample(version="nobody's"))


def test_a_prompt_that_fills_the_engines_context_is_scored(kind: str, open_setup: Open) -> None:
    """Engines draw a token after every prompt, so they refuse such a prompt as a whole."""
    setup = open_setup(kind, Fake(context=16))
    setup.publish("v", 0.5)
    setup.answer(sample("up"))  # from here on the engine's own bound is known
    prompt = np.resize(PROMPT, 16)
    full_logprobs = expected_logprobs(setup.fake, prompt.tolist(), 1, 0.5)
    token_logprobs = full_logprobs[np.arange(15), prompt[1:]]
    scoring: dict[str, Any] = {"version": "v", "prompt": prompt, "max_tokens": 1}
    for last_n in (None, 2, 1):
        scored = setup.answer(
            sample(**scoring, n=2, prompt_logprobs=True, prompt_logprobs_last_n=last_n, topk_prompt_logprobs=2)
        )
        first = 1 if last_n is None else 16 - last_n
        assert scored.prompt_logprobs_T is not None and scored.topk_prompt is not None
        np.testing.assert_allclose(scored.prompt_logprobs_T[first:], token_logprobs[first - 1 :], atol=1e-5)
        likeliest = np.argsort(-full_logprobs, axis=1)[first - 1 :, :2]
        np.testing.assert_array_equal(scored.topk_prompt.token_ids_Tk[first:], likeliest)
        assert [(len(sequence.tokens_T), sequence.stop_reason) for sequence in scored.sequences] == [(0, "length")] * 2
    targets = np.where(np.arange(15)[:, None] % 3, np.arange(15)[:, None] + 40, -1)
    dense = setup.answer(sample(**scoring, target_prompt_logprobs=targets)).target_prompt
    assert isinstance(dense, np.ndarray)
    rows = np.arange(15)[:, None]
    np.testing.assert_allclose(dense, np.where(targets < 0, 0.0, full_logprobs[rows, targets]), atol=1e-5)
    for wrong in (sample(prompt=prompt, max_tokens=1), sample(prompt=prompt, max_tokens=2, prompt_logprobs=True)):
        with pytest.raises(UserError, match="16 tokens"):
            setup.sampler.submit(wrong)


def test_targets_beyond_what_vllm_can_tell_are_refused() -> None:
    with pytest.raises(NotSupportedError, match="target_prompt_logprobs"):
        VllmDialect(EOS, 150_000).prompt_scoring(1, 0, (1,), 100)


def weight_of(setup: ExternalSetup, result: SampleResult, weights: Sequence[float]) -> float:
    """Whose logprobs these are."""
    sequence = result.sequences[0]
    tokens = [*PROMPT.tolist(), *sequence.tokens_T.tolist()]
    for weight in weights:
        full_logprobs = expected_logprobs(setup.fake, tokens, len(PROMPT), weight)
        if np.allclose(sequence.logprobs_T, full_logprobs[np.arange(len(full_logprobs)), sequence.tokens_T], atol=1e-5):
            return weight
    raise AssertionError("of none")


def test_versions_never_mix_and_are_never_stale(kind: str, open_setup: Open) -> None:
    setup = open_setup(kind)
    weights = [0.0, 0.1, 0.2, 0.3, 0.4]
    for step in range(1, 5):
        setup.publish(f"v{step}", weights[step])
        setup.publish("inflight", weights[step])
        version_by_request = {f"{step}-v{old}": (f"v{old}", weights[old]) for old in range(1, step + 1)}
        version_by_request |= {f"{step}-in": ("inflight", weights[step]), f"{step}-base": (None, 0.0)}
        outcomes = setup.run(*(sample(name, version) for name, (version, _) in version_by_request.items()))
        for name, (_, weight) in version_by_request.items():
            outcome = outcomes[name]
            assert isinstance(outcome, SampleResult), outcome
            assert weight_of(setup, outcome, weights) == weight, name
    assert len(setup.fake.names_ever) == len(set(setup.fake.names_ever)) == 8


def test_a_version_that_is_replaced_while_a_request_runs_on_it(kind: str, open_setup: Open) -> None:
    setup = open_setup(kind, Fake(pause_s=0.3))
    setup.publish("v", 0.1)
    setup.sampler.submit(sample("old", "v"))
    setup.publish("v", 0.2)
    setup.sampler.submit(sample("new", "v"))
    outcomes = setup.collect()
    for name, weight in (("old", 0.1), ("new", 0.2)):
        outcome = outcomes[name]
        assert isinstance(outcome, SampleResult)
        assert weight_of(setup, outcome, (0.1, 0.2)) == weight


def test_adapters_leave_in_the_order_of_their_use_and_come_back(kind: str, open_setup: Open, tmp_path: Path) -> None:
    setup = open_setup(kind, Fake(most_adapters=2), max_adapters=2)
    for step in range(4):
        setup.publish(f"v{step}", step / 10)
    for version in ("v0", "v1", "v0", "v2", "v3", "v0", "v1"):
        assert weight_of(setup, setup.answer(sample(version, version)), (0, 0.1, 0.2, 0.3)) == int(version[1]) / 10
        assert len(setup.fake.adapters) <= 2
    everything = setup.run(*(sample(f"all-{step}-{i}", f"v{step}") for step in range(4) for i in range(3)))
    assert all(isinstance(outcome, SampleResult) for outcome in everything.values())
    for step in range(4):
        setup.backend.drop_version(f"v{step}")
    until(lambda: not setup.fake.adapters and not any((tmp_path / "adapters").iterdir()))


def test_the_slot_of_an_evicted_adapter_is_free_when_the_engine_has_unloaded_it(open_setup: Open) -> None:
    setup = open_setup("sglang", Fake(most_adapters=2, adapter_pause_s=0.05), max_adapters=2)
    for step in range(6):
        setup.publish(f"v{step}", step / 10)
    outcomes = setup.run(*(sample(f"{step}-{i}", f"v{step}") for i in range(2) for step in range(6)))
    for name, outcome in outcomes.items():
        assert isinstance(outcome, SampleResult), outcome
        assert weight_of(setup, outcome, [step / 10 for step in range(6)]) == int(name[0]) / 10


def test_a_request_that_is_cancelled_while_its_adapter_is_loaded_leaves_no_slot_taken(open_setup: Open) -> None:
    setup = open_setup("sglang", Fake(most_adapters=2, adapter_pause_s=0.1), max_adapters=2)
    for step in range(6):
        setup.publish(f"v{step}", step / 10)
        setup.sampler.submit(sample(f"cancelled-{step}", f"v{step}"))
        load_name = f"v{step}-"
        until(lambda name=load_name: any(body.get("lora_name", "").startswith(name) for _, body in setup.fake.requests))
        setup.sampler.cancel(f"cancelled-{step}")
    for step in range(6):
        outcome = setup.run(sample(f"{step}", f"v{step}"))[f"{step}"]
        assert isinstance(outcome, SampleResult), outcome
        assert weight_of(setup, outcome, [step / 10 for step in range(6)]) == step / 10


def test_an_adapter_that_somebody_unloaded_is_loaded_again(open_setup: Open) -> None:
    setup = open_setup("vllm")
    setup.publish("v", 0.1)
    setup.answer(sample("a", "v"))
    setup.fake.adapters.clear()
    assert weight_of(setup, setup.answer(sample("b", "v")), (0.0, 0.1)) == 0.1


def test_weights_that_cannot_be_loaded_fail_by_name(open_setup: Open, tmp_path: Path) -> None:
    setup = open_setup("vllm")
    setup.publish("v", 0.1)
    capture_version = setup.trainer.capture_version
    setup.trainer.capture_version = lambda version_id: replace(capture_version(version_id), write=lambda path: None)
    outcome = setup.run(sample("r", "v"))["r"]
    assert isinstance(outcome, UserError)
    assert "'v' cannot be sampled from" in str(outcome)


def test_an_engine_that_is_busy_is_asked_again(kind: str, open_setup: Open) -> None:
    setup = open_setup(kind)
    setup.answer(sample("up"))
    setup.fake.busy = 4
    assert len(setup.answer(sample("r")).sequences) == 1
    assert setup.fake.busy == 0


def test_requests_in_an_engine_that_dies_begin_again_with_the_same_answers(kind: str, open_setup: Open) -> None:
    setup = open_setup(kind)
    setup.publish("v", 0.3)
    before = setup.run(sample("a", "v", n=3), sample("b"))
    setup.fake.pause_s = PATIENCE_S
    for request_id, version, n in (("a", "v", 3), ("b", None, 1)):
        setup.sampler.submit(sample(request_id, version, n))
    until(lambda: setup.fake.running == 4)
    setup.fake.die()
    time.sleep(0.1)
    setup.fake.pause_s, setup.fake.dead = 0.0, False
    after = setup.collect()
    for request_id in "ab":
        old, new = before[request_id], after[request_id]
        assert isinstance(old, SampleResult) and isinstance(new, SampleResult), new
        for sequence, other in zip(old.sequences, new.sequences, strict=True):
            assert sequence.tokens_T.tolist() == other.tokens_T.tolist()


@pytest.fixture
def reviving() -> Iterator[Callable[[Fake], None]]:
    stopping = threading.Event()

    def watch(fake: Fake) -> None:
        while not stopping.wait(0.05):
            fake.dead = False

    threads: list[threading.Thread] = []

    def start(fake: Fake) -> None:
        threads.append(threading.Thread(target=watch, args=(fake,)))
        threads[-1].start()

    yield start
    stopping.set()
    for thread in threads:
        thread.join()


def test_a_request_that_ends_the_engine_three_times_fails_by_name_and_alone(
    kind: str, open_setup: Open, reviving: Callable[[Fake], None]
) -> None:
    setup = open_setup(kind, Fake(pause_s=0.05))
    setup.answer(sample("up"))
    reviving(setup.fake)
    deadly = sample("deadly", prompt=np.array([DEADLY, 4], np.int32))
    outcomes = setup.run(deadly, *(sample(f"r{i}") for i in range(4)))
    failed = outcomes.pop("deadly")
    assert isinstance(failed, EngineFailedError)
    assert "failed 3 times" in str(failed)
    assert setup.fake.deaths == 3
    assert all(isinstance(outcome, SampleResult) for outcome in outcomes.values())


def test_a_cancelled_request_leaves_the_engine(kind: str, open_setup: Open) -> None:
    setup = open_setup(kind)
    setup.answer(sample("up"))  # the engine's own first questions run no more
    setup.sampler.submit(sample("long", prompt=np.array([NEVER_ENDING, 4], np.int32)))
    until(lambda: setup.fake.running == 1)
    assert setup.sampler.cancel("long")
    assert not setup.sampler.has_work
    until(lambda: setup.fake.closed == 1 and setup.fake.running == 0)
    assert not setup.sampler.cancel("long")
    if kind == "sglang":
        until(lambda: "/abort_request" in setup.fake.paths())
    assert setup.sampler.step() == []


def streamed(setup: ExternalSetup, request: Sample) -> tuple[SampleResult, list[Partial]]:
    setup.sampler.submit(request)
    partials: list[Partial] = []
    result: Outcome | None = None
    deadline = time.monotonic() + PATIENCE_S
    while result is None:
        assert time.monotonic() < deadline
        settled = setup.sampler.step()
        partials += setup.sampler.partials()
        result = settled[0][1] if settled else None
    partials += setup.sampler.partials()
    assert isinstance(result, SampleResult), result
    return result, partials


STREAMS = {"vllm": {}, "sglang": {}, "incremental": {"incremental": True}, "older": {"version": "0.5.9"}}


@pytest.mark.parametrize("cut_after", [0, 1, 2])
@pytest.mark.parametrize("stream", STREAMS)
def test_a_stream_tells_every_token_once_with_its_logprobs(stream: str, cut_after: int, open_setup: Open) -> None:
    """Also when the connection ends in the middle, after which the answer is drawn again."""
    setup = open_setup("vllm" if stream == "vllm" else "sglang", Fake(**STREAMS[stream]))
    setup.publish("v", 0.3)
    options = {"n": 2, "max_tokens": 5, "temperature": 0.7, "topk_sample_logprobs": 2, "stop_eos": stream != "vllm"}
    plain_result = setup.answer(sample("whole", "v", **options))
    setup.fake.cut_after = cut_after
    result, partials = streamed(setup, sample("streamed", "v", stream=True, **options))
    streams = [body for _, body in setup.fake.requests if body.get("stream")]
    assert len(streams) == (4 if cut_after else 2) and setup.fake.cut_after == 0
    for index, (sequence, plain) in enumerate(zip(result.sequences, plain_result.sequences, strict=True)):
        own_partials = [partial for partial in partials if partial.index == index]
        assert [token for partial in own_partials for token in partial.tokens] == sequence.tokens_T.tolist()
        assert sequence.tokens_T.tolist() == plain.tokens_T.tolist() and sequence.stop_reason == plain.stop_reason
        starts = np.cumsum([0, *(len(partial.tokens) for partial in own_partials)])
        assert [partial.start for partial in own_partials] == starts[:-1].tolist()
        assert len(own_partials) == (3 if stream != "vllm" and len(plain.tokens_T) == 5 else len(own_partials)) > 1
        logprobs = [value for partial in own_partials for value in partial.logprobs]
        np.testing.assert_array_equal(sequence.logprobs_T, np.array(logprobs, np.float32))
        np.testing.assert_array_equal(sequence.logprobs_T, plain.logprobs_T)
        assert sequence.topk is not None
        tops = [ids for partial in own_partials for ids, _ in partial.topk]
        assert tops == [tuple(row) for row in sequence.topk.token_ids_Tk.tolist()]


def test_sglang_without_seeds_does_not_stream(open_setup: Open) -> None:
    setup = open_setup("sglang", Fake(deterministic=False))
    _, partials = streamed(setup, sample(seed=None, stream=True))
    assert partials == [] and not any(body.get("stream") for _, body in setup.fake.requests)


@pytest.mark.parametrize(
    ("version", "modules", "is_taken"),
    [("0.5.18", ("all",), True), ("0.5.10.post1", ("q_proj", "lm_head"), True), ("0.5.18", ("q_proj",), False),
     ("0.5.9", ("all",), False), ("", ("all",), False), ("0.5.23 torch_native", ("all",), False)],
)  # fmt: skip
def test_sglang_takes_unembeddings_where_it_can(
    version: str, modules: tuple[str, ...], is_taken: bool, open_setup: Open
) -> None:
    number, _, lora_backend = version.partition(" ")
    setup = open_setup("sglang", Fake(version=number, lora_target_modules=modules, lora_backend=lora_backend))
    setup.publish("v", 0.4)
    capture_version = setup.trainer.capture_version

    def capture(version_id: str) -> Capture:
        def write(directory: Path) -> None:
            capture_version(version_id).write(directory)
            matrix = {"base_model.model.lm_head.lora_A.weight": np.zeros((1, 1), np.float32)}
            save_file(matrix, directory / "adapter_model.safetensors")

        return Capture(1, write)

    setup.trainer.capture_version = capture
    outcome = setup.run(sample("r", "v", prompt_logprobs=True, topk_prompt_logprobs=2))["r"]
    if not is_taken:
        assert isinstance(outcome, UserError) and "train_unembed=False" in str(outcome)
        assert not setup.fake.names_ever
        return
    assert isinstance(outcome, SampleResult), outcome
    full_logprobs = expected_logprobs(setup.fake, PROMPT.tolist(), 1, 0.4)
    assert outcome.prompt_logprobs_T is not None and outcome.topk_prompt is not None
    np.testing.assert_allclose(outcome.prompt_logprobs_T[1:], full_logprobs[np.arange(4), PROMPT[1:]], atol=1e-5)
    np.testing.assert_array_equal(outcome.topk_prompt.token_ids_Tk[1:], np.argsort(-full_logprobs, axis=1)[:, :2])
    prompts = [body for path, body in setup.fake.requests if path == "/generate" and body["lora_path"]]
    assert all(body["logprob_start_len"] == -1 for body in prompts), "scored token by token"


def test_prompts_of_vllm_are_scored_while_nothing_else_runs(open_setup: Open) -> None:
    setup = open_setup("vllm", Fake(pause_s=0.02))
    requests = [sample(f"s{i}") for i in range(6)] + [sample(f"p{i}", prompt_logprobs=True) for i in range(2)]
    running_counts: list[int] = []
    answer = external_engines.vllm_answer

    def answer_and_count(engine: Fake, body: external_engines.Json) -> external_engines.Json:
        if body.get("prompt_logprobs") is not None:
            running_counts.append(engine.running)
        return answer(engine, body)

    external_engines.vllm_answer = answer_and_count
    try:
        outcomes = setup.run(*requests)
    finally:
        external_engines.vllm_answer = answer
    assert all(isinstance(outcome, SampleResult) for outcome in outcomes.values())
    assert running_counts == [1] * 3  # the first is the sampler's own question
    assert setup.fake.most_running > 1


def test_a_trainer_with_a_device_of_its_own_does_not_wait(open_setup: Open) -> None:
    setup = open_setup("vllm")
    setup.answer(sample("up"))
    setup.fake.pause_s = PATIENCE_S
    setup.sampler.submit(sample("running"))
    until(lambda: setup.fake.running == 1)
    setup.backend.create_model("n", LoraSpec(rank=8))
    setup.backend.optim_step([OptimStep("o", "n", AdamParams())])
    assert setup.fake.running == 1
    setup.fake.pause_s = 0.0
    setup.collect()
    assert "/sleep?level=1" not in setup.fake.paths()


HEADERS = {"authorization": "Bearer secret", "x-tenant": "blue"}


def test_an_engine_behind_a_gateway_is_given_its_credentials(kind: str, open_setup: Open) -> None:
    fake = Fake(headers=HEADERS)
    setup = open_setup(kind, fake, access=EngineAccess({"Authorization": "Bearer secret", "X-Tenant": "blue"}))
    setup.publish("v", 0.3)
    setup.answer(sample("r", "v"))
    assert fake.names_ever and not fake.refused
    assert "secret" not in repr(EngineAccess(HEADERS))


def test_credentials_that_an_engine_refuses_fail_requests_by_name(kind: str, open_setup: Open) -> None:
    fake = Fake(headers=HEADERS)
    setup = open_setup(kind, fake, access=EngineAccess({"Authorization": "Bearer wrong"}))
    outcome = setup.run(sample("r"))["r"]
    assert isinstance(outcome, SettingsError) and "sampler_api_key" in str(outcome) and fake.refused
    fake.headers = {}  # as if the gateway knew the key now
    deadline = time.monotonic() + PATIENCE_S
    while not isinstance(setup.run(sample("s"))["s"], SampleResult):
        assert time.monotonic() < deadline


@pytest.mark.extended
def test_an_engine_that_sends_nothing_for_too_long_has_failed_the_request(kind: str, open_setup: Open) -> None:
    setup = open_setup(kind, Fake(), access=EngineAccess(timeout_s=1.0))
    outcome = setup.run(sample("r", prompt=np.array([NEVER_ENDING, 4], np.int32)))["r"]
    assert isinstance(outcome, EngineFailedError) and "sent nothing for 1 s (sampler_timeout_s)" in str(outcome)
    setup.answer(sample("s"))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of 127.0.0.1 that is its own authority, and its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "engine")])
    now, day = datetime.now(UTC), timedelta(days=1)
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - day).not_valid_after(now + day)
    signed = builder.add_extension(alternative, critical=False).sign(key, hashes.SHA256())
    plain = serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    path = tmp_path_factory.mktemp("tls") / "engine.pem"
    text = signed.public_bytes(serialization.Encoding.PEM)
    path.write_bytes(text + key.private_bytes(serialization.Encoding.PEM, *plain))
    return path


def test_a_certificate_is_checked_as_the_settings_say(certificate: Path, tmp_path: Path) -> None:
    with external_engines.running("vllm", Fake(), certificate) as fake:
        for index, verify in enumerate((str(certificate), False)):
            setup = ExternalSetup("vllm", fake, tmp_path / str(index), access=EngineAccess(verify=verify))
            try:
                setup.answer(sample(f"r{index}"))
            finally:
                setup.sampler.close()
        setup = ExternalSetup("vllm", fake, tmp_path / "refused")
        try:
            setup.sampler.submit(sample("r"))
            connection = setup.sampler._connection
            assert not asyncio.run_coroutine_threadsafe(connection.is_healthy(), setup.sampler._loop).result()
            assert not connection.is_up(connection.era)
        finally:
            setup.sampler.close()
    with pytest.raises(SettingsError, match="which is not a file of certificates"):
        EngineAccess(verify="/no/such/file").client("https://127.0.0.1")


@pytest.mark.extended
def test_an_engine_without_shared_files_pulls_adapters_over_http(kind: str, open_setup: Open) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    fake = Fake(endpoint=url)
    setup = open_setup(kind, fake, adapters_url=url)
    for version, weight in (("v", 0.3), ("w", 0.7)):
        setup.publish(version, weight)
        sequence = setup.answer(sample(version, version)).sequences[0]
        tokens = [*PROMPT.tolist(), *sequence.tokens_T.tolist()]
        token_logprobs = expected_logprobs(fake, tokens, len(PROMPT), weight)[
            np.arange(len(sequence.tokens_T)), sequence.tokens_T
        ]
        np.testing.assert_allclose(sequence.logprobs_T, token_logprobs, atol=1e-4)
    assert len(set(fake.downloads)) == 2
    for path in (f"api/models/{fake.downloads[0]}/revision/main", "api/models/adapters/x/revision/main", ""):
        assert httpx.get(f"{url}/{path}").status_code == 404  # a link ends with its load, and there is no list
    with pytest.raises(SettingsError, match=r"sampler_adapters_url .* cannot be listened on"):
        AdapterLinks("127.0.0.1", url)


def test_versions_as_files_need_no_trainer(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "fake_adapter.json").write_text('{"weight": 0.4, "step": null}')
    files = VersionFiles(tmp_path / "versions")
    with external_engines.running("vllm", Fake()) as fake:
        engine = RemoteEngine(tmp_path / "adapters", tmp_path / "log", url=fake.url)
        holder = open_remote_sampler(files, "vllm", engine, SHAPE, EOS)
        sampler = cast(ExternalSampler, holder.sampler)
        try:
            holder.load_version("v", saved)
            (saved / "fake_adapter.json").unlink()  # whose files they are may delete them
            assert holder.has_version("v")
            sampler.submit(sample("r", "v"))
            holder.drop_version("v")
            assert not holder.has_version("v")
            settled: Sequence[tuple[str, Outcome]] = []
            while not settled:
                settled = sampler.step()
            assert isinstance(settled[0][1], SampleResult)
            assert list(fake.names_ever)
        finally:
            sampler.close()


def test_a_child_is_started_watched_and_started_again(tmp_path: Path) -> None:
    fake = Fake()
    setup = ExternalSetup("vllm", fake, tmp_path, url="", python=interpreter(tmp_path), options=("--max-loras", "2"))
    try:
        setup.publish("v", 0.2)
        first = setup.answer(sample("a", "v"))
        outcomes = setup.run(sample("deadly", prompt=np.array([DEADLY, 4], np.int32)), sample("b", "v"))
        assert isinstance(outcomes["deadly"], EngineFailedError)
        again = outcomes["b"]
        assert isinstance(again, SampleResult)
        assert again.sequences[0].tokens_T.tolist() == first.sequences[0].tokens_T.tolist()
    finally:
        setup.sampler.close()


def test_an_engine_that_never_comes_up_fails_requests_by_name(tmp_path: Path) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\nexit 7\n")
    failing.chmod(0o755)
    setup = ExternalSetup("vllm", Fake(), tmp_path, url="", python=str(failing))
    try:
        outcome = setup.run(sample("r"))["r"]
        assert isinstance(outcome, EngineFailedError)
        assert str(tmp_path / "engine.log") in str(outcome)
    finally:
        setup.sampler.close()


def test_settings_that_cannot_be_had_are_refused(tmp_path: Path) -> None:
    engine = RemoteEngine(tmp_path / "adapters", tmp_path / "log", python="/no/such/python")
    with pytest.raises(SettingsError, match="sampler_python"):
        with_remote_sampler(FakeBackend(SHAPE), "vllm", engine, SHAPE, EOS)
    with pytest.raises(SettingsError, match="choose 'local'"):
        with_remote_sampler(FakeBackend(SHAPE), "else", engine, SHAPE, EOS)
    with pytest.raises(SettingsError, match="sampler_options"):
        split_options('--one "two')


def test_options_given_by_hand_come_before_ours() -> None:
    dialect = VllmDialect(EOS, 64)
    command = dialect.command("python", "/m", 1, ("--max-loras", "3"), shares_device=True)
    assert command.count("--max-loras") == 1
    assert "--enable-sleep-mode" in command
    assert dialect.scores_alone
    dialect.command("python", "/m", 1, ("--lora-target-modules", "q_proj", "v_proj"), shares_device=False)
    assert not dialect.scores_alone


def test_what_was_started_ends_with_whoever_started_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    command = [sys.executable, process_guard.__file__, sys.executable, "-c", script]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    until(lambda: note.exists() and bool(note.read_text()))
    pid = int(note.read_text())
    assert process.stdin is not None
    process.stdin.close()  # as the kernel does for a process that was killed
    assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.extended
def test_a_training_loop_with_an_external_sampler(tmp_path: Path) -> None:
    """The real SDK: each sampling client answers with its own version, under the base model's sampler, which is
    behind a gateway and sees no file of the engine.
    """
    url = f"http://127.0.0.1:{free_port()}"
    fake = Fake(vocab_size=512, context=2048, headers=HEADERS, endpoint=url)
    with external_engines.running("vllm", fake):
        settings = {"SAMPLER": "vllm", "SAMPLER_URL": fake.url, "SAMPLER_ADAPTERS_URL": url}
        settings |= {"SAMPLER_API_KEY": "secret", "SAMPLER_HEADERS": '{"X-Tenant": "blue"}'}
        with serving(tmp_path / "data", "--backend", "fake", settings=settings) as server:
            with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
                client = service.create_lora_training_client(nano.MODEL_NAME, rank=8).result()
                datum = types.Datum(
                    model_input=types.ModelInput.from_ints([4, 5, 6]),
                    loss_fn_inputs={"target_tokens": np.array([5, 6, 7]), "weights": np.ones(3, np.float32)},
                )
                clients = []
                for step in range(1, 4):
                    client.forward_backward([datum], "cross_entropy").result()
                    client.optim_step(types.AdamParams(learning_rate=0.1)).result()
                    clients.append((step, client.save_weights_and_get_sampling_client().result()))
                params = types.SamplingParams(max_tokens=4, temperature=0.7, seed=3)
                prompt = types.ModelInput.from_ints([5, 9, 20])
                for step, sampler in [*clients, *clients]:
                    sequence = sampler.sample(prompt, 1, params).result().sequences[0]
                    tokens = [5, 9, 20, *sequence.tokens]
                    full_logprobs = expected_logprobs(fake, tokens, 3, -0.1 * step, 0.7)  # a step of the fake backend
                    token_logprobs = full_logprobs[np.arange(len(full_logprobs)), sequence.tokens]
                    np.testing.assert_allclose(sequence.logprobs or [], token_logprobs, atol=1e-4)
                refused = types.SamplingParams(max_tokens=4, temperature=0.7, top_p=0.5)
                with pytest.raises(tinker.RequestFailedError, match="vLLM has no logprobs"):
                    clients[0][1].sample(prompt, 1, refused).result()
    assert len(set(fake.downloads)) >= 3 and not fake.refused
