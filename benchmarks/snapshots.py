"""The cost of snapshots: training steps with and without them, interleaved, in one process.

    python benchmarks/snapshots.py                   # tinsmith/nano, and a random model of 50 million parameters
    python benchmarks/snapshots.py --only nano --rounds 20

A round is 16 steps (a pass of --tokens tokens and an optimizer step), with one snapshot behind it or none. What the
engine's thread waits for is the copy; the rest is what the writing thread takes from it. Times of a wall clock are
worth something on a quiet machine only, so the processor time of copy and writing is given, too, as a share of that of
the steps: once as if every 16 steps had their snapshot, and once as the engine spaces them (from 16 to 64 steps, see
engine/snapshots.py). Prints a line for each model.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.base_models import nano, read_shape
from tinsmith.engine.snapshots import MAX_OPTIM_STEPS, SNAPSHOT_OPTIM_STEPS, SNAPSHOT_SHARE, SnapshotWriter, WriteTask
from tinsmith.storage.directories import Directories
from tinsmith.types import AdamParams, Datum, LoraSpec, ModelShape, OptimStep, Pass

LENGTH = 128


def write_random_model(directory: Path) -> ModelShape:
    """Qwen3 of 50 million parameters, with nano's tokenizer beside it."""
    config = Qwen3Config(
        vocab_size=1024, hidden_size=640, intermediate_size=1792, num_hidden_layers=11, num_attention_heads=10,
        num_key_value_heads=5, head_dim=64, max_position_embeddings=1024,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)
    for file in nano.path().glob("token*"):
        (directory / file.name).write_bytes(file.read_bytes())
    return read_shape("local/50m", directory)


def build_pass(rng: np.random.Generator, vocab_size: int, num_tokens: int) -> Pass:
    data = []
    for _ in range(num_tokens // LENGTH):
        tokens = rng.integers(0, vocab_size, LENGTH)
        inputs = {"target_tokens": np.roll(tokens, -1), "weights": np.ones(LENGTH, np.float32)}
        data.append(Datum(tokens.astype(np.int32), inputs))
    return Pass("r", "m", tuple(data), "cross_entropy", {}, False)


class Run:
    def __init__(self, shape: ModelShape, rank: int, num_tokens: int, directory: Path) -> None:
        self.backend = TorchBackend(shape)
        self.backend.create_model("m", LoraSpec(rank))
        self.writer = SnapshotWriter()
        self.directories = Directories(directory)
        self.pass_ = build_pass(np.random.default_rng(0), min(shape.vocab_size, 400), num_tokens)
        self.captures_s: list[float] = []
        self.writes_s: list[float] = []
        self.processor_s: list[float] = []  # of copy and writing
        self.steps_processor_s: list[float] = []  # of 16 steps without a snapshot

    def run_round(self, *, snapshot: bool) -> float:
        """Seconds of 16 steps; a snapshot is written behind them."""
        started, processor = time.perf_counter(), time.process_time()
        if snapshot:
            before = time.thread_time()
            captured = self.backend.capture("m")
            self.captures_s.append(time.perf_counter() - started)
            self.processor_s.append(time.thread_time() - before)
            self.writer.submit(WriteTask(captured.num_bytes, lambda: self._write(captured.write), lambda _error: None))
        for _ in range(SNAPSHOT_OPTIM_STEPS):
            run_to_end(self.backend.run_passes([self.pass_]))
            self.backend.optim_step([OptimStep("o", "m", AdamParams(1e-5))])
        took_s = time.perf_counter() - started
        if not snapshot:
            self.steps_processor_s.append(time.process_time() - processor)
        self.writer.flush()
        return took_s

    def _write(self, fill: Callable[[Path], None]) -> None:
        started, processor = time.perf_counter(), time.thread_time()
        name, _ = self.directories.write(fill)
        self.processor_s[-1] += time.thread_time() - processor
        self.writes_s.append(time.perf_counter() - started)
        self.directories.discard(name)


def measure(name: str, shape: ModelShape, rank: int, num_tokens: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run = Run(shape, rank, num_tokens, Path(directory))
        run.run_round(snapshot=True)
        pairs = []
        for index in range(rounds):
            order = (False, True) if index % 2 else (True, False)
            times = {snapshot: run.run_round(snapshot=snapshot) for snapshot in order}
            pairs.append((times[True], times[False]))
    without = statistics.median(without for _, without in pairs)
    cost = statistics.median(with_ - without for with_, without in pairs)
    share = statistics.median(run.processor_s) / statistics.median(run.steps_processor_s)
    cost_s = statistics.median(run.processor_s)
    paid_by = math.ceil(cost_s / SNAPSHOT_SHARE / (without / SNAPSHOT_OPTIM_STEPS))  # steps
    steps_between = min(MAX_OPTIM_STEPS, max(SNAPSHOT_OPTIM_STEPS, paid_by))
    spaced = share * SNAPSHOT_OPTIM_STEPS / steps_between
    adapter = run.backend.model_bytes("m") / 4 / 2**20
    print(
        f"{name}, rank {rank} ({adapter:.1f} MiB), {num_tokens} tokens a step: step "
        f"{1000 * without / SNAPSHOT_OPTIM_STEPS:.1f} ms; capture {1000 * statistics.median(run.captures_s):.2f} ms, "
        f"written in {1000 * statistics.median(run.writes_s):.0f} ms; {100 * cost / without:+.2f} % by the wall clock; "
        f"processor time {1000 * statistics.median(run.processor_s):.0f} ms, {100 * share:.2f} % of that of the steps; "
        f"taken every {steps_between} steps, {100 * spaced:.2f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("nano", "50m"))
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.only != "50m":
        measure(nano.MODEL_NAME, read_shape(nano.MODEL_NAME, nano.path()), args.rank, args.tokens, args.rounds)
    if args.only != "nano":
        with tempfile.TemporaryDirectory() as directory:
            measure("50 M", write_random_model(Path(directory)), args.rank, args.tokens, args.rounds)


if __name__ == "__main__":
    main()
