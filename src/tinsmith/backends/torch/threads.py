"""How many threads a forward uses: one for a small one, all for the rest.

A small matmul is over before a sleeping thread has woken: on two cores, 32 tokens of a 3 M parameter model take 7 ms
on one thread and 15 ms on two. The backward runs with what its forward chose. Torch's setting is the process's;
a backend is driven from one thread, so nobody else sees it change.
"""

from __future__ import annotations

import torch

SMALL_FORWARD_FLOPS = 1e9
"""Below this (2 x parameters x tokens) one thread is faster; measured with nano and a 50 M parameter model."""


class Threads:
    def __init__(self, num_parameters: int, device: torch.device) -> None:
        self._pinned = False
        self._flops_per_token = 2.0 * num_parameters
        self._most = torch.get_num_threads()
        self._active = device.type == "cpu" and self._most > 1

    def pin(self) -> None:
        """All of them from now on: sums that threads share are added in another order by more or fewer."""
        self._pinned = True

    def fit(self, num_tokens: int) -> None:
        """Choose for the forward that begins, and what follows it."""
        if not self._active:
            return
        small = not self._pinned and num_tokens * self._flops_per_token < SMALL_FORWARD_FLOPS
        wanted = 1 if small else self._most
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)
