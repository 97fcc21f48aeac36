"""Measures the rates of this group of ranks: its collectives, and each device's matmuls while all devices compute.

All ranks call `measure_rates` together, after `join`. A time is the slowest rank's in the fastest of REPEATS after a
warm-up, since other processes delay some. Latency is the time of a collective of SMALL_ELEMENTS; bandwidth is the bytes
that a rank sends (`plan.speed.all_gather_bytes`, `all_reduce_bytes`) over the further time of a large collective.
Degrees of 1 exchange nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from tinsmith.backends.distributed.collectives import Ranks
from tinsmith.plan.measurement import measure_matmul, synchronize
from tinsmith.plan.speed import LinkRate, Rates, all_gather_bytes, all_reduce_bytes

SMALL_ELEMENTS = 64
LARGE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
"""float32 elements of a large collective."""

REPEATS = 7


@dataclass(frozen=True, slots=True)
class MeasureSpec:
    """`options` are those of `read_machines`; `dtype`, `hidden` and `num_weights` describe the base model's matmuls."""

    degrees: dict[str, Any]
    device: str
    dtype: str
    hidden: int
    num_weights: int
    timeout_s: float
    options: dict[str, str]


def measure_rates(ranks: Ranks, dtype: str, hidden: int, num_weights: int) -> list[list[float]]:
    """The argument of `Rates.read`, equal on all ranks."""
    degrees, device = ranks.degrees, str(ranks.device)
    collectives = {
        "tensor": (ranks.sum_tensor, degrees.tensor, all_reduce_bytes),
        "context": (_context_exchange(ranks), degrees.context, all_gather_bytes),
        "stages": (_stage_transfer(ranks), degrees.pipeline, lambda num_bytes, _: num_bytes),
        "experts": (_expert_exchange(ranks), degrees.experts, all_gather_bytes),
        "base": (ranks.gather_replicas, degrees.groups, all_gather_bytes),
        "gradients": (ranks.sum_all, degrees.devices, all_reduce_bytes),
    }
    ranks.sum_all(torch.zeros(1, device=ranks.device))  # so that the ranks compute at the same time
    matmul_rates = measure_matmul(dtype, hidden, num_weights, device)
    slowest = [min(values) for values in zip(*cast("list[list[float]]", ranks.gather(list(matmul_rates))), strict=True)]
    return [slowest, *(list(_measure_link(ranks, *collectives[name])) for name in Rates._fields[2:])]


def _context_exchange(ranks: Ranks) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: ranks.exchange_context(x.view(ranks.degrees.context, -1))


def _expert_exchange(ranks: Ranks) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: ranks.exchange_experts(x.view(ranks.degrees.experts, -1))


def _stage_transfer(ranks: Ranks) -> Callable[[torch.Tensor], None]:
    """A transfer from each stage to the next."""

    def transfer(x: torch.Tensor) -> None:
        handle = ranks.send(x, forward=True) if ranks.stage < ranks.degrees.pipeline - 1 else None
        if ranks.stage:
            ranks.receive(torch.empty_like(x), forward=True)
        if handle is not None:
            ranks.finish(handle)

    return transfer


def _measure_link(
    ranks: Ranks,
    collective: Callable[[torch.Tensor], object],
    group_size: int,
    count_bytes: Callable[[float, int], float],
) -> LinkRate:
    """`group_size` ranks take part; `count_bytes` counts the bytes that one of them sends."""
    if group_size == 1:
        return LinkRate()
    num_large = LARGE_ELEMENTS[ranks.device.type] // group_size * group_size
    latency_s, large_s = (
        _time_collective(ranks, collective, num_elements) for num_elements in (SMALL_ELEMENTS * group_size, num_large)
    )
    return LinkRate(count_bytes(4 * num_large, group_size) / max(large_s - latency_s, large_s / 2), latency_s)


def _time_collective(ranks: Ranks, collective: Callable[[torch.Tensor], object], num_elements: int) -> float:
    times: list[float] = []
    for _ in range(REPEATS + 1):
        x = torch.zeros(num_elements, device=ranks.device)
        ranks.gather(None)  # so that no rank waits for another within the measured time
        synchronize(str(ranks.device))
        started_at = time.perf_counter()
        collective(x)
        synchronize(str(ranks.device))
        times.append(time.perf_counter() - started_at)
    slowest = [max(seconds) for seconds in zip(*cast("list[list[float]]", ranks.gather(times[1:])), strict=True)]
    return min(slowest)
