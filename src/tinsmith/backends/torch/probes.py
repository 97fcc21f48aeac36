"""Tries functions of transformers' modules on random numbers on the host, to learn what they compute.

A name or a class tells little: families copy each other's code and change a line. A probe returns what a function makes
of numbers, or None where it does not take them; the caller compares that with a formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

UNEXPECTED = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, AssertionError)
"""Errors of modules and functions with inputs that they do not expect: they compute something else."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
"""The largest difference from a formula on random numbers, relative to the largest number."""

GATED_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": partial(gelu, approximate="tanh"),
}

SCALES = (1.0, 100.0)
"""Of the numbers that gates get: some families limit large ones."""


def draw(*shape: int, seed: int) -> Tensor:
    """Normal numbers, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def call(function: Callable[..., object], *inputs: Tensor) -> Tensor | None:
    """The function's result; None if it fails or returns something else than a tensor."""
    try:
        result = function(*inputs)
    except UNEXPECTED:
        return None
    return result if isinstance(result, Tensor) else None


def measure_error(actual: Tensor | None, expected: Tensor) -> float:
    """Relative to the largest number; infinite for results of other shapes or dtypes."""
    if actual is None or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max())


def is_near(actual: Tensor | None, expected: Tensor) -> bool:
    return measure_error(actual, expected) < TOLERANCE[torch.float32]


def find_activation(apply_gate: Callable[[Tensor], Tensor]) -> str | None:
    """The activation of the first half of experts' columns, if it is multiplied by the second half."""
    samples = [(call(apply_gate, x), *x.chunk(2, -1)) for x in (scale * draw(3, 16, seed=0) for scale in SCALES)]
    for name, activate in GATED_ACTIVATIONS.items():
        if all(is_near(actual, activate(gate) * up) for actual, gate, up in samples):
            return name
    return None
