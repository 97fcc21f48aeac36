"""Train-sample divergence against a plain loop, over chunks as the SDK combines them, and at its limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results

from support.properties import examples
from tinsmith.losses.divergence import (
    EFFECTIVE_SHARE,
    KL_V1,
    KL_V2,
    KL_V3,
    MAX_LOG_RATIO,
    NON_FINITE,
    RATIO,
    RATIO_SQUARED,
    TOKENS,
    measure_divergence,
    summarize_divergence,
)

F32 = np.float32


def expect_sums(logprobs: np.ndarray, sampling: np.ndarray) -> dict[str, float]:
    log_ratios = [float(a) - float(b) for a, b in zip(logprobs, sampling, strict=True)]
    ratios = [math.exp(d) for d in log_ratios]
    return {
        f"{TOKENS}:sum": float(len(ratios)),
        f"{KL_V1}:sum": math.fsum(-d for d in log_ratios),
        f"{KL_V2}:sum": math.fsum(d * d / 2 for d in log_ratios),
        f"{KL_V3}:sum": math.fsum(r - 1 - d for r, d in zip(ratios, log_ratios, strict=True)),
        f"{RATIO}:sum": math.fsum(ratios),
        f"{RATIO_SQUARED}:sum": math.fsum(r * r for r in ratios),
        f"{RATIO}:max": max(ratios, default=0.0),
        f"{NON_FINITE}:sum": 0.0,
    }


@examples(30)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-6, 0.1, 3.0]))
def test_the_sums_over_chunks_and_their_estimates_equal_a_plain_loop(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9, 4)
    sampling = [rng.normal(-2, 1, n).astype(F32) for n in lengths]
    logprobs = [(array + rng.normal(0, scale, len(array))).astype(F32) for array in sampling]
    chunks = [measure_divergence(a, b) for a, b in zip(logprobs, sampling, strict=True)]
    outputs = [
        # As many data as it has: the SDK weighs means by them, and they must not matter here.
        tinker.ForwardBackwardOutput(loss_fn_output_type="", metrics=chunk, loss_fn_outputs=[{}] * (index + 1))
        for index, chunk in enumerate(chunks)
    ]
    combined = combine_fwd_bwd_output_results(outputs).metrics
    expected = expect_sums(np.concatenate(logprobs), np.concatenate(sampling))
    assert combined == pytest.approx(expected, rel=1e-9, abs=1e-12)
    n = expected[f"{TOKENS}:sum"]
    if not n:
        assert summarize_divergence(combined) == {}
        return
    estimates = {name: expected[f"{name}:sum"] / n for name in (KL_V1, KL_V2, KL_V3)}
    estimates[EFFECTIVE_SHARE] = expected[f"{RATIO}:sum"] ** 2 / expected[f"{RATIO_SQUARED}:sum"] / n
    assert summarize_divergence(combined) == pytest.approx(estimates, rel=1e-9, abs=1e-12)
    assert 1 / n - 1e-9 <= estimates[EFFECTIVE_SHARE] <= 1 + 1e-9


def test_equal_policies_have_no_divergence_and_every_token_counts() -> None:
    logprobs = np.array([-0.5, -3.0, -20.0], F32)
    metrics = measure_divergence(logprobs, logprobs)
    assert summarize_divergence(metrics) == {KL_V1: 0.0, KL_V2: 0.0, KL_V3: 0.0, EFFECTIVE_SHARE: 1.0}
    assert metrics[f"{RATIO}:max"] == 1.0


def test_log_ratios_that_are_not_finite_are_counted_and_change_nothing_else() -> None:
    logprobs, sampling = np.array([-1.0, -2.5], F32), np.array([-1.5, -2.0], F32)
    expected = measure_divergence(logprobs, sampling)
    logprobs = np.append(logprobs, [-np.inf, np.nan]).astype(F32)
    sampling = np.append(sampling, [-1.0, -1.0]).astype(F32)
    assert measure_divergence(logprobs, sampling) == {**expected, f"{NON_FINITE}:sum": 2.0}


def test_one_huge_ratio_leaves_finite_sums_and_one_effective_token() -> None:
    logprobs, sampling = np.array([-1.0, -1.0, -1.0, -3e38], F32), np.array([-1.0, -3e38, -800.0, -1.0], F32)
    metrics = measure_divergence(logprobs, sampling)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics[f"{RATIO}:max"] == pytest.approx(math.exp(MAX_LOG_RATIO))
    estimates = summarize_divergence(metrics)
    assert estimates[EFFECTIVE_SHARE] == pytest.approx(2 / 4)  # both ratios beyond the limit count alike
    assert estimates[KL_V3] > 0


def test_ratios_that_are_all_too_small_have_no_effective_share() -> None:
    metrics = measure_divergence(np.array([-1000.0], F32), np.array([-1.0], F32))
    assert summarize_divergence(metrics) == {KL_V1: 999.0, KL_V2: 999.0**2 / 2, KL_V3: 998.0}
