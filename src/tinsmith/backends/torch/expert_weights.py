"""The frozen matrices of one projection of a mixture's experts, plain or as codes, and their products with rows.

A product reads rows that are sorted by expert: of one expert, or, by a grouped kernel, of all. `back` multiplies the
gradients of outputs, to get those of inputs.

Shapes: E experts, n rows of one, N rows of all, I inputs and O outputs of a projection; a product has C columns and
gives K: I and O, or with `back` O and I.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from tinsmith.backends.torch.matmul import matmul
from tinsmith.backends.torch.quantised_linear import WeightCodes


class ExpertWeights(Protocol):
    @property
    def alignment(self) -> int:
        """What divides I and O where the grouped kernel takes these matrices."""
        ...

    @property
    def copied_bytes(self) -> int:
        """Bytes for each weight of the copy that a product makes; 0 if it reads what is stored."""
        ...

    def multiply(self, x_nC: Tensor, expert: int, *, back: bool = False) -> Tensor:
        """[n, K]: rows of one expert times its matrix."""
        ...

    def multiply_groups(self, x_NC: Tensor, ends_E: Tensor, *, back: bool = False) -> Tensor:
        """[N, K]: all rows, each times its expert's matrix, without a read by the host. `ends_E`: where the rows of
        each expert end, int32.
        """
        ...

    def tensors(self) -> list[Tensor]:
        """What is stored in place of parameters; empty where nothing is."""
        ...


MakeExpertWeights = Callable[[Tensor], ExpertWeights]
"""Makes them from matrices [E, O, I]."""


class PlainWeights(NamedTuple):
    """Parameters of a module, [E, O, I] or, `transposed`, [E, I, O]."""

    weight_E: Tensor
    transposed: bool

    @property
    def alignment(self) -> int:
        return 8  # a row of bfloat16 begins at a multiple of 16 bytes

    @property
    def copied_bytes(self) -> int:
        return 0

    def multiply(self, x_nC: Tensor, expert: int, *, back: bool = False) -> Tensor:
        return matmul(x_nC, self._orient(back=back)[expert], x_nC.dtype)

    def multiply_groups(self, x_NC: Tensor, ends_E: Tensor, *, back: bool = False) -> Tensor:
        return grouped_mm(x_NC, self._orient(back=back), offs=ends_E)

    def tensors(self) -> list[Tensor]:
        return []

    def _orient(self, *, back: bool) -> Tensor:
        """[E, C, K]: each matrix as a right operand."""
        return self.weight_E.mT if self.transposed == back else self.weight_E


class DequantisedWeights:
    """Codes, dequantised for each product: of the experts that have rows one by one, by the grouped kernel all."""

    alignment = 8

    def __init__(self, codes: WeightCodes) -> None:
        self._codes = codes
        self.copied_bytes = codes.dtype.itemsize

    def multiply(self, x_nC: Tensor, expert: int, *, back: bool = False) -> Tensor:
        weight_OI = self._codes.weight(expert)
        return matmul(x_nC, weight_OI if back else weight_OI.t(), x_nC.dtype)

    def multiply_groups(self, x_NC: Tensor, ends_E: Tensor, *, back: bool = False) -> Tensor:
        weight_EOI = self._codes.weights()
        return grouped_mm(x_NC, weight_EOI if back else weight_EOI.mT, offs=ends_E)

    def tensors(self) -> list[Tensor]:
        return self._codes.tensors()


def find_experts(ends_E: Tensor, num_rows: int) -> Tensor:
    """[N]: the expert of each sorted row."""
    numbers_N = torch.arange(num_rows, dtype=torch.int32, device=ends_E.device)
    return torch.searchsorted(ends_E, numbers_N, right=True, out_int32=True)
