"""Attention over rows of different sequences: what a model's layers call instead of their own kernel.

`register_attention` adds an attention function to transformers that passes the rows of every layer to the
`AttentionPlan` of the current call. Training uses `PackedCausal`; a sampler provides a plan with its own cache. No plan
may mix rows of two sequences, not even under a mask of zeros: 0 * NaN is NaN, and the sequences may belong to different
tenants.

Shapes: T rows, H query heads, G key heads, D head dim, n sequences of one group padded to L; N = n * G, and R the H / G
query heads of a key head with their L rows each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple, Protocol, Required, TypedDict, Unpack, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from tinsmith.backends.torch.attention_parts import (
    attend_with_sinks,
    equals_reference,
    suits_flash,
    suits_parts,
)
from tinsmith.backends.torch.host import upload
from tinsmith.errors import SettingsError
from tinsmith.runtime.devices import is_on_host, runs_kernels
from tinsmith.types import I64

ATTENTION_NAME = "tinsmith"
PLAN_KEY = "tinsmith_plan"

_HARMLESS_KEYWORDS = frozenset(
    {
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "is_causal",
    }
)
"""Keywords that layers pass on and that do not change what a causal plan computes."""

CHUNKED = "chunked_attention"
"""The kind of layers whose rows see their own chunk of the sequence."""

INDEXED = "indexed_attention"
"""The kind of layers whose rows see the tokens that an indexer selects."""

MAX_PADDING = 0.25
"""A sequence joins a group of longer ones only if at most this share of its row is padding (or 16 rows)."""


MAX_CUDNN_DIM = 128
"""The largest heads of cuDNN's attention, whose backward takes no larger ones."""

CUDNN_CAPABILITY = 9
"""Hopper's, on which cuDNN was measured."""

CUDNN_MIN_ROWS, CUDNN_MULTIPLE = 1024, 512
"""Training in 16 bits on CUDA, sequences of at least CUDNN_MIN_ROWS rows, whose number is a multiple of CUDNN_MULTIPLE
or one less, take cuDNN's kernel. It is faster than FlashAttention, but each new shape costs more than a few
micro-batches gain. Data that are cut to a length have few lengths, and round ones, or one less, since the last token is
only a target; other lengths seldom return. The shape alone decides, and no step before, so that a pass that is replayed
takes the same kernels.
"""

BMM_MAX_LENGTH, SAVED_MAX_LENGTH, BMM_MIN_ROWS = 512, 256, 64
"""Training in bfloat16 on a CPU, sequences of at most BMM_MAX_LENGTH rows, and at least BMM_MIN_ROWS rows of them at
once, take plain batched matmuls, which are faster than SDPA and its backward at these lengths. Backward computes the
probabilities of sequences of more than SAVED_MAX_LENGTH again, since nothing in a layer takes more memory.
"""


class Window(NamedTuple):
    """A row sees the last `size` rows up to itself, or, with `chunked`, those since the last multiple of `size`."""

    size: int
    chunked: bool = False

    def first(self, position: Tensor) -> Tensor:
        """The first position that each row sees."""
        return position // self.size * self.size if self.chunked else position - (self.size - 1)

    def __str__(self) -> str:
        return f"{self.size} (chunked)" if self.chunked else str(self.size)


class AttentionOptions(TypedDict, total=False):
    """`softcap` c maps scores s to c * tanh(s / c); `sinks_H` adds one logit per head to the softmax's sum."""

    scale: Required[float]
    window: Window | None
    softcap: float | None
    sinks_H: Tensor | None


class AttentionPlan(Protocol):
    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        """[T, H, D]. Row i sees row j <= i of its own sequence, within its window. A plan may also show rows some later
        rows of their sequence.
        """
        ...

    def mix(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        """[T, D]: a layer with a recurrent state instead of keys and values, applied to each sequence separately."""
        ...


class MixerState(NamedTuple):
    """A layer's state of n sequences: the last inputs of its convolution [n, C, K], and its recurrent state [n, ...].
    None: the layer has no such part.
    """

    conv: Tensor | None
    recurrent: Tensor | None


class LayerSlots(NamedTuple):
    """A layer's states in slots of `stores` [S, ...]: row i continues that in slot `read_n[i]` and leaves another in
    slot `write_n[i]`, both int64. `kernels`: the module `state_kernels`, where it can run.
    """

    stores: MixerState
    read_n: Tensor
    write_n: Tensor
    kernels: ModuleType | None


class Mixer(Protocol):
    """A stateful layer, implemented by `recurrent.SequenceMixer`. `is_whole`: it continues from a state one row at a
    time, so that rows which continue are best computed together with those before them.
    """

    layer: int
    is_whole: bool

    def __call__(
        self,
        x_nLD: Tensor,
        starts: tuple[int, ...],
        state: MixerState | LayerSlots | None = None,
        *,
        keep: bool = False,
    ) -> tuple[Tensor, MixerState | None]:
        """[n, L, D], and the state after the last of the L rows if `keep`. `starts`: the row of the current call at
        which each sequence begins, which selects its adapter. `state` None: the sequences begin here. With slots there
        is one row of each, and the state after it is in its slot only.
        """
        ...


class AttentionCall(NamedTuple):
    """Arguments of one attention call: sizes and dtype of what the layer would cache per row, and its options."""

    num_keys: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    options: AttentionOptions


class AttentionProbe:
    """An AttentionPlan of one sequence that computes nothing and records, by layer, the calls and the states that
    layers keep.
    """

    def __init__(self) -> None:
        self.calls: dict[int, list[AttentionCall]] = {}
        self.states: dict[int, list[MixerState]] = {}

    @property
    def windows(self) -> dict[int, list[Window | None]]:
        return {layer: [call.options.get("window") for call in calls] for layer, calls in self.calls.items()}

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        call = AttentionCall(k_TGD.shape[1], k_TGD.shape[2], v_TGD.shape[2], k_TGD.dtype, options)
        self.calls.setdefault(layer, []).append(call)
        return q_THD.new_zeros(*q_THD.shape[:2], v_TGD.shape[2])

    def mix(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        y_1LD, state = mixer(x_TD[None], (0,), keep=True)
        assert state is not None
        self.states.setdefault(mixer.layer, []).append(state)
        return y_1LD[0]


class PackedCausal:
    """Sequences packed into one row, each causal within itself. `visible_counts` gives, for a sequence whose rows see
    later rows, how many rows each one sees from the first on; None for a causal sequence.

    Sequences of similar length share one batched kernel call, padded on the right with copies of their own rows, whose
    results and gradients are dropped.
    """

    def __init__(
        self, lengths: Sequence[int], device: torch.device | str = "cpu", visible_counts: Sequence[I64 | None] = ()
    ) -> None:
        device = torch.device(device)
        self._groups, row_C, cell_T = _group_sequences(lengths, device, visible_counts)
        # The row of each cell of the groups, one group after the other, and the cell of each row; None if both are in
        # the same order.
        self._row_C = self._cell_T = None
        if not np.array_equal(row_C, np.arange(len(cell_T))):
            self._row_C, self._cell_T = upload(row_C, device), upload(cell_T, device)
        self._masks: dict[tuple[int | tuple[int, ...], Window | None], Tensor] = {}

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        outputs, window = [], options.get("window")
        inputs = zip(self._groups, *(self.pad_groups(x) for x in (q_THD, k_TGD, v_TGD)), strict=True)
        for group, *qkv in inputs:
            q_nHLD, k_nGLD, v_nGLD = (x_nLHD.transpose(1, 2) for x_nLHD in qkv)
            if window is not None and group.length > (2 - window.chunked) * window.size and group.visible_nL is None:
                out_nHLD = _attend_in_blocks(q_nHLD, k_nGLD, v_nGLD, window.size, window.chunked, **options)
            elif (mask := self._mask(group, window, q_THD)) is None and _takes_cudnn(q_nHLD, k_nGLD, v_nGLD, **options):
                out_nHLD = _cudnn_attention(q_nHLD, k_nGLD, v_nGLD, options["scale"])
            else:
                out_nHLD = prefill(q_nHLD, k_nGLD, v_nGLD, mask, **options)
            outputs.append(out_nHLD.transpose(1, 2))
        return self.unpad_groups(outputs)

    def mix(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        pairs = zip(self._groups, self.pad_groups(x_TD), strict=True)
        return self.unpad_groups([mixer(x_nLD, group.starts)[0] for group, x_nLD in pairs])

    def pad_groups(self, x: Tensor) -> list[Tensor]:
        """[n, L, ..] of each group, from [T, ..]."""
        return self._split_cells(x if self._row_C is None else TakeRows.apply(x, self._row_C, self._cell_T))

    def pad_gradient(self, grad: Tensor) -> list[Tensor]:
        """[n, L, ..] of each group, from [T, ..], with zeros for padding."""
        if self._cell_T is None:
            return self.pad_groups(grad)
        num_cells = sum(len(group.starts) * group.length for group in self._groups)
        return self._split_cells(grad.new_zeros(num_cells, *grad.shape[1:]).index_copy_(0, self._cell_T, grad))

    def _split_cells(self, cells: Tensor) -> list[Tensor]:
        sizes = [len(group.starts) * group.length for group in self._groups]
        # Backward through a slice copies the gradient into zeros; through a split it is one copy.
        parts = cells.split_with_sizes(sizes) if len(sizes) > 1 else [cells]
        return [
            part.view(len(group.starts), group.length, *cells.shape[1:])
            for part, group in zip(parts, self._groups, strict=True)
        ]

    def unpad_groups(self, outputs: Sequence[Tensor]) -> Tensor:
        """[T, ..] from [n, L, ..] of each group."""
        parts = [output.flatten(0, 1) for output in outputs]
        cells = parts[0] if len(parts) == 1 else torch.cat(parts)
        return cells if self._cell_T is None else TakeRows.apply(cells, self._cell_T)

    def _mask(self, group: _Group, window: Window | None, q_THD: Tensor) -> Tensor | None:
        """[L, L] or [n, 1, L, L], 0 where a row may look, -inf elsewhere; None if plain causal. Cached for all
        layers.
        """
        length = group.length
        if window is not None and length <= window.size:
            window = None
        visible_nL = group.visible_nL
        if window is None and visible_nL is None:
            return None
        key = length if visible_nL is None else group.starts, window
        if key not in self._masks:
            if visible_nL is None:
                mask = causal_mask(length, window, q_THD)
            else:
                cell_1L = torch.arange(length, device=q_THD.device)[None]
                mask = visibility_mask(cell_1L, length, window, q_THD.dtype, visible_nL)
            self._masks[key] = mask
        return self._masks[key]


class _Group(NamedTuple):
    """Sequences that share a kernel call."""

    starts: tuple[int, ...]
    length: int
    visible_nL: Tensor | None = None  # how many cells each one sees; None: those up to itself


def group_by_length(indices: Iterable[int], lengths: Sequence[int], *, pads: bool = True) -> list[list[int]]:
    """Groups of sequences of similar length, or without `pads` of equal length. They are in the order of their first
    sequences, so that neighbours of equal length need no copies.
    """
    groups: list[list[int]] = []
    for index in sorted(indices, key=lambda index: -lengths[index]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and longest - lengths[index] <= (max(16, MAX_PADDING * longest) if pads else 0):
            groups[-1].append(index)
        else:
            groups.append([index])
    return sorted(map(sorted, groups))


def _group_sequences(
    lengths: Sequence[int], device: torch.device, visible_counts: Sequence[I64 | None]
) -> tuple[list[_Group], I64, I64]:
    """The groups, the source row of each of their cells, and the cell of each row."""
    starts = [0, *accumulate(lengths)]
    groups, rows, is_row_parts = [], [], []
    for bucket in group_by_length(range(len(lengths)), lengths):
        bucket_starts, length = tuple(starts[i] for i in bucket), max(lengths[i] for i in bucket)
        visible_nL = (
            _upload_visible_counts([(lengths[i], visible_counts[i]) for i in bucket], device)
            if visible_counts
            else None
        )
        groups.append(_Group(bucket_starts, length, visible_nL))
        size_n1, cell_L = np.array([lengths[i] for i in bucket])[:, None], np.arange(length)
        rows.append((np.array(bucket_starts)[:, None] + np.minimum(cell_L, size_n1 - 1)).ravel())
        is_row_parts.append((cell_L < size_n1).ravel())
    row_C, is_row_C = np.concatenate(rows), np.concatenate(is_row_parts)
    cell_T = np.empty(starts[-1], np.int64)
    cell_T[row_C[is_row_C]] = np.flatnonzero(is_row_C)
    return groups, row_C, cell_T


def _upload_visible_counts(members: Sequence[tuple[int, I64 | None]], device: torch.device) -> Tensor | None:
    """[n, L] for sequences of these lengths; None if all are causal."""
    if all(counts is None for _, counts in members):
        return None
    longest = max(length for length, _ in members)
    visible_nL = np.tile(np.arange(longest) + 1, (len(members), 1))
    for row, (length, counts) in zip(visible_nL, members, strict=True):
        if counts is not None:
            row[:length] = counts
    return upload(visible_nL, device)


class TakeRows(torch.autograd.Function):
    """x[rows], differentiated by a plain copy: autograd's own would add, atomically on a GPU. `cells` names, for each
    row of x, the index in `rows` whose gradient it gets; the other indices are padding. None: no row is taken twice.
    """

    @staticmethod
    def forward(ctx, x: Tensor, rows: Tensor, cells: Tensor | None = None) -> Tensor:
        ctx.rows, ctx.cells, ctx.num_rows = rows, cells, x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.cells is not None:
            return grad.index_select(0, ctx.cells), None, None
        return grad.new_zeros(ctx.num_rows, *grad.shape[1:]).index_copy_(0, ctx.rows, grad), None, None


def causal_mask(length: int, window: Window | None, like: Tensor) -> Tensor:
    """[L, L] 0 where a row sees another, -inf elsewhere."""
    return visibility_mask(torch.arange(length, device=like.device)[None], length, window, like.dtype)[0, 0]


def visibility_mask(
    position_nL: Tensor, num_keys: int, window: Window | None, dtype: torch.dtype, visible_nL: Tensor | None = None
) -> Tensor:
    """[n, 1, L, K]: 0 where a row sees one of K positions, else -inf. `visible_nL`: how many positions each row sees
    from the first on, if not those up to its own.
    """
    key_K = torch.arange(num_keys, device=position_nL.device)
    row_nL1 = position_nL[..., None]
    hidden_nLK = key_K > row_nL1 if visible_nL is None else key_K >= visible_nL[..., None]
    if window is not None:
        hidden_nLK |= key_K < window.first(row_nL1)
    mask_nLK = torch.zeros(hidden_nLK.shape, dtype=dtype, device=position_nL.device)
    return mask_nLK.masked_fill_(hidden_nLK, float("-inf"))[:, None]


def has_plain_scores(options: AttentionOptions) -> bool:
    """Whether scores are neither capped nor joined by sinks."""
    return options.get("softcap") is None and options.get("sinks_H") is None


def prefill(
    q_nHLD: Tensor, k_nGKD: Tensor, v_nGKD: Tensor, mask: Tensor | None, **options: Unpack[AttentionOptions]
) -> Tensor:
    """[n, H, L, D]. The mask, [.., L, K], is added to the scores and includes windows; None: causal, L = K."""
    if not has_plain_scores(options):
        if mask is None and _suits_sinks(q_nHLD, k_nGKD, v_nGKD, **options):
            return _attend_with_sinks(q_nHLD, k_nGKD, v_nGKD, **options)
        return reference_attention(q_nHLD, k_nGKD, v_nGKD, mask, **options)
    if mask is None and _suits_bmm(q_nHLD):
        return cast(Tensor, _BmmCausal.apply(q_nHLD, k_nGKD, v_nGKD, options["scale"]))
    if runs_kernels(q_nHLD) and (mask is not None or not suits_flash(q_nHLD.dtype, k_nGKD.shape[-1], v_nGKD.shape[-1])):
        # CUDA's other fused kernels need as many key heads as query heads; without one, all scores would be stored.
        k_nGKD, v_nGKD = _repeat_heads(q_nHLD, k_nGKD, v_nGKD)
    return nn.functional.scaled_dot_product_attention(
        q_nHLD, k_nGKD, v_nGKD, mask, is_causal=mask is None, scale=options["scale"],
        enable_gqa=q_nHLD.shape[1] != k_nGKD.shape[1],
    )  # fmt: skip


def suits_cudnn(dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Whether cuDNN's attention supports heads of these sizes, on a GPU on which it is faster."""
    suits = suits_flash(dtype, key_dim, value_dim) and key_dim <= MAX_CUDNN_DIM and key_dim % 8 == 0
    return suits and torch.backends.cudnn.is_available() and torch.cuda.get_device_capability()[0] == CUDNN_CAPABILITY


def _suits_sinks(q_nHLD: Tensor, k_nGLD: Tensor, v_nGLD: Tensor, **options: Unpack[AttentionOptions]) -> bool:
    """Whether `attend_with_sinks` takes these rows. A GPU's kernel is checked once."""
    if options.get("softcap") is not None or options.get("sinks_H") is None or not suits_parts(q_nHLD, v_nGLD):
        return False
    heads = q_nHLD.shape[1], k_nGLD.shape[1], q_nHLD.shape[-1]
    return is_on_host(q_nHLD) or check_sinks(q_nHLD.device, q_nHLD.dtype, heads)


@cache
def check_sinks(device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]) -> bool:
    """Whether attention with sinks in a small block, and its gradients, are those in plain arithmetic. `heads`: query
    heads, key heads, head dim.
    """
    num_heads, num_keys, dim = heads
    generator, size = torch.Generator().manual_seed(0), 9
    rows = [
        torch.randn(2, count, size, dim, generator=generator).to(device, dtype)
        for count in (num_heads, num_keys, num_keys, num_keys, num_keys, num_heads)
    ]
    grad_nHLD = rows.pop()
    # So large that their lack would show.
    options: AttentionOptions = {
        "scale": dim**-0.5,
        "sinks_H": torch.randn(num_heads, generator=generator).add_(2).to(device),
    }

    def attend(*inputs: Tensor) -> Tensor:
        return _attend_with_sinks(*inputs, **options)

    def attend_plainly(q: Tensor, k: Tensor, v: Tensor, k_before: Tensor, v_before: Tensor) -> Tensor:
        keys, values = torch.cat([k_before, k], 2), torch.cat([v_before, v], 2)
        return reference_attention(q, keys, values, _block_mask(size, q), **options)

    return equals_reference(
        attend, attend_plainly, rows, grad_nHLD, consequence="attention with sinks stores its scores"
    )


def _attend_with_sinks(*inputs: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
    """[n, H, L, D], of queries, keys and values, and keys and values before them."""
    q, k, v, *before = (x.transpose(1, 2) for x in inputs)
    sinks_H = cast(Tensor, options.get("sinks_H"))
    pair = (before[0], before[1]) if before else None
    return attend_with_sinks(q, k, v, sinks_H, options["scale"], pair).transpose(1, 2)


def _takes_cudnn(q_nHLD: Tensor, k_nGLD: Tensor, v_nGLD: Tensor, **options: Unpack[AttentionOptions]) -> bool:
    if not runs_kernels(q_nHLD) or not torch.is_grad_enabled():
        return False
    if (rows := q_nHLD.shape[2] + 1) < CUDNN_MIN_ROWS or rows % CUDNN_MULTIPLE > 1:
        return False
    return has_plain_scores(options) and suits_cudnn(q_nHLD.dtype, k_nGLD.shape[-1], v_nGLD.shape[-1])


def _cudnn_attention(q_nHLD: Tensor, k_nGLD: Tensor, v_nGLD: Tensor, scale: float) -> Tensor:
    """Causal attention. The operator itself: choosing it for SDPA takes the host longer than calling it."""
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    return attend(q_nHLD, k_nGLD, v_nGLD, None, True, 0.0, True, False, scale=scale)[0]


def _suits_bmm(q_nHLD: Tensor) -> bool:
    num, _, length, _ = q_nHLD.shape
    if q_nHLD.dtype != torch.bfloat16 or not is_on_host(q_nHLD) or not torch.is_grad_enabled():
        return False
    return length <= BMM_MAX_LENGTH and num * length >= BMM_MIN_ROWS


class _BmmCausal(torch.autograd.Function):
    """Causal attention by batched matmuls of whole sequences, as `reference` computes it."""

    @staticmethod
    def forward(ctx, q_nHLD: Tensor, k_nGLD: Tensor, v_nGLD: Tensor, scale: float) -> Tensor:
        k_NLD, v_NLD = k_nGLD.flatten(0, 1).contiguous(), v_nGLD.flatten(0, 1).contiguous()
        q_NRD = q_nHLD.reshape(len(k_NLD), -1, q_nHLD.shape[-1])
        probs_NRL = _causal_probs(q_NRD, k_NLD, scale)
        ctx.save_for_backward(q_NRD, k_NLD, v_NLD, probs_NRL if q_nHLD.shape[2] <= SAVED_MAX_LENGTH else None)
        ctx.scale, ctx.shapes = scale, (q_nHLD.shape, k_nGLD.shape, v_nGLD.shape)
        return torch.bmm(probs_NRL, v_NLD).view(*q_nHLD.shape[:3], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q_NRD, k_NLD, v_NLD, saved_NRL = ctx.saved_tensors
        probs_NRL = _causal_probs(q_NRD, k_NLD, ctx.scale) if saved_NRL is None else saved_NRL
        grad_NRD = grad.reshape(*probs_NRL.shape[:2], -1)
        # All gradients of scores are scaled here, so that the other matmuls share compiled ones.
        grad_probs_NRL = torch.empty_like(probs_NRL).baddbmm_(grad_NRD, v_NLD.mT, beta=0, alpha=ctx.scale)
        grad_scores_NRL = torch.ops.aten._softmax_backward_data(grad_probs_NRL, probs_NRL, -1, probs_NRL.dtype)
        grads = (
            torch.bmm(grad_scores_NRL, k_NLD),
            torch.bmm(grad_scores_NRL.mT, q_NRD),
            torch.bmm(probs_NRL.mT, grad_NRD),
        )
        grad_q, grad_k, grad_v = (gradient.view(shape) for gradient, shape in zip(grads, ctx.shapes, strict=True))
        return grad_q, grad_k, grad_v, None


def _causal_probs(q_NRD: Tensor, k_NLD: Tensor, scale: float) -> Tensor:
    mask_RL = causal_mask(k_NLD.shape[1], None, q_NRD).repeat(q_NRD.shape[1] // k_NLD.shape[1], 1)
    # The matmul adds the mask and scales, which saves two passes over the scores.
    return torch.softmax(torch.baddbmm(mask_RL, q_NRD, k_NLD.mT, alpha=scale), -1)


def _attend_in_blocks(
    q_nHLD: Tensor, k_nGLD: Tensor, v_nGLD: Tensor, size: int, chunked: bool, **options: Unpack[AttentionOptions]
) -> Tensor:
    """[n, H, L, D]: causal with a window, in L / size blocks of which each sees itself and, unless `chunked`, the one
    before, so that masks and scores take at most 2 * size elements a row instead of L.
    """
    missing = -q_nHLD.shape[2] % size
    q_nHBSD, k_nGBSD, v_nGBSD = (
        nn.functional.pad(x, (0, 0, 0, missing)).unflatten(2, (-1, size)) for x in (q_nHLD, k_nGLD, v_nGLD)
    )
    if chunked:
        q_bHSD, k_bGSD, v_bGSD = (x.transpose(1, 2).flatten(0, 1) for x in (q_nHBSD, k_nGBSD, v_nGBSD))
        out_bHSD = prefill(q_bHSD, k_bGSD, v_bGSD, None, **options)
        out_nHLD = out_bHSD.unflatten(0, (len(q_nHLD), -1)).transpose(1, 2).flatten(2, 3)
        return out_nHLD[:, :, : q_nHLD.shape[2]]
    first_nHSD = prefill(q_nHBSD[:, :, 0], k_nGBSD[:, :, 0], v_nGBSD[:, :, 0], None, **options)
    q_bHSD = q_nHBSD[:, :, 1:].transpose(1, 2).flatten(0, 1)
    before = [x[:, :, :-1].transpose(1, 2).flatten(0, 1) for x in (k_nGBSD, v_nGBSD)]
    blocks = [x[:, :, 1:].transpose(1, 2).flatten(0, 1) for x in (k_nGBSD, v_nGBSD)]
    if _suits_sinks(q_nHLD, k_nGLD, v_nGLD, **options):
        later_bHSD = _attend_with_sinks(q_bHSD, *blocks, *before, **options)
    else:
        keys, values = (torch.cat(pair, 2) for pair in zip(before, blocks, strict=True))
        later_bHSD = prefill(q_bHSD, keys, values, _block_mask(size, q_nHLD), **options)
    later_nHLD = later_bHSD.unflatten(0, (len(q_nHLD), -1)).transpose(1, 2).flatten(2, 3)
    return torch.cat([first_nHSD, later_nHLD], 2)[:, :, : q_nHLD.shape[2]]


def _block_mask(size: int, like: Tensor) -> Tensor:
    """[S, 2 S] of a block's rows and the keys of the block before and of its own: a row sees S keys. The keys before
    are those that rows no longer see, one more for each row.
    """
    hidden = torch.full((size, 2 * size), float("-inf"), dtype=like.dtype, device=like.device)
    return hidden.triu(size + 1) + hidden.tril(0)


def decode(q_nHD: Tensor, k_nGKD: Tensor, v_nGKD: Tensor, mask: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
    """[n, H, D]: one row per sequence."""
    if not has_plain_scores(options):
        return reference_attention(q_nHD[:, :, None], k_nGKD, v_nGKD, mask, **options)[:, :, 0]
    # Query heads of one key head act as rows: keys are read once for all of them, and never repeated.
    q_nGRD = q_nHD.unflatten(1, (k_nGKD.shape[1], -1))
    return nn.functional.scaled_dot_product_attention(q_nGRD, k_nGKD, v_nGKD, mask, scale=options["scale"]).flatten(
        1, 2
    )


def reference_attention(
    q_nHLD: Tensor, k_nGKD: Tensor, v_nGKD: Tensor, mask: Tensor | None, **options: Unpack[AttentionOptions]
) -> Tensor:
    """Attention in plain arithmetic: the oracle of `prefill`, and the path for capped scores, and sinks with masks."""
    k_nHKD, v_nHKD = _repeat_heads(q_nHLD, k_nGKD, v_nGKD)
    scores_nHLK = (q_nHLD @ k_nHKD.transpose(2, 3)).float() * options["scale"]
    if (softcap := options.get("softcap")) is not None:
        scores_nHLK = softcap * torch.tanh(scores_nHLK / softcap)
    scores_nHLK = scores_nHLK + (causal_mask(q_nHLD.shape[2], None, scores_nHLK) if mask is None else mask)
    if (sinks_H := options.get("sinks_H")) is None:
        return torch.softmax(scores_nHLK, -1).to(v_nHKD.dtype) @ v_nHKD
    sinks = sinks_H.float().view(1, -1, 1, 1).expand(*scores_nHLK.shape[:3], 1)
    probs_nHLK = torch.softmax(torch.cat([scores_nHLK, sinks], -1), -1)[..., :-1]
    return probs_nHLK.to(v_nHKD.dtype) @ v_nHKD


def _repeat_heads(q_nHLD: Tensor, k_nGKD: Tensor, v_nGKD: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values repeated for each query head."""
    repeat = q_nHLD.shape[1] // k_nGKD.shape[1]
    return k_nGKD.repeat_interleave(repeat, 1), v_nGKD.repeat_interleave(repeat, 1)


class _AllTokens:
    """Passed to an indexer in place of a mask, and returned as its selection."""

    def __getitem__(self, key: object) -> _AllTokens:
        return self


ALL_TOKENS = _AllTokens()


def select_all_tokens(decoder: nn.Module) -> None:
    """Let the plan decide what rows see in sparse attention (DeepSeek-V3.2, GLM-5). The indexer selects the
    `index_topk` best earlier tokens, which are all tokens in sequences up to that length. With a mask, as in the
    model's own forward, indexers are unchanged.
    """
    for module in decoder.modules():
        if hasattr(module, "indexer") and _kind_of_layer(module) == INDEXED:
            module.forward = partial(_forward_without_mask, module.forward)
            if isinstance(module.indexer, nn.Module):
                module.indexer.forward = partial(_select_all_tokens, module.indexer.forward)


def _forward_without_mask(forward: Callable[..., object], *args: object, **kwargs: object) -> object:
    if kwargs.get("attention_mask") is None:
        kwargs["attention_mask"] = ALL_TOKENS
    return forward(*args, **kwargs)


def _select_all_tokens(forward: Callable[..., object], *args: object, **kwargs: object) -> object:
    return ALL_TOKENS if any(arg is ALL_TOKENS for arg in args) else forward(*args, **kwargs)


def scale_queries(decoder: nn.Module) -> None:
    """Scale queries by the positions of packed rows in the layers without RoPE of Llama 4, which would count the rows
    of a call. These layers neither rotate nor normalise queries, so their projection's output is scaled.
    """
    for layer in decoder.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
            scale = _QueryScale(attention)
            # No hook: it would run again when activations are recomputed.
            layer.forward = partial(scale.record_positions, layer.forward)
            attention.register_forward_pre_hook(scale.choose_scaling, with_kwargs=True)
            attention.q_proj.register_forward_hook(scale.apply)


class _QueryScale:
    def __init__(self, attention: Any) -> None:  # noqa: ANN401
        self._attention = attention
        self._floor: float = attention.floor_scale
        self._scale: float = attention.attn_scale
        self._positions = torch.empty(0)

    def record_positions(self, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        self._positions = cast(Tensor, kwargs["position_ids"])
        return forward(*args, **kwargs)

    def choose_scaling(self, attention: nn.Module, args: object, kwargs: dict[str, object]) -> None:
        """With a mask, as in the model's own forward, the layer scales its queries itself."""
        self._attention.attn_temperature_tuning = kwargs.get("attention_mask") is not None

    def apply(self, linear: nn.Module, args: object, y_1TO: Tensor) -> Tensor:
        if self._attention.attn_temperature_tuning:
            return y_1TO
        steps_1T = torch.floor((self._positions.float() + 1.0) / self._floor)
        return (y_1TO * (torch.log1p(steps_1T) * self._scale + 1.0)[..., None]).to(y_1TO.dtype)


def register_attention() -> None:
    """Register the attention implementation `tinsmith`, without a mask function: the plan makes the masks."""
    AttentionInterface.register(ATTENTION_NAME, _dispatch)


def _dispatch(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """transformers' calling convention: [1, H, T, D] in, [1, T, H, D] out."""
    plan = cast("AttentionPlan | None", kwargs.pop(PLAN_KEY, None))
    if getattr(module, "is_causal", True) is False:
        raise SettingsError(f"{type(module).__name__} attends to later tokens; only causal models are supported")
    if kwargs.get("indices") is ALL_TOKENS:
        attention_mask = kwargs["indices"] = None
    if plan is None or attention_mask is not None:
        raise SettingsError(f"{type(module).__name__} does not pass on the attention plan or builds its own mask")
    options = _options(module, query, kwargs)
    rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return plan.attend(cast(int, module.layer_idx), *rows, **options)[None], None


def attention_chunk(module: nn.Module) -> Window | None:
    """The chunk of a layer whose own mask has chunks, which transformers does not pass to attention (Llama 4)."""
    config: Any = getattr(module, "config", None)
    return Window(config.attention_chunk_size, chunked=True) if _kind_of_layer(module) == CHUNKED else None


def _kind_of_layer(attention: nn.Module) -> str | None:
    """None where the configuration does not tell layers apart."""
    kinds: Sequence[str] | None = getattr(getattr(attention, "config", None), "layer_types", None)
    return kinds[cast(int, attention.layer_idx)] if kinds else None


def _options(module: nn.Module, query: Tensor, kwargs: dict[str, object]) -> AttentionOptions:
    scale, size = kwargs.pop("scaling", None), kwargs.pop("sliding_window", None)
    options = cast(
        AttentionOptions,
        {
            "scale": query.shape[-1] ** -0.5 if scale is None else scale,
            "window": attention_chunk(module) if size is None else Window(cast(int, size)),
            "softcap": kwargs.pop("softcap", None),
            "sinks_H": kwargs.pop("s_aux", None),
        },
    )
    kwargs.pop("dropout", None)
    unknown = sorted(k for k, v in kwargs.items() if v is not None and k not in _HARMLESS_KEYWORDS)
    if unknown:
        raise SettingsError(f"{type(module).__name__} passes unsupported options to attention: {', '.join(unknown)}")
    return options
