"""Two versions of Tinsmith on the rows that users of a CPU feel: did a change make one of them slower?

    git worktree add /tmp/before v0.1.0 && cd /tmp/before && make .venv/.installed
    python benchmarks/versions.py --other /tmp/before/.venv/bin/python              # 25 minutes on two cores
    python benchmarks/versions.py --other VENV/bin/python --only forward tenants --runs 40

Each version runs a server of its own from its environment; the client is this one's SDK for both, and so are the models
and the work. Runs are interleaved, and the processes of the version that is not at work are stopped. Prints the median
of each row for both, and how many times as long the other takes in runs that followed each other.

The rows: a forward pass of 32 tokens of tiny; steps of m50 on 8 x 256 tokens and of Qwen3-0.6B's shape on 2 x 256; of
eight tenants of m50 on 32 tokens each; samples of m50, 16 and 64 at once, and of Qwen3-0.6B's shape, 8 at once. All but
the first are in bfloat16.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TINKER_TELEMETRY", "0")

import tinker
import training
from harness import (
    API_KEY,
    RunningServer,
    describe_machine,
    processes,
    random_datum,
    start_server,
    time_runs,
    write_json,
)
from interleaving import Row, Run, compute_speedup, exit_on_sigterm, format_spread, run_in_turns, summarize_spread
from models import make
from sampling import LOADS, of_service, samplers_of

FORWARDS = 20
"""Forward passes of a run, since one takes a few milliseconds."""
THIS, OTHER = "this version", "the other"

Open = Callable[[str, str], AbstractContextManager[Run]]
"""What makes a row's run, given the URL of a server and the name of its model."""


class Measure(NamedTuple):
    """A row: what it runs, on a model of `size`. `runs` are those of each version."""

    open: Open
    size: str
    dtype: str = "bfloat16"
    runs: int = 15


@contextmanager
def open_forward(url: str, model: str) -> Iterator[Run]:
    with tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
        client = service.create_lora_training_client(model, rank=training.RANK).result()
        data = [random_datum(32)]

        def forward() -> None:
            client.forward(data, "cross_entropy").result()

        yield lambda: sum(time_runs(forward, FORWARDS, warm_up=0)) / 1000


def training_opener(work: int) -> Open:
    return lambda url, model: training.of_service(url, model, training.WORKS[work])


def sampling_opener(at_once: int) -> Open:
    @contextmanager
    def open_samplers(url: str, model: str) -> Iterator[Run]:
        with tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
            samplers = samplers_of(service, model, 1)
            yield lambda: of_service(samplers, LOADS["short"], at_once)

    return open_samplers


MEASURES = {
    "forward": Measure(open_forward, "tiny", "float32", 40),
    "training": Measure(training_opener(0), "m50"),
    "training-large": Measure(training_opener(7), "m500", runs=6),
    "tenants": Measure(training_opener(3), "m50", runs=40),
    "sampling-16": Measure(sampling_opener(16), "m50"),
    "sampling-64": Measure(sampling_opener(64), "m50", runs=8),
    "sampling-large": Measure(sampling_opener(8), "m500", runs=4),
}


class Version:
    """A server of one version, stopped but for its turns."""

    def __init__(self, server: RunningServer, run: Run) -> None:
        self._server, self._run = server, run

    def take_turn(self) -> float:
        """Seconds of one run."""
        self._signal(signal.SIGCONT)
        try:
            return self._run()
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for pid in {self._server.pid, *(pid for pids in processes(self._server.pid).values() for pid in pids)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def __enter__(self) -> Version:
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGCONT)  # so that it can end


def compare(measure: Measure, directory: Path, other: str, runs: int) -> dict[str, Row]:
    """The seconds of both versions, and how many times as long the other takes."""
    model = f"bench/{measure.size}"
    with ExitStack() as stack:
        versions = {}
        for name, python in ((THIS, sys.executable), (OTHER, other)):
            settings = {"DTYPE": measure.dtype}
            server = stack.enter_context(start_server(f"{model}={directory}", settings=settings, python=python))
            run = stack.enter_context(measure.open(server.url, model))
            run()  # its engine has started and compiled what it needs
            versions[name] = stack.enter_context(Version(server, run))
        turns = {name: version.take_turn for name, version in versions.items()}
        seconds = run_in_turns(turns, runs, lambda name, reason: print(f"{name}: {reason}", flush=True))
    rows: dict[str, Row] = {name: {"ms": summarize_spread([1000 * s for s in seconds[name]])} for name in seconds}
    rows[OTHER]["times_this"] = compute_speedup(seconds[THIS], seconds[OTHER])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", required=True, help="the interpreter that has the other version")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--runs", type=int, help="of each version, instead of each row's number")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    print(describe_machine(), flush=True)
    figures: dict[str, dict[str, Row]] = {}
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
        for name in args.only:
            measure = MEASURES[name]
            path = Path(directory) / measure.size
            if not path.exists():
                make(measure.size, path)
            rows = figures[name] = compare(measure, path, args.other, args.runs or measure.runs)
            this, other = (format_spread(rows[version]["ms"]) for version in (THIS, OTHER))
            ratio = format_spread(rows[OTHER]["times_this"], ".2f")
            print(f"{name:16s} this {this:24s} the other {other:24s} ms, {ratio} times as long", flush=True)
            write_json(args.json, figures)


if __name__ == "__main__":
    exit_on_sigterm()
    main()
