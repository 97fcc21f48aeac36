"""Packing: the composition of steps, and attention that is confined to sequences."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.properties import examples
from tinsmith.backends.torch.adapters import Adapter, Layout, Target
from tinsmith.backends.torch.attention import PackedCausal, Window
from tinsmith.backends.torch.batch import ADVANTAGE, COLUMNS, SAMPLING_LOGPROB, Example, MicroBatch, build_examples
from tinsmith.backends.torch.packing import pack
from tinsmith.backends.torch.vision import ImageInput
from tinsmith.losses import CLIP_HIGH, CLIP_LOW, LOSSES, ROLLOUT_LOGPROBS
from tinsmith.types import Array, Datum, Image, LoraSpec, Pass, SparseRows

torch.set_num_threads(1)

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=9)


def adapter() -> Adapter:
    layout = Layout.of(1, [Target("lm_head", "unembed", 2, 3)])
    return Adapter(LoraSpec(1), layout, torch.zeros(layout.numel), torch.float32)


def example(owner: Adapter, pass_index: int, datum_index: int, length: int) -> Example:
    datum = Datum(
        np.arange(length, dtype=np.int32),
        {"target_tokens": np.arange(length, dtype=np.int64), "weights": np.ones(length, np.float32)},
    )
    (converted,) = build_examples(Pass("r", "m", (datum,), "cross_entropy", {}, False), pass_index, owner)
    return Example(
        pass_index,
        datum_index,
        owner,
        converted.tokens_N,
        converted.target_shape,
        converted.targets_P,
        converted.columns,
    )


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 30)), min_size=1, max_size=20),
    st.integers(1, 64),
)
def test_packing_keeps_every_example_once_within_the_budget(items: list[tuple[int, int, int]], budget: int) -> None:
    owners = [adapter() for _ in range(4)]
    # A pass belongs to one model, so its index is derived from both.
    examples = [example(owners[o], 3 * o + p, i, n) for i, (o, p, n) in enumerate(items)]
    batches = pack(examples, budget)
    packed = [e for batch in batches for e in batch.examples]
    assert sorted(id(e) for e in packed) == sorted(id(e) for e in examples)
    for batch in batches:
        assert sum(batch.lengths) <= budget or len(batch.examples) == 1
        adapters = [segment.adapter for segment in batch.lora_batch.segments]
        assert len({id(owner) for owner in adapters}) == len(adapters)
        assert batch.lora_batch.num_rows == len(batch.tokens_T) == len(batch.positions_T)
        assert (np.diff(batch.pass_P) != 0).sum() == len(set(batch.pass_P)) - 1
        for e, start in zip(batch.examples, np.cumsum([0, *batch.lengths]), strict=False):
            assert np.array_equal(batch.positions_T[start : start + e.num_tokens], np.arange(e.num_tokens))


def examples_with(loss_fn: str, *data: Datum, pass_index: int = 0, **config: float) -> list[Example]:
    return build_examples(Pass("r", "m", data, loss_fn, config, False), pass_index, adapter())


def policy_datum(length: int, **inputs: Array) -> Datum:
    columns: dict[str, Array] = {
        "target_tokens": np.arange(length),
        "logprobs": np.linspace(-2, -1, length, dtype=np.float32),
        "advantages": np.ones(length, np.float32),
    }
    return Datum(np.arange(length, dtype=np.int32), {**columns, **inputs})


def targets_datum(length: int, num_targets: int, **inputs: Array) -> Datum:
    """A datum with several targets per token, numbered from 0."""
    targets = np.arange(length * num_targets).reshape(length, num_targets)
    return Datum(np.arange(100, 100 + length, dtype=np.int32), {"target_tokens": targets, **inputs})


def test_pairs_and_rows_of_a_micro_batch_refer_to_each_other() -> None:
    weights = np.array([[0, 0, 0], [0, 4, 5]], np.float32)
    wide = examples_with("cross_entropy", targets_datum(2, 3, weights=weights), pass_index=4)
    narrow = examples_with("cross_entropy", targets_datum(3, 1), pass_index=7)
    batch = MicroBatch((*wide, *narrow))
    assert batch.full_batch is batch and batch.targets_P[batch.pairs].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert batch.lengths == [2, 3] and batch.tokens_T.tolist() == [100, 101, 100, 101, 102]
    assert batch.tokens_T.dtype == np.int64 and batch.positions_T.tolist() == [0, 1, 0, 1, 2]
    assert batch.row_P.tolist() == [0, 0, 0, 1, 1, 1, 2, 3, 4]
    assert batch.example_P.tolist() == [0] * 6 + [1] * 3 and batch.example_starts.tolist() == [0, 6, 9]
    assert batch.pass_P.tolist() == [4] * 6 + [7] * 3
    assert batch.expand_to_pairs([False, True]).tolist() == [False] * 6 + [True] * 3
    assert batch.column_P("weight").tolist() == [0, 0, 0, 0, 4, 5, 1, 1, 1]
    assert batch.rows_of_pairs(batch.column_P("weight") != 0).tolist() == [False, True, True, True, True]


def test_an_example_has_weight_if_one_of_its_pairs_has() -> None:
    for weights, has_weight in (([0, 0, -0.5], True), ([0, 0, 0], False)):
        (converted,) = examples_with("cross_entropy", targets_datum(3, 1, weights=np.array([weights], np.float32).T))
        assert converted.has_weight is has_weight


def test_inputs_become_columns_and_those_left_out_have_their_defaults() -> None:
    clips = {CLIP_LOW: np.array([0.5, 0.25], np.float32), CLIP_HIGH: np.array([2, 4], np.float32)}
    mask = np.array([0, 1], np.float32)
    for loss_fn, inputs, config, expected in (
        ("ppo", {}, {}, {"low": [0.8] * 2, "high": [1.2] * 2, "ratio_mask": [1, 1]}),
        ("ppo", {}, {CLIP_LOW: 0.5, CLIP_HIGH: 3.0}, {"low": [0.5] * 2, "high": [3] * 2}),
        ("ppo", clips, {}, {"low": [0.5, 0.25], "high": [2, 4], "old_logprob": [-2, -1], "weight": [1, 1]}),
        ("gspo", {"sequence_ratio_mask": mask}, {}, {"ratio_mask": [0, 1]}),
        ("ppo", {"sequence_ratio_mask": mask, "weights": mask}, {}, {"ratio_mask": [1, 1], "weight": [1, 1]}),
        ("dro", {"advantages": np.array([-1, 3])}, {}, {"weight": [-1, 3], "low": [0, 0], "high": [0, 0]}),
        ("cross_entropy", {}, {}, {"weight": [1, 1], "old_logprob": [0, 0], "ratio_mask": [1, 1]}),
        ("cross_entropy", {"weights": mask}, {}, {"weight": [0, 1]}),
        ("custom", {"weights": mask}, {"loss_id": "l"}, {"weight": [1, 1], "old_logprob": [0, 0]}),
    ):
        (converted,) = examples_with(loss_fn, policy_datum(2, **inputs), **config)  # type: ignore[arg-type]
        of_policy = {ADVANTAGE, SAMPLING_LOGPROB} if LOSSES[loss_fn].is_policy else set()
        assert converted.columns.keys() == {*COLUMNS, *of_policy}
        assert all(column.dtype == np.float32 and column.shape == (2,) for column in converted.columns.values())
        for name, values in expected.items():
            np.testing.assert_allclose(converted.columns[name], values, rtol=1e-6, err_msg=f"{loss_fn}: {name}")


def test_rollout_logprobs_weigh_the_advantages_of_the_losses_that_take_them() -> None:
    rollout = np.array([-2 - np.log(1.5), -1 + np.log(2.0)], np.float32)
    for loss_fn, expected in (("cispo", [1.5, 0.5]), ("dro", [1.0, 1.0])):
        (converted,) = examples_with(loss_fn, policy_datum(2, **{ROLLOUT_LOGPROBS: rollout}))
        np.testing.assert_allclose(converted.columns["weight"], expected, rtol=1e-5)
        assert converted.columns[ADVANTAGE].tolist() == [1, 1]
        sampling = rollout if loss_fn == "cispo" else converted.columns["old_logprob"]
        assert converted.columns[SAMPLING_LOGPROB].tolist() == sampling.tolist()


def test_sparse_targets_become_dense_pairs() -> None:
    targets = SparseRows(np.array([7, 9]), np.array([0, 1, 2]), np.array([1, 0]), (2, 3))
    weights = SparseRows(np.array([0.5, 2], np.float32), targets.crow_indices, targets.col_indices, (2, 3))
    first, second = examples_with("cross_entropy", targets_datum(1, 1), targets_datum(2, 3, weights=weights))
    assert (first.datum_index, second.datum_index, second.target_shape) == (0, 1, (2, 3))
    assert second.columns["weight"].tolist() == [0, 0.5, 0, 2, 0, 0]
    (converted,) = examples_with("cross_entropy", targets_datum(2, 3, target_tokens=targets))
    assert converted.targets_P.tolist() == [0, 7, 0, 9, 0, 0] and converted.targets_P.dtype == np.int64


def test_images_go_with_their_datum() -> None:
    images = tuple(Image("data[1]", b"", "png", 8, 8, start, count, b"") for start, count in ((1, 2), (4, 3)))
    placed = ImageInput(images, np.zeros((3, 8), np.int64), bidirectional=True)
    request = Pass("r", "m", (targets_datum(2, 1), targets_datum(8, 1)), "cross_entropy", {}, False)
    plain, with_images = build_examples(request, 0, adapter(), [None, placed])
    assert (plain.image_input, with_images.image_input) == (None, placed)
    batch = MicroBatch((plain, with_images))
    assert batch.has_images and batch.largest_image == 3
    assert [tuple(span) for span in batch.input_spans] == [(None, 0, 2), (placed, 0, 8)]
    (absent, seen) = batch.visible_counts
    assert absent is None and seen is not None and seen.tolist() == [1, 3, 3, 4, 7, 7, 7, 8]
    without = MicroBatch((plain,))
    assert (without.has_images, without.largest_image, without.visible_counts) == (False, 0, [None])


def test_packing_puts_long_examples_first_and_fills_the_budget_to_its_last_token() -> None:
    owner, other = adapter(), adapter()
    lengths = [(owner, 1, 0, 3), (other, 0, 0, 2), (owner, 0, 0, 4), (owner, 0, 1, 6), (owner, 0, 2, 4)]
    batches = pack([example(*fields) for fields in lengths], 10)
    order = [[(e.adapter is owner, e.pass_index, e.datum_index) for e in batch.examples] for batch in batches]
    assert order == [[(True, 0, 1), (True, 0, 0)], [(True, 0, 2), (True, 1, 0), (False, 0, 0)]]
    assert pack([], 10) == []


def reference(
    q: Tensor, k: Tensor, v: Tensor, window: Window | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """[T, H, D] for one sequence, one query at a time, in float64."""
    out = torch.zeros_like(q)
    per_group = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        for h in range(q.shape[1]):
            first = 0
            if window is not None:
                first = i - i % window.size if window.chunked else max(0, i - window.size + 1)
            scores = torch.stack([q[i, h] @ k[j, h // per_group] * 0.3 for j in range(first, i + 1)])
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[h : h + 1]])
            probs = torch.softmax(scores, 0)[: i + 1 - first]
            out[i, h] = probs @ v[first : i + 1, h // per_group]
    return out


@pytest.mark.parametrize("variant", ["causal", "window", "chunks", "softcap", "sinks"])
@examples(12)
@given(lengths=st.lists(st.integers(1, 14), min_size=1, max_size=6), seed=st.integers(0, 2**32 - 1))
def test_packed_attention_and_gradients_equal_each_sequence_alone(variant: str, lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    q, k, v, grad = (torch.randn(total, heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4))
    window = Window(3, variant == "chunks") if variant in ("window", "chunks", "sinks") else None
    softcap = 1.5 if variant == "softcap" else None
    sinks = torch.randn(4, generator=generator, dtype=torch.float64) if variant == "sinks" else None
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = PackedCausal(lengths).attend(0, *leaves, scale=0.3, window=window, softcap=softcap, sinks_H=sinks)
    out.backward(grad)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        sequence_leaves = [x[rows].clone().requires_grad_() for x in (q, k, v)]
        expected = reference(*sequence_leaves, window, softcap, sinks)
        expected.backward(grad[rows])
        # The plain path computes its softmax in float32.
        tolerance = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(out[rows], expected, **tolerance)
        for leaf, sequence_leaf in zip(leaves, sequence_leaves, strict=True):
            assert leaf.grad is not None and sequence_leaf.grad is not None
            torch.testing.assert_close(leaf.grad[rows], sequence_leaf.grad, **tolerance)
        start += length


@examples(30)
@given(lengths=LENGTHS, sick=st.integers(0, 8), softcap=st.sampled_from([None, 2.0]), data=st.data())
def test_nan_in_one_sequence_stays_there(
    lengths: list[int], sick: int, softcap: float | None, data: st.DataObject
) -> None:
    sick %= len(lengths)
    start = sum(lengths[:sick])
    sick_rows = slice(start, start + lengths[sick])
    x = torch.randn(sum(lengths), 2, 4, generator=torch.Generator().manual_seed(0))
    healthy_leaf, sick_leaf = x.clone().requires_grad_(), x.clone()
    sick_leaf[sick_rows] = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    sick_leaf.requires_grad_()
    plan = PackedCausal(lengths)
    healthy_rows = torch.ones(len(x), dtype=torch.bool)
    healthy_rows[sick_rows] = False
    outs = []
    for leaf in (healthy_leaf, sick_leaf):
        out = plan.attend(0, leaf, leaf, leaf, scale=0.5, softcap=softcap)
        out.backward(torch.ones_like(out))
        outs.append(out)
    assert healthy_leaf.grad is not None and sick_leaf.grad is not None
    assert torch.equal(outs[0][healthy_rows], outs[1][healthy_rows])
    assert torch.equal(healthy_leaf.grad[healthy_rows], sick_leaf.grad[healthy_rows])


@pytest.mark.parametrize("window", [None, Window(3), Window(3, chunked=True)])
@examples(8)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6), seed=st.integers(0, 2**32 - 1))
def test_short_sequences_in_bfloat16_equal_float64_up_to_rounding(
    window: Window | None, lengths: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    q, k, v, grad = (torch.randn(total, heads, 4, generator=generator).bfloat16() for heads in (4, 2, 2, 4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = PackedCausal(lengths).attend(0, *leaves, scale=0.3, window=window)
    assert out.dtype == torch.bfloat16
    out.backward(grad)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wide = PackedCausal(lengths).attend(0, *exact, scale=0.3, window=window)
    wide.backward(grad.double())
    for actual, expected in zip(
        (out.detach(), *(x.grad for x in leaves)), (wide.detach(), *(x.grad for x in exact)), strict=True
    ):
        assert actual is not None and expected is not None
        # Where the true gradient is nearly zero, the rest is rounding of the output gradient's magnitude.
        assert float((actual.double() - expected).norm()) < 0.02 * float(expected.norm() + grad.double().norm())


@examples(20)
@given(lengths=LENGTHS, sick=st.integers(0, 8))
def test_nan_in_a_short_sequence_in_bfloat16_stays_there(lengths: list[int], sick: int) -> None:
    sick %= len(lengths)
    start = sum(lengths[:sick])
    healthy_rows = torch.ones(sum(lengths), dtype=torch.bool)
    healthy_rows[start : start + lengths[sick]] = False
    x = torch.randn(len(healthy_rows), 2, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    runs = []
    for value in (None, torch.nan):
        leaf = x.clone()
        if value is not None:
            leaf[~healthy_rows] = value
        leaf.requires_grad_()
        out = PackedCausal(lengths).attend(0, leaf, leaf, leaf, scale=0.5)
        out.backward(torch.ones_like(out))
        assert leaf.grad is not None
        runs.append((out.detach(), leaf.grad))
    for healthy, with_nan in zip(*runs, strict=True):
        assert torch.equal(healthy[healthy_rows], with_nan[healthy_rows])


def test_sequences_of_one_length_share_one_kernel_call_without_a_copy() -> None:
    plan = PackedCausal([8] * 5)
    (group,) = plan._groups
    assert len(group.starts) == 5 and plan._row_C is None


@given(LENGTHS)
def test_padding_stays_within_its_bound(lengths: list[int]) -> None:
    starts = [0, *accumulate(lengths)]
    for group in PackedCausal(lengths)._groups:
        shortest = min(lengths[starts.index(start)] for start in group.starts)
        assert shortest >= group.length - max(16, 0.25 * group.length)
