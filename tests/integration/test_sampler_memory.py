"""If memory runs out in a decode step, fewer samples run at once, results do not change, and only samples that cannot
fit fail."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from support import tiny_models
from support.engine_bench import BASE, Bench
from support.local_sampling import assert_same, finish, make_adapter, make_prompt, make_sample
from tinsmith.backends.torch.adapters import Adapter
from tinsmith.backends.torch.model import BaseModel
from tinsmith.errors import UserError
from tinsmith.samplers.local import engine
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions
from tinsmith.samplers.local.scheduler import RELAXED_AFTER
from tinsmith.store.sampling_sessions import NewSamplingSession
from tinsmith.types import Sample, SampleResult, SamplingParams

torch.set_num_threads(1)

HOT = SamplingParams(max_tokens=9, temperature=1.0, stop_eos=False, seed=7)
ERRORS: tuple[Callable[[], Exception], ...] = (
    MemoryError,
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return BaseModel.load(tiny_models.make(tmp_path_factory.mktemp("qwen3"), "qwen3"), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def versions(base: BaseModel) -> dict[str, Adapter]:
    return {f"v{seed}": make_adapter(base, seed) for seed in range(2)}


def samples() -> list[Sample]:
    scored = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_alt_tokens_k": 2}
    long = make_prompt(60)
    return [
        make_sample("plain", make_prompt(5), HOT),
        make_sample("scored", make_prompt(40, 1), HOT, version_id="v0", **scored),
        make_sample("forked", make_prompt(21, 2), HOT, version_id="v1", num_samples=3, topk_sample_logprobs=2),
        make_sample("long", long, replace(HOT, seed=3), version_id="v0"),
        make_sample("beginning", np.concatenate([long[:48], make_prompt(7, 3)]), HOT, version_id="v0"),
        make_sample("short", make_prompt(2, 4), replace(HOT, max_tokens=25), version_id="v1"),
    ]


class Shortage:
    """Counts calls of a sampler's methods; `num` of them from `first` on raise an out-of-memory error."""

    def __init__(self, sampler: LocalSampler, patch: pytest.MonkeyPatch, error: Callable[[], Exception]) -> None:
        self.first = self.num = 0
        self.calls = 0
        self._error = error
        for holder, name in (
            (sampler._cache, "resize"),
            (sampler._cache, "prepare"),
            (sampler._cache, "write"),
            (engine, "score_prompt"),
            (engine, "choose"),
        ):
            patch.setattr(holder, name, self._short(getattr(holder, name)))

    def _short(self, call: Callable[..., object]) -> Callable[..., object]:
        def short(*args: object, **kwargs: object) -> object:
            call_index, self.calls = self.calls, self.calls + 1
            fails = self.first <= call_index < self.first + self.num
            if fails and call_index % 2:
                raise self._error()
            result = call(*args, **kwargs)
            if fails:  # in the middle of the step, after unrecorded work
                raise self._error()
            return result

        return short


def outcomes(sampler: LocalSampler) -> dict[str, SampleResult]:
    for sample in samples():
        sampler.submit(sample)
    return finish(sampler)


Make = Callable[[BaseModel, Mapping[str, Adapter]], LocalSampler]


def small(*, deterministic: bool = False, reads_late: bool = False) -> Make:
    options = SamplerOptions(block_size=4, max_tokens_per_step=64, deterministic=deterministic, reads_late=reads_late)
    return lambda base, versions: LocalSampler(base, versions, options=options)


@pytest.mark.extended
@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize(("deterministic", "reads_late"), [(False, False), (False, True), (True, False)])
def test_results_are_those_of_an_undisturbed_run_wherever_memory_runs_out(
    base: BaseModel, versions: dict[str, Adapter], deterministic: bool, reads_late: bool, num: int
) -> None:
    make = small(deterministic=deterministic, reads_late=reads_late)
    with pytest.MonkeyPatch.context() as patch:
        sampler = make(base, versions)
        counted = Shortage(sampler, patch, MemoryError)
        expected = outcomes(sampler)
    assert counted.calls > 50
    for index, first in enumerate(range(0, counted.calls, max(1, counted.calls // 12))):
        with pytest.MonkeyPatch.context() as patch:
            sampler = make(base, versions)
            shortage = Shortage(sampler, patch, ERRORS[index % len(ERRORS)])
            shortage.first, shortage.num = first, num
            results = outcomes(sampler)
        assert results.keys() == expected.keys()
        for name, result in results.items():
            assert isinstance(result, SampleResult), (first, name, result)
            assert_same(result, expected[name], atol=0.0 if deterministic else 2e-5)
            if deterministic:
                for ours, theirs in zip(result.sequences, expected[name].sequences, strict=True):
                    assert ours.logprobs_T.tobytes() == theirs.logprobs_T.tobytes(), (first, name)


def test_the_youngest_half_waits_and_the_others_go_on(
    base: BaseModel, versions: dict[str, Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = small()(base, versions)
    for index in range(8):
        sampler.submit(make_sample(str(index), make_prompt(4, index), replace(HOT, max_tokens=40)))
    while len(sampler._batcher.running) < 8:
        sampler.step()
    shortage = Shortage(sampler, monkeypatch, MemoryError)
    shortage.num = 1
    sampler.step()
    assert [sequence.request.sample.request_id for sequence in sampler._batcher.running] == ["0", "1", "2", "3"]
    for _ in range(RELAXED_AFTER + 1):
        sampler.step()
    assert len(sampler._batcher.running) == 8, "they come back once memory has been enough for a while"
    assert finish(sampler).keys() == {str(index) for index in range(8)}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("lacking", ["rows", "cache"])
def test_only_the_request_that_does_not_fit_alone_fails(
    base: BaseModel,
    versions: dict[str, Adapter],
    deterministic: bool,
    lacking: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler = small(deterministic=deterministic)(base, versions)
    if lacking == "cache":
        resize = sampler._cache.resize

        def refuse_large_cache(num_blocks: int) -> None:
            if num_blocks > 20:
                raise MemoryError("no more blocks")
            resize(num_blocks)

        monkeypatch.setattr(sampler._cache, "resize", refuse_large_cache)
    else:
        prepare = sampler._cache.prepare

        def narrow(copies: list[tuple[int, int]], fresh: list[int]) -> None:
            if any(sequence.request.num_prompt == 250 for sequence in sampler._batcher.running):
                raise MemoryError("no more rows")
            prepare(copies, fresh)

        monkeypatch.setattr(sampler._cache, "prepare", narrow)
    expected = {name: alone_on(base, versions, name, deterministic=deterministic) for name in ("short", "plain")}
    large = make_sample("large", make_prompt(250), replace(HOT, max_tokens=4))
    sampler.submit(next(sample for sample in samples() if sample.request_id == "short"))
    sampler.submit(large)
    sampler.submit(next(sample for sample in samples() if sample.request_id == "plain"))
    results = finish(sampler)
    error = results.pop("large")
    assert isinstance(error, UserError)
    assert "a prompt of 250 tokens and up to 4 new ones" in str(error) and "shorten the prompt" in str(error)
    for name, result in results.items():
        assert_same(result, expected[name])


def alone_on(base: BaseModel, versions: Mapping[str, Adapter], name: str, *, deterministic: bool) -> SampleResult:
    sampler = small(deterministic=deterministic)(base, versions)
    sampler.submit(next(sample for sample in samples() if sample.request_id == name))
    return finish(sampler)[name]


# Samplers without a way to reduce their memory.


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="tn-") as sockets:
        new_bench = Bench(tmp_path, Path(sockets))
        yield new_bench
        new_bench.close()


def test_an_engine_hands_fewer_samples_to_a_sampler_that_has_no_memory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [bench.sample(one_session(bench, f"t{index}"), 0, tenant=f"t{index}") for index in range(6)]
    sampler = bench.backend.sampler
    step, waiting_counts = sampler.step, []

    def short() -> object:
        waiting_counts.append(len(sampler._waiting))
        if len(sampler._waiting) > 2 or any(sample.request_id == names[3] for sample, _ in sampler._waiting):
            raise MemoryError("cpu has 0.1 GiB free")
        return step()

    monkeypatch.setattr(sampler, "step", short)
    bench.run_until_idle()
    for index, name in enumerate(names):
        outcome = bench.outcome(name, tenant=f"t{index}")
        assert outcome is not None, name
        if index == 3:
            assert outcome.category == "user"
            assert "a prompt of 2 tokens, does not fit into the engine's memory, even alone" in str(outcome.error)
        else:
            assert outcome.error is None
    assert waiting_counts[:2] == [6, 3]


def one_session(bench: Bench, tenant: str) -> str:
    name = f"{tenant}:sample:0"
    bench.samplers.create(NewSamplingSession(name, tenant, tenant, BASE, version_id=None))
    return name
