"""Every benchmark in one call, one after the other, for a page that can be put beside others of its kind.

    python benchmarks/suite.py                      # make bench: 20 minutes or less on two cores, into build/bench
    python benchmarks/suite.py --quick              # make bench-quick: three minutes or less
    python benchmarks/suite.py --only latency steps --out /tmp/figures

What each one prints is shown as it comes; into the directory go NAME.txt, NAME.json and index.md, which has everything
with the machine that it was taken on. One that fails or takes too long is named and does not stop the others, but
the exit status is 1. The machine's ceilings come first, so that every other figure can be read as a share of them.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from measured import machine

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Part:
    """One script: its flags for the whole suite and for the quick one, None where that leaves it out."""

    name: str
    title: str
    whole: str
    quick: str | None
    limit_s: int = 600


PARTS = (
    Part("ceilings", "What the machine can do", "", "--runs 3"),
    Part("latency", "Round trips", "--runs 100", "--sizes tiny fake --runs 30"),
    Part("steps", "Steps of reinforcement learning", "--runs 5", "--sizes tiny --runs 2"),
    Part("training", "Training", "--sizes tiny m50 --runs 5", "--sizes tiny --dtypes float32 --works 0 3 --runs 2"),
    Part("sampling", "Sampling", "--sizes tiny m50 --runs 5", "--sizes tiny --dtypes float32 --at-once 1 16 --runs 2"),
    Part("invariance", "Invariance", "", "--models tiny --dtypes float32 --runs 0"),
)
PACKAGES = ("tinsmith", "tinker", "torch", "transformers", "peft")


def run(part: Part, flags: str, out: Path) -> str:
    """Why it failed, in words; empty if it did not. Its output is shown, and kept."""
    script = HERE / f"{part.name}.py"
    if not script.exists():
        return "there is no such script in this version"
    print(f"\n## {part.title}: python benchmarks/{part.name}.py {flags}".rstrip(), flush=True)
    command = [sys.executable, str(script), *flags.split(), "--json", str(out / f"{part.name}.json")]
    late = threading.Event()
    with (out / f"{part.name}.txt").open("w") as kept:
        # A group of its own, so that the servers that it has started end with it.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        timer = threading.Timer(part.limit_s, lambda: (late.set(), _end(process)))
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                sys.stdout.write(line)
                sys.stdout.flush()
                kept.write(line)
            status = process.wait()
        finally:
            timer.cancel()
            _end(process)
    if late.is_set():
        return f"it took more than {part.limit_s} s"
    return f"it ended with status {status}" if status else ""


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)


def page(done: list[tuple[Part, str, str]], seconds: float, out: Path) -> str:
    """The markdown of everything."""
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    lines = ["# Figures", "", f"{machine()}; {versions}; {time.strftime('%Y-%m-%d')}; {seconds / 60:.0f} minutes.", ""]
    for part, flags, failure in done:
        lines += [f"## {part.title}", "", f"`python benchmarks/{part.name}.py {flags}`".replace(" `", "`"), ""]
        text = out / f"{part.name}.txt"
        if text.exists():
            lines += ["```", text.read_text().strip(), "```", ""]
        if failure:
            lines += [f"Not whole: {failure}.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="only these")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="where the figures go")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    done: list[tuple[Part, str, str]] = []
    for part in PARTS:
        flags = part.quick if given.quick else part.whole
        if flags is None or part.name not in (given.only or [part.name]):
            continue
        for old in (given.out / f"{part.name}.txt", given.out / f"{part.name}.json"):
            old.unlink(missing_ok=True)
        failure = run(part, flags, given.out)
        if failure:
            print(f"{part.name}: {failure}", flush=True)
        done.append((part, flags, failure))
    path = given.out / "index.md"
    path.write_text(page(done, time.monotonic() - started, given.out))
    print(f"\n{path}")
    sys.exit(1 if any(failure for *_, failure in done) else 0)


if __name__ == "__main__":
    # As by Ctrl-C: what is running, and the servers that it has started, end as well.
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(143))
    main()
