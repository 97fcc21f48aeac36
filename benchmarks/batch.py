"""What bulk jobs cost beside the mapper: a live server, its client and a mapper that does nothing.

`python benchmarks/batch.py [--batches N]` prints a table; the other systems' figures are those that were published or
measured elsewhere (docs/benchmarks), and were not run here.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from live import LiveServer, serving
from tinsmith import batch
from tinsmith.batch.client import Client
from tinsmith.batch.dataset import Dataset
from tinsmith.batch.protocols import JobSpec, Outcome, PartInfo
from tinsmith.batch.state import BatchJobs
from tinsmith.db import Database


@batch.remote_function
def nothing() -> None:
    from tinsmith import batch

    for rows in batch.load():
        batch.save_results(rows)


def run(client: Client, directory: Path, name: str, rows: int, batch_size: int) -> dict[str, Any]:
    source = directory / f"{name}.jsonl"
    source.write_text("".join(json.dumps({"text": f"row {index}"}) + "\n" for index in range(rows)))
    began = time.time()
    job = Dataset(batch.JsonReader(str(source))).map(
        nothing, batch_size=batch_size, output=batch.JsonWriter(f"{source}.out"), stream=False, client=client
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


def set_workers(server: LiveServer, workers: int) -> None:
    import httpx

    headers = {"X-API-Key": "tml-bench"}
    httpx.put(f"{server.url}/api/v1/batch/pools/local", json={"workers": workers}, headers=headers).raise_for_status()


def bookkeeping(directory: Path, batches: int) -> dict[str, float]:
    """The rows of one job, without workers."""
    db = Database(f"sqlite:///{directory / 'rows.db'}")
    db.migrate()
    jobs = BatchJobs(db)
    formats = {"format": "json", "path": "/x"}
    spec = JobSpec("", formats, [{**formats, "path": "/y"}], 1)
    job_id = jobs.create("a", spec)
    jobs.acquire_batch_coordinator(job_id, "t", "here", 60)
    began = time.perf_counter()
    jobs.save_batch_states(job_id, "t", range(batches), batches)
    inserted = time.perf_counter() - began
    claims = jobs.turn(job_id, "t", [], {"w": 1}, 60).claims["w"]
    turns = 200
    began = time.perf_counter()
    for _ in range(turns):
        part = PartInfo("/part", 1, 10, "0" * 64)
        settled = [(claim, Outcome(claim.batch_idx, claim.attempt_id, (part,), 1)) for claim in claims]
        claims = jobs.turn(job_id, "t", settled, {"w": 1}, 60).claims["w"]
    turned = (time.perf_counter() - began) / turns
    began = time.perf_counter()
    jobs.find("a", job_id)
    found = time.perf_counter() - began
    db.close()
    return {"insert": inserted, "turn": turned, "progress": found}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--rows-in-database", type=int, default=1_000_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with serving(directory / "data", "--backend", "fake") as server:
            client = Client(server.url, "tml-bench")
            set_workers(server, 1)
            run(client, directory, "warm", 2, 1)
            small = run(client, directory, "small", 12, 2)
            short = run(client, directory, "short", 10, 1)
            one = run(client, directory, "one", given.batches, 1)
            client.close()
        rows = bookkeeping(directory, given.rows_in_database)
    # The difference of two lengths, so that what a job costs once is in neither.
    each = (one["running"] - short["running"]) / (one["batches"] - short["batches"])
    table = [
        ("", "Sky Batch 0.14.1", "Ray 2.60", "Tinsmith"),
        ("per batch, one worker, trivial mapper", "5.02 s", "4.1 ms (Ray Data, 32 rows)", f"{1000 * each:.1f} ms"),
        ("batches a second and worker", "0.2", "3,134 (2 actors, not durable)", f"{1 / each:.0f}"),
        ("submit to first batch committed", "17.5 s", "5.5 s", f"{small['first']:.2f} s"),
        ("12 rows in 6 batches, end to end", "55.6 s", "5.5 s", f"{small['total']:.2f} s"),
        (f"rows of {given.rows_in_database:,} batches", "-", "-", f"{rows['insert']:.1f} s"),
        ("commit a batch and claim the next, in the database", "-", "-", f"{1000 * rows['turn']:.2f} ms"),
        ("progress of that job", "-", "-", f"{1000 * rows['progress']:.1f} ms"),
    ]
    for index, line in enumerate(table):
        print("| " + " | ".join(line) + " |")
        if index == 0:
            print("|---" * len(line) + "|")


if __name__ == "__main__":
    main()
