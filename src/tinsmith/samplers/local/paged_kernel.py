"""Attention of one row for each sequence to its pages of keys and values, in Triton: decoding on a GPU. And the writing
of such rows' keys and values.

A program reads the keys of one key head for all query heads that share it, so that each key is read once. Where there
are too few sequences for the GPU, several programs share a sequence, each with a run of its keys, and a second kernel
joins their results. How many share is chosen from the number of sequences; how the keys are divided, from lengths that
only the device reads. So a launch depends on shapes alone, never waits, and can be captured in a CUDA graph. Sums are
in float32 and in a fixed order.

A program reads its own sequence's visible keys and nothing else: no other sequence, no position that is not written.

It does not know layers, the cache, or which rows a step has. Imported only where there is a CUDA device, since
installations for CPUs lack Triton. `attention.decode` is the reference.

Letters: n sequences, H query heads, G key heads, R = H / G, P blocks, S slots of a block, E a key and its value, C
blocks of a table.
"""

# What launches a kernel is typed as the kernel itself.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.backends.torch.attention import AttentionOptions, Window

PROGRAMS = 9 * 132
"""Programs are added up to this many: three waves of an H100, with three programs on each of its processors, so that
sequences of unequal lengths fill it to the end."""

MAX_SPLITS = 64

SPAN = 128
"""The fewest keys that are worth a program. Shorter sequences are not divided, and write their result directly."""

TILE_BYTES = 32768
"""16-bit keys and values that a program reads at once. With two tiles on their way, three programs fit a processor of
an H100, which is several times what its share of the memory's bandwidth needs, and one fits those with 99 KB."""

LAUNCH = {"num_warps": 4, "num_stages": 5}
"""Triton gives half of the stages to the table, whose blocks the loads of keys wait for: 5 are two tiles, 4 are one."""

LOG2E = tl.constexpr(1.4426950408889634)


def paged_attention(
    q_nHD: Tensor,
    store_PSGE: Tensor,
    table_nC: Tensor,
    keys_n: Tensor,
    *,
    key_dim: int,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """[n, H, D]. Row i is the last of the `keys_n[i]` tokens of its sequence, whose blocks are `table_nC[i]`. A row
    with 0 keys is padding, and its result is 0. The table and the counts of keys are int32.
    """
    q_nHD = q_nHD if q_nHD.stride(2) == 1 else q_nHD.contiguous()
    num, num_heads, _ = q_nHD.shape
    _, block_size, num_groups, both_dims = store_PSGE.shape
    value_dim = both_dims - key_dim
    window = options.get("window") or Window(0)
    splits = max(1, min(MAX_SPLITS, PROGRAMS // max(num * num_groups, 1)))
    out_nHD = q_nHD.new_empty(num, num_heads, value_dim)
    # A result and the logarithm of its weight for each split.
    parts = torch.empty(
        num * num_heads * splits * (value_dim + 1) if splits > 1 else 0, dtype=torch.float32, device=q_nHD.device
    )
    r_pad = round_to_dot_size(num_heads // num_groups)
    tile = tile_keys(both_dims, store_PSGE.element_size(), r_pad)
    shared = {"WINDOW": window.size, "CHUNKED": window.chunked, "TILE": tile, "SPAN": SPAN, **LAUNCH}
    value_pad = round_to_dot_size(value_dim)
    with torch.cuda.device_of(q_nHD):  # Triton launches on this thread's current device
        _attend[num_groups, num, splits](
            q_nHD, store_PSGE, table_nC, keys_n, options.get("sinks_H"), out_nHD, parts, options["scale"],
            q_nHD.stride(0), q_nHD.stride(1), *store_PSGE.stride()[:3], table_nC.stride(0),
            R=num_heads // num_groups, KEY_DIM=key_dim, VALUE_DIM=value_dim, S=block_size,
            SOFTCAP=options.get("softcap") or 0.0, R_PAD=r_pad, KEY_PAD=round_to_dot_size(key_dim),
            VALUE_PAD=value_pad, **shared,
        )  # fmt: skip
        if splits > 1:
            _join[num_heads, num](
                parts, keys_n, out_nHD, splits, VALUE_DIM=value_dim, VALUE_PAD=value_pad, SPLITS=MAX_SPLITS,
                **shared,
            )  # fmt: skip
    return out_nHD


def write_rows(store_PSGE: Tensor, slots_n: Tensor, k_nGD: Tensor, v_nGD: Tensor) -> None:
    """Write rows to their slots, numbered through all blocks; a slot of -1 is padding, of which nothing is written."""
    num, num_groups, key_dim = k_nGD.shape
    value_dim = v_nGD.shape[2]
    if not k_nGD.stride(2) == v_nGD.stride(2) == 1:
        k_nGD, v_nGD = k_nGD.contiguous(), v_nGD.contiguous()
    with torch.cuda.device_of(k_nGD):
        _write[(num,)](
            store_PSGE, slots_n, k_nGD, v_nGD, *k_nGD.stride()[:2], *v_nGD.stride()[:2], *store_PSGE.stride()[1:3],
            G=num_groups, KEY_DIM=key_dim, VALUE_DIM=value_dim, G_PAD=1 << (num_groups - 1).bit_length(),
            DIM_PAD=1 << (max(key_dim, value_dim) - 1).bit_length(), num_warps=4,
        )  # fmt: skip


def round_to_dot_size(size: int) -> int:
    """The next size that `tl.dot` accepts: a power of two of at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def tile_keys(both_dims: int, itemsize: int, r_pad: int) -> int:
    """Keys that a program reads at once: fewer beside many query heads, and a quarter in float32, whose matmuls keep
    their operands in registers.
    """
    fitting = 2 * TILE_BYTES // (both_dims * itemsize**2 * max(1, r_pad // 32))
    return min(SPAN, max(16, 1 << fitting.bit_length() >> 1))


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _write(  # noqa: PLR0913 - one launch
    store_ptr, slots_ptr, k_ptr, v_ptr, k_stride, k_head_stride, v_stride, v_head_stride, slot_stride, head_stride,
    G: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, G_PAD: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    g, d = tl.arange(0, G_PAD)[:, None], tl.arange(0, DIM_PAD)[None, :]
    to_ptr = store_ptr + slot * slot_stride + g * head_stride + d
    is_key, is_value = (g < G) & (d < KEY_DIM), (g < G) & (d < VALUE_DIM)
    tl.store(to_ptr, tl.load(k_ptr + row * k_stride + g * k_head_stride + d, is_key, 0.0), is_key)
    tl.store(to_ptr + KEY_DIM, tl.load(v_ptr + row * v_stride + g * v_head_stride + d, is_value, 0.0), is_value)


@triton.jit
def _split_keys(keys, splits, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr):
    """The first visible key, the number of keys from it on, and the number of keys for each program."""
    first = 0
    if CHUNKED:
        first = tl.maximum(keys - 1, 0) // WINDOW * WINDOW
    elif WINDOW > 0:
        first = tl.maximum(keys - WINDOW, 0)
    length = keys - first
    return first, length, tl.maximum(tl.cdiv(tl.cdiv(length, splits), TILE) * TILE, SPAN)


# What changes from step to step selects no other variant of the kernel, which would be compiled while samples wait.
@triton.jit(
    do_not_specialize=["scale", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "keys_ptr", "sinks_ptr"],
)
def _attend(  # noqa: PLR0913 - one launch
    q_ptr, store_ptr, table_ptr, keys_ptr, sinks_ptr, out_ptr, parts_ptr, scale,
    q_stride, q_head_stride, block_stride, slot_stride, head_stride, table_stride,
    R: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, S: tl.constexpr, SOFTCAP: tl.constexpr,
    R_PAD: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
    TILE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    group, split, splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    row = tl.program_id(1).to(tl.int64)
    keys = tl.load(keys_ptr + row)
    first, length, share = _split_keys(keys, splits, WINDOW, CHUNKED, TILE, SPAN)
    begin = first + split * share
    if (begin >= keys) & (split > 0):
        return
    end = tl.minimum(begin + share, keys)
    r, d, e = tl.arange(0, R_PAD), tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    head = group * R + r
    is_q_RD = (r < R)[:, None] & (d < KEY_DIM)[None, :]
    q_RD = tl.load(q_ptr + row * q_stride + head[:, None] * q_head_stride + d[None, :], mask=is_q_RD, other=0.0)
    q_RD = q_RD.to(store_ptr.dtype.element_ty)

    top_R = tl.full([R_PAD], float("-inf"), tl.float32)
    sum_R = tl.zeros([R_PAD], tl.float32)
    if sinks_ptr is not None:  # noqa: SIM102 - Triton decides only the outer one at compile time
        if split == 0:  # a sink is one more key, without a value, in the first program's share
            top_R = tl.load(sinks_ptr + head, mask=r < R, other=0.0).to(tl.float32) * LOG2E
            sum_R += 1.0
    out_RE = tl.zeros([R_PAD, VALUE_PAD], tl.float32)
    for start in range(begin, end, TILE):
        at_K = start + tl.arange(0, TILE)
        is_key_K = at_K < end
        block_K = tl.load(table_ptr + row * table_stride + at_K // S, mask=is_key_K, other=0).to(tl.int64)
        key_ptr_K = store_ptr + group * head_stride + block_K * block_stride + at_K % S * slot_stride
        # Masked keys and values are not read, and are 0: the weight 0 would not remove a NaN.
        is_k_DK, is_v_KE = is_key_K[None, :] & (d < KEY_DIM)[:, None], is_key_K[:, None] & (e < VALUE_DIM)[None, :]
        k_DK = tl.load(key_ptr_K[None, :] + d[:, None], mask=is_k_DK, other=0.0)
        v_KE = tl.load(key_ptr_K[:, None] + KEY_DIM + e[None, :], mask=is_v_KE, other=0.0)
        scores_RK = tl.dot(q_RD, k_DK, input_precision="ieee") * scale
        if SOFTCAP > 0:  # c * tanh(s / c)
            scores_RK = SOFTCAP - 2 * SOFTCAP / (tl.exp2(scores_RK * (2 * LOG2E / SOFTCAP)) + 1)
        scores_RK = tl.where(is_key_K[None, :], scores_RK * LOG2E, float("-inf"))
        new_top_R = tl.maximum(top_R, tl.max(scores_RK, 1))
        probs_RK = tl.exp2(scores_RK - new_top_R[:, None])
        rescale_R = tl.exp2(top_R - new_top_R)
        sum_R = sum_R * rescale_R + tl.sum(probs_RK, 1)
        out_RE = out_RE * rescale_R[:, None] + tl.dot(probs_RK.to(v_KE.dtype), v_KE, input_precision="ieee")
        top_R = new_top_R

    out_RE = out_RE / tl.where(sum_R == 0, 1.0, sum_R)[:, None]
    num_heads = tl.num_programs(0) * R
    cell = row * num_heads + head
    is_out = (r < R)[:, None] & (e < VALUE_DIM)[None, :]
    if length <= share:
        tl.store(out_ptr + cell[:, None] * VALUE_DIM + e[None, :], out_RE.to(out_ptr.dtype.element_ty), mask=is_out)
    else:
        cell = cell * splits + split
        tl.store(parts_ptr + cell[:, None] * VALUE_DIM + e[None, :], out_RE, mask=is_out)
        weights_ptr = parts_ptr + tl.num_programs(1).to(tl.int64) * num_heads * splits * VALUE_DIM
        tl.store(weights_ptr + cell, top_R + tl.log2(sum_R), mask=r < R)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["keys_ptr"])
def _join(  # noqa: PLR0913 - one launch
    parts_ptr, keys_ptr, out_ptr, splits,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    head, num_heads = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    _, length, share = _split_keys(tl.load(keys_ptr + row), splits, WINDOW, CHUNKED, TILE, SPAN)
    if length <= share:
        return
    s, e = tl.arange(0, SPLITS), tl.arange(0, VALUE_PAD)
    is_part = s < tl.cdiv(length, share)
    cell = row * num_heads + head
    weights_ptr = parts_ptr + tl.num_programs(1).to(tl.int64) * num_heads * splits * VALUE_DIM
    weight = tl.load(weights_ptr + cell * splits + s, mask=is_part, other=float("-inf"))
    weight = tl.exp2(weight - tl.max(weight, 0))
    part_SE = tl.load(
        parts_ptr + (cell * splits + s)[:, None] * VALUE_DIM + e[None, :],
        mask=is_part[:, None] & (e < VALUE_DIM)[None, :],
        other=0.0,
    )
    out_E = tl.sum(part_SE * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_ptr + cell * VALUE_DIM + e, out_E.to(out_ptr.dtype.element_ty), mask=e < VALUE_DIM)
