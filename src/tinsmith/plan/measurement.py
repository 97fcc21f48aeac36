"""Measures how fast a device multiplies matrices and reads weights, and how busy this machine is with other work.

Imports torch only when it is called.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith.plan.memory import DTYPE_BYTES
from tinsmith.runtime.devices import has_packed_matmuls

if TYPE_CHECKING:
    import torch

LARGEST_SIDE, TRAINING_ROWS, MAX_WEIGHTS = 2048, 256, 16
"""Width of the square weights, rows of the training product, and number of weights, which exceed the caches."""
LARGEST_SIDE_CUDA, TRAINING_ROWS_CUDA = 8192, 4096
MEASURE_S = 0.3
OBSERVATION_S = 0.25
CPU_TIMES = Path("/proc/stat")
"""Linux's counters of the time that all CPUs spent in each state: user, nice, system, idle, waiting for a disk, ..."""


def measure_matmul(dtype: str, hidden: int, num_weights: int, device: str = "cpu") -> tuple[float, float]:
    """Measure the operations/s of a product with TRAINING_ROWS rows, and the bytes/s of weights of a product with one
    row. Each measurement takes about MEASURE_S. Weights are packed where oneDNN has kernels for them. There are no more
    weights than the model has, since those of a small model stay in caches.
    """
    import torch

    cuda = device != "cpu"
    rows = TRAINING_ROWS_CUDA if cuda else TRAINING_ROWS
    torch_dtype, side = getattr(torch, dtype), min(hidden, LARGEST_SIDE_CUDA if cuda else LARGEST_SIDE)
    count = max(1, min(MAX_WEIGHTS, num_weights // side**2))
    weights = [torch.randn(side, side, device=device).to(torch_dtype) for _ in range(count)]
    product: Callable[..., torch.Tensor] = torch.nn.functional.linear
    if not cuda and has_packed_matmuls(dtype):
        weights = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in weights]
        product = lambda x, weight: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")  # noqa: E731

    def product_s(rows: int) -> float:
        x = torch.randn(rows, side, device=device).to(torch_dtype)
        for weight in weights:  # the first product compiles the kernel
            product(x, weight)
        times, start = [], time.perf_counter()
        while not times or time.perf_counter() - start < MEASURE_S:
            for weight in weights:
                synchronize(device)
                started = time.perf_counter()
                product(x, weight)
                synchronize(device)
                times.append(time.perf_counter() - started)
        return min(times)  # other processes delay some of the runs

    with torch.inference_mode():
        return 2 * rows * side**2 / product_s(rows), DTYPE_BYTES[dtype] * side**2 / product_s(1)


def measure_busy_share() -> float:
    """The share of this machine's CPUs that processes use while this one sleeps; elsewhere than on Linux, the share
    that they used during the last minute."""
    if not CPU_TIMES.exists():
        return min(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    before = _read_cpu_times()
    time.sleep(OBSERVATION_S)
    elapsed = [after - before for after, before in zip(_read_cpu_times(), before, strict=True)]
    return 1 - (elapsed[3] + elapsed[4]) / max(1, sum(elapsed))


def _read_cpu_times() -> list[int]:
    """The first eight counters; those after them are parts of the first two."""
    return [int(count) for count in CPU_TIMES.read_text().split("\n", 1)[0].split()[1:9]]


def synchronize(device: str) -> None:
    """Wait until the device has completed its queued work."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize(torch.device(device))
