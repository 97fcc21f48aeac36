"""Codex, unmodified and without a terminal, against a server: it starts, sends its tools, and reads a stream."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from checks import AGENT, KEY, NPM, URL, check

WAIT_S = 300
CONFIG = f"""model = "{AGENT}"
model_provider = "tinsmith"
[model_providers.tinsmith]
name = "tinsmith"
base_url = "{URL}/v1"
env_key = "TINSMITH_KEY"
wire_api = "responses"
"""

with tempfile.TemporaryDirectory() as home, check("a prompt is answered"):
    (Path(home) / "config.toml").write_text(CONFIG)
    environment = {"PATH": os.environ["PATH"], "HOME": home, "CODEX_HOME": home, "TINSMITH_KEY": KEY}
    command = [str(Path(NPM) / "codex"), "exec", "--skip-git-repo-check", "--json", "hi"]
    completed = subprocess.run(
        command, cwd=home, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_S,
        check=False,
    )  # fmt: skip
    events = [json.loads(line) for line in completed.stdout.splitlines() if line.startswith("{")]
    completed_turns = [event for event in events if event["type"] == "turn.completed"]
    assert completed.returncode == 0 and completed_turns, completed.stdout[-2000:] + completed.stderr[-2000:]
    assert completed_turns[0]["usage"]["input_tokens"] > 1000
