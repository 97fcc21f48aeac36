"""The low-rank products of decode steps, in Triton, against plain products; on a CPU in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu.device import DEVICE, ON_CUDA
from support import lora_reference
from tinsmith.backends.torch.adapters import Adapter, Layout, Target
from tinsmith.backends.torch.lora import DeviceLoRABatch, LoRADelta
from tinsmith.backends.torch.lora_batch import BLOCK_ROWS, LoRABatch
from tinsmith.types import LoraSpec

pytest.importorskip("triton")

DTYPES = [torch.float32, torch.bfloat16] if ON_CUDA else [torch.float32]
"""Triton's interpreter multiplies no bfloat16."""


def targets(inputs: int, outputs: tuple[int, ...]) -> list[Target]:
    return [Target(f"l{index}", "mlp", inputs, out) for index, out in enumerate(outputs)]


def adapter(layout: Layout, seed: int, dtype: torch.dtype, alpha: float) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    flat_P = torch.zeros(layout.numel)
    for a, b in layout.views(flat_P).values():
        a.copy_(torch.randn(a.shape, generator=generator) * a.shape[1] ** -0.5)
        b.copy_(torch.randn(b.shape, generator=generator))
    return Adapter(LoraSpec(layout.rank, alpha=alpha), layout, flat_P.to(DEVICE), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 8, 24, 80])
def test_rows_of_many_adapters_are_what_each_would_be_alone(dtype: torch.dtype, rank: int) -> None:
    rng = np.random.default_rng(rank)
    inputs, outputs = 1100, (130, 40, 256)
    chosen_targets = targets(inputs, outputs)
    delta, layout = LoRADelta(chosen_targets), Layout.of(rank, chosen_targets[:2] if rank == 8 else chosen_targets)
    trained_adapters = [adapter(layout, seed, dtype, alpha) for seed, alpha in ((1, 16.0), (2, 3.5), (3, 32.0))]
    counts = [
        (trained_adapters[0], 19),
        (None, 2),
        (trained_adapters[1], 1),
        (trained_adapters[2], BLOCK_ROWS),
        (None, 3),
    ]
    adapters = [owner for owner, count in counts for _ in range(count)]
    x_nI = torch.from_numpy(rng.standard_normal((len(adapters), inputs), np.float32)).to(DEVICE, dtype)
    y_nO = torch.from_numpy(rng.standard_normal((len(adapters), sum(outputs)), np.float32)).to(DEVICE, dtype)
    expected = y_nO.double()
    wide = {
        id(owner): Adapter(owner.spec, layout, owner.compute_P.double(), torch.float64) for owner in trained_adapters
    }
    lora_batch = LoRABatch.of([wide.get(id(owner)) for owner in adapters], [1] * len(adapters))
    lora_reference.add_deltas_(delta, expected, x_nI.double(), lora_batch)
    DeviceLoRABatch.of(adapters, [1] * len(adapters)).add_deltas_(delta, y_nO, x_nI)
    error = float((y_nO.double() - expected).norm() / expected.norm())
    assert error < (1e-6 if dtype == torch.float32 else 5e-3)


def test_rows_that_are_not_finite_stay_alone() -> None:
    chosen_targets = targets(256, (64,))
    delta, layout = LoRADelta(chosen_targets), Layout.of(8, chosen_targets)
    sick_adapter = adapter(layout, 1, DTYPES[-1], 16.0)
    x_nI = torch.ones(20, 256, dtype=DTYPES[-1], device=DEVICE)
    x_nI[3] = float("nan")
    y_nO = torch.zeros(20, 64, dtype=DTYPES[-1], device=DEVICE)
    DeviceLoRABatch.of([sick_adapter], [20]).add_deltas_(delta, y_nO, x_nI)
    is_finite = y_nO.isfinite().all(1)
    assert not is_finite[3] and int(is_finite.sum()) == 19
