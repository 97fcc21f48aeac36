"""The cost of one tenant's flood to another tenant.

    python benchmarks/fairness.py                     # starts a server with tinsmith/nano, measures, stops it
    python benchmarks/fairness.py --step-tokens 8192  # with longer steps
    python benchmarks/fairness.py --only mixed        # default settings, passes and samples at once

One tenant queues thousands of small passes, then a stream of large ones; another sends one request at a time with the
real SDK and waits for each. Prints the other's latencies without and with the flood, the time of a step (between the
moments at which the flood's results were stored; full steps only), and by how many steps the 95th percentile grew.

`mixed` runs with the default settings. One tenant queues 200 passes of 2,048 tokens and 500 long samples. A second
tenant trains: each of its steps is one small forward_backward and one optim_step. A third tenant asks for samples of 8
tokens, one after the other. Alone and under the flood take turns, each on a server of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

import httpx
import numpy as np
import sqlalchemy as sa
import tinker
from harness import random_datum
from tinker import types

from tinsmith.wire import tinker_public_pb2 as pb

MODEL = "tinsmith/nano"
SMALL, LARGE = 32, 512  # tokens of a datum
LARGE_DATUMS = 4
SENDERS = 8
TENANTS = ("quiet", "loud", "asker")
FLOOD_SAMPLES = 500
FLOOD_ANSWER = 1000  # tokens of each sample of the flood
SHORT_ANSWER = 8


@dataclass(frozen=True, slots=True)
class TenantServer:
    """A server of the benchmark's own, with a key for each tenant."""

    url: str
    data_dir: Path
    keys: dict[str, str]


def random_tokens(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, 400, length + 1)


def time_passes(server: TenantServer, least_s: float, runs: int) -> list[float]:
    """Seconds of one small forward_backward after the other, of the tenant that waits for each."""
    datum = random_datum(SMALL, SMALL)
    times: list[float] = []
    with tinker.ServiceClient(base_url=server.url, api_key=server.keys["quiet"]) as service:
        client = service.create_lora_training_client(MODEL, rank=16).result()
        for _ in range(3):
            client.forward_backward([datum], "cross_entropy").result()
        started = time.perf_counter()
        while len(times) < runs and (len(times) < 20 or time.perf_counter() - started < least_s):
            start = time.perf_counter()
            client.forward_backward([datum], "cross_entropy").result()
            times.append(time.perf_counter() - start)
    return times


def time_training_steps(server: TenantServer, deadline: float) -> list[float]:
    """Seconds of one small training step after the other, until `deadline` by time.perf_counter()."""
    datum = random_datum(SMALL, SMALL)
    times: list[float] = []
    with tinker.ServiceClient(base_url=server.url, api_key=server.keys["quiet"]) as service:
        client = service.create_lora_training_client(MODEL, rank=16).result()
        while time.perf_counter() < deadline or not times:
            start = time.perf_counter()
            passed = client.forward_backward([datum], "cross_entropy")
            stepped = client.optim_step(types.AdamParams(learning_rate=1e-4))
            passed.result()
            stepped.result()
            times.append(time.perf_counter() - start)
    return times[1:] or times


def time_short_samples(server: TenantServer, deadline: float) -> list[float]:
    """Seconds of one sample of 8 tokens after the other, until `deadline`."""
    prompt = types.ModelInput.from_ints(random_tokens(SMALL).tolist())
    params = types.SamplingParams(max_tokens=SHORT_ANSWER, stop=[])
    times: list[float] = []
    with tinker.ServiceClient(base_url=server.url, api_key=server.keys["asker"]) as service:
        client = service.create_sampling_client(base_model=MODEL).result()
        while time.perf_counter() < deadline:
            start = time.perf_counter()
            client.sample(prompt, 1, params).result()
            times.append(time.perf_counter() - start)
            time.sleep(0.2)
    return times[1:] or times


@contextlib.contextmanager
def submit_sample_flood(server: TenantServer) -> Iterator[None]:
    """Many long samples of the loud tenant, all submitted before the body runs."""
    headers = {"X-API-Key": server.keys["loud"]}
    with tinker.ServiceClient(base_url=server.url, api_key=server.keys["loud"]) as service:
        session = service.create_sampling_client(base_model=MODEL).result()._sampling_session_id
        with httpx.Client(base_url=server.url, headers=headers, timeout=120) as http:

            def ask(seq_id: int) -> None:
                body = {
                    "sampling_session_id": session,
                    "seq_id": seq_id,
                    "num_samples": 1,
                    "prompt": {
                        "chunks": [{"type": "encoded_text", "tokens": random_tokens(SMALL + seq_id % 16).tolist()}]
                    },
                    "sampling_params": {"max_tokens": FLOOD_ANSWER, "stop": []},
                }
                http.post("/api/v1/asample", json=body).raise_for_status()

            with ThreadPoolExecutor(SENDERS) as pool:
                list(pool.map(ask, range(FLOOD_SAMPLES)))
        yield


def time_neighbours(server: TenantServer, seconds: float) -> dict[str, list[float]]:
    """Run both neighbours at the same time for some seconds."""
    deadline = time.perf_counter() + seconds
    with ThreadPoolExecutor(2) as pool:
        steps, samples = (
            pool.submit(time_training_steps, server, deadline),
            pool.submit(time_short_samples, server, deadline),
        )
        return {"training step": steps.result(), f"sample of {SHORT_ANSWER}": samples.result()}


def measure_mixed(seconds: float, rounds: int) -> dict[str, dict[str, float]]:
    """Alone and under the flood, in turns; all rounds' latencies together."""
    times_by_name: dict[str, list[float]] = {}
    for round_index in range(rounds):
        with run_server(None) as server:
            print(f"round {round_index + 1}: load {os.getloadavg()[0]:.1f}", flush=True)
            for name, times in time_neighbours(server, seconds / 2).items():
                times_by_name.setdefault(f"{name} alone", []).extend(times)
        with (
            run_server(None) as server,
            submit_pass_flood(server, 200, LARGE, LARGE_DATUMS) as model_id,
            submit_sample_flood(server),
        ):
            since = time.time()
            for name, times in time_neighbours(server, seconds).items():
                times_by_name.setdefault(f"{name} in flood", []).extend(times)
            _, num_waiting = read_steps(server, model_id, since, 1)
            print(
                f"round {round_index + 1}: load {os.getloadavg()[0]:.1f}; {num_waiting} passes of the flood left",
                flush=True,
            )
    for name in sorted(times_by_name):
        times = times_by_name[name]
        print(
            f"{name:28s} {len(times):5d} runs, p50 {percentile(times, 0.5):7.3f} s, "
            f"p95 {percentile(times, 0.95):7.3f} s, max {max(times):7.3f} s",
            flush=True,
        )
    return {
        name: {"runs": len(times), **{f"p{p}_s": percentile(times, p / 100) for p in (50, 95, 100)}}
        for name, times in times_by_name.items()
    }


def encode_pass(model_id: str, seq_id: int, length: int, num_datums: int) -> bytes:
    tokens = random_tokens(length)
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    for _ in range(num_datums):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = tokens[:-1].astype("<i4").tobytes()
        targets = pb.Tensor(dense=tokens[1:].astype("<i8").tobytes(), dtype=pb.DTYPE_INT64)
        datum.loss_fn_inputs["target_tokens"].CopyFrom(targets)
        ones = pb.Tensor(dense=np.ones(length, "<f4").tobytes(), dtype=pb.DTYPE_FLOAT32)
        datum.loss_fn_inputs["weights"].CopyFrom(ones)
    return message.SerializeToString()


@contextlib.contextmanager
def submit_pass_flood(server: TenantServer, count: int, length: int, num_datums: int) -> Iterator[str]:
    """`count` passes that all wait before the first may run; then they run. Gives the model they belong to."""
    with tinker.ServiceClient(base_url=server.url, api_key=server.keys["loud"]) as service:
        model_id = service.create_lora_training_client(MODEL, rank=16).result().model_id
        headers = {"X-API-Key": server.keys["loud"], "Content-Type": "application/x-protobuf"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=120) as http:

            def send(seq_id: int) -> None:
                body = encode_pass(model_id, seq_id, length, num_datums)
                http.post("/api/v1/forward_backward", content=body).raise_for_status()

            with ThreadPoolExecutor(SENDERS) as pool:
                list(pool.map(send, range(2, count + 1)))
            send(1)  # everything above waited for it
        yield model_id


def read_steps(server: TenantServer, model_id: str, since: float, full_tokens: float) -> tuple[list[float], int]:
    """Seconds that each full step of a model took since then, and how many of its passes still wait."""
    engine = sa.create_engine(f"sqlite:///{server.data_dir / 'tinsmith.db'}")
    query = (
        "SELECT settled_at, sum(num_tokens) AS tokens FROM futures WHERE model_id = :model AND seq_id > 0 "
        "AND settled_at > :since GROUP BY settled_at ORDER BY settled_at"
    )
    waiting = "SELECT count(*) FROM futures WHERE model_id = :model AND state = 'pending'"
    with engine.connect() as connection:
        steps = connection.execute(sa.text(query), {"model": model_id, "since": since}).all()
        num_waiting = connection.scalar(sa.text(waiting), {"model": model_id})
    engine.dispose()
    pairs = itertools.pairwise(steps)
    return [late.settled_at - early.settled_at for early, late in pairs if late.tokens >= full_tokens], int(
        num_waiting or 0
    )


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def report(
    name: str, times: list[float], steps: list[float], alone_times: list[float], num_waiting: int
) -> dict[str, float]:
    step = statistics.median(steps) if steps else 0.0
    grown = percentile(times, 0.95) - percentile(alone_times, 0.95)
    row = {
        "runs": len(times),
        "p50_ms": 1000 * percentile(times, 0.5),
        "p95_ms": 1000 * percentile(times, 0.95),
        "max_ms": 1000 * max(times),
        "step_p50_ms": 1000 * step,
        "step_p95_ms": 1000 * percentile(steps, 0.95) if steps else 0.0,
        "p95_growth_p50_steps": grown / step if step else 0.0,
        "p95_growth_p95_steps": grown / percentile(steps, 0.95) if steps else 0.0,
        "left_in_queue": num_waiting,
    }
    values = " ".join(f"{value:10.1f}" for value in row.values())
    print(f"{name:28s} {values}", flush=True)
    return row


@contextlib.contextmanager
def run_server(step_tokens: int | None) -> Iterator[TenantServer]:
    """With default settings but for the tokens of a step, if they are given."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
        tinsmith = [sys.executable, "-m", "tinsmith.cli"]
        data = ["--data-dir", directory]
        subprocess.run([*tinsmith, "migrate", *data], capture_output=True, check=True)
        keys = {
            tenant: subprocess.run(
                [*tinsmith, "keys", "create", tenant, *data], capture_output=True, text=True, check=True
            ).stdout.strip()
            for tenant in TENANTS
        }
        step_settings = {} if step_tokens is None else {"TINSMITH_STEP_TOKEN_BUDGET": str(step_tokens)}
        environment = {**os.environ, **step_settings}
        with (Path(directory) / "server.log").open("wb") as log:
            command = [*tinsmith, "serve", "--port", str(port), *data]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                time.sleep(0.05)
            yield TenantServer(f"http://127.0.0.1:{port}", Path(directory), keys)
        finally:
            threading.Timer(20, process.kill).start()  # what is queued is not worth waiting for
            process.terminate()
            process.wait()


def measure_floods(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """One tenant's passes of two sizes, and another's latency beside each."""
    figures: dict[str, dict[str, float]] = {}
    with run_server(args.step_tokens) as server:
        load = os.getloadavg()[0]
        print(f"{MODEL}, steps of {args.step_tokens} tokens, {os.cpu_count()} cores, load {load:.1f}")
        columns = (
            "runs",
            "p50 ms",
            "p95 ms",
            "max ms",
            "step p50",
            "step p95",
            "+p50 steps",
            "+p95 steps",
            "queue left",
        )
        print(f"{'':28s} " + " ".join(f"{column:>10s}" for column in columns))
        alone_times = time_passes(server, args.seconds / 4, 200)
        figures["alone"] = report("alone", alone_times, [], alone_times, 0)
    queued = {
        f"{args.small} passes of {SMALL} tokens": (args.small, SMALL, 1),
        f"{args.large} of {LARGE_DATUMS * LARGE} tokens": (args.large, LARGE, LARGE_DATUMS),
    }
    for name, (count, length, num_datums) in queued.items():
        with run_server(args.step_tokens) as server, submit_pass_flood(server, count, length, num_datums) as model_id:
            since = time.time()
            times = time_passes(server, args.seconds, 400)
            steps, num_waiting = read_steps(server, model_id, since, args.step_tokens / 2)
            figures[name] = report(name, times, steps, alone_times, num_waiting)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("passes", "mixed"), help="one of the two parts")
    parser.add_argument("--small", type=int, default=10_000, help="small passes in the queue")
    parser.add_argument("--large", type=int, default=200, help="large passes in the queue")
    parser.add_argument("--step-tokens", type=int, default=4096, help="the server's step_token_budget; not for mixed")
    parser.add_argument("--seconds", type=float, default=40.0, help="how long the quiet tenant is measured each time")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of mixed, each alone and in the flood")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    if args.only != "mixed":
        figures |= measure_floods(args)
    if args.only != "passes":
        figures |= measure_mixed(args.seconds, args.rounds)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
