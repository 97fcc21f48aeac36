"""An `activate_env` that is a shell command, as Sky Batch takes it: `source .venv/bin/activate`, `conda activate x`.

The command runs once in bash, in the directory in which the pool's setup ran, before the worker's interpreter. Its
`python` and its environment variables are then those of the mapper's processes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

ACTIVATION_S = 120.0
SHELL = """
command -v conda >/dev/null && eval "$(conda shell.bash hook)"
{ eval "$1"; } >&2 || exit 1
"$(command -v python || command -v python3)" -c \\
    'import json, os, sys; print(json.dumps([sys.executable, dict(os.environ)]))'
"""
TAIL_CHARS = 1000


class ActivationError(Exception):
    """The command failed, or left no interpreter."""


def is_command(activate_env: str) -> bool:
    """Whether this is a shell command and not the directory of a virtual environment."""
    return len(activate_env.split()) > 1 and not Path(activate_env).expanduser().is_dir()


def activate(command: str, environment: Mapping[str, str] | None) -> tuple[str, dict[str, str]]:
    """Run the command; returns the interpreter and the environment that it leaves. Raises ActivationError."""
    try:
        shell = subprocess.run(
            ["bash", "-c", SHELL, "bash", command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=ACTIVATION_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ActivationError(f"activate_env {command!r} could not be run: {error}") from error
    if shell.returncode:
        raise ActivationError(
            f"activate_env {command!r} failed in {os.getcwd()} with status {shell.returncode}: "
            f"{shell.stderr.strip()[-TAIL_CHARS:]}"
        )
    python, activated = json.loads(shell.stdout)
    return python, activated
