"""Frozen weights in 8-bit floats (e4m3), of linears and of experts, with products of 8-bit operands.

A weight has a scale for each output, fixed at load. The rows that meet it are rounded to e4m3, too, each with a scale
of its own, so that a product has two 8-bit operands: twice the speed of 16-bit ones on a GPU of compute capability 9.0.
Sums are in float32, and both scales are applied to them. The gradient of the input is such a product of the output's
gradient, times the weights' scales, with the same codes. Training and sampling round alike, but a last bit of bfloat16
may become another code, so their logprobs differ more than unquantised ones. Adapters read the rows as they are.

Elsewhere, and for sizes that the kernel does not take (multiples of 16), the same numbers are multiplied in float32.
That is the reference, and slow. A row's scale depends on that row alone.

Shapes: E matrices (1 of a linear, or one for each expert), T rows, n rows of one expert, N rows of all sorted by
expert, I inputs, O outputs.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tinsmith.backends.torch.expert_weights import find_experts
from tinsmith.backends.torch.quantised_linear import QuantisedLinear
from tinsmith.runtime.devices import kind_of, runs_kernels

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest finite number of e4m3."""

MIN_CAPABILITY = (9, 0)
"""The first GPUs whose kernel takes a scale for each row."""

_scaled_grouped_mm = torch.ops.aten._scaled_grouped_mm.default


@cache
def has_fp8_kernel(device: torch.device) -> bool:
    """Whether the device multiplies 8-bit rows with a scale each."""
    return kind_of(device).has_kernels and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def quantise_rows(
    x_TI: Tensor, factors_EI: Tensor | None = None, expert_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The codes of each row, times the factors of its expert (int32; None: the first one's) if given, and its scale
    [T, 1] in float32. A row that is not finite has codes or a scale that are not either, so its products are not; a row
    of zeros has codes of zero.
    """
    if runs_kernels(x_TI):
        from tinsmith.backends.torch import fp8_kernels

        return fp8_kernels.quantise_rows(x_TI, factors_EI, expert_T, E4M3, LARGEST)
    wide_TI = x_TI.float()
    if factors_EI is not None:
        wide_TI = wide_TI * (factors_EI[0] if expert_T is None else factors_EI.index_select(0, expert_T))
    scale_T1 = wide_TI.abs().amax(-1, keepdim=True) / LARGEST
    # A row of zeros is divided by 1.
    codes_TI = (wide_TI / torch.where(scale_T1 == 0, 1.0, scale_T1)).clamp(-LARGEST, LARGEST).to(E4M3)
    return codes_TI, scale_T1


class Fp8Codes:
    def __init__(self, weight_EOI: Tensor, device: torch.device | None = None) -> None:
        device = weight_EOI.device if device is None else device
        self.codes_EOI = torch.empty(weight_EOI.shape, dtype=E4M3, device=device)
        self.scale_EO = torch.empty(weight_EOI.shape[:2], device=device)
        self.dtype = weight_EOI.dtype
        for index, weight_OI in enumerate(weight_EOI):
            wide_OI = weight_OI.to(device).float()
            scale_O1 = wide_OI.abs().amax(-1, keepdim=True).clamp_min_(1e-30) / LARGEST
            self.codes_EOI[index].copy_(wide_OI / scale_O1)
            self.scale_EO[index].copy_(scale_O1[:, 0])

    def tensors(self) -> list[Tensor]:
        return [self.codes_EOI, self.scale_EO]

    def weight(self, index: int) -> Tensor:
        return (self.codes_EOI[index].float() * self.scale_EO[index, :, None]).to(self.dtype)

    def weights(self) -> Tensor:
        return (self.codes_EOI.float() * self.scale_EO[..., None]).to(self.dtype)

    def multiply(self, x_TI: Tensor, index: int) -> Tensor:
        """[T, O], in the dtype of the rows."""
        codes_OI, scale_O = self.codes_EOI[index], self.scale_EO[index]
        return _multiply(*quantise_rows(x_TI), codes_OI.t(), scale_O[None], x_TI.dtype)

    def multiply_back(self, grad_TO: Tensor, index: int) -> Tensor:
        """[T, I]: the gradient of the rows."""
        codes_OI, factors_1O = self.codes_EOI[index], self.scale_EO[index : index + 1]
        ones_1I = torch.ones(1, codes_OI.shape[1], device=grad_TO.device)
        return _multiply(*quantise_rows(grad_TO, factors_1O), _by_columns(codes_OI), ones_1I, grad_TO.dtype)


class Fp8Linear(QuantisedLinear):
    """A frozen linear of 8-bit floats with adapters."""

    _codes: Fp8Codes

    def frozen_product(self, x_TI: Tensor, out_dtype: torch.dtype) -> Tensor:
        return self._codes.multiply(x_TI, 0).to(out_dtype)

    def frozen_gradient(self, grad_TO: Tensor) -> Tensor:
        return self._codes.multiply_back(grad_TO, 0)

    def forward_frozen(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return self.forward_with_gradient(x, ())
        return self.forward_rows(x.reshape(-1, self.in_features), ())[0].view(*x.shape[:-1], -1)


class Fp8ExpertWeights:
    """Experts' matrices of 8-bit floats (`expert_weights.ExpertWeights`)."""

    alignment, copied_bytes = 16, 1

    def __init__(self, codes: Fp8Codes) -> None:
        self._codes = codes

    def multiply(self, x_nC: Tensor, expert: int, *, back: bool = False) -> Tensor:
        return (self._codes.multiply_back if back else self._codes.multiply)(x_nC, expert)

    def multiply_groups(self, x_NC: Tensor, ends_E: Tensor, *, back: bool = False) -> Tensor:
        codes_EOI, scale_EO = self._codes.tensors()
        if back:
            codes_NC, scale_N1 = quantise_rows(x_NC, scale_EO, find_experts(ends_E, len(x_NC)))
            right_ECK, scale_EK = _by_columns(codes_EOI), torch.ones_like(codes_EOI[:, 0], dtype=torch.float32)
        else:
            codes_NC, scale_N1 = quantise_rows(x_NC)
            right_ECK, scale_EK = codes_EOI.mT, scale_EO
        return _scaled_grouped_mm(codes_NC, right_ECK, scale_N1.view(-1), scale_EK, offs=ends_E, out_dtype=x_NC.dtype)

    def tensors(self) -> list[Tensor]:
        return self._codes.tensors()


def _by_columns(codes: Tensor) -> Tensor:
    """Matrices of codes, copied so that each column is in one piece, as the kernel reads a right operand."""
    return codes.mT.contiguous().mT if runs_kernels(codes) else codes


def _multiply(codes_TI: Tensor, scale_T1: Tensor, codes_IO: Tensor, scale_1O: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, O] in `dtype`: the product of codes, times both scales."""
    inputs, outputs = codes_IO.shape
    if has_fp8_kernel(codes_TI.device) and dtype == torch.bfloat16 and inputs % 16 == outputs % 16 == 0:
        return torch.ops.aten._scaled_mm.default(
            codes_TI, codes_IO, scale_a=scale_T1, scale_b=scale_1O.contiguous(), out_dtype=dtype
        )
    return ((codes_TI.float() @ codes_IO.float()) * scale_T1 * scale_1O).to(dtype)
