"""The formulas of the losses: value and derivative per token.

Every loss is a sum over tokens, and in all but one the terms depend on one token each. A formula therefore returns two
columns: the loss, and its derivative with respect to the token's log probability. With explicit derivatives, a chunk of
logits is turned into gradients while it exists. The exception is gspo's mean log ratio of a whole sequence, which is
computed first and is a constant in the derivative (docs/losses.md). All values are float32. The code only calls tensor
methods, so that a server can import the registry without torch; `differentiate` imports torch when it runs.

Shapes: P pairs of (position, target).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


SEQUENCE_COUNT = "sequence_count"
"""The name in `Columns.inputs` of how many positions of the sequence `sequence_log_ratio` is the mean of."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The pairs of one loss. `weight` has the weights of cross_entropy, the advantages of other losses of the wire, and
    a plug-in's `Loss.weight`; `inputs` has a plug-in's further inputs by name. What a loss does not take is 0.
    """

    logprob_P: Tensor
    old_logprob_P: Tensor
    weight_P: Tensor
    low_P: Tensor
    high_P: Tensor
    sequence_log_ratio_P: Tensor
    inputs: Mapping[str, Tensor] = field(default_factory=dict)


class LossTerms(NamedTuple):
    """`ratio` and `clipped` are for metrics only."""

    loss_P: Tensor
    dloss_dlogprob_P: Tensor
    ratio_P: Tensor
    clipped_P: Tensor


Formula = Callable[[Columns, Mapping[str, float]], LossTerms]
"""A function of the columns and the complete configuration."""

ValueFormula = Callable[[Columns, Mapping[str, float]], "Tensor"]
"""Returns the loss of each pair."""


def cross_entropy(x: Columns, config: Mapping[str, float]) -> LossTerms:
    # A pair of weight 0 has loss 0 even if its logprob is -inf.
    loss_P = (-x.weight_P * x.logprob_P).masked_fill(x.weight_P == 0, 0.0)
    return LossTerms(loss_P, -x.weight_P, loss_P.new_ones(loss_P.shape), loss_P.new_zeros(loss_P.shape))


def importance_sampling(x: Columns, config: Mapping[str, float]) -> LossTerms:
    ratio_P = (x.logprob_P - x.old_logprob_P).exp()
    loss_P = -ratio_P * x.weight_P
    return LossTerms(loss_P, loss_P, ratio_P, loss_P.new_zeros(loss_P.shape))


def ppo(x: Columns, config: Mapping[str, float]) -> LossTerms:
    terms = _clipped_surrogate((x.logprob_P - x.old_logprob_P).exp(), x)
    bound = config.get("dual_clip_threshold", 0.0)
    if not bound:
        return terms
    # Dual clip (arXiv 1912.09729, eq. 5): the objective of a negative advantage is at least bound * A.
    bound_loss_P = -bound * x.weight_P
    is_bounded_P = (x.weight_P < 0) & (terms.loss_P > bound_loss_P)
    derivative_P = terms.dloss_dlogprob_P.masked_fill(is_bounded_P, 0.0)
    return LossTerms(
        bound_loss_P.where(is_bounded_P, terms.loss_P),
        derivative_P,
        terms.ratio_P,
        terms.clipped_P.masked_fill(is_bounded_P, 1.0),
    )


def gspo(x: Columns, config: Mapping[str, float]) -> LossTerms:
    # s_t = exp(m + lp_t - sg(lp_t)): the value is the sequence's ratio, the derivative flows through the token.
    return _clipped_surrogate(x.sequence_log_ratio_P.exp(), x)


def cispo(x: Columns, config: Mapping[str, float]) -> LossTerms:
    ratio_P = (x.logprob_P - x.old_logprob_P).exp()
    dloss_dlogprob_P = -ratio_P.clamp(x.low_P, x.high_P) * x.weight_P
    outside_P = (ratio_P < x.low_P) | (ratio_P > x.high_P)
    return LossTerms(dloss_dlogprob_P * x.logprob_P, dloss_dlogprob_P, ratio_P, outside_P.float())


def dro(x: Columns, config: Mapping[str, float]) -> LossTerms:
    beta = config["beta"]
    log_ratio_P = x.logprob_P - x.old_logprob_P
    loss_P = 0.5 * beta * log_ratio_P.square() - x.logprob_P * x.weight_P
    return LossTerms(loss_P, beta * log_ratio_P - x.weight_P, log_ratio_P.exp(), loss_P.new_zeros(loss_P.shape))


def stable_reinforce(x: Columns, config: Mapping[str, float]) -> LossTerms:
    kl_coeff = config["kl_coeff"]
    log_ratio_P = x.logprob_P - x.old_logprob_P
    plain = importance_sampling(x, config)
    loss_P = plain.loss_P + 0.5 * kl_coeff * log_ratio_P.square()
    return LossTerms(loss_P, plain.dloss_dlogprob_P + kl_coeff * log_ratio_P, plain.ratio_P, plain.clipped_P)


def differentiate(value: ValueFormula) -> Formula:
    """Return the formula of a loss of which only the value per pair is known; autograd differentiates it.

    A pair's value may depend on the log probability of that pair alone. The sequence's mean log ratio is a constant.
    """

    def formula(x: Columns, config: Mapping[str, float]) -> LossTerms:
        import torch

        with torch.enable_grad():
            leaf_P = x.logprob_P.detach().requires_grad_()
            loss_P = value(replace(x, logprob_P=leaf_P), config)
            (derivative_P,) = torch.autograd.grad(loss_P.sum(), leaf_P)
        loss_P = loss_P.detach()
        ratio_P = (x.logprob_P - x.old_logprob_P).exp()
        return LossTerms(loss_P, derivative_P, ratio_P, loss_P.new_zeros(loss_P.shape))

    return formula


def sequence_log_ratios(
    logprob_P: Tensor, old_logprob_P: Tensor, counted_P: Tensor, example_P: Tensor, num_examples: int
) -> Tensor:
    """[P] For each pair, the mean log ratio over the counted pairs of its datum; 0 if none is counted."""
    log_ratio_P = (logprob_P - old_logprob_P).masked_fill(~counted_P, 0.0)
    sums = log_ratio_P.new_zeros(num_examples).index_add_(0, example_P, log_ratio_P)
    counts = sums.new_zeros(num_examples).index_add_(0, example_P, counted_P.float())
    return (sums / counts.clamp_min(1.0))[example_P]


def _clipped_surrogate(ratio_P: Tensor, x: Columns) -> LossTerms:
    """-min(r A, clip(r) A); the clipped branch is constant."""
    unclipped_P = ratio_P * x.weight_P
    bound_P = ratio_P.clamp(x.low_P, x.high_P) * x.weight_P
    clipped_P = bound_P < unclipped_P
    return LossTerms(
        -unclipped_P.minimum(bound_P), (-unclipped_P).masked_fill(clipped_P, 0.0), ratio_P, clipped_P.float()
    )
