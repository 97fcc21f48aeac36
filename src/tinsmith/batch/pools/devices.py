"""The GPUs of this machine that workers may have: those that the operator left visible, without those of engines.

Names are CUDA's, as `CUDA_VISIBLE_DEVICES` has them: an index, a UUID, or a MIG instance. The operator's mask is that
variable of the server; without it, all GPUs are visible by their indices. A process numbers the names in its mask from
0, so an engine's `cuda:1` is the second name of the mask.

An engine that chooses its GPUs itself when it starts may take each of them, so all of them count as its own. vLLM and
SGLang take the first ones, as many as their options say.
"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tinsmith.settings import Settings
from tinsmith.settings.environment import device_mask

QUERY_S = 10.0
PARALLEL_OPTION = re.compile("--(?:(?:tensor|pipeline|data)-parallel-size|[dpt]p-size|tp|pp|dp)")
"""The options of vLLM and SGLang that multiply their GPUs."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The GPUs of this machine, by name."""

    visible: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    """Those of the visible ones that this server's engines and samplers may use."""

    @property
    def free(self) -> tuple[str, ...]:
        return tuple(name for name in self.visible if name not in self.engines)

    def of_slot(self, slot: int, count: int) -> tuple[str, ...]:
        """The GPUs of one slot where each has `count`; fewer if there are not enough."""
        return self.free[slot * count : (slot + 1) * count]

    def problem(self, count: int) -> str:
        """Why no worker can have this many GPUs; empty if one can."""
        if len(self.free) >= count:
            return ""
        demand = f"each of its workers needs {count} GPU{'s' * (count > 1)}"
        if not self.visible:
            return f"{demand}, and the server sees none (CUDA_VISIBLE_DEVICES of the server, and nvidia-smi)"
        visible = f"the server sees {', '.join(self.visible)}"
        if self.engines:
            return (
                f"{demand}; {visible}, of which its engines may use {', '.join(self.engines)}. Leave GPUs to the "
                "workers with --device cuda:N or the engine's degrees, such as --data-parallel, or run them with "
                "--role batch-worker on another machine"
            )
        return f"{demand}, and {visible}"


def devices_of(settings: Settings) -> Devices:
    """The GPUs of this machine, without loading CUDA."""
    visible = visible_devices(device_mask())
    positions = engine_positions(settings, len(visible))
    return Devices(visible, tuple(name for position, name in enumerate(visible) if position in positions))


def visible_devices(mask: str | None) -> tuple[str, ...]:
    """The GPUs that a process with this mask sees: CUDA ignores what follows the first invalid name."""
    if mask is None:
        return tuple(map(str, range(_count_gpus())))
    names: list[str] = []
    for name in map(str.strip, mask.split(",")):
        if not (name.isdigit() or name.startswith(("GPU-", "MIG-"))) or name in names:
            break
        names.append(name)
    return tuple(names)


def engine_positions(settings: Settings, count: int) -> Collection[int]:
    """The places, among `count` visible GPUs, of those that this process's engines and samplers may use."""
    if not settings.num_torch_processes or settings.backend == "fake":
        return ()
    used: set[int] = set()
    if settings.samples_elsewhere and not settings.sampler_url:
        used |= set(range(_external_gpus(settings.sampler_options)))
    name, _, index = settings.device.partition(":")
    if name == "cpu":
        return used
    if index:
        return used | {int(index)}
    if settings.resolved_backend == "sharded":
        return used | set(range(max(1, settings.num_ranks // settings.machines)))
    chooses = (
        settings.backend == "torch"
        and settings.num_torch_processes == 1
        and not settings.deterministic
        and not settings.memory_budget
        and not settings.samples_elsewhere
    )
    return range(count) if chooses else used | {0}


def _external_gpus(options: str) -> int:
    """How many GPUs vLLM or SGLang take with these options."""
    count = 1
    words = options.replace("=", " ").split()
    for option, value in pairwise(words):
        if PARALLEL_OPTION.fullmatch(option) and value.isdigit():
            count *= int(value)
    return count


def _count_gpus() -> int:
    """The number of GPUs by NVIDIA's library, or else its command, or else the device files."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return int(nvml.nvmlDeviceGetCount())
    except Exception:  # noqa: BLE001 - no library, driver or device; its errors have no common base class
        pass
    if command := shutil.which("nvidia-smi"):
        try:
            result = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=QUERY_S, check=True)
            return sum(line.startswith("GPU ") for line in result.stdout.split("\n"))
        except (OSError, subprocess.SubprocessError):
            pass
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])
