"""A rank other than 0: `python -m tinsmith.backends.distributed FD`, started by rank 0, which has the other end of FD.

Its commands come on that stream, and it ends with it. A failed collective ends it, too: rank 0 notices.
"""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path
from typing import cast

import structlog

from tinsmith.backends.distributed.processes import Link, decode, end_with
from tinsmith.backends.distributed.rank import Rank, serve
from tinsmith.backends.distributed.ranks import meet
from tinsmith.errors import RanksLostError

log = structlog.get_logger()


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 gets it and ends this process
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    end_with(link)
    spec = cast("dict[str, object]", decode(link.receive()))
    number, world, device, threads = spec["rank"], spec["world"], spec["device"], spec["threads"]
    timeout_s, meeting = spec["timeout_s"], spec["meeting"]
    assert isinstance(number, int) and isinstance(world, int) and isinstance(threads, int)
    assert isinstance(device, str) and isinstance(timeout_s, float) and isinstance(meeting, str)
    structlog.contextvars.bind_contextvars(rank=number)
    meet(number, world, Path(meeting), device=device)
    rank = Rank(number, device=device, timeout_s=timeout_s, threads=threads)
    try:
        serve(rank, link)
    except EOFError:
        return 0
    except RanksLostError as error:
        log.error("the other ranks are lost", error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
