"""How many threads a forward uses: one for a small one, all for the rest; in a decode step all for its large kernels.

A small matmul is over before a sleeping thread has woken: on two cores, 32 tokens of a 3 M parameter model take 7 ms
on one thread and 15 ms on two. Beside other work on the same cores, waking one takes 0.1 ms, several times what most
kernels between the large products of a decode step take: 16 rows of m50 with an adapter then took 30 ms with two
threads for everything, 19 with two for the large products alone. The backward runs with what its forward chose.
Torch's setting is the process's; a backend is driven from one thread, so nobody else sees it change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_FORWARD_FLOPS = 1e9
"""Below this (2 x parameters x tokens) one thread is faster; measured with nano and a 50 M parameter model."""

NARROW_FLOPS = 2e7
"""For a token: below this a model's kernels stay short where few tokens belong to each of many adapters. With nothing
else about, a step of 32 adapters takes a 2.9 M parameter model 1.4 times as long on one thread as on two; beside a
server and as many clients, which need a processor too, it is ready sooner.
"""

FEW_TOKENS = 64
"""Of an adapter. With 256 of each, a step takes 1.6 times as long on one thread, and clients have less to do."""

SMALL_SHARED_FLOPS = 6e9
"""What is small for such a model and such adapters: 1,024 tokens of 2.9 M parameters."""

DECODE_ROWS = 64
"""Up to so many rows, what adapters, norms and rotations take is too short to be shared."""

WIDE_ATTENTION = 32
"""Rows from which on the attention of a decode step is one of its large kernels."""


class Threads:
    def __init__(self, num_parameters: int, device: torch.device) -> None:
        self._pinned = False
        self._flops_per_token = 2.0 * num_parameters
        self._most = torch.get_num_threads()
        self._active = device.type == "cpu" and self._most > 1
        self._mixed = False

    def pin(self) -> None:
        """All of them from now on: sums that threads share are added in another order by more or fewer."""
        self._pinned = True

    def fit(self, num_tokens: int, num_adapters: int = 1) -> None:
        """Choose for the forward that begins, and what follows it."""
        if not self._active:
            return
        is_shared = num_adapters > 1 and num_tokens <= FEW_TOKENS * num_adapters
        is_narrow = self._flops_per_token < NARROW_FLOPS
        limit = SMALL_SHARED_FLOPS if is_shared and is_narrow else SMALL_FORWARD_FLOPS
        small = not self._pinned and num_tokens * self._flops_per_token < limit
        wanted = 1 if small else self._most
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)

    @contextmanager
    def mixed(self, num_rows: int) -> Iterator[None]:
        """If the rows are as few as a decode step's, one thread but for what is run `wide`."""
        before = torch.get_num_threads()
        if not self._active or self._pinned or num_rows > DECODE_ROWS or before == 1 or torch.is_grad_enabled():
            yield
            return
        self._mixed = True
        torch.set_num_threads(1)
        try:
            yield
        finally:
            self._mixed = False
            torch.set_num_threads(before)

    def wide(self) -> None:
        """All threads, until `narrow`. Two plain calls: a step has hundreds."""
        if self._mixed:
            torch.set_num_threads(self._most)

    def narrow(self) -> None:
        if self._mixed:
            torch.set_num_threads(1)
