"""Where an adapter's gradients of one training step gather.

Memory is not set to zero first: of most matrices there is one gradient in a step, and it is written, not added. Whoever
`claim`s a matrix that nobody has written to must write all of it; whoever looks a pair up finds zeros there until then.
What nobody has claimed by the end, `finish` sets to zero. Knows no rows and no product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tinsmith.backends.torch.lora import Layout, Pair

A, B = 0, 1


class Place(NamedTuple):
    """Where a matrix, or a stack of them, lies in a flat buffer."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, start: int, shape: tuple[int, ...]) -> Place:
        return cls(start, shape, tuple(math.prod(shape[place + 1 :]) for place in range(len(shape))))


def view_of(flat_P: Tensor, place: Place, rows: int | None = None) -> Tensor:
    """The matrix at this place; with so many `rows`, and those that follow it."""
    shape = place.shape if rows is None else (rows, *place.shape[1:])
    # One call instead of two: a step of many tenants has thousands of these.
    return flat_P.as_strided(shape, place.strides, flat_P.storage_offset() + place.start)


class Gradients(Mapping[str, "Pair"]):
    """name -> (A, B), views of `flat_P`, which is whole once it is finished."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.flat_P = (torch.zeros if layout.has_gaps else torch.empty)(layout.numel, device=device)
        self._places = layout.places
        self._unwritten = {matrix: set(layout.places) for matrix in (A, B)}

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

    def claim(self, names: Sequence[str], matrix: int) -> tuple[Tensor, bool]:
        """Their matrices, which lie side by side, as one, and whether nobody has written to any of them."""
        unwritten = self._unwritten[matrix]
        first = unwritten.issuperset(names)
        if not first:
            for name in unwritten.intersection(names):
                view_of(self.flat_P, self._places[name][matrix]).zero_()
        unwritten.difference_update(names)
        place = self._places[names[0]][matrix]
        rows = None if len(names) == 1 else sum(self._places[name][matrix].shape[0] for name in names)
        return view_of(self.flat_P, place, rows), first

    def finish(self) -> Tensor:
        for name in set().union(*self._unwritten.values()):
            self[name]
        return self.flat_P


def claim(gradients: Mapping[str, Pair], names: Sequence[str], matrix: int) -> tuple[Tensor, bool]:
    """`Gradients.claim`, or of gradients that began as zeros."""
    if isinstance(gradients, Gradients):
        return gradients.claim(names, matrix)
    first = gradients[names[0]][matrix]
    if len(names) == 1:
        return first, False
    rows = sum(len(gradients[name][matrix]) for name in names)
    return first.as_strided((rows, *first.shape[1:]), first.stride()), False
