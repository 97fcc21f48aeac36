"""The sharded backend: one base model on several devices, by a process for each.

Rank 0 is the engine's own process; `links` starts the others and talks to them. degrees says how many share what;
ranks is what they do together; parts, dividing and base hold a share of the model; trainer and sampler make the torch
backend's work everyone's; rank lists the commands; backend is what the engine drives.
"""

import atexit

from tinsmith.backends.distributed.backend import Group, ShardedBackend
from tinsmith.backends.distributed.degrees import Degrees
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
    """Start as many ranks as the degrees ask for. Raises SettingsError if they cannot be had."""
    degrees = Degrees.read(data_parallel, tensor_parallel, shard_base)
    group = Group(degrees.world, device=device, timeout_s=float(rank_timeout_s))
    atexit.register(group.close)
    return ShardedBackend(shape, degrees, group, **options)
