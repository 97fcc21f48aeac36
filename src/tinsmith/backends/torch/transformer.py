"""Fused decoder layers for the architecture that most families share: fewer and larger kernels than the modules' own.

The layers of Llama, Mistral, Qwen2, Qwen3 and others differ in biases, norms of queries and keys, and windows alone.
Here linears that read the same rows are one matmul, and norms and RoPE process all heads together. Gradients are
autograd's; a linear is one node with the norm or gated activation before it, which backward computes again. The modules
remain the reference: layers with other parts are refused (`of` returns None), and `decoder_check` compares the numbers
of both at load. On CUDA devices `layer_kernels` computes what lies between the matmuls.

For rows without gradients, a small model's weights are packed for oneDNN where a CPU has it. That is a second copy,
made when the first such rows arrive, if there is enough memory. Knows no loss, sampler or request; attention is the
plan's, as in the modules.

Shapes: T rows, D hidden size, H query heads, G key heads, E head dim, I inputs and O outputs of a linear, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, silu
from torch.utils.checkpoint import checkpoint

from tinsmith.backends.torch.attention import PLAN_KEY, AttentionOptions, AttentionPlan, AttentionProbe
from tinsmith.backends.torch.host import upload
from tinsmith.backends.torch.lora import DeviceLoRABatch, LoRADelta, LoRALinear, MultiLoRALinear, RecomputedFunction
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.backends.torch.matmul import has_onednn, linear_of_few_rows, onednn_linear, pack_weight, suits_mkl
from tinsmith.plan.fused_layers import DOWN, GATE_UP, HEAD_NORMS, LAYER_NORMS, OUT, QKV, has_fusable_layers
from tinsmith.plan.memory import MAX_PACKED_BYTES
from tinsmith.runtime.devices import runs_kernels
from tinsmith.runtime.host_memory import read_host_memory

PACKED_MEMORY_SHARE = 0.25
"""The largest share of free memory for packed weights."""

SWAPPED_MAX_ROWS = 128
"""Up to this many rows, weights that are not packed are the left operand of their matmul."""


class FusedLinear(LoRALinear):
    """Linears that read the same rows, as one matmul. Their weights become views of one tensor, so nothing is stored
    twice; `pack` makes a second copy for rows without gradients.
    """

    def __init__(self, linears: Sequence[MultiLoRALinear]) -> None:
        self.delta = LoRADelta([linear.target for linear in linears])
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        self.weight = _stack_weights(linears)
        self._packed_OI: Tensor | None = None
        self._has_onednn = has_onednn(self.weight) and not suits_mkl(self.weight)
        biases = [linear.bias for linear in linears]
        self.bias = None if biases[0] is None else torch.cat(cast("list[Tensor]", biases))

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def pack(self) -> None:
        if self._has_onednn:
            self._packed_OI = pack_weight(self.weight)

    def __call__(
        self,
        x_TI: Tensor,
        lora_batch: LoRABatch,
        dtype: torch.dtype | None = None,
        before: RecomputedFunction | None = None,
    ) -> Tensor:
        """[T, O]: the linears' outputs, concatenated; in `dtype`, to which the adapters' deltas are added. Rows after
        the LoRA batch belong to the base model. The linears read what `before` makes of x.
        """
        if torch.is_grad_enabled():
            return self.forward_with_gradient(x_TI, self.delta.groups(lora_batch), before)
        if before is not None:
            x_TI = before.forward(x_TI)
        if isinstance(lora_batch, DeviceLoRABatch):
            return self.forward_device_rows(x_TI, lora_batch, dtype)
        adapter_groups = self.delta.groups(lora_batch)
        if self._packed_OI is None and not (self._has_onednn and len(x_TI) <= SWAPPED_MAX_ROWS):
            return self.forward_rows(x_TI, adapter_groups, dtype)[0]
        if self._packed_OI is None:
            y_TO = linear_of_few_rows(x_TI, self.weight, self.bias)
        else:
            y_TO = onednn_linear(x_TI, self._packed_OI, self.bias)
        if dtype is not None:
            y_TO = y_TO.to(dtype)
        self.delta.forward_(y_TO, x_TI, adapter_groups)
        return y_TO


def load_layer_kernels() -> ModuleType:
    """Only where a CUDA tensor was met: other builds of torch have no triton."""
    from tinsmith.backends.torch import layer_kernels

    return layer_kernels


class _RMSNormFunction(torch.autograd.Function):
    """A norm as one node: torch's own takes a dozen kernels each way on a CPU when gradients are required."""

    @staticmethod
    def forward(ctx, x: Tensor, norm: _Norm) -> Tensor:
        ctx.save_for_backward(x)
        ctx.norm = norm
        return norm.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return ctx.norm.gradient(grad, x), None


class _Norm:
    """x / rms(x) * weight over the last dimension; the weight may differ per head."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._wide = weight.float()
        self._wide_eps = torch.tensor(eps, dtype=torch.float32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        return cast(Tensor, _RMSNormFunction.apply(x, self)) if torch.is_grad_enabled() else self.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        if runs_kernels(x):
            return load_layer_kernels().rms_norm(x, self.weight, self.eps)
        rstd, wide = self._rstd(x)
        # In place and in one dtype, which is faster than multiplying bfloat16 rows by float32 values.
        normalised = x * rstd if wide is x else wide.mul_(rstd)
        return normalised.mul_(self._wide).to(x.dtype)

    def gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        if runs_kernels(x):
            return load_layer_kernels().rms_norm_gradient(grad, x, self.weight, self.eps)
        rstd, wide = self._rstd(x)
        scaled = (grad * self._wide).mul_(rstd)
        projection = (scaled * wide).sum(-1, keepdim=True).mul_(rstd).mul_(rstd)
        return scaled.addcmul_(wide, projection, value=-1.0 / x.shape[-1]).to(x.dtype)

    def _rstd(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """1 / rms(x), and x in float32."""
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return torch.addcmul(self._wide_eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_(), wide


class _SwiGLU:
    """silu(gate) * up"""

    def forward(self, gate_up: Tensor) -> Tensor:
        if runs_kernels(gate_up):
            return load_layer_kernels().swiglu(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return silu(gate).mul_(up)

    def gradient(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        if runs_kernels(gate_up):
            return load_layer_kernels().swiglu_gradient(grad, gate_up)
        (gate, up), grad_gate_up = gate_up.chunk(2, -1), torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, -1)
        torch.mul(grad, silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_gate_up


_SWIGLU = _SwiGLU()


class _Call(NamedTuple):
    """Arguments that all layers of one forward share."""

    plan: AttentionPlan
    lora_batch: LoRABatch
    cos_T1E: Tensor
    signed_T1E: Tensor  # the sine, with the sign for exchanged halves
    num_rows: int  # rows after these are padding


class _OutputRows(NamedTuple):
    """The rows whose final hidden states are needed: the last layer's MLP computes only these rows."""

    rows_n: Tensor
    lora_batch: LoRABatch


@dataclass(slots=True)
class _Layer:
    index: int
    before_attention: _Norm
    qkv: FusedLinear
    head_norm: _Norm | None  # its weight is [H + G, E]
    out: FusedLinear
    before_mlp: _Norm
    gate_up: FusedLinear
    down: FusedLinear
    num_heads: int
    num_keys: int
    head_dim: int
    attention: AttentionOptions

    @property
    def linears(self) -> tuple[FusedLinear, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    def forward(self, x_TD: Tensor, call: _Call, output: _OutputRows | None = None) -> Tensor:
        out_TO, lora_batch = self._attend(x_TD, call), call.lora_batch
        if output is not None:
            x_TD, out_TO = x_TD.index_select(0, output.rows_n), out_TO.index_select(0, output.rows_n)
            lora_batch = output.lora_batch
        x_TD = x_TD + self.out(out_TO, lora_batch)
        gate_up = self.gate_up(x_TD, lora_batch, before=self.before_mlp)
        return x_TD + self.down(gate_up, lora_batch, before=_SWIGLU)

    def _attend(self, x_TD: Tensor, call: _Call) -> Tensor:
        num_rows = call.num_rows
        qkv = self.qkv(x_TD, call.lora_batch, before=self.before_attention)
        qkv = qkv.view(len(x_TD), self.num_heads + 2 * self.num_keys, self.head_dim)
        queries, keys, values = (_first_rows(x, num_rows) for x in self._apply_qk_norm_rope(qkv, call))
        out_TO = call.plan.attend(self.index, queries, keys, values, **self.attention).flatten(1)
        return pad(out_TO, (0, 0, 0, len(x_TD) - num_rows)) if len(x_TD) > num_rows else out_TO

    def _apply_qk_norm_rope(self, qkv: Tensor, call: _Call) -> Sequence[Tensor]:
        """Queries and keys, rotated after their norms, and values."""
        heads, keys, norm = self.num_heads, self.num_keys, self.head_norm
        if runs_kernels(qkv):
            kernels, (weight, eps) = load_layer_kernels(), (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return kernels.apply_qk_norm_rope(
                qkv, kernels.Rotation(heads, keys, call.cos_T1E, call.signed_T1E, weight, eps)
            )
        rotated, values = qkv.split_with_sizes([heads + keys, keys], 1)
        if norm is not None:
            rotated = norm(rotated)
        # x cos + (-x2, x1) sin, with the halves exchanged and the sign folded into the sine.
        rotated = torch.addcmul(rotated * call.cos_T1E, rotated.roll(self.head_dim // 2, -1), call.signed_T1E)
        return *rotated.split_with_sizes([heads, keys], 1), values


class Decoder:
    """Use `of`, then `prepare`; rows without gradients are faster after `pack`."""

    def __init__(self, modules: nn.Module, unembedding: MultiLoRALinear) -> None:
        self._modules = modules
        self._unembedding = unembedding
        self._layers: list[_Layer] = []
        self._head: FusedLinear | None = None
        self._final = _norm(modules, "norm")
        self._is_packed = False
        self.can_pack = has_onednn(next(modules.parameters()))
        """Whether `pack` was not called yet and may make a second copy of the weights."""

    @classmethod
    def of(cls, modules: nn.Module, unembedding: MultiLoRALinear) -> Decoder | None:
        """None where the modules have other parts than these layers."""
        return cls(modules, unembedding) if has_fusable_layers(modules, MultiLoRALinear) else None

    def prepare(self) -> None:
        """Stack the weights of linears that read the same rows."""
        options = attention_options_of(self._modules)
        layers = cast(nn.ModuleList, self._modules.layers)
        self._layers = [_layer(index, layer, options[index]) for index, layer in enumerate(layers)]

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def pack(self) -> bool:
        """Prepare oneDNN's matmuls of rows without gradients, with packed weights if these are small and fit.
        False if that was done already, or without oneDNN.
        """
        if not self.can_pack:
            return False
        free, _ = read_host_memory()
        self._head = FusedLinear([self._unembedding])
        self._is_packed = 0 < self.packed_bytes <= PACKED_MEMORY_SHARE * free
        self.can_pack = False
        if self._is_packed:
            for linear in (self._head, *(linear for layer in self._layers for linear in layer.linears)):
                linear.pack()
        return True

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed weights, now or after `pack`."""
        if not (self.can_pack or self._is_packed):
            return 0
        layers = sum(linear.num_bytes for layer in self._layers for linear in layer.linears)
        num_bytes = layers + self._unembedding.weight.nbytes
        return num_bytes if num_bytes <= MAX_PACKED_BYTES else 0

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        plan: AttentionPlan,
        lora_batch: LoRABatch,
        output_rows: Sequence[int] | None = None,
        *,
        num_recomputed: int = 0,
    ) -> Tensor:
        """[T, D]: hidden states after the final norm; only of the `output_rows` rows (ascending) if given. The first
        `num_recomputed` layers keep only their input for their gradient.
        """
        num_rows = len(tokens_T)
        pads = self._head is not None and not torch.is_grad_enabled()
        if padding := round_up(num_rows) - num_rows if pads else 0:
            # Repeat the last row: oneDNN compiles each matmul for each number of rows.
            tokens_T, positions_T = (torch.cat([x, x[-1:].expand(padding)]) for x in (tokens_T, positions_T))
        x_TD = cast("nn.Embedding", self._modules.embed_tokens)(tokens_T)
        call = self._prepare_call(x_TD, positions_T, plan, lora_batch, num_rows)
        for index, layer in enumerate(self._layers[:-1]):
            x_TD = self._run_layer(layer, x_TD, call, recompute=index < num_recomputed)
        last = self._layers[-1]
        if output_rows is None:
            recompute = num_recomputed == self.num_layers
            return _first_rows(self._final(self._run_layer(last, x_TD, call, recompute=recompute)), num_rows)
        return self._final(last.forward(x_TD, call, self._select_output(lora_batch, output_rows, x_TD.device)))[
            : len(output_rows)
        ]

    def _prepare_call(
        self, x_TD: Tensor, positions_T: Tensor, plan: AttentionPlan, lora_batch: LoRABatch, num_rows: int
    ) -> _Call:
        cos_1TE, sin_1TE = cast(nn.Module, self._modules.rotary_emb)(x_TD, positions_T[None])
        half = sin_1TE.shape[-1] // 2
        signed_1TE = torch.cat((-sin_1TE[..., :half], sin_1TE[..., half:]), -1)
        return _Call(plan, lora_batch, cos_1TE[0][:, None], signed_1TE[0][:, None], num_rows)

    def run_layers(
        self, x_TD: Tensor, positions_T: Tensor, plan: AttentionPlan, lora_batch: LoRABatch
    ) -> Iterator[Tensor]:
        """The rows that each layer makes of the same rows, and at last those that the final norm makes of them."""
        call = self._prepare_call(x_TD, positions_T, plan, lora_batch, len(x_TD))
        yield from (layer.forward(x_TD, call) for layer in self._layers)
        yield self._final(x_TD)

    @staticmethod
    def _run_layer(layer: _Layer, x_TD: Tensor, call: _Call, *, recompute: bool) -> Tensor:
        if not (recompute and torch.is_grad_enabled()):
            return layer.forward(x_TD, call)
        # The base uses no random numbers, so there is no generator state to keep.
        return checkpoint(layer.forward, x_TD, call, use_reentrant=False, preserve_rng_state=False)

    def _select_output(self, lora_batch: LoRABatch, output_rows: Sequence[int], device: torch.device) -> _OutputRows:
        padding = round_up(len(output_rows)) - len(output_rows) if self._head is not None else 0
        rows_n = upload(np.array([*output_rows, *[output_rows[-1]] * padding]), device)
        return _OutputRows(rows_n, lora_batch.select(output_rows))

    def logits(self, hidden_TD: Tensor, lora_batch: LoRABatch) -> Tensor | None:
        """[T, V] float32; None without oneDNN. LoRA deltas are rounded separately, as in the
        unembedding's own module.
        """
        return None if self._head is None else self._head(hidden_TD, lora_batch, torch.float32)


def round_up(num_rows: int) -> int:
    """The number of rows to compute for `num_rows`: multiples of 1/4 (above 32 rows, 1/8) of a power of two."""
    power = 1 << max(num_rows - 1, 0).bit_length()
    step = max(power // (4 if num_rows <= 32 else 8), 1)
    return -(-num_rows // step) * step


@torch.no_grad()
def attention_options_of(modules: nn.Module) -> dict[int, AttentionOptions]:
    """The attention options of each layer, by index."""
    probe, token = AttentionProbe(), torch.zeros(1, 1, dtype=torch.int64, device=next(modules.parameters()).device)
    modules(input_ids=token, position_ids=token, use_cache=False, **{PLAN_KEY: probe})
    return {layer: call.options for layer, (call,) in probe.calls.items()}


def _layer(index: int, layer: nn.Module, attention: AttentionOptions) -> _Layer:
    head_dim = cast(int, layer.get_submodule("self_attn").head_dim)

    def fuse(*names: str) -> FusedLinear:
        return FusedLinear(linears_of(layer, names))

    num_heads, num_keys = (linear.out_features // head_dim for linear in linears_of(layer, QKV[:2]))
    head_norm = None
    if hasattr(layer.get_submodule("self_attn"), "q_norm"):
        q_norm, k_norm = (_norm(layer, name) for name in HEAD_NORMS)
        weights = [q_norm.weight.expand(num_heads, -1), k_norm.weight.expand(num_keys, -1)]
        head_norm = _Norm(torch.cat(weights), q_norm.eps)
    before_attention, before_mlp = (_norm(layer, name) for name in LAYER_NORMS)
    return _Layer(
        index=index,
        before_attention=before_attention,
        qkv=fuse(*QKV),
        head_norm=head_norm,
        out=fuse(OUT),
        before_mlp=before_mlp,
        gate_up=fuse(*GATE_UP),
        down=fuse(DOWN),
        num_heads=num_heads,
        num_keys=num_keys,
        head_dim=head_dim,
        attention=attention,
    )


def _first_rows(x: Tensor, num_rows: int) -> Tensor:
    """Backward through a slice, even of all rows, copies the gradient into zeros."""
    return x if x.shape[0] == num_rows else x[:num_rows]


def _stack_weights(linears: Sequence[MultiLoRALinear]) -> Tensor:
    """The weights stacked in one tensor; the linears' own weights become views of it."""
    if len(linears) == 1:
        return linears[0].weight
    weight_OI = torch.cat([linear.weight.data for linear in linears])
    for linear, part in zip(linears, weight_OI.split([linear.out_features for linear in linears]), strict=True):
        linear.weight.data = part
    return weight_OI


def _norm(parent: nn.Module, name: str) -> _Norm:
    module = parent.get_submodule(name)
    return _Norm(cast(Tensor, module.weight), cast(float, module.variance_epsilon))


def linears_of(layer: nn.Module, names: Sequence[str]) -> list[MultiLoRALinear]:
    return [cast(MultiLoRALinear, layer.get_submodule(name)) for name in names]
