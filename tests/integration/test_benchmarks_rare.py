"""Benchmarks outside of `make bench` still run, each as a process with minimal sizes. Most are slow: `make
test-benchmarks`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
QUICK = {
    "decode_host": "--rows 2 4 --steps 3 --runs 1",
    "recording": "--rounds 3",
}
SLOW = {
    "batch_models": "--sizes nano --rows 4 --runs 1",
    "burst": "--size 4 --runs 1 --round-trip-ms 0 1",
    "failover": "--steps 6 --lose engine --backend fake",
    "fairness": "--small 50 --large 2 --seconds 2",
    "growth": "--runs 10 --sizes 50 100",
    "polls": "--polls 20 --seconds 1",
    "quantised": "--steps 1 --kinds off int8",
    "ranks": "--ranks 2 --size tiny --runs 1",
    "scaling": "--only servers --seconds 1 --runs 1",
    "shared_prompts": "--sizes tiny --shapes 40x4 --groups 2 --runs 1",
    "shared_rows": "--sizes tiny --shapes 40x4 --group 2 --runs 1",
    "soak": "--clients 2 --minutes 0.1 --backend fake --processes 1",
    "versions": f"--other {sys.executable} --only forward --runs 1",
}
WITHOUT_JSON = {
    "batch": "--batches 4 --rows-in-database 1000",
    "batch_scale": "--batches 2000 --workers 3 --hold 0.1 --seconds 1",
    "snapshots": "--only nano --rounds 1 --tokens 64",
}


def run(script: str, *flags: str) -> str:
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), *flags]
    # Several threads take minutes on a busy machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    completed = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


@pytest.mark.extended
@pytest.mark.parametrize("script", [*QUICK, *(pytest.param(script, marks=pytest.mark.slow) for script in SLOW)])
def test_it_runs_and_writes_its_figures(script: str, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    printed = run(script, *(QUICK | SLOW)[script].split(), "--json", str(path))
    assert printed.strip()
    assert json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("script", WITHOUT_JSON)
def test_it_runs_and_prints_its_figures(script: str) -> None:
    assert run(script, *WITHOUT_JSON[script].split()).strip()


def test_every_benchmark_is_run_by_some_test() -> None:
    """Every script is listed here or named by another test. Helpers have no `main`; sampling.py runs
    peers.py, and burst.py relay.py.
    """
    tests = [path for path in Path(__file__).parents[1].rglob("test_*.py") if path.name != Path(__file__).name]
    elsewhere = "".join(path.read_text() for path in tests)
    for path in BENCHMARKS.glob("*.py"):
        if "def main()" in path.read_text() and path.stem not in QUICK | SLOW | WITHOUT_JSON | {
            "peers": "",
            "relay": "",
        }:
            assert f'"{path.stem}"' in elsewhere, f"no test runs {path.name}"
