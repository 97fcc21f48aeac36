"""The elements of an adapter that each rank's optimizer steps: an equal part of all, in the order of ranks.

All ranks have an adapter's weights and its gradient; of the moments each has those of its elements, as in the first
stage of ZeRO (arXiv 1910.02054). After a step each rank sends its elements of the weights to the others. Checkpoints
have all elements, whatever the number of ranks: rank 0 collects the moments first.

Shapes: P elements of an adapter, p of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinsmith.backends.distributed.collectives import Ranks

ALIGNMENT = 64
"""Parts begin at multiples of this, so that vector instructions take the same elements together."""


class RankShard:
    """A `torch.adapters.ElementShard`."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def span(self, num_elements: int, rank: int) -> slice:
        """The elements of a rank; of a few elements the last ranks have none."""
        size = -(-num_elements // (self._ranks.degrees.devices * ALIGNMENT)) * ALIGNMENT
        return slice(min(rank * size, num_elements), min((rank + 1) * size, num_elements))

    def local(self, x_P: Tensor) -> Tensor:
        return x_P[self.span(len(x_P), self._ranks.rank)]

    @torch.no_grad()
    def spread(self, x_P: Tensor) -> None:
        for rank in range(self._ranks.degrees.devices):
            part_p = x_P[self.span(len(x_P), rank)]
            if len(part_p):
                self._ranks.broadcast_from(part_p, rank)

    def collect(self, parts: Sequence[Tensor], num_elements: int) -> tuple[Tensor, ...] | None:
        """On rank 0, the tensors [P] of which each rank has a part, in host memory; None on the others. Takes device
        memory for one part."""
        ranks = self._ranks
        if ranks.rank:
            for part_p in parts:
                if len(part_p):
                    ranks.send_to_first(part_p.to(ranks.device))
            return None
        collected = tuple(part_p.new_empty(num_elements, device="cpu") for part_p in parts)
        for x_P, part_p in zip(collected, parts, strict=True):
            x_P[self.span(num_elements, 0)] = part_p.cpu()
        for rank in range(1, ranks.degrees.devices):
            span = self.span(num_elements, rank)
            for x_P in collected:
                if span.start < span.stop:
                    received_p = torch.empty(span.stop - span.start, dtype=x_P.dtype, device=ranks.device)
                    x_P[span] = ranks.receive_from(received_p, rank).cpu()
        return collected
