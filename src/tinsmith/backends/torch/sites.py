"""What adapters add to linears that read the same rows: their low-rank products, forwards and backwards.

A `Site` is one linear, or several whose outputs lie beside each other: queries, keys and values, say. The A's of a site
are one matrix where an adapter's layout has them side by side. Rows of an adapter meet that adapter's matrices only:
short segments of one length are one batched product, whose elements never meet, and all others are products of their
own. Gradients of A and B are added straight into the adapters' own buffers.

Shapes: T rows of a packed batch, n rows of a segment, S segments of a run, I inputs, O outputs, r rank, R inner rows of
a site (r for each of its linears that the adapter has).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tinsmith.backends.torch import stretches
from tinsmith.backends.torch.products import add_product_, column_product, column_products, product
from tinsmith.backends.torch.stretches import Stretch

if TYPE_CHECKING:
    from tinsmith.backends.torch.lora import Adapter, Routing, Run, Target

BATCHED_ROWS = 64
"""Segments of at most this many rows, if neighbours are of equal length and layout, are batched."""

BATCHED_NUMBERS = 1 << 15
"""But only where no matrix has more numbers: larger products are fast enough one by one, and a batched one needs
copies of all matrices beside each other.
"""


class Member(NamedTuple):
    """One linear's share of an adapter at a site: its columns of the outputs and of the inner rows, and its B."""

    name: str
    columns: slice
    ranks: slice
    b_Or: Tensor


class Block(NamedTuple):
    """A's that lie side by side in the layout, as one matrix: all of a site's, unless others are in between."""

    name: str  # of the first
    ranks: slice
    a_RI: Tensor


class Shares(NamedTuple):
    """What an adapter has at a site."""

    blocks: tuple[Block, ...]
    members: tuple[Member, ...]


Stacks = tuple[list[tuple[Block, Tensor]], list[tuple[Member, Tensor]]]


class Site:
    """Linears that read the same rows and whose outputs lie beside each other, and what adapters add to them."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._names = tuple(target.name for target in targets)
        ends = accumulate((target.out_features for target in targets), initial=0)
        self._columns = [slice(*span) for span in pairwise(ends)]

    def work(self, routing: Routing) -> list[Run | Stretch]:
        """The runs whose adapters have any of these linears; short ones together where that is faster."""
        work: list[Run | Stretch] = []
        for run in routing.stretches:
            if run.adapters[0].compute.keys().isdisjoint(self._names):
                continue
            if isinstance(run, Stretch):
                work.append(run)
                continue
            alone = len(run.adapters) == 1 or run.length > BATCHED_ROWS or self._largest(run) > BATCHED_NUMBERS
            work += run.apart() if alone else [run]
        return work

    def forward_(self, y_TO: Tensor, x_TI: Tensor, work: Sequence[Run | Stretch]) -> list[Tensor]:
        """Add to y; returns each run's scale * x A^T [n, R] or [S, n, R], which backward needs again."""
        inner = []
        for run in work:
            if isinstance(run, Stretch):
                inner.append(stretches.forward_(y_TO, x_TI, run, self._stacks(run)))
                continue
            own = self._alone_forward_ if len(run.adapters) == 1 else self._together_forward_
            inner.append(own(y_TO, x_TI, run))
        return inner

    def backward_(
        self,
        grad_TI: Tensor | None,
        grad_TO: Tensor,
        x_TI: Tensor,
        work: Sequence[Run | Stretch],
        inner: Sequence[Tensor],
    ) -> None:
        """Add to the gradient of x, if there is one, and to the adapters' own where these exist."""
        for run, u in zip(work, inner, strict=True):
            if isinstance(run, Stretch):
                stretches.backward_(grad_TI, grad_TO, x_TI, run, self._stacks(run), u)
                continue
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
            for name, ranks, a_RI in shares.blocks:
                own_RI = _rows_from(adapter.gradients[name][0], len(a_RI))
                add_product_(own_RI, grad_nR[:, ranks].t(), x_TI[rows], 1.0)
        if grad_TI is not None:
            for _, ranks, a_RI in shares.blocks:
                add_product_(grad_TI[rows], grad_nR[:, ranks], a_RI, 1.0)

    def _together_forward_(self, y_TO: Tensor, x_TI: Tensor, run: Run) -> Tensor:
        blocks, members = self._stacks(run)
        x_SnI, y_SnO = run.rows(x_TI), run.rows(y_TO)
        u_SnR = _beside([torch.bmm(x_SnI, a_SRI.mT) for _, a_SRI in blocks], run.adapters[0].scale)
        for first, b_SOr in members:
            y_SnO[..., first.columns] += torch.bmm(u_SnR[..., first.ranks], b_SOr.mT)
        return u_SnR

    def _together_backward_(
        self, grad_TI: Tensor | None, grad_TO: Tensor, x_TI: Tensor, run: Run, u_SnR: Tensor
    ) -> None:
        blocks, members = self._stacks(run)
        x_SnI, grad_SnO = run.rows(x_TI), run.rows(grad_TO)
        grads = [torch.bmm(grad_SnO[..., first.columns], b_SOr) for first, b_SOr in members]
        grad_SnR = _beside(grads, run.adapters[0].scale)
        for first, _ in members:
            found_SOr = column_products(grad_SnO[..., first.columns], u_SnR[..., first.ranks])
            for adapter, found_Or in zip(run.adapters, found_SOr, strict=True):
                if adapter.gradients is not None:
                    adapter.gradients[first.name][1].add_(found_Or)
        for first, a_SRI in blocks:
            found_SRI = column_products(grad_SnR[..., first.ranks], x_SnI)
            for adapter, found_RI in zip(run.adapters, found_SRI, strict=True):
                if adapter.gradients is not None:
                    _rows_from(adapter.gradients[first.name][0], len(found_RI)).add_(found_RI)
            if grad_TI is not None:
                run.rows(grad_TI).add_(torch.bmm(grad_SnR[..., first.ranks], a_SRI))

    def _stacks(self, run: Run | Stretch) -> Stacks:
        """Each block's A's and each member's B's as one tensor; the layouts, and so the shares, are alike."""
        if self not in run.stacks:
            shares = [self._shares(adapter) for adapter in run.adapters]
            blocks = zip(*(share.blocks for share in shares), strict=True)
            members = zip(*(share.members for share in shares), strict=True)
            run.stacks[self] = (
                [(some[0], torch.stack([block.a_RI for block in some])) for some in blocks],
                [(some[0], torch.stack([member.b_Or for member in some])) for some in members],
            )
        return run.stacks[self]

    def _largest(self, run: Run) -> int:
        blocks, members = self._shares(run.adapters[0])
        return max(*(block.a_RI.numel() for block in blocks), *(member.b_Or.numel() for member in members))

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
                first, before, above_RI = blocks.pop()
                joined_RI = _rows_from(above_RI, len(above_RI) + len(a_rI))
                blocks.append(Block(first, slice(before.start, end), joined_RI))
            else:
                blocks.append(Block(name, ranks, a_rI))
        return Shares(tuple(blocks), tuple(members))


def _rows_from(a_rI: Tensor, num_rows: int) -> Tensor:
    """The matrix of `num_rows` rows that begins where this one does."""
    return a_rI.as_strided((num_rows, a_rI.shape[1]), (a_rI.shape[1], 1))


def _beside(parts: Sequence[Tensor], scale: float) -> Tensor:
    joined = parts[0] if len(parts) == 1 else torch.cat(tuple(parts), -1)
    return joined if scale == 1.0 else joined.mul_(scale)
