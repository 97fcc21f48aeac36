"""One tenant floods the queue while another trains: runs `benchmarks/fairness.py` and prints its figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fairness.py"
FLAGS = ("--small", "2000", "--large", "40", "--seconds", "10")


def test_a_flood_of_one_tenant_ends_and_is_measured() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), *FLAGS], capture_output=True, text=True, check=False)
    print(f"\n{done.stdout}", flush=True)
    assert done.returncode == 0, done.stderr[-4000:]
