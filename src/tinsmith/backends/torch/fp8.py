"""Linears whose frozen weights are 8-bit floats (e4m3), with products of 8-bit operands.

A weight has a scale for each output, fixed at load. The rows that meet it are rounded to e4m3, too, each with a scale
of its own, so that a product has two 8-bit operands: twice the speed of 16-bit ones on a GPU of compute capability 9.0.
Sums are in float32, and both scales are applied to them. The gradient of the input is such a product of the output's
gradient, times the weights' scales, with the same codes. Training and sampling round alike, but a last bit of bfloat16
may become another code, so their logprobs differ more than unquantised ones. Adapters read the rows as they are.

Elsewhere, and for sizes that the kernel does not take (multiples of 16), the same numbers are multiplied in float32.
That is the reference, and slow. A row's scale depends on that row alone.

Shapes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from tinsmith.backends.torch.lora import ForwardContext
from tinsmith.backends.torch.quantised_linear import QuantisedLinear
from tinsmith.runtime.devices import kind_of, runs_kernels

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest finite number of e4m3."""

MIN_CAPABILITY = (9, 0)
"""The first GPUs whose kernel takes a scale for each row."""


@cache
def has_fp8_kernel(device: torch.device) -> bool:
    """Whether the device multiplies 8-bit rows with a scale each."""
    return kind_of(device).has_kernels and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def quantise_rows(x_TI: Tensor, factor_I: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The codes of each row, times `factor_I` if given, and its scale [T, 1] in float32. A row that is not finite has
    codes or a scale that are not either, so its products are not; a row of zeros has codes of zero.
    """
    if runs_kernels(x_TI):
        from tinsmith.backends.torch import fp8_kernels

        return fp8_kernels.quantise_rows(x_TI, factor_I, E4M3, LARGEST)
    wide_TI = x_TI.float() if factor_I is None else x_TI.float() * factor_I
    scale_T1 = wide_TI.abs().amax(-1, keepdim=True) / LARGEST
    # A row of zeros is divided by 1.
    codes_TI = (wide_TI / torch.where(scale_T1 == 0, 1.0, scale_T1)).clamp(-LARGEST, LARGEST).to(E4M3)
    return codes_TI, scale_T1


class _Codes:
    def __init__(self, weight_OI: Tensor) -> None:
        wide_OI = weight_OI.float()
        self.scale_O1 = wide_OI.abs().amax(-1, keepdim=True).clamp_min_(1e-30) / LARGEST
        self.codes_OI = (wide_OI / self.scale_O1).to(E4M3)
        self._dtype = weight_OI.dtype
        self.num_bytes = self.codes_OI.nbytes + self.scale_O1.nbytes

    def tensors(self) -> list[Tensor]:
        return [self.codes_OI, self.scale_O1]

    def weight(self) -> Tensor:
        return (self.codes_OI.float() * self.scale_O1).to(self._dtype)


class Fp8Linear(QuantisedLinear):
    """A frozen linear of 8-bit floats with adapters."""

    _codes: _Codes

    def __init__(self, name: str, group: str, linear: nn.Linear, context: ForwardContext) -> None:
        super().__init__(name, group, linear, context, _Codes)

    def frozen_product(self, x_TI: Tensor, out_dtype: torch.dtype) -> Tensor:
        codes = self._codes
        return _multiply(*quantise_rows(x_TI), codes.codes_OI.t(), codes.scale_O1.t(), x_TI.dtype).to(out_dtype)

    def frozen_gradient(self, grad_TO: Tensor) -> Tensor:
        codes = self._codes
        quantised = quantise_rows(grad_TO, codes.scale_O1[:, 0])
        # The kernel reads its right operand by columns.
        codes_OI = codes.codes_OI.t().contiguous().t() if runs_kernels(grad_TO) else codes.codes_OI
        ones_1I = torch.ones(1, self.in_features, device=grad_TO.device)
        return _multiply(*quantised, codes_OI, ones_1I, grad_TO.dtype)

    def forward_frozen(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return self.forward_with_gradient(x, ())
        return self.forward_rows(x.reshape(-1, self.in_features), ())[0].view(*x.shape[:-1], -1)


def _multiply(codes_TI: Tensor, scale_T1: Tensor, codes_IO: Tensor, scale_1O: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, O] in `dtype`: the product of codes, times both scales."""
    inputs, outputs = codes_IO.shape
    if has_fp8_kernel(codes_TI.device) and dtype == torch.bfloat16 and inputs % 16 == outputs % 16 == 0:
        return torch.ops.aten._scaled_mm.default(
            codes_TI, codes_IO, scale_a=scale_T1, scale_b=scale_1O.contiguous(), out_dtype=dtype
        )
    return ((codes_TI.float() @ codes_IO.float()) * scale_T1 * scale_1O).to(dtype)
