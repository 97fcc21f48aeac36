"""Bulk jobs from the client to the output on live servers: kills, cancellation, resumption and shared pools."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import signal
import sys
import time
import venv
from pathlib import Path
from typing import Any

import pytest

from support.live import LiveServer, serving
from tinsmith import batch
from tinsmith.batch.client.dataset import Dataset
from tinsmith.batch.client.http import Client
from tinsmith.batch.client.job import Job, JobFailedError
from tinsmith.batch.worker.children import interpreter_problem
from tinsmith.errors import UserError

ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")
KEY = "tml-test"
QUICK = {"backoff_s": 0.01, "grace_s": 1.0}


@batch.remote_function
def double() -> None:
    from tinsmith import batch

    for rows in batch.load():
        batch.save_results([{"text": row["text"], "output": row["text"] * 2} for row in rows])


@batch.remote_function
def slow() -> None:
    import time

    from tinsmith import batch

    for rows in batch.load():
        time.sleep(0.05)
        batch.save_results([{"text": row["text"], "output": row["text"] * 2} for row in rows])


@batch.remote_function
def raise_on_fail() -> None:
    from tinsmith import batch

    for rows in batch.load():
        if any("FAIL" in row["text"] for row in rows):
            raise ValueError("this row is poison")
        batch.save_results([{"text": row["text"], "output": row["text"] * 2} for row in rows])


@batch.remote_function
def broken() -> None:
    import no_such_module_anywhere  # noqa: F401


@batch.remote_function
def suicidal(marker: str, how: int) -> None:
    """In the middle of a job, kill or stop its own process once."""
    import os
    from pathlib import Path

    from tinsmith import batch

    for rows in batch.load():
        if any(row["text"] == "t20" for row in rows) and not Path(marker).exists():
            Path(marker).write_text(str(os.getpid()))
            os.kill(os.getpid(), how)
        batch.save_results([{"text": row["text"], "output": row["text"] * 2} for row in rows])


def write_input(path: Path, rows: int, bad: tuple[int, ...] = ()) -> Path:
    lines = [json.dumps({"text": f"FAIL{index}" if index in bad else f"t{index}"}) for index in range(rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def start(client: Client, directory: Path, function: Any, rows: int | str = 50, **options: Any) -> Job:  # noqa: ANN401
    bad = options.pop("bad", ())
    source = directory / "in.jsonl"
    if isinstance(rows, str):
        options["rows"] = rows
    elif not source.exists():
        write_input(source, rows, bad)
    output = options.pop("output", None) or batch.JsonWriter(str(directory / "out.jsonl"))
    return Dataset(batch.JsonReader(str(source))).map(
        function, batch_size=options.pop("batch_size", 2), output=output, stream=False, client=client, **options
    )  # fmt: skip


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def until(condition: Any, timeout_s: float = 20) -> Any:  # noqa: ANN401
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)
    return value


def double_rows(rows: int) -> list[dict[str, str]]:
    return [{"text": f"t{index}", "output": f"t{index}" * 2} for index in range(rows)]


def test_a_simple_job(client: Client, tmp_path: Path) -> None:
    job = start(client, tmp_path, double)
    status = job.wait()
    assert (status["status"], status["batch_total_batches"], status["batch_completed_batches"]) == ("SUCCEEDED", 25, 25)
    assert lines(tmp_path / "out.jsonl") == double_rows(50)
    (published,) = job.outputs
    assert (
        published.rows == 50 and published.sha256 == hashlib.sha256((tmp_path / "out.jsonl").read_bytes()).hexdigest()
    )
    until(lambda: not (tmp_path / ".tinsmith_batch_tmp" / str(int(job))).exists())
    assert client.jobs()[0]["job_id"] == int(job)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_few_rows_and_batches_larger_than_them(client: Client, tmp_path: Path, rows: int) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": f"t{index}"}) + "\n" for index in range(rows)))
    start(client, tmp_path, double, batch_size=4).wait()
    assert lines(tmp_path / "out.jsonl") == double_rows(rows)


def test_a_poison_row_is_found_and_the_others_are_kept(client: Client, tmp_path: Path) -> None:
    bad = (1234, 1235, 7777)
    job = start(
        client, tmp_path, raise_on_fail, rows=10_000, bad=bad, batch_size=500, max_failed_rows=3, limits=QUICK,
        errors=batch.JsonWriter(str(tmp_path / "errors.jsonl")),
    )  # fmt: skip
    status = job.wait()
    assert (status["rows_ok"], status["rows_failed"]) == (9_997, 3)
    errors = lines(tmp_path / "errors.jsonl")
    assert [(error["idx"], error["row"]["text"]) for error in errors] == [(row, f"FAIL{row}") for row in bad]
    assert all(error["error_type"] == "ValueError" and "this row is poison" in error["message"] for error in errors)
    expected = [row for index, row in enumerate(double_rows(10_000)) if index not in bad]
    assert lines(tmp_path / "out.jsonl") == expected
    assert [error["idx"] for error in job.errors()] == list(bad)


def test_a_job_with_more_failed_rows_than_allowed_fails_and_keeps_the_rest(client: Client, tmp_path: Path) -> None:
    job = start(client, tmp_path, raise_on_fail, rows=10, bad=(4,), limits=QUICK)
    reason = r"1 row failed, and max_failed_rows is 0\n"
    with pytest.raises(JobFailedError, match=reason) as failure:
        job.wait()
    text = str(failure.value)
    assert 'row 4 is {"text": "FAIL4"}\nTraceback (most recent call last):\n' in text
    assert 'raise ValueError("this row is poison")' in text.replace("'", '"')
    assert f"1 row failed (batch.Job({int(job)}).errors() lists them)" in text and "tinsmith batch" not in text
    assert failure.value.status["first_error"] == next(job.errors())
    assert not (tmp_path / "out.jsonl").exists()
    assert double_rows(4) == list(job.partial())[:4]
    assert [error["idx"] for error in job.errors()] == [4]


@batch.remote_function
def too_few() -> None:
    from tinsmith import batch

    for rows in batch.load():
        batch.save_results(rows[:1])


def test_a_batch_with_too_few_results_fails_the_job_at_once(client: Client, tmp_path: Path) -> None:
    job = start(client, tmp_path, too_few, rows=5, batch_size=5)  # the default backoff takes 14 s
    with pytest.raises(JobFailedError, match=r'returned 1 row for a batch of 5; .* With rows="any"'):
        job.wait()
    (state,) = job.batches()
    assert (state["status"], state["attempt_id"]) == ("FAILED", 1), "neither tried again nor halved"
    assert not (tmp_path / "out.jsonl").exists()

    changed = start(
        client, tmp_path, too_few, batch_size=2, rows="any", output=batch.JsonWriter(f"{tmp_path}/any.jsonl")
    )
    changed.wait()
    assert [row["text"] for row in lines(tmp_path / "any.jsonl")] == ["t0", "t2", "t4"]
    assert (changed.progress.rows_ok, changed.outputs[0].rows) == (5, 3)


def test_a_mapper_that_cannot_start_fails_the_job_with_its_traceback(client: Client, tmp_path: Path) -> None:
    began = time.monotonic()
    job = start(client, tmp_path, broken)
    with pytest.raises(JobFailedError, match=r"(?s)setup_failed.*No module named 'no_such_module_anywhere'"):
        job.wait()
    assert time.monotonic() - began < 120
    assert job.status()["batch_completed_batches"] == 0
    assert {state["attempt_id"] for state in job.batches()} <= {0, 1}, "an import fails on every worker alike"


def test_an_input_that_is_not_there_is_one_line(client: Client, tmp_path: Path) -> None:
    missing = batch.read_json(f"{tmp_path}/none.jsonl")
    job = missing.map(double, output=batch.JsonWriter(f"{tmp_path}/o.jsonl"), stream=False, client=client)
    assert isinstance(job, Job)
    with pytest.raises(JobFailedError) as failure:
        job.wait()
    assert str(failure.value) == f"bulk job {int(job)} is FAILED: no file matches {tmp_path}/none.jsonl"


def test_an_interpreter_that_cannot_run_a_mapper_fails_the_job_with_the_fix(client: Client, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    bare, old, broken_one = tmp_path / "bare/bin/isolated", tmp_path / "old", tmp_path / "broken"
    bare.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {tmp_path}/bare/bin/python "$@"\n')
    old.write_text("#!/bin/sh\nprintf '3.8 '\nexit 1\n")
    broken_one.write_text("#!/bin/sh\nexit 3\n")
    for script in (bare, old, broken_one):
        script.chmod(0o755)
    expected = {
        str(bare): "cannot import tinsmith (ModuleNotFoundError: No module named 'tinsmith'). Install it there: "
        f"{bare} -m pip install tinsmith",
        str(old): "is Python 3.8; a mapper needs 3.11 or newer",
        str(broken_one): "is not a Python interpreter: it ended with status 3",
        f"{tmp_path}/none": "cannot be started (No such file or directory)",
    }
    for python, says in expected.items():
        assert says in interpreter_problem(python)
    assert interpreter_problem(sys.executable) == ""
    job = start(client, tmp_path, double, python=str(bare))  # with the default backoff
    with pytest.raises(JobFailedError, match=re.escape(f"setup_failed: {bare} {expected[str(bare)]}")):
        job.wait()
    assert {state["attempt_id"] for state in job.batches()} <= {0, 1} and not list(job.errors())


def test_a_killed_mappers_batches_are_retried(client: Client, tmp_path: Path) -> None:
    job = start(client, tmp_path, suicidal, fn_kwargs={"marker": str(tmp_path / "died"), "how": int(signal.SIGKILL)})
    job.wait()
    assert (tmp_path / "died").exists()
    assert lines(tmp_path / "out.jsonl") == double_rows(50)
    assert {state["retry_count"] for state in job.batches()} == {0}, "nobody's retries are spent"
    until(lambda: not alive(int((tmp_path / "died").read_text())))


@pytest.mark.extended
def test_a_job_that_is_cancelled_ends_soon_and_can_be_resumed(client: Client, tmp_path: Path) -> None:
    job = start(client, tmp_path, slow, rows=400, limits=QUICK)
    until(lambda: job.status()["batch_completed_batches"] >= 5)
    with pytest.raises(UserError, match="cancel it first"):
        job.resume()
    job.cancel()
    began = time.monotonic()
    final = job.wait(check=False)
    assert final["status"] == "CANCELLED" and time.monotonic() - began < 60
    time.sleep(0.3)
    assert job.status()["batch_completed_batches"] == final["batch_completed_batches"], "nothing is dispatched any more"
    assert job.cancel()["status"] == "CANCELLED"

    before = {state["start_idx"]: state["attempt_id"] for state in job.batches() if state["status"] == "COMPLETED"}
    resumed = job.resume()
    assert resumed.wait()["batch_completed_batches"] == 200
    assert lines(tmp_path / "out.jsonl") == double_rows(400)
    after = {state["start_idx"]: state["attempt_id"] for state in resumed.batches()}
    assert before and before.items() <= after.items(), "what was committed is not done again"
    with pytest.raises(UserError, match="has succeeded"):
        job.resume()


def test_a_job_that_failed_is_resumed_with_another_function(client: Client, tmp_path: Path) -> None:
    job = start(client, tmp_path, raise_on_fail, rows=20, bad=(3, 11), limits=QUICK)
    assert job.wait(check=False)["status"] == "FAILED"
    again = start(client, tmp_path, double, limits=QUICK, resume_from=int(job))
    again.wait()
    written = [row["text"] for row in lines(tmp_path / "out.jsonl")]
    assert written == [f"FAIL{index}" if index in (3, 11) else f"t{index}" for index in range(20)]


@pytest.mark.extended
def test_two_jobs_share_a_pool_and_neither_is_cancelled(client: Client, tmp_path: Path) -> None:
    jobs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        jobs.append(start(client, tmp_path / name, slow, rows=160, name=name))
    until(lambda: all(job.status()["batch_completed_batches"] >= 10 for job in jobs))
    completed_counts = [job.status()["batch_completed_batches"] for job in jobs]
    assert min(completed_counts) >= 10
    for job in jobs:
        job.wait()
    end_times = [job.status()["ended_at"] for job in jobs]
    assert abs(end_times[0] - end_times[1]) < 0.5 * (max(end_times) - min(job.status()["started_at"] for job in jobs))
    for name in ("one", "two"):
        assert lines(tmp_path / name / "out.jsonl") == double_rows(160)


@pytest.mark.extended
def test_a_pool_grows_and_shrinks_while_it_works(server: LiveServer, client: Client, tmp_path: Path) -> None:
    def resize(workers: int) -> None:
        import httpx

        answer = httpx.put(
            f"{server.url}/api/v1/batch/pools/local", json={"workers": workers}, headers={"X-API-Key": KEY}
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["pools"][0]["workers"] == workers

    resize(1)
    try:
        job = start(client, tmp_path, slow, rows=200)
        until(lambda: job.status()["batch_completed_batches"] >= 3)
        assert len(job.status()["workers"]) == 1
        resize(3)
        until(lambda: len(job.status()["workers"]) == 3)
        resize(1)
        job.wait()
    finally:
        resize(2)
    assert lines(tmp_path / "out.jsonl") == double_rows(200)


def test_an_output_that_exists_is_refused_without_a_question(client: Client, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("mine\n")
    with pytest.raises((FileExistsError, ValueError, UserError), match=re.escape("out.jsonl")):
        start(client, tmp_path, double)
    assert (tmp_path / "out.jsonl").read_text() == "mine\n"


def test_a_function_that_hangs_is_ended_and_its_batches_run_elsewhere(client: Client, tmp_path: Path) -> None:
    options = {"marker": str(tmp_path / "hung"), "how": int(signal.SIGSTOP)}
    job = start(client, tmp_path, suicidal, fn_kwargs=options, limits={**QUICK, "batch_timeout_s": 1.5})
    job.wait()
    assert lines(tmp_path / "out.jsonl") == double_rows(50)
    assert any(state["retry_count"] for state in job.batches())
    until(lambda: not alive(int((tmp_path / "hung").read_text())))


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    return False


SLOW_STEPS = [
    "batch.claimed:3",
    "batch.reported:3",
    "batch.winding",
    "batch.fenced",
    "batch.published",
    "batch.recorded",
    "batch.cleaned",
]
STEPS = ["batch.committed:2", *(pytest.param(step, marks=pytest.mark.slow) for step in SLOW_STEPS)]


@pytest.mark.extended
@pytest.mark.parametrize("step", STEPS)
def test_a_coordinator_that_is_killed_at_a_step_leaves_the_same_output(tmp_path: Path, step: str) -> None:
    data = tmp_path / "data"
    with serving(data, "--backend", "fake", settings={"FAILPOINTS": step}) as server:
        client = Client(server.url, KEY)
        job = start(client, tmp_path, double, rows=20, limits=QUICK)
        server.process.wait(30)
        client.close()
    with serving(data, "--backend", "fake", settings={"FAILPOINTS": step}) as server:
        client = Client(server.url, KEY)
        assert Job(int(job), client).wait()["batch_completed_batches"] == 10
        expected = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in double_rows(20)).encode()
        assert (tmp_path / "out.jsonl").read_bytes() == expected
        until(lambda: not (tmp_path / ".tinsmith_batch_tmp" / str(int(job))).exists())
        client.close()
