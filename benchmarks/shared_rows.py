"""What sharing the rows of prompts saves and costs in a trainer, beside the same trainer that shares nothing.

    python benchmarks/shared_rows.py                       # m50, float32; groups of 8
    python benchmarks/shared_rows.py --sizes h50 --shapes 512x64 --group 16

In one process, without a service: two backends train on the same data in turns, one of them with sharing switched off.
For groups of answers to one prompt it prints how many times as fast sharing is, and how many times fewer bytes it keeps
for the backward pass where all data are in one micro-batch. For as many data that share nothing it prints the ratio of
the times, which is what looking for shared rows costs. `shared_prompts.py` measures the same through the service.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import describe_machine, write_json
from interleaving import compute_speedup, format_spread, run_in_turns
from models import SIZES, make
from shared_prompts import PROMPTS, count_fewer, draw_answers
from torch import Tensor

from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.base_models import read_shape
from tinsmith.types import AdamParams, Datum, LoraSpec, ModelShape, OptimStep, Pass

ADAM = AdamParams(1e-5)


def draw_data(rng: np.random.Generator, shape: tuple[int, int], group: int, *, is_shared: bool) -> tuple[Datum, ...]:
    answers = draw_answers(rng, shape, group, is_shared=is_shared)
    return tuple(Datum(np.array(tokens, np.int32), arrays) for tokens, arrays in answers)


class Contestant:
    """A backend with one adapter. Not `shares`: every datum's rows are its own."""

    def __init__(self, shape: ModelShape, *, shares: bool, max_tokens: int | str = "auto") -> None:
        self.backend = TorchBackend(shape, device="cpu", max_tokens_per_microbatch=max_tokens)
        if not shares:
            self.backend._trainer._min_shared_rows = 0
        self.backend.create_model("m", LoraSpec(32, seed=0))

    def step(self, data: tuple[Datum, ...]) -> float:
        """Train on the data; return the seconds."""
        start = time.perf_counter()
        run_to_end(self.backend.run_passes([Pass("r", "m", data, "importance_sampling", {}, forward_only=False)]))
        self.backend.optim_step([OptimStep("o", "m", ADAM)])
        return time.perf_counter() - start

    def count_saved_bytes(self, data: tuple[Datum, ...]) -> int:
        """Bytes of all tensors that a pass keeps for the backward pass, each once, without the model's weights."""
        weights = {x.untyped_storage().data_ptr() for x in self.backend.base.model.state_dict().values()}
        saved: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            self.step(data)
        return sum(saved.values())


def compare_times(
    contestants: dict[str, Contestant], shape: tuple[int, int], group: int, runs: int, *, is_shared: bool
) -> dict[str, float]:
    """How many times as long the step without sharing takes."""
    generators = {name: np.random.default_rng(0) for name in contestants}

    def step(name: str) -> float:
        return contestants[name].step(draw_data(generators[name], shape, group, is_shared=is_shared))

    seconds = run_in_turns({name: (lambda name=name: step(name)) for name in contestants}, runs, print)
    return compute_speedup(seconds["shares"], seconds["separate"])


def measure(shape: ModelShape, lengths: tuple[int, int], group: int, runs: int) -> dict[str, Any]:
    pair = {name: Contestant(shape, shares=name == "shares") for name in ("shares", "separate")}
    row: dict[str, Any] = {"fewer_tokens": count_fewer(lengths, group)}
    row["speedup"] = compare_times(pair, lengths, group, runs, is_shared=True)
    row["nothing_shared"] = compare_times(pair, lengths, group, runs, is_shared=False)
    limit = PROMPTS * group * sum(lengths)
    data = draw_data(np.random.default_rng(1), lengths, group, is_shared=True)
    row["saved_bytes"] = {
        name: Contestant(shape, shares=name == "shares", max_tokens=limit).count_saved_bytes(data) for name in pair
    }
    row["fewer_bytes"] = row["saved_bytes"]["separate"] / row["saved_bytes"]["shares"]
    return row


def parse_lengths(text: str) -> tuple[int, int]:
    num_prompt, _, num_answer = text.partition("x")
    return int(num_prompt), int(num_answer)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=["m50"])
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument(
        "--shapes", nargs="+", type=parse_lengths, default=[(512, 64), (256, 512)], help="tokens: PROMPTxANSWER"
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    print(f"{describe_machine()}; {PROMPTS} groups of {args.group} a step; ratios to the trainer that shares nothing")
    print(f"{'model':<8}{'prompt x answer':>16}{'tokens':>8}{'bytes':>8}  {'times as fast':<22}nothing is shared")
    figures = {}
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as scratch:
            shape = read_shape(f"bench/{size}", make(size, Path(scratch) / size))
            for lengths in args.shapes:
                text = "x".join(map(str, lengths))
                row = figures[f"{size}/{text}/{args.group}"] = measure(shape, lengths, args.group, args.runs)
                ratios = f"{row['fewer_tokens']:8.2f}{row['fewer_bytes']:8.2f}"
                times = f"{format_spread(row['speedup'], '.2f'):<22}{format_spread(row['nothing_shared'], '.3f')}"
                print(f"{size:<8}{text:>16}{ratios}  {times}", flush=True)
    write_json(args.json, figures)


if __name__ == "__main__":
    main()
