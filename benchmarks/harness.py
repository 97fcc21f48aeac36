"""Shared by benchmarks: servers, clocks, memory and processor time of processes, tables.

Knows the processes by their command lines, below the benchmark's own process; where there is no /proc, their columns
stay empty.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from tinker import types

API_KEY = os.environ.get("TINKER_API_KEY", "tml-benchmark")
ROLES = {"server": b"tinsmith.cli", "engine": b"tinsmith.engine"}
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
CPU = "_cpu_ms"
START_S = 180.0
PATIENCE_S = 300.0
"""Timeout of threads that wait for each other."""

T = TypeVar("T")
Meet = Callable[[], object]


def time_runs(
    action: Callable[[], object], runs: int, warm_up: int = 5, before: Callable[[], object] | None = None
) -> list[float]:
    """Milliseconds of each run, after a few that do not count; `before` comes before each and does not count either."""
    times = []
    for _ in range(warm_up + runs):
        if before:
            before()
        start = time.perf_counter()
        action()
        times.append(1000 * (time.perf_counter() - start))
    return times[warm_up:]


def summarize_times(times_ms: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times_ms)
    return {
        "runs": len(ordered),
        "min_ms": ordered[0],
        "p50_ms": statistics.median(ordered),
        "p95_ms": ordered[int(0.95 * (len(ordered) - 1))],
        "max_ms": ordered[-1],
    }


def run_together(count: int, action: Callable[[Meet], T]) -> tuple[list[T], float, ProcessorTime]:
    """Run `action` on `count` threads. Each calls its argument twice, when it is ready and when it is done; the seconds
    and the processor time are those between. If one fails, the others do not wait for it, and its error is raised.
    """
    barrier = threading.Barrier(count + 1)

    def run_thread(_index: int) -> T:
        try:
            return action(lambda: barrier.wait(PATIENCE_S))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        waiting = [pool.submit(run_thread, index) for index in range(count)]
        seconds, processor_time = 0.0, ProcessorTime.begin()
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait(PATIENCE_S)
            processor_time, started = ProcessorTime.begin(), time.perf_counter()
            barrier.wait(PATIENCE_S)
            seconds = time.perf_counter() - started
            processor_time.end()
    for error in [future.exception() for future in waiting]:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in waiting], seconds, processor_time


def build_datum(tokens: np.ndarray) -> types.Datum:
    """[T + 1] token ids as T of `cross_entropy`, each with the weight 1."""
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={name: types.TensorData.from_numpy(values) for name, values in inputs.items()},
    )


def random_datum(length: int, seed: int = 0) -> types.Datum:
    return build_datum(np.random.default_rng(seed).integers(0, 400, length + 1))


def describe_machine() -> str:
    """Return one line about the machine and its load."""
    model = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {os.cpu_count()} hardware threads, load {os.getloadavg()[0]:.1f}"


def write_json(path: Path | None, figures: object) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")


# A server.


class RunningServer(NamedTuple):
    url: str
    started: float
    pid: int


@contextlib.contextmanager
def start_server(
    model: str | None, *arguments: str, settings: Mapping[str, str] | None = None, python: str = sys.executable
) -> Iterator[RunningServer]:
    """`tinsmith serve`, of the environment of `python`, until the end of the block: its URL, the moment it was started,
    its process.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
        command = [python, "-m", "tinsmith.cli", "serve", "--port", str(port), "--data-dir", directory]
        log_path = Path(directory) / "server.log"
        started = time.perf_counter()
        with log_path.open("wb") as log:
            server_command = [*command, *(["--model", model] if model else []), *arguments]
            environment = {**os.environ, **{f"TINSMITH_{name}": value for name, value in (settings or {}).items()}}
            environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled
            process = subprocess.Popen(server_command, stdout=log, stderr=log, env=environment)
        try:
            wait_for(port, process, log_path)
            yield RunningServer(f"http://127.0.0.1:{port}", started, process.pid)
        finally:
            process.terminate()
            process.wait()


def wait_for(port: int, process: subprocess.Popen[bytes], log_path: Path | None = None) -> None:
    """Until the port can be connected to; ends the benchmark if the process does, and shows its log."""
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    process.kill()
    log = log_path.read_text()[-2000:] if log_path else ""
    raise SystemExit(f"the server did not start\n{log}")


# Its processes.


def processes(below: int = 0) -> dict[str, list[int]]:
    """The pids of this process or another and of those below it, by what they are: `server`, `engine`."""
    pids_by_role: dict[str, list[int]] = {role: [] for role in ROLES}
    waiting = [below or os.getpid()]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            for role, word in ROLES.items():
                if word in words:
                    pids_by_role[role].append(pid)
    return pids_by_role


def peak_mib() -> dict[str, float]:
    """The most memory that the processes of each kind had resident, in MiB."""
    return {role: sum(map(process_peak_mib, pids)) for role, pids in processes().items() if pids}


def reset_peak(pid: int) -> None:
    """Where the kernel lets us; elsewhere the peak is the process's so far."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def process_peak_mib(pid: int) -> float:
    """The most memory that a process had resident, in MiB, since `forget_peak`; 0 where there is no /proc."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0


@dataclass(slots=True)
class ProcessorTime:
    """Processor time from its beginning to its end, of this process (`client`) and of those below it."""

    _before: Mapping[str, float]
    _after: Mapping[str, float]

    @classmethod
    def begin(cls) -> ProcessorTime:
        return cls(_processor_ms(), {})

    def end(self) -> None:
        self._after = _processor_ms()

    def per_call(self, count: int) -> dict[str, float]:
        """Milliseconds of one of so many calls, by process."""
        return {f"{role}{CPU}": (ms - self._before.get(role, 0.0)) / count for role, ms in self._after.items()}


def _processor_ms() -> dict[str, float]:
    ms_by_role = {"client": 1000 * time.process_time()}
    for role, pids in processes().items():
        if pids:
            ms_by_role[role] = sum(map(_process_ms, pids))
    return ms_by_role


def processor_seconds(pid: int) -> float:
    """The processor time of a process so far."""
    return _process_ms(pid) / 1000


def _process_ms(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 1000 * (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return 0.0
