"""The process that a shell keeps: `tinsmith serve` of one role, with settings that come on standard input.

`python -m tinsmith.cli.placed` reads one line of JSON, `settings` and perhaps a `signing_key`, and serves until
SIGTERM. When its input closes, its shell is gone: it ends at once, since another one may be starting in its place, and
what it had is taken over as from any process that was killed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from tinsmith.auth.signing import keep_secret
from tinsmith.cli.main import _serve
from tinsmith.errors import SettingsError
from tinsmith.settings import load


def main() -> None:
    given = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        settings = load(given["settings"])
        if given["signing_key"]:
            keep_secret(bytes.fromhex(given["signing_key"]), Path(settings.resolved_data_dir))
        _serve(settings, as_json=True)
    except SettingsError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
