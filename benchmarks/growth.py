"""The cost of operations with a long history, and with many adapters.

    python benchmarks/growth.py                         # SQLite, with 1,000, 10,000 and 100,000 stored futures
    python benchmarks/growth.py --database-url postgresql://USER@HOST/NAME      # an empty database of its own
    python benchmarks/growth.py --adapters 40 1000     # of tiny, of which 32 at most are used

For each amount of history a server with the fake backend is started on it. Then a client without the SDK's own cost
sends one optimizer step after the other and polls for each; sweeps of the janitor and the start until the engine is
ready are timed, too. The history is of the same tenant: settled requests of a session that is still open, and for
every ten of them another session that ended. Prints a table; with --json FILE also writes the figures.

With `--adapters` an engine with torch trains them all once and then some of them in turns, with device memory for 40:
a step's time and the engine's memory should not depend on how many there are.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TINKER_TELEMETRY", "0")

import httpx
import sqlalchemy as sa
import tinker
from harness import (
    API_KEY,
    describe_machine,
    process_peak_mib,
    processes,
    random_datum,
    reset_peak,
    start_server,
    summarize_times,
    wait_for,
    write_json,
)
from models import make
from tinker import types

from tinsmith.cluster.engines import Engines
from tinsmith.db.database import Database, now
from tinsmith.db.factory import open_database
from tinsmith.db.postgres_database import PostgresDatabase
from tinsmith.db.schema import FUTURES, MODELS, RESULTS, SAMPLERS, SESSIONS
from tinsmith.server.janitor import Janitor
from tinsmith.settings import Settings
from tinsmith.storage.directories import Directories
from tinsmith.store.audit import Audit
from tinsmith.store.checkpoints import Checkpoints
from tinsmith.store.custom_losses import CustomLosses
from tinsmith.store.exchanges import Exchanges
from tinsmith.store.files import Files
from tinsmith.store.futures import Futures
from tinsmith.store.models import Models
from tinsmith.store.recorded_sequences import Sequences
from tinsmith.store.responses import Responses
from tinsmith.store.sampling_sessions import SamplingSessions
from tinsmith.store.sessions import Sessions
from tinsmith.store.stored_samples import StoredSamples

MODEL = "tinsmith/nano"
TENANT = "local"
OPEN = "open"
SIZES = (1_000, 10_000, 100_000)
AT_A_TIME = 5_000
SWEEPS = 20

HOT, AT_ONCE = 32, 32
"""Adapters that train in turns, and that are made at once."""

RESIDENT, ADAPTER_BYTES = 40, 9_240_576
"""Adapters for which an engine has memory, and the bytes that one of tiny, rank 32 and float32 takes in training."""


def add_history(database: Database, first: int, last: int) -> None:
    """Rows as a life of that length leaves them: for every ten futures one session that ended, with its model."""
    timestamp = now()
    lora = {
        "lora_rank": 8,
        "lora_alpha": 32.0,
        "train_attn": True,
        "train_mlp": True,
        "train_unembed": True,
        "optimizer_type": "adamw",
    }
    for start in range(first, last, AT_A_TIME):
        rows: dict[sa.Table, list[dict[str, Any]]] = {table: [] for table in (SESSIONS, MODELS, SAMPLERS)}
        rows |= {FUTURES: [], RESULTS: []}
        for index in range(start, min(last, start + AT_A_TIME)):
            if index % 10 == 0:
                owner_columns = {"session_id": f"old-{index}", "tenant_id": TENANT, "created_at": timestamp - index}
                end_columns = {
                    "state": "finished",
                    "ended_at": timestamp,
                    "closed_at": timestamp - 7200,
                    "forgotten_at": timestamp,
                }
                rows[SESSIONS].append(owner_columns | end_columns | {"tags": [], "last_heartbeat_at": timestamp})
                model = {"model_id": f"old-{index}:train:0", "state": "unloaded", "applied_seq_id": 7}
                rows[MODELS].append(owner_columns | lora | model | {"base_model": MODEL, "last_request_at": timestamp})
                sampler = {"sampling_session_id": f"old-{index}:sample:0", "base_model": MODEL}
                rows[SAMPLERS].append(owner_columns | sampler)
            rows[FUTURES].append(build_future(index, timestamp))
            rows[RESULTS].append({"request_id": rows[FUTURES][-1]["request_id"], "body": bytes(400)})
        with database.write() as connection:
            for table, table_rows in rows.items():
                connection.execute(table.insert(), table_rows)


def build_future(index: int, timestamp: float) -> dict[str, object]:
    """Half of them samples, half of them operations on one model; one in a hundred refused."""
    row: dict[str, object] = {"tenant_id": TENANT, "session_id": OPEN, "base_model": MODEL, "num_tokens": 32}
    row |= {
        "created_at": timestamp,
        "settled_at": timestamp,
        "body_bytes": 900,
        "settle_order": None,
        "result_type": "json",
    }
    state = "refused" if index % 100 == 99 else "done"
    if index % 2:
        sampler = f"{OPEN}:sample:0"
        row |= {"sampling_session_id": sampler, "seq_id": index, "settle_order": index, "model_id": None}
        return row | {"request_id": f"{sampler}:{index}", "kind": "sample", "state": state}
    model = f"{OPEN}:train:0"
    row |= {"model_id": model, "seq_id": index, "sampling_session_id": None}
    return row | {"request_id": f"{model}:{index}", "kind": "forward_backward", "state": state}


def open_session(database: Database) -> None:
    timestamp = now()
    owner_columns = {"session_id": OPEN, "tenant_id": TENANT, "created_at": timestamp}
    with database.write() as connection:
        active = {"state": "active", "tags": [], "last_heartbeat_at": timestamp + 86400}
        connection.execute(SESSIONS.insert(), owner_columns | active)
        sampler = {"sampling_session_id": f"{OPEN}:sample:0", "base_model": MODEL}
        connection.execute(SAMPLERS.insert(), owner_columns | sampler)


@contextmanager
def run_server(directory: str, database_url: str) -> Iterator[tuple[str, float]]:
    """A server on this data, and how long it took until its engine was ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "TINSMITH_DATABASE_URL": database_url, "TINSMITH_SESSION_TIMEOUT_S": "-1"}
    command = [sys.executable, "-m", "tinsmith.cli", "serve", "--backend", "fake", "--port", str(port)]
    started = time.perf_counter()
    with (Path(directory) / "server.log").open("ab") as log:
        process = subprocess.Popen([*command, "--data-dir", directory], stdout=log, stderr=log, env=environment)
    try:
        wait_for(port, process)
        url = f"http://127.0.0.1:{port}/api/v1"
        while httpx.get(f"{url}/healthz").status_code != 200:
            time.sleep(0.05)
        yield url, time.perf_counter() - started
    finally:
        process.terminate()
        process.wait()


def time_steps(url: str, runs: int) -> dict[str, list[float]]:
    """Milliseconds of each submission, of each poll after it, and of a client's poll that follows its samples."""
    times: dict[str, list[float]] = {"submission": [], "until its result": [], "first page of sessions": []}
    with httpx.Client(base_url=url, headers={"X-API-Key": API_KEY}, timeout=60) as http:

        def ok(path: str, body: object) -> dict:
            while (answer := http.post(path, json=body)).status_code == 408:
                pass
            answer.raise_for_status()
            return answer.json()

        session_id = ok("create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"]
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 8}}
        created = ok("create_model", body)
        ok("retrieve_future", {"request_id": created["request_id"]})
        for seq_id in range(1, runs + 1):
            start = time.perf_counter()
            step = {"model_id": created["model_id"], "seq_id": seq_id, "adam_params": {"learning_rate": 0.1}}
            request_id = ok("optim_step", step)["request_id"]
            submitted = time.perf_counter()
            ok("retrieve_future", {"request_id": request_id})
            times["submission"].append(1000 * (submitted - start))
            times["until its result"].append(1000 * (time.perf_counter() - submitted))
            if seq_id % 10 == 0:
                start = time.perf_counter()
                http.get("sessions", params={"limit": 20}).raise_for_status()
                times["first page of sessions"].append(1000 * (time.perf_counter() - start))
    return times


def time_sweeps(database: Database, directory: str) -> list[float]:
    """Milliseconds of sweeps that find nothing to do."""
    root = Path(directory)
    services: Any = SimpleNamespace(
        settings=Settings(data_dir=root, session_timeout_s=600),
        sessions=Sessions(database),
        models=Models(database),
        sampling_sessions=SamplingSessions(database),
        futures=Futures(database),
        checkpoints=Checkpoints(database, Directories(root / "checkpoints")),
        audit=Audit(database),
        custom_losses=CustomLosses(database),
        sequences=Sequences(database),
        files=Files(database, str(root / "files")),
        stored_samples=StoredSamples(database),
        responses=Responses(database),
        exchanges=Exchanges(database),
    )
    directories = Directories(root / "versions"), Directories(root / "snapshots")
    janitor = Janitor(services, Engines(database, "benchmark"), *directories)
    times = []
    for _ in range(SWEEPS):
        start = time.perf_counter()
        janitor.sweep()
        times.append(1000 * (time.perf_counter() - start))
    return times


def measure_history(database_url: str, runs: int, sizes: list[int]) -> dict[str, dict[str, dict[str, float]]]:
    figures: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
        database = open_database(database_url or f"sqlite:///{directory}/tinsmith.db")
        database.migrate()
        open_session(database)
        stored = 0
        for size in sizes:
            add_history(database, stored, size)
            stored = size
            if isinstance(database, PostgresDatabase):
                with database.write() as connection:  # as the database itself does after some time
                    connection.execute(sa.text("ANALYZE"))
            with run_server(directory, database_url) as (url, start_s):
                times = time_steps(url, runs)
            times["sweep"] = time_sweeps(database, directory)
            times["start until ready"] = [1000 * start_s]
            figures[str(size)] = {name: summarize_times(row_times) for name, row_times in times.items()}
        database.close()
    return figures


def measure_adapters(count: int, model: str, rounds: int) -> tuple[dict[str, float], float]:
    """Times of steps in milliseconds, and MiB of the engine while it does them, with so many adapters."""
    data, adam = [random_datum(32)], types.AdamParams(learning_rate=1e-4)

    def step(client: tinker.TrainingClient) -> float:
        start = time.perf_counter()
        for response_future in [client.forward_backward(data, "cross_entropy"), client.optim_step(adam)]:
            response_future.result()
        return 1000 * (time.perf_counter() - start)

    settings = {"DTYPE": "float32", "RESIDENT_MODEL_BYTES": str(RESIDENT * ADAPTER_BYTES)}
    with (
        start_server(model, settings=settings) as server,
        tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service,
    ):
        name, clients = model.partition("=")[0], []
        for first in range(0, count, AT_ONCE):
            waiting = [service.create_lora_training_client(name, rank=32) for _ in range(min(AT_ONCE, count - first))]
            clients += [model_future.result() for model_future in waiting]
            for client in clients[first:]:
                step(client)
        hot, (engine,) = clients[:HOT], processes(server.pid)["engine"]
        for client in hot:
            step(client)
        reset_peak(engine)
        return summarize_times([step(client) for _ in range(rounds) for client in hot]), process_peak_mib(engine)


def print_adapters(counts: list[int], rounds: int) -> dict[str, dict[str, float]]:
    figures: dict[str, dict[str, float]] = {}
    print(f"{describe_machine()}; a step of 32 tokens, tiny")
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
        model = f"bench/tiny={make('tiny', Path(directory) / 'tiny')}"
        for count in counts:
            times, mib = measure_adapters(count, model, rounds)
            figures[str(count)] = row = times | {"engine_mib": mib}
            print(
                "{:6,} adapters: p50 {p50_ms:.1f}, p95 {p95_ms:.1f} ms; engine {engine_mib:,.0f} MiB".format(
                    count, **row
                )
            )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="stored futures, ascending")
    parser.add_argument("--database-url", default="", help="an empty Postgres database instead of SQLite")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--adapters", type=int, nargs="+", metavar="COUNT", help="with so many adapters instead")
    args = parser.parse_args()
    if args.adapters:
        write_json(args.json, print_adapters(args.adapters, max(1, args.runs // HOT)))
        return
    figures = measure_history(args.database_url, args.runs, args.sizes)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; p50 / p95, milliseconds")
    names = list(next(iter(figures.values())))
    print("| stored futures | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for size, row in figures.items():
        cells = [f"{row[name]['p50_ms']:.1f} / {row[name]['p95_ms']:.1f}" for name in names]
        print(f"| {int(size):,} | " + " | ".join(cells) + " |")
    write_json(args.json, figures)


if __name__ == "__main__":
    main()
