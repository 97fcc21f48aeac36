"""The Ray actor that starts one worker on its node and ends it. No data of a job passes through it.

The worker listens on the node's address and accepts only its coordinator's token. It ends when its standard input
closes, which happens when this process ends.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tinsmith.settings.environment import worker_environment

START_S = 60.0
"""How long a worker's service may take to listen; its mapper starts later."""
END_S = 2.0
"""How long a worker may take to end its children and itself."""
TAIL = 2000


PREFIX = "tinsmith-worker-ray-"


def host_name(address: str, node_id: str) -> str:
    """A node's name for users: its address, and the beginning of Ray's id, since one machine may be several nodes."""
    return f"{address} (node {node_id[:12]})"


def sweep() -> None:
    """Delete the directories on this node whose process is gone, killed together with its worker."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = directory.name.removeprefix(PREFIX).partition("-")[0]
        if not (owner.isdigit() and Path(f"/proc/{owner}").exists()):
            shutil.rmtree(directory, ignore_errors=True)


class WorkerHost:
    def __init__(self, token: str, setup: str) -> None:
        self._token = token
        self._setup = setup
        if Path("/proc/self").exists():
            sweep()
        self._directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> dict[str, str]:
        """Start the worker; returns its address and host, or else its host and, as `failed`, why it did not start."""
        import ray

        context = ray.get_runtime_context()
        host = host_name(ray.util.get_node_ip_address(), context.get_node_id())
        try:
            return {**self._start(), "host": host}
        except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
            self.end()
            shutil.rmtree(self._directory, ignore_errors=True)
            return {"host": host, "failed": str(error)}
        except BaseException:
            self.end()
            shutil.rmtree(self._directory, ignore_errors=True)
            raise

    def _start(self) -> dict[str, str]:
        import ray

        environment = worker_environment()
        if self._setup:
            self._prepare(environment)
        log_path = self._directory / "log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tinsmith.batch.worker.worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, start_new_session=True,
            )  # fmt: skip
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        node = ray.util.get_node_ip_address()
        first = {"token": self._token, "host": node, "log_path": str(log_path), "directory": str(self._directory)}
        process.stdin.write(json.dumps(first).encode() + b"\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], START_S)
        line = process.stdout.readline() if ready else b""
        if not line:
            said = log_path.read_text(errors="replace")[-TAIL:]
            raise RuntimeError(f"a worker did not start to listen: {said}")
        return {"address": json.loads(line)["address"], "where": f"{node}:{process.pid}"}

    def wait(self) -> int:
        """Wait until the worker has ended, and delete its files."""
        assert self._process is not None
        status = self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)
        return status

    def end(self) -> None:
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()  # the worker kills its children, then itself
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _prepare(self, environment: dict[str, str]) -> None:
        """Run the pool's setup command before each worker, since the node may be new."""
        command = ["/bin/sh", "-c", self._setup]
        process = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if process.returncode:
            raise RuntimeError(f"the pool's setup failed: {process.stdout.decode(errors='replace')[-TAIL:]}")
