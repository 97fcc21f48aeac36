"""Runs code written for `sky.batch` after one changed import: `from tinsmith.batch import sky` for `import sky`.

The names are those of `tinsmith.batch`; docs/batch.md lists the differences. Unless SkyPilot is installed, importing
this module registers it as `sky` in this process, so a function that imports `sky.batch` itself runs unchanged. The
function's payload makes workers do the same (`functions.py`). An installed SkyPilot is never replaced.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import NoReturn

from tinsmith import batch
from tinsmith.batch import Client, load, remote_function, save_results
from tinsmith.errors import NotFoundError, NotSupportedError, UserError

__all__ = [
    "batch", "get_batch_states", "is_batch_job", "load", "remote_function", "reset_dispatched_batches", "save_results",
    "set_batch_status",
]  # fmt: skip


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


def reset_dispatched_batches(*_: object, **__: object) -> NoReturn:
    """Raises NotSupportedError."""
    raise NotSupportedError(REFUSAL)


REFUSAL = (
    "only the server that runs a bulk job changes its batches, so that each result is written once; it takes back what "
    "a dead worker had by itself. To run batches again, cancel the job and resume it: batch.Job(ID).resume()"
)


if "sky" not in sys.modules and importlib.util.find_spec("sky") is None:
    sys.modules["sky"] = sys.modules[__name__]
    sys.modules["sky.batch"] = batch
