"""The steps of the optimizers, and one step of many adapters with different optimizers.

A model's optimizer is fixed when it is created; parameters of another are refused. Each request has its own parameters,
and an adapter whose gradient is not finite is left as it was, without its gradient. Clipping is by the norm over the
whole adapter, as torch's clip_grad_norm_ does it. Knows no request and no file.

AdamW is torch's, over many adapters in one fused pass. A step without a gradient is a step with a gradient of zero:
moments decay, what they still hold moves the weights, the step counts.

Dimuon is Muon on each of the two factors of every adapted linear (docs/optimizers.md). The gradient's running mean is
made orthogonal, matrix by matrix, by five Newton-Schulz iterations with the coefficients of Jordan's Muon (2024), and
scaled as Liu et al. (arXiv 2502.16982) do, so that an update is about as large as AdamW's at the same learning rate.
Matrices of one shape of one adapter go through together: its numbers do not depend on other adapters of the step. A
matrix that never had a gradient does not move.

Shapes: P numbers of an adapter, n matrices of one shape, r the smaller size, c the larger.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tinsmith.backends.torch.adapters import Trained
from tinsmith.errors import NonFiniteGradientError, UserError
from tinsmith.types import OPTIMIZERS, AdamParams, DimuonParams, OptimParams

CLIP_EPSILON = 1e-6
"""What torch's clip_grad_norm_ adds to the norm before it divides."""


def check_family(optimizer_type: str) -> str:
    if optimizer_type not in OPTIMIZERS:
        raise UserError(f"optimizer_config.type is {optimizer_type!r}; it must be one of {', '.join(OPTIMIZERS)}")
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
    if problem := params.problem():
        raise UserError(problem)


def _norm(gradient_P: Tensor) -> Tensor:
    """A float64 number on the gradient's device. Squares are summed in float32 over `NORM_ROW` numbers, and these sums
    in float64: that alone would read every number eight times as slowly.
    """
    whole = gradient_P.numel() // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(gradient_P[:whole].view(-1, NORM_ROW), dim=-1)
    rest = torch.linalg.vector_norm(gradient_P[whole:]).double()
    return torch.hypot(torch.linalg.vector_norm(rows, dtype=torch.float64), rest)


def norms_and_steps(gradients: Sequence[Tensor], steps: Sequence[Tensor]) -> tuple[list[float], list[float]]:
    """Of many adapters, by one read from their device; another for a norm that float32 cannot hold the squares of."""
    device = gradients[0].device
    counts = torch.stack([step.to(device, torch.float64) for step in steps])
    norms, numbers = torch.stack([torch.stack([_norm(gradient_P) for gradient_P in gradients]), counts]).tolist()
    for place, gradient_P in enumerate(gradients):
        if not SMALLEST_NORM < norms[place] < math.inf:
            norms[place] = float(torch.linalg.vector_norm(gradient_P, dtype=torch.float64))
    return norms, numbers


class Clipped(NamedTuple):
    """A gradient [P] and what clipping multiplies it by."""

    trained: Trained
    gradient_P: Tensor
    factor: float


@torch.no_grad()
def step_together(requests: Sequence[tuple[Trained, OptimParams]]) -> list[dict[str, float] | NonFiniteGradientError]:
    """Metrics of each checked request: the norm is the gradient's before clipping. Gradients are gone afterwards.

    All or nothing: what needs memory is done before the first number changes.
    """
    if not requests:
        return []
    outcomes: list[dict[str, float] | NonFiniteGradientError] = []
    groups: dict[OptimParams, list[Clipped]] = {}
    gradients = [trained.gradient_or_zeros() for trained, _ in requests]
    norms, steps = norms_and_steps(gradients, [trained.step for trained, _ in requests])
    for (trained, params), gradient_P, norm, step in zip(requests, gradients, norms, steps, strict=True):
        if not math.isfinite(norm):
            outcomes.append(NonFiniteGradientError())
            continue
        factor = 1.0
        if 0 < params.grad_clip_norm < norm + CLIP_EPSILON:
            factor = params.grad_clip_norm / (norm + CLIP_EPSILON)
        if norm * factor > MAX_NORM:
            outcomes.append(NonFiniteGradientError(TOO_LARGE.format(norm=norm)))
            continue
        outcomes.append({"grad_norm": norm, "learning_rate": params.learning_rate, "step": step + 1})
        trained.own()
        trained.moments_or_zeros(len(params.state))
        groups.setdefault(params, []).append(Clipped(trained, gradient_P, factor))
    changes = [_STEPS[params.family](group, params) for params, group in groups.items()]
    for trained, _ in requests:
        trained.gradient_P = None
    for change in changes:
        change()
    return outcomes


def prepare_adamw(group: Sequence[Clipped], params: OptimParams) -> Callable[[], None]:
    """One fused pass over all numbers of the group. Nothing has changed until the result is called."""
    assert isinstance(params, AdamParams)
    moments = [each.trained.moments_or_zeros(len(params.state)) for each in group]

    def change() -> None:
        for each in group:
            if each.factor != 1.0:
                each.gradient_P.mul_(each.factor)
        adamw(
            [each.trained.adapter.flat_P for each in group],
            [each.gradient_P for each in group],
            [first for first, _ in moments],
            [second for _, second in moments],
            [],
            [each.trained.step for each in group],
            fused=True,
            lr=params.learning_rate,
            beta1=params.beta1,
            beta2=params.beta2,
            weight_decay=params.weight_decay,
            eps=params.eps,
            amsgrad=False,
            maximize=False,
        )
        for each in group:
            each.trained.adapter.refresh()

    return change


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
RMS = 0.2
"""Root mean square of an update at learning rate 1: what AdamW's typically is."""


def prepare_dimuon(group: Sequence[Clipped], params: OptimParams) -> Callable[[], None]:
    """Compute the updates. Nothing has changed until the result is called, which needs no memory and cannot fail."""
    changes = [_dimuon_update(each.trained, each.gradient_P * each.factor, params) for each in group]

    def change() -> None:
        for each in changes:
            each()

    return change


def _dimuon_update(trained: Trained, gradient_P: Tensor, params: OptimParams) -> Callable[[], None]:
    (momentum_P,) = trained.moments_or_zeros(len(params.state))
    new_momentum_P = torch.lerp(momentum_P, gradient_P, 1 - params.beta1)
    layout = trained.adapter.layout
    groups: defaultdict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for weights, moments in zip(
        layout.views(trained.adapter.flat_P).values(), layout.views(new_momentum_P).values(), strict=True
    ):
        for weight, moment in zip(weights, moments, strict=True):
            groups[weight.shape].append((weight, moment))
    updates: list[tuple[Tensor, Tensor]] = []
    for shape, pairs in groups.items():
        update = orthogonalise(torch.stack([moment for _, moment in pairs]))
        update *= -params.learning_rate * RMS * math.sqrt(max(shape[-2:]))
        updates += zip([weight for weight, _ in pairs], update.unbind(), strict=True)

    def change() -> None:
        trained.moments = (new_momentum_P,)
        trained.step += 1
        for weight, update in updates:
            weight += update
        trained.adapter.refresh()

    return change


def orthogonalise(matrices: Tensor) -> Tensor:
    """Each matrix with its singular values brought near 1 (0.68 to 1.13); a matrix of zeros stays one."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x_nrc = matrices.mT if tall else matrices
    # In float64: squares of a small gradient vanish in float32.
    norms = torch.linalg.matrix_norm(x_nrc, dtype=torch.float64, keepdim=True)
    x_nrc = (x_nrc / torch.where(norms == 0, 1.0, norms)).to(matrices.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram_nrr = x_nrc @ x_nrc.mT
        x_nrc = a * x_nrc + (b * gram_nrr + c * gram_nrr @ gram_nrr) @ x_nrc
    return x_nrc.mT if tall else x_nrc


_STEPS: Mapping[str, Callable[[Sequence[Clipped], OptimParams], Callable[[], None]]] = {
    AdamParams.family: prepare_adamw,
    DimuonParams.family: prepare_dimuon,
}
