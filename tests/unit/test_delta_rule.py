"""The chunked gated delta rule against the rule itself, row by row in float64, in values, states and every gradient."""

from __future__ import annotations

from typing import NamedTuple, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import softplus
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next

from support.properties import examples
from tinsmith.backends.torch import delta_rule
from tinsmith.backends.torch.delta_rule import CHUNK, L2_EPS, equals_gated_delta, run_gated_delta

torch.set_num_threads(1)


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor

    def leaves(self) -> list[Tensor]:
        return [x.detach().clone().requires_grad_() for x in self]


class Sizes(NamedTuple):
    """`num` sequences of `length` rows, of `groups` key heads with `shared` value heads each."""

    num: int
    length: int
    groups: int = 1
    shared: int = 1
    key_dim: int = 4
    value_dim: int = 4
    has_channel_gates: bool = False

    def draw(self, seed: int, *, key_scale: float = 1.0) -> Inputs:
        generator, heads = torch.Generator().manual_seed(seed), self.groups * self.shared

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        rows = self.num, self.length
        gate_shape = (*rows, heads, self.key_dim) if self.has_channel_gates else (*rows, heads)
        return Inputs(
            random(*rows, self.groups, self.key_dim),
            random(*rows, self.groups, self.key_dim) * key_scale,
            random(*rows, heads, self.value_dim),
            -softplus(random(*gate_shape)),
            random(*rows, heads).sigmoid(),
            random(self.num, heads, self.key_dim, self.value_dim),
        )


def run_row_by_row(inputs: list[Tensor], *, normalises: bool) -> tuple[Tensor, Tensor]:
    query, key, value, g, beta, state = inputs
    if normalises:
        query, key = (x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() for x in (query, key))
    num_shared = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(num_shared, 2) for x in (query * query.shape[-1] ** -0.5, key))
    outputs = []
    for row in range(value.shape[1]):
        state = state * (g[:, row, :, None, None] if g.ndim == 3 else g[:, row, :, :, None]).exp()
        read = torch.einsum("nhk,nhkv->nhv", key[:, row], state)
        change = (value[:, row] - read) * beta[:, row, :, None]
        state = state + key[:, row, :, :, None] * change[:, :, None]
        outputs.append(torch.einsum("nhk,nhkv->nhv", query[:, row], state))
    return torch.stack(outputs, 1), state


def results_and_gradients(results: tuple[Tensor, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in results]
    return [*results, *torch.autograd.grad(results, leaves, grads)]


def assert_equals_row_by_row(inputs: Inputs, *, normalises: bool, error: float = 1e-11) -> None:
    leaves, reference_leaves = inputs.leaves(), inputs.leaves()
    results = run_gated_delta(*leaves, output_final_state=True, use_qk_l2norm_in_kernel=normalises)
    actual = results_and_gradients(cast(tuple[Tensor, Tensor], results), leaves)
    expected = results_and_gradients(run_row_by_row(reference_leaves, normalises=normalises), reference_leaves)
    for x, y in zip(actual, expected, strict=True):
        assert x.shape == y.shape
        x, y = x.detach(), y.detach()
        assert float((x - y).norm()) <= error * max(float(y.norm()), 1.0)


@examples(40)
@given(
    st.builds(
        Sizes,
        num=st.integers(1, 3),
        length=st.sampled_from([1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK]),
        groups=st.integers(1, 2),
        shared=st.integers(1, 3),
        key_dim=st.sampled_from([1, 4, 16]),
        value_dim=st.sampled_from([1, 4, 8]),
        has_channel_gates=st.booleans(),
    ),
    st.booleans(),
    st.integers(0, 99),
)
def test_chunks_equal_rows_taken_one_by_one(sizes: Sizes, normalises: bool, seed: int) -> None:
    assert_equals_row_by_row(sizes.draw(seed, key_scale=1.0 if normalises else 0.3), normalises=normalises)


@pytest.mark.parametrize("has_channel_gates", [False, True])
@pytest.mark.parametrize("cells", [1, 3 * CHUNK, 2 * 2 * 2 * CHUNK])
def test_heads_computed_a_few_at_a_time_give_the_same(
    monkeypatch: pytest.MonkeyPatch, cells: int, has_channel_gates: bool
) -> None:
    monkeypatch.setattr(delta_rule, "MAX_CELLS", cells)
    sizes = Sizes(3, CHUNK + 3, 3, 2, has_channel_gates=has_channel_gates)
    assert_equals_row_by_row(sizes.draw(1), normalises=True)


@pytest.mark.parametrize("has_channel_gates", [False, True])
@pytest.mark.parametrize(("gate", "strength"), [(0.0, 1.0), (-60.0, 1.0), (0.0, 0.0), (-1e-6, 2.0)])
def test_rows_with_the_same_key_stay_exact(gate: float, strength: float, has_channel_gates: bool) -> None:
    """Equal keys that nothing forgets make the system of a chunk as badly conditioned as it can be: an inverse by a
    series of powers would lose every digit.
    """
    inputs = Sizes(1, 2 * CHUNK + 5, 1, 2, has_channel_gates=has_channel_gates).draw(2)
    same = inputs._replace(
        key=inputs.key[:, :1].expand_as(inputs.key),
        g=torch.full_like(inputs.g, gate),
        beta=torch.full_like(inputs.beta, strength),
    )
    assert_equals_row_by_row(same, normalises=True, error=1e-9)
    actual = run_gated_delta(*(x.float() for x in same), use_qk_l2norm_in_kernel=True)[0]
    expected = run_row_by_row(list(same), normalises=True)[0]
    assert float((actual.double() - expected).norm()) <= 1e-4 * float(expected.norm())


def test_the_state_alone_has_a_gradient() -> None:
    inputs = Sizes(1, CHUNK + 2, 1, 2).draw(6)
    leaves, reference_leaves = inputs.leaves(), inputs.leaves()
    state = run_gated_delta(*leaves, output_final_state=True)[1]
    expected = run_row_by_row(reference_leaves, normalises=False)[1]
    assert state is not None
    actual_grads = torch.autograd.grad(state.square().sum(), leaves)
    for actual, reference in zip(
        actual_grads, torch.autograd.grad(expected.square().sum(), reference_leaves, allow_unused=True), strict=True
    ):
        torch.testing.assert_close(actual, torch.zeros_like(actual) if reference is None else reference)


def test_inputs_stay_as_they_are_and_bfloat16_is_summed_in_float32() -> None:
    inputs = Inputs(*(x.bfloat16() for x in Sizes(2, CHUNK, 2, 2).draw(3)))
    copies = [x.clone() for x in inputs]
    leaves = inputs.leaves()
    out, state = run_gated_delta(*leaves, output_final_state=True, use_qk_l2norm_in_kernel=True)
    torch.autograd.grad(out.float().sum(), leaves[:-1])
    assert all(torch.equal(x, copy) for x, copy in zip((*inputs, *leaves), copies * 2, strict=True))
    assert state is not None and (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    expected = run_row_by_row([x.double() for x in inputs], normalises=True)
    assert float((state.detach().double() - expected[1]).norm()) <= 1e-5 * float(expected[1].norm())


def test_backward_saves_only_the_inputs() -> None:
    saved_sizes: list[int] = []
    leaves = Sizes(1, 8 * CHUNK, 2, 2).draw(4).leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved_sizes.append(x.numel()) or x, lambda x: x):
        run_gated_delta(*leaves, use_qk_l2norm_in_kernel=True)
    assert saved_sizes and sum(saved_sizes) <= sum(x.numel() for x in leaves)


def test_packed_rows_are_refused() -> None:
    inputs = Sizes(1, 4).draw(0)
    with pytest.raises(ValueError, match="rows of a batch"):
        run_gated_delta(*inputs, cu_seqlens=torch.tensor([0, 2, 4]))


def test_a_function_that_computes_something_else_is_recognised() -> None:
    for plain in (modeling_qwen3_next.torch_chunk_gated_delta_rule, modeling_kimi_linear.chunk_kimi_delta_attention):
        assert equals_gated_delta(getattr(plain, "__wrapped__", plain))

    def without_gate(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: object) -> object:
        return run_gated_delta(query, key, value, torch.zeros_like(g), beta, **options)  # pyright: ignore

    assert not equals_gated_delta(without_gate)
    assert not equals_gated_delta(lambda query, key: None)  # pyright: ignore
