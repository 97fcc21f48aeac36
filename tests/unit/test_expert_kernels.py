"""The kernels between experts' grouped products against float64; in Triton's interpreter, or on the device that
TEST_DEVICE names.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

from gpu.device import DEVICE, NAMED, ON_CUDA

if not (NAMED and ON_CUDA):
    from support import interpreted  # noqa: F401 - before the kernels

from tinsmith.backends.torch import expert_kernels, moe
from tinsmith.backends.torch.adapters import Adapter, AdapterStack, ExpertStack, Layout, Target
from tinsmith.backends.torch.expert_kernels import GroupedPairs
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.types import LoraSpec

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

WHERE = DEVICE if NAMED else "cpu"
EXPERTS, CHOICES, HIDDEN, INNER = 5, 3, 40, 72
NAMES = ("w1", "w3", "w2")


class Mixture(NamedTuple):
    """A module of experts with silu(gate) * up, as `moe` replaces it."""

    gate_up_EGD: Tensor
    down_EDI: Tensor


def targets(names: tuple[str, ...] = NAMES) -> list[Target]:
    outer, down = (ExpertStack(EXPERTS, common, interleaved=False) for common in "AB")
    sizes = {"w1": (HIDDEN, INNER, outer), "w3": (HIDDEN, INNER, outer), "w2": (INNER, HIDDEN, down)}
    return [Target(f"mlp.experts.{name}", "mlp", *sizes[name]) for name in names]
