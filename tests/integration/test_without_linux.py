"""What only Linux has is never needed: many clients' machines are Macs, and they serve small models, too."""

from __future__ import annotations

import ast
import os
import sys
import tempfile
from pathlib import Path

import pytest
import tinker
from tinker import types

from support import without_linux
from support.live import API_KEY, serving
from tinsmith.batch.worker import logs
from tinsmith.db import wakeups
from tinsmith.settings import environment

SOURCE = Path(__file__).parents[2] / "src" / "tinsmith"
SUPPORT = Path(without_linux.__file__).parents[1]

GUARDED = {
    "runtime/host_memory.py": "/proc/meminfo and /sys/fs/cgroup, else the memory of the machine",
    "runtime/malloc.py": "malloc_trim, else nothing",
    "plan/memory.py": "/proc/cpuinfo, else no bfloat16 on CPUs",
    "plan/measurement.py": "/proc/stat, else the load",
    "api/dashboard/machine.py": "/proc/stat, else no utilisation",
    "store/database_counts.py": "/proc/PID/statm, else no bytes",
    "backends/with_remote_sampler.py": "/dev/shm, else the disk",
    "backends/torch/matmul.py": "/proc/cpuinfo, else oneDNN",
    "backends/distributed/rendezvous.py": "options of TCP, each if it is there",
    "exchange/checkpoint_job.py": "/proc/self/oom_score_adj, else the process is ended like any other",
    "batch/worker/logs.py": "fallocate and /proc/self/fd, else a log has no limit",
    "batch/pools/ray_actor.py": "/proc/PID, else nothing is swept",
}
"""Modules that use what only Linux has, and what they do elsewhere."""

OF_MODULES = {name for names in without_linux.HIDDEN.values() for name in names.split()}
ANYWHERE = {*without_linux.MISSING_NAMES, "prctl", "malloc_trim", "fallocate", "ru_maxrss"}
PATHS = ("/proc/", "/sys/", "/dev/shm", "/run/")


def list_uses(tree: ast.AST) -> list[str]:
    """Names and paths in code that only Linux has."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    uses = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_of_module = isinstance(node.value, ast.Name) and node.value.id in without_linux.HIDDEN
            uses += [node.attr] if node.attr in ANYWHERE | (OF_MODULES if is_of_module else set()) else []
        elif isinstance(node, ast.ImportFrom) and node.module in without_linux.HIDDEN:
            uses += [alias.name for alias in node.names if alias.name in OF_MODULES]
        elif isinstance(node, ast.Constant) and isinstance(text := node.value, str) and id(node) not in docstrings:
            uses += [text] if text in ANYWHERE | OF_MODULES or text.startswith(PATHS) else []
    return uses


def test_what_only_linux_has_is_used_where_it_is_guarded() -> None:
    uses = {
        path.relative_to(SOURCE).as_posix(): names
        for path in SOURCE.rglob("*.py")
        if (names := list_uses(ast.parse(path.read_text())))
    }
    assert {name: names for name, names in uses.items() if name not in GUARDED} == {}
    assert GUARDED.keys() <= uses.keys(), "a module that no longer uses it needs no guard"
    assert list_uses(ast.parse("os.sched_getaffinity(0), memfd_create(), open('/proc/stat')")) == [
        "sched_getaffinity",
        "/proc/stat",
    ]


def test_a_log_has_no_limit_where_no_blocks_can_be_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_libc", object)
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100_000)
    logs.drop_oldest(path, 4096)
    assert path.stat().st_size == 100_000


def test_paths_of_sockets_are_short_under_a_long_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    name = wakeups.engine_mailbox("a" * 200, f"sampler-12-{'0' * 12}")
    for directory in ("/tmp", "/" + "t" * 24, "/var/folders/zz/zyxvpxvq6csfxvn_n0000000000000/T"):
        monkeypatch.setattr("tempfile.gettempdir", lambda directory=directory: directory)
        path = wakeups.socket_dir(Path("/data")) / name
        assert len(os.fsencode(path)) <= without_linux.MAX_SOCKET_PATH + len(str(os.getuid())) - 3
        assert path.is_relative_to("/tmp" if len(directory) > 25 else directory)


def test_no_interface_is_named_where_linux_does_not_list_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.engine_environment()["GLOO_SOCKET_IFNAME"] == "lo" or sys.platform != "linux"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert environment.network_interface("127.0.0.1") == ""
    assert "GLOO_SOCKET_IFNAME" not in environment.engine_environment(peer="127.0.0.1")


@pytest.mark.extended
def test_a_server_trains_and_samples_without_what_only_linux_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tmp_path / "start"
    start.mkdir()
    (start / "sitecustomize.py").write_text(without_linux.start_argument_of(SUPPORT))
    monkeypatch.setenv("PYTHONPATH", str(start))
    if _can_write(Path("/tmp")):  # sockets are there, for this is too long for them; `scripts/isolated` refuses it
        temporary = tmp_path / "var-folders-zz-zyxvpxvq6csfxvn_n0000000000000-T"
        temporary.mkdir()
        monkeypatch.setenv("TMPDIR", str(temporary))
    with (
        serving(tmp_path / "data") as server,
        tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service,
    ):
        model = service.create_lora_training_client("tinsmith/nano", rank=4, seed=1).result()
        tokens = list(range(20))
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": types.TensorData(data=tokens[1:], dtype="int64")},
        )
        losses = []
        for _ in range(3):
            losses.append(model.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"])
            model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        assert losses[-1] < losses[0]
        sampler = model.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=5, temperature=0.0)
        answer = sampler.sample(types.ModelInput.from_ints(tokens[:10]), 1, params).result()
        assert len(answer.sequences[0].tokens) == 5
        assert model.save_state("kept").result().path
        assert server.get("metrics").status_code == 200
    log = "".join(path.read_text() for path in (tmp_path / "data").rglob("*.log"))
    assert log.count("is hidden from Linux") >= 2, "the server and its engine"
    assert "(hidden)" not in log and "Traceback" not in log, log


def _can_write(directory: Path) -> bool:
    """Whether a file can be made there; permissions do not tell what Landlock refuses."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except PermissionError:
        return False
