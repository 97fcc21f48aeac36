"""The decoder that most families share, written out: fewer and larger kernels than its modules make, for rows that no
gradient will be asked of.

Llama, Mistral, Qwen2 and Qwen3 are the same layers but for biases, norms of queries and keys, and windows. Here the
linears that read the same input are one product over weights packed once for oneDNN, an adapter's matrices go with
them in two products, and norms and rotations take all heads together. The modules stay the oracle: whatever is not
exactly those layers is refused (None from `of`), and at load the base model compares the two.

Packed weights are a second copy, made when the first rows come, and only where there is memory to spare. Knows no
loss, no sampler and no request; attention is the plan's affair, as it is the modules'.

Shapes: T rows, D hidden size, H query heads, G key heads, E head dim, I inputs and O outputs of a linear, r rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu
from transformers.activations import SiLUActivation

from tinsmith.backends.torch.attention import PLAN_KEY, AttentionOptions, AttentionPlan
from tinsmith.backends.torch.lora import HAS_ONEDNN, Adapter, MultiLoRALinear, Pair, Routing, add_product_, product

LAYERS = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUT = "self_attn.o_proj"
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = "mlp.down_proj"

SPARE_SHARE = 0.25
"""Packed weights may take this share of the memory that is free."""


class FusedLinear:
    """Linears that read the same rows, as one: their weights below each other, their adapters beside each other."""

    def __init__(self, linears: Sequence[MultiLoRALinear]) -> None:
        self._linears = linears
        self._name = linears[0].name
        self.out_features = sum(linear.out_features for linear in linears)
        weight_OI = torch.cat([linear.weight for linear in linears])
        self._weight_OI = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)
        biases = [linear.bias for linear in linears]
        self._bias_O = None if biases[0] is None else torch.cat(cast("list[Tensor]", biases))

    def __call__(self, x_TI: Tensor, routing: Routing) -> Tensor:
        """[T, O]: every linear's outputs, one after the other."""
        y_TO = torch.ops.mkldnn._linear_pointwise(x_TI, self._weight_OI, self._bias_O, "none", [], "")
        for start, stop, adapter in routing.segments:
            if adapter is not None and (pair := self._pair(adapter)) is not None:
                inner = product(x_TI[start:stop], pair[0].t(), x_TI.dtype)
                add_product_(y_TO[start:stop], inner, pair[1].t(), 1.0)
        return y_TO

    def _pair(self, adapter: Adapter) -> Pair | None:
        """A of all linears below each other, and B times its scale, each linear's own in its own rows and columns."""
        if self._name not in adapter.fused:
            adapter.fused[self._name] = self._fuse(adapter)
        return adapter.fused[self._name]

    def _fuse(self, adapter: Adapter) -> Pair | None:
        carried = [linear for linear in self._linears if linear.name in adapter.compute]
        if not carried:
            return None
        a_rI = torch.cat([adapter.compute[linear.name][0] for linear in carried])
        b_Or = a_rI.new_zeros(self.out_features, len(a_rI))
        row, column = 0, 0
        for linear in self._linears:
            if linear.name in adapter.compute:
                own = adapter.compute[linear.name][1]
                torch.mul(own, adapter.scale, out=b_Or[row : row + len(own), column : column + own.shape[1]])
                column += own.shape[1]
            row += linear.out_features
        return a_rI, b_Or


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weight, self.eps)


@dataclass(slots=True)
class _Layer:
    index: int
    before_attention: _Norm
    qkv: FusedLinear
    head_norms: tuple[Tensor, float] | None  # [H + G, E]: a weight for each head of queries and keys
    out: FusedLinear
    before_mlp: _Norm
    gate_up: FusedLinear
    down: FusedLinear
    num_heads: int
    num_keys: int
    head_dim: int
    attention: AttentionOptions


class _Asked:
    """An AttentionPlan that attends to nothing and notes what each layer asks of it."""

    def __init__(self) -> None:
        self.options: dict[int, AttentionOptions] = {}

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        self.options[layer] = options
        return q_THD.new_zeros(*q_THD.shape[:2], v_TGD.shape[2])


class Decoder:
    """Use `of`, then `prepare` once rows come."""

    def __init__(self, modules: nn.Module) -> None:
        self._modules = modules
        self._layers: list[_Layer] = []
        self._final = _norm(modules, "norm")

    @classmethod
    def of(cls, modules: nn.Module) -> Decoder | None:
        """None where the modules do anything that is not written out here, or oneDNN is not there for them."""
        layers = getattr(modules, "layers", None)
        if not isinstance(layers, nn.ModuleList) or not all(_is_known(layer) for layer in layers):
            return None
        weight = next(modules.parameters())
        return cls(modules) if _has_onednn(weight) else None

    @property
    def ready(self) -> bool:
        return bool(self._layers)

    def prepare(self) -> bool:
        """Pack the weights; False if there is no memory for them."""
        linears = [module for module in self._modules.modules() if isinstance(module, MultiLoRALinear)]
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if sum(linear.weight.nbytes for linear in linears) > SPARE_SHARE * free:
            return False
        asked, token = _Asked(), torch.zeros(1, 1, dtype=torch.int64)
        self._modules(input_ids=token, position_ids=token, use_cache=False, **{PLAN_KEY: asked})
        layers = cast(nn.ModuleList, self._modules.layers)
        self._layers = [_layer(index, layer, asked.options[index]) for index, layer in enumerate(layers)]
        return True

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan, routing: Routing) -> Tensor:
        """[T, D]: hidden states after the final norm."""
        x_TD = cast("nn.Embedding", self._modules.embed_tokens)(tokens_T)
        rotary = cast(nn.Module, self._modules.rotary_emb)(x_TD, positions_T[None])
        cos_T1E, sin_T1E = (table[0][:, None] for table in rotary)
        half = sin_T1E.shape[-1] // 2
        signed_T1E = torch.cat((-sin_T1E[..., :half], sin_T1E[..., half:]), -1)
        for layer in self._layers:
            x_TD = x_TD + _attend(layer, layer.before_attention(x_TD), cos_T1E, signed_T1E, plan, routing)
            gate_up = layer.gate_up(layer.before_mlp(x_TD), routing)
            gate, up = gate_up.split(gate_up.shape[1] // 2, -1)
            x_TD += layer.down(silu(gate).mul_(up), routing)
        return self._final(x_TD)


def _attend(
    layer: _Layer, x_TD: Tensor, cos_T1E: Tensor, signed_T1E: Tensor, plan: AttentionPlan, routing: Routing
) -> Tensor:
    heads, keys = layer.num_heads, layer.num_keys
    qkv = layer.qkv(x_TD, routing).view(len(x_TD), heads + 2 * keys, layer.head_dim)
    turned = qkv[:, : heads + keys]
    if layer.head_norms is not None:
        weight, eps = layer.head_norms
        turned = rms_norm(turned, turned.shape[-1:], None, eps) * weight
    # x cos + (-x2, x1) sin, with the halves exchanged and the sign in the sine.
    turned = torch.addcmul(turned * cos_T1E, turned.roll(layer.head_dim // 2, -1), signed_T1E)
    out_THE = plan.attend(layer.index, turned[:, :heads], turned[:, heads:], qkv[:, heads + keys :], **layer.attention)
    return layer.out(out_THE.reshape(len(x_TD), -1), routing)


def _has_onednn(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not HAS_ONEDNN:
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def _is_known(layer: nn.Module) -> bool:
    if type(layer).__name__ not in LAYERS:
        return False
    linears = [layer.get_submodule(name) for name in (*QKV, OUT, *GATE_UP, DOWN)]
    activation = layer.get_submodule("mlp.act_fn")
    return all(type(linear) is MultiLoRALinear for linear in linears) and isinstance(
        activation, SiLUActivation | nn.SiLU
    )


def _layer(index: int, layer: nn.Module, attention: AttentionOptions) -> _Layer:
    own = layer.get_submodule("self_attn")
    head_dim = cast(int, own.head_dim)
    qkv = _linears(layer, QKV)
    num_heads, num_keys = (linear.out_features // head_dim for linear in qkv[:2])
    norms = None
    if hasattr(own, "q_norm"):
        q_norm, k_norm = _norm(own, "q_norm"), _norm(own, "k_norm")
        weights = [q_norm.weight.expand(num_heads, -1), k_norm.weight.expand(num_keys, -1)]
        norms = (torch.cat(weights), q_norm.eps)
    return _Layer(
        index=index,
        before_attention=_norm(layer, "input_layernorm"),
        qkv=FusedLinear(qkv),
        head_norms=norms,
        out=FusedLinear(_linears(layer, [OUT])),
        before_mlp=_norm(layer, "post_attention_layernorm"),
        gate_up=FusedLinear(_linears(layer, GATE_UP)),
        down=FusedLinear(_linears(layer, [DOWN])),
        num_heads=num_heads,
        num_keys=num_keys,
        head_dim=head_dim,
        attention=attention,
    )


def _linears(layer: nn.Module, names: Sequence[str]) -> list[MultiLoRALinear]:
    return [cast(MultiLoRALinear, layer.get_submodule(name)) for name in names]


def _norm(parent: nn.Module, name: str) -> _Norm:
    module = parent.get_submodule(name)
    return _Norm(cast(Tensor, module.weight), cast(float, module.variance_epsilon))
