"""The decoder that most families share, written out: fewer and larger kernels than its modules make, for rows that no
gradient will be asked of.

Llama, Mistral, Qwen2 and Qwen3 are the same layers but for biases, norms of queries and keys, and windows. Here the
linears that read the same input are one product, on a CPU over weights packed once for oneDNN; adapters' matrices go
with them in two products (`banks`), and norms and rotations take all heads together. The modules stay the oracle:
whatever is not exactly those layers is refused (None from `of`), and at load the base model compares the two.

Packed weights are a second copy, made when the first rows come, and only where there is memory to spare. Knows no
loss, no sampler and no request; attention is the plan's affair, as it is the modules'.

Shapes: T rows, D hidden size, H query heads, G key heads, E head dim, I inputs and O outputs of a linear, r rank.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, silu
from transformers.activations import SiLUActivation

from tinsmith.backends.torch.attention import PLAN_KEY, AttentionOptions, AttentionPlan, NotingPlan
from tinsmith.backends.torch.banks import Bank, Work
from tinsmith.backends.torch.lora import Adapter, MultiLoRALinear, Routing
from tinsmith.backends.torch.products import HAS_ONEDNN, linear_product, packed, suits_linear
from tinsmith.backends.torch.slots import SegmentWork, Slots
from tinsmith.backends.torch.threads import WIDE_ATTENTION, Threads

LAYERS = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUT = "self_attn.o_proj"
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = "mlp.down_proj"

SPARE_SHARE = 0.25
"""Packed weights may take this share of the memory that is free."""

FEWEST_POSITIONS = 1024
"""Of the tables of rotations."""


LARGE_B = {torch.float32: 1 << 15, torch.bfloat16: 0}
"""Numbers of the B's of linears side by side, zeros included, from which on a product for each is faster. 8 adapters in
bfloat16, 8 rows each, of m50: 139 us against 186 on queries, keys and values, 281 against 468 on gate and up.
"""

LARGE_ALONE = 1 << 20
"""The same of one adapter in bfloat16: 16 rows on queries, keys and values take 30 us whole and 59 apart, on gate and
up 62 and 64.
"""


class Piece(NamedTuple):
    """Outputs of a fused linear, and the inner rows that adapters make them of."""

    outputs: slice
    inner: slice


class Adding(Protocol):
    """What the adapters of one step add to a fused linear's outputs."""

    def add_(self, y_TO: Tensor, x_TI: Tensor, linear: FusedLinear) -> Tensor:
        """The outputs with it, in place or not."""
        ...


Fuse = Callable[[Sequence[MultiLoRALinear]], "FusedLinear"]

Fused = tuple[Tensor, ...]
"""An adapter's matrices at a fused linear: the A's below each other [R, I], then the B of each piece."""


class FusedLinear:
    """Linears that read the same rows, as one: their weights below each other, their adapters beside each other."""

    def __init__(self, linears: Sequence[MultiLoRALinear], threads: Threads) -> None:
        self._linears = linears
        self._threads = threads
        self.name = linears[0].name
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        self._weight_OI = self._laid_out(linears)
        biases = [linear.bias for linear in linears]
        self._bias_O = None if biases[0] is None else torch.cat(cast("list[Tensor]", biases))
        self._pieces: dict[tuple[int, bool], tuple[Piece, ...]] = {}
        self.suits = suits_linear(linears[0].weight)
        """Whether rows go through `linear_product` and `add_linear`."""

    def __call__(self, x_TI: Tensor, work: Adding, dtype: torch.dtype | None = None) -> Tensor:
        """[T, O]: every linear's outputs, one after the other; in `dtype`, to which adapters' are added."""
        return work.add_(self._product(x_TI).to(dtype or x_TI.dtype), x_TI, self)

    def _laid_out(self, linears: Sequence[MultiLoRALinear]) -> Tensor:
        """Packed for oneDNN: a copy."""
        return packed(torch.cat([linear.weight for linear in linears]))

    def _product(self, x_TI: Tensor) -> Tensor:
        self._threads.wide()
        y_TO = linear_product(x_TI, self._weight_OI, self._bias_O)
        self._threads.narrow()
        return y_TO

    def fused(self, adapter: Adapter) -> Fused | None:
        """The fused matrices of an adapter that has any of these linears, kept with it. Of the first token of new
        weights nobody waits for copies: if the A's are all there is, each linear adds its own B (`add_each_`), and a B
        that is one matrix is packed the second time that it is asked for.
        """
        if self.name not in adapter.fused:
            adapter.fused[self.name] = fused = self._inner_of(adapter) or self._of_one(adapter)
            return fused
        fused = adapter.fused[self.name]
        if fused is not None and len(fused) == 1:
            fused = adapter.fused[self.name] = self._of_one(adapter)
        if fused is not None and len(fused) == 2 and self.suits and not fused[1].is_mkldnn:
            fused = adapter.fused[self.name] = fused[0], packed(fused[1])
        return fused

    def _inner_of(self, adapter: Adapter) -> Fused | None:
        """The A's alone, where each linear's own B gives the same bits as the B's among zeros."""
        if len(self._linears) == 1 or not self.suits:
            return None
        exact = math.frexp(adapter.scale)[0] == 0.5  # what is scaled before the product is not rounded
        if not exact or any(linear.name not in adapter.compute for linear in self._linears):
            return None
        return (below_each_other([adapter.compute[linear.name][0] for linear in self._linears]),)

    def _of_one(self, adapter: Adapter) -> Fused | None:
        if not any(linear.name in adapter.compute for linear in self._linears):
            return None
        if len(self._linears) == 1:
            a_RI, b_OR = adapter.compute[self.name]
            return a_RI, b_OR if adapter.scale == 1.0 else b_OR * adapter.scale
        fused = self.empty(adapter.layout.rank, of_one=True)
        self.fuse_into(adapter, fused)
        return fused

    def add_each_(self, y_nO: Tensor, inner_nR: Tensor, adapter: Adapter) -> None:
        """To the outputs of some rows, what each linear's own B makes of their inner rows."""
        rank, output = adapter.layout.rank, 0
        for place, linear in enumerate(self._linears):
            if linear.name in adapter.compute:
                _, b_OR = adapter.compute[linear.name]
                own_nR = inner_nR[:, place * rank : (place + 1) * rank]
                y_nO[:, output : output + len(b_OR)].addmm_(own_nR, b_OR.t(), alpha=adapter.scale)
            output += linear.out_features

    def pieces(self, rank: int, *, of_one: bool = False) -> tuple[Piece, ...]:
        """One of everything, where each B stands in rows and columns of its own among zeros; one of each linear where
        the zeros would cost more than another product. `of_one`: of an adapter alone, not of one in a stack.
        """
        if (rank, of_one) not in self._pieces:
            count, weight = len(self._linears), self._linears[0].weight
            whole = Piece(slice(0, self.out_features), slice(0, rank * count))
            ends = list(accumulate((linear.out_features for linear in self._linears), initial=0))
            apart = [
                Piece(slice(*span), slice(place * rank, (place + 1) * rank))
                for place, span in enumerate(pairwise(ends))
            ]
            large = LARGE_ALONE if of_one and self.suits else LARGE_B.get(weight.dtype, math.inf)
            is_large = self.out_features * rank * count >= large
            self._pieces[rank, of_one] = tuple(apart) if is_large else (whole,)
        return self._pieces[rank, of_one]

    def empty(self, rank: int, *, of_one: bool = False) -> Fused:
        """Zeros for the matrices of an adapter of this rank."""
        weight = self._linears[0].weight
        sizes = [(piece.outputs.stop - piece.outputs.start, piece.inner.stop - piece.inner.start)
                 for piece in self.pieces(rank, of_one=of_one)]  # fmt: skip
        a_RI = weight.new_zeros(rank * len(self._linears), self.in_features)
        return a_RI, *(weight.new_zeros(size) for size in sizes)

    def fuse_into(self, adapter: Adapter, fused: Fused) -> None:
        """Put an adapter's A's and B's, these times its scale, into matrices of zeros that have room for its rank."""
        a_RI, *bs = fused
        room, output = len(a_RI) // len(self._linears), 0
        for place, linear in enumerate(self._linears):
            if linear.name in adapter.compute:
                own_a, own_b = adapter.compute[linear.name]
                inner = slice(place * room, place * room + len(own_a))
                a_RI[inner] = own_a
                room_b = bs[0][output : output + len(own_b), inner] if len(bs) == 1 else bs[place][:, : len(own_a)]
                torch.mul(own_b, adapter.scale, out=room_b)
            output += linear.out_features


class PlainFusedLinear(FusedLinear):
    """The same on any device, over the linears' own weights where these lie below each other."""

    def _laid_out(self, linears: Sequence[MultiLoRALinear]) -> Tensor:
        return below_each_other([linear.weight for linear in linears])

    def _product(self, x_TI: Tensor) -> Tensor:
        return nn.functional.linear(x_TI, self._weight_OI, self._bias_O)


def below_each_other(weights: Sequence[Tensor]) -> Tensor:
    """One matrix of the rows of all: a view, if they follow each other in memory, as `differentiable` lays them."""
    first, end = weights[0].detach(), weights[0].data_ptr()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or weight.data_ptr() != end or not weight.is_contiguous():
            return torch.cat(tuple(weights))
        end += weight.nbytes
    num_inputs = first.shape[1]
    return first.as_strided((sum(len(weight) for weight in weights), num_inputs), (num_inputs, 1))


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


class _Ending(NamedTuple):
    """What is left of a step behind the last layer's attention, where nobody asks for the other rows."""

    rows_n: Tensor
    work: Adding


class Decoder:
    """Use `of`, then `prepare` once rows come."""

    def __init__(self, modules: nn.Module, unembedding: MultiLoRALinear, threads: Threads) -> None:
        self._modules = modules
        self._threads = threads
        self._unembedding = unembedding
        self._layers: list[_Layer] = []
        self._linears: list[FusedLinear] = []
        self._head: FusedLinear | None = None
        self._banked: list[FusedLinear] = []
        self._banks: dict[int, Bank] = {}
        self._final = _norm(modules, "norm")
        self._rotary = (torch.empty(0), torch.empty(0))
        self.slots = Slots(())
        self.packs = next(modules.parameters()).device.type == "cpu"
        """Whether the weights are laid out anew, for oneDNN."""

    @classmethod
    def of(cls, modules: nn.Module, unembedding: MultiLoRALinear, threads: Threads) -> Decoder | None:
        """None where the modules do anything that is not written out here, or a CPU lacks oneDNN for them."""
        if not are_known(modules):
            return None
        weight = next(modules.parameters())
        return cls(modules, unembedding, threads) if weight.device.type != "cpu" or _has_onednn(weight) else None

    @property
    def ready(self) -> bool:
        return bool(self._layers)

    def prepare(self) -> bool:
        """Pack the weights; False if there is no memory for them."""
        linears = [module for module in self._modules.modules() if isinstance(module, MultiLoRALinear)]
        linears.append(self._unembedding)
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if self.packs and sum(linear.weight.nbytes for linear in linears) > SPARE_SHARE * free:
            return False
        asked = asked_of_attention(self._modules)
        layers = cast(nn.ModuleList, self._modules.layers)
        kind = FusedLinear if self.packs else PlainFusedLinear

        def fuse(linears: Sequence[MultiLoRALinear]) -> FusedLinear:
            return kind(linears, self._threads)

        self._layers = [_layer(index, layer, asked[index], fuse) for index, layer in enumerate(layers)]
        self._linears = [one for own in self._layers for one in (own.qkv, own.out, own.gate_up, own.down)]
        self._banked = list(self._linears)
        self.slots = Slots(self._linears)
        if self.packs:
            self._head = FusedLinear([self._unembedding], self._threads)
            self._banked.append(self._head)
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
        padding = round_up(num_rows) - num_rows if self.packs else 0
        if padding:
            # More of the last row: oneDNN compiles each product for each number of rows.
            tokens_T, positions_T = (torch.cat([x, x[-1:].expand(padding)]) for x in (tokens_T, positions_T))
        work = self._work(routing, num_rows + padding)
        x_TD = cast("nn.Embedding", self._modules.embed_tokens)(tokens_T)
        rotation = self._rotation(x_TD, positions_T) if self.packs else self._rotation_of(x_TD, positions_T)
        with self._threads.mixed(num_rows):
            if wanted is None:
                return self._through(x_TD, rotation, plan, work, num_rows)[:num_rows]
            ending = self._ending(routing, wanted, x_TD.device)
            return self._through(x_TD, rotation, plan, work, num_rows, ending)[: len(wanted)]

    def _ending(self, routing: Routing, wanted: Sequence[int], device: torch.device) -> _Ending:
        padding = round_up(len(wanted)) - len(wanted) if self.packs else 0
        rows_n = torch.tensor([*wanted, *[wanted[-1]] * padding], device=device)
        return _Ending(rows_n, self._work(routing.only(wanted), len(rows_n)))

    def _work(self, routing: Routing, num_rows: int) -> Adding:
        segments = None if self.packs else SegmentWork.of(self.slots, routing, self._final.weight.device)
        return segments or Work(routing, num_rows, self._banks, self._banked)

    def through(self, tokens_T: Tensor, positions_T: Tensor, plan: AttentionPlan, work: Adding) -> Tensor:
        """[T, D]: the same, by kernels that depend on the shapes alone: nothing is read back from the device."""
        x_TD = cast("nn.Embedding", self._modules.embed_tokens)(tokens_T)
        return self._through(x_TD, self._rotation_of(x_TD, positions_T), plan, work, len(tokens_T))

    def logits(self, hidden_TD: Tensor, routing: Routing) -> Tensor | None:
        """[T, V] float32; None if the unembedding is not laid out anew. What adapters add is rounded apart, as it is in
        the unembedding's own module.
        """
        if self._head is None:
            return None
        work = Work(routing, len(hidden_TD), self._banks, self._banked)
        with self._threads.mixed(len(hidden_TD)):
            return self._head(hidden_TD, work, torch.float32)

    @property
    def linears(self) -> Sequence[FusedLinear]:
        return self._linears

    def _through(
        self,
        x_TD: Tensor,
        rotation: tuple[Tensor, Tensor],
        plan: AttentionPlan,
        work: Adding,
        num_rows: int,
        ending: _Ending | None = None,
    ) -> Tensor:
        for layer in self._layers:
            out_TO = self._attend(layer, layer.before_attention(x_TD), rotation, plan, work, num_rows)
            if ending is not None and layer is self._layers[-1]:
                x_TD, out_TO = x_TD.index_select(0, ending.rows_n), out_TO.index_select(0, ending.rows_n)
                work = ending.work
            x_TD = x_TD + layer.out(out_TO, work)
            gate_up = layer.gate_up(layer.before_mlp(x_TD), work)
            gate, up = gate_up.split(gate_up.shape[1] // 2, -1)
            x_TD += layer.down(silu(gate).mul_(up), work)
        return self._final(x_TD)

    def _attend(
        self,
        layer: _Layer,
        x_TD: Tensor,
        rotation: tuple[Tensor, Tensor],
        plan: AttentionPlan,
        work: Adding,
        num_rows: int,
    ) -> Tensor:
        heads, keys = layer.num_heads, layer.num_keys
        qkv = layer.qkv(x_TD, work).view(len(x_TD), heads + 2 * keys, layer.head_dim)
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

    def _rotation_of(self, x_TD: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """As `_rotation`, without tables: to know how long these must be costs a look at the device."""
        cos_1TE, sin_1TE = cast(nn.Module, self._modules.rotary_emb)(x_TD, positions_T[None])
        return cos_1TE[0][:, None], _signed(sin_1TE)[0][:, None]

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


def _layer(index: int, layer: nn.Module, attention: AttentionOptions, fuse: Fuse) -> _Layer:
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
        qkv=fuse(qkv),
        head_norms=norms,
        out=fuse(_linears(layer, [OUT])),
        before_mlp=_norm(layer, "post_attention_layernorm"),
        gate_up=fuse(_linears(layer, GATE_UP)),
        down=fuse(_linears(layer, [DOWN])),
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
