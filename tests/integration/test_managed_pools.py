"""Managed pools: a machine for each bulk job, by a stand-in for SkyPilot whose machines are real batch workers with a
real Postgres and an S3 API.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import skypilot
from support.buckets import Bucket, bucket
from support.coordinating import submit
from support.databases import POSTGRES, fresh_url
from tinsmith import batch
from tinsmith.batch.coordinator.coordinator import Coordinator
from tinsmith.batch.coordinator.state import BatchJobs, JobRecord
from tinsmith.batch.pools import managed
from tinsmith.batch.pools.specs import parse_pool
from tinsmith.db.database import Database
from tinsmith.errors import SettingsError, UserError
from tinsmith.settings import Settings

PATIENCE_S = 150.0
POOL = "pool: {workers: 1, managed: true}\nresources: {infra: aws/us-east-1, use_spot: true}\nworkdir: /src\n"
SECRET = "0123456789abcdef0123456789abcdef"

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]


class Place:
    """A server's coordinator, the jobs, and the stand-in."""

    def __init__(self, tmp_path: Path, held: Bucket, sky: Any) -> None:  # noqa: ANN401
        (tmp_path / "gpu.yaml").write_text(POOL)
        self.held, self.sky, self._path = held, sky, tmp_path
        url = fresh_url(tmp_path, POSTGRES)
        self.database = Database(url)
        self.jobs = BatchJobs(self.database)
        self.settings = Settings.model_validate(
            {
                "data_dir": tmp_path / "server",
                "database_url": url,
                "storage_dir": f"{held.url}/tinsmith",
                "signing_secret": SECRET,
                "batch_pools": (f"gpu={tmp_path / 'gpu.yaml'}",),
            }
        )

    def submit(self, function: Callable[..., object], rows: int = 20) -> int:
        output = {"format": "json", "path": f"{self.held.url}/out.jsonl"}
        options: dict[str, Any] = {"rows": rows, "batch_output_formats": [output]}
        return submit(self.jobs, self._path, function, batch_pool_name="gpu", **options)

    def job(self, job_id: int) -> JobRecord:
        return self.jobs.find("local", job_id)

    def run(self, steps: Callable[[], Any]) -> None:
        async def go() -> None:
            coordinator = Coordinator(self.settings, self.jobs, "server")
            coordinator.start()
            try:
                await steps()
            finally:
                await coordinator.stop()

        asyncio.run(go())

    async def until(self, reached: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            if time.monotonic() > deadline:
                logs = [path.read_text()[-3000:] for path in self._path.glob("machines/*/log")]
                raise AssertionError((self.sky.jobs.records, *logs))
            await asyncio.sleep(0.05)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    sky = skypilot.module(tmp_path / "machines")
    monkeypatch.setitem(sys.modules, "sky", sky)
    monkeypatch.setattr(managed, "RECONCILE_S", 0.1)
    with bucket() as held:
        made = Place(tmp_path, held, sky)
        try:
            yield made
        finally:
            sky.jobs.close()
            made.database.close()


@batch.remote_function
def shout() -> None:
    import time

    from tinsmith import batch

    for rows in batch.load():
        time.sleep(0.3)
        batch.save_results([{"loud": row["text"].upper()} for row in rows])


def test_a_job_has_a_machine_that_ends_with_it(place: Place) -> None:
    async def steps() -> None:
        job_id = place.submit(shout, rows=4)
        await place.until(lambda: place.job(job_id).status == "SUCCEEDED")
        await place.until(lambda: place.sky.jobs.records[0].status.is_terminal())

    place.run(steps)
    (record,) = place.sky.jobs.records
    assert record.status.value == "SUCCEEDED" and len(record.machines) == 1
    assert record.task.config["workdir"] == "/src" and record.task.config["resources"] == {
        "infra": "aws/us-east-1",
        "use_spot": True,
    }
    assert SECRET not in json.dumps(record.task.config)
    assert len(place.held.get("out.jsonl").splitlines()) == 4


def test_a_lost_machine_is_replaced_and_no_row_fails(place: Place) -> None:
    async def steps() -> None:
        job_id = place.submit(shout)
        await place.until(lambda: place.job(job_id).completed_batches >= 2)
        place.sky.jobs.records[0].lose()
        await place.until(lambda: place.job(job_id).status == "SUCCEEDED")
        found = place.job(job_id)
        assert (found.rows_ok, found.rows_failed) == (20, 0)
        await place.until(lambda: place.sky.jobs.records[0].status.is_terminal())

    place.run(steps)
    (record,) = place.sky.jobs.records
    assert record.status.value == "SUCCEEDED" and len(record.machines) == 2
    found = [json.loads(line)["loud"] for line in place.held.get("out.jsonl").splitlines()]
    assert found == [f"T{index}" for index in range(20)]


def test_a_cancelled_job_ends_its_managed_job(place: Place) -> None:
    """One that waits for its machine, and one that runs."""

    async def steps() -> None:
        place.sky.jobs.capacity = False
        waiting = place.submit(shout)
        await place.until(lambda: place.sky.jobs.records)
        place.jobs.cancel("local", waiting)
        await place.until(lambda: place.sky.jobs.records[0].status.value == "CANCELLED")
        assert place.job(waiting).status == "CANCELLED"
        place.sky.jobs.capacity = True
        running = place.submit(shout, rows=2000)
        await place.until(lambda: place.job(running).completed_batches)
        place.jobs.cancel("local", running)
        await place.until(lambda: place.job(running).status == "CANCELLED")
        await place.until(lambda: place.sky.jobs.records[1].status.is_terminal())

    place.run(steps)
    assert len(place.sky.jobs.records) == 2


def test_what_ends_a_managed_job_ends_its_job(place: Place) -> None:
    async def steps() -> None:
        place.sky.jobs.capacity = False
        cancelled = place.submit(shout)
        await place.until(lambda: place.sky.jobs.records)
        place.sky.jobs.cancel([1])
        await place.until(lambda: place.job(cancelled).status == "CANCELLED")
        failed = place.submit(shout)
        await place.until(lambda: len(place.sky.jobs.records) == 2)
        record = place.sky.jobs.records[1]
        record.failure_reason = "no H100 in aws/us-east-1"
        record.status = skypilot.ManagedJobStatus.FAILED_NO_RESOURCE
        await place.until(lambda: place.job(failed).status == "FAILED")
        assert place.job(failed).error == (
            "SkyPilot's managed job 2 ended FAILED_NO_RESOURCE: no H100 in aws/us-east-1; see `sky jobs logs 2`"
        )

    place.run(steps)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"database_url": ""}, "TINSMITH_DATABASE_URL"),
        ({"storage_dir": ""}, "TINSMITH_STORAGE_DIR"),
        ({"signing_secret": ""}, "TINSMITH_SIGNING_SECRET"),
    ],
)
def test_a_server_that_machines_cannot_reach_is_refused(place: Place, changed: dict[str, str], named: str) -> None:
    settings = Settings.model_validate({**place.settings.model_dump(), "signing_secret": SECRET, **changed})
    with pytest.raises(SettingsError, match=named):
        Coordinator(settings, place.jobs, "server")


def test_a_managed_pool_needs_skypilots_infra_and_a_source(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"pool": {"workers": 1, "managed": True}}
    with pytest.raises(UserError, match="true only with an infra of SkyPilot's"):
        parse_pool("p", given)
    with pytest.raises(UserError, match="needs workdir"):
        parse_pool("p", given | {"resources": {"infra": "aws"}})
    with pytest.raises(UserError, match="use_spot is True"):
        parse_pool("p", {"pool": {"workers": 1}, "resources": {"use_spot": True}})
    monkeypatch.setitem(sys.modules, "sky", None)
    with pytest.raises(SettingsError, match="pip install skypilot"):
        Coordinator(place.settings, place.jobs, "server")
