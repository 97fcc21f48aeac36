"""Linears of a decoder layer that have the same input, as one product, with what the adapters add.

Their base weights lie below each other in one matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from tinsmith.backends.torch.adapters import Adapter
from tinsmith.backends.torch.lora import MultiLoRALinear
from tinsmith.backends.torch.products import linear_product, packed, suits_linear
from tinsmith.backends.torch.threads import Threads

LARGE_B = {torch.float32: 1 << 15, torch.bfloat16: 0}
"""Numbers of the B's of linears side by side, zeros included, from which on a product for each is faster. 8 adapters in
bfloat16, 8 rows each, of m50: 139 us against 186 on queries, keys and values, 281 against 468 on gate and up.
"""


LARGE_ALONE = 1 << 20
"""The same of one adapter in bfloat16: 16 rows on queries, keys and values take 30 us whole and 59 apart, on gate and
up 62 and 64.
"""


class Piece(NamedTuple):
    """Outputs of a fused linear, and the inner rows that adapters make them of."""

    outputs: slice
    inner: slice


class Adding(Protocol):
    """What the adapters of one step add to a fused linear's outputs."""

    def add_(self, y_TO: Tensor, x_TI: Tensor, linear: FusedLinear) -> Tensor:
        """The outputs with it, in place or not."""
        ...


Fuse = Callable[[Sequence[MultiLoRALinear]], "FusedLinear"]


Fused = tuple[Tensor, ...]
"""An adapter's matrices at a fused linear: the A's below each other [R, I], then the B of each piece."""


class FusedLinear:
    """Linears that read the same rows, as one: their weights below each other, their adapters beside each other."""

    def __init__(self, linears: Sequence[MultiLoRALinear], threads: Threads) -> None:
        self._linears = linears
        self._threads = threads
        self.name = linears[0].name
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        self._weight_OI = self._laid_out(linears)
        biases = [linear.bias for linear in linears]
        self._bias_O = None if biases[0] is None else torch.cat(cast("list[Tensor]", biases))
        self._pieces: dict[tuple[int, bool], tuple[Piece, ...]] = {}
        self.suits = suits_linear(linears[0].weight)
        """Whether rows go through `linear_product` and `add_linear`."""

    def __call__(self, x_TI: Tensor, work: Adding, dtype: torch.dtype | None = None) -> Tensor:
        """[T, O]: every linear's outputs, one after the other; in `dtype`, to which adapters' are added."""
        return work.add_(self._product(x_TI).to(dtype or x_TI.dtype), x_TI, self)

    def _laid_out(self, linears: Sequence[MultiLoRALinear]) -> Tensor:
        """Packed for oneDNN: a copy."""
        return packed(torch.cat([linear.weight for linear in linears]))

    def _product(self, x_TI: Tensor) -> Tensor:
        self._threads.wide()
        y_TO = linear_product(x_TI, self._weight_OI, self._bias_O)
        self._threads.narrow()
        return y_TO

    def fused(self, adapter: Adapter) -> Fused | None:
        """The fused matrices of an adapter that has any of these linears, kept with it. Of the first token of new
        weights nobody waits for copies: if the A's are all there is, each linear adds its own B (`add_each_`), and a B
        that is one matrix is packed the second time that it is asked for.
        """
        if self.name not in adapter.fused:
            adapter.fused[self.name] = fused = self._inner_of(adapter) or self._of_one(adapter)
            return fused
        fused = adapter.fused[self.name]
        if fused is not None and len(fused) == 1:
            fused = adapter.fused[self.name] = self._of_one(adapter)
        if fused is not None and len(fused) == 2 and self.suits and not fused[1].is_mkldnn:
            fused = adapter.fused[self.name] = fused[0], packed(fused[1])
        return fused

    def _inner_of(self, adapter: Adapter) -> Fused | None:
        """The A's alone, where each linear's own B gives the same bits as the B's among zeros."""
        if len(self._linears) == 1 or not self.suits:
            return None
        exact = math.frexp(adapter.scale)[0] == 0.5  # what is scaled before the product is not rounded
        if not exact or any(linear.name not in adapter.compute for linear in self._linears):
            return None
        return (below_each_other([adapter.compute[linear.name][0] for linear in self._linears]),)

    def _of_one(self, adapter: Adapter) -> Fused | None:
        if not any(linear.name in adapter.compute for linear in self._linears):
            return None
        if len(self._linears) == 1:
            a_RI, b_OR = adapter.compute[self.name]
            return a_RI, b_OR if adapter.scale == 1.0 else b_OR * adapter.scale
        fused = self.empty(adapter.layout.rank, of_one=True)
        self.fuse_into(adapter, fused)
        return fused

    def add_each_(self, y_nO: Tensor, inner_nR: Tensor, adapter: Adapter) -> None:
        """To the outputs of some rows, what each linear's own B makes of their inner rows."""
        rank, output = adapter.layout.rank, 0
        for place, linear in enumerate(self._linears):
            if linear.name in adapter.compute:
                _, b_OR = adapter.compute[linear.name]
                own_nR = inner_nR[:, place * rank : (place + 1) * rank]
                y_nO[:, output : output + len(b_OR)].addmm_(own_nR, b_OR.t(), alpha=adapter.scale)
            output += linear.out_features

    def pieces(self, rank: int, *, of_one: bool = False) -> tuple[Piece, ...]:
        """One of everything, where each B stands in rows and columns of its own among zeros; one of each linear where
        the zeros would cost more than another product. `of_one`: of an adapter alone, not of one in a stack.
        """
        if (rank, of_one) not in self._pieces:
            count, weight = len(self._linears), self._linears[0].weight
            whole = Piece(slice(0, self.out_features), slice(0, rank * count))
            ends = list(accumulate((linear.out_features for linear in self._linears), initial=0))
            apart = [
                Piece(slice(*span), slice(place * rank, (place + 1) * rank))
                for place, span in enumerate(pairwise(ends))
            ]
            large = LARGE_ALONE if of_one and self.suits else LARGE_B.get(weight.dtype, math.inf)
            is_large = self.out_features * rank * count >= large
            self._pieces[rank, of_one] = tuple(apart) if is_large else (whole,)
        return self._pieces[rank, of_one]

    def empty(self, rank: int, *, of_one: bool = False) -> Fused:
        """Zeros for the matrices of an adapter of this rank."""
        weight = self._linears[0].weight
        sizes = [(piece.outputs.stop - piece.outputs.start, piece.inner.stop - piece.inner.start)
                 for piece in self.pieces(rank, of_one=of_one)]  # fmt: skip
        a_RI = weight.new_zeros(rank * len(self._linears), self.in_features)
        return a_RI, *(weight.new_zeros(size) for size in sizes)

    def fuse_into(self, adapter: Adapter, fused: Fused) -> None:
        """Put an adapter's A's and B's, these times its scale, into matrices of zeros that have room for its rank."""
        a_RI, *bs = fused
        room, output = len(a_RI) // len(self._linears), 0
        for place, linear in enumerate(self._linears):
            if linear.name in adapter.compute:
                own_a, own_b = adapter.compute[linear.name]
                inner = slice(place * room, place * room + len(own_a))
                a_RI[inner] = own_a
                room_b = bs[0][output : output + len(own_b), inner] if len(bs) == 1 else bs[place][:, : len(own_a)]
                torch.mul(own_b, adapter.scale, out=room_b)
            output += linear.out_features


class PlainFusedLinear(FusedLinear):
    """The same on any device, over the linears' own weights where these lie below each other."""

    def _laid_out(self, linears: Sequence[MultiLoRALinear]) -> Tensor:
        return below_each_other([linear.weight for linear in linears])

    def _product(self, x_TI: Tensor) -> Tensor:
        return nn.functional.linear(x_TI, self._weight_OI, self._bias_O)


def below_each_other(weights: Sequence[Tensor]) -> Tensor:
    """One matrix of the rows of all: a view, if they follow each other in memory, as `differentiable` lays them."""
    first, end = weights[0].detach(), weights[0].data_ptr()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or weight.data_ptr() != end or not weight.is_contiguous():
            return torch.cat(tuple(weights))
        end += weight.nbytes
    num_inputs = first.shape[1]
    return first.as_strided((sum(len(weight) for weight in weights), num_inputs), (num_inputs, 1))


def linears_of(layer: nn.Module, names: Sequence[str]) -> list[MultiLoRALinear]:
    return [cast(MultiLoRALinear, layer.get_submodule(name)) for name in names]
