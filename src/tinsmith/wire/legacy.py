"""The JSON dialect of older clients: passes as JSON <-> the one protobuf form, and results as JSON.

Nothing else knows this form: a JSON pass is the protobuf message that the SDK would have sent, before it is
judged or stored, and a result is turned into JSON when it is fetched. Shape letters: N positions of one datum.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tinsmith.errors import UserError
from tinsmith.wire import tinker_public_pb2 as pb
from tinsmith.wire.fields import Fields, show
from tinsmith.wire.sampling import token_ids
from tinsmith.wire.training import refuse_chunk

DTYPES = {"int64": (pb.DTYPE_INT64, np.dtype("<i8")), "float32": (pb.DTYPE_FLOAT32, np.dtype("<f4"))}
# What a plain list stands for, as in the SDK (training_client.py); any other input must say its dtype.
LIST_DTYPES = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}
STOP_REASONS = {pb.STOP_REASON_STOP: "stop", pb.STOP_REASON_LENGTH: "length"}


def pass_message(fields: Fields, *, forward_only: bool) -> pb.ForwardBackwardRequest:
    """`{data, loss_fn}`, flat or below forward_backward_input or forward_input."""
    inner = fields.fields_or("forward_backward_input", None) or fields.fields_or("forward_input", None) or fields
    message = pb.ForwardBackwardRequest(
        model_id=fields.text("model_id"), loss_fn=inner.text("loss_fn"), forward_only=forward_only
    )
    for key, value in inner.fields_or("loss_fn_config", Fields({})).values.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config_v2[key].number = Fields({key: value}, f"{inner.where}loss_fn_config.").number(key)
    data = inner.values.get("data")
    if not isinstance(data, list):
        raise UserError(f"{inner.path('data')} is {show(data)}; it must be a list of data")
    for index, datum in enumerate(data):
        where = f"{inner.where}data[{index}]"
        _write_datum(message.data.add(), Fields({"datum": datum}, f"{where}:").fields("datum"), where)
    return message


def _write_datum(message: pb.Datum, datum: Fields, where: str) -> None:
    for tokens in prompt_chunks(datum.values.get("model_input"), f"{where}.model_input"):
        message.model_input.add().encoded_text.tokens = tokens.astype("<i4").tobytes()
    inputs = datum.fields("loss_fn_inputs")
    for name, value in inputs.values.items():
        _write_tensor(message.loss_fn_inputs[name], name, value, f"{where}.loss_fn_inputs[{show(name)}]")


def prompt_chunks(value: object, where: str) -> list[npt.NDArray[np.int32]]:
    """Token ids as this dialect writes them: a list, `tokens`, `input_ids`, or the SDK's chunks."""
    if isinstance(value, list):
        return [token_ids(value, where)]
    if not isinstance(value, dict):
        raise UserError(f"{where} is {show(value)}; it must be a list of token ids, or an object that holds one")
    for name in ("tokens", "input_ids"):
        if name in value:
            return [token_ids(value[name], f"{where}.{name}")]
    chunks = value.get("chunks")
    if not isinstance(chunks, list):
        raise UserError(f"{where} has neither chunks nor tokens nor input_ids")
    found: list[npt.NDArray[np.int32]] = []
    for index, chunk in enumerate(chunks):
        at = f"{where}.chunks[{index}]"
        if not isinstance(chunk, dict):
            raise UserError(f"{at} is {show(chunk)}; it must be an object")
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise refuse_chunk(at, chunk.get("type"))
        found.append(token_ids(chunk.get("tokens"), f"{at}.tokens"))
    return found


def _write_tensor(message: pb.Tensor, name: str, value: object, where: str) -> None:
    if isinstance(value, list):
        if name not in LIST_DTYPES:
            raise UserError(f"{where} is a plain list; give it as {{data, dtype, shape}}")
        value = {"data": value, "dtype": LIST_DTYPES[name]}
    if not isinstance(value, dict):
        raise UserError(f"{where} is {show(value)}; it must be a list, or an object with data and dtype")
    tensor = Fields(value, f"{where}.")
    dtype = tensor.text("dtype")
    if dtype not in DTYPES:
        raise UserError(f"{where}.dtype is {show(dtype)}; it must be one of {', '.join(DTYPES)}")
    message.dtype, wanted = DTYPES[dtype]
    data = _numbers(tensor, "data", wanted)
    shape = None if not tensor.has("shape") else _flat(tensor, "shape").tolist()
    if tensor.has("sparse_crow_indices") or tensor.has("sparse_col_indices"):
        if shape is None:
            raise UserError(f"{where}.shape is missing; a sparse tensor needs it")
        message.sparse_csr.values = data.tobytes()
        message.sparse_csr.crow_indices = _flat(tensor, "sparse_crow_indices").tobytes()
        message.sparse_csr.col_indices = _flat(tensor, "sparse_col_indices").tobytes()
    else:
        message.dense = data.tobytes()
    message.shape.extend(data.shape if shape is None else shape)


def _flat(fields: Fields, name: str) -> np.ndarray:
    found = _numbers(fields, name, np.dtype("<i8"))
    if found.ndim != 1:
        raise UserError(f"{fields.path(name)} is {show(fields.values[name])}; it must be a flat list of integers")
    return found


def _numbers(fields: Fields, name: str, dtype: np.dtype[np.generic]) -> np.ndarray:
    """A list of numbers, nested if it is a dense array of more dimensions."""
    value = fields.values.get(name)
    if not isinstance(value, list):
        raise UserError(f"{fields.path(name)} is {show(value)}; it must be a list of numbers")
    if not value:
        return np.empty(0, dtype)
    try:
        found = np.array(value)
    except (ValueError, OverflowError) as error:
        raise UserError(f"{fields.path(name)} is not an array of numbers: {error}") from error
    if found.dtype.kind not in ("i" if dtype.kind == "i" else "iuf"):
        wanted = "integers of at most 64 bits" if dtype.kind == "i" else "numbers"
        raise UserError(f"{fields.path(name)} must be a list of {wanted}, which {show(value)} is not")
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused with the loss's words
        return found.astype(dtype)


def pass_result(body: bytes) -> dict[str, object]:
    """Losses and logprobs as the SDK's JSON types have them."""
    message = pb.ForwardBackwardOutput.FromString(body)
    outputs: list[dict[str, object]] = []
    for record in message.loss_fn_outputs:
        fields = {name: _arrays(tensor) for name, tensor in record.fields.items()}
        for index in range(record.num_datums):
            outputs.append({name: arrays[index] for name, arrays in fields.items()})
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": outputs,
        "metrics": dict(message.metrics),
    }


def _arrays(tensor: pb.BatchedTensor) -> list[dict[str, object]]:
    offsets = np.frombuffer(tensor.offsets, "<i8")
    name, dtype = next((name, dtype) for name, (number, dtype) in DTYPES.items() if number == tensor.dtype)
    arrays = [np.frombuffer(tensor.data[start:stop], dtype) for start, stop in pairwise(offsets)]
    shaped = [array.reshape(-1, *tensor.trailing_shape) for array in arrays]
    return [{"data": array.ravel().tolist(), "dtype": name, "shape": list(array.shape)} for array in shaped]


def sample_result(body: bytes) -> dict[str, object]:
    """Undefined logprobs (NaN on the wire) are null."""
    message = pb.SampleResponse.FromString(body)
    scored = message.HasField("prompt_logprobs")
    sequences = [
        {
            "stop_reason": STOP_REASONS[sequence.stop_reason],
            "tokens": np.frombuffer(sequence.tokens, "<i4").tolist(),
            "logprobs": np.frombuffer(sequence.logprobs, "<f4").tolist(),
        }
        for sequence in message.sequences
    ]
    prompt_logprobs = np.frombuffer(message.prompt_logprobs, "<f4").tolist() if scored else None
    return {"type": "sample", "sequences": sequences, "prompt_logprobs": prompt_logprobs}


def sample_body(fields: Fields, prompt: object, where: str) -> dict[str, object]:
    """One of the prompts of a `sample` as the body of an asample, but for its session and number."""
    chunks = [{"type": "encoded_text", "tokens": tokens.tolist()} for tokens in prompt_chunks(prompt, where)]
    kept = {
        name: fields.values[name]
        for name in ("num_samples", "prompt_logprobs", "topk_prompt_logprobs")
        if fields.has(name)
    }
    params = fields.fields_or("sampling_params", Fields({}))
    return kept | {"prompt": {"chunks": chunks}, "sampling_params": _sampling_params(params)}


def _sampling_params(params: Fields) -> Mapping[str, object]:
    """`stop_token_ids` stand beside `stop` in this dialect; here a stop is either."""
    values = dict(params.values)
    stop_token_ids = values.pop("stop_token_ids", None)
    if stop_token_ids:
        if values.get("stop"):
            raise UserError("sampling_params has both stop and stop_token_ids; give one of them")
        values["stop"] = stop_token_ids
    return values
