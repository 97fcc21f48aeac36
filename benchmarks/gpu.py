"""Training and sampling on one GPU, in one process, beside transformers and PEFT on the same device in the same run.

    python benchmarks/gpu.py --write docs/benchmarks/gpu.md     # make bench-gpu: the shapes of four Qwen3 models
    python benchmarks/gpu.py --vllm /venvs/vllm/bin/python      # beside a vLLM, too
    python benchmarks/gpu.py --model /data/models/Qwen3-8B      # a model that is there, in place of those
    python benchmarks/gpu.py --device cpu --sizes tiny --quick  # without a GPU: that it works, and nothing else

It ends within `--seconds` and a row: each model has a share of that time, the most telling rows come first, and rows
for which too little is left are named. All is in bfloat16 with random weights, adapters in float32 on every linear.
What is compared takes turns, run by run; medians and their spread are shown.

Training: forward, backward and an optimizer step; of 8 adapters each has a part of the sequences. PEFT does one tenant
after the other in micro-batches of as many tokens as ours, and where memory runs out with recomputed activations, then
in smaller ones. MFU: the operations that a step needs (`gpu_page.Sizes`) in the time that it took, as a share of the
data sheet's peak, or of a large product's speed on devices that are not listed. Sampling: as many prompts of 64 tokens
as there are at once, 64 new tokens each; transformers' `generate` has no adapter. An RL step: 32 prompts with 4 samples
each, a pass over them, an optimizer step and publishing. Peak memory is what a run takes of the device beside what lay
there before it (weights, caches, adapters). How far sampled logprobs are from those that training computes for the same
tokens is shown, too: a figure that is fast and wrong is none.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gpu_page import AGREEMENT, Budget, Figures, Sizes, page, peak_tflops, sampling, training, verdict
from harness import describe_machine, write_json
from interleaving import Child, ChildFailed
from models import make
from peers import NEW, PROMPT, prompt
from training import LEARNING_RATE, RANK, Workload, packed_step, sequences

from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.base_models import read_shape
from tinsmith.plan.memory import MICRO_BATCH
from tinsmith.samplers.local.engine import LocalSampler
from tinsmith.types import (
    AdamParams,
    Datum,
    LoraSpec,
    ModelShape,
    OptimStep,
    Pass,
    PassResult,
    Sample,
    SampleResult,
    SamplingParams,
)

AT_ONCE = (1, 16, 64, 256)
ADAPTERS = (0, 1, 8)
SIZES = {"qwen3-0.6b": 1.5, "qwen3-8b": 3.0, "qwen3-4b": 2.0, "qwen3-1.7b": 1.0}
"""The models in order, with their shares of the time."""
WORKS = [(2, 4096, 16, 1), (16, 2048, 32, 1), (16, 2048, 32, 8), (8, 4096, 32, 8)]
MORE_WORKS = [(16, 2048, 16, 1), (2, 4096, 32, 1), (16, 2048, 16, 8), (8, 4096, 16, 8)]
"""Sequences, their length, rank, adapters."""
VLLM_START_S = 120.0
Run = Callable[[], object]


@dataclass(slots=True)
class Contestant:
    """`tokens` of one run; seconds of each run that counts; `failed` is the reason of a failure, or empty."""

    name: str
    run: Run
    tokens: int
    operations: float = 0.0  # of a token
    warm_runs: int = 1
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    failed: str = ""

    def figures(self, peak: float) -> dict[str, Any]:
        """`peak` in operations per second."""
        if self.failed:
            return {"failed": self.failed}
        rate = self.tokens / statistics.median(self.seconds)
        return {
            "tokens_per_s": rate,
            "most": self.tokens / min(self.seconds),
            "least": self.tokens / max(self.seconds),
            "peak_mib": self.peak_bytes / 2**20,
            **({"mfu": rate * self.operations / peak} if self.operations else {}),
        }


def read_driver_version() -> str:
    """The driver's version, where NVIDIA's tool is installed."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


class Device:
    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.is_cuda = self.device.type == "cuda"
        self.product_tflops = 0.0

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.is_cuda else "CPU"

    @property
    def peak(self) -> float:
        """Operations per second of which MFU is a share."""
        return 1e12 * (peak_tflops(self.name) or self.product_tflops)

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def describe(self) -> str:
        hardware = describe_machine()
        if self.is_cuda:
            properties = torch.cuda.get_device_properties(self.device)
            hardware = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, driver {read_driver_version()}"
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {date.today()}"
        return f"{hardware}; {versions}: `{' '.join(['gpu.py', *sys.argv[1:]])}`."

    def time_run(self, run: Run) -> float:
        self.wait()
        started = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - started

    def try_run(self, contestant: Contestant) -> float:
        """The seconds of a run; one that fails leaves."""
        try:
            return self.time_run(contestant.run)
        except (RuntimeError, MemoryError, ValueError, AssertionError) as error:
            contestant.failed = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}".replace("|", "/")
        self.free()
        return 0.0

    def run_in_turns(self, contestants: list[Contestant], runs: int, budget: Budget) -> None:
        """Runs that do not count, and up to `runs` that do, as far as there is time."""
        first_s, before = 0.0, 0
        for contestant in contestants:
            for _ in range(contestant.warm_runs):
                self.try_run(contestant)  # takes what memory it needs, compiles, and chooses kernels
            if self.is_cuda:
                before = torch.cuda.memory_allocated(self.device)
                torch.cuda.reset_peak_memory_stats(self.device)
            if not contestant.failed:
                contestant.seconds.append(self.try_run(contestant))
                first_s += contestant.seconds[-1]
            if self.is_cuda:
                contestant.peak_bytes = torch.cuda.max_memory_allocated(self.device) - before
        for _ in range(budget.runs(runs, first_s) - 1):
            for contestant in contestants:
                if not contestant.failed:
                    contestant.seconds.append(self.try_run(contestant))


def measure_ceilings(device: Device, size: int) -> dict[str, float]:
    """The rates of a large product and of a copy that no cache holds."""
    a = torch.randn(size, size, device=device.device, dtype=torch.bfloat16)
    store = torch.empty(size * size * 8, device=device.device, dtype=torch.bfloat16)
    product_s = min(device.time_run(lambda: a @ a) for _ in range(8))
    copy_s = min(device.time_run(lambda: store.clone()) for _ in range(8))
    return {"product_tflops": 2e-12 * size**3 / product_s, "copy_gb_per_s": 2e-9 * store.nbytes / copy_s}


# Training.


class Peft:
    """A model of transformers with an adapter of each rank, of which one is active."""

    def __init__(self, base: Any, device: Device) -> None:  # noqa: ANN401 - a model of any class
        from peft import LoraConfig, get_peft_model

        # "all-linear" would leave the unembedding out.
        linears = {name.rpartition(".")[2] for name, part in base.named_modules() if isinstance(part, torch.nn.Linear)}
        options = {"lora_alpha": 32, "target_modules": sorted(linears)}
        self.model: Any = get_peft_model(base, LoraConfig(r=RANK, **options), str(RANK))
        self._config = lambda rank: LoraConfig(r=rank, **options)
        self._tokens = MICRO_BATCH[device.is_cuda]
        self._free = device.free

    def base(self) -> Any:  # noqa: ANN401
        """The model without adapters; this object is of no use afterwards."""
        model, self.model = self.model.unload(), None
        model.gradient_checkpointing_disable()
        return model

    def step(self, workload: Workload) -> Run:
        model, rank = self.model, str(workload.rank)
        if rank not in model.peft_config:
            model.add_adapter(rank, self._config(workload.rank))
        model.set_adapter(rank)
        model.gradient_checkpointing_disable()
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=LEARNING_RATE)
        batches = [build_batch(sequences(workload, client), model.device) for client in range(workload.clients)]
        rows, recomputes = max(1, self._tokens // max(workload.lengths)), False

        def run() -> None:
            nonlocal rows, recomputes
            while True:
                try:
                    self._run(batches, rows, optimizer)
                    return
                except torch.OutOfMemoryError:
                    optimizer.zero_grad()
                    if rows == 1 and recomputes:
                        raise
                self._free()
                if recomputes:
                    rows = -(-rows // 2)
                else:
                    recomputes = True
                    model.enable_input_require_grads()
                    model.gradient_checkpointing_enable({"use_reentrant": False})

        return run

    def _run(self, batches: list[tuple[torch.Tensor, ...]], rows: int, optimizer: torch.optim.Optimizer) -> None:
        torch.backends.cuda.enable_cudnn_sdp(True)  # torch's default, which Tinsmith turns off
        try:
            self._pass(batches, rows, optimizer)
        finally:
            torch.backends.cuda.enable_cudnn_sdp(False)

    def _pass(self, batches: list[tuple[torch.Tensor, ...]], rows: int, optimizer: torch.optim.Optimizer) -> None:
        self.model.train()  # recomputes activations in this mode only; there is no dropout
        for batch in batches:
            for ids, mask, labels in zip(*(x.split(rows) for x in batch), strict=True):
                logits = self.model(input_ids=ids, attention_mask=mask).logits.float()
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                del logits
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def build_batch(tokens: list[np.ndarray], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Ids, mask and labels, padded on the right."""
    ids = torch.zeros(len(tokens), max(map(len, tokens)) - 1, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, row_tokens in enumerate(tokens):
        ids[row, : len(row_tokens) - 1] = torch.from_numpy(row_tokens[:-1])
        labels[row, : len(row_tokens) - 1] = torch.from_numpy(row_tokens[1:])
    return tuple(x.to(device) for x in (ids, (labels != -100).long(), labels))


def build_workload(count: int, length: int, rank: int, adapters: int) -> Workload:
    name = training(count, length, rank, adapters)
    return Workload(name, adapters, (length,) * max(1, count // adapters), rank)


# Sampling.


def draw_samples(sampler: LocalSampler, samples: list[Sample]) -> dict[str, SampleResult]:
    result_by_request: dict[str, SampleResult] = {}
    for sample in samples:
        sampler.submit(sample)
    while sampler.has_work:
        for request_id, outcome in sampler.step():
            if isinstance(outcome, Exception):
                raise outcome
            result_by_request[request_id] = outcome
    return result_by_request


def build_sample(name: str, version: str | None, num_samples: int = 1, max_tokens: int = NEW) -> Sample:
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, stop_eos=False)
    return Sample(name, version, np.array(prompt(), np.int32), num_samples, params)


def sampler_run(sampler: LocalSampler, at_once: int, adapters: int) -> Run:
    return lambda: draw_samples(
        sampler, [build_sample(f"s{index}", f"v{index % adapters}" if adapters else None) for index in range(at_once)]
    )


def generate_run(model: torch.nn.Module, at_once: int) -> Run:
    device = next(model.parameters()).device
    options = {"do_sample": True, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0, "top_k": 0}

    def run() -> None:
        ids = torch.tensor([prompt() for _ in range(at_once)], device=device)
        with torch.no_grad():
            model.eval().generate(ids, attention_mask=torch.ones_like(ids), **options)  # pyright: ignore[reportCallIssue]

    return run


def time_publish_ms(backend: TorchBackend, sampler: LocalSampler, device: Device, runs: int) -> float:
    """Milliseconds to publish weights that an optimizer step changed and to draw the first token from them."""

    def once() -> None:
        backend.publish("m0", "v0")
        draw_samples(sampler, [build_sample("first", "v0", max_tokens=1)])

    milliseconds = []
    for _ in range(runs):
        backend.optim_step([OptimStep("o", "m0", AdamParams(LEARNING_RATE))])
        milliseconds.append(1000 * device.time_run(once))
    return statistics.median(milliseconds)


def build_datum(tokens: np.ndarray, inputs: dict[str, np.ndarray]) -> Datum:
    return Datum(tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:].astype(np.int64), **inputs})


def measure_agreement(backend: TorchBackend, sampler: LocalSampler) -> float:
    """Mean distance of sampled logprobs from those that training computes for the same tokens."""
    samples = [build_sample(f"s{i}", f"v{i % 8}") for i in range(16)]
    answers, errors = draw_samples(sampler, samples), []
    for index, sample in enumerate(samples):
        answer = answers[sample.request_id].sequences[0]
        tokens = np.concatenate([sample.prompt_T, answer.tokens_T])
        datum = build_datum(tokens, {"weights": np.ones(len(tokens) - 1, np.float32)})
        (result,) = run_to_end(backend.run_passes([Pass("r", f"m{index % 8}", (datum,), "cross_entropy", {}, True)]))
        assert isinstance(result, PassResult), result
        errors.append(np.abs(result.logprobs[0][-len(answer.tokens_T) :] - answer.logprobs_T))
    return float(np.mean(np.concatenate(errors)))


def rl_step(backend: TorchBackend, sampler: LocalSampler, prompts: int) -> Run:
    """Samples of a version, a pass of importance sampling over them, an optimizer step, and publishing."""

    def run() -> None:
        samples = [build_sample(f"p{index}", "v0", num_samples=4) for index in range(prompts)]
        answers, data = draw_samples(sampler, samples), []
        for sample in samples:
            for answer_index, answer in enumerate(answers[sample.request_id].sequences):
                tokens = np.concatenate([sample.prompt_T, answer.tokens_T])
                before = np.zeros(len(sample.prompt_T) - 1, np.float32)
                advantages = np.full(len(answer.tokens_T), answer_index - 1.5, np.float32)
                inputs = {
                    "logprobs": np.concatenate([before, np.asarray(answer.logprobs_T, np.float32)]),
                    "advantages": np.concatenate([before, advantages]),
                }
                data.append(build_datum(tokens, inputs))
        results = run_to_end(backend.run_passes([Pass("r", "m0", tuple(data), "importance_sampling", {}, False)]))
        results += backend.optim_step([OptimStep("o", "m0", AdamParams(LEARNING_RATE))])
        assert not any(isinstance(result, Exception) for result in results), results
        backend.publish("m0", "v0")

    return run


# The rows of a model.


@dataclass(slots=True)
class Bench:
    shape: ModelShape
    device: Device
    budget: Budget
    runs: int
    quick: bool
    save: Callable[[], None]
    """Called after each row: a machine may go away."""
    figures: Figures = field(default_factory=dict)

    @property
    def sizes(self) -> Sizes:
        return Sizes.of(json.loads((Path(self.shape.path) / "config.json").read_text()))

    def row(self, name: str, contestants: list[Contestant], expected_s: float = 0.0) -> None:
        if self.budget.allows(f"{self.shape.name}, {name}", expected_s):
            self.device.run_in_turns(contestants, self.runs, self.budget)
            self.figures[name] = {contestant.name: contestant.figures(self.device.peak) for contestant in contestants}
            print(f"{self.shape.name}: {name}", file=sys.stderr, flush=True)
            self.save()

    def measure(self, vllm: str) -> Figures:
        backend = TorchBackend(self.shape, device=str(self.device.device), dtype="bfloat16")
        base: Any = transformers.AutoModelForCausalLM.from_pretrained(self.shape.path, dtype=torch.bfloat16)
        base.to(self.device.device)
        for index in range(max(ADAPTERS)):
            backend.create_model(f"m{index}", LoraSpec(RANK, seed=index))
            backend.publish(f"m{index}", f"v{index}")
        self.sampling(backend, base, [2] if self.quick else [64], first=True)
        peft = Peft(base, self.device)
        self.train(backend, peft, [(2, 64, 16, 1), (8, 32, 32, 8)] if self.quick else WORKS)
        base = peft.base()
        if not self.quick:
            self.sampling(backend, base, [1, 256, 16])
            self.train(backend, Peft(base, self.device), MORE_WORKS)
        del base, peft, backend
        self.device.free()
        if vllm:
            self.beside_vllm(vllm)
        return self.figures

    def train(self, backend: TorchBackend, peft: Peft, works: list[tuple[int, int, int, int]]) -> None:
        for count, length, rank, adapters in works:
            workload = build_workload(count, length, rank, adapters)
            operations = self.sizes.step_operations(length, rank)
            # As if both reached a fifth of the peak, with two runs each.
            expected_s = 4 * workload.num_tokens * operations / (0.2 * self.device.peak)
            contestants = [
                Contestant(
                    "Tinsmith",
                    packed_step(backend, workload, f"{workload.name}."),
                    workload.num_tokens,
                    operations,
                    1,
                ),
                Contestant("PEFT", peft.step(workload), workload.num_tokens, operations),
            ]
            self.row(workload.name, contestants, expected_s)
            for index in range(workload.clients):
                backend.unload_model(f"{workload.name}.{index}")
            self.device.free()

    def sampling(self, backend: TorchBackend, base: torch.nn.Module, counts: list[int], *, first: bool = False) -> None:
        """With `first`, also the agreement with training, publishing, and a step of reinforcement learning."""
        sampler = LocalSampler(backend.base, backend._versions)
        if first:
            self.figures[AGREEMENT] = measure_agreement(backend, sampler)
            took = time_publish_ms(backend, sampler, self.device, max(self.runs, 3))
            self.figures["publish and first token, ms"] = took
        for at_once in counts:
            expected_s = 2.0
            for adapters in ADAPTERS:
                contestants = [Contestant("Tinsmith", sampler_run(sampler, at_once, adapters), at_once * NEW)]
                if not adapters:
                    contestants.append(Contestant("generate", generate_run(base, at_once), at_once * NEW))
                started = time.monotonic()
                self.row(sampling(at_once, adapters), contestants, expected_s)
                expected_s = max(expected_s, (time.monotonic() - started) / len(contestants))
        if first:
            prompts = 2 if self.quick else 32
            step = Contestant("Tinsmith", rl_step(backend, sampler, prompts), prompts * 4 * (PROMPT + NEW))
            self.row(f"RL step, {prompts} x 4 samples", [step], 2.0)
        del sampler
        self.device.free()

    def beside_vllm(self, python: str) -> None:
        """Without adapters. vLLM compiles for a minute or two when it starts."""
        rows = {at_once: sampling(at_once, 0) for at_once in AT_ONCE if sampling(at_once, 0) in self.figures}
        if not rows or not self.budget.allows(f"{self.shape.name}, vLLM", VLLM_START_S):
            return
        options = {"directory": self.shape.path, "most": max(rows), "dtype": "bfloat16", "memory_share": 0.6}
        try:
            patience_s = self.budget.left_s
            with Child("peers.py", "vllm", json.dumps(options), python=python, patience_s=patience_s) as child:
                child.ask()
                for at_once, name in rows.items():
                    child.ask(at_once=at_once)
                    seconds = [child.ask(at_once=at_once)["seconds"] for _ in range(2)]
                    contestant = Contestant("vLLM", lambda: None, at_once * NEW, seconds=seconds)
                    self.figures[name]["vLLM"] = contestant.figures(self.device.peak)
        except ChildFailed as error:
            self.figures[next(iter(rows.values()))]["vLLM"] = {"failed": str(error)[:120]}


@contextlib.contextmanager
def open_models(args: argparse.Namespace, device: Device) -> Iterator[Callable[[str], Path]]:
    """Makes the model of a name, and removes the one before: an 8B's weights are 16 GB."""
    if args.model:
        yield lambda name: args.model
        return
    with contextlib.ExitStack() as stack:

        def create_model(name: str) -> Path:
            stack.close()
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tinsmith-bench-"))
            (Path(directory) / name).mkdir()
            return make(name, Path(directory) / name, str(device.device))

        yield create_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--model", type=Path, help="a directory, in place of the sizes")
    parser.add_argument("--vllm", default=sys.executable if find_spec("vllm") else "", help="a Python that has vLLM")
    parser.add_argument("--seconds", type=float, default=400.0, help="after these no row is begun")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", type=Path, help="a page of the figures; of a GPU's only")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = Device(args.device)
    if device.is_cuda and not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} finds no CUDA device here")
    if args.write and not device.is_cuda:
        raise SystemExit(f"{args.write} is for figures of a GPU; leave --write out, or --device at cuda")
    budget = Budget(args.seconds)
    figures: dict[str, Figures] = {"ceilings": dict(measure_ceilings(device, 256 if args.quick else 8192))}
    device.product_tflops = figures["ceilings"]["product_tflops"]
    names = [args.model.name] if args.model else args.sizes
    with open_models(args, device) as create_model:
        for index, name in enumerate(names):
            weight, *later_weights = (SIZES.get(later_name, 1.0) for later_name in names[index:])
            budget.give(weight, sum(later_weights))
            # A model is made, loaded twice and checked before its first row.
            if budget.allows(f"all of {name}", 0.0 if args.quick else 20.0 * weight):
                shape = read_shape(name, create_model(name))
                bench = Bench(shape, device, budget, args.runs, args.quick, lambda: write_json(args.json, figures))
                figures[name] = bench.figures
                bench.measure(args.vllm)
    page_text = page(device.describe(), figures, budget.skipped)
    print(page_text)
    if args.write:
        args.write.write_text(page_text)
    is_good, line = verdict(figures, budget.skipped)
    print(line)
    if not is_good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
