"""Trees of sequences that begin alike: a sequence is the concatenation of its nodes, and nothing is listed twice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.properties import examples
from tinsmith.plan.prefix_tree import (
    ROOT,
    Node,
    PrefixTree,
    build_tree,
    count_common,
    count_shared_tokens,
    list_keys,
)
from tinsmith.types import Datum, Image

# Few different tokens, so that many sequences begin alike; several equal ones, and some that are others' beginnings.
SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=10)


def arrays(sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    return [np.array(sequence, np.int32) for sequence in sequences]


def tokens_of(tree: PrefixTree, sequences: Sequence[Sequence[int]], sequence: int) -> list[int]:
    nodes = [tree.nodes[index] for index in tree.path(sequence)]
    return [token for node in nodes for token in sequences[node.sequence][node.start : node.stop]]


@examples(200)
@given(SEQUENCES, st.integers(1, 5))
def test_a_sequence_is_the_tokens_of_its_nodes(sequences: list[list[int]], min_rows: int) -> None:
    tree = build_tree(arrays(sequences), min_rows)
    assert [tokens_of(tree, sequences, index) for index in range(len(sequences))] == sequences
    for sequence in range(len(sequences)):
        path = [tree.nodes[index] for index in tree.path(sequence)]
        assert [node.start for node in path] == [0, *(node.stop for node in path[:-1])]
    assert sum(tree.lengths) <= sum(map(len, sequences))
    rows = np.concatenate([np.array(sequences[node.sequence][node.start : node.stop]) for node in tree.nodes])
    assert rows[tree.token_rows].tolist() == [token for sequence in sequences for token in sequence]


@examples(200)
@given(SEQUENCES)
def test_with_a_least_size_of_one_every_common_beginning_is_shared(sequences: list[list[int]]) -> None:
    tree = build_tree(arrays(sequences), 1)
    beginnings = {tuple(sequence[:stop]) for sequence in sequences for stop in range(1, len(sequence) + 1)}
    assert sum(tree.lengths) == len(beginnings)


@examples(200)
@given(SEQUENCES, st.integers(1, 5))
def test_descendants_follow_their_node(sequences: list[list[int]], min_rows: int) -> None:
    tree = build_tree(arrays(sequences), min_rows)
    for index in range(len(tree.nodes)):
        descendants = [later for later in range(len(tree.nodes)) if index in ancestors(tree, later)]
        assert descendants == list(range(index + 1, index + 1 + len(descendants)))


def ancestors(tree: PrefixTree, index: int) -> list[int]:
    indices = []
    while (index := tree.nodes[index].parent) != ROOT:
        indices.append(index)
    return indices


@examples(200)
@given(SEQUENCES, st.integers(1, 5))
def test_units_have_every_sequence_once_with_all_tokens_of_its_root(sequences: list[list[int]], min_rows: int) -> None:
    tree = build_tree(arrays(sequences), min_rows)
    units = tree.list_units()
    assert sorted(index for members, _ in units for index in members) == list(range(len(sequences)))
    assert sum(num_tokens for _, num_tokens in units) == sum(tree.lengths)
    for members, num_tokens in units:
        (root,) = {tree.path(sequence)[0] for sequence in members}
        nodes = {index for sequence in members for index in tree.path(sequence)}
        assert root in nodes and num_tokens == sum(tree.nodes[index].num_tokens for index in nodes)


def test_short_beginnings_are_not_shared_and_equal_sequences_always_are() -> None:
    first, second = [1, 2, 3, 4], [1, 2, 3, 5]
    assert build_tree(arrays([first, second]), 4) == PrefixTree((Node(0, 0, 4), Node(1, 0, 4)), (0, 1))
    shared = build_tree(arrays([first, second]), 3)
    assert shared == PrefixTree((Node(0, 0, 3), Node(0, 3, 4, 0), Node(1, 3, 4, 0)), (1, 2))
    assert shared.has_shared_rows and not shared.is_path
    equal = build_tree(arrays([[7], [7]]), 4)
    assert equal == PrefixTree((Node(0, 0, 1),), (0, 0)) and equal.has_shared_rows and equal.is_path
    # The beginning of another sequence ends with an inner node.
    assert build_tree(arrays([[1, 2, 3, 4], [1, 2]]), 2) == PrefixTree((Node(1, 0, 2), Node(0, 2, 4, 0)), (1, 0))
    assert build_tree(arrays([[1, 2, 3, 4], [1, 2]]), 3).lengths == [2, 4]


def test_a_node_ends_only_where_it_may() -> None:
    sequences = arrays([[1, 1, 9, 9, 9, 2], [1, 1, 9, 9, 9, 3], [1, 1, 9, 9, 4, 4]])

    def cut(sequence: int, length: int) -> int:
        return 2 if 2 < length < 5 else length

    assert build_tree(sequences, 1, cut).lengths == [2, 4, 3, 1, 1]


def test_chains_of_a_thousand_turns_are_built_without_recursion() -> None:
    tokens = np.arange(4000)
    tree = build_tree([tokens[: 4 * turn] for turn in range(1, 1001)], 4)
    assert tree.lengths == [4] * 1000 and tree.is_path and tree.has_shared_rows
    assert len(tree.path(999)) == 1000


@pytest.mark.parametrize(
    ("first", "second", "common"), [([1, 2], [1, 2], 2), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([2], [1], 0)]
)
def test_common_beginnings_are_counted(first: list[int], second: list[int], common: int) -> None:
    assert count_common(np.array(first), np.array(second)) == common


def test_separate_sequences_share_nothing() -> None:
    tree = PrefixTree.separate([3, 2])
    assert tree == PrefixTree((Node(0, 0, 3), Node(1, 0, 2)), (0, 1))
    assert not tree.has_shared_rows and not tree.is_path


def image(start: int, digest: bytes) -> Image:
    return Image("path", b"", "png", 8, 8, start, 4, digest)


def test_tokens_shared_by_data_are_counted_with_their_images() -> None:
    prompt = np.arange(40, dtype=np.int32)
    texts = [Datum(np.concatenate([prompt, [50 + i]]).astype(np.int32), {}) for i in range(3)]
    assert count_shared_tokens(texts) == 80 and count_shared_tokens(texts[:1]) == 0
    pictures = [
        Datum(datum.tokens_N, {}, (image(2, digest),)) for datum, digest in zip(texts, (b"a", b"a", b"b"), strict=True)
    ]
    assert count_shared_tokens(pictures) == 40, "the third image is another one"
    first, second, third = list_keys([(datum.tokens_N, datum.images) for datum in pictures])
    assert first[2:6].tolist() == second[2:6].tolist() == [-1] * 4 and third[2:6].tolist() == [-2] * 4
    assert texts[0].tokens_N[2] == 2, "the tokens themselves are unchanged"
