"""Sampling whose every bit is the request's own: whoever runs beside it, however its prompt is cut, whatever the cache
holds.

A kernel adds in an order that it chooses by the shape it is given. So the model always sees the same shape: `rows`
rows, all of one adapter, the last piece of a step filled up with copies of its last row. Each row attends by itself,
to as many cached positions as its own position says, rounded up, in float32; prompts and answers go the same way, so
that it does not matter who filled a block. Tokens are drawn row by row.

What is left to the kernels is that a row's numbers do not depend on its place among the rows. `Rowwise.check` tries
that on the model itself. Where it does not hold, and with routed experts, which meet as many rows as happen to
choose them, rows go one at a time, which needs nothing but that the same call gives the same bits.

Letters: T rows, n rows of a piece or group, H query heads, G key heads, R = H / G, K cached positions padded, C blocks
of a table, D a size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, cast

import numpy as np
import structlog
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tinsmith.backends.torch.adapters import Adapter, initialise, layout_for
from tinsmith.backends.torch.lora_ops import Routing, Segment
from tinsmith.backends.torch.memory import MemoryManager
from tinsmith.backends.torch.model import BaseModel
from tinsmith.errors import SettingsError
from tinsmith.samplers.local.adjusting import adjust
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions, draws_of
from tinsmith.samplers.local.kv_cache import KVCache, layer_shapes
from tinsmith.samplers.local.sampling import choose
from tinsmith.samplers.local.scheduler import Span, Step
from tinsmith.types import LoraSpec

log = structlog.get_logger()

ROWS = 16
"""Fewer waste less where few sequences run, more cost less where many do; from here on oneDNN multiplies."""

KEYS = 64
MANY_KEYS = 512
"""Cached positions are rounded up to a power of two from KEYS to MANY_KEYS, then to multiples of that."""


PROBE = 20
"""Positions of the check: more than a piece has rows."""


class Row(NamedTuple):
    """One token on its way through the model: its sequence's blocks hold all before it."""

    token: int
    position: int
    blocks: Seq[int]
    adapter: Adapter | None


class _Group(NamedTuple):
    """Rows that look at equally many cached positions."""

    rows_n: Tensor
    blocks_nC: Tensor
    positions_n: Tensor
    masks: dict[int | None, Tensor]


class RowsPlan:
    """The AttentionPlan of one piece: rows beyond `rows` are copies of the last, and get its result."""

    def __init__(self, cache: KVCache, rows: Seq[Row], device: torch.device) -> None:
        self._cache = cache
        self._device = device
        size = cache.block_size
        self._num = len(rows)
        slots = [row.blocks[row.position // size] * size + row.position % size for row in rows]
        self._slots_n = torch.tensor(slots, device=device)
        by_width: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            by_width.setdefault(-(-_padded(row.position + 1) // size), []).append(index)
        self._groups = [self._group(rows, members, width) for width, members in by_width.items()]

    def _group(self, rows: Seq[Row], members: list[int], width: int) -> _Group:
        table_nC = np.zeros((len(members), width), np.int64)
        for at, index in enumerate(members):
            blocks = rows[index].blocks[:width]
            table_nC[at, : len(blocks)] = blocks
        positions = [rows[index].position for index in members]
        return _Group(
            torch.tensor(members, device=self._device),
            torch.from_numpy(table_nC).to(self._device),
            torch.tensor(positions, device=self._device),
            {},
        )

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        self._cache.write(layer, self._slots_n, k_TGD[: self._num], v_TGD[: self._num])
        out_THD = q_THD.new_empty(*q_THD.shape[:2], v_TGD.shape[2])
        for group in self._groups:
            q_nHD = q_THD.index_select(0, group.rows_n).float()
            k_nGKD, v_nGKD = (x.float() for x in self._cache.read(layer, group.blocks_nC))
            mask_nK = self._mask(group, window, k_nGKD.shape[2])
            if len(q_nHD) * k_nGKD.shape[1] == 1:
                # A lone head would be computed by all threads together, two by one each.
                q_nHD, k_nGKD, v_nGKD, mask_nK = (torch.cat((x, x)) for x in (q_nHD, k_nGKD, v_nGKD, mask_nK))
            part_nHD = _attend(q_nHD, k_nGKD, v_nGKD, mask_nK, scale, softcap, sinks_H)
            out_THD.index_copy_(0, group.rows_n, part_nHD[: len(group.rows_n)].to(out_THD.dtype))
        out_THD[self._num :] = out_THD[self._num - 1]
        return out_THD

    def _mask(self, group: _Group, window: int | None, num_keys: int) -> Tensor:
        """[n, K]: 0 where a row sees a position, else -inf."""
        if window not in group.masks:
            key_K = torch.arange(num_keys, device=self._device)
            row_n1 = group.positions_n[:, None]
            hidden_nK = key_K > row_n1
            if window is not None:
                hidden_nK |= key_K <= row_n1 - window
            mask_nK = torch.zeros(hidden_nK.shape, device=self._device)
            group.masks[window] = mask_nK.masked_fill_(hidden_nK, float("-inf"))
        return group.masks[window]


def _padded(num_keys: int) -> int:
    if num_keys > MANY_KEYS:
        return -(-num_keys // MANY_KEYS) * MANY_KEYS
    return max(KEYS, 1 << (num_keys - 1).bit_length())


def _attend(
    q_nHD: Tensor,
    k_nGKD: Tensor,
    v_nGKD: Tensor,
    mask_nK: Tensor,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """[n, H, D]"""
    num, num_heads, _ = q_nHD.shape
    q_nGRD = q_nHD.view(num, k_nGKD.shape[1], -1, q_nHD.shape[2])
    mask_n11K = mask_nK[:, None, None]
    if softcap is None and sinks_H is None:
        out_nGRD = scaled_dot_product_attention(q_nGRD, k_nGKD, v_nGKD, mask_n11K, scale=scale)
        return out_nGRD.reshape(num, num_heads, -1)
    scores_nGRK = q_nGRD @ k_nGKD.transpose(2, 3) * scale
    if softcap is not None:
        scores_nGRK = softcap * torch.tanh(scores_nGRK / softcap)
    scores_nGRK = scores_nGRK + mask_n11K
    if sinks_H is None:
        return (torch.softmax(scores_nGRK, -1) @ v_nGKD).reshape(num, num_heads, -1)
    sinks = sinks_H.float().view(1, k_nGKD.shape[1], -1, 1).expand(*scores_nGRK.shape[:3], 1)
    probs_nGRK = torch.softmax(torch.cat([scores_nGRK, sinks], -1), -1)[..., :-1]
    return (probs_nGRK @ v_nGKD).reshape(num, num_heads, -1)


class Rowwise:
    """A base model whose rows go through in pieces of `rows`; everything else of it is as it was."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self.rows = 1 if _has_experts(base) else ROWS

    def __getattr__(self, name: str) -> object:
        return getattr(self._base, name)

    def compute(self, cache: KVCache, rows: Seq[Row]) -> Tensor:
        """[T, D]: final hidden states; a row's keys and values are in the cache before a later row is computed."""
        return torch.cat([self._piece(cache, piece) for piece in self._pieces(rows)])

    def logits(self, hidden_TD: Tensor, routing: Routing) -> Tensor:
        """[T, V] float32."""
        found = []
        for segment in routing.segments:
            whole = Routing([Segment(0, self.rows, segment.adapter)])
            for start in range(segment.start, segment.stop, self.rows):
                own_nD = hidden_TD[start : min(start + self.rows, segment.stop)]
                fill = own_nD[-1:].expand(self.rows - len(own_nD), -1)
                found.append(self._base.logits(torch.cat((own_nD, fill)), whole)[: len(own_nD)])
        return torch.cat(found)

    def _pieces(self, rows: Seq[Row]) -> Iterator[Seq[Row]]:
        start = 0
        for index in range(1, len(rows) + 1):
            if index == len(rows) or index - start == self.rows or rows[index].adapter is not rows[start].adapter:
                yield rows[start:index]
                start = index

    def _piece(self, cache: KVCache, piece: Seq[Row]) -> Tensor:
        device = self._base.device
        filled = [*piece, *[piece[-1]] * (self.rows - len(piece))]
        tokens_T = torch.tensor([row.token for row in filled], device=device)
        positions_T = torch.tensor([row.position for row in filled], device=device)
        routing = Routing([Segment(0, self.rows, piece[0].adapter)])
        plan = RowsPlan(cache, piece, device)
        return self._base.hidden(tokens_T, positions_T, plan, routing)[: len(piece)]

    @torch.inference_mode()
    def check(self) -> None:
        """Go down to one row at a time where a row's place changes its bits. Raises SettingsError if bits change from
        call to call.
        """
        if self.rows > 1 and not self._holds():
            log.warning("rows depend on their place here, so they go one at a time, which is slow", rows=self.rows)
            self.rows = 1
        if self.rows == 1 and not self._holds():
            raise SettingsError("the same rows give other bits from call to call on this machine: not deterministic")

    def _holds(self) -> bool:
        """Whether rows alone, at other places in company, and beside their likes have the same bits."""
        adapter = _probe(self._base)
        cache = KVCache(layer_shapes(self._base), PROBE, self._base.device)
        cache.resize(3 + ROWS)  # block 0 is the null block
        tokens = [7 * i % self._base.shape.vocab_size for i in range(PROBE)]
        first = [Row(token, i, [1], adapter) for i, token in enumerate(tokens)]
        second = [Row(token, i, [2], adapter) for i, token in enumerate(tokens[:7])]
        alone_TD = torch.cat([self.compute(cache, [row]) for row in first])
        both_TD = self.compute(cache, [*second, *first])
        if not self._equal(alone_TD, both_TD[len(second) :], adapter):
            return False
        for token in tokens[:4]:
            twins = [Row(token, 0, [3 + i], adapter) for i in range(ROWS)]
            twins_TD = self.compute(cache, twins)
            if not self._equal(twins_TD[:1].expand_as(twins_TD), twins_TD, adapter):
                return False
        return True

    def _equal(self, expected_TD: Tensor, found_TD: Tensor, adapter: Adapter) -> bool:
        expected_TV = torch.cat([self.logits(row[None], Routing([Segment(0, 1, adapter)])) for row in expected_TD])
        found_TV = self.logits(found_TD, Routing([Segment(0, len(found_TD), adapter)]))
        return torch.equal(expected_TD, found_TD) and torch.equal(expected_TV, found_TV)


def _probe(base: BaseModel) -> Adapter:
    spec = LoraSpec(rank=8)
    layout = layout_for(spec, base.adaptable())
    flat_P = initialise(layout, 0, base.device)
    for _, b_Or in layout.views(flat_P).values():
        b_Or.copy_(torch.linspace(-0.01, 0.01, b_Or.numel(), device=base.device).view_as(b_Or))
    return Adapter(spec, layout, flat_P, base.dtype)


def _has_experts(base: BaseModel) -> bool:
    return any("expert" in name for name, _ in base.model.named_modules())


class DeterministicSampler(LocalSampler):
    """Batches as its parent does, and computes each sequence as if it were alone."""

    def __init__(
        self,
        base: BaseModel,
        versions: Mapping[str, Adapter],
        *,
        options: SamplerOptions | None = None,
        memory: MemoryManager | None = None,
    ) -> None:
        self._rowwise = Rowwise(base)
        self._rowwise.check()
        super().__init__(cast(BaseModel, self._rowwise), versions, options=options, memory=memory)

    def _run(self, step: Step) -> None:
        self._prepare(step)
        spans = sorted(step.spans, key=lambda span: span.sequence.request.weights.number)
        rows = [
            Row(int(span.sequence.tokens_T[at]), at, span.sequence.blocks, span.sequence.request.weights.adapter)
            for span in spans
            for at in range(span.start, span.stop)
        ]
        hidden_TD = self._rowwise.compute(self._cache, rows)
        for span in spans:
            self._batcher.advance(span)
        whole = [(span, span.stop - span.start) for span in spans]
        self._sample(self._score(whole, hidden_TD), hidden_TD)

    def _sample(self, spans: Seq[tuple[Span, int]], hidden_TD: Tensor) -> None:
        if not spans:
            return
        rows = torch.tensor([row for _, row in spans], device=hidden_TD.device)
        routing = Routing.of([span.sequence.request.weights.adapter for span, _ in spans], [1] * len(spans))
        logits_BV = self._rowwise.logits(hidden_TD.index_select(0, rows), routing)
        for (span, _), logits_V in zip(spans, logits_BV, strict=True):
            for sequence in [span.sequence, *self._fork(span.sequence)]:
                row_1V = logits_V[None].clone()
                self._append([sequence], choose(row_1V, draws_of([sequence]), adjust(row_1V, [sequence])))
