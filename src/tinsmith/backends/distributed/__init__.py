"""The sharded backend: one base model on several devices, by a process for each.

Rank 0 is the engine's own process; `processes` starts the others and sends them commands. `ranks` has their
collectives; `tensor_parallel` and `model` hold a share of the model; `trainer` and `sampler` make the torch backend's
work that of all ranks; `rank` lists the commands; `backend` is what the engine drives.
"""

import atexit

from tinsmith.backends.distributed.backend import Group, ShardedBackend
from tinsmith.backends.torch.backend import positive
from tinsmith.errors import SettingsError
from tinsmith.plan.degrees import Degrees
from tinsmith.types import ModelShape

__all__ = ["Degrees", "Group", "ShardedBackend", "load"]


def load(
    shape: ModelShape,
    *,
    data_parallel: str = "1",
    tensor_parallel: str = "1",
    shard_base: str = "off",
    rank_timeout_s: str = "600",
    device: str = "auto",
    **options: str,
) -> ShardedBackend:
    """Start one rank for each device. Raises SettingsError if that is impossible."""
    degrees = read_degrees(data_parallel, tensor_parallel, shard_base)
    group = Group(degrees.devices, device=device, timeout_s=float(rank_timeout_s))
    atexit.register(group.close)
    return ShardedBackend(shape, degrees, group, **options)


def read_degrees(data_parallel: str, tensor_parallel: str, shard_base: str) -> Degrees:
    """From the backend's options. Raises SettingsError on values that are impossible."""
    data, tensor = positive("data_parallel", data_parallel), positive("tensor_parallel", tensor_parallel)
    if shard_base not in ("on", "off"):
        raise SettingsError(f"backend option shard_base is {shard_base!r}; choose 'on' or 'off'")
    if shard_base == "on" and data == 1:
        raise SettingsError(
            "shard_base divides the base model among the ranks of data_parallel, and that is 1; set it to 2 or more"
        )
    return Degrees(data, tensor, shard_base == "on")
