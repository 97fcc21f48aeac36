"""What a pass reports besides log probabilities: its loss, and figures that tell how far the policy has
moved.

Computed on the host from the log probabilities that the client gets, with the formulas that the gradient
used, and summed in float64. Every key has one ':', whose right side tells the SDK how to combine chunks.

Shapes: P pairs of all data of one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from tinsmith.backends.torch.batch import COLUMNS, Example
from tinsmith.backends.torch.losses import OBJECTIVES, Columns, sequence_log_ratios
from tinsmith.types import F32


def measure(
    loss_fn: str, config: Mapping[str, float], examples: Sequence[Example], logprobs: Sequence[F32]
) -> dict[str, float]:
    """`logprobs[i]` are those of example i's pairs. Positions of weight 0 count in `tokens:sum` only."""
    logprob_P = torch.from_numpy(np.concatenate([array.reshape(-1) for array in logprobs]))
    columns = {
        name: torch.from_numpy(np.concatenate([example.columns[name] for example in examples])) for name in COLUMNS
    }
    active_P = columns["weight"] != 0
    log_ratio_P = torch.zeros_like(logprob_P)
    if loss_fn == "gspo":
        sizes = torch.tensor([len(example.targets_P) for example in examples])
        example_P = torch.repeat_interleave(torch.arange(len(examples)), sizes)
        counted_P = columns["ratio_mask"] != 0
        log_ratio_P = sequence_log_ratios(logprob_P, columns["old_logprob"], counted_P, example_P, len(examples))
    chosen = slice(None) if active_P.all() else active_P  # all, as a rule: nothing is copied then
    x = Columns(
        *(
            column[chosen]
            for column in (
                logprob_P, columns["old_logprob"], columns["weight"], columns["low"], columns["high"], log_ratio_P
            )
        )
    )  # fmt: skip
    terms = OBJECTIVES[loss_fn](x, config)
    metrics = {
        "loss:sum": float(terms.loss_P.sum(dtype=torch.float64)),
        "tokens:sum": float(sum(example.num_tokens for example in examples)),
    }
    if loss_fn == "cross_entropy":
        return metrics
    count = max(1, len(x.logprob_P))
    metrics["ratio:mean"] = float(terms.ratio_P.sum(dtype=torch.float64)) / count if active_P.any() else 1.0
    metrics["ppo_kl:mean"] = float((x.old_logprob_P - x.logprob_P).sum(dtype=torch.float64)) / count
    metrics["pg_clipfrac:mean"] = float(terms.clipped_P.sum(dtype=torch.float64)) / count
    if loss_fn == "stable_reinforce":
        metrics["stable_reinforce_approximation:max"] = 1.0
    return metrics
