"""Crashes with a real model: results match those of a run without a crash within the bounds of `docs/numerics.md`,
since the batching of steps may differ.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fault.crash.restarted_server import keep_server_running
from fault.crash.runs import DEPRECATED, Plan, Record, books, run_all

pytestmark = pytest.mark.filterwarnings(DEPRECATED)

PLANS = (Plan("ann", 4, "cross_entropy", 1, rate=1e-3), Plan("bob", 8, "importance_sampling", 2, rate=1e-3))
BOUND = 1e-3
"""Bound on logprobs after dozens of steps; after three it is 5e-5."""

CRASHES = ("submit.stored:30@server", "engine.ran:15@both", "settle.uncommitted:15@engine", "snapshots.placed@both")

Seen = tuple[dict[str, Record], list[tuple], list[tuple]]


def outcome(data_dir: Path, **settings: str) -> Seen:
    with keep_server_running(data_dir, **settings) as server:
        records = run_all(server, PLANS)
        server_books = books(server)
        assert bool(server.markers) == bool(settings)
    return records, server_books.futures, server_books.models


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return outcome(tmp_path_factory.mktemp("undisturbed") / "data")


@pytest.mark.slow
@pytest.mark.parametrize("crash", CRASHES)
def test_a_crash_does_not_show_in_the_numbers_of_a_real_model(tmp_path: Path, undisturbed: Seen, crash: str) -> None:
    records, *counts = outcome(tmp_path / "data", failpoints=crash)
    expected, *expected_counts = undisturbed
    assert counts == expected_counts
    for tenant, record in records.items():
        for (name, value), (_, before) in zip(record.results, expected[tenant].results, strict=True):
            if name == "sample":  # two candidates may differ by less than the bound
                assert len(value) == len(before)  # type: ignore[arg-type]
            else:
                np.testing.assert_allclose(flat(value), flat(before), rtol=BOUND, atol=BOUND, err_msg=name)


def flat(value: object) -> list[float]:
    """Return the numbers that a client received, in order."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in flat(value[key])]
    if isinstance(value, list | tuple):
        return [leaf for element in value for leaf in flat(element)]
    return [float(value)]  # type: ignore[arg-type]
