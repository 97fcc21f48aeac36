"""The GPU tests work without a GPU: all are collected, and some pass on a CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "gpu"


@pytest.mark.extended
def test_all_are_collected_when_a_device_is_named_and_some_run_here() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER), "-k", "files_of_a_version"]
    there = {**os.environ, "TEST_DEVICE": "cpu"}
    found = subprocess.run(command, capture_output=True, text=True, env=there, cwd=FOLDER.parents[1], check=False)
    assert found.returncode == 0, found.stdout
    told = re.search(r"1 passed, (\d+) deselected", found.stdout)
    assert told and int(told[1]) > 100, found.stdout


@pytest.mark.skipif(bool(os.environ.get("TEST_DEVICE")), reason="a device is named")
def test_none_are_collected_when_no_device_is_named() -> None:
    from gpu import conftest

    assert conftest.collect_ignore_glob == ["test_*.py"]
