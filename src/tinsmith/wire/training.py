"""forward, forward_backward and optim_step: request bytes -> types, results -> bytes.

The arrays of a `Pass` are views of the message's buffers, except that int32 and bfloat16 tensors and inputs of several
chunks are converted. Checks sizes, dtypes and shapes; `losses` checks the inputs of a loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import Field

from tinsmith.errors import UserError
from tinsmith.types import (
    F32,
    I64,
    AdamParams,
    Array,
    Datum,
    DatumSpans,
    DimuonParams,
    OptimParams,
    OptimStep,
    Pass,
    PassResult,
    Span,
    SparseRows,
    VisionShape,
)
from tinsmith.wire import tinker_public_pb2 as pb
from tinsmith.wire.bodies import check_messages
from tinsmith.wire.fields import (
    Body,
    ByType,
    ClosedBody,
    Ignored,
    Number,
    SequenceNumber,
    Text,
    read_object,
    show,
    validate,
)
from tinsmith.wire.images import ImageBytes, InputParts, refuse_chunk

RECORD_TYPE = "ArrayRecord"
MAX_DATA = 16384
"""Most data of one request; the SDK sends at most 1024."""

MAX_CHUNKS = 16384
MAX_TENSORS = 64
MAX_DIMENSIONS = 8
MAX_CELLS = 2**48
"""Most cells by an empty array's other sizes, since numpy computes their bytes."""

_WIRE_DTYPES: dict[int, np.dtype[np.generic]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),
}


def read_pass(body: bytes, request_id: str, vision: VisionShape | None = None) -> Pass:
    """Parse the stored body of a pass."""
    return pass_of(parse_pass(body), request_id, vision)


def parse_pass(body: bytes) -> pb.ForwardBackwardRequest:
    """The protobuf message, which names the model, before its data are checked."""
    check_messages(body, pb.ForwardBackwardRequest)
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise UserError(f"the body is not a ForwardBackwardRequest protobuf message: {error}") from error


def pass_of(message: pb.ForwardBackwardRequest, request_id: str, vision: VisionShape | None = None) -> Pass:
    """The pass of a message. `vision` is that of the base model; without it, images are refused."""
    _check_count("data", len(message.data), MAX_DATA)
    return Pass(
        request_id=request_id,
        model_id=message.model_id,
        data=tuple(_datum(datum, f"data[{index}]", vision) for index, datum in enumerate(message.data)),
        loss_fn=message.loss_fn,
        loss_config=_loss_config(message),
        forward_only=message.forward_only,
    )


def spans_of(message: pb.ForwardBackwardRequest) -> list[DatumSpans]:
    """The provenance of each datum, which stable_reinforce needs; `recorded_sequences` verifies it."""
    return [DatumSpans(_spans(datum.model_input_spans), _spans(datum.loss_fn_input_spans)) for datum in message.data]


def _spans(messages: Iterable[pb.ProvenanceSpan]) -> tuple[Span, ...]:
    spans = []
    for message in messages:
        sampled = message.WhichOneof("span") == "sampled_tokens"
        claim = message.sampled_tokens if sampled else message.prompt_tokens
        spans.append(Span(sampled, claim.sequence_id, claim.offset, claim.length))
    return tuple(spans)


def _loss_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    # The SDK writes numbers into both maps; the newer map takes precedence.
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise UserError(f"loss_fn_config[{show(key)}] has no value")
        config[key] = value.number if kind == "number" else value.text
    return config


def _check_count(path: str, count: int, limit: int) -> None:
    if count > limit:
        raise UserError(f"{path} has {count} entries; at most {limit} are taken")


def _datum(message: pb.Datum, path: str, vision: VisionShape | None) -> Datum:
    _check_count(f"{path}.model_input.chunks", len(message.model_input), MAX_CHUNKS)
    _check_count(f"{path}.loss_fn_inputs", len(message.loss_fn_inputs), MAX_TENSORS)
    inputs = {
        name: _tensor(tensor, f"{path}.loss_fn_inputs[{show(name)}]") for name, tensor in message.loss_fn_inputs.items()
    }
    parts = _parts(message.model_input, path, vision)
    return Datum(parts.tokens, inputs, parts.images)


def _parts(chunks: Sequence[pb.Chunk], path: str, vision: VisionShape | None) -> InputParts:
    parts = InputParts(vision)
    for index, chunk in enumerate(chunks):
        kind = chunk.WhichOneof("chunk")
        chunk_path = f"{path}.model_input.chunks[{index}]"
        if kind == "encoded_text":
            parts.add_tokens(_view(chunk.encoded_text.tokens, np.dtype("<i4"), f"{chunk_path}.tokens"))
        elif kind == "image":
            parts.add_image(_image(chunk.image), chunk_path)
        elif kind is None:
            raise UserError(f"{chunk_path} is empty; it must hold encoded text or an image")
        else:
            raise refuse_chunk(chunk_path, kind, vision)
    return parts


def _image(message: pb.ImageChunk) -> ImageBytes:
    expected = message.expected_tokens if message.HasField("expected_tokens") else None
    return ImageBytes(message.data, message.format, expected)


def _tensor(message: pb.Tensor, path: str) -> Array:
    dtype = _WIRE_DTYPES.get(message.dtype)
    if dtype is None:
        raise UserError(f"{path}.dtype is {message.dtype}; it must be float32, int64, int32 or bfloat16")
    _check_count(f"{path}.shape", len(message.shape), MAX_DIMENSIONS)
    check_sizes(path, message.shape)
    encoding = message.WhichOneof("encoding")
    if encoding is None:
        raise UserError(f"{path} has no data; it must be dense or sparse_csr")
    if encoding == "sparse_csr":
        return _sparse(message, dtype, path)
    flat = _widen(_view(message.dense, dtype, path), message.dtype)
    shape = tuple(message.shape) or flat.shape
    if math.prod(shape) != flat.size:
        raise UserError(f"{path} holds {flat.size} values, which do not fill its shape {list(shape)}")
    return flat.reshape(shape)


def check_sizes(path: str, shape: Sequence[int]) -> None:
    """Raise UserError for an invalid shape. Nothing else limits the shape of an array without cells."""
    if any(size < 0 for size in shape):
        raise UserError(f"{path}.shape is {list(shape)}; sizes cannot be negative")
    if 0 in shape and math.prod(size for size in shape if size) > MAX_CELLS:
        raise UserError(f"{path}.shape is {list(shape)}; its sizes are too large, even for an array without cells")


def _sparse(message: pb.Tensor, dtype: np.dtype[np.generic], path: str) -> SparseRows:
    if len(message.shape) != 2:
        raise UserError(f"{path}.shape is {list(message.shape)}; a sparse tensor must have two dimensions")
    csr = message.sparse_csr
    return SparseRows(
        values=_widen(_view(csr.values, dtype, f"{path}.values"), message.dtype),
        crow_indices=_view(csr.crow_indices, np.dtype("<i8"), f"{path}.crow_indices"),
        col_indices=_view(csr.col_indices, np.dtype("<i8"), f"{path}.col_indices"),
        shape=(message.shape[0], message.shape[1]),
    )


def _view(data: bytes, dtype: np.dtype[np.generic], path: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise UserError(f"{path} is {len(data)} bytes long, not a whole number of {dtype.itemsize}-byte values")
    return np.frombuffer(data, dtype)


def _widen(values: np.ndarray, dtype: int) -> F32 | I64:
    if dtype == pb.DTYPE_INT32:
        return values.astype(np.int64)
    if dtype == pb.DTYPE_BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def write_pass_result(result: PassResult) -> bytes:
    """One ArrayRecord per run of data whose logprobs have the same trailing shape (SDK: response_conv.py)."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type=RECORD_TYPE, metrics=dict(result.metrics))
    start = 0
    for stop in range(1, len(result.logprobs) + 1):
        trailing = result.logprobs[start].shape[1:]
        if stop == len(result.logprobs) or result.logprobs[stop].shape[1:] != trailing:
            record = message.loss_fn_outputs.add(type_tag=RECORD_TYPE, num_datums=stop - start)
            _write_field(record, "logprobs", result.logprobs[start:stop], trailing)
            if result.elementwise_loss:
                _write_field(record, "elementwise_loss", result.elementwise_loss[start:stop], trailing)
            start = stop
    return message.SerializeToString()


def _write_field(record: pb.ArrayRecord, name: str, arrays: Sequence[F32], trailing: tuple[int, ...]) -> None:
    tensor = record.fields[name]
    tensor.data = b"".join(np.ascontiguousarray(array, "<f4").tobytes() for array in arrays)
    tensor.offsets = np.cumsum([0, *(array.size * 4 for array in arrays)], dtype="<i8").tobytes()
    tensor.dtype = pb.DTYPE_FLOAT32
    tensor.trailing_shape.extend(trailing)


_ADAM = AdamParams()


NotNegative = Annotated[Number, Field(ge=0)]
Beta = Annotated[Number, Field(ge=0, lt=1)]


class AdamParamsBody(ClosedBody):
    learning_rate: NotNegative = _ADAM.learning_rate
    beta1: Beta = _ADAM.beta1
    beta2: Beta = _ADAM.beta2
    # A zero gradient would otherwise be divided by zero.
    eps: Annotated[Number, Field(gt=0)] = _ADAM.eps
    weight_decay: NotNegative = _ADAM.weight_decay
    grad_clip_norm: Annotated[NotNegative, Field(description="0 turns it off")] = _ADAM.grad_clip_norm
    type: Ignored = None

    @property
    def params(self) -> AdamParams:
        return AdamParams(**self.model_dump(exclude={"type"}))


class DimuonParamsBody(ClosedBody):
    learning_rate: NotNegative
    beta1: Beta = 0.9
    grad_clip_norm: Annotated[Number, Field(description="0 or less turns it off")] = 0.0
    type: Ignored = None

    @property
    def params(self) -> DimuonParams:
        return DimuonParams(**self.model_dump(exclude={"type"}))


FAMILIES = {"adamw": AdamParamsBody, "dimuon": DimuonParamsBody}


class OptimStepRequest(Body):
    model_id: Text
    adam_params: AdamParamsBody | None = None
    optimizer_params: Annotated[AdamParamsBody | DimuonParamsBody, ByType(FAMILIES)] | None = None
    seq_id: SequenceNumber | None = None


def read_optim_step(body: bytes, request_id: str) -> OptimStep:
    return optim_step_of(validate(OptimStepRequest, read_object(body)), request_id)


def optim_step_of(request: OptimStepRequest, request_id: str) -> OptimStep:
    return OptimStep(request_id=request_id, model_id=request.model_id, params=_optim_params(request))


def _optim_params(request: OptimStepRequest) -> OptimParams:
    adam, other = request.adam_params, request.optimizer_params
    if adam is not None and other is not None:
        raise UserError("adam_params and optimizer_params are both given; send those of the model's optimizer")
    if (params_body := adam or other) is None:
        raise UserError("adam_params is missing (optimizer_params, if the model was created with another optimizer)")
    return params_body.params
