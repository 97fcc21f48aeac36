"""What each kind of device can do, and how much memory it has: the one place that tells kinds apart.

CPUs and CUDA are tested. Any other device of torch is used if it is asked for by name, and computes by the reference
path: torch's own operations, no kernels, no pinned memory, nothing late. Callers ask for a property, never for a name.
torch is imported when a device is asked for, since a server loads none.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from tinsmith.errors import SettingsError
from tinsmith.runtime.host_memory import read_host_memory

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """The defaults are those of a device on which nothing was run."""

    name: str
    """The type of a torch.device."""

    is_host: bool = False
    """Whether tensors are in the host's memory, where numpy reads them, and products have kernels for a CPU."""

    is_tested: bool = False
    """Whether results were compared on such a device. Others are checked at every start."""

    has_kernels: bool = False
    """Whether it runs Triton's kernels and CUDA's graphs, adds products to a wider sum, and is large enough that work
    waits for its launch: its micro-batches are large, and its memory is allocated at the start.
    """

    pins_memory: bool = False
    """Whether copies from and to pinned memory run beside the host."""

    has_float64: bool = True
    """Whether it computes in float64; elsewhere sums that need it are computed on the host."""

    prefers_bfloat16: bool = False
    """Whether `auto` is bfloat16 whatever the checkpoint is stored in."""


KINDS: Mapping[str, DeviceKind] = {
    kind.name: kind
    for kind in (
        DeviceKind("cpu", is_host=True, is_tested=True),
        DeviceKind("cuda", is_tested=True, has_kernels=True, pins_memory=True, prefers_bfloat16=True),
        DeviceKind("mps", has_float64=False),
        DeviceKind("xpu", prefers_bfloat16=True),
    )
}


def kind_of(device: torch.device | str) -> DeviceKind:
    name = device.partition(":")[0] if isinstance(device, str) else device.type
    return KINDS.get(name) or DeviceKind(name)


def choose_device(requested: str) -> str:
    """The device of a setting: `auto` is a tested one, a GPU if there is one. Raises SettingsError if this machine, or
    the installed torch, lacks the device.
    """
    if requested == "cpu":
        return requested
    import torch

    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, index = kind_of(requested), requested.partition(":")[2]
    if kind.name not in KINDS:
        raise SettingsError(f"device is {requested!r}; choose one of 'auto', {', '.join(map(repr, KINDS))}")
    module = _module(kind.name)
    if not module.is_available():
        raise SettingsError(
            f"device {requested!r} is unavailable: PyTorch {torch.__version__} finds no GPU of the kind {kind.name!r}; "
            "use 'auto' or 'cpu'"
        )
    if index and int(index) >= (count := module.device_count()):
        raise SettingsError(
            f"device is {requested!r}, and torch {torch.__version__} finds {count} devices of the kind {kind.name!r} "
            "here; name one of them, counted from 0, or 'auto' or 'cpu'"
        )
    return requested


def list_devices(kind: DeviceKind) -> list[str]:
    return [f"{kind.name}:{index}" for index in range(_module(kind.name).device_count())]


def select_device(device: str) -> None:
    """Make a numbered device this thread's current one, which kernels, pinned memory and other libraries use."""
    name, _, index = device.partition(":")
    if index:
        _module(name).set_device(device)


def read_memory(device: torch.device | str) -> tuple[int, int]:
    """Free and total bytes. Of a device that shares the host's memory, the host's, up to what its driver lends."""
    kind = kind_of(device)
    if kind.is_host:
        return read_host_memory()
    module = _module(kind.name)
    if hasattr(module, "mem_get_info"):
        with suppress(RuntimeError):  # some integrated GPUs do not say
            free, total = module.mem_get_info(device)
            return int(free), int(total)
    free, total = read_host_memory()
    if hasattr(module, "recommended_max_memory"):
        lent = module.recommended_max_memory()
        return max(0, min(free, lent - module.driver_allocated_memory())), min(total, lent)
    return free, total


def free_bytes(device: torch.device | str) -> int:
    """Bytes that could be allocated now, as the driver or the system reports them."""
    return read_memory(device)[0]


def count_unused_bytes(device: torch.device) -> int:
    """Bytes that torch's allocator holds of the device and nothing uses."""
    module = _module(device.type)
    if not hasattr(module, "memory_reserved"):
        return 0
    return int(module.memory_reserved(device) - module.memory_allocated(device))


def return_memory(device: torch.device) -> None:
    """Return unused memory to the driver, from which other processes allocate."""
    if empty := getattr(_module(device.type), "empty_cache", None):
        empty()


@cache
def runs_triton(device: torch.device) -> bool:
    """Whether the device has kernels, and Triton, which compiles them, is installed."""
    return kind_of(device).has_kernels and find_spec("triton") is not None


@cache
def has_packed_matmuls(dtype: str = "float32") -> bool:
    """Whether oneDNN has packed matmuls of this dtype on this processor; bfloat16 needs AVX-512."""
    import torch

    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype != "bfloat16" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether the tensor's device has kernels (`DeviceKind.has_kernels`). Called in every product of a step."""
    return x.is_cuda


def place_for_float64(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy on the host if its device does not compute in float64."""
    return x if kind_of(x.device).has_float64 else x.cpu()


def is_on_host(x: torch.Tensor) -> bool:
    return x.is_cpu


def _module(name: str) -> ModuleType:
    """torch.cuda, torch.cpu, torch.mps, ..."""
    import torch

    return torch.get_device_module(name)
