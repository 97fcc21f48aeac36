"""Measures how fast a device multiplies matrices and reads weights. Imports torch only when it is called."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tinsmith.plan.memory import NUMBER_BYTES

if TYPE_CHECKING:
    import torch

LARGEST_SIDE, MEASURED_ROWS, MAX_WEIGHTS = 2048, 256, 16
"""Width of the square weights, rows of the training product, and number of weights, which exceed the caches."""
LARGEST_SIDE_CUDA, MEASURED_ROWS_CUDA = 8192, 4096
MEASURING_S = 0.3


def measure_matmul(dtype: str, hidden: int, num_weights: int, device: str = "cpu") -> tuple[float, float]:
    """Measure the operations/s of a product with MEASURED_ROWS rows, and the bytes/s of weights of a product with one
    row. Each measurement takes about MEASURING_S. Weights are packed for oneDNN if torch has it. There are no more
    weights than the model has, since those of a small model stay in caches.
    """
    import torch

    cuda = device != "cpu"
    rows = MEASURED_ROWS_CUDA if cuda else MEASURED_ROWS
    form, side = getattr(torch, dtype), min(hidden, LARGEST_SIDE_CUDA if cuda else LARGEST_SIDE)
    count = max(1, min(MAX_WEIGHTS, num_weights // side**2))
    weights = [torch.randn(side, side, device=device).to(form) for _ in range(count)]
    product: Callable[..., torch.Tensor] = torch.nn.functional.linear
    if not cuda and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        weights = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in weights]
        product = lambda x, weight: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")  # noqa: E731

    def product_s(rows: int) -> float:
        x = torch.randn(rows, side, device=device).to(form)
        for weight in weights:  # the first product compiles the kernel
            product(x, weight)
        times, start = [], time.perf_counter()
        while not times or time.perf_counter() - start < MEASURING_S:
            for weight in weights:
                settle(device)
                started = time.perf_counter()
                product(x, weight)
                settle(device)
                times.append(time.perf_counter() - started)
        return min(times)  # other processes delay some of the runs

    with torch.inference_mode():
        return 2 * rows * side**2 / product_s(rows), NUMBER_BYTES[dtype] * side**2 / product_s(1)


def settle(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize(torch.device(device))
