"""A quantised frozen base: its linears store codes and scales in place of their weights.

`fp8` multiplies 8-bit floats (`fp8.Fp8Linear`). `int8` stores one byte per weight and a scale per output (weights
only, symmetric); `nf4` half a byte, and a scale per 64 weights. bitsandbytes makes their codes, on CPUs and GPUs; such
a weight is dequantised to the model's dtype only while its linear is multiplied, in training and in sampling, so their
logprobs agree as they do without quantisation. Adapters stay in float32. Embeddings, the unembedding, norms and routers
are not quantised; models with routed experts, most of whose weights are not linears, are refused.

Shapes: I inputs and O outputs of a linear.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor, nn

from tinsmith.backends.torch.fp8 import Fp8Linear
from tinsmith.backends.torch.lora import ForwardContext, MultiLoRALinear
from tinsmith.backends.torch.quantised_linear import MakeLinear, QuantisedLinear
from tinsmith.errors import SettingsError

KINDS = ("off", "int8", "nf4", "fp8")

BLOCK = 64
"""Weights that share a scale in nf4."""


class _Int8:
    def __init__(self, library: ModuleType, weight_OI: Tensor) -> None:
        # The library rounds in the dtype of its input. Its GPU kernel takes only float16, whose range is smaller than
        # bfloat16's; so codes are made once on the host and are the same on every device.
        codes_OI, largest_O, _ = library.int8_vectorwise_quant(weight_OI.float().cpu())
        self._codes_OI = codes_OI.to(weight_OI.device)
        self._scale_O1 = (largest_O.to(weight_OI.device) / 127.0)[:, None]
        self._dtype = weight_OI.dtype
        self.num_bytes = self._codes_OI.nbytes + self._scale_O1.nbytes

    def tensors(self) -> list[Tensor]:
        return [self._codes_OI, self._scale_O1]

    def weight(self) -> Tensor:
        return (self._codes_OI * self._scale_O1).to(self._dtype)


class _NF4:
    def __init__(self, library: ModuleType, weight_OI: Tensor) -> None:
        self._dequantise = library.dequantize_4bit
        self._shape = weight_OI.shape
        # One block per row: the library's CPU kernel mixes up the scales if rows do not end with a block.
        flat = nn.functional.pad(weight_OI.flatten(), (0, -weight_OI.numel() % BLOCK)).view(-1, BLOCK)
        self._codes, self._state = library.quantize_4bit(flat, blocksize=BLOCK, quant_type="nf4")
        self.num_bytes = self._codes.nbytes + self._state.absmax.nbytes

    def tensors(self) -> list[Tensor]:
        return [self._codes, self._state.absmax]  # the table of the codes' values stays: 64 bytes

    def weight(self) -> Tensor:
        flat = self._dequantise(self._codes, self._state).flatten()
        return flat[: self._shape.numel()].view(self._shape)


def choose_linear_factory(kind: str) -> MakeLinear:
    """A factory that makes adaptable linears from plain ones. Raises SettingsError if bitsandbytes is missing."""
    if kind not in KINDS:
        raise SettingsError(f"quantize is {kind!r}; choose 'off', 'int8', 'nf4' or 'fp8'")
    if kind == "off":
        return MultiLoRALinear
    if kind == "fp8":
        return Fp8Linear
    try:
        from bitsandbytes import functional
    except ImportError:
        raise SettingsError(f"quantize is {kind!r}, which needs bitsandbytes: install tinsmith[quantize]") from None
    codes = _Int8 if kind == "int8" else _NF4

    def make(name: str, group: str, linear: nn.Linear, context: ForwardContext) -> MultiLoRALinear:
        return QuantisedLinear(name, group, linear, context, lambda weight_OI: codes(functional, weight_OI))

    return make


def refuse_experts(kind: str, model: nn.Module) -> None:
    """Raise SettingsError if most of the model would stay unquantised."""
    if kind != "off" and any("expert" in name for name, _ in model.named_modules()):
        raise SettingsError(f"quantize is {kind!r}, but the experts of {type(model).__name__} cannot be quantised")
