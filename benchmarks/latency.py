"""Round trips through the real SDK: how long one small request takes.

    python benchmarks/latency.py                        # tiny and nano, the fake backend, and publishing with m50
    python benchmarks/latency.py --sizes tiny --runs 50 # one of them, quickly
    python benchmarks/latency.py --sizes tiny --rows shapes --starts 5    # what a start and new shapes of batches cost
    python benchmarks/latency.py --url http://... --model NAME    # measures any Tinker-compatible address

A row is one kind of request, sent again and again by one client or by eight at once (threads of one process); the
rows of a server of its own also say what the processes spent on a call, and the most memory that they had. `fake` is
the way alone: a backend that computes nothing, and how many futures 16 clients get settled a second. `canned` is the
SDK alone: what is left of a call where a server answers at once (`canned_server.py`; rows forward, step and crowd;
10 s). What is published are weights that changed since the last time. A shape of a batch is new to a server once: its
first time is put beside the same again. The client uses only the public SDK, so the same figures can be taken from
another server in the same minutes. Two minutes in all.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

import tinker
from canned_server import MODEL as CANNED_MODEL
from canned_server import run_canned_server
from harness import (
    API_KEY,
    CPU,
    Meet,
    ProcessorTime,
    RunningServer,
    describe_machine,
    peak_mib,
    random_datum,
    run_together,
    start_server,
    summarize_times,
    time_runs,
    write_json,
)
from models import SIZES, make
from tinker import types

LENGTH = 32
RANK = 32
AT_ONCE = 8
FLOOD_CLIENTS, FLOOD_AHEAD = 16, 8
ROWS = ("forward", "step", "sample", "publish", "shapes", "crowd")
SHAPES = ((17,), (45, 3), (97, 20, 5), (150,), (61,) * 3, (33,) * 5, (210, 7), (9,) * 11, (130, 40, 40), (5,) * 23)
"""Lengths of the sequences of batches; none is like what comes before."""
SERVERS = ("tiny", "nano", "fake", "canned", "m50")
CANNED_ROWS = ("forward", "step", "crowd")
Figures = dict[str, dict[str, float]]


def measure_action(action: Callable[[], object], runs: int) -> dict[str, float]:
    """Times of the action, and what each process spent on one of them."""
    time_runs(action, 0)
    spent = ProcessorTime.begin()
    times = time_runs(action, runs, warm_up=0)
    spent.end()
    return summarize_times(times) | spent.per_call(runs)


def measure(url: str, model: str, runs: int, rows: tuple[str, ...] = ROWS) -> Figures:
    data = [random_datum(LENGTH)]
    prompt = data[0].model_input
    one_token = types.SamplingParams(max_tokens=1)
    figures: Figures = {}
    seeds = itertools.count(1)
    with tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
        client = service.create_lora_training_client(model, rank=RANK).result()
        sampler = service.create_sampling_client(base_model=model).result()

        def forward() -> None:
            client.forward(data, "cross_entropy").result()

        def step() -> None:
            passed = client.forward_backward(data, "cross_entropy")
            stepped = client.optim_step(types.AdamParams(learning_rate=1e-4))
            passed.result()
            stepped.result()

        def sample() -> None:
            sampler.sample(prompt, 1, one_token).result()

        def sample_two() -> None:
            """Sample from a prompt that no cache holds."""
            sampler.sample(
                random_datum(LENGTH, next(seeds)).model_input, 1, types.SamplingParams(max_tokens=2)
            ).result()

        def change() -> None:
            client.optim_step(types.AdamParams(learning_rate=1e-4)).result()

        def publish_and_sample() -> None:
            published = client.save_weights_and_get_sampling_client().result()
            published.sample(prompt, 1, one_token).result()

        if "forward" in rows:
            figures["forward, one datum"] = measure_action(forward, runs)
        if "step" in rows:
            figures["forward_backward + optim_step"] = measure_action(step, runs)
        if "sample" in rows:
            figures["sample, one token"] = measure_action(sample, runs)
        if "publish" in rows:
            step()
            figures["prefill + decode step"] = summarize_times(time_runs(sample_two, max(5, runs // 4)))
            figures["publish + first token"] = summarize_times(
                time_runs(publish_and_sample, max(5, runs // 4), before=change)
            )
        if "shapes" in rows:
            figures |= new_shapes(client)
    if "crowd" in rows:
        figures[f"forward, one datum, {AT_ONCE} clients"] = crowd(url, model, runs)
    return figures


def new_shapes(client: tinker.TrainingClient) -> Figures:
    """Times of the first batch of each shape, the least time of the same batch afterwards, and the differences."""
    first, again = [], []
    for lengths in SHAPES:
        data = [random_datum(length) for length in lengths]

        def run(data: list[types.Datum] = data) -> None:
            client.forward_backward(data, "cross_entropy").result()

        times = time_runs(run, 4, warm_up=0)
        first.append(times[0])
        again.append(min(times[1:]))
    extra = [max(0.0, first_ms - later_ms) for first_ms, later_ms in zip(first, again, strict=True)]
    return {
        "forward_backward, a new shape": summarize_times(first),
        "the same shape again": summarize_times(again),
        "what a new shape takes more": summarize_times(extra),
    }


def crowd(url: str, model: str, runs: int) -> dict[str, float]:
    """Clients with a session and a model each, all at once from the first that counts to the last."""

    def run_client(meet: Meet) -> list[float]:
        data = [random_datum(LENGTH)]
        with tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
            client = service.create_lora_training_client(model, rank=RANK).result()

            def forward() -> None:
                client.forward(data, "cross_entropy").result()

            time_runs(forward, 0)
            meet()
            times = time_runs(forward, max(5, runs // 4), warm_up=0)
            meet()
            return times

    client_times, _, spent = run_together(AT_ONCE, run_client)
    times = [ms for times_of_client in client_times for ms in times_of_client]
    return summarize_times(times) | spent.per_call(len(times))


def flood(url: str, model: str, runs: int) -> dict[str, float]:
    """Futures settled a second: clients that each keep some optimizer steps on their way."""
    adam = types.AdamParams(learning_rate=1e-4)

    def one(meet: Meet) -> None:
        with tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
            client = service.create_lora_training_client(model, rank=RANK).result()
            client.optim_step(adam).result()
            meet()
            waiting = [client.optim_step(adam) for _ in range(FLOOD_AHEAD)]
            for _ in range(runs - FLOOD_AHEAD):
                waiting.pop(0).result()
                waiting.append(client.optim_step(adam))
            for future in waiting:
                future.result()
            meet()

    _, seconds, spent = run_together(FLOOD_CLIENTS, one)
    count = FLOOD_CLIENTS * runs
    return {"runs": count, "futures_per_s": count / seconds, **spent.per_call(count)}


def of_own_server(size: str, runs: int, rows: tuple[str, ...], starts: int) -> Figures:
    """The figures of a `tinsmith serve` that is started with this model."""
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
        name, model, arguments = "tinsmith/nano", None, ()
        if size == "fake":
            arguments = ("--backend", "fake")
        elif size != "nano":
            name = f"bench/{size}"
            model = f"{name}={make(size, Path(directory) / size)}"
        times = []
        for _ in range(starts - 1):
            with start_server(model, *arguments) as server:
                times.append(until_answered(server, name))
        with start_server(model, *arguments) as server:
            times.append(until_answered(server, name))
            figures = measure(server.url, name, runs, rows) | {
                "cold start to the first forward": summarize_times(times)
            }
            if size == "fake":
                figures[f"futures, {FLOOD_CLIENTS} clients"] = flood(server.url, name, max(FLOOD_AHEAD, runs // 4))
            figures["peak memory"] = {f"{role}_mib": mib for role, mib in peak_mib().items()}
    return figures


def until_answered(server: RunningServer, name: str) -> float:
    """Milliseconds from the start of a server to its first answer of a model."""
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
        client = service.create_lora_training_client(name, rank=RANK).result()
        client.forward([random_datum(LENGTH)], "cross_entropy").result()
        return 1000 * (time.perf_counter() - server.started)


def show(figures: Figures) -> None:
    print(f"{'what':34s} {'runs':>5s} {'min':>8s} {'p50':>8s} {'p95':>8s} {'max':>8s}   ms; processor ms a call")
    for name, row in figures.items():
        spent = ", ".join(f"{key.removesuffix(CPU)} {ms:.1f}" for key, ms in row.items() if key.endswith(CPU))
        if "p50_ms" in row:
            values = " ".join(f"{row[key]:8.1f}" for key in ("min_ms", "p50_ms", "p95_ms", "max_ms"))
            print(f"{name:34s} {row['runs']:5.0f} {values}   {spent}")
        elif "futures_per_s" in row:
            print(f"{name:34s} {row['runs']:5.0f} {row['futures_per_s']:8,.0f} a second{'':18s}   {spent}")
        else:
            print(f"{name:34s} " + ", ".join(f"{key.removesuffix('_mib')} {mib:,.0f} MiB" for key, mib in row.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server; without it, servers are started and stopped")
    parser.add_argument("--model", help="its base model, as it calls it")
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, "nano", "fake", "canned"], default=list(SERVERS))
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="only these (default: all; publish of m50 and larger)")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--starts", type=int, default=1, help="how often a server of each size is started")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if args.url and not args.model:
        parser.error("--url needs --model, the name of a base model there")
    print(f"a datum of {LENGTH} tokens, rank {RANK}; {describe_machine()}")
    figures: dict[str, Figures] = {}
    for size in [args.model] if args.url else args.sizes:
        rows = tuple(args.rows or (("forward", "publish") if size in ("m50", "m500") else ROWS))
        if args.url:
            figures[size] = measure(args.url, size, args.runs, rows)
        elif size == "canned":
            with run_canned_server() as url:
                figures[size] = measure(url, CANNED_MODEL, args.runs, tuple(row for row in CANNED_ROWS if row in rows))
        else:
            figures[size] = of_own_server(size, args.runs, rows, args.starts)
        print(f"\n{size}")
        show(figures[size])
    write_json(args.json, figures)


if __name__ == "__main__":
    main()
