"""Steps with resources of their own: which processes they run in, and that nothing else changes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.coordinating import LIMITS, CoordinatorSetup, coordinate
from support.databases import fresh_url
from support.raw_client import wait_until_gone
from tinsmith import batch
from tinsmith.batch import operations, stages
from tinsmith.batch.client.dataset import Dataset
from tinsmith.batch.coordinator.state import BatchJobs, JobRecord
from tinsmith.batch.operations.sample import Sample
from tinsmith.batch.pools.devices import Devices
from tinsmith.batch.pools.ray import reservation
from tinsmith.batch.pools.specs import PoolSpec, max_job_workers
from tinsmith.batch.types import Assignment, FailureCause, JobSpec, identity_of, unpack_payload
from tinsmith.batch.worker.mapper_process import Attempt, MapperProcess
from tinsmith.batch.worker.marker import MAP, Marker
from tinsmith.db.factory import open_database
from tinsmith.errors import UserError

PATIENCE_S = 60.0
Results = dict[int, dict[str, Any]]


def data_set(count: int = 12) -> Dataset:
    data = batch.from_items([{"n": index} for index in range(count)])
    data._forgotten = False
    return data


def spec_of(directory: Path, data: Dataset | batch.Job, **limits: float) -> JobSpec:
    assert isinstance(data, Dataset)
    data._forgotten = False
    spec = data._spec([batch.JsonWriter(str(directory / "out.jsonl"))])
    return JobSpec.from_dict({**spec.to_dict(), "batch_size": 2, "limits": limits})


@contextlib.contextmanager
def process_of(directory: Path, spec: JobSpec, environment: dict[str, str] | None = None) -> Iterator[MapperProcess]:
    mapper = MapperProcess(spec.to_dict(), directory / "log", environment={**os.environ, **(environment or {})})
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            mapper.watch()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield mapper
    finally:
        ended.set()
        watcher.join()
        mapper.close(5.0)


def feed(mapper: MapperProcess, directory: Path, batches: range, attempt_id: int = 1) -> Iterator[Attempt]:
    """The attempts at batches of two rows, as they are settled."""
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    mapper.feed([
        Attempt(
            {"batch_idx": batch_idx, "start_idx": 2 * batch_idx, "end_idx": 2 * batch_idx + 1,
             "attempt_id": attempt_id, "part_bases": [f"{directory}/parts-{batch_idx}"]},
            events.put,
        )
        for batch_idx in batches
    ])  # fmt: skip
    for _ in batches:
        yield events.get(timeout=PATIENCE_S)


def run(directory: Path, spec: JobSpec, environment: dict[str, str] | None = None) -> Results:
    num_batches = len(spec.batch_input_format["items"]) // 2
    with process_of(directory, spec, environment) as mapper:
        return {attempt.key[0]: attempt.result for attempt in feed(mapper, directory, range(num_batches))}


def rows_of(results: Results) -> list[dict[str, Any]]:
    parts = [results[index]["outcome"]["parts"][0]["path"] for index in sorted(results)]
    return [json.loads(line) for part in parts for line in Path(part).read_text().splitlines()]


def processes_of(mapper: MapperProcess) -> set[int]:
    """The processes of a mapper's group."""
    pids = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[2]) == mapper.pid:
                pids.add(int(path.parent.name))
    return pids


# Which stages there are, and what a worker needs.


def a(row: dict[str, Any]) -> dict[str, Any]:
    return row


def shape(data: Dataset | batch.Job) -> list[tuple[int, int, int]]:
    assert isinstance(data, Dataset)
    data._forgotten = False
    return [(stage.first, len(stage.steps), stage.num_processes) for stage in stages.stages_of(data._payload())]


def test_a_stage_is_a_run_of_steps_with_equal_options() -> None:
    data = data_set()
    assert shape(data.map(a).map(a)) == [(0, 2, 1)]
    assert shape(data.map(a, num_cpus=1).map(a)) == [(0, 2, 1)], "a step without options shares those before it"
    assert shape(data.map(a).map(a, num_cpus=1)) == [(0, 2, 1)]
    assert shape(data.map(a, num_cpus=1).map(a, num_cpus=1)) == [(0, 2, 1)]
    assert shape(data.map(a, num_cpus=1).map(a, num_gpus=1)) == [(0, 1, 1), (1, 1, 1)]
    assert shape(data.map(a).map(a, num_cpus=1).map(a, num_gpus=1).map(a)) == [(0, 2, 1), (2, 2, 1)]
    assert shape(data.map(a, num_cpus=1).map(a, num_gpus=1).map(a, num_cpus=1)) == [(0, 1, 1), (1, 1, 1), (2, 1, 1)]
    assert shape(data.map(a, num_cpus=1).map(Sample("m", prompt="x")).map(a, num_cpus=1)) == [(0, 3, 1)]
    assert shape(data.map(a, num_cpus=1).map(Sample("m", prompt="x")).map(a, num_cpus=2)) == [
        (0, 1, 1),
        (1, 1, 1),
        (2, 1, 1),
    ]
    assert shape(data.map(a, concurrency=5).map(a, num_gpus=1, concurrency=2)) == [(0, 1, 2), (1, 1, 1)]
    assert stages.stages_of("no payload") == []


def test_one_stage_is_submitted_as_before_and_what_a_worker_needs_is_the_sum_of_several(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, data_set().map(a, num_cpus=2, concurrency=3).map(a))
    assert (spec.num_cpus, spec.concurrency, spec.max_concurrent_batches) == (2, 3, 8)
    assert "stage_options" not in str(unpack_payload(spec.batch_serialized_fn))
    assert operations.max_concurrent_batches(spec) == 1

    needs: dict[str, Any] = {"num_cpus": 1, "memory": 5, "resources": {"disk": 1}, "concurrency": 4}
    staged = data_set().map(a, **needs).map(a, num_gpus=0.5, concurrency=2).map(a, num_gpus=2, resources={"disk": 2})
    spec = spec_of(tmp_path, staged)
    assert (spec.num_cpus, spec.memory, spec.resources, spec.num_gpus, spec.concurrency) == (2, 10, {"disk": 4}, 3, 2)
    assert reservation(PoolSpec("ray", 1, infra="ray"), spec)["num_gpus"] == 3
    assert operations.max_concurrent_batches(spec) == 7
    gpus = Devices(tuple("01234567"), ("0",))
    local = JobSpec.from_dict({**spec.to_dict(), "memory": None, "resources": None})
    with pytest.raises(UserError, match="num_gpus = 3"):
        max_job_workers(PoolSpec("gpu", 2, devices_per_worker=2, devices=gpus), local)
    least = data_set().map(a, concurrency=(3, 5)).map(a, num_gpus=1, concurrency=(1, 2))
    spec = spec_of(tmp_path, least)  # each of two workers has two processes of the first step
    assert (spec.concurrency, spec.min_concurrency) == (2, 2)
    spec = spec_of(tmp_path, data_set().map(a, concurrency=(3, 5)).map(a))
    assert (spec.concurrency, spec.min_concurrency) == (5, 3)
    spec = spec_of(tmp_path, staged)
    same = unpack_payload(spec.batch_serialized_fn)["steps"][0]
    assert same["stage_options"] == {"num_cpus": 1, "memory": 5, "resources": {"disk": 1}, "concurrency": 4}
    assert stages.split([]) == []
    with pytest.raises(ValueError, match=r"num_gpus is 1\.5; above 1"):
        spec_of(tmp_path, data_set().map(a, num_cpus=1).map(a, num_gpus=1.5))


def test_other_resources_make_no_other_function(tmp_path: Path) -> None:

    specs = [spec_of(tmp_path, data_set().map(a, num_cpus=cpus).map(a, num_cpus=2)) for cpus in (1, 2)]
    assert identity_of(specs[0].batch_serialized_fn) == identity_of(specs[1].batch_serialized_fn)


@pytest.mark.parametrize(
    ("amounts", "places"),
    [
        ([1, 2], [range(1), range(1, 3)]),
        ([0.5, 1, 0.5, 0.5], [range(1), range(1, 2), range(1), range(2, 3)]),
        ([0, 0.25, 0], [range(0), range(1), range(1, 1)]),
    ],
)
def test_parts_of_a_gpu_share_one(amounts: list[float], places: list[range]) -> None:
    parts = [stages.JobStage(index, (), {"num_gpus": amount}, 1) for index, amount in enumerate(amounts)]
    assert stages.place_gpus(parts) == places


# The processes.


def double(row: dict[str, Any]) -> dict[str, Any]:
    return {"m": row["n"] * 2}


def explode(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"m": row["m"], "copy": copy} for copy in range(row["m"] % 3)]


def is_even(rows: list[dict[str, Any]]) -> list[bool]:
    return [row["m"] % 4 == 0 for row in rows]


class Add:
    def __init__(self, amount: int) -> None:
        self.amount = amount

    async def __call__(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**row, "m": row["m"] + self.amount} for row in rows]


def chain(**own: Any) -> Dataset | batch.Job:  # noqa: ANN401
    """Functions of all kinds, the second and the fourth with other resources."""
    data = data_set().map(double, **({"num_cpus": 1} if own else {})).flat_map(explode, **own)
    return data.filter(is_even, batched=True, **({"num_cpus": 1} if own else {})).map_batches(
        Add, fn_kwargs={"amount": 1}, **own
    )


def test_stages_give_what_one_process_gives(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    spec = spec_of(tmp_path, chain(num_cpus=2))
    assert len(stages.stages_of(spec.batch_serialized_fn)) == 4
    results = run(tmp_path, spec)
    assert rows_of(results) == rows_of(run(tmp_path / "one", spec_of(tmp_path / "one", chain()))) != []
    log = (tmp_path / "log").read_text()
    assert "step 2 (explode): 6 batches in " in log and "step 4 (Add)" in log


def begins_pair(row: dict[str, Any]) -> bool:
    return row["n"] % 2 == 0


def test_each_stage_counts_its_rows_and_time(tmp_path: Path) -> None:
    staged = run(tmp_path, spec_of(tmp_path, data_set().filter(begins_pair, num_cpus=1).map(a, num_cpus=2)))
    works = [result["outcome"]["stage_work"] for result in staged.values()]
    counts = [[(work["stage"], work["rows_in"], work["rows_out"]) for work in of_batch] for of_batch in works]
    assert counts == [[(0, 2, 1), (1, 1, 1)]] * 6
    assert all(work["work_s"] > 0 and work["rows_failed"] == 0 for of_batch in works for work in of_batch)
    (tmp_path / "one").mkdir()
    together = run(tmp_path / "one", spec_of(tmp_path / "one", data_set().map(fail).map(a)))
    (work,) = together[1]["outcome"]["stage_work"]
    assert (work["stage"], work["rows_in"], work["rows_out"], work["rows_failed"]) == (0, 2, 1, 1)


def meet_first(row: dict[str, Any], directory: str) -> dict[str, Any]:
    """Say that a row has begun."""
    import os
    from pathlib import Path

    Path(directory, f"begun-{row['n']}").touch()
    return {"first": os.getpid()}


def meet_second(row: dict[str, Any], directory: str) -> dict[str, Any]:
    """Go on once the first step has begun with the next batch."""
    import os
    import time
    from pathlib import Path

    deadline = time.monotonic() + 60
    while row["n"] < 10 and not Path(directory, f"begun-{row['n'] + 2}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return {"second": os.getpid()}


def test_a_stage_works_on_the_next_batch_while_another_works_on_this_one(tmp_path: Path) -> None:
    kwargs = {"directory": str(tmp_path)}
    data = data_set().map(meet_first, fn_kwargs=kwargs, num_cpus=1, concurrency=2)
    rows = rows_of(run(tmp_path, spec_of(tmp_path, data.map(meet_second, fn_kwargs=kwargs, num_cpus=2, concurrency=1))))
    assert [row["n"] for row in rows] == list(range(12))
    firsts, seconds = ({row[name] for row in rows} for name in ("first", "second"))
    assert len(firsts) == 2 and len(seconds) == 1 and not firsts & seconds


def die_once(row: dict[str, Any], directory: str) -> dict[str, Any]:
    import os
    import signal
    from pathlib import Path

    if row["n"] == 5 and not Path(directory, "died").exists():
        Path(directory, "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"m": row["n"]}


def test_a_stage_that_dies_costs_its_batch_an_attempt_and_the_others_none(tmp_path: Path) -> None:
    data = data_set().map(a, num_cpus=1).map(die_once, fn_kwargs={"directory": str(tmp_path)}, num_cpus=2)
    with process_of(tmp_path, spec_of(tmp_path, data)) as mapper:
        results = {attempt.key[0]: attempt.result for attempt in feed(mapper, tmp_path, range(6))}
        lost = results[2]["lost"]
        assert (lost["cause"], lost["error_class"], lost["row"]) == (FailureCause.DEATH, "MapperKilled", 5)
        assert "while it worked on row 5 in step 2 (die_once)" in lost["error"]
        assert all("outcome" in results[index] for index in (0, 1, 3, 4, 5))
        (retried,) = feed(mapper, tmp_path, range(2, 3), attempt_id=2)
        assert retried.result["outcome"]["rows_ok"] == 2


async def die_among_others(row: dict[str, Any], directory: str) -> dict[str, Any]:
    """Die at a row once another batch has begun, so that the process has several."""
    import asyncio
    import os
    from pathlib import Path

    Path(directory, f"begun-{row['n']}").touch()
    async with asyncio.timeout(60):
        while row["n"] == 1 and not Path(directory, "begun-2").exists():
            await asyncio.sleep(0.01)
    if row["n"] == 1:
        os._exit(4)
    if row["n"] == 2 and not Path(directory, "alone").exists():
        Path(directory, "alone").touch()
        await asyncio.sleep(600)
    return {"m": row["n"]}


@pytest.mark.extended
def test_of_several_batches_of_a_stage_the_one_that_kills_it_is_found(tmp_path: Path) -> None:
    data = data_set(8).map(a, num_cpus=1).map(die_among_others, fn_kwargs={"directory": str(tmp_path)}, num_cpus=2)
    results = run(tmp_path, spec_of(tmp_path, data))
    assert {index for index, result in results.items() if "lost" in result} == {0}
    assert results[0]["lost"]["cause"] == FailureCause.DEATH


class Unready:
    def __init__(self) -> None:
        raise RuntimeError("no weights")

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return row


def test_a_set_up_that_fails_names_its_step(tmp_path: Path) -> None:
    results = run(tmp_path, spec_of(tmp_path, data_set(4).map(a, num_cpus=1).map(Unready, num_cpus=2)))
    for result in results.values():
        assert result["lost"]["cause"] == FailureCause.SETUP
        assert result["lost"]["error"].startswith("step 2 (Unready): ") and "no weights" in result["lost"]["error"]


def fail(row: dict[str, Any]) -> dict[str, Any]:
    if row["n"] == 3:
        raise ValueError("a bad row")
    return {"m": row["n"]}


def fail_all(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if rows[0]["n"] == 8:
        raise ConnectionError("a bad batch")
    return [{**row, "lock": __import__("threading").Lock()} if row["n"] == 5 else row for row in rows]


def test_failed_rows_and_batches_name_their_step(tmp_path: Path) -> None:
    data = data_set().map(fail, num_cpus=1).map_batches(fail_all, num_cpus=2).map(a, num_cpus=1)
    results = run(tmp_path, spec_of(tmp_path, data))
    (failure,) = results[1]["outcome"]["row_failures"]
    assert (failure["idx"], failure["error_type"], failure["message"]) == (3, "ValueError", "a bad row")
    assert failure["traceback"].startswith("step 1 (fail): Traceback") and failure["row"] == {"n": 3}
    lost = results[4]["lost"]
    assert (lost["cause"], lost["error_class"]) == (FailureCause.ERROR, "ConnectionError")
    assert lost["error"].startswith("step 2 (fail_all): Traceback")
    lost = results[2]["lost"]
    assert lost["error_class"] == "TypeError" and "step 2 (fail_all)" in lost["error"], "a lock cannot be pickled"
    assert all("outcome" in results[index] for index in (0, 1, 3, 5))


def hang(row: dict[str, Any]) -> dict[str, Any]:
    import time

    time.sleep(600 if row["n"] == 2 else 0.3)
    return {}


@pytest.mark.extended
def test_a_late_batch_names_its_step_and_waiting_is_not_late(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path, data_set().map(a, num_cpus=1).map(hang, num_cpus=2), batch_timeout_s=8.0, startup_timeout_s=60.0
    )
    results = run(tmp_path, spec)
    assert {index for index, result in results.items() if "lost" in result} == {1}
    assert results[1]["lost"]["error"] == "the batch took longer than 8 s in step 2 (hang)"


def test_time_that_a_batch_waits_for_a_process_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapper = MapperProcess(spec_of(tmp_path, data_set().map(a)).to_dict(), tmp_path / "log")
    attempt = Attempt({"batch_idx": 0, "attempt_id": 1}, print, began_at=100.0, waited_s=7.0)
    monkeypatch.setattr(time, "monotonic", lambda: 110.0)
    assert attempt.work_s == 3.0
    mapper.close(0)


def show(row: dict[str, Any]) -> dict[str, Any]:
    import os

    return {f"gpus-{len(row)}": os.environ["CUDA_VISIBLE_DEVICES"]}


def test_gpus_are_given_to_the_stages_that_ask_for_them(tmp_path: Path) -> None:
    data = data_set(4).map(show, num_cpus=1).map(show, num_gpus=1).map(show, num_gpus=2)
    spec = spec_of(tmp_path, data)
    rows = rows_of(run(tmp_path, spec, {"CUDA_VISIBLE_DEVICES": "3,GPU-5,7"}))
    assert rows[0] == {"n": 0, "gpus-1": "", "gpus-2": "3", "gpus-3": "GPU-5,7"}
    results = run(tmp_path, spec, {"CUDA_VISIBLE_DEVICES": "3"})
    assert results[0]["lost"]["cause"] == FailureCause.SETUP_OF_MACHINE
    assert "need 3 GPUs on each worker, which has 3" in results[0]["lost"]["error"]


def name_interpreter(row: dict[str, Any]) -> dict[str, Any]:
    import os

    return {"interpreter": os.environ.get("STAGE_INTERPRETER", "the server's")}


def test_a_stage_has_its_interpreter(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nSTAGE_INTERPRETER=other exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    data = data_set(2).map(name_interpreter, num_cpus=1).map(lambda row: {"first": row["interpreter"]}, num_cpus=1)
    spec = spec_of(tmp_path, data.map(name_interpreter, python=str(other)))
    assert spec.python is None
    assert rows_of(run(tmp_path, spec))[0] == {"n": 0, "first": "the server's", "interpreter": "other"}
    spec = spec_of(tmp_path, data_set(2).map(a, num_cpus=1).map(a, python=str(tmp_path / "none")))
    lost = run(tmp_path, spec)[0]["lost"]
    assert lost["cause"] == FailureCause.SETUP_OF_MACHINE and lost["error"].startswith("step 2 (a): ")


def sleep_long(row: dict[str, Any], directory: str) -> dict[str, Any]:
    import subprocess
    import time
    from pathlib import Path

    subprocess.Popen(["sleep", "600"])
    Path(directory, "begun").touch()
    time.sleep(600)
    return row


@pytest.mark.parametrize("how", ["kill", "the mapper's process dies"])
def test_an_end_leaves_no_process(tmp_path: Path, how: str) -> None:
    data = data_set().map(a, num_cpus=1).map(sleep_long, fn_kwargs={"directory": str(tmp_path)}, num_cpus=2)
    with process_of(tmp_path, spec_of(tmp_path, data)) as mapper:
        attempts = feed(mapper, tmp_path, range(2))
        settling = threading.Thread(target=list, args=(attempts,))
        settling.start()
        deadline = time.monotonic() + PATIENCE_S
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        pids = processes_of(mapper)
        assert len(pids) == 4, "the mapper's process, two stages, and what a function started"
        if how == "kill":
            mapper.kill()
        else:
            pid = mapper.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            assert wait_until_gone(pid)
        mapper.close(0)
        settling.join(PATIENCE_S)


def test_a_marker_counts_waits_and_keeps_the_batches_of_one_process() -> None:

    marker = Marker()
    for slot in range(3):
        marker.begin(MAP + slot, Assignment(slot, 0, 1, 1, ()))
    marker.end_others({MAP + 1})
    assert list(marker.busy()) == [(1, 1)]


def die_until_told(row: dict[str, Any], directory: str) -> dict[str, Any]:
    import os
    from pathlib import Path

    if row["n"] == 5 and not Path(directory, "well").exists():
        os._exit(3)
    return {"m": row["n"]}


def test_a_job_with_stages_isolates_a_row_that_kills_one_and_is_resumed(tmp_path: Path) -> None:
    with contextlib.closing(open_database(fresh_url(tmp_path))) as database:
        jobs = BatchJobs(database)

        def complete(**options: Any) -> tuple[int, JobRecord]:  # noqa: ANN401
            data = data_set().map(a, num_cpus=1).map(die_until_told, fn_kwargs={"directory": str(tmp_path)}, memory=1)
            spec = JobSpec.from_dict({**spec_of(tmp_path, data).to_dict(), "limits": vars(LIMITS), **options})
            job_id = jobs.create("local", spec)
            asyncio.run(coordinate(CoordinatorSetup("", str(tmp_path), job_id), jobs))
            return job_id, jobs.find("local", job_id)

        job_id, job = complete()
        assert (job.status, job.rows_failed) == ("FAILED", 1)
        (error,) = jobs.row_errors(job_id)
        assert (error["row_idx"], error["error_class"]) == (5, "MapperDied")
        assert "ended with status 3 while it worked on row 5 in step 2 (die_until_told)" in error["message"]
        (tmp_path / "well").touch()
        _, resumed = complete(resume_from=job_id)
        assert (resumed.status, resumed.rows_ok) == ("SUCCEEDED", 12)
        assert resumed.stage_figures is not None and len(resumed.stage_figures) == 2
        assert sum(sums["rows_in"] for sums in resumed.stage_figures) <= 2 * 12 - 2, "what it took over is not its work"
        assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [
            {"n": index, "m": index} for index in range(12)
        ]


def test_steps_in_this_process_need_no_stages() -> None:
    assert data_set(3).map(double, num_cpus=1).map(a, num_gpus=1).take(1) == [{"n": 0, "m": 0}]  # type: ignore[union-attr]
