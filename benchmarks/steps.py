"""A step of reinforcement learning through the real SDK: publish, sample, forward_backward, optim_step.

    python benchmarks/steps.py                          # tiny and m50, one client and four
    python benchmarks/steps.py --url http://... --model NAME    # another Tinker-compatible address

In a step each client publishes its weights, draws 4 samples of 32 tokens for each of 8 prompts of 32, trains on all of
them with importance_sampling, and takes an optimizer step. Prints the median of each phase as a client sees it, of
the whole step, and how many tokens were sampled and trained a second by all clients together. Two minutes in all.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import tinker
from measured import API_KEY, Meet, machine, own_server, peak_mib, together, write_json
from models import SIZES, make
from tinker import types

RANK = 32
PROMPTS, GROUP, PROMPT, NEW = 8, 4, 32, 32
VOCAB = 400
"""Of the prompts: every model has as many tokens."""
PHASES = ("publish", "sample", "forward_backward", "optim_step")


@dataclass(slots=True)
class Client:
    """One client, and the milliseconds that each phase of its steps took."""

    training: tinker.TrainingClient
    seed: int
    times: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in (*PHASES, "step")})
    sampled: int = 0

    def step(self) -> None:
        marks = [time.perf_counter()]
        sampler = self.training.save_weights_and_get_sampling_client().result()
        marks.append(time.perf_counter())
        params = types.SamplingParams(max_tokens=NEW, temperature=1.0)
        self.seed += 1
        prompts = np.random.default_rng(self.seed).integers(1, VOCAB, (PROMPTS, PROMPT)).tolist()
        waiting = [sampler.sample(types.ModelInput.from_ints(prompt), GROUP, params) for prompt in prompts]
        groups = [future.result().sequences for future in waiting]
        marks.append(time.perf_counter())
        data = [datum(prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group]
        self.training.forward_backward(data, "importance_sampling").result()
        marks.append(time.perf_counter())
        self.training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        marks.append(time.perf_counter())
        self.sampled += sum(len(one.tokens) for group in groups for one in group)
        for name, begun, ended in zip(PHASES, marks, marks[1:], strict=False):
            self.times[name].append(1000 * (ended - begun))
        self.times["step"].append(1000 * (marks[-1] - marks[0]))


def datum(prompt: list[int], sequence: types.SampledSequence) -> types.Datum:
    """What a prompt and its answer teach; only the answer has advantages."""
    tokens = np.array([*prompt, *sequence.tokens])
    answer = len(sequence.tokens)
    logprobs, advantages = np.zeros(len(tokens) - 1, np.float32), np.zeros(len(tokens) - 1, np.float32)
    logprobs[-answer:] = sequence.logprobs
    advantages[-answer:] = 1.0 if sequence.tokens[0] % 2 else -1.0
    inputs = {"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": advantages}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


def measure(url: str, model: str, num_clients: int, runs: int) -> dict[str, float]:
    """Medians over all steps of all clients, which run together, after one that does not count."""
    seeds = itertools.count(1)

    def work(meet: Meet) -> Client:
        with tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
            training = service.create_lora_training_client(model, rank=RANK).result()
            seed = 10_000 * next(seeds)
            Client(training, seed - 1).step()
            client = Client(training, seed)
            meet()
            for _ in range(runs):
                client.step()
            meet()
            return client

    clients, seconds, _ = together(num_clients, work)
    figures = {f"{name}_ms": statistics.median(ms for c in clients for ms in c.times[name]) for name in PHASES}
    steps = [ms for client in clients for ms in client.times["step"]]
    sampled = sum(client.sampled for client in clients)
    trained = sampled + num_clients * runs * PROMPTS * GROUP * (PROMPT - 1)
    return figures | {
        "steps": len(steps),
        "step_ms": statistics.median(steps),
        "least_step_ms": min(steps),
        "most_step_ms": max(steps),
        "sampled_tokens_per_s": sampled / seconds,
        "trained_tokens_per_s": trained / seconds,
    }


def show(what: str, row: dict[str, float]) -> None:
    phases = " ".join(f"{row[f'{name}_ms']:9,.0f}" for name in PHASES)
    spread = f"{row['step_ms']:8,.0f} ({row['least_step_ms']:,.0f} - {row['most_step_ms']:,.0f})"
    tokens = f"{row['sampled_tokens_per_s']:8,.0f} {row['trained_tokens_per_s']:8,.0f}"
    memory = ", ".join(f"{key.removesuffix('_mib')} {mib:,.0f} MiB" for key, mib in row.items() if key.endswith("_mib"))
    print(f"{what:26s} {row['steps']:4.0f} {phases} {spread:26s} {tokens}  {memory}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server; without it, servers are started and stopped")
    parser.add_argument("--model", help="its base model, as it calls it")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny", "m50"])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given = parser.parse_args()
    if given.url and not given.model:
        parser.error("--url needs --model, the name of a base model there")
    print(f"{PROMPTS} prompts of {PROMPT} x {GROUP} samples of {NEW}, rank {RANK}; {machine()}")
    print(f"{'':26s} {'runs':>4s} {'publish':>9s} {'sample':>9s} {'backward':>9s} {'optimizer':>9s} {'step':>8s}, ms"
          f"{'':15s} sampled, trained tokens a second")  # fmt: skip
    found: dict[str, dict[str, float]] = {}

    def all_clients(size: str, url: str, model: str) -> None:
        for num_clients in given.clients:
            what = f"{size}, {num_clients} client{'s' if num_clients > 1 else ''}"
            found[what] = measure(url, model, num_clients, given.runs)
            found[what] |= {f"{role}_mib": mib for role, mib in peak_mib().items()}
            show(what, found[what])

    if given.url:
        all_clients(given.model, given.url, given.model)
    for size in [] if given.url else given.sizes:
        with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
            model = f"bench/{size}={make(size, Path(directory) / size)}"
            with own_server(model) as (url, *_):
                all_clients(size, url, f"bench/{size}")
    write_json(given.json, found)


if __name__ == "__main__":
    main()
