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
"""The figures of each contestant by row, or one number."""

MAX_DISTANCE = 0.05
"""Mean distance between sampled and trained logprobs beyond which speed is no merit."""

AGREEMENT = "sampled logprobs from trained ones, mean"


# Operations.


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a dense model whose linears all carry adapters."""

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
        device_name = device.name if device.name.startswith("RTX") else device.name.partition(" ")[0]
        if re.search(rf"\b{device_name}\b", name):
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

    def give(self, weight: float, later_weights: float) -> None:
        """Give the next model its share of the remaining time; `later_weights` is the weight of those that follow."""
        remaining_s = self.began + self.total_s - self.clock()
        self.until = self.clock() + remaining_s * weight / (weight + later_weights)

    def allows(self, row: str, expected_s: float) -> bool:
        if expected_s <= self.left_s:
            return True
        self.skipped.append(row)
        return False

    def runs(self, max_runs: int, run_s: float) -> int:
        """How many runs of `run_s` there is time for, at least one and at most `max_runs`."""
        return max(1, min(max_runs, int(self.left_s / run_s) if run_s > 0 else max_runs))


# The page.


@dataclass(frozen=True, slots=True)
class Anchor:
    """A published figure, in tokens per second, and the row here that is nearest to it."""

    label: str
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
"""The published share of its throughput that vLLM keeps with adapters."""


def table(figures: Figures) -> list[str]:
    """A row for each measure, with its peers and their ratios in the last column."""
    rows = ["| what | tokens/s | least to most | MFU | peak MiB | beside |", "|---|---|---|---|---|---|"]
    single = []
    for measure, contestants in figures.items():
        if not isinstance(contestants, dict):
            single.append(f"- {measure}: {contestants:.4g}")
            continue
        ours, *peers = contestants.items()
        row = ours[1]
        if "failed" in row:
            rows.append(f"| {measure} | {row['failed']} | | | | |")
            continue
        peer_cells = ", ".join(_compare_peer(row["tokens_per_s"], *peer) for peer in peers)
        spread = f"{row['least']:,.0f}-{row['most']:,.0f}"
        mfu = f"{row['mfu']:.0%}" if "mfu" in row else ""
        rows.append(
            f"| {measure} | {row['tokens_per_s']:,.0f} | {spread} | {mfu} | {row['peak_mib']:,.0f} | {peer_cells} |"
        )
    if len(rows) == 2:
        return single
    return [*single, "", *rows] if single else rows


def _compare_peer(our_rate: float, name: str, row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return f"{name}: {row['failed']}"
    return f"{name} {row['tokens_per_s']:,.0f} ({our_rate / row['tokens_per_s']:.2f})"


def anchors(models: Mapping[str, Figures]) -> list[str]:
    """Published figures beside the nearest rows."""
    lines = ["| published | tokens/s | nearest row here | ratio |", "|---|---|---|---|"]
    for anchor in ANCHORS:
        our_row = models.get(anchor.model, {}).get(anchor.row, {}).get("Tinsmith", {})
        if rate := our_row.get("tokens_per_s"):
            row = f"{anchor.model}, {anchor.row} | {rate / anchor.tokens_per_s:.2f}"
            lines.append(f"| {anchor.label} | {anchor.tokens_per_s:,.0f} | {row} |")
    for name, figures in models.items():
        base, adapted = (figures.get(sampling(64, adapters), {}).get("Tinsmith", {}) for adapters in (0, 1))
        if "tokens_per_s" in base and "tokens_per_s" in adapted:
            share = adapted["tokens_per_s"] / base["tokens_per_s"]
            lines.append(f"| vLLM keeps {LORA_SHARE} with adapters | | {name}, 64 at once | {share:.0%} |")
    return lines if len(lines) > 2 else []


def page(device: str, models: Mapping[str, Figures], skipped: Sequence[str]) -> str:
    """The page of all figures, in Markdown."""
    parts = ["# On a GPU", "", "Made by `make bench-gpu` (`benchmarks/gpu.py`), which says what is compared and how."]
    parts += ["", device]
    for name, figures in models.items():
        parts += ["", f"## {name}", "", *table(figures)]
    if lines := anchors(models):
        parts += ["", "## Beside published figures", "", "Of other machines and other software.", "", *lines]
    if skipped:
        parts += ["", f"{len(skipped)} rows did not run: the time was up."]
    return "\n".join(parts) + "\n"


def verdict(models: Mapping[str, Figures], skipped: Sequence[str] = ()) -> tuple[bool, str]:
    """Whether all that ran ran well, and one line: for each model the least ratio to each peer."""
    parts, is_good = [], True
    for name, figures in models.items():
        if name == "ceilings":
            continue
        ratios: dict[str, list[float]] = {}
        failed = []
        for measure, rows in figures.items():
            if not isinstance(rows, dict):
                continue
            ours = rows["Tinsmith"]
            if "failed" in ours:
                failed.append(f"{measure}: {ours['failed']}")
                continue
            for peer, row in rows.items():
                if peer != "Tinsmith" and "failed" not in row:
                    ratios.setdefault(peer, []).append(ours["tokens_per_s"] / row["tokens_per_s"])
        distance = figures.get(AGREEMENT)
        is_good &= not failed and distance is not None and distance <= MAX_DISTANCE
        agreement = "logprobs not compared" if distance is None else f"logprobs {distance:.4f} apart"
        least = "".join(f", at least {min(peer_ratios):.2f} x {peer}" for peer, peer_ratios in sorted(ratios.items()))
        parts.append(f"{name}: {agreement}{least}{''.join(f', FAILED {peer_ratios}' for peer_ratios in failed)}")
    if not parts:
        is_good = False
        parts.append("no model was measured")
    skipped_text = f"; {len(skipped)} rows not run" if skipped else ""
    return is_good, f"{'passed' if is_good else 'FAILED'}: {'; '.join(parts)}{skipped_text}"
