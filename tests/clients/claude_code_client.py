"""Claude Code, unmodified and without a terminal, against a server: it starts, sends its tools, and reads a stream."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from checks import AGENT, KEY, NPM, URL, check

WAIT_S = 300

with tempfile.TemporaryDirectory() as home, check("a prompt is answered"):
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": home,
        "ANTHROPIC_BASE_URL": URL,
        "ANTHROPIC_API_KEY": KEY,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    command = [str(Path(NPM) / "claude"), "-p", "hi", "--model", AGENT, "--output-format", "json"]
    completed = subprocess.run(
        command, cwd=home, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_S,
        check=False,
    )  # fmt: skip
    report = json.loads(completed.stdout)
    assert completed.returncode == 0 and report["is_error"] is False, (
        completed.stdout[-2000:] + completed.stderr[-2000:]
    )
    assert report["usage"]["input_tokens"] + report["usage"]["cache_read_input_tokens"] > 1000
