"""How to split a base model over devices: the degrees of parallelism, chosen or checked, with reasons.

Data parallel first: every device holds everything, and only gradients of adapters are exchanged. If the base does not
fit, tensor parallel within the devices of one machine, which keeps training and sampling fast; for a mixture, experts
spread over as few devices as will do, which exchange tokens instead of weights. Then a sharded base, whose layers (the
rest of them where experts are spread) are gathered for every micro-batch and every decoded token; then both. If a
sequence's activations do not fit in any of these ways, context parallel with each of them, in as few parts as possible.
If nothing fits then, pipeline parallel, in as few stages as possible; last, with experts spread within stages. If
nothing fits at all, the plan says what would be needed. A user's choice is accepted, or refused with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tinsmith.errors import SettingsError
from tinsmith.plan import memory
from tinsmith.plan.architecture import Architecture
from tinsmith.runtime.sizes import format_bytes

DEVICES_PER_MACHINE = 8
"""Tensor parallelism exchanges every layer's results, for which a network between machines is too slow: a tensor group
is on one machine.
"""

DEFAULT_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class Degrees:
    """`data` ranks take different sequences of a step, `context` ranks different rows of the same sequences, `pipeline`
    ranks hold different layers (they are its stages), `tensor` ranks different heads and columns of each layer. With
    `shard_base` each layer is also sharded over the data and context ranks. A sampled sequence is on the stages of one
    pipeline, so in sampling context ranks are further data ranks. Of the ranks of a stage, each `experts` adjacent ones
    spread its routed experts over themselves.

    Rank ((d * context + c) * pipeline + p) * tensor + t has data index d, context index c, stage p and tensor index t,
    so ranks of one tensor group, which communicate most, are adjacent.
    """

    data: int = 1
    tensor: int = 1
    shard_base: bool = False
    context: int = 1
    experts: int = 1
    pipeline: int = 1

    @property
    def devices(self) -> int:
        return self.groups * self.group_size

    @property
    def groups(self) -> int:
        """The number of groups that hold one base model each."""
        return self.data * self.context

    @property
    def settings(self) -> dict[str, int]:
        """The degrees by the names of their settings, without `shard_base`."""
        return {
            "data_parallel": self.data,
            "tensor_parallel": self.tensor,
            "context_parallel": self.context,
            "expert_parallel": self.experts,
            "pipeline_parallel": self.pipeline,
        }

    @property
    def group_size(self) -> int:
        return self.pipeline * self.tensor

    @property
    def sharded(self) -> bool:
        """Whether a rank holds only part of the base model, so that all ranks take part in every forward."""
        return self.group_size > 1 or self.shard_base or self.experts > 1

    @property
    def in_step(self) -> bool:
        """Whether all ranks run every forward together, with or without rows."""
        return self.shard_base or self.experts > 1

    def sampling_group(self, group_index: int) -> list[int]:
        """The ranks that compute the same rows, stage after stage."""
        return [group_index * self.group_size + index for index in range(self.group_size)]

    def tensor_group(self, group_index: int, stage: int = 0) -> list[int]:
        """The ranks that compute the same rows in the same layers together."""
        first = stage * self.tensor
        return self.sampling_group(group_index)[first : first + self.tensor]

    def context_group(self, data_index: int, offset: int) -> list[int]:
        """The ranks that compute different rows of the same sequences, with the same layers, heads and columns: those
        at the same offset in their groups.
        """
        first = data_index * self.context
        return [(first + index) * self.group_size + offset for index in range(self.context)]

    @property
    def stage_size(self) -> int:
        """The number of ranks with the same layers, or their heads and columns."""
        return self.groups * self.tensor

    def stage_group(self, stage: int) -> list[int]:
        return [rank for index in range(self.groups) for rank in self.tensor_group(index, stage)]

    def expert_groups(self) -> list[list[int]]:
        """Stage by stage, the ranks that hold all its routed experts together: adjacent ones of the stage."""
        groups = [self.stage_group(stage) for stage in range(self.pipeline)]
        return [ranks[first : first + self.experts] for ranks in groups for first in range(0, len(ranks), self.experts)]

    def same_expert_groups(self) -> list[list[int]]:
        """Stage by stage, the ranks that hold the same experts."""
        groups = [self.stage_group(stage) for stage in range(self.pipeline)]
        return [ranks[index :: self.experts] for ranks in groups for index in range(self.experts)]

    def expert_holders(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same experts as this one, itself included."""
        return next(tuple(ranks) for ranks in self.same_expert_groups() if rank in ranks)

    def replica_group(self, tensor_index: int) -> list[int]:
        """The ranks that hold the same heads and columns, of all stages."""
        return list(range(tensor_index, self.devices, self.tensor))


@dataclass(frozen=True, slots=True)
class Workload:
    """The workload on `devices` with `memory_bytes` each: training `models` adapters of `rank` at a time, on sequences
    of up to `context` tokens, and sampling sequences of that length.
    """

    devices: int
    memory_bytes: int
    rank: int = 32
    context: int = 0  # 0: the model's own, at most DEFAULT_CONTEXT
    dtype: str = "bfloat16"
    quantize: str = "off"
    models: int = 1
    cuda: bool = True
    machines: int = 0  # 0: as few as hold the devices, with equally many each

    @property
    def num_machines(self) -> int:
        least = -(-self.devices // DEVICES_PER_MACHINE)
        return self.machines or next(count for count in range(least, self.devices + 1) if self.devices % count == 0)

    def context_of(self, model: Architecture) -> int:
        return min(self.context or DEFAULT_CONTEXT, model.context)


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes of one device: `activations` of its rows of a whole micro-batch, kept; `least_activations` of its rows of
    one sequence, recomputed; `keys_and_values` of one context. Images go through the vision tower before a step's
    layers run, so the larger of the two counts.
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
        """Bytes in a mode of `MODES`."""
        if mode == "kept":
            return self.fixed + self.activations + self.keys_and_values
        if mode == "recomputed":
            return self.fixed + self.least_activations + self.keys_and_values
        return self.fixed + max(self.least_activations, self.keys_and_values)


MODES = {
    "kept": "training keeps its activations, beside sampling",
    "recomputed": "training uses activation checkpointing, beside sampling",
    "in turns": "training and sampling use the memory in turns: the KV cache makes room for a step",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """`mode` is empty if the model does not fit; `reasons` are the reasons, in order."""

    model: Architecture
    workload: Workload
    degrees: Degrees
    needs: MemoryNeeds
    mode: str
    reasons: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        return bool(self.mode)

    @property
    def missing_bytes(self) -> int:
        """The shortage on one device."""
        return max(0, self.needs.total("in turns") - self.workload.memory_bytes)


def adapter_regions(model: Architecture, rank: int, degrees: Degrees) -> tuple[memory.AdapterRegion, ...]:
    return memory.adapter_regions(
        model, rank, devices=degrees.devices, experts=degrees.experts, stages=degrees.pipeline
    )


def estimate_needs(model: Architecture, workload: Workload, degrees: Degrees) -> MemoryNeeds:
    dtype, context = workload.dtype, workload.context_of(model)
    shards = degrees.groups if degrees.shard_base else 1
    rows = -(-context // degrees.context)
    stages = degrees.pipeline
    base = memory.base_bytes(
        model, dtype=dtype, quantize=workload.quantize, tensor=degrees.tensor, shards=shards, experts=degrees.experts,
        stages=stages,
    )  # fmt: skip
    packed = memory.packed_bytes(model, dtype=dtype, quantize=workload.quantize, cuda=workload.cuda)
    base += 0 if stages > 1 else packed // degrees.tensor
    base += memory.count_copied_bytes(
        model, dtype=dtype, quantize=workload.quantize, cuda=workload.cuda, experts=degrees.experts
    )
    activations = memory.activations(model, dtype=dtype, cuda=workload.cuda, tensor=degrees.tensor, stages=stages,
                              context=degrees.context)  # fmt: skip
    cached = context * memory.key_value_bytes(model, dtype=dtype, tensor=degrees.tensor) + memory.state_bytes(model)
    image = memory.tower_bytes(model.tower_activations, context, dtype=dtype)  # an image that fills the context
    return MemoryNeeds(
        base=base,
        adapters=workload.models * memory.training_bytes(adapter_regions(model, workload.rank, degrees), dtype=dtype),
        activations=max(image, activations.num_bytes(max(memory.MICRO_BATCH[workload.cuda], rows), recompute=False)),
        least_activations=max(image, activations.num_bytes(rows, recompute=True)),
        keys_and_values=cached * max(memory.stages_of(model, stages)) // model.layers,
        reserved=memory.reserve_bytes(workload.memory_bytes, cuda=workload.cuda),
    )


def find_problem(
    model: Architecture, degrees: Degrees, devices: int | None = None, *, quantize: str = "off"
) -> str | None:
    """Why the model cannot be split this way, regardless of memory; None if it can."""
    if min(degrees.data, degrees.context, degrees.pipeline, degrees.tensor, degrees.experts) < 1:
        return f"{describe_degrees(degrees)}: each must be at least 1"
    if devices is not None and degrees.devices > devices:
        layout = describe_degrees(replace(degrees, shard_base=False, experts=1))
        return f"{layout} needs {degrees.devices} devices; there are {devices}"
    if degrees.shard_base and degrees.groups == 1:
        return (
            "a base is sharded over data and context ranks, and there is one: raise data parallel, or do not shard it"
        )
    if degrees.pipeline > 1 and (problem := _find_stage_problem(model, degrees)):
        return f"pipeline parallel {degrees.pipeline}: {problem}"
    tensor = degrees.tensor
    if quantize != "off" and degrees.shard_base:
        return f"a quantised base ({quantize}) cannot be sharded; use tensor, pipeline or expert parallelism"
    if quantize == "nf4" and tensor > 1 and (problem := _find_block_problem(model, tensor)):
        return problem
    if problem := _find_expert_problem(model, degrees):
        return problem
    if model.state_elements and tensor > 1:
        return f"tensor parallel {tensor}: {model.model_type} has layers that keep a state, which cannot be split"
    if tensor > 1 and not any(linear.split_dim and linear.copies == 1 for linear in model.linears):
        return f"tensor parallel {tensor}: transformers has no plan for {model.model_type}"
    for divisor, noun in _tensor_divisors(model):
        if divisor % tensor:
            return f"tensor parallel {tensor} does not divide the model's {divisor} {noun}"
    return None


def _find_block_problem(model: Architecture, tensor: int) -> str | None:
    for linear in model.linears:
        num_parts = tensor if linear.split_dim == "inputs" else 1
        if linear.split_dim and linear.copies == 1 and linear.inputs % (num_parts * memory.NF4_BLOCK):
            return (
                f"tensor parallel {tensor}: nf4 has a scale for {memory.NF4_BLOCK} inputs, and a part of "
                f"{linear.name} would have {linear.inputs / num_parts:g}"
            )
    return None


def _find_expert_problem(model: Architecture, degrees: Degrees) -> str | None:
    spread = degrees.experts
    if spread == 1:
        if model.has_experts and degrees.tensor > 1:
            common = math.gcd(degrees.stage_size, model.experts)
            how = f"spread them, too: expert parallel {common}" if common > 1 else "shard the base"
            return (
                f"tensor parallel {degrees.tensor}: {model.model_type} has routed experts, which cannot be split; {how}"
            )
        return None
    if not model.has_experts:
        return f"expert parallel {spread}: {model.model_type} has no routed experts"
    if model.experts % spread:
        return f"expert parallel {spread} does not divide the model's {model.experts} experts"
    if degrees.stage_size % spread:
        return (
            f"expert parallel {spread} does not divide the {degrees.stage_size} devices of "
            f"{'a stage of ' if degrees.pipeline > 1 else ''}"
            f"{describe_degrees(replace(degrees, experts=1))}: raise data parallel"
        )
    return None


def _find_stage_problem(model: Architecture, degrees: Degrees) -> str:
    if degrees.shard_base:
        return "a stage's layers are whole or split by tensor parallelism; do not shard the base"
    if model.indivisible_reason:
        return f"{model.model_type} {model.indivisible_reason}; use tensor parallelism or shard the base"
    if len(model.layer_sizes) != model.layers:
        return f"{model.model_type} does not mark which of its modules are layers"
    return f"the model has {model.layers} layers" if model.layers < degrees.pipeline else ""


def find_machine_problem(degrees: Degrees, machines: int) -> str | None:
    """Why the ranks cannot be on so many machines, equally many on each; None if they can."""
    if degrees.devices % machines:
        return f"{degrees.devices} devices are not equally many on each of {machines} machines"
    if (per_machine := degrees.devices // machines) % degrees.tensor:
        return f"tensor parallel {degrees.tensor} does not divide the {per_machine} devices of a machine"
    return None


def _tensor_divisors(model: Architecture) -> Iterator[tuple[int, str]]:
    """The sizes that the tensor-parallel degree must divide, each with its name."""
    yield model.heads, "attention heads"
    yield model.key_heads, "key and value heads"
    for linear in model.linears:
        if linear.group == "mlp" and linear.split_dim == "inputs" and linear.copies == 1:
            yield linear.inputs, f"columns of {linear.name}"


def evaluate(model: Architecture, workload: Workload, degrees: Degrees) -> Plan:
    """A plan with these degrees, without reasons."""
    needs = estimate_needs(model, workload, degrees)
    mode = next((mode for mode in MODES if needs.total(mode) <= workload.memory_bytes), "")
    return Plan(model, workload, degrees, needs, mode)


def candidates(model: Architecture, devices: int, machines: int = 0, *, quantize: str = "off") -> list[Degrees]:
    """Every way to use all devices, in order of preference. Context ranks have equally many attention heads, and a
    tensor group is on one machine.
    """
    layouts: list[Degrees] = []
    per_machine = devices // Workload(devices, 0, machines=machines).num_machines
    for tensor in _divisors(per_machine, DEVICES_PER_MACHINE):
        heads = model.heads // tensor
        for context in _divisors(heads) if heads else range(1, devices + 1):
            if devices % (tensor * context) == 0:
                layouts += _layouts(model, devices // (tensor * context), tensor, context)
    layouts.sort(key=_preference)
    return [degrees for degrees in layouts if find_problem(model, degrees, quantize=quantize) is None]


def _layouts(model: Architecture, groups: int, tensor: int, context: int) -> Iterator[Degrees]:
    """Every way to use `groups` groups of these tensor and context degrees: as data ranks or as stages, with every
    degree of expert parallelism.
    """
    devices = groups * tensor * context
    for experts in _expert_degrees(model, devices):
        for shard_base in (False, True):
            yield Degrees(groups, tensor, shard_base, context, experts)
    for pipeline in _divisors(groups, model.layers):
        if pipeline > 1:
            for experts in _expert_degrees(model, devices // pipeline):
                yield Degrees(groups // pipeline, tensor, False, context, experts, pipeline)


def _divisors(size: int, limit: int | None = None) -> list[int]:
    """The divisors of `size` up to `limit`, ascending."""
    largest = size if limit is None else min(size, limit)
    return [divisor for divisor in range(1, largest + 1) if size % divisor == 0]


def _preference(degrees: Degrees) -> tuple[int, ...]:
    """The sort key of candidates. Layers with all experts are gathered last of all."""
    gathers = degrees.shard_base + (degrees.shard_base and degrees.experts == 1)
    return *_last_resorts(degrees), gathers, degrees.tensor, degrees.experts


def _last_resorts(degrees: Degrees) -> tuple[bool, int, int]:
    """The degrees that are raised only if no plan with lower ones fits, most important first."""
    return degrees.pipeline > 1 and degrees.experts > 1, degrees.pipeline, degrees.context


def _expert_degrees(model: Architecture, devices: int) -> list[int]:
    """Degrees of expert parallelism that divide devices and experts."""
    return _divisors(math.gcd(devices, model.experts))


def _workload_candidates(model: Architecture, workload: Workload) -> list[Degrees]:
    return candidates(model, workload.devices, workload.machines, quantize=workload.quantize)


def first_fit(model: Architecture, workload: Workload) -> Plan | None:
    """The first candidate that fits, without an explanation; None if none does."""
    plans = (evaluate(model, workload, degrees) for degrees in _workload_candidates(model, workload))
    return next((plan for plan in plans if plan.fits), None)


def choose(model: Architecture, workload: Workload) -> Plan:
    """The first candidate that fits without taking turns, else the first that fits, else the closest to fitting. Stages
    with spread experts, more stages, then a higher context-parallel degree count only if no plan with less fits.
    """
    plans = [evaluate(model, workload, degrees) for degrees in _workload_candidates(model, workload)]
    fitting = [plan for plan in plans if plan.fits]
    least = min((_last_resorts(plan.degrees) for plan in fitting), default=())
    fitting = [plan for plan in fitting if _last_resorts(plan.degrees) == least]
    fitting.sort(key=lambda plan: plan.mode == "in turns")
    best = fitting[0] if fitting else min(plans, key=lambda plan: plan.missing_bytes)
    return _explain(best, chosen=True)


def check(model: Architecture, workload: Workload, degrees: Degrees) -> Plan:
    """The plan with the degrees that a user chose. Raises SettingsError with the reason if they are impossible or the
    model does not fit.
    """
    problem = find_problem(model, degrees, workload.devices, quantize=workload.quantize)
    if problem := problem or find_machine_problem(degrees, workload.num_machines):
        raise SettingsError(f"{problem}; {_advice(model, workload)}")
    plan = evaluate(model, workload, degrees)
    if not plan.fits:
        raise SettingsError(
            f"{describe_degrees(degrees)} does not fit: each device needs "
            f"{format_bytes(plan.needs.total('in turns'))} and has {format_bytes(workload.memory_bytes)}, "
            f"{format_bytes(plan.missing_bytes)} less; {_advice(model, workload)}"
        )
    return _explain(plan, chosen=False)


def _advice(model: Architecture, workload: Workload) -> str:
    best = choose(model, workload)
    if best.fits:
        return f"{describe_degrees(best.degrees)} would fit"
    return best.reasons[-1]


def describe_degrees(degrees: Degrees) -> str:
    context = f" x context parallel {degrees.context}" if degrees.context != 1 else ""
    stages = f" x pipeline parallel {degrees.pipeline}" if degrees.pipeline != 1 else ""
    shard = ", base sharded" if degrees.shard_base else ""
    experts = f", experts over {degrees.experts}" if degrees.experts != 1 else ""
    return f"data parallel {degrees.data}{context}{stages} x tensor parallel {degrees.tensor}{experts}{shard}"


def _explain(plan: Plan, *, chosen: bool) -> Plan:
    reasons = [*_reasons(plan), *([] if plan.fits else _suggest_changes(plan))]
    if plan.fits:
        reasons.append(f"It fits: {MODES[plan.mode]}.")
    if plan.fits and (machines := plan.workload.num_machines) > 1:
        reasons.append(f"The ranks are on {machines} machines with {plan.degrees.devices // machines} devices each.")
    if not chosen:
        best = choose(plan.model, plan.workload).degrees
        if best != plan.degrees:
            reasons.append(f"Without given degrees the plan is {describe_degrees(best)}.")
    return Plan(plan.model, plan.workload, plan.degrees, plan.needs, plan.mode, tuple(reasons))


def _reasons(plan: Plan) -> Iterator[str]:
    model, workload, degrees = plan.model, plan.workload, plan.degrees
    unsplit = evaluate(model, workload, Degrees(workload.devices))
    if workload.devices == 1:
        yield f"One device holds the base model ({format_bytes(plan.needs.base)}) and everything else."
        return
    if degrees.context > 1:
        rows = -(-workload.context_of(model) // degrees.context)
        yield (
            f"Context parallel {degrees.context} splits the activations of a sequence of {workload.context_of(model)} "
            f"tokens: a device trains {rows} of them. Each group samples by itself."
        )
    if not degrees.sharded:
        yield (
            f"Each of {degrees.devices} devices holds the whole base ({format_bytes(plan.needs.base)}) and trains a "
            "share of each step's sequences."
        )
        return
    room = format_bytes(unsplit.workload.memory_bytes)
    how = "has no room for the rest" if not unsplit.fits else "has room for training and sampling in turns only"
    yield f"The whole base takes {format_bytes(unsplit.needs.base)}: a device of {room} then {how}."
    if degrees.pipeline > 1:
        largest_stage = max(memory.stages_of(model, degrees.pipeline))
        yield (
            f"Pipeline parallel {degrees.pipeline}: a device holds at most {largest_stage} of {model.layers} layers "
            f"({format_bytes(plan.needs.base)}). Stages wait for each other at the ends of a step, and a sampled token "
            "goes through one after another."
        )
    if degrees.tensor > 1:
        base = format_bytes(plan.needs.base)
        yield f"Tensor parallel {degrees.tensor} cuts heads and MLPs, so each device holds {base}."
    if degrees.experts > 1:
        yield (
            f"Each of {degrees.experts} devices has {model.experts // degrees.experts} of the {model.experts} experts "
            f"of a layer, so it holds {format_bytes(plan.needs.base)}; tokens go to their experts and back, also in "
            "sampling, where no layer is gathered for them."
        )
    if degrees.shard_base:
        problems = [find_problem(model, Degrees(1, tensor)) for tensor in range(2, DEVICES_PER_MACHINE + 1)]
        problem = next(filter(None, problems), None) if degrees.tensor == degrees.experts == 1 else None
        cause = f" ({problem})" if problem else ""
        qualifier = "other " if degrees.experts > 1 else ""
        yield (
            f"The base is sharded over {degrees.groups} ranks: {qualifier}layers are gathered for every micro-batch "
            f"and every decoded token, which is slow to sample{cause}."
        )
    elif degrees.groups > 1:
        yield f"{degrees.groups} such groups train a share of each step's sequences each."


def _suggest_changes(plan: Plan) -> Iterator[str]:
    """Sentences about a model that does not fit: by how much, and which change would help."""
    needs, workload, model = plan.needs, plan.workload, plan.model
    yield f"It does not fit: each device lacks {format_bytes(plan.missing_bytes)}."
    if not workload.cuda:
        return
    if (sufficient := _smallest_sufficient(model, workload)) is not None:
        yield f"It fits on {sufficient.workload.devices} such devices: {describe_degrees(sufficient.degrees)}."
        return
    largest = max(needs.least_activations, needs.keys_and_values)
    if needs.fixed <= workload.memory_bytes and largest > workload.memory_bytes - needs.fixed:
        yield (
            f"One sequence of {workload.context_of(model)} tokens takes {format_bytes(largest)} on a device, however "
            "many there are; choose a shorter context."
        )
        return
    yield "It fits on no number of such devices; use devices with more memory, quantize, or choose a smaller model."


def _smallest_sufficient(model: Architecture, workload: Workload) -> Plan | None:
    """The plan with the smallest sufficient number of devices, up to 512; None if there is none."""
    devices = workload.devices
    while devices < 512:
        devices *= 2
        if (plan := first_fit(model, replace(workload, devices=devices))) is not None:
            return plan
    return None
