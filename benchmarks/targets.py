"""The project's performance targets beside the measured figures, from the JSON files that the benchmarks write.

    python benchmarks/targets.py build/bench                                      # after make bench; prints a page
    python benchmarks/targets.py build/bench --into docs/benchmarks/README.md     # replaces the table of that page

Ratios are of runs that were interleaved in one call: medians, with the least and the most. A target that was not
measured, because the engine that it is compared with is not installed, is listed as such and never counted as met.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from interleaving import Row, format_spread

STALL_MS = 100.0
"""Compiling a shape takes seconds; a shorter delay is a first use of memory and kernels."""

USUAL_RUNS = 5
"""A result of fewer runs names their number."""

BEGIN, END = "<!-- targets.py writes from here -->", "<!-- to here -->"
"""The lines before and after the table in a page of prose."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures in a directory: latency by size and row, the rows of training and sampling, and steps by client."""

    latency: dict[str, dict[str, Row]] = field(default_factory=dict)
    training: list[Row] = field(default_factory=list)
    sampling: list[Row] = field(default_factory=list)
    steps: dict[str, Row] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)
    suite: Row = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, directory: Path) -> Figures:
        figures = cls()
        for path in sorted(directory.glob("*.json")):
            rows: Any = json.loads(path.read_text())
            match path.stem.partition("-")[0]:
                case "latency":
                    for size, size_rows in rows.items():
                        figures.latency.setdefault(size, {}).update(size_rows)
                case "training":
                    figures.training.extend({**row, "part": path.stem} for row in rows)
                case "sampling":
                    figures.sampling.extend({**row, "part": path.stem} for row in rows if "seconds" in row)
                    failures = (f"{path.stem}: {row['what']}: {row['failed']}" for row in rows if "failed" in row)
                    figures.failures.extend(failures)
                case "steps":
                    figures.steps.update(rows)
                case "ceilings":
                    figures.ceilings.update(rows)
                case "suite":
                    figures.suite.update(rows)
        return figures


@dataclass(frozen=True, slots=True)
class TargetFigure:
    """A figure in the target's unit, and ours and theirs in tokens a second where it is a ratio."""

    value: Mapping[str, float]
    part: str
    ours: Mapping[str, float] | None = None
    theirs: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """`limit` is a most where `is_most`, else a least. `profile` are flags of profiling.py that show the time."""

    measure: str
    against: str
    limit: float
    unit: str
    find: Callable[[Figures], Iterator[TargetFigure]]
    is_most: bool = False
    profile: tuple[str, ...] = ()

    def is_met(self, value: float) -> bool:
        return value <= self.limit if self.is_most else value >= self.limit

    @property
    def limit_text(self) -> str:
        return f"{'<=' if self.is_most else '>='} {self.limit:g}" + _unit(self.unit)


def _unit(unit: str) -> str:
    """Nothing for a ratio, which most rows are."""
    return "" if unit == "x" else f" {unit}"


# Where figures are.


def time_of(
    size: str, row_name: str, figures: Figures, *, worst: bool = False, scale: float = 1.0
) -> Iterator[TargetFigure]:
    row = figures.latency.get(size, {}).get(row_name)
    if row:
        values = {"median": row["p50_ms"], "least": row["min_ms"], "most": row["max_ms"]}
        values = {key: value * scale for key, value in values.items()} | {"runs": row["runs"]}
        if worst:
            values["median"] = values["most"]
        yield TargetFigure(values, "latency" if size == "tiny" else f"latency-{size}")


def times_of(size: str, row_name: str, other: str, against: str, figures: Figures) -> Iterator[TargetFigure]:
    """The median of a row over that of another row, or of another size's."""
    rows = figures.latency.get(size, {}), figures.latency.get(other, {})
    if row_name in rows[0] and against in rows[1]:
        ours, theirs = rows[0][row_name], rows[1][against]
        value = {"median": ours["p50_ms"] / theirs["p50_ms"], "least": ours["min_ms"] / theirs["p50_ms"],
                 "most": ours["p95_ms"] / theirs["p50_ms"], "runs": ours["runs"]}  # fmt: skip
        pair = (_exactly(row["p50_ms"]) for row in (ours, theirs))
        yield TargetFigure(value, f"latency-{size}", *pair)


def spike(size: str, row_name: str, figures: Figures) -> Iterator[TargetFigure]:
    """The 95th percentile over the median."""
    if row := figures.latency.get(size, {}).get(row_name):
        ours, theirs = row["p95_ms"], row["p50_ms"]
        value = _exactly(ours / theirs) | {"runs": row["runs"]}
        yield TargetFigure(value, f"latency-{size}", _exactly(ours), _exactly(theirs))


def training_ratio(size: str, work_name: str, dtype: str, other: str, figures: Figures) -> Iterator[TargetFigure]:
    """The ratio of the service to `other`: `PEFT float32`, `products` or `step alone` (of the same dtype)."""
    for part, rows in _works(size, work_name, figures):
        if row := rows.get(f"service {dtype}"):
            key = {"products": "of_products", "step alone": "of_step_alone"}.get(other)
            theirs = rows.get(f"{other} {dtype}" if key else other)
            if theirs:
                value = row[key] if key else row["of_peft"][other]
                yield TargetFigure(value, part, row["tokens_per_s"], theirs["tokens_per_s"])


def memory_ratio(size: str, work_name: str, dtype: str, other: str, figures: Figures) -> Iterator[TargetFigure]:
    """The ratio of the engine's memory to PEFT's."""
    for part, rows in _works(size, work_name, figures):
        row = rows.get(f"service {dtype}", {})
        if other in row.get("memory_of_peft", {}):
            pair = (_exactly(memory_row["peak_mib"]) for memory_row in (row, rows[other]))
            yield TargetFigure(_exactly(row["memory_of_peft"][other]), part, *pair)


def evenness(size: str, ragged: str, even: str, dtype: str, figures: Figures) -> Iterator[TargetFigure]:
    """The share of the products' rate that ragged rows reach, over that of even rows."""
    for part, rows in _works(size, ragged, figures):
        for _, even_rows in _works(size, even, figures):
            row, other = rows.get(f"service {dtype}"), even_rows.get(f"service {dtype}")
            if row and other and "of_products" in row and "of_products" in other:
                value = _exactly(row["of_products"]["median"] / other["of_products"]["median"])
                yield TargetFigure(value, part, row["tokens_per_s"], other["tokens_per_s"])


def _works(size: str, work_name: str, figures: Figures) -> Iterator[tuple[str, dict[str, Row]]]:
    """The rows of one shape of work by what they measure, for each part that has them."""
    parts: dict[str, dict[str, Row]] = {}
    for row in figures.training:
        if (row["size"], row["work"]) == (size, work_name):
            parts.setdefault(row["part"], {})[row["what"]] = row
    yield from parts.items()


def _exactly(value: float) -> dict[str, float]:
    return {"median": value, "least": value, "most": value, "runs": 1}


def sampling_ratio(
    at_once: int, other: str, figures: Figures, ours: str = "bfloat16, 1 LoRA", size: str = "m50", load: str = "short"
) -> Iterator[TargetFigure]:
    """The ratio of a row of the service to another row of the same turns."""
    ours, row_key = f"service {ours}", (size, at_once, load)
    rows = {(row["part"], row["what"]): row for row in figures.sampling
            if (row["size"], row.get("at_once"), row.get("load")) == row_key}  # fmt: skip
    for (part, row_name), row in rows.items():
        if row_name == ours and other in row.get("of", {}):
            yield TargetFigure(row["of"][other], part, row["tokens_per_s"], rows[part, other]["tokens_per_s"])


def step_ratio(size: str, peer: str, figures: Figures) -> Iterator[TargetFigure]:
    """The ratio of a peer's step time to ours. `peer`: its name in `steps.py --beside`."""
    ours, theirs = (figures.steps.get(f"{size}, {name}", {}) for name in ("tinsmith", peer))
    if "times_ours" in theirs:
        yield TargetFigure(theirs["times_ours"], "steps", ours["step_ms"], theirs["step_ms"])


def _sampling(at_once: int) -> tuple[str, ...]:
    return f"decode --at-once {at_once}", f"samples --at-once {at_once}"


PACKED = "packed --size m50 --work"
EVEN, RAGGED, LARGE = "8 x 256, 1 client", "ragged 16-512, 1 client", "2 x 256, 1 client"
FORWARD, STEP, PUBLISH = "forward, one datum", "forward_backward + optim_step", "publish + first token"
QWEN = "Qwen3-0.6B's shape"
PRODUCTS, PLAIN, VLLM = "the packed products", "a plain loop with LoRA", "vLLM on a CPU"
PLAIN_ROW, VLLM_ROW = "plain loop bfloat16, 1 LoRA", "vllm bfloat16, 1 LoRA"


def _of_training() -> Iterator[Target]:
    for size, dtype, limit in (("m50", "float32", 0.75), ("m50", "bfloat16", 0.65), ("tiny", "float32", 0.5),
                               ("tiny", "bfloat16", 0.5)):  # fmt: skip
        find = partial(training_ratio, size, EVEN, dtype, "products")
        flags = f"packed --size {size} --work 0 --dtype {dtype}"
        yield Target(f"training {size}, 8 x 256, {dtype}", PRODUCTS, limit, "x", find, profile=(flags,))
    for size, limit in (("tiny", 2.5), ("m50", 4.0)):
        for clients, work_index in ((8, 3), (32, 4)):
            find = partial(training_ratio, size, f"1 x 32, {clients} clients", "bfloat16", "PEFT float32")
            flags = tuple(
                f"{profile} --size {size} --work {work_index} --dtype bfloat16" for profile in ("packed", "step")
            )
            yield Target(f"{clients} tenants x 32 tokens, {size}, bfloat16",
                         "HF + PEFT float32, in sequence", limit, "x", find, profile=flags)  # fmt: skip
    yield Target("training m50, ragged 16-512, bfloat16", "HF + PEFT float32, padded", 3, "x",
                 partial(training_ratio, "m50", RAGGED, "bfloat16", "PEFT float32"),
                 profile=(f"{PACKED} 1",))  # fmt: skip
    yield Target("the same, share of the packed products", "that of 8 x 256", 0.9, "x",
                 partial(evenness, "m50", RAGGED, EVEN, "bfloat16"), profile=(f"{PACKED} 1",))  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        yield from _of_training_as(dtype)


def _of_training_as(dtype: str) -> Iterator[Target]:
    flags, peft = (f"packed --size m500 --work 7 --dtype {dtype}",), f"PEFT {dtype}"
    label = f"{QWEN}, 2 x 256, {dtype}"
    yield Target(f"training {label}", f"HF + {peft}", 1.6, "x", partial(training_ratio, "m500", LARGE, dtype, peft),
                 profile=flags)  # fmt: skip
    yield Target(f"training {label}", PRODUCTS, 0.7, "x", partial(training_ratio, "m500", LARGE, dtype, "products"),
                 profile=flags)  # fmt: skip
    yield Target(f"engine memory, {label}", f"HF + {peft}", 0.6, "x", partial(memory_ratio, "m500", LARGE, dtype, peft),
                 is_most=True, profile=flags)  # fmt: skip
    yield Target(f"engine memory, m50, 8 x 256, {dtype}", "HF + PEFT float32", 0.6, "x",
                 partial(memory_ratio, "m50", EVEN, dtype, "PEFT float32"), is_most=True,
                 profile=(f"{PACKED} 0 --dtype {dtype}",))  # fmt: skip
    yield Target(f"training m50, 8 x 256, {dtype}", "the step in process", 0.9, "x",
                 partial(training_ratio, "m50", EVEN, dtype, "step alone"),
                 profile=("step --size m50 --work 0",))  # fmt: skip


def _of_sampling() -> Iterator[Target]:
    for at_once, against, other, limit in (
        (16, VLLM, VLLM_ROW, 3), (64, VLLM, VLLM_ROW, 3),
        (64, "llama.cpp, without LoRA", "llama.cpp bfloat16, 0 LoRA", 1.1),
        (16, "HF generate, without LoRA", "transformers bfloat16", 1),
        (64, "HF generate, without LoRA", "transformers bfloat16", 1),
        (16, PLAIN, PLAIN_ROW, 0.75), (64, PLAIN, PLAIN_ROW, 0.75),
    ):  # fmt: skip
        yield Target(f"sampling m50, bfloat16, {at_once} at once", against, limit, "x",
                     partial(sampling_ratio, at_once, other), profile=_sampling(at_once))  # fmt: skip
    for at_once in (16, 64):
        yield Target(f"8 adapters in a batch, m50, {at_once} at once", "1 adapter", 0.85, "x",
                     partial(sampling_ratio, at_once, "service bfloat16, 1 LoRA", ours="bfloat16, 8 LoRA"),
                     profile=(f"decode --at-once {at_once} --adapters 8",))  # fmt: skip
    for label, load, at_once in (("prompts of 1,024", "prompts", 16), ("groups of 8", "groups", 64)):
        yield Target(f"sampling m50, bfloat16, {label}, {at_once} at once", PLAIN, 0.75, "x",
                     partial(sampling_ratio, at_once, PLAIN_ROW, load=load), profile=_sampling(at_once))  # fmt: skip
    yield Target(f"sampling {QWEN}, bfloat16, 8 at once", PLAIN, 0.75, "x",
                 partial(sampling_ratio, 8, PLAIN_ROW, size="m500"),
                 profile=("decode --size m500 --at-once 8",))  # fmt: skip


TARGETS = (
    *(Target(f"{row_name}, tiny, p50", "canned answers", limit, "x",
             partial(times_of, "tiny", row_name, "canned", row_name), is_most=True, profile=(flags,))
      for row_name, limit, flags in ((FORWARD, 1.6, "forward"), (STEP, 2.2, "step"),
                                 (f"{FORWARD}, 8 clients", 1.25, "forward --clients 8"))),
    *_of_training(),
    *_of_sampling(),
    *(Target(f"RL step of 16 prompts x 8 samples, {size}, float32", name, 5, "x",
             partial(step_ratio, size, name.lower()),
             profile=(f"packed --size {size} --work 0 --dtype float32", f"decode --size {size} --dtype float32"))
      for size in ("tiny", "m50") for name in ("SkyRL", "OpenRL")),
    Target("publish + first token, m50, rank 32, p50", "a prefill and a decode step", 1.5, "x",
           partial(times_of, "m50", PUBLISH, "m50", "prefill + decode step"), is_most=True,
           profile=("publish --size m50",)),
    Target("the same, p95", "its p50", 2, "x", partial(spike, "m50", PUBLISH), is_most=True,
           profile=("publish --size m50",)),
    Target("cold start to the first forward, tiny", "absolute", 4, "s",
           partial(time_of, "tiny", "cold start to the first forward", scale=0.001), is_most=True,
           profile=("forward",)),
    Target("delay by a new batch shape, tiny, worst of 10", "absolute", STALL_MS,
           "ms", partial(time_of, "tiny", "what a new shape takes more", worst=True), is_most=True, profile=("step",)),
)  # fmt: skip


# The page.


def find_missed(figures: Figures) -> list[Target]:
    """The targets with a figure that does not meet the limit."""
    return [t for t in TARGETS if any(not t.is_met(row.value["median"]) for row in t.find(figures))]


def page(figures: Figures) -> str:
    """A page of its own: the machine's ceilings, the table with the benchmark of each row and its command, and what to
    profile for the missed targets."""
    lines = [
        "# Targets",
        "",
        *_ceilings(figures.ceilings),
        *_table(figures, with_parts=True),
        *_commands(figures.suite),
    ]
    if short := find_missed(figures):
        lines += ["Profiles of the missed targets: `python benchmarks/profiling.py` with", ""]
        lines += [
            f"- `{flags}`"
            for flags in dict.fromkeys(profile_flags for target in short for profile_flags in target.profile)
        ] + [""]
    return "\n".join(lines)


def replace_table(text: str, figures: Figures) -> str:
    """The page `text` with a new table between BEGIN and END. Raises ValueError if it has no such place."""
    before, begin, remainder = text.partition(BEGIN)
    _, end, after = remainder.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN!r} and {END!r}")
    return "\n".join([before + BEGIN, "", *_table(figures), END + after])


def _table(figures: Figures, *, with_parts: bool = False) -> list[str]:
    lines = _preface(figures.suite)
    header = ["measure", "against", "ours", "theirs", "result", "target"] + ["by"] * with_parts
    lines += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    counts = {"met": 0, "missed": 0, "not measured": 0}
    for target in TARGETS:
        rows = list(target.find(figures))
        for row in rows:
            verdict = "met" if target.is_met(row.value["median"]) else "missed"
            counts[verdict] += 1
            lines.append(_line([*_cells(target, row, verdict), *[row.part] * with_parts]))
        if not rows:
            counts["not measured"] += 1
            empty = [target.measure, target.against, "", "", "", f"{target.limit_text}: not measured"]
            lines.append(_line([*empty, *[""] * with_parts]))
    lines += ["", ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + ".", ""]
    if figures.failures:
        lines += ["Not measured because of an error:", "", *(f"- {failure}" for failure in figures.failures), ""]
    return lines


def _preface(suite: Row) -> list[str]:
    lines = [
        "A result is the ratio of ours to theirs (tokens a second, MiB for memory, milliseconds for latency): the",
        f"median of at least {USUAL_RUNS} interleaved runs unless stated otherwise, with the least and the most in",
        "brackets.",
        "",
    ]
    if suite:
        lines += [f"{suite['machine']}; {suite['versions']}; {suite['date']}; {suite['minutes']:.0f} minutes.", ""]
    return lines


def _ceilings(ceilings: Mapping[str, float]) -> list[str]:
    rates = "; ".join(f"{name} {value:,.0f}" for name, value in ceilings.items())
    return [f"The machine's ceilings: {rates}.", ""] if ceilings else []


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(target: Target, row: TargetFigure, verdict: str) -> list[str]:
    form = ".2f" if target.unit in ("x", "s") else ",.1f"
    ours, theirs = ("" if rate is None else f"{rate['median']:,.0f}" for rate in (row.ours, row.theirs))
    runs = int(row.value["runs"])
    value = format_spread(row.value, form) + _unit(target.unit)
    if runs < USUAL_RUNS:
        value += f", {runs} run{'s' * (runs > 1)}"
    judged = f"{target.limit_text}: **{verdict}**"
    return [target.measure, target.against, ours, theirs, value, judged]


def _commands(suite: Row) -> list[str]:
    parts: dict[str, Row] = suite.get("parts", {})
    if not parts:
        return []
    lines = [f"- {name}: `{part['command']}`" + (f" (not whole: {part['failure']})" if part["failure"] else "")
             for name, part in parts.items()]  # fmt: skip
    return ["What is in the last column:", "", *lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the benchmarks wrote their JSON")
    output_group = parser.add_mutually_exclusive_group()
    output_group.add_argument("--out", type=Path, help="write the page to this file instead of showing it")
    output_group.add_argument("--into", type=Path, help="replace the table in this page of prose")
    args = parser.parse_args()
    figures = Figures.of(args.directory)
    if args.into:
        args.into.write_text(replace_table(args.into.read_text(), figures))
    elif args.out:
        args.out.write_text(page(figures))
    else:
        sys.stdout.write(page(figures))


if __name__ == "__main__":
    main()
