"""How many threads a forward and its backward use on a CPU: by their work, and by what else the machine does.

A product ends with its slowest thread. If another process needs a processor, one of two threads waits for its turn in
each product, and the other one for it: beside one busy process a step of m50 takes 3.8 times as long on two threads,
and 1.6 times on one, which the system can move to the free processor. The threads' involuntary switches tell: 18 in a
second of processor time if nothing else runs, 300 to 800 beside a busy process, and 130 to 240 where one thread becomes
as fast as two, beside a process that needs a quarter of a processor.

Knows no model. Torch's setting is process-wide; a backend is driven from one thread, so the change is not visible
elsewhere.
"""

from __future__ import annotations

import os
import time
from resource import RUSAGE_SELF, getrusage
from typing import NamedTuple

import torch

AWAKE_SPINS = 10_000
"""Threads stay awake between the kernels of a step if they spin so often. Other forms of the variable, such as
'infinite', count as asleep, which only costs time.
"""

SMALL_FORWARD_FLOPS = 1e9
"""Below this (2 x parameters x tokens) one thread is faster; measured with nano and a 50 M parameter model."""

NARROW_FLOPS = 2e7
"""Per token: below this a model's kernels are short. If threads stay awake, one thread is for such models only: one row
of 50 M parameters then takes 1.2 times as long on one thread. For narrow models it is faster on two as well, but next
to a server and its clients, which need CPU too, 32 tokens of 2.9 M parameters take 1.15 times as long.
"""

FEW_TOKENS = 64
"""Per adapter. With 256 tokens each, a step takes 1.6 times as long on one thread, and clients have less to do."""

SMALL_SHARED_FLOPS = 6e9
"""The limit for small forwards of narrow models and adapters with few tokens: 1,024 tokens of 2.9 M parameters. Alone,
a step of 32 adapters takes 1.4 times as long on one thread; next to as many clients it finishes sooner.
"""

MOST_SWITCHES = 400.0
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

    def __init__(self, most: int, now: ProcessUsage) -> None:
        self.threads = most
        self._most = most
        self._least = max(1, most // 2)
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
            is_crowded = self._switches * used > MOST_SWITCHES * self._processor_s
            self._switches, self._processor_s = 0, 0.0
            self._decide(now.clock_s, is_crowded=is_crowded)
        elif self.threads < self._most and now.clock_s >= self._retry_at:
            self.threads += 1
            self._retry_at = now.clock_s + self._retry_s

    def _decide(self, now_s: float, *, is_crowded: bool) -> None:
        self._crowded = self._crowded + 1 if is_crowded else 0
        if self._crowded >= WINDOWS and self.threads > self._least:
            self.threads -= 1
            self._crowded = 0
            self._retry_at = now_s + self._retry_s
            self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
        elif not is_crowded and self.threads == self._most:
            self._retry_s = FIRST_RETRY_S


class Threads:
    """One thread for small forwards, otherwise as many as the machine has free.

    A small product ends before a sleeping thread has woken: on two cores, 32 tokens of a 3 M parameter model then take
    7 ms on one thread and 15 ms on two. Threads stay awake in an engine that computes alone (GOMP_SPINCOUNT).
    """

    def __init__(self, num_parameters: int, device: torch.device) -> None:
        self._pinned = False
        self._flops_per_token = 2.0 * num_parameters
        self._most = torch.get_num_threads()
        self._active = device.type == "cpu" and self._most > 1
        self._allowance = Allowance(self._most, process_usage())
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
        wanted = self._most if self._pinned else self._wanted(used, num_tokens, num_adapters)
        if used != wanted:
            torch.set_num_threads(wanted)

    def _wanted(self, used: int, num_tokens: int, num_adapters: int) -> int:
        self._allowance.update(process_usage(), used)
        is_small = num_tokens * self._flops_per_token < self._limit(num_tokens, num_adapters)
        return 1 if is_small else self._allowance.threads

    def _limit(self, num_tokens: int, num_adapters: int) -> float:
        is_narrow = self._flops_per_token < NARROW_FLOPS
        if self._awake and not is_narrow:
            return 0.0
        is_shared = num_adapters > 1 and num_tokens <= FEW_TOKENS * num_adapters
        return SMALL_SHARED_FLOPS if is_shared and is_narrow else SMALL_FORWARD_FLOPS
