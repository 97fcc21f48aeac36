"""Which decoders have the layers that `backends.torch.transformer` implements, by their modules on any device.

`has_fusable_layers` looks at the parts of a decoder: their names, sizes and parameters. What the parts are for only
numbers tell, which the base model compares when it has loaded its weights; where they differ, the modules run. A plan
has no numbers, so `has_plain_arithmetic` leaves out, for it alone, decoders that seem to compute something else:
modules take more memory than fused layers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUT = "self_attn.o_proj"
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = "mlp.down_proj"
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
ACTIVATION = "mlp.act_fn"

_LINEARS = (*QKV, OUT, *GATE_UP, DOWN)
_PARTS = frozenset({"self_attn", "mlp", ACTIVATION, *_LINEARS, *LAYER_NORMS})
_DECODER_PARTS = frozenset({"embed_tokens", "layers", "norm", "rotary_emb"})


def has_fusable_layers(decoder: Any, linear: type[nn.Module]) -> bool:  # noqa: ANN401
    """Whether a decoder consists of an embedding, RoPE of whole heads, layers with exactly the implemented parts, whose
    linears are of the class `linear`, and a norm.
    """
    from torch import nn

    if {name for name, _ in decoder.named_children()} != _DECODER_PARTS:
        return False
    layers, rotary = decoder.layers, decoder.rotary_emb
    if not isinstance(layers, nn.ModuleList) or not hasattr(rotary, "inv_freq") or list(rotary.parameters()):
        return False
    width, head_dim = decoder.embed_tokens.weight.shape[1], 2 * rotary.inv_freq.numel()
    return _is_norm(decoder.norm, width) and all(_is_fusable(layer, linear, width, head_dim) for layer in layers)


def _is_fusable(layer: nn.Module, linear: type[nn.Module], width: int, head_dim: int) -> bool:
    modules: dict[str, Any] = {name: module for name, module in layer.named_modules() if name}
    norms = (*LAYER_NORMS, *(HEAD_NORMS if HEAD_NORMS[0] in modules else ()))
    if modules.keys() != _PARTS | set(norms) or any(type(modules[name]) is not linear for name in _LINEARS):
        return False
    parameters = {f"{name}.weight" for name in (*_LINEARS, *norms)}
    parameters |= {f"{name}.bias" for name in _LINEARS if modules[name].bias is not None}
    if {name for name, _ in layer.named_parameters()} != parameters or any(True for _ in layer.buffers()):
        return False
    if any(len({modules[name].bias is None for name in names}) > 1 for names in (QKV, GATE_UP)):
        return False
    (hidden, queries), keys, values, (outputs, back) = (_sizes(modules[name]) for name in (*QKV, OUT))
    gate, up, down = (_sizes(modules[name]) for name in (*GATE_UP, DOWN))
    return (
        modules["self_attn"].head_dim == head_dim
        and hidden == back == width
        and queries == outputs
        and keys == values
        and keys[0] == width
        and queries % head_dim == keys[1] % head_dim == 0
        and gate == up == (width, down[0])
        and down[1] == width
        and all(_is_norm(modules[name], width) for name in LAYER_NORMS)
        and all(_is_norm(modules[name], head_dim) for name in norms[len(LAYER_NORMS) :])
        and _is_silu(modules[ACTIVATION])
    )


def _sizes(linear: Any) -> tuple[int, int]:  # noqa: ANN401
    return linear.in_features, linear.out_features


def _is_norm(module: Any, size: int) -> bool:  # noqa: ANN401
    return hasattr(module, "variance_epsilon") and module.weight.shape == (size,)


def _is_silu(activation: Any) -> bool:  # noqa: ANN401
    """On numbers, since families name it differently."""
    import torch

    x = torch.linspace(-8.0, 8.0, 33, device="cpu")
    return torch.equal(activation(x), torch.nn.functional.silu(x))


def has_plain_arithmetic(decoder: Any, config: PreTrainedConfig) -> bool:  # noqa: ANN401
    """Whether fusable layers show no sign of other arithmetic: a factor beside that of attention's scores, layers
    without RoPE, queries scaled by position, or another order of the rotated halves.
    """
    if any(factor not in (0.0, 1.0) for part in _parts_of(decoder) for factor in _factors(part)):
        return False
    if not all(getattr(layer.self_attn, "use_rope", True) for layer in decoder.layers):
        return False
    rope: dict[str, object] = getattr(config, "rope_parameters", None) or {}
    return "llama_4_scaling_beta" not in rope and _rotates_halves(decoder.layers[0].self_attn)


def _parts_of(decoder: Any) -> Iterator[nn.Module]:  # noqa: ANN401
    yield decoder
    for layer in decoder.layers:
        yield from (layer, layer.self_attn, layer.mlp)


def _factors(part: nn.Module) -> Iterator[float]:
    """Numbers of a module that are neither sizes nor what its attention is called with."""
    for name, value in vars(part).items():
        if isinstance(value, float) and name != "scaling" and not name.endswith("dropout"):
            yield value


def _rotates_halves(attention: nn.Module) -> bool:
    import torch

    rotate = getattr(sys.modules[type(attention).__module__], "rotate_half", None)
    if rotate is None:
        return False
    x = torch.arange(8.0, device="cpu")
    return torch.equal(rotate(x), torch.cat((-x[4:], x[:4])))
