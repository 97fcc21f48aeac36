"""Attention and layers with a state over the rows of a prefix tree.

`PackedTree` is an `AttentionPlan` whose rows are those of a tree's nodes. A row attends to the earlier rows of its node
and to all rows of the nodes before it on its path, as if its sequence were there alone. It takes one of two ways for a
layer's attention:

- In parts, each of which needs no mask: every node's rows with themselves, causally, and for every node with children
  the rows of all its descendants, which are adjacent, with its keys (`attention_parts`). Keys and values are never
  copied.
- Unfolded, for windows that a sequence exceeds, capped scores, images whose tokens see later ones, and head sizes that
  the kernel does not take: queries, keys and values of every sequence are gathered, and attention is that of
  `PackedCausal`. Everything but this layer's attention is still computed once for shared rows.

A layer with a state continues a node from the state after its parent's last row, with the gradient of that state; where
that is not possible, its sequences are unfolded, too.

Shapes: T rows of the nodes, C cells (gathered rows), H query heads, G key heads, D head dim, n nodes or sequences of
one length L.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple, Unpack, cast

import numpy as np
import structlog
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tinsmith.backends.torch.attention import (
    AttentionOptions,
    LayerSlots,
    Mixer,
    MixerState,
    PackedCausal,
    TakeRows,
    group_by_length,
)
from tinsmith.backends.torch.attention_parts import (
    add_sinks_,
    equals_reference,
    join_,
    part_kernel,
    sink_gradient,
    suits_parts,
)
from tinsmith.backends.torch.host import upload
from tinsmith.plan.prefix_tree import ROOT, Node, PrefixTree
from tinsmith.runtime.devices import is_on_host
from tinsmith.types import I64

log = structlog.get_logger()

MIN_CONTINUED_ROWS = 2
"""A single row that continues from a state would be decoded, which changes the state in place."""


class PrefixPart(NamedTuple):
    """The rows of all descendants of a node, and the node's rows, which they see."""

    queries: slice
    keys: slice


class PackedTree:
    """`visible_counts`: one of `PackedCausal` for each sequence."""

    def __init__(
        self, tree: PrefixTree, device: torch.device | str = "cpu", visible_counts: Sequence[I64 | None] = ()
    ) -> None:
        self._tree = tree
        self._device = torch.device(device)
        self._visible_counts = visible_counts
        self.nodes = PackedCausal(tree.lengths, self._device)
        self.parts = _list_parts(tree)
        self._max_length = max(tree.sequence_lengths)
        self._is_causal = all(counts is None for counts in visible_counts)

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        if self._is_causal and self._suits_parts(q_THD, k_TGD, v_TGD, options):
            inputs = q_THD, k_TGD, v_TGD, options.get("sinks_H")
            return cast(Tensor, _TreeAttention.apply(*inputs, self, options["scale"]))
        return self.attend_unfolded(layer, q_THD, k_TGD, v_TGD, **options)

    def attend_unfolded(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        """`attend` with the rows of every sequence gathered."""
        rows_C = self._unfolded_rows
        q_CHD, k_CGD, v_CGD = (x.index_select(0, rows_C) for x in (q_THD, k_TGD, v_TGD))
        return self._fold(self._sequences.attend(layer, q_CHD, k_CGD, v_CGD, **options))

    def mix(self, mixer: Mixer, x_TD: Tensor) -> Tensor:
        if mixer.is_whole or not self._can_continue:
            x_CD = x_TD.index_select(0, self._unfolded_rows)
            return self._fold(self._sequences.mix(_WithStarts(mixer, self._first_rows), x_CD))
        rows_C, cells_T = self._state_indices
        cells = TakeRows.apply(x_TD, rows_C, cells_T)
        outputs, states = [], []
        sizes = [len(batch.starts) * batch.length for batch in self._state_batches]
        for batch, x_CD in zip(self._state_batches, cells.split_with_sizes(sizes), strict=True):
            state = None if batch.parents_n is None else _select_states(states, batch.parents_n)
            x_nLD = x_CD.view(len(batch.starts), batch.length, -1)
            y_nLD, state = mixer(x_nLD, batch.starts, state, keep=batch.has_children)
            outputs.append(y_nLD.flatten(0, 1))
            if batch.has_children:
                states.append(state)
        return TakeRows.apply(torch.cat(outputs), cells_T)

    def _suits_parts(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, options: AttentionOptions) -> bool:
        if options.get("softcap") is not None:
            return False
        window = options.get("window")
        if window is not None and self._max_length > window.size:
            return False
        return has_part_kernel(q_THD, k_TGD, v_TGD)

    # Unfolded sequences.

    @cached_property
    def _sequences(self) -> PackedCausal:
        return PackedCausal(self._tree.sequence_lengths, self._device, self._visible_counts)

    @cached_property
    def _unfolded_rows(self) -> Tensor:
        """[C] the row of each token of each sequence."""
        return upload(self._tree.token_rows, self._device)

    @cached_property
    def _folded_cells(self) -> Tensor:
        """[T] a cell of each row."""
        firsts = [0, *accumulate(self._tree.sequence_lengths)]
        cells = [np.arange(node.start, node.stop) + firsts[node.sequence] for node in self._tree.nodes]
        return upload(np.concatenate(cells), self._device)

    @cached_property
    def _first_rows(self) -> dict[int, int]:
        """The first row of each sequence, by its first cell."""
        tree, row_starts = self._tree, self._tree.row_starts
        roots = [row_starts[tree.path(sequence)[0]] for sequence in range(len(tree.ends))]
        return dict(zip(accumulate(tree.sequence_lengths, initial=0), roots, strict=False))

    def _fold(self, cells: Tensor) -> Tensor:
        return cast(Tensor, TakeRows.apply(cells, self._folded_cells))

    # States.

    @cached_property
    def _can_continue(self) -> bool:
        """Whether every state that a node leaves is that of at least two rows after another state."""
        nodes = [self._tree.nodes[index] for index in self._tree.parents]
        return all(node.parent == ROOT or node.num_tokens >= MIN_CONTINUED_ROWS for node in nodes)

    @cached_property
    def _state_batches(self) -> list[StateBatch]:
        return list_state_batches(self._tree, self._device)

    @cached_property
    def _state_indices(self) -> tuple[Tensor, Tensor]:
        """[C] the row of each cell of the batches, in which padding repeats a node's last row; [T] the cell of each
        row.
        """
        rows_C = np.concatenate([batch.rows_C for batch in self._state_batches])
        # Of a row's cells the first one is not padding.
        return upload(rows_C, self._device), upload(np.unique(rows_C, return_index=True)[1], self._device)


class StateBatch(NamedTuple):
    """Nodes of equal depth that a layer with a state computes together. `parents_n`: their parents among the nodes with
    children, in the order of the batches; None: they begin sequences.
    """

    starts: tuple[int, ...]
    length: int
    rows_C: I64
    parents_n: Tensor | None
    has_children: bool


def list_state_batches(tree: PrefixTree, device: torch.device) -> list[StateBatch]:
    """Parents before their children. Nodes with children are never padded: padding would change their last state."""
    parents, lengths, row_starts = tree.parents, tree.lengths, tree.row_starts
    depths: list[int] = []
    for node in tree.nodes:
        depths.append(0 if node.parent == ROOT else depths[node.parent] + 1)
    batches, state_of = [], {}
    for (depth, is_leaf), members in sorted(_group_nodes(depths, parents).items()):
        for bucket in group_by_length(members, lengths, pads=is_leaf):
            sizes_n1 = np.array([lengths[index] for index in bucket])[:, None]
            length = max(int(sizes_n1.max()), MIN_CONTINUED_ROWS if depth else 1)
            starts_n1 = np.array([row_starts[index] for index in bucket])[:, None]
            rows_C = (starts_n1 + np.minimum(np.arange(length), sizes_n1 - 1)).ravel()
            states = np.array([state_of.get(tree.nodes[index].parent, ROOT) for index in bucket])
            parents_n = upload(states, device) if depth else None
            batches.append(StateBatch(tuple(starts_n1[:, 0].tolist()), length, rows_C, parents_n, not is_leaf))
            if not is_leaf:
                state_of |= {index: len(state_of) + offset for offset, index in enumerate(bucket)}
    return batches


def _group_nodes(depths: Sequence[int], parents: Container[int]) -> dict[tuple[int, bool], list[int]]:
    """The nodes of each depth, by whether they are leaves."""
    groups: dict[tuple[int, bool], list[int]] = {}
    for index, depth in enumerate(depths):
        groups.setdefault((depth, index not in parents), []).append(index)
    return groups


class _WithStarts:
    """A mixer whose sequences begin at other rows of the call than of its input."""

    def __init__(self, mixer: Mixer, first_rows: dict[int, int]) -> None:
        self.layer, self.is_whole = mixer.layer, mixer.is_whole
        self._mixer, self._first_rows = mixer, first_rows

    def __call__(
        self,
        x_nLD: Tensor,
        starts: tuple[int, ...],
        state: MixerState | LayerSlots | None = None,
        *,
        keep: bool = False,
    ) -> tuple[Tensor, MixerState | None]:
        return self._mixer(x_nLD, tuple(self._first_rows[start] for start in starts), state, keep=keep)


def _select_states(states: Sequence[MixerState], parents_n: Tensor) -> MixerState:
    parts = []
    for tensors in zip(*states, strict=True):
        present = [x for x in tensors if x is not None]
        parts.append(torch.cat(present).index_select(0, parents_n) if present else None)
    return MixerState(*parts)


def _list_parts(tree: PrefixTree) -> list[PrefixPart]:
    starts = tree.row_starts
    stops = list(range(1, len(tree.nodes) + 1))  # the node after the last descendant of each node
    for index in reversed(range(len(tree.nodes))):
        if (parent := tree.nodes[index].parent) != ROOT:
            stops[parent] = max(stops[parent], stops[index])
    return [
        PrefixPart(slice(starts[index + 1], starts[stop]), slice(starts[index], starts[index + 1]))
        for index, stop in enumerate(stops)
        if stop > index + 1
    ]


# Attention in parts.


PROBE = PrefixTree((Node(0, 0, 9), Node(0, 9, 14, 0), Node(1, 9, 12, 0), Node(2, 0, 5)), (1, 2, 3))
"""Two sequences that begin alike, and a third one."""


def has_part_kernel(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> bool:
    """Whether this device has a kernel that returns log sums, for heads of these sizes. A GPU's is checked once."""
    if not suits_parts(q_THD, v_TGD):
        return False
    return is_on_host(q_THD) or check_parts(q_THD.device, q_THD.dtype, (q_THD.shape[1], k_TGD.shape[1], q_THD.shape[2]))


@cache
def check_parts(device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]) -> bool:
    """Whether attention in parts over a small tree, and its gradients, are those of the unfolded sequences; a device on
    which they are not unfolds. `heads`: query heads, key heads, head dim.
    """
    num_heads, num_keys, dim = heads
    plan, generator = PackedTree(PROBE, device), torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(sum(PROBE.lengths), count, dim, generator=generator).to(device, dtype)
        for count in (num_heads, num_keys, num_keys, num_heads)
    ]
    grad_THD = inputs.pop()

    def attend(*rows: Tensor) -> Tensor:
        return cast(Tensor, _TreeAttention.apply(*rows, None, plan, dim**-0.5))

    def unfold(*rows: Tensor) -> Tensor:
        q_THD, k_TGD, v_TGD = rows
        return plan.attend_unfolded(0, q_THD, k_TGD, v_TGD, scale=dim**-0.5)

    return equals_reference(attend, unfold, inputs, grad_THD, consequence="attention over shared rows unfolds them")


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, sinks_H: Tensor | None, plan: PackedTree, scale: float
    ) -> Tensor:
        kernel = part_kernel(q_THD)
        outputs, log_sums = [], []
        for q_nLHD, k_nLGD, v_nLGD in zip(*(plan.nodes.pad_groups(x) for x in (q_THD, k_TGD, v_TGD)), strict=True):
            out_nLHD, log_sum_nLH = kernel.forward(q_nLHD, k_nLGD, v_nLGD, scale, is_causal=True)
            outputs.append(out_nLHD)
            log_sums.append(log_sum_nLH)
        out_THD, log_sum_TH = plan.nodes.unpad_groups(outputs), plan.nodes.unpad_groups(log_sums)
        wide_THD = out_THD.to(torch.promote_types(out_THD.dtype, torch.float32), copy=True)
        for queries, keys in plan.parts:
            q_nLHD, k_nLGD, v_nLGD = q_THD[queries][None], k_TGD[keys][None], v_TGD[keys][None]
            out_nLHD, log_sum_nLH = kernel.forward(q_nLHD, k_nLGD, v_nLGD, scale, is_causal=False)
            join_(wide_THD[queries], log_sum_TH[queries], out_nLHD[0], log_sum_nLH[0])
        if sinks_H is not None:
            add_sinks_(wide_THD, log_sum_TH, sinks_H)
        out_THD = wide_THD.to(q_THD.dtype)
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, sinks_H, out_THD, log_sum_TH)
        ctx.plan, ctx.scale = plan, scale
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_THD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q_THD, k_TGD, v_TGD, sinks_H, out_THD, log_sum_TH = ctx.saved_tensors
        plan, scale, kernel = ctx.plan, ctx.scale, part_kernel(q_THD)
        padded = [plan.nodes.pad_groups(x) for x in (q_THD, k_TGD, v_TGD, out_THD, log_sum_TH)]
        padded.append(plan.nodes.pad_gradient(grad_THD))
        parts = [kernel.backward(*inputs, scale, is_causal=True) for inputs in zip(*padded, strict=True)]  # pyright: ignore[reportCallIssue]
        grads = tuple(plan.nodes.unpad_groups(tensors) for tensors in zip(*parts, strict=True))
        for queries, keys in plan.parts:
            rows = q_THD[queries], k_TGD[keys], v_TGD[keys], out_THD[queries], log_sum_TH[queries], grad_THD[queries]
            part_grads = kernel.backward(*(x[None] for x in rows), scale, is_causal=False)  # pyright: ignore[reportCallIssue]
            for grad, share, part in zip(grads, part_grads, (queries, keys, keys), strict=True):
                grad[part] += share[0]
        sinks_grad = sink_gradient(sinks_H, out_THD, log_sum_TH, grad_THD) if ctx.needs_input_grad[3] else None
        return *grads, sinks_grad, None, None
