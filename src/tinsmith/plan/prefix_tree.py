"""Sequences that begin alike as trees, in which each run of tokens that several sequences share is one node.

A node is a run of tokens of a sequence and of every sequence below it. The tokens of a sequence are those of the nodes
from a root to the node with which it ends. Nodes are listed depth first, so a node comes before its children, and its
descendants are the nodes that follow it directly. Uses numpy; knows no model, loss or adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tinsmith.types import Datum, Image

ROOT = -1
"""The parent of a node that begins a sequence."""

Tokens = npt.NDArray[np.integer[Any]]


class Node(NamedTuple):
    """Tokens start..stop of a sequence, after those of node `parent`."""

    sequence: int
    start: int
    stop: int
    parent: int = ROOT

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


class PrefixTree(NamedTuple):
    """`ends[i]` is the node with which sequence i ends; several sequences may end with one."""

    nodes: tuple[Node, ...]
    ends: tuple[int, ...]

    @classmethod
    def separate(cls, lengths: Iterable[int]) -> PrefixTree:
        """Every sequence is a node of its own."""
        nodes = tuple(Node(index, 0, length) for index, length in enumerate(lengths))
        return cls(nodes, tuple(range(len(nodes))))

    @property
    def has_shared_rows(self) -> bool:
        return len(set(self.ends)) < len(self.ends) or any(node.parent != ROOT for node in self.nodes)

    @property
    def is_path(self) -> bool:
        """Whether every node is on the way to the last one, so that no part could be computed without the others."""
        return all(node.parent == index - 1 for index, node in enumerate(self.nodes))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each node."""
        return [node.num_tokens for node in self.nodes]

    @property
    def row_starts(self) -> list[int]:
        """The first row of each node, if the nodes' rows are adjacent, and the number of rows."""
        return [0, *accumulate(self.lengths)]

    @property
    def sequence_lengths(self) -> list[int]:
        return [self.nodes[end].stop for end in self.ends]

    @property
    def parents(self) -> set[int]:
        """The nodes with children."""
        return {node.parent for node in self.nodes} - {ROOT}

    def path(self, sequence: int) -> list[int]:
        """The nodes of a sequence, from its root on."""
        nodes, index = [], self.ends[sequence]
        while index != ROOT:
            nodes.append(index)
            index = self.nodes[index].parent
        return nodes[::-1]

    @property
    def token_rows(self) -> npt.NDArray[np.int64]:
        """[C] the row of each token of each sequence, one sequence after the other."""
        ranges = [np.arange(start, stop) for start, stop in pairwise(self.row_starts)]
        parts = [ranges[index] for sequence in range(len(self.ends)) for index in self.path(sequence)]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def list_units(self) -> list[tuple[list[int], int]]:
        """The sequences of each root, depth first, and the number of its tree's tokens."""
        sequences: list[list[int]] = [[] for _ in self.nodes]
        for sequence, index in enumerate(self.ends):
            sequences[index].append(sequence)
        units: list[tuple[list[int], int]] = []
        for node, members in zip(self.nodes, sequences, strict=True):
            unit, num_tokens = units.pop() if node.parent != ROOT else ([], 0)
            unit.extend(members)
            units.append((unit, num_tokens + node.num_tokens))
        return units


@dataclass(eq=False, slots=True)
class _Branch:
    """A node of a tree that grows."""

    sequence: int
    start: int
    stop: int
    parent: _Branch | None
    children: list[_Branch] = field(default_factory=list)


MIN_SHARED_ROWS = 32
"""The fewest tokens that sequences share: each shared run costs calls of its own in every layer."""


def count_shared_tokens(data: Sequence[Datum]) -> int:
    """The tokens of these data that others of them begin with, too, each but for its first time."""
    if len(data) < 2:
        return 0
    tree = build_tree(list_keys([(datum.tokens_N, datum.images) for datum in data]), MIN_SHARED_ROWS)
    return sum(tree.sequence_lengths) - sum(tree.lengths)


def list_keys(sequences: Iterable[tuple[Tokens, Iterable[Image]]]) -> list[Tokens]:
    """Each sequence's tokens, with a negative number for each image in place of its tokens, which all images have."""
    key_of_image: dict[bytes, int] = {}
    keys = []
    for tokens_N, images in sequences:
        key_N = tokens_N
        for image in images:
            key_N = key_N.copy() if key_N is tokens_N else key_N
            key_N[image.start : image.stop] = key_of_image.setdefault(image.digest, -1 - len(key_of_image))
        keys.append(key_N)
    return keys


def build_tree(sequences: Sequence[Tokens], min_rows: int, cut: Callable[[int, int], int] | None = None) -> PrefixTree:
    """The tree of these sequences, which are not empty. A run is shared if it has at least `min_rows` tokens, or if
    sequences are equal. `cut(i, n)`: how many of the first n tokens of sequence i may become a node of their own.
    """
    keys = [np.ascontiguousarray(tokens).tobytes() for tokens in sequences]
    roots: list[_Branch] = []
    ends: dict[int, _Branch] = {}
    path: list[_Branch] = []
    previous = ROOT
    # Neighbours in this order have the longest common beginnings, and path is always that of the sequence before.
    for sequence in sorted(range(len(sequences)), key=keys.__getitem__):
        tokens = sequences[sequence]
        common = count_common(sequences[previous], tokens) if path else 0
        if cut is not None:
            common = cut(sequence, common)
        _follow(path, common, len(tokens), min_rows, roots)
        start = path[-1].stop if path else 0
        if start < len(tokens):
            parent = path[-1] if path else None
            branch = _Branch(sequence, start, len(tokens), parent)
            (parent.children if parent else roots).append(branch)
            path.append(branch)
        ends[sequence], previous = path[-1], sequence
    return _list_nodes(roots, ends)


def count_common(first: Tokens, second: Tokens) -> int:
    """How many tokens two sequences have in common at their beginning."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    index = int(differs.argmax()) if length else 0
    return index if length and differs[index] else length


def _follow(path: list[_Branch], common: int, length: int, min_rows: int, roots: list[_Branch]) -> None:
    """Shorten the path to the nodes that a sequence of this length, which has `common` tokens with it, shares."""
    while path:
        branch = path[-1]
        num_shared = min(branch.stop, common) - branch.start
        is_leaf = not branch.children and length > branch.stop
        if num_shared >= min_rows or (branch.stop <= common and not is_leaf):
            break
        path.pop()
    if path and path[-1].stop > common:
        path[-1] = _split(path[-1], common, roots)


def _split(branch: _Branch, position: int, roots: list[_Branch]) -> _Branch:
    """The new parent of a branch, with its tokens before the position."""
    upper = _Branch(branch.sequence, branch.start, position, branch.parent, [branch])
    siblings = branch.parent.children if branch.parent else roots
    siblings[siblings.index(branch)] = upper
    branch.start, branch.parent = position, upper
    return upper


def _list_nodes(roots: list[_Branch], ends: dict[int, _Branch]) -> PrefixTree:
    nodes: list[Node] = []
    index_of: dict[_Branch | None, int] = {None: ROOT}
    waiting = roots[::-1]
    while waiting:
        branch = waiting.pop()
        index_of[branch] = len(nodes)
        nodes.append(Node(branch.sequence, branch.start, branch.stop, index_of[branch.parent]))
        waiting += branch.children[::-1]
    return PrefixTree(tuple(nodes), tuple(index_of[ends[sequence]] for sequence in range(len(ends))))
