"""benchmarks/gpu.py without a GPU: it measures, and writes no page (`make test-benchmarks`)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"

pytestmark = pytest.mark.slow


def benchmark(*flags: str) -> subprocess.CompletedProcess[str]:
    # Several threads take minutes on a busy machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, str(SCRIPT), *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_it_measures_without_a_gpu(tmp_path: Path) -> None:
    found = benchmark(
        "--device", "cpu", "--sizes", "tiny", "--quick", "--runs", "1", "--json", str(tmp_path / "found.json")
    )
    assert found.returncode == 0, found.stderr
    figures = json.loads((tmp_path / "found.json").read_text())["tiny"]
    trained = figures["training, 1 x 32, 8 clients"]
    assert trained["Tinsmith"]["tokens_per_s"] > 0 and trained["PEFT"]["tokens_per_s"] > 0
    assert figures["sampling, 2 at once, 0 adapters"].keys() == {"Tinsmith", "generate"}
    assert figures["sampling, 2 at once, 8 adapters"].keys() == {"Tinsmith"}
    assert figures["publish and first token, ms"] > 0
    assert figures["sampled logprobs from trained ones, mean"] < 0.05
    assert "| training, 1 x 32, 8 clients | PEFT |" in found.stdout
    assert re.fullmatch(
        r"passed: tiny: logprobs 0\.0\d+ apart, at least \d+\.\d\d x PEFT, at least \d+\.\d\d x generate",
        found.stdout.splitlines()[-1],
    )


def test_a_page_is_of_a_gpu_only(tmp_path: Path) -> None:
    found = benchmark("--device", "cpu", "--write", str(tmp_path / "gpu.md"))
    assert found.returncode == 1 and "figures of a GPU" in found.stderr
    assert not (tmp_path / "gpu.md").exists()
