"""The overhead of bulk jobs: a live server, its client and a mapper that does nothing.

`python benchmarks/batch.py --peers` compares whole jobs with others in turns (`batch_peers.py`).
`python benchmarks/batch.py [--batches N] [--ray PYTHON]` prints a table of details. Ray Data runs beside it where an
interpreter that has `ray[data]` is named; the other figures of the others are those that were published or measured
elsewhere (docs/benchmarks), and were not run here. `--rows-in-database` is the size of the job whose bookkeeping is
timed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import batch_peers
import httpx
import sqlalchemy as sa

from support.live import LiveServer, serving  # pyright: ignore[reportMissingImports]
from tinsmith import batch
from tinsmith.batch.client.dataset import Dataset
from tinsmith.batch.client.http import Client
from tinsmith.batch.coordinator.state import BatchJobs
from tinsmith.batch.types import AttemptOutcome, JobSpec, PartInfo, RowRange
from tinsmith.db.factory import open_database

RAY = """
import sys, time
began = time.time()
import ray
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
started = time.time()
rows, source, target = int(sys.argv[1]), sys.argv[2], sys.argv[3]
data = ray.data.read_json(source, override_num_blocks=1)
data.map_batches(lambda rows: rows, batch_size=int(sys.argv[4])).write_json(target)
print(f"{started - began} {time.time() - started}")
"""


@batch.remote_function
def pass_rows_on() -> None:
    from tinsmith import batch

    for rows in batch.load():
        batch.save_results(rows)


def time_job(client: Client, directory: Path, name: str, rows: int, batch_size: int) -> dict[str, Any]:
    source = directory / f"{name}.jsonl"
    source.write_text("".join(json.dumps({"text": f"row {index}"}) + "\n" for index in range(rows)))
    began = time.time()
    job = Dataset(batch.JsonReader(str(source))).map(
        pass_rows_on, batch_size=batch_size, output=batch.JsonWriter(f"{source}.out"), stream=False, client=client
    )
    first = None
    while first is None:
        if job.status()["batch_completed_batches"]:
            first = time.time()
        time.sleep(0.01)
    status = job.wait()
    return {
        "first": first - began,
        "total": time.time() - began,
        "running": status["ended_at"] - status["started_at"],
        "batches": status["batch_total_batches"],
    }


def time_ray_data(python: str, directory: Path, rows: int, batch_size: int) -> tuple[float, float]:
    """Seconds to start Ray, and from then to the last output."""
    source = directory / f"ray-{rows}.jsonl"
    source.write_text("".join(json.dumps({"text": f"row {index}"}) + "\n" for index in range(rows)))
    command = [python, "-c", RAY, str(rows), str(source), f"{source}.out", str(batch_size)]
    completed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    start_s, run_s = completed.stdout.split()[-2:]
    return float(start_s), float(run_s)


def measure_delays(server: LiveServer, client: Client, directory: Path) -> dict[str, float]:
    """Measure, during one long job, the delays of a new worker, of a killed one and of a cancellation."""
    source = directory / "long.jsonl"
    source.write_text('{"n": 1}\n' * 20_000)
    job = Dataset(batch.JsonReader(str(source))).map(
        sleep_for_each_row, batch_size=1, output=batch.JsonWriter(f"{source}.out"), stream=False, client=client
    )

    def ready_workers() -> set[str]:
        return {worker["worker_id"] for worker in job.status()["workers"] if worker["state"] == "ready"}

    time_until(lambda: job.status()["batch_completed_batches"] > 0)
    set_workers(server, 2)
    added = time_until(lambda: len(ready_workers()) == 2)
    child = "tinsmith.batch.worker.child"
    before = set(server.child_pids(child))
    pid = _find_worker_pid(min(ready_workers()), server)
    os.kill(pid, signal.SIGKILL)
    replaced = time_until(lambda: set(server.child_pids(child)) - before)
    began = time.monotonic()
    job.cancel()
    job.wait(check=False)
    cancelled = time.monotonic() - began
    set_workers(server, 1)
    return {"added": added, "replaced": replaced, "cancelled": cancelled}


@batch.remote_function
def sleep_for_each_row() -> None:
    import time

    from tinsmith import batch

    for rows in batch.load():
        time.sleep(0.05)
        batch.save_results(rows)


def _find_worker_pid(worker_id: str, server: LiveServer) -> int:
    db = open_database(f"sqlite:///{server.data_dir / 'tinsmith.db'}")
    try:
        with db.read() as connection:
            query = sa.text("SELECT pid_or_actor FROM batch_worker WHERE worker_id = :worker")
            return int(connection.scalar(query, {"worker": worker_id}) or 0)
    finally:
        db.close()


def time_until(condition: Any) -> float:  # noqa: ANN401
    began = time.monotonic()
    while not condition():
        time.sleep(0.02)
    return time.monotonic() - began


def time_random_batch(directory: Path, rows: int) -> float:
    """Seconds for a batch of 32 rows anywhere in a file whose rows have been found."""
    source = directory / "large.jsonl"
    source.write_text("".join(f'{{"n":{index}}}\n' for index in range(rows)))
    reader = batch.JsonReader(str(source))
    assert len(reader) == rows
    starts = [random.randrange(rows - 32) for _ in range(200)]
    began = time.perf_counter()
    for start in starts:
        assert reader.download_batch(start, start + 31, str(directory))[0]["n"] == start
    return (time.perf_counter() - began) / len(starts)


def measure_publishing(directory: Path) -> tuple[float, int]:
    """Seconds and the most bytes of memory for 1,000 parts of 100 KB, in a process like that of a worker."""
    parts = directory / "parts"
    writer = batch.JsonWriter(str(directory / "published.jsonl"))
    with (directory / "winners").open("w") as winners:
        for index in range(1000):
            part = writer.write_part([{"text": "x" * 100_000}], RowRange(index, index), str(parts / str(index)))
            winners.write(json.dumps([part.to_dict()]) + "\n")
    code = """
import re, sys, time
from tinsmith.batch.formats import registry
from tinsmith.batch.worker import io_operations
began = time.perf_counter()
winners = io_operations.CommittedParts(sys.argv[1], 0)
batch.OutputWriter.from_dict({"format": "json", "path": sys.argv[2]}).publish(winners, sys.argv[3], "error")
print(time.perf_counter() - began, re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""
    command = [sys.executable, "-c", code, str(directory / "winners"), writer.path, str(parts)]
    seconds, kib = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(seconds), int(kib) * 1024


def set_workers(server: LiveServer, workers: int) -> None:
    headers = {"X-API-Key": "tml-bench"}
    httpx.put(f"{server.url}/api/v1/batch/pools/local", json={"workers": workers}, headers=headers).raise_for_status()


def measure_bookkeeping(directory: Path, batches: int) -> dict[str, float]:
    """The rows of one job, without workers."""
    db = open_database(f"sqlite:///{directory / 'rows.db'}")
    db.migrate()
    jobs = BatchJobs(db)
    formats = {"format": "json", "path": "/x"}
    spec = JobSpec("", formats, [{**formats, "path": "/y"}], 1)
    job_id = jobs.create("a", spec)
    jobs.acquire_batch_coordinator(job_id, "t", "here", 60)
    other_id = jobs.create("b", spec)
    waits: list[float] = []
    stop = threading.Event()

    def write_concurrently() -> None:
        while not stop.wait(0.005):
            began = time.perf_counter()
            jobs.cancel("b", other_id)
            waits.append(time.perf_counter() - began)

    writer = threading.Thread(target=write_concurrently)
    writer.start()
    began, cpu_before = time.perf_counter(), time.process_time()
    jobs.save_batch_states(job_id, "t", range(batches), batches)
    inserted, cpu = time.perf_counter() - began, time.process_time() - cpu_before
    stop.set()
    writer.join()
    claims = jobs.settle_and_claim(job_id, "t", [], {"w": 1}, 60).claims["w"]
    turns = 200
    began = time.perf_counter()
    for _ in range(turns):
        part = PartInfo("/part", 1, 10, "0" * 64)
        settled = [(claim, AttemptOutcome(claim.batch_idx, claim.attempt_id, (part,), 1)) for claim in claims]
        claims = jobs.settle_and_claim(job_id, "t", settled, {"w": 1}, 60).claims["w"]
    turn_s = (time.perf_counter() - began) / turns
    began = time.perf_counter()
    jobs.find("a", job_id)
    progress_s = time.perf_counter() - began
    db.close()
    return {"insert": inserted, "cpu": cpu, "wait": max(waits, default=0.0), "turn": turn_s, "progress": progress_s}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--rows-in-database", type=int, default=1_000_000)
    parser.add_argument("--ray", help="an interpreter that has ray[data]")
    parser.add_argument("--peers", action="store_true", help="whole jobs beside Ray Data, datasets and a pool")
    parser.add_argument("--sizes", nargs="+", type=int, choices=batch_peers.ROWS, default=list(batch_peers.ROWS))
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    if args.peers:
        print_table(compare_with_peers(args.sizes, args.runs))
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with serving(directory / "data", "--backend", "fake") as server:
            client = Client(server.url, "tml-bench")
            set_workers(server, 1)
            cold = time_job(client, directory, "cold", 12, 2)
            small = time_job(client, directory, "small", 12, 2)
            short = time_job(client, directory, "short", 10, 1)
            long = time_job(client, directory, "one", args.batches, 1)
            prompt = measure_delays(server, client, directory)
            client.close()
        rows = measure_bookkeeping(directory, args.rows_in_database)
        at_random = time_random_batch(directory, 1_000_000)
        published_s, published_bytes = measure_publishing(directory)
        ray_cells = "not run: no --ray", "not run: no --ray"
        if args.ray:
            start_s, few_s = time_ray_data(args.ray, directory, 12, 2)
            # Its own start of a job varies by more than some hundred batches take.
            less_s, more_s = (time_ray_data(args.ray, directory, times * args.batches, 1)[1] for times in (2, 10))
            ray_batch_s = (more_s - less_s) / (8 * args.batches)
            ray_cells = f"{1000 * ray_batch_s:.1f} ms", f"{start_s + few_s:.1f} s ({few_s:.1f} s without its start)"
    # The difference of two lengths, so that what a job costs once is in neither.
    batch_s = (long["running"] - short["running"]) / (long["batches"] - short["batches"])
    table = [
        ("", "Sky Batch 0.14.1", "Ray Data, here", "Tinsmith"),
        ("per batch, one worker, trivial mapper", "5.02 s", ray_cells[0], f"{1000 * batch_s:.1f} ms"),
        ("batches a second and worker", "0.2", "-", f"{1 / batch_s:.0f}"),
        ("submit to first batch committed, first job", "17.5 s", "-", f"{cold['first']:.2f} s"),
        ("submit to first batch committed, later job", "17.5 s", "-", f"{small['first']:.2f} s"),
        ("12 rows in 6 batches, end to end", "55.6 s", ray_cells[1], f"{small['total']:.2f} s"),
        ("a worker more, until it is ready", "10 s", "-", f"{prompt['added']:.2f} s"),
        ("a worker killed, until another is ready", "60 s", "-", f"{prompt['replaced']:.2f} s"),
        ("cancelled, until the job has ended", "5 s", "-", f"{prompt['cancelled']:.2f} s"),
        (f"rows of {args.rows_in_database:,} batches", "-", "-", f"{rows['insert']:.1f} s ({rows['cpu']:.1f} s CPU)"),
        ("longest wait of another writer meanwhile", "-", "-", f"{1000 * rows['wait']:.0f} ms"),
        ("commit a batch and claim the next, in the database", "-", "-", f"{1000 * rows['turn']:.2f} ms"),
        ("progress of that job", "-", "-", f"{1000 * rows['progress']:.1f} ms"),
        ("32 rows anywhere in a file of a million", "53 ms", "-", f"{1000 * at_random:.2f} ms"),
        ("100 MB in 1,000 parts made an output", "5.4 s", "-", f"{published_s:.2f} s"),
        ("... and the most memory of the process", "559 MB", "-", f"{published_bytes / 1e6:.0f} MB"),
    ]
    print_table([list(line) for line in table])


@batch.remote_function
def transform_rows() -> None:
    from tinsmith import batch

    for rows in batch.load():
        batch.save_results([{"text": row["text"].upper(), "length": len(row["text"])} for row in rows])


def compare_with_peers(sizes: list[int], runs: int) -> list[list[str]]:
    with tempfile.TemporaryDirectory() as name, serving(Path(name) / "data", "--backend", "fake") as server:
        client = Client(server.url, "tml-bench")
        set_workers(server, batch_peers.WORKERS)

        def run_job(source: Path, target: Path, batch_size: int) -> float:
            began = time.perf_counter()
            output = batch.JsonWriter(str(target))
            Dataset(batch.JsonReader(str(source))).map(
                transform_rows, batch_size=batch_size, output=output, stream=False, client=client
            ).wait()
            return time.perf_counter() - began

        return batch_peers.compare_rates(sizes, runs, run_job)


def print_table(table: list[list[str]]) -> None:
    print(f"load average {os.getloadavg()[0]:.1f}")
    for index, line in enumerate(table):
        print("| " + " | ".join(line) + " |")
        if index == 0:
            print("|---" * len(line) + "|")


if __name__ == "__main__":
    main()
