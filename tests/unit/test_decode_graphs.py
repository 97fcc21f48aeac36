"""Decode steps that are captured give what the layers give row by row, whoever comes, goes or is published, and rows
that pad do nothing to anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import structlog
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MistralConfig

from support import tiny_models
from support.local_sampling import HOT, alone, assert_same, finish, make_adapter, make_prompt, make_sample, run
from support.properties import examples
from support.recorded_kernels import Recordings
from tinsmith.backends.torch import TorchBackend, grouped
from tinsmith.backends.torch import slots as slots_module
from tinsmith.backends.torch.adapters import Adapter
from tinsmith.backends.torch.attention import PackedCausal
from tinsmith.backends.torch.lora_ops import Routing
from tinsmith.backends.torch.memory import BASE, DECODING, MemoryManager
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.slots import AdapterSlots, SegmentWork
from tinsmith.engine.__main__ import _options
from tinsmith.errors import SettingsError
from tinsmith.samplers.local import cuda_graphs as graphs_module
from tinsmith.samplers.local import engine as local_module
from tinsmith.samplers.local.cuda_graphs import LEAST_CONTEXT, ROWS, DecodeGraphs, _context_for, plain
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions
from tinsmith.settings import load
from tinsmith.types import Sample, SamplingParams
from unit.test_decoder import adapter as any_adapter
from unit.test_decoder import other

LONG = SamplingParams(max_tokens=14, temperature=1.0, stop_eos=False, seed=3)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BaseModel]:
    directory = tmp_path_factory.mktemp("graphs")
    shapes = {arch: tiny_models.make(directory / arch, arch) for arch in ("qwen3", "llama")}
    config = MistralConfig(**tiny_models._COMMON, sliding_window=6, tie_word_embeddings=False)
    shapes["mistral"] = other(config, directory / "mistral")
    return {arch: BaseModel.load(shape, device="cpu", dtype="float32") for arch, shape in shapes.items()}


@pytest.fixture
def base(bases: dict[str, BaseModel]) -> BaseModel:
    return bases["llama"]


def recorded(
    base: BaseModel, versions: dict[str, Adapter] | None = None, **options: int
) -> tuple[LocalSampler, Recordings]:
    recordings = Recordings()
    sampler = LocalSampler(base, versions or {}, options=SamplerOptions(capture=recordings, **options))
    assert sampler._graphs is not None
    return sampler, recordings


def crowd(seed: int, num: int, versions: list[str | None]) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(num):
        prompt = make_prompt(int(rng.integers(1, 150)), seed=seed + i)
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 40)), temperature=float(rng.choice([0.0, 0.8, 1.0])), stop_eos=False, seed=i
        )
        version = versions[int(rng.integers(len(versions)))]
        samples.append(make_sample(f"s{i}", prompt, params, version_id=version, num_samples=int(rng.integers(1, 4))))
    return samples


@pytest.mark.parametrize("arch", ["qwen3", "llama", "mistral"])
def test_answers_of_graphs_are_those_of_each_alone(bases: dict[str, BaseModel], arch: str) -> None:
    base = bases[arch]
    versions = {
        "a": make_adapter(base, 1, rank=4),
        "b": make_adapter(base, 2, rank=16),
        "c": make_adapter(base, 3, rank=5, train_unembed=False),
    }
    sampler, recordings = recorded(base, versions, max_tokens_per_step=64)
    samples = crowd(5, 9, [None, *versions])
    answers = run(sampler, *samples)
    for sample in samples:
        assert_same(answers[sample.request_id], alone(base, sample, versions))
    assert recordings.replays > 3 * recordings.captures


@examples(5)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 140), st.integers(0, 3)), min_size=1, max_size=9),
    seed=st.integers(0, 999),
)
def test_whoever_comes_and_goes(arrivals: list[tuple[int, int, int]], seed: int, bases: dict[str, BaseModel]) -> None:
    base = bases["llama"]
    versions = {str(i): make_adapter(base, i, rank=2 + 3 * i) for i in range(3)}
    sampler, _ = recorded(base, versions)
    samples, answers = [], {}
    for number, (steps, length, version) in enumerate(arrivals):
        for _ in range(steps):
            answers |= dict(sampler.step())
        prompt = make_prompt(length, seed + number)
        version_id = str(version) if version < 3 else None
        samples.append(make_sample(f"s{number}", prompt, LONG, version_id=version_id))
        sampler.submit(samples[-1])
    answers |= finish(sampler)
    for sample in samples:
        assert_same(answers[sample.request_id], alone(base, sample, versions))


def test_a_version_that_is_published_needs_no_capture(base: BaseModel) -> None:
    versions = {"a": make_adapter(base, 1), "b": make_adapter(base, 2)}
    sampler, recordings = recorded(base, versions)
    samples = [make_sample(f"s{i}", make_prompt(20, i), LONG, version_id="ab"[i % 2]) for i in range(4)]
    run(sampler, *samples)
    before = recordings.captures
    for number in range(12):  # more than there are slots at first
        versions["ab"[number % 2]] = make_adapter(base, 10 + number)
        answers = run(sampler, *samples)
        newest = samples[number % 2]
        assert_same(answers[newest.request_id], alone(base, newest, versions))
    assert recordings.captures == before


def test_an_adapter_whose_weights_changed_is_read_again(base: BaseModel) -> None:
    changing = make_adapter(base, 1)
    sampler, recordings = recorded(base, {"a": changing})
    sample = make_sample("s", make_prompt(9), LONG, version_id="a")
    first = run(sampler, sample)["s"]
    changing.flat_P.mul_(-2.0)
    changing.refresh()
    sampler._batcher.pool.forget(sampler._weights["a"].number)  # what was cached is of the old weights
    second = run(sampler, sample)["s"]
    assert first.sequences[0].tokens_T.tolist() != second.sequences[0].tokens_T.tolist()
    assert_same(second, alone(base, sample, {"a": changing}))
    assert recordings.captures == 1


def test_slots_grow_when_more_adapters_meet_and_answers_stay(base: BaseModel) -> None:
    versions = {str(i): make_adapter(base, i) for i in range(20)}
    sampler, recordings = recorded(base, versions)
    few = [make_sample(f"s{i}", make_prompt(5, i), LONG, version_id=str(i)) for i in range(3)]
    run(sampler, *few)
    many = [make_sample(f"m{i}", make_prompt(6, i), LONG, version_id=str(i)) for i in range(20)]
    answers = run(sampler, *many)
    for sample in many:
        assert_same(answers[sample.request_id], alone(base, sample, versions))
    assert sampler._graphs is not None and sampler._graphs._slots.of(8).num_slots == 32
    assert recordings.captures == len({_rows(3), _rows(20)})


def _rows(num: int) -> int:
    return next(size for size in ROWS if size >= num)


def test_more_adapters_than_slots_go_another_way(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {str(i): make_adapter(base, i) for i in range(6)}
    slot_bytes = AdapterSlots(_decoder(base).linears, 8, 2**30).slot_bytes
    _decoder(base).slots.drop()
    monkeypatch.setattr(graphs_module, "SLOTS_BYTES", 4 * slot_bytes)
    sampler, recordings = recorded(base, versions)
    samples = [make_sample(f"s{i}", make_prompt(6, i), LONG, version_id=str(i)) for i in range(6)]
    answers = run(sampler, *samples)
    assert not recordings.captures
    answers |= run(sampler, *[make_sample(f"t{i}", make_prompt(7, i), LONG, version_id=str(i)) for i in range(3)])
    assert recordings.captures == 1
    for sample in samples:
        assert_same(answers[sample.request_id], alone(base, sample, versions))


def _decoder(base: BaseModel) -> graphs_module.Decoder:
    alone(base, make_sample("first", make_prompt(3)))
    assert base.written_out is not None
    return base.written_out


@contextmanager
def poisoned_token(base: BaseModel, token: int) -> Iterator[None]:
    weight = base.model.get_input_embeddings().weight
    before = weight[token].clone()
    with torch.no_grad():
        weight[token] = float("nan")
    yield
    with torch.no_grad():
        weight[token] = before


def test_rows_that_pad_touch_nothing_whatever_they_compute(base: BaseModel) -> None:
    versions = {"a": make_adapter(base, 1)}
    prompts = [make_prompt(20 + i, i) % 255 + 1 for i in range(5)]
    greedy = SamplingParams(max_tokens=20, temperature=0.0, stop_eos=False)
    samples = [
        make_sample(f"s{i}", prompt.astype(np.int32), greedy, version_id="a" if i % 2 else None)
        for i, prompt in enumerate(prompts)
    ]
    expected = [alone(base, sample, versions) for sample in samples]
    assert all(0 not in answer.sequences[0].tokens_T for answer in expected), "choose other prompts"
    sampler, recordings = recorded(base, versions)
    with poisoned_token(base, 0):  # which is what rows that pad are given: their every number is NaN
        answers = run(sampler, *samples)
    for sample, answer in zip(samples, expected, strict=True):
        assert_same(answers[sample.request_id], answer)
    assert recordings.replays
    for store in sampler._cache._stores.values():
        assert not store[:, 0].any(), "the null block is zero"
        assert store.isfinite().all()


def test_weights_that_are_not_finite_stay_with_their_rows(base: BaseModel) -> None:
    sick = make_adapter(base, 1)
    sick.flat_P.fill_(float("nan"))
    sick.refresh()
    versions = {"sound": make_adapter(base, 2), "sick": make_adapter(base, 3)}
    sampler, recordings = recorded(base, versions)
    samples = [
        make_sample(f"s{i}", make_prompt(10, i), LONG, version_id=("sound", "sick", None)[i % 3]) for i in range(6)
    ]
    for sample in samples:
        sampler.submit(sample)
    for _ in range(4):
        sampler.step()
    versions["sick"].flat_P.copy_(sick.flat_P)  # in the middle of decoding
    versions["sick"].refresh()
    answers = finish(sampler)
    for i, sample in enumerate(samples):
        if i % 3 == 1:
            assert "not finite" in str(answers[sample.request_id])
        else:
            assert_same(answers[sample.request_id], alone(base, sample, versions))
    assert recordings.replays > 10


def test_when_the_cache_moves_steps_are_captured_again(base: BaseModel) -> None:
    sampler, recordings = recorded(base)
    first = make_sample("first", make_prompt(20), LONG)
    assert_same(run(sampler, first)["first"], alone(base, first))
    one = SamplingParams(max_tokens=1, stop_eos=False, seed=1)  # nothing is decoded, and no other size captured
    long = [make_sample(f"s{i}", make_prompt(150, i), one) for i in range(8)]
    generation = sampler._cache.generation
    answers = run(sampler, *long)
    assert sampler._cache.generation > generation, "the cache grew"
    before = recordings.captures
    again = make_sample("again", make_prompt(21), LONG)
    assert_same(run(sampler, again)["again"], alone(base, again))
    assert recordings.captures == before + 1
    for sample in long:
        assert_same(answers[sample.request_id], alone(base, sample))


def test_a_capture_that_fails_is_told_once_and_answers_are_as_ever(base: BaseModel) -> None:
    attempts = []

    def failing(run: graphs_module.Run) -> graphs_module.Run:
        attempts.append(run)
        raise RuntimeError("operation not permitted when stream is capturing")

    sampler = LocalSampler(base, {}, options=SamplerOptions(capture=failing))
    with structlog.testing.capture_logs() as logs:
        for i in range(3):
            sample = make_sample(f"s{i}", make_prompt(30, i), LONG)
            assert_same(run(sampler, sample)[f"s{i}"], alone(base, sample))
    assert len(attempts) == 1
    assert [log["log_level"] for log in logs] == ["warning"]


def test_what_looks_at_the_device_cannot_be_captured(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = _decoder(base)
    monkeypatch.setattr(type(decoder), "_rotation_of", decoder.__class__._rotation)  # asks how long its tables must be
    sampler, recordings = recorded(base)
    sample = make_sample("s", make_prompt(30), LONG)
    with structlog.testing.capture_logs() as logs:
        assert_same(run(sampler, sample)["s"], alone(base, sample))
    assert "looks at" in logs[0]["error"] and not recordings.replays


def test_contexts_that_are_too_unlike_go_another_way(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "SMALL", 0)
    sampler, recordings = recorded(base)
    short = [make_sample(f"s{i}", make_prompt(2, i), SamplingParams(max_tokens=3, stop_eos=False)) for i in range(15)]
    run(sampler, *short, make_sample("long", make_prompt(200), LONG))
    assert recordings.captures < 3, "only once the long one is alone"
    assert recordings.replays > 10


def test_it_can_be_turned_off_and_is_not_there_for_other_layers(base: BaseModel, tmp_path: Path) -> None:
    assert LocalSampler(base, {}, options=SamplerOptions(capture=plain, graphs=False))._graphs is None
    assert LocalSampler(base, {})._graphs is None, "on a CPU"
    shape = tiny_models.make(tmp_path, "gemma2")
    gemma = BaseModel.load(shape, device="cpu", dtype="float32")
    assert LocalSampler(gemma, {}, options=SamplerOptions(capture=plain))._graphs is None


def test_graphs_are_bounded_and_can_be_given_up(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "MOST_KEPT", 2)
    sampler, recordings = recorded(base, {"a": make_adapter(base, 1)})
    for num in (1, 2, 4, 8, 1):
        run(sampler, *[make_sample(f"s{num}.{i}", make_prompt(5, i), HOT, version_id="a") for i in range(num)])
    found: DecodeGraphs | None = sampler._graphs
    assert found is not None and len(found._kept) == 2
    assert recordings.captures == 5
    assert found.num_bytes > 0
    found.drop()
    assert found.num_bytes == 0
    sample = make_sample("s", make_prompt(5), HOT, version_id="a")
    assert_same(run(sampler, sample)["s"], alone(base, sample, {"a": sampler._versions["a"]}))


def test_buckets_of_context_waste_at_most_a_half() -> None:
    for num_keys in range(1, 5000):
        context = _context_for(num_keys)
        assert num_keys <= context and (context == LEAST_CONTEXT or context <= 1.5 * num_keys)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_setting_reaches_the_sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    monkeypatch.setattr(local_module, "capture_for", lambda device: plain)
    given = _options(load({"cuda_graphs": wanted, "device": "cpu", "dtype": "float32"}))
    backend = TorchBackend(tiny_models.make(tmp_path), **given)  # pyright: ignore[reportArgumentType]
    assert (backend.sampler._graphs is not None) == wanted


def test_a_setting_that_means_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cuda_graphs is 'maybe'; choose 'on' or 'off'"):
        TorchBackend(tiny_models.make(tmp_path), device="cpu", cuda_graphs="maybe")


def test_a_budget_counts_what_decoding_holds_and_takes_it_back(base: BaseModel) -> None:
    memory = MemoryManager(2**30)
    memory.register(BASE, lambda: 2**20)
    options = SamplerOptions(capture=Recordings())
    sampler = LocalSampler(base, {"a": make_adapter(base, 1)}, options=options, memory=memory)
    run(sampler, make_sample("s", make_prompt(5), HOT, version_id="a"))
    assert memory.use()[DECODING] > 0
    with memory.reserved(2**30 - 2**20):
        assert memory.use()[DECODING] == 0
    assert_same(
        run(sampler, make_sample("s", make_prompt(5), HOT, version_id="a"))["s"],
        alone(base, make_sample("s", make_prompt(5), HOT, version_id="a"), sampler._versions),
    )


def test_off_a_cpu_weights_are_the_models_own_and_segments_share_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = BaseModel.load(tiny_models.make(tmp_path, "qwen3"), device="cpu", dtype="bfloat16")
    assert base._written_out is not None
    base._written_out.packs = False  # as on a GPU
    monkeypatch.setattr(grouped, "is_used_on", lambda device: True)
    works = []
    monkeypatch.setattr(SegmentWork, "add_", _noting(SegmentWork.add_, works))
    lengths = [30, 1, 12, 5, 40]
    adapters = [any_adapter(base, 1, 8), None, any_adapter(base, 2, 16), any_adapter(base, 3, 3, mlp=False), None]
    tokens_T = torch.randint(0, 300, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    given = (tokens_T, positions_T, PackedCausal(lengths), Routing.of(adapters, lengths))
    with torch.inference_mode():
        ours, modules = base.hidden(*given), base._through_modules(*given)
        plain = base._through_modules(*given[:3], Routing.of([None], [sum(lengths)]))
    assert base.written_out is not None and len(works) == len(base.written_out.linears)
    error = float((ours - modules).float().norm() / modules.float().norm())
    assert error < 0.03 < float((plain - modules).float().norm() / modules.float().norm())
    kept = {parameter.untyped_storage().data_ptr() for parameter in base.model.parameters()}
    for linear in base.written_out.linears:
        assert linear._weight_OI.untyped_storage().data_ptr() in kept, "a copy of the weights"


def _noting(method: Callable[..., torch.Tensor], calls: list[object]) -> Callable[..., torch.Tensor]:
    def call(*args: object) -> torch.Tensor:
        calls.append(args)
        return method(*args)

    return call


def test_rows_lie_in_the_order_of_their_slots_for_the_grouped_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = BaseModel.load(tiny_models.make(tmp_path, "llama"), device="cpu", dtype="bfloat16")
    monkeypatch.setattr(graphs_module, "is_grouped_on", lambda device: True)
    ends: list[torch.Tensor] = []

    def checked(x_TI: torch.Tensor, matrices_SIO: torch.Tensor, ends_S: torch.Tensor) -> torch.Tensor:
        assert len(ends_S) == len(matrices_SIO) and int(ends_S[-1]) == len(x_TI) and (ends_S.diff() >= 0).all()
        ends.append(ends_S.clone())
        return grouped.grouped_product(x_TI, matrices_SIO, ends_S)

    monkeypatch.setattr(slots_module, "grouped_product", checked)
    versions = {str(i): make_adapter(base, i) for i in range(3)}
    sampler = LocalSampler(base, versions, options=SamplerOptions(capture=plain))
    names = ["0", "1", "2", None, "1"]
    run(sampler, *[make_sample(f"s{i}", make_prompt(9, i), HOT, version_id=name) for i, name in enumerate(names)])
    sizes = torch.diff(ends[0], prepend=torch.zeros(1, dtype=torch.int32))
    assert sorted(sizes[:-1].tolist())[-3:] == [1, 1, 2], "each adapter's rows"
    assert sizes[-1] == 8 - 4, "the base model's row, and three that pad"
