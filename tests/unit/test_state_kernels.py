"""Steps of one row on states in slots, in Triton, against float64: in Triton's interpreter, and on the device that
TEST_DEVICE names.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpu.device import DEVICE, NAMED, ON_CUDA

if not (NAMED and ON_CUDA):
    from support import interpreted  # noqa: F401 - before the kernels

from tinsmith.backends.torch import state_kernels
from tinsmith.backends.torch.state_steps import StateSlots

WHERE = DEVICE if NAMED else "cpu"
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
READ, WRITE = [3, 5, 0, 3, 1], [2, 6, 0, 4, 7]
"""Two rows continue one state; the third is padding."""
PADDING = 2


def slots(store_S: Tensor) -> StateSlots:
    read_n, write_n = (torch.tensor([[*READ], [*WRITE]], device=WHERE)[i] for i in range(2))
    return StateSlots(store_S, read_n, write_n, state_kernels)


def randn(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(WHERE, dtype)


def check_slots(store_S: Tensor, before_S: Tensor, expected_nS: Tensor, tolerance: float) -> None:
    """Row i's state is in its slot, and no other slot has changed."""
    for row, slot in enumerate(WRITE):
        if row != PADDING:
            torch.testing.assert_close(store_S[slot].double().cpu(), expected_nS[row], atol=tolerance, rtol=tolerance)
    others = [slot for slot in range(len(store_S)) if slot not in WRITE or slot == 0]
    torch.testing.assert_close(store_S[others], before_S[others], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("channels", "taps", "length", "activation", "bias"),
    [(300, 4, 4, "silu", False), (256, 3, 3, None, True), (5, 4, 3, "swish", True), (1, 2, 5, "silu", False)],
)
def test_a_convolution_continues_each_state(
    channels: int, taps: int, length: int, activation: str | None, bias: bool, dtype: torch.dtype
) -> None:
    store_SCL = randn(8, channels, length, dtype=dtype)
    store_SCL[0] = torch.nan  # padding
    rows_nC, weight_CW = randn(len(READ), 2 * channels, dtype=dtype), randn(channels, taps, dtype=dtype)
    bias_C = randn(channels, dtype=dtype) if bias else None
    x_nC1, before = rows_nC[:, channels:, None], store_SCL.clone()
    actual = state_kernels.step_convolution(x_nC1, slots(store_SCL), weight_CW, bias_C, activation)
    assert actual.dtype == dtype and actual.shape == (len(READ), channels, 1)
    assert not actual[PADDING].any()
    window = torch.cat([before[READ], x_nC1], -1).double().cpu()
    expected = (window[..., -taps:] * weight_CW.double().cpu()).sum(-1)
    expected = expected if bias_C is None else expected + bias_C.double().cpu()
    expected = expected if activation is None else nn.functional.silu(expected)
    real = [row for row in range(len(READ)) if row != PADDING]
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual[real, :, 0].double().cpu(), expected[real], atol=tolerance, rtol=tolerance)
    check_slots(store_SCL, before, window[..., -length:], 0.0)


def delta_rule(store_nHKV: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The state after one row, and the row's result, in float64."""
    repeat = v.shape[1] // k.shape[1]
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(repeat, 1) for x in (q, k))
    state = store_nHKV * g.exp()[..., None, None]
    error = (v - torch.einsum("nhkv,nhk->nhv", state, k)) * beta[..., None]
    state = state + torch.einsum("nhk,nhv->nhkv", k, error)
    return state, torch.einsum("nhkv,nhk->nhv", state, q) / q.shape[-1] ** 0.5


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("groups", "heads", "key_dim", "value_dim"), [(2, 4, 128, 128), (1, 3, 20, 24), (2, 2, 8, 40), (1, 1, 1, 1)]
)
def test_a_delta_rule_continues_each_state(
    groups: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    num = len(READ)
    store = randn(8, heads, key_dim, value_dim)
    store[0] = torch.nan  # padding
    before = store.clone()
    rows = randn(num, 1, 2 * groups * key_dim + heads * value_dim, dtype=dtype)
    parts = rows.split([groups * key_dim, groups * key_dim, heads * value_dim], -1)
    q, k, v = (x.view(num, 1, -1, dim) for x, dim in zip(parts, (key_dim, key_dim, value_dim), strict=True))
    gates = randn(num, 1, 2 * heads)
    g, beta = -gates[..., :heads].abs(), gates[..., heads:].sigmoid().to(dtype)
    actual, state = state_kernels.step_gated_delta(
        q, k, v, g=g, beta=beta, initial_state=slots(store), output_final_state=True, use_qk_l2norm_in_kernel=True,
        cu_seqlens=None,
    )  # fmt: skip
    assert isinstance(state, StateSlots) and actual.dtype == dtype and actual.shape == v.shape
    assert not actual[PADDING].any()
    rows_64 = (x[:, 0].double().cpu() for x in (q, k, v, g, beta))
    expected_state, expected = delta_rule(before[READ].double().cpu(), *rows_64)
    real, tolerance = [row for row in range(num) if row != PADDING], TOLERANCES[dtype]
    torch.testing.assert_close(actual[real, 0].double().cpu(), expected[real], atol=tolerance, rtol=tolerance)
    check_slots(store, before, expected_state, 1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
def test_a_nan_in_a_state_stays_with_the_rows_that_continue_it() -> None:
    """Also one that leaves a convolution's state with the row reaches nothing."""
    clean_conv, clean_delta = randn(8, 40, 4), randn(8, 2, 16, 16)
    conv, delta = clean_conv.clone(), clean_delta.clone()
    conv[5, :, 2], conv[1, :, 0], delta[5, 1, 3, 3] = torch.nan, torch.inf, torch.nan
    x, weight = randn(5, 40, 1), randn(40, 4)
    q, gate = randn(5, 1, 2, 16), -randn(5, 1, 2).abs()
    outputs = []
    for conv_store, delta_store in ((clean_conv, clean_delta), (conv, delta)):
        y = state_kernels.step_convolution(x, slots(conv_store), weight, None, "silu")[..., 0]
        out, _ = state_kernels.step_gated_delta(q, q, q, gate, gate.exp(), slots(delta_store))
        outputs.append((y, out[:, 0]))
    (y, out), (poisoned_y, poisoned_out) = outputs
    assert poisoned_y[1].isnan().all() and torch.equal(poisoned_y[[0, 2, 3, 4]], y[[0, 2, 3, 4]])
    assert poisoned_out[1, 1].isnan().any() and torch.equal(poisoned_out[1, 0], out[1, 0])
    assert torch.equal(poisoned_out[[0, 2, 3, 4]], out[[0, 2, 3, 4]])
    others = [2, 4, 7]
    assert torch.equal(conv[others], clean_conv[others]) and torch.equal(delta[others], clean_delta[others])
    assert delta[6, 1].isnan().any() and not delta[6, 0].isnan().any()
