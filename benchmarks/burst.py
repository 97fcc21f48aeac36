"""A burst of samples through the real SDK, with a poll for each sample and with one poll for the sampling session.

    python benchmarks/burst.py                      # a server of its own with the fake backend: the way, not the work
    python benchmarks/burst.py --backend torch      # the same with tinsmith/nano

The two kinds of poll take turns, burst by burst, so that a noisy neighbour disturbs both alike. A burst is 64 samples
sent at once; its time ends with the last result. Prints a table; with --json FILE also writes the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

import tinker
from harness import API_KEY, summarize_times, wait_for
from tinker import types

MODEL = "tinsmith/nano"
KINDS = {"one poll for each sample": False, "one poll for the session": True}


@contextlib.contextmanager
def run_server(backend: str) -> Iterator[tuple[str, int]]:
    """`tinsmith serve` until the end of the block: its address and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
        command = [sys.executable, "-m", "tinsmith.cli", "serve", "--port", str(port), "--data-dir", directory]
        with (Path(directory) / "server.log").open("wb") as log:
            process = subprocess.Popen([*command, "--backend", backend], stdout=log, stderr=log)
        try:
            wait_for(port, process)
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            process.wait()


def create_client(service: tinker.ServiceClient, follow: bool) -> tinker.SamplingClient:
    """A sampling client that polls in one way or the other, whatever the server's flag says."""
    config = service.holder.get_client_config()
    service.holder._client_config = config.model_copy(update={"sample_use_retrieve_futures": follow})
    return service.create_sampling_client(base_model=MODEL).result()


def time_burst(sampler: tinker.SamplingClient, size: int) -> float:
    """Milliseconds until the last of `size` samples is there."""
    prompt = types.ModelInput.from_ints(list(range(32)))
    params = types.SamplingParams(max_tokens=8)
    start = time.perf_counter()
    for future in [sampler.sample(prompt, 1, params) for _ in range(size)]:
        future.result()
    return 1000 * (time.perf_counter() - start)


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(url: str, pid: int, size: int, runs: int) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    server_s, client_s = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)
    with contextlib.ExitStack() as services:
        samplers = {}
        for kind, follow in KINDS.items():
            service = services.enter_context(tinker.ServiceClient(base_url=url, api_key=API_KEY))
            samplers[kind] = create_client(service, follow)
            time_burst(samplers[kind], size)
        for _ in range(runs):
            for kind, sampler in samplers.items():
                server_before, client_before = processor_seconds(pid), client_seconds()
                times[kind].append(time_burst(sampler, size))
                server_s[kind] += processor_seconds(pid) - server_before
                client_s[kind] += client_seconds() - client_before
    return {
        kind: summarize_times(burst_times)
        | {"server_ms": 1000 * server_s[kind] / runs / size, "client_ms": 1000 * client_s[kind] / runs / size}
        for kind, burst_times in times.items()
    }


def client_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="fake", choices=["fake", "torch"])
    parser.add_argument("--size", type=int, default=64, help="samples of a burst")
    parser.add_argument("--runs", type=int, default=20, help="bursts of each kind")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    with run_server(args.backend) as (url, pid):
        figures = measure(url, pid, args.size, args.runs)
    print("| burst | runs | min ms | p50 ms | p95 ms | server, ms a sample | client, ms a sample |")
    print("|---|---|---|---|---|---|---|")
    for kind, row in figures.items():
        print(
            f"| {kind} | {row['runs']} | {row['min_ms']:.0f} | {row['p50_ms']:.0f} | {row['p95_ms']:.0f} "
            f"| {row['server_ms']:.2f} | {row['client_ms']:.2f} |"
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
