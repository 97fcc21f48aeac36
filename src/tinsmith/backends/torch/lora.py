"""LoRA adapters over frozen linears: rows of a packed batch, each segment with its own adapter.

A `LoRABatch` says which rows have which adapter. A `LoRADelta` computes the low-rank products of one linear, or of
several that read the same rows and whose outputs are concatenated, such as queries, keys and values: their A's are one
matrix where an adapter's layout has them adjacent. A `LoRALinear` is such a linear with its deltas, forward and
backward; `MultiLoRALinear` replaces a module.

Rows meet only the matrices of their own adapter, so a non-finite number in one adapter never reaches another: some
segments of similar length are one batched product, whose batch entries are independent; all others are products of
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
"""Neighbouring segments of at most this many rows are batched if their layouts are equal and their lengths similar;
eight of 96 rows take a bfloat16 step of m50 1.25 times as long one by one. Longer ones gain nothing on a CPU; those of
an `AdapterStack` are batched at any length.
"""

PADDED_MAX_ELEMENTS = 1 << 21
"""Inputs of a segment of an `AdapterStack` up to which a group with padding is batched: padding copies all rows, and
products one by one take more launches.
"""

BATCHED_MAX_ELEMENTS = 1 << 15
"""In float32 only if no matrix has more numbers: larger products are fast enough one by one, and a batched one needs
copies of all matrices in one stack. In bfloat16 a batched product is twice as fast at any size.
"""


MAX_STACKS, MAX_STACK_BYTES = 4, 2**28
"""Stacks that sampling keeps from step to step for each LoRADelta, and the most adapter bytes of a stack."""

PACKED_MAX_ROWS = 32
"""In sampling, up to this many rows of one adapter take its A's and B's as one matrix each, which are kept as stacks
are: a decode step of m50 takes 1.1 times as long without.
"""


class DeviceLoRABatch(LoRABatch):
    """A LoRA batch of rows without gradients on a GPU: two launches for each linear, whatever the adapters.

    `tables`, or else the segments: for each layout of adapters, its blocks of rows as `lora_kernels.add_deltas_` takes
    them. A CUDA graph's are filled anew for each group.
    """

    __slots__ = ("_tables",)

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        repeats: bool = False,
        tables: Sequence[tuple[Layout, Tensor]] | None = None,
    ) -> None:
        super().__init__(segments, repeats=repeats)
        self._tables = tables

    def add_deltas_(self, delta: LoRADelta, y_TO: Tensor, x_TI: Tensor) -> None:
        """Add the adapters' deltas to y, which may have a wider dtype than x."""
        if self._tables is None:
            self._tables = self._uploaded(x_TI.device)
        for layout, blocks_B4 in self._tables:
            if (tables := delta.device_tables(layout, x_TI.device)) is not None:
                from tinsmith.backends.torch.lora_kernels import add_deltas_

                add_deltas_(y_TO, x_TI, blocks_B4, *tables, layout.rank, BLOCK_ROWS)

    def _uploaded(self, device: torch.device) -> list[tuple[Layout, Tensor]]:
        layouts = {id(own.layout): own.layout for _, _, own in self.segments if own is not None}
        blocks = [
            [each for segment in self.segments if segment.layout is layout for each in list_row_blocks(segment)]
            for layout in layouts.values()
        ]
        if not blocks:
            return []
        given = upload(np.array([each for own in blocks for each in own], np.int64), device)
        return list(zip(layouts.values(), given.split([len(own) for own in blocks]), strict=True))


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
        """`places_P4` and `tiles_C2` of `lora_kernels.add_deltas_`; None if the layout has none of these linears."""
        if id(layout) not in self._device_tables:
            self._device_tables[id(layout)] = layout, self._make_device_tables(layout, device)
        return self._device_tables[id(layout)][1]

    def _make_device_tables(self, layout: Layout, device: torch.device) -> tuple[Tensor, Tensor] | None:
        from tinsmith.backends.torch.lora_kernels import tiles_of

        named = zip(self._names, self._columns, strict=True)
        found = [(*layout.spans[name], columns) for name, columns in named if name in layout.spans]
        if not found:
            return None
        outputs = [columns.stop - columns.start for *_, columns in found]
        places = [(a.start, b.start, columns.start, out) for (a, b, columns), out in zip(found, outputs, strict=True)]
        tables = places, tiles_of(outputs, layout.rank)
        places_P4, tiles_C2 = (upload(np.array(table, np.int64), device) for table in tables)
        return places_P4, tiles_C2

    def groups(self, lora_batch: LoRABatch) -> list[AdapterGroup]:
        """The groups whose adapters have any of these linears; short segments stay batched where that is faster."""
        if (known := lora_batch.groups_by_delta.get(self)) is not None:
            return known
        adapter_groups = lora_batch.groups_by_delta[self] = []
        for group in lora_batch.adapter_groups:
            if group.adapters[0].compute.keys().isdisjoint(self._names):
                continue
            is_whole = len(group.adapters) == 1 or self._is_batched(group, repeats=lora_batch.repeats)
            adapter_groups += [group] if is_whole else group.split()
        if lora_batch.repeats:
            for group in adapter_groups:
                if _is_joined(group):
                    group.stacks[self] = self._kept(group, self._join)
        return adapter_groups

    def add_reference_(self, y_TO: Tensor, x_TI: Tensor, lora_batch: LoRABatch) -> None:
        """Add each segment's delta to y, one product after another: the oracle of `forward_`."""
        for start, stop, adapter in lora_batch.segments:
            for name, columns in zip(self._names, self._columns, strict=True):
                if adapter is not None and name in adapter.compute:
                    a_rI, b_Or = adapter.compute[name]
                    y_TO[start:stop, columns] += adapter.scale * (x_TI[start:stop] @ a_rI.t() @ b_Or.t())

    def shrink(self, x_TI: Tensor, adapter_groups: Sequence[AdapterGroup]) -> list[Tensor]:
        """Each group's scale * x A^T, [n, R] or [S, n, R]."""
        return [self._inner(x_TI, group) for group in adapter_groups]

    def _inner(self, x_TI: Tensor, group: AdapterGroup) -> Tensor:
        if _writes(x_TI, group):
            return _written_inner(x_TI, group, self._stacks(group))
        return (self._single_inner if len(group.adapters) == 1 else self._batched_inner)(x_TI, group)

    def forward_(self, y_TO: Tensor, x_TI: Tensor, adapter_groups: Sequence[AdapterGroup]) -> list[Tensor]:
        """Add to y; returns `a_outputs`, which backward needs."""
        a_outputs = []
        for group in adapter_groups:
            if _writes(x_TI, group):
                a_outputs.append(_written_forward_(y_TO, x_TI, group, self._stacks(group)))
            else:
                own = self._single_forward_ if len(group.adapters) == 1 else self._batched_forward_
                a_outputs.append(own(y_TO, x_TI, group))
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
            if _writes(x_TI, group):
                _written_backward_(grad_TI, grad_TO, x_TI, group, self._stacks(group), u)
            else:
                own = self._single_backward_ if len(group.adapters) == 1 else self._batched_backward_
                own(grad_TI, grad_TO, x_TI, group, u)

    def _single_forward_(self, y_TO: Tensor, x_TI: Tensor, group: AdapterGroup) -> Tensor:
        (adapter,) = group.adapters
        if isinstance(joined := group.stacks.get(self), PackedMatrices):
            u_nR = onednn_linear(group.select_rows(x_TI), joined.a_RI)
            delta_nO = onednn_linear(u_nR, joined.b_OR)
            group.select_rows(y_TO)[:, : delta_nO.shape[1]].add_(
                delta_nO
            )  # parts may cover fewer outputs than the linear has
            return u_nR
        u_nR, own_nO = self._single_inner(x_TI, group), group.select_rows(y_TO)
        for _, columns, ranks, b_Or in self._matrices(adapter).linears_b:
            add_matmul_(own_nO[:, columns], u_nR[:, ranks], b_Or.t(), 1.0)
        return u_nR

    def _single_inner(self, x_TI: Tensor, group: AdapterGroup) -> Tensor:
        (adapter,), own_nI = group.adapters, group.select_rows(x_TI)
        stacked_a = self._matrices(adapter).stacked_a
        return _concat([matmul(own_nI, each.a_RI.t(), x_TI.dtype) for each in stacked_a], adapter.scale)

    def _single_backward_(
        self, grad_TI: Tensor | None, grad_TO: Tensor, x_TI: Tensor, group: AdapterGroup, u_nR: Tensor
    ) -> None:
        (adapter,), grad_nO = group.adapters, group.select_rows(grad_TO)
        matrices = self._matrices(adapter)
        grads = [matmul(grad_nO[:, m.columns], m.b_Or, grad_nO.dtype) for m in matrices.linears_b]
        grad_nR = _concat(grads, adapter.scale)
        if adapter.gradients is not None:
            # All columns of x A^T times all outputs: a few large products are faster than only the needed blocks.
            found_OR = transpose_matmul(grad_nO, u_nR)
            for name, columns, ranks, _ in matrices.linears_b:
                adapter.gradients.add_((name,), 1, found_OR[columns, ranks])
            for each in matrices.stacked_a:
                found_RI = matmul(grad_nR[:, each.ranks].t(), group.select_rows(x_TI), gradient_dtype(x_TI))
                adapter.gradients.add_(each.names, 0, found_RI)
        if grad_TI is not None:
            for _, ranks, a_RI in matrices.stacked_a:
                add_matmul_(group.select_rows(grad_TI), grad_nR[:, ranks], a_RI, 1.0)

    def _batched_forward_(self, y_TO: Tensor, x_TI: Tensor, group: AdapterGroup) -> Tensor:
        u_SnR = self._batched_inner(x_TI, group)
        for first, b_SOr in self._stacks(group)[1]:
            group.add_bmm_(y_TO[:, first.columns], u_SnR[..., first.ranks], b_SOr.mT)
        return u_SnR

    def _batched_inner(self, x_TI: Tensor, group: AdapterGroup) -> Tensor:
        x_SnI = group.batch_rows(x_TI)
        return _concat([torch.bmm(x_SnI, a_SRI.mT) for _, a_SRI in self._stacks(group)[0]], group.adapters[0].scale)

    def _batched_backward_(
        self, grad_TI: Tensor | None, grad_TO: Tensor, x_TI: Tensor, group: AdapterGroup, u_SnR: Tensor
    ) -> None:
        stacked_a, linears_b = self._stacks(group)
        x_SnI, grad_SnO = group.batch_rows(x_TI), group.batch_rows(grad_TO)
        grads_SnO = [_contiguous(grad_SnO[..., first.columns]) for first, _ in linears_b]
        grads = [torch.bmm(own_SnO, b_SOr) for own_SnO, (_, b_SOr) in zip(grads_SnO, linears_b, strict=True)]
        grad_SnR = _concat(grads, group.adapters[0].scale)
        for own_SnO, (first, _) in zip(grads_SnO, linears_b, strict=True):
            found_SOr = transpose_bmm(own_SnO, _contiguous(u_SnR[..., first.ranks]))
            for adapter, found_Or in zip(group.adapters, found_SOr.unbind(), strict=True):
                if adapter.gradients is not None:
                    adapter.gradients.add_((first.name,), 1, found_Or)
        for first, a_SRI in stacked_a:
            found_SRI = transpose_bmm(grad_SnR[..., first.ranks], x_SnI)
            for adapter, found_RI in zip(group.adapters, found_SRI.unbind(), strict=True):
                if adapter.gradients is not None:
                    adapter.gradients.add_(first.names, 0, found_RI)
            if grad_TI is not None:
                group.add_bmm_(grad_TI, grad_SnR[..., first.ranks], a_SRI)

    def _stacks(self, group: AdapterGroup) -> Stacks:
        """The A's and B's of a group's adapters, stacked, or its only adapter's; all have the same layout."""
        if (found := group.stacks.get(self)) is None:
            if len(group.adapters) == 1 or group.stack is not None:
                found = self._views(group)
            else:
                found = self._kept(group, self._stacked) if _is_sampling() else self._stacked(group)
            group.stacks[self] = found
        return cast(Stacks, found)

    def _views(self, group: AdapterGroup) -> Stacks:
        stacked_a, linears_b = self._matrices(group.adapters[0])
        if (place := group.stack) is None:
            return [(each, each.a_RI) for each in stacked_a], [(each, each.b_Or) for each in linears_b]
        stack, rows = place
        return (
            [(each, stack.compute(rows, each.a_RI)) for each in stacked_a],
            [(each, stack.compute(rows, each.b_Or)) for each in linears_b],
        )

    def _kept(
        self, group: AdapterGroup, make: Callable[[AdapterGroup], Stacks | PackedMatrices]
    ) -> Stacks | PackedMatrices:
        """From step to step: the last MAX_STACKS."""
        if (found := self._stack_cache.get(group.versions)) is None:
            found = self._stack_cache[group.versions] = make(group)
        self._used(group)
        return found

    def _used(self, group: AdapterGroup) -> None:
        self._stack_cache.setdefault(group.versions, None)
        self._stack_cache.move_to_end(group.versions)
        while len(self._stack_cache) > MAX_STACKS:
            self._stack_cache.popitem(last=False)

    def _join(self, group: AdapterGroup) -> PackedMatrices:
        (adapter,) = group.adapters
        stacked_a, linears_b = self._matrices(adapter)
        a_RI = torch.cat([each.a_RI for each in stacked_a])
        b_OR = a_RI.new_zeros(self._columns[-1].stop, len(a_RI))
        for _, columns, ranks, b_Or in linears_b:
            torch.mul(b_Or, adapter.scale, out=b_OR[columns, ranks])
        return PackedMatrices(pack_weight(a_RI), pack_weight(b_OR))

    def _stacked(self, group: AdapterGroup) -> Stacks:
        matrices = [self._matrices(adapter) for adapter in group.adapters]
        stacked_a = zip(*(share.stacked_a for share in matrices), strict=True)
        linears_b = zip(*(share.linears_b for share in matrices), strict=True)
        return (
            [(some[0], _stack([each.a_RI for each in some])) for some in stacked_a],
            [(some[0], _stack([linear_b.b_Or for linear_b in some])) for some in linears_b],
        )

    def _is_worth_stacking(self, group: AdapterGroup, *, repeats: bool) -> bool:
        """In sampling: whether the same adapters run together again, so that their stack serves many steps."""
        known = group.versions in self._stack_cache
        if is_small := group.num_bytes <= MAX_STACK_BYTES:
            self._used(group)
        return known or (repeats and is_small)

    def _is_batched(self, group: AdapterGroup, *, repeats: bool) -> bool:
        if group.stack is not None and not _is_sampling():
            return not group.is_padded or group.length * self._in_features <= PADDED_MAX_ELEMENTS
        if group.length > BATCHED_MAX_ROWS:
            return False
        if _is_sampling() and not self._is_worth_stacking(group, repeats=repeats):
            return False
        stacked_a, linears_b = self._matrices(group.adapters[0])
        largest = max(*(each.a_RI.numel() for each in stacked_a), *(linear_b.b_Or.numel() for linear_b in linears_b))
        return largest <= BATCHED_MAX_ELEMENTS or stacked_a[0].a_RI.dtype == torch.bfloat16

    def _matrices(self, adapter: Adapter) -> DeltaMatrices:
        if self not in adapter.delta_matrices:
            adapter.delta_matrices[self] = self._matrices_of(adapter)
        return adapter.delta_matrices[self]

    def _matrices_of(self, adapter: Adapter) -> DeltaMatrices:
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
                names, before, above_RI = stacked_a.pop()
                joined_RI = extend_rows(above_RI, len(above_RI) + len(a_rI))
                stacked_a.append(StackedA((*names, name), slice(before.start, end), joined_RI))
            else:
                stacked_a.append(StackedA((name,), ranks, a_rI))
        return DeltaMatrices(tuple(stacked_a), tuple(linears_b))


def _is_joined(group: AdapterGroup) -> bool:
    if len(group.adapters) > 1 or group.length > PACKED_MAX_ROWS or group.num_bytes > MAX_STACK_BYTES:
        return False
    return has_onednn(group.adapters[0].compute_P)


def _stack(matrices: Sequence[Tensor]) -> Tensor:
    """In sampling stored as forward reads them fastest, 1.1 to 1.3 times as fast; backward reads the other way."""
    return torch.stack([each.t() for each in matrices]).mT if _is_sampling() else torch.stack(tuple(matrices))


def _contiguous(x: Tensor) -> Tensor:
    """Batched products of matrices with gaps take four times as long in bfloat16, and no longer in float32."""
    return x.contiguous() if x.dtype == torch.bfloat16 else x


def _writes(x: Tensor, group: AdapterGroup) -> bool:
    return is_launch_bound(x) if len(group.adapters) == 1 else group.stack is not None and not _is_sampling()


def _written_inner(x_TI: Tensor, group: AdapterGroup, stacks: Stacks) -> Tensor:
    """The same of one adapter, or of a stack's, in the fewest operations, for devices on which a launch takes longer
    than a product: each writes or adds where its result belongs.
    """
    x_SnI = group.batch_rows(x_TI, repeats=True)
    return _side_by_side([(x_SnI, a_SRI.mT) for _, a_SRI in stacks[0]], group.adapters[0].scale)


def _written_forward_(y_TO: Tensor, x_TI: Tensor, group: AdapterGroup, stacks: Stacks) -> Tensor:
    u_SnR = _written_inner(x_TI, group, stacks)
    parts = _cut(u_SnR, [own.ranks for own, _ in stacks[1]])
    for part_Snr, (own, b_SOr) in zip(parts, stacks[1], strict=True):
        group.add_bmm_(_cut(y_TO, [own.columns])[0], part_Snr, b_SOr.mT)
    return u_SnR


def _written_backward_(
    grad_TI: Tensor | None, grad_TO: Tensor, x_TI: Tensor, group: AdapterGroup, stacks: Stacks, u_SnR: Tensor
) -> None:
    stacked_a, linears_b = stacks
    grads_SnO = _cut(group.batch_rows(grad_TO), [own.columns for own, _ in linears_b])
    pairs = [(part_SnO, b_SOr) for part_SnO, (_, b_SOr) in zip(grads_SnO, linears_b, strict=True)]
    grads_SnR = _cut(_side_by_side(pairs, group.adapters[0].scale), [own.ranks for own, _ in stacked_a])
    if group.adapters[0].gradients is not None:
        add_ = add_matmul_ if u_SnR.dim() == 2 else add_bmm_
        parts = _cut(u_SnR, [own.ranks for own, _ in linears_b])
        for part_Snr, grad_SnO, (own, b_SOr) in zip(parts, grads_SnO, linears_b, strict=True):
            add_(_gradients(group, (own.name,), 1, b_SOr), grad_SnO.mT, part_Snr)
        x_SnI = group.batch_rows(x_TI, repeats=True)
        for grad_SnR, (own, a_SRI) in zip(grads_SnR, stacked_a, strict=True):
            add_(_gradients(group, own.names, 0, a_SRI), grad_SnR.mT, x_SnI)
    if grad_TI is not None:
        for grad_SnR, (_, a_SRI) in zip(grads_SnR, stacked_a, strict=True):
            group.add_bmm_(grad_TI, grad_SnR, a_SRI)


def _gradients(group: AdapterGroup, names: Sequence[str], matrix: int, like: Tensor) -> Tensor:
    """The buffer to add to, of one adapter or of all."""
    adapter = group.adapters[0]
    if (place := group.stack) is not None:
        stack, rows = place
        return stack.gradients(rows, adapter.layout.spans[names[0]][matrix], like.shape[-2:])
    assert adapter.gradients is not None
    return adapter.gradients.accumulator(names, matrix)


def _cut(x: Tensor, columns: Sequence[slice]) -> Sequence[Tensor]:
    if len(columns) == 1 and columns[0].start == 0 and columns[0].stop == x.shape[-1]:
        return (x,)
    return [x.narrow(-1, own.start, own.stop - own.start) for own in columns]


def _side_by_side(pairs: Sequence[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """scale * a @ b of each pair, in the columns of one matrix or stack."""
    ends = list(accumulate((b.shape[-1] for _, b in pairs), initial=0))
    out = pairs[0][0].new_empty(*pairs[0][0].shape[:-1], ends[-1])
    for (a, b), own in zip(pairs, _cut(out, [slice(*span) for span in pairwise(ends)]), strict=True):
        write_matmul_(own, a, b, scale)
    return out


def _concat(parts: Sequence[Tensor], scale: float) -> Tensor:
    joined = parts[0] if len(parts) == 1 else torch.cat(tuple(parts), -1)
    return joined if scale == 1.0 else joined.mul_(scale)


def _is_sampling() -> bool:
    return torch.is_inference_mode_enabled()


class RecomputedFunction(Protocol):
    """A cheap function of rows, which backward computes again."""

    def forward(self, x: Tensor, /) -> Tensor: ...
    def gradient(self, grad: Tensor, x: Tensor, /) -> Tensor: ...


class LoRALinear:
    """The frozen product y = x W^T + b of one or more linears, plus scale * x A^T B^T for each segment's adapter."""

    weight: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int
    delta: LoRADelta

    def groups(self, lora_batch: LoRABatch) -> list[AdapterGroup]:
        """The groups whose adapters have any of these linears."""
        return self.delta.groups(lora_batch)

    def forward_rows(
        self,
        x_TI: Tensor,
        adapter_groups: Sequence[AdapterGroup],
        out_dtype: torch.dtype | None = None,
        frozen_TO: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """y [T, O], and each group's scale * x A^T, which backward needs. `frozen_TO`: x W^T if it is known, in another
        dtype than y's.
        """
        dtype = out_dtype or x_TI.dtype
        y_TO = matmul(x_TI, self.weight.t(), dtype) if frozen_TO is None else frozen_TO.to(dtype)
        if self.bias is not None:
            y_TO += self.bias
        return y_TO, self.delta.forward_(y_TO, x_TI, adapter_groups)

    def forward_device_rows(
        self, x_TI: Tensor, lora_batch: DeviceLoRABatch, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """y [T, O] of rows without gradients on a GPU."""
        if out_dtype in (None, x_TI.dtype):
            y_TO = nn.functional.linear(x_TI, self.weight, self.bias)
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
        grad_TI = matmul(grad_TO, self.weight, grad_TO.dtype) if need_input else None
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
        own = x if before is None else before.forward(x)
        y_TO, ctx.a_outputs = linear.forward_rows(own.reshape(-1, linear.in_features), adapter_groups)
        ctx.save_for_backward(x)
        ctx.linear, ctx.adapter_groups, ctx.before = linear, adapter_groups, before
        return y_TO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        own = x if ctx.before is None or not ctx.adapter_groups else ctx.before.forward(x)
        grad_x = ctx.linear.backward_rows(
            grad.reshape(-1, ctx.linear.out_features),
            own.reshape(-1, ctx.linear.in_features) if ctx.adapter_groups else x,
            ctx.adapter_groups,
            ctx.a_outputs,
            need_input=ctx.needs_input_grad[0],
        )
        if grad_x is not None:
            grad_x = grad_x.view(x.shape) if ctx.before is None else ctx.before.gradient(grad_x, x)
        return grad_x, None, None, None, None


class ForwardContext:
    """The LoRA batch and the plan of the current call, shared by every linear and mixer of one model."""

    __slots__ = ("lora_batch", "plan")

    def __init__(self) -> None:
        self.lora_batch: LoRABatch | None = None
        self.plan: AttentionPlan | None = None


class MultiLoRALinear(LoRALinear, nn.Module):
    """Replaces a frozen nn.Linear. Keeps its parameters under the same names: tied weights and state dicts are
    unchanged.
    """

    def __init__(self, name: str, group: str, linear: nn.Linear, context: ForwardContext) -> None:
        super().__init__()
        self.name = name
        self.group = group
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.targets: tuple[Target, ...] = (self.target,)
        self.delta = LoRADelta(self.targets)
        self._context = context

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
            return nn.functional.linear(x, self.weight, self.bias)
        adapter_groups = self.groups(lora_batch)
        if not adapter_groups:
            return nn.functional.linear(x, self.weight, self.bias)
        if torch.is_grad_enabled():
            return self.forward_with_gradient(x, adapter_groups)
        x_TI = x.reshape(-1, self.in_features)
        return self.forward_rows(x_TI, adapter_groups)[0].view(*x.shape[:-1], -1)
