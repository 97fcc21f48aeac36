"""Codex, unmodified and without a terminal, against a server: it starts, sends its tools, and reads a stream."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from checks import AGENT, KEY, NANO_LONG, NPM, URL, check

WAIT_S = 300
CONFIG = f"""model = "MODEL"
model_provider = "tinsmith"
[model_providers.tinsmith]
name = "tinsmith"
base_url = "{URL}/v1"
env_key = "TINSMITH_KEY"
wire_api = "responses"
"""

for model in (AGENT, NANO_LONG):
    with tempfile.TemporaryDirectory() as home, check(f"{model} answers"):
        (Path(home) / "config.toml").write_text(CONFIG.replace("MODEL", model))
        environment = {"PATH": os.environ["PATH"], "HOME": home, "CODEX_HOME": home, "TINSMITH_KEY": KEY}
        command = [str(Path(NPM) / "codex"), "exec", "--skip-git-repo-check", "--json", "hi"]
        completed = subprocess.run(
            command, cwd=home, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            timeout=WAIT_S,
        )  # fmt: skip
        events = [json.loads(line) for line in completed.stdout.splitlines() if line.startswith("{")]
        completed_turns = [event for event in events if event["type"] == "turn.completed"]
        assert completed.returncode == 0 and completed_turns, completed.stdout[-2000:] + completed.stderr[-2000:]
        assert completed_turns[0]["usage"]["input_tokens"] > 1000
