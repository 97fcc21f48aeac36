"""A linear with adapters whose frozen weight is stored as codes, in whatever format.

`quantization` chooses the format; `fp8` also multiplies codes. Knows no format.

Shapes: I inputs and O outputs of a linear.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from tinsmith.backends.torch.lora import ForwardContext, MultiLoRALinear

MakeLinear = Callable[[str, str, nn.Linear, ForwardContext], MultiLoRALinear]


class WeightCodes(Protocol):
    """A quantised weight."""

    num_bytes: int

    def tensors(self) -> list[Tensor]: ...
    def weight(self) -> Tensor: ...


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
        self._codes = quantise(linear.weight.detach())

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored codes and scales."""
        return self._codes.num_bytes

    def frozen_tensors(self) -> list[Tensor]:
        """The codes and scales."""
        return self._codes.tensors()

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        # Called for missing attributes, as it is for a parameter of that name.
        if name == "weight" and (codes := self.__dict__.get("_codes")) is not None:
            return codes.weight()
        return super().__getattr__(name)
