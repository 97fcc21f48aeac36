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
from tinsmith.batch.coordinator.rows import JobRecord
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.pools import managed
from tinsmith.batch.pools.specs import parse_pool
from tinsmith.db.factory import open_database
from tinsmith.errors import SettingsError, UserError
from tinsmith.settings import Settings

PATIENCE_S = 150.0
POOL = "pool: {workers: 1, managed: true}\nresources: {infra: aws/us-east-1, use_spot: true}\nworkdir: /src\n"
SECRET = "0123456789abcdef0123456789abcdef"

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]


class PoolSetup:
    """A server's coordinator, the jobs, and the stand-in."""

    def __init__(self, tmp_path: Path, bucket_: Bucket, sky: Any) -> None:  # noqa: ANN401
        (tmp_path / "gpu.yaml").write_text(POOL)
        self.bucket, self.sky, self._path = bucket_, sky, tmp_path
        url = fresh_url(tmp_path, POSTGRES)
        self.database = open_database(url)
        self.jobs = BatchJobs(self.database)
        self.settings = Settings.model_validate(
            {
                "data_dir": tmp_path / "server",
                "database_url": url,
                "storage_dir": f"{bucket_.url}/tinsmith",
                "signing_secret": SECRET,
                "batch_pools": (f"gpu={tmp_path / 'gpu.yaml'}",),
            }
        )

    def submit(self, function: Callable[..., object], rows: int = 20) -> int:
        output = {"format": "json", "path": f"{self.bucket.url}/out.jsonl"}
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
def pool_setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolSetup]:
    sky = skypilot.module(tmp_path / "machines")
    monkeypatch.setitem(sys.modules, "sky", sky)
    monkeypatch.setattr(managed, "RECONCILE_S", 0.1)
    with bucket() as new_bucket:
        setup = PoolSetup(tmp_path, new_bucket, sky)
        try:
            yield setup
        finally:
            sky.jobs.close()
            setup.database.close()


@batch.remote_function
def shout() -> None:
    import time

    from tinsmith import batch

    for rows in batch.load():
        time.sleep(0.3)
        batch.save_results([{"loud": row["text"].upper()} for row in rows])


def test_a_job_has_a_machine_that_ends_with_it(pool_setup: PoolSetup) -> None:
    async def steps() -> None:
        job_id = pool_setup.submit(shout, rows=4)
        await pool_setup.until(lambda: pool_setup.job(job_id).status == "SUCCEEDED")
        await pool_setup.until(lambda: pool_setup.sky.jobs.records[0].status.is_terminal())

    pool_setup.run(steps)
    (record,) = pool_setup.sky.jobs.records
    assert record.status.value == "SUCCEEDED" and len(record.machines) == 1
    assert record.task.config["workdir"] == "/src" and record.task.config["resources"] == {
        "infra": "aws/us-east-1",
        "use_spot": True,
    }
    assert SECRET not in json.dumps(record.task.config)
    assert len(pool_setup.bucket.get("out.jsonl").splitlines()) == 4


def test_a_lost_machine_is_replaced_and_no_row_fails(pool_setup: PoolSetup) -> None:
    async def steps() -> None:
        job_id = pool_setup.submit(shout)
        await pool_setup.until(lambda: pool_setup.job(job_id).completed_batches >= 2)
        pool_setup.sky.jobs.records[0].lose()
        await pool_setup.until(lambda: pool_setup.job(job_id).status == "SUCCEEDED")
        job_row = pool_setup.job(job_id)
        assert (job_row.rows_ok, job_row.rows_failed) == (20, 0)
        await pool_setup.until(lambda: pool_setup.sky.jobs.records[0].status.is_terminal())

    pool_setup.run(steps)
    (record,) = pool_setup.sky.jobs.records
    assert record.status.value == "SUCCEEDED" and len(record.machines) == 2
    job_row = [json.loads(line)["loud"] for line in pool_setup.bucket.get("out.jsonl").splitlines()]
    assert job_row == [f"T{index}" for index in range(20)]


def test_a_cancelled_job_ends_its_managed_job(pool_setup: PoolSetup) -> None:
    """One that waits for its machine, and one that runs."""

    async def steps() -> None:
        pool_setup.sky.jobs.capacity = False
        waiting = pool_setup.submit(shout)
        await pool_setup.until(lambda: pool_setup.sky.jobs.records)
        pool_setup.jobs.cancel("local", waiting)
        await pool_setup.until(lambda: pool_setup.sky.jobs.records[0].status.value == "CANCELLED")
        assert pool_setup.job(waiting).status == "CANCELLED"
        pool_setup.sky.jobs.capacity = True
        running = pool_setup.submit(shout, rows=2000)
        await pool_setup.until(lambda: pool_setup.job(running).completed_batches)
        pool_setup.jobs.cancel("local", running)
        await pool_setup.until(lambda: pool_setup.job(running).status == "CANCELLED")
        await pool_setup.until(lambda: pool_setup.sky.jobs.records[1].status.is_terminal())

    pool_setup.run(steps)
    assert len(pool_setup.sky.jobs.records) == 2


def test_what_ends_a_managed_job_ends_its_job(pool_setup: PoolSetup) -> None:
    async def steps() -> None:
        pool_setup.sky.jobs.capacity = False
        cancelled = pool_setup.submit(shout)
        await pool_setup.until(lambda: pool_setup.sky.jobs.records)
        pool_setup.sky.jobs.cancel([1])
        await pool_setup.until(lambda: pool_setup.job(cancelled).status == "CANCELLED")
        failed = pool_setup.submit(shout)
        await pool_setup.until(lambda: len(pool_setup.sky.jobs.records) == 2)
        record = pool_setup.sky.jobs.records[1]
        record.failure_reason = "no H100 in aws/us-east-1"
        record.status = skypilot.ManagedJobStatus.FAILED_NO_RESOURCE
        await pool_setup.until(lambda: pool_setup.job(failed).status == "FAILED")
        assert pool_setup.job(failed).error == (
            "SkyPilot's managed job 2 ended FAILED_NO_RESOURCE: no H100 in aws/us-east-1; see `sky jobs logs 2`"
        )

    pool_setup.run(steps)


@pytest.mark.parametrize(
    ("changed", "setting_name"),
    [
        ({"database_url": ""}, "TINSMITH_DATABASE_URL"),
        ({"storage_dir": ""}, "TINSMITH_STORAGE_DIR"),
        ({"signing_secret": ""}, "TINSMITH_SIGNING_SECRET"),
    ],
)
def test_a_server_that_machines_cannot_reach_is_refused(
    pool_setup: PoolSetup, changed: dict[str, str], setting_name: str
) -> None:
    settings = Settings.model_validate({**pool_setup.settings.model_dump(), "signing_secret": SECRET, **changed})
    with pytest.raises(SettingsError, match=setting_name):
        Coordinator(settings, pool_setup.jobs, "server")


def test_a_managed_pool_needs_skypilots_infra_and_a_source(
    pool_setup: PoolSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool_config: dict[str, Any] = {"pool": {"workers": 1, "managed": True}}
    with pytest.raises(UserError, match="true only with an infra of SkyPilot's"):
        parse_pool("p", pool_config)
    with pytest.raises(UserError, match="needs workdir"):
        parse_pool("p", pool_config | {"resources": {"infra": "aws"}})
    with pytest.raises(UserError, match="use_spot is True"):
        parse_pool("p", {"pool": {"workers": 1}, "resources": {"use_spot": True}})
    monkeypatch.setitem(sys.modules, "sky", None)
    with pytest.raises(SettingsError, match="pip install skypilot"):
        Coordinator(pool_setup.settings, pool_setup.jobs, "server")
