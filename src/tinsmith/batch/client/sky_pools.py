"""The names around a pool that Sky Batch's examples use: `sky.Task`, `sky.jobs`, `sky.serve.serve_utils`,
`sky.stream_and_get` and `sky.exceptions`.

A pool is a setting of the server (`TINSMITH_BATCH_POOLS`), so that no client chooses what runs there: `pool_status`
finds it, and `pool_apply` gives it the size of a file. A request has been answered when it is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinsmith.batch.client.http import Client
from tinsmith.errors import NotSupportedError, UserError
from tinsmith.runtime import notebook

DEFAULT_UPDATE_MODE = "rolling"


class ClusterNotUpError(Exception):
    """SkyPilot's controller of pools is not running; never raised here, where the server has the pools."""


@dataclass
class Task:
    """A pool's file."""

    name: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    file: str | None = None

    @classmethod
    def from_yaml(cls, yaml_path: str) -> Task:
        """Raises UserError for contents that no pool of this server can have."""
        import yaml

        from tinsmith.batch.pools.specs import parse_pool

        path = Path(yaml_path).expanduser().resolve()
        config = yaml.safe_load(path.read_text())
        parse_pool(path.stem, config)
        return cls(config.get("name"), config, str(path))

    @property
    def workers(self) -> int:
        from tinsmith.batch.pools.specs import parse_pool

        return parse_pool(self.name or "pool", self.config).workers


@dataclass(frozen=True)
class PoolRequest:
    """A request to the server, with its result."""

    result: Any

    def _repr_html_(self) -> str:
        if isinstance(self.result, list):
            return notebook.table("Pools", self.result)
        return notebook.card("Pool", {"Name": self.result})


def pool_status(pool_names: str | Sequence[str] | None = None) -> PoolRequest:
    """The server's pools of these names, or all, each with `name`, `workers` and the running `jobs`."""
    names = [pool_names] if isinstance(pool_names, str) else pool_names
    return PoolRequest([pool for pool in Client().pools() if names is None or pool["name"] in names])


def pool_apply(
    task: Task | str, pool_name: str | None = None, mode: str = DEFAULT_UPDATE_MODE, workers: int | None = None
) -> PoolRequest:
    """Give a pool of the server the number of workers of a file, or `workers`; its result is the pool's name. Raises
    NotSupportedError for a pool that the server does not have. `mode` has no effect: workers end with their jobs.
    """
    del mode
    task = Task.from_yaml(task) if isinstance(task, str) else task
    if not (name := pool_name or task.name):
        raise UserError("the pool has no name: give pool_name, or name in its file")
    client = Client()
    pools = {pool["name"]: pool for pool in client.pools()}
    if name not in pools:
        setting = f"TINSMITH_BATCH_POOLS='[\"{name}={task.file or 'FILE.yaml'}\"]'"
        raise NotSupportedError(
            f"the server has no pool {name!r}, and a client cannot add one; start the server with {setting}, or map "
            f"with one of its pools: {', '.join(pools)}"
        )
    size = task.workers if workers is None else workers
    if pools[name]["workers"] != size:
        client.resize_pool(name, size)
    return PoolRequest(name)


def stream_and_get(request: PoolRequest) -> Any:  # noqa: ANN401  as the request
    """The result of a request."""
    return request.result
