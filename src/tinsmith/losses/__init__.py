"""The losses, and the check of a pass against them.

`loss_registry` is the contract of docs/losses.md: inputs, configuration keys, defaults, formula, and special
requirements. Other code reads an entry's fields and never compares names. The server calls `check_pass` at admission,
and the backend calls it before it runs, so that no malformed pass reaches a device. Every error names the datum, the
field, the value and the fix. The package uses only numpy, and reads nothing but the installation's entry points.

Shape letters: N positions of one datum, K targets per position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tinsmith.errors import UserError
from tinsmith.losses.formulas import Columns, Formula, LossTerms, differentiate
from tinsmith.losses.registry import (
    CLIP_HIGH,
    CLIP_LOW,
    DUAL_CLIP,
    LOSSES,
    RATIO_MASK,
    ROLLOUT_LOGPROBS,
    ROLLOUT_MAX,
    Loss,
    list_plugins,
    loss_registry,
)
from tinsmith.types import F32, I64, Array, CustomLoss, Datum, ModelShape, Pass, SparseRows

__all__ = [
    "CLIP_HIGH",
    "CLIP_LOW",
    "DUAL_CLIP",
    "LOSSES",
    "RATIO_MASK",
    "ROLLOUT_LOGPROBS",
    "ROLLOUT_MAX",
    "Columns",
    "Formula",
    "Loss",
    "LossTerms",
    "check_pass",
    "differentiate",
    "list_plugins",
    "loss_registry",
]

MAX_TARGETS_PER_DATUM = 1 << 24
"""Most cells of a sparse tensor's shape. Results are dense, so larger tensors are refused."""

EXACT_INTEGER = 1 << 24
"""Integer weights are converted to float32; above this, the conversion is not exact."""

LOSS_ID = "loss_id"


def check_pass(request: Pass, shape: ModelShape) -> None:
    """Raise UserError unless the backend can compute this pass. Ignores inputs unknown to the loss."""
    loss = loss_registry().get(request.loss_fn)
    if loss is None:
        raise UserError(f"loss_fn is {_quote(request.loss_fn)}; it must be one of {', '.join(loss_registry())}")
    config = resolve_config(request)
    if not request.data:
        raise UserError("data is empty; send at least one datum")
    for index, datum in enumerate(request.data):
        _check_shapes(index, datum, request.loss_fn, loss, shape)
    _check_values(request.data, "model_input tokens", _tokens, 0, shape.vocab_size)
    _check_values(request.data, "target_tokens", _values_of("target_tokens"), 0, shape.vocab_size)
    for name in loss.inputs[1:]:
        _check_values(request.data, name, _values_of(name))
    if CLIP_LOW in loss.config:
        _check_clips(request.data, config)
    if RATIO_MASK in loss.inputs:
        _check_ratio_masks(request.data, loss)
    if request.custom_loss is not None:
        for index, datum in enumerate(request.data):
            _check_custom_inputs(index, datum, request.custom_loss)


def loss_id_of(request: Pass) -> str | None:
    """Return the id of a stored custom loss, or None for other losses. Raises UserError if it is missing."""
    loss = loss_registry().get(request.loss_fn)
    if loss is None or not loss.custom:
        return None
    loss_id = request.loss_config.get(LOSS_ID)
    if not isinstance(loss_id, str) or len(request.loss_config) != 1:
        raise UserError(
            f"loss_fn_config is {_quote(dict(request.loss_config))}; 'custom' takes one text, {LOSS_ID!r}, as "
            "returned by create_custom_loss"
        )
    return loss_id


def resolve_config(request: Pass) -> dict[str, float]:
    """Merge the pass's configuration with its loss's defaults. Raises UserError for an invalid key or value."""
    if loss_id_of(request) is not None:
        return {}
    loss = loss_registry()[request.loss_fn]
    defaults = loss.config
    for key, value in request.loss_config.items():
        field = f"loss_fn_config[{_quote(key)}]"
        if key not in defaults:
            choices = f"it takes {', '.join(defaults)}" if defaults else "it takes no configuration"
            raise UserError(f"{field} is not a setting of {request.loss_fn}; {choices}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{field} is {_quote(value)}; it must be a number")
        low, high = loss.ranges.get(key, (0.0, math.inf))
        if not math.isfinite(value) or not low <= value <= high:
            limits = "not negative" if (low, high) == (0, math.inf) else f"between {low:g} and {high:g}"
            raise UserError(f"{field} is {value}; it must be finite and {limits}")
    config = {key: float(request.loss_config.get(key, default)) for key, default in defaults.items()}
    if CLIP_LOW in config and config[CLIP_LOW] > config[CLIP_HIGH]:
        raise UserError(
            f"loss_fn_config: {CLIP_LOW} {config[CLIP_LOW]} is above {CLIP_HIGH} {config[CLIP_HIGH]}; "
            f"both bound the probability ratio, for example 0.8 and 1.2"
        )
    if 0 < config.get(DUAL_CLIP, 0) <= 1:
        field = f"loss_fn_config['{DUAL_CLIP}'] is {config[DUAL_CLIP]}"
        raise UserError(f"{field}; it must be greater than 1, for example 3, or 0 (off)")
    if config.get(ROLLOUT_MAX) == 0:
        raise UserError(f"loss_fn_config['{ROLLOUT_MAX}'] is 0.0; it must be greater than 0")
    return config


def dense(array: Array) -> F32 | I64:
    """Return an array in dense form; a dense array is unchanged."""
    if not isinstance(array, SparseRows):
        return array
    full: F32 | I64 = np.zeros(array.shape, array.values.dtype)  # type: ignore[assignment]
    rows = np.repeat(np.arange(array.shape[0]), np.diff(array.crow_indices))
    full[rows, array.col_indices] = array.values
    return full


def floats(array: Array) -> F32:
    """Return an input as dense float32. Admission accepts only integers that float32 represents exactly."""
    return np.asarray(dense(array), np.float32)


def rollout_weights(datum: Datum, config: Mapping[str, float]) -> F32:
    """[N] Truncated importance weights of a datum with rollout_logprobs, constants that multiply its advantages:
    min(exp(logprobs - rollout_logprobs), rollout_ratio_max).
    """
    log_ratio_N = floats(datum.inputs["logprobs"]).astype(np.float64) - floats(datum.inputs[ROLLOUT_LOGPROBS])
    return np.exp(np.minimum(log_ratio_N, math.log(config[ROLLOUT_MAX]))).astype(np.float32)


def cross_entropy_weights(datum: Datum) -> F32:
    """Return weights in the shape of target_tokens, dense or sparse; ones if the datum has no weights."""
    return input_weights(datum, LOSSES["cross_entropy"])


def input_weights(datum: Datum, loss: Loss) -> F32:
    """Return the loss's weights in the shape of target_tokens; ones, or a plug-in's default, where there are none."""
    if loss.weight is not None and loss.weight in datum.inputs:
        return floats(datum.inputs[loss.weight])
    default = loss.defaults.get(loss.weight, 1.0) if loss.weight else 1.0
    return np.full(datum.inputs["target_tokens"].shape, default, np.float32)


def elementwise_cross_entropy(weights: F32, logprobs: F32) -> F32:
    """Return each pair's loss; both arrays have the same shape. The loss is 0 if the weight is 0, even if the log
    probability is -inf, and inf on float32 overflow.
    """
    with np.errstate(over="ignore"):
        return np.multiply(-weights, logprobs, out=np.zeros_like(logprobs), where=weights != 0)


def token_weight(request: Pass) -> float | None:
    """Return the divisor that turns an admitted pass's `loss:sum` into a mean per token; None if the loss is not a sum
    over tokens.

    cross_entropy: the sum of the absolute weights. Prompts of weight 0 do not count, and weights of both signs (a
    gradient that the client computed) sum to 0 only if all are 0. Policy losses: the number of positions with a weight
    (an advantage) other than 0. custom: None, since it is a sum over data.
    """
    loss = loss_registry()[request.loss_fn]
    if loss.custom:
        return None
    weights = (input_weights(datum, loss) for datum in request.data)
    if loss.is_policy:
        return float(sum(map(np.count_nonzero, weights)))
    return float(sum(np.abs(array).sum(dtype=np.float64) for array in weights))


def _check_shapes(index: int, datum: Datum, loss_fn: str, loss: Loss, shape: ModelShape) -> None:
    num_positions = len(datum.tokens_N)
    if datum.tokens_N.ndim != 1 or num_positions == 0:
        raise UserError(f"data[{index}].model_input has no tokens; it must have at least one")
    if num_positions > shape.max_context_length:
        raise UserError(
            f"data[{index}].model_input has {num_positions} tokens; {shape.name} takes at most "
            f"{shape.max_context_length}"
        )
    for name in loss.required:
        if name not in datum.inputs:
            needs = ", ".join(loss.required)
            raise UserError(f"data[{index}].loss_fn_inputs has no {name!r}; {loss_fn} needs {needs}")
    targets = datum.inputs["target_tokens"]
    _check_input(index, "target_tokens", targets, (num_positions,), loss)
    for name in loss.inputs[1:]:
        if name in datum.inputs:
            _check_input(index, name, datum.inputs[name], targets.shape, loss)


def _check_input(index: int, name: str, array: Array, expected: tuple[int, ...], loss: Loss) -> None:
    field = f"data[{index}].loss_fn_inputs[{name!r}]"
    values = array.values if isinstance(array, SparseRows) else array
    if name == "target_tokens":
        if values.dtype != np.int64:
            raise UserError(f"{field} is {values.dtype}; token ids must be int64")
        if loss.many_targets and len(array.shape) == 2 and array.shape[1] > 0:
            expected = (*expected, array.shape[1])
    elif values.dtype not in (np.float32, np.int64):
        raise UserError(f"{field} is {values.dtype}; it must be float32")
    if tuple(array.shape) != expected:
        hint = "as target_tokens" if name != "target_tokens" else "one target per token of model_input"
        if name == "target_tokens" and loss.many_targets:
            hint += f", or [{expected[0]}, K] for K targets"
        raise UserError(f"{field} has shape {list(array.shape)}; it must be {list(expected)}: {hint}")
    if isinstance(array, SparseRows):
        check_csr(field, array)


def check_csr(field: str, array: SparseRows) -> None:
    num_rows, num_cols = array.shape
    crow, col, num_values = array.crow_indices, array.col_indices, len(array.values)
    if num_rows * num_cols > MAX_TARGETS_PER_DATUM:
        raise UserError(f"{field} has shape {list(array.shape)}: more than {MAX_TARGETS_PER_DATUM} cells")
    if len(crow) != num_rows + 1 or crow[0] != 0 or (np.diff(crow) < 0).any() or crow[-1] != num_values:
        raise UserError(f"{field}.crow_indices must be {num_rows + 1} ascending numbers from 0 to {num_values}")
    if len(col) != num_values:
        raise UserError(f"{field} has {len(col)} col_indices for {num_values} values; there must be as many")
    if num_values and not 0 <= col.min() <= col.max() < num_cols:
        raise UserError(f"{field}.col_indices reach from {col.min()} to {col.max()}; they must lie in [0, {num_cols})")
    cells = np.repeat(np.arange(num_rows), np.diff(crow)) * num_cols + col
    if len(np.unique(cells)) != num_values:
        raise UserError(f"{field} lists a cell twice; each may have one value")


def _tokens(datum: Datum) -> npt.NDArray[np.generic] | None:
    return datum.tokens_N


def _values_of(name: str) -> Callable[[Datum], npt.NDArray[np.generic] | None]:
    def values(datum: Datum) -> npt.NDArray[np.generic] | None:
        array = datum.inputs.get(name)
        return array.values if isinstance(array, SparseRows) else array

    return values


def _check_values(
    data: Sequence[Datum],
    name: str,
    values: Callable[[Datum], npt.NDArray[np.generic] | None],
    low: int | None = None,
    high: int | None = None,
) -> None:
    """Check all data at once; only a failure searches for the datum. Without bounds: exact float32 values."""
    arrays = [array for datum in data if (array := values(datum)) is not None and array.size]
    if all(_are_valid(group, low, high) for group in _by_dtype(arrays)):
        return
    for index, datum in enumerate(data):
        array = values(datum)
        if array is None or not array.size or _are_valid(array, low, high):
            continue
        flat = array.reshape(-1)
        bad = next(value for value in flat if not _are_valid(np.array([value], flat.dtype), low, high))
        if low is not None:
            raise UserError(f"data[{index}]: {name} holds {bad}; token ids must lie in [{low}, {high})")
        raise UserError(
            f"data[{index}].loss_fn_inputs[{name!r}] holds {bad}; it must be a finite number, and an integer "
            f"at most {EXACT_INTEGER} in size"
        )


def _by_dtype(arrays: Sequence[npt.NDArray[np.generic]]) -> list[npt.NDArray[np.generic]]:
    return [
        np.concatenate([array.reshape(-1) for array in arrays if array.dtype == dtype])
        for dtype in {array.dtype for array in arrays}
    ]


def _are_valid(array: npt.NDArray[np.generic], low: int | None, high: int | None) -> bool:
    if low is not None and high is not None:
        return bool(low <= array.min() and array.max() < high)
    if array.dtype == np.int64:
        return bool(array.min() >= -EXACT_INTEGER and array.max() <= EXACT_INTEGER)
    return bool(np.isfinite(array).all())


def _check_clips(data: Sequence[Datum], config: Mapping[str, float]) -> None:
    for index, datum in enumerate(data):
        low, high = datum.inputs.get(CLIP_LOW), datum.inputs.get(CLIP_HIGH)
        if low is None and high is None:
            continue
        # Compared as the formulas do, in float32: there 1.2 per token is not above a configured 1.2.
        low_N = np.asarray(config[CLIP_LOW], np.float32) if low is None else floats(low)
        high_N = np.asarray(config[CLIP_HIGH], np.float32) if high is None else floats(high)
        if (low_N > high_N).any() or (low_N < 0).any():
            raise UserError(
                f"data[{index}].loss_fn_inputs: {CLIP_LOW} must lie between 0 and {CLIP_HIGH} at every position "
                f"(a threshold that is not given is {config[CLIP_LOW]} or {config[CLIP_HIGH]})"
            )


def _check_custom_inputs(index: int, datum: Datum, loss: CustomLoss) -> None:
    """Check every input that the loss reads, with its declared rank. On the wire a scalar is one value."""
    for declared in loss.inputs:
        name = "target_tokens" if declared.name == "logprobs" else declared.name
        field = f"data[{index}].loss_fn_inputs[{name!r}]"
        if name not in datum.inputs:
            raise UserError(f"{field} is missing; custom loss {_quote(loss.name)} reads it")
        array = datum.inputs[name]
        if isinstance(array, SparseRows):
            check_csr(field, array)
        elif array.dtype not in (np.float32, np.int64) or array.size > MAX_TARGETS_PER_DATUM:
            raise UserError(
                f"{field} is {array.size} values of {array.dtype}; it must be float32 or int64, "
                f"at most {MAX_TARGETS_PER_DATUM}"
            )
        if len(array.shape) != declared.rank and not (declared.rank == 0 and array.shape == (1,)):
            raise UserError(
                f"{field} has rank {len(array.shape)}; custom loss {_quote(loss.name)} declared {declared.rank}"
            )


def _check_ratio_masks(data: Sequence[Datum], loss: Loss) -> None:
    for index, datum in enumerate(data):
        mask = datum.inputs.get(RATIO_MASK)
        if mask is not None and not floats(mask).any() and input_weights(datum, loss).any():
            raise UserError(
                f"data[{index}].loss_fn_inputs['sequence_ratio_mask'] is zero everywhere; "
                f"the sequence's ratio needs at least one position"
            )


def _quote(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
