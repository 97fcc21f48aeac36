"""Runs code written for `sky.batch` after one changed import: `from tinsmith.batch import sky` for `import sky`.

The names are those of `tinsmith.batch`; docs/howto/from-sky-batch.md lists the differences. Unless SkyPilot is
installed, importing this module registers it as `sky` in this process, with the modules of `MODULES`, so that other
imports of the same file (`from sky.batch import utils`) and functions that import `sky.batch` themselves run unchanged.
The function's payload makes workers do the same (`functions.py`). An installed SkyPilot is never replaced.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import NoReturn

from tinsmith import batch
from tinsmith.batch import Client, Dataset, load, remote_function, save_results
from tinsmith.batch.client import sky_pools, sky_storage
from tinsmith.batch.client.sky_pools import Task, stream_and_get
from tinsmith.errors import NotFoundError, NotSupportedError, UserError

__all__ = [
    "Task", "batch", "dataset", "exceptions", "get", "get_batch_states", "is_batch_job", "jobs", "load",
    "remote_function", "reset_dispatched_batches", "save_results", "serve", "set_batch_status", "stream_and_get",
    "utils",
]  # fmt: skip

dataset = Dataset
get = stream_and_get
jobs = exceptions = sky_pools
serve, utils = ModuleType("sky.serve"), ModuleType("sky.utils")

MODULES = {
    "batch": batch,
    "batch.constants": sky_storage,
    "batch.io_formats": batch,
    "batch.utils": sky_storage,
    "exceptions": exceptions,
    "jobs": jobs,
    "serve": serve,
    "serve.serve_utils": sky_pools,
    "utils": utils,
    "utils.registry": batch,
}
"""What each module of SkyPilot is here."""


def is_batch_job(job_id: int) -> bool:
    """Whether the server of the environment has a bulk job with this id."""
    try:
        Client().status(job_id)
    except (NotFoundError, UserError):
        return False
    return True


def get_batch_states(job_id: int) -> list[dict[str, object]]:
    """The batches of a job with their status, worker and number of tries."""
    return batch.Job(job_id).batches()


def set_batch_status(*_: object, **__: object) -> NoReturn:
    """Raises NotSupportedError."""
    raise NotSupportedError(REFUSAL)


reset_dispatched_batches = set_batch_status
REFUSAL = (
    "only the server that runs a bulk job changes its batches, so that each result is written once; it takes back what "
    "a dead worker had by itself. To run batches again, cancel the job and resume it: batch.Job(ID).resume()"
)


def _register() -> None:
    for name, module in MODULES.items():
        parent, dot, attribute = name.rpartition(".")
        if dot:
            setattr(MODULES[parent], attribute, module)
    if "sky" not in sys.modules and importlib.util.find_spec("sky") is None:
        sys.modules["sky"] = sys.modules[__name__]
        sys.modules.update({f"sky.{name}": module for name, module in MODULES.items()})


_register()
