"""Parsing any bytes returns a value or raises UserError, within bounds of time and memory. Inputs are random bytes,
corrupted valid messages, and data that is small on the wire and large in memory. `make test-fuzz` runs longer.
"""

from __future__ import annotations

import contextlib
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import orjson
import pytest
import zstandard
from google.protobuf.internal.encoder import _VarintBytes  # type: ignore[attr-defined]
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.http_harness import SHAPES, pass_bytes, sample_request
from support.properties import examples
from tinsmith.api import legacy
from tinsmith.api.routes.training import check_optimizer
from tinsmith.cluster.sample_admission import check_sample
from tinsmith.errors import TooLargeError, UserError
from tinsmith.losses import check_pass, loss_id_of
from tinsmith.losses.graphs import check_graph
from tinsmith.wire import bodies, custom_loss, fields, sampling, training, weights
from tinsmith.wire import tinker_public_pb2 as pb

MIB = 1 << 20
SHAPE = SHAPES[0]
FUZZ = settings(examples(120), deadline=5000, suppress_health_check=list(HealthCheck))
KNOWN_LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "stable_reinforce", "custom:x", "", "é"]


def judge_pass(body: bytes) -> None:
    """Parse and check a pass as the server does before it stores it."""
    message = training.parse_pass(body)
    pass_ = training.pass_of(message, "r")
    training.spans_of(message)
    loss_id_of(pass_)
    check_pass(pass_, SHAPE)


# Protobuf.


@pytest.mark.smoke
@FUZZ
@given(st.binary(max_size=300))
def test_random_bytes_are_no_pass_or_a_wrong_one(body: bytes) -> None:
    with contextlib.suppress(UserError):
        judge_pass(body)


VALID = pass_bytes("m", 1, loss_fn_config_v2={"a": pb.LossConfigValue(number=1.0)})
CHANGES = st.lists(st.tuples(st.integers(0, len(VALID)), st.integers(0, 3), st.binary(max_size=6)), max_size=4)


def apply_changes(body: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    """The bytes with random cuts and insertions."""
    for at, cut, put in changes:
        body = body[:at] + put + body[at + cut :]
    return body


@FUZZ
@given(CHANGES, st.integers(0, len(VALID)))
def test_a_pass_with_wrong_bytes_in_it_is_refused_or_read(changes: list[tuple[int, int, bytes]], end: int) -> None:
    for body in (
        apply_changes(VALID, changes),
        apply_changes(VALID, changes)[:end],
        VALID + apply_changes(VALID, changes),
    ):
        with contextlib.suppress(UserError):
            judge_pass(body)


RAW = st.one_of(
    st.binary(max_size=40),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5).map(lambda values: np.array(values, "<i8").tobytes()),
    st.lists(st.floats(width=32), max_size=5).map(lambda values: np.array(values, "<f4").tobytes()),
    st.lists(st.integers(-3, 60), max_size=5).map(lambda values: np.array(values, "<i4").tobytes()),
)
SIZES = st.lists(st.one_of(st.integers(-2, 6), st.sampled_from([2**31, 2**40, 2**62, -(2**63)])), max_size=10)


@st.composite
def tensors(draw: st.DrawFn) -> pb.Tensor:
    message = pb.Tensor(shape=draw(SIZES))
    message.dtype = draw(st.sampled_from([0, 1, 2, 3, 4, 9]))  # type: ignore[assignment]
    if draw(st.booleans()):
        message.dense = draw(RAW)
    elif draw(st.booleans()):
        crow, col = draw(RAW), draw(RAW)
        message.sparse_csr.CopyFrom(pb.SparseCsr(values=draw(RAW), crow_indices=crow, col_indices=col))
    return message


@st.composite
def passes(draw: st.DrawFn) -> bytes:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn=draw(st.sampled_from(KNOWN_LOSSES)))
    for key in draw(st.lists(st.text(max_size=5), max_size=3)):
        message.loss_fn_config[key] = draw(st.floats())
        if draw(st.booleans()):
            message.loss_fn_config_v2[key].CopyFrom(pb.LossConfigValue())
    names = st.sampled_from(["target_tokens", "weights", "logprobs", "advantages", "other"])
    for _ in range(draw(st.integers(0, 3))):
        datum = message.data.add()
        for _ in range(draw(st.integers(0, 2))):
            datum.model_input.add().encoded_text.tokens = draw(RAW)
        if draw(st.integers(0, 9)) == 0:
            datum.model_input.add().image.data = b"x"
        for name in draw(st.lists(names, max_size=4)):
            datum.loss_fn_inputs[name].CopyFrom(draw(tensors()))
        if draw(st.booleans()):
            span = datum.model_input_spans.add().sampled_tokens
            span.offset, span.length = draw(st.integers(-5, 2**62)), draw(st.integers(-5, 2**62))
    return message.SerializeToString()


@FUZZ
@given(passes())
def test_arrays_of_any_type_shape_and_content_are_refused_or_read(body: bytes) -> None:
    with contextlib.suppress(UserError):
        judge_pass(body)


@pytest.mark.parametrize("shape", [[0, 2**62], [2**62, 0], [0, 2**40, 2**40], [0, 2**48 + 1]])
def test_an_array_without_cells_may_not_have_sizes_beyond_counting(shape: list[int]) -> None:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    tensor = message.data.add().loss_fn_inputs["weights"]
    tensor.CopyFrom(pb.Tensor(dense=b"", dtype=pb.DTYPE_FLOAT32, shape=shape))
    with pytest.raises(UserError, match="shape is"):
        training.read_pass(message.SerializeToString(), "r")
    request = READERS[read_sample] | {"target_prompt_logprobs": {"data": [], "dtype": "int64", "shape": shape}}
    with pytest.raises(UserError, match="shape is"):
        read_sample(fields.read_object(orjson.dumps(request)))


def test_a_key_that_comes_twice_counts_once() -> None:
    entry = pb.Datum(loss_fn_inputs={"weights": pb.Tensor(dense=b"\0" * 4, dtype=pb.DTYPE_FLOAT32)})
    twice = pb.Datum.FromString(entry.SerializeToString() * 2)
    assert list(twice.loss_fn_inputs) == ["weights"]


# JSON.

STRANGE: list[object] = [
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1e308, -1e308, 1e-320, 0.5,
    "", "a", "\x00", "x" * 5000, "..", "../../etc/passwd", "tinker://a/weights/b", "é\u202e\U0001f600", [], {}, [[]],
    [1, 2], [1, [2]], [1, "a"], ["a"], [None], [1.5], [True], [2**63], [{}], {"a": 1}, {"": {}}, {"\x00": "\x00"},
    [0, 2**62], [2**62, 0], {"ref": "x"}, {"tuple": [{"slice": [1, None, {"float": "nan"}]}]},
    {"chunks": [{"type": "image"}]},
]  # fmt: skip
NODES = [
    {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
    {
        "op": "call_function",
        "name": "y",
        "target": "torch.sum",
        "args": [{"ref": "logprobs"}, {"tuple": [0]}],
        "kwargs": {"dtype": {"dtype": "float32"}},
    },
    {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "y"}, {"dict": {}}]}]},
]
TENSOR = {"data": [1, 2], "dtype": "int64", "shape": [1, 2], "sparse_crow_indices": None, "sparse_col_indices": None}
DATUM = {
    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [1, 2], "dtype": "int64", "shape": [2]},
        "logprobs": [1.0, 2.0],
        "advantages": {"data": [1.0, 2.0], "dtype": "float32"},
    },
}
PARAMS = {"max_tokens": 3, "seed": 1, "stop": ["a"], "temperature": 1.0, "top_k": 5, "top_p": 0.5}


def read_sample(body: dict[str, Any]) -> None:
    check_sample(sampling.sample_of(fields.validate(sampling.SampleRequest, body), "r", None), SHAPE)


def read_model(body: dict[str, Any]) -> None:
    assert fields.validate(weights.CreateModel, body).lora.rank > 0


def read_step(body: dict[str, Any]) -> None:
    request = fields.validate(training.OptimStepRequest, body)
    check_optimizer("adamw", training.optim_step_of(request, "r").params)


def read_loss(body: dict[str, Any]) -> None:
    check_graph(custom_loss.create_custom_loss_of(body).loss)


def read_json_pass(body: dict[str, Any]) -> None:
    judge_pass(legacy.pass_message(body, forward_only=False).SerializeToString())


def read_prompts(body: dict[str, Any]) -> None:
    request = fields.validate(legacy.SamplesRequest, {"prompts": [], **body})
    legacy.sample_body(request, body.get("prompt"), "prompts[0]")


def read_save(body: dict[str, Any]) -> None:
    fields.validate(weights.SaveRequest, body)


def read_load(body: dict[str, Any]) -> None:
    fields.validate(weights.LoadWeights, body)


READERS: dict[Callable[[dict[str, Any]], object], dict[str, Any]] = {
    read_sample: sample_request(
        "s", sampling_params=PARAMS, target_prompt_logprobs=TENSOR, prompt_logprobs=True, prompt_logprobs_last_n=1
    ),
    read_model: {
        "session_id": "s",
        "model_seq_id": 0,
        "base_model": "b",
        "lora_config": {"rank": 4, "seed": 1, "train_mlp": True},
        "optimizer_config": {"type": "adamw"},
        "user_metadata": {"a": {"b": [1]}},
    },
    read_step: {"model_id": "m", "seq_id": 1, "adam_params": {"learning_rate": 0.1, "beta1": 0.9, "eps": 1e-8}},
    read_loss: {
        "session_id": "s",
        "custom_loss_seq_id": 0,
        "name": "n",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"format": 1, "nodes": NODES},
    },
    read_json_pass: {"model_id": "m", "loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": 0.8}, "data": [DATUM]},
    read_prompts: {"prompt": [1, 2], "sampling_params": PARAMS | {"stop": None, "stop_token_ids": [1]}},
    read_save: {
        "model_id": "m",
        "seq_id": 1,
        "path": "p",
        "ttl_seconds": 3600,
        "overwrite": True,
        "user_metadata": {"a": "b"},
        "age_encryption_recipients": ["age1x"],
    },
    read_load: {
        "model_id": "m",
        "path": "tinker://a/weights/b",
        "optimizer": True,
        "optimizer_config": {"type": "dimuon", "version": 1},
    },
}


def paths_in(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield (*path, key)
        yield from paths_in(child, (*path, key))


def put(body: dict[str, Any], path: tuple[Any, ...], value: object) -> dict[str, Any]:
    mutated = deepcopy(body)
    at: Any = mutated
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return mutated


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_a_strange_value_in_any_place_is_refused_or_read(reader: Callable[[dict[str, Any]], object]) -> None:
    body = READERS[reader]
    reader(fields.read_object(orjson.dumps(body)))
    for path in paths_in(body):
        for value in STRANGE:
            try:
                reader(fields.read_object(dump_json(put(body, path, value))))
            except UserError as error:
                assert str(error)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@FUZZ
@given(st.data())
def test_several_strange_values_are_refused_or_read(
    reader: Callable[[dict[str, Any]], object], data: st.DataObject
) -> None:
    body = READERS[reader]
    for _ in range(data.draw(st.integers(1, 4))):
        path = data.draw(st.sampled_from(list(paths_in(body))))
        body = put(body, path, data.draw(st.sampled_from(STRANGE)))
    with contextlib.suppress(UserError):
        reader(fields.read_object(dump_json(body)))


def dump_json(body: object) -> bytes:
    return json.dumps(body).encode()  # it writes integers of any size


@FUZZ
@given(
    st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
)
def test_random_bytes_are_no_json_or_an_object(body: bytes) -> None:
    for wrapped in (body, b'{"a":' + body + b"}", b'{"a":"' + body + b'"}'):
        with contextlib.suppress(UserError):
            fields.read_object(wrapped)


@pytest.mark.parametrize("literal", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"0x1", b'"\\ud800"', b"\xff"])
def test_non_finite_json_numbers_are_refused(literal: bytes) -> None:
    with pytest.raises(UserError):
        read_step(fields.read_object(b'{"model_id":"m","adam_params":{"learning_rate":' + literal + b"}}"))


# Compressed bodies.


@FUZZ
@given(st.binary(max_size=200), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.binary(max_size=4))))
def test_a_wrong_frame_is_refused_or_read(body: bytes, changes: list[tuple[int, int, bytes]]) -> None:
    packed = apply_changes(zstandard.ZstdCompressor().compress(body), changes)
    for wrong in (packed, packed[:-1], b"\x28\xb5\x2f\xfd" + body, body):
        with contextlib.suppress(UserError):
            assert len(bodies.decode(wrong, "zstd", MIB)) <= MIB


def compress_without_size(body: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(body) + compressor.flush()


# Data that is small on the wire.


def peak(operation: Callable[[], object]) -> tuple[int, float]:
    """The peak of Python's memory, and the seconds of the call."""
    tracemalloc.start()
    started = time.monotonic()
    try:
        with contextlib.suppress(UserError):
            operation()
        return tracemalloc.get_traced_memory()[1], time.monotonic() - started
    finally:
        tracemalloc.stop()


BOMB = b"\0" * (64 * MIB)
LYING = b"\x28\xb5\x2f\xfd\xe0" + (2**62).to_bytes(8, "little") + b"\x01\x00\x00"
TINY = {
    "bomb": (zstandard.ZstdCompressor().compress(BOMB), 0),
    "hidden bomb": (compress_without_size(BOMB), 20 * MIB),
    "frame that lies of its size": (LYING, 0),
    "frame in a frame": (zstandard.ZstdCompressor().compress(zstandard.ZstdCompressor().compress(BOMB)), 1 * MIB),
}


@pytest.mark.parametrize("name", TINY)
def test_a_bomb_costs_little_more_than_it_may(name: str) -> None:
    packed, max_bytes = TINY[name]
    assert len(packed) < 3000
    peak_bytes, seconds = peak(lambda: bodies.decode(packed, "zstd", MIB))
    assert peak_bytes < max_bytes + MIB // 4
    assert seconds < 2


DENSE = {
    "lists": b'{"a":[' + b",".join([b"[]"] * MIB) + b"]}",
    "objects": b'{"a":[' + b",".join([b"{}"] * MIB) + b"]}",
    "deep": b'{"a":' + b"[" * 1000 + b"]" * 1000 + b"}",
    "deeper": b'{"a":' + b"[" * MIB,
    "keys": b"{" + b",".join(b'"%x":0' % index for index in range(MIB // 4)) + b"}",
}


@pytest.mark.parametrize("name", DENSE)
def test_json_costs_a_bounded_multiple_of_its_size(name: str) -> None:
    body = DENSE[name]
    peak_bytes, seconds = peak(lambda: fields.read_object(body))
    assert peak_bytes < 30 * len(body) + MIB
    assert peak_bytes < 100 * MIB
    assert seconds < 5


def test_json_at_its_limits() -> None:
    def nest_lists(depth: int) -> bytes:
        return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    fields.read_object(nest_lists(fields.MAX_DEPTH))
    with pytest.raises(UserError, match="64 levels"):
        fields.read_object(nest_lists(fields.MAX_DEPTH + 1))
    assert fields.read_object(orjson.dumps({"a": "[" * 100})) == {"a": "[" * 100}

    def wide(count: int) -> bytes:
        return b'{"a":[' + b",".join([b"[]"] * (count - 2)) + b"]}"

    fields.read_object(wide(fields.MAX_CONTAINERS))
    with pytest.raises(UserError, match="lists and objects"):
        fields.read_object(wide(fields.MAX_CONTAINERS + 1))


def frame_field(field_number: int, body: bytes) -> bytes:
    return bytes([field_number << 3 | 2]) + _VarintBytes(len(body)) + body


def build_datums_body(count: int) -> bytes:
    """A body with this many empty datums, large enough for the counting check."""
    return b"\x1a\x00" * count + frame_field(4, b"x" * bodies.UNCOUNTED_BYTES)


def test_messages_at_their_limit() -> None:
    bodies.check_messages(build_datums_body(bodies.MAX_MESSAGES), pb.ForwardBackwardRequest)
    bodies.check_messages(frame_field(1, b"\x1a\x00" * bodies.UNCOUNTED_BYTES), pb.ForwardBackwardRequest)  # no bytes
    for wrong in (
        build_datums_body(bodies.MAX_MESSAGES + 1),
        frame_field(3, b"\x0a\x00" * bodies.UNCOUNTED_BYTES),
        frame_field(3, frame_field(2, frame_field(2, b"\x12\x00" * bodies.UNCOUNTED_BYTES))),
    ):
        with pytest.raises(UserError, match="protobuf messages"):
            bodies.check_messages(wrong, pb.ForwardBackwardRequest)


@FUZZ
@given(CHANGES)
def test_messages_are_counted_in_any_bytes(changes: list[tuple[int, int, bytes]]) -> None:
    count = bodies._count(apply_changes(VALID, changes), pb.ForwardBackwardRequest.DESCRIPTOR, 1000)  # type: ignore[arg-type]
    assert 0 <= count <= 1000


@pytest.mark.smoke
def test_a_valid_message_is_counted_as_it_is() -> None:
    # Datum, chunk, text; two entries and their tensors; the entry of the config and its value.
    assert bodies._count(VALID, pb.ForwardBackwardRequest.DESCRIPTOR, 1000) == 3 + 4 + 2  # type: ignore[arg-type]


def test_data_chunks_tensors_and_dimensions_at_their_limits() -> None:
    def message(data: int = 1, chunks: int = 1, tensors: int = 1, dimensions: int = 1) -> bytes:
        request = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
        for index in range(data):
            datum = request.data.add()
            if index == 0:
                for _ in range(chunks):
                    datum.model_input.add().encoded_text.tokens = b"\1\0\0\0"
                for tensor_index in range(tensors):
                    tensor = datum.loss_fn_inputs[f"t{tensor_index}"]
                    tensor.CopyFrom(pb.Tensor(dense=b"\0" * 4, dtype=pb.DTYPE_FLOAT32, shape=[1] * dimensions))
        return request.SerializeToString()

    read = partial(training.read_pass, request_id="r")
    for name, limit in (
        ("data", training.MAX_DATA),
        ("chunks", training.MAX_CHUNKS),
        ("tensors", training.MAX_TENSORS),
        ("dimensions", training.MAX_DIMENSIONS),
    ):
        read(message(**{name: limit}))
        with pytest.raises(UserError, match=f"at most {limit} are taken"):
            read(message(**{name: limit + 1}))


@pytest.mark.smoke
def test_a_body_of_exactly_the_limit_is_taken() -> None:
    for body in (b"x" * MIB, zstandard.ZstdCompressor().compress(b"x" * MIB), compress_without_size(b"x" * MIB)):
        assert len(bodies.decode(body, None if body[0] == ord("x") else "zstd", MIB)) == MIB
    for body in (
        b"x" * (MIB + 1),
        zstandard.ZstdCompressor().compress(b"x" * (MIB + 1)),
        compress_without_size(b"x" * (MIB + 1)),
    ):
        with pytest.raises(TooLargeError):
            bodies.decode(body, None if body[0] == ord("x") else "zstd", MIB)
