"""Whether a base model can be laid over this engine's devices as the settings say: asked before a weight is loaded.

The plan's arithmetic, for the families that it counts. What cannot divide is refused, and so is what a GPU or a memory
budget has no room for; of a CPU's memory, which can be swapped, a shortage is only told.
"""

from __future__ import annotations

import os
from pathlib import Path

import structlog

from tinsmith.errors import SettingsError
from tinsmith.plan.architecture import Architecture, read_directory
from tinsmith.plan.degrees import Degrees, Plan, Wanted, described, gib, judged, problem_of
from tinsmith.plan.memory import NUMBER_BYTES
from tinsmith.settings import Settings
from tinsmith.types import ModelShape

LEAST_RANK, LEAST_CONTEXT = 8, 256
"""An engine for which less than this fits is of no use."""

log = structlog.get_logger()


def check_fit(settings: Settings, shape: ModelShape) -> None:
    """Raises SettingsError, with the reason or with what is missing."""
    degrees = Degrees(settings.data_parallel, settings.tensor_parallel, settings.shard_base)
    if settings.memory_budget and settings.resolved_backend != "torch":
        raise SettingsError(
            f"memory_budget is for an engine on one device with backend 'torch'; this one has "
            f"{described(degrees)} with backend {settings.resolved_backend!r}"
        )
    if settings.resolved_backend not in ("torch", "sharded"):
        return
    try:
        model = read_directory(Path(shape.path))
    except SettingsError as error:
        log.debug("the plan does not count this model", base_model=shape.name, reason=str(error))
        return
    if problem := problem_of(model, degrees, quantize=settings.quantize):
        raise SettingsError(f"{shape.name}: {problem}")
    plan = _plan(model, settings, degrees)
    if plan.fits:
        return
    needed = gib(plan.needs.total("in turns"))
    problem = (
        f"{shape.name} over {described(degrees)} needs {needed} of each device, base {gib(plan.needs.base)} among it, "
        f"and there is {gib(plan.wanted.memory_bytes)}: {gib(plan.missing_bytes)} less"
    )
    if plan.wanted.cuda:
        raise SettingsError(f"{problem}; `tinsmith doctor {shape.path} --gpus N --memory M` plans for more devices")
    log.warning("this may not fit into the machine's memory", problem=problem)


def _plan(model: Architecture, settings: Settings, degrees: Degrees) -> Plan:
    memory_bytes, cuda = _device(settings, degrees.devices)
    dtype = settings.dtype if settings.dtype in NUMBER_BYTES else "bfloat16" if cuda else "float32"
    wanted = Wanted(
        degrees.devices,
        memory_bytes,
        rank=LEAST_RANK,
        context=LEAST_CONTEXT,
        dtype=dtype,
        quantize=settings.quantize,
        cuda=cuda,
    )
    return judged(model, wanted, degrees)


def _device(settings: Settings, devices: int) -> tuple[int, bool]:
    """Bytes of one device, and whether it is a GPU."""
    if settings.device != "cpu":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_properties(0).total_memory, True
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // devices, False
