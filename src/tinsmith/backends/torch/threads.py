"""How many threads a forward and its backward use on a CPU: by their work, and by what else the machine does.

A matmul ends with its slowest thread. If another process needs a processor, one of two threads waits for its turn in
each matmul, and the other one for it: beside a busy process a step is faster on one thread, which the system can move
to the free processor, than on two. The threads' involuntary switches tell: few if nothing else runs, hundreds in a
second of processor time beside a busy process.

Knows no model. Torch's setting is process-wide; a backend is driven from one thread, so the change is not visible
elsewhere.
"""

from __future__ import annotations

import os
import time
from resource import RUSAGE_SELF, getrusage
from typing import NamedTuple

import torch

from tinsmith.runtime.devices import kind_of

AWAKE_SPINS = 10_000
"""Threads stay awake between the kernels of a step if they spin so often. Other forms of the variable, such as
'infinite', count as asleep, which only costs time.
"""

SMALL_FORWARD_FLOPS = 1e9
"""Below this (2 x parameters x tokens) one thread is faster."""

NARROW_FLOPS = 2e7
"""Per token: below this a model's kernels are short. If threads stay awake, one thread is for such models only; wider
ones are faster on two. Alone, narrow models are too, but not next to a server and its clients, which need CPU as well.
"""

FEW_TOKENS = 64
"""Per adapter. With more tokens each, a step is slower on one thread, and clients have less to do."""

SMALL_SHARED_FLOPS = 6e9
"""The limit for small forwards of narrow models and adapters with few tokens. Alone, a step of many adapters is slower
on one thread; next to as many clients it finishes sooner.
"""

MAX_SWITCHES = 400.0
"""Involuntary switches in a second of all threads, with more of which there are too many threads."""

WINDOW_S, WINDOWS = 0.5, 3
"""Processor time over which switches are counted, and how many windows in a row must have too many of them before one
thread fewer is used. Many clients that read their results at once cause as many switches, but for one window only.
"""

FIRST_RETRY_S, LAST_RETRY_S = 2.0, 64.0
"""After how long one more thread is tried again: twice as long after each time that it was too many."""


class ProcessUsage(NamedTuple):
    """Involuntary switches of this process's threads and their processor time so far, and the time now."""

    switches: int
    processor_s: float
    clock_s: float


def process_usage() -> ProcessUsage:
    used = getrusage(RUSAGE_SELF)
    return ProcessUsage(used.ru_nivcsw, used.ru_utime + used.ru_stime, time.monotonic())


class Allowance:
    """How many threads may be used, of at most `most` and at least half of them."""

    def __init__(self, max_threads: int, now: ProcessUsage) -> None:
        self.threads = max_threads
        self._max_threads = max_threads
        self._min_threads = max(1, max_threads // 2)
        self._before = now
        self._switches, self._processor_s = 0, 0.0
        self._crowded = 0
        self._retry_s, self._retry_at = FIRST_RETRY_S, 0.0

    def update(self, now: ProcessUsage, used: int) -> None:
        """Since the last call, the process computed with `used` threads."""
        switches, processor_s = now.switches - self._before.switches, now.processor_s - self._before.processor_s
        self._before = now
        if used > 1:  # one thread can move to any free processor
            self._switches += switches
            self._processor_s += processor_s
        if self._processor_s >= WINDOW_S:
            is_crowded = self._switches * used > MAX_SWITCHES * self._processor_s
            self._switches, self._processor_s = 0, 0.0
            self._decide(now.clock_s, is_crowded=is_crowded)
        elif self.threads < self._max_threads and now.clock_s >= self._retry_at:
            self.threads += 1
            self._retry_at = now.clock_s + self._retry_s

    def _decide(self, now_s: float, *, is_crowded: bool) -> None:
        self._crowded = self._crowded + 1 if is_crowded else 0
        if self._crowded >= WINDOWS and self.threads > self._min_threads:
            self.threads -= 1
            self._crowded = 0
            self._retry_at = now_s + self._retry_s
            self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
        elif not is_crowded and self.threads == self._max_threads:
            self._retry_s = FIRST_RETRY_S


class Threads:
    """One thread for small forwards, otherwise as many as the machine has free.

    A small matmul ends before a sleeping thread has woken, so one thread is faster. Threads stay awake in an engine
    that computes alone (GOMP_SPINCOUNT).
    """

    def __init__(self, num_parameters: int, device: torch.device) -> None:
        self._pinned = False
        self._flops_per_token = 2.0 * num_parameters
        self._max_threads = torch.get_num_threads()
        self._active = kind_of(device).is_host and self._max_threads > 1
        self._allowance = Allowance(self._max_threads, process_usage())
        spins = os.environ.get("GOMP_SPINCOUNT", "0")  # noqa: TID251 (OpenMP's own variable)
        self._awake = spins.isdecimal() and int(spins) >= AWAKE_SPINS

    def pin(self) -> None:
        """Always use all threads: another number of threads would add in another order."""
        self._pinned = True

    def fit(self, num_tokens: int, num_adapters: int = 1) -> None:
        """Choose for the forward that begins, and its backward."""
        if not self._active:
            return
        used = torch.get_num_threads()
        num_threads = self._max_threads if self._pinned else self._choose_threads(used, num_tokens, num_adapters)
        if used != num_threads:
            torch.set_num_threads(num_threads)

    def _choose_threads(self, used: int, num_tokens: int, num_adapters: int) -> int:
        self._allowance.update(process_usage(), used)
        is_small = num_tokens * self._flops_per_token < self._limit(num_tokens, num_adapters)
        return 1 if is_small else self._allowance.threads

    def _limit(self, num_tokens: int, num_adapters: int) -> float:
        is_narrow = self._flops_per_token < NARROW_FLOPS
        if self._awake and not is_narrow:
            return 0.0
        is_shared = num_adapters > 1 and num_tokens <= FEW_TOKENS * num_adapters
        return SMALL_SHARED_FLOPS if is_shared and is_narrow else SMALL_FORWARD_FLOPS
