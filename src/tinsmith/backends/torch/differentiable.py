"""The decoder that most families share, written out with its gradient: what training runs instead of the modules.

The same layers as in `decoder`, forwards and backwards, as few large kernels: linears that read the same rows are one
product, what elementwise work follows a product happens in its result, and nothing is kept that is cheaper to make
again. Autograd sees one node, whose backward goes through the layers from the last to the first; inside, only attention
is autograd's own, since a plan may be any. Gradients of adapters go straight into their buffers, as everywhere.

The modules stay the oracle: whatever is not exactly those layers is refused (None from `of`), and the base model
compares hidden states and gradients of the two at first use. Knows no loss and no request.

Shapes: T rows, D hidden size, H query heads, G key heads, E head dim, F width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from tinsmith.backends.torch.adapters import Adapter, Layout, Target
from tinsmith.backends.torch.attention import AttentionOptions, AttentionPlan, PackedCausal
from tinsmith.backends.torch.lora import MultiLoRALinear
from tinsmith.backends.torch.lora_ops import Routing, Site
from tinsmith.backends.torch.products import product
from tinsmith.backends.torch.transformer import DOWN, GATE_UP, OUT, QKV, are_known, asked_of_attention, linears_of
from tinsmith.types import LoraSpec


class JoinedLinears:
    """Linears that read the same rows, over one weight in whose memory theirs lie."""

    def __init__(self, linears: Sequence[MultiLoRALinear]) -> None:
        self.site = Site([linear.target for linear in linears])
        self._weight_OI = _joined(linears)
        biases = [linear.bias for linear in linears]
        self._bias_O = None if biases[0] is None else torch.cat(cast("list[Tensor]", biases))

    def forward(self, x_TI: Tensor, routing: Routing) -> tuple[Tensor, list[Tensor]]:
        """[T, O], and what `backward` needs besides x."""
        y_TO = product(x_TI, self._weight_OI.t(), x_TI.dtype)
        if self._bias_O is not None:
            y_TO += self._bias_O
        return y_TO, self.site.forward_(y_TO, x_TI, self.site.work(routing))

    def backward(
        self, grad_TO: Tensor, x_TI: Tensor, routing: Routing, inner: Sequence[Tensor], *, need_input: bool = True
    ) -> Tensor | None:
        """The gradient of x, if needed; adapters get theirs."""
        grad_TI = product(grad_TO, self._weight_OI, grad_TO.dtype) if need_input else None
        self.site.backward_(grad_TI, grad_TO, x_TI, self.site.work(routing), inner)
        return grad_TI


class _Norm:
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight.float()
        self._eps = torch.tensor(eps, device=weight.device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The normed rows, and 1 / rms."""
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rstd = torch.addcmul(self._eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
        return self._scaled(x, wide, rstd), rstd

    def again(self, x: Tensor, rstd: Tensor) -> Tensor:
        return self._scaled(x, x.float(), rstd)

    def _scaled(self, x: Tensor, wide: Tensor, rstd: Tensor) -> Tensor:
        """`wide` is x in float32, and a copy unless x is."""
        # In place and of one dtype: a quarter less time than rows of bfloat16 times numbers of float32.
        own = x * rstd if wide is x else wide.mul_(rstd)
        return own.mul_(self._weight).to(x.dtype)

    def backward(self, grad: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
        """float32."""
        scaled, x = (grad * self._weight).mul_(rstd), x.float()
        along = (scaled * x).sum(-1, keepdim=True).mul_(rstd).mul_(rstd).div_(-x.shape[-1])
        return scaled.addcmul_(x, along)


@dataclass(slots=True)
class _Kept:
    """What a layer's backward needs of its forward."""

    x_TD: Tensor
    rstd: Tensor
    qkv_inner: list[Tensor]
    raw: Tensor | None  # [T, H + G, E] before the norms of heads
    head_rstd: Tensor | None
    leaves: tuple[Tensor, Tensor, Tensor]
    attended_THE: Tensor
    out_inner: list[Tensor]
    between_TD: Tensor
    between_rstd: Tensor
    gate_up_inner: list[Tensor]
    gate_up: Tensor
    down_inner: list[Tensor]


@dataclass(frozen=True, slots=True)
class _Call:
    """What all layers of one forward share."""

    plan: AttentionPlan
    routing: Routing
    cos_T1E: Tensor
    signed_T1E: Tensor  # the sine, with the sign that the exchange of halves needs


@dataclass(slots=True)
class _Layer:
    index: int
    before_attention: _Norm
    qkv: JoinedLinears
    head_norm: _Norm | None
    out: JoinedLinears
    before_mlp: _Norm
    gate_up: JoinedLinears
    down: JoinedLinears
    num_heads: int
    num_keys: int
    head_dim: int
    attention: AttentionOptions

    def forward(self, x_TD: Tensor, call: _Call) -> tuple[Tensor, _Kept]:
        turning = self.num_heads + self.num_keys
        normed_TD, rstd = self.before_attention.forward(x_TD)
        qkv, qkv_inner = self.qkv.forward(normed_TD, call.routing)
        qkv = qkv.view(len(x_TD), turning + self.num_keys, self.head_dim)
        raw = head_rstd = None
        turned = qkv[:, :turning]
        if self.head_norm is not None:
            raw = turned
            turned, head_rstd = self.head_norm.forward(raw)
        turned = torch.addcmul(turned * call.cos_T1E, turned.roll(self.head_dim // 2, -1), call.signed_T1E)
        leaves = (turned[:, : self.num_heads], turned[:, self.num_heads :], qkv[:, turning:])
        with torch.enable_grad():
            leaves = cast("tuple[Tensor, Tensor, Tensor]", tuple(x.detach().requires_grad_() for x in leaves))
            attended_THE = self.call_plan(leaves, call)
        rows_TI = attended_THE.detach().reshape(len(x_TD), -1)
        between_TD, out_inner = self.out.forward(rows_TI, call.routing)
        between_TD += x_TD
        normed_TD, between_rstd = self.before_mlp.forward(between_TD)
        gate_up, gate_up_inner = self.gate_up.forward(normed_TD, call.routing)
        gate, up = gate_up.chunk(2, -1)
        result_TD, down_inner = self.down.forward(silu(gate).mul_(up), call.routing)
        result_TD += between_TD
        return result_TD, _Kept(
            x_TD, rstd, qkv_inner, raw, head_rstd, leaves, attended_THE, out_inner,
            between_TD, between_rstd, gate_up_inner, gate_up, down_inner,
        )  # fmt: skip

    @property
    def linears(self) -> tuple[JoinedLinears, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    def call_plan(self, leaves: tuple[Tensor, Tensor, Tensor], call: _Call) -> Tensor:
        return call.plan.attend(self.index, *leaves, **self.attention)

    def backward_(self, grad_TD: Tensor, kept: _Kept, call: _Call) -> None:
        """The gradient of the layer's output becomes that of its input."""
        self._mlp_backward_(grad_TD, kept, call)
        rows_TI = kept.attended_THE.detach().reshape(len(grad_TD), -1)
        grad_TI = self.out.backward(grad_TD, rows_TI, call.routing, kept.out_inner)
        assert grad_TI is not None
        grads = torch.autograd.grad(kept.attended_THE, kept.leaves, grad_TI.view(kept.attended_THE.shape))
        grad_qkv = self._turned_back(grads, kept, call)
        normed_TD = self.before_attention.again(kept.x_TD, kept.rstd)
        # Nothing is trained below the first layer.
        grad_normed_TD = self.qkv.backward(
            grad_qkv.flatten(1), normed_TD, call.routing, kept.qkv_inner, need_input=self.index > 0
        )
        if grad_normed_TD is not None:
            grad_TD += self.before_attention.backward(grad_normed_TD, kept.x_TD, kept.rstd)

    def _mlp_backward_(self, grad_TD: Tensor, kept: _Kept, call: _Call) -> None:
        gate, up = kept.gate_up.chunk(2, -1)
        activated_TF = silu(gate)
        grad_TF = self.down.backward(grad_TD, activated_TF * up, call.routing, kept.down_inner)
        assert grad_TF is not None
        grad_activated_TF = grad_TF * up
        # Gate and up have been read: their memory takes their gradients.
        torch.mul(grad_TF, activated_TF, out=up)
        torch.ops.aten.silu_backward.grad_input(grad_activated_TF, gate, grad_input=gate)
        del grad_TF, grad_activated_TF, activated_TF
        normed_TD = self.before_mlp.again(kept.between_TD, kept.between_rstd)
        grad_normed_TD = self.gate_up.backward(kept.gate_up, normed_TD, call.routing, kept.gate_up_inner)
        assert grad_normed_TD is not None
        grad_TD += self.before_mlp.backward(grad_normed_TD, kept.between_TD, kept.between_rstd)

    def _turned_back(self, grads: Sequence[Tensor], kept: _Kept, call: _Call) -> Tensor:
        """[T, H + 2G, E]: the gradient of the product, from those of queries, keys and values."""
        turning = self.num_heads + self.num_keys
        turned = torch.cat(tuple(grads[:2]), 1)
        raw = (turned * call.signed_T1E).roll(self.head_dim // 2, -1).addcmul_(turned, call.cos_T1E)
        if self.head_norm is not None:
            assert kept.raw is not None and kept.head_rstd is not None
            raw = self.head_norm.backward(raw, kept.raw, kept.head_rstd)
        grad_qkv = grads[2].new_empty(len(raw), turning + self.num_keys, self.head_dim)
        grad_qkv[:, :turning] = raw
        grad_qkv[:, turning:] = grads[2]
        return grad_qkv


class DifferentiableDecoder:
    """Use `of`, then `prepare` before the first rows."""

    def __init__(self, modules: nn.Module) -> None:
        self.modules = modules
        self._layers: list[_Layer] = []
        self._final = _norm(modules, "norm")
        self._anchor = torch.zeros(0, device=next(modules.parameters()).device, requires_grad=True)

    @classmethod
    def of(cls, modules: nn.Module) -> DifferentiableDecoder | None:
        """None where the modules do anything that is not written out here."""
        return cls(modules) if are_known(modules) else None

    @property
    def ready(self) -> bool:
        return bool(self._layers)

    def trains(self, routing: Routing) -> bool:
        """Whether any adapter has a linear in here: one that has any has it in every layer."""
        return any(joined.site.work(routing) for joined in self._layers[-1].linears)

    def prepare(self) -> None:
        asked = asked_of_attention(self.modules)
        layers = cast(nn.ModuleList, self.modules.layers)
        self._layers = [_layer(index, layer, asked[index]) for index, layer in enumerate(layers)]

    def hidden(
        self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan, routing: Routing, *, recompute: bool = False
    ) -> Tensor:
        """[T, D]: hidden states after the final norm. Backward goes to the adapters of the routing.

        With `recompute` a layer keeps its input only.
        """
        x_TD = cast("nn.Embedding", self.modules.embed_tokens)(tokens_T)
        rotary = cast(nn.Module, self.modules.rotary_emb)(x_TD, positions_T[None])
        cos_T1E, sin_T1E = (table[0][:, None] for table in rotary)
        half = sin_T1E.shape[-1] // 2
        signed_T1E = torch.cat((-sin_T1E[..., :half], sin_T1E[..., half:]), -1)
        return _Through.apply(self._anchor, self, x_TD, _Call(plan, routing, cos_T1E, signed_T1E), recompute)

    def forward(self, x_TD: Tensor, call: _Call, recompute: bool) -> tuple[Tensor, _Tape]:
        tape = _Tape([], x_TD, x_TD)
        for layer in self._layers:
            before_TD = x_TD
            x_TD, kept = layer.forward(x_TD, call)
            tape.layers.append(before_TD if recompute else kept)
        hidden_TD, tape.rstd = self._final.forward(x_TD)
        tape.last_TD = x_TD
        return hidden_TD, tape

    def backward(self, grad_TD: Tensor, tape: _Tape, call: _Call) -> None:
        grad_TD = self._final.backward(grad_TD, tape.last_TD, tape.rstd).to(grad_TD.dtype)
        for layer in reversed(self._layers):
            kept = tape.layers.pop()
            if isinstance(kept, Tensor):
                _, kept = layer.forward(kept, call)
            layer.backward_(grad_TD, kept, call)


@dataclass(slots=True)
class _Tape:
    """`layers` holds what each layer kept, or its input alone."""

    layers: list[_Kept | Tensor]
    last_TD: Tensor
    rstd: Tensor


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, anchor: Tensor, decoder: DifferentiableDecoder, x_TD: Tensor, call: _Call, recompute: bool
    ) -> Tensor:
        hidden_TD, ctx.tape = decoder.forward(x_TD, call, recompute)
        ctx.decoder, ctx.call = decoder, call
        return hidden_TD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD: Tensor) -> tuple[None, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.decoder.backward(grad_TD, ctx.tape, ctx.call)
        return None, None, None, None, None


def _joined(linears: Sequence[MultiLoRALinear]) -> Tensor:
    """Their weights below each other; the linears' own become views of it, so that nothing is held twice."""
    if len(linears) == 1:
        return linears[0].weight
    weight_OI = torch.cat([linear.weight.data for linear in linears])
    for linear, part in zip(linears, weight_OI.split([linear.out_features for linear in linears]), strict=True):
        linear.weight.data = part
    return weight_OI


def _layer(index: int, layer: nn.Module, attention: AttentionOptions) -> _Layer:
    own = layer.get_submodule("self_attn")
    head_dim = cast(int, own.head_dim)
    qkv = linears_of(layer, QKV)
    num_heads, num_keys = (linear.out_features // head_dim for linear in qkv[:2])
    head_norm = None
    if hasattr(own, "q_norm"):
        weights = [
            cast(Tensor, own.get_submodule(name).weight).expand(count, -1)
            for name, count in (("q_norm", num_heads), ("k_norm", num_keys))
        ]
        head_norm = _Norm(torch.cat(weights), cast(float, own.get_submodule("q_norm").variance_epsilon))
    return _Layer(
        index=index,
        before_attention=_norm(layer, "input_layernorm"),
        qkv=JoinedLinears(qkv),
        head_norm=head_norm,
        out=JoinedLinears(linears_of(layer, [OUT])),
        before_mlp=_norm(layer, "post_attention_layernorm"),
        gate_up=JoinedLinears(linears_of(layer, GATE_UP)),
        down=JoinedLinears(linears_of(layer, [DOWN])),
        num_heads=num_heads,
        num_keys=num_keys,
        head_dim=head_dim,
        attention=attention,
    )


def _norm(parent: nn.Module, name: str) -> _Norm:
    module = parent.get_submodule(name)
    return _Norm(cast(Tensor, module.weight), cast(float, module.variance_epsilon))


def largest_error(
    decoder: DifferentiableDecoder,
    oracle: Callable[[Tensor, Tensor, AttentionPlan, Routing], Tensor],
    targets: Sequence[Target],
) -> float:
    """How far hidden states and gradients are from the oracle's, relative to these, for two adapters at random."""
    weight = next(decoder.modules.parameters())
    generator = torch.Generator().manual_seed(0)
    lengths, device = (7, 5), weight.device
    adapters = []
    for rank in (4, 2):
        layout = Layout.of(rank, [target for target in targets if target.group != "unembed"])
        flat_P = torch.randn(layout.numel, generator=generator).mul_(0.02).to(device)
        adapters.append(Adapter(LoraSpec(rank), layout, flat_P, weight.dtype))
    embeddings = cast("nn.Embedding", decoder.modules.embed_tokens)
    tokens_T = torch.randint(0, embeddings.num_embeddings, (sum(lengths),), generator=generator).to(device)
    positions_T = torch.cat([torch.arange(n, device=device) for n in lengths])
    grad_TD = torch.randn(sum(lengths), embeddings.embedding_dim, generator=generator).to(weight)
    given = (tokens_T, positions_T, PackedCausal(lengths, device), Routing.of(adapters, lengths))
    found = []
    with torch.enable_grad():
        for forward in (oracle, decoder.hidden):
            buffers = [torch.zeros_like(adapter.flat_P) for adapter in adapters]
            for adapter, buffer_P in zip(adapters, buffers, strict=True):
                adapter.gradients = adapter.layout.views(buffer_P)
            hidden_TD = forward(*given)
            hidden_TD.backward(grad_TD)
            found.append([hidden_TD.detach().float(), *buffers])
    return max(
        float((ours - theirs).norm() / theirs.norm().clamp_min(1e-6)) for theirs, ours in zip(*found, strict=True)
    )
