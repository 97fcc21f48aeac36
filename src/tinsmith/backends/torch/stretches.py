"""Neighbouring segments of unequal lengths, whose adapters are of one layout: each adapter's low-rank products with its
own rows, in one kernel for all of them (`grouped`).

What the kernel cannot take, and what it is not right for, goes segment by segment, here as everywhere. So do gradients
of matrices: each is added to its adapter's own float32 buffer, and the grouped kernel would round it to bfloat16 first.

Shapes: n rows of a stretch, S segments, I inputs, O outputs, r rank, R inner rows of a site.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinsmith.backends.torch import grouped
from tinsmith.backends.torch.products import add_product_, column_product, product

if TYPE_CHECKING:
    from tinsmith.backends.torch.lora import Adapter, Segment
    from tinsmith.backends.torch.lora_ops import Block, Member, Site, Stacks


class Stretch:
    """Segments one after the other from row `start`. `stacks` keeps what sites made of their matrices."""

    __slots__ = ("_ends_S", "adapters", "sizes", "stacks", "start")

    def __init__(self, start: int, sizes: list[int], adapters: list[Adapter]) -> None:
        self.start = start
        self.sizes = sizes
        self.adapters = adapters
        self.stacks: dict[Site, Stacks] = {}
        self._ends_S: Tensor | None = None

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + sum(self.sizes))

    @property
    def segments(self) -> list[slice]:
        """Counted from the stretch's first row."""
        return [slice(*span) for span in pairwise(accumulate(self.sizes, initial=0))]

    def products(self, x_nI: Tensor, matrices_SIO: Tensor) -> Tensor:
        """[n, O]: each segment's rows with its own matrix."""
        if grouped.suits(x_nI, matrices_SIO):
            if self._ends_S is None:
                self._ends_S = grouped.offsets_of(self.sizes, x_nI.device)
            return grouped.grouped_product(x_nI, matrices_SIO, self._ends_S)
        parts = zip(self.segments, matrices_SIO, strict=True)
        return torch.cat([product(x_nI[rows], matrix_IO, x_nI.dtype) for rows, matrix_IO in parts])


def stretches_of(segments: Iterable[Segment]) -> list[Stretch] | None:
    """Neighbours of one layout together; None where products one by one are as good: on a CPU, in other formats than
    bfloat16, or where nobody has a neighbour.
    """
    found: list[Stretch] = []
    end = -1
    for start, stop, adapter in segments:
        if adapter is None:
            continue
        if not grouped.is_used_on(adapter.compute_P.device) or adapter.compute_P.dtype != torch.bfloat16:
            return None
        if found and start == end and adapter.layout is found[-1].adapters[0].layout:
            found[-1].adapters.append(adapter)
            found[-1].sizes.append(stop - start)
        else:
            found.append(Stretch(start, [stop - start], [adapter]))
        end = stop
    return found if any(len(stretch.adapters) > 1 for stretch in found) else None


def forward_(y_TO: Tensor, x_TI: Tensor, stretch: Stretch, stacks: Stacks) -> Tensor:
    """Add to y; returns scale * x A^T [n, R], which `backward_` needs again."""
    blocks, members = stacks
    x_nI, y_nO = x_TI[stretch.rows], y_TO[stretch.rows]
    u_nR = torch.cat([stretch.products(x_nI, a_SRI.mT) for _, a_SRI in blocks], -1)
    u_nR *= stretch.adapters[0].scale
    for first, b_SOr in members:
        if y_TO.dtype == x_TI.dtype:
            y_nO[:, first.columns] += stretch.products(u_nR[:, first.ranks], b_SOr.mT)
            continue
        for rows, b_Or in zip(stretch.segments, b_SOr, strict=True):  # logits, which are not rounded
            add_product_(y_nO[rows, first.columns], u_nR[rows, first.ranks], b_Or.t(), 1.0)
    return u_nR


def backward_(
    grad_TI: Tensor | None, grad_TO: Tensor, x_TI: Tensor, stretch: Stretch, stacks: Stacks, u_nR: Tensor
) -> None:
    """Add to the gradient of x, if there is one, and to the adapters' own where these exist."""
    blocks, members = stacks
    x_nI, grad_nO = x_TI[stretch.rows], grad_TO[stretch.rows]
    grad_nR = torch.cat([stretch.products(grad_nO[:, first.columns], b_SOr) for first, b_SOr in members], -1)
    grad_nR *= stretch.adapters[0].scale
    for rows, adapter in zip(stretch.segments, stretch.adapters, strict=True):
        _add_gradients(adapter, [m for m, _ in members], [b for b, _ in blocks], grad_nO[rows], u_nR[rows],
                       grad_nR[rows], x_nI[rows])  # fmt: skip
    if grad_TI is not None:
        for first, a_SRI in blocks:
            grad_TI[stretch.rows] += stretch.products(grad_nR[:, first.ranks], a_SRI)


def _add_gradients(
    adapter: Adapter,
    members: Sequence[Member],
    blocks: Sequence[Block],
    grad_nO: Tensor,
    u_nR: Tensor,
    grad_nR: Tensor,
    x_nI: Tensor,
) -> None:
    if adapter.gradients is None:
        return
    # Every linear's inner rows with every linear's outputs, as in `sites`.
    found_OR = column_product(grad_nO, u_nR)
    for name, columns, ranks, _ in members:
        adapter.gradients[name][1].add_(found_OR[columns, ranks])
    for names, ranks, a_RI in blocks:
        own_rI, *_ = (adapter.gradients[name][0] for name in names)
        own_RI = own_rI.as_strided((len(a_RI), own_rI.shape[1]), (own_rI.shape[1], 1))
        add_product_(own_RI, grad_nR[:, ranks].t(), x_nI, 1.0)
