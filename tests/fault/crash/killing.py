"""SIGKILL at random moments to processes of a server's tree: finding, choosing and counting them."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

MODULES = {
    "tinsmith.cli": "server",
    "tinsmith.engine": "engine",
    "tinsmith.batch.worker.child": "mapper",
}
"""The command lines of each kind of process."""
ALL = "everything"
"""An additional victim: all processes at once, as when a machine is lost."""
AT_ONCE = 0.25
"""Share of the pauses that do not wait for the server."""
PR_SET_CHILD_SUBREAPER = 36

Processes = dict[int, str]
"""Kinds by pid."""


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Make this process the subreaper of its descendants, so that orphans stay its children."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def processes_below(root: int) -> Processes:
    """Return all living descendants of a process that belong to Tinsmith."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(path.parent.name))
    kinds_by_pid: Processes = {}
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            waiting.append(pid)
            if kind := _kind_of(pid):
                kinds_by_pid[pid] = kind
    return kinds_by_pid


def _kind_of(pid: int) -> str | None:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has ended meanwhile
        return None
    return next((MODULES[word] for word in words if word in MODULES), None)


def find_survivors(root: int, patience_s: float) -> Processes:
    """Return the processes that are still alive after the time allowed for ending."""
    deadline = time.monotonic() + patience_s
    while (survivors := processes_below(root)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return survivors


class Killer:
    """Kills the processes that `choose` returns, for `for_s` or until it is stopped; `kills` counts them by kind.

    `pauses_s` are the shortest and the longest time between two kills. About every fourth pause begins at once, so that
    servers are killed while they start; the others begin when the server is `ready`, so that slow machines make
    progress. `say` receives a line about each kill.
    """

    def __init__(
        self,
        processes: Callable[[], Processes],
        choose: Callable[[Processes, random.Random], tuple[str, list[int]]],
        seed: int,
        pauses_s: tuple[float, float],
        say: Callable[[str], object] = lambda _text: None,
        ready: Callable[[], bool] = lambda: True,
        for_s: float = math.inf,
    ) -> None:
        self.kills: Counter[str] = Counter()
        self._processes, self._choose, self._say, self._ready = processes, choose, say, ready
        self._pauses_s = pauses_s
        self._random = random.Random(seed)
        self._started = time.monotonic()
        self._until = self._started + for_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while self._pause() and time.monotonic() < self._until:
            kind, victims = self._choose(self._processes(), self._random)
            killed = [pid for pid in victims if _kill(pid)]
            if killed:
                self.kills[kind] += 1
                self._say(f"{time.monotonic() - self._started:6.1f} s: killed {kind} {killed}")

    def _pause(self) -> bool:
        """Wait; return whether to continue."""
        waits, pause_s = self._random.random() >= AT_ONCE, self._random.uniform(*self._pauses_s)
        while waits and not self._ready() and not self._stopping.wait(0.2):
            pass
        return not self._stopping.wait(pause_s)


def any_kind(processes: Mapping[int, str], choice: random.Random) -> tuple[str, list[int]]:
    """Choose a running process, with equal odds for each kind, or all processes with the odds of one kind."""
    kinds = sorted(set(processes.values()))
    if not kinds:
        return ALL, []
    kind = choice.choice([*kinds, ALL])
    if kind == ALL:
        return ALL, list(processes)
    return kind, [choice.choice(sorted(pid for pid, process_kind in processes.items() if process_kind == kind))]


def server_or_engine(processes: Mapping[int, str], choice: random.Random) -> tuple[str, list[int]]:
    """The server, its engines, or both."""
    victim = choice.choice(("server", "engine", "both"))
    kinds = ("engine", "server") if victim == "both" else (victim,)
    return victim, [pid for kind in kinds for pid, process_kind in processes.items() if process_kind == kind]


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
