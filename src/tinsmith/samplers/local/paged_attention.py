"""Attention over the paged cache: a step's rows, each against its own sequence's blocks.

`PagedPlan` is the AttentionPlan of one step. Each layer's call first writes the step's keys and values into the cache
and then attends in one of three ways:

- CUDA of compute capability 9.0 with `flash_attn_interface` (FlashAttention 3), bfloat16: `varlen_attn` reads pages
  directly, for decoding rows and prompts in one call. Layers with capped scores, sinks or chunks use the third way.
- CPU: decoding rows of similar length attend to contiguous copies (`contiguous_kv`); all other rows use the third way.
- Everywhere else: keys and values are gathered, and SDPA attends to them in as few calls as the step allows: decoding
  rows of similar context length together, fresh prompts of similar length together without reading the cache, and
  chunks that continue a prompt together. This is the reference for the other two.

Every sequence has a batch row of its own in those calls, and padding is its own last row or the null block, so a NaN
stays with its sequence.

Letters: T rows of the step, N sequences, n sequences of a group, L rows of a sequence padded, K cached positions
padded, C blocks of a table, H query heads, G key heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from typing import NamedTuple, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from tinsmith.backends.torch.attention import (
    AttentionOptions,
    Mixer,
    Window,
    decode,
    prefill,
    suits_flash,
    visible,
)
from tinsmith.backends.torch.host import upload, upload_all
from tinsmith.backends.torch.model import BaseModel
from tinsmith.errors import SettingsError
from tinsmith.samplers.local.contiguous_kv import ContiguousKV, ContiguousStep, DecodeRow
from tinsmith.samplers.local.kv_cache import KVCache, LayerShape, probe_layers
from tinsmith.samplers.local.states import Recurrence

I64 = npt.NDArray[np.int64]

MAX_WASTE = 0.25  # padding allowed as a share of a group's longest member, or MIN_WASTE positions if more
MIN_WASTE = 64
ALL = slice(None)


@cache
def reads_pages(device: torch.device) -> bool:
    """Whether the device has a kernel that reads pages. Activates FlashAttention 3: version 2 has no page tables."""
    if device.type != "cuda" or find_spec("flash_attn_interface") is None:
        return False
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    activate_flash_attention_impl("FA3")
    return True


def fits_pages(shape: LayerShape) -> bool:
    """Whether that kernel supports keys and values of this shape."""
    return suits_flash(shape.dtype, shape.key_dim, shape.value_dim) and shape.key_dim % 8 == 0


def described(base: BaseModel) -> str:
    """Names the attention kernels that sample from a model, for the log."""
    gathered = "SDPA on gathered keys"
    if base.device.type == "cpu":
        return f"SDPA on contiguous keys, else {gathered.removeprefix('SDPA ')}"
    if not reads_pages(base.device):
        return gathered
    calls = [layer[-1] for layer in probe_layers(base).calls.values()]
    paged = sum(fits_pages(LayerShape(*call[:4])) and _is_plain(call.options) for call in calls)
    rest = "" if paged == len(calls) else f", {gathered} in the others"
    return f"{PAGES} in {paged} of {len(calls)} layers{rest}" if paged else gathered


def _is_plain(options: AttentionOptions) -> bool:
    window = options.get("window")
    is_chunked = window is not None and window.chunked
    return options.get("softcap") is None and options.get("sinks_H") is None and not is_chunked


def check_pages(shapes: Iterable[LayerShape], block_size: int, device: torch.device) -> None:
    """Compare the kernel that reads pages with the reference. Raises SettingsError if they differ."""
    if not reads_pages(device):
        return
    for shape in {shape for shape in shapes if fits_pages(shape)}:
        kv_cache = KVCache({0: shape}, block_size, device)
        kv_cache.resize(6)
        plan = PagedPlan(kv_cache, [Rows(0, block_size + 3, [4, 2]), Rows(0, 5, [5]), Rows(0, 1, [1])], device)
        rng, size = np.random.default_rng(0), (3, block_size + 9, shape.num_heads, shape.key_dim)
        queries, keys, values = upload(rng.standard_normal(size, np.float32), device).to(shape.dtype)
        given = queries, keys, values
        found, expected = plan.attend(0, *given, scale=0.1), plan.attend_gathered(0, *given, scale=0.1)
        error = float((found - expected).norm() / expected.norm())
        if not error < 0.02:
            raise SettingsError(f"{PAGES} differs from SDPA by {error:.3g} on {device}; remove flash_attn_interface")


PAGES = "FlashAttention 3 on pages"


class PageTable(NamedTuple):
    """Where the rows and the pages of a step's sequences are, int32."""

    rows_N1: Tensor  # the first row of each sequence, then the number of rows
    keys_N: Tensor  # keys of each sequence, including those of this step
    pages_NC: Tensor
    max_rows: int
    max_keys: int

    def attend(self, q_THD: Tensor, k_PSGD: Tensor, v_PSGD: Tensor, scale: float, window: Window | None) -> Tensor:
        """[T, H, D]: row i of a sequence's last rows sees the keys up to its own."""
        out_THD = varlen_attn(
            q_THD, k_PSGD, v_PSGD, self.rows_N1, None, self.max_rows, self.max_keys, scale=scale,
            window_size=(-1 if window is None else window.size - 1, 0), enable_gqa=True, seqused_k=self.keys_N,
            block_table=self.pages_NC,
        )  # fmt: skip
        assert isinstance(out_THD, Tensor)
        return out_THD


class Rows(NamedTuple):
    """One sequence's part of a step: `stop - start` tokens after `start` cached ones. A decoding `owner` may have a
    contiguous slot. `seen`: how many tokens of the sequence each row sees, if not those up to itself.
    """

    start: int
    stop: int
    blocks: Sequence[int]
    owner: Hashable = None
    seen: I64 | None = None


@dataclass(slots=True)
class _Group:
    """Sequences that share a kernel call. `rows_nL` is a slice if their rows are adjacent in the step."""

    num: int
    num_rows: int  # L
    rows_nL: Tensor | slice  # flat; padded with the sequence's own last row
    real: tuple[Tensor, Tensor] | None  # (padded index, row of the step) of every row that is not padding
    blocks_nC: Tensor | None  # None: nothing is cached before these rows, so they see only each other
    positions_nL: Tensor  # flat
    seen_nL: Tensor | None  # how many positions each row sees; None: those up to its own
    masks: dict[Window | None, Tensor | None]


class PagedPlan:
    """`positions_T` are the rows' positions; rows are in the order of `sequences`. The keys and values of the rows in
    `written` are written to the cache. `recurrence` covers the same rows for layers that keep a state.
    """

    def __init__(
        self,
        cache: KVCache,
        sequences: Sequence[Rows],
        device: torch.device,
        contiguous: ContiguousKV | None = None,
        *,
        written: slice = ALL,
        recurrence: Recurrence | None = None,
    ) -> None:
        self._written = written
        self._recurrence = recurrence
        self._cache = cache
        self._device = device
        # The kernel that reads pages is causal.
        self._has_pages = reads_pages(device) and all(rows.seen is None for rows in sequences)
        start_N = np.array([s.start for s in sequences], np.int64)
        size_N = np.array([s.stop for s in sequences], np.int64) - start_N
        first_N = np.cumsum(size_N) - size_N
        num_blocks_N = np.array([len(s.blocks) for s in sequences], np.int64)
        table_NC = np.zeros((len(sequences), num_blocks_N.max()), np.int64)
        for row, sequence in zip(table_NC, sequences, strict=True):
            row[: len(sequence.blocks)] = sequence.blocks

        owner_T = np.repeat(np.arange(len(sequences)), size_N)
        positions_T = np.arange(len(owner_T)) + (start_N - first_N)[owner_T]
        block_size = cache.block_size
        slots_T = table_NC[owner_T, positions_T // block_size] * block_size + positions_T % block_size
        self.positions_T, self._slots_T = upload_all([positions_T, slots_T], device)
        self._spans = first_N, size_N, start_N, table_NC
        self._seen_N = [s.seen for s in sequences]
        self._contiguous: list[ContiguousStep] = []
        kept_N = np.ones(len(sequences), np.bool_)
        if contiguous is not None:
            decoding = np.flatnonzero((size_N == 1) & (start_N > 0)).tolist()
            members = [
                DecodeRow(sequences[i].owner, int(first_N[i]), sequences[i].start, sequences[i].blocks)
                for i in decoding
            ]
            self._contiguous, rows = contiguous.place(members, len(owner_T))
            kept_N[owner_T[rows]] = False
        self._kept_N = kept_N

    @cached_property
    def _groups(self) -> list[_Group]:
        _, size_N, start_N, _ = self._spans
        return [self._group(members, *self._spans) for members in _buckets(start_N, size_N, self._kept_N)]

    @cached_property
    def _pages(self) -> PageTable:
        first_N, size_N, start_N, table_NC = self._spans
        keys_N = start_N + size_N
        parts = np.append(first_N, size_N.sum()), keys_N, table_NC.ravel()
        rows_N1, used_N, pages = upload_all([part.astype(np.int32) for part in parts], self._device)
        return PageTable(rows_N1, used_N, pages.view(table_NC.shape), int(size_N.max()), int(keys_N.max()))

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        self._cache.write(layer, self._slots_T[self._written], k_TGD[self._written], v_TGD[self._written])
        if self._has_pages and _is_plain(options) and fits_pages(self._cache.shape(layer)):
            return self._pages.attend(q_THD, *self._cache.pages(layer), options["scale"], options.get("window"))
        return self.attend_gathered(layer, q_THD, k_TGD, v_TGD, **options)

    def attend_gathered(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        """The same by SDPA, after the step's keys and values were written to the cache."""
        out_THD = None
        for contiguous in self._contiguous:
            part = contiguous.attend(layer, q_THD, k_TGD, v_TGD, **options)
            if contiguous.row_n is None:
                return part
            if out_THD is None:
                out_THD = part.new_empty(len(q_THD), *part.shape[1:])
            out_THD.index_copy_(0, contiguous.row_n, part)
        for group in self._groups:
            part = self._attend_group(group, layer, q_THD, k_TGD, v_TGD, **options)
            if len(part) == len(q_THD) and group.real is None:
                return part
            if out_THD is None:
                out_THD = part.new_empty(len(q_THD), *part.shape[1:])
            if group.real is None:
                out_THD[group.rows_nL] = part
            else:
                cells, rows = group.real
                out_THD.index_copy_(0, rows, part.index_select(0, cells))
        assert out_THD is not None
        return out_THD

    def mix(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        assert self._recurrence is not None
        return self._recurrence.mix(mixer, x_TD)

    def _attend_group(
        self, group: _Group, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor,
        **options: Unpack[AttentionOptions],
    ) -> Tensor:  # fmt: skip
        """[n * L, H, D]"""
        q_nLHD = self._own(group, q_THD)
        if group.blocks_nC is None:
            k_nGKD, v_nGKD = (self._own(group, x).transpose(1, 2) for x in (k_TGD, v_TGD))
        else:
            k_nGKD, v_nGKD = self._cache.read(layer, group.blocks_nC)
        mask = self._mask(group, options.get("window"), k_nGKD)
        if mask is not None and group.num_rows == 1:
            return decode(q_nLHD[:, 0], k_nGKD, v_nGKD, mask, **options)
        return prefill(q_nLHD.transpose(1, 2), k_nGKD, v_nGKD, mask, **options).transpose(1, 2).flatten(0, 1)

    def _group(self, members: I64, first_N: I64, size_N: I64, start_N: I64, table_NC: I64) -> _Group:
        num, length = len(members), int(size_N[members].max())
        cell_L = np.arange(length)
        own_nL = np.minimum(cell_L, size_N[members, None] - 1)
        rows_nL = first_N[members, None] + own_nL
        positions_nL = start_N[members, None] + own_nL
        table = None
        if start_N[members].any():
            num_blocks = -(-int((start_N + size_N)[members].max()) // self._cache.block_size)
            table = upload(table_NC[members, :num_blocks], self._device)
        positions = upload(positions_nL.ravel(), self._device)
        seen_nL = self._seen(members, positions_nL, own_nL)
        first, last = int(rows_nL[0, 0]), int(rows_nL[-1, -1])
        if last - first + 1 == size_N[members].sum() == num * length:
            return _Group(num, length, slice(first, last + 1), None, table, positions, seen_nL, {})
        kept = np.flatnonzero(cell_L < size_N[members, None])
        rows, *real = upload_all([rows_nL.ravel(), kept, rows_nL.ravel()[kept]], self._device)
        return _Group(num, length, rows, (real[0], real[1]), table, positions, seen_nL, {})

    def _seen(self, members: I64, positions_nL: I64, own_nL: I64) -> Tensor | None:
        """[n, L] of a group; padding repeats the last row."""
        if all(self._seen_N[member] is None for member in members):
            return None
        seen_nL = positions_nL + 1
        for row, member in enumerate(members):
            if (own := self._seen_N[member]) is not None:
                seen_nL[row] = own[own_nL[row]]
        return upload(seen_nL, self._device)

    def _own(self, group: _Group, x_THD: Tensor) -> Tensor:
        """[n, L, H, D]"""
        at = group.rows_nL
        rows = x_THD[at] if isinstance(at, slice) else x_THD.index_select(0, at)
        return rows.view(group.num, group.num_rows, *x_THD.shape[1:])

    def _mask(self, group: _Group, window: Window | None, k_nGKD: Tensor) -> Tensor | None:
        """The mask that is added to a group's scores; None if causal attention needs none. Made once for all layers."""
        num_keys = k_nGKD.shape[2]
        if window is not None and window.size >= num_keys:
            window = None
        if group.blocks_nC is None and window is None and group.seen_nL is None:
            return None
        if window not in group.masks:
            # Rows without a cache are numbered from 0, as their keys are; padding repeats the last row.
            position_nL = group.positions_nL.view(group.num, group.num_rows)
            group.masks[window] = visible(position_nL, num_keys, window, k_nGKD.dtype, group.seen_nL)
        return group.masks[window]


def _buckets(start_N: I64, size_N: I64, kept_N: npt.NDArray[np.bool_]) -> list[I64]:
    """Indices of the sequences in `kept_N`, grouped by kernel call: of one kind and of similar length."""
    keys_N = start_N + size_N
    # Decoding rows (one row after a cached context), fresh prompts, and continued prompts by the magnitude of their
    # size.
    kind_N = np.where(start_N == 0, 0, np.where(size_N == 1, 1, 1 + np.ceil(np.log2(size_N)).astype(np.int64)))
    buckets = []
    for kind in np.unique(kind_N[kept_N]):
        members = np.flatnonzero((kind_N == kind) & kept_N)
        order = members[np.argsort(-keys_N[members], kind="stable")]
        longest_first = keys_N[order]
        begin = 0
        while begin < len(order):
            longest = longest_first[begin]
            waste = max(MIN_WASTE, MAX_WASTE * longest)
            end = begin + int(np.searchsorted(longest - longest_first[begin:], waste, side="right"))
            buckets.append(np.sort(order[begin:end]))
            begin = end
    return buckets
