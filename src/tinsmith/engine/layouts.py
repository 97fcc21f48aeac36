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
from dataclasses import asdict
from pathlib import Path

from tinsmith.base_models import read_shape
from tinsmith.cluster.placement import EngineLayout
from tinsmith.engine.__main__ import MIN_CONTEXT, MIN_RANK
from tinsmith.errors import SettingsError
from tinsmith.plan.architecture import Architecture, read_directory, size_of_files
from tinsmith.plan.degrees import Degrees, Plan, Workload, choose, evaluate, find_problem
from tinsmith.plan.memory import DTYPE_BYTES, FACTOR, choose_dtype, reserve_bytes
from tinsmith.runtime.host_memory import read_host_memory
from tinsmith.settings import Settings
from tinsmith.settings.groups import DEGREES
from tinsmith.types import ModelShape


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
    """Free and total bytes of each GPU, and True; those of the host, and False, if engines compute on its CPUs."""
    if settings.device != "cpu":
        import torch

        if torch.cuda.is_available():
            gpus = range(torch.cuda.device_count())
            free, totals = zip(*(torch.cuda.mem_get_info(gpu) for gpu in gpus), strict=True)
            return list(free), list(totals), True
    free_bytes, total_bytes = read_host_memory()
    return [free_bytes], [total_bytes], False


def list_layouts(
    settings: Settings, shape: ModelShape, totals: list[int], requested_degrees: Mapping[str, int], *, has_gpus: bool
) -> list[EngineLayout]:
    """The ways to divide a model over devices with `totals` bytes, in order of preference. Degrees that a client asked
    for, or else those of the settings, leave one way. Raises SettingsError if the model cannot be divided so.
    """
    fixed_degrees = {name: value for name in DEGREES if (value := getattr(settings, name))}
    fixed_degrees |= requested_degrees
    try:
        model = read_directory(Path(shape.path))
    except SettingsError:
        if any(degree > 1 for degree in fixed_degrees.values()):
            raise
        return [EngineLayout(1, _estimate_bytes(shape, totals[0], has_gpus=has_gpus), Degrees().settings)]
    if fixed_degrees or settings.shard_base:
        data, tensor, context, experts, pipeline = (fixed_degrees.get(name, 1) for name in DEGREES)
        degrees = Degrees(data, tensor, settings.shard_base, context, experts, pipeline)
        num_devices = len(totals) if has_gpus else degrees.devices
        if problem := find_problem(model, degrees, num_devices, quantize=settings.quantize):
            raise SettingsError(f"base model {shape.name!r} cannot be divided as asked: {problem}")
        workload = _build_workload(model, settings, degrees.devices, min(totals), has_gpus=has_gpus)
        return [_layout(evaluate(model, workload, degrees), has_gpus=has_gpus)]
    counts = [count for count in range(1, len(totals) + 1) if count == 1 or _may_divide(settings, shape)]
    plans = (choose(model, _build_workload(model, settings, count, min(totals), has_gpus=has_gpus)) for count in counts)
    return list(_drop_useless([_layout(plan, has_gpus=has_gpus) for plan in plans]))


def _may_divide(settings: Settings, shape: ModelShape) -> bool:
    return (
        shape.vision is None
        and settings.backend == "torch"
        and not (
            settings.deterministic or settings.memory_budget or settings.quantize != "off" or ":" in settings.device
        )
    )


def _drop_useless(layouts: list[EngineLayout]) -> Iterator[EngineLayout]:
    """Layouts that need less of each GPU than all with fewer GPUs."""
    least = None
    for layout in layouts:
        if least is None or layout.num_bytes < least:
            least = layout.num_bytes
            yield layout


def _build_workload(
    model: Architecture, settings: Settings, devices: int, memory_bytes: int, *, has_gpus: bool
) -> Workload:
    dtype_setting = settings.dtype if settings.dtype in DTYPE_BYTES else "auto"  # the backend refuses others
    dtype = choose_dtype(dtype_setting, cuda=has_gpus, stored=model.stored_dtype)
    return Workload(
        devices,
        memory_bytes,
        rank=MIN_RANK,
        context=MIN_CONTEXT,
        dtype=dtype,
        quantize=settings.quantize,
        cuda=has_gpus,
        machines=1,
    )


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
