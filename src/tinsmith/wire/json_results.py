"""Results as JSON, for clients that do not read the SDK's protobuf messages.

The stored result of a pass or sample is a protobuf message. These functions convert it to the objects that the SDK's
pydantic types parse; `dump` writes them. Arrays stay numpy arrays, which `dump` writes with as many digits as float32
needs. Where a value may be absent (logprobs of a prompt's tokens), NaN becomes null. Any other number that is not
finite becomes the string that the JSON mapping of protobuf defines: "NaN", "Infinity" or "-Infinity".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import orjson

from tinsmith.types import EMPTY_LOGPROB
from tinsmith.wire import tinker_public_pb2 as pb

DTYPES = {"int64": (pb.DTYPE_INT64, np.dtype("<i8")), "float32": (pb.DTYPE_FLOAT32, np.dtype("<f4"))}
_NAMES = {code: (name, dtype) for name, (code, dtype) in DTYPES.items()}
_STOP_REASONS = {pb.STOP_REASON_STOP: "stop", pb.STOP_REASON_LENGTH: "length"}

_PADDING_PAIR = (0, EMPTY_LOGPROB)
"""The pair that fills a row of top logprobs."""

JSON_GROWTH = 3
"""About how many times larger a result is in JSON: 12 characters for a float32."""

JsonObject = dict[str, object]
Array = npt.NDArray[np.generic]


def pass_result(body: bytes) -> JsonObject:
    """Return losses and logprobs in the form of the SDK's JSON types."""
    message = pb.ForwardBackwardOutput.FromString(body)
    outputs: list[JsonObject] = []
    for record in message.loss_fn_outputs:
        fields = {name: _batched(tensor) for name, tensor in record.fields.items()}
        for index in range(record.num_datums):
            outputs.append({name: tensors[index] for name, tensors in fields.items()})
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": outputs,
        "metrics": {name: _number(value) for name, value in message.metrics.items()},
    }


def sample_result(body: bytes) -> JsonObject:
    """Return a sample as JSON, with optional fields only if the message has them."""
    message = pb.SampleResponse.FromString(body)
    result: JsonObject = {
        "type": "sample",
        "sequences": [_sequence(sequence) for sequence in message.sequences],
        "prompt_logprobs": None,
        "prompt_cache_hit_tokens": message.prompt_cache_hit_tokens,
    }
    if message.weight_version:
        result["weight_version"] = message.weight_version
    if message.HasField("prompt_logprobs"):
        result["prompt_logprobs"] = np.frombuffer(message.prompt_logprobs, "<f4")
    if message.HasField("topk_prompt_logprobs"):
        result["topk_prompt_logprobs"] = _topk(message.topk_prompt_logprobs)
    if message.HasField("target_prompt_logprobs"):
        result["target_prompt_logprobs"] = _tensor(message.target_prompt_logprobs)
    if message.HasField("prompt_alt_tokens"):
        tokens, logprobs = message.prompt_alt_tokens.tokens, message.prompt_alt_tokens.logprobs
        result["prompt_alt_tokens"] = {"tokens": _tensor(tokens), "logprobs": _tensor(logprobs)}
    return result


CONVERSIONS: Mapping[str, Callable[[bytes], JsonObject]] = {
    "sample": sample_result,
    "forward": pass_result,
    "forward_backward": pass_result,
}
"""The conversion for each kind of request whose result is a protobuf message."""


def dump(content: object) -> bytes:
    """Write an object that may hold the arrays of these functions."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def _sequence(sequence: pb.SampledSequence) -> JsonObject:
    values: JsonObject = {
        "stop_reason": _STOP_REASONS[sequence.stop_reason],
        "tokens": np.frombuffer(sequence.tokens, "<i4"),
        "logprobs": np.frombuffer(sequence.logprobs, "<f4"),
    }
    if sequence.HasField("topk_sampled_logprobs"):
        values["topk_logprobs"] = _topk(sequence.topk_sampled_logprobs)
    return values


def _topk(message: pb.TopkLogprobs) -> list[list[tuple[int, float]] | None]:
    """Return the pairs (token id, logprob) of each position, or None where there are none."""
    shape = (message.length, message.k)
    token_ids = np.frombuffer(message.token_ids, "<i4").reshape(shape).tolist()
    logprobs = np.frombuffer(message.logprobs, "<f4").reshape(shape).tolist()
    rows = [
        [(token_id, logprob) for token_id, logprob in zip(*row, strict=True) if (token_id, logprob) != _PADDING_PAIR]
        for row in zip(token_ids, logprobs, strict=True)
    ]
    return [row or None for row in rows]


def _batched(tensor: pb.BatchedTensor) -> list[JsonObject]:
    """Return one tensor for each datum."""
    name, dtype = _NAMES[tensor.dtype]
    bounds = pairwise(np.frombuffer(tensor.offsets, "<i8").tolist())
    arrays = [np.frombuffer(tensor.data[start:stop], dtype) for start, stop in bounds]
    row_size = math.prod(tensor.trailing_shape)
    shapes = [[array.size // max(1, row_size), *tensor.trailing_shape] for array in arrays]
    return [
        {"data": _numbers(array), "dtype": name, "shape": shape} for array, shape in zip(arrays, shapes, strict=True)
    ]


def _tensor(tensor: pb.Tensor) -> JsonObject:
    name, dtype = _NAMES[tensor.dtype]
    values: JsonObject = {"dtype": name, "shape": list(tensor.shape)}
    if not tensor.HasField("sparse_csr"):
        return values | {"data": _numbers(np.frombuffer(tensor.dense, dtype))}
    sparse = tensor.sparse_csr
    indices = {
        "sparse_crow_indices": np.frombuffer(sparse.crow_indices, "<i8"),
        "sparse_col_indices": np.frombuffer(sparse.col_indices, "<i8"),
    }
    return values | {"data": _numbers(np.frombuffer(sparse.values, dtype))} | indices


def _numbers(array: Array) -> Array | list[float | str]:
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return array
    return [_number(value) for value in array.tolist()]


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
