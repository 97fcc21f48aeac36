"""Loss inputs in tinkercloud's form: those of the response alone, and masks.

Such a datum has the tokens of prompt and response, and lists of one entry per token of the response, so they belong to
the end of the model input. `complete` extends them to the whole input, as the losses take them, and masks the rest. It
applies to JSON passes only; in the SDK's messages a short list is an error. Shape letter: N positions of one datum.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tinsmith.wire import tinker_public_pb2 as pb
from tinsmith.wire.json_results import DTYPES

TARGETS, MASK = "target_tokens", "mask"
CREDITS = ("weights", "advantages")
"""The inputs of which 0 leaves a position out of a loss."""
CLIPS = ("clip_low_threshold", "clip_high_threshold")
PER_POSITION = (TARGETS, *CREDITS, *CLIPS, "logprobs", "sequence_ratio_mask", MASK)
_DTYPES = dict(DTYPES.values())

Array = npt.NDArray[np.generic]


def complete(datum: pb.Datum) -> None:
    """Extend one-dimensional loss inputs that are shorter than the model input to its length, at the front, and
    multiply weights or advantages by a `mask`. A datum with images or with an empty input is left as it is.

    Without target tokens, the entries of short inputs belong to the tokens themselves: each token is the target of the
    position before it, and the last one is no input.
    """
    inputs = _read_inputs(datum)
    num_response = min(map(len, inputs.values()), default=0)
    kinds = {chunk.WhichOneof("chunk") for chunk in datum.model_input}
    if not num_response or kinds != {"encoded_text"}:
        return
    tokens_N = np.concatenate([np.frombuffer(chunk.encoded_text.tokens, "<i4") for chunk in datum.model_input])
    if num_response < len(tokens_N):
        if TARGETS not in datum.loss_fn_inputs:
            inputs = {name: values[-(len(tokens_N) - 1) :] for name, values in inputs.items()}
            inputs[TARGETS] = tokens_N[1:].astype("<i8")
            tokens_N = tokens_N[:-1]
            del datum.model_input[1:]
            datum.model_input[0].encoded_text.tokens = tokens_N.tobytes()
        inputs = _right_align(inputs, tokens_N, min(num_response, len(tokens_N)))
    if MASK in inputs:
        _apply_mask(inputs, inputs.pop(MASK))
        del datum.loss_fn_inputs[MASK]
    for name, values in inputs.items():
        _write_input(datum, name, values)


def _read_inputs(datum: pb.Datum) -> dict[str, Array]:
    """The dense inputs of one dimension; others keep their shape, which the losses check."""
    inputs: dict[str, Array] = {}
    for name in PER_POSITION:
        tensor = datum.loss_fn_inputs.get(name)
        if tensor is not None and tensor.HasField("dense") and len(tensor.shape) == 1:
            values = np.frombuffer(tensor.dense, _DTYPES[tensor.dtype])
            if len(values) == tensor.shape[0]:
                inputs[name] = values
    return inputs


def _right_align(inputs: dict[str, Array], tokens_N: npt.NDArray[np.int32], num_response: int) -> dict[str, Array]:
    """All inputs with N entries, of which the last `num_response` count in the loss."""
    num_before = len(tokens_N) - num_response
    aligned = {name: _extend(name, values, tokens_N) for name, values in inputs.items()}
    for name in CREDITS:
        if name in aligned:
            aligned[name] = aligned[name].copy()
            aligned[name][:num_before] = 0
    if not any(name in aligned for name in CREDITS):
        aligned["weights"] = np.repeat(np.array([0, 1], "<f4"), [num_before, num_response])
    return aligned


def _extend(name: str, values: Array, tokens_N: npt.NDArray[np.int32]) -> Array:
    missing = len(tokens_N) - len(values)
    if missing <= 0:
        return values
    if name == TARGETS:
        front = np.roll(tokens_N, -1)[:missing].astype(values.dtype)  # any tokens, since they are masked
    elif name in CLIPS and len(values):
        front = np.repeat(values[:1], missing)
    else:
        front = np.zeros(missing, values.dtype)
    return np.concatenate([front, values])


def _apply_mask(inputs: dict[str, Array], mask: Array) -> None:
    for name in CREDITS:
        if name in inputs and len(inputs[name]) == len(mask):
            inputs[name] = np.multiply(inputs[name], mask, dtype="<f4")
    if not any(name in inputs for name in CREDITS):
        inputs["weights"] = mask.astype("<f4")


def _write_input(datum: pb.Datum, name: str, values: Array) -> None:
    tensor = datum.loss_fn_inputs[name]
    tensor.dtype = pb.DTYPE_INT64 if values.dtype.kind == "i" else pb.DTYPE_FLOAT32
    tensor.dense = values.tobytes()
    del tensor.shape[:]
    tensor.shape.append(len(values))
