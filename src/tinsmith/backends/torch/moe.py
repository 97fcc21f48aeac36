"""Adapters on the routed experts of a mixture: many adapters, many experts, one packed row.

Replaces a model's own module of fused experts (transformers' `use_experts_implementation` families). Each row has
chosen k experts. For the base model the k pairs of each row are sorted by expert, so that an expert's weights are read
once for all of its rows; for adapters they are sorted by segment and then by expert, so that each adapter meets only
rows of its own segments. The router is not adapted; its probabilities carry gradients to the rows below.

An adapter's matrices are Tinker's (docs/decisions.md): all experts share the matrix on the side of the hidden states.
`w1` (gate) and `w3` (up) have one A and a B for each expert, `w2` (down) an A for each and one B. So A of w1 and w3 is
applied before the rows are dispatched to experts, and B of w2 after their results are combined. Experts without a gate
have only `w1` (up) and `w2`.

Sorted pairs are multiplied with experts' matrices in one of two ways. `grouped_mm` takes all experts in one kernel and
leaves the sizes of groups on the device: on CUDA of compute capability 9.0 or 10.0, in bfloat16, where sizes and ranks
are multiples of 8. Its output is bfloat16, so a micro-batch's gradients of experts' matrices are rounded once before
they are added in float32. Elsewhere the reference, a loop over experts, reads the sizes from the device first.

Gradients go into the adapters' own buffers, as in `lora.MultiLoRALinear`. Knows no loss, optimizer, file or tenant.

Shapes: T rows, k experts of each, N = T * k pairs, E experts, D hidden size, I inner size, G = 2 * I (I without a
gate), r rank, n rows and m = n * k pairs of a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm
from transformers.integrations.moe import _default_apply_gate

from tinsmith.backends.torch.adapters import Adapter, ExpertStack, Layout, Target
from tinsmith.backends.torch.host import read, upload
from tinsmith.backends.torch.lora import DeviceLoRABatch, ForwardContext, anchor
from tinsmith.backends.torch.lora_batch import BLOCK_ROWS, LoRABatch
from tinsmith.backends.torch.matmul import add_matmul_, matmul
from tinsmith.errors import SettingsError

GATE, UP, DOWN = "w1", "w3", "w2"


def lora_kernels() -> ModuleType:
    """Only where a CUDA tensor was met: other builds of torch have no triton."""
    from tinsmith.backends.torch import lora_kernels as kernels

    return kernels


@cache
def has_grouped_mm(device: torch.device) -> bool:
    """Whether the device has a grouped kernel for bfloat16; elsewhere torch loops, and reads the sizes for that."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


class _PairGroups(NamedTuple):
    """Adjacent pairs of one expert. `bounds`: (expert, first, last + 1) for experts with pairs; None where a kernel
    reads the ends on the device.
    """

    ends_E: Tensor
    bounds: list[tuple[int, int, int]] | None

    def matmul(self, x_NC: Tensor, weight_ECO: Tensor) -> Tensor:
        """[N, O]: each pair times its expert's matrix."""
        if self.bounds is None:
            return grouped_mm(x_NC, weight_ECO, offs=self.ends_E)
        return torch.cat([matmul(x_NC[first:end], weight_ECO[e], x_NC.dtype) for e, first, end in self.bounds])

    def add_matmul_(self, out_NO: Tensor, x_NC: Tensor, weight_ECO: Tensor, scale: float) -> None:
        """Add scale * matmul(x, weight)."""
        if self.bounds is None:
            out_NO.add_(grouped_mm(x_NC, weight_ECO, offs=self.ends_E), alpha=scale)
            return
        for expert, first, end in self.bounds:
            add_matmul_(out_NO[first:end], x_NC[first:end], weight_ECO[expert], scale)

    def add_outer_(self, out_ECO: Tensor, x_NC: Tensor, y_NO: Tensor, scale: float) -> None:
        """Add scale * x^T y over each expert's own pairs."""
        if self.bounds is None:
            out_ECO.add_(grouped_mm(x_NC.t(), y_NO, offs=self.ends_E), alpha=scale)
            return
        for expert, first, end in self.bounds:
            add_matmul_(out_ECO[expert], x_NC[first:end].t(), y_NO[first:end], scale)


class PairOrder(NamedTuple):
    """A permutation that sorts pairs."""

    pair_N: Tensor  # the unsorted pair (row * k + choice) of each sorted one
    sorted_N: Tensor  # the sorted index of each unsorted pair

    @classmethod
    def by(cls, key_N: Tensor) -> PairOrder:
        pair_N = torch.argsort(key_N, stable=True)
        numbers_N = torch.arange(len(pair_N), device=pair_N.device)
        return cls(pair_N, torch.empty_like(pair_N).index_copy_(0, pair_N, numbers_N))

    def to(self, other: PairOrder) -> Tensor | None:
        """For each pair of the other order, its index in this one. None: the orders are the same."""
        return None if self is other else self.sorted_N.index_select(0, other.pair_N)


class _Part(NamedTuple):
    """A segment with an adapter: its rows, its pairs in the order by segment, and their groups."""

    adapter: Adapter
    rows: slice
    pairs: slice
    row_m: Tensor  # row of each pair, relative to the segment
    sorted_m: Tensor  # sorted index of each unsorted pair, relative to the segment
    groups: _PairGroups

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start

    def combine(self, x_mC: Tensor) -> Tensor:
        """[n, C]: the sum over each row's pairs, in the order of its choices."""
        return x_mC.index_select(0, self.sorted_m).view(self.num_rows, -1, x_mC.shape[-1]).sum(1)


class _Dispatch(NamedTuple):
    """How rows become pairs: sorted by expert for the base model, by segment and then by expert for adapters."""

    num_choices: int
    experts: PairOrder
    expert_N: Tensor
    groups: _PairGroups
    segments: PairOrder
    to_experts: Tensor | None
    to_segments: Tensor | None
    parts: list[_Part]

    def rows_by_expert(self, x_TC: Tensor) -> Tensor:
        return x_TC.index_select(0, self.experts.pair_N // self.num_choices)

    def combine(self, x_NC: Tensor) -> Tensor:
        """[T, C]: the sum over each row's pairs, which are sorted by expert, in the order of its choices."""
        return x_NC.index_select(0, self.experts.sorted_N).view(-1, self.num_choices, x_NC.shape[-1]).sum(1)

    def by_segment(self, x_NC: Tensor) -> Tensor:
        return x_NC if self.to_segments is None else x_NC.index_select(0, self.to_segments)

    def by_expert(self, x_NC: Tensor) -> Tensor:
        return x_NC if self.to_experts is None else x_NC.index_select(0, self.to_experts)


def is_experts(module: nn.Module) -> bool:
    """Whether this is one of transformers' modules of fused experts."""
    return hasattr(module, "is_concatenated") and hasattr(module, "is_transposed")


class MultiLoRAExperts(nn.Module):
    """Keeps the module's own parameters under the same names. Calls the module itself if there is no LoRA batch."""

    down_proj: Tensor
    down_proj_bias: Tensor

    def __init__(self, name: str, experts: nn.Module, context: ForwardContext) -> None:
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
        self.num_experts, *sizes = self.down_proj.shape
        self.inner_features, self.hidden_features = sizes if self.transposed else reversed(sizes)
        self.has_gate = bool(experts.has_gate)
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

    @property
    def module(self) -> nn.Module:
        """The model's own module."""
        return self._experts[0]

    @property
    def outer_proj(self) -> Tensor:
        """The matrix that reads the hidden states: gate and up, or only up."""
        return cast(Tensor, self.gate_up_proj if self.has_gate else self.up_proj)

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

    def forward(self, hidden_TD: Tensor, *choices: Tensor) -> Tensor:
        """[T, D]. `choices`: the experts of each row [T, k], and the router's weights of them."""
        lora_batch = self._context.lora_batch
        if lora_batch is None:
            return self.module(hidden_TD, *choices)
        index_Tk, weights_Tk = choices
        self._choices = index_Tk.shape[1]
        if isinstance(lora_batch, DeviceLoRABatch) and lora_batch.is_captured:
            return self.forward_captured(hidden_TD, index_Tk, weights_Tk, lora_batch)
        return self.forward_experts(hidden_TD, index_Tk, weights_Tk, lora_batch)

    def forward_experts(self, hidden_TD: Tensor, index_Tk: Tensor, weights_Tk: Tensor, lora_batch: LoRABatch) -> Tensor:
        """[T, D]: the weighted sum of each row's experts, with the adapters of this LoRA batch."""
        assert hidden_TD.shape == (lora_batch.num_rows, self.hidden_features)
        names = {target.name for target in self.targets}
        adapters = [s.adapter if s.adapter and not names.isdisjoint(s.adapter.compute) else None
                    for s in lora_batch.segments]  # fmt: skip
        call = _Call(
            self, _dispatch(index_Tk, lora_batch, adapters, self.num_experts, grouped=self._is_grouped(adapters))
        )
        if not torch.is_grad_enabled():
            return call.down(self.apply_gate(call.gate_up(hidden_TD)[0]), weights_Tk)[0]
        recorded = anchor(hidden_TD.device) if any(adapters) else None
        inner_NI = self.apply_gate(cast(Tensor, _GateUpFunction.apply(hidden_TD, recorded, call)))
        return cast(Tensor, _DownFunction.apply(inner_NI, weights_Tk, call))

    def forward_captured(
        self, hidden_TD: Tensor, index_Tk: Tensor, weights_Tk: Tensor, lora_batch: DeviceLoRABatch
    ) -> Tensor:
        """[T, D] of rows without gradients, in launches that depend on shapes alone. The grouped kernel must support
        the experts (`can_capture`).
        """
        from tinsmith.backends.torch import expert_decode_kernels as kernels

        pairs = kernels.sort_pairs(index_Tk, self.num_experts)
        groups, expert_N = _PairGroups(pairs.ends_E, None), pairs.index_nk.view(-1)
        transposed = self.transposed
        x_ND = hidden_TD.index_select(0, pairs.pair_N // index_Tk.shape[1])
        y_NG = groups.matmul(x_ND, self.outer_proj if transposed else self.outer_proj.mT)
        if self.has_bias:
            y_NG += self.outer_bias.index_select(0, expert_N.index_select(0, pairs.pair_N))
        tables = [
            (layout, blocks_B4, lora_batch.row_adapters(layout, blocks_B4))
            for layout, blocks_B4 in lora_batch.tables(hidden_TD.device)
        ]
        for layout, blocks_B4, rows_T2 in tables:
            if (parts_P5 := self._device_parts(layout, hidden_TD.device)[0]) is not None:
                u_PSTr = lora_kernels().shrink(hidden_TD, blocks_B4, parts_P5, layout.rank, BLOCK_ROWS)
                kernels.expand_pairs_(
                    y_NG, u_PSTr, rows_T2, pairs, parts_P5, self.inner_features, layout.rank, hidden_TD
                )
        inner_NI = self.apply_gate(y_NG)
        y_ND = groups.matmul(inner_NI, self.down_proj if transposed else self.down_proj.mT)
        if self.has_bias:
            y_ND += self.down_proj_bias.index_select(0, expert_N.index_select(0, pairs.pair_N))
        weighted_TkD = y_ND.index_select(0, pairs.place_N).view(*index_Tk.shape, -1) * weights_Tk[..., None]
        out_TD = weighted_TkD.sum(1).to(hidden_TD.dtype)
        for layout, blocks_B4, rows_T2 in tables:
            _, parts_15, tiles = self._device_parts(layout, hidden_TD.device)
            if parts_15 is not None and tiles is not None:
                u_1kTr = kernels.shrink_pairs(inner_NI, rows_T2, pairs, weights_Tk, parts_15, layout.rank)
                lora_kernels().expand_(out_TD, u_1kTr, blocks_B4, *tiles, layout.rank, BLOCK_ROWS, hidden_TD)
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
                a, b = spans[self.down_name]
                inner = upload(np.array([(a.start, b.start, 0, self.hidden_features, 1)], np.int64), device)
                tile_list = lora_kernels().list_tiles([self.hidden_features], rank)
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
        return "grouped_mm where ranks are multiples of 8" if self._is_grouped([]) else "loop over experts"

    def _is_grouped(self, adapters: Sequence[Adapter | None]) -> bool:
        """Whether the grouped kernel supports these matrices: each row must begin at a multiple of 16 bytes."""
        sizes = [self.hidden_features, self.inner_features, *(a.layout.rank for a in adapters if a is not None)]
        is_half = self.down_proj.dtype == torch.bfloat16
        return is_half and has_grouped_mm(self.down_proj.device) and all(size % 8 == 0 for size in sizes)


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
        if type(module).__name__ == "Llama4TextMoe":
            if module.top_k != 1:
                raise SettingsError(f"num_experts_per_tok is {module.top_k}; experts of Llama 4 are served with 1")
            module.forward = partial(_forward_weighted_inputs, module, module.forward, context)


def _forward_weighted_inputs(
    mixture: Any,  # noqa: ANN401
    forward: Callable[[Tensor], tuple[Tensor, Tensor]],
    context: ForwardContext,
    hidden: Tensor,
) -> tuple[Tensor, Tensor]:
    if context.lora_batch is None:
        return forward(hidden)
    hidden_TD = hidden.flatten(0, -2)
    scores_TE, logits_TE = mixture.router(hidden_TD)
    index_T1 = logits_TE.argmax(-1, keepdim=True)
    weight_T1 = scores_TE.gather(1, index_T1)
    routed_TD = mixture.experts(hidden_TD * weight_T1, index_T1, torch.ones_like(weight_T1))
    return mixture.shared_expert(hidden_TD) + routed_TD, logits_TE


class _Call:
    """One call of a module of experts: its rows, their dispatch, and the adapters' parts."""

    def __init__(self, experts: MultiLoRAExperts, dispatch: _Dispatch) -> None:
        self._experts = experts
        self._dispatch = dispatch

    def gate_up(self, hidden_TD: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
        """[N, G] before the gate, by segment, and for w1 and w3 the x A^T [n, r] of each part that has it."""
        dispatch, experts = self._dispatch, self._experts
        y_NG = self._expert_matmul(dispatch.rows_by_expert(hidden_TD), experts.outer_proj)
        if experts.has_bias:
            y_NG += self._bias(experts.outer_bias)
        y_NG = dispatch.by_segment(y_NG)
        a_outputs = []
        for name, columns in experts.columns.items():
            a_outputs.append([])
            for part in self._parts(name):
                (a_1rI, b_EIr), x_nD = part.adapter.compute[name], hidden_TD[part.rows]
                a_outputs[-1].append(matmul(x_nD, a_1rI[0].t(), x_nD.dtype))
                u_mr = a_outputs[-1][-1].index_select(0, part.row_m)
                part.groups.add_matmul_(y_NG[part.pairs, columns], u_mr, b_EIr.mT, part.adapter.scale)
        return y_NG, a_outputs

    def gate_up_backward(
        self, grad_NG: Tensor, hidden_TD: Tensor, a_outputs: Sequence[Sequence[Tensor]], *, need_input: bool
    ) -> Tensor | None:
        """The gradient of the rows, if needed; adds those of A and B to their adapters."""
        dispatch, experts, grad_TD = self._dispatch, self._experts, None
        if need_input:
            grad_TD = dispatch.combine(self._expert_matmul(dispatch.by_expert(grad_NG), experts.outer_proj, back=True))
        for (name, columns), outputs_nr in zip(experts.columns.items(), a_outputs, strict=True):
            for part, u_nr in zip(self._parts(name), outputs_nr, strict=True):
                adapter, rows = part.adapter, part.rows
                (a_1rI, b_EIr), grad_mI = adapter.compute[name], grad_NG[part.pairs, columns].contiguous()
                grad_nr = part.combine(part.groups.matmul(grad_mI, b_EIr))
                if adapter.gradients is not None:
                    grad_a_1rI, grad_b_EIr = adapter.gradients[name]
                    part.groups.add_outer_(grad_b_EIr, grad_mI, u_nr.index_select(0, part.row_m), adapter.scale)
                    add_matmul_(grad_a_1rI[0], grad_nr.t(), hidden_TD[rows], adapter.scale)
                if grad_TD is not None:
                    add_matmul_(grad_TD[rows], grad_nr, a_1rI[0], adapter.scale)
        return grad_TD

    def down(self, inner_NI: Tensor, weights_Tk: Tensor) -> tuple[Tensor, list[Tensor]]:
        """[T, D], and each part's combined, weighted x A^T [n, r]."""
        dispatch, experts = self._dispatch, self._experts
        y_ND = self._expert_matmul(dispatch.by_expert(inner_NI), experts.down_proj)
        if experts.has_bias:
            y_ND += self._bias(experts.down_proj_bias)
        out_TD = dispatch.combine(y_ND * _sort_weights(weights_Tk, dispatch.experts)).to(inner_NI.dtype)
        weight_N1, sums = _sort_weights(weights_Tk, dispatch.segments), []
        for part in self._parts(experts.down_name):
            a_ErI, b_1Or = part.adapter.compute[experts.down_name]
            v_mr = part.groups.matmul(inner_NI[part.pairs], a_ErI.mT)
            sums.append(part.combine((v_mr * weight_N1[part.pairs]).to(v_mr.dtype)))
            add_matmul_(out_TD[part.rows], sums[-1], b_1Or[0].t(), part.adapter.scale)
        return out_TD, sums

    def down_backward(
        self, grad_TD: Tensor, inner_NI: Tensor, weights_Tk: Tensor, sums: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the inner rows [N, I] and of the router's weights [T, k]."""
        dispatch, experts, name = self._dispatch, self._experts, self._experts.down_name
        weight_N1, grad_ND = _sort_weights(weights_Tk, dispatch.segments), dispatch.rows_by_expert(grad_TD)
        # Before the router's weight is applied, so that one matmul serves both gradients.
        grad_NI = dispatch.by_segment(self._expert_matmul(grad_ND, experts.down_proj, back=True))
        for part, sums_nr in zip(self._parts(name), sums, strict=True):
            adapter, pairs, grad_nD = part.adapter, part.pairs, grad_TD[part.rows]
            a_ErI, b_1Or = adapter.compute[name]
            grad_mr = matmul(grad_nD, b_1Or[0], grad_nD.dtype).index_select(0, part.row_m)
            part.groups.add_matmul_(grad_NI[pairs], grad_mr, a_ErI, adapter.scale)
            if adapter.gradients is not None:
                grad_a_ErI, grad_b_1Or = adapter.gradients[name]
                weighted_mr = (grad_mr * weight_N1[pairs]).to(grad_mr.dtype)
                part.groups.add_outer_(grad_a_ErI, weighted_mr, inner_NI[pairs], adapter.scale)
                add_matmul_(grad_b_1Or[0].t(), sums_nr.t(), grad_nD, adapter.scale)
        grad_weight_N = (grad_NI * inner_NI).sum(-1)
        if experts.has_bias:
            grad_weight_N += dispatch.by_segment((grad_ND * self._bias(experts.down_proj_bias)).sum(-1))
        grad_weight_N = grad_weight_N.index_select(0, dispatch.segments.sorted_N)
        return (grad_NI * weight_N1).to(inner_NI.dtype), grad_weight_N.view(weights_Tk.shape).to(weights_Tk.dtype)

    def _parts(self, name: str) -> list[_Part]:
        """The segments whose adapters have this projection."""
        return [part for part in self._dispatch.parts if name in part.adapter.compute]

    def _bias(self, bias_EO: Tensor) -> Tensor:
        """[N, O], by expert."""
        return bias_EO.index_select(0, self._dispatch.expert_N)

    def _expert_matmul(self, x_NC: Tensor, weight_E: Tensor, *, back: bool = False) -> Tensor:
        """Each expert's pairs times its matrix, or in backward (`back`) times its transpose."""
        return self._dispatch.groups.matmul(x_NC, weight_E.mT if self._experts.transposed == back else weight_E)


def _sort_weights(weights_Tk: Tensor, order: PairOrder) -> Tensor:
    """[N, 1]: the router's weight of each pair."""
    return weights_Tk.reshape(-1, 1).index_select(0, order.pair_N)


class _GateUpFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, anchor: Tensor | None, call: _Call) -> Tensor:
        y, ctx.a_outputs = call.gate_up(hidden)
        ctx.save_for_backward(hidden)
        ctx.call = call
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (hidden,) = ctx.saved_tensors
        return ctx.call.gate_up_backward(grad, hidden, ctx.a_outputs, need_input=ctx.needs_input_grad[0]), None, None


class _DownFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inner: Tensor, weights: Tensor, call: _Call) -> Tensor:
        y, ctx.sums = call.down(inner, weights)
        ctx.save_for_backward(inner, weights)
        ctx.call = call
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inner, weights = ctx.saved_tensors
        return *ctx.call.down_backward(grad, inner, weights, ctx.sums), None


def _dispatch(
    index_Tk: Tensor, lora_batch: LoRABatch, adapters: Sequence[Adapter | None], num_experts: int, *, grouped: bool
) -> _Dispatch:
    """Sort the pairs. Reads group sizes from the device unless the grouped kernel is used."""
    device, num_choices = index_Tk.device, index_Tk.shape[1]
    expert_N, numbers_E = index_Tk.reshape(-1), torch.arange(num_experts, device=device)
    experts = segments = PairOrder.by(expert_N)
    ends = [_group_ends(expert_N, experts, numbers_E)]
    if len(lora_batch.segments) > 1:
        sizes = [num_choices * (stop - start) for start, stop, _ in lora_batch.segments]
        segment_N = upload(np.repeat(np.arange(len(sizes)), sizes), device)
        key_N, numbers_K = expert_N + num_experts * segment_N, torch.arange(num_experts * len(sizes), device=device)
        segments = PairOrder.by(key_N)
        ends.append(_group_ends(key_N, segments, numbers_K))
    on_host = [None] * len(ends) if grouped else read(*ends)
    parts = []
    for index, ((start, stop, _), adapter) in enumerate(zip(lora_batch.segments, adapters, strict=True)):
        if adapter is not None:
            pairs = slice(start * num_choices, stop * num_choices)
            row_m, sorted_m = segments.pair_N[pairs] // num_choices - start, segments.sorted_N[pairs] - pairs.start
            span = slice(index * num_experts, (index + 1) * num_experts)
            groups = _build_groups(ends[-1][span], None if on_host[-1] is None else on_host[-1][span], pairs.start)
            parts.append(_Part(adapter, slice(start, stop), pairs, row_m, sorted_m, groups))
    groups, expert_N = _build_groups(ends[0], on_host[0], 0), expert_N.index_select(0, experts.pair_N)
    conversions = segments.to(experts), experts.to(segments)
    return _Dispatch(num_choices, experts, expert_N, groups, segments, *conversions, parts)


def _build_groups(ends_E: Tensor, on_host_E: npt.NDArray[np.int32] | None, first: int) -> _PairGroups:
    """Groups of pairs that begin at `first`."""
    if on_host_E is None:
        return _PairGroups(ends_E - first, None)
    spans = pairwise([0, *(on_host_E - first).tolist()])
    return _PairGroups(ends_E, [(expert, start, stop) for expert, (start, stop) in enumerate(spans) if stop > start])


def _group_ends(key_N: Tensor, order: PairOrder, numbers_K: Tensor) -> Tensor:
    """[K] int32: where the pairs of each key end."""
    return torch.searchsorted(key_N.index_select(0, order.pair_N), numbers_K, right=True, out_int32=True)
