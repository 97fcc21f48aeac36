"""Training and sampling on one GPU, in one process, beside transformers and PEFT on the same device in the same run.

    python benchmarks/gpu.py --write docs/benchmarks/gpu.md     # make bench-gpu: m50 and m500; 10 minutes or less
    python benchmarks/gpu.py --model /data/models/Qwen3-8B      # a model that is there, in place of those
    python benchmarks/gpu.py --device cpu --sizes tiny --quick  # without a GPU: that it works, and nothing else

All is in bfloat16, adapters in float32, rank 32 on every linear. What is compared takes turns, run by run; medians and
their spread are shown. Training: forward, backward and an optimizer step, of one adapter and of many; PEFT does one
tenant after the other, padded. Sampling: as many prompts of 64 tokens as there are at once, 64 new tokens each;
transformers' `generate` has no adapter. Peak memory is what a run takes of the device beside what lay there before it
(weights, caches, adapters). How far sampled logprobs are from those that training computes for the same tokens is
shown, too: a figure that is fast and wrong is none.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from measured import machine, write_json
from models import make
from peers import NEW, prompt
from training import LEARNING_RATE, RANK, WORKS, Work, packed_step, sequences

from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend
from tinsmith.base_models import read_shape
from tinsmith.samplers.local.engine import LocalSampler
from tinsmith.types import AdamParams, Datum, LoraSpec, ModelShape, OptimStep, Pass, PassResult, Sample, SamplingParams

AT_ONCE = (1, 16, 64, 256)
ADAPTERS = (0, 1, 8)
Run = Callable[[], object]


@dataclass(slots=True)
class Contestant:
    """`tokens` of one run; seconds of each run that counts."""

    name: str
    run: Run
    tokens: int
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / statistics.median(self.seconds)

    def figures(self) -> dict[str, float]:
        return {
            "tokens_per_s": self.tokens_per_s,
            "most": self.tokens / min(self.seconds),
            "least": self.tokens / max(self.seconds),
            "peak_mib": self.peak_bytes / 2**20,
        }


class Device:
    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.is_cuda = self.device.type == "cuda"

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def described(self) -> str:
        if not self.is_cuda:
            return machine()
        found = torch.cuda.get_device_properties(self.device)
        return f"{found.name}, {found.total_memory / 2**30:.0f} GiB, capability {found.major}.{found.minor}"

    def timed(self, run: Run) -> float:
        self.wait()
        started = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - started

    def in_turns(self, contestants: list[Contestant], runs: int) -> None:
        for contestant in contestants:
            contestant.run()  # warms up, and takes what memory it needs
            if self.is_cuda:
                before = torch.cuda.memory_allocated(self.device)
                torch.cuda.reset_peak_memory_stats(self.device)
                contestant.run()
                contestant.peak_bytes = torch.cuda.max_memory_allocated(self.device) - before
        for _ in range(runs):
            for contestant in contestants:
                contestant.seconds.append(self.timed(contestant.run))


def ceilings(device: Device, size: int) -> dict[str, float]:
    """What the device does with a large product, and with a copy that no cache holds."""
    a = torch.randn(size, size, device=device.device, dtype=torch.bfloat16)
    store = torch.empty(size * size * 8, device=device.device, dtype=torch.bfloat16)
    product_s = min(device.timed(lambda: a @ a) for _ in range(8))
    copy_s = min(device.timed(lambda: store.clone()) for _ in range(8))
    return {"product_tflops": 2e-12 * size**3 / product_s, "copy_gb_per_s": 2e-9 * store.nbytes / copy_s}


# Training.


def peft_step(model: torch.nn.Module, work: Work) -> Run:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=LEARNING_RATE)
    device = next(model.parameters()).device
    batches = []
    for client in range(work.clients):
        ids = torch.zeros(len(work.lengths), max(work.lengths), dtype=torch.int64)
        labels = torch.full_like(ids, -100)
        for row, tokens in enumerate(sequences(work, client)):
            ids[row, : len(tokens) - 1] = torch.from_numpy(tokens[:-1])
            labels[row, : len(tokens) - 1] = torch.from_numpy(tokens[1:])
        batches.append(tuple(x.to(device) for x in (ids, (labels != -100).long(), labels)))

    def run() -> None:
        for ids, mask, labels in batches:
            logits = model(input_ids=ids, attention_mask=mask).logits.float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def with_peft(directory: Path, device: Device) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    model = transformers.AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.bfloat16)
    # "all-linear" would leave the unembedding out.
    linears = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    config = LoraConfig(r=RANK, lora_alpha=32, target_modules=sorted(linears))
    model.to(device.device)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return get_peft_model(model, config)


# Sampling.


def our_samples(sampler: LocalSampler, at_once: int, adapters: int) -> Run:
    params = SamplingParams(max_tokens=NEW, temperature=1.0, stop_eos=False)

    def run() -> None:
        for index in range(at_once):
            version = f"v{index % adapters}" if adapters else None
            sampler.submit(Sample(f"s{index}", version, np.array(prompt(), np.int32), 1, params))
        while sampler.has_work:
            for _, outcome in sampler.step():
                if isinstance(outcome, Exception):
                    raise outcome

    return run


def generated(model: torch.nn.Module, at_once: int) -> Run:
    device = next(model.parameters()).device
    options = {"do_sample": True, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0, "top_k": 0}

    def run() -> None:
        ids = torch.tensor([prompt() for _ in range(at_once)], device=device)
        with torch.no_grad():
            model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # pyright: ignore[reportCallIssue]

    return run


def publish_ms(backend: TorchBackend, sampler: LocalSampler, device: Device, runs: int) -> list[float]:
    """Of weights that an optimizer step changed, with the first token of what was published."""
    run = our_samples(sampler, 1, 1)
    params = SamplingParams(max_tokens=1, temperature=1.0, stop_eos=False)

    def once() -> None:
        backend.publish("m0", "v0")
        sampler.submit(Sample("first", "v0", np.array(prompt(), np.int32), 1, params))
        while sampler.has_work:
            sampler.step()

    run()
    found = []
    for _ in range(runs):
        backend.optim_step([OptimStep("o", "m0", AdamParams(LEARNING_RATE))])
        found.append(1000 * device.timed(once))
    return found


def agreement(backend: TorchBackend, sampler: LocalSampler) -> float:
    """Mean distance of sampled logprobs from those that training computes for the same tokens."""
    params, errors = SamplingParams(max_tokens=NEW, temperature=1.0, stop_eos=False, seed=1), []
    asked = [Sample(f"s{i}", f"v{i % 8}", np.array(prompt(), np.int32), 1, params) for i in range(16)]
    for sample in asked:
        sampler.submit(sample)
    answers = {}
    while sampler.has_work:
        answers |= dict(sampler.step())
    for index, sample in enumerate(asked):
        answer = answers[sample.request_id].sequences[0]
        tokens = np.concatenate([sample.prompt_T, answer.tokens_T])
        inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(len(tokens) - 1, np.float32)}
        (scored,) = run_to_end(
            backend.run_passes([Pass("r", f"m{index % 8}", (Datum(tokens[:-1], inputs),), "cross_entropy", {}, True)])
        )
        assert isinstance(scored, PassResult), scored
        errors.append(np.abs(scored.logprobs[0][-len(answer.tokens_T) :] - answer.logprobs_T))
    return float(np.mean(np.concatenate(errors)))


# The page.


def measure(shape: ModelShape, device: Device, *, runs: int, quick: bool) -> dict[str, object]:
    works = [WORKS[i] for i in ((0, 3) if quick else (0, 1, 3, 4))]
    figures: dict[str, object] = {}
    backend = TorchBackend(shape, device=str(device.device), dtype="bfloat16")
    peft = with_peft(Path(shape.path), device)
    for work in works:
        contestants = [
            Contestant("Tinsmith", packed_step(backend, work, f"{work.name}."), work.num_tokens),
            Contestant("PEFT", peft_step(peft, work), work.num_tokens),
        ]
        device.in_turns(contestants, runs)
        figures[f"training, {work.name}"] = {each.name: each.figures() for each in contestants}
        for index in range(work.clients):
            backend.unload_model(f"{work.name}.{index}")
    del peft
    gc.collect()
    unadapted = transformers.AutoModelForCausalLM.from_pretrained(shape.path, dtype=torch.bfloat16)
    unadapted.to(device.device)  # pyright: ignore[reportArgumentType, reportCallIssue]
    for index in range(max(ADAPTERS)):
        backend.create_model(f"m{index}", LoraSpec(RANK, seed=index))
        backend.publish(f"m{index}", f"v{index}")
    sampler = LocalSampler(backend.base, backend._versions)
    for at_once in (2,) if quick else AT_ONCE:
        for adapters in ADAPTERS:
            tokens = at_once * NEW
            contestants = [
                Contestant("Tinsmith", our_samples(sampler, at_once, adapters), tokens),
            ]
            if not adapters:
                contestants.append(Contestant("generate", generated(unadapted, at_once), tokens))
            device.in_turns(contestants, runs)
            name = f"sampling, {at_once} at once, {adapters} adapters"
            figures[name] = {each.name: each.figures() for each in contestants}
    figures["publish and first token, ms"] = statistics.median(publish_ms(backend, sampler, device, max(runs, 3)))
    figures["sampled logprobs from trained ones, mean"] = agreement(backend, sampler)
    return figures


def lines(figures: dict[str, object]) -> list[str]:
    found = ["| what | contestant | tokens/s | least to most | peak MiB |", "|---|---|---|---|---|"]
    single = []
    for what, rows in figures.items():
        if not isinstance(rows, dict):
            single.append(f"| {what} | | {rows:.4g} | | |")
            continue
        for name, row in rows.items():
            spread = f"{row['least']:,.0f} to {row['most']:,.0f}"
            found.append(f"| {what} | {name} | {row['tokens_per_s']:,.0f} | {spread} | {row['peak_mib']:,.0f} |")
    return [*found, *single]


def page(device: Device, found: dict[str, dict[str, object]]) -> str:
    """In markdown."""
    parts = [
        "# On a GPU",
        "",
        "Made by `make bench-gpu` (`benchmarks/gpu.py`), which says what is compared and how.",
        "",
        f"{device.described()}; torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"transformers {transformers.__version__}.",
    ]
    for name, figures in found.items():
        parts += ["", f"## {name}", "", *lines(figures)]
    return "\n".join(parts) + "\n"


MAX_DISTANCE = 0.05
"""Mean distance between sampled and trained logprobs beyond which speed is no merit."""


def verdict(found: dict[str, dict[str, object]]) -> tuple[bool, str]:
    """Whether the numbers agree, and one line: for each model the least ratio to PEFT and to `generate`."""
    parts, is_good = [], True
    for name, figures in found.items():
        if name == "ceilings":
            continue
        ratios: dict[str, list[float]] = {}
        for rows in figures.values():
            if isinstance(rows, dict):
                for peer in rows.keys() - {"Tinsmith"}:
                    ratio = rows["Tinsmith"]["tokens_per_s"] / rows[peer]["tokens_per_s"]
                    ratios.setdefault(peer, []).append(ratio)
        distance = float(str(figures["sampled logprobs from trained ones, mean"]))
        is_good &= distance <= MAX_DISTANCE
        least = "".join(f", at least {min(each):.2f} x {peer}" for peer, each in sorted(ratios.items()))
        parts.append(f"{name}: logprobs {distance:.4f} apart{least}")
    return is_good, f"{'passed' if is_good else 'FAILED'}: {'; '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", nargs="+", default=["m50", "m500"])
    parser.add_argument("--model", type=Path, help="a directory, in place of the sizes")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", type=Path, help="a page of the figures; of a GPU's only")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = Device(given.device)
    if device.is_cuda and not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} finds no CUDA device here")
    if given.write and not device.is_cuda:
        raise SystemExit(f"{given.write} is for figures of a GPU; leave --write out, or --device at cuda")
    found: dict[str, dict[str, object]] = {"ceilings": dict(ceilings(device, 256 if given.quick else 8192))}
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as place:
        models = {given.model.name: given.model} if given.model else {}
        for name in [] if given.model else given.sizes:
            models[name] = make(name, Path(place) / name)
        for name, directory in models.items():
            shape = read_shape(f"bench/{name}", directory)
            found[name] = measure(shape, device, runs=given.runs, quick=given.quick)
    told = page(device, found)
    print(told)
    if given.write:
        given.write.write_text(told)
    write_json(given.json, found)
    is_good, line = verdict(found)
    print(line)
    if not is_good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
