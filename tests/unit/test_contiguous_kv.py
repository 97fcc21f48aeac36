"""Attention over the contiguous KV cache equals attention over each sequence alone while others join and leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import tiny_models
from support.local_sampling import HOT, assert_same, make_adapter, make_prompt, make_sample, run, sample_alone
from support.properties import examples
from tinsmith.backends.torch.attention import Window
from tinsmith.backends.torch.model import BaseModel
from tinsmith.samplers.local import contiguous_kv, shared_prefixes
from tinsmith.samplers.local.contiguous_kv import CAPACITY_STEP, ContiguousKV, capacity_for, position_bytes
from tinsmith.samplers.local.engine import LocalSampler
from tinsmith.samplers.local.kv_cache import KVCache, LayerShape
from tinsmith.samplers.local.paged_attention import PagedPlan, SequenceRows
from tinsmith.samplers.local.shared_prefixes import DecodeRow

BLOCK = 4
CPU = torch.device("cpu")
HEADS = 4
SHAPES = (
    LayerShape(2, 8, 6, torch.float32),
    LayerShape(4, 5, 5, torch.float32),
    LayerShape(2, contiguous_kv.MIN_SWAPPED_DIM, 16, torch.float32),
)


class CacheComparison:
    """Sequences of random keys and values that decode step by step, over a cache with and without contiguous copies."""

    def __init__(self, seed: int, max_bytes: int = 2**30) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = KVCache(dict(enumerate(SHAPES)), BLOCK, CPU)
        self.cache.resize(3000)
        self.contiguous = ContiguousKV(self.cache, max_bytes, CPU)
        self.next_block = 1
        self.sequences: dict[str, list[torch.Tensor]] = {}
        self.blocks: dict[str, list[int]] = {}

    def join(self, name: str, length: int) -> None:
        self.blocks[name] = list(range(self.next_block, self.next_block + 40))
        self.next_block += 40
        slots = torch.tensor(self.slots(name, range(length)))
        self.sequences[name] = []
        for layer, shape in enumerate(SHAPES):
            k, v = self.random(length, shape)
            self.cache.write(layer, slots, k, v)
            self.sequences[name] += [k, v]

    def branch(self, name: str, other: str, num_blocks: int, length: int) -> None:
        """Join with the first blocks of another sequence, and `length` tokens after them."""
        num_blocks = min(num_blocks, len(self.sequences[other][0]) // BLOCK)
        shared = num_blocks * BLOCK
        self.join(name, shared + length)
        self.blocks[name] = [*self.blocks[other][:num_blocks], *self.blocks[name][: 40 - num_blocks]]
        slots = torch.tensor(self.slots(name, range(shared, shared + length)))
        for layer in range(len(SHAPES)):
            rows = self.sequences[name][2 * layer : 2 * layer + 2]
            self.cache.write(layer, slots, *(x[shared:] for x in rows))
            for x, source in zip(rows, self.sequences[other][2 * layer : 2 * layer + 2], strict=True):
                x[:shared] = source[:shared]

    def slots(self, name: str, positions: range) -> list[int]:
        return [self.blocks[name][at // BLOCK] * BLOCK + at % BLOCK for at in positions]

    def random(self, length: int, shape: LayerShape) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = (length, shape.num_heads, shape.key_dim), (length, shape.num_heads, shape.value_dim)
        k, v = (torch.randn(size, generator=self.generator) for size in sizes)
        return k, v

    def step(self, names: list[str], **options: object) -> int:
        """Decode one token of each sequence and compare; returns how many had a slot."""
        rows = [
            SequenceRows(len(s[0]), len(s[0]) + 1, self.blocks[n], n)
            for n, s in ((n, self.sequences[n]) for n in names)
        ]
        plan = PagedPlan(self.cache, rows, CPU, self.contiguous)
        for layer, shape in enumerate(SHAPES):
            k, v = self.random(len(names), shape)
            q = torch.randn(len(names), HEADS, shape.key_dim, generator=self.generator)
            output = plan.attend(layer, q, k, v, scale=0.3, **options)  # pyright: ignore[reportArgumentType]
            for row, name in enumerate(names):
                history = self.sequences[name]
                history[2 * layer] = torch.cat([history[2 * layer], k[row : row + 1]])
                history[2 * layer + 1] = torch.cat([history[2 * layer + 1], v[row : row + 1]])
                expected = attention(q[row], history[2 * layer], history[2 * layer + 1], **options)  # pyright: ignore
                torch.testing.assert_close(output[row].double(), expected, atol=2e-5, rtol=1e-4)
        return sum(len(step.slot_n) for step in plan._contiguous)


def attention(
    q_HD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    window: Window | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    repeat = q_HD.shape[0] // k_TGD.shape[1]
    k_THD, v_THD = k_TGD.double().repeat_interleave(repeat, 1), v_TGD.double().repeat_interleave(repeat, 1)
    scores_HT = torch.einsum("hd,thd->ht", q_HD.double(), k_THD) * 0.3
    if softcap is not None:
        scores_HT = softcap * torch.tanh(scores_HT / softcap)
    if window is not None:
        scores_HT[:, : max(len(k_TGD) - window.size, 0)] = -torch.inf
    if sinks_H is not None:
        scores_HT = torch.cat([scores_HT, sinks_H.double()[:, None]], 1)
    probs_HT = scores_HT.softmax(-1)[:, : len(k_TGD)]
    return torch.einsum("ht,thd->hd", probs_HT, v_THD)


@examples(25)
@given(
    events=st.lists(st.tuples(st.sampled_from("jjbbls"), st.integers(0, 100)), min_size=3, max_size=25),
    seed=st.integers(0, 99),
    intel=st.booleans(),
    options=st.sampled_from(
        [
            {},
            {"window": Window(9)},
            {"window": Window(30)},
            {"softcap": 3.0},
            {"sinks_H": torch.linspace(-1, 1, HEADS)},
            {"window": Window(500)},
            {"window": Window(20), "sinks_H": torch.linspace(-1, 1, HEADS)},
        ]
    ),
)
def test_each_sequence_attends_to_its_own_keys_as_others_come_and_go(
    events: list[tuple[str, int]], seed: int, intel: bool, options: dict[str, object]
) -> None:
    """Some begin with the blocks of others."""
    with (
        mock.patch.object(contiguous_kv, "SUITS_MKL", intel),
        mock.patch.object(shared_prefixes, "MIN_SAVED_BYTES", 0),
    ):
        come_and_go(events, seed, options)


def come_and_go(events: list[tuple[str, int]], seed: int, options: dict[str, object]) -> None:
    comparison = CacheComparison(seed)
    names: list[str] = []
    for index, (event, argument) in enumerate(events):
        if event == "j":
            names += [f"{index}.{i}" for i in range(1 + argument % 7)]
            for name in names[-(1 + argument % 7) :]:
                comparison.join(name, 1 + argument)
        elif names and event == "b":
            other = names[argument % len(names)]
            names += [f"{index}.{i}" for i in range(1 + argument % 7)]
            for name in names[-(1 + argument % 7) :]:
                comparison.branch(name, other, 1 + argument % 11, 1 + argument % 5)
        elif names and event == "l":
            del names[:: 1 + argument % 3]
        elif len(names) > 1:  # the others skip a step and return, as after a preemption
            comparison.step(names[1::2], **options)
        if names:
            comparison.step(names, **options)


def test_many_of_a_length_have_slots_and_few_have_none() -> None:
    comparison = CacheComparison(0)
    for index in range(12):
        comparison.join(f"s{index}", 70 if index < 9 else 10)
    names = list(comparison.sequences)
    assert comparison.step(names) == 9
    assert comparison.step(names) == 9
    assert comparison.step(names[:3]) == 0
    assert comparison.step(names[:4]) == 4


def test_the_newest_position_is_seen_wherever_it_is() -> None:
    comparison = CacheComparison(2)
    for index in range(4):
        comparison.join(f"s{index}", contiguous_kv.LENGTH_STEP - 1)
    for _ in range(3):
        assert comparison.step(list(comparison.sequences)) == 4


def test_free_slots_are_compacted_and_used_again() -> None:
    comparison = CacheComparison(1)
    for index in range(40):
        comparison.join(f"s{index}", 20 + index % 5)
    names = list(comparison.sequences)
    comparison.step(names)
    (group,) = comparison.contiguous._groups.values()
    assert (group.num_slots, group.num_used) == (48, 48)
    comparison.step(names[-5:])
    assert (group.num_slots, group.num_used) == (48, 8)
    comparison.step(names[-5:])
    comparison.step(names)
    assert (group.num_slots, group.num_used) == (48, 48)


def test_slots_stay_within_their_memory() -> None:
    cells = position_bytes(KVCache(dict(enumerate(SHAPES)), BLOCK, CPU).members)
    comparison = CacheComparison(2, max_bytes=8 * CAPACITY_STEP * cells)
    for index in range(20):
        comparison.join(f"s{index}", 30)
    names = list(comparison.sequences)
    assert comparison.step(names[:8]) == 8
    assert comparison.step(names) == 0, "there is no room for so many"
    assert comparison.step(names[:8]) == 8
    for index in range(4):
        comparison.join(f"long{index}", 70)
    assert comparison.step([*names[:8], "long0", "long1", "long2", "long3"]) == 8
    assert comparison.step(["long0", "long1", "long2", "long3"]) == 0, "slots are taken in eights"
    assert comparison.contiguous.num_bytes <= 8 * CAPACITY_STEP * cells


def test_a_sequence_of_nans_leaves_its_neighbours_and_its_successor_alone() -> None:
    comparison = CacheComparison(3)
    for index in range(6):
        comparison.join(f"s{index}", 9)
    names = list(comparison.sequences)
    comparison.step(names)
    steps = comparison.contiguous.assign_slots(
        [DecodeRow(n, i, 10, comparison.blocks[n]) for i, n in enumerate(names)], 6
    )[0]
    q, k, v = torch.randn(6, HEADS, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 6)
    clean = steps[0].attend(0, q, k, v, scale=0.3)
    k[2], v[2] = torch.nan, torch.inf
    output = steps[0].attend(0, q, k, v, scale=0.3)
    assert output[2].isnan().all()
    neighbours = [0, 1, 3, 4, 5]
    assert torch.equal(output[neighbours], clean[neighbours])
    comparison.join("next", 5)  # in the slot that holds NaN
    remaining = [name for name in names if name != "s2"]
    for name in remaining:
        comparison.sequences[name] = [x[:9] for x in comparison.sequences[name]]
    comparison.step(["next", *remaining])


def branches(comparison: CacheComparison, num: int) -> list[str]:
    """Sequences that have their first 60 tokens in common."""
    comparison.join("s0", 60)
    names = [f"s{index}" for index in range(num)]
    for name in names[1:]:
        comparison.branch(name, "s0", 15, 1)
    return names


def test_a_beginning_that_many_share_is_stored_and_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "MIN_SAVED_BYTES", 0)
    comparison = CacheComparison(4)
    names = branches(comparison, 8)
    assert comparison.step(names) == 8
    prefix = shared_prefixes.count_bytes(comparison.cache.members, 60)
    cells = position_bytes(comparison.cache.members)
    assert comparison.contiguous.num_bytes == prefix + 8 * CAPACITY_STEP * cells
    for _ in range(5):
        assert comparison.step(names) == 8
    comparison.branch("late", "s3", 15, 3)
    assert comparison.step([*names, "late"]) == 9
    assert comparison.contiguous._prefixes.num_bytes == prefix, "one that comes later reads the same copy"
    comparison.step(names[:1])
    assert comparison.contiguous._prefixes.num_bytes == prefix
    comparison.join("other", 5)
    comparison.step(["other"])
    assert comparison.contiguous._prefixes.num_bytes == 0, "no sequence has it"


def test_beginnings_that_save_little_or_do_not_fit_are_no_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    few = CacheComparison(5)
    few.step(branches(few, 8))
    assert few.contiguous._prefixes.num_bytes == 0
    monkeypatch.setattr(shared_prefixes, "MIN_SAVED_BYTES", 0)
    tight = CacheComparison(5, max_bytes=1000)
    assert tight.step(branches(tight, 8)) == 0
    assert tight.contiguous.num_bytes == 0


def test_the_prefix_is_the_one_that_saves_most() -> None:
    def row(name: str, *blocks: int) -> DecodeRow:
        return DecodeRow(name, 0, BLOCK * len(blocks), blocks)

    system = (1, 2, 3)
    rows = [row("a", *system, 4, 5), row("b", *system, 4, 6), *(row(f"c{i}", *system, 10 + i) for i in range(6))]
    assert shared_prefixes.find_prefixes(rows, BLOCK, 0) == [(3, rows)]
    assert shared_prefixes.find_prefixes(rows, BLOCK, 7 * 3 * BLOCK) == []
    assert shared_prefixes.find_prefixes(rows[:2], BLOCK, 0) == [(4, rows[:2])]
    unfinished = [replace(r, position=3 * BLOCK + 1) for r in rows[:2]]
    assert shared_prefixes.find_prefixes(unfinished, BLOCK, 0) == [(3, unfinished)], "whole blocks alone"
    assert shared_prefixes.find_prefixes(rows[2:3], BLOCK, 0) == []


def test_nans_after_a_shared_beginning_stay_in_their_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "MIN_SAVED_BYTES", 0)
    comparison = CacheComparison(6)
    names = branches(comparison, 6)
    comparison.step(names)
    rows = [
        DecodeRow(name, index, len(comparison.sequences[name][0]), comparison.blocks[name])
        for index, name in enumerate(names)
    ]
    ((step,), _) = comparison.contiguous.assign_slots(rows, 6)
    assert step.prefix_rows
    q, k, v = torch.randn(6, HEADS, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 6)
    clean = step.attend(0, q, k, v, scale=0.3)
    q[2], k[4], v[4] = torch.nan, torch.nan, torch.inf
    output = step.attend(0, q, k, v, scale=0.3)
    assert output[[2, 4]].isnan().any(-1).all()
    assert torch.equal(output[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])


def test_slots_grow_in_steps_of_a_half() -> None:
    capacities = sorted({capacity_for(length, 16) for length in range(1, 1600)})
    assert capacities == [64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
    assert all(capacity_for(length, 16) >= length for length in range(1, 5000, 7))
    assert capacity_for(64, 16) == 64 and capacity_for(65, 16) == 128
    assert capacity_for(64, 24) == 72, "whole blocks"


@pytest.mark.parametrize("arch", ["qwen3", "gemma2", "gpt_oss"])
def test_answers_from_slots_are_those_of_each_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    monkeypatch.setattr(shared_prefixes, "MIN_SAVED_BYTES", 0)
    base = BaseModel.load(tiny_models.make(tmp_path, arch), device="cpu", dtype="float32")
    versions = {f"v{seed}": make_adapter(base, seed) for seed in range(2)}
    samples = [
        make_sample(
            f"r{index}",
            make_prompt(50 + index, index),
            replace(HOT, max_tokens=10 + 2 * index, seed=index),
            version_id=[None, "v0", "v1"][index % 3],
            num_samples=1 + 3 * (index % 2),
        )
        for index in range(6)
    ]
    read_prefixes = mock.Mock(side_effect=shared_prefixes.attend_prefixes)
    monkeypatch.setattr(contiguous_kv, "attend_prefixes", read_prefixes)
    results = run(LocalSampler(base, versions), *samples)
    assert read_prefixes.called
    monkeypatch.setattr(contiguous_kv, "MIN_GROUP_SIZE", 10**6)
    for sample in samples:
        assert_same(results[sample.request_id], sample_alone(base, sample, versions))


@pytest.mark.parametrize("min_saved", [0, 2**40])
@pytest.mark.parametrize("intel", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"window": Window(9)}, {"softcap": 3.0}, {"sinks_H": torch.linspace(-1, 1, HEADS)}]
)
def test_in_bfloat16_slots_are_as_exact_as_blocks(
    options: dict[str, Any], intel: bool, min_saved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contiguous_kv, "SUITS_MKL", intel)
    monkeypatch.setattr(shared_prefixes, "MIN_SAVED_BYTES", min_saved)
    shape = LayerShape(2, 64, 64, torch.bfloat16)
    cache = KVCache({0: shape}, 16, CPU)
    cache.resize(200)
    torch.manual_seed(0)
    num, length = 8, 100
    k, v = (torch.randn(num, length, 2, 64).bfloat16() for _ in range(2))
    q = (4 * torch.randn(num, 4, 64)).bfloat16()
    rows = []
    for index in range(num):
        blocks = list(range(1 + 8 * index, 9 + 8 * index))
        if index % 2:  # the same first 48 positions as the one before
            blocks[:3] = rows[-1].blocks[:3]
            k[index, :48], v[index, :48] = k[index - 1, :48], v[index - 1, :48]
        slots = torch.tensor([blocks[at // 16] * 16 + at % 16 for at in range(length - 1)])
        cache.write(0, slots, k[index, :-1], v[index, :-1])
        rows.append(SequenceRows(length - 1, length, blocks, index))
    expected = torch.stack([attention(q[i], k[i], v[i], **options) for i in range(num)])
    errors = []
    for contiguous in (None, ContiguousKV(cache, 2**30, CPU)):
        plan = PagedPlan(cache, rows, CPU, contiguous)
        output = plan.attend(0, q, k[:, -1], v[:, -1], scale=0.3, **options)
        errors.append(float((output.double() - expected).norm() / expected.norm()))
    assert errors[1] < max(1.2 * errors[0], 4e-3), errors
    assert np.isfinite(errors).all()
