"""What adapters add to linears that read the same rows: their low-rank products, forwards and backwards.

A `Site` is one linear, or several whose outputs lie beside each other: queries, keys and values, say. The A's of a site
are one matrix where an adapter's layout has them side by side. Rows of an adapter meet that adapter's matrices only:
short segments of one length are one batched product, whose elements never meet, and all others are products of their
own. Gradients of A and B are added straight into the adapters' own buffers.

Shapes: T rows of a packed batch, n rows of a segment, S segments of a run, I inputs, O outputs, r rank, R inner rows of
a site (r for each of its linears that the adapter has).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.backends.torch.adapters import Adapter, Block, Member, Shares, Target, rows_from
from tinsmith.backends.torch.products import add_product_, add_products_, column_product, column_products, product

BATCHED_ROWS = 64
"""Segments of at most this many rows, if neighbours are of equal length and layout, are batched."""

BATCHED_NUMBERS = 1 << 15
"""But in float32 only where no matrix has more numbers: larger products are fast enough one by one, and a batched one
needs copies of all matrices beside each other. In bfloat16 a batched product is twice as fast whatever its size.
"""


MOST_KEPT, MOST_KEPT_BYTES = 4, 2**28
"""Stacks of a site that sampling keeps from step to step, and the bytes of the adapters of each."""

Stacks = tuple[list[tuple[Block, Tensor]], list[tuple[Member, Tensor]]]


class Site:
    """Linears that read the same rows and whose outputs lie beside each other, and what adapters add to them."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._names = tuple(target.name for target in targets)
        ends = accumulate((target.out_features for target in targets), initial=0)
        self._columns = [slice(*span) for span in pairwise(ends)]
        self._kept: OrderedDict[tuple[int, ...], Stacks | None] = OrderedDict()

    def work(self, routing: Routing) -> list[Run]:
        """The runs whose adapters have any of these linears; short ones together where that is faster."""
        if (known := routing.work.get(self)) is not None:
            return known
        work = routing.work[self] = []
        for run in routing.runs:
            if run.adapters[0].compute.keys().isdisjoint(self._names):
                continue
            work += [run] if self._is_batched(run) else run.apart()
        return work

    def reference_(self, y_TO: Tensor, x_TI: Tensor, routing: Routing) -> None:
        """Add to y what each segment's adapter adds, one product after another: the oracle of `forward_`."""
        for start, stop, adapter in routing.segments:
            for name, columns in zip(self._names, self._columns, strict=True):
                if adapter is not None and name in adapter.compute:
                    a_rI, b_Or = adapter.compute[name]
                    y_TO[start:stop, columns] += adapter.scale * (x_TI[start:stop] @ a_rI.t() @ b_Or.t())

    def forward_(self, y_TO: Tensor, x_TI: Tensor, work: Sequence[Run]) -> list[Tensor]:
        """Add to y; returns each run's scale * x A^T [n, R] or [S, n, R], which backward needs again."""
        inner = []
        for run in work:
            own = self._alone_forward_ if len(run.adapters) == 1 else self._together_forward_
            inner.append(own(y_TO, x_TI, run))
        return inner

    def backward_(
        self,
        grad_TI: Tensor | None,
        grad_TO: Tensor,
        x_TI: Tensor,
        work: Sequence[Run],
        inner: Sequence[Tensor],
    ) -> None:
        """Add to the gradient of x, if there is one, and to the adapters' own where these exist."""
        for run, u in zip(work, inner, strict=True):
            own = self._alone_backward_ if len(run.adapters) == 1 else self._together_backward_
            own(grad_TI, grad_TO, x_TI, run, u)

    def _alone_forward_(self, y_TO: Tensor, x_TI: Tensor, run: Run) -> Tensor:
        (adapter,), rows = run.adapters, slice(run.start, run.stop)
        shares = self._shares(adapter)
        u_nR = _beside([product(x_TI[rows], block.a_RI.t(), x_TI.dtype) for block in shares.blocks], adapter.scale)
        for _, columns, ranks, b_Or in shares.members:
            add_product_(y_TO[rows, columns], u_nR[:, ranks], b_Or.t(), 1.0)
        return u_nR

    def _alone_backward_(self, grad_TI: Tensor | None, grad_TO: Tensor, x_TI: Tensor, run: Run, u_nR: Tensor) -> None:
        (adapter,), rows = run.adapters, slice(run.start, run.stop)
        shares, grad_nO = self._shares(adapter), grad_TO[rows]
        grads = [product(grad_nO[:, m.columns], m.b_Or, grad_nO.dtype) for m in shares.members]
        grad_nR = _beside(grads, adapter.scale)
        if adapter.gradients is not None:
            # Every linear's inner rows with every linear's outputs: a few large products beat the right ones in strips.
            found_OR = column_product(grad_nO, u_nR)
            for name, columns, ranks, _ in shares.members:
                adapter.gradients[name][1].add_(found_OR[columns, ranks])
            for block in shares.blocks:
                add_product_(block.gradient(adapter), grad_nR[:, block.ranks].t(), x_TI[rows], 1.0)
        if grad_TI is not None:
            for _, ranks, a_RI in shares.blocks:
                add_product_(grad_TI[rows], grad_nR[:, ranks], a_RI, 1.0)

    def _together_forward_(self, y_TO: Tensor, x_TI: Tensor, run: Run) -> Tensor:
        blocks, members = self._stacks(run)
        x_SnI, y_SnO = run.rows(x_TI), run.rows(y_TO)
        u_SnR = _beside([torch.bmm(x_SnI, a_SRI.mT) for _, a_SRI in blocks], run.adapters[0].scale)
        for first, b_SOr in members:
            add_products_(y_SnO[..., first.columns], u_SnR[..., first.ranks], b_SOr.mT)
        return u_SnR

    def _together_backward_(
        self, grad_TI: Tensor | None, grad_TO: Tensor, x_TI: Tensor, run: Run, u_SnR: Tensor
    ) -> None:
        blocks, members = self._stacks(run)
        x_SnI, grad_SnO = run.rows(x_TI), run.rows(grad_TO)
        grads_SnO = [_without_gaps(grad_SnO[..., first.columns]) for first, _ in members]
        grads = [torch.bmm(own_SnO, b_SOr) for own_SnO, (_, b_SOr) in zip(grads_SnO, members, strict=True)]
        grad_SnR = _beside(grads, run.adapters[0].scale)
        for own_SnO, (first, _) in zip(grads_SnO, members, strict=True):
            found_SOr = column_products(own_SnO, _without_gaps(u_SnR[..., first.ranks]))
            for adapter, found_Or in zip(run.adapters, found_SOr.unbind(), strict=True):
                if adapter.gradients is not None:
                    adapter.gradients[first.name][1].add_(found_Or)
        for first, a_SRI in blocks:
            found_SRI = column_products(grad_SnR[..., first.ranks], x_SnI)
            for adapter, found_RI in zip(run.adapters, found_SRI.unbind(), strict=True):
                if adapter.gradients is not None:
                    first.gradient(adapter).add_(found_RI)
            if grad_TI is not None:
                add_products_(run.rows(grad_TI), grad_SnR[..., first.ranks], a_SRI)

    def _stacks(self, run: Run) -> Stacks:
        """Each block's A's and each member's B's as one tensor; the layouts, and so the shares, are alike."""
        if (found := run.stacks.get(self)) is None:
            found = run.stacks[self] = (self._kept.get(run.versions) if _is_sampling() else None) or self._stacked(run)
            if _is_sampling():
                self._kept[run.versions] = found
        return found

    def _stacked(self, run: Run) -> Stacks:
        shares = [self._shares(adapter) for adapter in run.adapters]
        blocks = zip(*(share.blocks for share in shares), strict=True)
        members = zip(*(share.members for share in shares), strict=True)
        return (
            [(some[0], torch.stack([block.a_RI for block in some])) for some in blocks],
            [(some[0], torch.stack([member.b_Or for member in some])) for some in members],
        )

    def _is_worth_stacking(self, run: Run) -> bool:
        """In sampling: whether these adapters met here lately, so that their stack serves many steps."""
        if sum(adapter.compute_P.nbytes for adapter in run.adapters) > MOST_KEPT_BYTES:
            return False
        known = run.versions in self._kept
        self._kept.setdefault(run.versions, None)
        self._kept.move_to_end(run.versions)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return known

    def _is_batched(self, run: Run) -> bool:
        if len(run.adapters) == 1 or run.length > BATCHED_ROWS:
            return False
        if _is_sampling() and not self._is_worth_stacking(run):
            return False
        blocks, members = self._shares(run.adapters[0])
        largest = max(*(block.a_RI.numel() for block in blocks), *(member.b_Or.numel() for member in members))
        return largest <= BATCHED_NUMBERS or blocks[0].a_RI.dtype == torch.bfloat16

    def _shares(self, adapter: Adapter) -> Shares:
        if self not in adapter.shares:
            adapter.shares[self] = self._shares_of(adapter)
        return adapter.shares[self]

    def _shares_of(self, adapter: Adapter) -> Shares:
        blocks: list[Block] = []
        members: list[Member] = []
        end = 0
        for name, columns in zip(self._names, self._columns, strict=True):
            if name not in adapter.compute:
                continue
            a_rI, b_Or = adapter.compute[name]
            ranks = slice(end, end := end + len(a_rI))
            members.append(Member(name, columns, ranks, b_Or))
            if blocks and blocks[-1].a_RI.data_ptr() + blocks[-1].a_RI.nbytes == a_rI.data_ptr():
                names, before, above_RI = blocks.pop()
                joined_RI = rows_from(above_RI, len(above_RI) + len(a_rI))
                blocks.append(Block((*names, name), slice(before.start, end), joined_RI))
            else:
                blocks.append(Block((name,), ranks, a_rI))
        return Shares(tuple(blocks), tuple(members))


def _without_gaps(x: Tensor) -> Tensor:
    """Batched products of matrices with gaps take four times as long in bfloat16, in float32 no longer."""
    return x.contiguous() if x.dtype == torch.bfloat16 else x


def _beside(parts: Sequence[Tensor], scale: float) -> Tensor:
    joined = parts[0] if len(parts) == 1 else torch.cat(tuple(parts), -1)
    return joined if scale == 1.0 else joined.mul_(scale)


class Segment(NamedTuple):
    """Rows start..stop of a packed batch, and whose they are; None is the base model."""

    start: int
    stop: int
    adapter: Adapter | None


class Run:
    """Segments of adapters of one layout, of `length` rows each, one after the other from row `start`.

    `stacks` keeps what sites made of their matrices, for as long as the micro-batch lasts.
    """

    __slots__ = ("adapters", "length", "stacks", "start")

    def __init__(self, start: int, length: int, adapters: list[Adapter]) -> None:
        self.start = start
        self.length = length
        self.adapters = adapters
        self.stacks: dict[Site, Stacks] = {}

    @property
    def versions(self) -> tuple[int, ...]:
        """Of the adapters' weights."""
        return tuple(adapter.version for adapter in self.adapters)

    @property
    def stop(self) -> int:
        return self.start + self.length * len(self.adapters)

    def takes(self, start: int, length: int, adapter: Adapter) -> bool:
        return start == self.stop and length == self.length and adapter.layout is self.adapters[0].layout

    def rows(self, x_TI: Tensor) -> Tensor:
        """[S, n, I]"""
        own = x_TI if self.stop - self.start == len(x_TI) else x_TI[self.start : self.stop]
        return own.view(len(self.adapters), self.length, -1)

    def apart(self) -> list[Run]:
        starts = range(self.start, self.stop, self.length)
        return [Run(start, self.length, [adapter]) for start, adapter in zip(starts, self.adapters, strict=True)]


class Routing:
    """Contiguous segments that cover the rows [0, T) of a packed batch. Immutable.

    `runs` are the same segments, but for those of the base model, beside the neighbours that could join them. `work`
    keeps what each site has found to do.
    """

    __slots__ = ("_runs", "_spread", "num_rows", "segments", "work")

    def __init__(self, segments: Sequence[Segment]) -> None:
        end = 0
        for segment in segments:
            if segment.start != end or segment.stop <= segment.start:
                raise ValueError(f"segment {segment.start}..{segment.stop} does not continue at row {end}")
            end = segment.stop
        self.segments = tuple(segments)
        self._runs: list[Run] | None = None
        self._spread: dict[tuple[tuple[int, ...], int], Routing] = {}
        self.work: dict[Site, list[Run]] = {}
        self.num_rows = end

    @property
    def runs(self) -> list[Run]:
        if self._runs is None:
            self._runs = _runs(self.segments)
        return self._runs

    @classmethod
    def of(cls, adapters: Iterable[Adapter | None], lengths: Iterable[int]) -> Routing:
        """Rows of consecutive sequences; neighbours of one adapter become one segment."""
        segments: list[Segment] = []
        end = 0
        for adapter, length in zip(adapters, lengths, strict=True):
            if segments and segments[-1].adapter is adapter:
                segments[-1] = Segment(segments[-1].start, end + length, adapter)
            else:
                segments.append(Segment(end, end + length, adapter))
            end += length
        return cls(segments)

    def only(self, rows: Sequence[int]) -> Routing:
        """The routing of these rows alone, which ascend, numbered from 0."""
        bounds = [bisect_left(rows, segment.stop) for segment in self.segments]
        counts = [stop - start for start, stop in zip([0, *bounds], bounds, strict=False)]
        kept = [(segment.adapter, count) for segment, count in zip(self.segments, counts, strict=True) if count]
        return Routing.of((adapter for adapter, _ in kept), (count for _, count in kept))

    def spread(self, starts: tuple[int, ...], length: int) -> Routing:
        """The routing of sequences that begin at these rows, side by side and each of `length` rows."""
        if (found := self._spread.get((starts, length))) is None:
            stops = [segment.stop for segment in self.segments]
            adapters = [self.segments[bisect_right(stops, start)].adapter for start in starts]
            found = self._spread[starts, length] = Routing.of(adapters, [length] * len(starts))
        return found

    def slice(self, start: int, stop: int) -> Routing:
        """The routing of rows start..stop alone, numbered from 0."""
        return Routing(
            [
                Segment(max(segment.start, start) - start, min(segment.stop, stop) - start, segment.adapter)
                for segment in self.segments
                if segment.start < stop and segment.stop > start
            ]
        )


def _is_sampling() -> bool:
    return torch.is_inference_mode_enabled()


def _runs(segments: Iterable[Segment]) -> list[Run]:
    """Neighbours of equal length and layout together."""
    runs: list[Run] = []
    for start, stop, adapter in segments:
        if adapter is None:
            continue
        if runs and runs[-1].takes(start, stop - start, adapter):
            runs[-1].adapters.append(adapter)
        else:
            runs.append(Run(start, stop - start, [adapter]))
    return runs
