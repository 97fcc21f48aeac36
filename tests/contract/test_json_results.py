"""Results as JSON, for SDKs before 0.19: what they parse is what the newest SDK reads from the protobuf message."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import TypeAdapter
from tinker.proto import response_conv

from support.http_harness import ALICE, Harness
from support.properties import examples
from tinsmith import types
from tinsmith.api.routes.futures import INLINE_BYTES
from tinsmith.wire import sampling, training
from tinsmith.wire.bodies import JSON_TYPE, PROTO_TYPE, choose_type
from tinsmith.wire.json_results import JSON_GROWTH, dump, pass_result, sample_result

any_float32 = st.floats(width=32)
widths = st.sampled_from([(), (2,), (0,), (3, 1)])
arrays = widths.flatmap(
    lambda width: st.integers(0, 4).flatmap(
        lambda length: hnp.arrays(np.float32, (length, *width), elements=any_float32)
    )
)
FLOATS = TypeAdapter(list[int] | list[float])
"""The type of a tensor's data in the old SDKs."""


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (None, PROTO_TYPE),
        ("*/*", PROTO_TYPE),
        ("application/json", JSON_TYPE),  # SDK 0.7 to 0.16
        ("application/x-protobuf, application/json", PROTO_TYPE),  # SDK 0.18 to 0.24
        ("application/x-protobuf", PROTO_TYPE),  # SDK 0.25 and later
        ("application/json, text/plain, */*", JSON_TYPE),
        ("application/json;q=0.5, application/x-protobuf", PROTO_TYPE),
        ("application/json, application/x-protobuf;q=0.9", JSON_TYPE),
        ("Application/JSON; charset=utf-8", JSON_TYPE),
        ("application/*;q=0.2, application/json;q=0.1", PROTO_TYPE),
        ("application/x-protobuf;q=0, */*", JSON_TYPE),
        ("application/json;q=", PROTO_TYPE),
        ("text/html", PROTO_TYPE),
        ("", PROTO_TYPE),
    ],
)
def test_the_accept_header_chooses_the_type(accept: str | None, chosen: str) -> None:
    assert choose_type(accept, (PROTO_TYPE, JSON_TYPE)) == chosen


@given(st.lists(arrays, max_size=4), any_float32)
@examples(150)
def test_a_pass_is_the_same_in_json(logprobs: list[np.ndarray], loss: float) -> None:
    result = types.PassResult(tuple(logprobs), {"loss:sum": loss}, tuple(-array for array in logprobs))
    body = training.write_pass_result(result)
    expected = response_conv.deserialize_forward_backward_output(body)
    read = orjson.loads(dump(pass_result(body)))
    assert read["loss_fn_output_type"] == expected.loss_fn_output_type
    np.testing.assert_equal(TypeAdapter(dict[str, float]).validate_python(read["metrics"]), expected.metrics)
    assert len(read["loss_fn_outputs"]) == len(logprobs)
    for output, original in zip(read["loss_fn_outputs"], logprobs, strict=True):
        for name, array in (("logprobs", original), ("elementwise_loss", -original)):
            tensor = output[name]
            data = np.array(FLOATS.validate_python(tensor["data"]), np.float32)
            assert tensor["dtype"] == "float32"
            if original.shape[1:] != (0,):  # without numbers, the length of a datum is not on the wire
                np.testing.assert_array_equal(data.reshape(tensor["shape"]), array)


sequences = st.integers(1, 5).flatmap(
    lambda length: st.tuples(
        hnp.arrays(np.int32, length), hnp.arrays(np.float32, length, elements=st.floats(-9, 0, width=32))
    )
)


@given(st.lists(sequences, max_size=3), st.integers(0, 4), st.integers(0, 3))
@examples(100)
def test_a_sample_is_the_same_in_json(drawn: list, length: int, k: int) -> None:
    ids = 1 + np.arange(length * k, dtype=np.int32).reshape(length, k)
    logprobs = np.linspace(-3, -1, length * k, dtype=np.float32).reshape(length, k)
    ids[:1], logprobs[:1] = 0, types.EMPTY_LOGPROB
    prompt_logprobs = np.linspace(-1, 0, length, dtype=np.float32)
    prompt_logprobs[:1] = np.nan
    topk = types.TopK(ids, logprobs)
    sampled = tuple(
        types.SampledSequence(
            tokens, sequence_logprobs, "stop", types.TopK(tokens[:, None], sequence_logprobs[:, None])
        )
        for tokens, sequence_logprobs in drawn
    )
    body = sampling.write_sample_result(
        types.SampleResult("r", sampled, prompt_logprobs, topk, 2, target_prompt=logprobs, alt_tokens=None)
    )
    expected, read = response_conv.deserialize_sample_response(body), orjson.loads(dump(sample_result(body)))
    assert read["type"] == "sample" and read["prompt_cache_hit_tokens"] == 2
    for sequence, other in zip(read["sequences"], expected.sequences, strict=True):
        assert (sequence["tokens"], sequence["stop_reason"]) == (list(other.tokens), other.stop_reason)
        np.testing.assert_array_equal(np.array(sequence["logprobs"], np.float32), other.logprobs_np)
        assert [[tuple(pair) for pair in row] for row in sequence["topk_logprobs"]] == other.topk_logprobs
    assert [value is None for value in read["prompt_logprobs"]] == [math.isnan(value) for value in prompt_logprobs]
    if length and k:
        rows = [row and [tuple(pair) for pair in row] for row in read["topk_prompt_logprobs"]]
        assert rows == expected.topk_prompt_logprobs
    tensor = read["target_prompt_logprobs"]
    assert tensor["shape"] == [length, k]
    np.testing.assert_array_equal(np.array(tensor["data"], np.float32), logprobs.ravel())


def test_sparse_targets_keep_their_indices() -> None:
    rows = types.SparseRows(np.array([-1.5, -3.0], np.float32), np.array([0, 1, 2]), np.array([4, 2]), (2, 5))
    body = sampling.write_sample_result(types.SampleResult("r", (), target_prompt=rows))
    assert orjson.loads(dump(sample_result(body)))["target_prompt_logprobs"] == {
        "data": [-1.5, -3.0],
        "dtype": "float32",
        "shape": [2, 5],
        "sparse_crow_indices": [0, 1, 2],
        "sparse_col_indices": [4, 2],
    }


def settle_pass(harness: Harness, num_positions: int) -> tuple[str, bytes]:
    request_id = harness.ok("forward_backward", pass_body(harness.model()))["request_id"]
    logprobs = -np.arange(num_positions, dtype=np.float32)
    body = training.write_pass_result(types.PassResult((logprobs,), {"loss:sum": 1.5}))
    harness.settle(request_id, body, "proto")
    return request_id, body


def pass_body(model_id: str) -> dict[str, object]:
    inputs = {"target_tokens": {"data": [1, 2], "dtype": "int64"}, "weights": {"data": [1.0, 1.0], "dtype": "float32"}}
    datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "loss_fn_inputs": inputs}
    return {"model_id": model_id, "seq_id": 1, "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"}}


@pytest.fixture
def poll(harness: Harness) -> Callable[..., object]:
    def retrieve(request_id: str, accept: str, **fields: object) -> object:
        headers = {"X-API-Key": ALICE, "Accept": accept}
        body = {"request_id": request_id, **fields}
        response = harness.client.post("/api/v1/retrieve_future", json=body, headers=headers)
        assert response.status_code == 200, response.text
        return response

    return retrieve


@pytest.mark.parametrize("num_positions", [3, 20_000, 300_000], ids=["short", "on a thread", "in pieces"])
def test_a_poll_is_answered_in_the_type_that_its_client_reads(
    harness: Harness, poll: Callable, num_positions: int
) -> None:
    request_id, body = settle_pass(harness, num_positions)
    response = poll(request_id, "application/x-protobuf, application/json")
    assert (response.headers["content-type"], response.content) == (PROTO_TYPE, body)
    response = poll(request_id, "application/json")
    assert response.headers["content-type"] == JSON_TYPE
    (output,) = response.json()["loss_fn_outputs"]
    assert output["logprobs"]["shape"] == [num_positions]
    assert output["logprobs"]["data"][-1] == 1 - num_positions


def test_a_large_result_is_announced_with_about_its_size_in_json(harness: Harness, poll: Callable) -> None:
    request_id, body = settle_pass(harness, INLINE_BYTES)
    announced = poll(request_id, "application/json", allow_metadata_only=True).json()
    assert announced == {"status": "complete_metadata", "response_payload_size": JSON_GROWTH * len(body)}
    assert poll(request_id, "application/json", allow_metadata_only=False).json()["metrics"] == {"loss:sum": 1.5}


def test_json_results_and_failures_stay_what_they_are(harness: Harness, poll: Callable) -> None:
    request_id = harness.ok("optim_step", {"model_id": harness.model(), "seq_id": 1, "adam_params": {}})["request_id"]
    harness.settle(request_id, b'{"metrics":{}}')
    assert poll(request_id, "application/x-protobuf").content == b'{"metrics":{}}'
