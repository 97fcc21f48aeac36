"""The process of one role on a Ray cluster: `tinsmith serve` with settings from standard input.

`python -m tinsmith.cli.serve_role` reads one line of JSON with `settings` and an optional `signing_key`, and serves
until SIGTERM. If its input closes, its parent has ended. The process then exits at once, since a replacement may be
starting, and other processes take over its work as after any crash.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from tinsmith.auth.signing import keep_secret
from tinsmith.cli.main import serve_until_signal
from tinsmith.errors import SettingsError
from tinsmith.settings import load


def main() -> None:
    given = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        settings = load(given["settings"])
        if given["signing_key"]:
            keep_secret(bytes.fromhex(given["signing_key"]), Path(settings.resolved_data_dir))
        serve_until_signal(settings, as_json=True)
    except SettingsError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
