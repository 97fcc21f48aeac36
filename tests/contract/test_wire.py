"""The wire format against the SDK's encoder and decoder, and the refusal of invalid values."""

from __future__ import annotations

import json

import numpy as np
import orjson
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tinker.lib.public_interfaces.sampling_client import _tensor_data_to_model
from tinker.proto import response_conv
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ModelInput,
    OptimStepRequest,
    SampleRequest,
    SamplingParams,
    TensorData,
)

from support.properties import examples
from tinsmith import types
from tinsmith.errors import NotSupportedError, TooLargeError, UnsupportedMediaError, UserError
from tinsmith.wire import bodies, fields, json_results, sampling, training, weights
from tinsmith.wire import tinker_public_pb2 as pb

MIB = 1 << 20
any_float32 = st.floats(width=32, allow_nan=True, allow_infinity=True)


def arrays(dtype: type, *, dims: int = 2):
    elements = any_float32 if dtype is np.float32 else st.integers(-(2**63), 2**63 - 1)
    shapes = hnp.array_shapes(min_dims=1, max_dims=dims, min_side=0, max_side=5)
    return hnp.arrays(dtype, shapes, elements=elements)


@st.composite
def sparse_tensors(draw: st.DrawFn) -> TensorData:
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    counts = draw(st.lists(st.integers(0, columns), min_size=rows, max_size=rows))
    dtype = draw(st.sampled_from(["float32", "int64"]))
    values = np.arange(1, sum(counts) + 1, dtype=dtype)
    crow = [0, *np.cumsum(counts).tolist()]
    cols = [column for count in counts for column in sorted(draw(st.permutations(range(columns)))[:count])]
    return TensorData(values, dtype, [rows, columns], crow, cols)


tensors = st.one_of(
    arrays(np.float32).map(TensorData.from_numpy),
    arrays(np.int64).map(TensorData.from_numpy),
    sparse_tensors(),
)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=12)
data_of_sdk = st.builds(
    lambda chunks, inputs: Datum(
        model_input=ModelInput(chunks=[EncodedTextChunk(tokens=chunk) for chunk in chunks]),
        loss_fn_inputs=inputs,
    ),
    st.lists(tokens, min_size=0, max_size=3),
    st.dictionaries(st.text(min_size=1, max_size=8), tensors, max_size=3),
)
configs = st.one_of(
    st.none(),
    st.dictionaries(st.text(max_size=8), st.one_of(st.floats(allow_nan=False), st.text(max_size=8)), max_size=3),
)


def encode(data: list[Datum], config: object = None, loss_fn: str = "cross_entropy") -> bytes:
    passes = ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config)  # type: ignore[arg-type]
    request = ForwardBackwardRequest(forward_backward_input=passes, model_id="s:train:0", seq_id=7)
    return forward_backward_request_to_proto(request).SerializeToString()


def flat_tokens(datum: Datum) -> list[int]:
    return [token for chunk in datum.model_input.chunks for token in chunk.tokens]


@given(st.lists(data_of_sdk, max_size=4), configs, st.text(max_size=10))
@examples(150)
def test_a_pass_holds_exactly_what_the_sdk_encoded(data: list[Datum], config: object, loss_fn: str) -> None:
    read = training.read_pass(encode(data, config, loss_fn), "s:train:0:7")
    assert (read.request_id, read.model_id, read.loss_fn) == ("s:train:0:7", "s:train:0", loss_fn)
    assert read.loss_config == (config or {})
    assert not read.forward_only
    assert len(read.data) == len(data)
    for got, original in zip(read.data, data, strict=True):
        assert got.tokens_N.dtype == np.int32
        assert got.tokens_N.tolist() == flat_tokens(original)
        assert got.inputs.keys() == original.loss_fn_inputs.keys()
        for name, tensor in original.loss_fn_inputs.items():
            check_array(got.inputs[name], tensor)


def check_array(got: types.Array, original: TensorData) -> None:
    if isinstance(got, types.SparseRows):
        assert got.shape == tuple(original.shape or ())
        assert got.crow_indices.tolist() == original.sparse_crow_indices
        assert got.col_indices.tolist() == original.sparse_col_indices
        assert got.values.dtype == original.dtype
        np.testing.assert_array_equal(got.values, original._numpy)
    else:
        assert original.sparse_crow_indices is None
        assert got.dtype == original.dtype
        np.testing.assert_array_equal(got, original._numpy)


def test_single_chunk_arrays_view_the_message_without_a_copy() -> None:
    datum = Datum(
        model_input=ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"weights": TensorData.from_numpy(np.ones(3, np.float32))},
    )
    read = training.read_pass(encode([datum]), "r").data[0]
    assert not read.tokens_N.flags.owndata
    assert isinstance(read.inputs["weights"], np.ndarray)
    assert not read.inputs["weights"].flags.owndata


def message_with(tensor: pb.Tensor) -> bytes:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(4, dtype=np.int32).tobytes()
    datum.loss_fn_inputs["x"].CopyFrom(tensor)
    return message.SerializeToString()


@given(hnp.arrays(np.int32, 4))
def test_int32_tensors_are_widened_to_int64(values: np.ndarray) -> None:
    tensor = pb.Tensor(dense=values.tobytes(), dtype=pb.DTYPE_INT32, shape=[2, 2])
    got = training.read_pass(message_with(tensor), "r").data[0].inputs["x"]
    assert isinstance(got, np.ndarray)
    assert got.dtype == np.int64
    np.testing.assert_array_equal(got, values.reshape(2, 2))


@given(hnp.arrays(np.uint16, 4))
def test_bfloat16_tensors_keep_their_value(bits: np.ndarray) -> None:
    import torch

    tensor = pb.Tensor(dense=bits.tobytes(), dtype=pb.DTYPE_BFLOAT16)
    got = training.read_pass(message_with(tensor), "r").data[0].inputs["x"]
    expected = torch.from_numpy(bits.copy()).view(torch.bfloat16).float().numpy()
    assert isinstance(got, np.ndarray)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (pb.Tensor(dense=b"\0" * 6, dtype=pb.DTYPE_FLOAT32), "6 bytes long"),
        (
            pb.Tensor(dense=b"\0" * 8, dtype=pb.DTYPE_FLOAT32, shape=[3]),
            "2 values, which do not fill its shape [3]",
        ),
        (pb.Tensor(dense=b"\0" * 8, dtype=pb.DTYPE_FLOAT32, shape=[-1, -2]), "sizes cannot be negative"),
        (pb.Tensor(dense=b"\0" * 8, dtype=pb.DTYPE_FLOAT32, shape=[2**62, 4]), "do not fill its shape"),
        (pb.Tensor(dense=b"\0" * 8), "dtype is 0"),
        (pb.Tensor(dtype=pb.DTYPE_INT64, shape=[0]), "has no data"),
        (pb.Tensor(sparse_csr=pb.SparseCsr(), dtype=pb.DTYPE_INT64, shape=[3]), "two dimensions"),
        (
            pb.Tensor(sparse_csr=pb.SparseCsr(crow_indices=b"x"), dtype=pb.DTYPE_INT64, shape=[3, 3]),
            "crow_indices",
        ),
    ],
)
def test_a_malformed_tensor_is_refused_by_its_path(tensor: pb.Tensor, words: str) -> None:
    with pytest.raises(UserError) as refusal:
        training.read_pass(message_with(tensor), "r")
    assert "data[0].loss_fn_inputs['x']" in str(refusal.value)
    assert words in str(refusal.value)


@pytest.mark.parametrize("kind", ["image", "dmel"])
def test_chunks_that_are_not_text_are_refused_by_name(kind: str) -> None:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1)
    getattr(message.data.add().model_input.add(), kind).SetInParent()
    with pytest.raises(NotSupportedError, match=rf"data\[0\].model_input.chunks\[0\] is of type '{kind}'"):
        training.read_pass(message.SerializeToString(), "r")


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(UserError, match="not a ForwardBackwardRequest"):
        training.read_pass(b"\xff\xff\xff", "r")


@given(st.binary(max_size=200))
@examples(300)
def test_any_bytes_give_a_pass_or_a_user_error(body: bytes) -> None:
    try:
        training.read_pass(body, "r")
    except UserError as refusal:
        assert str(refusal)


finite_metrics = st.dictionaries(st.text(max_size=8), st.floats(allow_nan=False), max_size=3)


@given(st.lists(arrays(np.float32), max_size=6), finite_metrics)
@examples(150)
def test_the_sdk_reads_back_every_logprob_and_metric(logprobs: list[np.ndarray], metrics: dict[str, float]) -> None:
    body = training.write_pass_result(types.PassResult(tuple(logprobs), metrics))
    read = response_conv.deserialize_forward_backward_output(body)
    assert read.metrics == metrics
    assert len(read.loss_fn_outputs) == len(logprobs)
    for got, original in zip(read.loss_fn_outputs, logprobs, strict=True):
        if original.ndim == 1 or original.shape[1] > 0:  # with K = 0 the SDK cannot know N
            assert got["logprobs"].shape == list(original.shape)
        assert got["logprobs"].dtype == "float32"
        np.testing.assert_array_equal(got["logprobs"].to_numpy().ravel(), original.ravel())


def test_the_sdk_reads_elementwise_losses_beside_logprobs() -> None:
    logprobs = (np.array([-1, -2], np.float32), np.array([[-1, -2], [-3, -4]], np.float32))
    result = types.PassResult(logprobs, {"loss:sum": 0.0}, tuple(-2 * array for array in logprobs))
    body = training.write_pass_result(result)
    read = response_conv.deserialize_forward_backward_output(body)
    assert [set(output) for output in read.loss_fn_outputs] == [{"logprobs", "elementwise_loss"}] * 2
    for output, original in zip(read.loss_fn_outputs, result.elementwise_loss, strict=True):
        np.testing.assert_array_equal(output["elementwise_loss"].to_numpy(), original)
    outputs = orjson.loads(json_results.dump(json_results.pass_result(body)))["loss_fn_outputs"]
    assert [output["elementwise_loss"]["data"] for output in outputs] == [[2, 4], [2, 4, 6, 8]]


sampled = st.integers(1, 6).flatmap(
    lambda length: st.tuples(
        hnp.arrays(np.int32, length),
        hnp.arrays(np.float32, length, elements=any_float32),
        st.sampled_from("sl"),
    )
)


def top_k(length: int, k: int) -> types.TopK:
    ids = np.arange(length * k, dtype=np.int32).reshape(length, k)
    logprobs = np.linspace(-3, 0, length * k, dtype=np.float32).reshape(length, k)
    return types.TopK(ids, logprobs)


@given(st.lists(sampled, max_size=4), st.integers(0, 5), st.integers(0, 4), st.integers(0, 9))
@examples(150)
def test_the_sdk_reads_back_every_sample(drawn: list, prompt: int, k: int, hits: int) -> None:
    sequences = tuple(
        types.SampledSequence(ids, logprobs, {"s": "stop", "l": "length"}[reason], top_k(len(ids), k) if k else None)
        for ids, logprobs, reason in drawn
    )
    prompt_logprobs = np.linspace(-1, 0, prompt, dtype=np.float32)
    prompt_logprobs[:1] = np.nan
    topk_prompt = top_k(prompt, k)
    result = types.SampleResult("r", sequences, prompt_logprobs, topk_prompt, hits)
    read = response_conv.deserialize_sample_response(sampling.write_sample_result(result))
    assert read.prompt_cache_hit_tokens == hits
    assert [sequence.stop_reason for sequence in read.sequences] == [sequence.stop_reason for sequence in sequences]
    for got, original in zip(read.sequences, sequences, strict=True):
        np.testing.assert_array_equal(got.tokens_np, original.tokens_T)
        np.testing.assert_array_equal(got.logprobs_np, original.logprobs_T)
        check_topk(got.topk_logprobs_np, original.topk)
    if prompt:
        np.testing.assert_array_equal(read.prompt_logprobs_np, prompt_logprobs)
        assert read.prompt_logprobs is not None
        assert read.prompt_logprobs[0] is None
    else:
        assert read.prompt_logprobs_np is None
    check_topk(read.topk_prompt_logprobs_np, topk_prompt if prompt and k else None)


@given(hnp.arrays(np.float32, st.tuples(st.integers(0, 4), st.integers(1, 3)), elements=any_float32))
@examples(30)
def test_the_sdk_reads_back_targets_and_alternatives(logprobs: np.ndarray) -> None:
    tokens = np.arange(logprobs.size).reshape(logprobs.shape) + 2**40
    result = types.SampleResult("r", (), target_prompt=logprobs, alt_tokens=types.AltTokens(tokens, logprobs))
    read = response_conv.deserialize_sample_response(sampling.write_sample_result(result))
    assert read.target_prompt_logprobs is not None and read.prompt_alt_tokens is not None
    for got, original in (
        (read.target_prompt_logprobs, logprobs),
        (read.prompt_alt_tokens.tokens, tokens),
        (read.prompt_alt_tokens.logprobs, logprobs),
    ):
        assert (got.shape, got.dtype) == (list(original.shape), str(original.dtype))
        np.testing.assert_array_equal(got.to_numpy(), original)


def test_the_sdk_reads_back_sparse_targets() -> None:
    values = np.array([-1.5, -0.25, -3.0], np.float32)
    rows = types.SparseRows(values, np.array([0, 0, 2, 3]), np.array([0, 4, 2]), (3, 5))
    result = types.SampleResult("r", (), target_prompt=rows)
    read = response_conv.deserialize_sample_response(sampling.write_sample_result(result)).target_prompt_logprobs
    assert read is not None
    assert (read.shape, read.dtype) == ([3, 5], "float32")
    assert (read.sparse_crow_indices, read.sparse_col_indices) == ([0, 0, 2, 3], [0, 4, 2])
    assert read.data == values.tolist()
    assert read.to_numpy()[1].tolist() == [-1.5, 0, 0, 0, -0.25]


def test_a_result_without_extras_has_none() -> None:
    read = response_conv.deserialize_sample_response(sampling.write_sample_result(types.SampleResult("r", ())))
    assert read.target_prompt_logprobs is None
    assert read.prompt_alt_tokens is None


def check_topk(got: object, original: types.TopK | None) -> None:
    if original is None:
        assert got is None
    else:
        np.testing.assert_array_equal(got.token_ids, original.token_ids_Tk)  # type: ignore[attr-defined]
        np.testing.assert_array_equal(got.logprobs, original.logprobs_Tk)  # type: ignore[attr-defined]


def test_an_empty_top_k_row_reads_as_none() -> None:
    topk = top_k(3, 2)
    topk.token_ids_Tk[0], topk.logprobs_Tk[0] = 0, -99999.0
    sequence = types.SampledSequence(np.ones(1, np.int32), np.zeros(1, np.float32), "stop")
    result = types.SampleResult("r", (sequence,), None, topk)
    read = response_conv.deserialize_sample_response(sampling.write_sample_result(result))
    assert read.topk_prompt_logprobs is not None
    assert read.topk_prompt_logprobs[0] is None
    assert read.topk_prompt_logprobs[1] == [(2, pytest.approx(-1.8)), (3, pytest.approx(-1.2))]


def targets(**changes: object) -> dict[str, object]:
    return {"target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2, 1]} | changes}


def sample_body(**changes: object) -> bytes:
    request = SampleRequest(
        prompt=ModelInput(chunks=[EncodedTextChunk(tokens=[1, 2]), EncodedTextChunk(tokens=[3])]),
        sampling_params=SamplingParams(max_tokens=5),
        sampling_session_id="s:sample:0",
        seq_id=3,
        num_samples=2,
    )
    return json.dumps(request.model_dump(mode="json", exclude_none=True) | changes).encode()


def test_a_sample_holds_what_the_sdk_asks_for() -> None:
    params = SamplingParams(max_tokens=9, seed=4, stop=["a", "bc"], temperature=0.5, top_k=7, top_p=0.9)
    body = sample_body(
        sampling_params=params.model_dump(mode="json", exclude_none=True),
        prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
    )
    read = sampling.read_sample(body, "r", "v")
    assert read.prompt_T.dtype == np.int32
    assert read.prompt_T.tolist() == [1, 2, 3]
    assert (read.request_id, read.version_id, read.num_samples) == ("r", "v", 2)
    assert (read.prompt_logprobs, read.topk_prompt_logprobs, read.topk_sample_logprobs) == (True, 3, 2)
    assert read.params == types.SamplingParams(9, 4, ("a", "bc"), (), True, 0.5, 7, 0.9)
    assert (read.prompt_logprobs_last_n, read.target_prompt_logprobs, read.prompt_alt_tokens_k) == (None, None, 0)
    extras = sampling.read_sample(sample_body(prompt_logprobs_last_n=2, prompt_alt_tokens_k=4), "r", None)
    assert (extras.prompt_logprobs_last_n, extras.prompt_alt_tokens_k) == (2, 4)


def test_targets_are_read_in_both_layouts() -> None:
    ids = torch.full((2, 6), -1)
    ids[1, 4], ids[1, 5] = 0, 9
    for tensor in (TensorData.from_torch(ids), TensorData.from_torch_sparse(ids, pad_value=-1)):
        body = sample_body(target_prompt_logprobs=_tensor_data_to_model(tensor).model_dump(exclude_none=True))
        read = sampling.read_sample(body, "r", None).target_prompt_logprobs
        if tensor.sparse_crow_indices is None:
            assert isinstance(read, np.ndarray)
            assert read.tolist() == ids.tolist()
        else:
            assert isinstance(read, types.SparseRows)
            assert (read.shape, read.values.tolist()) == ((2, 6), [0, 9])
            assert (read.crow_indices.tolist(), read.col_indices.tolist()) == ([0, 0, 2], [4, 5])


@pytest.mark.parametrize(
    ("stop", "strings", "tokens", "eos"),
    [
        (None, (), (), True),
        ("END", ("END",), (), True),
        ([], (), (), False),
        ([5, 6], (), (5, 6), True),
        (["a"], ("a",), (), True),
    ],
)
def test_stops_are_read_in_every_form(stop: object, strings: tuple, tokens: tuple, eos: bool) -> None:
    read = sampling.read_sample(sample_body(sampling_params={"stop": stop}), "r", None).params
    assert (read.stop_strings, read.stop_tokens, read.stop_eos) == (strings, tokens, eos)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampling_params": {"stop": [1, "a"]}}, "sampling_params.stop"),
        ({"sampling_params": {"stop": [True]}}, "sampling_params.stop"),
        ({"sampling_params": {"min_p": 0.1}}, "sampling_params.min_p is not supported"),
        ({"sampling_params": {"max_tokens": "9"}}, "sampling_params.max_tokens is '9'"),
        ({"sampling_params": {"temperature": True}}, "sampling_params.temperature is True"),
        ({"sampling_params": {"seed": 2**64 - 1}}, "64 bits"),
        ({"sampling_params": 3}, "sampling_params is 3; it must be an object"),
        ({"num_samples": 1.5}, "num_samples is 1.5; it must be an integer"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is 1; it must be true or false"),
        ({"prompt": {"chunks": 1}}, "prompt.chunks"),
        ({"prompt": {"chunks": [1]}}, "prompt.chunks[0] is 1"),
        ({"prompt": {"chunks": [{"tokens": [1.5]}]}}, "flat list of integers"),
        ({"prompt": {"chunks": [{"tokens": [[1]]}]}}, "flat list of integers"),
        ({"prompt": {"chunks": [{"tokens": [[1], 2]}]}}, "not a flat list"),
        ({"prompt": {"chunks": [{"tokens": ["1"]}]}}, "flat list of integers"),
        ({"prompt": {"chunks": [{"tokens": [-1]}]}}, "token ids lie between"),
        ({"prompt": {"chunks": [{"tokens": [2**31]}]}}, "token ids lie between"),
        ({"prompt": {"chunks": [{"tokens": None}]}}, "must be a list of integers"),
        ({"prompt_alt_tokens_k": "3"}, "prompt_alt_tokens_k is '3'; it must be an integer"),
        ({"prompt_logprobs_last_n": 1.5}, "prompt_logprobs_last_n is 1.5"),
        ({"target_prompt_logprobs": [[1]]}, "target_prompt_logprobs is [[1]]; it must be an object"),
        ({"target_prompt_logprobs": {"data": [1], "shape": [1, 1]}}, "target_prompt_logprobs.dtype is missing"),
        (targets(dtype="float32"), "target_prompt_logprobs.dtype is 'float32'; token ids are 'int64'"),
        (targets(shape=None), "target_prompt_logprobs.shape is None"),
        (targets(shape=[2]), "target_prompt_logprobs.shape is [2]; it must be [len(prompt) - 1, K]"),
        (targets(shape=[-1, -2]), "target_prompt_logprobs.shape is [-1, -2]"),
        (targets(shape=[2, 2]), "holds 2 ids, which do not fill the shape [2, 2]"),
        (targets(shape=[2**62, 4]), "holds 2 ids, which do not fill the shape"),
        (targets(data=[1.0, 2.0]), "target_prompt_logprobs.data must be a flat list of integers"),
        (targets(data=[2**63, 1]), "target_prompt_logprobs.data must be a flat list of integers"),
        (targets(data=None), "target_prompt_logprobs.data is None"),
        (targets(sparse_crow_indices=[0, 2]), "target_prompt_logprobs.sparse_col_indices is None"),
        (targets(sparse_col_indices=[0, 2]), "target_prompt_logprobs.sparse_crow_indices is None"),
        (targets(layout="coo"), "target_prompt_logprobs.layout is not supported"),
    ],
)
def test_a_wrong_sample_field_is_refused_by_name(change: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as refusal:
        sampling.read_sample(sample_body(**change), "r", None)
    assert words in str(refusal.value)


@pytest.mark.parametrize("kind", ["image", "image_asset_pointer", "dmel"])
def test_prompt_chunks_that_are_not_text_are_refused_by_name(kind: str) -> None:
    body = sample_body(prompt={"chunks": [{"type": kind}]})
    with pytest.raises(NotSupportedError, match=rf"prompt.chunks\[0\] is of type '{kind}'"):
        sampling.read_sample(body, "r", None)


def test_an_unknown_field_that_asks_for_nothing_is_accepted() -> None:
    body = sample_body(a_newer_flag=False, prompt_alt_tokens_k=0, prompt_logprobs_last_n=None)
    assert sampling.read_sample(body, "r", None).num_samples == 2


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(sampling.SampleRequest.model_fields)), json_values)
@examples(300)
def test_any_json_gives_a_sample_or_a_user_error(name: str, value: object) -> None:
    try:
        read = sampling.read_sample(sample_body(**{name: value}), "r", None)
    except UserError as refusal:
        assert str(refusal)
    else:
        assert read.prompt_T.dtype == np.int32


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"nul", b"\xff"])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(UserError, match="the body"):
        fields.read_object(body)


@pytest.mark.parametrize(
    "change",
    [
        {"x" * MIB: 1},
        {"num_samples": "x" * MIB},
        {"num_samples": [[0] * MIB]},
        {"num_samples": {"a": {"b": ["x" * MIB] * 9}}},
        {"sampling_params": {"stop": [0.5] * MIB}},
        {"num_samples": "\u00e4\n\u4e00"},
    ],
)
def test_a_message_truncates_the_sent_value(change: dict[str, object]) -> None:
    with pytest.raises(UserError) as refusal:
        sampling.read_sample(sample_body(**change), "r", None)
    assert len(str(refusal.value)) < 500
    assert str(refusal.value).isascii() and "\n" not in str(refusal.value)


def test_an_optim_step_of_the_sdk_keeps_every_parameter() -> None:
    params = AdamParams(learning_rate=1e-3, beta1=0.5, beta2=0.6, eps=1e-8, weight_decay=0.1, grad_clip_norm=2.0)
    request = OptimStepRequest(optim_params=params, model_id="m", seq_id=1)
    read = training.read_optim_step(orjson.dumps(request.model_dump(mode="json", exclude_none=True)), "r")
    assert read == types.OptimStep("r", "m", types.AdamParams(1e-3, 0.5, 0.6, 1e-8, 0.1, 2.0))


def test_the_default_adam_parameters_are_the_sdks() -> None:
    assert types.AdamParams(**AdamParams().model_dump()) == types.AdamParams()
    assert training.read_optim_step(b'{"model_id": "m", "adam_params": {}}', "r").params == types.AdamParams()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"model_id": "m"}, "adam_params is missing"),
        ({"model_id": "m", "optimizer_params": {"type": "sgd"}}, "optimizer_params.type is 'sgd'"),
        ({"model_id": "m", "optimizer_params": {"type": "dimuon"}}, "optimizer_params.learning_rate is missing"),
        (
            {"model_id": "m", "optimizer_params": {"type": "dimuon", "learning_rate": 1, "beta2": 1}},
            "optimizer_params.beta2 is not supported",
        ),
        (
            {"model_id": "m", "adam_params": {}, "optimizer_params": {"type": "dimuon", "learning_rate": 1}},
            "both given",
        ),
        ({"model_id": "m", "adam_params": {"amsgrad": True}}, "adam_params.amsgrad is not supported"),
        ({"model_id": "m", "adam_params": {"beta1": "x"}}, "adam_params.beta1 is 'x'"),
        ({"adam_params": {}}, "model_id is missing"),
    ],
)
def test_a_wrong_optim_step_is_refused_by_name(body: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as refusal:
        training.read_optim_step(orjson.dumps(body), "r")
    assert words in str(refusal.value)


def test_a_save_reads_back_as_it_was_asked_for() -> None:
    body = {"model_id": "m", "path": "x", "seq_id": 1, "ttl_seconds": 3600, "overwrite": True}
    read = weights.read_save(orjson.dumps(body | {"user_metadata": {"a": "b"}}))
    assert read == weights.SaveRequest(
        model_id="m", path="x", seq_id=1, ttl_seconds=3600, overwrite=True, user_metadata={"a": "b"}
    )
    ephemeral = weights.read_save(b'{"model_id": "m", "sampling_session_seq_id": 4, "kind": "inflight"}')
    assert (ephemeral.path, ephemeral.sampling_session_seq_id, ephemeral.kind) == (None, 4, "inflight")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "frozen"}, "kind is 'frozen'"),
        ({"kind": "inflight"}, "take no path"),
        ({"sampling_session_seq_id": 1}, "take no path"),
        ({"user_metadata": {"a": 1}}, "user_metadata.a is 1; it must be a string"),
        ({"user_metadata": {"a": "x" * 70_000}}, "at most 65536"),
        ({"path": "a\x00b"}, "without NUL"),
    ],
)
def test_a_wrong_save_is_refused_by_name(change: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as refusal:
        weights.read_save(orjson.dumps({"model_id": "m", "path": "x"} | change))
    assert words in str(refusal.value)


@given(st.binary(max_size=5000))
def test_a_compressed_body_comes_back_whole(body: bytes) -> None:
    packed = zstandard.ZstdCompressor().compress(body)
    assert bodies.decode(packed, "zstd", MIB) == body


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    packed = zstandard.ZstdCompressor().compress(b"\0" * (2 * MIB))
    assert len(packed) < 1000
    with pytest.raises(TooLargeError):
        bodies.decode(packed, "zstd", MIB)


def compress_without_size(body: bytes, **settings: int) -> bytes:
    """A frame that does not declare its size."""
    parameters = zstandard.ZstdCompressionParameters.from_level(3, **settings)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(body) + compressor.flush()


@given(st.binary(max_size=5000))
def test_a_frame_that_hides_its_size_comes_back_whole(body: bytes) -> None:
    assert bodies.decode(compress_without_size(body), "zstd", MIB) == body


def test_a_frame_that_hides_its_size_may_have_as_much_as_any_other() -> None:
    assert bodies.decode(compress_without_size(b"\0" * MIB), "zstd", MIB) == b"\0" * MIB
    with pytest.raises(TooLargeError):
        bodies.decode(compress_without_size(b"\0" * (MIB + 1)), "zstd", MIB)


def test_a_frame_that_hides_its_size_may_not_ask_for_a_huge_window() -> None:
    assert bodies.decode(compress_without_size(b"a", window_log=23), "zstd", MIB) == b"a"
    with pytest.raises(UserError, match="too much memory"):
        bodies.decode(compress_without_size(b"a", window_log=24), "zstd", MIB)


def test_a_frame_cut_short_or_followed_by_more_is_refused() -> None:
    packed = zstandard.ZstdCompressor().compress(bytes(range(256)) * 9)
    sly = compress_without_size(bytes(range(256)) * 9)
    wrongs = (packed[:-1], packed + b"x", packed + packed, b"hello", b"", sly[:-1], sly + b"x", sly + sly)
    for wrong in wrongs:
        with pytest.raises(UserError, match="not one whole zstd frame"):
            bodies.decode(wrong, "zstd", MIB)


def test_an_unknown_encoding_or_type_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedMediaError, match="'br'"):
        bodies.decode(b"", "br", MIB)
    with pytest.raises(UnsupportedMediaError, match="'text/plain'"):
        bodies.check_content_type("text/plain; charset=utf-8", (bodies.JSON_TYPE,))
    bodies.check_content_type("Application/JSON; charset=utf-8", (bodies.JSON_TYPE,))


def test_the_refusal_of_a_content_type_repeats_little_of_it() -> None:
    with pytest.raises(UnsupportedMediaError) as refused:
        bodies.check_content_type("x" * 5000, (bodies.JSON_TYPE,))
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("length", [str(MIB + 1), "9" * 5000])
def test_a_declared_length_over_the_limit_is_refused(length: str) -> None:
    with pytest.raises(TooLargeError):
        bodies.check_length(length, MIB)


def test_a_length_that_is_no_number_is_refused() -> None:
    with pytest.raises(UserError, match="Content-Length"):
        bodies.check_length("-1", MIB)
