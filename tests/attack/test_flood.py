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
    completed = subprocess.run([sys.executable, str(SCRIPT), *FLAGS], capture_output=True, text=True, check=False)
    print(f"\n{completed.stdout}", flush=True)
    assert completed.returncode == 0, completed.stderr[-4000:]
