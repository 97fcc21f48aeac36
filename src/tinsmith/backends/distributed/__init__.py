"""The sharded backend: one base model on several devices, with one process per device.

Rank 0 is the engine's own process; `processes` starts the other ranks of its machine and sends commands to all; ranks
of other machines join through `rendezvous`. `collectives` has the process groups and their operations;
`tensor_parallel` and `model` hold a shard of the model; `context_parallel` splits a micro-batch's rows;
`expert_parallel` distributes routed experts; `pipeline_parallel` runs micro-batches through stages of layers; `trainer`
and `sampler` extend the torch backend to all ranks; `rank` lists the commands; `backend` is what the engine calls.
"""

import atexit
from functools import partial
from pathlib import Path

from tinsmith.backends.distributed.backend import Group, ShardedBackend
from tinsmith.backends.distributed.rendezvous import Machines
from tinsmith.backends.torch.backend import positive
from tinsmith.errors import SettingsError
from tinsmith.plan.degrees import Degrees
from tinsmith.types import ModelShape

__all__ = ["Degrees", "Group", "ShardedBackend", "load"]


def load(  # noqa: PLR0913 - the degrees of parallelism
    shape: ModelShape,
    *,
    data_parallel: str = "1",
    tensor_parallel: str = "1",
    context_parallel: str = "1",
    expert_parallel: str = "1",
    pipeline_parallel: str = "1",
    shard_base: str = "off",
    rank_timeout_s: str = "600",
    device: str = "auto",
    **options: str,
) -> ShardedBackend:
    """Start one rank per device; `options` are those of `read_machines` and of the torch backend. Raises SettingsError
    if the ranks cannot start.
    """
    degrees = read_degrees(
        data_parallel, tensor_parallel, shard_base, context_parallel, expert_parallel, pipeline_parallel
    )
    machines = read_machines(options)
    group = Group(degrees.devices, device=device, timeout_s=float(rank_timeout_s), machines=machines)
    atexit.register(group.close)
    return ShardedBackend(shape, degrees, group, **options)


def read_machines(options: dict[str, str]) -> Machines | None:
    """Remove `machines` and its settings from the options; None for one machine. Ranks of other machines join at
    `rank_address`, HOST:PORT, with the hexadecimal key `rank_key`; `rank_address_file` holds the address while they
    are accepted.
    """
    count = positive("machines", options.pop("machines", "1"))
    host, _, port = options.pop("rank_address", "127.0.0.1:0").rpartition(":")
    key, file = options.pop("rank_key", ""), options.pop("rank_address_file", "")
    if count == 1:
        return None
    announce = partial(_write_address, Path(file)) if file else lambda _address: None
    return Machines(count, host.strip("[]"), int(port), bytes.fromhex(key), announce)


def _write_address(path: Path, address: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(address)
    temporary.replace(path)


def read_degrees(
    data_parallel: str,
    tensor_parallel: str,
    shard_base: str,
    context_parallel: str = "1",
    expert_parallel: str = "1",
    pipeline_parallel: str = "1",
) -> Degrees:
    """Parse the backend's options. Raises SettingsError on invalid values."""
    data, tensor = positive("data_parallel", data_parallel), positive("tensor_parallel", tensor_parallel)
    context, experts = positive("context_parallel", context_parallel), positive("expert_parallel", expert_parallel)
    pipeline = positive("pipeline_parallel", pipeline_parallel)
    degrees = Degrees(data, tensor, shard_base == "on", context, experts, pipeline)
    if shard_base not in ("on", "off"):
        raise SettingsError(f"backend option shard_base is {shard_base!r}; choose 'on' or 'off'")
    if degrees.shard_base and degrees.groups == 1:
        raise SettingsError(
            "shard_base shards the base model over the ranks of data_parallel and context_parallel, which are 1; set "
            "one to 2 or more"
        )
    if degrees.shard_base and degrees.pipeline > 1:
        raise SettingsError(
            "shard_base is on and pipeline_parallel is over 1; use one of them, or divide the layers of a stage with "
            "tensor_parallel"
        )
    if degrees.stage_size % experts:
        raise SettingsError(
            f"expert_parallel is {experts}, which does not divide the {degrees.stage_size} ranks of data_parallel, "
            f"context_parallel and tensor_parallel; set data_parallel to {experts}"
        )
    return degrees
