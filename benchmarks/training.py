"""Training tokens per second: the whole service through the real SDK, and Hugging Face with PEFT on the same work.

    python benchmarks/training.py                       # tiny and m50, every shape of work, five runs each: 6 minutes
    python benchmarks/training.py --sizes m50 --runs 7 --json training.json
    python benchmarks/training.py --url http://... --model NAME    # another Tinker-compatible address

A run is one `forward_backward` and one `optim_step` of every client, all submitted together, until the last result is
there; its tokens are those of the sequences, without padding. Beside the service run, in the same call and each in a
process of its own with as many threads:

- PEFT: LoRA on every linear, the unembedding included, as the service has it; one padded batch, one client after the
  other (a PEFT model trains one adapter at a time);
- the step alone: the service's own backend without a service, which is the most that the service could reach.

Prints medians with their spread, the ratio to PEFT, the share of the step alone that the service keeps, and the most
memory that each process (of the service: its engine) had resident while it did that work.
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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import tinker
from latency import API_KEY, own_server
from models import SIZES, make
from tinker import types

RANK = 32
VOCAB = 8000
LEARNING_RATE = 1e-4
RAGGED = (16, 512, 32, 64, 384, 48, 24, 128, 16, 256, 96, 40)


@dataclass(frozen=True, slots=True)
class Work:
    """What each of `clients` sends: one sequence of each length."""

    name: str
    clients: int
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.clients * sum(self.lengths)


WORKS = [
    Work("8 x 256, 1 client", 1, (256,) * 8),
    Work("ragged 16-512, 1 client", 1, RAGGED),
    Work("1 x 32, 1 client", 1, (32,)),
    Work("1 x 32, 8 clients", 8, (32,)),
    Work("1 x 32, 32 clients", 32, (32,)),
    Work("2 x 256, 4 clients", 4, (256,) * 2),
    Work("ragged 16-384, 8 clients", 8, (16, 384, 48, 96)),
]


def sequences(work: Work, client: int) -> list[np.ndarray]:
    rng = np.random.default_rng(client)
    return [rng.integers(1, VOCAB, length + 1) for length in work.lengths]


def datum(tokens: np.ndarray) -> types.Datum:
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


def timed(run: Callable[[], None], runs: int) -> list[float]:
    """Seconds of each run, after two that do not count."""
    times = []
    for index in range(runs + 2):
        started = time.perf_counter()
        run()
        if index > 1:
            times.append(time.perf_counter() - started)
    return times


def of_service(url: str, model: str, work: Work, runs: int) -> list[float]:
    with tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
        waiting = [service.create_lora_training_client(model, rank=RANK) for _ in range(work.clients)]
        clients = [made.result() for made in waiting]
        data = [[datum(tokens) for tokens in sequences(work, index)] for index in range(work.clients)]
        adam = types.AdamParams(learning_rate=LEARNING_RATE)

        def run() -> None:
            waiting = []
            for client, own in zip(clients, data, strict=True):
                waiting.append(client.forward_backward(own, "cross_entropy"))
                waiting.append(client.optim_step(adam))
            for future in waiting:
                future.result()

        return timed(run, runs)


def in_a_process(
    what: str, directory: Path, works: list[int], runs: int, dtype: str
) -> dict[int, tuple[list[float], float]]:
    """In a process of its own: seconds of each run, and peak memory in MiB, by number of the work."""
    given = json.dumps({"what": what, "directory": str(directory), "works": works, "runs": runs, "dtype": dtype})
    found = subprocess.run([sys.executable, __file__, "--child", given], stdout=subprocess.PIPE, check=True)
    answers = json.loads(found.stdout.splitlines()[-1])
    return {index: (answer["seconds"], answer["peak_mib"]) for index, answer in zip(works, answers, strict=True)}


def child(given: dict[str, object]) -> list[dict[str, object]]:
    runner = {"peft": peft_runner, "step": step_runner}[str(given["what"])](
        Path(str(given["directory"])), str(given["dtype"])
    )
    answers: list[dict[str, object]] = []
    for index in given["works"]:
        run = runner(WORKS[index])
        forget_peak(os.getpid())
        seconds = timed(run, int(str(given["runs"])))
        answers.append({"seconds": seconds, "peak_mib": peak_mib(os.getpid())})
    return answers


def peft_runner(directory: Path, dtype: str) -> Callable[[Work], Callable[[], None]]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=getattr(torch, dtype))
    # "all-linear" would leave the unembedding out.
    linears = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=32, target_modules=sorted(linears)))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=LEARNING_RATE)

    def runner(work: Work) -> Callable[[], None]:
        batches = []
        for client in range(work.clients):
            ids = torch.zeros(len(work.lengths), max(work.lengths), dtype=torch.int64)
            labels = torch.full_like(ids, -100)
            for row, tokens in enumerate(sequences(work, client)):
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


def step_runner(directory: Path, dtype: str) -> Callable[[Work], Callable[[], None]]:
    from tinsmith.backends.torch import TorchBackend
    from tinsmith.bases import read_shape
    from tinsmith.ops import AdamParams, Datum, LoraSpec, OptimStep, Pass

    backend = TorchBackend(read_shape("bench/step", directory), device="cpu", dtype=dtype)

    def runner(work: Work) -> Callable[[], None]:
        passes = []
        for index in range(work.clients):
            backend.create_model(f"m{index}", LoraSpec(RANK, seed=index))
            data = []
            for tokens in sequences(work, index):
                inputs = {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)}
                data.append(Datum(tokens[:-1].astype(np.int32), inputs))
            passes.append(Pass(f"r{index}", f"m{index}", tuple(data), "cross_entropy", {}, False))
        steps = [OptimStep(f"o{index}", f"m{index}", AdamParams(LEARNING_RATE)) for index in range(work.clients)]

        def run() -> None:
            backend.run_passes(passes)
            backend.optim_step(steps)

        return run

    return runner


def peak_mib(pid: int) -> float:
    """The most memory that a process had resident, in MiB (Linux), since `forget_peak`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def forget_peak(pid: int) -> None:
    """Where the kernel lets us; elsewhere the peak is the process's so far."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def engine_pid() -> int:
    """Of the engine among the processes that this one started."""
    waiting = [os.getpid()]
    while waiting:
        pid = waiting.pop()
        if b"tinsmith.engine" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
        for task in Path(f"/proc/{pid}/task").iterdir():
            waiting += map(int, (task / "children").read_text().split())
    raise SystemExit("there is no engine")


@contextlib.contextmanager
def server(size: str, dtype: str, directory: Path) -> Iterator[str]:
    os.environ["TINSMITH_DTYPE"] = dtype
    with own_server(f"bench/{size}={directory}") as (url, _):
        yield url


def of_own_server(
    size: str, directory: Path, works: list[int], runs: int, dtype: str
) -> dict[int, tuple[list[float], float]]:
    found = {}
    with server(size, dtype, directory) as url:
        of_service(url, f"bench/{size}", WORKS[2], 1)  # until it answers, the engine is not there to be looked at
        for index in works:
            forget_peak(engine_pid())
            found[index] = (of_service(url, f"bench/{size}", WORKS[index], runs), peak_mib(engine_pid()))
    return found


def row(size: str, work: Work, what: str, seconds: list[float], peak: float) -> dict[str, object]:
    rates = sorted(work.num_tokens / second for second in seconds)
    return {
        "size": size, "work": work.name, "what": what, "tokens_per_s": statistics.median(rates),
        "least": rates[0], "most": rates[-1], "peak_mib": peak,
    }  # fmt: skip


def compared(size: str, directory: Path, works: list[int], dtypes: list[str], runs: int) -> list[dict[str, object]]:
    """Every shape of work: PEFT, then the step alone and the service with each dtype of the base."""
    found = {"PEFT float32": in_a_process("peft", directory, works, runs, "float32")}
    for dtype in dtypes:
        found[f"step alone {dtype}"] = in_a_process("step", directory, works, runs, dtype)
        found[f"service {dtype}"] = of_own_server(size, directory, works, runs, dtype)
    figures = []
    for index in works:
        rows = {what: row(size, WORKS[index], what, *by_work[index]) for what, by_work in found.items()}
        base = rows["PEFT float32"]
        for what, figure in rows.items():
            figure["of_peft"] = ratio(figure, base)
            figure["memory_of_peft"] = float(str(figure["peak_mib"])) / float(str(base["peak_mib"]))
            if what.startswith("service"):
                figure["of_step_alone"] = ratio(figure, rows[what.replace("service", "step alone")])
            show(figure)
        figures += rows.values()
    return figures


def ratio(figure: dict[str, object], base: dict[str, object]) -> float:
    return float(str(figure["tokens_per_s"])) / float(str(base["tokens_per_s"]))


def show(figure: dict[str, object]) -> None:
    rate, least, most = (float(str(figure[key])) for key in ("tokens_per_s", "least", "most"))
    text = f"{figure['size']!s:5s} {figure['work']!s:24s} {figure['what']!s:20s} {rate:9,.0f} tokens/s"
    text += f" ({least:,.0f} - {most:,.0f})"
    if "of_peft" in figure:
        text += f"  {figure['of_peft']:5.2f} x  {figure['peak_mib']:6,.0f} MiB ({figure['memory_of_peft']:.2f})"
    if "of_step_alone" in figure:
        text += f"  {figure['of_step_alone']:.0%} of the step alone"
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny", "m50"])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument(
        "--works", nargs="+", type=int, default=list(range(len(WORKS))), help="numbers of shapes of work"
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--url", help="a running server, without baselines")
    parser.add_argument("--model", help="the base model's name there")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        sys.stdout.write(json.dumps(child(json.loads(given.child))) + "\n")
        return
    figures = []
    if given.url:
        for index in given.works:
            seconds = of_service(given.url, given.model, WORKS[index], given.runs)
            figures.append(row(given.model, WORKS[index], "service", seconds, float("nan")))
            show(figures[-1])
    else:
        for size in given.sizes:
            with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
                made = make(size, Path(directory) / size)
                figures += compared(size, made, given.works, given.dtypes, given.runs)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
