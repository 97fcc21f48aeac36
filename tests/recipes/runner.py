"""Runs one command of the cookbook as a user would, and keeps its output."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.live import API_KEY, LiveServer

TIMEOUT_S = 1200
# Where recipes without a `log_path` argument write, below the working directory.
RUNS = "runs"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command printed, and the directory that it logged to (which may not exist)."""

    server: LiveServer
    output: str
    log_path: Path

    def at(self, directory: str) -> Outcome:
        """The outcome with another log directory; a glob pattern if its name has a date."""
        (directory_path,) = (
            self.log_path.parent.glob(directory) if "*" in directory else [self.log_path.parent / directory]
        )
        return Outcome(self.server, self.output, directory_path)

    def metric_values(self, key: str) -> list[float]:
        """The values of a metric, step by step; none may be infinite or missing its number."""
        lines = [json.loads(line) for line in (self.log_path / "metrics.jsonl").read_text().splitlines()]
        values = [float(line[key]) for line in lines if key in line]
        assert values, f"{key} was never logged; there are {sorted({name for line in lines for name in line})}"
        assert all(math.isfinite(value) for value in values), f"{key}: {values}"
        return values

    def checkpoints(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in (self.log_path / "checkpoints.jsonl").read_text().splitlines()]


def run(server: LiveServer, workplace: Path, command: tuple[str, ...], log: str, standard_input: str = "") -> Outcome:
    """`python` with these arguments, in the workplace; fails unless the exit status is 0."""
    environment = {
        **os.environ,
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": API_KEY,
        # Telemetry stays on: the server must accept it.
        "TINKER_TELEMETRY": "1",
        "TINKER_COOKBOOK_RUNS_DIR": str(workplace / RUNS),
        "HF_HOME": str(workplace / "hugging_face"),
    }
    completed = subprocess.run(
        [sys.executable, *command],
        cwd=workplace,
        env=environment,
        input=standard_input,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout[-6000:]
    return Outcome(server, completed.stdout, workplace / log)
