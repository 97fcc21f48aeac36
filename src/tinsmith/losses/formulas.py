"""The formulas of the losses: value and derivative of each token.

Every loss is a sum over tokens, and all but one see a token alone, so each is written as two columns: the loss, and its
derivative with respect to that token's log probability. Written out, the derivative lets a chunk of logits be turned
into gradients while it exists. The exception is gspo's mean log ratio of a whole sequence: it is computed beforehand
and is a constant to the derivative (docs/losses.md). Everything is float32. Only methods of tensors are called, so that
a server reads the registry without torch.

Shapes: P pairs of (position, target).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Columns:
    """Pairs of one loss. `weight` is cross_entropy's weights or the others' advantages."""

    logprob_P: Tensor
    old_logprob_P: Tensor
    weight_P: Tensor
    low_P: Tensor
    high_P: Tensor
    sequence_log_ratio_P: Tensor


class Terms(NamedTuple):
    """`ratio` and `clipped` only feed metrics."""

    loss_P: Tensor
    dloss_dlogprob_P: Tensor
    ratio_P: Tensor
    clipped_P: Tensor


Formula = Callable[[Columns, Mapping[str, float]], Terms]
"""From columns and the complete configuration."""


def cross_entropy(x: Columns, config: Mapping[str, float]) -> Terms:
    # A pair of weight 0 counts as 0 even if its logprob is -inf.
    loss_P = (-x.weight_P * x.logprob_P).masked_fill(x.weight_P == 0, 0.0)
    return Terms(loss_P, -x.weight_P, loss_P.new_ones(loss_P.shape), loss_P.new_zeros(loss_P.shape))


def importance_sampling(x: Columns, config: Mapping[str, float]) -> Terms:
    ratio_P = (x.logprob_P - x.old_logprob_P).exp()
    loss_P = -ratio_P * x.weight_P
    return Terms(loss_P, loss_P, ratio_P, loss_P.new_zeros(loss_P.shape))


def ppo(x: Columns, config: Mapping[str, float]) -> Terms:
    return _clipped_surrogate((x.logprob_P - x.old_logprob_P).exp(), x)


def gspo(x: Columns, config: Mapping[str, float]) -> Terms:
    # s_t = exp(m + lp_t - sg(lp_t)): the value is the sequence's ratio, the derivative flows through the token.
    return _clipped_surrogate(x.sequence_log_ratio_P.exp(), x)


def cispo(x: Columns, config: Mapping[str, float]) -> Terms:
    ratio_P = (x.logprob_P - x.old_logprob_P).exp()
    dloss_dlogprob_P = -ratio_P.clamp(x.low_P, x.high_P) * x.weight_P
    outside_P = (ratio_P < x.low_P) | (ratio_P > x.high_P)
    return Terms(dloss_dlogprob_P * x.logprob_P, dloss_dlogprob_P, ratio_P, outside_P.float())


def dro(x: Columns, config: Mapping[str, float]) -> Terms:
    beta = config["beta"]
    log_ratio_P = x.logprob_P - x.old_logprob_P
    loss_P = 0.5 * beta * log_ratio_P.square() - x.logprob_P * x.weight_P
    return Terms(loss_P, beta * log_ratio_P - x.weight_P, log_ratio_P.exp(), loss_P.new_zeros(loss_P.shape))


def stable_reinforce(x: Columns, config: Mapping[str, float]) -> Terms:
    kl_coeff = config["kl_coeff"]
    log_ratio_P = x.logprob_P - x.old_logprob_P
    plain = importance_sampling(x, config)
    loss_P = plain.loss_P + 0.5 * kl_coeff * log_ratio_P.square()
    return Terms(loss_P, plain.dloss_dlogprob_P + kl_coeff * log_ratio_P, plain.ratio_P, plain.clipped_P)


def sequence_log_ratios(
    logprob_P: Tensor, old_logprob_P: Tensor, counted_P: Tensor, example_P: Tensor, num_examples: int
) -> Tensor:
    """[P] For each pair, the mean log ratio over the counted pairs of its example; 0 where none is counted."""
    log_ratio_P = (logprob_P - old_logprob_P).masked_fill(~counted_P, 0.0)
    sums = log_ratio_P.new_zeros(num_examples).index_add_(0, example_P, log_ratio_P)
    counts = sums.new_zeros(num_examples).index_add_(0, example_P, counted_P.float())
    return (sums / counts.clamp_min(1.0))[example_P]


def _clipped_surrogate(ratio_P: Tensor, x: Columns) -> Terms:
    """-min(r A, clip(r) A); the clipped branch is flat."""
    free_P = ratio_P * x.weight_P
    bound_P = ratio_P.clamp(x.low_P, x.high_P) * x.weight_P
    clipped_P = bound_P < free_P
    return Terms(-free_P.minimum(bound_P), (-free_P).masked_fill(clipped_P, 0.0), ratio_P, clipped_P.float())
