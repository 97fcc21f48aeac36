"""Logs of workers are bounded in size: the oldest output goes, and the log says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tinsmith.batch.worker import logs
from tinsmith.batch.worker.logs import JobLogs, drop_oldest

LIMIT = 256 * 1024


def write_lines(path: Path, count: int, first: int = 0) -> None:
    with path.open("a") as log:
        log.writelines(f"line {index} {'x' * 80}\n" for index in range(first, first + count))


def disk_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def read_all(job_logs: JobLogs, worker_id: str, after: int = 0) -> list[str]:
    texts: list[str] = []
    while True:
        lines, end = job_logs.read(7, worker_id, after)
        if not lines:
            return texts
        texts += [line["text"] for line in lines]
        after = end


def test_a_log_keeps_its_newest_lines_and_says_what_it_dropped(tmp_path: Path) -> None:
    job_logs = JobLogs(tmp_path)
    path = job_logs.path("7-ab")
    write_lines(path, 2000)
    drop_oldest(path, LIMIT)
    assert path.stat().st_size == disk_bytes(path) or disk_bytes(path) <= path.stat().st_size + 4096
    assert read_all(job_logs, "7-ab")[0].startswith("line 0 "), "it is below its limit"
    _, position = job_logs.read(7, "7-ab", 0)
    with path.open("ab", buffering=0) as writer:  # as the worker's process has it open
        write_lines(path, 18_000, 2000)
        drop_oldest(path, LIMIT)
        assert disk_bytes(path) <= LIMIT
        writer.write(b"written after that\n")
    for after in (0, 5000, position):
        note, *texts = read_all(job_logs, "7-ab", after)
        assert "bytes of older output were dropped: the limit of a log is 262144 bytes" in note
        assert texts[-1] == "written after that" and texts[-2].startswith("line 19999 ")
        assert all(text.startswith("line ") for text in texts[:-1])
    write_lines(path, 20_000, 20_000)
    drop_oldest(path, LIMIT)
    texts = read_all(job_logs, "7-ab")
    assert disk_bytes(path) <= LIMIT and texts[-1].startswith("line 39999 ")
    assert sum("were dropped" in text for text in texts) == 1


def test_the_workers_that_wrote_first_give_room_to_the_others_of_their_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "WORKER_LOG_BYTES", LIMIT)
    monkeypatch.setattr(logs, "JOB_LOG_BYTES", 4 * LIMIT)
    job_logs = JobLogs(tmp_path)
    names = [f"7-{index:02x}" for index in range(12)] + ["8-00"]
    for age, name in enumerate(reversed(names)):
        write_lines(job_logs.path(name), 2500)
        os.utime(job_logs.path(name), (1e9 - age, 1e9 - age))
    job_logs.sweep(0)
    sizes = [disk_bytes(job_logs.path(name)) for name in names]
    assert sum(sizes[:-1]) <= 4 * LIMIT and sizes[0] < sizes[-2] == sizes[-1]
    assert "were dropped" in read_all(job_logs, names[0])[0] and "line 0" in read_all(job_logs, names[-2])[0]
    job_logs.sweep(2e9)
    assert not list(tmp_path.iterdir())


def test_a_process_that_prints_much_bounds_its_own_log(tmp_path: Path) -> None:
    path = tmp_path / "batch-7-ab.log"
    script = f"""
from tinsmith.batch.worker import logs
logs.WORKER_LOG_BYTES = {LIMIT}
logs.write_to({str(path)!r}, 1, 2)
logs.tag_output(lambda: None)
for index in range(30_000):
    print("line", index, flush=True)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert path.stat().st_size > 4 * LIMIT and disk_bytes(path) <= 2 * LIMIT
    assert read_all(JobLogs(tmp_path), "7-ab")[-1] == "line 29999"
