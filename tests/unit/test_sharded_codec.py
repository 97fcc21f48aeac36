"""Messages between ranks are encoded without loss, other types are refused, and sequences are distributed evenly."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.properties import examples
from support.ranked import NAMED_LOSSES, pass_of, samples
from tinsmith.backends.distributed.processes import decode, encode
from tinsmith.backends.distributed.trainer import distribute_examples
from tinsmith.errors import NotFoundError
from tinsmith.plan.degrees import Degrees
from tinsmith.types import AdamParams, LoraSpec, ModelShape, SparseRows

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text() | st.binary() | st.just(...),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def are_equal(first: object, second: object) -> bool:
    if isinstance(first, np.ndarray):
        return (
            isinstance(second, np.ndarray)
            and first.dtype == second.dtype
            and np.array_equal(first, second, equal_nan=True)
        )
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        return type(first) is type(second) and all(
            are_equal(getattr(first, field.name), getattr(second, field.name)) for field in dataclasses.fields(first)
        )
    if isinstance(first, dict):
        return (
            isinstance(second, dict)
            and first.keys() == second.keys()
            and all(are_equal(first[k], second[k]) for k in first)
        )
    if isinstance(first, list | tuple):
        assert isinstance(second, list | tuple)
        return type(first) is type(second) and len(first) == len(second) and all(map(are_equal, first, second))
    if isinstance(first, float) and math.isnan(first):
        return isinstance(second, float) and math.isnan(second)
    return type(first) is type(second) and first == second


@examples(200)
@given(PLAIN)
def test_plain_values_come_back_as_they_were(value: object) -> None:
    assert are_equal(value, decode(encode(value)))


@pytest.mark.parametrize("loss_fn", NAMED_LOSSES)
def test_passes_come_back_as_they_were(loss_fn: str) -> None:
    rng = np.random.default_rng(0)
    messages = [pass_of(rng, 0, [3, 1, 8], loss_fn), *samples(), LoraSpec(4), AdamParams(1e-4), Degrees(2, 2, True)]
    messages += [ModelShape("a", "b", 1, 2, "c"), SparseRows(np.ones(1, np.float32), np.zeros(2, np.int64),
              np.zeros(1, np.int64), (1, 4)), np.zeros((0, 3)), np.array(2.5)]  # fmt: skip
    assert are_equal(messages, decode(encode(messages)))


def test_errors_keep_their_class_and_their_words() -> None:
    error = decode(encode(NotFoundError("nothing here")))
    assert type(error) is NotFoundError and str(error) == "nothing here"


class Strange:
    pass


@pytest.mark.parametrize("value", [Strange(), {1, 2}, print, ValueError("no")])
def test_unsupported_types_are_not_sent(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be sent between ranks"):
        encode([value])


def test_bytes_make_no_other_classes() -> None:
    forged = msgpack.packb(msgpack.ExtType(3, encode(["Popen", ["true"]])))
    assert forged is not None
    with pytest.raises(KeyError):
        decode(forged)


class Weighed(NamedTuple):
    num_tokens: int
    adapter: object = None
    pass_index: int = 0
    datum_index: int = 0


@examples(200)
@given(st.lists(st.integers(1, 1000), max_size=30), st.integers(1, 5))
def test_sequences_are_shared_out_evenly(sizes: list[int], num_shares: int) -> None:
    shares = distribute_examples([Weighed(size) for size in sizes], num_shares)  # type: ignore[list-item]
    assert sorted(weighed.num_tokens for share in shares for weighed in share) == sorted(sizes)
    filled = [sum(weighed.num_tokens for weighed in share) for share in shares]
    if sizes:
        assert max(filled) - min(filled) <= max(sizes)
