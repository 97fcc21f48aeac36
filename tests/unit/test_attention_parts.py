"""Attention with sinks by kernels that know none, against plain arithmetic in float64, with every gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.properties import examples
from tinsmith.backends.torch import attention_parts
from tinsmith.backends.torch.attention import PackedCausal, Window, check_sinks
from tinsmith.backends.torch.attention_parts import HostKernel, attend_with_sinks

torch.set_num_threads(1)

HEADS = (4, 2, 16)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor, *before: Tensor) -> Tensor:
    """Each row by itself: [n, L, H, D] of rows, and of the keys and values that come before them."""
    length, num_shared = q.shape[1], q.shape[2] // k.shape[2]
    outputs = []
    for row in range(length):
        keys, values = k[:, : row + 1], v[:, : row + 1]
        if before:
            keys, values = (
                torch.cat([before[0][:, row + 1 :], keys], 1),
                torch.cat([before[1][:, row + 1 :], values], 1),
            )
        keys, values = keys.repeat_interleave(num_shared, 2), values.repeat_interleave(num_shared, 2)
        scores = torch.einsum("nhd,nkhd->nhk", q[:, row], keys) * 0.4
        sinks = sinks_H[None, :, None].expand(*scores.shape[:2], 1)
        probs = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
        outputs.append(torch.einsum("nhk,nkhd->nhd", probs, values))
    return torch.stack(outputs, 1)


@examples(30)
@given(
    num=st.integers(1, 3),
    length=st.integers(1, 9),
    keys=st.integers(1, 2),
    repeat=st.integers(1, 3),
    has_before=st.booleans(),
    sink=st.sampled_from([-30.0, 0.0, 30.0]),
)
def test_sinks_take_their_share_of_the_softmax(
    num: int, length: int, keys: int, repeat: int, has_before: bool, sink: float
) -> None:
    shape = num, length, keys, 8
    inputs = [random(1, num, length, keys * repeat, 8), random(2, *shape), random(3, *shape)]
    inputs.append(random(4, keys * repeat) + sink)
    inputs += [random(5, *shape), random(6, *shape)] if has_before else []
    grad = random(7, num, length, keys * repeat, 8)
    leaves, plain_leaves = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    before = (leaves[4], leaves[5]) if has_before else None
    out = attend_with_sinks(leaves[0], leaves[1], leaves[2], leaves[3], 0.4, before)
    expected = attend_plainly(plain_leaves[0], *plain_leaves[1:])
    torch.testing.assert_close(out, expected)
    gradients = torch.autograd.grad(out, leaves, grad)
    expected_gradients = torch.autograd.grad(expected, plain_leaves, grad, allow_unused=True)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        # With one row, the rows before are not seen.
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs)


def test_no_scores_are_stored() -> None:
    """Saved tensors grow with the rows, not with their square, whether a window bounds them or not."""
    for window in (None, Window(32)):
        sizes: list[int] = []
        q, k, v = (random(seed, 256, 2, 8).float().requires_grad_() for seed in (1, 2, 3))
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            PackedCausal([256]).attend(0, q, k, v, scale=0.3, window=window, sinks_H=torch.zeros(2))
        assert sizes and max(sizes) <= q.numel() and sum(sizes) < 256 * 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_differs_or_fails_is_not_used(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    check, cpu = check_sinks.__wrapped__, torch.device("cpu")
    assert check(cpu, dtype, HEADS)
    for name in ("add_sinks_", "join_"):
        with monkeypatch.context() as patch:
            patch.setattr(attention_parts, name, lambda *inputs: None)
            assert not check(cpu, dtype, HEADS), name

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(HostKernel, "backward", fail)
    assert not check(cpu, dtype, HEADS)
