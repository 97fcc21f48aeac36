"""The GPU tests work without a GPU: all are collected, and some pass on a CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "gpu"


@pytest.mark.extended
def test_all_are_collected_when_a_device_is_named_and_some_run_here() -> None:
    chosen = ["-k", "files_of_a_version or kernels"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER), *chosen]
    environment = {**os.environ, "TEST_DEVICE": "cpu"}
    completed = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=FOLDER.parents[1], check=False
    )
    assert completed.returncode == 0, completed.stdout
    counts = re.search(r"(\d+) passed, (\d+) skipped, (\d+) deselected", completed.stdout)
    assert counts and int(counts[1]) > 1 and int(counts[3]) > 100, completed.stdout
    last = completed.stdout.splitlines()[-1]
    assert last.startswith(
        f"passed: {counts[1]} passed, 0 failed, {counts[2]} skipped, 0 not run on a CPU, which shows nothing about"
    )


def test_the_verdict_is_one_line() -> None:
    from gpu.conftest import verdict

    assert verdict(Counter(passed=3, skipped=1), "X") == "passed: 3 passed, 0 failed, 1 skipped, 0 not run on X"
    for bad in (Counter(passed=3, failed=1), Counter({"passed": 3, "not run": 1}), Counter(skipped=2)):
        assert verdict(bad, "X").startswith("FAILED: ")


@pytest.mark.skipif(bool(os.environ.get("TEST_DEVICE")), reason="a device is named")
def test_none_are_collected_when_no_device_is_named() -> None:
    from gpu import conftest

    assert conftest.collect_ignore_glob == ["test_*.py"]
