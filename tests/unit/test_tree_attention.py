"""Attention and layers with a state over a tree's rows are those of each sequence alone, with the sum of their
gradients: in float64 to rounding, for every way that a layer is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.properties import examples
from tinsmith.backends.torch import attention_parts, tree_attention
from tinsmith.backends.torch.attention import (
    AttentionOptions,
    Mixer,
    MixerState,
    Window,
    group_by_length,
    reference_attention,
    visibility_mask,
)
from tinsmith.backends.torch.tree_attention import PackedTree, list_state_batches
from tinsmith.plan.prefix_tree import PrefixTree, build_tree
from tinsmith.types import I64

torch.set_num_threads(1)

SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=7)


def make_tree(sequences: Sequence[Sequence[int]], min_rows: int = 1) -> PrefixTree:
    return build_tree([np.array(sequence) for sequence in sequences], min_rows)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attend_alone(
    tree: PrefixTree, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, counts: Sequence[I64 | None], **options: object
) -> list[Tensor]:
    """[L, H, D] of each sequence, in plain arithmetic."""
    outputs, first = [], 0
    rows = torch.from_numpy(tree.token_rows)
    for sequence, end in enumerate(tree.ends):
        length = tree.nodes[end].stop
        own = rows[first : first + length]
        q, k, v = (x[own].transpose(0, 1)[None] for x in (q_THD, k_TGD, v_TGD))
        seen = counts[sequence] if counts else None
        position_1L = torch.arange(length)[None]
        window = cast("Window | None", options.get("window"))
        mask = visibility_mask(
            position_1L, length, window, q.dtype, None if seen is None else torch.from_numpy(seen)[None]
        )
        outputs.append(reference_attention(q, k, v, mask, **cast(AttentionOptions, options))[0].transpose(0, 1))
        first += length
    return outputs


def check(
    tree: PrefixTree, heads: tuple[int, int, int, int], counts: Sequence[I64 | None] = (), **options: object
) -> None:
    num_heads, num_keys, key_dim, value_dim = heads
    num_rows = sum(tree.lengths)
    inputs = [
        random(1, num_rows, num_heads, key_dim),
        random(2, num_rows, num_keys, key_dim),
        random(3, num_rows, num_keys, value_dim),
    ]
    grads = [random(9 + i, tree.nodes[end].stop, num_heads, value_dim) for i, end in enumerate(tree.ends)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    alone = attend_alone(tree, *leaves, counts, **options)
    total = sum(((out * grad).sum() for out, grad in zip(alone, grads, strict=True)), torch.zeros(()))
    expected = torch.autograd.grad(total, leaves)
    ours_leaves = [x.clone().requires_grad_() for x in inputs]
    out_THD = PackedTree(tree, "cpu", counts).attend(0, *ours_leaves, **cast(AttentionOptions, options))
    rows = torch.from_numpy(tree.token_rows)
    torch.testing.assert_close(out_THD[rows], torch.cat(alone), rtol=1e-6, atol=1e-6)
    grad_THD = torch.zeros_like(out_THD).index_add_(0, rows, torch.cat(grads))
    for ours, theirs in zip(torch.autograd.grad(out_THD, ours_leaves, grad_THD), expected, strict=True):
        # The plain reference computes its scores in float32.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@examples(60)
@given(SEQUENCES, st.integers(1, 3), st.integers(1, 3))
def test_attention_in_parts_is_that_of_each_sequence(sequences: list[list[int]], keys: int, repeat: int) -> None:
    check(make_tree(sequences), (keys * repeat, keys, 8, 8), scale=0.4)


@examples(60)
@given(SEQUENCES, st.integers(1, 9), st.booleans(), st.booleans(), st.booleans())
def test_windows_caps_and_sinks_are_those_of_each_sequence(
    sequences: list[list[int]], size: int, chunked: bool, capped: bool, sinks: bool
) -> None:
    options = {"window": Window(size, chunked), "softcap": 2.0 if capped else None, "sinks_H": random(5, 4).float()}
    check(make_tree(sequences), (4, 2, 8, 8), scale=0.4, **({**options} if sinks else {**options, "sinks_H": None}))


@examples(30)
@given(SEQUENCES)
def test_values_of_another_size_than_keys_are_supported(sequences: list[list[int]]) -> None:
    check(make_tree(sequences), (4, 4, 12, 6), scale=0.4)


def test_tokens_of_an_image_see_later_ones_of_it() -> None:
    sequences = [[1, 9, 9, 9, 2, 3], [1, 9, 9, 9, 4], [1, 9, 9, 9]]
    tree = make_tree(sequences)
    counts: list[I64 | None] = [np.array([1, 4, 4, 4, 5, 6][: len(sequence)]) for sequence in sequences]
    check(tree, (2, 2, 8, 8), counts, scale=0.4)


def test_a_window_that_no_sequence_exceeds_needs_no_unfolding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts do not depend on it; what is unfolded would read rows that `index_select` copies."""
    tree = make_tree([[1, 2, 3], [1, 2, 4]])
    monkeypatch.setattr(tree_attention.PackedTree, "_unfolded_rows", property(lambda self: pytest.fail("unfolded")))
    check(tree, (2, 1, 8, 8), scale=0.4, window=Window(3))
    with pytest.raises(pytest.fail.Exception, match="unfolded"):
        check(tree, (2, 1, 8, 8), scale=0.4, window=Window(2))


def test_another_tree_s_rows_that_are_not_finite_stay_there() -> None:
    tree = make_tree([[1, 2, 3], [1, 2, 4], [5, 6], [5, 7]])
    q, k, v = random(1, 7, 2, 8), random(2, 7, 2, 8), random(3, 7, 2, 8)
    clean = PackedTree(tree).attend(0, q, k, v, scale=0.3)
    rows = [row for index in (0, 1) for row in _rows(tree, index)]
    others = sorted(set(range(7)) - set(rows))
    for x in (q, k, v):
        x[rows] = float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = PackedTree(tree).attend(0, *leaves, scale=0.3)
    assert torch.equal(out[others], clean[others]) and out[rows].isnan().all()
    for grad in torch.autograd.grad(out, leaves, torch.ones_like(out)):
        assert grad[others].isfinite().all()


def _rows(tree: PrefixTree, sequence: int) -> list[int]:
    starts = np.cumsum([0, *tree.lengths])
    return [row for index in tree.path(sequence) for row in range(starts[index], starts[index + 1])]


class Accumulator:
    """A layer with a state: the sum of the rows so far, times a number for the sequence's first row."""

    layer = 0

    def __init__(self, is_whole: bool, factors: dict[int, float]) -> None:
        self.is_whole = is_whole
        self._factors = factors
        self.num_rows = 0

    def __call__(
        self, x_nLD: Tensor, starts: tuple[int, ...], state: MixerState | None = None, *, keep: bool = False
    ) -> tuple[Tensor, MixerState | None]:
        self.num_rows += x_nLD.shape[0] * x_nLD.shape[1]
        assert state is None or x_nLD.shape[1] > 1, "a single row would be decoded"
        sums = x_nLD.cumsum(1).tanh()
        before = None
        if state is not None:
            before = state.recurrent
            assert before is not None
            sums = (x_nLD.cumsum(1) + before[:, None]).tanh()
        end = x_nLD.sum(1) if before is None else before + x_nLD.sum(1)
        factors = torch.tensor([self._factors[start] for start in starts], dtype=x_nLD.dtype)
        return sums * factors[:, None, None], MixerState(None, end) if keep else None


def mix_alone(tree: PrefixTree, x_TD: Tensor, factor: float) -> list[Tensor]:
    outputs, first = [], 0
    rows = torch.from_numpy(tree.token_rows)
    for end in tree.ends:
        stop = first + tree.nodes[end].stop
        outputs.append(x_TD[rows[first:stop]].cumsum(0).tanh() * factor)
        first = stop
    return outputs


@examples(60)
@given(SEQUENCES, st.booleans(), st.integers(1, 4))
def test_a_state_continues_where_the_parent_ends(sequences: list[list[int]], is_whole: bool, min_rows: int) -> None:
    tree = make_tree(sequences, min_rows)
    x_TD = random(4, sum(tree.lengths), 3)
    mixer = Accumulator(is_whole, dict.fromkeys(range(len(x_TD)), 1.5))
    grads = [random(9 + i, tree.nodes[end].stop, 3) for i, end in enumerate(tree.ends)]
    leaf = x_TD.clone().requires_grad_()
    alone = mix_alone(tree, leaf, 1.5)
    total = sum(((out * grad).sum() for out, grad in zip(alone, grads, strict=True)), torch.zeros(()))
    (expected,) = torch.autograd.grad(total, leaf)
    ours = x_TD.clone().requires_grad_()
    out_TD = PackedTree(tree).mix(cast(Mixer, mixer), ours)
    rows = torch.from_numpy(tree.token_rows)
    torch.testing.assert_close(out_TD[rows], torch.cat(alone))
    grad_TD = torch.zeros_like(out_TD).index_add_(0, rows, torch.cat(grads))
    torch.testing.assert_close(torch.autograd.grad(out_TD, ours, grad_TD)[0], expected)


def test_shared_rows_go_through_a_layer_with_a_state_once() -> None:
    prompt = list(range(40))
    tree = make_tree([[*prompt, 50, 51], [*prompt, 60, 61], [*prompt, 70, 71]])
    for is_whole, num_rows in ((False, 40 + 3 * 2), (True, 3 * 42)):
        mixer = Accumulator(is_whole, dict.fromkeys(range(46), 1.0))
        PackedTree(tree).mix(cast(Mixer, mixer), random(1, 46, 2))
        assert mixer.num_rows == num_rows


def test_sequences_start_where_their_root_does_so_that_they_have_its_adapter() -> None:
    tree = make_tree([[1, 2, 3], [1, 2, 4], [5, 6]])
    for is_whole in (False, True):
        # Rows 0 to 3 are the first tree's.
        factors = dict.fromkeys(range(4), 2.0) | dict.fromkeys(range(4, 6), 3.0)
        out_TD = PackedTree(tree).mix(cast(Mixer, Accumulator(is_whole, factors)), torch.ones(6, 1))
        plain_TD = PackedTree(tree).mix(
            cast(Mixer, Accumulator(is_whole, dict.fromkeys(range(6), 1.0))), torch.ones(6, 1)
        )
        assert torch.equal(out_TD[:4], 2 * plain_TD[:4]) and torch.equal(out_TD[4:], 3 * plain_TD[4:])


def test_batches_of_states_never_pad_a_node_with_children() -> None:
    tree = make_tree([[0] * 5 + [1] * 3, [0] * 5 + [2], [0] * 5 + [3] * 20, [4] * 7])
    batches = list_state_batches(tree, torch.device("cpu"))
    assert [(batch.length, batch.has_children, batch.parents_n is None) for batch in batches] == [
        (5, True, True),
        (7, False, True),
        (3, False, False),
        (20, False, False),
    ]
    assert batches[2].rows_C.tolist() == [5, 6, 7, 8, 8, 8]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30))
def test_lengths_of_a_group_differ_by_a_quarter_at_most(lengths: list[int]) -> None:
    groups = group_by_length(range(len(lengths)), lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        sizes = [lengths[index] for index in group]
        assert max(sizes) - min(sizes) <= max(16, 0.25 * max(sizes))
    equal = group_by_length(range(len(lengths)), lengths, pads=False)
    assert len(equal) == len(set(lengths)) and all(len({lengths[index] for index in group}) == 1 for group in equal)


def test_parts_are_joined_as_one_softmax_in_bfloat16_too() -> None:
    """Twenty ancestors: outputs are added in float32, so that rounding does not grow with depth."""
    sequence = list(range(160))
    tree = make_tree([sequence[: 8 * turn] for turn in range(1, 21)])
    q, k, v = (random(seed, 160, 2, 16) for seed in (1, 2, 3))
    exact = PackedTree(tree).attend(0, q, k, v, scale=0.25)
    ours = PackedTree(tree).attend(0, q.bfloat16(), k.bfloat16(), v.bfloat16(), scale=0.25)
    once = PrefixTree.separate([160])
    plain = PackedTree(once).attend(0, q.bfloat16(), k.bfloat16(), v.bfloat16(), scale=0.25)
    assert (ours.double() - exact).norm() <= 1.5 * (plain.double() - exact).norm()


def use_host_for_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let FlashAttention's operators compute on the host; returns the list of calls."""
    calls: list[str] = []
    host, aten = attention_parts.HostKernel, torch.ops.aten

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float, is_causal: bool, debug: bool, *, scale: float) -> tuple:
        calls.append(f"forward {is_causal}")
        out, log_sum = host.forward(*(x.transpose(1, 2) for x in (q, k, v)), scale, is_causal=is_causal)
        assert dropout == 0.0 and not debug
        padding = torch.full((*log_sum.shape[:1], log_sum.shape[2], 3), float("nan"), dtype=log_sum.dtype)
        return (
            out.transpose(1, 2),
            torch.cat([log_sum.transpose(1, 2), padding], -1),
            None,
            None,
            0,
            0,
            None,
            None,
            None,
        )

    def differentiate(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, *more: object, scale: float
    ) -> tuple[Tensor, ...]:
        calls.append(f"backward {more[5]}")
        assert log_sum.is_contiguous() and more[:4] == (None, None, q.shape[2], k.shape[2]) and more[4] == 0.0
        rows = [x.transpose(1, 2) for x in (q, k, v, out, log_sum, grad)]
        return tuple(x.transpose(1, 2) for x in host.backward(*rows, scale, is_causal=cast(bool, more[5])))

    class Operator:
        def __init__(self, default: Callable[..., object]) -> None:
            self.default = default

    class Operators:
        _scaled_dot_product_flash_attention_for_cpu = aten._scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_flash_attention_for_cpu_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_flash_attention = Operator(attend)
        _scaled_dot_product_flash_attention_backward = Operator(differentiate)

    monkeypatch.setattr(attention_parts, "aten", Operators)
    return calls


def test_flash_attention_s_operators_get_what_the_host_s_get(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = random(1, 1, 6, 4, 8), random(2, 1, 5, 2, 8), random(3, 1, 5, 2, 8)
    calls = use_host_for_cuda(monkeypatch)
    results = []
    for kernel in (attention_parts.HostKernel, attention_parts.CudaKernel):
        rows = kernel.forward(q, k, v, 0.3, is_causal=False)
        results.append([*rows, *kernel.backward(q, k, v, *rows, torch.ones_like(q), 0.3, is_causal=False)])
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)
    assert calls == ["forward False", "backward False"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_differs_or_fails_is_not_used(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    check_parts, heads, cpu = tree_attention.check_parts.__wrapped__, (4, 2, 16), torch.device("cpu")
    assert check_parts(cpu, dtype, heads)
    with monkeypatch.context() as patch:
        patch.setattr(tree_attention, "join_", lambda out, log_sum, part, part_log_sum: None)
        assert not check_parts(cpu, dtype, heads), "the children do not see their parent"
    host = attention_parts.HostKernel

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(host, "backward", fail)
    assert not check_parts(cpu, dtype, heads)
