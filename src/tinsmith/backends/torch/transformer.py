"""The decoder that most families share, written out: fewer and larger kernels than its modules make, for rows that no
gradient will be asked of.

Llama, Mistral, Qwen2 and Qwen3 are the same layers but for biases, norms of queries and keys, and windows. Here the
linears that read the same input are one product over weights packed once for oneDNN, and norms and rotations take all
heads together. The modules stay the oracle:
whatever is not exactly those layers is refused (None from `of`), and at load the base model compares the two.

Packed weights are a second copy, made when the first rows come, and only where there is memory to spare. Knows no
loss, no sampler and no request; attention is the plan's affair, as it is the modules'.

Shapes: T rows, D hidden size, H query heads, G key heads, E head dim, I inputs and O outputs of a linear, r rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, silu
from transformers.activations import SiLUActivation

from tinsmith.backends.torch.attention import PLAN_KEY, AttentionOptions, AttentionPlan, NotingPlan
from tinsmith.backends.torch.lora import MultiLoRALinear
from tinsmith.backends.torch.lora_ops import Routing, Site
from tinsmith.backends.torch.products import HAS_ONEDNN, linear_product, packed
from tinsmith.backends.torch.threads import WIDE_ATTENTION, Threads

LAYERS = frozenset(
    {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "Qwen3VLTextDecoderLayer"}
)

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUT = "self_attn.o_proj"
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = "mlp.down_proj"


SPARE_SHARE = 0.25
"""Packed weights may take this share of the memory that is free."""

FEWEST_POSITIONS = 1024
"""Of the tables of rotations."""


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weight, self.eps)


class PackedLinear:
    """Linears that read the same rows, as one product over their packed weights, with what adapters add."""

    def __init__(self, linears: Sequence[MultiLoRALinear], threads: Threads) -> None:
        self.site = Site([linear.target for linear in linears])
        self._threads = threads
        self._weight_OI = packed(torch.cat([linear.weight for linear in linears]))
        biases = [linear.bias for linear in linears]
        self._bias_O = None if biases[0] is None else torch.cat(cast("list[Tensor]", biases))

    def __call__(self, x_TI: Tensor, routing: Routing, dtype: torch.dtype | None = None) -> Tensor:
        """[T, O]: every linear's outputs, one after the other; in `dtype`, to which adapters' are added. Rows behind
        the routing's are of the base model.
        """
        self._threads.wide()
        y_TO = linear_product(x_TI, self._weight_OI, self._bias_O).to(dtype or x_TI.dtype)
        self._threads.narrow()
        self.site.forward_(y_TO, x_TI, self.site.work(routing))
        return y_TO


@dataclass(slots=True)
class _Layer:
    index: int
    before_attention: _Norm
    qkv: PackedLinear
    head_norms: tuple[Tensor, float] | None  # [H + G, E]: a weight for each head of queries and keys
    out: PackedLinear
    before_mlp: _Norm
    gate_up: PackedLinear
    down: PackedLinear
    num_heads: int
    num_keys: int
    head_dim: int
    attention: AttentionOptions


class _Ending(NamedTuple):
    """What is left of a step behind the last layer's attention, where nobody asks for the other rows."""

    rows_n: Tensor
    routing: Routing


class Decoder:
    """Use `of`, then `prepare` once rows come."""

    def __init__(self, modules: nn.Module, unembedding: MultiLoRALinear, threads: Threads) -> None:
        self._modules = modules
        self._threads = threads
        self._unembedding = unembedding
        self._layers: list[_Layer] = []
        self._head: PackedLinear | None = None
        self._final = _norm(modules, "norm")
        self._rotary = (torch.empty(0), torch.empty(0))

    @classmethod
    def of(cls, modules: nn.Module, unembedding: MultiLoRALinear, threads: Threads) -> Decoder | None:
        """None where the modules do anything that is not written out here, or a CPU lacks oneDNN for them."""
        if not are_known(modules):
            return None
        return cls(modules, unembedding, threads) if _has_onednn(next(modules.parameters())) else None

    @property
    def ready(self) -> bool:
        return bool(self._layers)

    def prepare(self) -> bool:
        """Pack the weights; False if there is no memory for them."""
        linears = [module for module in self._modules.modules() if isinstance(module, MultiLoRALinear)]
        linears.append(self._unembedding)
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if sum(linear.weight.nbytes for linear in linears) > SPARE_SHARE * free:
            return False
        asked = asked_of_attention(self._modules)
        layers = cast(nn.ModuleList, self._modules.layers)
        self._layers = [_layer(index, layer, asked[index], self._threads) for index, layer in enumerate(layers)]
        self._head = PackedLinear([self._unembedding], self._threads)
        return True

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        plan: AttentionPlan,
        routing: Routing,
        wanted: Sequence[int] | None = None,
    ) -> Tensor:
        """[T, D]: hidden states after the final norm; of the `wanted` rows alone, which ascend, if these are given."""
        num_rows = len(tokens_T)
        padding = round_up(num_rows) - num_rows
        if padding:
            # More of the last row: oneDNN compiles each product for each number of rows.
            tokens_T, positions_T = (torch.cat([x, x[-1:].expand(padding)]) for x in (tokens_T, positions_T))
        x_TD = cast("nn.Embedding", self._modules.embed_tokens)(tokens_T)
        rotation = self._rotation(x_TD, positions_T)
        with self._threads.mixed(num_rows):
            if wanted is None:
                return self._through(x_TD, rotation, plan, routing, num_rows)[:num_rows]
            ending = self._ending(routing, wanted, x_TD.device)
            return self._through(x_TD, rotation, plan, routing, num_rows, ending)[: len(wanted)]

    def _ending(self, routing: Routing, wanted: Sequence[int], device: torch.device) -> _Ending:
        padding = round_up(len(wanted)) - len(wanted)
        rows_n = torch.tensor([*wanted, *[wanted[-1]] * padding], device=device)
        return _Ending(rows_n, routing.only(wanted))

    def logits(self, hidden_TD: Tensor, routing: Routing) -> Tensor | None:
        """[T, V] float32; None if the unembedding is not laid out anew. What adapters add is rounded apart, as it is in
        the unembedding's own module.
        """
        if self._head is None:
            return None
        with self._threads.mixed(len(hidden_TD)):
            return self._head(hidden_TD, routing, torch.float32)

    def _through(
        self,
        x_TD: Tensor,
        rotation: tuple[Tensor, Tensor],
        plan: AttentionPlan,
        routing: Routing,
        num_rows: int,
        ending: _Ending | None = None,
    ) -> Tensor:
        for layer in self._layers:
            out_TO = self._attend(layer, layer.before_attention(x_TD), rotation, plan, routing, num_rows)
            if ending is not None and layer is self._layers[-1]:
                x_TD, out_TO = x_TD.index_select(0, ending.rows_n), out_TO.index_select(0, ending.rows_n)
                routing = ending.routing
            x_TD = x_TD + layer.out(out_TO, routing)
            gate_up = layer.gate_up(layer.before_mlp(x_TD), routing)
            gate, up = gate_up.split(gate_up.shape[1] // 2, -1)
            x_TD += layer.down(silu(gate).mul_(up), routing)
        return self._final(x_TD)

    def _attend(
        self,
        layer: _Layer,
        x_TD: Tensor,
        rotation: tuple[Tensor, Tensor],
        plan: AttentionPlan,
        routing: Routing,
        num_rows: int,
    ) -> Tensor:
        heads, keys = layer.num_heads, layer.num_keys
        qkv = layer.qkv(x_TD, routing).view(len(x_TD), heads + 2 * keys, layer.head_dim)
        turned = qkv[:, : heads + keys]
        if layer.head_norms is not None:
            weight, eps = layer.head_norms
            turned = rms_norm(turned, turned.shape[-1:], None, eps) * weight
        # x cos + (-x2, x1) sin, with the halves exchanged and the sign in the sine.
        cos_T1E, signed_T1E = rotation
        turned = torch.addcmul(turned * cos_T1E, turned.roll(layer.head_dim // 2, -1), signed_T1E)[:num_rows]
        values = qkv[:num_rows, heads + keys :]
        if num_rows >= WIDE_ATTENTION:
            self._threads.wide()
        out_TO = plan.attend(layer.index, turned[:, :heads], turned[:, heads:], values, **layer.attention).flatten(1)
        self._threads.narrow()
        if len(x_TD) > num_rows:
            out_TO = pad(out_TO, (0, 0, 0, len(x_TD) - num_rows))
        return out_TO

    def _rotation(self, x_TD: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """[T, 1, E] each: cosines, and sines whose first half is negative, of tables that grow with the positions."""
        last = int(positions_T.max())
        if last >= len(self._rotary[0]):
            all_P = torch.arange(max(1 << last.bit_length(), FEWEST_POSITIONS))
            cos_1PE, sin_1PE = cast(nn.Module, self._modules.rotary_emb)(x_TD, all_P[None])
            self._rotary = cos_1PE[0][:, None], _signed(sin_1PE)[0][:, None]
        cos_PE, signed_PE = self._rotary
        return cos_PE.index_select(0, positions_T), signed_PE.index_select(0, positions_T)


def _signed(sin_1PE: Tensor) -> Tensor:
    half = sin_1PE.shape[-1] // 2
    return torch.cat((-sin_1PE[..., :half], sin_1PE[..., half:]), -1)


def round_up(num_rows: int) -> int:
    """The rows that are computed for so many: multiples of a quarter, above 32 of an eighth, of a power of two."""
    power = 1 << max(num_rows - 1, 0).bit_length()
    step = max(power // (4 if num_rows <= 32 else 8), 1)
    return -(-num_rows // step) * step


def _has_onednn(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not HAS_ONEDNN:
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def are_known(modules: nn.Module) -> bool:
    """Whether a decoder's layers are exactly those that are written out."""
    layers = getattr(modules, "layers", None)
    return isinstance(layers, nn.ModuleList) and all(_is_known(layer) for layer in layers)


@torch.no_grad()
def asked_of_attention(modules: nn.Module) -> dict[int, AttentionOptions]:
    """What each layer asks of attention, by index."""
    noting, token = NotingPlan(), torch.zeros(1, 1, dtype=torch.int64, device=next(modules.parameters()).device)
    modules(input_ids=token, position_ids=token, use_cache=False, **{PLAN_KEY: noting})
    return {layer: asked.options for layer, (asked,) in noting.asked.items()}


def _is_known(layer: nn.Module) -> bool:
    if type(layer).__name__ not in LAYERS:
        return False
    linears = [layer.get_submodule(name) for name in (*QKV, OUT, *GATE_UP, DOWN)]
    activation = layer.get_submodule("mlp.act_fn")
    return all(type(linear) is MultiLoRALinear for linear in linears) and isinstance(
        activation, SiLUActivation | nn.SiLU
    )


def _layer(index: int, layer: nn.Module, attention: AttentionOptions, threads: Threads) -> _Layer:
    own = layer.get_submodule("self_attn")
    head_dim = cast(int, own.head_dim)

    def pack(names: Sequence[str]) -> PackedLinear:
        return PackedLinear(linears_of(layer, names), threads)

    qkv = linears_of(layer, QKV)
    num_heads, num_keys = (linear.out_features // head_dim for linear in qkv[:2])
    norms = None
    if hasattr(own, "q_norm"):
        q_norm, k_norm = _norm(own, "q_norm"), _norm(own, "k_norm")
        weights = [q_norm.weight.expand(num_heads, -1), k_norm.weight.expand(num_keys, -1)]
        norms = (torch.cat(weights), q_norm.eps)
    return _Layer(
        index=index,
        before_attention=_norm(layer, "input_layernorm"),
        qkv=pack(QKV),
        head_norms=norms,
        out=pack([OUT]),
        before_mlp=_norm(layer, "post_attention_layernorm"),
        gate_up=pack(GATE_UP),
        down=pack([DOWN]),
        num_heads=num_heads,
        num_keys=num_keys,
        head_dim=head_dim,
        attention=attention,
    )


def _norm(parent: nn.Module, name: str) -> _Norm:
    module = parent.get_submodule(name)
    return _Norm(cast(Tensor, module.weight), cast(float, module.variance_epsilon))


def linears_of(layer: nn.Module, names: Sequence[str]) -> list[MultiLoRALinear]:
    return [cast(MultiLoRALinear, layer.get_submodule(name)) for name in names]
