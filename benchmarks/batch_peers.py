"""Bulk jobs beside Ray Data, Hugging Face datasets and a pool of processes: whole jobs, the same rows and function.

    python benchmarks/batch.py --peers                           # batches of 1, 32 and 1,000 rows; five runs of each
    python benchmarks/batch.py --peers --sizes 32 --runs 3

A run reads a file of JSON lines, gives each batch to a function, and ends when the output's last row can be read. Two
workers each, on two cores. Only Tinsmith's output survives a kill at any moment: the others write once, at the end.
All stay alive between their runs and take turns (`interleaving.py`): starting Ray or a server is in no figure.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from interleaving import Child, Run, compute_speedup, format_spread, run_in_turns, serve_requests, summarize_spread

ROWS = {1: 4_000, 32: 64_000, 1000: 400_000}
"""Rows of a run by batch size, so that most of it is batches and not the start of a job."""
WORKERS = 2
PEERS = ("ray", "datasets", "pool")

Rows = list[dict[str, Any]]


def transform_rows(rows: Rows) -> Rows:
    return [{"text": row["text"].upper(), "length": len(row["text"])} for row in rows]


def transform_columns(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
    """Apply the function to a batch of columns in place of rows."""
    return {"text": [text.upper() for text in batch["text"]], "length": [len(text) for text in batch["text"]]}


def _run_ray(source: str, target: str, batch_size: int) -> None:
    import ray

    if not ray.is_initialized():
        ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False

    def map_batch(batch: Any) -> Any:  # noqa: ANN401  columns of numpy arrays
        return transform_columns({"text": list(batch["text"])})

    data = ray.data.read_json(source, lines=True, override_num_blocks=WORKERS)
    data.map_batches(map_batch, batch_size=batch_size, concurrency=WORKERS).write_json(target)


def _run_datasets(source: str, target: str, batch_size: int) -> None:
    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as cache:
        data = datasets.Dataset.from_json(source, cache_dir=cache)
        mapped = data.map(
            transform_columns, batched=True, batch_size=batch_size, num_proc=WORKERS, load_from_cache_file=False
        )
        mapped.to_json(target)


def _run_pool(source: str, target: str, batch_size: int) -> None:
    def read_batches() -> Iterator[Rows]:
        rows: Rows = []
        with open(source) as lines:
            for line in lines:
                rows.append(json.loads(line))
                if len(rows) == batch_size:
                    yield rows
                    rows = []
        if rows:
            yield rows

    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool, open(target, "w") as out:
        for results in pool.imap(transform_rows, read_batches(), chunksize=max(1, 1000 // batch_size)):
            out.writelines(json.dumps(row) + "\n" for row in results)


def serve_child(name: str) -> None:
    """Serve `Child`: return the seconds of one run per request."""
    run: Callable[[str, str, int], None] = {"ray": _run_ray, "datasets": _run_datasets, "pool": _run_pool}[name]
    for request, answer in serve_requests():
        began = time.perf_counter()
        run(request["source"], request["target"], request["batch_size"])
        seconds = time.perf_counter() - began
        target = Path(request["target"])
        files = sorted(target.rglob("*.json")) if target.is_dir() else [target]
        rows = sum(file.read_bytes().count(b"\n") for file in files)
        assert rows == request["rows"], f"{name} wrote {rows} rows of {request['rows']}"
        answer({"seconds": seconds})


def write_rows(path: Path, rows: int) -> Path:
    path.write_text("".join(json.dumps({"text": f"row {index}"}) + "\n" for index in range(rows)))
    return path


def _empty_directory(out: Path) -> Path:
    """Return the path of the output in an empty directory."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    return out / "rows.jsonl"


def _time_our_job(run_job: Callable[[Path, Path, int], float], source: Path, out: Path, batch_size: int) -> float:
    return run_job(source, _empty_directory(out), batch_size)


def _time_peer(peer: Child, source: Path, out: Path, batch_size: int, rows: int) -> float:
    return peer.ask(source=str(source), target=str(_empty_directory(out)), batch_size=batch_size, rows=rows)["seconds"]


def compare_rates(sizes: list[int], runs: int, run_job: Callable[[Path, Path, int], float]) -> list[list[str]]:
    """A table of rows a second. `run_job` runs one job of ours, from a file to a file
    with a batch size, and returns its seconds.
    """
    table = [["batch size", "rows", "Tinsmith, rows/s", *(f"{name}, rows/s; ours over theirs" for name in PEERS)]]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tinsmith-bench-")))
        children = {name: stack.enter_context(Child("batch_peers.py", name)) for name in PEERS}
        for size in sizes:
            rows, out = ROWS[size], directory / "out"
            source = write_rows(directory / f"{size}.jsonl", rows)
            contestants: dict[str, Run] = {"Tinsmith": partial(_time_our_job, run_job, source, out, size)}
            contestants |= {name: partial(_time_peer, peer, source, out, size, rows) for name, peer in children.items()}
            seconds_by_name = run_in_turns(
                contestants, runs, lambda name, reason: print(f"{name}: {reason}", file=sys.stderr)
            )
            our_seconds = seconds_by_name["Tinsmith"]
            line = [
                str(size),
                f"{rows:,}",
                format_spread(summarize_spread([rows / seconds for seconds in our_seconds])),
            ]
            for name in PEERS:
                if name not in seconds_by_name:
                    line.append("failed")
                    continue
                rate = format_spread(summarize_spread([rows / seconds for seconds in seconds_by_name[name]]))
                line.append(f"{rate}; {format_spread(compute_speedup(our_seconds, seconds_by_name[name]), '.2f')}")
            table.append(line)
    return table


if __name__ == "__main__":
    serve_child(sys.argv[1])
