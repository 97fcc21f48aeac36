"""The formulas of the losses that `tinsmith.losses` admits: value and slope, token by token.

Every loss is a sum over tokens, and all but one see a token alone, so each is written as two columns: the
loss and its derivative with respect to that token's log probability. Written out, the derivative lets a chunk
of logits be turned into gradients while it is still there. gspo's one look at the whole sequence, the mean
log ratio, is computed beforehand and is a constant to the derivative (docs/losses.md). Everything is float32.

Shapes: P pairs of (position, target).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Columns:
    """One pass's pairs in a chunk. `weight` is cross_entropy's weights or the others' advantages."""

    logprob_P: Tensor
    old_logprob_P: Tensor
    weight_P: Tensor
    low_P: Tensor
    high_P: Tensor
    sequence_log_ratio_P: Tensor


class Terms(NamedTuple):
    """`slope` is d loss / d logprob. `ratio` and `clipped` only feed metrics."""

    loss_P: Tensor
    slope_P: Tensor
    ratio_P: Tensor
    clipped_P: Tensor


def cross_entropy(x: Columns, config: Mapping[str, float]) -> Terms:
    # A pair of weight 0 says nothing even if its logprob is -inf.
    loss_P = torch.where(x.weight_P == 0, 0.0, -x.weight_P * x.logprob_P)
    return Terms(loss_P, -x.weight_P, torch.ones_like(loss_P), torch.zeros_like(loss_P))


def importance_sampling(x: Columns, config: Mapping[str, float]) -> Terms:
    ratio_P = torch.exp(x.logprob_P - x.old_logprob_P)
    loss_P = -ratio_P * x.weight_P
    return Terms(loss_P, loss_P, ratio_P, torch.zeros_like(loss_P))


def ppo(x: Columns, config: Mapping[str, float]) -> Terms:
    return _clipped_surrogate(torch.exp(x.logprob_P - x.old_logprob_P), x)


def gspo(x: Columns, config: Mapping[str, float]) -> Terms:
    # s_t = exp(m + lp_t - sg(lp_t)): the value is the sequence's ratio, the slope flows through the token.
    return _clipped_surrogate(torch.exp(x.sequence_log_ratio_P), x)


def cispo(x: Columns, config: Mapping[str, float]) -> Terms:
    ratio_P = torch.exp(x.logprob_P - x.old_logprob_P)
    slope_P = -torch.clamp(ratio_P, x.low_P, x.high_P) * x.weight_P
    outside_P = (ratio_P < x.low_P) | (ratio_P > x.high_P)
    return Terms(slope_P * x.logprob_P, slope_P, ratio_P, outside_P.float())


def dro(x: Columns, config: Mapping[str, float]) -> Terms:
    beta = config["beta"]
    away_P = x.logprob_P - x.old_logprob_P
    loss_P = 0.5 * beta * away_P.square() - x.logprob_P * x.weight_P
    return Terms(loss_P, beta * away_P - x.weight_P, torch.exp(away_P), torch.zeros_like(loss_P))


def stable_reinforce(x: Columns, config: Mapping[str, float]) -> Terms:
    kl_coeff = config["kl_coeff"]
    away_P = x.logprob_P - x.old_logprob_P
    plain = importance_sampling(x, config)
    loss_P = plain.loss_P + 0.5 * kl_coeff * away_P.square()
    return Terms(loss_P, plain.slope_P + kl_coeff * away_P, plain.ratio_P, plain.clipped_P)


def sequence_log_ratios(
    logprob_P: Tensor, old_logprob_P: Tensor, counted_P: Tensor, example_P: Tensor, num_examples: int
) -> Tensor:
    """[P] For each pair, the mean log ratio over the counted pairs of its example; 0 where none is
    counted.
    """
    away_P = torch.where(counted_P, logprob_P - old_logprob_P, 0.0)
    sums = torch.zeros(num_examples, device=away_P.device).index_add_(0, example_P, away_P)
    counts = torch.zeros_like(sums).index_add_(0, example_P, counted_P.float())
    return (sums / counts.clamp_min(1.0))[example_P]


def _clipped_surrogate(ratio_P: Tensor, x: Columns) -> Terms:
    """-min(r A, clip(r) A); the clipped branch is flat."""
    free_P = ratio_P * x.weight_P
    bound_P = torch.clamp(ratio_P, x.low_P, x.high_P) * x.weight_P
    clipped_P = bound_P < free_P
    return Terms(-torch.minimum(free_P, bound_P), torch.where(clipped_P, 0.0, -free_P), ratio_P, clipped_P.float())


OBJECTIVES: Mapping[str, Callable[[Columns, Mapping[str, float]], Terms]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    "stable_reinforce": stable_reinforce,
    # What its gradient makes of it, as weights; see head.
    "custom": cross_entropy,
}
