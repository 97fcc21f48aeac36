"""A base model on several ranks beside one process: how near the numbers are, how fast it is, what each rank holds.

    python benchmarks/ranks.py                      # two and four ranks: 3 minutes on two idle cores
    python benchmarks/ranks.py --ranks 2 --runs 3 --size tiny --json ranks.json

Ranks are processes of this machine that share its cores, so on a CPU more ranks are not faster; what is to be seen is
what the ranks' talk costs. Four tenants train ten steps, ragged, on both; then the same step is timed in turns, one
process with all threads, then the ranks with their share. Figures: the largest difference of a log probability,
of a gradient and of the weights after ten steps (relative, by norm), training tokens a second and their ratio, the
share of the base model on a rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from models import SIZES, make

from tinsmith.backends import run_to_end
from tinsmith.backends.distributed import Degrees, Group, ShardedBackend
from tinsmith.backends.torch import TorchBackend
from tinsmith.base_models import read_shape
from tinsmith.types import AdamParams, Datum, LoraSpec, ModelShape, OptimStep, Pass, PassResult

DEGREES = {
    2: {
        "data 2": Degrees(2),
        "tensor 2": Degrees(1, 2),
        "data 2, base sharded": Degrees(2, 1, shard_base=True),
        "context 2": Degrees(context=2),
    },
    4: {
        "data 4": Degrees(4),
        "data 2 x tensor 2": Degrees(2, 2),
        "data 4, base sharded": Degrees(4, 1, shard_base=True),
        "data 2 x tensor 2, base sharded": Degrees(2, 2, shard_base=True),
        "context 2 x tensor 2": Degrees(1, 2, context=2),
    },
}
TENANTS = 4
RANK = 16
STEPS = 10
EPS = 1e-6
"""Adam's epsilon: with a smaller one, a parameter whose gradient is only rounding moves as far as any other."""

TIMED = (256, 16, 128, 64, 200, 32, 90, 240)
"""Lengths of the step that is timed, for each of two tenants."""

Either = TorchBackend | ShardedBackend


def build_datum(rng: np.random.Generator, vocab_size: int, length: int) -> Datum:
    tokens = rng.integers(1, vocab_size, length + 1)
    weights = rng.normal(size=length).astype(np.float32)
    return Datum(tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:].astype(np.int64), "weights": weights})


def build_passes(rng: np.random.Generator, vocab_size: int, lengths: Sequence[Sequence[int]]) -> list[Pass]:
    return [
        Pass(
            f"r{tenant}",
            f"m{tenant}",
            tuple(build_datum(rng, vocab_size, n) for n in tenant_lengths),
            "cross_entropy",
            {},
            False,
        )
        for tenant, tenant_lengths in enumerate(lengths)
    ]


def reset_models(backend: Either) -> Either:
    for tenant in range(TENANTS):
        backend.unload_model(f"m{tenant}")
        backend.create_model(f"m{tenant}", LoraSpec(RANK, seed=tenant))
    return backend


def local_model(backend: Either, tenant: int):
    local_backend = backend.local if isinstance(backend, ShardedBackend) else backend
    return local_backend._models[f"m{tenant}"]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-12))


def measure_agreement(single: Either, sharded: Either, shape: ModelShape) -> dict[str, float]:
    """The largest differences over ten steps of all tenants."""
    rng = np.random.default_rng(0)
    logprob = gradient = 0.0
    steps = [OptimStep(f"s{i}", f"m{i}", AdamParams(1e-3, eps=EPS, grad_clip_norm=1.0)) for i in range(TENANTS)]
    for _ in range(STEPS):
        lengths = [rng.integers(4, 120, 3 + tenant) for tenant in range(TENANTS)]
        passes = build_passes(rng, shape.vocab_size, [tenant_lengths.tolist() for tenant_lengths in lengths])
        for theirs, ours in zip(
            run_to_end(single.run_passes(passes)), run_to_end(sharded.run_passes(passes)), strict=True
        ):
            assert isinstance(theirs, PassResult) and isinstance(ours, PassResult)
            pairs = zip(theirs.logprobs, ours.logprobs, strict=True)
            logprob = max(logprob, *(float(np.abs(a - b).max()) for a, b in pairs))
        for tenant in range(TENANTS):
            theirs_P, ours_P = local_model(single, tenant).gradient_P, local_model(sharded, tenant).gradient_P
            assert theirs_P is not None and ours_P is not None
            gradient = max(gradient, relative_error(ours_P, theirs_P))
        for backend in (single, sharded):
            backend.optim_step(steps)
    weights = max(
        relative_error(local_model(sharded, tenant).adapter.flat_P, local_model(single, tenant).adapter.flat_P)
        for tenant in range(TENANTS)
    )
    return {"logprob": logprob, "gradient": gradient, "weights": weights}


def time_passes(backend: Either, passes: Sequence[Pass], threads: int) -> float:
    torch.set_num_threads(threads)
    started = time.perf_counter()
    run_to_end(backend.run_passes(passes))
    backend.optim_step([OptimStep("s", request.model_id, AdamParams(1e-4)) for request in passes])
    return time.perf_counter() - started


def measure_speed(
    single: Either, sharded: Either, shape: ModelShape, *, world: int, threads: int, runs: int
) -> dict[str, float]:
    """Medians of runs in turns, after one of each that does not count."""
    passes = build_passes(np.random.default_rng(1), shape.vocab_size, [TIMED, TIMED])
    tokens = sum(request.num_tokens for request in passes)
    single_seconds, sharded_seconds = [], []
    for round_index in range(runs + 1):
        pair = time_passes(single, passes, threads), time_passes(sharded, passes, max(1, threads // world))
        if round_index:
            single_seconds.append(pair[0])
            sharded_seconds.append(pair[1])
    ratios = [a / b for a, b in zip(single_seconds, sharded_seconds, strict=True)]
    return {
        "one_tokens_per_s": tokens / statistics.median(single_seconds),
        "tokens_per_s": tokens / statistics.median(sharded_seconds),
        "ratio": statistics.median(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", choices=DEGREES, default=list(DEGREES))
    parser.add_argument("--size", choices=SIZES, default="m50")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    threads = torch.get_num_threads()
    figures_by_name: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        shape = read_shape(f"bench/{args.size}", make(args.size, Path(scratch) / args.size))
        single = TorchBackend(shape, device="cpu", max_tokens_per_microbatch=512)
        base_bytes = single.base.num_bytes
        header = f"{'ranks':<34}{'logprob':>10}{'gradient':>10}{'weights':>10}{'tokens/s':>10}{'x one':>8}{'base':>8}"
        print(f"{args.size}, {threads} threads in all, {STEPS} steps of {TENANTS} tenants\n{header}", flush=True)
        for world in args.ranks:
            group = Group(world, device="cpu", timeout_s=600.0)
            try:
                for name, degrees in DEGREES[world].items():
                    sharded = ShardedBackend(shape, degrees, group, max_tokens_per_microbatch="512")
                    figures = measure_agreement(reset_models(single), reset_models(sharded), shape)
                    figures |= measure_speed(single, sharded, shape, world=world, threads=threads, runs=args.runs)
                    figures["base_share"] = sharded.local.base.num_bytes / base_bytes
                    figures_by_name[name] = figures
                    print(
                        f"{name:<34}{figures['logprob']:>10.1e}{figures['gradient']:>10.1e}{figures['weights']:>10.1e}"
                        f"{figures['tokens_per_s']:>10.0f}{figures['ratio']:>8.2f}{figures['base_share']:>8.2f}",
                        flush=True,
                    )
            finally:
                group.close()
    if args.json:
        args.json.write_text(json.dumps(figures_by_name, indent=2) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
