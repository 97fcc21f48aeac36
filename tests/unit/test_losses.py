"""The loss table, admission of passes, and each formula against a float64 loop."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.float64_reference import loss
from support.properties import examples
from tinsmith.errors import UserError
from tinsmith.losses import (
    CLIP_HIGH,
    CLIP_LOW,
    DUAL_CLIP,
    EXACT_INTEGER,
    LOSS_ID,
    LOSSES,
    MAX_TARGETS_PER_DATUM,
    ROLLOUT_LOGPROBS,
    ROLLOUT_MAX,
    check_pass,
    cross_entropy_weights,
    dense,
    elementwise_cross_entropy,
    loss_id_of,
    resolve_config,
    rollout_weights,
    token_weight,
)
from tinsmith.losses.formulas import Columns, LossTerms, sequence_log_ratios
from tinsmith.types import Array, CustomLoss, Datum, LossInput, ModelShape, Pass, SparseRows

SHAPE = ModelShape("base", "/nowhere", vocab_size=50, max_context_length=8, arch="X")
F32, I64 = np.float32, np.int64


def policy(length: int = 3, **changes: object) -> Datum:
    inputs: dict[str, Array] = {
        "target_tokens": np.arange(length, dtype=I64),
        "logprobs": np.full(length, -1.0, F32),
        "advantages": np.ones(length, F32),
    }
    inputs.update(changes)  # type: ignore[arg-type]
    return Datum(np.arange(length, dtype=np.int32), inputs)


def plain(tokens: object = (1, 2, 3), targets: object = (1, 2, 3), weights: object = (1.0, 1.0, 1.0)) -> Datum:
    return Datum(
        np.array(tokens, np.int32),
        {"target_tokens": np.array(targets, I64), "weights": np.array(weights, F32)},
    )


def pass_of(*data: Datum, loss_fn: str = "cross_entropy", config: Mapping[str, float | str] | None = None) -> Pass:
    return Pass("r", "m", data, loss_fn, config or {}, False)


def sparse(rows: int, cols: int, crow: object, col: object, values: object, dtype: type = np.int64) -> SparseRows:
    return SparseRows(np.array(values, dtype), np.array(crow, I64), np.array(col, I64), (rows, cols))


def two_sparse(targets: SparseRows) -> Datum:
    weights = SparseRows(targets.values.astype(F32), targets.crow_indices, targets.col_indices, targets.shape)
    return Datum(np.array([1, 2], np.int32), {"target_tokens": targets, "weights": weights})


@pytest.mark.parametrize("loss_fn", sorted(LOSSES.keys() - {"custom"}))  # whose formula is the client's
@examples(25)
@given(seed=st.integers(0, 2**32 - 1))
def test_each_formula_and_its_derivative_equal_a_float64_loop(loss_fn: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 9))
    lp = torch.from_numpy(rng.normal(-2, 1, n)).requires_grad_()
    inputs = {
        "weights": rng.normal(size=n).astype(F32),
        "advantages": rng.normal(size=n).astype(F32),
        "logprobs": rng.normal(-2, 1, n).astype(F32),
        CLIP_LOW: rng.uniform(0.2, 1.0, n).astype(F32),
        CLIP_HIGH: rng.uniform(1.0, 3.0, n).astype(F32),
        "sequence_ratio_mask": (rng.random(n) < 0.7).astype(F32),
    }
    config = {"beta": 0.3, "kl_coeff": 0.7, DUAL_CLIP: float(rng.choice([0.0, 1.3]))}
    expected = loss(loss_fn, lp, inputs, config)
    expected.backward()
    x32 = {name: torch.from_numpy(array) for name, array in inputs.items()}
    weight = x32["weights" if loss_fn == "cross_entropy" else "advantages"]
    lp32 = lp.detach().float()
    mean = sequence_log_ratios(
        lp32, x32["logprobs"], x32["sequence_ratio_mask"] != 0, torch.zeros(n, dtype=torch.int64), 1
    )
    x = Columns(lp32, x32["logprobs"], weight, x32[CLIP_LOW], x32[CLIP_HIGH], mean)
    terms = LOSSES[loss_fn].formula(x, config)
    assert lp.grad is not None
    assert float(terms.loss_P.double().sum()) == pytest.approx(expected.item(), rel=1e-4, abs=1e-4)
    torch.testing.assert_close(terms.dloss_dlogprob_P.double(), lp.grad, rtol=1e-4, atol=1e-5)


def terms_of(loss_fn: str, ratios: list[float], advantages: list[float], **config: float) -> LossTerms:
    """The terms of tokens with these ratios, which are also their sequences', clipped to [0.5, 2]."""
    log_ratio = torch.tensor(ratios, dtype=torch.float32).log()
    old = torch.full_like(log_ratio, -1.0)
    low, high = torch.full_like(log_ratio, 0.5), torch.full_like(log_ratio, 2.0)
    x = Columns(old + log_ratio, old, torch.tensor(advantages), low, high, log_ratio)
    return LOSSES[loss_fn].formula(x, config)


@pytest.mark.parametrize(
    ("loss_fn", "advantages", "config", "clipped"),
    [
        ("ppo", [1.0, 1.0, 1.0, 1.0], {}, [0, 0, 0, 1]),
        ("ppo", [-1.0, -1.0, -1.0, -1.0], {}, [1, 0, 0, 0]),
        ("ppo", [-1.0, -1.0, -1.0, -1.0], {DUAL_CLIP: 1.25}, [1, 0, 1, 1]),
        ("ppo", [1.0, 1.0, 1.0, 1.0], {DUAL_CLIP: 1.25}, [0, 0, 0, 1]),
        ("gspo", [1.0, 1.0, -1.0, -1.0], {}, [0, 0, 0, 0]),
        ("gspo", [-1.0, -1.0, 1.0, 1.0], {}, [1, 0, 0, 1]),
        ("cispo", [1.0, -1.0, 1.0, -1.0], {}, [1, 0, 0, 1]),
        ("importance_sampling", [1.0, -1.0, 1.0, -1.0], {}, [0, 0, 0, 0]),
        ("dro", [1.0, -1.0, 1.0, -1.0], {"beta": 0.1}, [0, 0, 0, 0]),
        ("stable_reinforce", [1.0, -1.0, 1.0, -1.0], {"kl_coeff": 0.1}, [0, 0, 0, 0]),
    ],
)
def test_terms_have_the_ratio_and_whether_its_clip_ends_the_gradient(
    loss_fn: str, advantages: list[float], config: dict[str, float], clipped: list[int]
) -> None:
    ratios = [0.25, 1.0, 1.5, 4.0]
    terms = terms_of(loss_fn, ratios, advantages, **config)
    torch.testing.assert_close(terms.ratio_P, torch.tensor(ratios))
    assert terms.clipped_P.tolist() == clipped
    if loss_fn != "cispo":  # whose clipped ratio still multiplies a gradient
        assert [value == 0 for value in terms.dloss_dlogprob_P.tolist()] == [bool(value) for value in clipped]


def test_cross_entropy_has_no_ratio_and_clips_nothing() -> None:
    terms = terms_of("cross_entropy", [0.25, 4.0], [1.0, 2.0])
    assert (terms.ratio_P.tolist(), terms.clipped_P.tolist()) == ([1.0, 1.0], [0.0, 0.0])


def test_a_sequences_ratio_is_the_mean_over_its_counted_tokens_and_zero_without_any() -> None:
    logprob, old = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0]), torch.tensor([-2.0, -4.0, -9.0, -1.0, -1.0])
    counted = torch.tensor([True, True, False, False, False])
    means = sequence_log_ratios(logprob, old, counted, torch.tensor([0, 0, 0, 1, 1]), 2)
    assert means.tolist() == [1.5, 1.5, 1.5, 0.0, 0.0]


def test_rollout_weights_are_ratios_of_the_two_policies_up_to_a_bound() -> None:
    datum = policy(**{"logprobs": np.array([-1, -1, -1], F32), ROLLOUT_LOGPROBS: np.array([-1, 0, -3], F32)})
    weights = rollout_weights(datum, {ROLLOUT_MAX: 2.0})
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, [1.0, np.exp(-1.0), 2.0], rtol=1e-6)


def test_targets_without_weights_have_the_weight_one() -> None:
    datum = Datum(np.arange(2, dtype=np.int32), {"target_tokens": np.ones((2, 3), I64)})
    assert cross_entropy_weights(datum).tolist() == [[1.0] * 3] * 2
    assert cross_entropy_weights(plain(weights=(0, 2, 3))).tolist() == [0, 2, 3]


def test_the_loss_of_a_pair_is_zero_without_weight_and_infinite_on_overflow() -> None:
    weights, logprobs = np.array([0, 2, -1, 3e38], F32), np.array([-np.inf, -1.5, -2, -100], F32)
    assert elementwise_cross_entropy(weights, logprobs).tolist() == [0.0, 3.0, -2.0, np.inf]


def test_a_loss_per_token_counts_weights_advantages_or_nothing() -> None:
    assert token_weight(pass_of(plain(weights=(0, 1.5, -1.5)), plain())) == 6
    assert token_weight(pass_of(policy(advantages=np.array([0, -2, 1], F32)), policy(), loss_fn="ppo")) == 5
    assert token_weight(pass_of(plain(), loss_fn="custom")) is None


def test_a_custom_loss_is_named_by_its_id_alone() -> None:
    assert loss_id_of(pass_of(plain(), config={"anything": 1.0})) is None
    assert loss_id_of(pass_of(plain(), loss_fn="unknown")) is None
    custom = pass_of(plain(), loss_fn="custom", config={LOSS_ID: "loss-1"})
    assert loss_id_of(custom) == "loss-1" and resolve_config(custom) == {}
    for config in ({}, {LOSS_ID: 1.0}, {LOSS_ID: "loss-1", "beta": 1.0}):
        with pytest.raises(UserError, match="'custom' takes one text, 'loss_id'"):
            loss_id_of(pass_of(plain(), loss_fn="custom", config=config))


def check_custom(rank: int, **inputs: Array) -> None:
    datum = plain()
    loss = CustomLoss("mine", (LossInput("logprobs", 1), LossInput("extra", rank)), ())
    request = pass_of(Datum(datum.tokens_N, {**datum.inputs, **inputs}), loss_fn="custom", config={LOSS_ID: "loss-1"})
    check_pass(replace(request, custom_loss=loss), SHAPE)


def test_a_custom_loss_gets_every_input_that_it_reads_with_its_rank() -> None:
    check_custom(1, extra=np.ones(7, F32))
    check_custom(2, extra=np.ones((2, 5), I64))
    check_custom(0, extra=np.ones(1, F32))
    check_custom(2, extra=sparse(2, 3, [0, 1, 2], [0, 2], [7, 9]))
    several_targets = Datum(np.arange(3, dtype=np.int32), {"target_tokens": np.ones((3, 4), I64)})
    check_pass(pass_of(several_targets, loss_fn="custom", config={LOSS_ID: "loss-1"}), SHAPE)
    refused: list[tuple[int, dict[str, Array], str]] = [
        (1, {}, "['extra'] is missing; custom loss 'mine' reads it"),
        (1, {"extra": np.ones((2, 5), F32)}, "['extra'] has rank 2; custom loss 'mine' declared 1"),
        (0, {"extra": np.ones(2, F32)}, "['extra'] has rank 1; custom loss 'mine' declared 0"),
        (1, {"extra": np.ones(1, bool)}, "['extra'] is 1 values of bool; it must be float32 or int64"),
        (1, {"extra": np.zeros(MAX_TARGETS_PER_DATUM + 1, F32)}, f"at most {MAX_TARGETS_PER_DATUM}"),
        (2, {"extra": sparse(2, 3, [0, 1, 2], [0, 3], [7, 9])}, "col_indices reach from 0 to 3"),
    ]
    for rank, inputs, message in refused:
        with pytest.raises(UserError, match=re.escape(message)):
            check_custom(rank, **inputs)


def test_values_at_their_bounds_are_admitted() -> None:
    last_token = SHAPE.vocab_size - 1
    check_pass(pass_of(plain((0, last_token, 1), (0, last_token, 1))), SHAPE)
    exact = np.array([EXACT_INTEGER, -EXACT_INTEGER, 0])
    check_pass(pass_of(policy(advantages=exact), loss_fn="dro"), SHAPE)
    for config in ({CLIP_LOW: 1.1, CLIP_HIGH: 1.1}, {CLIP_LOW: 0.0}, {DUAL_CLIP: 1.001}, {ROLLOUT_MAX: 0.001}):
        check_pass(pass_of(policy(), loss_fn="ppo", config=config), SHAPE)
    clips = {CLIP_LOW: np.array([0, 1, 1.2], F32), CLIP_HIGH: np.array([0, 1, 1.2], F32)}
    check_pass(pass_of(policy(**clips), policy(**{CLIP_LOW: clips[CLIP_LOW]}), loss_fn="ppo"), SHAPE)
    num_columns = MAX_TARGETS_PER_DATUM // 2
    check_pass(pass_of(two_sparse(sparse(2, num_columns, [0, 1, 2], [0, num_columns - 1], [7, 9]))), SHAPE)
    silent = policy(sequence_ratio_mask=np.zeros(3, F32), advantages=np.zeros(3, F32))
    check_pass(pass_of(silent, loss_fn="gspo"), SHAPE)


@pytest.mark.parametrize("name", [CLIP_LOW, CLIP_HIGH])
def test_one_clip_per_token_is_checked_against_the_configured_other(name: str) -> None:
    config = {CLIP_LOW: 0.9, CLIP_HIGH: 1.1}
    value = {CLIP_LOW: 1.15, CLIP_HIGH: 0.85}[name]
    bad = policy(**{name: np.array([1, value, 1], F32)})
    with pytest.raises(UserError, match=re.escape("data[1].loss_fn_inputs: clip_low_threshold must lie between 0")):
        check_pass(pass_of(policy(), bad, loss_fn="ppo", config=config), SHAPE)
    negative = policy(**{CLIP_LOW: np.array([1, -0.1, 1], F32)})
    with pytest.raises(UserError, match=re.escape("is not given is 0.9 or 1.1")):
        check_pass(pass_of(negative, loss_fn="ppo", config=config), SHAPE)


def test_a_weight_of_zero_silences_an_impossible_target() -> None:
    x = Columns(torch.tensor([-torch.inf]), *(torch.zeros(1) for _ in range(5)))
    terms = LOSSES["cross_entropy"].formula(x, {})
    assert float(terms.loss_P) == 0 and float(terms.dloss_dlogprob_P) == 0


def test_good_passes_are_admitted() -> None:
    check_pass(pass_of(plain()), SHAPE)
    multi_target = Datum(
        np.arange(3, dtype=np.int32),
        {"target_tokens": np.ones((3, 4), I64), "weights": np.ones((3, 4), I64), "mask": np.full(1, np.nan, F32)},
    )
    check_pass(pass_of(multi_target), SHAPE)
    check_pass(pass_of(two_sparse(sparse(2, 3, [0, 1, 2], [0, 2], [7, 9]))), SHAPE)
    for name in LOSSES.keys() - {"cross_entropy", "custom"}:
        check_pass(pass_of(policy(), policy(8), loss_fn=name), SHAPE)
    check_pass(pass_of(policy()), SHAPE)  # cross_entropy without weights: every target counts once
    # A datum may carry inputs of other losses, with any content.
    check_pass(pass_of(policy(weights=np.array([np.nan], F32)), loss_fn="dro"), SHAPE)


REFUSED: list[tuple[Pass, str]] = [
    (pass_of(plain(), loss_fn="ppo2"),
     "loss_fn is 'ppo2'; it must be one of cross_entropy, importance_sampling, ppo"),
    (pass_of(plain(), loss_fn="x" * 79), f"loss_fn is '{'x' * 76}...; it must be one of"),
    (pass_of(plain(), loss_fn="x" * 78), f"loss_fn is '{'x' * 78}'; it must be one of"),
    (pass_of(policy(), loss_fn="ppo", config={"clip": 1.0}),
     "loss_fn_config['clip'] is not a setting of ppo; it takes clip_low_threshold, clip_high"),
    (pass_of(plain(), config={"beta": 1.0}),
     "loss_fn_config['beta'] is not a setting of cross_entropy; it takes no configuration"),
    (pass_of(policy(), loss_fn="dro", config={"beta": "high"}),
     "loss_fn_config['beta'] is 'high'; it must be a number"),
    (pass_of(policy(), loss_fn="dro", config={"beta": float("nan")}), "loss_fn_config['beta'] is nan"),
    (pass_of(policy(), loss_fn="dro", config={"beta": -1.0}),
     "loss_fn_config['beta'] is -1.0; it must be finite and not negative"),
    (pass_of(policy(), loss_fn="ppo", config={CLIP_LOW: 1.5}),
     "clip_low_threshold 1.5 is above clip_high_threshold 1.2"),
    (pass_of(policy(), loss_fn="ppo", config={DUAL_CLIP: 1.0}),
     "loss_fn_config['dual_clip_threshold'] is 1.0; it must be greater than 1, for example 3, or 0 (off)"),
    (pass_of(policy(), loss_fn="cispo", config={DUAL_CLIP: 3.0}), "'dual_clip_threshold'] is not a setting of cispo"),
    (pass_of(policy(), loss_fn="cispo", config={ROLLOUT_MAX: 0.0}),
     "loss_fn_config['rollout_ratio_max'] is 0.0; it must be greater than 0"),
    (pass_of(policy(rollout_logprobs=np.array([0, np.nan, 0], F32)), loss_fn="ppo"), "['rollout_logprobs'] holds nan"),
    (pass_of(policy(rollout_logprobs=np.zeros(2, F32)), loss_fn="gspo"), "['rollout_logprobs'] has shape [2]"),
    (pass_of(), "data is empty"),
    (pass_of(plain(), plain((), (), ())), "data[1].model_input has no tokens"),
    (pass_of(plain(range(9), range(9), [1.0] * 9)), "data[0].model_input has 9 tokens; base takes at most 8"),
    (pass_of(Datum(np.arange(3, dtype=np.int32), {"weights": np.ones(3, F32)})),
     "data[0].loss_fn_inputs has no 'target_tokens'; cross_entropy needs target_tokens"),
    (pass_of(policy(advantages=policy().inputs["logprobs"][:2]), loss_fn="ppo"), "['advantages'] has shape [2]"),
    (pass_of(plain(targets=(1, 2))), "data[0].loss_fn_inputs['target_tokens'] has shape [2]; it must be [3]"),
    (pass_of(plain(), plain(weights=(1.0,))),
     "data[1].loss_fn_inputs['weights'] has shape [1]; it must be [3]: as target_tokens"),
    (pass_of(plain(targets=[[1, 2]] * 3)), "data[0].loss_fn_inputs['weights'] has shape [3]; it must be [3, 2]"),
    (pass_of(policy(target_tokens=np.ones((3, 2), I64)), loss_fn="ppo"),
     "['target_tokens'] has shape [3, 2]; it must be [3]"),
    (pass_of(plain(targets=np.ones((3, 0)))), "['target_tokens'] has shape [3, 0]; it must be [3]: one target per"),
    (pass_of(policy(target_tokens=np.ones(3, F32)), loss_fn="dro"),
     "['target_tokens'] is float32; token ids must be int64"),
    (pass_of(policy(advantages=np.ones(3, bool)), loss_fn="dro"), "['advantages'] is bool; it must be float32"),
    (pass_of(policy(advantages=np.array([1, 2**24 + 1, 0])), loss_fn="dro"),
     "data[0].loss_fn_inputs['advantages'] holds 16777217"),
    (pass_of(plain(), plain((1, -1, 2))), "data[1]: model_input tokens holds -1; token ids must lie in [0, 50)"),
    (pass_of(plain((1, 50, 2))), "data[0]: model_input tokens holds 50"),
    (pass_of(plain(), plain(targets=(1, 2, 50))), "data[1]: target_tokens holds 50"),
    (pass_of(plain(targets=(-100, 2, 3))), "data[0]: target_tokens holds -100"),
    (pass_of(plain(weights=(1, np.nan, 1))), "data[0].loss_fn_inputs['weights'] holds nan"),
    (pass_of(policy(), policy(logprobs=np.array([0, -np.inf, 0], F32)), loss_fn="ppo"),
     "data[1].loss_fn_inputs['logprobs'] holds -inf"),
    (pass_of(policy(advantages=np.array([0, np.inf, 0], F32)), loss_fn="cispo"),
     "data[0].loss_fn_inputs['advantages'] holds inf"),
    (pass_of(policy(clip_low_threshold=np.full(3, 1.3, F32)), loss_fn="ppo"),
     "data[0].loss_fn_inputs: clip_low_threshold must lie between 0 and clip_high"),
    (pass_of(policy(clip_low_threshold=np.full(2, 0.5, F32)), loss_fn="ppo"), "['clip_low_threshold'] has shape [2]"),
    (pass_of(policy(sequence_ratio_mask=np.zeros(3, F32)), loss_fn="gspo"),
     "['sequence_ratio_mask'] is zero everywhere"),
    (pass_of(two_sparse(sparse(2, 3, [0, 2, 1], [0, 2], [7, 9]))),
     "crow_indices must be 3 ascending numbers from 0 to 2"),
    (pass_of(two_sparse(sparse(2, 3, [1, 1, 2], [0, 2], [7, 9]))), "crow_indices must be 3 ascending numbers from 0"),
    (pass_of(two_sparse(sparse(2, 3, [0, 2], [0, 2], [7, 9]))), "crow_indices must be 3 ascending numbers"),
    (pass_of(two_sparse(sparse(2, 3, [0, 1, 3], [0, 2], [7, 9]))), "crow_indices must be 3 ascending numbers"),
    (pass_of(two_sparse(sparse(2, 3, [0, 1, 2], [0, 3], [7, 9]))),
     "col_indices reach from 0 to 3; they must lie in [0, 3)"),
    (pass_of(two_sparse(sparse(2, 3, [0, 1, 2], [0], [7, 9]))), "has 1 col_indices for 2 values"),
    (pass_of(two_sparse(sparse(2, 3, [0, 2, 2], [1, 1], [7, 9]))), "lists a cell twice"),
    (pass_of(two_sparse(sparse(2, 3, [0, 1, 2], [0, 1], [7, 50]))), "data[0]: target_tokens holds 50"),
    (pass_of(two_sparse(sparse(3, 3, [0, 1, 2, 2], [0, 1], [7, 5]))),
     "['target_tokens'] has shape [3, 3]; it must be [2, 3]"),
    (pass_of(two_sparse(sparse(2, 2**40, [0, 0, 0], [], []))), "more than 16777216 cells"),
    (pass_of(policy(logprobs=sparse(3, 1, [0, 0, 0, 0], [], [], F32)), loss_fn="ppo"),
     "['logprobs'] has shape [3, 1]; it must be [3]"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "message"), REFUSED, ids=[message[:60] for _, message in REFUSED])
def test_invalid_loss_inputs_are_refused_by_name(bad: Pass, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        check_pass(bad, SHAPE)


def test_defaults_are_the_documented_ones() -> None:
    ppo = {CLIP_LOW: 0.8, CLIP_HIGH: 1.2, DUAL_CLIP: 0.0, ROLLOUT_MAX: 2.0}
    assert resolve_config(pass_of(loss_fn="ppo")) == ppo
    assert resolve_config(pass_of(loss_fn="cispo")) == {CLIP_LOW: 0.0, CLIP_HIGH: 4.0, ROLLOUT_MAX: 2.0}
    assert resolve_config(pass_of(loss_fn="dro")) == {"beta": 0.05}
    assert resolve_config(pass_of(loss_fn="gspo")) == {CLIP_LOW: 1 - 3e-4, CLIP_HIGH: 1 + 4e-4, ROLLOUT_MAX: 2.0}
    assert resolve_config(pass_of(loss_fn="ppo", config={CLIP_HIGH: 3.0})) == ppo | {CLIP_HIGH: 3.0}


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_a_sparse_array_expands_to_what_it_was_made_from(rows: int, cols: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    full = rng.integers(-3, 4, (rows, cols)) * (rng.random((rows, cols)) < 0.5)
    tensor = torch.from_numpy(full)
    row, col = np.nonzero(full)
    crow = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=rows))])
    array = SparseRows(tensor.numpy()[row, col], crow, col, full.shape)
    assert np.array_equal(dense(array), full)
