"""The declaration of a pool of workers and the interface of its implementations.

A pool has slots; a slot runs the batches of one job at a time. In an exclusive pool, whose workers hold resources
(accelerators, or a place on a cluster), only workers of the job that has the slot may exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tinsmith.errors import SettingsError, UserError

LOCAL, RAY = "local", "ray"
INFRA = (LOCAL, RAY)
MAX_SLOTS = 1024
POOL_KEYS = {
    "workers",
    "min_workers",
    "max_workers",
    "queue_length_threshold",
    "upscale_delay_seconds",
    "downscale_delay_seconds",
}


class WorkerStartError(Exception):
    """The process of a worker did not start to listen."""


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

    @property
    def exclusive(self) -> bool:
        return self.devices_per_worker > 0 or self.infra == RAY

    def resized(self, workers: object) -> PoolSpec:
        return replace(self, workers=_count("workers", workers))


class Started(Protocol):
    """A worker, and how to reach it."""

    address: str
    """A URL, or the path of a socket."""
    token: str
    shares_files: bool
    """Whether it sees the files of this machine."""

    @property
    def where(self) -> str:
        """A process, or a node and a process, to be shown to users."""
        ...

    @property
    def gone(self) -> bool: ...

    async def wait(self) -> None:
        """Wait until it is gone."""
        ...

    async def kill(self) -> None:
        """End the worker and its children, and delete its files."""
        ...


class Pool(Protocol):
    """Starts the workers of one pool."""

    kind: str
    spec: PoolSpec

    async def start(self, worker_id: str, slot: int | None) -> Started:
        """Start a worker for a slot, or, with None, for an operation beside the slots. Raises WorkerStartError."""
        ...

    async def close(self) -> None:
        """End what is left of the pool's workers."""
        ...


def pool_from_yaml(name: str, path: Path) -> PoolSpec:
    """A pool from SkyPilot's keys. Raises SettingsError."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text())
        return pool_from(name, data)
    except (OSError, yaml.YAMLError, UserError) as error:
        raise SettingsError(f"the pool {name!r} in {path}: {error}") from None


def pool_from(name: str, data: object) -> PoolSpec:
    """Raises UserError that names the key. The keys for scaling by queue length are accepted without effect, since a
    pool starts a worker for the first batch and ends it after the last one."""
    if not isinstance(data, Mapping) or not isinstance(data.get("pool"), Mapping):
        raise UserError("it has no 'pool' with 'workers'")
    if unknown := sorted(set(data) - {"name", "pool", "resources", "setup"}):
        raise UserError(f"it has {unknown}, which is not supported; there are name, pool, resources and setup")
    pool: Mapping[str, Any] = data["pool"]
    if unknown := sorted(set(pool) - POOL_KEYS):
        raise UserError(f"pool has {unknown}, which is not supported; it has {sorted(POOL_KEYS)}")
    resources = data.get("resources") or {}
    if not isinstance(resources, Mapping) or set(resources) - {"accelerators", "infra", "cpus"}:
        raise UserError(f"resources is {resources!r}; it has accelerators, infra and cpus")
    infra = resources.get("infra", LOCAL)
    if infra not in INFRA:
        raise UserError(f"resources.infra is {infra!r}; it must be one of {list(INFRA)}")
    cpus = resources.get("cpus", 1.0)
    if isinstance(cpus, bool) or not isinstance(cpus, int | float) or cpus < 0:
        raise UserError(f"resources.cpus is {cpus!r}; it must be a number of at least 0")
    if "cpus" in resources and infra == LOCAL:
        raise UserError("resources.cpus is for pools with 'infra: ray'; workers on this machine share all of its CPUs")
    setup = data.get("setup") or ""
    if not isinstance(setup, str):
        raise UserError(f"setup is {setup!r}; it must be a shell command")
    workers = pool.get("max_workers", pool.get("workers"))
    devices = _devices(resources.get("accelerators"))
    return PoolSpec(name, _count("workers", workers), devices, setup, infra, float(cpus))


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
