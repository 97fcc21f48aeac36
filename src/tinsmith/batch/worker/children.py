"""A worker's children: processes in groups of their own, which can be killed at any time.

`Child` is one process with two pipes of messages (`frames.py`). `IoProcess` runs operations on a child, in the role
`io`; `mapper_process.py` runs the mapper on one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinsmith import __version__
from tinsmith.batch.worker.activation import ActivationError, activate, is_command
from tinsmith.batch.worker.frames import FrameError, Message, pack, read_frames
from tinsmith.batch.worker.logs import strip_tags
from tinsmith.batch.worker.marker import Marker, marker_file

TAIL_BYTES = 4000
MODULES = {
    "mapper": ("tinsmith.batch.worker.runtime", "tinsmith.batch.formats.lines"),
    "io": ("tinsmith.batch.worker.io_operations", "tinsmith.batch.formats.lines", "numpy"),
}
"""The imports of a spare child, by role."""
MIN_PYTHON = (3, 11)
PROBE = """
import sys
print("%d.%d" % sys.version_info[:2], end=" ", flush=True)
import tinsmith, tinsmith.batch.worker.runtime
print(tinsmith.__version__)
"""
PROBE_S = 60.0


class ChildError(Exception):
    """The child has died."""


class Child:
    """One process. `begin` gives it its role. Its output and that of its own children goes to the log."""

    def __init__(
        self,
        python: str,
        log_path: Path,
        modules: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        parent_marker: int | None = None,
        devices: str | None = None,
    ) -> None:
        """Starts the process, which imports `modules` before it waits for `begin`. Without an environment, it has that
        of this process. With the descriptor of this process's marker it shares that, and belongs to this process's
        group. `devices` are the GPUs that it sees, in place of those of this process."""
        mask = () if devices is None else ("env", f"CUDA_VISIBLE_DEVICES={devices}")
        self._leads_group = parent_marker is None
        child_reads, we_write = os.pipe()
        we_read, child_writes = os.pipe()
        try:
            with log_path.open("ab") as log, marker_file() as file:
                descriptor = file.fileno() if parent_marker is None else parent_marker
                inherited = (child_reads, child_writes, descriptor)
                self.marker = Marker(descriptor)
                self.process = subprocess.Popen(
                    [*mask, python, "-m", "tinsmith.batch.worker.child", *map(str, inherited), *modules],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=inherited,
                    start_new_session=self._leads_group,
                    env=environment,
                )  # fmt: skip
        except BaseException:
            os.close(we_write)
            os.close(we_read)
            raise
        finally:
            os.close(child_reads)
            os.close(child_writes)
        self._input = os.fdopen(we_write, "wb")
        self._output = os.fdopen(we_read, "rb")
        self._lock = threading.Lock()

    def begin(self, first: Message, log_path: Path) -> None:
        self._log_path = log_path
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        self.send({**first, "log_path": str(log_path)})

    def send(self, message: Message) -> None:
        """Send a message. A dead child is ignored here; the reader of its messages notices its death."""
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._input.write(pack(message))
            self._input.flush()

    def messages(self) -> Iterator[Message]:
        """The child's messages, to its end. A child that sends anything else is killed."""
        try:
            for message in read_frames(self._output):
                if not isinstance(message, dict):
                    raise FrameError(f"a message is a {type(message).__name__}; it must be a map")
                yield message
        except FrameError:
            self.kill()

    def end(self) -> None:
        """Close its input: a mapper's `load()` ends."""
        with self._lock, contextlib.suppress(BrokenPipeError, OSError):
            self._input.close()

    def kill(self) -> None:
        """Kill the child and, if it leads a group, all processes that it started."""
        if not self._leads_group:
            self.process.kill()
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Kill the child, wait for its end, and close its pipes. No other thread may read its messages."""
        self.end()
        self.kill()
        self.process.wait()
        self._output.close()

    def tail(self) -> str:
        """The last `TAIL_BYTES` of the child's output."""
        with self._log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - TAIL_BYTES))
            return strip_tags(log.read().decode(errors="replace"))


def start_spare(role: str, environment: Mapping[str, str] | None) -> Child:
    """A child of this interpreter that has imported what the role needs before a job is known."""
    return Child(sys.executable, Path(os.devnull), MODULES[role], environment)


def start_child(
    python: str, spare: Child | None, log_path: Path, environment: Mapping[str, str] | None = None
) -> Child:
    """Return the spare if it is alive and of this interpreter, or else start a child. Raises OSError."""
    if spare is not None:
        if python == sys.executable and spare.process.poll() is None:
            return spare
        spare.reap()
    return Child(python, log_path, environment=environment)


def interpreter(spec: Mapping[str, Any]) -> str:
    """The interpreter of a job, or of a stage by its options."""
    if spec.get("python"):
        return str(spec["python"])
    if spec.get("batch_activate_env") and not is_command(spec["batch_activate_env"]):
        return str(Path(spec["batch_activate_env"]).expanduser() / "bin" / "python")
    return sys.executable


class InterpreterError(Exception):
    """The interpreter of a job or of a stage cannot run a function."""


def prepare_interpreter(
    options: Mapping[str, Any], environment: Mapping[str, str] | None
) -> tuple[str, Mapping[str, str] | None]:
    """The interpreter of a job, or of a stage by its options, and its environment: those that a shell command in
    `batch_activate_env` leaves, if there is one. Raises InterpreterError."""
    command = options.get("batch_activate_env") or ""
    python = interpreter(options)
    if not options.get("python") and is_command(command):
        try:
            python, environment = activate(command, environment)
        except ActivationError as error:
            raise InterpreterError(str(error)) from error
    if python != sys.executable and (problem := interpreter_problem(python, environment)):
        raise InterpreterError(problem)
    return python, environment


def interpreter_problem(python: str, environment: Mapping[str, str] | None = None) -> str:
    """Why this interpreter cannot run a mapper, and the fix; empty if it can."""
    try:
        probe = subprocess.run(
            [python, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_S, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"{python} did not start within {PROBE_S:g} s"
    except OSError as error:
        return f"{python} cannot be started ({error.strerror}); it must be on the machine of the worker"
    version, _, tinsmith_version = probe.stdout.strip().partition(" ")
    if not version:
        tail = probe.stderr[-TAIL_BYTES:]
        return f"{python} is not a Python interpreter: it ended with status {probe.returncode}\n{tail}"
    if tuple(map(int, version.split("."))) < MIN_PYTHON:
        required = ".".join(map(str, MIN_PYTHON))
        return f"{python} is Python {version}; a mapper needs {required} or newer"
    if probe.returncode:
        import_error = probe.stderr.strip().rpartition("\n")[2]
        return f"{python} cannot import tinsmith ({import_error}). Install it there: {python} -m pip install tinsmith"
    if tinsmith_version != __version__:
        return (
            f"{python} has tinsmith {tinsmith_version}, and this server is {__version__}. Install the same there: "
            f"{python} -m pip install tinsmith=={__version__}"
        )
    return ""


class IoProcess:
    """The child that plans, publishes and deletes, one operation at a time; it starts with the first operation."""

    def __init__(
        self,
        spec: Message,
        job_id: int | str,
        log_path: Path,
        spare: Child | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._environment = environment
        self._first = {"role": "io", "spec": spec, "job_id": job_id}
        self._log_path = log_path
        self._spare = spare
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._closed = False

    def run(self, request: Message) -> Iterator[Message]:
        """The messages of an operation, the last with `end` or `error`. Raises ChildError."""
        with self._lock:
            if self._child is None:
                self._child = start_child(sys.executable, self._spare, self._log_path, self._environment)
                self._child.begin(self._first, self._log_path)
                self._spare = None
            child = self._child
            if self._closed:
                child.kill()
            child.send(request)
            for message in child.messages():
                yield message
                if "end" in message or "error" in message:
                    return
            self._child = None
            status = child.process.wait()
            child.reap()
            raise ChildError(f"the process of {request['op']!r} ended with status {status}\n{child.tail()}")

    def kill(self) -> None:
        """Kill the child at once, which ends an operation in progress, and start no other."""
        self._closed = True
        if (child := self._child) is not None:
            child.kill()

    def close(self) -> None:
        self.kill()
        with self._lock:  # until the operation in progress has seen the child's end
            self.reap()

    def reap(self) -> None:
        """End the child and release all that it has here. Nothing reads its messages any more."""
        for child in filter(None, (self._child, self._spare)):
            child.reap()
        self._child = self._spare = None
