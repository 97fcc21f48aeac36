"""All weights of a base model as one flat float32 buffer with a view per parameter.

They stand where an adapter stands elsewhere (`Trained`, the trainer, the sampler), but adapt nothing: rows that are
routed to them meet the base model itself, into whose parameters `FullBase` puts them first. So `compute` is empty.

Shapes: P all numbers of a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from tinsmith.backends.torch.gradients import Gradients
from tinsmith.backends.torch.lora import ALIGN, Adapter
from tinsmith.types import LoraSpec

FULL = LoraSpec(rank=0)
"""What such a model is created with: no adapter has this rank."""


@dataclass(frozen=True, eq=False)
class FullLayout:
    """Where each parameter lies in the flat buffer. Gaps stay zero for ever. A tied weight is there once."""

    shapes: dict[str, tuple[int, ...]]
    starts: tuple[int, ...]
    numel: int

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, nn.Parameter]]) -> FullLayout:
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
        sizes = (-(-math.prod(shape) // ALIGN) * ALIGN for shape in shapes.values())
        *starts, end = accumulate(sizes, initial=0)
        return cls(shapes, tuple(starts), end)

    def views(self, flat_P: Tensor) -> dict[str, Tensor]:
        return {
            name: flat_P[start : start + math.prod(shape)].view(shape)
            for start, (name, shape) in zip(self.starts, self.shapes.items(), strict=True)
        }

    def filled(self, tensors: dict[str, Tensor], device: torch.device) -> Tensor:
        """A flat buffer of these, which must be the layout's."""
        flat_P = torch.zeros(self.numel, device=device)
        for name, view in self.views(flat_P).items():
            view.copy_(tensors[name])
        return flat_P


class FullWeights(Adapter):
    """`weights` and `gradients` map a parameter's name to a view."""

    weights: dict[str, Tensor]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, layout: FullLayout, flat_P: Tensor) -> None:
        self.spec = FULL
        self.layout = layout  # pyright: ignore[reportAttributeAccessIssue, reportIncompatibleVariableOverride]
        self.scale = 1.0
        self.flat_P = flat_P
        self.compute_P = flat_P
        self.weights = layout.views(flat_P)
        self.compute = {}
        self.fused = {}
        self.shares = {}
        self.gradients = None

    def numbers(self) -> FullWeights:
        return self.clone()

    def clone(self) -> FullWeights:
        return FullWeights(self.layout, self.flat_P.clone())  # pyright: ignore[reportArgumentType]


class FullGradients(Gradients):
    """name -> a view. They begin as zeros: autograd adds to every parameter's."""

    def __init__(self, weights: FullWeights) -> None:
        self.flat_P = torch.zeros_like(weights.flat_P)
        self._views = weights.layout.views(self.flat_P)
        self._unwritten = {}

    def __getitem__(self, name: str) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)
