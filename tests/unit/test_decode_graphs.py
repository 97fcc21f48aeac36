"""Decode steps as on a GPU, in Triton's interpreter: the layers, the pages and the adapters of a CUDA graph's rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.device import DEVICE, NAMED, ON_CUDA, adapter_on

if not (NAMED and ON_CUDA):
    from support import interpreted  # noqa: F401 - before the kernels

from support import tiny_models, vision_models
from support.families import FAMILIES, make
from support.local_sampling import assert_same, finish, make_prompt, make_sample, run
from tinsmith.backends.torch import frozen_weights, state_kernels
from tinsmith.backends.torch.lora_batch import LoRABatch, list_row_blocks
from tinsmith.backends.torch.model import BaseModel
from tinsmith.samplers.local import decode_graphs, paged_kernel
from tinsmith.samplers.local.decode_graphs import DecodeGraphs, _Key, _Step
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions
from tinsmith.samplers.local.kv_cache import KVCache, layer_shapes
from tinsmith.samplers.local.scheduler import Batcher
from tinsmith.types import ModelShape, Sample, SamplingParams
from unit.test_expert_decode import multiply_groups
from unit.test_vision import text

THERE = NAMED and ON_CUDA
WHERE = DEVICE if NAMED else "cpu"
LONGER = [pytest.param(name, marks=pytest.mark.extended) for name in ("llama", "gemma2")]
PARAMS = SamplingParams(max_tokens=5, temperature=1.0, stop_eos=False, seed=3)


class Uncaptured(DecodeGraphs):
    """Runs what a graph would run."""

    steps = 0

    def hidden(self, *args: object):
        hidden_TD = super().hidden(*args)  # pyright: ignore[reportArgumentType]
        self.steps += hidden_TD is not None
        return hidden_TD

    def _capture(self, key: object, step: object) -> bool:
        step.graph = Replay(self, key, step)  # pyright: ignore
        step.hidden_nD = self._forward(key, step)  # pyright: ignore
        return True


class Replay:
    """In place of a CUDA graph: computes its step again."""

    def __init__(self, graphs: DecodeGraphs, key: _Key, step: _Step) -> None:
        self._graphs, self._key, self._step = graphs, key, step

    def replay(self) -> None:
        assert self._step.hidden_nD is not None
        self._step.hidden_nD.copy_(self._graphs._forward(self._key, self._step))


@pytest.fixture(autouse=True)
def run_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after another."""
    if not THERE:
        monkeypatch.setattr(paged_kernel, "PROGRAMS", 1)
        monkeypatch.setattr(frozen_weights, "grouped_mm", multiply_groups)


@pytest.fixture(scope="module", params=["qwen3", "gpt_oss", *LONGER])
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp(request.param), request.param)


def samplers(
    shape: ModelShape, ranks: Sequence[int], block_size: int, num_blocks: int | None = None
) -> tuple[LocalSampler, LocalSampler]:
    """Without and with graphs; `num_blocks` limits their caches."""
    base = BaseModel.load(shape, device=WHERE, dtype="float32")
    versions = {str(index): adapter_on(base, index, rank=rank) for index, rank in enumerate(ranks)}
    block_bytes = block_size * KVCache(layer_shapes(base), block_size, base.device).token_bytes
    kv_cache_bytes = None if num_blocks is None else num_blocks * block_bytes
    options = SamplerOptions(block_size=block_size, kv_cache_bytes=kv_cache_bytes)
    plain, ours = (LocalSampler(base, versions, options=options) for _ in range(2))
    plain._graphs = None
    if not THERE:
        ours._contiguous, ours._graphs = None, Uncaptured(base, ours._cache, ours._states)
        ours._cache.kernels, ours._states.kernels = paged_kernel, state_kernels
        ours._cache_budget._contiguous = None
    return plain, ours


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [(4, 4, 4), (3,)])
def test_rows_of_several_adapters_are_what_they_are_without_graphs(
    shape: ModelShape, ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "MIN_TABLE_WIDTH", 2)  # longer tables come with longer sequences
    plain, ours = samplers(shape, ranks, 4)
    versions = [None, *map(str, range(len(ranks)))]
    samples = [
        make_sample(f"s{i}", make_prompt(n, i), PARAMS, version_id=versions[i % len(versions)], num_samples=1 + i % 2)
        for i, n in enumerate((2, 9, 15, 1))
    ]
    expected, results = run(plain, *samples), run(ours, *samples)
    for sample in samples:
        assert_same(results[sample.request_id], expected[sample.request_id], atol=3e-4)
    if not THERE:
        assert isinstance(ours._graphs, Uncaptured) and ours._graphs.steps > 3
    for store in ours._cache._stores.values():
        assert not store[:, 0].any(), "padding rows write nothing"


@pytest.mark.extended
def test_adapters_of_two_layouts_share_a_graph_beside_prompts(shape: ModelShape) -> None:
    plain, ours = samplers(shape, (4, 6), 4)
    samples = [make_sample(str(i), make_prompt(9 + 4 * i, i), PARAMS, version_id=str(i)) for i in range(2)]
    expected, results = run(plain, *samples), run(ours, *samples)
    for sample in samples:
        assert_same(results[sample.request_id], expected[sample.request_id], atol=3e-4)
    if not THERE:
        assert isinstance(ours._graphs, Uncaptured) and ours._graphs.steps >= 3


@pytest.mark.matrix(1)
def test_prompts_leave_decoding_rows_in_their_graph(shape: ModelShape) -> None:
    plain, ours = samplers(shape, (4,), 4)
    first = make_sample("first", make_prompt(5), PARAMS, version_id="0")
    second = make_sample("second", make_prompt(11, 1), PARAMS)
    expected = {**run(plain, first), **run(plain, second)}
    ours.submit(first)
    ours.step()
    ours.submit(second)
    results = finish(ours)
    for sample in (first, second):
        assert_same(results[sample.request_id], expected[sample.request_id], atol=3e-4)
    assert ours._graphs is not None
    assert ours.cache_use().uncaptured_steps.keys() <= {"first of its kind"}


@pytest.mark.extended
def test_more_adapters_than_a_graph_has_room_for_run_without_one(
    shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "EXTRA_BLOCKS", 0)
    plain, ours = samplers(shape, (4, 4, 4), 4)
    samples = [make_sample(str(i), make_prompt(5 + i, i), PARAMS, version_id=str(i)) for i in range(3)]
    expected, results = run(plain, *samples), run(ours, *samples)
    for sample in samples:
        assert_same(results[sample.request_id], expected[sample.request_id], atol=3e-4)
    assert ours.cache_use().uncaptured_steps.keys() == {"many adapters"}
    assert ours._graphs is not None
    assert not any(key.layout_ids for key in ours._graphs._steps), "none is captured before its first forward"


@pytest.mark.matrix(1)
def test_sequences_that_were_preempted_read_their_new_blocks(
    shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempt, victims = Batcher._preempt, []

    def record(batcher: Batcher, sequence: object) -> None:
        victims.append(batcher)
        preempt(batcher, sequence)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Batcher, "_preempt", record)
    plain, ours = samplers(shape, (4,), 4, num_blocks=11)
    params = SamplingParams(max_tokens=12, temperature=1.0, stop_eos=False, seed=3)
    samples = [
        make_sample(f"s{i}", make_prompt(5 + i, i), params, version_id=[None, "0"][i % 2], num_samples=1 + i % 2)
        for i in range(4)
    ]
    expected, results = run(plain, *samples), run(ours, *samples)
    for sample in samples:
        assert_same(results[sample.request_id], expected[sample.request_id], atol=3e-4)
    assert victims.count(ours._batcher) > 2


@pytest.mark.extended
@pytest.mark.skipif(THERE, reason="graphs that the test can count are those of a CPU")
def test_a_sequence_with_images_leaves_others_in_their_graph(tmp_path: Path) -> None:
    plain, ours = samplers(vision_models.make(tmp_path, "qwen3_vl"), (), 4)
    tokens_T, images = vision_models.model_input(vision_models.picture(61, 22, 1), text(7, 1))
    pictured = Sample("pictured", None, tokens_T, 1, PARAMS, images=images)
    samples = [pictured, make_sample("written", np.array(text(9, 2), np.int32), PARAMS)]
    expected, results = run(plain, *samples), run(ours, *samples)
    for sample in samples:
        assert_same(results[sample.request_id], expected[sample.request_id], atol=3e-4)
    assert isinstance(ours._graphs, Uncaptured) and ours._graphs.steps == 4


@pytest.mark.matrix(1)
def test_weights_that_moved_are_found_again(shape: ModelShape) -> None:
    plain, ours = samplers(shape, (4,), 4)
    sample = make_sample("s", make_prompt(9), PARAMS, version_id="0")
    expected = run(plain, sample)["s"]
    ours.submit(sample)
    for _ in range(4):
        ours.step()
    ours.forget_weight_addresses()
    assert_same(finish(ours)["s"], expected, atol=3e-4)


def test_blocks_hold_rows_of_one_adapter(shape: ModelShape) -> None:
    base = BaseModel.load(shape, device="cpu", dtype="float32")
    a, b = (adapter_on(base, seed) for seed in (1, 2))
    lora_batch = LoRABatch.of([None, a, b], [2, 17, 1])
    scale = int(np.float32(a.scale).view(np.int32))
    at_a, at_b = a.compute_P.data_ptr(), b.compute_P.data_ptr()
    blocks = [block for segment in lora_batch.segments for block in list_row_blocks(segment)]
    assert blocks == [(at_a, 2, 16, scale), (at_a, 18, 1, scale), (at_b, 19, 1, scale)]


@pytest.mark.matrix(1)
def test_a_graph_that_cannot_be_captured_is_tried_again_later(
    shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours = samplers(shape, (4,), 4)
    if THERE:
        pytest.skip("captures")
    monkeypatch.setattr(decode_graphs, "RETRY_STEPS", 2)
    attempts = []

    def fails(key: object, step: object) -> bool:
        assert ours._graphs is not None
        attempts.append(key)
        ours._graphs._paused_steps = decode_graphs.RETRY_STEPS
        ours._graphs.clear()
        return False

    ours._graphs._capture = fails  # pyright: ignore
    params = SamplingParams(max_tokens=12, temperature=1.0, stop_eos=False, seed=3)
    sample = make_sample("s", make_prompt(9), params, version_id="0")
    assert_same(run(ours, sample)["s"], run(plain, sample)["s"], atol=3e-4)
    assert ours._graphs is not None
    assert len(attempts) >= 2 and ours._graphs.uncaptured_steps["capture failed"] >= 3 * (len(attempts) - 1)


# Layers with a state.

STATEFUL = ["qwen3_5_text", "lfm2", "granitemoehybrid", "kimi_linear"]
"""Both steps in kernels; only a convolution's; a convolution's and gathered states; the same with another gate."""


@pytest.fixture(scope="module", params=STATEFUL)
def stateful(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    family = next(family for family in FAMILIES if family.model_type == request.param)
    return make(tmp_path_factory.mktemp(family.model_type), family)


def count_steps(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the launches of the kernels of states."""
    counts: Counter[str] = Counter()
    for name in ("step_convolution", "step_gated_delta"):
        launch = getattr(state_kernels, name)

        def count(*args: object, launch: Any = launch, name: str = name, **kwargs: object) -> object:  # noqa: ANN401
            counts[name] += 1
            return launch(*args, **kwargs)

        monkeypatch.setattr(state_kernels, name, count)
    return counts


@pytest.mark.extended
def test_states_in_slots_are_what_they_are_without_graphs(
    stateful: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = count_steps(monkeypatch)
    is_adapted = "qwen3_5" in stateful.path or "lfm2" in stateful.path
    plain, ours = samplers(stateful, (4, 4) if is_adapted else (), 4)
    versions = [None, "0", "1"] if is_adapted else [None]
    samples = [
        make_sample(f"s{i}", make_prompt(n, i), PARAMS, version_id=versions[i % len(versions)], num_samples=1 + i % 2)
        for i, n in enumerate((2, 9, 11))
    ]
    expected, results = run(plain, *samples), run(ours, *samples)
    for sample in samples:
        assert_same(results[sample.request_id], expected[sample.request_id], atol=3e-4)
    if not THERE:
        assert isinstance(ours._graphs, Uncaptured) and ours._graphs.steps > 2
    assert counts["step_convolution"] > 0 and (counts["step_gated_delta"] > 0) == ("qwen3_5" in stateful.path)
    assert ours._states.num_taken == len(ours._batcher.snapshots or ())


@pytest.mark.matrix(1)
def test_a_graph_with_states_gives_the_plain_step_what_it_needs_when_it_fails(stateful: ModelShape) -> None:
    if THERE:
        pytest.skip("captures")
    plain, ours = samplers(stateful, (), 4)

    def fails(key: object, step: object) -> bool:
        assert ours._graphs is not None
        ours._graphs._paused_steps = decode_graphs.RETRY_STEPS
        return False

    ours._graphs._capture = fails  # pyright: ignore
    sample = make_sample("s", make_prompt(9), PARAMS)
    assert_same(run(ours, sample)["s"], run(plain, sample)["s"], atol=3e-4)
