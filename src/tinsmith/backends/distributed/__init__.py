"""The sharded backend: one base model on several devices, with one process per device.

Rank 0 is the engine's own process; `processes` starts the others and sends them commands. `ranks` has their
collectives; `tensor_parallel` and `model` hold a shard of the model; `context_parallel` splits a micro-batch's rows,
`expert_parallel` spreads routed experts; `trainer` and `sampler` extend the torch backend to all ranks; `rank` lists
the commands; `backend` is what the engine calls.
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
    context_parallel: str = "1",
    expert_parallel: str = "1",
    shard_base: str = "off",
    rank_timeout_s: str = "600",
    device: str = "auto",
    **options: str,
) -> ShardedBackend:
    """Start one rank per device. Raises SettingsError if that is impossible."""
    degrees = read_degrees(data_parallel, tensor_parallel, shard_base, context_parallel, expert_parallel)
    group = Group(degrees.devices, device=device, timeout_s=float(rank_timeout_s))
    atexit.register(group.close)
    return ShardedBackend(shape, degrees, group, **options)


def read_degrees(
    data_parallel: str, tensor_parallel: str, shard_base: str, context_parallel: str = "1", expert_parallel: str = "1"
) -> Degrees:
    """Parse the backend's options. Raises SettingsError on invalid values."""
    data, tensor = positive("data_parallel", data_parallel), positive("tensor_parallel", tensor_parallel)
    context, experts = positive("context_parallel", context_parallel), positive("expert_parallel", expert_parallel)
    degrees = Degrees(data, tensor, shard_base == "on", context, experts)
    if shard_base not in ("on", "off"):
        raise SettingsError(f"backend option shard_base is {shard_base!r}; choose 'on' or 'off'")
    if degrees.shard_base and degrees.groups == 1:
        raise SettingsError(
            "shard_base shards the base model over the ranks of data_parallel and context_parallel, which are 1; set "
            "one to 2 or more"
        )
    if degrees.devices % experts:
        raise SettingsError(
            f"expert_parallel is {experts}, which does not divide the {degrees.devices} ranks of data_parallel, "
            f"context_parallel and tensor_parallel; set data_parallel to {experts}"
        )
    return degrees
