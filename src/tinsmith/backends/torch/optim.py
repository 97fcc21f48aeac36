"""The optimizers, and one step of many adapters with different optimizers.

A model's optimizer is fixed when it is created; parameters of another are refused. Each request has its own parameters.
An adapter with a non-finite gradient keeps its weights and loses the gradient. Clipping is by the norm over the whole
adapter, like torch's clip_grad_norm_. Knows no request and no file.

AdamW is torch's, over many adapters in one fused pass. A step without a gradient is a step with a gradient of zero:
moments decay, their remaining values move the weights, and the step counts.

Dimuon is Muon on each of the two factors of every adapted linear (docs/optimizers.md). The gradient's running mean is
orthogonalised, matrix by matrix, by five Newton-Schulz iterations with the coefficients of Jordan's Muon (2024), and
scaled as Liu et al. (arXiv 2502.16982) do, so that an update is about as large as AdamW's at the same learning rate.
Matrices of equal shape within one adapter are batched: its update does not depend on other adapters of the step. A
matrix that never had a gradient does not move.

Where several processes have one adapter, each steps its elements (`TrainedModel.share`), for Dimuon whole matrices, and
sends their weights to the others. The norm is then that of all their gradients.

Shapes: p elements of an adapter that this process steps, n matrices of one shape, r the smaller size, c the larger.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tinsmith.backends.torch.adapters import TrainedModel, view_matrix
from tinsmith.backends.torch.host import read
from tinsmith.errors import NonFiniteGradientError, UserError
from tinsmith.runtime.devices import place_for_float64
from tinsmith.types import OPTIMIZERS, AdamParams, DimuonParams, OptimParams

CLIP_EPSILON = 1e-6
"""torch's clip_grad_norm_ adds this to the norm before dividing."""


def check_optimizer_type(optimizer_type: str) -> str:
    if optimizer_type not in OPTIMIZERS:
        raise UserError(f"optimizer_config.type is {optimizer_type!r}; it must be one of {', '.join(OPTIMIZERS)}")
    return optimizer_type


MAX_NORM = 1e19
"""Limit for a gradient's norm after clipping: moments hold its square in float32. An infinite moment stays infinite,
and its weight never moves again.
"""

NORM_ROW = 4096

SMALLEST_NORM = 1e-9
"""Below this, squares may underflow to zero in float32."""

TOO_LARGE = (
    "the gradient's norm is {norm:.3g}, whose square is infinite in float32, so the step was not applied and the "
    "gradient was dropped; look at the pass's weights or advantages, or set grad_clip_norm"
)


def check_params(optimizer_type: str, params: OptimParams) -> None:
    """Raise UserError unless these are valid parameters of this optimizer."""
    if params.family != optimizer_type:
        raise UserError(f"the model was created with {optimizer_type!r}, and the step has {params.family!r} parameters")
    if problem := params.problem():
        raise UserError(problem)


def _norm(gradient_P: Tensor) -> Tensor:
    """A float64 scalar, on the gradient's device if that computes in float64. Squares are summed in float32 over
    `NORM_ROW` elements, and these sums in float64: float64 throughout would be much slower.
    """
    full = gradient_P.numel() // NORM_ROW * NORM_ROW
    rows = place_for_float64(torch.linalg.vector_norm(gradient_P[:full].view(-1, NORM_ROW), dim=-1))
    tail = place_for_float64(torch.linalg.vector_norm(gradient_P[full:])).double()
    return torch.hypot(torch.linalg.vector_norm(rows, dtype=torch.float64), tail)


def _exact_norm(gradient_P: Tensor) -> Tensor:
    return torch.linalg.vector_norm(place_for_float64(gradient_P), dtype=torch.float64)


def norms_and_steps(gradients: Sequence[Tensor], steps: Sequence[Tensor]) -> tuple[list[float], list[float]]:
    """Norms of gradients and step counts of many adapters, with one read from their device, and another for norms whose
    squares exceed float32.
    """
    unread_norms_N = torch.stack([_norm(gradient_P) for gradient_P in gradients])
    on_device = [index for index, step in enumerate(steps) if step.device == unread_norms_N.device]
    norms_N, *device_steps = read(unread_norms_N, *(steps[i] for i in on_device))
    norms, steps_by_index = norms_N.tolist(), dict(zip(on_device, device_steps, strict=True))
    # The step of an adapter without steps is on the host.
    step_numbers = [
        float(steps_by_index[index]) if index in steps_by_index else float(step) for index, step in enumerate(steps)
    ]
    if imprecise := [index for index, norm in enumerate(norms) if not SMALLEST_NORM < norm < math.inf]:
        exact = read(*map(_exact_norm, (gradients[index] for index in imprecise)))
        for index, norm in zip(imprecise, exact, strict=True):
            norms[index] = float(norm)
    return norms, step_numbers


class ClippedGradient(NamedTuple):
    """A gradient [p] and its clipping factor."""

    trained: TrainedModel
    gradient_p: Tensor
    factor: float


class MeasuredGradients(NamedTuple):
    """The gradients [p] of a step's requests with their norms, and the numbers of steps before."""

    requests: Sequence[tuple[TrainedModel, OptimParams]]
    gradients: Sequence[Tensor]
    norms: list[float]
    steps: list[float]


@torch.no_grad()
def measure_gradients(requests: Sequence[tuple[TrainedModel, OptimParams]]) -> MeasuredGradients:
    """Of checked requests, at least one."""
    gradients = [trained.gradient_or_zeros() for trained, _ in requests]
    return MeasuredGradients(
        requests, gradients, *norms_and_steps(gradients, [trained.step for trained, _ in requests])
    )


class PreparedStep(NamedTuple):
    """A step of several adapters that has changed none: the metrics of each request, with the gradient's norm before
    clipping, and the changes of each group of adapters, which allocate nothing."""

    requests: Sequence[tuple[TrainedModel, OptimParams]]
    outcomes: list[dict[str, float] | NonFiniteGradientError]
    changes: Sequence[Callable[[], None]]

    @torch.no_grad()
    def apply(self) -> list[dict[str, float] | NonFiniteGradientError]:
        """Change the weights and drop the gradients."""
        for trained, _ in self.requests:
            trained.gradient_P = None
        for change in self.changes:
            change()
        return self.outcomes


@torch.no_grad()
def prepare_measured_step(measured: MeasuredGradients, norms: Sequence[float]) -> PreparedStep:
    """Everything that allocates memory for a step, so that the step is all or nothing. `norms`: of the whole adapters,
    of whose gradients this process may have measured a part.
    """
    outcomes: list[dict[str, float] | NonFiniteGradientError] = []
    groups: dict[OptimParams, list[ClippedGradient]] = {}
    requests, gradients, _, steps = measured
    for (trained, params), gradient_p, norm, step in zip(requests, gradients, norms, steps, strict=True):
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
        trained.unshare()
        trained.moments_or_zeros(len(params.state))
        groups.setdefault(params, []).append(ClippedGradient(trained, gradient_p, factor))
    changes = [_STEPS[params.family](group, params) for params, group in groups.items()]
    return PreparedStep(requests, outcomes, changes)


def prepare_step(requests: Sequence[tuple[TrainedModel, OptimParams]]) -> PreparedStep:
    """A step of checked requests in one process."""
    if not requests:
        return PreparedStep((), [], ())
    measured = measure_gradients(requests)
    return prepare_measured_step(measured, measured.norms)


def prepare_adamw(group: Sequence[ClippedGradient], params: OptimParams) -> Callable[[], None]:
    """One fused pass over all parameters of the group that this process steps. Nothing changes until the result is
    called.
    """
    assert isinstance(params, AdamParams)
    weights: list[Tensor] = []
    gradients: list[Tensor] = []
    moments: tuple[list[Tensor], list[Tensor]] = [], []
    steps: list[Tensor] = []
    clipped: list[Tensor] = []
    factors: list[float] = []
    for trained, gradient_p, factor in group:
        parts = trained.split(gradient_p)
        weights += trained.local(trained.adapter.flat_P)
        gradients += parts
        for state_parts, state_p in zip(moments, trained.moments_or_zeros(len(params.state)), strict=True):
            state_parts += trained.split(state_p)
        # The pass counts a step for each tensor.
        steps += [trained.step, *(trained.step.clone() for _ in parts[1:])]
        if factor != 1.0:
            clipped += parts
            factors += [factor] * len(parts)

    def change() -> None:
        if clipped:
            torch._foreach_mul_(clipped, factors)  # pyright: ignore[reportPrivateImportUsage]
        adamw(
            weights,
            gradients,
            *moments,
            [],
            steps,
            fused=True,
            lr=params.learning_rate,
            beta1=params.beta1,
            beta2=params.beta2,
            weight_decay=params.weight_decay,
            eps=params.eps,
            amsgrad=False,
            maximize=False,
        )
        for member in group:
            _finish_step(member.trained)

    return change


def _finish_step(trained: TrainedModel) -> None:
    """The weights of this process's elements have changed."""
    if trained.share is not None:
        trained.share.spread(trained.adapter.flat_P)
    trained.adapter.refresh()


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
RMS = 0.2
"""Root mean square of an update at learning rate 1, typical of AdamW."""


def prepare_dimuon(group: Sequence[ClippedGradient], params: OptimParams) -> Callable[[], None]:
    """Compute the updates. Nothing changes until the result is called, which allocates nothing and cannot fail."""
    changes = [_dimuon_update(member.trained, member.gradient_p * member.factor, params) for member in group]

    def change() -> None:
        for member in changes:
            member()

    return change


def _dimuon_update(trained: TrainedModel, gradient_p: Tensor, params: OptimParams) -> Callable[[], None]:
    (momentum_p,) = trained.moments_or_zeros(len(params.state))
    new_momentum_p = torch.lerp(momentum_p, gradient_p, 1 - params.beta1)
    groups: defaultdict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for span, weights, momentum in zip(
        trained.spans, trained.local(trained.adapter.flat_P), trained.split(new_momentum_p), strict=True
    ):
        for stack in trained.adapter.layout.stacks_in(span.start, span.stop):
            matrices = stack._replace(start=stack.start - span.start)
            groups[stack.shape[1:]].append((view_matrix(weights, matrices), view_matrix(momentum, matrices)))
    updates: list[tuple[Tensor, Tensor]] = []
    for shape, pairs in groups.items():
        update = orthogonalise(torch.cat([momentum_nrc for _, momentum_nrc in pairs]))
        update *= -params.learning_rate * RMS * math.sqrt(max(shape))
        weights = [weight_nrc for weight_nrc, _ in pairs]
        updates += zip(weights, update.split([len(weight_nrc) for weight_nrc in weights]), strict=True)

    def change() -> None:
        trained.moments = (new_momentum_p,)
        trained.step += 1
        for weight_nrc, update_nrc in updates:
            weight_nrc += update_nrc
        _finish_step(trained)

    return change


def orthogonalise(matrices: Tensor) -> Tensor:
    """Each matrix with its singular values moved close to 1 (0.68 to 1.13); a zero matrix stays zero."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x_nrc = matrices.mT if tall else matrices
    # In float64: squares of a small gradient underflow in float32.
    x_nrc = place_for_float64(x_nrc)
    norms = torch.linalg.matrix_norm(x_nrc, dtype=torch.float64, keepdim=True)
    x_nrc = (x_nrc / torch.where(norms == 0, 1.0, norms)).to(matrices)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram_nrr = x_nrc @ x_nrc.mT
        x_nrc = a * x_nrc + (b * gram_nrr + c * gram_nrr @ gram_nrr) @ x_nrc
    return x_nrc.mT if tall else x_nrc


_STEPS: Mapping[str, Callable[[Sequence[ClippedGradient], OptimParams], Callable[[], None]]] = {
    AdamParams.family: prepare_adamw,
    DimuonParams.family: prepare_dimuon,
}
