"""Attention over rows that belong to different sequences: what a model's layers call instead of their own
kernel.

`register` teaches transformers one attention function, which hands the rows of every layer to the
`AttentionPlan` of the call in progress. Training uses `PackedCausal`; a sampler brings a plan with its own
cache. No plan may mix rows of two sequences, not even under a mask of zeros: 0 * NaN is NaN, and the
sequences may be two tenants'.

Shapes: T rows, H query heads, G key heads, D head dim, n sequences of one group padded to L; N = n * G, and R the H / G
query heads of a key head with their L rows each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol, Required, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from tinsmith.errors import SettingsError

ATTENTION_NAME = "tinsmith"
PLAN_KEY = "tinsmith_plan"

_UNDERSTOOD = frozenset(
    {
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "is_causal",
    }
)
"""Keywords that a layer passes on and that do not change what a causal plan computes."""

MAX_WASTE = 0.25
"""A sequence joins a group of longer ones only if at most this share of its row is padding (or 16 rows)."""


class AttentionOptions(TypedDict, total=False):
    """`softcap` c turns scores s into c * tanh(s / c); `sinks_H` adds one logit per head to the softmax's sum."""

    scale: Required[float]
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None


class AttentionPlan(Protocol):
    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        """[T, H, D]. Row i sees row j of its own sequence if 0 <= i - j (and i - j < window)."""
        ...

    def mix(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        """[T, D]: a layer that keeps a state instead of keys and values, over each sequence by itself."""
        ...


class MixerState(NamedTuple):
    """What a layer keeps of n sequences: the last inputs of its convolution [n, C, K], and its recurrent state
    [n, ...]. None: the layer has no such part.
    """

    conv: Tensor | None
    recurrent: Tensor | None


class Mixer(Protocol):
    """A layer with a state; `recurrent.SequenceMixer` is what implements it."""

    layer: int

    def __call__(
        self, x_nLD: Tensor, starts: tuple[int, ...], state: MixerState | None = None, *, keep: bool = False
    ) -> tuple[Tensor, MixerState | None]:
        """[n, L, D], and the state behind the last of the L rows if `keep`. `starts`: the row of the call in progress
        at which each sequence begins, which says whose adapter is applied. `state` None: sequences begin here.
        """
        ...


class ProbedAttention(NamedTuple):
    """What a layer asks of attention: the sizes and dtype of what it would cache for a row, and how to attend."""

    num_keys: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    options: AttentionOptions


class AttentionProbe:
    """An AttentionPlan of one sequence that attends to nothing and notes, by layer, what is asked each time and which
    states are kept.
    """

    def __init__(self) -> None:
        self.asked: dict[int, list[ProbedAttention]] = {}
        self.kept: dict[int, list[MixerState]] = {}

    @property
    def windows(self) -> dict[int, list[int | None]]:
        return {layer: [each.options.get("window") for each in asked] for layer, asked in self.asked.items()}

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        asked = ProbedAttention(k_TGD.shape[1], k_TGD.shape[2], v_TGD.shape[2], k_TGD.dtype, options)
        self.asked.setdefault(layer, []).append(asked)
        return q_THD.new_zeros(*q_THD.shape[:2], v_TGD.shape[2])

    def mix(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        y_1LD, state = mixer(x_TD[None], (0,), keep=True)
        assert state is not None
        self.kept.setdefault(mixer.layer, []).append(state)
        return y_1LD[0]


class PackedCausal:
    """Whole sequences one after the other in one row, each causal within itself.

    Sequences of similar length share one batched kernel call, padded on the right with rows of their own,
    whose results and gradients are dropped.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._groups = _grouped(lengths, torch.device(device))
        self._order = None
        if len(self._groups) > 1 or self._groups[0].rows is not None:
            kept = torch.cat([_own_rows(group, torch.device(device)) for group in self._groups])
            if not torch.equal(kept, torch.arange(len(kept), device=device)):
                self._order = torch.argsort(kept)
        self._masks: dict[tuple[int, int], Tensor] = {}

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        outputs = []
        for group in self._groups:
            q_nHLD, k_nGLD, v_nGLD = (_padded(x, group) for x in (q_THD, k_TGD, v_TGD))
            mask = self._mask(group.length, options.get("window"), q_THD)
            outputs.append(_unpadded(prefill(q_nHLD, k_nGLD, v_nGLD, mask, **options), group))
        return self._in_order(outputs)

    def mix(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        outputs = []
        for group in self._groups:
            x_nLD = _padded(x_TD[:, None], group)[:, 0]
            y_nLD, _ = mixer(x_nLD, group.starts)
            outputs.append(_unpadded(y_nLD[:, None], group))
        return self._in_order(outputs)[:, 0]

    def _in_order(self, outputs: Sequence[Tensor]) -> Tensor:
        out_THD = outputs[0] if len(outputs) == 1 else torch.cat(list(outputs))
        return out_THD if self._order is None else _Select.apply(out_THD, self._order)

    def _mask(self, length: int, window: int | None, q_THD: Tensor) -> Tensor | None:
        """[L, L] 0 where a row may look, -inf elsewhere; None if it is causal alone. Made once for all layers."""
        if window is None or length <= window:
            return None
        if (length, window) not in self._masks:
            self._masks[length, window] = causal_mask(length, window, q_THD)
        return self._masks[length, window]


class _Group(NamedTuple):
    """Sequences that share a kernel call. `rows` None: rows from the first start on are n sequences of L already side
    by side.
    """

    starts: tuple[int, ...]
    length: int
    rows: Tensor | None  # [n * L] source row of each padded cell
    kept: Tensor | None  # [rows of the group] padded cell of each real row

    @property
    def num_sequences(self) -> int:
        return len(self.starts)

    @property
    def start(self) -> int:
        return self.starts[0]


def _grouped(lengths: Sequence[int], device: torch.device) -> list[_Group]:
    starts = [0, *accumulate(lengths)]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    buckets: list[list[int]] = []
    for i in order:
        longest = lengths[buckets[-1][0]] if buckets else 0
        if buckets and longest - lengths[i] <= max(16, MAX_WASTE * longest):
            buckets[-1].append(i)
        else:
            buckets.append([i])
    groups = []
    for bucket in buckets:
        bucket.sort()
        count, length = len(bucket), lengths[bucket[0]]
        own = tuple(starts[i] for i in bucket)
        side_by_side = bucket[-1] - bucket[0] == count - 1
        if side_by_side and all(lengths[i] == length for i in bucket):
            groups.append(_Group(own, length, None, None))
            continue
        length = max(lengths[i] for i in bucket)
        start_n = torch.tensor(own)[:, None]
        size_n = torch.tensor([lengths[i] for i in bucket])[:, None]
        cell_L = torch.arange(length)[None, :]
        rows_nL = start_n + torch.minimum(cell_L, size_n - 1)
        kept = (cell_L < size_n).flatten().nonzero().flatten()
        groups.append(_Group(own, length, rows_nL.flatten().to(device), kept.to(device)))
    return groups


def _own_rows(group: _Group, device: torch.device) -> Tensor:
    if group.rows is None:
        return torch.arange(group.start, group.start + group.num_sequences * group.length, device=device)
    assert group.kept is not None
    return group.rows[group.kept]


def _padded(x_THD: Tensor, group: _Group) -> Tensor:
    """[n, H, L, D]"""
    num_cells = group.num_sequences * group.length
    if group.rows is None:
        # Of a slice, even of all rows, the gradient is a copy among zeros.
        rows = x_THD if num_cells == len(x_THD) else x_THD[group.start : group.start + num_cells]
    else:
        rows = _Pad.apply(x_THD, group.rows, group.kept)
    return rows.view(group.num_sequences, group.length, *x_THD.shape[1:]).transpose(1, 2)


def _unpadded(out_nHLD: Tensor, group: _Group) -> Tensor:
    rows = out_nHLD.transpose(1, 2).flatten(0, 1)
    return rows if group.kept is None else _Unpad.apply(rows, group.kept)


class _Pad(torch.autograd.Function):
    """Rows to padded cells; the cells that pad get no gradient, so backward is a plain scatter of the
    others.
    """

    @staticmethod
    def forward(ctx, x: Tensor, rows: Tensor, kept: Tensor) -> Tensor:
        ctx.rows, ctx.kept, ctx.num_rows = rows, kept, x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        full = grad.new_zeros(ctx.num_rows, *grad.shape[1:])
        return full.index_copy_(0, ctx.rows[ctx.kept], grad.index_select(0, ctx.kept)), None, None


class _Unpad(torch.autograd.Function):
    """Padded cells to rows: the inverse of `_Pad`."""

    @staticmethod
    def forward(ctx, x: Tensor, kept: Tensor) -> Tensor:
        ctx.kept, ctx.num_cells = kept, x.shape[0]
        return x.index_select(0, kept)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        full = grad.new_zeros(ctx.num_cells, *grad.shape[1:])
        return full.index_copy_(0, ctx.kept, grad), None


class _Select(torch.autograd.Function):
    """A permutation of rows; its backward copies where autograd's own would add atomically."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor) -> Tensor:
        ctx.order = order
        return x.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.empty_like(grad).index_copy_(0, ctx.order, grad), None


def causal_mask(length: int, window: int | None, like: Tensor) -> Tensor:
    """[L, L] 0 where a row sees another, -inf elsewhere."""
    mask_LL = torch.full((length, length), float("-inf"), dtype=like.dtype, device=like.device).triu_(1)
    if window is not None:
        mask_LL += torch.full_like(mask_LL, float("-inf")).tril_(-window)
    return mask_LL


def prefill(
    q_nHLD: Tensor, k_nGKD: Tensor, v_nGKD: Tensor, mask: Tensor | None, **options: Unpack[AttentionOptions]
) -> Tensor:
    """[n, H, L, D]. The mask, [.., L, K], is added to scores, and windows are in it; None: causal, L = K."""
    if options.get("softcap") is not None or options.get("sinks_H") is not None:
        return reference(q_nHLD, k_nGKD, v_nGKD, mask, **options)
    if mask is not None and q_nHLD.is_cuda:
        # With a mask, CUDA's fused kernels want as many key heads as query heads.
        k_nGKD, v_nGKD = _repeated(q_nHLD, k_nGKD, v_nGKD)
    return nn.functional.scaled_dot_product_attention(
        q_nHLD, k_nGKD, v_nGKD, mask, is_causal=mask is None, scale=options["scale"],
        enable_gqa=q_nHLD.shape[1] != k_nGKD.shape[1],
    )  # fmt: skip


def decode(q_nHD: Tensor, k_nGKD: Tensor, v_nGKD: Tensor, mask: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
    """[n, H, D]: one row a sequence."""
    if options.get("softcap") is not None or options.get("sinks_H") is not None:
        return reference(q_nHD[:, :, None], k_nGKD, v_nGKD, mask, **options)[:, :, 0]
    # Query heads of one key head act as its rows: keys are read once for all of them, and never repeated.
    q_nGRD = q_nHD.unflatten(1, (k_nGKD.shape[1], -1))
    return nn.functional.scaled_dot_product_attention(q_nGRD, k_nGKD, v_nGKD, mask, scale=options["scale"]).flatten(
        1, 2
    )


def reference(
    q_nHLD: Tensor, k_nGKD: Tensor, v_nGKD: Tensor, mask: Tensor | None, **options: Unpack[AttentionOptions]
) -> Tensor:
    """The same in plain arithmetic: the oracle, and what is used for capped scores and sinks."""
    k_nHKD, v_nHKD = _repeated(q_nHLD, k_nGKD, v_nGKD)
    scores_nHLK = (q_nHLD @ k_nHKD.transpose(2, 3)).float() * options["scale"]
    if (softcap := options.get("softcap")) is not None:
        scores_nHLK = softcap * torch.tanh(scores_nHLK / softcap)
    scores_nHLK = scores_nHLK + (causal_mask(q_nHLD.shape[2], None, scores_nHLK) if mask is None else mask)
    if (sinks_H := options.get("sinks_H")) is None:
        return torch.softmax(scores_nHLK, -1).to(v_nHKD.dtype) @ v_nHKD
    sinks = sinks_H.float().view(1, -1, 1, 1).expand(*scores_nHLK.shape[:3], 1)
    probs_nHLK = torch.softmax(torch.cat([scores_nHLK, sinks], -1), -1)[..., :-1]
    return probs_nHLK.to(v_nHKD.dtype) @ v_nHKD


def _repeated(q_nHLD: Tensor, k_nGKD: Tensor, v_nGKD: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of each query head."""
    repeat = q_nHLD.shape[1] // k_nGKD.shape[1]
    return k_nGKD.repeat_interleave(repeat, 1), v_nGKD.repeat_interleave(repeat, 1)


def register() -> None:
    """Make the name `tinsmith` an attention implementation. It has no mask function: masks are the plan's
    affair.
    """
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
        raise SettingsError(f"{type(module).__name__} attends to later tokens, too; only causal models are served")
    if plan is None or attention_mask is not None:
        raise SettingsError(f"{type(module).__name__} does not hand on the attention plan or builds its own mask")
    options = _options(module, query, kwargs)
    rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return plan.attend(cast(int, module.layer_idx), *rows, **options)[None], None


def _options(module: nn.Module, query: Tensor, kwargs: dict[str, object]) -> AttentionOptions:
    scale = kwargs.pop("scaling", None)
    options = cast(
        AttentionOptions,
        {
            "scale": query.shape[-1] ** -0.5 if scale is None else scale,
            "window": kwargs.pop("sliding_window", None),
            "softcap": kwargs.pop("softcap", None),
            "sinks_H": kwargs.pop("s_aux", None),
        },
    )
    kwargs.pop("dropout", None)
    unknown = sorted(k for k, v in kwargs.items() if v is not None and k not in _UNDERSTOOD)
    if unknown:
        raise SettingsError(f"{type(module).__name__} asks attention for {', '.join(unknown)}, which is unknown here")
    return options
