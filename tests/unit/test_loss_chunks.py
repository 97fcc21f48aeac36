"""How the loss divides its work, and the metrics of a policy loss: what a step's gradient does not show."""

from __future__ import annotations

import numpy as np
import pytest

from tinsmith import losses
from tinsmith.backends.torch import loss
from tinsmith.backends.torch.batch import MicroBatch
from tinsmith.backends.torch.loss import LossSpec
from unit.test_packing import examples_with, policy_datum, targets_datum


def spec_of(name: str, **config: float) -> LossSpec:
    return LossSpec(losses.LOSSES[name], config, None)


def test_only_neighbours_with_the_same_loss_are_merged() -> None:
    specs = {0: spec_of("cross_entropy"), 1: spec_of("ppo", low=0.8), 2: spec_of("ppo", low=0.8), 3: spec_of("ppo")}
    spans = [(0, 0, 3), (1, 3, 4), (2, 4, 9), (3, 9, 10)]
    assert loss._merge_pass_spans(spans, specs) == [(specs[0], 0, 3), (specs[1], 3, 9), (specs[3], 9, 10)]


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_a_chunk_knows_where_the_pairs_of_its_rows_begin(num_rows: int) -> None:
    batch = MicroBatch(tuple(examples_with("cross_entropy", targets_datum(4, 2))))
    rows_C = np.arange(1, 1 + num_rows)
    rows, pairs_p, cells_p, local_p, starts_C = loss._chunk_indices(batch, rows_C, vocab_size=10)
    assert rows is rows_C and pairs_p.tolist() == list(range(2, 2 + 2 * num_rows))
    assert local_p.tolist() == np.repeat(np.arange(num_rows), 2).tolist()
    assert starts_C.tolist() == list(range(0, 2 * num_rows + 1, 2))
    assert (cells_p - local_p * 10).tolist() == pairs_p.tolist()


def test_metrics_of_a_policy_loss_are_means_over_positions_with_an_advantage() -> None:
    advantages = np.array([0, 1, -1, 2], np.float32)
    old = np.array([-5, -1, -2, -3], np.float32)
    logprobs = np.array([-1, -1.5, -1, -3.1], np.float32)
    examples = examples_with("ppo", policy_datum(4, advantages=advantages, logprobs=old))
    spec = spec_of("ppo", **{losses.CLIP_LOW: 0.8, losses.CLIP_HIGH: 1.2})
    metrics = loss.compute_metrics(spec, examples, [logprobs])
    ratios = np.exp((logprobs - old)[1:].astype(np.float64))
    clipped = np.clip(ratios, 0.8, 1.2)
    assert metrics["loss:sum"] == pytest.approx(-np.minimum(ratios * advantages[1:], clipped * advantages[1:]).sum())
    assert metrics["tokens:sum"] == 4
    assert metrics["ratio:mean"] == pytest.approx(ratios.mean())
    assert metrics["ppo_kl:mean"] == pytest.approx((old - logprobs)[1:].mean())
    silent = examples_with("ppo", policy_datum(4, advantages=np.zeros(4, np.float32), logprobs=old))
    assert loss.compute_metrics(spec, silent, [logprobs])["ratio:mean"] == 1.0
