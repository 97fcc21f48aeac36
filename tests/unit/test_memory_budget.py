"""One memory budget per device: training and sampling evict for each other without changing results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import structlog
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinker import types

from support import tiny_models
from support.live import serving
from support.local_sampling import assert_same, finish, make_prompt, make_sample
from support.properties import examples
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.memory import (
    ACTIVATIONS,
    BASE,
    KV_CACHE,
    MODELS,
    Evictable,
    MemoryManager,
    OverBudgetError,
)
from tinsmith.backends.torch.model import BaseModel
from tinsmith.engine.__main__ import _free_bytes, check_fit, choose_degrees
from tinsmith.errors import SettingsError, UserError
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions
from tinsmith.samplers.local.kv_cache import BlockPool, chain_key, root_key
from tinsmith.settings import Settings
from tinsmith.types import (
    AdamParams,
    Datum,
    LoraSpec,
    ModelShape,
    OptimStep,
    Pass,
    PassResult,
    SampleResult,
    SamplingParams,
)

torch.set_num_threads(1)

HOT = SamplingParams(max_tokens=150, temperature=1.0, stop_eos=False, seed=11)


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("qwen"), "qwen3")


@pytest.fixture(scope="module")
def base(shape: ModelShape) -> BaseModel:
    return BaseModel.load(shape)


# The memory manager.


class Holder:
    def __init__(self, num_bytes: int, spare: int = 0) -> None:
        self.num_bytes = num_bytes
        self.spare = spare
        self.evicted: list[int] = []

    def evict(self, num_bytes: int) -> None:
        self.evicted.append(num_bytes)
        self.num_bytes -= min(num_bytes, self.num_bytes)

    def evictable(self) -> Evictable:
        return Evictable(lambda: self.spare, lambda: self.num_bytes, self.evict)


def manager_of(budget: int, **holders: Holder) -> MemoryManager:
    memory = MemoryManager(budget)
    for name, holder in holders.items():
        memory.register(name, lambda holder=holder: holder.num_bytes, holder.evictable() if holder.spare else None)
    return memory


def test_a_reservation_evicts_what_is_missing_and_no_more() -> None:
    cache = Holder(40, spare=10)
    memory = manager_of(100, base=Holder(50), kv_cache=cache)
    with memory.reserve(10):
        assert cache.evicted == [] and memory.free() == 0
    with memory.reserve(35):
        assert cache.evicted == [25] and memory.is_reserved
        assert memory.bytes_by_holder() == {"base": 50, "kv_cache": 15, ACTIVATIONS: 35}
    assert not memory.is_reserved and memory.free() == 35
    assert (memory.take_peak(), memory.take_peak()) == (35, 0)


def test_a_shortage_is_refused_with_the_holders_of_memory() -> None:
    memory = manager_of(100 * 2**20, base=Holder(90 * 2**20), kv_cache=Holder(5 * 2**20, spare=1))
    with pytest.raises(OverBudgetError, match=r"take 11\.0 MiB; of the memory budget of 100\.0 MiB, base 90\.0 MiB"):
        with memory.reserve(11 * 2**20):
            raise AssertionError
    assert memory.bytes_by_holder()[ACTIVATIONS] == 0


def test_what_is_available_is_known_before_anything_is_evicted() -> None:
    cache = Holder(40, spare=10)
    memory = manager_of(100, base=Holder(50), kv_cache=cache)
    assert memory.available(ACTIVATIONS, idle_only=True) == 20
    assert memory.available(ACTIVATIONS, idle_only=False) == 50
    assert memory.limit_of("kv_cache") == 50 and cache.evicted == []


def test_without_a_budget_nothing_is_evicted_and_everything_is_counted() -> None:
    cache = Holder(40, spare=10)
    memory = manager_of(0, kv_cache=cache)
    with memory.reserve(10**15):
        assert memory.bytes_by_holder() == {"kv_cache": 40, ACTIVATIONS: 10**15} and cache.evicted == []


# Blocks and sequences.


@examples(60)
@given(st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.booleans()), max_size=12), st.integers(0, 5))
def test_a_pool_that_shrinks_keeps_who_has_what(chains: list[tuple[int, bool, bool]], spare: int) -> None:
    """Chains of blocks, some registered by key, some released."""
    pool = BlockPool(max_blocks=100, initial_blocks=4)
    live: dict[int, list[int]] = {}
    keys: dict[bytes, int] = {}
    for chain_id, (length, is_registered, released) in enumerate(chains):
        blocks = pool.allocate(length) or []
        key = root_key(chain_id)
        for block in blocks if is_registered else []:
            key = chain_key(key, b"x")
            pool.register(block, key, chain_id)
            keys[key] = block
        if released:
            pool.release(blocks)
        else:
            live[chain_id] = blocks
    pool.take_fresh()
    num_live, content = pool.num_live, {block: object() for block in range(pool.num_blocks)}
    if num_live:
        with pytest.raises(ValueError, match="are live"):
            pool.shrink(num_live - 1)
    cached_before, size = pool.num_cached, min(num_live + spare, pool.num_blocks - 1)
    moves = pool.shrink(size)
    after = {moves.get(block, block): content[block] for block in content if block <= size or block in moves}
    assert pool.num_blocks == size + 1 and pool.num_live == num_live
    assert pool.num_cached == min(cached_before, size - num_live)
    assert all(target <= size < source for source, target in moves.items())
    for blocks in live.values():
        for block in blocks:
            assert pool.refs(moves.get(block, block)) == 1
    for key, block in keys.items():
        if matched := pool.match([key]):
            assert after[matched[0]] is content[block]
    pool.max_blocks = size
    fresh = pool.allocate(size - num_live) or []
    live_blocks = [moves.get(block, block) for blocks in live.values() for block in blocks]
    assert sorted(fresh + live_blocks) == list(range(1, size + 1))


@pytest.mark.extended
@pytest.mark.parametrize(("every", "arch"), [(1, "qwen3"), (3, "qwen3"), (7, "qwen3"), (3, "qwen3_5")])
def test_samples_whose_cache_is_taken_away_come_to_the_same_answers(
    base: BaseModel, every: int, arch: str, tmp_path: Path
) -> None:
    """With keys and values only, and with states."""
    base = base if arch == "qwen3" else BaseModel.load(tiny_models.make(tmp_path, arch))
    samples = [
        make_sample(str(length), make_prompt(length), HOT, num_samples=num)
        for length, num in ((3, 1), (40, 3), (90, 2), (17, 1), (33, 5))
    ]
    options = SamplerOptions(block_size=4, max_tokens_per_step=64)
    expected = LocalSampler(base, {}, options=options)
    memory = MemoryManager(base.num_bytes + 40 * 2**20)
    memory.register(BASE, lambda: base.num_bytes)
    limited = LocalSampler(base, {}, options=options, memory=memory)
    for sample in samples:
        expected.submit(sample)
        limited.submit(sample)
    results: dict[str, SampleResult | UserError] = {}
    rng, steps, shrunk = np.random.default_rng(every), 0, 0
    while limited.has_work:
        results.update(limited.step())
        steps += 1
        if steps % every == 0 and steps < 200:
            cache_bytes = memory.bytes_by_holder()[KV_CACHE]
            limited._cache_budget.evict(int(cache_bytes * rng.random()))
            shrunk += memory.bytes_by_holder()[KV_CACHE] < cache_bytes
    assert shrunk > 10
    for request_id, result in finish(expected).items():
        ours = results[request_id]
        assert isinstance(ours, SampleResult)
        assert_same(ours, result, 2e-5 if arch == "qwen3" else 6e-4)
    limited._cache_budget.evict(memory.bytes_by_holder()[KV_CACHE])
    assert memory.bytes_by_holder()[KV_CACHE] == 0 and limited._states.num_slots == 0


# Training and sampling together.


def passes_of(model_id: str, step: int, lengths: tuple[int, ...] = (256, 256, 200, 100)) -> Pass:
    rng = np.random.default_rng(step)
    data = tuple(
        Datum(
            rng.integers(0, tiny_models.VOCAB, length).astype(np.int32),
            {"target_tokens": rng.integers(0, tiny_models.VOCAB, length), "weights": np.ones(length, np.float32)},
        )
        for length in lengths
    )
    return Pass(f"r{step}", model_id, data, "cross_entropy", {}, False)


def open_backend(shape: ModelShape, **options: object) -> TorchBackend:
    """Compute few logits and sample few rows at a time, so that training's activations dominate a step's memory."""
    limits = {"logits_chunk": 16, "sampler_step_tokens": 512}
    return TorchBackend(shape, device="cpu", **limits, **options)  # pyright: ignore[reportArgumentType]


class Run:
    """Two training steps, with samples of the newest version running throughout."""

    def __init__(self, shape: ModelShape, **options: object) -> None:
        self.backend = open_backend(shape, **options)
        self.memory = self.backend._memory
        self.peaks: dict[str, int] = {}
        self.peak_bytes = 0
        self.waited = 0
        self.logprobs: list[np.ndarray] = []
        self.answers: dict[str, SampleResult | UserError] = {}
        self._reserve = self.memory.reserve
        self.memory.reserve = self.reserve_and_look

    @contextmanager
    def reserve_and_look(self, num_bytes: int) -> Iterator[None]:
        with self._reserve(num_bytes):
            self.look()
            yield

    def look(self) -> None:
        use = self.memory.bytes_by_holder()
        self.peak_bytes = max(self.peak_bytes, sum(use.values()))
        for name, num_bytes in use.items():
            self.peaks[name] = max(self.peaks.get(name, 0), num_bytes)

    def sample(self, steps: int) -> None:
        sampler = self.backend.sampler
        for _ in range(steps):
            self.answers.update(sampler.step())
            self.look()

    def go(self) -> Run:
        backend, sampler = self.backend, self.backend.sampler
        backend.create_model("m", LoraSpec(8, seed=1))
        for step in range(2):
            backend.publish("m", f"v{step}")
            for index in range(12):
                params = SamplingParams(max_tokens=60, temperature=1.0, stop_eos=False, seed=index)
                prompt = make_prompt(150 + index, step)
                sampler.submit(make_sample(f"{step}.{index}", prompt, params, version_id=f"v{step}"))
            self.sample(20)
            running = len(sampler._batcher.running)
            (result,) = run_to_end(backend.run_passes([passes_of("m", step)]), lambda: self.sample(1))
            self.waited += running - len(sampler._batcher.running)
            assert isinstance(result, PassResult), result
            self.logprobs += list(result.logprobs)
            (metrics,) = backend.optim_step([OptimStep("o", "m", AdamParams(1e-2))])
            assert isinstance(metrics, Mapping), metrics
            self.sample(5)
        while sampler.has_work:
            self.sample(1)
        return self

    @property
    def weights(self) -> torch.Tensor:
        return self.backend._models["m"].adapter.flat_P


@pytest.mark.extended
@pytest.mark.parametrize("deterministic", ["on", "off"])
def test_a_budget_that_cannot_hold_both_changes_no_result(shape: ModelShape, deterministic: str) -> None:
    free = Run(shape, deterministic=deterministic, recompute="off").go()
    fixed_bytes = sum(num_bytes for name, num_bytes in free.peaks.items() if name not in (ACTIVATIONS, KV_CACHE))
    budget = fixed_bytes + int(1.05 * free.peaks[ACTIVATIONS])
    assert budget < free.peak_bytes, "it could hold both"
    tight = Run(shape, deterministic=deterministic, recompute="off", memory_budget=budget).go()
    assert tight.peak_bytes <= budget
    assert tight.waited > 0, "no running sample gave up its cache"
    assert tight.backend._trainer._limit == free.backend._trainer._limit, "micro-batches were cut"
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(tight.logprobs, free.logprobs, strict=True))
    assert torch.equal(tight.weights, free.weights)
    assert tight.answers.keys() == free.answers.keys()
    for request_id, result in free.answers.items():
        ours = tight.answers[request_id]
        assert isinstance(ours, SampleResult) and isinstance(result, SampleResult)
        assert_same(ours, result, atol=0.0 if deterministic == "on" else 1e-4)


def test_keys_and_values_come_back_after_the_step(shape: ModelShape) -> None:
    free = Run(shape).go()
    budget = free.peak_bytes - free.peaks[KV_CACHE] // 2
    run = Run(shape, memory_budget=budget)
    run.backend.create_model("m", LoraSpec(8, seed=1))
    for index in range(12):
        run.backend.sampler.submit(make_sample(str(index), make_prompt(90 + index), HOT))
    run.sample(20)
    before = len(run.backend.sampler._batcher.running)
    run_to_end(run.backend.run_passes([passes_of("m", 0)]))
    run.sample(20)
    assert before == len(run.backend.sampler._batcher.running) == 12


def test_a_step_that_does_not_fit_is_cut_and_a_sequence_that_does_not_is_refused_alone(shape: ModelShape) -> None:
    ample = open_backend(shape, recompute="off")
    ample.create_model("m", LoraSpec(8, seed=1))
    run_to_end(ample.run_passes([passes_of("m", 0, (210,))]))
    activation_bytes = ample._memory.take_peak()
    fixed = sum(ample._memory.bytes_by_holder().values())
    expected = [run_to_end(ample.run_passes([passes_of("m", 0, (100, 100, 90))]))[0]]

    backend = open_backend(shape, recompute="off", memory_budget=fixed + activation_bytes)
    backend.create_model("m", LoraSpec(8, seed=1))
    room = backend.model_budget_bytes
    pass_result, refused = run_to_end(
        backend.run_passes([passes_of("m", 0, (100, 100, 90)), passes_of("m", 1, (256,))])
    )
    assert isinstance(pass_result, PassResult) and isinstance(expected[0], PassResult)
    for ours, theirs in zip(pass_result.logprobs, expected[0].logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert isinstance(refused, UserError)
    assert "a sequence of 256 tokens does not fit" in str(refused) and "of the memory budget of" in str(refused)
    assert backend._memory.bytes_by_holder()[ACTIVATIONS] == 0 and backend._trainer._limit < 290
    assert backend.model_budget_bytes < room, "others should leave"


def test_a_step_that_lacks_room_has_models_leave(shape: ModelShape) -> None:
    backend = open_backend(shape)
    backend.create_model("m", LoraSpec(8))
    fixed = sum(backend._memory.bytes_by_holder().values())
    backend = open_backend(shape, recompute="off", memory_budget=fixed + 6 * 2**18)
    backend.create_model("m", LoraSpec(8))
    before = backend.model_budget_bytes
    (refused,) = run_to_end(backend.run_passes([passes_of("m", 0, (256,))]))
    assert isinstance(refused, UserError) and backend.model_budget_bytes < before


def test_activations_are_computed_again_before_running_samples_lose_theirs(shape: ModelShape) -> None:
    def start_run(**options: object) -> Run:
        run = Run(shape, **options)
        run.backend.create_model("m", LoraSpec(8, seed=1))
        for index in range(12):
            run.backend.sampler.submit(make_sample(str(index), make_prompt(90 + index), HOT))
        run.sample(20)
        return run

    free = start_run()
    spare = free.backend.sampler._cache_budget.idle_bytes()
    run_to_end(free.backend.run_passes([passes_of("m", 0)]))
    peak_bytes = free.memory.take_peak()
    run = start_run(memory_budget=sum(free.memory.bytes_by_holder().values()) - spare + int(peak_bytes * 0.9))
    run_to_end(run.backend.run_passes([passes_of("m", 0)]))
    assert len(run.backend.sampler._batcher.running) == 12
    assert run.backend.base.recompute.active and run.memory.take_peak() < 0.9 * peak_bytes
    run.backend.optim_step([OptimStep("o", "m", AdamParams(1e-2))])
    free.backend.optim_step([OptimStep("o", "m", AdamParams(1e-2))])
    assert torch.equal(run.weights, free.weights)


def test_a_model_that_no_budget_holds_is_refused_with_the_numbers(shape: ModelShape) -> None:
    small = open_backend(shape)
    fixed = sum(small._memory.bytes_by_holder().values())
    backend = open_backend(shape, memory_budget=fixed + 4 * 2**20)
    with pytest.raises(UserError, match=r"a model of rank 256 takes .* in training, and the engine's memory budget"):
        backend.create_model("m", LoraSpec(256))
    backend.create_model("m", LoraSpec(8))


def test_a_budget_that_holds_neither_is_refused_at_start_with_the_numbers(shape: ModelShape) -> None:
    with pytest.raises(
        SettingsError, match=r"memory_budget is 1\.0 MiB, and tiny/qwen3 needs .* base .* adapter of rank 8"
    ):
        TorchBackend(shape, device="cpu", memory_budget=2**20)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU, optimizer state is in the host's memory anyway")
def test_optimizer_state_leaves_the_device_and_comes_back(shape: ModelShape) -> None:
    backend = TorchBackend(shape, device="cuda", dtype="float32")
    backend.create_model("m", LoraSpec(8))
    run_to_end(backend.run_passes([passes_of("m", 0)]))
    backend.optim_step([OptimStep("o", "m", AdamParams(1e-2))])
    trained, before = backend._models["m"], backend._memory.bytes_by_holder()[MODELS]
    moments = [moment_P.clone() for moment_P in trained.moments or ()]
    assert before - trained.offload() == backend._memory.bytes_by_holder()[MODELS] < before
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(trained.moments_or_zeros(2), moments, strict=True))
    assert backend._memory.bytes_by_holder()[MODELS] == before


# The engine.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel": 3}, "tensor parallel 3 does not divide the model's 4 attention heads"),
        ({"memory_budget": "6GiB", "data_parallel": 2}, "memory_budget is for an engine on one device"),
        ({"memory_budget": "6GiB", "backend": "fake"}, "memory_budget is for an engine on one device"),
        ({"data_parallel": 2, "shard_base": True, "quantize": "nf4"}, "quantised"),
        ({"context_parallel": 2, "shard_base": True, "quantize": "nf4"}, "quantised"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_loaded(
    shape: ModelShape, options: dict[str, object], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        check_fit(Settings.model_validate(options), shape)


def test_a_gpu_that_is_too_small_is_refused_by_how_much(shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.engine.__main__._device_memory", lambda _settings, _devices: (2**30, True))
    with pytest.raises(SettingsError, match=r"needs .* GiB on each device.*it has 1\.0 GiB, .* MiB too little"):
        check_fit(Settings(), shape)
    monkeypatch.setattr("tinsmith.engine.__main__._device_memory", lambda _settings, _devices: (8 * 2**30, True))
    check_fit(Settings(), shape)


def test_a_gpu_is_checked_by_the_memory_that_is_free_on_it(shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[object] = []

    def mem_get_info(device: object) -> tuple[int, int]:
        devices.append(device)
        return 2**30, 80 * 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    for device in ("auto", "cuda:3"):
        with pytest.raises(SettingsError, match=r"it has 1\.0 GiB"):
            check_fit(Settings(device=device), shape)
    assert devices == ["cuda", "cuda:3"]
    check_fit(Settings(sampler="vllm", sampler_shares_device=True), shape)  # vLLM holds the rest, and releases it


# An engine's parallel degrees on the GPUs of its machine.

GIB = 2**30


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Free memory of each, for tests to fill."""
    free: list[int] = []
    monkeypatch.setattr("tinsmith.engine.__main__._free_bytes", lambda _settings: free)
    return free


def test_an_engine_without_degrees_takes_the_plans_for_the_free_memory_and_says_why(
    shape: ModelShape, gpus: list[int], tmp_path: Path
) -> None:
    gpus[:] = [80 * GIB, 3 * GIB, 80 * GIB, 80 * GIB]
    with structlog.testing.capture_logs() as logs:
        chosen = choose_degrees(Settings(), shape, "engine")
    assert (chosen.data_parallel, chosen.tensor_parallel, chosen.shard_base) == (4, 1, False)
    assert chosen.resolved_backend == "sharded"
    (event,) = logs
    assert event["layout"] == "data parallel 4 x tensor parallel 1" and event["devices"] == 4
    assert event["free"] == "3.0 GiB" and "trains a share of each step's sequences" in event["reason"]
    # A larger model fits the total memory but not the free memory, and is sharded.
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "head_dim": 128}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 36, "vocab_size": 151936}
    config |= {"intermediate_size": 12288, "torch_dtype": "bfloat16", "max_position_embeddings": 40960}
    (tmp_path / "config.json").write_text(json.dumps(config))
    large = replace(shape, path=str(tmp_path))
    layouts = {}
    for free in (80, 15):
        gpus[:] = [80 * GIB, free * GIB]
        chosen = choose_degrees(Settings(dtype="bfloat16"), large, "engine")
        layouts[free] = chosen.data_parallel, chosen.tensor_parallel
    assert layouts == {80: (2, 1), 15: (1, 2)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data_parallel": 1}, ""),
        ({"tensor_parallel": 2}, ""),
        ({"backend": "fake"}, ""),
        ({"engines": 2}, "2 engines and samplers share this machine"),
        ({"samplers": 1}, "2 engines and samplers share this machine"),
        ({"models": ("a", "b")}, "2 engines and samplers share this machine"),
        ({"sampler": "vllm"}, "vllm needs a device of its own"),
        ({"deterministic": True}, "deterministic needs one device"),
        ({"memory_budget": "6GiB"}, "memory_budget is for one device"),
    ],
)
def test_given_degrees_and_shared_machines_are_left_as_they_are(
    shape: ModelShape, gpus: list[int], options: dict[str, object], words: str
) -> None:
    gpus[:] = [80 * GIB] * 8
    settings = Settings.model_validate(options)
    with structlog.testing.capture_logs() as logs:
        assert choose_degrees(settings, shape, "engine") == settings
    assert [event["reason"] for event in logs] == [words] * bool(words)
    assert choose_degrees(Settings(), shape, "sampler") == Settings()
    gpus[:] = [80 * GIB]
    assert choose_degrees(Settings(), shape, "engine") == Settings()


def test_the_free_memory_of_each_gpu_is_asked_by_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child avoids CUDA contexts on devices of other ranks. Its torch is a stub."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: pytest.fail("asked in the engine's own process"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    script = "class cuda:\n  device_count = lambda: 2\n  mem_get_info = lambda i: ((5 + i) << 30, 80 << 30)\n"
    (tmp_path / "torch.py").write_text(script)
    assert _free_bytes(Settings()) == [5 * GIB, 6 * GIB]
    assert _free_bytes(Settings(device="cuda:1")) == [] == _free_bytes(Settings(device="cpu"))
    (tmp_path / "torch.py").write_text("raise RuntimeError('no driver')")
    with pytest.raises(SettingsError, match=r"unknown \(RuntimeError: no driver\); give --data-parallel"):
        _free_bytes(Settings())


@pytest.fixture(scope="module")
def budget_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """nano with a small budget; its base takes 25 MB with the copy for decoding."""
    budget = {"MEMORY_BUDGET": "160MiB"}
    with serving(tmp_path_factory.mktemp("squeezed"), settings=budget) as server:
        yield server.url


@pytest.mark.extended
def test_a_client_trains_and_samples_under_a_budget(budget_url: str) -> None:
    with tinker.ServiceClient(base_url=budget_url, api_key="tml-budget") as service:
        model = service.create_lora_training_client("tinsmith/nano", rank=8).result()
        tokens = list(range(10, 138))
        inputs = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(127, np.float32)}
        datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)  # pyright: ignore[reportArgumentType]
        losses = []
        for _ in range(3):
            sampler = model.save_weights_and_get_sampling_client().result()
            prompt = types.ModelInput.from_ints(tokens[:64])
            answer = sampler.sample(prompt, num_samples=4, sampling_params=types.SamplingParams(max_tokens=20))
            passed = model.forward_backward([datum] * 8, "cross_entropy")
            stepped = model.optim_step(types.AdamParams(learning_rate=1e-3))
            losses.append(passed.result().metrics["loss:sum"])
            stepped.result()
            assert len(answer.result().sequences) == 4
        assert losses[-1] < losses[0]
        # An engine reports its memory once a second, with the peak of activations since the last report.
        parts = ("base", "models", "kv_cache", "activations")
        for _ in range(200):
            memory_use = memory_of(budget_url)
            if min(memory_use.get(name, 0) for name in parts) > 0:
                break
            model.forward_backward([datum] * 8, "cross_entropy").result()
            sampler.sample(prompt, num_samples=4, sampling_params=types.SamplingParams(max_tokens=20)).result()
        assert min(memory_use[name] for name in parts) > 0
    overview = httpx.get(f"{budget_url}/api/v1/dashboard/overview", headers={"X-API-Key": "tml-budget"}, timeout=60)
    assert overview.json()["engines"][0]["memory"].keys() == memory_use.keys()
    assert memory_use.keys() == {"base", "models", "versions", "sampling", "kv_cache", "activations", "budget"}
    assert memory_use["budget"] == 160 * 2**20
    assert (
        sum(value for name, value in memory_use.items() if name not in ("budget", "activations"))
        <= memory_use["budget"]
    )


def memory_of(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    name = "tinsmith_engine_memory_bytes{"
    return {line.split('holder="')[1].split('"')[0]: float(line.split()[-1]) for line in lines if line.startswith(name)}
