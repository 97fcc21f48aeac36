"""Background work that raises is logged, counted and restarted."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import tinsmith.server.process as serving
from support.databases import fresh_url
from tinsmith.batch.coordinator.coordinator import Coordinator
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.db.factory import open_database
from tinsmith.runtime.background import STEADY_S, Background, Backoff, start_supervised_thread
from tinsmith.settings import Settings

SOURCE = Path(serving.__file__).parents[1]

TASKS_OF_THEIR_CALLERS = {
    "runtime/background.py": "keeps them",
    "batch/coordinator/coordinator.py": "one for each job, whose end it notes",
    "batch/pools/ray.py": "a driver's answers, for as long as its process",
    "batch/pools/ray_driver.py": "one for each worker and each call, reported to the coordinator",
    "batch/coordinator/model_gateway.py": "one for each question, whose error is its answer",
    "batch/coordinator/job_run.py": "parts of one job, which ends with them",
    "batch/worker/worker.py": "the end of its children, which its owner awaits",
    "batch/worker/concurrency.py": "one for each batch, whose error is its result; others are raised",
    "cluster/on_demand.py": "one for each engine, which logs its end and settles its requests",
    "cluster/supervisor.py": "waits that their creator awaits",
    "api/routes/futures.py": "a poll's look at its connection",
    "api/event_stream.py": "a response and the look at its connection",
    "api/openai/streaming.py": "parts of one answer",
    "api/openai/generation.py": "a submission, which its creator awaits",
    "samplers/remote/connection.py": "waits that their creator awaits",
    "samplers/remote/adapters.py": "one for each load, whose error is that of the samples that wait for it",
    "samplers/remote/client.py": "one for each sample, whose error is its result; the connection is awaited",
    "server/process.py": "waits that their creator awaits",
}
"""The files that create tasks, and what notices the end of these."""


THREADS_OF_THEIR_OWNERS = {
    "runtime/background.py": "keeps them",
    "engine/__main__.py": "end the process: at a signal, and with its parent",
    "engine/snapshots.py": "the writer, whose error the engine raises",
    "cli/main.py": "prints the work of each minute",
    "cli/lines.py": "prints which base models load, as long as the server runs",
    "cli/serve_role.py": "ends the process with its shell",
    "backends/distributed/processes.py": "ends a rank with its engine",
    "backends/distributed/__main__.py": "ends a rank with its input",
    "backends/distributed/rendezvous.py": "accepts ranks; of one handshake, which is logged",
    "cluster/engine_process.py": "waits for a process",
    "cluster/ray/shell.py": "ends a process",
    "server/checkpoint_jobs.py": "reads what a job's process reports, and ends with it",
    "exchange/checkpoint_job.py": "ends a job's process with its server",
    "samplers/remote/client.py": "the client's event loop",
    "samplers/remote/process_guard.py": "ends the sampler's process with its engine",
    "batch/worker/worker.py": "watches a child; of one operation, whose error is its message",
    "batch/worker/feed.py": "of one batch, whose error is its result",
    "batch/worker/child.py": "reads what is asked, and ends the process with its parent",
    "batch/worker/mapper_process.py": "follows a child until its end",
    "batch/worker/pipeline.py": "follows a stage's process until its end, and ends with it",
}
"""The files that start threads, and their work; every other thread is a `start_supervised_thread`."""


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.001)


def test_work_that_raises_is_counted_logged_and_begun_again() -> None:
    failures: Counter[str] = Counter()
    runs: list[int] = []

    async def work() -> None:
        runs.append(1)
        if len(runs) < 4:
            raise RuntimeError("nothing expected this")
        await asyncio.Event().wait()

    async def main() -> None:
        background = Background(lambda name: failures.update([name]), first_pause_s=0.001)
        task = background.start("sweeps", work, pool="default")
        await until(lambda: len(runs) == 4)
        assert not task.done()
        await background.stop()
        assert task.cancelled()

    with capture_logs() as lines:
        asyncio.run(main())
    assert failures == {"sweeps": 3}
    errors = [line for line in lines if line["log_level"] == "error"]
    assert [(line["task"], line["pool"]) for line in errors] == [("sweeps", "default")] * 3
    assert isinstance(errors[0]["exc_info"], RuntimeError)


def test_work_that_returns_has_ended() -> None:
    async def work() -> None: ...

    async def main() -> None:
        background = Background()
        await background.start("once", work)
        await background.stop()

    asyncio.run(main())


def test_pauses_double_up_to_a_bound_and_start_again_after_steady_work() -> None:
    pauses = Backoff(first_s=0.2, longest_s=1.0)
    assert [pauses.after(0.0) for _ in range(5)] == [0.2, 0.4, 0.8, 1.0, 1.0]
    assert pauses.after(STEADY_S) == 0.2
    assert pauses.after(0.0) == 0.4


def test_a_thread_is_kept_as_a_task_is() -> None:
    failures: Counter[str] = Counter()
    runs: list[int] = []

    def work() -> None:
        runs.append(1)
        if len(runs) < 3:
            raise RuntimeError("nothing expected this")

    start_supervised_thread("lease", work, lambda _pause_s: False, lambda name: failures.update([name])).join(20)
    assert (len(runs), failures) == (3, {"lease": 2})


def test_a_thread_that_pauses_ends_when_its_work_is_over() -> None:
    def work() -> None:
        raise RuntimeError("nothing expected this")

    stop = threading.Event()
    stop.set()
    thread = start_supervised_thread("lease", work, stop.wait)
    thread.join(20)
    assert not thread.is_alive()


def test_the_coordinator_of_bulk_jobs_goes_on_after_an_error_that_nothing_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: Counter[str] = Counter()
    jobs = BatchJobs(open_database(fresh_url(tmp_path)))
    looks: list[int] = []
    acquirable_jobs = jobs.acquirable_jobs

    def once_broken(*args: Any) -> list[int]:  # noqa: ANN401
        looks.append(1)
        if len(looks) == 1:
            raise KeyError("nothing expected this")
        return acquirable_jobs(*args)

    monkeypatch.setattr(jobs, "acquirable_jobs", once_broken)

    async def main() -> None:
        background = Background(lambda name: failures.update([name]), first_pause_s=0.001)
        coordinator = Coordinator(Settings(data_dir=tmp_path), jobs, "here")
        coordinator.start(background)
        await until(lambda: len(looks) >= 2)
        await coordinator.stop()

    asyncio.run(main())
    assert failures == {"batch_coordinator": 1}
    jobs._db.close()


@pytest.mark.parametrize("name", ["_poll_slowly", "janitor", "reconciler"])
def test_a_server_goes_on_sweeping_and_looking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each of a server's loops fails once, at its first step, with an unexpected error."""
    from tinsmith.batch.openai.reconciler import Reconciler
    from tinsmith.server.janitor import Janitor

    steps: list[int] = []

    def broken_once() -> None:
        steps.append(1)
        if len(steps) == 1:
            raise KeyError("nothing expected this")

    async def look(*_args: object) -> dict[str, int | None]:
        broken_once()
        return {}

    monkeypatch.setattr(serving, "SAFETY_POLL_S", 0.001)
    if name == "_poll_slowly":
        monkeypatch.setattr(serving, "wake_missed", look)
    elif name == "janitor":
        monkeypatch.setattr(Janitor, "_sweep_locked", lambda _self: broken_once())
    else:
        monkeypatch.setattr(Reconciler, "reconcile", lambda _self: broken_once())
    (tmp_path / "data").mkdir()
    settings = Settings(
        data_dir=tmp_path / "data", port=0, backend="fake", engines=0, batch_workers=0, session_sweep_s=0.001
    )
    server = serving.build(settings)

    async def main() -> None:
        async with server.app.router.lifespan_context(server.app):
            await until(lambda: len(steps) >= 2)

    asyncio.run(main())
    task = {"_poll_slowly": "lost_wake_ups", "janitor": "janitor", "reconciler": "openai_batches"}[name]
    text = server.app.state.services.meters._background.labels(task)._value.get()
    assert text == 1.0


def test_a_ray_controller_goes_on_after_an_error_that_nothing_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = pytest.importorskip("tinsmith.cluster.ray.cluster")
    ticks: list[int] = []
    twice = threading.Event()

    class Broken:
        def tick(self) -> None:
            ticks.append(1)
            if len(ticks) == 1:
                raise KeyError("nothing expected this")
            twice.set()

    monkeypatch.setattr(cluster, "TICK_S", 60.0)
    controller = object.__new__(cluster.ControllerActor)
    controller._controller = Broken()
    controller._start()
    assert twice.wait(20)


def test_threads_are_started_only_where_their_end_is_noticed() -> None:
    starting = {
        str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if "threading.Thread(" in path.read_text()
    }
    assert starting == set(THREADS_OF_THEIR_OWNERS)


def test_tasks_are_created_only_where_their_end_is_noticed() -> None:
    creating = {
        str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if "asyncio.create_task(" in path.read_text()
    }
    assert creating == set(TASKS_OF_THEIR_CALLERS)
