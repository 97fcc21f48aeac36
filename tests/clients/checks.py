"""Shared by the scripts of clients: the server, a few requests, and counted, named checks. Imports only the standard
library, because it runs in a client's environment. The last line of a script's output is a JSON object: `passed`, a
number, and `failed`, the names of the checks that failed.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

URL, KEY, NANO, TOOLS = (os.environ[name] for name in ("SERVER_URL", "SERVER_KEY", "SERVER_NANO", "SERVER_TOOLS"))
AGENT = os.environ.get("SERVER_AGENT", "")
"""A model whose context takes an agent's prompt."""

NANO_LONG = "tinsmith/nano-long"
"""The embedded model with such a context."""

FAMILIES = os.environ.get("SERVER_FAMILIES", "").split()
"""Models with the chat templates of Qwen3.5, Llama 3, gpt-oss and DeepSeek; their weights are random."""

NPM = os.environ.get("NPM_BIN", "")
"""The directory of the commands of a client from npm."""

SAY = [{"role": "user", "content": "Say hello."}]
CITY = {"city": {"enum": ["Rome", "Oslo"]}}
WEATHER = {"type": "object", "properties": CITY, "required": ["city"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}}

_passed: list[str] = []
_failed: list[str] = []


@contextmanager
def check(name: str) -> Iterator[None]:
    """Check one behaviour of a client. An error is printed, and the script continues."""
    try:
        yield
    except Exception:  # noqa: BLE001  whatever a client raises, the others are still checked
        traceback.print_exc()
        _failed.append(name)
    else:
        _passed.append(name)


@atexit.register
def _report() -> None:
    sys.stderr.flush()
    sys.stdout.write(json.dumps({"passed": len(_passed), "failed": _failed}) + "\n")
    sys.stdout.flush()
