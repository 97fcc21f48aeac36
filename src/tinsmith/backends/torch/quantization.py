"""A quantised frozen base: its linears and experts store codes and scales in place of their weights.

`fp8` multiplies 8-bit floats (`fp8`). `int8` stores one byte per weight and a scale per output (weights only,
symmetric); `nf4` half a byte, and a scale per 64 weights. bitsandbytes makes their codes, on CPUs and GPUs; such a
weight is dequantised to the model's dtype only while its linear or its expert is multiplied, in training and in
sampling, so their logprobs agree as they do without quantisation. Adapters stay in float32. Embeddings, the
unembedding, norms and routers are not quantised.

A matrix is quantised where the model will be, one after the other, so that the unquantised model need not fit there.

Shapes: E matrices (1 of a linear, or one for each expert), I inputs and O outputs of a linear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn

from tinsmith.backends.torch.expert_weights import DequantisedWeights, MakeExpertWeights
from tinsmith.backends.torch.fp8 import Fp8Codes, Fp8ExpertWeights, Fp8Linear
from tinsmith.backends.torch.lora import ForwardContext
from tinsmith.backends.torch.quantised_linear import QuantisedLinear, WeightCodes
from tinsmith.errors import SettingsError

KINDS = ("off", "int8", "nf4", "fp8")

BLOCK = 64
"""Weights that share a scale in nf4."""


@dataclass(frozen=True, slots=True)
class Quantiser:
    """Makes what holds codes in place of weights."""

    quantise: Callable[[Tensor], WeightCodes]
    linear: type[QuantisedLinear]
    make_expert_weights: MakeExpertWeights

    def make_linear(self, name: str, group: str, linear: nn.Linear, context: ForwardContext) -> QuantisedLinear:
        return self.linear(name, group, linear, context, self.quantise)


class _Int8:
    def __init__(self, library: ModuleType, weight_EOI: Tensor, device: torch.device) -> None:
        self._codes_EOI = torch.empty(weight_EOI.shape, dtype=torch.int8, device=device)
        self._scale_EO1 = torch.empty(*weight_EOI.shape[:2], 1, device=device)
        self.dtype = weight_EOI.dtype
        for index, weight_OI in enumerate(weight_EOI):
            # The library rounds in the dtype of its input. Its GPU kernel takes only float16, whose range is smaller
            # than bfloat16's; so codes are made once on the host and are the same on every device.
            codes_OI, largest_O, _ = library.int8_vectorwise_quant(weight_OI.float().cpu())
            self._codes_EOI[index].copy_(codes_OI)
            self._scale_EO1[index].copy_(largest_O[:, None] / 127.0)

    def tensors(self) -> list[Tensor]:
        return [self._codes_EOI, self._scale_EO1]

    def weight(self, index: int) -> Tensor:
        return self._dequantise(self._codes_EOI[index], self._scale_EO1[index])

    def weights(self) -> Tensor:
        return self._dequantise(self._codes_EOI, self._scale_EO1)

    def _dequantise(self, codes: Tensor, scale: Tensor) -> Tensor:
        # In float32, rounded once, without a copy of that size.
        return torch.mul(codes, scale, out=torch.empty(codes.shape, dtype=self.dtype, device=codes.device))


class _NF4:
    def __init__(self, library: ModuleType, weight_EOI: Tensor, device: torch.device) -> None:
        self._library, self.dtype = library, weight_EOI.dtype
        num, *self._shape = weight_EOI.shape
        self._size = self._shape[0] * self._shape[1]
        self._num_blocks = -(-self._size // BLOCK)  # of a matrix
        self._codes = torch.empty(num, self._num_blocks * BLOCK // 2, 1, dtype=torch.uint8, device=device)
        self._scales = torch.empty(num, self._num_blocks, device=device)
        for index, weight_OI in enumerate(weight_EOI):
            # One block per row: the library's CPU kernel mixes up the scales if rows do not end with a block.
            flat = nn.functional.pad(weight_OI.flatten(), (0, -self._size % BLOCK)).view(-1, BLOCK)
            codes, state = library.quantize_4bit(flat.to(device), blocksize=BLOCK, quant_type="nf4")
            self._codes[index].copy_(codes)
            self._scales[index].copy_(state.absmax)
            self._table = state.code

    def tensors(self) -> list[Tensor]:
        return [self._codes, self._scales]  # the table of the codes' values stays: 64 bytes

    def weight(self, index: int) -> Tensor:
        return self._dequantise(self._codes[index], self._scales[index])[0]

    def weights(self) -> Tensor:
        return self._dequantise(self._codes.flatten(0, 1), self._scales.flatten())

    def _dequantise(self, codes: Tensor, scales: Tensor) -> Tensor:
        state = self._library.QuantState(
            absmax=scales, shape=torch.Size((len(scales), BLOCK)), code=self._table, blocksize=BLOCK,
            quant_type="nf4", dtype=self.dtype,
        )  # fmt: skip
        values = self._library.dequantize_4bit(codes, state).view(-1, self._num_blocks * BLOCK)
        return values[:, : self._size].reshape(-1, *self._shape)


def choose_quantiser(kind: str, device: torch.device) -> Quantiser | None:
    """What makes codes of this kind on the device; None for `off`. Raises SettingsError if bitsandbytes is missing."""
    if kind not in KINDS:
        raise SettingsError(f"quantize is {kind!r}; choose 'off', 'int8', 'nf4' or 'fp8'")
    if kind == "off":
        return None
    if kind == "fp8":
        make_codes = partial(Fp8Codes, device=device)
        return Quantiser(make_codes, Fp8Linear, lambda weight_EOI: Fp8ExpertWeights(make_codes(weight_EOI)))
    try:
        from bitsandbytes import functional
    except ImportError:
        raise SettingsError(f"quantize is {kind!r}, which needs bitsandbytes: install tinsmith[quantize]") from None
    codes = partial(_Int8 if kind == "int8" else _NF4, functional, device=device)
    return Quantiser(codes, QuantisedLinear, lambda weight_EOI: DequantisedWeights(codes(weight_EOI)))
