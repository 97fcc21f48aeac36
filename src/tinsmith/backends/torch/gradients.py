"""Where an adapter's gradients of one training step gather.

Memory is not set to zero first: of most matrices there is one gradient in a step, and it is written, not added. Whoever
`claim`s a matrix that nobody has written to must write all of it; whoever looks a pair up finds zeros there until then.
What nobody has claimed by the end, `finish` sets to zero. Knows no rows and no product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tinsmith.backends.torch.lora import Layout, Pair

A, B = 0, 1


class Gradients(Mapping[str, "Pair"]):
    """name -> (A, B), views of `flat_P`, which is whole once it is finished."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.flat_P = (torch.zeros if layout.has_gaps else torch.empty)(layout.numel, device=device)
        self._views = layout.views(self.flat_P)
        self._unwritten = {matrix: set(self._views) for matrix in (A, B)}

    def __getitem__(self, name: str) -> Pair:
        pair = self._views[name]
        for matrix, unwritten in self._unwritten.items():
            if name in unwritten:
                unwritten.remove(name)
                pair[matrix].zero_()
        return pair

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def claim(self, names: Sequence[str], matrix: int) -> tuple[Tensor, bool]:
        """The first one's matrix, and whether nobody has written to any of them."""
        unwritten = self._unwritten[matrix]
        first = unwritten.issuperset(names)
        if not first:
            for name in unwritten.intersection(names):
                self._views[name][matrix].zero_()
        unwritten.difference_update(names)
        return self._views[names[0]][matrix], first

    def finish(self) -> Tensor:
        for name in set().union(*self._unwritten.values()):
            self[name]
        return self.flat_P


def claim(gradients: Mapping[str, Pair], names: Sequence[str], matrix: int) -> tuple[Tensor, bool]:
    """`Gradients.claim`, or of gradients that began as zeros."""
    if isinstance(gradients, Gradients):
        return gradients.claim(names, matrix)
    return gradients[names[0]][matrix], False
