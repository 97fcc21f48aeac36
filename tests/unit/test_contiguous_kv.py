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
from tinsmith.samplers.local import contiguous_kv
from tinsmith.samplers.local.contiguous_kv import CAPACITY_STEP, ContiguousKV, DecodeRow, capacity_for, position_bytes
from tinsmith.samplers.local.engine import LocalSampler
from tinsmith.samplers.local.kv_cache import KVCache, LayerShape
from tinsmith.samplers.local.paged_attention import PagedPlan, Rows

BLOCK = 4
CPU = torch.device("cpu")
HEADS = 4
SHAPES = (
    LayerShape(2, 8, 6, torch.float32),
    LayerShape(4, 5, 5, torch.float32),
    LayerShape(2, contiguous_kv.MIN_SWAPPED_DIM, 16, torch.float32),
)


class World:
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

    def slots(self, name: str, positions: range) -> list[int]:
        return [self.blocks[name][at // BLOCK] * BLOCK + at % BLOCK for at in positions]

    def random(self, length: int, shape: LayerShape) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = (length, shape.num_heads, shape.key_dim), (length, shape.num_heads, shape.value_dim)
        k, v = (torch.randn(size, generator=self.generator) for size in sizes)
        return k, v

    def step(self, names: list[str], **options: object) -> int:
        """Decode one token of each sequence and compare; returns how many had a slot."""
        rows = [Rows(len(s[0]), len(s[0]) + 1, self.blocks[n], n) for n, s in ((n, self.sequences[n]) for n in names)]
        plan = PagedPlan(self.cache, rows, CPU, self.contiguous)
        for layer, shape in enumerate(SHAPES):
            k, v = self.random(len(names), shape)
            q = torch.randn(len(names), HEADS, shape.key_dim, generator=self.generator)
            found = plan.attend(layer, q, k, v, scale=0.3, **options)  # pyright: ignore[reportArgumentType]
            for row, name in enumerate(names):
                own = self.sequences[name]
                own[2 * layer] = torch.cat([own[2 * layer], k[row : row + 1]])
                own[2 * layer + 1] = torch.cat([own[2 * layer + 1], v[row : row + 1]])
                expected = attention(q[row], own[2 * layer], own[2 * layer + 1], **options)  # pyright: ignore
                torch.testing.assert_close(found[row].double(), expected, atol=2e-5, rtol=1e-4)
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
    events=st.lists(st.tuples(st.sampled_from("jjls"), st.integers(0, 130)), min_size=3, max_size=25),
    seed=st.integers(0, 99),
    intel=st.booleans(),
    options=st.sampled_from(
        [
            {},
            {"window": Window(9)},
            {"softcap": 3.0},
            {"sinks_H": torch.linspace(-1, 1, HEADS)},
            {"window": Window(500)},
        ]
    ),
)
def test_each_sequence_attends_to_its_own_keys_as_others_come_and_go(
    events: list[tuple[str, int]], seed: int, intel: bool, options: dict[str, object]
) -> None:
    with mock.patch.object(contiguous_kv, "SUITS_MKL", intel):
        come_and_go(events, seed, options)


def come_and_go(events: list[tuple[str, int]], seed: int, options: dict[str, object]) -> None:
    world = World(seed)
    names: list[str] = []
    for number, (event, argument) in enumerate(events):
        if event == "j":
            names += [f"{number}.{i}" for i in range(1 + argument % 7)]
            for name in names[-(1 + argument % 7) :]:
                world.join(name, 1 + argument)
        elif names and event == "l":
            del names[:: 1 + argument % 3]
        elif len(names) > 1:  # the others skip a step and return, as after a preemption
            world.step(names[1::2], **options)
        if names:
            world.step(names, **options)


def test_many_of_a_length_have_slots_and_few_have_none() -> None:
    world = World(0)
    for number in range(12):
        world.join(f"s{number}", 70 if number < 9 else 10)
    names = list(world.sequences)
    assert world.step(names) == 9
    assert world.step(names) == 9
    assert world.step(names[:3]) == 0
    assert world.step(names[:4]) == 4


def test_the_newest_position_is_seen_wherever_it_is() -> None:
    world = World(2)
    for number in range(4):
        world.join(f"s{number}", contiguous_kv.LENGTH_STEP - 1)
    for _ in range(3):
        assert world.step(list(world.sequences)) == 4


def test_free_slots_are_compacted_and_used_again() -> None:
    world = World(1)
    for number in range(40):
        world.join(f"s{number}", 20 + number % 5)
    names = list(world.sequences)
    world.step(names)
    (group,) = world.contiguous._groups.values()
    assert (group.num_slots, group.num_used) == (48, 48)
    world.step(names[-5:])
    assert (group.num_slots, group.num_used) == (48, 8)
    world.step(names[-5:])
    world.step(names)
    assert (group.num_slots, group.num_used) == (48, 48)


def test_slots_stay_within_their_memory() -> None:
    cells = position_bytes(KVCache(dict(enumerate(SHAPES)), BLOCK, CPU).members)
    world = World(2, max_bytes=8 * CAPACITY_STEP * cells)
    for number in range(20):
        world.join(f"s{number}", 30)
    names = list(world.sequences)
    assert world.step(names[:8]) == 8
    assert world.step(names) == 0, "there is no room for so many"
    assert world.step(names[:8]) == 8
    for number in range(4):
        world.join(f"long{number}", 70)
    assert world.step([*names[:8], "long0", "long1", "long2", "long3"]) == 8
    assert world.step(["long0", "long1", "long2", "long3"]) == 0, "slots are taken in eights"
    assert world.contiguous.num_bytes <= 8 * CAPACITY_STEP * cells


def test_a_sequence_of_nans_leaves_its_neighbours_and_its_successor_alone() -> None:
    world = World(3)
    for number in range(6):
        world.join(f"s{number}", 9)
    names = list(world.sequences)
    world.step(names)
    steps = world.contiguous.place([DecodeRow(n, i, 10, world.blocks[n]) for i, n in enumerate(names)], 6)[0]
    q, k, v = torch.randn(6, HEADS, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 6)
    clean = steps[0].attend(0, q, k, v, scale=0.3)
    k[2], v[2] = torch.nan, torch.inf
    found = steps[0].attend(0, q, k, v, scale=0.3)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], clean[others])
    world.join("next", 5)  # in the slot that holds NaN
    remaining = [name for name in names if name != "s2"]
    for name in remaining:
        world.sequences[name] = [x[:9] for x in world.sequences[name]]
    world.step(["next", *remaining])


def test_slots_grow_in_steps_of_a_half() -> None:
    found = sorted({capacity_for(length, 16) for length in range(1, 1600)})
    assert found == [64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
    assert all(capacity_for(length, 16) >= length for length in range(1, 5000, 7))
    assert capacity_for(64, 16) == 64 and capacity_for(65, 16) == 128
    assert capacity_for(64, 24) == 72, "whole blocks"


@pytest.mark.parametrize("arch", ["qwen3", "gemma2"])
def test_answers_from_slots_are_those_of_each_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    base = BaseModel.load(tiny_models.make(tmp_path, arch), device="cpu", dtype="float32")
    versions = {f"v{seed}": make_adapter(base, seed) for seed in range(2)}
    samples = [
        make_sample(
            f"r{number}",
            make_prompt(50 + number, number),
            replace(HOT, max_tokens=10 + 2 * number, seed=number),
            version_id=[None, "v0", "v1"][number % 3],
            num_samples=1 + number % 2,
        )
        for number in range(6)
    ]
    found = run(LocalSampler(base, versions), *samples)
    monkeypatch.setattr(contiguous_kv, "MIN_GROUP_SIZE", 10**6)
    for sample in samples:
        assert_same(found[sample.request_id], sample_alone(base, sample, versions))


@pytest.mark.parametrize("intel", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"window": Window(9)}, {"softcap": 3.0}, {"sinks_H": torch.linspace(-1, 1, HEADS)}]
)
def test_in_bfloat16_slots_are_as_exact_as_blocks(
    options: dict[str, Any], intel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contiguous_kv, "SUITS_MKL", intel)
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
        slots = torch.tensor([blocks[at // 16] * 16 + at % 16 for at in range(length - 1)])
        cache.write(0, slots, k[index, :-1], v[index, :-1])
        rows.append(Rows(length - 1, length, blocks, index))
    expected = torch.stack([attention(q[i], k[i], v[i], **options) for i in range(num)])
    errors = []
    for contiguous in (None, ContiguousKV(cache, 2**30, CPU)):
        plan = PagedPlan(cache, rows, CPU, contiguous)
        found = plan.attend(0, q, k[:, -1], v[:, -1], scale=0.3, **options)
        errors.append(float((found.double() - expected).norm() / expected.norm()))
    assert errors[1] < max(1.2 * errors[0], 4e-3), errors
    assert np.isfinite(errors).all()
