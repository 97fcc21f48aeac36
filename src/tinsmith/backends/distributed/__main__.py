"""A rank other than 0, `python -m tinsmith.backends.distributed FD`: rank 0 starts it and holds the other end of FD.

It receives commands on that stream and exits when the stream ends or a collective fails.
"""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path
from typing import cast

import structlog

from tinsmith.backends.distributed.processes import Link, decode, exit_with
from tinsmith.backends.distributed.rank import Rank, serve
from tinsmith.backends.distributed.ranks import join_process_group
from tinsmith.errors import RanksLostError

log = structlog.get_logger()


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; rank 0 ends this process
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    exit_with(link)
    spec = cast("dict[str, object]", decode(link.receive()))
    number, world, device, threads = spec["rank"], spec["world"], spec["device"], spec["threads"]
    timeout_s, rendezvous_dir = spec["timeout_s"], spec["rendezvous_dir"]
    assert isinstance(number, int) and isinstance(world, int) and isinstance(threads, int)
    assert isinstance(device, str) and isinstance(timeout_s, float) and isinstance(rendezvous_dir, str)
    structlog.contextvars.bind_contextvars(rank=number)
    join_process_group(number, world, Path(rendezvous_dir), device=device)
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
