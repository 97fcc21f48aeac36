"""Processes of a server are killed every few seconds; training, samples and bulk jobs return the same results.

The server is deterministic, so that every loss, log probability and token is compared bit by bit. Prints each victim
and the seed. `ATTACK_SEED` repeats the choice of victims, but not the state of the server at each kill.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest

from attack.bulk import BulkJobs
from attack.given import SECONDS, SEED
from fault.crash.killing import Killer, adopting, any_kind, find_survivors, processes_below
from fault.crash.restarted_server import RestartedServer, keep_server_running
from fault.crash.runs import DEPRECATED, Plan, Record, books, run_all

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(DEPRECATED), pytest.mark.timeout(0)]

PATIENCE_S = 600.0  # of a client: results may be late, but not wrong
PLANS = (
    Plan("ann", 4, "cross_entropy", 1, rate=1e-3, patience_s=PATIENCE_S),
    Plan("bob", 8, "importance_sampling", 2, rate=1e-3, patience_s=PATIENCE_S),
)
PAUSES_S = (3.0, 15.0)
ENDS_WITHIN_S = 30.0
SETTINGS = {"batch_tenants": '["cal"]'}
"""The tenant whose bulk jobs may run functions."""


def say(text: str) -> None:
    print(text, flush=True)


def test_killed_processes_lose_and_repeat_nothing(tmp_path: Path) -> None:
    say(f"\nseed {SEED}, {SECONDS:g} s")
    with keep_server_running(tmp_path / "undisturbed", "--deterministic", **SETTINGS) as server:
        jobs = BulkJobs(server, tmp_path / "undisturbed-jobs")
        records, expected = run_all(server, PLANS), books(server)
        jobs.stop()
        undisturbed = {kind: outputs[0] for kind, outputs in jobs.outputs.items()}
        assert server.deaths == 0
    with adopting():
        with keep_server_running(tmp_path / "killed", "--deterministic", **SETTINGS) as server:
            try:
                runs = attack_and_count(server, tmp_path, records, undisturbed)
                assert books(server) == expected.times(runs)
            except BaseException:
                say(server.log()[-20_000:])
                raise
        assert not (survivors := find_survivors(os.getpid(), ENDS_WITHIN_S)), f"still there: {survivors}"


def attack_and_count(
    server: RestartedServer, directory: Path, records: dict[str, Record], rows: dict[str, bytes]
) -> int:
    """Return the number of runs. Each received the results of the undisturbed run."""
    me = os.getpid()
    jobs = BulkJobs(server, directory / "jobs")
    killer = Killer(lambda: processes_below(me), any_kind, SEED, PAUSES_S, say, server.answers, SECONDS)
    until = time.monotonic() + SECONDS
    runs = 0
    try:
        while time.monotonic() < until:
            started = time.monotonic()
            assert run_all(server, PLANS) == records, "a client was told something else than without a kill"
            runs += 1
            say(f"run {runs}: {time.monotonic() - started:.1f} s, bit-identical")
    finally:
        killer.stop()
    server.await_answer()
    jobs.stop()
    for kind, outputs in jobs.outputs.items():
        assert set(outputs) == {rows[kind]}, f"a bulk job of kind {kind} has other rows than without a kill"
    num_outputs = Counter({kind: len(outputs) for kind, outputs in jobs.outputs.items()})
    say(f"{runs} runs, bulk jobs {dict(num_outputs)}, {sum(killer.kills.values())} kills: {dict(killer.kills)}")
    return runs
