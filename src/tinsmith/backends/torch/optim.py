"""The optimizer families, and one step of many adapters whatever their families.

A model's family is fixed when it is created; parameters of another are refused. Every request's parameters count
for itself, and an adapter whose gradient is not finite is left as it was, without its gradient. Clipping is by the
norm over the whole adapter, as torch's clip_grad_norm_ does it. Knows no request and no file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tinsmith.backends.torch import adamw, dimuon
from tinsmith.backends.torch.trained import Trained
from tinsmith.errors import NonFiniteGradientError, UserError
from tinsmith.types import AdamParams, OptimParams

CLIP_EPSILON = 1e-6
"""What torch's clip_grad_norm_ adds to the norm before it divides."""

MOMENTS: Mapping[str, tuple[str, ...]] = {"adamw": adamw.MOMENTS, "dimuon": dimuon.MOMENTS}
"""Each family's state by name, as a checkpoint holds it."""


def check_family(optimizer_type: str) -> str:
    if optimizer_type not in MOMENTS:
        raise UserError(f"optimizer_config.type is {optimizer_type!r}; it must be one of {', '.join(MOMENTS)}")
    return optimizer_type


MAX_NORM = 1e19
"""Of a gradient after clipping: moments hold its square in float32. What is infinite there once stays so, and its
weight never moves again.
"""

NORM_ROW = 4096

SMALLEST_NORM = 1e-9
"""Below it, squares may have become zero in float32."""

TOO_LARGE = (
    "the gradient's norm is {norm:.3g}, whose square is infinite in float32, so the step was not applied and the "
    "gradient was dropped; look at the pass's weights or advantages, or set grad_clip_norm"
)


def check_params(optimizer_type: str, params: OptimParams) -> None:
    """Raise UserError unless these are good parameters of this family."""
    if params.family != optimizer_type:
        raise UserError(f"the model was created with {optimizer_type!r}, and the step has {params.family!r} parameters")
    if isinstance(params, AdamParams):
        adamw.check_adam(params)
    else:
        dimuon.check_dimuon(params)


def _norm(gradient_P: Tensor) -> float:
    """Squares are summed in float32 over `NORM_ROW` numbers, and these sums in float64, unless float32 cannot hold
    them: that would read every number eight times as slowly.
    """
    whole = gradient_P.numel() // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(gradient_P[:whole].view(-1, NORM_ROW), dim=-1)
    rest = torch.linalg.vector_norm(gradient_P[whole:])
    norm = math.hypot(float(torch.linalg.vector_norm(rows, dtype=torch.float64)), float(rest))
    if SMALLEST_NORM < norm < math.inf:
        return norm
    return float(torch.linalg.vector_norm(gradient_P, dtype=torch.float64))


@torch.no_grad()
def step_together(requests: Sequence[tuple[Trained, OptimParams]]) -> list[dict[str, float] | NonFiniteGradientError]:
    """Metrics of each checked request: the norm is the gradient's before clipping. Gradients are gone afterwards.

    All or nothing: what needs memory is done before the first number changes.
    """
    outcomes: list[dict[str, float] | NonFiniteGradientError] = []
    adam: dict[AdamParams, list[tuple[Trained, Tensor]]] = {}
    clipped: list[tuple[Tensor, float]] = []
    changes: list[Callable[[], None]] = []
    gradients = [trained.gradient_or_zeros() for trained, _ in requests]
    norms = [_norm(gradient_P) for gradient_P in gradients]
    for (trained, params), gradient_P, norm in zip(requests, gradients, norms, strict=True):
        if not math.isfinite(norm):
            outcomes.append(NonFiniteGradientError())
            continue
        factor = 1.0
        if 0 < params.grad_clip_norm < norm + CLIP_EPSILON:
            factor = params.grad_clip_norm / (norm + CLIP_EPSILON)
        if norm * factor > MAX_NORM:
            outcomes.append(NonFiniteGradientError(TOO_LARGE.format(norm=norm)))
            continue
        number = float(trained.step) + 1
        outcomes.append({"grad_norm": norm, "learning_rate": params.learning_rate, "step": number})
        trained.own()
        trained.moments_or_zeros(len(MOMENTS[trained.optimizer_type]))
        if isinstance(params, AdamParams):
            adam.setdefault(params, []).append((trained, gradient_P))
            clipped.append((gradient_P, factor))
        else:
            changes.append(dimuon.prepare_dimuon(trained, gradient_P * factor, params))
    for trained, _ in requests:
        trained.gradient_P = None
    for gradient_P, factor in clipped:
        if factor != 1.0:
            gradient_P.mul_(factor)
    for params, group in adam.items():
        adamw.step_adamw(group, params)
    for change in changes:
        change()
    return outcomes
