"""Which rank holds and steps which element of an adapter: each of the whole adapter once, whatever the degrees are."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.backends.distributed.placement import Cut, list_regions
from tinsmith.backends.torch.adapters import ExpertStack, Layout, Target, initialise_weights, select_held
from tinsmith.plan.degrees import Degrees

EXPERTS = 8
TARGETS = [
    Target("0.q", "attn", 24, 40),
    Target("0.w1", "mlp", 24, 12, ExpertStack(EXPERTS, "A", interleaved=False)),
    Target("0.w3", "mlp", 24, 12, ExpertStack(EXPERTS, "A", interleaved=False)),
    Target("0.w2", "mlp", 12, 24, ExpertStack(EXPERTS, "B", interleaved=False)),
    Target("1.q", "attn", 24, 40),
    Target("1.w1", "mlp", 24, 20, ExpertStack(EXPERTS, "A", interleaved=False)),
    Target("1.w2", "mlp", 20, 24, ExpertStack(EXPERTS, "B", interleaved=False)),
    Target("head", "unembed", 24, 101),
]

DEGREES = [
    Degrees(3),
    Degrees(4, experts=2),
    Degrees(4, experts=4),
    Degrees(2, 2, experts=4),
    Degrees(2, context=2, experts=2),
    Degrees(2, experts=2, pipeline=2),
    Degrees(4, experts=2, pipeline=2),
    Degrees(1, 2, experts=2, pipeline=2),
]


def layout_of(degrees: Degrees, rank: int, lora_rank: int) -> Layout:
    """Layer `n` is on stage `n` of two."""
    if degrees.experts == 1:
        return Layout.of(lora_rank, TARGETS)
    group = next(ranks for ranks in degrees.expert_groups() if rank in ranks)
    size, stage = EXPERTS // degrees.experts, rank % degrees.group_size // degrees.tensor
    index = group.index(rank)
    held = range(index * size, (index + 1) * size)
    return Layout.of(
        lora_rank,
        [t.hold(held if degrees.pipeline == 1 or t.name.startswith(str(stage)) else range(0)) for t in TARGETS],
    )


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@given(lora_rank=st.integers(1, 9), cut=st.sampled_from(list(Cut)))
def test_each_element_is_stepped_once_by_a_rank_that_holds_it(degrees: Degrees, lora_rank: int, cut: Cut) -> None:
    whole = Layout.of(lora_rank, TARGETS)
    numbers_P = torch.arange(1, whole.numel + 1, dtype=torch.float64)
    for gap in whole.gaps:
        numbers_P[gap] = 0
    stepped: list[torch.Tensor] = []
    contents: dict[tuple[int, ...], torch.Tensor] = {}
    for rank in range(degrees.devices):
        layout = layout_of(degrees, rank, lora_rank)
        held_P = select_held(layout, numbers_P)
        regions = list_regions(layout, degrees, rank)
        assert [regions[0].start, *(region.stop for region in regions)][-1] == layout.numel
        assert all(first.stop == second.start for first, second in pairwise(regions))
        for region in regions:
            region_P = held_P[region.start : region.stop]
            assert rank in region.holders and contents.setdefault(region.holders, region_P).equal(region_P)
            stepped.append(held_P[dict(region.cut(layout, cut))[rank]])
    everything = torch.cat(stepped)
    assert everything[everything > 0].sort().values.equal(numbers_P[numbers_P > 0])


@given(num_holders=st.integers(1, 9), lora_rank=st.integers(1, 9))
def test_matrices_are_dealt_whole_and_evenly(num_holders: int, lora_rank: int) -> None:
    layout, degrees = Layout.of(lora_rank, TARGETS), Degrees(num_holders)
    (region,) = list_regions(layout, degrees, 0)
    starts = [
        stack.start + index * stack.strides[0]
        for stack in layout.stacks_in(0, layout.numel)
        for index in range(stack.shape[0])
    ]
    assert len(starts) == len(set(starts)) == 2 * 3 + 5 * EXPERTS + 5
    sizes = [stop - start for start, stop in pairwise([*starts, layout.numel])]
    for _, span in region.cut(layout, Cut.MATRICES):
        assert span.start == layout.numel or span.start in starts
        assert span.stop == layout.numel or span.stop in starts
        assert span.stop - span.start < layout.numel / num_holders + max(sizes) + 1


@given(start=st.integers(0, 900), size=st.integers(0, 900))
def test_stacks_of_adjacent_ranges_are_all_matrices(start: int, size: int) -> None:
    layout = Layout.of(2, TARGETS)
    bounds = [0, start, min(start + size, layout.numel), layout.numel]
    parts = [stack for first, stop in pairwise(bounds) for stack in layout.stacks_in(first, stop)]
    whole = list(layout.stacks_in(0, layout.numel))
    assert sum(stack.shape[0] for stack in parts) == sum(stack.shape[0] for stack in whole)
    assert sum(stack.shape[0] * stack.strides[0] for stack in parts) == layout.numel - sum(
        gap.stop - gap.start for gap in layout.gaps
    )


@pytest.mark.parametrize("held", [range(0), range(2, 4), range(EXPERTS)])
def test_weights_of_some_experts_start_as_they_do_among_all(held: range) -> None:
    whole = Layout.of(4, TARGETS)
    part = Layout.of(4, [target.hold(held) for target in TARGETS])
    expected = select_held(part, initialise_weights(whole, 7, torch.device("cpu")))
    assert initialise_weights(part, 7, torch.device("cpu")).equal(expected)
    views = part.views(expected)
    a_2rI = whole.views(initialise_weights(whole, 7, torch.device("cpu")))["0.w2"][0][held.start : held.stop]
    assert views["0.w2"][0].equal(a_2rI) and views["0.w1"][1].shape == (len(held), 12, 4)
    assert part.num_common == whole.num_common and part.whole == whole
