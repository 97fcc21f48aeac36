"""The gain of a second engine and of a second server on one machine.

    python benchmarks/scaling.py                          # both; three minutes
    python benchmarks/scaling.py --only engines --seconds 30
    python benchmarks/scaling.py --only servers --database-url postgresql://USER:PASSWORD@HOST/NAME

Engines: eight tenants train beside each other, on one engine with one core, then on two with one core each; tokens per
second. Servers: four clients send optimizer steps and wait for each, through one server and through two, with an engine
that computes nothing; requests per second. Clients share the machine, so that on two cores they take their part of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

import tinker
from harness import random_datum
from processes import service
from tinker import types

MODEL = "tinsmith/nano"
TENANTS = 8
LENGTH = 512
DATUMS = 4
CLIENTS = 4


def measure_training(url: str, seconds: float) -> float:
    """Tokens per second of all tenants."""
    datum = random_datum(LENGTH)
    adam = types.AdamParams(learning_rate=1e-4)
    begin, stop = threading.Barrier(TENANTS + 1), threading.Event()
    counts = [0] * TENANTS

    def tenant(index: int, model: tinker.TrainingClient) -> None:
        model.forward_backward([datum], "cross_entropy").result()
        begin.wait()
        while not stop.is_set():
            passed = model.forward_backward([datum] * DATUMS, "cross_entropy")
            model.optim_step(adam).result()
            passed.result()
            counts[index] += DATUMS * LENGTH

    with tinker.ServiceClient(base_url=url, api_key="tml-bench") as client:
        models = [client.create_lora_training_client(MODEL, rank=16).result() for _ in range(TENANTS)]
        threads = [threading.Thread(target=tenant, args=(index, model)) for index, model in enumerate(models)]
        for thread in threads:
            thread.start()
        begin.wait()
        started, before = time.perf_counter(), sum(counts)
        time.sleep(seconds)
        rate = (sum(counts) - before) / (time.perf_counter() - started)
        stop.set()
        for thread in threads:
            thread.join()
    return rate


def run_engines(count: int, seconds: float) -> float:
    cores = sorted(os.sched_getaffinity(0))
    settings = {"ENGINE_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="tinsmith-scaling-") as directory, contextlib.ExitStack() as stack:
        processes = service(Path(directory))
        _, url = stack.enter_context(processes.process("server", "--role", "server"))
        for index in range(count):
            core = [cores[index % len(cores)]]
            stack.enter_context(processes.process(f"e{index}", "--role", "engine", cores=core, settings=settings))
        processes.await_engines(count)
        return measure_training(url, seconds)


LOAD = """
import json, sys, time
import httpx
url, seconds = sys.argv[1], float(sys.argv[2])
http = httpx.Client(base_url=url + "/api/v1/", headers={"X-API-Key": "tml-bench"}, timeout=60)
def post(path, body):
    return http.post(path, json=body)
def result(answer):
    while (got := post("retrieve_future", {"request_id": answer.json()["request_id"]})).status_code == 408:
        pass
    got.raise_for_status()
session = post("create_session", {"tags": [], "sdk_version": "0.38.0", "user_metadata": None}).json()["session_id"]
creation = {"session_id": session, "model_seq_id": 0, "base_model": "tinsmith/nano", "lora_config": {"rank": 4}}
answer = post("create_model", creation)
result(answer)
model = answer.json()["model_id"]
print("ready", flush=True)
sys.stdin.readline()
count, until = 0, time.perf_counter() + seconds
while time.perf_counter() < until:
    step = {"model_id": model, "seq_id": count + 1, "adam_params": {"learning_rate": 0.1}}
    result(post("optim_step", step))
    count += 1
print(count, flush=True)
"""


def measure_load(urls: Sequence[str], seconds: float) -> float:
    """Requests per second of all clients: each step is a submission and a poll."""
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", LOAD, urls[index % len(urls)], str(seconds)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for index in range(CLIENTS)
    ]  # fmt: skip
    counts = []
    try:
        for client in clients:
            assert client.stdout is not None and client.stdout.readline() == "ready\n", "a client failed"
        for client in clients:
            assert client.stdin is not None
            client.stdin.write("\n")
            client.stdin.flush()
        for client in clients:
            assert client.stdout is not None
            counts.append(int(client.stdout.readline()))
    finally:
        for client in clients:
            client.kill()
            client.wait()
    return 2 * sum(counts) / seconds


def run_servers(count: int, seconds: float, database_url: str) -> float:
    with tempfile.TemporaryDirectory(prefix="tinsmith-scaling-") as directory, contextlib.ExitStack() as stack:
        processes = service(Path(directory), database_url)
        urls = [stack.enter_context(processes.process(f"s{index}", "--role", "server"))[1] for index in range(count)]
        stack.enter_context(processes.process("engine", "--role", "engine", "--backend", "fake"))
        processes.await_engines(1)
        return measure_load(urls, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["engines", "servers"], nargs="*", default=["engines", "servers"])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--runs", type=int, default=3, help="of each arrangement, one and two taking turns")
    parser.add_argument("--database-url", default="", help="for the servers; a SQLite file without it")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    measures = {
        "engines": (lambda count: run_engines(count, args.seconds), "tokens/s"),
        "servers": (lambda count: run_servers(count, args.seconds, args.database_url), "requests/s"),
    }
    figures: dict[str, dict[str, float]] = {}
    for kind in args.only:
        measure, unit = measures[kind]
        rates = {count: [] for count in (1, 2)}
        for _ in range(args.runs):
            for count, values in rates.items():
                values.append(measure(count))
        one_rate, two_rate = (statistics.median(values) for values in rates.values())
        figures[kind] = {"one": one_rate, "two": two_rate, "factor": two_rate / one_rate}
        factor = two_rate / one_rate
        print(f"{kind}: one {one_rate:.0f}, two {two_rate:.0f} {unit}: {factor:.2f} times", flush=True)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
