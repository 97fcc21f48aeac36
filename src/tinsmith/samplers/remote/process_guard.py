"""Runs a command, and ends it with all its children when standard input closes, which any end of the parent causes.

    python process_guard.py COMMAND...

A killed process cannot end its children, and the children of an inference engine hold a device. The command runs in a
new session. It gets SIGTERM, and SIGKILL after ten seconds; this process then exits with its status. Imports only the
standard library, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

KILL_DELAY_S = 10.0


def main() -> int:
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    exit_event = threading.Event()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        terminate(child, exit_event)

    threading.Thread(target=watch, daemon=True).start()
    status = child.wait()
    exit_event.set()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # children that it left
    return status if status >= 0 else 128 - status


def terminate(child: subprocess.Popen[bytes], exit_event: threading.Event) -> None:
    """Send SIGTERM to the child's session, and SIGKILL if it has not exited after KILL_DELAY_S."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    if not exit_event.wait(KILL_DELAY_S):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    time.sleep(KILL_DELAY_S)  # main returns before this


if __name__ == "__main__":
    sys.exit(main())
