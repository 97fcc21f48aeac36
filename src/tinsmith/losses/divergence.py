"""Train-sample divergence: how far the policy that trains is from the policy that sampled.

`measure_divergence` returns sums and a maximum over the tokens of a pass, each of which the SDK combines exactly over
the chunks of a batch, as it does by the suffix of a name. `summarize_divergence` derives the estimates from the sums of
any number of passes. Everything is float64 on the host. Knows no loss and no model.

With d = (training logprob) - (sampling logprob) and r = exp(d), of tokens drawn from the sampling policy, the means of
-d, d^2 / 2 and r - 1 - d estimate KL(sampling || training): k1, k2 and k3, which metrics call v1, v2 and v3.
The effective sample share is (sum r)^2 / (n sum r^2): 1 where all ratios are equal, 1/n where one outweighs all others.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tinsmith.types import F32

KL_V1, KL_V2, KL_V3 = "kl_sample_train_v1", "kl_sample_train_v2", "kl_sample_train_v3"
EFFECTIVE_SHARE = "effective_sample_share"
RATIO, RATIO_SQUARED = "sample_train_ratio", "sample_train_ratio_squared"
TOKENS, NON_FINITE = "sample_train_tokens", "sample_train_nonfinite"

SUMMARIZED = frozenset(f"{name}:sum" for name in (TOKENS, KL_V1, KL_V2, KL_V3, RATIO, RATIO_SQUARED))
"""The sums that `summarize_divergence` reads."""

MAX_LOG_RATIO = 300.0
"""Larger log ratios count as this one in the ratios, so that sums of squares stay finite in float64."""


def measure_divergence(logprob_P: F32, sampling_logprob_P: F32) -> dict[str, float]:
    """Return the sums over trained tokens. Tokens whose log ratio is not finite are counted and otherwise left out."""
    log_ratio_P = logprob_P.astype(np.float64) - sampling_logprob_P
    log_ratio_p = log_ratio_P[np.isfinite(log_ratio_P)]
    bounded_p = np.minimum(log_ratio_p, MAX_LOG_RATIO)
    ratio_p = np.exp(bounded_p)
    return {
        f"{TOKENS}:sum": float(len(log_ratio_p)),
        f"{KL_V1}:sum": float(np.negative(log_ratio_p).sum()),
        f"{KL_V2}:sum": float(0.5 * np.square(log_ratio_p).sum()),
        f"{KL_V3}:sum": float((np.expm1(bounded_p) - bounded_p).sum()),
        f"{RATIO}:sum": float(ratio_p.sum()),
        f"{RATIO_SQUARED}:sum": float(np.square(ratio_p).sum()),
        f"{RATIO}:max": float(ratio_p.max(initial=0.0)),
        f"{NON_FINITE}:sum": float(len(log_ratio_P) - len(log_ratio_p)),
    }


def summarize_divergence(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the estimates that follow from combined sums; empty without a token."""
    num_tokens = metrics.get(f"{TOKENS}:sum", 0.0)
    if not num_tokens:
        return {}
    estimates = {name: metrics[f"{name}:sum"] / num_tokens for name in (KL_V1, KL_V2, KL_V3)}
    squares = metrics[f"{RATIO_SQUARED}:sum"]
    if squares:  # each ratio may be too small for float64
        estimates[EFFECTIVE_SHARE] = metrics[f"{RATIO}:sum"] ** 2 / squares / num_tokens
    return estimates
