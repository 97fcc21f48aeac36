"""Training tokens per second: the whole service through the real SDK, and Hugging Face with PEFT on the same work.

    python benchmarks/training.py                       # tiny and m50, every shape of work, five runs each
    python benchmarks/training.py --sizes m50 --runs 7 --json training.json
    python benchmarks/training.py --url http://... --model NAME    # another Tinker-compatible address

A run is one `forward_backward` and one `optim_step` of every client, all submitted together, until the last result is
there; its tokens are those of the sequences, without padding. Baselines run in the same call, each in a process of its
own with as many threads: PEFT's LoRA on every linear, one padded batch, one client after the other (a PEFT model
trains one adapter at a time). Prints medians with their spread, the ratio, and the peak memory of engine and baseline.
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
    Work("ragged 16-512, 1 client", 1, (16, 512, 32, 64, 384, 48, 24, 128, 16, 256, 96, 40)),
    Work("1 x 32, 8 clients", 8, (32,)),
    Work("1 x 32, 32 clients", 32, (32,)),
    Work("8 x 256, 4 clients", 4, (256,) * 8),
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
        clients = [service.create_lora_training_client(model, rank=RANK).result() for _ in range(work.clients)]
        data = [[datum(tokens) for tokens in sequences(work, index)] for index in range(work.clients)]
        adam = types.AdamParams(learning_rate=1e-4)

        def run() -> None:
            waiting = []
            for client, own in zip(clients, data, strict=True):
                waiting.append(client.forward_backward(own, "cross_entropy"))
                waiting.append(client.optim_step(adam))
            for future in waiting:
                future.result()

        return timed(run, runs)


def of_peft(directory: Path, work: Work, runs: int) -> tuple[list[float], float]:
    """In a process of its own. Seconds of each run, and peak memory in MiB."""
    given = json.dumps({"directory": str(directory), "work": WORKS.index(work), "runs": runs})
    found = subprocess.run([sys.executable, __file__, "--baseline", given], stdout=subprocess.PIPE, check=True)
    answer = json.loads(found.stdout.splitlines()[-1])
    return answer["seconds"], answer["peak_mib"]


def baseline(given: dict[str, object]) -> dict[str, object]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    work = WORKS[int(str(given["work"]))]
    model = AutoModelForCausalLM.from_pretrained(str(given["directory"]), dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear"))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
    longest = max(work.lengths)
    batches = []
    for client in range(work.clients):
        ids = torch.zeros(len(work.lengths), longest, dtype=torch.int64)
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

    seconds = timed(run, int(str(given["runs"])))
    return {"seconds": seconds, "peak_mib": peak_mib(os.getpid())}


def peak_mib(pid: int) -> float:
    """The most memory that a process had resident, in MiB (Linux)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def engine_peak_mib() -> float:
    """Of the engine among the processes that this one started."""
    found, waiting = float("nan"), [os.getpid()]
    while waiting:
        pid = waiting.pop()
        for task in Path(f"/proc/{pid}/task").iterdir():
            waiting += map(int, (task / "children").read_text().split())
        if b"tinsmith.engine" in Path(f"/proc/{pid}/cmdline").read_bytes():
            found = peak_mib(pid)
    return found


@contextlib.contextmanager
def server(size: str, dtype: str, directory: Path) -> Iterator[str]:
    os.environ["TINSMITH_DTYPE"] = dtype
    with own_server(f"bench/{size}={directory}") as (url, _):
        yield url


def row(work: Work, seconds: list[float]) -> dict[str, float]:
    rates = sorted(work.num_tokens / second for second in seconds)
    return {"tokens_per_s": statistics.median(rates), "least": rates[0], "most": rates[-1]}


def compared(size: str, directory: Path, work: Work, dtypes: list[str], runs: int) -> list[dict[str, object]]:
    """One shape of work: the baseline, then the service with each dtype of the base."""
    seconds, peak = of_peft(directory, work, runs)
    figures = [{"size": size, "work": work.name, "what": "PEFT float32", **row(work, seconds), "peak_mib": peak}]
    for dtype in dtypes:
        with server(size, dtype, directory) as url:
            seconds = of_service(url, f"bench/{size}", work, runs)
            peak = engine_peak_mib()
        figures.append({"size": size, "work": work.name, "what": f"service {dtype}", **row(work, seconds)})
        figures[-1]["peak_mib"] = peak
    for found in figures:
        show(found, figures[0])
    return figures


def show(found: dict[str, object], base: dict[str, object]) -> None:
    rate, least, most = (float(str(found[key])) for key in ("tokens_per_s", "least", "most"))
    ratio = rate / float(str(base["tokens_per_s"]))
    print(
        f"{found['size']!s:5s} {found['work']!s:24s} {found['what']!s:18s} {rate:9,.0f} tokens/s "
        f"({least:,.0f} - {most:,.0f})  {ratio:5.2f} x  {found['peak_mib']:6,.0f} MiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny", "m50"])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--works", nargs="+", type=int, default=range(len(WORKS)), help="numbers of shapes of work")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--url", help="a running server, without baselines")
    parser.add_argument("--model", help="the base model's name there")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--baseline", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.baseline:
        sys.stdout.write(json.dumps(baseline(json.loads(given.baseline))) + "\n")
        return
    if given.url:
        for index in given.works:
            seconds = of_service(given.url, given.model, WORKS[index], given.runs)
            found: dict[str, object] = {
                "size": given.model,
                "work": WORKS[index].name,
                "what": "service",
                "peak_mib": float("nan"),
            }
            found.update(row(WORKS[index], seconds))
            show(found, found)
        return
    figures = []
    for size in given.sizes:
        with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
            make(size, Path(directory) / size)
            for index in given.works:
                figures += compared(size, Path(directory) / size, WORKS[index], given.dtypes, given.runs)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
