"""Followers of a bulk job read the database when the job changes, and rarely otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

import tinsmith.api.routes.batch as routes
import tinsmith.server.process as serving
from support.databases import database_url
from support.payloads import serialize_function
from tinsmith.api.services import Services
from tinsmith.batch.coordinator.rows import JobRecord
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.types import JobSpec
from tinsmith.db.wakeups import job_line
from tinsmith.settings import Settings

PATIENCE_S = 30.0
IDLE_S = 1.0


def nothing() -> None: ...


def job(services: Services, directory: Path) -> int:
    spec = JobSpec(
        batch_serialized_fn=serialize_function(nothing, kwargs=None, kind="loop"),
        batch_input_format={"format": "items", "path": "items", "items": [{"a": 1}]},
        batch_output_formats=[{"format": "json", "path": str(directory / "out.jsonl")}],
        batch_size=1,
    )
    return services.batch_jobs.create("local", spec)


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[Services]:
    """A server that answers clients, without engines and without a coordinator of bulk jobs."""
    (directory / "data").mkdir()
    settings = Settings(
        data_dir=directory / "data", port=0, backend="fake", role="server", database_url=database_url(directory)
    )
    server = serving.build(settings)
    async with server.app.router.lifespan_context(server.app):
        yield server.app.state.services
    if server.listener is not None:
        server.listener.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the jobs that are read, in order."""
    job_ids: list[int] = []
    find = BatchJobs.find

    def record_find(self: BatchJobs, tenant_id: str, job_id: int) -> JobRecord:
        job_ids.append(job_id)
        return find(self, tenant_id, job_id)

    monkeypatch.setattr(BatchJobs, "find", record_find)
    return job_ids


async def status(stream: AsyncIterator[bytes]) -> str:
    async with asyncio.timeout(PATIENCE_S):
        event = await anext(stream)
    return orjson.loads(event.partition(b"data: ")[2])["status"]


def test_a_follower_reads_when_the_job_changes_and_not_while_it_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[int]
) -> None:
    monkeypatch.setattr(routes, "SAFETY_POLL_S", 3600.0)  # every change comes as a wake-up

    async def main() -> None:
        async with running(tmp_path) as services:
            jobs = services.batch_jobs
            job_id = await asyncio.to_thread(job, services, tmp_path)
            other_id = await asyncio.to_thread(job, services, tmp_path)
            stream = routes._events(services, "local", job_id)
            assert await status(stream) == "PENDING"
            following = asyncio.ensure_future(status(stream))
            await asyncio.sleep(IDLE_S)
            await asyncio.to_thread(jobs.cancel, "local", other_id)  # not the one that is followed
            await asyncio.sleep(IDLE_S)
            assert reads.count(job_id) == 1
            await asyncio.to_thread(jobs.acquire_batch_coordinator, job_id, "token", "here", 60.0)
            await asyncio.to_thread(jobs.set_status, job_id, "token", "RUNNING")
            assert await following == "RUNNING"
            assert reads.count(job_id) == 2
            await asyncio.to_thread(jobs.cancel, "local", job_id)  # which reads it twice itself
            assert await status(stream) == "CANCELLING"
            await asyncio.to_thread(jobs.set_status, job_id, "token", "CANCELLED")
            assert await status(stream) == "CANCELLED"
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            assert reads.count(job_id) == 6

    asyncio.run(main())


def test_a_job_that_changes_all_the_time_is_not_read_for_every_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[int]
) -> None:
    monkeypatch.setattr(routes, "SAFETY_POLL_S", 3600.0)

    async def main() -> None:
        async with running(tmp_path) as services:
            jobs = services.batch_jobs
            job_id = await asyncio.to_thread(job, services, tmp_path)
            await asyncio.to_thread(jobs.acquire_batch_coordinator, job_id, "token", "here", 60.0)
            stream = routes._events(services, "local", job_id)
            await status(stream)
            following = asyncio.ensure_future(status(stream))
            await asyncio.sleep(0)
            for _ in range(200):
                services.waiters.wake([job_line(job_id)])
                await asyncio.sleep(0)
            await asyncio.sleep(2 * routes.EVENTS_PAUSE_S)
            assert reads.count(job_id) <= 3
            following.cancel()

    asyncio.run(main())


def test_a_wake_up_that_is_lost_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[int]
) -> None:
    monkeypatch.setattr(routes, "SAFETY_POLL_S", 0.01)
    monkeypatch.setattr(BatchJobs, "on_change", lambda *_args: None)

    async def main() -> None:
        async with running(tmp_path) as services:
            job_id = await asyncio.to_thread(job, services, tmp_path)
            stream = routes._events(services, "local", job_id)
            assert await status(stream) == "PENDING"
            await asyncio.to_thread(services.batch_jobs.cancel, "local", job_id)
            assert await status(stream) == "CANCELLING"

    asyncio.run(main())


def test_followers_end_with_the_server(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as services:
            job_id = await asyncio.to_thread(job, services, tmp_path)
            stream = routes._events(services, "local", job_id)
            assert await status(stream) == "PENDING"
            ending = asyncio.ensure_future(anext(stream, None))
            await asyncio.sleep(0)
            services.waiters.close()
            async with asyncio.timeout(PATIENCE_S):
                assert await ending is None

    asyncio.run(main())
