"""How far numbers depend on the rest of their batch, and the cost of `--deterministic`.

    python benchmarks/invariance.py                               # nano and tiny, both dtypes; about three minutes
    python benchmarks/invariance.py --models nano --dtypes float32 --json invariance.json

In process, without a service: one adapter's requests are computed alone, and then otherwise: split into one request per
sequence, in another order, and in two requests packed with those of seven other tenants. The first table has the
largest difference of a logprob, the relative difference of the gradient, and that of the weights after ten optimizer
steps (also of how far they have moved). The second has what sampled logprobs and tokens do beside other tenants, in
small pieces and behind cached prefixes, and how far training is from sampling. Each row again for `--deterministic`,
where all but the order of one's own data must be 0; the third table is its price, measured by turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from models import make

from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.base_models import nano, read_shape
from tinsmith.samplers.local.engine import LocalSampler, SamplerOptions
from tinsmith.types import AdamParams, Datum, LoraSpec, ModelShape, OptimStep, Pass, PassResult, Sample, SamplingParams

MODELS = ("nano", "tiny")
DTYPES = ("float32", "bfloat16")
LENGTHS = (12, 100, 16, 32, 60, 24, 8, 48)
TENANTS, STEPS, RANK = 8, 10, 32
PROMPTS, PROMPT, NEW, OTHERS = 8, 48, 32, 24
ADAM = AdamParams(1e-3)

Batches = list[list[Pass]]
"""Requests by the step that they share."""


def read_model_shape(model: str, directory: Path) -> ModelShape:
    return read_shape(model, nano.path() if model == "nano" else make(model, directory / model))


def build_data(backend: TorchBackend, tenant: int) -> list[Datum]:
    rng = np.random.default_rng(tenant)
    data = []
    for length in rng.permutation(LENGTHS):
        tokens = rng.integers(1, backend.base.shape.vocab_size, length + 1)
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)}
        data.append(Datum(tokens[:-1].astype(np.int32), inputs))
    return data


def build_pass(model_id: str, data: Sequence[Datum], *, forward_only: bool = False) -> Pass:
    return Pass("r", model_id, tuple(data), "cross_entropy", {}, forward_only)


def batch_alone(data: list[Datum], other_passes: list[Pass]) -> Batches:
    return [[build_pass("m", data)]]


def batch_split(data: list[Datum], other_passes: list[Pass]) -> Batches:
    return [[build_pass("m", [datum])] for datum in data]


def batch_reversed(data: list[Datum], other_passes: list[Pass]) -> Batches:
    return [[build_pass("m", data[::-1])]]


def batch_with_tenants(data: list[Datum], other_passes: list[Pass]) -> Batches:
    half = len(data) // 2
    return [[*other_passes[:3], build_pass("m", data[:half]), build_pass("m", data[half:])]]


WAYS: dict[str, Callable[[list[Datum], list[Pass]], Batches]] = {
    "split": batch_split,
    "reordered": batch_reversed,
    "split, beside other tenants": batch_with_tenants,
}


class TrainingRun:
    """Ten steps in one way: the first step's logprobs by sequence and gradient, the weights before and after."""

    def __init__(self, backend: TorchBackend, way: Callable[[list[Datum], list[Pass]], Batches]) -> None:
        spec = LoraSpec(RANK, seed=0)
        for tenant in range(TENANTS):
            backend.create_model(f"t{tenant}", LoraSpec(8 * (tenant + 1), seed=tenant))
        backend.create_model("m", spec)
        trained = backend._models["m"]
        self.start_P = trained.adapter.flat_P.clone()
        data = build_data(backend, 0)
        other_passes = [build_pass(f"t{tenant}", build_data(backend, tenant)) for tenant in range(1, TENANTS)]
        for step in range(STEPS):
            logprobs: list[np.ndarray] = []
            for batch in way(data, other_passes):
                for training_pass, result in zip(batch, run_to_end(backend.run_passes(batch)), strict=True):
                    assert isinstance(result, PassResult), result
                    if training_pass.model_id == "m":
                        logprobs += result.logprobs
            if step == 0:
                ordered = logprobs[::-1] if way is batch_reversed else logprobs
                self.logprobs = np.concatenate(ordered)
                self.gradient_P = trained.gradient_or_zeros().clone()
            backend.optim_step([OptimStep("o", "m", ADAM)])
        self.weights_P = trained.adapter.flat_P.clone()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def measure_training(backend: TorchBackend, labels: dict[str, object]) -> list[dict[str, object]]:
    expected = TrainingRun(backend, batch_alone)
    rows = []
    for name, way in WAYS.items():
        actual = TrainingRun(backend, way)
        rows.append(
            {
                **labels,
                "way": name,
                "logprobs": float(np.abs(actual.logprobs - expected.logprobs).max()),
                "gradient": relative_error(actual.gradient_P, expected.gradient_P),
                "weights": relative_error(actual.weights_P, expected.weights_P),
                "movement": relative_error(actual.weights_P - expected.start_P, expected.weights_P - expected.start_P),
            }
        )
    return rows


def build_prompts(backend: TorchBackend, first: int, num: int, length: int | None = None) -> list[np.ndarray]:
    size = backend.base.shape.vocab_size
    return [
        np.random.default_rng([1, i]).integers(1, size, length or PROMPT).astype(np.int32)
        for i in range(first, first + num)
    ]


def build_sample(name: str, prompt: np.ndarray, version: str, new: int | None = None) -> Sample:
    return Sample(
        name, version, prompt, 1, SamplingParams(max_tokens=new or NEW, temperature=1.0, stop_eos=False, seed=1)
    )


def draw_samples(sampler: LocalSampler, samples: Sequence[Sample]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Tokens and logprobs of each request."""
    answer_by_request = {}
    for sample in samples:
        sampler.submit(sample)
    while sampler.has_work:
        for name, result in sampler.step():
            sequence = result.sequences[0]  # pyright: ignore[reportAttributeAccessIssue]
            answer_by_request[name] = sequence.tokens_T, sequence.logprobs_T
    return answer_by_request


def open_sampler(backend: TorchBackend, options: SamplerOptions | None = None) -> LocalSampler:
    options = replace(options or SamplerOptions(), deterministic=backend._deterministic)
    return LocalSampler(backend.base, backend._versions, options=options)


def measure_sampling(backend: TorchBackend, labels: dict[str, object]) -> list[dict[str, object]]:
    for tenant in range(TENANTS):
        backend.publish(f"t{tenant}", f"v{tenant}")
    backend.publish("m", "v")
    prompts = build_prompts(backend, 0, PROMPTS)
    own_samples = [build_sample(f"own{i}", prompt, "v") for i, prompt in enumerate(prompts)]
    other_samples = [
        build_sample(f"other{i}", prompt, f"v{i % TENANTS}")
        for i, prompt in enumerate(build_prompts(backend, PROMPTS, OTHERS, PROMPT // 3))
    ]
    expected: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    by_itself = open_sampler(backend)
    for sample in own_samples:
        expected |= draw_samples(by_itself, [sample])
    warm = open_sampler(backend)
    longer = [build_sample(f"seed{i}", np.concatenate([p, expected[f"own{i}"][0][:16]]), "v", 1)
              for i, p in enumerate(prompts)]  # fmt: skip
    draw_samples(warm, longer)
    ways = {
        "beside other tenants": (open_sampler(backend), [*other_samples[::2], *own_samples, *other_samples[1::2]]),
        "in small pieces": (open_sampler(backend, SamplerOptions(max_tokens_per_step=9)), own_samples),
        "behind a cached prefix": (warm, own_samples),
    }
    rows: list[dict[str, object]] = []
    for name, (sampler, samples) in ways.items():
        actual = draw_samples(sampler, samples)
        flipped, max_difference = 0, 0.0
        for sample in own_samples:
            (tokens, logprobs), (ours, theirs) = expected[sample.request_id], actual[sample.request_id]
            num_same = int(np.argmin(np.append(tokens == ours, False)))
            flipped += num_same < len(tokens)
            max_difference = max(max_difference, float(np.abs(logprobs[:num_same] - theirs[:num_same]).max(initial=0)))
        rows.append({**labels, "way": name, "logprobs": max_difference, "flipped": flipped, "of": len(own_samples)})
    gaps = np.concatenate([measure_training_gap(backend, p, *expected[f"own{i}"]) for i, p in enumerate(prompts)])
    rows.append({**labels, "way": "against training", "logprobs": float(gaps.max()), "mean": float(gaps.mean())})
    return rows


def measure_training_gap(
    backend: TorchBackend, prompt: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray
) -> np.ndarray:
    sequence = np.concatenate([prompt, tokens]).astype(np.int64)
    inputs = {"target_tokens": sequence[1:], "weights": np.ones(len(sequence) - 1, np.float32)}
    (result,) = run_to_end(
        backend.run_passes([build_pass("m", [Datum(sequence[:-1].astype(np.int32), inputs)], forward_only=True)])
    )
    assert isinstance(result, PassResult)
    return np.abs(result.logprobs[0][len(prompt) - 1 :] - logprobs)


def build_training_run(backend: TorchBackend, clients: int, lengths: Sequence[int]) -> tuple[Callable[[], None], int]:
    for client in range(clients):
        backend.create_model(f"p{client}", LoraSpec(RANK, seed=client))
    rng = np.random.default_rng(0)
    passes = []
    for client in range(clients):
        data = []
        for length in lengths:
            tokens = rng.integers(1, backend.base.shape.vocab_size, length + 1)
            inputs = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)}
            data.append(Datum(tokens[:-1].astype(np.int32), inputs))
        passes.append(build_pass(f"p{client}", data))

    def run() -> None:
        run_to_end(backend.run_passes(passes))
        backend.optim_step([OptimStep("o", f"p{client}", ADAM) for client in range(clients)])

    return run, clients * sum(lengths)


def build_sampling_run(backend: TorchBackend, adapters: int, at_once: int) -> tuple[Callable[[], None], int]:
    for index in range(adapters):
        backend.create_model(f"s{index}", LoraSpec(RANK, seed=index))
        backend.publish(f"s{index}", f"s{index}")
    seeds = iter(range(10_000, 10**9, at_once))

    def run() -> None:
        prompts = build_prompts(backend, next(seeds), at_once)
        draw_samples(backend.sampler, [build_sample(f"{i}", p, f"s{i % adapters}") for i, p in enumerate(prompts)])  # pyright: ignore[reportArgumentType]

    return run, at_once * NEW


Price = Callable[[TorchBackend], tuple[Callable[[], None], int]]
PRICES: dict[str, Price] = {
    "train 1 x (4 x 128)": lambda backend: build_training_run(backend, 1, (128,) * 4),
    "train 8 x (1 x 32)": lambda backend: build_training_run(backend, 8, (32,)),
    "train ragged 8-100": lambda backend: build_training_run(backend, 1, LENGTHS),
    "sample 1": lambda backend: build_sampling_run(backend, 1, 1),
    "sample 16": lambda backend: build_sampling_run(backend, 1, 16),
    "sample 64": lambda backend: build_sampling_run(backend, 1, 64),
    "sample 16, 8 adapters": lambda backend: build_sampling_run(backend, 8, 16),
}


def measure_rates(
    plain: TorchBackend, exact: TorchBackend, labels: dict[str, object], runs: int
) -> list[dict[str, object]]:
    """Tokens per second of both, measured by turns, and the median of the ratios."""
    rows: list[dict[str, object]] = []
    for name, price in PRICES.items():
        (first, num_tokens), (second, _) = price(plain), price(exact)
        seconds: list[tuple[float, float]] = []
        for run in range(runs + 1):
            pair = time_run(first), time_run(second)
            if run:
                seconds.append(pair)
        usual, slow = (statistics.median(num_tokens / pair[side] for pair in seconds) for side in (0, 1))
        ratio = statistics.median(usual_s / exact_s for usual_s, exact_s in seconds)
        rows.append({**labels, "work": name, "usual": usual, "deterministic": slow, "ratio": ratio})
    return rows


def measure_model(shape: ModelShape, labels: dict[str, object], runs: int) -> dict[str, list[dict[str, object]]]:
    """The figures of one model in one dtype, which are also printed as they come."""
    options = {"device": "cpu", "dtype": str(labels["dtype"])}
    backends = {mode: TorchBackend(shape, **options, deterministic=mode) for mode in ("off", "on")}
    training = [row for mode in backends for row in measure_training(backends[mode], {**labels, "deterministic": mode})]
    print_rows("Training: differences from the same requests alone", training)
    sampling = [row for mode in backends for row in measure_sampling(backends[mode], {**labels, "deterministic": mode})]
    print_rows("Sampling: differences from the same requests alone", sampling)
    prices = measure_rates(backends["off"], backends["on"], labels, runs) if runs else []
    if prices:
        print_rows("Tokens per second", prices)
    return {"training": training, "sampling": sampling, "prices": prices}


def list_largest(
    figures: dict[str, list[dict[str, object]]], model: str, dtypes: Sequence[str]
) -> list[dict[str, object]]:
    """The largest difference of all ways, without `--deterministic`, as docs/numerics.md has them."""

    def largest(part: str, column: str, dtype: str, *, against: bool = False) -> float:
        labels = {"model": model, "dtype": dtype, "deterministic": "off"}
        rows = [row for row in figures[part] if all(row[name] == label for name, label in labels.items())]
        chosen = [row for row in rows if (row["way"] == "against training") == against]
        return max(float(str(row[column])) for row in chosen)

    rows: list[dict[str, object]] = []
    for measure, part, column, against in (
        ("logprobs in training", "training", "logprobs", False),
        ("gradient of the first step, relative", "training", "gradient", False),
        ("weights after ten steps, relative", "training", "weights", False),
        ("logprobs of samples", "sampling", "logprobs", False),
        ("logprobs of samples against training, worst", "sampling", "logprobs", True),
        ("the same, mean", "sampling", "mean", True),
    ):
        rows.append({"what": measure, **{dtype: largest(part, column, dtype, against=against) for dtype in dtypes}})
    return rows


def time_run(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def print_rows(title: str, rows: Sequence[dict[str, object]]) -> None:
    """As a table of Markdown."""
    print(f"\n{title}\n")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(_format_cell(row.get(column, "")) for column in columns) + " |", flush=True)


def _format_cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
    return str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--runs", type=int, default=5, help="measurements of each price; 0 leaves the prices out")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    figures: dict[str, list[dict[str, object]]] = {"training": [], "sampling": [], "prices": []}
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
        for model in args.models:
            for dtype in args.dtypes:
                model_figures = measure_model(
                    read_model_shape(model, Path(directory)), {"model": model, "dtype": dtype}, args.runs
                )
                for name, rows in model_figures.items():
                    figures[name] += rows
    for model in args.models:
        print_rows(
            f"{model}, without --deterministic: the worst of all ways", list_largest(figures, model, args.dtypes)
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
