"""Dimuon as Tinsmith defines it: Muon on each of the two factors of every adapted linear (docs/optimizers.md).

The gradient's running mean is made orthogonal, matrix by matrix, by five Newton-Schulz iterations with the
coefficients of Jordan's Muon (2024), and scaled as Liu et al. (arXiv 2502.16982) do, so that an update is about as
large as AdamW's at the same learning rate. Matrices of one shape go through together, those of different adapters
never: an adapter's numbers do not depend on who else steps. A matrix that never had a gradient does not move.

Shapes: n matrices of one shape, r the smaller size, c the larger.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from tinsmith.backends.torch.trained import Trained
from tinsmith.errors import UserError
from tinsmith.types import DimuonParams

MOMENTS = ("momentum",)

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
RMS = 0.2
"""Root mean square of an update at learning rate 1: what AdamW's typically is."""


def check_dimuon(params: DimuonParams) -> None:
    """Raise UserError on what Dimuon cannot mean."""
    if not (math.isfinite(params.learning_rate) and params.learning_rate >= 0):
        raise UserError(f"optimizer_params.learning_rate is {params.learning_rate}; it must be finite and not negative")
    if not 0 <= params.beta1 < 1:
        raise UserError(f"optimizer_params.beta1 is {params.beta1}; it must be at least 0 and less than 1")
    if not math.isfinite(params.grad_clip_norm):
        raise UserError(f"optimizer_params.grad_clip_norm is {params.grad_clip_norm}; it must be finite")


def prepare_dimuon(trained: Trained, gradient_P: Tensor, params: DimuonParams) -> Callable[[], None]:
    """Compute a step; nothing has changed until the result is called, which needs no memory and cannot fail."""
    (momentum_P,) = trained.moments_or_zeros(len(MOMENTS))
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
