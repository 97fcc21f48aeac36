"""Starts a command and ends it, with all that it started, when standard input closes: however its own parent dies.

    python attendant.py COMMAND...

An engine that is killed outright cannot end its children, and those of an inference engine hold a device. The command
runs in a session of its own; its end, in a second or with force after ten, is this process's. Imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

PATIENCE_S = 10.0


def main() -> int:
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    ended = threading.Event()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        end(child, ended)

    threading.Thread(target=watch, daemon=True).start()
    status = child.wait()
    ended.set()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # what it left behind
    return status if status >= 0 else 128 - status


def end(child: subprocess.Popen[bytes], ended: threading.Event) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    if not ended.wait(PATIENCE_S):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    time.sleep(PATIENCE_S)  # main returns first


if __name__ == "__main__":
    sys.exit(main())
