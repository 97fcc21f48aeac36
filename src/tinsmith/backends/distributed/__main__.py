"""A rank other than 0.

`python -m tinsmith.backends.distributed FD` is a child of rank 0, which holds the other end of FD. Without FD it is
a rank on another machine, started by `tinsmith rank`: it reads a line of JSON (`JoinSpec`) from standard input, joins
rank 0, and exits when its input closes. Both receive commands and exit when the connection ends or a collective fails.
Exit status 2 means that the engine refused this rank.

With `measure` it is rank 0 of a group that is only measured: it reads a line of JSON (`MeasureSpec`) and prints one,
for `plan.speed.Rates.read`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from tinsmith.backends.distributed import Degrees, Group, read_machines
from tinsmith.backends.distributed.joining import Introduction, join, told, version
from tinsmith.backends.distributed.measuring import MeasureSpec
from tinsmith.backends.distributed.processes import Link, exit_with
from tinsmith.backends.distributed.rank import OtherMachine, Rank, serve
from tinsmith.backends.distributed.ranks import join_process_group, open_store
from tinsmith.errors import RanksLostError, SettingsError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class JoinSpec:
    """`machine` names this start of `ranks` ranks; `base_models` are directories by name; `patience_s` is how long an
    engine is awaited.
    """

    join: str
    key: str
    machine: str
    index: int
    ranks: int
    scratch: str
    base_models: dict[str, str]
    patience_s: float


def print_rates() -> int:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    given = MeasureSpec(**json.loads(sys.stdin.readline()))
    degrees = Degrees(**given.degrees)
    machines = read_machines(given.options)
    group = Group(degrees.devices, device=given.device, timeout_s=given.timeout_s, machines=machines)
    try:
        group.call("join", degrees)
        found = group.call("measure", given.dtype, given.hidden, given.num_weights)[0]
    finally:
        group.close()
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends this process
    here = None
    if len(sys.argv) > 1:
        link = Link(socket.socket(fileno=int(sys.argv[1])))
    else:
        given = JoinSpec(**json.loads(sys.stdin.readline()))
        threading.Thread(target=_exit_with_input, name="parent", daemon=True).start()
        here = OtherMachine(given.base_models, Path(given.scratch))
        own = Introduction(
            given.machine,
            socket.gethostname(),
            given.index,
            given.ranks,
            torch.cuda.device_count(),
            version(torch.__version__),
        )
        link = join(given.join, bytes.fromhex(given.key), own, given.patience_s)
    spec = told(link.receive())
    exit_with(link)
    number, world, device, threads = spec["rank"], spec["world"], spec["device"], spec["threads"]
    timeout_s, store = spec["timeout_s"], spec["store"]
    assert isinstance(number, int) and isinstance(world, int) and isinstance(threads, int)
    assert isinstance(device, str) and isinstance(timeout_s, float) and isinstance(store, str)
    structlog.contextvars.bind_contextvars(rank=number)
    join_process_group(number, world, open_store(store, world), device=device)
    rank = Rank(number, device=device, timeout_s=timeout_s, threads=threads, here=here)
    try:
        serve(rank, link)
    except EOFError:
        return 0
    except RanksLostError as error:
        log.error("the other ranks are lost", error=str(error))
        return 1
    return 0


def _exit_with_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def _run() -> int:
    try:
        return print_rates() if sys.argv[1:] == ["measure"] else main()
    except SettingsError as error:
        log.error("these ranks cannot run", error=str(error))
        return 2
    except (TimeoutError, EOFError) as error:
        log.warning("no engine has taken this rank", error=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(_run())
