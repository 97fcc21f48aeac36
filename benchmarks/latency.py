"""Round trips through the real SDK: how long one small request takes.

    python benchmarks/latency.py                        # starts a server with tinsmith/nano, measures, stops it
    python benchmarks/latency.py --url http://... --model NAME    # measures any Tinker-compatible address

The client uses only the public SDK, so the same figures can be taken from another server in the same minutes.
Prints a table; with --json FILE also writes the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import tinker
from tinker import types

API_KEY = os.environ.get("TINKER_API_KEY", "tml-benchmark")
LENGTH = 32


def datum() -> types.Datum:
    tokens = np.random.default_rng(0).integers(0, 400, LENGTH + 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": np.ones(LENGTH, np.float32)},
    )


def timed(action: Callable[[], object], runs: int) -> list[float]:
    """Milliseconds of each run, after a few that do not count."""
    for _ in range(5):
        action()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        action()
        times.append(1000 * (time.perf_counter() - start))
    return times


def summary(times_ms: list[float]) -> dict[str, float]:
    ordered = sorted(times_ms)
    return {
        "runs": len(ordered),
        "min_ms": ordered[0],
        "p50_ms": statistics.median(ordered),
        "p95_ms": ordered[int(0.95 * (len(ordered) - 1))],
        "max_ms": ordered[-1],
    }


def measure(url: str, model: str, runs: int) -> dict[str, dict[str, float]]:
    data = [datum()]
    prompt = data[0].model_input
    figures: dict[str, dict[str, float]] = {}
    with tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
        client = service.create_lora_training_client(model, rank=16).result()

        def forward() -> None:
            client.forward(data, "cross_entropy").result()

        def step() -> None:
            passed = client.forward_backward(data, "cross_entropy")
            stepped = client.optim_step(types.AdamParams(learning_rate=1e-4))
            passed.result()
            stepped.result()

        def publish_and_sample() -> None:
            sampler = client.save_weights_and_get_sampling_client().result()
            sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()

        sampler = service.create_sampling_client(base_model=model).result()

        def sample() -> None:
            sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()

        figures["forward, one datum"] = summary(timed(forward, runs))
        figures["forward_backward + optim_step"] = summary(timed(step, runs))
        figures["sample, one token"] = summary(timed(sample, runs))
        figures["publish + first token"] = summary(timed(publish_and_sample, max(5, runs // 4)))
    with ThreadPoolExecutor(8) as pool:
        times = [ms for some in pool.map(lambda _: many_forwards(url, model, runs // 4), range(8)) for ms in some]
    figures["forward, one datum, 8 clients"] = summary(times)
    return figures


def many_forwards(url: str, model: str, runs: int) -> list[float]:
    data = [datum()]
    with tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
        client = service.create_lora_training_client(model, rank=16).result()
        return timed(lambda: client.forward(data, "cross_entropy").result(), runs)


@contextlib.contextmanager
def own_server(model: str | None) -> Iterator[tuple[str, float]]:
    """`tinsmith serve` until the end of the block; also the moment it was started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
        command = [sys.executable, "-m", "tinsmith.cli", "serve", "--port", str(port), "--data-dir", directory]
        started = time.perf_counter()
        with (Path(directory) / "server.log").open("wb") as log:
            process = subprocess.Popen([*command, *(["--model", model] if model else [])], stdout=log, stderr=log)
        try:
            wait_for(port, process)
            yield f"http://127.0.0.1:{port}", started
        finally:
            process.terminate()
            process.wait()


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise SystemExit("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server; without it, one is started and stopped")
    parser.add_argument("--model", help="base model, as the server calls it (or NAME=DIR for a server of its own)")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given = parser.parse_args()
    name = (given.model or "tinsmith/nano").split("=")[0]
    if given.url:
        figures = measure(given.url, name, given.runs)
    else:
        with own_server(given.model) as (url, started):
            with tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
                service.create_lora_training_client(name, rank=16).result().forward([datum()], "cross_entropy").result()
            cold_ms = 1000 * (time.perf_counter() - started)
            figures = measure(url, name, given.runs)
        figures["cold start to the first forward"] = summary([cold_ms])
    print(
        f"{name}, datum of {LENGTH} tokens, {os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'what':34s} {'runs':>5s} {'min':>8s} {'p50':>8s} {'p95':>8s} {'max':>8s}   ms")
    for what, row in figures.items():
        values = " ".join(f"{row[key]:8.1f}" for key in ("min_ms", "p50_ms", "p95_ms", "max_ms"))
        print(f"{what:34s} {row['runs']:5.0f} {values}")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
