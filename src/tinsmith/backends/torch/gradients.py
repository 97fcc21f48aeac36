"""Where an adapter's gradients of one training step gather.

Memory is not set to zero first: of most matrices there is one gradient in a step, and it is written, not added. Whoever
`claim`s a matrix that nobody has written to must write all of it; whoever looks a pair up finds zeros there until then.
What nobody has claimed by the end, `finish` sets to zero. Knows no rows and no product.

Those of small adapters of one layout lie beside each other in a block, so that what a batched product found for many of
them is put there in one call. A row that somebody goes on holding holds its block: `Trained.keep_own_gradient`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinsmith.backends.torch.adapters import Place, view_of

if TYPE_CHECKING:
    from tinsmith.backends.torch.adapters import Layout, Pair

A, B = 0, 1

BLOCK_BYTES = 28 << 20
"""Of a block, at most: larger pieces of memory would be new to the process in each step, page by page."""


class Gradients(Mapping[str, "Pair"]):
    """name -> (A, B), views of `flat_P`, which is whole once it is finished; row `row` of a `block_SP`."""

    def __init__(self, layout: Layout, block_SP: Tensor, row: int) -> None:
        self.block_SP = block_SP
        self.row = row
        self.flat_P = block_SP[row]
        self._places = layout.places
        self._unwritten = {matrix: set(layout.places) for matrix in (A, B)}

    @classmethod
    def of(cls, layouts: Sequence[Layout], device: torch.device) -> list[Gradients]:
        """Each layout's; neighbours of one layout beside each other."""
        found: list[Gradients] = []
        for _, same in groupby(layouts, key=id):
            layout, *others = same
            make = torch.zeros if layout.has_gaps else torch.empty
            left, most = 1 + len(others), max(1, BLOCK_BYTES // (4 * layout.numel))
            while left:
                block_SP = make(min(left, most), layout.numel, device=device)
                found += [cls(layout, block_SP, row) for row in range(len(block_SP))]
                left -= len(block_SP)
        return found

    def __getitem__(self, name: str) -> Pair:
        places = self._places[name]
        pair = view_of(self.flat_P, places[A]), view_of(self.flat_P, places[B])
        for matrix, unwritten in self._unwritten.items():
            if name in unwritten:
                unwritten.remove(name)
                pair[matrix].zero_()
        return pair

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def begin(self, names: Sequence[str], matrix: int) -> bool:
        """Whether nobody has written to any of these matrices; where somebody has, the others are zeros from now on.
        They count as written.
        """
        unwritten = self._unwritten[matrix]
        first = unwritten.issuperset(names)
        if not first:
            for name in unwritten.intersection(names):
                view_of(self.flat_P, self._places[name][matrix]).zero_()
        unwritten.difference_update(names)
        return first

    def place(self, names: Sequence[str], matrix: int) -> Place:
        """Of their matrices, which lie side by side, as one."""
        place = self._places[names[0]][matrix]
        if len(names) == 1:
            return place
        rows = sum(self._places[name][matrix].shape[0] for name in names)
        return place._replace(shape=(rows, *place.shape[1:]))

    def claim(self, names: Sequence[str], matrix: int) -> tuple[Tensor, bool]:
        """Their matrices as one, and whether nobody has written to any of them."""
        return view_of(self.flat_P, self.place(names, matrix)), self.begin(names, matrix)

    def finish(self) -> Tensor:
        for name in set().union(*self._unwritten.values()):
            self[name]
        return self.flat_P


Group = tuple[slice, list[Mapping[str, "Pair"]]]


def groups_of(owners: Sequence[Mapping[str, Pair] | None]) -> list[Group]:
    """Which of them are rows of a block that follow each other, and these; without those that are None."""
    found: list[Group] = []
    for place, own in enumerate(owners):
        if own is None:
            continue
        before = found[-1][1][-1] if found and found[-1][0].stop == place else None
        if (
            isinstance(own, Gradients)
            and isinstance(before, Gradients)
            and own.block_SP is before.block_SP
            and own.row == before.row + 1
        ):
            found[-1] = slice(found[-1][0].start, place + 1), [*found[-1][1], own]
        else:
            found.append((slice(place, place + 1), [own]))
    return found


def gather_(groups: Sequence[Group], names: Sequence[str], matrix: int, found: Tensor) -> None:
    """Give each owner its gradient [S, ...] of these linears, whose matrices lie side by side."""
    for rows, owners in groups:
        first = owners[0]
        if len(owners) == 1 or not isinstance(first, Gradients):
            own, is_first = claim(first, names, matrix)
            put_(own, found[rows.start], is_first=is_first)
            continue
        begun = [own.begin(names, matrix) for own in owners if isinstance(own, Gradients)]
        place = first.place(names, matrix)
        offset = first.flat_P.storage_offset() + place.start
        strides = first.block_SP.stride(0), *place.strides
        own = first.block_SP.as_strided((len(owners), *place.shape), strides, offset)
        if any(begun) and not all(begun):
            for row, is_first in enumerate(begun):
                if is_first:
                    own[row].zero_()
        put_(own, found[rows], is_first=all(begun))


def put_(own: Tensor, found: Tensor, *, is_first: bool) -> None:
    own.copy_(found) if is_first else own.add_(found)


def claim(gradients: Mapping[str, Pair], names: Sequence[str], matrix: int) -> tuple[Tensor, bool]:
    """`Gradients.claim`, or of gradients that began as zeros."""
    if isinstance(gradients, Gradients):
        return gradients.claim(names, matrix)
    first = gradients[names[0]][matrix]
    if len(names) == 1:
        return first, False
    rows = sum(len(gradients[name][matrix]) for name in names)
    return first.as_strided((rows, *first.shape[1:]), first.stride()), False
