"""LoRA adapters over frozen linears: rows of a packed batch, each segment with its own adapter.

A `LoRABatch` says which rows have which adapter. A `LoRADelta` computes the low-rank matmuls of one linear, or of
several that read the same rows and whose outputs are concatenated, such as queries, keys and values: their A's are one
matrix where an adapter's layout has them adjacent. A `LoRALinear` is such a linear with its deltas, forward and
backward; `MultiLoRALinear` replaces a module.

Rows meet only the matrices of their own adapter, so a non-finite number in one adapter never reaches another: some
segments of similar length are one batched matmul, whose batch entries are independent; all others are matmuls of
their own. Gradients of A and B are added directly to the adapter's float32 buffers during backward; adapters are no
autograd leaves. Knows no loss, optimizer, file or tenant.

Shapes: T rows of a packed batch, n rows of a segment, S segments of a group, I inputs, O outputs, r rank, R rows of A
in a LoRADelta (r for each of its linears that the adapter has).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tinsmith.backends.torch.adapters import (
    Adapter,
    DeltaMatrices,
    Layout,
    LinearB,
    LinearPart,
    StackedA,
    Target,
    extend_rows,
)
from tinsmith.backends.torch.attention import AttentionPlan
from tinsmith.backends.torch.frozen_weights import WeightCodes
from tinsmith.backends.torch.host import upload
from tinsmith.backends.torch.lora_batch import (
    BLOCK_ROWS,
    AdapterGroup,
    LoRABatch,
    PackedMatrices,
    Segment,
    Stacks,
    list_row_blocks,
)
from tinsmith.backends.torch.matmul import (
    add_bmm_,
    add_matmul_,
    gradient_dtype,
    has_onednn,
    is_launch_bound,
    matmul,
    onednn_linear,
    pack_weight,
    transpose_bmm,
    transpose_matmul,
    write_matmul_,
)

BATCHED_MAX_ROWS = 128
"""Neighbouring segments of at most this many rows are batched if their layouts are equal and their lengths similar.
Longer ones gain nothing on a CPU; those of an `AdapterStack` are batched at any length.
"""

PADDED_MAX_ELEMENTS = 1 << 21
"""The most elements of a segment's input in an `AdapterStack` with which a group with padding is batched: padding
copies all rows, and matmuls one by one take more launches.
"""

BATCHED_MAX_ELEMENTS = 1 << 15
"""Float32 segments are batched only if no matrix has more elements: larger matmuls are fast enough one by one, and a
batched one needs copies of all matrices in one stack. In bfloat16 a batched matmul is faster at any size.
"""


MAX_STACKS, MAX_STACK_BYTES = 4, 2**28
"""Stacks that sampling keeps from step to step for each LoRADelta, and the most adapter bytes of a stack."""

PACKED_MAX_ROWS = 32
"""In sampling, up to this many rows of one adapter take its A's and B's as one packed matrix each, cached as stacks
are.
"""


class DeviceLoRABatch(LoRABatch):
    """A LoRA batch of rows without gradients on a GPU: two launches for each linear, whatever the adapters.

    `tables`, or else the segments: for each layout of adapters, its blocks of rows as `lora_kernels.add_deltas_` takes
    them. A CUDA graph's are filled anew for each run; its segments name no adapters.
    """

    __slots__ = ("_row_adapters", "_tables", "is_captured")

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        repeats: bool = False,
        tables: Sequence[tuple[Layout, Tensor]] | None = None,
    ) -> None:
        super().__init__(segments, repeats=repeats)
        self._tables = tables
        self._row_adapters: dict[int, Tensor] = {}  # by the id of a layout
        self.is_captured = tables is not None
        """Whether launches may depend on shapes alone, since a graph holds them."""

    def tables(self, device: torch.device) -> Sequence[tuple[Layout, Tensor]]:
        """Each layout with its blocks of rows [B, 4]."""
        if self._tables is None:
            self._tables = self._upload_row_blocks(device)
        return self._tables

    def row_adapters(self, layout: Layout, blocks_B4: Tensor) -> Tensor:
        """[T, 2] int64: the address of the matrices of each row's adapter, and its scale's float32 bits; 0 for rows
        without an adapter of this layout.
        """
        if (rows_T2 := self._row_adapters.get(id(layout))) is None:
            cell_R = torch.arange(BLOCK_ROWS, device=blocks_B4.device)
            is_row_BR = cell_R < blocks_B4[:, 2:3]
            row_BR = torch.where(is_row_BR, blocks_B4[:, 1:2] + cell_R, self.num_rows)  # one row more than there are
            values_BR2 = blocks_B4[:, None, ::3].expand(-1, BLOCK_ROWS, -1)
            rows_T2 = blocks_B4.new_zeros(self.num_rows + 1, 2)
            rows_T2.index_copy_(0, row_BR.flatten(), values_BR2.flatten(0, 1))
            self._row_adapters[id(layout)] = rows_T2
        return rows_T2

    def add_deltas_(self, delta: LoRADelta, y_TO: Tensor, x_TI: Tensor) -> None:
        """Add the adapters' deltas to y, which may have a wider dtype than x."""
        for layout, blocks_B4 in self.tables(x_TI.device):
            if (tables := delta.device_tables(layout, x_TI.device)) is not None:
                from tinsmith.backends.torch.lora_kernels import add_deltas_

                add_deltas_(y_TO, x_TI, blocks_B4, *tables, layout.rank, BLOCK_ROWS)

    def list_layouts(self) -> list[Layout]:
        """The adapters' layouts, each once."""
        return list({id(s.layout): s.layout for s in self.segments if s.layout is not None}.values())

    def list_row_blocks(self, layout: Layout) -> list[tuple[int, int, int, int]]:
        """The blocks of rows whose adapters have this layout."""
        return [block for segment in self.segments if segment.layout is layout for block in list_row_blocks(segment)]

    def _upload_row_blocks(self, device: torch.device) -> list[tuple[Layout, Tensor]]:
        layouts = self.list_layouts()
        blocks_by_layout = [self.list_row_blocks(layout) for layout in layouts]
        if not blocks_by_layout:
            return []
        blocks_B4 = upload(np.array([block for blocks in blocks_by_layout for block in blocks], np.int64), device)
        return list(zip(layouts, blocks_B4.split([len(blocks) for blocks in blocks_by_layout]), strict=True))


class LoRADelta:
    """The low-rank outputs of linears that read the same rows and whose outputs are concatenated."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._names = tuple(target.name for target in targets)
        self._in_features = targets[0].in_features
        ends = accumulate((target.out_features for target in targets), initial=0)
        self._columns = [slice(*span) for span in pairwise(ends)]
        self._stack_cache: OrderedDict[tuple[int, ...], Stacks | PackedMatrices | None] = OrderedDict()
        self._device_tables: dict[int, tuple[Layout, tuple[Tensor, Tensor] | None]] = {}

    def device_tables(self, layout: Layout, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """`parts_P4` and `tiles_C2` of `lora_kernels.add_deltas_`; None if the layout has none of these linears."""
        if id(layout) not in self._device_tables:
            self._device_tables[id(layout)] = layout, self._make_device_tables(layout, device)
        return self._device_tables[id(layout)][1]

    def _make_device_tables(self, layout: Layout, device: torch.device) -> tuple[Tensor, Tensor] | None:
        from tinsmith.backends.torch.lora_kernels import list_tiles

        named_columns = zip(self._names, self._columns, strict=True)
        part_spans = [(*layout.spans[name], columns) for name, columns in named_columns if name in layout.spans]
        if not part_spans:
            return None
        outputs = [columns.stop - columns.start for *_, columns in part_spans]
        parts = [
            (a.start, b.start, columns.start, out) for (a, b, columns), out in zip(part_spans, outputs, strict=True)
        ]
        tables = parts, list_tiles(outputs, layout.rank)
        parts_P4, tiles_C2 = (upload(np.array(table, np.int64), device) for table in tables)
        return parts_P4, tiles_C2

    def groups(self, lora_batch: LoRABatch) -> list[AdapterGroup]:
        """The groups whose adapters have any of these linears; short segments stay batched where that is faster."""
        if (cached_groups := lora_batch.groups_by_delta.get(self)) is not None:
            return cached_groups
        adapter_groups = lora_batch.groups_by_delta[self] = []
        for group in lora_batch.adapter_groups:
            if group.adapters[0].compute.keys().isdisjoint(self._names):
                continue
            is_whole = len(group.adapters) == 1 or self._is_batched(group, repeats=lora_batch.repeats)
            adapter_groups += [group] if is_whole else group.split()
        if lora_batch.repeats:
            for group in adapter_groups:
                if _is_packed(group):
                    group.stacks[self] = self._cache_stacks(group, self._pack_matrices)
        return adapter_groups

    def shrink(self, x_TI: Tensor, adapter_groups: Sequence[AdapterGroup]) -> list[Tensor]:
        """Each group's scale * x A^T, [n, R] or [S, n, R]."""
        return [self._shrink_group(x_TI, group) for group in adapter_groups]

    def _shrink_group(self, x_TI: Tensor, group: AdapterGroup) -> Tensor:
        if _is_in_place(x_TI, group):
            return _shrink_in_place(x_TI, group, self._stacks(group))
        return (self._shrink_single if len(group.adapters) == 1 else self._shrink_batched)(x_TI, group)

    def forward_(self, y_TO: Tensor, x_TI: Tensor, adapter_groups: Sequence[AdapterGroup]) -> list[Tensor]:
        """Add to y; returns `a_outputs`, which backward needs."""
        a_outputs = []
        for group in adapter_groups:
            if _is_in_place(x_TI, group):
                a_outputs.append(_forward_in_place_(y_TO, x_TI, group, self._stacks(group)))
            else:
                forward_group_ = self._forward_single_ if len(group.adapters) == 1 else self._forward_batched_
                a_outputs.append(forward_group_(y_TO, x_TI, group))
        return a_outputs

    def backward_(
        self,
        grad_TI: Tensor | None,
        grad_TO: Tensor,
        x_TI: Tensor,
        adapter_groups: Sequence[AdapterGroup],
        a_outputs: Sequence[Tensor],
    ) -> None:
        """Add to the gradient of x, if given, and to the adapters' gradients where these exist."""
        for group, u in zip(adapter_groups, a_outputs, strict=True):
            if _is_in_place(x_TI, group):
                _backward_in_place_(grad_TI, grad_TO, x_TI, group, self._stacks(group), u)
            else:
                backward_group_ = self._backward_single_ if len(group.adapters) == 1 else self._backward_batched_
                backward_group_(grad_TI, grad_TO, x_TI, group, u)

    def _forward_single_(self, y_TO: Tensor, x_TI: Tensor, group: AdapterGroup) -> Tensor:
        (adapter,) = group.adapters
        if isinstance(joined := group.stacks.get(self), PackedMatrices):
            u_nR = onednn_linear(group.select_rows(x_TI), joined.a_RI)
            delta_nO = onednn_linear(u_nR, joined.b_OR)
            # Parts may cover fewer outputs than the linear has.
            group.select_rows(y_TO)[:, : delta_nO.shape[1]].add_(delta_nO)
            return u_nR
        u_nR, y_nO = self._shrink_single(x_TI, group), group.select_rows(y_TO)
        for _, columns, ranks, b_Or in self._matrices(adapter).linears_b:
            add_matmul_(y_nO[:, columns], u_nR[:, ranks], b_Or.t(), 1.0)
        return u_nR

    def _shrink_single(self, x_TI: Tensor, group: AdapterGroup) -> Tensor:
        (adapter,), x_nI = group.adapters, group.select_rows(x_TI)
        stacked_a = self._matrices(adapter).stacked_a
        return _concat_columns([matmul(x_nI, part.a_RI.t(), x_TI.dtype) for part in stacked_a], adapter.scale)

    def _backward_single_(
        self, grad_TI: Tensor | None, grad_TO: Tensor, x_TI: Tensor, group: AdapterGroup, u_nR: Tensor
    ) -> None:
        (adapter,), grad_nO = group.adapters, group.select_rows(grad_TO)
        matrices = self._matrices(adapter)
        grads = [matmul(grad_nO[:, linear.columns], linear.b_Or, grad_nO.dtype) for linear in matrices.linears_b]
        grad_nR = _concat_columns(grads, adapter.scale)
        if adapter.gradients is not None:
            # All columns of x A^T times all outputs: a few large matmuls are faster than only the needed blocks.
            gradient_OR = transpose_matmul(grad_nO, u_nR)
            for name, columns, ranks, _ in matrices.linears_b:
                adapter.gradients.add_((name,), 1, gradient_OR[columns, ranks])
            for part in matrices.stacked_a:
                gradient_RI = matmul(grad_nR[:, part.ranks].t(), group.select_rows(x_TI), gradient_dtype(x_TI))
                adapter.gradients.add_(part.names, 0, gradient_RI)
        if grad_TI is not None:
            for _, ranks, a_RI in matrices.stacked_a:
                add_matmul_(group.select_rows(grad_TI), grad_nR[:, ranks], a_RI, 1.0)

    def _forward_batched_(self, y_TO: Tensor, x_TI: Tensor, group: AdapterGroup) -> Tensor:
        u_SnR = self._shrink_batched(x_TI, group)
        for first, b_SOr in self._stacks(group)[1]:
            group.add_bmm_(y_TO[:, first.columns], u_SnR[..., first.ranks], b_SOr.mT)
        return u_SnR

    def _shrink_batched(self, x_TI: Tensor, group: AdapterGroup) -> Tensor:
        x_SnI = group.batch_rows(x_TI)
        return _concat_columns(
            [torch.bmm(x_SnI, a_SRI.mT) for _, a_SRI in self._stacks(group)[0]], group.adapters[0].scale
        )

    def _backward_batched_(
        self, grad_TI: Tensor | None, grad_TO: Tensor, x_TI: Tensor, group: AdapterGroup, u_SnR: Tensor
    ) -> None:
        stacked_a, linears_b = self._stacks(group)
        x_SnI, grad_SnO = group.batch_rows(x_TI), group.batch_rows(grad_TO)
        grads_SnO = [_make_contiguous(grad_SnO[..., first.columns]) for first, _ in linears_b]
        grads = [torch.bmm(part_SnO, b_SOr) for part_SnO, (_, b_SOr) in zip(grads_SnO, linears_b, strict=True)]
        grad_SnR = _concat_columns(grads, group.adapters[0].scale)
        for part_SnO, (first, _) in zip(grads_SnO, linears_b, strict=True):
            gradient_SOr = transpose_bmm(part_SnO, _make_contiguous(u_SnR[..., first.ranks]))
            for adapter, gradient_Or in zip(group.adapters, gradient_SOr.unbind(), strict=True):
                if adapter.gradients is not None:
                    adapter.gradients.add_((first.name,), 1, gradient_Or)
        for first, a_SRI in stacked_a:
            gradient_SRI = transpose_bmm(grad_SnR[..., first.ranks], x_SnI)
            for adapter, gradient_RI in zip(group.adapters, gradient_SRI.unbind(), strict=True):
                if adapter.gradients is not None:
                    adapter.gradients.add_(first.names, 0, gradient_RI)
            if grad_TI is not None:
                group.add_bmm_(grad_TI, grad_SnR[..., first.ranks], a_SRI)

    def _stacks(self, group: AdapterGroup) -> Stacks:
        """The A's and B's of a group's adapters, stacked, or its only adapter's; all have the same layout."""
        if (stacks := group.stacks.get(self)) is None:
            if len(group.adapters) == 1 or group.stack is not None:
                stacks = self._view_stacks(group)
            else:
                stacks = self._cache_stacks(group, self._build_stacks) if _is_sampling() else self._build_stacks(group)
            group.stacks[self] = stacks
        return cast(Stacks, stacks)

    def _view_stacks(self, group: AdapterGroup) -> Stacks:
        stacked_a, linears_b = self._matrices(group.adapters[0])
        if (stack_rows := group.stack) is None:
            return [(part, part.a_RI) for part in stacked_a], [(linear, linear.b_Or) for linear in linears_b]
        stack, rows = stack_rows
        return (
            [(part, stack.compute_view(rows, part.a_RI)) for part in stacked_a],
            [(linear, stack.compute_view(rows, linear.b_Or)) for linear in linears_b],
        )

    def _cache_stacks(
        self, group: AdapterGroup, build: Callable[[AdapterGroup], Stacks | PackedMatrices]
    ) -> Stacks | PackedMatrices:
        """The group's matrices from the cache of the last MAX_STACKS, which lasts from step to step."""
        if (stacks := self._stack_cache.get(group.versions)) is None:
            stacks = self._stack_cache[group.versions] = build(group)
        self._mark_used(group)
        return stacks

    def _mark_used(self, group: AdapterGroup) -> None:
        self._stack_cache.setdefault(group.versions, None)
        self._stack_cache.move_to_end(group.versions)
        while len(self._stack_cache) > MAX_STACKS:
            self._stack_cache.popitem(last=False)

    def _pack_matrices(self, group: AdapterGroup) -> PackedMatrices:
        (adapter,) = group.adapters
        stacked_a, linears_b = self._matrices(adapter)
        a_RI = torch.cat([part.a_RI for part in stacked_a])
        b_OR = a_RI.new_zeros(self._columns[-1].stop, len(a_RI))
        for _, columns, ranks, b_Or in linears_b:
            torch.mul(b_Or, adapter.scale, out=b_OR[columns, ranks])
        return PackedMatrices(pack_weight(a_RI), pack_weight(b_OR))

    def _build_stacks(self, group: AdapterGroup) -> Stacks:
        matrices = [self._matrices(adapter) for adapter in group.adapters]
        stacked_a = zip(*(adapter_matrices.stacked_a for adapter_matrices in matrices), strict=True)
        linears_b = zip(*(adapter_matrices.linears_b for adapter_matrices in matrices), strict=True)
        return (
            [(parts[0], _stack_matrices([part.a_RI for part in parts])) for parts in stacked_a],
            [(linears[0], _stack_matrices([linear.b_Or for linear in linears])) for linears in linears_b],
        )

    def _is_worth_stacking(self, group: AdapterGroup, *, repeats: bool) -> bool:
        """In sampling: whether the same adapters run together again, so that their stack serves many steps."""
        is_cached = group.versions in self._stack_cache
        if is_small := group.num_bytes <= MAX_STACK_BYTES:
            self._mark_used(group)
        return is_cached or (repeats and is_small)

    def _is_batched(self, group: AdapterGroup, *, repeats: bool) -> bool:
        if group.stack is not None and not _is_sampling():
            return not group.is_padded or group.length * self._in_features <= PADDED_MAX_ELEMENTS
        if group.length > BATCHED_MAX_ROWS:
            return False
        if _is_sampling() and not self._is_worth_stacking(group, repeats=repeats):
            return False
        stacked_a, linears_b = self._matrices(group.adapters[0])
        largest = max(*(part.a_RI.numel() for part in stacked_a), *(linear_b.b_Or.numel() for linear_b in linears_b))
        return largest <= BATCHED_MAX_ELEMENTS or stacked_a[0].a_RI.dtype == torch.bfloat16

    def _matrices(self, adapter: Adapter) -> DeltaMatrices:
        if self not in adapter.delta_matrices:
            adapter.delta_matrices[self] = self._collect_matrices(adapter)
        return adapter.delta_matrices[self]

    def _collect_matrices(self, adapter: Adapter) -> DeltaMatrices:
        stacked_a: list[StackedA] = []
        linears_b: list[LinearB] = []
        end = 0
        for name, columns in zip(self._names, self._columns, strict=True):
            if name not in adapter.compute:
                continue
            a_rI, b_Or = adapter.compute[name]
            ranks = slice(end, end := end + len(a_rI))
            linears_b.append(LinearB(name, columns, ranks, b_Or))
            if stacked_a and stacked_a[-1].a_RI.storage_offset() + stacked_a[-1].a_RI.numel() == a_rI.storage_offset():
                names, previous_ranks, previous_RI = stacked_a.pop()
                adjacent_RI = extend_rows(previous_RI, len(previous_RI) + len(a_rI))
                stacked_a.append(StackedA((*names, name), slice(previous_ranks.start, end), adjacent_RI))
            else:
                stacked_a.append(StackedA((name,), ranks, a_rI))
        return DeltaMatrices(tuple(stacked_a), tuple(linears_b))


def _is_packed(group: AdapterGroup) -> bool:
    if len(group.adapters) > 1 or group.length > PACKED_MAX_ROWS or group.num_bytes > MAX_STACK_BYTES:
        return False
    return has_onednn(group.adapters[0].compute_P)


def _stack_matrices(matrices: Sequence[Tensor]) -> Tensor:
    """The matrices in one tensor, stored as forward reads them fastest in sampling, otherwise as backward does."""
    return torch.stack([matrix.t() for matrix in matrices]).mT if _is_sampling() else torch.stack(tuple(matrices))


def _make_contiguous(x: Tensor) -> Tensor:
    """Copy matrices with gaps in bfloat16, for which batched matmuls are slow; in float32 they are not."""
    return x.contiguous() if x.dtype == torch.bfloat16 else x


def _is_in_place(x: Tensor, group: AdapterGroup) -> bool:
    return is_launch_bound(x) if len(group.adapters) == 1 else group.stack is not None and not _is_sampling()


def _shrink_in_place(x_TI: Tensor, group: AdapterGroup, stacks: Stacks) -> Tensor:
    """scale * x A^T of one adapter or of a stack, in the fewest operations, for devices on which a launch takes longer
    than a matmul: each writes where its result belongs, and so do `_forward_in_place_` and `_backward_in_place_`.
    """
    x_SnI = group.batch_rows(x_TI, repeats=True)
    return _concat_matmuls([(x_SnI, a_SRI.mT) for _, a_SRI in stacks[0]], group.adapters[0].scale)


def _forward_in_place_(y_TO: Tensor, x_TI: Tensor, group: AdapterGroup, stacks: Stacks) -> Tensor:
    u_SnR = _shrink_in_place(x_TI, group, stacks)
    parts = _slice_columns(u_SnR, [linear.ranks for linear, _ in stacks[1]])
    for part_Snr, (linear, b_SOr) in zip(parts, stacks[1], strict=True):
        group.add_bmm_(_slice_columns(y_TO, [linear.columns])[0], part_Snr, b_SOr.mT)
    return u_SnR


def _backward_in_place_(
    grad_TI: Tensor | None, grad_TO: Tensor, x_TI: Tensor, group: AdapterGroup, stacks: Stacks, u_SnR: Tensor
) -> None:
    stacked_a, linears_b = stacks
    grads_SnO = _slice_columns(group.batch_rows(grad_TO), [linear.columns for linear, _ in linears_b])
    pairs = [(part_SnO, b_SOr) for part_SnO, (_, b_SOr) in zip(grads_SnO, linears_b, strict=True)]
    grads_SnR = _slice_columns(_concat_matmuls(pairs, group.adapters[0].scale), [part.ranks for part, _ in stacked_a])
    if group.adapters[0].gradients is not None:
        add_ = add_matmul_ if u_SnR.dim() == 2 else add_bmm_
        parts = _slice_columns(u_SnR, [linear.ranks for linear, _ in linears_b])
        for part_Snr, grad_SnO, (linear, b_SOr) in zip(parts, grads_SnO, linears_b, strict=True):
            add_(_gradient_buffer(group, (linear.name,), 1, b_SOr), grad_SnO.mT, part_Snr)
        x_SnI = group.batch_rows(x_TI, repeats=True)
        for grad_SnR, (part, a_SRI) in zip(grads_SnR, stacked_a, strict=True):
            add_(_gradient_buffer(group, part.names, 0, a_SRI), grad_SnR.mT, x_SnI)
    if grad_TI is not None:
        for grad_SnR, (_, a_SRI) in zip(grads_SnR, stacked_a, strict=True):
            group.add_bmm_(grad_TI, grad_SnR, a_SRI)


def _gradient_buffer(group: AdapterGroup, names: Sequence[str], matrix: int, like: Tensor) -> Tensor:
    """The buffer of these matrices' gradients, to add to, of one adapter or of a stack."""
    adapter = group.adapters[0]
    if (stack_rows := group.stack) is not None:
        stack, rows = stack_rows
        return stack.gradient_view(rows, adapter.layout.spans[names[0]][matrix], like.shape[-2:])
    assert adapter.gradients is not None
    return adapter.gradients.accumulator(names, matrix)


def _slice_columns(x: Tensor, columns: Sequence[slice]) -> Sequence[Tensor]:
    if len(columns) == 1 and columns[0].start == 0 and columns[0].stop == x.shape[-1]:
        return (x,)
    return [x.narrow(-1, span.start, span.stop - span.start) for span in columns]


def _concat_matmuls(pairs: Sequence[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """scale * a @ b of each pair, in the columns of one matrix or stack."""
    ends = list(accumulate((b.shape[-1] for _, b in pairs), initial=0))
    out = pairs[0][0].new_empty(*pairs[0][0].shape[:-1], ends[-1])
    for (a, b), columns in zip(pairs, _slice_columns(out, [slice(*span) for span in pairwise(ends)]), strict=True):
        write_matmul_(columns, a, b, scale)
    return out


def _concat_columns(parts: Sequence[Tensor], scale: float) -> Tensor:
    concatenated = parts[0] if len(parts) == 1 else torch.cat(tuple(parts), -1)
    return concatenated if scale == 1.0 else concatenated.mul_(scale)


def _is_sampling() -> bool:
    return torch.is_inference_mode_enabled()


class RecomputedFunction(Protocol):
    """A cheap function of rows, which backward computes again."""

    def forward(self, x: Tensor, /) -> Tensor: ...
    def gradient(self, grad: Tensor, x: Tensor, /) -> Tensor: ...


class LoRALinear:
    """The frozen linear y = x W^T + b, or several of them, plus scale * x A^T B^T for each segment's adapter."""

    weight: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int
    delta: LoRADelta
    codes: WeightCodes | None = None
    """What holds the frozen matrix of a quantised linear."""

    def groups(self, lora_batch: LoRABatch) -> list[AdapterGroup]:
        """The groups whose adapters have any of these linears."""
        return self.delta.groups(lora_batch)

    def frozen_product(self, x_TI: Tensor, out_dtype: torch.dtype) -> Tensor:
        """[T, O]: x W^T, to which the bias is not added."""
        if self.codes is not None:
            return self.codes.multiply(x_TI, 0).to(out_dtype)
        return matmul(x_TI, self.weight.t(), out_dtype)

    def frozen_gradient(self, grad_TO: Tensor) -> Tensor:
        """[T, I]: the gradient of x that comes through W."""
        if self.codes is not None:
            return self.codes.multiply(grad_TO, 0, back=True)
        return matmul(grad_TO, self.weight, grad_TO.dtype)

    def forward_frozen(self, x: Tensor) -> Tensor:
        """y without adapters."""
        if self.codes is not None:
            if torch.is_grad_enabled():
                return self.forward_with_gradient(x, ())
            return self.forward_rows(x.reshape(-1, self.in_features), ())[0].view(*x.shape[:-1], -1)
        return nn.functional.linear(x, self.weight, self.bias)

    def forward_rows(
        self,
        x_TI: Tensor,
        adapter_groups: Sequence[AdapterGroup],
        out_dtype: torch.dtype | None = None,
        frozen_TO: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """y [T, O], and each group's scale * x A^T, which backward needs. `frozen_TO`: x W^T if it was computed
        before, in another dtype than y's.
        """
        dtype = out_dtype or x_TI.dtype
        y_TO = self.frozen_product(x_TI, dtype) if frozen_TO is None else frozen_TO.to(dtype)
        if self.bias is not None:
            y_TO += self.bias
        return y_TO, self.delta.forward_(y_TO, x_TI, adapter_groups)

    def forward_device_rows(
        self, x_TI: Tensor, lora_batch: DeviceLoRABatch, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """y [T, O] of rows without gradients on a GPU."""
        if out_dtype in (None, x_TI.dtype):
            y_TO = self.forward_frozen(x_TI)
        else:
            y_TO = self.forward_rows(x_TI, (), out_dtype)[0]
        lora_batch.add_deltas_(self.delta, y_TO, x_TI)
        return y_TO

    def backward_rows(
        self,
        grad_TO: Tensor,
        x_TI: Tensor,
        adapter_groups: Sequence[AdapterGroup],
        a_outputs: Sequence[Tensor],
        *,
        need_input: bool,
    ) -> Tensor | None:
        """The gradient of x, if needed; adds the gradients of A and B to their adapters' buffers where these exist."""
        grad_TI = self.frozen_gradient(grad_TO) if need_input else None
        self.delta.backward_(grad_TI, grad_TO, x_TI, adapter_groups, a_outputs)
        return grad_TI

    def forward_with_gradient(
        self, x: Tensor, adapter_groups: Sequence[AdapterGroup], before: RecomputedFunction | None = None
    ) -> Tensor:
        """y for `before(x)` [.., I]; backward returns x's gradient and adds the adapters' to their buffers."""
        return cast(
            Tensor,
            _LoRALinearFunction.apply(x, anchor(x.device) if adapter_groups else None, self, adapter_groups, before),
        )


@cache
def anchor(device: torch.device) -> Tensor:
    """An empty input that requires a gradient. The embeddings are frozen, so the first layer's input requires none and
    autograd would not record the adapters; this makes it record them without computing that input's gradient.
    """
    return torch.zeros(0, device=device, requires_grad=True)


class _LoRALinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        anchor: Tensor | None,
        linear: LoRALinear,
        adapter_groups: list[AdapterGroup],
        before: RecomputedFunction | None,
    ) -> Tensor:
        inputs = x if before is None else before.forward(x)
        y_TO, ctx.a_outputs = linear.forward_rows(inputs.reshape(-1, linear.in_features), adapter_groups)
        ctx.save_for_backward(x)
        ctx.linear, ctx.adapter_groups, ctx.before = linear, adapter_groups, before
        return y_TO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        inputs = x if ctx.before is None or not ctx.adapter_groups else ctx.before.forward(x)
        grad_x = ctx.linear.backward_rows(
            grad.reshape(-1, ctx.linear.out_features),
            inputs.reshape(-1, ctx.linear.in_features) if ctx.adapter_groups else x,
            ctx.adapter_groups,
            ctx.a_outputs,
            need_input=ctx.needs_input_grad[0],
        )
        if grad_x is not None:
            grad_x = grad_x.view(x.shape) if ctx.before is None else ctx.before.gradient(grad_x, x)
        return grad_x, None, None, None, None


class ForwardContext:
    """The LoRA batch and the plan of the current call, shared by every linear and mixer of one model."""

    __slots__ = ("__weakref__", "lora_batch", "plan")

    def __init__(self) -> None:
        self.lora_batch: LoRABatch | None = None
        self.plan: AttentionPlan | None = None


class MultiLoRALinear(LoRALinear, nn.Module):
    """Replaces a frozen nn.Linear. Keeps its parameters under the same names: tied weights and state dicts are
    unchanged. With `codes`, `weight` is no parameter: it is dequantised on every access, since keeping it would undo
    the saving.
    """

    def __init__(
        self, name: str, group: str, linear: nn.Linear, context: ForwardContext, codes: WeightCodes | None = None
    ) -> None:
        super().__init__()
        self.name = name
        self.group = group
        self.codes = codes
        if codes is None:
            self.weight = linear.weight
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.targets: tuple[Target, ...] = (self.target,)
        self.delta = LoRADelta(self.targets)
        self._context = context

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        # Called for parameters, and for attributes that are missing.
        if name == "weight" and (codes := self.__dict__.get("codes")) is not None:
            return codes.weight(0)
        return super().__getattr__(name)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype if self.codes is None else self.codes.dtype

    def list_codes(self) -> Sequence[WeightCodes]:
        return () if self.codes is None else (self.codes,)

    @property
    def target(self) -> Target:
        return Target(self.name, self.group, self.in_features, self.out_features)

    def divide(self, parts: Sequence[tuple[str, int]]) -> None:
        """Give each part its own adapter: (last name, number of outputs) for consecutive ranges of outputs."""
        starts = accumulate((num_rows for _, num_rows in parts), initial=0)
        parent = self.name.rpartition(".")[0]
        self.targets = tuple(
            Target(f"{parent}.{last}", self.group, self.in_features, num_rows,
                   part=LinearPart(self.name, start, len(parts), self.out_features))
            for (last, num_rows), start in zip(parts, starts, strict=False)
        )  # fmt: skip
        self.delta = LoRADelta(self.targets)

    def forward(self, x: Tensor) -> Tensor:
        lora_batch = self._context.lora_batch
        if lora_batch is None:
            return self.forward_frozen(x)
        if isinstance(lora_batch, DeviceLoRABatch):
            return self.forward_device_rows(x.reshape(-1, self.in_features), lora_batch).view(*x.shape[:-1], -1)
        adapter_groups = self.groups(lora_batch)
        if not adapter_groups:
            return self.forward_frozen(x)
        if torch.is_grad_enabled():
            return self.forward_with_gradient(x, adapter_groups)
        x_TI = x.reshape(-1, self.in_features)
        return self.forward_rows(x_TI, adapter_groups)[0].view(*x.shape[:-1], -1)
