"""A frozen base in fewer bits: its linears keep codes and scales in place of their weights.

`int8` keeps a byte a number and a scale for each output (weights only, symmetric); `nf4` half a byte, and a scale for
each 64 numbers. bitsandbytes makes the codes, on a CPU as on a GPU. A weight exists whole only while its linear is
multiplied, in the model's dtype, and is the same in training and in sampling; so logprobs of the two agree as they do
without. Adapters stay in float32. Embeddings, the unembedding, norms and routers are left as they are; a model with
routed experts, most of whose weights are no linears, is refused.

Shapes: I inputs and O outputs of a linear.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Protocol

from torch import Tensor, nn

from tinsmith.backends.torch.lora import MultiLoRALinear, Switchboard
from tinsmith.errors import SettingsError

KINDS = ("off", "int8", "nf4")

BLOCK = 64
"""Numbers that share a scale in nf4."""

MakeLinear = Callable[[str, str, nn.Linear, Switchboard], MultiLoRALinear]


class _Codes(Protocol):
    """What stands in for a weight."""

    num_bytes: int

    def weight(self) -> Tensor: ...


class _Int8:
    def __init__(self, library: ModuleType, weight_OI: Tensor) -> None:
        # The library rounds in the dtype that it is given. Its kernel for GPUs takes float16 only, whose range is less
        # than bfloat16's; so codes are made on the host, once, and are the same on every device.
        codes_OI, largest_O, _ = library.int8_vectorwise_quant(weight_OI.float().cpu())
        self._codes_OI = codes_OI.to(weight_OI.device)
        self._scale_O1 = (largest_O.to(weight_OI.device) / 127.0)[:, None]
        self._dtype = weight_OI.dtype
        self.num_bytes = self._codes_OI.nbytes + self._scale_O1.nbytes

    def weight(self) -> Tensor:
        return (self._codes_OI * self._scale_O1).to(self._dtype)


class _NF4:
    def __init__(self, library: ModuleType, weight_OI: Tensor) -> None:
        self._dequantise = library.dequantize_4bit
        self._shape = weight_OI.shape
        # A block a row: the library's kernel for CPUs mistakes the scales where rows do not end with a block.
        flat = nn.functional.pad(weight_OI.flatten(), (0, -weight_OI.numel() % BLOCK)).view(-1, BLOCK)
        self._codes, self._state = library.quantize_4bit(flat, blocksize=BLOCK, quant_type="nf4")
        self.num_bytes = self._codes.nbytes + self._state.absmax.nbytes

    def weight(self) -> Tensor:
        flat = self._dequantise(self._codes, self._state).flatten()
        return flat[: self._shape.numel()].view(self._shape)


class QuantisedLinear(MultiLoRALinear):
    """`weight` is computed whenever it is asked for: whoever keeps it gives up what quantising saves."""

    def __init__(
        self, name: str, group: str, linear: nn.Linear, switchboard: Switchboard, quantise: Callable[[Tensor], _Codes]
    ) -> None:
        super().__init__(name, group, linear, switchboard)
        del self._parameters["weight"]
        self._codes = quantise(linear.weight.detach())

    @property
    def num_bytes(self) -> int:
        """What is kept of the weight."""
        return self._codes.num_bytes

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        # Asked for what is no ordinary attribute, as a parameter of that name would be.
        if name == "weight" and (codes := self.__dict__.get("_codes")) is not None:
            return codes.weight()
        return super().__getattr__(name)


def maker(kind: str) -> MakeLinear:
    """What makes a linear that carries adapters out of a plain one. Raises SettingsError if it cannot be had."""
    if kind not in KINDS:
        raise SettingsError(f"quantize is {kind!r}; choose 'off', 'int8' or 'nf4'")
    if kind == "off":
        return MultiLoRALinear
    try:
        from bitsandbytes import functional
    except ImportError:
        raise SettingsError(f"quantize is {kind!r}, which needs bitsandbytes: install tinsmith[quantize]") from None
    codes = _Int8 if kind == "int8" else _NF4

    def make(name: str, group: str, linear: nn.Linear, switchboard: Switchboard) -> MultiLoRALinear:
        return QuantisedLinear(name, group, linear, switchboard, lambda weight_OI: codes(functional, weight_OI))

    return make


def refuse_experts(kind: str, model: nn.Module) -> None:
    """Raise SettingsError if most of the model would not be quantised."""
    if kind != "off" and any("expert" in name for name, _ in model.named_modules()):
        raise SettingsError(f"quantize is {kind!r}, but the experts of {type(model).__name__} cannot be quantised")
