"""Expert parallelism: each rank has 1/E of the routed experts of a mixture.

A rank routes its local rows. Each row is sent once for each expert that it chose, with the router's weight, to the rank
of that expert (an all-to-all of unequal parts), which computes the expert's output and returns it; the rank adds the
outputs of a row. Router, attention, shared experts and dense layers are unchanged. Ranks of a tensor group hold the
same rows, so each sends its part of them and they gather the results.

`moe.MultiLoRAExperts` computes a received row as one that chose a single expert, with the adapter of the sender's row:
before a forward all ranks agree on an order of adapters (`TokenExchange.adapters`), which may include adapters that a
rank's local rows do not use. Counts by rank, adapter and expert are exchanged first, so rows need no description.

Every rank of a group takes part in each exchange of a forward, and in the reverse exchange of backward, with or without
rows.
The ranks of a group are of one stage; a stage without experts exchanges nothing. An expert's adapters are on the ranks
that have it alone, whose gradients are addends, over the rows that they received; the matrices that all experts share
have addends on every rank of the stage.

Shapes: n rows of a rank, k experts of each, N = n * k pairs, M received pairs, E expert ranks, K bins of a rank, each
an adapter (or the base model) with an expert, C columns, D hidden size, T rows of a tensor group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tinsmith.backends.distributed.collectives import Ranks
from tinsmith.backends.torch.adapters import Adapter, Target
from tinsmith.backends.torch.expert_pairs import PairOrder
from tinsmith.backends.torch.host import read, upload
from tinsmith.backends.torch.lora import ForwardContext, anchor
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.backends.torch.moe import MultiLoRAExperts
from tinsmith.errors import SettingsError


class TokenExchange:
    """Shared by all layers of a model. Set `adapters` before a forward: the same ones on every rank, in one order."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.adapters: Sequence[Adapter] = ()

    def adapter_indices(self, lora_batch: LoRABatch) -> np.ndarray:
        """[n]: the index of each row's adapter, from 1; 0 is the base model."""
        index_by_id = {id(adapter): index for index, adapter in enumerate(self.adapters, 1)}
        segments = lora_batch.segments
        return np.repeat(
            [0 if segment.adapter is None else index_by_id[id(segment.adapter)] for segment in segments],
            [segment.stop - segment.start for segment in segments],
        )

    def tensor_rank_rows(self, num_rows: int) -> slice:
        """The rows of the tensor group that this rank sends."""
        rows_per_rank = -(-num_rows // self.ranks.degrees.tensor)
        start = min(self.ranks.tensor_index * rows_per_rank, num_rows)
        return slice(start, min(start + rows_per_rank, num_rows))


class TokenDispatch:
    """Sends the pairs of one call to the ranks of their experts and back. Constructed by all ranks of a group."""

    def __init__(self, exchange: TokenExchange, index_nk: Tensor, adapter_n: Tensor, num_experts: int) -> None:
        """Each rank has `num_experts` experts."""
        self._ranks = exchange.ranks
        num_ranks, self.num_choices = self._ranks.degrees.experts, index_nk.shape[1]
        num_bins = (1 + len(exchange.adapters)) * num_experts
        rank_nk, local_expert_nk = index_nk // num_experts, index_nk % num_experts
        key_N = (rank_nk * num_bins + adapter_n[:, None] * num_experts + local_expert_nk).reshape(-1)
        self.send_order = PairOrder.by(key_N)
        send_counts_EK = torch.zeros(num_ranks * num_bins, dtype=torch.int64, device=key_N.device)
        send_counts_EK = send_counts_EK.scatter_add_(0, key_N, torch.ones_like(key_N)).view(num_ranks, num_bins)
        receive_counts_EK = self._ranks.exchange_experts(send_counts_EK)
        host_send_EK, host_receive_EK = read(send_counts_EK, receive_counts_EK)
        self._input_splits, self._output_splits = host_send_EK.sum(1).tolist(), host_receive_EK.sum(1).tolist()
        self.num_rows = int(host_receive_EK.sum())
        # Received pairs are in the order of ranks, and of one rank sorted by adapter and expert.
        bin_EK = torch.arange(num_bins, device=key_N.device).repeat(num_ranks)
        bin_M = torch.repeat_interleave(bin_EK, receive_counts_EK.reshape(-1), output_size=self.num_rows)
        self.expert_order = PairOrder.by(bin_M)
        self.index_M1 = bin_M.index_select(0, self.expert_order.pair_N)[:, None] % num_experts
        rows_by_adapter = host_receive_EK.reshape(num_ranks, -1, num_experts).sum((0, 2)).tolist()
        pairs = zip((None, *exchange.adapters), rows_by_adapter, strict=True)
        adapter_rows = [(adapter, count) for adapter, count in pairs if count]
        self.lora_batch = LoRABatch.of((adapter for adapter, _ in adapter_rows), (count for _, count in adapter_rows))

    def repeat_by_rank(self, x_nC: Tensor) -> Tensor:
        """[N, C]: each row once for each of its experts, sorted by rank."""
        return x_nC.index_select(0, self.send_order.pair_N // self.num_choices)

    def send_pairs(self, x_NC: Tensor) -> Tensor:
        """Send pairs [N, C], sorted by rank, to their experts; returns the received pairs [M, C], sorted by adapter."""
        received_MC = self._ranks.exchange_experts(x_NC, self._input_splits, self._output_splits)
        return received_MC.index_select(0, self.expert_order.pair_N)

    def return_pairs(self, x_MC: Tensor) -> Tensor:
        """Send the received pairs [M, C] back; returns this rank's pairs [N, C] in the order of rows and choices."""
        by_sender_MC = x_MC.index_select(0, self.expert_order.sorted_N)
        returned_NC = self._ranks.exchange_experts(by_sender_MC, self._output_splits, self._input_splits)
        return returned_NC.index_select(0, self.send_order.sorted_N)

    def sum_choices(self, x_NC: Tensor) -> Tensor:
        """[n, C]: the sum over each row's choices."""
        return x_NC.view(-1, self.num_choices, x_NC.shape[-1]).sum(1)


class ShardedExperts(MultiLoRAExperts):
    """This rank's experts of a module, `shard` of all."""

    def __init__(self, experts: MultiLoRAExperts, context: ForwardContext, exchange: TokenExchange) -> None:
        self._whole_targets = experts.targets
        degree = exchange.ranks.degrees.experts
        if experts.num_experts % degree:
            raise SettingsError(
                f"expert_parallel is {degree}, and {experts.name} has {experts.num_experts} experts, which {degree} "
                "does not divide; choose a divisor"
            )
        experts_per_rank = experts.num_experts // degree
        self.shard = slice(
            exchange.ranks.expert_index * experts_per_rank, (exchange.ranks.expert_index + 1) * experts_per_rank
        )
        module = experts.module
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach()[self.shard].clone(), requires_grad=False))
        codes = [matrices.select(experts=self.shard) for matrices in experts.list_codes()]
        super().__init__(experts.name, module, context, codes)
        self._exchange = exchange

    @property
    def targets(self) -> list[Target]:
        """Those of the unsharded module, of which this rank holds its experts' matrices."""
        return [target.hold(range(self.shard.start, self.shard.stop)) for target in self._whole_targets]

    def forward(self, hidden_TD: Tensor, *choices: Tensor) -> Tensor:
        index_Tk, weights_Tk = choices
        lora_batch, exchange = self._context.lora_batch, self._exchange
        assert lora_batch is not None and hidden_TD.shape == (lora_batch.num_rows, self.hidden_features)
        self._choices = index_Tk.shape[1]
        local_rows = exchange.tensor_rank_rows(len(hidden_TD))
        adapter_T = upload(exchange.adapter_indices(lora_batch), hidden_TD.device)
        hidden_nD, weights_nk = (_slice_rows(x, local_rows, exchange.ranks) for x in (hidden_TD, weights_Tk))
        dispatch = TokenDispatch(exchange, index_Tk[local_rows], adapter_T[local_rows], self.num_experts)
        received = _DispatchRows.apply(hidden_nD, weights_nk, anchor(hidden_TD.device), dispatch)
        hidden_MD, weights_M1 = cast("tuple[Tensor, Tensor]", received)
        out_MD = hidden_MD
        if dispatch.num_rows:
            out_MD = self.forward_experts(hidden_MD, dispatch.index_M1, weights_M1, dispatch.lora_batch)
        return _gather_rows(cast(Tensor, _ReturnRows.apply(out_MD, dispatch)), len(hidden_TD), exchange.ranks)


def check_experts(experts: Sequence[MultiLoRAExperts], ranks: Ranks, name: str) -> None:
    """Raises SettingsError if the model has no routed experts."""
    if not experts:
        raise SettingsError(
            f"expert_parallel is {ranks.degrees.experts}, and {name} has no routed experts; set it to 1"
        )


def shard_experts(
    experts: Sequence[MultiLoRAExperts], decoder: nn.Module, context: ForwardContext, exchange: TokenExchange
) -> list[ShardedExperts]:
    """Replace each module of experts by this rank's shard."""
    paths = {id(module): path for path, module in decoder.named_modules()}
    shards = []
    for module in experts:
        shards.append(ShardedExperts(module, context, exchange))
        parent, _, attribute = paths[id(module)].rpartition(".")
        setattr(decoder.get_submodule(parent), attribute, shards[-1])
    return shards


class _DispatchRows(torch.autograd.Function):
    """Because of the anchor the result requires a gradient on every rank, even on one without adapters so far or
    without rows: otherwise the other ranks would wait for it in backward.
    """

    @staticmethod
    def forward(
        ctx, hidden_nD: Tensor, weights_nk: Tensor, anchor: Tensor, dispatch: TokenDispatch
    ) -> tuple[Tensor, ...]:
        ctx.dispatch = dispatch
        weights_N1 = weights_nk.reshape(-1, 1).index_select(0, dispatch.send_order.pair_N)
        return dispatch.send_pairs(dispatch.repeat_by_rank(hidden_nD)), dispatch.send_pairs(weights_N1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_MD: Tensor, grad_M1: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dispatch: TokenDispatch = ctx.dispatch
        grad_nD, grad_N1 = dispatch.sum_choices(dispatch.return_pairs(grad_MD)), dispatch.return_pairs(grad_M1)
        return grad_nD, grad_N1.view(-1, dispatch.num_choices), None, None


class _ReturnRows(torch.autograd.Function):
    """Saves a tensor, because recomputation of a layer in backward starts when the first saved tensor is needed and
    stops after the last: so it covers the same exchanges on every rank, even on one that received no rows.
    """

    @staticmethod
    def forward(ctx, out_MD: Tensor, dispatch: TokenDispatch) -> Tensor:
        ctx.dispatch = dispatch
        ctx.save_for_backward(out_MD.new_empty(0))
        return dispatch.sum_choices(dispatch.return_pairs(out_MD))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_nD: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _ = ctx.saved_tensors
        return ctx.dispatch.send_pairs(ctx.dispatch.repeat_by_rank(grad_nD)), None


def _slice_rows(x_TC: Tensor, rows: slice, ranks: Ranks) -> Tensor:
    return x_TC if ranks.degrees.tensor == 1 else cast(Tensor, _SliceRows.apply(x_TC, rows, ranks))


def _gather_rows(x_nC: Tensor, num_rows: int, ranks: Ranks) -> Tensor:
    return x_nC if ranks.degrees.tensor == 1 else cast(Tensor, _GatherRows.apply(x_nC, num_rows, ranks))


class _SliceRows(torch.autograd.Function):
    """A tensor rank's slice of rows that its whole tensor group holds."""

    @staticmethod
    def forward(ctx, x_TC: Tensor, rows: slice, ranks: Ranks) -> Tensor:
        ctx.num_rows, ctx.ranks = len(x_TC), ranks
        return x_TC[rows].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_nC: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gather_padded_rows(grad_nC, ctx.num_rows, ctx.ranks), None, None


class _GatherRows(torch.autograd.Function):
    """All rows of the tensor group, gathered from the ranks' slices."""

    @staticmethod
    def forward(ctx, x_nC: Tensor, num_rows: int, ranks: Ranks) -> Tensor:
        ctx.num_local, ctx.rows_per_rank, ctx.index = (
            len(x_nC),
            -(-num_rows // ranks.degrees.tensor),
            ranks.tensor_index,
        )
        return _gather_padded_rows(x_nC, num_rows, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TC: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        start = min(ctx.index * ctx.rows_per_rank, len(grad_TC))
        return grad_TC[start : start + ctx.num_local].contiguous(), None, None


def _gather_padded_rows(x_nC: Tensor, num_rows: int, ranks: Ranks) -> Tensor:
    """[T, C] from every tensor rank's [n, C]; the last ranks may have fewer rows."""
    rows_per_rank, width = -(-num_rows // ranks.degrees.tensor), x_nC.shape[1]
    padded = nn.functional.pad(x_nC, (0, 0, 0, rows_per_rank - len(x_nC)))
    return ranks.gather_tensor(padded.reshape(1, -1)).view(-1, width)[:num_rows]
