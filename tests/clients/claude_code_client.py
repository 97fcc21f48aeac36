"""Claude Code, unmodified and without a terminal, against a server: it starts, sends its tools, and reads a stream."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from checks import AGENT, KEY, NANO_LONG, NPM, URL, check

WAIT_S = 300

for model in (AGENT, NANO_LONG):
    with tempfile.TemporaryDirectory() as home, check(f"{model} answers"):
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": home,
            "ANTHROPIC_BASE_URL": URL,
            "ANTHROPIC_API_KEY": KEY,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        command = [str(Path(NPM) / "claude"), "-p", "hi", "--model", model, "--output-format", "json"]
        completed = subprocess.run(
            command, cwd=home, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            timeout=WAIT_S,
        )  # fmt: skip
        report = json.loads(completed.stdout)
        assert completed.returncode == 0 and report["is_error"] is False, (
            completed.stdout[-2000:] + completed.stderr[-2000:]
        )
        assert report["usage"]["input_tokens"] + report["usage"]["cache_read_input_tokens"] > 1000
