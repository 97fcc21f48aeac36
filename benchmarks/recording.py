#!/usr/bin/env python3
"""The cost of recording curves, steps and samples: settling with and without it, interleaved, on a SQLite file.

    python benchmarks/recording.py [--rounds 400]

No server and no device; half a minute. Prints the medians of one settlement of an optimizer step, of one of a sample,
and of what a pass adds, in microseconds of this process's processors, and writes them as JSON with --json FILE.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tinsmith.cluster.ownership import Ownership
from tinsmith.db.factory import open_database
from tinsmith.engine.telemetry import Recorder, Records, SampleRecorder
from tinsmith.store.futures import Futures, NewFuture, Settlement
from tinsmith.store.models import Models, NewModel
from tinsmith.store.sampling_sessions import SamplingSession
from tinsmith.store.stored_samples import SampleLimits
from tinsmith.types import (
    AdamParams,
    LoraSpec,
    OptimStep,
    Pass,
    PassResult,
    Pending,
    Sample,
    SampledSequence,
    SampleResult,
    SamplingParams,
)

BASE, MODEL, SESSION = "base", "s:train:0", "s"
PROMPT_TOKENS, ANSWER_TOKENS, ANSWERS = 512, 256, 8
METRICS = {"loss:sum": 1.0, "tokens:sum": 4096.0, "ratio:mean": 1.0, "ppo_kl:mean": 0.01, "pg_clipfrac:mean": 0.0}
OUTCOME = {"grad_norm": 1.0, "learning_rate": 1e-4, "step": 1.0}


class Bench:
    def __init__(self, directory: Path) -> None:
        self.db = open_database(f"sqlite:///{directory / 'bench.db'}")
        self.db.migrate()
        self.futures = Futures(self.db)
        self.ownership = Ownership(self.db, BASE, "engine")
        Models(self.db).create(NewModel(MODEL, SESSION, "alice", BASE, LoraSpec(8)))
        self.num_requests = 0

    def new(self, kind: str) -> Pending:
        self.num_requests += 1
        request_id = f"{MODEL}:{self.num_requests}"
        new = NewFuture(request_id, "alice", SESSION, BASE, kind, b"{}", 0, MODEL, None, self.num_requests)
        self.futures.submit(new)
        (assigned,) = self.ownership.fetch_by_ids([request_id])
        return assigned.request

    def settle(self, request: Pending, effects: Callable[[], Sequence[object]]) -> float:
        """Microseconds of settling one request with what it leaves behind."""
        started = time.process_time()
        settlement = Settlement(request.request_id, body=b"{}", effects=effects())  # type: ignore[arg-type]
        self.futures.settle([settlement], {})
        return 1e6 * (time.process_time() - started)


def compare(
    bench: Bench, kind: str, effects: Callable[[Pending], Sequence[object]], rounds: int
) -> tuple[float, float]:
    without, with_it = [], []
    for _ in range(rounds):
        without.append(bench.settle(bench.new(kind), list))
        request = bench.new(kind)
        with_it.append(bench.settle(request, lambda request=request: effects(request)))
    return statistics.median(without), statistics.median(with_it)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        records = Records(bench.db, SampleLimits(200, 200))
        recorder, keeper = Recorder(BASE, records), SampleRecorder(records)
        training_pass = Pass("r", MODEL, (), "cross_entropy", {}, forward_only=False)
        pass_result = PassResult((np.zeros(1, np.float32),) * 64, METRICS)
        step = OptimStep("r", MODEL, AdamParams())

        def record_step(request: Pending) -> Sequence[object]:
            recorder.record_pass(request, training_pass, pass_result)
            return recorder.record_step(request, step, OUTCOME)

        sampler = SamplingSession("s:sample:0", SESSION, "alice", BASE, None, None, None, None, 0.0, 0)
        tokens = np.arange(ANSWER_TOKENS, dtype=np.int32)
        sequence = SampledSequence(tokens, np.full(ANSWER_TOKENS, -0.5, np.float32), "stop")
        sample = Sample("r", None, np.arange(PROMPT_TOKENS, dtype=np.int32), ANSWERS, SamplingParams())
        sample_result = SampleResult("r", (sequence,) * ANSWERS)

        def record_sample(request: Pending) -> Sequence[object]:
            keeper._allowances.clear()
            recording = keeper.begin(request, sampler, sample)
            return [] if recording is None else keeper.record(recording, sample_result)

        compare(bench, "optim_step", record_step, 50)
        microseconds = {}
        for name, kind, effects in (
            ("optimizer step", "optim_step", record_step),
            ("stored sample", "sample", record_sample),
        ):
            microseconds[name] = compare(bench, kind, effects, arguments.rounds)
            without, recorded = microseconds[name]
            print(f"settling, {name}: {without:.0f} us without, {recorded:.0f} us with ({recorded - without:+.0f} us)")
        request = bench.new("forward_backward")
        started = time.process_time()
        for _ in range(10_000):
            recorder.record_pass(request, training_pass, pass_result)
        microseconds["pass"] = (0.0, 1e6 * (time.process_time() - started) / 10_000)
        print(f"a pass: {microseconds['pass'][1]:.1f} us")
        bench.db.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(microseconds, indent=2) + "\n")


if __name__ == "__main__":
    main()
