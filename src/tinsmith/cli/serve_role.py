"""The process of one role on a Ray cluster: `tinsmith serve` with settings from standard input.

`python -m tinsmith.cli.serve_role` reads one line of JSON with `settings` and an optional `signing_key`, and serves
until SIGTERM. With `join`, it runs this node's ranks of the engine at that address instead, until they end. If its
input closes, its parent has ended. The process then exits at once, since a replacement may be starting, and other
processes take over its work as after any crash.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from tinsmith.auth.signing import keep_secret
from tinsmith.cli.main import serve_until_signal
from tinsmith.cli.rank import run_ranks
from tinsmith.errors import SettingsError
from tinsmith.settings import Settings, load


def main() -> None:
    spec = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        settings = load(spec["settings"])
        if spec["signing_key"]:
            keep_secret(bytes.fromhex(spec["signing_key"]), Path(settings.resolved_data_dir))
        if join := spec.get("join"):
            sys.exit(_run_ranks(settings, join))
        serve_until_signal(settings, as_json=True)
    except SettingsError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


def _run_ranks(settings: Settings, join: str) -> int:
    """Never returns 2, with which a shell would not start again: the next engine may take these ranks."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda _signal, _frame: stopping.set())
    ranks = settings.num_ranks // settings.machines if settings.num_ranks > 1 else None  # None: one for each GPU
    return min(1, run_ranks(settings, join, ranks, stopping, once=True))


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
