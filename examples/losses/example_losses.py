"""DAPO and ORPO as plug-ins. Tensors have one entry per position; a loss is a sum over positions and data.

`dapo` (arXiv 2503.14476, eq. 8): ppo whose upper bound is higher, as a mean over all tokens of the batch. A datum does
not know the batch, so the client sends `num_tokens`. Inputs as for ppo: target_tokens, logprobs, advantages.

`orpo` (arXiv 2403.07691, eq. 6): for each pair, the mean loss of the chosen answer minus
beta * log sigmoid(log_odds(chosen) - log_odds(rejected)), with odds P / (1 - P) of P = exp(mean logprob of the answer).
The two answers are separate data, and each needs the other's log odds, which the client computes from a `forward`:

- `sequence_ratio_mask`: 1 at the answer's tokens, else 0
- `is_chosen`: 1 everywhere in the chosen answer's datum, 0 in the rejected one's
- `other_log_odds`: the other answer's log odds, everywhere
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tinsmith.losses import CLIP_HIGH, CLIP_LOW, RATIO_MASK, Columns, Loss, LossTerms, differentiate

if TYPE_CHECKING:
    from torch import Tensor


def dapo(x: Columns, config: Mapping[str, float]) -> Tensor:
    """[P] The loss of each token; autograd differentiates it."""
    ratio_P = (x.logprob_P - x.old_logprob_P).exp()
    clipped_P = ratio_P.clamp(x.low_P, x.high_P)
    return -(ratio_P * x.weight_P).minimum(clipped_P * x.weight_P) / config["num_tokens"]


def orpo(x: Columns, config: Mapping[str, float]) -> LossTerms:
    """The loss of a sequence, in equal shares on its answer's tokens, with an explicit derivative."""
    mean_P = x.sequence_log_ratio_P  # without the input logprobs, the mean logprob of the answer
    answer_P = x.weight_P / x.inputs["sequence_count"]
    is_chosen_P, log_odds_P = x.inputs["is_chosen"], mean_P - (-mean_P.expm1()).log()
    sign_P = 2 * is_chosen_P - 1
    margin_P = sign_P * (log_odds_P - x.inputs["other_log_odds"])  # of the chosen answer over the rejected one
    # The pair's odds-ratio term is half in each datum. The derivative is that of the whole term for either one.
    odds_loss_P = -0.5 * config["beta"] * margin_P.sigmoid().log()
    dmargin_P = -config["beta"] * (-margin_P).sigmoid()
    dloss_dmean_P = dmargin_P * sign_P / (-mean_P.expm1()) - is_chosen_P
    return LossTerms(
        answer_P * (odds_loss_P - is_chosen_P * mean_P),
        answer_P * dloss_dmean_P,
        mean_P.new_ones(mean_P.shape),
        mean_P.new_zeros(mean_P.shape),
    )


DAPO = Loss(
    differentiate(dapo),
    required=("target_tokens", "logprobs", "advantages"),
    optional=(CLIP_LOW, CLIP_HIGH),
    config={CLIP_LOW: 0.8, CLIP_HIGH: 1.28, "num_tokens": 1.0},
    ranges={"num_tokens": (1.0, 1e12)},
)

ORPO = Loss(
    orpo,
    required=("target_tokens", RATIO_MASK, "is_chosen", "other_log_odds"),
    config={"beta": 0.1},
    weight=RATIO_MASK,
    sequence_ratio=True,
)
