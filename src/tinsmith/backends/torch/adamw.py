"""What training changes about an adapter, and AdamW over many adapters in one call.

A `Trained` is an adapter with its accumulated gradient, its moments and its step count, each one flat float32
buffer (see lora.Layout). `step_adamw` honours every parameter of every request, judges each adapter alone,
and leaves one whose gradient is not finite as it was, without its gradient. A step without a gradient is a
step with a gradient of zero: moments decay, what they still hold moves the weights, the step counts. Equal to
torch.optim.AdamW after clip_grad_norm_. Knows no request and no file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tinsmith.backends.torch.lora import Adapter
from tinsmith.errors import NonFiniteGradientError, UserError
from tinsmith.ops import AdamParams

CLIP_EPSILON = 1e-6
"""What torch's clip_grad_norm_ adds to the norm before it divides."""


@dataclass(slots=True)
class Trained:
    """`gradient_P` None means that nothing has accumulated; the moments are None before the first step."""

    adapter: Adapter
    gradient_P: Tensor | None = None
    moments: tuple[Tensor, Tensor] | None = None
    step: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add_gradient(self, gradient_P: Tensor) -> None:
        """Take a buffer over, or add it to what has accumulated."""
        if self.gradient_P is None:
            self.gradient_P = gradient_P
        else:
            self.gradient_P += gradient_P


def check_params(params: AdamParams) -> None:
    """Raise UserError on what AdamW cannot mean."""
    for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
        value = getattr(params, name)
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"adam_params.{name} is {value}; it must be finite and not negative")
    for name in ("beta1", "beta2"):
        value = getattr(params, name)
        if not 0 <= value < 1:
            raise UserError(f"adam_params.{name} is {value}; it must be at least 0 and less than 1")
    # With eps 0 a weight that has never had a gradient becomes 0 / 0.
    if not (math.isfinite(params.eps) and params.eps > 0):
        raise UserError(f"adam_params.eps is {params.eps}; it must be finite and greater than 0")


@torch.no_grad()
def step_adamw(
    requests: Sequence[tuple[Trained, AdamParams]],
) -> list[dict[str, float] | NonFiniteGradientError]:
    """Metrics of each request: the norm is the gradient's before clipping. Gradients are gone afterwards."""
    outcomes: list[dict[str, float] | NonFiniteGradientError] = []
    groups: dict[AdamParams, list[Trained]] = {}
    gradients = [_take_gradient(trained) for trained, _ in requests]
    norms = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]).tolist()
    for (trained, params), gradient_P, norm in zip(requests, gradients, norms, strict=True):
        if not math.isfinite(norm):
            outcomes.append(NonFiniteGradientError())
            continue
        if 0 < params.grad_clip_norm < norm + CLIP_EPSILON:
            gradient_P.mul_(params.grad_clip_norm / (norm + CLIP_EPSILON))
        trained.gradient_P = gradient_P
        groups.setdefault(params, []).append(trained)
        step = float(trained.step) + 1
        outcomes.append({"grad_norm": norm, "learning_rate": params.learning_rate, "step": step})
    for params, group in groups.items():
        _step_together(group, params)
    return outcomes


def _take_gradient(trained: Trained) -> Tensor:
    gradient_P = trained.gradient_P
    trained.gradient_P = None
    return torch.zeros_like(trained.adapter.flat_P) if gradient_P is None else gradient_P


def _step_together(group: Sequence[Trained], params: AdamParams) -> None:
    """One fused pass over every number: weights, moments and step are read and written once."""
    for trained in group:
        if trained.moments is None:
            flat_P = trained.adapter.flat_P
            trained.moments = (torch.zeros_like(flat_P), torch.zeros_like(flat_P))
            trained.step = trained.step.to(flat_P.device)
    moments = [trained.moments for trained in group if trained.moments is not None]
    adamw(
        [trained.adapter.flat_P for trained in group],
        [trained.gradient_P for trained in group if trained.gradient_P is not None],
        [first for first, _ in moments],
        [second for _, second in moments],
        [],
        [trained.step for trained in group],
        fused=True,
        lr=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        weight_decay=params.weight_decay,
        eps=params.eps,
        amsgrad=False,
        maximize=False,
    )
    for trained in group:
        trained.gradient_P = None
        trained.adapter.refresh()
