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

from turns import Row, in_words

STALL_MS = 100.0
"""Compiling a shape takes seconds; a shorter delay is a first use of memory and kernels."""

BEGIN, END = "<!-- targets.py writes from here -->", "<!-- to here -->"
"""Around the table in a page of prose."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What is in a directory: latency by size and row, and the rows of training and sampling."""

    latency: dict[str, dict[str, Row]] = field(default_factory=dict)
    training: list[Row] = field(default_factory=list)
    sampling: list[Row] = field(default_factory=list)
    ceilings: dict[str, float] = field(default_factory=dict)
    suite: Row = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, directory: Path) -> Figures:
        found = cls()
        for path in sorted(directory.glob("*.json")):
            rows: Any = json.loads(path.read_text())
            match path.stem.partition("-")[0]:
                case "latency":
                    for size, some in rows.items():
                        found.latency.setdefault(size, {}).update(some)
                case "training":
                    found.training.extend({**row, "part": path.stem} for row in rows)
                case "sampling":
                    found.sampling.extend({**row, "part": path.stem} for row in rows if "seconds" in row)
                    told = (f"{path.stem}: {row['what']}: {row['failed']}" for row in rows if "failed" in row)
                    found.failures.extend(told)
                case "ceilings":
                    found.ceilings.update(rows)
                case "suite":
                    found.suite.update(rows)
        return found


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure in the target's unit, and ours and theirs in tokens a second where it is a ratio."""

    what: str
    value: Mapping[str, float]
    part: str
    ours: Mapping[str, float] | None = None
    theirs: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """`limit` is a most where `is_most`, else a least. `profile` are flags of where.py that show the time."""

    measure: str
    against: str
    limit: float
    unit: str
    find: Callable[[Figures], Iterator[Measured]]
    is_most: bool = False
    profile: tuple[str, ...] = ()

    def is_met(self, value: float) -> bool:
        return value <= self.limit if self.is_most else value >= self.limit

    @property
    def in_words(self) -> str:
        return f"{'<=' if self.is_most else '>='} {self.limit:g} {self.unit}"


# Where figures are.


def time_of(size: str, what: str, found: Figures, *, worst: bool = False, scale: float = 1.0) -> Iterator[Measured]:
    row = found.latency.get(size, {}).get(what)
    if row:
        values = {"median": row["p50_ms"], "least": row["min_ms"], "most": row["max_ms"]}
        values = {key: value * scale for key, value in values.items()} | {"runs": row["runs"]}
        if worst:
            values["median"] = values["most"]
        yield Measured(what, values, "latency" if size == "tiny" else f"latency-{size}")


def trained(
    size: str, work: str, dtypes: tuple[str, ...], found: Figures, *, of: str = "of_peft"
) -> Iterator[Measured]:
    chosen = [row for row in found.training if (row["size"], row["work"]) == (size, work)]
    rows = {(row["part"], row["what"]): row for row in chosen}
    for dtype in dtypes:
        for (part, what), row in rows.items():
            if what != f"service {dtype}" or of not in row:
                continue
            other = "PEFT float32" if of != "of_step_alone" else what.replace("service", "step alone")
            theirs = rows[part, other]
            if of == "memory_of_peft":
                value = {"median": row[of], "least": row[of], "most": row[of], "runs": 1}
                yield Measured(dtype, value, part, _exactly(row["peak_mib"]), _exactly(theirs["peak_mib"]))
            else:
                yield Measured(dtype, row[of], part, row["tokens_per_s"], theirs["tokens_per_s"])


def _exactly(value: float) -> dict[str, float]:
    return {"median": value, "least": value, "most": value, "runs": 1}


def sampled(at_once: int, ours: str, other: str, found: Figures) -> Iterator[Measured]:
    """Of one row of the service to another of the same turns."""
    rows = {(row["part"], row["what"]): row for row in found.sampling
            if (row["size"], row.get("at_once")) == ("m50", at_once)}  # fmt: skip
    for (part, what), row in rows.items():
        if what == ours and other in row.get("of", {}):
            yield Measured(f"{ours} / {other}", row["of"][other], part, row["tokens_per_s"],
                           rows[part, other]["tokens_per_s"])  # fmt: skip


def pairs(at_once: int, chosen: tuple[tuple[str, str], ...], found: Figures) -> Iterator[Measured]:
    for ours, other in chosen:
        yield from sampled(at_once, f"service {ours}", other, found)


def against(engine: str, suffix: str = "") -> tuple[tuple[str, str], ...]:
    """Each of ours with one adapter, beside theirs of the same dtype; and our bfloat16 beside their float32."""
    given = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"))
    return tuple((f"{ours}, 1 LoRA", f"{engine} {theirs}{suffix}") for ours, theirs in given)


BOTH = ("bfloat16", "float32")
EIGHT = tuple((f"{dtype}, 8 LoRA", f"service {dtype}, 1 LoRA") for dtype in BOTH)


def _sampling(at_once: int) -> tuple[str, ...]:
    return f"decode --at-once {at_once}", f"samples --at-once {at_once}"


PACKED = "packed --size m50 --work"
TARGETS = (
    Target("one-datum forward, tiny, p50", "absolute", 8, "ms", partial(time_of, "tiny", "forward, one datum"),
           is_most=True, profile=("forward",)),
    Target("the same, 8 clients", "absolute", 25, "ms", partial(time_of, "tiny", "forward, one datum, 8 clients"),
           is_most=True, profile=("forward --clients 8",)),
    Target("forward_backward + optim_step, tiny, p50", "absolute", 20, "ms",
           partial(time_of, "tiny", "forward_backward + optim_step"), is_most=True, profile=("step",)),
    Target("training m50, 8 x 256, bfloat16 base", "HF + PEFT float32", 1.8, "x",
           partial(trained, "m50", "8 x 256, 1 client", ("bfloat16",)), profile=(f"{PACKED} 0",)),
    Target("training m50, 8 x 256, float32 base", "HF + PEFT float32", 1.2, "x",
           partial(trained, "m50", "8 x 256, 1 client", ("float32",)), profile=(f"{PACKED} 0 --dtype float32",)),
    Target("training m50, ragged 16-512", "HF + PEFT float32, padded", 3, "x",
           partial(trained, "m50", "ragged 16-512, 1 client", BOTH), profile=(f"{PACKED} 1",)),
    *(Target(f"{clients} tenants with 32 tokens each, {size}", "HF + PEFT float32, one after the other", limit, "x",
             partial(trained, size, f"1 x 32, {clients} clients", BOTH),
             profile=tuple(f"{what} --size {size} --work {3 if clients == 8 else 4}" for what in ("packed", "step")))
      for size, limit in (("tiny", 3), ("m50", 4)) for clients in (8, 32)),
    Target("share of the step alone that the service keeps, m50, 8 x 256", "the step in process", 0.9, "x",
           partial(trained, "m50", "8 x 256, 1 client", BOTH, of="of_step_alone"),
           profile=("step --size m50 --work 0",)),
    *(Target(f"sampling m50 with LoRA, {at_once} at once", "vLLM on a CPU, same work", 2, "x",
             partial(pairs, at_once, against("vllm", ", 1 LoRA")), profile=_sampling(at_once))
      for at_once in (16, 64)),
    *(Target(f"sampling m50 with LoRA, {at_once} at once", "HF generate, without LoRA", 3, "x",
             partial(pairs, at_once, against("transformers")), profile=_sampling(at_once))
      for at_once in (16, 64)),
    Target("sampling m50 with LoRA, 64 at once", "llama.cpp bfloat16, without LoRA", 1, "x",
           partial(pairs, 64, (("bfloat16, 1 LoRA", "llama.cpp bfloat16, 0 LoRA"),)), profile=_sampling(64)),
    *(Target(f"sampling m50 with LoRA, {at_once} at once", "a plain decode loop with LoRA", 0.75, "x",
             partial(pairs, at_once, (("bfloat16, 1 LoRA", "plain loop bfloat16, 1 LoRA"),)),
             profile=_sampling(at_once))
      for at_once in (16, 64)),
    *(Target(f"8 adapters in one decode batch, m50, {at_once} at once", "1 adapter", 0.85, "x",
             partial(pairs, at_once, EIGHT), profile=(f"decode --at-once {at_once} --adapters 8",))
      for at_once in (16, 64)),
    Target("publish + first token after it, m50, rank 32", "absolute", 30, "ms",
           partial(time_of, "m50", "publish + first token"), is_most=True, profile=("publish --size m50",)),
    Target("cold start to the first answered forward, tiny", "absolute", 8, "s",
           partial(time_of, "tiny", "cold start to the first forward", scale=0.001), is_most=True,
           profile=("forward",)),
    Target("no compile stall: what a new shape of a batch takes more, tiny, the worst of 10", "absolute", STALL_MS,
           "ms", partial(time_of, "tiny", "what a new shape takes more", worst=True), is_most=True, profile=("step",)),
    Target("engine memory, m50, 8 x 256", "HF + PEFT float32", 0.6, "x",
           partial(trained, "m50", "8 x 256, 1 client", BOTH, of="memory_of_peft"), is_most=True,
           profile=(f"{PACKED} 0",)),
)  # fmt: skip


# The page.


def missed(found: Figures) -> list[Target]:
    """Those with a figure that is not good enough."""
    return [t for t in TARGETS if any(not t.is_met(row.value["median"]) for row in t.find(found))]


def page(found: Figures) -> str:
    """A page of its own: the table, the commands of its last column, and what to profile for the missed targets."""
    lines = ["# Targets", "", *_table(found), *_commands(found.suite)]
    if short := missed(found):
        lines += ["Profiles of the missed targets: `python benchmarks/where.py` with", ""]
        lines += [f"- `{flags}`" for flags in dict.fromkeys(each for target in short for each in target.profile)] + [""]
    return "\n".join(lines)


def replaced(text: str, found: Figures) -> str:
    """The page `text` with a new table between BEGIN and END. Raises ValueError if it has no such place."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN!r} and {END!r}")
    return "\n".join([before + BEGIN, "", *_table(found), END + after])


def _table(found: Figures) -> list[str]:
    lines = [*_preface(found.suite), *_ceilings(found.ceilings)]
    header = ("measure", "against", "what", "ours", "theirs", "result", "target", "by")
    lines += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    counts = {"met": 0, "missed": 0, "not measured": 0}
    for target in TARGETS:
        rows = list(target.find(found))
        for row in rows:
            verdict = "met" if target.is_met(row.value["median"]) else "missed"
            counts[verdict] += 1
            lines.append(_line(target, row, verdict))
        if not rows:
            counts["not measured"] += 1
            empty = (target.measure, target.against, "", "", "", "", f"{target.in_words}: not measured", "")
            lines.append("| " + " | ".join(empty) + " |")
    lines += ["", ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + ".", ""]
    if found.failures:
        lines += ["Not measured because of an error:", "", *(f"- {each}" for each in found.failures), ""]
    return lines


def _preface(suite: Row) -> list[str]:
    lines = [
        "Written by `python benchmarks/targets.py` from the figures of `make bench`. Ratios are medians of interleaved",
        "runs, our tokens a second over theirs (MiB for memory); the least and the most are in brackets.",
        "",
    ]
    if suite:
        lines += [f"{suite['machine']}; {suite['versions']}; {suite['date']}; {suite['minutes']:.0f} minutes.", ""]
    return lines


def _ceilings(ceilings: Mapping[str, float]) -> list[str]:
    told = "; ".join(f"{what} {value:,.0f}" for what, value in ceilings.items())
    return [f"The machine's ceilings: {told}.", ""] if ceilings else []


def _line(target: Target, row: Measured, verdict: str) -> str:
    form = ".2f" if target.unit in ("x", "s") else ",.1f"
    ours, theirs = ("" if each is None else f"{each['median']:,.0f}" for each in (row.ours, row.theirs))
    value = f"{in_words(row.value, form)} {target.unit}, {row.value['runs']:.0f} runs"
    judged = f"{target.in_words}: **{verdict}**"
    cells = (target.measure, target.against, row.what, ours, theirs, value, judged, row.part)
    return "| " + " | ".join(cells) + " |"


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
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", type=Path, help="write the page to this file instead of showing it")
    where.add_argument("--into", type=Path, help="replace the table in this page of prose")
    given = parser.parse_args()
    found = Figures.of(given.directory)
    if given.into:
        given.into.write_text(replaced(given.into.read_text(), found))
    elif given.out:
        given.out.write_text(page(found))
    else:
        sys.stdout.write(page(found))


if __name__ == "__main__":
    main()
