"""`scripts/isolated`, under which every test and the demo run: private directories, no writes elsewhere, no remaining
processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "isolated"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux confines writes and adopts orphans")


def run_isolated(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), sys.executable, "-c", code]
    environment = {**os.environ, "ISOLATED_GRACE_S": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


def test_the_private_directories_are_empty_and_removed() -> None:
    process = run_isolated(
        "import os, pathlib, tempfile\n"
        "for name in ('HOME', 'TMPDIR', 'RAY_TMPDIR'):\n"
        "    directory = pathlib.Path(os.environ[name])\n"
        "    assert not list(directory.iterdir()), name\n"
        "    (directory / 'file').write_text('x')\n"
        "    print(directory)\n"
        "assert tempfile.gettempdir() == os.environ['TMPDIR']\n"
    )
    assert process.returncode == 0, process.stderr
    assert not any(Path(line).exists() for line in process.stdout.split())


def test_a_write_elsewhere_is_refused_where_it_is_tried(tmp_path: Path) -> None:
    existing = tmp_path / "existing"
    existing.write_text("kept")
    process = run_isolated(
        f"import pathlib, subprocess, sys\n"
        f"def refused(act):\n"
        f"    try:\n"
        f"        act()\n"
        f"    except PermissionError:\n"
        f"        return True\n"
        f"existing = pathlib.Path({str(existing)!r})\n"
        f"assert refused(lambda: existing.write_text('changed'))\n"
        f"assert refused(lambda: existing.with_name('new').write_text('x'))\n"
        f"assert refused(existing.unlink)\n"
        f"assert subprocess.run(['touch', str(existing.with_name('other'))], stderr=-3).returncode != 0\n"
        f"assert existing.read_text() == 'kept'\n"
    )
    assert process.returncode == 0, process.stderr
    assert list(tmp_path.iterdir()) == [existing]
    assert existing.read_text() == "kept"


def test_a_process_left_behind_is_named_ended_and_fails_the_run() -> None:
    process = run_isolated(
        "import os, subprocess\n"
        "os.environ['PYTEST_CURRENT_TEST'] = 'tests/test_x.py::test_y (call)'\n"
        "print(subprocess.Popen(['sleep', '300'], start_new_session=True).pid)\n"
    )
    assert process.returncode == 1
    pid = process.stdout.strip()
    assert f"left behind: process {pid}, started by tests/test_x.py::test_y (call): sleep 300" in process.stderr
    assert not Path(f"/proc/{pid}").exists()


def test_the_exit_status_is_that_of_the_command() -> None:
    assert run_isolated("raise SystemExit(7)").returncode == 7
    assert run_isolated("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").returncode == 137
