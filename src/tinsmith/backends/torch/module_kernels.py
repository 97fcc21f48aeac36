"""Triton kernels inside transformers' modules on a GPU, by what these compute: norms, rotations, gated MLPs and the
gates of routed experts.

`swap_kernels` looks at a decoder at load. Norms and MLPs are tried on random numbers on the host, as copies with other
weights, and so are the functions for rotations and gates; what equals one of the formulas below in float32, and for
norms also in bfloat16 up to its rounding, gets the fused kernel. No class is named, and what equals no formula stays as
it is. A kernel runs only while the context has a plan, so a model's own forward remains the reference with which packed
rows are compared at load; and only on CUDA tensors of the weight's dtype without a gradient of the weight. Everything
else runs the module's own forward.

Results differ from the modules' own in this: norms round where the module does, but their gradients only once; a
rotation, and the product of an activated gate, round once instead of two or three times.

`join_gated_products` makes one product of the two that read an MLP's input, as `transformer` does. It is called only
where linears never change again: not where all weights are trained, nor where linears are sharded.

Modules are looked up at each call: a linear may be replaced, and weights rebound, after `swap_kernels`. Knows no
sampler, loss or request.

Shapes: T rows, D hidden size, F inner size, H and G heads of queries and keys, E head dim, R rotated columns.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from tinsmith.backends.torch.lora import ForwardContext, MultiLoRALinear
from tinsmith.backends.torch.moe import MultiLoRAExperts
from tinsmith.backends.torch.probes import GATED_ACTIVATIONS, TOLERANCE, UNEXPECTED, call, draw, is_near, measure_error
from tinsmith.backends.torch.transformer import FusedLinear, load_layer_kernels
from tinsmith.runtime.devices import runs_kernels

if TYPE_CHECKING:
    from tinsmith.backends.torch.layer_kernels import NormForm, RotaryLayout

ROTATION = "apply_rotary_pos_emb"
"""The function of a modeling file that rotates queries and keys."""

GATED_NAMES = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("gate_up_proj", "down_proj"),
    ("input_linear", "output_linear"),
)
"""Names of an MLP's linears: of the gate, of what it multiplies, or of both in this order, and of the product."""

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": silu, "sigmoid": torch.sigmoid}
"""Of the gates of norms."""


@dataclass
class SwappedKernels:
    """What was swapped: the forms of norms, MLPs and gates of experts by path, and functions by modeling file."""

    norms: dict[str, NormForm] = field(default_factory=dict)
    rotations: dict[str, FusedRotation] = field(default_factory=dict)
    mlps: dict[str, FusedMLP] = field(default_factory=dict)
    gates: dict[str, FusedGate] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = self.norms, self.rotations, self.mlps, self.gates
        names = zip(("norms", "rotations", "gated MLPs", "gates of experts"), parts, strict=True)
        return ", ".join(name for name, swapped in names if swapped)


@torch.no_grad()
def swap_kernels(decoder: nn.Module, context: ForwardContext) -> SwappedKernels:
    """Swap what can be swapped in a decoder whose linears are already those that carry adapters."""
    swapped = SwappedKernels()
    for path, module in decoder.named_modules():
        if isinstance(module, MultiLoRAExperts):
            if module.activation is not None:
                module.apply_gate = swapped.gates[path] = FusedGate(module.apply_gate, module.activation, context)
        elif "forward" in vars(module):
            continue
        elif (form := find_norm_form(module)) is not None:
            swapped.norms[path] = form
            module.forward = FusedNorm(module, form, context)
        elif (mlp_form := find_mlp_form(module)) is not None:
            swapped.mlps[path] = FusedMLP(module, mlp_form, context)
            module.forward = swapped.mlps[path]
    for modeling in _modeling_files(decoder.modules()):
        if (rotation := _swap_rotation(modeling)) is not None:
            rotation.contexts.add(context)
            swapped.rotations[modeling.__name__] = rotation
    return swapped


def join_gated_products(swapped: SwappedKernels) -> None:
    """Make one product of the gate's and what it multiplies in every MLP where both are plain linears."""
    for mlp in swapped.mlps.values():
        mlp.join()


def _is_trained(weight: Tensor | None) -> bool:
    return weight is not None and weight.requires_grad and torch.is_grad_enabled()


def _is_frozen(linear: MultiLoRALinear) -> bool:
    return linear.codes is not None or not _is_trained(linear.weight)


class FusedNorm:
    """A norm's forward."""

    def __init__(self, module: nn.Module, form: NormForm, context: ForwardContext) -> None:
        self._module, self._form, self._context = module, form, context
        self._forward: Callable[..., Tensor] = module.forward
        self._eps = cast(float, _eps_of(module))

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        if self._context.plan is not None and args and runs_kernels(x := args[0]):
            gate = args[1] if len(args) > 1 else kwargs.get("gate")
            weight = cast("Tensor | None", getattr(self._module, "weight", None))
            if self._suits(x, gate, weight):
                return load_layer_kernels().apply_norm(x, weight, self._eps, self._form, gate)
        return self._forward(*args, **kwargs)

    def _suits(self, x: Tensor, gate: Tensor | None, weight: Tensor | None) -> bool:
        if _is_trained(weight) or (gate is None) != (self._form.activation is None):
            return False
        is_gated_alike = gate is None or (gate.dtype == x.dtype and gate.shape == x.shape)
        return is_gated_alike and (weight is None or (weight.dtype == x.dtype and weight.shape == x.shape[-1:]))


class FusedMLP:
    """The forward of an MLP with a gate."""

    def __init__(self, module: nn.Module, form: MLPForm, context: ForwardContext) -> None:
        self._module, self._context = module, context
        self._names, self._activation = form
        self._forward: Callable[..., Tensor] = module.forward
        self._joined: FusedLinear | None = None

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        lora_batch = self._context.lora_batch
        if self._context.plan is None or lora_batch is None or len(args) != 1 or not runs_kernels(args[0]):
            return self._forward(*args, **kwargs)
        (x,) = args
        *outer, down = (self._module.get_submodule(name) for name in self._names)
        if self._joined is not None:
            gate_up = self._joined(x if torch.is_grad_enabled() else x.flatten(0, -2), lora_batch)
        elif len(outer) == 1:
            gate_up = outer[0](x)
        else:
            return down(load_layer_kernels().apply_gate(*(linear(x) for linear in outer), self._activation))
        if torch.is_grad_enabled() and type(down) is MultiLoRALinear and _is_frozen(down):
            return down.forward_with_gradient(gate_up, down.groups(lora_batch), before=RECOMPUTED[self._activation])
        return down(load_layer_kernels().apply_joined_gate(gate_up, self._activation)).view(*x.shape[:-1], -1)

    def join(self) -> None:
        """Store both weights as one; see `join_gated_products`."""
        linears = [self._module.get_submodule(name) for name in self._names]
        if len(linears) == 3 and all(type(linear) is MultiLoRALinear and linear.codes is None for linear in linears):
            gate, up = cast("list[MultiLoRALinear]", linears[:2])
            if len(gate.targets) == len(up.targets) == 1 and (gate.bias is None) == (up.bias is None):
                self._joined = FusedLinear([gate, up])


class FusedGate:
    """The gated activation of routed experts."""

    def __init__(self, apply_gate: Callable[[Tensor], Tensor], activation: str, context: ForwardContext) -> None:
        self._apply_gate, self._activation, self._context = apply_gate, activation, context

    def __call__(self, gate_up_NG: Tensor) -> Tensor:
        if self._context.plan is None or not runs_kernels(gate_up_NG):
            return self._apply_gate(gate_up_NG)
        return load_layer_kernels().apply_joined_gate(gate_up_NG, self._activation)


class _JoinedGate:
    """A `lora.RecomputedFunction` of gates and what they multiply, side by side."""

    def __init__(self, activation: str) -> None:
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return load_layer_kernels().swiglu(x, self._activation)

    def gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return load_layer_kernels().swiglu_gradient(grad, x, self._activation)


RECOMPUTED = {activation: _JoinedGate(activation) for activation in GATED_ACTIVATIONS}


class FusedRotation:
    """Stands in a modeling file for its function, which all models of the file share: the kernel runs while any of the
    `contexts` has a plan.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, Tensor]], kinds: RotationKinds) -> None:
        self.function = function
        self.kinds = kinds
        self.contexts: WeakSet[ForwardContext] = WeakSet()

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if runs_kernels(q) and any(context.plan is not None for context in self.contexts):
            layout = self._choose_layout(q, k, cos, sin, unsqueeze_dim)
            if layout is not None:
                return load_layer_kernels().rotate_halves(q, k, cos, sin, layout)
        return self.function(q, k, cos, sin, unsqueeze_dim)

    def _choose_layout(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> RotaryLayout | None:
        is_one_row = q.dim() == k.dim() == 4 and cos.dim() == 3 and len(q) == len(k) == len(cos) == 1
        if not is_one_row or unsqueeze_dim not in (1, 2) or cos.shape != sin.shape or q.shape[-1] != k.shape[-1]:
            return None
        rows = 2 if unsqueeze_dim == 1 else 1
        if not q.shape[rows] == k.shape[rows] == cos.shape[1]:
            return None
        is_dtype_of_q = cos.dtype == q.dtype or (cos.dtype == torch.float32 and self.kinds.keeps_dtype)
        if not (is_dtype_of_q and q.dtype == k.dtype and cos.dtype == sin.dtype):
            return None
        width, size = cos.shape[-1], q.shape[-1]
        if self.kinds.rotates_all if width == size else width < size and width % 2 == 0 and self.kinds.rotates_part:
            return load_layer_kernels().RotaryLayout(unsqueeze_dim == 1, False)
        if 2 * width == size and self.kinds.shares_halves:
            return load_layer_kernels().RotaryLayout(unsqueeze_dim == 1, True)
        return None


@dataclass(frozen=True, slots=True)
class RotationKinds:
    """What a function computes: with as many cosines as columns, with fewer, or with half as many for both halves."""

    rotates_all: bool
    rotates_part: bool
    shares_halves: bool
    keeps_dtype: bool
    """Results of float32 cosines have the dtype of queries and keys."""


def _modeling_files(modules: Iterable[nn.Module]) -> list[ModuleType]:
    """Those with a function for rotations."""
    names = dict.fromkeys(type(module).__module__ for module in modules)
    return [sys.modules[name] for name in names if hasattr(sys.modules[name], ROTATION)]


def _swap_rotation(modeling: ModuleType) -> FusedRotation | None:
    function = vars(modeling)[ROTATION]
    if isinstance(function, FusedRotation):
        return function
    if (kinds := find_rotation_kinds(function)) is None:
        return None
    rotation = FusedRotation(function, kinds)
    setattr(modeling, ROTATION, rotation)
    return rotation


def find_rotation_kinds(function: Callable[..., tuple[Tensor, Tensor]]) -> RotationKinds | None:
    """None if the function does not rotate halves of heads, or has other parameters."""
    if list(inspect.signature(function).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return None
    q, k = (draw(1, heads, 5, 8, seed=heads) for heads in (4, 2))
    part, full = (tuple(draw(1, 5, width, seed=width + i) for i in range(2)) for width in (4, 8))

    def equals(cos_sin: tuple[Tensor, ...], expected_cos_sin: tuple[Tensor, ...]) -> bool:
        try:
            actual = function(q, k, *cos_sin)
        except UNEXPECTED:
            return False
        pairs = zip(actual, (rotate_reference(x, *expected_cos_sin) for x in (q, k)), strict=True)
        return all(is_near(*pair) for pair in pairs)

    rotates_all, rotates_part = equals(full, full), equals(part, part)
    shares_halves = not rotates_part and equals(part, tuple(torch.cat([x, x], -1) for x in part))
    if not (rotates_all or shares_halves):
        return None
    keeps_dtype = rotates_all and function(q.bfloat16(), k.bfloat16(), *full)[0].dtype == torch.bfloat16
    return RotationKinds(rotates_all, rotates_part, shares_halves, keeps_dtype)


def rotate_reference(x_1HTE: Tensor, cos_1TR: Tensor, sin_1TR: Tensor) -> Tensor:
    """x cos + (-x2, x1) sin of the halves of the first R columns; the others as they are."""
    rotated, unrotated = x_1HTE[..., : cos_1TR.shape[-1]], x_1HTE[..., cos_1TR.shape[-1] :]
    first, second = rotated.chunk(2, -1)
    rotated = rotated * cos_1TR[:, None] + torch.cat([-second, first], -1) * sin_1TR[:, None]
    return torch.cat([rotated, unrotated], -1)


def norm_reference(x: Tensor, weight: Tensor | None, eps: float, form: NormForm, gate: Tensor | None) -> Tensor:
    """What `layer_kernels.rms_norm` computes, in plain torch."""
    wide = x.float()
    factor = None if gate is None else ACTIVATIONS[cast(str, form.activation)](gate.float())
    if factor is not None and form.gates_first:
        wide = wide * factor
    grouped = wide.unflatten(-1, (form.groups, -1))
    out = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    if form.rounds:
        out = out.to(x.dtype).float()
    if weight is not None:
        out = out * (weight.float() + form.has_offset)
        if form.rounds:
            out = out.to(x.dtype).float()
    if factor is not None and not form.gates_first:
        out = out * factor
    return out.to(x.dtype)


def find_norm_form(module: nn.Module) -> NormForm | None:
    """The form of a module without children that has at most one weight and whose forward is a norm, else None."""
    parameters = {name: value for name, value in module._parameters.items() if value is not None}
    eps, weight = _eps_of(module), parameters.get("weight")
    if module._modules or module._buffers or not parameters.keys() <= {"weight"} or eps is None:
        return None
    if weight is not None and weight.dim() != 1:
        return None
    size = 16 if weight is None else len(weight)
    num_inputs = len(inspect.signature(module.forward).parameters)
    if num_inputs not in (1, 2) or (num_inputs == 2 and weight is None):
        return None
    x, gate = (draw(1, 3, size, seed=seed) for seed in range(2))
    inputs = (x, gate)[:num_inputs]
    probe_weight = None if weight is None else draw(size, seed=2)
    actual = {dtype: _run_probe(module, {"weight": probe_weight}, inputs, dtype) for dtype in TOLERANCE}
    candidates = []
    for form in _list_forms(module, size, has_gate=num_inputs == 2, has_weight=weight is not None):
        errors = {}
        for dtype, result in actual.items():
            tensors = (None if y is None else y.to(dtype) for y in (x, probe_weight, gate if num_inputs == 2 else None))
            x_cast, weight_cast, gate_cast = tensors
            assert x_cast is not None
            errors[dtype] = measure_error(result, norm_reference(x_cast, weight_cast, eps, form, gate_cast))
        if all(error < TOLERANCE[dtype] for dtype, error in errors.items()):
            candidates.append((errors[torch.bfloat16], form))
    return min(candidates, key=lambda pair: pair[0])[1] if candidates else None


def _list_forms(module: nn.Module, size: int, *, has_gate: bool, has_weight: bool) -> list[NormForm]:
    form_of = load_layer_kernels().NormForm
    if not has_weight:
        return [form_of()]
    if not has_gate:
        return [form_of(), form_of(rounds=True), form_of(has_offset=True)]
    group_size, num_groups = getattr(module, "group_size", None), getattr(module, "n_groups", None)
    groups = {1, size // group_size if group_size else 1, num_groups or 1}
    options = product((False, True), ACTIVATIONS, (False, True), sorted(groups))
    return [form_of(False, rounds, activation, first, count) for rounds, activation, first, count in options]


class MLPForm(NamedTuple):
    names: tuple[str, ...]
    """Of its linears, as in GATED_NAMES."""
    activation: str


def find_mlp_form(module: nn.Module) -> MLPForm | None:
    """The form of an MLP whose forward is down(activation(gate(x)) * up(x)) and nothing else, else None."""
    for names in GATED_NAMES:
        linears = [module._modules.get(name) for name in names]
        if not all(isinstance(linear, MultiLoRALinear) for linear in linears):
            continue
        outer = [nn.Linear(8, 24 // (len(names) - 1)) for _ in names[1:]]
        children = dict(zip(names, [*outer, down := nn.Linear(12, 8)], strict=True))
        for seed, parameter in enumerate(p for linear in children.values() for p in linear.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=seed))
        x = draw(1, 3, 8, seed=9)
        gate, up = torch.cat([linear(x) for linear in outer], -1).chunk(2, -1)
        actual = _run_probe(module, {}, (x,), torch.float32, children)
        for activation, activate in GATED_ACTIVATIONS.items():
            if is_near(actual, down(activate(gate) * up)):
                return MLPForm(names, activation)
    return None


def _run_probe(
    module: nn.Module,
    parameters: Mapping[str, Tensor | None],
    inputs: tuple[Tensor, ...],
    dtype: torch.dtype,
    children: Mapping[str, nn.Module] | None = None,
) -> Tensor | None:
    """The result of a copy of the module with these parameters and children, on the host. None if it fails."""
    probe = copy.copy(module)
    own_parameters = {name: nn.Parameter(x.to(dtype), False) for name, x in parameters.items() if x is not None}
    probe._parameters = {**module._parameters, **own_parameters}
    probe._modules = {**module._modules, **(children or {})}
    return call(probe.forward, *(x.to(dtype) for x in inputs))


def _eps_of(module: nn.Module) -> float | None:
    values = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
    return next((value for value in values if isinstance(value, float)), None)
