"""The machine's ceilings: speeds of matrix products and memory, to which other figures can be compared.

    python benchmarks/ceilings.py                   # half a minute; torch alone, no server

Matrix products of 64 rows (training, decoding of many) with a weight of 2,048 x 2,048, as torch's own linear does them
and with weights that oneDNN has packed beforehand; one row with many such weights in turn, which is bound by reading
them; and reading, adding to and copying arrays that no cache holds. The best of several runs counts, since whatever
else the machine does can only take away.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from harness import describe_machine, write_json

SIZE, ROWS = 2048, 64
NUM_WEIGHTS = 32
"""The number of weights, each for one product: 512 MiB in float32, which is more than caches hold."""
ARRAY_BYTES = 256 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Matmul = Callable[[torch.Tensor], object]


def time_best(action: Callable[[], object], runs: int) -> float:
    action()
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)


def plain_matmul(weight: torch.Tensor) -> Matmul:
    return lambda x: torch.nn.functional.linear(x, weight)


def packed_matmul(weight: torch.Tensor) -> Matmul | None:
    """None where torch has no such kernels."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    packed_weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed_weight, None, "none", [], "")


def pass_through(layers: list[Matmul], x: torch.Tensor) -> None:
    for layer in layers:
        layer(x)


@torch.no_grad()
def measure_matmuls(runs: int) -> dict[str, float]:
    rates: dict[str, float] = {}
    for name, dtype in DTYPES.items():
        weights = [torch.randn(SIZE, SIZE).to(dtype) for _ in range(NUM_WEIGHTS)]
        rows, row = torch.randn(ROWS, SIZE).to(dtype), torch.randn(1, SIZE).to(dtype)
        for form, make in (("plain", plain_matmul), ("packed", packed_matmul)):
            layers = [layer for layer in map(make, weights) if layer]
            if layers:
                seconds = time_best(partial(pass_through, layers[:1] * 8, rows), runs) / 8
                rates[f"{name}, {form}, {ROWS} rows, GFLOP/s"] = 2e-9 * ROWS * SIZE * SIZE / seconds
                seconds = time_best(partial(pass_through, layers, row), runs)
                rates[f"{name}, {form}, 1 row, GB/s"] = 1e-9 * sum(w.nbytes for w in weights) / seconds
    return rates


def measure_memory(runs: int) -> dict[str, float]:
    a, b, c = (torch.ones(ARRAY_BYTES // 4) for _ in range(3))
    moved = {
        "read": (lambda: a.sum(), 1),
        "copy": (lambda: b.copy_(a), 2),
        "triad": (lambda: torch.add(a, b, alpha=3.0, out=c), 3),
    }
    return {f"{name}, GB/s": 1e-9 * n * ARRAY_BYTES / time_best(action, runs) for name, (action, n) in moved.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {describe_machine()}")
    rates = measure_matmuls(args.runs) | measure_memory(args.runs)
    for name, value in rates.items():
        print(f"{name:44s} {value:9,.1f}")
    write_json(args.json, rates)


if __name__ == "__main__":
    main()
