"""Kills processes at random moments for some minutes: `PYTHONPATH=tests python -m fault.crash.random --minutes 10`.

The training runs of `runs` run one after another on one data directory, while every few seconds the server, its engine
or both are killed, as the seed decides. Every run must return the results of an undisturbed one, and the stored counts
must be those of as many undisturbed runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

from fault.crash.killing import Killer, processes_below, server_or_engine
from fault.crash.restarted_server import keep_server_running
from fault.crash.runs import books, run_all


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--every", type=float, default=6.0, help="mean seconds between two kills")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="crash-") as directory:
        with keep_server_running(Path(directory) / "undisturbed", "--backend", "fake") as server:
            records, expected = run_all(server), books(server)
        with keep_server_running(Path(directory) / "killed", "--backend", "fake") as server:
            killer = Killer(
                lambda: processes_below(os.getpid()), server_or_engine, arguments.seed, (0, 2 * arguments.every)
            )
            until = time.monotonic() + 60 * arguments.minutes
            runs = 0
            try:
                while time.monotonic() < until:
                    started = time.monotonic()
                    if run_all(server) != records:
                        raise AssertionError("a client was told something else than without a kill")
                    runs += 1
                    print(f"run {runs}: {time.monotonic() - started:.1f} s; {dict(killer.kills)}", flush=True)
                killer.stop()
                server.await_answer()
                if books(server) != expected.times(runs):
                    raise AssertionError(f"the books differ:\n{books(server)}\n{expected.times(runs)}")
            except BaseException:
                print(server.log()[-20000:], file=sys.stderr)
                raise
    print(f"{runs} runs, {sum(killer.kills.values())} kills {dict(killer.kills)}: nothing lost, nothing done twice")
    return 0


if __name__ == "__main__":
    sys.exit(main())
