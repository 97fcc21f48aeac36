"""Interleaves the runs of several programs on the same work, so that other load affects all of them equally.

Each runs in a process of its own (`Child`), which answers one line of JSON for each that it is sent and is stopped
while it is not its turn, so that threads that spin take nothing from others; or is a server that this process talks
to. Rates are medians; ratios are medians of the ratios of runs that followed each other, which is steadier than the
ratio of two medians. One that fails is named, leaves the contest, and stops nobody else.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

WARM_UPS = 2
LONG_S = 2.0
"""A run that takes longer has one warm-up, others have WARM_UPS."""

Run = Callable[[], float]
"""One run: its seconds."""
Row = dict[str, Any]


_ANSWER = "answer: "
"""The prefix of a child's answers, since libraries print, too."""


_END_WITH_PARENT = 1
"""Linux's PR_SET_PDEATHSIG."""


class ChildFailed(Exception):
    """A program's process ended, or took too long."""


class Child:
    """A script of this directory in another Python or another environment, as long as the `with` block takes. Raises
    ChildFailed.
    """

    def __init__(
        self,
        script: str,
        *arguments: str,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        patience_s: float = 900.0,
    ) -> None:
        command = [python, str(Path(__file__).with_name(script)), *arguments]
        # A session of its own: engines have children, which end with it.
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ChildFailed(f"{python} cannot be run: {error.strerror}") from None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._patience_s = patience_s
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **question: object) -> Row:
        """Send a request and return the answer. Raises ChildFailed."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise ChildFailed("it has ended") from None
        try:
            line = self._lines.get(timeout=self._patience_s)
        except queue.Empty:
            raise ChildFailed(f"no answer in {self._patience_s:.0f} s") from None
        if not line:
            raise ChildFailed(f"it ended with {self._process.wait()}")
        self._signal(signal.SIGSTOP)
        return json.loads(line)

    def _signal(self, signal_number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal_number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                self._lines.put(line.removeprefix(_ANSWER))
        self._lines.put("")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def exit_on_sigterm() -> None:
    """SIGTERM leaves every `with` block, so that no child stays behind, stopped."""
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(143))


def serve_requests() -> Iterator[tuple[Row, Callable[[Row], None]]]:
    """Serve requests in a child; `print` writes to standard error meanwhile."""
    answers, sys.stdout = sys.stdout, sys.stderr
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)  # one that is stopped sees no end of its input

    def answer(row: Row) -> None:
        answers.write(f"\n{_ANSWER}{json.dumps(row)}\n")
        answers.flush()

    for line in sys.stdin:
        yield json.loads(line), answer


def run_in_turns(runs: Mapping[str, Run], count: int, on_failure: Callable[[str, str], None]) -> dict[str, list[float]]:
    """Seconds of `count` runs of each by its name, after some that do not count. `on_failure` is called with the name
    and the reason of one that fails.
    """
    contestants = dict(runs)
    seconds_by_name: dict[str, list[float]] = {name: [] for name in runs}
    long_running: set[str] = set()
    for turn in range(-WARM_UPS, count):
        for name, run in list(contestants.items()):
            if turn == 1 - WARM_UPS and name in long_running:
                continue
            try:
                seconds = run()
            except ChildFailed as error:
                on_failure(name, str(error))
                del contestants[name], seconds_by_name[name]
                continue
            if seconds > LONG_S:
                long_running.add(name)
            if turn >= 0:
                seconds_by_name[name].append(seconds)
    return seconds_by_name


def summarize_spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "runs": len(values)}


def compute_speedup(our_seconds: Sequence[float], their_seconds: Sequence[float]) -> dict[str, float]:
    """The ratios of their seconds to ours, of runs that followed each other."""
    return summarize_spread([theirs / ours for ours, theirs in zip(our_seconds, their_seconds, strict=True)])


def format_spread(figures: Mapping[str, float], form: str = ",.0f") -> str:
    """A median with its least and greatest value, as text."""
    return f"{figures['median']:{form}} ({figures['least']:{form}}-{figures['most']:{form}})"
