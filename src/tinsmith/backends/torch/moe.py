"""Adapters on the routed experts of a mixture: many adapters, many experts, one packed row.

Replaces a model's own module of fused experts (transformers' `use_experts_implementation` families). Each row has
chosen k experts. The k pairs of each row are sorted once, by expert and then by adapter: an expert's weights are read
once for all of its rows, and each adapter meets only rows of its own segments (`expert_pairs`). The router is not
adapted; its probabilities carry gradients to the rows below.

An adapter's matrices are Tinker's (docs/decisions.md): all experts share the matrix on the side of the hidden states.
`w1` (gate) and `w3` (up) have one A and a B for each expert, `w2` (down) an A for each and one B. So A of w1 and w3 is
applied before the rows are dispatched to experts, and B of w2 after their results are combined; both are products of a
segment's rows. Experts without a gate have only `w1` (up) and `w2`.

On CUDA of compute capability 9.0 or 10.0, in bfloat16, where sizes are multiples of 8 and ranks are at most
`MAX_RANKS`, the base model's products are torch's grouped ones and all else are kernels (`expert_kernels`); nothing is
read from the device. With transformers' default gate and SiLU, a pair keeps only its outputs of gate and up, without
deltas, for backward (`_FusedFunction`). Elsewhere the reference, a loop over experts, reads the groups' sizes first.
The base model's matrices may be codes (`quantization`), from which `frozen_weights` makes the same products.

Gradients go into the adapters' own buffers, as in `lora.MultiLoRALinear`. Knows no loss, optimizer, file or tenant.

Shapes: T rows, k experts of each, N = T * k pairs, E experts, D hidden size, I inner size, G = 2 * I (I without a
gate), r rank, R low-rank values of a row, n rows of a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.integrations.moe import _default_apply_gate

from tinsmith.backends.torch.adapters import Adapter, ExpertStack, Layout, Target, extend_rows
from tinsmith.backends.torch.expert_pairs import ExpertPairs, Factors, LoopedPairs, count_ranks, rank_slices
from tinsmith.backends.torch.frozen_weights import ExpertWeights, PlainWeights, Quantise, WeightCodes
from tinsmith.backends.torch.host import upload
from tinsmith.backends.torch.lora import DeviceLoRABatch, ForwardContext, anchor
from tinsmith.backends.torch.lora_batch import BLOCK_ROWS, LoRABatch
from tinsmith.backends.torch.matmul import add_matmul_, is_launch_bound, matmul, write_matmul_
from tinsmith.backends.torch.probes import find_activation
from tinsmith.errors import SettingsError
from tinsmith.runtime.devices import kind_of

GATE, UP, DOWN = "w1", "w3", "w2"

MAX_RANKS = 128
"""The highest rank of an adapter that the kernels multiply."""


@cache
def has_grouped_mm(device: torch.device) -> bool:
    """Whether the device has a grouped kernel for bfloat16; elsewhere torch loops, and reads the sizes for that."""
    return kind_of(device).has_kernels and torch.cuda.get_device_capability(device)[0] in (9, 10)


class MultiLoRAExperts(nn.Module):
    """Keeps the module's own parameters under the same names. Calls the module itself if there is no LoRA batch."""

    down_proj: Tensor
    down_proj_bias: Tensor

    def __init__(
        self, name: str, experts: nn.Module, context: ForwardContext, codes: Sequence[WeightCodes] = ()
    ) -> None:
        """`codes`: what `quantise_experts` made of the experts, or a part; empty if they are not quantised."""
        super().__init__()
        if getattr(experts, "has_post_expert_norm", False):
            raise SettingsError(
                f"{type(experts).__name__} has a norm after each expert, which cannot carry adapters here"
            )
        self.name = name
        for parameter_name, parameter in experts.named_parameters(recurse=False):
            self.register_parameter(parameter_name, parameter)
        self._experts = (experts,)  # not a submodule: its parameters would have two names
        self.has_bias = bool(experts.has_bias)
        self.transposed = bool(experts.is_transposed)
        self.has_gate = bool(experts.has_gate)
        self._codes = codes
        self.num_experts, self.hidden_features, self.inner_features = self.down.shape
        self.dtype = self.down.dtype
        self._interleaved = self.has_gate and not experts.is_concatenated
        gate, up = slice(0, self.inner_features), slice(self.inner_features, None)
        if self._interleaved:
            gate, up = slice(0, None, 2), slice(1, None, 2)
        self.columns = {f"{name}.{GATE}": gate}
        if self.has_gate:
            self.columns[f"{name}.{UP}"] = up
        self.down_name = f"{name}.{DOWN}"
        self._choices = 1
        self._context = context
        self._parts_by_layout: dict[
            int, tuple[Layout, Tensor | None, Tensor | None, tuple[Tensor, Tensor] | None]
        ] = {}  # by the id of a layout
        self.apply_gate = _choose_gate(experts, self.has_gate)
        """Maps [N, G] to [N, I]."""
        self.activation = find_activation(self.apply_gate) if self.has_gate else None
        """Of gates that are adjacent halves; None for others."""

    @property
    def is_quantised(self) -> bool:
        return bool(self._codes)

    @property
    def module(self) -> nn.Module:
        """The model's own module."""
        return self._experts[0]

    @property
    def outer_proj(self) -> Tensor:
        """The matrix that reads the hidden states: gate and up, or only up."""
        return cast(Tensor, self.gate_up_proj if self.has_gate else self.up_proj)

    @property
    def outer(self) -> ExpertWeights:
        """Of gate and up, or only up."""
        return PlainWeights(self.outer_proj, self.transposed) if not self._codes else self._codes[0]

    @property
    def down(self) -> ExpertWeights:
        return PlainWeights(self.down_proj, self.transposed) if not self._codes else self._codes[1]

    def list_codes(self) -> Sequence[WeightCodes]:
        return self._codes

    @property
    def copied_bytes(self) -> int:
        """Bytes that a product of the larger projection takes for matrices made from codes: on the grouped path those
        of all experts at once.
        """
        size = self.hidden_features * self.inner_features * len(self.columns)
        return self.outer.copied_bytes * size * (self.num_experts if self._is_grouped([]) else 1)

    @property
    def outer_bias(self) -> Tensor:
        return cast(Tensor, self.gate_up_proj_bias if self.has_gate else self.up_proj_bias)

    @property
    def targets(self) -> list[Target]:
        outer, inner = self.hidden_features, self.inner_features
        swapped = bool(getattr(self._experts[0], "is_swapped_by_peft", False))
        outer_stack, down_stack = (
            ExpertStack(self.num_experts, common, self._interleaved, swapped) for common in ("A", "B")
        )
        return [
            *(Target(name, "mlp", outer, inner, outer_stack) for name in self.columns),
            Target(self.down_name, "mlp", inner, outer, down_stack),
        ]

    @property
    def features_per_row(self) -> int:
        """Inputs and outputs of a row's expert linears, for the number of experts that the last rows chose."""
        return self._choices * (2 * self.hidden_features + (1 + len(self.columns)) * self.inner_features)

    @property
    def is_fused(self) -> bool:
        """Whether backward needs no more of a pair than `saved_per_row`."""
        return self.activation == "silu" and self._is_grouped([])

    @property
    def saved_per_row(self) -> int:
        """Elements that fused experts keep for backward: the row, and gate and up of its pairs."""
        return self.hidden_features + self._choices * 2 * self.inner_features

    @property
    def working_per_row(self) -> int:
        """Elements that fused experts' backward needs at once: the gradients of its pairs, and of gate and up."""
        return self._choices * (self.hidden_features + 2 * self.inner_features)

    def forward(self, hidden_TD: Tensor, *choices: Tensor) -> Tensor:
        """[T, D]. `choices`: the experts of each row [T, k], and the router's weights of them."""
        lora_batch = self._context.lora_batch
        if lora_batch is None and not self._codes:
            return self.module(hidden_TD, *choices)
        lora_batch = LoRABatch.of_base(len(hidden_TD)) if lora_batch is None else lora_batch
        index_Tk, weights_Tk = choices
        self._choices = index_Tk.shape[1]
        if isinstance(lora_batch, DeviceLoRABatch) and lora_batch.is_captured:
            return self.forward_captured(hidden_TD, index_Tk, weights_Tk, lora_batch)
        return self.forward_experts(hidden_TD, index_Tk, weights_Tk, lora_batch)

    def forward_experts(self, hidden_TD: Tensor, index_Tk: Tensor, weights_Tk: Tensor, lora_batch: LoRABatch) -> Tensor:
        """[T, D]: the weighted sum of each row's experts, with the adapters of this LoRA batch."""
        assert hidden_TD.shape == (lora_batch.num_rows, self.hidden_features)
        is_grouped = self._is_grouped([segment.adapter for segment in lora_batch.segments])
        pairs = _sort_pairs(index_Tk, lora_batch, self.num_experts, grouped=is_grouped)
        call, is_fused = _Call(self, pairs, index_Tk, lora_batch), is_grouped and self.activation == "silu"
        if not torch.is_grad_enabled():
            if is_fused:
                return call.fused(hidden_TD, weights_Tk)[0]
            return call.down(self.apply_gate(call.gate_up(hidden_TD)[0]), weights_Tk)[0]
        recorded = anchor(hidden_TD.device) if call.has_adapters else None
        if is_fused:
            return cast(Tensor, _FusedFunction.apply(hidden_TD, weights_Tk, recorded, call))
        inner_NI = self.apply_gate(cast(Tensor, _GateUpFunction.apply(hidden_TD, recorded, call)))
        return cast(Tensor, _DownFunction.apply(inner_NI, weights_Tk, call))

    def forward_captured(
        self, hidden_TD: Tensor, index_Tk: Tensor, weights_Tk: Tensor, lora_batch: DeviceLoRABatch
    ) -> Tensor:
        """[T, D] of rows without gradients, in launches that depend on shapes alone. The grouped kernel must support
        the experts (`can_capture`).
        """
        from tinsmith.backends.torch import expert_decode_kernels as kernels
        from tinsmith.backends.torch import lora_kernels
        from tinsmith.backends.torch.expert_kernels import combine_pairs, repeat_rows

        pairs = kernels.sort_pairs(index_Tk, self.num_experts)
        expert_N = pairs.index_nk.view(-1)
        num_choices = index_Tk.shape[1]
        x_ND = repeat_rows(hidden_TD, pairs.sorted_N, num_choices)
        y_NG = self.outer.multiply_groups(x_ND, pairs.ends_E)
        if self.has_bias:
            y_NG += self.outer_bias.index_select(0, expert_N.index_select(0, pairs.pair_N))
        tables = [
            (layout, blocks_B4, lora_batch.row_adapters(layout, blocks_B4))
            for layout, blocks_B4 in lora_batch.tables(hidden_TD.device)
        ]
        for layout, blocks_B4, rows_T2 in tables:
            if (parts_P5 := self._device_parts(layout, hidden_TD.device)[0]) is not None:
                u_PSTr = lora_kernels.shrink(hidden_TD, blocks_B4, parts_P5, layout.rank, BLOCK_ROWS)
                kernels.expand_pairs_(
                    y_NG, u_PSTr, rows_T2, pairs, parts_P5, self.inner_features, layout.rank, hidden_TD
                )
        inner_NI = self.apply_gate(y_NG)
        y_ND = self.down.multiply_groups(inner_NI, pairs.ends_E)
        if self.has_bias:
            y_ND += self.down_proj_bias.index_select(0, expert_N.index_select(0, pairs.pair_N))
        out_TD = combine_pairs(y_ND, pairs.sorted_N, num_choices, weights_Tk)
        for layout, blocks_B4, rows_T2 in tables:
            _, parts_15, tiles = self._device_parts(layout, hidden_TD.device)
            if parts_15 is not None and tiles is not None:
                u_1kTr = kernels.shrink_pairs(inner_NI, rows_T2, pairs, weights_Tk, parts_15, layout.rank)
                lora_kernels.expand_(out_TD, u_1kTr, blocks_B4, *tiles, layout.rank, BLOCK_ROWS, hidden_TD)
        return out_TD

    def _device_parts(
        self, layout: Layout, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, Tensor] | None]:
        """`parts_P5` of the outer projections and of the inner one as `expert_decode_kernels` takes them, and the inner
        one's `parts_P4` and `tiles_C2` for its shared matrix; None where the layout has none.
        """
        if (entry := self._parts_by_layout.get(id(layout))) is None:
            spans, rank = layout.spans, layout.rank
            outer = [
                (*(span.start for span in spans[name]), columns.start or 0, self.inner_features, columns.step or 1)
                for name, columns in self.columns.items()
                if name in spans
            ]
            inner = tiles = None
            if self.down_name in spans:
                from tinsmith.backends.torch import lora_kernels

                a, b = spans[self.down_name]
                inner = upload(np.array([(a.start, b.start, 0, self.hidden_features, 1)], np.int64), device)
                tile_list = lora_kernels.list_tiles([self.hidden_features], rank)
                tiles = inner[:, :4].contiguous(), upload(np.array(tile_list, np.int64), device)
            parts = upload(np.array(outer, np.int64), device) if outer else None
            entry = self._parts_by_layout[id(layout)] = layout, parts, inner, tiles
        return entry[1:]

    @property
    def can_capture(self) -> bool:
        """Whether a CUDA graph can hold rows of these experts: a loop over experts reads their numbers of rows."""
        return self._is_grouped([])

    @property
    def kernel(self) -> str:
        """Names the kernel of these experts, for the log."""
        return f"grouped_mm and kernels for ranks up to {MAX_RANKS}" if self._is_grouped([]) else "loop over experts"

    def _is_grouped(self, adapters: Sequence[Adapter | None]) -> bool:
        """Whether the kernels support these matrices."""
        sizes_fit = all(size % self.outer.alignment == 0 for size in (self.hidden_features, self.inner_features))
        ranks_fit = all(adapter is None or adapter.layout.rank <= MAX_RANKS for adapter in adapters)
        return self.dtype == torch.bfloat16 and sizes_fit and ranks_fit and has_grouped_mm(self.down.device)


def quantise_experts(experts: nn.Module, quantise: Quantise) -> list[WeightCodes]:
    """The codes of gate and up, and of down. A model's own module loses these matrices."""
    names = "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"
    matrices = [cast(Tensor, experts._parameters.pop(name)).detach() for name in names]
    return [quantise(weight_E.mT if experts.is_transposed else weight_E) for weight_E in matrices]


def _choose_gate(experts: nn.Module, has_gate: bool) -> Callable[[Tensor], Tensor]:
    if not has_gate:
        return partial(cast(Callable[[Tensor], Tensor], experts.act_fn))  # no submodule: it would have two names
    return cast("Callable[[Tensor], Tensor] | None", getattr(experts, "_apply_gate", None)) or partial(
        _default_apply_gate, experts
    )


def dispatch_chosen_rows(decoder: nn.Module, context: ForwardContext) -> None:
    """Give the experts of Llama 4 the rows that chose them. transformers gives each expert all rows, times the router's
    weight, which is zero for others. Raises SettingsError if a row chooses several: experts get weighted inputs.
    """
    for module in decoder.modules():
        experts: Any = getattr(module, "experts", None)
        if isinstance(experts, MultiLoRAExperts) and hasattr(experts.module, "is_swapped_by_peft"):
            if module.top_k != 1:
                raise SettingsError(f"num_experts_per_tok is {module.top_k}; experts of Llama 4 are served with 1")
            module.forward = partial(_forward_weighted_inputs, module, module.forward, context)


def _forward_weighted_inputs(
    mixture: Any,  # noqa: ANN401
    forward: Callable[[Tensor], tuple[Tensor, Tensor]],
    context: ForwardContext,
    hidden: Tensor,
) -> tuple[Tensor, Tensor]:
    if context.lora_batch is None and not mixture.experts.is_quantised:
        return forward(hidden)
    hidden_TD = hidden.flatten(0, -2)
    scores_TE, logits_TE = mixture.router(hidden_TD)
    index_T1 = logits_TE.argmax(-1, keepdim=True)
    weight_T1 = scores_TE.gather(1, index_T1)
    routed_TD = mixture.experts(hidden_TD * weight_T1, index_T1, torch.ones_like(weight_T1))
    return mixture.shared_expert(hidden_TD) + routed_TD, logits_TE


def _sort_pairs(index_Tk: Tensor, lora_batch: LoRABatch, num_experts: int, *, grouped: bool) -> ExpertPairs:
    if not grouped:
        return LoopedPairs(index_Tk, lora_batch, num_experts)
    from tinsmith.backends.torch.expert_kernels import GroupedPairs

    return GroupedPairs(index_Tk, lora_batch, num_experts)


class _SharedRows(NamedTuple):
    """A matrix [O, C] that all experts share, or several that are adjacent in their adapter, for rows of a segment, and
    where its outputs are among a row's low-rank values.
    """

    adapter: Adapter
    names: list[str]
    rows: slice
    ranks: slice
    matrix: Tensor


class _Call:
    """One call of a module of experts: its rows, their pairs, and the adapters' parts."""

    def __init__(self, experts: MultiLoRAExperts, pairs: ExpertPairs, index_Tk: Tensor, lora_batch: LoRABatch) -> None:
        self._experts = experts
        self._pairs = pairs
        self._index_Tk = index_Tk
        self._segments = lora_batch.segments
        self._outer = [Factors(name, 1, columns) for name, columns in experts.columns.items()]
        self._down = [Factors(experts.down_name, 0, slice(0, experts.inner_features))]

    @property
    def has_adapters(self) -> bool:
        return any(rank_slices(adapter, self._outer + self._down) for adapter in self._pairs.adapters)

    def gate_up(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """[N, G] before the gate, and the low-rank values [T, R] of the rows for w1 and w3."""
        y_NG, u_TR = self._base_gate_up(hidden_TD), self._shrink_hidden(hidden_TD)
        self._pairs.expand_(y_NG, u_TR, self._outer)
        return y_NG, u_TR

    def gate_up_backward(self, grad_NG: Tensor, hidden_TD: Tensor, u_TR: Tensor, *, need_input: bool) -> Tensor | None:
        """The gradient of the rows, if needed; adds those of A and B to their adapters."""
        grad_NR = self._pairs.shrink(grad_NG, self._outer)
        return self._hidden_gradient(grad_NG, grad_NR, hidden_TD, u_TR, need_input=need_input)

    def down(self, inner_NI: Tensor, weights_Tk: Tensor) -> tuple[Tensor, Tensor]:
        """[T, D], and the rows' combined, weighted x A^T [T, R]."""
        return self._combine_down(inner_NI, self._pairs.shrink(inner_NI, self._down), weights_Tk)

    def down_backward(
        self, grad_TD: Tensor, inner_NI: Tensor, weights_Tk: Tensor, sums_TR: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the inner rows [N, I] and of the router's weights [T, k]."""
        pairs = self._pairs
        # Before the router's weight is applied, so that one matmul serves both gradients.
        grad_NI, z_TR = self._inner_gradient(grad_TD, sums_TR)
        pairs.expand_(grad_NI, z_TR, self._down)
        pairs.add_outer_(inner_NI, z_TR, self._down, weights_Tk)
        grad_weights_Tk = self._add_bias_products(pairs.by_row((grad_NI * inner_NI).sum(-1)), grad_TD)
        grad_NI = (grad_NI * pairs.sort_weights(weights_Tk)).to(inner_NI.dtype)
        return grad_NI, grad_weights_Tk.to(weights_Tk.dtype)

    def fused(self, hidden_TD: Tensor, weights_Tk: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[T, D] with the default gate; for backward the outputs [N, G] without deltas, and the rows' low-rank values
        for w1 and w3, and for w2.
        """
        y_NG, u_TR = self._base_gate_up(hidden_TD), self._shrink_hidden(hidden_TD)
        inner_NI, v_NR = self._pairs.gate(y_NG, u_TR, self._outer, self._down)
        out_TD, sums_TR = self._combine_down(inner_NI, v_NR, weights_Tk)
        return out_TD, y_NG, u_TR, sums_TR

    def fused_backward(
        self, grad_TD: Tensor, saved: tuple[Tensor, ...], u_TR: Tensor, sums_TR: Tensor, *, need_input: bool
    ) -> tuple[Tensor | None, Tensor]:
        """The gradients of the rows, if needed, and of the router's weights. `saved`: rows, weights and [N, G]."""
        pairs, (hidden_TD, weights_Tk, y_NG) = self._pairs, saved
        grad_NI, z_TR = self._inner_gradient(grad_TD, sums_TR)
        gradients = pairs.gate_gradient_(grad_NI, y_NG, (u_TR, z_TR), weights_Tk, self._outer, self._down)
        pairs.add_outer_(grad_NI, z_TR, self._down, weights_Tk)
        del grad_NI  # one of the largest tensors of a step
        grad_weights_Tk = self._add_bias_products(gradients.weights_Tk, grad_TD).to(weights_Tk.dtype)
        inputs = gradients.gate_up_NG, gradients.low_rank_NR, hidden_TD, u_TR
        return self._hidden_gradient(*inputs, need_input=need_input), grad_weights_Tk

    def _base_gate_up(self, hidden_TD: Tensor) -> Tensor:
        """[N, G] without deltas."""
        y_NG = self._pairs.matmul(self._pairs.repeat_rows(hidden_TD), self._experts.outer)
        if self._experts.has_bias:
            self._pairs.add_bias_(y_NG, self._experts.outer_bias)
        return y_NG

    def _shrink_hidden(self, hidden_TD: Tensor) -> Tensor:
        """[T, R]: scale * x A^T of w1 and w3."""
        u_TR = hidden_TD.new_empty(len(hidden_TD), count_ranks(self._pairs.adapters, self._outer))
        for adapter, _, rows, ranks, a_RD in self._shared_rows(self._outer):
            _write_product_(u_TR[rows, ranks], hidden_TD[rows], a_RD.t(), adapter.scale)
        return u_TR

    def _hidden_gradient(
        self, grad_NG: Tensor, grad_NR: Tensor, hidden_TD: Tensor, u_TR: Tensor, *, need_input: bool
    ) -> Tensor | None:
        """The gradient of the rows, if needed, from those of gate and up and of the pairs' low-rank values; adds those
        of w1 and w3 to their adapters.
        """
        pairs, grad_TD = self._pairs, None
        pairs.add_outer_(grad_NG, u_TR, self._outer)
        if need_input:
            grad_TD = pairs.combine(pairs.matmul(grad_NG, self._experts.outer, back=True))
        grad_TR = pairs.combine(grad_NR)
        for adapter, names, rows, ranks, a_RD in self._shared_rows(self._outer):
            grad_nR = grad_TR[rows, ranks]
            if adapter.gradients is not None:
                first_1rD, *_ = [adapter.gradients[name][0] for name in names]
                add_matmul_(extend_rows(first_1rD[0], len(a_RD)), grad_nR.t(), hidden_TD[rows], adapter.scale)
            if grad_TD is not None:
                add_matmul_(grad_TD[rows], grad_nR, a_RD, adapter.scale)
        return grad_TD

    def _combine_down(self, inner_NI: Tensor, v_NR: Tensor, weights_Tk: Tensor) -> tuple[Tensor, Tensor]:
        """[T, D], and the rows' sums [T, R] of the pairs' weighted x A^T."""
        pairs, experts = self._pairs, self._experts
        out_TD = pairs.combine(pairs.matmul(inner_NI, experts.down), weights_Tk)
        if experts.has_bias:
            shares_TE = out_TD.new_zeros(len(out_TD), experts.num_experts)
            shares_TE.scatter_add_(1, self._index_Tk, weights_Tk.to(out_TD.dtype))
            add_matmul_(out_TD, shares_TE, experts.down_proj_bias)
        sums_TR = pairs.combine(v_NR, weights_Tk)
        for adapter, _, rows, ranks, b_Dr in self._shared_rows(self._down):
            add_matmul_(out_TD[rows], sums_TR[rows, ranks], b_Dr.t(), adapter.scale)
        return out_TD, sums_TR

    def _inner_gradient(self, grad_TD: Tensor, sums_TR: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient [N, I] of the inner rows before deltas and the router's weights, and scale * grad B [T, R]; adds
        that of w2's B to its adapters.
        """
        grad_ND = self._pairs.repeat_rows(grad_TD)
        z_TR = torch.empty_like(sums_TR)
        for adapter, (name,), rows, ranks, b_Dr in self._shared_rows(self._down):
            _write_product_(z_TR[rows, ranks], grad_TD[rows], b_Dr, adapter.scale)
            if adapter.gradients is not None:
                grad_b_1Dr = adapter.gradients[name][1]
                add_matmul_(grad_b_1Dr[0].t(), sums_TR[rows, ranks].t(), grad_TD[rows], adapter.scale)
        return self._pairs.matmul(grad_ND, self._experts.down, back=True), z_TR

    def _add_bias_products(self, grad_weights_Tk: Tensor, grad_TD: Tensor) -> Tensor:
        """Add what down's biases contribute to the gradient of the router's weights."""
        if not self._experts.has_bias:
            return grad_weights_Tk
        products_TE = matmul(grad_TD, self._experts.down_proj_bias.t(), grad_TD.dtype)
        return grad_weights_Tk + products_TE.gather(1, self._index_Tk)

    def _shared_rows(self, projections: Sequence[Factors]) -> Iterator[_SharedRows]:
        """What each segment multiplies with the matrices that all experts share."""
        for start, stop, adapter in self._segments:
            if adapter is not None:
                for names, ranks, matrix in _join_shared(adapter, projections):
                    yield _SharedRows(adapter, names, slice(start, stop), ranks, matrix)


def _join_shared(adapter: Adapter, projections: Sequence[Factors]) -> list[tuple[list[str], slice, Tensor]]:
    """Names, low-rank values and matrix of each projection that the adapter has; adjacent A's are one matrix."""
    joined: list[tuple[list[str], slice, Tensor]] = []
    for _, factors, ranks in rank_slices(adapter, projections):
        matrix = adapter.compute[factors.name][1 - factors.matrix][0]
        if joined and factors.matrix == 1:
            names, previous, first = joined[-1]
            if first.storage_offset() + first.numel() == matrix.storage_offset():
                size = ranks.stop - previous.start
                joined[-1] = [*names, factors.name], slice(previous.start, ranks.stop), extend_rows(first, size)
                continue
        joined.append(([factors.name], ranks, matrix))
    return joined


def _write_product_(out: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """out = scale * a @ b, in one operation where launches take longer than products."""
    if is_launch_bound(a):
        write_matmul_(out, a, b, scale)
    else:
        torch.mul(matmul(a, b, a.dtype), scale, out=out)


class _GateUpFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, anchor: Tensor | None, call: _Call) -> Tensor:
        y, ctx.low_rank = call.gate_up(hidden)
        ctx.save_for_backward(hidden)
        ctx.call = call
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (hidden,) = ctx.saved_tensors
        grad_hidden = ctx.call.gate_up_backward(
            grad.contiguous(), hidden, ctx.low_rank, need_input=ctx.needs_input_grad[0]
        )
        return grad_hidden, None, None


class _DownFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inner: Tensor, weights: Tensor, call: _Call) -> Tensor:
        y, ctx.low_rank = call.down(inner, weights)
        ctx.save_for_backward(inner, weights)
        ctx.call = call
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inner, weights = ctx.saved_tensors
        return *ctx.call.down_backward(grad.contiguous(), inner, weights, ctx.low_rank), None


class _FusedFunction(torch.autograd.Function):
    """Both with the default gate between them: saves the rows, the weights and [N, G] without deltas, from which
    backward computes the gate again.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weights: Tensor, anchor: Tensor | None, call: _Call) -> Tensor:
        y, outer, *ctx.low_rank = call.fused(hidden, weights)
        ctx.save_for_backward(hidden, weights, outer)
        ctx.call = call
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        need_input = ctx.needs_input_grad[0]
        grads = ctx.call.fused_backward(grad.contiguous(), ctx.saved_tensors, *ctx.low_rank, need_input=need_input)
        return *grads, None, None
