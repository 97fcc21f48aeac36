"""Processes that are killed at any moment, for some minutes: `PYTHONPATH=tests python -m crash.random --minutes 10`.

The training runs of `runs` go on, one after the other, on one data directory; meanwhile a process is killed every few
seconds, the server, its engine or both, as the seed has it. Every run must tell its clients what an undisturbed one
did, and the books must be those of as many undisturbed runs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

from crash.kept import KeptServer, kept
from crash.runs import books, run_all


class Killer:
    """Kills until it is told to stop."""

    def __init__(self, server: KeptServer, seed: int, every_s: float) -> None:
        self._every_s = every_s
        self.kills: Counter[str] = Counter()
        self._server = server
        self._choice = random.Random(seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._choice.uniform(0, 2 * self._every_s)):
            victim = self._choice.choice(("server", "engine", "both"))
            server, engines = self._server.pids()
            pids = {"server": [server], "engine": engines, "both": [*engines, server]}[victim]
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.kills[victim] += bool(pids)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--every", type=float, default=6.0, help="mean seconds between two kills")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="crash-") as directory:
        with kept(Path(directory) / "undisturbed", "--backend", "fake") as server:
            told, expected = run_all(server), books(server)
        with kept(Path(directory) / "killed", "--backend", "fake") as server:
            killer = Killer(server, given.seed, given.every)
            until = time.monotonic() + 60 * given.minutes
            runs = 0
            try:
                while time.monotonic() < until:
                    started = time.monotonic()
                    if run_all(server) != told:
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
