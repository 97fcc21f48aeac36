"""Steps of one row on states in slots: a layer's own functions take slots in place of a state's tensor.

transformers' layers continue a sequence by one row through functions of their modeling file: one for the convolution,
which changes its state in place, and in gated delta nets one for the recurrence, which returns the new state. Where a
layer's forward calls such a function by its name, `wrap_steps` replaces it by a `StepFunction`: a call with
`StateSlots` runs a kernel that reads and writes the slots; any other call is passed on. So neither a copy of the states
nor the library's own kernels are needed, whether those are installed or not.

Knows no cache, plan or sequence.

Shapes: n sequences with one row each, S slots.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor, nn

from tinsmith.backends.torch.attention import MixerState

CONV, RECURRENT = MixerState._fields

ACTIVATIONS = (None, "silu", "swish")
"""Of a convolution, by transformers' names, with which the kernel computes it."""


@dataclass(slots=True)
class StateSlots:
    """One part of a layer's states: row i continues the state in slot `read_n[i]` of `store_S`, and leaves the one in
    slot `write_n[i]`. Slots are int64. `is_stepped`: a kernel has written them.
    """

    store_S: Tensor
    read_n: Tensor
    write_n: Tensor
    kernels: ModuleType | None
    is_stepped: bool = False

    def gather(self) -> Tensor:
        return self.store_S.index_select(0, self.read_n)

    def scatter(self, state_n: Tensor) -> None:
        self.store_S.index_copy_(0, self.write_n, state_n.to(self.store_S.dtype))


class StepFunction:
    """A function of a modeling file that also takes `StateSlots`. `step` names the kernel's function."""

    def __init__(self, function: Callable[..., object], step: str) -> None:
        self.function = function
        self.step = step

    def __call__(self, *args: object, **kwargs: object) -> object:
        slots = next((value for value in (*args, *kwargs.values()) if isinstance(value, StateSlots)), None)
        if slots is None:
            return self.function(*args, **kwargs)
        slots.is_stepped = True
        return getattr(slots.kernels, self.step)(*args, **kwargs)


def wrap_steps(module: nn.Module) -> frozenset[str]:
    """Replace the functions with which a layer continues by one row; returns the parts of its state that can be given
    to it as slots.
    """
    modeling, parts = sys.modules[type(module).__module__], set[str]()
    for name in list_called_globals(type(module).forward):
        if name == "causal_conv1d_update" and getattr(module, "activation", None) in ACTIVATIONS:
            parts.add(CONV)
            step = "step_convolution"
        elif name.endswith("recurrent_gated_delta_rule"):
            parts.add(RECURRENT)
            step = "step_gated_delta"
        else:
            continue
        if not isinstance(function := getattr(modeling, name), StepFunction):
            setattr(modeling, name, StepFunction(function, step))
    return frozenset(parts)


def list_called_globals(forward: Callable[..., object]) -> set[str]:
    """The names of its modeling file that a layer's forward reads."""
    function = inspect.unwrap(forward)
    instructions = dis.get_instructions(function)
    return {str(x.argval) for x in instructions if x.opname == "LOAD_GLOBAL" and x.argval in function.__globals__}
