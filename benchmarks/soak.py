"""Many clients of the real SDK for a long time: training, sampling, checkpoints, clients that come and go.

    python benchmarks/soak.py                               # 64 clients, 15 minutes, tinsmith/nano, a server of its own
    python benchmarks/soak.py --clients 15 --minutes 2
    python benchmarks/soak.py --backend fake                # the server's part alone, at ten times the rate

Nothing may fail, and neither the server nor the engine may grow. Latencies are taken by kind of operation; memory, open
files and the database's size once a second. The slope of the memory is that of a line through the last two thirds of
the run. Results of ended sessions are forgotten after a minute rather than an hour, so that this happens many times.
Prints tables; with --json FILE also writes the figures and the samples. Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import tinker
from harness import API_KEY, start_server, summarize_times
from tinker import types

MODEL = "tinsmith/nano"
ADAM = types.AdamParams(learning_rate=1e-4)
SERVER_SETTINGS = {"SESSION_SWEEP_S": "10", "RESULT_GRACE_S": "60"}
MAX_REPORTED = 5
MIB = 2**20


class Worker:
    """Some of the clients, one thread each, until the deadline."""

    def __init__(self, url: str, deadline: float) -> None:
        self.url = url
        self.deadline = deadline
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        self.errors: list[str] = []

    def run(self, indices: range) -> None:
        threads = [threading.Thread(target=self._live, args=(index,)) for index in indices]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _live(self, index: int) -> None:
        """One client after the other of the same kind; an error ends the client and not the run."""
        life = (self.trains, self.samples, self.reinforces, self.saves, self.visits)[index % 5]
        dice = random.Random(index)
        time.sleep(dice.uniform(0, 5))
        while self.is_on():
            try:
                with tinker.ServiceClient(base_url=self.url, api_key=API_KEY) as service:
                    life(service, dice)
            except Exception as error:  # noqa: BLE001  whatever it is, it is to be reported
                self.errors.append(f"{life.__name__}: {type(error).__name__}: {error}")
                time.sleep(1)

    def is_on(self) -> bool:
        return time.time() < self.deadline

    @contextmanager
    def time_block(self, kind: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.times[kind].append(1000 * (time.perf_counter() - start))

    # The kinds of client.

    def trains(self, service: tinker.ServiceClient, dice: random.Random) -> None:
        """Supervised steps, the next one sent before the last one is read."""
        model = self._model(service)
        for _ in range(200):
            if not self.is_on():
                return
            with self.time_block("step of 4 datums"):
                passed = model.forward_backward([datum(dice) for _ in range(4)], "cross_entropy")
                stepped = model.optim_step(ADAM)
                assert np.isfinite(passed.result().metrics["loss:sum"])
                stepped.result()

    def samples(self, service: tinker.ServiceClient, dice: random.Random) -> None:
        """Samples of the base model, several at once."""
        sampler = service.create_sampling_client(base_model=MODEL).result()
        for _ in range(100):
            if not self.is_on():
                return
            size = dice.choice((1, 4, 8))
            params = types.SamplingParams(max_tokens=dice.randrange(4, 33), temperature=0.8)
            with self.time_block(f"{size} samples at once"):
                futures = [sampler.sample(prompt(dice), 1, params) for _ in range(size)]
                for future in futures:
                    assert future.result().sequences[0].tokens
            with self.time_block("logprobs of a prompt"):
                assert len(sampler.compute_logprobs(prompt(dice)).result()) > 0

    def reinforces(self, service: tinker.ServiceClient, dice: random.Random) -> None:
        """Publish, sample, train on the samples."""
        model = self._model(service)
        for _ in range(50):
            if not self.is_on():
                return
            with self.time_block("publish"):
                sampler = model.save_weights_and_get_sampling_client().result()
            model_input = prompt(dice)
            with self.time_block("group of 4 samples"):
                group = sampler.sample(model_input, 4, types.SamplingParams(max_tokens=12, temperature=1.0)).result()
            data = [rollout(model_input, sequence.tokens, sequence.logprobs) for sequence in group.sequences]
            with self.time_block("step on rollouts"):
                passed = model.forward_backward(data, "importance_sampling")
                stepped = model.optim_step(ADAM)
                passed.result()
                stepped.result()

    def saves(self, service: tinker.ServiceClient, dice: random.Random) -> None:
        """Checkpoints: saved, overwritten, loaded, resumed from."""
        model = self._model(service)
        path = ""
        for index in range(20):
            if not self.is_on():
                return
            model.forward_backward([datum(dice)], "cross_entropy").result()
            model.optim_step(ADAM).result()
            with self.time_block("save_state"):
                path = model.save_state(f"state-{index % 3}", overwrite=index >= 3).result().path
            if index % 5 == 0:
                fresh = self._model(service)
                with self.time_block("load_state"):
                    fresh.load_state_with_optimizer(path).result()
        with self.time_block("resume from a checkpoint"):
            service.create_training_client_from_state_with_optimizer(path).result()

    def visits(self, service: tinker.ServiceClient, dice: random.Random) -> None:
        """One step of a new model in a new session."""
        model = self._model(service)
        model.forward_backward([datum(dice)], "cross_entropy").result()
        model.optim_step(ADAM).result()
        time.sleep(dice.uniform(0, 2))

    def _model(self, service: tinker.ServiceClient) -> tinker.TrainingClient:
        with self.time_block("create a model"):
            return service.create_lora_training_client(MODEL, rank=8).result()


def prompt(dice: random.Random) -> types.ModelInput:
    return types.ModelInput.from_ints([dice.randrange(400) for _ in range(dice.randrange(8, 64))])


def datum(dice: random.Random) -> types.Datum:
    tokens = [dice.randrange(400) for _ in range(dice.randrange(17, 97))]
    weights = np.ones(len(tokens) - 1, np.float32)
    inputs = {"target_tokens": np.array(tokens[1:]), "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def rollout(model_input: types.ModelInput, answer: list[int], logprobs: list[float] | None) -> types.Datum:
    tokens = [*model_input.to_ints(), *answer]
    before = len(tokens) - 1 - len(answer)
    assert logprobs is not None
    inputs = {
        "target_tokens": np.array(tokens[1:]),
        "logprobs": np.array([0.0] * before + logprobs, np.float32),
        "advantages": np.array([0.0] * before + [1.0] * len(answer), np.float32),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


# The side that watches.


def observe(pid: int, data_dir: Path, seconds: float, is_running: Callable[[], bool]) -> list[dict[str, float]]:
    """One row a second of the server, its engine (of which there is one) and their files."""
    rows = []
    start = time.monotonic()
    for tick in itertools.count(1):
        engines = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        row = {"at_s": time.monotonic() - start, "server_mib": resident(pid), "open_files": float(open_files(pid))}
        row["engine_mib"] = max((resident(int(engine)) for engine in engines), default=0.0)
        row["engine_pid"] = float(engines[0]) if engines else 0.0
        for name in ("tinsmith.db", "tinsmith.db-wal"):
            path = data_dir / name
            row[name] = path.stat().st_size / MIB if path.exists() else 0.0
        rows.append(row)
        if not is_running() or time.monotonic() - start > 3 * seconds + 300:
            return rows
        time.sleep(max(0.0, start + tick - time.monotonic()))
    raise AssertionError


def resident(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), 0.0)


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def slope_per_hour(rows: list[dict[str, float]], name: str) -> float:
    """The slope of a line through the last two thirds of the rows."""
    last_rows = rows[len(rows) // 3 :]
    if len(last_rows) < 3:
        return 0.0
    return 3600 * float(np.polyfit([row["at_s"] for row in last_rows], [row[name] for row in last_rows], 1)[0])


def data_dir_of(pid: int) -> Path:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return Path(words[words.index("--data-dir") + 1])


def soak(args: argparse.Namespace) -> dict[str, object]:
    with start_server(None, "--backend", args.backend) as server:
        url, pid = server.url, server.pid
        data_dir = data_dir_of(pid)
        seconds = 60 * args.minutes
        command = [sys.executable, __file__, "--worker", url, "--deadline", str(time.time() + seconds)]
        workers = []
        for indices in np.array_split(range(args.clients), args.processes):
            bounds = ["--numbers", str(indices[0]), str(indices[-1] + 1)]
            workers.append(subprocess.Popen([*command, *bounds], stdout=subprocess.PIPE, text=True))
        reports: list[str] = []
        readers = [
            threading.Thread(target=lambda process=worker: reports.append(process.communicate()[0]))
            for worker in workers
        ]
        for reader in readers:
            reader.start()
        rows = observe(pid, data_dir, seconds, lambda: any(reader.is_alive() for reader in readers))
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
        for reader in readers:
            reader.join()
        log = (data_dir / "server.log").read_text(errors="replace").splitlines()
    return report(args, [json.loads(text) for text in reports if text], len(workers), rows, log)


def report(
    args: argparse.Namespace, reports: list[dict], expected: int, rows: list[dict[str, float]], log: list[str]
) -> dict[str, object]:
    times: defaultdict[str, list[float]] = defaultdict(list)
    errors = [error for worker_report in reports for error in worker_report["errors"]]
    errors += ["a process of clients ended without a report"] * (expected - len(reports))
    for worker_report in reports:
        for kind, operation_times in worker_report["times"].items():
            times[kind] += operation_times
    kinds = {
        kind: summarize_times(operation_times) | {"p99_ms": percentile(operation_times, 0.99)}
        for kind, operation_times in sorted(times.items())
    }
    memory = {
        name: {
            "first": rows[min(10, len(rows) - 1)][name],
            "third": rows[len(rows) // 3][name],
            "last": rows[-1][name],
            "most": max(row[name] for row in rows),
            "slope_per_hour": slope_per_hour(rows, name),
        }
        for name in ("server_mib", "engine_mib", "open_files", "tinsmith.db", "tinsmith.db-wal")
    }
    error_lines = [line for line in log if "error" in line.lower() or "traceback" in line.lower()]
    engines = len({row["engine_pid"] for row in rows} - {0.0})
    load = os.getloadavg()[0]
    print(f"{args.clients} clients, {rows[-1]['at_s'] / 60:.1f} min, {os.cpu_count()} cores, load {load:.1f}")
    print("| operation | runs | p50 ms | p95 ms | p99 ms | max ms |\n|---|---|---|---|---|---|")
    for kind, row in kinds.items():
        cells = " | ".join(f"{row[name]:,.0f}" for name in ("p50_ms", "p95_ms", "p99_ms", "max_ms"))
        print(f"| {kind} | {row['runs']:,} | {cells} |")
    print("| | after 10 s | after a third | at the end | most | slope an hour |\n|---|---|---|---|---|---|")
    for name, row in memory.items():
        print(f"| {name} | " + " | ".join(f"{value:,.1f}" for value in row.values()) + " |")
    print(
        f"errors: {len(errors)}; engine processes: {engines}; lines of the log that tell of errors: {len(error_lines)}"
    )
    for text in [*errors[:MAX_REPORTED], *error_lines[:MAX_REPORTED]]:
        print(text)
    return {"kinds": kinds, "memory": memory, "errors": errors, "engines": engines, "log": error_lines, "rows": rows}


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--backend", default="torch", choices=["fake", "torch"])
    parser.add_argument("--processes", type=int, default=3, help="that the clients are spread over")
    parser.add_argument("--json", type=Path, help="also write the figures and the samples to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--numbers", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker = Worker(args.worker, args.deadline)
        worker.run(range(*args.numbers))
        print(json.dumps({"times": worker.times, "errors": worker.errors}))
        return
    os.environ.update({f"TINSMITH_{name}": value for name, value in SERVER_SETTINGS.items()})
    figures = soak(args)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    sys.exit(1 if figures["errors"] or figures["engines"] != 1 else 0)


if __name__ == "__main__":
    main()
