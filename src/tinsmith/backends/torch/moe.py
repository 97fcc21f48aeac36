"""Adapters on the routed experts of a mixture: many adapters, many experts, one packed row.

Stands in for a model's own module of fused experts (transformers' `use_experts_implementation` families). Each row
has chosen k experts; its k pairs of (row, expert) are sorted by expert and, within one, by the segment of the row, so
that an expert's weights are read once for all of its rows, and each adapter meets only rows of its own segments. The
router is not adapted, and its probabilities carry gradients to the rows below.

An adapter's matrices are what Tinker's are (docs/decisions.md): on the side of the hidden states all experts share
one. `w1` (gate) and `w3` (up) have one A and a B for each expert, `w2` (down) an A for each and one B. So A of w1 and
w3 is applied before the rows are spread over the experts, and B of w2 after their results are summed.

Gradients go into the adapters' own buffers, as those of `lora.MultiLoRALinear` do. Knows no loss, optimizer, file or
tenant.

Shapes: T rows, k experts of each, N = T * k pairs, E experts, D hidden size, I inner size, G = 2 * I, r rank, n rows
or pairs of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tinsmith.backends.torch.adapters import Adapter, Bank, Target
from tinsmith.backends.torch.lora import Switchboard, anchor
from tinsmith.backends.torch.lora_ops import Routing
from tinsmith.backends.torch.products import add_product_, product
from tinsmith.errors import SettingsError

GATE, UP, DOWN = "w1", "w3", "w2"


class _Part(NamedTuple):
    """Pairs start..stop are of one expert and one segment; `rows_n` are their rows, counted within the segment."""

    expert: int
    segment: int
    start: int
    stop: int
    rows_n: Tensor


class _Spread(NamedTuple):
    """How rows become pairs sorted by expert, and back."""

    row_N: Tensor  # of each sorted pair
    order_N: Tensor  # the unsorted pair (row * k + choice) of each sorted one
    place_N: Tensor  # where each unsorted pair went
    expert_N: Tensor
    experts: list[tuple[int, int, int]]  # expert, first and last + 1 of its pairs
    parts: list[_Part]  # those whose segment has an adapter

    def gather(self, x_NC: Tensor, num_rows: int) -> Tensor:
        """[T, C]: the sum of each row's pairs, in the order of its choices."""
        return x_NC.index_select(0, self.place_N).view(num_rows, -1, x_NC.shape[-1]).sum(1)


def is_experts(module: nn.Module) -> bool:
    """Whether this is a module of fused experts as transformers writes them."""
    return hasattr(module, "is_concatenated") and hasattr(module, "is_transposed")


class MultiLoRAExperts(nn.Module):
    """Keeps the module's own parameters under the same names. Without a routing the module itself is called."""

    gate_up_proj: Tensor
    gate_up_proj_bias: Tensor
    down_proj: Tensor
    down_proj_bias: Tensor

    def __init__(self, name: str, experts: nn.Module, switchboard: Switchboard) -> None:
        super().__init__()
        if not experts.has_gate or experts.has_post_expert_norm:
            kind = "a norm after each expert" if experts.has_gate else "experts without a gate"
            raise SettingsError(f"{type(experts).__name__} has {kind}, which cannot carry adapters here")
        self.name = name
        for parameter_name, parameter in experts.named_parameters(recurse=False):
            self.register_parameter(parameter_name, parameter)
        self._experts = (experts,)  # no submodule: its parameters would have two names
        self.has_bias = bool(experts.has_bias)
        self.transposed = bool(experts.is_transposed)
        self.num_experts, *sizes = self.down_proj.shape
        self.inner_features, self.hidden_features = sizes if self.transposed else reversed(sizes)
        self._interleaved = not experts.is_concatenated
        gate, up = slice(0, self.inner_features), slice(self.inner_features, None)
        if self._interleaved:
            gate, up = slice(0, None, 2), slice(1, None, 2)
        self.columns = {f"{name}.{GATE}": gate, f"{name}.{UP}": up}
        self.down_name = f"{name}.{DOWN}"
        self._choices = 1
        self._switchboard = switchboard

    @property
    def targets(self) -> list[Target]:
        outer, inner = self.hidden_features, self.inner_features
        spread, shared = (Bank(self.num_experts, common, self._interleaved) for common in ("A", "B"))
        return [
            Target(f"{self.name}.{GATE}", "mlp", outer, inner, spread),
            Target(f"{self.name}.{UP}", "mlp", outer, inner, spread),
            Target(self.down_name, "mlp", inner, outer, shared),
        ]

    @property
    def features_per_row(self) -> int:
        """Inputs and outputs of the linears that a row meets in its experts, as many as the last rows chose."""
        return self._choices * (2 * self.hidden_features + 3 * self.inner_features)

    def forward(self, hidden_TD: Tensor, index_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        routing = self._switchboard.routing
        if routing is None:
            return self._experts[0](hidden_TD, index_Tk, weights_Tk)
        self._choices = index_Tk.shape[1]
        assert hidden_TD.shape == (routing.num_rows, self.hidden_features)
        names = {target.name for target in self.targets}
        adapters = [s.adapter if s.adapter and not names.isdisjoint(s.adapter.compute) else None
                    for s in routing.segments]  # fmt: skip
        call = _Call(self, routing, adapters, _spread(index_Tk, routing, adapters))
        apply_gate = cast(Callable[[Tensor], Tensor], self._experts[0]._apply_gate)
        if not torch.is_grad_enabled():
            return call.down(apply_gate(call.gate_up(hidden_TD)[0]), weights_Tk)[0]
        recorded = anchor(hidden_TD.device) if any(adapters) else None
        inner_NI = apply_gate(cast(Tensor, _GateUpFunction.apply(hidden_TD, recorded, call)))
        return cast(Tensor, _DownFunction.apply(inner_NI, weights_Tk, call))


class _Call:
    """One call of a module of experts: its rows, spread, and what each part's adapter does to them."""

    def __init__(
        self, experts: MultiLoRAExperts, routing: Routing, adapters: Sequence[Adapter | None], spread: _Spread
    ) -> None:
        self._experts = experts
        self._slices = [slice(segment.start, segment.stop) for segment in routing.segments]
        self._adapters = adapters
        self._spread = spread
        self._num_rows = routing.num_rows

    def gate_up(self, hidden_TD: Tensor) -> tuple[Tensor, list[dict[int, Tensor]]]:
        """[N, G] before the gate, and for w1 and w3 each segment's x A^T [n, r]."""
        spread, experts = self._spread, self._experts
        y_NG = self._products(hidden_TD.index_select(0, spread.row_N), experts.gate_up_proj)
        if experts.has_bias:
            y_NG += experts.gate_up_proj_bias.index_select(0, spread.expert_N)
        inner = []
        for name, columns in experts.columns.items():
            inner.append({})
            for segment, adapter in self._carriers(name):
                x_nD = hidden_TD[self._slices[segment]]
                inner[-1][segment] = product(x_nD, adapter.compute[name][0][0].t(), x_nD.dtype)
            for part, adapter in self._parts(name):
                u_nr, b_Ir = inner[-1][part.segment][part.rows_n], adapter.compute[name][1][part.expert]
                add_product_(y_NG[part.start : part.stop, columns], u_nr, b_Ir.t(), adapter.scale)
        return y_NG, inner

    def gate_up_backward(
        self, grad_NG: Tensor, hidden_TD: Tensor, inner: Sequence[dict[int, Tensor]], *, need_input: bool
    ) -> Tensor | None:
        """The gradient of the rows, if needed; those of A and B go to their adapters."""
        grad_TD = None
        if need_input:
            grad_TD = self._spread.gather(
                self._products(grad_NG, self._experts.gate_up_proj, back=True), self._num_rows
            )
        for (name, columns), inner_nr in zip(self._experts.columns.items(), inner, strict=True):
            grads = {segment: torch.zeros_like(u_nr) for segment, u_nr in inner_nr.items()}
            for part, adapter in self._parts(name):
                grad_nI = grad_NG[part.start : part.stop, columns]
                b_Ir = adapter.compute[name][1][part.expert]
                grads[part.segment].index_add_(0, part.rows_n, product(grad_nI, b_Ir, grad_nI.dtype))
                if adapter.gradients is not None:
                    u_nr = inner_nr[part.segment][part.rows_n]
                    add_product_(adapter.gradients[name][1][part.expert].t(), u_nr.t(), grad_nI, adapter.scale)
            for segment, adapter in self._carriers(name):
                rows = self._slices[segment]
                if adapter.gradients is not None:
                    add_product_(adapter.gradients[name][0][0], grads[segment].t(), hidden_TD[rows], adapter.scale)
                if grad_TD is not None:
                    add_product_(grad_TD[rows], grads[segment], adapter.compute[name][0][0], adapter.scale)
        return grad_TD

    def down(self, inner_NI: Tensor, weights_Tk: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """[T, D], and each segment's sums of weighted x A^T [n, r]."""
        spread, experts = self._spread, self._experts
        y_ND = self._products(inner_NI, experts.down_proj)
        if experts.has_bias:
            y_ND += experts.down_proj_bias.index_select(0, spread.expert_N)
        weight_N1 = weights_Tk.reshape(-1, 1).index_select(0, spread.order_N)
        out_TD = spread.gather(y_ND * weight_N1, self._num_rows).to(inner_NI.dtype)
        name = experts.down_name
        sums = {
            segment: inner_NI.new_zeros(self._slices[segment].stop - self._slices[segment].start, adapter.layout.rank)
            for segment, adapter in self._carriers(name)
        }
        for part, adapter in self._parts(name):
            rows = slice(part.start, part.stop)
            v_nr = product(inner_NI[rows], adapter.compute[name][0][part.expert].t(), inner_NI.dtype)
            sums[part.segment].index_add_(0, part.rows_n, (v_nr * weight_N1[rows]).to(v_nr.dtype))
        for segment, adapter in self._carriers(name):
            add_product_(out_TD[self._slices[segment]], sums[segment], adapter.compute[name][1][0].t(), adapter.scale)
        return out_TD, sums

    def down_backward(
        self, grad_TD: Tensor, inner_NI: Tensor, weights_Tk: Tensor, sums: dict[int, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the inner rows [N, I] and of the router's weights [T, k]."""
        spread, experts, name = self._spread, self._experts, self._experts.down_name
        weight_N1 = weights_Tk.reshape(-1, 1).index_select(0, spread.order_N)
        grad_ND = grad_TD.index_select(0, spread.row_N)
        # Before the router's weight, so that one product serves both gradients.
        grad_NI = self._products(grad_ND, experts.down_proj, back=True)
        grads = {}
        for segment, adapter in self._carriers(name):
            grad_nD = grad_TD[self._slices[segment]]
            grads[segment] = product(grad_nD, adapter.compute[name][1][0], grad_nD.dtype)
            if adapter.gradients is not None:
                add_product_(adapter.gradients[name][1][0].t(), sums[segment].t(), grad_nD, adapter.scale)
        for part, adapter in self._parts(name):
            rows = slice(part.start, part.stop)
            grad_nr = grads[part.segment][part.rows_n]
            add_product_(grad_NI[rows], grad_nr, adapter.compute[name][0][part.expert], adapter.scale)
            if adapter.gradients is not None:
                weighted_nr = (grad_nr * weight_N1[rows]).to(grad_nr.dtype)
                add_product_(adapter.gradients[name][0][part.expert], weighted_nr.t(), inner_NI[rows], adapter.scale)
        grad_weight_N = (grad_NI * inner_NI).sum(-1)
        if experts.has_bias:
            grad_weight_N += (grad_ND * experts.down_proj_bias.index_select(0, spread.expert_N)).sum(-1)
        grad_weights_Tk = grad_weight_N.index_select(0, spread.place_N).view(weights_Tk.shape).to(weights_Tk.dtype)
        return (grad_NI * weight_N1).to(inner_NI.dtype), grad_weights_Tk

    def _carriers(self, name: str) -> list[tuple[int, Adapter]]:
        """The segments whose adapter has this projection."""
        return [(i, a) for i, a in enumerate(self._adapters) if a is not None and name in a.compute]

    def _parts(self, name: str) -> list[tuple[_Part, Adapter]]:
        carriers = dict(self._carriers(name))
        return [(part, carriers[part.segment]) for part in self._spread.parts if part.segment in carriers]

    def _products(self, x_NC: Tensor, weight_E: Tensor, *, back: bool = False) -> Tensor:
        """Each expert's pairs times its own matrix, or, going back, times its transpose."""
        turned = self._experts.transposed == back
        return torch.cat(
            [
                product(x_NC[start:stop], weight_E[expert].t() if turned else weight_E[expert], x_NC.dtype)
                for expert, start, stop in self._spread.experts
            ]
        )


class _GateUpFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, anchor: Tensor | None, call: _Call) -> Tensor:
        y, ctx.inner = call.gate_up(hidden)
        ctx.save_for_backward(hidden)
        ctx.call = call
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (hidden,) = ctx.saved_tensors
        return ctx.call.gate_up_backward(grad, hidden, ctx.inner, need_input=ctx.needs_input_grad[0]), None, None


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


def _spread(index_Tk: Tensor, routing: Routing, adapters: Sequence[Adapter | None]) -> _Spread:
    device = index_Tk.device
    expert_M = index_Tk.reshape(-1).cpu().numpy()
    order_N = np.argsort(expert_M, kind="stable")
    expert_N, row_N = expert_M[order_N], order_N // index_Tk.shape[1]
    place_N = np.empty_like(order_N)
    place_N[order_N] = np.arange(len(order_N))
    first_S = np.array([segment.start for segment in routing.segments])
    segment_N = np.searchsorted(first_S, row_N, side="right") - 1
    own_N = torch.from_numpy(row_N - first_S[segment_N]).to(device)
    next_expert_N = np.diff(expert_N) != 0
    parts = [
        _Part(int(expert_N[start]), int(segment_N[start]), start, stop, own_N[start:stop])
        for start, stop in _runs(next_expert_N | (np.diff(segment_N) != 0))
        if adapters[segment_N[start]] is not None
    ]
    row, order, place, expert = (torch.from_numpy(a).to(device) for a in (row_N, order_N, place_N, expert_N))
    experts = [(int(expert_N[start]), start, stop) for start, stop in _runs(next_expert_N)]
    return _Spread(row, order, place, expert, experts, parts)


def _runs(changes: np.ndarray) -> list[tuple[int, int]]:
    """First and last + 1 of each run; `changes` says whether the next one is of another."""
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(changes) + 1]
    return list(pairwise(bounds))
