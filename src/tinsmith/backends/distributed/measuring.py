"""Measures this group of ranks: its collectives, and the products of each rank's device while all compute.

All ranks call `measure` together, after `join`. Times are those of the slowest rank, in the fastest of REPEATS after
one that is not counted, since other processes delay some. Latency is the time of a collective of SMALL numbers;
bandwidth comes from the time that a large one takes beyond it, by the bytes that a rank sends
(`plan.speed.all_gather_bytes`, `all_reduce_bytes`). Degrees of 1 exchange nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from tinsmith.backends.distributed.ranks import Ranks
from tinsmith.plan.measurement import measure_matmul, synchronize
from tinsmith.plan.speed import LinkRate, Rates, all_gather_bytes, all_reduce_bytes

SMALL = 64
LARGE = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Numbers of a large collective, in float32."""

REPEATS = 7


@dataclass(frozen=True, slots=True)
class MeasureSpec:
    """`options` are those of `read_machines`; the others describe the base model's matrix products."""

    degrees: dict[str, Any]
    device: str
    dtype: str
    hidden: int
    num_weights: int
    timeout_s: float
    options: dict[str, str]


def measure(ranks: Ranks, dtype: str, hidden: int, num_weights: int) -> list[list[float]]:
    """For `Rates.read`; the same on all ranks."""
    degrees, device = ranks.degrees, str(ranks.device)
    exchanges = {
        "tensor": (ranks.sum_tensor, degrees.tensor, all_reduce_bytes),
        "context": (_exchanged(ranks), degrees.context, all_gather_bytes),
        "stages": (_passed_on(ranks), degrees.pipeline, lambda num_bytes, _: num_bytes),
        "experts": (_exchanged_experts(ranks), degrees.experts, all_gather_bytes),
        "base": (ranks.gather_replicas, degrees.groups, all_gather_bytes),
        "gradients": (ranks.sum_all, degrees.devices, all_reduce_bytes),
    }
    ranks.sum_all(torch.zeros(1, device=ranks.device))  # so that the ranks compute at the same time
    products = measure_matmul(dtype, hidden, num_weights, device)
    slowest = [min(rates) for rates in zip(*cast("list[list[float]]", ranks.gather(list(products))), strict=True)]
    return [slowest, *(list(_measured(ranks, *exchanges[name])) for name in Rates._fields[2:])]


def _exchanged(ranks: Ranks) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: ranks.exchange_context(x.view(ranks.degrees.context, -1))


def _exchanged_experts(ranks: Ranks) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: ranks.exchange_experts(x.view(ranks.degrees.experts, -1))


def _passed_on(ranks: Ranks) -> Callable[[torch.Tensor], None]:
    """Each stage sends to the next one."""

    def pass_on(x: torch.Tensor) -> None:
        sent = ranks.send(x, forward=True) if ranks.stage < ranks.degrees.pipeline - 1 else None
        if ranks.stage:
            ranks.receive(torch.empty_like(x), forward=True)
        if sent is not None:
            ranks.finish(sent)

    return pass_on


def _measured(
    ranks: Ranks, collective: Callable[[torch.Tensor], object], size: int, sent: Callable[[float, int], float]
) -> LinkRate:
    """`size` ranks take part; `sent` counts the bytes that one sends."""
    if size == 1:
        return LinkRate()
    large = LARGE[ranks.device.type] // size * size
    latency_s, whole_s = (_seconds(ranks, collective, number) for number in (SMALL * size, large))
    return LinkRate(sent(4 * large, size) / max(whole_s - latency_s, whole_s / 2), latency_s)


def _seconds(ranks: Ranks, collective: Callable[[torch.Tensor], object], numbers: int) -> float:
    times: list[float] = []
    for _ in range(REPEATS + 1):
        x = torch.zeros(numbers, device=ranks.device)
        ranks.gather(None)  # so that no rank waits for another within the measured time
        synchronize(str(ranks.device))
        started = time.perf_counter()
        collective(x)
        synchronize(str(ranks.device))
        times.append(time.perf_counter() - started)
    slowest = [max(each) for each in zip(*cast("list[list[float]]", ranks.gather(times[1:])), strict=True)]
    return min(slowest)
