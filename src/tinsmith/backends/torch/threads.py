"""How many threads a forward uses: one if it is small, otherwise all; in a decode step all for its large kernels only.

A small matmul ends before a sleeping thread has woken: on two cores, 32 tokens of a 3 M parameter model take 7 ms on
one thread and 15 ms on two. Next to other work on the same cores, waking a thread takes 0.1 ms, several times as long
as most kernels between the large products of a decode step: 16 rows of m50 with an adapter then took 30 ms with two
threads for everything, 19 ms with two for the large products alone. The backward uses its forward's choice. Torch's
setting is process-wide; a backend is driven from one thread, so the change is not visible elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_FORWARD_FLOPS = 1e9
"""Below this (2 x parameters x tokens) one thread is faster; measured with nano and a 50 M parameter model."""

NARROW_FLOPS = 2e7
"""Per token: below this a model's kernels are short when each of many adapters has few tokens. On an idle machine, a
step of 32 adapters takes a 2.9 M parameter model 1.4 times as long on one thread as on two; next to a server and as
many clients, which need CPU too, it finishes sooner.
"""

FEW_TOKENS = 64
"""Per adapter. With 256 tokens each, a step takes 1.6 times as long on one thread, and clients have less to do."""

SMALL_SHARED_FLOPS = 6e9
"""The limit for small forwards of such models and adapters: 1,024 tokens of 2.9 M parameters."""

DECODE_ROWS = 64
"""Up to this many rows, the kernels of adapters, norms and rotations are too short for several threads."""

WIDE_ATTENTION = 32
"""From this many rows on, attention counts as a large kernel of a decode step."""


class Threads:
    def __init__(self, num_parameters: int, device: torch.device) -> None:
        self._pinned = False
        self._flops_per_token = 2.0 * num_parameters
        self._most = torch.get_num_threads()
        self._active = device.type == "cpu" and self._most > 1
        self._mixed = False

    def pin(self) -> None:
        """Always use all threads: another number of threads would add in another order."""
        self._pinned = True

    def fit(self, num_tokens: int, num_adapters: int = 1) -> None:
        """Choose for the forward that begins, and its backward."""
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
        """For as few rows as a decode step has: one thread except between `wide` and `narrow`."""
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
        """Use all threads until `narrow`. Two plain calls instead of a context manager: a step has hundreds."""
        if self._mixed:
            torch.set_num_threads(self._most)

    def narrow(self) -> None:
        if self._mixed:
            torch.set_num_threads(1)
