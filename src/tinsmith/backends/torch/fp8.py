"""Frozen weights in 8-bit floats (e4m3), of linears and of experts, with products of 8-bit operands.

A weight has a scale for each output, fixed at load. The rows that meet it are rounded to e4m3, too, each with a scale
of its own, so that a product has two 8-bit operands: twice the speed of 16-bit ones on a GPU of compute capability 9.0.
Sums are in float32, and both scales are applied to them. The gradient of the input is such a product of the output's
gradient, times the weights' scales, with the same codes. Training and sampling round alike, but a last bit of bfloat16
may become another code, so their logprobs differ more than unquantised ones. Adapters read the rows as they are.

Elsewhere, and for sizes that the kernel does not take (multiples of 16), the same numbers are multiplied in float32.
That is the reference, and slow. A row's scale depends on that row alone.

Shapes: E matrices (1 of a linear, or one for each expert), T rows, n rows of one matrix, N rows of all sorted by
expert, I inputs, O outputs; a product has C columns and gives K.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tinsmith.backends.torch.frozen_weights import WeightCodes, find_experts
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


class Fp8Codes(WeightCodes):
    """`codes` [E, O, I] and `scales` [E, O]."""

    alignment, rounds_rows = 16, True

    def __init__(self, weight_EOI: Tensor, device: torch.device | None = None) -> None:
        device = weight_EOI.device if device is None else device
        super().__init__(weight_EOI)
        self.codes = torch.empty(self.shape, dtype=E4M3, device=device)
        self.scales = torch.empty(self.shape[:2], device=device)
        for index, weight_OI in enumerate(weight_EOI):
            wide_OI = weight_OI.to(device).float()
            scale_O1 = wide_OI.abs().amax(-1, keepdim=True).clamp_min_(1e-30) / LARGEST
            self.codes[index].copy_(wide_OI / scale_O1)
            self.scales[index].copy_(scale_O1[:, 0])

    @property
    def copied_bytes(self) -> int:
        return 1

    def _dequantise(self, codes: Tensor, scales: Tensor) -> Tensor:
        return (codes.float() * scales[..., None]).to(self.dtype)

    def multiply(self, x_nC: Tensor, index: int, *, back: bool = False) -> Tensor:
        codes_OI, scale_1O = self.codes[index], self.scales[index : index + 1]
        if not back:
            return _multiply(*quantise_rows(x_nC), codes_OI.t(), scale_1O, x_nC.dtype)
        ones_1I = torch.ones(1, codes_OI.shape[1], device=x_nC.device)
        return _multiply(*quantise_rows(x_nC, scale_1O), _by_columns(codes_OI), ones_1I, x_nC.dtype)

    def multiply_groups(self, x_NC: Tensor, ends_E: Tensor, *, back: bool = False) -> Tensor:
        if back:
            codes_NC, scale_N1 = quantise_rows(x_NC, self.scales, find_experts(ends_E, len(x_NC)))
            right_ECK, scale_EK = _by_columns(self.codes), torch.ones_like(self.codes[:, 0], dtype=torch.float32)
        else:
            codes_NC, scale_N1 = quantise_rows(x_NC)
            right_ECK, scale_EK = self.codes.mT, self.scales
        return _scaled_grouped_mm(codes_NC, right_ECK, scale_N1.view(-1), scale_EK, offs=ends_E, out_dtype=x_NC.dtype)


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
