"""A training run by the real SDK whose engine is killed in the middle: how long the gap is, and that losses are equal.

    python benchmarks/failover.py                  # two engines; the one that has the run gets SIGKILL
    python benchmarks/failover.py --lose machine   # its supervisor, too: nobody says that it is gone but its lease

A server and two engines, each a process of its own role with a data directory of its own, share a database and a
storage. The same run is done undisturbed first. Takes about two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

import tinker
from harness import random_datum
from processes import Service, service
from tinker import types

MODEL = "tinsmith/nano"
LENGTH = 256


@dataclass(frozen=True, slots=True)
class Figures:
    steps: int
    usual_ms: float
    gap_s: float
    largest_difference: float
    engines: tuple[str, str]  # before and after


def find_owner(processes: Service, model_id: str) -> tuple[str, int, str]:
    """The engine that has a run, its process, and where its supervisor works."""
    query = (
        "SELECT engines.engine_id, engines.pid, engines.holder FROM models JOIN engines "
        f"ON engines.engine_id = models.engine_id WHERE model_id = '{model_id}'"
    )
    ((engine_id, pid, holder),) = processes.rows(query)
    return engine_id, pid, holder


def train(
    url: str, processes: Service, steps: int, victims: dict[str, int] | None, kill_at: int
) -> tuple[list, list, list]:
    """Losses, seconds of each step, and the engines that had the run at the ends."""
    losses: list[float] = []
    step_seconds: list[float] = []
    adam = types.AdamParams(learning_rate=1e-3)
    with tinker.ServiceClient(base_url=url, api_key="tml-bench") as client:
        model = client.create_lora_training_client(MODEL, rank=16, seed=7).result()
        owners = [find_owner(processes, model.model_id)]
        for step in range(steps):
            start = time.perf_counter()
            data = [random_datum(LENGTH, seed=step % 4), random_datum(LENGTH, seed=step % 3)]
            passed = model.forward_backward(data, "cross_entropy")
            stepped = model.optim_step(adam)
            if victims is not None and step == kill_at:
                _, pid, holder = owners[0]
                for victim in (victims.get(Path(holder.partition(":")[2]).name), pid):
                    if victim:
                        os.kill(victim, signal.SIGKILL)
            losses.append(passed.result().metrics["loss:sum"])
            stepped.result()
            step_seconds.append(time.perf_counter() - start)
        owners.append(find_owner(processes, model.model_id))
    return losses, step_seconds, [engine_id for engine_id, _, _ in owners]


def measure_failover(steps: int, lose: str, lease_s: float, backend: str) -> Figures:
    with tempfile.TemporaryDirectory(prefix="tinsmith-failover-") as directory, contextlib.ExitStack() as stack:
        processes = service(Path(directory))
        settings = {"ENGINE_LEASE_S": str(lease_s), "ENGINE_THREADS": "1", "BACKEND": backend}
        _, url = stack.enter_context(processes.process("server", "--role", "server", settings=settings))
        hosts = {
            name: stack.enter_context(processes.process(name, "--role", "engine", settings=settings))[0].pid
            for name in ("one", "two")
        }
        processes.await_engines(2)
        expected, _, _ = train(url, processes, steps, None, 0)
        victims = hosts if lose == "machine" else {}
        losses, step_seconds, engines = train(url, processes, steps, victims, steps // 2)
        differences = [abs(loss - expected_loss) for loss, expected_loss in zip(losses, expected, strict=True)]
        usual_s = statistics.median(step_seconds)
        return Figures(steps, 1000 * usual_s, max(step_seconds) - usual_s, max(differences), (engines[0], engines[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lose", choices=["engine", "machine"], nargs="*", default=["engine", "machine"])
    parser.add_argument("--lease", type=float, default=5.0, help="seconds; it counts only where a machine is lost")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    print(f"{MODEL}, {args.steps} steps of 2 x {LENGTH} tokens, lease of {args.lease:g} s", flush=True)
    figures_by_loss: dict[str, object] = {}
    for lose in args.lose:
        figures = measure_failover(args.steps, lose, args.lease, args.backend)
        figures_by_loss[lose] = asdict(figures)
        print(
            f"{lose} lost at step {args.steps // 2}: {figures.engines[0]} -> {figures.engines[1]}; a step takes "
            f"{figures.usual_ms:.0f} ms, the gap was {figures.gap_s:.1f} s, losses differ by at most "
            f"{figures.largest_difference:g}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(figures_by_loss, indent=1))


if __name__ == "__main__":
    main()
