"""The declaration of a pool of workers and the interface of its implementations.

A pool has slots. A slot runs the batches of one job at a time. The workers of an exclusive pool hold accelerators or a
reservation on a cluster, so a slot has a worker only for the job that it runs.

A pool whose `infra` has one of SkyPilot's forms (`aws/us-east-1`, `kubernetes/CONTEXT`, `ssh/POOL`) is rented: its jobs
are left to the machines that `skypilot_task` describes, which run a job together, each with all workers of the pool.
With `managed: true` the server starts these machines for each job (`managed.py`).
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from tinsmith.batch.pools.devices import Devices
from tinsmith.batch.types import JobSpec
from tinsmith.batch.worker.frames import Message
from tinsmith.errors import SettingsError, UserError
from tinsmith.runtime.host_memory import read_host_memory

LOCAL, RAY = "local", "ray"
INFRA = (LOCAL, RAY)
CLOUDS = re.compile(
    "aws|azure|cudo|digitalocean|do|fluidstack|gcp|hyperbolic|ibm|k8s|kubernetes|lambda|mithril|nebius|oci|paperspace|"
    "primeintellect|runpod|scp|seeweb|shadeform|slurm|ssh|vast|verda|vsphere|yotta|[*]"
)
"""SkyPilot 0.14.1's values before the first slash."""
PLACE_KEYS = ("cloud", "region", "zone")
MAX_SLOTS = 1024
POOL_KEYS = {
    "workers",
    "min_workers",
    "max_workers",
    "queue_length_threshold",
    "upscale_delay_seconds",
    "downscale_delay_seconds",
    "managed",
}


class WorkerError(Exception):
    """Something is wrong with a worker. `host` is its machine, or empty if it is not known."""

    def __init__(self, message: str, host: str = "") -> None:
        super().__init__(message)
        self.host = host


class WorkerStartError(WorkerError):
    """A worker did not start."""


class WorkerLostError(WorkerError):
    """The worker cannot be used any more."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool. Workers start with the first batch for them and end with their job; between jobs the pool is empty."""

    name: str
    workers: int
    devices_per_worker: int = 0
    setup: str = ""
    infra: str = LOCAL
    cpus: float = 1.0
    """CPUs that each worker reserves on a cluster; on this machine nothing is reserved."""
    managed: bool = False
    """Whether the server has SkyPilot start the machines of each job."""
    machines: int = 1
    """How many machines of SkyPilot's run the pool's jobs together."""
    file: Path | None = field(default=None, compare=False)
    devices: Devices | None = field(default=None, compare=False)
    """The GPUs of this machine, for a pool on it; None if they are not this server's to give."""

    @property
    def slots(self) -> int:
        """How many workers there can be at a time, with GPUs of their own."""
        if self.devices is None or not self.devices_per_worker:
            return self.workers
        return min(self.workers, len(self.devices.free) // self.devices_per_worker)

    @property
    def rented(self) -> bool:
        """Whether the pool's machines are SkyPilot's, and serve it by themselves."""
        return self.infra not in INFRA

    @property
    def exclusive(self) -> bool:
        return self.devices_per_worker > 0 or self.infra == RAY

    def with_workers(self, workers: object) -> PoolSpec:
        return replace(self, workers=_count("workers", workers))


def max_job_workers(pool: PoolSpec, job: JobSpec) -> int:
    """How many workers of the pool may run a job at a time, with the resources that each needs. Ray decides on its
    cluster, where a request without room waits for the autoscaler, and a rented machine decides when it takes the job.
    Raises UserError that names the resource that a worker cannot have."""
    if pool.infra != LOCAL:
        return MAX_SLOTS
    if pool.devices is not None and (problem := pool.devices.problem(pool.devices_per_worker)):
        raise UserError(f"the pool {pool.name!r} cannot run a job: {problem}")
    shared = {"num_cpus": float(os.cpu_count() or 1), "memory": float(read_host_memory()[1])}
    requested = {"num_cpus": job.num_cpus, "memory": job.memory, "num_gpus": job.num_gpus, **(job.resources or {})}
    limit = MAX_SLOTS
    for name, amount in requested.items():
        available = shared.get(name, float(pool.devices_per_worker) if name == "num_gpus" else 0.0)
        if amount and amount > available:
            raise UserError(
                f"each worker needs {name} = {amount:.15g}, but a worker of pool {pool.name!r} can have at most "
                f"{available:.15g}; request less, or use another pool"
            )
        if amount and name in shared:
            limit = min(limit, int(available / amount))
    return limit


class WorkerHandle(Protocol):
    """A started worker: `worker.Worker` itself, or one on a Ray cluster."""

    host: str
    """The name of its machine, or of its GPUs there, for `Pool.start` and for users."""

    @property
    def process_name(self) -> str:
        """A process, or a node and a process, to be shown to users."""
        ...

    @property
    def has_ended(self) -> bool: ...

    def call(self, name: str, request: Message) -> AsyncGenerator[Message, None]:
        """The messages of one of the calls in `worker.py`. Raises CallRefusedError, WorkerLostError."""
        ...

    def send_file(self, path: Path) -> AsyncGenerator[Message, None]:
        """Copy a file of this machine to the worker's; each message has its `path` there. Raises as `call` does."""
        ...

    async def wait(self) -> None:
        """Wait until it is gone."""
        ...

    async def kill(self) -> None:
        """End the worker and its children at once, and delete its files."""
        ...


class Pool(Protocol):
    """Starts the workers of one pool."""

    kind: str
    spec: PoolSpec

    async def start(
        self, worker_id: str, slot: int | None, job: JobSpec | None = None, avoid: Collection[str] = ()
    ) -> WorkerHandle:
        """Start a worker for a slot, with what the job needs, or, with None, for an operation beside the slots; on none
        of the hosts in `avoid`, if the pool can choose. Raises WorkerStartError, or what prevented the start."""
        ...

    def host_of(self, slot: int) -> str | None:
        """The host of a slot's workers; None if that is decided when one starts."""
        ...

    def hosts(self, job: JobSpec) -> Collection[str]:
        """The hosts on which the job's workers can run, as far as is known."""
        ...

    async def warm_up(self) -> None:
        """Prepare for the next job, after one has ended."""
        ...

    async def close(self) -> None:
        """End the pool's remaining workers."""
        ...


def read_pool(name: str, path: Path) -> PoolSpec:
    """Read a pool from a file of SkyPilot's keys. Raises SettingsError."""
    return _read_pool(name, path)[0]


def _read_pool(name: str, path: Path) -> tuple[PoolSpec, Mapping[str, Any]]:
    """A pool and the contents of its file."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text())
        return replace(parse_pool(name, data), file=path), data
    except (OSError, yaml.YAMLError, UserError) as error:
        raise SettingsError(f"the pool {name!r} in {path}: {error}") from None


def skypilot_task(name: str, path: Path, machines: int | None, envs: Mapping[str, str]) -> dict[str, object]:
    """A SkyPilot task, as it is in YAML, for machines that run the jobs of the rented pool in a file, by default as
    many as that says. They reach the server by its database and storage. `envs` are more settings. Raises
    SettingsError.
    """
    spec, data = _read_pool(name, path)
    if not spec.rented:
        raise SettingsError(
            f"resources.infra is {spec.infra!r}; it must be SkyPilot's, such as aws/us-east-1 or kubernetes/CONTEXT"
        )
    resources = {key: value for key, value in data["resources"].items() if key not in ("infra", *PLACE_KEYS)}
    machine_pool = {
        "pool": {"workers": spec.workers},
        "resources": {k: v for k, v in resources.items() if k == "accelerators"},
    }
    default_envs = {
        "DATA_DIR": "~/tinsmith",
        "BATCH_WORKERS": "0",
        "BATCH_POOLS": json.dumps([f"{spec.name}=~/pool.yaml"]),
    }
    install = "python3 -m venv ~/venv\n~/venv/bin/pip install --constraint constraints.txt '.[batch,postgres]'\n"
    serve = "exec ~/venv/bin/tinsmith serve --role batch-worker\n"
    return {
        "name": f"tinsmith-{spec.name}",
        "num_nodes": machines or spec.machines,
        "resources": {"infra": spec.infra, **resources},
        "workdir": data.get("workdir", "."),
        "envs": {f"TINSMITH_{name}": value for name, value in {**default_envs, **envs}.items()},
        "secrets": {"TINSMITH_DATABASE_URL": None, "TINSMITH_SIGNING_SECRET": None},
        "setup": install + spec.setup,
        "run": f"echo {shlex.quote(json.dumps(machine_pool))} > ~/pool.yaml\n" + serve,
    }


def parse_pool(name: str, data: object) -> PoolSpec:
    """Build a pool from SkyPilot's keys. Raises UserError that names the key. The keys for scaling by queue length are
    accepted without effect, since a pool starts a worker for the first batch and ends it after the last one, and so is
    `run`, as in SkyPilot's pools."""
    if not isinstance(data, Mapping) or not isinstance(data.get("pool"), Mapping):
        raise UserError("pool is missing; give pool.workers")
    if unknown := sorted(set(data) - {"name", "num_nodes", "pool", "resources", "run", "setup", "workdir"}):
        keys = "name, num_nodes, pool, resources, run, setup and workdir"
        raise UserError(f"{unknown} is not supported; the keys are {keys}")
    pool: Mapping[str, Any] = data["pool"]
    if unknown := sorted(set(pool) - POOL_KEYS):
        raise UserError(f"pool has {unknown}, which is not supported; its keys are {sorted(POOL_KEYS)}")
    resources = data.get("resources") or {}
    if not isinstance(resources, Mapping):
        raise UserError(f"resources is {resources!r}; it must be an object")
    infra = _infra(resources)
    if infra in INFRA and (unknown := sorted(set(resources) - {"accelerators", "infra", "cpus", "use_spot"})):
        raise UserError(
            f"resources has {unknown}, which only machines of SkyPilot's have; the keys for workers on this machine or "
            "Ray are accelerators, infra, cpus and use_spot"
        )
    if "use_spot" in resources and (infra in INFRA or not isinstance(resources["use_spot"], bool)):
        raise UserError(f"resources.use_spot is {resources['use_spot']!r}; it is true or false, with SkyPilot's infra")
    cpus = _cpus(resources.get("cpus", 1.0))
    if infra == LOCAL and cpus > (os.cpu_count() or 1):
        raise UserError(f"resources.cpus is {resources['cpus']!r}, and this machine has {os.cpu_count()} CPUs")
    setup = data.get("setup") or ""
    if not isinstance(setup, str):
        raise UserError(f"setup is {setup!r}; it must be a shell command")
    managed = pool.get("managed", False)
    if managed not in (False, True) or (managed and infra in INFRA):
        raise UserError(f"pool.managed is {managed!r}; it is true or false, and true only with an infra of SkyPilot's")
    if managed and not isinstance(data.get("workdir"), str):
        raise UserError("a managed pool needs workdir: a directory with Tinsmith's source, for its machines")
    workers = pool.get("max_workers", pool.get("workers"))
    devices = _devices(resources.get("accelerators"))
    machines = _count("num_nodes", data.get("num_nodes", 1))
    if machines < 1 or (machines > 1 and infra in INFRA):
        raise UserError(f"num_nodes is {machines}; it must be 1 or more, and more than 1 only with SkyPilot's infra")
    return PoolSpec(name, _count("workers", workers), devices, setup, infra, cpus, managed, machines)


def _infra(resources: Mapping[str, Any]) -> str:
    """Where workers run: `infra`, or its older form of `cloud`, `region` and `zone`."""
    parts = [resources.get(key) for key in PLACE_KEYS]
    if not any(parts):
        infra = resources.get("infra", LOCAL)
    elif "infra" in resources or not parts[0]:
        raise UserError(f"resources has {sorted({*resources} & {'infra', *PLACE_KEYS})}; give infra alone, or cloud")
    else:
        infra = "/".join(str(part or "*") for part in parts[: 3 if parts[2] else 2 if parts[1] else 1])
    cloud = infra.lower().split("/")[0] if isinstance(infra, str) else ""
    if infra not in INFRA and not CLOUDS.fullmatch(cloud):
        raise UserError(
            f"resources.infra is {infra!r}; it must be one of {list(INFRA)}, or one of SkyPilot's, such as "
            "aws/us-east-1, kubernetes/CONTEXT or ssh/POOL"
        )
    return infra


def _cpus(value: object) -> float:
    """A number of CPUs, or SkyPilot's `4+`: at least 4."""
    text = value.removesuffix("+") if isinstance(value, str) else value
    try:
        cpus = -1.0 if isinstance(value, bool) else float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        cpus = -1.0
    if not 0 <= cpus < math.inf:
        raise UserError(f"resources.cpus is {value!r}; it must be a number, 0 or more, or such a number with a plus")
    return cpus


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SLOTS:
        raise UserError(f"{name} is {value!r}; it must be a whole number from 0 to {MAX_SLOTS}")
    return value


def _devices(accelerators: object) -> int:
    """The count in `H100`, `H100:2` or `{H100: 2}`; the kind is not checked."""
    if accelerators is None:
        return 0
    if isinstance(accelerators, Mapping) and len(accelerators) == 1:
        return _count("resources.accelerators", next(iter(accelerators.values())))
    if isinstance(accelerators, str):
        _, colon, count = accelerators.partition(":")
        if not colon:
            return 1
        if count.isdecimal():
            return _count("resources.accelerators", int(count))
    raise UserError(f"resources.accelerators is {accelerators!r}; use NAME:COUNT")
