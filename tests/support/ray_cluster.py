"""A Ray cluster with several nodes on this machine, which is removed completely afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tinsmith.settings.environment import prepare_ray, ray_root

STORE_BYTES = 80_000_000
# A node is considered dead after two seconds of silence instead of fifteen; a slow machine may be silent for one.
CONFIG = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 4}


@dataclass
class Nodes:
    """`cluster` is Ray's own; its head node has no resources."""

    cluster: Any
    directory: Path

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, cpus: int = 8, **resources: float) -> Any:  # noqa: ANN401
        return self.cluster.add_node(num_cpus=cpus, resources=resources or None, object_store_memory=STORE_BYTES)

    def lose(self, node: Any) -> None:  # noqa: ANN401
        """Kill a node without notice, as if its machine lost power."""
        self.cluster.remove_node(node, allow_graceful=False)

    def logs(self) -> str:
        """All that Ray has written."""
        files = [path for path in self.directory.rglob("*") if path.is_file() and "logs" in path.parts]
        return "".join(path.read_text(errors="replace") for path in files)


@contextlib.contextmanager
def ray_nodes(*cpus: int) -> Iterator[Nodes]:
    prepare_ray()
    monkeypatched = pytest.MonkeyPatch()
    monkeypatched.setenv("RAY_AUTH_MODE", "disabled")  # regardless of the user's token
    import ray
    from ray.cluster_utils import Cluster

    # It contains sockets, whose paths are limited to about a hundred characters.
    directory = Path(tempfile.mkdtemp(prefix="r-", dir=ray_root()))
    # Ray writes a cluster's address into its default directory, which does not exist before Ray's first run.
    monkeypatched.setenv("RAY_TMPDIR", str(directory))
    (directory / "ray").mkdir()
    head = {
        "num_cpus": 0,
        "include_dashboard": False,
        "object_store_memory": STORE_BYTES,
        "temp_dir": str(directory),
        "_system_config": CONFIG,
    }
    cluster = Cluster(initialize_head=True, connect=False, head_node_args=head)
    try:
        nodes = Nodes(cluster, directory)
        for num_cpus in cpus:
            nodes.add(num_cpus)
        yield nodes
    finally:
        ray.shutdown()
        cluster.shutdown()
        monkeypatched.undo()
        leftover_pids = _find_processes(directory)
        for pid in leftover_pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)
    assert not leftover_pids, "processes of the cluster outlived it"


def _find_processes(directory: Path, patience_s: float = 10.0) -> list[int]:
    """The processes whose command lines contain the cluster's directory, after time to end."""
    deadline = time.monotonic() + patience_s
    while (pids := [pid for pid in _pids() if str(directory) in _command(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return pids


def _pids() -> list[int]:
    return [
        int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal() and int(path.name) != os.getpid()
    ]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
