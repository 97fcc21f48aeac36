"""Torch's fused attention kernel equals attention in plain arithmetic, for prefill and decode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.properties import examples
from support.tolerances import rounding
from tinsmith.backends.torch.attention import (
    BMM_MAX_LENGTH,
    BMM_MIN_ROWS,
    SAVED_MAX_LENGTH,
    AttentionOptions,
    PackedCausal,
    Window,
    causal_mask,
    decode,
    prefill,
    reference_attention,
)

WINDOW = st.builds(Window, st.integers(1, 12), st.booleans())
WINDOWS = st.none() | WINDOW
SIZES = {"keys": st.integers(1, 3), "repeat": st.integers(1, 3), "seed": st.integers(0, 99)}


def rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@examples(40)
@given(num=st.integers(1, 3), length=st.integers(1, 20), window=WINDOWS, **SIZES)
def test_prefill_is_the_reference_and_so_are_its_gradients(
    num: int,
    length: int,
    window: Window | None,
    keys: int,
    repeat: int,
    seed: int,
    dtype: torch.dtype,
) -> None:
    # Sums of bfloat16 are float32 inside, and are rounded once.
    exact = dtype == torch.float32
    tolerance = rounding(dtype, sums=4 if exact else 1, length=20 if exact else 1)
    shapes = [(num, heads, length, 8) for heads in (keys * repeat, keys, keys, keys * repeat)]
    *given_rows, grad = (rows(seed + i, *shape).to(dtype) for i, shape in enumerate(shapes))
    mask = None if window is None else causal_mask(length, window, grad)
    options: AttentionOptions = {"scale": 0.3}
    results = []
    for attend in (prefill, reference_attention):
        leaves = [x.clone().requires_grad_() for x in given_rows]
        out = attend(*leaves, mask, **options)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("num", "length"), [(1, BMM_MIN_ROWS), (5, 27), (128, 1), (2, SAVED_MAX_LENGTH), (1, BMM_MAX_LENGTH)]
)
@pytest.mark.parametrize("value_dim", [16, 24])
def test_short_bfloat16_sequences_are_as_exact_as_the_reference(num: int, length: int, value_dim: int) -> None:
    """Plain products, values and gradients, beside float64; each sequence alone, so that none reads its neighbours."""
    dims = {4: 16, 2: 16, 1: value_dim}
    given_rows = [rows(heads, num, max(heads, 2), length, dim).bfloat16() for heads, dim in dims.items()]
    grad = rows(9, num, 4, length, value_dim).bfloat16()

    def differentiate(attend: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in given_rows]
        out = attend(*leaves, None, scale=0.25)
        assert ("BmmCausal" in str(out.grad_fn)) == (attend is prefill)
        return [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]

    ours, plain = differentiate(prefill, torch.bfloat16), differentiate(reference_attention, torch.bfloat16)
    for actual, other, exact in zip(ours, plain, differentiate(reference_in_float64, torch.float64), strict=True):
        assert (actual - exact).norm() <= 2 * (other - exact).norm() + 1e-2 * exact.norm()
    given_rows[1][0] = float("nan")
    for actual, other in zip(differentiate(prefill, torch.bfloat16), ours, strict=True):
        assert torch.equal(actual[1:], other[1:])


def reference_in_float64(
    q_nHLD: torch.Tensor, k_nGLD: torch.Tensor, v_nGLD: torch.Tensor, mask: None, scale: float
) -> torch.Tensor:
    k_nHLD, v_nHLD = (x.repeat_interleave(2, 1) for x in (k_nGLD, v_nGLD))
    hidden_LL = torch.ones(q_nHLD.shape[2], q_nHLD.shape[2]).triu(1).bool()
    scores_nHLL = (q_nHLD @ k_nHLD.mT * scale).masked_fill(hidden_LL, float("-inf"))
    return torch.softmax(scores_nHLL, -1) @ v_nHLD


@pytest.mark.parametrize("extra", [{}, {"softcap": 5.0}, {"sinks_H": rows(7, 4)}], ids=["plain", "softcap", "sinks"])
@examples(40)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4), window=WINDOW, seed=st.integers(0, 99))
def test_windows_in_blocks_are_the_reference_and_so_are_their_gradients(
    extra: AttentionOptions, lengths: list[int], window: Window, seed: int
) -> None:
    total = sum(lengths)
    q, k, v = (rows(seed + i, total, heads, 8).requires_grad_() for i, heads in enumerate((4, 2, 2)))
    options: AttentionOptions = {"scale": 0.3, "window": window, **extra}
    actual = PackedCausal(lengths).attend(0, q, k, v, **options)
    parts = zip(*(x.transpose(0, 1)[None].split(lengths, 2) for x in (q, k, v)), strict=True)
    expected = torch.cat(
        [
            reference_attention(own_q, own_k, own_v, causal_mask(own_q.shape[2], window, q), **options)[0].transpose(
                0, 1
            )
            for own_q, own_k, own_v in parts
        ]
    )
    grad = rows(seed + 3, *expected.shape)
    for ours, theirs in zip(
        (actual, *torch.autograd.grad(actual, (q, k, v), grad)),
        (expected, *torch.autograd.grad(expected, (q, k, v), grad)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@examples(40)
@given(num=st.integers(1, 4), length=st.integers(1, 40), window=WINDOWS, **SIZES)
def test_decode_is_the_reference(
    num: int, length: int, window: Window | None, keys: int, repeat: int, seed: int
) -> None:
    q, k, v = (
        rows(seed, num, keys * repeat, 8),
        rows(seed + 1, num, keys, length, 8),
        rows(seed + 2, num, keys, length, 8),
    )
    mask = causal_mask(length, window, q)[-1].expand(num, 1, 1, length)
    expected = reference_attention(q[:, :, None], k, v, mask, scale=0.3)[:, :, 0]
    torch.testing.assert_close(decode(q, k, v, mask, scale=0.3), expected, rtol=1e-5, atol=1e-5)
