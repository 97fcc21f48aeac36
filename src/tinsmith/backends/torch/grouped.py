"""Products of rows with the matrix of their group, in one kernel: torch's `grouped_mm`, where its contract holds.

The rows of a group lie side by side, and `offsets` say where each group ends, on the device: another division of the
rows needs no other kernel. What the kernel asks for is looked at before each use (`suits`); whether it is right on a
device is tried once (`is_right_on`), against the products one by one, which stay the oracle and what everything else
goes through. Rows behind the last group would be left as the memory was, so the groups cover all rows. Products whose
rows are summed (gradients of matrices) do not go this way: their results would be rounded to bfloat16, and a group
without rows has been seen to get a gradient.

Shapes: T rows, S groups, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import structlog
import torch
from torch import Tensor, nn

ALIGNED_BYTES = 16
"""Of where an operand begins, and of the steps between its rows."""

MOST_GROUPS = 1023

GRAPHED_CAPABILITY = (9, 0)
"""From here on the kernel reads the offsets on the device; before, they may be copied to the host, which no graph can
capture.
"""

log = structlog.get_logger()


def grouped_product(x_TI: Tensor, matrices_SIO: Tensor, offsets_S: Tensor) -> Tensor:
    """[T, O]: each row with its group's matrix. `suits` must have said yes."""
    return nn.functional.grouped_mm(x_TI, matrices_SIO, offs=offsets_S)


def offsets_of(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Where groups of these sizes end."""
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def suits(x_TI: Tensor, matrices_SIO: Tensor) -> bool:
    """Whether the kernel takes these: bfloat16, one stride of 1 and all others, and the beginnings, aligned."""
    if x_TI.dtype != torch.bfloat16 or matrices_SIO.dtype != torch.bfloat16:
        return False
    if not 0 < len(matrices_SIO) <= MOST_GROUPS or x_TI.stride(1) != 1:
        return False
    return _is_aligned(x_TI) and _is_aligned(matrices_SIO) and matrices_SIO.shape[2] % _numbers(x_TI) == 0


def _is_aligned(x: Tensor) -> bool:
    rows, columns = x.stride()[-2:]
    if 1 not in (rows, columns):
        return False
    others = [step for step in x.stride() if step != 1]
    return x.data_ptr() % ALIGNED_BYTES == 0 and all(step % _numbers(x) == 0 for step in others)


def _numbers(x: Tensor) -> int:
    return ALIGNED_BYTES // x.itemsize


@lru_cache
def is_right_on(device: torch.device) -> bool:
    """Whether the kernel is there and does what the products one by one do, one of them without rows."""
    if not hasattr(nn.functional, "grouped_mm"):
        return False
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        x_TI = torch.randn(40, 64, generator=generator).to(device, torch.bfloat16)
        matrices_SOI = torch.randn(4, 24, 64, generator=generator).to(device, torch.bfloat16)
        sizes = [16, 0, 1, 23]
        expected_TO = torch.cat([x @ m.t() for x, m in zip(x_TI.split(sizes), matrices_SOI, strict=True)])
        try:
            found_TO = grouped_product(x_TI, matrices_SOI.mT, offsets_of(sizes, device))
            right = bool(torch.allclose(found_TO.float(), expected_TO.float(), rtol=0.02, atol=0.05))
        except RuntimeError as error:
            log.info("grouped products are not to be had here", device=str(device), error=str(error)[:200])
            return False
    if not right:
        log.warning("grouped products are wrong here and are not used", device=str(device))
    return right


@lru_cache
def can_be_graphed_on(device: torch.device) -> bool:
    return is_right_on(device) and torch.cuda.get_device_capability(device) >= GRAPHED_CAPABILITY


def is_used_on(device: torch.device) -> bool:
    """On a CPU the products one by one are as fast."""
    return device.type == "cuda" and is_right_on(device)
