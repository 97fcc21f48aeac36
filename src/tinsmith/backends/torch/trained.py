"""What training changes about an adapter: its accumulated gradient, its moments and its step count.

Each is one flat float32 buffer in the adapter's own layout (see lora.Layout). Which moments there are is the
optimizer family's affair; `optimizers` knows the families. Knows no request and no file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinsmith.backends.torch.lora import Adapter


@dataclass(slots=True)
class Trained:
    """`gradient_P` None means that nothing has accumulated; the moments are None before the first step."""

    adapter: Adapter
    gradient_P: Tensor | None = None
    moments: tuple[Tensor, ...] | None = None
    step: Tensor = field(default_factory=lambda: torch.zeros(()))
    optimizer_type: str = "adamw"

    def add_gradient(self, gradient_P: Tensor) -> None:
        """Take a buffer over, or add it to what has accumulated."""
        if self.gradient_P is None:
            self.gradient_P = gradient_P
        else:
            self.gradient_P += gradient_P

    def take_gradient(self) -> Tensor:
        """What has accumulated, zeros if nothing; it is gone afterwards."""
        gradient_P = self.gradient_P
        self.gradient_P = None
        return torch.zeros_like(self.adapter.flat_P) if gradient_P is None else gradient_P

    def moments_or_zeros(self, count: int) -> tuple[Tensor, ...]:
        """The moments, made with zeros at the first step."""
        if self.moments is None:
            self.moments = tuple(torch.zeros_like(self.adapter.flat_P) for _ in range(count))
            self.step = self.step.to(self.adapter.flat_P.device)
        return self.moments
