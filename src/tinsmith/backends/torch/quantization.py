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

from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn

from tinsmith.backends.torch.fp8 import Fp8Codes
from tinsmith.backends.torch.frozen_weights import WHOLE, Quantise, WeightCodes
from tinsmith.errors import SettingsError
from tinsmith.plan.memory import NF4_BLOCK

KINDS = ("off", "int8", "nf4", "fp8")


class Int8Codes(WeightCodes):
    """`codes` [E, O, I] and `scales` [E, O, 1]."""

    def __init__(self, library: ModuleType, weight_EOI: Tensor, device: torch.device) -> None:
        super().__init__(weight_EOI)
        self.codes = torch.empty(self.shape, dtype=torch.int8, device=device)
        self.scales = torch.empty(*self.shape[:2], 1, device=device)
        for index, weight_OI in enumerate(weight_EOI):
            # The library rounds in the dtype of its input. Its GPU kernel takes only float16, whose range is smaller
            # than bfloat16's; so codes are made once on the host and are the same on every device.
            codes_OI, largest_O, _ = library.int8_vectorwise_quant(weight_OI.float().cpu())
            self.codes[index].copy_(codes_OI)
            self.scales[index].copy_(largest_O[:, None] / 127.0)

    def _dequantise(self, codes: Tensor, scales: Tensor) -> Tensor:
        # In float32, rounded once, without a copy of that size.
        return torch.mul(codes, scales, out=torch.empty(codes.shape, dtype=self.dtype, device=codes.device))


class NF4Codes(WeightCodes):
    """`codes` [E, bytes of a matrix, 1] and `scales` [E, blocks of a matrix]; the last block of each is padded."""

    def __init__(self, library: ModuleType, weight_EOI: Tensor, device: torch.device) -> None:
        super().__init__(weight_EOI)
        self._library = library
        num_matrices, outputs, inputs = self.shape
        num_blocks = -(-outputs * inputs // NF4_BLOCK)
        self.codes = torch.empty(num_matrices, num_blocks * NF4_BLOCK // 2, 1, dtype=torch.uint8, device=device)
        self.scales = torch.empty(num_matrices, num_blocks, device=device)
        for index, weight_OI in enumerate(weight_EOI):
            # One block per row: the library's CPU kernel mixes up the scales if rows do not end with a block.
            flat = nn.functional.pad(weight_OI.flatten(), (0, -outputs * inputs % NF4_BLOCK)).view(-1, NF4_BLOCK)
            codes, state = library.quantize_4bit(flat.to(device), blocksize=NF4_BLOCK, quant_type="nf4")
            self.codes[index].copy_(codes)
            self.scales[index].copy_(state.absmax)
            self._table = state.code  # of the codes' values, 64 bytes

    def weight(self, index: int) -> Tensor:
        return super().weight(index)[0]

    def weights(self) -> Tensor:
        return self._dequantise(self.codes.flatten(0, 1), self.scales.flatten())

    def _dequantise(self, codes: Tensor, scales: Tensor) -> Tensor:
        state = self._library.QuantState(
            absmax=scales, shape=torch.Size((len(scales), NF4_BLOCK)), code=self._table, blocksize=NF4_BLOCK,
            quant_type="nf4", dtype=self.dtype,
        )  # fmt: skip
        _, outputs, inputs = self.shape
        values = self._library.dequantize_4bit(codes, state).view(-1, self.scales.shape[1] * NF4_BLOCK)
        return values[:, : outputs * inputs].reshape(-1, outputs, inputs)

    def move_(self, device: torch.device) -> None:
        super().move_(device)
        self._table = self._table.to(device)

    def _cut(self, experts: slice, outputs: slice, inputs: slice) -> tuple[Tensor, Tensor]:
        codes, scales = self.codes[experts], self.scales[experts]
        if outputs == inputs == WHOLE:
            return codes, scales
        _, num_outputs, num_inputs = self.shape
        start, stop, _ = inputs.indices(num_inputs)
        if num_inputs % NF4_BLOCK or start % NF4_BLOCK or stop % NF4_BLOCK:
            raise ValueError(
                f"nf4 has a scale for {NF4_BLOCK} inputs, and a part would have {stop - start} of {num_inputs}"
            )
        blocks = slice(start // NF4_BLOCK, stop // NF4_BLOCK)
        codes = codes.view(-1, num_outputs, num_inputs // NF4_BLOCK, NF4_BLOCK // 2)[:, outputs, blocks]
        scales = scales.view(-1, num_outputs, num_inputs // NF4_BLOCK)[:, outputs, blocks]
        return codes.flatten(1)[..., None], scales.flatten(1)


def choose_quantiser(kind: str, device: torch.device) -> Quantise | None:
    """What makes codes of this kind on the device; None for `off`. Raises SettingsError if bitsandbytes is missing."""
    if kind not in KINDS:
        raise SettingsError(f"quantize is {kind!r}; choose 'off', 'int8', 'nf4' or 'fp8'")
    if kind == "off":
        return None
    if kind == "fp8":
        return partial(Fp8Codes, device=device)
    try:
        from bitsandbytes import functional
    except ImportError:
        raise SettingsError(f"quantize is {kind!r}, which needs bitsandbytes: install tinsmith[quantize]") from None
    return partial(Int8Codes if kind == "int8" else NF4Codes, functional, device=device)
