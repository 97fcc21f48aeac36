"""The arithmetic of gpu.py and what it prints: operations of a training step, the time that is left, the page and the
verdict. Nothing here uses a device.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinsmith.plan.speed import DEVICES

Figures = dict[str, Any]
"""What is measured by row: the figures of each contestant, or one number."""

MAX_DISTANCE = 0.05
"""Mean distance between sampled and trained logprobs beyond which speed is no merit."""

AGREEMENT = "sampled logprobs from trained ones, mean"


# Operations.


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a dense model whose linears all carry adapters."""

    hidden: int
    inner: int
    layers: int
    queries: int
    """Outputs of the query projection: heads times head dim."""
    keys: int
    vocab: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes:
        """From a config.json of Qwen3's or Llama's form."""
        heads = config["num_attention_heads"]
        dim = config.get("head_dim") or config["hidden_size"] // heads
        return cls(
            hidden=config["hidden_size"],
            inner=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            queries=heads * dim,
            keys=config.get("num_key_value_heads", heads) * dim,
            vocab=config["vocab_size"],
        )

    def linears(self) -> Iterator[tuple[int, int]]:
        """Inputs and outputs of every linear."""
        for _ in range(self.layers):
            yield from [(self.hidden, self.queries), (self.hidden, self.keys), (self.hidden, self.keys)]
            yield from [(self.queries, self.hidden), (self.hidden, self.inner), (self.hidden, self.inner)]
            yield self.inner, self.hidden
        yield self.hidden, self.vocab

    def step_operations(self, length: int, rank: int) -> float:
        """Floating-point operations that a step of LoRA training needs for each token of sequences of this length.

        Frozen weights: a forward and the gradient of their inputs, 2 each. Adapters: the gradient of the weights, too.
        Causal attention: two products with half of the keys, and twice as much backward. What is computed again is not
        counted.
        """
        frozen = sum(inputs * outputs for inputs, outputs in self.linears())
        adapters = sum(rank * (inputs + outputs) for inputs, outputs in self.linears())
        return 4.0 * frozen + 6.0 * adapters + 6.0 * self.layers * self.queries * length


def peak_tflops(name: str) -> float | None:
    """Dense bfloat16 TFLOP/s of a device with this name by its vendor's data sheet; None if that is not known."""
    if re.search("PCIe|NVL|Laptop", name):  # slower than others of the same name
        return None
    for device in DEVICES:
        own = device.name if device.name.startswith("RTX") else device.name.partition(" ")[0]
        if re.search(rf"\b{own}\b", name):
            return device.tflops
    return None


# Time.


@dataclass(slots=True)
class Budget:
    """The seconds that a run may take. `skipped` names the rows for which too few were left."""

    total_s: float
    clock: Callable[[], float] = time.monotonic
    began: float = -1.0
    until: float = 0.0
    """When the rows of the current model must end."""
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.began = self.clock()
        self.until = self.began + self.total_s

    @property
    def left_s(self) -> float:
        return self.until - self.clock()

    def give(self, weight: float, others: float) -> None:
        """Give the next model its share of what is left; `others` is the weight of those that follow."""
        left = self.began + self.total_s - self.clock()
        self.until = self.clock() + left * weight / (weight + others)

    def allows(self, row: str, expected_s: float) -> bool:
        if expected_s <= self.left_s:
            return True
        self.skipped.append(row)
        return False

    def runs(self, most: int, run_s: float) -> int:
        """How many runs of `run_s` there is time for, of `most`, and one at least."""
        return max(1, min(most, int(self.left_s / run_s) if run_s > 0 else most))


# The page.


@dataclass(frozen=True, slots=True)
class Anchor:
    """A published figure, in tokens per second, and the row here that is nearest to it."""

    what: str
    tokens_per_s: float
    model: str
    row: str


def training(sequences: int, length: int, rank: int, adapters: int) -> str:
    return f"training, {sequences} x {length:,}, rank {rank}, {adapters} adapter{'s' if adapters > 1 else ''}"


def sampling(at_once: int, adapters: int) -> str:
    return f"sampling, {at_once} at once, {adapters} adapter{'' if adapters == 1 else 's'}"


ANCHORS = (
    Anchor("Automodel, Llama-3-8B, rank 16, 2 x 4,096, H100", 12473, "qwen3-8b", training(2, 4096, 16, 1)),
    Anchor("Automodel, Qwen2.5-7B, rank 16, 2 x 4,096, H100", 14110, "qwen3-8b", training(2, 4096, 16, 1)),
    Anchor("prime-rl, Qwen3-0.6B, 16k, all recomputed", 13300, "qwen3-0.6b", training(2, 4096, 16, 1)),
    Anchor("prime-rl, Qwen3-4B, 16k, all recomputed", 6200, "qwen3-4b", training(2, 4096, 16, 1)),
    Anchor("nano-vllm, Qwen3-0.6B, 256 sequences, A800", 10009, "qwen3-0.6b", sampling(256, 0)),
)
LORA_SHARE = "62 to 66 %"
"""Of its throughput without adapters, what vLLM keeps with them, as published."""


def table(figures: Figures) -> list[str]:
    """A row for each measure, with its peers and their ratios in the last column."""
    rows = ["| what | tokens/s | least to most | MFU | peak MiB | beside |", "|---|---|---|---|---|---|"]
    single = []
    for what, found in figures.items():
        if not isinstance(found, dict):
            single.append(f"- {what}: {found:.4g}")
            continue
        own, *peers = found.items()
        row = own[1]
        if "failed" in row:
            rows.append(f"| {what} | {row['failed']} | | | | |")
            continue
        beside = ", ".join(_beside(row["tokens_per_s"], *peer) for peer in peers)
        spread = f"{row['least']:,.0f}-{row['most']:,.0f}"
        mfu = f"{row['mfu']:.0%}" if "mfu" in row else ""
        rows.append(f"| {what} | {row['tokens_per_s']:,.0f} | {spread} | {mfu} | {row['peak_mib']:,.0f} | {beside} |")
    if len(rows) == 2:
        return single
    return [*single, "", *rows] if single else rows


def _beside(own: float, name: str, row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return f"{name}: {row['failed']}"
    return f"{name} {row['tokens_per_s']:,.0f} ({own / row['tokens_per_s']:.2f})"


def anchors(models: Mapping[str, Figures]) -> list[str]:
    """Published figures beside the nearest rows."""
    lines = ["| published | tokens/s | nearest row here | ratio |", "|---|---|---|---|"]
    for anchor in ANCHORS:
        own = models.get(anchor.model, {}).get(anchor.row, {}).get("Tinsmith", {})
        if rate := own.get("tokens_per_s"):
            row = f"{anchor.model}, {anchor.row} | {rate / anchor.tokens_per_s:.2f}"
            lines.append(f"| {anchor.what} | {anchor.tokens_per_s:,.0f} | {row} |")
    for name, figures in models.items():
        base, adapted = (figures.get(sampling(64, number), {}).get("Tinsmith", {}) for number in (0, 1))
        if "tokens_per_s" in base and "tokens_per_s" in adapted:
            share = adapted["tokens_per_s"] / base["tokens_per_s"]
            lines.append(f"| vLLM keeps {LORA_SHARE} with adapters | | {name}, 64 at once | {share:.0%} |")
    return lines if len(lines) > 2 else []


def page(device: str, found: Mapping[str, Figures], skipped: Sequence[str]) -> str:
    """In markdown."""
    parts = ["# On a GPU", "", "Made by `make bench-gpu` (`benchmarks/gpu.py`), which says what is compared and how."]
    parts += ["", device]
    for name, figures in found.items():
        parts += ["", f"## {name}", "", *table(figures)]
    if lines := anchors(found):
        parts += ["", "## Beside published figures", "", "Of other machines and other software.", "", *lines]
    if skipped:
        parts += ["", f"{len(skipped)} rows did not run: the time was up."]
    return "\n".join(parts) + "\n"


def verdict(found: Mapping[str, Figures], skipped: Sequence[str] = ()) -> tuple[bool, str]:
    """Whether all that ran ran well, and one line: for each model the least ratio to each peer."""
    parts, is_good = [], True
    for name, figures in found.items():
        if name == "ceilings":
            continue
        ratios: dict[str, list[float]] = {}
        failed = []
        for what, rows in figures.items():
            if not isinstance(rows, dict):
                continue
            own = rows["Tinsmith"]
            if "failed" in own:
                failed.append(f"{what}: {own['failed']}")
                continue
            for peer, row in rows.items():
                if peer != "Tinsmith" and "failed" not in row:
                    ratios.setdefault(peer, []).append(own["tokens_per_s"] / row["tokens_per_s"])
        distance = figures.get(AGREEMENT)
        is_good &= not failed and distance is not None and distance <= MAX_DISTANCE
        told = "logprobs not compared" if distance is None else f"logprobs {distance:.4f} apart"
        least = "".join(f", at least {min(each):.2f} x {peer}" for peer, each in sorted(ratios.items()))
        parts.append(f"{name}: {told}{least}{''.join(f', FAILED {each}' for each in failed)}")
    if not parts:
        is_good = False
        parts.append("no model was measured")
    rest = f"; {len(skipped)} rows not run" if skipped else ""
    return is_good, f"{'passed' if is_good else 'FAILED'}: {'; '.join(parts)}{rest}"
