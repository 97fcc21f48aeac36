"""Frozen weights stored as codes, in whatever format, and a linear with adapters over them.

`quantization` chooses the format; `fp8` also multiplies codes. Knows no format.

Shapes: E matrices (1 of a linear, or one for each expert), I inputs and O outputs of a linear.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from tinsmith.backends.torch.lora import ForwardContext, MultiLoRALinear

MakeLinear = Callable[[str, str, nn.Linear, ForwardContext], MultiLoRALinear]


class WeightCodes(Protocol):
    """Quantised matrices of one shape [E, O, I], and the dtype of their dequantised values."""

    dtype: torch.dtype

    def tensors(self) -> list[Tensor]:
        """The codes and scales."""
        ...

    def weight(self, index: int) -> Tensor:
        """[O, I], dequantised."""
        ...

    def weights(self) -> Tensor:
        """[E, O, I], dequantised."""
        ...


class QuantisedLinear(MultiLoRALinear):
    """`weight` is dequantised on every access; keeping it would undo the saving."""

    def __init__(
        self,
        name: str,
        group: str,
        linear: nn.Linear,
        context: ForwardContext,
        quantise: Callable[[Tensor], WeightCodes],
    ) -> None:
        super().__init__(name, group, linear, context)
        del self._parameters["weight"]
        self._codes = quantise(linear.weight.detach()[None])

    def frozen_tensors(self) -> list[Tensor]:
        """The codes and scales."""
        return self._codes.tensors()

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        # Called for missing attributes, as it is for a parameter of that name.
        if name == "weight" and (codes := self.__dict__.get("_codes")) is not None:
            return codes.weight(0)
        return super().__getattr__(name)
