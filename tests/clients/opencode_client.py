"""opencode, unmodified and without a terminal, against a server: it starts, sends its tools, and reads a stream."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from checks import AGENT, KEY, NANO_LONG, NPM, URL, check

WAIT_S = 300
OPTIONS = {"baseURL": f"{URL}/v1", "apiKey": KEY}
LIMIT = {"context": 131_072, "output": 64}

for model in (AGENT, NANO_LONG):
    with tempfile.TemporaryDirectory() as home, check(f"{model} answers"):
        provider = {"npm": "@ai-sdk/openai-compatible", "options": OPTIONS, "models": {model: {"limit": LIMIT}}}
        config = {"provider": {"tinsmith": provider}, "autoupdate": False, "share": "disabled"}
        (Path(home) / "opencode.json").write_text(json.dumps(config))
        command = [str(Path(NPM) / "opencode"), "run", "hi", "--model", f"tinsmith/{model}", "--format", "json"]
        completed = subprocess.run(
            command, cwd=home, env={"PATH": os.environ["PATH"], "HOME": home}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=WAIT_S, check=False,
        )  # fmt: skip
        events = [json.loads(line) for line in completed.stdout.splitlines() if line.startswith("{")]
        finished = [event for event in events if event["type"] == "step_finish"]
        assert completed.returncode == 0 and finished, completed.stdout[-2000:] + completed.stderr[-2000:]
        assert finished[0]["part"]["tokens"]["input"] > 1000
