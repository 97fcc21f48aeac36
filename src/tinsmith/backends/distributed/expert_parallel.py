"""Expert parallelism: the routed experts of a mixture spread over ranks, each with 1/E of them.

A rank routes its own rows. Each row goes once for each expert that it chose to the rank that has this expert, with the
router's weight (an all-to-all of unequal parts), is multiplied there, and comes back to be added to the row's others.
Router, attention, shared experts and dense layers stay as they are. Ranks of a tensor group hold the same rows, so each
sends its share of them and they gather the results.

A received row is multiplied by `moe.MultiLoRAExperts`, as a row that chose one expert, with the adapter of the rank
that sent it: before a forward all ranks agree on an order of adapters (`TokenExchange.adapters`), which may include
some that a rank's own rows do not use. Counts by rank, adapter and expert go first, so nothing else describes a row.

Every rank of a group takes part in each exchange of a forward, and in its reverse in backward, with or without rows.
The ranks of a group are of one stage; a stage without experts exchanges nothing. An expert's gradient is complete on
the ranks that have it, over the rows that they received; the matrices that all experts share have addends on every rank
of the stage. Both are counted once by a sum over all ranks.

Shapes: n rows of a rank, k experts of each, N = n * k pairs, M received pairs, E expert ranks, A adapters and the base
model, X experts of a rank, D hidden size, T rows of a tensor group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tinsmith.backends.distributed.ranks import Ranks
from tinsmith.backends.torch.adapters import Adapter, Target
from tinsmith.backends.torch.host import read, upload
from tinsmith.backends.torch.lora import ForwardContext, anchor
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.backends.torch.moe import MultiLoRAExperts, PairOrder
from tinsmith.errors import SettingsError


class TokenExchange:
    """Shared by all layers of a model. Set `adapters` before a forward: the same ones on every rank, in one order."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.adapters: Sequence[Adapter] = ()

    def numbers(self, lora_batch: LoRABatch) -> np.ndarray:
        """[n]: the number of each row's adapter; 0 is the base model."""
        known = {id(adapter): number for number, adapter in enumerate(self.adapters, 1)}
        segments = lora_batch.segments
        return np.repeat(
            [0 if segment.adapter is None else known[id(segment.adapter)] for segment in segments],
            [segment.stop - segment.start for segment in segments],
        )

    def rows_of_tensor_rank(self, num_rows: int) -> slice:
        """The rows of a tensor group that this rank sends."""
        share = -(-num_rows // self.ranks.degrees.tensor)
        start = min(self.ranks.tensor_index * share, num_rows)
        return slice(start, min(start + share, num_rows))


class ExchangedRows:
    """How the pairs of one call go to the ranks of their experts and back. Constructed by all ranks of a group."""

    def __init__(self, exchange: TokenExchange, index_nk: Tensor, adapter_n: Tensor, num_experts: int) -> None:
        """`num_experts` of each rank."""
        self._ranks = exchange.ranks
        num_ranks, self.num_choices = self._ranks.degrees.experts, index_nk.shape[1]
        kinds = (1 + len(exchange.adapters)) * num_experts
        rank_nk, own_nk = index_nk // num_experts, index_nk % num_experts
        key_N = (rank_nk * kinds + adapter_n[:, None] * num_experts + own_nk).reshape(-1)
        self.sent = PairOrder.by(key_N)
        counts_EK = torch.zeros(num_ranks * kinds, dtype=torch.int64, device=key_N.device)
        counts_EK = counts_EK.scatter_add_(0, key_N, torch.ones_like(key_N)).view(num_ranks, kinds)
        received_EK = self._ranks.exchange_experts(counts_EK)
        sent, received = read(counts_EK, received_EK)
        self._num_sent, self._num_received = sent.sum(1).tolist(), received.sum(1).tolist()
        self.num_rows = int(received.sum())
        # Received from one rank after the other, each sorted by adapter and expert.
        kind_EK = torch.arange(kinds, device=key_N.device).repeat(num_ranks)
        kind_M = torch.repeat_interleave(kind_EK, received_EK.reshape(-1), output_size=self.num_rows)
        self.sorted = PairOrder.by(kind_M)
        self.index_M1 = kind_M.index_select(0, self.sorted.pair_N)[:, None] % num_experts
        by_adapter = received.reshape(num_ranks, -1, num_experts).sum((0, 2)).tolist()
        found = [(adapter, count) for adapter, count in zip((None, *exchange.adapters), by_adapter, strict=True)
                 if count]  # fmt: skip
        self.lora_batch = LoRABatch.of((adapter for adapter, _ in found), (count for _, count in found))

    def by_rank(self, x_nC: Tensor) -> Tensor:
        """[N, C]: each row once for each of its experts, sorted by rank."""
        return x_nC.index_select(0, self.sent.pair_N // self.num_choices)

    def to_experts(self, x_NC: Tensor) -> Tensor:
        """[M, C], sorted by adapter, of pairs sorted by rank."""
        received_MC = self._ranks.exchange_experts(x_NC, self._num_sent, self._num_received)
        return received_MC.index_select(0, self.sorted.pair_N)

    def to_rows(self, x_MC: Tensor) -> Tensor:
        """The inverse: [N, C], in the order of rows and their choices."""
        sorted_MC = x_MC.index_select(0, self.sorted.sorted_N)
        returned_NC = self._ranks.exchange_experts(sorted_MC, self._num_received, self._num_sent)
        return returned_NC.index_select(0, self.sent.sorted_N)

    def combine(self, x_NC: Tensor) -> Tensor:
        """[n, C]: the sum over each row's choices."""
        return x_NC.view(-1, self.num_choices, x_NC.shape[-1]).sum(1)


class SpreadExperts(MultiLoRAExperts):
    """This rank's experts of a module; `full_targets` are those of the whole module."""

    def __init__(self, own: MultiLoRAExperts, context: ForwardContext, exchange: TokenExchange) -> None:
        self.full_targets = own.targets
        degree = exchange.ranks.degrees.experts
        if own.num_experts % degree:
            raise SettingsError(
                f"expert_parallel is {degree}, and {own.name} has {own.num_experts} experts, which {degree} does not "
                "divide; choose a divisor"
            )
        share = own.num_experts // degree
        self.part = slice(exchange.ranks.expert_index * share, (exchange.ranks.expert_index + 1) * share)
        module = own.module
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach()[self.part].clone(), requires_grad=False))
        super().__init__(own.name, module, context)
        self._exchange = exchange

    def forward(self, hidden_TD: Tensor, *choices: Tensor) -> Tensor:
        index_Tk, weights_Tk = choices
        lora_batch, exchange = self._context.lora_batch, self._exchange
        assert lora_batch is not None and hidden_TD.shape == (lora_batch.num_rows, self.hidden_features)
        self._choices = index_Tk.shape[1]
        own = exchange.rows_of_tensor_rank(len(hidden_TD))
        adapter_T = upload(exchange.numbers(lora_batch), hidden_TD.device)
        hidden_nD, weights_nk = (_own_rows(x, own, exchange.ranks) for x in (hidden_TD, weights_Tk))
        rows = ExchangedRows(exchange, index_Tk[own], adapter_T[own], self.num_experts)
        sent = _ToExperts.apply(hidden_nD, weights_nk, anchor(hidden_TD.device), rows)
        hidden_MD, weights_M1 = cast("tuple[Tensor, Tensor]", sent)
        out_MD = hidden_MD
        if rows.num_rows:
            out_MD = self.forward_experts(hidden_MD, rows.index_M1, weights_M1, rows.lora_batch)
        return _all_rows(cast(Tensor, _ToRows.apply(out_MD, rows)), len(hidden_TD), exchange.ranks)


def check_experts(experts: Sequence[MultiLoRAExperts], ranks: Ranks, name: str) -> None:
    """Raises SettingsError if the whole model has none."""
    if not experts:
        raise SettingsError(
            f"expert_parallel is {ranks.degrees.experts}, and {name} has no routed experts; set it to 1"
        )


def spread(
    experts: Sequence[MultiLoRAExperts], decoder: nn.Module, context: ForwardContext, exchange: TokenExchange
) -> list[SpreadExperts]:
    """Replace each module of experts by this rank's part."""
    paths = {id(module): path for path, module in decoder.named_modules()}
    found = []
    for own in experts:
        found.append(SpreadExperts(own, context, exchange))
        parent, _, last = paths[id(own)].rpartition(".")
        setattr(decoder.get_submodule(parent), last, found[-1])
    return found


def parts(experts: Sequence[MultiLoRAExperts]) -> Iterator[tuple[Target, slice]]:
    """The targets of whole modules, and which of the experts this rank has."""
    for own in experts:
        if isinstance(own, SpreadExperts):
            yield from ((target, own.part) for target in own.full_targets)


class _ToExperts(torch.autograd.Function):
    """With the anchor the result requires a gradient on every rank, also on one without adapters so far or without
    rows: otherwise the others would wait for it in backward.
    """

    @staticmethod
    def forward(ctx, hidden_nD: Tensor, weights_nk: Tensor, anchor: Tensor, rows: ExchangedRows) -> tuple[Tensor, ...]:
        ctx.rows = rows
        weights_N1 = weights_nk.reshape(-1, 1).index_select(0, rows.sent.pair_N)
        return rows.to_experts(rows.by_rank(hidden_nD)), rows.to_experts(weights_N1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_MD: Tensor, grad_M1: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows: ExchangedRows = ctx.rows
        grad_nD, grad_N1 = rows.combine(rows.to_rows(grad_MD)), rows.to_rows(grad_M1)
        return grad_nD, grad_N1.view(-1, rows.num_choices), None, None


class _ToRows(torch.autograd.Function):
    """Saves a tensor, because a layer that runs again in backward does so when the first saved tensor is wanted, up to
    the last one: these are then the same on every rank, also on one that received no rows and saved none for them.
    """

    @staticmethod
    def forward(ctx, out_MD: Tensor, rows: ExchangedRows) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(out_MD.new_empty(0))
        return rows.combine(rows.to_rows(out_MD))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_nD: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _ = ctx.saved_tensors
        return ctx.rows.to_experts(ctx.rows.by_rank(grad_nD)), None


def _own_rows(x_TC: Tensor, own: slice, ranks: Ranks) -> Tensor:
    return x_TC if ranks.degrees.tensor == 1 else cast(Tensor, _OwnRows.apply(x_TC, own, ranks))


def _all_rows(x_nC: Tensor, num_rows: int, ranks: Ranks) -> Tensor:
    return x_nC if ranks.degrees.tensor == 1 else cast(Tensor, _AllRows.apply(x_nC, num_rows, ranks))


class _OwnRows(torch.autograd.Function):
    """A tensor rank's share of rows that all of its group hold."""

    @staticmethod
    def forward(ctx, x_TC: Tensor, own: slice, ranks: Ranks) -> Tensor:
        ctx.num_rows, ctx.ranks = len(x_TC), ranks
        return x_TC[own].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_nC: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _joined(grad_nC, ctx.num_rows, ctx.ranks), None, None


class _AllRows(torch.autograd.Function):
    """The inverse: all rows of the group, of every rank's share."""

    @staticmethod
    def forward(ctx, x_nC: Tensor, num_rows: int, ranks: Ranks) -> Tensor:
        ctx.num_own, ctx.share, ctx.index = len(x_nC), -(-num_rows // ranks.degrees.tensor), ranks.tensor_index
        return _joined(x_nC, num_rows, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TC: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        start = min(ctx.index * ctx.share, len(grad_TC))
        return grad_TC[start : start + ctx.num_own].contiguous(), None, None


def _joined(x_nC: Tensor, num_rows: int, ranks: Ranks) -> Tensor:
    """[T, C] of every tensor rank's [n, C]; the last ranks may have fewer rows."""
    share, width = -(-num_rows // ranks.degrees.tensor), x_nC.shape[1]
    padded = nn.functional.pad(x_nC, (0, 0, 0, share - len(x_nC)))
    return ranks.gather_tensor(padded.reshape(1, -1)).view(-1, width)[:num_rows]
