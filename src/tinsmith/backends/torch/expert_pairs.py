"""The pairs of rows and the experts that they chose, in one order, and the products that experts' matrices have with
them.

Pairs are sorted by expert and, within one, by the row's adapter. So an expert's pairs are adjacent, for products with
the base model's matrices, and so are those of an expert and an adapter, a group, for products with the adapter's: each
adapter meets only its own rows. The order is the router's; rows without an adapter are a group of each expert, too.

An adapter's factors of a projection are its A's or B's that differ between experts, seen as [E, C, r]: C columns of
pairs times a rank. A row's low-rank values are adjacent, one projection after another as far as the row's adapter has
them, so `RankSlice` depends on the adapter. Columns of other rows' longer adapters are undefined, and nothing reads
them.

`LoopedPairs` is the reference: it reads the groups' ends from the device and multiplies one group after another.
`expert_kernels` computes the same on a GPU.

Shapes: T rows, k experts of each, N = T * k pairs, E experts, S slots of adapters, V = E * S groups, C columns, r rank,
R low-rank values of a row, K outputs of a product (`frozen_weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.backends.torch.adapters import Adapter, Pair
from tinsmith.backends.torch.frozen_weights import ExpertWeights
from tinsmith.backends.torch.host import read
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.backends.torch.matmul import add_matmul_, matmul


class PairOrder(NamedTuple):
    """A permutation that sorts pairs."""

    pair_N: Tensor  # the unsorted pair (row * k + choice) of each sorted one
    sorted_N: Tensor  # the sorted index of each unsorted pair

    @classmethod
    def by(cls, key_N: Tensor) -> PairOrder:
        pair_N = torch.argsort(key_N, stable=True)
        numbers_N = torch.arange(len(pair_N), device=pair_N.device)
        return cls(pair_N, torch.empty_like(pair_N).index_copy_(0, pair_N, numbers_N))


class Factors(NamedTuple):
    """Which of an adapter's matrices differ between experts, and the columns of pairs that they multiply."""

    name: str
    matrix: int  # of a pair of matrices: 0 is A [E, r, C], 1 is B [E, C, r]
    columns: slice

    def select(self, matrices: Pair) -> Tensor:
        """[E, C, r], a view."""
        return matrices[1] if self.matrix else matrices[0].mT


class RankSlice(NamedTuple):
    """Where the low-rank values of one projection are among those of a row."""

    projection: int  # its index
    factors: Factors
    ranks: slice


def rank_slices(adapter: Adapter | None, projections: Sequence[Factors]) -> list[RankSlice]:
    """Those of the projections that the adapter has."""
    slices, end = [], 0
    for index, factors in enumerate(projections):
        if adapter is not None and factors.name in adapter.compute:
            start, end = end, end + factors.select(adapter.compute[factors.name]).shape[-1]
            slices.append(RankSlice(index, factors, slice(start, end)))
    return slices


def count_ranks(adapters: Sequence[Adapter | None], projections: Sequence[Factors]) -> int:
    """R: the most low-rank values of a row; at least one."""
    stops = [part.ranks.stop for adapter in adapters for part in rank_slices(adapter, projections)]
    return max(stops, default=1)


class GateGradients(NamedTuple):
    gate_up_NG: Tensor
    low_rank_NR: Tensor
    weights_Tk: Tensor


class ExpertPairs:
    """The sorted pairs of one call and their groups. A subclass has the products."""

    def __init__(self, index_Tk: Tensor, lora_batch: LoRABatch, num_experts: int) -> None:
        self.num_choices, self.num_experts = index_Tk.shape[1], num_experts
        self.adapters, slot_T = lora_batch.slots(index_Tk.device)
        key_N = (index_Tk if slot_T is None else index_Tk * len(self.adapters) + slot_T[:, None]).reshape(-1)
        self.order = PairOrder.by(key_N)
        numbers_V = torch.arange(num_experts * len(self.adapters), device=key_N.device)
        sorted_key_N = key_N.index_select(0, self.order.pair_N)
        self.ends_V = torch.searchsorted(sorted_key_N, numbers_V, right=True, out_int32=True)
        self._index_Tk = index_Tk

    def add_bias_(self, x_NC: Tensor, bias_EC: Tensor) -> None:
        """Add each pair's row of the experts' biases."""
        expert_N = self._index_Tk.reshape(-1).index_select(0, self.order.pair_N)
        x_NC += bias_EC.index_select(0, expert_N)

    def sort_weights(self, weights_Tk: Tensor) -> Tensor:
        """[N, 1]: the router's weight of each pair."""
        return weights_Tk.reshape(-1, 1).index_select(0, self.order.pair_N)

    def by_row(self, x_N: Tensor) -> Tensor:
        """[T, k]: the values of each row's pairs."""
        return x_N.index_select(0, self.order.sorted_N).view(-1, self.num_choices)

    def repeat_rows(self, x_TC: Tensor) -> Tensor:
        """[N, C]: the row of each pair."""
        return x_TC.index_select(0, self.order.pair_N // self.num_choices)

    def combine(self, x_NC: Tensor, weights_Tk: Tensor | None = None) -> Tensor:
        """[T, C]: the sum, weighted if there are weights, over each row's pairs in the order of its choices."""
        x_TkC = x_NC.index_select(0, self.order.sorted_N).view(-1, self.num_choices, x_NC.shape[-1])
        return (x_TkC if weights_Tk is None else x_TkC * weights_Tk[..., None]).sum(1).to(x_NC.dtype)

    def matmul(self, x_NC: Tensor, weights: ExpertWeights, *, back: bool = False) -> Tensor:
        """[N, K]: each pair times its expert's matrix, or with `back` its gradient times the transpose."""
        raise NotImplementedError

    def expand_(self, out_NC: Tensor, u_TR: Tensor, projections: Sequence[Factors]) -> None:
        """Add the row's low-rank values times the transposed factors to each pair's columns of each projection."""
        raise NotImplementedError

    def shrink(self, x_NC: Tensor, projections: Sequence[Factors]) -> Tensor:
        """[N, R]: each pair's columns of each projection times the factors."""
        raise NotImplementedError

    def add_outer_(
        self, x_NC: Tensor, u_TR: Tensor, projections: Sequence[Factors], weights_Tk: Tensor | None = None
    ) -> None:
        """Add each group's sum of x^T u, weighted if there are weights, to its adapter's gradients, if these exist."""
        raise NotImplementedError

    def gate(
        self, gate_up_NG: Tensor, u_TR: Tensor, outer: Sequence[Factors], down: Sequence[Factors]
    ) -> tuple[Tensor, Tensor]:
        """silu(gate) * up [N, I] of both with their deltas (`expand_`), and `shrink` of it. Kernels only."""
        raise NotImplementedError

    def gate_gradient_(
        self,
        grad_NI: Tensor,
        gate_up_NG: Tensor,
        low_rank: tuple[Tensor, Tensor],
        weights_Tk: Tensor,
        outer: Sequence[Factors],
        down: Sequence[Factors],
    ) -> GateGradients:
        """The gradients of `gate`'s inputs and of the router's weights, from that of its output before the weights and
        without the delta of `down`. `low_rank`: `u_TR`, and the rows' low-rank values of that delta. Leaves `gate`'s
        output in `grad_NI`. Kernels only.
        """
        raise NotImplementedError


class LoopedPairs(ExpertPairs):
    """One matmul for each group that has pairs."""

    def __init__(self, index_Tk: Tensor, lora_batch: LoRABatch, num_experts: int) -> None:
        super().__init__(index_Tk, lora_batch, num_experts)
        (ends_V,) = read(self.ends_V)
        self._bounds = list(pairwise([0, *ends_V.tolist()]))

    def matmul(self, x_NC: Tensor, weights: ExpertWeights, *, back: bool = False) -> Tensor:
        ends = [0, *(stop for _, stop in self._bounds[len(self.adapters) - 1 :: len(self.adapters)])]
        return torch.cat(
            [
                weights.multiply(x_NC[start:stop], expert, back=back)
                for expert, (start, stop) in enumerate(pairwise(ends))
                if stop > start
            ]
        )

    def expand_(self, out_NC: Tensor, u_TR: Tensor, projections: Sequence[Factors]) -> None:
        u_NR = self.repeat_rows(u_TR)
        for factors_Cr, columns, ranks, pairs in self._groups(projections, _matrices_of):
            add_matmul_(out_NC[pairs, columns], u_NR[pairs, ranks], factors_Cr.t())

    def shrink(self, x_NC: Tensor, projections: Sequence[Factors]) -> Tensor:
        out_NR = x_NC.new_empty(len(x_NC), count_ranks(self.adapters, projections))
        for factors_Cr, columns, ranks, pairs in self._groups(projections, _matrices_of):
            out_NR[pairs, ranks] = matmul(x_NC[pairs, columns], factors_Cr, x_NC.dtype)
        return out_NR

    def add_outer_(
        self, x_NC: Tensor, u_TR: Tensor, projections: Sequence[Factors], weights_Tk: Tensor | None = None
    ) -> None:
        u_NR = self.repeat_rows(u_TR)
        if weights_Tk is not None:
            u_NR = (u_NR * self.sort_weights(weights_Tk)).to(u_NR.dtype)
        for gradient_Cr, columns, ranks, pairs in self._groups(projections, _gradients_of):
            add_matmul_(gradient_Cr, x_NC[pairs, columns].t(), u_NR[pairs, ranks])

    def _groups(
        self, projections: Sequence[Factors], select: Callable[[Adapter, str], Pair | None]
    ) -> Iterator[tuple[Tensor, slice, slice, slice]]:
        """Of each group that has pairs, and projection that its adapter has: the factors [C, r] from the selected
        matrices, the columns and low-rank values that they join, and the pairs.
        """
        for slot, adapter in enumerate(self.adapters):
            for _, factors, ranks in rank_slices(adapter, projections):
                if adapter is None or (matrices := select(adapter, factors.name)) is None:
                    continue
                bounds = self._bounds[slot :: len(self.adapters)]
                for factors_Cr, (start, stop) in zip(factors.select(matrices).unbind(), bounds, strict=True):
                    if stop > start:
                        yield factors_Cr, factors.columns, ranks, slice(start, stop)


def _matrices_of(adapter: Adapter, name: str) -> Pair:
    return adapter.compute[name]


def _gradients_of(adapter: Adapter, name: str) -> Pair | None:
    return None if adapter.gradients is None else adapter.gradients[name]
