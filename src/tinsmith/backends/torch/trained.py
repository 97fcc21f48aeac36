"""What training changes about an adapter: its accumulated gradient, its moments and its step count.

Each is one flat float32 buffer in the adapter's own layout (see lora.Layout). Which moments there are is the
optimizer family's affair; `optimizers` knows the families. A published version shares the weights until they change.
Knows no request and no file.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinsmith.backends.torch.adapters import Adapter


@dataclass(slots=True)
class Trained:
    """`gradient_P` None means that nothing has accumulated; the moments are None before the first step."""

    adapter: Adapter
    gradient_P: Tensor | None = None
    moments: tuple[Tensor, ...] | None = None
    step: Tensor = field(default_factory=lambda: torch.zeros(()))
    optimizer_type: str = "adamw"
    _published: weakref.ref[Adapter] | None = None

    def publish(self) -> Adapter:
        """The adapter as it is now and stays: nothing is copied before the weights change."""
        published = self._published and self._published()
        if published is None:
            published = self.adapter.share()
            self._published = weakref.ref(published)
        return published

    def own(self) -> None:
        """The weights are about to change: leave them to who still has them, and go on with a copy."""
        if self._published and self._published() is not None:
            self.adapter = self.adapter.clone()
        self._published = None

    def add_gradient(self, gradient_P: Tensor) -> None:
        """Take a buffer over, or add it to what has accumulated."""
        if self.gradient_P is None:
            self.gradient_P = gradient_P
        else:
            self.gradient_P += gradient_P

    def keep_own_gradient(self) -> None:
        """What has accumulated in a block of many is copied out of it, if it is still there (`gradients`)."""
        if self.gradient_P is not None and self.gradient_P.untyped_storage().nbytes() > self.gradient_P.nbytes:
            self.gradient_P = self.gradient_P.clone()

    def gradient_or_zeros(self) -> Tensor:
        """What has accumulated."""
        return torch.zeros_like(self.adapter.flat_P) if self.gradient_P is None else self.gradient_P

    def copy(self, *, gradient: bool) -> Trained:
        """All of it as it is now, sharing nothing; without its gradient unless asked for."""
        return Trained(
            self.adapter.numbers(),
            self.gradient_P.clone() if gradient and self.gradient_P is not None else None,
            None if self.moments is None else tuple(moment.clone() for moment in self.moments),
            self.step.clone(),
            self.optimizer_type,
        )

    @property
    def num_bytes(self) -> int:
        """What it takes, or will once it has a gradient and moments; without those that are in the host's memory."""
        device = self.adapter.flat_P.device
        moments = 2 if self.moments is None else sum(moment.device == device for moment in self.moments)
        return self.adapter.num_bytes + self.adapter.flat_P.nbytes * (1 + moments)

    @property
    def parkable_bytes(self) -> int:
        """What `park` would take off the device."""
        device = self.adapter.flat_P.device
        if self.moments is None or device.type == "cpu":
            return 0
        return sum(moment.nbytes for moment in self.moments if moment.device == device)

    def park(self) -> int:
        """Have the moments in the host's memory until the next step; returns what that frees of the device."""
        if freed := self.parkable_bytes:
            assert self.moments is not None
            self.moments = tuple(moment.cpu() for moment in self.moments)
        return freed

    def moments_or_zeros(self, count: int) -> tuple[Tensor, ...]:
        """The moments, on the device, made with zeros at the first step."""
        if self.moments is not None:
            self.moments = tuple(moment.to(self.adapter.flat_P.device) for moment in self.moments)
        if self.moments is None:
            self.moments = tuple(torch.zeros_like(self.adapter.flat_P) for _ in range(count))
            self.step = self.step.to(self.adapter.flat_P.device)
        return self.moments
