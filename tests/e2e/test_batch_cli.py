"""`tinsmith batch`, as a user runs it, against a live server: submit, follow, stop, resume, export, read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from support.live import API_KEY, LiveServer, serving
from tinsmith import batch
from tinsmith.batch.client.http import Client
from tinsmith.batch.types import Assignment
from tinsmith.batch.worker.logs import JobLogs, TaggedOutput, strip_tags
from tinsmith.cli import batch as batch_cli
from tinsmith.errors import NotFoundError, UserError

ROWS = 12
MAPPERS = """
from tinsmith import batch


@batch.remote_function
def double(mark: str = "", pause_s: float = 0.0, hold: str = ""):
    import os, sys, time

    for rows in batch.load():
        print("has", rows[0]["text"])
        print("warns", file=sys.stderr)
        time.sleep(pause_s)
        while rows[0]["text"] not in ("t0", "t1") and os.path.exists(hold):
            time.sleep(0.05)
        batch.save_results([{"text": row["text"] * 2 + mark} for row in rows])


def picky(row):
    if row["text"] in ("t3", "t7"):
        raise ValueError("[not] this one")
    return row
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("cli") / "data", "--backend", "fake") as new_server:
        yield new_server


@pytest.fixture
def run(server: LiveServer, tmp_path: Path) -> Any:  # noqa: ANN401
    """Run `tinsmith batch ...` in a directory with mappers and rows; return its exit status, output and errors."""
    (tmp_path / "mappers.py").write_text(MAPPERS)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": f"t{index}"}) + "\n" for index in range(ROWS)))

    def call(*arguments: object) -> tuple[int, str, str]:
        process = command(server, tmp_path, *arguments)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    return call


def heed_interrupts() -> None:
    """Handle interrupts, which background processes of a shell ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def command(server: LiveServer, directory: Path, *arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY, "COLUMNS": "200"}
    words = [sys.executable, "-m", "tinsmith.cli", "batch", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        words,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        preexec_fn=heed_interrupts,
    )


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def double(count: int, mark: str = "") -> list[dict[str, str]]:
    return [{"text": f"t{index}" * 2 + mark} for index in range(count)]


DOUBLE = ("submit", "mappers.py:double", "-i", "in.jsonl", "-o", "out.jsonl", "--batch-size", 3)


def test_a_job_is_submitted_shown_listed_and_exported(run: Any, tmp_path: Path) -> None:  # noqa: ANN401
    code, out, err = run(*DOUBLE, "--fn-kwargs", '{"mark": "!"}', "--name", "[red]first", "-o", "csv:out.txt")
    assert code == 0, err
    assert lines(tmp_path / "out.jsonl") == double(ROWS, "!")
    assert f"out.jsonl: {ROWS} rows" in out and "out.txt: 12 rows" in out
    assert "batches" not in err, "progress is for a terminal"

    code, out, _ = run("list", "--json")
    job_id = json.loads(out)[0]["job_id"]
    assert code == 0 and json.loads(out)[0]["name"] == "[red]first"
    code, out, _ = run("list")
    assert code == 0 and "[red]first" in out and "SUCCEEDED" in out and "4/4" in out
    code, out, _ = run("show", job_id)
    assert code == 0 and "4 of 4" in out and "12 ok, 0 failed, of 12" in out and str(tmp_path / "out.jsonl") in out
    assert "step 1 (double) on CPU: 12 rows in, 12 out" in " ".join(out.split())
    code, out, _ = run("show", job_id, "--json")
    assert json.loads(out)["status"] == "SUCCEEDED"

    code, out, err = run("export", job_id, "copy.jsonl", "--json")
    assert code == 0, err
    assert json.loads(out)["rows"] == ROWS
    assert (tmp_path / "copy.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    code, _, err = run("export", job_id, "copy.jsonl")
    assert code == 2 and "pass --yes" in err
    assert run("export", job_id, "copy.txt", "--output", 1, "--yes")[0] == 0
    assert (tmp_path / "copy.txt").read_bytes() == (tmp_path / "out.txt").read_bytes()
    code, _, err = run("export", job_id, "other.jsonl", "--output", 2)
    assert code == 2 and "outputs 0 to 1" in err
    code, _, err = run("export", job_id, "other.jsonl.gz")
    assert code == 2 and ".gz" in err and not (tmp_path / "other.jsonl.gz").exists()
    assert not (tmp_path / ".tinsmith_batch_tmp").exists()


def test_options_without_a_flag_of_their_own(run: Any, tmp_path: Path) -> None:  # noqa: ANN401
    picky = ("submit", "mappers.py:picky", "-i", "in.jsonl", "-o", "out.jsonl", "--max-failed-rows", 2, "--json")
    options = (
        'retry_on=["ValueError"]',
        "concurrency=1",
        'limits={"max_retries": 1, "backoff_s": 0.01}',
        "if_exists=error",
    )
    code, out, err = run(*picky, *(word for text in options for word in ("--option", text)))
    assert code == 0 and json.loads(out)["rows_failed"] == 2, err
    code, _, err = run(*picky, "--yes", "--option", "concurrency=none")
    assert code == 2 and "concurrency" in err and "none" in err, err
    code, _, err = run(*picky, "--yes", "--option", "output=x")
    assert code == 2 and "NAME=VALUE" in err, err


def test_logs_say_which_batch_printed_what(run: Any) -> None:  # noqa: ANN401
    code, out, err = run(*DOUBLE, "--json")
    assert code == 0, err
    job_id = json.loads(out)["job_id"]
    code, out, _ = run("logs", job_id, "--json")
    log_lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [line["text"] for line in log_lines if line["worker_id"] is None] == [
        "submitted to pool local", f"running: {ROWS} rows", "SUCCEEDED",
    ]  # fmt: skip
    printed = {(line["batch_idx"], line["stream"], line["text"]) for line in log_lines if line["worker_id"]}
    assert printed >= {(index, "stdout", f"has t{index * 3}") for index in range(4)}
    assert printed >= {(index, "stderr", "warns") for index in range(4)}
    assert all(line["attempt_id"] >= 1 for line in log_lines if line["text"].startswith("has"))
    code, out, _ = run("logs", job_id, "--follow")
    assert code == 0 and " batch 2.1" in out and "has t6" in out and "job" in out


def test_failed_rows_end_with_one_and_are_listed(run: Any, tmp_path: Path) -> None:  # noqa: ANN401
    words = ("submit", "mappers.py:picky", "-i", "json:in.jsonl", "-o", "out.jsonl")
    code, _, err = run(*words)
    job_id = json.loads(run("list", "--json", "--limit", 1)[1])[0]["job_id"]
    assert code == 1
    assert "2 rows failed, and max_failed_rows is 0\n" in err
    assert 'row 3 is {"text": "t3"}\nTraceback' in err and "batch.Job(" not in err
    assert f"`tinsmith batch errors {job_id}`" in err and f"`tinsmith batch resume {job_id}`" in err
    assert 'row 3 is {"text": "t3"}\nTraceback' in run("show", job_id)[1]
    assert run("errors", job_id, "--full")[1].count("Traceback") == 2
    code, out, _ = run("errors", job_id)
    assert code == 0 and out == "row 3 ValueError: [not] this one\nrow 7 ValueError: [not] this one\n"
    errors = [json.loads(line) for line in run("errors", job_id, "--json")[1].splitlines()]
    assert [(error["idx"], error["row"]) for error in errors] == [(3, {"text": "t3"}), (7, {"text": "t7"})]
    code, out, _ = run(*words, "--json", "--max-failed-rows", 0.5, "--errors", "failed.jsonl", "--if-exists", "error")
    assert code == 0 and json.loads(out)["rows_failed"] == 2
    assert [error["idx"] for error in lines(tmp_path / "failed.jsonl")] == [3, 7]
    assert len(lines(tmp_path / "out.jsonl")) == ROWS - 2


def start_held_job(run: Any, server: LiveServer, hold: Path) -> batch.Job:  # noqa: ANN401
    """A job that has completed at least two batches, and does not end before `hold` is deleted."""
    hold.touch()
    kwargs = json.dumps({"hold": str(hold)})
    code, out, err = run(*DOUBLE, "--fn-kwargs", kwargs, "--detach", "--json", "--batch-size", 1)
    assert code == 0, err
    job = batch.Job(json.loads(out)["job_id"], Client(server.url, API_KEY))
    while job.progress.batches_done < 2:
        time.sleep(0.05)
    return job


def test_a_cancelled_job_is_exported_and_resumed(run: Any, server: LiveServer, tmp_path: Path) -> None:  # noqa: ANN401
    hold = tmp_path / "hold"
    job = start_held_job(run, server, hold)
    code, _, err = run("cancel", int(job))
    assert code == 2 and "pass --yes" in err and job.status()["status"] == "RUNNING"
    code, out, _ = run("cancel", int(job), "--yes")
    assert code == 0 and "CANCEL" in out
    assert job.wait(check=False)["status"] == "CANCELLED"

    partial_rows = list(job.partial())
    assert 2 <= len(partial_rows) < ROWS
    assert run("export", int(job), "part.jsonl")[0] == 0
    assert lines(tmp_path / "part.jsonl") == partial_rows and all(row in double(ROWS) for row in partial_rows)
    hold.unlink()
    code, out, err = run("resume", int(job), "--json")
    assert code == 0, err
    assert json.loads(out)["resume_from"] == int(job)
    assert lines(tmp_path / "out.jsonl") == double(ROWS)
    code, _, err = run("resume", int(job))
    assert code == 2 and "has succeeded" in err


def test_a_cancelled_jobs_parts_are_purged(run: Any, server: LiveServer, tmp_path: Path) -> None:  # noqa: ANN401
    hold = tmp_path / "hold"
    job = start_held_job(run, server, hold)
    assert "cancel it before" in run("purge", int(job), "--yes")[2]
    job.cancel()
    assert job.wait(check=False)["status"] == "CANCELLED"

    def parts() -> list[Path]:
        return [path for path in (tmp_path / ".tinsmith_batch_tmp").rglob("*") if path.is_file()]

    assert parts()
    assert run("purge")[0] == 2
    code, _, err = run("purge", int(job))
    assert code == 2 and "pass --yes" in err and parts()
    code, out, err = run("purge", int(job), "--yes")
    assert code == 0, err
    assert "of 1 bulk jobs" not in out and "of bulk job" in out
    deadline = time.monotonic() + 60
    while parts() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not parts()
    code, _, err = run("resume", int(job))
    assert code == 2 and "were deleted" in err


def test_interrupting_the_client_does_not_stop_the_job(run: Any, server: LiveServer, tmp_path: Path) -> None:  # noqa: ANN401
    client = Client(server.url, API_KEY)
    before = {job["job_id"] for job in client.jobs()}
    waiting = command(server, tmp_path, *DOUBLE, "--fn-kwargs", '{"pause_s": 2}')
    while not (new := [job for job in client.jobs() if job["job_id"] not in before and job["status"] == "RUNNING"]):
        time.sleep(0.05)
    time.sleep(0.3)
    waiting.send_signal(signal.SIGINT)
    _, err = waiting.communicate(timeout=30)
    assert waiting.returncode == 130 and f"tinsmith batch cancel {new[0]['job_id']}" in err
    assert batch.Job(new[0]["job_id"], client).wait()["status"] == "SUCCEEDED"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("submit", "nowhere.py", "-i", "in.jsonl", "-o", "o.jsonl"), "no Python file 'nowhere.py'"),
        (
            ("submit", "mappers.py:triple", "-i", "in.jsonl", "-o", "o.jsonl"),
            "has no function and no operations 'triple'",
        ),
        (("submit", "mappers.py", "-i", "in.what", "-o", "o.jsonl"), "format of 'in.what'"),
        (("submit", "mappers.py", "-i", "in.jsonl", "-o", "o.jsonl", "--fn-kwargs", "[1]"), "must be a JSON object"),
        (("submit", "mappers.py", "-i", "in.jsonl", "-o", "in.jsonl"), "pass --yes"),
        (("submit", "mappers.py", "-i", "in.jsonl", "-o", "o.jsonl", "--pool", "moon"), "there is no pool 'moon'"),
        (("submit", "mappers.py", "-i", "in.jsonl", "-o", "o.jsonl", "--batch-size", 0), "batch_size is 0"),
        (("submit", "mappers.py:picky", "-i", "in.xml", "-o", "o.jsonl"), "write FORMAT:in.xml"),
        (("submit", "-i", "in.jsonl", "-o", "o.jsonl"), "FILE.py:NAME or --sample MODEL"),
        (("submit", "-i", "in.jsonl", "-o", "o.jsonl", "--sample", "m", "--sample-options", '{"x": 1}'), "'x'"),
        (("submit", "-i", "in.jsonl", "-o", "o.jsonl", "--sample", "m"), "no column for its prompt"),
        (("show", 999_999), "there is no bulk job 999999"),
        (("logs", 999_999), "there is no bulk job 999999"),
    ],
)
def test_a_refusal_is_one_line(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], says: str
) -> None:
    """Run a command in this process, which gives the same result."""
    (tmp_path / "mappers.py").write_text(MAPPERS)
    (tmp_path / "in.jsonl").write_text('{"text": "t0"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    outcome = CliRunner().invoke(batch_cli.app, [str(argument) for argument in arguments])
    assert outcome.exit_code == 2 and says in outcome.output and "Traceback" not in outcome.output
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit)


def test_a_server_that_is_not_there_is_named(server: LiveServer, tmp_path: Path) -> None:
    elsewhere = LiveServer("http://127.0.0.1:9", tmp_path, server.process)
    _, err = (process := command(elsewhere, tmp_path, "list")).communicate(timeout=30)
    assert process.returncode == 2 and "no connection to http://127.0.0.1:9" in err


def test_a_model_is_asked_and_a_file_may_hold_operations(run: Any, tmp_path: Path) -> None:  # noqa: ANN401
    options = '{"tokens_column": "text", "max_tokens": 3, "into": "said", "tokens": true}'
    (tmp_path / "in.jsonl").write_text('{"text": [1, 2]}\n{"text": [3]}\n')
    (tmp_path / "steps.py").write_text(
        "from tinsmith import batch\n"
        'ask = [batch.Sample("tinsmith/nano", tokens_column="text", max_tokens=3, into="said", tokens=True)]\n'
    )
    flags = ("-i", "in.jsonl", "-o")
    code, _, err = run("submit", *flags, "o.jsonl", "--sample", "tinsmith/nano", "--sample-options", options)
    assert code == 0, err
    code, _, err = run("submit", "steps.py:ask", *flags, "p.jsonl")
    assert code == 0, err
    assert lines(tmp_path / "o.jsonl") == lines(tmp_path / "p.jsonl")
    assert [len(row["said_tokens"]) for row in lines(tmp_path / "o.jsonl")] == [3, 3]


@batch.remote_function
def block_publishing(blocker: str) -> None:
    """Make publishing fail after all batches are done."""
    from pathlib import Path

    import numpy as np

    for rows in batch.load():
        if blocker:
            Path(blocker).write_text("in the way")
        batch.save_results([{"n": row["n"], "image": np.full((2, 2, 3), row["n"], np.uint8)} for row in rows])


def test_a_choice_for_an_existing_output_and_a_target_of_another_format_are_refused(
    run: Any,  # noqa: ANN401
    server: LiveServer,
    tmp_path: Path,
) -> None:
    status, _, complaint = run(*DOUBLE, "--if-exists", "bogus")
    assert (status, complaint) == (
        2,
        "error: --if-exists is 'bogus'; it must be one of error, overwrite, ask, resume\n",
    )
    status, out, _ = run(*DOUBLE, "--json")
    assert status == 0
    job_id = json.loads(out)["job_id"]
    status, _, complaint = run("export", job_id, "out.jsonl", "--if-exists", "resume")
    assert (status, complaint) == (2, "error: --if-exists is 'resume'; it must be one of error, overwrite, ask\n")
    for target in ("copy.parquet", "copy.csv"):
        status, _, complaint = run("export", job_id, target)
        assert status == 2 and f"the target is '{target}', and an export has the bytes of the output" in complaint
        assert not (tmp_path / target).exists()
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"if_exists is 'resume'; it must be one of \['error', 'overwrite'\]"):
        batch.Job(job_id, Client(server.url, API_KEY)).export(f"{tmp_path}/out.jsonl", if_exists="resume")
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert run("export", job_id, "copy.jsonl")[0] == run("export", job_id, "copy.other")[0] == 0


def test_an_export_has_the_bytes_that_publishing_makes(server: LiveServer, tmp_path: Path) -> None:
    def outputs(name: str) -> list[batch.OutputWriter]:
        base = f"{tmp_path}/{name}"
        return [
            batch.JsonWriter(f"{base}/o.jsonl.gz", column="n"),
            batch.ParquetWriter(f"{base}/o.parquet", column="n"),
            batch.ParquetWriter(f"{base}/parts/", column="n"),
            batch.CsvWriter(f"{base}/o.csv", column=["n"]),
            batch.ImageWriter(f"{base}/images/"),
        ]

    def submit(name: str, blocker: str) -> batch.Job:
        (tmp_path / name).mkdir()
        job = batch.from_items([{"n": index} for index in range(10)]).map(
            block_publishing, fn_kwargs={"blocker": blocker}, output=outputs(name), batch_size=3, stream=False,
            client=Client(server.url, API_KEY),
        )  # fmt: skip
        assert isinstance(job, batch.Job)
        return job

    def files(name: str) -> dict[str, bytes]:
        paths = (path for path in (tmp_path / name).rglob("*") if path.is_file())
        return {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in paths}

    finished = submit("whole", "")
    stopped = submit("stopped", f"{tmp_path}/stopped/o.jsonl.gz")
    assert finished.wait()["status"] == "SUCCEEDED" and stopped.wait(check=False)["status"] == "FAILED"
    assert "exists already" in stopped.status()["error"]
    for job, name in ((finished, "of_whole"), (stopped, "of_stopped")):
        infos = [job.export(writer.path, index) for index, writer in enumerate(outputs(name))]
        assert [info.rows for info in infos] == [10] * 5
        assert files(name) == files("whole")
        with pytest.raises(FileExistsError):
            job.export(outputs(name)[2].path, 2)


def test_pools_are_listed(run: Any) -> None:  # noqa: ANN401
    assert "local" in run("pools")[1]
    assert json.loads(run("pools", "--json")[1])[0]["name"] == "local"


def test_lines_are_tagged_and_direct_output_is_kept(tmp_path: Path) -> None:
    at_work = Assignment(4, 0, 9, 2, ())
    logs = JobLogs(tmp_path)
    with logs.path("7-ab").open("w") as file:
        out = TaggedOutput(file, "stdout", lambda: at_work)
        print("one\ntwo", file=out)
        file.write("from a library\n")
        file.flush()
        print('{"json": 1}', end="", file=out)
        assert logs.read(7, "7-ab", 0)[0][-1]["text"] == "from a library", "what has not ended is not told"
        out.flush()
    log_lines, end = logs.read(7, "7-ab", 0)
    tagged = [(line["batch_idx"], line["attempt_id"], line["text"]) for line in log_lines]
    assert tagged == [(4, 2, "one"), (4, 2, "two"), (None, None, "from a library"), (4, 2, '{"json": 1}')]
    assert logs.read(7, "7-ab", end) == ([], end) and logs.workers(7) == [("7-ab", end)]
    assert strip_tags(logs.path("7-ab").read_text()) == 'one\ntwo\nfrom a library\n{"json": 1}\n'
    logs.path("77-ab").write_text("of another job\n")
    for worker_id in ("../7-ab", "77-ab", "7-ab/../7-ab", "7-", "7-zz", "7-ab.log"):
        with pytest.raises(NotFoundError):
            logs.read(7, worker_id, 0)
    logs.sweep(time.time() + 1)
    assert logs.workers(7) == []
