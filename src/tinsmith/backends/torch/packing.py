"""The examples of a step as micro-batches of packed rows.

`pack` sorts examples by adapter and pass, so that each adapter's rows are one segment, and cuts the list by a budget of
rows; a sequence is never cut and nothing is padded. Examples of one adapter that begin alike share rows, also across
passes; those of different adapters never do, so one tenant's numbers stay apart from another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from tinsmith.backends.torch.batch import Example, MicroBatch
from tinsmith.plan.prefix_tree import ROOT, Node, PrefixTree, build_tree, list_keys


class Unit(NamedTuple):
    """Examples of one adapter with a common beginning: sequences of `tree`, depth first, and their rows."""

    tree: PrefixTree
    sequences: list[int]
    num_rows: int
    examples: Sequence[Example]
    """The examples of all sequences of the tree."""

    @property
    def members(self) -> list[Example]:
        return [self.examples[sequence] for sequence in self.sequences]

    def halve(self) -> list[Unit]:
        """Two units, each of which has the rows that both need."""
        middle = len(self.sequences) // 2
        halves = []
        for sequences in (self.sequences[:middle], self.sequences[middle:]):
            indices = {index for sequence in sequences for index in self.tree.path(sequence)}
            num_rows = sum(self.tree.nodes[index].num_tokens for index in indices)
            halves.append(self._replace(sequences=sequences, num_rows=num_rows))
        return halves


def pack(
    examples: Sequence[Example], max_tokens: int, min_shared_rows: int = 0, max_tree_tokens: int = 0
) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` rows; a longer example gets its own. `min_shared_rows`: the fewest tokens
    with which examples of an adapter must begin alike to share their rows; 0: nothing is shared.

    Examples that share rows are in one micro-batch, of at most `max_tree_tokens` rows if that is more, if all of them
    fit; otherwise each of their micro-batches repeats the shared rows that it needs.
    """
    builders = [_Builder()]
    for unit in list_units(examples, min_shared_rows):
        limit = max(max_tokens, max_tree_tokens if len(unit.sequences) > 1 else 0)
        if builders[-1].num_rows + unit.num_rows > max_tokens and unit.num_rows <= limit:
            builders.append(_Builder())
        for sequence in unit.sequences:
            num_new_rows = builders[-1].count_new_rows(unit.tree, sequence)
            if num_new_rows and builders[-1].num_rows + num_new_rows > limit:
                builders.append(_Builder())
            builders[-1].add(unit.tree, sequence, unit.examples[sequence])
    return [builder.build() for builder in builders if builder.num_rows]


def list_units(examples: Sequence[Example], min_shared_rows: int) -> list[Unit]:
    """By adapter, then by pass, and the longest first, so that sequences of similar length are neighbours."""
    by_adapter: dict[int, list[Example]] = {}
    for example in examples:
        by_adapter.setdefault(id(example.adapter), []).append(example)
    units = []
    for members in by_adapter.values():
        if min_shared_rows and len(members) > 1:
            inputs = [(e.tokens_N, e.image_input.images if e.image_input else ()) for e in members]
            tree = build_tree(list_keys(inputs), min_shared_rows, partial(_cut, members))
        else:
            tree = PrefixTree.separate(example.num_tokens for example in members)
        units += sorted((Unit(tree, *unit, members) for unit in tree.list_units()), key=_rank)
    return units


def _rank(unit: Unit) -> tuple[int, int, int]:
    first = min(unit.members, key=lambda example: (example.pass_index, example.datum_index))
    return first.pass_index, -max(example.num_tokens for example in unit.members), first.datum_index


def _cut(examples: Sequence[Example], sequence: int, length: int) -> int:
    """How many of an example's first tokens may be a node: tokens of a bidirectional image stay together."""
    image_input = examples[sequence].image_input
    end = length if image_input is None else image_input.piece_end(0, length)
    return end if end <= length else 0


class _Builder:
    """A micro-batch that grows."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._examples: list[Example] = []
        self._nodes: list[Node] = []
        self._ends: list[int] = []
        self._index_of: dict[tuple[int, int], int] = {}  # by the tree's identity and the node's index in it

    def count_new_rows(self, tree: PrefixTree, sequence: int) -> int:
        """The rows that a sequence adds; 0 if there is nothing yet, since even the longest sequence must fit."""
        if not self._examples:
            return 0
        new = (index for index in tree.path(sequence) if (id(tree), index) not in self._index_of)
        return sum(tree.nodes[index].num_tokens for index in new)

    def add(self, tree: PrefixTree, sequence: int, example: Example) -> None:
        """The sequences of a unit must come in their order, each unit after the other."""
        parent = ROOT
        for index in tree.path(sequence):
            if (id(tree), index) not in self._index_of:
                self._index_of[id(tree), index] = len(self._nodes)
                self._nodes.append(tree.nodes[index]._replace(sequence=len(self._examples), parent=parent))
                self.num_rows += tree.nodes[index].num_tokens
            parent = self._index_of[id(tree), index]
        self._ends.append(parent)
        self._examples.append(example)

    def build(self) -> MicroBatch:
        tree = PrefixTree(tuple(self._nodes), tuple(self._ends))
        return MicroBatch(tuple(self._examples), tree=tree if tree.has_shared_rows else None)
