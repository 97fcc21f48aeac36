"""How to lay a base model over devices: the degrees of parallelism, chosen or checked, and why.

Data parallel first: every device holds all, and nothing is exchanged but gradients of adapters. If the base does not
fit, tensor parallel, within the devices of one machine, since training and sampling both keep their speed. Then a
sharded base, whose layers are gathered for every micro-batch and every decoded token; then both. Where nothing fits,
the plan says what would be needed, whether or not it is supported here. What a user asks for is taken, or refused with
the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tinsmith.errors import SettingsError
from tinsmith.plan import memory
from tinsmith.plan.architecture import Architecture

DEVICES_OF_A_MACHINE = 8
"""Tensor parallelism exchanges every layer's results, which a network between machines is too slow for."""

DEFAULT_CONTEXT = 8192
GIBIBYTE = 2**30


@dataclass(frozen=True, slots=True)
class Degrees:
    """`data` ranks take different sequences of a step, `tensor` ranks hold different heads and columns of each layer.
    With `shard_base` the data ranks hold a part of each layer, too.

    Rank d * tensor + t has data index d and tensor index t: ranks of one tensor group, which communicate most, are
    neighbours.
    """

    data: int = 1
    tensor: int = 1
    shard_base: bool = False

    @property
    def devices(self) -> int:
        return self.data * self.tensor

    @property
    def parted(self) -> bool:
        """Whether a rank holds less than the whole base model, so that all ranks take part in every forward."""
        return self.tensor > 1 or self.shard_base

    def tensor_group(self, data_index: int) -> list[int]:
        """The ranks that compute the same rows together."""
        return [data_index * self.tensor + index for index in range(self.tensor)]

    def data_group(self, tensor_index: int) -> list[int]:
        """The ranks that hold the same heads and columns."""
        return [index * self.tensor + tensor_index for index in range(self.data)]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be done on `devices` of `memory_bytes` each: train `models` adapters of `rank` at a time, on sequences
    of up to `context` tokens, and sample as long ones.
    """

    devices: int
    memory_bytes: int
    rank: int = 32
    context: int = 0  # 0: the model's own, at most DEFAULT_CONTEXT
    dtype: str = "bfloat16"
    quantize: str = "off"
    models: int = 1
    cuda: bool = True

    def context_of(self, model: Architecture) -> int:
        return min(self.context or DEFAULT_CONTEXT, model.context)


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of one device. `activations` of a whole micro-batch that keeps them; `least_activations` of one sequence
    whose layers run again; `keys_and_values` of one context.
    """

    base: int
    adapters: int
    activations: int
    least_activations: int
    keys_and_values: int
    reserved: int

    @property
    def fixed(self) -> int:
        return self.base + self.adapters + self.reserved

    def total(self, mode: str) -> int:
        """With what a mode of `MODES` asks for."""
        if mode == "kept":
            return self.fixed + self.activations + self.keys_and_values
        if mode == "recomputed":
            return self.fixed + self.least_activations + self.keys_and_values
        return self.fixed + max(self.least_activations, self.keys_and_values)


MODES = {
    "kept": "training keeps its activations, beside sampling",
    "recomputed": "training computes activations again rather than keep them all, beside sampling",
    "in turns": "training and sampling take turns with the memory: keys and values make room for a step",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """`mode` is empty if it does not fit; `words` say why it is as it is, in order."""

    model: Architecture
    wanted: Wanted
    degrees: Degrees
    needs: Needs
    mode: str
    words: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        return bool(self.mode)

    @property
    def missing_bytes(self) -> int:
        """What one device lacks."""
        return max(0, self.needs.total("in turns") - self.wanted.memory_bytes)


def needs_of(model: Architecture, wanted: Wanted, degrees: Degrees) -> Needs:
    dtype, context = wanted.dtype, wanted.context_of(model)
    shards = degrees.data if degrees.shard_base else 1
    base = memory.base_bytes(model, dtype=dtype, quantize=wanted.quantize, tensor=degrees.tensor, shards=shards)
    base += memory.packed_bytes(model, dtype=dtype, quantize=wanted.quantize, cuda=wanted.cuda) // degrees.tensor
    kept = memory.activations(model, dtype=dtype, cuda=wanted.cuda, tensor=degrees.tensor)
    numbers = memory.adapter_numbers(model, wanted.rank)
    return Needs(
        base=base,
        adapters=wanted.models * memory.training_bytes(numbers, dtype=dtype),
        activations=kept.num_bytes(max(memory.MICRO_BATCH[wanted.cuda], context), recompute=False),
        least_activations=kept.num_bytes(context, recompute=True),
        keys_and_values=context * memory.key_value_bytes(model, dtype=dtype, tensor=degrees.tensor)
        + memory.state_bytes(model),
        reserved=memory.reserved_bytes(wanted.memory_bytes, cuda=wanted.cuda),
    )


def problem_of(
    model: Architecture, degrees: Degrees, devices: int | None = None, *, quantize: str = "off"
) -> str | None:
    """Why the model cannot be cut so, whatever the memory; None if it can."""
    if degrees.data < 1 or degrees.tensor < 1:
        return f"data parallel {degrees.data} x tensor parallel {degrees.tensor}: both must be at least 1"
    if devices is not None and degrees.devices > devices:
        return (
            f"data parallel {degrees.data} x tensor parallel {degrees.tensor} needs {degrees.devices} devices; "
            f"there are {devices}"
        )
    if degrees.shard_base and degrees.data == 1:
        return "a base is sharded over data ranks, and data parallel is 1: raise data parallel, or do not shard it"
    parts = degrees.tensor
    if quantize != "off" and (parts > 1 or degrees.shard_base):
        return f"a base that is quantised ({quantize}) is not cut: neither tensor parallel nor sharded"
    if model.has_experts and parts > 1:
        return f"tensor parallel {parts}: {model.model_type} has routed experts, which are not cut here; shard the base"
    if model.state_numbers and parts > 1:
        return f"tensor parallel {parts}: {model.model_type} has layers that keep a state, which are not cut here"
    for number, what in _cut(model):
        if number % parts:
            return f"tensor parallel {parts} does not divide the model's {number} {what}"
    return None


def _cut(model: Architecture) -> Iterator[tuple[int, str]]:
    """What tensor parallelism has to divide."""
    yield model.heads, "attention heads"
    yield model.key_heads, "key and value heads"
    for linear in model.linears:
        if linear.group == "mlp" and linear.along == "inputs":
            yield linear.inputs, f"columns of {linear.name}"


def judged(model: Architecture, wanted: Wanted, degrees: Degrees) -> Plan:
    """A plan of these degrees, without words."""
    needs = needs_of(model, wanted, degrees)
    mode = next((mode for mode in MODES if needs.total(mode) <= wanted.memory_bytes), "")
    return Plan(model, wanted, degrees, needs, mode)


def candidates(model: Architecture, devices: int, *, quantize: str = "off") -> list[Degrees]:
    """Every way to use all devices, the preferred ones first."""
    found = []
    for tensor in range(1, min(devices, DEVICES_OF_A_MACHINE) + 1):
        if devices % tensor == 0:
            found += [Degrees(devices // tensor, tensor, shard) for shard in (False, True)]
    found.sort(key=lambda one: (one.shard_base, one.tensor))
    return [one for one in found if problem_of(model, one, quantize=quantize) is None]


def _candidates(model: Architecture, wanted: Wanted) -> list[Degrees]:
    return candidates(model, wanted.devices, quantize=wanted.quantize)


def choose(model: Architecture, wanted: Wanted) -> Plan:
    """The first candidate that fits without taking turns; else the first that fits; else what is least short."""
    plans = [judged(model, wanted, degrees) for degrees in _candidates(model, wanted)]
    best = next((plan for plan in plans if plan.mode in ("kept", "recomputed")), None)
    best = best or next((plan for plan in plans if plan.fits), None)
    best = best or min(plans, key=lambda plan: plan.missing_bytes)
    return _worded(best, chosen=True)


def check(model: Architecture, wanted: Wanted, degrees: Degrees) -> Plan:
    """What a user chose. Raises SettingsError with the reason if it cannot be, or does not fit."""
    if problem := problem_of(model, degrees, wanted.devices, quantize=wanted.quantize):
        raise SettingsError(f"{problem}; {_advice(model, wanted)}")
    plan = judged(model, wanted, degrees)
    if not plan.fits:
        raise SettingsError(
            f"{described(degrees)} does not fit: each device needs {gib(plan.needs.total('in turns'))} and has "
            f"{gib(wanted.memory_bytes)}, {gib(plan.missing_bytes)} less; {_advice(model, wanted)}"
        )
    return _worded(plan, chosen=False)


def _advice(model: Architecture, wanted: Wanted) -> str:
    best = choose(model, wanted)
    if best.fits:
        return f"{described(best.degrees)} would fit"
    return best.words[-1]


def described(degrees: Degrees) -> str:
    shard = ", base sharded over data ranks" if degrees.shard_base else ""
    return f"data parallel {degrees.data} x tensor parallel {degrees.tensor}{shard}"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIBIBYTE:.1f} GiB"


def _worded(plan: Plan, *, chosen: bool) -> Plan:
    words = [*_reasons(plan), *([] if plan.fits else _what_else(plan))]
    if plan.fits:
        words.append(f"It fits: {MODES[plan.mode]}.")
    if not chosen:
        best = choose(plan.model, plan.wanted).degrees
        if best != plan.degrees:
            words.append(f"Left to itself, the plan would be {described(best)}.")
    return Plan(plan.model, plan.wanted, plan.degrees, plan.needs, plan.mode, tuple(words))


def _reasons(plan: Plan) -> Iterator[str]:
    model, wanted, degrees = plan.model, plan.wanted, plan.degrees
    alone = judged(model, wanted, Degrees(wanted.devices))
    if wanted.devices == 1:
        yield f"One device holds the base model ({gib(plan.needs.base)}) and everything else."
        return
    if degrees.tensor == 1 and not degrees.shard_base:
        yield (
            f"Each of {degrees.data} devices holds the whole base ({gib(plan.needs.base)}) and trains a share of each "
            "step's sequences."
        )
        return
    room = gib(alone.wanted.memory_bytes)
    how = "is short of" if not alone.fits else "leaves training and sampling taking turns with"
    yield f"The whole base takes {gib(alone.needs.base)}: beside it a device {how} its {room}."
    if degrees.tensor > 1:
        yield f"Tensor parallel {degrees.tensor} cuts heads and MLPs, so each device holds {gib(plan.needs.base)}."
    if degrees.shard_base:
        cannot = [t for t in range(2, DEVICES_OF_A_MACHINE + 1) if problem_of(model, Degrees(1, t))]
        why = f" ({problem_of(model, Degrees(1, cannot[0]))})" if cannot and degrees.tensor == 1 else ""
        yield (
            f"The base is sharded over {degrees.data} data ranks: layers are gathered for every micro-batch and every "
            f"decoded token, which is slow to sample{why}."
        )
    elif degrees.data > 1:
        yield f"{degrees.data} such groups train a share of each step's sequences each."


def _what_else(plan: Plan) -> Iterator[str]:
    """It does not fit: by how much, and what would help."""
    needs, wanted, model = plan.needs, plan.wanted, plan.model
    yield f"It does not fit: each device lacks {gib(plan.missing_bytes)}."
    if (enough := _enough(model, wanted)) is not None:
        yield f"{enough.wanted.devices} such devices would do: {described(enough.degrees)}."
        return
    largest = max(needs.least_activations, needs.keys_and_values)
    if needs.fixed <= wanted.memory_bytes and largest > wanted.memory_bytes - needs.fixed:
        yield (
            f"A sequence of {wanted.context_of(model)} tokens alone takes {gib(largest)}: it would have to be split "
            "over devices (context parallel), which is not supported here; ask for a shorter context."
        )
        return
    yield (
        "Layers would have to be spread over devices one after the other (pipeline parallel), which is not supported "
        "here; devices of more memory, quantize, or a smaller model would help."
    )


def _enough(model: Architecture, wanted: Wanted) -> Plan | None:
    """The smallest number of devices that would do, up to 512."""
    devices = wanted.devices
    while devices < 512:
        devices *= 2
        more = replace(wanted, devices=devices)
        for degrees in _candidates(model, more):
            plan = judged(model, more, degrees)
            if plan.fits:
                return plan
    return None
