"""Data that begin alike are trained together: values and gradients are float64's of every datum alone, shared rows go
through the model once, and nothing is shared between models.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import tiny_models
from support.families import FAMILIES, Family, make
from support.float64_reference import Reference
from support.properties import examples
from tinsmith.backends.distributed.trainer import distribute_examples
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.batch import MicroBatch, build_examples
from tinsmith.backends.torch.packing import list_units, pack
from tinsmith.backends.torch.tree_attention import PackedTree
from tinsmith.losses import dense
from tinsmith.plan.prefix_tree import MIN_SHARED_ROWS
from tinsmith.types import Datum, LoraSpec, ModelShape, Pass, PassResult
from unit.test_packing import adapter
from unit.test_torch_backend import (
    OUR_LOSSES,
    RL_LOSSES,
    check_against_reference,
    fb,
    gradient,
    relative,
    rl,
    run,
    sft,
    warm,
)

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("qwen"), "qwen3")


@pytest.fixture(scope="module")
def oracle(qwen: ModelShape) -> Reference:
    return Reference(qwen.path)


def sharing(shape: ModelShape, min_rows: int = 1, **options: int | str) -> TorchBackend:
    backend = TorchBackend(shape, device="cpu", **options)  # pyright: ignore[reportArgumentType]
    backend._trainer._min_shared_rows = min_rows
    return backend


def begin_alike(rng: np.random.Generator, data: list[Datum]) -> list[Datum]:
    """Replace the beginning of each datum's tokens by that of an earlier one, or all of them."""
    changed: list[Datum] = []
    for datum in data:
        tokens_N = datum.tokens_N.copy()
        if changed and rng.random() < 0.8:
            source = changed[int(rng.integers(len(changed)))].tokens_N
            common = min(len(source), len(tokens_N), int(rng.integers(1, 40)))
            tokens_N[:common] = source[:common]
        changed.append(Datum(tokens_N, datum.inputs))
    return changed


def count_rows(results: list[PassResult]) -> int:
    assert all(result.num_rows is not None for result in results)
    return sum(result.num_rows or 0 for result in results)


def total_tokens(*data: list[Datum]) -> int:
    return sum(len(datum.tokens_N) for group in data for datum in group)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("loss_fn", OUR_LOSSES)
@examples(3)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_trees_have_the_values_and_gradients_of_float64(
    qwen: ModelShape, oracle: Reference, loss_fn: str, seed: int
) -> None:
    """Of every loss, with ragged lengths, weights of their own on shared rows, equal data, beginnings of others, and
    several targets; in micro-batches that cut some trees.
    """
    rng = np.random.default_rng(seed)
    backend = sharing(qwen, int(rng.integers(1, 6)), max_tokens_per_microbatch=int(rng.choice([30, 1000])))
    backend.create_model("m", LoraSpec(4, seed=1))
    warm(backend, "m")
    lengths = [1, *rng.integers(2, 26, 6).tolist()]
    if loss_fn == "cross_entropy":
        data = [sft(rng, n, int(targets) or None) for n, targets in zip(lengths, rng.integers(0, 4, 7), strict=True)]
    else:
        data = [rl(rng, n, oracle) for n in lengths]
    data = begin_alike(rng, data)
    check_against_reference(backend, oracle, "m", [*data, data[2]], loss_fn)


def test_shared_rows_are_computed_once_and_returned_to_every_datum(qwen: ModelShape) -> None:
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, tiny_models.VOCAB, MIN_SHARED_ROWS).astype(np.int32)
    data = [sft(rng, len(prompt) + length) for length in (3, 5, 4)]
    data = [Datum(np.concatenate([prompt, datum.tokens_N[len(prompt) :]]), datum.inputs) for datum in data]
    backend = sharing(qwen, MIN_SHARED_ROWS)
    backend.create_model("m", LoraSpec(4))
    (result,) = run(backend, fb("m", data))
    assert result.num_rows == len(prompt) + 3 + 5 + 4
    assert result.metrics["tokens:sum"] == total_tokens(data)
    (scored,) = run(backend, fb("m", data, forward_only=True))
    assert scored.num_rows == result.num_rows
    shorter = [Datum(datum.tokens_N[1:], {k: dense(v)[1:] for k, v in datum.inputs.items()}) for datum in data]
    (separate,) = run(backend, fb("m", shorter))
    assert separate.num_rows == total_tokens(shorter)


def test_passes_of_one_model_share_rows_and_those_of_others_do_not(qwen: ModelShape, oracle: Reference) -> None:
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, tiny_models.VOCAB, 20).astype(np.int32)
    data = [[Datum(tokens, rl(rng, 20, oracle).inputs) for _ in range(2)] for _ in range(3)]
    losses = ["importance_sampling", "ppo", "cispo"]
    separate, together = sharing(qwen, 0), sharing(qwen, 8)
    for backend in (separate, together):
        for model_id in ("m", "n"):
            backend.create_model(model_id, LoraSpec(4, seed=3))
            warm(backend, model_id, seed=3)
    passes = [fb("m", group, loss_fn) for group, loss_fn in zip(data, losses, strict=True)]
    passes.append(fb("n", data[0], losses[0]))
    expected, ours = run(separate, *passes), run(together, *passes)
    assert [result.num_rows for result in expected] == [40] * 4
    # The first pass has the rows that the two after it share; those of the other model are computed again.
    assert [result.num_rows for result in ours] == [20, 0, 0, 20]
    for a, b in zip(expected, ours, strict=True):
        for alone, shared in zip(a.logprobs, b.logprobs, strict=True):
            np.testing.assert_allclose(shared, alone, atol=1e-5)
        assert b.metrics == pytest.approx(a.metrics, rel=1e-4)
    for model_id in ("m", "n"):
        for name, pair in gradient(together, model_id).items():
            for part, alone in zip(pair, gradient(separate, model_id)[name], strict=True):
                assert relative(part, alone.double()) < 1e-4


@pytest.mark.parametrize("loss_fn", RL_LOSSES)
def test_a_datum_without_weight_at_a_shared_row_has_no_gradient_there(
    qwen: ModelShape, oracle: Reference, loss_fn: str
) -> None:
    """Whatever its other columns hold: an old log probability of -1e30 makes its ratio infinite."""
    rng = np.random.default_rng(4)
    first = rl(rng, 12, oracle)
    advantages, logprobs = np.zeros(12, np.float32), np.full(12, -1e30, np.float32)
    advantages[11], logprobs[11] = 1.0, -3.0
    inputs = {**first.inputs, "advantages": advantages, "logprobs": logprobs}
    if loss_fn == "gspo":
        inputs["sequence_ratio_mask"] = (advantages != 0).astype(np.float32)
    tokens_N = np.concatenate([first.tokens_N[:11], first.tokens_N[:1]])
    backend = sharing(qwen)
    backend.create_model("m", LoraSpec(4))
    warm(backend, "m")
    if loss_fn in ("dro", "stable_reinforce"):  # whose penalty also counts where the advantage is 0
        data = [first, Datum(tokens_N, {**inputs, "logprobs": first.inputs["logprobs"]})]
        separate = sharing(qwen, 0)
        separate.create_model("m", LoraSpec(4))
        warm(separate, "m")
        run(separate, fb("m", data, loss_fn))
        run(backend, fb("m", data, loss_fn))
        for name, pair in gradient(backend, "m").items():
            for part, alone in zip(pair, gradient(separate, "m")[name], strict=True):
                assert relative(part, alone.double()) < 1e-4
    else:
        check_against_reference(backend, oracle, "m", [first, Datum(tokens_N, inputs)], loss_fn)


def test_a_deterministic_engine_shares_nothing(qwen: ModelShape) -> None:
    rng = np.random.default_rng(5)
    datum = sft(rng, 40)
    backend = TorchBackend(qwen, device="cpu", deterministic="on")
    backend.create_model("m", LoraSpec(4))
    (result,) = run(backend, fb("m", [datum, datum]))
    assert result.num_rows == 80


def test_a_model_that_is_not_finite_leaves_others_as_they_are(qwen: ModelShape) -> None:
    rng = np.random.default_rng(6)
    data = begin_alike(rng, [sft(rng, 30) for _ in range(4)])
    alone, beside = sharing(qwen), sharing(qwen)
    for backend in (alone, beside):
        backend.create_model("m", LoraSpec(4, seed=1))
        warm(backend, "m")
    beside.create_model("n", LoraSpec(4, seed=2))
    beside._models["n"].adapter.flat_P.fill_(float("nan"))
    beside._models["n"].adapter.refresh()
    (expected,) = run(alone, fb("m", data))
    ours, broken = run(beside, fb("m", data), fb("n", data))
    assert np.isnan(broken.logprobs[0]).all()
    for a, b in zip(expected.logprobs, ours.logprobs, strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5)


@pytest.mark.parametrize(
    "family", [pytest.param(f, id=f.model_type, marks=() if f.core else pytest.mark.slow) for f in FAMILIES]
)
def test_every_family_is_the_same_with_shared_rows(family: Family, tmp_path: Path) -> None:
    """Also those whose attention has windows, caps, sinks or latent keys, and those with a state; float32 beside the
    same rows separate, which test_families.py compares with transformers and PEFT.
    """
    backend = TorchBackend(make(tmp_path, family), device="cpu", dtype="float32")
    rng = np.random.default_rng(7)
    prompt, turn = rng.integers(0, tiny_models.VOCAB, 13), rng.integers(0, tiny_models.VOCAB, 9)
    beginnings = [prompt, prompt, prompt[:0], np.concatenate([prompt, turn]), np.concatenate([prompt, turn]), prompt]
    data = []
    for beginning, length in zip(beginnings, (7, 11, 17, 5, 1, 7), strict=True):
        datum = sft(rng, len(beginning) + length)
        tokens_N = np.concatenate([beginning, datum.tokens_N[len(beginning) :]]).astype(np.int32)
        data.append(Datum(tokens_N, datum.inputs))
    outcomes = []
    for min_rows in (0, 4):
        backend._trainer._min_shared_rows = min_rows
        backend.create_model("m", LoraSpec(4, seed=1))
        warm(backend, "m")
        backend._models["m"].adapter.refresh()
        (result,) = run(backend, fb("m", [*data, data[0]]))
        gradient_P = backend._models["m"].gradient_P
        assert gradient_P is not None
        outcomes.append((np.concatenate([x.reshape(-1) for x in result.logprobs]), gradient_P.double(), result))
        backend.unload_model("m")
    (expected, expected_P, separate), (ours, ours_P, shared) = outcomes
    assert separate.num_rows == total_tokens(data, data[:1]) and shared.num_rows == 13 + 9 + 7 + 11 + 17 + 5 + 1 + 7
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    assert relative(ours_P, expected_P) < 1e-4


# Packing.


def packed(sequences: list[list[int]], max_tokens: int, min_rows: int = 2) -> list[MicroBatch]:
    data = tuple(
        Datum(
            np.array(tokens, np.int32), {"target_tokens": np.array(tokens), "weights": np.ones(len(tokens), np.float32)}
        )
        for tokens in sequences
    )
    return pack(build_examples(Pass("r", "m", data, "cross_entropy", {}, False), 0, adapter()), max_tokens, min_rows)


SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=12)


@examples(150)
@given(SEQUENCES, st.integers(1, 40), st.integers(1, 4))
def test_a_micro_batch_has_every_token_of_its_examples_within_the_budget(
    sequences: list[list[int]], max_tokens: int, min_rows: int
) -> None:
    batches = packed(sequences, max_tokens, min_rows)
    assert sorted(e.datum_index for batch in batches for e in batch.examples) == list(range(len(sequences)))
    for batch in batches:
        assert batch.num_rows <= max_tokens or batch.is_path
        assert batch.num_rows == len(batch.tokens_T) == len(batch.positions_T) == batch.lora_batch.num_rows
        for example, start in zip(batch.examples, batch.example_starts, strict=False):
            rows = batch.row_P[start : start + example.num_tokens]
            assert np.array_equal(batch.tokens_T[rows], example.tokens_N)
            assert np.array_equal(batch.positions_T[rows], np.arange(example.num_tokens))


def test_a_tree_that_fits_is_not_cut_and_a_larger_one_repeats_its_path() -> None:
    group = [[*range(10), 20 + i] for i in range(4)]
    assert [batch.num_rows for batch in packed(group, 14)] == [14]
    assert [batch.num_rows for batch in packed([[50] * 5, *group], 14)] == [14, 5]
    assert [batch.num_rows for batch in packed(group, 13)] == [13, 11]
    assert [batch.num_rows for batch in packed(group, 1)] == [11] * 4
    assert [batch.num_rows for batch in packed(group, 14, min_rows=0)] == [11] * 4


def test_a_tree_may_be_larger_than_other_micro_batches() -> None:
    group = [[*range(10), 20 + i] for i in range(4)]
    data = tuple(
        Datum(np.array(tokens, np.int32), {"target_tokens": np.array(tokens)})
        for tokens in ([50] * 5, *group, [60] * 5)
    )
    items = build_examples(Pass("r", "m", data, "cross_entropy", {}, False), 0, adapter())
    assert [batch.num_rows for batch in pack(items, 11, 2, 14)] == [14, 10]
    assert [batch.num_rows for batch in pack(items, 11, 2, 13)] == [13, 11, 10]
    assert [batch.num_rows for batch in pack(items, 11, 0, 14)] == [11] * 4 + [10]


def test_trees_are_larger_where_activations_may_be_kept(qwen: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {}
    for name, options in {
        "auto": {},
        "set": {"max_tokens_per_microbatch": 512},
        "recompute": {"recompute": "on"},
    }.items():
        limits[name] = sharing(qwen, **options)._trainer._tree_limit(512 if name == "set" else 1024)
    assert limits == {"auto": 8192, "set": 512, "recompute": 1024}
    trainer = sharing(qwen)._trainer
    monkeypatch.setattr(trainer._base.recompute, "fits", lambda size, device: size <= 4096)
    assert trainer._tree_limit(1024) == 4096
    assert trainer._tree_limit(512) == 512, "memory ran out before"


def test_equal_data_that_do_not_fit_are_refused_like_a_single_one() -> None:
    (batch,) = packed([[1] * 9, [1] * 9], 3)
    assert batch.is_path and batch.num_rows == 9
    data = [Datum(np.ones(length, np.int32), {"target_tokens": np.ones(length, np.int64)}) for length in (4, 9)]
    passes = [Pass("r", "m", (datum,), "cross_entropy", {}, False) for datum in data]
    owner = adapter()
    chain = [example for index, pass_ in enumerate(passes) for example in build_examples(pass_, index, owner)]
    (batch,) = pack(chain, 100, 2)
    assert batch.is_path and batch.single_pass == 1, "the pass of the longest one, whose rows do not fit"


def test_a_unit_is_halved_with_the_rows_that_both_halves_need() -> None:
    data = tuple(Datum(np.array([*range(10), 20 + i], np.int32), {"target_tokens": np.arange(11)}) for i in range(4))
    (unit,) = list_units(build_examples(Pass("r", "m", data, "cross_entropy", {}, False), 0, adapter()), 2)
    assert unit.num_rows == 14 and [half.num_rows for half in unit.halve()] == [12, 12]
    assert [[e.datum_index for e in half.members] for half in unit.halve()] == [[0, 1], [2, 3]]


def test_rows_of_a_tree_get_a_plan_for_it(qwen: ModelShape) -> None:
    backend = sharing(qwen, 2)
    (shared,) = packed([[1, 2, 3], [1, 2, 4]], 100)
    assert isinstance(backend._trainer._attention_plan(shared), PackedTree)
    (separate,) = packed([[1, 2, 3], [2, 2, 4]], 100)
    assert separate.tree is None
    assert not isinstance(backend._trainer._attention_plan(separate), PackedTree)


@pytest.mark.parametrize("num_shares", [1, 2, 4])
def test_ranks_get_whole_trees_that_are_no_more_than_a_share(num_shares: int) -> None:
    """One prompt of ten tokens with eight answers of three: halves of it each have the prompt."""
    data = tuple(
        Datum(np.array([*range(10), 20 + i, 1, 2], np.int32), {"target_tokens": np.arange(13)}) for i in range(8)
    )
    group = build_examples(Pass("r", "m", data, "cross_entropy", {}, False), 0, adapter())
    shares = distribute_examples(group, num_shares, 2)
    assert [pack(share, 100, 2)[0].num_rows for share in shares] == [10 + 3 * len(share) for share in shares]
    assert sorted(e.datum_index for share in shares for e in share) == list(range(8))
    assert max(len(share) for share in shares) == 8 // num_shares
