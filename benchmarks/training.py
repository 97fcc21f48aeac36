"""Training tokens per second: the whole service through the real SDK, and Hugging Face with PEFT on the same work.

    python benchmarks/training.py                       # tiny and m50, every shape of work, five runs each: 12 minutes
    python benchmarks/training.py --sizes m50 --works 0 --runs 7 --json training.json
    python benchmarks/training.py --sizes m500 --works 7 --peft float32 bfloat16 --runs 3     # Qwen3-0.6B's shape
    python benchmarks/training.py --url http://... --model NAME    # another Tinker-compatible address

A run is one `forward_backward` and one `optim_step` of every client, all submitted together, until the last result is
there; its tokens are those of the sequences, without padding. Beside the service run, in turns with it and each in a
process of its own with as many threads:

- PEFT: LoRA on every linear, the unembedding included, as the service has it; one padded batch, one client after the
  other (a PEFT model trains one adapter at a time);
- the step alone: the service's own backend without a service, which is the most that the service could reach;
- the products: those of the base model's linears, forward and for the gradient of their inputs, with weights packed by
  oneDNN, and nothing else: no adapter, attention, norm or loss. A ceiling that no step reaches.

Prints medians with their spread, the ratio to PEFT, the share of the products' rate, the share of the step alone that
the service keeps (all of runs that followed each other), and the most memory that each process (of the service: its
engine) had resident while it did that work. `--works` takes numbers:

0: 8 x 256, 1 client; 1: ragged 16-512, 1 client; 2: 1 x 32, 1 client; 3: 1 x 32, 8 clients; 4: 1 x 32, 32 clients;
5: 2 x 256, 4 clients; 6: ragged 16-384, 8 clients; 7: 2 x 256, 1 client
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import tinker
from harness import (
    API_KEY,
    build_datum,
    describe_machine,
    process_peak_mib,
    processes,
    reset_peak,
    start_server,
    write_json,
)
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

if TYPE_CHECKING:
    from tinsmith.backends.torch import TorchBackend

RANK = 32
VOCAB = 8000
LEARNING_RATE = 1e-4
ROWS_AT_ONCE = 512
"""Rows of one matmul, so that a large vocabulary's outputs take little memory."""
RAGGED = (16, 512, 32, 64, 384, 48, 24, 128, 16, 256, 96, 40)


@dataclass(frozen=True, slots=True)
class Workload:
    """Each of `clients` sends one sequence of each length; `rank` is that of their adapters."""

    name: str
    clients: int
    lengths: tuple[int, ...]
    rank: int = RANK

    @property
    def num_tokens(self) -> int:
        return self.clients * sum(self.lengths)


WORKS = [
    Workload("8 x 256, 1 client", 1, (256,) * 8),
    Workload("ragged 16-512, 1 client", 1, RAGGED),
    Workload("1 x 32, 1 client", 1, (32,)),
    Workload("1 x 32, 8 clients", 8, (32,)),
    Workload("1 x 32, 32 clients", 32, (32,)),
    Workload("2 x 256, 4 clients", 4, (256,) * 2),
    Workload("ragged 16-384, 8 clients", 8, (16, 384, 48, 96)),
    Workload("2 x 256, 1 client", 1, (256,) * 2),
]


def sequences(workload: Workload, client: int) -> list[np.ndarray]:
    rng = np.random.default_rng(client)
    return [rng.integers(1, VOCAB, length + 1) for length in workload.lengths]


def seconds_of(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


# What runs in turns.


@contextmanager
def of_service(url: str, model: str, workload: Workload, rank: int = RANK) -> Iterator[Run]:
    with tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
        waiting = [service.create_lora_training_client(model, rank=rank) for _ in range(workload.clients)]
        clients = [model_future.result() for model_future in waiting]
        data = [[build_datum(tokens) for tokens in sequences(workload, index)] for index in range(workload.clients)]
        adam = types.AdamParams(learning_rate=LEARNING_RATE)

        def run() -> None:
            waiting = []
            for client, client_data in zip(clients, data, strict=True):
                waiting.append(client.forward_backward(client_data, "cross_entropy"))
                waiting.append(client.optim_step(adam))
            for future in waiting:
                future.result()

        yield partial(seconds_of, run)


@dataclass(slots=True)
class Contestant:
    """`open` makes it ready for a shape of work; the peak is of the process that computes, from then on."""

    open: Callable[[int], Run]
    reset_peak: Callable[[], None]
    peak_mib: Callable[[], float]


def in_child(kind: str, directory: Path, dtype: str, stack: ExitStack) -> Contestant:
    """With the environment of an engine, PEFT, too: threads that sleep while they wait suffer less from others."""
    from tinsmith.settings.environment import engine_environment

    arguments = ("--child", kind, str(directory), dtype)
    child = stack.enter_context(Child("training.py", *arguments, environment=engine_environment(computes_alone=True)))
    child.ask(work=None)

    def run(index: int) -> float:
        return child.ask(work=index)["seconds"]

    return Contestant(
        lambda index: partial(run, index), lambda: reset_peak(child.pid), lambda: process_peak_mib(child.pid)
    )


def in_service(size: str, directory: Path, dtype: str, stack: ExitStack, works: ExitStack) -> Contestant:
    model = f"bench/{size}"
    server = stack.enter_context(start_server(f"{model}={directory}", settings={"DTYPE": dtype}))
    with of_service(server.url, model, WORKS[2], rank=1) as run:  # a small adapter, since it stays in memory
        run()  # until it answers, the engine is not there to be looked at
    (engine,) = processes(server.pid)["engine"]
    return Contestant(
        lambda index: works.enter_context(of_service(server.url, model, WORKS[index])),
        lambda: reset_peak(engine),
        lambda: process_peak_mib(engine),
    )


def child(kind: str, directory: str, dtype: str) -> None:
    runners = {"peft": peft_runner, "step": step_runner, "products": matmul_runner}
    runner = runners[kind](Path(directory), dtype)
    prepared, run = None, None
    for question, answer in serve_requests():
        if question["work"] is None:
            answer({})
            continue
        if run is None or question["work"] != prepared:
            prepared, run = question["work"], runner(WORKS[question["work"]])
        answer({"seconds": seconds_of(run)})


def peft_runner(directory: Path, dtype: str) -> Callable[[Workload], Callable[[], None]]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=getattr(torch, dtype))
    # "all-linear" would leave the unembedding out.
    linears = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=32, target_modules=sorted(linears)))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=LEARNING_RATE)

    def runner(workload: Workload) -> Callable[[], None]:
        batches = []
        for client in range(workload.clients):
            ids = torch.zeros(len(workload.lengths), max(workload.lengths), dtype=torch.int64)
            labels = torch.full_like(ids, -100)
            for row, tokens in enumerate(sequences(workload, client)):
                ids[row, : len(tokens) - 1] = torch.from_numpy(tokens[:-1])
                labels[row, : len(tokens) - 1] = torch.from_numpy(tokens[1:])
            batches.append((ids, (labels != -100).long(), labels))

        def run() -> None:
            for ids, mask, labels in batches:
                logits = model(input_ids=ids, attention_mask=mask).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        return run

    return runner


def matmul_runner(directory: Path, dtype: str) -> Callable[[Workload], Callable[[], None]]:
    """One layer's weights serve all layers, which caches hold if they can."""
    import torch
    from ceilings import packed_matmul
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory)
    hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    shapes = [(heads + 2 * keys, hidden), (hidden, heads), (2 * config.intermediate_size, hidden),
              (hidden, config.intermediate_size)]  # fmt: skip
    layer = [(shape, config.num_hidden_layers) for shape in shapes] + [((config.vocab_size, hidden), 1)]

    def runner(workload: Workload) -> Callable[[], None]:
        actions = []
        for (outputs, inputs), times in layer:
            for weight_OI in (torch.randn(outputs, inputs), torch.randn(inputs, outputs)):
                matmul = packed_matmul(weight_OI.to(getattr(torch, dtype)))
                assert matmul is not None, "this torch has no packed matmuls"
                rows = torch.randn(workload.num_tokens, weight_OI.shape[1]).to(getattr(torch, dtype))
                actions += [(matmul, rows.split(ROWS_AT_ONCE))] * times

        @torch.no_grad()
        def run() -> None:
            for matmul, parts in actions:
                for rows in parts:
                    matmul(rows)

        return run

    return runner


def step_runner(directory: Path, dtype: str) -> Callable[[Workload], Callable[[], None]]:
    from tinsmith.backends.torch import TorchBackend
    from tinsmith.base_models import read_shape

    backend = TorchBackend(read_shape("bench/step", directory), device="cpu", dtype=dtype)
    return lambda workload: packed_step(backend, workload, "m")


def packed_step(backend: TorchBackend, workload: Workload, prefix: str) -> Callable[[], None]:
    """A pass and an optimizer step of every client, each a model of its own whose name begins with `prefix`."""
    from tinsmith.backends import run_to_end
    from tinsmith.types import AdamParams, Datum, LoraSpec, OptimStep, Pass

    passes = []
    for index in range(workload.clients):
        model_id = f"{prefix}{index}"
        backend.create_model(model_id, LoraSpec(workload.rank, seed=index))
        data = []
        for tokens in sequences(workload, index):
            inputs = {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)}
            data.append(Datum(tokens[:-1].astype(np.int32), inputs))
        passes.append(Pass(f"r{index}", model_id, tuple(data), "cross_entropy", {}, False))
    steps = [
        OptimStep(f"o{index}", training_pass.model_id, AdamParams(LEARNING_RATE))
        for index, training_pass in enumerate(passes)
    ]

    def run() -> None:
        results = [*run_to_end(backend.run_passes(passes)), *backend.optim_step(steps)]
        assert not any(isinstance(result, Exception) for result in results), results

    return run


def row(size: str, workload: Workload, contestant: str, seconds: list[float]) -> Row:
    rates = summarize_spread([workload.num_tokens / second for second in seconds])
    return {"size": size, "work": workload.name, "what": contestant, "tokens_per_s": rates, "seconds": seconds}


def compare_in_turns(
    size: str, directory: Path, works: list[int], dtypes: list[str], peft: list[str], runs: int
) -> Iterator[list[Row]]:
    """Every shape of work: PEFT, and the products, the step alone and the service with each dtype of the base, in
    turns.
    """
    with ExitStack() as stack:
        opened = ExitStack()
        contestants = {f"PEFT {dtype}": in_child("peft", directory, dtype, stack) for dtype in peft}
        for dtype in dtypes:
            contestants[f"products {dtype}"] = in_child("products", directory, dtype, stack)
            contestants[f"step alone {dtype}"] = in_child("step", directory, dtype, stack)
            contestants[f"service {dtype}"] = in_service(size, directory, dtype, stack, opened)
        stack.enter_context(opened)  # the last, so that clients go before their servers
        for index in works:
            ready = {name: contestant.open(index) for name, contestant in contestants.items()}
            for contestant in contestants.values():
                contestant.reset_peak()
            seconds_by_name = run_in_turns(ready, runs, lambda name, reason: print(f"{name}: {reason}", flush=True))
            rows = {name: row(size, WORKS[index], name, seconds) for name, seconds in seconds_by_name.items()}
            for name, figure in rows.items():
                figure["peak_mib"] = contestants[name].peak_mib()
                compare(figure, rows)
                show(figure)
            yield [*rows.values()]
            opened.close()


def compare(figure: Row, rows: dict[str, Row]) -> None:
    """A service with PEFT of each dtype, with the products of its own, and with the step that it does."""
    kind, _, dtype = str(figure["what"]).rpartition(" ")
    if kind not in ("service", "step alone"):
        return
    for name, base in rows.items():
        if name.startswith("PEFT"):
            figure.setdefault("of_peft", {})[name] = compute_speedup(figure["seconds"], base["seconds"])
            figure.setdefault("memory_of_peft", {})[name] = figure["peak_mib"] / base["peak_mib"]
    for key, name in (("of_products", "products"), ("of_step_alone", "step alone")):
        if kind != name and (base := rows.get(f"{name} {dtype}")):
            figure[key] = compute_speedup(figure["seconds"], base["seconds"])


def show(figure: Row) -> None:
    text = f"{figure['size']:5s} {figure['work']:24s} {figure['what']:20s}"
    text += f" {format_spread(figure['tokens_per_s']):26s} tokens/s"
    if "peak_mib" in figure:
        text += f", {figure['peak_mib']:,.0f} MiB"
    for name, ratio in figure.get("of_peft", {}).items():
        text += f"; {format_spread(ratio, '.2f')} x {name}, {figure['memory_of_peft'][name]:.2f} of its memory"
    for key, name in (("of_products", "products"), ("of_step_alone", "step alone")):
        if key in figure:
            text += f"; {format_spread(figure[key], '.0%')} of the {name}"
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny", "m50"])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--peft", nargs="*", choices=("float32", "bfloat16"), default=["float32"], help="its dtypes")
    work_indices = range(len(WORKS))
    parser.add_argument("--works", nargs="+", type=int, choices=work_indices, default=work_indices, metavar="NUMBER")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--url", help="a running server, without baselines")
    parser.add_argument("--model", help="the base model's name there")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child)
        return
    print(f"rank {RANK}; {describe_machine()}", flush=True)
    figures = []
    if args.url:
        for index in args.works:
            with of_service(args.url, args.model, WORKS[index]) as run:
                seconds = run_in_turns({"service": run}, args.runs, lambda name, reason: None)["service"]
            figures.append(row(args.model, WORKS[index], "service", seconds))
            write_json(args.json, figures)
            show(figures[-1])
    else:
        for size in args.sizes:
            with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
                model_directory = make(size, Path(directory) / size)
                for rows in compare_in_turns(size, model_directory, [*args.works], args.dtypes, args.peft, args.runs):
                    figures += rows
                    write_json(args.json, figures)  # after each, so that a run that is stopped early has some


if __name__ == "__main__":
    exit_on_sigterm()
    main()
