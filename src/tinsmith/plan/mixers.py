"""Supported layers with a state instead of keys and values: their states, and which linears carry adapters.

Facts about transformers' classes by name, read from modules on any device: `backends.torch.recurrent` runs these
modules, and a plan counts them. They stay lists: how a class exchanges its state was verified and its memory measured
for each, and PEFT refuses linears by class. One that is not in `SAVED_PER_FEATURE` is refused. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    from torch import nn

SAVED_PER_FEATURE: Mapping[str, float] = {
    "BambaMixer": 5.5,
    "FalconH1Mixer": 5.5,
    "FalconMambaMixer": 9.5,
    "GraniteMoeHybridMambaLayer": 5.5,
    "JambaMambaMixer": 9.5,
    "KimiLinearDeltaAttention": 2.0,
    "Lfm2MoeShortConv": 1.0,
    "Lfm2ShortConv": 1.0,
    "Mamba2Mixer": 5.5,
    "MambaMixer": 9.5,
    "MiniMaxLightningAttention": 2.5,
    "NemotronHMamba2Mixer": 5.5,
    "Qwen3NextGatedDeltaNet": 2.5,
    "Qwen3_5GatedDeltaNet": 2.5,
    "Qwen3_5MoeGatedDeltaNet": 2.5,
}
"""Classes verified to start from zero without a cache, to continue from a cache in pieces of any length, and to compute
each sequence of a batch separately; with the float32 elements that they save for backward, per token and per input and
output of their linears, from measurements with the chunks that run.
"""

ROW_BY_ROW = frozenset({"FalconMambaMixer", "JambaMambaMixer", "MambaMixer"})
"""Mixers that take one row at a time where they continue from a state."""

_WHOLE_SEQUENCE = ROW_BY_ROW | {"MiniMaxLightningAttention"}  # which loops over the rows itself

_UNADAPTED_LINEARS = {
    "FalconH1Mixer": frozenset({"out_proj"}),
    "FalconMambaMixer": frozenset({"dt_proj", "out_proj"}),
    "JambaMambaMixer": frozenset({"dt_proj"}),
    "Mamba2Mixer": frozenset({"out_proj"}),
    "MambaMixer": frozenset({"dt_proj", "out_proj"}),
    "NemotronHMamba2Mixer": frozenset({"out_proj"}),
}
"""Last names of linears without adapters, by class: Mamba-1 uses the weight of `dt_proj` directly, and PEFT refuses the
others because fused kernels use theirs directly.
"""

_RECURRENT: Mapping[str, tuple[str, ...]] = {
    "FalconMambaMixer": ("intermediate_size", "ssm_state_size"),
    "JambaMambaMixer": ("intermediate_size", "ssm_state_size"),
    "KimiLinearDeltaAttention": ("num_heads", "head_dim", "head_dim"),
    "Lfm2MoeShortConv": (),
    "Lfm2ShortConv": (),
    "MambaMixer": ("intermediate_size", "ssm_state_size"),
    "MiniMaxLightningAttention": ("num_attention_heads", "head_dim", "head_dim"),
    "Qwen3NextGatedDeltaNet": ("num_v_heads", "head_k_dim", "head_v_dim"),
    "Qwen3_5GatedDeltaNet": ("num_v_heads", "head_k_dim", "head_v_dim"),
    "Qwen3_5MoeGatedDeltaNet": ("num_v_heads", "head_k_dim", "head_v_dim"),
}
"""Dimensions of a sequence's recurrent state; MAMBA2 for other classes."""

MAMBA2 = ("num_heads", "head_dim", "ssm_state_size")


def is_mixer(module: nn.Module) -> bool:
    return type(module).__name__ in SAVED_PER_FEATURE


def is_whole(mixer: nn.Module) -> bool:
    """Whether it continues from a state row by row. Context ranks compute whole sequences of these."""
    return type(mixer).__name__ in _WHOLE_SEQUENCE


def count_saved_activations(mixer: nn.Module) -> float:
    """float32 elements that a mixer saves per token for backward, in addition to its linears."""
    linears = [module for module in mixer.modules() if hasattr(module, "in_features")]
    features = sum(cast(int, linear.in_features) + cast(int, linear.out_features) for linear in linears)
    return SAVED_PER_FEATURE[type(mixer).__name__] * features


def count_state_elements(mixer: nn.Module) -> int:
    """Elements of a sequence's state: the last inputs of its convolution, and its recurrent state."""
    name, num_elements = type(mixer).__name__, 0
    if sizes := _RECURRENT.get(name, MAMBA2):
        num_elements = 1
        for size in sizes:
            num_elements *= cast(int, getattr(mixer, size))
    for module in mixer.children():
        if type(module).__name__ == "Conv1d":
            num_elements += cast(int, module.out_channels) * cast("tuple[int]", module.kernel_size)[0]
    return num_elements


class MixerLinears(NamedTuple):
    """The linears of a decoder's mixers: all, those without adapters, and those with one adapter per part."""

    all: set[nn.Module]
    excluded: set[nn.Module]
    parts: dict[nn.Module, Sequence[tuple[str, int]]]

    @classmethod
    def of(cls, decoder: nn.Module) -> MixerLinears:
        linears = cls(set(), set(), {})
        for mixer in filter(is_mixer, decoder.modules()):
            excluded, parts = _UNADAPTED_LINEARS.get(type(mixer).__name__, frozenset()), _parts(mixer)
            for name, linear in mixer.named_modules():
                if type(linear).__name__ == "Linear":
                    linears.all.add(linear)
                    if name in excluded:
                        linears.excluded.add(linear)
                    if name in parts:
                        linears.parts[linear] = parts[name]
        return linears


def _parts(mixer: nn.Module) -> dict[str, Sequence[tuple[str, int]]]:
    """Linears on which Tinker has several adapters (`tinker_cookbook.weights`): their last names and outputs."""
    if type(mixer).__name__ in ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"):
        keys, values = cast(int, mixer.key_dim), cast(int, mixer.value_dim)
        return {"in_proj_qkv": (("in_proj_q", keys), ("in_proj_k", keys), ("in_proj_v", values))}
    if type(mixer).__name__ == "NemotronHMamba2Mixer":
        inner = cast(int, mixer.intermediate_size)
        return {"in_proj": (("gate_proj", inner), ("x_proj", inner))}
    return {}
