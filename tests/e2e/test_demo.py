"""The demo and the README's script run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.live import LiveServer

ROOT = Path(__file__).parents[2]
SERVER_SETTINGS = {"TINSMITH_HOST": "0.0.0.0", "TINSMITH_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/no"}
"""Settings of a server in a container. A demo there must listen on loopback and must not use that database."""


def test_the_demo_teaches_and_leaves_checkpoints_and_no_process(tmp_path: Path) -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "tinsmith.cli", "demo", "--exit", "--data-dir", str(tmp_path / "data")],
        env={**os.environ, "COLUMNS": "200", **SERVER_SETTINGS},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-3000:]
    shares = re.findall(r"(\d+)% before, (\d+)% after", completed.stdout)
    assert len(shares) == 2, completed.stdout
    assert all(int(after) >= int(before) + 10 for before, after in shares), shares
    losses = [float(value) for value in re.findall(r"loss per token +([\d.]+)", completed.stdout)]
    rewards = [float(value) for value in re.findall(r"mean reward +([\d.]+)", completed.stdout)]
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    assert sum(rewards[-4:]) > 1.2 * sum(rewards[:4])
    assert len(re.findall(r"tinker://\S+/weights/demo-(?:sft|rl)", completed.stdout)) == 2
    address = re.search(r"http://127\.0\.0\.1:\d+", completed.stdout)
    assert address is not None
    leftover_pids = subprocess.run(
        ["pgrep", "-f", str(tmp_path / "data")], capture_output=True, text=True, check=False
    ).stdout
    assert leftover_pids == ""


def test_the_readme_script_runs_as_written(nano_server: LiveServer) -> None:
    readme = (ROOT / "README.md").read_text()
    script = next(block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL))
    script = script.replace("http://127.0.0.1:8000", nano_server.url)
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert completed.returncode == 0, completed.stderr
    lines = completed.stdout.splitlines()
    losses = [
        float(value) for value in re.findall(r"^step +\d+  loss per token ([\d.]+)$", completed.stdout, re.MULTILINE)
    ]
    assert len(losses) == 10 and losses[-1] < 0.1 * losses[0]
    assert (lines[0], lines[-2]) == ("before training: hello", "after training: ahoy")
    assert re.fullmatch(r"checkpoint: tinker://\S+/weights/first", lines[-1])
    # The output that the README shows.
    assert {lines[0], lines[-2]} <= set(readme.splitlines())
