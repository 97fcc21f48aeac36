"""Runs a custom loss: node by node, on the host, restricted to a table of allowed functions.

A `CustomRun` evaluates one pass's loss. It takes each datum's log probabilities once, differentiates the loss by
autograd, and stores the datum's loss and metrics; the gradient continues into the packed step's ordinary backward. It
runs on the host because the log probabilities go there anyway, a few numbers need no kernel launches, and a loss that
needs too much memory cannot use the device's. A failure fails its pass and is never raised. The sizes of results are
bounded before they are computed (`_Bounds`), and time is checked between nodes. Uses the tables of `losses.graphs`,
which validate what the client sent, and looks up nothing else.
"""

from __future__ import annotations

import math
import operator
import time
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tinsmith import losses
from tinsmith.errors import UserError
from tinsmith.losses.graphs import (
    ATTRIBUTES,
    CONSTANTS,
    FUNCTIONS,
    MAX_ELEMENTS,
    MAX_PRODUCTS,
    MAX_SECONDS,
    MAX_TOTAL_ELEMENTS,
    METHODS,
    check_graph,
    output_of,
)
from tinsmith.types import F32, CustomLoss, Datum, LossArgument, LossNode, NodeRef, SliceArgument, TorchConstant

MAX_INTEGER = 2**63
MAX_EXPONENT = 64
MAX_SEQUENCE = 64
"""Longest list or tuple, of sizes and the like; dimensions are at most 64."""

ROOTS = {"torch": torch, "operator": operator, "math": math}
DTYPES = {name: getattr(torch, name) for name in CONSTANTS["dtype"]}
TENSOR_DTYPES = frozenset(DTYPES.values())

SIZED_BY_NUMBERS = frozenset(("repeat", "tile", "new_zeros", "new_ones", "new_full"))
"""Operations whose result is as large as a number argument says, not as large as their tensors."""

PRODUCTS = frozenset(("matmul", "mm", "dot", "outer"))
MULTIPLYING = PRODUCTS | {"getitem", "index_select"}
"""Operations that may give more elements than their tensors have, even for tensors of one shape."""

OPERATION_ERRORS = (RuntimeError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
"""Exceptions of an operation whose arguments do not fit."""


def _resolve_function(path: str) -> Callable[..., object]:
    root, *names = path.split(".")
    member: object = ROOTS[root]
    for name in names:
        member = getattr(member, name)
    assert callable(member)
    return member


def _attribute(value: object, name: object) -> object:
    assert isinstance(name, str)
    return _ATTRIBUTES[name](value)


_ATTRIBUTES: Mapping[str, Callable[..., object]] = {name: operator.attrgetter(name) for name in ATTRIBUTES}
_FUNCTIONS = {name: _attribute if name == "getattr" else _resolve_function(name) for name in FUNCTIONS}
_METHODS = {name: getattr(Tensor, name) for name in METHODS}


class CustomRun:
    """One pass's loss; `failure` says why it stopped early, and from then on every gradient is zero."""

    def __init__(self, loss: CustomLoss, data: Sequence[Datum], *, max_seconds: float = MAX_SECONDS) -> None:
        """Raises UserError if the graph is not allowed."""
        check_graph(loss)
        self._loss = loss
        self._data = data
        self._max_seconds = max_seconds
        self._seconds = 0.0
        self._output, self._metrics = output_of(loss)
        self._values: dict[int, tuple[float, list[float]]] = {}
        self.failure: UserError | None = None

    def weights(self, index: int, logprobs: Tensor) -> F32:
        """Minus the gradient of datum `index`'s loss: as cross_entropy's weights these give that gradient."""
        leaf = logprobs.detach().clone().requires_grad_()
        if self._run(index, leaf):
            assert leaf.grad is not None
            # From zeros, since autograd may return a zero tensor without storage.
            return (torch.zeros(leaf.shape) - leaf.grad).numpy()
        return np.zeros(tuple(leaf.shape), np.float32)

    def finish(self, logprobs: Sequence[F32]) -> dict[str, float] | UserError:
        """The metrics of the pass; evaluates data that were not differentiated."""
        for index, array in enumerate(logprobs):
            if index not in self._values and self.failure is None:
                self._run(index, torch.from_numpy(array).clone())
        if self.failure is not None:
            return self.failure
        rows = [self._values[index] for index in range(len(self._data))]
        metrics = {"loss:sum": sum(loss for loss, _ in rows)}
        for position, key in enumerate(self._metrics):
            total = sum(values[position] for _, values in rows)
            metrics[key] = total / len(rows) if key.endswith(":mean") else total
        return metrics

    def _run(self, index: int, logprobs: Tensor) -> bool:
        """Evaluate one datum, with its gradient if `logprobs` requires one; False if the pass has failed."""
        if self.failure is not None:
            return False
        try:
            with warnings.catch_warnings(), torch.set_grad_enabled(logprobs.requires_grad):
                warnings.simplefilter("ignore")
                self._values[index] = self._evaluate(index, logprobs)
        except UserError as error:
            self.failure = UserError(f"custom loss {_quote(self._loss.name)} failed at data[{index}]: {error}")
        return self.failure is None

    def _evaluate(self, index: int, logprobs: Tensor) -> tuple[float, list[float]]:
        started = time.thread_time()
        bounds = _Bounds()
        values: dict[str, object] = {}
        inputs = iter(self._inputs(index, logprobs))
        for node in self._loss.nodes[:-1]:
            values[node.name] = next(inputs) if node.op == "placeholder" else _call(node, values, bounds)
            self._check_time(started, node.name)
        loss = _scalar("its loss", values[self._output.name], must_be_flat=True)
        metrics = [float(_scalar(key, values[ref.name])) for key, ref in self._metrics.items()]
        if logprobs.requires_grad:
            _differentiate(loss, logprobs)
            self._check_time(started, "the gradient")
        self._seconds += time.thread_time() - started
        return float(loss), metrics

    def _inputs(self, index: int, logprobs: Tensor) -> list[Tensor]:
        arrays = self._data[index].inputs
        inputs = [logprobs]
        for loss_input in self._loss.inputs[1:]:
            # A copy, since a loss may write to its inputs, which are views of the request body.
            array = np.array(losses.dense(arrays[loss_input.name]))
            inputs.append(torch.from_numpy(array.reshape(()) if loss_input.rank == 0 else array))
        return inputs

    def _check_time(self, started: float, node_name: str) -> None:
        # This thread's CPU time, which excludes other work on the machine.
        if self._seconds + time.thread_time() - started > self._max_seconds:
            raise UserError(
                f"it took more than {self._max_seconds:g} s in all, stopped at {node_name}; simplify it, or "
                "send less data"
            )


class _Bounds:
    """Bounds memory before it is allocated."""

    def __init__(self) -> None:
        self._total = 0

    def admit(self, node: LossNode, call: Callable[[], object], args: object) -> None:
        """Raise UserError if the call's result could be too large."""
        tensors = list(_tensors(args))
        sizes = [max(1, tensor.numel()) for tensor in tensors]
        name = node.target.rpartition(".")[2]
        depth = tensors[0].shape[-1] if tensors and tensors[0].ndim else 1
        if name in PRODUCTS and math.prod(sizes) > MAX_PRODUCTS * max(1, depth):
            raise UserError(f"{node.name}: {node.target} would take more than {MAX_PRODUCTS} multiplications")
        if name not in SIZED_BY_NUMBERS:
            alike = len({tensor.shape for tensor in tensors if tensor.numel() != 1}) <= 1
            if alike and name not in MULTIPLYING and sum(sizes) <= MAX_ELEMENTS:
                return  # elementwise, a reduction, or a concatenation
            if max(math.prod(sizes), sum(sizes)) <= MAX_ELEMENTS:
                return  # no broadcast or matmul of these is larger
        if name == "masked_select" or (name == "getitem" and any(tensor.dtype == torch.bool for tensor in tensors[1:])):
            if len(tensors) == 2 and tensors[1].numel() <= tensors[0].numel():
                return  # a selection from the first
            raise UserError(f"{node.name}: {node.target} with this mask could give more than {MAX_ELEMENTS} elements")
        self._check(node, call())

    def count(self, node: LossNode, result: object) -> None:
        self._check(node, result)
        self._total += sum(tensor.numel() for tensor in _tensors(result))
        if self._total > MAX_TOTAL_ELEMENTS:
            raise UserError(f"{node.name}: its results have more than {MAX_TOTAL_ELEMENTS} elements together")

    @staticmethod
    def _check(node: LossNode, result: object) -> None:
        for tensor in _tensors(result):
            if tensor.numel() > MAX_ELEMENTS:
                raise UserError(
                    f"{node.name}: {node.target} gives {tensor.numel()} elements; at most {MAX_ELEMENTS} are allowed"
                )


def _call(node: LossNode, values: Mapping[str, object], bounds: _Bounds) -> object:
    function = (_FUNCTIONS if node.op == "call_function" else _METHODS)[node.target]
    args = [_value(argument, values) for argument in node.args]
    kwargs = {name: _value(argument, values) for name, argument in node.kwargs.items()}
    try:
        if node.op == "call_method" and not isinstance(args[0], Tensor):
            raise UserError(f"{node.name}: {node.target} is a method of tensors, not of {type(args[0]).__name__}")
        if not any(True for _ in _tensors((args, kwargs))):
            _check_plain(node, args)
        bounds.admit(node, lambda: _without_memory(function, args, kwargs), (args, kwargs))
        result = function(*args, **kwargs)
    except OPERATION_ERRORS as error:
        raise UserError(f"{node.name}: {node.target} failed: {_first_line(error)}") from error
    _check_result(node, result)
    bounds.count(node, result)
    return result


def _value(argument: LossArgument, values: Mapping[str, object]) -> object:
    if isinstance(argument, NodeRef):
        return values[argument.name]
    if isinstance(argument, TorchConstant):
        return _constant(argument)
    if isinstance(argument, SliceArgument):
        return slice(*(_value(part, values) for part in (argument.start, argument.stop, argument.step)))
    if isinstance(argument, list):
        return [_value(item, values) for item in argument]
    if isinstance(argument, tuple):
        return tuple(_value(item, values) for item in argument)
    if isinstance(argument, dict):
        return {key: _value(item, values) for key, item in argument.items()}
    return argument


def _constant(constant: TorchConstant) -> object:
    if constant.kind == "dtype":
        return DTYPES[constant.name]
    if constant.kind == "device":
        return torch.device("cpu")
    if constant.kind == "layout":
        return torch.strided
    return torch.contiguous_format if constant.name == "contiguous_format" else torch.preserve_format


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, slice):
        return _tensors((value.start, value.stop, value.step))
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _without_memory(function: Callable[..., object], args: list[object], kwargs: dict[str, object]) -> object:
    """Call with meta tensors, which have a shape and no storage."""
    return function(*(_shape_of(arg) for arg in args), **{name: _shape_of(arg) for name, arg in kwargs.items()})


def _shape_of(value: object) -> object:
    if isinstance(value, Tensor):
        return torch.empty_like(value, device="meta")
    if type(value) is list:
        return [_shape_of(item) for item in value]
    if type(value) is tuple:
        return tuple(_shape_of(item) for item in value)
    return value


def _check_plain(node: LossNode, args: Sequence[object]) -> None:
    """Python's own numbers and sequences are unbounded, so few operations on them are allowed."""
    name = node.target
    if name in ("getattr", "operator.getitem"):
        return
    sequences = [arg for arg in args if isinstance(arg, list | tuple)]
    if sequences:
        sizes = all(isinstance(item, int) for sequence in sequences for item in sequence)
        if not (name == "operator.add" and len(sequences) == len(args) and sizes):
            raise UserError(f"{node.name}: {name} of sequences; only sizes may be joined, with +")
        return
    if not all(isinstance(arg, int | float) for arg in args):
        raise UserError(f"{node.name}: {name} of {', '.join(type(arg).__name__ for arg in args)}; use numbers")
    if name == "operator.pow" and isinstance(args[-1], int) and abs(args[-1]) > MAX_EXPONENT:
        raise UserError(f"{node.name}: an exponent of {args[-1]} is more than {MAX_EXPONENT}")


def _check_result(node: LossNode, result: object) -> None:
    """Allowed results: numbers, sizes, constants, and plain dense tensors on the host."""
    items = result if isinstance(result, list | tuple) else [result]
    if len(items) > MAX_SEQUENCE:
        raise UserError(f"{node.name}: {node.target} gives {len(items)} values; at most {MAX_SEQUENCE} are allowed")
    for item in items:
        if isinstance(item, Tensor):
            if item.dtype not in TENSOR_DTYPES or item.device.type != "cpu" or item.layout != torch.strided:
                raise UserError(f"{node.name}: {node.target} gives a tensor of {item.dtype} on {item.device}")
        elif isinstance(item, int | float):
            if isinstance(item, int) and abs(item) >= MAX_INTEGER:
                raise UserError(f"{node.name}: {node.target} gives an integer of more than 64 bits")
        elif not isinstance(item, torch.dtype | torch.device | None):
            raise UserError(f"{node.name}: {node.target} gives a {type(item).__name__}, which no custom loss may use")


def _scalar(name: str, value: object, *, must_be_flat: bool = False) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1 or (must_be_flat and value.ndim):
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UserError(f"{name} must be a scalar tensor, and is {shape}")
    return value.detach() if not must_be_flat else value


def _differentiate(loss: Tensor, logprobs: Tensor) -> None:
    if not loss.requires_grad:
        raise UserError("its loss does not depend on logprobs, so it has no gradient")
    try:
        loss.backward()
    except OPERATION_ERRORS as error:
        raise UserError(f"its gradient failed: {_first_line(error)}") from error
    if logprobs.grad is None:
        raise UserError("its loss does not depend on logprobs, so it has no gradient")
    if not bool(torch.isfinite(logprobs.grad).all()):
        position = int(torch.isfinite(logprobs.grad).reshape(-1).logical_not().nonzero()[0])
        gradient = float(logprobs.grad.reshape(-1)[position])
        raise UserError(f"its gradient at position {position} of logprobs is {gradient}; it must be finite")


def _first_line(error: Exception) -> str:
    return _quote((str(error) or type(error).__name__).splitlines()[0])


def _quote(text: str) -> str:
    return ascii(text[:200])
