"""A step of reinforcement learning through the real SDK: publish, sample, forward_backward, optim_step.

    python benchmarks/steps.py                          # tiny and m50, one client and four
    python benchmarks/steps.py --url http://... --model NAME    # another Tinker-compatible address
    python benchmarks/steps.py --sizes m50 --prompts 16 --group 8 --beside NAME=http://...=MODEL \\
        --client-python VENV/bin/python     # in turns with other servers, whose clients may need an earlier SDK

In a step each client publishes its weights, draws samples of prompts (4 of 32 tokens for each of 8 prompts of 32; see
`--group`, `--answer-tokens`, `--prompts` and `--prompt-tokens`), trains on all of them with importance_sampling, and
takes an optimizer step. Prints the median of each phase as a client sees it, of the whole step, and how many tokens
were sampled and trained a second by all clients together. Two minutes in all.

With `--beside`, which may name no server, one client of each server takes its steps in turns with the others, in a
process of its own. Prints the phases with their share of the step, and how many times as long as ours a step takes.
Another client of ours overlaps: it trains on the samples of its step before while the next ones are drawn.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import tinker
from harness import API_KEY, Meet, describe_machine, peak_mib, run_together, start_server, write_json
from interleaving import (
    Child,
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
from tinker import types

RANK = 32
VOCAB = 400
"""Upper bound of the prompts' token ids, which every vocabulary contains."""
PHASES = ("publish", "sample", "forward_backward", "optim_step")
LOSS, ADAM = "importance_sampling", types.AdamParams(learning_rate=1e-4)
OURS, OVERLAPPED = "tinsmith", "tinsmith, overlapped"


@dataclass(frozen=True, slots=True)
class Shape:
    """How much a step samples and trains: so many prompts, samples of each, and tokens of both."""

    prompts: int = 8
    group: int = 4
    prompt_tokens: int = 32
    answer_tokens: int = 32

    def __str__(self) -> str:
        return f"{self.prompts} prompts of {self.prompt_tokens} x {self.group} samples of {self.answer_tokens}"


@dataclass(slots=True)
class Client:
    """One client, and the milliseconds that each phase of its steps took."""

    training: tinker.TrainingClient
    seed: int
    shape: Shape
    times: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in (*PHASES, "step")})
    sampled: int = 0
    data: list[types.Datum] = field(default_factory=list)
    """The data that the step before sampled."""

    def step(self) -> None:
        marks = [time.perf_counter()]
        sampler = self.publish()
        marks.append(time.perf_counter())
        self.data = self.collect_data(self.draw(sampler))
        marks.append(time.perf_counter())
        self.training.forward_backward(self.data, LOSS).result()
        marks.append(time.perf_counter())
        self.training.optim_step(ADAM).result()
        marks.append(time.perf_counter())
        for name, start, end in zip(PHASES, marks, marks[1:], strict=False):
            self.times[name].append(1000 * (end - start))
        self.times["step"].append(1000 * (marks[-1] - marks[0]))

    def step_overlapped(self) -> None:
        """Samples the next batch while it trains on the one before."""
        start = time.perf_counter()
        drawing = self.draw(self.publish())
        training = [self.training.forward_backward(self.data, LOSS), self.training.optim_step(ADAM)]
        self.data = self.collect_data(drawing)
        for future in training:
            future.result()
        self.times["step"].append(1000 * (time.perf_counter() - start))

    def publish(self) -> tinker.SamplingClient:
        sampler: Any = self.training.save_weights_and_get_sampling_client()
        return sampler.result() if hasattr(sampler, "result") else sampler  # earlier SDKs wait themselves

    def draw(self, sampler: tinker.SamplingClient) -> list[tuple[list[int], Any]]:
        """Prompts, each with the future of its samples."""
        self.seed += 1
        prompts = np.random.default_rng(self.seed).integers(1, VOCAB, (self.shape.prompts, self.shape.prompt_tokens))
        params = types.SamplingParams(max_tokens=self.shape.answer_tokens, temperature=1.0)
        draw = functools.partial(sampler.sample, num_samples=self.shape.group, sampling_params=params)
        return [(prompt, draw(types.ModelInput.from_ints(prompt))) for prompt in prompts.tolist()]

    def collect_data(self, waiting: list[tuple[list[int], Any]]) -> list[types.Datum]:
        data = [datum(prompt, sequence) for prompt, future in waiting for sequence in future.result().sequences]
        self.sampled += sum(len(sequence.model_input.to_ints()) - (self.shape.prompt_tokens - 1) for sequence in data)
        return data


def datum(prompt: list[int], sequence: types.SampledSequence) -> types.Datum:
    """The datum of a prompt and its answer; only the answer has advantages."""
    tokens = np.array([*prompt, *sequence.tokens])
    answer = len(sequence.tokens)
    logprobs, advantages = np.zeros(len(tokens) - 1, np.float32), np.zeros(len(tokens) - 1, np.float32)
    logprobs[-answer:] = sequence.logprobs
    advantages[-answer:] = 1.0 if sequence.tokens[0] % 2 else -1.0
    inputs = {"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": advantages}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


def measure(url: str, model: str, num_clients: int, args: argparse.Namespace) -> dict[str, float]:
    """Medians over all steps of all clients, which run together, after one that does not count."""
    seeds = itertools.count(1)

    def run_client(meet: Meet) -> Client:
        with tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
            training = service.create_lora_training_client(model, rank=RANK).result()
            seed = 10_000 * next(seeds)
            Client(training, seed - 1, args.shape).step()
            client = Client(training, seed, args.shape)
            meet()
            for _ in range(args.runs):
                client.step()
            meet()
            return client

    clients, seconds, _ = run_together(num_clients, run_client)
    figures = {f"{name}_ms": statistics.median(ms for c in clients for ms in c.times[name]) for name in PHASES}
    steps = [ms for client in clients for ms in client.times["step"]]
    sampled, shape = sum(client.sampled for client in clients), args.shape
    trained = sampled + num_clients * args.runs * shape.prompts * shape.group * (shape.prompt_tokens - 1)
    return figures | {
        "steps": len(steps),
        "step_ms": statistics.median(steps),
        "least_step_ms": min(steps),
        "most_step_ms": max(steps),
        "sampled_tokens_per_s": sampled / seconds,
        "trained_tokens_per_s": trained / seconds,
    }


def show(label: str, row: dict[str, float]) -> None:
    phases = " ".join(f"{row[f'{name}_ms']:9,.0f}" for name in PHASES)
    step_range = f"{row['step_ms']:8,.0f} ({row['least_step_ms']:,.0f} - {row['most_step_ms']:,.0f})"
    tokens = f"{row['sampled_tokens_per_s']:8,.0f} {row['trained_tokens_per_s']:8,.0f}"
    memory = ", ".join(f"{key.removesuffix('_mib')} {mib:,.0f} MiB" for key, mib in row.items() if key.endswith("_mib"))
    print(f"{label:26s} {row['steps']:4.0f} {phases} {step_range:26s} {tokens}  {memory}", flush=True)


def child(url: str, model: str, shape: Shape) -> None:
    """A client of a server. Answers with the milliseconds of each step."""
    service = tinker.ServiceClient(base_url=url, api_key=API_KEY)
    training: Any = service.create_lora_training_client(model, rank=RANK)
    client = Client(training.result() if hasattr(training, "result") else training, 0, shape)
    for question, answer in serve_requests():
        overlaps = question["overlaps"] and client.data
        (client.step_overlapped if overlaps else client.step)()
        answer({name: times[-1] for name, times in client.times.items() if times and (not overlaps or name == "step")})


def compare(size: str, directory: Path, args: argparse.Namespace) -> dict[str, Row]:
    """Steps of one client of each server, in turns."""
    peers = [ours_or_peer.split("=", 2) for ours_or_peer in args.beside]
    phases_by_name: dict[str, list[Row]] = {}
    with ExitStack() as stack:
        url = stack.enter_context(start_server(f"bench/{size}={directory}")).url
        ours = [(name, url, f"bench/{size}") for name in (OURS, OVERLAPPED)]

        def open_contestant(name: str, url: str, model: str) -> Run:
            python = sys.executable if name in (OURS, OVERLAPPED) else args.client_python
            sizes = (f"--{name.replace('_', '-')}={number}" for name, number in asdict(args.shape).items())
            arguments = ("--child", url, model, *sizes)
            phases_by_name[name], started = [], list[Child]()

            def run() -> float:
                if not started:
                    started.append(stack.enter_context(Child("steps.py", *arguments, python=python)))
                phases_by_name[name].append(started[0].ask(overlaps=name == OVERLAPPED))
                return phases_by_name[name][-1]["step"] / 1000

            return run

        runs = {name: open_contestant(name, *address) for name, *address in [*ours, *peers]}
        seconds = run_in_turns(runs, args.runs, lambda name, reason: print(f"{name}: {reason}", flush=True))
    rows: dict[str, Row] = {}
    for name, step_seconds in seconds.items():
        row = rows[f"{size}, {name}"] = {
            "step_ms": summarize_spread([1000 * ours_or_peer for ours_or_peer in step_seconds])
        }
        steps = phases_by_name[name][-args.runs :]
        for phase in PHASES if PHASES[0] in steps[-1] else ():
            row[f"{phase}_ms"] = statistics.median(step[phase] for step in steps)
            row[f"{phase}_share"] = statistics.median(step[phase] / step["step"] for step in steps)
        if OURS in seconds:
            row["times_ours"] = compute_speedup(seconds[OURS], step_seconds)
        show_compared(f"{size}, {name}", row)
    return rows


def show_compared(label: str, row: Row) -> None:
    parts = [f"{row[f'{e}_ms']:,.0f} ({row[f'{e}_share']:.0%})" if f"{e}_ms" in row else "" for e in PHASES]
    text = f"{label:28s} {' '.join(f'{part:>15s}' for part in parts)}  {format_spread(row['step_ms'])} ms"
    if "times_ours" in row:
        text += f"  {format_spread(row['times_ours'], '.2f')} x ours"
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server; without it, servers are started and stopped")
    parser.add_argument("--model", help="its base model, as it calls it")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny", "m50"])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4])
    for name, number in asdict(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=number)
    parser.add_argument("--beside", nargs="*", metavar="NAME=URL=MODEL", help="steps in turns with running servers")
    parser.add_argument("--client-python", default=sys.executable, help="of the clients of those")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    args.shape = Shape(**{name: getattr(args, name) for name in asdict(Shape())})
    if args.child:
        url, model = args.child
        child(url, model, args.shape)
        return
    if wrong := [peer for peer in args.beside or [] if peer.count("=") < 2]:
        parser.error(f"--beside {wrong[0]}: give NAME=URL=MODEL")
    if args.url and not args.model:
        parser.error("--url needs --model, the name of a base model there")
    print(f"{args.shape}, rank {RANK}; {describe_machine()}")
    figures: dict[str, dict[str, Any]] = {}
    if args.beside is None:
        names = " ".join(f"{name:>9s}" for name in ("publish", "sample", "backward", "optimizer"))
        print(f"{'':26s} {'runs':>4s} {names} {'step':>8s}, ms{'':15s} sampled, trained tokens a second")
    else:
        print(f"{'':28s} {' '.join(f'{name:>15s}' for name in (*PHASES[:2], 'backward', 'optimizer'))}  step")

    def all_clients(size: str, url: str, model: str) -> None:
        for num_clients in args.clients:
            label = f"{size}, {num_clients} client{'s' if num_clients > 1 else ''}"
            figures[label] = measure(url, model, num_clients, args)
            figures[label] |= {f"{role}_mib": mib for role, mib in peak_mib().items()}
            show(label, figures[label])

    if args.url:
        all_clients(args.model, args.url, args.model)
    for size in [] if args.url else args.sizes:
        with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
            model_directory = make(size, Path(directory) / size)
            if args.beside is not None:
                figures |= compare(size, model_directory, args)
                continue
            with start_server(f"bench/{size}={model_directory}") as (url, *_):
                all_clients(size, url, f"bench/{size}")
    write_json(args.json, figures)


if __name__ == "__main__":
    exit_on_sigterm()
    main()
