"""`tinsmith doctor MODEL`: plans the devices for a base model from its configuration and the flags.

The defaults of the flags describe this machine. No weights are loaded. Well-known models need no files, since the
package contains their published configurations (`plan/known_models.json`). The output ends with an estimate of the
speed, with its assumptions, the commands for a Ray cluster and SkyPilot, and one command, which serves the plan or, if
it does not fit, the closest configuration that fits.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path

from pydantic import ByteSize, TypeAdapter, ValidationError

from tinsmith import base_models
from tinsmith.errors import SettingsError
from tinsmith.plan import memory
from tinsmith.plan.architecture import Architecture, read, read_directory, size_of_files
from tinsmith.plan.degrees import MODES, Degrees, Plan, Workload, check, choose, described, first_fit, gib
from tinsmith.plan.measured import MEASURED_ROWS, measured_products
from tinsmith.plan.memory import NUMBER_BYTES, QUANTISED_BYTES, choose_dtype
from tinsmith.plan.speed import (
    DEVICES,
    LINK_SHARE,
    OPERATIONS,
    SAMPLING_SHARE,
    TRAINING_SHARE,
    Device,
    Rates,
    StepShare,
    StepTime,
    step_time,
    token_s,
)

LARGEST_RANK = 256


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The flags. None is a flag that was not given."""

    model: str
    gpus: int | None = None
    memory: str | None = None
    rank: int = 32
    context: int | None = None
    adapters: int = 1
    dtype: str | None = None
    quantize: str = "off"
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    shard_base: bool = False
    context_parallel: int | None = None
    expert_parallel: int | None = None
    pipeline_parallel: int | None = None
    machines: int | None = None


def plan_of(request: PlanRequest) -> Plan:
    """Make the plan. Raises SettingsError for invalid flags, or if the model does not fit the given degrees."""
    model = known(request.model)
    if model is None:
        directory = find(request.model)
        model = read_directory(directory)
        _compare(model, directory)
    wanted = _wanted(request, model)
    if wanted.devices % wanted.num_machines:
        raise SettingsError(
            f"--machines is {request.machines}; it must divide the number of devices, which is {wanted.devices}"
        )
    given = (request.tensor_parallel, request.context_parallel, request.expert_parallel, request.pipeline_parallel)
    if {*given, request.data_parallel} == {None} and not request.shard_base:
        return choose(model, wanted)
    tensor, context, experts, pipeline = (1 if degree is None else degree for degree in given)
    data = request.data_parallel or max(1, wanted.devices // max(1, tensor * context * pipeline))
    return check(model, wanted, Degrees(data, tensor, request.shard_base, context, experts, pipeline))


_VARIANT = re.compile(r"-(instruct|it|pt|hf|base)(-|$).*|\s*\(text\)$", re.IGNORECASE)


def known(model: str) -> Architecture | None:
    """Return a well-known model by its name on the hub, with or without its owner and `-Instruct`. Returns None for
    other models, and for models with local files.
    """
    if "=" in model or Path(model).expanduser().exists():
        return None
    name = _VARIANT.sub("", model.rpartition("/")[2]).lower()
    facts = json.loads(resources.files("tinsmith.plan").joinpath("known_models.json").read_text())
    found = next((one for one in facts if _VARIANT.sub("", one["name"]).lower() == name), None)
    return None if found is None else read({"dtype": "bfloat16", **found["config"]}, found["name"])


def find(model: str) -> Path:
    """Return the path of a directory or config.json, or of the directory in which the server would find the model."""
    path = Path(model.partition("=")[2] or model).expanduser()
    return path if path.exists() else Path(next(iter(base_models.resolve([model]))).path)


def _compare(model: Architecture, directory: Path) -> None:
    """Raise SettingsError if the files have fewer weights than the configuration describes."""
    found = size_of_files(directory)
    # Tied embeddings are often stored twice, and quantised weights in other shapes.
    if found and found[0] < model.num_parameters and found[1] >= 2 * model.num_parameters:
        raise SettingsError(
            f"{directory}: its config.json describes {model.num_parameters:,} weights, but its files hold {found[0]:,}"
        )


def _wanted(request: PlanRequest, model: Architecture) -> Workload:
    devices, memory_bytes, cuda = request.gpus, None, True
    if request.memory is not None:
        memory_bytes = _bytes_of(request.memory)
    if devices is None or memory_bytes is None:
        found = _this_machine()
        devices, memory_bytes = devices or found[0], memory_bytes or found[1]
        cuda = found[2] or request.gpus is not None
        if not cuda:  # ranks of a CPU share its memory
            degrees = (
                request.data_parallel,
                request.tensor_parallel,
                request.context_parallel,
                request.pipeline_parallel,
            )
            devices = math.prod(degree or 1 for degree in degrees)
            memory_bytes = memory_bytes if request.memory is not None else found[1] // max(1, devices)
    dtype = choose_dtype(request.dtype or "auto", cuda=cuda, stored=model.stored)
    context = request.context or 0
    longest = f"it must be from 1 to the model's own {model.context:,}"
    for name, value, good, hint in (
        ("--gpus", devices, devices >= 1, "it must be at least 1"),
        ("--rank", request.rank, 1 <= request.rank <= LARGEST_RANK, f"it must be from 1 to {LARGEST_RANK}"),
        ("--adapters", request.adapters, request.adapters >= 1, "it must be at least 1"),
        ("--context", request.context, request.context is None or 1 <= context <= model.context, longest),
        ("--machines", request.machines, request.machines != 0, "it must be at least 1"),
        ("--dtype", dtype, dtype in NUMBER_BYTES, "choose bfloat16 or float32"),
        ("--quantize", request.quantize, request.quantize in ("off", *QUANTISED_BYTES), "choose off, int8 or nf4"),
    ):
        if not good:
            raise SettingsError(f"{name} is {value!r}; {hint}")
    wanted = Workload(devices, memory_bytes, request.rank, context, dtype, request.quantize, request.adapters, cuda)
    return replace(wanted, machines=request.machines or 0)


def _bytes_of(text: str) -> int:
    try:
        found = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        found = 0
    if found <= 0:
        raise SettingsError(f"--memory is {text!r}; write a size such as 80GB or 24GiB")
    return found


def _this_machine() -> tuple[int, int, bool]:
    """Return the number of devices, the bytes of each, and whether they are GPUs."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory, True
    return 1, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), False


ROWS = {
    "base": "frozen base model",
    "adapters": "adapters in training, with gradients and optimizer state",
    "activations": "activations of a whole micro-batch",
    "least_activations": "activations of one sequence, with checkpointing",
    "keys_and_values": "KV cache of one context",
    "reserved": "the process and its libraries",
}
TOTALS = {
    "kept": "total",
    "recomputed": "total with activation checkpointing",
    "in turns": "total if training and sampling share this memory in turns",
}


def rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """The memory of each device, by use."""
    needs = asdict(plan.needs)
    for name, what in ROWS.items():
        yield what, gib(needs[name])
    for mode in MODES:
        yield TOTALS[mode], gib(plan.needs.total(mode))
    yield "available", gib(plan.wanted.memory_bytes)


def headline(plan: Plan) -> str:
    return described(plan.degrees) if plan.fits else f"Nothing fits. Closest configuration: {described(plan.degrees)}"


def summary(plan: Plan) -> str:
    """The model and the flags in a line."""
    model, wanted = plan.model, plan.wanted
    active = f" ({billions(model.num_active)} of them active)" if model.has_experts else ""
    return (
        f"{model.model_type}: {billions(model.num_parameters)} parameters{active} in {wanted.dtype}"
        f"{'' if wanted.quantize == 'off' else ', ' + wanted.quantize}; {wanted.models} adapter(s) of rank "
        f"{wanted.rank}, sequences of {wanted.context_of(model)} tokens, {wanted.devices} x {gib(wanted.memory_bytes)}"
    )


SMALLEST_CONTEXT, SMALL_RANK = 512, 8
LARGER_DEVICES = ("24GB", "48GB", "80GB", "141GB")
MAX_LARGER_DEVICES = 256


def recommended(request: PlanRequest, plan: Plan) -> tuple[str, str]:
    """Return a sentence and one command. The command serves the plan if it fits. Otherwise it serves the closest
    configuration that fits on the same devices, or plans for the smallest devices on which the model fits.
    """
    if plan.fits:
        return "", command(request, plan)
    for less in _smaller(plan):
        if first_fit(plan.model, less):
            dtype = request.dtype if less.dtype == plan.wanted.dtype else less.dtype
            smaller = replace(request, dtype=dtype, quantize=less.quantize)
            return f"This fits: {_differences(plan, less)}.", command(smaller, choose(plan.model, less))
    less = replace(request, rank=min(request.rank, SMALL_RANK), context=min(plan.wanted.context_of(plan.model), 2048))
    counts = [2**power for power in range(MAX_LARGER_DEVICES.bit_length())]
    larger = [
        replace(asked, gpus=devices, memory=size)
        for asked, devices, size in itertools.product((request, less), counts, LARGER_DEVICES)
    ]
    more = next((one for one in larger if first_fit(plan.model, _wanted(one, plan.model))), larger[-1])
    return "No smaller configuration fits on these devices. Plan for larger ones:", _planning(more)


def _smaller(plan: Plan) -> Iterator[Workload]:
    """Yield smaller requests: first smaller formats, then shorter sequences, then a lower rank."""
    wanted, context = plan.wanted, plan.wanted.context_of(plan.model)
    halvings = range(max(0, (context // SMALLEST_CONTEXT).bit_length() - 1) + 1)
    ranks = (wanted.rank, min(wanted.rank, SMALL_RANK))
    formats = (
        ("off", *QUANTISED_BYTES) if wanted.quantize == "off" and not plan.model.has_experts else (wanted.quantize,)
    )
    for rank, times, quantize in itertools.product(ranks, halvings, formats):
        for dtype in dict.fromkeys((wanted.dtype, "bfloat16")):
            yield replace(wanted, rank=rank, context=context >> times, quantize=quantize, dtype=dtype)


def _differences(plan: Plan, less: Workload) -> str:
    wanted, model = plan.wanted, plan.model
    changed = (
        (less.dtype, less.dtype != wanted.dtype),
        (f"linear layers in {less.quantize}", less.quantize != wanted.quantize),
        (f"sequences of up to {less.context} tokens", less.context_of(model) != wanted.context_of(model)),
        (f"adapters of rank {less.rank}", less.rank != wanted.rank),
    )
    return ", ".join(what for what, differs in changed if differs)


def _planning(request: PlanRequest) -> str:
    flags = [f"--gpus {request.gpus}", f"--memory {request.memory}"]
    default = PlanRequest(request.model)
    for name in ("rank", "context", "adapters", "dtype", "quantize"):
        if getattr(request, name) != getattr(default, name):
            flags.append(f"--{name} {getattr(request, name)}")
    return " ".join([f"tinsmith doctor {request.model}", *flags])


def command(request: PlanRequest, plan: Plan) -> str:
    """The command that serves the plan, on the first of its machines."""
    flags = [f"--model {request.model}"]
    for name, value in _settings_of(request, plan).items():
        flags.append(f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}")
    if (machines := plan.wanted.num_machines) > 1:
        flags.append(f"--machines {machines} --peer-host {FIRST}")
    return " ".join(["tinsmith serve", *flags])


def _settings_of(request: PlanRequest, plan: Plan) -> dict[str, object]:
    """The settings of the plan that differ from the defaults."""
    degrees = plan.degrees
    values: dict[str, object] = {"dtype": plan.wanted.dtype} if request.dtype is not None else {}
    values |= {"quantize": plan.wanted.quantize} if plan.wanted.quantize != "off" else {}
    values |= {name: degree for name, degree in degrees.settings.items() if degree > 1}
    return values | ({"shard_base": True} if degrees.shard_base else {})


FIRST, HEAD = "FIRST", "HEAD"
"""Placeholders: the addresses of the first machine and of the head of a Ray cluster."""

SKYPILOT_TASK = "deploy/skypilot/tinsmith.yaml"
SKYPILOT_NAMES = {"H100 SXM": "H100", "A100 80 GB": "A100-80GB", "A100 40 GB": "A100", "RTX 4090": "RTX4090"}
"""SkyPilot's names of devices, where they are not those of `DEVICES`."""


def launches(request: PlanRequest, plan: Plan) -> dict[str, str]:
    """Other commands that serve a plan that fits: by what they are for, with the same degrees."""
    if not plan.fits:
        return {}
    machines, found = plan.wanted.num_machines, {}
    here = plan.degrees.devices // machines
    settings = _settings_of(request, plan)
    variables = {f"TINSMITH_{name.upper()}": str(value).lower() for name, value in settings.items()}
    if machines > 1:
        found["other machines"] = f"tinsmith rank --join {FIRST}:29500 --ranks {here} --model {request.model}"
    given = [f"{name}={value}" for name, value in variables.items()]
    reserved = f"--engine-gpus {here}" if plan.wanted.cuda else f"--engine-cpus {here}"
    several = [f"--machines {machines}"] if machines > 1 else []
    found["Ray"] = " ".join(
        [*given, f"tinsmith up --ray {HEAD}:6379 --model {request.model} --engines 1", reserved, *several]
    )
    if (device := next(_alike(plan.wanted), None)) is not None:
        name = SKYPILOT_NAMES.get(device.name, device.name)
        models = shlex.quote(json.dumps([request.model]))
        nodes = [f"--num-nodes {machines}"] if machines > 1 else []
        environment = [f"--env {each}" for each in (f"TINSMITH_MODELS={models}", *given)]
        what = [f"sky launch -c tinsmith {SKYPILOT_TASK} --gpus {name}:{here}", *nodes, *environment]
        found["SkyPilot"] = " ".join([*what, "--secret TINSMITH_SIGNING_SECRET"])
    return found


NEAR = 0.12
"""Largest relative difference between a listed device's memory and the wanted memory."""


def _alike(wanted: Workload) -> Iterator[Device]:
    """The listed devices with about the wanted memory."""
    for device in DEVICES if wanted.cuda else ():
        if abs(device.memory_bytes - wanted.memory_bytes) <= NEAR * device.memory_bytes:
            yield device


def speeds(plan: Plan, measure: Callable[[str, int, int], tuple[float, float]] | None = None) -> Iterator[str]:
    """Yield speed estimates of a plan that fits, one line each: for devices with about the wanted memory, or for this
    CPU with the result of `measure` (`measured_products`).

    Training costs 4 operations per token and active weight: the forward pass, and the backward pass through the frozen
    base without the gradients of its weights. With activation checkpointing, and in the estimates for GPUs, it costs 6.
    Sampling reads all active weights once per token of a batch.
    """
    if not plan.fits:
        return
    active, wanted = plan.model.num_active, plan.wanted
    if not wanted.cuda:
        if wanted.quantize != "off":
            yield "No estimate of the speed: a CPU dequantizes the weights for each product."
            return
        operations_s, bytes_s = (measure or measured_products)(wanted.dtype, plan.model.hidden, active)
        trained = operations_s / ((4 if plan.mode == "kept" else OPERATIONS) * active)
        sampled = bytes_s / (active * NUMBER_BYTES[wanted.dtype])
        yield (
            f"This CPU: at most about {_rounded(trained)} trained tokens/s; {_rounded(sampled)} sampled tokens/s "
            "for one sequence, more for a batch (estimated from packed matrix products measured here: "
            f"{operations_s / 1e9:,.0f} GFLOP/s with {MEASURED_ROWS} rows, {bytes_s / 1e9:,.1f} GB/s of weights "
            "with one; attention and adapters are not counted)"
        )
        return
    for device in _alike(wanted):
        work = StepShare(max(memory.MICRO_BATCH[True], wanted.context_of(plan.model)) // plan.degrees.context)
        step = step_time(plan, device, work)
        trained = work.rows * plan.degrees.groups / step.total
        sampled = 1 / token_s(plan, device)
        yield (
            f"{device.name}: about {_rounded(trained)} trained tokens/s; {_rounded(sampled)} sampled tokens/s for one "
            f"sequence, more for a batch (estimated at {TRAINING_SHARE:.0%} of peak FLOP/s in training and "
            f"{SAMPLING_SHARE:.0%} of memory bandwidth in sampling{_exchanges(step)})"
        )


def measured_speed(plan: Plan, rates: Rates) -> Iterator[str]:
    """Yield what was measured, and the predicted time of a step of one micro-batch on each rank."""
    names = {"tensor": "sums of a tensor group", "context": "exchanges of a context group"}
    names |= {"base": "gathering among replicas", "gradients": "sums of all ranks"}
    names |= {"experts": "exchanges of an expert group", "stages": "messages between stages"}
    found = {names[name]: getattr(rates, name) for name in names}
    links = "".join(
        f"; {name} {one.bytes_s / 1e9:,.2f} GB/s, {1e6 * one.latency_s:,.0f} us each"
        for name, one in found.items()
        if one.bytes_s < math.inf
    )
    yield (
        f"Measured: {rates.operations_s / 1e9:,.0f} GFLOP/s and {rates.memory_bytes_s / 1e9:,.1f} GB/s of weights on "
        f"each device{links}"
    )
    step = step_time(plan, rates, micro_batch(plan))
    rows = micro_batch(plan).rows * plan.degrees.groups
    yield (
        f"A step of {rows:,} tokens takes about {1e3 * step.total:,.0f} ms: products {1e3 * step.compute:,.0f}, tensor "
        f"{1e3 * step.tensor:,.0f}, context {1e3 * step.context:,.0f}, experts {1e3 * step.experts:,.0f}, stages "
        f"{1e3 * step.stages:,.0f}, layers {1e3 * step.base:,.0f}, gradients {1e3 * step.gradients:,.0f} ms; a sampled "
        f"token {1e3 * token_s(plan, rates):,.2f} ms"
    )


def micro_batch(plan: Plan) -> StepShare:
    """A device's share of a full micro-batch."""
    rows = max(memory.MICRO_BATCH[plan.wanted.cuda], plan.wanted.context_of(plan.model))
    return StepShare(rows // plan.degrees.context, recompute=plan.mode != "kept")


def _exchanges(step: StepTime) -> str:
    """The shares of a step that exchanges between devices take, if they take any."""
    parts = {"tensor": step.tensor, "context": step.context, "experts": step.experts, "stages": step.stages}
    parts["gradients"] = step.gradients
    shares = [f"{name} {seconds / step.total:.0%}" for name, seconds in parts.items() if seconds >= 0.005 * step.total]
    if step.base > step.total - step.gradients - 1e-9:
        shares.append("gathered layers take longer than all computation")
    return f"; exchanges at {LINK_SHARE:.0%} of the links: {', '.join(shares)}" if shares else ""


def _rounded(value: float) -> str:
    if value < 10:
        return f"{value:.1f}"
    digits = len(str(int(value))) - 2
    return f"{round(value, -digits):,.0f}"


def as_json(plan: Plan) -> dict[str, object]:
    model, wanted = plan.model, plan.wanted
    return {
        "model_type": model.model_type,
        "parameters": model.num_parameters,
        "active_parameters": model.num_active,
        "wanted": {**asdict(wanted), "context": wanted.context_of(model)},
        **plan.degrees.settings,
        "shard_base": plan.degrees.shard_base,
        "machines": wanted.num_machines,
        "plan": described(plan.degrees),
        "fits": plan.fits,
        "mode": plan.mode or None,
        "missing_bytes": plan.missing_bytes,
        "bytes_per_device": {
            **asdict(plan.needs),
            "key_value_bytes_per_token": memory.key_value_bytes(model, dtype=wanted.dtype, tensor=plan.degrees.tensor),
            **{f"total_{mode.replace(' ', '_')}": plan.needs.total(mode) for mode in MODES},
        },
        "words": list(plan.words),
    }


def billions(numbers: int) -> str:
    if numbers < 10**8:
        return f"{numbers / 1e6:.1f} M"
    return f"{numbers / 1e9:.2f} B" if numbers < 10**10 else f"{numbers / 1e9:.1f} B"
