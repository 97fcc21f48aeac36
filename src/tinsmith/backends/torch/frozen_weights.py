"""The frozen matrices of a linear or of one projection of a mixture's experts, plain or as codes, and their products.

A linear has one matrix. Experts have one each: a product reads rows of one expert, or, by a grouped kernel, rows of all
that are sorted by expert. `back` multiplies the gradients of outputs, to get those of inputs.

`WeightCodes` is the interface of quantised matrices, in whatever format: `quantization` chooses one. Unless a format
multiplies codes, its matrices are dequantised for each product.

Shapes: E matrices (1 of a linear, or one for each expert), n rows of one, N rows of all, I inputs and O outputs of a
linear; a product has C columns and gives K: I and O, or with `back` O and I.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from tinsmith.backends.torch.matmul import matmul

WHOLE = slice(None)

Quantise = Callable[[Tensor], "WeightCodes"]
"""Makes codes of matrices [E, O, I]."""


class ExpertWeights(Protocol):
    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, O, I)."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, dequantised where they are codes."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def alignment(self) -> int:
        """What divides I and O where the grouped kernel takes these matrices."""
        ...

    @property
    def copied_bytes(self) -> int:
        """Bytes for each weight of the copy that a product makes; 0 if it reads what is stored."""
        ...

    def multiply(self, x_nC: Tensor, index: int, *, back: bool = False) -> Tensor:
        """[n, K], in the dtype of the rows: rows of one expert times its matrix."""
        ...

    def multiply_groups(self, x_NC: Tensor, ends_E: Tensor, *, back: bool = False) -> Tensor:
        """[N, K]: all rows, each times its expert's matrix, without a read by the host. `ends_E`: where the rows of
        each expert end, int32.
        """
        ...


class PlainWeights(NamedTuple):
    """Parameters of a module, [E, O, I] or, `transposed`, [E, I, O]."""

    weight_E: Tensor
    transposed: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        num_experts, outputs, inputs = (self.weight_E.mT if self.transposed else self.weight_E).shape
        return num_experts, outputs, inputs

    @property
    def dtype(self) -> torch.dtype:
        return self.weight_E.dtype

    @property
    def device(self) -> torch.device:
        return self.weight_E.device

    @property
    def alignment(self) -> int:
        return 8  # a row of bfloat16 begins at a multiple of 16 bytes

    @property
    def copied_bytes(self) -> int:
        return 0

    def multiply(self, x_nC: Tensor, index: int, *, back: bool = False) -> Tensor:
        return matmul(x_nC, self._orient(back=back)[index], x_nC.dtype)

    def multiply_groups(self, x_NC: Tensor, ends_E: Tensor, *, back: bool = False) -> Tensor:
        return grouped_mm(x_NC, self._orient(back=back), offs=ends_E)

    def _orient(self, *, back: bool) -> Tensor:
        """[E, C, K]: each matrix as a right operand."""
        return self.weight_E.mT if self.transposed == back else self.weight_E


class WeightCodes(ABC):
    """Quantised matrices [E, O, I]. A format has a code for each weight [E, O, I] and a scale for each output, [E, O]
    or [E, O, 1], or overrides what depends on these shapes.
    """

    alignment = 8

    rounds_rows = False
    """Whether a product rounds rows to codes, too."""

    codes: Tensor
    scales: Tensor

    def __init__(self, weight_EOI: Tensor) -> None:
        num_matrices, outputs, inputs = weight_EOI.shape
        self.shape = num_matrices, outputs, inputs
        self.dtype = weight_EOI.dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)

    @property
    def copied_bytes(self) -> int:
        return self.dtype.itemsize

    def tensors(self) -> list[Tensor]:
        """The codes and scales."""
        return [self.codes, self.scales]

    @abstractmethod
    def _dequantise(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The weights of one matrix or of all, in `dtype`."""

    def weight(self, index: int) -> Tensor:
        """[O, I], dequantised."""
        return self._dequantise(self.codes[index], self.scales[index])

    def weights(self) -> Tensor:
        """[E, O, I], dequantised."""
        return self._dequantise(self.codes, self.scales)

    def _cut(self, experts: slice, outputs: slice, inputs: slice) -> tuple[Tensor, Tensor]:
        """Views of the codes and scales of a part. Raises ValueError if the part would split weights that share a
        scale.
        """
        return self.codes[experts, outputs, inputs], self.scales[experts, outputs]

    def select(self, experts: slice = WHOLE, outputs: slice = WHOLE, inputs: slice = WHOLE) -> Self:
        """A copy of a part, with the same weights as the whole has there. Raises ValueError if the part would split
        weights that share a scale.
        """
        codes, scales = self._cut(experts, outputs, inputs)
        sizes = [len(range(size)[span]) for size, span in zip(self.shape, (experts, outputs, inputs), strict=True)]
        return self._with(codes.clone(), scales.clone(), (sizes[0], sizes[1], sizes[2]))

    def _take(self, expert_N: Tensor) -> Self:
        """The matrix of each of these experts, without a read by the host."""
        codes, scales = (tensor.index_select(0, expert_N) for tensor in self.tensors())
        return self._with(codes, scales, (len(expert_N), *self.shape[1:]))

    def _with(self, codes: Tensor, scales: Tensor, shape: tuple[int, int, int]) -> Self:
        other = copy.copy(self)
        other.codes, other.scales, other.shape = codes, scales, shape
        return other

    def move_(self, device: torch.device) -> None:
        self.codes, self.scales = self.codes.to(device), self.scales.to(device)

    def multiply(self, x_nC: Tensor, index: int, *, back: bool = False) -> Tensor:
        weight_OI = self.weight(index)
        return matmul(x_nC, weight_OI if back else weight_OI.t(), x_nC.dtype)

    def multiply_groups(self, x_NC: Tensor, ends_E: Tensor, *, back: bool = False) -> Tensor:
        is_few = len(x_NC) < self.shape[0]  # in decoding: rows read fewer matrices than there are
        matrices = self._take(find_experts(ends_E, len(x_NC))) if is_few else self
        weight_EOI = matrices.weights()
        right_ECK = weight_EOI if back else weight_EOI.mT
        return torch.bmm(x_NC[:, None], right_ECK)[:, 0] if is_few else grouped_mm(x_NC, right_ECK, offs=ends_E)


def find_experts(ends_E: Tensor, num_rows: int) -> Tensor:
    """[N]: the expert of each sorted row."""
    numbers_N = torch.arange(num_rows, dtype=torch.int32, device=ends_E.device)
    return torch.searchsorted(ends_E, numbers_N, right=True, out_int32=True)
