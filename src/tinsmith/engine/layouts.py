"""How a base model can be divided on this machine: `python -m tinsmith.engine.layouts`, for engines on demand.

Reads one line of JSON from standard input (`name`, `path`, `settings`, and `degrees` if a client asked for some) and
prints one: `slots` has the free bytes of each GPU, or of the host; `layouts` has the plan for each number of GPUs,
smallest first, with its bytes of each slot; or `error` says why there is none. A family that the planner does not know
needs one device, with the bytes of its files and half as much again. A separate process reads the architecture and asks
the GPUs, since a server loads no torch, and a CUDA context would keep memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from tinsmith.base_models import read_shape
from tinsmith.cluster.placement import EngineLayout
from tinsmith.errors import SettingsError
from tinsmith.plan.architecture import Architecture, read_directory, size_of_files
from tinsmith.plan.degrees import Degrees, Plan, Workload, choose, evaluate, find_problem
from tinsmith.plan.memory import DTYPE_BYTES, FACTOR, choose_dtype, reserve_bytes
from tinsmith.runtime.devices import choose_device, kind_of, list_devices
from tinsmith.runtime.devices import read_memory as read_device_memory
from tinsmith.settings import Settings
from tinsmith.settings.groups import DEGREES, ModelSettings
from tinsmith.types import ModelShape

MIN_RANK, MIN_CONTEXT = 8, 256
"""The smallest adapter rank and context for which an engine is useful."""


def main() -> None:
    spec = json.loads(sys.stdin.readline())
    settings = Settings.model_validate(spec["settings"])
    try:
        shape = read_shape(spec["name"], Path(spec["path"]), vision=settings.vision)
        free, totals, has_gpus = read_memory(settings)
        layouts = list_layouts(settings, shape, totals, spec["degrees"], has_gpus=has_gpus)
    except SettingsError as error:
        answer: dict[str, object] = {"error": str(error)}
    else:
        answer = {"slots": free, "has_gpus": has_gpus, "layouts": [asdict(layout) for layout in layouts]}
    sys.stdout.write(json.dumps(answer) + "\n")


def read_memory(settings: Settings) -> tuple[list[int], list[int], bool]:
    """Free and total bytes of each GPU, and True; otherwise those of the one device on which engines compute, and
    False.
    """
    device = choose_device(settings.device)
    kind = kind_of(device)
    devices = list_devices(kind) if kind.has_kernels else [device]
    free, totals = zip(*map(read_device_memory, devices), strict=True)
    return list(free), list(totals), kind.has_kernels


def list_layouts(
    settings: Settings, shape: ModelShape, totals: list[int], requested_degrees: Mapping[str, int], *, has_gpus: bool
) -> list[EngineLayout]:
    """The ways to divide a model over devices with `totals` bytes, in order of preference. Degrees that a client asked
    for, or else those of the settings, leave one way. Raises SettingsError if the model cannot be divided so.
    """
    settings = settings.model_copy(update=dict(requested_degrees))
    degrees = read_degrees(settings)
    try:
        model = read_architecture(shape)
    except SettingsError:
        if degrees.devices > 1 or degrees.experts > 1:
            raise
        return [EngineLayout(1, _estimate_bytes(shape, totals[0], has_gpus=has_gpus), Degrees().settings)]
    if has_degrees(settings):
        num_devices = len(totals) if has_gpus else degrees.devices
        if problem := find_problem(model, degrees, num_devices, quantize=settings.quantize):
            raise SettingsError(f"base model {shape.name!r} cannot be divided as asked: {problem}")
        workload = _least_workload(model, settings, degrees.devices, min(totals), has_gpus=has_gpus)
        return [_layout(evaluate(model, workload, degrees), has_gpus=has_gpus)]
    max_devices = 1 if find_reason_for_one_device(settings, shape) else len(totals)
    counts = range(1, max_devices + 1)
    plans = (choose(model, _least_workload(model, settings, count, min(totals), has_gpus=has_gpus)) for count in counts)
    return list(_drop_useless([_layout(plan, has_gpus=has_gpus) for plan in plans]))


def read_architecture(shape: ModelShape) -> Architecture:
    """The planner's architecture of a served base model. Raises SettingsError for families that it does not know."""
    model = read_directory(Path(shape.path))
    return model if shape.vision is not None else replace(model, vision_parameters=0, tower_activations=0.0)


def read_degrees(settings: ModelSettings) -> Degrees:
    data, tensor, context, experts, pipeline = (getattr(settings, name) or 1 for name in DEGREES)
    return Degrees(data, tensor, settings.shard_base, context, experts, pipeline)


def has_degrees(settings: ModelSettings) -> bool:
    """Whether the settings say how to divide a model, so that no plan chooses it."""
    return settings.shard_base or any(getattr(settings, name) for name in DEGREES)


def build_workload(
    model: Architecture, settings: ModelSettings, devices: int, memory_bytes: int, *, cuda: bool
) -> Workload:
    dtype_setting = settings.dtype if settings.dtype in DTYPE_BYTES else "auto"  # the backend refuses others
    dtype = choose_dtype(dtype_setting, cuda=cuda, stored=model.stored_dtype)
    workload = Workload(devices, memory_bytes, dtype=dtype, quantize=settings.quantize, cuda=cuda)
    return replace(workload, machines=settings.machines)


def find_reason_for_one_device(settings: Settings, shape: ModelShape, *, num_sharing: int = 1) -> str:
    """Why an engine may not have several devices; "" if it may. `num_sharing`: engines and samplers that take the
    devices at the same time; one on demand gets those of its own, by their free memory. What a quantised base allows is
    the plan's matter.
    """
    reasons = {
        f"{num_sharing} engines and samplers share this machine": num_sharing > 1,
        f"backend {settings.backend!r} is for one device": settings.backend != "torch",
        f"{settings.sampler} needs a device of its own": settings.samples_elsewhere and not settings.sampler_url,
        "images need one device": shape.vision is not None,
        "deterministic needs one device": settings.deterministic,
        "memory_budget is for one device": bool(settings.memory_budget),
        f"device is {settings.device!r}, which is one": ":" in settings.device,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _drop_useless(layouts: list[EngineLayout]) -> Iterator[EngineLayout]:
    """Layouts that need less of each GPU than all with fewer GPUs."""
    least = None
    for layout in layouts:
        if least is None or layout.num_bytes < least:
            least = layout.num_bytes
            yield layout


def _least_workload(
    model: Architecture, settings: Settings, devices: int, memory_bytes: int, *, has_gpus: bool
) -> Workload:
    workload = build_workload(model, settings, devices, memory_bytes, cuda=has_gpus)
    return replace(workload, rank=MIN_RANK, context=MIN_CONTEXT)


def _layout(plan: Plan, *, has_gpus: bool) -> EngineLayout:
    """The layout of a plan; on CPUs all ranks share the host's memory."""
    devices, num_bytes = plan.degrees.devices, plan.needs.total("in turns")
    degrees = plan.degrees.settings | {"shard_base": plan.degrees.shard_base}
    return EngineLayout(devices, num_bytes, degrees) if has_gpus else EngineLayout(1, devices * num_bytes, degrees)


def _estimate_bytes(shape: ModelShape, memory_bytes: int, *, has_gpus: bool) -> int:
    _, num_bytes = size_of_files(Path(shape.path)) or (0, 0)
    return int(FACTOR * num_bytes) + reserve_bytes(memory_bytes, cuda=has_gpus)


if __name__ == "__main__":
    main()
