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
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path

from tinsmith import base_models
from tinsmith.errors import SettingsError
from tinsmith.plan import memory
from tinsmith.plan.architecture import Architecture, read, read_directory, size_of_files
from tinsmith.plan.degrees import MODES, Degrees, Plan, Workload, check, choose, describe_degrees, first_fit
from tinsmith.plan.measurement import TRAINING_ROWS, measure_busy_share, measure_matmul
from tinsmith.plan.memory import DTYPE_BYTES, QUANTISED_BYTES, choose_dtype
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
from tinsmith.runtime.host_memory import read_host_memory
from tinsmith.runtime.sizes import format_bytes, parse_bytes

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
    model = find_known_model(request.model)
    if model is None:
        directory = find(request.model)
        model = read_directory(directory)
        _compare(model, directory)
    workload = _workload(request, model)
    if workload.devices % workload.num_machines:
        raise SettingsError(
            f"--machines is {request.machines}; it must divide the number of devices, which is {workload.devices}"
        )
    degrees = (request.tensor_parallel, request.context_parallel, request.expert_parallel, request.pipeline_parallel)
    if {*degrees, request.data_parallel} == {None} and not request.shard_base:
        return choose(model, workload)
    tensor, context, experts, pipeline = (1 if degree is None else degree for degree in degrees)
    data = request.data_parallel or max(1, workload.devices // max(1, tensor * context * pipeline))
    return check(model, workload, Degrees(data, tensor, request.shard_base, context, experts, pipeline))


_VARIANT = re.compile(r"-(instruct|it|pt|hf|base)(-|$).*|\s*\(text\)$", re.IGNORECASE)


def find_known_model(model: str) -> Architecture | None:
    """Return a well-known model by its name on the hub, with or without its owner and `-Instruct`. Returns None for
    other models, and for models with local files.
    """
    if "=" in model or Path(model).expanduser().exists():
        return None
    name = _VARIANT.sub("", model.rpartition("/")[2]).lower()
    models = json.loads(resources.files("tinsmith.plan").joinpath("known_models.json").read_text())
    entry = next((model_entry for model_entry in models if _VARIANT.sub("", model_entry["name"]).lower() == name), None)
    return None if entry is None else read({"dtype": "bfloat16", **entry["config"]}, entry["name"])


def find(model: str) -> Path:
    """Return the path of a directory or config.json, or of the directory in which the server would find the model."""
    path = Path(model.partition("=")[2] or model).expanduser()
    return path if path.exists() else Path(next(iter(base_models.resolve([model]))).path)


def _compare(model: Architecture, directory: Path) -> None:
    """Raise SettingsError if the files have fewer weights than the configuration describes."""
    stored = size_of_files(directory)
    # Tied embeddings are often stored twice, and quantised weights in other shapes.
    if stored and stored[0] < model.num_parameters and stored[1] >= 2 * model.num_parameters:
        raise SettingsError(
            f"{directory}: its config.json describes {model.num_parameters:,} weights, but its files hold {stored[0]:,}"
        )


def _workload(request: PlanRequest, model: Architecture) -> Workload:
    devices, memory_bytes, cuda = request.gpus, None, True
    if request.memory is not None:
        memory_bytes = _bytes_of(request.memory)
    if devices is None or memory_bytes is None:
        machine = _this_machine()
        devices, memory_bytes = devices or machine[0], memory_bytes or machine[1]
        cuda = machine[2] or request.gpus is not None
        if not cuda:  # ranks of a CPU share its memory
            degrees = (
                request.data_parallel,
                request.tensor_parallel,
                request.context_parallel,
                request.pipeline_parallel,
            )
            devices = math.prod(degree or 1 for degree in degrees)
            memory_bytes = memory_bytes if request.memory is not None else machine[1] // max(1, devices)
    dtype = choose_dtype(request.dtype or "auto", cuda=cuda, stored=model.stored_dtype)
    context = request.context or 0
    longest = f"it must be from 1 to the model's own {model.context:,}"
    for name, value, good, hint in (
        ("--gpus", devices, devices >= 1, "it must be at least 1"),
        ("--rank", request.rank, 1 <= request.rank <= LARGEST_RANK, f"it must be from 1 to {LARGEST_RANK}"),
        ("--adapters", request.adapters, request.adapters >= 1, "it must be at least 1"),
        ("--context", request.context, request.context is None or 1 <= context <= model.context, longest),
        ("--machines", request.machines, request.machines != 0, "it must be at least 1"),
        ("--dtype", dtype, dtype in DTYPE_BYTES, "choose bfloat16 or float32"),
        ("--quantize", request.quantize, request.quantize in ("off", *QUANTISED_BYTES), "choose off, int8, nf4 or fp8"),
    ):
        if not good:
            raise SettingsError(f"{name} is {value!r}; {hint}")
    workload = Workload(devices, memory_bytes, request.rank, context, dtype, request.quantize, request.adapters, cuda)
    return replace(workload, machines=request.machines or 0)


def _bytes_of(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError:
        raise SettingsError(f"--memory is {text!r}; write a size such as 80GB or 24GiB") from None


def _this_machine() -> tuple[int, int, bool]:
    """Return the number of devices, the bytes of each, and whether they are GPUs."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory, True
    return 1, read_host_memory()[1], False


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
    for name, label in ROWS.items():
        yield label, format_bytes(needs[name])
    for mode in MODES:
        yield TOTALS[mode], format_bytes(plan.needs.total(mode))
    yield "available", format_bytes(plan.workload.memory_bytes)


def headline(plan: Plan) -> str:
    return (
        describe_degrees(plan.degrees)
        if plan.fits
        else f"Nothing fits. Closest configuration: {describe_degrees(plan.degrees)}"
    )


def summary(plan: Plan) -> str:
    """The model and the flags in a line."""
    model, workload = plan.model, plan.workload
    active = f" ({billions(model.num_active)} of them active)" if model.has_experts else ""
    return (
        f"{model.model_type}: {billions(model.num_parameters)} parameters{active} in {workload.dtype}"
        f"{'' if workload.quantize == 'off' else ', ' + workload.quantize}; {workload.models} adapter(s) of rank "
        f"{workload.rank}, sequences of {workload.context_of(model)} tokens, {workload.devices} x "
        f"{format_bytes(workload.memory_bytes)}"
    )


SMALLEST_CONTEXT, SMALL_RANK = 512, 8
LARGER_DEVICES = ("24GB", "48GB", "80GB", "141GB")
MAX_LARGER_DEVICES = 256


def recommend(request: PlanRequest, plan: Plan) -> tuple[str, str]:
    """Return a sentence and one command. The command serves the plan if it fits. Otherwise it serves the closest
    configuration that fits on the same devices, or plans for the smallest devices on which the model fits.
    """
    if plan.fits:
        return "", command(request, plan)
    for less in _smaller(plan):
        if first_fit(plan.model, less):
            dtype = request.dtype if less.dtype == plan.workload.dtype else less.dtype
            smaller = replace(request, dtype=dtype, quantize=less.quantize)
            return f"This fits: {_differences(plan, less)}.", command(smaller, choose(plan.model, less))
    less = replace(request, rank=min(request.rank, SMALL_RANK), context=min(plan.workload.context_of(plan.model), 2048))
    counts = [2**power for power in range(MAX_LARGER_DEVICES.bit_length())]
    larger = [
        replace(variant, gpus=devices, memory=size)
        for variant, devices, size in itertools.product((request, less), counts, LARGER_DEVICES)
    ]
    smallest = next(
        (candidate for candidate in larger if first_fit(plan.model, _workload(candidate, plan.model))), larger[-1]
    )
    return "No smaller configuration fits on these devices. Plan for larger ones:", _planning(smallest)


def _smaller(plan: Plan) -> Iterator[Workload]:
    """Yield smaller requests: first smaller formats, then shorter sequences, then a lower rank."""
    workload, context = plan.workload, plan.workload.context_of(plan.model)
    halvings = range(max(0, (context // SMALLEST_CONTEXT).bit_length() - 1) + 1)
    ranks = (workload.rank, min(workload.rank, SMALL_RANK))
    formats = ("off", *QUANTISED_BYTES) if workload.quantize == "off" else (workload.quantize,)
    for rank, times, quantize in itertools.product(ranks, halvings, formats):
        for dtype in dict.fromkeys((workload.dtype, "bfloat16")):
            yield replace(workload, rank=rank, context=context >> times, quantize=quantize, dtype=dtype)


def _differences(plan: Plan, less: Workload) -> str:
    workload, model = plan.workload, plan.model
    changed = (
        (less.dtype, less.dtype != workload.dtype),
        (
            f"{'experts and ' if model.has_experts else ''}linear layers in {less.quantize}",
            less.quantize != workload.quantize,
        ),
        (f"sequences of up to {less.context} tokens", less.context_of(model) != workload.context_of(model)),
        (f"adapters of rank {less.rank}", less.rank != workload.rank),
    )
    return ", ".join(text for text, differs in changed if differs)


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
    if (machines := plan.workload.num_machines) > 1:
        flags.append(f"--machines {machines} --peer-host {FIRST}")
    return " ".join(["tinsmith serve", *flags])


def _settings_of(request: PlanRequest, plan: Plan) -> dict[str, object]:
    """The settings of the plan that differ from the defaults."""
    degrees = plan.degrees
    values: dict[str, object] = {"dtype": plan.workload.dtype} if request.dtype is not None else {}
    values |= {"quantize": plan.workload.quantize} if plan.workload.quantize != "off" else {}
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
    machines, commands = plan.workload.num_machines, {}
    per_machine = plan.degrees.devices // machines
    settings = _settings_of(request, plan)
    variables = {f"TINSMITH_{name.upper()}": str(value).lower() for name, value in settings.items()}
    if machines > 1:
        commands["other machines"] = f"tinsmith rank --join {FIRST}:29500 --ranks {per_machine} --model {request.model}"
    assignments = [f"{name}={value}" for name, value in variables.items()]
    reserved = f"--engine-gpus {per_machine}" if plan.workload.cuda else f"--engine-cpus {per_machine}"
    machine_flags = [f"--machines {machines}"] if machines > 1 else []
    commands["Ray"] = " ".join(
        [*assignments, f"tinsmith up --ray {HEAD}:6379 --model {request.model} --engines 1", reserved, *machine_flags]
    )
    if (device := next(_find_similar_devices(plan.workload), None)) is not None:
        name = SKYPILOT_NAMES.get(device.name, device.name)
        models = shlex.quote(json.dumps([request.model]))
        nodes = [f"--num-nodes {machines}"] if machines > 1 else []
        environment = [f"--env {assignment}" for assignment in (f"TINSMITH_MODELS={models}", *assignments)]
        parts = [f"sky launch -c tinsmith {SKYPILOT_TASK} --gpus {name}:{per_machine}", *nodes, *environment]
        commands["SkyPilot"] = " ".join([*parts, "--secret TINSMITH_SIGNING_SECRET"])
    return commands


BUSY_SHARE = 0.1
"""The share of the CPUs from which on the work of other processes is named beside a measurement."""
MEMORY_TOLERANCE = 0.12
"""Largest relative difference between a listed device's memory and the workload's."""


def _find_similar_devices(workload: Workload) -> Iterator[Device]:
    """The listed devices with about the workload's memory."""
    for device in DEVICES if workload.cuda else ():
        if abs(device.memory_bytes - workload.memory_bytes) <= MEMORY_TOLERANCE * device.memory_bytes:
            yield device


def speeds(
    plan: Plan,
    measure: Callable[[str, int, int], tuple[float, float]] = measure_matmul,
    measure_others: Callable[[], float] = measure_busy_share,
) -> Iterator[str]:
    """Yield speed estimates of a plan that fits, one line each: for devices with about the workload's memory, or for
    this CPU with the result of `measure`, and a line if other processes kept it busy.

    Training costs 4 operations per token and active weight: the forward pass, and the backward pass through the frozen
    base without the gradients of its weights. With activation checkpointing, and in the estimates for GPUs, it costs 6.
    Sampling reads all active weights once per token of a batch.
    """
    if not plan.fits:
        return
    active, workload = plan.model.num_active, plan.workload
    if not workload.cuda:
        if workload.quantize != "off":
            yield "No estimate of the speed: a CPU dequantizes the weights for each product."
            return
        busy_share = measure_others()
        operations_s, bytes_s = measure(workload.dtype, plan.model.hidden, active)
        trained = operations_s / ((4 if plan.mode == "kept" else OPERATIONS) * active)
        sampled = bytes_s / (active * DTYPE_BYTES[workload.dtype])
        yield (
            f"This CPU: at most about {_rounded(trained)} trained tokens/s; {_rounded(sampled)} sampled tokens/s "
            "for one sequence, more for a batch (estimated from packed matmuls measured here: "
            f"{operations_s / 1e9:,.0f} GFLOP/s with {TRAINING_ROWS} rows, {bytes_s / 1e9:,.1f} GB/s of weights "
            "with one; attention and adapters are not counted)"
        )
        if busy_share > BUSY_SHARE:
            yield (
                f"Other processes used {busy_share:.0%} of the CPUs during this measurement, which made its figures "
                "smaller: measure again when they have ended"
            )
        return
    for device in _find_similar_devices(workload):
        share = StepShare(max(memory.MICRO_BATCH[True], workload.context_of(plan.model)) // plan.degrees.context)
        step = step_time(plan, device, share)
        trained = share.rows * plan.degrees.groups / step.total
        sampled = 1 / token_s(plan, device)
        yield (
            f"{device.name}: about {_rounded(trained)} trained tokens/s; {_rounded(sampled)} sampled tokens/s for one "
            f"sequence, more for a batch (estimated at {TRAINING_SHARE:.0%} of peak FLOP/s in training and "
            f"{SAMPLING_SHARE:.0%} of memory bandwidth in sampling{_exchanges(step)})"
        )


def describe_measurement(plan: Plan, rates: Rates) -> Iterator[str]:
    """Yield what was measured, and the predicted time of a step of one micro-batch on each rank."""
    names = {"tensor": "sums of a tensor group", "context": "exchanges of a context group"}
    names |= {"base": "gathering among replicas", "gradients": "sums of all ranks"}
    names |= {"experts": "exchanges of an expert group", "stages": "messages between stages"}
    links_by_name = {names[name]: getattr(rates, name) for name in names}
    links = "".join(
        f"; {name} {link.bytes_s / 1e9:,.2f} GB/s, {1e6 * link.latency_s:,.0f} us each"
        for name, link in links_by_name.items()
        if link.bytes_s < math.inf
    )
    yield (
        f"Measured: {rates.operations_s / 1e9:,.0f} GFLOP/s and {rates.memory_bytes_s / 1e9:,.1f} GB/s of weights on "
        f"each device{links}"
    )
    step = step_time(plan, rates, micro_batch(plan))
    rows = micro_batch(plan).rows * plan.degrees.groups
    yield (
        f"A step of {rows:,} tokens takes about {1e3 * step.total:,.0f} ms: matmuls {1e3 * step.compute:,.0f}, tensor "
        f"{1e3 * step.tensor:,.0f}, context {1e3 * step.context:,.0f}, experts {1e3 * step.experts:,.0f}, stages "
        f"{1e3 * step.stages:,.0f}, layers {1e3 * step.base:,.0f}, gradients {1e3 * step.gradients:,.0f} ms; a sampled "
        f"token {1e3 * token_s(plan, rates):,.2f} ms"
    )


def micro_batch(plan: Plan) -> StepShare:
    """A device's share of a full micro-batch."""
    rows = max(memory.MICRO_BATCH[plan.workload.cuda], plan.workload.context_of(plan.model))
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
    model, workload = plan.model, plan.workload
    return {
        "model_type": model.model_type,
        "parameters": model.num_parameters,
        "active_parameters": model.num_active,
        "wanted": {**asdict(workload), "context": workload.context_of(model)},
        **plan.degrees.settings,
        "shard_base": plan.degrees.shard_base,
        "machines": workload.num_machines,
        "plan": describe_degrees(plan.degrees),
        "fits": plan.fits,
        "mode": plan.mode or None,
        "missing_bytes": plan.missing_bytes,
        "bytes_per_device": {
            **asdict(plan.needs),
            "key_value_bytes_per_token": memory.key_value_bytes(
                model, dtype=workload.dtype, tensor=plan.degrees.tensor
            ),
            **{f"total_{mode.replace(' ', '_')}": plan.needs.total(mode) for mode in MODES},
        },
        "words": list(plan.reasons),
    }


def billions(count: int) -> str:
    if count < 10**8:
        return f"{count / 1e6:.1f} M"
    return f"{count / 1e9:.2f} B" if count < 10**10 else f"{count / 1e9:.1f} B"
