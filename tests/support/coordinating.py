"""A coordinator of bulk jobs without the rest of a server, in this process or in a separate one that can be killed.

`python coordinating.py` reads one line of JSON from standard input (`Place`, and a crash point) and runs until the
job is over and its parts are deleted.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tinsmith.batch.client.functions import describe_function
from tinsmith.batch.coordinator.coordinator import Coordinator
from tinsmith.batch.coordinator.state import TERMINAL, BatchJobs
from tinsmith.batch.types import JobSpec, Limits, pack_payload
from tinsmith.db.factory import open_database
from tinsmith.db.schema import BATCH_JOBS
from tinsmith.runtime.failpoints import arm
from tinsmith.settings import Settings

PATIENCE_S = 90.0  # on a slow machine
LIMITS = Limits(backoff_s=0.01, grace_s=1.0)


@dataclass(frozen=True, slots=True)
class CoordinatorSetup:
    """A database with one job, and its coordinator; `linger_s` is how long the coordinator runs after the job has
    ended."""

    database_url: str
    data_dir: str
    job_id: int
    holder: str = "here"
    linger_s: float = 0.0


def text_rows(count: int) -> list[dict[str, str]]:
    return [{"text": f"t{index}"} for index in range(count)]


def submit(
    jobs: BatchJobs,
    directory: Path,
    function: Callable[..., object],
    limits: Limits = LIMITS,
    **options: Any,  # noqa: ANN401
) -> int:
    """Submit twenty rows in ten batches, to `out.jsonl`, unless `options` say otherwise."""
    kwargs = options.pop("fn_kwargs", None)
    rows = options.pop("rows", 20)
    defaults: dict[str, Any] = {
        "batch_input_format": {"format": "items", "path": "items", "items": text_rows(rows)},
        "batch_output_formats": [{"format": "json", "path": str(directory / "out.jsonl")}],
        "batch_size": 2,
        "limits": limits,
    }
    spec = JobSpec(
        batch_serialized_fn=pack_payload(describe_function(function, kwargs=kwargs)), **{**defaults, **options}
    )
    return jobs.create("local", spec)


def is_over(jobs: BatchJobs, job_id: int) -> bool:
    """Whether the job has ended and its parts are deleted."""
    query = sa.select(BATCH_JOBS.c.status, BATCH_JOBS.c.cleaned).where(BATCH_JOBS.c.job_id == job_id)
    with jobs._db.read() as connection:
        status, cleaned = connection.execute(query).one()
    return status in TERMINAL and (cleaned or status != "SUCCEEDED")


async def coordinate(setup: CoordinatorSetup, jobs: BatchJobs, workers: int = 1) -> None:
    settings = Settings(data_dir=Path(setup.data_dir), backend="fake", batch_workers=workers)
    coordinator = Coordinator(settings, jobs, setup.holder)
    coordinator.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not is_over(jobs, setup.job_id):
            assert time.monotonic() < deadline, jobs.find("local", setup.job_id)
            await asyncio.sleep(0.05)
        await asyncio.sleep(setup.linger_s)
    finally:
        await coordinator.stop()


def start_process(setup: CoordinatorSetup, failpoints: str = "") -> subprocess.Popen[bytes]:
    with (Path(setup.data_dir) / f"{setup.holder}.log").open("ab") as log:
        process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=log, stderr=log)
    assert process.stdin is not None
    process.stdin.write(json.dumps({**asdict(setup), "failpoints": failpoints}).encode() + b"\n")
    process.stdin.close()
    return process


def main() -> None:
    arguments = json.loads(sys.stdin.readline())
    arm(arguments.pop("failpoints"), "server", Path(arguments["data_dir"]), list)
    setup = CoordinatorSetup(**arguments)
    database = open_database(setup.database_url)
    asyncio.run(coordinate(setup, BatchJobs(database)))
    database.close()


if __name__ == "__main__":
    main()
