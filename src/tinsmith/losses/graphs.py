"""Validates the traced graph of a custom loss against tables of allowed operations, values and bounds.

The server calls `check_graph` before it stores a loss, without importing torch. The backend runs only operations in
these tables. The tables contain names; nothing that a client sends is ever imported, evaluated or looked up as an
attribute. The tables exclude randomness (a replay must repeat results), uninitialised memory (`empty_like` would reveal
another tenant's data), in-place methods, host values, and operations that loop or grow with a number argument.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tinsmith.errors import UserError
from tinsmith.types import CustomLoss, LossArgument, LossNode, NodeRef, SliceArgument, TorchConstant

MAX_INPUTS = 16  # the SDK's limit
MAX_NODES = 1024
MAX_ARGUMENTS = 16384
"""Most values in the arguments of all nodes."""

MAX_ELEMENTS = 1 << 24
"""Most elements of one intermediate result, equal to the most targets of a datum."""

MAX_TOTAL_ELEMENTS = 1 << 27
"""Most elements of all intermediate results of a datum, since its backward pass may need all of them."""

MAX_PRODUCTS = 1 << 30
"""Most multiplications of one matrix product."""

MAX_SECONDS = 10.0
"""Most compute time of a loss and its gradient over all data of a pass, in seconds; checked between nodes."""

METRIC_KEY = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")  # the SDK's rule
INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")  # the SDK's rule
NODE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TENSOR_OPERATIONS = _names("""
    abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square sigmoid tanh sin cos tan
    atan erf erfc reciprocal sign sgn floor ceil round trunc frac relu isnan isinf isfinite logical_not nan_to_num
    lgamma digamma logit clone detach softmax log_softmax cumsum cumprod logcumsumexp cummax cummin
    add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power maximum minimum
    fmax fmin atan2 eq ne lt le gt ge greater greater_equal less less_equal not_equal logical_and logical_or
    logical_xor where clamp clip clamp_min clamp_max lerp addcmul addcdiv xlogy logaddexp logaddexp2 hypot
    masked_fill masked_select
    sum mean prod var std amax amin max min argmax argmin median logsumexp all any count_nonzero nansum nanmean
    reshape unsqueeze squeeze flatten transpose permute t swapaxes movedim flip roll narrow select tile
    index_select gather take_along_dim scatter scatter_add index_add tril triu diagonal
    sort argsort topk kthvalue outer dot matmul mm numel is_floating_point
""")  # fmt: skip

METHODS = _TENSOR_OPERATIONS | _names("""
    view view_as reshape_as expand expand_as repeat contiguous type_as to float double long int bool norm
    new_zeros new_ones new_full size dim ndimension nelement
""")

FUNCTIONS = (
    {f"torch.{name}" for name in _TENSOR_OPERATIONS}
    | {f"torch.{name}" for name in ("stack", "cat", "concat", "zeros_like", "ones_like", "full_like")}
    | {f"torch.nn.functional.{name}" for name in _names("""
        relu leaky_relu elu silu mish relu6 hardtanh tanh sigmoid softmax log_softmax softmin normalize
        mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits
    """)}
    | {f"torch._C._nn.{name}" for name in ("softplus", "log_sigmoid", "gelu")}
    | {f"torch._C._special.special_{name}" for name in _names("""
        expit exp2 expm1 log1p erf erfc xlogy xlog1py entr log_softmax softmax logsumexp logit
    """)}
    | {"torch._C._linalg.linalg_norm", "torch._C._linalg.linalg_vector_norm", "torch.functional.norm", "getattr"}
    | {f"operator.{name}" for name in _names("""
        add sub mul truediv floordiv mod pow neg pos abs getitem lt le eq ne gt ge and_ or_ xor invert matmul
        iadd isub imul itruediv
    """)}
    | {f"math.{name}" for name in _names("""
        sqrt exp log log2 log10 log1p expm1 pow floor ceil fabs tanh sin cos isnan isinf isfinite
    """)}
)  # fmt: skip

ATTRIBUTES = _names("shape ndim dtype device T mT values indices")
"""Attributes of a tensor, or of a pair such as the result of max, that getattr may read."""

KEYWORDS = _names("""
    input other self tensors dim dims axis keepdim dtype device min max alpha beta index src source value values
    descending stable largest sorted k n correction unbiased eps nan posinf neginf reduction weight pos_weight
    log_target delta p ord exponent diagonal offset dim1 dim2 dim0 axis0 axis1 shifts start length mask fill_value
    size shape repeats tensor1 tensor2 end rounding_mode reduce approximate negative_slope threshold min_val max_val
    target condition ndim indices rounding memory_format layout end_dim start_dim source destination axes
    mat2 vec2 tensor copy decimals _stacklevel
""")
"""Allowed keyword arguments; `out`, `inplace`, `generator` and similar ones are excluded."""

STRINGS = _names("none sum mean batchmean floor trunc amax amin prod tanh cpu fro")
"""Allowed text arguments; attribute names are checked separately."""

CONSTANTS = {
    "dtype": _names("float32 float64 int32 int64 bool"),
    "device": _names("cpu"),
    "layout": _names("strided"),
    "memory_format": _names("contiguous_format preserve_format"),
}

_RANDOM = re.compile(r"rand|bernoulli|dropout|multinomial|normal_|poisson")


def check_graph(loss: CustomLoss) -> None:
    """Raise a UserError that names the node unless the backend can run this loss."""
    _check_inputs(loss)
    if not loss.nodes or len(loss.nodes) > MAX_NODES:
        raise UserError(f"graph.nodes has {len(loss.nodes)} nodes; it must have 1 to {MAX_NODES}")
    earlier: set[str] = set()
    num_arguments = 0
    for index, node in enumerate(loss.nodes):
        field = f"graph.nodes[{index}] ({_quote(node.name)})"
        if not NODE_NAME.fullmatch(node.name) or node.name in earlier:
            raise UserError(f"{field}: the name must consist of letters, digits and underscores, and be unique")
        num_arguments += _check_values(field, node, earlier)
        if num_arguments > MAX_ARGUMENTS:
            raise UserError(f"{field}: the graph has more than {MAX_ARGUMENTS} argument values up to here")
        _check_node(field, node, loss, index)
        earlier.add(node.name)


def output_of(loss: CustomLoss) -> tuple[NodeRef, dict[str, NodeRef]]:
    """The loss and the metrics that a checked graph returns."""
    return _output("graph", loss.nodes[-1])


def _check_inputs(loss: CustomLoss) -> None:
    names = [declared.name for declared in loss.inputs]
    if not names or len(names) > MAX_INPUTS or names[0] != "logprobs":
        raise UserError(f"inputs are {_quote(names)}; send 1 to {MAX_INPUTS} inputs, 'logprobs' first")
    for index, declared in enumerate(loss.inputs):
        if not INPUT_NAME.fullmatch(declared.name) or declared.name in names[:index]:
            raise UserError(
                f"inputs[{index}].name is {_quote(declared.name)}; it must be a lowercase name that no other input has"
            )
        if not (0 if index else 1) <= declared.rank <= 2:
            raise UserError(f"inputs[{index}].rank is {declared.rank}; it must be 0, 1 or 2, and not 0 for logprobs")


def _check_node(field: str, node: LossNode, loss: CustomLoss, index: int) -> None:
    num_inputs, last = len(loss.inputs), len(loss.nodes) - 1
    if (node.op == "placeholder") != (index < num_inputs):
        raise UserError(f"{field} is a {_quote(node.op)}; the graph begins with its {num_inputs} placeholders")
    if (node.op == "output") != (index == last):
        raise UserError(f"{field} is a {_quote(node.op)}; the graph ends with its one output")
    if node.op == "placeholder":
        expected = loss.inputs[index].name
        if node.target != expected or node.args or node.kwargs:
            raise UserError(
                f"{field} takes {_quote(node.target)}; it must take {expected!r}, as inputs[{index}], without a default"
            )
    elif node.op == "output":
        _output(field, node)
    elif node.op in ("call_function", "call_method"):
        _check_call(field, node)
    else:
        raise UserError(
            f"{field} is a {_quote(node.op)} of {_quote(node.target)}; a custom loss has placeholders, "
            "call_function, call_method and an output"
        )


def _check_call(field: str, node: LossNode) -> None:
    allowed = FUNCTIONS if node.op == "call_function" else METHODS
    if node.target not in allowed:
        raise UserError(f"{field}: {node.op} {_quote(node.target)} is not allowed in a custom loss{_hint(node.target)}")
    if not node.args:
        raise UserError(f"{field}: {node.target} has no positional arguments; it needs at least one")
    for name, value in node.kwargs.items():
        # None and False are harmless: torch's own functions trace as `out=None`, `inplace=False`.
        if name not in KEYWORDS and value is not None and value is not False:
            raise UserError(
                f"{field}: {node.target} has the keyword {_quote(name)}, which is not allowed in a custom loss"
            )
    if node.target == "getattr":
        of_a_node = len(node.args) == 2 and isinstance(node.args[0], NodeRef) and not node.kwargs
        if not (of_a_node and isinstance(node.args[1], str) and node.args[1] in ATTRIBUTES):
            raise UserError(
                f"{field}: getattr takes a node and one of {', '.join(sorted(ATTRIBUTES))}, not {_quote(node.args[1:])}"
            )
        return
    for value in _walk((*node.args, *node.kwargs.values())):
        if isinstance(value, str) and value not in STRINGS:
            raise UserError(
                f"{field}: {node.target} has the text {_quote(value)}, which is not allowed in a custom loss"
            )


def _check_values(field: str, node: LossNode, earlier: set[str]) -> int:
    """Check that references point backward and constants are known. Returns the number of values."""
    count = 0
    for value in _walk((*node.args, *node.kwargs.values())):
        count += 1
        if isinstance(value, NodeRef) and value.name not in earlier:
            raise UserError(f"{field} refers to {_quote(value.name)}, which is not an earlier node")
        if isinstance(value, TorchConstant) and value.name not in CONSTANTS.get(value.kind, ()):
            choices = ", ".join(sorted(CONSTANTS.get(value.kind, ())))
            raise UserError(f"{field}: the {value.kind} {_quote(value.name)} must be one of {choices}")
    return count


def _walk(values: Sequence[LossArgument]) -> Iterator[LossArgument]:
    """Yield every value, depth first. The depth was bounded when the graph was parsed."""
    for value in values:
        yield value
        if isinstance(value, list | tuple):
            yield from _walk(value)
        elif isinstance(value, dict):
            yield from _walk(list(value.values()))
        elif isinstance(value, SliceArgument):
            yield from _walk((value.start, value.stop, value.step))


def _output(field: str, node: LossNode) -> tuple[NodeRef, dict[str, NodeRef]]:
    returned = node.args[0] if len(node.args) == 1 and not node.kwargs else None
    if not isinstance(returned, list | tuple) or len(returned) != 2:
        raise UserError(f"{field} must return (loss, metrics)")
    loss, metrics = returned
    if not isinstance(loss, NodeRef) or not isinstance(metrics, dict):
        raise UserError(f"{field} must return a node as its loss, and its metrics as a dict")
    node_by_key: dict[str, NodeRef] = {}
    for key, value in metrics.items():
        if not METRIC_KEY.fullmatch(key) or not isinstance(value, NodeRef):
            raise UserError(f"{field}: metric {_quote(key)} must be a node named custom/NAME:sum or custom/NAME:mean")
        node_by_key[key] = value
    return loss, node_by_key


def _hint(target: str) -> str:
    last = target.rpartition(".")[2]
    if _RANDOM.search(last):
        return ": a loss must give the same result each time"
    if last.endswith("_") and last.rstrip("_") in METHODS:
        return f": it writes in place; use {last.rstrip('_')!r}"
    if "empty" in last:
        return ": its memory is not initialised; use zeros_like or new_zeros"
    return "; docs/losses.md lists the allowed operations"


def _quote(value: object) -> str:
    text = ascii(value) if not isinstance(value, str) else ascii(value[:80])
    return text if len(text) <= 80 else text[:77] + "..."
