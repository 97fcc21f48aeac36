"""How many threads a forward and its backward use: one if they are small, otherwise all.

A small product ends before a sleeping thread has woken: on two cores, 32 tokens of a 3 M parameter model then take 7 ms
on one thread and 15 ms on two. Where threads stay awake (GOMP_SPINCOUNT, which an engine sets if it computes alone),
one thread is faster only for much smaller work. Torch's setting is process-wide; a backend is driven from one thread,
so the change is not visible elsewhere.
"""

from __future__ import annotations

import os

import torch

AWAKE_SPINS = 10_000
"""Threads stay awake between the kernels of a step if they spin so often."""

SMALL_AWAKE_FLOPS = 1.5e8
"""Below this (2 x parameters x tokens) one thread is faster for narrow models if threads stay awake: of a 2.9 M
parameter model, 16 rows take 1.1 times as long on two threads, 64 rows on one.
"""

SMALL_FORWARD_FLOPS = 1e9
"""The same for all models if threads sleep; measured with nano and a 50 M parameter model."""

NARROW_FLOPS = 2e7
"""Per token: below this a model's kernels are short when each of many adapters has few tokens."""

FEW_TOKENS = 64
"""Per adapter. With 256 tokens each, a step takes 1.6 times as long on one thread."""

SMALL_SHARED_FLOPS = 6e9
"""The limit for small forwards of such models and adapters if threads sleep: 1,024 tokens of 2.9 M parameters."""


class Threads:
    def __init__(self, num_parameters: int, device: torch.device) -> None:
        self._pinned = False
        self._flops_per_token = 2.0 * num_parameters
        self._most = torch.get_num_threads()
        self._active = device.type == "cpu" and self._most > 1
        self._awake = int(os.environ.get("GOMP_SPINCOUNT", "0")) >= AWAKE_SPINS

    def pin(self) -> None:
        """Always use all threads: another number of threads would add in another order."""
        self._pinned = True

    def fit(self, num_tokens: int, num_adapters: int = 1) -> None:
        """Choose for the forward that begins, and its backward."""
        if not self._active:
            return
        small = not self._pinned and num_tokens * self._flops_per_token < self._limit(num_tokens, num_adapters)
        wanted = 1 if small else self._most
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)

    def _limit(self, num_tokens: int, num_adapters: int) -> float:
        is_narrow = self._flops_per_token < NARROW_FLOPS
        if self._awake:
            return SMALL_AWAKE_FLOPS if is_narrow else 0.0
        is_shared = num_adapters > 1 and num_tokens <= FEW_TOKENS * num_adapters
        return SMALL_SHARED_FLOPS if is_shared and is_narrow else SMALL_FORWARD_FLOPS
