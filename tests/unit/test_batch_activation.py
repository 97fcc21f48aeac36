"""Shell commands that activate the environment of a job's processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tinsmith.batch.worker.activation import ActivationError, activate, is_command
from tinsmith.batch.worker.children import interpreter


def test_a_command_leaves_its_interpreter_and_its_variables(tmp_path: Path) -> None:
    venv = tmp_path / "with space"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    command = f"echo noise; source '{venv}/bin/activate' && export ANSWER=42"
    python, variables = activate(command, {"PATH": os.environ["PATH"]})
    assert Path(python).parent == venv / "bin"
    assert variables["VIRTUAL_ENV"] == str(venv) and variables["ANSWER"] == "42"


def test_conda_is_hooked_before_the_command(tmp_path: Path) -> None:
    """As an interactive shell has it, so that `conda activate` works."""
    conda = tmp_path / "conda"
    conda.write_text("#!/bin/sh\necho 'conda() { export CONDA_DEFAULT_ENV=$2; }'\n")
    conda.chmod(0o755)
    _, variables = activate("conda activate mine", {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert variables["CONDA_DEFAULT_ENV"] == "mine"


@pytest.mark.parametrize(("command", "words"), [("source nowhere/bin/activate", "nowhere"), ("exit 7", "status 7")])
def test_a_command_that_fails_says_why(command: str, words: str) -> None:
    with pytest.raises(ActivationError, match=words):
        activate(command, None)


def test_a_directory_is_not_a_command(tmp_path: Path) -> None:
    directory = tmp_path / "with space"
    directory.mkdir()
    assert not is_command(str(directory)) and not is_command("~/venv") and is_command("conda activate x")
    assert interpreter({"batch_activate_env": str(directory)}) == str(directory / "bin" / "python")
    assert interpreter({"batch_activate_env": "conda activate x"}) == sys.executable, "until it is activated"
