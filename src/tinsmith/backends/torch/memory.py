"""Memory that ran out, whatever the allocator calls it; and how much there is.

CUDA raises an error of its own, its libraries and the CPU's allocator a RuntimeError that only its text tells from
others. All of them become MemoryError, which the engine understands.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SIGNS = ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED", "not enough memory")

GIBIBYTE = 2**30

MODELS_SHARE = 0.4
"""Of what is free once the base model is there: the rest is for activations, the KV cache and published versions."""


class OverBudgetError(MemoryError):
    """A budget has not so much: the device itself was not asked."""


@contextmanager
def memory_errors(device: torch.device) -> Iterator[None]:
    """Turn whatever means that memory ran out into MemoryError."""
    try:
        yield
    except OverBudgetError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not _ran_out(error):
            raise
        text = str(error).strip().partition("\n")[0][:200] or "an allocation failed"
        free = f"{device} has {free_bytes(device) / GIBIBYTE:.1f} GiB free"
        raise MemoryError(f"{free} ({text})") from None


def _ran_out(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(sign in str(error) for sign in SIGNS)


def free_bytes(device: torch.device) -> int:
    """What could be allocated now, as far as the system tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
