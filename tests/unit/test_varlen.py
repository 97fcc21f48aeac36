"""Packed attention in one kernel: asked for as its documentation says, and only where its contract holds.

There is no such kernel for a CPU, so what stands in for it here is its documentation, written down as a loop; on a GPU
tests/gpu asks the kernel itself.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import structlog
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.properties import examples
from tinsmith.backends.torch import varlen
from tinsmith.backends.torch.attention import PackedCausal
from tinsmith.backends.torch.varlen import Ends, is_right_on, suits

CPU = torch.device("cpu")


def documented(  # noqa: PLR0913 - as the kernel has them
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` for sequences that attend to themselves."""
    for ends in (cu_seq_q, cu_seq_k):
        assert ends.dtype == torch.int32 and ends[0] == 0 and ends[-1] == len(query)
        assert int(ends.diff().max()) == max_q == max_k
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    heads, groups = query.shape[1], key.shape[1]
    assert enable_gqa or heads == groups, "the same number of heads"
    left, right = window_size
    parts = []
    for start, stop in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (x[start:stop].transpose(0, 1).double() for x in (query, key, value))
        k, v = (x.repeat_interleave(heads // groups, 0) for x in (k, v))
        back = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        visible = torch.ones_like(back, dtype=torch.bool)
        if right >= 0:
            visible &= -back <= right
        if left >= 0:
            visible &= back <= left
        scores = q @ k.mT * (query.shape[2] ** -0.5 if scale is None else scale)
        parts.append((scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v).transpose(0, 1).to(query.dtype))
    return torch.cat(parts)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel's documentation in its place; how many rows each call had."""
    calls: list[int] = []

    def counting(*args: Tensor, **kwargs: object) -> Tensor:
        calls.append(len(args[0]))
        return documented(*args, **kwargs)  # pyright: ignore[reportArgumentType, reportCallIssue]

    monkeypatch.setattr(varlen, "torch_varlen", SimpleNamespace(varlen_attn=counting))
    monkeypatch.setattr(varlen, "_is_fit", lambda device: True)
    return calls


def both_ways(lengths: list[int], window: int | None, seed: int) -> list[Tensor]:
    """Attention and the gradients of queries, keys and values."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    q, k, v, grad = (torch.randn(total, heads, 8, generator=generator).bfloat16() for heads in (4, 2, 2, 4))
    turned = torch.cat([q, k], 1)  # as layers have them: halves of one tensor
    leaves = [turned.requires_grad_(), v.requires_grad_()]
    out = PackedCausal(lengths).attend(0, turned[:, :4], turned[:, 4:], v, scale=0.3, window=window)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@examples(15)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    window=st.sampled_from([None, 1, 3, 30]),
    seed=st.integers(0, 999),
)
def test_one_kernel_is_asked_for_what_padded_batches_compute(lengths: list[int], window: int | None, seed: int) -> None:
    expected = both_ways(lengths, window, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "torch_varlen", SimpleNamespace(varlen_attn=documented))
        patch.setattr(varlen, "_is_fit", lambda device: True)
        found = both_ways(lengths, window, seed)
    size = float(expected[0].float().norm())  # a gradient may be nothing but rounding
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).float().norm()) < 0.02 * (float(theirs.float().norm()) + size)


def test_what_the_kernel_cannot_take_goes_the_other_way(stand_in: list[int]) -> None:
    q, k = torch.randn(6, 4, 8).bfloat16(), torch.randn(6, 2, 8).bfloat16()
    assert suits(q, k, k, None, None)
    assert not suits(q.float(), k.float(), k.float(), None, None), "float32"
    assert not suits(q, k, k, 5.0, None), "capped scores"
    assert not suits(q, k, k, None, torch.zeros(4)), "sinks"
    assert not suits(q, k, k[..., :4], None, None), "values of another size"
    assert not suits(q[..., :6], k[..., :6], k[..., :6], None, None), "a head of 12 bytes"
    wide = torch.zeros(6, 2, 264, dtype=torch.bfloat16)
    assert not suits(wide, wide, wide, None, None), "a head that is too large"
    PackedCausal([4, 2]).attend(0, q, k, k, scale=1.0)
    PackedCausal([4, 2]).attend(0, q, k, k, scale=1.0, softcap=2.0)
    PackedCausal([4, 2]).attend(0, q.float(), k.float(), k.float(), scale=1.0)
    assert stand_in == [6]


def test_without_the_kernel_or_a_gpu_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(6, 4, 8).bfloat16()
    assert not suits(q, q, q, None, None), "a CPU"
    monkeypatch.setattr(varlen, "_is_fit", lambda device: True)
    monkeypatch.setattr(varlen, "torch_varlen", None)
    assert not suits(q, q, q, None, None), "an older torch"


@pytest.mark.parametrize("mistake", ["none", "mixes", "no window", "refuses", "an older signature"])
def test_a_kernel_is_tried_before_it_is_used(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *rest: object, **options: object) -> Tensor:
        if mistake == "mixes":
            whole = torch.tensor([0, len(q)], dtype=torch.int32)
            return documented(q, k, v, whole, whole, len(q), len(q), **options)  # pyright: ignore[reportArgumentType]
        if mistake == "no window":
            options["window_size"] = (-1, 0)
        if mistake == "refuses":
            raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
        if mistake == "an older signature":
            raise TypeError("varlen_attn() got an unexpected keyword argument 'window_size'")
        return documented(q, k, v, ends, *rest, **options)  # pyright: ignore[reportArgumentType, reportCallIssue]

    monkeypatch.setattr(varlen, "torch_varlen", SimpleNamespace(varlen_attn=kernel))
    with structlog.testing.capture_logs() as logs:
        assert is_right_on(CPU) == (mistake == "none")
    assert bool(logs) == (mistake != "none")


def test_ends_are_made_once_for_a_device() -> None:
    ends = Ends([3, 1, 4])
    assert ends.on(CPU).tolist() == [0, 3, 4, 8] and ends.longest == 4
    assert ends.on(CPU) is ends.on(CPU)


@pytest.mark.skipif(varlen.torch_varlen is None, reason="this torch has no variable-length attention")
def test_the_installed_kernel_has_the_names_that_it_is_called_by() -> None:
    import inspect

    assert varlen.torch_varlen is not None
    named = inspect.signature(varlen.torch_varlen.varlen_attn).parameters
    assert {"scale", "window_size", "enable_gqa"} <= named.keys()
    assert list(named)[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
