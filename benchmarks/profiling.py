"""Profiles a request through client, server and engine, a packed training step, and a decode step.

    python benchmarks/profiling.py forward                  # also: step, publish, samples; --size, --dtype, --clients
    python benchmarks/profiling.py step --size m50 --work 3 # a shape of work of training.py, by as many clients
    python benchmarks/profiling.py samples --size m50 --at-once 16 --adapters 1
    python benchmarks/profiling.py packed --size m50 --work 4 --dtype bfloat16
    python benchmarks/profiling.py decode --size m50 --at-once 64 --adapters 8
    python benchmarks/profiling.py prompts --size m50 --at-once 8
    python benchmarks/profiling.py missed build/bench --out build/bench/profiles.md     # of each missed target

A request (a publish comes with the optimizer step before it and one sampled token after it): what a call takes, how
much processor time client, server and engine spend on it, and, by the service's own traces (which take a little time
themselves, and need `tinsmith[otel]`), what happens when in it; medians. With several clients the parts are not laid
out in time. A step (in process, with an engine's environment): its time and page faults, torch's operators by the time
in them alone, and the Python functions that take most themselves, which a profiler makes look slower than they are.
Each takes less than a minute.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import os
import pstats
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

import tinker
from harness import API_KEY, CPU, Meet, build_datum, describe_machine, run_together, start_server
from models import SIZES, make
from peers import NEW, PROMPT, prompt
from targets import Figures, find_missed
from tinker import types
from training import LEARNING_RATE, RANK, WORKS, Workload, sequences, step_runner

REQUESTS = ("forward", "step", "publish", "samples")
STEPS = ("packed", "decode", "prompts")
WARM_UPS = 20
TOP = 16
PROFILED = 10
"""Steps that each profiler looks at."""

Call = Callable[[], object]


# A request.


@dataclass(frozen=True, slots=True)
class Span:
    """A span of a process's trace, in seconds since the epoch."""

    process: str
    name: str
    begun_s: float
    ended_s: float


@contextmanager
def collector() -> Iterator[tuple[str, list[Span]]]:
    """An address for traces, and what came there."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
                attributes = {
                    attribute.key: attribute.value.string_value for attribute in resource_spans.resource.attributes
                }
                process = attributes["service.name"].removeprefix("tinsmith-")
                for span in itertools.chain.from_iterable(scope.spans for scope in resource_spans.scope_spans):
                    times = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
                    spans.append(Span(process, span.name, *times))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", spans
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def build_call(kind: str, service: tinker.ServiceClient, model: str, args: argparse.Namespace, client: int) -> Call:
    """Return the action that one client repeats."""
    training = service.create_lora_training_client(model, rank=RANK).result()
    data = [build_datum(tokens) for tokens in sequences(WORKS[args.work], client)]
    adam = types.AdamParams(learning_rate=LEARNING_RATE)

    def forward() -> None:
        training.forward(data, "cross_entropy").result()

    def step() -> None:
        waiting = [training.forward_backward(data, "cross_entropy"), training.optim_step(adam)]
        for future in waiting:
            future.result()

    def sample(sampler: tinker.SamplingClient, count: int, new: int) -> None:
        params = types.SamplingParams(max_tokens=new, temperature=1.0)
        for future in [sampler.sample(types.ModelInput.from_ints(prompt()), 1, params) for _ in range(count)]:
            future.result()

    def publish() -> None:
        training.optim_step(adam).result()
        sample(training.save_weights_and_get_sampling_client().result(), 1, 1)

    if kind == "samples":
        samplers = []
        for _ in range(args.adapters):
            step()
            samplers.append(training.save_weights_and_get_sampling_client().result())
        share = args.at_once // len(samplers)
        return lambda: [sample(version_sampler, share, NEW) for version_sampler in samplers]
    return {"forward": forward, "step": step, "publish": publish}[kind]


def time_calls(
    url: str, model: str, args: argparse.Namespace
) -> tuple[list[tuple[float, float]], float, dict[str, float]]:
    """When each call began and ended, in how many seconds all of them ran, and the processor time of one."""
    count = args.clients or WORKS[args.work].clients
    client_indices = itertools.count()

    def run_client(meet: Meet) -> list[tuple[float, float]]:
        with tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
            call = build_call(args.what, service, model, args, next(client_indices))
            for _ in range(args.warm_ups):
                call()
            meet()
            times = []
            for _ in range(args.runs):
                start_s = time.time()
                call()
                times.append((start_s, time.time()))
            meet()
            return times

    client_times, seconds, spent = run_together(count, run_client)
    times = [time for times_of_client in client_times for time in times_of_client]
    return times, seconds, spent.per_call(len(times))


def profile_requests(args: argparse.Namespace) -> None:
    count = args.clients or WORKS[args.work].clients
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
        model, arguments = create_served_model(args, Path(directory))
        name = model.partition("=")[0]
        with start_server(model, *arguments, settings={"DTYPE": args.dtype}) as server:
            times, seconds, spent = time_calls(server.url, name, args)
        median_ms = 1000 * statistics.median(end - begin for begin, end in times)
        each_ms = 1000 * seconds / len(times)
        print(f"{len(times)} calls by {count} at once: p50 {median_ms:.1f} ms, one each {each_ms:.1f} ms")
        parts = ", ".join(f"{key.removesuffix(CPU)} {ms:.1f}" for key, ms in spent.items())
        print(f"processor time of a call, ms: {parts}; together {sum(spent.values()):.1f}")
        if find_spec("opentelemetry.proto") is None:
            print("no traces: pip install 'tinsmith[otel]'")
            return
        with collector() as (url, spans):
            with start_server(model, *arguments, settings={"DTYPE": args.dtype, "OTLP_ENDPOINT": url}) as server:
                times, _, _ = time_calls(server.url, name, args)
        print_spans(times, spans, laid_out=count == 1 and args.what != "samples")


def create_served_model(args: argparse.Namespace, directory: Path) -> tuple[str, tuple[str, ...]]:
    model = f"bench/{args.size}={make(args.size, directory / args.size)}"
    return model, ("--backend", "fake") if args.fake else ()


def print_spans(times: list[tuple[float, float]], spans: list[Span], *, laid_out: bool) -> None:
    """Medians over the calls of each part, by its name and its place among those of that name in the call."""
    last = max(end for _, end in times)
    starts, durations = defaultdict(list), defaultdict(list)
    ordered = sorted(spans, key=lambda span: span.begun_s)
    if laid_out:
        for begin, end in times:
            occurrences: dict[tuple[str, str], int] = defaultdict(int)
            for span in ordered:
                if begin <= span.begun_s < end:
                    occurrences[span.process, span.name] += 1
                    key = span.process, span.name, occurrences[span.process, span.name]
                    starts[key].append(1000 * (span.begun_s - begin))
                    durations[key].append(1000 * (span.ended_s - span.begun_s))
        print(f"\n{'begins':>8s} {'takes':>8s}   ms after the call began; by the service's own traces")
    else:
        first = min(begin for begin, _ in times)
        for span in ordered:
            if first <= span.begun_s <= last:
                key = span.process, span.name, 1
                starts[key].append(0.0)
                durations[key].append(1000 * (span.ended_s - span.begun_s))
        print(f"\n{'number':>8s} {'takes':>8s}   ms; by the service's own traces")
    shown_keys = [key for key, values in durations.items() if not laid_out or len(values) > len(times) // 2]
    for key in sorted(shown_keys, key=lambda key: statistics.median(starts[key])):
        process, name, occurrence = key
        first_column = f"{statistics.median(starts[key]):8.1f}" if laid_out else f"{len(durations[key]):8d}"
        label = f"{process}: {name}" + (f", {occurrence}." if occurrence > 1 else "")
        print(f"{first_column} {statistics.median(durations[key]):8.1f}   {label}")
    if laid_out:
        print(
            f"{1000 * statistics.median(end - begin for begin, end in times):8.1f} {'':8s}   the client has the result"
        )


# A step.


@dataclass(slots=True)
class Costs:
    """Seconds, processor seconds and page faults of each step."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)

    def measure(self, run: Call) -> None:
        wall, processor, faults = time.perf_counter(), time.process_time(), _faults()
        run()
        self.wall.append(time.perf_counter() - wall)
        self.processor.append(time.process_time() - processor)
        self.faults.append(_faults() - faults)

    def show(self) -> None:
        wall, processor = (1000 * statistics.median(values) for values in (self.wall, self.processor))
        print(f"{len(self.wall)} steps: {wall:.1f} ms each ({1000 * min(self.wall):.1f} at least), processor "
              f"{processor:.1f} ms, {statistics.median(self.faults):,.0f} page faults")  # fmt: skip


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def open_packed(args: argparse.Namespace, directory: Path) -> Call:
    return step_runner(directory, args.dtype)(WORKS[args.work])


def open_sampling(args: argparse.Namespace, directory: Path, new: int) -> tuple[Call, Call]:
    """A step of an engine's sampler; and what hands it as many prompts as run at once, for so many new tokens each."""
    import numpy as np

    from tinsmith.backends import run_to_end
    from tinsmith.backends.torch import TorchBackend
    from tinsmith.base_models import read_shape
    from tinsmith.types import AdamParams, Datum, LoraSpec, OptimStep, Pass, Sample, SamplingParams

    backend = TorchBackend(read_shape("bench/decode", directory), device="cpu", dtype=args.dtype)
    for index in range(args.adapters):
        name = f"m{index}"
        backend.create_model(name, LoraSpec(RANK, seed=index))
        (tokens,) = sequences(Workload("", 1, (PROMPT,)), index)
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(PROMPT, np.float32)}
        datum = Datum(tokens[:-1].astype(np.int32), inputs)
        run_to_end(backend.run_passes([Pass("r", name, (datum,), "cross_entropy", {}, False)]))
        backend.optim_step([OptimStep("o", name, AdamParams(LEARNING_RATE))])
        backend.publish(name, f"v{index}")
    request_numbers = itertools.count()
    params = SamplingParams(max_tokens=new, temperature=1.0, stop_eos=False)

    def submit() -> None:
        for _, index in zip(range(args.at_once), itertools.cycle(range(args.adapters)), strict=False):
            tokens = np.array(prompt(), np.int32)
            backend.sampler.submit(Sample(f"r{next(request_numbers)}", f"v{index}", tokens, 1, params))

    return backend.sampler.step, submit


def open_decode(args: argparse.Namespace, directory: Path) -> Call:
    """One decode step of as many sequences."""
    # Enough for the warm-up and every profiler, and none of them ends in between.
    step, submit = open_sampling(args, directory, 8 * PROFILED)
    submit()
    for _ in range(args.at_once * PROMPT // 512 + 2):
        step()  # prompts
    return step


def open_prompts(args: argparse.Namespace, directory: Path) -> Call:
    """New prompts to the first token of each. A step without work takes no time."""
    step, submit = open_sampling(args, directory, 1)

    def run() -> None:
        submit()
        for _ in range(-(-args.at_once * PROMPT // 512)):
            step()

    return run


def profile_steps(args: argparse.Namespace) -> None:
    """Profile steps in this process, which has an engine's environment."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
        model_directory = make(args.size, Path(directory) / args.size)
        run = {"packed": open_packed, "decode": open_decode, "prompts": open_prompts}[args.what](args, model_directory)
        for _ in range(2):
            run()
        costs = Costs()
        for _ in range(PROFILED):
            costs.measure(run)
        costs.show()
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(PROFILED):
                run()
        print_operators(profiler.key_averages())
        python = cProfile.Profile()
        python.enable()
        for _ in range(PROFILED):
            run()
        python.disable()
        print_functions(pstats.Stats(python))


def print_operators(events: Sequence) -> None:
    total = sum(event.self_cpu_time_total for event in events)
    print(f"\n{'share':>6s} {'ms':>8s} {'calls':>7s}   operators of a step, by the time in them alone")
    for event in sorted(events, key=lambda event: -event.self_cpu_time_total)[:TOP]:
        self_time = event.self_cpu_time_total
        step_ms = self_time / 1000 / PROFILED
        print(f"{self_time / total:6.1%} {step_ms:8.2f} {event.count / PROFILED:7.1f}   {event.key[:60]}")


def print_functions(stats: pstats.Stats) -> None:
    """Print the functions of Python code; built-in ones include the operators' time."""
    functions = [(path, line, name, row) for (path, line, name), row in stats.stats.items() if path != "~"]  # type: ignore[attr-defined]
    print(f"\n{'ms':>8s} {'calls':>7s}   Python functions of a step, by the time in them alone")
    for path, line, name, (_, count, self_time, *_) in sorted(functions, key=lambda function: -function[3][2])[:TOP]:
        module = "/".join(Path(path).parts[-2:])
        print(f"{1000 * self_time / PROFILED:8.2f} {count / PROFILED:7.1f}   {name} ({module}:{line})")


# All that were missed.


def profile_missed(directory: Path, out: Path | None) -> None:
    missed = find_missed(Figures.of(directory))
    flags = dict.fromkeys(profile_flags for target in missed for profile_flags in target.profile)
    lines = [
        "# Where the time goes",
        "",
        "Of the [targets](targets.md) that were missed, made by `python benchmarks/profiling.py missed build/bench`.",
        "",
        f"{describe_machine()}." if flags else "No figures yet.",
        "",
    ]
    for profile_flags in flags:
        print(f"\n## {profile_flags}", flush=True)
        command = [sys.executable, __file__, *shlex.split(profile_flags)]
        completed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        print(completed.stdout, flush=True)
        lines += [
            f"## {profile_flags}",
            "",
            f"`python benchmarks/profiling.py {profile_flags}`",
            "",
            "```",
            completed.stdout.strip(),
            "```",
            "",
        ]
        if completed.returncode:
            lines += [f"Not whole: it ended with status {completed.returncode}.", ""]
    if out:
        out.write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(*REQUESTS, *STEPS, "missed"))
    parser.add_argument("directory", nargs="?", type=Path, help="of missed: where the benchmarks wrote their JSON")
    parser.add_argument("--out", type=Path, help="of missed: write a page to this file")
    parser.add_argument("--size", choices=SIZES, help="default: tiny for requests, m50 for steps and samples")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 for tiny, else bfloat16")
    parser.add_argument("--work", type=int, choices=range(len(WORKS)), default=2, metavar="NUMBER")
    parser.add_argument("--clients", type=int, help="default: those of the work")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=1)
    parser.add_argument("--runs", type=int, help="calls of each client")
    parser.add_argument("--warm-ups", type=int, help="calls of each client before those")
    parser.add_argument("--fake", action="store_true", help="an engine that computes nothing")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what == "missed":
        if args.directory is None:
            parser.error("missed needs the directory of the figures")
        profile_missed(args.directory, args.out)
        return
    args.size = args.size or ("tiny" if args.what in ("forward", "step", "publish") else "m50")
    args.dtype = args.dtype or ("float32" if args.size == "tiny" else "bfloat16")
    is_slow = args.what == "samples" or WORKS[args.work].num_tokens > 256 or (args.clients or 1) > 1
    args.runs = args.runs or (5 if is_slow else 40)
    args.warm_ups = args.warm_ups if args.warm_ups is not None else (2 if is_slow else WARM_UPS)
    if args.what in REQUESTS:
        print(f"{args.size}, {args.dtype}; {describe_machine()}", flush=True)
        profile_requests(args)
    elif args.inside:
        profile_steps(args)
    else:
        from tinsmith.settings.environment import engine_environment

        print(f"{args.size}, {args.dtype}; {describe_machine()}", flush=True)
        flags = [*sys.argv[1:], "--inside"]
        sys.exit(
            subprocess.run(
                [sys.executable, __file__, *flags], env=engine_environment(computes_alone=True), check=False
            ).returncode
        )


if __name__ == "__main__":
    main()
