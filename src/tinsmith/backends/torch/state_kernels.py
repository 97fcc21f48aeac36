"""Steps of one row of a causal convolution and of a gated delta rule on states in slots, in Triton: decoding on a GPU.

Each replaces a function of transformers' modeling files, takes its arguments by its names, and takes `StateSlots` where
that function takes a state. A state is read from one slot, and written to another, once. A program computes channels,
or columns of one head's state, of one row: no other row's values reach it. A launch depends on shapes alone, never
waits, and can be captured in a CUDA graph. Sums are in float32 and in a fixed order.

Rows that write slot 0 are padding: they read no state and write none, and their result is 0. No row writes a slot that
any row reads, except for slot 0.

Imported only where there is a CUDA device, since installations for CPUs lack Triton. The functions that they replace
are the reference.

Letters: n sequences with one row each, S slots, C channels, L inputs in a convolution's state, W taps of a convolution,
G key heads, H value heads, K key dim, V value dim.
"""

# What launches a kernel is typed as the kernel itself.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.backends.torch.state_steps import ACTIVATIONS, StateSlots

CHANNELS = 256
"""Channels of a program of the convolution."""

TILE = 4096
"""Elements of a state that a program of the delta rule holds in registers: 32 for each of its 128 threads."""

L2_EPS = tl.constexpr(1e-6)
"""As transformers normalises queries and keys."""


def step_convolution(
    hidden_states: Tensor,
    conv_state: StateSlots,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """[n, C, 1] of inputs [n, C, 1] and weights [C, W], as `causal_conv1d_update` computes them. The state holds the
    last L >= W - 1 inputs.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"the convolution's activation is {activation!r}; the kernel has {ACTIVATIONS[1:]}")
    num, channels, _ = hidden_states.shape
    store_SCL, (_, taps), length = conv_state.store_S, weight.shape, conv_state.store_S.shape[-1]
    assert store_SCL.shape[1:] == (channels, length) and store_SCL.is_contiguous() and length >= taps - 1
    out_nC = hidden_states.new_empty(num, channels)
    with torch.cuda.device_of(hidden_states):  # Triton launches on this thread's current device
        _convolve[(num, triton.cdiv(channels, CHANNELS))](
            hidden_states, store_SCL, conv_state.read_n, conv_state.write_n, weight, bias, out_nC,
            *hidden_states.stride()[:2], *weight.stride(), channels, L=length, W=taps,
            L_PAD=_round_to_power(length), CHANNELS=CHANNELS, SILU=activation is not None, num_warps=4,
        )  # fmt: skip
    return out_nC[..., None]


def step_gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: StateSlots,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **options: object,
) -> tuple[Tensor, StateSlots]:
    """[n, 1, H, V] of queries and keys [n, 1, G, K], values [n, 1, H, V], and gates and strengths [n, 1, H], as
    `torch_recurrent_gated_delta_rule` computes them; and the slots, in place of the new state [n, H, K, V].
    """
    num, _, num_heads, value_dim = value.shape
    num_groups, key_dim = key.shape[2:]
    store_SHKV = initial_state.store_S
    assert store_SHKV.shape[1:] == (num_heads, key_dim, value_dim) and store_SHKV.is_contiguous()
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    out_nHV = query.new_empty(num, 1, num_heads, value_dim)
    key_pad = _round_to_power(key_dim)
    block = min(max(TILE // key_pad, 1), _round_to_power(value_dim))
    with torch.cuda.device_of(query):
        _apply_delta[(triton.cdiv(value_dim, block), num_heads, num)](
            query, key, value, g, beta, store_SHKV, initial_state.read_n, initial_state.write_n, out_nHV,
            key_dim**-0.5, *(stride for x in (query, key, value, g, beta) for stride in (x.stride(0), x.stride(2))),
            R=num_heads // num_groups, K=key_dim, V=value_dim, K_PAD=key_pad, BLOCK=block,
            NORMALISE=use_qk_l2norm_in_kernel, num_warps=4,
        )  # fmt: skip
    return out_nHV, initial_state


def _round_to_power(size: int) -> int:
    return 1 << (size - 1).bit_length()


# Where a graph's slots lie in its inputs selects no other variant of a kernel.
@triton.jit(do_not_specialize_on_alignment=["read_ptr", "write_ptr"])
def _convolve(  # noqa: PLR0913 - one launch
    x_ptr, store_ptr, read_ptr, write_ptr, weight_ptr, bias_ptr, out_ptr,
    x_stride, x_channel_stride, weight_stride, tap_stride, channels,
    L: tl.constexpr, W: tl.constexpr, L_PAD: tl.constexpr, CHANNELS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c, at_L = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, L_PAD)
    is_channel = c < channels
    read, write = tl.load(read_ptr + row).to(tl.int64), tl.load(write_ptr + row).to(tl.int64)
    out_ptr += row * channels + c
    if write == 0:
        tl.store(out_ptr, tl.zeros([CHANNELS], out_ptr.dtype.element_ty), mask=is_channel)
        return
    x = tl.load(x_ptr + row * x_stride + c * x_channel_stride, mask=is_channel, other=0.0)
    is_input = is_channel[:, None] & (at_L < L)[None, :]
    at_CL = c[:, None] * L + at_L[None, :]
    state_CL = tl.load(store_ptr + read * channels * L + at_CL, mask=is_input, other=0.0)

    tap_L = at_L - (L + 1 - W)  # the input itself meets the last tap
    is_tap = is_input & (tap_L >= 0)[None, :]
    taps_ptr = weight_ptr + c * weight_stride
    weight_CL = tl.load(taps_ptr[:, None] + tap_L[None, :] * tap_stride, mask=is_tap, other=0.0)
    last_C = tl.load(taps_ptr + (W - 1) * tap_stride, mask=is_channel, other=0.0)
    # The weight 0 would not remove a NaN that leaves the state.
    products_CL = tl.where(is_tap, state_CL.to(tl.float32) * weight_CL.to(tl.float32), 0.0)
    y = tl.sum(products_CL, 1) + x.to(tl.float32) * last_C.to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + c, mask=is_channel, other=0.0).to(tl.float32)
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    tl.store(out_ptr, y.to(out_ptr.dtype.element_ty), mask=is_channel)

    written_ptr = store_ptr + write * channels * L
    tl.store(written_ptr + at_CL - 1, state_CL, mask=is_input & (at_L > 0)[None, :])
    tl.store(written_ptr + c * L + L - 1, x.to(store_ptr.dtype.element_ty), mask=is_channel)


@triton.jit(do_not_specialize=["scale"], do_not_specialize_on_alignment=["read_ptr", "write_ptr"])
def _apply_delta(  # noqa: PLR0913 - one launch
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, store_ptr, read_ptr, write_ptr, out_ptr, scale,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, g_stride, g_head_stride,
    beta_stride, beta_head_stride,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_PAD: tl.constexpr, BLOCK: tl.constexpr,
    NORMALISE: tl.constexpr,
):  # fmt: skip
    head, num_heads, row = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    k, v = tl.arange(0, K_PAD), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_key, is_value = k < K, v < V
    read, write = tl.load(read_ptr + row).to(tl.int64), tl.load(write_ptr + row).to(tl.int64)
    out_ptr += (row * num_heads + head) * V + v
    if write == 0:
        tl.store(out_ptr, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=is_value)
        return
    is_state = is_key[:, None] & is_value[None, :]
    at_KV = (head * K + k)[:, None] * V + v[None, :]
    state_KV = tl.load(store_ptr + read * num_heads * K * V + at_KV, mask=is_state, other=0.0).to(tl.float32)

    group = head // R
    q_K = tl.load(q_ptr + row * q_stride + group * q_head_stride + k, mask=is_key, other=0.0).to(tl.float32)
    k_K = tl.load(k_ptr + row * k_stride + group * k_head_stride + k, mask=is_key, other=0.0).to(tl.float32)
    v_V = tl.load(v_ptr + row * v_stride + head * v_head_stride + v, mask=is_value, other=0.0).to(tl.float32)
    gate = tl.load(g_ptr + row * g_stride + head * g_head_stride).to(tl.float32)
    beta = tl.load(beta_ptr + row * beta_stride + head * beta_head_stride).to(tl.float32)
    if NORMALISE:
        q_K = q_K / tl.sqrt(tl.sum(q_K * q_K, 0) + L2_EPS)
        k_K = k_K / tl.sqrt(tl.sum(k_K * k_K, 0) + L2_EPS)
    state_KV = state_KV * tl.exp(gate)
    error_V = (v_V - tl.sum(state_KV * k_K[:, None], 0)) * beta
    state_KV += k_K[:, None] * error_V[None, :]
    out_V = tl.sum(state_KV * (q_K * scale)[:, None], 0)
    tl.store(out_ptr, out_V.to(out_ptr.dtype.element_ty), mask=is_value)
    tl.store(store_ptr + write * num_heads * K * V + at_KV, state_KV.to(store_ptr.dtype.element_ty), mask=is_state)
