"""A rank other than 0.

`python -m tinsmith.backends.distributed FD` is a child of rank 0, which holds the other end of FD. Without FD it is
a rank on another machine, started by `tinsmith rank`: it reads a line of JSON (`JoinSpec`) from standard input, joins
rank 0, and exits when its input closes. Either receives commands and exits when the connection ends or a collective
fails.
Exit status 2 means that the engine refused this rank.

With `measure` it is rank 0 of a group that measures its rates: it reads a line of JSON (`MeasureSpec`) and prints one,
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
from tinsmith.backends.distributed.collectives import join_process_group, open_store
from tinsmith.backends.distributed.processes import Link, exit_when_closed
from tinsmith.backends.distributed.rank import Rank, RemoteMachine, serve
from tinsmith.backends.distributed.rates import MeasureSpec
from tinsmith.backends.distributed.rendezvous import Introduction, describe_version, join, read_rank_spec
from tinsmith.errors import RanksLostError, SettingsError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class JoinSpec:
    """`machine` identifies this start of `ranks` ranks; `base_models` maps names to directories; the rank waits
    `patience_s` for an engine.
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
    spec = MeasureSpec(**json.loads(sys.stdin.readline()))
    degrees = Degrees(**spec.degrees)
    machines = read_machines(spec.options)
    group = Group(degrees.devices, device=spec.device, timeout_s=spec.timeout_s, machines=machines)
    try:
        group.call("join", degrees)
        rates = group.call("measure", spec.dtype, spec.hidden, spec.num_weights)[0]
    finally:
        group.close()
    sys.stdout.write(json.dumps(rates) + "\n")
    return 0


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends this process
    machine = None
    if len(sys.argv) > 1:
        link = Link(socket.socket(fileno=int(sys.argv[1])))
    else:
        join_spec = JoinSpec(**json.loads(sys.stdin.readline()))
        threading.Thread(target=_exit_when_input_ends, name="parent", daemon=True).start()
        machine = RemoteMachine(join_spec.base_models, Path(join_spec.scratch))
        introduction = Introduction(
            join_spec.machine,
            socket.gethostname(),
            join_spec.index,
            join_spec.ranks,
            torch.cuda.device_count(),
            describe_version(torch.__version__),
        )
        link = join(join_spec.join, bytes.fromhex(join_spec.key), introduction, join_spec.patience_s)
    rank_spec = read_rank_spec(link.receive())
    exit_when_closed(link)
    global_rank, world, device, threads = (rank_spec[key] for key in ("rank", "world", "device", "threads"))
    timeout_s, store = rank_spec["timeout_s"], rank_spec["store"]
    assert isinstance(global_rank, int) and isinstance(world, int) and isinstance(threads, int)
    assert isinstance(device, str) and isinstance(timeout_s, float) and isinstance(store, str)
    structlog.contextvars.bind_contextvars(rank=global_rank)
    join_process_group(global_rank, world, open_store(store, world), device=device)
    rank = Rank(global_rank, device=device, timeout_s=timeout_s, threads=threads, machine=machine)
    try:
        serve(rank, link)
    except EOFError:
        return 0
    except RanksLostError as error:
        log.error("the other ranks are lost", error=str(error))
        return 1
    return 0


def _exit_when_input_ends() -> None:
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
