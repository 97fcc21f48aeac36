"""Which ranks hold which part of an adapter, and which of them step it.

A rank holds the matrices of all targets, but of those that differ between routed experts only the ones of experts that
it has (`adapters.ExpertStack.local`). Its buffer has two regions: what all ranks hold, and what only the ranks with the
same experts hold. The holders of a region have equal weights, and addends of one gradient.

Each holder steps a part of the region: the gradient is summed there, and only there it is stored, with the moments, as
in the second stage of ZeRO (arXiv 1910.02054). After a step each holder sends its elements of the weights to the
others. Each element of an adapter is stepped by one rank, so the squares of the ranks' norms add up. Files have all
elements, whatever the degrees are: rank 0 collects what it lacks first.

Shapes: P elements that a rank holds, p of them that it steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.backends.distributed.collectives import Ranks
from tinsmith.backends.torch.adapters import Layout, view_matrix
from tinsmith.plan.degrees import Degrees

ALIGNMENT = 64
"""Parts of elements begin at multiples of this, so that vector instructions take the same elements together."""


class Cut(Enum):
    """How a region is cut among its holders."""

    ELEMENTS = auto()
    """Equal parts; of a few elements the last ranks have none."""

    MATRICES = auto()
    """Whole matrices, in parts as equal as these allow."""

    FIRST = auto()
    """The first holder has it all."""


class Region(NamedTuple):
    """Elements of a rank's buffer, and the ranks that hold them."""

    start: int
    stop: int
    holders: tuple[int, ...]

    def cut(self, layout: Layout, cut: Cut) -> Iterator[tuple[int, slice]]:
        """Each holder with its elements."""
        count = len(self.holders)
        if cut is Cut.FIRST:
            bounds = [self.start, *[self.stop] * count]
        elif cut is Cut.ELEMENTS:
            size = -(-(self.stop - self.start) // (count * ALIGNMENT)) * ALIGNMENT
            bounds = [min(self.start + index * size, self.stop) for index in range(count + 1)]
        else:
            starts = [
                stack.start + index * stack.strides[0]
                for stack in layout.stacks_in(self.start, self.stop)
                for index in range(stack.shape[0])
            ]
            ideal = [self.start + index * (self.stop - self.start) // count for index in range(1, count)]
            inner = [starts[index] if (index := bisect_left(starts, x)) < len(starts) else self.stop for x in ideal]
            bounds = [self.start, *inner, self.stop]
        yield from zip(self.holders, (slice(*bound) for bound in pairwise(bounds)), strict=True)


def list_regions(layout: Layout, degrees: Degrees, rank: int) -> list[Region]:
    """The regions of the buffer of a rank with this layout: first the one that all ranks hold."""
    everyone = tuple(range(degrees.devices))
    if degrees.experts == 1:
        return [Region(0, layout.numel, everyone)]
    regions = [
        Region(0, layout.num_common, everyone),
        Region(layout.num_common, layout.numel, degrees.expert_holders(rank)),
    ]
    return [region for region in regions if region.start < region.stop]


class RankShare:
    """What this rank steps of an adapter: a `torch.adapters.SteppedElements`."""

    def __init__(self, ranks: Ranks, layout: Layout, cut: Cut) -> None:
        self._ranks = ranks
        self._layout = layout
        self.cut = cut
        self._parts = [
            (region.holders, list(region.cut(layout, cut)))
            for region in list_regions(layout, ranks.degrees, ranks.rank)
        ]
        self.spans = [dict(parts)[ranks.rank] for _, parts in self._parts]

    @torch.no_grad()
    def reduce(self, gradient_P: Tensor) -> None:
        """Replace this rank's elements by the sums over their holders; the others are undefined then."""
        for holders, parts in self._parts:
            for rank, span in parts:
                self._ranks.sum_to(gradient_P[span], rank, holders)

    @torch.no_grad()
    def spread(self, x_P: Tensor) -> None:
        for holders, parts in self._parts:
            for rank, span in parts:
                self._ranks.broadcast_from(x_P[span], rank, holders)


class Placement:
    """The parts of all ranks. `experts_by_rank`: the experts that each rank has, by target."""

    def __init__(self, ranks: Ranks, experts_by_rank: Sequence[Mapping[str, range]]) -> None:
        self._ranks = ranks
        self._experts_by_rank = experts_by_rank

    def collect(self, layout: Layout, parts: Sequence[Tensor], cut: Cut, buffers: Sequence[Tensor]) -> None:
        """On rank 0, fill buffers of the whole layout, in host memory, with the parts [p] that all ranks have by this
        cut. Takes device memory for one part. The others pass no buffers.
        """
        ranks = self._ranks
        spans = RankShare(ranks, layout, cut).spans
        split_parts = [part_p.split([span.stop - span.start for span in spans]) for part_p in parts]
        if ranks.rank == 0:
            for shards, whole_P in zip(split_parts, buffers, strict=True):
                self._assemble(layout, shards, cut, whole_P)
            return
        for shard in (shard for shards in split_parts for shard in shards if len(shard)):
            ranks.send_to_first(shard.to(ranks.device))

    def _assemble(self, layout: Layout, shards: Sequence[Tensor], cut: Cut, whole_P: Tensor) -> None:
        """`shards`: of rank 0, by region."""
        local_shards, assembled = iter(shards), set[tuple[int, ...]]()
        for rank in range(self._ranks.degrees.devices):
            rank_layout = self._layout_of(rank, layout)
            for region in list_regions(rank_layout, self._ranks.degrees, rank):
                if region.holders in assembled:
                    continue
                assembled.add(region.holders)
                region_P = whole_P if region.start == 0 else whole_P.new_empty(region.stop - region.start)
                for holder, span in region.cut(rank_layout, cut):
                    destination = slice(span.start - region.start, span.stop - region.start)
                    if holder == 0:
                        region_P[destination] = next(local_shards).cpu()
                    elif span.start < span.stop:
                        region_P[destination] = self._receive(span.stop - span.start, whole_P.dtype, holder)
                if region.start:
                    _place_experts(rank_layout, region, region_P, whole_P)

    def _receive(self, num_elements: int, dtype: torch.dtype, rank: int) -> Tensor:
        received_p = torch.empty(num_elements, dtype=dtype, device=self._ranks.device)
        return self._ranks.receive_from(received_p, rank).cpu()

    def _layout_of(self, rank: int, layout: Layout) -> Layout:
        """The layout of a rank, from that of any."""
        if self._ranks.degrees.experts == 1:
            return layout
        local_experts = self._experts_by_rank[rank]
        return Layout.of(
            layout.rank, (target.hold(local_experts.get(target.name, range(0))) for target in layout.targets)
        )


def _place_experts(layout: Layout, region: Region, region_P: Tensor, whole_P: Tensor) -> None:
    """Copy the matrices of a region's experts to where they are in a buffer of the whole layout."""
    destinations = layout.whole.views(whole_P)
    for target in layout.targets:
        for matrix, span in enumerate(layout.spans[target.name]):
            if target.differs_by_expert(matrix) and span.shape[0]:
                source = view_matrix(region_P, span._replace(start=span.start - region.start))
                target.select(matrix, destinations[target.name][matrix]).copy_(source)
